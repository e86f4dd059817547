"""A causal language model whose forward takes tokens and targets and gives log-probs."""

from typing import Any

import torch
from torch import nn

from rft_fn import logprob, tree
from rft_fn.model import attention, linear, router
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.freeze import disable_dropout
from rft_fn.model.lora import require_plain_adapters
from rft_fn.model.parts import find
from rft_fn.model.probe import Found, Question
from rft_fn.model.reader import Reader
from rft_fn.model.text import POSITIONS, run
from rft_fn.types import Packed, Sampling, TokenOut

__all__ = ["Scorer", "wrap_for_training"]


class Scorer(Reader):
    """A causal language model that gives the log-probs of a pack's targets.

    Where a pack has `words` [T, K], the output also has the log-probs of K more words per target.
    The head runs inside this forward, so that a sharded model has its weight gathered there. The `fused` head
    never holds logits [T, V]. Whole logits are for top_p and top_k (log-probs are of the cut distribution,
    which was sampled from), and for models that scale or cap their logits, which a probe finds. With `aux`
    the output has the balance of experts; ValueError for a model without any.
    """

    def __init__(
        self,
        lm: nn.Module,
        sampling: Sampling,
        *,
        entropy: bool = False,
        aux: bool = False,
        fused: bool = True,
        chunk_size: int = 0,
    ):
        super().__init__()
        if not sampling.temperature > 0:
            raise ValueError(f"temperature: expected > 0 for training log-probs, got {sampling.temperature}")
        self.lm = lm
        self.parts = find(lm)
        self.sampling = sampling
        self.entropy = entropy
        self.chunk_size = chunk_size
        self.fused = fused and not sampling.truncates and self.parts.has_linear_head
        self.balance: router.Balance | None = None
        if aux:
            self.balance = router.Balance(self.parts.model)
        attention.turn_on(lm)

    def answer(self, asked: Question) -> Found:
        if self.balance is None:
            return super().answer(asked)
        with self.balance.listen() as heard:
            found = super().answer(asked)
        self.balance.settle(heard)
        return found

    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        if self.balance is None:
            return self._scored(pack, bounds)
        with self.balance.listen() as heard:
            out = self._scored(pack, bounds)
        aux, share = self.balance(heard, pack, bounds)
        aux = torch.where(pack.mask, aux, 0)
        share = torch.where(pack.mask, share, 0)
        return tree.replace(out, aux=aux, expert_share=share)

    def _scored(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        score = self._whole
        if self.fused:
            score = self._fused
        out = score(pack, bounds)
        return tree.replace(out, logp=torch.where(pack.mask, out.logp, 0))

    def _fused(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        way = self.way or POSITIONS
        hidden = run(self.parts.decoder, pack, bounds, way=way, share=self.shared).last_hidden_state[0]
        workspace: float | None = None
        if self.chunk_size:
            workspace = max(len(hidden), 1) * self.chunk_size * 4 / 2**20  # in float32
        return logprob.linear_logprob(
            hidden,
            self.parts.head.weight,
            torch.where(pack.mask, pack.target, -100),  # the head does no work for prompts
            temperature=self.sampling.temperature,
            bias=self.parts.head.bias,
            entropy=self.entropy,
            words=pack.words,
            workspace_mb=workspace,
        )

    def _whole(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        logits = run(self.lm, pack, bounds, way=self.way or POSITIONS).logits[0]
        z = logprob.process_logits(logits, self.sampling, keep=pack.target)
        # in place, without a copy: a where on the results alone leaves 0 * inf in the gradient
        z = z.masked_fill_(~pack.mask[:, None], 0)

        entropy = None
        if self.entropy:
            logp, entropy = logprob.log_probs_and_entropy(z, pack.target)
            entropy = torch.where(pack.mask, entropy, 0)
        else:
            logp = logprob.log_probs_from_logits(z, pack.target)
        words_logp = None
        if pack.words is not None:
            words_logp = torch.where(pack.mask[:, None], z.log_softmax(-1).gather(-1, pack.words), 0)
        return TokenOut(logp=logp, entropy=entropy, words_logp=words_logp)


def wrap_for_training(
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
    fused: bool = True,
    chunk_size: int = 0,
    fast_linear: bool = True,
    share_prefixes: bool = True,
) -> nn.Module:
    """The module whose forward maps a Packed to a TokenOut.

    A causal language model of transformers, with or without peft adapters, inside a `Scorer`, its dropout
    off; any other module itself. With `fast_linear` its linear layers are those of `linear.set_fast`; with
    `share_prefixes` tokens that begin alike in a pack are computed once, where `reader.settle` finds that it
    changes nothing. ValueError for `aux` of a module without routers of experts, and for adapters that are
    more than LoRA.
    """
    linear.set_fast(module, fast_linear)
    router.without_groups(module)
    if not hasattr(module, "get_output_embeddings"):
        if aux:
            raise ValueError(f"aux: expected False for {type(module).__name__}, whose TokenOut is its own")
        if isinstance(module, Reader):
            module.shared = share_prefixes
        return module
    require_plain_adapters(module)
    disable_dropout(module)
    options: dict[str, Any] = {"entropy": entropy, "aux": aux, "fused": fused, "chunk_size": chunk_size}
    scorer = Scorer(module, sampling or Sampling(), **options)
    # the balance of experts counts every token of every sequence
    scorer.shared = share_prefixes and scorer.fused and not aux
    return scorer
