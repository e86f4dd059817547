"""A rollout on the host: what gathering, scoring, planning and packing it costs."""

import resource
import time
from typing import Any

import torch

import rft_fn as rft
from rft_fn.strategy import StrategyConfig, get_strategy


def measure(rank: int, responses: int, tokens: int, budget: int) -> dict[str, Any]:
    """Seconds of a rank and its memory for `responses` of `tokens`, of which every rank sampled a part."""
    st = get_strategy(StrategyConfig())
    part = responses // st.world
    g = torch.Generator().manual_seed(rank)
    length = torch.randint(tokens // 4, tokens + 1, (part,), generator=g)
    length[0] = tokens
    at = torch.arange(tokens)
    mask = (at < length[:, None]) & (at >= 256)
    rollout = rft.Rollout(
        tokens=torch.randint(3, 1000, (part, tokens), generator=g),
        mask=mask,
        logp=torch.full((part, tokens), -1.0) * mask,
        length=length,
        truncated=torch.zeros(part, dtype=torch.bool),
        group=torch.arange(part) // 8,
        version=torch.zeros(part, dtype=torch.long),
    )
    start_bytes = high_water()
    clock = Laps()
    whole = st.gather(rollout)
    clock.lap("gather")

    reward = torch.rand(responses // 8, 8, generator=torch.Generator().manual_seed(0))
    adv = rft.advantage.grpo(reward).view(-1)
    w = rft.weight.token_mean(whole.mask)
    exp = rft.experience(whole, adv=adv, w=w)
    clock.lap("advantages and weights")
    packs = st.shard(exp, budget)
    clock.lap("plan and own packs")
    held = sum(x.numel() * x.element_size() for x in rft.tree.leaves(whole) if isinstance(x, torch.Tensor))
    more = {"bytes": held, "peak": high_water() - start_bytes, "packs": len(packs), "world": st.world}
    return {"wall": clock.wall, "cpu": clock.cpu} | more


class Laps:
    """Seconds between calls of `lap`, on the wall and of the processor."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.last = (time.perf_counter(), time.process_time())

    def lap(self, name: str) -> None:
        """End a phase."""
        now = (time.perf_counter(), time.process_time())
        self.wall[name], self.cpu[name] = (b - a for a, b in zip(self.last, now))
        self.last = now


def high_water() -> int:
    """The most bytes that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
