"""Losses: one number per token, against their definitions, and invariant under every cut of the batch."""

import math
import re
from functools import partial

import pytest
import ref
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import agree, table
from torch.func import grad, vmap

from rft_fn import loss, packing, testing, tree, weight
from rft_fn.loss.evaluate import evaluate
from rft_fn.loss.gradient import loss_and_metrics
from rft_fn.types import TokenOut

pytestmark = pytest.mark.usefixtures("float64")

LOSSES = {
    "ppo_clip": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv),
    "clip_higher": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv, low=0.2, high=0.28),
    "dual_clip": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv, dual=1.1),
    "reinforce": lambda o, b: loss.reinforce(o.logp, b.adv),
    "nll": lambda o, b: loss.nll(o.logp),
    "value_clip": lambda o, b: loss.value_clip(o.value, b.old_value, b.ret),
    "kl_k1": lambda o, b: loss.kl_k1(o.logp, b.ref_logp),
    "kl_k2": lambda o, b: loss.kl_k2(o.logp, b.ref_logp),
    "kl_k3": lambda o, b: loss.kl_k3(o.logp, b.ref_logp),
    "kl": lambda o, b: loss.kl(o.logp, b.ref_logp),
    "entropy_bonus": lambda o, b: loss.reinforce(o.logp, b.adv) - 0.01 * o.entropy,
}
WEIGHTS = {
    "token_mean": weight.token_mean,
    "seq_mean": weight.seq_mean,
    "seq_sum": weight.seq_sum,
    "constant": partial(weight.constant, length=12),
}
POLICY = ("ppo_clip", "clip_higher", "dual_clip", "reinforce")
seeds = st.integers(0, 2**32)


@each("w", WEIGHTS)
@each("name", LOSSES)
@settings(max_examples=4)
@given(seed=seeds)
def test_no_cut_of_the_batch_changes_the_gradient(name, w, seed):
    """A fault of other systems: means of means. The loss then depends
    on micro-batches, accumulation, ranks and packs."""
    testing.check_partition_invariance(LOSSES[name], weight=WEIGHTS[w], seed=seed, rtol=1e-12)


@each("name", LOSSES)
@settings(max_examples=3)
@given(seed=seeds, w=st.sampled_from(sorted(WEIGHTS)))
def test_padding_packing_and_order_change_nothing_and_extremes_are_finite(name, seed, w):
    """A fault of other systems: padding that is averaged in, sequences that see
    each other, e^50 in the gradient."""
    testing.check_all(LOSSES[name], weight=WEIGHTS[w], seed=seed, on_policy=name in POLICY[:2])


@pytest.mark.parametrize("name", POLICY)
@settings(max_examples=5)
@given(seed=seeds, w=st.sampled_from(sorted(WEIGHTS)))
def test_on_policy_the_gradient_is_that_of_reinforce(name, seed, w):
    testing.check_on_policy_identity(LOSSES[name], weight=WEIGHTS[w], seed=seed)


logps = st.floats(-8, 0)
numbers = st.floats(-5, 5)


@given(
    data=table(logps, logps, numbers),
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
    dual=st.none() | st.floats(1.01, 5),
)
def test_ppo_clip_against_the_definition(data, low, high, dual):
    agree(loss.ppo_clip, ref.ppo_clip, data, low=low, high=high, dual=dual)


@pytest.mark.parametrize("name", ["kl_k1", "kl_k2", "kl_k3", "reinforce"])
@given(data=table(logps, logps))
def test_two_argument_losses_against_the_definition(name, data):
    agree(getattr(loss, name), getattr(ref, name), data)


@given(data=table(logps))
def test_nll_against_the_definition(data):
    agree(loss.nll, ref.nll, data)


@given(data=table(numbers, numbers, numbers), clip=st.floats(0.01, 2))
def test_value_clip_against_the_definition(data, clip):
    agree(loss.value_clip, ref.value_clip, data, clip=clip)


def derivative(f, x, *rest):
    x = torch.as_tensor(x).requires_grad_()
    return torch.autograd.grad(f(x, *rest).sum(), x)[0]


@given(data=table(logps, numbers), dual=st.none() | st.floats(1.01, 5))
def test_ppo_clip_at_ratio_one_has_the_gradient_minus_adv(data, dual):
    logp, adv = torch.from_numpy(data)
    got = derivative(partial(loss.ppo_clip, dual=dual), logp.clone(), logp, adv)
    torch.testing.assert_close(got, -adv, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize(
    ("rho", "adv", "want"),
    [
        (1.19, 2.0, -2 * 1.19),  # inside: -A rho
        (1.21, 2.0, 0.0),  # A > 0 beyond 1 + high: nothing more to gain
        (1.21, -2.0, 2 * 1.21),  # A < 0 there: pushed back
        (0.79, -2.0, 0.0),
        (0.79, 2.0, -2 * 0.79),
        (3.1, -2.0, 0.0),  # the dual clip at 3
        (2.9, -2.0, 2 * 2.9),
    ],
)
def test_where_ppo_clip_stops_the_gradient(rho, adv, want):
    f = partial(loss.ppo_clip, dual=3.0)
    got = derivative(f, torch.tensor([math.log(rho)]), torch.zeros(1), torch.tensor([adv]))
    torch.testing.assert_close(got, torch.tensor([want]))


def test_clip_higher_moves_only_the_upper_bound():
    logp, one = torch.tensor([1.25, 0.75]).log(), torch.ones(2)
    adv = torch.tensor([1.0, -1.0])
    near = derivative(partial(loss.ppo_clip, low=0.2, high=0.2), logp, 0 * one, adv)
    far = derivative(partial(loss.ppo_clip, low=0.2, high=0.28), logp, 0 * one, adv)
    assert near.tolist() == [0.0, 0.0] and far[1] == 0
    torch.testing.assert_close(far[0], torch.tensor(-1.25))


@given(data=table(numbers, numbers, numbers))
def test_value_clip_without_a_bound_is_the_squared_error(data):
    value, old, ret = torch.from_numpy(data)
    torch.testing.assert_close(loss.value_clip(value, old, ret, clip=1e3), (value - ret) ** 2 / 2)
    torch.testing.assert_close(derivative(partial(loss.value_clip, clip=1e3), value, old, ret), value - ret)


@pytest.mark.parametrize("f", [loss.kl_k1, loss.kl_k3, loss.kl])
def test_kl_estimators_are_unbiased_as_values(f):
    """By enumeration: E_pi of the estimate is KL(pi, ref). (k2 is not: it is for its gradient.)"""
    logp, ref_logp = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.2, 0.5, 0.3]).log()
    want = (logp.exp() * (logp - ref_logp)).sum()
    torch.testing.assert_close((logp.exp() * f(logp, ref_logp)).sum(), want)
    assert not torch.isclose((logp.exp() * loss.kl_k2(logp, ref_logp)).sum(), want)


@pytest.mark.parametrize("f", [loss.kl_k2, loss.kl])
@given(seed=seeds)
def test_kl_losses_have_the_gradient_of_the_reverse_kl(f, seed):
    testing.check_kl_gradient(f, seed=seed)


@pytest.mark.parametrize(("f", "words"), [(loss.kl_k1, "norm ratio 0.0000"), (loss.kl_k3, "cosine")])
def test_k1_and_k3_do_not(f, words):
    """A fault of other systems: k1 as a loss has an expected gradient of 0, k3 that of the forward KL."""
    with pytest.raises(AssertionError, match=f"not that of KL.*{words}"):
        testing.check_kl_gradient(f)


def test_a_kl_loss_in_a_pack_has_a_gradient():
    """A fault of other systems: the KL of a pack is rebuilt from numbers, is right
    as a value, and teaches nothing."""
    c = testing.case(0)
    packs = [packing.pack(c.exp, range(8))]
    for f in (loss.kl, loss.kl_k2):
        _, g = testing.total_and_grad(lambda o, b: f(o.logp, b.ref_logp), c.apply, c.params, packs)  # noqa: B023
        assert g["bigram"].abs().max() > 1e-3


@each("dtype", [torch.float32, torch.float64])
@each("gap", [30.0, 50.0, -50.0, 1e4, -1e4])
@each("name", ["ppo_clip", "reinforce", "kl_k1", "kl_k2", "kl_k3", "kl"])
def test_values_and_gradients_are_finite_at_any_log_ratio(name, gap, dtype):
    """A fault of other systems: exp of an unbounded log-ratio: 1e13 at a gap of 30, inf in float32 at 89."""
    logp = torch.full((2,), min(gap, 0.0), dtype=dtype).requires_grad_()
    other, adv = torch.full((2,), -max(gap, 0.0), dtype=dtype), torch.tensor([1.0, -1.0], dtype=dtype)
    args = {"ppo_clip": (other, adv), "reinforce": (adv,)}.get(name, (other,))
    value = getattr(loss, name)(logp, *args)
    (g,) = torch.autograd.grad(value.sum(), logp)
    assert value.isfinite().all() and g.isfinite().all()


# ---------- vmap


def test_a_vmap_over_clips_equals_a_loop():
    g = torch.Generator().manual_seed(0)
    logp, old, adv = torch.randn(3, 50, generator=g)
    clips = torch.linspace(0.01, 0.9, 7)

    def total(low, high):
        return loss.ppo_clip(logp, old, adv, low=low, high=high).sum()

    got = vmap(total)(clips, 2 * clips)
    want = torch.stack([total(float(c), 2 * float(c)) for c in clips])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert got.unique().numel() == len(clips)


def test_gradients_under_vmap_equal_a_loop():
    g = torch.Generator().manual_seed(0)
    logp, old, adv = torch.randn(3, 20, generator=g)
    clips = torch.tensor([0.05, 0.2, 0.5])
    f = lambda x, c: loss.ppo_clip(x, old, adv, low=c, high=c).sum()  # noqa: E731
    got = vmap(grad(f), in_dims=(None, 0))(logp, clips)
    torch.testing.assert_close(got, torch.stack([grad(f)(logp, float(c)) for c in clips]))
    for kl in (loss.kl_k1, loss.kl_k2, loss.kl_k3, loss.kl):
        per_token = vmap(grad(kl))(logp, old)
        torch.testing.assert_close(per_token, derivative(kl, logp.clone(), old))


@pytest.mark.parametrize("estimator", [loss.kl_k2, loss.kl_k3])
def test_an_estimate_of_the_kl_may_be_limited_as_in_other_systems(estimator):
    """Clamped to 10, a token beyond has the value 10 and no gradient; the others keep theirs."""
    ref_logp = torch.linspace(-30, 0, 31)
    logp = torch.full_like(ref_logp, -15.0)
    plain = estimator(logp, ref_logp)
    slope = grad(lambda x: estimator(x, ref_logp).sum())(logp)
    limited = grad(lambda x: estimator(x, ref_logp).clamp(-10, 10).sum())(logp)
    beyond = plain > 10
    assert 5 < int(beyond.sum()) < 26 and plain.isfinite().all() and (slope[beyond] != 0).all()
    assert torch.equal(limited, torch.where(beyond, 0, slope))


@given(entropies=st.lists(st.floats(0, 2), max_size=12), start=st.floats(0, 0.1))
def test_the_coefficient_of_the_entropy_is_its_definition(entropies, start):
    """c_0 = start; c_k applied where e_k <= target, and up by delta there, else down by delta to 0."""
    target, delta = 1.0, 0.005
    coef, applied = start, []
    for entropy in entropies:
        now, coef = loss.adaptive_entropy(coef, entropy, target=target, delta=delta)
        applied.append(now)
    want, c = [], start
    for entropy in entropies:
        want.append(c * (entropy <= target))
        c = max(0.0, c + (delta if entropy <= target else -delta))
    assert applied == pytest.approx(want) and coef == pytest.approx(c)


def test_a_target_of_the_entropy_is_above_0():
    with pytest.raises(ValueError, match=r"^target: expected > 0, got 0$"):
        loss.adaptive_entropy(0.1, 1.0, target=0, delta=0.1)
    with pytest.raises(ValueError, match=r"^delta: expected > 0, got -1$"):
        loss.adaptive_entropy(0.1, 1.0, target=1.0, delta=-1)


ABSENT = [
    (lambda o, b: -0.1 * o.entropy, r"TokenOut.entropy: .* got None; bind .* entropy=True"),
    (lambda o, b: loss.entropy_bonus(o.entropy), r"TokenOut.entropy: .* got None; bind .* entropy=True"),
    (lambda o, b: o.words_logp.sum(-1), r"TokenOut.words_logp: .* words=ids \[B, S, K\]"),
    (lambda o, b: (o.value - b.ret).square(), r"TokenOut.value: .* a value head \(model.Critic\)"),
    (lambda o, b: o.logp - b.ref_logp, r"Packed.ref_logp: .* give ref_logp to rft_fn.experience"),
    (lambda o, b: loss.kl(o.logp, b.ref_logp), r"Packed.ref_logp: .* give ref_logp to rft_fn.experience"),
    (lambda o, b: torch.where(b.mask, b.ref_logp, 0), r"Packed.ref_logp: .* got None; give ref_logp to"),
    (lambda o, b: b.extra["chosen"], r"Packed.extra: expected 'chosen' among \['noise'\]; give extra to"),
]


@pytest.mark.parametrize(("f", "line"), ABSENT)
def test_a_loss_that_reads_an_absent_field_is_told_where_it_comes_from(f, line):
    """One line, whoever noticed that it is absent: torch, Python, or a loss of this library."""
    b = tree.replace(packing.pack(testing.case(0).exp, [3]), ref_logp=None)
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$") as error:
        loss_and_metrics(f, TokenOut(logp=b.old_logp), b)
    assert error.value.__cause__ is not None


def test_extra_that_is_absent_as_a_whole():
    b = tree.replace(packing.pack(testing.case(0).exp, [3]), extra=None)
    message = r"^Packed.extra: expected a value, got None; give extra to rft_fn.experience$"
    with pytest.raises(ValueError, match=message):
        evaluate(lambda o, b: b.extra["chosen"], TokenOut(logp=b.old_logp), b)


def test_an_error_of_another_cause_stays_as_it_is():
    """Fields that are absent are none of its business, whether the loss names them or not."""
    b = tree.replace(packing.pack(testing.case(0).exp, [3]), ref_logp=None)
    out = TokenOut(logp=b.old_logp)
    with pytest.raises(TypeError, match="unsupported operand"):
        evaluate(lambda o, b: o.logp + "1", out, b)
    with pytest.raises(TypeError, match="unsupported operand"):
        evaluate(lambda o, b: o.logp + "1" if b.ref_logp is None else b.ref_logp, out, b)

    def bare(o, b):
        raise KeyError

    with pytest.raises(KeyError):
        evaluate(bare, out, b)


@pytest.mark.parametrize(
    ("f", "got"),
    [
        (lambda o, b: None, "None"),
        (lambda o, b: (None, {}), "None, dict"),
        (lambda o, b: 1.0, "float"),
        (lambda o, b: (o.logp, None), "Tensor, None"),
        (lambda o, b: (o.logp, {}, 3), "Tensor, dict, int"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_to_return(f, got):
    b = packing.pack(testing.case(0).exp, [3])
    line = "loss: expected the function to return a tensor [T], or a tensor and a dict of metrics, got "
    with pytest.raises(ValueError, match=f"^{re.escape(line + got)}$"):
        loss_and_metrics(f, TokenOut(logp=b.old_logp), b)
