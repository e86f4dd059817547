"""Wrong answers to built-in problems, as the rejected responses of pairs."""

import random
import string
from collections.abc import Callable, Mapping, Sequence

from rft_fn import rng
from rft_fn.data import tasks
from rft_fn.data.table import Endless, Row

__all__ = [
    "COVERING", "NEGATIVES", "Negative", "mixture_of", "right_or_wrong", "task_rows", "wrong_answer",
    "wrong_answer_of_kind",
]  # fmt: skip


Negative = Callable[[tasks.Task, tasks.TaskRow, random.Random], str]
"""Makes texts that are mostly wrong answers, of one kind; one that is empty or right is drawn again."""


def wrong_answer(
    task: tasks.Task,
    row: tasks.TaskRow,
    random_: random.Random,
    mixture: Mapping[str, float] | None = None,
) -> str:
    """Return an answer that is not right.

    `mixture` maps kinds of `NEGATIVES` to their shares. Without one half of the answers are guesses, the
    others the right one with one mistake. A preference teaches only by the responses that it shows: a policy
    may learn to emit any text that no rejected response resembles. So a model of rewards needs `COVERING`.
    """
    return wrong_answer_of_kind(task, row, random_, mixture)[0]


def right_or_wrong(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> str:
    """Return the right answer, or with probability one half a `wrong_answer`."""
    if random_.random() < 0.5:
        return wrong_answer(task, row, random_, mixture)
    return row["answer"]


def wrong_answer_of_kind(
    task: tasks.Task,
    row: tasks.TaskRow,
    random_: random.Random,
    mixture: Mapping[str, float] | None = None,
) -> tuple[str, str]:
    """Return (a `wrong_answer`, the name of its kind)."""
    mixture = mixture or _USUAL
    while True:
        kind = _draw(mixture, random_)
        text = NEGATIVES[kind](task, row, random_)
        if text and task.verify(text, row) < 1:
            return text, kind


def mixture_of(texts: Sequence[str]) -> dict[str, float]:
    """Return the mixture that texts name: NAME, or NAME=SHARE, with shares relative to each other.

    ValueError for no text, a name that does not exist or comes twice, and a share that is not above 0.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, mark, share = text.partition("=")
        if name not in NEGATIVES:
            raise ValueError(f"negatives: expected names of {', '.join(NEGATIVES)}, got {text!r}")
        if name in shares:
            raise ValueError(f"negatives: expected each name once, got {name!r} twice")
        try:
            shares[name] = float(share or 1)
        except ValueError:
            shares[name] = 0.0
        if not 0 < shares[name] < float("inf") or (mark and not share):
            raise ValueError(f"negatives: expected a share above 0, as {name}=0.5, got {text!r}")
    if not shares:
        raise ValueError(f"negatives: expected at least one of {', '.join(NEGATIVES)}, got none")
    return shares


def _draw(mixture: Mapping[str, float], random_: random.Random) -> str:
    """Return the kind that a number in [0, 1) falls on, by shares."""
    at = random_.random() * sum(mixture.values())
    kind = ""
    for name, share in mixture.items():
        kind = name
        if at < share:
            break
        at -= share
    return kind


def _ordered(task: tasks.Task, row: tasks.TaskRow, random_: random.Random) -> str:
    """Return a guess, or the right answer with one character replaced, sorted in ascending order."""
    if random_.random() < 0.5:
        return "".join(sorted(task.guess(random_, row)))
    answer = row["answer"]
    at = random_.randrange(len(answer))
    same = string.digits if answer[at].isdigit() else string.ascii_lowercase
    return "".join(sorted(answer[:at] + random_.choice(same) + answer[at + 1 :]))


def _length(task: tasks.Task, row: tasks.TaskRow, random_: random.Random) -> str:
    """Return the beginning of the right answer, or the right answer and more."""
    answer = row["answer"]
    if len(answer) > 1 and random_.random() < 0.5:
        return answer[: random_.randrange(1, len(answer))]
    more = [random_.choice(tasks.ALPHABET) for _ in range(random_.randint(1, 3))]
    return answer + "".join(more)


def _noise(task: tasks.Task, row: tasks.TaskRow, random_: random.Random) -> str:
    """Draw random characters, of any kind or of a few, up to twice as many as the answer has."""
    symbols = random_.choice((tasks.ALPHABET, string.ascii_lowercase, string.digits))
    few = random_.sample(symbols, random_.choice((1, 2, len(symbols))))
    size = random_.randint(1, 2 * len(row["answer"]))
    return "".join(random_.choice(few) for _ in range(size))


def _cut(task: tasks.Task, row: tasks.TaskRow, random_: random.Random) -> str:
    """Return the right answer and more, or noise: a response that was cut off before its end."""
    if random_.random() < 0.5:
        return _noise(task, row, random_)
    more = [random_.choice(tasks.ALPHABET) for _ in range(random_.randint(1, 3))]
    return row["answer"] + "".join(more)


NEGATIVES: dict[str, Negative] = {
    "guess": lambda task, row, random_: task.guess(random_, row),
    "mistake": lambda task, row, random_: random_.choice(_MISTAKES)(row["answer"], random_),
    "ordered": _ordered,
    "length": _length,
    "noise": _noise,
    "cut": _cut,
}
"""The kinds of wrong answers, by name. In pairs one that is cut off has no end of sequence."""

COVERING = ("guess=2", "mistake=4", "ordered=10", "length=1", "noise=1", "cut=0.5")
"""A mixture that resembles whatever a policy may emit.

Letters, digits that are sorted but wrong, wrong lengths, and responses that are cut off before their end. The
share of the ordered ones is the largest: a policy ends at them if its reward model is weak there.
"""

_USUAL = {"guess": 0.5, "mistake": 0.5}


def _change(text: str, random_: random.Random) -> str:
    """Return the text with one character replaced by another."""
    at = random_.randrange(len(text))
    return text[:at] + random_.choice(tasks.ALPHABET) + text[at + 1 :]


def _lose(text: str, random_: random.Random) -> str:
    """Return the text without one of its characters."""
    at = random_.randrange(len(text))
    return text[:at] + text[at + 1 :]


def _repeat(text: str, random_: random.Random) -> str:
    """Return the text with one of its characters doubled."""
    at = random_.randrange(len(text))
    return text[: at + 1] + text[at:]


def _swap(text: str, random_: random.Random) -> str:
    """Return the text with two neighbouring characters swapped."""
    at = random_.randrange(len(text))
    return text[:at] + text[at : at + 2][::-1] + text[at + 2 :]


_MISTAKES = (_change, _lose, _repeat, _swap)


Answer = Callable[[tasks.Task, tasks.TaskRow, random.Random, Mapping[str, float] | None], Row]
"""(task, problem, random generator, mixture of `wrong_answer`) -> the columns of its responses."""


def task_rows(
    task: str, answer: Answer, purpose: str, level: int, seed: int, negatives: Sequence[str]
) -> Endless:
    """Make the endless rows of a built-in task, with the terse question as `prompt`, and its answers.

    All is drawn by (seed, purpose, task, level, index). `negatives` are the kinds of wrong answers, as
    `mixture_of` reads them; none is the usual mixture. ValueError for a task or a kind that does not exist.
    """
    named = tasks.get_task(task)
    mixture = mixture_of(negatives) if negatives else None

    def row(index: int) -> Row:
        problem = named.generate(seed, index, level)
        random_ = random.Random(rng.fold_in(seed, purpose, task, level, index))
        return {**problem, "prompt": problem["short"], **answer(named, problem, random_, mixture)}

    return Endless(task, row, seed)
