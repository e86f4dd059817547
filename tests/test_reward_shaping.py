"""Rewards in, rewards out; the state of the running moments does not depend on how the rewards were cut."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import ref
import ref_rewards
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import advantage, tree
from rft_fn import reward_shaping as rs

pytestmark = pytest.mark.usefixtures("float64")
rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=20)


@given(reward=rewards, cuts=st.lists(st.integers(1, 19), max_size=5), offset=st.sampled_from([0.0, 1e6]))
def test_moments_against_the_definition_for_every_cut(reward, cuts, offset):
    """A fault of other systems: moments per micro-batch and per rank, so that
    the scale depends on the machine."""
    x = torch.tensor(reward) + offset
    edges = [0, *sorted({min(c, len(x)) for c in cuts} | {len(x)})]
    state = rs.moments()
    for a, b in itertools.pairwise(edges):
        _, state = rs.running_norm(x[a:b], state)
    want = ref.moments(x.numpy())
    got = [float(v) for v in tree.leaves(state)]
    assert got[:2] == pytest.approx(want[:2], rel=1e-10, abs=1e-10)
    assert got[2] == pytest.approx(want[2], rel=1e-10, abs=1e-5 if offset else 1e-10)


@given(reward=st.lists(st.integers(-5, 5), min_size=2, max_size=9), centre=st.booleans())
def test_the_last_rewards_are_normalised_by_all_moments_seen(reward, centre):
    first, last = torch.tensor(reward[:-1]).double(), torch.tensor(reward[-1:]).double()
    _, state = rs.running_norm(first, rs.moments())
    got, _ = rs.running_norm(last, state, centre=centre)
    std = np.std(reward, ddof=1)
    want = (reward[-1] - centre * np.mean(reward)) / (std + 1e-8 if std else 1.0)
    np.testing.assert_allclose(got, [want], rtol=1e-10, atol=1e-10)


@given(
    reward=st.lists(st.integers(-5, 5), min_size=2, max_size=9), centre=st.booleans(),
    unit=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]), mean=st.sampled_from([0.0, 1.0, -1e3, 1e5]),
)  # fmt: skip
def test_rewards_of_any_spread_beside_any_mean_are_scaled(reward, centre, unit, mean):
    """Only equal rewards are left as they are: a spread of 1e-11 of the mean is one."""
    x = mean + unit * np.array(reward, np.float64)
    got, _ = rs.running_norm(torch.from_numpy(x), rs.moments(), centre=centre)
    scale = np.std(x, ddof=1) + 1e-8 if len(set(reward)) > 1 else 1.0
    want = (x - centre * np.mean(x)) / scale
    rounding = 1e-14 * abs(mean) / scale  # of the mean, as a part of the spread
    np.testing.assert_allclose(got, want, rtol=1e-6 + 10 * rounding, atol=1e-9 + 10 * rounding)


@given(
    rows=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), limit=st.floats(1e-3, 1e6),
)  # fmt: skip
def test_clip_is_the_identity_inside_and_the_bound_outside(rows, limit):
    got = rs.clip(torch.tensor(rows), limit).tolist()
    assert got == [min(max(x, -limit), limit) for x in rows]


@given(seed=st.integers(0, 2**32), nats=st.sampled_from([1e-6, 1.0, 50.0, 1e4]), coef=st.floats(-2, 5))
def test_kl_in_reward_is_linear_in_coefficient_and_log_ratio(seed, nats, coef):
    """No log ratio is bounded, however far the policy has gone."""
    rng = np.random.default_rng(seed)
    logp, ref_logp, mask = nats * rng.normal(size=(2, 3, 5)), np.zeros((3, 5)), rng.random((3, 5)) > 0.3
    logp = logp[0]
    reward = rng.normal(size=3)
    got = rs.kl_in_reward(*(torch.from_numpy(x) for x in (reward, logp, ref_logp, mask)), coef=coef)
    want = ref.kl_in_reward(reward, logp, ref_logp, mask, coef)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_the_state_is_an_argument_and_not_changed():
    start = rs.moments()
    rs.running_norm(torch.tensor([1.0, 2.0]), start)
    assert [float(v) for v in tree.leaves(start)] == [0.0, 0.0, 0.0]


@each("values", [[0.1] * 7, [1 / 3] * 3, [-2.7e5] * 11, [5.0]])
@each("centre", [True, False])
def test_equal_rewards_are_not_blown_up(values, centre):
    """A fault of other systems: division by the std of constants: inf after one reward,
    rounding noise over 1e-8 after many."""
    x, state = torch.tensor(values), rs.moments()
    for _ in range(3):
        out, state = rs.running_norm(x, state, centre=centre)
        want = torch.zeros_like(x) if centre else x
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-9)


@each("offset", [0.0, 1e3, 1e6])
@each("scale", [1e-3, 1.0, 1e3])
def test_the_unit_and_the_zero_of_rewards_do_not_count(offset, scale):
    """Also where they vary by a millionth of their mean: only rewards that are equal are left alone."""
    x = torch.tensor([1.0, 2.0, 4.0, 4.5])
    want = (x - x.mean()) / x.std()
    got, _ = rs.running_norm(scale * (x + offset), rs.moments(), eps=0.0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    divided, _ = rs.running_norm(scale * (x + offset), rs.moments(), centre=False, eps=0.0)
    torch.testing.assert_close(divided, (x + offset) / x.std(), rtol=1e-6, atol=1e-6)


def test_eps_is_added_to_the_scale():
    got, _ = rs.running_norm(torch.tensor([1.0, 3.0]), rs.moments(), eps=1.0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0]) / (2**0.5 + 1))


def test_the_type_of_the_rewards_is_kept():
    out, state = rs.running_norm(torch.tensor([1.0, 3.0], dtype=torch.float32), rs.moments())
    assert out.dtype == torch.float32 and state.mean.dtype == torch.float64
    torch.testing.assert_close(out, torch.tensor([-1.0, 1.0], dtype=torch.float32) * 0.5**0.5)


@given(
    length=st.integers(0, 300), max_new=st.integers(1, 200), share=st.floats(0.01, 1), scale=st.floats(0.1, 3)
)
def test_overlong_penalty_against_the_definition(length, max_new, share, scale):
    buffer = max(1, int(share * max_new))
    got = rs.overlong_penalty(torch.tensor(length), max_new=max_new, buffer=buffer, scale=scale)
    assert float(got) == pytest.approx(ref.overlong_penalty(length, max_new, buffer, scale), abs=1e-10)


@given(
    seed=st.integers(0, 10**6),
    clip=st.sampled_from([0.0, 0.7]),
    overlong=st.sampled_from([0, 3]),
    kl=st.sampled_from([0.0, 0.1]),
    normalize=st.booleans(),
)
def test_a_chain_against_the_definition(seed, clip, overlong, kl, normalize):
    """Two steps, the second with the state of the first, which does not change."""
    g = torch.Generator().manual_seed(seed)
    chain = rs.chain(clip=clip, overlong=overlong, max_new=6, kl=kl, normalize=normalize)
    state, before = chain.init(), [] if normalize else None
    for _ in range(2):
        length = torch.randint(1, 7, (6,), generator=g)
        mask = torch.arange(8)[None] < length[:, None]
        logp, ref_logp = (torch.where(mask, -torch.rand((6, 8), generator=g), 0) for _ in range(2))
        reward = torch.randn((2, 3), generator=g)
        batch = SimpleNamespace(mask=mask, logp=logp)
        kept = tree.map(torch.clone, state)
        got, after, metrics = chain.apply(reward, state, batch, ref_logp if kl else None)
        ratio = (logp - ref_logp).sum(-1)
        want, before = ref.shaped(
            reward.flatten().tolist(),
            length.tolist(),
            ratio.tolist(),
            clip=clip,
            overlong=overlong,
            max_new=6,
            kl=kl,
            before=before,
        )
        np.testing.assert_allclose(got.flatten(), want, rtol=1e-9, atol=1e-9)
        assert metrics == ({"kl/in_reward": pytest.approx(float(ratio.mean()))} if kl else {})
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(kept), tree.leaves(state), strict=True))
        state = after
    if not normalize:
        assert float(state.count) == 0


def test_a_chain_with_a_kl_needs_the_initial_model():
    chain = rs.chain(kl=0.1)
    batch = SimpleNamespace(mask=torch.ones(1, 1, dtype=torch.bool), logp=torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"^ref_logp: expected a tensor, got None"):
        chain.apply(torch.zeros(1, 1), chain.init(), batch)


def test_overlong_penalty_by_hand():
    got = rs.overlong_penalty(torch.tensor([60, 80, 90, 100, 120]), max_new=100, buffer=20)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


@given(seed=st.integers(0, 2**32))
def test_kl_in_reward_against_the_definition(seed):
    rng = np.random.default_rng(seed)
    logp, ref_logp, mask = rng.normal(size=(4, 5)), rng.normal(size=(4, 5)), rng.random((4, 5)) > rng.random()
    reward = rng.normal(size=4)
    got = rs.kl_in_reward(*(torch.from_numpy(x) for x in (reward, logp, ref_logp, mask)), coef=0.3)
    np.testing.assert_allclose(
        got, ref.kl_in_reward(reward, logp, ref_logp, mask, 0.3), rtol=1e-10, atol=1e-10
    )


def test_every_row_gets_its_own_reward_on_its_last_token():
    """A fault of other systems: only the first row of a pack is rewarded, or the
    reward lands on a padding column."""
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
    reward, garbage = (
        torch.tensor([1.0, 2.0, torch.inf]),
        torch.full((3, 4), torch.nan).masked_fill(mask, 0.0),
    )
    out = rs.kl_in_reward(reward, garbage, garbage, mask, coef=0.1)
    assert out.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_clip():
    assert rs.clip(torch.tensor([-3.0, 0.5, 3.0]), 1.0).tolist() == [-1.0, 0.5, 1.0]


@st.composite
def lengths(draw):
    """(length, correct), [N, G]."""
    n, g = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    high = draw(st.sampled_from([2, 4, 5000]))
    return rng.integers(1, high, size=(n, g)), rng.random((n, g)) < draw(st.sampled_from([0.0, 0.5, 1.0]))


@given(case=lengths())
def test_length_penalty_against_the_definition(case):
    got = rs.length_penalty(*(torch.from_numpy(x) for x in case))
    np.testing.assert_allclose(got, ref.length_penalty(*case), rtol=1e-10, atol=1e-10)


@given(case=lengths(), scale=st.sampled_from([0.01, 1 / 3, 7.0]))
def test_length_penalty_does_not_know_the_unit_of_length(case, scale):
    """Tokens, or a share of the limit: the range of the group is what counts."""
    length, correct = (torch.from_numpy(x) for x in case)
    want, got = rs.length_penalty(length, correct), rs.length_penalty(length * scale, correct)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@given(case=lengths())
def test_the_shorter_right_answer_is_better_and_no_wrong_one_gains(case):
    length, correct = (torch.from_numpy(x) for x in case)
    got = rs.length_penalty(length, correct)
    assert got.abs().max() <= 0.5 and (got[~correct] <= 0).all()
    for row, size, right in zip(got, length, correct):
        by_size = row[right][size[right].argsort()]
        assert (by_size.diff() <= 0).all()
        if size.min() == size.max():
            assert (row == 0).all()


def test_length_penalty_by_hand():
    length = torch.tensor([[10, 20, 30, 10], [5, 5, 5, 5]])
    correct = torch.tensor([[True, True, True, False], [True, False, True, False]])
    assert rs.length_penalty(length, correct).tolist() == [[0.5, 0.0, -0.5, 0.0], [0.0] * 4]


@given(rows=st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=9))
def test_gated_against_the_definition(rows):
    reward, gate = (np.array(x) for x in zip(*rows))
    got = rs.gated(torch.from_numpy(reward), torch.from_numpy(gate))
    np.testing.assert_array_equal(got, ref.gated(reward, gate))


def test_a_closed_gate_shuts_out_what_is_not_a_number():
    """A fault of other systems: reward times gate, where a reward of NaN is one with the gate closed too."""
    got = rs.gated(torch.tensor([[torch.nan, 1.0], [torch.inf, 2.0]]), torch.tensor([[False, True]] * 2))
    assert got.tolist() == [[0.0, 1.0], [0.0, 2.0]]


@given(reward=st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=3, max_size=3), max_size=6))
def test_varied_against_the_definition(reward):
    got = rs.varied(torch.tensor(reward).view(-1, 3))
    assert got.tolist() == ref.varied(reward).tolist()


@given(level=st.floats(-1e6, 1e6), exponent=st.integers(-30, 6))
def test_rewards_vary_where_they_are_not_equal_however_little(level, exponent):
    reward = torch.full((2, 5), level)
    reward[0, 2] += 10.0**exponent
    assert rs.varied(reward).tolist() == [bool(reward[0, 2] != level), False]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_varied_is_where_advantages_are_not_zero(value):
    """The same question as `advantage.grpo` asks, so that no group is kept which then teaches nothing."""
    reward = torch.full((3, 7), value)
    reward[1, 3] += 0.5
    assert rs.varied(reward).tolist() == [False, True, False]
    assert (advantage.grpo(reward) != 0).any(-1).tolist() == [False, True, False]


@given(
    coef=st.floats(1e-4, 10), kl=st.floats(-0.1, 1), target=st.floats(1e-3, 1), horizon=st.floats(1, 1e5),
    count=st.floats(0, 1e4),
)  # fmt: skip
def test_adaptive_kl_against_the_definition(coef, kl, target, horizon, count):
    got = rs.adaptive_kl(coef, kl, target=target, horizon=horizon, count=count)
    assert got == pytest.approx(ref.adaptive_kl(coef, kl, target, horizon, count), rel=1e-10)


def steer(response, *, coef, steps=400, count=256.0, horizon=10_000.0, target=0.06):
    """The coefficients of a run whose mean KL is `response(coef)`."""
    found = [coef]
    for _ in range(steps):
        kl = response(found[-1])
        found.append(rs.adaptive_kl(found[-1], kl, target=target, horizon=horizon, count=count))
    return found


@each("start", [0.002, 0.1, 3.0])
@each(
    "response",
    [lambda c: 0.012 / c, lambda c: 0.3 / (1 + 20 * c), lambda c: 0.02 + 0.4 * math.exp(-10 * c)],
    ids=["inverse", "saturating", "floor"],
)
def test_the_controller_steers_to_the_target(response, start):
    """The stronger the penalty the smaller the KL: from ten times too much and too little, it gets there."""
    found = steer(response, coef=start, steps=3000)
    assert abs(response(start) / 0.06 - 1) > 0.3
    assert response(found[-1]) == pytest.approx(0.06, rel=1e-2)
    errors = [abs(math.log(response(c) / 0.06)) for c in found]
    assert all(later <= before + 1e-12 for before, later in itertools.pairwise(errors))  # no overshooting


def test_the_controller_is_slow_and_bounded():
    """A step is at most 20 % of count / horizon, so one wild estimate moves little."""
    wild = [
        rs.adaptive_kl(0.1, kl, target=0.06, horizon=1000, count=100) for kl in (1e9, math.inf, 0.0, -5.0)
    ]
    assert wild == pytest.approx([0.102, 0.102, 0.098, 0.098])


def test_a_fixed_coefficient_stays():
    """At the target, and where nothing was counted, to the bit."""
    assert set(steer(lambda c: 0.06, coef=0.123)) == {0.123}
    assert set(steer(lambda c: 9.0, coef=0.123, count=0.0)) == {0.123}


R = torch.zeros(2, 4)


@each(
    ("call", "message"),
    [
        (lambda: rs.clip(R, 0.0), "^limit: expected > 0, got 0.0"),
        (
            lambda: rs.overlong_penalty(R, max_new=10, buffer=0),
            "^buffer: expected 0 < buffer <= max_new = 10",
        ),
        (lambda: rs.overlong_penalty(R, max_new=10, buffer=11), "^buffer: .* tokens, got 11"),
        (lambda: rs.length_penalty(R[0], R[0] > 0), r"^length: expected \[N, G\] .*got \[4\]"),
        (lambda: rs.length_penalty(R, R[:, 1:] > 0), r"^correct: expected \[N, G\] = \[2, 4\], got \[2, 3\]"),
        (lambda: rs.gated(R, R[:1] > 0), r"^gate: expected \[...\] = \[2, 4\], got \[1, 4\]"),
        (lambda: rs.varied(R.flatten()), r"^reward: expected \[N, G\] .*got \[8\]"),
        (lambda: rs.adaptive_kl(1.0, 0.1, target=0.0, horizon=1, count=1), "^target: expected > 0, got 0.0"),
        (
            lambda: rs.adaptive_kl(1.0, 0.1, target=math.nan, horizon=1, count=1),
            "^target: expected > 0, got nan",
        ),
        (lambda: rs.adaptive_kl(1.0, 0.1, target=1, horizon=-2, count=1), "^horizon: expected > 0, got -2"),
        (lambda: rs.kl_in_reward(R, R, R, R > 0, coef=0.1), r"^reward: expected \[B\]"),
        (
            lambda: rs.kl_in_reward(R[:, 0], R, R, R[:, 1:] > 0, coef=0.1),
            r"^mask: expected \[B, S\] = \[2, 4\]",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_empty_batch_leaves_the_moments_alone():
    """No mean is taken of nothing: a NaN in the state would stay for good."""
    state = rs.running_norm(torch.tensor([1.0, 3.0]), rs.moments())[1]
    got, after = rs.running_norm(torch.zeros(0, 4), state)
    assert got.shape == (0, 4)
    assert [float(x) for x in tree.leaves(after)] == [float(x) for x in tree.leaves(state)]


def test_a_token_that_both_policies_exclude_costs_no_kl():
    logp, mask = torch.tensor([[-1.0, -torch.inf]]), torch.ones(1, 2, dtype=torch.bool)
    got = rs.kl_in_reward(torch.tensor([2.0]), logp, logp, mask, coef=0.1)
    assert got.tolist() == [[0.0, 2.0]]


steps = st.lists(
    st.lists(st.tuples(st.floats(-8, 8) | st.sampled_from([-300.0, -40.0, 40.0, 300.0]), st.booleans()),
             min_size=4, max_size=4),
    min_size=1, max_size=4,
)  # fmt: skip


@given(rows=steps)
def test_scores_of_steps_become_one_of_their_response(rows):
    score = torch.tensor([[s for s, _ in row] for row in rows])
    mask = torch.tensor([[m for _, m in row] for row in rows])
    noise = torch.where(mask, score, torch.nan)  # the scores of other tokens are nobody's
    for name in ("steps_last", "steps_min", "steps_product"):
        want = getattr(ref_rewards, name)(score.tolist(), mask.tolist())
        np.testing.assert_allclose(getattr(rs, name)(noise, mask), want, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=r"mask: expected \[B, S\]"):
        rs.steps_min(score, mask[:, 1:])
