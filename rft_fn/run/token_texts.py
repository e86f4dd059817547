"""Tokens as pieces of text, one each."""

from collections.abc import Sequence
from typing import Any

__all__ = ["pieces"]


_UNFINISHED = "\ufffd"  # the bytes so far are no whole character


def pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that every token adds to the ones before it, special tokens by their names.

    Joined they are the text of all. Where a character is made of several tokens, the last of them has it and
    the others are empty.
    """
    found = []
    first = 0  # of the tokens that are decoded again, since the text of one may depend on the one before
    done = 0  # tokens with a known text
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(list(ids[first:done]))
        text = tokenizer.decode(list(ids[first:end]))
        if end < len(ids) and text.endswith(_UNFINISHED):
            found.append("")
            continue
        found.append(text[len(known) :])
        first = done
        done = end
    return found
