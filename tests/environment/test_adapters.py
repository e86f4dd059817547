"""Environments of other libraries: stand-ins with the interfaces that their documents describe."""

import asyncio
import importlib.util

import pytest
import tiny
import torch
from spoken import Spoken

from rft_fn import collect, data
from rft_fn.environment import Renderer, adapters
from rft_fn.strategy import get_strategy
from rft_fn.types import Sampling

TOK = tiny.tokenizer()


def play(env, rows, texts, n=1, max_turns=5):
    """The conversations of an engine that says these texts, turn after turn."""

    def speak(ids, key, most):
        turn = ids.count(TOK.eos_token_id)
        return [*TOK.encode(texts[turn]), TOK.eos_token_id], True

    some = [data.Prompt([3], "", row, i) for i, row in enumerate(rows)]
    return collect.play(
        Spoken(speak).engine(), get_strategy(), env, some, range(len(rows)), Renderer(TOK), n=n,
        sampling=Sampling(max_new=9), max_turns=max_turns, max_tokens=120,
    )  # fmt: skip


class Counter:
    """Counts up to the row's number: Gymnasium's API, by hand."""

    made = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.goal, self.at, self.seed, self.closed = int(options["goal"]), 0, seed, False
        Counter.made.append(self)
        return f"goal:{self.goal}=", {}

    def step(self, action):
        self.at += action
        done = self.at >= self.goal
        return f"at:{self.at}=", float(done), done, False, {}

    def close(self):
        self.closed = True


def test_an_environment_of_gymnasium():
    Counter.made.clear()
    env = adapters.gymnasium(Counter, action=int, invalid=-0.5, name="counter")
    played = play(env, [{"goal": "3"}, {"goal": "9"}], ["1", "x", "2", "0", "0"], n=2)
    assert played.reward.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    said = [m["content"] for m in played.talks[0]]
    assert said[0] == "goal:3=" and said[2] == "at:1=" and said[4].startswith("invalid: invalid literal")
    assert said[-1] == "at:3=" and played.rollout.truncated.tolist() == [False, False, True, True]
    assert all(c.closed for c in Counter.made) and len(Counter.made) == 4
    assert Counter.made[0].seed == Counter.made[1].seed != Counter.made[2].seed


class Moves:
    """A space, as Gymnasium has it: two actions."""

    def contains(self, x):
        return x in (1, 2)

    def __str__(self):
        return "Moves(1,\n 2)"


class Walk(Counter):
    action_space = Moves()

    def step(self, action):
        self.at += {1: 1, 2: 2}[action]
        return f"at:{self.at}=", 1.0, self.at >= 3, False, {}


def test_an_action_outside_of_the_space_is_told_and_earns_what_the_caller_says():
    env = adapters.gymnasium(Walk, action=int, invalid=-0.5)
    played = play(env, [{"goal": "3"}], ["7", "1", "-1", "2"])
    assert played.reward.tolist() == [[1.0]]  # twice -0.5, twice 1
    said = [m["content"] for m in played.talks[0]]
    assert said[2] == "invalid: expected one of Moves(1, 2), got 7" and said[4] == "at:1="
    assert said[6] == "invalid: expected one of Moves(1, 2), got -1" and said[8] == "at:3="


def test_a_state_of_gymnasium_is_stepped_once():
    env = adapters.gymnasium(Counter, action=int)
    state, _ = env.reset({"goal": "3"}, 1)
    env.step(state, "1")
    with pytest.raises(ValueError, match="expected the state after step 1, got that after 0"):
        env.step(state, "1")


def test_an_old_environment_of_gymnasium_is_refused():
    class Old(Counter):
        def step(self, action):
            return "x", 0.0, True, {}

    env = adapters.gymnasium(Old)
    state, _ = env.reset({"goal": "1"}, 1)
    with pytest.raises(ValueError, match=r"expected .observation, reward, terminated, truncated, info. from"):
        env.step(state, "1")


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
def test_an_environment_of_the_real_gymnasium():
    import gymnasium

    class Real(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"{int(self.np_random.integers(9))}=", {}

        def step(self, action):
            return "x=", 1.0, True, False, {}

    played = play(adapters.gymnasium(Real), [{}, {}], ["1"])
    assert played.reward.tolist() == [[1.0], [1.0]]

    class Chosen(Real):
        action_space = gymnasium.spaces.Discrete(3)

    played = play(adapters.gymnasium(Chosen, action=int, invalid=-2.0), [{}], ["3", "2"])
    assert played.reward.tolist() == [[-1.0]]


class Rubric:
    """The fields that a rubric has."""

    def __init__(self, funcs, weights):
        self.funcs, self.weights, self.class_objects = funcs, weights, {"parser": "p"}


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


async def turns(state, parser):
    assert parser == "p"
    return state["turn"]


class Recent:
    """0.1.8 to 0.3.1: methods that take the state, and messages before it where they need them."""

    system_prompt = "sys"
    rubric = Rubric([exact, turns], [1.0, 0.01])

    async def setup_state(self, state):
        state["hidden"] = state["info"]["hidden"]
        return state

    async def is_completed(self, state):
        assert len(state["trajectory"]) == state["turn"] == len(state["responses"])
        return state["turn"] >= 4 or bool(state.get("won"))

    async def env_response(self, messages, state):
        assert messages[0]["role"] == "system" and messages[-1]["role"] == "assistant"
        state["won"] = messages[-1]["content"] == state["hidden"]
        return [{"role": "user", "content": f"{state['turn']}:no="}]


class Early(Recent):
    """Up to 0.1.7: messages and state everywhere, both returned."""

    def setup_state(self, state, **kwargs):
        return state | {"hidden": state["info"]["hidden"]}

    async def is_completed(self, messages, state, **kwargs):
        assert messages == state["prompt"] + state["completion"]
        return state["turn"] >= 4 or bool(state.get("won"))

    async def env_response(self, messages, state, **kwargs):
        return await super().env_response(messages, state), state


ROWS = [{"prompt": "say:", "answer": "c", "info": {"hidden": "b"}}]


@pytest.mark.parametrize("kind", [Recent, Early])
def test_an_environment_of_verifiers(kind):
    env = adapters.verifiers(kind(), name="spoken")
    played = play(env, [{**ROWS[0], "info": {"hidden": "z"}}, ROWS[0]], ["a", "b", "q", "c"])
    # the first ends after four turns with its answer, the second is won in the second, with a message behind
    assert played.reward.flatten().tolist() == pytest.approx([1.04, 0.02])
    assert played.numbers["turns"].tolist() == [4, 2] and not played.rollout.truncated.any()
    assert [m["content"] for m in played.talks[1]] == ["sys", "say:", "a", "1:no=", "b", "2:no="]
    assert played.rollout.mask.sum(-1).tolist() == [8, 4]
    # rewards of an episode come at its end
    assert torch.equal(played.token_reward.ne(0).sum(-1), torch.tensor([1, 1]))


def test_the_last_word_of_an_environment_ends_it():
    class Final(Recent):
        async def env_response(self, messages, state):
            state["final_env_response"] = [{"role": "user", "content": "bye="}]
            return state["final_env_response"]

    played = play(adapters.verifiers(Final()), ROWS, ["a", "b"])
    assert played.numbers["turns"].tolist() == [1] and played.talks[0][-1]["content"] == "bye="


def test_a_rubric_of_groups_is_refused():
    class Grouped(Recent):
        rubric = Rubric([lambda completions: [0.0]], [1.0])

        async def is_completed(self, state):
            return True

    env = adapters.verifiers(Grouped())
    state, _ = asyncio.run(env.reset(ROWS[0], 1))
    with pytest.raises(ValueError, match="rubric: expected no function of a whole group"):
        asyncio.run(env.step(state, "a"))


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")
def test_an_environment_of_the_real_verifiers():
    import verifiers as vf
    from datasets import Dataset

    class Guess(getattr(vf, "legacy", vf).MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "no="}]

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "q="}], "answer": "b"}])
    rubric = getattr(vf, "legacy", vf).Rubric(funcs=[exact])
    env = adapters.verifiers(Guess(max_turns=2, dataset=rows, rubric=rubric))
    assert play(env, list(rows), ["a", "b"]).reward.item() == 1.0
