"""What a command leaves behind is ended, in whatever session it is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE = str(Path(__file__).parent / "deadline.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")

# a server in a session of its own, which tells its number and outlives its parent
LEAVES = """
import subprocess, sys, time
server = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
open(sys.argv[1], 'w').write(str(server.pid))
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("limit, lasts, code, status", [(60, 0, 0, 0), (60, 0, 3, 3), (8, 600, 0, 124)])
def test_the_status_is_the_commands_and_nothing_is_left(tmp_path, limit, lasts, code, status):
    told = tmp_path / "pid"
    command = [sys.executable, DEADLINE, limit, sys.executable, "-c", LEAVES, told, lasts, code]
    began = time.monotonic()
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == status and time.monotonic() - began < 60
    assert not alive(int(told.read_text()))
    assert "deadline: ended" in done.stderr and "time.sleep(600)" in done.stderr
    assert ("not done after 8 s" in done.stderr) == (status == 124)


def test_a_signal_ends_the_command_and_what_it_left(tmp_path):
    told = tmp_path / "pid"
    command = [sys.executable, DEADLINE, "600", sys.executable, "-c", LEAVES, str(told), "600", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (told.exists() and told.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not alive(int(told.read_text()))
