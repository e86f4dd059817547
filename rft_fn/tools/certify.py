"""Certifies a loss: every check, the exact bias, the likeliest cause of what fails; a page and a JSON."""

import hashlib
import inspect
import json
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import rft_fn as rft
from rft_fn.testing import Certificate
from rft_fn.user_files import find_module

__all__ = ["certificate", "show", "write"]


def certificate(
    name: str,
    *,
    weight: str = "",
    extra: str = "",
    unit: int = 1,
    on_policy: bool = True,
    low: float | None = None,
    high: float | None = None,
    kl: float | None = None,
    entropy: float | None = None,
    chosen_falls: bool = False,
) -> Certificate:
    """Certify FILE.py:NAME, or a row of algorithm.TABLE; functions are named in the same way.

    ValueError for a loss that runs on no batch.
    """
    loss, usual = _loss(name)
    found = rft.testing.certify(
        loss,
        weight=_weight(weight) if weight else usual,
        extra=_function(extra, "extra") if extra else None,
        unit=unit,
        on_policy=on_policy,
        low=low,
        high=high,
        kl=kl,
        entropy=entropy,
        chosen_falls=chosen_falls,
    )
    if all(v.code == "raises" for v in found.verdicts):
        raise ValueError(f"loss: {found.cause}")
    return found


def _loss(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a loss and the weight that it has in the table."""
    if ":" not in name and name in rft.algorithm.TABLE:
        row = rft.algorithm.TABLE[name]
        return row.loss, row.weight
    return _function(name, "loss"), rft.weight.token_mean


def _weight(name: str) -> Callable[..., Any]:
    if ".py:" in name:
        return _function(name, "weight")
    own = {"pair_mean": rft.weight.pair_mean}
    return own[name] if name in own else rft.weight.get_weight(name)


def _function(name: str, kind: str) -> Callable[..., Any]:
    """Return FILE.py:NAME; ValueError for one that is no function."""
    file, _, own = name.rpartition(":")
    if not file:
        raise ValueError(f"{kind}: expected FILE.py:NAME, got {name!r}")
    module = find_module(file, name, kind=kind)
    found = getattr(module, own, None)
    if not callable(found):
        functions = sorted(x for x, f in vars(module).items() if inspect.isfunction(f))
        raise ValueError(f"{kind}: expected a function of {file} ({', '.join(functions)}), got {own!r}")
    return found


def write(path: Path, name: str, found: Certificate, options: Any) -> None:
    """Write a certificate to cite: the loss with the digest of its file, versions, cases, verdicts."""
    file = Path(name.rpartition(":")[0])
    record = {
        "loss": name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None,
        "options": vars(options),
        "date": str(date.today()),
        "versions": {
            "rft_fn": rft.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "cases": [f"testing.case(seed={seed})" for seed in found.seeds],
        "certified": not any(v.error for v in found.verdicts),
        "cause": found.cause,
        "verdicts": [{"check": v.check, "passed": not v.error, "error": v.error} for v in found.verdicts],
        "bias": [x._asdict() for x in found.bias],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def show(name: str, found: Certificate) -> None:
    """Print verdicts, bias and cause."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"certificate of {name}", title_justify="left", expand=False)
    table.add_column("check")
    table.add_column("verdict")
    table.add_column("what was seen", overflow="fold")
    for v in found.verdicts:
        table.add_row(v.check, "[red]fails[/]" if v.error else "[green]passes[/]", v.error)
    console.print(table)
    if found.bias:
        bias = Table(title="expected gradient beside that of E[R], by enumeration", title_justify="left")
        for column in ("samples off by [nats]", "bias", "cosine", "norm ratio"):
            bias.add_column(column, justify="right")
        for x in found.bias:
            bias.add_row(f"{x.gap:g}", f"{x.bias:.2g}", f"{x.cosine:.4f}", f"{x.norm_ratio:.4f}")
        console.print(bias)
    failed = sum(bool(v.error) for v in found.verdicts)
    if failed:
        cause = f" The likeliest cause: {found.cause}." if found.cause else ""
        console.print(f"{failed} of {len(found.verdicts)} checks fail.{cause}")
    else:
        console.print(f"All {len(found.verdicts)} checks pass, on {len(found.seeds)} batches.")
