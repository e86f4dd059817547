"""Losses of reward models: definitions, one family, limits, ragged lists in packs."""

import itertools
import math

import numpy as np
import pytest
import ref_rewards as ref
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st
from tables import agree, table

from rft_fn import loss, metric, packing, segment, testing, tree, weight

pytestmark = pytest.mark.usefixtures("float64")
scores = st.floats(-15, 15)
shares = st.floats(0, 1)
LISTS = (3, 1, 2, 2)  # rows of each list of `testing.case`


@st.composite
def ranked(draw, most=4, ties=False):
    """(score, rank, list) of one to three lists of two to `most` responses."""
    sizes = draw(st.lists(st.integers(2, most), min_size=1, max_size=3))
    rank = []
    for size in sizes:
        places = draw(st.permutations(range(size)))
        if ties:
            places = [place // 2 for place in places]
        rank += places
    score = draw(st.lists(scores, min_size=sum(sizes), max_size=sum(sizes)))
    unit = [u for u, size in enumerate(sizes) for _ in range(size)]
    return torch.tensor(score), torch.tensor(rank), torch.tensor(unit)


@given(data=table(scores, scores, st.floats(-3, 3)), e=st.floats(0, 0.49))
def test_bradley_terry_with_margin_and_smoothing_is_the_definition(data, e):
    chosen, rejected, margin = data
    want = ref.bradley_terry(*(np.asarray(x, float) for x in data), e)
    got = loss.bradley_terry(
        *map(torch.as_tensor, (chosen, rejected)), margin=torch.as_tensor(margin), label_smoothing=e
    )
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@given(data=table(scores, scores))
def test_pairs_are_one_family(data):
    """HPS, log-exp, the cross-entropy of the difference and Plackett-Luce of two are Bradley-Terry."""
    chosen, rejected = map(torch.as_tensor, data)
    want = loss.bradley_terry(chosen, rejected)
    same = {
        "hps": loss.hps(chosen, rejected),
        "log_exp": loss.log_exp(chosen, rejected),
        "bce": loss.score_bce(chosen - rejected, torch.ones_like(chosen)),
    }
    two = torch.stack([chosen, rejected], -1).flatten()
    place = torch.tensor([0, 1]).repeat(len(chosen))
    unit = torch.arange(len(chosen)).repeat_interleave(2)
    same["plackett_luce"] = loss.plackett_luce(two, place, unit).view(-1, 2).sum(-1)
    for name, got in same.items():
        torch.testing.assert_close(got, want, rtol=1e-14, atol=4e-15, msg=lambda m, name=name: f"{name}: {m}")


@given(data=table(scores, scores))
def test_log_exp_is_its_definition(data):
    agree(loss.log_exp, ref.log_exp, data)


@given(data=table(scores, scores))
def test_centering_is_its_definition(data):
    agree(loss.centering, ref.centering, data)


def test_centering_leaves_the_margin_and_takes_the_mean_to_0():
    pair = torch.tensor([5.0, 3.0]).requires_grad_()
    (g,) = torch.autograd.grad(loss.centering(pair[:1], pair[1:]).sum(), pair)
    assert g[0] == g[1] == 16.0


@given(data=table(st.floats(-5, 5), st.floats(-5, 5), shares), scale=st.floats(0.1, 3))
def test_hps_with_soft_labels_is_its_definition(data, scale):
    first, second, share = data
    want = ref.hps(*(np.asarray(x, float) for x in data), scale)
    got = loss.hps(*map(torch.as_tensor, (first, second, share)), scale=scale)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert (got >= -1e-15).all()


@pytest.mark.parametrize("e", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_hps_is_smoothed_bradley_terry_of_scaled_scores(e, scale):
    first, second = torch.tensor([[1.0, -3.0, 12.0], [0.5, 4.0, -9.0]])
    entropy = -sum(q * math.log(q) for q in (e, 1 - e) if q)
    want = loss.bradley_terry(scale * first, scale * second, label_smoothing=e) - entropy
    torch.testing.assert_close(loss.hps(first, second, 1 - e, scale=scale), want, rtol=1e-12, atol=1e-14)


def test_a_tie_pulls_scores_together():
    pair = torch.tensor([2.0, 1.0]).requires_grad_()
    (g,) = torch.autograd.grad(loss.hps(pair[:1], pair[1:], 0.5).sum(), pair)
    assert g[0] > 0.2 and g[1] == -g[0]
    assert loss.hps(torch.ones(1), torch.ones(1), 0.5).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("e", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("margin", [0.0, 1.5])
def test_the_best_smoothed_difference_is_the_log_odds_of_right_labels(e, margin):
    best = torch.tensor([margin + math.log((1 - e) / e)]).requires_grad_()
    x = loss.bradley_terry(best, torch.zeros(1), margin=margin, label_smoothing=e)
    assert torch.autograd.grad(x.sum(), best)[0].abs() < 1e-15


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e3, -1e3, 1e6])
def test_no_loss_of_scores_overflows(gap):
    """A fault of other systems: log(1 + exp(x)) is inf at a difference of 100 (float32)."""
    assert math.log1p(math.exp(88)) > 0 and torch.tensor(100.0, dtype=torch.float32).exp().isinf()
    chosen = torch.tensor([gap], dtype=torch.float32).requires_grad_()
    zero = torch.zeros(1, dtype=torch.float32)
    both = torch.cat([chosen, zero])
    hard = {
        "bradley_terry": loss.bradley_terry(chosen, zero),
        "hps": loss.hps(chosen, zero),
        "log_exp": loss.log_exp(chosen, zero),
        "bce": loss.score_bce(chosen, torch.ones(1, dtype=torch.float32)),
        "plackett_luce": loss.plackett_luce(both, torch.tensor([0, 1]), torch.zeros(2)).sum()[None],
    }
    for x in hard.values():
        torch.testing.assert_close(x.detach(), torch.tensor([max(-gap, 0.0)], dtype=torch.float32))
    soft = [loss.bradley_terry(chosen, zero, label_smoothing=0.1), loss.hps(chosen, zero, 0.3)]
    for x in (*hard.values(), *soft):
        (g,) = torch.autograd.grad(x.sum(), chosen, retain_graph=True)
        assert x.isfinite().all() and g.isfinite().all()


@given(data=ranked())
def test_plackett_luce_is_its_definition(data):
    want = ref.plackett_luce(*(x.numpy() for x in data))
    np.testing.assert_allclose(loss.plackett_luce(*data), want, rtol=1e-9, atol=1e-11)


@given(data=ranked(ties=True))
def test_ties_are_drawn_among_all_that_are_no_better(data):
    want = ref.plackett_luce(*(x.numpy() for x in data))
    np.testing.assert_allclose(loss.plackett_luce(*data), want, rtol=1e-9, atol=1e-11)


@given(data=st.data(), size=st.integers(1, 5))
def test_the_probabilities_of_all_orders_add_up_to_1(data, size):
    score = torch.tensor(data.draw(st.lists(st.floats(-5, 5), min_size=size, max_size=size)))
    total = 0.0
    for order in itertools.permutations(range(size)):
        rank = torch.tensor([order.index(i) for i in range(size)])
        p = loss.plackett_luce(score, rank, torch.zeros(size)).sum().neg().exp().item()
        assert p == pytest.approx(ref.order_probability(score.tolist(), order), rel=1e-9)
        total += p
    assert total == pytest.approx(1, rel=1e-12)


@given(data=ranked(), shift=st.floats(-5, 5))
def test_a_list_knows_scores_up_to_a_constant_and_nothing_of_other_lists(data, shift):
    score, rank, unit = data
    want = loss.plackett_luce(score, rank, unit)
    moved = torch.where(unit == 0, score + shift, score)
    torch.testing.assert_close(loss.plackett_luce(moved, rank, unit), want, rtol=1e-9, atol=1e-9)
    first = unit == 0
    torch.testing.assert_close(loss.plackett_luce(score[first], rank[first], unit[first]), want[first])
    back = torch.arange(len(score)).flip(0)
    torch.testing.assert_close(loss.plackett_luce(score[back], rank[back], unit[back]), want[back])


def test_a_list_of_four_is_not_the_sum_of_its_pairs():
    score = torch.tensor([2.0, 1.0, 0.5, -1.0])
    whole = loss.plackett_luce(score, torch.arange(4), torch.zeros(4)).sum()
    pairs = sum(loss.bradley_terry(a[None], b[None])[0] for a, b in itertools.combinations(score, 2))
    assert pairs - whole > 0.1


def test_all_tied_pulls_all_scores_together():
    score = torch.tensor([3.0, 0.0, -1.0]).requires_grad_()
    x = loss.plackett_luce(score, torch.zeros(3), torch.zeros(3))
    (g,) = torch.autograd.grad(x.sum(), score)
    assert (3 * score.detach().softmax(-1) - 1 - g).abs().max() < 1e-12


@given(data=table(scores, shares))
def test_cross_entropy_of_scores_is_its_definition(data):
    agree(loss.score_bce, ref.score_bce, data)


@given(data=table(scores, scores))
def test_squared_error_of_scores_is_its_definition(data):
    agree(loss.score_mse, ref.score_mse, data)


def test_cross_entropy_takes_any_shape_and_bool_labels():
    score = torch.tensor([[2.0, -1.0], [0.0, 3.0]])
    label = torch.tensor([[True, False], [True, True]])
    want = torch.nn.functional.binary_cross_entropy_with_logits(score, label.double(), reduction="none")
    torch.testing.assert_close(loss.score_bce(score, label), want)
    at = torch.tensor([math.log(0.3 / 0.7)]).requires_grad_()
    (g,) = torch.autograd.grad(loss.score_bce(at, torch.tensor([0.3])).sum(), at)
    assert g.abs() < 1e-15  # the least loss is at the label's own log-odds


X = torch.zeros(3)
SMOOTHING = "label_smoothing: expected 0 <= label_smoothing < 0.5, got "
BAD = [
    (lambda: loss.bradley_terry(X, X[:2]), "rejected: expected [N] = [3], got [2]"),
    (lambda: loss.bradley_terry(X, X, margin=X[:2]), "margin: expected [N] = [3], got [2]"),
    (lambda: loss.bradley_terry(X, X, label_smoothing=0.5), SMOOTHING + "0.5"),
    (lambda: loss.bradley_terry(X, X, label_smoothing=-0.1), SMOOTHING + "-0.1"),
    (lambda: loss.hps(X, X, X[:2]), "preference: expected [N] = [3], got [2]"),
    (lambda: loss.log_exp(X, X[:2]), "rejected: expected [N] = [3], got [2]"),
    (lambda: loss.centering(X[:2], X), "rejected: expected [N] = [2], got [3]"),
    (lambda: loss.plackett_luce(X, X[:2], X), "rank: expected [N] = [3], got [2]"),
    (lambda: loss.plackett_luce(X, X, X[:2]), "unit: expected [N] = [3], got [2]"),
    (lambda: loss.score_mse(X, X[:2]), "label: expected [...] = [3], got [2]"),
    (lambda: loss.score_bce(X, X[:2]), "label: expected [...] = [3], got [2]"),
]  # fmt: skip


@each(("call", "message"), BAD)
def test_bad_scores_are_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def of_pairs(out, b):
    """Bradley-Terry with a margin of each pair, and a centring term, on each token of the pair."""
    chosen, rejected = packing.sides(out.value, b)
    margin, _ = packing.sides(b.extra["margin"], b)
    x = loss.bradley_terry(chosen, rejected, margin=margin, label_smoothing=0.1)
    x = x + 0.01 * loss.centering(chosen, rejected)
    return x[b.seq // 2], metric.preference("pairs", chosen, rejected, packing.real(b))


def of_lists(out, b):
    """Plackett-Luce of ranked lists of any length; each response's term stands on its tokens."""
    score = segment.sum(out.value, b.mask, b.seq, b.num_seqs)
    rank = segment.max(b.extra["rank"], b.mask, b.seq, b.num_seqs)
    unit = packing.unit_of(b)
    return loss.plackett_luce(score, rank, unit)[b.seq], metric.ranking("lists", score, rank, unit)


def on_tokens(**numbers):
    """Numbers of rows as extra data of each of their tokens."""
    return lambda exp: {n: torch.tensor(x).double()[:, None] * exp.mask for n, x in numbers.items()}


@pytest.mark.parametrize("seed", range(2))
def test_no_cut_changes_the_training_of_pairs(seed):
    extra = on_tokens(margin=[0.1, 0, 0.3, 0, 0.5, 0, 0.2, 0])
    testing.check_all(of_pairs, weight=weight.pair_mean, unit=2, seed=seed, extra=extra)


@pytest.mark.parametrize("unit", [LISTS, (8,), (2, 6), (1, 1, 5, 1)])
def test_no_cut_changes_the_training_of_lists_of_any_length(unit):
    extra = on_tokens(rank=[i for size in unit for i in range(size)])
    for mean in (weight.unit_mean, weight.unit_sum):
        testing.check_all(of_lists, weight=lambda mask, mean=mean: mean(mask, unit), unit=unit, extra=extra)


@pytest.mark.parametrize("steps", [loss.score_bce, loss.score_mse])
def test_no_cut_changes_the_training_of_steps(steps):
    """A label at each step; w is the mean over steps, or the mean over the steps of each row."""
    extra = lambda exp: {"label": (exp.tokens % 2) * exp.mask.double()}  # noqa: E731
    for mean in (weight.token_mean, weight.seq_mean):
        testing.check_all(
            lambda out, b: steps(out.value, b.extra["label"]), weight=mean, extra=extra, on_policy=False
        )


def test_the_loss_of_lists_is_the_mean_over_lists_of_the_definition():
    extra = on_tokens(rank=[2, 0, 1, 0, 1, 0, 0, 1])
    c = testing.case(4, weight=lambda mask: weight.seq_mean(mask) * 0, extra=extra)
    last = c.exp.mask & (c.exp.mask.cumsum(-1) == c.exp.mask.sum(-1, keepdim=True))
    exp = tree.replace(c.exp, mask=last, w=weight.unit_sum(last, LISTS))
    (b,) = packing.shard(exp, 0, unit=LISTS)[0]
    total, _ = testing.total_and_grad(lambda out, b: of_lists(out, b)[0], c.apply, c.params, [b])
    score = segment.sum(c.apply(c.params, b).value, b.mask, b.seq, b.num_seqs)
    rank = segment.max(b.extra["rank"], b.mask, b.seq, b.num_seqs)
    want = ref.plackett_luce(*(x.detach().numpy() for x in (score, rank, packing.unit_of(b))))
    kept = segment.sum(b.mask.double(), b.mask, b.seq, b.num_seqs).numpy()
    assert total.item() == pytest.approx((want * kept).sum() / packing.real(b).sum().item(), rel=1e-12)
