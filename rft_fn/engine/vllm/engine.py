"""Runs vLLM in this process, as an engine or as one rank of a tensor-parallel engine."""

import gc
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import dist, memory
from rft_fn.engine import adapters_alone, prompt_media, requests, speculative
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.lifetime import EngineCore
from rft_fn.engine.requests import Request, Stop
from rft_fn.engine.server_protocol import stored_tensors
from rft_fn.engine.vllm import sampler, surroundings
from rft_fn.engine.vllm.adapter_slots import AdapterSlots
from rft_fn.engine.vllm.sampler import Asked, Sampler
from rft_fn.engine.vllm.surroundings import Group, import_vllm, name_shared_memory
from rft_fn.engine.weight_folder import LoadCheck, manifest
from rft_fn.engine.worker import MissingElements, checked, drafts_of, replace
from rft_fn.model.load import base_folder, load, usual_device
from rft_fn.model.model_names import resolve
from rft_fn.model.placeholders import placeholder_ids
from rft_fn.model.save import save
from rft_fn.model.weight_files import folder_of
from rft_fn.types import Rollout, Sampling
from rft_fn.types.engine import Delivered, Drafts, EngineStatus

__all__ = ["InProcess", "ModelFolder", "build", "check_config", "check_media"]


DTYPES = ("auto", "float32", "bfloat16", "float16")
HOTTEST = 2.0  # vLLM refuses temperatures above it
STEP_TOKENS = 4096  # least that vLLM may read in a step, next to one whole prompt
COUNTERS = (
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)  # fmt: skip
"""vLLM's counters of the fields of `Drafts`."""
CPU_BLOCK = 32  # tokens of a block of the cache: the fewest that vLLM takes on a CPU, where it would use 128


def check_config(config: EngineConfig) -> None:
    """Raise ValueError for an unknown dtype, inexact drafts, or a tp_size that does not divide the world."""
    if config.dtype not in DTYPES:
        raise ValueError(f"engine_dtype: expected one of {', '.join(DTYPES)}, got {config.dtype!r}")
    if config.speculative:
        speculative.of_option(config.speculative)
    world = dist.started()
    if world % config.tp_size:
        raise ValueError(
            f"engine_tp_size: expected a divisor of the {world} processes of this run, got {config.tp_size}; "
            "start as many with torchrun"
        )


def check_media(config: EngineConfig, model: str) -> None:
    """Raise ValueError for media that vLLM cannot take; an engine in its own process asks there."""
    if config.process:
        return
    with surroundings.restore_process_state(engine=False):
        import_vllm()
        sampler.check_family(load(base_folder(resolve(model)), meta=True))


def build(config: EngineConfig, model: str | nn.Module, tokenizer: Any) -> EngineCore:
    """Build an engine with weights of `model`: a name, or a module, which is written to a folder for vLLM.

    All processes build it together. ImportError, with the package to install, without vLLM.
    """
    return InProcess(config, model, tokenizer)


class ModelFolder:
    """The folder that vLLM reads a model from; a module, or adapters, are written to one first."""

    def __init__(self, model: str | nn.Module, tokenizer: Any, limit: int):
        """`limit` is the most tokens of a prompt and its response, 0 for the model's own."""
        from transformers import GenerationConfig

        self.temporary: TemporaryDirectory[str] | None = None
        self.path = self._path(model)
        self.skeleton: Any = load(str(self.path), meta=True)  # the model without weights
        self.places = placeholder_ids(self.skeleton.config)  # of media; empty for a text model
        self.config: Any = self.skeleton.config.get_text_config()
        self.manifest = manifest(self.skeleton)
        if (self.path / "generation_config.json").exists():
            self.skeleton.generation_config = GenerationConfig.from_pretrained(str(self.path))
        self.ends = requests.end_tokens(self.skeleton, tokenizer)
        own = getattr(self.config, "max_position_embeddings", None)
        self.window: int | None = min((x for x in (own, limit) if x), default=None)

    def _path(self, model: str | nn.Module) -> Path:
        if isinstance(model, str):
            folder = folder_of(resolve(model))
            if not (folder / "adapter_config.json").exists():
                return folder
            model = load(model, quantize="none", device="cpu")
        self.temporary = TemporaryDirectory(prefix="rft_fn_vllm_")
        return save(Path(self.temporary.name) / "model", model, merge=True)

    def cache_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the memory of the keys and values of `tokens` tokens in all layers."""
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        return 2 * tokens * self.config.num_hidden_layers * kv_heads * width * dtype.itemsize

    def close(self) -> None:
        """Remove a folder that was written here."""
        if self.temporary is not None:
            self.temporary.cleanup()


class InProcess:
    """An in-process vLLM engine and its mutable state."""

    def __init__(self, config: EngineConfig, model: str | nn.Module, tokenizer: Any):
        self.tokenizer = tokenizer
        self.config = config
        self.device = usual_device(None)
        self.can_sleep = config.sleep and self.device.type == "cuda"
        self.version = 0
        self.drafts = Drafts()
        self.asleep = False
        self.missing: MissingElements | None = None  # in the first whole load
        self.llm: Any = None

        # vLLM's import changes the process too, and comes first: it may not be there
        with surroundings.restore_process_state():
            vllm = import_vllm()
            surroundings.keep_groups()
            if config.tp_size > 1 and self.device.type == "cpu":
                name_shared_memory()
            self.adapters = AdapterSlots(config, model)
            self.folder = ModelFolder(model, tokenizer, config.max_model_len)
            self.window = self.folder.window
            try:
                if self.folder.places:
                    sampler.check_family(self.folder.skeleton)
                    self.adapters.check_text()
                self.llm = vllm.LLM(**self._options())
                drafts = drafts_of(self.llm.llm_engine.vllm_config)
                if drafts is not None:
                    speculative.check_exact(speculative.OPTION, drafts)
            except BaseException:
                self.folder.close()
                raise
        self.group = Group(config.tp_size)
        self.fields: sampler.Fields | None = None
        if self.folder.places:
            self.fields = sampler.fields_of(self.llm.llm_engine.vllm_config.model_config)
        self.sampler = Sampler(self.llm.llm_engine, self.device, config.timeout, self._request)

    def _request(self, row: Asked) -> dict[str, Any]:
        """Return vLLM's input of a row."""
        if self.fields is None:
            return {"prompt_token_ids": row.prompt}
        dtype = getattr(torch, self._dtype())
        return sampler.request(self.folder.skeleton, self.fields, row.prompt, row.media, dtype)

    def _dtype(self) -> str:
        """Return the type of the weights: the trainer's usual one on this device, unless it is given."""
        usual = "float32" if self.device.type == "cpu" else "bfloat16"
        return usual if self.config.dtype == "auto" else self.config.dtype

    def _options(self) -> dict[str, Any]:
        """Return the arguments of vLLM's constructor."""
        dtype = self._dtype()
        options: dict[str, Any] = {
            "model": str(self.folder.path),
            "dtype": dtype,
            "seed": 0,
            "max_num_seqs": self.config.batch,
            "tensor_parallel_size": self.config.tp_size,
            "enable_prefix_caching": True,
            # a prompt read in parts draws from its row's generator for each part, and a CPU's cannot go back
            "enable_chunked_prefill": self.device.type != "cpu",
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
            # prompts are tokens, and `Stop` looks for texts; a processor wants the tokenizer
            "skip_tokenizer_init": not self.folder.places,
            "generation_config": "vllm",  # the model's own defaults are not those of Sampling
            "enforce_eager": self.device.type == "cpu",
            "enable_sleep_mode": self.can_sleep,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self.folder.places:
            options["skip_mm_profiling"] = True  # the cache has its size already
            options["mm_processor_cache_gb"] = 0  # media come as tensors, and once
        if self.window:
            options["max_model_len"] = self.window
            options["max_num_batched_tokens"] = max(self.window, self.config.batch, STEP_TOKENS)
        block = self.config.block_size or (CPU_BLOCK if self.device.type == "cpu" else 0)
        if block:
            options["block_size"] = block

        if self.config.speculative:
            options["speculative_config"] = speculative.of_option(self.config.speculative)
            options["disable_log_stats"] = False  # which count drafts

        options |= self.adapters.options(self.folder.skeleton)
        # several processes started together: one engine each, or one over the ranks of each group
        if dist.started() > 1:
            options["distributed_executor_backend"] = "external_launcher"
        return options | self._memory(dtype)

    def _memory(self, dtype: str) -> dict[str, Any]:
        """Return a share of the device, or the size of a cache for `batch` sequences, at most a quarter."""
        if self.config.mem_util:
            return {"gpu_memory_utilization": self.config.mem_util}
        size = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else memory.host_memory()
        block = self.config.block_size or CPU_BLOCK
        longest = (self.window or 4096) + block  # a sequence ends within a block
        needed = self.folder.cache_bytes(self.config.batch * longest, getattr(torch, dtype))
        return {"kv_cache_memory_bytes": min(needed, size // 4)}

    @torch.no_grad()
    def sample(self, request: Request) -> Rollout:
        """Sample as `Generate` says, awake from then on; all ranks of a tensor-parallel group call it.

        vLLM's own generator, seeded with a row's key, is the row's stream, so `start` must be 0. At
        temperature 0 top_p and top_k leave log-probs as they are.
        """
        n, sampling = request.n, request.sampling
        refused = None
        ids: list[list[int]] = []
        rows: list[requests.Row] = []
        media: list[prompt_media.PromptMedia] = []
        try:
            ids = requests.token_ids(request.prompts, self.tokenizer)
            request.check(ids, self.window)
            media = prompt_media.read(request.prompts, ids)
            prompt_media.check(self.folder.skeleton, ids, media)
            rows = request.rows()
            self._check(ids, rows)
        except requests.BadRequest as error:
            refused = error

        # the ranks of a group answer the requests of all of them together, and each keeps its own
        asked = [
            Asked(ids[b // n], row.key, row.max_new, media[b // n], row.temperature)
            for b, row in enumerate(rows)
        ]
        all_rows, own = self.group.together(asked, sampling, refused)
        if all_rows:
            self.wake()
        stop = Stop(self.tokenizer, self.folder.ends, sampling.stop)
        before = self._drafted()
        responses = self.sampler.responses(all_rows, sampling, stop)[own]
        self.drafts = Drafts(*(x + b - a for x, a, b in zip(self.drafts, before, self._drafted())))
        return requests.assemble(
            ids,
            responses,
            pad=self.tokenizer.pad_token_id,
            version=self.version,
            media=prompt_media.tensors(media),
            tokenizer=self.tokenizer,
        )

    def _drafted(self) -> Drafts:
        """Return what vLLM's newest engine of this process has drafted, by its own counters."""
        if not self.config.speculative:
            return Drafts()
        counts = {x.name: x.value for x in self.llm.get_metrics() if x.name in COUNTERS}
        return Drafts(*(counts.get(name, 0) for name in COUNTERS))

    def _check(self, prompts: Sequence[Sequence[int]], rows: Sequence[requests.Row]) -> None:
        """Raise BadRequest for what vLLM would refuse only after it has begun, and for a row's `start`."""
        hottest = max((row.temperature for row in rows), default=0)
        if hottest > HOTTEST:
            raise requests.BadRequest(f"temperature: expected at most {HOTTEST} for vllm, got {hottest}")
        words = self.folder.config.vocab_size
        for i, prompt in enumerate(prompts):
            unknown = next((x for x in prompt if not 0 <= x < words), None)
            if unknown is not None:
                raise requests.BadPrompt(i, f"tokens below {words}", str(unknown))
        for b, row in enumerate(rows):
            if row.start:
                raise requests.BadRequest(
                    f"start[{b}]: expected 0 for vllm, which cannot begin within a stream, got {row.start}"
                )

    @torch.no_grad()
    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """Score as `Score` says, at Sampling() only: vLLM ignores every option for given tokens."""
        plain = sampling is None or (
            sampling.temperature == 1 and not sampling.truncates and rollout.temperature is None
        )
        lengths = rollout.length.tolist()
        refused = None
        if not plain:
            refused = requests.BadRequest(
                f"sampling: expected None for vllm, which scores the model's softmax alone, got {sampling}"
            )
        if self.window and lengths and max(lengths) >= self.window:
            refused = requests.BadRequest(
                f"rollout: expected rows of fewer than {self.window} tokens, got {max(lengths)}"
            )
        media = prompt_media.of_rows(rollout, rollout.length)
        rows = [Asked(x[:n].tolist(), 0, 1, shown) for x, n, shown in zip(rollout.tokens, lengths, media)]
        all_rows, own = self.group.together(rows, Sampling(), refused)
        if all_rows:
            self.wake()

        out = torch.zeros(rollout.tokens.shape)
        for b, logp in enumerate(self.sampler.scores(all_rows, self.sampler.adapter)[own]):
            out[b, : len(logp)] = torch.tensor(logp)
        return torch.where(rollout.mask.cpu(), out, 0)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Load as `Load` says; each rank of a tensor-parallel group takes its part of the full tensors.

        Names that never change (`weights.frozen`) come from the model's files. ValueError names the tensor,
        or the layer of vLLM's that did not get what it got in the first load.
        """
        asleep = self.asleep
        self.wake()
        if getattr(weights, "adapters", False):
            delivered = self._load_adapters(weights, version)
            if asleep:
                self.sleep()
            return delivered
        self.adapters.leave(self.llm)  # whole weights have no adapters, and none go on them
        self.sampler.adapter = None
        check = LoadCheck(self.folder.manifest, weights)
        names = check.frozen & check.expected.shape.keys()
        unchanged = stored_tensors(self.folder.skeleton.rft_weights.stored, names)
        with surroundings.restore_random_state():
            (missing,) = self.llm.collective_rpc(
                replace, args=(checked(check, weights, unchanged), self.missing)
            )
        delivered = check.finish(version)
        self.missing = missing

        # keys and values of the old weights must not answer for the new ones
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("engine vllm: expected its prefix cache to be emptied after a load, got False")
        if self.folder.places:
            self.llm.llm_engine.reset_encoder_cache()
        self.version = version
        if asleep:
            self.sleep()
        return delivered

    def _load_adapters(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Delivered:
        """Load adapters that come alone, under a name and a number that vLLM has not seen.

        ValueError for a layer that vLLM has no place for, and where log-probs stay those of the base model.
        """
        self.adapters.check()
        load = adapters_alone.AdapterLoad(self.folder.manifest)
        for name, x in weights:
            load.take(name, x)
        delivered = load.finish(version)
        with surroundings.restore_random_state():
            request = self.adapters.load(self.llm, load.tensors)
        if adapters_alone.may_show(load.tensors):
            probe = [Asked(list(adapters_alone.PROBE), 0, 1)]
            self.adapters.without = self.adapters.without or self.sampler.scores(probe, None)[0]
            (under,) = self.sampler.scores(probe, request)
            adapters_alone.check_arrived(request.lora_name, version, self.adapters.without, under)
        self.sampler.adapter = request
        self.adapters.leave_older(self.llm)
        self.version = version
        return delivered._replace(seconds=time.perf_counter() - load.began)

    def sleep(self) -> None:
        """Move the weights to the host and drop the cache, on a GPU; vLLM cannot on a CPU."""
        if self.can_sleep and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        """Move the weights back to the device, with an empty cache."""
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def status(self) -> EngineStatus:
        """Return the state of the engine."""
        supported = {"load", "score", "sleep"} if self.can_sleep else {"load", "score"}
        status: EngineStatus = {
            "engine": "vllm",
            "alive": self.llm is not None,
            "version": self.version,
            "asleep": self.asleep,
            "supported": frozenset(supported),
            "window": self.window,
            "placeholders": self.folder.places,
            "computes": getattr(torch, self._dtype()),
            "adapters": self.adapters.takes,
            "base": self.adapters.base,
        }
        if self.config.speculative:
            status["drafts"] = self.drafts
        return status

    def close(self) -> None:
        """Free the model and its cache; the process keeps vLLM's modules."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        del self.sampler
        surroundings.leave()
        self.folder.close()
        self.adapters.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
