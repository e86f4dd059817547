"""One model in a DeepSpeed engine: its optimizer lowered from a `Transform`, its tensors put together and
set.

Everything that knows how DeepSpeed lays out weights, moments and gradients is here.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import dist, optim, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.strategy import step
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Packed, Sampling, Transform

__all__ = ["Average", "Engine", "Lowered", "library", "lower", "options", "wrap_for_training"]

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq", "average": "average"}  # ours -> those of the optimizer below


def library() -> Any:
    """The module deepspeed, silent but for errors. ValueError where it is not installed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at its import
    if "RANK" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")  # it insists on one, also without torchrun
    try:
        import deepspeed
        from deepspeed.utils import logger
    except ImportError as error:
        raise ValueError(
            f"zero_stage: expected deepspeed, got {error}; pip install rft-fn[deepspeed]"
        ) from error
    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # it calls those
    # sums over shared memory, which it would compile here and now; gloo needs no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Lowered(NamedTuple):
    """A Transform as DeepSpeed has it."""

    clip: float  # gradient_clipping, 0 is off
    schedule: Callable[[int], float]  # updates done -> learning rate
    adamw: Mapping[str, Any]  # the spec of optim.adamw
    decay: float | None  # of optim.ema


def _parts(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if spec["name"] != "chain":
        yield spec
        return
    for inner in spec["txs"]:
        yield from _parts(inner)


def lower(spec: Mapping[str, Any]) -> Lowered:
    """The spec of a transform -> what DeepSpeed's step does of it: clip_by_global_norm any number of times
    (the smallest counts), one adamw, and an ema after it. ValueError that names a transform that is none of
    these, or where it does not belong."""
    parts = list(_parts(spec))
    decay = parts.pop()["decay"] if parts and parts[-1]["name"] == "ema" else None
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part["name"] != ("adamw" if last else "clip_by_global_norm"):
            raise ValueError(
                "tx: expected clip_by_global_norm, one adamw and ema in this order with zero_stage, got "
                f"{part['name']} {'last' if last else f'in place {i + 1}'}; FSDP2 takes any transform"
            )
    if not parts:
        raise ValueError("tx: expected an adamw with zero_stage, got none")
    lr = parts[-1]["lr"]
    schedule = lr if callable(lr) else optim.constant(lr)
    return Lowered(min((p["max_norm"] for p in parts[:-1]), default=0.0), schedule, parts[-1], decay)


def options(config: StrategyConfig, root: nn.Module, clip: float = 0.0) -> dict[str, Any]:
    """DeepSpeed's own configuration; `extra["deepspeed"]` of ours goes over it (its zero_optimization into
    what is here)."""
    size = max(sum(p.numel() for p in root.parameters()), 1)
    zero: dict[str, Any] = {"stage": config.zero_stage, "reduce_bucket_size": min(size, 500_000_000)}
    if config.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # a pack; how many there are differs, see Engine.backward
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if config.bf16 or any(p.dtype == torch.bfloat16 for p in root.parameters()):
        out["bf16"] = {"enabled": True, "check_grad_overflow": True}
        out["data_types"] = {"grad_accum_dtype": "fp32"}
        out["communication_data_type"] = "fp32"
    given = dict(config.get_extra_arg("deepspeed", {}))
    zero |= given.pop("zero_optimization", {})
    return out | given


class _Root(nn.Module):
    """A module whose output DeepSpeed can look into: a dict of tensors, for a TokenOut is opaque to its
    hooks."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, pack: Packed) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self.inner(pack)).items() if x is not None}


def wrap_for_training(
    config: StrategyConfig,
    module: nn.Module,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
) -> nn.Module:
    """The module that a pack goes into: pack -> the fields of a TokenOut. ValueError for float64 and float16,
    which DeepSpeed rounds."""
    quantize.require_whole(module, "DeepSpeed ZeRO")
    module = step.cast(model_lib.materialize(module), config)
    for dtype in (torch.float64, torch.float16):
        if any(p.dtype == dtype for p in module.parameters()):
            got = str(dtype).removeprefix("torch.")
            raise ValueError(f"zero_stage: expected a module in float32 or bfloat16, got one in {got}")
    how = {"fused": config.fused_linear_logprob, "chunk_size": config.chunk_size}
    return _Root(model_lib.wrap_for_training(module, sampling=sampling, entropy=entropy, aux=aux, **how))


def register(root: nn.Module, module: nn.Module) -> None:
    """Have stage 3 gather, for the whole of the root's forward and backward, weights that are read outside of
    their own module's: a Scorer's fused head, and those of a module of one's own."""
    outside = list(root.inner.parameters(recurse=False))
    if getattr(root.inner, "fused", False):
        outside += module.get_output_embeddings().parameters()  # type: ignore[operator]
    for p in outside:
        library().zero.register_external_parameter(root, p)


class _AdamW(torch.optim.AdamW):
    """AdamW that keeps an average of the weights beside the moments, if `decay` is a number."""

    decay: float | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups if self.decay is not None else ():
            for p in group["params"]:
                self.state[p]["average"].mul_(self.decay).add_(p, alpha=1 - self.decay)


class Average(tree.Named):
    """The average of each parameter by name, put together when it is read: every rank has to read."""

    engine: "Engine"

    def __getitem__(self, name: str) -> Tensor:
        return self.engine.moment(super().__getitem__(name), "average")

    def items(self) -> Any:
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)


class Engine:
    """A DeepSpeed engine of one model that is trained, and the turn of its gradients, which live in it."""

    def __init__(self, config: StrategyConfig, module: nn.Module, root: nn.Module, tx: Transform):
        self.module, self.stage, self.turn = module, config.zero_stage, 0
        self.own = tree.Named((n, p) for n, p in module.named_parameters() if p.requires_grad)
        if not self.own:
            raise ValueError("module: expected trainable parameters, got none with requires_grad")
        # DeepSpeed has the masters, beside the moments
        self.config = replace(config, use_mp_opt=step.masters(config, self.own))
        self.tx = step.optimizer(tx, config, self.own)
        clip = optim.clip_by_global_norm(config.max_norm) if config.max_norm else optim.chain()
        self.lowered = lower(optim.chain(clip, tx).spec)
        self.moments = [n for n in MOMENTS if n != "average" or self.lowered.decay is not None]
        self.engine = library().initialize(
            model=root,
            optimizer=self._adamw(),
            config=options(config, root, self.lowered.clip),
            dist_init_required=False,
        )[0]
        self.zero = self.engine.optimizer
        self._begin_moments()
        if self.stage == 3:
            register(root, module)

    def _adamw(self) -> torch.optim.Optimizer:
        spec = self.lowered.adamw
        decays = spec["mask"] or (lambda name, p: p.dim() >= 2)
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, p in self.own.items():
            groups[bool(spec["weight_decay"]) and decays(name, p)].append(p)
        both = [{"params": ps, "weight_decay": spec["weight_decay"] * on} for on, ps in groups.items() if ps]
        adamw = _AdamW(both, lr=0.0, betas=(spec["b1"], spec["b2"]), eps=spec["eps"])
        adamw.decay = self.lowered.decay
        return adamw

    def forget(self) -> None:
        """Drop gradients that no step has used."""
        self.turn += 1
        self.zero.zero_grad()
        if hasattr(self.zero, "clear_hp_grads"):  # bf16 at stage 1
            self.zero.clear_hp_grads()
        elif self.stage == 3:
            # a parameter that takes no part in a batch keeps what is in here
            self.zero.grad_partitions_flat_buffer.zero_()
            self.zero.averaged_gradients = {}
        else:
            self.zero.micro_step_id = -1
            for name in ("averaged_gradients", "all_grad_tensors"):  # the second since 0.18
                held = getattr(self.zero, name, {})
                held.update(dict.fromkeys(held))

    def finite(self) -> bool:
        """Whether no gradient of the last backward has a NaN or an inf, on any rank."""
        if hasattr(self.zero, "clear_hp_grads"):
            held = self.zero.fp32_groups_gradients_flat
        elif self.stage == 3:
            held = [self.zero.grad_partitions_flat_buffer]
        elif self.config.adam_offload:
            held = [flat.grad for flat in self._flat()]
        else:
            held = [x for group in self.zero.averaged_gradients.values() for x in group]
        return all(dist.all_gather_object(all(bool(torch.isfinite(x).all()) for x in held)))

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Add the gradient of `total` [] to the sum over packs and ranks; the step comes after the last."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(total * dist.world())  # it averages over ranks

    def step(self, count: int) -> float:
        """Step with the gradients that are there, after `count` steps; their norm, and nothing has changed
        where this is not finite."""
        if not self.finite():  # whether DeepSpeed looks itself depends on its version and the stage
            self.forget()
            return math.inf
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = float(self.lowered.schedule(count))
        self.engine.step()
        over = getattr(self.zero, "overflow", False)  # of the norm, where the gradients are finite
        return math.inf if over else float(self.engine.get_global_grad_norm())

    def _flat(self) -> list[Tensor]:
        """This rank's part of the float32 weights, one tensor a group."""
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
        found = [getattr(self.zero, n) for n in names if hasattr(self.zero, n)]
        return found[0] if found else self.zero.fp32_groups_flat_partition

    def _begin_moments(self) -> None:
        """Moments of 0, which torch makes in the first step only, and the average."""
        state = self.engine.basic_optimizer.state
        for flat in self._flat():
            start = {
                "m": torch.zeros_like(flat),
                "v": torch.zeros_like(flat),
                "average": flat.detach().clone(),
            }
            state[flat] |= {MOMENTS[name]: start[name] for name in self.moments}
            state[flat]["step"] = torch.tensor(0.0)
        self._link()

    def _link(self) -> None:
        """Have stages 1 and 2 know which piece of the moments is of which parameter."""
        if self.stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def place(self, *, host: bool) -> None:
        """Move the moments to the host, or beside the float32 weights. DeepSpeed's own offload_states is for
        its own Adam at stage 3, and forgets these links at 1 and 2."""
        for flat in self._flat():
            held = self.engine.basic_optimizer.state[flat]
            held |= {MOMENTS[n]: held[MOMENTS[n]].to("cpu" if host else flat.device) for n in self.moments}
        self._link()

    def average(self) -> Average:
        """The average that optim.ema asks for."""
        out = Average(self.own)
        out.engine = self
        return out

    def full(self, p: Tensor) -> Tensor:
        """A parameter whole, in float32 where the engine steps in it: every rank has to ask."""
        from deepspeed.utils import safe_get_full_fp32_param

        if p.requires_grad and (self.stage == 3 or p.dtype == torch.bfloat16):
            return safe_get_full_fp32_param(p)
        return gathered(p)

    def moment(self, p: Tensor, name: str) -> Tensor:
        """A moment ("m", "v" or "average") of a parameter, whole, in float32: every rank has to ask."""
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(p, MOMENTS[name])

    @torch.no_grad()
    def assign(self, p: Tensor, value: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Give a parameter its whole value and moments, the same on every rank."""
        from deepspeed import utils, zero

        wide = {None: value} | {MOMENTS[name]: x for name, x in moments.items()}
        with zero.GatheredParameters([p], modifier_rank=0):
            p.data.copy_(value)
        for name, x in wide.items():
            x = x.to(device=p.device, dtype=torch.float32)
            if self.stage == 3:
                x = self._part(p, x)
            key = () if name is None else (name,)
            where = "local" if self.stage == 3 else "full"
            what = "fp32_param" if name is None else "optimizer_state"
            getattr(utils, f"safe_set_{where}_{what}")(p, x, *key)

    def _part(self, p: Any, x: Tensor) -> Tensor:
        """This rank's part of a whole tensor, padded as stage 3 pads it."""
        size = p.ds_tensor.numel()
        return torch.nn.functional.pad(x.flatten(), (0, size * dist.world() - x.numel()))[
            size * dist.rank() : size * (dist.rank() + 1)
        ]

    def set_count(self, count: int) -> None:
        """The steps that the moments are of."""
        for flat in self._flat():
            self.engine.basic_optimizer.state[flat]["step"].fill_(count)


def gathered(p: Tensor) -> Tensor:
    """A parameter whole, as the model computes with it: every rank has to ask."""
    from deepspeed import zero

    if not hasattr(p, "ds_id"):
        return p.detach()
    with zero.GatheredParameters([p]):
        return p.detach().clone()
