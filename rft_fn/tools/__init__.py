"""What people use around a training loop: the command `rft`, reports, pictures, checks, and serving.

Nothing imports it but `rft` itself, `migrate` and, lazily, the end of a run (its pictures).
"""

__all__: list[str] = []
