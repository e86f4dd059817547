"""Stages that ask how fast it is: ceilings, the head, gradients, sampling, a whole step."""

import importlib.util
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import checks
import models
import torch
from harness import ROOT, Cases, Row, Setting, forked, now, peak_gib, reset_peak, seconds_of
from torch import nn

import rft_fn as rft
from rft_fn.engine import EngineConfig, get_engine
from rft_fn.engine.hf.fixed_steps import FixedSteps
from rft_fn.environment import tiny_models
from rft_fn.strategy import StrategyConfig

PACKAGES = ("torch", "triton", "transformers", "numpy", "optree", "peft", "trl", "liger-kernel", "flash-attn")
HEAD_WIDTHS = (896, 1536, 3584)
LAUNCHES = (
    "cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch",
)  # fmt: skip
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


# ---------- the device, and what it reaches


def versions() -> Row:
    """Return the versions of what measures, and what the driver says about the device."""
    found: Row = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "gib": properties.total_memory / 2**30}
        found["multiprocessors"] = properties.multi_processor_count
        asked = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        found["driver"] = subprocess.run(asked, shell=True, capture_output=True, text=True).stdout.strip()
    return found


def product(setting: Setting, size: int) -> Row:
    """Measure the rate of a square product of random numbers."""
    a, b = (torch.randn(size, size, device=setting.device).to(setting.dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = seconds_of(setting, lambda: [torch.mm(a, b, out=out) for _ in range(10)]) / 10
    return {"tflops": 2 * size**3 / seconds / 1e12, "of_peak": 2 * size**3 / seconds / setting.peak}


def copies(setting: Setting, mib: int) -> Row:
    """Measure copies on the device (bytes read and written), and between it and the host."""
    size = mib * 2**20
    x = torch.randint(256, (size,), dtype=torch.uint8, device=setting.device)
    y = torch.empty_like(x)
    row = {"device_gb_s": 2 * size / seconds_of(setting, lambda: y.copy_(x)) / 1e9}
    for name, pinned in (("pageable", False), ("pinned", setting.cuda)):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        host.fill_(1)
        row[f"{name}_up_gb_s"] = size / seconds_of(setting, lambda h=host: y.copy_(h)) / 1e9
        row[f"{name}_down_gb_s"] = size / seconds_of(setting, lambda h=host: h.copy_(x)) / 1e9
    return row


def launches(setting: Setting) -> Row:
    """Measure what a kernel costs that does nothing, one after another."""
    x = torch.zeros(8, device=setting.device)
    return {"us": seconds_of(setting, lambda: [x.add_(1) for _ in range(1000)]) * 1e3}


def ceilings(setting: Setting) -> Cases:
    """Versions, and the ceilings that everything else is held against."""
    yield {"what": "versions"}, versions
    for size in (32,) if setting.dry else (4096, 8192):
        yield {"what": "product", "size": size}, partial(product, setting, size)
    yield {"what": "copy"}, partial(copies, setting, 1 if setting.dry else 512)
    yield {"what": "launch"}, partial(launches, setting)


def attention_rate(setting: Setting) -> Cases:
    """Attention of a full pack, forward and with its gradients."""
    sizes = models.lengths_of(setting, 0)
    for name, shape in checks.heads_of(setting).items():
        about = {"heads": name, "tokens": sum(sizes), "sequences": len(sizes)}
        yield about, partial(checks.attend, setting, shape, sizes, timed=True)


# ---------- the fused head beside its products


def kernel_bench() -> tuple[Any, Any]:
    """Import gpu and tune of kernels/bench, scripts that import what lies next to them."""
    folder = str(ROOT / "kernels" / "bench")
    if folder not in sys.path:
        sys.path.append(folder)
    import gpu
    import tune

    return gpu, tune


def host_clock(gpu: Any, setting: Setting) -> Any:
    """Return a clock for a dry run."""

    def seconds(call: Callable[[], object]) -> float:
        began = now(setting)
        call()
        return now(setting) - began

    return gpu.Clock(seconds, lambda call: 0.0)


def bar(setting: Setting, size: tuple[int, int, int], found: dict[int, dict[str, float]]) -> Row:
    """Measure each engine beside the rate of its products in the same run; fill `found` for auto.json."""
    gpu, _ = kernel_bench()
    engines = ("gemm", "triton") if setting.cuda else ("streamed",)
    measured = gpu.measure(
        gpu.Shape(*size),
        host_clock(gpu, setting) if setting.dry else gpu.CUDA,
        rounds=setting.rounds,
        device=setting.device.type,
        engines={name: name for name in engines},
        only=list(engines),
    )
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for row in measured["rows"]:
        if row["operation"] in ("forward", "forward+backward") and row["variant"] in seconds:
            seconds[row["variant"]].append(row["seconds"] or float("inf"))
    if size[0] == (24 if setting.dry else 16384):
        found[size[1]] = {name: sum(x) for name, x in seconds.items()}
    return {"gemm_tflops": measured["gemm_tflops"], "rows": measured["rows"]}


def write_auto(setting: Setting, found: dict[int, dict[str, float]]) -> Row:
    """Write auto.json with the faster engine at each width, to be copied to kernels/rft_kernels."""
    gpu, tune = kernel_bench()
    source = {"capability": "dry"} if setting.dry else gpu.provenance()
    shutil.copy(tune.FILE, setting.out / "auto.json")
    tune.rewrite(setting.out / "auto.json", found, source | {"T": setting.tokens, "rounds": setting.rounds})
    return {"rules": tune.rules(found), "capability": source["capability"]}


def bars(setting: Setting) -> Cases:
    """The head's engines at three widths and with few tokens; then auto.json."""
    found: dict[int, dict[str, float]] = {}
    sizes = [(16384, width, 151936) for width in HEAD_WIDTHS] + [(n, 1536, 151936) for n in (512, 2048)]
    for size in [(24, 16, 64), (8, 16, 64)] if setting.dry else sizes:
        yield {"size": list(size)}, partial(bar, setting, size, found)
    yield {"what": "auto.json"}, partial(write_auto, setting, found)


# ---------- gradients


def profiled(setting: Setting, call: Callable[[], object], top: int = 12) -> Row:
    """Return the kernels that take longest, launches and waits of a call, with its time on either side."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setting.cuda else [])
    with profile(activities=kinds) as profiler:
        began = now(setting)
        call()
        seconds = now(setting) - began
    events = profiler.key_averages()

    def own(event: Any) -> float:
        return event.self_device_time_total if setting.cuda else event.self_cpu_time_total

    kernels = sorted(events, key=own, reverse=True)
    if setting.cuda:  # kernels, without the operators that launch them
        kernels = [x for x in kernels if str(x.device_type).endswith("CUDA")]
    return {
        "seconds": seconds,
        "device_ms": sum(own(x) for x in kernels) / 1e3,
        "launches": sum(x.count for x in events if x.key in LAUNCHES),
        "graph_launches": sum(x.count for x in events if x.key == "cudaGraphLaunch"),
        "waits": sum(x.count for x in events if x.key in WAITS),
        "kernels": [[x.key[:80], own(x) / 1e3, x.count] for x in kernels[:top]],
    }


def profile_of(setting: Setting, name: str, tokens: int) -> Row:
    """Profile the gradient of a pack without checkpointing."""
    lm = models.module_of(setting, name)
    st, apply, state = models.start(lm, StrategyConfig())
    words = models.shape_of(setting, name)["vocab_size"]
    setting = setting if setting.dry else models.dataclasses.replace(setting, tokens=tokens)
    b = models.pack_of(setting, words)

    def call() -> object:
        return st.grad(state, apply, models.loss_fn, [b])

    call()
    return profiled(setting, call)


def gradient(setting: Setting) -> Cases:
    """1.5B with layers checkpointed, without, profiled, and with compiled blocks."""
    compiled = StrategyConfig(compile_blocks=True)
    few = 8192
    about = {"size": "1.5B"}
    yield about | {"way": "checkpointing"}, partial(models.gradient_of, setting, "1.5B", StrategyConfig())
    eager = partial(models.gradient_of, setting, "1.5B", StrategyConfig(), checkpointing=False, tokens=few)
    yield about | {"way": "eager"}, eager
    yield about | {"way": "eager, profiled"}, partial(profile_of, setting, "1.5B", few)
    yield about | {"way": "compiled, checkpointing"}, partial(models.gradient_of, setting, "1.5B", compiled)


def gradient_7b(setting: Setting) -> Cases:
    """7B with layers checkpointed; compiled too where time is left."""
    for way, compiled in (("checkpointing", False), ("compiled, checkpointing", True)):
        config = StrategyConfig(compile_blocks=compiled)
        yield {"size": "7B", "way": way}, partial(models.gradient_of, setting, "7B", config)


def adapted(setting: Setting, name: str) -> nn.Module:
    """Return a model with LoRA on every linear layer: its head is frozen."""
    lm = models.module_of(setting, name, checkpointing=True)
    return rft.model.apply_lora_configuration(lm, rank=16, alpha=32.0)


def lora(setting: Setting) -> Cases:
    """1.5B and 4B with adapters: the head is frozen, and no weight of a layer has a gradient.

    4B has packs of 16,384 tokens, and one row of 65,536.
    """

    def measured(name: str, setting: Setting, count: int) -> Row:
        lm = adapted(setting, name)
        row = models.gradient_of(setting, name, StrategyConfig(), module=lm, count=count)
        trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
        # a third of the products are of weights' gradients, which nobody makes here: MFU would be too high
        return {k: x for k, x in row.items() if k not in ("mfu", "tflops")} | {"trained": trained}

    yield {"size": "1.5B", "rank": 16}, partial(measured, "1.5B", setting, 2)
    yield {"size": "4B", "rank": 16, "way": "packs"}, partial(measured, "4B", setting, 2)
    n = setting.tokens if setting.dry else 65536
    row = models.dataclasses.replace(setting, tokens=n, lengths=(n, n), rounds=1)
    yield {"size": "4B", "rank": 16, "way": "one row"}, partial(measured, "4B", row, 1)


# ---------- sampling


def no_graph(*args: Any, **options: Any) -> Any:
    """Stand in for torch.cuda.CUDAGraph: an engine that cannot capture runs its steps one by one."""
    raise RuntimeError("CUDA graphs are left out here")


def sample(
    setting: Setting,
    lm: nn.Module,
    batch: int,
    *,
    ragged: bool,
    graphs: bool,
    deep: bool,
    fused: bool = True,
) -> Row:
    """Measure tokens/s of an engine: all of a rollout, and without its prompts."""
    engine = get_engine(EngineConfig(batch=batch, fused=fused), lm, tiny_models.new_tokenizer())
    samples, prompt, new = (2, 4, 6) if setting.dry else (8, 128, 128)
    words = models.shape_of(setting, "1.5B")["vocab_size"]
    g = torch.Generator().manual_seed(0)
    low, high = (prompt // 2, 3 * prompt // 2) if ragged else (prompt, prompt)

    def drawn() -> list[list[int]]:
        sizes = torch.randint(low, high + 1, (batch // samples,), generator=g).tolist()
        return [torch.randint(2, words, (n,), generator=g).tolist() for n in sizes]

    prompts = drawn()

    def generate(most: int) -> rft.Rollout:
        return engine.generate(prompts, range(len(prompts)), n=samples, sampling=rft.Sampling(max_new=most))

    captured: list[float] = []
    capture = FixedSteps._capture

    def timed(steps: FixedSteps) -> None:
        began = now(setting)
        capture(steps)
        captured.append(now(setting) - began)

    generate(new if graphs else 4)  # kernels are compiled
    reset_peak(setting)
    found = {}
    for most in (new // 2, new):
        captured.clear()
        with mock.patch.object(FixedSteps, "_capture", timed):
            began = now(setting)
            rollout = generate(most)
            found[most] = (now(setting) - began, int(rollout.mask.sum()))
    (half, some), (seconds, tokens) = found[new // 2], found[new]
    row: Row = {"tokens": tokens, "seconds": seconds, "tokens_s": tokens / seconds}
    row |= {"decode_tokens_s": (tokens - some) / max(seconds - half, 1e-9), "peak_gib": peak_gib(setting)}
    row |= {"ms_a_token": (seconds - half) / (new - new // 2) * 1e3}
    row |= {"captures": len(captured), "capture_seconds": sum(captured)}
    if deep:
        few, many = (profiled(setting, partial(generate, n)) for n in (2, 10))
        for name in ("launches", "waits", "device_ms"):
            row[f"{name}_a_token"] = (many[name] - few[name]) / 8
        row |= {"graph_launches": many["graph_launches"], "kernels": many["kernels"]}
    if ragged:  # as in the next step of a run: what a new length costs once
        prompts = drawn()
        began = now(setting)
        generate(new)
        row["new_lengths_seconds"] = now(setting) - began
    engine.close()
    return row


def sampling(setting: Setting) -> Cases:
    """1.5B at two batches, prompts of one length and of many, with and without CUDA graphs."""
    lm: list[nn.Module] = []

    def measured(batch: int, ragged: bool, graphs: bool) -> Row:
        if not lm:
            lm.append(models.module_of(setting, "1.5B"))
        deep = batch in (256, 4) and not ragged
        graph = torch.cuda.CUDAGraph if graphs else no_graph
        with mock.patch.object(torch.cuda, "CUDAGraph", graph):
            return sample(setting, lm[0], batch, ragged=ragged, graphs=graphs, deep=deep)

    for graphs in (True, False):
        for batch in (4,) if setting.dry else (256, 64):
            for ragged in (False, True):
                about = {"size": "1.5B", "rows": batch, "graphs": graphs, "ragged": ragged}
                yield about, partial(measured, batch, ragged, graphs)


def decode(setting: Setting) -> Cases:
    """1.5B with CUDA graphs: new tokens by fused kernels and by the model's modules; then without graphs."""
    lm = models.module_of(setting, "1.5B")
    graph = torch.cuda.CUDAGraph

    def measured(batch: int, graphs: bool, fused: bool) -> Row:
        with mock.patch.object(torch.cuda, "CUDAGraph", graph if graphs else no_graph):
            return sample(setting, lm, batch, ragged=False, graphs=graphs, deep=not graphs, fused=fused)

    for batch, graphs in ((4, True), (4, False)) if setting.dry else ((256, True), (64, True), (64, False)):
        for fused in (True, False):
            about = {"size": "1.5B", "rows": batch, "graphs": graphs, "fused": fused}
            yield about, partial(measured, batch, graphs, fused)


# ---------- a whole step, and TRL's


def folder_of(setting: Setting, name: str, folder: Path) -> Row:
    """Write a Llama of a shape with random weights, and a tokenizer of characters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # not a Qwen2, whose tokenizer transformers makes from the model's type, whatever a folder has
    shape = models.shape_of(setting, name)
    config = LlamaConfig(**shape, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    with torch.device(setting.device):
        lm: Any = LlamaForCausalLM(config).to(setting.dtype)
    lm.save_pretrained(folder)
    tiny_models.new_tokenizer().save_pretrained(folder)
    return {"bytes": sum(x.stat().st_size for x in folder.iterdir())}


def side_of(setting: Setting, side: str, folder: Path) -> Row:
    """Measure a whole step by one side of tests/bench/step, in this process."""
    sys.path.insert(0, str(ROOT / "tests" / "bench" / "step"))
    import worker
    from case import Case

    prompts, group, tokens = (2, 2, 3) if setting.dry else (8, 16, 128)
    case = Case(
        model=str(folder),
        device=setting.device.type,
        lengths="equal",
        prompts=prompts,
        group=group,
        tokens=tokens,
        micro=2 if setting.dry else 16,
        budget=1024 if setting.dry else 8192,  # beside optimizer and engine, and nothing is checkpointed
        liger=False,
        steps=1,
        short=setting.dry,
    )
    found = worker.measure(side, case)
    steps = found["steps"]
    wall = [sum(x["wall"].values()) for x in steps]
    row: Row = {"seconds": statistics.median(wall), "phases": steps[-1]["wall"], "peak_bytes": found["peak"]}
    tokens = steps[-1]["prompt"] + steps[-1]["response"]
    return row | {"responses": prompts * group, "tokens": tokens, "tokens_s": tokens / row["seconds"]}


def step(setting: Setting) -> Cases:
    """A whole step of 1.5B by rft_fn and by TRL: rollout, reward, gradients, update, sync."""
    folder = Path(tempfile.mkdtemp())
    yield {"what": "weights"}, lambda: forked(partial(folder_of, setting, "1.5B", folder))[0]
    for side in ("rft_fn", "trl"):
        found: Callable[[], Row] = lambda s=side: forked(partial(side_of, setting, s, folder))[0]  # noqa: E731
        if side == "trl" and importlib.util.find_spec("trl") is None:
            found = lambda: {"left_out": "no trl on the machine"}  # noqa: E731
        yield {"what": side, "size": "1.5B"}, found
