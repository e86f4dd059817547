"""Makes the section "Equivalence" of docs/algorithms.md.

From trl.json, scales.json, field.json and the rows of equivalence.py and other_rows.py:

    cd tests && python -m golden.make_table
"""

import json
import re
from pathlib import Path

import torch
from golden import batch
from golden.compare import FOLDER, GOLDEN, SCALED, Relation, against, at_scale, relation
from golden.equivalence import SECTIONS, Row, Terms
from golden.other_rows import OTHERS

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- equivalence:begin -->", "<!-- equivalence:end -->"
FIELD = json.loads((FOLDER / "field.json").read_text())

INTRO = """\
The tables compare the settings of other systems with our calls. "Our call" gives the same loss and the same
gradient with respect to the log-probs (for advantages, the same values), to 1e-10 in float64; a test checks
every row. The three numbers compare TRL's gradient a with the gradient b of the call in the last column, or
else of our call: |a - b| / |b|, cosine, |a| / |b|. The batch has 16 responses of 2 to 12 tokens with
log-ratios of scale 0.3. The size of a difference depends on the batch, its existence does not.

The column "at 0.05, 0.3, 1.5" has the same relative error with log-ratios of these scales, on a batch in
which a third of the tokens are a tool's and one response has no token in mask. There too our call gives the
same gradient at every scale; a test checks that. †: TRL's mean over responses counts those without a token
in mask, ours leaves them out, so TRL's gradient is ours times 15 / 16 there, and the error is without that
factor. RLOOTrainer has no mask of tool tokens: its batch has no tool, and a response is empty because it was
cut; PPOTrainer has neither.

A weight takes [B, S], a loss the flat stream of tokens, and the total is the sum of their product; `...`
stands for the tensors that the function takes. Sequence-level rows have epsilon=0.1, epsilon_high=0.12 if
they name none. DAPO's formula, taken literally, divides by the tokens of one question's responses; TRL and
`weight.token_mean` divide by those of the batch.
"""

OTHERS_INTRO = """\
### verl, OpenRLHF, AReaL

From PyPI, all Apache-2.0: verl {verl} (`verl/trainer/ppo/core_algos.py`; one row {old}), OpenRLHF
{openrlhf} (`openrlhf/models/loss.py`), AReaL {areal} (`areal/utils/functional/functional.py`), run by
`tests/golden/verl_losses.py` and `other_losses.py` ({date}). The relative error compares their gradient with
that of the call in the last column, or else of our call, on the batch with tool tokens and an empty
response. Our call gives their gradient at every scale, to 1e-10, or 3e-8 where they add 1e-8 to a count of
tokens. Estimators are compared by the gradient of -A logp. GSPO has limits 0.1 and 0.12.

| system | setting | our call | at 0.05, 0.3, 1.5 | where it differs |
|---|---|---|---|---|
"""

RECORDED = """\
### Other systems, recorded

{note}

| system | setting | our call | compared with | rel. error | cosine | norm | evidence | where it differs |
|---|---|---|---|---|---|---|---|---|
"""


TENSORS = [
    "logp, old_logp, adv, mask, seq, num_seqs",
    "logp, near_logp, adv, mask, seq, num_seqs",
    "logp, old_logp, adv",
    "chosen, rejected, ref_chosen, ref_rejected",
]


def code(source: str) -> str:
    for names in TENSORS:
        source = source.replace(f"({names}", "(...")
    return f"`{source}`"


def call(terms: Terms) -> str:
    if isinstance(terms, str):
        return code(terms)
    whole = [t for t in terms if "part ==" not in t[0]]
    pieces = [t for t in terms if "part == 0" in t[0]]  # one of the micro-batches, which are alike
    out = [f"{code(w)} · {code(each)}" for w, each in whole]
    one = lambda w: code(w.replace("(part == 0)", "part"))  # noqa: E731
    return " + ".join(out + [f"the sum over micro-batches of {one(w)} · {code(each)}" for w, each in pieces])


def compared(row: Row) -> str:
    """The call that the numbers compare with, without the parts that it shares with our call."""
    if isinstance(row.paper, str) or len(row.paper) > 1 or isinstance(row.ours, str) or len(row.ours) > 1:
        return call(row.paper)
    (w, each), (our_w, our_each) = row.paper[0], row.ours[0]
    return code(w) if each == our_each else code(each) if w == our_w else call(row.paper)


def numbers(relation: Relation) -> str:
    if relation.error < 1e-9:
        return "0 | 1 | 1"
    return f"{relation.error:.3g} | {relation.cosine:.3f} | {relation.norm:.3f}"


def scales(row: Row) -> str:
    """The relative error at each scale, with a dagger where the empty response counts in a mean of theirs."""
    if row.key not in SCALED["entries"]:
        return ""
    target = row.ours if row.paper is None else row.paper
    errors = [relation(*at_scale(row, target, scale)).error for scale in batch.SCALES]
    weights = "" if isinstance(row.ours, str) else " ".join(w for w, _ in row.ours)
    dagger = " †" if row.counts and re.search(r"seq_mean|seq_sum|constant", weights) else ""
    return ", ".join("0" if e < max(1e-9, row.tol) else f"{e:.2g}" for e in errors) + dagger


def line(row: Row) -> str:
    ours = call(row.ours)
    let = "; ".join(f"`{name} = {source}`" for name, source in row.let if name != "part")
    if let:
        ours += f" with {let}" if len(row.let) < 3 else " (names: tests/golden/equivalence.py)"
    rest = f"; against {compared(row)}" if row.paper is not None and len(row.let) < 3 else ""
    found = numbers(against(row, row.ours if row.paper is None else row.paper))
    return f"| {row.setting} | {ours} | {found} | {scales(row)} | {row.differs}{rest} |"


def other_line(system: str, row: Row) -> str:
    names = "; ".join(f"`{name} = {source}`" for name, source in row.let)
    ours = call(row.ours) + (f" with {names}" if len(row.let) == 1 else "")
    ours += " (names: tests/golden/other_rows.py)" if len(row.let) > 1 else ""
    rest = f"; against {compared(row)}" if row.paper is not None and not row.let else ""
    return f"| {system} | {row.setting} | {ours} | {scales(row)} | {row.differs}{rest} |"


def others() -> str:
    made = SCALED["made"]
    versions = {k: made[k][k] for k in ("verl", "openrlhf", "areal")} | {"old": made["verl-old"]["verl"]}
    lines = [other_line(system, row) for system, rows in OTHERS.items() for row in rows]
    return OTHERS_INTRO.format(**versions, date=made["verl"]["date"]) + "\n".join(lines) + "\n"


def table(title: str, rows: list[Row]) -> str:
    columns = (
        "TRL | our call | rel. error | cosine | norm | at 0.05, 0.3, 1.5 | where it differs from the paper"
    )
    return "\n".join(
        [f"### {title}\n", f"| {columns} |", "|---|---|---|---|---|---|---|", *map(line, rows), ""]
    )


def field_line(row: dict) -> str:
    number = lambda x: "" if x is None else f"{x:.4g}"  # noqa: E731
    cells = [f"{row['system']} ({row['commit']}, {row['date']})", row["setting"]]
    cells += [f"`{row['ours']}`", row["against"]]
    cells += [number(row[k]) for k in ("error", "cosine", "norm")] + [row["evidence"], row["differs"]]
    return f"| {' | '.join(cells)} |"


def section() -> str:
    made = GOLDEN["made"]
    runs = " and ".join(f"trl {m['trl']} ({m['date']}, torch {m['torch']})" for m in made.values())
    source = f"TRL: {GOLDEN['source']}, {GOLDEN['licence']}, run by `tests/golden/trl_losses.py`: {runs}.\n"
    tables = [table(title, rows) for title, rows in SECTIONS.items()]
    recorded = RECORDED.format(note=FIELD["note"]) + "\n".join(map(field_line, FIELD["rows"])) + "\n"
    return "\n".join([INTRO, source, *tables, others(), recorded])


def page(text: str) -> str:
    """The page with the section between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{section()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if not PAGE.exists():
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(f"# Algorithms\n\n## Equivalence\n\n{BEGIN}\n{END}\n")
    PAGE.write_text(page(PAGE.read_text()))
