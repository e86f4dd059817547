"""The record of an estimate, and the phases of a step with the models that each has on the device."""

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["PHASES", "Estimate", "Models", "Phase"]

# the models that a phase uses; with placement no others are on the device
PHASES: dict[str, tuple[str, ...]] = {
    "generate": ("engine",),
    "judge": ("rewards", "judges"),
    "score": ("trained", "frozen"),
    "train": ("trained",),
    "update": ("trained",),
    "sync": ("trained", "engine"),
}


class Models(NamedTuple):
    """The names of the models of a run, by how they are used."""

    trained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()  # that score
    rewards: tuple[str, ...] = ()
    judges: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()


class Phase(NamedTuple):
    """A phase of a step."""

    name: str
    models: tuple[str, ...]  # on the device
    held: int  # bytes of these: weights, optimizers, an engine's cache
    work: int  # bytes beside them, at the peak

    @property
    def total(self) -> int:
        """The peak of the phase [bytes]."""
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
    head: int  # at its peak, beside the activations: logits, or the workspace instead of them
    backward: int  # at its peak, beside both: the gradients of one pack
    gathered: int  # whole blocks of sharded parameters, copies in bfloat16, and buffers of their gradients
    update: int  # temporary tensors of the optimizer's arithmetic
    engine: int  # its own weights and cache
    host: int  # of host memory, where something was moved there
    awake: bool  # whether the engine's weights are on the device while the trainer works
    media: int = 0  # images and sounds of a pack; on a CPU, whose memory is the host's, of a step too
    unknown: tuple[str, ...] = ()  # parts that could not be computed, and why: they are not counted
    frozen: int = 0  # of the parameters, those of models that only score
    rewards: int = 0  # parameters of scalar reward models
    judges: int = 0  # the weights and caches of the engines of judges
    delivered: int = 0  # of the engine, its weights
    scored: int = 0  # work of the largest forward without a backward, of the trained and frozen models
    judged: int = 0  # the same of the reward models
    placed: bool = False  # whether a model leaves the device in the phases that do not use it
    models: Models = field(default_factory=Models)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step, in their order."""
        return tuple(self._phase(name) for name in PHASES)

    @property
    def training(self) -> int:
        """The peak of forward and backward."""
        return self._phase("train").total

    @property
    def updating(self) -> int:
        """The peak of an update."""
        return self._phase("update").total

    @property
    def sampling(self) -> int:
        """The peak while the engine samples."""
        return self._phase("generate").total

    @property
    def total(self) -> int:
        """The peak of all phases."""
        return max(phase.total for phase in self.phases)

    @property
    def largest(self) -> Phase:
        """The phase with the peak of the run; training, where others are alike."""
        phases = sorted(self.phases, key=lambda phase: phase.name != "train")
        return max(phases, key=lambda phase: phase.total)

    def _phase(self, name: str) -> Phase:
        kinds = self._on_device(name)
        sizes = {
            "trained": self.parameters - self.frozen + self.optimizer,
            "frozen": self.frozen,
            "rewards": self.rewards,
            "judges": self.judges,
            "engine": self.engine,
        }
        if name == "sync":  # nothing is sampled
            sizes["engine"] = self.delivered

        pack = self.activations + self.head + self.backward + self.gathered + self.media
        work = {
            "judge": self.judged,
            "score": self.scored,
            "train": self.gradients + pack,
            "update": self.gradients + self.update,
        }
        names = tuple(model for kind in kinds for model in getattr(self.models, kind))
        return Phase(name, names, sum(sizes[kind] for kind in kinds), work.get(name, 0))

    def _on_device(self, phase: str) -> list[str]:
        """The kinds of models that are on the device in a phase."""
        there = set(PHASES[phase])
        if not self.placed:
            there |= {"trained", "frozen", "rewards"}
        if self.awake:
            there |= {"engine", "judges"}
        return [kind for kind in Models._fields if kind in there]
