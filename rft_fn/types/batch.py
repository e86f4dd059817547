"""The stages of a batch: sampled, scored, and packed into micro-batches."""

import torch
from torch import Tensor

from rft_fn import check, tree
from rft_fn.types.distribution import Sampling
from rft_fn.types.media import Media

__all__ = ["Experience", "Packed", "Rollout", "TokenOut", "experience"]


@tree.struct
class Rollout:
    """Sampled responses, right-padded and token-aligned: `logp[b, s]` scores `tokens[b, s]`."""

    tokens: Tensor  # [B, S] i64
    mask: Tensor  # [B, S] bool, True where the policy sampled
    logp: Tensor  # [B, S] f32, by the sampler, 0 outside mask
    length: Tensor  # [B] i64, tokens of prompt and response
    truncated: Tensor  # [B] bool, ended by max_new and not by a stop token
    group: Tensor  # [B] i64, which prompt
    version: Tensor  # [B] i64, of the weights that sampled, the oldest where they changed within a row
    media: Media | None = None
    temperature: Tensor | None = None  # [B] f32, of rows that were drawn with their own; 1 for greedy ones
    # of M routers 1 + each of the k experts that read a token; 0: no forward did, as of the last of a row
    routing: Tensor | None = None  # [B, S, M, k] u8 or i16
    kept: Tensor | None = None  # [B, S, W] i32, 1 + each word that top_p and top_k left; all 0: not known
    versions: Tensor | None = None  # [B, S] i64, of the weights that sampled each token, 0 outside mask
    sampling: Sampling | None = tree.static(default=None)  # that it was drawn with; None: not known


@tree.struct
class Experience:
    """A scored rollout, still token-aligned, ready to be packed."""

    tokens: Tensor  # [B, S] i64
    mask: Tensor  # [B, S] bool
    length: Tensor  # [B] i64
    old_logp: Tensor  # [B, S], of the policy that the update starts from
    adv: Tensor  # [B, S]
    w: Tensor  # [B, S], the weight of each token in the total loss
    ref_logp: Tensor | None = None  # [B, S], of the KL anchor
    old_value: Tensor | None = None  # [B, S]
    ret: Tensor | None = None  # [B, S]
    words: Tensor | None = None  # [B, S, K] i64, more words at each token, for their log-probs
    extra: dict[str, Tensor] | None = None  # name -> [B, S, ...], per-token data for a custom loss
    temperature: Tensor | None = None  # [B], of the rollout, in place of that of `sampling`
    routing: Tensor | None = None  # [B, S, M, k], of the rollout: the experts that the forward is to take
    kept: Tensor | None = None  # [B, S, W], of the rollout, in place of what top_p and top_k leave now
    media: Media | None = None
    group: Tensor | None = None  # [B] i64, which prompt; None: each row (or unit) has its own
    sampling: Sampling | None = tree.static(default=None)  # of the rollout


@tree.struct
class Packed:
    """One micro-batch, flat and label-aligned.

    Everything at t is about `target[t]`, but `routing[t]` about `tokens[t]`. Fields other than tokens,
    target, pos, seq and routing are 0 outside mask.
    Sequences after the first len(rows) are borrowed for their media, or are in an empty pack: nothing of
    them is in mask.
    """

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
    words: Tensor | None = None  # [T, K] i64
    extra: dict[str, Tensor] | None = None  # name -> [T, ...]
    temperature: Tensor | None = None  # [T], in place of that of `sampling`
    routing: Tensor | None = None  # [T, M, k], as of the rollout; 0: the router chooses by itself
    kept: Tensor | None = None  # [T, W], in place of what top_p and top_k leave now
    media: Media | None = None
    num_seqs: int = tree.static()  # K
    rows: tuple[int, ...] = tree.static(default=())  # rows of the Experience, of the first sequences
    # sequences that belong together, the size of each unit: (2, 2) for two pairs; (): each is its own
    unit: tuple[int, ...] = tree.static(default=())
    padding: int = tree.static(default=0)  # masked tokens after the last sequence
    # (which half of the batch it is of: 0 or 1, prompts of the first half, of the second); None: not cut so
    half: tuple[int, int, int] | None = tree.static(default=None)
    sampling: Sampling | None = tree.static(default=None)  # of the rollout


@tree.struct
class TokenOut:
    """Per-target outputs of a model."""

    logp: Tensor  # [T]
    entropy: Tensor | None = None  # [T] nats
    value: Tensor | None = None  # [T]
    aux: Tensor | None = None  # [T] balance of a mixture of experts: 1 if its sequence uses all evenly
    expert_share: Tensor | None = None  # [T] largest share of one expert in the choices of its sequence
    words_logp: Tensor | None = None  # [T, K] of the pack's `words`, if it has some
    sum_p2: Tensor | None = None  # [T] sum of the squared probabilities of all words, without gradient
    score: Tensor | None = None  # [T, H] of H heads of a reward model, the sequence up to this token
    hidden: Tensor | None = None  # [T, D] that a teacher's head reads, see `model.revealed`
    top_words: Tensor | None = None  # [T, K] i64, the likeliest words of a teacher; words_logp is of them
    divergence: Tensor | None = None  # [T] from the teacher of `model.attach_teacher`
    agreement: Tensor | None = None  # [T] 1 where the teacher's likeliest word is the student's


def experience(
    rollout: Rollout,
    *,
    adv: Tensor,
    w: Tensor,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    old_value: Tensor | None = None,
    ret: Tensor | None = None,
    words: Tensor | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Experience:
    """Join a rollout with its advantages and weights [B, S].

    `old_logp` defaults to the sampler's log-probs. `adv` may also be [B, 1] or [B], one advantage per
    response. `words` [B, S, K] are K more words at each token (ids): the model gives their log-probs as
    `out.words_logp` [T, K]. `extra` maps names to data for a custom loss, which reads it as `b.extra[name]`
    [T, ...]: per token [B, S, ...], or per response [B] or [B, 1].
    All of these are data: a gradient that they carry is cut off. ValueError names the field whose shape
    disagrees, or which has NaN (`adv` and `w` also inf) where the policy sampled.
    """
    old_logp = rollout.logp if old_logp is None else old_logp
    for name, x in (extra or {}).items():
        if not isinstance(x, Tensor):
            raise ValueError(
                f"extra[{name!r}]: expected a tensor [B], [B, 1] or [B, S, ...], got {type(x).__name__}; a "
                "constant belongs into the loss itself: functools.partial(loss_fn, name=value)"
            )

    # a number per response holds for each of its tokens
    size = rollout.tokens.shape[-1]
    adv = _on_tokens(adv, size)
    if extra is not None:
        extra = {name: _on_tokens(x, size).detach() for name, x in extra.items()}

    # a wrong shape has a name here; inside the loss it would only be a size
    numbers = {"adv": adv, "w": w, "old_logp": old_logp}
    numbers |= {"ref_logp": ref_logp, "old_value": old_value, "ret": ret}
    of = None if rollout.media is None else rollout.media.of
    check.shapes(
        tokens=(rollout.tokens, "B S"),
        **{name: (x, "B S") for name, x in numbers.items()},
        words=(words, "B S K"),
        **{f"extra[{name!r}]": (x[(..., *[0] * (x.dim() - 2))], "B S") for name, x in (extra or {}).items()},
        **{"media.of": (of, "B")},
        temperature=(rollout.temperature, "B"),
        routing=(rollout.routing, "B S M k"),
        kept=(rollout.kept, "B S W"),
    )
    for name, x in numbers.items():
        _require_numbers(name, x, rollout.mask)

    return Experience(
        tokens=rollout.tokens,
        mask=rollout.mask,
        length=rollout.length,
        old_logp=old_logp.detach(),
        adv=torch.where(rollout.mask, adv.detach().to(w.dtype), 0),
        w=w.detach(),
        ref_logp=_detached(ref_logp),
        old_value=_detached(old_value),
        ret=_detached(ret),
        words=words,
        extra=extra,
        temperature=rollout.temperature,
        routing=rollout.routing,
        kept=rollout.kept,
        media=rollout.media,
        group=rollout.group,
        sampling=rollout.sampling,
    )


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _require_numbers(name: str, x: Tensor | None, mask: Tensor) -> None:
    """Raise ValueError for NaN in mask; log-probs may be -inf, for a word that top_p leaves out."""
    if x is None:
        return
    wrong = (~x.isfinite() if name in ("adv", "w") else x.isnan()) & mask
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expected numbers, got {float(x[row, column])} at token {column} of row {row}, which "
            "the policy sampled"
        )


def _on_tokens(x: Tensor, size: int) -> Tensor:
    """Expand numbers of responses [B] or [B, 1] to their tokens [B, S]; leave others unchanged."""
    if x.dim() == 1:
        x = x.unsqueeze(-1)
    if x.dim() == 2 and x.shape[-1] == 1:
        x = x.expand(-1, size)
    return x
