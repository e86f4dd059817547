"""Environments of the verifiers library: `MultiTurnEnv`, which speaks in messages."""

import inspect
from collections.abc import Callable
from typing import Any

from rft_fn.data.messages import Turn
from rft_fn.environment.record import Environment, Row, Stepped, as_messages
from rft_fn.reward.adapters.verifiers import score_conversation

__all__ = ["verifiers"]


def verifiers(env: Any, *, name: str = "verifiers") -> Environment:
    """A `MultiTurnEnv` of verifiers 0.1 to 0.3.1 (`verifiers.legacy` there), or a subclass of it.

    A row has the columns of its data set: prompt (text or messages), answer, info, task. Of the object only
    `setup_state`, `env_response`, `is_completed`, `system_prompt` and `rubric` are used, in the signatures of
    either time: with messages and state, or with the state alone. It gets messages, while tokens stay as they
    were sampled. Its rubric scores an episode at its end, as `reward.adapters.verifiers` does; functions of
    whole groups are refused by ValueError. Version 0.4 has other classes, `verifiers.v1`, and is not read.

    Its state changes in place: a state can be stepped once.
    """

    async def reset(row: Row, key: int) -> tuple[dict[str, Any], list[Turn]]:
        prompt = as_messages(row["prompt"])
        system = getattr(env, "system_prompt", None)
        if system and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": system}, *prompt]
        state: dict[str, Any] = {
            "prompt": prompt,
            "completion": [],
            "responses": [],
            "trajectory": [],
            "turn": 0,
            "answer": row.get("answer", ""),
            "task": row.get("task", "default"),
            "info": dict(row.get("info") or {}),
            "example_id": row.get("example_id", 0),
            "input": dict(row),
            "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
            "is_completed": False,
        }
        made = await _given(env.setup_state, state)
        if made is not None:
            state = made
        return state, prompt

    async def step(state: dict[str, Any], response: str) -> Stepped:
        said: Turn = {"role": "assistant", "content": response}
        state["trajectory"].append({"prompt": _messages(state), "completion": [said], "extras": {}})
        state["completion"] = [*state["completion"], said]
        state["responses"].append(response)
        state["turn"] += 1

        # the object may end the episode before its answer, with it, or because of it
        reply: list[Turn] = []
        done = bool(await _given(env.is_completed, state))
        if not done:
            answer = await _given(env.env_response, state)
            if isinstance(answer, tuple):
                answer, state = answer
            reply = as_messages(answer)
            state["completion"] = [*state["completion"], *reply]
            done = state.get("final_env_response") is not None
            done = done or bool(await _given(env.is_completed, state))
        if not done:
            return Stepped(state, reply, 0.0, False)
        state["is_completed"] = True
        reward = await score_conversation(env.rubric, state)
        return Stepped(state, reply, reward, True)

    return Environment(name, reset, step)


def _messages(state: dict[str, Any]) -> list[Turn]:
    """The whole conversation."""
    return [*state["prompt"], *state["completion"]]


async def _given(method: Callable[..., Any], state: dict[str, Any]) -> Any:
    """The result of a method, called with the state, and with the messages before it if it names them."""
    given: list[Any] = [state]
    if "messages" in inspect.signature(method).parameters:
        given = [_messages(state), state]
    result = method(*given)
    if inspect.isawaitable(result):
        return await result
    return result
