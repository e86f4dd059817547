"""The resources of a strategy, which it owns and closes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from rft_fn import ckpt, dist

__all__ = ["Session"]


class Session:
    """The processes of a strategy, its checkpoint writer, and the folder for dumps of faults."""

    def __init__(self, processes: dist.Processes | None = None):
        self.processes = processes or dist.Processes()
        self.writer = ckpt.Writer()
        self.dump_dir = Path(".")
        self.settings = ExitStack()  # of torch, restored when it closes

    @property
    def current_phase(self) -> str:
        """Return the phase of this process: the innermost block, or the last one before script code."""
        return self.processes.current_phase

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Call what this process does inside the block `name`; LostProcess where it loses another."""
        return self.processes.phase(name)

    def watch(self) -> AbstractContextManager[None]:
        """Raise LostProcess for an error in the block about a lost process."""
        return self.processes.watch()

    def set_dump_dir(self, folder: str | Path) -> None:
        """Set the folder that dumps of gradients that are not finite go to."""
        self.dump_dir = Path(folder)

    def close(self, release: Callable[[], None] | None = None) -> None:
        """Wait for the checkpoint writer, which may raise, then leave the processes. Twice is once.

        `release` is called between the two: the writer needs the other processes.
        """
        try:
            with self.watch():
                self.writer.finish()
        finally:
            try:
                if release is not None:
                    release()
            finally:
                self.settings.close()
                self.processes.close()
