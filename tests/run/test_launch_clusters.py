"""A file of roles for Slurm and for Kubernetes: what the texts say, and what is refused."""

import re
import subprocess

import fake_slurm
import pytest
import yaml

from rft_fn.tools import commands
from rft_fn.tools.launch import kubernetes, local_processes, roles, slurm

TEXT = """
grace = 20
gpus_per_node = 4
[slurm]
time = "1:00:00"
partition = "gpu"
[k8s]
image = "rft_fn:1"
claim = "shared"
[roles.web-site]
command = "serve {port} {replica}"
replicas = 3
gpus = 2
env = {ALL = "{web-site.urls}"}
ready = "/health"
[roles.teacher]
command = "teach {port} {node} {nodes} {head} {replica}"
replicas = 2
nodes = 2
gpus = 4
cpus = 3
ready = "/health?a=1"
needs = ["web-site"]
image = "teacher:1"
[roles.trainer]
command = '''train --a={web-site.urls}/x '{web-site.urls}' "it's $HOME `id` \\\\ {x.y} $(id)"
  {teacher.urls} end'''
needs = ["teacher"]
slurm = {partition = "other", exclusive = ""}
"""


@pytest.fixture
def found(tmp_path):
    (tmp_path / "run.toml").write_text(TEXT)
    return roles.read(tmp_path / "run.toml")


def test_a_job_asks_for_a_group_a_role_and_replicas_share_machines(found):
    text = slurm.render(found, "run")
    first, second, third = fake_slurm.groups(text)
    alike = {"time": "1:00:00", "partition": "gpu"}
    assert first == alike | {
        "job-name": "run", "output": "run-%j.log", "open-mode": "append", "requeue": "",
        "signal": "B:TERM@90", "nodes": "2", "ntasks-per-node": "2", "cpus-per-task": "16",
        "gpus-per-node": "4",
    }  # fmt: skip
    assert second == alike | {
        "nodes": "4", "ntasks-per-node": "1", "cpus-per-task": "3", "gpus-per-node": "4"
    }  # fmt: skip
    assert third == alike | {
        "partition": "other", "exclusive": "", "nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "8"
    }  # fmt: skip


def test_words_reach_programs_as_they_were_written(found, tmp_path):
    """The job is run by bash, with an srun that keeps its words: they are those of the local launcher."""
    (tmp_path / "calls").mkdir()  # a file for each call, since several run at once
    tools = r"""
srun() { printf '%s\0' "$@" > calls/$BASHPID; [[ $* == *--job-name=trainer* ]] || sleep 1.5; }
scontrol() { for i in $3; do echo "$i"; done; }
scancel() { :; }
curl() { echo "${@: -1}" >> urls; }
"""
    job = tools + slurm.render(found, "run")
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "10", "HOME": "/nowhere"}
    for i, names in enumerate(("a1 a2", "b1 b2 b3 b4", "c1")):
        env[f"SLURM_JOB_NODELIST_HET_GROUP_{i}"] = names
    done = subprocess.run(
        ["bash", "-c", job], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    calls = [x.read_text().split("\0")[:-1] for x in (tmp_path / "calls").iterdir()]
    made = {re.search(r"--job-name=(\S+)", " ".join(x))[1]: x for x in calls}
    port = 20000 + 10 * 5 % 9000
    web = [f"http://a{1 + i // 2}:{port + i}" for i in range(3)]
    teachers = [f"http://b1:{port + 3}", f"http://b3:{port + 4}"]
    assert sorted(made) == ["teacher-0", "teacher-1", "trainer", "web-site-0", "web-site-1", "web-site-2"]
    for i in range(3):
        words = made[f"web-site-{i}"]
        assert {"--het-group=0", f"--nodelist=a{1 + i // 2}", "--cpus-per-task=16", "--gpus-per-node=2"} < {
            *words
        }
        assert words[-5:] == ["env", f"ALL={' '.join(web)}", "serve", str(port + i), str(i)]
    assert "--nodelist=b3,b4" in made["teacher-1"] and "--ntasks=2" in made["teacher-1"]
    assert made["teacher-1"][-6:] == ["teach", str(port + 4), "%NODE%", "2", "b3", "1"]
    ports = {
        name: [int(x.rpartition(":")[2]) for x in some]
        for name, some in (("web-site", web), ("teacher", teachers))
    }
    here = roles.resolve(found, ports)[-1].words
    hosts = {x.rpartition(":")[2]: x for x in (*web, *teachers)}
    there = [re.sub(r"http://[\d.]+:(\d+)", lambda x: hosts[x[1]], word) for word in here]
    assert made["trainer"][-len(there) :] == there and "it's $HOME `id` \\ {x.y} $(id)" in there
    urls = (tmp_path / "urls").read_text().split()
    assert urls == [*(f"{x}/health" for x in web), *(f"{x}/health?a=1" for x in teachers)]


# the fields of the published API that are used: JobSet v1alpha2, LeaderWorkerSet v1, Job and Pod v1
TEXTS = [str]
PROBE = {
    "httpGet": {"path": str, "port": int},
    "periodSeconds": int,
    "timeoutSeconds": int,
    "failureThreshold": int,
}
CONTAINER = {
    "name": str, "image": str, "command": TEXTS, "workingDir": str,
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
    "envFrom": [{"secretRef": {"name": str}}],
    "ports": [{"containerPort": int}],
    "resources": {"requests": {"cpu": int}, "limits": {"nvidia.com/gpu": int}},
    "startupProbe": PROBE, "readinessProbe": PROBE,
    "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
POD = {
    "restartPolicy": ("Never", "OnFailure", "Always"),
    "terminationGracePeriodSeconds": int,
    "initContainers": [CONTAINER],
    "containers": [CONTAINER],
    "volumes": [
        {"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": ("", "Memory")}}
    ],
}
JOB = {
    "parallelism": int, "completions": int, "completionMode": ("Indexed", "NonIndexed"), "backoffLimit": int,
    "podFailurePolicy": {"rules": [{
        "action": ("FailJob", "FailIndex", "Ignore", "Count"),
        "onExitCodes": {"operator": ("In", "NotIn"), "values": [int], "containerName": str},
        "onPodConditions": [{"type": str, "status": ("True", "False", "Unknown")}],
    }]},
    "template": {"spec": POD},
}  # fmt: skip
KINDS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "successPolicy": {"operator": ("All", "Any"), "targetReplicatedJobs": TEXTS},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": ("FailJobSet", "RestartJobSet"), "onJobFailureReasons": TEXTS}],
        },
        "replicatedJobs": [{
            "name": str, "replicas": int, "dependsOn": [{"name": str, "status": ("Ready", "Complete")}],
            "template": {"spec": JOB},
        }],
    },
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int,
        "leaderWorkerTemplate": {
            "size": int, "restartPolicy": ("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            "leaderTemplate": {"spec": POD}, "workerTemplate": {"spec": POD},
        },
    },
}  # fmt: skip


def check(x, shape, place):
    """AssertionError for a field that the API does not have, or a value that is none of its."""
    if isinstance(shape, dict):
        assert isinstance(x, dict) and set(x) <= set(shape), (place, x)
        for key, value in x.items():
            check(value, shape[key], f"{place}.{key}")
    elif isinstance(shape, list):
        assert isinstance(x, list), (place, x)
        for value in x:
            check(value, shape[0], place)
    elif isinstance(shape, tuple):
        assert x in shape, (place, x)
    else:
        assert type(x) is shape, (place, x)


def test_objects_of_kubernetes_have_fields_of_its_api_and_know_each_other_by_name(found):
    jobs, workers = yaml.safe_load_all(kubernetes.render(found, "run"))
    for x in (jobs, workers):
        check(x["spec"], KINDS[x["apiVersion"], x["kind"]], x["kind"])
    web, trainer = jobs["spec"]["replicatedJobs"]
    assert jobs["metadata"]["name"] == "run" and workers["metadata"]["name"] == "run-teacher"
    assert jobs["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"]
    assert (web["name"], web["replicas"], trainer["name"], trainer["replicas"]) == (
        "web-site",
        3,
        "trainer",
        1,
    )
    pods = {x["name"]: x["template"]["spec"]["template"]["spec"] for x in (web, trainer)}
    template = workers["spec"]["leaderWorkerTemplate"]
    pods |= {"leader": template["leaderTemplate"]["spec"], "worker": template["workerTemplate"]["spec"]}
    first = {name: pod["containers"][0] for name, pod in pods.items()}
    assert (workers["spec"]["replicas"], template["size"]) == (2, 2)

    # the names of pods, as both controllers make them
    urls = [f"http://run-web-site-{i}-0.run:20000" for i in range(3)]
    teachers = [f"http://run-teacher-{i}.run-teacher:20001" for i in range(2)]
    assert first["trainer"]["command"] == [
        "train", f"--a={urls[0]}", urls[1], f"{urls[2]}/x", " ".join(urls),
        "it's $HOME `id` \\ {x.y} $$(id)", *teachers, "end",
    ]  # fmt: skip
    head = "run-teacher-$(RFT_REPLICA).run-teacher"
    for name in ("leader", "worker"):
        assert first[name]["command"] == ["teach", "20001", "$(RFT_NODE)", "2", head, "$(RFT_REPLICA)"]
        labels = {x["name"]: x["valueFrom"]["fieldRef"]["fieldPath"] for x in first[name]["env"][:2]}
        index = "metadata.labels['leaderworkerset.sigs.k8s.io/{}-index']"
        assert labels == {"RFT_REPLICA": index.format("group"), "RFT_NODE": index.format("worker")}
        assert first[name]["resources"] == {"requests": {"cpu": 3}, "limits": {"nvidia.com/gpu": 4}}
        assert first[name]["image"] == "teacher:1" and first["trainer"]["image"] == "rft_fn:1"
    assert {"name": "ALL", "value": " ".join(urls)} in first["web-site"]["env"]

    # who waits for whom, and how long
    assert "dependsOn" not in web and "dependsOn" not in trainer
    waits = [x["command"][-1] for x in pods["trainer"]["initContainers"]]
    assert waits == [f"{x}/health?a=1" for x in teachers]
    assert [x["command"][-1] for x in pods["leader"]["initContainers"]] == [f"{x}/health" for x in urls]
    probe = first["web-site"]["startupProbe"]
    assert probe["httpGet"] == {"path": "/health", "port": 20000}
    assert probe["failureThreshold"] * probe["periodSeconds"] == 600
    assert "readinessProbe" in first["leader"] and "readinessProbe" not in first["worker"]
    mounts = {"data": "/data", "shared-memory": "/dev/shm"}
    for name, pod in pods.items():
        assert {x["name"]: x["mountPath"] for x in first[name]["volumeMounts"]} == mounts
        assert {x["name"] for x in pod["volumes"]} == set(mounts) and pod[
            "terminationGracePeriodSeconds"
        ] == 20


def test_a_role_of_the_set_waits_by_dependence(found, tmp_path):
    (tmp_path / "run.toml").write_text(TEXT.replace('needs = ["teacher"]', 'needs = ["web-site"]'))
    jobs, _ = yaml.safe_load_all(kubernetes.render(roles.read(tmp_path / "run.toml"), "run"))
    trainer = jobs["spec"]["replicatedJobs"][1]
    assert trainer["dependsOn"] == [{"name": "web-site", "status": "Ready"}]
    assert "initContainers" not in trainer["template"]["spec"]["template"]["spec"]


TRAINER = '[roles.trainer]\ncommand = "true"\n'
CLUSTER = '[k8s]\nimage = "a"\nclaim = "b"\n'
WRONG = {
    "an option of ours": (slurm, '[slurm]\nnodes = "3"\n' + TRAINER, "slurm: expected no nodes, which"),
    "of a role": (
        slurm, TRAINER + 'slurm = {signal = "B:USR1"}', "roles.trainer.slurm: expected no signal, which"
    ),
    "no option": (slurm, '[slurm]\nTime = "3"\n' + TRAINER, "slurm: expected options of sbatch, as time"),
    "two lines": (slurm, '[slurm]\ntime = "3\\n"\n' + TRAINER, "slurm: expected options of sbatch, as time"),
    "names": (
        slurm, TRAINER + '[roles.a-b]\ncommand = "a"\n[roles.a_b]\ncommand = "a"',
        "roles: expected names that begin with a letter and differ, got 'a_b', which bash takes for a-b",
    ),
    "gpus": (slurm, TRAINER + "gpus = 9", "roles.trainer.gpus: expected at most gpus_per_node = 8, got 9"),
    "no gpus": (
        slurm, '[roles.trainer]\ncommand = "a {gpus}"',
        "roles.trainer.gpus: expected at least 1, for roles.trainer.command has {gpus}, got 0",
    ),
    "devices": (
        slurm, TRAINER + 'gpus = 1\nenv = {CUDA_VISIBLE_DEVICES = "1"}',
        "roles.trainer.env: expected no CUDA_VISIBLE_DEVICES, which gpus = 1 sets, got one",
    ),
    "a place to meet": (
        slurm, '[roles.trainer]\ncommand = "torchrun --standalone a.py"\nnodes = 2',
        "roles.trainer.command: expected torchrun --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint",
    ),
    "a url": (
        slurm, TRAINER + '[roles.b]\ncommand = "b {port}"\nready = "http://127.0.0.1:{port}/"',
        "roles.b.ready: expected a path as /health, whose host is a node's, got http://",
    ),
    "image": (kubernetes, TRAINER, "k8s.image: expected a text, for --to k8s, got none"),
    "claim": (kubernetes, '[k8s]\nimage = "a"\n' + TRAINER, "k8s.claim: expected a text, for --to"),
    "a key": (kubernetes, "[k8s]\nimages = 3\n" + TRAINER, "got 'images'; did you mean image?"),
    "a name": (
        kubernetes, CLUSTER + TRAINER + '[roles.a_b]\ncommand = "a"', "roles: expected a name of a-z, 0-9"
    ),
    "a long name": (
        kubernetes, CLUSTER + TRAINER + f'[roles.{"a" * 60}]\ncommand = "a"', "at most 57 characters, got"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_a_cluster_cannot_have_is_one_line(tmp_path, case):
    kind, text, line = WRONG[case]
    file = tmp_path / "run.toml"
    file.write_text(text)
    to = "slurm" if kind is slurm else "k8s"
    with pytest.raises(ValueError) as error:
        commands.launch(commands.Launch(str(file), to=to))
    assert str(error.value).startswith(f"{file}: ") and line in str(error.value), str(error.value)
    assert str(error.value).count(str(file)) == 1 and "\n" not in str(error.value)


def test_the_command_writes_a_file_or_prints(tmp_path, capsys):
    file, out = tmp_path / "run.toml", tmp_path / "run.sbatch"
    file.write_text(TRAINER)
    commands.launch(commands.Launch(str(file), to="slurm", out=str(out)))
    assert not capsys.readouterr().out
    commands.launch(commands.Launch(str(file), to="slurm"))
    text = capsys.readouterr().out
    assert text == out.read_text() and "hetjob" not in text and 'SLURM_JOB_NODELIST"' in text
    with pytest.raises(ValueError, match="out: expected it with --to slurm or --to k8s"):
        commands.launch(commands.Launch(str(file), out=str(out)))
    with pytest.raises(ValueError, match="dry_run: expected none with --to"):
        commands.launch(commands.Launch(str(file), to="k8s", dry_run=True))


def test_on_one_machine_replicas_get_their_gpus_and_several_nodes_are_refused(tmp_path, capsys, monkeypatch):
    file = tmp_path / "run.toml"
    text = '[roles.a]\ncommand = "true {nodes} {node} {head} {gpus}"\nreplicas = 2\ngpus = 2\n'
    file.write_text(text + '[roles.b]\ncommand = "true"\n[roles.trainer]\ncommand = "true"\ngpus = 1\n')
    for seen, expected in ((None, ["0,1", "2,3", "4"]), ("7,6,5,4,3", ["7,6", "5,4", "3"])):
        if seen is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert local_processes.launch(file, dry_run=True) == 0
        lines = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("#")]
        assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", "\n".join(lines)) == expected
        assert lines[0].endswith("true 1 0 127.0.0.1 2") and lines[2] == "true"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match=r"gpus: expected 5 in CUDA_VISIBLE_DEVICES, got '0'"):
        local_processes.launch(file)
    file.write_text(TRAINER + "nodes = 2")
    with pytest.raises(
        ValueError, match=r"roles\.trainer\.nodes: expected 1 on this machine, got 2; --to slurm"
    ):
        local_processes.launch(file)
