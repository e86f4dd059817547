"""CONTRIBUTING.md: every example runs as it stands, and every file and name of its table is there."""

import importlib
import os
import re
import sys
from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = [section.partition("\n") for section in TEXT.split("\n## ")[1:]]
EXAMPLES = [(t, re.search(r"```python\n(.*?)```", x, re.S)[1]) for t, _, x in SECTIONS if "```python" in x]
TABLE = [line for line in TEXT.splitlines() if line.startswith("| [")]


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_runs_as_it_stands(title, code, tmp_path):
    """In a process of its own: some of them add to tables."""
    env = forks.early(os.environ) | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    env |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = forks.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("line", TABLE, ids=lambda line: re.search(r"\[(.+?)\]", line)[1])
def test_what_a_row_names_is_there(line):
    for name in re.findall(r"`([^`]+)`", line):
        if "/" in name:
            assert (ROOT / name).exists(), name
        elif "." in name and not name.endswith(".py"):
            room, _, attribute = name.removeprefix("rft_fn.").rpartition(".")
            if not room:
                room = attribute
            package = "rft_kernels" if room in ("interface", "engines") else "rft_fn"
            parent = {"file_formats": "data.file_formats", "common": "strategy.common"}.get(room, room)
            module = importlib.import_module(f"{package}.{parent}")
            assert room == attribute or hasattr(module, attribute), name
