"""Verifiable rewards: answers compared with a reference, and the format of responses.

Each factory returns a reward function. `prompts` is accepted and never read: only the response is scored, a
text or a list of messages. A `column` is a name or a path of names, "reward_model.ground_truth". A response
that cannot be read scores 0; a dataset that cannot be read (a missing column, an empty cell) raises. The
attribute `columns` of a reward function names the columns that it reads.

A new reward is a factory here; a row of `_NAMED` in `from_spec` gives it a name on the command line.
"""

import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rft_fn.data import tasks
from rft_fn.data.table import column_at
from rft_fn.reward.signature import Columns, Messages, RewardFn, column_names, reads, stateless, text

__all__ = [
    "boxed_format", "exact", "extract_boxed", "extract_number", "extract_tag", "math", "numeric",
    "pattern_format", "tag_format", "task",
]  # fmt: skip


# ---------- extractors

# The middle alternative eats an escaped brace, which is text and does not nest.
_BRACES = re.compile(r"(\\boxed\s*\{)|\\.|([{}])", re.DOTALL)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, braces balanced; None where there is none.

    Of nested boxes the innermost counts. A box that is never closed, as in a truncated response, is no box.
    One pass: linear in the length of the text, whatever is in it.
    """
    opened: list[tuple[int, bool]] = []  # (where the content starts, whether a \boxed opened it)
    last_start = -1
    last = None
    for match in _BRACES.finditer(text):
        if match[1] or match[2] == "{":
            opened.append((match.end(), bool(match[1])))
        elif match[2] == "}" and opened:
            start, boxed = opened.pop()
            if boxed and start > last_start:
                last_start = start
                last = text[start : match.start()]
    return last


def extract_tag(text: str, tag: str) -> str | None:
    """Return the stripped text between the last </tag> and the <tag> before it; None without such a pair."""
    end = text.rfind(f"</{tag}>")
    if end < 0:
        return None
    opening = f"<{tag}>"
    start = text.rfind(opening, 0, end)
    return text[start + len(opening) : end].strip() if start >= 0 else None


_FRAC = re.compile(r"(?<![0-9])\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_UNSIGNED = rf"(?:{_DIGITS})(?:[eE][+-]?[0-9]+)?"
# A minus is a sign only where nothing comes before it that it could be subtracted from: "3-5" ends in 5.
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.%])-\\?\$?)?{_UNSIGNED}(?:/{_UNSIGNED})?")


def extract_number(text: str) -> str | None:
    r"""Return the last number in the text, as "-3.5", "1234", "1/2" or "1e5"; None where there is none.

    Thousands commas, currency signs and a full stop after the number are dropped; "1/2" and "\frac{1}{2}" are
    one number. It reads plain numbers, not formulas: of "2\sqrt{3}" it returns "3" (use `math` for those).
    """
    plain = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    plain = _FRAC.sub(r"\1/\2", plain)
    matches = [match[0] for match in _NUMBER.finditer(plain)]
    return re.sub(r"[,$\\]", "", matches[-1]) if matches else None


def _value(number: str | None) -> Fraction | None:
    """Return the exact value of a number; None for no number, for n/0 and for absurdly large ones."""
    if number is None or len(number) > 200 or re.search(r"[eE][+-]?[0-9]{4}", number):
        return None  # Fraction("1e999999999") would fill the memory
    top, _, bottom = number.partition("/")
    divisor = Fraction(bottom or 1)
    return Fraction(top) / divisor if divisor else None


# ---------- columns


def _column(columns: Columns, name: str, count: int) -> list[str]:
    """Return one column as text. ValueError if it is missing, has a hole or another length."""
    # a path begins with the name of a column
    head = name if name in columns else name.partition(".")[0]
    if head in columns and len(columns[head]) != count:
        raise ValueError(
            f"column {head!r}: expected {count} values, one per completion, got {len(columns[head])}"
        )

    # a response is not to blame for a row without a reference
    try:
        values = column_at(columns, name, count)
    except KeyError:
        raise ValueError(
            f"column {name!r}: not in the dataset; its columns are: {column_names(columns)}"
        ) from None
    for index, value in enumerate(values):
        if value is None:
            raise ValueError(f"column {name!r}: value {index} is None; drop that row from the dataset")
    return [str(value) for value in values]


def _compare(same: Callable[[str, str], float], column: str) -> RewardFn:
    """Return the reward function that scores each completion with same(completion, reference)."""

    @stateless
    @reads(column)
    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        references = _column(columns, column, len(completions))
        pairs = zip(map(text, completions), references, strict=True)
        return [float(same(given, reference)) for given, reference in pairs]

    return reward


def _yes_or_no(value: Callable[[str], object]) -> RewardFn:
    """Return the reward function that scores each completion with bool(value(completion))."""

    @stateless
    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        return [float(bool(value(text(completion)))) for completion in completions]

    return reward


def _answer(completion: str) -> str:
    r"""Return the stripped content of the last \boxed{}, or the whole completion."""
    boxed = extract_boxed(completion)
    return (completion if boxed is None else boxed).strip()


# ---------- answers


def numeric(column: str = "answer", *, boxed: bool = False) -> RewardFn:
    r"""Return 1 if the last numbers of completion and reference are equal; else 0.

    "0.50" is "1/2". So GSM8K's references ("... #### 72") need no change. With `boxed`, only the number
    inside the last \boxed{} counts, and a completion without one scores 0. ValueError for a reference without
    a number.
    """

    def same(completion: str, reference: str) -> bool:
        expected = _value(extract_number(reference))
        if expected is None:
            raise ValueError(
                f"column {column!r}: no number in the reference {reference[:80]!r}; use exact() or math()"
            )
        read = (extract_boxed(completion) or "") if boxed else completion
        return _value(extract_number(read)) == expected

    return _compare(same, column)


def exact(column: str = "answer", *, boxed: bool = False) -> RewardFn:
    r"""Return 1 if the completion is the reference, but for the whitespace around it; else 0.

    With `boxed`, the content of the last \boxed{} is compared instead, and a completion without one scores 0.
    """

    def same(completion: str, reference: str) -> bool:
        read = extract_boxed(completion) if boxed else completion
        return read is not None and read.strip() == reference.strip()

    return _compare(same, column)


# the columns of a task's rows that no verifier reads
_OF_THE_QUESTION = {"question", "short", "level", "image", "images", "audio", "audios"}


def task(name: str) -> RewardFn:
    r"""Return the score that a built-in task's verifier gives the answer, in [0, 1].

    The answer is the content of the last \boxed{} where there is one, else the whole completion. Reads the
    columns that the task's rows have, so the dataset must carry them. ValueError for an unknown task.
    """
    chosen = tasks.get_task(name)
    needed = sorted(chosen.generate(0, 0, 1).keys() - _OF_THE_QUESTION)

    @stateless
    @reads(*needed)
    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        values = {name: _column(columns, name, len(completions)) for name in needed}
        scores = []
        for i, completion in enumerate(completions):
            row = {name: column[i] for name, column in values.items()}
            scores.append(chosen.verify(_answer(text(completion)), row))
        return scores

    return reward


_UNBOXED_TAIL = 1000  # characters: math-verify searches in quadratic time, and an answer comes last


def math(column: str = "answer", *, timeout: int = 5) -> RewardFn:
    r"""Return 1 if the answer equals the reference as mathematics; else 0.

    "\frac{1}{2}" is "0.5", "1+x" is "x+1". The comparison is math-verify's. The answer is the content of the
    last \boxed{} where there is one, else what math-verify finds in the last 1,000 characters. The reference
    is LaTeX or plain text, boxed or not; of GSM8K's only what follows "####" counts. Any failure of the
    comparison scores 0.

    A response such as "10^{10^{10}}" keeps sympy busy for ever, so parsing and comparing get `timeout`
    seconds each. The limit needs Python's main thread (it is a signal); in any other thread the comparison
    runs without a limit.
    """
    try:
        import math_verify
    except ImportError as error:
        raise ModuleNotFoundError(
            "reward 'math': expected the package math-verify, got none; "
            "pip install 'math-verify[antlr4_13_2]'"
        ) from error

    def same(completion: str, reference: str) -> bool:
        # its limit is a signal, which only the main thread gets
        limit: Any = timeout if threading.current_thread() is threading.main_thread() else None

        # both sides in a box, so that nothing else of a text is taken for the answer
        boxed = extract_boxed(completion)
        read = completion[-_UNBOXED_TAIL:] if boxed is None else rf"\boxed{{{boxed}}}"
        gold = _answer(reference.rpartition("####")[2])
        try:
            expected = math_verify.parse(rf"\boxed{{{gold}}}", parsing_timeout=limit)
            given = math_verify.parse(read, parsing_timeout=limit)
            return math_verify.verify(expected, given, timeout_seconds=limit)
        except Exception:  # sympy raises anything on strange input, and a strange answer is a wrong answer
            return False

    return _compare(same, column)


# ---------- format


def boxed_format() -> RewardFn:
    r"""Return 1 if the response has a complete, non-empty \boxed{}; else 0."""
    return _yes_or_no(lambda response: (extract_boxed(response) or "").strip())


def pattern_format(pattern: str) -> RewardFn:
    """Return 1 if the pattern matches the whole stripped response; else 0.

    "." matches a newline too. Where the chat template already opens a tag in the prompt ("<think>"), the
    response does not, and nor may the pattern.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return _yes_or_no(lambda response: compiled.fullmatch(response.strip()))


def tag_format(*tags: str) -> RewardFn:
    """Return 1 if the response is these tags, in order, and nothing else; else 0.

    Each tag occurs once and is not empty. No argument means ("think", "answer"): "<think>...</think>
    <answer>...</answer>".
    """
    # No character of the content may begin one of the tags, so each tag occurs once.
    names = [re.escape(tag) for tag in tags or ("think", "answer")]
    content = rf"(?:(?!</?(?:{'|'.join(names)})>).)"
    elements = [rf"<{name}>(?=\s*(?!</{name}>)\S){content}+</{name}>" for name in names]
    return pattern_format(r"\s*".join(elements))
