"""Scores rows: padded forwards of the decoder, and its head over a few tokens at a time.

Whole logits of 128 rows of 1,024 tokens over 152,000 words are 80 GB. What a model does after its decoder (a
head, its bias, a cap, a scale) is its own code in either case: it is called again with the decoder's output
of fewer tokens.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import logprob
from rft_fn.engine import prompt_media
from rft_fn.engine.hf.row_media import media_arguments
from rft_fn.logprob import default_workspace_mb
from rft_fn.model.forward import rope_switch
from rft_fn.model.parts import find
from rft_fn.types import Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["score_rows"]

_LEAST = 16  # tokens at a time, whatever the workspace


def score_rows(
    lm: "PreTrainedModel",
    rollout: Rollout,
    sampling: Sampling,
    *,
    pad: int,
    workspace_mb: float | None = None,
) -> Tensor:
    """Return the log-probs [B, S] of what was sampled, 0 elsewhere, without gradient.

    By one forward, or by two where a row has passed a switch of rotary factors. `workspace_mb` bounds the
    logits that exist at a time (None: chosen per device), of a model whose decoder is apart from its head.
    """
    # the last token of a row is not read, as in training: it may be a placeholder of media
    read = (rollout.length - 1).clamp(min=1)
    decoded = _decoded(lm, rollout, read, pad)
    states = decoded.states
    switch = rope_switch(lm.config)
    if switch is not None and states.shape[1] > switch and rollout.mask[:, : switch + 1].any():
        early = _decoded(lm, rollout, read.clamp(max=switch), pad).states
        states = torch.cat([early, states[:, switch:]], 1)

    # the tokens that were sampled; the first one of a row is scored by nothing
    row, at = rollout.mask[:, 1:].nonzero(as_tuple=True)
    target = rollout.tokens[row, at + 1].to(states.device)
    own = None if rollout.temperature is None else rollout.temperature[row].to(states.device)
    kept = None if rollout.kept is None else rollout.kept[row, at + 1].to(states.device)
    states = states[row.to(states.device), at.to(states.device)]

    mb = default_workspace_mb(states.device.type) if workspace_mb is None else workspace_mb
    most = max(_LEAST, int(mb * 2**20 / (4 * decoded.vocabulary)))
    logp = torch.zeros(rollout.tokens.shape)
    for first in range(0, len(target), most):
        part = slice(first, first + most)
        logits = decoded.logits(states[part])
        temperature = None if own is None else own[part]
        # a token outside of the cut keeps a finite log-prob
        z = logprob.process_logits(
            logits,
            sampling,
            keep=target[part],
            temperature=temperature,
            kept=None if kept is None else kept[part],
        )
        logp[row[part], at[part] + 1] = logprob.log_probs_from_logits(z, target[part]).cpu()
    return logp


class _Decoded(NamedTuple):
    """What the decoder of a model makes of rows, and what the model makes of that."""

    states: Tensor  # [B, W, D] of its output; [B, W, V] logits of a model without a decoder of its own
    vocabulary: int  # V
    logits: Callable[[Tensor], Tensor]  # of states [T, D]: [T, V]


def _decoded(lm: "PreTrainedModel", rollout: Rollout, read: Tensor, pad: int) -> _Decoded:
    """Run the decoder on the first `read` [B] tokens of each row."""
    position = torch.arange(int(read.max()), device=lm.device).expand(len(read), -1)
    tokens = rollout.tokens[:, : position.shape[1]].to(lm.device)
    seen = position < read.to(lm.device).unsqueeze(-1)
    tokens = torch.where(seen, tokens, pad)
    media = prompt_media.of_rows(rollout, read)
    inputs = {"position_ids": position} | media_arguments(lm, tokens, seen, media)
    inputs |= {"input_ids": tokens, "attention_mask": seen.long(), "use_cache": False}

    # the model itself calls its decoder, or the text model in it; what comes after sees one token of a row
    parts = find(lm)
    called: list[nn.Module] = []
    outputs: list[Any] = []

    def first_tokens(part: nn.Module, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        called.append(part)
        if called[0] is not part:
            return forward(*args, **given)
        outputs.append(forward(*args, **given))
        return _with_states(outputs[-1], outputs[-1].last_hidden_state[:, :1])

    with ExitStack() as stack:
        for part in {parts.decoder, parts.text} - {lm}:
            stack.enter_context(_called_as(part, partial(first_tokens, part, part.forward)))
        logits = lm(**inputs).logits
    if len(outputs) != 1:  # it has none of its own
        return _Decoded(logits, logits.shape[-1], lambda states: states)

    def logits_of(states: Tensor) -> Tensor:
        given = _with_states(outputs[0], states.unsqueeze(0))
        with _called_as(called[0], lambda *_, **__: given):
            return lm(**inputs).logits[0]

    return _Decoded(outputs[0].last_hidden_state, logits.shape[-1], logits_of)


def _with_states(output: Any, states: Tensor) -> Any:
    """Return a decoder's output with other hidden states."""
    output = copy.copy(output)
    output.last_hidden_state = states
    return output


@contextmanager
def _called_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a module do something else when it is called in the block."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
