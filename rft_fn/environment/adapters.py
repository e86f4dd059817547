"""Environments of other libraries, as environments of this one; none of the libraries is imported."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from rft_fn.data.messages import Turn
from rft_fn.environment.record import Environment, Row, Stepped, as_messages
from rft_fn.reward.rubrics import score_conversation

__all__ = ["gymnasium", "verifiers"]


# ---------- gymnasium's environments, with texts as observations and actions


class _Stage:
    """An object of Gymnasium, which changes in place, and the number of steps that it has taken."""

    def __init__(self, env: Any):
        self.env = env
        self.steps = 0


class _State(NamedTuple):
    """The object after `steps` steps; it forgets the earlier ones."""

    stage: _Stage
    steps: int


def gymnasium(
    make: Callable[[], Any],
    *,
    action: Callable[[str], Any] = str.strip,
    observation: Callable[[Any], str] = str,
    invalid: float = 0.0,
    name: str = "gymnasium",
) -> Environment:
    """Make an environment of Gymnasium's API (0.26 or later), with a new `make()` for each episode.

    `action` makes an action of a response, `observation` a text of what is observed. A response that `action`
    refuses by ValueError, and an action that is not in the object's `action_space`, is told to the policy,
    earns `invalid`, and moves nothing. The object is reset with
    a seed made of the key, and with the row as its options; the row's own prompt is not read.

    Such an object changes in place: a state can be stepped once, and ValueError is raised for another time.
    Ended by "truncated" or "terminated", an episode is done.
    """

    def reset(row: Row, key: int) -> tuple[_State, str]:
        stage = _Stage(make())
        seen, _ = stage.env.reset(seed=key % 2**31, options=dict(row))
        return _State(stage, 0), observation(seen)

    def step(state: _State, response: str) -> Stepped:
        stage = state.stage
        if state.steps != stage.steps:
            raise ValueError(f"expected the state after step {stage.steps}, got that after {state.steps}")
        try:
            chosen = action(response)
        except ValueError as error:
            return Stepped(state, f"invalid: {error}", invalid, False)
        space = getattr(stage.env, "action_space", None)
        if space is not None and not space.contains(chosen):
            known = " ".join(str(space).split())
            return Stepped(
                state, f"invalid: expected one of {known:.200}, got {chosen!r:.80}", invalid, False
            )
        result = stage.env.step(chosen)
        if not isinstance(result, tuple) or len(result) != 5:
            raise ValueError(
                "expected (observation, reward, terminated, truncated, info) from step, got "
                f"{type(result).__name__} {result!r:.80}"
            )
        seen, reward, terminated, truncated, _ = result
        stage.steps += 1
        return Stepped(
            _State(stage, stage.steps), observation(seen), float(reward), bool(terminated or truncated)
        )

    def close(state: _State) -> None:
        if hasattr(state.stage.env, "close"):
            state.stage.env.close()

    return Environment(name, reset, step, close=close)


# ---------- environments of the verifiers library: `MultiTurnEnv`, which speaks in messages


def verifiers(env: Any, *, name: str = "verifiers") -> Environment:
    """Make an environment of a `MultiTurnEnv` of verifiers 0.1 to 0.3.1 (there `verifiers.legacy`).

    A row has the columns of its data set: prompt (text or messages), answer, info, task. Of the object only
    `setup_state`, `env_response`, `is_completed`, `system_prompt` and `rubric` are used, in the signatures of
    either time: with messages and state, or only with the state. It gets messages, while tokens stay as they
    were sampled. Its rubric scores an episode at its end, as `reward.rubrics.verifiers` does; functions of
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
    """Return the whole conversation."""
    return [*state["prompt"], *state["completion"]]


async def _given(method: Callable[..., Any], state: dict[str, Any]) -> Any:
    """Call a method with the state, and with the messages before it if it names them."""
    names_messages = "messages" in inspect.signature(method).parameters
    result = method(_messages(state), state) if names_messages else method(state)
    return await result if inspect.isawaitable(result) else result
