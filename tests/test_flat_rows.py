"""Rows that add nothing to a gradient: which they are, and that the gradient without them is the same."""

import conformance
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import algorithm, loss, packing, testing, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.packing.flat_rows import has_gradient
from rft_fn.strategy import get_fake_strategy

# their losses pull at tokens without an advantage: a KL to the sampler, regressions to the advantage
PULL = {"cpgd", "dro", "a_star_po"}
TABLE = {name: row for name, row in algorithm.TABLE.items() if isinstance(row, algorithm.Algorithm)}
seeds = st.integers(0, 2**32)


def batch(seed, row=TABLE["grpo"]):
    """(a case, rows in a unit): every second unit has advantage 0, and one unit w = 0."""
    unit = 2 if row.together else 1
    case = testing.case(seed, weight=row.weight)
    number = torch.arange(len(case.exp.tokens))[:, None] // unit
    adv = torch.where(number % 2 == 0, 0, case.exp.adv)
    w = torch.where(number == 3, 0, case.exp.w)
    return case._replace(exp=tree.replace(case.exp, adv=adv, w=w)), unit


def moving(exp, unit, *, pulled=False):
    """The units with a token in mask that has a weight and, unless the loss pulls, an advantage."""
    tokens = exp.mask & (exp.w != 0) & ((exp.adv != 0) | pulled)
    return int(tokens.view(len(exp.tokens) // unit, -1).any(-1).sum())


def gradient(case, loss_fn, exp, budget, unit):
    """The gradient of the sum over all packs of a batch, by name."""
    params = {name: x.clone().requires_grad_() for name, x in case.params.items()}
    (packs,) = packing.shard(exp, budget, unit=unit)
    total = sum((b.w * evaluate(loss_fn, case.apply(params, b), b)[0]).sum() for b in packs)
    grads = torch.autograd.grad(total, list(params.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(params, grads))


@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=6)
@given(seed=seeds, budget=st.sampled_from([24, 48, 96]))
def test_the_gradient_without_flat_rows_is_the_same(name, seed, budget):
    row = TABLE[name]
    case, unit = batch(seed, row)
    some = packing.drop_flat(case.exp, row.loss, unit=unit)
    assert len(some.tokens) == unit * max(moving(case.exp, unit, pulled=name in PULL), 1)
    want = gradient(case, row.loss, case.exp, 96, unit)
    got = gradient(case, row.loss, some, budget, unit)
    for key, x in want.items():
        torch.testing.assert_close(got[key], x, rtol=0, atol=1e-12 * max(float(x.abs().max()), 1e-3))


def clipped(out, b):
    return loss.ppo_clip(out.logp, b.old_logp, b.adv)


def test_a_model_has_the_same_gradient_without_them():
    """Those of every parameter, from fewer rows; so has a batch in which one row is left of all."""
    exp = conformance.experience(0)
    strategy = get_fake_strategy()
    apply, state = strategy.init(tiny.llama(dtype=torch.float64), conformance.adamw())
    for moves in (4, 0):
        adv = exp.adv * (torch.arange(8)[:, None] < moves)
        whole = tree.replace(exp, adv=adv)
        some = packing.drop_flat(whole, clipped)
        assert len(some.tokens) == max(moves, 1)
        want, got = (strategy.grad(state, apply, clipped, strategy.shard(x, 40))[0] for x in (whole, some))
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "more",
    [
        lambda out, b: loss.kl(out.logp, b.ref_logp),
        lambda out, b: loss.kl_k1(out.logp, b.ref_logp),
        lambda out, b: loss.entropy_bonus(out.entropy),
        lambda out, b: out.aux,
        lambda out, b: out.value * b.ret,
        lambda out, b: b.extra["noise"][:, 0] * loss.nll(out.logp),
        lambda out, b: out.hidden.sum(-1),  # an output that is not tried
        lambda out, b: out.logp.log(),  # not finite
    ],
    ids=["kl", "k1", "entropy", "aux", "value", "nll", "hidden", "infinite"],
)
def test_rows_with_an_advantage_of_0_stay_under_a_loss_that_pulls_at_them(more):
    case, _ = batch(0)
    some = packing.drop_flat(case.exp, lambda out, b: clipped(out, b) + more(out, b))
    assert len(some.tokens) == moving(case.exp, 1, pulled=True) > moving(case.exp, 1)


def test_a_gradient_at_one_token_of_one_sequence_is_found():
    case, _ = batch(0)
    b = packing.pack(case.exp, range(8))
    assert not has_gradient(lambda out, b: out.logp.detach(), b)
    at = int((b.mask & (b.w != 0)).nonzero()[-1])
    assert has_gradient(lambda out, b: out.logp * (torch.arange(len(b.tokens)) == at), b)


def test_some_are_spared_and_one_unit_always():
    """The rows of `spare` are the first flat ones, and all of a batch without a gradient but one go."""
    case, _ = batch(0)
    exp = tree.replace(case.exp, w=case.exp.w.abs() + case.exp.mask)
    flat = [i for i in range(8) if moving(packing.take(exp, torch.tensor([i])), 1) == 0]
    sizes = exp.length[flat].tolist()
    for count in range(len(flat) + 1):
        some = packing.drop_flat(exp, clipped, spare=sum(sizes[:count]))
        assert len(some.tokens) == 8 - len(flat) + count
    equal = tree.replace(exp, adv=torch.zeros_like(exp.adv))
    for unit in (1, 2, 4):
        assert len(packing.drop_flat(equal, clipped, unit=unit).tokens) == unit
    with pytest.raises(ValueError, match="unit: expected a divisor of the 8 rows, got 3"):
        packing.drop_flat(exp, clipped, unit=3)


def test_a_batch_without_flat_rows_is_itself():
    exp = testing.case(1).exp
    exp = tree.replace(exp, adv=torch.ones_like(exp.adv), mask=exp.mask | True, w=torch.ones_like(exp.w))
    assert packing.drop_flat(exp, clipped) is exp


def test_units_stay_whole():
    """A row of advantage 0 stays beside one of its unit that has an advantage."""
    exp = testing.case(2).exp
    mask = torch.ones_like(exp.mask)
    adv = torch.zeros_like(exp.adv)
    adv[5] = 1
    exp = tree.replace(exp, mask=mask, w=mask.to(exp.w), adv=adv, length=torch.full_like(exp.length, 12))
    assert packing.drop_flat(exp, clipped, unit=4).tokens.equal(exp.tokens[4:])
    assert packing.drop_flat(exp, clipped, unit=2).tokens.equal(exp.tokens[4:6])
    assert packing.drop_flat(exp, clipped).tokens.equal(exp.tokens[5:6])
