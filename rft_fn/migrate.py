"""Translate a config of another library: `python -m rft_fn.migrate SYSTEM FILE`."""

import sys

from rft_fn.tools.other_libraries.migrate import main, read, translate

__all__ = ["main", "read", "translate"]

if __name__ == "__main__":
    sys.exit(main())
