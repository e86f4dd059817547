"""Seconds of the processor that the host needs beside the model, each held near proportion."""

import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import rft_fn as rft
from rft_fn.packing.shards import cut
from rft_fn.tools.page.build import write_page

MOST = 1.2  # exponent: above it a cost that is small today decides how large a run can be
Work = Callable[[], object]


def plan(rows: int, folder: Path) -> Work:
    """Packs of 8 ranks for rows of 100 to 4,000 tokens, eight to a prompt of their own."""
    g = torch.Generator().manual_seed(0)
    tokens = (torch.arange(rows) // 8)[:, None].repeat(1, 4)
    mask = (torch.arange(4) >= 2).expand(rows, -1)
    zero = torch.zeros(rows, 4)
    length = torch.randint(100, 4001, (rows,), generator=g)
    exp = rft.Experience(tokens=tokens, mask=mask, length=length, old_logp=zero, adv=zero, w=zero)
    return lambda: [cut(exp, 4096, 8, share_prefixes=shared) for shared in (False, True)]


def weights(rows: int, folder: Path) -> Work:
    """The weights of tokens that read a whole batch, rows of 1,024 tokens."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.rand(rows, 1024, generator=g) for _ in range(2))
    mask = torch.ones(rows, 1024, dtype=torch.bool)

    def work() -> None:
        w = rft.weight.seq_mean(mask)
        rft.weight.high_entropy(w, x, mask)
        rft.weight.second_moment_mask(w, x, y, mask, limit=0.01)
        rft.weight.truncated_is_seq(w, x, y, mask)

    return work


def report(steps: int, folder: Path) -> Work:
    """The page of a run of so many steps, thirty metrics, and 16 responses every ten steps."""
    run = folder / f"run_{steps}"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"steps": steps}))
    names = [f"m/{k}" for k in range(30)]
    metrics = [{"step": i} | {x: math.sin(i * (k + 1)) for k, x in enumerate(names)} for i in range(steps)]
    timing = [{"step": i, "seconds": 3.0, "phase/generate": 1.0, "phase/train": 1.5} for i in range(steps)]
    text = " ".join(["word"] * 50)
    samples = [
        {"step": i, "prompt": text, "response": f"{text} {i} {k}", "reward": k / 16}
        for i in range(0, steps, 10)
        for k in range(16)
    ]
    for name, rows in {"metrics": metrics, "timing": timing, "samples": samples}.items():
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda: write_page([run], folder / "page.html")


def checkpoint(tensors: int, folder: Path) -> Work:
    """A checkpoint of so many tensors of 65,536 numbers with their optimizer's, written and read."""
    st = rft.strategy.get_strategy()
    layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(tensors))
    states = [st.init(layers, rft.optim.adamw(1e-3))[1]]

    def work() -> None:
        path = rft.ckpt.save(folder / f"checkpoint_{tensors}", states[0])
        states[0] = rft.ckpt.restore(path, states[0])[0]

    return work


def judge(rows: int, folder: Path) -> Work:
    """Rewards of different answers, eight to a prompt, by text, by number and as mathematics."""
    tokenizer = rft.model.load_tokenizer("tiny")
    draw = random.Random(0)
    given = [{"sum": f"{i}+1", "answer": str(i + 1)} for i in range(rows // 8)]
    data = rft.data.from_rows(given, tokenizer, template="{sum}=", name="sums")
    prompts, _ = rft.data.take(data, rows // 8, seed=0)
    lines = [p.ids + tokenizer.encode(str(draw.randrange(10**6))) for p in prompts for _ in range(8)]
    length = torch.tensor([len(x) for x in lines])
    tokens = torch.zeros(rows, int(length.max()), dtype=torch.long)
    for row, line in zip(tokens, lines):
        row[: len(line)] = torch.tensor(line)
    first = torch.tensor([len(p.ids) for p in prompts]).repeat_interleave(8)
    at = torch.arange(tokens.shape[1])
    rollout = rft.Rollout(
        tokens=tokens,
        mask=(at >= first[:, None]) & (at < length[:, None]),
        logp=torch.zeros(tokens.shape),
        length=length,
        truncated=torch.zeros(rows, dtype=torch.bool),
        group=torch.arange(rows) // 8,
        version=torch.zeros(rows, dtype=torch.long),
    )
    # different answers: most are told without mathematics, which runs in processes of its own
    score = rft.reward.parse(["exact", "numeric", "math"])
    return lambda: rft.reward.judge(score, rollout, prompts, tokenizer)


CASES: dict[str, tuple[Callable[[int, Path], Work], tuple[int, ...], str]] = {
    "plan": (plan, (4_000, 16_000, 64_000), "rows"),
    "weights": (weights, (256, 1024, 4096), "rows of 1,024 tokens"),
    "report": (report, (1_000, 4_000, 16_000), "steps"),
    "checkpoint": (checkpoint, (32, 128, 512), "tensors"),
    "judge": (judge, (1_024, 4_096, 16_384), "answers"),
}


def measured() -> dict[str, list[dict[str, float]]]:
    """The points of each case: {"x", "seconds"}, the least of three."""
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, sizes, _) in CASES.items():
            points = []
            make(sizes[0], _made(Path(folder) / f"{name}_first"))()  # finds what is done once a process
            for size in sizes:
                work = make(size, _made(Path(folder) / f"{name}_{size}"))
                points.append({"x": size, "seconds": min(_seconds(work) for _ in range(3))})
            found[name] = points
            print(f"  {name}: " + ", ".join(f"{p['seconds']:.2f} s" for p in points), flush=True)
    return found


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _seconds(work: Work) -> float:
    """Seconds of the processor of this process and of its threads."""
    began = time.process_time()
    work()
    return time.process_time() - began
