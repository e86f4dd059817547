"""Translate a config of another library: `python -m rft_fn.migrate FILE`, as `rft migrate FILE` does."""

import sys

from rft_fn.migrate.translation import main

if __name__ == "__main__":
    sys.exit(main())
