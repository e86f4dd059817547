"""The batch job of `rft launch --to slurm` runs here, on a Slurm of processes, and ends in each way."""

import json
import os
import signal
import time
from pathlib import Path

import fake_slurm
import pytest
from test_launch import alive, wait_for

from rft_fn.tools.launch import roles, slurm

pytestmark = pytest.mark.slow

WEB = """
grace = 5
[roles.web]
command = "python -m http.server {port}"
ready = "/"
"""


def submit(folder, text, **options):
    (folder / "run.toml").write_text(text)
    job = folder / "run.sbatch"
    job.write_text(slurm.render(roles.read(folder / "run.toml"), "run"))
    return fake_slurm.submit(job, folder, **options)


def ended(process, seconds=60):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def step(folder, name):
    """The processes of a step."""
    (file,) = (folder / "steps").glob(f"*-{name}")
    return json.loads(file.read_text())["pids"]


def wait_for_step(folder, name):
    wait_for(lambda: [*(folder / "steps").glob(f"*-{name}")])


def test_torchrun_meets_over_two_nodes_and_asks_the_servers_of_another(tmp_path):
    """Two servers share a node; each rank has their addresses, its number, and words as they were written."""
    apart = fake_slurm.namespaces()
    (tmp_path / "trainer.py").write_text(
        "import os, sys, urllib.request\n"
        "codes = [urllib.request.urlopen(url).status for url in sys.argv[3:]]\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:3], codes, flush=True)\n"
    )
    text = f"""{WEB}replicas = 2
[roles.trainer]
command = '''python -m torch.distributed.run --nnodes {{nodes}} --nproc-per-node 1 --rdzv-backend c10d
  --rdzv-endpoint {{head}}:{{port}} --rdzv-conf join_timeout=60
  trainer.py "it's \\"$HOME\\" {{question}}" {{node}} {{web.urls}}'''
needs = ["web"]
nodes = 2
"""
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    code, out, err = ended(submit(tmp_path, text, apart=apart, **environment))
    assert code == 0 and not err, (out, err)
    nodes = ["node2", "node3,node4"] if apart else ["127.0.0.2", "127.0.0.3,127.0.0.4"]
    lines = out.splitlines()
    assert [x for x in lines if "starts" in x] == [
        f"launch | web-0 starts on {nodes[0]}",
        f"launch | web-1 starts on {nodes[0]}",
        f"launch | trainer starts on {nodes[1]}",
    ]
    assert sum(" is ready after " in x for x in lines[:-1]) == 2
    logs = tmp_path / "logs" / "run"
    words = ['it\'s "$HOME" {question}']
    ranks = {f"{i} 2 {[*words, str(node)]} [200, 200]" for i in (0, 1) for node in (0, 1)}
    found = (logs / "trainer.log").read_text().splitlines()
    assert len(found) == 2 and set(found) <= ranks and {x[0] for x in found} == {"0", "1"}
    for i in range(2):
        assert '"GET / HTTP/1.1" 200' in (logs / f"web-{i}.log").read_text()


@pytest.mark.parametrize("role", ["web", "trainer"])
def test_a_role_that_is_killed_ends_all_with_its_code(tmp_path, role):
    text = WEB + '[roles.trainer]\ncommand = "sh -c \'echo begun; sleep 100\'"\nneeds = ["web"]\n'
    process = submit(tmp_path, text)
    wait_for_step(tmp_path, "trainer")
    pids = {name: step(tmp_path, name)[0] for name in ("web", "trainer")}
    os.killpg(pids[role], signal.SIGKILL)
    code, out, err = ended(process, 20)
    assert code == 137, (out, err)
    first, *lines = err.splitlines()
    assert first.startswith(f"error: {role} ended with code 137, after ") and first.endswith(f"/{role}.log:")
    assert role == "web" or lines == ["    begun"]
    assert not any(alive(pid) for pid in pids.values()) and not (tmp_path / "requeued").exists()


def test_what_fails_or_is_never_ready_is_named(tmp_path):
    text = WEB.replace("python -m http.server", "sleep 100; exec").replace('"sleep', "\"sh -c 'sleep")
    text = text.replace('{port}"', "{port}'\"\nready_within = 1")
    trainer = '[roles.trainer]\ncommand = "touch begun"\nneeds = ["web"]\n'
    code, out, err = ended(submit(tmp_path, text + trainer), 20)
    assert code == 1 and err.startswith("error: web gave no 200 at http://127.0.0.2:2"), (out, err)
    assert "within 1 s, after " in err and not (tmp_path / "begun").exists()
    trainer = "[roles.trainer]\ncommand = \"sh -c 'for i in $(seq 30); do echo $i; done; exit 7'\"\n"
    code, out, err = ended(submit(tmp_path, trainer), 20)
    assert code == 7 and err.splitlines()[1:] == [f"    {i}" for i in range(11, 31)], (out, err)


def test_a_sigterm_ends_what_needs_others_first_and_the_job_runs_again(tmp_path):
    """As before preemption: the trainer has its server while it saves, and goes on in the next job."""
    (tmp_path / "trainer.py").write_text(
        "import os, signal, sys, urllib.request\n"
        "def end(*_):\n    print('last', urllib.request.urlopen(sys.argv[1]).status, flush=True)\n"
        "    open('saved', 'w').close()\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('resumed' if os.path.exists('saved') else 'begun', flush=True)\n"
        "os.path.exists('saved') or signal.pause()\n"
    )
    text = WEB + '[roles.trainer]\ncommand = "python trainer.py {web.url}"\nneeds = ["web"]\n'
    process = submit(tmp_path, text)
    log = tmp_path / "logs" / "run" / "trainer.log"
    wait_for(lambda: log.is_file() and "begun" in log.read_text())
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process, 20)
    assert code == 143 and not err, (out, err)
    assert (tmp_path / "requeued").read_text() == "4711"
    code, out, err = ended(submit(tmp_path, text, restarts=1), 20)
    assert code == 0 and not err and log.read_text().splitlines() == ["begun", "last 200", "resumed"]


def test_what_takes_no_sigterm_is_killed_and_a_run_that_ends_is_not_queued_again(tmp_path):
    """A helper that stays is killed after the grace; the trainer has ended with 0 by then."""
    text = """
grace = 1
[roles.helper]
command = "sh -c 'trap true TERM; while :; do sleep 1; done'"
[roles.trainer]
command = "sh -c 'trap \\"exit 0\\" TERM; echo begun; while :; do sleep 0.1; done'"
"""
    process = submit(tmp_path, text)
    log = tmp_path / "logs" / "run" / "trainer.log"
    wait_for(lambda: log.is_file() and "begun" in log.read_text())
    wait_for_step(tmp_path, "helper")
    (helper,) = step(tmp_path, "helper")
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    code, out, err = ended(process, 20)
    assert code == 0 and "launch | helper is killed" in out.splitlines(), (out, err)
    assert not alive(helper) and not Path(tmp_path / "requeued").exists() and time.monotonic() - begun < 10
