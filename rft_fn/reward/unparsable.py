"""Answers of a judge that have no verdict: examples of them, and when to stop."""

import warnings
from collections.abc import Sequence

from rft_fn.reward.forms import Form

__all__ = ["Watch", "error"]

_SHOWN = 3  # examples
_WIDTH = 200  # characters of each
_REMEDY = "take a form that this judge can follow, or raise max_new"
_TOO_LONG = "take shorter criteria or a judge with a larger window, or lower max_new"


class Watch:
    """Shows the first answers without a verdict, and stops a run that gets little else.

    `limit` is the share of answers without a verdict, and `patience` how many calls in a row may reach it.
    ValueError for a share outside of (0, 1] and for no patience.
    """

    def __init__(self, form: Form, limit: float, patience: int):
        if not isinstance(limit, (int, float)) or not 0 < limit <= 1:
            raise ValueError(f"limit: expected a share of answers in (0, 1], got {limit!r}")
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience: expected at least 1 call, got {patience!r}")
        self.form = form
        self.limit = limit
        self.patience = patience
        self.bad = 0  # calls in a row
        self.shown = False

    def see(self, said: Sequence[str], read: Sequence[bool], *, too_long: int = 0) -> None:
        """Count one call: the answers, which of them have a verdict, the questions that were not asked.

        ValueError, with three examples, where it was one too many.
        """
        unread = [answer for answer, good in zip(said, read, strict=True) if not good]
        total = len(said) + too_long
        bad = len(unread) + too_long
        if not bad:
            self.bad = 0
            return

        # few enough are left, or this call is one of several
        self.bad += 1
        if bad < self.limit * total:
            self.bad = 0
        got = f"none in {bad} of {total} answers"
        remedy = _REMEDY
        if not unread:
            remedy = _TOO_LONG
        if too_long:
            got += f" ({too_long} questions do not fit into its window)"
        if self.bad >= self.patience:
            raise error(self.form, f"{got}, the last of {self.bad} calls in a row", unread, remedy)
        if not self.shown:
            self.shown = True
            warnings.warn(str(error(self.form, got, unread, remedy)), stacklevel=2)


def error(form: Form, got: str, said: Sequence[str], remedy: str = _REMEDY) -> ValueError:
    """The error of answers without a verdict, with the first three that differ."""
    examples = ", ".join(f"{answer!r:.{_WIDTH}}" for answer in list(dict.fromkeys(said))[:_SHOWN])
    return ValueError(
        f"judge: expected answers with a verdict such as {form.parse.write(1)!r}, got {got}; it said "
        f"{examples or 'nothing'}; {remedy}"
    )
