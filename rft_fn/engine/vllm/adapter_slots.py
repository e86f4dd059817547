"""Gives vLLM in this process adapters that come alone, beside a base model that stays."""

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rft_fn.engine import adapters_alone
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.vllm.surroundings import import_vllm
from rft_fn.engine.weight_folder import remove
from rft_fn.engine.worker import without_place
from rft_fn.model.lora_folders import CONFIG
from rft_fn.model.lora_targets import linear
from rft_fn.model.model_names import resolve
from rft_fn.model.quantize import int8_as_json

__all__ = ["AdapterSlots"]


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the largest ranks that vLLM can be built for


class AdapterSlots:
    """The adapters of one engine, and their folders.

    vLLM computes with adapters next to its layers, where merged weights cost nothing, so an engine takes them
    only where they are asked for.
    """

    def __init__(self, config: EngineConfig, model: str | nn.Module):
        """Raise ValueError for too large a rank, and for a model that has adapters already."""
        self.takes = config.adapters == "alone" and config.lora_rank > 0
        self.rank = config.lora_rank
        self.base = config.base
        self.loaded: list[Any] = []  # vLLM's requests, the newest last
        self.count = 0  # loads so far, which name the next one
        self.without: list[float] = []  # log-probs of the base model, once they were asked for
        self.temporary: tempfile.TemporaryDirectory[str] | None = None
        if not self.takes:
            return
        if self.rank > RANKS[-1]:
            raise ValueError(
                f"engine_adapters alone, lora_rank: expected at most {RANKS[-1]} for vllm, got {self.rank}"
            )
        if not isinstance(model, str) or Path(resolve(model), CONFIG).is_file():
            got = "a folder of adapters" if isinstance(model, str) else "a module"
            raise ValueError(f"engine_adapters alone: expected the name of a whole base model, got {got}")
        self.temporary = tempfile.TemporaryDirectory(prefix="rft_fn_adapters_")

    def options(self, skeleton: nn.Module) -> dict[str, Any]:
        """Return the arguments of vLLM's constructor, for a model without weights.

        The layers are named because vLLM would also put adapters on the head, and then score no prompt.
        """
        if not self.takes:
            return {}
        options: dict[str, Any] = {
            "enable_lora": True,
            "max_lora_rank": min(rank for rank in RANKS if rank >= self.rank),
            "max_loras": adapters_alone.SLOTS,
            "lora_target_modules": sorted({path.rpartition(".")[2] for path in linear(skeleton)}),
        }
        if self.base:  # vLLM brings what it reads into int8, with a scale for each row as the trainer's
            options["quantization"] = "torchao"
            options["hf_overrides"] = {"quantization_config_dict_json": int8_as_json()}
        return options

    def check_text(self) -> None:
        """Raise ValueError for a base in low precision, of a model with media: vLLM includes towers."""
        if self.base:
            raise ValueError(
                f"engine_adapters alone: expected a model of text for a base in {self.base}, got one with "
                "media, whose towers are in full precision"
            )

    def check(self) -> None:
        """Raise ValueError where this engine takes no adapters, or no more: its base is another one."""
        if not self.takes:
            raise ValueError("weights: expected whole ones (engine_adapters), got adapters alone")

    def load(self, llm: Any, tensors: dict[str, Tensor]) -> Any:
        """Load adapters beside the last ones; return vLLM's request of them."""
        assert self.temporary is not None
        rank = adapters_alone.rank_of(tensors)
        if rank > self.rank:
            raise ValueError(f"weights: expected adapters of rank {self.rank} (lora_rank), got {rank}")
        self.count += 1
        folder = Path(self.temporary.name, str(self.count))
        adapters_alone.write(folder, tensors)
        request = import_vllm("lora.request").LoRARequest(f"rft-{self.count}", self.count, str(folder))
        self.loaded.append(request)
        llm.llm_engine.add_lora(request)
        adapters_alone.check_places(llm.collective_rpc(without_place, args=(self.count,)))
        return request

    def leave_older(self, llm: Any) -> None:
        """Remove all adapters but the newest."""
        for request in self.loaded[:-1]:
            llm.llm_engine.remove_lora(request.lora_int_id)
            remove(Path(request.lora_path))
        del self.loaded[:-1]

    def leave(self, llm: Any) -> None:
        """Remove all adapters for good. ValueError where whole weights would fall into low precision."""
        if self.base:
            raise ValueError(f"weights: expected adapters alone on a base in {self.base}, got whole weights")
        self.loaded.append(None)
        self.leave_older(llm)
        self.loaded.clear()
        self.takes = False

    def close(self) -> None:
        """Delete the folders."""
        if self.temporary is not None:
            self.temporary.cleanup()
