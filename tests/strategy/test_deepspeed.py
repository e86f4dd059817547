"""DeepSpeed ZeRO 1, 2, 3 over gloo: the same weights, metrics, scores and files as one plain process."""

import dataclasses
import gc
import re
from functools import cache

import conformance
import pytest
import ranks
import tiny
import torch
from torch import nn

import rft_fn as rft
from rft_fn import ckpt, model, optim, tree
from rft_fn.strategy import StrategyConfig, get_strategy

pytestmark = pytest.mark.slow

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

F32 = torch.float32
# DeepSpeed keeps tensors below 1e5 elements whole on every rank, which would be all of these models
SHARDED = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}


def strategy(stage, **options):
    zero = {"zero_stage": stage, "extra": SHARDED} if stage else {}
    return get_strategy(StrategyConfig(**zero, **options))


def linear(max_norm=1e9):
    """AdamW whose step is 1000 times the gradient, to 1e-6 of it."""
    return optim.chain(optim.clip_by_global_norm(max_norm), optim.adamw(1e9, b1=0.0, b2=0.0, eps=1e6))


def moves(st, lm, *batches):
    """The gradient that a step takes, seen in the weights; the ones before it are looked at and left."""
    apply, state = st.init(lm, linear())
    before = {n: x.clone() for n, x in st.export(state)}
    for packs in batches:
        grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
    state, _ = st.update(state, grads)
    return {n: (x - before[n]) / 1000 for n, x in st.export(state)}


def sums(st):
    """Gradients are sums over packs of several sizes and over ranks, of the last batch alone."""
    out = {}
    for budget in (24, 60, 400):
        first, second = (st.shard(conformance.experience(i, dtype=F32), budget) for i in range(2))
        got = moves(st, tiny.llama(tie_word_embeddings=budget != 60), first, second)
        out |= {f"{budget} {n}": x for n, x in got.items()}
    return out


def broken_off(st):
    """A loss that raises in the second of several packs leaves nothing in the gradients after it."""
    seen = []

    def fails(out, b):
        seen.append(b)
        if len(seen) == 2:
            raise KeyError("a slip")
        return conformance.loss_fn(out, b)

    lm, packs = tiny.llama(), st.shard(conformance.experience(0, dtype=F32), 24)
    apply, state = st.init(lm, linear())
    before = {n: x.clone() for n, x in st.export(state)}
    with pytest.raises(KeyError):
        st.grad(state, apply, fails, packs)
    state, _ = st.update(state, st.grad(state, apply, conformance.loss_fn, packs)[0])
    return {n: (x - before[n]) / 1000 for n, x in st.export(state)}


class Sometimes(nn.Module):
    """A table of log-probs, and a second one that only some batches use."""

    def __init__(self):
        super().__init__()
        v = len(tiny.tokenizer())
        draw = torch.randn(2, v, v, generator=torch.Generator().manual_seed(4))
        self.always, self.rarely = nn.Parameter(draw[0]), nn.Parameter(draw[1])

    def forward(self, pack):
        z = self.always[pack.tokens] + (self.rarely[pack.tokens] if pack.extra is None else 0)
        return rft.TokenOut(logp=z.log_softmax(-1).gather(-1, pack.target[:, None])[:, 0] * pack.mask)


def unused(st):
    """A parameter without a gradient in the second batch has one of 0, not the first batch's."""
    first, second = (conformance.experience(i, dtype=F32) for i in range(2))
    second = tree.replace(second, extra={"x": second.adv})
    return moves(st, Sometimes(), st.shard(first, 40), st.shard(second, 40))


def constant(st):
    """A loss without a gradient is a step of weight decay alone."""
    apply, state = st.init(tiny.llama(), optim.adamw(1e-2, weight_decay=0.1))
    packs = st.shard(conformance.experience(0, dtype=F32), 40)
    state, metrics = st.update(state, st.grad(state, apply, lambda out, b: out.logp.detach(), packs)[0])
    return {n: x.clone() for n, x in st.export(state)} | rft.metric.results(metrics)


def one_step(st, state, apply, i):
    packs = st.shard(conformance.experience(i, dtype=F32), 40)
    return st.update(state, st.grad(state, apply, conformance.loss_fn, packs)[0])


def start(st, tx=None, **options):
    return st.init(tiny.llama(**options), tx or optim.chain(conformance.adamw(), optim.ema(0.9)))


def resumed(st):
    """Interrupted after two steps of four and gone on in a fresh engine: bit for bit; of an actor and a
    critic in one folder."""
    folder = conformance.shared_folder(st)
    critic = lambda: st.init(model.Critic(tiny.llama(5)), conformance.adamw())  # noqa: E731
    (apply, state), (_, other) = start(st), critic()
    for i in range(4):
        if i == 2:
            st.save(f"{folder}/step_00000002", {"a": state, "b": other}, {"step": 2}, score=0.5)
        state, _ = one_step(st, state, apply, i)
    (apply, again), (_, like) = start(st), critic()
    saved = ckpt.latest(folder)
    states, extra = st.restore(saved, {"a": again, "b": like})
    assert extra == {"step": 2} and states["a"].step == 2 and ckpt.rotate(folder, keep=1) == []
    with pytest.raises(tree.UseAfterDonate):
        _ = again.params
    again = states["a"]
    for i in range(2, 4):
        again, _ = one_step(st, again, apply, i)
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(st.export(state), st.export(again)))
    with pytest.raises(ValueError, match="another model"):
        st.restore(saved, {"a": again})
    return {n: x.clone() for n, x in optim.ema_params(again.opt).items()}


def handed_over(st):
    """Two steps under ZeRO, two more under the strategy without it (FSDP2 on several processes), and the
    other way round."""
    folder, plain = conformance.shared_folder(st), get_strategy(StrategyConfig())
    for first, then in ((st, plain), (plain, st)):
        apply, state = start(first)
        for i in range(2):
            state, _ = one_step(first, state, apply, i)
        first.save(f"{folder}/{first.config.zero_stage}", state)
        apply, state = start(then)
        state, _ = then.restore(f"{folder}/{first.config.zero_stage}", state)
        for i in range(2, 4):
            state, _ = one_step(then, state, apply, i)
        assert state.step == 4
    return {n: x.clone() for n, x in then.export(state)}


def adapters(st):
    """Adapters on a frozen model, saved by peft and loaded again."""
    from peft import PeftModel

    torch.manual_seed(3)
    lm = model.apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    _, state, apply = conformance.train(st, lm, dtype=F32)
    folder = conformance.shared_folder(st)
    st.save_pretrained(folder, lm, tiny.tokenizer(), st.export(state))
    rft.dist.all_gather_object(None)  # the first rank writes; the others wait until it has
    packs = st.shard(conformance.experience(0, dtype=F32), 40)
    mine = model.score(apply, state.params, packs)
    theirs = model.score(*model.bind(PeftModel.from_pretrained(tiny.llama(), folder)), packs)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs))
    return {n: x.clone() for n, x in st.export(state)}


def narrow(st):
    """bfloat16: gradients near those of float32, steps that bfloat16 cannot make, and a checkpoint that goes
    on to the bit."""
    tx, folder, norms = optim.adamw(1e-5), conformance.shared_folder(st), []
    for more, kind in (({}, F32), ({"bf16": True}, F32), ({"use_mp_opt": True}, torch.bfloat16)):
        one = get_strategy(dataclasses.replace(st.config, **more))
        apply, state = start(one, tx)
        before = {n: x.clone() for n, x in one.export(state)}
        assert {x.dtype for x in before.values()} == {kind}
        state, metrics = one_step(one, state, apply, 0)
        moved = max(float((x - before[n]).abs().max()) for n, x in one.export(state))
        assert 5e-6 < moved < 2e-5 or kind is torch.bfloat16
        norms.append(rft.metric.results(metrics)["grad/norm"])
        one.save(f"{folder}/s", state)
        (apply_, again), ends = start(one, tx), []
        again, _ = one.restore(f"{folder}/s", again)
        for s, f in ((state, apply), (again, apply_)):
            for i in range(1, 3):
                s, _ = one_step(one, s, f, i)
            ends.append({n: x.clone() for n, x in one.export(s)})
        assert all(torch.equal(ends[0][n], ends[1][n]) for n in before)
        assert any(not torch.equal(ends[0][n], before[n]) for n in before)  # steps of 1e-5 add up
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=0.05) and norms[1] != norms[0]
    return {}


def placed(st):
    """adam_offload puts the optimizer on the host; offload and reload change nothing but places."""
    apply, state = start(get_strategy(dataclasses.replace(st.config, adam_offload=True)))
    if st.config.zero_stage:
        optimizer = state.opt[0].model.stage.optimizer
        assert optimizer.offload_optimizer if st.config.zero_stage == 3 else optimizer.cpu_offload
    old, state = state, st.offload(state)
    with pytest.raises(tree.UseAfterDonate):
        _ = old.opt
    state, _ = one_step(st, st.reload(state), apply, 0)
    return {n: x.clone() for n, x in st.export(state)}


def broken(st):
    """A NaN in every batch: after max_skips the run stops, and names the sequence at fault."""
    folder = conformance.shared_folder(st)
    st = get_strategy(dataclasses.replace(st.config, max_skips=2))
    st.session.set_dump_dir(folder)
    apply, state = start(st)
    exp = conformance.experience(0, dtype=F32)
    exp.adv[5] = exp.adv[5] * torch.nan
    before = {n: x.clone() for n, x in st.export(state)}
    state, metrics = st.update(state, st.grad(state, apply, conformance.loss_fn, st.shard(exp, 40))[0])
    assert rft.metric.results(metrics)["grad/skipped"] == 1 and state.skipped == 1 and state.step == 1
    assert all(torch.equal(x, before[n]) for n, x in st.export(state))
    st.save(f"{folder}/step_00000001", state)
    state, _ = st.restore(f"{folder}/step_00000001", state)
    assert state.skipped == 1 and state.step == 1  # a run that is taken up again is as patient
    with pytest.raises(rft.strategy.NonFinite, match="in 2 updates in a row"):
        st.update(state, st.grad(state, apply, conformance.loss_fn, st.shard(exp, 40))[0])
    rft.dist.barrier()
    pack, _, about = rft.strategy.load_fault(f"{folder}/fault_00000002")
    assert about["row"] == 5 and torch.isnan(pack.adv).any()
    state, metrics = one_step(st, state, apply, 0)  # and whoever catches it can go on
    assert rft.metric.results(metrics)["grad/skipped"] == 0
    return {n: x.clone() for n, x in st.export(state)}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_strategy_that_never_had_a_model_is_closed(stage):
    """In a process of its own, which no other engine of DeepSpeed has begun."""
    assert ranks.run(1, "test_deepspeed:closed_unused", stage) == [False]


def closed_unused(rank, stage):
    st = get_strategy(StrategyConfig(zero_stage=stage))
    st.close()
    st.close()
    return torch.distributed.is_initialized()


def refused(st):
    """What an engine cannot take is said with its name."""
    (apply, state), (other, _) = start(st), start(st)
    packs = st.shard(conformance.experience(0, dtype=F32), 40)
    mine, _ = st.grad(state, apply, conformance.loss_fn, packs)
    st.grad(state, apply, conformance.loss_fn, packs)
    foreign = tree.map(lambda p: torch.nn.Parameter(p.detach().clone()), state.params)
    ema = optim.chain(optim.ema(0.5), optim.adamw(1e-3))
    late = optim.chain(optim.adamw(1e-3), optim.clip_by_global_norm(1.0))
    custom = rft.Transform(lambda p: (), lambda g, s, p: (g, s), {"name": "lion"})
    for call, message in (
        (lambda: apply(foreign, packs[0]), "params: expected this module's own, got others: under ZeRO"),
        (lambda: st.update(state, mine), "grads: expected those of the last grad"),
        (lambda: st.grad(state, other, conformance.loss_fn, packs), "apply: expected the one that init gave"),
        (lambda: st.grad(state, apply, conformance.loss_fn, []), "packs: expected one or more, got none"),
        (lambda: st.grad(state, apply, lambda out, b: out.logp.mean(), packs), "a loss must not reduce"),
        (lambda: start(st, ema), "got ema in place 1"),
        (lambda: start(st, late), "got adamw in place 1"),
        (lambda: start(st, optim.chain(custom, optim.adamw(1e-3))), "got lion in place 1"),
        (lambda: start(st, optim.master_weights(optim.adamw(1e-3))), "got master_weights last"),
        (lambda: start(st, optim.partition(lambda n, p: "a", a=optim.adamw(1e-3))), "got partition last"),
        (lambda: start(st, optim.chain()), "tx: expected an adamw with zero_stage, got none"),
        (lambda: st.init(tiny.llama().requires_grad_(False), optim.adamw(1.0)), "trainable parameters, got"),
        (lambda: st.init(tiny.llama(dtype=torch.float64), optim.adamw(1.0)), "got one in float64"),
        (lambda: st.init(tiny.llama(dtype=torch.float16), optim.adamw(1.0)), "got one in float16"),
        (lambda: rft.strategy.fork(state), "state: expected one of the local strategy, got one of a module"),
        (
            lambda: st.init(tiny.llama(), optim.adamw(1.0), shard_size=5),
            "shard_size: expected 2 with zero_stage, got 5",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    newer, _ = st.grad(state, apply, conformance.loss_fn, packs)
    old, (state, _) = state, st.update(state, newer)
    for read in (lambda: old.params, lambda: old.step, lambda: newer.turn):
        with pytest.raises(tree.UseAfterDonate):
            read()
    return {}


OWN = {
    f.__name__: f
    for f in (
        sums,
        broken_off,
        unused,
        constant,
        resumed,
        handed_over,
        adapters,
        narrow,
        placed,
        broken,
        refused,
    )
}
ONLY_ZERO = {"narrow", "refused"}  # these have nothing to be compared with
SHARED = [c for c in conformance.CASES if c not in OWN]  # `narrow`: gradients cannot be looked at
# ppo: the critic's first gradients are rounding, which Adam makes steps of
# pairs: a reward of 0.2 is the difference of two sums of log-probs, tens of nats, in float32
CUTS = dict.fromkeys(("sums", "broken_off", "unused"), 2e-6) | {"ppo": 2e-4, "pairs": 1e-4}


def attempt(name, stage, shared=None):
    """What a case returns, or how it failed; cases of all backends have the strategy `shared`, if given."""
    if name not in OWN:
        return conformance.attempt(shared or strategy(stage), name, F32)
    try:
        return OWN[name](strategy(stage))
    except Exception:
        return {"error": conformance.traceback.format_exc()}


def on_ranks(rank, stages, names):
    """{(stage, case): results}; ranks that disagree are an error."""
    processes = rft.dist.begin(600.0)  # one group for all strategies, which come and go
    out = {}
    for stage in stages:
        shared = strategy(stage)
        for name in names:
            gc.freeze()  # stage 3 collects whenever an engine starts, and would look at those of all cases
            found = attempt(name, stage, shared)
            same = rft.dist.all_gather_object(conformance.digest(found))
            if len(set(same)) > 1 and "error" not in found:
                found = {"error": f"ranks disagree: {same}"}
            out[stage, name] = found
        shared.close()
    processes.close()
    return out


@cache
def expected(name):
    return attempt(name, 0)


# one process does what is not the same for every world size; two do everything
CASES = {1: ["grpo", "files", "resumed", "handed_over", "broken"], 2: [*SHARED, *OWN]}


@cache
def found(world):
    return ranks.run(world, "test_deepspeed:on_ranks", (1, 2, 3), CASES[world])


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("name", CASES[1])
def test_one_process_of_zero_is_one_without(name, stage):
    check_same(1, name, stage)


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("name", CASES[2])
def test_two_processes_are_as_one(name, stage):
    check_same(2, name, stage)


def check_same(world, name, stage):
    want = {} if name in ONLY_ZERO else expected(name)
    assert "error" not in want, want["error"]
    for out in found(world):
        got = out[stage, name]
        assert "error" not in got, got["error"]
        assert list(got) == list(want)
        for n, x in want.items():
            apart = (torch.as_tensor(got[n]) - torch.as_tensor(x)).double().norm()
            size = torch.as_tensor(x).double().norm()
            assert apart <= CUTS.get(name, 1e-5) * size + 1e-12, f"{n}: {float(apart / size)}"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sp_size": 2}, "sp_size: expected 1 with zero_stage, got 2; FSDP2 has it"),
        ({"shard_size": 2}, "shard_size: expected 0 with zero_stage, got 2"),
        ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload: expected False with zero_stage, got True"),
    ],
)
def test_options_that_it_does_not_have_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_strategy(StrategyConfig(zero_stage=2, **options))


def test_without_deepspeed_there_is_one_line(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'deepspeed>=0.19'")):
        get_strategy(StrategyConfig(zero_stage=1))
