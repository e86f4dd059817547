"""Agents that are run: their rows and rewards, and what becomes of those that crash, hang, fork or flood."""

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from endpoints import TOK, Says

import rft_fn as rft
from rft_fn.collect.agents import Agents, play_agents
from rft_fn.environment import Renderer
from rft_fn.types import Sampling

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install rft-fn[serve]")

from rft_fn.tools.serving.model_server import ModelEndpoint

AGENT = """import http.client, json, os, sys, time
from urllib.parse import urlsplit

task = json.load(open(os.environ["RFT_TASK"]))
messages = task["messages"]


def post(url, body, token="none"):
    at = urlsplit(url)
    line = http.client.HTTPConnection(at.hostname, at.port)
    line.request("POST", at.path, json.dumps(body), {"Authorization": "Bearer " + token})
    return json.loads(line.getresponse().read())


def ask():
    body = {"messages": messages, "model": "policy"}
    found = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    messages.append(found["choices"][0]["message"])
    return messages[-1]["content"]


def reward(x):
    post(os.environ["RFT_REWARD_URL"], {"reward": x}, os.environ["RFT_REWARD_TOKEN"])


def then(text):
    messages.append({"role": "user", "content": text})


"""


class Prompt(SimpleNamespace):
    messages = None


@pytest.fixture(scope="module")
def front():
    made = ModelEndpoint(Renderer(TOK), Sampling(max_new=8), window=2000)
    yield made
    made.close()


def played(front, tmp_path, body, *, n=2, prompts=2, rewarded=True, told=None, **how):
    """What a program whose last lines are `body` plays."""
    path = tmp_path / "agent.py"
    path.write_text(AGENT + body)
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig())
    engine = Says()
    given = {"seconds": 20.0, "failed": -1.0} | how
    found = play_agents(
        engine,
        st,
        front,
        Agents((sys.executable, "-S", "-E", str(path)), **given),
        [Prompt(text=f"question {i}") for i in range(prompts)],
        [11, 12][:prompts],
        n=n,
        sampling=Sampling(max_new=8),
        max_turns=4,
        max_tokens=200,
        pad=0,
        rewarded=rewarded,
        warn=(told if told is not None else []).append,
    )
    return found, engine


def test_an_agent_of_two_turns_makes_a_row_of_two_turns(front, tmp_path):
    body = "ask(); then('sure?'); ask(); reward(len(messages))\n"
    found, engine = played(front, tmp_path, body)
    assert found.reward.tolist() == [[4, 4], [4, 4]] and found.numbers["turns"].tolist() == [2] * 4
    assert found.episode.tolist() == [0, 1, 2, 3] and found.rollout.group.tolist() == [0, 0, 1, 1]
    for i, tokens in enumerate(found.rollout.tokens.tolist()):
        mask = found.rollout.mask[i].tolist()
        assert [t for t, m in zip(tokens, mask) if m] == engine.said * 2
    asked = [key for _, keys, *_ in engine.asked for key in keys]
    want = [rft.rng.fold_in(key, j, 0, turn) for key in (11, 12) for j in range(2) for turn in range(2)]
    assert sorted(asked) == sorted(want), "a draw is named by prompt, sample, row and turn"


def test_rows_of_an_episode_share_its_advantage(front, tmp_path):
    """A context that is rewritten is another row; the last row of each episode comes first."""
    body = "ask(); messages[-1]['content'] = 'x'; then('sure?'); ask(); reward(1)\n"
    found, _ = played(front, tmp_path, body, n=2, prompts=1)
    assert found.episode.tolist() == [0, 1, 0, 1] and found.numbers["rows"].tolist() == [2, 2]
    assert found.first.tokens.shape[0] == 2 and found.rollout.tokens.shape[0] == 4
    assert found.of_rows(torch.tensor([[0.5], [-0.5]])).tolist() == [[0.5], [-0.5], [0.5], [-0.5]]
    with pytest.raises(ValueError, match="expected one advantage an episode"):
        found.of_rows(torch.zeros(2, 9))


def forks(path):
    return f"""ask(); reward(1)
if os.fork() == 0:
    open({str(path)!r}, "w").write(str(os.getpid()))
    time.sleep(60)
time.sleep(0.3)
"""


FAULTS = {  # what a program does -> what is said of it
    "crashes": ("ask(); raise KeyError('mine')", "exit 1: .*KeyError: 'mine'"),
    "exits early": ("ask(); sys.exit(3)", "exit 3: it wrote nothing"),
    "sends no reward": ("ask()", "no reward"),
    "asks nothing": ("pass", "no reward"),
    "is ended by a signal": ("os.kill(os.getpid(), 9)", "exit -9"),
    "takes all memory": ("ask(); x = bytes(3 << 30)", "exit 1: .*MemoryError"),
    "sends NaN": ("ask(); reward(float('nan'))", "no reward"),
    "floods its output": ("print('x' * 10**7); sys.exit(2)", "exit 2: x{100}"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_program_that_fails_has_the_reward_of_a_failure(front, tmp_path, name):
    body, line = FAULTS[name]
    told = []
    found, _ = played(front, tmp_path, body + "\n", n=1, prompts=1, told=told, memory=2.0)
    assert found.reward.tolist() == [[-1]] and found.numbers["agent_failed"].tolist() == [1]
    assert len(told) == 1 and told[0].startswith("agents: 1 of 1 episodes failed; the first: ")
    assert re.search(line, told[0]), told
    assert bool(found.rollout.mask.any()) == body.startswith("ask()"), "what was said before is kept"


def test_a_program_that_hangs_ends_with_its_time(front, tmp_path):
    began = time.monotonic()
    body = "ask(); time.sleep(100)\n"
    found, _ = played(front, tmp_path, body, n=1, prompts=1, seconds=1.0)
    assert found.numbers["agent_late"].tolist() == [1] and time.monotonic() - began < 15


def test_what_a_program_has_started_ends_with_it(front, tmp_path):
    path = tmp_path / "pid"
    found, _ = played(front, tmp_path, forks(path), n=1, prompts=1)
    assert found.reward.tolist() == [[1]]
    for _ in range(100):
        try:
            os.kill(int(path.read_text()), 0)
            time.sleep(0.02)
        except ProcessLookupError:
            return
    status = Path(f"/proc/{path.read_text()}/status").read_text()
    assert "Z (zombie)" in status, "the child of a program outlives it"


def test_a_program_is_told_the_question_and_no_secret_of_the_run(front, tmp_path, monkeypatch):
    """Neither the answer nor the tokens of this process; and no way to a reward that the run gives."""
    monkeypatch.setenv("RFT_MODEL_TOKEN", "hush")
    body = """seen = json.dumps([task, {k: v for k, v in os.environ.items() if k.startswith("RFT_")}])
print(seen, os.getcwd()); sys.exit(2)
"""
    told = []
    path = tmp_path / "agent.py"
    path.write_text(AGENT + body)
    played(front, tmp_path, body, n=1, prompts=1, told=told, rewarded=False)
    assert "question 0" in told[0] and "hush" not in told[0] and "REWARD" not in told[0]


def test_an_agent_that_goes_on_too_long_is_refused(front, tmp_path):
    body = """try:
    for _ in range(9):
        ask(); then('more')
except KeyError:
    reward(0.25)
"""
    found, _ = played(front, tmp_path, body, n=1, prompts=1)
    assert found.reward.tolist() == [[0.25]] and found.numbers["cut_by_turns"].tolist() == [1]
    assert found.numbers["turns"].tolist() == [4] and found.rollout.truncated.tolist() == [True]
