"""An engine on servers that are reached over HTTP, whatever they speak.

A dialect (`openai`, `sglang`) asks one server; here is what they share: a request of one sample each, with
the sample's own key as its seed, so that the same tokens come from any server at any attempt; checks of every
answer; weights by way of a folder; and servers that failed taken back once they are well.
"""

import math
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from rft_fn import dist
from rft_fn.engine import prompt_media, requests, weight_folder
from rft_fn.engine.dialect import (
    Ask,
    Client,
    Described,
    Dialect,
    Fault,
    Refused,
    Reply,
    ServedModel,
    check_reply,
    probe,
    served_model,
)
from rft_fn.engine.lifetime import EngineConfig, dead_after_failure, on_first_rank
from rft_fn.engine.pool import COMPARED, Pool, compare_servers
from rft_fn.engine.requests import BadRequest, Response, Stop
from rft_fn.engine.weight_folder import Arrival
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["serve"]


def serve(
    config: EngineConfig, dialect: Dialect, client: Client, model: str | nn.Module, tokenizer: Any
) -> Engine:
    """The engine on `config.servers`, each of which was asked whether it honours every option.

    ValueError for one that does not; a server that does not answer is tried again later.
    """
    engine = _Servers(config, dialect, client, served_model(model, tokenizer), tokenizer)
    engine.begin()
    return dead_after_failure(
        Engine(
            generate=engine.generate,
            score=engine.score,
            load=engine.load,
            sleep=engine.sleep,
            wake=engine.wake,
            status=engine.status,
            close=engine.close,
        )
    )


class _Servers:
    """Servers of one model, and all that changes about them."""

    def __init__(
        self, config: EngineConfig, dialect: Dialect, client: Client, model: ServedModel, tokenizer: Any
    ):
        self.config = config
        self.dialect = dialect
        self.client = client
        self.model = model
        self.tokenizer = tokenizer
        self.pool = Pool(config.servers, client, name=dialect.name, width=config.batch, revive=self.revive)
        self.known: dict[str, Described] = {}
        self.labels: dict[str, str] = {}  # of the weights that each server should have
        self.run = uuid4().hex[:8]  # a version of another run is another one
        self.temporary: Any = None
        self.folder = ""  # of the weights that were loaded last
        self.written: list[Path] = []  # folders of this rank
        # also where nobody calls `close`
        self.tidy = weakref.finalize(self, weight_folder.remove_all, self.written)
        self.names = 0  # tensors in it
        self.version = 0
        self.asleep = False
        self.mixed = False  # servers had weights of different labels, and are to be compared again

    def begin(self) -> None:
        """Find out what each server is. The first rank does, for all that share them."""

        def find() -> tuple[dict[str, Described], list[str]]:
            refused: dict[str, str] = {}

            def meet(server: str) -> Described | None:
                try:
                    return self.meet(server)
                except Refused as error:
                    refused[server] = f"{self.client.line(error)}; start it with {self.dialect.hint}"
                    return None

            found = self.pool.each(meet)
            for server, reason in refused.items():
                raise ValueError(f"engine_servers: {server}: {reason}")
            known = {server: x for server in self.config.servers if (x := found.get(server))}
            self.compare(known)
            return known, self.pool.working()

        if self.config.alone:
            self.known, working = find()
            self.mark(working)
            return
        self.known, working = on_first_rank(find)
        self.run = on_first_rank(lambda: self.run)
        self.mark(working)

    def mark(self, working: Sequence[str]) -> None:
        """Remember the labels of the servers that are known, and leave those that do not work."""
        self.labels = {server: x.label for server, x in self.known.items()}
        self.mixed = len({*self.labels.values()}) > 1
        self.pool.leave(working, "did not answer the first rank")

    def meet(self, server: str) -> Described:
        """What a server is. Refused for one that ignores an option."""
        known = self.dialect.describe(server)
        probe(partial(self.dialect.sample, server, known), partial(self.scored, server, known))
        return known

    def compare(self, known: dict[str, Described]) -> None:
        """ValueError for servers of different models."""
        tokens = [i % self.model.vocabulary for i in COMPARED]

        def scored(server: str) -> list[float]:
            return self.scored(server, known[server], tokens)

        # by names of weights and models in which a server has not repeated the key that it was given
        shown = {
            server: x._replace(model=self.client.line(x.model), label=self.client.line(x.label))
            for server, x in known.items()
        }
        compare_servers(shown, self.pool.each(scored, [*known]))

    def revive(self, server: str) -> None:
        """Make sure that a server answers, with the weights of this engine. Fault or Refused if not."""
        known = self.dialect.describe(server)
        want = self.labels.get(server, known.label)
        if self.folder and known.label != want:
            self.dialect.load(server, self.folder, want, self.names)
        if server not in self.known:
            self.meet(server)
        self.known[server] = known
        self.labels[server] = want
        ask = Ask([min(self.model.ends, default=0)], 0, Sampling(), 1, ())
        self.reply(ask, server)

    def generate(
        self,
        prompts: Sequence[Any],
        keys: Sequence[Any],
        *,
        n: int = 1,
        sampling: Sampling,
        max_new: Sequence[int] | None = None,
        start: Sequence[int] | None = None,
    ) -> Rollout:
        """`Generate`. A seed names a whole sample here, so none can `start` in its middle."""
        ids = prompt_media.text_alone(prompts, self.tokenizer, self.dialect.name)
        requests.check(ids, keys, n, sampling, self.window(), max_new=max_new, start=start)
        if start is not None and any(start):
            raise BadRequest(f"start: expected zeros for {self.dialect.name}, got {list(start)}")
        self.dialect.check(sampling)
        if not ids:
            return requests.empty(self.version)
        self.wake()

        # a request for each sample; the rollout does not depend on who answers it
        stop = Stop(self.tokenizer, self.model.ends, sampling.stop)
        ends = sorted(stop.ids)
        asks = [
            Ask(ids[b // n], row.key, sampling, row.max_new, ends)
            for b, row in enumerate(requests.rows(keys, n, sampling, max_new=max_new))
        ]
        responses = self.pool.run([partial(self.response, ask, stop) for ask in asks])
        return requests.assemble(
            ids,
            responses,
            pad=self.tokenizer.pad_token_id,
            version=self.version,
            tokenizer=self.tokenizer,
        )

    def window(self) -> int | None:
        """The most tokens that every server reads."""
        windows = [x.window for x in self.known.values()] + [self.model.window]
        return min((x for x in windows if x), default=None)

    def response(self, ask: Ask, stop: Stop, server: str) -> Response:
        """One sample. Fault for an answer that ends before it should."""
        reply = self.reply(ask, server)
        size = stop.first_end(reply.tokens)
        if size is not None:
            return Response(reply.tokens[:size], reply.logp[:size], True)
        if len(reply.tokens) < ask.max_new:
            raise Fault(
                f"expected {ask.max_new} tokens, or fewer that end with a stop; got {len(reply.tokens)}"
            )
        return Response(reply.tokens, reply.logp, False)

    def reply(self, ask: Ask, server: str) -> Reply:
        """A server's answer. Fault for one that cannot be right."""
        reply = self.dialect.sample(server, self.known[server], ask)
        check_reply(reply, ask, vocabulary=self.model.vocabulary, label=self.labels[server])
        return reply

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """`Score`, at `Sampling()` alone: servers score prompts before they cut or cool anything."""
        sampling = sampling or Sampling()
        if sampling.temperature != 1 or sampling.truncates:
            raise BadRequest(
                f"sampling: expected temperature 1, top_p 1 and top_k 0 to score by {self.dialect.name}, got "
                f"{sampling.temperature:g}, {sampling.top_p:g} and {sampling.top_k}; score by the trainer"
            )
        if not len(rollout.tokens):
            return torch.zeros(rollout.tokens.shape)
        self.wake()

        def one(tokens: list[int], server: str) -> list[float]:
            return self.scored(server, self.known[server], tokens)

        rows = [row[:size].tolist() for row, size in zip(rollout.tokens, rollout.length.tolist())]
        found = self.pool.run([partial(one, row) for row in rows])
        logp = torch.zeros(rollout.tokens.shape)
        for b, row in enumerate(found):
            logp[b, 1 : len(row) + 1] = torch.tensor(row)
        return torch.where(rollout.mask, logp, 0)

    def scored(self, server: str, known: Described, tokens: Sequence[int]) -> list[float]:
        """The log-probs of all tokens but the first. Fault for another number, and for none that they are."""
        logp = self.dialect.score(server, known, tokens)
        if len(logp) != len(tokens) - 1:
            raise Fault(f"expected {len(tokens) - 1} log-probs, got {len(logp)}")
        if not all(x <= 1e-3 and x > -math.inf for x in logp):
            raise Fault(f"expected finite log-probs, none above 0, got {logp[:4]}")
        return logp

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """`Load`: the first rank writes a folder, and has every server read it. BadRequest if alone."""
        if self.config.alone:
            raise BadRequest("load: expected an engine that the ranks share, got one that is alone")
        began = time.perf_counter()
        arrival = Arrival(self.model.manifest, weights)
        writer = None
        if dist.is_main():
            writer = weight_folder.Writer(Path(self.home()) / f"{self.run}-{version}")

        # a full disk is raised at the end: it takes all ranks to put the tensors together
        problem: Exception | None = None
        try:
            for name, x in weights:
                arrival.take(name, x)
                if writer is not None and problem is None:
                    problem = writer.add(name, x)
            delivered = arrival.finish(version)
            frozen = arrival.unsent()
            if writer is not None and frozen and problem is None:
                before = next(iter(self.written), None)
                problem = writer.add_kept(frozen, before, self.model.tensors)
        except BaseException:
            if writer is not None:
                writer.discard()
            raise

        label = f"{self.run}:{version}"
        present = arrival.names | frozen
        tied = weight_folder.tied(self.model.manifest.required, present)
        self.names = len(present) + len(tied)
        folder, working = on_first_rank(partial(self.publish, writer, tied, label, problem))
        self.folder = folder
        self.labels = dict.fromkeys(self.config.servers, label)
        self.pool.leave(working, "did not take the weights")
        self.version = version
        self.mixed = False
        return delivered._replace(seconds=time.perf_counter() - began)

    def publish(
        self,
        writer: weight_folder.Writer | None,
        tied: dict[str, str],
        label: str,
        problem: Exception | None,
    ) -> tuple[str, list[str]]:
        """Finish the folder, and have the servers read it. Returns it, and the servers that did."""
        assert writer is not None  # on the first rank
        folder = str(writer.folder.resolve())

        def take(server: str) -> Described:
            known = self.known.get(server) or self.meet(server)
            self.dialect.load(server, folder, label, self.names)
            return known._replace(label=label)

        try:
            if problem:
                raise problem
            writer.finish(tied)
            self.known |= self.pool.each(take)
            if self.mixed:
                self.compare({server: self.known[server] for server in self.pool.working()})
        except BaseException:
            writer.discard()
            raise
        weight_folder.remove_all([old for old in self.written if str(old) != folder])
        self.written[:] = [Path(folder)]
        return folder, self.pool.working()

    def home(self) -> str:
        """Where folders of weights are written."""
        if self.config.weights:
            return self.config.weights
        if self.temporary is None:
            self.temporary = tempfile.TemporaryDirectory(prefix="rft-weights-")
        return self.temporary.name

    def sleep(self) -> None:
        """Have the servers give memory back, once no rank needs them."""
        if self.asleep or not self.can_sleep():
            return
        dist.barrier()
        on_first_rank(partial(self.move, self.dialect.sleep))
        self.asleep = True

    def wake(self) -> None:
        """Have the servers take their memory again."""
        if not self.asleep:
            return
        on_first_rank(partial(self.move, self.dialect.wake))
        self.asleep = False

    def move(self, call: Callable[[str], None]) -> None:
        """`call` on every server that works."""
        self.pool.each(call, self.pool.working())

    def can_sleep(self) -> bool:
        """Whether servers can give memory back, and are to."""
        may = self.config.sleep and not self.config.alone  # others may be asking
        return may and all("sleep" in x.supported for x in self.known.values())

    def status(self) -> EngineStatus:
        """The state of the engine, which lives while a server works. Asks none of them."""
        supported = frozenset.intersection(*(x.supported for x in self.known.values()))
        if not self.can_sleep():
            supported -= {"sleep"}
        return {
            "engine": self.dialect.name,
            "alive": bool(self.pool.working()),
            "version": self.version,
            "asleep": self.asleep,
            "supported": supported,
            "window": self.window(),
        }

    def close(self) -> None:
        """Break off what is under way, and delete the weights."""
        self.client.abort()
        self.tidy()
        if self.temporary is not None:
            self.temporary.cleanup()
