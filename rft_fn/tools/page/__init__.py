"""A run as one page of HTML that needs no server and no network."""

from rft_fn.tools.page.build import write_page

__all__ = ["write_page"]
