"""Arithmetic with a calculator: a tool that the policy calls before it answers."""

import ast
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rft_fn.data.tasks.task import row_random
from rft_fn.environment.record import Environment, Row, Stepped
from rft_fn.environment.tool_calls import Call
from rft_fn.environment.tool_use import Tooled, with_tools

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
