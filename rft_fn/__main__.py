"""`python -m rft_fn`: the commands of `rft`."""

from rft_fn.run.commands import main

if __name__ == "__main__":
    main()
