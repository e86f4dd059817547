"""Translate a config of another library: `python -m rft_fn.migrate SYSTEM FILE`."""

import sys

from rft_fn.tools.other_libraries.migrate import main, translate
from rft_fn.tools.other_libraries.reading import read

__all__ = ["main", "read", "translate"]

if __name__ == "__main__":
    sys.exit(main())
