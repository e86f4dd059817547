"""The most used families, in every column of docs/models.md; `families_table` measures the rest."""

import json
import re
import warnings

import families_table
import family_checks
import pytest
import ranks
from families import FAMILIES
from family_checks import BACKENDS, BOUNDS, CHECKS, COLUMNS

pytestmark = pytest.mark.slow

MOST = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma3Text", "Phi3", "GPT2", "Qwen3Moe", "GptOss", "Qwen3Next")
NOT = {("Qwen3Next", "sequence"): "expected 1 for Qwen3NextForCausalLM: it does not hand keyword arguments"}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("column", CHECKS)
@pytest.mark.parametrize("kind", MOST)
def test_a_family_on_one_process(kind, column):
    if (kind, column) in NOT:
        with pytest.raises(Exception, match=NOT[kind, column]):
            CHECKS[column](kind)
        return
    got = CHECKS[column](kind)
    assert got.value <= BOUNDS[column]
    if column == "packed":
        assert got.note == ""  # in one pack
    if column == "sampler":
        assert got.note == ""  # padded, with a cache


def all_on_two(rank, folders):
    """Every family on every backend, in words where one refuses."""
    out = {}
    for kind, folder in folders.items():
        for column in BACKENDS:
            out[kind, column] = families_table.told(family_checks.two, rank, column, folder)
    return out


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What two processes measured."""
    folders = {kind: str(tmp_path_factory.mktemp(kind)) for kind in MOST}
    for kind, folder in folders.items():
        family_checks.write(kind, folder)
    return ranks.run(2, "test_families:all_on_two", folders)


@pytest.mark.parametrize("column", BACKENDS)
@pytest.mark.parametrize("kind", MOST)
def test_a_family_on_two_processes(on_two, kind, column):
    for out in on_two:
        got = out[kind, column]
        if (kind, column) in NOT:
            assert re.search(NOT[kind, column], got)
        else:
            assert not isinstance(got, str), got
            assert got <= BOUNDS[column]


def test_the_page_is_made_of_the_results():
    table = families_table.TEXT
    results = json.loads(table.results.read_text())
    assert table.page.read_text() == table.write(results)
    assert set(results["families"]) == set(FAMILIES)
    assert len(FAMILIES) >= 45
    for kind in MOST:
        cells = results["families"][kind]
        assert {column: cells[column]["ok"] for column in COLUMNS} == {
            column: (kind, column) not in NOT for column in COLUMNS
        }
