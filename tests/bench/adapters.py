"""Trained adapters to engines by every way: `.venv-vllm/bin/python tests/bench/adapters.py --measure`.

SmolLM2-135M with adapters of rank 8 on all linear layers: bytes and seconds of a load, and tokens/s of vLLM
with merged weights and with adapters beside its layers. With `--random` a model of Qwen3-0.6B's shape and
random weights, without vLLM in process. `--measure` writes docs/results/adapters.json or
adapters_random.json, and `--write` the table of docs/engines.md from it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import made, processor, put

import rft_fn as rft
from rft_fn import engine, model, sync

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "vllm")]
RESULTS = ROOT / "docs" / "results"
SMOLLM = "smollm2-135m"
RANK = 8


def random_model(folder):
    """Write a model of Qwen3-0.6B's shape with random weights and the other model's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    model.load_tokenizer(SMOLLM).save_pretrained(folder)
    return str(folder)


def trainer(name, dtype=torch.float32):
    """(strategy, state) of the model with adapters."""
    module = model.apply_lora_configuration(model.load(name, dtype=dtype), RANK, 64)
    st = rft.strategy.get_strategy()
    return st, st.init(module, rft.optim.adamw(1e-5))[1]


def step(state, seed):
    """About what AdamW does to the adapters in a step at a learning rate of 1e-5."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in state.params.values():
            p.add_(1e-5 * torch.randn(p.shape, generator=g).sign())


def pushes(st, state, eng, times, folder=None):
    """Bytes that travelled and seconds of each push, after a first one that is not counted."""
    found = {"bytes": [], "seconds": []}
    for version in range(times + 1):
        step(state, version)
        began = time.perf_counter()
        delivered = sync.push(st, state, eng, version=version)
        taken = time.perf_counter() - began
        if version:
            found["seconds"].append(taken)
            found["bytes"].append(on_disk(folder) if folder else delivered.bytes)
    return found


def on_disk(folder):
    """Bytes of the smallest folder of weights in `folder`: of a difference, where there is one."""
    sizes = [sum(x.stat().st_size for x in each.iterdir()) for each in Path(folder).iterdir()]
    return min(sizes)


def speed(eng, args):
    """Tokens/s of a rollout."""
    prompts = [list(range(10 + i, 30 + i)) for i in range(16)]
    sampling = rft.Sampling(max_new=args.max_new)
    rates = []
    for turn in range(args.times):
        began = time.perf_counter()
        rollout = eng.generate(prompts, [turn * 16 + i for i in range(16)], n=4, sampling=sampling)
        rates.append(int(rollout.mask.sum()) / (time.perf_counter() - began))
    return rates[1:]


def measure(args, name):
    """All numbers of a model, with what they were measured on."""
    import vllm
    from serving import Server

    torch.set_num_threads(args.threads)
    tokenizer = model.load_tokenizer(name)
    about = made() | {"machine": processor(), "load": os.getloadavg()[0], "vllm": vllm.__version__}
    about |= {"threads": args.threads, "times": args.times, "sync": {}, "speed": {}}
    if args.only:  # the others as they were
        about = json.loads(args.out.read_text())

    def wanted(way):
        if args.random and way.startswith("vLLM in process"):
            return False
        return not args.only or way in args.only

    def built(**options):
        return engine.get_engine(engine.EngineConfig(batch=64, lora_rank=RANK, **options), name, tokenizer)

    def note(way, eng, st, state, folder=None):
        about["sync"][way] = pushes(st, state, eng, args.times, folder)
        print(way, json.dumps(about["sync"][way]), flush=True)

    st, state = trainer(name)
    for way, options in {
        "hf, merged": {},
        "hf in another process, merged": {"process": True, "adapters": "merged"},
        "hf in another process, alone": {"process": True},
    }.items():
        if wanted(way):
            eng = built(**options)
            note(way, eng, st, state)
            eng.close()
    for way in ("merged", "alone"):
        if not wanted(f"vLLM in process, {way}"):
            continue
        eng = built(type="vllm", adapters=way, max_model_len=256)
        note(f"vLLM in process, {way}", eng, st, state)
        about["speed"][way] = speed(eng, args)
        print(about["speed"], flush=True)
        eng.close()

    if not any(wanted(way) for way in WAYS if way.startswith("a server")):
        return about
    with tempfile.TemporaryDirectory() as root:
        server = Server(Path(root) / "log", name, threads=args.threads, window=256, rank=RANK)
        try:
            server.wait()
            served = {"type": "openai", "servers": (server.url,)}
            eng = built(**served, adapters="alone")  # before the base model is another one
            if wanted("a server, alone"):
                note("a server, alone", eng, st, state)
            eng.close()
            served["adapters"] = "merged"
            if wanted("a server, channel"):
                eng = built(**served, transfer="rft")
                note("a server, channel", eng, st, state)
                eng.close()
            del st, state  # the host has few copies of a large model
            for way, dtype in (
                ("a server, folder", torch.float32),
                ("a server, difference", torch.bfloat16),
            ):
                if not wanted(way):
                    continue
                folder = Path(root) / way.replace(" ", "-")
                eng = built(**served, transfer="folder", weights=str(folder))
                note(way, eng, *trainer(name, dtype), folder)
                eng.close()
        finally:
            server.kill()
    return about


WAYS = {
    "hf, merged": ("hf in the trainer's process", "merged, a copy"),
    "hf in another process, merged": ("hf in another process", "merged, by shared memory"),
    "hf in another process, alone": ("hf in another process", "**alone**, merged there"),
    "vLLM in process, merged": ("vLLM in the trainer's process", "merged, its layerwise reload"),
    "vLLM in process, alone": ("vLLM in the trainer's process", "**alone**"),
    "a server, folder": ("a vLLM server", "merged, a whole folder in float32"),
    "a server, channel": ("a vLLM server", "merged, the channel `rft`"),
    "a server, difference": ("a vLLM server", "merged, a folder of differences in bfloat16"),
    "a server, alone": ("a vLLM server", "**alone**, a folder"),
}


def table(found, shown):
    """The table of docs/engines.md of a model, and what it was measured on."""
    lines = [
        f"{found['machine']}, {found['cores']} cores, load {found['load']:.0f}, torch {found['torch']}, vLLM "
        f"{found['vllm']}, {found['date']}. {shown}, adapters of rank {RANK} on all linear layers, "
        f"medians of {found['times']} loads (`tests/bench/adapters.py`).",
        "",
        "| to | by | MB | seconds |",
        "|---|---|---|---|",
    ]
    for way, (to, by) in WAYS.items():
        if way not in found["sync"]:
            continue
        x = found["sync"][way]
        size, taken = (statistics.median(x[key]) for key in ("bytes", "seconds"))
        lines.append(f"| {to} | {by} | {size / 1e6:.1f} | {taken:.2f} |")
    if found["speed"]:
        merged, alone = (statistics.median(found["speed"][way]) for way in ("merged", "alone"))
        lines += [
            "",
            f"vLLM in process sampled {merged:.0f} tokens/s by merged weights, {alone:.0f} by adapters "
            "alone.",
        ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--random", action="store_true", help="the larger model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-new", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="measure these ways anew")
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    key = "adapters_random" if args.random else "adapters"
    args.out = args.out or RESULTS / f"{key}.json"
    if args.measure:
        with tempfile.TemporaryDirectory() as folder:
            name = random_model(folder) if args.random else SMOLLM
            args.out.write_text(json.dumps(measure(args, name), indent=1) + "\n")
    if args.write:
        shown = "A random model of Qwen3-0.6B's shape" if args.random else "SmolLM2-135M"
        put("docs/engines.md", {key: table(json.loads(args.out.read_text()), shown)})


if __name__ == "__main__":
    main()
