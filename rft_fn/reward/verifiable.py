"""Verifiable rewards: answers compared with a reference, and the format of responses.

Each factory returns a `Reward`. `prompts` is accepted and never read: only the response is scored, a
text or a list of messages. A `column` is a name or a path of names, "reward_model.ground_truth". A response
that cannot be read scores 0; a dataset that cannot be read (a missing column, an empty cell) raises. The
field `columns` of a reward names the columns that it reads.

A new reward is a factory here; a row of `_NAMED` in `from_spec` gives it a name on the command line.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from typing import Any

from rft_fn.data import reasoning_gym, tasks
from rft_fn.data.row_paths import column_at
from rft_fn.foreign_json import parse_json
from rft_fn.reward import mathematics, references
from rft_fn.reward.mathematics import extract_number, value_of
from rft_fn.reward.references import Reference
from rft_fn.reward.reward_record import Reward, as_reward, column_names
from rft_fn.reward.signature import Columns, Messages, text

__all__ = [
    "boxed_format", "exact", "extract_boxed", "extract_number", "extract_tag", "math", "numeric",
    "pattern_format", "reasoning_gym_score", "tag_format", "task",
]  # fmt: skip


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


def _column(columns: Columns, name: str, count: int) -> list[Any]:
    """Return one column. ValueError if it is missing, has a hole or another length."""
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
    return list(values)


Pair = tuple[str, Reference]
"""A completion and one of its right answers."""


def _each(same: Callable[[str, Reference], float]) -> Callable[[Iterable[Pair]], list[float]]:
    """Return the function that compares pairs one by one."""
    return lambda pairs: [float(same(completion, reference)) for completion, reference in pairs]


def _compare(
    same: Callable[[Iterable[Pair]], list[float]],
    column: str,
    kind: Callable[[Reference], str],
    begin: Callable[[Iterable[Pair]], object] | None = None,
    inside: Callable[[Reference], list[Reference]] = lambda reference: [reference],
) -> Reward:
    """Return the reward that scores each completion by same([(completion, reference), ...]).

    A reference that is a list has alternatives, and the best one counts; `inside` finds those in a text.
    `kind` says what a reference reads as; see `references`. `begin` starts to compare pairs; see `early`.
    """

    def pairs_of(completions: Sequence[str | Messages], columns: Columns) -> Iterator[list[Pair]]:
        for completion, cell in zip(completions, _column(columns, column, len(completions)), strict=True):
            found = references.alternatives(cell, column)
            yield [(text(completion), right) for reference in found for right in inside(reference)]

    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        counts = []

        def pairs() -> Iterator[Pair]:
            for of_row in pairs_of(completions, columns):
                counts.append(len(of_row))
                yield from of_row

        scores = iter(same(pairs()))
        scores = [max(itertools.islice(scores, count)) for count in counts]
        return scores

    def early(completions: Sequence[str | Messages], **columns: Sequence[Any]) -> None:
        if begin is not None:
            begin(itertools.chain.from_iterable(pairs_of(completions, columns)))

    return replace(
        as_reward(reward),
        columns=(column,),
        state=False,
        references=(column, kind),
        begin=None if begin is None else early,
    )


def _listed(reference: Reference) -> list[Reference]:
    """Return the alternatives in JSON text of a list of texts, which some tables hold; else the reference."""
    if not reference.text.startswith('["'):
        return [reference]
    try:
        cell = parse_json(reference.text)
    except ValueError:
        return [reference]
    return [Reference(x) for x in cell] if all(isinstance(x, str) for x in cell) else [reference]


def _yes_or_no(value: Callable[[str], object]) -> Reward:
    """Return the reward that scores each completion with bool(value(completion))."""

    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        return [float(bool(value(text(completion)))) for completion in completions]

    return replace(as_reward(reward), state=False)


def _answer(completion: str) -> str:
    r"""Return the stripped content of the last \boxed{}, or the whole completion."""
    boxed = extract_boxed(completion)
    return (completion if boxed is None else boxed).strip()


def numeric(column: str = "answer", *, boxed: bool = False) -> Reward:
    r"""Return 1 if the last numbers of completion and reference are equal; else 0.

    "0.50" is "1/2", and JSON text of a list of texts has alternatives. So GSM8K's references ("... #### 72")
    need no change. With `boxed`, only the number inside the last \boxed{} counts, and a completion without
    one scores 0. ValueError for a reference without a number.
    """

    def same(completion: str, reference: Reference) -> bool:
        expected = _number_in(reference, column)
        read = (extract_boxed(completion) or "") if boxed else completion
        given = value_of(extract_number(read))
        return given is not None and reference.equals(given, expected)

    def answer(completion: str) -> str | None:
        value = value_of(extract_number((extract_boxed(completion) or "") if boxed else completion))
        return None if value is None else str(value)

    kind = partial(_kind_of_number, column=column)
    return replace(_compare(_each(same), column, kind, inside=_listed), answer=answer)


def _number_in(reference: Reference, column: str) -> Fraction:
    """Return the last number in a reference. ValueError for one without."""
    value = value_of(extract_number(reference.text))
    if value is None:
        raise ValueError(
            f"column {column!r}: no number in the reference {reference.text[:80]!r}; use exact() or math()"
        )
    return value


def _kind_of_number(reference: Reference, column: str) -> str:
    _number_in(reference, column)
    return "a number" if mathematics.whole_value(reference.text) is not None else "the last number of a text"


def exact(column: str = "answer", *, boxed: bool = False) -> Reward:
    r"""Return 1 if the completion is the reference, but for the whitespace around it; else 0.

    A reference that is a number in the data, and not a text, is right in any notation: 4.0 is "4", 1e-05 is
    "0.00001". With `boxed`, the content of the last \boxed{} is compared instead, and a completion without
    one scores 0.
    """

    def same(completion: str, reference: Reference) -> bool:
        read = extract_boxed(completion) if boxed else completion
        if read is None:
            return False
        given = mathematics.whole_value(read.strip()) if reference.is_number else None
        if given is not None:
            return reference.equals(given, Fraction(reference.text))
        return read.strip() == reference.text.strip()

    def answer(completion: str) -> str | None:
        return extract_boxed(completion) if boxed else completion

    def kind(reference: Reference) -> str:
        return "a number" if reference.is_number else "text"

    return replace(_compare(_each(same), column, kind), answer=answer)


# the columns of a task's rows that no verifier reads
_OF_THE_QUESTION = {"question", "short", "level", "image", "images", "audio", "audios"}


def task(name: str) -> Reward:
    r"""Return the score that a built-in task's verifier gives the answer, in [0, 1].

    The answer is the content of the last \boxed{} where there is one, else the whole completion. Reads the
    columns that the task's rows have, so the dataset must carry them. ValueError for an unknown task.
    """
    chosen = tasks.get_task(name)
    needed = sorted(chosen.generate(0, 0, 1).keys() - _OF_THE_QUESTION)

    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        count = len(completions)
        values = {name: [str(x) for x in _column(columns, name, count)] for name in needed}
        scores = []
        for i, completion in enumerate(completions):
            row = {name: column[i] for name, column in values.items()}
            scores.append(chosen.verify(_answer(text(completion)), row))
        return scores

    return replace(as_reward(reward), columns=tuple(needed), state=False, answer=_answer)


def reasoning_gym_score() -> Reward:
    r"""Return the score that reasoning-gym's own scorer of the row's task gives the answer.

    The answer is the content of the last \boxed{}, else of the last <answer></answer>, else the whole
    completion. Reads the column `entry`, which rows of `--data reasoning_gym:TASK` have. An answer that its
    scorer cannot read, or not within a second, scores 0.
    """

    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        entries = _column(columns, "entry", len(completions))
        return reasoning_gym.score_all([_tagged(text(x)) for x in completions], entries)

    return replace(as_reward(reward), columns=("entry",), state=False)


def _tagged(completion: str) -> str:
    tagged = extract_tag(completion, "answer") if extract_boxed(completion) is None else None
    return _answer(completion) if tagged is None else tagged


_UNBOXED_TAIL = 1000  # characters: math-verify searches in quadratic time, and an answer comes last


def math(column: str = "answer", *, timeout: int = 5) -> Reward:
    r"""Return 1 if the answer equals the reference as mathematics; else 0.

    "\frac{1}{2}" is "0.5", "1+x" is "x+1". The comparison is math-verify's, guarded: words are compared as
    words, units and times of the day must not contradict each other, and small numbers must agree in six
    digits (see `mathematics`). The answer is the content of the last \boxed{} where there is one, else what
    math-verify finds in that of the last <answer></answer>, else in the last 1,000 characters. The reference
    is LaTeX or plain text, boxed, in such tags or not, "7 apples." is 7, and of "2+5=7" only the 7 counts; of
    GSM8K's only what follows "####". JSON text of a list of texts has alternatives. Any failure of the
    comparison scores 0.

    A response such as "10^{10^{10}}" keeps sympy busy for ever, so parsing and comparing get `timeout`
    seconds each, and all different answers of a call a minute and 0.2 s for each of them: the rest then
    scores 0, with a warning. Many are compared by child processes, a few in Python's main thread by itself;
    those of responses that end while others are sampled by child processes, before the call.
    """
    if find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "reward 'math': expected the package math-verify, got none; "
            "pip install 'math-verify[antlr4_13_2]'"
        )

    def question(completion: str, reference: Reference) -> mathematics.Question:
        boxed = extract_boxed(completion)
        answer = _tagged(completion)[-_UNBOXED_TAIL:] if boxed is None else boxed
        return mathematics.Question(_gold(reference), answer, boxed is not None)

    def same(pairs: Iterable[Pair]) -> list[float]:
        verdicts = mathematics.equal_all([question(*pair) for pair in pairs], seconds=timeout)
        return [float(verdict) for verdict in verdicts]

    def begin(pairs: Iterable[Pair]) -> None:
        mathematics.begin_all([question(*pair) for pair in pairs], seconds=timeout)

    kind = partial(_kind_of_mathematics, seconds=timeout, tried=itertools.count())
    return replace(_compare(same, column, kind, begin, _listed), answer=_mathematical_answer)


def _mathematical_answer(completion: str) -> str | None:
    """Return the content of the last box, else the last number: what is equal as text counts as equal."""
    boxed = extract_boxed(completion)
    return extract_number(_tagged(completion)) if boxed is None else boxed


def _gold(reference: Reference) -> str:
    """Return the answer in a reference: what follows "####", and of a box its content."""
    return _tagged(reference.text.rpartition("####")[2])


_TRIED = 1000  # formulas among the references of a file that are parsed before the run


def _kind_of_mathematics(reference: Reference, seconds: int, tried: Iterator[int]) -> str:
    """Return what a reference reads as; the first formulas are parsed, which takes some ms each."""
    gold = _gold(_listed(reference)[0])
    kind = mathematics.kind_of(gold)
    parsed = kind != "a formula" or next(tried) >= _TRIED or mathematics.parses(gold, seconds=seconds)
    return kind if parsed and kind != "nothing" else references.UNREADABLE


def boxed_format() -> Reward:
    r"""Return 1 if the response has a complete, non-empty \boxed{}; else 0."""
    return _yes_or_no(lambda response: (extract_boxed(response) or "").strip())


def pattern_format(pattern: str) -> Reward:
    """Return 1 if the pattern matches the whole stripped response; else 0.

    "." matches a newline too. Where the chat template already opens a tag in the prompt ("<think>"), the
    response does not, and nor may the pattern.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return _yes_or_no(lambda response: compiled.fullmatch(response.strip()))


def tag_format(*tags: str) -> Reward:
    """Return 1 if the response is these tags, in order, and nothing else; else 0.

    Each tag occurs once and is not empty. No argument means ("think", "answer"): "<think>...</think>
    <answer>...</answer>".
    """
    # No character of the content may begin one of the tags, so each tag occurs once.
    names = [re.escape(tag) for tag in tags or ("think", "answer")]
    content = rf"(?:(?!</?(?:{'|'.join(names)})>).)"
    elements = [rf"<{name}>(?=\s*(?!</{name}>)\S){content}+</{name}>" for name in names]
    return pattern_format(r"\s*".join(elements))
