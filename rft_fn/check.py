"""Contracts on shapes at public boundaries. Values are never looked at: that would stop a GPU."""

from typing import Any

__all__ = ["given", "shapes"]


def _bind(name: str, size: tuple[int, ...], dims: list[str], known: dict[str, int]) -> bool:
    lead = dims and dims[0] == "..."
    named = dims[1:] if lead else dims
    if len(size) < len(named) or (not lead and len(size) != len(named)):
        return False
    ok = True
    for dim, n in zip(named, size[len(size) - len(named) :]):
        ok &= known.setdefault(dim, n) == n if not dim.isdigit() else int(dim) == n
    if lead:
        rest = size[: len(size) - len(named)]
        ok &= known.setdefault("...", rest) == rest  # type: ignore[arg-type]
    return bool(ok)


def shapes(**args: tuple[Any, str]) -> dict[str, int]:
    """Check `name=(tensor, "N G")` from left to right; the sizes of the named dimensions come back.

    A dimension is a name (the same name must have the same size everywhere), a number, or a leading `...`. A
    tensor that is None is passed over. Raises `ValueError("adv: expected [T] = [7], got [6]")`, with the name
    of the argument first.
    """
    known: dict[str, int] = {}
    for name, (x, spec) in args.items():
        if x is None:
            continue
        dims, before = spec.split(), dict(known)
        if not _bind(name, tuple(x.shape), dims, known):
            sizes = (before.get(d, d) for d in dims)
            want = ", ".join(str(n) for s in sizes for n in (s if isinstance(s, tuple) else (s,)))
            raise ValueError(f"{name}: expected [{', '.join(dims)}] = [{want}], got {list(x.shape)}")
    return known


def given(**args: Any) -> None:
    """Raise `ValueError("old_value: expected a tensor, got None; ...")` for the first argument that is
    None."""
    for name, x in args.items():
        if x is None:
            raise ValueError(
                f"{name}: expected a tensor, got None; give it to rft_fn.experience, or ask the model for it"
            )
