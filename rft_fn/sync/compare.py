"""The distance between an engine and its trainer under changed weights."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn import strategy
from rft_fn.sync.push import push
from rft_fn.types import Engine, Rollout, Sampling, Strategy, TrainState

__all__ = ["Change", "Sides", "agreed", "plain", "unchanged"]

Change = Callable[[str, Tensor], Tensor]  # a weight and its name -> what is sent in its place


def unchanged(name: str, x: Tensor) -> Tensor:
    """The weight itself."""
    return x


def plain(model: str) -> nn.Module:
    """The model of a name, with adapters merged."""
    lm = model_lib.load(model, quantize="none")
    merge = getattr(lm, "merge_and_unload", None)
    if merge is not None:
        lm = merge()
    return lm


def agreed(st: Strategy, x: float) -> float:
    """The number of rank 0, on every rank."""
    return float(st.gather(torch.tensor([x], dtype=torch.float64))[0])


class _Changed(Iterator[tuple[str, Tensor]]):
    """Weights on their way to an engine, changed; a plain model on the host gets them too."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], change: Change, copy: nn.Module | None):
        self.weights = iter(weights)
        self.change = change
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))
        self.names: list[str] = []
        self.places: dict[str, Tensor] = {}
        if copy is not None:
            self.places = dict(copy.named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, x = next(self.weights)
        self.names.append(name)
        x = self.change(name, x)
        place = self.places.get(name)
        if place is not None and place.shape == x.shape:
            place.copy_(x)
        return name, x


class Sides:
    """An engine, and the trainer as a plain copy of the model named `model`, on the host of rank 0.

    The copy takes each full tensor as it is sent, and scores by functional_call. This holds for every
    strategy, also for FSDP2 and ZeRO, whose own modules take no other parameters.
    """

    def __init__(
        self,
        st: Strategy,
        state: TrainState,
        engine: Engine,
        model: str,
        prompts: Sequence[Any],
        *,
        version: int,
        max_new: int,
    ):
        self.st = st
        self.state = state
        self.engine = engine
        self.model = model
        self.prompts = prompts
        self.version = version
        self.max_new = max_new
        self.names: list[str] = []  # of the tensors that are sent, in order
        self.copy: nn.Module | None = None
        if st.rank == 0:
            self.copy = plain(model)

    def gap(self, change: Change) -> float:
        """The mean |engine - trainer| of log-probs with changed weights.

        It is over the engines of all ranks. The engine keeps these weights. All ranks call it.
        """

        def export(state: TrainState, /) -> Iterable[tuple[str, Tensor]]:
            sent = _Changed(self.st.export(state), change, self.copy)
            self.names = sent.names
            return sent

        push(self.st._replace(export=export), self.state, self.engine, version=self.version)
        self.engine.wake()
        sampling = Sampling(max_new=self.max_new)
        keys = range(len(self.prompts))
        rollout = self.engine.generate(self.prompts, keys, n=1, sampling=sampling)
        every: Rollout = self.st.gather(rollout)
        gap = 0.0
        if self.copy is not None:
            gap = _scored_gap(self.copy, every)
        return agreed(self.st, gap)


@torch.no_grad()
def _scored_gap(copy: nn.Module, rollout: Rollout) -> float:
    """The mean |sampler - model| of the log-probs of a rollout."""
    alone = strategy.get_fake_strategy()
    apply, params = alone.bind(copy)
    found = alone.score(apply, params, rollout, 4096).logp
    gap = (found - rollout.logp).abs() * rollout.mask
    return float(gap.double().sum() / rollout.mask.sum())
