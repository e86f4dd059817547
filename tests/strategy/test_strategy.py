"""The local strategy: real gradients on one process, summed over packs, stepped in place, donated."""

import argparse
import re

import pytest
import tiny
import torch
from each_case import each
from test_fsdp2 import ANOTHER_APPLY

import rft_fn as rft
from rft_fn import model, optim, packing, strategy, tree, types, weight
from rft_fn.model.copies import Mover
from rft_fn.strategy import StrategyConfig


def experience(seed=0, rows=8):
    exp, g = tiny.experience(seed, rows), torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(exp.mask.shape, generator=g, dtype=torch.float64) * exp.mask  # noqa: E731
    return tree.replace(exp, old_logp=-3 + noise(), adv=noise(), w=weight.token_mean(exp.mask).double())


def loss_fn(out, b):
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv), {"logp": rft.metric.mean(out.logp, b.mask)}


def start(tx=None, **options):
    st = strategy.get_fake_strategy()
    return st, *st.init(tiny.llama(dtype=torch.float64, **options), tx or optim.adamw(1e-2))


def test_the_gradient_is_the_same_for_every_cut():
    """Micro-batches of one row, packs of any budget, one pack, two ranks: the
    same sum, and the same metrics."""
    st, apply, state = start()
    exp = experience()
    cuts = [packing.shard(exp, 24)[0], packing.shard(exp, 40)[0], [packing.pack(exp, range(8))]]
    cuts += [
        [packing.pack(exp, [i]) for i in range(8)],
        [p for part in packing.shard(exp, 30, world=2) for p in part],
    ]
    grads, metrics = zip(*(st.grad(state, apply, loss_fn, packs) for packs in cuts))
    norm = float(optim.global_norm(grads[0]))
    assert norm > 1e-3
    for g, m in zip(grads[1:], metrics[1:]):
        apart = tree.map(lambda a, b: a - b, g, grads[0])
        assert float(optim.global_norm(apart)) <= 1e-12 * norm
        assert rft.metric.results(m) == pytest.approx(rft.metric.results(metrics[0]), rel=1e-12)


def test_rows_that_teach_nothing_add_nothing():
    st, apply, state = start()
    exp = experience()
    silent = tree.replace(exp, mask=exp.mask.clone().index_fill_(0, torch.tensor([2]), False))
    empty, _ = st.grad(state, apply, loss_fn, [packing.pack(silent, [2])])
    assert float(optim.global_norm(empty)) == 0
    nothing, metrics = st.grad(state, apply, loss_fn, [packing.pack(exp, [])])
    assert float(optim.global_norm(nothing)) == 0 and rft.metric.results(metrics)["loss"] == 0


def test_update_equals_torch_and_donates():
    st, apply, state = start(optim.adamw(1e-2, weight_decay=0.1))
    twin = tiny.llama(dtype=torch.float64)
    torch_opt = torch.optim.AdamW(
        [{"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0}], lr=1e-2,
    )  # fmt: skip
    twin_apply, twin_params = model.bind(twin)
    pack = packing.pack(experience(), range(8))
    for _ in range(3):
        grads, _ = st.grad(state, apply, loss_fn, [pack])
        old, (state, metrics) = (state, grads), st.update(state, grads)
        torch_opt.zero_grad()
        (pack.w * loss_fn(twin_apply(twin_params, pack), pack)[0]).sum().backward()
        torch_opt.step()
    assert rft.metric.results(metrics)["grad/norm"] > 0 and state.step == 3
    for name, p in twin_params.items():
        torch.testing.assert_close(state.params[name], p, rtol=1e-9, atol=1e-12)
    for read in (
        lambda: old[0].params,
        lambda: old[0].step,
        lambda: old[1]["model.norm.weight"],
        lambda: old[1].items(),
    ):
        with pytest.raises(tree.UseAfterDonate):
            read()


def test_the_module_is_the_state():
    """The step is in place: the module that was given to init has the new weights, and
    export names them as it does."""
    st = strategy.get_fake_strategy()
    lm = tiny.llama()
    apply, state = st.init(lm, optim.adamw(1e-2))
    before = lm.model.norm.weight.detach().clone()
    grads, _ = st.grad(state, apply, lambda out, b: -out.logp, [packing.pack(tiny.experience(), range(6))])
    state, _ = st.update(state, grads)
    assert not torch.equal(lm.model.norm.weight, before)
    exported = dict(st.export(state))
    assert set(exported) == {n for n, _ in lm.named_parameters()}
    assert torch.equal(exported["model.norm.weight"], lm.model.norm.weight)


@pytest.mark.parametrize("kind", ["plain", "trained beside adapters", "adapters off"])
def test_an_export_is_a_copy(kind):
    """No update changes a snapshot, whatever way a weight takes into it."""
    lm = tiny.llama()
    if kind != "plain":
        lm = model.apply_lora_configuration(lm, rank=2, alpha=4)
        for p in lm.parameters():
            p.requires_grad_()
    if kind == "adapters off":
        for layer in lm.modules():
            if hasattr(layer, "lora_A"):
                layer._active_adapter = []
    st = strategy.get_fake_strategy()
    _, state = st.init(lm, optim.adamw(1e-2))
    kept = dict(st.export(state))
    want = {name: x.clone() for name, x in kept.items()}
    state, _ = st.update(state, tree.map(torch.ones_like, state.params))
    assert all(torch.equal(x, want[name]) for name, x in kept.items())
    assert not any(torch.equal(x, want[name]) for name, x in st.export(state))


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_step():
    st, _, state = start()
    before = tree.map(torch.clone, state.params)
    grads = tree.map(lambda p: torch.full_like(p, float("nan")), state.params)
    state, metrics = st.update(state, grads)
    assert rft.metric.results(metrics)["grad/skipped"] == 1 and state.step == 1
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(state.params)))
    assert state.opt.count == 0


def test_only_the_apply_of_its_own_init_is_taken():
    """As on several processes: a script that works on one has to go on there."""
    st, apply, state = start()
    pack = packing.pack(experience(), range(8))
    others = [lambda p, b: apply(p, b), st.bind(tiny.llama())[0], model.bind(state.module)[0]]
    for tried in (state, strategy.fork(state)):
        for i, other in enumerate(others[:2]):
            with pytest.raises(ValueError, match=f"^{re.escape(ANOTHER_APPLY[i])}$"):
                st.grad(tried, other, loss_fn, [pack])
    with pytest.raises(ValueError, match=r"^apply: expected the one that init gave"):
        st.grad(state, others[2], loss_fn, [pack])


@pytest.mark.parametrize("tx", [torch.optim.AdamW, torch.optim.SGD(tiny.llama(1).parameters(), lr=1)])
def test_an_optimizer_of_torch_is_refused_by_name(tx):
    name = getattr(tx, "__name__", type(tx).__name__)
    line = f"tx: expected a Transform, such as optim.adamw(1e-6), got {name}; one of your own is "
    with pytest.raises(ValueError, match=f"^{re.escape(line)}Transform"):
        strategy.get_fake_strategy().init(tiny.llama(), tx)


def test_gradients_and_updates_may_be_plain_dicts():
    """They find their parameters by name, whatever their order."""

    def sgd(grads, state, params):
        return {name: -0.1 * grads[name] for name in sorted(grads, reverse=True)}, state

    st, apply, state = start(rft.Transform(lambda params: (), sgd, {"name": "sgd"}))
    before = tree.map(torch.clone, state.params)
    grads, _ = st.grad(state, apply, loss_fn, [packing.pack(experience(), range(8))])
    want = tree.map(lambda p, g: p - 0.1 * g, before, grads)
    state, _ = st.update(state, {name: grads[name] for name in sorted(grads, reverse=True)})
    assert all(torch.equal(p, want[name]) for name, p in state.params.items())


class Seen:
    """A transform that adds 100 x what it is given, and remembers its norm."""

    def __init__(self):
        self.norms = []
        self.tx = rft.Transform(lambda params: (), self.update, {"name": "seen"})

    def update(self, grads, state, params):
        self.norms.append(float(optim.global_norm(grads)))
        return tree.map(lambda g: 100 * g, grads), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.0, 0.25, 1e9])
def test_max_norm_limits_what_the_optimizer_is_given_and_not_what_it_makes_of_it(max_norm, dtype):
    """With Adam, whose steps do not depend on the scale of gradients, the two are told apart by nothing."""
    seen = Seen()
    st = strategy.get_strategy(StrategyConfig(max_norm=max_norm))
    _, state = st.init(tiny.llama(dtype=dtype), seen.tx)
    before = tree.map(lambda p: p.float().clone(), state.params)
    norm = float(optim.global_norm(state.params))
    given = tree.map(lambda p: p.detach().float().clone(), state.params)
    state, metrics = st.update(state, given)
    want = min(norm, max_norm or norm)
    assert norm > 0.25 and seen.norms == [pytest.approx(want, rel=1e-2)]
    moved = tree.map(lambda p, x: p.float() - x, state.params, before)
    assert float(optim.global_norm(moved)) == pytest.approx(100 * want, rel=1e-2)
    assert rft.metric.results(metrics)["grad/norm"] == pytest.approx(norm, rel=1e-2)


class Weight(torch.nn.Module):
    """A model of one number: log-probs are w times the position."""

    def __init__(self, dtype):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, b):
        return types.TokenOut(logp=torch.where(b.mask, self.w * (1 + b.pos), 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 7, 700])
def test_gradients_of_packs_add_up_whatever_their_number_and_type(dtype, count):
    """In bfloat16 a sum of ones ends at 256; sums of float64 have all of its digits."""
    st = strategy.get_fake_strategy()
    apply, state = st.init(Weight(dtype), optim.adamw(1e-3))
    b = packing.pack(tree.replace(experience(), w=experience().mask.to(dtype)), [0])
    each, _ = st.grad(state, apply, lambda out, b: out.logp, [b])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert each["w"].dtype == wide and float(each["w"]) != 0
    total, _ = st.grad(state, apply, lambda out, b: out.logp, [b] * count)
    assert total["w"].dtype == wide
    assert float(total["w"]) == pytest.approx(count * float(each["w"]), rel=1e-15 if wide == dtype else 1e-6)


def test_a_copy_that_cannot_learn_is_refused_and_a_fork_learns():
    """Gradients of 0 in silence would be the end of a population; a fork is one more member of it."""
    st, apply, state = start(optim.chain(optim.clip_by_global_norm(1e9), optim.adamw(1e-2)))
    pack = packing.pack(experience(), range(8))
    state, _ = st.update(state, st.grad(state, apply, loss_fn, [pack])[0])
    dead = tree.replace(state, params=tree.map(lambda p: p.detach().clone(), state.params))
    computed = tree.replace(state, params=tree.map(lambda p: p * 1, state.params))
    for copy in (dead, computed):
        with pytest.raises(ValueError, match=r"params: expected model.embed_tokens.weight .*fork"):
            st.grad(copy, apply, loss_fn, [pack])
    kept = tree.map(torch.clone, state.params)
    fork = strategy.fork(state)
    assert fork.step == 1 and fork.opt[1].count == 1 and fork.tx is state.tx
    for _ in range(2):
        grads, _ = st.grad(fork, apply, loss_fn, [pack])
        fork, metrics = st.update(fork, grads)
        assert rft.metric.results(metrics)["grad/norm"] > 0
    assert all(torch.equal(kept[n], p) for n, p in state.params.items())  # it stands where it was
    for _ in range(2):
        state, _ = st.update(state, st.grad(state, apply, loss_fn, [pack])[0])
    assert all(
        torch.equal(fork.params[n], p) for n, p in state.params.items()
    )  # and goes where the fork went
    assert all(torch.equal(a, b) for a, b in zip(fork.opt[1].v.values(), state.opt[1].v.values()))


def test_the_step_of_a_gpu_is_that_of_a_cpu(monkeypatch):
    """It is in place, with torch's fused kernel: the same weights and moments, and a bad step is skipped."""
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))
    ends = []
    for on_gpu in (False, True):
        monkeypatch.setattr(rft.strategy.step, "_on_gpu", lambda params, grads, x=on_gpu: x)
        st, apply, state = start(tx)
        for factor in (1.0, 1.0, torch.nan, 1.0):
            grads, _ = st.grad(state, apply, loss_fn, packing.shard(experience(), 40)[0])
            state, metrics = st.update(state, tree.map(lambda g, x=factor: g * x, grads))
            assert rft.metric.results(metrics)["grad/skipped"] == (factor != 1)
        ends.append(state)
    assert ends[0].opt[1].count == ends[1].opt[1].count == 3
    for a, b in zip(tree.leaves(ends[0]), tree.leaves(ends[1])):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_on_the_host_of_a_gpu_is_that_without_adam_offload(dtype, monkeypatch):
    """Gradients and weights go to the host, which steps in place, and the weights come back."""
    there = []
    finished = []
    mover = Mover(lambda x: there.append(x.clone()) or there[-1], torch.clone, lambda: finished.append(1))
    monkeypatch.setattr(rft.strategy.step, "_on_gpu", lambda params, grads: True)
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))
    ends = []
    for options in ({}, {"adam_offload": True}):
        monkeypatch.setattr(rft.strategy.step, "mover_of", lambda device, x=options: mover if x else None)
        st = rft.strategy.get_strategy(StrategyConfig(**options))
        apply, state = st.init(tiny.llama(dtype=dtype), tx)
        there.clear(), finished.clear()
        for _ in range(3):
            grads, _ = st.grad(state, apply, lambda out, b: -out.logp, packing.shard(experience(), 40)[0])
            state, _ = st.update(state, grads)
        ends.append(state)
        assert len(there) == (3 * 2 * len(state.params) if options else 0)
        assert len(finished) == (3 if options else 0)
    for a, b in zip(tree.leaves(ends[0]), tree.leaves(ends[1])):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_loss_without_parameters_has_a_gradient_of_zero():
    st, apply, state = start()
    for loss in (lambda out, b: out.logp.detach(), lambda out, b: torch.ones_like(out.logp)):
        grads, _ = st.grad(state, apply, loss, [packing.pack(experience(), range(8))])
        assert list(grads) == list(state.params) and float(optim.global_norm(grads)) == 0


def test_a_loss_that_reduces_is_refused():
    st, apply, state = start()
    with pytest.raises(ValueError, match=r"loss: expected \[T\] = \[\d+\], .*, got \[\]; "):
        st.grad(state, apply, lambda out, b: out.logp.mean(), [packing.pack(experience(), [0])])


def test_frozen_parameters_stay():
    st = strategy.get_fake_strategy()
    lm = tiny.llama()
    lm.model.embed_tokens.requires_grad_(False)
    apply, state = st.init(lm, optim.adamw(1e-2))
    frozen = lm.model.embed_tokens.weight.clone()
    grads, _ = st.grad(state, apply, lambda out, b: -out.logp, [packing.pack(tiny.experience(), range(6))])
    assert "model.embed_tokens.weight" not in grads
    st.update(state, grads)
    assert torch.equal(lm.model.embed_tokens.weight, frozen)
    with pytest.raises(ValueError, match="expected trainable parameters, got none"):
        st.init(lm.requires_grad_(False), optim.adamw(1e-2))


def test_offload_and_reload_keep_every_number():
    st, apply, state = start()
    grads, _ = st.grad(state, apply, loss_fn, [packing.pack(experience(), range(8))])
    state, _ = st.update(state, grads)
    m = tree.map(torch.clone, state.opt.m)
    old, state = state, st.reload(st.offload(state))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(m), tree.leaves(state.opt.m)))
    with pytest.raises(tree.UseAfterDonate):
        _ = old.opt


def test_config():
    given = argparse.Namespace(sp_size=2, temperature=0.5)
    for args in (given, vars(given)):
        config = StrategyConfig.from_args(args)
        assert config.sp_size == 2 and config.backend == "local"
        assert config.get_extra_arg("temperature") == 0.5 and config.get_extra_arg("no", 3) == 3
    assert strategy.get_strategy().world == 1


# what the usage guide of the system that this project replaces tells people to type, but for --mixed_mm_data:
# data with and without media need no option
HIGH_THROUGHPUT = """--zero_stage 2 --engine_tp_size 4 --engine_mem_util 0.9 --enable_engine_sleep
    --micro_train_batch_size 1 --train_batch_size 128"""
MEMORY_EFFICIENT = """--fsdp --fsdp_cpu_offload --use_mp_opt --engine_tp_size 2 --engine_mem_util 0.85
    --enable_engine_sleep --micro_train_batch_size 1 --train_batch_size 64"""
VISION_LANGUAGE = """--fsdp --engine_tp_size 4 --packing_samples --enable_engine_sleep
    --plot_every 20"""


@pytest.mark.parametrize(
    "line, backend, values",
    [
        (HIGH_THROUGHPUT, "deepspeed", {"zero_stage": 2, "engine_tp_size": 4, "train_batch_size": 128}),
        (MEMORY_EFFICIENT, "fsdp2", {"fsdp_cpu_offload": True, "use_mp_opt": True, "engine_mem_util": 0.85}),
        (VISION_LANGUAGE, "fsdp2", {"packing_samples": True, "plot_every": 20}),
        ("", "local", {}),
        ("--disable_engine_sleep --no-packing_samples", "local", {"enable_engine_sleep": False}),
    ],
)
def test_command_lines_parse_as_they_stand(line, backend, values):
    args = strategy.add_arguments(argparse.ArgumentParser()).parse_args(line.split())
    config = StrategyConfig.from_args(args)
    assert config.backend == backend and not config.extra
    assert all(getattr(config, name) == value for name, value in values.items())
    defaults = strategy.add_arguments(argparse.ArgumentParser()).parse_args([])
    assert StrategyConfig.from_args(defaults) == StrategyConfig()


@each(
    "name, value, want",
    [
        ("bf16", "yes", "True or False"),
        ("fsdp", "false", "True or False"),
        ("fsdp", 1, "True or False"),
        ("zero_stage", "2", "an integer"),
        ("zero_stage", True, "an integer"),
        ("sp_size", 2.0, "an integer"),
        ("max_norm", "1.0", "a number"),
        ("timeout", True, "a number"),
        ("engine_type", None, "a text"),
        ("use_mp_opt", "auto", "True or False, or None"),
    ],
)
def test_a_value_of_another_type_is_refused(name, value, want):
    with pytest.raises(ValueError, match=f"^{name}: expected {want}.*, got {re.escape(repr(value))}$"):
        StrategyConfig.from_args({name: value})


def test_values_that_fit_are_taken():
    given = {"bf16": True, "use_mp_opt": None, "max_norm": 1, "timeout": 2.5, "zero_stage": 0}
    config = StrategyConfig.from_args(given)
    assert {name: getattr(config, name) for name in given} == given
    parser = strategy.add_arguments(argparse.ArgumentParser())
    for line, want in (("", None), ("--use_mp_opt", True), ("--no-use_mp_opt", False)):
        assert StrategyConfig.from_args(parser.parse_args(line.split())).use_mp_opt is want
    tyro = pytest.importorskip("tyro")
    for line, want in (("", None), ("--use-mp-opt True", True), ("--use-mp-opt False", False)):
        assert tyro.cli(StrategyConfig, args=line.split()).use_mp_opt is want


@each(
    "options, message",
    [
        ({"zero_stage": 4}, "zero_stage: expected an integer in [0, 3], got 4"),
        ({"sp_size": 0}, "sp_size: expected an integer in [1, inf), got 0"),
        ({"max_norm": -1.0}, "max_norm: expected a number in [0, inf), got -1.0"),
        ({"engine_mem_util": 1.5}, "engine_mem_util: expected a number in [0, 1], got 1.5"),
        ({"timeout": float("nan")}, "timeout: expected a number in [1, inf), got nan"),
        ({"max_norm": float("nan")}, "max_norm: expected a number in [0, inf), got nan"),
        ({"bf16": "yes"}, "bf16: expected True or False, got 'yes'"),
        ({"fsdp": True, "zero_stage": 2}, "fsdp, zero_stage: expected one of them"),
        ({"bf16": True, "use_mp_opt": True}, "bf16, use_mp_opt: expected one of them"),
        ({"sp_size": 2}, "sp_size: expected 1 on one process, got 2"),
        ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload: expected False on one process, got True"),
        ({"shard_size": 2}, "shard_size: expected 0 on one process, got 2"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        strategy.get_strategy(StrategyConfig(**options))
