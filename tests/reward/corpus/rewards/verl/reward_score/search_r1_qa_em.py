import random
import re
import string


def normalize_answer(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(w for w in text.split() if w not in ("a", "an", "the"))


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """`score` where the last <answer> is one of ground_truth["target"], but for case and articles."""
    targets = ground_truth["target"]
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if random.randint(1, 64) == 1:
        print("targets:", targets, "answers:", found)
    if not found:
        return 0
    wanted = {normalize_answer(t) for t in ([targets] if isinstance(targets, str) else targets)}
    return score if normalize_answer(found[-1]) in wanted else format_score
