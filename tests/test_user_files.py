"""Files of users under names that every process can import: workers unpickle their functions."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rft_fn import reward, user_files

ROOT = Path(__file__).resolve().parent.parent

POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from beside_it import same

class Pair:
    def __init__(self, given, right):
        self.given, self.right = given, right

def judge(pair):
    return same(pair.given, pair.right)

def reward(completions, answer, **columns):
    pairs = [Pair(c, a) for c, a in zip(completions, answer)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("METHOD")) as pool:
        return list(pool.map(judge, pairs))
"""


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch):
    """Folders of rewards join the path; those of a test leave it."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])


def elsewhere(data, *, folder):
    """What a fresh process prints of a pickled function of no arguments, and its warnings."""
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=data,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip(), done.stderr.decode()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_reward_may_use_worker_processes(tmp_path, method):
    """`math_verify.py` is also the name of an installed library, which a worker must not take for it."""
    (tmp_path / "beside_it.py").write_text("def same(a, b):\n    return float(a == b)\n")
    path = tmp_path / "math_verify.py"
    path.write_text(POOL.replace("METHOD", method))
    score = reward.parse([f"{path}:reward"])
    assert score(["p", "p"], ["7", "8"], {"answer": ["7", "7"]}).total.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["mine.py", "with space (1) & ünï_code.py", "two.dots.py"])
def test_a_function_of_a_file_is_found_by_a_process_that_never_saw_it(tmp_path, name):
    folders = [tmp_path / "a", tmp_path / "b"]  # two files of one name
    for folder in folders:
        folder.mkdir()
        (folder / name).write_text(f"def where():\n    return {folder.name!r}\n")
    found = [pickle.dumps(user_files.load(folder / name).where) for folder in folders]
    assert [elsewhere(data, folder=tmp_path) for data in found] == [("a", ""), ("b", "")]


def test_members_of_packages_are_found_too(tmp_path):
    for name, inits in (("with", True), ("without", False)):
        folder = tmp_path / name / "rewards"
        folder.mkdir(parents=True)
        (folder.parent / "words.py").write_text(f"WORD = {name!r}\n")
        (folder / "mine.py").write_text("from ..words import WORD\n\ndef word():\n    return WORD\n")
        for x in [folder, folder.parent] if inits else []:
            (x / "__init__.py").write_text("")
        data = pickle.dumps(user_files.load(folder / "mine.py").word)
        assert elsewhere(data, folder=tmp_path) == (name, "")


def test_a_worker_says_that_the_file_has_changed(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def number():\n    return 1\n")
    data = pickle.dumps(user_files.load(path).number)
    path.write_text("def number():\n    return 200\n")
    printed, warned = elsewhere(data, folder=tmp_path)
    assert printed == "200" and "mine.py: it has changed since the run read it" in warned
    assert user_files.load(path).number() == 200  # the run's own next look runs it again


def test_a_file_that_fails_leaves_nothing_and_a_missing_one_raises_nothing_itself(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import no_such_library\n")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_library") as error:
            user_files.find_module(str(path), "mine.py:f", kind="loss")
        assert error.value.__notes__ == ["raised by the file of the loss 'mine.py:f'"]
    path.write_text("import mine\n")  # a module of the file's own name
    assert user_files.load(path).mine.__name__ == "mine"
    with pytest.raises(ValueError, match=r"^loss 'none.py:f': no such file: ") as error:
        user_files.find_module("none.py", "none.py:f", kind="loss")
    assert not hasattr(error.value, "__notes__")
