"""The normaliser as data: each w against its definition, and what a cut of the batch does to it (nothing)."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import ref
import ref_rewards
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import loss, weight

pytestmark = pytest.mark.usefixtures("float64")
WEIGHTS = {
    "token_mean": (weight.token_mean, ref.token_mean),
    "seq_mean": (weight.seq_mean, ref.seq_mean),
    "seq_sum": (weight.seq_sum, ref.seq_sum),
    "constant": (partial(weight.constant, length=7), partial(ref.constant, length=7)),
}
each_name = each("name", WEIGHTS)
masks = (
    st.integers(0, 2**32).map(lambda s: np.random.default_rng(s)).map(lambda g: g.random((5, 6)) < g.random())
)


@each_name
@given(mask=masks)
def test_against_the_definition(name, mask):
    ours, definition = WEIGHTS[name]
    np.testing.assert_allclose(ours(torch.from_numpy(mask)), definition(mask), rtol=1e-10, atol=0)


@given(mask=masks)
def test_what_each_sums_to(mask):
    """token_mean and seq_mean are means: they sum to 1, and a row gets its share.
    An empty batch sums to 0."""
    m = torch.from_numpy(mask)
    some, rows = m.any(), m.any(-1).sum().clamp(min=1)
    torch.testing.assert_close(weight.token_mean(m).sum(), some.double())
    torch.testing.assert_close(weight.seq_mean(m).sum(-1), m.any(-1).double() / rows)
    torch.testing.assert_close(weight.seq_sum(m).sum(), m.sum() / rows)
    torch.testing.assert_close(weight.constant(m, 6).sum(), m.sum() / (rows * 6))


@given(mask=masks)
def test_a_mean_over_pairs(mask):
    """Against the definition; each pair has the same share, and one without a token has none."""
    mask = mask[:4]
    w = weight.pair_mean(torch.from_numpy(mask))
    np.testing.assert_allclose(w, ref.pair_mean(mask), rtol=1e-10, atol=0)
    shares, alive = w.view(2, -1).sum(-1), torch.from_numpy(mask).view(2, -1).any(-1)
    torch.testing.assert_close(shares, alive / alive.sum().clamp(min=1))
    with pytest.raises(ValueError, match="mask: expected an even number of rows, two per pair, got 3"):
        weight.pair_mean(torch.ones(3, 2, dtype=torch.bool))


@pytest.mark.parametrize("name", ["unit_mean", "unit_sum"])
@given(mask=masks, data=st.data())
def test_means_over_units_of_any_sizes(name, mask, data):
    """Against the definition; a unit without a token changes nothing."""
    cuts = data.draw(st.sets(st.integers(1, len(mask) - 1))) if len(mask) > 1 else set()
    unit = [b - a for a, b in itertools.pairwise([0, *sorted(cuts), len(mask)])]
    w = getattr(weight, name)(torch.from_numpy(mask), unit)
    np.testing.assert_allclose(w, getattr(ref_rewards, name)(mask, unit), rtol=1e-10, atol=0)
    if len(mask) % 2 == 0:
        pairs = weight.unit_mean(torch.from_numpy(mask), [2] * (len(mask) // 2))
        torch.testing.assert_close(pairs, weight.pair_mean(torch.from_numpy(mask)), rtol=0, atol=0)


@each_name
@given(mask=masks)
def test_masked_rows_and_padding_change_nothing(name, mask):
    """B counts the rows that have a token in mask: what a filter has masked
    away does not dilute the others."""
    m = torch.from_numpy(mask)
    wide = torch.zeros(8, 9, dtype=torch.bool)
    wide[1:6, :6] = m
    out = WEIGHTS[name][0](wide)
    assert torch.equal(out[1:6, :6], WEIGHTS[name][0](m))
    out[1:6, :6] = 0
    assert (out == 0).all()


@each_name
def test_a_batch_without_a_token_gives_zeros_and_not_nan(name):
    """A fault of other systems: a masked mean of nothing is 0 / 0, and one such
    row makes the whole step NaN."""
    out = WEIGHTS[name][0](torch.zeros(3, 4, dtype=torch.bool))
    assert (out == 0).all()


def test_the_four_differ_on_ragged_rows():
    """An option that silently changes nothing would pass every test that looks at one of them."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert weight.token_mean(mask)[:, 0].tolist() == [0.25, 0.25]
    assert weight.seq_mean(mask)[:, 0].tolist() == [1 / 6, 1 / 2]
    assert weight.seq_sum(mask)[:, 0].tolist() == [0.5, 0.5]
    assert weight.constant(mask, 10)[:, 0].tolist() == [0.05, 0.05]


def test_the_batch_is_divided_by_also_with_a_fixed_length():
    """A fault of other systems: sum / length without the number of rows, so that
    the gradient grows with the micro-batch."""
    one, four = torch.ones(1, 3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool)
    assert weight.constant(four, 5).sum() == weight.constant(one, 5).sum()


pairs = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=8
).map(lambda rows: np.array(rows).T)


@pytest.mark.parametrize("name", ["truncated_is", "masked_is"])
@given(data=pairs, cap=st.sampled_from([1.0, 2.0, 5.0]))
def test_importance_weights_against_the_definition(name, data, cap):
    got = getattr(weight, name)(*torch.from_numpy(data), cap=cap)
    np.testing.assert_allclose(got, getattr(ref, name)(*data, cap), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("correct", [weight.truncated_is, weight.masked_is])
def test_importance_weights_at_extremes_and_outside_the_mask(correct):
    w = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0])
    old = torch.tensor([-1.0, -1.0, -300.0, torch.nan, torch.inf])
    sampler = torch.tensor([-1.0, -300.0, -1.0, 0.0, torch.nan])
    out = correct(w, old, sampler)
    assert out[0] == 0.5 and out[1] == (1.0 if correct is weight.truncated_is else 0.0)
    assert 0 <= out[2] < 1e-8 and out[3:].tolist() == [0.0, 0.0]


def test_without_a_cap_the_correction_is_unbiased_and_with_one_it_is_not():
    """By enumeration: E under the sampler of ratio f is E under the policy of f; the cap takes
    from where the ratio is large."""
    old, sampler = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    f, p = torch.tensor([1.0, 2.0, 3.0]), sampler.exp()
    want = (old.exp() * f).sum()
    torch.testing.assert_close((weight.truncated_is(p, old, sampler, cap=1e9) * f).sum(), want)
    torch.testing.assert_close((weight.truncated_is(p, old, sampler, cap=2.0) * f).sum(), want - 0.2 * 1.5)
    torch.testing.assert_close((weight.masked_is(p, old, sampler, cap=2.0) * f).sum(), want - 0.7)


def rows(seed, b=5, s=6):
    """(w, old_logp, logp, adv, mask), numpy [b, s]: ragged, one row empty; 0 outside mask."""
    g = np.random.default_rng(seed)
    mask = g.random((b, s)) < 0.7
    mask[0] = False
    w, adv = g.random((b, s)) * mask, g.normal(size=(b, 1)) * mask
    old = -3 * g.random((b, s)) * mask
    return w, old, (old + 0.8 * g.normal(size=(b, s))) * mask, adv, mask


seeds = st.integers(0, 2**32)
caps = st.floats(0.1, 4)


def tensors(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


@given(seed=seeds, low=st.floats(0.1, 1), cap=caps)
def test_token_corrections_against_the_definition(seed, low, cap):
    w, old, logp, _, _ = rows(seed)
    for name, options in (
        ("importance", {}),
        ("truncated_is", {"cap": cap}),
        ("masked_is", {"cap": cap}),
        ("icepop", {"low": low, "high": low + cap}),
    ):
        got = getattr(weight, name)(*tensors(w, old, logp), **options)
        want = [getattr(ref, name)(*row, **options) for row in zip(w, old, logp)]
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@given(seed=seeds, cap=caps)
def test_sequence_corrections_against_the_definition(seed, cap):
    w, old, logp, _, mask = rows(seed)
    rho = ref.seq_importance(old, logp, mask)[:, None]
    args = tensors(w, old, logp, mask)
    for got, factor in (
        (weight.importance_seq(*args), rho),
        (weight.truncated_is_seq(*args, cap=cap), np.minimum(rho, cap)),
        (weight.masked_is_seq(*args, cap=cap), np.where(rho <= cap, rho, 0)),
    ):
        np.testing.assert_allclose(got, w * factor, rtol=1e-10, atol=1e-12)


@given(seed=seeds, limit=st.floats(-0.5, 0.5))
def test_off_policy_mask_against_the_definition(seed, limit):
    w, old, logp, adv, mask = rows(seed)
    got = weight.off_policy_mask(*tensors(w, old, logp, adv, mask), limit=limit)
    np.testing.assert_allclose(got, ref.off_policy_mask(w, old, logp, adv, mask, limit), rtol=1e-12)


@given(seed=seeds, share=st.floats(0.01, 1))
def test_the_top_share_is_of_the_batch_and_not_of_each_row(seed, share):
    w, entropy, _, _, mask = rows(seed)
    entropy = np.round(-entropy, 1)  # with ties
    kept = ref.top_share(entropy, mask, share)
    assert kept.sum() == math.ceil(round(share * mask.sum(), 9))
    got = weight.high_entropy(*tensors(w, entropy, mask), share=share)
    np.testing.assert_array_equal(got, np.where(kept, w, 0))


def test_the_share_is_rounded_up_once():
    """0.2 * 15 is 3.0000000000000004: three tokens, not four."""
    x, mask = torch.arange(15.0).view(3, 5), torch.ones(3, 5, dtype=torch.bool)
    assert weight.top_share(x, mask, share=0.2).nonzero().tolist() == [[2, 2], [2, 3], [2, 4]]
    assert weight.top_share(x, mask & False, share=0.2).sum() == 0


@given(seed=seeds)
def test_covariance_against_the_definition_and_its_mean_is_the_covariance(seed):
    _, old, _, adv, mask = rows(seed)
    got = weight.covariance(*tensors(old, adv, mask)).numpy()
    np.testing.assert_allclose(got, ref.covariance(old, adv, mask), rtol=1e-10, atol=1e-12)
    if mask.sum() > 1:
        assert got.sum() / mask.sum() == pytest.approx(np.cov(old[mask], adv[mask], ddof=0)[0, 1], abs=1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_covariance_of_the_fewest_tokens(tokens):
    """One token is its own mean, and two are as far from theirs."""
    mask = torch.arange(4)[None] < tokens
    logp, adv = torch.tensor([[-1.0, -3.0, torch.nan, -9.0]]), torch.tensor([[2.0, 1.0, 5.0, torch.nan]])
    want = [0.5, 0.5, 0.0, 0.0] if tokens == 2 else [0.0] * 4
    assert weight.covariance(logp, adv, mask).tolist() == [want]


@given(seed=seeds, share=st.floats(0.05, 0.5))
def test_clip_cov_drops_that_many_of_the_tokens_in_its_band(seed, share):
    w, _, _, _, mask = rows(seed)
    w = np.where(mask, w + 0.1, 0)
    cov = np.random.default_rng(seed).normal(size=mask.shape) * 3
    args = tensors(w, cov, mask)
    got = weight.clip_cov(*args, seed, share=share, low=1.0, high=5.0).numpy()
    dropped, inside = (got == 0) & mask, mask & (cov >= 1) & (cov <= 5)
    assert dropped.sum() == min(math.ceil(round(share * mask.sum(), 9)), inside.sum())
    assert (inside | ~dropped).all()
    np.testing.assert_array_equal(got[~dropped], w[~dropped])
    wide = [torch.cat([x, torch.zeros(5, 3, dtype=x.dtype)], -1) for x in args]
    padded = weight.clip_cov(*wide, seed, share=share, low=1.0, high=5.0).numpy()
    np.testing.assert_array_equal(padded[:, :6], got)  # the draw does not see padding


def test_clip_cov_draws_by_its_key():
    mask = torch.ones(8, 20, dtype=torch.bool)
    w, cov = mask.double(), torch.full((8, 20), 2.0)
    draws = [weight.clip_cov(w, cov, mask, key, share=0.1) for key in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@given(seed=seeds)
def test_corrections_compose_in_any_order_where_each_looks_at_its_own(seed):
    w, old, logp, adv, mask = tensors(*rows(seed))
    steps = [
        lambda x: weight.truncated_is(x, old, logp, cap=1.5),
        lambda x: weight.masked_is_seq(x, old, logp, mask, cap=2.0),
        lambda x: weight.off_policy_mask(x, old, logp, adv, mask, limit=0.1),
        lambda x: weight.high_entropy(x, -old, mask, share=0.5),
    ]
    there, back = w, w
    for f in steps:
        there = f(there)
    for f in steps[::-1]:
        back = f(back)
    torch.testing.assert_close(there, back, rtol=1e-12, atol=0)
    assert (there <= w * 3).all() and (there >= 0).all()


@given(seed=seeds)
def test_decoupled_ppo_is_importance_times_the_clip_about_the_proximal_policy(seed):
    """AReaL's objective: (prox / behaviour) min(u A, clip(u) A), u = pi / prox."""
    w, prox, behaviour, adv, mask = rows(seed)
    logp = (prox + 0.3 * np.random.default_rng(seed).normal(size=mask.shape)) * mask
    t = dict(zip(("w", "prox", "behaviour", "adv", "logp"), tensors(w, prox, behaviour, adv, logp)))
    ours = weight.importance(t["w"], t["prox"], t["behaviour"]) * loss.ppo_clip(
        t["logp"], t["prox"], t["adv"]
    )
    want = 0.0
    for i in np.argwhere(mask):
        i = tuple(i)
        u = math.exp(logp[i] - prox[i])
        gain = min(u * adv[i], min(max(u, 0.8), 1.2) * adv[i])
        want -= w[i] * math.exp(prox[i] - behaviour[i]) * gain
    assert ours.sum().item() == pytest.approx(want, rel=1e-10, abs=1e-12)


def test_extreme_mismatch_and_garbage_outside_the_mask_stay_finite():
    """The sampler's log-prob of a token that it could not have drawn, and NaN where nothing was sampled."""
    w, mask = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[True, True, False]])
    old, logp = torch.tensor([[-1.0, -2.0, torch.nan]]), torch.tensor([[-1e4, -2.0, torch.nan]])
    for f in (weight.importance, weight.truncated_is, weight.masked_is, weight.icepop):
        x = f(w, old, logp)
        assert x.isfinite().all() and x[0, 2] == 0
    for f in (weight.importance_seq, weight.truncated_is_seq, weight.masked_is_seq):
        x = f(w, old, logp, mask)
        assert x.isfinite().all() and x[0, 2] == 0


def test_a_response_that_the_policy_excludes_counts_nothing():
    """Also where the sampler's own number for another token is -inf, so that the sum would be inf - inf."""
    w, mask = torch.full((1, 3), 1 / 3), torch.ones(1, 3, dtype=torch.bool)
    old, logp = torch.tensor([[-torch.inf, -1.0, -1.0]]), torch.tensor([[-1.0, -torch.inf, -1.0]])
    for f in (weight.importance_seq, weight.truncated_is_seq, weight.masked_is_seq):
        assert (f(w, old, logp, mask) < 1e-8).all()
    assert (weight.off_policy_mask(w, old, logp, -w, mask, limit=1.0) == 0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_log_ratios_of_importance_count_up_to_20(sign):
    """Of each token, or of the whole response, whose tokens add up without a bound of their own."""
    w, mask, zero = torch.full((1, 2), 0.5), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    for d, counted in ((9.0, 9), (19.0, 19), (21.0, 20), (90.0, 20)):
        old = torch.tensor([[sign * d, 0.0]])
        want = torch.tensor([[0.5 * math.exp(sign * counted), 0.5]])
        uncapped = partial(weight.truncated_is, cap=1e30), partial(weight.icepop, low=0, high=1e30)
        for f in (weight.importance, *uncapped):
            torch.testing.assert_close(f(w, old, zero), want, rtol=1e-12, atol=0)
        apart = torch.tensor([[sign * (d + 50.0), -sign * 50.0]])
        torch.testing.assert_close(weight.importance_seq(w, apart, zero, mask), want[:, :1].expand(1, 2))


def test_what_is_at_the_edge_of_a_band_is_inside():
    """Bands are closed: a ratio of 1 passes a limit of 1, a covariance of `low` or `high` may be drawn."""
    w, logp, mask = torch.full((1, 3), 0.5), torch.full((1, 3), -0.3), torch.ones(1, 3, dtype=torch.bool)
    assert torch.equal(weight.icepop(w, logp, logp, low=1.0, high=1.0), w)
    assert torch.equal(weight.masked_is(w, logp, logp, cap=1.0), w)
    assert torch.equal(weight.masked_is_seq(w, logp, logp, mask, cap=1.0), w)
    cov = torch.tensor([[1.0, 5.0, 5.1]])
    assert weight.clip_cov(w, cov, mask, 0, share=1.0, low=1.0, high=5.0).tolist() == [[0.0, 0.0, 0.5]]
    at = torch.full((1, 3), -1.0)  # half a nat further from the sampler, a token
    assert torch.equal(weight.off_policy_mask(w, at, at + 0.5, at, mask, limit=0.5), w)


def test_a_response_that_is_not_bad_is_kept_however_far_the_policy_is():
    w, mask = torch.full((3, 2), 0.5), torch.ones(3, 2, dtype=torch.bool)
    adv = torch.tensor([[-1.0], [0.0], [1.0]])
    got = weight.off_policy_mask(w, torch.full((3, 2), -9.0), torch.zeros(3, 2), adv, mask, limit=0.1)
    assert got[:, 0].tolist() == [0.0, 0.5, 0.5]


def test_clip_cov_rounds_its_share_up_once():
    mask, cov = torch.ones(3, 5, dtype=torch.bool), torch.full((3, 5), 2.0)
    assert (weight.clip_cov(mask.double(), cov, mask, 0, share=0.2) == 0).sum() == 3


DEFAULTS = {
    "truncated_is": {"cap": 2.0},
    "masked_is": {"cap": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "truncated_is_seq": {"cap": 2.0},
    "masked_is_seq": {"cap": 2.0},
    "high_entropy": {"share": 0.2},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_those_of_the_papers(name):
    """On ratios on both sides of every limit; 20,000 tokens, of which Clip-Cov drops 4."""
    w, mask = torch.ones(200, 100), torch.ones(200, 100, dtype=torch.bool)
    x = torch.linspace(-4, 12, 200)[:, None].expand(200, 100) + torch.linspace(0, 1, 100)
    zero = torch.zeros_like(x)
    args = {"high_entropy": (w, x, mask), "clip_cov": (w, x, mask, 3)}.get(name, (w, x / 4, zero))
    if name.endswith("_seq"):
        args = (w, x / 400, zero, mask)
    f = getattr(weight, name)
    got = f(*args)
    assert torch.equal(got, f(*args, **DEFAULTS[name])) and not torch.equal(got, w)


W, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
BAD = [
    (lambda: weight.truncated_is(W, W[:1], W), "old_logp: expected [...] = [2, 3], got [1, 3]"),
    (lambda: weight.icepop(W, W, W[:, :2]), "logp: expected [...] = [2, 3], got [2, 2]"),
    (lambda: weight.masked_is_seq(W, W, W, MASK[:1]), "mask: expected [B, S] = [2, 3], got [1, 3]"),
    (
        lambda: weight.off_policy_mask(W, W, W, W[:1], MASK, limit=0.1),
        "adv: expected [B, 1] = [2, 1], got [1, 1]",
    ),
    (lambda: weight.high_entropy(W, W[:1], MASK), "entropy: expected [B, S] = [2, 3], got [1, 3]"),
    (lambda: weight.high_entropy(W, W, MASK, share=0.0), "share: expected 0 < share <= 1, got 0.0"),
    (lambda: weight.high_entropy(W, W, MASK, share=1.5), "share: expected 0 < share <= 1, got 1.5"),
    (lambda: weight.constant(MASK, 0), "length: expected > 0 tokens, got 0"),
    (lambda: weight.constant(MASK, -1), "length: expected > 0 tokens, got -1"),
    (lambda: weight.covariance(W, W[:1], MASK), "adv: expected [B, S] = [2, 3], got [1, 3]"),
    (lambda: weight.clip_cov(W, W[:1], MASK, 0), "cov: expected [B, S] = [2, 3], got [1, 3]"),
    (lambda: weight.token_mean(MASK[0]), "mask: expected [B, S] = [B, S], got [3]"),
]


@each(("call", "message"), BAD)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("fn", [weight.importance, weight.truncated_is, weight.masked_is, weight.icepop])
def test_a_token_of_negative_weight_is_corrected_as_one_of_positive_weight(fn):
    """w is any number where a loss is held up by some rows and pushed down by others: only 0 is no token."""
    g = torch.Generator().manual_seed(0)
    w, old, logp = (torch.randn(4, 7, generator=g) for _ in range(3))
    w[torch.rand(4, 7, generator=g) < 0.2] = 0
    old, logp = old.clamp(max=0) / 4, logp.clamp(max=0) / 4
    torch.testing.assert_close(fn(-w, old, logp), -fn(w, old, logp), rtol=0, atol=0)
    ratio = fn(w, old, logp)[w != 0] / w[w != 0]
    torch.testing.assert_close(ratio, fn(torch.ones_like(w), old, logp)[w != 0])
    assert (ratio != 1).any() and (fn(w, old, logp)[w == 0] == 0).all()
