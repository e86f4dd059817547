"""Advantage estimators against their definitions, and what each of them promises."""

import math

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import advantage, testing

pytestmark = pytest.mark.usefixtures("float64")
GROUP = {
    "grpo": (advantage.grpo, ref.grpo),
    "dr_grpo": (lambda r: advantage.grpo(r, scale=False), lambda r: ref.grpo(r, scale=False)),
    "rloo": (advantage.rloo, ref.rloo),
}
each_group = pytest.mark.parametrize("name", GROUP)


@st.composite
def groups(draw):
    n, g = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    values = st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-10, 10).map(lambda x: round(x, 3))
    return np.array(draw(st.lists(values, min_size=n * g, max_size=n * g))).reshape(n, g)


@each_group
@given(reward=groups())
def test_group_advantages_against_the_definition(name, reward):
    ours, definition = GROUP[name]
    np.testing.assert_allclose(ours(torch.from_numpy(reward)), definition(reward), rtol=1e-10, atol=1e-10)


@each_group
@given(reward=groups())
def test_group_advantages_are_centred(name, reward):
    total = GROUP[name][0](torch.from_numpy(reward)).sum(-1)
    assert total.abs().max() <= 1e-9


@each_group
@given(reward=groups(), offset=st.sampled_from([-1e6, -3.0, 0.5, 1e6]))
def test_an_offset_of_all_rewards_changes_nothing(name, reward, offset):
    ours = GROUP[name][0]
    want, got = ours(torch.from_numpy(reward)), ours(torch.from_numpy(reward) + offset)
    # what the addition rounds away of a reward (1e-10 at 1e6), over the smallest standard deviation of the
    # examples
    assert (got - want).abs().max() <= abs(offset) * 1e-11 + 1e-10


@each_group
@given(reward=groups(), seed=st.integers(0, 100))
def test_groups_do_not_see_each_other(name, reward, seed):
    """What goes wrong elsewhere: a mean over the micro-batch in place of the prompt's own group."""
    ours, r = GROUP[name][0], torch.from_numpy(reward)
    alone = torch.cat([ours(row[None]) for row in r])
    order = torch.randperm(len(r), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(ours(r), alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours(r[order]), alone[order], rtol=1e-12, atol=1e-12)


@each_group
def test_alternating_rewards_teach_something(name):
    """What goes wrong elsewhere: an estimator that normalises over single values, and is zero
    for rewards 1, 0, 1, 0."""
    adv = GROUP[name][0](torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
    assert (adv[0, [0, 2]] > 0.4).all() and (adv[0, [1, 3]] < -0.4).all()
    assert adv[1, 3] > adv[0, 0] > 0  # the rarer success weighs more: groups have baselines of their own


@each_group
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -0.7, 1e6 + 0.1, 1e-30])
def test_a_group_without_variance_gives_exactly_zero(name, value, dtype):
    """Constants like 0.1 have a mean that rounds: (r - mean) / (std + 1e-6) is then
    not 0 but noise over noise."""
    for size in (2, 3, 5, 7, 64):
        reward = torch.full((2, size), value, dtype=dtype)
        assert (GROUP[name][0](reward) == 0).all()


@each_group
def test_a_group_of_one_is_an_error_and_not_nan(name):
    with pytest.raises(
        ValueError, match=r"reward: expected \[N, G\] with G >= 2, got \[3, 1\].*group of one"
    ):
        GROUP[name][0](torch.ones(3, 1))


def test_grpo_has_the_standard_deviation_of_a_sample_and_no_whitening():
    adv = advantage.grpo(torch.tensor([[1.0, 0.0], [5.0, 1.0]]), eps=0.0)
    torch.testing.assert_close(adv, torch.full((2, 2), math.sqrt(0.5)) * torch.tensor([1.0, -1.0]))
    raw = advantage.grpo(torch.tensor([[1.0, 0.0], [5.0, 1.0]]), scale=False)
    assert raw.tolist() == [[0.5, -0.5], [2.0, -2.0]]


def test_rloo_baseline_is_independent_of_its_own_sample():
    """Unbiased: the baseline that is subtracted from a reward stays the same when that reward changes."""
    r = torch.tensor([[1.0, 2.0, 6.0]])
    changed = r.clone()
    changed[0, 1] = 100.0
    baseline, other = r - advantage.rloo(r), changed - advantage.rloo(changed)
    torch.testing.assert_close(baseline[0, 1], other[0, 1])
    assert baseline[0, 0] != other[0, 0]


# ---------- returns and GAE


@st.composite
def rows(draw, masked=True):
    """(reward, value, discount, mask, lambda, bootstrap) of one row, with ends
    of sequences (discount 0) inside it."""
    size = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    discount = draw(st.sampled_from([0.9, 1.0])) * (rng.random(size) > 0.15)
    mask = rng.random(size) > draw(st.sampled_from([0.0, 0.4, 0.9])) if masked else np.ones(size, bool)
    reward, value = rng.normal(size=size), rng.normal(size=size)
    return reward, value, discount, mask, draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])), rng.normal()


def tensors(*arrays):
    return [torch.from_numpy(np.asarray(a)) for a in arrays]


@given(row=rows(masked=False))
def test_discounted_return_against_the_double_sum(row):
    reward, _, discount, *_ = row
    got = advantage.discounted_return(*tensors(reward, discount))
    np.testing.assert_allclose(got, ref.discounted_return(reward, discount), rtol=1e-10, atol=1e-10)


@given(row=rows())
def test_gae_against_the_double_sum_after_deletion(row):
    reward, value, discount, mask, lambda_, end = row
    for bootstrap in (None, torch.tensor(end)):
        adv, ret = advantage.gae(
            *tensors(reward, value, discount), lambda_, mask=torch.from_numpy(mask), bootstrap=bootstrap
        )
        want = ref.gae_masked(reward, value, discount, lambda_, mask, 0.0 if bootstrap is None else end)
        np.testing.assert_allclose(adv, want[0], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(ret, want[1], rtol=1e-10, atol=1e-10)


@given(parts=st.lists(rows(), min_size=1, max_size=4))
def test_gae_of_a_flat_stream_is_that_of_its_sequences(parts):
    """What goes wrong elsewhere: in a packed row returns run on across the sequences,
    and only the first is rewarded."""
    alone, stream = [], []
    for reward, value, discount, mask, _, _ in parts:
        discount = np.append(discount[:-1], 0.0)
        stream.append((reward, value, discount, mask))
        alone.append(advantage.gae(*tensors(reward, value, discount), 0.9, mask=torch.from_numpy(mask)))
    reward, value, discount, mask = tensors(*(np.concatenate(x) for x in zip(*stream)))
    adv, ret = advantage.gae(reward, value, discount, 0.9, mask=mask)
    torch.testing.assert_close(adv, torch.cat([a for a, _ in alone]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ret, torch.cat([r for _, r in alone]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lambda_", [0.0, 0.95, 1.0])
def test_deleting_tool_tokens_never_changes_gae(lambda_):
    """What goes wrong elsewhere: tokens of a tool are read as value 0 and reward 0, which costs
    31 % of the first advantage."""
    for seed in range(5):
        gae = lambda *a, mask: advantage.gae(*a, lambda_, mask=mask)  # noqa: E731
        testing.check_deletion_invariance(gae, seed=seed)


def test_gae_limits():
    g = torch.Generator().manual_seed(0)
    reward, value = torch.randn(3, 8, generator=g), torch.randn(3, 8, generator=g)
    discount = torch.full((3, 8), 0.9)
    discount[:, -1] = 0
    adv, ret = advantage.gae(reward, value, discount, 1.0)
    torch.testing.assert_close(ret, advantage.discounted_return(reward, discount))
    adv, _ = advantage.gae(reward, value, discount, 0.0)
    after = torch.cat([value[:, 1:], torch.zeros(3, 1)], -1)
    torch.testing.assert_close(adv, reward + discount * after - value)


def test_every_row_has_the_users_discount_however_the_batch_is_cut():
    """What goes wrong elsewhere: gamma is popped from the options by the first micro-batch,
    and the rest run with 1."""
    g = torch.Generator().manual_seed(0)
    reward, value, discount = (
        torch.randn(6, 5, generator=g),
        torch.randn(6, 5, generator=g),
        torch.full((6, 5), 0.7),
    )
    whole = advantage.gae(reward, value, discount)
    for size in (1, 2, 4):
        cut = [advantage.gae(*x) for x in zip(*(v.split(size) for v in (reward, value, discount)))]
        assert torch.equal(whole[0], torch.cat([a for a, _ in cut]))
    assert not torch.allclose(whole[0], advantage.gae(reward, value, torch.ones(6, 5))[0])


def test_what_lies_outside_the_mask_is_never_read():
    mask = torch.tensor([[True, False, True, False]])
    reward, value = (
        torch.tensor([[1.0, torch.nan, 2.0, torch.inf]]),
        torch.tensor([[0.5, torch.nan, 0.25, -torch.inf]]),
    )
    adv, ret = advantage.gae(reward, value, torch.tensor([[1.0, 1.0, 0.0, 1.0]]), 1.0, mask=mask)
    assert adv.tolist() == [[2.5, 0, 1.75, 0]] and ret.tolist() == [[3.0, 0, 2.0, 0]]


def test_gae_is_vectorised_over_long_rows():
    """No Python loop over time: 256 rows of 4,096 tokens in the time of a few dozen vector operations."""
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.rand(2, 4096)
    with Count():
        advantage.gae(x, x, torch.full_like(x, 0.99), mask=x > 0.1)
    assert len(calls) < 40 * math.log2(4096)


# ---------- whitening


@given(seed=st.integers(0, 2**32), offset=st.sampled_from([0.0, 1e6, -1e6]))
def test_whiten_against_the_definition(seed, offset):
    rng = np.random.default_rng(seed)
    adv, mask = rng.normal(size=(3, 6)) + offset, rng.random((3, 6)) > rng.random()
    got = advantage.whiten(*tensors(adv, mask))
    np.testing.assert_allclose(
        got, ref.whiten(adv, mask), rtol=1e-7 if offset else 1e-10, atol=1e-7 if offset else 1e-10
    )


def test_whiten_ignores_and_zeroes_what_is_outside_the_mask():
    """What goes wrong elsewhere: padding is normalised with the rest and holds 4e4; or a
    NaN in it spoils the mean."""
    mask = torch.tensor([True, True, True, False, False])
    out = advantage.whiten(torch.tensor([1.0, 2.0, 3.0, torch.nan, torch.inf]), mask, eps=0.0)
    assert out.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("values", [[0.1] * 7, [1e6] * 3, [5.0], []])
def test_whiten_of_constants_and_of_nothing_is_about_zero(values):
    x = torch.tensor(values)
    out = advantage.whiten(x, torch.ones_like(x, dtype=torch.bool))
    assert out.isfinite().all() and (out.abs() < 1e-6).all()
