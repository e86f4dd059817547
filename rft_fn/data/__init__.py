"""Prompts as a pure function of the step, from files, the hub or the built-in tasks."""

from rft_fn.data.loading import decide_steps, load, load_for_training, mix, plan
from rft_fn.data.prompts import Dataset, Prompt, draw, from_rows, from_task, take
from rft_fn.data.sources import read_rows
from rft_fn.data.tasks import TASKS, Task, get_task
from rft_fn.data.template import fill, render

__all__ = [
    "TASKS", "Dataset", "Prompt", "Task", "decide_steps", "draw", "fill", "from_rows", "from_task",
    "get_task", "load", "load_for_training", "mix", "plan", "read_rows", "render", "take",
]  # fmt: skip
