"""The five rewards of the one-file demo that many first runs start from: conversations and `answer`."""

import re

XML = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"


def extract_xml_answer(text: str) -> str:
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    """2 for the answer; prints the first of the batch."""
    replies = [completion[0]["content"] for completion in completions]
    extracted = [extract_xml_answer(reply) for reply in replies]
    print(f"{'-' * 20}\n{prompts[0][-1]['content']}\nwanted {answer[0]}, got {extracted[0]}:\n{replies[0]}")
    return [2.0 if got == wanted else 0.0 for got, wanted in zip(extracted, answer)]


def int_reward_func(completions, **kwargs) -> list[float]:
    """A half for an answer of digits."""
    return [0.5 * extract_xml_answer(c[0]["content"]).isdigit() for c in completions]


def strict_format_reward_func(completions, **kwargs) -> list[float]:
    """A half for the form to the letter; without DOTALL, so reasoning of one line only."""
    form = re.compile(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$")
    return [0.5 if form.match(c[0]["content"]) else 0.0 for c in completions]


def soft_format_reward_func(completions, **kwargs) -> list[float]:
    """A half for the tags in order; without DOTALL, so nothing between them may hold a line break."""
    form = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>")
    return [0.5 if form.match(c[0]["content"]) else 0.0 for c in completions]


def count_xml(text) -> float:
    score = 0.0
    for tag in ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>"):
        score += 0.125 * (text.count(tag) == 1)
    if text.count("\n</answer>") == 1:  # what follows the end costs a little
        score -= 0.001 * max(0, len(text.partition("\n</answer>")[2]) - 1)
    return score


def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    """An eighth for each tag, less a thousandth for each character after the end."""
    return [count_xml(c[0]["content"]) for c in completions]
