"""Losses that are wrong on purpose: `check_all` catches each, and names the cause."""

import pytest
import torch

from rft_fn import algorithm, loss, metric, segment, testing, tree
from rft_fn.testing.diagnosis import CAUSES

R = loss.ratio


def clip(out, b, low=0.2, high=0.2):
    return loss.ppo_clip(out.logp, b.old_logp, b.adv, low=low, high=high)


def r(out, b):
    return R(out.logp, b.old_logp)


def pg(out, b):
    return -b.adv * out.logp


def inside(x, b, k):
    """x of the token k places before, within a sequence; its own at the border."""
    at = torch.arange(len(x))
    within = (b.seq.roll(k) == b.seq) & (at >= k) & (at < len(x) + k)
    return torch.where(within, x.roll(k), x)


def every(b):
    return torch.ones_like(b.mask)


def spread_of_all(x, b):
    """The mean over a whole sequence, prompt and tools too."""
    return segment.mean(x, every(b), b.seq, b.num_seqs)[b.seq]


def of_mask(x, b):
    return segment.mean(x, b.mask, b.seq, b.num_seqs)[b.seq]


def largest(x, b):
    return segment.max(x, every(b), b.seq, b.num_seqs)[b.seq]


def count(b):
    return segment.sum(b.mask.double(), b.mask, b.seq, b.num_seqs)[b.seq].clamp(min=1)


def masked_mean(x, b):
    return (x * b.mask).sum() / b.mask.sum().clamp(min=1)


def sequence_ratio(out, b):
    """exp of the sum of log-ratios, where GSPO has their mean."""
    return torch.exp(segment.sum(out.logp - b.old_logp, b.mask, b.seq, b.num_seqs).clamp(-20, 20))[b.seq]


# a part of the name of the cause -> fault -> loss
FAULTS = {
    "max in place of min": {
        "max for min": lambda o, b: -torch.max(r(o, b) * b.adv, r(o, b).clamp(0.8, 1.2) * b.adv),
        "max where A > 0": lambda o, b: torch.where(
            b.adv > 0, -torch.max(r(o, b), r(o, b).clamp(0.8, 1.2)) * b.adv, clip(o, b)
        ),
    },
    "have to come back": {
        "max where A < 0": lambda o, b: torch.where(
            b.adv < 0, -torch.min(r(o, b), r(o, b).clamp(0.8, 1.2)) * b.adv, clip(o, b)
        ),
        "clamp only": lambda o, b: -r(o, b).clamp(0.8, 1.2) * b.adv,
        "clamp of log-ratios": lambda o, b: -(o.logp - b.old_logp).clamp(-0.2, 0.2) * b.adv,
        "upper limit for all": lambda o, b: -r(o, b).clamp(max=1.2) * b.adv,
        "lower limit for all": lambda o, b: torch.where(
            b.adv > 0, -r(o, b).clamp(0.8, 1.2) * b.adv, clip(o, b)
        ),
        "positive only": lambda o, b: clip(o, b) * (b.adv > 0),
        "dropped outside": lambda o, b: clip(o, b) * ((r(o, b).detach() - 1).abs() < 0.2),
    },
    "low and high exchanged": {
        "exchanged": lambda o, b: clip(o, b, 0.28, 0.2),
        "another low": lambda o, b: clip(o, b, 0.1, 0.28),
        "another high": lambda o, b: clip(o, b, 0.2, 0.2),
        "no low": lambda o, b: torch.where(b.adv > 0, clip(o, b, 0.2, 0.28), -r(o, b) * b.adv),
        "in nats": lambda o, b: (
            -torch.min((o.logp - b.old_logp) * b.adv, (o.logp - b.old_logp).clamp(-0.2, 0.28) * b.adv)
        ),
    },
    "the sign": {
        "plus": lambda o, b: r(o, b) * b.adv,
        "plus, clipped": lambda o, b: -clip(o, b),
        "plus log-probs": lambda o, b: b.adv * o.logp,
        "size of the advantage": lambda o, b: -r(o, b) * b.adv.abs(),
        "old over new": lambda o, b: -R(b.old_logp, o.logp) * b.adv,
    },
    "gradient is cut": {
        "ratio detached": lambda o, b: -r(o, b).detach() * b.adv,
        "log-probs detached": lambda o, b: clip(tree.replace(o, logp=o.logp.detach()), b),
        "built anew": lambda o, b: -torch.tensor(r(o, b).tolist()).double() * b.adv,
        "nothing but the detached": lambda o, b: -r(o, b).detach() * b.adv + 0 * o.logp,
    },
    "mean or a sum inside": {
        "scalar mean": lambda o, b: (clip(o, b) * b.mask).mean(),
        "scalar masked mean": lambda o, b: masked_mean(clip(o, b), b),
        "scalar sum": lambda o, b: (clip(o, b) * b.mask).sum(),
        "a sequence": lambda o, b: segment.mean(clip(o, b), b.mask, b.seq, b.num_seqs),
        "mean for all": lambda o, b: masked_mean(clip(o, b), b).expand_as(o.logp),
    },
    "a second 1/n": {
        "over tokens in mask": lambda o, b: pg(o, b) / b.mask.sum().clamp(min=1),
        "over all tokens": lambda o, b: clip(o, b) / b.mask.numel(),
        "over sequences": lambda o, b: clip(o, b) / b.num_seqs,
        "over the response": lambda o, b: clip(o, b) / count(b),
        "times the response": lambda o, b: clip(o, b) * count(b),
        "sum of log-ratios": lambda o, b: -sequence_ratio(o, b) * b.adv,
    },
    "a constant factor": {
        "half": lambda o, b: 0.5 * clip(o, b),
        "twice": lambda o, b: 2 * pg(o, b),
        "root of the ratio": lambda o, b: (
            -r(o, b).clamp(max=5).sqrt() * b.adv.clamp(min=0)
            + R(o.logp, b.old_logp).sqrt() * b.adv.clamp(max=0).abs()
        ),
    },
    "the reference in place": {
        "ratio to the reference": lambda o, b: -R(o.logp, b.ref_logp) * b.adv,
        "clip to the reference": lambda o, b: loss.ppo_clip(o.logp, b.ref_logp, b.adv),
        "cispo of the reference": lambda o, b: loss.cispo(o.logp, b.ref_logp, b.adv),
    },
    "without the old policy": {
        "probability": lambda o, b: -o.logp.exp() * b.adv,
        "old forgotten": lambda o, b: -R(o.logp, torch.zeros_like(o.logp)) * b.adv,
    },
    "a shift by one": {
        "advantage of the token before": lambda o, b: -r(o, b) * inside(b.adv, b, 1),
        "advantage of the token after": lambda o, b: -r(o, b) * inside(b.adv, b, -1),
        "old log-prob of the token before": lambda o, b: -R(o.logp, inside(b.old_logp, b, 1)) * b.adv,
        "old log-prob of the token after": lambda o, b: -R(o.logp, inside(b.old_logp, b, -1)) * b.adv,
    },
    "crosses the borders": {
        "roll of advantages": lambda o, b: -r(o, b) * b.adv.roll(1),
        "roll back of advantages": lambda o, b: -r(o, b) * b.adv.roll(-1),
        "roll of old log-probs": lambda o, b: -R(o.logp, b.old_logp.roll(1)) * b.adv,
        "difference of neighbours": lambda o, b: -r(o, b) * (b.adv - 0.5 * b.adv.roll(1)),
    },
    "a statistic of the pack": {
        "whitened": lambda o, b: (
            -r(o, b) * (b.adv - masked_mean(b.adv, b)) / (b.adv[b.mask].std(correction=0) + 1e-6)
            if b.mask.any()
            else pg(o, b)
        ),
        "centred": lambda o, b: -r(o, b) * (b.adv - masked_mean(b.adv, b)),
        "by the largest": lambda o, b: clip(o, b) / b.adv.abs().max().clamp(min=1e-6),
        "centred ratio": lambda o, b: (
            -(r(o, b) - masked_mean(r(o, b).detach(), b) + 1) * b.adv
            - masked_mean(r(o, b).detach(), b) * o.logp
        ),
        "self-normalised": lambda o, b: clip(o, b) / masked_mean(r(o, b).detach(), b).clamp(min=0.1),
        "most uncertain half": lambda o, b: clip(o, b) * (o.entropy >= o.entropy.detach().median()),
    },
    "outside the mask": {
        "mean of all log-ratios": lambda o, b: (
            -spread_of_all(o.logp - b.old_logp, b).clamp(-5, 5).exp() * b.adv
        ),
        "largest log-prob": lambda o, b: clip(o, b) * largest(o.logp - 1, b).detach().exp(),
        "mean advantage": lambda o, b: -r(o, b) * (b.adv - spread_of_all(b.adv, b)),
        "length with the prompt": lambda o, b: (
            clip(o, b) / segment.sum(every(b).double(), every(b), b.seq, b.num_seqs)[b.seq]
        ),
        "mean entropy": lambda o, b: clip(o, b) * spread_of_all(o.entropy.detach(), b),
    },
    "a term without the advantage": {
        "kl": lambda o, b: clip(o, b) + 0.1 * loss.kl(o.logp, b.ref_logp),
        "k3": lambda o, b: clip(o, b) + 0.1 * loss.kl_k3(o.logp, b.ref_logp),
        "k1, whose gradient is none": lambda o, b: clip(o, b) + 0.1 * (o.logp - b.ref_logp),
        "entropy bonus": lambda o, b: clip(o, b) - 0.01 * o.entropy,
        "squared log-ratio to the reference": lambda o, b: clip(o, b) + 0.1 * (o.logp - b.ref_logp).square(),
    },
    "the advantage is changed": {
        "only its sign": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv.sign()),
        "capped": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv.clamp(-0.5, 0.5)),
    },
    "without a limit": {
        "ratio": lambda o, b: -(o.logp - b.old_logp).exp() * b.adv,
        "steep": lambda o, b: -(10 * (o.logp - b.old_logp)).exp() * b.adv / 10,
        "square": lambda o, b: -r(o, b).square() * b.adv / 2,
        "inverse": lambda o, b: (b.old_logp - o.logp).exp() * b.adv,
        "ratio in a clip": lambda o, b: (
            -torch.min(
                (o.logp - b.old_logp).exp() * b.adv, (o.logp - b.old_logp).exp().clamp(0.8, 1.2) * b.adv
            )
        ),
    },
    "logarithm of 0": {
        "divides outside the mask": lambda o, b: clip(o, b) * torch.where(b.mask, o.logp / o.logp, 0.0),
        "log of a probability": lambda o, b: clip(o, b) + 0 * torch.log(1 - (o.logp - 50).exp() / 0.0),
        "root of nothing": lambda o, b: clip(o, b) + 1e-9 * (o.logp - b.old_logp).abs().sqrt(),
        "log of a distance": lambda o, b: clip(o, b) + 1e-9 * torch.log((o.logp - b.old_logp).abs()),
    },
    "the place of a row": {
        "first row twice": lambda o, b: clip(o, b) * (1 + (b.seq == 0)),
        "place in the pack": lambda o, b: clip(o, b) * (1 + torch.arange(len(b.mask)) / 10),
        "number of the row": lambda o, b: clip(o, b) * (1 + b.seq),
    },
    "a random draw": {
        "dropout": lambda o, b: clip(o, b) * (torch.rand(len(b.mask)) > 0.1),
        "one token left out": lambda o, b: clip(o, b) * (torch.randperm(len(b.mask)) > 0),
    },
    "a factor of tokens or rows": {
        "by place in the sequence": lambda o, b: clip(o, b) / (b.pos + 1),
        "by the entropy": lambda o, b: clip(o, b) * (0.5 + o.entropy.detach()),
    },
    "a dimension too many": {
        "a column": lambda o, b: clip(o, b)[:, None],
        "a column less a row": lambda o, b: -b.adv * (o.logp[:, None] - b.old_logp).exp(),
    },
    "rounding": {
        "float32": lambda o, b: loss.ppo_clip(o.logp.float(), b.old_logp.float(), b.adv.float()),
    },
    "a mean of means": {
        "ratio": lambda o, b: (clip(o, b, 0.2, 0.28), {"ratio": metric.sum(o.logp.exp().mean())}),
    },
}
CLAIMED = ("low and high exchanged",)


def test_every_fault_is_caught_and_most_causes_are_named():
    """At least 60 faults, and 50 causes."""
    missed, unnamed, number = [], [], 0
    for part, faults in FAULTS.items():
        assert sum(part in cause for cause in CAUSES) == 1, part
        claims = {"low": 0.2, "high": 0.28} if part in CLAIMED else {}
        for name, fault in faults.items():
            number += 1
            try:
                testing.check_all(fault, **claims)
            except AssertionError as error:
                head = str(error).partition("\n")[0]
                if part not in head:
                    unnamed.append((part, name, head.partition("cause: ")[2]))
            else:
                missed.append((part, name))
    assert not missed
    assert number >= 60 and number - len(unnamed) >= max(50, 0.85 * number), (number, unnamed)


def test_a_weight_that_counts_the_padding():
    with pytest.raises(AssertionError, match="the padding: its tokens or its width"):
        testing.check_all(clip, weight=lambda mask: mask / mask.shape[1])


@pytest.mark.parametrize("name", list(algorithm.TABLE))
def test_no_row_of_the_table_is_a_false_alarm(name):
    row = algorithm.TABLE[name]
    regression = name == "a_star_po"  # its gradient is not the policy gradient's
    unit = 4 if getattr(row, "together", False) else 1
    testing.check_all(row.loss, weight=row.weight, unit=unit, on_policy=not regression)
