"""The engine that needs nothing but transformers: batched sampling with a KV cache, on a model of its own.

Every sample draws from its own key, one uniform number a token by inverse CDF, so the same prompt and key
give the same response in any company, order and batch size (up to the rounding of a matrix product, which a
uniform number meets about once in a million tokens).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import logprob, rng
from rft_fn.engine.batch import Batch, Way, start
from rft_fn.engine.stop import Stop
from rft_fn.engine.ways import way_of
from rft_fn.model import quantize
from rft_fn.types import Engine, Rollout, Sampling

__all__ = ["hf"]

_Response = tuple[list[int], list[float], bool]  # tokens, their log-probs, whether it ended by itself


class _How(NamedTuple):
    """What does not differ between the batches of one call of `generate`."""

    lm: nn.Module
    way: Way
    sampling: Sampling
    stop: Stop
    pad: int


@dataclass
class _Rows:
    """The rows of one batch while they are sampled. `live` are those of `batch`, in the order of all."""

    batch: Batch
    live: Tensor  # [live] i64
    tokens: list[list[int]]  # per row, sampled so far
    logp: list[list[float]]
    ended: list[bool]


def _draw(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token [B], logp [B]) of softmax(truncated logits) at the uniform numbers
    u [B]; greedy at temperature 0."""
    z = logprob.process_logits(logits, sampling)
    logp = z.log_softmax(-1)
    if sampling.temperature == 0:
        token = z.argmax(-1)
    else:
        cdf = logp.double().exp().cumsum(-1)
        token = torch.searchsorted(cdf, (u * cdf[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
        token = token.clamp(max=z.shape[-1] - 1)
    return token, logp.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _step(how: _How, rows: _Rows, u: Tensor) -> None:
    """Sample one token for every live row, drop the rows that ended, and run the rest one token further."""
    token, logp = _draw(rows.batch.logits, u[rows.live], how.sampling)
    keep = []
    for k, (i, t, p) in enumerate(zip(rows.live.tolist(), token.tolist(), logp.tolist())):
        rows.tokens[i].append(t)
        rows.logp[i].append(p)
        rows.ended[i] = how.stop.ends(rows.tokens[i])
        if not rows.ended[i] and len(rows.tokens[i]) < how.sampling.max_new:
            keep.append(k)
    if len(keep) < len(token):
        index = torch.tensor(keep, dtype=torch.long, device=token.device)
        rows.live = rows.live[index]
        token = token[index]
        if keep:
            rows.batch.take(index)
    if keep:
        rows.batch.append(how.lm, token)


def _assemble(
    prompts: Sequence[Sequence[int]],
    n: int,
    done: dict[int, _Response],
    pad: int,
    version: int,
) -> Rollout:
    rows = [(prompts[i // n], *done[i]) for i in range(len(prompts) * n)]
    length = torch.tensor([len(p) + len(t) for p, t, _, _ in rows])
    tokens = torch.full((len(rows), int(length.max())), pad)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logp = torch.zeros(tokens.shape)
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


def _sampled(
    how: _How, prompts: Sequence[Sequence[int]], keys: Sequence[int], wanted: Sequence[int]
) -> _Rows:
    """The samples of the numbers `wanted` of each prompt, in one batch."""
    size = len(prompts) * len(wanted)
    rows = _Rows(
        batch=start(how.lm, how.way, prompts, len(wanted), how.pad),
        live=torch.arange(size, device=how.lm.device),
        tokens=[[] for _ in range(size)],
        logp=[[] for _ in range(size)],
        ended=[False] * size,
    )
    longest = how.sampling.max_new
    generators = [rng.generator(rng.fold_in(key, j)) for key in keys for j in wanted]
    u = torch.stack([torch.rand(longest, generator=g, dtype=torch.float64) for g in generators])
    for t in range(longest):
        if not rows.live.numel():
            break
        _step(how, rows, u[:, t].to(how.lm.device))
    return rows


def _parts(prompts: Sequence[Sequence[int]], way: Way, many: int) -> list[list[int]]:
    """The prompts of each batch, at most `many`: of about one length, or of just one."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups = [order]
    if not way.padded:
        groups = [list(group) for _, group in groupby(order, key=lambda i: len(prompts[i]))]
    return [group[at : at + many] for group in groups for at in range(0, len(group), many)]


def _responses(
    how: _How, prompts: Sequence[Sequence[int]], keys: Sequence[int], n: int, batch: int
) -> dict[int, _Response]:
    """The response of each of len(prompts) n rows, `batch` rows at a time."""
    if how.way.single:
        batch = 1
    done: dict[int, _Response] = {}
    for part in _parts(prompts, how.way, max(batch // n, 1)):
        for first in range(0, n, batch):  # more samples than a batch takes
            wanted = range(first, min(first + batch, n))
            rows = _sampled(how, [prompts[i] for i in part], [keys[i] for i in part], wanted)
            names = [i * n + j for i in part for j in wanted]
            done |= zip(names, zip(rows.tokens, rows.logp, rows.ended))
    return done


def _score(lm: nn.Module, rollout: Rollout, sampling: Sampling) -> Tensor:
    """[B, S]: log-probs of given tokens, 0 outside mask."""
    tokens = rollout.tokens.to(lm.device)
    position = torch.arange(tokens.shape[1], device=lm.device).expand(tokens.shape)
    seen = position < rollout.length.to(lm.device).unsqueeze(-1)
    out = lm(input_ids=tokens, attention_mask=seen.long(), position_ids=position, use_cache=False)
    z = logprob.process_logits(out.logits[:, :-1], sampling, keep=tokens[:, 1:])
    logp = torch.nn.functional.pad(logprob.log_probs_from_logits(z, tokens[:, 1:]), (1, 0))
    return torch.where(rollout.mask, logp.cpu(), 0)


def _copy(lm: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    own = dict(lm.named_parameters())
    for name, x in weights:
        if name not in own:
            raise ValueError(f"weights: {name}: expected a parameter of the model, got {list(x.shape)}")
        if own[name].shape != x.shape:
            raise ValueError(f"weights: {name}: expected {list(own[name].shape)}, got {list(x.shape)}")
        own[name].copy_(x)


def hf(lm: nn.Module, tokenizer: Any, *, batch: int = 64, sleep: bool = True) -> Engine:
    """An Engine over a transformers model that it owns: `load` copies weights into it.

    `batch` is rows at a time. Asleep its weights are in host memory; with `sleep` False it never is. Adapters
    are merged into the model first.

    Prompts are sorted by length, so that a batch holds little padding, or none where a model has a state that
    padding gets into (`way_of` asks it, before the first sample). Rows that ended leave the batch at once.
    """
    quantize.require_whole(lm, "an engine")
    if hasattr(lm, "merge_and_unload"):
        lm = lm.merge_and_unload()  # `load` brings weights by the plain model's names
    lm.eval()
    state = {"version": 0, "asleep": False}
    home = lm.device
    pad = tokenizer.pad_token_id
    ends = _ends(lm, tokenizer)
    window = getattr(lm.config.get_text_config(), "max_position_embeddings", None)

    @cache
    def way() -> Way:
        return way_of(lm, pad)

    @torch.no_grad()
    def generate(prompts: Sequence[Any], keys: Sequence[int], *, n: int = 1, sampling: Sampling) -> Rollout:
        """B = len(prompts) n rows, the n samples of a prompt side by side.
        Sample j draws from fold_in(key, j)."""
        wake()
        ids = [list(getattr(p, "ids", p)) for p in prompts]
        _check(ids, keys, n, sampling, window)
        how = _How(lm, way(), sampling, Stop(tokenizer, ends, sampling.stop), pad)
        done = _responses(how, ids, keys, n, batch)
        return _assemble(ids, n, done, pad, state["version"])

    @torch.no_grad()
    def score(rollout: Rollout, *, sampling: Sampling) -> Tensor:
        """[B, S]: the log-probs of given tokens under the engine's weights, by
        one padded forward; 0 outside mask."""
        wake()
        return _score(lm, rollout, sampling)

    @torch.no_grad()
    def load(weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy full tensors by name into the model. ValueError for a name or a shape
        that the model does not have."""
        _copy(lm, weights)
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
