"""Stages that ask whether it is right: scripts, head and attention against float64, the gap, tests."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
import torch
from harness import ROOT, Cases, Row, Setting, forked, run_script, seconds_of
from torch import Tensor

import rft_fn as rft
from rft_fn.engine import EngineConfig, get_engine
from rft_fn.environment import tiny_models
from rft_fn.model import packed_attention
from rft_fn.model.bounds import SequenceBounds
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_kernels import linear_logprob

CANARY = re.compile(r"differ by (\S+) nats per token with noise on the weights, (\S+) without \((\S+) s\)")


# ---------- smoke: what a user runs first


def readme(log: Path) -> Row:
    """Run the train step of README.md as printed there; its assertion is on the gap of float32."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
    row: Row = {"asserts": "held"}
    try:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    except AssertionError:
        row["asserts"] = "failed"
    sys.stdout.flush()
    gaps = [float(x) for x in re.findall(r"^step \d .* gap (\S+)", log.read_text(), re.M)]
    return row | {"steps": len(gaps), "gap": max(gaps, default=None)}


def grpo(folder: Path, *more: str, stop: bool = False) -> Row:
    """Run four steps of grpo.py on the tiny model; with `stop` SIGTERM ends it after its first step."""
    given = ["--steps", "4", "--save-every", "1", "--prompts", "4", "--group", "4", "--budget", "1024"]
    # the limit of the gap would end a run in 16 bits whose gap is a result here
    given += ["--max-gap", "1", "--eval-every", "1000", "--out", str(folder), *more]
    log = folder.parent / f"{folder.name}.log"
    if stop:
        threading.Thread(target=terminate, args=(folder / "metrics.jsonl",), daemon=True).start()
    row = run_script("grpo", given, log)
    found = CANARY.search(" ".join(log.read_text().split()))
    if found:
        row |= {"canary_noisy": float(found[1]), "canary_floor": float(found[2])}
        row |= {"canary_seconds": float(found[3])}
    rows = metrics(folder)
    row |= {"steps": len(rows), "gap": max((r["policy/logp_gap"] for r in rows), default=None)}
    return row


def terminate(path: Path) -> None:
    """End this process as a scheduler does, once a step is written."""
    while not path.exists() or not path.read_text().strip():
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compared(first: Path, second: Path) -> Row:
    """Return how many metrics of two runs differ, and by how much at most."""
    pairs = [
        (x[name], y.get(name))
        for x, y in zip(metrics(first), metrics(second), strict=False)
        for name in x
        if isinstance(x[name], int | float)
    ]
    other = [(x, y) for x, y in pairs if x != y]
    far = max((abs(x - y) / max(abs(x), 1e-30) for x, y in other if y is not None), default=0.0)
    steps = (len(metrics(first)), len(metrics(second)))
    return {"numbers": len(pairs), "differ": len(other), "relative": far, "same_steps": steps[0] == steps[1]}


def smoke(setting: Setting) -> Cases:
    """The README's loop; grpo.py with its canary; the same twice; and one that is stopped and goes on."""
    folder = Path(tempfile.mkdtemp())
    runs: dict[str, list[Row]] = {}

    def side_by_side() -> Row:
        names: dict[str, Callable[[], Row]] = {
            "again": partial(grpo, folder / "again", "--no-canary"),
            "resumed": partial(grpo, folder / "resumed", "--no-canary", stop=True),
        }
        if "deterministic" in StrategyConfig.__dataclass_fields__:
            for name in ("fixed", "fixed_again"):
                names[name] = partial(grpo, folder / name, "--no-canary", "--strategy.deterministic")
        runs.update({name: [row] for name, row in zip(names, forked(*names.values()), strict=True)})
        return {"runs": len(runs)} | {f"{name}_exit": rows[0].get("exit") for name, rows in runs.items()}

    yield {"what": "readme"}, lambda: forked(partial(readme, folder / "readme.log"))[0]
    yield {"what": "grpo.py"}, lambda: forked(partial(grpo, folder / "first"))[0]
    yield {"what": "more runs at once"}, side_by_side
    yield {"what": "the same twice"}, lambda: compared(folder / "first", folder / "again")
    yield {"what": "resumed"}, lambda: forked(partial(grpo, folder / "resumed", "--no-canary"))[0]
    yield {"what": "resumed, beside one that was not"}, lambda: compared(folder / "first", folder / "resumed")
    if (folder / "fixed").exists():
        yield {"what": "deterministic twice"}, lambda: compared(folder / "fixed", folder / "fixed_again")


# ---------- the fused head and attention against float64


def exact(
    h: Tensor, w: Tensor, y: Tensor, *, bias: Tensor | None, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return (log-probs [T], entropies [T]) by the definition, 0 where y is -100."""
    z = h @ w.T if bias is None else h @ w.T + bias
    z = z if cap is None else cap * torch.tanh(z / cap)
    logp = z.log_softmax(-1)
    live = y >= 0
    own = logp.gather(-1, y.clamp(min=0)[:, None])[:, 0]
    return own * live, -(logp.exp() * logp).sum(-1) * live


def relative(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want|, in float64."""
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


def head_errors(setting: Setting, size: tuple[int, int, int], engine: str, way: str) -> Row:
    """Measure errors of log-probs, entropies and gradients of the head in one way of calling it."""
    tokens, width, words = size
    g = torch.Generator(setting.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=setting.device)

    h, w = drawn(tokens, width).to(setting.dtype), (drawn(words, width) / width**0.5).to(setting.dtype)
    y = torch.randint(words, (tokens,), generator=g, device=setting.device)
    if way == "ignored rows":
        y[drawn(tokens) > 0.5] = -100
    bias = drawn(words).to(setting.dtype) if way == "bias" else None
    cap = 5.0 if way == "softcap" else None
    upstream = (drawn(tokens).double(), drawn(tokens).double() * (way == "entropy"))
    found = []
    for exactly in (False, True):
        leaves = [x.double() if exactly else x.clone() for x in (h, w, *([] if bias is None else [bias]))]
        trained = [x.requires_grad_() for x in leaves if not (way == "frozen" and x is leaves[1])]
        own_bias = leaves[2] if bias is not None else None
        if exactly:
            logp, entropy = exact(leaves[0], leaves[1], y, bias=own_bias, cap=cap)
        else:
            out = linear_logprob(
                leaves[0], leaves[1], y, bias=own_bias, softcap=cap, entropy=way == "entropy", engine=engine
            )
            logp, entropy = out.logp, out.entropy
        total = (logp.double() * upstream[0]).sum()
        if way == "entropy" and entropy is not None:
            total = total + (entropy.double() * upstream[1]).sum()
        found.append((logp, entropy, torch.autograd.grad(total, trained)))
    (logp, entropy, grads), (want, want_entropy, want_grads) = found
    row: Row = {"logp": relative(logp, want)}
    row["logp_max"] = float((logp.detach().double() - want.detach()).abs().max())
    if way == "entropy":
        row["entropy"] = relative(entropy, want_entropy)
    for name, x, z in zip(("dh", "dw", "dbias"), grads, want_grads, strict=False):
        row[name] = relative(x, z)
    return row


def head(setting: Setting) -> Cases:
    """Each engine in each way of calling it; the vocabulary is no multiple of a block."""
    sizes = [(24, 16, 65)] if setting.dry else [(1000, 1536, 5003), (1000, 896, 5003)]
    engines = ("gemm", "triton") if setting.cuda else ("streamed",)
    for size in sizes:
        for engine in engines:
            for way in ("plain", "entropy", "bias", "softcap", "frozen", "ignored rows"):
                about = {"size": list(size), "engine": engine, "way": way}
                yield about, partial(head_errors, setting, size, engine, way)


def attend(setting: Setting, heads: tuple[int, int, int], sizes: list[int], *, timed: bool) -> Row:
    """Measure attention of a pack: errors of its output and gradients, or its rate."""
    g = torch.Generator(setting.device).manual_seed(0)
    many, few, dim = heads
    total = sum(sizes)
    inputs = [
        torch.randn(total, n, dim, generator=g, device=setting.device).to(setting.dtype)
        for n in (many, few, few)
    ]
    upstream = torch.randn(total, many, dim, generator=g, device=setting.device).to(setting.dtype)
    bounds = SequenceBounds(sizes, setting.device)
    where = packed_attention.Device("cpu")
    if setting.cuda:
        installed = frozenset({"varlen"})
        where = packed_attention.Device("cuda", torch.cuda.get_device_capability(), installed)
    row: Row = {"kernel": packed_attention.choose(where, setting.dtype, dim)[0]}

    def attended(*x: Tensor) -> Tensor:
        return packed_attention.packed(*x, bounds)

    if timed:
        with torch.no_grad():
            forward = seconds_of(setting, lambda: attended(*inputs))
        leaves = [x.requires_grad_() for x in inputs]
        both = seconds_of(setting, lambda: torch.autograd.grad(attended(*leaves), leaves, upstream))
        work = 2 * many * dim * sum(n * n for n in sizes)
        row |= {"forward_ms": forward * 1e3, "both_ms": both * 1e3}
        return row | {"forward_tflops": work / forward / 1e12, "both_tflops": 3 * work / both / 1e12}
    leaves = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    out, want = attended(*leaves), packed_attention.by_sequence(*wide, bounds)
    row["out"] = relative(out, want)
    grads = torch.autograd.grad(out, leaves, upstream)
    exactly = torch.autograd.grad(want, wide, upstream.double())
    return row | {n: relative(x, z) for n, x, z in zip(("dq", "dk", "dv"), grads, exactly, strict=True)}


HEADS = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128)}


def heads_of(setting: Setting) -> dict[str, tuple[int, int, int]]:
    """Return the heads of attention by model: queries', keys' and their width."""
    return {"tiny": (4, 2, 8)} if setting.dry else HEADS


def attention(setting: Setting) -> Cases:
    """Attention of packs with one long and many short sequences, against float64."""
    sizes = [9, 2, 3, 3] if setting.dry else [2048, *range(3, 83, 2)]
    for name, shape in heads_of(setting).items():
        yield {"heads": name}, partial(attend, setting, shape, sizes, timed=False)


# ---------- the gap of trainer and sampler in the type of a run


def gaps(setting: Setting, std: float) -> Row:
    """Measure |sampler - trainer| of the same weights [nats per token], with logits of a deviation."""
    name = "1.5B"
    width = models.shape_of(setting, name)["hidden_size"]
    words = models.shape_of(setting, name)["vocab_size"]
    lm = models.module_of(setting, name, tied=False)
    with torch.no_grad():
        lm.get_submodule("lm_head").weight.normal_(0, std / width**0.5)  # hidden states have unit size
    rows, new = (4, 4) if setting.dry else (32, 32)
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, words, (4 + i % 13,), generator=g).tolist() for i in range(rows)]
    sampling = rft.Sampling(max_new=new)
    engine = get_engine(EngineConfig(batch=rows), lm, tiny_models.new_tokenizer())
    rollout = engine.generate(prompts, range(rows), n=1, sampling=sampling)
    size = int(rollout.mask.sum())
    row: Row = {"tokens": size, "mean_logp": float((rollout.logp * rollout.mask).sum() / size)}
    engine.close()
    for fused in (True, False):
        st = get_strategy(StrategyConfig(fused_linear_logprob=fused))
        apply, params = st.bind(lm, sampling=sampling)
        logp = st.score(apply, params, rollout, 4096).logp
        gap = (logp - rollout.logp).abs() * rollout.mask
        kind = "fused" if fused else "logits"
        row |= {f"{kind}_mean": float(gap.sum() / size), f"{kind}_max": float(gap.max())}
    return row


def gap(setting: Setting) -> Cases:
    """Flat logits and peaked ones, by the fused head and by whole logits."""
    for std in (1.0, 3.0, 6.0):
        yield {"std": std}, partial(gaps, setting, std)


# ---------- the tests that need a device


def tested(setting: Setting, seconds: float) -> Row:
    """Run the tests that need a device; where the time is over, what passed and failed until then."""
    kernels = (
        "triton_cases.py" if setting.cuda else "test_triton.py"
    )  # the cases would run in the interpreter
    names = ["tests/test_rng.py", "tests/engine/test_engine_groups.py", f"tests/kernel/{kernels}"]
    names += ["tests/vllm/test_forced_on_gpu.py"]
    options = ["-v", "-m", "", "-k", "cuda or triton_cases", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["--maxfail", "3"]  # what breaks one breaks most, and its reason is printed at the end alone
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *names],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        file.seek(0)
        text = file.read()
    words = ("PASSED", "FAILED", "SKIPPED")
    row: Row = {word.lower(): len(re.findall(rf"^\S+ {word}\b", text, re.M)) for word in words}
    row |= {"exit": process.returncode, "failures": re.findall(r"^(\S+) FAILED", text, re.M)[:20]}
    row["errors"] = sorted(set(re.findall(r"^E +(\S.*)", text, re.M)))[:5]
    if process.returncode:
        print(text[-8000:])
    return row


def tests(setting: Setting, seconds: float = 65.0) -> Cases:
    """The kernels' cases on the device, and the other tests that are skipped without one."""
    yield {"what": "pytest"}, partial(tested, setting, seconds)
