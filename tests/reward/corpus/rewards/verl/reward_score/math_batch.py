from .geo3k import acc_reward


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    """All responses at once, by lists; a penalty for those that repeat another of the batch."""
    scores = []
    for text, truth in zip(solution_strs, ground_truths, strict=True):
        copies = solution_strs.count(text) - 1
        scores.append(acc_reward(text, truth) - 0.25 * copies)
    return scores
