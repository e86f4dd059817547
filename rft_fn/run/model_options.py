"""Options of the model and its data, and what all options have."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from rft_fn import limits
from rft_fn.limits import AtLeast0, AutoCount, Count, Filled, Free, Positive, Range, Whole
from rft_fn.model.checkpointing import Checkpointing

__all__ = ["Data", "Model", "Options", "Policy", "Prompts", "Rank", "exclusions"]


Exclusions: TypeAlias = Mapping[tuple[str, str], str]
"""Pairs of options that do not go together, each with the reason."""

Rank = Annotated[int, Range(0, 1 << 16)]  # no layer is as wide


@dataclass(frozen=True)
class Options:
    """The base of every record of options, which checks each field against its type and limits.

    `subject` is the heading in --help over the options that a class adds. Without one it is the class' name;
    over those of a script's own Config it is the script's. `first` names the options that --help shows before
    one asks for all of them: those that most runs set. `excludes` has pairs of options that do not go
    together, each with the reason as `limits.exclude` says it; a pair may name an option of another subject.
    `aliases` are further names on a command line and in a file, {"clip_low": "loss.low"}.
    """

    __subject__ = ""
    __first__: ClassVar[tuple[str, ...]] = ()
    __excludes__: ClassVar[Exclusions] = {}
    __aliases__: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(
        cls,
        *,
        subject: str = "",
        first: tuple[str, ...] = (),
        excludes: Exclusions | None = None,
        aliases: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init_subclass__(**more)
        cls.__subject__ = subject
        cls.__first__ = first
        cls.__excludes__ = excludes or {}
        cls.__aliases__ = aliases or {}

    def __post_init__(self) -> None:
        limits.fields(self)
        limits.exclude(vars(self), _off(type(self)), exclusions(type(self)))


@cache
def exclusions(config: type) -> Exclusions:
    """Return the pairs of a config's options that exclude each other, those of its bases too."""
    names = {f.name for f in fields(config)}
    kinds = [kind for kind in config.__mro__ if issubclass(kind, Options)]
    return {pair: why for kind in kinds for pair, why in kind.__excludes__.items() if names >= {*pair}}


@cache
def _off(config: type) -> Mapping[str, Any]:
    """Return the values that options have by the subjects which declare them, whatever a script's are."""
    return {f.name: f.default for kind in config.__mro__ if is_dataclass(kind) for f in fields(kind)}


# ---------- model and data


@dataclass(frozen=True)
class Model(Options, subject="Model", first=("model",)):
    """Which model."""

    model: Filled = "tiny"  # tiny, tiny-vl or tiny-audio (:TASK:LEVEL), smollm2-135m, a folder, or a hub name


@dataclass(frozen=True)
class Data(Options, subject="Data", first=("data", "template")):
    """Which rows, and how a row becomes a prompt."""

    data: tuple[str, ...] = ("sort_digits:1",)  # tasks as TASK:LEVEL, files, folders, hub names; =SHARE
    template: str = "{short}"  # the question; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages that are the prompt, in place of the template
    chat_template_kwargs: tuple[str, ...] = ()  # arguments of the chat template, as enable_thinking=False
    max_pixels: Whole = 1 << 20  # larger images are shrunk to as many pixels; 0 is no limit
    media_folder: str = ""  # where paths of media begin; if empty, the folder of the rows
    media_urls: bool = False  # fetch media that the rows have as URLs
    media_cache: Free[str] = ""  # a folder for processed media; if empty, they are in memory alone
    media_workers: Free[Whole] = 0  # processes that process the media of a file before the run
    system: str | None = None  # the system prompt; an empty one removes that of the chat template


@dataclass(frozen=True)
class Prompts(Data, subject="Data"):
    """Prompts, and the longest of them."""

    max_prompt: Count = 512  # most tokens per prompt; longer prompts in a file are dropped


@dataclass(frozen=True)
class Policy(
    Model,
    subject="Model",
    first=("lora_rank", "budget"),
    excludes={
        ("freeze", "lora_rank"): "which freezes all but the adapters; lora_targets chooses their layers"
    },
):
    """The model that is trained: its adapters, its precision, and what it takes at a time."""

    lora_rank: Rank = 0  # rank of LoRA adapters, then the only trained weights; 0: full fine-tuning
    lora_alpha: Positive = 64.0  # adapters are scaled by this / lora_rank
    lora_targets: str = "auto"  # what has adapters: auto, towers, all-linear, experts, or names with commas
    lora_merge: Free[bool] = True  # save the whole model, adapters merged; if not, the adapters alone
    freeze: tuple[str, ...] = ()  # parts that are not trained: visual, layers.0 ...; towers: all but the text
    quantize: Literal["", "int8", "nf4"] = ""  # precision of the frozen base under adapters; empty: as stored
    router_aux: AtLeast0 = 0.0  # coefficient of the load-balancing loss of a mixture of experts
    budget: Free[AutoCount] = 1024  # most tokens per micro-batch, packed; auto, as on a GPU: by the forecast
    gradient_checkpointing: Free[Checkpointing] = False  # recompute activations to save memory, host most
