"""How one kind of server is asked: the records, and the signatures of a dialect's functions."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rft_fn.engine.http import Fault, Refused
from rft_fn.types import Sampling

__all__ = ["Ask", "Described", "Dialect", "Reply", "check_reply", "probe"]

PROMPT = (3, 4, 5)  # of a probe
LENGTH = 16  # tokens of its answers
HOT = 2.0  # the highest temperature that vLLM takes
SEEDS = range(3, 9)  # of the first tokens that are compared


class Described(NamedTuple):
    """A server, as it was found."""

    route: str  # where it generates
    model: str  # the name that it serves the model by
    window: int | None  # tokens
    label: str  # of its weights; empty if it does not say
    supported: frozenset[str]  # those of "load", "score" and "sleep" that do something


class Ask(NamedTuple):
    """The request of one sample."""

    prompt: Sequence[int]
    seed: int
    sampling: Sampling
    max_new: int
    ends: Sequence[int]  # tokens that end it, `sampling.stop` included


class Reply(NamedTuple):
    """The tokens of one sample, as a server returned them."""

    tokens: list[int]
    logp: list[float]
    label: str | None  # of the weights that drew them; None if the server does not say


class Dialect(Protocol):
    """How one kind of server is asked. All functions raise Fault and Refused."""

    name: str
    hint: str  # the options that a server has to be started with

    def describe(self, server: str) -> Described:
        """What a server is and can do."""
        ...

    def check(self, sampling: Sampling) -> None:
        """BadRequest for a distribution whose log-probs the servers do not report."""
        ...

    def sample(self, server: str, known: Described, ask: Ask) -> Reply:
        """One sample."""
        ...

    def score(self, server: str, known: Described, tokens: Sequence[int]) -> list[float]:
        """The log-prob of each token but the first, at `Sampling()`."""
        ...

    def load(self, server: str, folder: str, label: str, names: int) -> None:
        """Have the server read weights; it has confirmed `names` tensors, `label` and an empty cache."""
        ...

    def sleep(self, server: str) -> None:
        """Have the server give its memory back."""
        ...

    def wake(self, server: str) -> None:
        """Have the server take its memory again."""
        ...


def check_reply(reply: Reply, ask: Ask, *, vocabulary: int, label: str) -> None:
    """Fault for an answer that cannot be right."""
    if not 0 < len(reply.tokens) <= ask.max_new or len(reply.tokens) != len(reply.logp):
        raise Fault(
            f"expected 1 to {ask.max_new} tokens with a log-prob each, got {len(reply.tokens)} and "
            f"{len(reply.logp)}"
        )
    if not all(0 <= token < vocabulary for token in reply.tokens):
        raise Fault(f"expected tokens below {vocabulary}, got {max(reply.tokens)}")
    if not all(math.isfinite(x) and x <= 1e-3 for x in reply.logp):
        raise Fault(f"expected finite log-probs, none above 0, got {reply.logp[:4]}")
    if reply.label is not None and reply.label != label:
        raise Fault(f"expected weights {label!r}, got {reply.label!r}")


def probe(ask: Callable[[Ask], Reply], score: Callable[[Sequence[int]], list[float]]) -> None:
    """Ask a server for a few short samples and scores. Refused for one that ignores an option.

    Servers skip fields that they do not know without a word, so nothing less shows that they honour them.
    """

    def sampled(seed: int, sampling: Sampling, ends: Sequence[int] = ()) -> Reply:
        return ask(Ask(PROMPT, seed, sampling, LENGTH, ends))

    # so hot, two seeds never draw the same tokens
    hot = Sampling(temperature=HOT)
    first = sampled(1, hot)
    again = sampled(1, hot)
    other = sampled(2, hot)
    if len(first.tokens) != LENGTH:
        raise Refused(f"length, eos: expected {LENGTH} tokens without a stop, got {len(first.tokens)}")
    if first.tokens != again.tokens:
        raise Refused("seed: expected the same tokens twice, got others the second time")
    if first.tokens == other.tokens:
        raise Refused("seed, temperature: expected other tokens of another seed, got the same")

    # a cut that leaves one token, whose log-prob is 0
    for name, cutting in (("top_k 1", Sampling(top_k=1)), ("top_p 1e-6", Sampling(top_p=1e-6))):
        cut = sampled(1, cutting)
        if cut.tokens != sampled(2, cutting).tokens:
            raise Refused(f"{name}: expected the same token of every seed, got others")
        if min(cut.logp) < -1e-3:
            raise Refused(
                "log-probs: expected those of the distribution that is sampled from, got "
                f"{min(cut.logp):.3g} for the only token that {name} leaves"
            )

    # the log-probs of two tokens are half as far apart at temperature 2 as the model's own are
    samples = [sampled(seed, hot) for seed in SEEDS]
    samples.sort(key=lambda x: x.logp[0])
    low, high = samples[0], samples[-1]
    found = high.logp[0] - low.logp[0]
    own = score([*PROMPT, high.tokens[0]])[-1] - score([*PROMPT, low.tokens[0]])[-1]
    if abs(own) > 0.2 and abs(found - own / HOT) > abs(found - own):
        raise Refused(
            f"log-probs: expected two that differ by {own / HOT:.3g} at temperature {HOT:g}, got {found:.3g}"
        )

    stop = first.tokens[3]
    want = first.tokens[: first.tokens.index(stop) + 1]
    ended = sampled(1, hot, ends=[stop])
    if ended.tokens != want:
        raise Refused(f"stop tokens: expected {len(want)} tokens up to {stop}, got {len(ended.tokens)}")
