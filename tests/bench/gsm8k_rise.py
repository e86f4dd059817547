"""SmolLM2-135M-Instruct learns questions of GSM8K: `python tests/bench/gsm8k_rise.py train.jsonl test.jsonl`.

The rows are those with one or two equations, and a response is the equations alone: "48/2=24", "48+24=72". A
short supervised warm-up on one half of the training rows; then GRPO on rows of the other half that the
warmed-up model solves now and then: in some of a few samples, not in all. Only evaluations see the test rows.

Every stage is kept in `--runs` and made once, so the same command goes on where it was stopped. `--write`
makes docs/results/gsm8k_rise.json and the picture at the front of the README.
"""

import argparse
import json
import math
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from rise import PICTURE, Rise, Share, Z, draw

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "docs" / "results" / "gsm8k_rise.json"

EQUATIONS = 2  # most of a row
SAMPLES = 4  # of a question, to tell whether the model solves it now and then
ROWS = ["--template", "{question}", "--system", "", "--max-prompt", "256"]
SFT = shlex.split("--steps 30 --batch 16 --lr 1e-4 --lr-end 0.1 --warmup 3 --save-every 1000 --noise-every 0")
GRPO = shlex.split(
    "--reward numeric --prompts 8 --group 8 --max-new 32 --lr 2e-5 --lr-end 1 --warmup 2 --eval-every 10 "
    "--save-every 5 --noise-every 0 --engine-batch 128"
)
EVALUATE = ["--reward", "numeric", "--max-new", "32", "--engine-batch", "128"]
KEPT = ("reward/mean", "eval/mean", "policy/entropy", "policy/logp_gap", "rollout/length_mean", "grad/norm")


# ---------- rows


def short_rows(file: Path) -> list[dict]:
    """Return the rows whose one or two equations end in the answer, with the equations as the solution."""
    found = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        equations = re.findall(r"<<([^<>]*)>>", row["answer"])
        answer = row["answer"].partition("####")[2].strip().replace(",", "")
        if 1 <= len(equations) <= EQUATIONS and equations[-1].endswith(f"={answer}"):
            found.append({"question": row["question"], "solution": "\n".join(equations), "answer": answer})
    return found


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    """Write rows as a .jsonl file, if it is not there yet."""
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------- stages


def script(name: str, *options: str) -> None:
    """Run a training script."""
    subprocess.run([sys.executable, str(ROOT / "train_scripts" / name), *options], check=True, cwd=ROOT)


def evaluate(model: Path, data: Path, out: Path, *, group: int, seed: int) -> list[int]:
    """Return how many of `group` responses to each question are right; a group of 1 is greedy."""
    count = len(data.read_text().splitlines())
    if not out.exists():
        options = [*ROWS, *EVALUATE, "--count", str(count), "--group", str(group), "--seed", str(seed)]
        options += ["--temperature", "1" if group > 1 else "0", "--out", str(out)]
        script("evaluate.py", "--model", str(model), "--data", str(data), *options)
    responses = read_rows(out.with_suffix(".jsonl"))
    answers = {row["question"]: row["answer"] for row in read_rows(data)}
    return scored(responses, answers, group)


def scored(responses: Sequence[dict], answers: dict[str, str], group: int) -> list[int]:
    """Return how many of each `group` responses give the answer of the question in their prompt."""
    from rft_fn.reward import numeric

    questions = [next(q for q in answers if q in row["prompt"]) for row in responses]
    prompts, texts = ([row[name] for row in responses] for name in ("prompt", "response"))
    right = numeric()(prompts, texts, answer=[answers[q] for q in questions])
    return [int(sum(right[i : i + group])) for i in range(0, len(right), group)]


def prepare(cfg: argparse.Namespace) -> Path:
    """Make the warmed-up model and the rows to learn from, and return the model's folder."""
    cfg.runs.mkdir(parents=True, exist_ok=True)
    train = short_rows(cfg.train)
    lessons = write_rows(cfg.runs / "lessons.jsonl", train[0::2])
    tried = write_rows(cfg.runs / "tried.jsonl", train[1::2][: cfg.tried])
    write_rows(cfg.runs / "test.jsonl", short_rows(cfg.test))

    sft = cfg.runs / "sft"
    if not (sft / "model").exists():
        shared = ["--response", "{solution}", *SFT, "--tokens-every", "0", *cfg.precision]
        script("sft.py", "--model", "smollm2-135m", "--data", str(lessons), *ROWS, *shared, "--out", str(sft))

    right = evaluate(sft / "model", tried, cfg.runs / "tried_by_sft.json", group=SAMPLES, seed=11)
    now_and_then = [row for row, n in zip(read_rows(tried), right) if 0 < n < SAMPLES]
    write_rows(cfg.runs / "now_and_then.jsonl", now_and_then)
    return sft / "model"


def learn(cfg: argparse.Namespace, model: Path, seed: int) -> Path:
    """Train by GRPO with a seed, and return the run's folder."""
    run, test = cfg.runs / f"grpo_{seed}", cfg.runs / "test.jsonl"
    if not (run / "model").exists():
        data = ["--data", str(cfg.runs / "now_and_then.jsonl"), "--eval-data", str(test)]
        shared = ["--eval-prompts", str(len(read_rows(test))), *GRPO, *cfg.precision, "--tokens-every", "0"]
        shared += ["--steps", str(cfg.steps), "--seed", str(seed), "--out", str(run)]
        script("grpo.py", "--model", str(model), *data, *ROWS, *shared)
    return run


# ---------- what is kept, and what pages show of it


def record(cfg: argparse.Namespace, model: Path, runs: Sequence[Path]) -> dict:
    """Return what the picture and the table need, with the counts of right answers to each test question."""
    test, tried = cfg.runs / "test.jsonl", cfg.runs / "tried.jsonl"
    solved = evaluate(model, tried, cfg.runs / "tried_by_sft.json", group=SAMPLES, seed=11)
    made: dict = {"date": str(date.today()), "machine": platform.machine(), "sft": SFT, "grpo": GRPO}
    made |= {"evaluate": EVALUATE, "precision": cfg.precision, "seeds": cfg.seeds, "samples": SAMPLES}
    made |= {"solved": solved, "kept": len(read_rows(cfg.runs / "now_and_then.jsonl"))}
    made["right"] = {}
    for name, folder in {"after_sft": model, **{f"after_grpo_{run.name[5:]}": run for run in runs}}.items():
        for way, group in (("greedy", 1), ("sampled", SAMPLES)):
            out = cfg.runs / f"{name}_{way}.json"
            made["right"][f"{name}_{way}"] = evaluate(folder, test, out, group=group, seed=12)
    made["runs"] = []
    for run in runs:
        rows = read_rows(run / "metrics.jsonl")
        kept = {
            name: {x["step"]: float(f"{x[name]:.5g}") for x in rows if x.get(name) is not None}
            for name in KEPT
        }
        made["runs"].append(kept)
    return made


def share(found: dict, name: str) -> Share:
    """Return the right answers of a stage; responses to a question count as one answer each."""
    counts = found["right"][name]
    return Share(sum(counts), len(counts) * (1 if name.endswith("greedy") else found["samples"]))


def rise(found: dict) -> Rise:
    """Return what the picture shows: the seeds together."""
    runs, seeds = found["runs"], found["seeds"]
    questions = len(found["right"]["after_sft_greedy"])
    held_out = {}
    for step in runs[0]["eval/mean"]:
        right = round(sum(run["eval/mean"][step] for run in runs) * questions)
        held_out[int(step) + (step != "0")] = Share(right, questions * len(runs))
    stages = {}
    for way in ("greedy", "sampled"):
        after = [share(found, f"after_grpo_{seed}_{way}") for seed in seeds]
        stages[way] = share(found, f"after_sft_{way}"), Share(*map(sum, zip(*after)))
    rewards = [list(run["reward/mean"].values()) for run in runs]
    return Rise("SmolLM2-135M-Instruct: short questions of GSM8K", rewards, held_out, stages)


def table(found: dict) -> str:
    """Return right answers to the test questions as Markdown, with 95 % intervals of means over questions."""
    lines = ["| | greedy | sampled |", "|---|---|---|"]
    names = {"after_sft": "after the warm-up"}
    names |= {f"after_grpo_{seed}": f"after GRPO, seed {seed}" for seed in found["seeds"]}
    for name, said in names.items():
        cells = [interval(found["right"][f"{name}_greedy"], 1)]
        cells.append(interval(found["right"][f"{name}_sampled"], found["samples"]))
        lines.append(f"| {said} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def interval(counts: Sequence[int], group: int) -> str:
    """Return a share in percent with 1.96 standard errors, where questions are what is drawn."""
    shares = [n / group for n in counts]
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    return f"{100 * statistics.mean(shares):.1f} % ± {100 * Z * error:.1f}"


def paired(found: dict, seed: int, way: str) -> str:
    """Return the mean change of the share right to a question, with 1.96 standard errors."""
    group = 1 if way == "greedy" else found["samples"]
    before, after = (found["right"][f"{name}_{way}"] for name in ("after_sft", f"after_grpo_{seed}"))
    return interval([b - a for a, b in zip(before, after, strict=True)], group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("train", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("test", type=Path, help="GSM8K's test.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tried", type=int, default=256, help="training rows that are sampled from")
    parser.add_argument("--precision", nargs="*", default=["--strategy.bf16"])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "gsm8k_rise", help="folder of the runs")
    parser.add_argument("--write", action="store_true", help=f"{FOUND.relative_to(ROOT)} and the picture")
    cfg = parser.parse_args()
    model = prepare(cfg)
    found = record(cfg, model, [learn(cfg, model, seed) for seed in cfg.seeds])
    print(f"{found['kept']} of {len(found['solved'])} rows are solved now and then")
    print(table(found))
    for seed in cfg.seeds:
        print(
            f"seed {seed}: greedy {paired(found, seed, 'greedy')}, sampled {paired(found, seed, 'sampled')}"
        )
    if cfg.write:
        found = json.loads(json.dumps(found))
        FOUND.write_text(json.dumps(found) + "\n")
        draw(rise(found), PICTURE)


if __name__ == "__main__":
    main()
