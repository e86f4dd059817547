"""Runs an engine on servers over HTTP, whatever they speak.

A protocol (`openai`, `sglang`) asks one server; here is what they share: a request of one sample each, with
the sample's key as its seed, so that the same tokens come from any server at any attempt; checks of every
answer; weights by way of a folder; and servers that failed are taken back once they are well.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, nn

from rft_fn import border, dist, tree
from rft_fn import model as model_lib
from rft_fn.engine import prompt_media, requests, weight_folder
from rft_fn.engine.adapter_delivery import AdapterDelivery, Adapters
from rft_fn.engine.adapters_alone import AdapterLoad
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.lifetime import EngineCore
from rft_fn.engine.pool import COMPARED, Pool, compare_servers
from rft_fn.engine.requests import BadRequest, Request, Response, Stop
from rft_fn.engine.server_protocol import (
    Ask,
    Client,
    Described,
    Fault,
    Refused,
    RemoteModel,
    Reply,
    ServerProtocol,
    check_reply,
    checked,
    probe,
    remote_model,
)
from rft_fn.engine.weight_delivery import Collected, Delivery
from rft_fn.engine.weight_folder import LoadCheck
from rft_fn.model.lora_folders import CONFIG
from rft_fn.types import Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["serve"]

ResultT = TypeVar("ResultT")


def serve(
    config: EngineConfig,
    protocol: ServerProtocol,
    client: Client,
    model: str | nn.Module,
    tokenizer: Any,
    *,
    loads: ServerProtocol | None = None,
) -> EngineCore:
    """Build the engine on `config.servers`, after samples that show whether each honours every option.

    The end of a rollout breaks off what `client` still asks; in flight `loads` asks by another client.
    ValueError for one that does not; a server that does not answer is tried again later.
    """
    if isinstance(model, str) and Path(model_lib.resolve(model), CONFIG).is_file():
        config = replace(config, lora_rank=0)  # its servers hold the base with those adapters merged
    if config.in_flight or config.run:
        config = replace(config, lora_rank=0)  # adapters are of a request, and of the engine that loaded them
    engine = _Servers(config, protocol, client, remote_model(model, tokenizer), tokenizer, loads or protocol)
    engine.begin()
    return engine


class _Servers:
    """The servers of one model, and their mutable state."""

    def __init__(
        self,
        config: EngineConfig,
        protocol: ServerProtocol,
        client: Client,
        model: RemoteModel,
        tokenizer: Any,
        loads: ServerProtocol,
    ):
        self.config = config
        self.protocol = protocol
        self.loads = loads
        self.client = client
        self.model = model
        self.tokenizer = tokenizer
        self.pool = Pool(config.servers, client, name=protocol.name, width=config.batch, revive=self.revive)
        self.known: dict[str, Described] = {}
        self.labels: dict[str, str] = {}  # of the weights that each server should have
        self.run = config.run or uuid4().hex[:8]  # a version of another run is another one
        self.delivery = Delivery(config, loads, client)
        self.adapters = AdapterDelivery(config, protocol, self.delivery.home)
        self.takes_adapters = False  # alone
        self.loaded = False  # weights of this engine
        self.version = 0
        self.initial: frozenset[str] = frozenset()  # labels of the weights that servers were started with
        self.changing = threading.Lock()
        self.asleep = False
        self.mixed = False  # servers had weights of different labels, and are to be compared again

    def begin(self) -> None:
        """Describe each server. Rank 0 does, for all ranks that share them."""

        def describe_all() -> tuple[dict[str, Described], list[str]]:
            refused: dict[str, str] = {}

            def meet(server: str) -> Described | None:
                try:
                    return self.meet(server)
                except Refused as error:
                    refused[server] = f"{self.client.line(error)}; start it with {self.protocol.hint}"
                    return None

            described = self.pool.each(meet)
            for server, reason in refused.items():
                raise ValueError(f"engine_servers: {server}: {reason}")
            known = {server: x for server in self.config.servers if (x := described.get(server))}
            self.compare(known)
            return known, self.pool.working()

        def begun() -> tuple[dict[str, Described], list[str], bool]:
            known, working = describe_all()
            return known, working, self.adapters.decide(known)

        if self.config.alone:
            self.known, working = describe_all()
        else:
            self.known, working, self.takes_adapters = _on_rank0(begun)
            self.run = _on_rank0(lambda: self.run)
        self.labels = {server: x.label for server, x in self.known.items()}
        self.initial = frozenset(self.labels.values())
        self.mixed = len({*self.labels.values()}) > 1
        self.pool.leave(working, "did not answer the first rank")

    def meet(self, server: str) -> Described:
        """Describe a server. Refused for one that ignores an option."""
        known = self.protocol.describe(server)
        if not self.config.alone:
            self.adapters.check(known)
            self.delivery.check(known)

        def sampled(ask: Ask) -> Reply:
            reply = self.protocol.sample(server, known, ask)
            check_reply(reply, ask, vocabulary=self.model.vocabulary, label=None)
            if self.config.in_flight and not reply.spans:
                raise Refused("in_flight: expected the versions of tokens (weight_versions), got none")
            return reply

        probe(sampled, partial(self.scored, server, known))
        return known

    def held(self, server: str) -> AbstractContextManager[None]:
        """Keep a server's requests where they are within the block, if they are to go on after it."""
        if self.loads.hold is None or not self.config.in_flight:
            return nullcontext()
        return self.loads.hold(server)

    def compare(self, known: dict[str, Described]) -> None:
        """Raise ValueError for servers of different models."""
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
        """Make a server answer with the weights of this engine. Fault or Refused if it does not."""
        with self.changing:
            self._revive(server)

    def _revive(self, server: str) -> None:
        known = self.protocol.describe(server)
        want = self.labels.get(server, known.label)
        if self.loaded and self.config.follows:
            self.check_given(known, want)
        elif self.loaded and known.label != want:
            self.delivery.give(server, known, want)
        if server not in self.known:
            self.meet(server)
        self.known[server] = known
        self.labels[server] = want
        ask = Ask([min(self.model.ends, default=0)], 0, Sampling(), 1, ())
        new = self.adapters.newest
        if new is not None and self.takes_adapters:
            if known.label != want:
                raise Refused(f"expected weights {want!r} below adapters, got {known.label!r}")
            self.known[server] = known._replace(adapter=new.name)
            try:
                self.reply(ask, server)
                return
            except Fault:  # it was started again
                self.known[server] = self.adapters.give(server, known, new, self.answer)
        self.reply(ask, server)

    def sample(self, request: Request) -> Rollout:
        """Sample as `Generate` says. A seed names a whole sample here, so none can `start` in its middle."""
        n, sampling = request.n, request.sampling
        ids = prompt_media.text_ids(request.prompts, self.tokenizer, self.protocol.name)
        request.check(ids, self.window())
        if request.start is not None and any(request.start):
            raise BadRequest(f"start: expected zeros for {self.protocol.name}, got {list(request.start)}")
        self.protocol.check(sampling)
        rows = request.rows()
        hottest = max((row.temperature for row in rows), default=0.0)
        if hottest > self.protocol.hottest:
            most = f"{self.protocol.hottest:g} for {self.protocol.name}"
            raise BadRequest(f"temperature: expected at most {most}, got {hottest:g}")
        if not ids:
            return requests.empty(self.version)
        self.wake()

        # a request for each sample; the rollout does not depend on who answers it
        stop = Stop(self.tokenizer, self.model.ends, sampling.stop)
        ends = sorted(stop.ids)
        asks = [
            Ask(ids[b // n], row.key, tree.replace(sampling, temperature=row.temperature), row.max_new, ends)
            for b, row in enumerate(rows)
        ]

        def answered(b: int, server: str) -> Response:
            response = self.response(asks[b], stop, server)
            if request.on_row is not None:
                request.on_row(b, response.tokens, response.ended)
            return response

        responses = self.pool.run([partial(answered, b) for b in range(len(asks))])
        return requests.assemble(
            ids,
            responses,
            pad=self.tokenizer.pad_token_id,
            version=self.version,
            tokenizer=self.tokenizer,
        )

    def window(self) -> int | None:
        """Return the most tokens that every server reads."""
        windows = [x.window for x in self.known.values()] + [self.model.window]
        return min((x for x in windows if x), default=None)

    def response(self, ask: Ask, stop: Stop, server: str) -> Response:
        """Return one sample. Fault for an answer that ends before it should."""
        reply = self.reply(ask, server)
        versions = self.token_versions(reply) if self.config.in_flight else None
        size = stop.first_end(reply.tokens)
        if size is not None:
            of_tokens = None if versions is None else versions[:size]
            return Response(reply.tokens[:size], reply.logp[:size], True, versions=of_tokens)
        if len(reply.tokens) < ask.max_new:
            raise Fault(
                f"expected {ask.max_new} tokens, or fewer that end with a stop; got {len(reply.tokens)}"
            )
        return Response(reply.tokens, reply.logp, False, versions=versions)

    def token_versions(self, reply: Reply) -> list[int]:
        """Return the version of the weights that drew each token. Fault for weights of another engine."""
        versions: list[int] = []
        for label, start, end in reply.spans:
            version = self.version_of(label)
            if version is None or not len(versions) == start <= end <= len(reply.tokens):
                break
            versions += [version] * (end - start)
        if len(versions) != len(reply.tokens):
            raise Fault(f"expected {len(reply.tokens)} tokens of {self.run}'s weights, got {reply.spans}")
        return versions

    def version_of(self, label: str) -> int | None:
        """Return the version of weights by their label, None for those of another engine."""
        run, _, version = label.partition(":")
        if label in self.initial:
            return 0
        return int(version) if run == self.run and version.isdecimal() else None

    def check_given(self, known: Described, want: str) -> None:
        """Raise Fault unless a server has the weights that the engine which loads them has given it.

        In flight they may be newer: it waits for nobody.
        """
        run, _, number = known.label.partition(" ")[0].partition(":")  # what is on its way has more words
        newer = run == self.run and number.isdecimal() and int(number) > self.version
        if known.label != want and not (newer and self.config.in_flight):
            raise Fault(f"expected weights {want!r} of the engine that loads them, got {known.label!r}")

    def reply(self, ask: Ask, server: str) -> Reply:
        """Return a server's answer. Fault for one that cannot be right."""
        return self.answer(server, self.known[server], ask)

    def answer(self, server: str, known: Described, ask: Ask) -> Reply:
        """Return the answer of a server as it is described. Fault for one that cannot be right.

        So is a refusal to answer by adapters: a server that was started again has them no more.
        """
        try:
            reply = self.protocol.sample(server, known, ask)
        except Refused as error:
            if known.adapter:
                raise Fault(str(error)) from error
            raise
        label = None if self.config.in_flight else self.labels[server]
        check_reply(reply, ask, vocabulary=self.model.vocabulary, label=label)
        return reply

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """Score as `Score` says: at `Sampling()` as a prompt, at others where servers can be made to give it.

        Servers score a prompt before any cut or temperature.
        """
        force = self.protocol.force if all(x.forces for x in self.known.values()) else None
        plain = sampling is None or (
            rollout.temperature is None and sampling.temperature == 1 and not sampling.truncates
        )
        if force is not None and sampling is not None and not plain and len(rollout.tokens):
            return self.forced(rollout, sampling, force)
        if sampling is not None and rollout.temperature is not None:
            raise BadRequest(
                "sampling: expected None to score rows with their own temperatures by "
                f"{self.protocol.name}, got {sampling.described}; score by the trainer"
            )
        sampling = sampling or Sampling()
        if sampling.temperature != 1 or sampling.truncates:
            raise BadRequest(
                f"sampling: expected temperature 1, top_p 1 and top_k 0 to score by {self.protocol.name}, "
                f"got {sampling.temperature:g}, {sampling.top_p:g} and {sampling.top_k}; score by the trainer"
            )
        if not len(rollout.tokens):
            return torch.zeros(rollout.tokens.shape)
        self.wake()

        def one(tokens: list[int], server: str) -> list[float]:
            return self.scored(server, self.known[server], tokens)

        rows = [row[:size].tolist() for row, size in zip(rollout.tokens, rollout.length.tolist())]
        logp = torch.zeros(rollout.tokens.shape)
        for b, row in enumerate(self.pool.run([partial(one, row) for row in rows])):
            logp[b, 1 : len(row) + 1] = torch.tensor(row)
        return torch.where(rollout.mask, logp, 0)

    def forced(self, rollout: Rollout, sampling: Sampling, force: Callable[..., list[float]]) -> Tensor:
        """Return the log-probs [B, S] of tokens that the servers are made to give, under their weights."""
        self.wake()

        def one(prompt: list[int], tokens: list[int], warmth: float, server: str) -> list[float]:
            own = tree.replace(sampling, temperature=warmth, stop=())
            return force(server, self.known[server], prompt, tokens, own)

        rows = [row[:size].tolist() for row, size in zip(rollout.tokens, rollout.length.tolist())]
        begin = rollout.mask.int().argmax(-1).tolist()
        some = rollout.mask.any(-1).nonzero().flatten().tolist()
        same = [sampling.temperature] * len(rows)
        warmth = same if rollout.temperature is None else rollout.temperature.tolist()
        jobs = [partial(one, rows[b][: begin[b]], rows[b][begin[b] :], warmth[b]) for b in some]
        logp = torch.zeros(rollout.tokens.shape)
        for b, row in zip(some, self.pool.run(jobs)):
            logp[b, begin[b] : len(rows[b])] = torch.tensor(row)
        return torch.where(rollout.mask, logp, 0)

    def scored(self, server: str, known: Described, tokens: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens but the first. Fault for another number, or impossible ones."""
        logp = self.protocol.score(server, known, tokens)
        with checked():
            return border.log_probs("log-probs", logp, len(tokens) - 1)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Load as `Load` says: rank 0 collects, then every server gets all of it. BadRequest if alone."""
        if self.config.alone:
            raise BadRequest("load: expected an engine that the ranks share, got one that is alone")
        if getattr(weights, "adapters", False):
            return self.load_adapters(weights, version)
        if self.config.base:
            raise BadRequest(
                f"load: expected adapters alone on a base in {self.config.base}, got whole weights"
            )
        self.takes_adapters = False  # the base model is another one now
        self.known = {server: x._replace(adapter="") for server, x in self.known.items()}
        began = time.perf_counter()
        check = LoadCheck(self.model.manifest, weights)
        label = f"{self.run}:{version}"
        loads = dist.is_main() and not self.config.follows
        collected = self.delivery.collect(label, self.known) if loads else None
        try:
            for name, x in weights:
                check.take(name, x)
                if collected is not None:
                    collected.add(name, x)
            delivered = check.finish(version)
            frozen = check.unsent()
            if collected is not None and frozen:
                collected.add_kept(frozen, self.delivery.before(), self.model.tensors)
        except BaseException:
            if collected is not None:
                collected.discard()
            raise

        tied = weight_folder.tied(self.model.manifest.required, check.names | frozen)
        self.delivery.names = len(check.names | frozen) + len(tied)
        self.initial = frozenset()
        with self.changing:
            if self.config.follows:
                working = self.given(label)
            else:
                self.delivery.folder, working = _on_rank0(partial(self.publish, collected, tied, label))
        self.loaded = True
        self.labels = dict.fromkeys(self.config.servers, label)
        self.pool.leave(working, "did not take the weights")
        self.version = version
        self.mixed = False
        return delivered._replace(seconds=time.perf_counter() - began)

    def load_adapters(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Delivered:
        """Load adapters that come alone: rank 0 writes their folder, then every server reads it.

        ValueError where this engine takes none, or where its servers have whole weights by now.
        """
        if not self.takes_adapters:
            raise ValueError("weights: expected whole ones (engine_adapters), got adapters alone")
        self.wake()  # a sample shows that they have arrived
        load = AdapterLoad(self.model.manifest)
        for name, x in weights:
            load.take(name, x)
        delivered = load.finish(version)
        new, self.known, working = _on_rank0(partial(self.publish_adapters, load, version))
        self.adapters.newest = new
        self.pool.leave(working, "did not take the adapters")
        self.version = version
        return delivered._replace(seconds=time.perf_counter() - load.began)

    def publish_adapters(
        self, load: AdapterLoad, version: int
    ) -> tuple[Adapters, dict[str, Described], list[str]]:
        """Give adapters to the servers. Returns them, the servers, and those that took them."""
        new = self.adapters.offer(load.tensors, self.run, version)

        def take(server: str) -> Described:
            known = self.known.get(server) or self.meet(server)
            self.labels.setdefault(server, known.label)
            return self.adapters.give(server, known, new, self.answer)

        known = self.known | self.pool.each(take)
        working = self.pool.working()
        self.adapters.settle(new, working)
        return new, known, working

    def publish(self, collected: Collected | None, tied: dict[str, str], label: str) -> tuple[str, list[str]]:
        """Give the weights to the servers. Returns their folder, and the servers that took them."""
        assert collected is not None  # on the first rank

        def take(server: str) -> Described:
            known = self.known.get(server) or self.meet(server)
            with self.held(server):
                self.delivery.give(server, known, label)
            return known._replace(label=label)

        try:
            self.delivery.offer(collected, tied)
            self.labels = dict.fromkeys(self.config.servers, label)
            self.known |= self.pool.each(take)
            if self.mixed:
                self.compare({server: self.known[server] for server in self.pool.working()})
        except BaseException:
            collected.discard()
            raise
        self.delivery.settle()
        return self.delivery.folder, self.pool.working()

    def given(self, label: str) -> list[str]:
        """Return the servers that another engine has given these weights."""

        def look(server: str) -> Described:
            known = self.protocol.describe(server)
            self.check_given(known, label)
            return known if server in self.known else self.meet(server)

        self.labels = dict.fromkeys(self.config.servers, label)
        self.known |= self.pool.each(look)
        return self.pool.working()

    def sleep(self) -> None:
        """Let the servers give memory back, once no rank needs them."""
        if self.asleep or not self.can_sleep():
            return
        dist.barrier()
        _on_rank0(lambda: self.pool.each(self.protocol.sleep, self.pool.working()))
        self.asleep = True

    def wake(self) -> None:
        """Let the servers take their memory again."""
        if not self.asleep:
            return
        _on_rank0(lambda: self.pool.each(self.protocol.wake, self.pool.working()))
        self.asleep = False

    def can_sleep(self) -> bool:
        """Return whether servers can give memory back, and should."""
        may = self.config.sleep and not self.config.alone  # others may be asking
        return may and all("sleep" in x.supported for x in self.known.values())

    def status(self) -> EngineStatus:
        """Return the state of the engine, which lives while a server works. Asks none of them."""
        supported = frozenset.intersection(*(x.supported for x in self.known.values()))
        if self.takes_adapters:
            supported |= {"load"}
        if not self.can_sleep():
            supported -= {"sleep"}
        return {
            "engine": self.protocol.name,
            "alive": bool(self.pool.working()),
            "version": self.version,
            "asleep": self.asleep,
            "supported": supported | {"rows"},
            "window": self.window(),
            "adapters": self.takes_adapters,
            "base": self.config.base,
        }

    def close(self) -> None:
        """Break off requests under way, and delete the weights."""
        self.client.abort()
        self.adapters.close()
        self.delivery.close()


def _on_rank0(f: Callable[[], ResultT]) -> ResultT:
    """Run f on rank 0, and return its result, or raise its exception, on every rank."""
    answer: tuple[ResultT | None, Exception | None] = None, None
    if dist.is_main():
        try:
            answer = f(), None
        except Exception as error:
            answer = None, error
    result, error = dist.all_gather_object(answer)[0]
    if error is not None:
        raise error
    return result
