"""Rewards as TRL's own: None where a solution cannot be read, factories of objects, callables to log with."""

import math
import threading
from collections.abc import Callable

from ..import_utils import is_math_verify_available

if is_math_verify_available():
    from math_verify import LatexExtractionConfig, parse, verify


def _limits():
    """math_verify's limits are signals, which only the main thread may set."""
    if threading.current_thread() is threading.main_thread():
        return 10, 5
    return None, None


def _correct(text: str, solution: str) -> float | None:
    parsing, comparing = _limits()
    gold = parse(solution, parsing_timeout=parsing)
    if not gold:
        return None
    config = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    answer = parse(text, [config], extraction_mode="first_match", parsing_timeout=parsing)
    return float(verify(gold, answer, timeout_seconds=comparing))


def accuracy_reward(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs,
) -> list[float | None]:
    """1 for a right answer, 0 for a wrong one, None where the solution is no formula."""
    if not is_math_verify_available():
        raise ImportError("accuracy_reward needs math_verify")
    rewards = [_correct(c[0]["content"], s) for c, s in zip(completions, solution, strict=True)]
    if log_extra is not None:
        log_extra("solution", list(solution))
    return rewards


def reasoning_accuracy_reward(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs,
) -> list[float | None]:
    """accuracy_reward of what follows the reasoning; 0 for reasoning that has no end."""
    ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    rewards = []
    for completion, reference in zip(completions, solution, strict=True):
        text = completion[0]["content"]
        end = next((e for e in ends if e in text), None)
        rewards.append(0.0 if end is None else _correct(text.rpartition(end)[2], reference))
    if log_extra is not None:
        log_extra("solution", list(solution))
    return rewards


class _CosineScaled:
    __name__ = "cosine_scaled_reward"

    def __init__(self, max_len, wrong, right):
        self.max_len = max_len
        self.wrong = wrong
        self.right = right

    def __call__(self, completions, solution, completion_ids, **kwargs) -> list[float | None]:
        rewards = []
        for correct, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            if correct is None:
                rewards.append(None)
                continue
            short, long = self.right if correct else self.wrong
            nearness = (1 + math.cos(math.pi * min(1.0, len(ids) / self.max_len))) / 2
            rewards.append(long + (short - long) * nearness)
        return rewards


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable:
    """A schedule over the tokens of a completion, as an object with a __name__."""
    wrong = (min_value_wrong, max_value_wrong)
    right = (max_value_correct, min_value_correct)
    return _CosineScaled(max_len, wrong, right)
