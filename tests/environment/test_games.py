"""The built-in environments: their rules by enumeration, and what their teachers show."""

import asyncio
import inspect
import itertools
import math
from fractions import Fraction

import pytest
import tiny
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as hs
from kuhn import best_payoff, expected_payoff, exploitability, hands, nash, situations
from spoken import Spoken

from rft_fn import collect, data, rng
from rft_fn.environment import ENVIRONMENTS, Renderer, get_environment, lessons, prompts
from rft_fn.environment.arithmetic import calculate, calculator
from rft_fn.environment.guess import guess_number
from rft_fn.environment.tiny_models import new_tokenizer
from rft_fn.strategy import get_strategy
from rft_fn.types import Sampling

SETTINGS = settings(deadline=None, derandomize=True, max_examples=60)
TOK = tiny.tokenizer()


def stepped(env, state, response):
    return awaited(env.step(state, response))


def awaited(result):
    if inspect.isawaitable(result):

        async def wait():
            return await result

        return asyncio.run(wait())
    return result


@pytest.mark.parametrize("level", [1, 2])
def test_halving_what_is_left_always_finds_the_number(level):
    env = guess_number(level)
    for number in range(10**level):
        state, _ = env.reset({"answer": str(number)}, 0)
        low, high, total, done = 0, 10**level - 1, 0.0, False
        while not done:
            guess = (low + high) // 2
            state, said, reward, done = env.step(state, str(guess))
            total += reward
            if said == "higher=":
                low = guess + 1
            elif said == "lower=":
                high = guess - 1
        assert total == 1.0


def test_guessing_different_numbers_blindly_wins_as_often_as_stated():
    env = guess_number(1)
    wins = 0
    for number, order in itertools.product(range(10), itertools.permutations(range(10), 4)):
        state, _ = env.reset({"answer": str(number)}, 0)
        for guess in order:
            state, _, reward, done = env.step(state, str(guess))
            wins += reward
            if done:
                break
    assert wins / (10 * math.perm(10, 4)) == pytest.approx(4 / 10)


@each("text", ["", "x", "5 6", "-5", "5.", "9" * 5000])
def test_what_is_no_number_is_a_lost_try(text):
    env = guess_number(1)
    state, _ = env.reset({"answer": "5"}, 0)
    after = env.step(state, text)
    assert after.observation == "invalid=" and after.state.tries == state.tries - 1 == 3 and not after.done
    assert env.step(state, " 5\n").reward == 1.0


@given(hs.recursive(
    hs.integers(0, 99).map(str),
    lambda x: hs.tuples(x, hs.sampled_from("+-*/"), x).map(lambda p: f"({p[0]}{p[1]}{p[2]})"), max_leaves=6,
))  # fmt: skip
@SETTINGS
def test_the_calculator_is_exact(expression):
    fractions = eval("".join(f"F({c})" if c.isdigit() else c for c in _tokens(expression)), {"F": _Lazy})
    if fractions.value is None:
        with pytest.raises(ZeroDivisionError):
            calculate(expression)
    elif fractions.value.denominator == 1:
        assert calculate(expression) == str(fractions.value)
    else:
        assert float(calculate(expression)) == pytest.approx(float(fractions.value), rel=1e-5)


class _Lazy:
    """A fraction, or None after a division by zero."""

    def __init__(self, value):
        self.value = None if value is None else Fraction(value)

    def _with(self, other, f):
        if self.value is None or other.value is None:
            return _Lazy(None)
        return _Lazy(f(self.value, other.value))

    def __add__(self, other):
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other):
        return self._with(other, lambda a, b: a * b)

    def __truediv__(self, other):
        return self._with(other, lambda a, b: None if b == 0 else a / b)


def _tokens(expression):
    import re

    return re.findall(r"\d+|[-+*/()]", expression)


@each(
    "expression, line",
    [
        ("__import__('os')", "expected numbers"), ("2**9**9", "expected num"), ("a+1", "expected num"),
        ("1+", "expected an expression"), ("9" * 300, "expected at most 200"), ("1<2", "expected num"),
    ],
)  # fmt: skip
def test_the_calculator_computes_nothing_else(expression, line):
    with pytest.raises(ValueError, match=line):
        calculate(expression)


def test_the_rewards_of_the_calculator():
    env = calculator(2)
    row = {"expression": "37*46", "answer": "1702"}
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'
    state, first = awaited(env.reset(row, 0))
    right = stepped(env, state, call % "37*46")
    assert (
        first is None and right.observation[0]["content"] == "1702" and right.reward == 0.3 and not right.done
    )
    assert stepped(env, right.state, "1702")[2:] == (0.7, True)
    assert stepped(env, right.state, "1792")[2:] == (0.0, True)
    assert stepped(env, right.state, call % "37*46").reward == 0.0  # once
    wrong = stepped(env, state, call % "37+46")
    assert wrong.reward == 0.0 and wrong.observation[0]["content"] == "83"
    assert stepped(env, state, "1702")[2:] == (0.0, True)  # computed by nobody knows whom


def tree_value(env, strategies, *, deal_keys):
    """The chips of both seats, by walking the environment itself over all responses."""

    def walk(state, seats):
        bet = strategies[state.seat](state.cards[state.seat], state.actions)
        total = torch.zeros(2, dtype=torch.float64)
        for response, p in (("0", 1 - bet), ("1", bet)):
            after = env.step(state, response)
            value = torch.tensor(after.reward, dtype=torch.float64)
            if not after.done:
                assert value.tolist() == [0.0, 0.0] and env.seat(after.state) == 1 - env.seat(state)
                value = walk(after.state, seats)
            total += p * value
        return total

    return sum(walk(env.reset({}, key)[0], 2) for key in deal_keys) / len(deal_keys)


def one_key_per_deal(env):
    """A key that deals each of the six hands."""
    found = {}
    for i in range(1000):
        key = rng.fold_in(3, i)
        found.setdefault(env.reset({}, key)[0].cards, key)
    assert sorted(found) == sorted(hand.cards for hand in hands()) and len(found) == 6
    return list(found.values())


def test_best_play_pays_the_nash_value():
    """The first player loses 1/18 chip a hand: by the rules of the environment, and by the tree's formula."""
    env = get_environment("kuhn_poker")
    value = tree_value(env, (nash, nash), deal_keys=one_key_per_deal(env))
    assert value.tolist() == pytest.approx([-1 / 18, 1 / 18], abs=1e-12)
    assert expected_payoff(nash, nash) == pytest.approx(-1 / 18, abs=1e-12)


@given(hs.lists(hs.floats(0, 1), min_size=12, max_size=12))
@SETTINGS
def test_the_tree_and_the_environment_agree_for_any_play(bets):
    keys = [(c, a) for c in "jqk" for a in ("", "01", "0", "1")]
    table = dict(zip(keys, bets))
    play = lambda card, actions: table[card, actions]  # noqa: E731
    env = get_environment("kuhn_poker")
    value = tree_value(env, (play, nash), deal_keys=one_key_per_deal(env))
    assert float(value[0]) == pytest.approx(expected_payoff(play, nash), abs=1e-12)
    assert float(value.sum()) == pytest.approx(0, abs=1e-12)


def _from(table):
    return lambda card, actions: table[card, actions]


def test_no_pure_play_beats_the_equilibrium():
    """All 64 pure strategies of either seat: none wins more than its seat is worth."""
    first = [(c, a) for c in "jqk" for a in ("", "01")]
    second = [(c, a) for c in "jqk" for a in ("0", "1")]
    for choices in itertools.product([0.0, 1.0], repeat=6):
        one = dict(zip(first, choices))
        two = dict(zip(second, choices))
        assert expected_payoff(_from(one), nash) <= -1 / 18 + 1e-12
        assert expected_payoff(nash, _from(two)) >= -1 / 18 - 1e-12


SITUATIONS = [(c, a) for c in "jqk" for a in ("", "01", "0", "1")]


SHARES = hs.lists(hs.floats(0, 1), min_size=12, max_size=12)


@given(SHARES, SHARES)
@SETTINGS
def test_nobody_wins_more_than_the_best_response(bets, others):
    play = _from(dict(zip(SITUATIONS, bets)))
    other = _from(dict(zip(SITUATIONS, others)))
    assert expected_payoff(other, play) <= best_payoff(play, 0) + 1e-12
    assert -expected_payoff(play, other) <= best_payoff(play, 1) + 1e-12
    assert exploitability(play) >= -1e-12


def bluffing(often):
    """The equilibrium in which the first player bets the jack this often: any share up to a third."""
    first = {("j", ""): often, ("q", ""): 0.0, ("k", ""): 3 * often}
    first |= {("j", "01"): 0.0, ("q", "01"): often + 1 / 3, ("k", "01"): 1.0}
    return lambda card, actions: first.get((card, actions), nash(card, actions))


def test_exploitability_of_plays_whose_value_is_known():
    """Kuhn's equilibria lose nothing; 11/24 for blind play is what tests of OpenSpiel expect."""
    for often in (0.0, 0.2, 1 / 3):
        assert exploitability(bluffing(often)) == pytest.approx(0, abs=1e-12)
    assert exploitability(bluffing(0.5)) > 0.01
    assert exploitability(lambda card, actions: 0.5) == pytest.approx(11 / 24)
    # who always passes loses the pot to every bet
    assert exploitability(lambda card, actions: 0.0) == pytest.approx(1.0)


def test_the_situations_are_what_a_policy_reads():
    env = get_environment("kuhn_poker")
    renderer = Renderer(TOK)
    read = {tuple(ids) for i in range(60) for ids, _ in lessons(env, renderer, 1, i)}
    found = {tuple(ids) for ids in situations(renderer).values()}
    assert len(found) == 12 and found == read


def test_each_seat_sees_its_own_card_until_the_hand_ends():
    env = get_environment("kuhn_poker")
    state, (first, second) = env.reset({}, 7)
    a, b = state.cards
    assert first == f"card:{a},your:" and second == f"card:{b},"
    after = env.step(state, "pass")
    assert after.observation == ["", "pass,your:"]
    over = env.step(after.state, "0")
    assert over.done and over.observation == [f"pass,{a}:{b}"] * 2


def test_what_is_no_action_forfeits():
    env = get_environment("kuhn_poker")
    state, _ = env.reset({}, 7)
    assert env.step(state, "raise").reward == [-2.0, 2.0]
    after = env.step(state, "1")
    assert env.step(after.state, "").reward == [2.0, -2.0]


def test_a_policy_plays_both_seats_with_the_payoff_of_its_strategy():
    """An engine that plays the equilibrium from the cards it reads: the mean is the tree's, within noise."""

    def speak(ids, key, most):
        text = TOK.decode(ids, skip_special_tokens=True)
        card = text.removeprefix("card:")[0]
        said = [line.replace("your:", "") for line in text.split(",")[1:]]
        actions = "".join("1" if "bet" in s else "0" for s in said if s.startswith(("pass", "bet")))
        own = [s for s in text.split("your:")[1:] if s]
        actions = (own[0][0] if own else "") + actions
        bet = nash(card, actions)
        action = "1" if (key % 10**6) / 10**6 < bet else "0"
        return [*TOK.encode(action), TOK.eos_token_id], True

    env = get_environment("kuhn_poker")
    some, keys = data.draw(prompts(env, TOK, template="{short}"), 300, 0, 0)
    played = collect.play(
        Spoken(speak).engine(), get_strategy(), env, some, keys, Renderer(TOK), n=10,
        sampling=Sampling(max_new=2), max_turns=4, max_tokens=60,
    )  # fmt: skip
    won = played.reward.view(300, 2, 10)
    assert torch.equal(won.sum(1), torch.zeros(300, 10))
    assert set(won.abs().unique().tolist()) <= {1.0, 2.0}
    # 1.3 chips of deviation, and hands of one deal together
    assert float(won[:, 0].mean()) == pytest.approx(-1 / 18, abs=0.15)


# ---------- all of them


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_lesson_is_an_episode_as_play_would_sample_it(name):
    """The turns of a lesson, put together, are a conversation of `play` whose engine says the same."""
    env = get_environment(name)
    tok = new_tokenizer(env.tokens)
    renderer = Renderer(tok)
    found = lessons(env, renderer, 5, 2)
    replies = dict((tuple(asked), said) for asked, said in found)
    spoken = Spoken(lambda ids, key, most: (replies[tuple(ids)], True))
    prompt = prompts(env, tok, seed=5, template="{short}").prompt(2)
    played = collect.play(
        spoken.engine(), get_strategy(), env, [prompt], [rng.fold_in(5, "lesson", 2)], renderer, n=1,
        sampling=Sampling(max_new=9), max_turns=9, max_tokens=99,
    )  # fmt: skip
    assert int(played.numbers["turns"].sum()) == len(found) and not played.rollout.truncated.any()
    assert all(said[-1] == tok.eos_token_id for _, said in found)


@each(
    "spec, line",
    [
        ("chess", "environment: expected one of guess_number, calculator, kuhn_poker, or FILE.py:NAME"),
        ("guess_number:0", "expected a level above 0"),
        ("guess_number:x", "expected a level above 0"),
        ("no_such_file.py:make", "environment 'no_such_file.py:make': no such file"),
    ],
)
def test_an_environment_that_does_not_exist_is_named(spec, line):
    with pytest.raises(ValueError, match="environment") as found:
        get_environment(spec)
    assert line in str(found.value)


def test_an_environment_of_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from rft_fn.environment import Environment\n"
        "def make():\n"
        "    return Environment('mine', lambda row, key: (0, 'go'), lambda s, t: (s, '', 1.0, True))\n"
        "environment = make()\n"
        "other = 3\n"
    )
    assert get_environment(f"{path}:make").name == get_environment(f"{path}").name == "mine"
    with pytest.raises(ValueError, match="expected an Environment, or a function that makes one, got int"):
        get_environment(f"{path}:other")


def test_rows_differ_by_seed_and_index_alone():
    env = get_environment("calculator:2")
    assert env.rows(1, 4) == env.rows(1, 4)
    assert len({env.rows(1, i)["short"] for i in range(50)}) > 45 and env.rows(1, 0) != env.rows(2, 0)
