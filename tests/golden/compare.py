"""A row of equivalence.py, evaluated: our value and gradient on the recorded batch, and how two gradients
relate."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import torch
from golden import batch as batches
from golden.equivalence import Row, Terms
from golden.scales import VARIANTS
from torch import Tensor

from rft_fn import advantage, logprob, loss, weight

FOLDER = Path(__file__).parent
GOLDEN = json.loads((FOLDER / "trl.json").read_text())
SCALED = json.loads((FOLDER / "scales.json").read_text())
LIBRARY = {"advantage": advantage, "logprob": logprob, "loss": loss, "weight": weight}
NAMES = LIBRARY | {"torch": torch, "math": math}
LEAVES = ("logp", "entropy", "value", "value_after", "score", "logits")


def batch(inputs: dict | None = None) -> dict[str, Tensor]:
    """The inputs (of trl.json, if none are given) by the names in the expressions: [B, S], rewards [2, N, G],
    8 pairs of responses."""
    x = {k: torch.tensor(v) for k, v in (inputs or GOLDEN["inputs"]).items()}
    x = {k: v.double() if v.is_floating_point() else v for k, v in x.items()}
    x |= {k: x[k].requires_grad_() for k in LEAVES}
    x["reward"] = x["reward"].view(2, 4, 4)
    x["adv"] = x["adv"].unsqueeze(-1) * x["mask"]
    for name, of in (("", "logp"), ("ref_", "ref_logp")):
        x[f"{name}chosen"], x[f"{name}rejected"] = (x[of] * x["mask"]).sum(-1).chunk(2)
    return x


def named(row: Row, inputs: dict | None = None) -> dict[str, Tensor]:
    """The batch with the names that the row gives."""
    x = batch(inputs)
    for name, source in row.let:
        x[name] = eval(source, NAMES | x)
    return x


def share(row: Row, w: str, mask: Tensor) -> Tensor | float:
    """The factor of a mean over responses in which one without tokens counts."""
    if row.counts and re.search(r"weight\.(seq_mean|seq_sum|constant)", w):
        return mask.any(-1).double().mean()
    return 1.0


def value(row: Row, terms: Terms, x: dict[str, Tensor]) -> Tensor:
    """The total of (w * loss).sum() over terms, or the value of the one expression."""
    if isinstance(terms, str):
        return eval(terms, NAMES | x)
    flat = {k: v.reshape(-1) for k, v in x.items() if isinstance(v, Tensor) and v.shape == x["mask"].shape}
    rows, length = x["mask"].shape
    flat |= {"seq": torch.arange(rows).repeat_interleave(length), "num_seqs": rows}
    total = torch.zeros(())
    for w, each in terms:
        weight_of = share(row, w, x["mask"]) * eval(w, NAMES | x)
        total = total + (weight_of.reshape(-1) * eval(each, NAMES | flat)).sum()
    return total


def gradients(out: Tensor, x: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The gradient of each leaf, as the files have it: in mask order."""
    grads = torch.autograd.grad(out, [x[k] for k in names], allow_unused=True, materialize_grads=True)
    return {k: g[x["mask"]] if g.shape == x["mask"].shape else g.flatten() for k, g in zip(names, grads)}


def evaluate(row: Row, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
    """(the value, the gradient of each recorded leaf) on the batch of trl.json."""
    x = named(row)
    out = value(row, terms, x)
    names = list(GOLDEN["entries"][row.key].get("grad", {}))
    if not names:
        return out.detach().flatten(), {}
    return out.detach(), gradients(out, x, names)


def at_scale(row: Row, terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """(their gradient, that of `terms`), all leaves as one vector, on `batch.scaled(scale)`."""
    entry = SCALED["entries"][row.key]
    theirs = {k: torch.tensor(v, dtype=torch.float64) for k, v in entry["grad"][str(scale)].items()}
    x = named(row, batches.scaled(scale, **VARIANTS[entry["variant"]]))
    ours = gradients(value(row, terms, x), x, list(theirs))
    return torch.cat(list(theirs.values())), torch.cat([ours[k] for k in theirs])


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
