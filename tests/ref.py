"""Definitions in float64 numpy, as the papers write them: loops and double sums, no recursions and no tricks.

The tests hold the library against these. The library never imports this file, nor this file the library.
"""

import itertools
import math
from fractions import Fraction

import numpy as np

# ---------- sums in float32

UNIT = 2.0**-24  # what one rounding to float32 changes at most, of a number in [1, 2)


def rounding(terms, size):
    """How far a sum in float32 may be from the exact one, in whatever order a library adds up its terms.

    `size` is the sum of the absolute values, and no partial sum is larger. So each of the `terms` roundings
    is at most UNIT * size, and independent ones add up as the root of their number does. Squared, one is on
    average a third of its largest, and partial sums that grow evenly a third of the last one: twice the root
    is six standard deviations. (Higham and Mary, SIAM J. Sci. Comput. 41, 2019.)
    """
    return 2 * math.sqrt(terms) * UNIT * float(size)


# ---------- segments and scans


def segments(x, mask, seq, num_seqs):
    """The values in mask of each sequence, as a list of arrays."""
    return [np.asarray(x, np.float64)[(np.asarray(seq) == k) & np.asarray(mask)] for k in range(num_seqs)]


def segment_sum(x, mask, seq, num_seqs):
    return np.array([part.sum() for part in segments(x, mask, seq, num_seqs)])


def segment_mean(x, mask, seq, num_seqs):
    return np.array([part.mean() if part.size else 0.0 for part in segments(x, mask, seq, num_seqs)])


def segment_max(x, mask, seq, num_seqs):
    return np.array([part.max() if part.size else 0.0 for part in segments(x, mask, seq, num_seqs)])


def segment_spread(x, seq):
    return np.array([x[k] for k in seq], np.float64)


def linear_scan(a, b):
    """[S]: y[t] = sum over u >= t of (a[t] a[t+1] ... a[u-1]) b[u]."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    size = len(b)
    return np.array([sum(np.prod(a[t:u]) * b[u] for u in range(t, size)) for t in range(size)])


# ---------- plans of packs


def largest_first(sizes):
    return sorted((i for i, n in enumerate(sizes) if n), key=lambda i: (-sizes[i], i))


def best_fit(sizes, budget, most, rows):
    """Each item, the largest first, into the pack that it leaves the fewest tokens; the packs."""
    packs = []
    for i in largest_first(sizes):
        left = [budget - sum(sizes[j] for j in p) - sizes[i] for p in packs]
        held = [sum(rows[j] for j in p) + rows[i] for p in packs]
        able = [k for k in range(len(packs)) if left[k] >= 0 and not (most and held[k] > most)]
        if able:
            packs[min(able, key=lambda k: (left[k], k))].append(i)
        else:
            packs.append([i])
    return packs


def cheapest_first(sizes, costs, budget, count, most, rows):
    """Each item, the dearest first, into the cheapest of `count` packs that takes it; None if none does."""
    packs = [[] for _ in range(count)]
    for i in largest_first(costs):
        able = [p for p in packs if sum(sizes[j] for j in p) + sizes[i] <= budget]
        able = [p for p in able if not most or sum(rows[j] for j in p) + rows[i] <= most]
        if not able:
            return None
        min(able, key=lambda p: sum(costs[j] for j in p)).append(i)  # the first of equal ones
    return packs


def alike(a, b):
    """How many tokens two rows begin with alike."""
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def families(rows, prompts, groups, inputs, least=0.1, block=64):
    """(the members of each family in order, {row: saved}) of rows of tokens and the sizes of their prompts.

    A row without inputs is in none. Neighbours in the order of their tokens are linked if they are of one
    group and share a tenth of the shorter one, and all rows of one prompt are linked.
    """
    filled = [i for i in range(len(rows)) if inputs[i]]
    key = lambda i: (rows[i], i)  # noqa: E731
    linked = {(i, j) for i in filled for j in filled if rows[i][: prompts[i]] == rows[j][: prompts[j]] != []}
    for group in set(groups):
        order = sorted((i for i in filled if groups[i] == group), key=key)
        linked |= {
            pair
            for i, j in itertools.pairwise(order)
            if alike(rows[i], rows[j]) >= least * min(len(rows[i]), len(rows[j]))
            for pair in ((i, j), (j, i))
        }
    families, saved = [], {}
    for i in filled:
        if any(i in family for family in families):
            continue
        members, new = set(), {i}
        while new:
            members |= new
            new = {j for k in new for j in filled if (k, j) in linked} - members
        order = sorted(members, key=key)
        for a, b in itertools.pairwise(order):
            n = alike(rows[a], rows[b])
            read = min(n, max(prompts[a], prompts[b]))
            saved[b] = min(read + block * ((n - read) // block), inputs[b])
        one = all(rows[j][: prompts[j]] == rows[i][: prompts[i]] for j in members)
        if one and all(saved[b] == min(prompts[b], inputs[b]) for b in order[1:]):
            order = sorted(members)
            saved |= {b: min(prompts[b], inputs[b]) for b in order}
        families.append(order)
    return families, saved


def families_together(sizes, families, budget, most, rows):
    """Each item behind the last list of its family, or in a new one where that is full."""
    lists = []
    for family in families:
        own = []
        for i in family:
            tokens = sum(sizes[j] for j in (own[-1] if own else [])) + sizes[i]
            held = sum(rows[j] for j in (own[-1] if own else [])) + rows[i]
            if own and tokens <= budget and not (most and held > most):
                own[-1].append(i)
            else:
                own.append([i])
        lists += own
    return sorted(lists, key=min)


# ---------- reward models


def pooled(value, seq, pool, logit=None):
    """[T, H]: last value, mean or softmax-weighted mean over the tokens up to each of its sequence."""
    value, seq = np.asarray(value, np.float64), np.asarray(seq)
    out = np.zeros_like(value)
    for t in range(len(value)):
        before = [s for s in range(t + 1) if seq[s] == seq[t]]
        weight = np.zeros(len(before))
        weight[-1] = 1
        if pool == "mean":
            weight[:] = 1
        elif pool == "attention":
            x = np.asarray(logit, np.float64)[before]
            weight = np.exp(x - x.max())
        out[t] = weight @ value[before] / weight.sum()
    return out


def scores(lm, heads, rows, ends, pool, query=None):
    """[[E, H] of each row]: the pooled values at the ends of a row, which the model reads alone."""
    import torch

    found = []
    for row, at in zip(rows, ends):
        with torch.no_grad():
            hidden = lm(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0]
        hidden = hidden.double().numpy()
        logit = hidden @ (np.zeros(hidden.shape[1]) if query is None else query)
        found.append(pooled(hidden @ heads.T, np.zeros(len(row)), pool, logit)[at])
    return found


# ---------- advantages


def grpo(reward, scale=True, eps=1e-6):
    out = np.zeros_like(reward, dtype=np.float64)
    for n, row in enumerate(np.asarray(reward, np.float64)):
        if (row == row[0]).all():
            continue
        out[n] = row - row.mean()
        if scale:
            out[n] /= row.std(ddof=1) + eps
    return out


def rloo(reward):
    out = np.zeros_like(reward, dtype=np.float64)
    for n, row in enumerate(np.asarray(reward, np.float64)):
        for g in range(len(row)):
            out[n, g] = row[g] - np.delete(row, g).mean()
    return out


def remax(reward, greedy_reward):
    return np.array([[r - b for r in row] for row, b in zip(reward, greedy_reward)])


def opo(reward, length):
    """The baseline: sum of l r over sum of l, in each group."""
    out = np.zeros_like(reward, dtype=np.float64)
    for n, (row, size) in enumerate(zip(reward, length)):
        baseline = sum(x * r for x, r in zip(size, row)) / sum(size)
        out[n] = [r - baseline for r in row]
    return out


def quantile(reward, q, scale=True, eps=1e-6):
    """The baseline: the smallest reward that a share q of the group does not exceed."""
    out = np.zeros_like(reward, dtype=np.float64)
    share = Fraction(str(q))
    for n, row in enumerate(np.asarray(reward, np.float64)):
        baseline = min(x for x in row if (row <= x).sum() >= share * len(row))
        out[n] = row - baseline
        if scale:
            out[n] /= row.std(ddof=1) + eps
    return out


def cpgd_advantage(reward, scale=True, eps=1e-6):
    out = np.zeros_like(reward, dtype=np.float64)
    for n, row in enumerate(np.asarray(reward, np.float64)):
        mean = sum(row) / len(row)
        std = math.sqrt(sum((r - mean) ** 2 for r in row) / (len(row) - 1))
        if max(row) > min(row):
            out[n] = [(r - mean) / ((std + eps) if scale else 1) for r in row]
    return out


def reinforce_pp(token_reward, mask, gamma=1.0):
    """[B, S]: sum over the tokens in mask from t on of gamma^(tokens in mask between) r."""
    out = np.zeros(np.shape(mask))
    for b, m in enumerate(np.asarray(mask, bool)):
        kept = np.flatnonzero(m)
        for i, t in enumerate(kept):
            out[b, t] = sum(gamma**j * token_reward[b][u] for j, u in enumerate(kept[i:]))
    return out


def reinforce_pp_baseline(reward):
    return np.array([[r - sum(row) / len(row) for r in row] for row in reward])


def gdpo(parts, weights):
    return sum(w * grpo(part) for part, w in zip(parts, weights))


def pass_at_k(correct, k):
    """Every k-subset of the responses scores its best: the mean score of the subsets with a response, less
    the mean of all, over the deviation of all."""
    out = np.zeros(np.shape(correct))
    for n, row in enumerate(np.asarray(correct, np.float64)):
        subsets = list(itertools.combinations(range(len(row)), k))
        best = np.array([max(row[i] for i in subset) for subset in subsets])
        for g in range(len(row)) if best.max() > best.min() else ():
            own = [x for subset, x in zip(subsets, best) if g in subset]
            out[n, g] = (sum(own) / len(own) - best.mean()) / best.std()
    return out


def by_group(estimator, group, *columns, least=2):
    """[B]: an estimator of [1, G] on the rows of each group alone, 0 in one of fewer rows than `least`."""
    out = np.zeros(len(group))
    for g in set(np.asarray(group).tolist()):
        rows = [b for b, other in enumerate(group) if other == g]
        if len(rows) >= least:
            out[rows] = estimator(*(np.asarray(x)[None, rows] for x in columns))[0]
    return out


def remax_by(reward, group, greedy_reward):
    return np.array([r - greedy_reward[g] for r, g in zip(reward, group)], np.float64)


def gdpo_by(parts, group, weights):
    return sum(w * by_group(grpo, group, part) for part, w in zip(parts, weights))


def length_adaptive_lambda(length, alpha=0.05):
    return np.array([max(0.0, 1 - 1 / (alpha * n)) for n in length])


def discounted_return(reward, discount):
    """[S]: R[t] = sum over u >= t of discount[t] ... discount[u-1] r[u]."""
    return linear_scan(discount, reward)


def gae(reward, value, discount, lambda_, bootstrap=0.0):
    """One row [S] without a mask: adv[t] = sum over k of (product of
    the discounts from t) lambda^k delta[t+k]."""
    reward, value, discount = (np.asarray(x, np.float64) for x in (reward, value, discount))
    after = np.append(value[1:], bootstrap)
    delta = reward + discount * after - value
    size = len(reward)
    adv = np.array(
        [
            sum(np.prod(discount[t:u]) * lambda_ ** (u - t) * delta[u] for u in range(t, size))
            for t in range(size)
        ]
    )
    return adv, adv + value


def gae_masked(reward, value, discount, lambda_, mask, bootstrap=0.0):
    """One row [S]: delete what is not in mask, compute, put it back; 0 outside mask. A deleted end of a
    sequence
    (discount 0) moves to the last kept position before it."""
    mask, discount = np.asarray(mask, bool), np.asarray(discount, np.float64).copy()
    kept = np.flatnonzero(mask)
    for i, t in enumerate(kept):
        upto = kept[i + 1] if i + 1 < len(kept) else len(mask)
        if (discount[t:upto] == 0).any():
            discount[t] = 0
    adv, ret = np.zeros(len(mask)), np.zeros(len(mask))
    row = (np.asarray(x, np.float64)[mask] for x in (reward, value, discount))
    adv[mask], ret[mask] = gae(*row, lambda_, bootstrap)
    return adv, ret


def decoupled_gae(reward, value, discount, policy_lambda, value_lambda, mask, bootstrap):
    """Rows [B, S], with two lambdas per row: adv by the one, ret by the other."""
    rows = list(zip(reward, value, discount, policy_lambda, value_lambda, mask, bootstrap))
    adv = [gae_masked(r, v, d, p, m, end)[0] for r, v, d, p, _, m, end in rows]
    ret = [gae_masked(r, v, d, q, m, end)[1] for r, v, d, _, q, m, end in rows]
    return np.array(adv), np.array(ret)


def curriculum(prompts, weights, window, floor):
    """(success, share of the next draw) of each source, after prompts (source, rewards) one by one."""
    success = [0.5] * len(weights)
    for k, rewards in prompts:
        mean = sum(min(max(r, 0.0), 1.0) for r in rewards) / len(rewards)
        success[k] = (1 - 1 / window) * success[k] + mean / window
    size = [w * max(p * (1 - p), floor) for w, p in zip(weights, success)]
    return success, [x / sum(size) for x in size]


def whiten(adv, mask, eps=1e-8):
    adv, mask = np.asarray(adv, np.float64), np.asarray(mask, bool)
    out, x = np.zeros_like(adv), adv[mask]
    if x.size:
        out[mask] = (x - x.mean()) / math.sqrt((x.var(ddof=1) if x.size > 1 else 0.0) + eps)
    return out


# ---------- weights


def _rows(mask):
    mask = np.asarray(mask, bool)
    return mask, [m.sum() for m in mask], sum(m.any() for m in mask)


def token_mean(mask):
    mask, tokens, _ = _rows(mask)
    return np.where(mask, 1 / max(sum(tokens), 1), 0.0)


def seq_mean(mask):
    mask, tokens, rows = _rows(mask)
    return np.array([[1 / (rows * tokens[b]) if x else 0.0 for x in m] for b, m in enumerate(mask)])


def pair_mean(mask):
    """1 / (pairs that have a token, tokens of the pair), rows 2i and 2i + 1 a pair."""
    _, tokens, _ = _rows(mask)
    of_pair = [tokens[2 * i] + tokens[2 * i + 1] for i in range(len(mask) // 2)]
    pairs = sum(n > 0 for n in of_pair)
    return np.array([[1 / (pairs * of_pair[b // 2]) if x else 0.0 for x in m] for b, m in enumerate(mask)])


def seq_sum(mask):
    mask, _, rows = _rows(mask)
    return np.where(mask, 1 / max(rows, 1), 0.0)


def constant(mask, length):
    mask, _, rows = _rows(mask)
    return np.where(mask, 1 / (max(rows, 1) * length), 0.0)


def truncated_is(w, old_logp, logp, cap=2.0):
    return np.array([x * min(math.exp(o - q), cap) for x, o, q in zip(w, old_logp, logp)])


def masked_is(w, old_logp, logp, cap=2.0):
    ratios = [math.exp(o - q) for o, q in zip(old_logp, logp)]
    return np.array([x * r if r <= cap else 0.0 for x, r in zip(w, ratios)])


def icepop(w, old_logp, logp, low=0.5, high=5.0):
    ratios = [math.exp(o - q) for o, q in zip(old_logp, logp)]
    return np.array([x * r if low <= r <= high else 0.0 for x, r in zip(w, ratios)])


def mismatch(trainer, sampler, mask):
    """(mean, largest |difference|, and of it in [-20, 20] KL by k3 and k1, chi-square, effective share)."""
    d = [t - s for t, s, m in zip(np.ravel(trainer), np.ravel(sampler), np.ravel(mask)) if m]
    gaps = sum(map(abs, d)) / len(d), max(map(abs, d))
    d = [min(max(x, -20.0), 20.0) for x in d]
    kl = [math.exp(x) - 1 - x for x in d]
    ratio = [math.exp(x) for x in d]
    chi2 = sum(r * r for r in ratio) / len(d) - 1
    return *gaps, sum(kl) / len(kl), -sum(d) / len(d), chi2, effective_share(ratio)


def gap_by_depth(d, mask):
    """Mean |d| [B, S] of the tokens in mask by their position and by the turn of the policy, by name."""
    found = {}
    for row, learned in zip(np.asarray(d, float), np.asarray(mask, bool)):
        turn = 0
        for i, (x, m) in enumerate(zip(row, learned)):
            turn += bool(m and not (i and learned[i - 1]))
            if m:
                deep = ("1k", "4k", "16k", "64k", "more")[sum(i >= end for end in (1024, 4096, 16384, 65536))]
                later = ("turn1", "turn2", "turn4", "turn8", "turns_more")
                for name in (deep, later[sum(turn > end for end in (1, 2, 4, 8))]):
                    found.setdefault(f"mismatch/gap@{name}", []).append(abs(x))
    return {name: sum(xs) / len(xs) for name, xs in found.items()}


def effective_share(weights):
    """Kish's effective sample size as a share of the samples."""
    return sum(weights) ** 2 / len(weights) / sum(x * x for x in weights)


def importance(w, old_logp, logp):
    return np.array([x * math.exp(o) / math.exp(q) for x, o, q in zip(w, old_logp, logp)])


def seq_importance(old_logp, logp, mask):
    """[B]: the product over the tokens of a response of pi_old / pi_sampler."""
    rows = zip(old_logp, logp, np.asarray(mask, bool))
    return np.array([np.prod([math.exp(o) / math.exp(q) for o, q, m in zip(*row) if m]) for row in rows])


def off_policy_mask(w, old_logp, logp, adv, mask, limit):
    w = np.array(w, np.float64)
    for b, m in enumerate(np.asarray(mask, bool)):
        gone = np.mean([logp[b][t] - old_logp[b][t] for t in np.flatnonzero(m)]) if m.any() else 0.0
        for t in np.flatnonzero(m):
            w[b, t] *= not (gone > limit and adv[b][t] < 0)
    return w


def top_share(x, mask, share):
    """[B, S] bool: sort the tokens in mask, take share of them, rounded up, the first of equals first."""
    where = [tuple(i) for i in np.argwhere(mask)]
    count = math.ceil(round(share * len(where), 9))
    out = np.zeros(np.shape(mask), bool)
    for i in sorted(where, key=lambda i: (-x[i], i))[:count]:
        out[i] = True
    return out


def covariance(logp, adv, mask):
    where = [tuple(i) for i in np.argwhere(mask)]
    out = np.zeros(np.shape(mask))
    for i in where:
        p, a = (np.mean([x[j] for j in where]) for x in (logp, adv))
        out[i] = (logp[i] - p) * (adv[i] - a)
    return out


# ---------- losses


def ppo_clip(logp, old_logp, adv, low=0.2, high=0.2, dual=None):
    out = []
    for p, o, a in zip(logp, old_logp, adv):
        rho = math.exp(p - o)
        objective = min(rho * a, min(max(rho, 1 - low), 1 + high) * a)
        if dual is not None and a < 0:
            objective = max(objective, dual * a)
        out.append(-objective)
    return np.array(out)


def ppo_clip_gradient(logp, old_logp, adv, w, low=0.2, high=0.2, dual=None):
    """d (w * ppo_clip) / d logp: - w adv rho, or 0 where the ratio has left the limits on the side of adv."""
    out = []
    for p, o, a, v in zip(logp, old_logp, adv, w):
        rho = math.exp(p - o)
        below, above = rho < 1 + high, rho > 1 - low and (dual is None or rho < dual)
        free = below if a >= 0 else above
        out.append(-v * a * rho if free else 0.0)
    return np.array(out)


def reinforce(logp, adv):
    return np.array([-a * p for p, a in zip(logp, adv)])


def per_sequence(fn, logp, old_logp, adv, mask, seq, num_seqs):
    """[T]: fn(logp, old_logp, adv) of each sequence's tokens in mask, put back; 0 elsewhere."""
    out = np.zeros(len(logp))
    for k in range(num_seqs):
        own = [t for t in range(len(logp)) if seq[t] == k and mask[t]]
        for t, x in zip(own, fn(*([x[t] for t in own] for x in (logp, old_logp, adv)))):
            out[t] = x
    return out


def gspo(logp, old_logp, adv, low=3e-4, high=4e-4):
    """One sequence: equations 5 and 7 of the paper, s the |y|-th root of the ratio of whole responses."""
    if not len(logp):
        return []
    s = math.exp(sum(p - o for p, o in zip(logp, old_logp))) ** (1 / len(logp))
    return [-min(s * a, min(max(s, 1 - low), 1 + high) * a) for a in adv]


def gmpo(logp, old_logp, adv, low=0.4, high=0.4):
    """One sequence with one advantage: the paper's equation, with the sign of A in the exponents."""
    if not len(logp):
        return []
    product, sign = 1.0, 1 if adv[0] > 0 else -1
    for p, o in zip(logp, old_logp):
        inside = min(max(math.exp(p - o), math.exp(-low)), math.exp(high))
        product *= min(math.exp(p - o) ** sign, inside**sign) ** sign
    return [-a * product ** (1 / len(logp)) for a in adv]


def cispo(logp, old_logp, adv, low=1.0, high=4.0):
    rho = [math.exp(p - o) for p, o in zip(logp, old_logp)]
    return np.array([-min(max(r, 1 - low), 1 + high) * a * p for r, a, p in zip(rho, adv, logp)])


def sapo(logp, old_logp, adv, tau_pos=1.0, tau_neg=1.05):
    out = []
    for p, o, a in zip(logp, old_logp, adv):
        tau = tau_pos if a > 0 else tau_neg
        out.append(-4 / tau / (1 + math.exp(-tau * (math.exp(p - o) - 1))) * a)
    return np.array(out)


def cpgd(logp, old_logp, adv, low=0.2, high=0.2, drift=0.1):
    out = []
    for p, o, a in zip(logp, old_logp, adv):
        d = p - o
        gain = min(d * a, min(max(d, math.log(1 - low)), math.log(1 + high)) * a)
        out.append(-gain + drift * (math.exp(d) - 1 - d))
    return np.array(out)


def _dppo(divergence, logp, old_logp, adv, limit, cap=20.0):
    out = []
    for p, o, a in zip(logp, old_logp, adv):
        rho = math.exp(p - o)
        leaves = (rho > 1 and a > 0) or (rho < 1 and a < 0)
        blocked = leaves and divergence(math.exp(p), math.exp(o)) > limit
        out.append(0.0 if blocked else -min(rho, cap) * a * p)
    return np.array(out)


def dppo_tv(logp, old_logp, adv, limit=0.15):
    """Half the sum of |difference| over "this token" and "another"."""
    return _dppo(lambda p, o: (abs(p - o) + abs((1 - p) - (1 - o))) / 2, logp, old_logp, adv, limit)


def dppo_kl(logp, old_logp, adv, limit=0.05):
    kl = lambda p, o: o * math.log(o / p) + (1 - o) * math.log((1 - o) / (1 - p))  # noqa: E731
    return _dppo(kl, logp, old_logp, adv, limit)


def kl_cov(logp, old_logp, adv, chosen, coef=1.0):
    out = []
    for p, o, a, c in zip(logp, old_logp, adv, chosen):
        out.append(-math.exp(p - o) * a + coef * c * (math.exp(p - o) - 1 - (p - o)))
    return np.array(out)


def bradley_terry(chosen, rejected, margin=0.0):
    return np.array([-math.log(1 / (1 + math.exp(-(c - r - margin)))) for c, r in zip(chosen, rejected)])


def dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1, label_smoothing=0.0):
    out = []
    for c, r, rc, rr in zip(chosen, rejected, ref_chosen, ref_rejected):
        h = math.log(math.exp(c) / math.exp(rc)) - math.log(math.exp(r) / math.exp(rr))
        right, wrong = 1 / (1 + math.exp(-beta * h)), 1 / (1 + math.exp(beta * h))
        out.append(-(1 - label_smoothing) * math.log(right) - label_smoothing * math.log(wrong))
    return np.array(out)


def ipo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    rows = zip(chosen, rejected, ref_chosen, ref_rejected)
    return np.array([((c - rc) - (r - rr) - 1 / (2 * beta)) ** 2 for c, r, rc, rr in rows])


def divergence(p, q):
    """KL(p, q) of two distributions [V]; a word of probability 0 under p counts 0."""
    return sum(x * math.log(x / y) for x, y in zip(p, q) if x > 0)


def nll(logp):
    return -np.asarray(logp, np.float64)


def value_clip(value, old_value, ret, clip=0.2):
    out = []
    for v, o, r in zip(value, old_value, ret):
        near = min(max(v, o - clip), o + clip)
        out.append(max((v - r) ** 2, (near - r) ** 2) / 2)
    return np.array(out)


def kl_k1(logp, ref_logp):
    return np.array([math.log(math.exp(p) / math.exp(r)) for p, r in zip(logp, ref_logp)])


def kl_k2(logp, ref_logp):
    return np.array([(p - r) ** 2 / 2 for p, r in zip(logp, ref_logp)])


def kl_k3(logp, ref_logp):
    return np.array([math.exp(r) / math.exp(p) - 1 - (r - p) for p, r in zip(logp, ref_logp)])


# ---------- distillation: p is the student, t the teacher, of one token [V]


def distilled(name, p, t, beta=0.5, alpha=0.1):
    """By a sum over words; a word without mass on the left side adds nothing."""

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b) if x > 0)

    def mixed(a, b, share):
        return [share * x + (1 - share) * y for x, y in zip(a, b)]

    if name == "reverse_kl":
        return kl(p, t)
    if name == "forward_kl":
        return kl(t, p)
    if name == "jsd":
        m = mixed(t, p, beta)
        return beta * kl(t, m) + (1 - beta) * kl(p, m)
    if name == "skew_reverse_kl":
        return kl(p, mixed(p, t, alpha))
    assert name == "skew_forward_kl"
    return kl(t, mixed(t, p, alpha))


def teacher_advantage(logp, teacher_logp, mask, gamma=0.0, normalize=False):
    """The double sum over the sampled tokens of each row."""
    out = np.zeros(np.shape(logp))
    for b, row in enumerate(mask):
        at = [s for s in range(len(row)) if row[s]]
        for i, t in enumerate(at):
            powers = [gamma**j for j in range(len(at) - i)]
            total = sum(w * (teacher_logp[b][s] - logp[b][s]) for w, s in zip(powers, at[i:]))
            out[b, t] = total / sum(powers) if normalize else total
    return out


def enumerated_reverse_kl(student, teacher, length):
    """(KL of whole texts, its gradient in the logits) of two Markov chains [V, V] that begin in state 0."""
    size = len(student)
    p, t = (np.exp(x - np.log(np.exp(x).sum(-1, keepdims=True))) for x in (student, teacher))
    value, gradient = 0.0, np.zeros_like(student)
    for text in itertools.product(range(size), repeat=length):
        before = (0, *text[:-1])
        chance = math.prod(p[a, b] for a, b in zip(before, text))
        gap = sum(math.log(p[a, b] / t[a, b]) for a, b in zip(before, text))
        value += chance * gap
        for a, b in zip(before, text):  # d log p(text) / d logits
            gradient[a] -= chance * gap * p[a]
            gradient[a, b] += chance * gap
    return value, gradient


# ---------- draws


def drawn(p, u):
    """The token that is drawn with probabilities p / sum(p) by numbers u, and its probability by the choices.

    The tokens are folded into two, four ... classes: of w classes the second half is laid onto the first,
    class j + ceil(w / 2) onto class j. From the one class that holds all of them, each number chooses
    between the two classes that were laid onto each other, by their masses.
    """
    p = np.asarray(p, np.float64)
    place = [np.arange(len(p))]  # of each token among the classes
    widths = [len(p)]
    while widths[-1] > 1:
        half = math.ceil(widths[-1] / 2)
        place.append(np.where(place[-1] < half, place[-1], place[-1] - half))
        widths.append(half)
    inside = np.ones(len(p), bool)
    chance = 1.0
    for number, at, width in zip(u, place[-2::-1], widths[-2::-1]):
        first = inside & (at < math.ceil(width / 2))
        share = p[first].sum() / p[inside].sum()
        if number < share:
            inside, chance = first, chance * share
        else:
            inside, chance = inside & ~first, chance * (1 - share)
    return int(np.flatnonzero(inside)[0]), chance


# ---------- expectations by enumeration


def sequences(vocab, length):
    """All of them, as tuples."""
    return [(*x, a) for x in sequences(vocab, length - 1) for a in range(vocab)] if length else [()]


def likelihood(policy, x):
    """policy: prefix -> probabilities of the next token."""
    return math.prod(float(policy[x[:t]][x[t]]) for t in range(len(x)))


def reward_gradient(policy, reward):
    """prefix -> gradient of E[R] in its logits: p(prefix) p(a) (Q(a) - V), the policy gradient theorem."""
    out = {}
    for prefix, p in policy.items():
        value = np.zeros(len(p))  # p(prefix, a) Q(prefix, a)
        for x, r in reward.items():
            if x[: len(prefix)] == prefix:
                value[x[len(prefix)]] += likelihood(policy, x) * r
        out[prefix] = value - p * value.sum()
    return out


def score_estimate(policy, x, r, w):
    """prefix -> sum_t w_t r grad log p(x_t | x_<t), the estimate from one sequence."""
    out = {prefix: np.zeros(len(p)) for prefix, p in policy.items()}
    for t, a in enumerate(x):
        out[x[:t]] += w[t] * r * (np.eye(len(policy[x[:t]]))[a] - policy[x[:t]])
    return out


def group_gradient(p, reward, estimator, group):
    """E over all groups of one-token responses of mean_g A_g grad log p(a_g), in the logits."""
    out = np.zeros(len(p))
    for actions in sequences(len(p), group):
        adv = estimator(np.array([[reward[a] for a in actions]]))[0]
        for a, value in zip(actions, adv):
            out += math.prod(p[b] for b in actions) * value / group * (np.eye(len(p))[a] - p)
    return out


# ---------- distributions


def softmax(logits, temperature=1.0):
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def log_softmax(logits, temperature=1.0):
    return np.log(softmax(logits, temperature))


def entropy(logits, temperature=1.0):
    p = softmax(logits, temperature)
    return -sum(x * math.log(x) for x in p if x > 0)


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0):
    """[V] -> [V]: what a sampler draws from: the top_k likeliest, of those the
    fewest with mass >= top_p, renormalised."""
    p = softmax(logits, temperature)
    ranked = sorted(range(len(p)), key=lambda i: -p[i])[: top_k or len(p)]
    total, mass, kept = sum(p[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass >= top_p * total and top_p < 1:
            break
        kept.append(i)
        mass += p[i]
    out = np.zeros(len(p))
    out[kept] = p[kept] / mass
    return out


# ---------- rewards


def moments(reward):
    """(count, mean, sum of squared deviations) of every reward."""
    x = np.asarray(reward, np.float64).ravel()
    return x.size, x.mean(), ((x - x.mean()) ** 2).sum()


def shaped(reward, tokens, log_ratio, *, clip, overlong, max_new, kl, before):
    """Rewards [B] after the chain of a run, and all rewards that were normalised so far.

    `tokens` [B] are lengths, `log_ratio` [B] sums of log(policy / initial model), `before` the rewards of
    earlier steps, or None where nothing is normalised.
    """
    changed = []
    for r, n, ratio in zip(reward, tokens, log_ratio):
        if clip:
            r = min(max(r, -clip), clip)
        if overlong:
            r = r + overlong_penalty(n, max_new, overlong)
        changed.append(r - kl * ratio)
    if before is None:
        return np.array(changed), None
    every = np.array([*before, *changed])
    scale = every.std(ddof=1) if len(every) > 1 and every.std() > 1e-12 * abs(every.mean()) else 0.0
    return (np.array(changed) - every.mean()) / (scale + 1e-8 if scale else 1.0), list(every)


def overlong_penalty(length, max_new, buffer, scale=1.0):
    """DAPO's equation 13, case by case."""
    expected = max_new - buffer
    if length <= expected:
        return 0.0
    return scale * (expected - length) / buffer if length <= max_new else -scale


def length_penalty(length, correct):
    out = np.zeros(np.shape(length))
    for n, (row, right) in enumerate(zip(length, correct)):
        low, high = min(row), max(row)
        for g in range(len(row)) if high > low else ():
            x = 0.5 - (row[g] - low) / (high - low)
            out[n, g] = x if right[g] else min(0.0, x)
    return out


def adaptive_kl(coef, kl, target, horizon, count):
    error = kl / target - 1
    error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
    return coef * (1 + error * count / horizon)


def gated(reward, gate):
    return np.array([r if g else 0.0 for r, g in zip(reward, gate)])


def varied(reward):
    return np.array([any(r != row[0] for r in row) for row in reward])


def kl_in_reward(reward, logp, ref_logp, mask, coef):
    out = np.zeros(np.shape(mask))
    for b, m in enumerate(np.asarray(mask, bool)):
        kept = np.flatnonzero(m)
        for t in kept:
            out[b, t] = -coef * (logp[b][t] - ref_logp[b][t])
        if len(kept):
            out[b, kept[-1]] += reward[b]
    return out


# ---------- optimizers


def adamw(
    params, grads, lr, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, decays=lambda name, p: p.ndim >= 2
):
    """{name: array} after len(grads) steps of AdamW from `params`; lr is a function of the updates done.

    The moments are their sums: m[t] = (1 - b1) sum over s of b1^(t-s) g[s].
    """
    params = {name: np.asarray(p, np.float64).copy() for name, p in params.items()}
    for t in range(1, len(grads) + 1):
        for name, p in params.items():
            g = [np.asarray(step[name], np.float64) for step in grads[:t]]
            m = (1 - b1) * sum(b1 ** (t - s) * g[s - 1] for s in range(1, t + 1)) / (1 - b1**t)
            v = (1 - b2) * sum(b2 ** (t - s) * g[s - 1] ** 2 for s in range(1, t + 1)) / (1 - b2**t)
            decay = weight_decay * p if decays(name, p) else 0.0
            params[name] = p - lr(t - 1) * (m / (np.sqrt(v) + eps) + decay)
    return params


def sgd(
    params, grads, lr, momentum=0.0, nesterov=False, weight_decay=0.0, decays=lambda name, p: p.ndim >= 2
):
    """{name: array} after len(grads) steps of SGD from `params`; lr is a function of the updates done.

    The momentum is its sum: b[t] = sum over s of momentum^(t-s) g[s].
    """
    params = {name: np.asarray(p, np.float64).copy() for name, p in params.items()}
    for t in range(1, len(grads) + 1):
        for name, p in params.items():
            g = [np.asarray(step[name], np.float64) for step in grads[:t]]
            step = sum(momentum ** (t - s) * g[s - 1] for s in range(1, t + 1))
            if nesterov:
                step = g[-1] + momentum * step
            decay = weight_decay * p if decays(name, p) else 0.0
            params[name] = p - lr(t - 1) * (step + decay)
    return params


def lion(params, grads, lr, b1=0.9, b2=0.99, weight_decay=0.0, decays=lambda name, p: p.ndim >= 2):
    """{name: array} after len(grads) steps of Lion from `params`; lr is a function of the updates done.

    The average before step t is its sum: m = (1 - b2) sum over s < t of b2^(t-1-s) g[s].
    """
    params = {name: np.asarray(p, np.float64).copy() for name, p in params.items()}
    for t in range(1, len(grads) + 1):
        for name, p in params.items():
            g = [np.asarray(step[name], np.float64) for step in grads[:t]]
            m = (1 - b2) * sum((b2 ** (t - 1 - s) * g[s - 1] for s in range(1, t)), 0.0)
            decay = weight_decay * p if decays(name, p) else 0.0
            params[name] = p - lr(t - 1) * (np.sign(b1 * m + (1 - b1) * g[-1]) + decay)
    return params


def clip_by_global_norm(grads, max_norm):
    norm = math.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in grads.values()))
    return {name: np.asarray(g, np.float64) * min(1.0, max_norm / norm) for name, g in grads.items()}


def ema(values, decay):
    """The average after values[1:], from values[0]: decay^n v[0] + (1 - decay)
    sum over s of decay^(n-s) v[s]."""
    n = len(values) - 1
    tail = sum((decay ** (n - s) * np.asarray(values[s], np.float64) for s in range(1, n + 1)), 0.0)
    return decay**n * np.asarray(values[0], np.float64) + (1 - decay) * tail


def warmup(step, lr, warmup, total, floor, shape):
    """Learning rate after `step` updates; shape is "linear" or "cosine"."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / (total - warmup))
    left = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return lr * (floor + (1 - floor) * left)


def expert_balance(p, chosen, seq):
    """(aux [T], share [T]) of one router: for each token, over experts, their share of the choices of its
    sequence times E times the probability [T, E] that the token gives them; and the largest such share."""
    n_experts = p.shape[1]
    aux, largest = np.zeros(len(p)), np.zeros(len(p))
    for t in range(len(p)):
        choices = [e for u in range(len(p)) if seq[u] == seq[t] for e in chosen[u]]
        for e in range(n_experts):
            share = choices.count(e) / len(choices)
            aux[t] += n_experts * share * p[t, e]
            largest[t] = max(largest[t], share)
    return aux, largest


def silu(x):
    """x sigma(x)."""
    return x / (1 + np.exp(-x))


def chosen_weights(logits, chosen, way):
    """[T, k]: the scores of chosen experts as shares of their sum; exp(z) or sigma(z) of logits z [T, E]."""
    out = np.zeros(np.shape(chosen))
    for t in range(len(chosen)):
        z = logits[t][chosen[t]]
        score = np.exp(z - z.max()) if way == "softmax" else 1 / (1 + np.exp(-z))
        out[t] = score / score.sum()
    return out


def mixture(x, router, gate, up, down, chosen, way):
    """[T, D]: of each token the chosen experts' down_e (silu(gate_e x) * up_e x), in shares by its logits."""
    return sum_of_experts(x, chosen_weights(x @ router.T, chosen, way), gate, up, down, chosen)


def sum_of_experts(x, share, gate, up, down, chosen):
    """[T, D]: of each token the chosen experts' down_e (silu(gate_e x) * up_e x), in these shares [T, k]."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for j, e in enumerate(chosen[t]):
            out[t] += share[t, j] * (down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t])))
    return out


def adapted_experts(weight, a, b, scale):
    """[E, out, in]: W_e + scale B_e A_e, of peft's A [E r, in], one expert below the other, and B [out, r E],
    of which each E-th column is an expert's."""
    size = len(weight)
    rank = len(a) // size
    return np.stack([w + scale * b[:, e::size] @ a[e * rank : (e + 1) * rank] for e, w in enumerate(weight)])


# ---- audio


def resample(x, rate, new):
    """y[m] = sum_n x[n] c sinc(c t) cos^2(pi c t / 32) over |c t| < 16, t = n - m rate / new; or x itself."""
    if rate == new:
        return x
    c = 0.99 * min(1.0, new / rate)
    y = np.zeros(-(-len(x) * new // rate))
    for m in range(len(y)):
        for n in range(len(x)):
            at = c * (n - m * rate / new)
            if abs(at) < 16:
                y[m] += x[n] * c * np.sinc(at) * np.cos(np.pi * at / 32) ** 2
    return y


def standardized(x, over, eps=1e-6):
    """(x - mean) / (sample std + eps) of x [N, G], of each row or of all; NaN counts nowhere."""
    x = np.asarray(x, np.float64)
    out = np.full_like(x, np.nan)
    rows = [[(n, g) for g in range(x.shape[1])] for n in range(x.shape[0])]
    if over == "batch":
        rows = [[c for row in rows for c in row]]
    for cells in rows:
        there = [c for c in cells if x[c] == x[c]]
        if not there:
            continue
        mean = sum(x[c] for c in there) / len(there)
        square = sum((x[c] - mean) ** 2 for c in there)
        for c in there:
            out[c] = (x[c] - mean) / ((square / max(len(there) - 1, 1)) ** 0.5 + eps)
    return out


def beginnings(tokens, pos, sizes):
    """What the hidden state of each token of a pack depends on: the ids of its sequence up to it.

    A token whose position is not its place in the sequence is like no other.
    """
    found = []
    start = 0
    for size in sizes:
        for t in range(size):
            ids = tuple(int(x) for x in tokens[start : start + t + 1])
            counted = [int(x) for x in pos[start : start + t + 1]] == list(range(t + 1))
            found.append(ids if counted else start + t)
        start += size
    return found


def attention(query, keys, values):
    """One token's attention [H, D]: of query [H, D], each to one of keys and values [H', W, D]."""
    query, keys, values = (np.asarray(x, dtype=np.float64) for x in (query, keys, values))
    found = []
    for h, q in enumerate(query):
        of = h * len(keys) // len(query)
        score = keys[of] @ q / np.sqrt(len(q))
        p = np.exp(score - score.max())
        found.append(p / p.sum() @ values[of])
    return np.stack(found)


# ---------- evaluations


def maj_at_k(correct, answer, k):
    """The mean over disjoint blocks of k samples: the share of the most frequent answers that is correct."""
    out = []
    for right, given in zip(correct, answer):
        blocks = [range(at, at + k) for at in range(0, len(given) - k + 1, k)]
        scores = []
        for block in blocks:
            votes = {
                a: [bool(right[i]) for i in block if given[i] == a] for a in {given[i] for i in block} - {-1}
            }
            most = max(map(len, votes.values()), default=0)
            winners = [np.mean(own) for own in votes.values() if len(own) == most]
            scores.append(np.mean(winners) if winners else 0.0)
        out.append(np.mean(scores))
    return np.array(out, dtype=np.float64)


def bootstrap(value, level=0.95):
    """The percentiles of the means of all N^N resamples, each as likely as any other."""
    means = [
        np.mean(drawn) for drawn in itertools.product(np.asarray(value, dtype=np.float64), repeat=len(value))
    ]
    return np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
