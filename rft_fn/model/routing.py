"""The experts that read each token of a mixture, as data: recorded in a forward, replayed in another.

A router whose choice is given does all else as its family does. Its scores are gathered from those of all
experts, so that they have a gradient whatever the router itself would choose now. arXiv 2510.11370.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rft_fn.model.parts import inside_adapters
from rft_fn.model.router import Heard, heard_of, routers, weighs

__all__ = ["Recorder", "check_shape", "current", "follow", "replayed", "require_replay", "require_routers"]


_MOST_U8 = 255  # experts whose numbers, from 1 on, are in 8 bits
_CHOSEN: ContextVar[Tensor | None] = ContextVar("rft_routing", default=None)


# ---------- recorded


def require_routers(lm: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model by name, in order; ValueError for one without, or with others."""
    found, why = routers(lm)
    if why:
        raise ValueError(f"replay_routing: expected False for {type(inside_adapters(lm)).__name__}, {why}")
    return found


class Recorder:
    """Records the experts that each token of a forward goes to, by all routers of a model.

    ValueError for a model without routers, and for routers of another form.
    """

    def __init__(self, lm: nn.Module):
        self.routers = require_routers(lm)
        self.heard: dict[str, Heard] = {}

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Record each forward of the block."""
        handles = [m.register_forward_hook(partial(self._note, name)) for name, m in self.routers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, router: nn.Module, _: Any, out: Any) -> None:
        self.heard[name] = heard_of(router, out, "replay_routing", "leave it off")

    def take(self) -> Tensor:
        """Return the routing [T, M, k] of the last forward, as of a rollout: 1 + the number of an expert."""
        silent = [name for name in self.routers if name not in self.heard]
        if silent:
            raise ValueError(f"replay_routing: expected a forward to call every router, {silent[0]} was not")
        heard = [self.heard.pop(name) for name in self.routers]
        experts = max(x.logits.shape[-1] for x in heard)
        chosen = torch.stack([x.chosen for x in heard], 1) + 1
        return chosen.to(torch.uint8 if experts <= _MOST_U8 else torch.int16)


# ---------- replayed


def current() -> Tensor | None:
    """Return the routing [T, M, k] that routers of the running forward take, or None."""
    return _CHOSEN.get()


@contextmanager
def replayed(routing: Tensor | None) -> Iterator[None]:
    """Have routers that `follow` take this routing in the block; None for their own choice."""
    before = _CHOSEN.set(routing)
    try:
        yield
    finally:
        _CHOSEN.reset(before)


def follow(lm: nn.Module) -> int:
    """Make the routers of a model take what is `replayed`, in place; return their number.

    Classes stay as they are: a router gets a subclass of its own, as with `packed_states.separated`.
    """
    found = list(routers(lm)[0].values())
    for number, router in enumerate(found):
        if not hasattr(router, "rft_number"):
            router.__class__ = _following_class(type(router))
        router.rft_number = number  # type: ignore[assignment]
    return len(found)


def check_shape(routing: Tensor, count: int, lm: nn.Module) -> None:
    """Raise ValueError for the routing of a model with another number of routers."""
    if routing.dim() != 3 or routing.shape[1] != count:
        raise ValueError(
            f"routing: expected [T, {count}, k] for the {count} routers of {type(lm).__name__}, got "
            f"{list(routing.shape)}"
        )


@cache
def _following_class(cls: type[nn.Module]) -> type[nn.Module]:
    plain = cls.forward

    @torch.compiler.disable  # a graph would hold the routing of one pack
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        routing = current()
        if routing is None:
            return plain(self, *args, **kwargs)
        with _Given(routing[:, self.rft_number], _experts(self)) as given:
            out = plain(self, *args, **kwargs)
        if not given.taken:
            raise ValueError(f"replay_routing: expected a router with a top-k, {cls.__name__} has none")
        return out

    return type(f"Following{cls.__name__}", (cls,), {"forward": forward})


def _experts(router: nn.Module) -> int:
    """Return how many experts a router has, by the names that transformers gives this; 0 if by none."""
    for held in (router, getattr(router, "config", None)):
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if isinstance(found := getattr(held, name, None), int):
                return found
    return 0


class _Given(TorchFunctionMode):
    """Gives the top k of scores [T, E] the indices [T, k] of a routing, where that has some.

    What leaves out groups of experts leaves out none of these: a score of 0 or -inf has no gradient.
    """

    def __init__(self, routing: Tensor, experts: int):
        super().__init__()
        self.routing = routing
        self.shape = (len(routing), experts)
        self.free = (routing == 0).any(-1, keepdim=True)  # [T, 1]
        self.taken = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name not in ("topk", "masked_fill", "masked_fill_"):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if x.dim() == 2 and x.shape[1] == self.shape[1] and x.shape[0] != self.shape[0]:
            raise ValueError(f"routing: expected that of {x.shape[0]} tokens, got of {self.shape[0]}")
        if tuple(x.shape) != self.shape:
            return func(*args, **kwargs)
        if name != "topk":
            mask = args[1] if len(args) > 1 else kwargs.pop("mask")
            return func(x, mask & self.free, *args[2:], **kwargs)
        k = args[1] if len(args) > 1 else kwargs["k"]
        if k != self.routing.shape[1]:
            return func(*args, **kwargs)
        self.taken = True
        own = func(*args, **kwargs).indices
        index = torch.where(self.routing > 0, self.routing.long() - 1, own)
        return torch.return_types.topk((x.gather(-1, index), index))


@torch.no_grad()
def require_replay(lm: nn.Module, tokens: Tensor) -> Tensor:
    """Return the routing [0, M, k] of no tokens, for a model that can replay one; ValueError for others.

    Tries it on `tokens` [n]: the model's own choice changes nothing, and any other experts are weighed by
    their own logits.
    """
    recorder = Recorder(lm)
    follow(lm)

    def heard(routing: Tensor | None) -> tuple[list[Heard], Tensor]:
        with recorder.listen(), replayed(routing):
            lm(input_ids=tokens[None], use_cache=False)
        found = list(recorder.heard.values())
        return found, recorder.take()

    own, routing = heard(None)
    again, _ = heard(routing)
    size = [x.logits.shape[-1] for x in own]
    moved = [x.chosen.add(1).remainder(n).add(1) for x, n in zip(own, size)]
    other, _ = heard(torch.stack(moved, 1))
    for router, a, b, c, want in zip(recorder.routers.values(), own, again, other, moved):
        same = torch.equal(a.chosen, b.chosen) and torch.allclose(a.weights, b.weights, rtol=1e-2, atol=1e-4)
        if not same or not torch.equal(c.chosen + 1, want) or not weighs(c):
            kind = next(cls for cls in type(router).__mro__ if not cls.__name__.startswith("Following"))
            raise ValueError(
                f"replay_routing: expected routers that weigh any experts by their own logits, "
                f"{kind.__name__} of {type(lm).__name__} does not; leave it off"
            )
    return routing[:0]
