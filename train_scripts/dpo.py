"""Learning from preferences: responses, reference log-probs, packs, loss, gradients, update.

    python train_scripts/dpo.py --model runs/sft/model --data pairs.jsonl
    python train_scripts/dpo.py --model MODEL --data chats.jsonl --messages prompt chosen rejected
    python train_scripts/dpo.py --model MODEL --data rated.jsonl --unpaired --loss kto

A row has the columns prompt, chosen and rejected; with --unpaired it has prompt, completion and label.
Without --data the rows are those of a built-in task. `--loss` is a row of rft_fn.loss.PREFERENCES.
Run the same command again to resume from the last checkpoint, to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Filled, Free, Positive, Range, Share, Whole
from rft_fn.run import options


@dataclass(frozen=True)
class Config(
    options.Recorded,
    options.HeldOut,
    options.Optimizer,
    options.Examples,
    options.Policy,
    options.Data,
    options.Model,
):
    """A resumed run may change the options that change no result; for others it needs --override."""

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
    loss: Literal[
        "dpo",
        "cdpo",
        "ipo",
        "robust",
        "hinge",
        "exo",
        "nca",
        "sppo",
        "apo_zero",
        "apo_down",
        "rpo",
        "dpo_norm",
        "cpo",
        "simpo",
        "orpo",
        "kto",
        "bco",
    ] = "dpo"  # of a pair, or of a single response: kto, bco
    beta: Positive | None = None  # hold on the reference: reward / log(policy / reference); None: the paper's
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0  # cdpo: the share of wrong labels
    average: bool = False  # log-probs are means over the tokens of a response, as TRL's ipo has them
    nll: AtLeast0 | None = None  # coefficient of -log pi of the chosen side, a mean over its tokens (RPO)
    ld_alpha: Share = 1.0  # share at which tokens count that the longer response has more (LD-DPO); 1 is off
    margin: AtLeast0 = 1.0  # simpo: by how much the chosen response shall win
    desirable_weight: Positive = 1.0  # kto: of the loss of desirable responses
    undesirable_weight: Positive = 1.0  # kto: of the loss of undesirable responses

    # other defaults than those of the subjects
    model: Filled = "tiny"  # tiny, tiny:TASK:LEVEL, smollm2-135m, a folder, or a hub name; the reference too
    budget: Free[Count] = 1024  # most tokens in a pack, which goes through the model at once; a pair must fit
    steps: Count | None = None  # updates; None is 100
    epochs: Positive | None = None  # passes over the pairs of data, in place of steps; not for tasks
    batch: Count = 64  # pairs per step
    lr: Positive = 3e-4  # learning rate
    warmup: Whole = 10  # steps of linear warm-up
    eval_every: Free[Count] = 20  # steps between evaluations
    out: Free[Filled] = "runs/dpo"  # folder of the run; the model goes to its subfolder model

    def __post_init__(self) -> None:
        super().__post_init__()
        # what is stored in config.json, and compared when a run is resumed, are the numbers that were used
        own = rft.loss.PREFERENCES[self.loss]
        object.__setattr__(self, "beta", own.beta if self.beta is None else self.beta)
        object.__setattr__(self, "nll", own.nll if self.nll is None else self.nll)

    @property
    def row(self) -> rft.loss.Preference:
        """Return the loss as a row of the table."""
        return rft.loss.PREFERENCES[self.loss]

    @property
    def means(self) -> bool:
        """Return whether the loss reads means over tokens, in place of sums."""
        return self.average or self.row.mean

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


def check(cfg: Config) -> None:
    """Raise ValueError for options that do not go together."""
    # packs and batches hold whole pairs
    rft.run.without(cfg.strategy, "train_batch_size", instead="use --batch, which counts pairs")
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
            rft.run.without(cfg, option, prefix="", instead=f"only --loss {losses[0]} reads it")
    if cfg.unpaired and not cfg.row.single:
        raise ValueError(f"loss: expected kto or bco with --unpaired, which compares nothing, got {cfg.loss}")
    if cfg.ld_alpha < 1 and (cfg.row.single or cfg.means):
        raise ValueError(f"ld_alpha: expected 1 with {cfg.loss}, not of sums of pairs, got {cfg.ld_alpha}")
    if cfg.nll and cfg.row.single:
        raise ValueError(f"nll: expected 0 with {cfg.loss}, a loss of single responses, got {cfg.nll}")
    if cfg.loss == "kto" and cfg.batch < 2:
        raise ValueError("batch: expected at least 2 with kto, whose baseline is of other prompts, got 1")
    foreign = ("chosen", "rejected") if cfg.unpaired else ("completion", "label")
    rft.run.without(cfg, *foreign, prefix="", instead="--unpaired says what a row holds")
    if cfg.messages:
        texts = ("template", "chosen", "rejected", "completion")
        rft.run.without(cfg, *texts, prefix="", instead="--messages takes its place")
    if not cfg.template and cfg.system is not None:
        raise ValueError("system: expected none with an empty template: the texts hold their own turns")


def load(cfg: Config, st: rft.Strategy) -> rft.run.Task:
    """Load the rows to train on, and the unseen ones to evaluate on."""
    tokenizer = rft.model.load_tokenizer(cfg.model)
    processing = rft.run.load_processing(cfg, cfg.model)
    read = partial(
        rft.run.load_data,
        cfg,
        st,
        tokenizer,
        processing,
        max_length=cfg.max_length,
        max_tokens=cfg.budget,
        window=rft.model.read_window(cfg.model),
    )
    if cfg.unpaired:
        found = read(kind=rft.data.POINTS, completion=cfg.completion, labels=(cfg.label,), shares=True)
    else:
        found = read(kind=rft.data.PAIRS, chosen=cfg.chosen, rejected=cfg.rejected)
    return rft.run.Task(tokenizer, *found, None, processing)


# ---------- batches: pairs as rows 2i, chosen, and 2i + 1, rejected; or single responses


def lessons(items: Sequence[rft.data.Pair] | Sequence[rft.data.Point]) -> list:
    """Return the responses of a batch, each with its prompt, row by row."""
    sides = [(x.chosen, x.rejected) if isinstance(x, rft.data.Pair) else (x.response,) for x in items]
    return [side for row in sides for side in row]


def experience(cfg: Config, items: Sequence) -> rft.Experience:
    """Return the rows of a batch; w is the mean over pairs, or over single responses with their labels."""
    exp = rft.packing.conversations(lessons(items))
    if not cfg.row.single:
        return rft.tree.replace(exp, w=rft.weight.pair_mean(exp.mask))
    labels = [x.labels[0] for x in items] if cfg.unpaired else [1.0, 0.0] * len(items)
    desirable = torch.tensor(labels)[:, None] * exp.mask
    return rft.tree.replace(exp, w=rft.weight.seq_mean(exp.mask), extra={"desirable": desirable})


def mismatched(cfg: Config, items: Sequence) -> rft.Experience:
    """Return each prompt with the response to the next one, on which KTO estimates its KL."""
    rows = lessons(items)
    other = [*rows[cfg.unit :], *rows[: cfg.unit]]
    start = [row.mask.index(True) for row in rows]
    parts = zip(rows, start, other, [*start[cfg.unit :], *start[: cfg.unit]])
    joined = [
        ([*a.ids[:i], *b.ids[j:]], [*a.mask[:i], *b.mask[j:]], a.media if i else None) for a, i, b, j in parts
    ]
    return rft.packing.conversations(joined)


def with_reference(cfg: Config, env: rft.run.Setup, state: rft.TrainState, items: Sequence, shift: float):
    """Return the rows of a batch with all that the loss reads: reference log-probs, and a baseline."""
    exp = experience(cfg, items)
    ref_logp = env.reference_logp(state, exp, unit=cfg.unit)
    exp = rft.tree.replace(exp, ref_logp=ref_logp)
    if cfg.loss == "kto":
        others = mismatched(cfg, items)
        with env.phase("score"):
            logp = env.st.score(env.apply, state.params, others, cfg.budget, unit=cfg.unit).logp
        gap = (logp - env.reference_logp(state, others, unit=cfg.unit)).sum(-1)
        shift = float(gap.mean().clamp(min=0))
    if not cfg.row.single:
        return exp
    baseline = {"baseline": shift * exp.mask.to(exp.w)}
    return rft.tree.replace(exp, extra=exp.extra | baseline)


# ---------- the loss


def pair_loss(cfg: Config) -> Callable[..., Tensor]:
    """Return the loss with the options that it reads."""
    loss = partial(cfg.row.loss, beta=cfg.beta)
    if cfg.label_smoothing:
        loss = partial(loss, label_smoothing=cfg.label_smoothing)
    if cfg.loss == "simpo":
        loss = partial(loss, margin=cfg.margin)
    if cfg.loss == "kto":
        loss = partial(loss, desirable_weight=cfg.desirable_weight, undesirable_weight=cfg.undesirable_weight)
    return loss


def losses(
    cfg: Config, logp: Tensor, ref_logp: Tensor, tokens: Tensor, extra: Mapping[str, Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (the loss of each pair or single response, log-probs [P] of both sides under both models).

    The log-probs `logp` and `ref_logp` [K] are of whole responses of `tokens` [K]. Unpaired responses have no
    sides.
    """
    sides = () if cfg.unpaired else (*logp.view(-1, 2).T, *ref_logp.view(-1, 2).T)
    if cfg.row.single:
        return pair_loss(cfg)(logp, ref_logp, extra["desirable"], baseline=extra["baseline"]), sides
    loss = pair_loss(cfg)(*sides) if cfg.row.reference else pair_loss(cfg)(*sides[:2])
    if cfg.nll:
        count = 1 if cfg.means else tokens[::2].clamp(min=1)
        loss = loss + cfg.nll * rft.loss.nll(sides[0] / count)
    return loss, sides


def measure(cfg: Config, name: str, logp, ref_logp, sides, real: Tensor, extra: Mapping) -> dict:
    """Return the metrics of pairs, or of single responses."""
    if not cfg.unpaired:
        return rft.metric.pairs(name, *sides, real, beta=cfg.beta)
    scale = 1.0 if cfg.loss == "bco" else cfg.beta
    baseline = scale * extra["baseline"]
    return rft.metric.labelled(
        name, logp, ref_logp, extra["desirable"], real, beta=cfg.beta, baseline=baseline
    )


def policy_loss(cfg: Config, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the loss of a pair, or of a response, at each of its tokens [T]; w makes the mean."""
    reduce = rft.segment.mean if cfg.means else rft.segment.sum
    factor = 1.0
    if cfg.ld_alpha < 1:
        factor = rft.loss.length_desensitized(b.mask, b.seq, b.num_seqs, alpha=cfg.ld_alpha)
    logp = reduce(factor * out.logp, b.mask, b.seq, b.num_seqs)
    ref_logp = torch.zeros_like(logp)
    if cfg.row.reference:
        ref_logp = reduce(factor * b.ref_logp, b.mask, b.seq, b.num_seqs)
    tokens = rft.segment.sum(b.mask.float(), b.mask, b.seq, b.num_seqs)
    extra = {name: rft.segment.mean(x, b.mask, b.seq, b.num_seqs) for name, x in (b.extra or {}).items()}

    loss, sides = losses(cfg, logp, ref_logp, tokens, extra)
    name = "responses" if cfg.unpaired else "pairs"
    metrics = measure(cfg, name, logp, ref_logp, sides, rft.packing.real(b), extra)
    if cfg.row.reference:
        metrics["policy/ref_gap"] = rft.metric.mean((out.logp - b.ref_logp).abs(), b.mask)
    loss = loss[b.seq if cfg.row.single else b.seq // 2]
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss, metrics


def evaluation(cfg: Config, held_out: rft.Experience, token_logp: Tensor) -> dict[str, float]:
    """Return the loss and the metrics of unseen rows, by the policy's log-probs [B, S]."""
    mask, tokens = held_out.mask, held_out.mask.sum(-1)
    token_ref = held_out.ref_logp if cfg.row.reference else torch.zeros_like(token_logp)
    if cfg.ld_alpha < 1:
        row = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
        factor = rft.loss.length_desensitized(mask.flatten(), row, len(mask), alpha=cfg.ld_alpha)
        token_logp, token_ref = factor.view_as(mask) * token_logp, factor.view_as(mask) * token_ref
    count = tokens.clamp(min=1) if cfg.means else 1
    logp, ref_logp = token_logp.sum(-1) / count, token_ref.sum(-1) / count
    extra = {name: x.sum(-1) / tokens.clamp(min=1) for name, x in (held_out.extra or {}).items()}

    loss, sides = losses(cfg, logp, ref_logp, tokens, extra)
    every = torch.ones(len(mask) // cfg.unit, dtype=torch.bool)
    metrics = measure(cfg, "eval", logp, ref_logp, sides, every, extra)
    metrics["eval/loss"] = rft.metric.mean(loss, torch.ones(len(loss), dtype=torch.bool))
    return with_margin(rft.metric.results(metrics))


def with_margin(values: dict[str, float]) -> dict[str, float]:
    """Add the margin of single responses: the difference of the mean rewards of both kinds."""
    for name in ("responses", "eval"):
        if f"{name}/reward_chosen" in values and f"{name}/margin" not in values:
            values[f"{name}/margin"] = values[f"{name}/reward_chosen"] - values[f"{name}/reward_rejected"]
    return values


def moved(cfg: Config, shift: float, values: Mapping[str, float], step: int) -> float:
    """Return BCO's running mean of rewards, over the steps: the middle of both kinds."""
    if cfg.loss != "bco":
        return shift
    name = "responses" if cfg.unpaired else "pairs"
    middle = (values[f"{name}/reward_chosen"] + values[f"{name}/reward_rejected"]) / 2
    return shift + (middle - shift) / (step + 1)


def main(cfg: Config) -> None:
    check(cfg)
    what = "responses" if cfg.unpaired else "pairs"
    env = rft.run.setup(
        cfg, usual=100, load=load, batch=cfg.batch, what=what, anchor=cfg.row.reference, sampled=False
    )
    cfg, st, task = env.cfg, env.st, env.task
    loss_fn = partial(policy_loss, cfg)
    names = () if cfg.unpaired else ("chosen", "rejected")
    tokens = env.tokens(loss_fn, group=cfg.unit, unit=cfg.unit, names=names)
    loop = {"step": 0, "shift": 0.0} if cfg.loss == "bco" else {"step": 0}
    state, loop = env.restore(env.policy.state, loop)
    shift = loop.get("shift", 0.0)  # of the rewards, which only bco reads

    # the rows of the evaluations, whose reference log-probs never change
    unseen, _ = rft.data.take(task.unseen, cfg.eval_pairs, cfg.seed)
    held_out = with_reference(cfg, env, state, unseen, shift)

    def evaluate(state: rft.TrainState, shift: float) -> dict[str, float]:
        """Return the loss and the metrics of unseen rows."""
        batch = with_reference(cfg, env, state, unseen, shift) if cfg.row.single else held_out
        with env.phase("evaluate"):
            logp = st.score(env.apply, state.params, batch, cfg.budget, unit=cfg.unit).logp
        return evaluation(cfg, batch, logp)

    for step in range(loop["step"], env.steps):
        values = evaluate(state, shift) if step == 0 else {}

        # collect: responses, and how probable the reference finds them
        items, _ = rft.data.draw(task.dataset, cfg.batch, step, cfg.seed)
        exp = with_reference(cfg, env, state, items, shift)

        # learn, and note what that does to single tokens
        tokens.before(step, state.params, exp)
        with env.phase("train"):
            packs = st.shard(exp, cfg.budget, unit=cfg.unit)
            rate = env.policy.schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, env.apply, loss_fn, packs)
            state, more = st.update(state, grads)
        tokens.after(step, state.params, exp)

        # report, save, and stop where a signal asked for it
        values |= with_margin(rft.metric.results(metrics | more)) | {"lr": rate}
        shift = moved(cfg, shift, values, step)
        if env.evaluates(step + 1):
            values |= evaluate(state, shift)
        env.run.write(step, values, tokens=int(exp.length.sum()))
        loop = {name: shift if name == "shift" else step + 1 for name in loop}
        env.checkpoint(state, loop)
    env.finish(state)


if __name__ == "__main__":
    rft.run.cli(main, Config)
