"""A policy behind an endpoint, for tests: it says the same to everybody."""

import time

import chats
import torch

from rft_fn.types import Rollout

TOK = chats.tokenizer(chats.CHATML, end="<|im_end|>")


class Says:
    """An engine that says a text to every prompt, and notes what it was asked."""

    def __init__(self, text="four", seconds=0.0):
        self.said = [*TOK.encode(text, add_special_tokens=False), TOK.eos_token_id]
        self.seconds = seconds
        self.asked = []

    def generate(self, prompts, keys, *, n, sampling, max_new, temperature=None):
        self.asked.append((prompts, keys, sampling, max_new, temperature))
        time.sleep(self.seconds)
        rows = [[*ids, *self.said[:most]] for ids, most in zip(prompts, max_new)]
        size = max(map(len, rows))
        mask = [[len(p) <= i < len(r) for i in range(size)] for p, r in zip(prompts, rows)]
        return Rollout(
            tokens=torch.tensor([r + [0] * (size - len(r)) for r in rows]),
            mask=torch.tensor(mask),
            logp=torch.where(torch.tensor(mask), -0.5, 0.0),
            length=torch.tensor([len(r) for r in rows]),
            truncated=torch.tensor([len(self.said) > most for most in max_new]),
            group=torch.arange(len(rows)),
            version=torch.full((len(rows),), 5),
            sampling=sampling,
        )

    def wake(self):
        pass

    sleep = wake
