"""The cut of a batch into packs, as the models of a strategy allow."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rft_fn import check, packing, tree
from rft_fn.model import reader
from rft_fn.model.forward import ONE_SEQUENCE
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Experience
from rft_fn.types.media import MEDIA_COST

__all__ = ["Packer"]


class Packer:
    """Cuts batches into packs, as the models of a strategy allow.

    Each model is tested when it is bound. After one that mixes the sequences of a pack, a pack has one
    sequence (one unit); after one that computes common beginnings once, rows that begin alike stay together.
    """

    def __init__(self, config: StrategyConfig, agree: Callable[[bool], bool] = bool):
        self.config = config
        self.agree = agree  # whether x is true on every process
        self.one_unit = False
        self.shared = False

    def settle(self, root: nn.Module, call: Callable[..., Any] | None = None) -> None:
        """Test a model by `reader.detect_packing`, on all processes alike; `call` is the module as run."""
        reader.detect_packing(root, call=call, agree=self.agree)
        if isinstance(root, reader.Reader):
            self.one_unit |= root.mode == ONE_SEQUENCE
            self.shared |= root.shared

    def rows(
        self,
        exp: Experience,
        budget: int,
        *,
        world: int = 1,
        unit: int | Sequence[int] = 1,
        media_cost: float = MEDIA_COST,
    ) -> list[list[list[int]]]:
        """Return the rows of each pack of each rank: `packing.cut` with the options of the config.

        Packs have at most `budget` tokens and micro_train_batch_size sequences; without packing_samples
        exactly so many (the last one fewer), whatever their tokens.
        """
        packing_samples = self.config.packing_samples
        most = self.config.micro_train_batch_size
        if not packing_samples:
            most = max([most, *check.units(unit, len(exp.tokens))])
        return packing.cut(
            exp,
            budget if packing_samples else 0,
            world,
            unit=unit,
            most=0 if self.one_unit else most,
            one_unit=self.one_unit,
            media_cost=media_cost,
            share_prefixes=self.shared and packing_samples,
        )

    def halved(
        self,
        exp: Experience,
        budget: int,
        plans: list[list[list[int]]],
        *,
        unit: int | Sequence[int] = 1,
        media_cost: float = MEDIA_COST,
        always: bool | None = True,
    ) -> tuple[list[list[list[int]]], packing.Halves | None]:
        """Return (the rows of each pack of each rank, its cut in halves), no prompt in both.

        The halves are the same for any number of ranks. `plans` are the usual packs, and stay so on one rank
        where some of them hold half of the prompts whole. Where one rank would not have the usual ones:
        (plans, None), unless `always`.
        """
        world = len(plans)
        one = plans if world == 1 else self.rows(exp, budget, unit=unit, media_cost=media_cost)
        found = packing.halves(exp, one[0], unit=unit)
        if world == 1 and found.packs:
            return plans, found
        if not found.packs and not always:
            return plans, None
        parts = [
            self.rows(
                tree.replace(exp, mask=exp.mask & (found.second == side).unsqueeze(-1)),
                budget,
                world=world,
                unit=unit,
                media_cost=media_cost,
            )
            for side in (False, True)
        ]
        both = [first + second for first, second in zip(*parts)]
        return both, found._replace(packs=len(parts[0][0]))

    def sequences(
        self, exp: Experience, plans: Sequence[Sequence[Sequence[int]]], unit: int | Sequence[int]
    ) -> int:
        """Return the number of sequences that every pack must have; 0 if packs may differ.

        Packs must not differ where lists of different lengths meet a model that takes one sequence at a
        time: each sequence is a forward, and processes that share a model run equally many. ValueError for
        media in only some rows: towers would run more often on one process than on another.
        """
        if not self.one_unit or isinstance(unit, int):
            return 0
        for name, count in packing.counts(exp.media).items():
            if not bool(count.all()):
                row = int((count == 0).nonzero()[0])
                raise ValueError(
                    f"media: expected {name} in every row or in none, for lists of different lengths and a "
                    f"model that mixes the sequences of a pack, got none in row {row}"
                )
        return max(len(rows) for part in plans for rows in part)
