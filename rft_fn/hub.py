"""Whether the model hub can be reached, and names similar to a missing one."""

import difflib
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

__all__ = ["did_you_mean", "unreachable"]

_PATIENCE = 5  # seconds that the hub has to answer; its own client would try for a minute


def unreachable(*, patience: float = _PATIENCE) -> str:
    """Return the reason why the hub cannot be reached within `patience` seconds; empty if it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=patience).close()
    except urllib.error.HTTPError:
        return ""  # an answer
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached: {getattr(error, 'reason', error)}"
    return ""


def did_you_mean(name: str, *, known: Sequence[str] = ()) -> str:
    """Return "; did you mean X or Y?" for a name that is missing, or "".

    Similar names come from the folder of `name`, and from `known`. If folders of its path are missing too,
    they are for the first of these.
    """
    path = Path(name)
    while not path.parent.is_dir():
        path = path.parent
    here = [entry.name for entry in path.parent.iterdir()] if path.parent != path else []
    near = difflib.get_close_matches(path.name, here, n=3)
    found = [str(path.parent / other) for other in near]
    found += difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(found)}?" if found else ""
