"""A file of roles: the programs of a run, what each waits for, and their commands with addresses.

    [roles.rewards]
    command = "rft run serve_reward --reward task:sort_digits --port {port}"
    ready = "/health"

    [roles.trainer]
    command = "rft run grpo --reward {rewards.url}/score --out runs/a"
    needs = ["rewards"]

{port} and {replica} are a replica's own, {ROLE.url} and {ROLE.urls} the addresses of a role. Other braces
stay.
"""

import dataclasses
import difflib
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn import limits
from rft_fn.limits import Count, Filled, Positive

__all__ = ["Replica", "Role", "Roles", "needed_ports", "read", "resolve"]

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HOLE = re.compile(r"\{(?:(port|replica)|([A-Za-z0-9_-]+)\.(\w+))\}")


@dataclass(frozen=True)
class Role:
    """One kind of program."""

    command: Filled  # split as a shell does; no shell runs
    replicas: Count = 1
    needs: tuple[str, ...] = ()  # roles that are ready before it starts
    ready: str = ""  # a URL, or a path at its own port, that answers 200; if empty, it is ready once started
    ready_within: Positive = 600.0  # seconds
    env: Mapping[str, str] = field(default_factory=dict)  # beside what it inherits


@dataclass(frozen=True)
class Roles:
    """All that a file says."""

    roles: Mapping[str, Role]
    main: Filled = "trainer"  # the role with whose end all end
    grace: Positive = 30.0  # seconds between SIGTERM and SIGKILL


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
    found = Roles(**{**given, "roles": made})
    limits.fields(found)
    for name in made:
        if not _NAME.fullmatch(name):
            raise ValueError(f"roles: expected names of letters, digits, - and _, got {name!r}")
    if found.main not in made:
        raise ValueError(f"main: expected one of {', '.join(made)}, got {found.main!r}")
    _levels(made)
    ports = dict.fromkeys(made, [0] * max(role.replicas for role in made.values()))
    resolve(found, ports)  # checks what stands in braces
    return found


def _role(place: str, given: Mapping[str, Any]) -> Role:
    """Return the record of the table of a role."""
    _check_keys(place, given, Role)
    if "command" not in given:
        raise ValueError(f"{place}.command: expected a text, got none")
    for name, x in _table(f"{place}.env", given.get("env", {})).items():
        limits.field(f"{place}.env.{name}", x, str)
    if not isinstance(given.get("needs", []), list):
        raise ValueError(f"{place}.needs: expected a list of roles, got {given['needs']!r}")
    found = Role(**given)
    try:
        limits.fields(found)
    except ValueError as error:
        raise ValueError(f"{place}.{error}") from None
    _words(place, found.command)
    if found.ready and not re.match(r"/|https?://", found.ready):
        raise ValueError(f"{place}.ready: expected a URL, or a path as /health, got {found.ready!r}")
    if found.ready.startswith("/") and not _has_port(found):
        raise ValueError(f"{place}.command: expected {{port}}, where ready is {found.ready}, got none")
    return found


def _table(place: str, x: Any) -> Mapping[str, Any]:
    if not isinstance(x, dict):
        raise ValueError(f"{place}: expected a table, got {x!r}")
    return x


def _check_keys(place: str, given: Collection[str], record: type) -> None:
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


def _levels(roles: Mapping[str, Role]) -> dict[str, int]:
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
    levels: dict[str, int] = {}
    for name in order:
        levels[name] = max((levels[other] + 1 for other in roles[name].needs), default=0)
    return levels


def _has_port(role: Role) -> bool:
    return any("{port}" in text for text in (role.command, role.ready, *role.env.values()))


def needed_ports(found: Roles) -> dict[str, int]:
    """Return how many ports each role wants: one a replica where it names {port}."""
    return {name: role.replicas for name, role in found.roles.items() if _has_port(role)}


def resolve(found: Roles, ports: Mapping[str, Sequence[int]]) -> list[Replica]:
    """Return the programs in the order of their start, with the ports of their roles in their commands."""
    levels = _levels(found.roles)
    made = []
    for name in sorted(found.roles, key=lambda name: levels[name]):
        role = found.roles[name]
        for i in range(role.replicas):
            command = _fill("command", role.command, name, i, found.roles, ports)
            ready = _fill("ready", role.ready, name, i, found.roles, ports)
            made.append(
                Replica(
                    role=name,
                    name=name if role.replicas == 1 else f"{name}-{i}",
                    words=_words(f"roles.{name}", command),
                    env={
                        key: _fill(f"env.{key}", x, name, i, found.roles, ports)
                        for key, x in role.env.items()
                    },
                    ready=f"{_url(ports[name][i])}{ready}" if ready.startswith("/") else ready,
                    level=levels[name],
                )
            )
    return made


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _fill(
    key: str,
    text: str,
    name: str,
    replica: int,
    roles: Mapping[str, Role],
    ports: Mapping[str, Sequence[int]],
) -> str:
    """Return a text of a replica with the values of its placeholders."""
    place = f"roles.{name}.{key}"

    def value(hole: re.Match[str]) -> str:
        own, other, what = hole.groups()
        if own:
            return str(replica if own == "replica" else ports[name][replica])
        if other not in roles and what not in ("url", "urls"):
            return hole[0]  # braces of a template
        if other not in roles:
            raise ValueError(f"{place}: expected addresses of {', '.join(roles)}, got {hole[0]}")
        count = roles[other].replicas
        if what not in ("url", "urls") or (what == "url" and count > 1):
            known = f"{other}.urls" if count > 1 else f"{other}.url or {other}.urls"
            raise ValueError(f"{place}: expected {known} in braces, got {hole[0]} of {count} replicas")
        if not _has_port(roles[other]):
            raise ValueError(f"roles.{other}.command: expected {{port}}, for {place} has {hole[0]}, got none")
        return " ".join(map(_url, ports[other][:count]))

    return _HOLE.sub(value, text)
