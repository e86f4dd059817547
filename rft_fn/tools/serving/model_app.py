"""The HTTP side of a policy: completions and chats in OpenAI's form, plain, and in recorded sessions."""

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rft_fn import rng
from rft_fn.collect.calls import Answer, Calls
from rft_fn.collect.recorder import Ask, Session, TooLong
from rft_fn.data.responses import prompt_ids
from rft_fn.engine.requests import BadRequest
from rft_fn.environment import Renderer
from rft_fn.environment.tool_calls import ParseCalls
from rft_fn.text import error_text, writable
from rft_fn.tools.serving import model_wire as wire
from rft_fn.tools.serving.http import OneLength, Problem, Rules, arrived, authorize, waited
from rft_fn.types import Sampling

__all__ = ["Policy", "Recorded", "application"]


_LEFT = 499  # nobody is there to read this one


class Policy(NamedTuple):
    """What answers."""

    name: str  # that clients see
    renderer: Renderer
    parser: Callable[[], ParseCalls]  # of calls of tools in a text
    sampling: Sampling  # where a request says nothing of it
    window: int | None  # tokens of a prompt and its response; None without a limit
    calls: Calls
    seconds: float  # that an answer may take


class Recorded(NamedTuple):
    """A session that has an address."""

    session: Session
    secret: str  # that whoever gives the reward must have; "" where nobody may


class _Refused(Problem):
    """A request that is refused, with OpenAI's code for it."""

    def __init__(self, status: int, line: str, code: str = "", **headers: str):
        super().__init__(status, line, **headers)
        self.code = code


def application(policy: Policy, sessions: Mapping[str, Recorded], rules: Rules) -> Starlette:
    """Return the application: /v1/models, /v1/completions, /v1/chat/completions, /health, /sessions/ID.

    `sessions` are by the name in their address, which is all that a client needs to have of them.
    """
    given = _Handlers(policy, sessions, rules)
    routes = [
        ("/v1/models", given.models, "GET"),
        ("/v1/chat/completions", given.chat, "POST"),
        ("/v1/completions", given.completion, "POST"),
        ("/health", given.health, "GET"),
        ("/sessions/{session}/v1/models", given.models, "GET"),
        ("/sessions/{session}/v1/chat/completions", given.recorded_chat, "POST"),
        ("/sessions/{session}/reward", given.reward, "POST"),
    ]
    return Starlette(
        middleware=[Middleware(OneLength)],
        routes=[Route(path, _answering(handle), methods=[method]) for path, handle, method in routes],
    )


def _answering(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers a request, or why there is no answer."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handle(request)
        except Problem as problem:
            line = writable(" ".join(str(problem).split()))
            body = wire.error_body(problem.status, line, getattr(problem, "code", ""))
            return JSONResponse(body, problem.status, problem.headers)
        except ClientDisconnect:
            return Response(status_code=_LEFT)

    return endpoint


class _Handlers(NamedTuple):
    """Answers requests."""

    policy: Policy
    sessions: Mapping[str, Recorded]
    rules: Rules

    def recorded(self, request: Request) -> Recorded:
        """Return the session of a request; raise Problem for one that is not open."""
        found = self.sessions.get(request.path_params["session"])
        if found is None or found.session.closed:
            raise _Refused(404, "session: expected one that is open", "session_closed")
        return found

    async def models(self, request: Request) -> Response:
        """Answer which model there is."""
        row = {"id": self.policy.name, "object": "model", "created": 0, "owned_by": "rft_fn"}
        window = {} if self.policy.window is None else {"max_model_len": self.policy.window}
        return JSONResponse({"object": "list", "data": [row | window]})

    async def health(self, request: Request) -> Response:
        """Answer whether it is well."""
        closed = self.policy.calls.closed
        found = {"status": "stopping" if closed else "ok", "waiting": len(self.policy.calls)}
        return JSONResponse(found, 503 if closed else 200)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        authorize(request, self.rules)
        data = await arrived(request, self.rules)
        turns, tools, asked = _read(wire.read_chat, data, self.policy.sampling, self.policy.sampling.max_new)
        try:
            ids = self.policy.renderer.opening(turns, tools)
        except ValueError as error:
            raise _Refused(400, error_text(error)) from None
        answers = await _sampled(request, self.policy, [ids], asked)
        name = os.urandom(8).hex()
        made = []
        for i, answer in enumerate(answers):
            text, texts = _texts(self.policy, answer)
            calls = self.policy.parser()(text) if tools else ()
            made.append((wire.told(text, calls, f"{name}_{i}"), answer, texts))
        return _response(wire.chat_answer(name, self.policy.name, asked, ids, made), asked)

    async def completion(self, request: Request) -> Response:
        """Answer completions."""
        authorize(request, self.rules)
        data = await arrived(request, self.rules)
        prompts, asked = _read(wire.read_completion, data, self.policy.sampling, self.policy.sampling.max_new)
        tokenizer = self.policy.renderer.tokenizer
        ids = [prompt_ids(tokenizer, x) if isinstance(x, str) else x for x in prompts]
        if (largest := max(max(x, default=0) for x in ids)) >= len(tokenizer):
            raise _Refused(400, f"prompt: expected token ids below {len(tokenizer)}, got {largest}")
        answers = await _sampled(request, self.policy, ids, asked)
        made = []
        for answer in answers:
            text, texts = _texts(self.policy, answer)
            made.append((text, answer, texts))
        body = wire.completion_answer(os.urandom(8).hex(), self.policy.name, asked, ids, made)
        return _response(body, asked)

    async def recorded_chat(self, request: Request) -> Response:
        """Answer a chat of a session, and record it."""
        session = self.recorded(request).session
        data = await arrived(request, self.rules)
        law = session.sampling
        turns, tools, asked = _read(wire.read_chat, data, law, law.max_new, fixed=True)
        if asked.n > 1:
            raise _Refused(400, f"n: expected 1 in a session that is recorded, got {asked.n}")
        try:
            ask = session.ask(self.policy.renderer, turns, tools)
        except TooLong as error:
            code = "context_length_exceeded" if session.cut == "tokens" else "turns_exceeded"
            raise _Refused(400, error_text(error), code) from None
        except ValueError as error:
            raise _Refused(400, error_text(error)) from None
        return await _record(request, self.policy, session, ask, tools, asked)

    async def reward(self, request: Request) -> Response:
        """Take the reward of a session."""
        found = self.recorded(request)
        given = request.headers.get("Authorization", "")
        if not found.secret:
            raise _Refused(403, "reward: the run gives the rewards of this session itself")
        if not hmac.compare_digest(given.encode(), f"Bearer {found.secret}".encode()):
            raise _Refused(401, "expected the token of rewards as a bearer", WWW_Authenticate="Bearer")
        x = _read(wire.read_reward, await arrived(request, self.rules))
        if found.session.reward is not None and found.session.reward != x:
            raise _Refused(409, f"reward: expected one a session, got {x:g} after {found.session.reward:g}")
        found.session.reward = x
        return JSONResponse({"reward": x})


def _read(read: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Return what a request says; raise Problem for one that cannot be read."""
    try:
        return read(*given, **options)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, str(error)) from None


def _texts(policy: Policy, answer: Answer) -> tuple[str, list[str]]:
    """Return the text of an answer, and that of each token."""
    decode = policy.renderer.tokenizer.decode
    texts = [decode([token], skip_special_tokens=False) for token in answer.tokens]
    return policy.renderer.said(answer.tokens), texts


def _response(body: Mapping[str, Any], asked: wire.Asked) -> Response:
    if not asked.stream:
        return Response(json.dumps(body), media_type="application/json")

    def parts() -> Iterator[str]:
        yield from wire.events(body)

    return StreamingResponse(parts(), media_type="text/event-stream")


# ---------- answers of the policy


def _put(policy: Policy, ids: list[int], key: int, sampling: Sampling) -> Future[Answer]:
    """Add a call to the queue; raise Problem where it does not fit into the window, or the queue is full."""
    if policy.window is not None:
        room = policy.window - len(ids)
        if room < 1:
            line = f"messages: expected fewer than {policy.window} tokens, the window, got {len(ids)}"
            raise _Refused(400, line, "context_length_exceeded")
        if room < sampling.max_new:
            sampling = replace(sampling, max_new=room)
    future = policy.calls.put(ids, key, sampling)
    if future is not None:
        return future
    if policy.calls.closed:
        raise _Refused(503, "the server is stopping", Retry_After="1", Connection="close")
    raise _Refused(429, f"expected at most {policy.calls.most} requests to wait", Retry_After="1")


async def _sampled(
    request: Request, policy: Policy, prompts: Sequence[list[int]], asked: wire.Asked
) -> list[Answer]:
    """Return n answers to each prompt; raise Problem if there are none."""
    seed = int.from_bytes(os.urandom(4)) if asked.seed is None else asked.seed
    futures: list[Future[Answer]] = []
    try:
        for i, ids in enumerate(prompts):
            for j in range(asked.n):
                futures.append(_put(policy, ids, rng.fold_in(seed, "served", i, j), asked.sampling))
        return await _awaited(request, policy, futures)
    finally:
        for future in futures:
            future.cancel()  # those that nobody waits for


async def _awaited(request: Request, policy: Policy, futures: Sequence[Future[Answer]]) -> list[Answer]:
    """Return the results of futures; raise ClientDisconnect if the client leaves, Problem if it is late."""
    found = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    if not await waited(request, found, policy.seconds):
        raise _Refused(504, f"expected an answer within {policy.seconds:g} s")
    answers = found.result()
    for answer in answers:
        if isinstance(answer, BadRequest):
            raise _Refused(400, error_text(answer)) from answer
        if isinstance(answer, BaseException):
            raise _Refused(500, f"{type(answer).__name__}: {error_text(answer)}") from answer
    return [answer for answer in answers if isinstance(answer, Answer)]


async def _record(
    request: Request, policy: Policy, session: Session, ask: Ask, tools: Sequence[Any], asked: wire.Asked
) -> Response:
    """Return the answer of a session, which has it once its client can read it."""
    kept = False
    try:
        room = session.limits.tokens - len(ask.ids)
        sampling = replace(session.sampling, max_new=min(session.sampling.max_new, room))
        key = rng.fold_in(session.key, session.sample, *ask.key)
        future = _put(policy, ask.ids, key, sampling)
        try:
            (answer,) = await _awaited(request, policy, [future])
        finally:
            future.cancel()
        text, texts = _texts(policy, answer)
        name = f"{ask.key[0]}_{ask.key[1]}"
        turn = wire.told(text, policy.parser()(text) if tools else (), name)
        if session.closed:
            raise _Refused(404, "session: expected one that is open", "session_closed")
        session.answered(ask, tools, turn, answer)
        kept = True
        body = wire.chat_answer(name, policy.name, asked, ask.ids, [(turn, answer, texts)])
        return _response(body, asked)
    finally:
        if not kept:
            session.forgotten(ask)
