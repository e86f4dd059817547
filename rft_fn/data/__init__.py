"""Prompts as a pure function of the step, from files, the hub or the built-in tasks."""

from rft_fn.data.chat import LOSS_ON, Chat, Lesson
from rft_fn.data.keywords import literals
from rft_fn.data.lessons import lessons
from rft_fn.data.loading import (
    PAIRS,
    PROMPTS,
    Kind,
    decide_steps,
    load,
    load_for_training,
    mix,
    plan,
)
from rft_fn.data.messages import Conversation, conversation
from rft_fn.data.pairs import Pair, pairs_from_rows, pairs_from_task
from rft_fn.data.prompts import Dataset, Prompt, draw, from_rows, from_task, take
from rft_fn.data.sources import read_rows
from rft_fn.data.tasks import TASKS, Task, get_task
from rft_fn.data.template import fill, render

__all__ = [
    "LOSS_ON", "PAIRS", "PROMPTS", "TASKS", "Chat", "Conversation", "Dataset", "Kind", "Lesson", "Pair",
    "Prompt", "Task", "conversation", "decide_steps", "draw", "fill", "from_rows", "from_task", "get_task",
    "lessons", "literals", "load", "load_for_training", "mix", "pairs_from_rows", "pairs_from_task", "plan",
    "read_rows", "render", "take",
]  # fmt: skip
