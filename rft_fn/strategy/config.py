"""The options of a run's distribution, in one typed record: the only source of their defaults."""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from rft_fn import dist, limits
from rft_fn.limits import AtLeast0, AutoCount, Count, Free, Range, Seed, Share, Whole

__all__ = ["Adapters", "StrategyConfig", "Transfer", "add_arguments"]

Transfer = Literal["auto", "rft", "nccl", "folder"]
Adapters = Literal["auto", "alone", "merged"]


@dataclass(frozen=True)
class StrategyConfig:
    """How a run is distributed over processes, in what precision, and with which engine."""

    # ValueError for values that are out of range or contradict each other; for an option that the backend
    # cannot honour, `get_strategy` raises

    fsdp: Free[bool] = False
    """shard with FSDP2; on by itself when torchrun starts several processes and zero_stage is 0"""
    zero_stage: Free[Annotated[int, Range(0, 3)]] = 0
    """DeepSpeed ZeRO: 1 shards the optimizer, 2 the gradients too, 3 the parameters too; 0 is off"""
    sp_size: Free[Count] = 1
    """sequence parallelism: number of processes that share the tokens of one pack"""
    shard_size: Free[Whole] = 0
    """processes over which the parameters are sharded, replicated over the rest (HSDP); 0 is all"""
    fsdp_cpu_offload: Free[bool] = False
    """FSDP2: parameters, gradients and optimizer live in host memory"""
    adam_offload: Free[bool] = False
    """the optimizer state lives in host memory, and steps there"""
    offload_models: Free[bool] = False
    """each model is on the device only in the phases of a step that use it, and on the host in the others"""
    use_mp_opt: bool | None = None
    """bfloat16 parameters with float32 master weights in the optimizer; None: wherever they are in 16 bits"""
    bf16: bool = False
    """compute in bfloat16; parameters, their sums of gradients and the optimizer stay in float32"""
    max_norm: AtLeast0 = 0.0
    """gradients of each model are clipped to this global norm before its optimizer; 0 leaves that to it"""
    seed: Seed = 0
    """of torch's global generator: whatever draws from it (new adapters, new heads) is the same everywhere"""
    train_batch_size: Whole = 0
    """sequences per update; a larger rollout is several updates; 0 is the whole rollout"""
    micro_train_batch_size: Free[Whole] = 0
    """max sequences per pack; 0: limited by tokens only"""
    packing_samples: Free[bool] = True
    """as many sequences in a pack as fit; if not, micro_train_batch_size (at least 1) of any length"""
    fused_linear_logprob: Free[bool] = True
    """log-probs straight from hidden states; if not, all logits [T, V] are in memory at once"""
    chunk_size: Free[Whole] = 0
    """words of the vocabulary that the fused log-probs handle at a time; 0: chosen per device"""
    fast_linear: Free[bool] = True
    """large linear layers of float32 by oneDNN, on a CPU that MKL leaves half unused; in hf's sampling too"""
    share_prefixes: Free[bool] = True
    """tokens of a pack that begin alike, as responses to one prompt do, are computed once"""
    deterministic: Free[bool] = False
    """on a GPU the same bits each time, by torch's deterministic algorithms; on a CPU they are anyway"""
    keep_memory: Free[bool] = True
    """on a CPU the process keeps memory that it frees, for the next pack; if not, glibc hands it back"""
    compile_blocks: Free[bool] = False
    """torch.compile of each decoder block, for packs of any length; not with zero_stage"""
    engine_type: Free[str] = "hf"
    """what samples: hf (transformers) or vllm in this process, openai or sglang by servers, ray in actors"""
    engine_batch: Free[AutoCount] = 64
    """sequences sampled at a time; auto: as many as the forecast of memory has room for"""
    engine_tp_size: Free[Count] = 1
    """processes that share one engine"""
    engine_mem_util: Free[Share] = 0.0
    """share of the device's memory that the engine may take; 0 is as much as it needs"""
    enable_engine_sleep: Free[bool] = True
    """the engine leaves the device while the trainer works"""
    engine_process: Free[bool] = False
    """the engine has a process of its own; on by itself where rollouts are sampled ahead"""
    engine_threads: Free[Whole] = 0
    """threads of an engine in a process of its own; 0 is as many as the trainer has, ahead half of them"""
    engine_servers: Free[tuple[str, ...]] = ()
    """addresses of the servers that sample, http://HOST:PORT each"""
    engine_actors: Free[Count] = 1
    """with engine_type ray: actors that sample for each process of the trainer"""
    engine_actor_type: Free[Literal["hf", "vllm"]] = "hf"
    """with engine_type ray: what samples in each actor"""
    engine_timeout: Free[Annotated[float, Range(1)]] = 600.0
    """seconds that one call of the engine may take, or one request to a server"""
    engine_weights: Free[str] = ""
    """the folder that servers read weights from; if empty, a temporary one of this machine"""
    engine_transfer: Free[Transfer] = "auto"
    """how servers get weights: rft is our channel, nccl the engine's own, folder a disk, auto the best"""
    engine_adapters: Free[Adapters] = "auto"
    """how trained adapters get to the engine: merged into whole weights, alone, or auto: alone if faster"""
    engine_max_model_len: Free[Whole] = 0
    """most tokens of a prompt and its response in the engine; 0 is the model's window"""
    engine_block_size: Free[Whole] = 0
    """tokens of a block of the engine's cache; 0: vLLM's choice on a GPU, 32 on a CPU"""
    engine_dtype: str = "auto"
    """type of the engine's weights: float32, bfloat16, float16; auto: float32 on a CPU, else bfloat16"""
    replay_routing: bool = False
    """a mixture of experts learns by the experts that the sampler chose for each token (R3); only with hf"""
    replay_kept: bool = False
    """under top_p and top_k learn on the words that the sampler left at each token; with engine_type hf"""
    engine_fused: Free[bool] = True
    """on a GPU hf reads new tokens by fused kernels, in models that these fit; if not, as in training"""
    engine_speculative: str = ""
    """speculative decoding by vllm: its own config, as JSON or a file of it; if empty, none"""
    log_dir: Free[str] = ""
    """where pictures and tensorboard files go; if empty, the folder of the run"""
    plot_every: Free[Whole] = 0
    """steps between histograms of response lengths; 0 draws only that of the last step"""
    timeout: Free[Annotated[float, Range(1)]] = 600.0
    """seconds after which a process that waits for another gives up"""
    max_skips: Free[Count] = 8
    """updates in a row without finite gradients after which the run stops"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """arguments that are not the strategy's, kept for `get_extra_arg`"""

    def __post_init__(self) -> None:
        limits.fields(self)
        if self.fsdp and self.zero_stage:
            raise ValueError(f"fsdp, zero_stage: expected one of them, got True and {self.zero_stage}")
        if self.bf16 and self.use_mp_opt:
            raise ValueError(
                "bf16, use_mp_opt: expected one of them: float32 parameters that are computed with in "
                "bfloat16, or bfloat16 parameters with float32 masters, got both"
            )

    if not TYPE_CHECKING:  # where every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with a hint for an option that other systems have here."""
            from rft_fn.migrate import names  # to the right, for a name that is not there

            names.unknown("StrategyConfig", names.CONFIG, name)

    @property
    def backend(self) -> str:
        """Return "deepspeed" with a zero_stage, "fsdp2" with fsdp or several processes, else "local"."""
        if self.zero_stage:
            return "deepspeed"
        return "fsdp2" if self.fsdp or dist.started() > 1 else "local"

    @staticmethod
    def from_args(args: "argparse.Namespace | Mapping[str, Any]") -> "StrategyConfig":
        """Make the config of a namespace or a mapping; what is no field goes to `extra`.

        ValueError for a value of another type than its field's: a text is no number and no bool.
        """
        if isinstance(args, argparse.Namespace):
            args = vars(args)
        given = dict(args)
        known = {f.name for f in fields(StrategyConfig)} - {"extra"}
        extra = {**given.pop("extra", {}), **{k: v for k, v in given.items() if k not in known}}
        return StrategyConfig(**{k: v for k, v in given.items() if k in known}, extra=extra)

    def get_extra_arg(self, name: str, default: Any = None) -> Any:
        """Return an argument that is not a field, or the default."""
        return self.extra.get(name, default)

    def pictures(self) -> dict[str, Any]:
        """Return where and how often `run.Run` draws."""
        return {"log_dir": self.log_dir, "plot_every": self.plot_every}

    def updates(self, rows: int) -> int:
        """Return the number of updates of a rollout of `rows` sequences: train_batch_size in each.

        The last may have fewer.
        """
        return -(-rows // self.train_batch_size) if self.train_batch_size else 1


def _docs() -> dict[str, str]:
    """Return the line under each field, for a parser's help."""
    import ast
    import inspect

    (body,) = ast.parse(inspect.getsource(StrategyConfig)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field_, doc in pairwise(body.body):
        if not isinstance(field_, ast.AnnAssign) or not isinstance(doc, ast.Expr):
            continue
        if isinstance(field_.target, ast.Name):
            docs[field_.target.id] = ast.literal_eval(doc.value)
    return docs


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the fields of StrategyConfig as options of the same names to an argparse parser.

    `--sp_size 2`, `--fsdp`, `--no-packing_samples`; `--disable_engine_sleep` is `--no-enable_engine_sleep`.
    """
    docs = _docs()
    types = get_type_hints(StrategyConfig)
    for f in dataclasses.fields(StrategyConfig):
        if f.name == "extra":
            continue
        if types[f.name] in (bool, bool | None):
            action: Any = argparse.BooleanOptionalAction
            parser.add_argument(f"--{f.name}", action=action, default=f.default, help=docs[f.name])
        elif get_origin(types[f.name]) is tuple:
            parser.add_argument(f"--{f.name}", nargs="*", default=f.default, help=docs[f.name])
        elif get_origin(types[f.name]) is Literal:
            choices = get_args(types[f.name])
            parser.add_argument(f"--{f.name}", choices=choices, default=f.default, help=docs[f.name])
        else:
            parser.add_argument(f"--{f.name}", type=types[f.name], default=f.default, help=docs[f.name])
    parser.add_argument(
        "--disable_engine_sleep", dest="enable_engine_sleep", action="store_false", help="the engine stays"
    )
    return parser
