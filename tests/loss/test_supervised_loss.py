"""Preferences, distillation and the entropy bonus: definitions, gradients, pairs in packs."""

import itertools
import math

import numpy as np
import pytest
import ref
import tiny
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st
from tables import agree, table

from rft_fn import loss, metric, model, packing, segment, testing, tree, weight

pytestmark = pytest.mark.usefixtures("float64")
seeds = st.integers(0, 2**32)
sums = st.floats(-30, 0)


@given(data=table(sums, sums), margin=st.floats(-2, 2))
def test_bradley_terry_against_the_definition(data, margin):
    agree(loss.bradley_terry, ref.bradley_terry, data, margin=margin)


@given(data=table(sums, sums, sums, sums), beta=st.floats(0.01, 1), e=st.floats(0, 0.49))
def test_dpo_and_cdpo_against_the_definition(data, beta, e):
    agree(loss.dpo, ref.dpo, data, beta=beta, label_smoothing=e)


def test_the_defaults_of_preferences_and_critics():
    """beta = 0.1, hard labels, and a critic that is clipped at 0.2."""
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 10
    assert torch.equal(loss.dpo(*x), loss.dpo(*x, beta=0.1, label_smoothing=0.0))
    assert torch.equal(loss.ipo(*x), loss.ipo(*x, beta=0.1))
    value = x[:3] / 10
    assert torch.equal(loss.value_clip(*value), loss.value_clip(*value, clip=0.2))
    assert torch.equal(loss.bradley_terry(*x[:2]), loss.bradley_terry(*x[:2], margin=0, label_smoothing=0))
    assert torch.equal(loss.hps(*x[:2]), loss.hps(*x[:2], 1.0, scale=1.0))


@given(data=table(sums, sums, sums, sums), beta=st.floats(0.01, 1))
def test_ipo_against_the_definition(data, beta):
    agree(loss.ipo, ref.ipo, data, beta=beta)


def test_a_margin_may_differ_from_pair_to_pair():
    chosen, rejected, margin = torch.tensor([[1.0, 2.0], [0.0, 3.0], [0.5, -0.5]])
    got = loss.bradley_terry(chosen, rejected, margin=margin)
    want = [math.log1p(math.exp(-(1 - 0.5))), math.log1p(math.exp(-(-1 + 0.5)))]
    torch.testing.assert_close(got, torch.tensor(want))


@pytest.mark.parametrize("gap", [1e3, -1e3, 1e6])
def test_preferences_do_not_overflow(gap):
    """A fault of other systems: log(1 + exp(x)) is inf at a difference of 100 (float32)."""
    chosen = torch.tensor([gap], dtype=torch.float32).requires_grad_()
    zero = torch.zeros(1, dtype=torch.float32)
    values = [loss.bradley_terry(chosen, zero), loss.dpo(chosen, zero, zero, zero, label_smoothing=0.1)]
    for x in (*values, loss.ipo(chosen, zero, zero, zero)):
        (g,) = torch.autograd.grad(x.sum(), chosen)
        assert x.isfinite().all() and g.isfinite().all()
    torch.testing.assert_close(values[0].detach(), torch.tensor([max(-gap, 0.0)], dtype=torch.float32))


def test_dpo_of_the_reference_itself_is_log_two_and_pulls_the_pair_apart():
    c, r = (torch.tensor([x]).requires_grad_() for x in (-3.0, -4.0))
    x = loss.dpo(c, r, c.detach(), r.detach(), beta=0.3)
    torch.testing.assert_close(x, torch.tensor([math.log(2)]))
    a, b = torch.autograd.grad(x.sum(), (c, r))
    assert a.item() == pytest.approx(-0.15) and b.item() == pytest.approx(0.15)


def test_ipo_stops_at_its_margin_where_dpo_goes_on():
    h = torch.tensor([5.0]).requires_grad_()  # 1 / (2 beta) at beta = 0.1
    zero = torch.zeros(1)
    assert torch.autograd.grad(loss.ipo(h, zero, zero, zero).sum(), h)[0] == 0
    assert torch.autograd.grad(loss.dpo(h, zero, zero, zero).sum(), h)[0] < -0.03


def test_cdpo_has_its_least_loss_at_the_odds_of_right_labels():
    h = torch.tensor([math.log(0.8 / 0.2)]).requires_grad_()
    zero = torch.zeros(1)
    x = loss.dpo(h, zero, zero, zero, beta=1.0, label_smoothing=0.2)
    assert torch.autograd.grad(x.sum(), h)[0].abs() < 1e-12


def dpo_of_pairs(out, b):
    """DPO as a LossFn: rows 2i and 2i + 1 are chosen and rejected, the pair's loss stands on each of its
    tokens, and w (pair_mean) makes the mean."""
    chosen, rejected = packing.sides(out.logp, b)
    ref_chosen, ref_rejected = packing.sides(b.ref_logp, b)
    x = loss.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.5)
    pairs = packing.real(b)
    metrics = metric.pairs("pairs", chosen, rejected, ref_chosen, ref_rejected, pairs, beta=0.5)
    return x[b.seq // 2], metrics | {"loss": metric.mean(x, pairs), "pairs": metric.sum(pairs.sum())}


@pytest.mark.parametrize("budget", [24, 60])
def test_pairs_train_through_packs_and_any_number_of_ranks(budget):
    """`shard(unit=2)` keeps pairs together; total and gradient are those of the mean over pairs."""
    c = testing.case(3)
    keep = torch.tensor([2, 3, 4, 5, 6, 7])
    exp = packing.take(c.exp, keep)
    exp = tree.replace(exp, w=weight.pair_mean(exp.mask))
    whole = packing.pack(exp, range(6), unit=2)
    want = testing.total_and_grad(dpo_of_pairs, c.apply, c.params, [whole])
    out = c.apply(c.params, whole)
    logp, ref_logp = (segment.sum(x, whole.mask, whole.seq, 6).view(3, 2) for x in (out.logp, whole.ref_logp))
    mean = ref.dpo(*(x.numpy() for x in (*logp.T, *ref_logp.T)), beta=0.5).mean()
    assert want[0].item() == pytest.approx(mean, rel=1e-12)
    for world in (1, 2, 3):
        packs = [p for rank in packing.shard(exp, budget, world, unit=2) for p in rank]
        assert all(p.rows[::2] == tuple(r - 1 for r in p.rows[1::2]) for p in packs)
        got = testing.total_and_grad(dpo_of_pairs, c.apply, c.params, packs)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_no_cut_padding_order_or_empty_pair_changes_a_loss_of_pairs(seed):
    """Its metrics too: in every case the first pair has no token in mask, and some ranks have no pair."""
    testing.check_all(dpo_of_pairs, weight=weight.pair_mean, unit=2, seed=seed)


def scores(out, b):
    """Bradley-Terry on the value of the last token in mask of each row, two rows a pair."""
    last = b.mask & (segment.max(b.pos.double(), b.mask, b.seq, b.num_seqs)[b.seq] == b.pos)
    score = segment.sum(out.value, last, b.seq, b.num_seqs).unflatten(0, (-1, 2))
    x = loss.bradley_terry(score[:, 0], score[:, 1])
    pairs = packing.real(b)
    return x[b.seq // 2], {"accuracy": metric.mean((score[:, 0] > score[:, 1]).double(), pairs)}


def test_more_ranks_than_pairs():
    """The ranks without a pair run a placeholder: a loss of 0 tokens, and no pair in the metrics."""
    testing.check_all(scores, weight=weight.pair_mean, unit=2)
    c = testing.case(0, weight=weight.pair_mean)
    shards = packing.shard(c.exp, 100, 5, unit=2)
    assert [sum(int(packing.real(b).sum()) for b in packs) for packs in shards] == [1, 1, 1, 0, 0]
    assert packing.left_out(c.exp, unit=2) == [0] and packing.left_out(c.exp) == [0, 1]
    empty = shards[4][0]
    total, grads = testing.total_and_grad(dpo_of_pairs, c.apply, c.params, [empty])
    assert total == 0 and all((g == 0).all() for g in tree.leaves(grads))
    found = metric.results(dpo_of_pairs(c.apply(c.params, empty), empty)[1])
    assert found == {"pairs": 0.0}  # means over no pair are absent


def test_minibatches_keep_pairs_together():
    exp = testing.case(0).exp
    exp = tree.replace(exp, tokens=torch.arange(8)[:, None].expand(8, 12))
    parts = packing.minibatches(exp, 3, 1, unit=2)
    rows = [part.tokens[:, 0].tolist() for part in parts]
    assert sorted(itertools.chain(*rows)) == list(range(8)) and [len(r) for r in rows] == [4, 2, 2]
    assert all(b == a + 1 and a % 2 == 0 for r in rows for a, b in zip(r[::2], r[1::2]))
    with pytest.raises(ValueError, match="n: expected between 1 and the number of units of 2 rows 4, got 5"):
        packing.minibatches(exp, 5, 1, unit=2)


def two(seed, vocab=6, rows=3):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=g).log_softmax(-1) for _ in range(2))


@given(seed=seeds)
def test_reverse_kl_against_the_definition(seed):
    p, q = two(seed)
    want = [ref.divergence(a, b) for a, b in zip(p.exp().numpy(), q.exp().numpy())]
    np.testing.assert_allclose(loss.reverse_kl(p, q), want, rtol=1e-10, atol=1e-12)


@given(seed=seeds)
def test_top_k_is_a_bound_that_grows_to_the_whole(seed):
    p, q = two(seed)
    order = p.argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    bounds = [loss.reverse_kl_top_k(p[:, :k], q[:, :k]) for k in range(1, 7)]
    for less, more in itertools.pairwise(bounds):
        assert (less <= more + 1e-12).all()
    for exact in bounds[4:]:  # one word left, or none
        torch.testing.assert_close(exact, loss.reverse_kl(p, q), rtol=1e-7, atol=1e-8)
    lumped = [torch.cat([x[:2], 1 - x[:2].sum(0, keepdim=True)]) for x in (p[0].exp(), q[0].exp())]
    assert bounds[1][0].item() == pytest.approx(ref.divergence(*(x.numpy() for x in lumped)), abs=1e-10)


def test_the_sampled_form_has_the_full_forms_gradient_in_expectation():
    """On-policy distillation from samples is `kl` with the teacher's log-probs: by enumeration."""
    z = torch.randn(5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    teacher = torch.randn(5, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    logp = z.log_softmax(-1)
    (want,) = torch.autograd.grad(loss.reverse_kl(logp, teacher), z, retain_graph=True)
    (got,) = torch.autograd.grad((logp.exp().detach() * loss.kl(logp, teacher)).sum(), z)
    torch.testing.assert_close(got, want)


def test_words_that_were_cut_count_nothing_and_a_word_the_teacher_excludes_is_finite():
    z = torch.tensor([[0.3, -torch.inf, 0.5]], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor([[0.2, 0.5, 0.3]]).log()
    x = loss.reverse_kl(z.log_softmax(-1), teacher)
    p = z.detach().softmax(-1)[0, [0, 2]]
    want = (p * (p.log() - teacher[0, [0, 2]])).sum()
    torch.testing.assert_close(x.detach(), want[None])
    assert torch.autograd.grad(x.sum(), z)[0][0, [0, 2]].isfinite().all()
    z = torch.zeros(1, 2).requires_grad_()
    x = loss.reverse_kl(z.log_softmax(-1), torch.tensor([[0.0, -torch.inf]]))
    assert x.item() == pytest.approx(0.5 * (math.log(0.5) + 60))
    assert torch.autograd.grad(x.sum(), z)[0][0, 1] > 10  # away from what the teacher never says


@pytest.mark.parametrize("f", [loss.reverse_kl, loss.reverse_kl_top_k])
def test_words_that_either_excludes_leave_values_and_gradients_finite(f):
    """Words cut by top_k or top_p have log-prob -inf: in both, in the policy alone, in the teacher alone."""
    z = torch.tensor([[0.3, 0.1, -0.4, 0.2, -1.0]]).requires_grad_()
    cut = torch.tensor([[False, True, True, False, False]])
    teacher = torch.tensor([[0.4, -torch.inf, 0.3, -torch.inf, 0.3]]).log_softmax(-1)
    teacher = torch.where(torch.tensor([[False, True, False, True, False]]), -torch.inf, teacher)
    logp = z.masked_fill(cut, -torch.inf).log_softmax(-1)
    p, q = logp.detach().exp()[0], teacher[0]
    want = sum(p[i] * (p[i].log() - q[i]) for i in (0, 4)) + p[3] * 60
    got = f(logp, teacher)
    torch.testing.assert_close(got.detach(), want[None], rtol=1e-6, atol=1e-6)
    (g,) = torch.autograd.grad(got.sum(), z)
    assert g.isfinite().all() and (g[cut] == 0).all() and g[0, 3] > 1


@pytest.mark.parametrize("sign", [1, -1])
def test_the_estimators_of_the_kl_are_bounded_at_60_nats(sign):
    """Up to there nothing is bent, so that a policy that has gone 59 nats away is still called back."""
    for d, counted in ((19.0, 19), (59.0, 59), (61.0, 60), (200.0, 60)):
        x = sign * counted
        logp = torch.tensor([-200.0]).requires_grad_()
        ref_logp = logp.detach() - sign * d
        for f, want in ((loss.kl_k1, x), (loss.kl_k2, x**2 / 2), (loss.kl_k3, math.expm1(-x) + x)):
            assert f(logp, ref_logp).item() == pytest.approx(want, rel=1e-12)
        assert loss.kl(logp, ref_logp).item() == pytest.approx(math.expm1(-x) + x, rel=1e-12)
        (g,) = torch.autograd.grad(loss.kl(logp, ref_logp).sum(), logp)
        assert g.item() == pytest.approx(x if d < 60 else 0)


def test_a_finite_gap_between_a_policy_and_its_teacher_has_no_bound():
    """Only a word that the teacher excludes counts 60."""
    logp, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.0, -100.0]])
    assert loss.reverse_kl(logp, teacher).item() == pytest.approx(math.log(0.5) + 50)


@pytest.mark.parametrize(("policy", "teacher", "rest"), [(0.5, 1.0, 1e-9), (1.0, 0.5, 0.5), (1.0, 1.0, 1e-9)])
def test_all_other_words_have_a_mass_of_1e_9_at_least(policy, teacher, rest):
    """Whether one of the two or both have nothing left for them."""
    logp, teacher_logp = torch.tensor([[policy]]).log(), torch.tensor([[teacher]]).log()
    left = max(1 - policy, 1e-9)
    want = policy * math.log(policy / teacher) + left * math.log(left / rest)
    assert loss.reverse_kl_top_k(logp, teacher_logp).item() == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_the_entropy_bonus_raises_the_entropy():
    c = testing.case(0)
    f = lambda o, b: loss.entropy_bonus(o.entropy)  # noqa: E731
    testing.check_all(f, on_policy=False)
    packs = [packing.pack(c.exp, range(8))]
    total, g = testing.total_and_grad(f, c.apply, c.params, packs)
    params = tree.map(lambda p, d: p - 0.1 * d, c.params, g)
    assert testing.total_and_grad(f, c.apply, params, packs)[0] < total < 0


X = torch.zeros(3)
BAD = [
    (lambda: loss.value_clip(X, None, X), "old_value: expected a tensor, got None"),
    (lambda: loss.value_clip(X, X, None), "ret: expected a tensor, got None"),
    (lambda: loss.value_clip(None, X, X), "value: expected a tensor, got None"),
    (lambda: loss.value_clip(X, X[:2], X), "old_value: expected [...] = [3], got [2]"),
    (lambda: loss.kl(X, None), "ref_logp: expected a tensor, got None"),
    (lambda: loss.kl_k3(X, X[:2]), "ref_logp: expected [...] = [3], got [2]"),
    (lambda: loss.entropy_bonus(None), "entropy: expected a tensor, got None"),
    (lambda: loss.dpo(X, X, None, X), "ref_chosen: expected a tensor, got None"),
    (lambda: loss.dpo(X, X[:2], X, X), "rejected: expected [N] = [3], got [2]"),
    (lambda: loss.dpo(X, X, X, X[:1]), "ref_rejected: expected [N] = [3], got [1]"),
    (
        lambda: loss.dpo(X, X, X, X, label_smoothing=0.5),
        "label_smoothing: expected 0 <= label_smoothing < 0.5",
    ),
    (lambda: loss.bradley_terry(X, X[:2]), "rejected: expected [N] = [3], got [2]"),
    (lambda: loss.reverse_kl(X, X[:2]), "teacher_logp: expected [... V] = [... 3]"),
]


@each(("call", "message"), BAD)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(message.split(" [... V]")[0])


def test_a_conversation_with_two_turns_has_the_gradient_of_the_definition():
    """The mean over all learned tokens of all rows of -log p(token | what stands before it), row by row."""
    lm, g = tiny.llama(dtype=torch.float64), torch.Generator().manual_seed(0)
    rows = []
    for turns in ([(3, 2), (2, 4)], [(1, 1)], [(2, 3), (1, 2), (4, 1)]):
        mask = [x for asked, said in turns for x in [False] * asked + [True] * said]
        rows.append((torch.randint(3, 40, (len(mask),), generator=g).tolist(), mask))
    terms = []
    for ids, mask in rows:
        logp = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        terms += [-logp[t - 1, ids[t]] for t in range(len(ids)) if mask[t]]
    assert len(terms) == 13
    want = torch.autograd.grad(sum(terms) / len(terms), list(lm.parameters()))

    apply, params = model.bind(lm)
    exp = packing.conversations(rows)
    packs = [p for part in packing.shard(exp, 20, 2) for p in part]
    assert len(packs) == 2
    total = sum((p.w * loss.nll(apply(params, p).logp)).sum() for p in packs)
    torch.testing.assert_close(total, sum(terms) / len(terms))
    for a, b in zip(torch.autograd.grad(total, list(lm.parameters())), want):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
