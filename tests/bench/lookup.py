"""Sampling with drafts from n-grams of a row and its group: `python tests/bench/lookup.py gsm8k/test.jsonl`.

No second model: a row drafts what came after the last n-gram like its newest tokens, in its own prompt and
response or in a row of its group. One forward reads the newest token and the draft of every row, and tokens
are drawn one after the other by the row's own numbers, for as long as they are those of the draft. So the
tokens are those without drafts, and `equal` is the share of responses that are, to the rounding of products.

In turns: the hf engine, this sampler without drafts, with drafts of the row, and of the group too; seconds
of the processor, which other programs change little. The engine's first turn has its probe in it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from rft_fn import engine as engines
from rft_fn import model as models
from rft_fn import rng
from rft_fn.engine.hf.draws import draw_token, uniform_numbers
from rft_fn.engine.requests import Request, end_tokens
from rft_fn.model.quantize import packed, set_fast
from rft_fn.types import Sampling


class RowLayer(DynamicLayer):
    """Keys and values of left-aligned rows: each writes its new tokens at its own columns `at` [R, Q]."""

    def __init__(self, keys, values, room):
        super().__init__()
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        self.buffers = [
            torch.cat([x, x.new_zeros(*x.shape[:2], room, x.shape[3])], 2) for x in (keys, values)
        ]
        self.at = None
        self.width = keys.shape[2]

    def update(self, key_states, value_states, *args, **kwargs):
        rows = torch.arange(len(key_states))[:, None]
        for x, new in zip(self.buffers, (key_states, value_states)):
            x[rows, :, self.at] = new.transpose(1, 2)
        return tuple(x[: len(key_states), :, : self.width] for x in self.buffers)

    def move(self, place, row):
        for x in self.buffers:
            x[place, :, : self.width] = x[row, :, : self.width]


class NGrams:
    """Where the token after each n-gram is: in a row, or in any row of a group."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.after = {}

    def add(self, text, i):
        """Note the n-grams before token i of a text."""
        for size in self.sizes:
            if i >= size:
                self.after[tuple(text[i - size : i])] = text, i

    def draft(self, text, most):
        """The tokens after the longest n-gram like the end of a text."""
        for size in self.sizes:
            text_, i = self.after.get(tuple(text[-size:]), (None, 0))
            if text_ is not None:
                return text_[i : i + most]
        return []


class Counts:
    """What a rollout has taken."""

    def __init__(self):
        self.steps = self.reads = self.drafted = self.accepted = self.tokens = 0


@torch.no_grad()
def sample(lm, prompts, rows, n, sampling, ends, *, most, sizes, group, counts):
    """Sample n responses to each prompt; drafts have at most `most` tokens."""
    text = [list(prompts[b // n]) for b in range(len(rows))]
    start = [len(x) for x in text]
    own = [NGrams(sizes) for _ in rows]
    shared = [NGrams(sizes) for _ in prompts]
    if most:
        for b, x in enumerate(text):
            for i in range(1, len(x)):
                own[b].add(x, i)

    # prompts are read once, padded on the right
    longest = max(row.max_new for row in rows)
    width = max(map(len, prompts))
    ids = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts])
    out = lm(input_ids=ids, use_cache=True)
    size = torch.tensor([len(p) for p in prompts])
    index = torch.arange(len(prompts)).repeat_interleave(n)
    logits = out.logits[torch.arange(len(prompts)), size - 1][index]
    cache = DynamicCache()
    read = out.past_key_values.layers
    cache.layers = [RowLayer(x.keys[index], x.values[index], longest + most) for x in read]
    vocab = logits.shape[-1]
    u = uniform_numbers(rows, longest, vocab)

    def take(b, token):
        text[b].append(token)
        if most:
            own[b].add(text[b], len(text[b]) - 1)
            if group:
                shared[b // n].add(text[b], len(text[b]) - 1)
        counts.tokens += 1
        return token in ends or len(text[b]) - start[b] == rows[b].max_new

    live = list(range(len(rows)))
    token, _ = draw_token(logits, u[:, 0], sampling)
    done = [take(b, t) for b, t in zip(live, token.tolist())]
    while True:
        # rows that ended leave, the last ones take their places
        for k in reversed(range(len(live))):
            if done[k]:
                last = len(live) - 1
                if k != last:
                    for layer in cache.layers:
                        layer.move(k, last)
                    live[k] = live[last]
                live.pop()
        if not live:
            return [x[s:] for x, s in zip(text, start)]

        drafts = []
        for b in live:
            left = min(most, rows[b].max_new - (len(text[b]) - start[b]) - 1)
            found = own[b].draft(text[b], left) if left > 0 else []
            if left > 0 and group and not found:
                found = shared[b // n].draft(text[b], left)
            drafts.append(list(found))
        wide = 1 + max(map(len, drafts))
        tokens = torch.tensor([[text[b][-1], *d, *[0] * (wide - 1 - len(d))] for b, d in zip(live, drafts)])
        at = torch.tensor([len(text[b]) - 1 for b in live])[:, None] + torch.arange(wide)
        columns = max(len(text[b]) - 1 for b in live) + wide
        for layer in cache.layers:
            layer.at, layer.width = at, columns
        hidden = torch.arange(columns) > at[:, :, None]
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
        out = lm(
            input_ids=tokens, attention_mask=bias, position_ids=at, past_key_values=cache, use_cache=True
        ).logits
        counts.steps += 1
        counts.reads += tokens.numel()
        counts.drafted += sum(map(len, drafts))

        # the first token of all rows, the next of those whose token was the draft's
        done = [False] * len(live)
        going = list(range(len(live)))
        for j in range(wide):
            drawn = torch.stack([u[live[k], len(text[live[k]]) - start[live[k]]] for k in going])
            token, _ = draw_token(out[going, j], drawn, sampling)
            later = []
            for k, t in zip(going, token.tolist()):
                done[k] = take(live[k], t)
                accepted = j < len(drafts[k]) and drafts[k][j] == t
                counts.accepted += accepted
                if accepted and not done[k]:
                    later.append(k)
            going = later
            if not going:
                break


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 1, 8], help="prompts of each batch")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8, 8], help="of each prompt")
    parser.add_argument("--draft", type=int, default=4, help="tokens, at most")
    parser.add_argument("--least", type=int, default=2, help="tokens of an n-gram, at least")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tokenizer = models.load_tokenizer(given.model)
    lm = models.load(given.model).eval()
    set_fast(lm, True)
    ends = end_tokens(lm, tokenizer)
    sampling = Sampling(temperature=given.temperature, max_new=given.tokens)
    questions = [json.loads(line)["question"] for line in given.data.read_text().splitlines()[:64]]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in questions
    ]
    eng = engines.hf(lm, tokenizer)
    sizes = [3, 2, 1][: 4 - given.least]
    ways = {"without": (0, False), "row": (given.draft, False), "row and group": (given.draft, True)}
    for prompts, n in zip(given.groups, given.samples):
        asked = chats[:prompts]
        keys = [rng.fold_in(0, i) for i in range(prompts)]
        rows = Request(asked, keys, n, sampling).rows()
        seconds = {name: [] for name in ["engine", *ways]}
        counts, texts = {}, {}
        for _ in range(given.turns):
            began = time.process_time()
            r = eng.generate(asked, keys, n=n, sampling=sampling)
            seconds["engine"].append(time.process_time() - began)
            texts["engine"] = [t[m].tolist() for t, m in zip(r.tokens, r.mask)]
            for name, (most, group) in ways.items():
                counts[name] = Counts()
                began = time.process_time()
                with packed(lm):
                    texts[name] = sample(
                        lm, asked, rows, n, sampling, ends,
                        most=most, sizes=sizes, group=group, counts=counts[name],
                    )  # fmt: skip
                seconds[name].append(time.process_time() - began)
        print(f"{prompts} prompts x {n} samples, temperature {given.temperature:g}, drafts of {given.draft}")
        for name, found in seconds.items():
            line = f"  {name:14s} {statistics.median(found):6.2f} s ({min(found):.2f} to {max(found):.2f})"
            if name in counts:
                c = counts[name]
                equal = sum(a == b for a, b in zip(texts[name], texts["engine"])) / len(rows)
                line += f"  equal {equal:.2f}  tokens {c.tokens}  forwards {c.steps}  reads {c.reads}"
                if c.drafted:
                    line += f"  drafted {c.drafted}  accepted {c.accepted} ({c.accepted / c.drafted:.2f})"
            print(line, flush=True)


if __name__ == "__main__":
    main()
