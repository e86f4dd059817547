"""Samples by transformers only, on a model in this process."""

import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn import tree
from rft_fn.engine import prompt_media, requests
from rft_fn.engine.adapters_alone import AdapterLoad
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.hf import merging
from rft_fn.engine.hf.probe import find_cache_support
from rft_fn.engine.hf.row_batch import CacheSupport
from rft_fn.engine.hf.row_scores import score_rows
from rft_fn.engine.hf.sampler import Sampler
from rft_fn.engine.hf.step_memory import StepMemory
from rft_fn.engine.lifetime import EngineCore, supervised
from rft_fn.engine.requests import Request, Stop
from rft_fn.engine.weight_folder import LoadCheck, manifest
from rft_fn.model import quantize
from rft_fn.model.copies import mover_of
from rft_fn.model.forward import forget_lengths, rope_switch
from rft_fn.model.packed_attention import leave_out_plans
from rft_fn.model.packing_probe import usual_tokens
from rft_fn.model.placeholders import placeholder_ids
from rft_fn.model.quantize import pack_again, packed, set_fast
from rft_fn.model.router import without_groups
from rft_fn.model.routing import Recorder, require_replay
from rft_fn.model.weight_files import Stored
from rft_fn.rollout import take
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["build", "check_config", "hf"]

_LONG = 512  # tokens of a prompt from which on a GPU gains by reading it once, not for each of its samples
_TRIED = 8  # tokens that show whether the experts of a model can be replayed
_PAUSE = 1e-3  # s between two looks at whether a load has ended
_CHECK_EVERY = 16  # tokens after which the host looks at them, where it would wait for the device each time


def check_config(config: EngineConfig) -> None:
    """Raise ValueError for options that an engine in this process cannot honour."""
    if config.tp_size != 1 or config.mem_util:
        raise ValueError(
            f"engine_tp_size, engine_mem_util: expected 1 and 0 for hf, which has one process and takes "
            f"what it needs, got {config.tp_size} and {config.mem_util}"
        )
    if config.servers:
        raise ValueError(
            f"engine_servers: expected none for hf, got {', '.join(config.servers)}; choose openai or sglang"
        )
    usual = EngineConfig()
    for name in ("max_model_len", "block_size", "dtype", "speculative"):
        got = getattr(config, name)
        if got != getattr(usual, name):
            raise ValueError(f"engine_{name}: expected {getattr(usual, name)!r} for hf, got {got!r}")


def build(config: EngineConfig, model: str | nn.Module, tokenizer: Any) -> EngineCore:
    """Build an engine with weights of `model`, which is loaded by its name or taken over."""
    base = merging.base_files(config, model)
    if config.bf16:
        lm = model_lib.load(model, quantize="none", dtype=torch.bfloat16)
    else:
        lm = model_lib.load(model, quantize="none")
    engine = _in_process(lm, tokenizer, config)
    engine.base = base
    return engine


def hf(
    lm: nn.Module,
    tokenizer: Any,
    *,
    batch: int = 64,
    sleep: bool = True,
    fast_linear: bool = True,
    routing: bool = False,
    kept: bool = False,
    fused: bool = True,
) -> Engine:
    """Return an Engine over a transformers model that it owns: `load` copies weights into it.

    Weights that are lent, in the types and on the device of its own, take the place of those instead.

    `batch` is rows at a time. While it sleeps, its weights are in host memory; `sleep=False` disables that.
    Adapters are merged into the model first. With `fast_linear` its linear layers are as in training, and
    large weights are packed for oneDNN, where that is faster, while it samples.

    Prompts are sorted by length, so that a batch holds little padding, or none where the model's cache does
    not allow it (a few random tokens before the first sample show it). Rows that ended leave the batch at
    once. With `routing` rollouts have the experts of a mixture that each token went to, with `kept` the words
    that top_p and top_k left at each, which a trainer then takes; steps of fixed shapes are left out.
    On CUDA `fused` reads new tokens by kernels of Triton, in models whose decoder is built as Llama's is.
    ValueError for a quantised model, for one that is not of transformers, and for `routing` of one whose
    routers cannot be given their choice.
    """
    config = EngineConfig(
        batch=batch, sleep=sleep, fast_linear=fast_linear, routing=routing, kept=kept, fused=fused
    )
    core = _in_process(lm, tokenizer, config)
    return supervised(lambda: core)


def _in_process(lm: nn.Module, tokenizer: Any, config: EngineConfig) -> "_InProcess":
    """Prepare a model for sampling."""
    from transformers import PreTrainedModel

    quantize.require_whole(lm, "an engine")
    merge = getattr(lm, "merge_and_unload", None)
    plain = lm if merge is None else merge()  # weights arrive by the plain model's names
    if not isinstance(plain, PreTrainedModel):
        raise ValueError(f"model: expected one of transformers, got {type(plain).__name__}")
    plain.eval()
    leave_out_plans()
    set_fast(plain, config.fast_linear, narrow=plain.dtype == torch.bfloat16)
    without_groups(plain)
    return _InProcess(plain, tokenizer, config)


class _InProcess:
    """A transformers model that samples, and its mutable state."""

    def __init__(self, lm: "PreTrainedModel", tokenizer: Any, config: EngineConfig):
        forget_lengths(lm)
        self.lm = lm
        self.tokenizer = tokenizer
        self.batch = config.batch
        self.can_sleep = config.sleep
        self.kept = config.kept
        self.fused = config.fused
        self.home: torch.device = lm.device
        self.manifest = manifest(lm)
        self.ends = requests.end_tokens(lm, tokenizer)
        self.window: int | None = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
        self.batching: CacheSupport | None = None  # set before the first sample
        self.steps = StepMemory()  # of fixed shapes, from one call to the next
        self.version = 0
        self.borrowed: dict[int, tuple[Tensor, int]] = {}  # by parameter: what is lent, and its edition
        self.base: Stored | None = None  # what adapters that come alone are merged into
        self.asleep = False
        self.in_flight = config.in_flight  # whether a load comes between the tokens of a call of `sample`
        self.turn = threading.RLock()  # of who uses the weights
        self.arriving = threading.Event()
        self.whole = True  # the weights are of one load
        self.recorder: Recorder | None = None
        self.unrouted: Tensor | None = None  # [0, M, k], of no tokens
        if config.routing and rope_switch(lm.config) is not None:
            raise ValueError(
                f"replay_routing: expected False for {type(lm).__name__}, which reads a sequence anew once "
                "it has grown (LongRoPE)"
            )
        if config.routing:
            self.unrouted = require_replay(lm, usual_tokens(lm.config)[:_TRIED].to(lm.device))
            self.recorder = Recorder(lm)

    def sample(self, request: Request) -> Rollout:
        """Sample as `Generate` says, awake from then on."""
        with self.turn:
            return self._sample(request)

    def _look(self) -> int:
        """Let a load that waits go first, and return the version of the weights."""
        if self.arriving.is_set():
            self.turn.release()
            while self.arriving.is_set():
                time.sleep(_PAUSE)
            self.turn.acquire()
        if not self.whole:
            raise RuntimeError("weights: expected a whole load in flight, got one that failed")
        return self.version

    @torch.no_grad()
    def _sample(self, request: Request) -> Rollout:
        ids = requests.token_ids(request.prompts, self.tokenizer)
        request.check(ids, self.window)
        media = prompt_media.read(request.prompts, ids, request.start)
        prompt_media.check(self.lm, ids, media)
        kept = self.kept and request.sampling.truncates
        if not ids:
            routing = None if self.unrouted is None else self.unrouted.cpu()[None][:0]
            left = torch.zeros(0, 0, 0, dtype=torch.int32) if kept else None
            versions = torch.zeros(0, 0, dtype=torch.long) if self.in_flight else None
            empty = requests.empty(self.version)
            return tree.replace(empty, routing=routing, kept=left, versions=versions)

        self._check_borrowed()
        self.wake()
        pad = self.tokenizer.pad_token_id
        if self.batching is None:
            self.batching = find_cache_support(self.lm, pad, fused=self.fused)
        alone = request.n == 1 or (self.lm.device.type != "cpu" and max(map(len, ids)) < _LONG)
        batching = self.batching._replace(shares=False) if alone else self.batching
        if self.recorder is not None or kept:
            # a graph tells nobody what it has routed, and how many words are left has no fixed shape
            batching = batching._replace(fixed=False)
        stop = Stop(self.tokenizer, self.ends, request.sampling.stop)
        check_every = 1 if self.lm.device.type == "cpu" else _CHECK_EVERY
        sampler = Sampler(
            self.lm,
            batching,
            request.sampling,
            stop,
            pad,
            self.batch,
            check_every,
            memory=self.steps,
            on_row=request.on_row,
            recorder=self.recorder,
            kept=kept,
            look=self._look if self.in_flight else None,
        )
        with packed(self.lm), nullcontext() if self.recorder is None else self.recorder.listen():
            responses = sampler.responses(ids, media, request.rows())
        return requests.assemble(
            ids,
            responses,
            pad=pad,
            version=self.version,
            media=prompt_media.tensors(media),
            tokenizer=self.tokenizer,
        )

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """Score as `Score` says, by padded forwards of `batch` rows.

        Tokens before a switch of rotary factors are scored as they were drawn, by the factors of short rows.
        """
        with self.turn:
            return self._score(rollout, sampling)

    @torch.no_grad()
    def _score(self, rollout: Rollout, sampling: Sampling | None) -> Tensor:
        if not len(rollout.tokens):
            return torch.zeros(rollout.tokens.shape)
        self._check_borrowed()
        self.wake()
        if sampling is None:
            sampling, rollout = Sampling(), tree.replace(rollout, temperature=None)
        parts = torch.arange(len(rollout.tokens)).split(self.batch)
        pad = self.tokenizer.pad_token_id
        return torch.cat([score_rows(self.lm, take(rollout, part), sampling, pad=pad) for part in parts])

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Load as `Load` says, in flight between two tokens of the rows that are sampled.

        Their keys and values stay as the older weights made them.
        """
        self.arriving.set()
        try:
            with self.turn:
                self.whole = False
                delivered = self._load(weights, version)
                pack_again(self.lm)
                self.whole = True
                return delivered
        finally:
            self.arriving.clear()

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Delivered:
        """Copy each tensor into its place, or put it there where it is lent."""
        if getattr(weights, "adapters", False):
            return self._load_adapters(weights, version)
        self.base = None  # what comes now may be more than adapted layers
        lent: frozenset[str] = getattr(weights, "lend", frozenset)()
        places: dict[str, Tensor] = dict(self.lm.named_buffers())
        places |= self.lm.named_parameters(remove_duplicate=False)
        check = LoadCheck(self.manifest, weights)
        for name, x in weights:
            check.take(name, x)
            place = places[name]
            if name in lent and _is_alike(place, x):
                place.data = x.detach()
                self.borrowed[id(place)] = (x, x._version)
                continue
            if self.borrowed.pop(id(place), None) is not None:
                place.data = torch.empty_like(place)
            place.copy_(x)
        delivered = check.finish(version)
        self.version = version
        return delivered

    def _load_adapters(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Delivered:
        """Merge adapters that come alone. ValueError where this engine takes none, or has other weights."""
        if self.base is None:
            raise ValueError("weights: expected whole ones (engine_adapters), got adapters alone")
        load = AdapterLoad(self.manifest)
        for name, x in weights:
            load.take(name, x)
        delivered = load.finish(version)
        merging.merge(self.lm, self.base, load.tensors)
        self.version = version
        return delivered._replace(seconds=time.perf_counter() - load.began)

    def _check_borrowed(self) -> None:
        """Raise BadRequest where a weight that was lent has been updated since."""
        if any(x._version != edition for x, edition in self.borrowed.values()):
            raise requests.BadRequest(
                f"engine hf: expected the weights that were lent as of version {self.version}, got updated "
                "ones; push them first"
            )

    def sleep(self) -> None:
        """Move the weights to the host, where that is not disabled."""
        if self.can_sleep and not self.asleep:
            self.steps.clear()  # its graphs read the weights where they are now
            self._move(to_host=True)
            self.asleep = True

    def wake(self) -> None:
        """Move the weights back to the device."""
        if self.asleep:
            self._move(to_host=False)
            self.asleep = False

    def _move(self, to_host: bool) -> None:
        mover = mover_of(self.home)
        if mover is not None:
            self.lm._apply(mover.to_host if to_host else mover.to_device)
            mover.finish()

    def status(self) -> EngineStatus:
        """Return the state of the engine, which lives as long as the process."""
        status: EngineStatus = {
            "engine": "hf",
            "alive": True,
            "version": self.version,
            "asleep": self.asleep,
            "supported": frozenset(
                {"load", "score", "start", "rows", *(["sleep"] if self.can_sleep else [])}
            ),
            "window": self.window,
            "placeholders": placeholder_ids(self.lm.config),
            "computes": self.lm.dtype,
            "adapters": self.base is not None,
        }
        # a model may keep some of its weights wider than the rest
        types = {p.dtype for p in self.lm.parameters()}
        if len(types) == 1:
            status["dtype"] = types.pop()
        return status

    def close(self) -> None:
        """Do nothing: the model goes with this object."""


def _is_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether products by either tensor are the same to the bit: of one type, place and layout."""
    same = a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()
    return same and b.storage_offset() == 0
