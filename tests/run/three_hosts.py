"""Three hosts, network namespaces on one hub: torchrun on two of them, a server of samples on the third.

`run(folder, faults)` trains grpo.py on them. A fault is (phase, n, node, seconds): as rank 0 enters a phase
for the n-th time node 3 (rank 1) or 4 (the server) loses its link for so long; for good where that is None,
and where it is "reboot" all of its processes end too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_slurm

TESTS = Path(__file__).resolve().parents[1]
WORDS = "--prompts 4 --group 2 --steps 4 --save-every 2 --eval-every 100 --eval-prompts 2 --tokens-every 0"


def run(folder, faults=(), *, options="", seconds=300):
    """[(exit code, text, seconds from the last fault to the trainer's line or end)] of both hosts."""
    setup = fake_slurm.HOLD.format(nodes="2 3 4", folder=folder)
    command = ["unshare", "-rmn", "bash", "-c", f'{setup}\nexec "$@"', "_", sys.executable, __file__]
    command += ["hold", str(folder), json.dumps([[*faults], options, seconds])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env["PYTHONPATH"] = os.pathsep.join(str(x) for x in (TESTS.parent, TESTS.parent / "kernels", TESTS))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(x) for x in json.loads(done.stdout)]


# ---------- within the namespaces


def on(node, *command):
    """A command on a host, whose processes end with it."""
    named = ["unshare", "-upf", "--kill-child", "sh", "-c", 'hostname "$0" && exec "$@"', f"node{node}"]
    return ["ip", "netns", "exec", f"node{node}", *named, *map(str, command)]


def hold(folder, faults, options, seconds):
    """Run the hosts, and print what became of them."""
    started, end = [], time.monotonic() + seconds

    def start(node, name, *command):
        with open(folder / name, "w") as log:
            started.append(subprocess.Popen(on(node, *command), stdout=log, stderr=log, cwd=folder))
        return started[-1]

    def wait_for(name):
        while not (folder / name).exists():
            assert time.monotonic() < end and all(x.poll() is None for x in started), name
            time.sleep(0.02)

    def link(node, state):
        subprocess.run(["ip", "link", "set", f"v{node}", state], check=True)

    for name in ("serves", *(f"{x}{i}" for i in range(len(faults)) for x in ("enters", "broken"))):
        (folder / name).unlink(missing_ok=True)
    try:
        server = start(4, "server", sys.executable, __file__, "serve", folder, "[]")
        wait_for("serves")
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.9.0.2:29500", "--rdzv-id", "x"]
        words = [*WORDS.split(), *options.split(), "--out", folder / "run", "--engine-type", "openai"]
        words = ["train", folder, json.dumps([faults]), *words, "--engine-servers", "http://10.9.0.4:8000"]
        hosts = [start(i, f"host{i}", sys.executable, *torchrun, __file__, *words) for i in (2, 3)]
        began = time.monotonic()
        for i, (_, _, node, length) in enumerate(faults):
            wait_for(f"enters{i}")
            link(node, "down")
            if length == "reboot":
                (hosts[1] if node == 3 else server).kill()
            (folder / f"broken{i}").touch()
            began = time.monotonic()
            if isinstance(length, int):
                time.sleep(length)
                link(node, "up")

        took = {}
        while len(took) < 2 and time.monotonic() < end:
            texts = [(folder / f"host{i}").read_text() for i in (2, 3)]
            for i, x in enumerate(hosts):
                # a torchrun that lost the store, which the first one holds, outlives its trainer by minutes
                if i not in took and (x.poll() is not None or (i and "error: " in texts[i])):
                    took[i] = time.monotonic() - began
            time.sleep(0.05)
        texts = [(folder / f"host{i}").read_text() for i in (2, 3)]
        print(json.dumps([(x.poll(), texts[i], took.get(i)) for i, x in enumerate(hosts)]))
    finally:
        for x in started:
            x.kill()


def serve(folder):
    from fake_server import FakeServer

    from rft_fn import model

    server = FakeServer(model.load("tiny"), model.load_tokenizer("tiny"), transfer="rft", host="10.9.0.4")
    server.port = 8000
    server.begin()
    (folder / "serves").touch()
    signal.pause()


def train(folder, faults):
    import runpy

    import rft_fn as rft

    phase, entered = rft.run.Run.phase, []

    def watched(self, name):
        entered.append(name)
        for i, (where, n, *_) in enumerate(faults):
            if self.main and name == where and entered.count(name) == n:
                (folder / f"enters{i}").touch()
                while not (folder / f"broken{i}").exists():
                    time.sleep(0.02)
        return phase(self, name)

    rft.run.Run.phase = watched
    sys.argv = ["grpo.py", *sys.argv[4:]]
    runpy.run_path(str(TESTS.parent / "train_scripts" / "grpo.py"), run_name="__main__")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *json.loads(sys.argv[3]))
