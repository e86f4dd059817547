"""Sampling against its matrix products: `python tests/bench/sampling.py --batch 64 --tokens 64`.

A model of the shape of SmolLM2-135M with random weights (or `--model`) samples in turns with the cache of
transformers, with buffers, and with prompts that their samples share. In the same turn its linear layers run
alone, by the library that the engine uses, on inputs of the same shapes. One thread unless `--threads` says
more; seconds of the processor, which other programs change little, or with `--wall` those on the wall, which
several threads need. Prints each side's seconds and its ratio to the products, with the least and the largest
of all turns.
`--long-tail` ends every second row after a quarter of the tokens, with two batches of prompts. `--profile`
prints the largest operators, and `--write FILE` adds the figures to a file of results.
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import torch
from record import processor
from torch import nn

from rft_fn import model as models
from rft_fn.engine import prompt_media, requests
from rft_fn.engine.hf.probe import find_cache_support
from rft_fn.engine.hf.sampler import Sampler
from rft_fn.engine.requests import Stop
from rft_fn.model.quantize import packed, set_fast
from rft_fn.strategy.host import disable_malloc_trim
from rft_fn.types import Sampling

SAMPLES = 8  # of each prompt


def shaped(layers, vocab):
    """A model of the shape of SmolLM2-135M, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def seconds(clock, f, *args):
    """The seconds of one call by a clock."""
    start = clock()
    f(*args)
    return clock() - start


class Products:
    """The linear layers that a run calls, to be run again without anything else."""

    def __init__(self, lm):
        self.calls = []
        self.hooks = [x.register_forward_hook(self._called) for x in lm.modules() if isinstance(x, nn.Linear)]

    def _called(self, module, args, _):
        self.calls.append((module, args[0].numel() // args[0].shape[-1]))

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        self.inputs = {
            (layer.in_features, rows): torch.randn(rows, layer.in_features) for layer, rows in self.calls
        }

    def run(self):
        for layer, rows in self.calls:
            layer(self.inputs[layer.in_features, rows])


def summary(values):
    """The median, the least and the largest."""
    return [round(x, 3) for x in (statistics.median(values), min(values), max(values))]


def write(file, given, found):
    """Add the figures of this command to a file, in place of those of the same one before."""
    results = {}
    if file.exists():
        results = json.loads(file.read_text())
    results |= {
        "about": "seconds, and ratios to the matrix products: median, least, largest",
        "date": datetime.date.today().isoformat(),
        "hardware": processor(),
        "torch": torch.__version__,
    }
    options = {k: v for k, v in vars(given).items() if k not in ("write", "profile") and v is not None}
    name = " ".join(f"{k}={v}" for k, v in options.items())
    results.setdefault("runs", {})[name] = found
    file.write_text(json.dumps(results, indent=1) + "\n")


def options():
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name or a folder instead of random weights")
    parser.add_argument("--layers", type=int, default=30, help="of the model with random weights")
    parser.add_argument("--vocab", type=int, default=49152, help="of the model with random weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=92, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--long-tail", action="store_true")
    parser.add_argument("--runs", type=int, default=3, help="turns of each side")
    parser.add_argument("--wall", action="store_true", help="seconds on the wall")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--write", type=Path, help="a file of results")
    return parser.parse_args()


def main():
    given = options()
    torch.set_num_threads(given.threads)
    clock = time.perf_counter if given.wall else time.process_time
    disable_malloc_trim()  # as from the first gradient of a training run on
    lm = (models.load(given.model) if given.model else shaped(given.layers, given.vocab)).eval()
    set_fast(lm, True)

    # prompts of different lengths, and limits of the rows
    count = given.batch // SAMPLES * (2 if given.long_tail else 1)
    words = min(lm.config.get_text_config().vocab_size, 1000)
    prompts = [torch.randint(3, words, (given.prompt - 5 * (i % 8),)).tolist() for i in range(count)]
    limits = [given.tokens] * (count * SAMPLES)
    if given.long_tail:
        limits[::2] = [max(given.tokens // 4, 1)] * len(limits[::2])
    sampling = Sampling(max_new=given.tokens, top_p=given.top_p)
    rows = requests.Request([], range(count), SAMPLES, sampling, limits).rows()
    way = find_cache_support(lm, 0)
    ways = {
        "transformers' cache": way._replace(room=False, joins=False, shares=False),
        "buffers": way._replace(shares=False),
        "prompts held once": way,
    }

    @torch.no_grad()
    def sample(batching):
        sampler = Sampler(lm, batching, sampling, Stop(None, frozenset(), ()), 0, given.batch)
        with packed(lm):
            return sampler.responses(prompts, prompt_media.text(prompts), rows)

    @torch.no_grad()
    def multiply(name):
        with packed(lm):
            return seconds(clock, products[name].run)  # packs each weight once, as sampling does

    # the products of each side, which differ where prompts join
    products = {}
    for name, batching in ways.items():
        products[name] = Products(lm)
        sample(batching)
        products[name].stop()

    turns = {name: [] for name in ways}
    for _ in range(given.runs):
        for name, batching in ways.items():
            turns[name].append((seconds(clock, sample, batching), multiply(name)))
    found = {}
    for name, pairs in turns.items():
        whole, alone = zip(*pairs)
        found[name] = {"sampling": summary(whole), "products": summary(alone)}
        found[name]["ratio"] = summary([x / y for x, y in pairs])
        figures = found[name].items()
        line = "  ".join(f"{what} {x:.2f} ({low:.2f} to {high:.2f})" for what, (x, low, high) in figures)
        print(f"{name:20s} {line}", flush=True)
    if given.write:
        write(given.write, given, found)
    if given.profile:
        with torch.profiler.profile() as profile:
            sample(way)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))


if __name__ == "__main__":
    main()
