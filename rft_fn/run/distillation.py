"""Distillation by options: who teaches, what is learned of it, and checks before a model is loaded."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from rft_fn import data, engine, loss, model
from rft_fn.data.templates import columns_in
from rft_fn.engine.served_words import ServedWords, served_words
from rft_fn.limits import Above1, AtLeast0, Decay, Finite, Positive, PositiveShare, Share, Whole
from rft_fn.model.load import read_vocabulary
from rft_fn.run import options
from rft_fn.run.cli import without
from rft_fn.run.earlier_run import last_model
from rft_fn.run.reward_task import Task, load_task
from rft_fn.types import Strategy

__all__ = [
    "FROM_REWARDS", "SERVED", "Distillation", "DistillationRun", "TeacherSpec", "load_taught_task",
    "meet", "read_teachers", "require_same_words", "teacher_modules",
]  # fmt: skip

SERVED = ("openai", "sglang")
FROM_REWARDS = ("success", "feedback")  # places of a hint that are no columns

TRY = "to try it, run grpo.py first and give --teacher runs/grpo, which is the folder of its run"

LOSSES = (*loss.DIVERGENCES, "sampled", "to_go", "nll")


@dataclass(frozen=True)
class Distillation(
    options.Data,
    subject="Teacher",
    first=("teacher", "loss", "on_policy"),
    excludes={
        ("messages", "hint"): "which is a template of columns",
        ("on_policy", "rl"): "which learns from the student's own samples",
        ("ahead", "on_policy"): "where each step samples for itself",
        ("partial", "on_policy"): "where each step samples for itself",
        ("rounds", "on_policy"): "where each step samples for itself",
        ("curriculum", "on_policy"): "where each step samples for itself",
    },
):
    """Who teaches, what the teacher sees, and what is learned of it."""

    teacher: tuple[str, ...] = ()  # a model, a run, self, ema, openai:URL, sglang:URL; NAME=... by column
    teacher_column: str = ""  # column of the rows that names their teacher, where there are several
    teacher_temperature: Positive | None = None  # of the teacher's distributions; None: as sampled
    teacher_top_p: PositiveShare = 1.0  # of responses that the teacher samples
    hint: str = ""  # the teacher's prompt; {NAME} is a column, {success}, {feedback}; empty: the student's
    success_at: Finite = 1.0  # least reward of a response that {success} may be

    loss: str = "reverse_kl"  # a row of loss.DIVERGENCES; sampled, to_go: advantages; nll: of responses
    top_k: Whole = 0  # likeliest words of the teacher that are compared, the rest as one; 0: all words
    jsd_beta: Share = 0.5  # share of the teacher in the mixture of jsd; 0 is forward_kl, 1 reverse_kl
    skew: Decay = 0.1  # share of the left side in the mixture of skewed KLs
    gamma: Share = 1.0  # discount of to_go per token
    rl: AtLeast0 = 0.0  # coefficient of the algorithm's loss on rewards, beside the teacher
    clip_low: AtLeast0 | None = None  # lower clip of the algorithm's loss; None: its default
    clip_high: AtLeast0 | None = None  # upper clip of the algorithm's loss; None: its default
    dual: Above1 | None = None  # dual clip of the algorithm's loss; None: its default

    on_policy: Share = 1.0  # share of the steps whose responses the student samples
    off_policy: Literal["teacher", "given"] = "teacher"  # whose responses the other steps learn
    response: str = "{answer}"  # given responses; {NAME} stands for a column of the row

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in LOSSES:
            raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {self.loss!r}")
        if not self.teacher and self.loss != "nll":
            raise ValueError(
                f"teacher: expected a model, a run folder, self, ema or a server, got none; {TRY}"
            )
        if not self.teacher and self.off_policy == "teacher":
            raise ValueError("teacher: expected one for --off-policy teacher, got none")
        if len(self.teacher) > 1 and not self.teacher_column:
            raise ValueError(f"teacher_column: expected one, as there are {len(self.teacher)} teachers")
        for spec in self.teacher:
            if self.teacher_column and "=" not in spec:
                raise ValueError(f"teacher: expected NAME=TEACHER with teacher_column, got {spec!r}")
        self._check_ways()

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits of the algorithm's loss that are given; `loss` is what the teacher teaches."""
        found = {"low": self.clip_low, "high": self.clip_high, "dual": self.dual}
        return {name: x for name, x in found.items() if x is not None}

    def _check_ways(self) -> None:
        """Raise ValueError for ways of learning that exclude each other."""
        if "self" in self.teacher and not self.hint and self.loss != "nll":
            raise ValueError("hint: expected one with the teacher self, which is the student without it")
        if self.loss == "to_go" and self.gamma == 0:
            raise ValueError("gamma: expected above 0 for to_go, got 0; --loss sampled is that")
        if self.on_policy < 1 and self.loss in ("sampled", "to_go"):
            raise ValueError(
                f"on_policy: expected 1 with --loss {self.loss}, whose samples are the student's, got "
                f"{self.on_policy}"
            )
        if self.on_policy == 1 and self.loss == "nll":
            raise ValueError(
                "on_policy: expected below 1 with --loss nll: its own samples teach nothing, got 1"
            )
        if self.off_policy == "given" and self.on_policy < 1:
            without(self, "messages", prefix="", instead="given responses are a template of columns")


@dataclass(frozen=True)
class DistillationRun(  # pyright: ignore[reportIncompatibleVariableOverride]: `loss` is a text here
    Distillation, options.ReinforcementRun, options.Collect
):
    """A run that learns from teachers, and from rewards if asked for."""


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher as the options name it."""

    name: str  # value of the column; "" of the only teacher
    kind: str  # folder, self, ema, openai or sglang
    place: str  # folder or address


def read_teachers(cfg: Distillation) -> list[TeacherSpec]:
    """Return the teachers of the options. ValueError for two with one name."""
    found = []
    for text in cfg.teacher:
        name, _, spec = text.partition("=") if cfg.teacher_column else ("", "", text)
        kind, colon, place = spec.partition(":")
        if kind in SERVED and colon:
            found.append(TeacherSpec(name, kind, place))
        elif spec in ("self", "ema"):
            found.append(TeacherSpec(name, spec, ""))
        else:
            found.append(TeacherSpec(name, "folder", last_model(spec)))
    names = [spec.name for spec in found]
    if len({*names}) < len(names):
        raise ValueError(f"teacher: expected names that differ, got {', '.join(names)}")
    return found


# ---------- before a model is loaded


def load_taught_task(cfg: DistillationRun, st: Strategy) -> Task:
    """Load the task of the options, after checks of the teachers.

    ValueError for a teacher that cannot give what the loss needs, and for one with another tokenizer: its
    distributions are of other words.
    """
    tokenizer = model.load_tokenizer(cfg.model)
    for spec in read_teachers(cfg):
        _check(cfg, st, spec, tokenizer)
    known = {"response": cfg.response} if cfg.on_policy < 1 and cfg.off_policy == "given" else {}
    task = load_task(cfg, st, **known)
    if task.processing is not None and any(spec.kind in SERVED for spec in read_teachers(cfg)):
        raise ValueError(f"teacher: expected a folder for {cfg.model}, which sees or hears, got a server")
    prompts, _ = data.take(task.dataset, 1, seed=0)
    for column in [*(columns_in(cfg.hint) - {*FROM_REWARDS}), *filter(None, [cfg.teacher_column])]:
        if column not in prompts[0].columns:
            got = ", ".join(prompts[0].columns)
            option = "teacher_column" if column == cfg.teacher_column else "hint"
            raise ValueError(f"{option}: expected a column of the rows, which have {got}, got {column!r}")
    return task


def _check(cfg: DistillationRun, st: Strategy, spec: TeacherSpec, tokenizer: Any) -> None:
    """Raise ValueError for a teacher that the options cannot have."""
    exact = cfg.loss in loss.DIVERGENCES and not cfg.top_k
    if spec.kind == "ema" and not cfg.ema:
        raise ValueError("ema: expected the decay of an average for the teacher ema, got 0")
    if spec.kind == "self" and exact and cfg.top_p < 1:
        raise ValueError(
            f"top_k: expected words of the teacher self with top_p {cfg.top_p}, for hidden states are not "
            "cut, got 0: all words"
        )
    if spec.kind == "folder":
        try:
            theirs = model.load_tokenizer(spec.place)
        except (ValueError, OSError) as error:
            raise ValueError(f"teacher: {str(error).removeprefix('model: ')}") from None
        require_same_words(f"teacher: {spec.place}", theirs, tokenizer)
    if spec.kind in SERVED:
        if exact:
            raise ValueError(
                "top_k: expected a number of words with a teacher on a server, which gives no hidden states, "
                "got 0: all words"
            )
        heat = cfg.temperature if cfg.teacher_temperature is None else cfg.teacher_temperature
        if heat != 1 and cfg.loss != "nll":
            raise ValueError(
                f"teacher_temperature: expected 1 with a teacher on a server, whose log-probs of prompts "
                f"are at 1, got {heat}"
            )
        meet(cfg, st, spec, tokenizer)


def meet(cfg: DistillationRun, st: Strategy, spec: TeacherSpec, tokenizer: Any) -> ServedWords:
    """Meet a teacher on a server. ValueError for what it cannot give."""
    own = replace(engine.config_of(st.config), process=False, routing=False)
    config = replace(own, type=spec.kind, servers=(spec.place,), actors=1, actor_type="hf")
    try:
        engine.check_config(config)
    except ValueError as error:
        raise ValueError(str(error).replace("engine_servers", "teacher")) from None
    vocabulary = read_vocabulary(cfg.model) or len(tokenizer)
    return served_words(config, tokenizer, vocabulary=vocabulary, top_k=cfg.top_k)


def require_same_words(what: str, theirs: Any, ours: Any) -> None:
    """Raise ValueError for a tokenizer with another vocabulary."""
    if theirs.get_vocab() == ours.get_vocab():
        return
    of_ours = {number: word for word, number in ours.get_vocab().items()}
    of_theirs = {number: word for word, number in theirs.get_vocab().items()}
    number = min(i for i in of_ours.keys() | of_theirs.keys() if of_ours.get(i) != of_theirs.get(i))
    raise ValueError(
        f"{what}: expected the tokenizer of the student, whose token {number} is {of_ours.get(number)!r}, "
        f"got one whose token {number} is {of_theirs.get(number)!r}; to learn from its responses, write them "
        "to a file for sft.py"
    )


def teacher_modules(cfg: DistillationRun, st: Strategy) -> list[nn.Module]:
    """Return the teachers that this process holds, without weights: for the forecast of memory."""
    places = [cfg.model if spec.kind == "ema" else spec.place for spec in read_teachers(cfg)]
    held = [spec.kind in ("folder", "ema") for spec in read_teachers(cfg)]
    return [model.load(place, meta=True) for place, here in zip(places, held) if here]
