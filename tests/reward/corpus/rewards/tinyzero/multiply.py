"""Scores the whole sequence, with only one mark for the assistant's turn."""

import re


def compute_score(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    """`score` for the product, `format_score` for another number, 0 without one."""
    _, mark, said = solution_str.partition("Assistant:")
    found = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", said)
    if not mark or not found:
        return 0
    return score if int(found[-1]) == int(ground_truth) else format_score
