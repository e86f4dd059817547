"""Where each ZeRO stage of DeepSpeed keeps float32 weights, gradients and moments.

One class for each layout: these are the only places that read the insides of DeepSpeed's optimizers.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_fn import dist

__all__ = ["Stage", "Stage1And2", "Stage1Bfloat16", "Stage3", "gathered", "stage_of"]


def gathered(p: Tensor) -> Tensor:
    """A whole parameter, as the model computes with it. All ranks must call it."""
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

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """This rank's part of the float32 weights, one tensor per parameter group."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the gradients, after the last backward of a batch."""

    def clear(self) -> None:
        """Drop gradients that no step has used."""
        self.optimizer.zero_grad()

    def finite(self) -> bool:
        """Whether this rank's part of the gradients has neither NaN nor inf."""
        return all(bool(torch.isfinite(x).all()) for x in self.gradients())

    def overflowed(self) -> bool:
        """Whether DeepSpeed skipped the last step: finite gradients may have an infinite norm."""
        return getattr(self.optimizer, "overflow", False)  # not in every version of BF16_Optimizer

    def link_moments(self) -> None:
        """Tell DeepSpeed which piece of the moments belongs to which parameter."""
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def steps_copy(self, p: Tensor) -> bool:
        """Whether the optimizer steps a float32 copy of a trained parameter."""
        return p.dtype == torch.bfloat16

    def weight(self, p: Tensor) -> Tensor:
        """A whole parameter, in float32 where it is stepped so. All ranks must call it."""
        from deepspeed import utils

        if p.requires_grad and self.steps_copy(p):
            return _required(utils.safe_get_full_fp32_param(p))
        return gathered(p)

    def moment(self, p: Tensor, name: str) -> Tensor:
        """A whole moment by AdamW's name, in float32. All ranks must call it."""
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

    def link_moments(self) -> None:
        """Nothing: at stage 3 DeepSpeed looks the moments up."""

    def steps_copy(self, p: Tensor) -> bool:
        return True

    def set_weight(self, p: Tensor, value: Tensor) -> None:
        from deepspeed import utils

        utils.safe_set_local_fp32_param(p, self._part(p, value))

    def set_moment(self, p: Tensor, name: str, value: Tensor) -> None:
        from deepspeed import utils

        utils.safe_set_local_optimizer_state(p, self._part(p, value), name)

    def _part(self, p: Any, x: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        size = p.ds_tensor.numel()
        padded = F.pad(x.flatten(), (0, size * dist.world() - x.numel()))
        start = size * dist.rank()
        return padded[start : start + size]


def stage_of(optimizer: Any, number: int) -> Stage:
    """The layout of the optimizer that DeepSpeed made for a ZeRO stage."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if number == 3:
        return Stage3(optimizer)
    # bfloat16 at stage 1 without offload, where gradients are summed in float32
    if isinstance(optimizer, BF16_Optimizer):
        return Stage1Bfloat16(optimizer)
    return Stage1And2(optimizer)
