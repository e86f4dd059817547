"""Every row of `algorithm.TABLE` as its paper writes it: loops over responses and over their tokens.

All limits and coefficients are written here, from the papers; what a paper leaves open and the documents call
ours is marked so. Nothing of the library is used. A loss is a torch scalar in float64, so that autograd gives
the gradient of the definition.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Responses:
    """The sampled tokens without holes: each list holds one list per response, with its tokens in order."""

    logp: list[list[Tensor]]
    old_logp: list[list[float]]
    ref_logp: list[list[float]]
    reward: list[list[float]]  # one list a prompt
    greedy: list[float]  # the reward of each prompt's greedy answer
    token_reward: list[list[float]]
    old_value: list[list[float]]
    value: list[list[Tensor]]


def responses(data: dict, logits: Tensor, value: Tensor) -> Responses:
    """The sampled tokens of data["mask"] [B, S]; logits [B, S, V] score data["tokens"] [B, S]."""
    kept = [[t for t, sampled in enumerate(row) if sampled] for row in data["mask"].tolist()]
    numbers = {k: data[k].tolist() for k in ("tokens", "old_logp", "ref_logp", "token_reward", "old_value")}

    def cut(name: str) -> list[list[float]]:
        return [[numbers[name][b][t] for t in own] for b, own in enumerate(kept)]

    def logp(b: int, t: int) -> Tensor:
        return logits[b, t, numbers["tokens"][b][t]] - logits[b, t].exp().sum().log()

    return Responses(
        logp=[[logp(b, t) for t in own] for b, own in enumerate(kept)],
        old_logp=cut("old_logp"),
        ref_logp=cut("ref_logp"),
        reward=data["reward"].tolist(),
        greedy=data["greedy"].tolist(),
        token_reward=cut("token_reward"),
        old_value=cut("old_value"),
        value=[[value[b, t] for t in own] for b, own in enumerate(kept)],
    )


# ---------- advantages: one number a response, or one a token


def centred(x: Responses) -> list[float]:
    return [r - sum(group) / len(group) for group in x.reward for r in group]


def standardised(x: Responses) -> list[float]:
    """(r - mean) / std of the group, std with G - 1; 1e-6 (ours) keeps it finite; 0 where all are equal."""
    out = []
    for group in x.reward:
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        equal = max(group) == min(group)
        out += [0.0 if equal else (r - mean) / (std + 1e-6) for r in group]
    return out


def over_the_mean(x: Responses) -> list[float]:
    """MaxRL: (r - mean) / mean of the group; 1e-6 is ours."""
    out = []
    for group in x.reward:
        mean = sum(group) / len(group)
        equal = max(group) == min(group)
        out += [0.0 if equal else (r - mean) / (mean + 1e-6) for r in group]
    return out


def over_the_batch(x: Responses) -> list[float]:
    """Lite PPO: r less the group's mean, by the deviation of all rewards of the batch; 1e-6 is ours."""
    every = [r for group in x.reward for r in group]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((r - mean) ** 2 for r in every) / (len(every) - 1))
    return [a / (std + 1e-6) for a in centred(x)]


def made_up(x: Responses) -> list[float]:
    """GPG: alpha (r - mean), alpha all groups by those with a gradient."""
    varied = sum(max(group) > min(group) for group in x.reward)
    return [len(x.reward) / varied * a for a in centred(x)]


def best_only(x: Responses) -> list[float]:
    """The gap of the best response to the second best, and 0."""
    out = []
    for group in x.reward:
        first, second = sorted(group, reverse=True)[:2]
        out += [first - second if i == group.index(first) else 0.0 for i in range(len(group))]
    return out


def optimal(x: Responses) -> list[float]:
    """A*-PO: r - V*, V* = beta log of the mean of e^(r / beta), beta 0.5."""
    out = []
    for group in x.reward:
        value = 0.5 * math.log(sum(math.exp(r / 0.5) for r in group) / len(group))
        out += [r - value for r in group]
    return out


def leave_one_out(x: Responses) -> list[float]:
    return [r - (sum(group) - r) / (len(group) - 1) for group in x.reward for r in group]


def length_weighted(x: Responses) -> list[float]:
    """OPO's baseline: the mean reward of the group, each response with its length as weight."""
    out, first = [], 0
    for group in x.reward:
        length = [len(own) for own in x.logp[first : first + len(group)]]
        baseline = sum(n * r for n, r in zip(length, group)) / sum(length)
        out += [r - baseline for r in group]
        first += len(group)
    return out


def whitened(adv: list[list[float]]) -> list[list[float]]:
    """(A - mean) / std over every token of the batch, std with n - 1 (1e-8 under the root is ours)."""
    every = [a for own in adv for a in own]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / (len(every) - 1) + 1e-8)
    return [[(a - mean) / std for a in own] for own in adv]


def each_token(x: Responses, adv: list[float]) -> list[list[float]]:
    return [[a for _ in own] for a, own in zip(adv, x.logp)]


def gae(reward: list[float], value: list[float], gamma: float, lambda_: float) -> list[float]:
    """The double sum: A[t] = sum over l of (gamma lambda)^l delta[t + l]; after the last token V is 0."""
    after = [*value[1:], 0.0]
    delta = [r + gamma * v_next - v for r, v_next, v in zip(reward, after, value)]
    size = len(reward)
    return [sum((gamma * lambda_) ** (u - t) * delta[u] for u in range(t, size)) for t in range(size)]


def ppo_advantage(x: Responses) -> tuple[list[list[float]], list[list[float]]]:
    """(A, R): GAE with gamma 1, lambda 0.95; the critic's target is A + V."""
    adv = [gae(r, v, 1.0, 0.95) for r, v in zip(x.token_reward, x.old_value)]
    return adv, [[a + v for a, v in zip(*own)] for own in zip(adv, x.old_value)]


def vapo_advantage(x: Responses) -> tuple[list[list[float]], list[list[float]]]:
    """(A, R): lambda = 1 - 1 / (0.05 l) for the actor (at least 0), 1 for the critic; gamma 1."""
    adv, ret = [], []
    for reward, value in zip(x.token_reward, x.old_value):
        length = max(len(reward), 1)
        adv.append(gae(reward, value, 1.0, max(0.0, 1 - 1 / (0.05 * length))))
        ret.append([a + v for a, v in zip(gae(reward, value, 1.0, 1.0), value)])
    return adv, ret


# ---------- objectives of a token or a response, to be maximised


def clip(x, low, high):
    return min(max(x, low), high)


def clipped(rho, a, low, high):
    return min(rho * a, clip(rho, 1 - low, 1 + high) * a)


def ppo_clip(logp, old, a):
    return clipped((logp - old).exp(), a, 0.2, 0.2)


def clip_higher(logp, old, a):
    return clipped((logp - old).exp(), a, 0.2, 0.28)


def score(logp, old, a):
    return a * logp


def cispo_term(logp, old, a):
    """sg(min(rho, 5)) A log pi: no lower limit; the upper, 1 + 4, is ours."""
    return min((logp - old).exp().item(), 1 + 4.0) * a * logp


def sapo_term(logp, old, a):
    tau = 1.0 if a > 0 else 1.05
    return 4 / tau / (1 + (-tau * ((logp - old).exp() - 1)).exp()) * a


def cpgd_term(logp, old, a):
    """min(d A, clip(d, log 0.8, log 1.2) A) - 0.1 KL(old, pi), d = log rho; of the KL, rho - 1 - log rho, the
    gradient's factor rho - 1 is at most 4. 0.1 and 4 are ours."""
    d = logp - old
    gain = min(d * a, clip(d, math.log(1 - 0.2), math.log(1 + 0.2)) * a)
    drift = d.exp().item() - 1 - d.item()
    slope = min(d.exp().item() - 1, 4.0)
    return gain - 0.1 * (drift + slope * (logp - logp.detach()))


def dro_term(logp, old, a):
    """A log pi - beta / 2 (log rho)^2; beta = 0.1 is ours."""
    return a * logp - 0.1 / 2 * (logp - old) ** 2


def binary_tv(p, q):
    return (abs(p - q) + abs((1 - p) - (1 - q))) / 2


def binary_kl(p, q):
    """KL(q, p) of "this token or another", q the old probability."""
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def dppo_term(divergence, limit):
    """sg(min(rho, 20)) A log pi, 0 beyond the limit where the step leads further away."""

    def term(logp, old, a):
        p, q = logp.exp().item(), math.exp(old)
        leaves = (p > q and a > 0) or (p < q and a < 0)
        if leaves and divergence(p, q) > limit:
            return 0.0 * logp
        return min(p / q, 20.0) * a * logp

    return term


def gspo_sequence(logp, old, a):
    """One response: the |y|-th root of the ratio of whole responses, clipped to [1 - 3e-4, 1 + 4e-4]."""
    s = ((sum(logp) - sum(old)) / len(logp)).exp()
    return clipped(s, a, 3e-4, 4e-4)


def gspo_token_sequence(logp, old, a):
    """One response: the mean over tokens of the clipped s pi[t] / sg(pi[t]), s with its gradient stopped."""
    s = math.exp((sum(p.item() for p in logp) - sum(old)) / len(logp))
    return sum(clipped(s * p.exp() / p.exp().item(), a, 3e-4, 4e-4) for p in logp) / len(logp)


def luspo_sequence(logp, old, a):
    """One response: its length times GSPO's term, with limits 2e-3 and 2.5e-3."""
    s = ((sum(logp) - sum(old)) / len(logp)).exp()
    return len(logp) * clipped(s, a, 2e-3, 2.5e-3)


def vespo_sequence(logp, old, a):
    """One response: sg(W^k e^(lambda (1 - W))) A log pi(y); k, lambda are 2, 3 where A >= 0, else 3, 2."""
    ratio = math.exp(sum(p.item() for p in logp) - sum(old))
    k, lambda_ = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return ratio**k * math.exp(lambda_ * (1 - ratio)) * a * sum(logp)


def gmpo_sequence(logp, old, a):
    """One response: the |y|-th root of the product of one-sided ratios, limits e^-0.4 and e^0.4."""
    product, sign = 1.0, math.copysign(1, a)
    for p, o in zip(logp, old):
        rho = (p - o).exp()
        inside = clip(rho, math.exp(-0.4), math.exp(0.4))
        product = product * min(rho**sign, inside**sign) ** sign
    return product ** (1 / len(logp)) * a


# ---------- means: a response without a token is in none of them


def terms(x: Responses, adv, term) -> list[list[Tensor]]:
    """Of the responses that have tokens. adv: one list a response."""
    rows = zip(x.logp, x.old_logp, adv)
    return [[term(*token) for token in zip(*row)] for row in rows if row[0]]


def token_mean(values):
    """DAPO: every token of the batch counts the same."""
    return sum(v for own in values for v in own) / sum(len(own) for own in values)


def seq_mean(values):
    """GRPO: the mean over responses of the mean over tokens."""
    return sum(sum(own) / len(own) for own in values) / len(values)


def seq_sum(values):
    """The policy gradient: the mean over responses of the sum over tokens."""
    return sum(sum(own) for own in values) / len(values)


def over_1024(values):
    """Dr. GRPO: the sum over tokens by a constant (1024 is ours), the mean over responses."""
    return sum(sum(own) / 1024 for own in values) / len(values)


def per_token(advantage, term, mean):
    return lambda x: -mean(terms(x, each_token(x, advantage(x)), term))


def per_sequence(term):
    """The mean over responses of one objective a response."""

    def loss(x: Responses):
        rows = zip(x.logp, x.old_logp, standardised(x))
        values = [term(*row) for row in rows if row[0]]
        return -sum(values) / len(values)

    return loss


def reinforce_pp(x: Responses):
    """The reward on the last token, its return (gamma 1) on every token, whitened over the batch."""
    every = [r for group in x.reward for r in group]
    adv = [[1.0 ** (len(own) - 1 - t) * r for t in range(len(own))] for r, own in zip(every, x.logp)]
    return -token_mean(terms(x, whitened(adv), ppo_clip))


def reinforce_pp_baseline(x: Responses):
    return -token_mean(terms(x, whitened(each_token(x, centred(x))), ppo_clip))


def remax(x: Responses):
    adv = [r - greedy for group, greedy in zip(x.reward, x.greedy) for r in group]
    return -seq_sum(terms(x, each_token(x, adv), score))


def a_star_po(x: Responses):
    """The mean over responses of (beta log(pi(y) / ref(y)) - A)^2, beta 1e-3."""
    rows = [row for row in zip(x.logp, x.ref_logp, optimal(x)) if row[0]]
    return sum((1e-3 * (sum(logp) - sum(ref)) - a) ** 2 for logp, ref, a in rows) / len(rows)


def online_dpo(x: Responses):
    """-log sigmoid(0.1 h) of the best and the worst of each group whose rewards differ. The mean over groups
    is by the responses that have tokens, as all means are."""
    total, first = 0.0, 0
    for group in x.reward:
        whole = [sum(x.logp[first + i]) - sum(x.ref_logp[first + i]) for i in range(len(group))]
        best, worst = group.index(max(group)), group.index(min(group))
        if best != worst and (x.logp[first + best] or x.logp[first + worst]):
            h = whole[best] - whole[worst]
            total = total - len(group) * (1 / (1 + (-0.1 * h).exp())).log()
        first += len(group)
    return total / sum(bool(own) for own in x.logp)


def raw(x: Responses) -> list[float]:
    return [r for group in x.reward for r in group]


# ---------- the table

LOSS = {
    "grpo": per_token(standardised, ppo_clip, seq_mean),
    "dr_grpo": per_token(centred, ppo_clip, over_1024),
    "dapo": per_token(standardised, clip_higher, token_mean),
    "gspo": per_sequence(gspo_sequence),
    "gspo_token": per_sequence(gspo_token_sequence),
    "cispo": per_token(standardised, cispo_term, token_mean),
    "sapo": per_token(standardised, sapo_term, seq_mean),
    "gmpo": per_sequence(gmpo_sequence),
    "cpgd": per_token(standardised, cpgd_term, token_mean),
    "dppo_tv": per_token(standardised, dppo_term(binary_tv, 0.15), token_mean),
    "dppo_kl": per_token(standardised, dppo_term(binary_kl, 0.05), token_mean),
    "maxrl": per_token(over_the_mean, ppo_clip, token_mean),
    "lite_ppo": per_token(over_the_batch, ppo_clip, token_mean),
    "luspo": per_sequence(luspo_sequence),
    "vespo": per_sequence(vespo_sequence),
    "dro": per_token(centred, dro_term, token_mean),
    "gpg": per_token(made_up, score, token_mean),
    "best_minus_second": per_token(best_only, score, seq_sum),
    "a_star_po": a_star_po,
    "online_dpo": online_dpo,
    "rloo": per_token(leave_one_out, score, seq_sum),
    "opo": per_token(length_weighted, score, seq_sum),
    "remax": remax,
    "reinforce": per_token(raw, score, seq_sum),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "ppo": lambda x: -token_mean(terms(x, ppo_advantage(x)[0], ppo_clip)),
    "vapo": lambda x: -token_mean(terms(x, vapo_advantage(x)[0], clip_higher)),
}
ADVANTAGE = {"ppo": ppo_advantage, "vapo": vapo_advantage}


def value_loss(name: str, x: Responses):
    """The critic's: max((V - R)^2, (V_old + clip(V - V_old, +-0.2) - R)^2) / 2, a mean over tokens."""
    values = []
    for value, old, ret in zip(x.value, x.old_value, ADVANTAGE[name](x)[1]):
        near = [o + clip(v - o, -0.2, 0.2) for v, o in zip(value, old)]
        values.append([max((v - r) ** 2, (n - r) ** 2) / 2 for v, n, r in zip(value, near, ret)])
    return token_mean(values)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]
