"""Advantages in groups of any size: against each group alone, and against those of [N, G]."""

from functools import partial

import numpy as np
import pytest
import ref
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import advantage

pytestmark = pytest.mark.usefixtures("float64")
unscaled = partial(ref.grpo, scale=False)

# (ours by group, ours of [N, G], the definition of one group): all of (reward, length)
PAIRS = {
    "grpo": (
        lambda r, g, n: advantage.grpo_by(r, g),
        lambda r, n: advantage.grpo(r),
        lambda r, n: ref.grpo(r),
    ),
    "dr_grpo": (
        lambda r, g, n: advantage.grpo_by(r, g, scale=False),
        lambda r, n: advantage.grpo(r, scale=False),
        lambda r, n: unscaled(r),
    ),
    "rloo": (
        lambda r, g, n: advantage.rloo_by(r, g),
        lambda r, n: advantage.rloo(r),
        lambda r, n: ref.rloo(r),
    ),
    "opo": (lambda r, g, n: advantage.opo_by(r, g, n), advantage.opo, ref.opo),
    "cpgd": (
        lambda r, g, n: advantage.cpgd_by(r, g, eps=0.1),
        lambda r, n: advantage.cpgd(r, eps=0.1),
        lambda r, n: ref.cpgd_advantage(r, eps=0.1),
    ),
    "reinforce_pp_baseline": (
        lambda r, g, n: advantage.reinforce_pp_baseline_by(r, g),
        lambda r, n: advantage.reinforce_pp_baseline(r),
        lambda r, n: ref.reinforce_pp_baseline(r),
    ),
    "quantile": (
        lambda r, g, n: advantage.quantile_by(r, g, q=0.4),
        lambda r, n: advantage.quantile(r, q=0.4),
        lambda r, n: ref.quantile(r, 0.4),
    ),
    "pass_at_2": (
        lambda r, g, n: advantage.pass_at_k_by(r > 0, g, k=2),
        lambda r, n: advantage.pass_at_k(r > 0, k=2),
        lambda r, n: ref.pass_at_k(r > 0, 2),
    ),
}
each_name = each("name", PAIRS)
REWARDS = st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-10, 10).map(lambda x: round(x, 3))


@st.composite
def ragged(draw, most=12):
    """(reward, group, length), each [B]: groups of 0 to 6 rows, in any order, numbered with gaps."""
    group = draw(st.lists(st.sampled_from([-3, 0, 4, 5, 10**9]), max_size=most))
    reward = draw(st.lists(REWARDS, min_size=len(group), max_size=len(group)))
    length = draw(st.lists(st.integers(1, 500), min_size=len(group), max_size=len(group)))
    return np.array(reward, np.float64), np.array(group, np.int64), np.array(length, np.int64)


def tensors(*arrays):
    return [torch.from_numpy(np.asarray(a)) for a in arrays]


@each_name
@given(
    rows=st.lists(st.lists(st.integers(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    unit=st.sampled_from([2.0**-40, 2.0**-10, 1.0, 2.0**20]), level=st.sampled_from([0.0, 1.0, -300.0]),
)  # fmt: skip
def test_however_little_rewards_differ_they_have_the_advantages_of_their_namesake(name, rows, unit, level):
    ours, namesake, _ = PAIRS[name]
    r = level + unit * torch.tensor(rows).double()
    length = torch.arange(1, r.numel() + 1).view(r.shape)
    want = namesake(r, length)
    got = ours(r.flatten(), torch.arange(len(r)).repeat_interleave(3), length.flatten())
    torch.testing.assert_close(
        got.view(r.shape), want, rtol=1e-6, atol=1e-12 * max(float(want.abs().max()), unit)
    )


@each_name
@given(rows=ragged())
def test_rows_have_the_advantages_of_their_group_alone(name, rows):
    """Also where a group has one row, and where there is none at all."""
    reward, group, length = rows
    got = PAIRS[name][0](*tensors(reward, group, length))
    want = ref.by_group(PAIRS[name][2], group, reward, length)
    assert got.shape == (len(group),)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@each_name
@given(
    size=st.tuples(st.integers(1, 4), st.integers(2, 6)), seed=st.integers(0, 2**32), shuffled=st.booleans()
)
def test_equal_groups_are_rows_of_a_matrix(name, size, seed, shuffled):
    """In any order of the rows, and whatever the groups are called."""
    rng = np.random.default_rng(seed)
    reward, length = rng.integers(0, 3, size=size) / 2, rng.integers(1, 500, size=size)
    names = rng.choice(1000, size=size[0], replace=False)
    order = np.arange(reward.size)
    if shuffled:
        rng.shuffle(order)
    got = PAIRS[name][0](*tensors(reward.flat[order], np.repeat(names, size[1])[order], length.flat[order]))
    want = PAIRS[name][1](*tensors(reward, length)).flatten()[order]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@each_name
@each("dtype", [torch.float32, torch.float64])
@each("value", [0.1, 1 / 3, 1e6 + 0.1, -0.7])
def test_a_group_without_variance_gets_exactly_zero(name, value, dtype):
    sizes = torch.tensor([1, 2, 3, 7, 64])
    group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    reward = torch.full(group.shape, value, dtype=dtype)
    adv = PAIRS[name][0](reward, group, torch.arange(1, len(group) + 1))
    assert (adv == 0).all()


@given(rows=ragged(), seed=st.integers(0, 2**32))
def test_remax_takes_its_prompts_greedy_reward(rows, seed):
    reward, _, _ = rows
    rng = np.random.default_rng(seed)
    greedy, group = rng.normal(size=4), rng.integers(0, 4, size=len(reward))
    got = advantage.remax_by(*tensors(reward, group, greedy))
    np.testing.assert_allclose(got, ref.remax_by(reward, group, greedy), rtol=1e-12, atol=0)
    square, numbers = rng.normal(size=(4, 3)), np.repeat(np.arange(4), 3)
    want = advantage.remax(*tensors(square, greedy)).flatten()
    assert torch.equal(advantage.remax_by(*tensors(square.flatten(), numbers, greedy)), want)


@given(rows=ragged(), parts=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_gdpo_normalises_each_reward_in_its_own_groups(rows, parts, seed):
    _, group, _ = rows
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4, size=(parts, 1))
    reward, weights = rng.integers(0, 3, size=(parts, len(group))) * scale, rng.normal(size=parts)
    got = advantage.gdpo_by(*tensors(reward, group, weights))
    np.testing.assert_allclose(got, ref.gdpo_by(reward, group, weights), rtol=1e-9, atol=1e-9)
    square = rng.integers(0, 3, size=(parts, 3, 4)) * scale[..., None]
    want = advantage.gdpo(*tensors(square, weights)).flatten()
    flat = advantage.gdpo_by(*tensors(square.reshape(parts, 12), np.repeat([7, 2, 5], 4), weights))
    torch.testing.assert_close(flat, want, rtol=1e-12, atol=1e-12)


@given(rows=ragged(), k=st.integers(1, 4))
def test_pass_at_k_is_zero_in_a_group_that_has_no_k_responses(rows, k):
    reward, group, _ = rows
    got = advantage.pass_at_k_by(*tensors(reward > 0, group), k=k)
    want = ref.by_group(partial(ref.pass_at_k, k=k), group, reward > 0, least=k)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_opo_of_rows_without_tokens_has_no_baseline():
    reward, group = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([3, 3, 8])
    assert advantage.opo_by(reward, group, torch.tensor([0, 0, 0])).tolist() == [1.0, 0.0, 0.0]


def test_float32_rewards_have_float32_advantages():
    reward, group = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float32), torch.tensor([1, 1, 1])
    for name, (ours, _, _) in PAIRS.items():
        if name != "pass_at_2":  # of booleans
            assert ours(reward, group, torch.ones(3)).dtype == torch.float32, name


R, G = torch.zeros(3), torch.zeros(3, dtype=torch.long)


@each(
    ("call", "message"),
    [
        (lambda: advantage.grpo_by(torch.zeros(3, 2), G), r"^reward: expected \[B\] .*got \[3, 2\]"),
        (lambda: advantage.rloo_by(R, G[:2]), r"^group: expected \[B\] = \[3\], got \[2\]"),
        (lambda: advantage.opo_by(R, G, torch.ones(2)), r"^length: expected \[B\] = \[3\], got \[2\]"),
        (lambda: advantage.remax_by(R, G[:1], torch.ones(1)), r"^group: expected \[B\] = \[3\], got \[1\]"),
        (lambda: advantage.remax_by(R, G, torch.ones(1, 1)), r"^greedy_reward: expected \[N\]"),
        (lambda: advantage.gdpo_by(R, G, torch.ones(1)), r"^parts: expected \[K, B\]"),
        (
            lambda: advantage.gdpo_by(R[None], G, torch.ones(2)),
            r"^weights: expected \[K\] = \[1\], got \[2\]",
        ),
        (lambda: advantage.quantile_by(R, G, q=1.5), r"^q: expected 0 < q <= 1, got 1.5"),
        (lambda: advantage.pass_at_k_by(R > 0, G, k=0), r"^k: expected at least 1, got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
