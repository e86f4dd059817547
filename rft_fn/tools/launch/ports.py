"""Free ports for roles, kept in a file: a run that is started again has the same addresses."""

import json
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from rft_fn import limits
from rft_fn.foreign_json import parse_json
from rft_fn.limits import Range

__all__ = ["find", "write"]

_Port = Annotated[int, Range(1, 65535)]
_PORTS = range(20000, 29000)  # below those of outgoing connections, of which one may take a free port


def find(file: Path, counts: Mapping[str, int]) -> dict[str, list[int]]:
    """Return so many free ports of each role, first those that the file has for it.

    ValueError for one of the file that is in use, and for a file of another kind.
    """
    kept = _kept(file)
    taken = {port for ports in kept.values() for port in ports}
    made = {}
    for name, count in counts.items():
        made[name] = kept.get(name, [])[:count]
        for port in made[name]:
            if not _is_free(port):
                raise ValueError(
                    f"roles.{name}: expected port {port} of {file} to be free, got it in use; end what "
                    "listens there, or delete the file for other ports"
                )
        while len(made[name]) < count:
            port = random.choice(_PORTS)
            if port not in taken and _is_free(port):
                taken.add(port)
                made[name].append(port)
    return made


def write(file: Path, ports: Mapping[str, list[int]]) -> None:
    """Write the ports of each role."""
    file.write_text(json.dumps(ports))


def _kept(file: Path) -> dict[str, list[int]]:
    """Return the ports of a file; none where there is none."""
    if not file.is_file():
        return {}
    try:
        kept = parse_json(file.read_text())
        for name, ports in kept.items():
            limits.field(name, ports, tuple[_Port, ...])
        return kept
    except (ValueError, AttributeError):
        raise ValueError(f"{file}: expected ports by role, got something else; delete the file") from None


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that closed a moment ago
        try:
            s.bind(("", port))
        except OSError:
            return False
        return True
