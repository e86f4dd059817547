"""Runs engines in actors of Ray, on the machines of a cluster that is Ray's.

Each process of the trainer has actors of its own, in a placement group. What one samples any other would, so
the pool of servers spreads requests over them, and moves them away from an actor that dies.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import tree
from rft_fn.engine import prompt_media, requests, vllm
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.hf import build as build_hf
from rft_fn.engine.hf import check_config as check_hf
from rft_fn.engine.lifetime import EngineCore, supervised
from rft_fn.engine.pool import Pool
from rft_fn.engine.requests import BadPrompt, Request
from rft_fn.engine.server_protocol import Fault
from rft_fn.rollout import concat
from rft_fn.text import printable
from rft_fn.types import Media, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["build", "check_config"]

_BUCKET = 1 << 28  # bytes of weights that Ray stores as one object
_AGAIN = 1e-3  # s before another actor is asked; one that is dead stays so
_INNER = {"hf": (build_hf, check_hf), "vllm": (vllm.build, vllm.check_config)}


def check_config(config: EngineConfig) -> None:
    """Raise ValueError for options that the engines in actors cannot honour."""
    _INNER[config.actor_type][1](_inner(config))


def build(config: EngineConfig, model: str | nn.Module, tokenizer: Any) -> EngineCore:
    """Build the engine on actors; a module is copied there.

    ValueError without Ray; TimeoutError for a cluster that has no room within the time of a call.
    """
    return _Actors(config, model, tokenizer)


def _inner(config: EngineConfig) -> EngineConfig:
    """Return the options of the engine in an actor."""
    return replace(config, type=config.actor_type, actors=1, actor_type="hf", process=False)


class _Weight(NamedTuple):
    """A weight as Ray stores it: bytes, which readers on the same machine share."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    bytes: Any  # a numpy array


class _Weights(Iterator[tuple[str, Tensor]]):
    """Weights by name, out of buckets that are fetched one after the other."""

    def __init__(self, buckets: Sequence[Any], frozen: frozenset[str]):
        self.frozen = frozen
        self.weights = (x for bucket in buckets for x in _ray().get(bucket))

    def __next__(self) -> tuple[str, Tensor]:
        x = next(self.weights)
        flat = torch.from_numpy(x.bytes.copy())  # an engine may keep it, and Ray's own is read alone
        return x.name, flat.view(x.dtype).view(x.shape)


class _Actor:
    """The program of an actor: one engine, and the calls to it."""

    def build(
        self, config: EngineConfig, model: str | nn.Module, tokenizer: Any, threads: int
    ) -> EngineStatus:
        torch.set_num_threads(threads)
        make = _INNER[config.type][0]
        self.engine = supervised(partial(make, config, model, tokenizer))
        return self.engine.status()

    def sample(self, request: Request) -> Rollout:
        return tree.replace(request.ask(self.engine), media=None)  # the caller has them

    def load(self, buckets: Sequence[Any], frozen: frozenset[str], version: int) -> Delivered:
        return self.engine.load(_Weights(buckets, frozen), version=version)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self.engine, name)(*args, **options)


class _Actors:
    """The actors of one process, and what is known of them."""

    def __init__(self, config: EngineConfig, model: str | nn.Module, tokenizer: Any):
        ray = _ray()
        self.config = config
        self.started = not ray.is_initialized()
        if self.started:
            ray.init()
        self.lost: dict[str, str] = {}  # actors that are not asked any more, and why
        threads = config.threads or 1
        needs = {"CPU": float(threads)}
        if ray.cluster_resources().get("GPU"):
            needs["GPU"] = 1.0
        self.group = ray.util.placement_group([needs] * config.actors)
        if not self.group.wait(config.timeout):
            free = {x: ray.available_resources().get(x, 0.0) for x in needs}
            self.close()
            raise TimeoutError(
                f"engine_actors: expected room for {config.actors} with {_shown(needs)} each within "
                f"{config.timeout:g} s (engine_timeout), got {_shown(free)} that are free"
            )
        self.actors: dict[str, Any] = {}
        for i in range(config.actors):
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, i)
            kind = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0.0))(_Actor)
            self.actors[f"actor-{i}"] = kind.options(scheduling_strategy=place).remote()
        self.pool = Pool([*self.actors], self, name="ray", width=1, revive=self._revive, pause=_AGAIN)
        inner = _inner(config)
        try:
            found = self.pool.each(lambda name: self._ask(name, "build", inner, model, tokenizer, threads))
        except BaseException:
            self.close()
            raise
        first = next(iter(found.values()))
        self.last: EngineStatus = first
        self.last["engine"] = "ray"
        self.last["supported"] -= {"rows"}

    # ---- the functions of the engine

    def sample(self, request: Request) -> Rollout:
        """Share the prompts out, at most `config.batch` rows at a time."""
        request.check_rows()
        sent = prompt_media.to_send(request.prompts)
        asked = request._replace(prompts=sent, keys=list(request.keys), on_row=None)
        if not sent:
            return requests.empty(self.last["version"])
        share = -(-len(sent) // max(1, len(self.pool.working())))
        size = min(share, max(1, self.config.batch // request.n))
        parts = [slice(i, min(i + size, len(sent))) for i in range(0, len(sent), size)]
        found = self.pool.run([partial(self._sample, asked, part) for part in parts])
        rollout = concat(found, prompts=[part.stop - part.start for part in parts])
        media = [x.media if isinstance(x, prompt_media.Sent) else None for x in sent]
        return tree.replace(rollout, media=Media.of_prompts(media, request.n))

    def _sample(self, request: Request, part: slice, name: str) -> Rollout:
        try:
            return self._ask(name, "sample", request.part(part))
        except BadPrompt as error:
            raise error.moved(part.start) from None

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        return self.pool.run([lambda name: self._ask(name, "call", "score", rollout, sampling=sampling)])[0]

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Store the weights once, in buckets, for all actors."""
        began = time.perf_counter()
        buckets = [_ray().put(bucket) for bucket in _buckets(weights)]
        frozen = frozenset[str](getattr(weights, "frozen", ()))
        found = self._each("load", buckets, frozen, version)
        self.last["version"] = version
        return found[0]._replace(seconds=time.perf_counter() - began)

    def sleep(self) -> None:
        self._each("call", "sleep")
        self.last["asleep"] = True

    def wake(self) -> None:
        self._each("call", "wake")
        self.last["asleep"] = False

    def status(self) -> EngineStatus:
        return self.last

    def close(self) -> None:
        """End the actors and free their places, and Ray where it was started for them."""
        if self.started:
            _ray().shutdown()
        else:
            _ray().util.remove_placement_group(self.group)  # with its actors

    # ---- calls, and what the pool asks of them

    def _each(self, method: str, *args: Any) -> list[Any]:
        working = self.pool.working()
        return [*self.pool.each(lambda name: self._ask(name, method, *args), working).values()]

    def _ask(self, name: str, method: str, *args: Any, **options: Any) -> Any:
        """Return what an actor answers. Fault for one that died or is late; other errors are its engine's."""
        errors = _ray().exceptions
        try:
            answer = getattr(self.actors[name], method).remote(*args, **options)
            return _ray().get(answer, timeout=self.config.timeout)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.GetTimeoutError:
            why = f"gave no answer within {self.config.timeout:g} s"
        except errors.RayError as error:
            why = f"has died: {self.line(error)}"
        if name not in self.lost:
            self.lost[name] = why
            left = len(self.actors) - len(self.lost)
            print(
                printable(f"warning: engine ray: {name} {why}; {left} of {len(self.actors)} are left"),
                flush=True,
            )
        raise Fault(why)

    def _revive(self, name: str) -> None:
        """Leave an actor out: one that died does not come back, and another has missed its weights."""
        raise Fault(self.lost[name])

    def line(self, error: Exception | str) -> str:
        """Return what went wrong in one line."""
        return (str(error).splitlines() or ["unknown"])[0]

    def allow(self) -> None:
        """Let calls be made after `abort`."""

    def abort(self) -> None:
        """Leave calls under way to their limit of time."""


def _ray() -> Any:
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ValueError(
            f"engine_type: expected ray to be installed (pip install rft-fn[ray]): {error}"
        ) from None
    return ray


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[_Weight]]:
    """Yield the weights in lists of about _BUCKET bytes."""
    bucket: list[_Weight] = []
    for name, x in weights:
        plain = x.detach().cpu().contiguous()
        bucket.append(_Weight(name, x.dtype, x.shape, plain.flatten().view(torch.uint8).numpy()))
        if sum(x.bytes.nbytes for x in bucket) >= _BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _shown(resources: dict[str, float]) -> str:
    return " and ".join(f"{x:g} {name}" for name, x in resources.items())
