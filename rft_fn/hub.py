"""Whether the model hub can be asked: found out in seconds, where its own client would try for a minute."""

import urllib.error
import urllib.request

__all__ = ["unreachable"]

_PATIENCE = 5  # seconds that the hub has to answer


def unreachable() -> str:
    """Why the hub cannot be asked; empty where it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PATIENCE).close()
    except urllib.error.HTTPError:
        return ""  # an answer
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached: {getattr(error, 'reason', error)}"
    return ""
