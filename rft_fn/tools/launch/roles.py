"""A file of roles: the programs of a run, what each waits for, and their commands with addresses.

    [roles.rewards]
    command = "rft run serve_reward --reward task:sort_digits --port {port}"
    ready = "/health"

    [roles.trainer]
    command = "rft run grpo --reward {rewards.url}/score --out runs/a"
    needs = ["rewards"]

{port}, {replica}, {nodes}, {node}, {head} and {gpus} are a replica's own, {ROLE.url} and {ROLE.urls} the
addresses of a role. Other braces stay.
"""

import dataclasses
import difflib
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rft_fn import limits
from rft_fn.limits import Count, Filled, Positive, Whole

__all__ = [
    "DEVICES", "Kubernetes", "Place", "Program", "Replica", "Role", "Roles", "check_meeting", "cpus", "fill",
    "has_port", "levels", "needed_ports", "read", "resolve",
]  # fmt: skip

R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HOLE = re.compile(r"\{(?:(port|replica|nodes|node|head|gpus)|([A-Za-z0-9_-]+)\.(\w+))\}")
_OPTION = re.compile(r"[a-z][a-z-]*")  # of sbatch
DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Role:
    """One kind of program."""

    command: Filled  # split as a shell does; no shell runs
    replicas: Count = 1
    needs: tuple[str, ...] = ()  # roles that are ready before it starts
    ready: str = ""  # a URL, or a path at its own port, that answers 200; if empty, it is ready once started
    ready_within: Positive = 600.0  # seconds
    env: Mapping[str, str] = field(default_factory=dict)  # beside what it inherits
    nodes: Count = 1  # machines of each replica, all of which run the command
    gpus: Whole = 0  # of each of its machines
    cpus: Whole = 0  # of each of its machines; 0: 8 for a GPU, and 8 without one
    slurm: Mapping[str, str] = field(default_factory=dict)  # options of sbatch, beside those of all roles
    image: str = ""  # of its containers; if empty, that of all roles


@dataclass(frozen=True)
class Kubernetes:
    """What a cluster of Kubernetes has for a run."""

    image: str = ""  # of the containers, with rft_fn in it
    claim: str = ""  # the PersistentVolumeClaim of a volume that all pods can write
    path: Filled = "/data"  # where the volume is, and where commands start
    secret: str = ""  # the Secret with tokens, whose keys become variables


@dataclass(frozen=True)
class Roles:
    """All that a file says."""

    roles: Mapping[str, Role]
    main: Filled = "trainer"  # the role with whose end all end
    grace: Positive = 30.0  # seconds between SIGTERM and SIGKILL
    gpus_per_node: Count = 8  # of a machine: so many GPUs' worth of replicas share one
    slurm: Mapping[str, str] = field(default_factory=dict)  # options of sbatch
    k8s: Kubernetes = field(default_factory=Kubernetes)


class Place(NamedTuple):
    """What placeholders of a role stand for, where it is to run."""

    port: str = ""
    replica: str = "0"
    node: str = "0"  # which of the machines of a replica
    head: str = "127.0.0.1"  # the first of them
    urls: Mapping[str, str] = {}  # the addresses of each role, with spaces between


class Program(NamedTuple):
    """A command whose placeholders are filled in."""

    words: Sequence[str]
    env: Mapping[str, str]
    ready: str  # a URL, a path, or ""


class Replica(NamedTuple):
    """One program that is to run."""

    role: str
    name: str  # ROLE, or ROLE-NUMBER of several
    words: Sequence[str]  # of its command
    env: Mapping[str, str]
    ready: str  # a URL; "" where it is ready once started
    level: int  # 0 needs no role, another needs one of the level below


def read(path: Path) -> Roles:
    """Return what a file says. ValueError, in one line, for what is not there, unknown or wrong."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: expected a file of roles: {error.strerror}") from None
    except ValueError as error:  # also of UTF-8
        raise ValueError(f"{path}: expected TOML: {error}") from None
    try:
        return _roles(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _roles(given: Mapping[str, Any]) -> Roles:
    """Return the record of a file that was parsed."""
    _check_keys("", given, Roles)
    tables = _table("roles", given.get("roles", {}))
    if not tables:
        raise ValueError("roles: expected at least one, as [roles.trainer], got none")
    made = {name: _role(f"roles.{name}", _table(f"roles.{name}", x)) for name, x in tables.items()}
    kubernetes = _record("k8s", given.get("k8s", {}), Kubernetes)
    _check_options("slurm", given.get("slurm", {}))
    found = Roles(**{**given, "roles": made, "k8s": kubernetes})
    limits.fields(found)
    for name in made:
        if not _NAME.fullmatch(name):
            raise ValueError(f"roles: expected names of letters, digits, - and _, got {name!r}")
    if found.main not in made:
        raise ValueError(f"main: expected one of {', '.join(made)}, got {found.main!r}")
    levels(made)
    ports = dict.fromkeys(made, [0] * max(role.replicas for role in made.values()))
    resolve(found, ports)  # checks what stands in braces
    return found


def _role(place: str, given: Mapping[str, Any]) -> Role:
    """Return the record of the table of a role."""
    _check_keys(place, given, Role)
    if "command" not in given:
        raise ValueError(f"{place}.command: expected a text, got none")
    _check_options(f"{place}.slurm", given.get("slurm", {}))
    for name, x in _table(f"{place}.env", given.get("env", {})).items():
        limits.field(f"{place}.env.{name}", x, str)
    if not isinstance(given.get("needs", []), list):
        raise ValueError(f"{place}.needs: expected a list of roles, got {given['needs']!r}")
    found = _record(place, given, Role)
    _words(place, found.command)
    if found.ready and not re.match(r"/|https?://", found.ready):
        raise ValueError(f"{place}.ready: expected a URL, or a path as /health, got {found.ready!r}")
    if found.gpus and DEVICES in found.env:
        raise ValueError(f"{place}.env: expected no {DEVICES}, which gpus = {found.gpus} sets, got one")
    if found.ready.startswith("/") and not has_port(found):
        raise ValueError(f"{place}.command: expected {{port}}, where ready is {found.ready}, got none")
    return found


def _record(place: str, given: Any, record: Callable[..., R]) -> R:
    """Return the record of a table."""
    _check_keys(place, _table(place, given), record)
    found = record(**given)
    try:
        limits.fields(found)
    except ValueError as error:
        raise ValueError(f"{place}.{error}") from None
    return found


def _check_options(place: str, given: Any) -> None:
    """Raise ValueError for what is no option of sbatch with a text."""
    for name, x in _table(place, given).items():
        limits.field(f"{place}.{name}", x, str)
        if not _OPTION.fullmatch(name) or not x.isprintable():
            raise ValueError(
                f'{place}: expected options of sbatch, as time = "1:00:00", got {name!r} = {x!r}'
            )


def _table(place: str, x: Any) -> Mapping[str, Any]:
    if not isinstance(x, dict):
        raise ValueError(f"{place}: expected a table, got {x!r}")
    return x


def _check_keys(place: str, given: Collection[str], record: Any) -> None:
    """Raise ValueError for the first key that a record has no field for."""
    known = [f.name for f in dataclasses.fields(record)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            like = f"; did you mean {near[0]}?" if near else ""
            what = f"{place}: " if place else ""
            raise ValueError(f"{what}expected keys of {', '.join(known)}, got {key!r}{like}")


def _words(place: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{place}.command: expected words as of a shell, got {command!r}: {error}") from None


def levels(roles: Mapping[str, Role]) -> dict[str, int]:
    """Return how many roles must be ready one after the other before each. ValueError for a cycle."""
    for name, role in roles.items():
        for other in role.needs:
            if other not in roles:
                raise ValueError(f"roles.{name}.needs: expected some of {', '.join(roles)}, got {other!r}")
    try:
        order = [*TopologicalSorter({name: role.needs for name, role in roles.items()}).static_order()]
    except CycleError as error:
        cycle = error.args[1][::-1]  # the first needs the second
        raise ValueError(f"roles.{cycle[0]}.needs: expected no cycle, got {' needs '.join(cycle)}") from None
    level: dict[str, int] = {}
    for name in order:
        level[name] = max((level[other] + 1 for other in roles[name].needs), default=0)
    return level


def has_port(role: Role) -> bool:
    """Return whether each replica of a role wants a port."""
    return any("{port}" in text for text in (role.command, role.ready, *role.env.values()))


def cpus(role: Role) -> int:
    """Return the CPUs of each machine of a replica."""
    return role.cpus or 8 * max(role.gpus, 1)


def check_meeting(name: str, role: Role) -> None:
    """Raise ValueError for a torchrun of several machines that has no place to meet."""
    words = _words(f"roles.{name}", role.command)
    if role.nodes > 1 and {"torchrun", "torch.distributed.run"} & {*words}:
        options = {x.replace("_", "-").partition("=")[0] for x in words}
        if not {"--nnodes", "--rdzv-endpoint"} <= options:
            raise ValueError(
                f"roles.{name}.command: expected torchrun --nnodes {{nodes}} --rdzv-backend c10d "
                f"--rdzv-endpoint {{head}}:{{port}}, for nodes = {role.nodes}, got none"
            )


def needed_ports(found: Roles) -> dict[str, int]:
    """Return how many ports each role wants: one a replica where it names {port}."""
    return {name: role.replicas for name, role in found.roles.items() if has_port(role)}


def resolve(found: Roles, ports: Mapping[str, Sequence[int]]) -> list[Replica]:
    """Return the programs in the order of their start, with the ports of their roles in their commands."""
    level = levels(found.roles)
    urls = {
        name: " ".join(map(_url, ports[name][: role.replicas]))
        for name, role in found.roles.items()
        if has_port(role)
    }
    made = []
    for name in sorted(found.roles, key=lambda name: level[name]):
        role = found.roles[name]
        for i in range(role.replicas):
            port = ports[name][i] if name in urls else 0
            program = fill(found.roles, name, Place(port=str(port), replica=str(i), urls=urls))
            made.append(
                Replica(
                    role=name,
                    name=name if role.replicas == 1 else f"{name}-{i}",
                    words=program.words,
                    env=program.env,
                    ready=f"{_url(port)}{program.ready}" if program.ready.startswith("/") else program.ready,
                    level=level[name],
                )
            )
    return made


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def fill(roles: Mapping[str, Role], name: str, place: Place) -> Program:
    """Return the program of a role with the values of its placeholders. ValueError for unknown ones."""
    role = roles[name]
    return Program(
        words=_words(f"roles.{name}", _fill("command", role.command, name, roles, place)),
        env={key: _fill(f"env.{key}", x, name, roles, place) for key, x in role.env.items()},
        ready=_fill("ready", role.ready, name, roles, place),
    )


def _fill(key: str, text: str, name: str, roles: Mapping[str, Role], place: Place) -> str:
    """Return a text of a role with the values of its placeholders."""
    where = f"roles.{name}.{key}"
    own = place._asdict() | {"nodes": str(roles[name].nodes), "gpus": str(roles[name].gpus)}

    def value(hole: re.Match[str]) -> str:
        word, other, what = hole.groups()
        if word:
            if word == "gpus" and not roles[name].gpus:
                raise ValueError(f"roles.{name}.gpus: expected at least 1, for {where} has {hole[0]}, got 0")
            return own[word]
        if other not in roles and what not in ("url", "urls"):
            return hole[0]  # braces of a template
        if other not in roles:
            raise ValueError(f"{where}: expected addresses of {', '.join(roles)}, got {hole[0]}")
        count = roles[other].replicas
        if what not in ("url", "urls") or (what == "url" and count > 1):
            known = f"{other}.urls" if count > 1 else f"{other}.url or {other}.urls"
            raise ValueError(f"{where}: expected {known} in braces, got {hole[0]} of {count} replicas")
        if not has_port(roles[other]):
            raise ValueError(f"roles.{other}.command: expected {{port}}, for {where} has {hole[0]}, got none")
        return place.urls[other]

    return _HOLE.sub(value, text)
