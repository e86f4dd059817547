"""A script on servers: the same run as in process, through a server that dies, and resumed after all did."""

import os
import re
import socket
import subprocess
import sys

import forks
import pytest
from fake_server import FakeServer, serving
from script_runs import ROOT, rows, start

from rft_fn import model

pytestmark = pytest.mark.slow

OPTIONS = "--prompts 4 --group 4 --steps 4 --save-every 1 --eval-every 100 --eval-prompts 4"
WORDS = OPTIONS.split()


def fakes(count=2):
    return [FakeServer(model.load("tiny"), model.load_tokenizer("tiny")) for _ in range(count)]


# a script whose pauses before servers are tried again are a tenth as long
HASTY = """
import runpy, sys
from rft_fn.engine import pool

pool.Pool.__init__.__kwdefaults__["pause"] = pool.PAUSE / 10
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
