"""The tables of docs/scaling.md: `python tests/bench/memory.py --write`.

Four are computed by `strategy.estimate` on the meta device (no weights, no GPU), for models whose shapes
stand below: `scale`, `knobs`, `rows` (bytes against the tokens of one row) and `longest` (rows that fit).
Two are measured: `split`, on four processes over gloo, the activations of a pack with sequence parallelism,
and `kept`, the seconds and bytes of a gradient by what blocks keep. `--only NAME ...` makes some of them
anew. Writes docs/results/memory.json and the tables in docs/scaling.md.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.record import made, put

from rft_fn import loss, optim, packing
from rft_fn.environment import tiny_models
from rft_fn.memory import trace
from rft_fn.model import apply_lora_configuration, checkpointing, load
from rft_fn.strategy import StrategyConfig, estimate, forecast, get_strategy

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
    "135M": (
        "Llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "1.5B": (
        "Qwen2",
        {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
        | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "30B-A3B": (
        "Qwen3Moe",
        {"vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False},
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
SCALED = ("0.5B", "7B", "70B")
CARDS = (24, 48, 80, 141)  # GB
LONG = ("0.5B", "1.5B", "7B", "30B-A3B")
TOKENS = (1024, 4096, 16384, 65536)
BASE = {"use_mp_opt": True}
ROUNDS = 3
KNOBS = {
    "as in the table above": {},
    "no `gradient_checkpointing`": {"kind": False},
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
def model(name, kind=True, window=32768, layers=0):
    """A model of that shape without memory, or of fewer layers."""
    import transformers

    if name == "tiny":
        return load(tiny_models.new_model(48, 0).to(torch.bfloat16), gradient_checkpointing=kind)
    family, shape = SHAPES[name]
    shape = shape | ({"num_hidden_layers": layers} if layers else {})
    config = getattr(transformers, f"{family}Config")(**shape, max_position_embeddings=window)
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    checkpointing.checkpoint(lm, kind)
    return lm


def row(name, world, *, kind=True, budget=BUDGET, engine=False, **options):
    """The estimate of a model on `world` GPUs [bytes]."""
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-6))
    config = StrategyConfig(**{"fsdp": not options.get("zero_stage")} | BASE | options)
    shape = model(name, kind)
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


LAYERS = (2, 3)  # that are traced: every number of an estimate is a line over layers of one kind


def along(layers, low, high):
    """A number of many layers, from those of LAYERS."""
    return round(low + (layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0]) * (high - low))


def bytes_of(name, kind):
    """{tokens: MiB of a row's forward and backward} on a GPU, and of inputs on the host."""
    out = {}
    depth = 0 if name == "tiny" else SHAPES[name][1]["num_hidden_layers"]
    for tokens in TOKENS:
        few = [
            trace.step(trace.on_meta(model(name, kind, layers=layers)), tokens, kind="cuda", in_place=True)
            for layers in (LAYERS if depth else (0,))
        ]
        sizes = [(x.activations + x.head + x.backward, x.host) for x in few]
        whole = [along(depth, *pair) for pair in zip(*sizes)] if depth else sizes[0]
        out[str(tokens)] = [round(n / 2**20, 1) for n in whole]
        print(name, kind, tokens, out[str(tokens)], flush=True)
    return out


HOST = 2**60  # bytes that no host has


@dataclass(frozen=True)
class Known(forecast.Forecast):
    """A forecast of many layers from those of few, which remembers its estimates."""

    layers: int = 0
    other: forecast.Forecast | None = None  # of LAYERS[1]
    known: dict = field(default_factory=dict)

    def estimate(self):
        if self.budget not in self.known:
            low, high = super().estimate(), replace(self.other, budget=self.budget).estimate()
            if low.unknown:
                raise RuntimeError(f"expected a shape that runs without values, got {low.unknown}")
            numbers = {k: (x, getattr(high, k)) for k, x in vars(low).items() if type(x) is int}
            whole = {k: along(self.layers, *pair) for k, pair in numbers.items()}
            self.known[self.budget] = replace(low, **whole)
        return self.known[self.budget]


def rows_that_fit(name, lora):
    """{kind: {card: [tokens, GiB of the host]}} of a model whose window is no limit."""
    out = {}
    for kind in checkpointing.LADDER:
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-6))
        few = []
        for layers in LAYERS:
            lm = model(name, kind, window=2**30, layers=layers)
            if lora:
                lm = apply_lora_configuration(trace.on_meta(lm), 16, 32)
            few.append(((lm, tx),))
        base = forecast.Forecast(StrategyConfig(), few[1], 1, 1, "cuda", 0, HOST, {"engine": False})
        depth = SHAPES[name][1]["num_hidden_layers"]
        x = Known(**{**vars(base), "models": few[0]}, layers=depth, other=base)
        out[str(kind)] = {}
        for card in CARDS:
            tokens = forecast.longest(replace(x, available=int(card * 1e9)))
            host = 2 * tokens * lm.config.hidden_size * depth if kind == "host" else 0
            out[str(kind)][str(card)] = [tokens, round(host / 2**30, 1)]
        print(name, "LoRA" if lora else "all weights", kind, out[str(kind)], flush=True)
    return out


def nll(out, b):
    return loss.nll(out.logp) - 0.01 * out.entropy


def kept():
    """Seconds of each round and MiB at the peak of a gradient, by kind, in a pack of 1,024 tokens.

    Of 4 blocks of SmolLM2's shape with few words, so that blocks are what takes time.
    """
    from places import allocated

    ids = torch.randint(3, 512, (4, 257), generator=torch.Generator().manual_seed(0)).tolist()
    exp = packing.supervised([(row[:1], row[1:]) for row in ids])
    st = get_strategy(StrategyConfig())
    sides = {}
    for kind in checkpointing.LADDER[:3]:
        torch.manual_seed(0)
        import transformers

        shape = SHAPES["135M"][1] | {"num_hidden_layers": 4, "vocab_size": 512}
        lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, max_position_embeddings=8192))
        apply, state = st.init(load(lm, gradient_checkpointing=kind), optim.adamw(1e-3), entropy=True)
        sides[kind] = partial(st.grad, state, apply, nll, [packing.pack(exp, range(4))])
    seconds, grads = {str(kind): [] for kind in sides}, {}
    for turn in range(ROUNDS + 1):
        for kind, grad in sides.items():
            start = time.process_time()
            grads[kind] = [*grad()[0].values()]
            if turn:  # the first makes what is kept for good
                seconds[str(kind)].append(round(time.process_time() - start, 3))
    same = {str(kind): all(map(torch.equal, grads[True], grads[kind])) for kind in sides}
    del grads
    peaks = {str(kind): round(allocated(grad)[1] / 2**20) for kind, grad in sides.items()}
    return {"seconds": seconds, "peak": peaks, "same": same, "threads": torch.get_num_threads()}


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


def rows_table(rows):
    """A row for each model and what its blocks keep."""
    lines = ["| model | `gradient_checkpointing` | " + " | ".join(f"{n:,} tokens" for n in TOKENS) + " |"]
    lines.append("|---" * (len(TOKENS) + 2) + "|")
    for name, kinds in rows.items():
        for kind, x in kinds.items():
            cells = " | ".join(f"{x[str(n)][0]:,.0f}" for n in TOKENS)
            lines.append(f"| {name} | {kind} | {cells} |")
    return "\n".join(lines)


def longest_table(rows):
    """A row for each model, card and what is trained, where some row fits."""
    kinds = [str(kind) for kind in checkpointing.LADDER if str(kind) in next(iter(rows.values()))]
    lines = ["| model | trained | GB | " + " | ".join(f"`{kind}`" for kind in kinds) + " |"]
    lines.append("|---" * (len(kinds) + 3) + "|")
    for key, x in rows.items():
        name, trained = key.split(", ")
        for card in map(str, CARDS):
            if not any(x[kind][card][0] for kind in kinds):
                continue
            cells = [f"{x[kind][card][0] // 100 * 100:,}" if x[kind][card][0] else "-" for kind in kinds]
            lines.append(f"| {name} | {trained} | {card} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kept_table(x):
    """A row for each kind, as a share of what checkpointing takes."""
    lines = ["| `gradient_checkpointing` | seconds, of those with True | MiB at the peak | gradient |"]
    lines.append("|---|---|---|---|")
    for kind, seconds in x["seconds"].items():
        shares = sorted(s / one for s, one in zip(seconds, x["seconds"]["True"]))
        ends = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
        same = "bit for bit that of True" if x["same"][kind] else "equal to rounding"
        lines.append(f"| {kind} | {ends} | {x['peak'][kind]:,} | {same} |")
    return "\n".join(lines)


def scaled():
    return {f"{name} on {world}": row(name, world) for name in SCALED for world in (1, 8, 64)}


def knobs():
    return {text: row("7B", 8, **options) for text, options in KNOBS.items()}


def over_processes():
    import ranks

    found = ranks.run(4, "bench.memory:split", 4096)
    return {str(sp): {k: max(r[sp][k] for r in found) for k in found[0][sp]} for sp in found[0]}


def rows():
    return {
        name: {str(kind): bytes_of(name, kind) for kind in checkpointing.LADDER} for name in ("tiny", "135M")
    }


def longest():
    modes = {"adapters": True, "all weights": False}
    return {f"{name}, {mode}": rows_that_fit(name, lora) for name in LONG for mode, lora in modes.items()}


TABLES = {
    "scale": (scaled, scale_table),
    "knobs": (knobs, knob_table),
    "split": (over_processes, split_table),
    "rows": (rows, rows_table),
    "longest": (longest, longest_table),
    "kept": (kept, kept_table),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="the data and the tables, not only print them")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="these tables")
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text())
    for name in given.only:
        found[name] = TABLES[name][0]() | {}
        if given.only != list(TABLES):
            found.setdefault("made_alone", {})[name] = made()
    if given.only == list(TABLES):
        found = {"made": made()} | {name: found[name] for name in TABLES}
    tables = {name: TABLES[name][1](found[name]) for name in given.only}
    print(*tables.values(), sep="\n\n")
    if not given.write:
        return
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    put("docs/scaling.md", tables)


if __name__ == "__main__":
    main()
