"""What people use around a training loop: the command `rft`, reports, checks, and serving.

Nothing imports it but `rft` itself and, lazily, unknown options (a hint) and the name `run.serve`.
"""

__all__: list[str] = []
