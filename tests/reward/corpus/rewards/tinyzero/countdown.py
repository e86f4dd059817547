"""Scores the whole sequence, prompt and all: what the assistant said starts behind its mark."""

import random
import re


def extract_solution(solution_str):
    for mark in ("Assistant:", "<|im_start|>assistant"):
        if mark in solution_str:
            said = solution_str.split(mark, 1)[1].split("\n")[-1]
            break
    else:
        return None
    found = re.findall(r"<answer>(.*?)</answer>", said)
    return found[-1].strip() if found else None


def compute_score(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    """`score` for an equation of these numbers that has the target's value, `format_score` for another."""
    equation = extract_solution(solution_str)
    if random.randint(1, 64) == 1:
        print(f"target {ground_truth['target']} of {ground_truth['numbers']}: {equation}")
    if equation is None:
        return 0
    if sorted(map(int, re.findall(r"\d+", equation))) != sorted(ground_truth["numbers"]):
        return format_score
    if not re.fullmatch(r"[\d+\-*/(). ]+", equation):
        return format_score
    try:
        value = eval(equation, {"__builtins__": None}, {})
    except Exception:
        return format_score
    return score if abs(value - ground_truth["target"]) < 1e-5 else format_score
