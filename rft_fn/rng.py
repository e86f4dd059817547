"""Randomness as data: a key is an int that names *what* is drawn, never who draws it.

`fold_in(seed, step, prompt, sample)` gives the same number on every rank, at every world size and in every
resumed run, so nothing random has to live in the state.
"""

import hashlib

import torch

__all__ = ["fold_in", "generator"]


def fold_in(key: int, *data: int | str) -> int:
    """The key of `data` under `key`: an int in [0, 2**63), by BLAKE2b.

    Each item is hashed with its type and length, so `fold_in(k, 1, 23)`, `fold_in(k, 12, 3)` and `fold_in(k,
    "1", 23)` differ. Raises TypeError for anything but int and str (a float or a bool as part of a key is a
    mistake).
    """
    digest = hashlib.blake2b(digest_size=8)
    for item in (key, *data):
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            raise TypeError(f"key: expected int or str, got {type(item).__name__} ({item!r})")
        text = f"{type(item).__name__}:{item}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(key: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A fresh generator for one draw. The draw depends on the key and on the kind
    of device (CPU and CUDA differ)."""
    return torch.Generator(device=device).manual_seed(key)
