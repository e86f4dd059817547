"""SmolLM2-135M-Instruct learns from GSM8K: `python tests/bench/gsm8k_rise.py train.jsonl test.jsonl`.

`--task calculations`: those of the solutions, "48/2=" -> "24", each different one once; of the test rows
those that no training row has. `--task questions`: the questions with one or two equations, and a response is
the equations alone.

A short supervised warm-up on one half of the training rows; then GRPO on rows of the other half that the
warmed-up model solves now and then: in some of a few samples, not in all. Only evaluations see the test rows.

Every stage is kept in `--runs` and made once, so the same command goes on where it was stopped. `--write`
makes docs/results/gsm8k_rise.json and its picture.
"""

import argparse
import json
import math
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from record import lines
from rise import Rise, Share, Z, draw

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "docs" / "results" / "gsm8k_rise.json"
PICTURE = ROOT / "docs" / "pictures" / "gsm8k_rise.svg"

SAMPLES = 4  # of a row, to tell whether the model solves it now and then
ROWS = ["--template", "{question}", "--system", "", "--max-prompt", "256"]
SFT = shlex.split("--lr-end 0.1 --warmup 3 --save-every 1000 --noise-every 0 --tokens-every 0")
GRPO = shlex.split(
    "--reward numeric --group 8 --lr 2e-5 --lr-end 1 --warmup 2 --eval-every 10 --save-every 10 "
    "--noise-every 0 --tokens-every 0 --engine-batch 128"
)
KEPT = ("reward/mean", "eval/mean", "policy/entropy", "policy/logp_gap", "rollout/length_mean", "grad/norm")


# ---------- rows


def equations(row: dict) -> list[tuple[str, str]]:
    """Return (left side, right side) of the calculations in a solution."""
    found = re.findall(r"<<([^<>=]+)=([^<>=]+)>>", row["answer"])
    return [(left.strip(), right.strip().replace(",", "")) for left, right in found]


def questions(file: Path) -> list[dict]:
    """Return the rows whose one or two equations end in the answer, with the equations as the solution."""
    found = []
    for row in lines(file):
        answer, sides = row["answer"].partition("####")[2].strip().replace(",", ""), equations(row)
        if 1 <= len(sides) <= 2 and sides[-1][1] == answer:
            solution = "\n".join("=".join(pair) for pair in sides)
            found.append({"question": row["question"], "solution": solution, "answer": answer})
    return found


def calculations(file: Path) -> list[dict]:
    """Return each different calculation of numbers in the solutions, in an order that a seed decides."""
    sides = dict(pair for row in lines(file) for pair in equations(row))
    plain = {left: right for left, right in sides.items() if re.fullmatch(r"[\d.+*/()-]+", left)}
    found = [
        {"question": f"{left}=", "solution": right, "answer": right}
        for left, right in plain.items()
        if re.fullmatch(r"-?\d+(\.\d+)?", right)
    ]
    random.Random(0).shuffle(found)
    return found


class Task(NamedTuple):
    """Rows to learn, and the sizes of the stages."""

    rows: Callable[[Path], list[dict]]
    sft: Sequence[str]
    grpo: Sequence[str]
    max_new: int
    test: int  # most rows of an evaluation


TASKS = {
    "calculations": Task(
        calculations,
        shlex.split("--steps 20 --batch 32 --lr 5e-5"),
        shlex.split("--prompts 16"),
        max_new=8,
        test=400,
    ),
    "questions": Task(
        questions,
        shlex.split("--steps 30 --batch 16 --lr 1e-4"),
        shlex.split("--prompts 8"),
        max_new=32,
        test=400,
    ),
}


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    """Write rows as a .jsonl file, if it is not there yet."""
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------- stages


def script(name: str, *options: str) -> None:
    """Run a training script."""
    subprocess.run([sys.executable, str(ROOT / "train_scripts" / name), *options], check=True, cwd=ROOT)


def evaluate(model: Path, data: Path, out: Path, *, group: int, seed: int, max_new: int) -> list[int]:
    """Return how many of `group` responses to each question are right; a group of 1 is greedy."""
    count = len(data.read_text().splitlines())
    if not out.exists():
        options = [*ROWS, "--reward", "numeric", "--max-new", str(max_new), "--engine-batch", "128"]
        options += ["--count", str(count), "--group", str(group), "--seed", str(seed)]
        options += ["--temperature", "1" if group > 1 else "0", "--out", str(out)]
        script("evaluate.py", "--model", str(model), "--data", str(data), *options)
    answers = {row["question"]: row["answer"] for row in lines(data)}
    return scored(lines(out.with_suffix(".jsonl")), answers)


def scored(responses: Sequence[dict], answers: dict[str, str]) -> list[int]:
    """Return how many responses give the answer of each question, in the order of `answers`."""
    from rft_fn.reward import numeric

    prompts, texts = ([row[name] for row in responses] for name in ("prompt", "response"))
    right = dict.fromkeys(answers, 0)
    for prompt, reward in zip(
        prompts, numeric()(prompts, texts, answer=[answers[q] for q in prompts]), strict=True
    ):
        right[prompt] += int(reward)
    return list(right.values())


def prepare(cfg: argparse.Namespace) -> Path:
    """Make the warmed-up model and the rows to learn from, and return the model's folder."""
    cfg.runs.mkdir(parents=True, exist_ok=True)
    task = TASKS[cfg.task]
    train = task.rows(cfg.train)
    known = {row["question"] for row in train}
    lessons = write_rows(cfg.runs / "lessons.jsonl", train[0::2])
    tried = write_rows(cfg.runs / "tried.jsonl", train[1::2][: cfg.tried])
    new = [row for row in task.rows(cfg.test) if row["question"] not in known]
    write_rows(cfg.runs / "test.jsonl", new[: task.test])

    sft = cfg.runs / "sft"
    if not (sft / "model").exists():
        shared = ["--response", "{solution}", *SFT, *task.sft, *cfg.precision]
        script("sft.py", "--model", "smollm2-135m", "--data", str(lessons), *ROWS, *shared, "--out", str(sft))

    out = cfg.runs / "tried_by_sft.json"
    right = evaluate(sft / "model", tried, out, group=SAMPLES, seed=11, max_new=task.max_new)
    now_and_then = [row for row, n in zip(lines(tried), right, strict=True) if 0 < n < SAMPLES]
    write_rows(cfg.runs / "now_and_then.jsonl", now_and_then)
    return sft / "model"


def learn(cfg: argparse.Namespace, model: Path, seed: int) -> Path:
    """Train by GRPO with a seed, and return the run's folder."""
    task, run, test = TASKS[cfg.task], cfg.runs / f"grpo_{seed}", cfg.runs / "test.jsonl"
    if not (run / "model").exists():
        data = ["--data", str(cfg.runs / "now_and_then.jsonl"), "--eval-data", str(test)]
        shared = ["--eval-prompts", str(len(lines(test))), *GRPO, *task.grpo, *cfg.precision]
        shared += ["--max-new", str(task.max_new), "--steps", str(cfg.steps), "--seed", str(seed)]
        script("grpo.py", "--model", str(model), *data, *ROWS, *shared, "--out", str(run))
    return run


# ---------- what is kept, and what pages show of it


def record(cfg: argparse.Namespace, model: Path, runs: Sequence[Path]) -> dict:
    """Return what the picture and the table need, with the counts of right answers to each test question."""
    task, test, tried = TASKS[cfg.task], cfg.runs / "test.jsonl", cfg.runs / "tried.jsonl"
    out = cfg.runs / "tried_by_sft.json"
    solved = evaluate(model, tried, out, group=SAMPLES, seed=11, max_new=task.max_new)
    made: dict = {"date": str(date.today()), "machine": platform.machine(), "task": cfg.task}
    made |= {"sft": [*SFT, *task.sft], "grpo": [*GRPO, *task.grpo], "precision": cfg.precision}
    made |= {"seeds": cfg.seeds, "samples": SAMPLES}
    made |= {"solved": solved, "kept": len(lines(cfg.runs / "now_and_then.jsonl"))}
    made["right"] = {}
    for name, folder in {"after_sft": model, **{f"after_grpo_{run.name[5:]}": run for run in runs}}.items():
        for way, group in (("greedy", 1), ("sampled", SAMPLES)):
            out = cfg.runs / f"{name}_{way}.json"
            right = evaluate(folder, test, out, group=group, seed=12, max_new=task.max_new)
            made["right"][f"{name}_{way}"] = right
    made["runs"] = []
    for run in runs:
        rows = lines(run / "metrics.jsonl")
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
    return Rise(f"SmolLM2-135M-Instruct: {found['task']} of GSM8K", rewards, held_out, stages)


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
    parser.add_argument("--task", choices=TASKS, default="calculations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tried", type=int, default=400, help="training rows that are sampled from")
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
