"""`auto`: the tokens of a pack and the rows at a time that the forecast of memory has room for."""

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
from each_case import each
from test_house import load_script

import rft_fn as rft
from rft_fn import limits, memory, parsing, strategy
from rft_fn.run import config_file, options, sizes
from rft_fn.strategy import StrategyConfig

GIB = 2**30


@dataclass(frozen=True)
class Config:
    budget: int = sizes.AUTO
    strategy: StrategyConfig = field(default_factory=lambda: StrategyConfig(engine_batch=sizes.AUTO))
    out: str = "nowhere"
    dry_run: bool = False


def decided(cfg, *, gib, monkeypatch, rows=4096, length=64, sampled=True):
    """The numbers, and the models that were asked for, on a machine of so much memory."""
    monkeypatch.setattr(memory, "host_memory", lambda: int(gib * GIB))
    asked = []

    def models():
        asked.append(1)
        return [(rft.model.load("tiny", meta=True), rft.optim.adamw(1e-3))]

    st = rft.strategy.get_fake_strategy()
    found, st = sizes.decided(cfg, st, models, sampled=sampled, length=length, rows=rows)
    assert st.config.engine_batch == found.strategy.engine_batch or not asked
    return found.budget, found.strategy.engine_batch, len(asked)


def total(budget, batch):
    models = rft.model.load("tiny", meta=True), rft.optim.adamw(1e-3)
    config = StrategyConfig(engine_batch=batch)
    return strategy.estimate(config, models, budget=budget, kind="cpu", length=64).total


def test_the_largest_sizes_that_fit_are_taken(monkeypatch):
    """Of memory for one pack and no larger one, and of rows beside it."""
    room = (total(4096, 64) + total(8192, 64)) / 2 / 0.85 / GIB
    budget, batch, _ = decided(Config(), gib=room, monkeypatch=monkeypatch)
    assert budget == 4096 and total(4096, batch) <= 0.85 * room * GIB < total(4096, 2 * batch)
    assert decided(Config(), gib=1000, monkeypatch=monkeypatch)[:2] == (16384, 1024)
    assert decided(Config(), gib=1e-6, monkeypatch=monkeypatch)[:2] == (1024, 64)  # the table says why not
    # no more than a process has of a step
    assert decided(Config(), gib=1000, monkeypatch=monkeypatch, rows=100, length=30)[:2] == (4096, 128)


def test_what_is_given_stays_and_needs_no_forecast(monkeypatch):
    given = Config(budget=7, strategy=StrategyConfig(engine_batch=5))
    assert decided(given, gib=1000, monkeypatch=monkeypatch) == (7, 5, 0)
    assert decided(replace(Config(), budget=3000), gib=1000, monkeypatch=monkeypatch) == (3000, 1024, 1)
    one = Config(strategy=StrategyConfig(engine_batch=5))
    assert decided(one, gib=1000, monkeypatch=monkeypatch) == (16384, 5, 1)


def test_a_forecast_that_lacks_a_part_decides_nothing(monkeypatch):
    estimate = strategy.estimate
    monkeypatch.setattr(strategy, "estimate", lambda *a, **k: replace(estimate(*a, **k), unknown=("x",)))
    assert decided(Config(), gib=1000, monkeypatch=monkeypatch) == (1024, 64, 1)


def test_a_resumed_run_has_the_numbers_of_its_steps(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"budget": 333, "strategy": {"engine_batch": 22}}))
    cfg = Config(out=str(tmp_path))
    assert decided(cfg, gib=1000, monkeypatch=monkeypatch)[:2] == (16384, 1024)  # it has none yet
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert decided(cfg, gib=1000, monkeypatch=monkeypatch) == (333, 22, 0)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_command_line_on_a_gpu_begins_with_auto(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    def sizes_of(*args, name="grpo"):
        config = load_script(name).Config
        cfg = config_file.parse(config, parsing.qualify(args, config), first=sizes.by_device(config))
        return getattr(cfg, "budget", None), cfg.strategy.engine_batch

    auto = "auto"
    assert sizes_of() == ((auto, auto) if gpu else (1024, 512))
    assert sizes_of("--budget", "1024") == ((1024, auto) if gpu else (1024, 512))
    assert sizes_of("--engine-batch", "8") == ((auto, 8) if gpu else (1024, 8))
    (tmp_path / "a.yaml").write_text("budget: 99")
    assert sizes_of("--config", str(tmp_path / "a.yaml")) == ((99, auto) if gpu else (99, 512))
    assert sizes_of(name="multi_turn") == ((auto, auto) if gpu else (4096, 512))
    assert sizes_of(name="dpo") == ((auto, 64) if gpu else (1024, 64))
    assert sizes_of(name="evaluate") == (None, 64)  # it has no forecast
    assert options.ReinforcementRun().budget == 1024  # in Python a number is a number


@each(("given", "line"), [(0, "integer in .1, inf., got 0"), ("all", "integer in .1, inf., got 'all'")])
def test_other_values_are_refused(given, line):
    with pytest.raises(ValueError, match=f"^budget: expected an.*{line}"):
        limits.fields(replace(options.ReinforcementRun(), budget=given))
