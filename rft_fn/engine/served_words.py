"""What servers of vLLM and SGLang say of given tokens: log-probs, and the likeliest words there.

A teacher on a server gives no hidden states, no other temperature than 1, and no more words than it was
started for. What it cannot give is a ValueError when it is met, before a model is loaded.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rft_fn import border
from rft_fn.engine import openai, sglang
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.lifetime import EngineDead
from rft_fn.engine.server_protocol import Client, Described, Fault, Refused, ServerProtocol, checked
from rft_fn.patience import Patience
from rft_fn.text import printable
from rft_fn.types import Rollout

__all__ = ["ServedWords", "served_words"]

PROBED = 12  # tokens of the first question

T = TypeVar("T")


class Words(NamedTuple):
    """The answer for one sequence of S tokens; nothing predicts the first one."""

    logp: list[float]  # S - 1
    words: list[list[int]]  # S - 1 times K, the likeliest first
    words_logp: list[list[float]]


class ServedWords:
    """A model on a server that scores tokens; any number of requests at a time."""

    def __init__(
        self,
        server: str,
        protocol: ServerProtocol,
        client: Client,
        known: Described,
        config: EngineConfig,
        vocabulary: int,
    ):
        self.server = server
        self.protocol = protocol
        self.client = client
        self.known = known
        self.config = config
        self.vocabulary = vocabulary  # words of the student: what it is taught must be some of them

    def ask(self, tokens: Sequence[int], top_k: int) -> Words:
        """Return what the server says of a sequence; with top_k 0 only the log-probs of its tokens.

        Fault for log-probs and words that cannot be.
        """
        count = len(tokens) - 1  # nothing predicts the first
        if not top_k:
            logp = self.protocol.score(self.server, self.known, tokens)
            with checked():
                return Words(border.log_probs("log-probs", logp, count), [], [])
        found = Words(*self.protocol.likeliest(self.server, self.known, tokens, top_k))
        with checked():
            border.log_probs("log-probs", found.logp, count)
            border.words(
                found.words,
                found.words_logp,
                top_k=top_k,
                vocabulary=self.vocabulary,
                tokens=tokens[1:],
                own=found.logp,
            )
        return found

    def score(self, rollout: Rollout, rows: Sequence[int], top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log-probs [B, S], words [B, S, K], their log-probs) of some rows; 0 outside mask and rows.

        ValueError for a row that does not fit into the server's window, EngineDead where it stops answering.
        """
        window = self.known.window
        longest = max((int(rollout.length[b]) for b in rows), default=0)
        if window is not None and longest >= window:  # it samples one more
            raise ValueError(
                f"teacher: {self.server}: expected at most {window - 1} tokens of prompt and response, got "
                f"{longest}"
            )
        logp = torch.zeros_like(rollout.logp)
        ids = torch.zeros(*rollout.tokens.shape, top_k, dtype=torch.long)
        words_logp = logp.new_zeros(*logp.shape, top_k)
        asked = [rollout.tokens[b, : int(rollout.length[b])].tolist() for b in rows]
        with ThreadPoolExecutor(self.config.batch) as threads:
            answers = threads.map(lambda tokens: self.insist(partial(self.ask, tokens, top_k)), asked)
            for b, answer in zip(rows, answers):
                n = len(answer.logp) + 1
                logp[b, 1:n] = torch.tensor(answer.logp)
                if top_k:
                    ids[b, 1:n] = torch.tensor(answer.words)
                    words_logp[b, 1:n] = torch.tensor(answer.words_logp)
        mask = rollout.mask
        wide = mask[..., None]
        return torch.where(mask, logp, 0), torch.where(wide, ids, 0), torch.where(wide, words_logp, 0)

    def insist(self, question: Callable[[], T]) -> T:
        """Return the answer to a question, with the patience of all servers. EngineDead without one."""
        try:
            return insist(self.server, question, self.client, lambda error: True)
        except (Fault, Refused) as error:
            raise EngineDead(f"teacher: {self.server}: {self.client.line(error)}") from None


def insist(server: str, question: Callable[[], T], client: Client, passes: Callable[[Fault], bool]) -> T:
    """Return the answer to a question; after a Fault that `passes` it is asked again.

    The last Fault where patience ends, and Refused at once.
    """
    patience = Patience()
    while True:
        try:
            return question()
        except Fault as error:
            seconds = patience.wait(error.wait) if passes(error) else None
            if seconds is None:
                raise
            if patience.failures == 1:
                line = f"warning: teacher: {server}: {client.line(error)}; trying again"
                print(
                    printable(f"{line} for up to {patience.deadline:.0f} s"),
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(seconds)


def served_words(config: EngineConfig, tokenizer: Any, *, vocabulary: int, top_k: int) -> ServedWords:
    """Meet the server of `config`, which must score tokens of `tokenizer` with `top_k` words.

    `vocabulary` is the number of words that the student's head has. A server that says that it is busy, or
    not ready yet, is waited for. ValueError for one that does not answer, gives fewer words, or names tokens
    by another tokenizer.
    """
    (server,) = config.servers
    client = Client(config.key_env)
    make = openai.protocol if config.type == "openai" else sglang.protocol
    protocol: ServerProtocol = make(client, config.timeout)
    tokens = _probed(tokenizer)
    try:
        known = insist(server, partial(protocol.describe, server), client, is_busy)
        said = insist(server, partial(protocol.texts, server, known, tokens), client, is_busy)
    except (Fault, Refused) as error:
        raise ValueError(f"teacher: {server}: {client.line(error)}") from None
    for number, theirs in zip(tokens[1:], said):
        ours = tokenizer.decode([number])
        if theirs.strip() != ours.strip():
            raise ValueError(
                f"teacher: {server}: expected the tokenizer of the student, whose token {number} is {ours!r}"
                f", got one whose token {number} is {theirs!r}"
            )
    found = ServedWords(server, protocol, client, known, config, vocabulary)
    try:
        insist(server, partial(found.ask, tokens, top_k), client, is_busy)
    except (Fault, Refused) as error:
        hint = f"; start vLLM with --max-logprobs {top_k}" if top_k and config.type == "openai" else ""
        raise ValueError(
            f"top_k: expected {top_k} words of each token from {server}: {client.line(error)}{hint}"
        ) from None
    return found


def is_busy(error: Fault) -> bool:
    """Return whether a server says itself that it may answer later."""
    return error.busy


def _probed(tokenizer: Any) -> list[int]:
    """Return tokens over the whole vocabulary that are plain text, which each server shows alike."""
    plain = [i for i in sorted(tokenizer.get_vocab().values()) if tokenizer.decode([i]).strip().isalnum()]
    plain = [i for i in plain if tokenizer.decode([i]).isascii()]
    step = max(1, len(plain) // PROBED)
    return [plain[0], *plain[::step]][: PROBED + 1]
