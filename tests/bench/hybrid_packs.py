"""A pack of rows against a forward for each: `python tests/bench/hybrid_packs.py [FAMILY ...]`.

Seconds of the processor that a small hybrid takes to score 8 rows and for their gradient, in turns, and the
ratio of a forward for each row to one for all.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from families import VOCAB, small

from rft_fn import model, packing

FAMILIES = ("Qwen3_5Text", "Qwen3Next", "Mamba", "Mamba2", "FalconH1", "Jamba", "Lfm2")
TURNS = 3


def batch(rows, tokens):
    """An Experience of rows of equal length."""
    ids = torch.randint(3, VOCAB, (rows, tokens + 1), generator=torch.Generator().manual_seed(0)).tolist()
    return packing.supervised([(row[:4], row[4:]) for row in ids])


def score(apply, params, packs):
    with torch.no_grad():
        for b in packs:
            apply(params, b)


def gradient(apply, params, packs):
    total = sum(apply(params, b).logp.sum() for b in packs)
    torch.autograd.grad(total, list(params.values()), allow_unused=True)


def seconds(f, *args):
    """The seconds of the processor of one call."""
    start = time.process_time()
    f(*args)
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of a row")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    exp = batch(given.rows, given.tokens)
    together = [packing.pack(exp, range(given.rows))]
    alone = [packing.pack(exp, [i]) for i in range(given.rows)]
    for kind in given.families:
        apply, params = model.bind(small(kind, torch.float32))
        for f in (score, gradient):
            pack = each = float("inf")
            for _ in range(TURNS + 1):
                pack = min(pack, seconds(f, apply, params, together))
                each = min(each, seconds(f, apply, params, alone))
            said = f"{kind:16} {f.__name__:9} pack {pack:.4f} s, rows {each:.4f} s"
            print(f"{said}: {each / pack:.1f} times as fast")


if __name__ == "__main__":
    main()
