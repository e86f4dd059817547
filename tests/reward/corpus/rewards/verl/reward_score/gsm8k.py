import re


def extract_solution(solution_str, method="strict"):
    """The number behind "####", or with "flexible" the last number."""
    assert method in ("strict", "flexible")
    tail = solution_str[-300:]
    number = r"-?[0-9.,]*[0-9]"
    found = re.findall(rf"#### ({number})" if method == "strict" else number, tail)
    return found[-1].replace(",", "") if found else None


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """`score` for the answer, `format_score` for another one in the form, 0 without one."""
    answer = extract_solution(solution_str, method=method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
