"""Asks servers: the client, the records, the functions of a protocol, and the model that servers hold."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from rft_fn import border
from rft_fn import model as model_lib
from rft_fn.engine import requests
from rft_fn.engine.weight_channel import Parcel
from rft_fn.engine.weight_folder import Manifest, manifest
from rft_fn.model import quantize
from rft_fn.model.weight_files import Stored, converted, slices
from rft_fn.patience import may_pass, retry_after
from rft_fn.reward.connection import Broken, Connections, exchange, masked, token_in
from rft_fn.reward.event_loop import EventLoop
from rft_fn.types import Sampling

__all__ = [
    "Ask", "Client", "Described", "Fault", "Refused", "RemoteModel", "Reply", "Room", "ServerProtocol",
    "check_reply", "checked", "expected", "limit", "probe", "remote_model", "stored_tensors",
]  # fmt: skip


KEY = "RFT_SERVER_KEY"  # the environment variable with the servers' API key, unless another one is named
UNAUTHORIZED = 401
BUSY = (429, 503)  # a server that answers others, or not yet
REFUSED = range(400, 500)
LEAST_BYTES = 1 << 20  # of the limit of an answer
TOKEN_BYTES = 1 << 10  # of an answer about one token, at most
LINE = 400  # characters of an error

PROMPT = (3, 4, 5)  # of a probe
LENGTH = 16  # tokens of its answers
HOT = 2.0  # the highest temperature that vLLM takes
SEEDS = range(3, 9)  # of the first tokens that are compared


_LOOP = EventLoop()  # of the requests of all engines and teachers
_MOST = 1 << 16  # connections of a client: its callers have limits of their own


class Fault(RuntimeError):
    """A server that did not answer as it should. Another one may, or this one later.

    `busy` where it says itself that it may answer later, `wait` the seconds after which, if it says.
    """

    def __init__(self, line: str, *, busy: bool = False, wait: float | None = None):
        super().__init__(line)
        self.busy = busy
        self.wait = wait


class Refused(RuntimeError):
    """A request that a server refuses, as any other would."""


@contextmanager
def expected(what: str, answer: Any) -> Iterator[None]:
    """Raise Fault for an answer that the block cannot read `what` from."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Fault(f"expected {what}, got {border.quoted(answer, 80)}") from error


@contextmanager
def checked() -> Iterator[None]:
    """Raise Fault for values that `border` refuses in the block."""
    try:
        yield
    except ValueError as error:
        raise Fault(str(error)) from error


def limit(name: str, value: Any) -> int | None:
    """Return a number of tokens as a server says it, None for none. Fault for anything else."""
    with checked():
        return None if value is None else border.integer(name, value, low=1)


class Client:
    """Sends requests to servers, with the key in an environment variable; any thread may call it."""

    def __init__(self, key_env: str = KEY) -> None:
        self.key_env = key_env
        self.connections = Connections(_MOST, lambda: self.trusted)
        self.lock = threading.Lock()
        self.tasks: set[asyncio.Task[Any]] = set()  # the requests under way
        self.broken_off = False

    @cached_property
    def trusted(self) -> ssl.SSLContext:
        """Return the certificates that are trusted: the system's."""
        return ssl.create_default_context()

    def call(self, server: str, path: str, body: Any = None, *, seconds: float, tokens: int = 0) -> Any:
        """Return the JSON answer to a POST of `body`, or to a GET without one; None for an empty answer.

        Fault for a server that cannot be reached, breaks off, takes longer than `seconds` in all, fails
        (status 5xx), leads elsewhere (3xx), answers with anything but JSON, or with more bytes than `tokens`
        tokens can need. Refused for every other status, ValueError for a key that no header can hold.
        """
        data = self._answer(server, path, body, seconds, tokens)
        if not data:
            return None
        try:
            return border.read_json(data)
        except ValueError as error:
            raise Fault(f"{path}: {error}") from error

    def tell(self, server: str, path: str, body: Any, *, seconds: float) -> None:
        """POST `body`; the answer may be anything, or Fault and Refused are raised as by `call`."""
        self._answer(server, path, body, seconds, 0)

    def _answer(self, server: str, path: str, body: Any, seconds: float, tokens: int) -> bytes:
        """Return the bytes of an answer with status 2xx."""
        key = token_in(self.key_env)
        sent = None if body is None else json.dumps(body).encode()
        most = LEAST_BYTES + TOKEN_BYTES * tokens
        future = _LOOP.start(self._exchange(server.rstrip("/") + path, sent, key, most, seconds))
        try:
            answer = future.result()
        except TimeoutError as error:
            raise Fault(f"{path}: no answer within {seconds:g} s") from error
        except CancelledError as error:
            raise Fault(f"{path}: broken off") from error
        except (OSError, ValueError) as error:
            raise Fault(f"{path}: {error}") from error
        finally:
            future.cancel()  # where this thread was interrupted; else it has ended

        if not 200 <= answer.status < 300:
            line = f"{path}: status {answer.status}: {answer.words}"
            if may_pass(answer.status):
                wait = retry_after(answer.headers.get("Retry-After", ""))
                raise Fault(line, busy=answer.status in BUSY, wait=wait)
            if answer.status not in REFUSED:
                raise Fault(line)
            if answer.status == UNAUTHORIZED:
                line += f"; its key belongs into the environment variable {self.key_env}"
            raise Refused(line)
        return answer.data

    async def _exchange(self, address: str, body: bytes | None, key: str, most: int, seconds: float) -> Any:
        """Return the answer to a request. TimeoutError at the deadline, of all that is sent and read."""
        task = asyncio.current_task()
        assert task is not None
        with self.lock:
            if self.broken_off:
                raise Broken("broken off")
            self.tasks.add(task)
        try:
            async with asyncio.timeout(seconds):
                return await exchange(await self.connections.client(), address, body, key, most)
        finally:
            with self.lock:
                self.tasks.discard(task)

    def line(self, error: Exception | str) -> str:
        """Return what went wrong in one line, without the key, which a server's words may hold."""
        text = masked(str(error)[: 4 * LINE], token_in(self.key_env))
        return " ".join(text.split())[:LINE]

    def allow(self) -> None:
        """Let requests be made again after `abort`."""
        with self.lock:
            self.broken_off = False

    def abort(self) -> None:
        """Break off the requests under way, and those that begin before `allow`: each raises a Fault."""
        with self.lock:
            self.broken_off = True
            for task in self.tasks:
                task.get_loop().call_soon_threadsafe(task.cancel)


class Room(NamedTuple):
    """A server's room for adapters; 0 where it does not tell."""

    rank: int = 0  # the largest
    slots: int = 0  # adapters that it holds at a time
    base: str | None = None  # low precision of the base below them: int8, or another that vLLM names


class Described(NamedTuple):
    """A server and its abilities."""

    route: str  # where it generates
    model: str  # the name that it serves the model by
    window: int | None  # tokens
    label: str  # of its weights; empty if it does not say
    supported: frozenset[str]  # which of "load", "score" and "sleep" do something
    ways: tuple[str, ...] = ()  # of taking weights, the best first: rft, difference, folder, nccl
    room: Room | None = None  # for adapters; None where it takes none
    adapter: str = ""  # that is to answer; empty for the base model
    forces: bool = False  # whether it can be made to give a response


class Ask(NamedTuple):
    """The request of one sample."""

    prompt: Sequence[int]
    seed: int
    sampling: Sampling
    max_new: int
    ends: Sequence[int]  # tokens that end it, `sampling.stop` included

    @property
    def size(self) -> int:
        """Return the most tokens that an answer may be about."""
        return len(self.prompt) + self.max_new


class Reply(NamedTuple):
    """The tokens of one sample, as a server returned them."""

    tokens: list[int]
    logp: list[float]
    label: str | None  # of the weights that drew them; None if the server does not say
    spans: Sequence[tuple[str, int, int]] = ()  # (label, first token, end) of each of them, if it says


class Sends(Protocol):
    """Sends weights to servers over channels."""

    def has(self, server: str) -> bool:
        """Return whether a server can receive."""
        ...

    def send(self, server: str, parcel: Parcel, label: str) -> None:
        """Send all of `parcel`. Fault or Refused where it has not arrived; `settle` ends it."""
        ...

    def close(self) -> None:
        """Leave the channels."""
        ...


class ServerProtocol(Protocol):
    """The functions by which one kind of server is asked. All raise Fault and Refused."""

    name: str
    hint: str  # the options that a server must be started with
    adapters_hint: str  # those for adapters that come alone
    adapters_ran: (
        bool  # whether adapters alone were ever run on such a server, and not only held against types
    )
    hottest: float  # the highest temperature that a server takes
    senders: Mapping[str, Sends]  # over channels, by the names of such ways

    @property
    def hold(self) -> Callable[[str], AbstractContextManager[None]] | None:
        """Keeps a server's requests where they are within a block; those of one that fails are broken off.

        None where they do not go on with new weights, and with a version of each token.
        """
        ...

    @property
    def force(
        self,
    ) -> Callable[[str, Described, Sequence[int], Sequence[int], Sampling], list[float]] | None:
        """Returns the log-probs of a response after a prompt, by the distribution of a Sampling.

        The server must be one that `forces`; None where no server of this kind does.
        """
        ...

    def describe(self, server: str) -> Described:
        """Return what a server is and can do."""
        ...

    def check(self, sampling: Sampling) -> None:
        """Raise BadRequest for a distribution without log-probs in the servers' answers."""
        ...

    def sample(self, server: str, known: Described, ask: Ask) -> Reply:
        """Return one sample."""
        ...

    def score(self, server: str, known: Described, tokens: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first, at `Sampling()`."""
        ...

    def likeliest(
        self, server: str, known: Described, tokens: Sequence[int], top_k: int
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Return `score`, and for each of its places the `top_k` likeliest words with their log-probs."""
        ...

    def texts(self, server: str, known: Described, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token but the first, by the server's tokenizer."""
        ...

    def load(self, server: str, folder: str, label: str, names: int) -> None:
        """Make the server read weights; it has confirmed `names` tensors, `label` and an empty cache."""
        ...

    def settle(self, server: str, label: str) -> None:
        """Empty the server's cache after a load, and let it confirm `label`."""
        ...

    def load_adapter(self, server: str, folder: str, name: str) -> None:
        """Make the server read adapters, which then answer to requests for their name."""
        ...

    def unload_adapter(self, server: str, name: str) -> None:
        """Make the server forget adapters."""
        ...

    def sleep(self, server: str) -> None:
        """Make the server give its memory back."""
        ...

    def wake(self, server: str) -> None:
        """Make the server take its memory again."""
        ...


def ranked(entries: Iterable[tuple[int, float]], top_k: int) -> tuple[list[int], list[float]]:
    """Return the top_k likeliest of (token, log-prob), the likeliest first. Fault for fewer.

    ValueError for log-probs that are none.
    """
    best = sorted(entries, key=lambda entry: -entry[1])
    border.log_probs("log-probs of words", [logp for _, logp in best])  # also of those that are left out
    best = best[:top_k]
    if len(best) < top_k:
        raise Fault(f"expected {top_k} words of each token, got {len(best)}")
    return [token for token, _ in best], [logp for _, logp in best]


def check_reply(reply: Reply, ask: Ask, *, vocabulary: int, label: str | None) -> None:
    """Raise Fault for an answer that cannot be right; label None takes weights of any."""
    with checked():
        border.sample(reply.tokens, reply.logp, most=ask.max_new, vocabulary=vocabulary)
    if label is not None and reply.label is not None and reply.label != label:
        raise Fault(f"expected weights {label!r}, got {reply.label!r}")


def probe(ask: Callable[[Ask], Reply], score: Callable[[Sequence[int]], list[float]]) -> None:
    """Ask a server for a few short samples and scores. Refused for one that ignores an option.

    Servers skip fields that they do not know without a word, so only samples show that they honour them.
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

    # a cut that leaves one token, with a log-prob of 0
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
    hot_gap = high.logp[0] - low.logp[0]
    gap = score([*PROMPT, high.tokens[0]])[-1] - score([*PROMPT, low.tokens[0]])[-1]
    if abs(gap) > 0.2 and abs(hot_gap - gap / HOT) > abs(hot_gap - gap):
        raise Refused(
            f"log-probs: expected two that differ by {gap / HOT:.3g} at temperature {HOT:g}, got "
            f"{hot_gap:.3g}"
        )

    stop = first.tokens[3]
    want = first.tokens[: first.tokens.index(stop) + 1]
    ended = sampled(1, hot, ends=[stop])
    if ended.tokens != want:
        raise Refused(f"stop tokens: expected {len(want)} tokens up to {stop}, got {len(ended.tokens)}")


# ---------- the model that servers hold: its names and sizes, not its weights


class RemoteModel(NamedTuple):
    """Names, sizes and stop tokens of the served model."""

    manifest: Manifest
    ends: frozenset[int]  # tokens that end a response
    window: int | None  # tokens
    vocabulary: int
    source: nn.Module  # of weights that are not sent; it may be on the meta device

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of these names, as the model was before any training."""
        source = getattr(self.source, "rft_weights", None)
        if source is not None:
            yield from stored_tensors(source.stored, names)
            return
        own = dict(self.source.named_parameters(remove_duplicate=False))
        for name in names:
            yield name, own[name].detach()


def stored_tensors(stored: Stored, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of these names, read from a model's files."""
    wanted = set(names)
    for made, group in stored.groups.items():
        if not wanted & set(made):
            continue
        with slices(stored, group) as read:
            for name, x in converted(group, read, stored.skeleton).items():
                if name in wanted:
                    yield name, x[...]  # of a slice, which is read only now


def remote_model(model: str | nn.Module, tokenizer: Any) -> RemoteModel:
    """Return the facts of a model, a name or a module. A named one is made without memory for its weights."""
    lm: Any = _outline(model) if isinstance(model, str) else model
    quantize.require_whole(lm, "an engine")
    config = lm.config.get_text_config()
    return RemoteModel(
        manifest=manifest(lm),
        ends=requests.end_tokens(lm, tokenizer),
        window=getattr(config, "max_position_embeddings", None),
        vocabulary=config.vocab_size,
        source=lm,
    )


def _outline(name: str) -> Any:
    """Build the model of a name on the meta device, with its generation config.

    Adapters are merged, which takes their memory, since weights arrive by the plain model's names.
    """
    from transformers import GenerationConfig

    folder = model_lib.resolve(name)
    if Path(folder, "adapter_config.json").is_file():
        merged: Any = model_lib.load(folder, quantize="none")
        return merged.merge_and_unload()
    lm: Any = model_lib.load(folder, meta=True)
    with suppress(OSError):  # a model without one
        lm.generation_config = GenerationConfig.from_pretrained(folder)
    return lm
