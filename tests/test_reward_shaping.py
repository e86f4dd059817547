"""Rewards in, rewards out; the state of the running moments does not depend on how the rewards were cut."""

import itertools

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import reward_shaping as rs
from rft_fn import tree

pytestmark = pytest.mark.usefixtures("float64")
rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=20)


@given(reward=rewards, cuts=st.lists(st.integers(1, 19), max_size=5), offset=st.sampled_from([0.0, 1e6]))
def test_moments_against_the_definition_for_every_cut(reward, cuts, offset):
    """What goes wrong elsewhere: moments per micro-batch and per rank, so that
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


def test_the_state_is_an_argument_and_not_changed():
    start = rs.moments()
    rs.running_norm(torch.tensor([1.0, 2.0]), start)
    assert [float(v) for v in tree.leaves(start)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("values", [[0.1] * 7, [1 / 3] * 3, [-2.7e5] * 11, [5.0]])
@pytest.mark.parametrize("centre", [True, False])
def test_equal_rewards_are_not_blown_up(values, centre):
    """What goes wrong elsewhere: division by the std of constants: inf after one reward,
    rounding noise over 1e-8 after many."""
    x, state = torch.tensor(values), rs.moments()
    for _ in range(3):
        out, state = rs.running_norm(x, state, centre=centre)
        want = torch.zeros_like(x) if centre else x
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-9)


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
    """What goes wrong elsewhere: only the first row of a pack is rewarded, or the
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
