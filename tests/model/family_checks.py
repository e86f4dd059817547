"""Measurements of a family of models, one function per column of the table.

Each gives a number and a few words. It compares the library with the plain model of transformers, called for
one sequence at a time.
"""

import copy
import tempfile
import warnings
from typing import NamedTuple

import tiny
import torch
from families import SINGLE, VOCAB, small
from tiny import definition
from torch import nn

import rft_fn as rft
from rft_fn import engine, metric, model, optim, packing, rng, tree, weight
from rft_fn.engine.hf.probe import find_cache_support
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy


class Measured(NamedTuple):
    """One cell of the table."""

    value: float
    note: str = ""


# The largest number that is rounding. Float64 but where a family computes in float32 inside.
BOUNDS = {
    "packed": 1e-5,
    "cuts": 1e-5,
    "sampler": 1e-4,
    "lora": 1e-4,
    "fsdp2": 1e-3,
    "zero3": 1e-3,
    "sequence": 1e-3,
    "reload": 1e-5,
}


def rows(sizes, seed=0):
    """An Experience of rows of (prompt, response) tokens, with advantages."""
    g = torch.Generator().manual_seed(seed)
    pairs = [tuple(torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in size) for size in sizes]
    exp = packing.supervised(pairs)
    return tree.replace(exp, adv=torch.where(exp.mask, exp.tokens % 5 - 2.0, 0))


EXP = rows([(2, 5), (3, 7), (1, 4), (2, 2)])


def double(kind):
    """The widest type that a family computes in."""
    return torch.float32 if kind in SINGLE else torch.float64


def largest(got, want):
    """The largest difference of two tensors."""
    return float((got - want).detach().abs().max())


def scored(st, apply, params, exp, budget=1000, unit=1):
    """Log-probs [B, S] by the packs that a strategy cuts, and a note where it cuts off each row."""
    packs = st.shard(exp, budget, unit=unit)
    note = "alone" if len(packs) == len(exp.length) else ""
    return packing.unpack([apply(params, b).logp for b in packs], packs, exp.tokens), note


# ------------------------------------------------------------------------------------------ one process


def packed(kind):
    """Log-probs of one pack, or of what a strategy cuts, against each row alone; a critic's values too."""
    lm = small(kind, double(kind))
    plain, st = copy.deepcopy(lm), get_fake_strategy()
    got, note = scored(st, *st.bind(lm), EXP)
    return Measured(max(largest(got, definition(plain, EXP)), _values(kind, plain)), note)


def _values(kind, plain):
    """The same of a critic's values."""
    st = get_fake_strategy()
    critic = model.load_critic(small(kind, double(kind)))
    nn.init.normal_(critic.head.weight)
    body = getattr(plain, "model", plain.base_model)
    want = torch.zeros(EXP.tokens.shape, dtype=double(kind))
    for i, n in enumerate(EXP.length.tolist()):
        hidden = body(input_ids=EXP.tokens[i : i + 1, : n - 1], use_cache=False).last_hidden_state
        want[i, 1:n] = critic.head(hidden.to(critic.head.weight.dtype))[0, :, 0]
    apply, params = st.bind(critic)
    packs = st.shard(EXP, 1000)
    got = packing.unpack([apply(params, b).value for b in packs], packs, EXP.tokens)
    return largest(got, torch.where(EXP.mask, want, 0))


def cuts(kind):
    """The gradient of one pack, of several, and of pairs, against each row alone: |g - g'| / |g'|."""
    lm = small(kind, double(kind))
    return cut_gradients(lm, EXP, definition, [(1000, 1), (12, 1), (1000, 2)])


def cut_gradients(lm, exp, plainly, ways):
    """The gradient by each (budget, unit) against that of `plainly(plain model, exp)`."""
    plain, st = copy.deepcopy(lm), get_fake_strategy()
    apply, params = st.bind(lm)
    own = dict(plain.named_parameters())
    want = _gradient(plainly(plain, exp), exp, [own[name] for name in params])
    found = (_gradient(scored(st, apply, params, exp, *way)[0], exp, list(params.values())) for way in ways)
    return Measured(max(float((x - want).norm() / want.norm()) for x in found))


def _gradient(logp, exp, weights):
    """The gradient of the sum of log-probs times advantages, as one vector."""
    grads = torch.autograd.grad((logp * exp.adv).sum(), weights, allow_unused=True)
    parts = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights)]
    return torch.cat([x.flatten() for x in parts])


PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17], [18, 19]]


def sampler(kind):
    """The engine's log-probs of its samples against the trainer's, and against its own scores.

    Greedy samples of a batch have to be those of each prompt alone.
    """
    lm = small(kind, torch.float32)
    eng, worst = sampled(lm, PROMPTS, 64)
    _check_greedy(eng)
    return Measured(worst, word(find_cache_support(lm, 0)))


def sampled(lm, prompts, budget):
    """An engine, and the largest difference of its samples' log-probs, the trainer's, and its own scores."""
    sampling = rft.Sampling(temperature=0.9, max_new=8)
    keys = [rng.fold_in(0, i) for i in range(len(prompts))]
    eng, st = engine.hf(copy.deepcopy(lm), tiny.tokenizer()), get_fake_strategy()
    r = eng.generate(prompts, keys, n=3, sampling=sampling)
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    apply, params = st.bind(copy.deepcopy(lm), sampling=sampling)
    packs = st.shard(exp, budget)
    trainer = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    return eng, max(largest(r.logp, trainer), largest(r.logp, eng.score(r, sampling=sampling)))


def _check_greedy(eng):
    greedy = rft.Sampling(temperature=0, max_new=6)
    together = eng.generate(PROMPTS, list(range(len(PROMPTS))), n=1, sampling=greedy)
    for i, prompt in enumerate(PROMPTS):
        alone = eng.generate([prompt], [0], n=1, sampling=greedy)
        got = together.tokens[i, : together.length[i]].tolist()
        want = alone.tokens[0, : alone.length[0]].tolist()
        if got != want:
            raise AssertionError(f"greedy in a batch {got[len(prompt) :]}, alone {want[len(prompt) :]}")


def word(way):
    """How a family is batched, in the words of the table."""
    if way.padded:
        return ""
    if way.rows is None:
        return "no cache"
    return "by row" if way.single else "by length"


def lora(kind):
    """Adapters in every linear layer against what they are merged into; all of them get a gradient."""
    return adapted(small(kind, torch.float32), EXP, definition)


def adapted(lm, exp, plainly):
    """Log-probs with adapters, against `plainly(merged model, exp)`."""
    lm = model.apply_lora_configuration(lm, 4, 8.0)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(len(name))
            nn.init.normal_(p, std=0.1)
    merged, st = copy.deepcopy(lm).merge_and_unload().eval(), get_fake_strategy()
    apply, params = st.bind(lm)
    got, _ = scored(st, apply, params, exp)
    grads = torch.autograd.grad((got * exp.adv).sum(), list(params.values()), allow_unused=True)
    without = [n for n, g in zip(params, grads) if g is None or not g.any()]
    if without:
        raise AssertionError(f"{len(without)} of {len(params)} adapters without a gradient: {without[0]}")
    return Measured(largest(got, plainly(merged, exp)), f"{len(params) // 2} layers")


def reload(kind):
    """Logits of a model that was saved and loaded again."""
    lm = small(kind, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder, lm, None)
        again = model.load(folder, dtype=torch.float32).eval()
    names = {name: p for name, p in again.named_parameters()}
    for name, p in lm.named_parameters():
        if not torch.equal(p, names[name]):
            raise AssertionError(f"{name} differs by {largest(p, names[name]):.1e}")
    return Measured(largest(definition(lm, EXP), definition(again, EXP)))


# ------------------------------------------------------------------------------------------ two processes

BACKENDS = {
    "fsdp2": {"fsdp": True},
    "zero3": {
        "zero_stage": 3,
        # small tensors would stay whole on every process
        "extra": {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
    },
    "sequence": {"sp_size": 2},
}
UNEVEN = rows([(2, 5), (3, 7), (1, 4), (2, 2), (1, 6)])


def loss_fn(out, b):
    return -out.logp * b.adv


def moved(st, lm, exp=UNEVEN, budget=24):
    """The loss, and how far each weight moves in one step that is as long as the gradient."""
    apply, state = st.init(lm, optim.adamw(1e6, b1=0.0, b2=0.0, eps=1e6))
    before = {name: x.clone() for name, x in st.export(state)}
    packs = st.shard(exp, budget)
    grads, metrics = st.grad(state, apply, loss_fn, packs)
    state, _ = st.update(state, grads)
    step = {name: x - before[name] for name, x in st.export(state)}
    return {"loss": float(metric.results(metrics)["loss"]), **step}


def two(rank, column, folder):
    """The largest difference between how weights move on two processes and on one.

    It is relative to the largest movement. Both start from files.
    """
    warnings.simplefilter("ignore")
    got = moved(get_strategy(StrategyConfig(**BACKENDS[column])), from_folder(folder, meta=True))
    want = moved(get_fake_strategy(), from_folder(folder))
    return furthest(got, want)


def furthest(got, want):
    """The largest difference of the loss, and of a movement relative to the largest movement."""
    worst = abs(got.pop("loss") - want.pop("loss"))
    scale = max(float(x.abs().max()) for x in want.values())
    return max(worst, *(largest(got.get(name, torch.zeros_like(x)), x) / scale for name, x in want.items()))


def from_folder(folder, **options):
    return model.load(folder, dtype=torch.float32, **options)


def write(kind, folder):
    """A small model as a folder."""
    model.save(folder, small(kind, torch.float32), None)


def on_two(kind, column, run):
    """`two` on processes that `run(world, function, *args)` starts."""
    with tempfile.TemporaryDirectory() as folder:
        write(kind, folder)
        return Measured(max(run(2, "family_checks:two", column, folder)))


CHECKS = {f.__name__: f for f in (packed, cuts, sampler, lora, reload)}  # on one process
COLUMNS = ("packed", "cuts", "sampler", "lora", *BACKENDS, "reload")
