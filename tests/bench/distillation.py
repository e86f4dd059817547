"""Distillation, measured: `python tests/bench/distillation.py`.

Three seeds of GRPO on the embedded default, and for each a student that starts as GRPO did and learns from
its result: responses that either has sampled when it first reaches a score on unseen prompts. Then the memory
of the comparison of two heads, by its peak on this machine. Writes docs/results/distillation.json, and of it
docs/pictures/distillation.png and the tables of docs/distillation.md; `--draw` makes only these two.

`--smollm2 runs/smollm2`, after `make train-smollm2`, teaches SmolLM2-135M by its own GRPO run, one seed:
docs/results/smollm2/distillation.json, the picture beside it, and one more table of the page.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from record import made, put, trained

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "distillation.json"
PICTURE = ROOT / "docs" / "pictures" / "distillation.png"
SEEDS = (0, 1, 2)
LEVELS = (0.7, 0.8, 0.9)
WAYS = {
    "reverse KL": [],
    "forward KL": ["--loss", "forward_kl"],
    "JSD": ["--loss", "jsd"],
    "sampled tokens": ["--loss", "sampled"],
}
DISTILL = ["--steps", "60", "--eval-every", "3", "--lr", "2e-3"]
GRPO = {
    "GRPO": ["--eval-every", "5"],
    "GRPO, 4 a prompt": ["--eval-every", "8", "--group", "4", "--lr", "2e-3", "--steps", "240"],
}
KEPT = ("eval/mean", "reward/mean", "distill/divergence", "distill/agreement", "distill/kl_sampled")
KEPT += ("rollout/length_mean",)
SMOLLM2 = ROOT / "docs" / "results" / "smollm2" / "distillation.json"
SUM = ["--data", "addition:2", "--template", r"{question} Put the answer in \boxed{{}}.", "--system", ""]
SUM += ["--max-new", "10"]
ANSWER = ["--hint", r"{question} Put the answer in \boxed{{}}. The answer is \boxed{{{answer}}}."]
# what the teacher, the GRPO run, sees -> (the run that the student starts from, steps, options)
STUDENTS = {
    "the same prompt": ("sft", "24", ["--lr", "2e-5"]),
    "the answer, reverse KL": ("sft", "60", [*ANSWER, "--lr", "2e-5"]),
    "the answer, forward KL": ("sft", "24", [*ANSWER, "--lr", "2e-5", "--loss", "forward_kl"]),
    "the answer, forward KL, slower": ("sft", "24", [*ANSWER, "--lr", "4e-6", "--loss", "forward_kl"]),
    "the answer, from the GRPO run on": ("grpo", "24", [*ANSWER, "--lr", "5e-6"]),
}
STUDENT = shlex.split(
    "--reward boxed --prompts 16 --group 4 --lr-end 1 --warmup 2 --budget 1024 "
    "--eval-every 6 --eval-prompts 100 --save-every 100"
)
HEADS = {"SmolLM2-135M": (576, 49152), "Qwen2.5-0.5B": (896, 151936)}
TOKENS = 1024


def run(script, out, options):
    """The metrics of a run, and how many responses a step has."""
    rows = trained(script, out, *options, cwd=ROOT, stdout=subprocess.DEVNULL)
    config = json.loads((out / "config.json").read_text())
    each = config["prompts"] * config["group"]
    found = {"responses": each}
    for name in KEPT:
        found[name] = {str(x["step"]): round(x[name], 4) for x in rows if x.get(name) is not None}
    return found


def seen(x):
    """(responses, score on unseen prompts) of each evaluation: before the first step, then after some."""
    steps = [int(step) for step in x["eval/mean"]]
    return [((s + 1 if s else 0) * x["responses"], x["eval/mean"][str(s)]) for s in steps]


def needed(x, level):
    """The responses at the first evaluation with a score of `level`; None if there is none."""
    return next((count for count, score in seen(x) if score >= level), None)


def curves(found):
    """The table of responses that each way needed."""
    lines = ["| | " + " | ".join(f"score {x}" for x in LEVELS) + " | at the end |", "|---|" + "---|" * 4]
    for way in (*GRPO, *WAYS):
        runs = [found["runs"][f"{way}, seed {seed}"] for seed in SEEDS]
        cells = []
        for level in LEVELS:
            cells.append(" / ".join("-" if (n := needed(x, level)) is None else f"{n:,}" for x in runs))
        cells.append(" / ".join(f"{seen(x)[-1][1]:.3f}" for x in runs))
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory(found):
    """The table of the memory of both heads."""
    lines = ["| heads | logits [T, V] of both | whole | in chunks | 64 words |", "|---|---|---|---|---|"]
    for name, x in found["memory"].items():
        width, size = HEADS[name]
        both = 2 * TOKENS * size * 4 / 2**20
        cells = " | ".join(f"{x[way]:,.0f} MiB" for way in ("whole", "chunks", "words"))
        lines.append(f"| {name} (D {width}, V {size:,}) | {both:,.0f} MiB | {cells} |")
    return "\n".join(lines)


def head_peak(way, width, size):
    """MiB above the inputs and the gradients that forward and backward of one comparison take."""
    import resource

    from rft_fn import logprob, loss

    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    h, t = torch.randn(2, TOKENS, width, generator=g)
    w = torch.randn(size, width, generator=g) * 0.05
    v = torch.randn(size, width, generator=g) * 0.05
    words = torch.randint(0, size, (TOKENS, 64), generator=g)
    h.requires_grad_()
    w.requires_grad_()
    h.grad, w.grad = torch.zeros_like(h), torch.zeros_like(w)
    w.grad.fill_(0.0)
    spare = torch.ones_like(w)  # the gradient of the weight before it is added
    del spare
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def by_states(logp, states):
        return loss.reverse_kl(logp, logprob.logits(states, v).log_softmax(-1))

    def by_words(logp, these, theirs):
        return loss.reverse_kl(loss.with_tail(logp.gather(-1, these)), loss.with_tail(theirs))

    if way == "whole":
        x = by_states((h @ w.T).log_softmax(-1), t)
    elif way == "chunks":
        x = logprob.linear_rows(by_states, h, w, t)
    else:
        theirs = torch.full((TOKENS, 64), 1 / 128).log()
        x = logprob.linear_rows(by_words, h, w, words, theirs)
    x.sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def measured_memory():
    """The peak of each way, in a process for each."""
    found = {}
    for name, (width, size) in HEADS.items():
        found[name] = {}
        for way in ("whole", "chunks", "words"):
            command = [sys.executable, __file__, "--head", way, str(width), str(size)]
            done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            found[name][way] = float(done.stdout)
    return found


def draw(found):
    """Scores over responses, and what the student's distributions are like."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 4, figsize=(13, 3.2))
    for i, way in enumerate((*GRPO, *WAYS)):
        for seed in SEEDS:
            x = found["runs"][f"{way}, seed {seed}"]
            label = way if seed == 0 else None
            axes[0].plot(*zip(*seen(x), strict=True), f"C{i}", label=label, lw=1)
            at = lambda name, x=x: (  # noqa: E731
                [int(s) * x["responses"] for s in x[name]],
                list(x[name].values()),
            )
            axes[1].plot(*at("distill/kl_sampled"), f"C{i}", lw=1)
            axes[2].plot(*at("distill/agreement"), f"C{i}", lw=1)
            axes[3].plot(*at("rollout/length_mean"), f"C{i}", lw=1)
    titles = "score on unseen prompts", "KL to the teacher [nats per token]", "share of equal top-1 words"
    for ax, title in zip(axes, (*titles, "tokens of a response"), strict=True):
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlabel("responses sampled", fontsize=8)
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter("")
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    fig.legend(fontsize=8, ncols=6, loc="lower center", frameon=False)
    fig.tight_layout(rect=(0, 0.07, 1, 1))
    fig.savefig(PICTURE, dpi=110, metadata={"Software": None})


# ---------- a language model


def evaluated(model, out, temperature):
    """The share of right answers to 200 questions that no training saw."""
    command = [sys.executable, str(ROOT / "train_scripts" / "evaluate.py"), "--model", str(model), *SUM]
    command += ["--reward", "boxed", "--count", "200", "--temperature", str(temperature), "--out", str(out)]
    if not out.exists():
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())["result"]["avg@1"]


def smollm2(runs):
    """The curves of the GRPO run and of the students, and their answers at the end."""
    ends = {"sft": runs / "sft", "grpo": runs / "grpo"}
    found = {"runs": {"GRPO": run("grpo", runs / "grpo", [])}, "right": {}}
    teacher = ["--teacher", str(runs / "grpo")]
    for name, (start, steps, more) in STUDENTS.items():
        ends[name] = runs / name.replace(",", "").replace(" ", "_")
        given = [*SUM, *STUDENT, "--steps", steps, *more]
        student = ["--model", str(runs / start / "model")]
        found["runs"][name] = run("distill", ends[name], [*student, *teacher, *given]) | {"options": given}
    for name, folder in ends.items():
        found["right"][name] = {
            how: evaluated(folder / "model", folder / f"{how}.json", temperature)
            for how, temperature in {"sampled": 1, "greedy": 0}.items()
        }
    return found


def answers(found):
    """The table of right answers."""
    right, runs = found["right"], found["runs"]
    rows = {"SFT, where students start": ("sft", None), "GRPO, the teacher": ("grpo", runs["GRPO"])}
    rows |= {f"teacher sees {name}": (name, runs[name]) for name in STUDENTS}
    lines = ["| | responses | sampled | greedy |", "|---|---|---|---|"]
    for title, (name, x) in rows.items():
        count = "-" if x is None else f"{len(x['reward/mean']) * x['responses']:,}"
        cells = " | ".join(f"{100 * right[name][how]:.1f} %" for how in ("sampled", "greedy"))
        lines.append(f"| {title} | {count} | {cells} |")
    return "\n".join(lines)


def draw_smollm2(found):
    """Rewards of the samples and the KL to the teacher, over responses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for i, (name, x) in enumerate(found["runs"].items()):
        style = {"color": f"C{i}", "lw": 1.2, "label": name if name == "GRPO" else f"teacher sees {name}"}
        for ax, metric in zip(axes, ("reward/mean", "distill/kl_sampled"), strict=True):
            values = torch.tensor(list(x[metric].values())).unfold(0, 3, 1).mean(-1) if x[metric] else []
            ax.plot([(k + 3) * x["responses"] for k in range(len(values))], values, **style)
    titles = "samples that are right (mean of three steps)", "KL to the teacher [nats per token]"
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlabel("responses sampled", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(bottom=0)
    fig.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="lower center", frameon=False)
    fig.tight_layout(rect=(0, 0.13, 1, 1))
    fig.savefig(SMOLLM2.with_suffix(".png"), dpi=110, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "distillation")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--head", nargs=3)
    parser.add_argument("--smollm2", type=Path)
    args = parser.parse_args()
    if args.head:
        print(head_peak(args.head[0], int(args.head[1]), int(args.head[2])))
        return
    if args.smollm2:
        if not args.draw:
            SMOLLM2.write_text(json.dumps(made() | smollm2(args.smollm2)) + "\n")
        found = json.loads(SMOLLM2.read_text())
        draw_smollm2(found)
        put("docs/distillation.md", {"smollm2": answers(found)})
        return
    if not args.draw:
        found = made() | {"distill": DISTILL, "grpo": GRPO, "runs": {}}
        for seed in SEEDS:
            teacher = args.runs / f"grpo_{seed}"
            options = ["--seed", str(seed)]
            for out, (way, more) in zip((teacher, args.runs / f"few_{seed}"), GRPO.items(), strict=True):
                found["runs"][f"{way}, seed {seed}"] = run("grpo", out, [*more, *options])
            for way, more in WAYS.items():
                out = args.runs / f"{way.replace(' ', '_')}_{seed}"
                given = [*DISTILL, *more, *options, "--teacher", str(teacher)]
                found["runs"][f"{way}, seed {seed}"] = run("distill", out, given)
        found["memory"] = measured_memory()
        OUT.write_text(json.dumps(found) + "\n")
    found = json.loads(OUT.read_text())
    draw(found)
    put("docs/distillation.md", {"curves": curves(found), "memory": memory(found)})


if __name__ == "__main__":
    main()
