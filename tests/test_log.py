"""What a run leaves behind: rows that can be cut back, refusals before anything is
computed, pictures that show the data."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from matplotlib import image

from rft_fn import log, plot
from rft_fn.reward import Judged
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config:
    lr: float = 0.1
    steps: int = 4
    names: tuple[str, ...] = ("a",)


def write(run, steps):
    for step in steps:
        run.write(step, {"reward/mean": step / 10, "loss": 1.0, "policy/entropy": float("nan")}, tokens=100)


def test_rows_and_their_cut(tmp_path, capsys):
    run = log.Run(tmp_path / "r", Config(), total=4)
    run.resume(0)
    write(run, range(4))
    rows = plot.read_metrics(run.folder / "metrics.jsonl")
    assert (
        [r["step"] for r in rows] == [0, 1, 2, 3]
        and rows[2]["reward/mean"] == 0.2
        and rows[0]["policy/entropy"] is None
    )
    assert "seconds" not in rows[0]  # time is in a file of its own, so that equal runs have equal metrics
    assert json.loads((run.folder / "timing.jsonl").read_text().splitlines()[1])["tokens_per_s"] > 0
    with (run.folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 4, "rew')  # a kill in the middle of a line
    again = log.Run(tmp_path / "r", Config(), total=4)
    again.resume(2)
    assert "going on after step 2" in capsys.readouterr().out
    write(again, [2])
    assert [r["step"] for r in plot.read_metrics(run.folder / "metrics.jsonl")] == [0, 1, 2]


def test_another_configuration_is_refused(tmp_path):
    run = log.Run(tmp_path / "r", Config(), total=4)
    write(run, [0])
    with pytest.raises(
        ValueError, match=r"holds a run with other arguments: lr was 0.1 and is 0.2; give --out another"
    ):
        log.Run(tmp_path / "r", Config(lr=0.2), total=4)
    with pytest.raises(ValueError, match="steps was 4 and is 9"):
        log.Run(tmp_path / "r", Config(steps=9), total=9)
    log.Run(tmp_path / "r", Config(steps=9), total=9, free=("steps",))


def test_a_run_without_a_step_has_claimed_nothing(tmp_path):
    """A mistake in an argument is found after the folder is made; the mended command goes to the same one."""
    log.Run(tmp_path / "r", Config(lr=-1), total=4)
    run = log.Run(tmp_path / "r", Config(), total=4)
    write(run, [0])
    assert json.loads((run.folder / "config.json").read_text())["lr"] == 0.1


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"run folder .*file/r cannot be written: .*; choose another with --out"
    ):
        log.Run(tmp_path / "file" / "r", Config(), total=4)


def test_other_ranks_write_nothing(tmp_path):
    run = log.Run(tmp_path / "r", Config(), total=4, rank=1)
    run.resume(0)
    write(run, [0])
    run.finish()
    assert not (tmp_path / "r").exists()


def test_trajectories_are_the_first_of_each_group(tmp_path):
    class Prompt:
        def __init__(self, text):
            self.text = text

    class Batch:
        mask = torch.ones(4, 3)

    reward = torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    run = log.Run(tmp_path / "r", Config(), total=4)
    run.resume(0)
    run.trajectories(
        3, [Prompt("p"), Prompt("q")], Batch(), Judged(reward, {"exact": reward}, ["a", "b", "c", "d"])
    )
    rows = plot.read_metrics(run.folder / "trajectories.jsonl")
    assert rows[1] == {"step": 3, "prompt": "q", "response": "c", "reward": 0.5, "exact": 0.5}


def test_finish_draws_what_was_written(tmp_path, capsys):
    run = log.Run(tmp_path / "r", Config(), total=30)
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


def test_pictures_go_where_they_are_asked_for(tmp_path):
    """log_dir moves them, plot_every draws more of them; the files of rows stay in the folder."""
    many = [[0] * n for n in (1, 2, 5)]
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(x), dtype=torch.bool) for x in many], batch_first=True
    )
    judged = Judged(torch.zeros(1, 3), {}, ["a", "b", "c"])
    run = log.Run(tmp_path / "r", Config(), total=6, log_dir=tmp_path / "p", plot_every=3)
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


def test_lengths(tmp_path):
    path = plot.length_histogram([1, 2, 2, 3, 9], tmp_path / "l.png")
    assert image.imread(path).std() > 0.05


def test_tensorboard_gets_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = log.Run(tmp_path / "r", Config(), total=4, trackers=("tensorboard",))
    run.resume(0)
    write(run, range(3))
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("reward/mean")] == [0, 1, 2]
    with pytest.raises(
        ValueError, match="trackers: expected some of tensorboard, wandb, trackio, got 'mlflow'"
    ):
        log.Run(tmp_path / "q", Config(), total=4, trackers=("mlflow",))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_are_called_as_they_expect(tmp_path, monkeypatch, name):
    """The client libraries need an account or a server: a recorder stands in their
    place and sees init and log."""
    import sys
    import types

    seen = []

    class Client:
        def log(self, metrics, step):
            seen.append((step, metrics["reward/mean"]))

    def init(**options):
        seen.append((options["project"], options["name"], options["config"]["lr"]))
        return Client()

    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
    run = log.Run(tmp_path / "r", Config(), total=4, trackers=(name,))
    run.resume(0)
    write(run, [0, 1])
    assert seen == [("rft_fn", "r", 0.1), (0, 0.0), (1, 0.1)]


def test_results(tmp_path, capsys):
    log.table({"pass@1": 0.25, "questions": 8}, title="x")
    assert "pass@1     0.2500" in capsys.readouterr().out
    log.write_results(
        tmp_path / "a" / "r.json", {"config": Config(), "result": {"x": 1.0}}, [{"response": "r"}]
    )
    assert json.loads((tmp_path / "a" / "r.json").read_text())["config"] == {
        "lr": 0.1,
        "steps": 4,
        "names": ["a"],
    }
    assert json.loads((tmp_path / "a" / "r.jsonl").read_text()) == {"response": "r"}
    assert list(log.track([1, 2], "x")) == [1, 2]


def test_errors_of_the_users_are_one_line(capsys, monkeypatch):
    def main(config):
        raise ValueError("adv: expected\n [T]")

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit) as exit_:
        log.cli(main, Config)
    assert exit_.value.code == 2 and capsys.readouterr().err == "error: adv: expected [T]\n"
    monkeypatch.setenv("RFT_FN_TRACEBACK", "1")
    with pytest.raises(ValueError):
        log.cli(main, Config)


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
        ("--seed 5", {"seed": 0}),  # the script's own
        ("--strategy.seed 5", {"seed": 5}),
    ],
)
def test_options_of_a_part_need_not_name_it(monkeypatch, args, want):
    monkeypatch.setattr("sys.argv", ["x", *args.split()])
    seen = []
    log.cli(seen.append, Parts)
    (config,) = seen
    assert config.strategy == StrategyConfig(**want)
    assert config.seed == (5 if args == "--seed 5" else 0)


def test_an_unknown_option_is_said_as_it_was_written(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--chunk-sizes", "4"])
    with pytest.raises(SystemExit) as exit_:
        log.cli(print, Parts)
    assert exit_.value.code == 2 and "--chunk-sizes" in capsys.readouterr().err
