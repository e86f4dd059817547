"""The engine of a run is built again when it dies, and the run is the one that it would have been."""

import json

import pytest
import torch
from test_house import load_script as script

import rft_fn as rft
from rft_fn import engine, sync
from rft_fn.run.reward_task import Task
from rft_fn.run.rollout_engine import start_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

SMALL = {
    "prompts": 4,
    "group": 4,
    "steps": 4,
    "save_every": 2,
    "eval_every": 3,
    "eval_prompts": 4,
    "warmup": 1,
}


class Fails(Exception):
    """Raised by an engine."""


class Fragile:
    """Builds engines whose calls number `at` of `name` fail, counted over all of them."""

    def __init__(self, name, at):
        self.name = name
        self.at = at
        self.calls = 0
        self.built = 0
        self.real = engine.get_engine

    def __call__(self, *args):
        self.built += 1
        inner = self.real(*args)

        def breaks(*args, **options):
            self.calls += 1
            if self.calls in self.at:
                raise Fails(f"call {self.calls}")
            return getattr(inner, self.name)(*args, **options)

        return engine.dead_after_failure(inner._replace(**{self.name: breaks}))


def rows(folder):
    return (folder / "metrics.jsonl").read_bytes(), (folder / "trajectories.jsonl").read_bytes()


def run(name, folder, **options):
    module = script(name)
    module.main(module.Config(**SMALL, **options, out=str(folder)))
    return rows(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run("grpo", tmp_path_factory.mktemp("runs") / "run", canary=False)


@pytest.mark.usefixtures("whole_run")
def test_a_run_with_a_canary_has_the_same_rows(undisturbed, tmp_path, capsys):
    """The canary changes the engine's weights for a moment and nothing else."""
    assert run("grpo", tmp_path / "run") == undisturbed
    assert "canary: engine and trainer differ" in capsys.readouterr().out


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(
    ("name", "at", "canaries"),
    [("generate", {3}, 2), ("generate", {6, 8}, 2), ("load", {1}, 1), ("load", {4}, 2)],
)
def test_a_run_whose_engine_dies_has_the_same_rows(
    undisturbed, tmp_path, monkeypatch, capsys, name, at, canaries
):
    """Its call number 8 is within the canary of the engine that takes the place of the first."""
    fragile = Fragile(name, at)
    monkeypatch.setattr(engine, "get_engine", fragile)
    assert run("grpo", tmp_path / "run") == undisturbed
    assert fragile.built == 1 + len(at)
    out = capsys.readouterr().out
    assert out.count(f"engine: it died in {name} (Fails: call") == len(at)
    assert out.count("canary: engine and trainer differ") == canaries


@pytest.mark.usefixtures("whole_run")
def test_an_engine_that_stays_dead_ends_the_run_saved_and_the_same_command_continues(
    undisturbed, tmp_path, monkeypatch
):
    """It dies in the rollout of the last step, or in the sync before that, and no other one lives."""
    for name, first in (("generate", 7), ("load", 5)):
        folder = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(engine, "get_engine", Fragile(name, set(range(first, 100))))
            line = r"^engine hf: expected one that stays alive, .*; 3 steps are saved, the same command"
            with pytest.raises(engine.EngineDead, match=line):
                run("grpo", folder, rebuilds=1)
        assert (folder / "checkpoints" / "step_00000003").is_dir()
        got = [json.loads(x) for x in run("grpo", folder, rebuilds=1)[0].splitlines()]
        want = [json.loads(x) for x in undisturbed[0].splitlines()]
        lost = [n for a, b in zip(got, want) for n in b if n not in a]
        assert set(lost) <= {"eval/mean", "eval/task:sort_digits"}  # an evaluation that no engine could make
        for a, b in zip(got, want, strict=True):
            assert a == {n: x for n, x in b.items() if n in a}


def test_bad_weights_and_refused_requests_build_no_engine(monkeypatch):
    """Another engine would not change them."""
    made = []
    cfg = script("grpo").Config(model="tiny", canary=False)
    st = rft.strategy.get_fake_strategy()
    tokenizer = rft.model.load_tokenizer("tiny")
    task = Task(tokenizer, None, None, None)

    def build():
        made.append(engine.get_engine(None, "tiny", tokenizer))
        return made[-1]

    eng, push = start_engine(cfg, st, task, "tiny", build=build)
    _, state = st.init(rft.model.load("tiny"), rft.optim.adamw(0.1))
    push(state, version=0)
    with pytest.raises(engine.BadRequest):
        eng.generate([[]], [1], sampling=rft.Sampling())
    state.params["model.norm.weight"].data[0] = torch.nan
    with pytest.raises(sync.ManifestError, match=r"model\.norm\.weight: expected finite numbers"):
        push(state, version=1)
    assert len(made) == 1
