"""Each row of the table, from rewards to the gradient, as a train step would use it."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import algorithm, loss, packing, testing, tree, weight
from rft_fn.types import Rollout, experience

pytestmark = pytest.mark.usefixtures("float64")
each = pytest.mark.parametrize("name", algorithm.TABLE)
seeds = st.integers(0, 2**32)


def batch(name, reward, seed=0):
    """(row, apply, params, Experience) of a rollout with those rewards [N, G], N G = 8."""
    row, c = algorithm.get_algorithm(name), testing.case(seed)
    false = torch.zeros(8, dtype=torch.bool)
    rollout = Rollout(
        tokens=c.exp.tokens,
        mask=c.exp.mask,
        logp=c.exp.old_logp,
        length=c.exp.length,
        truncated=false,
        group=torch.arange(8) // reward.shape[1],
        version=torch.zeros(8, dtype=torch.long),
    )
    adv = row.advantage(reward, rollout)
    return row, c.apply, c.params, experience(rollout, adv=adv, w=row.weight(rollout.mask))


@each
@settings(max_examples=5)
@given(seed=seeds)
def test_no_cut_of_the_batch_changes_the_gradient_and_no_extreme_breaks_it(name, seed):
    row = algorithm.TABLE[name]
    testing.check_all(row.loss, weight=row.weight, seed=seed)


@each
@settings(max_examples=5)
@given(seed=seeds)
def test_on_policy_every_row_is_the_policy_gradient(name, seed):
    row = algorithm.TABLE[name]
    testing.check_on_policy_identity(row.loss, weight=row.weight, seed=seed, per_sequence=True)


@each
@settings(max_examples=5)
@given(seed=seeds, budget=st.integers(12, 60), world=st.integers(1, 4))
def test_from_rewards_to_gradient_at_any_world_size(name, seed, budget, world):
    reward = torch.rand(4, 2, generator=torch.Generator().manual_seed(seed))
    row, apply, params, exp = batch(name, reward, seed)
    want = testing.total_and_grad(row.loss, apply, params, [packing.pack(exp, range(8))])
    packs = [p for rank in packing.shard(exp, budget, world) for p in rank]
    got = testing.total_and_grad(row.loss, apply, params, packs)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    assert want[1]["bigram"].abs().max() > 1e-6


@each
def test_rewards_one_and_zero_in_turn_teach_something(name):
    """What goes wrong elsewhere: an estimator whose advantages are 0 for every reward,
    and a run that never learns."""
    row, apply, params, exp = batch(name, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    _, g = testing.total_and_grad(row.loss, apply, params, [packing.pack(exp, range(8))])
    assert g["bigram"].abs().max() > 1e-6


@pytest.mark.parametrize("name", [n for n in algorithm.TABLE if n != "reinforce"])
def test_groups_without_variance_give_no_gradient_and_do_not_disturb_the_others(name):
    """What goes wrong elsewhere: only groups that are all 0 or all 1 are noticed; 0.1
    for everyone goes through as noise."""
    flat = torch.full((2, 4), 0.1)
    row, apply, params, exp = batch(name, flat)
    total, g = testing.total_and_grad(row.loss, apply, params, [packing.pack(exp, range(8))])
    assert total == 0 and all((x == 0).all() for x in tree.leaves(g))
    mixed = torch.cat([flat[:1], torch.tensor([[0.0, 1.0, 0.0, 1.0]])])
    row, apply, params, exp = batch(name, mixed)
    both = testing.total_and_grad(row.loss, apply, params, [packing.pack(exp, range(8))])
    second = testing.total_and_grad(row.loss, apply, params, [packing.pack(exp, range(4, 8))])
    torch.testing.assert_close(both, second)


def test_the_rows_differ_where_their_papers_differ():
    """An option without an effect, and two names for one algorithm, are both ways to fool oneself."""
    reward = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    found = {}
    for name in algorithm.TABLE:
        row, apply, params, exp = batch(name, reward)
        _, g = testing.total_and_grad(row.loss, apply, params, [packing.pack(exp, range(8))])
        found[name] = g["bigram"]
    names = list(found)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not torch.allclose(found[a], found[b]), (a, b)


def test_a_changed_row_is_a_new_algorithm():
    row, apply, params, exp = batch("grpo", torch.tensor([[1.0, 0.0]] * 4))
    mine = row._replace(
        loss=lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv) + 0.1 * loss.kl(o.logp, b.old_logp)
    )
    packs = [packing.pack(exp, range(8))]
    a, b = (testing.total_and_grad(r.loss, apply, params, packs)[1]["bigram"] for r in (row, mine))
    assert not torch.allclose(a, b)
    assert algorithm.TABLE["grpo"].loss is row.loss  # the table has not changed
    testing.check_all(mine.loss, weight=mine.weight)


def test_the_length_of_dr_grpo_only_scales():
    mask = testing.case(0).exp.mask
    short, row = partial(weight.constant, length=10), algorithm.TABLE["dr_grpo"].weight
    ratio = short(mask)[mask] / row(mask)[mask]
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))


def test_an_unknown_name_is_told_the_names_there_are():
    with pytest.raises(ValueError) as error:
        algorithm.get_algorithm("gpro")
    assert str(error.value) == f"algorithm: expected one of {', '.join(algorithm.TABLE)}, got 'gpro'"


def test_metrics_of_the_clipped_loss_by_hand():
    c = testing.case(0)
    b = packing.pack(c.exp, range(8))
    out = c.apply(c.params, b)
    _, found = algorithm.ppo_clip(out, b, low=0.2, high=0.3)
    d = (out.logp - b.old_logp)[b.mask]
    adv = b.adv[b.mask]
    clipped = ((d.exp() > 1.3) & (adv > 0)) | ((d.exp() < 0.8) & (adv < 0))
    want = {
        "policy/clip_frac": clipped.double().mean(),
        "policy/kl_old": (d.exp() - 1 - d).mean(),
        "policy/ratio_max": d.exp().max(),
    }
    for name, value in want.items():
        torch.testing.assert_close(found[name].value(), value)
    assert 0 < clipped.double().mean() < 1
