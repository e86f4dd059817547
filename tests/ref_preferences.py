"""Definitions of the losses of preferences in float64 numpy: one pair, or one response, at a time."""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def each(f):
    """Apply a definition of numbers to columns."""
    return lambda *columns, **options: np.array([f(*row, **options) for row in zip(*columns)])


def h(c, r, rc, rr):
    return math.log(math.exp(c) / math.exp(rc)) - math.log(math.exp(r) / math.exp(rr))


@each
def robust_dpo(c, r, rc, rr, beta=0.1, label_smoothing=0.1):
    """The combination of both orders that is unbiased for flipped labels."""
    own, flipped = (-math.log(sigmoid(s * beta * h(c, r, rc, rr))) for s in (1, -1))
    e = label_smoothing
    return ((1 - e) * own - e * flipped) / (1 - 2 * e)


@each
def rpo(c, r, rc, rr, length, beta=0.1, alpha=1.0):
    return -math.log(sigmoid(beta * h(c, r, rc, rr))) - alpha * c / max(length, 1)


@each
def hinge(c, r, rc, rr, beta=0.1):
    return max(0.0, 1 - beta * ((c - r) - (rc - rr)))


@each
def exo(c, r, rc, rr, beta=0.1, label_smoothing=1e-3):
    """KL of the policy's preference between the two to the labels'."""
    x, e = beta * h(c, r, rc, rr), label_smoothing
    return sum(a * math.log(a / b) for a, b in ((sigmoid(x), 1 - e), (sigmoid(-x), e)))


@each
def sppo(c, r, rc, rr, beta=1e-3, preference=1.0):
    eta = 1 / beta
    return sum((x - eta * (p - 0.5)) ** 2 for x, p in ((c - rc, preference), (r - rr, 1 - preference)))


@each
def nca(c, r, rc, rr, beta=0.1):
    better, worse = beta * (c - rc), beta * (r - rr)
    return -math.log(sigmoid(better)) - sum(0.5 * math.log(sigmoid(-x)) for x in (better, worse))


@each
def bco_pair(c, r, rc, rr, beta=0.1):
    """The cross entropy of a classifier of single responses, whose logit is the reward."""
    return -math.log(sigmoid(beta * (c - rc))) - math.log(sigmoid(-beta * (r - rr)))


@each
def apo_zero(c, r, rc, rr, beta=0.1):
    return -sigmoid(beta * (c - rc)) + sigmoid(beta * (r - rr)) + 1


@each
def apo_down(c, r, rc, rr, beta=0.1):
    return sigmoid(beta * (c - rc)) - sigmoid(beta * h(c, r, rc, rr)) + 1


@each
def cpo(c, r, beta=0.1, label_smoothing=0.0):
    e = label_smoothing
    return -(1 - e) * math.log(sigmoid(beta * (c - r))) - e * math.log(sigmoid(beta * (r - c)))


@each
def simpo(c, r, beta=2.0, margin=1.0):
    return -math.log(sigmoid(beta * c - beta * r - margin))


@each
def orpo(c, r, beta=0.1):
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
    return -c - beta * math.log(sigmoid(math.log(odds[0] / odds[1])))


@each
def kto(p, ref, good, beta=0.1, baseline=0.0, desirable_weight=1.0, undesirable_weight=1.0):
    """lambda - v, v the value of prospect theory."""
    if good:
        return desirable_weight * (1 - sigmoid(beta * (p - ref - baseline)))
    return undesirable_weight * (1 - sigmoid(beta * (baseline - (p - ref))))


@each
def bco(p, ref, good, beta=0.1, baseline=0.0):
    """The cross-entropy of a classifier."""
    logit = beta * (p - ref) - baseline
    return -math.log(sigmoid(logit if good else -logit))


def length_desensitized(mask, alpha=0.5):
    """[B, S]: of rows 2i and 2i + 1, 1 on the first tokens of both, alpha on what one has more."""
    out = np.ones(np.shape(mask))
    for b, row in enumerate(mask):
        other = sum(mask[b ^ 1])
        for place, t in enumerate(np.flatnonzero(row)):
            out[b, t] = 1.0 if place < other else alpha
    return out
