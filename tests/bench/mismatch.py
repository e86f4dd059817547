"""Corrections of a mismatch: `python tests/bench/mismatch.py --runs runs/mismatch`.

Runs train_scripts/grpo.py on the embedded default with an engine that takes new weights only every few steps,
and with one that rounds them to bfloat16, without a correction and with each (a run that is there already is
not made again). Writes docs/results/mismatch.json and mismatch.svg.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from record import lines, made

import rft_fn as rft
from rft_fn.run.plot import running_mean
from rft_fn.strategy import StrategyConfig
from rft_fn.types.engine import Delivered

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
STALE = 4  # steps between two loads of the stale engine
STYLES = {"none": ("C0", "-"), "tis": ("C1", "-"), "mis": ("C2", "--"), "icepop": ("C3", ":")}
CASES = tuple(STYLES)
# no limit on the gap, since it is the subject here; no canary, since these engines would not pass it
OPTIONS = {"prompts": 16, "group": 16, "steps": 96, "lr_end": 1.0, "max_gap": 100.0, "gap_factor": 1e9}
OPTIONS |= {"eval_prompts": 64, "eval_every": 96, "canary": False}


def stale(engine):
    """The engine, which keeps the weights of every STALE-th version and takes no others."""

    def load(weights, *, version):
        if version % STALE == 0:
            return engine.load(weights, version=version)
        sizes = [x.numel() * x.element_size() for _, x in weights]
        return Delivered(len(sizes), sum(sizes), 0.0, version)

    return engine._replace(load=load)


def rounded(engine, dtype):
    """The engine with weights rounded to `dtype`, which it computes with in float32."""

    def load(weights, *, version):
        found = [(name, x.to(dtype).to(x.dtype)) for name, x in weights]
        return engine.load(found, version=version)

    return engine._replace(load=load)


def plain(engine):
    return engine


ENGINES = {
    "fresh": plain,
    f"new every {STALE} steps": stale,
    "rounded to bfloat16": partial(rounded, dtype=torch.bfloat16),
}


def run(wrap, correction, folder, grpo):
    """The rows of a run, which is made where it is not whole yet."""
    if not (folder / "model").exists():
        build = rft.engine.get_engine
        how = {"mismatch": correction, "out": str(folder), "strategy": StrategyConfig(engine_batch=512)}
        cfg = grpo.Config(**OPTIONS, **how)
        with mock.patch.object(rft.engine, "get_engine", lambda *args: wrap(build(*args))):
            grpo.main(cfg)
    return lines(folder / "metrics.jsonl")


def column(rows, name):
    return [float(f"{row[name]:.4g}") for row in rows if name in row]


def summary(rows):
    """The curves of a run, and the mean reward of its last steps."""
    names = ("reward/mean", *rft.collect.MISMATCH, "rollout/staleness", "mismatch/weight", "mismatch/cut")
    found = {name: column(rows, name) for name in names}
    found["last"] = sum(found["reward/mean"][-10:]) / 10
    found["eval"] = column(rows, "eval/mean")[-1]
    return found


def draw(found, path):
    """Reward and mismatch of each engine, one line for each correction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = [name for name in ENGINES if name != "fresh"]
    figure, axes = plt.subplots(2, len(cases), figsize=(10, 6.4), sharex=True, layout="constrained")
    for j, case in enumerate(cases):
        above, below = axes[:, j]
        above.plot(running_mean(found["fresh"]["none"]["reward/mean"], 8), color="0.6", label="fresh weights")
        for name, (color, dashes) in STYLES.items():
            style = {"color": color, "linestyle": dashes, "label": name}
            above.plot(running_mean(found[case][name]["reward/mean"], 8), **style)
            kl = running_mean(found[case][name]["policy/kl_sampler"], 8)
            below.plot(range(1, len(kl)), kl[1:], **style)  # at step 0 no engine is stale
        above.set(title=f"sampler's weights {case}", ylim=(0, 1), ylabel="reward, mean of 8 steps")
        below.set(xlabel="step", ylabel="KL(sampler, trainer) [nats/token]", yscale="log")
        for ax in (above, below):
            ax.grid(alpha=0.3)
        above.legend(fontsize=8)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/mismatch"), help="folder of the runs")
    folder = parser.parse_args().runs
    sys.path.insert(0, str(ROOT / "train_scripts"))
    import grpo

    found = {}
    for case, wrap in ENGINES.items():
        wanted = CASES
        if case == "fresh":
            wanted = ("none",)
        place = case.replace(" ", "_")
        found[case] = {name: summary(run(wrap, name, folder / place / name, grpo)) for name in wanted}
    about = made() | {"options": OPTIONS}
    (RESULTS / "mismatch.json").write_text(json.dumps({"made": about, "runs": found}) + "\n")
    draw(found, RESULTS / "mismatch.svg")
    for case, runs in found.items():
        for name, x in runs.items():
            kl = sum(x["policy/kl_sampler"]) / len(x["policy/kl_sampler"])
            print(f"{case:19} {name:7} reward {x['last']:.3f}  eval {x['eval']:.3f}  KL {kl:.2e}")


if __name__ == "__main__":
    main()
