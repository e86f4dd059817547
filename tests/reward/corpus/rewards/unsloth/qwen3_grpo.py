"""A notebook's cells in one file: patterns at the top, counters in globals, prints, scores below zero."""

import re

reasoning_end = "<end_working_out>"
solution_start = "<SOLUTION>"
solution_end = "</SOLUTION>"
eos_token = "<|endoftext|>"

match_format = re.compile(
    rf"{reasoning_end}.*?{solution_start}(.+?){solution_end}\s*(?:{re.escape(eos_token)})?\s*$",
    flags=re.MULTILINE | re.DOTALL,
)
match_numbers = re.compile(solution_start + r".*?\s*(-?[\d.,]+)", flags=re.MULTILINE | re.DOTALL)

global PRINTED_TIMES
PRINTED_TIMES = 0
PRINT_EVERY_STEPS = 5


def match_format_exactly(completions, **kwargs):
    """3 for the whole format."""
    return [3.0 if match_format.search(c[0]["content"]) else 0 for c in completions]


def match_format_approximately(completions, **kwargs):
    """For each marker half a point if it is there once, else minus one."""
    scores = []
    for completion in completions:
        reply = completion[0]["content"]
        counts = [reply.count(mark) for mark in (reasoning_end, solution_start, solution_end)]
        scores.append(sum(0.5 if n == 1 else -1.0 for n in counts))
    return scores


def _closeness(guess, truth):
    try:
        ratio = float(guess) / float(truth)
    except (ValueError, ZeroDivisionError):
        return -4.5
    if 0.9 <= ratio <= 1.1:
        return 2.0
    return 1.5 if 0.8 <= ratio <= 1.2 else -2.5


def check_answer(prompts, completions, answer, **kwargs):
    """5 for the answer, 3.5 but for spaces, a little for a number near it; -2 without one."""
    scores = []
    for completion, truth in zip(completions, answer):
        found = match_format.search(completion[0]["content"])
        if found is None:
            scores.append(-2.0)
        elif found[1] == truth:
            scores.append(5.0)
        elif found[1].strip() == truth.strip():
            scores.append(3.5)
        else:
            scores.append(_closeness(found[1], truth))
    return scores


def check_numbers(prompts, completions, answer, **kwargs):
    """3.5 for the number, -1.5 for another, -2.5 for none; prints every fifth call."""
    global PRINTED_TIMES
    replies = [completion[0]["content"] for completion in completions]
    guesses = [match_numbers.search(reply) for reply in replies]
    if PRINTED_TIMES % PRINT_EVERY_STEPS == 0:
        print("*" * 20, prompts[0][-1]["content"], answer[0], replies[0], guesses[0], sep="\n")
    PRINTED_TIMES += 1

    scores = []
    for guess, truth in zip(guesses, answer):
        if guess is None:
            scores.append(-2.5)
            continue
        try:
            equal = float(guess[1].replace(",", "")) == float(truth.strip())
            scores.append(3.5 if equal else -1.5)
        except ValueError:
            scores.append(0)
    return scores
