"""Checks requests, finds the end of a response, and assembles the rollout, for all engines."""

import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import partial
from itertools import chain
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import rng, tree
from rft_fn.data.responses import render
from rft_fn.model.placeholders import placeholder_ids
from rft_fn.types import Engine, Media, Rollout, Sampling
from rft_fn.types.engine import OnRow

__all__ = [
    "BadPrompt", "BadRequest", "Request", "Response", "Row", "Stop", "assemble", "drawn_with", "empty",
    "end_tokens", "token_ids",
]  # fmt: skip


class BadRequest(ValueError):
    """A request that an engine refuses before it has done anything."""


class BadPrompt(BadRequest):
    """A request that is refused for one of its prompts."""

    def __init__(self, number: int, expected: str, got: str, advice: str = ""):
        super().__init__(f"prompts: expected {expected}, got {got} in prompt {number}{advice}")
        self.number = number
        self.reason = expected, got, advice

    def __reduce__(self):
        return BadPrompt, (self.number, *self.reason)

    def moved(self, by: int) -> "BadPrompt":
        """Return the same error for a longer list, in which these prompts begin at number `by`."""
        return BadPrompt(self.number + by, *self.reason)


class Response(NamedTuple):
    """A sampled response."""

    tokens: list[int]
    logp: list[float]  # of each token
    ended: bool  # by an end token or a stop text; False where max_new cut it off
    routing: Tensor | None = None  # [n - 1, M, k] of all n tokens of its row but the last, as of a rollout
    kept: Sequence[Tensor] | None = None  # [W] ids of the words that were left at each token
    versions: Sequence[int] | None = None  # of the weights that sampled each token; None: those of the engine


class Row(NamedTuple):
    """The part of a request that belongs to one row of the rollout."""

    key: int  # of its stream
    max_new: int  # tokens
    start: int  # draws of the stream that are spent
    temperature: float = 1.0  # 0 is greedy


class Request(NamedTuple):
    """The arguments of a call of `generate`: n responses to each of N prompts, in B = N n rows."""

    prompts: Sequence[Any]  # N
    keys: Sequence[Any]  # N
    n: int
    sampling: Sampling
    max_new: Sequence[int] | None = None  # B
    start: Sequence[int] | None = None  # B
    temperature: Sequence[float] | None = None  # B
    on_row: OnRow | None = None

    @property
    def of_rows(self) -> dict[str, Any]:
        """Return the per-row numbers that are given, which not every engine supports."""
        options = {"max_new": self.max_new, "start": self.start, "temperature": self.temperature}
        return {name: x for name, x in options.items() if x is not None}

    def options(self, engine: Engine) -> dict[str, Any]:
        """Return `of_rows`, and `on_row` for an engine that takes it."""
        if self.on_row is None or "rows" not in engine.status()["supported"]:
            return self.of_rows
        return self.of_rows | {"on_row": self.on_row}

    def ask(self, engine: Engine) -> Rollout:
        """Return what an engine samples."""
        options = self.options(engine)
        return engine.generate(self.prompts, self.keys, n=self.n, sampling=self.sampling, **options)

    def part(self, shard: slice) -> "Request":
        """Return the request for a contiguous part of the prompts, and of their rows."""
        of_rows = slice(shard.start * self.n, shard.stop * self.n)
        return self._replace(
            prompts=self.prompts[shard],
            keys=self.keys[shard],
            max_new=None if self.max_new is None else self.max_new[of_rows],
            start=None if self.start is None else self.start[of_rows],
            temperature=None if self.temperature is None else self.temperature[of_rows],
            on_row=None if self.on_row is None else partial(_moved, self.on_row, of_rows.start),
        )

    def rows(self) -> list[Row]:
        """Return the B rows; the request must be one that `check` passes."""
        size = len(self.keys) * self.n
        limits = [self.sampling.max_new] * size
        if self.max_new is not None:
            limits = [index(x) for x in self.max_new]
        starts = [0] * size if self.start is None else [index(x) for x in self.start]
        warmths = [self.sampling.temperature] * size
        if self.temperature is not None:
            warmths = [float(x) for x in self.temperature]
        pairs = [key if isinstance(key, tuple) else (key, 0) for key in self.keys]
        streams = [rng.fold_in(key, first + j) for key, first in pairs for j in range(self.n)]
        return [Row(*row) for row in zip(streams, limits, starts, warmths, strict=True)]

    def check(self, ids: Sequence[Sequence[int]], window: int | None) -> None:
        """Raise BadRequest unless there is a key for each prompt and every response fits after its prompt.

        `ids` are the tokens of each prompt. `window` is the most tokens that the model reads, None without a
        limit.
        """
        self.check_rows()
        n = self.n
        longest = [self.sampling.max_new] * len(ids)
        if self.max_new is not None:
            longest = [max(index(x) for x in self.max_new[i * n : i * n + n]) for i in range(len(ids))]

        # one bad prompt is named by its number; a response that does not fit would be cut off in silence
        for i, (prompt, most) in enumerate(zip(ids, longest, strict=True)):
            if any(isinstance(token, str) for token in prompt):
                raise BadPrompt(i, "token ids", "text", "; encode it with the tokenizer")
            if not prompt:
                raise BadPrompt(i, "at least one token", "none")
            if window and len(prompt) + most > window:
                raise BadPrompt(
                    i,
                    f"prompt + max_new <= the model's window of {window} tokens",
                    f"{len(prompt)} + {most}",
                    "; lower max_new, or drop long prompts (max_prompt)",
                )

    def check_rows(self) -> None:
        """Raise BadRequest unless N prompts have a key each, and B = N n rows a number in range."""
        count, keys, n = len(self.prompts), self.keys, self.n
        if count != len(keys) or n < 1:
            raise BadRequest(
                f"prompts: expected a key for each and n >= 1, got {count} prompts, {len(keys)} keys, n = {n}"
            )
        for i, key in enumerate(keys):
            parts = key if isinstance(key, tuple) else (key, 0)
            whole = len(parts) == 2 and all(isinstance(x, int) and not isinstance(x, bool) for x in parts)
            if not whole or parts[1] < 0:
                raise BadRequest(
                    f"keys: expected an int, or a pair (int, number of the first sample), got {key!r} "
                    f"for prompt {i}"
                )
        if self.max_new is not None:
            _check_numbers("max_new", self.max_new, count * n, 1, self.sampling.max_new)
        if self.start is not None:
            _check_numbers("start", self.start, count * n, 0)
        if self.temperature is not None:
            _check_size("temperature", self.temperature, count * n)
            for b, x in enumerate(self.temperature):
                try:
                    fits = 0 <= float(x) < math.inf
                except (TypeError, ValueError):
                    fits = False
                if not fits:
                    raise BadRequest(f"temperature[{b}]: expected a number >= 0, got {x}")


def _moved(on_row: OnRow, first: int, b: int, tokens: Sequence[int], ended: bool) -> None:
    """Tell of row b of a part of a request that begins at row `first` of the whole."""
    on_row(first + b, tokens, ended)


def token_ids(prompts: Sequence[Any], tokenizer: Any = None) -> list[list[int]]:
    """Return the token ids of each prompt: a list itself, the `.ids` of an object, an encoded text.

    A text is a question, encoded as `data` encodes one: as the first turn of a chat where the tokenizer has
    a template. BadPrompt for a text without a tokenizer, and for one that the template refuses.
    """
    return [_ids(i, prompt, tokenizer) for i, prompt in enumerate(prompts)]


def _ids(number: int, prompt: Any, tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        return list(getattr(prompt, "ids", prompt))
    if tokenizer is None:
        raise BadPrompt(number, "token ids", "text without a tokenizer")
    if not prompt:
        raise BadPrompt(number, "at least one character", "an empty text")
    try:
        return render(tokenizer, prompt)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise BadPrompt(number, "text that can be encoded", reason) from None


def _check_size(name: str, numbers: Sequence[Any], size: int) -> None:
    """Raise BadRequest unless there is a number for each of `size` rows."""
    if not isinstance(numbers, Sized):
        raise BadRequest(f"{name}: expected one for each row, B = {size}, got {numbers!r}")
    if len(numbers) != size:
        raise BadRequest(f"{name}: expected one for each row, B = {size}, got B = {len(numbers)}")


def _check_numbers(name: str, numbers: Sequence[int], size: int, least: int, most: int | None = None) -> None:
    """Raise BadRequest unless there are `size` integers from `least` to `most`."""
    _check_size(name, numbers, size)
    expected = f"an integer >= {least}"
    if most is not None:
        expected = f"an integer from {least} to sampling.max_new = {most}"
    for b, x in enumerate(numbers):
        try:
            fits = least <= index(x) and (most is None or index(x) <= most)
        except TypeError:
            fits = False
        if not fits:
            raise BadRequest(f"{name}[{b}]: expected {expected}, got {x}")


def drawn_with(rollout: Rollout, sampling: Sampling, temperature: Sequence[float] | None = None) -> Rollout:
    """Add what a rollout was drawn with: `sampling`, and the temperature of each row."""
    warmth = None if temperature is None else torch.tensor([float(x) or 1.0 for x in temperature])
    return tree.replace(rollout, sampling=sampling, temperature=warmth)


def empty(version: int = 0) -> Rollout:
    """Return the rollout without rows."""
    return assemble([], [], pad=0, version=version)


def assemble(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    *,
    pad: int,
    version: int,
    media: Sequence[Mapping[str, Tensor] | None] = (),
    tokenizer: Any = None,
) -> Rollout:
    """Assemble the Rollout [B, S] of B = N G responses, the G responses to each of N prompts side by side.

    `media` are the processor's tensors of each prompt, None for one without. No prompts give a rollout
    without rows, B = S = 0. Warns of tokens of responses that `tokenizer` has no text for, where it is given.
    ValueError for a response without a log-prob for each token.
    """
    count = len(prompts)
    each = len(responses) // count if count else 0
    group = torch.arange(count).repeat_interleave(each)
    owners = [prompts[i] for i in group.tolist()]
    for response in responses:
        tokens, logp = len(response.tokens), len(response.logp)
        if logp != tokens:
            raise ValueError(f"response: expected a log-prob for each of {tokens} tokens, got {logp}")

    # right-padded; log-probs stay 0 on prompts and padding
    first = torch.tensor([len(prompt) for prompt in owners], dtype=torch.long)
    length = first + torch.tensor([len(response.tokens) for response in responses], dtype=torch.long)
    column = torch.arange(max(length.tolist(), default=0))
    real = column < length[:, None]
    mask = real & (column >= first[:, None])
    tokens = torch.full(mask.shape, pad)
    texts = ([*prompt, *response.tokens] for prompt, response in zip(owners, responses, strict=True))
    tokens[real] = _joined(texts, tokens.dtype)
    logp = torch.zeros(mask.shape)
    logp[mask] = _joined((response.logp for response in responses), logp.dtype)

    if tokenizer is not None:
        _announce_nameless(tokens[mask], tokenizer)
    oldest, versions = torch.full((len(responses),), version), None
    told = [response.versions for response in responses if response.versions is not None]
    if told:
        oldest = torch.tensor([min(x, default=version) for x in told])
        versions = torch.zeros_like(tokens)
        versions[mask] = _joined(told, tokens.dtype)
    return Rollout(
        tokens=tokens,
        mask=mask,
        logp=logp,
        length=length,
        truncated=torch.tensor([not response.ended for response in responses], dtype=torch.bool),
        group=group,
        version=oldest,
        media=Media.of_prompts(media, each) if count and media else None,
        routing=_routing(responses, mask.shape[1]),
        kept=_kept([response.kept for response in responses], mask),
        versions=versions,
    )


def _routing(responses: Sequence[Response], size: int) -> Tensor | None:
    """Return the routing [B, S, M, k] of responses, if they have one."""
    routed = [response.routing for response in responses if response.routing is not None]
    if not routed:
        return None
    out = routed[0].new_zeros(len(responses), size, *routed[0].shape[1:])
    for row, x in zip(out, routed, strict=True):
        row[: len(x)] = x
    return out


def _kept(sets: Sequence[Sequence[Tensor] | None], mask: Tensor) -> Tensor | None:
    """Return the words [B, S, W] that were left at each token in mask, as of a rollout, if rows have them."""
    known = [x for x in sets if x is not None]
    if not known or len(known) < len(sets):
        return None
    each = list(chain.from_iterable(known))
    size = torch.tensor([len(x) for x in each])
    of_tokens = torch.zeros(len(each), max(size.tolist(), default=0), dtype=torch.int32)
    of_tokens[torch.arange(of_tokens.shape[1]) < size[:, None]] = torch.cat(each).int() + 1
    kept = torch.zeros(*mask.shape, of_tokens.shape[1], dtype=torch.int32)
    kept[mask] = of_tokens
    return kept


def _announce_nameless(tokens: Tensor, tokenizer: Any) -> None:
    """Warn of the share of sampled tokens [T] that a tokenizer has no text for.

    Models often have more ids than their tokenizer, to fill blocks of 64 or 128. Such an id is a token of the
    distribution like any other, for the sampler and in training, but no reward reads it.
    """
    beyond = tokens[tokens >= len(tokenizer)]
    nameless = [x for x in beyond.unique().tolist() if not _has_text(tokenizer, x)]
    count = int(torch.isin(beyond, torch.tensor(nameless, dtype=torch.long)).sum())
    if count:
        # a power of ten, so that a run says it once and again only where the share has changed
        share = 100 * 10 ** round(math.log10(count / len(tokens)))
        warnings.warn(
            f"engine: about {share:g} % of the sampled tokens are ids that the tokenizer has no text for "
            f"(it has {len(tokenizer)}): they are trained on, and no reward reads them; cut the model's "
            "vocabulary to the tokenizer's (resize_token_embeddings), or fill it with tokens",
            stacklevel=3,
        )


def _has_text(tokenizer: Any, token: int) -> bool:
    """Return whether a tokenizer knows an id; sentencepiece raises for others."""
    try:
        return tokenizer.convert_ids_to_tokens(token) is not None
    except (IndexError, KeyError):
        return False


def _joined(lists: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Concatenate the numbers of all lists."""
    return torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)


def end_tokens(lm: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response, by the tokenizer and the model's generation config.

    Chat models name several there. Placeholders of media end one too: after one the model would look for
    media that are not there, and the last token of a row is never read.
    """
    named = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, (list, tuple)) else [named])]
    places = placeholder_ids(lm.config) if hasattr(lm, "config") else frozenset[int]()
    return places.union(token for token in ends if token is not None)


_ANYWHERE = {" ", "\ufffd"}  # what decoders put between tokens, or in place of a part of a character


def _adds_its_text(tokenizer: Any) -> bool:
    """Return whether a token adds to the decoded text what it is alone, beside `_ANYWHERE`.

    It does where all that decodes is known to join the tokens' own texts.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return False
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        kind.decode is not PreTrainedTokenizerBase.decode
        or kind._decode is not PreTrainedTokenizerFast._decode
    ):
        return False
    return core.decoder is None or _joins(json.loads(core.decoder.__getstate__()))


def _joins(decoder: Mapping[str, Any]) -> bool:
    """Return whether a decoder, as its library writes it, joins the texts of tokens."""
    kind = decoder["type"]
    if kind == "Sequence":
        return all(map(_joins, decoder["decoders"]))
    if kind == "Replace":
        return len(decoder["pattern"].get("String", "")) == 1
    if kind == "Strip":
        return decoder["content"] == " "
    return kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "BPEDecoder")


class Stop:
    """Decides whether a response ends with its last token.

    It does where that token is one of `ends` or of the ids in `stop`, and where it completes one of the texts
    in `stop` in the decoded response. The token is part of the response, and is trained.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int], stop: Sequence[int | str]):
        self.tokenizer = tokenizer
        self.ids = ends | {x for x in stop if not isinstance(x, str)}
        self.texts = [x for x in stop if isinstance(x, str)]
        self._may: dict[int, bool] = {}  # whether a token may complete a text
        last = {x[-1] for x in self.texts}
        self._told_by_token = bool(last) and last.isdisjoint(_ANYWHERE) and _adds_its_text(tokenizer)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the response `tokens` ends with the last of them."""
        if tokens[-1] in self.ids or not self.texts:
            return tokens[-1] in self.ids
        if not self._may_complete(tokens[-1]):  # nearly all: decoding the tail takes a hundred times as long
            return False
        tail = self._tail(tokens)
        return any(text in tail for text in self.texts)

    def extend(self, response: list[int], tokens: Sequence[int]) -> bool:
        """Append tokens to a response, up to the first that ends it. Returns whether one does."""
        if not self.texts and self.ids.isdisjoint(tokens):
            response += tokens
            return False
        for token in tokens:
            response.append(token)
            if self.ends(response):
                return True
        return False

    def _may_complete(self, token: int) -> bool:
        """Return whether a text can be complete with this token, and was not before it."""
        if not self._told_by_token:
            return True
        may = self._may.get(token)
        if may is None:
            own = self._text([token])
            # a part of a character shows only beside the others
            may = self._may[token] = "\ufffd" in own or any(x[-1] in own for x in self.texts)
        return may

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first one that ends a response, None if none does."""
        size, by_text = len(tokens), None
        if self.texts and self._holds_text(tokens):
            by_text = bisect_left(range(size), True, key=lambda i: self._holds_text(tokens[: i + 1])) + 1
            size = by_text
        return next((t for t, token in enumerate(tokens[:size], 1) if token in self.ids), by_text)

    def unfinished(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens before a response in which a stop text may start, but not end.

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
        """Return the end of the decoded response, long enough for a text that the last token completes."""
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
