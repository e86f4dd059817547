"""Measure the mismatch of trainer and sampler, limit it, and explain one beyond its limit.

The sampler's log-probs are `Rollout.logp`; the trainer's are of the same tokens. Where the two differ,
samples are off-policy: rounding makes them so a little, stale weights more.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rft_fn import check, logprob, metric, model, packing, tree
from rft_fn.model.bind import Scorer
from rft_fn.model.packing_probe import thresholds
from rft_fn.types import Apply, Engine, Packed, Rollout, Sampling

__all__ = [
    "MISMATCH", "check_mismatch", "explain_mismatch", "gap_limit", "logp_mismatch", "mismatch_metrics",
    "noise_floor", "staleness",
]  # fmt: skip

MISMATCH = (
    "policy/logp_gap", "policy/logp_gap_max", "policy/kl_sampler", "policy/k1_sampler",
    "policy/chi2_sampler", "policy/ess_sampler",
)  # fmt: skip


def logp_mismatch(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """Return mean |a - b| over mask, in nats per token."""
    return _masked_mean((a - b).abs(), mask)


def mismatch_metrics(trainer: Tensor, rollout: Rollout) -> dict[str, float]:
    """Return the mismatch of the trainer's log-probs [B, S] with the sampler's, in nats per token.

    Mean and largest |difference|, and on the sampler's own tokens KL(sampler, trainer) by k3 and by k1, the
    chi-square divergence, and the effective share of the tokens. The names are in `MISMATCH`, and those of
    `metric.by_depth` follow; `metric.policy` gives them for an update from the sampler's log-probs.
    """
    check.shapes(trainer=(trainer, "B S"), logp=(rollout.logp, "B S"), mask=(rollout.mask, "B S"))
    mask = rollout.mask
    position = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    gap, turn = logprob.log_ratio(trainer, rollout.logp), metric.turn_of(mask, position)
    found = metric.mismatch(trainer, rollout.logp, mask)
    return metric.results(found | metric.by_depth(gap, mask, position=position, turn=turn))


def staleness(rollout: Rollout, version: int) -> dict[str, float]:
    """Return how many versions older than `version` the weights of the rows are: mean, and the largest.

    A row that several versions sampled counts in the mean with that of its tokens.
    """
    oldest = behind = version - rollout.version.double()
    if rollout.versions is not None:
        mask = rollout.mask
        behind = ((version - rollout.versions) * mask).sum(-1) / mask.sum(-1).clamp(min=1).double()
    return {"rollout/staleness": float(behind.mean()), "rollout/staleness_max": float(oldest.max())}


def _masked_mean(x: Tensor, mask: Tensor) -> float:
    return float((x * mask).double().sum() / mask.sum().clamp(min=1))


def noise_floor(gap: float, sampling: Sampling) -> float:
    """Return the noise of a mean mismatch, measured where both sides have the same weights.

    It is `gap`, but no less than the rounding of float32, 1e-6 nats per token, or 1e-4 where top_p or top_k
    cut the distribution: rounding then decides now and then which token is the last that stays.
    """
    return max(gap, 1e-4 if sampling.truncates else 1e-6)


def gap_limit(max_gap: float, factor: float, floor: float) -> float:
    """Return the largest mismatch that passes: factor x the noise floor, at most `max_gap`.

    Before the floor is known it is 0 here, and only `max_gap` limits it.
    """
    return min(max_gap, factor * floor) if floor else max_gap


def _growth(x: Tensor, mask: Tensor) -> float:
    """Return mean |x| in the second half of the responses over that in the first half."""
    order = mask.cumsum(-1)
    late = mask & (order * 2 > mask.sum(-1, keepdim=True))
    early = mask & ~late
    return _masked_mean(x.abs(), late) / max(_masked_mean(x.abs(), early), 1e-12)


def explain_mismatch(
    rollout: Rollout,
    trainer: Tensor,
    sampling: Sampling,
    *,
    again: Tensor | None = None,
    rescored: Callable[[Sampling], Tensor] | None = None,
    alone: tuple[Tensor, Tensor] | None = None,
    engine_logp: Tensor | None = None,
    thresholds: Mapping[str, int] | None = None,
    limit: float,
) -> str:
    """Say in one paragraph where a mismatch above `limit` [nats per token] is, and name its cause.

    It tests instead of guessing: dropout, temperature and top_p, packs, the engine, lengths, positions, then
    template or weights. `trainer` and `again` [B, S] are two scorings by the trainer, which differ only by
    dropout. `rescored` scores the same tokens in the trainer under another Sampling: leaving an option out
    shows whether only one side knows it. `alone` is (the trainer's log-probs of some rows, each by itself;
    their mask). `engine_logp` is what the engine says of them now. `thresholds` are numbers of tokens beyond
    which layers of the model change, by their names in its config.
    """
    mask = rollout.mask
    gap = logp_mismatch(trainer, rollout.logp, mask)
    head = f"policy/logp_gap is {gap:.3g} nats per token, above the limit of {limit:.3g}. "
    head += _where(rollout, trainer, limit)
    if again is not None and logp_mismatch(trainer, again, mask) > limit / 10:
        return head + "Look at dropout: the trainer gives the same tokens different log-probs on every call."

    # an option that only one of the two knows
    option = _one_sided_option(rollout, trainer, sampling, rescored, limit) if rescored is not None else ""
    if option:
        return head + f"Look at {option}; pass one Sampling to both."

    # each side once more, in another way
    if alone is not None and logp_mismatch(alone[0], trainer, alone[1]) > limit:
        apart = logp_mismatch(alone[0], trainer, alone[1])
        return head + (
            f"Look at packs: the trainer scores a row {apart:.3g} nats per token otherwise in a pack than "
            f"alone, where it is {logp_mismatch(alone[0], rollout.logp, alone[1]):.3g} from the sampler."
        )
    if engine_logp is not None and logp_mismatch(engine_logp, trainer, mask) <= limit:
        return head + (
            "Look at the sampler: asked to score the same tokens now, it agrees with the trainer. Its cache, "
            "its batches or weights that came while it sampled differ."
        )

    # wrong lengths and positions show in some tokens only, wrong weights or templates in all
    name = _threshold(rollout, trainer, limit, thresholds or {})
    if name:
        return head + (
            f"Look at {name} of the model's config: the gap is in the rows of more tokens than that, and in "
            "no other."
        )
    growth = _growth(trainer - rollout.logp, mask)
    if math.isfinite(growth) and growth > 3:
        return (
            head + f"Look at positions: the gap is {growth:.0f} times larger late in a response than early."
        )
    version = sorted(set(rollout.version.tolist()))
    if engine_logp is not None and logp_mismatch(engine_logp, rollout.logp, mask) <= limit:
        head += "Asked to score them now, the sampler agrees with itself. "
    elif engine_logp is not None:
        head += "Asked to score them now, the sampler agrees neither with the trainer nor with itself. "
    return head + (
        "Neither dropout, temperature nor top_p explains it. Look at the weights (the rollout is of version "
        f"{version}: were they loaded after the last update?), at the template (are these the tokens that "
        "the sampler was given?) and at positions."
    )


def _where(rollout: Rollout, trainer: Tensor, limit: float) -> str:
    """Say by position, row and token id where the mismatch is above the limit."""
    gap = torch.where(rollout.mask, (trainer - rollout.logp).abs(), 0).double().nan_to_num(nan=math.inf)
    above = gap > limit
    if not above.any():
        return ""
    inside, places = rollout.mask.nonzero()[:, 1], above.nonzero()[:, 1]
    rows, drawn = above.any(-1), rollout.mask.any(-1)
    row = int(gap.sum(-1).argmax())
    ids, of = rollout.tokens[above].unique(return_inverse=True)
    each = gap.new_zeros(len(ids)).index_add_(0, of, gap[above].clamp(max=1e6))
    token = int(each.argmax())
    share = 100 * float(each[token] / each.sum())
    return (
        f"It is in {len(places)} of {len(inside)} tokens: at positions {int(places.min())} to "
        f"{int(places.max())} (of {int(inside.min())} to {int(inside.max())}), in {int(rows.sum())} of "
        f"{int(drawn.sum())} rows (most in row {row}), of {len(ids)} token ids ({share:.0f} % of it at token "
        f"id {int(ids[token])}). "
    )


def _threshold(rollout: Rollout, trainer: Tensor, limit: float, thresholds: Mapping[str, int]) -> str:
    """Return the threshold of length that separates the rows with a mismatch, or ""."""
    gap = (trainer - rollout.logp).abs().nan_to_num(nan=math.inf)
    above = ((gap > limit) & rollout.mask).any(-1)
    drawn = rollout.mask.any(-1)
    for name, most in thresholds.items():
        beyond = (rollout.length > most) & drawn
        if above.equal(beyond) and not beyond.equal(drawn):
            return f"{name} = {most}"
    return ""


def _one_sided_option(
    rollout: Rollout,
    trainer: Tensor,
    sampling: Sampling,
    rescored: Callable[[Sampling], Tensor],
    limit: float,
) -> str:
    """Return the option of `sampling` that only the sampler or only the trainer has, or ""."""
    # greedy tokens are scored at temperature 1
    warm = sampling.temperature or 1.0
    own = rescored(Sampling(temperature=warm, top_p=sampling.top_p, top_k=sampling.top_k))
    variants = {
        "temperature": Sampling(top_p=sampling.top_p, top_k=sampling.top_k),
        "top_p / top_k": Sampling(temperature=warm),
        "temperature and top_p / top_k": Sampling(),
    }

    def agree(a: Tensor, b: Tensor) -> bool:
        return logp_mismatch(a, b, rollout.mask) <= limit

    # with the option one of the two is right, and without it the other
    for name, other in variants.items():
        without = rescored(other)
        if agree(without, own):
            continue
        if agree(without, trainer) and agree(own, rollout.logp):
            return f"{name}: the trainer scores without it"
        if agree(without, rollout.logp) and agree(own, trainer):
            return f"{name}: the engine samples without it"
    return ""


def check_mismatch(
    values: Mapping[str, float],
    limit: float,
    rollout: Rollout,
    sampling: Sampling,
    apply: Apply,
    params: Any,
    packs: Sequence[Packed],
    *,
    engine: Engine | None = None,
) -> None:
    """Raise ValueError with the explanation if `policy/logp_gap` is above `limit` or NaN.

    `packs` are all packs of the rollout, or this rank's. The trainer scores them only in that case: twice,
    once for each option that could explain it, and one row of each pack by itself. An `engine` that can is
    asked to score them too.
    """
    if values["policy/logp_gap"] <= limit:
        return

    def scored(packs: Sequence[Packed] = packs) -> Tensor:
        return packing.unpack(model.score(apply, params, packs), packs, rollout.logp)

    def unpacked_mask(packs: Sequence[Packed]) -> Tensor:
        return packing.unpack([p.mask for p in packs], packs, rollout.mask)

    def rescored(other: Sampling) -> Tensor:
        assert scorer is not None
        with _under(scorer, other):
            return scored()

    trainer, again = scored(), scored()
    mine = tree.replace(rollout, mask=unpacked_mask(packs))
    # the last row of each pack: as many forwards on every process
    last = [packing.single_unit(p, max(packing.count_filled(p) - 1, 0)) for p in packs]
    root = getattr(apply, "root", None)
    scorer = root if isinstance(root, Scorer) else None  # None: an apply that is not one of ours
    raise ValueError(
        explain_mismatch(
            mine,
            trainer,
            sampling,
            again=again,
            rescored=None if scorer is None else rescored,
            alone=(scored(last), unpacked_mask(last)),
            engine_logp=_scored_by(engine, rollout, sampling),
            thresholds={} if scorer is None else thresholds(scorer.parts.model),
            limit=limit,
        )
    )


def _scored_by(engine: Engine | None, rollout: Rollout, sampling: Sampling) -> Tensor | None:
    """Return the engine's log-probs [B, S] of a rollout; None where it cannot tell."""
    if engine is None or not sampling.temperature:
        return None
    try:
        if "score" not in engine.status()["supported"]:
            return None
        return engine.score(rollout, sampling=sampling)
    except (RuntimeError, ValueError, OSError):  # the mismatch is what matters
        return None


@contextmanager
def _under(scorer: Scorer, sampling: Sampling) -> Iterator[None]:
    """Make the scorer give log-probs of the distribution that `sampling` draws from."""
    before = scorer.sampling
    fused = scorer.fused
    scorer.sampling = sampling
    scorer.fused = fused and not sampling.truncates
    try:
        yield
    finally:
        scorer.sampling = before
        scorer.fused = fused
