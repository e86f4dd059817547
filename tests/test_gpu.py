"""tests/bench/gpu, whose calls on a GPU have to work at once: every stage by a dry run on the CPU."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "tests" / "bench" / "gpu"
MODULES = ("run", "plan", "page", "harness", "models", "checks", "speed", "state")


@pytest.fixture
def bench(monkeypatch):
    """Import a module of the bench by its name; none of them stays."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    yield importlib.import_module
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


# the numbers that a row of each stage has to have, with what the row is about
WHAT = {  # stage -> what a row is about: the number
    "ceilings": {"product": "tflops", "copy": "device_gb_s", "launch": "us"},
    "smoke": {"readme": "steps", "grpo.py": "canary_noisy", "the same twice": "differ"}
    | {"resumed, beside one that was not": "differ"},
    "state": {"updates": "ns_a_parameter", "pushed": "gb_s", "offloaded": "up_gb_s", "placed": "down_gb_s"}
    | {"saved": "restore_gb_s", "canary": "floor"},
    "fsdp2": {"norm": "relative", "rate": "mfu"},
    "step": {"rft_fn": "phases"},
    "tests": {"pytest": "skipped"},
}
NUMBERS = {stage: [({"what": what}, key) for what, key in pairs.items()] for stage, pairs in WHAT.items()} | {
    "head": [({"way": "plain"}, "dw"), ({"way": "entropy"}, "entropy"), ({"way": "bias"}, "dbias")],
    "attention": [({"heads": "tiny"}, "dv")],
    "attention_rate": [({"tokens": 48}, "both_tflops")],
    "bars": [({"size": [24, 16, 64]}, "gemm_tflops"), ({"what": "auto.json"}, "rules")],
    "gradient": [
        ({"way": "checkpointing"}, "mfu"),
        ({"way": "eager, profiled"}, "device_ms"),
        ({"way": "compiled, checkpointing"}, "tokens_s"),
    ],
    "sampling": [
        ({"ragged": False, "graphs": False}, "launches_a_token"),
        ({"ragged": True, "graphs": False}, "tokens_s"),
    ],
    "decode": [({"graphs": False, "fused": x}, "ms_a_token") for x in (True, False)],
    "gap": [({"std": 3.0}, "fused_mean"), ({"std": 6.0}, "logits_max")],
    "vision": [({"model": "tiny-vl"}, "gap")],
    "lora": [
        ({"size": "1.5B"}, "tokens_s"),
        ({"way": "packs"}, "tokens_s"),
        ({"way": "one row"}, "tokens_s"),
    ],
    "gradient_7b": [({"way": "checkpointing"}, "mfu")],
    "forecast": [({"size": "1.5B"}, "total_gib")],
}


@pytest.mark.slow
def test_every_stage_runs_dry_and_has_its_numbers(bench, tmp_path):
    plan, page = bench("plan"), bench("page")
    command = [sys.executable, str(BENCH / "run.py"), "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["dry"] and set(results["stages"]) == set(plan.STAGES) == set(NUMBERS) == set(page.ABOUT)
    ended = {name: stage["ended"] for name, stage in results["stages"].items()}
    assert set(ended.values()) == {"whole"}, (ended, done.stdout[-3000:])
    errors = [(n, row) for n, stage in results["stages"].items() for row in stage["rows"] if "error" in row]
    assert errors == []
    found = page.Found(results)
    for stage, pairs in NUMBERS.items():
        for about, key in pairs:
            assert found.number(stage, key, **about) is not None, (stage, about, key)

    # in float32 on a CPU everything agrees: with float64, with itself, and sampler with trainer
    assert max(row[k] for row in found.rows("head") for k in ("logp", "dh")) < 1e-6
    assert max(row["dq"] for row in found.rows("attention") if "dq" in row) < 1e-6
    assert max(row["fused_mean"] for row in found.rows("gap")) < 1e-5
    assert found.number("smoke", "differ", what="the same twice") == 0
    assert found.number("smoke", "differ", what="resumed, beside one that was not") == 0
    assert found.number("fsdp2", "relative", what="norm") < 1e-5
    rules = json.loads((tmp_path / "auto.json").read_text())["engine"]["dry"]["rules"]
    assert rules == found.rows("bars", what="auto.json")[0]["rules"]
    assert "killed" not in page.stages(found) and "error |" not in page.section(results)


FAULTY = """
import os, signal, time
import torch

def case(call):
    yield {"n": 1}, lambda: {"x": 1.0}
    yield {"n": 2}, call
    yield {"n": 3}, lambda: {"x": 3.0}

def crash(setting):
    return case(lambda: os.kill(os.getpid(), signal.SIGSEGV))

def hang(setting):
    return case(lambda: time.sleep(600))

def wrong(setting):
    return case(lambda: 1 / 0)

def full(setting):
    def raises():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    return case(raises)

def killed(setting):  # as the kernel does where the host's memory is full
    return case(lambda: os.kill(os.getpid(), signal.SIGKILL))

def poison(setting):  # an illegal address: each later call of the device raises
    def raises():
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = torch.cuda.empty_cache = error
        error()
    def error():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return case(raises)

def fine(setting):
    return case(lambda: {"x": 2.0})
"""
# how a stage with the fault ends, and the cases that it has measured
ENDED = {
    "crash": ("died: SIGSEGV", [1]),
    "hang": ("killed after", [1]),
    "killed": ("died: SIGKILL", [1]),
    "poison": ("died: exit status 1", [1, 2]),
    "other_torch": ("died: exit status 1", []),
    "wrong": ("whole", [1, 2, 3]),
    "full": ("whole", [1, 2, 3]),
    "fine": ("whole", [1, 2, 3]),
}


@pytest.mark.slow
def test_whatever_fails_a_call_prints_what_it_measured(bench, tmp_path, monkeypatch, capfd):
    """Each fault in another stage of the first call, and modules that another torch does not import."""
    run, plan = bench("run"), bench("plan")
    (tmp_path / "broken_stages.py").write_text(FAULTY)
    (tmp_path / "other_torch.py").write_text("from torch import what_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = list(plan.CALLS[0])
    assert len(names) >= len(ENDED)
    faults = dict(zip(names, [*ENDED, *["fine"] * len(names)], strict=False))
    for name, fault in faults.items():
        module = "other_torch.stage" if fault == "other_torch" else f"broken_stages.{fault}"
        kept = 6 if fault == "hang" else 20
        monkeypatch.setitem(plan.STAGES, name, plan.STAGES[name]._replace(function=module, seconds=kept))
    monkeypatch.setattr(run, "MODULES", (*run.MODULES, "other_torch"))
    given = ["--dry", "--out", str(tmp_path / "out"), "--only", *names]
    args = run.arguments(given)
    args.scale, args.budget = 1.0, plan.seconds_of(plan.groups(names)) + 60.0
    run.main(args)
    said = capfd.readouterr()
    written = json.loads((tmp_path / "out" / "results.json").read_text())["stages"]
    assert set(written) == set(names)
    for name, fault in faults.items():
        ended, measured = ENDED[fault]
        assert written[name]["ended"].startswith(ended), (name, fault, written[name])
        assert [row["n"] for row in written[name]["rows"]] == measured, (name, fault)
        assert f"| {name} | {written[name]['ended']} |" in said.out
    assert "other_torch cannot be imported" in said.out and "what_is_not_there" in said.err
    assert "ZeroDivisionError: division by zero" in said.out and "does not fit into the memory" in said.out
    assert "an illegal memory access" in said.out and "broken_stages.py" in said.err  # where it hung
    assert "| MFU of a gradient, 1.5B, checkpointed | at least 0.5 |  | not measured yet |" in said.out


@pytest.mark.slow
def test_seconds_that_a_stage_leaves_are_the_next_ones(bench, tmp_path, monkeypatch, capfd):
    run, harness, plan = bench("run"), bench("harness"), bench("plan")
    (tmp_path / "broken_stages.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    stages = {name: plan.Stage("broken_stages.fine", 20) for name in ("first", "second", "third")}
    monkeypatch.setattr(run, "STAGES", stages)
    monkeypatch.setattr(plan, "STAGES", stages)
    setting = harness.setting_of("cpu", tmp_path, dry=True, rounds=1, peak=1.0)
    found = {"stages": {}}
    run.run(list(stages), setting, found, began=run.time.perf_counter(), budget=60, scale=1.0)
    limits = [int(x) for x in re.findall(r"at most (\d+) s", capfd.readouterr().out)]
    assert limits[0] in (19, 20) and limits[1] > 25 and limits[2] > 40

    # what does not fit into the budget is left out, and said
    found = {"stages": {}}
    run.run(["first"], setting, found, began=run.time.perf_counter(), budget=2, scale=1.0)
    assert found["stages"]["first"]["ended"] == "left out: the budget is spent"


def test_a_fork_that_cannot_start_cuda_is_replaced(bench, monkeypatch):
    """Where NVML cannot be read, this process spoils its forks by asking for the device, not new ones."""
    run = bench("run")
    monkeypatch.setitem(sys.modules, "spoiled", sys)
    assert run.starts_cuda("pass") is run.fork
    assert run.starts_cuda("import sys; assert 'spoiled' not in sys.modules") is run.fresh
    assert run.starts_cuda("assert False") is None
    assert run.starts_cuda("import time; time.sleep(60)", seconds=0.5) is None


@pytest.mark.slow
def test_a_stage_in_a_fresh_process_measures_as_in_a_fork(bench, tmp_path):
    run, harness = bench("run"), bench("harness")
    setting = harness.setting_of("cpu", tmp_path, dry=True, rounds=1, peak=1.0)
    found = {"stages": {}}
    began = run.time.perf_counter()
    run.run(["ceilings"], setting, found, began=began, budget=580, scale=10.0, start=run.fresh)
    stage = found["stages"]["ceilings"]
    assert stage["ended"] == "whole" and [row["what"] for row in stage["rows"]][:2] == ["versions", "product"]


def test_the_two_calls_have_every_stage_and_carry_what_a_bare_machine_lacks(bench):
    plan = bench("plan")
    lines = [line for line in plan.commands().splitlines() if "run.py" in line]
    given = [
        bench("run").arguments(line.split("run.py ")[1].split(" 2>&1")[0].replace('"', "").split())
        for line in lines
    ]
    assert len(lines) == 2 and max(map(len, lines)) < 2000
    assert [name for args in given for name in args.only] == list(plan.STAGES)
    for args in given:
        assert plan.seconds_of(plan.groups(args.only)) < args.budget
    # with a start of two minutes for each there is time left of fifteen minutes
    assert sum(args.budget for args in given) <= 600
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = {re.match(r"[\w-]+", x).group() for x in project["dependencies"]}
    there = {
        "torch",
        "transformers",
        "einops",
        "safetensors",
        "tokenizers",
        "rich",
        "matplotlib",
        "pillow",
        "numpy",
    }
    assert needs - there <= {x.split("==")[0] for x in plan.wheels()}


def test_goals_are_held_against_what_was_measured(bench):
    page = bench("page")
    head = [{"operation": "forward", "variant": "gemm", "of_gemm_limit": 0.6}]
    head += [{"operation": "forward", "variant": "triton", "of_gemm_limit": 0.8}]
    rows = {
        "gradient": [{"size": "1.5B", "way": "checkpointing", "mfu": 0.41, "error": None}],
        "bars": [{"size": [16384, 1536, 151936], "rows": head}],
        "sampling": [{"rows": 256, "ragged": False, "tokens_s": x} for x in (12_000.0, 51_000.0)],
        "state": [{"size": "1.5B", "what": "updates", "peak_gib": 33.0}],
        "forecast": [{"size": "1.5B", "total_gib": 31.0}],
        "step": [{"what": "rft_fn", "seconds": 2.0}, {"what": "trl", "left_out": "no trl on the machine"}],
    }
    stages = {name: {"ended": "whole", "seconds": 1.0, "rows": x} for name, x in rows.items()}
    first = {"device": "card", "date": "2026-01-01", "dry": False, "command": "a", "stages": stages}
    made = page.goals(page.Found(first))
    assert "| MFU of a gradient, 1.5B, checkpointed | at least 0.5 | 0.41 | missed |" in made
    assert "D = 1536, forward: share of its products' rate | at least 0.75 | 0.8 | held |" in made
    assert "| at least 40,000 | 51,000 | held |" in made and "| 0.9 to 1.1 | 1.06 | held |" in made
    assert "| at least 2 |  | not measured: no trl on the machine |" in made
    assert "7B, checkpointed | at least 0.5 |  | not measured yet |" in made

    # a later call replaces what both have; a section says card and date
    second = first | {"command": "b", "stages": {"step": stages["step"] | {"rows": []}}}
    both = page.merged([first, second])
    assert both["stages"]["step"]["rows"] == [] and both["command"] == ["a", "b"]
    assert both["stages"]["gradient"] == stages["gradient"]
    assert "Measured on card, 2026-01-01" in page.section(both)
    for other, line in (({"dry": True}, "got a dry run"), ({"device": "another"}, "got another, card")):
        with pytest.raises(ValueError, match=line):
            page.merged([first, first | other])
