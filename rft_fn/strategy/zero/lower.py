"""Lowers a config and a Transform to DeepSpeed: its options, and one AdamW."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import optim
from rft_fn.strategy.config import StrategyConfig

__all__ = ["MOMENTS", "AveragingAdamW", "Lowered", "lower", "options"]

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq", "average": "average"}  # our names -> those of AdamW's state


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
        """An optimizer of these parameters, in two groups: with and without weight decay."""
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
    if callable(lr):
        return lr
    return optim.constant(lr)


def _parts(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The transforms of nested chains, in order."""
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
    """The spec of a transform as DeepSpeed's own step performs it.

    It may be clip_by_global_norm any number of times (the smallest counts), one adamw, and an ema after it.
    ValueError with the name of any other transform, or of one out of place.
    """
    parts = list(_parts(spec))
    decay = None
    if parts and parts[-1]["name"] == "ema":
        decay = parts.pop()["decay"]
    if not parts:
        raise ValueError("tx: expected an adamw with zero_stage, got none")
    *clips, adamw = parts
    for i, part in enumerate(clips):
        _require(part, "clip_by_global_norm", f"in place {i + 1}")
    _require(adamw, "adamw", "last")
    clip = min((part["max_norm"] for part in clips), default=0.0)
    return Lowered(clip, _schedule(adamw["lr"]), adamw, decay)


def options(config: StrategyConfig, root: nn.Module, clip: float = 0.0) -> dict[str, Any]:
    """DeepSpeed's own configuration.

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
