"""Where the weights of a model under DeepSpeed are: its shards move with it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rft_fn.model.placing import Residence, Where

__all__ = ["ZeroResidence"]


class ZeroResidence(Residence):
    """Where the weights of one model are, of which stage 3 has the shards beside the parameters."""

    def __init__(self, root: nn.Module, module: nn.Module, *, trained: bool = False):
        super().__init__(root, module)
        self.trained = trained

    def move(self, where: Where) -> None:
        """`Residence.move`; ValueError for a model in training: its optimizer shares the weights."""
        if self.trained:
            raise ValueError(
                f"apply: expected one of st.bind with zero_stage, got that of {self.name}, whose weights are "
                "part of DeepSpeed's optimizer; FSDP2 moves models in training too"
            )
        super().move(where)

    def apply(self, copy: Callable[[Tensor], Tensor]) -> None:
        # a parameter of stage 3 is empty, but for small ones, which stay gathered
        super().apply(copy)
        for p in self.root.parameters():
            shard: Any = getattr(p, "ds_tensor", None)
            if shard is not None:
                shard.data = copy(shard.data)
