"""Plans held against runs: `python tests/bench/plan.py --write`.

Measures rates by `rft plan`'s own two short runs of a plain setting, predicts eleven settings from them,
runs each for a few steps, and prints the errors. Four more are by servers of vLLM, from runs by two of them:
they need a Python that has it (.venv-vllm/bin/python), and stay as they were without. Then, without a run,
the steps of a 7B model on 16 to 10,000 GPUs by the table of cards. With --write it keeps plan.json and
plan.png in docs/results, and the tables of docs/scaling.md. `--only plain,ahead` takes some of the settings,
`--only servers` those by servers, `--only scale` the last part alone. About 20 minutes on two quiet cores.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from record import made, processor, put

import rft_fn as rft
from rft_fn.tools.page.recorded import read
from rft_fn.tools.plan import cards, gantt, lengths, measured, planned_command
from rft_fn.tools.plan.simulation import PHASES, Setting, simulate

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
# at this temperature each token of the tiny model may be the last one: responses are long-tailed
PLAIN = (
    "--temperature 5 --max-new 96 --prompts 16 --group 8 --steps 9 --lr 1e-6 --save-every 4 "
    "--eval-every 1000 --eval-prompts 1 --tokens-every 0 --noise-every 0"
)
SECONDS = 1.0  # of the slow reward
CASES = {
    "plain": "",
    "groups of 4": "--group 4",
    "groups of 32": "--group 32",
    "48 prompts": "--prompts 48",
    "responses of 32 tokens at most": "--max-new 32",
    "ahead 1": "--ahead 1",
    "ahead 2": "--ahead 2",
    "partial 24": "--partial 24",
    "slow reward": "--reward {folder}/slow.py:slow",
    "two ranks, an engine each": "",
    "two ranks, one engine of two killed": "--reward {folder}/kill.py:kill",
}
RATES = {"8 prompts": "--prompts 8", "16 prompts": ""}  # by two servers
SERVED = {
    "two servers": "",
    "two servers, groups of 4": "--group 4",
    "two servers, ahead 1": "--ahead 1",
    "two ranks, two servers": "",
}
SLOW = f"""import time


def slow(completions, **columns):
    time.sleep({SECONDS})
    return [0.1 * (len(text) % 7) for text in completions]
"""
KILL = """import os, signal
from pathlib import Path

calls = []


def kill(completions, **columns):
    calls.append(0)
    for stat in Path("/proc").glob("[0-9]*/stat") if len(calls) == 5 and os.environ["RANK"] == "1" else ():
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except OSError:
            pass  # it has ended meanwhile
    return [0.1 * (len(text) % 7) for text in completions]
"""


def restart():
    """Seconds until an engine in a process of its own is there."""
    began = time.perf_counter()
    rft.engine.get_engine(rft.engine.EngineConfig(process=True), "tiny")
    return time.perf_counter() - began


def command(case, folder, urls=()):
    """The words of a setting; what stands later replaces what stands before."""
    given = dict(zip(PLAIN.split()[::2], PLAIN.split()[1::2]))
    words = (CASES | SERVED | RATES)[case].format(folder=folder).split()
    given |= dict(zip(words[::2], words[1::2]))
    if urls:
        given |= {
            "--temperature": "2",  # the highest that vLLM takes
            "--steps": "25",  # a server that computes on a CPU takes requests late, so steps differ much
            "--strategy.engine-type": "openai",
            "--strategy.engine-servers": " ".join(urls),
        }
    start = "torchrun --nproc-per-node 2 -m rft_fn" if "ranks" in case else "rft"
    if "killed" in case:
        given |= {"--strategy.engine-process": ""}
    return f"{start} run grpo " + " ".join(f"{name} {x}" for name, x in given.items())


def run(text, out):
    """Run a command; return its folder."""
    words = text.split()
    at = words.index("run")
    start = [sys.executable, "-m", "rft_fn"]
    if words[0] == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rft_fn"]
    done = subprocess.run([*start, *words[at:], "--out", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{text}: {done.stderr.strip().splitlines()[-1]}")
    return out


def hold(cases, folder, urls=()):
    """Each setting predicted and measured, and the timeline and phases of one for the picture."""
    (folder / "slow.py").write_text(SLOW)
    (folder / "kill.py").write_text(KILL)
    began = time.perf_counter()
    if urls:  # as a user gives them with --measured
        folders = [run(command(case, folder, urls), folder / case) for case in RATES]
    else:
        folders = measured.measure(
            planned_command.read(command("plain", folder), on_gpu=False), folder / "rates"
        )
    spent = time.perf_counter() - began
    found = measured.rates(folders)
    law = lengths.of_runs([read(x) for x in folders])
    rows, shown = {}, None
    for i, case in enumerate(cases):
        planned = planned_command.read(command(case, folder, urls), on_gpu=False)
        x = planned_command.setting(
            planned, steps=99, prompt_tokens=found.prompt_tokens, learned=found.learned
        )
        rates = found.rates
        if case == "slow reward":  # its user knows that
            rates = replace(rates, judge=SECONDS, judge_row=0.0)
        t = simulate(x, rates, law)
        phases = measured.phase_table(read(run(command(case, folder, urls), folder / str(i))))
        steps, real = t.step_seconds[1:], phases["wall"]
        if "killed" in case:  # once, and the others wait for a new one
            steps = steps + restart() / len(real)
        of = (t.end - t.begin)[1:]
        rows[case] = {
            "predicted": float(steps.mean()),
            "measured": float(real.mean()),
            "error": float(steps.mean() / real.mean() - 1),
            "generate": [float(of[:, 0].mean()), float(phases["generate"].mean())],
            "train": [float(of[:, PHASES.index("train")].mean()), float(phases["train"].mean())],
        }
        print(f"{case:<32}{steps.mean():8.2f} s predicted {real.mean():8.2f} s measured", flush=True)
        if shown is None or case == "ahead 1":
            shown = t, phases, case
    return {"rates": vars(found.rates), "seconds_of_rates": spent, "settings": rows}, shown


def hold_servers(folder):
    """The settings by two servers of vLLM, which run as long as it takes."""
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    from serving import Server

    servers = [Server(folder / f"log{i}") for i in range(2)]
    try:
        for server in servers:
            server.wait()
        return hold(SERVED, folder, [server.url for server in servers])[0]
    finally:
        for server in servers:
            server.kill()


def table(kept):
    """A line for each setting."""
    rows = kept["settings"] | kept["servers"]["settings"]
    out = [
        "| setting | a step, predicted | measured | error | generate | train |",
        "|---|---|---|---|---|---|",
    ]
    for case, x in rows.items():
        parts = [f"{a:.2f} s, {b:.2f}" for a, b in (x["generate"], x["train"])]
        out.append(
            f"| {case} | {x['predicted']:.2f} s | {x['measured']:.2f} s | {x['error']:+.0%} "
            f"| {parts[0]} | {parts[1]} |"
        )
    worst = max(abs(x["error"]) for x in rows.values())
    middle = float(np.median([abs(x["error"]) for x in rows.values()]))
    return "\n".join([*out, "", f"The median error is {middle:.0%}, the largest {worst:.0%}."])


SEVEN = cards.Shape(7_615_616_512, 7_615_616_512, 28, 3584, 2 * 28 * 4 * 128)  # Qwen2.5-7B
GPUS = (16, 64, 256, 1024, 4096, 10_000)


CHANGES = {
    "deliver": "each server hands the weights on to the next",
    "gather": "a rank reads the responses of its own packs, and numbers of the others",
    "plan": "each rank plans a part of the packs",
}


def scaled(gpus):
    """A setting for so many GPUs, of which half sample; rates as the program is, and as it could be."""
    half = gpus // 2
    x = Setting(
        steps=6, prompts=2 * gpus, group=16, max_new=16384, prompt_tokens=500, ahead=1, ranks=half,
        engines=half, servers=True, rows=64, budget=16384, scores=1,
    )  # fmt: skip
    law = lengths.lognormal(4000, 0.8)
    mean = 500 + lengths.mean(law, most=16384)
    now = cards.rates(x, SEVEN, cards.machine("H100"), length=mean, checkpointing=True)
    changed = replace(
        now,
        deliver=now.deliver * (1 + math.log2(half)) / half,
        gather=now.gather / half,
        plan=now.plan / half,
    )
    return x, law, now, changed


def scale():
    """The step of a 7B model over GPUs, half of them engines: as built, and with one change after another."""
    rows, order = [], [*CHANGES]
    for gpus in GPUS:
        x, law, now, changed = scaled(gpus)

        def step(rates, x=x, law=law):
            return float(simulate(x, rates, law).step_seconds[2:-1].mean())

        began = time.perf_counter()
        t = simulate(x, now, law)
        spent = time.perf_counter() - began
        phases = dict(zip(PHASES, (t.end - t.begin)[2:-1].mean(0).tolist()))
        rows.append(
            phases
            | {
                "gpus": gpus,
                "rows": x.prompts * x.group,
                "step": float(t.step_seconds[2:-1].mean()),
                "deliver": now.deliver * x.engines,
                "rollout": float(np.diff(t.sampled[2:-1]).mean()),
                "host": 13 * float(t.tokens.mean() + x.prompt_tokens * x.prompts * x.group),
                "changed": {
                    name: step(replace(now, **{other: getattr(changed, other) for other in order[: i + 1]}))
                    for i, name in enumerate(order)
                },
                "tokens": float(t.tokens.mean() / t.step_seconds[2:-1].mean() / gpus),
                "simulated": spent,
            }
        )
        print(f"{gpus:>6} GPUs: {rows[-1]['step']:.0f} s a step, simulated in {spent:.1f} s", flush=True)
    return rows


def scale_table(rows):
    """A line for each number of GPUs."""
    out = [
        "| GPUs | responses | rollout of an engine | weights to all engines | trainer waits | gather, plan "
        "| score and train | rollout on each host | a step | tokens/s a GPU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in rows:
        out.append(
            f"| {x['gpus']:,} | {x['rows']:,} | {x['rollout']:,.0f} s | {x['deliver']:,.0f} s "
            f"| {x['generate']:,.0f} s | {x['gather']:,.0f} s | {x['score'] + x['train']:,.0f} s "
            f"| {x['host'] / 2**30:.1f} GiB | **{x['step']:,.0f} s** | {x['tokens']:,.0f} |"
        )
    return "\n".join(out)


def _line(what, numbers):
    return f"| {what} | {' | '.join(f'{x:,.0f}' for x in numbers)} |"


def change_table(rows):
    """A line for each change, on top of those before it."""
    head = [f"{x['gpus']:,} GPUs" for x in rows]
    out = [f"| seconds of a step | {' | '.join(head)} |", "|---" * (1 + len(rows)) + "|"]
    out.append(_line("as it is", [x["step"] for x in rows]))
    for name, what in CHANGES.items():
        out.append(_line(f"+ {what}", [x["changed"][name] for x in rows]))
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    only = [x for x in args.only.split(",") if x]
    file = RESULTS / "plan.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    tables = {}
    facts = made() | {"processor": processor(), "load": os.getloadavg()[0]}
    cases = [case for case in CASES if not only or any(case.startswith(x) for x in only)]
    if cases:
        with tempfile.TemporaryDirectory() as folder:
            held, shown = hold(cases, Path(folder))
        kept |= facts | held
        if args.write:
            gantt.draw(shown[0], RESULTS / "plan.png", measured=shown[1])
    if (not only or "servers" in only) and find_spec("vllm"):
        with tempfile.TemporaryDirectory() as folder:
            kept["servers"] = facts | hold_servers(Path(folder))
    if only != ["scale"]:
        tables["plan"] = table(kept)
    if not only or "scale" in only:
        kept["scale"] = scale()
        tables |= {"plan-scale": scale_table(kept["scale"]), "plan-changes": change_table(kept["scale"])}
    print("\n\n".join(tables.values()))
    if args.write:
        file.write_text(json.dumps(kept, indent=1) + "\n")
        put("docs/scaling.md", tables)


if __name__ == "__main__":
    main()
