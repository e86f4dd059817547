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


def test_it_has_the_files_that_it_is_passed_and_a_group_of_its_own():
    """Under their numbers, and nobody else holds them: the reader sees the end."""
    pipes = [os.pipe() for _ in range(3)]
    ends = [write for _, write in pipes]
    code = "import os, sys; [os.write(int(fd), fd.encode()) for fd in sys.argv[1:]]; print(os.getpgid(0))"
    command = [sys.executable, "-c", code, *map(str, ends)]
    process = forks.Popen(command, env=ENV, stdout=subprocess.PIPE, pass_fds=ends, process_group=0)
    for end in ends:
        os.close(end)
    for (read, _), end in zip(pipes, ends, strict=True):
        with open(read) as file:
            assert file.read() == str(end)
    assert process.communicate()[0] == b"%d\n" % process.pid and process.returncode == 0


def test_its_parent_is_who_started_it_until_that_has_gone():
    """Started by another fork, which is killed."""
    code = "import os, time\nparent = os.getppid(); print(parent, flush=True)\n"
    code += "while os.getppid() == parent: time.sleep(0.01)\nprint(os.getppid(), flush=True)"
    start = "import subprocess, sys; process = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
    start += "import time; time.sleep(600)"
    command = [sys.executable, "-c", start, code]
    process = forks.Popen(command, env=ENV | forks.CHILDREN, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"%d\n" % process.pid
    process.kill()
    assert process.communicate()[0] == b"1\n"


def test_two_in_a_row_differ_in_what_chance_gives_an_interpreter():
    code = "import random, numpy; print(hash('a'), random.random(), numpy.random.rand())"
    first, second = (alone(code).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_what_a_library_reads_at_its_import_needs_a_new_interpreter():
    code = "import torch; print(torch.get_num_threads())"
    assert alone(code, env=ENV | {"OMP_NUM_THREADS": "2"}).stdout == "2\n"
