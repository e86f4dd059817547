"""Where a response ends: at a token, or at the token that completes a text. Shared by all engines."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

__all__ = ["Stop"]


class Stop:
    """Decides whether a response ends with its last token.

    It does where that token is one of `ends` or of the ids in `stop`, and where it completes one of the texts
    in `stop` in the decoded response. The token is part of the response, and is trained.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int], stop: Sequence[int | str]):
        self.tokenizer = tokenizer
        self.ids = ends | {x for x in stop if not isinstance(x, str)}
        self.texts = [x for x in stop if isinstance(x, str)]

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the response `tokens` ends with the last of them."""
        if tokens[-1] in self.ids:
            return True
        if not self.texts:
            return False
        tail = self._tail(tokens)
        return any(text in tail for text in self.texts)

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """The number of tokens up to the first one that ends a response, None if none does."""
        size = len(tokens)
        found = None
        if self.texts and self._holds_text(tokens):
            size = bisect_left(range(size), True, key=lambda i: self._holds_text(tokens[: i + 1])) + 1
            found = size
        return next((t for t, token in enumerate(tokens[:size], 1) if token in self.ids), found)

    def unfinished(self, tokens: Sequence[int]) -> list[int]:
        """The end of the tokens before a response in which a text may begin: it holds none as a whole.

        Of a response that has not ended, these are all tokens. Nothing without texts.
        """
        first = 0
        if not self.texts:
            first = len(tokens)
        elif self._holds_text(tokens):
            first = bisect_left(range(len(tokens)), True, key=lambda i: not self._holds_text(tokens[i:]))
        return list(tokens[first:])

    def _holds_text(self, tokens: Sequence[int]) -> bool:
        text = self._text(tokens)
        return any(x in text for x in self.texts)

    def _tail(self, tokens: Sequence[int]) -> str:
        """The end of the decoded response, long enough for any text that the last token completes."""
        reach = max(len(x) for x in self.texts) + len(self._text(tokens[-1:])) + 8
        size = reach
        # tokens that decode to no text (special ones, parts of a character) make the tail longer
        while size < len(tokens) and len(self._text(tokens[-size:])) < reach:
            size *= 2
        return self._text(tokens[-size:])

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
