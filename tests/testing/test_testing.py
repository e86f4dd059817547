"""The checks that users run: they pass for what is right, and say what is wrong with each planted bug."""

import pytest
import torch

from rft_fn import advantage, loss, metric, packing, segment, testing, tree, weight
from rft_fn.loss import ppo_clip

PARTITION, PADDING = testing.check_partition_invariance, testing.check_padding_invariance
PACKING, PERMUTATION = testing.check_packing_invariance, testing.check_permutation_invariance
ON_POLICY, FINITE = testing.check_on_policy_identity, testing.check_finite


def good(out, b):
    return ppo_clip(out.logp, b.old_logp, b.adv), {
        "clip": metric.mean((out.logp > b.old_logp).double(), b.mask)
    }


def scalar_mean(out, b):
    """The habit of every other library: the loss as one number."""
    return ppo_clip(out.logp, b.old_logp, b.adv).mean()


def mean_over_the_pack(out, b):
    """The same, in a shape that passes."""
    return ppo_clip(out.logp, b.old_logp, b.adv).mean().expand_as(b.adv)


def own_normaliser(out, b):
    """Divided by the tokens of the micro-batch: a mean of means."""
    return -b.adv * out.logp / b.mask.sum().clamp(min=1)


def own_sequence_normaliser(out, b):
    """Divided by the sequences of the micro-batch."""
    return -b.adv * out.logp / b.num_seqs


def shifted(out, b):
    """Off by one: the advantage of the token before, across the boundaries of sequences."""
    return -b.adv.roll(1) * out.logp


def whitened(out, b):
    """Advantages normalised inside the loss, by what happens to share the pack."""
    return -advantage.whiten(b.adv, b.mask) * out.logp


def absolute_position(out, b):
    """The number of a token in its pack in place of its position."""
    return -b.adv * out.logp * torch.arange(b.adv.numel())


def first_row_counts_double(out, b):
    return -b.adv * out.logp * (1 + (b.seq == 0))


def mean_of_all_positions(out, b):
    """A baseline from all positions of a pack, those outside mask included."""
    return -(b.adv - b.adv.mean()) * out.logp


def divides_outside_the_mask(out, b):
    """0 / 0 where every field is 0: NaN in the value."""
    return -b.adv / b.ret * out.logp


def nan_in_the_gradient_only(out, b):
    """A `where` on the loss hides the NaN of sqrt'(0) in the value, and keeps it in the gradient."""
    return torch.where(b.mask, (out.logp - b.old_logp).abs().sqrt(), 0)


def unbounded_ratio(out, b):
    return ((out.logp - b.ref_logp).exp() - 1).square()


def focused(out, b, sign=1):
    """A softmax over the tokens of a sequence, of what each is off by, without taking the largest out."""
    d = out.logp - b.old_logp
    x = (sign * 3 * (d - segment.mean(d, b.mask, b.seq, b.num_seqs)[b.seq]) * b.mask).exp()
    return -b.adv * x / segment.sum(x, b.mask, b.seq, b.num_seqs).clamp(min=1e-6)[b.seq]


def focused_on_what_was_lost(out, b):
    return focused(out, b, sign=-1)


def per_row(out, b):
    """Divided by the rows of the pack: 0 / 0 in a pack without any."""
    return -b.adv * out.logp / torch.tensor(len(b.rows))


def focused_without_mask(out, b):
    """The same, with 50 nats off on tokens that are outside the mask: inf times an advantage of 0."""
    d = out.logp - b.old_logp
    return -b.adv * (4 * (d - segment.mean(d, b.mask, b.seq, b.num_seqs)[b.seq])).exp()


def suffix_ratio(out, b):
    """The importance ratio of what comes after each token, over the end of its sequence and on."""
    d = out.logp - b.old_logp
    return -b.adv * d.flip(0).cumsum(0).flip(0).clamp(-5, 5).exp()


def mask_forgotten_in_a_mean(out, b):
    """A sequence's ratio as the mean over all its tokens, those of tools and prompts included."""
    count = segment.sum(torch.ones_like(out.logp), torch.ones_like(b.mask), b.seq, b.num_seqs)
    d = segment.sum(out.logp - b.old_logp, b.mask, b.seq, b.num_seqs) / count.clamp(min=1)
    return -b.adv * d[b.seq].exp()


def entropy_bonus_inside(out, b):
    return -b.adv * out.logp - 0.01 * out.entropy


def no_gradient(out, b):
    """The KL term rebuilt from its numbers."""
    return loss.kl(out.logp, b.ref_logp).detach()


def no_old_policy(out, b):
    """Half of the ratio is missing: right only if pi_old were 1."""
    return -b.adv * out.logp.exp()


def wrong_sign(out, b):
    return b.adv * out.logp


def average_of_averages_as_metric(out, b):
    return good(out, b)[0], {"ratio": metric.sum(out.logp.exp().mean())}


@pytest.mark.parametrize("check", [PARTITION, PADDING, PACKING, PERMUTATION, ON_POLICY, FINITE])
@pytest.mark.parametrize("seed", range(3))
def test_the_checks_pass_for_a_right_loss(check, seed):
    check(good, seed=seed)


@pytest.mark.parametrize("w", [weight.token_mean, weight.seq_mean, weight.seq_sum])
def test_check_all_passes_for_a_right_loss_and_weight(w):
    testing.check_all(good, weight=w)


BUGS = [
    (
        PARTITION,
        scalar_mean,
        r"loss: expected one number per token, \[T\] = \[\d+\], got \[\]; averages belong in w",
    ),
    (
        PARTITION,
        mean_over_the_pack,
        r"one row per micro-batch instead of one pack: the total loss .* became .*bigram by",
    ),
    (PARTITION, own_normaliser, r"one row per micro-batch instead of one pack: .*gradient of bigram by \d"),
    (
        PARTITION,
        own_sequence_normaliser,
        r"one row per micro-batch instead of one pack: .*gradient of \w+ by 7, ",
    ),
    (PARTITION, shifted, r"instead of one pack: .*\(allowed 1e-12\)"),
    (PARTITION, whitened, r"instead of one pack: .*gradient of bigram by"),
    (PARTITION, average_of_averages_as_metric, r"relative change of metric ratio by [\d.]+ \(allowed"),
    (PARTITION, divides_outside_the_mask, r"the total loss nan became nan"),
    (PARTITION, nan_in_the_gradient_only, r"relative change of gradient of bigram by nan"),
    (PADDING, mean_over_the_pack, r"1 masked tokens after a pack: the total loss .* became"),
    (PADDING, mean_of_all_positions, r"1 masked tokens after a pack: .*gradient of bigram by"),
    (
        PACKING,
        mean_over_the_pack,
        r"all rows in one pack instead of each row alone: the loss of row \d, token \d+ changed",
    ),
    (PACKING, shifted, r"the loss of row \d, token \d+ changed by [\d.e+]+ from .*; a neighbour leaks in"),
    (PACKING, whitened, r"a neighbour leaks in"),
    (PACKING, absolute_position, r"a neighbour leaks in"),
    (PERMUTATION, absolute_position, r"rows in the order \[[\d, ]+\]: the total loss .* became"),
    (PERMUTATION, first_row_counts_double, r"rows in the order \[[\d, ]+\]"),
    (
        ON_POLICY,
        no_old_policy,
        r"not that of -adv \* logp: off by at most [\d.]+ \(cosine 0\.\d+, norm ratio",
    ),
    (ON_POLICY, wrong_sign, r"cosine -1\.0000, norm ratio 1\.0000"),
    (ON_POLICY, own_sequence_normaliser, r"cosine 1\.0000, norm ratio 0\.1250"),
    (FINITE, divides_outside_the_mask, r"log-ratio \+0 in torch.float64: the total is nan"),
    (
        FINITE,
        nan_in_the_gradient_only,
        r"log-ratio \+0 .*: \d+ of 49 entries of the gradient of bigram are not finite",
    ),
    (FINITE, unbounded_ratio, r"log-ratio \+50 in torch.float32: the total is inf"),
    (FINITE, no_gradient, r"loss: it has no gradient; is it detached"),
    (
        PACKING,
        suffix_ratio,
        r"the loss of row \d, token \d+ changed by [\d.e+]+ from .*; a neighbour leaks in",
    ),
    (PARTITION, suffix_ratio, r"one row per micro-batch instead of one pack: .*gradient of bigram by"),
    (
        FINITE,
        focused,
        r"^log-ratio \+50 of one token per row in torch.float32: the total is nan; 49 of 49 entries",
    ),
    (ON_POLICY, mask_forgotten_in_a_mean, r"not that of -adv \* logp: off by at most [\d.]+ \(cosine"),
    (ON_POLICY, entropy_bonus_inside, r"not that of -adv \* logp: off by at most 0\.000\d+ \(cosine"),
    (
        FINITE,
        focused_on_what_was_lost,
        r"^log-ratio -50 of one token per row in torch.float32: the total is nan",
    ),
    (FINITE, per_row, r"^an empty pack: the total is nan"),
    (FINITE, focused_without_mask, r"^log-ratio -50 in torch.float32: the total is nan"),
]


@pytest.mark.parametrize(("check", "bug", "message"), BUGS, ids=lambda x: getattr(x, "__name__", ""))
def test_the_checks_fail_for_planted_bugs(check, bug, message):
    with pytest.raises(AssertionError, match=message):
        check(bug)
    with pytest.raises(AssertionError):
        testing.check_all(bug)


def test_masked_rows_that_weigh_something_are_found(monkeypatch):
    """`pack` gives masked tokens the weight 0; here it is made to forget that, and
    the loss is not 0 there."""
    pack = packing.pack

    def leaky(exp, rows, **options):
        b = pack(exp, rows, **options)
        return tree.replace(b, w=torch.full_like(b.w, 0.1))

    monkeypatch.setattr(packing, "pack", leaky)
    with pytest.raises(AssertionError, match=r"masked rows: expected loss and gradient 0, got .* and "):
        FINITE(lambda out, b: 1 - out.value)


def test_a_loss_by_sequence_is_reinforce_where_the_advantage_is_the_sequences():
    def by_sequence(out, b):
        return loss.gspo(out.logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs)

    ON_POLICY(by_sequence, weight=weight.seq_mean, per_sequence=True)
    with pytest.raises(AssertionError, match=r"not that of -adv \* logp: off by"):
        ON_POLICY(by_sequence, weight=weight.seq_mean)


def by_padded_size(mask):
    """A weight that counts the padding."""
    return mask.double() / mask.numel()


def by_row_number(mask):
    return mask.double() * (1 + torch.arange(mask.shape[0])[:, None])


def nan_without_tokens(mask):
    """The masked mean of nothing."""
    return mask.double() / mask.sum(-1, keepdim=True)


def mask_forgotten(mask):
    return torch.ones(mask.shape) / mask.sum().clamp(min=1)


@pytest.mark.parametrize(
    ("check", "w", "message"),
    [
        (PADDING, by_padded_size, r"1 more columns of padding: the total loss .* became"),
        (PERMUTATION, by_row_number, r"rows in the order"),
        (
            PARTITION,
            nan_without_tokens,
            r"weight: expected \[B, S\] = \[8, 12\] and 0 outside mask, got tensor.*nan",
        ),
        (PARTITION, mask_forgotten, r"weight: expected \[B, S\] = \[8, 12\] and 0 outside mask"),
    ],
)
def test_the_checks_fail_for_wrong_weights(check, w, message):
    with pytest.raises(AssertionError, match=message):
        check(good, weight=w)


def test_a_tolerance_is_a_tolerance():
    """An entropy bonus of 0.01 bends the gradient by less than 2 %, and by more than rounding."""
    ON_POLICY(entropy_bonus_inside, rtol=0.02)
    with pytest.raises(AssertionError, match="not that of -adv"):
        ON_POLICY(entropy_bonus_inside, rtol=1e-5)
    for check in (PARTITION, PERMUTATION):
        check(first_row_counts_double, rtol=10.0)
        with pytest.raises(AssertionError, match=r"\(allowed 0.001\)"):
            check(first_row_counts_double, rtol=1e-3)


def largest(x, mask):
    """A tenth of the tokens: those with the largest x."""
    return {"chosen": weight.top_share(x, mask, share=0.1)}


def held_back(out, b):
    return loss.kl_cov(out.logp, b.old_logp, b.adv, b.extra["chosen"])


def held_back_in_the_pack(out, b):
    """The largest of the micro-batch, not of the batch."""
    chosen = weight.top_share(b.adv[None], b.mask[None], share=0.1)[0]
    return loss.kl_cov(out.logp, b.old_logp, b.adv, chosen)


def test_a_loss_with_data_of_its_own_passes():
    extra = lambda exp: largest(exp.adv, exp.mask)  # noqa: E731
    testing.check_all(held_back, extra=extra)
    b = packing.pack(testing.case(0, extra=extra).exp, range(8))
    assert 0 < b.extra["chosen"].sum() < b.mask.sum()
    testing.check_all(lambda o, b: b.extra["noise"].sum(-1) * o.logp, on_policy=False)


@pytest.mark.parametrize("check", [PARTITION, PACKING])
def test_what_should_be_data_of_the_batch_and_is_of_the_pack_is_found(check):
    with pytest.raises(AssertionError, match="instead of"):
        check(held_back_in_the_pack)


def noisy(out, b):
    return (b.extra["noise"].sum(-1) - b.adv) * out.logp


def counted(out, b):
    return out.logp / (1 + b.extra["chosen"].sum())


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (noisy, r"1 more columns of padding: .* became nan"),
        (counted, r"1 more columns of padding: the total loss .* became -?\d"),
        (no_old_policy, r"1 more columns of padding: .* became nan"),
    ],
)
def test_data_that_is_not_0_outside_the_mask_is_found(f, message, monkeypatch):
    """A `pack` that shifts and forgets the mask: in the data of a loss, true or false or a number, and in
    the fields that all have."""
    pack = packing.pack

    def leaky(exp, rows, **options):
        b = pack(exp, rows, **options)
        at = torch.tensor(list(rows))[b.seq], b.pos + 1
        extra = {name: x[at] for name, x in (exp.extra or {}).items()}
        return tree.replace(b, adv=exp.adv[at], extra=extra)

    monkeypatch.setattr(packing, "pack", leaky)
    extra = lambda exp: largest(exp.adv, exp.mask) | {"noise": exp.adv[..., None]}  # noqa: E731
    with pytest.raises(AssertionError, match=message):
        PADDING(f, extra=extra)


def test_data_that_does_not_move_with_its_rows_is_found(monkeypatch):
    take = packing.take

    def unmoved(exp, index):
        return tree.replace(take(exp, index), extra=exp.extra)

    for module in (packing, packing.shards):
        monkeypatch.setattr(module, "take", unmoved)
    with pytest.raises(AssertionError, match=r"rows in the order \[[\d, ]+\]: the total loss .* became"):
        PERMUTATION(noisy)
    with pytest.raises(AssertionError, match=r"2 minibatches that keep their w instead of one pack"):
        PARTITION(noisy)


@pytest.mark.parametrize("check", [PARTITION, PADDING, PACKING, PERMUTATION, ON_POLICY, FINITE])
def test_data_of_another_shape_is_refused(check):
    message = r"extra\['row'\]: expected \[B, S, ...\] = \[8, 12, ...\], got \[7\]"
    with pytest.raises(ValueError, match=message):
        check(good, extra=lambda exp: {"row": exp.length[:7]})


# ---------- the case itself


@pytest.mark.parametrize("seed", range(5))
def test_the_case_holds_what_breaks_losses(seed):
    """A check is as good as its data: holes, masked rows, empty responses, every field
    set, and all of it float64."""
    c = testing.case(seed)
    exp, tokens = c.exp, c.exp.mask.sum(-1)
    assert tokens[0] == 0 and exp.length[0] > 2  # a masked row
    assert tokens[1] == 0 and tokens[2] == 1 and (tokens[3:] > 0).all()
    last = torch.where(exp.mask, torch.arange(12), -1).max(-1).values
    first = torch.where(exp.mask, torch.arange(12), 99).min(-1).values
    assert ((last - first + 1 > tokens) & (tokens > 0)).any()  # a hole
    assert len(set(exp.length.tolist())) > 3
    for x in tree.leaves(exp) + tree.leaves(c.params):
        assert x.dtype in (torch.float64, torch.int64, torch.bool)
    for x in [getattr(exp, n) for n in ("old_logp", "ref_logp", "adv", "old_value", "ret", "w")] + [
        exp.extra["noise"]
    ]:
        assert (x[~exp.mask] == 0).all() and (x[exp.mask] != 0).all()
    again = testing.case(seed)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(c.exp), tree.leaves(again.exp)))
    assert not torch.equal(testing.case(seed + 1).exp.adv, exp.adv)


def test_total_and_grad_by_hand():
    """(w loss).sum() over packs, and its gradient by finite differences."""
    c = testing.case(0)
    packs = [packing.pack(c.exp, [2, 3]), packing.pack(c.exp, [4])]
    total, grads = testing.total_and_grad(good, c.apply, c.params, packs)

    def value(params):
        return sum(float((b.w * good(c.apply(params, b), b)[0]).sum()) for b in packs)

    assert float(total) == pytest.approx(value(c.params), abs=1e-14)
    for name in ("bigram", "position"):
        at = int(grads[name].abs().argmax())
        up, down = (tree.map(torch.clone, c.params) for _ in range(2))
        up[name].view(-1)[at] += 1e-6
        down[name].view(-1)[at] -= 1e-6
        slope = (value(up) - value(down)) / 2e-6
        assert slope == pytest.approx(float(grads[name].view(-1)[at]), rel=1e-6)
    assert (grads["value"] == 0).all() and not any(p.requires_grad for p in tree.leaves(c.params))
