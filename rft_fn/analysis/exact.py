"""The exact policy gradient of a tiny vocabulary, by enumeration of the responses."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import check, packing, tree
from rft_fn.types import Apply, Rollout, Sampling, Strategy

__all__ = ["every_response", "exact_slopes", "mass"]


def every_response(
    st: Strategy,
    apply: Apply,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    words: int,
    end: int,
    sampling: Sampling,
    least: float = 0.0,
    budget: int = 4096,
) -> Rollout:
    """Return every response of at most `sampling.max_new` tokens with a probability of `least` or more.

    `prompts` are token ids, `words` the size of the vocabulary and `end` the token that ends a response. Rows
    of a prompt follow each other, and `logp` is the policy's: exp of its sum over a row is the chance of the
    response, which sums to the covered mass for each prompt. With words^max_new responses this is for tiny
    models. Memory: the log-probs [beginnings, S, words] of one length. All ranks call it alike.
    """
    done: list[tuple[int, list[int], list[float], bool]] = []  # (prompt, tokens, log-probs, cut off)
    open_: list[tuple[int, list[int], list[float]]] = [(i, [], []) for i in range(len(prompts))]
    lowest = math.log(least) if least > 0 else -math.inf
    for depth in range(sampling.max_new):
        # the distribution after every beginning, by the log-probs of all words at one more token
        pairs = [([*prompts[i], *ids], [end]) for i, ids, _ in open_]
        exp = packing.supervised(pairs)
        vocabulary = torch.arange(words).expand(*exp.tokens.shape, words)
        asked = tree.replace(exp, words=vocabulary, sampling=sampling)
        scores = st.score(apply, params, asked, budget, fields=("words_logp",)).words_logp
        assert scores is not None
        table = scores[exp.mask].double()  # [beginnings, words]
        longer = []
        for (i, ids, before), row in zip(open_, table):
            for word in (row + sum(before) >= lowest).nonzero().flatten().tolist():
                entry = (i, [*ids, word], [*before, float(row[word])])
                if word == end or depth + 1 == sampling.max_new:
                    done.append((*entry, word != end))
                else:
                    longer.append(entry)
        open_ = longer
        if not open_:
            break
    done.sort(key=lambda row: row[0])
    exp = packing.supervised([(prompts[i], ids) for i, ids, *_ in done])
    logp = torch.zeros(exp.mask.shape)
    logp[exp.mask] = torch.tensor([x for _, _, each, _ in done for x in each])
    return Rollout(
        tokens=exp.tokens,
        mask=exp.mask,
        logp=logp,
        length=exp.length,
        truncated=torch.tensor([cut for *_, cut in done]),
        group=torch.tensor([i for i, *_ in done]),
        version=torch.zeros(len(done), dtype=torch.long),
        sampling=sampling,
    )


def exact_slopes(rollout: Rollout, reward: Tensor) -> Tensor:
    """Return the slopes [B, S] of minus the mean over prompts of E[reward], from `every_response`.

    Their gradient is the exact one of the policy that they were enumerated with: `reward` [B] is weighted by
    the chance of its response, less the expected reward of the prompt, which changes nothing but rounding.
    """
    check.shapes(mask=(rollout.mask, "B S"), reward=(reward, "B"))
    chance = rollout.logp.double().sum(-1).exp()
    prompts, index = rollout.group.unique(return_inverse=True)
    mass = torch.zeros(len(prompts), dtype=torch.float64).index_add(0, index, chance)
    value = torch.zeros(len(prompts), dtype=torch.float64).index_add(0, index, chance * reward.double())
    adv = reward.double() - (value / mass)[index]
    return (-(chance * adv / len(prompts))[:, None] * rollout.mask).to(rollout.logp.dtype)


def mass(rollout: Rollout) -> float:
    """Return the probability of the responses of `every_response`, the least of any prompt."""
    chance = rollout.logp.double().sum(-1).exp()
    prompts, index = rollout.group.unique(return_inverse=True)
    return float(torch.zeros(len(prompts), dtype=torch.float64).index_add(0, index, chance).min())
