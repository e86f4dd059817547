"""What options had by default in older releases of other libraries, and which names tell a release.

A file of an old release means what its release did. `--from-version` names it; else names of options that
came or went tell the latest release that the file can be of.
"""

import re
from collections.abc import Mapping
from typing import Any

from rft_fn.migrate.objective_rows import is_true
from rft_fn.migrate.verl import ACTOR

__all__ = ["older"]

Version = tuple[int, ...]


def older(
    library: str, releases: Mapping[str, Any], options: Mapping[str, Any], version: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the defaults of the release that the options are of, where they differ from now, and notes.

    `releases` is that part of the library's table. Raises ValueError for a `version` that is none.
    """
    options = {name: x for name, x in options.items() if x is not None}
    told, release = _told(releases, options), _number(version)
    if version and not release:
        raise ValueError(f"from-version: expected a release such as 0.15, got {version!r}")
    if version and not releases:
        return {}, [
            f"version: no defaults of older releases of {library} are known here; those of now are taken"
        ]
    if not version and told:
        release = _number(told[1])
    found, limit = {}, release if version else _before(release)
    for name, steps in releases.get("changed", {}).items():
        before = next((x for first, x in steps if limit and limit < _number(first)), None)
        if before is not None and name not in options:
            found[name] = before
    if found.get("algorithm.use_kl_in_reward") is not None:
        found["algorithm.use_kl_in_reward"] = not is_true(options.get(ACTOR + "use_kl_loss"))
    if library == "verl" and ACTOR + "clip_ratio_c" in found and ACTOR + "clip_ratio" in options:
        sides = (ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high")
        found |= {side: options[ACTOR + "clip_ratio"] for side in sides if side not in options}
    notes = [] if version else _untold(library, releases, {**found, **options}, told)
    if not found:
        return {}, notes
    which = (
        f"release {version}" if version else f"a release before {told[1]}, as {told[0]} tells" if told else ""
    )
    shown = ", ".join(f"{name}={x}" for name, x in found.items())
    instead = "" if version else "; --from-version names another"
    return found, [f"version: of {which}, whose defaults are taken: {shown}{instead}", *notes]


def _untold(
    library: str, releases: Mapping[str, Any], options: Mapping[str, Any], told: tuple[str, str] | None
) -> list[str]:
    """Return a note that names each omitted option whose default has changed between releases."""
    since = _since(releases, options)
    changed = {
        name: [(x, first) for first, x in steps if _number(first) > since]
        for name, steps in releases.get("changed", {}).items()
        if name not in options and not name.startswith("vllm_")
    }
    shown = [
        f"{name} ({', '.join(f'{x} before {first}' for x, first in steps)})"
        for name, steps in changed.items()
        if steps
    ]
    if not shown or (library == "verl" and told is None and not since):
        return []
    return [
        f"version: not in the file, and with another default in older releases: {', '.join(shown)}; "
        "--from-version names the release"
    ]


def _since(releases: Mapping[str, Any], options: Mapping[str, Any]) -> Version:
    """Return the release in which the newest option came."""
    first = releases.get("first", {})
    came = [x for x, heads in first.items() if any(name.startswith(tuple(heads)) for name in options)]
    return max(map(_number, came), default=())


def _told(releases: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the option that went away first, with the release; None if a later one came than it went."""
    gone = [(name, x) for x, names in releases.get("gone", {}).items() for name in names if name in options]
    if not gone:
        return None
    name, end = min(gone, key=lambda item: _number(item[1]))
    since = _since(releases, options)
    return None if since and since >= _number(end) else (name, end)


def _number(text: str) -> Version:
    """Return the numbers of a release: (0, 2, 0) of v0.2.0.post2; () of a text that is none."""
    match = re.match(r"v?(\d{1,6}(?:\.\d{1,6})*)", text)
    return tuple(map(int, match[1].split("."))) if match else ()


def _before(release: Version) -> Version:
    """Return a release just before another one."""
    return (*release[:-1], release[-1] - 1, 999_999) if release else ()
