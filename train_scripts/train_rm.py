"""Training a scalar reward model: labelled responses, packs, scores, loss, gradients, update.

    python train_scripts/train_rm.py                                     # pairs of a built-in task
    python train_scripts/train_rm.py --model MODEL --data pairs.jsonl=0.7 hub/pairs=0.3
    python train_scripts/train_rm.py --model MODEL --data rated.jsonl --kind points --heads helpful format

`--kind` is the form of the rows: pairs (prompt, chosen, rejected), lists (prompt, completions, ranks or
scores), points (prompt, completion, a number for each head), steps (prompt, completions, labels).
Run the same command again to resume from the last checkpoint, to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.limits import AtLeast0, AutoCount, Count, Decay, Filled, Free, Positive, Range, Warmup


@dataclass(frozen=True)
class Config(rft.run.RewardModelRun, first=("loss",)):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # the loss
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0  # pairs: the share of wrong labels
    centering: AtLeast0 = 0.0  # pairs: coefficient of the squared sum of both scores, as 0.01
    loss: Literal["mse", "bce"] = "bce"  # points, steps: of numbers, or of shares and booleans in [0, 1]

    # other defaults than those of the subjects
    model: Filled = "tiny"  # tiny, tiny-vl ..., smollm2-135m, a folder, or a hub name, under the heads
    budget: Free[AutoCount] = 2048  # most tokens in a pack, auto: by the forecast of memory; a unit must fit
    steps: Count | None = None  # updates; None is 300
    epochs: Positive | None = None  # passes over the rows of data, in place of steps; not for tasks
    batch: Count = 64  # rows per step: pairs, lists, points or responses of steps
    lr: Positive = 1e-3  # learning rate
    warmup: Warmup = 30  # steps of linear warm-up; below 1 a share of the run
    beta2: Decay = 0.99  # decay of AdamW's second moment
    eval_every: Free[Count] = 50  # steps between evaluations
    out: Free[Filled] = "runs/rm"  # folder of the run; the model goes to its subfolder model


def pairs_batch(items: Sequence[rft.data.Pair]) -> tuple[rft.Experience, Any]:
    """Pairs as rows 2i, chosen, and 2i + 1, rejected; w is the mean over pairs."""
    sides = [side for pair in items for side in (pair.chosen, pair.rejected)]
    exp = rft.packing.scored([(side.ids, side.media) for side in sides])
    preference = torch.tensor([pair.preferences for pair in items]).repeat_interleave(2, 0)
    margin = torch.tensor([pair.margin for pair in items]).repeat_interleave(2)
    extra = {"preference": at_ends(exp, preference), "margin": at_ends(exp, margin)}
    return rft.tree.replace(exp, w=rft.weight.pair_mean(exp.mask), extra=extra), 2


def pairs_sides(out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, Tensor, Tensor]:
    """(scores of the better side, of the worse one, whether there is one), each [P, H]."""
    chosen, rejected = both_sides(out.score, b)
    preference, _ = both_sides(b.extra["preference"], b)
    better = torch.where(preference < 0, rejected, chosen)
    worse = torch.where(preference < 0, chosen, rejected)
    return better, worse, preference != 0


def pairs_loss(cfg: Config, name: str, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """The Bradley-Terry loss of a pair [T], a mean over its heads, and what one reads of pairs."""
    better, worse, told = pairs_sides(out, b)
    margin, _ = rft.packing.sides(b.extra["margin"], b)
    total = torch.zeros_like(margin)
    for h in range(better.shape[1]):
        sides = better[:, h], worse[:, h]
        each = rft.loss.bradley_terry(*sides, margin=margin, label_smoothing=cfg.label_smoothing)
        if cfg.centering:
            each = each + cfg.centering * rft.loss.centering(*sides)
        total = total + torch.where(told[:, h], each, 0)
    loss = total / told.sum(-1).clamp(min=1)

    metrics = rft.metric.preference(name, better, worse, told)
    for h, head in several(cfg):
        metrics |= rft.metric.preference(f"{name}/{head}", better[:, h], worse[:, h], told[:, h])
    return loss[b.seq // 2], metrics


def pairs_by_negative(items: Sequence[rft.data.Pair], out: rft.TokenOut, b: rft.Packed) -> dict:
    """Accuracy on the pairs of a task for each kind of wrong answer; the mean hides the weakest of them."""
    better, worse, told = pairs_sides(out, b)
    right = (better > worse).double()
    kinds = [pair.columns.get("negative") for pair in items]
    found = {}
    for name in rft.data.wrong_answers.NEGATIVES:
        of = torch.tensor([kind == name for kind in kinds])[:, None]
        if of.any():
            found[f"eval/accuracy/{name}"] = rft.metric.mean(right, told & of)
    return found


def pairs_calibration(heads: Sequence[rft.model.Head], out: rft.TokenOut, b: rft.Packed) -> list:
    """Heads whose differences of scores are logits of a preference."""
    better, worse, told = pairs_sides(out, b)
    found = []
    for h, head in enumerate(heads):
        sides = better[told[:, h], h, None], worse[told[:, h], h, None]
        found += rft.model.tempered(*sides, [head])
    return found


def lists_batch(items: Sequence[rft.data.Ranked]) -> tuple[rft.Experience, Any]:
    """The responses of each list one after the other; w is the mean over lists."""
    exp = rft.packing.scored([(x.ids, x.media) for item in items for x in item.responses])
    unit = [len(item.responses) for item in items]
    rank = torch.tensor([float(rank) for item in items for rank in item.ranks])
    w = rft.weight.unit_sum(exp.mask, unit)
    return rft.tree.replace(exp, w=w, extra={"rank": at_ends(exp, rank)}), unit


def lists_rows(out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, Tensor, Tensor]:
    """(score, rank, list) of each response, [K]."""
    score = rft.segment.sum(out.score[:, 0], b.mask, b.seq, b.num_seqs)
    rank = rft.segment.sum(b.extra["rank"], b.mask, b.seq, b.num_seqs)
    return score, rank, rft.packing.unit_of(b)


def lists_loss(cfg: Config, name: str, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """The Plackett-Luce loss of each response [T], and what one reads of lists."""
    rows = lists_rows(out, b)
    return rft.loss.plackett_luce(*rows)[b.seq], rft.metric.ranking(name, *rows)


def lists_calibration(heads: Sequence[rft.model.Head], out: rft.TokenOut, b: rft.Packed) -> list:
    """The head whose differences of scores are logits of a preference, by all pairs of a list."""
    score, rank, unit = lists_rows(out, b)
    i, j = ((unit[:, None] == unit) & (rank[:, None] < rank)).nonzero(as_tuple=True)
    return list(rft.model.tempered(score[i, None], score[j, None], heads))


def points_batch(items: Sequence[rft.data.Point]) -> tuple[rft.Experience, Any]:
    """A row for each response; w is the mean over them."""
    exp = rft.packing.scored([(item.response.ids, item.response.media) for item in items])
    label = torch.tensor([item.labels for item in items])
    return rft.tree.replace(exp, extra={"label": at_ends(exp, label)}), 1


def steps_batch(items: Sequence[rft.data.Steps]) -> tuple[rft.Experience, Any]:
    """A row for each response, with a score at the end of each step; w is the mean over all steps."""
    rows = [(item.response.ids, item.response.media) for item in items]
    exp = rft.packing.scored(rows, ends=[item.ends for item in items])
    label = torch.zeros(exp.mask.shape)
    label[exp.mask] = torch.tensor([x for item in items for x in item.labels])
    w = rft.weight.token_mean(exp.mask)
    return rft.tree.replace(exp, w=w, extra={"label": label[..., None]}), 1


def labels_loss(cfg: Config, name: str, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """The loss of each score [T], a mean over heads, and how far scores are from their labels."""
    label = b.extra["label"]
    mask = b.mask[:, None].expand(label.shape)
    if cfg.loss == "mse":
        each = rft.loss.score_mse(out.score, label)
        right = {"mse": each}
    else:
        each = rft.loss.score_bce(out.score, label)
        right = {"correct": ((out.score > 0) == (label > 0.5)).double()}

    metrics: dict[str, Any] = {}
    for key, x in right.items():
        metrics[f"{name}/{key}"] = rft.metric.mean(x, mask)
        metrics |= {f"{name}/{head}/{key}": rft.metric.mean(x[:, h], b.mask) for h, head in several(cfg)}
    if cfg.loss == "bce":
        metrics[f"{name}/ece"] = rft.metric.calibration(torch.sigmoid(out.score), label, mask)
    return each.mean(-1), metrics


def labels_calibration(heads: Sequence[rft.model.Head], out: rft.TokenOut, b: rft.Packed) -> list:
    """Heads whose scores have mean 0 and deviation 1."""
    return list(rft.model.standardized(out.score[b.mask], heads))


class Kind(NamedTuple):
    """All that differs between the forms of rows."""

    items: rft.data.Kind
    reads: tuple[str, ...]  # options of its loss that some other kind does not read
    batch: Callable[..., tuple[rft.Experience, Any]]  # (items) -> rows, and how many belong together
    loss: Callable[..., tuple[Tensor, dict]]  # (cfg, name of metrics, out, b) -> [T], metrics
    calibration: Callable[..., list]  # (heads, out, b) -> heads


KINDS = {
    "pairs": Kind(
        rft.data.PAIRS, ("label_smoothing", "centering"), pairs_batch, pairs_loss, pairs_calibration
    ),
    "lists": Kind(rft.data.LISTS, (), lists_batch, lists_loss, lists_calibration),
    "points": Kind(rft.data.POINTS, ("loss",), points_batch, labels_loss, labels_calibration),
    "steps": Kind(rft.data.STEPS, ("loss",), steps_batch, labels_loss, labels_calibration),
}


def several(cfg: Config) -> list[tuple[int, str]]:
    """Number and name of each of several heads, which have metrics; one head has none but those of all."""
    if len(cfg.heads) < 2:
        return []
    return list(enumerate(cfg.heads))


def at_ends(exp: rft.Experience, x: Tensor) -> Tensor:
    """x [B] or [B, H] at the tokens in mask, [B, S] or [B, S, H]."""
    mask = exp.mask.view(*exp.mask.shape, *[1] * (x.dim() - 1))
    return torch.where(mask, x[:, None], 0)


def both_sides(x: Tensor, b: rft.Packed) -> tuple[Tensor, Tensor]:
    """The numbers of both rows of each pair: x [T, H] -> ([P, H], [P, H])."""
    sides = [rft.packing.sides(column, b) for column in x.unbind(-1)]
    return torch.stack([first for first, _ in sides], -1), torch.stack([second for _, second in sides], -1)


def check(cfg: Config) -> None:
    """Raise ValueError for options that do not go together."""
    rft.run.without(cfg.strategy, "train_batch_size", instead="use --batch, which counts rows")
    rft.run.check_labelled(cfg)

    # options of the losses of other kinds of rows
    reads = KINDS[cfg.kind].reads
    others = [name for kind in KINDS.values() for name in kind.reads if name not in reads]
    rft.run.without(cfg, *others, prefix="", instead=f"--kind {cfg.kind} has no use for it")
    if len(cfg.heads) > 1 and cfg.kind in ("lists", "steps"):
        raise ValueError(f"heads: expected one with --kind {cfg.kind}, got {', '.join(cfg.heads)}")


def load(cfg: Config, st: rft.Strategy) -> rft.run.Task:
    """Load the rows to train on, and the unseen ones to evaluate on."""
    tokenizer = rft.model.load_tokenizer(cfg.model)
    processing = rft.run.load_processing(cfg, cfg.model)
    items, shares = KINDS[cfg.kind].items, cfg.loss == "bce"
    dataset, unseen = rft.run.load_labelled(cfg, st, tokenizer, processing, items, shares=shares)
    return rft.run.Task(tokenizer, dataset, unseen, None, processing)


class Loop(NamedTuple):
    """What a checkpoint brings back beside the state of the model."""

    step: int = 0


def main(cfg: Config) -> None:
    check(cfg)
    env = rft.run.setup(
        cfg,
        usual=300,
        load=load,
        batch=cfg.batch,
        what=cfg.kind,
        load_module=rft.run.load_reward_model,
        sampled=False,
    )
    cfg, st, task, kind = env.cfg, env.st, env.task, KINDS[cfg.kind]
    state, loop = env.restore(env.policy.state, Loop())
    loss_fn = partial(kind.loss, cfg, cfg.kind)
    unseen, _ = rft.data.take(task.unseen, cfg.eval_items, cfg.seed)
    held_out, unit_of_held_out = kind.batch(unseen)

    def score_held_out(state: rft.TrainState):
        """Return (the outputs, the rows) of the evaluation as one pack, the same on every rank."""
        with env.phase("evaluate"):
            found = st.score(env.policy.apply, state.params, held_out, cfg.budget, fields=("score",))
        return rft.run.as_one_pack(held_out, unit_of_held_out, found.score)

    def evaluate(state: rft.TrainState) -> dict[str, float]:
        """Return the loss and the metrics of unseen rows."""
        out, b = score_held_out(state)
        loss, metrics = kind.loss(cfg, "eval", out, b)
        if cfg.kind == "pairs":
            metrics |= pairs_by_negative(unseen, out, b)
        return rft.metric.results(metrics | {"eval/loss": rft.metric.sum(b.w * loss)})

    for step in range(loop.step, cfg.steps):
        values = evaluate(state) if step == 0 else {}

        # learn
        items, _ = rft.data.draw(task.dataset, cfg.batch, step, cfg.seed)
        exp, unit = kind.batch(items)
        with env.phase("train"):
            packs = st.shard(exp, cfg.budget, unit=unit, halves=cfg.halves(step))
            rate = env.policy.schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, env.policy.apply, loss_fn, packs)
            state, more = st.update(state, grads)

        # report, save, and stop where a signal asked for it
        values |= rft.metric.results(metrics | more) | {"lr": rate}
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= evaluate(state)
        env.run.write(step, values, tokens=int(exp.length.sum()))
        env.checkpoint(state, Loop(step=step + 1))

    # the calibration of the scores by held-out rows, with its picture
    module = env.policy.module
    shown = score_held_out(state)
    rft.run.calibrate(st, module, partial(kind.calibration, module.heads, *shown))
    _, metrics = kind.loss(cfg, "eval", *shown)
    if "eval/ece" in metrics:
        env.run.reliability(metrics["eval/ece"])
    env.finish(state, merge=False)


if __name__ == "__main__":
    rft.run.cli(main, Config)
