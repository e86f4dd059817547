"""The page of `families_table`, from its results."""

import re

HEAD = """# Models

Each text family below as a small random model (two layers, width 32, 60 words), compared with the plain model
of transformers, which is called on one sequence at a time. `make families` measures new families.

| column | what is compared | equal up to |
|---|---|---|
| packs | log-probs, and a critic's values, of sequences in a pack and of each alone | {packed:g} |
| gradient | of one pack, of several, and of pairs, with that of each sequence alone | {cuts:g} of it |
| sampler | log-probs of the engine and the trainer; a greedy batch and each prompt alone | {sampler:g} |
| LoRA | log-probs with adapters, and with the same merged; all adapters get a gradient | {lora:g} |
| FSDP2, ZeRO 3 | how far a step moves each weight: two processes, from files, and one | {fsdp2:g} of it |
| sequence | the same of two processes that share the tokens of a pack | {sequence:g} of it |
| reload | log-probs of what was saved and loaded; weights are the same to the bit | {reload:g} |

Packs and gradient are in float64 where a family computes in it, all else in float32. The engine is hf.

* *alone*: the family mixes the sequences of a pack, so it gets one sequence at a time. BioGpt, Bloom, MPT and
  XGLM count positions over the whole pack; xLSTM rounds by the length of the rows in a batch, up to 3e-5.
* *by length*: the engine batches only prompts of equal length; *by row*: one row at a time; *no cache*: it
  reads all tokens again for each new one.

A probe finds how a family is packed and sampled, when a model is bound or an engine first samples; the
library keeps no list of families. Layers may change behind some number of tokens that the config names: a
window, a chunk, a step of temperature (Llama 4's `floor_scale`), other rotary factors. The probe asks once
more with these numbers made small, so that a few tokens lie on both sides of them.

Layers that carry a state from token to token (gated delta nets, Mamba, Mamba 2, lightning attention, RG-LRU,
RWKV, short convolutions) are transformers' own: for a pack each reads the sequences as rows of batches, which
are padded to at most twice their tokens, while attention, MLPs and experts read the pack. Where their kernels
are installed (flash-linear-attention, causal-conv1d) and keep to `seq_idx` and `cu_seq_lens_q`, the probe
finds that first, and the pack is one row: not run on a GPU yet. `tests/model/test_packed_states.py` holds
log-probs and gradients in float64 to 1e-10, to 5e-6 where a layer computes in float32; there also the newer
BailingHybrid, InklingText, LaraMini, Lfm3 and Qwen4ExpText. Sequence parallelism needs layers without states.
Of rows that begin alike, attention, MLPs and experts compute the common tokens once. A layer with a state
reads every row whole, since most have no way to begin with a state that has a gradient: a prompt costs it one
scan for each response. So a model of such layers alone (Mamba, RWKV) shares nothing, nor does one whose
kernels read the pack as one row.
On one core a pack of 8 rows of 32 tokens was scored 4.4 to 5.8 times as fast as by 8 forwards, of 128
tokens 2.2 to 4.7 times: there arithmetic takes most of it (`tests/bench/hybrid_packs.py`).

LongRoPE (Phi-3, Phimoe) has other rotary factors for all of a sequence as soon as it has more than
`original_max_position_embeddings` tokens. Such a model gets one sequence at a time, and samples prompts of
one length at a time; at the switch the engine drops its cache and reads all tokens again, as transformers'
`generate` does. The trainer scores a token that was sampled (its row has `old_logp`) as it was drawn: by the
short factors up to the switch, by the long ones behind it, which is one more forward. A row that was not
sampled is scored by one forward of the whole sequence, as transformers does. An engine of servers may decide
otherwise: keep `--max-new` below the switch where the gap check stops the run. Factors that grow with the
length (dynamic NTK) depend on the sequence alone, not on longer ones before it.
"""
TITLES = {
    "packed": "packs", "cuts": "gradient", "sampler": "sampler", "lora": "LoRA", "fsdp2": "FSDP2",
    "zero3": "ZeRO 3", "sequence": "sequence", "reload": "reload",
}  # fmt: skip


def page(results):
    """The page in Markdown of what is in families.json."""
    from family_checks import BOUNDS

    return "\n".join([HEAD.format(**BOUNDS), *table(results, TITLES)])


def table(results, titles):
    """The lines of a table of families x `titles`, with counts, reasons and where it was measured."""
    families = results["families"]
    reasons = []
    lines = ["| family | " + " | ".join(titles.values()) + " |", "|---" * (len(titles) + 1) + "|"]
    for kind in sorted(families, key=str.lower):
        cells = [_cell(families[kind].get(column), reasons) for column in titles]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    why = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return [*lines, "", _counts(families, titles), "", *why, "", _where(results), ""]


def _cell(entry, reasons):
    if entry is None:
        return ""
    note = entry["note"]
    if "value" not in entry:
        reason = _reason(note)
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"
    number = f"{entry['value']:.0e}".replace("e-0", "e-") if entry["value"] else "0"
    if not entry["ok"]:
        number = f"**{number}**"
    return f"{number} {note}".strip()


def _reason(note):
    """The message of an error, without what differs between families that answer alike."""
    note = " ".join(note.replace("|", "/").split())
    note = re.sub(r"^(\w+Error: )+", "", note)
    note = re.sub(r"(?<=missing: ).*", "...", note)
    note = re.sub(r"\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)\b", "it", note)
    return note[:200]


def _counts(families, titles):
    counts = []
    for column, title in titles.items():
        good = sum(cells.get(column, {}).get("ok", False) for cells in families.values())
        counts.append(f"{title} {good}")
    return f"Equal, of {len(families)} families: {', '.join(counts)}. The other cells:"


def _where(results):
    where = dict(results["about"])
    days = sorted({cell["date"] for cells in results["families"].values() for cell in cells.values()})
    hardware = f"{where.pop('cores')} cores of {where.pop('cpu')}"
    versions = ", ".join(f"{name} {version}" for name, version in where.items())
    return f"Measured {' to '.join(dict.fromkeys([days[0], days[-1]]))} on {hardware}; {versions}."
