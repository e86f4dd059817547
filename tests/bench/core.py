"""Makes the tables and the picture of docs/core.md: the files to read, and the way of one token through them.

python tests/bench/core.py     writes both; tests/test_core.py asserts that they are current
"""

import ast
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.house import code_lines
from bench.record import put

from rft_fn import tree
from rft_fn.algorithm.row import GRPO
from rft_fn.loss.gradient import gradient
from rft_fn.optim.adamw import adamw
from rft_fn.optim.updates import apply_updates
from rft_fn.packing.packs import pack
from rft_fn.types.batch import Rollout, TokenOut, experience

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "core.svg"
LIMIT = 1600  # lines of code

# in the order of reading
READ = (
    "types/batch",
    "types/functions",
    "advantage/groups",
    "weight/averages",
    "packing/packs",
    "logprob/ratio",
    "loss/policy",
    "loss/kl",
    "metric/kinds",
    "algorithm/with_metrics",
    "algorithm/row",
    "loss/evaluate",
    "loss/gradient",
    "optim/adamw",
    "optim/updates",
)
# what these stand on, to look up
GROUND = (
    "tree", "check", "limits", "precision", "segment", "types/distribution", "types/training", "types/media",
    "packing/units", "optim/in_place",
)  # fmt: skip


def path_of(name: str) -> Path:
    """Return the file of a name of the lists."""
    return ROOT / "rft_fn" / f"{name}.py"


def lines() -> dict[str, int]:
    """Return the lines of code of each file: with a token, and no docstring."""
    return {name: code_lines(path_of(name).read_text()) for name in (*READ, *GROUND)}


def summary(name: str) -> str:
    """Return the first sentence of a file."""
    text = ast.get_docstring(ast.parse(path_of(name).read_text())) or ""
    return text.partition("\n")[0]


def files() -> str:
    """Return the table of the files in the order of reading, and of what they stand on."""
    count = lines()
    out = ["| | file | what it is about | lines |", "|---|---|---|---|"]
    for i, name in enumerate((*READ, *GROUND), 1):
        number = i if name in READ else ""
        out.append(f"| {number} | [{name}.py](../rft_fn/{name}.py) | {summary(name)} | {count[name]} |")
    read, ground = (sum(count[name] for name in names) for names in (READ, GROUND))
    last = f"{len(READ)} files to read have {read} lines of code, {len(GROUND)} to look up have {ground}"
    return "\n".join([*out, "", f"{last}: {read + ground} together."])


ROWS = ([5, 6, 7, 1], [5, 6, 8, 1], [5, 6, 7, 7, 1], [5, 6, 9, 1])  # a prompt of two tokens, four responses
REWARD = (1.0, 0.0, 1.0, 0.0)
WORDS, LR = 10, 0.01


def model(params, b):
    """A table of logits, one row for each token that was read."""
    logp = params["table"][b.tokens].log_softmax(-1).gather(-1, b.target[:, None])[:, 0]
    return TokenOut(logp=torch.where(b.mask, logp, 0))


def way() -> dict[str, Any]:
    """Return the numbers of one token, the first of the first response, through a step of GRPO."""
    position = torch.arange(WORDS, dtype=torch.float64)
    old = torch.cos(position[:, None] * 3 + position)  # any logits
    params = tree.Named(table=torch.nn.Parameter(old + 0.1 * torch.sin(position[:, None] + 2 * position)))

    length = torch.tensor([len(row) for row in ROWS])
    tokens = torch.zeros(len(ROWS), 5, dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(ROWS):
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, 2 : len(row)] = True
    logp = torch.zeros(tokens.shape, dtype=torch.float64)
    logp[:, 1:] = old[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    zero = torch.zeros(len(ROWS), dtype=torch.long)
    rollout = Rollout(
        tokens=tokens,
        mask=mask,
        logp=torch.where(mask, logp, 0),
        length=length,
        truncated=zero.bool(),
        group=zero,
        version=zero,
    )

    # the step of README.md, without its engine and its processes
    adv = GRPO.advantage(torch.tensor([REWARD], dtype=torch.float64), rollout)
    exp = experience(rollout, adv=adv, w=GRPO.weight(mask).double())
    whole = pack(exp, range(4))
    with torch.no_grad():
        out = model(params, whole)
    loss, _ = GRPO.loss(out, whole)
    ratio = (out.logp - whole.old_logp).exp()
    grads, _ = gradient(params, model, GRPO.loss, [whole])
    cut, _ = gradient(params, model, GRPO.loss, [pack(exp, [0, 3]), pack(exp, [1]), pack(exp, [2])])
    tx = adamw(LR)
    of_grad = float(grads["table"][6, 7])
    updates, _ = tx.update(grads, tx.init(params), params)
    of_update = float(updates["table"][6, 7])
    apply_updates(params, updates)
    with torch.no_grad():
        after = model(params, whole)
    t = 1  # the place of its label: what was read is the token before it
    return {
        "token": float(whole.target[t]),
        "read": float(whole.tokens[t]),
        "sampler": float(rollout.logp[0, 2]),
        "adv": float(whole.adv[t]),
        "w": float(whole.w[t]),
        "logp": float(out.logp[t]),
        "ratio": float(ratio[t]),
        "ratios": {str(int(y)): float(r) for x, y, r in zip(whole.tokens, whole.target, ratio) if x == 6},
        "loss": float(loss[t]),
        "share": float((whole.w * loss)[t]),
        "grad": of_grad,
        "cut": float(cut["table"][6, 7]),
        "update": of_update,
        "after": float(after.logp[t]),
    }


def steps() -> tuple[tuple[str, str, str], ...]:
    """Return (where the token is, its number, the file) of each stage."""
    x = way()
    return (
        ("sampled: `tokens[0, 2]`, `logp[0, 2]`", f"{x['token']:.0f}, {x['sampler']:.4f}", "types/batch"),
        ("rewards 1, 0, 1, 0 to `adv`: (1 - 0.5) / std", f"{x['adv']:.4f}", "advantage/groups"),
        ("`w`: a mean of 4 means, 2 tokens in its row", f"{x['w']:.4f}", "weight/averages"),
        (
            "packed at t = 1, a label: read 6, target 7",
            f"{x['read']:.0f} -> {x['token']:.0f}",
            "packing/packs",
        ),
        ("the model: `out.logp[1]`", f"{x['logp']:.4f}", "types/functions"),
        ("`ratio`: exp(logp - old_logp)", f"{x['ratio']:.4f}", "logprob/ratio"),
        ("`loss[1]`: -min(ratio, clipped) adv", f"{x['loss']:.4f}", "loss/policy"),
        ("its part of the total: `w * loss`", f"{x['share']:.4f}", "loss/gradient"),
        ("gradient of logit (6, 7), one pack", f"{x['grad']:.6f}", "loss/gradient"),
        ("the same, in three packs", f"{x['cut']:.6f}", "loss/gradient"),
        ("update of that logit, lr 0.01", f"{x['update']:.4f}", "optim/adamw"),
        ("the model again: `out.logp[1]`", f"{x['after']:.4f}", "optim/updates"),
    )


def token() -> str:
    """Return the table of the way of one token."""
    out = ["| | the token | file |", "|---|---|---|"]
    return "\n".join([*out, *(f"| {what} | {number} | `{file}.py` |" for what, number, file in steps())])


def drawing() -> str:
    """Draw the way of the token as SVG: four stages a row, each with its file and its number."""
    width, high, across = 244, 92, 4
    out = []
    for i, (what, number, file) in enumerate(steps()):
        x, y = 12 + i % across * width, 12 + i // across * high
        label = what.replace("`", "").replace("->", "to").partition(":")[0].replace("<", "&lt;")
        out.append(
            f'<rect x="{x}" y="{y}" width="{width - 34}" height="{high - 22}" rx="5"/>'
            f'<text x="{x + 105}" y="{y + 19}">{label}</text>'
            f'<text class="n" x="{x + 105}" y="{y + 40}">{number.replace(">", "&gt;")}</text>'
            f'<text class="s" x="{x + 105}" y="{y + 58}">{file}.py</text>'
        )
        if i % across < across - 1:
            out.append(f'<text class="n" x="{x + width - 17}" y="{y + 40}">→</text>')
    rows = -(-len(steps()) // across)
    style = (
        "text{font:11px sans-serif;text-anchor:middle;fill:#1c2733}.n{font-size:15px;font-weight:bold}"
        ".s{font-size:10px;fill:#51606f}rect{fill:#e3edf7;stroke:#7b9cbf}"
    )
    size = f"{across * width - 10} {rows * high + 4}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><style>{style}</style>'
        f'<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>{"".join(out)}</svg>\n'
    )


if __name__ == "__main__":
    put("docs/core.md", {"files": files(), "token": token()})
    PICTURE.write_text(drawing())
