"""An engine for tests of conversations: it has no model, and says what a function makes of the tokens."""

import tiny

from rft_fn import rng
from rft_fn.engine import requests
from rft_fn.types import Engine

__all__ = ["END", "Spoken", "words"]

END = tiny.tokenizer().eos_token_id


def words(ids, key, most):
    """A response of 1 to 4 letters, drawn from the key and all tokens before it; it ends if it has room."""
    drawn = rng.fold_in(key, *ids)
    size = 1 + drawn % 4
    tokens = [13 + (rng.fold_in(drawn, i) % 26) for i in range(size)] + [END]
    return tokens[:most], len(tokens) <= most


class Spoken:
    """An engine without a model, whose log-probs tell which token they are of; it notes its calls."""

    def __init__(self, speak=words, version=3):
        self.speak = speak
        self.calls = []
        self.version = version

    def generate(self, prompts, keys, *, n=1, sampling, max_new=None):
        ids = requests.token_ids(prompts)
        request = requests.Request(prompts, keys, n, sampling, max_new)
        request.check(ids, window=None)
        self.calls.append(ids)
        found = []
        for b, row in enumerate(request.rows()):
            prompt = ids[b // n]
            tokens, ended = self.speak(prompt, row.key, row.max_new)
            logp = [-(len(prompt) + i) / 100 for i in range(len(tokens))]
            found.append(requests.Response(tokens, logp, ended))
        return requests.assemble(ids, found, pad=0, version=self.version)

    def engine(self):
        rest = lambda: None  # noqa: E731
        status = lambda: {"engine": "spoken", "alive": True, "version": 3, "asleep": False}  # noqa: E731
        return Engine(self.generate, None, None, rest, rest, status)
