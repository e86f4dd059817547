"""Symptoms of a run that does not learn: each is a stated rule over its metrics, with a remedy.

Windows are of 20 steps, but a run that learns nothing at all is told after 3, and one that turns from its
held reward after 10. A rule finds nothing if the run does not have its metrics, or if it needs more steps
than there are yet.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import NamedTuple, Protocol

from rft_fn.metric.by_depth import DEPTHS, GAP_AT, TURNS
from rft_fn.reward.from_spec import HELD

__all__ = ["RULES", "WARNING", "WINDOW", "Rule", "Symptom", "Warnings", "symptoms"]


WINDOW = 20  # steps of a mean
FEW = 5  # steps in a row that are no accident
STILL = 3  # steps in a row without any gradient that are none
SHARE = 0.9  # of groups or responses that counts as nearly all
ENTROPY_FLOOR = 0.02  # nats per token
CLIPPED = 0.5  # of the tokens
GAP_GROWTH = 10.0  # of the mismatch, since the first window
GAP_FLOOR = 1e-3  # nats per token, below which a mismatch is rounding
DEEPER = 4.0  # the mismatch of the deepest tokens over that of the first ones
LENGTH_GROWTH = 1.5  # of the responses, over three windows
GRADIENT_SHARE = 1e-3  # of the norm in the first window
FAR = 10.0  # of the batch, from the noise scale of its gradients
FALL = 0.02  # of an evaluation, as a share of its best value
HELD_FALL = 0.1  # of a held reward, as a share of its best window
SURE = 5.0  # standard errors of a difference that is no accident, also to the best of many windows
RISE = 0.02  # of a reward, as a share of its value before

Row = Mapping[str, float | None]


class Symptom(NamedTuple):
    """A sign that a run does not learn."""

    name: str
    sentence: str  # the numbers that show it, and what they mean
    remedy: str  # what to do

    @property
    def line(self) -> str:
        """Return the symptom as one line of a terminal."""
        return f"warning: {self.name}: {self.sentence}; {self.remedy}"


class Find(Protocol):
    """The condition of a rule."""

    def __call__(self, rows: Sequence[Row], /) -> str:
        """Return "NUMBERS, so WHAT THEY MEAN" if the metrics meet the condition, or an empty text."""
        ...


class Rule(NamedTuple):
    """A condition on the metrics of a run, and the remedy where they meet it."""

    name: str
    condition: str  # in words, as the documentation has it
    remedy: str
    find: Find


def symptoms(rows: Sequence[Row]) -> list[Symptom]:
    """Return the symptoms of a run after the last of `rows`, the metrics of its steps.

    A pure function.
    """
    found = [(rule, rule.find(rows)) for rule in RULES]
    return [Symptom(rule.name, sentence, rule.remedy) for rule, sentence in found if sentence]


def _mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a metric over a whole window of rows; NaN where some have none."""
    values = [row.get(name) for row in rows]
    numbers = [x for x in values if x is not None]
    if len(numbers) < WINDOW:
        return math.nan
    return sum(numbers) / len(numbers)


def _last(rows: Sequence[Row], name: str, back: int = 0) -> float:
    """Return the mean of a metric over the last window, or over the one `back` windows before it."""
    end = len(rows) - back * WINDOW
    return _mean(rows[max(end - WINDOW, 0) : max(end, 0)], name)


def _first(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a metric over the first window that has it.

    A policy may be frozen in the first steps.
    """
    having = (row for row in rows if row.get(name) is not None)
    return _mean(list(islice(having, WINDOW)), name)


def _rises(before: float, after: float) -> bool:
    """Return whether a reward is clearly higher than before."""
    return after > before + RISE * abs(before)


def _flat(rows: Sequence[Row]) -> str:
    share = _last(rows, "reward/flat_groups")
    reward = _last(rows, "reward/mean")
    still = 0  # steps at the end that learned nothing
    while still < len(rows) and _is_still(rows[-1 - still]):
        still += 1
    if share >= SHARE:
        return f"{share:.0%} of the groups have equal rewards (mean {reward:.3g}), so they teach nothing"
    if still >= STILL:
        return f"every group of the last {still} steps has equal rewards, so the gradient is 0"
    return ""


def _is_still(row: Row) -> bool:
    """Return whether every group of a step has equal rewards, and nothing else gave a gradient."""
    return row.get("reward/flat_groups") == 1 and row.get("grad/norm") == 0


def _truncated(rows: Sequence[Row]) -> str:
    share = _last(rows, "rollout/truncated")
    if not share >= SHARE:
        return ""
    return f"{share:.0%} of the responses are cut off, so their rewards are for what came before the end"


def _entropy(rows: Sequence[Row]) -> str:
    entropy = _last(rows, "policy/entropy")
    if not entropy < ENTROPY_FLOOR:
        return ""
    return f"the entropy is {entropy:.2g} nats per token, so samples of a prompt are nearly all alike"


def _clipped(rows: Sequence[Row]) -> str:
    share = _last(rows, "policy/clip_frac")
    if not share > CLIPPED:
        return ""
    return f"{share:.0%} of the tokens are clipped, so most of a rollout has no gradient left"


def _mismatch(rows: Sequence[Row]) -> str:
    first = _first(rows, "policy/logp_gap")
    last = _last(rows, "policy/logp_gap")
    if not last > max(GAP_GROWTH * first, GAP_FLOOR):
        return ""
    return (
        f"trainer and sampler differ by {last:.2g} nats per token, {first:.2g} in the first steps, so the "
        "gradient is not that of the policy that sampled"
    )


def _depth(rows: Sequence[Row]) -> str:
    for names in (DEPTHS, TURNS):
        known = [(name, gap) for name in names if not math.isnan(gap := _last(rows, GAP_AT + name))]
        if len(known) < 2:
            continue
        (_, first), (deepest, last) = known[0], known[-1]
        if last > max(DEEPER * first, GAP_FLOOR):
            return (
                f"trainer and sampler differ by {last:.2g} nats per token at mismatch/gap@{deepest}, and by "
                f"{first:.2g} in the first ones, so late tokens are not scored as they were sampled"
            )
    return ""


def _length(rows: Sequence[Row]) -> str:
    before = _last(rows, "rollout/length_mean", back=2)
    after = _last(rows, "rollout/length_mean")
    rewarded = _rises(_last(rows, "reward/mean", back=2), _last(rows, "reward/mean"))
    if rewarded or not after > LENGTH_GROWTH * before:
        return ""
    return (
        f"responses grew from {before:.0f} to {after:.0f} tokens in {3 * WINDOW} steps and the reward did "
        "not, so the policy learns length"
    )


def _overfitted(rows: Sequence[Row]) -> str:
    # only a new evaluation can change the answer, and only then is the whole history searched
    if not rows or rows[-1].get("eval/mean") is None:
        return ""
    places = [i for i, row in enumerate(rows) if row.get("eval/mean") is not None][-3:]
    scores = [float(rows[i]["eval/mean"] or 0) for i in places]
    if len(scores) < 3 or not scores[0] > scores[1] > scores[2]:
        return ""
    if scores[0] - scores[2] < FALL * abs(scores[0]):
        return ""

    # the training reward over the same time
    before = _last(rows[: places[0] + 1], "reward/mean")
    after = _last(rows, "reward/mean")
    if not _rises(before, after):
        return ""
    return (
        f"the evaluation fell twice, from {scores[0]:.3g} to {scores[2]:.3g}, while the reward rose from "
        f"{before:.3g} to {after:.3g}, so what is learned no longer helps elsewhere"
    )


def _held(rows: Sequence[Row]) -> str:
    for name in rows[-1] if rows else ():
        if not (name.startswith("reward/") and name.endswith(HELD)):
            continue
        both = [(row.get(name), row.get("reward/mean")) for row in rows]
        known = [(x, y) for x, y in both if x is not None and y is not None]
        for size in (FEW, WINDOW):
            if len(known) < 2 * size:
                break
            (held, least_fall), (learned, least_rise) = (_windows(x, size) for x in zip(*known))
            best = max(range(len(held)), key=held.__getitem__)
            fall, before, after = held[best] - held[0], learned[best], learned[0]
            fell = fall > max(HELD_FALL * abs(held[best]), least_fall)
            if fell and _rises(before, after) and after - before > least_rise:
                return (
                    f"{name} fell from {held[best]:.3g} to {held[0]:.3g} while the reward that is learned "
                    f"rose from {before:.3g} to {after:.3g}, so the policy has found what that reward is "
                    "wrong about"
                )
    return ""


def _windows(values: Sequence[float], size: int) -> tuple[list[float], float]:
    """Return (means of whole windows, the last one first; the least difference that is no accident).

    The noise of a step is that of the differences of neighbours, which a trend hardly moves.
    """
    means = [sum(values[end - size : end]) / size for end in range(len(values), size - 1, -size)]
    noise = sum((y - x) ** 2 for x, y in pairwise(values)) / (2 * (len(values) - 1))
    return means, SURE * math.sqrt(noise * 2 / size)


def _rate(rows: Sequence[Row]) -> str:
    rates = [row.get("lr") for row in rows[-FEW:]]
    if len(rates) < FEW or any(x != 0 for x in rates):
        return ""
    return f"the learning rate of the last {FEW} steps is 0, so nothing is learned"


def _gradient(rows: Sequence[Row]) -> str:
    first = _first(rows, "grad/norm")
    last = _last(rows, "grad/norm")
    if not last < GRADIENT_SHARE * first:
        return ""
    return f"the gradients' norm is {last:.2g}, {first:.2g} in the first steps, so the policy hardly moves"


def _snr(rows: Sequence[Row]) -> tuple[float, float]:
    """Return (mean signal to noise of the last gradients that were measured, prompts of their batches).

    NaN where there are too few, and for the prompts where no batch had a signal.
    """
    found = [row for row in rows if row.get("grad/snr") is not None][-FEW:]
    ratios = [row["grad/snr"] or 0.0 for row in found]
    if len(found) < FEW:
        return math.nan, math.nan
    prompts = [x * (row.get("grad/noise_scale") or math.nan) for x, row in zip(ratios, found)]
    sizes = [x for x in prompts if not math.isnan(x)]
    return sum(ratios) / FEW, sizes[-1] if sizes else math.nan


def _small_batch(rows: Sequence[Row]) -> str:
    ratio, prompts = _snr(rows)
    if not ratio < 1 / FAR:
        return ""
    if ratio <= 0 or math.isnan(prompts):
        return f"the last {FEW} measured gradients have no signal above their noise, so steps go nowhere"
    return (
        f"a step has {prompts:.0f} prompts and the noise scale is about {prompts / ratio:.0f}, so a step is "
        "mostly noise"
    )


def _large_batch(rows: Sequence[Row]) -> str:
    ratio, prompts = _snr(rows)
    if not ratio > FAR:
        return ""
    return (
        f"a step has {prompts:.0f} prompts and the noise scale is about {prompts / ratio:.0f}, so half of "
        "them would give nearly the same step"
    )


RULES = (
    Rule(
        "flat_groups",
        f"at least {SHARE:.0%} of the groups have equal rewards, over {WINDOW} steps, or all of them over "
        f"{STILL} steps without any gradient",
        "take easier prompts (harder ones where all are solved), a larger --group or --rounds, or a reward "
        "with more than two values",
        _flat,
    ),
    Rule(
        "truncated",
        f"at least {SHARE:.0%} of the responses are truncated, over {WINDOW} steps",
        "raise --max-new, or begin with a model that ends its responses, as rft run sft makes one",
        _truncated,
    ),
    Rule(
        "entropy",
        f"the entropy is below {ENTROPY_FLOOR} nats per token, over {WINDOW} steps",
        "lower --lr, raise --clip-high or --temperature, add --kl or --entropy-target, or stop here if the "
        "task is solved",
        _entropy,
    ),
    Rule(
        "clipped",
        f"more than {CLIPPED:.0%} of the tokens are clipped, over {WINDOW} steps",
        "lower --lr, or take fewer --epochs or --minibatches from a rollout",
        _clipped,
    ),
    Rule(
        "mismatch",
        f"trainer and sampler differ by over {GAP_GROWTH:.0f} times as much as in the first {WINDOW} steps, "
        f"and by over {GAP_FLOOR} nats per token",
        "give --mismatch tis, and look for what the engine computes otherwise: precision, sampling, stale "
        "weights",
        _mismatch,
    ),
    Rule(
        "depth",
        f"trainer and sampler differ over {DEEPER:.0f} times as much at the deepest positions or turns as at "
        f"the first (mismatch/gap@...), and by over {GAP_FLOOR} nats per token, over {WINDOW} steps",
        "look for what the engine computes otherwise in late tokens: RoPE, a window, YaRN, states of "
        "recurrent layers, templates; rft check-engine MODEL finds the position",
        _depth,
    ),
    Rule(
        "length",
        f"responses grew by over half within {3 * WINDOW} steps, and the reward did not",
        "give --overlong, lower --max-new, or weight tokens as --algorithm dr_grpo does",
        _length,
    ),
    Rule(
        "overfitted",
        "of three evaluations each is below the one before, while the reward of training rises",
        "take the best checkpoint instead of the last, give more prompts or --kl, and read responses with "
        "high rewards",
        _overfitted,
    ),
    Rule(
        "held",
        f"a held reward is over {HELD_FALL:.0%} below its best {FEW} or {WINDOW} steps, and the one that is "
        f"learned rose, both by over {SURE:.0f} standard errors",
        "take the checkpoint of its best steps, add --kl, mend the reward that is learned, and read the "
        "responses at its 99th percentile (trajectories.jsonl, rft report)",
        _held,
    ),
    Rule(
        "learning_rate",
        f"the learning rate is 0 for {FEW} steps",
        "raise --lr or --lr-end, or give the --steps that the run is to have",
        _rate,
    ),
    Rule(
        "gradient",
        f"the norm of the gradients is below {GRADIENT_SHARE} of that in the first {WINDOW} steps",
        "see whether groups still differ in reward (reward/flat_groups), and whether tokens are clipped "
        "(policy/clip_frac)",
        _gradient,
    ),
    Rule(
        "small_batch",
        f"the signal of the gradients is below 1 / {FAR:.0f} of their noise (grad/snr), in the mean of the "
        f"last {FEW} that were measured",
        "raise --prompts (the batch, where nothing is sampled) towards the noise scale, or lower --lr, "
        "unless the reward rises as it should",
        _small_batch,
    ),
    Rule(
        "large_batch",
        f"the signal of the gradients is over {FAR:.0f} times their noise (grad/snr), in the mean of the "
        f"last {FEW} measured",
        "lower --prompts (the batch, where nothing is sampled) to a few times the noise scale, and take "
        "more steps instead",
        _large_batch,
    ),
)
"""Every rule, in the order in which symptoms are listed."""


WARNING = "warning/"
"""How the name of a symptom's metric begins."""


class Warnings:
    """The symptoms of a run; `rows` are the metrics of its steps so far."""

    def __init__(self, rows: Sequence[Row] = ()):
        self.rows = list(rows)
        self.shown: dict[str, None] = {}  # names, in the order in which they were found
        for row in rows:
            for name in row:
                if name.startswith(WARNING):
                    self.shown[name.removeprefix(WARNING)] = None

    def note(self, row: Row) -> tuple[list[str], dict[str, float]]:
        """Return (lines to show, metrics to add) after a step with the metrics `row`.

        The metric of a symptom is 1 where the run has it, 0 where it had it before, and else absent.
        """
        self.rows.append(row)
        found = symptoms(self.rows)
        lines = [x.line for x in found if x.name not in self.shown]
        self.shown |= dict.fromkeys(x.name for x in found)
        here = {x.name for x in found}
        return lines, {WARNING + name: float(name in here) for name in self.shown}
