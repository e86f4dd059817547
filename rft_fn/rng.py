"""Randomness as data: keys and generators.

A key is an integer that names what is drawn, never who draws it. `fold_in(seed, step, prompt, sample)`
gives the same number on every rank, at every world size and in every resumed run, so nothing random must
live in the state.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["fold_in", "generator", "uniform"]

_TWISTER_WORDS = 624  # of 32 bits: the state of MT19937


def fold_in(key: int, *data: int | str) -> int:
    """Derive a new key from a key and data.

    The result is the BLAKE2b hash of all items, an int in [0, 2**63). Each item is hashed with its type and
    length, so `fold_in(k, 1, 23)`, `fold_in(k, 12, 3)` and `fold_in(k, "1", 23)` differ. TypeError for
    anything but int and str: a float or a bool in a key is a mistake.
    """
    digest = hashlib.blake2b(digest_size=8)
    for item in (key, *data):
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            raise TypeError(f"key: expected int or str, got {type(item).__name__} ({item!r})")
        text = f"{type(item).__name__}:{item}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(key: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Make a fresh random generator for one draw.

    It is seeded with all bits of the key. Draws differ between kinds of device. On a GPU the key seeds
    torch's Philox. torch's CPU seed keeps only 32 bits, so there SHAKE-256 of the key fills the whole state
    of the Mersenne twister. TypeError for a key that is no int, RuntimeError for one beyond 64 bits.
    """
    _check(key)
    drawn = torch.Generator(device=device).manual_seed(key)
    if drawn.device.type != "cpu":
        return drawn
    state = drawn.get_state()
    _twister(state).copy_(_words(key))
    drawn.set_state(state)
    return drawn


def uniform(keys: Sequence[int], count: int) -> Tensor:
    """Draw `count` uniform numbers in [0, 1) for each key: [K, count] float64, on the CPU.

    Row k has the first numbers of `generator(keys[k])`. One generator draws them all, which takes half the
    time of one for each key. TypeError for a key that is no int.
    """
    numbers = torch.empty(len(keys), count, dtype=torch.float64)
    drawn = torch.Generator()
    state = drawn.get_state()
    twister = _twister(state)
    for key, row in zip(keys, numbers):
        _check(key)
        twister.copy_(_words(key))
        drawn.set_state(state)
        torch.rand(count, generator=drawn, dtype=torch.float64, out=row)
    return numbers


def _check(key: int) -> None:
    if isinstance(key, bool) or not isinstance(key, int):
        raise TypeError(f"key: expected int, got {type(key).__name__} ({key!r})")


def _words(key: int) -> Tensor:
    """Return the state of the twister for a key: 624 words of 32 bits."""
    digest = hashlib.shake_256(f"{key}".encode()).digest(4 * _TWISTER_WORDS)
    return torch.frombuffer(bytearray(digest), dtype=torch.int32)


def _twister(state: Tensor) -> Tensor:
    """View the twister's words in a state of torch.

    Each is the lower half of 64 bits, after 24 bytes of counters.
    """
    return state[24 : 24 + 8 * _TWISTER_WORDS].view(torch.int32)[::2]
