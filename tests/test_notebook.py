"""The notebook of the first page runs from top to bottom, as Jupyter would run it, and its model learns."""

import json
import os
import re
import sys

import forks
import pages
import pytest

from rft_fn.model import model_names

pytestmark = pytest.mark.slow

NOTEBOOK = json.loads(pages.read("docs/start.ipynb"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
AFTER = """
assert sum(rewards[-10:]) / 10 > rewards[0] + 0.3, rewards
(drawn,) = plt.get_fignums()
assert len(plt.figure(drawn).axes[0].lines) == 2
"""


def test_the_notebook_runs_and_its_model_learns(tmp_path):
    env = forks.early(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MPLBACKEND": "agg",
    }
    env |= {"OMP_NUM_THREADS": "1", "RFT_FN_CACHE": str(model_names.cache_dir())}
    (tmp_path / "cells.py").write_text("\n\n".join([*CODE, AFTER]))
    done = forks.run([sys.executable, "cells.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "one row per micro-batch instead of one pack" in done.stdout  # the loss that is wrong
    assert re.search(r"^reward 0\.\d\d -> 0\.\d\d$", done.stdout, re.M)


def test_the_notebook_is_committed_without_outputs():
    """And is one by the rules of its format; its links lead somewhere."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    cells = NOTEBOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        code = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        assert set(cell) == {"cell_type", "id", "metadata", "source", *code}
        assert {name: cell[name] for name in code} == code
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)]*)\)", text):
        assert (pages.ROOT / "docs" / link).exists(), link
