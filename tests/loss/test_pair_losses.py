"""Losses of preferences: definitions, limits, pairs and single responses in packs, what sets them apart."""

import inspect
import math
from functools import partial

import numpy as np
import pytest
import ref_preferences as ref
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st
from tables import agree, table

from rft_fn import loss, packing, segment, testing, weight

pytestmark = pytest.mark.usefixtures("float64")
sums, means, betas, shares = (
    st.floats(-30, 0),
    st.floats(-8, -0.01),
    st.floats(0.01, 1),
    st.floats(0.01, 0.45),
)
TABLE = loss.PREFERENCES
ROWS = {name: row for name, row in TABLE.items() if row.loss not in (loss.dpo, loss.ipo)}
PAIRS = {name: row for name, row in ROWS.items() if not row.single}
SMOOTH = {"robust", "exo", "cpo"}


@each("name", PAIRS)
@given(data=table(sums, sums, sums, sums), beta=betas, e=shares)
def test_a_loss_of_pairs_is_its_definition(name, data, beta, e):
    row = PAIRS[name]
    f = row.loss.__name__
    columns = data if row.reference else np.minimum(data[:2] / 4, -0.01)
    smooth = {"label_smoothing": e} if name in SMOOTH else {}
    agree(row.loss, getattr(ref, f), columns, beta=beta, **smooth)


@given(
    data=table(sums, sums, st.sampled_from([0.0, 1.0])), beta=betas, z=st.floats(-3, 3), w=st.floats(0.1, 3)
)
def test_losses_of_single_responses_are_their_definitions(data, beta, z, w):
    agree(loss.bco, ref.bco, data, beta=beta, baseline=z)
    weights = {"desirable_weight": w, "undesirable_weight": 2 - w / 2}
    agree(loss.kto, ref.kto, data, beta=beta, baseline=z, **weights)


@given(data=table(sums, sums, sums, sums, st.integers(0, 9)), p=st.floats(0, 1))
def test_more_arguments_are_those_of_the_definitions(data, p):
    agree(loss.rpo, ref.rpo, data, beta=0.3, alpha=p)
    agree(loss.sppo, ref.sppo, data[:4], beta=0.05, preference=p)
    agree(loss.simpo, ref.simpo, np.minimum(data[:2] / 4, -0.01), beta=2.5, margin=4 * p)


def test_the_settings_of_the_papers():
    """The table's numbers are the functions' own defaults, and each row names a paper."""
    for name, row in TABLE.items():
        own = inspect.signature(row.loss).parameters["beta"].default
        assert row.beta == own or name == "dpo_norm", name
        assert len(row.paper) == 10
    assert TABLE["dpo_norm"].beta == 5 and TABLE["simpo"].beta == 2 and TABLE["sppo"].beta == 1e-3
    assert {name for name, row in TABLE.items() if row.mean} == {"dpo_norm", "simpo", "orpo"}
    assert {name for name, row in TABLE.items() if not row.reference} == {"cpo", "simpo", "orpo"}
    assert {name for name, row in TABLE.items() if row.nll} == {"rpo", "cpo"}


# ---------- what sets them apart


def slopes(f, *x, **options):
    """The gradient of a loss of one pair, or response, by each of its log-probs."""
    leaves = [torch.tensor([v]).requires_grad_() for v in x]
    found = torch.autograd.grad(f(*leaves, **options).sum(), leaves, allow_unused=True)
    return [0.0 if g is None else g.item() for g in found]


@each("name", PAIRS)
def test_at_the_reference_a_chosen_response_gains_and_a_rejected_one_loses(name):
    row = PAIRS[name]
    x = (-3.0, -3.0, -3.0, -3.0)[: 4 if row.reference else 2]
    up, down = slopes(row.loss, *x)[:2]
    if name == "apo_down":  # both lose: the two slopes of the chosen side cancel at the reference
        assert up == pytest.approx(0, abs=1e-15) and down > 0
    else:
        assert up < 0 < down


def test_dpo_pushes_apart_what_apo_and_nca_hold():
    """After a chosen response has gained 20 nats: it loses under apo_down and nca, and not under dpo."""
    far = (-10.0, -60.0, -30.0, -30.0)
    assert slopes(loss.dpo, *far)[0] < 0 < slopes(loss.nca, *far)[0]
    assert slopes(loss.apo_down, *far)[0] > 0


def test_hinge_stops_at_its_margin():
    assert slopes(loss.hinge, -1.0, -12.0, 0.0, 0.0) == [0, 0, 0, 0]
    assert slopes(loss.hinge, -1.0, -10.0, 0.0, 0.0)[:2] == [-0.1, 0.1]


def test_robust_dpo_of_noisy_labels_is_dpo_of_right_ones():
    x = torch.randn(4, 60, generator=torch.Generator().manual_seed(0)) * 9
    flipped = x[[1, 0, 3, 2]]
    noisy = 0.8 * loss.robust_dpo(*x, label_smoothing=0.2) + 0.2 * loss.robust_dpo(
        *flipped, label_smoothing=0.2
    )
    torch.testing.assert_close(noisy, loss.dpo(*x), rtol=1e-12, atol=1e-12)


def test_exo_is_the_divergence_the_other_way_round():
    """At the labels' odds it is 0, as is the gradient of cDPO; a far pair has a gradient that vanishes."""
    odds = math.log(0.9 / 0.1)
    x = (odds, 0.0, 0.0, 0.0)
    assert loss.exo(*torch.tensor(x)[:, None], beta=1.0, label_smoothing=0.1).item() == pytest.approx(0)
    assert slopes(loss.exo, *x, beta=1.0, label_smoothing=0.1)[0] == pytest.approx(0)
    assert abs(slopes(loss.exo, -60.0, 0.0, 0.0, 0.0, beta=1.0)[0]) < 1e-20
    assert slopes(loss.dpo, -60.0, 0.0, 0.0, 0.0, beta=1.0)[0] == pytest.approx(-1)


def test_kto_without_a_baseline_is_apo_zero_of_both_sides_and_bco_adds_up_to_a_pair():
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 9
    good, bad = torch.ones(50), torch.zeros(50)
    both = loss.kto(x[0], x[2], good) + loss.kto(x[1], x[3], bad)
    torch.testing.assert_close(both, loss.apo_zero(*x), rtol=1e-12, atol=1e-14)
    pair = loss.bco(x[0], x[2], good) + loss.bco(x[1], x[3], bad)
    torch.testing.assert_close(loss.bco_pair(*x), pair)
    nca = loss.nca(*x)
    assert (pair > nca - 1e-12).any() and (pair < nca).any()


def test_ties_of_kto_count_as_undesirable_and_booleans_work():
    x = torch.tensor([-1.0, -2.0])
    as_bool = loss.kto(x, x - 1, torch.tensor([True, False]))
    torch.testing.assert_close(as_bool, loss.kto(x, x - 1, torch.tensor([0.7, 0.5])))


@pytest.mark.parametrize("gap", [1e3, -1e3])
@each("name", TABLE)
def test_no_loss_of_preferences_overflows(name, gap):
    """A fault of other systems: log(1 + exp(x)) is inf at a difference of 100 (float32)."""
    row = TABLE[name]
    x = torch.tensor([-2000.0 + gap], dtype=torch.float32).requires_grad_()
    far = torch.tensor([-2000.0], dtype=torch.float32)
    if row.single:
        found = [row.loss(x, far, torch.tensor([label])) for label in (True, False)]
    else:
        found = [row.loss(x, far, far, far) if row.reference else row.loss(x, far)]
    for value in found:
        assert value.isfinite().all() and torch.autograd.grad(value.sum(), x)[0].isfinite().all()


# ---------- in packs


def lossfn(row):
    """A row of the table as a LossFn: pairs, or single responses of which every other is desirable."""

    def of_pairs(out, b):
        each = segment.mean if row.mean else segment.sum
        sides = [each(x, b.mask, b.seq, b.num_seqs).view(-1, 2).T for x in (out.logp, b.ref_logp)]
        chosen, rejected = sides[0]
        x = row.loss(chosen, rejected, *sides[1]) if row.reference else row.loss(chosen, rejected)
        return x[b.seq // 2]

    def of_responses(out, b):
        logp, ref_logp = (segment.sum(x, b.mask, b.seq, b.num_seqs) for x in (out.logp, b.ref_logp))
        good = segment.max(b.extra["good"], b.mask, b.seq, b.num_seqs)
        return segment.spread(row.loss(logp, ref_logp, good, baseline=0.3), b.seq)

    return of_responses if row.single else of_pairs


def good(exp):
    """Every other row is desirable."""
    rows = torch.arange(len(exp.mask))[:, None] % 2
    return {"good": (rows * exp.mask).double()}


@pytest.mark.parametrize("name", TABLE)
def test_no_cut_padding_or_order_changes_a_loss_of_preferences(name):
    """With its mean over pairs, or over responses."""
    row = TABLE[name]
    unit, w, extra = (1, weight.seq_mean, good) if row.single else (2, weight.pair_mean, None)
    falls = name == "apo_down"  # as its paper wants
    testing.check_all(
        lossfn(row), weight=w, unit=unit, extra=extra, seed=3, on_policy=False, chosen_falls=falls
    )


def shortened(out, b, *, alpha=0.5):
    factor = loss.length_desensitized(b.mask, b.seq, b.num_seqs, alpha=alpha)
    sides = (*packing.sides(factor * out.logp, b), *packing.sides(factor * b.ref_logp, b))
    return loss.dpo(*sides)[b.seq // 2]


def test_length_desensitized_dpo_in_packs():
    testing.check_all(shortened, weight=weight.pair_mean, unit=2)
    c = testing.case(0, weight=weight.pair_mean)
    pack = packing.pack(c.exp, range(8), unit=2)
    whole = testing.total_and_grad(partial(shortened, alpha=1.0), c.apply, c.params, [pack])
    dpo = testing.total_and_grad(lossfn(TABLE["dpo"]), c.apply, c.params, [pack])
    torch.testing.assert_close(whole, dpo)


@given(seed=st.integers(0, 2**32), alpha=st.floats(0, 1))
def test_length_desensitized_is_its_definition(seed, alpha):
    """Whatever the holes, on a flat stream in any order."""
    generator = np.random.default_rng(seed)
    mask = generator.random((4, 7)) < generator.random()
    want = ref.length_desensitized(mask, alpha)
    seq = np.arange(4).repeat(7)
    order = np.argsort(generator.random(28) + 100 * generator.permutation(4).repeat(7), kind="stable")
    order = np.concatenate([np.flatnonzero(seq == k) for k in dict.fromkeys(seq[order])])
    m, s = torch.from_numpy(mask.flatten()[order]), torch.from_numpy(seq[order])
    got = loss.length_desensitized(m, s, 4, alpha=alpha).numpy()
    np.testing.assert_allclose(got[m.numpy()], want.flatten()[order][m.numpy()], atol=0)


X = torch.zeros(3)
BAD = [
    (
        lambda: loss.exo(X, X, X, X, label_smoothing=0.0),
        "label_smoothing: expected 0 < label_smoothing < 0.5",
    ),
    (lambda: loss.robust_dpo(X, X, X, X, label_smoothing=0.5), "label_smoothing: expected 0 <= "),
    (lambda: loss.nca(X, X, None, X), "ref_chosen: expected a tensor, got None"),
    (lambda: loss.simpo(X, X[:2]), r"rejected: expected \[N\] = \[3\], got \[2\]"),
    (lambda: loss.kto(X, X, X[:1]), r"desirable: expected \[N\] = \[3\], got \[1\]"),
    (lambda: loss.rpo(X, X, X, X, X[:1]), r"length: expected \[N\] = \[3\], got \[1\]"),
    (
        lambda: loss.length_desensitized(X > 0, X.long(), 3),
        "num_seqs: expected an even number of sequences, two per pair, got 3",
    ),
    (
        lambda: loss.length_desensitized(X > 0, X.long(), 2, alpha=2.0),
        "alpha: expected 0 <= alpha <= 1, got 2",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("empty", ["best", "worst", "between", "both", "none"])
def test_online_dpo_with_an_empty_response(empty):
    """Its log-ratio is 0, as that of any text without tokens; a group of two empty ones has no preference."""
    gone = {"best": [0], "worst": [2], "between": [1], "both": [0, 2], "none": []}[empty]
    adv_of = torch.tensor([1.0, 0.0, -1.0, 0.0, 1.0, -1.0])  # two groups of three
    sizes = [0 if k in gone else 2 for k in range(6)]
    seq = torch.arange(6).repeat_interleave(torch.tensor([max(n, 1) for n in sizes]))
    mask = torch.tensor([n > 0 for n in sizes])[seq]
    logp = torch.linspace(-3, -0.5, len(seq)).requires_grad_()
    ref = torch.linspace(-1, -2, len(seq))
    unit = torch.tensor([0, 0, 0, 1, 1, 1])
    adv = adv_of[seq] * mask
    token = loss.online_dpo(logp * mask, ref * mask, adv, mask, seq, 6, unit, beta=0.7)
    rows = sum(n > 0 for n in sizes)
    w = mask / torch.tensor([max(n, 1) for n in sizes])[seq] / rows
    (got,) = torch.autograd.grad((w * token).sum(), logp)

    whole = torch.zeros(6).index_add(0, seq, (logp - ref) * mask)
    first = -torch.nn.functional.logsigmoid(0.7 * (whole[0] - whole[2]))
    second = -torch.nn.functional.logsigmoid(0.7 * (whole[4] - whole[5]))
    total = 3 * (second if empty == "both" else first + second) / rows
    torch.testing.assert_close((w * token).sum(), total)
    torch.testing.assert_close(got, torch.autograd.grad(total, logp)[0])
