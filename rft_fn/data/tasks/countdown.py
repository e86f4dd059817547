"""Expressions over given numbers that make a target."""

import ast
import functools
import operator
import random
import re
from fractions import Fraction

from rft_fn.data.tasks.task import Task, TaskRow, row_random

__all__ = ["COUNTDOWN"]


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
# Characters of an answer: they bound the depth of the parse tree, and with it the recursion of `_evaluate`.
_MAX_EXPRESSION = 500
_COUNTDOWN_CREDIT = 0.1


def _join(random_: random.Random, numbers: list[int]) -> tuple[str, Fraction] | None:
    """A random parenthesised expression over all numbers, and its value.

    It is None where it divides by zero.
    """
    pool = [(str(n), Fraction(n)) for n in numbers]
    while len(pool) > 1:
        # two of the expressions so far become one
        a, x = pool.pop(random_.randrange(len(pool)))
        b, y = pool.pop(random_.randrange(len(pool)))
        symbol, apply = random_.choice(tuple(zip("+-*/", _OPERATORS.values(), strict=True)))
        if symbol == "/" and y == 0:
            return None
        pool.append((f"({a}{symbol}{b})", apply(x, y)))
    text, value = pool[0]
    return text[1:-1], value


def _countdown(seed: int, index: int, level: int) -> dict[str, str]:
    """Numbers, and a target that + - * / reach from them.

    There are level + 2 numbers. The numbers are in [1, 25], the target is whole and in [1, 100]. The target
    is the value of a random expression, so every problem has a solution; `answer` holds that one.
    """
    random_ = row_random("countdown", seed, index, level)

    # draw again until the value is a whole number of the range
    while True:
        numbers = [random_.randint(1, 25) for _ in range(level + 2)]
        joined = _join(random_, numbers)
        if joined is None:
            continue
        solution, value = joined
        if value.denominator == 1 and 1 <= value <= 100:
            break

    listed = ",".join(map(str, numbers))
    target = str(value)
    question = (
        f"Use each of the numbers {listed.replace(',', ', ')} exactly once, with +, -, *, / and parentheses, "
        f"to make {target}. Answer with the expression alone."
    )
    return {
        "question": question,
        "short": f"make:{target},{listed}=",
        "answer": solution,
        "numbers": listed,
        "target": target,
        "level": str(level),
    }


def _evaluate(node: ast.expr) -> tuple[Fraction, list[int]]:
    """The exact value of an expression and the numbers in it.

    ValueError for all but + - * / on integers.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError(f"expression: {ast.dump(node)[:80]} is not one of the operations + - * /")
    x, left = _evaluate(node.left)
    y, right = _evaluate(node.right)
    return _OPERATORS[type(node.op)](x, y), left + right


def _countdown_verify(text: str, row: TaskRow) -> float:
    """1 for a right expression, 0.1 for a legal one; else 0.

    A right expression makes the target.  A legal expression uses each number exactly once. The credit for a
    legal expression is what TinyZero (github.com/Jiayi-Pan/TinyZero) gives for the format. The expression is
    parsed and walked, never evaluated by Python, in exact fractions.
    """
    text = text.strip()
    if len(text) > _MAX_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return 0.0

    # the parser raises the last two for deep nesting
    try:
        value, used = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0

    if sorted(used) != sorted(map(int, row["numbers"].split(","))):
        return 0.0
    if value == int(row["target"]):
        return 1.0
    return _COUNTDOWN_CREDIT


@functools.lru_cache
def _countdown_chance(level: int) -> float:
    """An estimate from 4,000 fixed problems.

    Its standard error is below 0.004; there is no closed form. The guesser writes the given numbers in a
    random order with random operators between them, without parentheses.
    """
    count = 4000
    random_ = row_random("countdown chance", 0, 0, level)
    total = 0.0
    for index in range(count):
        row = _countdown(0, index, level)
        total += _countdown_verify(_countdown_guess(random_, row), row)
    return total / count


def _countdown_guess(random_: random.Random, row: TaskRow) -> str:
    numbers = row["numbers"].split(",")
    random_.shuffle(numbers)
    return numbers[0] + "".join(random_.choice("+-*/") + number for number in numbers[1:])


COUNTDOWN = Task("countdown", _countdown, _countdown_verify, _countdown_chance, _countdown_guess)
