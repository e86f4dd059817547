"""The distribution that tokens are drawn from."""

from dataclasses import dataclass

from rft_fn import limits, tree
from rft_fn.limits import AtLeast0, Count, PositiveShare, Whole

__all__ = ["Sampling"]


@tree.documented
@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from.

    Logits / temperature, then the top_k largest, then the smallest set with mass top_p, renormalised. The
    engine and the trainer share one object, so that log-probs are of the distribution that was sampled
    from.
    """

    temperature: AtLeast0 = 1.0  # 0 is greedy
    top_p: PositiveShare = 1.0
    top_k: Whole = 0  # 0 keeps all
    max_new: Count = 256  # tokens
    stop: tuple[int | str, ...] = ()  # token ids, or texts, that end a response; the engine adds the eos

    def __post_init__(self) -> None:
        limits.fields(self)
        if "" in self.stop:
            raise ValueError(f"stop: expected token ids and texts that are not empty, got {self.stop}")

    @property
    def distribution(self) -> tuple[float, float, int]:
        """Return the (temperature, top_p, top_k) of log-probs; temperature 1 for greedy tokens."""
        return self.temperature or 1.0, self.top_p, self.top_k

    @property
    def described(self) -> str:
        """Return the distribution as text, for an error."""
        temperature, top_p, top_k = self.distribution
        return f"temperature {temperature:g}, top_p {top_p:g}, top_k {top_k}"

    @property
    def truncates(self) -> bool:
        """Return whether top_p or top_k leave out any token."""
        return self.top_p < 1 or self.top_k > 0
