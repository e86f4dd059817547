"""What surrounds a training loop: its folder, trackers, signals, and the command line."""

from rft_fn.run.cli import cli, error_line, guard, without
from rft_fn.run.folder import Run, last_model, settings
from rft_fn.run.signals import Stopped
from rft_fn.run.terminal import check_results, table, track, write_results

__all__ = [
    "Run", "Stopped", "check_results", "cli", "error_line", "guard", "last_model", "settings", "table",
    "track", "without", "write_results",
]  # fmt: skip
