"""The records that every part of the project speaks in.

Dimensions: N prompts, G samples a prompt, B = N G sequences, S padded length, T tokens of a pack, K sequences
of a pack, V vocabulary, D width. `mask` is bool and never a weight; `w` is float and never a mask.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import check, tree
from rft_fn.check import AtLeast0, Count, PositiveShare, Share, Whole

__all__ = [
    "Engine", "EngineConfig", "Experience", "LossFn", "Media", "Packed", "Rollout", "Sampling", "Strategy",
    "TokenOut", "TrainState", "Transform", "experience",
]  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. One object for the engine and for the trainer, so that log-probs are of the
    distribution that was sampled from: logits / temperature, then the top_k largest, then the smallest set
    with mass top_p, renormalised."""

    temperature: AtLeast0 = 1.0  # 0 is greedy
    top_p: PositiveShare = 1.0
    top_k: Whole = 0  # 0 keeps all
    max_new: Count = 256  # tokens
    stop: tuple[int | str, ...] = ()  # token ids, or texts, that end a response; the engine adds the eos

    def __post_init__(self) -> None:
        check.fields(self)
        if "" in self.stop:
            raise ValueError(f"stop: expected token ids and texts that are not empty, got {self.stop}")

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class EngineConfig:
    """The engine that samples. ValueError for values out of range."""

    type: str = "hf"
    """hf: transformers in this process"""
    batch: Count = 64
    """sequences sampled at a time"""
    tp_size: Count = 1
    """processes that share one engine"""
    mem_util: Share = 0.0
    """share of the device's memory that the engine may take; 0 is as much as it needs"""
    sleep: bool = True
    """the engine leaves the device while the trainer works"""

    __post_init__ = check.fields


@tree.struct
class Media:
    """Ragged tensors of one modality batch, by the processor's own names, concatenated along dim 0."""

    tensors: dict[str, Tensor]  # e.g. pixel_values [rows, ...], image_grid_thw [images, 3]
    rows: dict[str, Tensor]  # name -> [B] i64: how many rows of it each sequence owns

    def take(self, index: list[int]) -> "Media":
        """The media of the sequences `index`, in that order."""
        out = {}
        for name, x in self.tensors.items():
            parts = x.split(self.rows[name].tolist())
            out[name] = torch.cat([parts[i] for i in index]) if index else x[:0]
        return Media(tensors=out, rows={name: r[index] for name, r in self.rows.items()})


@tree.struct
class Rollout:
    """What an engine returns: right-padded and token-aligned (`logp[b, s]` scores `tokens[b, s]`)."""

    tokens: Tensor  # [B, S] i64
    mask: Tensor  # [B, S] bool, True where the policy sampled
    logp: Tensor  # [B, S] f32, the sampler's own, 0 outside mask
    length: Tensor  # [B] i64, tokens of prompt and response
    truncated: Tensor  # [B] bool, ended by max_new and not by a stop token
    group: Tensor  # [B] i64, which prompt
    version: Tensor  # [B] i64, of the weights that sampled
    media: Media | None = None


@tree.struct
class Experience:
    """A scored rollout, still token-aligned: what the packer cuts."""

    tokens: Tensor  # [B, S] i64
    mask: Tensor  # [B, S] bool
    length: Tensor  # [B] i64
    old_logp: Tensor  # [B, S], of the policy that the update starts from
    adv: Tensor  # [B, S]
    w: Tensor  # [B, S], the weight of each token in the total loss
    ref_logp: Tensor | None = None  # [B, S], of the KL anchor
    old_value: Tensor | None = None  # [B, S]
    ret: Tensor | None = None  # [B, S]
    extra: dict[str, Tensor] | None = None  # name -> [B, S, ...], what a loss of your own needs of each token
    media: Media | None = None


@tree.struct
class Packed:
    """One micro-batch, flat and label-aligned: everything at t is about `target[t]`; 0 outside mask."""

    tokens: Tensor  # [T] i64, the inputs
    target: Tensor  # [T] i64, the token after each input
    pos: Tensor  # [T] i64, restarts at 0 in each sequence
    seq: Tensor  # [T] i64, which sequence of the pack
    mask: Tensor  # [T] bool, True where target was sampled by the policy
    old_logp: Tensor  # [T]
    adv: Tensor  # [T]
    w: Tensor  # [T]
    ref_logp: Tensor | None = None  # [T]
    old_value: Tensor | None = None  # [T]
    ret: Tensor | None = None  # [T]
    extra: dict[str, Tensor] | None = None  # name -> [T, ...]
    media: Media | None = None
    num_seqs: int = tree.static()  # K
    rows: tuple[int, ...] = tree.static(default=())  # the row of the Experience behind each sequence
    unit: int = tree.static(default=1)  # sequences that belong together: 2 in losses of pairs
    padding: int = tree.static(default=0)  # masked tokens after the last sequence


@tree.struct
class TokenOut:
    """What a model says of each target of a pack."""

    logp: Tensor  # [T]
    entropy: Tensor | None = None  # [T] nats
    value: Tensor | None = None  # [T]
    aux: Tensor | None = None  # [T] of a mixture of experts: 1 where its sequence uses all of them evenly
    expert_share: Tensor | None = None  # [T] largest share that an expert has of the choices of its sequence
    words_logp: Tensor | None = (
        None  # [T, K] of the words `extra["words"]` [T, K], where a pack asks for some
    )


@tree.struct
class TrainState:
    """Everything that an update needs and changes. Donated to `Strategy.update`."""

    params: Any  # tree.Named of tensors
    opt: Any  # what tx.init made of them
    step: int  # updates done
    skipped: int = 0  # updates in a row, up to now, whose gradients were not finite
    tx: "Transform" = tree.static()
    module: Any = tree.static(default=None)  # that the params are of: an export reads what it does not train


LossFn = Callable[[TokenOut, Packed], Any]  # -> loss [T], or (loss [T], {name: Metric})
Apply = Callable[[Any, Packed], TokenOut]


class Transform(NamedTuple):
    """A transformation of gradients as a value (optax's idea): a pair of
    functions and a description of itself."""

    init: Callable[[Any], Any]  # params -> state
    update: Callable[
        [Any, Any, Any], tuple[Any, Any]
    ]  # (grads, state, params) -> (updates, state); grads are donated
    spec: Mapping[str, Any]  # plain data: what a backend with an optimizer of its own lowers


class Strategy(NamedTuple):
    """Where and how a train step runs. The same record for every backend; every function is called by all
    ranks alike, in the same order."""

    init: Callable[..., tuple[Apply, TrainState]]  # (module, tx, *, sampling, entropy, aux, shard_size)
    bind: Callable[
        ..., tuple[Apply, Any]
    ]  # (module, *, sampling, entropy, aux, shard_size): a model that only scores
    shard: Callable[..., list[Packed]]  # (exp, budget, *, unit) -> this rank's packs
    gather: Callable[[Any], Any]  # tree of this rank -> tree of all ranks, concatenated along dim 0
    all_reduce: Callable[..., Any]  # (tree, op="mean") -> tree, the same on every rank
    grad: Callable[..., tuple[Any, dict]]  # (state, apply, loss_fn, packs) -> (grads, metrics)
    update: Callable[..., tuple[TrainState, dict]]  # (state, grads) -> (state, metrics); donates both
    export: Callable[[TrainState], Iterator[tuple[str, Tensor]]]  # full tensors by the model's own names
    save_pretrained: Callable[..., Any]  # (folder, module, tokenizer, weights, *, merge) -> a folder
    save: Callable[..., Any]  # (path, state, extra, *, score, wait) -> the folder
    restore: Callable[..., tuple[Any, Any]]  # (path, like, extra) -> (state, extra)
    offload: Callable[[TrainState], TrainState]  # optimizer state to the host
    reload: Callable[[TrainState], TrainState]  # and back
    print: Callable[..., None]  # on rank 0
    report_memory: Callable[..., dict]  # (prefix) -> bytes by name, and a line on rank 0
    rank: int
    world: int
    device: torch.device
    config: Any  # the StrategyConfig


class Engine(NamedTuple):
    """What samples from the policy. `load` gives it weights and a version; it samples
    with what it was last given."""

    generate: Callable[..., Rollout]  # (prompts, keys, *, n, sampling) -> Rollout
    score: Callable[..., Tensor]  # (rollout, *, sampling) -> logp [B, S]
    load: Callable[..., None]  # (weights, *, version)
    sleep: Callable[[], None]
    wake: Callable[[], None]
    status: Callable[[], dict]


def experience(
    rollout: Rollout,
    *,
    adv: Tensor,
    w: Tensor,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    old_value: Tensor | None = None,
    ret: Tensor | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Experience:
    """A rollout with advantages and weights [B, S]. `old_logp` is the sampler's own unless another is given.

    `adv` may be [B, 1] or [B]: it is spread over the mask. `extra` holds data [B, S, ...] of your own: it
    moves with its tokens and comes to the loss as `b.extra[name]` [T, ...]. ValueError when a shape
    disagrees, with the field's name.
    """
    adv = adv.unsqueeze(-1) if adv.dim() == 1 else adv
    if adv.dim() == 2 and adv.shape[-1] == 1:
        adv = adv.expand(-1, rollout.tokens.shape[-1])
    check.shapes(tokens=(rollout.tokens, "B S"), adv=(adv, "B S"))
    adv = torch.where(rollout.mask, adv.to(w.dtype), 0)
    old_logp = rollout.logp if old_logp is None else old_logp
    fields = {
        "adv": adv,
        "w": w,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "old_value": old_value,
        "ret": ret,
    }
    spec: dict[str, Any] = {"tokens": (rollout.tokens, "B S")} | {k: (v, "B S") for k, v in fields.items()}
    spec |= {f"extra[{k!r}]": (v[(...,) + (0,) * (v.dim() - 2)], "B S") for k, v in (extra or {}).items()}
    check.shapes(**spec)
    return Experience(
        tokens=rollout.tokens,
        mask=rollout.mask,
        length=rollout.length,
        media=rollout.media,
        extra=extra,
        **fields,  # type: ignore[arg-type]
    )
