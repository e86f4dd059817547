"""multi_turn.py --agent: a program learns through the endpoint, alike on one and on two processes."""

import sys

import pytest
from script_runs import rows, run

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install rft-fn[serve]")
pytestmark = pytest.mark.slow

# two turns, of which the reward is the share of sevens
AGENT = """import http.client, json, os
from urllib.parse import urlsplit


def post(url, body, token="none"):
    at = urlsplit(url)
    line = http.client.HTTPConnection(at.hostname, at.port)
    line.request("POST", at.path, json.dumps(body), {"Authorization": "Bearer " + token})
    return json.loads(line.getresponse().read())


messages = json.load(open(os.environ["RFT_TASK"]))["messages"]
said = ""
for turn in range(2):
    body = {"model": "policy", "messages": messages, "temperature": 0}
    found = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
    said += found["content"]
    messages += [found, {"role": "user", "content": "1"}]
reward = said.count("7") / max(len(said), 1)
post(os.environ["RFT_REWARD_URL"], {"reward": reward}, os.environ["RFT_REWARD_TOKEN"])
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(AGENT)
    args = ["--agent", f"{sys.executable} -S -E {path}", "--data", "addition:1", "--template", "{short}"]
    args += ["--prompts", 4, "--group", 8, "--max-new", 4, "--max-tokens", 32, "--lr", 3e-3]
    return [*args, "--eval-every", 100, "--eval-prompts", 2, "--steps"]


def test_an_agent_learns(command, tmp_path):
    """By its own rewards, over its own turns; temperature 0, which it asks for, is not its to choose."""
    run("multi_turn", *command, 12, "--out", tmp_path / "run")
    found = rows(tmp_path / "run")
    reward = [r["reward/mean"] for r in found]
    assert sum(reward[-3:]) > 2 * sum(reward[:3]) and found[0]["reward/std"] > 0
    assert all(r["reward/agent_failed"] == 0 and r["reward/turns"] == 2 for r in found)


def test_two_processes_play_the_same(command, tmp_path):
    run("multi_turn", *command, 2, "--out", tmp_path / "one")
    run("multi_turn", *command, 2, "--out", tmp_path / "two", world=2)
    one, two = ([r["reward/mean"] for r in rows(tmp_path / name)] for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("more", "line"),
    [(["--agent", "sh 'x"], "agent: expected a command"),
     (["--agent", "x", "--data"], "data: expected rows for the agent, got none"),
     (["--agent-timeout", 3], "agent_timeout: expected 300.0, as this script does not read it"),
     (["--reward", "math"], "the environment gives the rewards"),
     (["--agent", "x", "--data", "addition:1", "--credit", "turn"], "--agent plays the episodes")],
)  # fmt: skip
def test_what_an_agent_cannot_have_is_refused(more, line, tmp_path):
    assert line in run("multi_turn", *more, "--steps", 1, "--out", tmp_path / "run", code=2)
