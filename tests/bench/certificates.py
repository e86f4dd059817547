"""Which losses of other libraries depend on the micro-batch: `python tests/bench/certificates.py --write`.

Their formulas for a mean over tokens, from the log-probs of a padded batch to the number whose gradient is
taken, go through `testing.of_trl` and `testing.of_verl`. Eight rows of different lengths are cut into
micro-batches of 1, 2 and 4 rows. Writes docs/results/certificates.json and the table of docs/algorithms.md.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rft_fn import testing

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "certificates.json"
PAGE = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- certificates:begin -->", "<!-- certificates:end -->"
ROWS = 8
HORIZON = 12  # tokens, the longest response
TOKENS = int(testing.case().exp.mask.sum())  # of the whole batch


def clipped(logp: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    """Return PPO's loss of each token."""
    ratio = (logp - old).exp()
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)


def trl(logp: Tensor, inputs: dict[str, Tensor], *, loss_type: str) -> Tensor:
    """Return the loss of TRL's GRPO with a `loss_type`."""
    mask = inputs["completion_mask"]
    x = clipped(logp, inputs["old_per_token_logps"], inputs["advantages"][:, None]) * mask
    if loss_type == "grpo":
        return (x.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if loss_type == "bnpo":
        return x.sum() / mask.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        return x.sum() / (len(x) * HORIZON)
    return x.sum() / (TOKENS * len(x) / ROWS)  # dapo: by the tokens of the whole batch


def verl(
    *, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str
) -> tuple[Tensor, dict]:
    """Return the loss of verl's PPO with a `loss_agg_mode`, without the numbers of the whole batch."""
    mask = response_mask
    x = clipped(log_prob, old_log_prob, advantages) * mask
    if loss_agg_mode == "token-mean":
        return x.sum() / mask.sum().clamp(min=1), {}
    if loss_agg_mode == "seq-mean-token-sum":
        return x.sum(-1).mean(), {}
    if loss_agg_mode == "seq-mean-token-mean":
        return (x.sum(-1) / mask.sum(-1).clamp(min=1)).mean(), {}
    return x.sum(-1).mean() / HORIZON, {}  # seq-mean-token-sum-norm


LOSSES: dict[str, Callable[..., Tensor]] = {
    **{
        f"TRL, `loss_type={name}`": testing.of_trl(trl, loss_type=name)
        for name in ("grpo", "bnpo", "dr_grpo", "dapo")
    },
    **{
        f"verl, `loss_agg_mode={name}`": testing.of_verl(verl, loss_agg_mode=name)
        for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
}


def measure() -> dict[str, dict[int, float]]:
    """Return the error of the gradient of each loss, by the rows of a micro-batch."""
    return {name: testing.micro_batch_error(loss) for name, loss in LOSSES.items()}


def table(found: dict[str, dict[int, float]]) -> str:
    """Return the table of the page."""
    lines = ["| loss | 1 row | 2 rows | 4 rows |", "|---|---|---|---|"]
    for name, errors in found.items():
        cells = ["0" if x < 1e-9 else f"{x:.2f}" for x in errors.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    found = measure()
    print(table(found))
    if parser.parse_args().write:
        rounded = {name: {n: float(f"{x:.4g}") for n, x in errors.items()} for name, errors in found.items()}
        RESULTS.write_text(json.dumps(rounded, indent=1) + "\n")
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


if __name__ == "__main__":
    main()
