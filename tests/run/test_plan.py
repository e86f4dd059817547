"""`rft plan`: the simulation against what it conserves and closed forms, and how commands are read."""

import dataclasses
import json
import math
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from rft_fn.run.samples import QUANTILES
from rft_fn.tools import commands
from rft_fn.tools.page.recorded import Recorded
from rft_fn.tools.plan import cards, lengths, measured, planned_command, simulation, summary_table
from rft_fn.tools.plan.simulation import PHASES, Rates, Setting, engine_seconds, simulate

RATES = Rates(
    step=0.01, row=0.002, cache=1e-5, prefill=1e-4, token=3e-4, score=1e-4, scoring=0.03, pack=0.01,
    network=0.02, update=0.05, judge=0.1, judge_row=0.01, push=0.03, deliver=0.02, load=0.04,
    reply=1e-5, gather=1e-6, plan=1e-4, other=0.02, other_row=1e-3, save=0.2,
)  # fmt: skip
X = Setting(steps=5, prompts=6, group=4, max_new=40, prompt_tokens=10, save_every=2)
LAW = lengths.lognormal(12, 0.8)


@some.composite
def any_setting(draw):
    servers = draw(some.booleans())
    ranks = draw(some.integers(1, 3))
    ahead = draw(some.integers(0, 2))
    return dataclasses.replace(
        X,
        ahead=ahead,
        partial=0 if ahead else draw(some.sampled_from([0, 5, 17])),
        ranks=ranks,
        servers=servers,
        engines=draw(some.integers(1, 4)) if servers else ranks,
        rows=draw(some.sampled_from([2, 7, 64])),
        updates=draw(some.integers(1, 3)),
        scores=draw(some.integers(0, 2)),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(x=any_setting(), seed=some.integers(0, 9))
def test_time_is_conserved_and_weights_come_before_their_use(x, seed):
    t = simulate(x, RATES, LAW, seed=seed)
    # the trainer's phases fill its time, without a gap
    assert np.array_equal(t.begin.ravel()[1:], t.end.ravel()[:-1]) and (t.end >= t.begin).all()
    assert t.step_seconds.sum() == pytest.approx(t.wall) == sum(t.phase_seconds().values()) * x.steps
    # an engine does one thing after the other, and none before it has the weights for it
    spans = t.sampled
    assert (spans[1:, :, 0] >= spans[:-1, :, 1] - 1e-9).all()
    assert (spans[..., 1] > spans[..., 0] - 1e-9).all() and (t.engine_busy <= t.wall + 1e-9).all()
    for (step, version), begins in zip(zip(t.step_of, t.version), spans[..., 0]):
        assert (begins >= t.loaded[version] - 1e-9).all() and version == max(0, step - x.ahead)
    # a step learns from what has ended, of its version
    last = {step: ends.max() for step, ends in zip(t.step_of, spans[..., 1])}
    assert all(t.end[step, 0] >= last[step] - 1e-9 for step in range(x.steps))
    if x.partial:
        assert (t.rows >= x.group).all() and t.rows.sum() <= x.steps * x.prompts * x.group
    else:
        assert t.lag.tolist() == [min(step, x.ahead) for step in range(x.steps)]
        assert (t.rows == x.prompts * x.group).all()


def test_constant_lengths_have_a_closed_form():
    """All rows of an engine end at once, so each phase is a product."""
    x = dataclasses.replace(X, ranks=2, engines=2, budget=100, scores=1)
    t = simulate(x, RATES, lengths.read("constant:20"))
    rows, own = 24, 12  # in all, of an engine
    decode = 20 * (RATES.step + own * RATES.row) + RATES.cache * own * (20 * 10 + 20 * 21 / 2)
    tokens = rows * 20 + 6 * 10  # prompts once
    packs = math.ceil(tokens / 200)
    expected = {
        "generate": decode + RATES.prefill * 3 * 10,
        "gather": RATES.gather * rows * 30 + RATES.plan * rows,
        "judge": RATES.judge + RATES.judge_row * own,
        "score": packs * RATES.pack / 3 + RATES.score * tokens / 2 + RATES.scoring,
        "train": packs * RATES.pack + RATES.token * tokens / 2 + RATES.update,
        "sync": RATES.push + 2 * RATES.deliver + RATES.load,
        "other": RATES.other + RATES.other_row * rows,
        "save": RATES.save * 2 / 5,
    }
    assert t.phase_seconds() == pytest.approx(expected, rel=1e-12)


def test_servers_take_weights_when_no_server_samples():
    """One of two has more rows and ends later; both are loaded after that."""
    x = dataclasses.replace(X, ahead=1, servers=True, engines=2, prompts=1, group=3, steps=4)
    t = simulate(x, RATES, lengths.read("constant:20"))
    first, second = t.sampled[1, :, 1]
    assert first > second and np.ptp(t.loaded, axis=1).max() == 0 and t.loaded[2].min() >= first


def test_one_step_ahead_takes_the_longer_of_both_sides():
    alone = simulate(X, RATES, lengths.read("constant:20"))
    phases = alone.phase_seconds()
    beside = simulate(
        dataclasses.replace(X, steps=60, ahead=1, save_every=0), RATES, lengths.read("constant:20")
    )
    engine = phases["generate"] + RATES.deliver + RATES.load
    trainer = sum(phases[name] for name in PHASES if name not in ("generate", "sync", "save")) + RATES.push
    assert beside.step_seconds[5:-5].mean() == pytest.approx(max(engine, trainer), rel=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    length=some.lists(some.integers(1, 30), min_size=1, max_size=25),
    rows=some.integers(1, 8),
    engines=some.integers(1, 3),
)
def test_an_engine_decodes_as_one_step_after_the_other_does(length, rows, engines):
    owner = np.arange(len(length)) % engines
    context = np.arange(len(length)) * 1.5
    found = engine_seconds(owner, np.array(length, float), context, rows=rows, engines=engines, rates=RATES)
    for engine in range(engines):
        waiting = [(n, c) for n, c, own in zip(length, context, owner) if own == engine]
        live, seconds = [], 0.0
        while waiting or live:
            while waiting and len(live) < rows:
                live.append([*waiting.pop(0), 0])
            for row in live:
                row[2] += 1
            cached = sum(c + done for _, c, done in live)
            seconds += RATES.step + RATES.row * len(live) + RATES.cache * cached
            live = [row for row in live if row[2] < row[0]]
        assert found[engine] == pytest.approx(seconds, rel=1e-9)


def test_failures_cost_what_draws_of_them_do():
    rng = np.random.default_rng(0)
    total = []
    for _ in range(4000):
        seconds, done = 0.0, 0
        while done < 10:
            count = min(4, 10 - done)
            failed = rng.exponential(30.0)
            seconds += failed + 5 if failed < count * 3 else count * 3
            done += count if failed >= count * 3 else 0
        total.append(seconds)
    found = simulation.with_failures(3.0, steps=10, between=30.0, restart=5.0, save_every=4)
    assert found == pytest.approx(np.mean(total), rel=0.02)
    assert simulation.with_failures(3.0, steps=10, between=1e9, restart=5.0, save_every=4) == pytest.approx(
        30
    )
    assert simulation.with_failures(3e9, steps=10, between=1.0, restart=5.0, save_every=4) == math.inf


def test_a_law_gives_its_quantiles_and_its_mean():
    law = lengths.lognormal(100, 0.5)
    drawn = lengths.draw(law, np.random.default_rng(0), 4000, 16, most=10**6)
    assert np.median(drawn) == pytest.approx(100, rel=0.03)
    assert drawn.mean() == pytest.approx(100 * math.exp(0.125), rel=0.03)
    assert lengths.mean(law, most=10**6) == pytest.approx(100 * math.exp(0.125), rel=0.01)
    alike = np.log(drawn).mean(1).var() / np.log(drawn).var()  # 0.3 of the variance, and a 16th of the rest
    assert alike == pytest.approx(0.3 + 0.7 / 16, rel=0.1)
    assert lengths.draw(law, np.random.default_rng(0), 4, 4, most=9).max() == 9


def test_the_law_of_runs_is_that_of_the_one_with_most_responses():
    """Of exponential lengths, by the few quantiles that a run keeps of each step."""
    rng = np.random.default_rng(0)

    def run(prompts, mean):
        steps = [np.quantile(rng.exponential(mean, prompts * 8), QUANTILES) for _ in range(40)]
        empty = Recorded(Path(), f"{prompts}", {}, [], [], [], [], [], [])
        config = {"prompts": prompts, "group": 8, "max_new": 900}
        return empty._replace(config=config, distributions=[{"length": x.tolist()} for x in steps])

    law = lengths.of_runs([run(4, 30.0), run(64, 50.0)])
    assert law.source == "as in 64"
    assert lengths.mean(law, most=900) == pytest.approx(50, rel=0.03)
    drawn = [lengths.draw(law, rng, 64, 8, most=900).max() for _ in range(40)]
    assert np.mean(drawn) == pytest.approx(50 * np.log(512), rel=0.1)


@pytest.mark.parametrize("servers", [[], ["http://a:1", "http://b:1"]])
def test_rates_of_runs_are_those_that_made_their_rows(tmp_path, servers):
    """Two folders as a run writes them, of other sizes, whose seconds are exact."""
    for name, prompts, most in (("a", 4, 40), ("b", 16, 60)):
        rows, own = prompts * 4, prompts * 4 * 20.0
        engine = 0.01 * most + 0.002 * own / max(len(servers), 1)
        read = own + prompts * 10
        train, score = 0.3 + 0.001 * read, 0.02 + 0.0004 * read
        step = {"phase/generate": engine, "phase/train": train, "phase/judge": 0.2, "phase/sync": 0.05}
        total = engine + train + score + 0.25 + 0.5
        step |= {
            "phase/score": score,
            "seconds": total,
            "tokens_per_s": (own + rows * 10) / total,
            "beside/engine": 0.0,
            "idle": 0.0,
        }
        folder = tmp_path / name
        folder.mkdir()
        config = {"prompts": prompts, "group": 4, "epochs": 1, "minibatches": 1, "kl": 0.1}
        (folder / "config.json").write_text(
            json.dumps(config | {"strategy": {"engine_batch": 64, "engine_servers": servers}})
        )
        metric = {"rollout/length_mean": 20.0, "rollout/length_max": most, "train/rows": rows}
        for file, row in (("timing", step), ("metrics", metric), ("distributions", {"length": [9.0] * 7})):
            each = [{"step": i, **row} for i in range(3)]
            if file == "timing":
                each[2] |= {"phase/save": 0.7, "seconds": total + 0.7}
                each[2]["tokens_per_s"] *= total / (total + 0.7)
            lines = [json.dumps(x) for x in each]
            (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    found = measured.rates([tmp_path / "a", tmp_path / "b"])
    expected = {"step": 0.01, "row": 0.002, "update": 0.3, "token": 0.001, "save": 0.7}
    expected |= {"push": 0.0, "load": 0.05} if servers else {"push": 0.05, "load": 0.0}
    expected |= {"score": 0.0004, "scoring": 0.02}
    got = dataclasses.asdict(found.rates)
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    for name, seconds in (("judge", 0.2), ("other", 0.5)):
        assert got[name] + got[f"{name}_row"] * 16 == pytest.approx(seconds, rel=1e-6)
    assert (found.prompt_tokens, found.learned) == pytest.approx((10, 1))


def test_seconds_that_vary_are_predicted_by_their_mean():
    """Steps of one setting differ by a factor of ten, as those of a server do that takes requests late."""
    rng = np.random.default_rng(0)
    noise = rng.choice([0.2, 2.0], 400, p=[5 / 9, 4 / 9])
    a, b = np.ones(400), np.repeat([10.0, 40.0], 200)
    p, q = measured._fit(0.5 * a + 0.02 * b, a, b)
    assert (p, q) == pytest.approx((0.5, 0.02))
    y = (0.5 * a + 0.02 * b) * noise
    p, q = measured._fit(y, a, b)
    fit = p * a + q * b
    assert [fit[b == x].mean() for x in (10, 40)] == pytest.approx([y[b == x].mean() for x in (10, 40)])


def test_the_runs_that_are_measured_are_small_and_of_the_trainers_own_options(tmp_path, monkeypatch):
    words = []

    def run(command, **_):
        words.append(command)
        return subprocess.CompletedProcess(command, len(words) > 2, "", "warning: x\nerror: no such data")

    monkeypatch.setattr(measured.subprocess, "run", run)
    planned = planned_command.read(
        "rft run grpo --prompts 500 --group 8 --ahead 2 --steps 90 --lr 0.5", on_gpu=False
    )
    assert measured.measure(planned, tmp_path) == [tmp_path / "few", tmp_path / "more"]
    made = [planned_command.read(shlex.join(command[1:]), on_gpu=False).config for command in words]
    assert [(cfg.prompts, cfg.group) for cfg in made] == [(4, 8), (32, 8)]
    assert all((cfg.ahead, cfg.lr, cfg.steps, cfg.rollouts_every) == (0, 0.5, 6, 0) for cfg in made)
    with pytest.raises(ValueError, match="expected a short run of grpo to end, got 'no such data'"):
        measured.measure(planned, tmp_path)


def test_a_plan_on_cards_reads_the_roles(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        "[roles.engines]\ncommand = 'serve --tensor-parallel-size 2 --port {port}'\nreplicas = 3\n"
        "[roles.rewards]\ncommand = 'rewards'\n"
        "[roles.trainer]\ncommand = '''torchrun --nnodes=2 --nproc-per-node 4 -m rft_fn run grpo\n"
        "--max-new 64 --engine-type openai --engine-servers {engines.urls} --ahead 1 --steps 7 --kl 0.1'''\n"
    )
    planned = planned_command.read(str(file), on_gpu=True)
    assert (planned.ranks, planned.servers, planned.gpus_of_engine, planned.others) == (8, 3, 2, ["rewards"])
    x = planned_command.setting(planned, steps=20, prompt_tokens=5)
    assert (x.steps, x.ahead, x.scores, x.engines, x.budget) == (7, 1, 2, 3, 16384)
    commands.main(["plan", str(file), "--on", "16xH100", "64xB200", "--price", "2", "--failures", "100"])
    out = capsys.readouterr().out
    assert out.count("plan of grpo") == 2 and "GPUs without a role" in out and "memory of rewards" in out
    bytes_of = summary_table.bytes_between(x, simulate(x, RATES, LAW), parameters=1000, itemsize=2)
    assert bytes_of["weights, trainer to engines"] == 6000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.toml"], "nothing.toml: expected a file of roles"),
        (["rft run sft"], "command: expected a script that samples, as grpo or ppo, got sft"),
        (["rft run grpo --stesp 3"], "did you mean --steps"),
        (["vllm serve"], "command: expected a .toml file of roles, rft run SCRIPT or a .py file"),
        (["rft run 'grpo"], "command: expected words as of a shell"),
        (["rft run grpo", "--on", "8xP100"], "on: expected a card as 64xH100, of A100, H100"),
        (["torchrun --nproc-per-node 8 -m rft_fn run grpo", "--on", "4xH100"], "on: expected 8 GPUs or more"),
        (["torchrun --nproc-per-node gpu -m rft_fn run grpo", "--on", "H100"], "--nproc-per-node, got"),
        (["rft run grpo", "--lengths", "normal:3"], "lengths: expected lognormal:MEDIAN:SIGMA"),
        (["rft run grpo", "--on", "H100", "--measured", "x"], "measured: expected none with --on, got x"),
        (["rft run grpo", "--price", "3"], "on: expected GPUs, as failures and price are of them, got none"),
        (["rft run grpo", "--picture", "a.gif"], "picture: expected a .png, got a.gif"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr(measured, "measure", lambda *_: pytest.fail("training time"))
    with pytest.raises(SystemExit, match="2"):
        commands.main(["plan", *words])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_each_card_has_what_a_plan_reads():
    for name in ("A100", "H100", "H200", "B200", "L40S"):
        on = cards.machine(name)
        assert {*on.card} == {"memory", "flops", "bandwidth", "inside", "outside"}
        assert all(x > 0 for x in on.card.values())
