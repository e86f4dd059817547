"""Every command of docs/scaling.md, as a shell reads it, and what the script makes of it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

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
    spec = importlib.util.spec_from_file_location("grpo_script", ROOT / "train_scripts" / "grpo.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_is_for_the_model_that_it_names(grpo):
    """No rate, length or data of the tiny model's, which the script's defaults are for."""
    tiny, found = grpo.Config(), [tyro.cli(grpo.Config, args=args) for args in commands()]
    assert len(found) == 3 and len({cfg.out for cfg in found}) == 3
    for cfg in found:
        assert cfg.model != tiny.model and cfg.data != tiny.data and cfg.reward != tiny.reward
        assert cfg.lr <= 1e-5 and cfg.max_new >= 64 and "{question}" in cfg.template
        assert cfg.strategy.use_mp_opt is None and not cfg.strategy.bf16
