"""Conversations that a program outside holds with the policy, and the rows that they make.

A `Session` is one episode. Each of its requests brings a whole conversation, as the endpoints of language
models take it. Where the conversation goes on from one that the policy has answered, the tokens go on too:
the last prompt, the tokens that were sampled, and what the chat template writes behind them. Nothing that was
sampled is encoded again, since text does not give its tokens back. Where the program has rewritten what stood
before, a new row begins.

Nothing here speaks HTTP or knows of an engine: `Session.ask` gives the tokens to continue, `Session.answered`
takes those that were sampled.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rft_fn.collect.calls import Answer
from rft_fn.collect.episodes import Conversation
from rft_fn.data.messages import Turn, text_of
from rft_fn.environment import Renderer
from rft_fn.types import Sampling

__all__ = ["Ask", "Limits", "Session", "TooLong"]


class TooLong(ValueError):
    """A conversation that leaves no room for another token, or a session without another turn."""


class Limits(NamedTuple):
    """What ends an episode before its program does."""

    tokens: int  # of a row
    turns: int  # of the policy in an episode


class Ask(NamedTuple):
    """Tokens for the policy to continue, and where its answer goes."""

    ids: list[int]  # the whole prompt
    new: list[int]  # the last of them, which the row does not have
    row: int  # the row that goes on; -1 for a new one
    stem: tuple[int, int] | None  # (row, tokens) that a new row begins with
    key: tuple[int, int]  # (row, turn): what a draw of this session is named by
    turns: list[Turn]  # the conversation


@dataclass
class _Row:
    """A row of an episode, and after which messages it has how many tokens."""

    said: Conversation
    tools: str  # the digest of the tools that its first prompt tells of
    marks: list[tuple[list[str], int]] = field(default_factory=list)  # (digests of messages, tokens)
    busy: bool = False  # whether an answer to it is being sampled


@dataclass
class Session:
    """One episode: sample `sample` of prompt `prompt`, whose key is `key`."""

    prompt: int
    sample: int
    key: int
    limits: Limits
    sampling: Sampling  # of all answers, whatever the program asks for
    rows: list[_Row] = field(default_factory=list)
    begun: int = 0  # rows that were asked for
    turns: int = 0  # answers of the policy
    reward: float | None = None  # that the program, or who runs it, has given
    cut: str = ""  # the limit that was met: "turns" or "tokens"
    closed: bool = False  # no request is taken any more

    def ask(self, renderer: Renderer, turns: list[Turn], tools: Sequence[Any]) -> Ask:
        """Return the tokens of a conversation, and mark its row as busy.

        `TooLong` at a limit; ValueError for what the chat template refuses.
        """
        if self.turns >= self.limits.turns:
            self.cut = self.cut or "turns"
            raise TooLong(f"turns: expected at most {self.limits.turns} answers in an episode")
        digests = [_digest(turn) for turn in turns]
        found = self._continued(digests, _digest(list(tools)))
        if found is not None:
            r, count, size = found
            row = self.rows[r]
            try:
                new = renderer.reply(row.said.tokens[:size], turns[count:])
            except ValueError:  # the template does not continue here: the row begins anew
                found = None
            else:
                ids = row.said.tokens[:size] + new
                self._fits(ids)
                if size == len(row.said.tokens) and not row.busy:
                    row.busy = True
                    return Ask(ids, new, r, None, (row.said.seat, row.said.turns), turns)
                return self._begun(Ask(ids, new, -1, (r, size), (self.begun, 0), turns))
        ids = renderer.opening(turns, tools)
        self._fits(ids)
        return self._begun(Ask(ids, ids, -1, None, (self.begun, 0), turns))

    def _begun(self, ask: Ask) -> Ask:
        self.begun += 1
        return ask

    def _fits(self, ids: Sequence[int]) -> None:
        """Raise `TooLong` unless there is room for a token."""
        if not ids:
            raise ValueError("messages: expected at least one token, got none")
        if len(ids) >= self.limits.tokens:
            self.cut = self.cut or "tokens"
            raise TooLong(
                f"messages: expected fewer than {self.limits.tokens} tokens, for an answer to have room, "
                f"got {len(ids)}"
            )

    def _continued(self, digests: list[str], tools: str) -> tuple[int, int, int] | None:
        """Return (row, messages, tokens) of the longest conversation that this one goes on from."""
        best: tuple[int, int, int] | None = None
        for r, row in enumerate(self.rows):
            if row.tools != tools:
                continue
            for known, size in row.marks:
                count = len(known)
                longer = best is None or count > best[1]
                if longer and count < len(digests) and digests[:count] == known:
                    best = r, count, size
        return best

    def answered(
        self,
        ask: Ask,
        tools: Sequence[Any],
        reply: Turn,
        answer: Answer,
    ) -> None:
        """Add an answer that its program has got: `reply` is what it was told."""
        if ask.row >= 0:
            row = self.rows[ask.row]
            row.said.read(ask.new)
        else:
            row = _Row(Conversation(self.prompt, self.sample, ask.key[0], self.key), _digest(list(tools)))
            row.said.read(ask.ids)  # also what another row has sampled: it is learned there
        row.said.say(
            answer.tokens,
            answer.logp,
            version=answer.version,
            cut=answer.cut,
            routing=answer.routing,
            kept=answer.kept,
        )
        row.said.messages = [*ask.turns, reply]
        row.marks.append(([_digest(turn) for turn in row.said.messages], len(row.said.tokens)))
        row.busy = False
        if ask.row < 0:
            self.rows.append(row)
        self.turns += 1

    def forgotten(self, ask: Ask) -> None:
        """Go back to before `ask`: its program has left without the answer."""
        if ask.row >= 0:
            self.rows[ask.row].busy = False
        elif ask.key[0] == self.begun - 1:
            self.begun -= 1  # asked again it is the same draw


def _digest(x: Any) -> str:
    """Return the digest of a message, as far as a program sends it back; of tools, whole."""
    if isinstance(x, dict):
        calls = [
            (call["function"]["name"], call["function"].get("arguments")) for call in x.get("tool_calls", ())
        ]
        x = [x["role"], text_of(x), x.get("reasoning_content", ""), calls, x.get("tool_call_id", "")]
    return hashlib.blake2b(json.dumps(x, sort_keys=True).encode(), digest_size=16).hexdigest()
