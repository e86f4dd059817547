"""Takes weights within vLLM's worker, as a backend of its weight transfer; imported by vLLM alone.

vLLM's own backends begin the reload with the update, so a trainer that stops sending leaves a model without
weights. This one receives first and reloads in `finish_weight_update`.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine  # pyright: ignore[reportMissingImports]

from rft_fn.engine.weight_channel import Connect, Update
from rft_fn.engine.weight_receiver import Receiver
from rft_fn.engine.worker import MissingElements, check_same, in_both, reload

__all__ = ["TransferBackend"]


class TransferBackend(WeightTransferEngine):
    """The backend `rft`."""

    init_info_cls: Any = Connect
    update_info_cls: Any = Update
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.receiver = Receiver(rank, str(self.device))
        self.usual: MissingElements | None = None  # layers that lack elements in a whole load
        self.missing: MissingElements = {}  # in the parts that have come

    def init_transfer_engine(self, init_info: Connect) -> None:
        """Meet a trainer."""
        self.receiver.connect(init_info)

    def start_weight_update(self) -> None:
        """Begin an update; the model stays as it is."""
        self.receiver.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage one bucket; vLLM's own method waits for an accelerator."""
        self.receiver.take(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        """Stage one bucket."""
        self.receiver.take(update_info)

    def finish_weight_update(self) -> None:
        """Reload the model from what is staged. ValueError names a layer that did not get all it should."""
        self.receiver.finish(self._reload)

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        missing = reload(self.model, weights, self.vllm_config, self.model_config)
        self.missing = missing if self.receiver.first else in_both(self.missing, missing)
        if self.receiver.last:
            if self.usual is None:  # the first one is whole: its names were those of the trainer's manifest
                self.usual = self.missing
            check_same(self.missing, self.usual)

    def shutdown(self) -> None:
        """Leave the trainer."""
        self.receiver.close()
