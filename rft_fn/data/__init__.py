"""Prompts, sequences to learn from, and responses that are compared or labelled.

They come from files, the hub or the built-in tasks, as a pure function of the step. Rows (`table`) come from
`sources` (texts of the command line), `file_formats` and `tasks`. A `recipe` turns a row into an item of a
`dataset`: `prompts`, `pairs`, `ranked`, `points` and `reasoning_steps`, with `responses`, `messages`, `chat`,
`templates` and `lesson`. `training_data` puts both together, and `dataset` draws the items of a step.
"""

from rft_fn.data.chat import LOSS_ON
from rft_fn.data.dataset import Dataset, draw, take
from rft_fn.data.messages import Conversation
from rft_fn.data.pairs import Pair, pairs_from_rows, pairs_from_task
from rft_fn.data.points import Point
from rft_fn.data.processing import MediaLimits, Processing
from rft_fn.data.prompts import Prompt, from_rows, from_task, lessons
from rft_fn.data.ranked import Ranked
from rft_fn.data.reasoning_steps import Steps
from rft_fn.data.responses import render
from rft_fn.data.sources import read_rows
from rft_fn.data.tasks import TASKS, Task, get_task
from rft_fn.data.template_variables import literals
from rft_fn.data.templates import fill
from rft_fn.data.training_data import (
    LISTS,
    PAIRS,
    POINTS,
    PROMPTS,
    STEPS,
    Kind,
    decide_steps,
    load,
    load_for_training,
    mix,
    plan,
)

__all__ = [
    "LISTS", "PAIRS", "POINTS", "STEPS", "TASKS", "Dataset", "MediaLimits", "Pair", "Point", "Processing",
    "Prompt", "Ranked", "Steps", "Task", "draw", "from_rows", "from_task", "get_task", "lessons", "literals",
    "load", "mix", "pairs_from_rows", "pairs_from_task", "read_rows", "take",
]  # fmt: skip
