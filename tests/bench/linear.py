"""What `rft_kernels.products` knows of a processor: `python tests/bench/linear.py [--threads 1]`.

Times one layer's product by torch's linear, by oneDNN and by oneDNN with packed weights, in turns, for each
number of rows, and both products of its gradient by both libraries. Every call reads other weights of the
same shape, so that they come from memory as in a model.
"""

import argparse
import time

import torch
from torch.nn import functional as F

SHAPES = ("64x64", "256x256", "576x192", "576x576", "576x1536", "1536x576", "576x49152")  # inputs x outputs
ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 1024)
PACKS = (128, 256, 512, 1024, 2048)  # rows of a gradient
BYTES = 64 << 20  # of the weights of a shape: more than a processor caches
TURNS = 5


def seconds(products) -> list[float]:
    """The least seconds of the processor of one call of each function, in turns."""
    least = [float("inf")] * len(products)
    for _ in range(TURNS + 1):
        for i, product in enumerate(products):
            start = time.process_time()
            product()
            least[i] = min(least[i], time.process_time() - start)
    return least


def by_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] by a weight [N, K], as it stands or packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def of_shape(k: int, n: int) -> dict[int, list[float]]:
    """Seconds by torch, by oneDNN and by packs, for each number of rows."""
    count = max(2, BYTES // (4 * k * n))
    weights = [torch.randn(n, k) for _ in range(count)]
    packs = [torch.ops.mkldnn._reorder_linear_weight(w, 64) for w in weights]
    found = {}
    for rows in ROWS:
        # oneDNN takes no less time for fewer than four rows
        x, filled = torch.randn(rows, k), torch.randn(max(rows, 4), k)
        ways = [
            lambda x=x: [F.linear(x, w) for w in weights],
            lambda x=x: [by_onednn(x, w) for w in weights],
            lambda x=filled: [by_onednn(x, pack) for pack in packs],
        ]
        found[rows] = [s / count for s in seconds(ways)]
    return found


def gradients_of_shape(k: int, n: int) -> dict[tuple[str, int], float]:
    """Seconds by torch over those by oneDNN, for each gradient and number of rows."""
    count = max(2, BYTES // (4 * k * n))
    weights = [torch.randn(n, k) for _ in range(count)]
    ratios = {}
    for rows in PACKS:
        x, g = torch.randn(rows, k), torch.randn(rows, n)
        ways = [
            lambda g=g: [torch.mm(g, w) for w in weights],
            lambda g=g: [by_onednn(g, w.T) for w in weights],
            lambda g=g, x=x: [torch.mm(g.T, x) for _ in weights],
            lambda g=g, x=x: [by_onednn(g.T, x.T) for _ in weights],
        ]
        of_input, of_input_onednn, of_weight, of_weight_onednn = seconds(ways)
        ratios["input", rows] = of_input / of_input_onednn
        ratios["weight", rows] = of_weight / of_weight_onednn
    return ratios


def head(found) -> str:
    """The first two lines of a table with a column for each shape."""
    return "| rows | " + " | ".join(found) + " |\n" + "|---" * (len(found) + 1) + "|"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="inputs x outputs")
    parser.add_argument("--no-gradients", dest="gradients", action="store_false")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shapes]

    with torch.no_grad():
        found = {f"{k} x {n}": of_shape(k, n) for k, n in shapes}
    for title, way in (("torch / oneDNN", 1), ("torch / oneDNN with packed weights", 2)):
        print(f"\n{title}; above 1 oneDNN is faster\n")
        print(head(found))
        for rows in ROWS:
            ratios = [times[rows][0] / times[rows][way] for times in found.values()]
            print(f"| {rows:,} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")

    if not options.gradients:
        return
    ratios = {f"{k} x {n}": gradients_of_shape(k, n) for k, n in shapes if n < 2**15}  # a head's take minutes
    for what in ("input", "weight"):
        print(f"\ntorch / oneDNN, gradient of the {what}\n")
        print(head(ratios))
        for rows in PACKS:
            print(f"| {rows:,} | " + " | ".join(f"{x[what, rows]:.2f}" for x in ratios.values()) + " |")


if __name__ == "__main__":
    main()
