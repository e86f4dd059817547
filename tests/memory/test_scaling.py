"""docs/scaling.md: its commands, as a shell and the script read them, and its tables."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from pages import as_module

from rft_fn import parsing
from rft_fn.strategy import StrategyConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHELL = "python() { printf '%s\\0' \"$@\"; printf '\\n'; }\ntorchrun() { python \"$@\"; }\n"


def commands():
    """The arguments of the script, command by command."""
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL)
    done = subprocess.run(["bash", "-euc", SHELL + block], capture_output=True, text=True, check=True)
    lines = [line.split("\0")[:-1] for line in done.stdout.splitlines()]
    return [args[args.index("train_scripts/grpo.py") + 1 :] for args in lines]


@pytest.fixture(scope="module")
def grpo():
    return as_module(ROOT / "train_scripts" / "grpo.py")


def test_every_command_is_for_the_model_that_it_names(grpo):
    """No rate, length or data of the tiny model's, which the script's defaults are for."""
    read = [parsing.parse(grpo.Config, parsing.qualify(args, grpo.Config)) for args in commands()]
    tiny, found = grpo.Config(), read
    assert len(found) == 3 and len({cfg.out for cfg in found}) == 3
    for cfg in found:
        assert cfg.model != tiny.model and cfg.data != tiny.data and cfg.reward != tiny.reward
        assert cfg.lr <= 1e-5 and cfg.max_new >= 64 and "{question}" in cfg.template
        assert cfg.strategy.use_mp_opt is None and not cfg.strategy.bf16


@pytest.fixture(scope="module")
def bench():
    """tests/bench/memory.py, and the data that it made."""
    made = as_module(ROOT / "tests" / "bench" / "memory.py")
    return made, json.loads(made.RESULTS.read_text())


def test_the_data_agrees_with_the_estimate(bench):
    made, found = bench
    assert set(found["knobs"]) == set(made.KNOBS) and len(found["scale"]) == 3 * len(made.SCALED)
    for x, now in (
        (found["scale"]["0.5B on 64"], made.row("0.5B", 64)),
        (found["knobs"]["`sp_size 4`"], made.row("7B", 8, sp_size=4)),
    ):
        assert x.pop("phase") == now.pop("phase")
        assert now == pytest.approx(x, rel=0.02)


def test_the_measured_activations_fall_with_sequence_parallelism(bench):
    _, found = bench
    for sp, x in found["split"].items():
        assert x["forward"] == pytest.approx(x["estimated"], rel=0.2)
        assert x["forward"] < 1.2 * found["split"]["1"]["forward"] / int(sp)


def test_every_knob_of_memory_is_in_the_docs():
    text = (ROOT / "docs" / "scaling.md").read_text()
    knobs = "fsdp shard_size sp_size zero_stage fsdp_cpu_offload adam_offload bf16 use_mp_opt chunk_size"
    knobs += " offload_models"
    for name in (*knobs.split(), "fused_linear_logprob", "packing_samples", "enable_engine_sleep"):
        assert hasattr(StrategyConfig(), name) and f"`{name}`" in text, name
