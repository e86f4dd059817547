"""Guess a number: an environment that answers higher or lower."""

import re
from typing import NamedTuple

from rft_fn import rng
from rft_fn.data.tasks.task import row_random
from rft_fn.environment.record import Environment, Row, Stepped

__all__ = ["guess_number"]


class _State(NamedTuple):
    """A number in [0, size), and the tries that are left."""

    number: int
    size: int
    tries: int


def guess_number(level: int = 1) -> Environment:
    """Make an environment in which the policy guesses a number below 10**level.

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
