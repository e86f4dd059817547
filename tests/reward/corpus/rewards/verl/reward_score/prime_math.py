from fractions import Fraction


def _number(text):
    try:
        return Fraction(text.replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return None


def compute_score(model_output: str, ground_truth: str) -> bool:
    """(right, in the form, what was said), of which the first is the reward."""
    said = model_output.rpartition("\\boxed{")[2].partition("}")[0]
    formed = "\\boxed{" in model_output and "Step 2:" in model_output
    value = _number(said)
    return value is not None and value == _number(str(ground_truth)), formed, said
