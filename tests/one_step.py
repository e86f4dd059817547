"""The mains of the training scripts on one small batch and a tabular model, and the slopes of their losses.

All that a script decides is its own: options, rewards, advantages, weights, corrections and losses. Sampling,
judging, packing for devices, optimizers and files are not there.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_house import load_script

import rft_fn as rft
from rft_fn import packing, tree
from rft_fn.data.chat import Lesson
from rft_fn.loss.evaluate import evaluate
from rft_fn.reward.veto import read_veto, vetoed
from rft_fn.run import preferences, teachers
from rft_fn.run.setup import Model, Reference, Setup
from rft_fn.testing import cases

__all__ = [
    "AWAY",
    "NOW",
    "OUTPUTS",
    "PARTS",
    "REFERENCE",
    "SAMPLED",
    "SCRIPTS",
    "TEACHER",
    "apply",
    "c",
    "logps",
    "steps_of",
]

OUTPUTS = ("logp", "entropy", "value", "aux", "divergence")
SCRIPTS = {name: load_script(name) for name in ("grpo", "ppo", "dpo", "distill")}
STEP = {"steps": 1, "data": ("sort_digits:1",)}
GROUPS = STEP | {"prompts": 2, "group": 4, "max_new": 12}
OF = {
    "grpo": GROUPS,
    "ppo": GROUPS | {"minibatches": 1, "whiten": False, "gae_lambda": 1.0},
    "dpo": STEP,
    "distill": GROUPS | {"teacher": ("somewhere",), "loss": "sampled", "rl": 1.0},
}
# columns are the parts: their sum is the reward, and "form" varies little
PARTS = {
    "right": torch.tensor([[0.5, 2.0, -1.5, 2.5], [3.0, 0.2, -1.8, 0.4]]),
    "form": torch.tensor([[0.0, 0.1, 0.0, 0.1], [0.0, 0.1, 0.1, 0.0]]),
}

c = cases.case(3)
generator = torch.Generator().manual_seed(0)
REFERENCE = tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype), c.params)
TEACHER = tree.map(lambda x: x + 0.8 * torch.randn(x.shape, generator=generator, dtype=x.dtype), c.params)

# farther from the sampler than the case is, so that every limit has tokens beyond it
NOW = cases.log_probs(c.apply, c.params, c.exp)
SAMPLED = torch.where(c.exp.mask, (NOW - 2 * (NOW - c.exp.old_logp)).clamp(max=-0.01), 0)
AWAY = torch.where(c.exp.mask, NOW - SAMPLED, 0)
told: list = []  # what the student was told of its teachers


def logps(params, b):
    """Log-probs of all words [T, V] by the tabular model."""
    return (params["bigram"][b.tokens] + params["position"][b.pos]).log_softmax(-1)


def apply(params, b):
    """The tabular model, with a balance of experts, and the divergence from a teacher that it was told."""
    out = c.apply(params, b)
    share = logps(params, b).exp().square().sum(-1) * b.mask
    out = tree.replace(out, aux=share, expert_share=share.detach())
    if not told:
        return out
    theirs = (logps(TEACHER, b) / told[-1].temperature).log_softmax(-1)
    found = told[-1].divergence(logps(params, b), theirs) * b.mask
    return tree.replace(out, divergence=found, agreement=b.mask.double())


def rollout():
    exp, n = c.exp, len(c.exp.mask)
    return rft.Rollout(
        tokens=exp.tokens, mask=exp.mask, logp=SAMPLED, length=exp.length, group=torch.arange(n) // 4,
        truncated=torch.arange(n) % 3 == 0, version=torch.zeros(n, dtype=torch.long),
    )  # fmt: skip


def as_experience(x):
    """A rollout as what can be packed."""
    return x if isinstance(x, rft.Experience) else rft.experience(x, adv=0 * x.logp, w=0 * x.logp)


class Stub:
    """A strategy in one process without an optimizer, which keeps the slopes of every loss."""

    config = SimpleNamespace(seed=0)

    def __init__(self):
        self.seen = []

    def print(self, text):
        """Nothing."""

    def shard(self, exp, budget, *, unit=1, halves=None):
        return cases.whole(exp, unit)

    def export(self, state):
        return dict(state.params)

    @torch.no_grad()
    def score(self, apply, params, batch, budget, *, fields=("logp",), unit=1):
        packs = cases.whole(as_experience(batch), unit)
        outs = [apply(params, p) for p in packs]
        return rft.TokenOut(
            **{"logp": torch.zeros(0)}
            | {name: packing.unpack([getattr(x, name) for x in outs], packs, batch.tokens) for name in fields}
        )

    def grad(self, state, apply, loss_fn, packs):
        outs = [apply(state.params, p) for p in packs]
        slopes = {name: [] for name in OUTPUTS}
        metrics = {}
        for out, b in zip(outs, packs):
            leaves = {
                name: x.detach().requires_grad_() for name in OUTPUTS if (x := getattr(out, name)) is not None
            }
            loss, more = evaluate(loss_fn, tree.replace(out, **leaves), b)
            metrics = rft.metric.merge(metrics, more)
            found = torch.autograd.grad((b.w * loss).sum(), list(leaves.values()), materialize_grads=True)
            for name in OUTPUTS:
                x = dict(zip(leaves, found)).get(name)
                slopes[name].append(torch.zeros_like(out.logp) if x is None else x)
        loss, grads = cases.total_and_grad(loss_fn, apply, state.params, packs)
        self.seen.append(self.told(outs, slopes, packs))
        return grads, metrics | {"loss": rft.metric.sum(loss[None])}

    def told(self, outs, slopes, packs):
        """What went into a gradient, and the slopes of its loss, [B, S]; those of examples are summed."""
        own = [i for i, b in enumerate(packs) if not (b.extra and "ptx" in b.extra)]
        others = [float(slopes["logp"][i].sum()) for i in range(len(packs)) if i not in own]

        packs = [packs[i] for i in own]

        def rows(x):
            return packing.unpack([x[i].detach() for i in own], packs, c.exp.tokens)

        found = {f"d_{name}": rows(x) for name, x in slopes.items()}
        found |= {name: rows([getattr(x, name) for x in outs]) for name in ("logp", "entropy")}
        if outs[0].divergence is not None:
            found["divergence"] = rows([x.divergence for x in outs])
        for name in ("adv", "w", "mask", "old_logp", "ref_logp", "old_value", "ret"):
            if getattr(packs[0], name) is not None:
                found[name] = packing.unpack([getattr(b, name) for b in packs], packs, c.exp.tokens)
        found["d"] = torch.where(found["mask"], found["logp"] - found["old_logp"], 0)
        return SimpleNamespace(**found, examples=sum(others))

    def update(self, state, grads):
        moved = tree.map(lambda p, g: p - 0.3 * g, state.params, grads)
        return SimpleNamespace(params=moved, opt=None), {}


class Fixed(Setup):
    """A `Setup` whose data, engine and files are this module's."""

    source = property(
        lambda self: rft.collect.Source(
            strategy=self.st,
            samples=SimpleNamespace(generate=self.generate, save=list),
            dataset=None,
            judge=self.judge,
            sampling=rft.Sampling(max_new=12),
            seed=0,
            steps=9,
        )
    )

    def generate(self, prompts, keys, *, n, sampling, saved, on_row):
        return rollout() if n > 1 else rft.rollout.take(rollout(), [3, 5])

    def judge(self, responses, prompts, step):
        parts = PARTS if len(responses.mask) > 2 else {name: x[:, 1:2] for name, x in PARTS.items()}
        total, _ = vetoed(sum(parts.values()), parts, self.task.score.vetoes)
        return rft.reward.Judged(total, parts, [])

    def restore(self, state, loop):
        return state, loop

    def report(self, step, batch, reward, values):
        self.run.rows.append(values | {"reward": reward})
        return 0.0

    def evaluation(self, step):
        return {}

    def push(self, state, *, version):
        """Nothing."""

    checkpoint = finish = lambda *_, **__: None


def labelled(cfg, items):
    """The case as rows of dpo.py: pairs, or single responses that are desirable in turn."""
    mask = c.exp.mask
    weight = rft.weight.seq_mean if cfg.row.single else rft.weight.pair_mean
    kinds = {"desirable": ((torch.arange(len(mask)) % 2 == 0)[:, None] & mask).double()}
    return tree.replace(c.exp, w=weight(mask), extra=kinds if cfg.row.single else None)


class Member:
    """A teacher, whose log-probs are the tabular model's with other numbers."""

    spec = SimpleNamespace(name="")

    def __init__(self, st):
        self.st = st

    def score(self, state, rows):
        return {}, self.st.score(c.apply, TEACHER, rows, 0).logp, None


def steps_of(name, **given):
    """A run of a script: the gradients of its policy and of its critic, and the metrics of its steps."""
    script, st = SCRIPTS[name], Stub()
    run = SimpleNamespace(phase=lambda name: nullcontext(), write=lambda *_, **__: None, rows=[])
    cfg = script.Config(**OF[name] | given)
    told.clear()

    def setup(cfg, *, usual, anchor=False, greedy=False, **_):
        def state(params):
            return SimpleNamespace(params=tree.map(torch.clone, params), opt=None)

        model = Model(None, apply, state(c.params), lambda count: 1e-3)
        score = rft.reward.weighted(**{part: (lambda *_: [], 1.0) for part in PARTS})
        score = score.with_vetoes(*map(read_veto, getattr(cfg, "reward_veto", ())))
        task = SimpleNamespace(
            score=score, others={"ptx_data": None}, tokenizer=None, dataset=None, unseen=None
        )
        critic = model._replace(state=state(c.params))
        initial = Reference(apply, tree.map(torch.clone, REFERENCE)) if anchor else None
        return Fixed(cfg, st, run, task, model, critic, initial, None, None, None, greedy)

    prompts = [SimpleNamespace(columns={}) for _ in range(2)]
    lesson = Lesson(ids=[1, 2, 3], mask=[False, True, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rft.run, "setup", setup)
        patch.setattr(rft.run, "check_gap", lambda env, floor, *_: ({}, floor))
        recorder = SimpleNamespace(before=lambda *_: None, after=lambda *_: None)
        patch.setattr(rft.run, "token_log", lambda *_, **__: recorder)
        patch.setattr(rft.run, "load_teachers", lambda env: teachers.Teachers(env, [Member(st)]))
        patch.setattr(teachers.model, "read_window", lambda name: None)
        patch.setattr(teachers.model, "attach_teacher", lambda apply, *made: told.extend(made))
        patch.setattr(rft.optim, "count", lambda opt: 0)
        patch.setattr(rft.data, "draw", lambda *_, **__: (prompts, [0, 1]))
        patch.setattr(rft.data, "take", lambda *_, **__: (prompts, [0, 1]))
        patch.setattr(preferences, "experience", labelled)
        patch.setattr(preferences, "mismatched", labelled)
        patch.setattr(rft.data, "lessons", lambda *_, **__: [lesson])
        script.main(cfg)
    critic = [x for x in st.seen if x.d_value.any()]
    return SimpleNamespace(steps=[x for x in st.seen if not x.d_value.any()], critic=critic, rows=run.rows)
