"""The folder of a run: rows that can be cut back, refusals before anything is computed, pictures."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from dataclasses import dataclass, field
from datetime import date

import numpy as np
import pytest
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as some
from matplotlib import image

from rft_fn import data, dist, limits, model
from rft_fn import run as runs
from rft_fn.data import template_variables
from rft_fn.model.bounds import Counts
from rft_fn.reward import Judged
from rft_fn.run import claim, earlier_run, opening, options, plot, progress, signals
from rft_fn.run import claim as lock
from rft_fn.strategy import StrategyConfig, get_fake_strategy


@dataclass(frozen=True)
class Config:
    lr: float = 0.1
    steps: int = 4
    names: tuple[str, ...] = ("a",)


def write(run, steps):
    for step in steps:
        run.write(step, {"reward/mean": step / 10, "loss": 1.0, "policy/entropy": float("nan")}, tokens=100)


def test_rows_and_their_cut(tmp_path, capsys):
    run = runs.Run(tmp_path / "r", Config(), total=4)
    run.resume(0)
    write(run, range(4))
    rows = plot.read_metrics(run.folder / "metrics.jsonl")
    assert (
        [r["step"] for r in rows] == [0, 1, 2, 3]
        and rows[2]["reward/mean"] == 0.2
        and rows[0]["policy/entropy"] is None
    )
    assert "seconds" not in rows[0]  # time is in another file, so that equal runs have equal metrics
    assert json.loads((run.folder / "timing.jsonl").read_text().splitlines()[1])["tokens_per_s"] > 0
    with (run.folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 4, "rew')  # a kill in the middle of a line
    again = runs.Run(tmp_path / "r", Config(), total=4)
    again.resume(2)
    assert "continuing after step 2" in capsys.readouterr().out
    write(again, [2])
    assert [r["step"] for r in plot.read_metrics(run.folder / "metrics.jsonl")] == [0, 1, 2]


def test_another_configuration_is_refused(tmp_path):
    run = runs.Run(tmp_path / "r", Config(), total=4)
    write(run, [0])
    with pytest.raises(ValueError, match=r"other arguments: lr was 0.1 and is 0.2; give --override"):
        runs.Run(tmp_path / "r", Config(lr=0.2), total=4)
    with pytest.raises(ValueError, match="steps was 4 and is 9"):
        runs.Run(tmp_path / "r", Config(steps=9), total=9)
    runs.Run(tmp_path / "r", Config(steps=9), total=9, free=("steps",))


@dataclass(frozen=True)
class Part:
    timeout: limits.Free[float] = 9.0
    sp: int = 1


@dataclass(frozen=True)
class Nested:
    lr: float = 0.1
    budget: limits.Free[limits.Count] = 64
    override: bool = False
    part: Part = field(default_factory=Part)


def begun(folder, config=None):
    """A run that stopped after two steps; it has a checkpoint of the first."""
    run = runs.Run(folder, config or Nested(), total=4)
    run.resume(0)
    write(run, [0, 1])
    (run.checkpoints / "step_00000001").mkdir(parents=True)
    run.finish()
    return run


def test_what_does_not_change_the_mathematics_is_free(tmp_path):
    begun(tmp_path / "r")
    run = runs.Run(tmp_path / "r", Nested(budget=32, part=Part(timeout=1.0)), total=4)
    run.resume(1)
    saved = json.loads((tmp_path / "r/config.json").read_text())
    assert saved["budget"] == 32 and saved["part"] == {"timeout": 1.0, "sp": 1}
    assert not (tmp_path / "r/overrides.jsonl").exists()
    with pytest.raises(ValueError, match=r"other arguments: part.sp was 1 and is 2; give --override"):
        runs.Run(tmp_path / "r", Nested(part=Part(sp=2)), total=4)


@dataclass(frozen=True)
class Served(Nested):
    reward: tuple[str, ...] = ("http://node1:20001/score(name='a')=0.5",)


def test_servers_may_be_at_other_addresses_which_is_told_and_noted(tmp_path, capsys):
    """A job that Slurm starts again is on other nodes; another path, name or number of servers is refused."""
    begun(tmp_path / "r", Served())
    moved = ("http://10.0.0.7:22000/score(name='a')=0.5",)
    run = runs.Run(tmp_path / "r", Served(reward=moved), total=4)
    run.resume(1)
    assert "reward has servers at other addresses than in the steps before" in capsys.readouterr().out
    (row,) = plot.read_metrics(tmp_path / "r/overrides.jsonl")
    assert (row["step"], row["name"], row["new"]) == (1, "reward", [*moved])
    run.finish()
    for other in (moved[0].replace("/score", "/rate"), moved[0].replace("'a'", "'b'"), "task:sort_digits"):
        with pytest.raises(ValueError, match=r"other arguments: reward was .*; give --override"):
            runs.Run(tmp_path / "r", Served(reward=(other,)), total=4)
    with pytest.raises(ValueError, match=r"other arguments: reward was .*; give --override"):
        runs.Run(tmp_path / "r", Served(reward=(*moved, *moved)), total=4)


def test_an_override_is_noted_with_its_step(tmp_path):
    begun(tmp_path / "r")
    change = Nested(lr=0.2, budget=32, override=True, part=Part(sp=2))
    run = runs.Run(tmp_path / "r", change, total=4, override=True)
    assert json.loads((tmp_path / "r/config.json").read_text())["lr"] == 0.1  # nothing has changed yet
    run.resume(1)
    write(run, [1])
    run.finish()
    assert plot.read_metrics(tmp_path / "r/overrides.jsonl") == [
        {"step": 1, "name": "lr", "old": 0.1, "new": 0.2},
        {"step": 1, "name": "part.sp", "old": 1, "new": 2},
    ]
    # from now on this is the run: the same options need no override, the former ones do
    runs.Run(tmp_path / "r", Nested(lr=0.2, part=Part(sp=2)), total=4).resume(1)
    assert len(plot.read_metrics(tmp_path / "r/overrides.jsonl")) == 2
    with pytest.raises(ValueError, match=r"lr was 0.2 and is 0.1"):
        runs.Run(tmp_path / "r", Nested(part=Part(sp=2)), total=4)


@pytest.mark.parametrize("renamed", [False, True])
def test_rows_are_not_wiped_when_the_checkpoints_are_gone(tmp_path, renamed):
    """Nor where they are there by other names."""
    run = begun(tmp_path / "r")
    before = (tmp_path / "r/metrics.jsonl").read_bytes()
    if renamed:
        (run.checkpoints / "step_00000001").rename(run.checkpoints / "global_step_1")
        (tmp_path / "r/.saved").unlink(missing_ok=True)
    else:
        (run.checkpoints / "step_00000001").rmdir()
    again = runs.Run(tmp_path / "r", Nested(), total=4)
    with pytest.raises(ValueError, match=r"no checkpoint is left in .*checkpoints; put that folder"):
        again.resume(0)
    assert (tmp_path / "r/metrics.jsonl").read_bytes() == before


def test_a_run_that_had_no_checkpoint_yet_starts_again(tmp_path):
    run = runs.Run(tmp_path / "r", Nested(), total=4)
    run.resume(0)
    write(run, [0, 1])
    again = runs.Run(tmp_path / "r", Nested(), total=4)
    again.resume(0)
    assert not (tmp_path / "r/metrics.jsonl").read_text()


def test_config_is_written_when_it_is_new_and_whole(tmp_path, monkeypatch):
    begun(tmp_path / "r")
    path = tmp_path / "r/config.json"
    before, kept = path.read_bytes(), path.stat().st_ino
    runs.Run(tmp_path / "r", Nested(), total=4).resume(1)
    assert path.stat().st_ino == kept  # the same file: nothing was written

    # the disk is full at the first, second or third of metrics, timing and config: the old ones stay
    names = ("config.json", "metrics.jsonl", "timing.jsonl")
    texts = {name: (tmp_path / "r" / name).read_bytes() for name in names}
    for last in (0, 1, 2):
        run = runs.Run(tmp_path / "r", Nested(budget=8), total=4)
        left = iter(range(last))

        def fails(file, left=left):
            if next(left, None) is None:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", fails)
            with pytest.raises(OSError, match="No space left"):
                run.resume(2)
        assert {name: (tmp_path / "r" / name).read_bytes() for name in names} == texts
        assert not list((tmp_path / "r").glob(".*.tmp"))
    assert texts["config.json"] == before


def test_a_damaged_config_is_one_line_and_loses_nothing(tmp_path):
    begun(tmp_path / "r")
    (tmp_path / "r/config.json").write_text('{"lr": 0.1,')
    before = (tmp_path / "r/metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"config.json is damaged \(.*\); delete that file to continue"):
        runs.Run(tmp_path / "r", Nested(), total=4)
    (tmp_path / "r/config.json").unlink()
    runs.Run(tmp_path / "r", Nested(), total=4).resume(2)
    assert (tmp_path / "r/metrics.jsonl").read_bytes() == before


def rows_file(path, texts):
    path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in texts))
    return str(path)


def with_data(folder, sources, *, override=False, tokenizer=None):
    """A run on the rows of some files, of which none is held out."""
    tokenizer = tokenizer or model.load_tokenizer("tiny")
    dataset = data.load(sources, tokenizer, template="{question}")
    inputs = claim.Inputs({"data": dataset}, tokenizer)
    return runs.Run(folder, Config(), total=4, override=override, inputs=inputs)


def test_other_rows_in_the_same_file_are_refused_with_the_first_that_differs(tmp_path):
    a = rows_file(tmp_path / "a.jsonl", ["3 1 2", "5 4", "9 8 7"])
    b = rows_file(tmp_path / "b.jsonl", ["1 2", "2 1", "7 6"])
    write(with_data(tmp_path / "r", [a, b]), [0])
    with_data(tmp_path / "r", [a, b]).resume(1)

    rows_file(tmp_path / "b.jsonl", ["1 2", "2 1", "7 5"])
    line = rf"holds a run with other data: data: {b}, line 3 is another row than it was; give --override"
    with pytest.raises(ValueError, match=line):
        with_data(tmp_path / "r", [a, b])
    rows_file(tmp_path / "b.jsonl", ["1 2", "2 1"])
    with pytest.raises(ValueError, match=rf"data: {b} had 3 rows and has 2; give --override"):
        with_data(tmp_path / "r", [a, b])

    # what is continued with other rows is noted, and is then what the run has
    with_data(tmp_path / "r", [a, b], override=True).resume(1)
    (noted,) = map(json.loads, (tmp_path / "r/overrides.jsonl").read_text().splitlines())
    assert (noted["step"], noted["name"]) == (1, "digests.data")
    assert [part["rows"] for part in noted["old"]] == [3, 3]
    assert [part["rows"] for part in noted["new"]] == [3, 2]
    with_data(tmp_path / "r", [a, b]).resume(1)


def test_another_tokenizer_or_template_is_announced(tmp_path, capsys):
    a = rows_file(tmp_path / "a.jsonl", ["3 1 2", "5 4"])
    write(with_data(tmp_path / "r", a), [0])
    with_data(tmp_path / "r", a).resume(1)
    assert "warning" not in capsys.readouterr().out

    tokenizer = model.load_tokenizer("tiny")
    tokenizer.chat_template += " "
    with_data(tmp_path / "r", a, tokenizer=tokenizer).resume(1)
    said = re.findall(r"warning: .*/r: (\S+) is another than in the steps before", capsys.readouterr().out)
    assert said == ["chat_template"]
    names = [json.loads(line)["name"] for line in (tmp_path / "r/overrides.jsonl").read_text().splitlines()]
    assert names == ["digests.chat_template", "digests.data"]
    with_data(tmp_path / "r", a, tokenizer=tokenizer).resume(1)
    assert "warning" not in capsys.readouterr().out

    # the data too, though it reads otherwise now
    rows_file(tmp_path / "a.jsonl", ["3 1 2", "5 6"])
    with pytest.raises(ValueError, match="line 2 is another row"):
        with_data(tmp_path / "r", a)
    assert "r: chat_template is another" in capsys.readouterr().out

    rows_file(tmp_path / "a.jsonl", ["3 1 2", "5 4"])
    tokenizer.add_tokens(["<new>"])
    with_data(tmp_path / "r", a, tokenizer=tokenizer).resume(1)
    assert "r: tokenizer is another" in capsys.readouterr().out


def test_a_run_of_an_older_version_resumes_in_silence(tmp_path, capsys):
    """Its config.json has no digests, and lacks an option that is new."""
    a = rows_file(tmp_path / "a.jsonl", ["3 1 2", "5 4"])
    write(with_data(tmp_path / "r", a), [0])
    path = tmp_path / "r/config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({name: stored[name] for name in ("lr", "steps")}))
    (tmp_path / "r/rows.bin").unlink()
    rows_file(tmp_path / "a.jsonl", ["3 1 2", "5 4 6"])
    with_data(tmp_path / "r", a).resume(1)
    assert "warning" not in capsys.readouterr().out
    assert not (tmp_path / "r/overrides.jsonl").exists()
    assert json.loads(path.read_text())["digests"]["data"][0]["rows"] == 2

    # a new option that is not what it was without it changes the mathematics
    path.write_text(json.dumps({name: stored[name] for name in ("lr", "steps")}))
    with pytest.raises(ValueError, match=r"names was \['a'\] and is \['b'\]"):
        runs.Run(tmp_path / "r", Config(names=("b",)), total=4)


@dataclass(frozen=True)
class Begun(options.Run):
    data: tuple[str, ...] = ()
    steps: int | None = 4


def test_a_run_keeps_the_date_of_its_first_start(tmp_path, monkeypatch):
    """The day is fixed before any row is read, and what was stored without one takes today."""

    def days_later(days):
        class Later(date):
            @classmethod
            def today(cls):
                return cls(2026, 7, 30 + days)

        monkeypatch.setattr(earlier_run, "date", Later)

    def begin(steps):
        cfg = Begun(out=str(tmp_path / "r"))
        st = opening.start(cfg)
        run = opening.open_folder(cfg, st)
        run.resume(steps)
        write(run, range(steps, 4))
        run.stop_at_day = template_variables.fixed_day()
        run.finish()
        assert template_variables.fixed_day() is None  # that is, until the end of the run
        return run.stop_at_day.isoformat()

    for days, day in ((0, "2026-07-30"), (1, "2026-07-30")):
        days_later(days)
        assert begin(days) == day
        assert json.loads((tmp_path / "r/config.json").read_text())["date"] == day

    # a run of an older version, and one that stopped before its first step
    path = tmp_path / "r/config.json"
    for change in (
        lambda: path.write_text(json.dumps({**json.loads(path.read_text()), "date": None})),
        lambda: (tmp_path / "r/metrics.jsonl").unlink(),
    ):
        change()
        assert begin(0) == "2026-07-31"
        assert json.loads(path.read_text())["date"] == "2026-07-31"


HOLDER = """
import sys
import time
from rft_fn import run
held = run.Run(sys.argv[1], {}, total=1)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_runs_in_one_folder(tmp_path):
    """The second names the first; what locked it is gone with its process, also after kill -9."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "r")]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(ValueError) as error:
            runs.Run(tmp_path / "r", {}, total=1)
        who = f"in use by process {first.pid} on {socket.gethostname()} since 20"
        assert who in str(error.value) and "\n" not in str(error.value)
        with pytest.raises(ValueError, match=who):  # a script knows before it has read any data
            opening.start(Begun(out=str(tmp_path / "r")))
    finally:
        first.kill()
        first.wait()
    runs.Run(tmp_path / "r", {}, total=1).finish()
    again = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    assert again.stdout == b"held\n" and not again.returncode  # finish has unlocked it


def test_a_folder_that_is_there_is_locked_at_the_start(tmp_path):
    cfg = Begun(out=str(tmp_path / "r"))
    opening.start(cfg)
    assert not (tmp_path / "r").exists()  # a mistake in the data leaves nothing behind
    (tmp_path / "r").mkdir()
    opening.start(cfg)
    assert lock.held(tmp_path / "r")

    # one that was deleted and made again meanwhile is another
    shutil.rmtree(tmp_path / "r")
    run = opening.open_folder(cfg, get_fake_strategy())
    assert lock.held(tmp_path / "r")
    run.resume(0)
    write(run, range(4))
    run.finish()
    assert not lock.held(tmp_path / "r")


def test_a_run_without_a_step_has_claimed_nothing(tmp_path):
    """A mistake in an argument is found after the folder is made; the mended command goes to the same one."""
    runs.Run(tmp_path / "r", Config(lr=-1), total=4)
    run = runs.Run(tmp_path / "r", Config(), total=4)
    write(run, [0])
    assert json.loads((run.folder / "config.json").read_text())["lr"] == 0.1


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run folder .*file/r cannot be written: .* with --out"):
        runs.Run(tmp_path / "file" / "r", Config(), total=4)


@pytest.mark.parametrize("how", ["deleted", "moved", "emptied", "made again"])
def test_a_folder_that_is_gone_in_mid_run_ends_the_run(how, tmp_path):
    run = runs.Run(tmp_path / "r", Config(), total=4)
    run.resume(0)
    write(run, [0])
    run.reach(1, None)
    if how == "moved":
        (tmp_path / "r").rename(tmp_path / "other")
    elif how == "emptied":
        for path in (tmp_path / "r").glob("*.json*"):
            path.unlink()
    else:
        shutil.rmtree(tmp_path / "r")
    if how == "made again":
        runs.Run(tmp_path / "copy", Config(), total=4)
        (tmp_path / "copy").rename(tmp_path / "r")
    for act in (lambda: write(run, [1]), run.finish):
        with pytest.raises(ValueError, match=r"run folder .*/r: it was deleted or moved away during the run"):
            act()
    assert not (tmp_path / "r/metrics.jsonl").exists()


def test_other_ranks_write_nothing(tmp_path):
    run = runs.Run(tmp_path / "r", Config(), total=4, rank=1)
    run.resume(0)
    write(run, [0])
    run.finish()
    assert not (tmp_path / "r").exists()


def test_trajectories_are_the_first_of_each_group_and_distributions_of_all(tmp_path):
    class Prompt:
        def __init__(self, text):
            self.text = text

    class Batch:
        mask = torch.arange(9) < torch.tensor([[9], [1], [4], [2]])

    reward = torch.tensor([[1.0, 0.0], [0.5, 0.25]])
    judged = Judged(reward, {"exact": reward}, ["a", "b", "c", "d"])
    run = runs.Run(tmp_path / "r", Config(), total=4)
    run.resume(0)
    run.trajectories(3, [Prompt("p"), Prompt("q")], Batch(), judged)
    rows = plot.read_metrics(run.folder / "trajectories.jsonl")
    assert rows[1] == {"step": 3, "prompt": "q", "response": "c", "reward": 0.5, "exact": 0.5}

    # rewards that are no number are left out, evaluations have no row
    reward[0, 1] = torch.nan
    run.trajectories(4, [], Batch(), judged)
    run.trajectories(4, [], Batch(), judged, split="eval")
    spread = plot.read_metrics(run.folder / "distributions.jsonl")
    levels = [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]
    lengths = np.quantile([9, 1, 4, 2], levels)
    for row, step, rewards in zip(spread, (3, 4), ([1, 0, 0.5, 0.25], [1, 0.5, 0.25]), strict=True):
        assert row["step"] == step
        np.testing.assert_allclose(row["length"], lengths)
        np.testing.assert_allclose(row["reward"], np.quantile(rewards, levels))


def test_trajectories_have_what_rewards_said_of_a_response(tmp_path):
    """Further numbers and texts; nothing where a reward does not apply."""
    one = torch.tensor([[1.0, 0.0]])
    parts = {"a": one, "b": torch.full((1, 2), torch.nan)}
    judged = Judged(one, parts, ["x", "y"], {"a/acc": one}, {"a/pred": ["7", None]})
    run = runs.Run(tmp_path / "r", Config(), total=4)
    run.resume(0)
    batch = type("Batch", (), {"mask": torch.ones(2, 3)})
    run.trajectories(0, [type("Prompt", (), {"text": "p"})], batch, judged)
    rows = plot.read_metrics(run.folder / "trajectories.jsonl")
    row = {"step": 0, "prompt": "p", "response": "x", "reward": 1.0, "a": 1.0, "a/acc": 1.0, "a/pred": "7"}
    assert rows == [row]


def test_finish_draws_what_was_written(tmp_path, capsys):
    run = runs.Run(tmp_path / "r", Config(), total=30)
    run.resume(0)
    write(run, range(30))
    run.finish()
    out = capsys.readouterr().out
    assert "reward" in out and "step 30/30" in out and str(run.folder) in out
    picture = image.imread(run.folder / "curve.png")
    blue = (abs(picture[..., :3] - [0x2A / 255, 0x5D / 255, 0xB0 / 255]) < 0.1).all(-1)
    assert blue.sum() > 100  # a line was drawn
    rows, cols = blue.nonzero()
    left, right = (
        rows[cols < sorted(cols)[len(cols) // 4]].mean(),
        rows[cols > sorted(cols)[3 * len(cols) // 4]].mean(),
    )
    assert left > right  # the rewards went up, and so does the line


def test_lengths_are_drawn_before_the_last_checkpoint(tmp_path, monkeypatch):
    """A run that was killed after that has no step left, and so no lengths."""
    drawn = []
    monkeypatch.setattr(
        plot, "length_histogram", lambda lengths, path: drawn.append((list(lengths), path.name))
    )
    run = runs.Run(tmp_path / "r", Config(), total=2)
    run.resume(0)
    for step in (0, 1):
        write(run, [step])
        mask = torch.arange(9) < torch.tensor([[3], [step + 1]])
        judged = Judged(torch.tensor([[1.0, 0.0]]), {}, ["a", "b"])
        run.trajectories(step, [], types.SimpleNamespace(mask=mask), judged)
    assert drawn == [([3, 2], "lengths.png")]
    run.finish()
    again = runs.Run(tmp_path / "r", Config(), total=2)
    again.resume(2)
    again.finish()
    assert len(drawn) == 1


def test_the_panels_are_those_of_what_a_run_has(tmp_path):
    """A reward in place of the loss; for pairs both the held-out and the training curve."""
    rewarded = [{"step": 0, "reward/mean": 0.5, "loss": 1.0, "grad/norm": 1.0}]
    assert [panel.title for panel in plot._panels(rewarded)] == ["reward", "gradient norm"]
    supervised = [{"step": 0, "loss": 1.0, "grad/norm": 1.0}]
    assert plot._panels(supervised) == [
        ("loss", "mean loss", ["loss"]),
        ("gradient norm", "norm", ["grad/norm"]),
    ]
    pairs = [{"step": 0, "loss": 0.7, "pairs/accuracy": 0.5}, {"step": 1, "eval/accuracy": 1.0, "loss": 0.6}]
    assert plot._panels(pairs) == [
        ("loss", "mean loss", ["loss"]),
        ("accuracy of pairs", "share", ["eval/accuracy", "pairs/accuracy"]),
    ]
    measured = [{"step": i, "loss": 0.1, "kl/ref": kl, "grad/norm": None} for i, kl in enumerate((0, 0.2))]
    assert [panel.title for panel in plot._panels(measured)] == ["loss", "KL to the reference"]
    assert [panel.title for panel in plot._panels(measured[:1])] == ["loss"]
    named = ("eval/accuracy", "pairs/accuracy", "loss", "pairs/reward_chosen", "rollout/length_max")
    assert [plot._label(key) for key in named] == ["held out", "training", "training", "chosen", "max"]


def test_a_reward_of_several_parts_has_a_panel_for_each():
    """Training and held out side by side; a single part is the reward itself."""
    row = {"step": 0, "reward/mean": -3.0, "eval/mean": -2.0, "reward/std": 1.0}
    row |= {"reward/model": -3.0, "eval/model": -2.0, "reward/model/skipped": 0.1, "eval/model/skipped": 0.1}
    assert [panel.title for panel in plot._panels([row])] == ["reward", "evaluation"]
    true = {"reward/task:sort_digits": 0.1, "eval/task:sort_digits": 0.3}
    unit = "mean of responses"
    assert plot._panels([row | true])[2:] == [
        ("reward: model", unit, ["eval/model", "reward/model"]),
        ("reward: task:sort_digits", unit, ["eval/task:sort_digits", "reward/task:sort_digits"]),
    ]
    assert plot._label("reward/task:sort_digits") == "training"


def drawn(rows, title, keys, config=None):
    """The axes of one panel."""
    _, axes = plot.figure(1, [4], height=3)
    plot._panel(axes[0, 0], rows, title, keys, unit="nats")
    if config is not None:
        plot._draw_limit(axes[0, 0], rows, config)
    return axes[0, 0]


def test_the_axes_of_a_panel_have_units_and_whole_steps_from_1():
    for count in (1, 2, 3, 20, 1000):
        ax = drawn([{"step": i, "reward/mean": 0.1} for i in range(count)], "reward", ["reward/mean"])
        low, high = ax.get_xlim()
        ticks = [x for x in ax.get_xticks() if low <= x <= high]
        assert ticks and min(ticks) >= 1 and all(x == int(x) for x in ticks)
        assert [ax.lines[-1].get_xdata()[i] for i in (0, -1)] == [1, count]
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "nats")


def test_the_axis_of_rewards_fits_them_and_that_of_shares_is_from_0_to_1():
    for rewards in ((-300.0, -200.0), (0.1, 0.2), (5.0, 7.0)):
        rows = [{"step": i, "reward/mean": x} for i, x in enumerate(rewards)]
        low, high = drawn(rows, "reward", ["reward/mean"]).get_ylim()
        margin = 0.2 * (rewards[1] - rewards[0])
        assert rewards[0] - margin < low < rewards[0] and rewards[1] < high < rewards[1] + margin
    low, high = drawn(
        [{"step": 0, "pairs/accuracy": 0.6}], "accuracy of pairs", ["pairs/accuracy"]
    ).get_ylim()
    assert low < 0 and high > 1


def test_the_gap_has_the_limit_that_stops_the_run_on_a_logarithmic_axis():
    gaps = (2e-6, 3e-6, None, 1e-6)
    rows = [{"step": i, "policy/logp_gap": x} for i, x in enumerate(gaps)]
    config = {"max_gap": 0.01, "gap_factor": 30.0}
    ax = drawn(rows, "gap", ["policy/logp_gap"], config)
    assert ax.get_yscale() == "log" and ax.get_ylim() == pytest.approx((1e-6, 1e-4))
    line = ax.lines[-1]
    assert line.get_label() == "limit 6e-05" and list(line.get_xdata()) == [1, 2, 3, 4]
    np.testing.assert_allclose(line.get_ydata(), [6e-5, 6e-5, np.nan, 6e-5])

    # a floor below the rounding of float32; a sampler that cuts the distribution; the limit of the options
    tiny = [{"step": 0, "policy/logp_gap": 1e-9}]
    assert plot._gap_limit(tiny, config) == (pytest.approx(3e-5), {1})
    assert plot._gap_limit(tiny, config | {"top_p": 0.9}) == (pytest.approx(3e-3), {1})
    assert plot._gap_limit(tiny, config | {"max_gap": 1e-5}) == (1e-5, {1})
    assert plot._gap_limit(tiny, {}) == (np.inf, set())

    # without a limit in the options it is that of the type, which the noise shows
    for gap, limit in ((2e-4, 6e-3), (5e-4, 0.015), (0.02, 0.08)):
        noise = [{"step": 0, "policy/logp_gap": gap}]
        assert plot._gap_limit(noise, config | {"max_gap": None}) == (pytest.approx(limit), {1})


@each(
    "options, steps", [({}, {1, 2}), ({"ahead": 1}, {1}), ({"partial": 2}, {1}), ({"mismatch": "tis"}, {1})]
)
def test_stale_steps_have_no_limit_where_the_run_checks_none(options, steps):
    rows = [{"step": i, "policy/logp_gap": 1e-6, "rollout/staleness_max": float(i)} for i in range(2)]
    assert plot._gap_limit(rows, {"max_gap": 0.01, "gap_factor": 30.0} | options)[1] == steps


@given(some.lists(some.floats(-9, 9) | some.just(float("nan")), min_size=1, max_size=50), some.integers(1, 9))
def test_the_running_mean_is_of_the_numbers_in_its_window(y, span):
    windows = [np.array(y[max(0, i - span + 1) : i + 1]) for i in range(len(y))]
    wanted = [window[~np.isnan(window)].mean() if (window == window).any() else np.nan for window in windows]
    np.testing.assert_allclose(plot.running_mean(y, span), wanted, atol=1e-12)


def test_a_curve_in_the_terminal_is_plain_text_that_fits_it(monkeypatch):
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = plot.terminal_curve([0.5, float("nan"), *(i / 50 for i in range(40))], title="reward")
        assert max(map(len, text.splitlines())) == min(columns, 72) and not set("\x1b\r") & set(text)
        assert text.splitlines()[-2].split() == (["1", "10", "20", "30", "40"])
    assert plot.terminal_curve([float("nan")] * 3, title="reward") == "reward: no number in 3 steps"


def test_a_run_whose_rewards_are_no_numbers_ends_and_continues(tmp_path, capsys):
    for done in (0, 3):
        run = runs.Run(tmp_path / "r", Config(), total=4)
        run.resume(done)
        for step in range(done, 4):
            run.write(step, {"reward/mean": float("nan") if step < 2 else 1.0, "policy/logp_gap": 1e-6})
        run.finish()
        assert "reward: nan, the mean of the last 4 steps" in capsys.readouterr().out


def test_a_run_without_any_number_has_an_empty_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": null, "grad/norm": null}\n')
    picture = image.imread(plot.curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png"))
    assert picture.min() == 1.0


def test_a_log_in_a_file_has_lines_of_all_steps_and_no_escapes(monkeypatch, capsys):
    """Also where only the errors go to a terminal: a bar there would leave the file without its steps."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = progress.Progress("r", 3)
    for step, computed in enumerate(({}, {"computed": 1.0}, {"computed": 0.538})):
        bar.show(step, {"reward/mean": 0.5}, {"tokens_per_s": 100.0, **computed})
    found = capsys.readouterr()
    shared = ["", "", ", 54% computed"]
    lines = [f"step {step + 1}/3  reward 0.500  100 tok/s{shared[step]}" for step in range(3)]
    assert [line.rpartition("  ")[0] for line in found.out.splitlines()] == lines and not found.err


def test_pictures_go_where_they_are_asked_for(tmp_path):
    """log_dir moves them, plot_every draws more of them; the files of rows stay in the folder."""
    many = [[0] * n for n in (1, 2, 5)]
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(x), dtype=torch.bool) for x in many], batch_first=True
    )
    judged = Judged(torch.zeros(1, 3), {}, ["a", "b", "c"])
    run = runs.Run(tmp_path / "r", Config(), total=6, log_dir=tmp_path / "p", plot_every=3)
    run.resume(0)
    write(run, range(6))
    for step in range(6):
        run.trajectories(step, [], type("Batch", (), {"mask": mask}), judged)
    run.finish()
    names = sorted(p.name for p in (tmp_path / "p").iterdir())
    assert names == ["curve.png", "lengths.png", "lengths_00000003.png", "lengths_00000006.png"]
    assert not list((tmp_path / "r").glob("*.png")) and (tmp_path / "r/metrics.jsonl").exists()
    timing = plot.read_metrics(tmp_path / "r/timing.jsonl")
    assert all(0.01 < row["peak_gib"] < 1000 for row in timing)


@pytest.mark.parametrize("lengths, width", [([1, 2, 2, 3, 9], 1), ([7], 1), ([1, 4000, 20], 100)])
def test_the_bars_of_lengths_hold_as_many_whole_lengths_each(lengths, width, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    plot.length_histogram(lengths, "unused")
    (ax,) = figures[0].axes
    middles = [bar.get_x() + bar.get_width() / 2 for bar in ax.patches]
    assert len(middles) <= 40 and np.allclose(np.diff(middles), width)
    assert middles[0] - width / 2 == pytest.approx(min(lengths) - 0.5)
    assert sum(bar.get_height() for bar in ax.patches) == len(lengths)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("response length [tokens]", "responses")
    assert all(tick == int(tick) for tick in (*ax.get_xticks(), *ax.get_yticks()))


def test_marks_of_one_length_stand_beside_each_other(monkeypatch):
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    plot.length_histogram([3] * 9 + [4], "unused")
    figures[0].canvas.draw()
    median, high = (text.get_window_extent() for text in figures[0].axes[0].texts)
    assert median.x1 <= high.x0


def test_tensorboard_gets_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = runs.Run(tmp_path / "r", Config(), total=4, trackers=("tensorboard",))
    run.resume(0)
    write(run, range(3))
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("reward/mean")] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"trackers: expected some of tensorboard, .*, got 'mlflow'"):
        runs.Run(tmp_path / "q", Config(), total=4, trackers=("mlflow",))


def test_a_tracker_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"^trackers: wandb is not installed; pip install wandb, or leave"):
        runs.Run(tmp_path / "r", Config(), total=4, trackers=("wandb",))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_are_called_as_they_expect(tmp_path, monkeypatch, name):
    """The client libraries need an account or a server: a recorder stands in their
    place and sees init and log."""
    import types

    seen, ids = [], []

    class Client:
        def log(self, metrics, step):
            seen.append((step, metrics["reward/mean"]))

    def init(**options):
        seen.append((options["project"], options["name"], options["config"]["lr"]))
        ids.append(options.get("id"))
        return Client()

    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
    run = runs.Run(tmp_path / "r", Config(), total=4, trackers=(name,))
    run.resume(0)
    write(run, [0, 1])
    assert seen == [("rft_fn", "r", 0.1), (0, 0.0), (1, 0.1)]
    other = {"trackers": (name,), "project": "sums", "name": "first"}
    runs.Run(tmp_path / "other" / "r", Config(), total=4, **other)
    assert seen[-1] == ("sums", "first", 0.1)
    if name == "wandb":  # runs of one name in two places are two runs
        assert ids[0].startswith("r-") and ids[1].startswith("r-") and ids[0] != ids[1]


def test_results(tmp_path, capsys):
    runs.table({"pass@1": 0.25, "questions": 8}, title="x")
    assert "pass@1     0.2500" in capsys.readouterr().out
    runs.write_results(
        tmp_path / "a" / "r.json", {"config": Config(), "result": {"x": 1.0}}, [{"response": "r"}]
    )
    assert json.loads((tmp_path / "a" / "r.json").read_text())["config"] == {
        "lr": 0.1,
        "steps": 4,
        "names": ["a"],
    }
    assert json.loads((tmp_path / "a" / "r.jsonl").read_text()) == {"response": "r"}
    assert list(runs.track([1, 2], "x")) == [1, 2]


def test_the_place_of_results_is_checked_before_there_are_any(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "rows.jsonl").write_text("{}")  # the data, perhaps
    for path, message in (
        (tmp_path / "x.jsonl", r"out: expected a file such as x.json for the numbers .*x.jsonl"),
        (tmp_path, "out: expected a file"),
        (tmp_path / "file" / "x.json", "out: .*file cannot be made"),
        (tmp_path / "rows", "out: .*rows, where the responses would be written over rows.jsonl; choose"),
    ):
        with pytest.raises(ValueError, match=message):
            runs.check_results(path)
    runs.check_results(tmp_path / "new" / "x.json")
    (tmp_path / "rows.json").write_text("{}")  # earlier results
    runs.check_results(tmp_path / "rows.json")


def test_notes_of_an_error_are_in_its_line():
    error = ValueError("invalid literal\nfor int()")
    error.add_note("raised by the reward 'mine'")
    assert runs.error_line(error) == "invalid literal for int() (raised by the reward 'mine')"
    assert runs.error_line(ValueError()) == "ValueError"


def test_a_foreign_text_in_an_error_or_a_warning_steers_no_terminal(capsys, monkeypatch):
    """A server's answer, a model's response: in a warning, an error, a traceback, and all that is printed."""
    foreign = "\x1b[2J\x1b]52;c;Zm9v\x07\r"
    shown = r"\x1b[2J\x1b]52;c;Zm9v\x07"

    def main(_):
        line = warnings.formatwarning(
            f"server: {foreign}", UserWarning, "x.py", 1
        )  # as it is within a script
        print(line, end="", file=sys.stderr)
        raise OSError(f"server: {foreign}")

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit):
        runs.cli(main, Config)
    assert capsys.readouterr().err == f"warning: server: {shown}\nerror: server: {shown}\n"

    def fails(_):
        raise KeyError("more\x1b") from OSError(foreign)

    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    with pytest.raises(KeyError) as found:
        runs.guard(fails, None)
    sys.excepthook(type(found.value), found.value, found.value.__traceback__)
    trace = capsys.readouterr().err
    assert trace.startswith("OSError: ") and shown in trace and not set("\x1b\x07\r") & set(trace)

    get_fake_strategy().print(foreign, 1, end="!")
    progress.Progress("r", 4).say(foreign)
    runs.table({foreign: 1.0}, title=foreign)
    text = capsys.readouterr().out
    assert text.count(shown) == 4 and text.startswith(rf"{shown}\r 1!") and "\x1b" not in text


def test_options_that_a_script_does_not_read_are_refused():
    runs.without(StrategyConfig(), "engine_batch", "seed")
    with pytest.raises(ValueError, match=r"^strategy.seed: expected 0, .* does not read it, got 3; u"):
        runs.without(StrategyConfig(seed=3), "engine_batch", "seed", instead="use --seed")


def test_seconds_by_phase(tmp_path, monkeypatch):
    run = runs.Run(tmp_path / "r", Config(), total=2)
    run.resume(0)
    clock = iter([0.0, 2.0, 2.0, 5.0, 5.0, 6.0])
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: next(clock))
        for name in ("generate", "train", "generate"):
            with run.phase(name):
                pass
    write(run, [0, 1])
    timing = plot.read_metrics(tmp_path / "r/timing.jsonl")
    assert timing[0]["phase/generate"] == 3.0 and timing[0]["phase/train"] == 3.0
    assert 0 <= timing[0]["idle"] <= 1
    assert not any(name.startswith("phase/") for name in timing[1])
    assert image.imread(plot.phases(tmp_path / "r/timing.jsonl", tmp_path / "p.png")).std() > 0.05
    with (tmp_path / "none.jsonl").open("w") as file:
        file.write('{"step": 0, "seconds": 1.0}\n')
    assert plot.phases(tmp_path / "none.jsonl", tmp_path / "q.png") is None


def test_the_share_of_tokens_that_models_computed(tmp_path, monkeypatch):
    """Between two rows; a step in which none read a pack has no share."""
    monkeypatch.setattr(progress, "COUNTS", counts := Counts(read=50, computed=50))
    run = runs.Run(tmp_path / "r", Config(), total=3)
    run.resume(0)
    counts.read, counts.computed = 150, 75
    write(run, [0, 1])
    counts.read, counts.computed = 160, 85
    write(run, [2])
    timing = plot.read_metrics(tmp_path / "r/timing.jsonl")
    assert [row.get("computed") for row in timing] == [0.25, None, 1.0]


@each(
    ("row", "want"),
    [
        ({"phase/generate": 4, "phase/judge": 1, "phase/train": 3, "phase/sync": 1}, 0.3),  # 1 is of no phase
        ({"phase/generate": 4, "phase/train": 6}, 0.0),
        ({}, 1.0),
        ({"phase/judge": 5, "phase/train": 5, "beside/engine": 8}, 0.2),  # 3 of the 8 beside the judge
        ({"phase/generate": 2, "phase/judge": 2, "phase/train": 6, "beside/engine": 7}, 0.2),
        ({"phase/train": 5, "beside/engine": 11}, 0.0),  # from the step before
        ({"phase/mine": 10}, 0.0),
    ],
)
def test_the_idle_share_is_what_no_computing_phase_and_no_engine_fills(row, want):
    assert progress.idle({"seconds": 10.0, **row}) == pytest.approx(want)


def test_a_phase_ends_once_the_gpu_is_done(monkeypatch):
    """Work on a GPU goes on after the call that began it; on a CPU there is nothing to wait for."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    timing = progress.Timing()

    def synchronize():
        clock[0] += 5.0

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    with timing.phase("sync"):
        clock[0] += 1.0
    assert timing.phases == {"sync": 1.0}
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with timing.phase("train"):
        clock[0] += 1.0
    assert timing.phases == {"sync": 1.0, "train": 6.0}
    with pytest.raises(ValueError, match="x"), timing.phase("judge"):
        raise ValueError("x")  # an error is told at once
    assert timing.phases["judge"] == 0.0


def test_errors_of_the_users_are_one_line(capsys, monkeypatch):
    def main(config):
        raise ValueError("adv: expected\n [T]")

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit) as exit_:
        runs.cli(main, Config)
    assert exit_.value.code == 2 and capsys.readouterr().err == "error: adv: expected [T]\n"
    monkeypatch.setenv("RFT_FN_TRACEBACK", "1")
    with pytest.raises(ValueError):
        runs.cli(main, Config)


@dataclass
class Parts:
    seed: int = 0
    strategy: StrategyConfig = field(default_factory=StrategyConfig)


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ("--fused_linear_logprob --chunk_size 4096", {"fused_linear_logprob": True, "chunk_size": 4096}),
        ("--no-fused-linear-logprob --sp-size=2", {"fused_linear_logprob": False, "sp_size": 2}),
        ("--no_fused_linear_logprob --fsdp", {"fused_linear_logprob": False, "fsdp": True}),
        ("--strategy.zero-stage 3 --zero_stage 2", {"zero_stage": 2}),
        ("--disable_engine_sleep", {"enable_engine_sleep": False}),
        ("--seed 5", {"seed": 0}),  # the script's own
        ("--strategy.seed 5", {"seed": 5}),
    ],
)
def test_options_of_a_part_need_not_name_it(monkeypatch, args, want):
    monkeypatch.setattr("sys.argv", ["x", *args.split()])
    seen = []
    runs.cli(seen.append, Parts)
    (config,) = seen
    assert config.strategy == StrategyConfig(**want)
    assert config.seed == (5 if args == "--seed 5" else 0)


def test_an_unknown_option_is_said_as_it_was_written(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--chunk-sizes", "4"])
    with pytest.raises(SystemExit) as exit_:
        runs.cli(print, Parts)
    assert exit_.value.code == 2 and "--chunk-sizes" in capsys.readouterr().err


WAITS = """
import sys, time
from rft_fn import run
from rft_fn.run import signals

def main(steps):
    if steps:
        signals.enter_steps()
    print("here", flush=True)
    end = time.monotonic() + 300
    while time.monotonic() < end:
        time.sleep(0.01)

sys.argv = ["x"]
with signals.listen():
    run.guard(main, {steps})
"""


def waiting(steps):
    """A process that is in its steps, or before them, and would take minutes."""
    code = WAITS.replace("{steps}", str(steps))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    return process


def test_a_signal_while_the_ranks_ask_each_other_is_not_lost(monkeypatch):
    """It is answered by the next call, with which all ranks stop."""

    def interrupted(x):
        signals._state["asked"] = signal.SIGTERM  # as the handler does
        return [x, 0]

    with signals.listen():
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_gather_object", interrupted)
            assert signals.stopping() == 0
        assert signals.stopping() == signals.asked() == signal.SIGTERM
    assert signals.asked() == 0


def test_a_second_signal_stops_at_once():
    process = waiting(True)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # torchrun's echo of a Ctrl-C
    assert process.stderr.readline() == "SIGINT: finishing the step and saving it; again to stop at once\n"
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130
    assert process.stderr.read() == "stopped at once by SIGINT\n"


def test_a_signal_before_the_first_step_is_one_line():
    process = waiting(False)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130
    assert process.stderr.read() == "stopped by SIGINT before the first step\n"
