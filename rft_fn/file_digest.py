"""Digests of files, by threads where they are large."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LARGE", "digest", "digest_of"]

LARGE = 1 << 26  # bytes of a piece, which one thread hashes
_BLOCK = 1 << 20


def digest(path: Path) -> str:
    """Return the BLAKE2b digest of a file; of a large one that of the digests of its pieces."""
    with path.open("rb", buffering=0) as file:
        return digest_of(file.fileno())


def digest_of(descriptor: int) -> str:
    """Return the digest of an open file as `digest` does, wherever it is being read."""
    size = os.fstat(descriptor).st_size
    if size <= LARGE:
        return _piece(descriptor, 0).hex()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        pieces = threads.map(lambda start: _piece(descriptor, start), range(0, size, LARGE))
        return hashlib.blake2b(b"".join(pieces), digest_size=16).hexdigest()


def _piece(descriptor: int, start: int) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for at in range(start, start + LARGE, _BLOCK):
        block = os.pread(descriptor, _BLOCK, at)
        if not block:
            break
        found.update(block)
    return found.digest()
