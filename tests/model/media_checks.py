"""Measurements of a family that sees or hears, one function per column of docs/multimodal.md.

Each gives a number and a few words. It compares the library with the plain model of transformers, called for
one sequence at a time.
"""

import copy
import tempfile
import warnings

import tiny
import torch
from family_checks import Measured, from_folder, furthest
from sees_and_hears import FAMILIES, alone, batch
from sees_and_hears_more import MORE
from torch import nn

import rft_fn as rft
from rft_fn import engine, metric, model, optim, packing, rng, weight
from rft_fn.data import Prompt
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

__all__ = ["BACKENDS", "BOUNDS", "CHECKS", "COLUMNS", "KINDS", "on_two", "two", "write"]

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


def _largest(got, want):
    return float((got - want).detach().abs().max())


def _scored(st, apply, params, exp, budget=1000):
    """Log-probs [B, S] by the packs that a strategy cuts, and a note where it cuts off each row."""
    packs = st.shard(exp, budget)
    note = ""
    if len(packs) == len(exp.length):
        note = "alone"
    return packing.unpack([apply(params, b).logp for b in packs], packs, exp.tokens), note


# ------------------------------------------------------------------------------------------ one process


def packed(kind):
    """Log-probs of one pack, or of what a strategy cuts, against each row alone."""
    family = KINDS[kind]
    lm = family.build(double(kind))
    exp = batch(family, family.rows())
    want = definition(family, lm, exp)
    st = get_fake_strategy()
    got, note = _scored(st, *st.bind(lm), exp)
    return Measured(_largest(got, want), note)


def cuts(kind):
    """The gradient of one pack and of several against each row alone: |g - g'| / |g'|."""
    family = KINDS[kind]
    lm = family.build(double(kind))
    plain = copy.deepcopy(lm)
    exp = batch(family, family.rows())
    st = get_fake_strategy()
    apply, params = st.bind(lm)
    own = dict(plain.named_parameters())
    want = _gradient(definition(family, plain, exp), exp, [own[name] for name in params])
    worst = 0.0
    for budget in (1000, 60):
        got, _ = _scored(st, apply, params, exp, budget)
        found = _gradient(got, exp, list(params.values()))
        worst = max(worst, float((found - want).norm() / want.norm()))
    return Measured(worst)


def _gradient(logp, exp, weights):
    grads = torch.autograd.grad((logp * exp.adv).sum(), weights, allow_unused=True)
    parts = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights)]
    return torch.cat([x.flatten() for x in parts])


def sampler(kind):
    """The engine's log-probs of its samples against the trainer's, and against its own scores."""
    family = KINDS[kind]
    lm = family.build(torch.float32)
    sampling = rft.Sampling(temperature=0.9, max_new=8)
    prompts = []
    for i, kinds in enumerate(family.rows()):
        tensors, ids = family.sample(kinds, seed=i)
        tensors = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
        prompts.append(Prompt(ids=ids, text="", columns={}, index=i, media=tensors or None))
    keys = [rng.fold_in(0, i) for i in range(len(prompts))]
    eng = engine.hf(copy.deepcopy(lm), tiny.tokenizer())
    r = eng.generate(prompts, keys, n=3, sampling=sampling)
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    st = get_fake_strategy()
    apply, params = st.bind(copy.deepcopy(lm), sampling=sampling)
    packs = st.shard(exp, 128)
    trainer = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    return Measured(max(_largest(r.logp, trainer), _largest(r.logp, eng.score(r, sampling=sampling))))


def lora(kind):
    """Adapters in the linear layers of the text model against what they are merged into."""
    family = KINDS[kind]
    exp = batch(family, family.rows())
    lm = model.apply_lora_configuration(family.build(torch.float32), 4, 8.0)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(len(name))
            nn.init.normal_(p, std=0.1)
    merged = copy.deepcopy(lm).merge_and_unload().eval()
    st = get_fake_strategy()
    apply, params = st.bind(lm)
    got, _ = _scored(st, apply, params, exp)
    grads = torch.autograd.grad((got * exp.adv).sum(), list(params.values()), allow_unused=True)
    without = [n for n, g in zip(params, grads) if g is None or not g.any()]
    if without:
        raise AssertionError(f"{len(without)} of {len(params)} adapters without a gradient: {without[0]}")
    return Measured(_largest(got, definition(family, merged, _narrow(exp))), f"{len(params) // 2} layers")


def _narrow(exp):
    """The same batch with media in float32, as the plain model in float32 wants them."""
    narrow = {name: x.float() if x.is_floating_point() else x for name, x in exp.media.tensors.items()}
    return rft.tree.replace(exp, media=rft.tree.replace(exp.media, tensors=narrow))


# ------------------------------------------------------------------------------------------ two processes

BACKENDS = {"fsdp2": {"fsdp": True}, "sequence": {"sp_size": 2}}


def loss_fn(out, b):
    return -out.logp * b.adv


def moved(st, lm, exp):
    """The loss, and how far each weight moves in one step that is as long as the gradient."""
    apply, state = st.init(lm, optim.adamw(1e6, b1=0.0, b2=0.0, eps=1e6))
    before = {name: x.clone() for name, x in st.export(state)}
    packs = st.shard(exp, 70)
    grads, metrics = st.grad(state, apply, loss_fn, packs)
    state, _ = st.update(state, grads)
    step = {name: x - before[name] for name, x in st.export(state)}
    return {"loss": float(metric.results(metrics)["loss"]), **step}


def two(rank, column, kind, folder):
    """The largest difference between how weights move on two processes and on one, of the largest movement.

    Both start from files. The batch has one row more of words than of media.
    """
    warnings.simplefilter("ignore")
    family = KINDS[kind]
    exp = _narrow(batch(family, [*family.rows(), [], []]))
    got = moved(get_strategy(StrategyConfig(**BACKENDS[column])), from_folder(folder, meta=True), exp)
    return furthest(got, moved(get_fake_strategy(), from_folder(folder), exp))


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
