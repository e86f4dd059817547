"""The record of an estimate, and the phases of a step with the models that each has on the device."""

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["PHASES", "Asked", "Estimate", "Models", "Phase"]


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
    """A model that computes rewards; such models run one after the other."""

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
