"""Loads new weights into vLLM's layers, and counts what arrives; in a server from a folder.

vLLM leaves out in silence what it does not recognise, and a layer that got a part of its weights keeps
uninitialised memory in the rest. Its layerwise reload counts the elements that each layer got, so a drop
changes the counts of the first whole load.

A server has `--worker-extension-cls rft_fn.engine.worker.WeightsFromFolder`, so this module imports no model.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn.engine.weight_delta import Kept
from rft_fn.engine.weight_folder import LoadCheck
from rft_fn.text import error_text

__all__ = [
    "MissingElements", "WeightsFromFolder", "check_same", "checked", "drafts_of", "in_both", "reload",
    "replace", "without_place",
]  # fmt: skip


MissingElements = dict[str, tuple[int, int]]  # layers that got fewer elements than they hold: (got, held)


def checked(
    check: LoadCheck, weights: Iterable[tuple[str, Tensor]], unchanged: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that `check` passes, then the `unchanged` ones; a tied weight under each name.

    vLLM may hold a packed copy of a tied head, which only the head's own name renews. ValueError for a tensor
    that the model does not have, that comes twice or not at all, or that has NaN or inf.
    """
    tied: dict[str, list[str]] = {}
    for names in check.expected.required.values():
        tied |= dict.fromkeys(names, sorted(names))
    for name, x in weights:
        if name in check.names:
            raise ValueError(f"weights: {name}: expected it once, got it twice")
        check.take(name, x)
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise ValueError(f"weights: {name}: expected finite numbers, got NaN or inf")
        for each in tied.get(name, (name,)):
            yield each, x
    check.finish(0)  # names a weight that is missing, which vLLM's layer would not
    for name, x in unchanged:
        for each in tied.get(name, (name,)):
            yield each, x


def replace(
    worker: Any, weights: Iterable[tuple[str, Tensor]], expected: MissingElements | None
) -> MissingElements:
    """Load weights into the model of vLLM's worker; return the layers that did not get all elements.

    ValueError unless they are `expected`, the ones of the first whole load.
    """
    missing = reload(worker.get_model(), weights, worker.vllm_config, worker.model_runner.model_config)
    if expected is not None:
        check_same(missing, expected)
    return missing


@torch.no_grad()
def reload(
    model: Any, weights: Iterable[tuple[str, Tensor]], config: Any, model_config: Any
) -> MissingElements:
    """Load weights into a model of vLLM; return the layers that did not get all elements.

    Some never do: those with padding, scales and rotary tables. The configs are vLLM's and the model's. After
    an error the model must not be used before another whole load.
    """
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.model_loader.reload import layerwise  # pyright: ignore[reportMissingImports]

    with set_current_vllm_config(config):
        layerwise.initialize_layerwise_reload(model)
        try:
            model.load_weights(weights)
            missing: MissingElements = {}
            for name, layer in model.named_modules():
                info = layerwise.get_layerwise_info(layer)
                if info.can_load() and info.load_numel < info.load_numel_total:
                    missing[name] = info.load_numel, info.load_numel_total
        except BaseException:
            with suppress(Exception):  # else the next load would go on from the counts of this one
                layerwise.finalize_layerwise_reload(model, model_config)
            raise
        layerwise.finalize_layerwise_reload(model, model_config)
    return missing


def in_both(one: MissingElements, other: MissingElements) -> MissingElements:
    """Return the layers that lack elements after two parts of the weights.

    ValueError for one that got elements of both: vLLM puts a layer together from one load.
    """
    found: MissingElements = {}
    for name in one.keys() & other.keys():
        few, many = sorted((one[name][0], other[name][0]))
        if few:
            raise ValueError(
                f"weights: {name}: expected all that vLLM's layer gets in one part, got {few} and {many} "
                f"elements in two"
            )
        found[name] = many, one[name][1]
    return found


def check_same(missing: MissingElements, expected: MissingElements) -> None:
    """Raise ValueError, by name, for layers that did not get what they got in the first whole load."""
    if missing != expected:
        raise ValueError(_difference(missing, expected))


def _difference(missing: MissingElements, expected: MissingElements) -> str:
    """Name the first layer that did not get what it got in the first load."""
    layers = [name for name in missing.keys() | expected.keys() if missing.get(name) != expected.get(name)]
    first = min(layers)
    total = (missing.get(first) or expected[first])[1]
    want = expected.get(first, (total, total))[0]
    got = missing.get(first, (total, total))[0]
    return (
        f"weights: {first}: expected {want} elements to arrive in vLLM's layer, got {got} "
        f"({len(layers)} layers differ from the first load)"
    )


def without_place(worker: Any, number: int) -> list[str]:
    """Return the layers of adapters that vLLM's model has no place for.

    It leaves them out in silence.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    return sorted(manager.get_adapter(number).loras.keys() - manager.modules.keys())


def drafts_of(config: Any) -> dict[str, Any] | None:
    """Return what tells whether vLLM verifies drafts, for `speculative.check_exact`; None without drafts.

    Once a worker has been built. Where vLLM has no Triton, a stand-in for one of its kernels may write to a
    copy (0.32.0): temperature and top_p of the drafted tokens are then what the memory held before.
    """
    drafts = config.speculative_config
    if drafts is None:
        return None
    from vllm.v1.sample.rejection_sampler import (  # pyright: ignore[reportMissingImports]
        expand_batch_to_tokens,
    )

    device = torch.device(config.device_config.device_type)
    counts = torch.tensor([1, 3], dtype=torch.int32, device=device)
    cases = [torch.tensor(case, device=device) for case in ([2.5, 0.25], [0.75, 3.5])]
    spread = all(torch.equal(expand_batch_to_tokens(x, counts, 3), x[[0, 1, 1]]) for x in cases)
    names = ("method", "rejection_sample_method", "enable_adaptive_verification")
    return {name: getattr(drafts, name, None) for name in names} | {"by_temperature": spread}


def _room_for_adapters(config: Any, worker: Any) -> dict[str, Any] | None:
    """Return the largest rank of adapters, how many are held, whether the head takes some, and their base.

    None where there is no room for any. The base is int8 as the trainer has it, another precision that vLLM
    names or that has other scales, or empty where it is full.
    """
    if config is None:
        return None
    places = worker.model_runner.lora_manager._adapter_manager.modules
    head = any(name.rpartition(".")[2] == "lm_head" for name in places)
    quantised = worker.vllm_config.quant_config
    torchao = getattr(quantised, "torchao_config", None)
    rows = type(torchao).__name__ == "Int8WeightOnlyConfig" and getattr(torchao, "group_size", 0) is None
    base = "" if quantised is None else "int8" if rows else str(quantised.get_name())
    workers = worker.vllm_config.parallel_config.tensor_parallel_size
    if base and workers > 1:  # a worker finds the scales of the parts that it has
        base = f"{base} in {workers} parts (--tensor-parallel-size)"
    return {"rank": config.max_lora_rank, "slots": config.max_cpu_loras, "head": head, "base": base}


class WeightsFromFolder:
    """A worker extension of vLLM that loads weights from a folder, called by `/collective_rpc`."""

    # names start with rft_, because they are among the worker's own
    rft_usual: frozenset[str] | None = None  # layers that lack elements in a whole load
    rft_kept: Kept | None = None  # weights that the next folder may be a difference from

    def rft_describe(self: Any) -> dict[str, Any]:
        """Return the device, and the parts of the config that decide what a trainer may ask for.

        They are whether memory can be given back, vLLM's backend of weights, the largest rank and the number
        of adapters, and what verifies drafts.
        """
        config = self.vllm_config
        device = str(config.device_config.device_type)
        return {
            "device": device,
            "sleep": bool(config.model_config.enable_sleep_mode) and device != "cpu",
            "transfer": getattr(getattr(config, "weight_transfer_config", None), "backend", ""),
            "differences": True,
            "adapters": _room_for_adapters(config.lora_config, self),
            "speculative": drafts_of(config),
        }

    def rft_without_place(self: Any) -> list[str]:
        """Return the layers of the newest adapters that have no place in this worker's part of the model."""
        return without_place(self, max(self.list_loras()))

    def rft_load(self: Any, folder: str) -> dict[str, Any]:
        """Load the tensors of a folder, and count what arrives in each layer.

        Returns the number of names, and the layers that got fewer elements than in the first load (padding,
        rotary tables and scales always do): `{"names": n, "short": ["layers.0.qkv_proj 512/768"]}`, or
        `{"error": text}`. An exception would leave the server with half of its weights and no reply.
        """
        names = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal names
            for name, x in weights:
                names += 1
                yield name, x

        try:
            self.rft_kept = self.rft_kept or Kept(self.vllm_config.parallel_config.world_size)
            weights = self.rft_kept.read(Path(folder))  # all of a difference, before the model is touched
            missing = replace(self, counted(), None)
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error_text(error)}"}

        # the first load is complete: the trainer has checked its names against the model's
        if self.rft_usual is None:
            self.rft_usual = frozenset(missing)
        short = [
            f"{name} {got}/{held}" for name, (got, held) in missing.items() if name not in self.rft_usual
        ]
        return {"names": names, "short": short}
