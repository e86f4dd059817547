"""The page of `families_table`, from its results."""

HEAD = """# Models

Every text family of this list as a small random model (two layers, width 32, 60 words: tests/families.py), measured
against the plain model of transformers, called for one sequence at a time. Made by `make families`.

| column | what is compared | equal up to |
|---|---|---|
| packs | log-probs, and a critic's values, of sequences in a pack and of each alone | {packed:g} |
| gradient | of one pack, of several, and of pairs, with that of each sequence alone, relative to it | {cuts:g} |
| sampler | log-probs of the hf engine's samples with the trainer's; a greedy batch with each prompt alone | {sampler:g} |
| LoRA | log-probs with adapters, and with the same merged; every adapter gets a gradient | {lora:g} |
| FSDP2, ZeRO 3 | how far one step moves each weight: two processes that read files, and one | {fsdp2:g} |
| sequence | the same of two processes that share the tokens of a pack | {sequence:g} |
| reload | log-probs of what was saved and loaded; weights are the same to the bit | {reload:g} |

Packs and gradient are in float64 where a family computes in it, all else in float32.

* *alone*: the family mixes the sequences of a pack, so it gets one at a time.
* *by length*: the engine batches prompts of one length only; *by row*: one row; *no cache*: it reads all tokens anew
  for each new one.

How a family is packed and sampled is found by a probe when a model is bound, or when an engine first samples. No list of
families is kept in the library.
"""
TITLES = {
    "packed": "packs", "cuts": "gradient", "sampler": "sampler", "lora": "LoRA", "fsdp2": "FSDP2",
    "zero3": "ZeRO 3", "sequence": "sequence", "reload": "reload",
}  # fmt: skip


def page(results):
    """The page in Markdown of what is in families.json."""
    from family_checks import BOUNDS

    families = results["families"]
    reasons = []
    lines = [
        "| family | " + " | ".join(TITLES.values()) + " |",
        "|---" * (len(TITLES) + 1) + "|",
    ]
    for kind in sorted(families, key=str.lower):
        cells = [_cell(families[kind].get(column), reasons) for column in TITLES]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    why = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join(
        [HEAD.format(**BOUNDS), *lines, "", _counts(families), "", *why, "", _where(results), ""]
    )


def _cell(entry, reasons):
    if entry is None:
        return ""
    note = entry["note"]
    if "value" not in entry:
        reason = " ".join(note.replace("|", "/").split())[:300]
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"
    number = f"{entry['value']:.0e}".replace("e-0", "e-") if entry["value"] else "0"
    if not entry["ok"]:
        number = f"**{number}**"
    return f"{number} {note}".strip()


def _counts(families):
    counts = []
    for column, title in TITLES.items():
        good = sum(cells.get(column, {}).get("ok", False) for cells in families.values())
        counts.append(f"{title} {good}")
    return f"Equal, of {len(families)} families: {', '.join(counts)}. The other cells:"


def _where(results):
    where = dict(results["about"])
    days = sorted({cell["date"] for cells in results["families"].values() for cell in cells.values()})
    hardware = f"{where.pop('cores')} cores of {where.pop('cpu')}"
    versions = ", ".join(f"{name} {version}" for name, version in where.items())
    return f"Measured {' to '.join(dict.fromkeys([days[0], days[-1]]))} on {hardware}; {versions}."
