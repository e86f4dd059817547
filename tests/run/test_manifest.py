"""A run that goes on with other files than it began with says so, or does not start."""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_fn import file_digest, model, opened, reward, types
from rft_fn.run import manifest, opening, options, rollout_files
from rft_fn.strategy import get_fake_strategy


@dataclass(frozen=True)
class Config(options.Run):
    steps: int | None = 4


@pytest.fixture(scope="module")
def tiny():
    return model.load_tokenizer("tiny").name_or_path


def filled(tmp_path, tiny):
    """A folder with a teacher, and a reward that imports a module and reads a table."""
    for name in ("r", "teacher"):
        shutil.rmtree(name, ignore_errors=True)
    shutil.copytree(tiny, "teacher")
    (tmp_path / "teacher/generation_config.json").write_text("{}")
    (tmp_path / "helper.py").write_text("scale = 1\n")
    (tmp_path / "table.json").write_text("[1, 2]")
    (tmp_path / "my_reward.py").write_text(
        "import json, pathlib\nfrom helper import scale\n"
        "table = json.loads((pathlib.Path(__file__).parent / 'table.json').read_text())\n"
        "def score(completions, **_): return [1.0] * len(completions)\n"
    )


@pytest.fixture
def place(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(tmp_path, tiny)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    opened.end()


def begin(step, *, override=False):
    """The opening of a run in a process of its own, as far as files go."""
    for name in [x for x in sys.modules if x == "helper" or x.startswith("rft_fn.user_files.")]:
        del sys.modules[name]
    cfg = Config(out="r", override=override)
    opening.start(cfg)
    reward.parse(["my_reward.py:score"])
    run = opening.open_folder(cfg, get_fake_strategy())
    model.read_window("teacher")  # as `load` begins
    run.resume(step)
    run.write(step, {"reward/mean": 0.5})
    run._close()


def said(capsys):
    return re.findall(r"warning: r: (.*)", capsys.readouterr().out)


def test_the_same_files_are_no_news(place, capsys):
    begin(0)
    begin(1)
    assert said(capsys) == [] and not (place / "r/overrides.jsonl").exists()
    found = json.loads((place / "r/manifest.json").read_text())
    assert found["models"] == ["teacher"]
    names = {"helper.py", "my_reward.py", "table.json", "teacher/model.safetensors", "teacher/config.json"}
    assert names <= set(found["files"])
    assert not [x for x in found["files"] if x.startswith(("r/", ".")) or "site-packages" in x]


def weights(place):
    tensors = load_file("teacher/model.safetensors")
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    about = os.stat("teacher/model.safetensors")
    save_file(tensors, "teacher/model.safetensors", metadata={"format": "pt"})
    os.utime("teacher/model.safetensors", ns=(about.st_atime_ns, about.st_mtime_ns))


ANNOUNCED = {
    "a module that a reward imports": ("helper.py", lambda p: p.write_text("scale = 2\n"), "is another than"),
    "a table that a reward reads": ("table.json", lambda p: p.write_text("[1, 3]"), "is another than"),
    "the reward": ("my_reward.py", lambda p: p.write_text(p.read_text() + "# x\n"), "is another than"),
    "a generation config": (
        "teacher/generation_config.json", lambda p: p.write_text('{"top_k": 3}'), "is another than",
    ),
    "a file of a model that is gone": (
        "teacher/generation_config.json", lambda p: p.unlink(), "is gone, it was there",
    ),
    "a file of a model that is new": (
        "teacher/special.json", lambda p: p.write_text("{}"), "is new, it was not there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANNOUNCED)
def test_a_changed_file_is_one_line(name, place, tiny, capsys):
    filled(place, tiny)
    begin(0)
    path, change, what = ANNOUNCED[name]
    change(place / path)
    begin(1)
    assert said(capsys) == [f"{path} {what} in the steps before"]
    row = json.loads((place / "r/overrides.jsonl").read_text())
    assert (row["step"], row["name"]) == (1, f"digests.files.{path}") and row["old"] != row["new"]
    begin(2)
    assert said(capsys) == []


@pytest.mark.parametrize("how", ["weights", "config"])
def test_another_model_of_the_same_name_is_refused(how, place, tiny, capsys):
    filled(place, tiny)
    begin(0)
    name = "teacher/model.safetensors"
    if how == "weights":
        weights(place)
    else:
        name = "teacher/config.json"
        path = place / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": None, "new": 1}))
    line = rf"run folder r holds a run with other weights: {name} is another than in the steps before; give "
    with pytest.raises(ValueError, match=line):
        begin(1)
    assert (place / "r/metrics.jsonl").read_text().count("\n") == 1  # nothing was cut back
    begin(1, override=True)
    assert said(capsys) == [f"{name} is another than in the steps before"]
    begin(2)
    assert said(capsys) == []


def test_a_run_without_a_manifest_resumes_in_silence_but_for_what_its_config_tells(place, capsys):
    begin(0)
    (place / "r/manifest.json").unlink()
    weights(place)
    begin(1)
    assert said(capsys) == []
    (place / "r/manifest.json").unlink()
    (place / "my_reward.py").write_text((place / "my_reward.py").read_text() + "# x\n")
    begin(2)
    assert said(capsys) == ["my_reward.py is another than in the steps before"]

    (place / "r/manifest.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"run folder r: manifest.json is damaged"):
        begin(3)


def test_what_is_lost_of_a_run_is_said(place, capsys):
    begin(0)
    begin(1)
    begin(2)
    metrics = place / "r/metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[1:]))
    begin(3)
    assert said(capsys) == ["metrics.jsonl has lost step 0"]
    (place / "r/config.json").unlink()
    metrics.write_text(rows[2])
    begin(3)
    assert said(capsys) == [
        "config.json is gone, so its steps go on with the options of this command",
        "metrics.jsonl has lost steps 0 to 1",
    ]

    # checkpoints tell of steps too
    (place / "r/checkpoints/step_00000003").mkdir(parents=True)
    metrics.unlink()
    with pytest.raises(ValueError, match="holds a run with other arguments"):
        opening.open_folder(Config(out="r", seed=7), get_fake_strategy())


def test_a_large_file_is_hashed_in_pieces_and_once(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(256)) * 4)
    whole = manifest.digest(path)
    monkeypatch.setattr(file_digest, "LARGE", 300)
    monkeypatch.setattr(file_digest, "_BLOCK", 100)
    assert manifest.digest(path) == manifest.digest(path) != whole
    first = manifest.digest(path)
    for at in (0, 299, 300, 1023):
        changed = bytearray(bytes(range(256)) * 4)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert manifest.digest(path) != first, at


def test_only_reads_are_noted(tmp_path):
    (tmp_path / "read").write_text("x")
    opened.begin()
    (tmp_path / "read").read_text()
    (tmp_path / "written").write_text("x")
    os.close(os.open(tmp_path / "made", os.O_RDONLY | os.O_CREAT))
    opened.end()
    (tmp_path / "written").read_text()
    found = {path.name for path in opened.files() if path.parent == tmp_path}
    assert found == {"read"}


def test_rollouts_are_the_same_to_the_byte(tmp_path):
    rollout = types.Rollout(
        tokens=torch.ones(2, 3, dtype=torch.long),
        mask=torch.tensor([[False, True, True]] * 2),
        logp=torch.zeros(2, 3),
        length=torch.tensor([3, 3]),
        truncated=torch.zeros(2, dtype=torch.bool),
        group=torch.zeros(2, dtype=torch.long),
        version=torch.zeros(2, dtype=torch.long),
        sampling=types.Sampling(max_new=3),
    )
    written = set()
    for _ in range(20):
        rollout_files.write_rollout(tmp_path / "a", rollout, torch.ones(1, 2))
        written.add((tmp_path / "a").read_bytes())
    assert len(written) == 1
    found, score = rollout_files.read_rollout(tmp_path / "a")
    assert torch.equal(found.tokens, rollout.tokens) and found.sampling == rollout.sampling
    assert torch.equal(score, torch.ones(1, 2))
