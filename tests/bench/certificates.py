"""Certificates of the rows of algorithm.TABLE, and of the losses of TRL and verl, by their own code.

    python tests/bench/certificates.py rft_fn

    pip install --no-deps --target ~/trl trl==1.16.0
    PYTHONPATH=~/trl:. python tests/bench/certificates.py trl
    pip install --no-deps --target ~/verl verl==0.9.1
    PYTHONPATH=~/verl:. python tests/bench/certificates.py verl

Their functions go through `testing.of_trl` and `testing.of_verl`: how far the gradient of micro-batches of 1,
2 and 4 of eight rows is from that of the whole batch, and every check of the losses of their tokens. The
entries of one library go into docs/results/certificates.json, and the tables into docs/algorithms.md; without
a library only the tables are written.
"""

import argparse
import datetime
import importlib.metadata
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import put
from torch import Tensor

from rft_fn import algorithm, loss, testing
from rft_fn.types import Experience, LossFn, WeightFn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = ROOT / "docs" / "results" / "certificates.json"
WIDTH = 12  # tokens, a constant that sums over tokens are divided by


# ---------- their means, in float64, of a batch or of a part that is told of its batch


def tokens(mask: Tensor, batch: Tensor | None = None) -> Tensor:
    """Return the weights of a mean over tokens."""
    return mask.double() / (mask if batch is None else batch).sum().clamp(min=1)


def rows(mask: Tensor, batch: Tensor | None = None) -> Tensor:
    """Return the weights of a mean over rows of the mean over their tokens."""
    n = mask.double().sum(-1, keepdim=True).clamp(min=1)
    return mask / n / len(mask if batch is None else batch)


def sums(mask: Tensor, batch: Tensor | None = None, *, width: int = 1) -> Tensor:
    """Return the weights of a mean over rows of the sum over their tokens, or of that over a constant."""
    return mask.double() / len(mask if batch is None else batch) / width


def padded(mask: Tensor, batch: Tensor | None = None) -> Tensor:
    """Return the weights of a sum over tokens divided by the width that rows are padded to."""
    return sums(mask, batch, width=mask.shape[1])


class Published(NamedTuple):
    """A loss of a library with its settings."""

    options: dict[str, Any]
    mean: Callable[..., Tensor]
    low: float | None = None  # limits that it claims
    high: float | None = None


GSPO = {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}
TRL = {
    "grpo": Published({}, rows, 0.2, 0.2),
    "bnpo": Published({}, tokens, 0.2, 0.2),
    "dr_grpo": Published({"max_completion_length": WIDTH}, partial(sums, width=WIDTH), 0.2, 0.2),
    "dapo": Published({"epsilon_high": 0.28}, tokens, 0.2, 0.28),
    "grpo, sequence": Published(GSPO, rows),
    "luspo, sequence": Published(GSPO, sums),
    "cispo": Published({"epsilon_high": 5.0}, tokens),
    "sapo": Published({}, rows),
    "vespo": Published({}, tokens),
}
MEANS = {
    "token-mean": Published({}, tokens, 0.2, 0.2),
    "seq-mean-token-sum": Published({}, sums, 0.2, 0.2),
    "seq-mean-token-mean": Published({}, rows, 0.2, 0.2),
    "seq-mean-token-sum-norm": Published({}, padded, 0.2, 0.2),
    f"seq-mean-token-sum-norm, loss_scale_factor={WIDTH}": Published(
        {"loss_scale_factor": WIDTH}, partial(sums, width=WIDTH), 0.2, 0.2
    ),
}
VERL = {
    "dppo_tv": Published({}, tokens),
    "dppo_kl": Published({}, tokens),
    "gspo": Published({"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, tokens),
    "sapo": Published({}, rows),
    "gpg": Published({}, tokens),
    "clip_cov": Published({}, tokens, 0.2, 0.2),
    "kl_cov": Published({}, tokens),
    "geo_mean": Published({"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, rows),
    "dro": Published({}, tokens),
    "cispo": Published({}, tokens),
}


# ---------- their code


def of_trl() -> dict[str, tuple[Any, Published]]:
    """Return name -> (a loss of a batch, its settings) of TRL's GRPOTrainer."""
    sys.modules["vllm"] = None  # type: ignore  # a folder of the tests, which TRL takes for the package
    from golden import trl_drive
    from trl import GRPOConfig, GRPOTrainer

    found = {}
    for name, published in TRL.items():
        args = trl_drive.config(GRPOConfig, loss_type=name.partition(",")[0], **published.options)
        trainer = trl_drive.group_trainer(GRPOTrainer, args, None, [])
        found[f"TRL, `loss_type={name}`"] = testing.of_trl(trainer), published
    return found


def of_verl() -> dict[str, tuple[Any, Published]]:
    """Return name -> (a loss of a batch, its settings) of verl's policy losses."""
    from golden import verl_losses

    losses = verl_losses.core().POLICY_LOSS_REGISTRY
    found = {}
    for name, published in MEANS.items():
        for informed, how in ((True, ""), (False, ", not told of the batch")):
            config = verl_losses.actor(**published.options)
            adapted = testing.of_verl(
                losses["vanilla"], config, loss_agg_mode=name.partition(",")[0], informed=informed
            )
            found[f"verl, `vanilla`, `{name}`{how}"] = adapted, published
    for name, published in VERL.items():
        config = verl_losses.actor(**published.options)
        found[f"verl, `{name}`"] = testing.of_verl(losses[name], config), published
    return found


def measure(batch_loss: Any) -> dict[str, dict[int, float]]:
    """Return the errors of the gradient by the rows of a micro-batch, with and without rows of no token."""
    torch.manual_seed(0)  # verl's clip_cov draws
    every = testing.micro_batch_error(batch_loss)
    return {"every row has tokens": every, "two have none": testing.micro_batch_error(batch_loss, empty=True)}


def certificate(loss_fn: LossFn, mean: WeightFn, **options: Any) -> dict[str, Any]:
    """Return the checks that fail, the cause, and the bias; options of `testing.certify`."""
    torch.manual_seed(0)
    found = testing.certify(loss_fn, weight=mean, **options)
    return {
        "failed": {v.check: v.error for v in found.verdicts if v.error},
        "cause": found.cause,
        "bias": {f"{x.gap:g}": x.bias for x in found.bias},
    }


def certified(batch_loss: Any, published: Published) -> dict[str, Any]:
    """Return what is measured of a loss of a library."""
    tokens_of = testing.token_loss(batch_loss, weight=published.mean)
    found = certificate(tokens_of, published.mean, low=published.low, high=published.high)
    return {"micro_batch": measure(batch_loss), **found}


def row(name: str) -> dict[str, Any]:
    """Return the certificate of a row of algorithm.TABLE."""
    of = algorithm.TABLE[name]
    unit = 4 if getattr(of, "together", False) else 1  # a loss of whole groups
    # of a regression the gradient is not that of the policy
    return certificate(of.loss, of.weight, unit=unit, on_policy=name != "a_star_po")


# ---------- ours: the same formula, without their code


def ours(published: Published, *, informed: bool = True, dual: float | None = None) -> Any:
    """Return PPO's loss with one of the means, as a loss of a batch."""

    def total(logp: Tensor, part: Experience, batch: Experience) -> Tensor:
        losses = loss.ppo_clip(logp, part.old_logp, part.adv, high=published.high, dual=dual)
        if informed:
            return (published.mean(part.mask, batch.mask) * losses).sum()
        some = part.mask.any(-1)  # verl leaves rows without a token out of its own means
        own = published.mean(part.mask[some]) * losses[some]
        return own.sum() * len(part.mask) / len(batch.mask)

    return total


# ---------- the page


def table(entries: dict[str, Any]) -> str:
    """Return the table of micro-batches."""
    lines = [
        "| loss | 1 row | 2 rows | 4 rows | two rows of no token: 1 | 2 | 4 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in entries.items():
        errors = [x for kind in entry["micro_batch"].values() for x in kind.values()]
        cells = ["0" if x < 1e-9 else f"{x:.2f}" for x in errors]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(entries: dict[str, Any]) -> str:
    """Return the table of checks."""
    lines = ["| loss | fails | cause | bias at 0 | 0.1 | 0.5 nats |", "|---|---|---|---|---|---|"]
    for name, entry in entries.items():
        if name.endswith("not told of the batch"):
            continue  # its tokens have the same losses
        bias = ["0" if x < 1e-9 else f"{x:.2f}" for x in entry["bias"].values()]
        failed = ", ".join(entry["failed"]) or "-"
        lines.append(
            f"| {name} | {failed} | {entry['cause'].partition(':')[0] or '-'} | {' | '.join(bias)} |"
        )
    return "\n".join(lines)


def of_rows(found: dict[str, Any]) -> str:
    """Return the table of the rows of algorithm.TABLE: the bias, or why there is none."""
    lines = ["| row | bias at 0 | 0.1 | 0.5 nats |", "|---|---|---|---|"]
    same: dict[tuple[str, ...], list[str]] = {}
    for name, entry in found.items():
        cells = tuple("0" if x < 1e-9 else f"{x:.2f}" for x in entry["bias"].values()) or ("-", "-", "-")
        same.setdefault(cells, []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in same.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", choices=["rft_fn", "trl", "verl"], nargs="?")
    library = parser.parse_args().library
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"made": {}, "entries": {}}
    if library == "rft_fn":
        record["rows"] = {name: row(name) for name in algorithm.TABLE}
    elif library:
        losses = of_trl() if library == "trl" else of_verl()
        record["made"][library] = {
            "version": importlib.metadata.version(library),
            "torch": torch.__version__,
            "date": str(datetime.date.today()),
        }
        label = {"trl": "TRL", "verl": "verl"}[library]
        kept = {k: v for k, v in record["entries"].items() if not k.startswith(label)}
        made = {name: certified(*given) for name, given in losses.items()}
        record["entries"] = made | kept if library == "trl" else kept | made
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    tables = {"micro-batches": table(record["entries"]), "certificates": verdicts(record["entries"])}
    tables["rows-certified"] = of_rows(record["rows"])
    put("docs/algorithms.md", tables)
    print(*tables.values(), sep="\n\n")


if __name__ == "__main__":
    main()
