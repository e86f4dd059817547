"""The command `rft`: scripts copied, found and run, and the mistakes that one can make there."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from ranks import free_port

from rft_fn.tools import commands, scripts

ROOT = Path(__file__).resolve().parents[2]
TINY_RUN = ["--steps", "2", "--prompts", "4", "--group", "4", "--eval-prompts", "4", "--warmup", "1"]


def rft(*args, cwd, before=("-m", "rft_fn"), **env):
    """The command in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | env
    command = [sys.executable, *before, *map(str, args)]
    return forks.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=600)


def rewards(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/mean"] for line in lines]


@pytest.fixture(scope="module")
def in_place(tmp_path_factory):
    """The rewards of a run of the script where it lies, by one process."""
    folder = tmp_path_factory.mktemp("in_place")
    done = rft("run", "grpo", *TINY_RUN, "--out", "one", cwd=folder)
    assert done.returncode == 0, done.stderr
    return rewards(folder / "one")


def test_scripts_of_a_checkout_are_those_of_train_scripts():
    assert scripts.folder() == ROOT / "train_scripts"
    assert set(scripts.named()) == {p.stem for p in (ROOT / "train_scripts").glob("*.py")}


@pytest.mark.parametrize("name", [p.stem for p in (ROOT / "train_scripts").glob("*.py")])
def test_a_script_imports_nothing_that_lies_beside_it(name):
    """So that a copy of it runs from any folder."""
    beside = {p.stem for p in (ROOT / "train_scripts").glob("*.py")}
    for node in ast.walk(ast.parse((ROOT / "train_scripts" / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            assert not beside & {a.name.split(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and (node.module or "").split(".")[0] not in beside


def test_the_list_has_each_script_with_its_line_in_80_columns(capsys):
    commands.main(["new"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for name, path in scripts.named().items():
        line = ast.get_docstring(ast.parse(path.read_text())).partition("\n")[0]
        assert re.search(rf"^  {name} +{line.split()[0]}", out, re.M)
        assert line.replace(" ", "") in re.sub(r"\s", "", out)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["where", "grpo"]])
def test_what_a_shell_asks_for_needs_no_torch(words):
    code = f"import sys; from rft_fn.tools.commands import main; main({words}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *said, torch_too = done.stdout.splitlines()
    assert said and torch_too == "False"


def test_a_copy_is_whole_but_for_its_own_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands.main(["new", "dpo", "my_dpo.py"])
    assert capsys.readouterr().out.splitlines()[-1] == "run it:  rft run my_dpo.py"
    text = Path("my_dpo.py").read_text()
    assert "python my_dpo.py --model runs/sft/model" in text and "train_scripts/dpo.py" not in text
    source = (ROOT / "train_scripts" / "dpo.py").read_text()
    assert text == source.replace("train_scripts/dpo.py", "my_dpo.py")


def test_a_copy_has_a_place_without_being_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands.main(["new", "grpo"])
    commands.main(["new", "grpo", "deep/er/copied_here.py"])
    Path("there").mkdir()
    commands.main(["new", "ppo", "there"])
    assert (
        Path("grpo.py").exists() and Path("deep/er/copied_here.py").exists() and Path("there/ppo.py").exists()
    )
    assert "rft run deep/er/copied_here.py" in capsys.readouterr().out


def test_mistakes_are_one_line_and_lose_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("my work")
    cases = [
        (["new", "grop"], "script: expected one of check_engine, compare", "'grop'; did you mean grpo?"),
        (["new", "grpo", "mine.py"], "to: expected a new file, got mine.py, which is there already"),
        (["new", "grpo", "mine.txt"], "to: expected a folder that is there, or a file that ends in .py"),
        (["new", "grpo", "torch.py"], "to: expected a name that no library has", "torch.py, which"),
        (["new", "grpo", "json.py"], "which would hide Python's own json"),
        (["new", "grpo", "a.py", "b.py"], "b.py"),
        (["run"], "script: expected first one of check_engine, compare, distill, dpo", "got none"),
        (["run", "no.py"], "script: expected a file, got no.py, which is not there"),
        (["run", "--steps", "3"], "script: expected first one of check_engine, compare", "got --steps"),
        (["where", "gpro"], "did you mean grpo?"),
        (["trian"], "command: expected one of new, run", "got 'trian'; did you mean rft run SCRIPT?"),
        (["grop"], "command: expected one of new, run", "got 'grop'; did you mean rft run grpo?"),
        (["exprot"], "command: expected one of new, run", "got 'exprot'; did you mean rft export?"),
        (["completion", "csh"], "bash"),
    ]  # fmt: skip
    for args, *parts in cases:
        with pytest.raises(SystemExit, match="2"):
            commands.main(args)
        error = capsys.readouterr().err
        assert all(part in error for part in parts) and error.count("\n") == 1, error
    assert Path("mine.py").read_text() == "my work" and list(Path().iterdir()) == [Path("mine.py")]


def test_a_copy_runs_from_any_folder_as_the_script_does(in_place, tmp_path):
    """From a folder far from it, by `rft run` and by Python alone, with the same numbers as in place."""
    away = tmp_path / "away"
    away.mkdir()
    made = rft("new", "grpo", tmp_path / "mine.py", cwd=away)
    assert made.returncode == 0, made.stderr
    copied = rft("run", "../mine.py", *TINY_RUN, "--out", "b", cwd=away)
    assert copied.returncode == 0, copied.stderr
    plain = rft(*TINY_RUN, "--out", "c", cwd=away, before=[str(tmp_path / "mine.py")])
    assert plain.returncode == 0, plain.stderr
    assert in_place == rewards(away / "b") == rewards(away / "c")
    assert len(in_place) == 2


def test_a_script_keeps_its_help_its_errors_and_its_exit_code(tmp_path):
    shown = rft("run", "grpo", "--help", cwd=tmp_path)
    assert shown.returncode == 0 and "rft run grpo --model" in shown.stdout
    assert "--kl-in-reward" not in shown.stdout and len(shown.stdout.splitlines()) < 45
    shown = rft("run", "grpo", "--help", "all", cwd=tmp_path)
    assert shown.returncode == 0 and "grpo.py" in shown.stdout and "--kl-in-reward" in shown.stdout
    wrong = rft("run", "grpo", "--step", "3", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "did you mean --steps" in wrong.stderr
    exported = rft("export", "nothing", cwd=tmp_path)
    assert exported.returncode == 2 and exported.stderr.startswith("error: ")
    evaluated = rft("evaluate", "--help", cwd=tmp_path)
    assert evaluated.returncode == 0 and "pass@k" in evaluated.stdout


def test_a_script_of_ones_own_is_python(tmp_path):
    """It is __main__, imports what lies beside it, and its errors keep their traceback."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper.py").write_text("x = 7\n")
    (tmp_path / "own" / "mine.py").write_text(
        "import sys, helper\nprint(__name__, helper.x, sys.argv, __file__)\n"
        "import pickle\nclass C: pass\npickle.dumps(C())\nraise ValueError('of mine')\n"
    )
    done = rft("run", "own/mine.py", "--a", "1", cwd=tmp_path)
    assert done.stdout.strip() == "__main__ 7 ['own/mine.py', '--a', '1'] own/mine.py"
    assert done.returncode == 1 and "Traceback" in done.stderr and 'own/mine.py", line 6' in done.stderr


def test_where_is_a_path_for_other_programs(tmp_path):
    assert rft("where", "sft", cwd=tmp_path).stdout.strip() == str(ROOT / "train_scripts" / "sft.py")


@pytest.mark.parametrize("start", [["-m", "rft_fn", "run", "grpo"], ["--no-python", "rft", "run", "grpo"]])
def test_two_processes_run_a_script_as_one_does(start, in_place, tmp_path):
    """Both ways that the help of `rft run` names; `rft` is here what pip makes of the entry point."""
    tool = tmp_path / "bin" / "rft"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\nfrom rft_fn.tools.commands import main\nmain()\n")
    tool.chmod(0o755)
    path = os.pathsep.join([str(tool.parent), os.environ["PATH"]])
    assert all(part in commands.Run.__doc__ for part in (" -m rft_fn run grpo", "--no-python rft run grpo"))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    two = rft(*TINY_RUN, "--out", "two", cwd=tmp_path, before=[*torchrun, *start], PATH=path)
    assert two.returncode == 0, two.stderr[-2000:]
    assert rewards(tmp_path / "two") == pytest.approx(in_place)
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["steps"] == 2
