"""Losses that are wrong on purpose, by the cause of it, and right ones that are unusual."""

import torch

from rft_fn import loss, metric, packing, segment, tree, weight

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


def sides(o, b):
    """Sums of log-probs of chosen and rejected, of the policy and of the reference."""
    return *packing.sides(o.logp, b), *packing.sides(b.ref_logp, b)


def sizes(b):
    """Tokens of chosen and rejected."""
    return tuple(x.clamp(min=1) for x in packing.sides(b.mask.double(), b))


def means(o, b):
    """Mean log-probs of chosen and rejected."""
    return tuple(x / n for x, n in zip(sides(o, b), sizes(b)))


def spread(x, b):
    """A number of each pair, on its tokens."""
    return x[b.seq // 2]


def h(o, b):
    c, r_, rc, rr = sides(o, b)
    return (c - rc) - (r_ - rr)


def half(x):
    return x.half().to(x.dtype)


def no_grad(o, b):
    with torch.no_grad():
        ratio = r(o, b)
    return -ratio * b.adv


def in_place(o, b):
    b.adv.mul_(0.5)
    return clip(o, b)


def in_place_later(o, b):
    x = clip(o, b)
    b.old_logp[:1] = 0
    return x


def own_scale(x, b):
    """Less the mean of its sequence, over the deviation."""
    far = x - of_mask(x, b)
    return far / (of_mask(far.square(), b).sqrt() + 1e-6)


def running(x):
    return x.cumsum(0).clamp(-5, 5).exp()


def softly(x):
    return torch.nn.functional.softplus(20 * x) / 20


def soft_corners(o, b):
    """Limits of 0.4, without a corner."""
    up = r(o, b) - softly(r(o, b) - 1.4)
    down = -r(o, b) - softly(-r(o, b) + 0.6)
    return -torch.where(b.adv > 0, up, -down) * b.adv


def of_label(o, b):
    """A regression on the value."""
    return (o.value - b.ret).square()


def clipped_value(o, b):
    return b.old_value + (o.value - b.old_value).clamp(-0.2, 0.2)


def kl(o, b):
    return loss.kl(o.logp, b.ref_logp)


def of_rows(x, b):
    return segment.mean(x, b.mask, b.seq, b.num_seqs)


def held(o, b, by):
    d = o.logp - b.old_logp
    return -b.adv * d + by * d.square()


PAIRS = {"unit": 2, "weight": weight.pair_mean}
LIMITS = {"low": 0.2, "high": 0.2}
MIXED = {"on_policy": False}
DECLARED = {"kl": 0.05, "entropy": 0.01}

# a part of the name of the cause -> what is wrong -> the loss, or (the loss, options of `certify`)
WRONG = {
    "max in place of min": {
        "limits on the wrong side": lambda o, b: (
            -torch.where(b.adv > 0, r(o, b).clamp(min=0.8), r(o, b).clamp(max=1.2)) * b.adv
        ),
        "max for min": lambda o, b: -torch.max(r(o, b) * b.adv, r(o, b).clamp(0.8, 1.2) * b.adv),
        "max where A > 0": lambda o, b: torch.where(
            b.adv > 0, -torch.max(r(o, b), r(o, b).clamp(0.8, 1.2)) * b.adv, clip(o, b)
        ),
    },
    "have to come back": {
        "negative only": lambda o, b: clip(o, b) * (b.adv < 0),
        "a trust region of tokens": lambda o, b: clip(o, b) * ((o.logp - b.old_logp).abs().detach() < 0.3),
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
        "the old policy of now": (lambda o, b: clip(o, tree.replace(b, old_logp=o.logp.detach())), LIMITS),
        "no limit": (lambda o, b: -r(o, b) * b.adv, LIMITS),
        "claimed of log-ratios": (
            lambda o, b: (
                -torch.min((o.logp - b.old_logp) * b.adv, (o.logp - b.old_logp).clamp(-0.2, 0.2) * b.adv)
            ),
            LIMITS,
        ),
        "exchanged": lambda o, b: clip(o, b, 0.28, 0.2),
        "another low": lambda o, b: clip(o, b, 0.1, 0.28),
        "another high": lambda o, b: clip(o, b, 0.2, 0.2),
        "no low": lambda o, b: torch.where(b.adv > 0, clip(o, b, 0.2, 0.28), -r(o, b) * b.adv),
        "in nats": lambda o, b: (
            -torch.min((o.logp - b.old_logp) * b.adv, (o.logp - b.old_logp).clamp(-0.2, 0.28) * b.adv)
        ),
    },
    "is minus what is to grow": {
        "max of what grows": lambda o, b: torch.max(r(o, b) * b.adv, r(o, b).clamp(0.8, 1.2) * b.adv),
        "plus": lambda o, b: r(o, b) * b.adv,
        "plus, clipped": lambda o, b: -clip(o, b),
        "plus log-probs": lambda o, b: b.adv * o.logp,
        "size of the advantage": lambda o, b: -r(o, b) * b.adv.abs(),
        "old over new": lambda o, b: -R(b.old_logp, o.logp) * b.adv,
    },
    "gradient is cut": {
        "no_grad": no_grad,
        "ratio of detached": lambda o, b: clip(tree.replace(o, logp=o.logp.clone().detach()), b),
        "a number": lambda o, b: torch.ones_like(o.logp) * 0.5,
        "ratio detached": lambda o, b: -r(o, b).detach() * b.adv,
        "log-probs detached": lambda o, b: clip(tree.replace(o, logp=o.logp.detach()), b),
        "built anew": lambda o, b: -torch.tensor(r(o, b).tolist()).double() * b.adv,
        "nothing but the detached": lambda o, b: -r(o, b).detach() * b.adv + 0 * o.logp,
    },
    "not detached": {
        "ratio": lambda o, b: -r(o, b) * b.adv * o.logp,
        "capped ratio": lambda o, b: -r(o, b).clamp(max=1.28) * b.adv * o.logp,
        "half of it": lambda o, b: 0.5 * pg(o, b) * (1 + r(o, b)),
    },
    "the value's error": {
        "minus": (lambda o, b: -of_label(o, b), MIXED),
        "min in a clip": (
            lambda o, b: torch.minimum(of_label(o, b), (clipped_value(o, b) - b.ret).square()),
            MIXED,
        ),
        "clip alone": (lambda o, b: (clipped_value(o, b) - b.ret).square(), MIXED),
        "in a policy's loss": (lambda o, b: clip(o, b) - 0.5 * of_label(o, b), MIXED),
    },
    "mean or a sum inside": {
        "a pair": (lambda o, b: -torch.nn.functional.logsigmoid(h(o, b)), PAIRS),
        "scalar mean": lambda o, b: (clip(o, b) * b.mask).mean(),
        "scalar masked mean": lambda o, b: masked_mean(clip(o, b), b),
        "scalar sum": lambda o, b: (clip(o, b) * b.mask).sum(),
        "a sequence": lambda o, b: segment.mean(clip(o, b), b.mask, b.seq, b.num_seqs),
        "mean for all": lambda o, b: masked_mean(clip(o, b), b).expand_as(o.logp),
    },
    "a second 1/n": {
        "over tokens, clipped": lambda o, b: clip(o, b) / b.mask.sum().clamp(min=1),
        "over tokens in mask": lambda o, b: pg(o, b) / b.mask.sum().clamp(min=1),
        "over all tokens": lambda o, b: clip(o, b) / b.mask.numel(),
        "over sequences": lambda o, b: clip(o, b) / b.num_seqs,
        "over the response": lambda o, b: clip(o, b) / count(b),
        "times the response": lambda o, b: clip(o, b) * count(b),
        "sum of log-ratios": lambda o, b: -sequence_ratio(o, b) * b.adv,
    },
    "a constant factor": {
        "ratio squared": lambda o, b: -r(o, b).square() * b.adv,
        "a tenth": lambda o, b: 0.1 * clip(o, b),
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
        "length of the pack": lambda o, b: (
            -o.logp.new_zeros(b.num_seqs).index_add(0, b.seq, o.logp - b.old_logp).clamp(-5, 5).exp()[b.seq]
            * b.adv
            / len(b.mask)
        ),
        "softmax of advantages": lambda o, b: clip(o, b) * b.adv.softmax(0),
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
        "entropy bonus": lambda o, b: clip(o, b) - 0.01 * o.entropy,
        "squared log-ratio to the reference": lambda o, b: clip(o, b) + 0.1 * (o.logp - b.ref_logp).square(),
    },
    "the advantage is changed": {
        "only its sign": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv.sign()),
        "capped": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv.clamp(-0.5, 0.5)),
    },
    "without a limit": {
        "KL": lambda o, b: clip(o, b) + 0.1 * ((b.old_logp - o.logp).exp() - 1 - (b.old_logp - o.logp)),
        "log-odds by hand": lambda o, b: clip(o, b) + 1e-9 * (b.old_logp - o.logp).sinh(),
        "ratio": lambda o, b: -(o.logp - b.old_logp).exp() * b.adv,
        "steep": lambda o, b: -(10 * (o.logp - b.old_logp)).exp() * b.adv / 10,
        "square": lambda o, b: -r(o, b).square() * b.adv / 2,
        "inverse": lambda o, b: (b.old_logp - o.logp).exp() * b.adv,
        "ratio beside a metric over nothing": lambda o, b: (
            -(o.logp - b.old_logp).exp() * b.adv,
            {"clipped": metric.mean(o.logp / (b.adv - b.adv), b.mask)},
        ),
        "ratio in a clip": lambda o, b: (
            -torch.min(
                (o.logp - b.old_logp).exp() * b.adv, (o.logp - b.old_logp).exp().clamp(0.8, 1.2) * b.adv
            )
        ),
    },
    "logarithm of 0": {
        "log of a sigmoid": (
            lambda o, b: spread(-torch.log(torch.sigmoid(sum(sides(o, b)[:2]) * 0 + h(o, b))), b),
            PAIRS,
        ),
        "the reference over itself": lambda o, b: clip(o, b) * (b.ref_logp / b.ref_logp),
        "divides outside the mask": lambda o, b: clip(o, b) * torch.where(b.mask, o.logp / o.logp, 0.0),
        "log of a probability": lambda o, b: clip(o, b) + 0 * torch.log(1 - (o.logp - 50).exp() / 0.0),
        "root of nothing": lambda o, b: clip(o, b) + 1e-9 * (o.logp - b.old_logp).abs().sqrt(),
        "odds in a sigmoid": (
            lambda o, b: spread(
                -torch.nn.functional.logsigmoid(
                    sum(x * y for x, y in zip((1, -1), (c - torch.log(1 - c.exp()) for c in means(o, b))))
                ),
                b,
            ),
            PAIRS,
        ),
        "log of a distance": lambda o, b: clip(o, b) + 1e-9 * torch.log((o.logp - b.old_logp).abs()),
    },
    "the place of a row": {
        "first row left out": lambda o, b: clip(o, b) * (b.seq != 0),
        "first row twice": lambda o, b: clip(o, b) * (1 + (b.seq == 0)),
        "place in the pack": lambda o, b: clip(o, b) * (1 + torch.arange(len(b.mask)) / 10),
        "number of the row": lambda o, b: clip(o, b) * (1 + b.seq),
    },
    "left out whatever": {
        "all but the last": lambda o, b: clip(o, b) * (b.seq != torch.cat([b.seq[1:], b.seq[:1] - 1])),
        "improbable ones": lambda o, b: clip(o, b) * (o.logp.detach() > -2),
    },
    "a random draw": {
        "noise": lambda o, b: clip(o, b) * (1 + 0.1 * torch.randn(len(b.mask))),
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
        "half, near": lambda o, b: loss.ppo_clip(half(o.logp), half(b.old_logp), b.adv),
        "float32": lambda o, b: loss.ppo_clip(o.logp.float(), b.old_logp.float(), b.adv.float()),
    },
    "a mean of means": {
        "ratio": lambda o, b: (clip(o, b, 0.2, 0.28), {"ratio": metric.sum(o.logp.exp().mean())})
    },
    "the arguments are changed in place": {
        "advantages halved": in_place,
        "old log-probs cleared": in_place_later,
    },
    "a statistic of the sequence in its advantages": {
        "whitened": lambda o, b: clip(o, tree.replace(b, adv=own_scale(b.adv, b))),
        "centred": lambda o, b: clip(o, tree.replace(b, adv=b.adv - of_mask(b.adv, b))),
        "over the largest": lambda o, b: (
            clip(o, b) / segment.max(b.adv.abs(), b.mask, b.seq, b.num_seqs)[b.seq].clamp(min=1e-3)
        ),
    },
    "a running sum": {
        "ratios over the pack": lambda o, b: clip(o, b) * running(o.logp - b.old_logp).detach(),
        "advantages alone": lambda o, b: -r(o, b) * b.adv.flip(0).cumsum(0).flip(0),
        "advantages to go": lambda o, b: -r(o, b) * (b.adv * r(o, b).detach()).flip(0).cumsum(0).flip(0),
        "ratio of the prefix": lambda o, b: -running(o.logp - b.old_logp) * b.adv,
    },
    "the sign of the entropy": {
        "added": lambda o, b: clip(o, b) + 0.01 * o.entropy,
        "added, and admitted": (lambda o, b: clip(o, b) + 0.01 * o.entropy, MIXED),
        "added, and declared": (lambda o, b: clip(o, b) + 0.01 * o.entropy, {"entropy": 0.01}),
        "added beside a KL": (lambda o, b: clip(o, b) + 0.05 * kl(o, b) + 0.01 * o.entropy, DECLARED),
    },
    "the sign of the KL": {
        "subtracted": lambda o, b: clip(o, b) - 0.05 * kl(o, b),
        "subtracted, and admitted": (lambda o, b: clip(o, b) - 0.05 * kl(o, b), MIXED),
        "subtracted, and declared": (lambda o, b: clip(o, b) - 0.05 * kl(o, b), {"kl": 0.05}),
        "k3 subtracted": (lambda o, b: pg(o, b) - 0.05 * loss.kl_k3(o.logp, b.ref_logp), MIXED),
        "k3 of the exchanged": (lambda o, b: clip(o, b) - 0.1 * loss.kl_k2(b.ref_logp, o.logp), MIXED),
    },
    "k1 as a loss": {
        "admitted": (lambda o, b: clip(o, b) + 0.1 * (o.logp - b.ref_logp), MIXED),
        "declared": (lambda o, b: clip(o, b) + 0.05 * loss.kl_k1(o.logp, b.ref_logp), {"kl": 0.05}),
        "k1, whose gradient is none": lambda o, b: clip(o, b) + 0.1 * (o.logp - b.ref_logp),
    },
    "another coefficient": {
        "ten times the KL": (lambda o, b: clip(o, b) + 0.5 * kl(o, b) - 0.01 * o.entropy, DECLARED),
        "no entropy": (lambda o, b: clip(o, b) + 0.05 * kl(o, b), DECLARED),
        "a KL that was not declared": (lambda o, b: clip(o, b) + 0.05 * kl(o, b), {"entropy": 0.0}),
    },
    "chosen and rejected are exchanged": {
        "DPO": (lambda o, b: spread(loss.dpo(*(sides(o, b)[i] for i in (1, 0, 3, 2))), b), PAIRS),
        "minus h": (lambda o, b: spread(-torch.nn.functional.logsigmoid(-0.1 * h(o, b)), b), PAIRS),
        "plus": (lambda o, b: spread(torch.nn.functional.logsigmoid(0.1 * h(o, b)), b), PAIRS),
        "scores": (lambda o, b: spread(loss.bradley_terry(*packing.sides(-o.score[:, 0] / 9, b)), b), PAIRS),
    },
    "the chosen response becomes less probable too": {
        "APO-down": (lambda o, b: spread(loss.apo_down(*sides(o, b)), b), PAIRS),
        "a sign of one side": (lambda o, b: spread(sides(o, b)[0] + sides(o, b)[1], b), PAIRS),
    },
    "the rejected response becomes more probable too": {
        "nll of both": (lambda o, b: spread(-sides(o, b)[0] - sides(o, b)[1], b), PAIRS)
    },
    "the reference with a wrong sign": {
        "added": (
            lambda o, b: spread(
                -torch.nn.functional.logsigmoid(
                    0.1 * (sides(o, b)[0] + sides(o, b)[2] - sides(o, b)[1] - sides(o, b)[3])
                ),
                b,
            ),
            PAIRS,
        ),
        "of the other side": (
            lambda o, b: spread(loss.dpo(*(sides(o, b)[i] for i in (0, 1, 3, 2))), b),
            PAIRS,
        ),
        "twice": (
            lambda o, b: spread(
                loss.dpo(sides(o, b)[0], sides(o, b)[1], 2 * sides(o, b)[2], 2 * sides(o, b)[3]), b
            ),
            PAIRS,
        ),
    },
    "a loss of pairs or lists": {"unit forgotten": lambda o, b: spread(loss.dpo(*sides(o, b)), b)},
    "does not run": {
        "a name that is none": lambda o, b: -o.logp * b.advantage,
        "a field that is absent": lambda o, b: o.logp * b.extra["share"],
        "a number in place of a tensor": lambda o, b: float((o.logp * b.adv).sum()),
        "nothing": lambda o, b: None,
        "a metric that is a tensor": lambda o, b: (clip(o, b), {"ratio": r(o, b).mean()}),
        "too few arguments": lambda o: o.logp,
        "shapes that do not fit": lambda o, b: o.logp @ o.score.T,
    },
    "does not run on every pack": {
        "the largest of nothing": lambda o, b: clip(o, b) + 0 * b.adv[b.mask].max()
    },
}

# what is unusual -> the loss, or (the loss, options of `certify`)
RIGHT = {
    "PPO": (clip, LIMITS),
    "REINFORCE": pg,
    "the ratio alone": lambda o, b: -r(o, b) * b.adv,
    "a sigmoid of the log-ratio": lambda o, b: (
        -4 * torch.sigmoid((o.logp - b.old_logp).clamp(-20, 20)) * b.adv
    ),
    "limits that grow": lambda o, b: (
        -torch.min(
            r(o, b) * b.adv, torch.max(torch.min(r(o, b), 1.2 + 0.02 * b.pos), 0.8 - 0.02 * b.pos) * b.adv
        )
    ),
    "half of each": lambda o, b: 0.5 * clip(o, b) + 0.5 * pg(o, b),
    "weights that fall off": lambda o, b: (
        -torch.where(b.adv > 0, (1 / r(o, b).detach().square()).clamp(max=4), 1.0) * r(o, b) * b.adv
    ),
    "a tanh": lambda o, b: -torch.tanh((o.logp - b.old_logp).clamp(-15, 15)) * b.adv,
    "REINFORCE where A > 0": lambda o, b: torch.where(b.adv > 0, pg(o, b), clip(o, b, 0.1, 0.1)),
    "trust by the worst token": lambda o, b: (
        pg(o, b) / (1 + segment.max((o.logp - b.old_logp).abs(), b.mask, b.seq, b.num_seqs)[b.seq].detach())
    ),
    "soft corners": soft_corners,
    "a square that holds": lambda o, b: held(o, b, 0.5),
    "a square that holds hard": lambda o, b: held(o, b, 5.0),
    "a cube that holds": lambda o, b: pg(o, b) + 0.1 * (o.logp - b.old_logp).abs() ** 3,
    "a dual clip": lambda o, b: loss.ppo_clip(o.logp, b.old_logp, b.adv, dual=3.0),
    "a ratio of the sequence": lambda o, b: loss.gspo(
        o.logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, low=0.2, high=0.2
    ),
    "metrics": lambda o, b: (clip(o, b), {"ratio": metric.mean(r(o, b), b.mask)}),
    "KL and entropy": (lambda o, b: clip(o, b) + 0.05 * kl(o, b) - 0.01 * o.entropy, DECLARED | LIMITS),
    "KL and entropy, admitted": (lambda o, b: clip(o, b) + 0.05 * kl(o, b) - 0.01 * o.entropy, MIXED),
    "k3": (lambda o, b: clip(o, b) + 0.1 * loss.kl_k3(o.logp, b.ref_logp), {"kl": 0.1}),
    "k1 times the ratio": (lambda o, b: pg(o, b) + 0.1 * r(o, b) * (o.logp - b.ref_logp), {"kl": 0.1}),
    "no KL, as declared": (clip, {"kl": 0.0, "entropy": 0.0}),
    "less entropy, as declared": (lambda o, b: clip(o, b) + 0.01 * o.entropy, {"entropy": -0.01}),
    "a value": (of_label, MIXED),
    "a likelihood beside it": (lambda o, b: clip(o, b) - 0.1 * o.logp, MIXED),
    "a supervised loss": (lambda o, b: loss.nll(o.logp), MIXED),
    "DPO by length": (
        lambda o, b: spread(
            -torch.nn.functional.logsigmoid(
                2 * (of_rows(o.logp - b.ref_logp, b)[::2] - of_rows(o.logp - b.ref_logp, b)[1::2]) - 0.3
            ),
            b,
        ),
        PAIRS,
    ),
    "DPO and a likelihood": (lambda o, b: spread(loss.dpo(*sides(o, b)) - 0.1 * sides(o, b)[0], b), PAIRS),
    "APO-down, declared": (
        lambda o, b: spread(loss.apo_down(*sides(o, b)), b),
        PAIRS | {"chosen_falls": True},
    ),
    "a reward model": (
        lambda o, b: spread(loss.bradley_terry(*packing.sides(o.score[:, 0] / 9, b)), b),
        PAIRS,
    ),
}
