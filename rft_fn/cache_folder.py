"""The folder in which this project keeps what it has built or fetched once."""

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """Return $RFT_FN_CACHE, or ~/.cache/rft_fn: models, and in `rows` looks at data."""
    return Path(os.environ.get("RFT_FN_CACHE") or Path.home() / ".cache" / "rft_fn")
