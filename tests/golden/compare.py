"""A row of equivalence.py, evaluated: our value and gradient on the recorded batch, and how two gradients
relate."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from golden.equivalence import Row, Terms, vespo
from torch import Tensor

from rft_fn import advantage, logprob, loss, weight

FOLDER = Path(__file__).parent
GOLDEN = json.loads((FOLDER / "trl.json").read_text())
LIBRARY = {"advantage": advantage, "logprob": logprob, "loss": loss, "weight": weight}
NAMES = LIBRARY | {"torch": torch, "math": math, "vespo": vespo}
LEAVES = ("logp", "entropy", "value", "value_after", "score", "logits")


def batch() -> dict[str, Tensor]:
    """The recorded inputs, as the expressions name them: [B, S], rewards [2, N, G], 8 pairs of responses."""
    x = {k: torch.tensor(v) for k, v in GOLDEN["inputs"].items()}
    x = {k: v.double() if v.is_floating_point() else v for k, v in x.items()}
    x |= {k: x[k].requires_grad_() for k in LEAVES}
    x["reward"] = x["reward"].view(2, 4, 4)
    x["adv"] = x["adv"].unsqueeze(-1) * x["mask"]
    for name, of in (("", "logp"), ("ref_", "ref_logp")):
        x[f"{name}chosen"], x[f"{name}rejected"] = (x[of] * x["mask"]).sum(-1).chunk(2)
    return x


def value(terms: Terms, x: dict[str, Tensor]) -> Tensor:
    """The total of (w * loss).sum() over terms, or the value of the one expression."""
    if isinstance(terms, str):
        return eval(terms, NAMES | x)
    flat = {k: v.reshape(-1) for k, v in x.items() if isinstance(v, Tensor) and v.shape == x["mask"].shape}
    rows, length = x["mask"].shape
    flat |= {"seq": torch.arange(rows).repeat_interleave(length), "num_seqs": rows}
    total = torch.zeros(())
    for w, each in terms:
        total = total + (eval(w, NAMES | x).reshape(-1) * eval(each, NAMES | flat)).sum()
    return total


def evaluate(row: Row, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
    """(the value, the gradient of each recorded leaf), both as trl.json has them: in mask order."""
    x = batch()
    for name, source in row.let:
        x[name] = eval(source, NAMES | x)
    out = value(terms, x)
    names = list(GOLDEN["entries"][row.key].get("grad", {}))
    if not names:
        return out.detach().flatten(), {}
    grads = torch.autograd.grad(out, [x[k] for k in names], allow_unused=True, materialize_grads=True)
    cut = lambda g: g[x["mask"]] if g.shape == x["mask"].shape else g.flatten()  # noqa: E731
    return out.detach(), {k: cut(g) for k, g in zip(names, grads)}


class Relation(NamedTuple):
    """Of a vector a to a vector b."""

    error: float  # |a - b| / |b|
    cosine: float
    norm: float  # |a| / |b|


def relation(a: Tensor, b: Tensor) -> Relation:
    return Relation(
        ((a - b).norm() / b.norm()).item(), (a @ b / a.norm() / b.norm()).item(), (a.norm() / b.norm()).item()
    )


def recorded(row: Row) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's (value, gradients)."""
    entry = GOLDEN["entries"][row.key]
    out = torch.tensor(entry["loss"] if "loss" in entry else entry["value"], dtype=torch.float64)
    return out, {k: torch.tensor(v, dtype=torch.float64) for k, v in entry.get("grad", {}).items()}


def against(row: Row, terms: Terms) -> Relation:
    """TRL's gradient, or its advantages, to those of `terms`."""
    (theirs, their_grads), (ours, our_grads) = recorded(row), evaluate(row, terms)
    if not their_grads:
        return relation(theirs, ours)
    return relation(*(torch.cat([g[k] for k in their_grads]) for g in (their_grads, our_grads)))
