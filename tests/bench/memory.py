"""The tables of docs/scaling.md: `python tests/bench/memory.py --write`.

Two are computed by `strategy.estimate` on the meta device (no weights, no GPU), for models whose shapes stand
below. One is measured, on four processes over gloo: the activations of a pack with sequence parallelism.
Writes docs/results/memory.json and the tables in docs/scaling.md.
"""

import argparse
import json
import sys
from functools import cache, partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.record import made, put

from rft_fn import optim
from rft_fn.strategy import StrategyConfig, estimate, get_strategy

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "memory.json"
GPU = 80e9  # bytes
BUDGET = 16384  # tokens per pack
SHAPES = {
    "0.5B": (
        "Qwen2",
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "7B": (
        "Qwen2",
        {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
    "70B": (
        "Llama",
        {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False},
    ),
}
BASE = {"use_mp_opt": True}
KNOBS = {
    "as in the table above": {},
    "no `gradient_checkpointing`": {"checkpointing": False},
    "no `fused_linear_logprob`": {"fused_linear_logprob": False},
    "`bf16` instead of `use_mp_opt`": {"use_mp_opt": False, "bf16": True},
    "`shard_size 2` (HSDP)": {"shard_size": 2},
    "`sp_size 2`": {"sp_size": 2},
    "`sp_size 4`": {"sp_size": 4},
    "packs of half the tokens": {"budget": BUDGET // 2},
    "`adam_offload`": {"adam_offload": True},
    "`fsdp_cpu_offload`": {"fsdp_cpu_offload": True},
    "`zero_stage 1`": {"zero_stage": 1},
    "`zero_stage 2`": {"zero_stage": 2},
    "`zero_stage 3`": {"zero_stage": 3},
    "an engine that stays awake": {"engine": True, "enable_engine_sleep": False},
}
COLUMNS = ("parameters", "gradients", "optimizer", "activations", "head", "backward", "gathered", "update")


@cache
def model(name, checkpointing=True):
    """A model of that shape without memory."""
    import transformers

    family, shape = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**shape, max_position_embeddings=32768)
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if checkpointing:
        lm.activation_checkpointing_enable({"use_reentrant": False})
    return lm


def row(name, world, *, checkpointing=True, budget=BUDGET, engine=False, **options):
    """The estimate of a model on `world` GPUs [bytes]."""
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-6))
    config = StrategyConfig(**{"fsdp": not options.get("zero_stage")} | BASE | options)
    shape = model(name, checkpointing)
    x = estimate(config, (shape, tx), budget=budget, world=world, engine=engine)
    if x.unknown:
        raise RuntimeError(f"{name}: expected a shape that runs without values, got {x.unknown}")
    phase = "forward and backward"
    if x.total == x.updating:
        phase = "update"
    return {c: getattr(x, c) for c in COLUMNS} | {"peak": x.total, "host": x.host, "phase": phase}


def small():
    """A Llama whose parameters are small beside the activations of 4,096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8}
    more = {"num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": True, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, max_position_embeddings=4096))


def split(rank, tokens):
    """{sp_size: bytes} of the same pack.

    "estimated", and allocated at the end of the forward ("forward") and at the peak of the step ("peak").
    """
    from test_memory import allocated, loss_fn, packs

    out = {}
    for sp in (1, 2, 4):
        st = get_strategy(StrategyConfig(sp_size=sp))
        lm, tx = small(), optim.adamw(1e-3)
        x = estimate(st.config, (lm, tx), budget=tokens, world=st.world, kind="cpu", engine=False)
        apply, state = st.init(lm, tx, entropy=True)
        pack = packs(tokens, 1)[0]

        def both(apply=apply, state=state, pack=pack):
            done = apply.together(state.params, pack)
            (pack.w * loss_fn(done, pack)).sum().backward()

        both()
        forward = min(allocated(partial(apply.together, state.params, pack))[2] for _ in range(3))
        peak = min(allocated(both)[1] for _ in range(3))
        out[sp] = {"estimated": x.activations, "forward": forward, "peak": peak}
    return out


def gib(n):
    """Bytes as GiB, with two digits below one."""
    if n >= 0.95 * 2**30:
        return f"{n / 2**30:.1f}"
    return f"{n / 2**30:.2f}"


def scale_table(rows):
    """A row for each model and number of GPUs."""
    lines = ["| model | GPUs | " + " | ".join(COLUMNS) + " | peak | in | 80 GB |"]
    lines.append("|---" * (len(COLUMNS) + 5) + "|")
    for key, x in rows.items():
        name, world = key.split(" on ")
        fits = "no"
        if x["peak"] <= GPU:
            fits = "fits"
        cells = " | ".join(gib(x[c]) for c in COLUMNS)
        lines.append(f"| {name} | {world} | {cells} | **{gib(x['peak'])}** | {x['phase']} | {fits} |")
    return "\n".join(lines)


def knob_table(rows):
    """A row for each option that is changed."""
    lines = [
        "| 7B on 8 GPUs | " + " | ".join(COLUMNS) + " | peak | host |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for name, x in rows.items():
        cells = " | ".join(gib(x[c]) for c in COLUMNS)
        host = ""
        if x["host"]:
            host = gib(x["host"])
        lines.append(f"| {name} | {cells} | **{gib(x['peak'])}** | {host} |")
    return "\n".join(lines)


def split_table(rows):
    """A row for each sp_size."""
    lines = [
        "| sp_size | held at the end of the forward, measured | estimated | peak of the step, measured |"
    ]
    lines.append("|---|---|---|---|")
    one = rows["1"]["forward"]
    for sp, x in rows.items():
        share = f"{x['forward'] / 2**20:.2f} MiB ({x['forward'] / one:.2f})"
        lines.append(f"| {sp} | {share} | {x['estimated'] / 2**20:.2f} MiB | {x['peak'] / 2**20:.2f} MiB |")
    return "\n".join(lines)


TABLES = {"scale": scale_table, "knobs": knob_table, "split": split_table}


def measured():
    """The contents of docs/results/memory.json."""
    import ranks

    found = ranks.run(4, "bench.memory:split", 4096)
    worst = {str(sp): {k: max(r[sp][k] for r in found) for k in found[0][sp]} for sp in found[0]}
    return {
        "made": made(),
        "scale": {f"{name} on {world}": row(name, world) for name in SHAPES for world in (1, 8, 64)},
        "knobs": {text: row("7B", 8, **options) for text, options in KNOBS.items()},
        "split": worst,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="the data and the tables, not only print them")
    write = parser.parse_args().write
    found = measured()
    tables = {name: table(found[name]) for name, table in TABLES.items()}
    print(*tables.values(), sep="\n\n")
    if not write:
        return
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    put("docs/scaling.md", tables)


if __name__ == "__main__":
    main()
