"""Where a train step runs: a `Strategy` record for each backend, chosen by a config."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rft_fn.strategy.local import local
from rft_fn.types import Strategy

__all__ = ["Strategy", "StrategyConfig", "get_fake_strategy", "get_strategy"]


@dataclass(frozen=True)
class StrategyConfig:
    """The backend and its options, typed: the only source of their defaults."""

    backend: str = "local"
    """local: one process and one device"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """arguments that are not the strategy's, kept for `get_extra_arg`"""

    @staticmethod
    def from_args(args: "argparse.Namespace | Mapping[str, Any]") -> "StrategyConfig":
        """From a namespace or a mapping; what is not a field goes to `extra`."""
        given = dict(args) if isinstance(args, Mapping) else dict(vars(args))
        known = {f.name for f in fields(StrategyConfig)} - {"extra"}
        extra = {k: v for k, v in given.items() if k not in known}
        return StrategyConfig(**{k: v for k, v in given.items() if k in known}, extra=extra)

    def get_extra_arg(self, name: str, default: Any = None) -> Any:
        """An argument that is not a field, or the default."""
        return self.extra.get(name, default)


def get_strategy(config: StrategyConfig | None = None) -> Strategy:
    """The strategy that `config` names. ValueError for a backend that does not exist."""
    config = config or StrategyConfig()
    if config.backend != "local":
        raise ValueError(f"strategy backend: expected local, got {config.backend!r}")
    return local()


def get_fake_strategy() -> Strategy:
    """A strategy for tests without any process group: the local one, real code on one process."""
    return local()
