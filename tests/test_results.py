"""docs/results: tables are what their scripts make of the files, and intervals are their definition."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "results"


def curriculum():
    path = FOLDER / "curriculum" / "table.py"
    spec = importlib.util.spec_from_file_location("curriculum_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("right", "count"), [(0, 256), (1, 200), (128, 256), (200, 200), (3, 7)])
def test_an_interval_ends_where_the_share_is_z_standard_errors_away(right, count):
    module = curriculum()
    for p in module.wilson(right, count):
        far = (right / count - p) ** 2 - module.Z**2 * p * (1 - p) / count
        assert abs(far) < 1e-12
    low, high = module.wilson(right, count)
    assert low - 1e-12 <= right / count <= high + 1e-12 and high - low > 0.01


def test_the_table_of_the_curriculum_is_what_its_files_say():
    assert curriculum().table() in (FOLDER / "README.md").read_text()
