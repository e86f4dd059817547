import re


def verify(text, truth):
    """(whether the last "Answer:" is right, what it says)."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text)
    said = found[-1].strip().strip("$.") if found else "[INVALID]"
    return said == truth, said


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index=None
) -> float:
    """+-1 as "score", with what else is known of the answer beside it."""
    correct, said = verify(solution_str[-300:], ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": said}
