"""The record of an estimate, and the phases of a step with the models that each has on the device."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import dist
from rft_fn.types import Transform

__all__ = [
    "PHASES", "Asked", "Estimate", "Example", "Groups", "Layout", "Models", "Phase", "WrapOptimizer",
    "host_memory", "largest", "report", "table",
]  # fmt: skip


# ---------- the record of an estimate


# the models that a phase uses; with placement no others are on the device
PHASES: dict[str, tuple[str, ...]] = {
    "generate": ("engine",),
    "judge": ("rewards", "judges"),
    "score": ("trained", "frozen"),
    "train": ("trained",),
    "update": ("trained",),
    "sync": ("policy", "engine"),
}


class Models(NamedTuple):
    """The names of the models of a run, by how they are used."""

    policy: tuple[str, ...] = ()  # the model that the engine copies, trained or not
    trained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()  # that score
    rewards: tuple[str, ...] = ()
    judges: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()


class Asked(NamedTuple):
    """A model that is asked for rewards: such models are asked one after the other."""

    kind: str  # "rewards" or "judges"
    name: str
    held: int  # bytes of its weights, of a judge with the cache of its engine
    work: int = 0  # of its forward, in addition


class Phase(NamedTuple):
    """A phase of a step."""

    name: str
    models: tuple[str, ...]  # on the device
    held: int  # bytes of these: weights, optimizers, an engine's cache
    work: int  # bytes in addition, at the peak

    @property
    def total(self) -> int:
        """Return the peak of the phase [bytes]."""
        return self.held + self.work


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Parameters, gradients and the optimizer's state last as long as the run (the gradients from the first pack
    to the update); the rest is working memory of one phase each. With placement a model is on the device only
    in the phases that use it.
    """

    parameters: int
    gradients: int  # sums over packs
    optimizer: int  # moments, averages, master weights
    activations: int  # of one pack, when the decoder is done
    head: int  # at its peak, in addition to the activations: logits, or the workspace instead of them
    backward: int  # at its peak, in addition to both: the gradients of one pack
    gathered: int  # whole blocks of sharded parameters, copies in bfloat16, and buffers of their gradients
    update: int  # temporary tensors of the optimizer's arithmetic
    engine: int  # its own weights and cache
    host: int  # of host memory, where something was moved there
    awake: bool  # whether the engine's weights are on the device while the trainer works
    media: int = 0  # images and sounds of a pack; on a CPU, which has the host's memory, of a step too
    unknown: tuple[str, ...] = ()  # parts that could not be computed, and why: they are not counted
    frozen: int = 0  # of the parameters, in models that only score
    policy: int = 0  # of the parameters, in the model that the engine copies
    rewards: int = 0  # parameters of scalar reward models
    judges: int = 0  # the weights and caches of the engines of judges
    delivered: int = 0  # of the engine, its weights
    scored: int = 0  # work of the largest forward without a backward, of the trained and frozen models
    asked: tuple[Asked, ...] = ()  # the reward models and the judges
    placed: bool = False  # whether a model leaves the device in the phases that do not use it
    models: Models = field(default_factory=Models)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of a step, in their order."""
        return tuple(self._phase(name) for name in PHASES)

    @property
    def training(self) -> int:
        """Return the peak of forward and backward."""
        return self._phase("train").total

    @property
    def updating(self) -> int:
        """Return the peak of an update."""
        return self._phase("update").total

    @property
    def sampling(self) -> int:
        """Return the peak while the engine samples."""
        return self._phase("generate").total

    @property
    def total(self) -> int:
        """Return the peak of all phases."""
        return max(phase.total for phase in self.phases)

    @property
    def largest(self) -> Phase:
        """Return the phase with the peak of the run; training, if others are alike."""
        phases = sorted(self.phases, key=lambda phase: phase.name != "train")
        return max(phases, key=lambda phase: phase.total)

    def _phase(self, name: str) -> Phase:
        kinds = self._on_device(name)
        if name == "judge":
            return self._judging(kinds)
        pack = self.activations + self.head + self.backward + self.gathered + self.media
        work = {
            "score": self.scored,
            "train": self.gradients + pack,
            "update": self.gradients + self.update,
        }
        sizes = self._sizes()
        if name == "sync":  # nothing is sampled
            sizes["engine"] = self.delivered
        return Phase(name, self._names(kinds), sum(sizes[kind] for kind in kinds), work.get(name, 0))

    def _judging(self, kinds: list[str]) -> Phase:
        """Return the phase of the rewards, while the model is asked that takes most.

        With placement one reward model at a time is on the device, and so is one judge if they sleep.
        """
        sizes = self._sizes()
        one_at_a_time = {"rewards"} if self.placed else set()
        one_at_a_time |= set() if self.awake else {"judges"}
        others = [kind for kind in kinds if kind not in one_at_a_time]
        held = sum(sizes[kind] for kind in others)
        phases = [Phase("judge", self._names(others), held, 0)]
        for x in self.asked:
            phase = phases[0]._replace(work=x.work)
            if x.kind in one_at_a_time:
                phase = phase._replace(models=(*phase.models, x.name), held=held + x.held)
            phases.append(phase)
        return max(phases, key=lambda phase: phase.total)

    def _names(self, kinds: list[str]) -> tuple[str, ...]:
        return tuple(model for kind in kinds for model in getattr(self.models, kind))

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of all models of each kind."""
        return {
            "policy": self.policy,
            "trained": self.parameters - self.frozen + self.optimizer,
            "frozen": self.frozen,
            "rewards": self.rewards,
            "judges": self.judges,
            "engine": self.engine,
        }

    def _on_device(self, phase: str) -> list[str]:
        """Return the kinds of models that are on the device in a phase."""
        there = set(PHASES[phase])
        if not self.placed:  # the policy is one of these
            there = there - {"policy"} | {"trained", "frozen", "rewards"}
        if self.awake:
            there |= {"engine", "judges"}
        return [kind for kind in Models._fields if kind in there]


# ---------- the record in which each backend describes how it lays out a model


WrapOptimizer = Callable[[Transform, Mapping[str, Tensor]], Transform]
"""(tx, params) -> the transform that updates params: tx, with clipping or float32 masters around it."""

Groups = Callable[[nn.Module], Sequence[Sequence[nn.Parameter]]]
"""Root -> its parameters that are gathered and reduced together.

The last group is the root's: it stays gathered from its forward to the end of the backward.
"""


@dataclass(frozen=True)
class Layout:
    """How a backend lays out a model; by default one process in the types of the module."""

    # numbers of processes that these are sharded over
    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    sequence: int = 1  # the tokens of a pack

    # types of floating-point parameters; None: as the module has them
    kept: torch.dtype | None = None  # while they are trained
    frozen: torch.dtype | None = None  # while they are not
    stepped: torch.dtype | None = None  # in the optimizer
    computed: torch.dtype | None = None  # in forward and backward

    # the optimizer
    wrap_optimizer: WrapOptimizer = lambda tx, params: tx
    flat_copy: bool = False  # it holds a copy of the parameters that it steps
    sum_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype  # of gradients, by the parameter's

    # copies for the time of a forward and backward
    cast_copy: bool = False  # all parameters in the computed type
    groups: Groups | None = None  # gradients are reduced group by group; None: they stay whole
    in_place: bool = False  # a backward adds wide gradients to their sums; else those of a pack are extra
    gathered: bool = False  # parameters are gathered group by group

    # "parameters", "gradients", "optimizer", "update": what lives in host memory
    on_host: frozenset[str] = frozenset()
    copied_for_update: bool = False  # parameters and gradients go to the host, and updates come back


# ---------- a prompt with media, by which the memory of images, sounds and videos is estimated


class Example(NamedTuple):
    """The tokens of a prompt, placeholders included, and its media by the processor's names."""

    ids: Sequence[int]
    media: Mapping[str, Tensor]
    prompts: int = 0  # such prompts in a step; one process holds their media

    @property
    def nbytes(self) -> int:
        """Return the media of one prompt [bytes]."""
        return sum(x.numel() * x.element_size() for x in self.media.values())

    def copies(self, tokens: int) -> int:
        """Return how many of it fill a pack of `tokens`: one at least."""
        return max(tokens // len(self.ids), 1)

    def repeated(self, n: int) -> tuple[list[int], dict[str, Tensor]]:
        """Return (tokens, media) of n of it in a row; float tensors are on the meta device."""
        media = {}
        for name, x in self.media.items():
            row = torch.empty_like(x, device="meta") if x.is_floating_point() else x
            media[name] = torch.cat([row] * n)
        return list(self.ids) * n, media


def largest(prompts: Iterable[Any], count: int = 0) -> Example | None:
    """Return the prompt (a record with `ids` and `media`) with the most media, None if none has any."""
    with_media = [prompt for prompt in prompts if getattr(prompt, "media", None)]
    examples = [Example(prompt.ids, prompt.media, count) for prompt in with_media]
    return max(examples, key=lambda example: example.nbytes, default=None)


# ---------- memory for people: the table of an estimate, and the usage of a process


_NOTES = {
    "parameters": "",
    "gradients": "",
    "optimizer": "",
    "activations": "of a pack, when the forward is done",
    "head": "beside them, while the log-probs are computed",
    "backward": "beside both, at its peak",
    "gathered": "whole blocks, and buffers of their gradients",
    "update": "instead of the four above, while the optimizer steps",
    "media": "images and sounds",
    "rewards": "weights of reward models",
    "judges": "engines of judges",
}
_VERBS = {
    "generate": "sampling",
    "judge": "judging",
    "score": "scoring",
    "train": "training",
    "update": "updating",
    "sync": "weight sync",
}


def _size(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def table(x: Estimate, *, available: int, host: int, remedy: str) -> str:
    """Format an estimate as a table, a line for each part, and whether it fits.

    `available` and `host` are the memory of the device and of the host [bytes]. `remedy` is printed if the
    device has too little.
    """
    notes = dict(_NOTES)
    notes["engine"] = "all the time" if x.awake else "while it samples, asleep in host memory"
    notes["host"] = f"of {_size(host)} of host memory"

    lines = []
    for name, note in notes.items():
        if getattr(x, name):
            lines.append(f"  {name:<12}{_size(getattr(x, name)):>11}  {note}")
    if x.placed:
        for phase in x.phases:
            models = ", ".join(phase.models) or "no model"
            lines.append(
                f"  {'in ' + phase.name:<12}{_size(phase.total):>11}  {models} ({_size(phase.held)})"
            )
    lines += [f"  not known, and not counted: {line}" for line in x.unknown]

    # the last line compares the largest phase with what there is
    if x.host > host:
        verdict = "does not fit the host"
    elif x.total > available:
        verdict = f"does not fit: {remedy}"
    else:
        verdict = "fits"
    verb = _VERBS[x.largest.name]
    lines.append(f"  {'peak':<12}{_size(x.total):>11}  in {verb}, of {_size(available)}: {verdict}")
    return "\n".join(lines)


def host_memory() -> int:
    """Return host memory per process of this machine [bytes]."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _used() -> dict[str, int]:
    """Return the memory of this process, on the GPU if there is one."""
    if torch.cuda.is_available():
        return {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    import resource

    statm = Path("/proc/self/statm")  # on Linux
    resident = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"resident": resident, "peak": max(peak, resident)}  # the kernel counts its peak in batches


def report(prefix: str = "") -> dict[str, int]:
    """Return the memory that this process holds, by name [bytes]; rank 0 prints it.

    "allocated", "peak" and "reserved" of the GPU, or "resident" and "peak" of the process without one. The
    line that is printed has the largest over the ranks.
    """
    used = _used()
    most = dist.all_reduce(used, "max")
    if dist.is_main():
        text = ", ".join(f"{name} {n / 2**30:.2f} GiB" for name, n in most.items())
        print(f"{prefix}: {text}" if prefix else text, flush=True)
    return used
