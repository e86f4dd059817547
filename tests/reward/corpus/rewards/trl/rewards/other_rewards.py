from collections.abc import Callable


class _RepetitionPenalty:
    __name__ = "repetition_penalty_reward"

    def __init__(self, ngram_size, max_penalty):
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty

    def __call__(self, completion_ids: list[list[int]], **kwargs) -> list[float]:
        rewards = []
        for ids in completion_ids:
            grams = list(zip(*(ids[i:] for i in range(self.ngram_size)), strict=False))
            repeated = len(grams) - len(set(grams))
            rewards.append(self.max_penalty * repeated / len(grams) if repeated else 0.0)
        return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable:
    """max_penalty times the share of n-grams of tokens that came before."""
    if max_penalty > 0:
        raise ValueError(f"max_penalty: expected at most 0, got {max_penalty}")
    return _RepetitionPenalty(ngram_size, max_penalty)


class _SoftOverlong:
    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, hard, cache):
        self.hard = hard
        self.cache = cache

    def __call__(self, completion_ids: list[list[int]], **kwargs) -> list[float]:
        over = [len(ids) - (self.hard - self.cache) for ids in completion_ids]
        return [-min(1.0, max(0.0, x / self.cache)) for x in over]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable:
    """0 up to a soft limit of tokens, then down to -1 at the hard one."""
    return _SoftOverlong(max_completion_len, soft_punish_cache)
