"""A module as `(apply, params)`: the model is a function of its parameters and of a pack."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rft_fn import check, logprob, tree
from rft_fn.model import attention
from rft_fn.model.materialize import materialize
from rft_fn.types import Apply, Packed, Sampling, TokenOut

__all__ = ["Scorer", "bind", "rooted", "score", "split_over", "text_model"]

# config fields by which an architecture changes its logits after the head: these take the whole path
_LOGIT_FIELDS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
}


def text_inputs(lm: nn.Module, pack: Packed, packs: attention.Packs | None = None) -> dict[str, Any]:
    """What a text model of transformers is called with for a pack, the boundaries of its sequences (`packs`,
    or its own) among it where `attention.turn_on` took effect. ValueError for media, which it cannot see, or
    for shapes that disagree."""
    check.shapes(tokens=(pack.tokens, "T"), target=(pack.target, "T"), pos=(pack.pos, "T"))
    if pack.media is not None:
        raise ValueError(f"media: expected None, {type(lm).__name__} is bound as a text model")
    inputs = {"input_ids": pack.tokens[None], "position_ids": pack.pos[None], "use_cache": False}
    packs = packs or attention.packs_of(lm, pack)
    if packs is not None:
        inputs["rft_packs"] = packs
    if pack.num_seqs == 1 or packs is not None:
        # said, so that transformers does not look for more by the values of pos, which vmap does not have
        inputs["attention_mask"] = torch.ones(1, pack.tokens.shape[0], device=pack.tokens.device)
    return inputs


def run(module: nn.Module, pack: Packed, packs: attention.Packs | None = None) -> Any:
    """The output of a text model of transformers, or of the decoder of one, for a pack: each sequence as if
    it were alone. A model that loses the boundaries on the way is run again with a mask.

    `packs` are the boundaries of a pack of which `pack` is this process's part (sequence parallelism);
    ValueError for a model that loses these.
    """
    inputs = text_inputs(module, pack, packs)
    out, given = module(**inputs), inputs.get("rft_packs")
    if given is None or attention.complete(module, given):
        return out
    if packs is not None:
        raise ValueError(f"sp_size: expected 1 for {type(module).__name__}, {attention.unfit_model(module)}")
    attention.turn_off(module, "not all of its layers got the boundaries")
    return module(**text_inputs(module, pack))


class Scorer(nn.Module):
    """A causal language model whose forward takes tokens and targets and gives log-probs, never logits; of K
    more words of each token too, where the pack names them (`extra["words"]` [T, K]).

    The head runs inside this forward, so that a sharded model has its weight gathered there. Two ways: the
    fused one never holds [T, V]; the one over whole logits serves top_p / top_k (the distribution that was
    sampled from is the cut one) and architectures that scale or cap their logits.
    """

    sequence: Any = None  # the axis over which the tokens of a pack are split, if they are

    def __init__(
        self,
        lm: nn.Module,
        sampling: Sampling,
        *,
        entropy: bool = False,
        fused: bool = True,
        chunk_size: int = 0,
    ):
        super().__init__()
        if not sampling.temperature > 0:
            raise ValueError(f"temperature: expected > 0 for training log-probs, got {sampling.temperature}")
        self.lm, self.sampling, self.entropy, self.chunk_size = lm, sampling, entropy, chunk_size
        self.fused = fused and not sampling.truncates and plain_head(lm)
        attention.turn_on(lm)

    def forward(self, pack: Packed) -> TokenOut:
        part, packs = self.sequence.split(pack) if self.sequence else (pack, None)
        out = self._fused(part, packs) if self.fused else self._whole(part, packs)
        out = tree.replace(out, logp=torch.where(part.mask, out.logp, 0))
        return self.sequence.join(out, pack.tokens.shape[0]) if self.sequence else out

    def _fused(self, pack: Packed, packs: attention.Packs | None) -> TokenOut:
        hidden = run(decoder(self.lm), pack, packs).last_hidden_state[0]
        head = self.lm.get_output_embeddings()
        return logprob.linear_logprob(
            hidden,
            head.weight,
            torch.where(pack.mask, pack.target, -100),  # the head does no work for prompts
            temperature=self.sampling.temperature,
            bias=head.bias,
            entropy=self.entropy,
            words=(pack.extra or {}).get("words"),
            workspace_mb=max(len(hidden), 1) * self.chunk_size * 4 / 2**20 if self.chunk_size else None,
        )

    def _whole(self, pack: Packed, packs: attention.Packs | None) -> TokenOut:
        z = logprob.truncate(run(self.lm, pack, packs).logits[0], self.sampling, keep=pack.target)
        if self.entropy:
            logp, ent = logprob.log_probs_and_entropy(z, pack.target)
            ent = torch.where(pack.mask, ent, 0)
        else:
            logp, ent = logprob.log_probs_from_logits(z, pack.target), None
        words = (pack.extra or {}).get("words")
        if words is not None:
            words = torch.where(pack.mask[:, None], z.log_softmax(-1).gather(-1, words), 0)
        return TokenOut(logp=logp, entropy=ent, words_logp=words)


def _inner(lm: nn.Module) -> nn.Module:
    return lm.get_base_model() if hasattr(lm, "get_base_model") else lm


def decoder(lm: nn.Module) -> nn.Module:
    """The part of a causal language model that gives hidden states (adapters stay inside it)."""
    return _inner(lm).base_model


def plain_head(lm: nn.Module) -> bool:
    """Whether logits are exactly head(hidden): a Linear, and nothing in
    the config that changes them afterwards."""
    inner = _inner(lm)
    text = inner.config.get_text_config()
    changed = [
        name for name, neutral in _LOGIT_FIELDS.items() if getattr(text, name, neutral) not in (None, neutral)
    ]
    return type(inner.get_output_embeddings()) is nn.Linear and inner.base_model is not inner and not changed


def _checkpointed(module: nn.Module) -> list[nn.Module]:
    """The layers of transformers that are checkpointed."""
    return [
        m
        for m in module.modules()
        if getattr(m, "gradient_checkpointing", False) and hasattr(m, "_gradient_checkpointing_func")
    ]


def _silence(module: nn.Module) -> None:
    """Dropout off for good: a log-prob is a function of (params, pack).

    transformers checkpoints only layers that are in training mode, so exactly those layers stay in it, and
    their parts not.
    """
    module.eval()
    for layer in _checkpointed(module):
        layer.training = True


def rooted(
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    fused: bool = True,
    chunk_size: int = 0,
) -> nn.Module:
    """The module whose forward maps a Packed to a TokenOut: a causal language model of transformers (with or
    without peft adapters) inside a `Scorer`, any other module itself. Dropout of a language model is off."""
    if not hasattr(module, "get_output_embeddings"):
        return module
    _silence(module)
    return Scorer(module, sampling or Sampling(), entropy=entropy, fused=fused, chunk_size=chunk_size)


def split_over(root: nn.Module, sequence: Any) -> None:
    """Have a `Scorer` or `Critic` share the tokens of each pack over a sequence axis. ValueError for a module
    that cannot, because it is one's own or because its attention knows no boundaries."""
    lm = getattr(root, "lm", None) or getattr(root, "decoder", None)
    why = attention.unfit_model(lm) if hasattr(type(root), "sequence") else "it is a module of one's own"
    if why:
        raise ValueError(f"sp_size: expected 1 for {type(lm or root).__name__}: {why}")
    root.sequence = sequence


def text_model(root: nn.Module) -> nn.Module:
    """The part of a bound module that reads text: of a model with a vision or audio part, its language
    model."""
    lm = getattr(root, "lm", None) or getattr(root, "decoder", root)
    found = [m for name, m in lm.named_modules() if name.split(".")[-1] in ("language_model", "text_model")]
    return found[0] if found else root


def bind(
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    fused: bool = True,
    chunk_size: int = 0,
) -> tuple[Apply, tree.Named]:
    """(apply, params) of a module: `apply(params, packed) -> TokenOut`, params the trainable
    ones by the module's own names.

    A causal language model of transformers (with or without peft adapters) is wrapped in a `Scorer`; any
    other module must itself map a Packed to a TokenOut. `apply` is torch.func.functional_call: it works with
    any parameters, under torch.func.grad and vmap. With gradient checkpointing it refuses all but the
    module's own, because the second forward would read those. Log-probs are at `sampling`'s temperature, cut
    like its top_p / top_k, and 0 outside mask. `fused` without logits [T, V], `chunk_size` columns of the
    vocabulary at a time (0: what suits the device).
    """
    root = rooted(materialize(module), sampling=sampling, entropy=entropy, fused=fused, chunk_size=chunk_size)
    checkpointed = _checkpointed(module)
    prefix = "" if root is module else "lm."
    own = tree.Named((name, p) for name, p in module.named_parameters() if p.requires_grad)

    def apply(params: tree.Named, pack: Packed) -> TokenOut:
        if checkpointed and any(params[name] is not p for name, p in own_parameters):
            raise ValueError(
                "params: a module with gradient checkpointing takes only its own parameters; "
                "load it with gradient_checkpointing=False to call it with others"
            )
        return functional_call(root, {prefix + name: p for name, p in params.items()}, (pack,))

    own_parameters = list(own.items())
    apply.device = next((p.device for p in module.parameters()), None)  # type: ignore[attr-defined]
    return apply, own


@torch.no_grad()
def score(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Tensor]:
    """The log-probs [T] of each pack, without gradient: old and reference
    log-probs. `packing.unpack` makes them [B, S]."""
    return [apply(params, x).logp.to(b.tokens.device) for x, b in zip(beside(apply, params, packs), packs)]


def beside(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Packed]:
    """The packs on the device of the parameters, or of a frozen model's `apply`."""
    device = next((p.device for p in params.values()), getattr(apply, "device", None))
    return [tree.map(lambda x: x.to(device) if device else x, b) for b in packs]
