"""The built-in environments by name, and their prompts and lessons."""

import ast
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

from rft_fn import rng
from rft_fn.data.dataset import Dataset
from rft_fn.data.messages import Turn
from rft_fn.data.prompts import Prompt, from_rows
from rft_fn.data.table import Endless
from rft_fn.data.tasks.task import row_random
from rft_fn.environment.record import Environment, Renderer, Row, Stepped, as_messages
from rft_fn.environment.tool_calls import Call
from rft_fn.environment.tool_use import Tooled, with_tools
from rft_fn.reward.calling import EventLoop
from rft_fn.user_files import find_module

__all__ = [
    "ENVIRONMENTS", "Hand", "calculate", "calculator", "get_environment", "guess_number", "kuhn_poker",
    "lessons", "prompts",
]  # fmt: skip


# ---------- arithmetic with a calculator: a tool that the policy calls before it answers


_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MOST = 200  # characters of an expression: its numbers stay small
_CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "'
_END = '"}}</tool_call>'


def calculate(expression: str) -> str:
    """Compute an expression of numbers, + - * / and parentheses."""
    if len(expression) > _MOST:
        raise ValueError(f"expected at most {_MOST} characters, got {len(expression)}")
    try:
        body = ast.parse(expression.strip(), mode="eval").body
        value = _value(body)
    except (SyntaxError, RecursionError, MemoryError):  # the last two for deep nesting
        raise ValueError(f"expected an expression, got {expression!r}") from None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("expected numbers, + - * / and parentheses")


def calculator(level: int = 1) -> Environment:
    """Make an environment of two numbers to be added, subtracted or multiplied, and a calculator.

    The numbers have `level` digits. The first call earns 0.3 if it holds the right expression, the answer
    that ends the episode 0.7 if it is right and a call came before it. Nothing is paid for parts: half an
    expression would be learned for them.
    """

    def rows(seed: int, index: int) -> dict[str, str]:
        random = row_random("calculator", seed, index, level)
        a, b = (random.randrange(10 ** (level - 1), 10**level) for _ in range(2))
        expression = f"{a}{random.choice('+-*')}{b}"
        return {
            "question": f"What is {expression}? Use the calculator, then answer with the number alone.",
            "short": f"{expression}=",
            "expression": expression,
            "answer": calculate(expression),
            "level": str(level),
        }

    def reset(row: Row, key: int) -> tuple[Row, None]:
        return row, None

    def answer(row: Row, response: str) -> Stepped:
        return Stepped(row, "", 0.7 * (response.strip() == row["answer"]), True)

    plain = Environment(f"calculator:{level}", reset, answer, rows=rows)
    tooled = with_tools(plain, [calculate], reward=_call_reward)

    async def step(state: Tooled, response: str) -> Stepped:
        stepped = await tooled.step(state, response)
        return stepped._replace(reward=0.0) if stepped.done and not state.outputs else stepped

    return tooled._replace(step=step, teacher=_teacher, tokens=(_CALL, _END), warm_up=35)


def _call_reward(state: Tooled, calls: Sequence[Call]) -> float:
    """Score the first call."""
    if state.outputs:
        return 0.0
    expression = calls[0].arguments.get("expression", "")
    return 0.3 * (expression == state.inner["expression"])


def _teacher(state: Tooled, key: int) -> str:
    """Call the calculator, then answer with its output."""
    return state.outputs[-1] if state.outputs else f"{_CALL}{state.inner['expression']}{_END}"


# ---------- guess a number


class _State(NamedTuple):
    """A number in [0, size), and the tries that are left."""

    number: int
    size: int
    tries: int


def guess_number(level: int = 1) -> Environment:
    """Make an environment that asks for a number below 10**level.

    There are as many tries as halving needs: 4 at level 1, 7 at level 2. The reward is 1 on the turn that
    hits the number, else 0. A player who halves what is left always wins; one who draws different numbers at
    random wins with probability tries / 10**level. Anything but one number is a lost try.
    """
    size = 10**level

    def rows(seed: int, index: int) -> dict[str, str]:
        number = row_random("guess_number", seed, index, level).randrange(size)
        return {
            "question": f"Guess a number from 0 to {size - 1}. Answer with the number alone.",
            "short": f"guess:{size - 1}=",
            "answer": str(number),
            "level": str(level),
        }

    def reset(row: Row, key: int) -> tuple[_State, None]:
        return _State(int(row["answer"]), size, size.bit_length()), None

    def teacher(state: _State, key: int) -> str:
        return str(rng.fold_in(key, "guess") % size)

    return Environment(f"guess_number:{level}", reset, _answer_guess, rows=rows, teacher=teacher)


def _answer_guess(state: _State, response: str) -> Stepped:
    """Compare a guess with the number."""
    state = state._replace(tries=state.tries - 1)
    text = response.strip()
    said = "invalid"
    if re.fullmatch(r"\d{1,9}", text):
        guess = int(text)
        if guess == state.number:
            return Stepped(state, "right", 1.0, True)
        said = "higher" if guess < state.number else "lower"
    return Stepped(state, f"{said}=", 0.0, state.tries == 0)


# ---------- Kuhn poker, played by one policy against itself


_CARDS = "jqk"
_CHIPS = {"00": 1, "10": 1, "11": 2, "010": 1, "011": 2}  # the actions of a hand -> chips that are won
_FOLDS = {"10": 0, "010": 1}  # the hands that end by giving up -> who wins
_ACTIONS = {"0": "pass", "1": "bet"}
_KUHN_ROW = {"question": "Play a hand of Kuhn poker.", "short": "kuhn="}
_FORFEIT = 2.0  # chips that an answer costs which is no action


class Hand(NamedTuple):
    """The cards of both players, and the actions so far: 0 is a pass, 1 a bet or a call."""

    cards: str
    actions: str = ""

    @property
    def seat(self) -> int:
        """Who acts next."""
        return len(self.actions) % 2

    @property
    def payoff(self) -> int | None:
        """The chips that seat 0 wins; None while the hand goes on."""
        chips = _CHIPS.get(self.actions)
        if chips is None:
            return None
        winner = _FOLDS.get(self.actions)
        if winner is None:
            winner = int(_CARDS.index(self.cards[1]) > _CARDS.index(self.cards[0]))
        return chips * (1 - 2 * winner)


def kuhn_poker(level: int = 1) -> Environment:
    """Make Kuhn poker with two seats, both played by the policy; `level` makes no difference.

    Three cards, jack, queen and king; each player pays one chip and gets a card. The first passes or bets a
    chip, then the second; who passes against a bet gives up the pot, and a bet against a pass can still be
    met. The higher card wins. With best play the first player loses 1/18 of a chip per hand (Kuhn, 1950).

    A response is 0 or pass, 1 or bet; anything else ends the hand and pays the other seat two chips. Rewards
    are the chips won: their sum is 0. The cards are drawn from the key, so the samples of a prompt play the
    same ones.
    """
    return Environment(
        name="kuhn_poker",
        reset=_deal,
        step=_play_card,
        seats=2,
        seat=lambda hand: hand.seat,
        rows=lambda seed, index: _KUHN_ROW | {"hand": str(index)},
        teacher=_kuhn_teacher,
        warm_up=60,
    )


def _deal(row: Row, key: int) -> tuple[Hand, list[str]]:
    """Deal two cards; each seat sees its own, and the second waits for the first."""
    deals = list(permutations(_CARDS, 2))
    cards = "".join(deals[rng.fold_in(key, "deal") % len(deals)])
    first, second = (f"card:{card}," for card in cards)
    return Hand(cards), [f"{first}your:", second]


def _play_card(hand: Hand, response: str) -> Stepped:
    """Play one action."""
    seat = hand.seat
    said = response.strip().lower()
    action = {"0": "0", "1": "1", "pass": "0", "bet": "1"}.get(said)
    seen = ["", ""]
    if action is None:
        forfeit = [_FORFEIT, _FORFEIT]
        forfeit[seat] = -_FORFEIT
        seen[1 - seat] = "forfeit"
        return Stepped(hand, seen, forfeit, True)

    hand = hand._replace(actions=hand.actions + action)
    seen[1 - seat] = f"{_ACTIONS[action]},your:"
    payoff = hand.payoff
    if payoff is None:
        return Stepped(hand, seen, [0.0, 0.0], False)
    shown = f"{_ACTIONS[action]},{hand.cards[0]}:{hand.cards[1]}"
    return Stepped(hand, [shown, shown], [float(payoff), float(-payoff)], True)


def _kuhn_teacher(hand: Hand, key: int) -> str:
    """Bet more often with a higher card: who learns from it reads the cards, and plays badly."""
    quarters = 1 + _CARDS.index(hand.cards[hand.seat])
    return str(int(rng.fold_in(key, "action") % 4 < quarters))


# ---------- the built-in environments by name, and their prompts and lessons


ENVIRONMENTS: dict[str, Callable[[int], Environment]] = {
    "guess_number": guess_number,
    "calculator": calculator,
    "kuhn_poker": kuhn_poker,
}
"""Name -> a function that makes the environment of a level."""

_LONGEST = 8  # turns of a lesson


def get_environment(spec: str) -> Environment:
    """Return the environment NAME, NAME:LEVEL, or FILE.py:NAME, which may be a function that makes it.

    ValueError for one that does not exist.
    """
    source, _, name = spec.partition(":")
    if source.endswith(".py"):
        environment = getattr(find_module(source, spec, kind="environment"), name or "environment", None)
        if inspect.isfunction(environment):
            environment = environment()
        if not isinstance(environment, Environment):
            raise ValueError(
                f"environment {spec!r}: expected an Environment, or a function that makes one, got "
                f"{type(environment).__name__}"
            )
        return environment
    if source not in ENVIRONMENTS:
        raise ValueError(
            f"environment: expected one of {', '.join(ENVIRONMENTS)}, or FILE.py:NAME, got {spec!r}"
        )
    level = name or "1"
    if not (level.isascii() and level.isdigit()) or int(level) < 1:
        raise ValueError(f"environment: expected a level above 0 behind the colon, got {spec!r}")
    return ENVIRONMENTS[source](int(level))


def prompts(env: Environment, tokenizer: Any, *, seed: int = 0, **options: Any) -> Dataset[Prompt]:
    """Make of the rows of an environment an endless data set.

    The options are options of `data.from_rows`; the template "{short}" is the terse form of a question.
    ValueError for an environment without rows.
    """
    if env.rows is None:
        raise ValueError(f"environment {env.name!r}: expected rows of its own, got none; give it data")
    rows = Endless(env.name, partial(env.rows, seed), seed)
    return from_rows(rows, tokenizer, name=env.name, **options)


def lessons(env: Environment, renderer: Renderer, seed: int, index: int) -> list[tuple[list[int], list[int]]]:
    """Return (tokens before a response, tokens of the response) for each turn of an episode.

    The teacher plays it, on the row of these numbers. ValueError for an environment without rows or teacher.
    """
    if env.rows is None or env.teacher is None:
        raise ValueError(
            f"environment {env.name!r}: expected rows and a teacher to learn its form from, got none"
        )
    row = env.rows(seed, index)
    key = rng.fold_in(seed, "lesson", index)
    state, observed = _awaited(env.reset(row, key))
    asked = [{"role": "user", "content": row["short"]}]
    texts = [renderer.opening(messages or asked, env.tools) for messages in _each(env, observed)]
    unread: list[list[Turn]] = [[] for _ in texts]

    # what each seat has read and said so far
    exchanges = []
    for turn in range(_LONGEST):
        seat = env.seat(state)
        if unread[seat]:
            texts[seat] = [*texts[seat], *renderer.reply(texts[seat], unread[seat])]
            unread[seat] = []
        said = env.teacher(state, rng.fold_in(key, turn))
        ids = renderer.tokenizer.encode(said, add_special_tokens=False)
        response = [*ids, renderer.tokenizer.eos_token_id]
        exchanges.append((texts[seat], response))
        texts[seat] = [*texts[seat], *response]
        state, observed, _, done = _awaited(env.step(state, said))
        if done:
            break
        for i, messages in enumerate(_each(env, observed)):
            unread[i] += messages
    return exchanges


def _each(env: Environment, observed: Any) -> list[list[Turn]]:
    """Return the messages that each seat observes."""
    return [as_messages(x) for x in ([observed] if env.seats == 1 else observed)]


def _awaited(result: Any) -> Any:
    """Return the result of a call of an environment, awaited if need be."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return EventLoop().run(wait())
