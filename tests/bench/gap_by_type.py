"""The gap of trainer and sampler by type and spread of the logits: `python tests/bench/gap_by_type.py`.

Both have the same weights, in float32, float16 and bfloat16: a model with random weights, with the head
scaled so that logits have a deviation of 1, 3 and 6, and SmolLM2-135M on questions. Then with faults in the
sampler: positions that are one too many behind the prompt, other temperatures, a system prompt that only it
reads.
Writes docs/results/gap_by_type.json and the table of docs/trust.md.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from record import made, put
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

import rft_fn as rft
from rft_fn.engine import hf
from rft_fn.precision import gap_by_rounding
from rft_fn.types import Rollout

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "gap_by_type.json"
COLUMNS = ("logp", "gap", "limit", "positions + 1", "temperature 0.9", "temperature 0.7", "system prompt")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTH, VOCAB = 256, 4096
SAMPLING = rft.Sampling(max_new=32)
QUESTIONS = (
    "What is 27 + 48?",
    "Name three rivers in Europe.",
    "Tom has 12 apples and eats 5. How many are left?",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "Translate 'good morning' into French.",
    "What is the capital of Australia?",
    "List the prime numbers below 20.",
)


def random_model(std: float) -> nn.Module:
    """Return a model with random weights and logits of this deviation."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
    )
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # hidden states have a root mean square of 1 after the last norm
        lm.lm_head.weight.normal_(0, std / WIDTH**0.5)
    return lm


def random_prompts() -> tuple[list[list[int]], list[int]]:
    """Return (prompts, tokens that stand for a system prompt)."""
    draw = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(2, VOCAB, (n,), generator=draw).tolist() for n in (9, 12, 7, 12, 24, 18, 16, 30, 20)
    ]
    return rows[:-1], rows[-1]


def chat_prompts(tokenizer) -> tuple[list[list[int]], list[int]]:
    """Return (questions without a system prompt, the tokens of one)."""
    system = tokenizer.encode("<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n")
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(text.format(q)) for q in QUESTIONS], system


@contextmanager
def shifted(lm: nn.Module) -> Iterator[None]:
    """Give tokens that are read with a cache a position that is one too many."""

    def shift(module, args, options):
        if options["position_ids"].shape[-1] == 1:
            options["position_ids"] = options["position_ids"] + 1
        return args, options

    hook = lm.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def without(rollout: Rollout, count: int) -> Rollout:
    """Return a rollout as if its first `count` tokens had not been there."""
    return rft.tree.replace(
        rollout,
        tokens=rollout.tokens[:, count:],
        mask=rollout.mask[:, count:],
        logp=rollout.logp[:, count:],
        length=rollout.length - count,
    )


def gaps(lm: nn.Module, tokenizer, prompts: list[list[int]], system: list[int]) -> dict[str, float]:
    """Return the mean |sampler - trainer| [nats per token] of the same weights, and with each fault."""
    sampler = copy.deepcopy(lm)
    engine = hf(sampler, tokenizer, batch=16)
    st = rft.strategy.get_fake_strategy()
    apply, params = st.bind(lm, sampling=SAMPLING)

    def sampled(ids: list[list[int]], temperature: float = 1.0) -> Rollout:
        sampling = rft.tree.replace(SAMPLING, temperature=temperature)
        return engine.generate(ids, range(len(ids)), n=2, sampling=sampling)

    def gap(rollout: Rollout) -> float:
        rollout = rft.tree.replace(rollout, sampling=None)
        logp = st.score(apply, params, rollout, 4096).logp
        return rft.collect.logp_mismatch(logp, rollout.logp, rollout.mask)

    right = sampled(prompts)
    found = {"logp": float(right.logp.sum() / right.mask.sum()), "gap": gap(right)}
    with shifted(sampler):
        found["positions + 1"] = gap(sampled(prompts))
    found["temperature 0.9"] = gap(sampled(prompts, 0.9))
    found["temperature 0.7"] = gap(sampled(prompts, 0.7))
    found["system prompt"] = gap(without(sampled([system + ids for ids in prompts]), len(system)))
    return found


def table(result) -> str:
    """Return the table of docs/trust.md."""
    lines = [" | ".join(("| model", "type", *COLUMNS)) + " |", "|---|---" + "|---" * len(COLUMNS) + "|"]
    for row in result["rows"]:
        numbers = (f"{row[name]:.2g}" for name in COLUMNS)
        lines.append(" | ".join((f"| {row['model']}", row["dtype"], *numbers)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    tiny = rft.model.load_tokenizer("tiny")
    smol = rft.model.load_tokenizer("smollm2-135m")
    cases: list[tuple[str, Callable[[], nn.Module]]] = []
    cases += [
        (f"random, logits of deviation {std:g}", lambda std=std: random_model(std)) for std in (1, 3, 6)
    ]
    cases += [("SmolLM2-135M", lambda: rft.model.load("smollm2-135m", dtype=torch.float32))]
    rows = []
    for name, make in cases:
        lm = make()
        tokenizer, (prompts, system) = (
            (smol, chat_prompts(smol)) if name.startswith("Smol") else (tiny, random_prompts())
        )
        for dtype in TYPES:
            typed = copy.deepcopy(lm).to(dtype=dtype, device=args.device)
            row = {"model": name, "dtype": str(dtype)[6:], **gaps(typed, tokenizer, prompts, system)}
            row["limit"] = gap_by_rounding([dtype])
            rows.append(row)
            print(json.dumps(row), flush=True)
    result = made() | {"device": args.device, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if args.out == OUT:
        put("docs/trust.md", {"gap_by_type": table(result)})


if __name__ == "__main__":
    main()
