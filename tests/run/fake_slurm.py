"""Stands for Slurm: `submit` runs a batch job here, with an srun, scontrol and scancel of processes.

Nodes are network namespaces with names of their own where the machine allows them, else loopback addresses.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

NODES = range(2, 6)
HOLD = """
set -e
mount -t tmpfs none /run
ip link set lo up
ip link add hub type bridge && ip link set hub up && ip addr add 10.9.0.1/24 dev hub
for i in {nodes}; do
    ip netns add "node$i"
    ip link add "v$i" type veth peer name eth0 netns "node$i" && ip link set "v$i" master hub up
    ip -n "node$i" addr add "10.9.0.$i/24" dev eth0
    ip -n "node$i" link set eth0 up && ip -n "node$i" link set lo up
    echo "10.9.0.$i node$i"
done > {folder}/hosts
mount --bind {folder}/hosts /etc/hosts
"""


@functools.cache
def namespaces():
    """Whether this machine lets us make them."""
    setup = HOLD.format(nodes="2", folder="/run")
    try:
        return subprocess.run(["unshare", "-rmn", "bash", "-c", setup], capture_output=True).returncode == 0
    except OSError:
        return False


def groups(text):
    """The options of each group of a job."""
    parts = text.split("#SBATCH hetjob\n")
    return [dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", part, re.M)) for part in parts]


def submit(file, folder, *, apart=False, restarts=0, **env):
    """Start a job, with the nodes that it asks for; `apart` are namespaces."""
    for name in ("srun", "scontrol", "scancel"):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "steps").mkdir(exist_ok=True)
    asked = [int(x["nodes"]) for x in groups(file.read_text())]
    names = iter([f"node{i}" if apart else f"127.0.0.{i}" for i in NODES])
    env = {**os.environ, **env, "FAKE_SLURM": str(folder), "FAKE_APART": "yes" if apart else ""}
    env["PATH"] = f"{folder / 'bin'}:{Path(sys.executable).parent}:{env['PATH']}"
    env |= {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restarts)}
    for i, count in enumerate(asked):
        variable = "SLURM_JOB_NODELIST" + (f"_HET_GROUP_{i}" if len(asked) > 1 else "")
        env[variable] = " ".join(next(names) for _ in range(count))
    command = ["bash", str(file)]
    if apart:
        setup = HOLD.format(nodes=" ".join(map(str, NODES)), folder=folder)
        command = ["unshare", "-rmn", "bash", "-c", f'{setup}\nexec "$@"', "_", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, **pipes)


# ---------- the commands


def srun(folder, words):
    """Run a command on each node, and end all with the first that fails; SIGTERM is SIGKILL to them."""
    count = next(i for i, x in enumerate(words) if not x.startswith("--"))
    options = dict(x[2:].partition("=")[::2] for x in words[:count])
    nodes = options["nodelist"].split(",")
    assert (
        len(nodes) == int(options["nodes"]) == int(options["ntasks"]) and options["kill-on-bad-exit"] == "1"
    )
    tasks = []
    with open(options["output"], "ab") as log:
        for i, node in enumerate(nodes):
            command = words[count:]
            if os.environ["FAKE_APART"]:
                apart = [
                    "ip",
                    "netns",
                    "exec",
                    node,
                    "unshare",
                    "-u",
                    "sh",
                    "-c",
                    'hostname "$0" && exec "$@"',
                ]
                command = [*apart, node, *command]
            env = os.environ | {"SLURM_PROCID": str(i)}
            tasks.append(
                subprocess.Popen(
                    command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
    step = folder / "steps" / f"{options.get('het-group', 0)}-{options['job-name']}"
    step.write_text(json.dumps({"pids": [x.pid for x in tasks], "words": words}))

    def kill(*_):
        for x in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(x.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    left, code = {x.pid for x in tasks}, 0
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            kill()
    step.unlink()
    sys.exit(code if code >= 0 else 128 - code)


def scancel(folder, words):
    """Send a signal to the steps of a group."""
    number = getattr(signal, f"SIG{words[0].removeprefix('--signal=')}")
    job, _, group = words[1].partition("+")
    assert job == "4711"
    for step in (folder / "steps").glob(f"{group or 0}-*"):
        for pid in json.loads(step.read_text())["pids"]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


def scontrol(folder, words):
    """Tell the hosts of a list, or note that a job is to run again."""
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split()))
    else:
        assert words[0] == "requeue"
        (folder / "requeued").write_text(words[1])


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(os.environ["FAKE_SLURM"]), sys.argv[2:])
