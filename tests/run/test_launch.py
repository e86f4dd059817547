"""`rft launch` as a process: the order of starts, and every way in which the programs end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import script_runs

pytestmark = pytest.mark.slow

WEB = """
[roles.web]
command = "python -m http.server {port} --bind 127.0.0.1"
ready = "/"
"""


def start(folder, text):
    (folder / "run.toml").write_text(text)
    env = {k: x for k, x in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": forks.PATH, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "rft_fn", "launch", "run.toml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, **pipes)


def launched(folder, text, seconds=60):
    process = start(folder, text)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid):
    """Whether a process runs; one that has ended and that nobody asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid_in(file):
    wait_for(lambda: file.is_file() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_what_needs_others_starts_when_they_answer_and_all_end_with_the_main_role(tmp_path):
    """A server of two is late; the trainer asks both; the same command again has the same addresses."""
    late = WEB.replace('"python', '"sh -c \\"sleep {replica}; echo $A; exec python').replace(
        "0.0.1", '0.0.1\\"'
    )
    (tmp_path / "trainer.py").write_text(
        "import sys, urllib.request\nfor url in sys.argv[1:]:\n"
        "    print(url, urllib.request.urlopen(url).status)\n"
    )
    text = f"""{late}replicas = 2
env = {{A = "number {{replica}}"}}
[roles.trainer]
command = "python trainer.py {{web.urls}}"
needs = ["web"]
"""
    code, out, err = launched(tmp_path, text)
    assert code == 0 and not err, (out, err)
    lines = out.splitlines()
    ports = json.loads((tmp_path / "logs" / "run" / "ports.json").read_text())["web"]
    asked = [f"http://127.0.0.1:{port} 200" for port in ports]
    assert [x for x in lines if x.startswith("trainer")] == [f"trainer | {x}" for x in asked]
    order = [lines.index(f"launch  | {x}") for x in ("web-1 starts", "trainer starts")]
    (ready,) = [i for i, x in enumerate(lines) if x.startswith("launch  | web-1 is ready after ")]
    assert order[0] < ready < order[1] and "web-1   | number 1" in lines
    logs = tmp_path / "logs" / "run"
    assert (logs / "trainer.log").read_text().splitlines() == asked
    assert (logs / "web-1.log").read_text().startswith("number 1\n")

    code, _, err = launched(tmp_path, text)
    assert code == 0, err
    assert (logs / "trainer.log").read_text().splitlines() == asked * 2


@pytest.mark.parametrize("how", ["exit 7", "kill -9 $$"])
def test_the_first_failure_ends_all_with_its_last_lines_and_its_code(tmp_path, how):
    text = f"""{WEB}
[roles.broken]
command = "sh -c 'for i in $(seq 30); do echo line $i; done; {how}'"
needs = ["web"]
[roles.trainer]
command = "sh -c 'echo $$ > pid; exec sleep 100'"
"""
    code, _, err = launched(tmp_path, text)
    first, *lines = err.splitlines()
    what = {"exit 7": (7, "ended with code 7"), "kill -9 $$": (137, "was ended by SIGKILL")}[how]
    assert code == what[0]
    assert first.startswith(f"error: broken {what[1]}, after ") and first.endswith("logs/run/broken.log:")
    assert lines == [f"    line {i}" for i in range(11, 31)]
    assert not alive(pid_in(tmp_path / "pid"))


def test_a_role_that_is_never_ready_or_ends_early_is_a_failure(tmp_path):
    trainer = '[roles.trainer]\ncommand = "touch started"\nneeds = ["web"]\n'
    hangs = '[roles.web]\ncommand = "sleep 100 {port}"\nready = "/"\nready_within = 0.5\n'
    code, _, err = launched(tmp_path, hangs + trainer)
    assert code == 1 and err.startswith("error: web gave no 200 at http://127.0.0.1:2")
    assert "within 0.5 s" in err and err.endswith(":\n    (none)\n")
    gone = '[roles.web]\ncommand = "sh -c \'echo hello {port}\'"\nready = "/"\n'
    code, _, err = launched(tmp_path, gone + trainer)
    assert code == 1 and err.startswith("error: web ended with code 0 before the main role, after ")
    assert "    hello 2" in err
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_ends_all_and_what_needs_others_first(tmp_path, number, code):
    """The trainer still has its server while it writes its last checkpoint."""
    (tmp_path / "trainer.py").write_text(
        "import signal, sys, urllib.request\n"
        "def end(*_):\n    print('last', urllib.request.urlopen(sys.argv[1]).status)\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('begun')\nsignal.pause()\n"
    )
    text = f'{WEB}\n[roles.trainer]\ncommand = "python trainer.py {{web.url}}"\nneeds = ["web"]\n'
    process = start(tmp_path, text)
    while "begun" not in process.stdout.readline():
        pass
    other = subprocess.run(
        [sys.executable, "-m", "rft_fn", "launch", "run.toml"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": forks.PATH}, capture_output=True, text=True,
    )  # fmt: skip
    assert (
        other.returncode == 2 and "expected no other launch of this file, got one that runs" in other.stderr
    )
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code and "trainer | last 200" in out and not err


def test_what_takes_no_sigterm_is_killed_after_the_grace_or_by_a_second_ctrl_c(tmp_path):
    stays = "trap true TERM; echo $$ > pid; while :; do sleep 1; done"
    text = f"grace = {{}}\n[roles.trainer]\ncommand = \"sh -c '{stays}'\"\n"
    for grace, times in ((0.5, 1), (100, 2)):
        (tmp_path / "pid").unlink(missing_ok=True)
        process = start(tmp_path, text.format(grace))
        pid = pid_in(tmp_path / "pid")
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 130 and "trainer is killed" in out and not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="adopts processes")
def test_what_outlives_its_parent_is_killed_in_its_own_session_too(tmp_path):
    (tmp_path / "helper.sh").write_text(
        "sleep 100 & echo $! > same\nsetsid sh -c 'echo $$ > other; exec sleep 100' &\nsleep 0.3\n"
    )
    text = '[roles.helper]\ncommand = "sh helper.sh"\n[roles.trainer]\ncommand = "sleep 1"\n'
    code, _, err = launched(tmp_path, text, seconds=20)
    assert code == 0, err
    assert not alive(pid_in(tmp_path / "same")) and not alive(pid_in(tmp_path / "other"))


STEPS = 10
RUN = f"--steps {STEPS} --prompts 4 --group 4 --eval-every 5 --eval-prompts 4 --save-every 5 --warmup 2"


def test_a_run_with_a_reward_server_is_the_run_without_and_the_same_command_resumes_it(tmp_path):
    """Equal rewards, texts and weights, to the byte, after Ctrl-C in the middle."""
    script_runs.run("grpo", *RUN.split(), "--reward", "task:sort_digits", "--out", tmp_path / "alone")
    scripts = forks.ROOT / "train_scripts"
    reward = "{rewards.url}/score(name='task:sort_digits')"
    text = f"""
[roles.rewards]
command = "python {scripts}/serve_reward.py --reward task:sort_digits --port {{port}}"
ready = "/health"
[roles.trainer]
command = '''python {scripts}/grpo.py {RUN} --out run --reward "{reward}"'''
needs = ["rewards"]
"""
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = start(tmp_path, text)
    try:
        wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2, seconds=100)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    steps = metrics.read_text().count("\n")
    assert process.returncode == 130 and not err and 2 <= steps < STEPS, (steps, out, err)
    code, out, err = launched(tmp_path, text, seconds=100)
    assert code == 0 and not err, (out, err)
    for name in ("metrics.jsonl", "trajectories.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
