"""Prompts as a pure function of the step, from files, the hub or the built-in tasks."""

from rft_fn.data.chat import LOSS_ON, Chat, Lesson
from rft_fn.data.keywords import literals
from rft_fn.data.lessons import lessons
from rft_fn.data.messages import Conversation, conversation
from rft_fn.data.pairs import Pair, load_pairs, pairs_from_rows, pairs_from_task
from rft_fn.data.prompts import Dataset, Prompt, draw, from_rows, from_task, load, take
from rft_fn.data.rows import read_rows
from rft_fn.data.tasks import TASKS, Task, get_task
from rft_fn.data.template import fill, render

__all__ = [
    "LOSS_ON", "TASKS", "Chat", "Conversation", "Dataset", "Lesson", "Pair", "Prompt", "Task", "conversation",
    "draw", "fill", "from_rows", "from_task", "get_task", "lessons", "literals", "load", "load_pairs",
    "pairs_from_rows", "pairs_from_task", "read_rows", "render", "take",
]  # fmt: skip
