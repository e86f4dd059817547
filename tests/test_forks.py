"""A fork of a server is a process as any other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}


def alone(code, *args, **options):
    options = {"env": ENV, "capture_output": True, "text": True} | options
    return forks.run([sys.executable, "-c", code, *args], **options)


def test_it_has_its_own_arguments_environment_folder_and_streams(tmp_path):
    code = "import os, sys; print(sys.argv, os.environ['HERE'], os.getcwd()); print('no', file=sys.stderr)"
    done = alone(code, "a", env=ENV | {"HERE": "there"}, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"['-c', 'a'] there {tmp_path}\n", "no\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("raise KeyboardInterrupt", -signal.SIGINT)],
)
def test_it_ends_as_an_interpreter_does(code, status):
    assert alone(code).returncode == status


def test_a_signal_ends_it():
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    process = forks.Popen(command, env=ENV, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n" and process.poll() is None
    process.kill()
    assert process.wait() == process.poll() == -signal.SIGKILL


def test_two_in_a_row_differ_in_what_chance_gives_an_interpreter():
    code = "import random, numpy; print(hash('a'), random.random(), numpy.random.rand())"
    first, second = (alone(code).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_what_a_library_reads_at_its_import_needs_a_new_interpreter():
    code = "import torch; print(torch.get_num_threads())"
    assert alone(code, env=ENV | {"OMP_NUM_THREADS": "2"}).stdout == "2\n"
