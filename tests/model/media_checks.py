"""Measurements of a family that sees or hears, one function per column of docs/multimodal.md.

Each gives a number and a few words. It compares the library with the plain model of transformers, called for
one sequence at a time.
"""

import tempfile
import warnings
from functools import partial

import torch
from family_checks import (
    Measured,
    adapted,
    cut_gradients,
    from_folder,
    furthest,
    largest,
    moved,
    sampled,
    scored,
)
from sees_and_hears import FAMILIES, alone, batch
from sees_and_hears_more import MORE
from torch import nn

import rft_fn as rft
from rft_fn import model
from rft_fn.data import Prompt
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

KINDS = FAMILIES | MORE
# The largest number that is rounding. Float64 but where a family computes in float32 inside.
BOUNDS = {"packed": 1e-5, "cuts": 1e-5, "sampler": 1e-4, "fsdp2": 1e-3, "sequence": 1e-3, "lora": 1e-4}


def double(kind):
    """The widest type that a family computes in."""
    return torch.float32 if KINDS[kind].single else torch.float64


def definition(family, lm, exp):
    """The log-probs [B, S] of the plain model, called with each row."""
    rows = []
    for row, n in enumerate(exp.length.tolist()):
        logits = alone(family, lm, exp, row).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(-1, exp.tokens[row, 1:n, None])[:, 0]
        rows.append(nn.functional.pad(logp, (1, exp.tokens.shape[1] - n)))
    return torch.where(exp.mask, torch.stack(rows), 0)


# ------------------------------------------------------------------------------------------ one process


def packed(kind):
    """Log-probs of one pack, or of what a strategy cuts, against each row alone."""
    family = KINDS[kind]
    lm, exp, st = family.build(double(kind)), batch(family, family.rows()), get_fake_strategy()
    want = definition(family, lm, exp)
    got, note = scored(st, *st.bind(lm), exp)
    return Measured(largest(got, want), note)


def cuts(kind):
    """The gradient of one pack and of several against each row alone: |g - g'| / |g'|."""
    family = KINDS[kind]
    exp, ways = batch(family, family.rows()), [(1000, 1), (60, 1)]
    return cut_gradients(family.build(double(kind)), exp, partial(definition, family), ways)


def sampler(kind):
    """The engine's log-probs of its samples against the trainer's, and against its own scores."""
    family, prompts = KINDS[kind], []
    for i, kinds in enumerate(family.rows()):
        tensors, ids = family.sample(kinds, seed=i)
        tensors = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
        prompts.append(Prompt(ids=ids, text="", columns={}, index=i, media=tensors or None))
    return Measured(sampled(family.build(torch.float32), prompts, 128)[1])


def lora(kind):
    """Adapters in the linear layers of the text model against what they are merged into."""
    family = KINDS[kind]
    exp = batch(family, family.rows())
    plainly = lambda merged, exp: definition(family, merged, _narrow(exp))  # noqa: E731
    return adapted(family.build(torch.float32), exp, plainly)


def _narrow(exp):
    """The same batch with media in float32, as the plain model in float32 wants them."""
    narrow = {name: x.float() if x.is_floating_point() else x for name, x in exp.media.tensors.items()}
    return rft.tree.replace(exp, media=rft.tree.replace(exp.media, tensors=narrow))


# ------------------------------------------------------------------------------------------ two processes

BACKENDS = {"fsdp2": {"fsdp": True}, "sequence": {"sp_size": 2}}


def two(rank, column, kind, folder):
    """The largest difference between how weights move on two processes and on one, of the largest movement.

    Both start from files. The batch has one row more of words than of media.
    """
    warnings.simplefilter("ignore")
    family = KINDS[kind]
    exp = _narrow(batch(family, [*family.rows(), [], []]))
    got = moved(get_strategy(StrategyConfig(**BACKENDS[column])), from_folder(folder, meta=True), exp, 70)
    return furthest(got, moved(get_fake_strategy(), from_folder(folder), exp, 70))


def write(kind, folder):
    """A small model as a folder."""
    model.save(folder, KINDS[kind].build(torch.float32), None)


def on_two(kind, column, run):
    """`two` on processes that `run(world, function, *args)` starts."""
    with tempfile.TemporaryDirectory() as folder:
        write(kind, folder)
        return Measured(max(run(2, "media_checks:two", column, kind, folder)))


CHECKS = {f.__name__: f for f in (packed, cuts, sampler, lora)}  # on one process
COLUMNS = ("packed", "cuts", "sampler", *BACKENDS, "lora")
