"""Tokens that a model computes of the turns of real conversations: `python tests/bench/turns.py`.

Samples of a built-in model, as rows of three kinds, in packs that keep the rows of a prompt together, as
without groups, and in packs that keep those of an episode together.
"""

import argparse
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ref

import rft_fn as rft
from rft_fn import packing, tree

TASKS, SAMPLES = 16, 8


def played(name):
    """Conversations with an environment, by the built-in model for it: (ids, mask, group) of each."""
    model = f"tiny:{name}"
    tokenizer = rft.model.load_tokenizer(model)
    world = rft.environment.get_environment(name)
    data = rft.environment.prompts(world, tokenizer, template="{short}")
    prompts, keys = rft.data.draw(data, TASKS, 0, 0)
    r = rft.collect.play(
        rft.engine.get_engine(None, model, tokenizer),
        rft.strategy.get_strategy(),
        world,
        prompts,
        keys,
        rft.environment.Renderer(tokenizer),
        n=SAMPLES,
        max_turns=8,
        max_tokens=128,
        sampling=rft.Sampling(max_new=12),
    ).rollout
    for ids, mask, size, group in zip(*(x.tolist() for x in (r.tokens, r.mask, r.length, r.group))):
        yield ids[:size], mask[:size], group


def turns(row, *, rewritten):
    """A row for each turn of a conversation, after all before it, or after the task and the last answer."""
    ids, mask, group = row
    borders = [k for k, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
    first, before = borders[0], borders[0]
    for start, end in zip(borders[::2], borders[1::2]):
        read = [*ids[:first], *ids[before:start]] if rewritten else ids[:start]
        yield [*read, *ids[start:end]], [False] * len(read) + [True] * (end - start), group
        before = end


def computed(rows, budget, *, groups):
    """The tokens to compute of all packs."""
    exp = packing.conversations([row[:2] for row in rows])
    if groups:
        exp = tree.replace(exp, group=torch.tensor([row[2] for row in rows]))
    packs = packing.shard(exp, budget, share_prefixes=True)[0]
    sizes = [torch.bincount(p.seq).tolist() for p in packs]
    return sum(len(set(ref.beginnings(p.tokens, p.pos, n))) for p, n in zip(packs, sizes))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", nargs="*", default=["guess_number:2", "calculator:1"])
    parser.add_argument("--budget", type=int, default=1024)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| rows | | tokens | prompts together | episodes together |\n|---|---|---|---|---|")
    for name in given.environments:
        whole = [row for row in played(name) if any(row[1])]
        kinds = {
            "a row a conversation": whole,
            "a row a turn, after all before it": [x for row in whole for x in turns(row, rewritten=False)],
            "the same, after the task and the last answer": [
                x for row in whole for x in turns(row, rewritten=True)
            ],
        }
        for kind, rows in kinds.items():
            counts = [computed(rows, given.budget, groups=x) for x in (False, True)]
            total = sum(len(ids) - 1 for ids, _, _ in rows)
            print(f"| `{name}`: {kind} | {len(rows)} | {total} | {counts[0]} | {counts[1]} |", flush=True)


if __name__ == "__main__":
    main()
