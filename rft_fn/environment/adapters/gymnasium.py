"""Gymnasium's environments whose observations and actions can be texts."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rft_fn.environment.record import Environment, Row, Stepped

__all__ = ["gymnasium"]


class _Stage:
    """An object of Gymnasium, which changes in place, and the number of steps that it has taken."""

    def __init__(self, env: Any):
        self.env = env
        self.steps = 0


class _State(NamedTuple):
    """The object as it is after `steps` steps, of which it forgets the earlier ones."""

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
    """An environment of Gymnasium's API (0.26 or later), a new object of `make()` for each episode.

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
        found = stage.env.step(chosen)
        if not isinstance(found, tuple) or len(found) != 5:
            raise ValueError(
                "expected (observation, reward, terminated, truncated, info) from step, got "
                f"{type(found).__name__} {found!r:.80}"
            )
        seen, reward, terminated, truncated, _ = found
        stage.steps += 1
        return Stepped(
            _State(stage, stage.steps), observation(seen), float(reward), bool(terminated or truncated)
        )

    def close(state: _State) -> None:
        if hasattr(state.stage.env, "close"):
            state.stage.env.close()

    return Environment(name, reset, step, close=close)
