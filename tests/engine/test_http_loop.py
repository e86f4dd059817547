"""Scripts and ranks on servers: the run in process, through a server that dies, resumed after all did."""

import os
import re
import socket
import subprocess
import sys

import forks
import pytest
import ranks
import tiny
import torch
from fake_server import FakeServer, serving
from script_runs import ROOT, rows, start

import rft_fn as rft
from rft_fn import collect, engine, model, optim, rng, strategy, sync
from rft_fn.engine import weight_folder

pytestmark = pytest.mark.slow

OPTIONS = "--prompts 4 --group 4 --steps 4 --save-every 1 --eval-every 100 --eval-prompts 4"
WORDS = OPTIONS.split()


def fakes(count=2):
    return [FakeServer(model.load("tiny"), model.load_tokenizer("tiny")) for _ in range(count)]


# a script whose pauses before servers are tried again are a tenth as long
HASTY = """
import runpy, sys
from rft_fn.engine import pool

pool.Pool.__init__.__kwdefaults__["pause"] = 0.05
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def hasty(script, *words):
    """As `start`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", HASTY, str(ROOT / "train_scripts" / f"{script}.py"), *map(str, words)]
    return forks.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder, *servers, code=0, start=start):
    """(metrics, what went wrong) of the script in a folder."""
    words = [*WORDS, "--out", folder]
    if servers:
        urls = [s.url for s in servers]
        words += ["--engine-type", "openai", "--engine-servers", *urls, "--engine-timeout", 20]
    process = start("grpo", *words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return rows(folder), err


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """The metrics of the hf engine."""
    return run(tmp_path_factory.mktemp("hf") / "run")[0]


def same(found, want):
    """Tokens and rewards are equal; gaps are rounding."""
    assert [r["step"] for r in found] == [r["step"] for r in want] == list(range(4))
    for one, other in zip(found, want, strict=True):
        names = [n for n in one if n.startswith(("reward", "response")) or n in ("step", "tokens")]
        assert len(names) > 3
        for name in names:
            assert one[name] == pytest.approx(other[name], abs=1e-6), name
        assert one["policy/logp_gap"] < 1e-5


def test_a_server_that_dies_in_mid_run_changes_nothing(in_process, tmp_path):
    servers = fakes()
    with serving(*servers):
        servers[0].fault, servers[0].after = "die", 30
        found, _ = run(tmp_path / "run", *servers)
        assert servers[0].samples > 30 and servers[0].http is None
    same(found, in_process)


def test_a_run_without_servers_ends_with_a_line_and_the_same_command_resumes(in_process, tmp_path):
    servers = fakes()
    with serving(*servers):
        for server in servers:
            server.fault, server.after = "500", 30
        found, err = run(tmp_path / "run", *servers, code=2, start=hasty)
        assert 0 < len(found) < 4
        (line,) = [x for x in err.splitlines() if "engine openai" in x]
        assert re.search(r"expected one that stays alive, got .*status 500", line) and "Traceback" not in err
        for server in servers:
            server.fault = ""
        found, _ = run(tmp_path / "run", *servers)
    same(found, in_process)


def test_an_address_of_nobody_ends_before_anything_is_trained(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["--engine-type", "openai", "--engine-servers", f"http://127.0.0.1:{port}"]
    process = start("grpo", *WORDS, "--out", tmp_path / "run", *words)
    _, err = process.communicate(timeout=120)
    assert process.returncode and "ConnectError" in err and "Traceback" not in err


# ---------- two ranks on two servers: the first rank gives weights and orders, both sample

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17]]
KEYS = [rng.fold_in(0, i) for i in range(4)]
SAMPLING = rft.Sampling(max_new=9)


def on_two(rank, urls, folder):
    st = strategy.get_strategy()
    _, state = st.init(tiny.llama(5), optim.adamw(1e-3))
    config = engine.EngineConfig(type="openai", servers=urls, batch=4, timeout=20.0, weights=folder)
    eng = engine.get_engine(config, tiny.llama(), tiny.tokenizer())
    delivered = sync.push(st, state, eng, version=3)
    options = {"n": 3, "sampling": SAMPLING}
    rollout = collect.gather_and_generate(eng, st, PROMPTS, KEYS, **options)
    status = eng.status()
    again = collect.gather_and_generate(eng, st, PROMPTS, KEYS, sleep_engine=False, **options)

    def full(self):
        raise OSError(28, "No space left on device")

    weight_folder.Writer._flush = full
    with pytest.raises(OSError, match="No space left on device"):
        sync.push(st, state, eng, version=4)
    found = rollout.tokens, again.tokens, rollout.version, rollout.logp
    alive = eng.status()["alive"]
    eng.close()
    return found, delivered[:2], status, alive


def test_two_ranks_share_the_servers(tmp_path):
    servers = [FakeServer(tiny.llama(), tiny.tokenizer(), device="cuda") for _ in range(2)]
    with serving(*servers):
        urls = tuple(s.url for s in servers)
        found = ranks.run(2, "test_http_loop:on_two", urls, str(tmp_path))
    eng = engine.hf(tiny.llama(5), tiny.tokenizer())
    want = eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING)
    parameters = list(tiny.llama().parameters())
    for (tokens, again, version, logp), delivered, status, alive in found:
        assert torch.equal(tokens, want.tokens) and torch.equal(again, want.tokens)
        assert set(version.tolist()) == {3} and (logp - want.logp).abs().max() < 1e-5
        assert delivered == (len(parameters), sum(4 * p.numel() for p in parameters))
        assert status["asleep"] and not alive
    for server in servers:
        loads = [b for p, b in server.calls if p == "/collective_rpc" and b["method"] == "rft_load"]
        assert len(loads) == 1
        assert [p for p, _ in server.calls].count("/sleep?level=1") == 1 and not server.asleep
    assert not list(tmp_path.iterdir())
