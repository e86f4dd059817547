"""Engines, measured on one machine: `.venv-vllm/bin/python tests/bench/engines.py --measure --write`.

SmolLM2-135M in float32, the same prompts for all: tokens/s of each engine in turns, the seconds of a step
with an update and a sync, those of a sync, and those of each guard. `--measure` writes
docs/results/engines.json, `--write` the tables of docs/engines.md from it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import made, processor

import rft_fn as rft
from rft_fn import collect, engine, model, sync
from rft_fn.collect import asynchronous

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "vllm"), str(ROOT / "tests" / "bench")]
DATA = ROOT / "docs" / "results" / "engines.json"
MODEL = "smollm2-135m"
SILENT = "<empty_output>"  # a token that the model never says
BUDGET = 1024  # tokens of a pack


# ---------- what is measured with


def endless(folder):
    """A copy of the model that never ends a response: every engine samples the same number of tokens."""
    source = Path(model.resolve(MODEL))
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    silent = model.load_tokenizer(str(source)).convert_tokens_to_ids(SILENT)
    changes = {"config.json": silent, "generation_config.json": silent, "tokenizer_config.json": SILENT}
    for name, end in changes.items():
        found = json.loads((source / name).read_text())
        key = "eos_token" if end is SILENT else "eos_token_id"
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(found | {key: end}))
    return str(folder)


def questions(count):
    """Short prompts of several lengths."""
    sums = [f"What is {7 * i + 3} + {5 * i + 4}?" for i in range(count)]
    return [question + " Explain each step." * (i % 3) for i, question in enumerate(sums)]


class Trainer:
    """A policy with its optimizer, and one update of it."""

    def __init__(self, folder):
        self.st = rft.strategy.get_strategy()
        self.apply, self.state = self.st.init(model.load(folder), rft.optim.adamw(1e-5))

    def update(self, rollout):
        """Seconds of an update on a rollout."""
        began = time.perf_counter()
        adv = torch.randn(len(rollout.tokens), generator=torch.Generator().manual_seed(0))
        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        grads, _ = self.st.grad(self.state, self.apply, clipped, self.st.shard(exp, BUDGET))
        self.state, _ = self.st.update(self.state, grads)
        return time.perf_counter() - began

    def push(self, eng, version):
        """The record of a sync, with its seconds as the trainer sees them."""
        began = time.perf_counter()
        delivered = sync.push(self.st, self.state, eng, version=version)
        return delivered._replace(seconds=time.perf_counter() - began)


def clipped(out, b):
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)


def timed(call):
    """(seconds of a call, its value)."""
    began = time.perf_counter()
    value = call()
    return time.perf_counter() - began, value


# ---------- rollouts and steps


def one_ahead(trainer, calls, rollout, asked, version):
    """The seconds of a step whose update runs beside the rollout of the next step."""
    calls.seconds = 0.0
    began = time.perf_counter()
    trainer.push(calls.engine(), version)
    calls.begin(*asked[:2], **asked[2])
    update = trainer.update(rollout)
    at = time.perf_counter()
    found = calls.generate(*asked[:2], **asked[2])
    end = time.perf_counter()
    busy = calls.seconds
    assert int(found.mask.sum()) == int(rollout.mask.sum())
    return {"step": end - began, "update": update, "trainer_waits": end - at, "engine_busy": busy}


def measure_rollouts(trainer, engines, calls, args):
    """Seconds of each engine's rollout, of an update, of a sync and of a step ahead, in turns."""
    sampling = rft.Sampling(max_new=args.max_new)
    prompts = questions(args.prompts)
    warm = rft.Sampling(max_new=2)
    for eng in (*engines.values(), calls.engine()):
        eng.generate(prompts, range(args.prompts), n=args.group, sampling=warm)
    found = {"rollout": {name: [] for name in engines}, "update": [], "ahead": []}
    for turn in range(args.times):
        keys = [rft.rng.fold_in(turn, i) for i in range(args.prompts)]
        for name, eng in engines.items():
            trainer.push(eng, turn)
            seconds, rollout = timed(
                lambda eng=eng: eng.generate(prompts, keys, n=args.group, sampling=sampling)  # noqa: B023
            )
            assert int(rollout.mask.sum()) == args.prompts * args.group * args.max_new, name
            found["rollout"][name].append(seconds)
        threads = torch.get_num_threads()
        found["update"].append(trainer.update(rollout))
        torch.set_num_threads(args.threads - 1)
        asked = prompts, keys, {"n": args.group, "sampling": sampling}
        found["ahead"].append(one_ahead(trainer, calls, rollout, asked, turn))
        torch.set_num_threads(threads)
        print(turn, json.dumps(found), flush=True)
    return found, rollout, sampling


# ---------- weights and guards


def measure_sync(trainer, engines, folder, times):
    """What one sync sends to each engine, and its seconds."""
    found = {}
    for name, eng in engines.items():
        delivered = [trainer.push(eng, 100 + i) for i in range(times)]
        about = {"tensors": delivered[0].tensors, "bytes": delivered[0].bytes}
        found[name] = about | {"seconds": [x.seconds for x in delivered]}
    return found


def measure_guards(trainer, engines, folder, rollout, sampling, times):
    """Seconds of each guard."""
    from rft_fn.engine import weight_folder, worker

    st, state = trainer.st, trainer.state
    found = {"export": [], "manifest": [], "arrival": [], "comparison": [], "scoring": []}
    expected = weight_folder.manifest(model.load(folder))
    list(st.export(state))
    for i in range(times):
        bare, pairs = timed(lambda: list(st.export(state)))
        checked, _ = timed(lambda: list(sync.CheckedWeights(st.export(state), sync.manifest_of(state))))
        found["export"].append(bare)
        found["manifest"].append(checked - bare)
        trainer.push(engines["vLLM in process"], 200 + i)
        seconds, _ = timed(lambda: list(worker.checked(weight_folder.LoadCheck(expected, pairs), pairs, ())))  # noqa: B023
        found["arrival"].append(seconds)

    # the probe of a step compares log-probs that the update computes anyway; a correction scores them anew
    seconds, scored = timed(lambda: st.score(trainer.apply, state.params, rollout, BUDGET).logp)
    found["scoring"].append(seconds)
    for _ in range(times):
        found["comparison"].append(timed(lambda: collect.mismatch_metrics(scored, rollout))[0])
    for name in ("hf", "vLLM in process"):
        probe = sync.canary(st, state, engines[name], folder, questions(2), version=300)
        found[f"canary, {name}"] = [probe.seconds]
        found[f"canary gaps, {name}"] = [probe.noisy, probe.floor]
    return found


def measure(args):
    """All numbers, with what they were measured on."""
    import vllm
    from serving import Server

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as root:
        folder = endless(Path(root) / "model")
        tokenizer = model.load_tokenizer(folder)
        server = Server(Path(root) / "server.log", folder, threads=args.threads, window=256)
        try:
            server.wait()
            batch = {"batch": args.prompts * args.group}
            limits = batch | {"max_model_len": 256}
            configs = {
                "hf": engine.EngineConfig(**batch),
                "vLLM in process": engine.EngineConfig(type="vllm", **limits),
                "vLLM server": engine.EngineConfig(type="openai", servers=(server.url,), **batch),
            }
            engines = {name: engine.get_engine(c, folder, tokenizer) for name, c in configs.items()}
            apart, _ = asynchronous.split_threads(engine.EngineConfig(type="vllm", **limits), args.threads)
            calls = collect.EngineWorker(lambda: engine.get_engine(apart, folder, tokenizer))
            trainer = Trainer(folder)
            found, rollout, sampling = measure_rollouts(trainer, engines, calls, args)
            places = engines | {"vLLM in its own process": calls.target}
            found["sync"] = measure_sync(trainer, places, folder, args.times)
            found["guards"] = measure_guards(trainer, engines, folder, rollout, sampling, args.times)
            calls.close()
            for eng in engines.values():
                eng.close()
        finally:
            server.kill()
    about = made() | {"machine": processor(), "load": os.getloadavg()[0]}
    about |= {"vllm": vllm.__version__, "model": MODEL, "threads": args.threads}
    about |= {"prompts": args.prompts, "group": args.group, "max_new": args.max_new, "times": args.times}
    return about | found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    if args.measure:
        args.out.write_text(json.dumps(measure(args), indent=1) + "\n")
    if args.write:
        from engines_table import write

        write(json.loads(args.out.read_text()))


if __name__ == "__main__":
    main()
