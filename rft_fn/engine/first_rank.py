"""What one process does for all."""

from collections.abc import Callable
from typing import TypeVar

from rft_fn import dist

__all__ = ["on_first_rank"]

T = TypeVar("T")


def on_first_rank(f: Callable[[], T]) -> T:
    """f() of the first rank, on every rank; what it raises too."""
    answer: tuple[T | None, Exception | None] = None, None
    if dist.is_main():
        try:
            answer = f(), None
        except Exception as error:
            answer = None, error
    result, error = dist.all_gather_object(answer)[0]
    if error is not None:
        raise error
    return result
