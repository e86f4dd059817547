"""Learning from preferences: options that go together, rows of a batch with their labels, baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from rft_fn import data, packing, tree, weight
from rft_fn.limits import AtLeast0, Count, Positive, Range, Share
from rft_fn.loss import PREFERENCES, Preference
from rft_fn.run import options
from rft_fn.run.cli import without
from rft_fn.run.setup import Setup
from rft_fn.types import Experience, TrainState

__all__ = [
    "Preferences",
    "check_options",
    "experience",
    "mismatched",
    "rewards_mean",
    "with_margin",
    "with_reference",
]


@dataclass(frozen=True)
class Preferences(
    options.Recorded,
    options.HeldOut,
    options.Optimizer,
    options.Reference,
    options.Examples,
    options.Policy,
    options.Data,
    options.Model,
    subject="Preferences",
    first=("loss", "beta", "messages", "unpaired", "max_length"),
):
    """A run that learns from responses that are compared or labelled."""

    # the responses
    template: str = "{prompt}"  # the prompt; {NAME} stands for a column; "": what both responses begin with
    chosen: str = "{chosen}"  # the better response; {NAME} stands for a column of the row
    rejected: str = "{rejected}"  # the worse response; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages: prompt chosen rejected, or the last two alone
    max_length: Count = 512  # most tokens in a prompt with one response; longer pairs of a file are left out
    eval_pairs: Count = 256  # pairs of an evaluation; all of a file that has fewer
    unpaired: bool = False  # rows hold one response and a label; for losses of single responses: kto, bco
    completion: str = "{completion}"  # unpaired: the response; {NAME} stands for a column of the row
    label: str = "label"  # unpaired: column that is true, or above 0.5, where the response is desirable

    # the loss
    loss: str = "dpo"  # a row of rft_fn.loss.PREFERENCES; kto and bco are of single responses
    beta: Positive | None = None  # hold on the reference: reward / log(policy / reference); None: the paper's
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0  # cdpo: the share of wrong labels
    average: bool = False  # log-probs are means over the tokens of a response, as TRL's ipo has them
    nll: AtLeast0 | None = None  # coefficient of -log pi of the chosen side, a mean over its tokens (RPO)
    ld_alpha: Share = 1.0  # share at which tokens count that the longer response has more (LD-DPO); 1 is off
    margin: AtLeast0 = 1.0  # simpo: by how much the chosen response shall win
    desirable_weight: Positive = 1.0  # kto: of the loss of desirable responses
    undesirable_weight: Positive = 1.0  # kto: of the loss of undesirable responses

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in PREFERENCES:
            raise ValueError(f"loss: expected one of {', '.join(PREFERENCES)}, got {self.loss!r}")
        # what is stored in config.json, and compared when a run is resumed, are the numbers that were used
        own = self.row
        object.__setattr__(self, "beta", own.beta if self.beta is None else self.beta)
        object.__setattr__(self, "nll", own.nll if self.nll is None else self.nll)

    @property
    def row(self) -> Preference:
        """Return the loss as a row of the table."""
        return PREFERENCES[self.loss]

    @property
    def unit(self) -> int:
        """Return how many rows share a pack: both sides of a pair, or one."""
        return 1 if self.unpaired else 2


# losses that read an option, which others must leave alone
READ = {
    "label_smoothing": ("cdpo", "robust", "exo", "cpo", "simpo"),
    "margin": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


def check_options(cfg: Preferences) -> None:
    """Raise ValueError for options that do not go together."""
    # packs and batches hold whole pairs
    without(cfg.strategy, "train_batch_size", instead="use --batch, which counts pairs")
    if cfg.strategy.micro_train_batch_size == 1 and not cfg.unpaired:
        raise ValueError("micro_train_batch_size: expected 0 or at least 2, a pair shares a pack, got 1")

    # an option that the loss or the kind of data does not read
    noisy, smoothed = cfg.loss in ("cdpo", "robust"), cfg.label_smoothing > 0
    if (noisy and not smoothed) or (smoothed and cfg.loss not in READ["label_smoothing"]):
        raise ValueError(
            f"label_smoothing: expected above 0 with --loss {cfg.loss if noisy else 'cdpo'}, and 0 with "
            f"others, got {cfg.label_smoothing} with {cfg.loss}"
        )
    for option, losses in READ.items():
        if option != "label_smoothing" and cfg.loss not in losses:
            without(cfg, option, prefix="", instead=f"only --loss {losses[0]} reads it")
    if cfg.unpaired and not cfg.row.single:
        raise ValueError(f"loss: expected kto or bco with --unpaired, which compares nothing, got {cfg.loss}")
    if cfg.ld_alpha < 1 and (cfg.row.single or cfg.row.mean or cfg.average):
        raise ValueError(f"ld_alpha: expected 1 with {cfg.loss}, not of sums of pairs, got {cfg.ld_alpha}")
    if cfg.nll and cfg.row.single:
        raise ValueError(f"nll: expected 0 with {cfg.loss}, a loss of single responses, got {cfg.nll}")
    if cfg.loss == "kto" and cfg.batch < 2:
        raise ValueError("batch: expected at least 2 with kto, whose baseline is of other prompts, got 1")
    foreign = ("chosen", "rejected") if cfg.unpaired else ("completion", "label")
    without(cfg, *foreign, prefix="", instead="--unpaired says what a row holds")
    if cfg.messages:
        texts = ("template", "chosen", "rejected", "completion")
        without(cfg, *texts, prefix="", instead="--messages takes its place")
    if not cfg.template and cfg.system is not None:
        raise ValueError("system: expected none with an empty template: the texts hold their own turns")


# ---------- rows of a batch: pairs as rows 2i, chosen, and 2i + 1, rejected; or single responses


def _responses(items: Sequence[data.Pair] | Sequence[data.Point]) -> list:
    """Return the responses of a batch, each with its prompt, row by row."""
    sides = [(x.chosen, x.rejected) if isinstance(x, data.Pair) else (x.response,) for x in items]
    return [side for row in sides for side in row]


def experience(cfg: Preferences, items: Sequence) -> Experience:
    """Return the rows of a batch; w is the mean over pairs, or over single responses with their labels."""
    exp = packing.conversations(_responses(items))
    if not cfg.row.single:
        return tree.replace(exp, w=weight.pair_mean(exp.mask))
    labels = [x.labels[0] for x in items] if cfg.unpaired else [1.0, 0.0] * len(items)
    desirable = torch.tensor(labels)[:, None] * exp.mask
    return tree.replace(exp, w=weight.seq_mean(exp.mask), extra={"desirable": desirable})


def mismatched(cfg: Preferences, items: Sequence) -> Experience:
    """Return each prompt with the response to the next one, on which KTO estimates its KL."""
    rows = _responses(items)
    other = [*rows[cfg.unit :], *rows[: cfg.unit]]
    start = [row.mask.index(True) for row in rows]
    parts = zip(rows, start, other, [*start[cfg.unit :], *start[: cfg.unit]])
    joined = [
        ([*a.ids[:i], *b.ids[j:]], [*a.mask[:i], *b.mask[j:]], a.media if i else None) for a, i, b, j in parts
    ]
    return packing.conversations(joined)


def with_reference(
    cfg: Preferences, env: Setup, state: TrainState, items: Sequence, shift: float
) -> Experience:
    """Return the rows of a batch with all that the loss reads: reference log-probs, and a baseline."""
    exp = experience(cfg, items)
    if env.reference is not None:
        exp = tree.replace(exp, ref_logp=env.score(env.reference, state, exp, unit=cfg.unit).logp)
    if cfg.loss == "kto":
        assert env.reference is not None, "kto has a reference"
        others = mismatched(cfg, items)
        logp = env.score(env.policy, state, others, unit=cfg.unit).logp
        ref_logp = env.score(env.reference, state, others, unit=cfg.unit).logp
        shift = float((logp - ref_logp).sum(-1).mean().clamp(min=0))
    if exp.extra is None:  # a loss of pairs
        return exp
    return tree.replace(exp, extra=exp.extra | {"baseline": shift * exp.mask.to(exp.w)})


# ---------- metrics


def with_margin(values: dict[str, float]) -> dict[str, float]:
    """Add the margin of single responses: the difference of the mean rewards, where there are both kinds."""
    for name in ("responses", "eval"):
        chosen, rejected = (values.get(f"{name}/reward_{side}") for side in ("chosen", "rejected"))
        if chosen is not None and rejected is not None:
            values.setdefault(f"{name}/margin", chosen - rejected)
    return values


def rewards_mean(cfg: Preferences, shift: float, values: Mapping[str, float], middles: int) -> float:
    """Return BCO's running mean of rewards: of the middle of both kinds, over the steps that have one.

    A step whose batch has responses of one kind has no middle, and leaves the mean as it is; `middles` is the
    number of those that it has seen. With as many responses of both kinds it is TRL's mean over responses.
    """
    if cfg.loss != "bco":
        return shift
    name = "responses" if cfg.unpaired else "pairs"
    sides = [values[key] for key in (f"{name}/reward_chosen", f"{name}/reward_rejected") if key in values]
    if len(sides) < 2:
        return shift
    return shift + (sum(sides) / 2 - shift) / (middles + 1)
