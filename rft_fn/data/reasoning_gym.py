"""Rows of the package reasoning-gym: its procedural tasks, each with a scorer of its own.

A text names a task and its options, `leg_counting(max_animals=5)`. The package makes a finite data set of a
seed, and its row i of seed s may be row i - 1 of seed s + 1: so rows without end are blocks, whose seeds are
far apart. A row names itself in `entry`, by which the scorer makes it again: an entry of the package holds
tuples, and objects, that no file of JSON would give back.
"""

import ast
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from rft_fn import confined, rng
from rft_fn.data.table import Endless

__all__ = ["SOURCE", "endless", "score_all"]

SOURCE = "reasoning_gym"
"""The first word of such a source, and the name of the reward that scores it."""

_BLOCK = 1000  # rows of a seed
_SECONDS = 10  # for the answers of a call, and then for each by itself
_BY_HASH = {
    "codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder",
}  # fmt: skip
"""The tasks whose rows depend on the hashes of texts, and so on the process; of reasoning-gym 0.1.25."""


def endless(text: str, seed: int) -> Endless:
    """Return the rows of a task. ValueError for an unknown one and for options that it refuses.

    Columns are `question`, `short` (the same), `answer` (empty where the package has none) and `entry`.
    ModuleNotFoundError without the package.
    """
    name, _ = _read(text)
    if name in _BY_HASH and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ValueError(
            f"data: expected PYTHONHASHSEED to be set, as to 0, since rows of {SOURCE}:{name} depend on it, "
            "got none"
        )
    _block(text, seed, 0)

    def row(index: int) -> dict[str, Any]:
        entry = _entry(text, seed, index)
        question = entry["question"].strip()
        return {
            "question": question,
            "short": question,
            "answer": str(entry["answer"] or ""),
            "entry": {"task": text, "seed": seed, "index": index},
        }

    return Endless(f"{SOURCE}:{text}", row, seed)


def score_all(answers: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the package's score of each answer, of the rows with these `entry` columns.

    Some scorers evaluate the answer, so a child process scores them, within limits of time and memory. An
    answer that breaks these, or its scorer, has 0.
    """
    made = [(x["task"], int(x["seed"]), int(x["index"])) for x in entries]
    for key in made:
        _entry(*key)  # kept in this process, from which the child is forked
    pairs = list(zip(answers, made))
    try:
        return confined.call(SOURCE, _scored, pairs, seconds=_SECONDS)
    except (ValueError, confined.Raised):
        return [_alone(pair) for pair in pairs]


def _alone(pair: tuple[str, tuple[str, int, int]]) -> float:
    try:
        return confined.call(SOURCE, _scored, [pair], seconds=1)[0]
    except (ValueError, confined.Raised):
        return 0.0


def _scored(pairs: Sequence[tuple[str, tuple[str, int, int]]]) -> list[float]:
    scores = []
    for answer, (text, seed, index) in pairs:
        try:
            score = _block(text, seed, index // _BLOCK).score_answer(answer, _entry(text, seed, index))
            scores.append(float(score))
        except Exception:  # of a scorer that cannot read the answer
            scores.append(0.0)
    return scores


@lru_cache(maxsize=4096)
def _entry(text: str, seed: int, index: int) -> dict[str, Any]:
    """Return the package's entry of a row: some take seconds to make."""
    return _block(text, seed, index // _BLOCK)[index % _BLOCK]


@lru_cache(maxsize=16)
def _block(text: str, seed: int, block: int) -> Any:
    """Return the package's data set of a block of rows. ValueError for options that the task refuses."""
    from reasoning_gym.factory import create_dataset  # pyright: ignore[reportMissingImports]

    name, options = _read(text)
    seed = rng.fold_in(seed, SOURCE, text, block) % 2**32  # numpy's generators take no more
    try:
        return create_dataset(name, seed=seed, size=_BLOCK, **options)
    except Exception as error:  # an assertion, mostly
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"data: {SOURCE}:{text}: {lines[0]}") from error


@lru_cache
def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Return (the task, its options) of a text. ValueError for one that the package does not have."""
    try:
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"data: expected the package reasoning-gym for {SOURCE}:{text}, got none; "
            "pip install 'rft-fn[reasoning-gym]'",
            name=error.name,
        ) from error
    name, opening, _ = text.partition("(")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"data: expected a task of reasoning-gym, as {SOURCE}:leg_counting, got {name!r}{hint}"
        )
    options = _options(text) if opening else {}
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for option in options:
        if option in ("seed", "size"):
            raise ValueError(
                f"data: {SOURCE}:{text}: expected no {option}, as rows have no end and --seed draws them, "
                f"got {options[option]!r}"
            )
        if option not in known:
            expected = f"one of {', '.join(known)}" if known else "no option"
            raise ValueError(f"data: {SOURCE}:{text}: expected {expected}, got {option!r}")
    return name, options


def _options(text: str) -> dict[str, Any]:
    """Return the options between the parentheses. ValueError for others than NAME=LITERAL."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(x.arg for x in call.keywords):
            raise ValueError
        return {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(
            f"data: expected {SOURCE}:TASK(OPTION=VALUE, ...) with numbers, texts or lists, got {text!r}"
        ) from None
