"""A batch on its way: what an engine returns, what is learned from it, and one micro-batch."""

from typing import Any

import torch
from torch import Tensor

from rft_fn import check, tree

__all__ = ["Experience", "Media", "Packed", "Rollout", "TokenOut", "experience"]


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

    @staticmethod
    def concat(parts: "list[Media | None]", counts: list[int]) -> "Media | None":
        kinds = dict.fromkeys(name for part in parts if part for name in part.tensors)
        if not kinds:
            return None
        tensors = {k: torch.cat([p.tensors[k] for p in parts if p and k in p.tensors]) for k in kinds}
        none = Media(tensors={}, rows={})
        rows = {
            k: torch.cat(
                [(p or none).rows.get(k, torch.zeros(n, dtype=torch.long)) for p, n in zip(parts, counts)]
            )
            for k in kinds
        }
        return Media(tensors=tensors, rows=rows)


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
    extra: dict[str, Tensor] | None = None  # name -> [B, S, ...], per-token data for a custom loss
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
    """Per-target outputs of a model."""

    logp: Tensor  # [T]
    entropy: Tensor | None = None  # [T] nats
    value: Tensor | None = None  # [T]
    aux: Tensor | None = None  # [T] of a mixture of experts: 1 where its sequence uses all of them evenly
    expert_share: Tensor | None = None  # [T] largest share that an expert has of the choices of its sequence
    words_logp: Tensor | None = None  # [T, K], of the words `extra["words"]` [T, K] where a pack has them


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
