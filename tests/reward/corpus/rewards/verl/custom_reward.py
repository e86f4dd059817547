"""Files that a configuration names: the four arguments in full, a default for the last, or async."""

import asyncio


def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the ground truth at the end, and what the row's split adds to it."""
    bonus = 0.5 if (extra_info or {}).get("split") == "train" else 0.0
    return float(solution_str.rstrip().endswith(ground_truth)) + bonus


def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    """A dict whose further entries are numbers to log."""
    right = extra_info["answer"] in solution_str
    return {
        "score": float(right) - 0.001 * len(solution_str),
        "acc": float(right),
        "length": len(solution_str),
    }


async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    """A judge that is asked about one response."""
    await asyncio.sleep(0.01)
    asked = extra_info["question"]
    return {"score": float(ground_truth in solution_str and asked not in solution_str)}
