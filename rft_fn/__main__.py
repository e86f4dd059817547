"""`python -m rft_fn`: the commands of `rft`."""

from rft_fn.tools.commands import main

if __name__ == "__main__":
    main()
