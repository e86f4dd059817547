"""What people use around a training loop: the command `rft`, reports, pictures, checks, and serving.

Nothing imports it but `rft` itself and, lazily, the end of a run (its pictures) and unknown options (a hint).
"""

__all__: list[str] = []
