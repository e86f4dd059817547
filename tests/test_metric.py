"""Metrics merge over packs and ranks in any order: no mean of means."""

import itertools
import math

import numpy as np
import pytest
import ref
import ref_rewards
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import collect, metric, packing, testing, tree
from rft_fn.algorithm import TABLE
from rft_fn.types import Rollout, TokenOut

values = st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=0, max_size=12)


def both(part):
    x = torch.tensor([v for v, _ in part], dtype=torch.float64)
    return x, torch.tensor([m for _, m in part], dtype=torch.bool)


@given(data=values, cuts=st.lists(st.integers(0, 12), max_size=4))
def test_any_cut_and_any_order_gives_the_same_numbers(data, cuts):
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    parts = [both(data[a:b]) for a, b in itertools.pairwise(edges)]
    found = {}
    for x, m in reversed(parts):
        found = metric.merge(
            found,
            {
                "mean": metric.mean(x, m),
                "sum": metric.sum(x, m),
                "max": metric.max(x, m),
                "ess": metric.effective_share(x.abs() + 1, m),
            },
        )
    kept = np.array([v for v, m in data if m])
    want = {"sum": kept.sum()}
    if kept.size:
        want |= {"mean": kept.mean(), "max": kept.max(), "ess": ref.effective_share(abs(kept) + 1)}
    assert metric.results(found) == pytest.approx(want, rel=1e-10, abs=1e-10)


def test_what_one_reads_of_pairs():
    """By hand, with beta = 0.5; the third pair is a placeholder. Equal rewards are no agreement."""
    sides = [
        torch.tensor(x) for x in ([-2.0, -5.0, 9.0], [-3.0, -4.0, 0.0], [-4.0, -4.0, 0.0], [-3.0, -3.0, 0.0])
    ]
    real = torch.tensor([True, True, False])
    found = metric.results(metric.pairs("eval", *sides, real, beta=0.5))
    assert found == pytest.approx(
        {
            "eval/reward_chosen": (1.0 - 0.5) / 2,
            "eval/reward_rejected": (0.0 - 0.5) / 2,
            "eval/margin": 0.5,
            "eval/accuracy": 0.5,
            "eval/ranking": 0.5,
            "eval/logp_chosen": -3.5,
            "eval/logp_rejected": -3.5,
        }
    )
    same = metric.results(metric.pairs("x", *sides[:2], *sides[:2], real, beta=0.5))
    assert same["x/margin"] == same["x/accuracy"] == 0 and same["x/ranking"] == 0.5
    with pytest.raises(ValueError, match=r"ref_chosen: expected \[P\] = \[3\], got \[2\]"):
        metric.pairs("x", sides[0], sides[1], sides[2][:2], sides[3], real, beta=0.5)


def test_equal_log_probs_and_equal_scores_rank_nothing():
    one = torch.ones(1)
    found = metric.results(metric.pairs("x", -one, -one, -3 * one, -2 * one, one > 0, beta=1.0))
    assert found["x/ranking"] == 0 and found["x/accuracy"] == 1
    assert metric.results(metric.preference("x", one, one, one > 0))["x/accuracy"] == 0


def test_a_mean_over_packs_is_not_the_mean_of_their_means():
    a = metric.mean(torch.tensor([1.0]), torch.tensor([True]))
    b = metric.mean(torch.tensor([4.0, 4.0, 4.0, 9.0]), torch.tensor([True, True, True, False]))
    assert a.merge(b).value() == 13 / 4


def test_names_of_one_side_survive_and_nothing_gives_nothing():
    merged = metric.merge({"a": metric.sum(torch.ones(2))}, {"b": metric.sum(torch.ones(3))})
    assert metric.results(merged) == {"a": 2.0, "b": 3.0}
    assert metric.results({}) == {}


def test_a_mean_over_nothing_is_absent_and_not_0():
    """What was not measured has no number; it counts when another pack or rank has some of it."""
    none, some = torch.zeros(2) > 0, torch.ones(2) > 0
    x = torch.tensor([2.0, torch.nan])
    kinds = {
        "mean": metric.mean,
        "max": metric.max,
        "share": metric.effective_share,
        "ece": lambda x, mask: metric.calibration(x, x, mask),
    }
    of_nothing = {name: f(x, none) for name, f in kinds.items()}
    assert metric.results(of_nothing | {"sum": metric.sum(x, none)}) == {"sum": 0.0}
    half = {name: f(torch.full((2,), 0.5), some) for name, f in kinds.items()}
    for found in (metric.merge(of_nothing, half), metric.merge(half, of_nothing)):
        assert metric.results(found) == metric.results(half)
    assert all(math.isnan(v) for v in metric.results({k: f(x, some) for k, f in kinds.items()}).values())
    zero = metric.results({name: f(torch.zeros(2), some) for name, f in kinds.items()})
    assert zero == dict.fromkeys(kinds, 0.0)
    one_sided = metric.labelled("x", x[:1], x[:1], some[:1], some[:1], beta=0.1)
    assert metric.results(one_sided).keys() == {"x/accuracy", "x/reward_chosen", "x/logp_chosen"}


def test_values_of_two_devices_are_stacked_apart(monkeypatch):
    """A norm on a GPU beside a count on the host, which torch does not stack: meta stands for the GPU."""
    stack = torch.stack

    def checked(values):
        stacked = stack(values)  # raises for tensors of two devices
        return torch.full((len(values),), 7.0) if stacked.is_meta else stacked

    monkeypatch.setattr(torch, "stack", checked)
    far, near = metric.sum(torch.ones(2, device="meta")), metric.sum(torch.ones(2))
    found = metric.results({"a": far, "b": near, "c": far})
    assert found == {"a": 7.0, "b": 2.0, "c": 7.0} and list(found) == ["a", "b", "c"]


def test_values_outside_the_mask_are_never_read():
    x, m = torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([True, False, False])
    found = {"mean": metric.mean(x, m), "sum": metric.sum(x, m), "max": metric.max(x, m)}
    assert metric.results(found) == {"mean": 1.0, "sum": 1.0, "max": 1.0}


def test_metrics_carry_no_gradient_and_sum_in_float64():
    x = torch.full((3,), 0.1, requires_grad=True)
    for m in (metric.mean(x, x > 0), metric.sum(x), metric.max(x, x > 0)):
        assert all(not leaf.requires_grad and leaf.dtype == torch.float64 for leaf in tree.leaves(m))
    ones = torch.ones(300, dtype=torch.bfloat16)
    assert metric.sum(ones).value() == 300  # bf16 stops at 256


def test_the_clipped_share_counts_what_is_clipped():
    """A fault of other systems: computed after clamping, the share of clipped tokens is always 0."""
    c = testing.case(0)
    b = packing.pack(c.exp, range(8))
    out = c.apply(c.params, b)
    _, wide = TABLE["grpo"].loss(out, b, low=10.0, high=1e6)
    _, tight = TABLE["grpo"].loss(out, b, low=1e-9, high=1e-9)
    rho = (out.logp - b.old_logp).exp()
    worse = ((rho > 1) == (b.adv > 0))[b.mask].double().mean()
    assert metric.results(wide)["policy/clip_frac"] == 0
    assert metric.results(tight)["policy/clip_frac"] == pytest.approx(float(worse)) and 0 < worse < 1


@pytest.mark.parametrize(("correct", "k"), [(0, 1), (1, 1), (3, 2), (5, 3), (8, 4), (2, 8)])
def test_pass_at_k_against_enumeration(correct, k):
    samples = [i < correct for i in range(8)]
    draws = list(itertools.combinations(samples, k))
    want = sum(any(d) for d in draws) / len(draws)
    assert float(metric.pass_at_k(torch.tensor([samples]), k)) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("k", [0, 9])
def test_pass_at_k_needs_k_samples(k):
    with pytest.raises(ValueError, match=f"k: expected between 1 and the 8 samples of each prompt, got {k}"):
        metric.pass_at_k(torch.zeros(2, 8, dtype=torch.bool), k)


@pytest.mark.parametrize("bad", [0.5, 3, torch.tensor(0.5), None])
def test_a_value_that_is_no_metric_is_named(bad):
    for call in (lambda: metric.merge({}, {"kl": bad}), lambda: metric.results({"kl": bad})):
        with pytest.raises(ValueError, match=r"metric 'kl': expected a Metric, got .*; use metric\.mean"):
            call()


def test_the_gap_to_a_sampler_that_excludes_the_same_token_is_0():
    b = packing.pack(testing.case(0).exp, [3])
    at = int(b.mask.nonzero()[0])
    old = torch.where(torch.arange(len(b.adv)) == at, -torch.inf, b.old_logp)
    got = metric.results(metric.policy(TokenOut(logp=old), tree.replace(b, old_logp=old)))
    assert got.pop("policy/ess_sampler") == 1.0
    depths = {"mismatch/gap@1k", "mismatch/gap@turn1", "mismatch/gap@turn2"}
    assert set(got) == {*collect.MISMATCH, *depths} - {"policy/ess_sampler"} and set(got.values()) == {0.0}


def test_the_mismatch_of_two_log_probs_by_hand():
    """Beyond 20 nats the KL grows no further, the gap does; what is masked does not count."""
    logp = torch.tensor([-1.0, -2.0, -30.0, -1.0, 5.0], requires_grad=True)
    sampler = torch.tensor([-1.5, -1.0, -1.0, -31.0, 0.0])
    mask = torch.tensor([True, True, True, True, False])
    found = metric.results(metric.mismatch(logp, sampler, mask))
    gaps = [0.5, -1.0, -29.0, 30.0]
    near = [0.5, -1.0, -20.0, 20.0]
    assert found["policy/logp_gap"] == pytest.approx(sum(map(abs, gaps)) / 4)
    assert found["policy/logp_gap_max"] == 30
    want = sum(np.expm1(d) - d for d in near) / 4
    assert found["policy/kl_sampler"] == pytest.approx(want, rel=1e-6)
    assert found["policy/k1_sampler"] == pytest.approx(-sum(near) / 4)
    assert found["policy/chi2_sampler"] == pytest.approx(sum(np.expm1(2 * d) for d in near) / 4, rel=1e-6)
    assert found["policy/ess_sampler"] == pytest.approx(ref.effective_share(np.exp(near)), rel=1e-6)
    small = metric.results(metric.mismatch(logp[:2], sampler[:2], mask[:2]))
    want = sum(np.expm1(d) - d for d in near[:2]) / 2
    assert small["policy/kl_sampler"] == pytest.approx(want, rel=1e-6)


def test_the_metrics_of_a_policy_are_over_its_own_tokens():
    b = packing.pack(testing.case(0).exp, range(8))
    logp, x = b.old_logp + torch.linspace(0, 1, len(b.adv)), torch.linspace(1, 3, len(b.adv))
    found = metric.results(metric.policy(TokenOut(logp=logp), b))
    whole = {name: x for name, x in found.items() if not name.startswith(metric.GAP_AT)}
    assert whole == metric.results(metric.mismatch(logp, b.old_logp, b.mask))
    found = metric.results(metric.policy(TokenOut(logp=logp, entropy=x), b))
    assert found["policy/entropy"] == pytest.approx(float(x[b.mask].mean()), rel=1e-6)
    found = metric.results(metric.router(TokenOut(logp=logp, aux=x, expert_share=2 * x), b))
    assert found["router/aux"] == pytest.approx(float(x[b.mask].mean()), rel=1e-6)
    assert found["router/max_share"] == pytest.approx(2 * float(x[b.mask].mean()), rel=1e-6)


def test_the_diagnostics_of_a_rollout_by_hand():
    """Rows of 3, 1, 2 and 0 sampled tokens; the second prompt's rewards are alike."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    number = torch.zeros(4, dtype=torch.long)
    rollout = Rollout(
        tokens=mask.long(), mask=mask, logp=torch.where(mask, -0.5, 0), length=number + 4,
        truncated=torch.tensor([True, False, False, False]), group=number, version=number,
    )  # fmt: skip
    assert metric.rollout(rollout, torch.tensor([[1.0, 3.0], [2.0, 2.0]])) == pytest.approx(
        {
            "reward/std": 0.5**0.5,
            "reward/flat_groups": 0.5,
            "rollout/length_mean": 1.5,
            "rollout/length_max": 3,
            "rollout/truncated": 0.25,
            "rollout/empty": 0.5,
            "rollout/sampler_logp": -0.5,
        }
    )
    whole = metric.rollout(rollout, torch.tensor([[1, 3], [2, 2]]))  # rewards may be whole numbers
    assert whole["reward/std"] == pytest.approx(0.5**0.5, rel=1e-12)
    nothing = tree.replace(rollout, mask=mask & False, logp=torch.zeros(4, 4))
    assert "rollout/sampler_logp" not in metric.rollout(nothing, torch.zeros(2, 2))


def test_the_spread_over_a_mask_by_hand():
    x, mask = torch.tensor([1.0, 3.0, 8.0, 99.0]), torch.tensor([True, True, True, False])
    want = {"x/mean": 4.0, "x/std": (26 / 3) ** 0.5, "x/min": 1.0, "x/max": 8.0}
    assert metric.spread("x", x, mask) == pytest.approx(want)
    assert metric.spread("x", x, mask & False) == {}


def test_an_average_is_over_the_rows_that_have_the_name():
    assert metric.average([{"a": 1.0, "b": 2.0}, {"a": 4.0}]) == {"a": 2.5, "b": 2.0}


chances = st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), min_size=0, max_size=15)


@given(data=chances, cut=st.integers(0, 15), bins=st.integers(1, 12))
def test_calibration_is_its_definition_however_it_is_cut(data, cut, bins):
    def part(rows):
        p, label, mask = ([row[i] for row in rows] for i in range(3))
        kinds = (torch.float64, torch.bool, torch.bool)
        return metric.calibration(
            *(torch.tensor(x, dtype=k) for x, k in zip((p, label, mask), kinds)), bins=bins
        )

    both_ = metric.merge({"ece": part(data[cut:])}, {"ece": part(data[:cut])})
    p, label = [row[0] for row in data if row[2]], [row[1] for row in data if row[2]]
    want = {"ece": ref_rewards.calibration_error(p, label, bins)} if p else {}
    assert metric.results(both_) == pytest.approx(want, rel=1e-12, abs=1e-14)
    got = metric.reliability(both_["ece"])
    for row, expected in zip(got, ref_rewards.bins_of(p, label, bins), strict=True):
        assert row == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_a_probability_of_one_is_in_the_last_bin_and_what_is_masked_in_none():
    p = torch.tensor([1.0, 0.0, 0.95, torch.nan])
    found = metric.calibration(p, torch.tensor([1.0, 0, 0, 1]), torch.tensor([True, True, True, False]))
    assert found.count.tolist() == [1, *[0] * 8, 2]
    assert float(found.value()) == pytest.approx(0.95 / 3)
    with pytest.raises(ValueError, match="bins: expected >= 1, got 0"):
        metric.calibration(p, p, p > 0, bins=0)
    with pytest.raises(ValueError, match=r"count: expected|other: expected \[bins\] = \[10\], got \[5\]"):
        found.merge(metric.calibration(p, p, p > 0, bins=5))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_score_that_is_no_number_is_a_number_of_no_metric_and_stops_nothing(bad):
    """The gradient is not finite then, which is skipped and stops a run by its own limit."""
    chosen, rejected = torch.tensor([bad, 1.0]), torch.tensor([0.5, bad])
    real = torch.tensor([True, True])
    found = metric.results(metric.preference("x", chosen, rejected, real))
    assert np.isnan(found["x/ece"]) == np.isnan(bad)
    listed = metric.results(metric.ranking("y", chosen, torch.tensor([0, 1]), torch.tensor([0, 0])))
    assert np.isnan(listed["y/ece"]) == np.isnan(bad)
    p = torch.tensor([bad, 0.25])
    assert metric.calibration(p, torch.ones(2), real).count.sum() == 2


sides = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), min_size=1, max_size=10)


@given(data=sides)
def test_preferences_are_shown_in_both_orders(data):
    """With each label 1 the error would be 1 - mean p whatever the model knows."""
    chosen, rejected, real = (torch.tensor(x) for x in zip(*data))
    kept = [(c, r) for c, r, m in zip(chosen.double().tolist(), rejected.double().tolist(), real) if m]
    p = [1 / (1 + np.exp(r - c)) for c, r in kept]
    want = {
        "x/reward_chosen": sum(c for c, _ in kept) / max(len(kept), 1),
        "x/reward_rejected": sum(r for _, r in kept) / max(len(kept), 1),
        "x/margin": sum(c - r for c, r in kept) / max(len(kept), 1),
        "x/accuracy": sum(c > r for c, r in kept) / max(len(kept), 1),
    }
    found = metric.preference("x", chosen, rejected, real)
    got = metric.results(found)
    if not kept:
        assert got == {}
        return
    ece = got.pop("x/ece")
    assert got == pytest.approx(want, rel=1e-6, abs=1e-6)
    both_ = [*p, *(1 - x for x in p)]
    near_an_edge = any(abs(x * 10 - round(x * 10)) < 1e-6 for x in p)
    if not near_an_edge:
        label = [1] * len(p) + [0] * len(p)
        assert ece == pytest.approx(ref_rewards.calibration_error(both_, label), rel=1e-6, abs=1e-6)
    swapped = metric.results(metric.preference("x", -rejected, -chosen, real))
    assert swapped["x/margin"] == pytest.approx(got["x/margin"], abs=1e-6)


def test_calibrated_preferences_have_no_error():
    """Scores that win with a probability of 3/4 and do so in three of four pairs."""
    gap = float(np.log(3))
    chosen, rejected = torch.tensor([gap] * 3 + [0.0]), torch.tensor([0.0] * 3 + [gap])
    found = metric.results(metric.preference("x", chosen, rejected, torch.ones(4, dtype=torch.bool)))
    assert found["x/ece"] == pytest.approx(0, abs=1e-7) and found["x/accuracy"] == 0.75
    sure = metric.results(metric.preference("x", 9 * chosen, 9 * rejected, torch.ones(4, dtype=torch.bool)))
    assert sure["x/ece"] == pytest.approx(0.25, abs=1e-3) and sure["x/accuracy"] == 0.75


ranked = st.lists(
    st.tuples(st.integers(-3, 3).map(float), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=9
)


@given(rows=ranked)
def test_metrics_of_lists_are_those_of_their_pairs(rows):
    score, rank, unit = (list(x) for x in zip(*rows))
    pairs = ref_rewards.ranked_pairs(score, rank, unit)
    got = metric.results(metric.ranking("x", *(torch.tensor(x) for x in (score, rank, unit))))
    if not pairs:
        assert got == {}
        return
    count = len(pairs)
    assert got["x/accuracy"] == pytest.approx(sum(a > b for a, b in pairs) / count)
    assert got["x/margin"] == pytest.approx(sum(a - b for a, b in pairs) / count)
    tops = []
    for u in sorted(set(unit)):
        own = [i for i in range(len(rows)) if unit[i] == u]
        if len({rank[i] for i in own}) > 1:
            highest = max(own, key=lambda i: (score[i], -i))
            tops.append(rank[highest] == min(rank[i] for i in own))
    assert got["x/top"] == pytest.approx(sum(tops) / len(tops))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_the_gap_by_depth_is_its_definition_in_rows_and_in_packs(seed):
    """Rows of up to 70,000 tokens, whose masks have any number of turns."""
    rng_ = np.random.default_rng(seed)
    sizes = [int(10 ** rng_.uniform(0.5, 4.9)) for _ in range(3)]
    mask = torch.zeros(3, max(sizes), dtype=torch.bool)
    for row, size in zip(mask, sizes):
        cuts = np.sort(rng_.integers(1, max(size, 2), 2 * rng_.integers(1, 12)))
        for first, last in cuts.reshape(-1, 2):
            row[first : min(last, size)] = True
    d = torch.from_numpy(rng_.normal(size=mask.shape))
    want = ref.gap_by_depth(d, mask)

    # rows
    at = torch.arange(mask.shape[1]).expand_as(mask)
    found = metric.by_depth(d, mask, position=at, turn=metric.turn_of(mask, at))
    assert metric.results(found) == pytest.approx(want, rel=1e-9)

    # the same tokens behind each other: an input's target is one position later
    flat, inside, pos = (
        torch.cat([x[row, 1:size] for row, size in enumerate(sizes)]) for x in (d, mask, at - 1)
    )
    found = metric.by_depth(flat, inside, position=pos + 1, turn=metric.turn_of(inside, pos))
    assert metric.results(found) == pytest.approx(want, rel=1e-9)


def test_a_depth_that_has_all_tokens_is_not_told():
    values = {"loss": 1.0, "mismatch/gap@1k": 0.1, "mismatch/gap@turn1": 0.1, "mismatch/gap@turn2": 0.2}
    assert set(metric.told(values)) == {"loss", "mismatch/gap@turn1", "mismatch/gap@turn2"}
    assert set(metric.told(values | {"mismatch/gap@16k": 0.3})) == {*values, "mismatch/gap@16k"}
