"""Processes that work together: their group, what travels between them, and who is lost."""

from rft_fn.dist.collectives import (
    all_gather_object,
    all_reduce,
    barrier,
    differences,
    fetch_media,
    gather,
    is_main,
    rank,
    started,
    world,
)
from rft_fn.dist.group import settle, store_client
from rft_fn.dist.heartbeat import Heartbeat
from rft_fn.dist.lost import LOST, LostProcess, abort, is_lost, lost_line
from rft_fn.dist.processes import Processes, begin

__all__ = [
    "LOST", "Heartbeat", "LostProcess", "Processes", "abort", "all_gather_object", "all_reduce", "barrier",
    "begin", "differences", "fetch_media", "gather", "is_lost", "is_main", "lost_line", "rank", "settle",
    "started", "store_client", "world",
]  # fmt: skip
