"""Definitions of baselines, masks and draws in float64 numpy: loops over groups, tokens and subsets."""

import itertools
import math

import numpy as np


def rows(f):
    """Apply a definition of one group to each of [N, G]."""
    return lambda reward, **options: np.array([f(list(row), **options) for row in reward])


@rows
def maxrl(row, eps=1e-6):
    mean = sum(row) / len(row)
    return [0.0 if max(row) == min(row) else (r - mean) / (mean + eps) for r in row]


def gpg(reward):
    varied = sum(max(row) > min(row) for row in reward)
    alpha = len(reward) / max(varied, 1)
    return np.array([[alpha * (r - sum(row) / len(row)) for r in row] for row in reward])


def lite_ppo(reward, eps=1e-6):
    std = np.std(reward, ddof=1)
    return np.array([[(r - sum(row) / len(row)) / (std + eps) for r in row] for row in reward])


@rows
def best_minus_second(row, scale=False, eps=1e-6):
    first, second = sorted(row, reverse=True)[:2]
    gap = (first - second) / ((np.std(row, ddof=1) + eps) if scale else 1)
    return [gap if i == row.index(first) else 0.0 for i in range(len(row))]


@rows
def max_at_k(row, k=2):
    """Over every subset of k with this response: what the best loses without it; G times its share."""
    out = []
    for i in range(len(row)):
        own = [s for s in itertools.combinations(range(len(row)), k) if i in s]
        gain = sum(max(row[j] for j in s) - max(row[j] for j in s if j != i) for s in own)
        out.append(len(row) * gain / math.comb(len(row), k))
    return out


def a_star(reward, reference, beta=0.5):
    out = []
    for row, given in zip(reward, reference):
        value = beta * math.log(sum(math.exp(r / beta) for r in given) / len(given))
        out.append([r - value for r in row])
    return np.array(out)


def rae(reward, role, baseline, decay=0.95):
    adv = np.array([r - baseline[k] for r, k in zip(reward, role)])
    after = list(baseline)
    for k in set(role):
        own = [r for r, other in zip(reward, role) if other == k]
        after[k] = decay * baseline[k] + (1 - decay) * sum(own) / len(own)
    return adv, np.array(after)


def optimal_token_baseline(ret, logp, sum_p2, mask, group, ratio=None):
    """[B, S]: for the t-th token in mask of each response, the mean return of those of its group that have
    one, by the squared norms of the score up to there."""
    kept = [np.flatnonzero(m) for m in mask]
    energy = np.zeros(np.shape(mask))
    for b, own in enumerate(kept):
        total = 0.0
        for t in own:
            rho = 1.0 if ratio is None else ratio[b][t]
            total += rho**2 * (1 - 2 * math.exp(logp[b][t]) + sum_p2[b][t])
            energy[b, t] = total
    out = np.zeros(np.shape(mask))
    for b, own in enumerate(kept):
        for number, t in enumerate(own):
            at = [
                (c, kept[c][number])
                for c in range(len(mask))
                if group[c] == group[b] and number < len(kept[c])
            ]
            size = sum(energy[i] for i in at)
            mean = sum(energy[c, s] * ret[c][s] for c, s in at) / size if len(at) > 1 and size > 0 else 0.0
            out[b, t] = ret[b][t] - mean
    return out


def each_row(reduce, x, mask):
    return np.array(
        [[reduce([x[b][t] for t in np.flatnonzero(m)]) if any(m) else 0.0] for b, m in enumerate(mask)]
    )


def geometric_mask(w, old_logp, logp, mask, low=0.99, high=1.01):
    w = np.array(w)
    for b, m in enumerate(mask):
        ratios = [math.exp(old_logp[b][t] - logp[b][t]) for t in np.flatnonzero(m)]
        mean = np.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0
        w[b] *= low <= mean <= high
    return w


def trust_region_mask(w, old_logp, logp, mask, limit):
    w = np.array(w)
    for b, m in enumerate(mask):
        w[b] *= all((old_logp[b][t] - logp[b][t]) ** 2 / 2 <= limit for t in np.flatnonzero(m))
    return w


def second_moment_mask(w, old_logp, logp, mask, limit=0.04):
    """Drop the largest one after the other."""
    left = sorted(((old_logp[i] - logp[i]) ** 2, i) for i in map(tuple, np.argwhere(mask)))
    while left and sum(x for x, _ in left) / len(left) > limit:
        left.pop()
    kept = {i for _, i in left}
    return np.array([[x if (b, t) in kept else 0.0 for t, x in enumerate(row)] for b, row in enumerate(w)])


def self_normalized(w, before):
    return np.asarray(w) * np.sum(before) / np.sum(w) if np.sum(w) else np.asarray(w)
