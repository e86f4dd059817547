"""Definitions of what reward models are trained and judged by, in float64 numpy: loops, sums and products."""

import itertools
import math

import numpy as np

# ---------- losses


def _sigmoid(x):
    return math.exp(x) / (1 + math.exp(x))


def bradley_terry(chosen, rejected, margin=0.0, label_smoothing=0.0):
    """Minus the expected log-probability of the label, which is wrong with probability e."""
    margins = np.broadcast_to(margin, np.shape(chosen))
    out = []
    for c, r, m in zip(chosen, rejected, margins):
        right, wrong = _sigmoid(c - r - m), _sigmoid(m + r - c)
        out.append(-(1 - label_smoothing) * math.log(right) - label_smoothing * math.log(wrong))
    return np.array(out)


def centering(chosen, rejected):
    return np.array([(c + r) ** 2 for c, r in zip(chosen, rejected)])


def hps(first, second, preference, scale=1.0):
    """KL(label, prediction) over the two responses; 0 log 0 is 0."""
    out = []
    for a, b, y in zip(first, second, np.broadcast_to(preference, np.shape(first))):
        weights = [math.exp(scale * a), math.exp(scale * b)]
        p = [x / sum(weights) for x in weights]
        out.append(sum(q * math.log(q / x) for q, x in zip((y, 1 - y), p) if q > 0))
    return np.array(out)


def log_exp(chosen, rejected):
    return np.array([math.log(1 + math.exp(r - c)) for c, r in zip(chosen, rejected)])


def order_probability(score, order):
    """The probability to draw the responses of one list in this order, in proportion to exp(score)."""
    left, p = list(order), 1.0
    for i in order:
        p *= math.exp(score[i]) / sum(math.exp(score[j]) for j in left)
        left.remove(i)
    return p


def plackett_luce(score, rank, unit):
    """Each response against those of its list that are no better."""
    out = []
    for i in range(len(score)):
        left = [j for j in range(len(score)) if unit[j] == unit[i] and rank[j] >= rank[i]]
        out.append(-math.log(math.exp(score[i]) / sum(math.exp(score[j]) for j in left)))
    return np.array(out)


def score_mse(score, label):
    return np.array([(s - y) ** 2 for s, y in zip(score, label)])


def score_bce(score, label):
    return np.array(
        [-y * math.log(_sigmoid(s)) - (1 - y) * math.log(_sigmoid(-s)) for s, y in zip(score, label)]
    )


# ---------- weights of units of rows


def unit_rows(unit):
    """The rows of each unit, from their numbers."""
    ends = list(itertools.accumulate(unit, initial=0))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def unit_mean(mask, unit, share=True):
    """The share of each token in the mean over units of the mean (or the sum) over tokens."""
    mask = np.asarray(mask, bool)
    tokens = [int(mask[list(rows)].sum()) for rows in unit_rows(unit)]
    count = sum(n > 0 for n in tokens)
    w = np.zeros(mask.shape)
    for n, rows in zip(tokens, unit_rows(unit)):
        for b, s in itertools.product(rows, range(mask.shape[1])):
            if mask[b, s]:
                w[b, s] = 1 / count / (n if share else 1)
    return w


def unit_sum(mask, unit):
    return unit_mean(mask, unit, share=False)


# ---------- metrics


def bins_of(p, label, bins):
    """(count, mean p, mean label) of each bin that has some; the last one has p = 1 too."""
    out = []
    for k in range(bins):
        here = [i for i, x in enumerate(p) if k <= x * bins < k + 1 or (k == bins - 1 and x == 1)]
        if here:
            out.append((len(here), np.mean([p[i] for i in here]), np.mean([label[i] for i in here])))
    return out


def calibration_error(p, label, bins=10):
    return sum(n * abs(share - mean) for n, mean, share in bins_of(p, label, bins)) / max(len(p), 1)


def ranked_pairs(score, rank, unit):
    """(better, worse) scores of all pairs of one list whose ranks differ."""
    every = itertools.permutations(range(len(score)), 2)
    return [(score[i], score[j]) for i, j in every if unit[i] == unit[j] and rank[i] < rank[j]]


# ---------- steps


def steps(score, mask):
    """The scores of the steps of each row."""
    return [[s for s, m in zip(row, kept) if m] for row, kept in zip(score, mask)]


def steps_last(score, mask):
    return np.array([own[-1] if own else 0.0 for own in steps(score, mask)])


def steps_min(score, mask):
    return np.array([min(own) if own else 0.0 for own in steps(score, mask)])


def steps_product(logit, mask):
    return np.array([math.prod(map(_sigmoid, own)) if own else 0.0 for own in steps(logit, mask)])
