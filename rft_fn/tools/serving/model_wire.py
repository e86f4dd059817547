"""Requests and answers of the endpoints of language models, in the form of OpenAI's.

What a request asks for and this server cannot do is refused in one line, so that nobody measures something
else than what was asked for.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rft_fn import border
from rft_fn.collect.calls import Answer
from rft_fn.data.messages import Turn, tools_of, turns_of
from rft_fn.environment.call_forms import Call as ToolCall
from rft_fn.types import Sampling

__all__ = [
    "Asked", "chat_answer", "completion_answer", "error_body", "events", "read_chat", "read_completion",
    "read_reward", "told",
]  # fmt: skip


_MOST = 128  # samples of a prompt
_STOPS = 16
_EITHER_WAY = {  # what changes nothing here: who asks, and how an answer is stored or billed
    "model", "messages", "prompt", "tools", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "stream_options", "reasoning_effort", "verbosity", "parallel_tool_calls", "n", "seed",
    "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "stream", "logprobs",
    "return_token_ids",
}  # fmt: skip
_OFF: dict[str, tuple[Any, ...]] = {  # what may be sent as long as it is off
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip


class Asked(NamedTuple):
    """What a request asks for, beside its prompt."""

    sampling: Sampling
    n: int
    seed: int | None
    stream: bool
    logprobs: bool
    ids: bool  # whether the answer has the token ids of prompt and response


def read_chat(
    data: bytes, usual: Sampling, most: int, *, fixed: bool = False
) -> tuple[list[Turn], list[Any], Asked]:
    """Return (the conversation, the tools, what is asked). ValueError for anything else.

    Where the sampling is `fixed` it is `usual`, whatever the request says of it.
    """
    body = _object(data)
    if fixed:
        body = {name: x for name, x in body.items() if name not in _SAMPLING}
    turns = [_turn(turn) for turn in turns_of(body, "messages")]
    tools = [] if body.get("tool_choice") == "none" else tools_of(body) or []
    return turns, tools, _asked(body, usual, most, logprobs=bool(body.get("logprobs")))


def _turn(turn: Turn) -> Turn:
    """Return a turn with what a chat template reads, and none of what clients send beside it."""
    names = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
    kept = {name: turn[name] for name in names if turn.get(name) is not None}
    return kept | ({"role": "system"} if turn["role"] == "developer" else {})


def read_completion(data: bytes, usual: Sampling, most: int) -> tuple[list[str | list[int]], Asked]:
    """Return (the prompts, each a text or token ids; what is asked). ValueError for anything else."""
    body = _object(data)
    prompt = body.get("prompt")
    given = [prompt]
    if isinstance(prompt, list) and not all(isinstance(x, int) for x in prompt):
        given = prompt
    prompts = [_prompt(x) for x in given]
    level = body.get("logprobs")
    if level is not None and level is not False:
        border.integer("logprobs", int(level), low=0, high=1)  # of the tokens that were sampled
    return prompts, _asked(body, usual, most, logprobs=level is not None and level is not False)


def read_reward(data: bytes) -> float:
    """Return the reward of an episode. ValueError for none, and for one that is not finite."""
    return border.number("reward", _object(data).get("reward"))


def _prompt(x: Any) -> str | list[int]:
    if isinstance(x, str) and x:
        return x
    if isinstance(x, list) and x:
        return [border.integer("prompt", token, low=0) for token in x]
    raise ValueError(f"prompt: expected a text or token ids, not empty, got {border.quoted(x)}")


def _object(data: bytes) -> dict[str, Any]:
    body = border.object_of("request", border.read_json(data))
    return {name: x for name, x in body.items() if x is not None}


def _asked(body: Mapping[str, Any], usual: Sampling, most: int, *, logprobs: bool) -> Asked:
    for name, x in body.items():
        if name not in _EITHER_WAY and not any(x == off for off in _OFF.get(name, ())):
            what = "it is not known here" if name not in _OFF else f"only {_OFF[name][0]!r} is done here"
            raise ValueError(f"{name}: {what}, got {border.quoted(x)}")
    limit = body.get("max_completion_tokens", body.get("max_tokens", most))
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else border.entries("stop", stop, None)
    if len(stops) > _STOPS:
        raise ValueError(f"stop: expected at most {_STOPS} texts, got {len(stops)}")
    sampling = replace(
        usual,
        temperature=border.number("temperature", body.get("temperature", usual.temperature), low=0),
        top_p=border.number("top_p", body.get("top_p", usual.top_p), low=0, high=1),
        top_k=max(border.integer("top_k", body.get("top_k", usual.top_k), low=-1), 0),
        max_new=min(border.integer("max_tokens", limit, low=1), most),
        stop=(*usual.stop, *(border.text("stop", x) for x in stops)),
    )
    seed = body.get("seed")
    return Asked(
        sampling,
        n=border.integer("n", body.get("n", 1), low=1, high=_MOST),
        seed=None if seed is None else border.integer("seed", seed),
        stream=bool(body.get("stream", False)),
        logprobs=logprobs,
        ids=bool(body.get("return_token_ids", False)),
    )


# ---------- answers


def told(text: str, calls: Sequence[ToolCall], name: str) -> Turn:
    """Return the message that a program gets: a text, or its calls of tools with ids made of `name`."""
    whole = [call for call in calls if call.complete and not call.error]
    if not whole:
        return {"role": "assistant", "content": text}
    made = [
        {
            "id": call.id or f"call_{name}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for i, call in enumerate(whole)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def chat_answer(
    name: str,
    model: str,
    asked: Asked,
    ids: Sequence[int],
    answers: Sequence[tuple[Turn, Answer, Sequence[str]]],
) -> dict[str, Any]:
    """Return the body of an answer; answers are (the message, the tokens, the text of each)."""
    choices = []
    for i, (turn, answer, texts) in enumerate(answers):
        calls = [
            call | {"function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn.get("tool_calls", ())
        ]
        message: dict[str, Any] = {"role": "assistant", "content": turn["content"], "refusal": None}
        if calls:
            message |= {"content": turn["content"] or None, "tool_calls": calls}
        reason = "length" if answer.cut else "tool_calls" if calls else "stop"
        choice: dict[str, Any] = {"index": i, "message": message, "finish_reason": reason, "logprobs": None}
        if asked.logprobs:
            content = [
                {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logp in zip(texts, answer.logp, strict=True)
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        choices.append(choice | ({"token_ids": answer.tokens} if asked.ids else {}))
    body = _body(f"chatcmpl-{name}", "chat.completion", model, [ids], [answer for _, answer, _ in answers])
    return body | {"choices": choices} | ({"prompt_token_ids": list(ids)} if asked.ids else {})


def completion_answer(
    name: str,
    model: str,
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[tuple[str, Answer, Sequence[str]]],
) -> dict[str, Any]:
    """Return the body of an answer, n for each prompt."""
    choices = []
    for i, (text, answer, texts) in enumerate(answers):
        choice: dict[str, Any] = {"index": i, "text": text, "logprobs": None}
        choice["finish_reason"] = "length" if answer.cut else "stop"
        if asked.logprobs:
            starts = [sum(len(x) for x in texts[:k]) for k in range(len(texts))]
            choice["logprobs"] = {
                "tokens": list(texts),
                "token_logprobs": answer.logp,
                "top_logprobs": [],
                "text_offset": starts,
            }
        if asked.ids:
            choice |= {"token_ids": answer.tokens, "prompt_token_ids": list(prompts[i // asked.n])}
        choices.append(choice)
    body = _body(f"cmpl-{name}", "text_completion", model, prompts, [answer for _, answer, _ in answers])
    return body | {"choices": choices}


def _body(
    name: str, kind: str, model: str, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]
) -> dict[str, Any]:
    read, said = sum(len(ids) for ids in prompts), sum(len(answer.tokens) for answer in answers)
    usage = {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "usage": usage}


def events(body: Mapping[str, Any]) -> list[str]:
    """Return an answer as the events of a stream: the whole text of each choice at once."""
    chat = body["object"] == "chat.completion"
    head = {name: body[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else body["object"]
    found: list[dict[str, Any]] = []
    for choice in body["choices"]:
        if not chat:
            found.append({**head, "choices": [choice]})
            continue
        message = choice["message"]
        delta = {name: message[name] for name in ("role", "content") if message[name] is not None}
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        first = {"index": choice["index"], "delta": delta | ({"tool_calls": calls} if calls else {})}
        found.append({**head, "choices": [{**first, "finish_reason": None, "logprobs": choice["logprobs"]}]})
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        found.append({**head, "choices": [last]})
    found.append({**head, "choices": [], "usage": body["usage"]})
    return [f"data: {json.dumps(x)}\n\n" for x in found] + ["data: [DONE]\n\n"]


def error_body(status: int, line: str, code: str = "") -> dict[str, Any]:
    """Return the body of a refusal, as clients of OpenAI's read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": line, "type": kind, "param": None, "code": code or None}}
