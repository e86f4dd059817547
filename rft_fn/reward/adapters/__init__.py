"""Adapters that call reward functions of other libraries as they do.

Each adapter takes a function, as it is, and the column of the answer. The reward function that it makes names
in its attribute `columns` the columns that the rows must have. A new library is a file here and a row of
`ADAPTERS`.
"""

from typing import Any, Protocol

from rft_fn.reward.adapters.foreign import lightrft, messages, openrlhf, texts, tinyzero, verl
from rft_fn.reward.adapters.verifiers import verifiers
from rft_fn.reward.convention import RewardFn

__all__ = [
    "ADAPTERS",
    "Adapter",
    "lightrft",
    "messages",
    "openrlhf",
    "texts",
    "tinyzero",
    "verifiers",
    "verl",
]


class Adapter(Protocol):
    """Makes a reward function of one that is written for another library."""

    def __call__(self, fn: Any, /, *args: Any, **options: Any) -> RewardFn:
        """The reward function that calls `fn` as that library does.

        The second argument is the column of the answer, or a path into one, where the library has an answer;
        its default is the library's own column.
        """
        ...


ADAPTERS: dict[str, Adapter] = {
    "messages": messages,
    "text": texts,
    "verl": verl,
    "tinyzero": tinyzero,
    "openrlhf": openrlhf,
    "lightrft": lightrft,
    "verifiers": verifiers,
}
"""By the name that stands in front of a file or a module on the command line."""
