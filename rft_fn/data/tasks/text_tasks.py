"""The built-in tasks of text: sums, strings to be written anew, expressions, letters."""

import ast
import functools
import operator
import random
import re
import string
from fractions import Fraction

from rft_fn.data.tasks.task import Generate, Task, TaskRow, exact, random_word, row_random

__all__ = ["ADDITION", "COUNTDOWN", "LETTER_COUNT", "REVERSE", "SORT_DIGITS"]


def _addition(seed: int, index: int, level: int) -> dict[str, str]:
    """Return the sum of two numbers, both uniform in [0, 10**level)."""
    random_ = row_random("addition", seed, index, level)
    a = random_.randrange(10**level)
    b = random_.randrange(10**level)
    return {
        "question": f"What is {a} + {b}?",
        "short": f"{a}+{b}=",
        "answer": str(a + b),
        "level": str(level),
    }


# A guess is uniform over the possible sums. The best constant answer, 10**level - 1, scores 10**-level: a
# curve that stops there ignores the question.
ADDITION = Task(
    name="addition",
    generate=_addition,
    verify=exact,
    chance=lambda level: 1 / (2 * 10**level - 1),
    guess=lambda random_, row: str(random_.randrange(2 * 10 ** int(row["level"]) - 1)),
)


def _aligned(text: str, row: TaskRow) -> float:
    """Return 1 if exact, else half the share of right positions, in [0, 0.5].

    A position is right if it holds the right character. The share is of the longer of the two strings, so
    that neither padding nor truncation pays. Partial credit gives the samples of a group different scores
    long before one of them is exact, as a group-relative advantage needs it; the factor of a half keeps a gap
    above "all but one", so that the last character is worth more than any other.
    """
    text = text.strip()
    answer = row["answer"]
    if text == answer:
        return 1.0
    right = sum(map(operator.eq, text, answer))
    return 0.5 * right / max(len(text), len(answer))


def _reverse(seed: int, index: int, level: int) -> dict[str, str]:
    """Return level + 2 letters, to be written backwards; partial credit as of `_aligned`."""
    word = random_word(row_random("reverse", seed, index, level), string.ascii_lowercase, level + 2)
    question = f'Write the string "{word}" backwards, character by character.'
    return {"question": question, "short": f"reverse:{word}=", "answer": word[::-1], "level": str(level)}


def _sort_digits(seed: int, index: int, level: int) -> dict[str, str]:
    """Return level + 2 digits, to be sorted in ascending order; partial credit as of `_aligned`."""
    digits = random_word(row_random("sort_digits", seed, index, level), string.digits, level + 2)
    question = (
        f"Sort the digits of {digits} in ascending order. Keep repeated digits and write no separators."
    )
    return {
        "question": question,
        "short": f"sort:{digits}=",
        "answer": "".join(sorted(digits)),
        "level": str(level),
    }


def _aligned_task(name: str, generate: Generate, symbols: str) -> Task:
    """Make a task with n = level + 2 of these symbols as its answer, scored by position.

    A guess is n symbols, independent and uniform over V: it scores 0.5 / V + 0.5 V**-n.
    """
    count = len(symbols)
    return Task(
        name=name,
        generate=generate,
        verify=_aligned,
        chance=lambda level: 0.5 / count + 0.5 * float(count) ** -(level + 2),
        guess=lambda random_, row: random_word(random_, symbols, int(row["level"]) + 2),
    )


REVERSE = _aligned_task("reverse", _reverse, string.ascii_lowercase)
SORT_DIGITS = _aligned_task("sort_digits", _sort_digits, string.digits)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
# Characters of an answer: they bound the depth of the parse tree, and with it the recursion of `_evaluate`.
_MAX_EXPRESSION = 500
_COUNTDOWN_CREDIT = 0.1


def _join(random_: random.Random, numbers: list[int]) -> tuple[str, Fraction] | None:
    """Return a random expression over all numbers and its value; None where it divides by zero."""
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
    """Return numbers, and a target that + - * / reach from them.

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
    """Return the exact value of an expression of + - * / on integers, and its numbers. Else ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError(f"expression: {ast.dump(node)[:80]} is not one of the operations + - * /")
    x, left = _evaluate(node.left)
    y, right = _evaluate(node.right)
    return _OPERATORS[type(node.op)](x, y), left + right


def _countdown_verify(text: str, row: TaskRow) -> float:
    """Return 1 for a right expression, 0.1 for a legal one; else 0.

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
    return 1.0 if value == int(row["target"]) else _COUNTDOWN_CREDIT


@functools.lru_cache
def _countdown_chance(level: int) -> float:
    """Return an estimate from 4,000 fixed problems.

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


def _letter_count(seed: int, index: int, level: int) -> dict[str, str]:
    """Return the count of a letter in a string of 2 level + 4 letters.

    It is uniform in [0, level + 2]. The count is drawn first and the string is built around it, so that no
    constant answer does better than chance.
    """
    random_ = row_random("letter_count", seed, index, level)
    letter = random_.choice(string.ascii_lowercase)
    count = random_.randrange(level + 3)

    # that many of the letter, the rest from the other letters, in a random order
    others = string.ascii_lowercase.replace(letter, "")
    letters = [letter] * count
    letters += random_word(random_, others, 2 * level + 4 - count)
    random_.shuffle(letters)
    word = "".join(letters)
    question = f'How many times does the letter "{letter}" occur in "{word}"?'
    return {
        "question": question,
        "short": f"count:{letter},{word}=",
        "answer": str(count),
        "level": str(level),
    }


# A guess is uniform over the possible counts. A constant count scores the same.
LETTER_COUNT = Task(
    name="letter_count",
    generate=_letter_count,
    verify=exact,
    chance=lambda level: 1 / (level + 3),
    guess=lambda random_, row: str(random_.randrange(int(row["level"]) + 3)),
)
