"""An engine in this process that hangs: interrupted where it can be, else the process ends and says so."""

import os
import time

import pytest
import tiny
import torch
from script_runs import alone
from test_house import load_script

import rft_fn as rft
from rft_fn import engine
from rft_fn.engine import lifetime
from rft_fn.engine.hf import sampler
from rft_fn.engine.requests import BadRequest

pytestmark = pytest.mark.slow

PROMPTS, KEYS, SAMPLING = [[3, 4, 5], [6, 7]], [1, 2], rft.Sampling(max_new=3)


def made(seconds=10.0, **options):
    return engine.get_engine(engine.EngineConfig(timeout=seconds, **options), tiny.llama(), tiny.tokenizer())


@pytest.fixture
def hanging(monkeypatch):
    """The number of the call of an hf engine that hangs in Python; the first is 0."""
    responses, calls = sampler.Sampler.responses, []

    def hang_at(number):
        def responses_or_not(self, *args):
            calls.append(0)
            if len(calls) - 1 == number:
                time.sleep(600)
            return responses(self, *args)

        monkeypatch.setattr(sampler.Sampler, "responses", responses_or_not)

    return hang_at


def test_a_call_that_hangs_in_python_is_interrupted_and_leaves_a_dead_engine(hanging):
    hanging(1)
    eng = made(3.0)
    want = eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^engine hf, generate: expected a result within 3 s"):
        eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    assert time.monotonic() - began < 60 and not eng.status()["alive"]
    with pytest.raises(engine.EngineDead, match=r"failed in generate .*expected a result within 3 s"):
        eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    eng.close()
    assert torch.equal(made().generate(PROMPTS, KEYS, sampling=SAMPLING).tokens, want.tokens)


def test_loads_and_scores_have_the_limit_too():
    def slow():
        yield from list(tiny.llama().named_parameters())[:1]
        time.sleep(600)

    record = engine.hf(tiny.llama(), tiny.tokenizer())
    eng = lifetime.supervised(lambda: record, timeout=0.5)
    with pytest.raises(TimeoutError, match=r"^engine hf, load: expected"):
        eng.load(slow(), version=1)
    assert not eng.status()["alive"]
    slow_scores = record._replace(score=lambda *_, **__: time.sleep(600))
    stuck = lifetime.supervised(lambda: slow_scores, timeout=0.2)
    with pytest.raises(TimeoutError, match=r"^engine hf, score: expected a result within 0.2 s"):
        stuck.score(None)


def test_on_several_processes_a_load_has_no_limit_but_theirs():
    """It puts tensors together with the others, who may come later."""

    def late():
        time.sleep(0.4)
        yield from tiny.llama().named_parameters()

    record = engine.hf(tiny.llama(), tiny.tokenizer())
    eng = lifetime.supervised(lambda: record, timeout=0.2, loads_together=True)
    assert eng.load(late(), version=1).version == 1


def test_a_refused_request_and_the_rest_pass_through():
    eng = made()
    with pytest.raises(BadRequest, match="in prompt 0"):
        eng.generate([[]], [1], sampling=SAMPLING)
    whole = eng.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=[1, 2])
    assert whole.mask.sum(-1).tolist() == [1, 2] and eng.status()["alive"]


def test_a_run_whose_engine_hangs_in_python_has_the_same_rows(hanging, tmp_path):
    """The engine is built again, and repeats the rollout."""
    few = {"prompts": 4, "group": 4, "steps": 3, "eval_every": 9, "eval_prompts": 4}
    script = load_script("grpo")
    for name, at in (("whole", -1), ("hung", 5)):
        hanging(at)
        timeout = rft.strategy.StrategyConfig(engine_timeout=30, engine_batch=512)
        script.main(script.Config(out=str(tmp_path / name), strategy=timeout, **few))
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "hung" / file).read_bytes()


HANGS = """
import sys, faulty, test_engine_deadline, threading
from rft_fn.engine import lifetime, time_limit

time_limit.GRACE = 0.3

def stuck(*args, **how):
    faulty.hang(keeps_the_lock=sys.argv[1] == "lock")

def call():
    with lifetime.saving(lambda: "; all is saved"):
        eng.generate([[3]], [1], sampling=test_engine_deadline.SAMPLING)

made = test_engine_deadline.made()._replace(generate=stuck)
eng = lifetime.supervised(lambda: made, timeout=1.0)
if sys.argv[1] == "thread":
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
call()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_call_that_hangs_in_native_code_ends_the_process_with_its_stack_and_a_line(where):
    found = alone(HANGS, where)
    assert found.returncode == 2 and " in stuck" in found.stderr and " in hang" in found.stderr
    line = found.stderr.strip().splitlines()[-1]
    assert line.startswith("error: engine hf, generate: expected a result within 1 s, the time of a call")
    assert line.endswith("(it cannot be interrupted); all is saved")


def test_a_call_that_lets_no_thread_run_ends_the_process_with_its_stack():
    found = alone(HANGS, "lock")
    assert found.returncode == 1 and "Timeout" in found.stderr and " in stuck" in found.stderr


RUN = """
import sys, faulty
from test_house import load_script
import rft_fn as rft
from rft_fn.engine import lifetime, time_limit
from rft_fn.engine.hf import sampler

time_limit.GRACE = 0.3
limit, responses, calls = lifetime.time_limit, sampler.Sampler.responses, []

def short(seconds, name, **how):
    # for the call that hangs alone, so that a slow machine does not end another one
    if name().endswith("generate") and len(calls) == int(sys.argv[2]) - 1:
        seconds = 1.0
    return limit(seconds, name, **how)

lifetime.time_limit = short

def stuck(self, *args):
    calls.append(0)
    if len(calls) == int(sys.argv[2]):
        faulty.hang()
    return responses(self, *args)

sampler.Sampler.responses = stuck
few = {"prompts": 4, "group": 4, "steps": 4, "save_every": 100, "eval_every": 9, "eval_prompts": 4}
script = load_script("grpo")
batch = rft.strategy.StrategyConfig(engine_batch=512)
rft.run.guard(script.main, script.Config(out=sys.argv[1], strategy=batch, **few))
"""


def test_a_run_whose_engine_hangs_in_native_code_is_saved_and_the_same_command_continues(tmp_path):
    """Nothing was saved until then: the canary and the first evaluation make three calls, each step one."""
    found = alone(RUN, tmp_path / "run", 6)
    assert found.returncode == 2, found.stderr
    line = found.stderr.strip().splitlines()[-1]
    assert line.endswith("; 2 steps are saved, the same command continues from there")
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_00000002"]
    assert alone(RUN, tmp_path / "run", 0).returncode == 0
    assert alone(RUN, tmp_path / "whole", 0).returncode == 0
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        got = (tmp_path / "run" / file).read_text()
        assert got == (tmp_path / "whole" / file).read_text()


def test_a_save_that_fails_is_shown_and_the_process_ends():
    broken = HANGS.replace('lambda: "; all is saved"', "lambda: 1 / 0")
    found = alone(broken, "main")
    assert found.returncode == 2 and "ZeroDivisionError" in found.stderr
    assert found.stderr.strip().endswith("(it cannot be interrupted)")


def test_the_line_of_a_reward_is_its_own():
    limit = lifetime.time_limit(0.1, lambda: "reward")
    with pytest.raises(TimeoutError, match="the limit for a batch, got none; make it faster"), limit:
        time.sleep(600)
