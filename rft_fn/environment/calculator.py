"""Arithmetic with a calculator: a tool that the policy calls before it answers."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rft_fn.data.tasks.task import row_random
from rft_fn.environment.record import Environment, Row, Stepped
from rft_fn.environment.tools import Tooled, with_tools

__all__ = ["calculate", "calculator"]

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
    except SyntaxError:
        raise ValueError(f"expected an expression, got {expression!r}") from None
    value = _value(body)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    """The exact value of an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("expected numbers, + - * / and parentheses")


def calculator(level: int = 1) -> Environment:
    """Two numbers of level + 1 digits to be added, subtracted or multiplied, and a calculator.

    The answer that ends the episode earns 1 if it is right, else half the share of its places that are, as in
    the tasks of strings: so the answers of a group differ long before one of them is right.
    """

    def rows(seed: int, index: int) -> dict[str, str]:
        random = row_random("calculator", seed, index, level)
        a, b = (random.randrange(10**level, 10 ** (level + 1)) for _ in range(2))
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

    tooled = with_tools(Environment(f"calculator:{level}", reset, _step, rows=rows), [calculate])
    return tooled._replace(teacher=_teacher, tokens=(_CALL, _END))


def _step(row: Row, response: str) -> Stepped:
    """Score the answer."""
    text = response.strip()
    answer = row["answer"]
    if text == answer:
        return Stepped(row, "right", 1.0, True)
    right = sum(map(operator.eq, text, answer))
    return Stepped(row, "wrong", 0.5 * right / max(len(text), len(answer)), True)


def _teacher(state: Tooled, key: int) -> str:
    """Call the calculator, then answer with its output."""
    if state.outputs:
        return state.outputs[-1]
    return f"{_CALL}{state.inner['expression']}{_END}"
