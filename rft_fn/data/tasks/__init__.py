"""The built-in tasks: problems that need no network.

Each problem is a pure function of (seed, index, level). Every task has a generator, a verifier, a difficulty
and a known chance score, so that "it learned" is a number and not an impression: a policy that learned
nothing scores `chance(level)`, one that learned everything scores 1. A new task is a file here and an entry
of `_ALL`.

A row is a dict of strings: `question` for a chat model; `short` for a tiny character-level model, over
only `ALPHABET`, ending in "="; `answer`, one correct answer over `ALPHABET`; `level`; and whatever else
the verifier reads. Images and audio are data URIs in the columns `image`, `images` and `audio`.

Verifiers are strict on content and ignore the whitespace around an answer. They see the answer and the row,
never the prompt and never a whole response: `rft_fn.reward.task` cuts the answer out first.
"""

from rft_fn.data.tasks.media_tasks import COUNT_SQUARES, TONE
from rft_fn.data.tasks.task import ALPHABET, Task, TaskRow
from rft_fn.data.tasks.text_tasks import ADDITION, COUNTDOWN, LETTER_COUNT, REVERSE, SORT_DIGITS

__all__ = ["ALPHABET", "TASKS", "Task", "TaskRow", "get_task"]

_ALL = (ADDITION, REVERSE, SORT_DIGITS, LETTER_COUNT, COUNTDOWN, COUNT_SQUARES, TONE)

TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def get_task(name: str) -> Task:
    """Return the built-in task of that name. Raises ValueError, naming the tasks there are."""
    if name not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]
