"""A rubric with a parser, a function that asks for it, and a weight of 0 for what is only logged."""

import re

from .rubric import Parser, Rubric


def boxed(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1] if found else ""


def correct_answer_reward_func(parser, completion, answer, **kwargs):
    """1 for the answer in the box."""
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


parser = Parser(extract_fn=boxed)
rubric = Rubric(
    funcs=[correct_answer_reward_func, parser.get_format_reward_func()], weights=[1.0, 0.0], parser=parser
)
