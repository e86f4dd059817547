"""One door for all data sets: the source of a row says which file scores it, imported when it is needed."""


def default_compute_score(
    data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kwargs
):
    """A number or a dict. NotImplementedError for a source that nobody scores."""
    if data_source == "openai/gsm8k":
        from . import gsm8k

        result = gsm8k.compute_score(solution_str, ground_truth)
    elif data_source in ("math_dapo", "aime2024"):
        from . import math_dapo

        result = math_dapo.compute_score(solution_str, ground_truth)
    elif data_source == "hiyouga/geometry3k":
        from . import geo3k

        result = geo3k.compute_score(solution_str, ground_truth)
    elif data_source.startswith("numina"):
        from . import prime_math

        result = prime_math.compute_score(solution_str, ground_truth)
    else:
        raise NotImplementedError(f"no reward for {data_source=}")
    if isinstance(result, dict):
        return result
    if isinstance(result, (int, float, bool)):
        return float(result)
    return float(result[0])
