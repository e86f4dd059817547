"""Whole rows scored by a model: its outputs for every token of a batch, the same on every rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import packing, tree
from rft_fn.model.bind import read_field, require_fields, to_params_device
from rft_fn.model.scorer import Scorer
from rft_fn.types import Apply, Experience, Packed, Rollout, Sampling, TokenOut, experience
from rft_fn.types.strategy import Gather, ScoreRows, Shard

__all__ = ["require_same_sampling", "scorer"]


def require_same_sampling(apply: Apply, drawn: Sampling | None) -> None:
    """ValueError for a language model that scores another distribution than a rollout was drawn from."""
    residence = getattr(apply, "residence", None)
    if drawn is None or residence is None:
        return
    for part in residence.root.modules():
        if isinstance(part, Scorer) and part.sampling.distribution != drawn.distribution:
            raise ValueError(
                f"sampling: expected a model bound with that of the rollout, {drawn.described}, got "
                f"{part.sampling.described}; give st.init and st.bind sampling=rollout.sampling, or "
                "tree.replace(rollout, sampling=None) where that is meant"
            )


def scorer(shard: Shard, gather: Gather) -> ScoreRows:
    """`Strategy.score` for a strategy that cuts batches by `shard` and puts them together by `gather`."""

    @torch.no_grad()
    def score(
        apply: Apply,
        params: Any,
        batch: Experience | Rollout,
        budget: int,
        *,
        fields: Sequence[str] = ("logp",),
    ) -> TokenOut:
        require_fields(fields)
        require_same_sampling(apply, batch.sampling)

        # every rank scores its own packs, and gets the rows of all
        exp = _all_rows(batch)
        packs = shard(exp, budget)
        outs = [apply(params, pack) for pack in to_params_device(apply, params, packs)]
        names = list(dict.fromkeys(["logp", *fields]))  # in the same order on every rank, as a set is not
        rows = {name: _rows(name, outs, packs, exp, gather) for name in names}
        return TokenOut(**rows)

    return score


def _all_rows(batch: Experience | Rollout) -> Experience:
    """The batch with a weight on every token in mask, so that no row is left out."""
    w = batch.mask.float()
    if isinstance(batch, Rollout):  # whose own log-probs may be NaN: they are what is looked into
        zero = torch.zeros_like(w)
        return experience(batch, adv=zero, w=w, old_logp=zero)
    return tree.replace(batch, w=w)


def _rows(
    name: str, outs: Sequence[TokenOut], packs: Sequence[Packed], exp: Experience, gather: Gather
) -> Tensor:
    """One field of the packs of all ranks as [B, S, ...], 0 outside mask."""
    mine = [read_field(out, name).to(exp.tokens.device) for out in outs]
    return gather(packing.unpack(mine, packs, exp.tokens)[None]).sum(0)
