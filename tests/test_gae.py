"""Returns, GAE and whitening over the tokens of a row: against double sums, and blind to what is masked."""

import math
from functools import partial

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import advantage, testing
from rft_fn.reward_shaping import kl_in_reward

pytestmark = pytest.mark.usefixtures("float64")


def tensors(*arrays):
    return [torch.from_numpy(np.asarray(a)) for a in arrays]


@pytest.mark.parametrize("gamma", [0.0, 1e-9, 0.3, 0.9, 1.0])
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.3, 0.9]))
def test_reinforce_pp_against_the_definition(gamma, seed, share):
    rng = np.random.default_rng(seed)
    reward, mask = rng.normal(size=(3, 9)), rng.random((3, 9)) >= share
    want = ref.reinforce_pp(reward, mask, gamma)
    got = advantage.reinforce_pp(*tensors(np.where(mask, reward, np.nan), mask), gamma=gamma)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_a_reward_on_the_last_token_is_that_of_every_token():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    reward, zero = torch.tensor([2.5, -0.1, 3.0]), torch.zeros(3, 6)
    last = kl_in_reward(reward, zero, zero, mask, coef=0.0)
    assert torch.equal(advantage.reinforce_pp(last, mask), reward[:, None] * mask)


def test_reinforce_pp_passes_over_tool_tokens():
    for seed in range(5):
        f = lambda reward, value, discount, *, mask: advantage.reinforce_pp(reward, mask, gamma=0.9)  # noqa: E731
        testing.check_deletion_invariance(f, seed=seed)


@st.composite
def rows(draw, masked=True):
    """(reward, value, discount, mask, lambda, bootstrap) of one row, with ends
    of sequences (discount 0) inside it."""
    size = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gamma = draw(st.sampled_from([1.0, 0.9, 0.5, 0.1, 1e-9]))  # whatever it is, only 0 is an end
    discount = gamma * (rng.random(size) > 0.15)
    mask = rng.random(size) > draw(st.sampled_from([0.0, 0.4, 0.9])) if masked else np.ones(size, bool)
    reward, value = rng.normal(size=size), rng.normal(size=size)
    return reward, value, discount, mask, draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])), rng.normal()


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


@given(row=rows(masked=False))
def test_without_a_mask_all_tokens_are_in_it(row):
    reward, value, discount, mask, lambda_, end = row
    args = (*tensors(reward, value, discount), lambda_)
    for options in ({}, {"bootstrap": torch.tensor(end)}):
        got = advantage.gae(*args, **options)
        same = advantage.gae(*args, mask=torch.from_numpy(mask), **options)
        want = ref.gae(reward, value, discount, lambda_, end if options else 0.0)
        for x, y, z in zip(got, same, want):
            assert torch.equal(x, y)
            np.testing.assert_allclose(x, z, rtol=1e-10, atol=1e-10)


@given(parts=st.lists(rows(), min_size=1, max_size=4))
def test_gae_of_a_flat_stream_is_that_of_its_sequences(parts):
    """A fault of other systems: in a packed row returns run on across the sequences,
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
    """A fault of other systems: tokens of a tool are read as value 0 and reward 0, which costs
    31 % of the first advantage."""
    for seed in range(5):
        gae = lambda *a, mask: advantage.gae(*a, lambda_, mask=mask)  # noqa: E731
        testing.check_deletion_invariance(gae, seed=seed)


def test_lambda_is_095_by_default():
    *args, mask = several()
    assert all(
        torch.equal(x, y)
        for x, y in zip(advantage.gae(*args, mask=mask), advantage.gae(*args, 0.95, mask=mask))
    )


@pytest.mark.parametrize("gamma", [1e-300, 1e-6, 0.25, 0.5, 0.75, 1.0, 1.5])
def test_a_discount_that_is_not_0_is_no_end(gamma):
    """What comes behind a tool's tokens is worth gamma times itself to the token before, gamma 1 there."""
    mask = torch.tensor([True, False, False, True])
    reward, value, end = torch.zeros(4), torch.tensor([0.0, 7.0, 7.0, 3.0]), torch.tensor(11.0)
    discount = torch.full((4,), gamma)
    adv, _ = advantage.gae(reward, value, discount, 0.0, mask=mask, bootstrap=end)
    torch.testing.assert_close(adv, torch.tensor([3 * gamma, 0, 0, 11 * gamma - 3]), rtol=1e-12, atol=0)
    adv, ret = advantage.decoupled_gae(
        reward + mask, value, discount, policy_lambda=1.0, mask=mask, bootstrap=end
    )
    last = 1 + 11 * gamma
    want = torch.tensor([1 + gamma * last, 0, 0, last])
    torch.testing.assert_close(ret, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(adv, want - torch.where(mask, value, 0), rtol=1e-12, atol=1e-12)


@given(row=rows(), unit=st.sampled_from([2.0**-40, 2.0**-10, 2.0**10, 2.0**40]), shift=st.booleans())
def test_the_unit_of_rewards_and_values_is_that_of_advantages(row, unit, shift):
    """No bound, floor or tolerance stands in them: they are linear, to the bit for powers of two."""
    reward, value, discount, mask, lambda_, end = row
    reward, value, discount, mask, end = tensors(reward, value, discount, mask, end)

    def found(scale):
        args = (scale * reward, scale * value, discount)
        pairs = advantage.decoupled_gae(*args, policy_lambda=lambda_, mask=mask, bootstrap=scale * end)
        sums = advantage.reinforce_pp(args[0][None], mask[None], gamma=0.5)[0]
        return torch.stack([*pairs, advantage.discounted_return(args[0], discount), sums])

    assert torch.equal(found(-unit if shift else unit), found(1.0) * (-unit if shift else unit))


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
    """A fault of other systems: gamma is popped from the options by the first micro-batch,
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


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sequence_of_a_flat_stream_does_not_see_a_broken_neighbour(bad, masked):
    """Two sequences in one stream: the second one's values are not finite, the first one's numbers stay."""
    reward, value = torch.randn(2, 9).unbind()
    discount = torch.full((9,), 0.9)
    discount[4] = 0
    mask = torch.tensor([True, True, False, True, True] + [True] * 4) if masked else None
    want = advantage.gae(reward[:5], value[:5], discount[:5], mask=None if mask is None else mask[:5])
    value = torch.cat([value[:5], torch.full((4,), bad)])
    got = advantage.gae(reward, value, discount, mask=mask)
    for x, y in zip(got, want):
        torch.testing.assert_close(x[:5], y, rtol=1e-12, atol=1e-12)
    inf = torch.where(torch.arange(9) > 4, bad, reward)
    want = advantage.discounted_return(reward[:5], discount[:5])
    torch.testing.assert_close(advantage.discounted_return(inf, discount)[:5], want, rtol=1e-12, atol=1e-12)


@given(parts=st.lists(rows(), min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_decoupled_gae_against_the_double_sums(parts, seed):
    rng, size = np.random.default_rng(seed), min(len(p[0]) for p in parts)
    columns = [np.stack([p[i][:size] for p in parts]) for i in range(4)]
    reward, value, discount, mask = tensors(*columns)
    policy, target, end = (
        rng.random((len(parts), 1)),
        rng.random((len(parts), 1)),
        rng.normal(size=len(parts)),
    )
    lambdas = {"policy_lambda": torch.from_numpy(policy), "value_lambda": torch.from_numpy(target)}
    rest = {"mask": mask, "bootstrap": torch.from_numpy(end)}
    got = advantage.decoupled_gae(reward, value, discount, **lambdas, **rest)
    want = ref.decoupled_gae(*columns[:3], policy[:, 0], target[:, 0], columns[3], end)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


def several(seed=0):
    """(reward, value, discount, mask), [5, 16], with holes and ends."""
    g = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, 5, 16, generator=g)
    discount = 0.9 * (torch.rand(5, 16, generator=g) > 0.1)
    return reward, value, discount, torch.rand(5, 16, generator=g) > 0.3


@pytest.mark.parametrize("lambda_", [0.0, 0.95, 1.0, "rows"])
def test_decoupled_gae_with_equal_lambdas_is_gae(lambda_):
    *args, mask = several()
    lambda_ = torch.linspace(0, 1, 5)[:, None] if lambda_ == "rows" else lambda_
    got = advantage.decoupled_gae(*args, policy_lambda=lambda_, value_lambda=lambda_, mask=mask)
    assert all(torch.equal(x, y) for x, y in zip(got, advantage.gae(*args, lambda_, mask=mask)))


def test_the_target_of_the_critic_has_no_bias_by_default():
    """value_lambda = 1: the return of the rewards in mask, whatever the values are."""
    reward, value, discount, mask = several()
    _, ret = advantage.decoupled_gae(reward, value, discount, policy_lambda=0.5, mask=mask)
    _, other = advantage.decoupled_gae(reward, 100 * value, discount, policy_lambda=0.9, mask=mask)
    torch.testing.assert_close(ret, other, rtol=1e-10, atol=1e-10)
    assert ret.abs().max() > 0.5


def test_a_lambda_for_each_row_is_what_each_row_alone_gets():
    *args, mask = several(1)
    lambdas = torch.tensor([0.0, 0.3, 0.9, 0.99, 1.0])
    got = advantage.gae(*args, lambdas[:, None], mask=mask)
    for i, lambda_ in enumerate(lambdas.tolist()):
        alone = advantage.gae(*(x[i] for x in args), lambda_, mask=mask[i])
        for x, y in zip(got, alone):
            torch.testing.assert_close(x[i], y, rtol=1e-14, atol=1e-14)
    assert not torch.equal(got[0], advantage.gae(*args, 0.9, mask=mask)[0])


def test_deleting_tool_tokens_never_changes_decoupled_gae():
    for seed in range(5):
        f = partial(advantage.decoupled_gae, policy_lambda=0.7, value_lambda=0.98)
        testing.check_deletion_invariance(f, seed=seed)


@given(length=st.lists(st.integers(1, 10**5), min_size=1, max_size=9), alpha=st.floats(1e-4, 2))
def test_length_adaptive_lambda_against_the_definition(length, alpha):
    got = advantage.length_adaptive_lambda(torch.tensor(length), alpha=alpha)
    np.testing.assert_allclose(got, ref.length_adaptive_lambda(length, alpha), rtol=1e-10, atol=1e-10)


def test_length_adaptive_lambda_by_hand():
    """The weights of GAE, lambda^t, sum to 1 / (1 - lambda) = alpha times the length."""
    got = advantage.length_adaptive_lambda(torch.tensor([[0], [10], [20], [40], [400]]))
    torch.testing.assert_close(got, torch.tensor([[0.0], [0.0], [0.0], [0.5], [0.95]]))


@given(seed=st.integers(0, 2**32), offset=st.sampled_from([0.0, 1e6, -1e6]))
def test_whiten_against_the_definition(seed, offset):
    rng = np.random.default_rng(seed)
    adv, mask = rng.normal(size=(3, 6)) + offset, rng.random((3, 6)) > rng.random()
    got = advantage.whiten(*tensors(adv, mask))
    np.testing.assert_allclose(
        got, ref.whiten(adv, mask), rtol=1e-7 if offset else 1e-10, atol=1e-7 if offset else 1e-10
    )


@given(seed=st.integers(0, 2**32), unit=st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e6]), offset=st.floats(-1, 1))
def test_whiten_has_no_scale_but_eps(seed, unit, offset):
    """Advantages of any spread have that of 1 afterwards, none is left as it is and none is bounded."""
    rng = np.random.default_rng(seed)
    adv = unit * (rng.standard_t(1.5, size=(3, 6)) + 1e3 * offset)
    mask = rng.random((3, 6)) > 0.3
    got = advantage.whiten(*tensors(adv, mask), eps=1e-20)
    np.testing.assert_allclose(got, ref.whiten(adv, mask, eps=1e-20), rtol=1e-6, atol=1e-6)


def test_whiten_ignores_and_zeroes_what_is_outside_the_mask():
    """A fault of other systems: padding is normalised with the rest and holds 4e4; or a
    NaN in it spoils the mean."""
    mask = torch.tensor([True, True, True, False, False])
    out = advantage.whiten(torch.tensor([1.0, 2.0, 3.0, torch.nan, torch.inf]), mask, eps=0.0)
    assert out.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("values", [[0.1] * 7, [1e6] * 3, [5.0], []])
def test_whiten_of_constants_and_of_nothing_is_about_zero(values):
    x = torch.tensor(values)
    out = advantage.whiten(x, torch.ones_like(x, dtype=torch.bool))
    assert out.isfinite().all() and (out.abs() < 1e-6).all()
