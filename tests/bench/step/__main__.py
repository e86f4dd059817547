"""A whole GRPO step by rft_fn, by TRL's GRPOTrainer, and by its matrix products alone, in turns.

    make bench-step                                          # an environment with TRL, then this script in it
    make bench-step STEP='--lengths equal tailed --prompts 8 --rounds 5 --write'
    make bench-step STEP='--rounds 1 --append'               # one more round, beside those in the folder
    python tests/bench/step --sides rft_fn products          # without TRL
    python tests/bench/step --sides rft_fn every_token       # with and without shared prompts
    make bench-step STEP='--flat 0.67'                       # two thirds of the groups have equal rewards

Same weights, prompts, number and length of responses. Each turn is a process: it loads the model, makes a
step that is not counted, and measures the next one. All seconds stand in the results by the clock on
the wall and by the processor: on a machine with other work the second is the better one.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import report
from case import LENGTHS, Case, weights, window
from worker import SIDES

import rft_fn as rft
from rft_fn.limits import Count, Share

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Config:
    model: str = "smollm2-135m"  # as in grpo.py; its shape with random weights where it cannot be fetched
    device: str = "cpu"  # or cuda, where the weights are in bfloat16 on both sides
    lengths: tuple[str, ...] = ("equal",)  # of the responses: equal, tailed (log-normal, up to 4 x tokens)
    prompts: Count = 4
    group: Count = 8  # responses to a prompt
    tokens: Count = 64  # of a response; the median of long-tailed ones is 0.7 of it
    rounds: Count = 3  # turns of each side
    steps: Count = 1  # measured steps of a turn
    micro: Count = 8  # responses a backward of TRL, which divide prompts x group
    budget: Count = 1024  # tokens a pack of rft_fn
    flat: Share = 0.0  # of the prompts, whose responses have equal rewards
    liger: bool = False  # Liger's kernels in TRL
    sides: tuple[str, ...] = ("rft_fn", "trl", "products")
    out: str = "runs/bench-step"  # folder of step.json and step.png
    append: bool = False  # more rounds beside those that the folder has
    write: bool = False  # put the data, the picture and the tables into docs/ too


def check(cfg: Config) -> Config:
    """The options that can be run here; ValueError for those that cannot."""
    for name, given, known in (("lengths", cfg.lengths, LENGTHS), ("sides", cfg.sides, tuple(SIDES))):
        wrong = [x for x in given if x not in known]
        if wrong or not given:
            raise ValueError(f"{name}: expected {', '.join(known)}, got {', '.join(wrong) or 'none'}")
    if cfg.device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda, got {cfg.device}")
    if cfg.prompts * cfg.group % cfg.micro:
        size = cfg.prompts * cfg.group
        raise ValueError(f"micro: expected a divisor of prompts x group = {size}, got {cfg.micro}")
    if "trl" in cfg.sides and find_spec("trl") is None:
        raise ValueError(
            "sides: expected none but rft_fn, products, as TRL is not installed, got trl; make bench-step"
        )
    if cfg.liger and (find_spec("liger_kernel") is None or cfg.device == "cpu"):
        print("liger: left out, its kernels need a GPU and the package liger-kernel")
        return dataclasses.replace(cfg, liger=False)
    return cfg


def turn(side: str, case: Case) -> dict:
    """What a process of one side measured, and the share of the machine that others had meanwhile."""
    command = [sys.executable, str(WORKER), side, json.dumps(dataclasses.asdict(case))]
    env = dict(os.environ)
    if case.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # models go to a GPU where they see one
    before, start = report.processor(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(
            f"{side}: expected a measurement, got exit status {done.returncode}\n{done.stderr[-4000:]}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return found | {"others": report.others(before), "whole": time.perf_counter() - start}


def same_tokens(rows: dict[str, dict]) -> None:
    """ValueError where two sides had other numbers of tokens: their seconds could not be compared."""
    sizes = {side: (x["steps"][0]["prompt"], x["steps"][0]["response"]) for side, x in rows.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"tokens: expected the same (of prompts, of responses) on each side, got {sizes}")


def begun(cfg: Config, word: str, path: Path) -> dict:
    """The results without a turn, or with `append` those at `path`, of the same step on the same machine.

    ValueError where they are of another one: no ratio could be taken between them.
    """
    kept = {k: x for k, x in dataclasses.asdict(cfg).items() if k not in ("out", "write", "append")}
    new = {"made": report.made(cfg.device), "weights": word, "command": report.command("step", sys.argv[1:])}
    new |= {"config": json.loads(json.dumps(kept)), "turns": []}
    if not cfg.append or not path.exists():
        return new

    # lengths, rounds and sides may differ: they only say which turns are made
    old = json.loads(path.read_text())
    for name in ("weights", *(k for k in kept if k not in ("lengths", "rounds", "sides"))):
        had, got = (x.get(name, x["config"].get(name)) for x in (old, new))
        if had != got:
            raise ValueError(f"append: expected {name} {had} as in {path}, got {got}")
    for name in ("processor", "cores", "threads", "versions"):
        had, got = old["made"][name], new["made"][name]
        if had != got:
            raise ValueError(f"append: expected {name} {had} as in {path}, got {got}")
    return old


def main(cfg: Config) -> None:
    """Measure in turns; after each round the results so far are on the disk."""
    cfg = check(cfg)
    folder, word = weights(cfg.model)
    print(f"weights: {word}", flush=True)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    found = begun(cfg, word, out / "step.json")

    names = [f.name for f in dataclasses.fields(Case)]
    options = {name: x for name, x in dataclasses.asdict(cfg).items() if name in names}
    options |= {"model": folder, "short": window(folder) < 1024}
    for lengths in cfg.lengths:
        case = Case(**options | {"lengths": lengths})
        before = len({x["round"] for x in found["turns"] if x["lengths"] == lengths})
        for i in range(before, before + cfg.rounds):
            # the order of sides alternates, so that none is always the one after another
            order = cfg.sides[:: 1 - 2 * (i % 2)]
            rows = {}
            for side in order:
                rows[side] = turn(side, case)
                print(f"{lengths} {i + 1}/{before + cfg.rounds} {report.line(side, rows[side])}", flush=True)
            same_tokens(rows)
            found["turns"] += [{"lengths": lengths, "round": i, "side": side} | x for side, x in rows.items()]
            (out / "step.json").write_text(json.dumps(found, indent=1) + "\n")

    for lengths in dict.fromkeys(x["lengths"] for x in found["turns"]):
        print("\n" + report.table(found, lengths))
        print(*report.ratios(found, lengths), sep="\n")
    report.picture(found, out / "step.png")
    if cfg.write:
        report.write(found, out, ROOT)
    print(f"\n{out / 'step.json'}, {out / 'step.png'}")


if __name__ == "__main__":
    rft.run.cli(main, Config)
