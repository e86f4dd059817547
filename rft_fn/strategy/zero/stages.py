"""Transforms in DeepSpeed's terms, and where its stages keep weights, gradients and moments.

These are the only places that read the insides of DeepSpeed's optimizers: one class for each layout.

One class for each layout: these are the only places that read the insides of DeepSpeed's optimizers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_fn import dist, optim
from rft_fn.strategy.config import StrategyConfig

__all__ = [
    "MOMENTS", "AveragingAdamW", "Lowered", "Stage", "Stage1And2", "Stage1Bfloat16", "Stage3", "gathered",
    "lower", "options", "stage_of",
]  # fmt: skip


# ---------- lowers a config and a Transform to DeepSpeed: its options, and one AdamW


MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq", "average": "average"}  # our names -> AdamW's


class AveragingAdamW(torch.optim.AdamW):
    """AdamW that also keeps an average of the weights, unless `decay` is None."""

    decay: float | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.decay is None:
            return
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["average"].mul_(self.decay).add_(p, alpha=1 - self.decay)


class Lowered(NamedTuple):
    """A Transform in DeepSpeed's terms."""

    clip: float  # gradient_clipping, 0 is off
    schedule: Callable[[int], float]  # updates done -> learning rate
    adamw: Mapping[str, Any]  # the spec of optim.adamw
    decay: float | None  # of optim.ema

    def optimizer(self, params: Mapping[str, Tensor]) -> AveragingAdamW:
        """Make an optimizer of these parameters, in two groups: with and without weight decay."""
        spec = self.adamw
        decays = spec["mask"] or _is_matrix
        with_decay, without = [], []
        for name, p in params.items():
            if spec["weight_decay"] and decays(name, p):
                with_decay.append(p)
            else:
                without.append(p)

        groups = []
        if with_decay:
            groups.append({"params": with_decay, "weight_decay": spec["weight_decay"]})
        if without:
            groups.append({"params": without, "weight_decay": 0.0})
        adamw = AveragingAdamW(groups, lr=0.0, betas=(spec["b1"], spec["b2"]), eps=spec["eps"])
        adamw.decay = self.decay
        return adamw


def _is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() >= 2


def _schedule(lr: float | optim.Schedule) -> optim.Schedule:
    return lr if callable(lr) else optim.constant(lr)


def _parts(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the transforms of nested chains, in order."""
    if spec["name"] != "chain":
        yield spec
        return
    for inner in spec["txs"]:
        yield from _parts(inner)


def _require(part: Mapping[str, Any], want: str, place: str) -> None:
    if part["name"] != want:
        raise ValueError(
            "tx: expected clip_by_global_norm, one adamw and ema in this order with zero_stage, got "
            f"{part['name']} {place}; FSDP2 takes any transform"
        )


def lower(spec: Mapping[str, Any]) -> Lowered:
    """Lower the spec of a transform to what DeepSpeed's own step performs.

    It may be clip_by_global_norm any number of times (the smallest counts), one adamw, and an ema after it.
    ValueError with the name of any other transform, or of one out of place.
    """
    parts = list(_parts(spec))
    decay = parts.pop()["decay"] if parts and parts[-1]["name"] == "ema" else None
    if not parts:
        raise ValueError("tx: expected an adamw with zero_stage, got none")
    *clips, adamw = parts
    for i, part in enumerate(clips):
        _require(part, "clip_by_global_norm", f"in place {i + 1}")
    _require(adamw, "adamw", "last")
    clip = min((part["max_norm"] for part in clips), default=0.0)
    return Lowered(clip, _schedule(adamw["lr"]), adamw, decay)


def options(config: StrategyConfig, root: nn.Module, clip: float = 0.0) -> dict[str, Any]:
    """Return DeepSpeed's own configuration.

    `extra["deepspeed"]` of the config overrides it, its zero_optimization entry by entry.
    """
    size = max(sum(p.numel() for p in root.parameters()), 1)
    zero: dict[str, Any] = {"stage": config.zero_stage, "reduce_bucket_size": min(size, 500_000_000)}
    if config.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # a pack; how many there are differs, see ZeroModel.backward
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

    # bfloat16 weights: gradients are summed and reduced in float32
    if config.bf16 or any(p.dtype == torch.bfloat16 for p in root.parameters()):
        out["bf16"] = {"enabled": True, "check_grad_overflow": True}
        out["data_types"] = {"grad_accum_dtype": "fp32"}
        out["communication_data_type"] = "fp32"

    given = dict(config.get_extra_arg("deepspeed", {}))
    zero |= given.pop("zero_optimization", {})
    return out | given


# ---------- where each ZeRO stage of DeepSpeed keeps float32 weights, gradients and moments


def gathered(p: Tensor) -> Tensor:
    """Return a whole parameter, as the model computes with it. All ranks call it."""
    from deepspeed import zero

    if not hasattr(p, "ds_id"):  # only stage 3 shards it
        return p.detach()
    with zero.GatheredParameters([p]):
        return p.detach().clone()


def _required(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("zero_stage: expected a parameter that DeepSpeed trains, got another")
    return x


class Stage(ABC):
    """DeepSpeed's optimizer of one model, as a stage lays it out on this rank."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self.copies = 1  # of the gradients, over all ranks

    @property
    def offloads(self) -> bool:
        """Return whether gradients go to the host as they are made, with norms that are noted there."""
        offload = getattr(self.optimizer, "offload_optimizer", False)
        return bool(offload or getattr(self.optimizer, "cpu_offload", False))

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """Return this rank's part of the float32 weights, one tensor per parameter group."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return this rank's part of the gradients, after the last backward of a batch."""

    def gradient(self, p: Any) -> Tensor:
        """Return the whole gradient of a parameter in float32, after the last backward of a batch.

        All ranks call it.
        """
        return p.get_full_hp_grad()

    def clear(self) -> None:
        """Drop gradients that no step has used."""
        self.optimizer.zero_grad()

    def finite(self) -> bool:
        """Return whether this rank's part of the gradients has neither NaN nor inf."""
        return all(bool(torch.isfinite(x).all()) for x in self.gradients())

    def overflowed(self) -> bool:
        """Return whether DeepSpeed skipped the last step: finite gradients may have an infinite norm."""
        return getattr(self.optimizer, "overflow", False)  # not in every version of BF16_Optimizer

    def link_moments(self) -> None:
        """Tell DeepSpeed which piece of the moments belongs to which parameter."""
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def steps_copy(self, p: Tensor) -> bool:
        """Return whether the optimizer steps a float32 copy of a trained parameter."""
        return p.dtype == torch.bfloat16

    def weight(self, p: Tensor) -> Tensor:
        """Return a whole parameter, in float32 where it is stepped so. All ranks call it."""
        from deepspeed import utils

        if p.requires_grad and self.steps_copy(p):
            return _required(utils.safe_get_full_fp32_param(p))
        return gathered(p)

    def moment(self, p: Tensor, name: str) -> Tensor:
        """Return a whole moment by AdamW's name, in float32. All ranks call it."""
        from deepspeed import utils

        return _required(utils.safe_get_full_optimizer_state(p, name))

    def set_weight(self, p: Tensor, value: Tensor) -> None:
        """Give a parameter its whole value in float32."""
        from deepspeed import utils

        utils.safe_set_full_fp32_param(p, value)

    def set_moment(self, p: Tensor, name: str, value: Tensor) -> None:
        """Give a parameter a whole moment, by AdamW's name."""
        from deepspeed import utils

        utils.safe_set_full_optimizer_state(p, value, name)


class Stage1And2(Stage):
    """Stages 1 and 2: each rank has a part of each group's flat float32 weights."""

    def flat_weights(self) -> list[Tensor]:
        return self.optimizer.single_partition_of_fp32_groups

    def gradients(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return [flat.grad for flat in self.flat_weights() if flat.grad is not None]
        return [x for group in self.optimizer.averaged_gradients.values() for x in group]

    def clear(self) -> None:
        super().clear()
        self.optimizer.micro_step_id = -1
        # the second holds the sums between packs since 0.18
        for held in (self.optimizer.averaged_gradients, self.optimizer.all_grad_tensors):
            held.update(dict.fromkeys(held))


class Stage1Bfloat16(Stage):
    """Stage 1 of bfloat16 weights: every rank has all gradients, flat, in float32."""

    def __init__(self, optimizer: Any):
        super().__init__(optimizer)
        self.copies = dist.world()

    def flat_weights(self) -> list[Tensor]:
        return self.optimizer.fp32_groups_flat_partition

    def gradients(self) -> list[Tensor]:
        return self.optimizer.fp32_groups_gradients_flat

    def clear(self) -> None:
        super().clear()
        self.optimizer.clear_hp_grads()


class Stage3(Stage):
    """Stage 3: each parameter is cut into equal flat parts, one per rank, with padding."""

    def flat_weights(self) -> list[Tensor]:
        return self.optimizer.fp32_partitioned_groups_flat

    def gradients(self) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def clear(self) -> None:
        super().clear()
        # a parameter that takes no part in a batch keeps what is in the buffer
        self.optimizer.grad_partitions_flat_buffer.zero_()
        self.optimizer.averaged_gradients = {}

    def gradient(self, p: Any) -> Tensor:
        return self.optimizer.get_fp32_grad_for_param(p)

    def link_moments(self) -> None:
        """Do nothing: at stage 3 DeepSpeed looks the moments up."""

    def steps_copy(self, p: Tensor) -> bool:
        return True

    def set_weight(self, p: Tensor, value: Tensor) -> None:
        from deepspeed import utils

        utils.safe_set_local_fp32_param(p, self._part(p, value))

    def set_moment(self, p: Tensor, name: str, value: Tensor) -> None:
        from deepspeed import utils

        utils.safe_set_local_optimizer_state(p, self._part(p, value), name)

    def _part(self, p: Any, x: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        size = p.ds_tensor.numel()
        padded = F.pad(x.flatten(), (0, size * dist.world() - x.numel()))
        start = size * dist.rank()
        return padded[start : start + size]


def stage_of(optimizer: Any, number: int) -> Stage:
    """Return the layout of the optimizer that DeepSpeed made for a ZeRO stage."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if number == 3:
        return Stage3(optimizer)
    # bfloat16 at stage 1 without offload, where gradients are summed in float32
    return Stage1Bfloat16(optimizer) if isinstance(optimizer, BF16_Optimizer) else Stage1And2(optimizer)
