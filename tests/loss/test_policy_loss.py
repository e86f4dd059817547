"""The policy losses beside PPO's: their papers' formulas, and the limits where one becomes another."""

import math
from functools import partial

import numpy as np
import pytest
import ref
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import agree, table

from rft_fn import loss, packing, testing, tree, weight
from rft_fn.types import TokenOut

pytestmark = pytest.mark.usefixtures("float64")
seeds = st.integers(0, 2**32)


def of_sequence(fn, **options):
    return lambda o, b: fn(o.logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, **options)


def of_token(fn, **options):
    return lambda o, b: fn(o.logp, b.old_logp, b.adv, **options)


SEQUENCE = {name: getattr(loss, name) for name in ("gspo", "gspo_token", "gmpo")}
TOKEN = {name: getattr(loss, name) for name in ("cispo", "sapo", "cpgd", "dppo_tv", "dppo_kl")}
LOSSES = {name: of_sequence(f) for name, f in SEQUENCE.items()} | {n: of_token(f) for n, f in TOKEN.items()}
LOSSES["wide_gspo"] = of_sequence(loss.gspo, low=0.2, high=0.3)
LOSSES["kl_cov"] = lambda o, b: loss.kl_cov(o.logp, b.old_logp, b.adv, (b.ret > 0).double())
WEIGHTS = {"token_mean": weight.token_mean, "seq_mean": weight.seq_mean, "seq_sum": weight.seq_sum}
each_name = each("name", LOSSES)


@each_name
@settings(max_examples=6)
@given(seed=seeds, w=st.sampled_from(sorted(WEIGHTS)))
def test_no_cut_padding_order_or_extreme_breaks_it(name, seed, w):
    testing.check_all(LOSSES[name], weight=WEIGHTS[w], seed=seed)


@each_name
@settings(max_examples=5)
@given(seed=seeds, w=st.sampled_from(sorted(WEIGHTS)))
def test_on_policy_the_gradient_is_that_of_reinforce(name, seed, w):
    testing.check_on_policy_identity(LOSSES[name], weight=WEIGHTS[w], seed=seed, per_sequence=True)


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("gspo", "gspo_token", "wide_gspo", "gmpo")])
def test_token_losses_keep_the_identity_with_an_advantage_for_each_token(name):
    testing.check_on_policy_identity(LOSSES[name])


def test_gspo_token_keeps_it_too_and_gspo_spreads_advantages_over_the_sequence():
    """The reason for the token form: with advantages by token, one ratio for the sequence mixes them."""
    testing.check_on_policy_identity(LOSSES["gspo_token"])
    with pytest.raises(AssertionError, match="not that of -adv"):
        testing.check_on_policy_identity(LOSSES["gspo"])


logps = st.floats(-8, -0.01)
numbers = st.floats(-5, 5)
lows, highs = st.floats(0.01, 0.9), st.floats(0.01, 2)


@given(data=table(logps, logps, numbers), low=lows, high=highs)
def test_cispo_against_the_definition(data, low, high):
    agree(loss.cispo, ref.cispo, data, low=low, high=high)


@given(data=table(logps, logps, numbers), tau_pos=st.floats(0.1, 5), tau_neg=st.floats(0.1, 5))
def test_sapo_against_the_definition(data, tau_pos, tau_neg):
    agree(loss.sapo, ref.sapo, data, tau_pos=tau_pos, tau_neg=tau_neg)


@given(data=table(logps, logps, numbers), low=lows, high=highs, drift=st.floats(0, 1))
def test_cpgd_against_the_definition(data, low, high, drift):
    agree(loss.cpgd, ref.cpgd, data, low=low, high=high, drift=drift)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@given(data=table(st.floats(-4, -0.01), st.floats(-4, -0.01), numbers), limit=st.floats(0.013, 0.5))
def test_dppo_against_the_definition(name, data, limit):
    agree(getattr(loss, name), getattr(ref, name), data, limit=limit)


@given(data=table(logps, logps, numbers, st.sampled_from([0.0, 1.0])), coef=st.floats(0, 2))
def test_kl_cov_against_the_definition(data, coef):
    agree(loss.kl_cov, ref.kl_cov, data, coef=coef)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo"])
@given(seed=seeds, low=lows, high=highs)
def test_sequence_losses_against_the_definition(name, seed, low, high):
    c = testing.case(seed)
    adv = torch.randn(8, 1, generator=torch.Generator().manual_seed(seed)) * c.exp.mask
    b = packing.pack(tree.replace(c.exp, adv=adv), range(8))
    logp = c.apply(c.params, b).logp
    got = SEQUENCE[name](logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, low=low, high=high)
    definition = partial(getattr(ref, name.removesuffix("_token")), low=low, high=high)
    args = (x.numpy() for x in (logp, b.old_logp, b.adv, b.mask, b.seq))
    want = ref.per_sequence(definition, *args, b.num_seqs)
    np.testing.assert_allclose(got * b.mask, want, rtol=1e-10, atol=1e-10)


def batch(seed, spread=0.3):
    g = torch.Generator().manual_seed(seed)
    seq = torch.arange(4).repeat_interleave(torch.randint(1, 7, (4,), generator=g))
    mask = torch.rand(seq.shape, generator=g) < 0.8
    logp = -3 * torch.rand(seq.shape, generator=g) * mask
    old = (logp + spread * torch.randn(seq.shape, generator=g)) * mask
    adv = torch.randn(4, generator=g)[seq] * mask
    return logp, old, adv, mask, seq, 4


def total_and_grad(f, logp, *args, w):
    logp = logp.clone().requires_grad_()
    total = (w * f(logp, *args)).sum()
    return total.detach(), torch.autograd.grad(total, logp)[0]


def seq_mean(mask, seq, num_seqs):
    count = torch.zeros(num_seqs).index_add(0, seq, mask.double())
    return mask / count.clamp(min=1)[seq]


@given(seed=seeds, low=lows, high=highs)
def test_gspo_token_is_gspo_with_one_advantage_a_sequence(seed, low, high):
    logp, old, adv, mask, seq, n = batch(seed)
    w = seq_mean(mask, seq, n)
    a = total_and_grad(partial(loss.gspo, low=low, high=high), logp, old, adv, mask, seq, n, w=w)
    b = total_and_grad(partial(loss.gspo_token, low=low, high=high), logp, old, adv, mask, seq, n, w=w)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@given(seed=seeds)
def test_gmpo_without_bounds_is_gspo_without_bounds(seed):
    data = batch(seed)
    a = loss.gmpo(*data, low=100.0, high=100.0)
    torch.testing.assert_close(a, loss.gspo(*data, low=1.0, high=1e9), rtol=1e-12, atol=1e-13)


@given(seed=seeds, low=lows, high=highs)
def test_with_sequences_of_one_token_gspo_is_ppo(seed, low, high):
    logp, old, adv, mask, _, _ = batch(seed)
    n = len(logp)
    got = loss.gspo(logp, old, adv, mask, torch.arange(n), n, low=low, high=high)
    torch.testing.assert_close(got * mask, loss.ppo_clip(logp, old, adv, low=low, high=high) * mask)


@given(seed=seeds)
def test_without_limits_the_gradients_are_those_of_importance_sampling(seed):
    """cispo, dppo and kl_cov without their limits, and ppo_clip without its own: -rho A grad logp."""
    logp, old, adv, *_ = batch(seed)
    ones = torch.ones_like(logp)
    want = -(logp - old).exp() * adv
    for f in (
        partial(loss.ppo_clip, low=1e9, high=1e9),
        partial(loss.cispo, low=1e9, high=1e9),
        partial(loss.dppo_tv, limit=2.0),
        partial(loss.dppo_kl, limit=1e9),
        lambda p, o, a: loss.kl_cov(p, o, a, torch.zeros_like(p)),
    ):
        torch.testing.assert_close(total_and_grad(f, logp, old, adv, w=ones)[1], want)


@given(seed=seeds)
def test_cpgd_without_drift_inside_the_clip_is_reinforce(seed):
    logp, old, adv, *_ = batch(seed, spread=0.01)
    _, g = total_and_grad(partial(loss.cpgd, drift=0.0), logp, old, adv, w=torch.ones_like(logp))
    torch.testing.assert_close(g, -adv)


def test_the_drift_has_the_value_and_gradient_of_the_kl_from_the_old_policy():
    """By enumeration over a small vocabulary, on samples of the old policy."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(5, generator=g).requires_grad_()
    logp, old = z.log_softmax(-1), torch.randn(5, generator=g).log_softmax(-1)
    want = (old.exp() * (old - logp)).sum()
    drift = loss.cpgd(logp, old, torch.zeros(5), drift=1.0, cap=math.inf)
    got = (old.exp() * drift).sum()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, z, retain_graph=True)[0], torch.autograd.grad(want, z)[0]
    )
    held = loss.kl_cov(logp, old, torch.zeros(5), torch.ones(5))
    torch.testing.assert_close((old.exp() * held).sum(), want)


def slope(f, rho, adv, old=0.5):
    logp = torch.tensor([math.log(old * rho)]).requires_grad_()
    out = f(logp, torch.tensor([old]).log(), torch.tensor([adv]))
    return torch.autograd.grad(out.sum(), logp)[0].item()


@each(
    ("name", "options", "rho", "adv", "want"),
    [
        ("cispo", {"high": 0.5}, 1.9, 1.0, -1.5),  # the weight is cut, the token still learns
        ("cispo", {"low": 0.2}, 0.5, 1.0, -0.8),
        ("cispo", {}, 0.1, 1.0, -0.1),  # no lower limit by default
        ("sapo", {"tau_pos": 1.0}, 1.0, 1.0, -1.0),
        ("cpgd", {"drift": 0.0}, 1.3, 1.0, 0.0),  # clipped: beyond log 1.2
        ("cpgd", {"drift": 0.0}, 1.3, -1.0, 1.0),  # the way back is open, and no ratio multiplies it
        ("cpgd", {"drift": 0.1}, 1.3, 1.0, 0.03),  # what is left is the drift: 0.1 (rho - 1)
        ("cpgd", {"drift": 0.1, "cap": 0.2}, 1.3, 1.0, 0.02),
        ("dppo_tv", {"limit": 0.2}, 1.3, 1.0, -1.3),  # 0.65 - 0.5 is within
        ("dppo_tv", {"limit": 0.1}, 1.3, 1.0, 0.0),
        ("dppo_tv", {"limit": 0.1}, 1.3, -1.0, 1.3),  # back towards the old policy
        ("dppo_tv", {"limit": 0.1}, 0.7, -1.0, 0.0),
        ("dppo_kl", {"limit": 0.05}, 1.3, 1.0, -1.3),  # KL 0.0475
        ("dppo_kl", {"limit": 0.04}, 1.3, 1.0, 0.0),
    ],
)
def test_the_gradient_by_hand(name, options, rho, adv, want):
    assert slope(partial(getattr(loss, name), **options), rho, adv) == pytest.approx(want, abs=1e-12)


def test_a_rare_token_may_change_by_a_large_ratio_under_dppo_and_not_under_ppo():
    f = partial(loss.dppo_tv, limit=0.2)
    assert (
        slope(f, 5.0, 1.0, old=1e-3) == pytest.approx(-5.0) and slope(loss.ppo_clip, 5.0, 1.0, old=1e-3) == 0
    )
    assert slope(f, 1.19, 1.0, old=0.8) == pytest.approx(-1.19)  # 0.152 of probability
    assert (
        slope(f, 1.24, 1.0, old=0.8) == pytest.approx(-1.24) and slope(loss.ppo_clip, 1.24, 1.0, old=0.8) == 0
    )


def test_gmpo_clips_the_token_and_gspo_the_sequence():
    """One token out of three has gone far: GSPO stops the whole sequence, GMPO that token."""
    old, logp = torch.zeros(3), torch.tensor([0.9, 0.0, 0.0])
    args = (torch.ones(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long), 1)
    w = torch.full((3,), 1 / 3)
    _, whole = total_and_grad(partial(loss.gspo, low=0.2, high=0.2), logp, old, *args, w=w)
    _, token = total_and_grad(loss.gmpo, logp, old, *args, w=w)
    assert (whole == 0).all()
    assert token[0] == 0 and (token[1:] < 0).all()


def test_sapo_is_softer_on_both_sides_and_harder_on_negative_advantages():
    steps = [slope(loss.sapo, r, 1.0) / -r for r in (0.5, 1.0, 2.0)]
    assert steps[1] == pytest.approx(1.0) and steps[0] < 1 and steps[2] < 1
    assert abs(slope(loss.sapo, 2.0, -1.0)) < abs(slope(loss.sapo, 2.0, 1.0))


@each("name", [*TOKEN, "kl_cov"])
@each("dtype", [torch.float32, torch.float64])
@each("gap", [50.0, -50.0, 1e4, -1e4])
def test_extreme_log_ratios_are_finite_in_value_and_gradient(name, gap, dtype):
    logp = torch.full((2,), min(gap, 0.0), dtype=dtype).requires_grad_()
    old, adv = torch.full((2,), -max(gap, 0.0), dtype=dtype), torch.tensor([1.0, -1.0], dtype=dtype)
    more = (torch.ones(2, dtype=dtype),) if name == "kl_cov" else ()
    value = getattr(loss, name)(logp, old, adv, *more)
    (g,) = torch.autograd.grad(value.sum(), logp)
    assert value.isfinite().all() and g.isfinite().all()


IMPOSSIBLE = LOSSES | {
    "ppo_clip": of_token(loss.ppo_clip),
    "dual": of_token(loss.ppo_clip, dual=3.0),
    "ratio": lambda o, b: loss.ratio(o.logp, b.old_logp),
    "kl": lambda o, b: loss.kl(o.logp, b.old_logp),
    "kl_k1": lambda o, b: loss.kl_k1(o.logp, b.old_logp),
    "kl_k2": lambda o, b: loss.kl_k2(o.logp, b.old_logp),
    "kl_k3": lambda o, b: loss.kl_k3(o.logp, b.old_logp),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_a_token_that_both_policies_exclude_has_ratio_1_and_no_gradient(name, sign):
    """-inf - -inf is NaN; to its neighbours such a token is one whose log-prob did not change."""
    b = packing.pack(testing.case(0).exp, [3, 4])
    b = tree.replace(b, adv=sign * b.adv.abs(), ret=torch.ones_like(b.adv))
    at = int(b.mask.nonzero()[1])

    def value_and_grad(same):
        near = torch.linspace(-2, -1, len(b.adv))
        logp = torch.where(torch.arange(len(b.adv)) == at, same, near).requires_grad_()
        old = torch.where(torch.arange(len(b.adv)) == at, same, b.old_logp)
        value = IMPOSSIBLE[name](TokenOut(logp=logp), tree.replace(b, old_logp=old))
        return value.detach(), torch.autograd.grad(value.sum(), logp)[0]

    value, grad = value_and_grad(-torch.inf)
    want_value, want_grad = value_and_grad(-1.5)
    others = torch.arange(len(b.adv)) != at
    torch.testing.assert_close(value[others], want_value[others], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad[others], want_grad[others], rtol=1e-12, atol=1e-12)
    assert value[at].isfinite() and grad[at] == 0


def test_certain_tokens_are_finite_under_dppo():
    """A log-prob of exactly 0: the other tokens together have probability 0."""
    logp = torch.zeros(2).requires_grad_()
    for old in (torch.zeros(2), torch.full((2,), -1e-9), torch.full((2,), -30.0)):
        for f in (loss.dppo_kl, loss.dppo_tv):
            x = f(logp, old, torch.tensor([1.0, -1.0]))
            assert x.isfinite().all() and torch.autograd.grad(x.sum(), logp)[0].isfinite().all()


def one_sequence(f, **options):
    """A loss of sequences on tokens that make up one."""
    return lambda p, o, a: f(p, o, a, p == p, torch.zeros(len(p), dtype=torch.long), 1, **options)


WIDE = {"low": 1 - 1e-15, "high": 1e15}  # no clip within e^+-20
BOUNDED = {  # what each loss is at a log-ratio d and an advantage of -1, where the loss of nothing stops it
    "ratio": (lambda p, o, a: loss.ratio(p, o), math.exp),
    "seq_ratio": (one_sequence(lambda p, o, a, *of: loss.seq_ratio(p, o, *of)), math.exp),
    "ppo_clip": (loss.ppo_clip, lambda d: max(math.exp(d), 0.8)),
    "gspo": (one_sequence(loss.gspo, **WIDE), math.exp),
    "gspo_token": (one_sequence(loss.gspo_token, **WIDE), math.exp),
    "gmpo": (one_sequence(loss.gmpo, low=1e9, high=1e9), math.exp),
    "sapo": (loss.sapo, lambda d: 4 / 1.05 / (1 + math.exp(-1.05 * math.expm1(d)))),
    "cpgd": (partial(loss.cpgd, drift=0.0, **WIDE), lambda d: d),
    "the drift": (lambda p, o, a: loss.cpgd(p, o, 0 * a, drift=1.0), lambda d: math.expm1(d) - d),
    "kl_cov": (lambda p, o, a: loss.kl_cov(p, o, a, a**2), lambda d: math.exp(d) + math.expm1(d) - d),
}


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("sign", [1, -1])
def test_log_ratios_count_up_to_20_and_no_further(name, sign):
    """The bound is of each token, before any mean, and nothing is bent before it is reached."""
    f, definition = BOUNDED[name]
    for d, counted in ((5, 5), (19, 19), (20, 20), (21, 20), (60, 20)):
        logp = torch.full((2,), -100.0)
        got = f(logp, logp - sign * d, torch.full((2,), -1.0))
        np.testing.assert_allclose(got, [definition(sign * counted)] * 2, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("name", ["seq_ratio", "gspo", "gspo_token", "gmpo"])
def test_one_token_beyond_the_bound_counts_as_one_at_the_bound(name):
    old = torch.tensor([-60.0, -7.0])
    got = BOUNDED[name][0](torch.tensor([-10.0, -9.0]), old, torch.full((2,), -1.0))
    np.testing.assert_allclose(got, [math.exp((20 - 2) / 2)] * 2, rtol=1e-12)


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl"])
def test_weights_without_a_cap_are_bounded_at_a_log_ratio_of_20(name):
    f = (
        partial(loss.cispo, high=1e300)
        if name == "cispo"
        else partial(getattr(loss, name), limit=1e9, cap=1e300)
    )
    for d, want in ((19.0, 19), (25.0, 20)):
        logp = torch.tensor([-1.0]).requires_grad_()
        (g,) = torch.autograd.grad(f(logp, torch.tensor([-1.0 - d]), torch.ones(1)).sum(), logp)
        assert g.item() == pytest.approx(-math.exp(want))


DEFAULTS = {
    "ppo_clip": {"low": 0.2, "high": 0.2, "dual": None},
    "gspo": {"low": 3e-4, "high": 4e-4},
    "gspo_token": {"low": 3e-4, "high": 4e-4},
    "gmpo": {"low": 0.4, "high": 0.4},
    "cispo": {"low": 1.0, "high": 4.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "cpgd": {"low": 0.2, "high": 0.2, "drift": 0.1, "cap": 4.0},
    "dppo_tv": {"limit": 0.15, "cap": 20.0},
    "dppo_kl": {"limit": 0.05, "cap": 20.0},
    "kl_cov": {"coef": 1.0},
}


@each("name", DEFAULTS)
def test_the_defaults_are_those_of_the_papers(name):
    """On log-ratios and probabilities of all sizes, values and gradients."""
    g = torch.Generator().manual_seed(0)
    size = torch.logspace(-5, 0.7, 400)
    old = -torch.logspace(-3, 1, 400)[torch.randperm(400, generator=g)] - size
    logp, adv = old + size * torch.where(torch.arange(400) % 2 == 0, 1, -1), torch.randn(400, generator=g)
    rest = (torch.ones(400),) if name == "kl_cov" else ()
    if name in SEQUENCE:
        rest = (torch.ones(400, dtype=torch.bool), torch.arange(400), 400)
    f, w = getattr(loss, name), torch.linspace(1, 2, 400)
    got = total_and_grad(f, logp, old, adv, *rest, w=w)
    want = total_and_grad(partial(f, **DEFAULTS[name]), logp, old, adv, *rest, w=w)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def binary_kl(old, new):
    """In nats, of the choice "this token or another", from the probabilities of another."""
    return (1 - old) * (math.log1p(-old) - math.log1p(-new)) + old * math.log(old / new)


@pytest.mark.parametrize(("old", "new"), [(1e-5, 1e-8), (1e-8, 1e-5), (1e-9, 0.3), (0.3, 1e-9), (1e-3, 2e-3)])
def test_dppo_kl_knows_how_certain_a_certain_token_is(old, new):
    """Up to p = 1 - 1e-10: with a limit just above the KL a token moves, with one just below it does not."""
    kl = binary_kl(old, new)
    adv = 1.0 if new < old else -1.0  # further out
    logp = torch.tensor([math.log1p(-new)])
    for limit, moves in ((kl * (1 + 1e-3), True), (kl * (1 - 1e-3), False)):
        x = logp.clone().requires_grad_()
        loss.dppo_kl(x, torch.tensor([math.log1p(-old)]), torch.tensor([adv]), limit=limit).sum().backward()
        assert (x.grad.item() != 0) == moves


def test_dppo_kl_takes_a_token_without_an_alternative_for_one_of_1_in_1e10():
    kl = binary_kl(0.5, 1e-10)
    for limit, moves in ((kl + 1e-6, True), (kl - 1e-6, False)):
        assert (slope(partial(loss.dppo_kl, limit=limit), 2.0, 1.0) != 0) == moves


@pytest.mark.parametrize(("name", "moves"), [("dppo_tv", False), ("dppo_kl", False), ("cispo", True)])
def test_a_token_that_only_the_old_policy_excluded(name, moves):
    """From impossible to p = 0.5 is beyond every trust region; back is open; a weight has its cap."""
    for adv, want in ((1.0, moves), (-1.0, True)):
        logp = torch.tensor([math.log(0.5)]).requires_grad_()
        value = getattr(loss, name)(logp, torch.tensor([-torch.inf]), torch.tensor([adv]))
        (g,) = torch.autograd.grad(value.sum(), logp)
        assert g.item() == pytest.approx(-adv * (5.0 if name == "cispo" else 20.0) * want)


def test_at_its_limit_a_token_still_moves_under_dppo():
    """The limit is the largest distance that is allowed."""
    logp, old = torch.tensor([-0.25]), torch.tensor([-1.0])
    limit = float((logp.exp() - old.exp()).abs())
    for at, moves in ((limit, True), (math.nextafter(limit, 0), False)):
        x = logp.clone().requires_grad_()
        loss.dppo_tv(x, old, torch.ones(1), limit=at).sum().backward()
        assert (x.grad.item() != 0) == moves


T = torch.zeros(3)
M, Q = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
BAD = [
    (lambda: loss.cispo(T, T[:2], T), "old_logp: expected [...] = [3], got [2]"),
    (lambda: loss.sapo(T, T, T[:1]), "adv: expected [...] = [3], got [1]"),
    (lambda: loss.gspo(T, T, T, M[:2], Q, 1), "mask: expected [T] = [3], got [2]"),
    (lambda: loss.gspo(T, T, T[:2], M, Q, 1), "adv: expected [T] = [3], got [2]"),
    (lambda: loss.gmpo(T, T, T, M, Q[:1], 1), "seq: expected [T] = [3], got [1]"),
    (lambda: loss.kl_cov(T, T, T, T[:2]), "chosen: expected [...] = [3], got [2]"),
    (lambda: loss.ppo_clip(T, T, T, dual=1.0), "dual: expected > 1, got 1.0"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_a_lower_limit_of_one_is_none_for_cpgd():
    """The ratio cannot fall below 0: a loss of any smaller one is not clipped."""
    logp, old_logp = torch.tensor([-9.0, -1.0]), torch.zeros(2)
    found = loss.cpgd(logp, old_logp, torch.ones(2), low=1.0, drift=0.0)
    torch.testing.assert_close(found, -(logp - old_logp))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adv", [-1e-3, -1.0, -1e6, -1e30])
@pytest.mark.parametrize("gap", [0.0, 1.0, 1.2, 20.0, 50.0])
def test_the_dual_clip_bounds_the_loss_whatever_the_advantage_is(gap, adv, dtype):
    """-dual A where the ratio is above dual and A < 0, without a gradient; else PPO's own clip."""
    a = torch.tensor([adv, -adv], dtype=dtype)
    logp = torch.full((2,), gap - 1.0, dtype=dtype, requires_grad=True)
    old = torch.full((2,), -1.0, dtype=dtype)
    got = loss.ppo_clip(logp, old, a, dual=3.0)
    (grad,) = torch.autograd.grad(got.sum(), logp)
    rho = math.exp(min(gap, 20.0))
    want = [-min(rho, 3.0) * adv, min(rho, 1.2) * adv]
    torch.testing.assert_close(got.detach(), torch.tensor(want, dtype=dtype), rtol=1e-5, atol=0)
    slopes = [-rho * adv if rho < 3 else 0.0, rho * adv if rho < 1.2 else 0.0]
    torch.testing.assert_close(grad, torch.tensor(slopes, dtype=dtype), rtol=1e-5, atol=0)
