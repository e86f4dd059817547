"""What people use around a training loop: the command `rft`, reports, checks, and serving.

Nothing imports it but `rft` itself, `migrate` and, lazily, the name `run.serve`.
"""

__all__: list[str] = []
