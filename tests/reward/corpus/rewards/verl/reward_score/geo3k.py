import re


def format_reward(predict_str: str) -> float:
    whole = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
    return float(whole.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    answer = predict_str
    if use_boxed:
        found = re.findall(r"\\boxed\{([^{}]*)\}", predict_str)
        answer = found[-1] if found else None
    return float(answer == ground_truth)


def compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """0.9 for the answer and 0.1 for the form; the response is the first argument, whatever its name."""
    right, formed = acc_reward(predict_str, ground_truth, use_boxed), format_reward(predict_str)
    return (1.0 - format_score) * right + format_score * formed
