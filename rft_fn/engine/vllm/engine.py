"""An Engine over vLLM in this process, alone or as one rank of a tensor-parallel group."""

import gc
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rft_fn import dist, memory
from rft_fn.engine import prompt_media, requests
from rft_fn.engine.lifetime import EngineConfig, dead_after_failure
from rft_fn.engine.requests import BadRequest, Stop
from rft_fn.engine.vllm import reload, sampler, surroundings
from rft_fn.engine.vllm.reload import ModelFolder
from rft_fn.engine.vllm.sampler import Asked, Sampler
from rft_fn.engine.vllm.surroundings import part
from rft_fn.engine.weight_folder import Arrival
from rft_fn.model.load import base_folder, load, usual_device
from rft_fn.model.model_names import resolve
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["Group", "InProcess", "build", "check_config", "check_media", "name_shared_memory"]


# ---------- the ranks that share one engine: requests of all of them are answered together, in order


T = TypeVar("T")


class Group:
    """The ranks of a tensor-parallel engine, which all have to give vLLM the same requests."""

    def __init__(self, size: int):
        self.size = size
        self.rank = 0
        self.processes: Any = None
        if size > 1:
            found = part("distributed.parallel_state").get_tp_group()
            self.rank = found.rank_in_group
            self.processes = found.cpu_group

    def together(
        self, own: Sequence[T], sampling: Sampling, refused: BadRequest | None
    ) -> tuple[list[T], slice]:
        """(the requests of all ranks in their order, which of them are this rank's).

        BadRequest on every rank where one is refused, or where ranks sample otherwise: none may begin alone.
        """
        if self.size == 1:
            parts = [(list(own), sampling, refused and str(refused))]
        else:
            parts = dist.all_gather_object((list(own), sampling, refused and str(refused)), self.processes)
        if refused is not None:
            raise refused
        for rank, (_, other, why) in enumerate(parts):
            if why:
                raise BadRequest(f"rank {rank} of the engine's group: {why}")
            if other != sampling:
                raise BadRequest(
                    f"sampling: expected {sampling} on all ranks of the engine's group, got {other} on {rank}"
                )
        first = sum(len(rows) for rows, *_ in parts[: self.rank])
        return [row for rows, *_ in parts for row in rows], slice(first, first + len(own))


def name_shared_memory() -> None:
    """Give this run's groups on CPUs shared memory of their own name, the same on all ranks.

    vLLM names it alike in every run that another program has launched, so that what a killed run has left
    behind, or one beside it, would stop this one.
    """
    own = dist.all_gather_object(secrets.token_hex(8))[0]
    shared = part("distributed.device_communicators.cpu_communicator")._CPUSHMDistributed
    named = shared.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"/{own}{named(communicator).lstrip('/')}"

    shared.make_group_name = staticmethod(make_group_name)


# ---------- an Engine over vLLM in this process, alone or as one rank of a tensor-parallel group


DTYPES = ("auto", "float32", "bfloat16", "float16")
HOTTEST = 2.0  # vLLM refuses temperatures above it
STEP_TOKENS = 4096  # least that vLLM may read in a step, beside one whole prompt
CPU_BLOCK = 32  # tokens of a block of the cache: the fewest that vLLM takes on a CPU, where it would use 128


def check_config(config: EngineConfig) -> None:
    """ValueError for a type that is none, and a group that does not divide the processes of the run."""
    if config.dtype not in DTYPES:
        raise ValueError(f"engine_dtype: expected one of {', '.join(DTYPES)}, got {config.dtype!r}")
    world = dist.started()
    if world % config.tp_size:
        raise ValueError(
            f"engine_tp_size: expected a divisor of the {world} processes of this run, got {config.tp_size}; "
            "start as many with torchrun"
        )


def check_media(config: EngineConfig, model: str) -> None:
    """ValueError for a model whose media vLLM cannot take; an engine in its own process asks there."""
    if config.process:
        return
    with surroundings.kept(engine=False):
        part()
        sampler.check_family(load(base_folder(resolve(model)), meta=True))


def build(config: EngineConfig, model: str | nn.Module, tokenizer: Any) -> Engine:
    """The engine with weights of `model`: a name, or a module, which is written to a folder for vLLM.

    On several processes all have to build it together. ImportError, with the package to install, without
    vLLM.
    """
    engine = InProcess(config, model, tokenizer)
    return dead_after_failure(
        Engine(
            generate=engine.generate,
            score=engine.score,
            load=engine.load,
            sleep=engine.sleep,
            wake=engine.wake,
            status=engine.status,
            close=engine.close,
        )
    )


class InProcess:
    """vLLM with a model, and all that changes about it."""

    def __init__(self, config: EngineConfig, model: str | nn.Module, tokenizer: Any):
        self.tokenizer = tokenizer
        self.config = config
        self.device = usual_device(None)
        self.can_sleep = config.sleep and self.device.type == "cuda"
        self.version = 0
        self.asleep = False
        self.short: reload.Short | None = None  # layers that got too little in the first whole load
        self.llm: Any = None

        # vLLM's import changes the process too, and comes first: it may not be there
        with surroundings.kept():
            vllm = part()
            surroundings.keep_groups()
            if config.tp_size > 1 and self.device.type == "cpu":
                name_shared_memory()
            self.folder = ModelFolder(model, tokenizer)
            self.window = self.folder.window(config.max_model_len)
            try:
                if self.folder.places:
                    sampler.check_family(self.folder.skeleton)
                self.llm = vllm.LLM(**self._options())
            except BaseException:
                self.folder.close()
                raise
        self.group = Group(config.tp_size)
        self.fields: sampler.Fields | None = None
        if self.folder.places:
            self.fields = sampler.fields_of(self.llm.llm_engine.vllm_config.model_config)
        self.sampler = Sampler(self.llm.llm_engine, self.device, config.timeout, self._request)

    def _request(self, row: Asked) -> dict[str, Any]:
        """vLLM's input of a row."""
        if self.fields is None:
            return {"prompt_token_ids": row.prompt}
        dtype = getattr(torch, _dtype(self.config.dtype, self.device))
        return sampler.request(self.folder.skeleton, self.fields, row.prompt, row.shown, dtype)

    def _options(self) -> dict[str, Any]:
        """The arguments of vLLM's constructor."""
        dtype = _dtype(self.config.dtype, self.device)
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
            # prompts are tokens, and texts that stop are found by `Stop`; a processor wants the tokenizer
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
        block = self.config.block_size
        if not block and self.device.type == "cpu":
            block = CPU_BLOCK
        if block:
            options["block_size"] = block

        # several processes started together: one engine each, or one over the ranks of each group
        if dist.started() > 1:
            options["distributed_executor_backend"] = "external_launcher"
        return options | self._memory(dtype)

    def _memory(self, dtype: str) -> dict[str, Any]:
        """What vLLM may take: a share of the device, or a cache for `batch` sequences, within a quarter."""
        if self.config.mem_util:
            return {"gpu_memory_utilization": self.config.mem_util}
        size = memory.host_memory()
        if self.device.type == "cuda":
            size = torch.cuda.mem_get_info()[0]
        block = self.config.block_size or CPU_BLOCK
        longest = (self.window or 4096) + block  # a sequence ends within a block
        needed = self.folder.cache_bytes(self.config.batch * longest, getattr(torch, dtype))
        return {"kv_cache_memory_bytes": min(needed, size // 4)}

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Any],
        keys: Sequence[Any],
        *,
        n: int = 1,
        sampling: Sampling,
        max_new: Sequence[int] | None = None,
        start: Sequence[int] | None = None,
    ) -> Rollout:
        """`Generate`, awake from then on; every rank of a tensor-parallel group has to call it.

        A row's stream is the one of vLLM's own generator, seeded with its key, so `start` has to be 0. At
        temperature 0 top_p and top_k leave log-probs as they are.
        """
        refused = None
        ids: list[list[int]] = []
        rows: list[requests.Row] = []
        shown: list[prompt_media.Shown] = []
        try:
            ids = requests.token_ids(prompts, self.tokenizer)
            requests.check(ids, keys, n, sampling, self.window, max_new=max_new, start=start)
            shown = prompt_media.shown(prompts, ids)
            prompt_media.check(self.folder.skeleton, ids, shown)
            rows = requests.rows(keys, n, sampling, max_new=max_new, start=start)
            self._check(ids, rows, sampling)
        except requests.BadRequest as error:
            refused = error

        # the ranks of a group answer the requests of all of them together, and each keeps its own
        asked = [Asked(ids[b // n], row.key, row.max_new, shown[b // n]) for b, row in enumerate(rows)]
        everything, own = self.group.together(asked, sampling, refused)
        if everything:
            self.wake()
        stop = Stop(self.tokenizer, self.folder.ends, sampling.stop)
        responses = self.sampler.responses(everything, sampling, stop)[own]
        return requests.assemble(
            ids,
            responses,
            pad=self.tokenizer.pad_token_id,
            version=self.version,
            media=prompt_media.tensors(shown),
            tokenizer=self.tokenizer,
        )

    def _check(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[requests.Row], sampling: Sampling
    ) -> None:
        """BadRequest for what vLLM would refuse only after it has begun, and for a row's `start`."""
        if sampling.temperature > HOTTEST:
            raise requests.BadRequest(
                f"temperature: expected at most {HOTTEST} for vllm, got {sampling.temperature}"
            )
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
        """`Score`, at Sampling() only: vLLM's log-probs of given tokens ignore every option of a Sampling."""
        plain = sampling is None or (sampling.temperature == 1 and not sampling.truncates)
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
        seen = prompt_media.of_rows(rollout, rollout.length)
        rows = [Asked(x[:n].tolist(), 0, 1, own) for x, n, own in zip(rollout.tokens, lengths, seen)]
        everything, own = self.group.together(rows, Sampling(), refused)
        if everything:
            self.wake()
        found = self.sampler.scores(everything)[own]

        out = torch.zeros(rollout.tokens.shape)
        for b, logp in enumerate(found):
            out[b, : len(logp)] = torch.tensor(logp)
        return torch.where(rollout.mask.cpu(), out, 0)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """`Load`: each rank of a tensor-parallel group takes its part of the full tensors.

        Names that never change (`weights.frozen`) come from the model's files. ValueError names the tensor,
        or the layer of vLLM's that did not get what it got in the first load.
        """
        asleep = self.asleep
        self.wake()
        arrival = Arrival(self.folder.manifest, weights)
        unchanged = self.folder.tensors(arrival.frozen & arrival.expected.shape.keys())
        pairs = reload.arriving(arrival, weights, unchanged)
        with surroundings.kept_random():
            (short,) = self.llm.collective_rpc(reload.replace, args=(pairs, self.short))
        delivered = arrival.finish(version)
        self.short = short

        # keys and values of the old weights must not answer for the new ones
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("engine vllm: expected its prefix cache to be emptied after a load, got False")
        if self.folder.places:
            self.llm.llm_engine.reset_encoder_cache()
        self.version = version
        if asleep:
            self.sleep()
        return delivered

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
        """The state of the engine."""
        supported = {"load", "score"}
        if self.can_sleep:
            supported.add("sleep")
        return {
            "engine": "vllm",
            "alive": self.llm is not None,
            "version": self.version,
            "asleep": self.asleep,
            "supported": frozenset(supported),
            "window": self.window,
            "placeholders": self.folder.places,
        }

    def close(self) -> None:
        """Free the model and its cache; the process keeps vLLM's modules."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        del self.sampler
        surroundings.leave()
        self.folder.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _dtype(name: str, device: torch.device) -> str:
    """The type of the weights: the trainer's usual one on this device, unless it is given."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "float32"
    return "bfloat16"
