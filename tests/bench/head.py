"""The gradient of a model with the fused head and without it: time and peak memory, in turn.

    python tests/bench/head.py --model smollm2-135m

Each in a separate process. The peak is all that the process holds (VmHWM), more than its tensors take:
glibc keeps what was freed. MALLOC_MMAP_THRESHOLD_=4194304 MALLOC_TRIM_THRESHOLD_=8388608 before the command
give every tensor of 4 MB and more a separate mapping: then the peak is theirs, and all is slower.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import rft_fn as rft
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.types import Experience, Packed, TokenOut


@dataclass(frozen=True)
class Config:
    model: str = "tiny"  # as in grpo.py
    rows: int = 64  # responses, of which the first half is the prompt
    length: int = 128  # tokens each
    budget: int = 2048  # tokens per pack
    rounds: int = 3  # gradients by each, after one that is not counted
    variant: str = ""  # on, off: this process measures one; empty: one process for each, one after the other


def loss_fn(out: TokenOut, b: Packed) -> tuple[torch.Tensor, dict]:
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv), {"logp": rft.metric.mean(out.logp, b.mask)}


def high_water() -> float:
    """VmHWM in GiB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 2**20


def measure(cfg: Config) -> dict:
    """Seconds of each gradient, the largest peak, and the values that both ways must share."""
    st = get_strategy(StrategyConfig(fused_linear_logprob=cfg.variant == "on"))
    apply, state = st.init(rft.model.load(cfg.model), rft.optim.adamw(1e-6))

    # The same random responses for both heads; the first half of each is a prompt.
    g = torch.Generator().manual_seed(0)
    shape = (cfg.rows, cfg.length)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, cfg.length // 2 :] = True
    words = len(rft.model.load_tokenizer(cfg.model))
    exp = Experience(
        tokens=torch.randint(words, shape, generator=g),
        mask=mask,
        length=torch.full((cfg.rows,), cfg.length),
        old_logp=torch.where(mask, -3.0, 0.0),
        adv=torch.randn(cfg.rows, 1, generator=g) * mask,
        w=rft.weight.token_mean(mask),
    )
    packs = st.shard(exp, cfg.budget)

    # The first gradient warms up: its time does not count, its peak does.
    seconds = []
    peaks = []
    metrics = {}
    for _ in range(cfg.rounds + 1):
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts from what is resident
        start = time.perf_counter()
        _, metrics = st.grad(state, apply, loss_fn, packs)
        seconds.append(time.perf_counter() - start)
        peaks.append(high_water())
    values = rft.metric.results(metrics)
    return {"seconds": seconds[1:], "peak": max(peaks), "loss": values["loss"], "logp": values["logp"]}


def main(cfg: Config) -> None:
    if cfg.variant:
        print(json.dumps(measure(cfg)))
        return
    threads = torch.get_num_threads()
    print(f"{cfg.rows} x {cfg.length} tokens of {cfg.model}, packs of {cfg.budget}, {threads} threads")
    print(f"{'head':<8}{'seconds':>10}{'peak GiB':>10}{'loss':>16}{'mean logp':>14}")
    found = {}
    for variant in ("off", "on"):
        command = [sys.executable, *sys.argv, "--variant", variant]
        line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        found[variant] = x = json.loads(line)
        name = {"off": "logits", "on": "fused"}[variant]
        middle = statistics.median(x["seconds"])
        print(f"{name:<8}{middle:>10.2f}{x['peak']:>10.2f}{x['loss']:>16.7f}{x['logp']:>14.7f}", flush=True)
    ratio = [statistics.median(found[v]["seconds"]) for v in ("on", "off")]
    print(f"fused / logits: {ratio[0] / ratio[1]:.2f}")


if __name__ == "__main__":
    rft.run.cli(main, Config)
