"""The rows on a language model, over several buffers: `python tests/bench/estimators.py --runs DIR`.

Runs train_scripts/compare.py for each seed with the options of COMMAND (a buffer that is there already is not
sampled again), and writes docs/results/estimators.json and the table in docs/estimators.md. The questions are
those of GSM8K, in a file that `--data` names.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from record import made, processor, put

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "estimators.json"
COMMAND = (
    "python train_scripts/compare.py --model smollm2-135m --data gsm8k/train.jsonl "
    "--template '{question} Answer with a number only.' --system '' "
    "--reward docs/estimators/closeness.py:closeness --max-prompt 80 --max-new 16 --prompts 6 --group 4 "
    "--parts 3 --reference-prompts 12 --probes 0 --largest 0 --drift 0 --budget 512 "
    "--strategy.engine-batch 48 "
    "--rows rloo grpo dr_grpo dapo gspo gspo_token cispo sapo gmpo cpgd dppo_tv dppo_kl opo remax reinforce "
    "reinforce_pp reinforce_pp_baseline maxrl lite_ppo luspo vespo dro gpg best_minus_second"
)
COLUMNS = ("with_first", "cosine", "direction", "noise_prompts", "effective", "longest", "length")


def measured(seed, data, runs):
    """What compare.py wrote of a seed's buffer, which is made where it is not there."""
    path = runs / f"seed{seed}" / "estimators.json"
    if not path.exists():
        words = [data if word == "gsm8k/train.jsonl" else word for word in shlex.split(COMMAND)[1:]]
        more = ["--seed", str(seed), "--out", str(path.parent)]
        subprocess.run([sys.executable, *words, *more], cwd=ROOT, check=True)
    return json.loads(path.read_text())


def summed_up(found):
    """The mean of each number of each row over the buffers, and its standard error."""
    rows = {}
    for name in found[0]["rows"]:
        rows[name] = {}
        for key in COLUMNS:
            values = [x for f in found if (x := f["rows"][name][key]) is not None and x == x]
            own = found[0]["rows"][name].get(f"{key}_se")  # by the prompts, where there is one buffer
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else own
            rows[name][key] = [statistics.fmean(values) if values else None, error]
    return rows


def cell(mean, error):
    if mean is None:
        return "-"
    digits = 0 if abs(mean) >= 10 else 2
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def table(result):
    """The rows as a table of Markdown."""
    heads = (
        "cosine with RLOO's",
        "with the reference",
        "noise: prompts",
        "effective",
        "longest",
        "by length",
    )
    keys = ("with_first", "cosine", "noise_prompts", "effective", "longest", "length")
    lines = ["| row | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name, row in result["rows"].items():
        lines.append(f"| `{name}` | " + " | ".join(cell(*row[key]) for key in keys) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--data", default="gsm8k/train.jsonl")
    parser.add_argument("--buffers", type=int, default=3)
    args = parser.parse_args()
    found = [measured(seed, args.data, args.runs) for seed in range(args.buffers)]
    result = {
        "command": f"{COMMAND} --seed SEED",
        **made(),
        "hardware": f"one thread of {processor()}",
        "buffers": [f["buffer"] for f in found],
        "references": [f["reference"] for f in found],
        "rows": summed_up(found),
        "each": [f["rows"] for f in found],
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    put("docs/estimators.md", {"rows": table(result)})
    print(table(result))


if __name__ == "__main__":
    main()
