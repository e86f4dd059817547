"""Runs of scripts in this process whose pictures and forecasts no test looks at."""

from contextlib import contextmanager

import pytest

from rft_fn import run

__all__ = ["plain_runs"]


@contextmanager
def plain_runs():
    """Scripts draw nothing and forecast no memory."""
    with pytest.MonkeyPatch.context() as patch:
        for picture in ("curve", "length_histogram", "phases"):
            patch.setattr(run.plot, picture, lambda *_, **__: None)
        patch.setattr(run, "print_preflight", lambda *_, **__: None)
        yield
