"""Optimizers against their definition in float64 numpy, and against torch's own."""

import collections
import re
import types
from functools import partial

import numpy as np
import pytest
import ref
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import optim, tree
from rft_fn.optim import in_place

SHAPES = {"w": (3, 4), "b": (4,), "v": (2, 2, 2)}


def draw(seed, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return tree.Named(
        {n: (scale * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype) for n, s in SHAPES.items()}
    )


def copy(named):
    return tree.map(torch.clone, named)


def run(tx, params, grads):
    """Parameters and state after a step with each of `grads`."""
    params, state = copy(params), tx.init(params)
    for g in grads:
        updates, state = tx.update(copy(g), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def close(got, want, tol):
    for name in SHAPES:
        np.testing.assert_allclose(np.asarray(got[name]), np.asarray(want[name]), rtol=tol, atol=tol)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    steps=st.integers(1, 5),
    lr=st.floats(1e-4, 0.5),
    b1=st.sampled_from([0.0, 0.9]),
    b2=st.sampled_from([0.95, 0.999]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1e-6, 1.0]),
)
def test_adamw_against_the_definition(seed, steps, lr, b1, b2, weight_decay, scale):
    params, grads = draw(seed), [draw(seed + 1 + i, scale=scale) for i in range(steps)]
    schedule = lambda t: lr / (t + 1)  # noqa: E731
    tx = optim.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay)
    got, state = run(tx, params, grads)
    want = ref.adamw(params, grads, schedule, b1=b1, b2=b2, weight_decay=weight_decay)
    close(got, want, 1e-12)
    assert state.count == steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_against_torch(dtype):
    params, grads = draw(0, dtype), [draw(i, dtype) for i in range(1, 21)]
    tx = optim.adamw(1e-2, weight_decay=0.1, mask=lambda name, p: True)
    got, _ = run(tx, params, grads)
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in params.items()}
    opt = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.1)
    for g in grads:
        for name, p in theirs.items():
            p.grad = g[name].clone()
        opt.step()
    close(got, {n: p.detach() for n, p in theirs.items()}, 1e-6 if dtype == torch.float32 else 1e-12)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    steps=st.integers(1, 5),
    momentum=st.sampled_from([(0.0, False), (0.9, False), (0.9, True)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
def test_sgd_against_the_definition(seed, steps, momentum, weight_decay):
    params, grads = draw(seed), [draw(seed + 1 + i) for i in range(steps)]
    schedule = lambda t: 0.3 / (t + 1)  # noqa: E731
    options = {"momentum": momentum[0], "nesterov": momentum[1], "weight_decay": weight_decay}
    got, state = run(optim.sgd(schedule, **options), params, grads)
    close(got, ref.sgd(params, grads, schedule, **options), 1e-12)
    assert state.count == optim.count(state) == steps


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_against_torch(momentum, nesterov):
    params, grads = draw(0), [draw(i) for i in range(1, 6)]
    got, state = run(optim.sgd(0.1, momentum=momentum, nesterov=nesterov), params, grads)
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in params.items()}
    opt = torch.optim.SGD(theirs.values(), lr=0.1, momentum=momentum, nesterov=nesterov)
    for g in grads:
        for name, p in theirs.items():
            p.grad = g[name].clone()
        opt.step()
    close(got, {n: p.detach() for n, p in theirs.items()}, 1e-12)
    assert len(tree.leaves(state)) == (1 + len(SHAPES) if momentum else 1)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    steps=st.integers(1, 5),
    b1=st.sampled_from([0.0, 0.3, 0.9]),
    b2=st.sampled_from([0.95, 0.99]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
def test_lion_against_the_definition(seed, steps, b1, b2, weight_decay):
    params, grads = draw(seed), [draw(seed + 1 + i) for i in range(steps)]
    schedule = lambda t: 0.3 / (t + 1)  # noqa: E731
    got, state = run(optim.lion(schedule, b1=b1, b2=b2, weight_decay=weight_decay), params, grads)
    close(got, ref.lion(params, grads, schedule, b1=b1, b2=b2, weight_decay=weight_decay), 1e-12)
    assert state.count == optim.count(state) == steps


OPTIMIZERS = {
    "adamw": optim.adamw,
    "sgd": optim.sgd,
    "momentum": partial(optim.sgd, momentum=0.9),
    "nesterov": partial(optim.sgd, momentum=0.9, nesterov=True),
    "lion": optim.lion,
}


@each("name", OPTIMIZERS)
def test_the_decay_mask_names_what_decays(name):
    params, none = draw(0), tree.map(torch.zeros_like, draw(0))
    make = OPTIMIZERS[name]

    def shrunk(**options):
        after, _ = run(make(0.1, weight_decay=0.5, **options), params, [none])
        return {name for name, p in after.items() if not torch.equal(p, params[name])}

    assert shrunk() == {"w", "v"}  # matrices and above: neither norms nor biases
    assert shrunk(mask=lambda name, p: name == "b") == {"b"}
    assert shrunk(mask=lambda name, p: False) == set()
    got, _ = run(make(0.1, weight_decay=0.5), params, [none])
    torch.testing.assert_close(got["w"], params["w"] * 0.95)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum: expected 0 <= momentum < 1, got 1.0"),
        ({"nesterov": True}, "momentum: expected > 0 for nesterov, got 0"),
    ],
)
def test_sgd_refuses_a_momentum_that_is_none(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        optim.sgd(0.1, **options)


def test_a_step_leaves_parameters_alone_until_it_is_applied():
    params = draw(0)
    before = copy(params)
    tx = optim.adamw(0.1)
    updates, _ = tx.update(draw(1), tx.init(params), params)
    close(params, before, 0)
    assert optim.apply_updates(params, updates) is params
    assert not torch.equal(params["w"], before["w"])


@each("name", OPTIMIZERS)
def test_updates_lie_where_the_gradients_did(name):
    grads, params = draw(1), draw(0)
    tx = optim.chain(optim.clip_by_global_norm(0.1), OPTIMIZERS[name](0.1, weight_decay=0.1))
    places = {n: g.data_ptr() for n, g in grads.items()}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert {n: u.data_ptr() for n, u in updates.items()} == places


@given(seed=st.integers(0, 2**20), max_norm=st.sampled_from([1e-3, 1.0, 1e3]))
def test_clip_against_the_definition(seed, max_norm):
    grads = draw(seed)
    want = ref.clip_by_global_norm(grads, max_norm)
    tx = optim.clip_by_global_norm(max_norm)
    got, _ = tx.update(copy(grads), tx.init(grads), grads)
    close(got, want, 1e-12)
    assert float(optim.global_norm(got)) == pytest.approx(min(max_norm, float(optim.global_norm(grads))))


def test_the_clip_is_over_all_parameters_and_of_one_model_only():
    """A fault of other systems: each parameter group is clipped by itself, or the actor
    by the norm of the critic."""
    grads = tree.Named(a=torch.tensor([3.0]), b=torch.tensor([4.0]))
    tx = optim.clip_by_global_norm(1.0)
    got, _ = tx.update(copy(grads), tx.init(grads), grads)
    torch.testing.assert_close(got["a"], torch.tensor([0.6]))
    torch.testing.assert_close(got["b"], torch.tensor([0.8]))
    huge = tree.Named(c=torch.tensor([1e6]))
    tx.update(huge, tx.init(huge), huge)
    again, _ = tx.update(copy(grads), tx.init(grads), grads)
    assert torch.equal(again["a"], got["a"])


def test_no_gradient_is_not_divided_by_its_norm():
    none = tree.map(torch.zeros_like, draw(0))
    got, _ = optim.clip_by_global_norm(1.0).update(copy(none), (), none)
    close(got, none, 0)
    assert optim.global_norm(tree.Named()) == 0


def test_a_chain_applies_its_transforms_in_order():
    params, grads = draw(0), [draw(i) for i in range(1, 4)]
    got, state = run(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1, b1=0.5)), params, grads)
    clipped = [
        tree.Named({n: torch.from_numpy(x) for n, x in ref.clip_by_global_norm(g, 0.1).items()})
        for g in grads
    ]
    close(got, ref.adamw(params, clipped, lambda t: 0.1, b1=0.5), 1e-12)
    assert len(state) == 2 and state[1].count == 3


def test_a_chain_describes_itself():
    spec = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1), optim.ema(0.9)).spec
    assert [s["name"] for s in spec["txs"]] == ["clip_by_global_norm", "adamw", "ema"]
    assert (
        spec["txs"][0]["max_norm"] == 0.5 and spec["txs"][1]["lr"] == 0.1 and spec["txs"][2]["decay"] == 0.9
    )


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_ema_against_the_definition(decay):
    params, grads = draw(0), [draw(i) for i in range(1, 6)]
    tx = optim.chain(optim.adamw(0.1), optim.ema(decay))
    values = [run(tx, params, grads[:n])[0] for n in range(6)]
    _, state = run(tx, params, grads)
    want = {name: ref.ema([v[name] for v in values], decay) for name in SHAPES}
    close(optim.ema_params(state), want, 1e-12)


def test_ema_does_not_change_the_parameters_and_is_found_under_master_weights():
    params, grads = draw(0), [draw(i) for i in range(1, 4)]
    with_ema, _ = run(optim.chain(optim.adamw(0.1), optim.ema(0.5)), params, grads)
    close(with_ema, run(optim.adamw(0.1), params, grads)[0], 0)
    low = draw(0, torch.bfloat16)
    state = optim.master_weights(optim.chain(optim.adamw(0.1), optim.ema(0.5))).init(low)
    close(optim.ema_params(state), tree.map(torch.Tensor.float, low), 0)


def test_the_average_of_bf16_parameters_moves():
    """A fault of other systems: kept in bf16, 0.999 avg + 0.001 p rounds back to
    avg, and never leaves the start."""
    start, params = (tree.Named(p=torch.full((4,), x, dtype=torch.bfloat16)) for x in (1.0, 2.0))
    tx, none = optim.ema(0.999), tree.map(torch.zeros_like, params)
    state = tx.init(start)
    for _ in range(100):
        _, state = tx.update(none, state, params)
    want = torch.full((4,), 2 - 0.999**100)
    torch.testing.assert_close(optim.ema_params(state)["p"], want, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("make", "shape"), [(optim.warmup_linear, "linear"), (optim.warmup_cosine, "cosine")]
)
@given(warmup=st.integers(0, 10), more=st.integers(1, 20), floor=st.floats(0, 1))
def test_schedules_against_the_definition(make, shape, warmup, more, floor):
    total = warmup + more
    schedule = make(0.5, warmup, total, floor=floor)
    for step in range(total + 3):
        assert schedule(step) == pytest.approx(ref.warmup(step, 0.5, warmup, total, floor, shape), rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_schedules_from_zero_are_those_of_transformers(shape, warmup):
    from transformers import get_scheduler

    p = torch.nn.Parameter(torch.zeros(()))
    theirs = get_scheduler(shape, torch.optim.SGD([p], lr=0.5), warmup, 12)
    make = {"linear": optim.warmup_linear, "cosine": optim.warmup_cosine}[shape]
    ours = make(0.5, warmup, 12, floor=0.0, from_zero=True)
    for step in range(14):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0] if step < 13 else 0.0, abs=1e-12)
        theirs.optimizer.step()
        theirs.step()


def test_schedule_by_hand():
    lr = [optim.warmup_linear(1.0, 2, 6)(t) for t in range(8)]
    assert lr == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    lr = [optim.warmup_linear(1.0, 2, 6, from_zero=True)(t) for t in range(8)]
    assert lr == [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [optim.constant(0.1)(t) for t in (0, 10**6)] == [0.1, 0.1]
    assert optim.warmup_cosine(1.0, 0, 4)(100) == pytest.approx(0.1)


def test_master_weights_add_up_steps_that_bf16_would_lose():
    """A fault of other systems: at 1.0 the next bf16 number is 1.0078, and a step of 1e-3 never happens."""
    params, grad = (
        tree.Named(p=torch.ones(3, dtype=torch.bfloat16)),
        tree.Named(p=-torch.ones(3, dtype=torch.bfloat16)),
    )
    lost, _ = run(optim.adamw(1e-3), params, [grad] * 100)
    kept, state = run(optim.master_weights(optim.adamw(1e-3)), params, [grad] * 100)
    assert lost["p"].tolist() == [1.0] * 3
    torch.testing.assert_close(state.master["p"], torch.full((3,), 1.1), rtol=1e-4, atol=0)
    assert kept["p"].dtype == torch.bfloat16
    assert torch.equal(
        kept["p"], state.master["p"].bfloat16()
    )  # the parameter is the rounded master, at every step


def test_master_weights_equal_float32_training():
    low, grads = draw(0, torch.bfloat16), [draw(i, torch.bfloat16) for i in range(1, 6)]
    wide, wide_grads = tree.map(torch.Tensor.float, low), [tree.map(torch.Tensor.float, g) for g in grads]
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.01, weight_decay=0.1))
    _, state = run(optim.master_weights(tx), low, grads)
    close(state.master, run(tx, wide, wide_grads)[0], 1e-7)


def doubled(grads, state, params):
    return tree.map(lambda g: -2 * g, grads), state


CLIP, ADAMW = optim.clip_by_global_norm(0.5), optim.adamw(0.01, weight_decay=0.1)
OWN = optim.Transform(lambda params: (), doubled, {})
IN_PLACE = {
    "adamw": ADAMW,
    "all": optim.chain(CLIP, optim.chain(optim.clip_by_global_norm(0.3), ADAMW, optim.ema(0.9))),
    "lion": optim.chain(CLIP, optim.lion(0.01, weight_decay=0.1), optim.ema(0.9)),
    "one's own": optim.chain(CLIP, OWN, optim.ema(0.9)),
    "another order": optim.chain(OWN, CLIP, optim.adamw(0.01), CLIP),
    "only a clip": CLIP,
    "partition": optim.partition(lambda n, p: "a" if p.dim() > 1 else "b", a=ADAMW, b=optim.sgd(0.1)),
    "an update in its place": ADAMW._replace(update=lambda g, s, p: (doubled(g, s, p)[0], s)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_step_in_place_is_the_update_added_to_the_parameters(name, dtype):
    """What a GPU takes, here on a CPU; of 16-bit parameters the masters are compared too."""
    masters = dtype == torch.bfloat16
    tx = optim.master_weights(IN_PLACE[name]) if masters else IN_PLACE[name]
    wide = torch.float32 if masters else dtype
    grads = [draw(i, wide, scale=3.0) for i in range(1, 6)]
    want, its = run(tx, draw(0, dtype), grads)
    params = draw(0, dtype)
    state = tx.init(params)
    for g in grads:
        norm = optim.global_norm(g)
        state = in_place.step_in_place(tx, tree.map(torch.clone, g), state, params, norm)
    tol = 1e-12 if dtype == torch.float64 else 2e-6
    if masters:
        assert all(torch.equal(p, state.master[n].bfloat16()) for n, p in params.items())
    else:
        close(params, want, tol)
    found, wanted = tree.leaves(state), tree.leaves(its)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tol, atol=tol)


def test_the_count_is_of_updates_that_were_made():
    """The learning rate follows it, wherever the adamw is in the chain."""
    wide = optim.master_weights(optim.adamw(0.1))
    inner = optim.chain(optim.clip_by_global_norm(1.0), wide, optim.ema(0.9))
    params = draw(0, torch.bfloat16)
    _, state = run(inner, params, [draw(1), draw(2)])
    assert optim.count(state) == 2
    with pytest.raises(ValueError, match=r"opt: expected a state with optim.adamw in its chain, found none"):
        optim.count(optim.chain(optim.clip_by_global_norm(1.0)).init(params))


def test_a_partition_is_each_transform_on_its_own_parameters():
    params = tree.Named(a=torch.ones(3), b=torch.ones(2, 2), c=torch.ones(2))
    grads = tree.Named((name, torch.full_like(p, 2.0)) for name, p in params.items())
    txs = {"wide": optim.adamw(0.1), "flat": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.01))}
    both = optim.partition(lambda name, p: "wide" if p.dim() == 2 else "flat", **txs)
    state = both.init(params)
    for _ in range(3):
        given = tree.Named((name, g.clone()) for name, g in grads.items())
        updates, state = both.update(given, state, params)
    assert list(updates) == list(params) and optim.count(state) == 3
    for label, names in (("wide", "b"), ("flat", "ac")):
        own = tree.Named((name, params[name]) for name in names)
        alone = txs[label].init(own)
        for _ in range(3):
            want, alone = txs[label].update(tree.Named((n, grads[n].clone()) for n in names), alone, own)
        for name in names:
            assert torch.equal(updates[name], want[name])


def test_a_partition_without_a_place_for_a_parameter_is_refused():
    params = tree.Named(a=torch.ones(3))
    with pytest.raises(ValueError, match="label: expected one of x for a, got 'y'"):
        optim.partition(lambda name, p: "y", x=optim.adamw(0.1)).init(params)
    with pytest.raises(ValueError, match="z: expected parameters with this label, got none"):
        optim.partition(lambda name, p: "x", x=optim.adamw(0.1), z=optim.adamw(0.1)).init(params)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, types.MappingProxyType, tree.Named])
def test_updates_may_be_any_mapping_of_the_names(kind):
    """In any order: leaves of a dict have another order than those of a `Named`."""

    def sgd(grads, state, params):
        return kind({name: -0.1 * grads[name] for name in sorted(grads, reverse=True)}), state

    plain = optim.Transform(lambda params: (), sgd, {"name": "sgd"})
    params, grads = draw(0), [draw(1), draw(2)]
    want = tree.map(lambda p, *g: p - 0.1 * sum(g), params, *grads)
    average = tree.map(lambda p, a, b: p / 4 + (p - 0.1 * a) / 4 + (p - 0.1 * (a + b)) / 2, params, *grads)
    half = optim.partition(lambda name, p: "one" if name == "w" else "other", one=plain, other=plain)
    for tx in (plain, optim.chain(plain, optim.ema(0.5)), optim.master_weights(plain), half):
        got, state = run(tx, params, grads)
        assert list(got) == list(params)
        close(got, want, 1e-6)
        if tx.spec["name"] == "chain":
            close(optim.ema_params(state), average, 1e-12)

    # gradients too
    mixed = kind({name: grads[0][name].clone() for name in sorted(SHAPES, reverse=True)})
    tx = optim.adamw(1e-2, weight_decay=0.1)
    updates, _ = tx.update(mixed, tx.init(params), params)
    close(updates, tx.update(copy(grads[0]), tx.init(params), params)[0], 0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"w": 0}, "updates: expected the names of the 3 parameters, got 1 without it: b"),
        (
            {"w": 0, "b": 0, "v": 0, "x": 0},
            "updates: expected the names of the 3 parameters, got 4 with it: x",
        ),
        (None, "updates: expected a mapping of the parameters' names to tensors, got NoneType"),
    ],
)
def test_updates_without_the_names_of_the_parameters_are_refused_in_one_line(found, message):
    broken = optim.Transform(lambda params: (), lambda grads, state, params: (found, state), {})
    for tx in (broken, optim.chain(broken, optim.ema(0.5)), optim.master_weights(broken)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            run(tx, draw(0), [draw(1)])
