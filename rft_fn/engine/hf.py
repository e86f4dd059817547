"""The engine that needs nothing but transformers: batched sampling with a KV cache, on a model of its own.

Every sample draws from its own key, one uniform number a token by inverse CDF, so the same prompt and key
give the same response in any company, order and batch size (up to the rounding of a matrix product, which a
uniform number meets about once in a million tokens).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import logprob, rng
from rft_fn.engine.stop import Stop
from rft_fn.model import quantize
from rft_fn.types import Engine, Rollout, Sampling

__all__ = ["hf"]


@dataclass
class _Rows:
    """The rows of one batch while they grow. `live` are the rows of the cache, as indices of the batch."""

    cache: Any
    logits: Tensor  # [live, V] of the next token
    seen: Tensor  # [live, width so far] bool, False on the left padding
    live: Tensor  # [live] i64
    tokens: list[list[int]]  # per row of the batch, sampled so far
    logp: list[list[float]]
    ended: list[bool] = field(default_factory=list)


def _left_pad(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    seen = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)
    return tokens, seen


def _prefill(lm: nn.Module, prompts: Sequence[Sequence[int]], n: int, pad: int) -> _Rows:
    """Run each prompt once, then repeat its cache for its n samples."""
    from transformers import DynamicCache

    tokens, seen = _left_pad(prompts, pad, lm.device)
    cache = DynamicCache(config=lm.config)
    out = lm(
        input_ids=tokens,
        attention_mask=seen.long(),
        position_ids=(seen.long().cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.batch_repeat_interleave(n)
    rows = len(prompts) * n
    return _Rows(
        cache=cache,
        logits=out.logits[:, -1].repeat_interleave(n, 0),
        seen=seen.repeat_interleave(n, 0),
        live=torch.arange(rows, device=lm.device),
        tokens=[[] for _ in range(rows)],
        logp=[[] for _ in range(rows)],
        ended=[False] * rows,
    )


def _draw(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token [B], logp [B]) of softmax(truncated logits) at the uniform numbers
    u [B]; greedy at temperature 0."""
    z = logprob.truncate(logits, sampling)
    logp = z.log_softmax(-1)
    if sampling.temperature == 0:
        token = z.argmax(-1)
    else:
        cdf = logp.double().exp().cumsum(-1)
        token = torch.searchsorted(cdf, (u * cdf[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
        token = token.clamp(max=z.shape[-1] - 1)
    return token, logp.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _step(lm: nn.Module, rows: _Rows, u: Tensor, sampling: Sampling, stop: Stop) -> None:
    """Sample one token for every live row, drop the rows that ended, and run the rest one token further."""
    token, logp = _draw(rows.logits, u[rows.live], sampling)
    keep = []
    for k, (i, t, p) in enumerate(zip(rows.live.tolist(), token.tolist(), logp.tolist())):
        rows.tokens[i].append(t)
        rows.logp[i].append(p)
        rows.ended[i] = stop.ends(rows.tokens[i])
        if not rows.ended[i] and len(rows.tokens[i]) < sampling.max_new:
            keep.append(k)
    if len(keep) < len(token):
        index = torch.tensor(keep, dtype=torch.long, device=token.device)
        rows.live, rows.seen, token = rows.live[index], rows.seen[index], token[index]
        if keep:
            rows.cache.batch_select_indices(index)
    if keep:
        rows.seen = torch.cat([rows.seen, torch.ones_like(rows.seen[:, :1])], -1)
        rows.logits = lm(
            input_ids=token.unsqueeze(-1),
            attention_mask=rows.seen.long(),
            position_ids=rows.seen.long().sum(-1, keepdim=True) - 1,
            past_key_values=rows.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


def _assemble(
    prompts: Sequence[Sequence[int]],
    n: int,
    done: dict[int, tuple[list[int], list[float], bool]],
    pad: int,
    version: int,
) -> Rollout:
    rows = [(prompts[i // n], *done[i]) for i in range(len(prompts) * n)]
    length = torch.tensor([len(p) + len(t) for p, t, _, _ in rows])
    tokens = torch.full((len(rows), int(length.max())), pad)
    mask, logp = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(tokens.shape)
    for b, (p, t, lp, _) in enumerate(rows):
        tokens[b, : length[b]] = torch.tensor([*p, *t])
        mask[b, len(p) : length[b]] = True
        logp[b, len(p) : length[b]] = torch.tensor(lp)
    return Rollout(
        tokens=tokens,
        mask=mask,
        logp=logp,
        length=length,
        truncated=torch.tensor([not ended for *_, ended in rows]),
        group=torch.arange(len(prompts)).repeat_interleave(n),
        version=torch.full((len(rows),), version),
    )


def _ends(lm: nn.Module, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's, and those of the model's
    generation config (chat models name several)."""
    named = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    more = named if isinstance(named, (list, tuple)) else [named]
    return frozenset(t for t in (tokenizer.eos_token_id, *more) if t is not None)


def _check(
    prompts: Sequence[Sequence[int]], keys: Sequence[int], n: int, sampling: Sampling, window: int | None
) -> None:
    if not prompts or len(prompts) != len(keys) or n < 1:
        raise ValueError(
            f"prompts: expected one or more, a key for each, n >= 1; got {len(prompts)}, {len(keys)}, {n}"
        )
    for i, p in enumerate(prompts):
        if any(isinstance(token, str) for token in p):
            raise ValueError(
                f"prompts: expected token ids, got text in prompt {i}; encode it with the tokenizer"
            )
        if not len(p):
            raise ValueError(f"prompts: expected at least one token, got none in prompt {i}")
        if window and len(p) + sampling.max_new > window:
            raise ValueError(
                f"prompts: expected prompt + max_new <= the model's window of {window} tokens, got "
                f"{len(p)} + {sampling.max_new} in prompt {i}; lower max_new, or "
                "drop long prompts (max_prompt)"
            )


def hf(lm: nn.Module, tokenizer: Any, *, batch: int = 64, sleep: bool = True) -> Engine:
    """An Engine over a transformers model that it owns: `load` copies weights into it.

    `batch` is rows at a time. Asleep its weights are in host memory; with `sleep` False it never is. Adapters
    are merged into the model first.

    Prompts are sorted by length, so that a batch holds little padding; rows that ended leave the batch at
    once.
    """
    quantize.require_whole(lm, "an engine")
    if hasattr(lm, "merge_and_unload"):
        lm = lm.merge_and_unload()  # `load` brings weights by the plain model's names
    lm.eval()
    state = {"version": 0, "asleep": False}
    home = lm.device
    pad, ends = tokenizer.pad_token_id, _ends(lm, tokenizer)
    window = getattr(lm.config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()
    def generate(prompts: Sequence[Any], keys: Sequence[int], *, n: int = 1, sampling: Sampling) -> Rollout:
        """B = len(prompts) n rows, the n samples of a prompt side by side.
        Sample j draws from fold_in(key, j)."""
        wake()
        ids = [list(getattr(p, "ids", p)) for p in prompts]
        _check(ids, keys, n, sampling, window)
        stop = Stop(tokenizer, ends, sampling.stop)
        done: dict[int, tuple[list[int], list[float], bool]] = {}
        order, step = sorted(range(len(ids)), key=lambda i: len(ids[i])), max(batch // n, 1)
        for start in range(0, len(order), step):
            part = order[start : start + step]
            for at in range(0, n, batch):  # more samples than a batch takes
                wanted = range(at, min(at + batch, n))
                rows = _prefill(lm, [ids[i] for i in part], len(wanted), pad)
                draws = [rng.generator(rng.fold_in(keys[i], j)) for i in part for j in wanted]
                u = torch.stack(
                    [torch.rand(sampling.max_new, generator=g, dtype=torch.float64) for g in draws]
                )
                for t in range(sampling.max_new):
                    if rows.live.numel():
                        _step(lm, rows, u[:, t].to(lm.device), sampling, stop)
                names = [i * n + j for i in part for j in wanted]
                done |= dict(zip(names, zip(rows.tokens, rows.logp, rows.ended)))
        return _assemble(ids, n, done, pad, state["version"])

    @torch.no_grad()
    def score(rollout: Rollout, *, sampling: Sampling) -> Tensor:
        """[B, S]: the log-probs of given tokens under the engine's weights, by
        one padded forward; 0 outside mask."""
        wake()
        position = torch.arange(rollout.tokens.shape[1], device=lm.device).expand(rollout.tokens.shape)
        seen = position < rollout.length.to(lm.device).unsqueeze(-1)
        tokens = rollout.tokens.to(lm.device)
        logits = lm(
            input_ids=tokens, attention_mask=seen.long(), position_ids=position, use_cache=False
        ).logits
        z = logprob.truncate(logits[:, :-1], sampling, keep=tokens[:, 1:])
        logp = torch.nn.functional.pad(logprob.log_probs_from_logits(z, tokens[:, 1:]), (1, 0))
        return torch.where(rollout.mask, logp.cpu(), 0)

    @torch.no_grad()
    def load(weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy full tensors by name into the model. ValueError for a name or a shape
        that the model does not have."""
        own = dict(lm.named_parameters())
        for name, x in weights:
            if name not in own or own[name].shape != x.shape:
                want = list(own[name].shape) if name in own else "a parameter of the model"
                raise ValueError(f"weights: {name}: expected {want}, got {list(x.shape)}")
            own[name].copy_(x)
        state["version"] = version

    def rest() -> None:
        if sleep and not state["asleep"]:
            lm.to("cpu")
            state["asleep"] = True

    def wake() -> None:
        if state["asleep"]:
            lm.to(home)
            state["asleep"] = False

    def status() -> dict:
        return {"engine": "hf", **state}

    return Engine(generate, score, load, rest, wake, status)
