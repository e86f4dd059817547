"""Losses of policies on pairs of responses, of which one is preferred.

Arguments [N] are log-probs of whole responses: sums over their tokens (`segment.sum`), or means
(`segment.mean`) where a loss says so. `ref_` are the reference's of the same responses. The two responses of
a pair must share a pack: `packing.shard(..., unit=2)`; metrics count the pairs in `packing.real(b)`, which
leaves out placeholders. `preference_table.PREFERENCES` has them by name, with the settings of their papers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check, segment
from rft_fn.loss.targets import smoothed

__all__ = [
    "apo_down", "apo_zero", "bco_pair", "cpo", "dpo", "exo", "hinge", "ipo", "length_desensitized", "nca",
    "online_dpo", "orpo", "robust_dpo", "rpo", "simpo", "sppo",
]  # fmt: skip

Scalar = float | Tensor


def _log_ratios(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log(pi / ref) of the chosen and of the rejected responses, [N] each."""
    check.given(ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    check.shapes(chosen=(chosen, "N"), ref_chosen=(ref_chosen, "N"), ref_rejected=(ref_rejected, "N"))
    return chosen - ref_chosen, rejected - ref_rejected


def _preference(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """Return log(pi / ref)(chosen) - log(pi / ref)(rejected), [N]."""
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    return better - worse


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Scalar = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the DPO loss of preference pairs, [N].

        -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
        h = log(pi / ref)(chosen) - log(pi / ref)(rejected),    e = label_smoothing

    e > 0 is cDPO, for labels with a share e of wrong ones. With means over tokens it is length-normalised
    DPO (Tulu 3, arXiv 2411.15124, with beta 5). arXiv 2305.18290. ValueError unless 0 <= e < 0.5.
    """
    return smoothed(beta * _preference(chosen, rejected, ref_chosen, ref_rejected), label_smoothing)


def robust_dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Scalar = 0.1,
    label_smoothing: float = 0.1,
) -> Tensor:
    """Return the robust DPO loss of preference pairs, [N].

        (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e),    h and e as in `dpo`

    Its mean over labels with a share e of wrong ones is `dpo`'s on right ones. The price is variance, and no
    lower bound: a pair with a wrong label may go to -infinity. arXiv 2403.00409. ValueError unless
    0 <= e < 0.5.
    """
    h = beta * _preference(chosen, rejected, ref_chosen, ref_rejected)
    right, wrong = smoothed(h, 0.0), smoothed(-h, 0.0)
    smoothed(h, label_smoothing)  # raises for a share that is none
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def rpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    length: Tensor,
    *,
    beta: Scalar = 0.1,
    alpha: Scalar = 1.0,
) -> Tensor:
    """Return the loss of DPO with the likelihood of the chosen response, [N].

        dpo + alpha (-log pi(chosen)) / length

    `length` [N] counts the tokens of the chosen response. It holds up what `dpo` may push down with the
    rejected one. Iterative RPO, arXiv 2404.19733, which divides by the tokens of the prompt too.
    """
    check.shapes(chosen=(chosen, "N"), length=(length, "N"))
    return dpo(chosen, rejected, ref_chosen, ref_rejected, beta=beta) - alpha * chosen / length.clamp(min=1)


def ipo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Scalar = 0.1
) -> Tensor:
    """Return the IPO loss of preference pairs, [N].

    h has a margin to reach, not one to stretch:

        (h - 1 / (2 beta))^2,    h as in `dpo`

    The paper's h is of sums over tokens; TRL takes means over tokens (`segment.mean`). arXiv 2310.12036.
    """
    h = _preference(chosen, rejected, ref_chosen, ref_rejected)
    return (h - 1 / (2 * beta)).square()


def hinge(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Scalar = 0.1
) -> Tensor:
    """Return the hinge loss of preference pairs, [N].

        max(0, 1 - beta h),    h as in `dpo`

    SLiC (arXiv 2305.10425) with the reference of RSO (arXiv 2309.06657). A pair whose margin beta h has
    reached 1 teaches nothing more.
    """
    return torch.relu(1 - beta * _preference(chosen, rejected, ref_chosen, ref_rejected))


def exo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Scalar = 0.1,
    label_smoothing: float = 1e-3,
) -> Tensor:
    """Return the EXO loss of preference pairs, [N].

        KL(q, p) = q log(q / (1 - e)) + (1 - q) log((1 - q) / e)
        q = sigmoid(beta h),    e = label_smoothing, h as in `dpo`

    The reverse KL of the policy's preference q to the labels', where `dpo` has the forward KL. e must be
    above 0: labels that are sure make it infinite. arXiv 2402.00856. ValueError unless 0 < e < 0.5.
    """
    if not 0 < label_smoothing < 0.5:
        raise ValueError(f"label_smoothing: expected 0 < label_smoothing < 0.5, got {label_smoothing}")
    h = beta * _preference(chosen, rejected, ref_chosen, ref_rejected)
    right, wrong = F.logsigmoid(h), F.logsigmoid(-h)
    kept = right.exp() * (right - math.log1p(-label_smoothing))
    return kept + wrong.exp() * (wrong - math.log(label_smoothing))


def sppo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Scalar = 1e-3,
    preference: Scalar = 1.0,
) -> Tensor:
    """Return the SPPO loss of preference pairs, [N].

        (d_c - (P - 1/2) / beta)^2 + (d_r - (1/2 - P) / beta)^2,    d = log(pi / ref) of a side

    P = `preference`, a number or [N], is the probability that the chosen response wins; at 1 it is TRL's
    "hard" form. Each side has a value of its own to reach. 1 / beta is the paper's eta of 1,000. arXiv
    2405.00675.
    """
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    goal = (preference - 0.5) / beta
    return (better - goal).square() + (worse + goal).square()


def nca(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Scalar = 0.1
) -> Tensor:
    """Return the NCA loss of preference pairs, [N].

        -log sigmoid(r_c) - log sigmoid(-r_c) / 2 - log sigmoid(-r_r) / 2,    r = beta log(pi / ref) of a side

    It holds the chosen response's likelihood, where `dpo` holds only the difference. arXiv 2402.05369.
    """
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    pulled = -F.logsigmoid(beta * better) - 0.5 * F.logsigmoid(-beta * better)
    return pulled - 0.5 * F.logsigmoid(-beta * worse)


def bco_pair(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Scalar = 0.1
) -> Tensor:
    """Return the BCO loss of preference pairs, [N].

        -log sigmoid(r_c) - log sigmoid(-r_r),    r = beta log(pi / ref) of a side

    Both sides of `bco` without its shift of the rewards, as TRL has it: a classifier of single responses that
    is shown one of each kind. arXiv 2404.04656.
    """
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    return -F.logsigmoid(beta * better) - F.logsigmoid(-beta * worse)


def apo_zero(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Scalar = 0.1
) -> Tensor:
    """Return the APO-zero loss of preference pairs, [N].

        1 - sigmoid(r_c) + sigmoid(r_r),    r = beta log(pi / ref) of a side

    For chosen responses that are better than the policy's: they become more probable, rejected ones less.
    arXiv 2408.06266.
    """
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    return torch.sigmoid(-beta * better) + torch.sigmoid(beta * worse)


def apo_down(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Scalar = 0.1
) -> Tensor:
    """Return the APO-down loss of preference pairs, [N].

        sigmoid(r_c) + 1 - sigmoid(r_c - r_r),    r = beta log(pi / ref) of a side

    For chosen responses that are worse than the policy's: both become less probable, the rejected one more
    so. arXiv 2408.06266.
    """
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    return torch.sigmoid(beta * better) + torch.sigmoid(-beta * (better - worse))


def cpo(chosen: Tensor, rejected: Tensor, *, beta: Scalar = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return the preference term of the CPO loss of pairs, [N].

        `dpo` with h = log pi(chosen) - log pi(rejected)

    The paper adds the likelihood of the chosen response, `nll(chosen)`, with coefficient 1. arXiv
    2401.08417. ValueError unless 0 <= label_smoothing < 0.5.
    """
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    return smoothed(beta * (chosen - rejected), label_smoothing)


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: Scalar = 2.0,
    margin: Scalar = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the SimPO loss of pairs, [N].

        -log sigmoid(beta (c - r) - margin),    c and r means of log pi over tokens

    `margin` is the paper's gamma, about half of beta. `label_smoothing` is as in `dpo`. arXiv 2405.14734.
    ValueError unless 0 <= label_smoothing < 0.5.
    """
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    return smoothed(beta * (chosen - rejected) - margin, label_smoothing)


def _log_odds(logp: Tensor) -> Tensor:
    """Return log(p / (1 - p)), for p up to 1 - 1e-10."""
    return logp - (-torch.expm1(logp)).clamp(min=1e-10).log()


def orpo(chosen: Tensor, rejected: Tensor, *, beta: Scalar = 0.1) -> Tensor:
    """Return the ORPO loss of pairs, [N].

        -c - beta log sigmoid(log odds(c) - log odds(r)),    odds(x) = e^x / (1 - e^x)

    c and r are means of log pi over tokens, so that -c is the likelihood of the chosen response; beta is the
    paper's lambda. arXiv 2403.07691.
    """
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    return -chosen - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def online_dpo(
    logp: Tensor,
    ref_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    seq: Tensor,
    num_seqs: int,
    unit: Tensor,
    *,
    beta: Scalar = 0.1,
) -> Tensor:
    """Return the loss of online DPO on the tokens of a group's best and worst response, [T].

        `dpo` with h = log(pi / ref)(best) - log(pi / ref)(worst)

    The advantages of `advantage.best_against_worst` say which these are, by their sign; `unit` [K] is the
    group of each sequence (`packing.unit_of`); its rows share a pack. Under `weight.seq_mean` it is the mean
    over groups, in which one without a preference counts 0. arXiv 2402.04792.
    """
    check.given(ref_logp=ref_logp)
    check.shapes(logp=(logp, "T"), ref_logp=(ref_logp, "T"), adv=(adv, "T"), mask=(mask, "T"), seq=(seq, "T"))
    check.shapes(unit=(unit, "K"), num_seqs=(logp.new_zeros(num_seqs), "K"))
    side = segment.mean(adv, mask, seq, num_seqs).sign()
    ratio = segment.sum(logp - ref_logp, mask, seq, num_seqs)

    def of_units(x: Tensor) -> Tensor:
        return x.new_zeros(num_seqs).index_add(0, unit, x)

    # a mean over all rows of a group is of those that are compared
    loss = smoothed(beta * of_units(side * ratio), 0.0)
    share = of_units(torch.ones_like(side)) / of_units(side.abs()).clamp(min=1)
    return ((share * loss)[unit] * side.abs())[seq]


def length_desensitized(mask: Tensor, seq: Tensor, num_seqs: int, *, alpha: float = 0.5) -> Tensor:
    """Return what LD-DPO multiplies the log-probs of pairs with, [T].

    1 on as many tokens of a response as the shorter one of its pair has, `alpha` on those after them:

        factor = length_desensitized(b.mask, b.seq, b.num_seqs)
        chosen, rejected = packing.sides(factor * out.logp, b)    # and of b.ref_logp alike

    alpha = 1 is `dpo`, 0 cuts the longer response. Sequences 2i and 2i + 1 are a pair. arXiv 2409.06411.
    ValueError unless 0 <= alpha <= 1, and for an odd number of sequences.
    """
    check.shapes(mask=(mask, "T"), seq=(seq, "T"))
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected 0 <= alpha <= 1, got {alpha}")
    if num_seqs % 2:
        raise ValueError(f"num_seqs: expected an even number of sequences, two per pair, got {num_seqs}")
    tokens = segment.sum(mask.to(torch.get_default_dtype()), mask, seq, num_seqs).long()

    # the place of each token in mask in its sequence, from 1
    order = seq.argsort(stable=True)
    place = torch.zeros_like(seq)
    place[order] = mask[order].long().cumsum(0)
    place = place - (tokens.cumsum(0) - tokens)[seq]

    shared = torch.minimum(tokens[::2], tokens[1::2]).repeat_interleave(2)
    return torch.where(place <= shared[seq], 1.0, alpha)
