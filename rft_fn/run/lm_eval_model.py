"""An engine as a model of lm-eval, in this process; imported where lm-eval is there."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from torch import Tensor

from rft_fn import rng
from rft_fn.data.responses import prompt_ids
from rft_fn.types import Rollout, Sampling

__all__ = ["EngineModel"]


class EngineModel(TemplateLM):
    """Answers the requests of lm-eval by an engine.

    `generate(prompts, keys, n, sampling)` and `score(rollout, sampling)` are the engine's, over all ranks;
    each rank has all requests. `sampling(arguments)` makes the distribution of a request's arguments. Prompts
    that do not fit into `window` with their responses lose their first tokens, as with lm-eval's own models.
    """

    def __init__(
        self,
        generate: Callable[[list[list[int]], list[int], int, Sampling], Rollout],
        score: Callable[[Rollout, Sampling], Tensor],
        sampling: Callable[[dict[str, Any]], Sampling],
        tokenizer: Any,
        *,
        seed: int,
        window: int | None,
        batch: int,
        chat_template_kwargs: dict[str, Any],
    ):
        super().__init__()
        self.generate, self.score, self.sampling = generate, score, sampling
        self.tokenizer = tokenizer
        self.seed, self.window, self.batch = seed, window, batch
        self.chat_template_kwargs = chat_template_kwargs
        self.shortened = 0  # prompts that have lost tokens
        self.cut_off = 0  # responses that ended at the limit
        self.responses = 0

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text; where it begins with the token that opens a sequence, no second one is added."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        if add_special_tokens:
            return prompt_ids(self.tokenizer, string)
        return self.tokenizer.encode(string, add_special_tokens=False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat, open for the assistant's turn or for the rest of it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_kwargs,
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer requests; one that occurs again, as the same object, is a further sample of its prompt.

        So n occurrences have the streams of samples 0 to n - 1 of the key of the task's problem.
        """
        places: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(id(request), []).append(place)
        groups: dict[tuple[str, int], list[list[int]]] = {}  # that can be sampled by one call
        for own in places.values():
            arguments = requests[own[0]].args[1]
            groups.setdefault((repr(sorted(arguments.items())), len(own)), []).append(own)

        answers = [""] * len(requests)
        for (_, n), group in groups.items():
            arguments = normalize_gen_kwargs(dict(requests[group[0][0]].args[1]))
            sampling = self.sampling(arguments)
            until = [text for text in arguments.get("until") or [] if text]
            size = max(self.batch // n, 1)
            for at in range(0, len(group), size):
                part = group[at : at + size]
                firsts = [requests[own[0]] for own in part]
                prompts = [self._fitting(self.tok_encode(r.args[0]), sampling.max_new) for r in firsts]
                keys = [rng.fold_in(self.seed, str(r.task_name), r.doc_id or 0, r.idx) for r in firsts]
                texts = self._texts(self.generate(prompts, keys, n, sampling), until)
                for place, text in zip((i for own in part for i in own), texts, strict=True):
                    answers[place] = text
        return answers

    def _fitting(self, ids: list[int], more: int) -> list[int]:
        """Return the last tokens of a prompt that leave room for `more`."""
        room = len(ids) if self.window is None else max(self.window - more, 1)
        self.shortened += len(ids) > room
        return ids[-room:]

    def _texts(self, rollout: Rollout, until: Sequence[str]) -> list[str]:
        """Return the responses, each up to the first text that ends one."""
        texts = []
        for tokens, mask in zip(rollout.tokens, rollout.mask.bool(), strict=True):
            text = self.tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True)
            for stop in until:
                text = text.split(stop)[0]
            texts.append(text)
        self.responses += len(texts)
        self.cut_off += int(rollout.truncated.sum())
        return texts

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the greedy one) of each continuation after its context."""
        found: list[tuple[float, bool]] = []
        for at in range(0, len(requests), self.batch):
            rows = []
            for _, context, continuation in requests[at : at + self.batch]:
                rows.append((self._fitting(context, len(continuation)), continuation))
            rollout = _rows(rows)
            logp = self.score(rollout, Sampling()).double().sum(-1)
            # of the likeliest token alone, log-probs are 0 where a token is that one
            greedy = self.score(rollout, Sampling(top_k=1)).eq(0).all(-1)
            found += zip(logp.tolist(), greedy.tolist(), strict=True)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise ValueError(
            f"tasks: expected tasks that generate or score continuations, got {requests[0].task_name}, which "
            "asks for the perplexity of texts; use another backend of lm-eval"
        )


def _rows(rows: Sequence[tuple[list[int], list[int]]]) -> Rollout:
    """Return a rollout whose responses are the continuations of these contexts."""
    length = torch.tensor([len(context) + len(continuation) for context, continuation in rows])
    tokens = torch.zeros(len(rows), int(length.max()), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (context, continuation) in enumerate(rows):
        tokens[i, : length[i]] = torch.tensor(context + continuation)
        mask[i, len(context) : length[i]] = True
    return Rollout(
        tokens=tokens,
        mask=mask,
        logp=torch.zeros(tokens.shape),
        length=length,
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        group=torch.arange(len(rows)),
        version=torch.zeros(len(rows), dtype=torch.long),
    )
