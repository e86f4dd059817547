"""Each row of the table, from rewards to the gradient, as a train step would use it."""

import dataclasses
import inspect
import itertools
import re
from functools import partial
from types import SimpleNamespace

import pytest
import tiny
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import algorithm, loss, packing, segment, testing, tree, weight
from rft_fn.algorithm import more_losses
from rft_fn.algorithm.with_metrics import stopped
from rft_fn.run import options
from rft_fn.types import TokenOut, experience

pytestmark = pytest.mark.usefixtures("float64")
each_name = each("name", algorithm.TABLE)
seeds = st.integers(0, 2**32)


def advantages(row, c, rollout, reward):
    """{adv, and what else a row with a critic gives}, as the scripts have it."""
    if isinstance(row, algorithm.ActorCritic):
        last = c.exp.mask & (c.exp.mask.flip(-1).cumsum(-1).flip(-1) == 1)
        adv, ret = row.advantage(torch.where(last, reward.view(-1, 1), 0.0), c.exp.old_value, c.exp.mask)
        return {"adv": adv, "ret": ret, "old_value": c.exp.old_value}
    more = {"greedy_reward": torch.full((len(reward),), 0.3)} if row.greedy else {}
    adv = row.advantage(reward, rollout, **more)
    return {"adv": adv, "ref_logp": c.exp.ref_logp if row.reference else None}


def batch(name, reward, seed=0):
    """(row, apply, params, Experience) of a rollout with those rewards [N, G], N G = 8."""
    row, c = algorithm.TABLE[name], testing.case(seed)
    rollout = tiny.rollout(c.exp, torch.arange(8) // reward.shape[1])
    fields = advantages(row, c, rollout, reward)
    return row, c.apply, c.params, experience(rollout, w=row.weight(rollout.mask), **fields)


def together(name, group):
    """Rows that share a pack: those of a group, if the loss compares them."""
    return group if getattr(algorithm.TABLE[name], "together", False) else 1


def whole(name, exp, group, rows=range(8)):
    return packing.pack(exp, rows, unit=together(name, group))


@each_name
@settings(max_examples=5)
@given(seed=seeds)
def test_no_cut_of_the_batch_changes_the_gradient_and_no_extreme_breaks_it(name, seed):
    row = algorithm.TABLE[name]
    policy = name != "a_star_po"  # a regression
    testing.check_all(row.loss, weight=row.weight, seed=seed, unit=together(name, 4), on_policy=policy)


def test_a_soft_weight_that_has_faded_is_no_clip():
    """A response of this seed is so long that VESPO's weight underflows at 0.7 nats a token."""
    row = algorithm.TABLE["vespo"]
    testing.check_sides(row.loss, weight=row.weight, seed=510511)


# a regression, and a preference
@each("name", [name for name in algorithm.TABLE if name not in ("a_star_po", "online_dpo")])
@settings(max_examples=5)
@given(seed=seeds)
def test_on_policy_every_row_is_the_policy_gradient(name, seed):
    row = algorithm.TABLE[name]
    testing.check_on_policy_identity(row.loss, weight=row.weight, seed=seed, per_sequence=True)


@each_name
@settings(max_examples=5)
@given(seed=seeds, budget=st.integers(12, 60), world=st.integers(1, 4))
def test_from_rewards_to_gradient_at_any_world_size(name, seed, budget, world):
    reward = torch.rand(4, 2, generator=torch.Generator().manual_seed(seed))
    row, apply, params, exp = batch(name, reward, seed)
    want = testing.total_and_grad(row.loss, apply, params, [whole(name, exp, 2)])
    unit = together(name, 2)
    packs = [p for rank in packing.shard(exp, budget * unit, world, unit=unit) for p in rank]
    got = testing.total_and_grad(row.loss, apply, params, packs)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    stopped_all = name.startswith(("gspo", "luspo"))  # 3e-4 can stop every sequence
    assert want[1]["bigram"].abs().max() > 1e-6 or stopped_all


@each_name
def test_rewards_one_and_zero_in_turn_teach_something(name):
    """A fault of other systems: an estimator whose advantages are 0 for every reward,
    and a run that never learns."""
    row, apply, params, exp = batch(name, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    _, g = testing.total_and_grad(row.loss, apply, params, [whole(name, exp, 2)])
    assert g["bigram"].abs().max() > 1e-6


GROUPS = [n for n, row in algorithm.TABLE.items() if getattr(row, "group", 1) > 1]


# CPGD, DRO and A*-PO pull back to a policy without an advantage too; whitening takes the batch's mean off
@each("name", [n for n in GROUPS if n not in ("cpgd", "dro", "a_star_po", "reinforce_pp_baseline")])
def test_groups_without_variance_give_no_gradient_and_do_not_disturb_the_others(name):
    """A fault of other systems: only groups that are all 0 or all 1 are noticed; 0.1
    for everyone goes through as noise."""
    flat = torch.full((2, 4), 0.1)
    row, apply, params, exp = batch(name, flat)
    total, g = testing.total_and_grad(row.loss, apply, params, [whole(name, exp, 4)])
    assert total == 0 and all((x == 0).all() for x in tree.leaves(g))
    mixed = torch.cat([flat[:1], torch.tensor([[0.0, 1.0, 0.0, 1.0]])])
    row, apply, params, exp = batch(name, mixed)
    both = testing.total_and_grad(row.loss, apply, params, [whole(name, exp, 4)])
    second = testing.total_and_grad(row.loss, apply, params, [whole(name, exp, 4, range(4, 8))])
    torch.testing.assert_close(both, second)


def test_the_rows_differ_where_their_papers_differ():
    """An option without an effect, and two names for one algorithm, are both ways to fool oneself."""
    same = None
    for seed in range(6):
        reward = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
        found = {}
        for name in algorithm.TABLE:
            row, apply, params, exp = batch(name, reward, seed)
            _, g = testing.total_and_grad(row.loss, apply, params, [whole(name, exp, 4)])
            found[name] = g["bigram"]
        equal = {(a, b) for a, b in itertools.combinations(found, 2) if torch.allclose(found[a], found[b])}
        same = equal if same is None else same & equal
    assert same == {("gspo", "gspo_token")}  # one advantage a sequence: there the paper has them equal


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
    free = [n for n, row in algorithm.TABLE.items() if isinstance(row, algorithm.Algorithm)]
    with pytest.raises(ValueError) as error:
        algorithm.get_algorithm("gpro")
    assert str(error.value) == f"algorithm: expected one of {', '.join(free)}, got 'gpro'; did you mean grpo?"
    assert "'ppo', which has a critic: see train_scripts/ppo.py" in str(
        raises(algorithm.get_algorithm, "ppo")
    )
    error = str(raises(algorithm.get_actor_critic, "grpo"))
    assert error == (
        "algorithm: expected one of ppo, vapo, got 'grpo', which has no critic: see train_scripts/grpo.py"
    )
    assert algorithm.get_actor_critic("vapo") is algorithm.TABLE["vapo"]


def raises(f, *args):
    with pytest.raises(ValueError) as error:
        f(*args)
    return error.value


def test_every_algorithm_of_the_papers_is_there():
    names = (
        "ppo grpo dr_grpo dapo gspo gspo_token cispo sapo rloo reinforce_pp reinforce_pp_baseline remax cpgd "
        "gmpo opo vapo"
    )
    assert set(names.split()) <= set(algorithm.TABLE)
    assert all(row.paper for row in algorithm.TABLE.values())


@settings(max_examples=5)
@given(seed=seeds)
def test_the_critics_losses_pass_every_cut_too(seed):
    for name in ("ppo", "vapo"):
        row = algorithm.TABLE[name]
        testing.check_all(row.value_loss, weight=row.weight, seed=seed, on_policy=False)


def test_vapo_reaches_further_back_in_longer_responses_and_its_critic_sees_whole_returns():
    row = algorithm.TABLE["vapo"]
    mask = torch.tensor([[True] * 40, [True] * 30 + [False] * 10])
    reward = torch.zeros(2, 40)
    reward[0, 39] = reward[1, 29] = 1.0
    adv, ret = row.advantage(reward, torch.zeros(2, 40), mask)
    assert torch.equal(ret, mask.double())  # lambda 1: the return of every token is the reward
    lambdas = [1 - 1 / (0.05 * n) for n in (40, 30)]
    torch.testing.assert_close(adv[0], lambdas[0] ** torch.arange(39.0, -1, -1))
    torch.testing.assert_close(adv[1, :30], lambdas[1] ** torch.arange(29.0, -1, -1))


@pytest.mark.parametrize("name", ["gspo", "gmpo", "cispo", "sapo", "cpgd", "dppo_tv", "dppo_kl"])
def test_metrics_say_how_much_each_loss_stops(name):
    """With limits that nothing passes the share is 0, with limits of nearly 0 it is most of the tokens."""
    b = packing.pack(testing.case(0).exp, range(8))
    b = tree.replace(b, adv=segment.mean(b.adv, b.mask, b.seq, b.num_seqs)[b.seq])  # one a response
    out = testing.case(0).apply(testing.case(0).params, b)
    fn = algorithm.TABLE[name].loss
    tight, wide = {
        "cispo": ({"low": 1e-9, "high": 1e-9}, {"low": 1.0, "high": 1e9}),
        "dppo_tv": ({"limit": 1e-12}, {"limit": 2.0}),
        "dppo_kl": ({"limit": 1e-12}, {"limit": 1e9}),
    }.get(name, ({"low": 1e-9, "high": 1e-9}, {"low": 0.999999, "high": 1e9}))
    if name == "sapo":  # has no limit: its share is of ratios outside [0.8, 1.2]
        rho, adv = (out.logp - b.old_logp).exp(), b.adv
        want = (((rho > 1.2) & (adv > 0)) | ((rho < 0.8) & (adv < 0)))[b.mask].double().mean()
        assert fn(out, b)[1]["policy/clip_frac"].value() == want
        return
    wide = {"low": 100.0, "high": 100.0} if name == "gmpo" else wide
    shares = [fn(out, b, **options)[1]["policy/clip_frac"].value().item() for options in (tight, wide)]
    assert shares[0] > 0.3 and shares[1] == 0


def test_what_counts_as_stopped_by_hand():
    """Tokens without a gradient in spite of an advantage; at a limit itself nothing is stopped."""
    logp = torch.tensor([0.5, 0.75, 0.79, 0.9, 1.0, 1.1, 1.21, 1.25, 1.5]).log()
    ratio, old, mask, seq = logp.exp(), torch.zeros(9), torch.ones(9, dtype=torch.bool), torch.arange(9)
    clip = {"low": 1 - ratio[1].item(), "high": ratio[7].item() - 1}
    edge = {"low": -logp[1].item(), "high": logp[7].item()}
    of_sequences = {"mask": mask, "seq": seq, "num_seqs": 9}
    for fn, limits, up, down in (
        (loss.ppo_clip, clip, [8], [0]),
        (loss.gspo, clip | of_sequences, [8], [0]),
        (loss.gmpo, edge | of_sequences, [8], [0]),
        (loss.gmpo, {"low": 0.25, "high": 0.2} | of_sequences, [7, 8], [0, 1]),
        (loss.dppo_tv, {"limit": 0.22}, [7, 8], [0, 1]),
        (loss.reinforce, {}, [], []),
    ):
        for sign, want in ((1.0, up), (-1.0, down), (0.0, [])):
            adv = torch.full((9,), sign)

            def of(x, fn=fn, limits=limits, adv=adv):
                return fn(x, adv) if fn is loss.reinforce else fn(x, old, adv, **limits)

            found = stopped(of, TokenOut(logp=logp), SimpleNamespace(adv=adv))
            assert found.nonzero()[:, 0].tolist() == want, (fn, sign)


def test_tokens_that_both_policies_exclude_are_not_stopped():
    """They have no gradient, whatever the limits."""
    logp = torch.tensor([-torch.inf, -1.0])
    b = SimpleNamespace(adv=torch.ones(2))
    found = stopped(lambda x: loss.ppo_clip(x, logp, b.adv), TokenOut(logp=logp), b)
    assert found.tolist() == [False, False]


def test_what_losses_hold_back_that_stop_no_token_by_hand():
    """CISPO's cap whatever the advantage; soft gates where the advantage pushes further out."""
    ratio = torch.tensor([0.5, 0.75, 0.79, 0.9, 1.0, 1.1, 1.21, 1.25, 1.5])
    for fn, limits, up, down, zero in (
        (more_losses.beyond_clip, {"low": 0.25, "high": 0.25, "drift": 1.0}, [1.5], [0.5], []),
        (more_losses.beyond_clip, {}, [1.21, 1.25, 1.5], [0.5, 0.75, 0.79], []),
        (more_losses.outside_weights, {"low": 0.25, "high": 0.25}, [0.5, 1.5], [0.5, 1.5], [0.5, 1.5]),
    ):
        for adv, want in ((1.0, up), (-1.0, down), (0.0, zero)):
            assert ratio[fn(ratio, torch.full((9,), adv), **limits)].tolist() == want, (fn, adv)


@each("name", [n for n, r in algorithm.TABLE.items() if hasattr(r, "group")])
def test_a_row_takes_groups_from_its_least_size_on(name):
    """Two where responses of one prompt are compared, else one; that many give advantages that are finite."""
    row = algorithm.TABLE[name]
    centred = name not in ("remax", "reinforce", "reinforce_pp")
    assert row.group == 1 + centred and row.greedy == (name == "remax")
    assert algorithm.get_algorithm(name, group=row.group) is row
    adv = batch(name, torch.rand(8 // row.group, row.group))[-1].adv
    assert adv.isfinite().all() and adv.any()
    if centred:
        with pytest.raises(ValueError, match="group: expected >= 2 responses per prompt"):
            algorithm.get_algorithm(name, group=1)


def test_metrics_of_the_clipped_loss_by_hand():
    c = testing.case(0)
    b = packing.pack(c.exp, range(8))
    out = c.apply(c.params, b)
    _, found = algorithm.TABLE["grpo"].loss(out, b, low=0.2, high=0.3)
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


def test_metrics_of_the_clipped_critic_by_hand():
    """The share of values that moved by more than the clip, up or down; what is masked does not count."""
    b = packing.pack(testing.case(0).exp, range(8))
    old = torch.linspace(-9, 9, len(b.adv))
    moved = torch.linspace(-1, 1, len(b.adv))
    b = tree.replace(b, old_value=old, ret=old + 0.5)
    row = algorithm.TABLE["ppo"]
    x, found = row.value_loss(TokenOut(logp=b.old_logp, value=old + moved), b, clip=0.25)
    torch.testing.assert_close(x, loss.value_clip(old + moved, old, old + 0.5, clip=0.25))
    torch.testing.assert_close(found["value/loss"].value(), x[b.mask].mean())
    share = ((moved < -0.25) | (moved > 0.25))[b.mask].double().mean()
    assert found["value/clip_frac"].value() == share and 0.3 < share < 1


@each("name", [n for n, row in algorithm.TABLE.items() if isinstance(row, algorithm.Algorithm)])
def test_a_group_size_that_does_not_divide_the_rows_is_named(name):
    c, row = testing.case(0), algorithm.TABLE[name]
    more = {"greedy_reward": torch.zeros(2)} if row.greedy else {}
    message = "reward: expected [N, G] with N G = 8 rows of the rollout, got [2, 3]"
    with pytest.raises(ValueError) as error:
        row.advantage(torch.rand(2, 3), tiny.rollout(c.exp), **more)
    assert str(error.value) == message


def test_every_limit_of_a_loss_is_an_option_with_help():
    """The limits of all losses of the table, as the docstrings explain them."""
    limits = set()
    for row in algorithm.TABLE.values():
        parameters = inspect.signature(row.loss).parameters.values()
        limits |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    fields = dataclasses.fields(options.Limits)
    assert {f.name for f in fields} == limits
    for fn in options.LOSSES:
        explained = re.findall(r"^ +(\w+): ", fn.__doc__.partition("Limits:")[2], re.M)
        assert explained == [
            p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
    helps = {f.name: f.metadata["help"] for f in fields}
    assert helps["tau_pos"] == "sapo: steepness of the gate where A > 0; None is the algorithm's default"
    assert (
        helps["cap"].startswith("cpgd: ") and "; dppo_tv, dppo_kl: the ratio is at most cap; " in helps["cap"]
    )


def test_a_row_takes_another_weight_advantage_and_limits():
    mask = torch.ones(2, 3, dtype=torch.bool)
    row = algorithm.configured(
        "gspo", weight="token_mean", advantage="remax", limits={"low": 0.1, "cap": None}
    )
    assert (
        row.weight is weight.token_mean and row.greedy and row.advantage is algorithm.TABLE["remax"].advantage
    )
    assert inspect.signature(row.loss).parameters["low"].default == 0.1
    torch.testing.assert_close(weight.get_weight("constant:7")(mask), weight.constant(mask, 7))
    plain = algorithm.configured("gspo", limits={"low": None})
    assert plain._replace(loss=None) == algorithm.TABLE["gspo"]._replace(loss=None)
    critic = algorithm.configured_actor_critic("ppo", weight="seq_mean", limits={"dual": 2.0})
    assert (
        critic.weight is weight.seq_mean and inspect.signature(critic.loss).parameters["dual"].default == 2.0
    )
    for name in ("mean", "constant", "constant:0", "constant:x", "token_mean:3"):
        with pytest.raises(ValueError, match=r"^weight: expected one of token_mean, .*constant:LENGTH"):
            weight.get_weight(name)
