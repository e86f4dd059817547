"""serve_reward.py as a process: GRPO against it while it is killed and restarted, and the ways it ends."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx2
import judges
import pytest
import script_runs
import torch
from ranks import free_port
from script_runs import rows
from transformers import AutoModelForSequenceClassification

from rft_fn.model import load_reward, load_tokenizer, save_reward
from rft_fn.run import load_rewards, options
from rft_fn.strategy import get_strategy

pytestmark = pytest.mark.slow

SECRET = "s3cret-t0ken"
HEADERS = {"Authorization": f"Bearer {SECRET}"}


def start(script, *args, **options):
    env = {"RFT_REWARD_TOKEN": SECRET, "NO_PROXY": "*"}
    return script_runs.start(script, *args, whole=True, env=env, **options)


def serve(port, *args, **how):
    """A server that listens."""
    process = start("serve_reward", "--port", port, *args, **how)
    line = process.stdout.readline()
    assert line.startswith("serving ") and line.endswith(f" at http://127.0.0.1:{port}/score\n"), (
        line,
        process.stderr.read(),
    )
    return process


@contextmanager
def serving(*args, **how):
    port = free_port()
    process = serve(port, *args, **how)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def post(url, *completions, **how):
    body = json.dumps({"prompts": ["p"] * len(completions), "completions": completions}).encode()
    return httpx2.post(f"{url}/score", content=body, headers=HEADERS, trust_env=False, timeout=30, **how)


def finished(process):
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err


SMALL = ["--steps", "10", "--prompts", "4", "--group", "4", "--eval-every", "5", "--eval-prompts", "8"]
SMALL += ["--save-every", "5", "--warmup", "2"]


def saved_reward_model(folder):
    """A reward of the embedded default with a head of random numbers."""
    model = load_reward("tiny", new=True)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if not name.startswith("decoder."):
            torch.nn.init.normal_(p, generator=generator)
    save_reward(folder, model)
    load_tokenizer("tiny").save_pretrained(folder)
    return f"model:{folder}"


KINDS = {
    "task": lambda folder: "task:sort_digits",
    "model": lambda folder: saved_reward_model(folder / "rm"),
    "judge": lambda folder: f"judge:{judges.coin(folder / 'coin')}({COIN})",
}
COIN = "form='terse',temperature=1.0,max_new=10,patience=99"


@pytest.mark.parametrize("kind", KINDS)
def test_grpo_over_http_with_the_server_killed_and_restarted_is_the_run_without_http(tmp_path, kind):
    """Equal metrics, trajectories and weights, to the byte; and the token stands in no file and no line.

    The scores of a model are equal to rounding, because the server packs other responses together; after some
    updates that changes a token. So they are also compared with the model's, for the texts of the run.
    """
    served = KINDS[kind](tmp_path)
    local = start("grpo", *SMALL, "--out", tmp_path / "local", "--reward", served)
    code, _, err = finished(local)
    assert code == 0, err

    # the same rewards from a server, which is killed after a few steps, in whatever it does
    port = free_port()
    server = serve(port, "--reward", served)
    name = {"task": "task:sort_digits"}.get(kind, kind)
    spec = f"http://127.0.0.1:{port}/score(name={name!r},batch=4)"
    run = start("grpo", *SMALL, "--out", tmp_path / "remote", "--reward", spec)
    metrics = tmp_path / "remote" / "metrics.jsonl"
    try:
        while run.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            time.sleep(0.005)
        server.kill()
        server.communicate()
        steps = metrics.read_text().count("\n")
        assert 3 <= steps < 9, "the run was too quick to be interrupted"
        server = serve(port, "--reward", served)
        code, out, err = finished(run)
        asked = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    finally:
        run.kill()
        server.kill()
        server.communicate()

    assert code == 0, err
    assert err.count("trying again") >= 1 and err.count("answers again") >= 1
    assert 'path="/score",status="200"' in asked
    if kind == "task":
        for name in ("metrics.jsonl", "trajectories.jsonl", "model/model.safetensors"):
            found = [(tmp_path / run / name).read_bytes() for run in ("local", "remote")]
            assert found[0] == found[1], name
    here, there = (rewards_of(tmp_path / run) for run in ("local", "remote"))
    assert len(here) == 10 and len(set(here)) > 3
    same = {"model": 2}.get(kind, 10)
    assert len(there) == 10 and there[:same] == pytest.approx(here[:same], rel=1e-5)
    if kind == "model":
        found = rows(tmp_path / "remote", "trajectories.jsonl")
        assert [row["step"] for row in found] == [step for step in range(10) for _ in range(4)]
        want = scores_of(tmp_path / "rm", found)
        assert len(set(want)) > 20 and [row["reward"] for row in found] == pytest.approx(
            want, rel=1e-5, abs=1e-5
        )

    # the token is nowhere
    assert SECRET not in out + err
    for path in (tmp_path / "remote").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert "RFT_REWARD" not in (tmp_path / "remote" / "config.json").read_text()


def rewards_of(folder):
    """The mean reward of each step."""
    return [row["reward/mean"] for row in rows(folder)]


def scores_of(folder, found):
    """The score of each row's text by transformers' own class in float64, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = load_tokenizer(str(folder))
    scores = []
    for row in found:
        ids = tokenizer.encode(row["prompt"] + row["response"])
        if len(row["response"]) < 6:  # it was not cut off at --max-new
            ids.append(tokenizer.eos_token_id)
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([ids])).logits.item())
    return scores


SLOW = """
import time

def slow(completions):
    open("began", "w").close()
    time.sleep(0.8)
    return [float(len(c)) for c in completions]

def loud(completions, log_extra):
    log_extra("why", ["x" * 4000] * len(completions))
    return [1.0] * len(completions)

def hang(completions):
    if "hang" in completions:
        time.sleep(60)
    return [1.0] * len(completions)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_has_arrived(folder, number):
    with (
        serving("--reward", "slow.py:slow", "--rows", "1", cwd=folder) as (process, url),
        ThreadPoolExecutor(4) as pool,
    ):
        asked = [pool.submit(post, url, "")]
        end = time.monotonic() + 20
        while not (folder / "began").exists() and time.monotonic() < end:
            time.sleep(0.01)
        asked += [pool.submit(post, url, "x" * i) for i in (1, 2, 3)]  # one is scored, and three wait
        while time.monotonic() < end:
            if httpx2.get(f"{url}/health", trust_env=False).json()["waiting"] == 3:
                break
        process.send_signal(number)
        assert [x.result().json()["rewards"] for x in asked] == [[0.0], [1.0], [2.0], [3.0]]
        code, out, err = finished(process)
        assert code == 0 and out == f"{url}: stopped, everything answered\n" and "Traceback" not in err
        with pytest.raises(httpx2.ConnectError):
            post(url, "x")


def test_a_second_signal_ends_it_at_once(folder):
    with serving("--reward", "slow.py:hang", cwd=folder) as (process, url), ThreadPoolExecutor(1) as pool:
        pool.submit(post, url, "hang")
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        code, _, err = finished(process)
    assert code == 128 + signal.SIGTERM and "again to stop at once" in err


def connected(url, data, receive=None):
    """A client that has sent this, and reads nothing."""
    client = socket.socket()
    if receive is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    client.sendall(data)
    return client


HEAD = f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n".encode()


def test_a_signal_ends_it_whatever_its_clients_leave_half_done(folder):
    """An answer of 8 MB that nobody reads, a body and a head that do not end."""
    body = json.dumps({"prompts": ["p"] * 2000, "completions": ["a"] * 2000}).encode()
    with serving("--reward", "slow.py:loud", cwd=folder) as (process, url), ExitStack() as stack:
        for data in (
            HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body,
            HEAD + b"Content-Length: 100\r\n\r\n{",
            HEAD,
        ):
            stack.enter_context(connected(url, data, receive=4096))
        end = time.monotonic() + 60
        while "rft_reward_completions_total 2000.0" not in httpx2.get(f"{url}/metrics", trust_env=False).text:
            assert time.monotonic() < end
        time.sleep(0.5)  # now the answer is written
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, out, err = finished(process)
        assert time.monotonic() - began < 10
    assert code == 0 and "Traceback" not in err and err.count("\n") == 1
    left = "2 connections whose clients did not read or end a request"
    assert out == f"{url}: stopped, everything answered, but {left}\n"


def test_idle_connections_take_no_files_from_others(folder):
    """More of them than the process may have files, each of which has sent a byte."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
    (folder / "slow.py").write_text(limited + SLOW)
    with serving("--reward", "slow.py:loud", cwd=folder) as (process, url), ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(url, b"P"))
        began = time.monotonic()
        for _ in range(3):
            assert post(url, "a").json()["rewards"] == [1.0]
        assert time.monotonic() - began < 10
        process.send_signal(signal.SIGTERM)
        code, out, err = finished(process)
    assert code == 0 and out == f"{url}: stopped, everything answered\n"
    assert err.count("\n") == 1, err


def test_a_reward_that_hangs_is_interrupted_and_the_server_lives(folder):
    """And vetoes are those of the server's options."""
    args = ["--reward", "slow.py:hang", "--reward-timeout", "0.5", "--reward-veto", "hang<2=-5"]
    with serving(*args, cwd=folder) as (_, url):
        found = post(url, "hang")
        assert found.status_code == 504
        assert found.json()["error"].startswith("reward 'hang': expected a result within 0.5 s")
        assert post(url, "a").json()["rewards"] == [-5.0]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "error: reward: expected at least one to serve, got none"),
        (["--reward", "nothing"], "error: reward 'nothing': expected one of"),
        (["--reward", "math", "--port", "99999"], "port: expected"),
        (["--reward", "math", "--rows", "0"], "rows: expected"),
        (["--reward", "math", "--engine-batch", "3"], "strategy.engine_batch: expected 64, as this script"),
        (["--reward", "judge:tiny", "--engine-process"], "strategy.engine_process: expected False, as this"),
        (["--reward", "math", "--fsdp"], "strategy.fsdp: expected False, as this script does not read it"),
    ],
)
def test_bad_options_are_one_line(args, line):
    code, _, err = finished(start("serve_reward", *args))
    assert code == 2 and line in err and err.count("\n") == 1


def test_a_judge_that_is_served_says_what_it_says_in_the_run(tmp_path):
    """Its draws are by the keys in the request; the options of engines are read for it."""
    folder = judges.coin(tmp_path / "coin")
    spec = f"judge:{folder}(form='terse',temperature=1.0,max_new=10,patience=99)"
    prompts, completions = ["1=", "1=", "2=", "2="] * 3, ["1", "2", "3", "4"] * 3
    given = {"keys": list(range(12)), "groups": [0, 0, 1, 1] * 3}
    score = load_rewards([spec], options.Data(), get_strategy())
    want = score(prompts, completions, {}, **given).total.tolist()
    assert set(want) == {0.0, 1.0}
    with serving("--reward", spec, "--engine-batch", "3") as (_, url):
        body = json.dumps({"prompts": prompts, "completions": completions} | given).encode()
        how = {"headers": HEADERS, "trust_env": False, "timeout": 60}
        found = httpx2.post(f"{url}/score", content=body, **how).json()
    assert found["rewards"] == want and len(found["extra"]["said"]) == 12


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = finished(start("serve_reward", "--reward", "math", "--port", port))
    assert code == 2 and err == f"error: 127.0.0.1:{port}: Address already in use\n"


def test_grpo_refuses_a_server_that_it_cannot_use_before_a_model_is_loaded(tmp_path):
    gone = f"http://127.0.0.1:{free_port()}/score"
    out = ["--out", tmp_path / "run"]
    code, _, err = finished(start("grpo", *SMALL, *out, "--reward", f"{gone}(tries=1)"))
    assert (
        code == 2 and "expected an answer within 1 tries, got none" in err and not (tmp_path / "run").exists()
    )
    code, _, err = finished(start("grpo", *SMALL, *out, "--reward", f"{gone}(deadline=400)"))
    assert code == 2 and "expected a deadline below reward_timeout = 300 s, got 400" in err
    code, _, err = finished(start("grpo", *SMALL, *out, "--reward", "https://me:hunter2@host/score"))
    assert code == 2 and "got a name and a password" in err and "hunter2" not in err
