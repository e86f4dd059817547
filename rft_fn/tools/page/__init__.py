"""A run as one page of HTML that needs no server and no network."""

__all__: list[str] = []
