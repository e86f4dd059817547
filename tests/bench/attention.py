"""Packed attention against a dense [T, T] mask, in a whole model: python tests/bench/attention.py

Both are timed in the same run, in turn, so that a busy machine slows both. OMP_NUM_THREADS=1 for one core.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rft_fn import model, packing
from rft_fn.environment import tiny_models
from rft_fn.model import attention

BUDGET, ROUNDS = 1024, 7
LENGTHS = {"8-16": (8, 17), "40-120": (40, 121), "150-500": (150, 501)}


def tiny_model() -> nn.Module:
    """The shape of the embedded default."""
    return tiny_models.new_model(60, 0)


def smollm2(layers: int = 4) -> nn.Module:
    """Layers of SmolLM2-135M with random weights, and a small vocabulary: the head is timed elsewhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=60))


def pack(low: int, high: int) -> Any:
    """A pack of BUDGET tokens, of rows of random lengths in [low, high)."""
    g = torch.Generator().manual_seed(0)
    sizes: list[int] = []
    while sum(sizes) < BUDGET:
        sizes.append(min(int(torch.randint(low, high, (), generator=g)), BUDGET - sum(sizes)))
    draw = lambda n: torch.randint(3, 60, (n,), generator=g).tolist()  # noqa: E731
    return packing.pack(packing.supervised([(draw(1), draw(n)) for n in sizes]), range(len(sizes)))


def passes(lm: nn.Module, b: Any, *, dense: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward and backward) of a copy of `lm`."""
    lm = copy.deepcopy(lm)
    apply, params = model.bind(lm)
    if dense:
        attention.turn_off(lm, "it is what is compared with")
    values = list(params.values())
    forward = torch.no_grad()(lambda: apply(params, b).logp)
    return forward, lambda: torch.autograd.grad(apply(params, b).logp.sum(), values)


def milliseconds(f: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    f()
    return 1e3 * (time.perf_counter() - start)


def compare(name: str, lm: nn.Module, lengths: str) -> str:
    """A line of the table: times with a mask and packed, and their ratio, for both passes; the largest
    difference of a log-prob."""
    b = pack(*LENGTHS[lengths])
    slow, fast = (passes(lm, b, dense=x) for x in (True, False))
    error = float((slow[0]() - fast[0]()).abs().max())
    line = f"{name:10}{lengths:>9}{b.num_seqs:6}"
    for pair in zip(slow, fast):
        times = [[milliseconds(f) for f in pair] for _ in range(ROUNDS)]
        mask, ours = (statistics.median(x) for x in zip(*times))
        line += f"{mask:10.1f}{ours:10.1f}{mask / ours:7.2f}"
    return f"{line}{error:10.1e}"


def main() -> None:
    """The table."""
    warnings.simplefilter("ignore")  # that a mask is taken
    print(f"{BUDGET} tokens, float32, {torch.get_num_threads()} thread(s), median of {ROUNDS} rounds")
    both = f"{'mask ms':>10}{'packed':>10}{'ratio':>7}"
    print(f"{'':25}{'forward':>27}{'forward and backward':>27}")
    print(f"{'model':10}{'lengths':>9}{'rows':>6}{both}{both}{'differ':>10}")
    for name, lm in (("tiny", tiny_model()), ("SmolLM2", smollm2())):
        for lengths in LENGTHS:
            print(compare(name, lm, lengths), flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # for --help
    main()
