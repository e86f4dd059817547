"""Put the results of run.py into docs/results/gpu.json, and its tables into docs/performance.md.

    python tests/bench/gpu/page.py FIRST/results.json SECOND/results.json

A later file replaces the stages that both have. Without files the section is written from what docs/results
has. Nothing of a dry run is taken, nor are two cards put into one table.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plan import STAGES

sys.path.append(str(Path(__file__).resolve().parents[1]))
from record import put

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results" / "gpu.json"
NONE = "not measured yet"
Row = dict[str, Any]

INTRO = """
A GPU may be there for minutes only, on a machine without a network. `make gpu` fetches what such a machine
may lack (3.3 MB of wheels, listed in `tests/bench/gpu/wheels.txt`) and prints two command lines for it. The
first asks whether everything is right and what the card reaches, the second how fast it is. `python
tests/bench/gpu/page.py RESULTS ...` puts what they measured into this section.

Each stage is a process with a time limit: a crash, a hang or an error that stays with the CUDA context costs
one stage, and seconds that a stage leaves are the next one's. Stages that ask whether something is right run
side by side. `results.json` is in the folder after every number, and a call ends with the table of what it
measured. `--only STAGE ...` picks stages, `--budget SECONDS` limits all of them together, and `--dry` runs
them with tiny shapes on a CPU, as `tests/test_gpu.py` does: it shows that they work, and its times mean
nothing. Models have the shapes of Qwen2.5, 4B that of Qwen3, and random weights, packs have 16,384 tokens of
sequences of 256 to 4,096, and numbers are bfloat16.
""".strip()

MFU = """
MFU is `6 T (matrices of the layers) + 6 (targets) D V + 6 layers heads head_dim (sum of squared lengths)`
over seconds and the rate on the data sheet (989 TFLOP/s unless `--peak` says otherwise): forward and two
backward products of every matrix; the head at response tokens only; causal attention, half of the squares.
Checkpointing and the fused head compute some products twice, which does not count.
""".strip()

MEMORY = """
By the meta device, a pack of 16,384 tokens in bfloat16 needs, in GiB:

| | gradient alone | step with AdamW | the same, layers checkpointed |
|---|---|---|---|
| 0.5B | 24.5 | 30.0 | 4.9 and 10.4 |
| 1.5B | 53.9 | 71.2 | 13.7 and 30.9 |
| 7B | 141 | 226 | 60 and 145 |

So on a device of 80 GiB the gradient of 7B is measured with checkpointing; its step takes several devices.
""".strip()

ABOUT = {
    "ceilings": "versions; rates of products, copies and launches: what all else is held against",
    "smoke": "the README's loop; `grpo.py` with its canary, twice, and stopped and resumed: the same bits?",
    "head": "the fused head's engines against float64: entropy, bias, softcap, frozen, ignored rows",
    "attention": "attention of packs and its gradients against float64",
    "attention_rate": "the rate of attention of a full pack",
    "bars": "the head's engines beside the rate of their products in the same run; makes `auto.json`",
    "gradient": "1.5B: layers checkpointed, not, profiled, blocks compiled",
    "sampling": "the engine `hf` at 1.5B: 64 and 256 rows, prompts of one length and of many, CUDA graphs",
    "decode": "the engine `hf` at 1.5B: new tokens by fused kernels and by the model's modules",
    "gap": "sampler against trainer with flat and peaked logits",
    "state": "1.5B with AdamW: update, peak of memory, push, offload; 0.5B: save, restore, canary",
    "fsdp2": "FSDP2 over NCCL on one device beside none",
    "vision": "two steps of a model that sees",
    "lora": "1.5B and 4B with adapters, a frozen head: packs, and one row of 65,536 tokens",
    "gradient_7b": "7B: layers checkpointed; blocks compiled",
    "step": "a whole step of 1.5B, 128 responses of 128 tokens, beside TRL's",
    "tests": "the tests that need a device",
    "forecast": "the forecast of memory for the stage `state`; needs no device and runs beside the others",
}


class Goal(NamedTuple):
    """A number that is to be reached."""

    name: str
    goal: str
    find: Callable[["Found"], float | None]
    held: Callable[[float], bool]


class Found:
    """The rows of results by stage."""

    def __init__(self, results: dict[str, Any] | None):
        self.stages: dict[str, Any] = results["stages"] if results else {}

    def rows(self, stage: str, **about: Any) -> list[Row]:
        """Return the rows of a stage with these values."""
        rows = self.stages.get(stage, {}).get("rows", [])
        return [row for row in rows if all(row.get(k) == x for k, x in about.items())]

    def number(self, stage: str, key: str, **about: Any) -> float | None:
        """Return a number of the first row with these values; None where it was not measured."""
        return next((row[key] for row in self.rows(stage, **about) if row.get(key) is not None), None)

    def head(self, width: int, operation: str) -> float | None:
        """Return the best engine's share of its products' rate."""
        rows = [x for row in self.rows("bars", size=[16384, width, 151936]) for x in row.get("rows", [])]
        ours = [x for x in rows if x["operation"] == operation and x["variant"] in ("gemm", "triton")]
        return max((x["of_gemm_limit"] for x in ours if x["of_gemm_limit"]), default=None)

    def over_trl(self) -> float | None:
        """Return TRL's seconds of a step over ours."""
        ours, trl = (self.number("step", "seconds", what=side) for side in ("rft_fn", "trl"))
        return trl / ours if ours and trl else None

    def sampled(self) -> float | None:
        """Return the most tokens/s at 256 rows and prompts of one length."""
        rows = self.rows("sampling", rows=256, ragged=False)
        return max((row["tokens_s"] for row in rows if "tokens_s" in row), default=None)

    def over_forecast(self) -> float | None:
        """Return the peak of a step over its forecast."""
        peak = self.number("state", "peak_gib", size="1.5B", what="updates")
        told = self.number("forecast", "total_gib", size="1.5B")
        return peak / told if peak and told else None


def mfu(stage: str, size: str) -> Callable[[Found], float | None]:
    return lambda found: found.number(stage, "mfu", size=size, way="checkpointing")


def share(width: int, operation: str) -> Callable[[Found], float | None]:
    return lambda found: found.head(width, operation)


GOALS = [
    Goal(
        "MFU of a gradient, 1.5B, checkpointed", "at least 0.5", mfu("gradient", "1.5B"), lambda x: x >= 0.5
    ),
    Goal("MFU of a gradient, 7B, checkpointed", "at least 0.5", mfu("gradient_7b", "7B"), lambda x: x >= 0.5),
    *(
        Goal(
            f"fused head, D = {width}, {operation}: share of its products' rate",
            "at least 0.75",
            share(width, operation),
            lambda x: x >= 0.75,
        )
        for width in (896, 1536, 3584)
        for operation in ("forward", "forward+backward")
    ),
    Goal("sampling, 1.5B, 256 rows: tokens/s", "at least 40,000", Found.sampled, lambda x: x >= 40_000),
    *(
        Goal(
            f"4B with LoRA, {what}: tokens/s",
            f"at least {least:,}",
            lambda found, way=way: found.number("lora", "tokens_s", size="4B", way=way),
            lambda x, least=least: x >= least,
        )
        for what, way, least in (
            ("packs of 16,384 tokens", "packs", 8000),
            ("one row of 65,536", "one row", 5000),
        )
    ),
    Goal("a whole step, 1.5B: TRL's seconds over ours", "at least 2", Found.over_trl, lambda x: x >= 2),
    Goal(
        "peak memory of a step, 1.5B, over its forecast",
        "0.9 to 1.1",
        Found.over_forecast,
        lambda x: 0.9 <= x <= 1.1,
    ),
]

# what a row is about
LABELS = {
    "what",
    "size",
    "way",
    "engine",
    "heads",
    "kernel",
    "rows",
    "ragged",
    "graphs",
    "fused",
    "std",
    "model",
    "rank",
}
LABELS |= {"operation", "variant"}
# the columns of a stage's table
COLUMNS = {
    "ceilings": (
        "what",
        "size",
        "tflops",
        "of_peak",
        "device_gb_s",
        "pinned_up_gb_s",
        "pageable_up_gb_s",
        "us",
    ),
    "smoke": (
        "what",
        "exit",
        "canary_noisy",
        "canary_floor",
        "steps",
        "gap",
        "numbers",
        "differ",
        "relative",
    ),
    "head": ("size", "engine", "way", "logp", "entropy", "dh", "dw", "dbias"),
    "attention": ("heads", "kernel", "out", "dq", "dk", "dv"),
    "attention_rate": ("heads", "kernel", "sequences", "forward_tflops", "both_tflops"),
    "gradient": ("size", "way", "tokens", "mfu", "tokens_s", "peak_gib", "first_seconds"),
    "sampling": (
        "rows",
        "ragged",
        "graphs",
        "tokens_s",
        "decode_tokens_s",
        "new_lengths_seconds",
        "captures",
        "capture_seconds",
        "launches_a_token",
        "graph_launches",
    ),
    "decode": ("rows", "graphs", "fused", "ms_a_token", "decode_tokens_s", "launches_a_token"),
    "gap": ("std", "mean_logp", "fused_mean", "fused_max", "logits_mean", "logits_max"),
    "state": (
        "size",
        "what",
        "seconds",
        "peak_gib",
        "gb",
        "gb_s",
        "down_gb_s",
        "up_gb_s",
        "save_gb_s",
        "noisy",
    ),
    "fsdp2": ("size", "what", "norm", "fsdp2_norm", "mfu", "tokens_s", "peak_gib"),
    "vision": ("model", "exit", "steps", "gap", "reward"),
    "lora": ("size", "rank", "way", "tokens", "tokens_s", "seconds", "peak_gib"),
    "gradient_7b": ("size", "way", "tokens", "mfu", "tokens_s", "peak_gib", "first_seconds"),
    "step": ("what", "seconds", "tokens_s", "peak_bytes"),
    "tests": ("passed", "failed", "skipped"),
    "forecast": ("size", "total_gib", "training_gib", "updating_gib"),
}


def text(x: Any) -> str:
    """Return a value as a cell."""
    if x is None:
        return ""
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, float):
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
    if isinstance(x, list):
        return " x ".join(map(str, x))
    return f"{x:,}" if isinstance(x, int) else str(x).replace("|", "/")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *([text(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def goals(found: Found) -> str:
    """Return the goals with what was measured."""
    rows = []
    for goal in GOALS:
        x = goal.find(found)
        verdict = NONE if x is None else "held" if goal.held(x) else "missed"
        rows.append([goal.name, goal.goal, x, verdict])
    if not found.rows("step", what="trl") or found.number("step", "seconds", what="trl") is None:
        left = next((row.get("left_out") for row in found.rows("step", what="trl")), None)
        rows = [[*row[:3], f"not measured: {left}"] if left and "TRL" in row[0] else row for row in rows]
    return table(["goal", "", "measured", ""], rows)


def stages(found: Found) -> str:
    """Return each stage with how it ended."""
    rows = []
    for name, stage in STAGES.items():
        x = found.stages.get(name)
        ended = f"{x['ended']}, {x['seconds']:.0f} s" if x else NONE
        rows.append([f"`{name}`", ABOUT[name], stage.seconds, ended])
    return table(["stage", "what it measures", "seconds kept", ""], rows)


def details(name: str, rows: list[Row]) -> str:
    """Return the tables of a stage: its rows with any number or an error, and its longest kernels."""
    columns = COLUMNS.get(name, ())
    kernels = [x for row in rows for x in row.get("kernels", [])[:12]] if name == "gradient" else []
    if name == "bars":
        flat = [row | x for row in rows for x in row.get("rows", [])]
        rows = [x for x in flat if x["variant"] != "naive"] + [row for row in rows if "error" in row]
        columns = ("size", "operation", "variant", "seconds", "over_naive", "of_gemm_limit", "peak_mb")
    numbers = [c for c in (*columns, "left_out", "error") if c not in LABELS]
    rows = [row for row in rows if any(row.get(c) is not None for c in numbers)]
    columns = tuple(c for c in (*columns, "left_out", "error") if any(row.get(c) is not None for row in rows))
    parts = [table(columns, [[row.get(c) for c in columns] for row in rows])]
    if kernels:
        parts += ["The kernels that took longest in the pack that was profiled:"]
        parts += [table(["kernel", "ms", "calls"], [[f"`{name}`", ms, calls] for name, ms, calls in kernels])]
    return "\n\n".join(parts)


def made(results: dict[str, Any] | None) -> str:
    """Return when and on which card the numbers were measured, and by which versions."""
    if not results:
        return f"Results: {NONE}."
    versions = next(iter(Found(results).rows("ceilings", what="versions")), {})
    known = [f"{k} {versions[k]}" for k in ("torch", "triton", "transformers", "driver") if versions.get(k)]
    about = f"{results['device']}, {results['date']}"
    return f"Measured on {about}{' by ' + ', '.join(known) if known else ''} (`docs/results/gpu.json`)."


def section(results: dict[str, Any] | None) -> str:
    """Return the section on GPUs of docs/performance.md; None are no results."""
    found = Found(results)
    parts = ["## On a GPU", INTRO, made(results), goals(found), MFU, stages(found), MEMORY]
    for name in STAGES:
        rows = found.rows(name)
        if rows:
            parts += [f"`{name}`: {ABOUT[name]}", details(name, rows)]
    return "\n\n".join(parts)


def merged(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of several calls as one. ValueError for dry runs, and for two cards."""
    cards = {x["device"] for x in files}
    if any(x["dry"] for x in files):
        raise ValueError("results: expected measurements, got a dry run")
    if len(cards) > 1:
        raise ValueError(f"results: expected one card, got {', '.join(sorted(cards))}")
    stages = {name: stage for x in files for name, stage in x["stages"].items()}
    return files[-1] | {"command": [x["command"] for x in files], "stages": stages}


def read() -> dict[str, Any] | None:
    """Return the results that docs/ has."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="results.json of each call, in their order")
    files = [json.loads(path.read_text()) for path in parser.parse_args().results]
    if files:
        try:
            RESULTS.write_text(json.dumps(merged(files), indent=1) + "\n")
        except ValueError as error:
            raise SystemExit(f"page.py: {error}") from None
    put("docs/performance.md", {"gpu": section(read())})
    print(goals(Found(read())))


if __name__ == "__main__":
    main()
