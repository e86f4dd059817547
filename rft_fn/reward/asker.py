"""The prompts of a judge: tokens in which quoted text is text, whatever it spells."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft_fn.data import Processing
from rft_fn.data.chat import Chat
from rft_fn.data.lesson import special_tokens
from rft_fn.data.medium import Medium
from rft_fn.data.prompts import Prompt
from rft_fn.data.responses import render
from rft_fn.reward.forms import Form

__all__ = ["Asker"]


class Asker:
    """Makes questions of a form for a judge, by its tokenizer.

    `processing` is the processor of a judge that sees or hears. ValueError for a tokenizer or a chat template
    that leaves no way to tell the places of the quoted texts.
    """

    def __init__(self, form: Form, tokenizer: Any, processing: Processing | None = None):
        self.form = form
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer, {}, processing)
        self._places = [piece.place for piece in form.pieces if piece.place]
        self._mark = self._find_mark()
        self._fixed = self._cut(self._rendered(self._text(self._mark)))

    def prompt(self, values: Mapping[str, Any], index: int, media: Sequence[Medium] = ()) -> Prompt:
        """Return the question after the media. ValueError, with the row `index`, as of `Form.filled`."""
        fixed = self._fixed
        tensors = None
        if media:
            encoded = self._encoded(media)
            fixed = self._cut(encoded.ids)
            tensors = encoded.media

        # each quoted text between the fixed parts around it
        ids = list(fixed[0])
        for place, after in zip(self._places, fixed[1:], strict=True):
            ids += self._quoted(self.form.filled(place, values, f"completion {index}"))
            ids += after
        return Prompt(ids, self.form.question(values), dict(values), index, media=tensors)

    def _quoted(self, text: str) -> list[int]:
        """Encode a text without special tokens; a character that has no token keeps its unknown."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        special = special_tokens(self.tokenizer) - {self.tokenizer.unk_token_id}
        return [i for i in ids if i not in special]

    def _text(self, mark: str) -> str:
        """Return the template with the mark in each of its places."""
        return "".join(piece.text + (mark if piece.place else "") for piece in self.form.pieces)

    def _rendered(self, text: str) -> list[int]:
        """Return the tokens of the question's text in the judge's chat template."""
        return render(self.tokenizer, text, system=self.form.system)

    def _encoded(self, media: Sequence[Medium]) -> Any:
        """Return the tokens and tensors of media and the question's text."""
        content: list[dict[str, Any]] = [{"type": medium.kind, medium.kind: medium} for medium in media]
        content.append({"type": "text", "text": self._text(self._mark)})
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.form.system is not None:
            turns.insert(0, {"role": "system", "content": self.form.system})
        return self.chat.encoded(turns, ask=True)

    def _find_mark(self) -> str:
        """Find a special token that the question itself does not have."""
        # nor a placeholder of media, or one that takes the spaces around it
        used = set(self._rendered(self._text("")))
        if self.chat.processing is not None:
            marks = [self.chat.processing.mark(kind) for kind in self.chat.processing.kinds]
            used |= set(self.tokenizer.convert_tokens_to_ids(marks))
        added = self.tokenizer.added_tokens_decoder
        usual = [self.tokenizer.pad_token_id, self.tokenizer.eos_token_id]
        for i in [*usual, *sorted(added)]:
            token = added.get(i)
            if token is None or i in used or token.lstrip or token.rstrip:
                continue
            if token.special:
                return token.content
        raise ValueError("tokenizer: expected a special token that its chat template does not use, got none")

    def _cut(self, ids: Sequence[int]) -> list[list[int]]:
        """Return the tokens between the marks. ValueError unless each place has its mark."""
        mark = self.tokenizer.convert_tokens_to_ids(self._mark)
        parts: list[list[int]] = [[]]
        for i in ids:
            if i == mark:
                parts.append([])
            else:
                parts[-1].append(i)
        if len(parts) != len(self._places) + 1:
            raise ValueError(
                f"chat template: expected it to render the question once, with {len(self._places)} places, "
                f"got {len(parts) - 1}"
            )
        return parts
