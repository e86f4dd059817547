"""Options by subject: frozen dataclasses that the Config of a script inherits.

    @dataclass(frozen=True)
    class Config(options.Run, options.Optimizer, options.Policy):
        beta: Positive = 0.1  # an option of this script alone
        lr: Positive = 3e-4  # learning rate

A type holds the limits of an option, `Free` marks one that may change when a run is resumed, and the comment
behind it is its help. To change the default or the help of an inherited option, repeat its whole line. --help
groups options by `subject`.
"""

# Why inheritance, and not one field for each subject: `cfg.lr`, `Config(lr=3e-4)`, `--lr` and the "lr" of
# config.json are then one name, and a config is a plain flat dataclass, which is all a reader has to know.
#
# A dataclass takes its fields from the last base to the first. So a script lists its bases from the last
# subject of --help to the first, and ends with Data and Model. Its own options come before them in --help.

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, TypeVar

from rft_fn import loss
from rft_fn.collect.batches import EXCLUDES
from rft_fn.data.wrong_answers import COVERING
from rft_fn.limits import (
    Above1,
    AtLeast0,
    Count,
    Decay,
    Filled,
    Finite,
    Free,
    Positive,
    PositiveShare,
    Range,
    Seed,
    Share,
    Warmup,
    Whole,
)
from rft_fn.run.model_options import Data, Model, Options, Policy, Prompts
from rft_fn.strategy import StrategyConfig

__all__ = [
    "ENGINE", "ActorCritic", "ActorCriticRun", "Collect", "Data", "Entropy", "Evaluation", "Examples",
    "FlatRows", "Heads", "HeldOut", "Labelled", "Length", "Limits", "Model", "Optimizer", "Options",
    "Policy", "Prompts", "Ptx", "Recorded", "Reference", "Reinforcement", "ReinforcementRun", "Reward",
    "Rollouts", "Run", "Sampling", "ScoredRun", "Script", "Shaping", "Updates", "of",
]  # fmt: skip


S = TypeVar("S", bound=Options)
Mismatch = Literal["none", "tis", "mis", "icepop", "tis_seq", "mis_seq"]


def of(kind: type[S], cfg: Options) -> S:
    """Return the options of a subject: a script's, or their defaults if it does not have the subject."""
    return cfg if isinstance(cfg, kind) else kind()


@dataclass(frozen=True)
class Sampling(Options, subject="Rollouts", first=("temperature", "max_new")):
    """How tokens are drawn."""

    temperature: AtLeast0 = 1.0  # sampling temperature; log-probs are of the distribution at this temperature
    top_p: PositiveShare = 1.0  # nucleus sampling: the smallest set of tokens with this mass; trained on too
    max_new: Count = 6  # most new tokens per response


@dataclass(frozen=True)
class Rollouts(Sampling, subject="Rollouts", first=("prompts", "group", "strategy.engine_type")):
    """How many responses a step learns from."""

    prompts: Count = 32  # prompts per step
    group: Count = 16  # responses per prompt
    ahead: Whole = 0  # off-policy lag: steps that sampling runs ahead of training, in an engine process
    in_flight: bool = False  # with ahead: responses under way go on with the weights of each step that ends
    partial: Whole = 0  # partial rollouts: new tokens per response and step; unfinished ones wait; 0: off
    max_gap: Free[Positive | None] = None  # most trainer-sampler mismatch, nats per token; None: by dtype
    gap_factor: Free[Above1] = 30.0  # or most mismatch as a multiple of the noise in the first step
    mismatch: Mismatch | None = None  # importance correction; _seq: per sequence; None: tis if off-policy
    update_kl: Free[bool] = False  # measure the KL of a step's updates: log-probs before and after them
    rollouts_every: Free[Whole] = 0  # steps between files of all responses, rollouts/step_N; 0: none
    cap: Above1 = 2.0  # largest ratio trainer / sampler: tis truncates there, mis and icepop mask the token
    geo_low: Share = 0.0  # mask sequences whose geometric-mean ratio is lower, as 0.99; 0: off
    geo_high: Above1 | None = None  # mask sequences whose geometric-mean ratio is higher, as 1.01; None: off
    max_lag: Whole = 0  # mask tokens of weights that are more versions older than the trainer's; 0: none
    floor: PositiveShare | None = None  # smallest ratio: icepop masks below (None: 1 / cap), tis raises to it
    canary: Free[bool] = True  # check with noisy weights at the start that the engine loads all of them
    rebuilds: Free[Whole] = 3  # how often a run restarts an engine that died

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature:
            raise ValueError("temperature: expected > 0 to learn from samples, got 0")
        if self.in_flight and not self.ahead:
            raise ValueError("ahead: expected above 0 with in_flight, which samples while it learns, got 0")
        if self.floor is not None and self.mismatch not in ("tis", "icepop"):
            raise ValueError(f"floor: expected None without --mismatch tis or icepop, got {self.floor}")


@dataclass(frozen=True)
class Agents(Options, subject="Agents", first=("agent",)):
    """Programs that play episodes, in place of an environment."""

    agent: str = ""  # the command of one episode: it speaks to OPENAI_BASE_URL, RFT_TASK names its task
    agent_timeout: Free[Positive] = 300.0  # seconds that an episode may take
    agent_memory: Free[AtLeast0] = 4.0  # GiB of addresses that each of its processes may take; 0: any
    agents_at_once: Free[Count] = 16  # programs of a rank that run at a time
    agent_failed: Finite = 0.0  # the reward of an episode whose program fails


@dataclass(frozen=True)
class FlatRows(Policy, subject="Updates"):
    """Rows that add nothing to a gradient."""

    keep_flat: bool = False  # compute rows without a gradient too, as those of a group of equal rewards


@dataclass(frozen=True)
class Collect(Rollouts, FlatRows, subject="Rollouts", excludes=EXCLUDES):
    """How prompts become the groups that a step learns from."""

    rounds: Count = 1  # most sampling rounds per step, until enough groups have unequal rewards (DAPO)
    curriculum: Whole = 0  # prompts in the mean success p of a source, whose share is p (1 - p); 0: off
    curriculum_by: Literal["source", "prompt"] = "source"  # prompt: p and a share of each, of so many visits
    curriculum_floor: Positive = 0.02  # least p (1 - p)
    mask_truncated: bool = False  # mask truncated responses in the loss; their group still counts them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curriculum_by == "prompt" and not self.curriculum:
            raise ValueError("curriculum: expected above 0, as curriculum_by is prompt, got 0")
        if self.curriculum_floor > 0.25:
            raise ValueError(
                f"curriculum_floor: expected at most 0.25, the largest p (1 - p), got {self.curriculum_floor}"
            )


@dataclass(frozen=True)
class Reward(Options, subject="Rewards", first=("reward",)):
    """How responses are rewarded."""

    reward: tuple[str, ...] = ()  # math, task:NAME, FILE.py:FN, model:FOLDER, judge:FOLDER; =WEIGHT, @held
    reward_veto: tuple[str, ...] = ()  # PART<LIMIT=TOTAL: the reward where a part is below a limit
    reward_timeout: Free[Positive] = 300.0  # seconds that the rewards of a batch may take


@dataclass(frozen=True)
class Shaping(Reward, subject="Rewards"):
    """Which changes are made to a reward before it is learned."""

    reward_norm: Literal["", "batch", "group"] = ""  # normalise each reward over these, before its weight
    reward_clip: AtLeast0 = 0.0  # rewards are clipped to +- this; 0 is off
    normalize_reward: bool = False  # subtract the running mean of rewards, divide by their running deviation
    overlong: Whole = 0  # soft length penalty: rises to 1 over the last tokens before max_new (DAPO); 0: off


LOSSES = (
    loss.ppo_clip, loss.gspo, loss.gspo_token, loss.gmpo, loss.cispo, loss.sapo, loss.cpgd, loss.dppo_tv,
    loss.dppo_kl, loss.vespo, loss.dro, loss.a_star,
)  # fmt: skip
"""The losses of algorithms that have limits."""


def _help(name: str) -> dict[str, str]:
    """Return the help of a limit, which is made of the docstrings of the losses that have it."""
    losses: dict[str, list[str]] = {}
    for fn in LOSSES:
        said = re.search(rf"^ +{name}: (.*)$", (fn.__doc__ or "").partition("Limits:")[2], re.M)
        if said:
            losses.setdefault(said[1], []).append(fn.__name__)
    text = "; ".join(f"{', '.join(names)}: {said}" for said, names in losses.items())
    return {"help": f"{text}; None is the algorithm's default"}


@dataclass(frozen=True)
class Limits(Options):
    """Limits of an algorithm's loss by their own names; an algorithm takes the ones that its loss has."""

    low: AtLeast0 | None = field(default=None, metadata=_help("low"))
    high: Annotated[float, Range(-1, open_low=True)] | None = field(default=None, metadata=_help("high"))
    dual: Above1 | None = field(default=None, metadata=_help("dual"))
    tau_pos: Positive | None = field(default=None, metadata=_help("tau_pos"))
    tau_neg: Positive | None = field(default=None, metadata=_help("tau_neg"))
    drift: AtLeast0 | None = field(default=None, metadata=_help("drift"))
    cap: Positive | None = field(default=None, metadata=_help("cap"))
    limit: AtLeast0 | None = field(default=None, metadata=_help("limit"))
    k_pos: AtLeast0 | None = field(default=None, metadata=_help("k_pos"))
    lambda_pos: AtLeast0 | None = field(default=None, metadata=_help("lambda_pos"))
    k_neg: AtLeast0 | None = field(default=None, metadata=_help("k_neg"))
    lambda_neg: AtLeast0 | None = field(default=None, metadata=_help("lambda_neg"))
    beta: Positive | None = field(default=None, metadata=_help("beta"))

    @property
    def given(self) -> dict[str, float]:
        """Return the limits that are not the algorithm's defaults."""
        return {name: x for name, x in vars(self).items() if x is not None}


@dataclass(frozen=True)
class Length(Options, subject="Updates", first=("steps",)):
    """How long a run is."""

    steps: Count | None = None  # updates; None is the usual number of the script


@dataclass(frozen=True)
class Examples(Length, subject="Updates", first=("epochs", "batch")):
    """How many examples an update learns from, where nothing is sampled."""

    epochs: Positive | None = None  # passes over the rows of data, in place of steps; not for tasks
    batch: Count = 64  # examples per step


@dataclass(frozen=True)
class Updates(
    Rollouts,
    Length,
    subject="Updates",
    first=("minibatches",),
    aliases={"clip_low": "loss.low", "clip_high": "loss.high", "dual": "loss.dual"},
):
    """How many updates a run makes of its rollouts, and how far one of them may go."""

    data_epochs: Positive | None = None  # passes over the rows of data, in place of steps; not for tasks
    epochs: Count = 1  # passes over a rollout
    minibatches: Count = 1  # updates per pass, unless strategy.train_batch_size sets their size
    weight: Filled | None = None  # token_mean, seq_mean, seq_sum, constant:LENGTH; None: the algorithm's
    loss: Limits = field(default_factory=Limits)
    ema: Decay = 0.0  # decay of an exponential moving average of the weights, which is saved; 0: off

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.prompts * self.group
        if self.minibatches > most:
            raise ValueError(f"minibatches: expected at most {most}, got {self.minibatches}")

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits of the algorithm's loss that are given."""
        return self.loss.given


@dataclass(frozen=True)
class Entropy(Options, subject="Updates"):
    """A bonus for the policy's entropy, and tokens that are chosen by it."""

    entropy: AtLeast0 = 0.0  # coefficient of the entropy bonus; with entropy_target, its first value
    entropy_target: AtLeast0 = 0.0  # adapt the coefficient to this entropy, nats per token; 0: off
    entropy_delta: Positive = 0.005  # step size of the coefficient, with entropy_target
    entropy_share: PositiveShare = 1.0  # train only on this share of tokens, those of highest entropy

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.entropy_target and self.entropy_delta != Entropy.entropy_delta:
            raise ValueError(
                f"entropy_target: expected one, as entropy_delta is {self.entropy_delta}, got none"
            )


@dataclass(frozen=True)
class Reference(
    Options,
    subject="Updates",
    excludes={("ref_every", "lora_rank"): "where the reference is the policy without its adapters"},
):
    """The model that a KL is to: the initial one, or one that follows the policy."""

    ref_every: Whole = 0  # steps between updates of the reference model to the policy; 0: never
    ref_mix: PositiveShare = 1.0  # share of the policy in that update: 1 replaces, less is a moving average

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ref_every and self.ref_mix != 1:
            raise ValueError(f"ref_every: expected above 0, as ref_mix is {self.ref_mix}, got 0")


@dataclass(frozen=True)
class ActorCritic(
    Options, subject="Actor and critic", first=("algorithm", "critic", "critic_lr", "kl", "epochs")
):
    """Advantages by a critic, what the critic learns, and the KL in the reward of each token."""

    algorithm: str = "ppo"  # a row of rft_fn.algorithm.TABLE with a critic: ppo or vapo
    gamma: Share = 1.0  # discount per token
    gae_lambda: Share | None = None  # of ppo, 1 for return minus value; None is the algorithm's default
    gae_alpha: Positive | None = None  # of vapo: lambda is 1 - 1 / (alpha length); 1 to 2 for short responses
    whiten: bool = True  # advantages of a rollout are shifted and scaled to mean 0 and deviation 1

    critic: str = ""  # initial weights of the critic: a model or a saved critic; empty: the actor's model
    critic_lr: Positive = 1e-3  # learning rate of the critic
    value_clip: Positive = 0.2  # value clip: how far a value may move from that of the rollout
    freeze_actor_steps: Whole = 0  # critic warm-up: first steps that train only the critic
    save_critic: Free[bool] = False  # save the critic too

    kl: AtLeast0 = 0.0  # KL penalty: coefficient of log(policy / initial model), subtracted per token
    kl_target: AtLeast0 = 0.0  # adaptive KL: target of the KL, nats per token; 0: a fixed coefficient
    kl_horizon: Positive = 10000.0  # adaptive KL: horizon of the controller in responses

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target and not self.kl:
            raise ValueError(f"kl: expected one, as kl_target is {self.kl_target}, got none")
        foreign = "gae_lambda" if self.algorithm == "vapo" else "gae_alpha"
        if getattr(self, foreign) is not None:
            raise ValueError(f"{foreign}: expected None for {self.algorithm}, got {getattr(self, foreign)}")


@dataclass(frozen=True)
class Ptx(Options, subject="Examples", excludes={("ptx_response", "ptx_messages"): "which take its place"}):
    """Examples that a policy also learns from, at each update."""

    ptx: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of examples
    ptx_data: str = ""  # the examples, named like data; their questions are made by the template
    ptx_response: str = "{answer}"  # their answers; {NAME} stands for a column of the row
    ptx_messages: tuple[str, ...] = ()  # columns of messages that are the examples, in place of both
    ptx_batch: Count = 16  # examples per update

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ptx and not self.ptx_data:
            raise ValueError(f"ptx_data: expected one, as ptx is {self.ptx}, got none")


@dataclass(frozen=True)
class Optimizer(Options, subject="Optimizer", first=("lr",)):
    """AdamW and its learning rate."""

    lr: Positive = 1e-3  # learning rate
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # decay; constant ignores lr_end
    lr_end: Share = 0.1  # final learning rate as a share of lr; 1 lets you add steps later
    warmup: Warmup = 0  # steps of linear warm-up; below 1 a share of the run
    beta1: Decay = 0.9  # decay of AdamW's first moment
    beta2: Decay = 0.999  # decay of AdamW's second moment
    weight_decay: AtLeast0 = 0.0  # AdamW's weight decay, of matrices only
    max_norm: Positive = 1.0  # the gradients of each model are clipped to this global norm
    from_checkpoint: str = ""  # a run, or a checkpoint of one: begin with its weights and optimizer state
    from_updates: Whole | None = None  # updates in that state that the schedule does not count; None: all


@dataclass(frozen=True)
class HeldOut(Data, subject="Evaluation", first=("eval_data", "eval_every")):
    """The data of evaluations."""

    eval_data: tuple[str, ...] = ()  # data of the evaluation; if empty, a test split, or rows held out
    eval_share: Share = 0.1  # share of the rows that is held out then; 0 evaluates on what is trained on
    eval_every: Free[Count] = 30  # steps between evaluations


@dataclass(frozen=True)
class Evaluation(HeldOut, subject="Evaluation"):
    """Evaluations that answer prompts."""

    eval_prompts: Count = 128  # questions of an evaluation, answered greedily


@dataclass(frozen=True)
class TaskEvaluation(Evaluation, subject="Evaluation", aliases={"tasks": "eval_tasks"}):
    """Evaluations that also answer tasks of lm-eval."""

    eval_tasks: Free[tuple[str, ...]] = ()  # lm_eval:TASK or lm_eval:FILE.yaml; eval_prompts problems of each


@dataclass(frozen=True)
class Reinforcement(TaskEvaluation, Updates, Shaping, Prompts, Model):
    """Learning from the rewards of responses: all that rollouts, rewards and evaluations are made of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlong > self.max_new:
            raise ValueError(f"overlong: expected at most max_new = {self.max_new}, got {self.overlong}")


@dataclass(frozen=True)
class Labelled(HeldOut, subject="Data", first=("kind", "messages", "max_length")):
    """Data whose rows are responses that are compared or labelled."""

    kind: Literal["pairs", "lists", "points", "steps"] = "pairs"  # what a row holds
    template: str = "{prompt}"  # the prompt; {NAME} stands for a column; "" (pairs): what both begin with
    messages: tuple[str, ...] = ()  # columns of messages: prompt chosen rejected; prompt completion(s)
    chosen: str = "{chosen}"  # pairs: the better response; {NAME} stands for a column of the row
    rejected: str = "{rejected}"  # pairs: the worse response
    margin: str = "margin"  # pairs: column by how much the better one shall win; 0 in rows without it
    completion: str = "{completion}"  # points: the response
    completions: str = "completions"  # lists, steps: column of the responses, or of the steps of one
    ranks: str = "ranks"  # lists: column of ranks, of which the lowest is the best
    scores: str = "scores"  # lists: column of scores, read where there are no ranks: the highest is the best
    labels: str = "labels"  # steps: column of a boolean or a number for each step
    separator: str | None = None  # steps: text behind a step; None is a new line, and nothing for tasks
    negatives: tuple[str, ...] = COVERING  # tasks: kinds of wrong answers, NAME or NAME=SHARE
    max_length: Count = 512  # most tokens in a prompt with one response; longer ones of a file are left out
    eval_items: Count = 256  # rows of an evaluation; all of a file that has fewer


@dataclass(frozen=True)
class Heads(
    Policy,
    subject="Model",
    first=("heads",),
    excludes={
        ("keep_heads", "lora_rank"): "whose adapters are put under new heads",
        ("keep_heads", "quantize"): "whose adapters are put under new heads",
    },
):
    """A model with heads in place of log-probs."""

    heads: tuple[str, ...] = ()  # names; pairs, points: each learns the column of its name; none: score
    pool: Literal["", "last", "mean", "attention"] = ""  # tokens that a score is of; empty: last, or as saved
    keep_heads: bool = False  # go on with the heads that the model has, in place of new ones


@dataclass(frozen=True)
class Run(Length, subject="Run", first=("out", "dry_run")):
    """The folder of a run, its checkpoints and trackers, and where it computes."""

    seed: Seed = 0  # seed of everything random
    out: Free[Filled] = "runs/run"  # folder of the run; the model goes to its subfolder model
    dry_run: Free[bool] = False  # check options, data, rewards, model and memory, and train nothing
    override: Free[bool] = False  # resume with changed options; overrides.jsonl in the folder lists them
    save_every: Free[Count] = 25  # steps between checkpoints
    keep: Free[Count] = 1  # how many of the newest checkpoints are kept
    max_bytes: Free[Whole] = 0  # bytes that all checkpoints may take; the newest always stays; 0 is no limit
    mirror: Free[str] = ""  # s3://, gs:// or any address of fsspec: checkpoints are sent there, and come back
    noise_every: Free[Whole | None] = None  # steps between grad/noise_scale; 0: never; None: 10 if free
    trackers: Free[tuple[str, ...]] = ()  # any of tensorboard, wandb, trackio
    project: Free[str] = "rft_fn"  # the project's name at the tracker
    run_name: Free[str] = ""  # the run's name at the tracker; if empty, the folder's
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    def halves(self, step: int, update: int = 0) -> bool | None:
        """Return how `st.shard` cuts the batch of an update: True or None for an estimate of the noise.

        It is for the first update of a step. None, every 10 steps by default, keeps the usual packs; see
        `Strategy.shard`.
        """
        if update:
            return False
        if self.noise_every is None:
            return None if step % 10 == 0 else False
        return self.noise_every > 0 and step % self.noise_every == 0


@dataclass(frozen=True)
class Recorded(Run, subject="Run"):
    """A run that records single tokens of some responses."""

    tokens_every: Free[Whole] = 10  # steps between records of single tokens, which rft report shows; 0: none


@dataclass(frozen=True)
class ScoredRun(Recorded, subject="Run"):
    """A run whose checkpoints have a reward."""

    keep: Free[Count] = 2  # how many of the newest checkpoints are kept
    best: Free[Whole] = 1  # checkpoints with the highest rewards, kept beside the newest


@dataclass(frozen=True)
class ReinforcementRun(ScoredRun, Optimizer, Reinforcement, Policy, Prompts, Model):
    """A run that learns from the rewards of responses."""

    strategy: StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))


@dataclass(frozen=True)
class ActorCriticRun(ReinforcementRun, ActorCritic, Entropy, Reference, Ptx):
    """A run with a critic."""


@dataclass(frozen=True)
class Script(Run, Optimizer, Policy, Data, Model):
    """What the Config of every training script has.

    No Config inherits it, since each has an order of subjects of its own: it is the type of one where a
    function reads most of it, as `run.setup` does. Other functions take the subject that they read.
    """


ENGINE = (
    "engine_type", "engine_batch", "engine_tp_size", "engine_mem_util", "enable_engine_sleep",
    "engine_process", "engine_threads", "engine_servers", "engine_actors", "engine_actor_type",
    "engine_timeout", "engine_weights", "engine_transfer", "engine_adapters", "engine_max_model_len",
    "engine_block_size", "engine_dtype", "engine_speculative", "replay_routing", "replay_kept",
    "engine_fused", "plot_every",
)  # fmt: skip
"""Options of `strategy` that only a script with rollouts reads."""
