"""A training step on a GPU, part by part, in one call: rates, memory and errors.

    python tests/bench/gpu_step.py --out results/gpu

Models have Qwen2.5's shapes and random weights, packs have 16k tokens. What is measured is written after each
case, into gpu_step.json and gpu_step.png in the folder; a case that fails or does not fit is a row with its
error. `--only` names parts, in the order in which they run; none begins a case after `--seconds`. `--dry`
runs every part on the CPU with tiny shapes, and traces a step of the full ones on the meta device: it shows
that the call works, and its times say nothing.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "kernels", ROOT, ROOT / "tests" / "bench"):
    sys.path.insert(0, str(folder))

import gpu_step_model as model  # noqa: E402
import gpu_step_ops as ops  # noqa: E402
import torch  # noqa: E402

from rft_fn.model import layers  # noqa: E402

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "vllm", "trl")
Cases = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


def beside_trl(setting: model.Setting) -> Cases:
    """A whole step beside TRL's is another script's; here only whether this machine could run it."""
    found = {"left_out": "trl is not installed"}
    if find_spec("trl") is not None:
        found = {"left_out": f"make bench-step measures it, with --device {setting.device.type}"}
    yield {"with": "trl"}, lambda: found


def parts_of(setting: model.Setting, out: Path, names: list[str]) -> dict[str, Callable[[], Cases]]:
    """The parts in their order: those that everything rests on come first. `names` are of full sizes."""
    return {
        "products": partial(ops.products, setting),
        "numerics": partial(model.numerics, setting),
        "attention": partial(ops.attend, setting),
        "gradients": partial(model.gradients, setting),
        "shapes": partial(model.shapes, setting, names),
        "memory": partial(model.memory, setting),
        "head": partial(ops.fused_head, setting),
        "auto": partial(ops.auto, setting, out),
        "sampling": partial(model.sampling, setting),
        "trl": partial(beside_trl, setting),
    }


def setting_of(args: argparse.Namespace) -> model.Setting:
    """The sizes of a measurement, or of a dry run."""
    common = {"rounds": args.rounds, "peak": args.peak * 1e12, "dry": args.dry}
    if args.dry:
        # The compiler of a CPU takes a minute; graphs are made and run without it.
        layers.compile_blocks = partial(layers.compile_blocks, backend="aot_eager")
        return model.Setting(
            device=torch.device("cpu"),
            dtype=torch.float32,
            tokens=48,
            lengths=(4, 20),
            sizes={"tiny": model.TINY},
            small=model.TINY,
            ways={name: model.WAYS[name] for name in ("eager", "compiled, checkpointing", "logits")},
            batches=(2,),
            prompt=4,
            max_new=3,
            **common,
        )
    if not torch.cuda.is_available():
        raise SystemExit("gpu_step.py: expected a CUDA device, got none; --dry runs on a CPU")
    return model.Setting(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        tokens=args.tokens,
        lengths=(256, 4096),
        sizes={name: model.SHAPES[name] for name in args.sizes},
        small=model.SMALL,
        ways=model.WAYS,
        batches=(64, 256),
        prompt=256,
        max_new=256,
        **common,
    )


def provenance(setting: model.Setting) -> dict[str, Any]:
    """When, where and with what something was measured."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    device = platform.processor() or platform.machine()
    if setting.device.type == "cuda":
        device = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
    return {
        "date": date.today().isoformat(),
        "device": device,
        "dtype": str(setting.dtype),
        "peak_tflops": setting.peak / 1e12,
        "tokens": setting.tokens,
        "rounds": setting.rounds,
        "dry": setting.dry,
        "mfu": f"{model.FORMULA}, over seconds and peak",
        "versions": versions,
        "sizes": setting.sizes,
        "parts": {},
    }


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a case, or its error in one line: the next case runs in any event."""
    began = time.perf_counter()
    try:
        row = call()
    except torch.cuda.OutOfMemoryError:
        row = {"error": "does not fit into the memory of the device"}
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    model.forget()
    return row | {"took": time.perf_counter() - began}


def shown(row: dict[str, Any]) -> str:
    """A row as one line of text."""
    words = []
    for name, value in row.items():
        text = value
        if isinstance(value, float):
            text = f"{value:.4g}"
        if isinstance(value, dict | list) and len(str(value)) > 60:
            continue  # in the file
        words.append(f"{name} {text}")
    return "  ".join(words)


def bars(axes: Any, rows: dict[str, float], title: str, goal: float) -> None:
    """Horizontal bars, and the goal as a line."""
    axes.barh(list(rows), list(rows.values()))
    axes.axvline(goal, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_title(title)


def draw(found: dict[str, Any], path: Path) -> None:
    """MFU of the gradients, and of the fused head the share of its products' rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = {f"{r['size']} {r['way']}": r["mfu"] for r in found["parts"].get("gradients", []) if "mfu" in r}
    heads = {}
    for one in found["parts"].get("head", []):
        for row in one.get("rows", []):
            if row["operation"] in ("forward", "forward+backward") and row["of_gemm_limit"]:
                heads[f"D {one['D']} {row['variant']}, {row['operation']}"] = row["of_gemm_limit"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 1.5 + 0.25 * max(len(rates), len(heads), 4)))
    bars(left, rates, "gradients: share of the peak (MFU)", 0.5)
    bars(right, heads, "head: share of its products' rate", 0.75)
    title = f"{found['device']}, packs of {found['tokens']} tokens"
    if found["dry"]:
        title += ", a dry run: the numbers say nothing"
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run the parts; the results, which the folder has too."""
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    setting = setting_of(args)
    found = provenance(setting)
    parts = parts_of(setting, args.out, args.sizes)
    file = args.out / "gpu_step.json"
    print(f"{found['device']}, {found['dtype']}, {found['versions']}", flush=True)
    for name in args.only or parts:
        rows: list[dict[str, Any]] = []
        found["parts"][name] = rows
        print(f"== {name}", flush=True)
        for about, call in parts[name]():
            row = {"left_out": f"{args.seconds} seconds are over"}
            if time.perf_counter() - began < args.seconds:
                row = attempt(call)
            rows.append(about | row)
            print(shown(rows[-1]), flush=True)
            file.write_text(json.dumps(found, indent=1) + "\n")  # what is measured is kept
        try:
            draw(found, args.out / "gpu_step.png")
        except ImportError as error:
            print(f"no picture: {error}", flush=True)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(parts_of(None, Path(), []))  # type: ignore[arg-type]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--sizes", nargs="+", choices=list(model.SHAPES), default=list(model.SHAPES))
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a pack")
    parser.add_argument("--rounds", type=int, default=3, help="timed repetitions")
    parser.add_argument("--seconds", type=float, default=540.0, help="no case begins after these")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the device; an H200's in bf16")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_step")))
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    return parser.parse_args(given)


if __name__ == "__main__":
    main(arguments())
