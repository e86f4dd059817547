"""A file of roles as YAML for Kubernetes: a JobSet, and LeaderWorkerSets of larger servers.

Both give pods the names by which roles find each other. The JobSet ends with the main role, and with the
first program that fails; it starts all again where a pod was evicted.
"""

import math
import re
from dataclasses import replace
from typing import Any

from rft_fn.tools.launch import roles
from rft_fn.tools.launch.roles import Place, Program, Role, Roles

__all__ = ["render"]

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # of a part of a host's name
_LONGEST = 57  # characters of a pod's name, before what Kubernetes adds
_RESTARTS = 100  # after evictions
_PERIOD = 5  # s between two looks whether a program is ready
_PORT = 20000  # of the first role, each of whose pods has an address of its own
_REPLICA, _NODE = "RFT_REPLICA", "RFT_NODE"  # variables of a pod
_JOB = "jobset.sigs.k8s.io/job-index"
_COMPLETION = "batch.kubernetes.io/job-completion-index"
_GROUP = "leaderworkerset.sigs.k8s.io/group-index"
_WORKER = "leaderworkerset.sigs.k8s.io/worker-index"


def render(found: Roles, name: str) -> str:
    """Return the YAML of a file of roles, as the JobSet `name`. ValueError for what it cannot have."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes the words of a command in one row."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def row(dumper: yaml.SafeDumper, words: _Words) -> yaml.Node:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", words, flow_style=True)

    Dumper.add_representer(_Words, row)
    _check(found, name)
    made = [_job_set(found, name)]
    made += [_worker_set(found, name, role) for role in found.roles if _is_group(found, role)]
    text = yaml.dump_all(made, Dumper=Dumper, sort_keys=False, width=110)
    return (
        f"# The roles of {name}.toml, written by: rft launch {name}.toml --to k8s --out {name}.yaml\n"
        "# For a cluster with JobSet 0.8 or later"
        + (" and LeaderWorkerSet" if len(made) > 1 else "")
        + f": kubectl apply -f {name}.yaml\n"
        + text
    )


class _Words(list[str]):
    """Words of a command."""


def _is_group(found: Roles, role: str) -> bool:
    """Return whether a role is a server whose replicas are several machines."""
    return found.roles[role].nodes > 1 and role != found.main


def _check(found: Roles, name: str) -> None:
    for place, x in (("k8s.image", found.k8s.image), ("k8s.claim", found.k8s.claim)):
        if not x and not (place == "k8s.image" and all(role.image for role in found.roles.values())):
            raise ValueError(f"{place}: expected a text, for --to k8s, got none")
    for place, x in [("file", name), *(("roles", role) for role in found.roles)]:
        if not _NAME.fullmatch(x):
            raise ValueError(f"{place}: expected a name of a-z, 0-9 and -, for --to k8s, got {x!r}")
    for x, role in found.roles.items():
        longest = f"{name}-{x}-{role.replicas - 1}-{role.nodes - 1}"
        if len(longest) > _LONGEST:
            raise ValueError(
                f"roles.{x}: expected names of pods with at most {_LONGEST} characters, got {longest}"
            )
        if role.ready and not role.ready.startswith("/"):
            raise ValueError(f"roles.{x}.ready: expected a path as /health, of its pod, got {role.ready}")
        roles.check_meeting(x, role)


# ---------- names and addresses


def _host(found: Roles, name: str, role: str, replica: Any) -> str:
    """Return the name of the first machine of a replica."""
    if _is_group(found, role):
        return f"{name}-{role}-{replica}.{name}-{role}"
    return f"{name}-{role}-{replica}-0.{name}"


def _urls(found: Roles, name: str, role: str) -> list[str]:
    port = _ports(found)[role]
    return [f"http://{_host(found, name, role, i)}:{port}" for i in range(found.roles[role].replicas)]


def _ports(found: Roles) -> dict[str, int]:
    return {role: _PORT + i for i, role in enumerate(roles.needed_ports(found))}


def _program(found: Roles, name: str, role: str) -> Program:
    """Return the program of a role; Kubernetes expands $(VARIABLES) in it."""
    ports = _ports(found)
    replica = f"$({_REPLICA})" if found.roles[role].replicas > 1 else "0"
    place = Place(
        port=str(ports.get(role, "")),
        replica=replica,
        node=f"$({_NODE})" if found.roles[role].nodes > 1 else "0",
        head=_host(found, name, role, replica),
        urls={x: " ".join(_urls(found, name, x)) for x in ports},
    )
    return roles.fill({x: _escaped(y) for x, y in found.roles.items()}, role, place)


def _escaped(role: Role) -> Role:
    """Return a role whose own $(...) stay as they are."""
    env = {key: x.replace("$(", "$$(") for key, x in role.env.items()}
    return replace(role, command=role.command.replace("$(", "$$("), env=env)


# ---------- objects


def _job_set(found: Roles, name: str) -> dict[str, Any]:
    """Return the JobSet: every role but servers of several machines."""
    some = [x for x in _order(found) if not _is_group(found, x)]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [found.main]},
            "failurePolicy": {
                "maxRestarts": _RESTARTS,
                "rules": [
                    {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [_job(found, name, x) for x in some],
        },
    }


def _order(found: Roles) -> list[str]:
    level = roles.levels(found.roles)
    return sorted(found.roles, key=lambda role: level[role])


def _job(found: Roles, name: str, x: str) -> dict[str, Any]:
    """Return the jobs of a role: one a replica, with a pod a machine."""
    role = found.roles[x]
    needs = [{"name": other, "status": "Ready"} for other in role.needs if not _is_group(found, other)]
    spec = {
        "parallelism": role.nodes,
        "completions": role.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}},
            ]
        },
        "template": {"spec": {"restartPolicy": "Never", **_pod(found, name, x, _JOB, _COMPLETION)}},
    }
    return {
        "name": x,
        "replicas": role.replicas,
        **({"dependsOn": needs} if needs else {}),
        "template": {"spec": spec},
    }


def _worker_set(found: Roles, name: str, x: str) -> dict[str, Any]:
    """Return the LeaderWorkerSet of a server: a group a replica, whose leader answers."""
    role = found.roles[x]
    pod = _pod(found, name, x, _GROUP, _WORKER)
    (container,) = pod["containers"]
    probes = ("startupProbe", "readinessProbe")
    worker = {**pod, "containers": [{key: y for key, y in container.items() if key not in probes}]}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": f"{name}-{x}"},
        "spec": {
            "replicas": role.replicas,
            "leaderWorkerTemplate": {
                "size": role.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"spec": pod},
                "workerTemplate": {"spec": worker},
            },
        },
    }


def _pod(found: Roles, name: str, x: str, replica: str, node: str) -> dict[str, Any]:
    """Return the pod of a machine of a role."""
    role = found.roles[x]
    program = _program(found, name, x)
    image = role.image or found.k8s.image
    texts = [*program.words, *program.env.values()]
    env = [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{y}']"}}}
        for key, y in ((_REPLICA, replica), (_NODE, node))
        if any(f"$({key})" in text for text in texts)
    ]
    env += [{"name": key, "value": y} for key, y in {"PYTHONUNBUFFERED": "1", **program.env}.items()]
    container: dict[str, Any] = {
        "name": x,
        "image": image,
        "command": _Words(program.words),
        "workingDir": found.k8s.path,
        "env": env,
    }
    if found.k8s.secret:
        container["envFrom"] = [{"secretRef": {"name": found.k8s.secret}}]
    if x in _ports(found):
        container["ports"] = [{"containerPort": _ports(found)[x]}]
    container["resources"] = {"requests": {"cpu": roles.cpus(role)}}
    if role.gpus:
        container["resources"]["limits"] = {"nvidia.com/gpu": role.gpus}
    if role.ready and x != found.main:
        container |= _probes(program.ready, _ports(found)[x], role.ready_within)
    volumes = {
        "data": ({"persistentVolumeClaim": {"claimName": found.k8s.claim}}, found.k8s.path),
        "shared-memory": ({"emptyDir": {"medium": "Memory"}}, "/dev/shm"),
    }
    container["volumeMounts"] = [{"name": key, "mountPath": path} for key, (_, path) in volumes.items()]
    waits = _waits(found, name, x, image)
    return {
        "terminationGracePeriodSeconds": math.ceil(found.grace),
        **({"initContainers": waits} if waits else {}),
        "containers": [container],
        "volumes": [{"name": key, **volume} for key, (volume, _) in volumes.items()],
    }


def _probes(path: str, port: int, seconds: float) -> dict[str, Any]:
    """Return the probes of a server: it fails where it is not ready in time, and is asked on then."""
    get = {"httpGet": {"path": path, "port": port}, "periodSeconds": _PERIOD, "timeoutSeconds": _PERIOD}
    return {
        "startupProbe": {**get, "failureThreshold": math.ceil(seconds / _PERIOD)},
        "readinessProbe": get,
    }


def _waits(found: Roles, name: str, x: str, image: str) -> list[dict[str, Any]]:
    """Return what a pod waits for first: servers that are in no JobSet with it."""
    made = []
    for other in found.roles[x].needs:
        role = found.roles[other]
        if not role.ready or not (_is_group(found, x) or _is_group(found, other)):
            continue
        path = _program(found, name, other).ready
        command = ["curl", "--silent", "--show-error", "--fail", "--output", "/dev/null", "--retry", "100000"]
        command += [
            "--retry-all-errors",
            "--retry-delay",
            "1",
            "--retry-max-time",
            str(math.ceil(role.ready_within)),
        ]
        made += [
            {"name": f"needs-{other}-{i}", "image": image, "command": _Words([*command, f"{url}{path}"])}
            for i, url in enumerate(_urls(found, name, other))
        ]
    return made
