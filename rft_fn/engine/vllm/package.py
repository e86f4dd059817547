"""The package vllm, which is imported only where its engine is chosen."""

from importlib import import_module
from typing import Any

__all__ = ["part"]


def part(name: str = "") -> Any:
    """A module of vLLM by its name within the package. ModuleNotFoundError without vLLM."""
    full = f"vllm.{name}".rstrip(".")
    try:
        return import_module(full)
    except ModuleNotFoundError as error:
        if error.name != "vllm" and not (error.name or "").startswith("vllm."):
            raise
        raise ModuleNotFoundError(
            f"engine vllm: expected the package vllm, got no module {error.name}; install it as "
            "docs/engines.md says"
        ) from None
