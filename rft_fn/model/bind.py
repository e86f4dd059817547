"""A module as `(apply, params)`: the model is a function of its parameters and of a pack."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rft_fn import logprob, tree
from rft_fn.model import attention, probe, router
from rft_fn.model.materialize import materialize
from rft_fn.model.text import decoder, inner, run
from rft_fn.types import Apply, Packed, Sampling, TokenOut

__all__ = ["Scorer", "applied", "bind", "score", "split_over", "text_model", "wrap_for_training"]


class Scorer(probe.Reader):
    """A causal language model whose forward takes tokens and targets and gives log-probs, never logits; of K
    more words of each token too, where the pack names them (`extra["words"]` [T, K]).

    The head runs inside this forward, so that a sharded model has its weight gathered there. Two ways: the
    fused one never holds [T, V]; the one over whole logits serves top_p / top_k (the distribution that was
    sampled from is the cut one) and architectures that scale or cap their logits, which is found by a probe.
    With `aux` the balance of experts is said too; ValueError for a model that has none.
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
        self.lm, self.sampling, self.entropy, self.chunk_size = lm, sampling, entropy, chunk_size
        self.fused = fused and not sampling.truncates and _linear_head(lm)
        self.balance = router.Balance(inner(lm)) if aux else None
        attention.turn_on(lm)

    def forward(self, pack: Packed) -> TokenOut:
        if self.balance is None or not isinstance(pack, probe.Question):
            return super().forward(pack)
        with self.balance.listen() as heard:
            found = super().forward(pack)
        self.balance.settle(heard)
        return found

    def body(self) -> nn.Module:
        return decoder(self.lm)

    def read(self, pack: Packed, packs: attention.SequenceBounds | None) -> TokenOut:
        if self.balance is None:
            return self._scored(pack, packs)
        with self.balance.listen() as heard:
            out = self._scored(pack, packs)
        aux, share = (torch.where(pack.mask, x, 0) for x in self.balance(heard, pack, packs))
        return tree.replace(out, aux=aux, expert_share=share)

    def _scored(self, pack: Packed, packs: attention.SequenceBounds | None) -> TokenOut:
        out = self._fused(pack, packs) if self.fused else self._whole(pack, packs)
        return tree.replace(out, logp=torch.where(pack.mask, out.logp, 0))

    def _fused(self, pack: Packed, packs: attention.SequenceBounds | None) -> TokenOut:
        hidden = run(self.body(), pack, packs, way=self.way).last_hidden_state[0]
        head = self.lm.get_output_embeddings()
        workspace = None
        if self.chunk_size:
            workspace = max(len(hidden), 1) * self.chunk_size * 4 / 2**20  # in float32
        return logprob.linear_logprob(
            hidden,
            head.weight,
            torch.where(pack.mask, pack.target, -100),  # the head does no work for prompts
            temperature=self.sampling.temperature,
            bias=head.bias,
            entropy=self.entropy,
            words=(pack.extra or {}).get("words"),
            workspace_mb=workspace,
        )

    def _whole(self, pack: Packed, packs: attention.SequenceBounds | None) -> TokenOut:
        logits = run(self.lm, pack, packs, way=self.way).logits[0]
        z = logprob.process_logits(logits, self.sampling, keep=pack.target)
        # in place, without a copy: a where on the results alone leaves 0 * inf in the gradient
        z = z.masked_fill_(~pack.mask[:, None], 0)
        ent = None
        if self.entropy:
            logp, ent = logprob.log_probs_and_entropy(z, pack.target)
            ent = torch.where(pack.mask, ent, 0)
        else:
            logp = logprob.log_probs_from_logits(z, pack.target)
        words = (pack.extra or {}).get("words")
        if words is not None:
            words = torch.where(pack.mask[:, None], z.log_softmax(-1).gather(-1, words), 0)
        return TokenOut(logp=logp, entropy=ent, words_logp=words)


def _linear_head(lm: nn.Module) -> bool:
    """Whether hidden states and the matrix that makes logits of them can be had: without adapters on it."""
    return type(inner(lm).get_output_embeddings()) is nn.Linear and decoder(lm) is not inner(lm)


class _Silent:
    """The checkpointing function of a layer, such that the layer is in training mode when transformers looks
    whether to checkpoint it, and not while it runs: many read their own mode for dropout."""

    def __init__(self, layer: nn.Module, function: Callable):
        self.layer, self.function = layer, function

    def __call__(self, forward: Callable, *args: Any) -> Any:
        def silent(*inputs: Any) -> Any:
            self.layer.training = False
            try:
                return forward(*inputs)
            finally:
                self.layer.training = True

        return self.function(silent, *args)


def _checkpointed(module: nn.Module) -> list[nn.Module]:
    """The layers of transformers that are checkpointed. ValueError for a model with other ways of its own."""
    on = [
        m
        for m in module.modules()
        if getattr(m, "gradient_checkpointing", False) and hasattr(m, "_gradient_checkpointing_func")
    ]
    if not on:
        return []
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in on if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"gradient_checkpointing: expected layers of transformers' GradientCheckpointingLayer, "
            f"{type(module).__name__} has none; load it without"
        )
    return layers


def disable_dropout(module: nn.Module) -> None:
    """Dropout off for good: a log-prob is a function of (params, pack). Checkpointed layers stay so."""
    module.eval()
    for layer in _checkpointed(module):
        layer.training = True
        if not isinstance(layer._gradient_checkpointing_func, _Silent):
            layer._gradient_checkpointing_func = _Silent(layer, layer._gradient_checkpointing_func)


def wrap_for_training(
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
    fused: bool = True,
    chunk_size: int = 0,
) -> nn.Module:
    """The module whose forward maps a Packed to a TokenOut: a causal language model of transformers (with or
    without peft adapters) inside a `Scorer`, any other module itself. Dropout of a language model is off.
    ValueError for `aux` of a module that has no routers of experts."""
    if not hasattr(module, "get_output_embeddings"):
        if aux:
            raise ValueError(f"aux: expected False for {type(module).__name__}, whose TokenOut is its own")
        return module
    disable_dropout(module)
    options: dict[str, Any] = {"entropy": entropy, "aux": aux, "fused": fused, "chunk_size": chunk_size}
    return Scorer(module, sampling or Sampling(), **options)


def split_over(root: nn.Module, sequence: Any) -> None:
    """Have a `Scorer` or `Critic` share the tokens of each pack over a sequence axis. ValueError for a module
    that cannot, because it is one's own or because its attention knows no boundaries."""
    lm = getattr(root, "lm", None) or getattr(root, "decoder", None)
    why: str | None = "it is a module of one's own"
    if hasattr(type(root), "sequence"):
        why = attention.unfit_model(lm)  # type: ignore[arg-type]
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
    aux: bool = False,
    fused: bool = True,
    chunk_size: int = 0,
) -> tuple[Apply, tree.Named]:
    """(apply, params) of a module: `apply(params, packed) -> TokenOut`, params the trainable
    ones by the module's own names.

    A causal language model of transformers (with or without peft adapters) is wrapped in a `Scorer`; any
    other module must itself map a Packed to a TokenOut. `apply` is torch.func.functional_call: it works with
    any parameters, under torch.func.grad and vmap. With gradient checkpointing it refuses all but the
    module's own, because the second forward would read those. Log-probs are at `sampling`'s temperature, cut
    like its top_p / top_k, and 0 outside mask. `aux`: how evenly experts are used, see `model.router`;
    ValueError for a model without. `fused` without logits [T, V], `chunk_size` columns of the
    vocabulary at a time (0: what suits the device).
    """
    options: dict[str, Any] = {"entropy": entropy, "aux": aux, "fused": fused, "chunk_size": chunk_size}
    root = wrap_for_training(materialize(module), sampling=sampling, **options)
    probe.settle(root)
    return applied(root, module)


def applied(root: nn.Module, module: nn.Module) -> tuple[Apply, tree.Named]:
    """(apply, params) of a module and what `wrap_for_training` made of it."""
    checkpointed = _checkpointed(module)
    prefix = "" if root is module else "lm."
    own = tree.Named((name, p) for name, p in module.named_parameters() if p.requires_grad)
    own_parameters = list(own.items())

    def apply(params: tree.Named, pack: Packed) -> TokenOut:
        if checkpointed and any(params[name] is not p for name, p in own_parameters):
            raise ValueError(
                "params: a module with gradient checkpointing takes only its own parameters; "
                "load it with gradient_checkpointing=False to call it with others"
            )
        return functional_call(root, {prefix + name: p for name, p in params.items()}, (pack,))

    apply.device = next((p.device for p in module.parameters()), None)  # type: ignore[attr-defined]
    return apply, own


@torch.no_grad()
def score(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Tensor]:
    """The log-probs [T] of each pack, without gradient: old and reference
    log-probs. `packing.unpack` makes them [B, S]."""
    moved = to_params_device(apply, params, packs)
    return [apply(params, x).logp.to(b.tokens.device) for x, b in zip(moved, packs)]


def to_params_device(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Packed]:
    """The packs on the device of the parameters, or of a frozen model's `apply`."""
    device = next((p.device for p in params.values()), getattr(apply, "device", None))
    if device is None:
        return list(packs)
    return [tree.map(lambda x: x.to(device), b) for b in packs]
