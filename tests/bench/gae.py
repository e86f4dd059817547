"""GAE by a scan against the loop over time that one writes: python tests/bench/gae.py

Both are timed in the same run, in turn, so that a busy machine slows both. OMP_NUM_THREADS=1 for one core.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rft_fn import advantage

ROWS, SIZE, ROUNDS, LAMBDA = 256, 4096, 7, 0.95


def loop(
    reward: Tensor, value: Tensor, discount: Tensor, lambda_: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(adv, ret), [B, S]: GAE from the last token to the first, all rows at once; tokens outside mask hand on
    what comes after them. For discounts that are 0 on tokens in mask only."""
    after, last, adv = torch.zeros(len(reward)), torch.zeros(len(reward)), torch.zeros_like(reward)
    for t in reversed(range(reward.shape[1])):
        x = reward[:, t] + discount[:, t] * after - value[:, t] + discount[:, t] * lambda_ * last
        if mask is None:
            adv[:, t] = last = x
            after = value[:, t]
        else:
            adv[:, t] = torch.where(mask[:, t], x, 0)
            last, after = torch.where(mask[:, t], x, last), torch.where(mask[:, t], value[:, t], after)
    ret = adv + value
    return adv, ret if mask is None else torch.where(mask, ret, 0)


def scan(
    reward: Tensor, value: Tensor, discount: Tensor, lambda_: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same by the library."""
    return advantage.gae(reward, value, discount, lambda_, mask=mask)


def milliseconds(f: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    f()
    return 1e3 * (time.perf_counter() - start)


def compare(name: str, *args: Any) -> str:
    """A line of the table: both times, the factor, the largest difference of the results."""
    error = max(float((x - y).abs().max()) for x, y in zip(loop(*args), scan(*args)))
    times = [(milliseconds(lambda: loop(*args)), milliseconds(lambda: scan(*args))) for _ in range(ROUNDS)]
    slow, fast = (statistics.median(x) for x in zip(*times))
    return f"{name:10}{slow:10.1f}{fast:10.1f}{slow / fast:8.1f}{error:20.1e}"


def spoken(g: torch.Generator) -> Tensor:
    """[B, S] bool: a prompt, a response with a tool's turn in it, padding; about half is in mask."""
    ends = ((100, 1000), (2000, SIZE + 1), (1000, 2000))
    start, length, turn = (torch.randint(*low_high, (ROWS, 1), generator=g) for low_high in ends)
    at = torch.arange(SIZE)
    return (at >= start) & (at < length) & ((at < turn) | (at >= turn + 300))


def main() -> None:
    """The table, without a mask and with one."""
    g = torch.Generator().manual_seed(0)
    (reward, value), mask = torch.randn(2, ROWS, SIZE, generator=g), spoken(g)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    discount = torch.where(last, 0.0, 0.99)
    print(f"{ROWS} x {SIZE} float32, {torch.get_num_threads()} thread(s), median of {ROUNDS} rounds")
    print(f"{'':10}{'loop ms':>10}{'scan ms':>10}{'factor':>8}{'largest difference':>20}")
    print(compare("no mask", reward, value, discount, LAMBDA))
    print(compare("mask", reward, value, discount, LAMBDA, mask))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # for --help
    main()
