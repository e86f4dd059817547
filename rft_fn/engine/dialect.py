"""How one kind of server is asked: the records, and the signatures of a dialect's functions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rft_fn.engine.http import Refused
from rft_fn.types import Sampling

__all__ = ["Ask", "Described", "Dialect", "Reply", "probe"]

PROMPT = (3, 4, 5)  # of a probe
LENGTH = 16  # tokens of its answers
FLAT = 1000.0  # a temperature at which all tokens are about equally likely


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


def probe(ask: Callable[[Ask], Reply]) -> None:
    """Ask a server for a few short samples. Refused for one that ignores an option.

    Servers skip fields that they do not know without a word, so nothing less shows that they honour them.
    """

    def sampled(seed: int, ends: Sequence[int] = (), **options: float) -> Reply:
        sampling = Sampling(max_new=LENGTH, **options)  # pyright: ignore[reportArgumentType]
        return ask(Ask(PROMPT, seed, sampling, LENGTH, ends))

    # at a high temperature every token is drawn anew, and its log-prob is that of all others
    first = sampled(1, temperature=FLAT)
    again = sampled(1, temperature=FLAT)
    other = sampled(2, temperature=FLAT)
    if len(first.tokens) != LENGTH:
        raise Refused(f"length, eos: expected {LENGTH} tokens without a stop, got {len(first.tokens)}")
    if first.tokens != again.tokens:
        raise Refused("seed: expected the same tokens twice, got others the second time")
    if first.tokens == other.tokens:
        raise Refused("seed, temperature: expected other tokens of another seed, got the same")
    if max(first.logp) - min(first.logp) > 0.5:
        raise Refused(
            "log-probs: expected those of the distribution that is sampled from, got others at temperature "
            f"{FLAT:g}: {min(first.logp):.3g} to {max(first.logp):.3g}"
        )

    # a cut that leaves one token, whose log-prob is 0
    for name, value in (("top_k", 1), ("top_p", 1e-6)):
        cut = sampled(1, **{name: value})
        if cut.tokens != sampled(2, **{name: value}).tokens:
            raise Refused(f"{name}: expected one token to be left by {name} {value:g}, got several")
        if min(cut.logp) < -1e-3:
            raise Refused(
                "log-probs: expected those of the distribution that is sampled from, got "
                f"{min(cut.logp):.3g} for the only token that {name} {value:g} leaves"
            )

    stop = first.tokens[3]
    want = first.tokens[: first.tokens.index(stop) + 1]
    ended = sampled(1, ends=[stop], temperature=FLAT)
    if ended.tokens != want:
        raise Refused(f"stop tokens: expected {len(want)} tokens up to {stop}, got {len(ended.tokens)}")
