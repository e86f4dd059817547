import re


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    """1 for a completion that opens with one <think> ... </think>."""
    form = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)
    return [float(form.match(c[0]["content"]) is not None) for c in completions]
