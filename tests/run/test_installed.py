"""The wheel as a user has it: installed into a folder, and used from an empty one."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY_RUN = ["--steps", "1", "--prompts", "4", "--group", "4", "--eval-prompts", "4", "--warmup", "0"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that pip has installed the wheel into; what it requires is where the tests have it from."""
    wheels = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
    ]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return folder


def rft(installed, *args, cwd):
    """The command that pip has made, which finds the library in that folder alone."""
    env = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(installed / "bin" / "rft"), *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_scripts_are_in_the_wheel_as_they_are(installed):
    ours = {p.name: p.read_text() for p in (ROOT / "train_scripts").glob("*.py")}
    assert {p.name: p.read_text() for p in (installed / "rft_scripts").glob("*.py")} == ours
    assert not (installed / "train_scripts").exists()


def test_an_editable_installation_takes_no_folder_for_the_package(tmp_path):
    """It has the scripts of the checkout, and nothing of the wheel lies where it would hide the library."""
    pytest.importorskip("editables")  # which pip brings for an editable installation
    code = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    build = [sys.executable, "-c", code, str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()[-1]
    names = zipfile.ZipFile(tmp_path / built).namelist()
    assert not [name for name in names if name.startswith(("rft_fn/", "rft_kernels/"))]


def test_from_an_empty_folder_to_the_report_of_a_run_of_a_copy(installed, tmp_path):
    where = rft(installed, "where", "grpo", cwd=tmp_path).strip()
    assert where == str(installed / "rft_scripts" / "grpo.py")
    assert "rft run my_grpo.py" in rft(installed, "new", "grpo", "my_grpo.py", cwd=tmp_path)
    (reward,) = re.findall(r"```python\n(def even.*?)```", (ROOT / "docs" / "commands.md").read_text(), re.S)
    (tmp_path / "even.py").write_text(reward)
    own = ["--reward", "even.py:even", "--out", "a"]
    shown = rft(installed, "run", "my_grpo.py", *TINY_RUN, *own, cwd=tmp_path)
    assert shown.splitlines()[-1] == "page of all of it: rft report a"
    rft(installed, "run", "grpo", *TINY_RUN, "--reward", "even.py:even", "--out", "b", cwd=tmp_path)
    rows = [json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0]) for run in "ab"]
    assert 0 < rows[0]["reward/mean"] == rows[1]["reward/mean"] < 6
    assert "step 1 of 1" in rft(installed, "watch", "a", cwd=tmp_path)
    assert "report: page.html" in rft(installed, "report", "a", "b", "--out", "page.html", cwd=tmp_path)
    assert "step_00000001 as out" in rft(installed, "export", "a", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_doctor_is_content(installed, tmp_path):
    found = json.loads(rft(installed, "doctor", "--json", cwd=tmp_path))
    assert found["versions"]["torch"]["state"] == "ok"
    assert found["network"]["hub"]["value"] == "offline: HF_HUB_OFFLINE is set"
