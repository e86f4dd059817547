"""`rft where SCRIPT --model NAME`: the longest row that fits in training a model, with each option."""

import torch

from rft_fn import memory, model, optim
from rft_fn.memory.estimate_table import size
from rft_fn.model.checkpointing import LADDER
from rft_fn.model.load import usual_dtype
from rft_fn.strategy import StrategyConfig
from rft_fn.strategy.forecast import Forecast, longest, window_of

__all__ = ["text"]


def text(name: str, *, lora_rank: int = 0, gigabytes: float = 0.0) -> str:
    """Return a line for each value of gradient_checkpointing, with the tokens of the longest row.

    For AdamW on one process, on a GPU of `gigabytes` GB, or in what is free here.
    """
    device = torch.device("cuda" if gigabytes or torch.cuda.is_available() else "cpu")
    free = int(gigabytes * 1e9) or memory.free(device)
    # the meta device stands for a GPU that may not be here
    lm = model.load(name, meta=True, dtype=usual_dtype(device), device="cpu")
    if lora_rank:
        lm = model.apply_lora_configuration(lm, lora_rank, 2 * lora_rank)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-6))
    x = Forecast(
        config=StrategyConfig(),
        models=((lm, tx),),
        budget=1,
        world=1,
        kind=device.type,
        available=free,
        host=memory.host_memory(),
        more={"engine": False},
    )
    what = f"adapters of rank {lora_rank}" if lora_rank else "all weights"
    window = window_of(lm)
    lines = [f"longest row in {size(free)} of {device.type}, in tokens by forecast: {name}, {what} trained"]
    for kind in LADDER:
        if kind == "host" and device.type == "cpu":
            continue  # where the host is the device
        found = longest(x if kind is False else x.keeping(kind))
        row = "unknown" if found is None else f"{found:,}"
        limit = ", all that the model reads" if found is not None and found == window else ""
        lines.append(f"  --gradient-checkpointing {kind!s:<9}{row:>11}{limit}")
    return "\n".join(lines)
