"""Text that is shown or written: without secrets of addresses, terminal controls, broken Unicode."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

# names of a query's words that hold secrets
_SECRET = re.compile(r"(?i)(^|[_.-]|api|access)key$|token|secret|passw|signature|^sig$|^auth(orization)?$")


def _secret(address: str) -> str:
    """Return what is secret in an address, or in several with commas between them; "" for nothing."""
    if "://" not in address:
        return ""
    if re.search("//[^/?#]*@", address):
        return "a name and a password in front of the host"
    for word in map(unquote, re.findall("[?&;]([^?&;=#]+)", address)):
        if _SECRET.search(word):
            return f"{word!r} in its query"
    return ""


def no_secret(name: str, address: str, instead: str) -> None:
    """Check that an address has no secret, which would be written to the files of a run.

    `instead` says where a secret belongs. The ValueError does not show the secret.
    """
    secret = _secret(address)
    if secret:
        raise ValueError(
            f"{name}: expected an address without a secret, which a run would write into its config.json, "
            f"got {secret}; {instead}"
        )


def shown_without_secrets(text: str) -> str:
    """Put *** in place of the secrets of the addresses in a text."""

    def hidden(word: re.Match[str]) -> str:
        return f"{word['name']}=***" if _SECRET.search(unquote(word["name"])) else word[0]

    text = re.sub("//[^/]*@", "//***@", text)
    return re.sub(r"(?<=[?&;])(?P<name>[^?&;=#]+)=[^&;,#'\"\s]*", hidden, text)


def error_text(error: BaseException) -> str:
    """Return the text of an error of code that is not ours in one line; its type where it gives none."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # its text is code that is not ours, too
        text = ""
    return text or type(error).__name__


# what a terminal obeys, or cannot show: controls but for tab and new line, directions of text, surrogates
_UNSHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: Any) -> str:
    """Return a text with `\\x1b` and the like in place of what would steer the terminal it is printed on."""
    return _UNSHOWN.sub(lambda found: ascii(found[0])[1:-1], str(text))


# half of a surrogate pair: JSON may hold one, no file can be written with it
_HALF = re.compile(r"[\ud800-\udfff]")


def check_text(value: Any) -> None:
    """Raise ValueError for text inside a value of JSON that is no Unicode: half of a surrogate pair."""
    place = _half_in(value)
    if place is not None:
        at = f" at {place}" if place else ""
        raise ValueError(f"expected Unicode text, got half of a surrogate pair{at}; write U+FFFD instead")


def _half_in(value: Any) -> str | None:
    """Return the place of the first text with half of a pair, as "['messages'][0]"; None for none."""
    if isinstance(value, str):
        return "" if not value.isascii() and _HALF.search(value) else None
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        if any(_half_in(name) is not None for name in value):
            return ""
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        inner = list(enumerate(value))
    for name, x in inner:
        place = _half_in(x)
        if place is not None:
            return f"[{name!r}]{place}"
    return None


def writable(text: str) -> str:
    """Return a text with U+FFFD in place of each half of a surrogate pair, which nothing can write."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)
