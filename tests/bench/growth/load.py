"""Seconds of the processor in which many rows are loaded, at the first start and at the second."""

import json
import os
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

import rft_fn as rft

SIZES = (1_000, 4_000, 16_000)  # in one process: more rows have several, which take seconds to start


def rows(count: int, path: Path) -> None:
    """Write problems of some twenty words."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            a, b, c = (draw.randrange(1000) for _ in range(3))
            question = f"A farm has {a} hens, buys {b} more and sells {c}. How many hens are left?"
            file.write(json.dumps({"question": question, "answer": str(a + b - c)}) + "\n")


def measured() -> list[dict[str, float]]:
    """{"x": rows, "first" and "second": seconds of a start} of each size."""
    tokenizer = rft.model.load_tokenizer("tiny")
    found = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, RFT_FN_CACHE=folder):
        for count in (SIZES[0], *SIZES):  # the first one finds what is done once a process
            path = Path(folder) / f"{len(found)}.jsonl"
            rows(count, path)
            seconds = []
            for _ in range(2):
                began = time.process_time()
                rft.data.load(str(path), tokenizer, template="{question}", columns=("answer",))
                seconds.append(time.process_time() - began)
            found.append({"x": count, "first": seconds[0], "second": seconds[1]})
    return found[1:]
