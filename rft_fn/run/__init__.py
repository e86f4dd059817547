"""The surroundings of a training loop: its folder, trackers, signals, and the command line."""

from rft_fn.run.cli import cli, error_line, guard, without
from rft_fn.run.folder import Run
from rft_fn.run.progress import track
from rft_fn.run.report import check_results, table, write_results
from rft_fn.run.resume import last_model, settings
from rft_fn.run.signals import Stopped

__all__ = [
    "Run", "Stopped", "check_results", "cli", "error_line", "guard", "last_model", "settings", "table",
    "track", "without", "write_results",
]  # fmt: skip
