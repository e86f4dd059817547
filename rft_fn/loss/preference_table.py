"""The table of the losses of preferences: each by its name, with the settings of its paper."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rft_fn.loss.labelled import Labels, bco, kto
from rft_fn.loss.preference import (
    apo_down,
    apo_zero,
    bco_pair,
    cpo,
    dpo,
    exo,
    hinge,
    ipo,
    nca,
    orpo,
    robust_dpo,
    simpo,
    sppo,
)
from rft_fn.types.batch import Packed

__all__ = ["PREFERENCES", "Preference"]


class Preference(NamedTuple):
    """A loss of preferences with the settings of its paper."""

    loss: Callable[..., Tensor]
    paper: str  # arXiv id
    beta: float = 0.1
    nll: float = 0.0  # coefficient of -log pi of the chosen response, a mean over its tokens
    mean: bool = False  # log-probs are means over tokens, not sums
    reference: bool = True  # takes ref_chosen and ref_rejected after chosen and rejected
    single: bool = False  # takes (logp, ref_logp, desirable), and a baseline

    def of_pack(self, loss: Callable[..., Tensor], logp: Tensor, ref_logp: Tensor, b: Packed) -> Tensor:
        """Return the loss of each pair of a pack, or of each response, from log-probs [K] of its sequences.

        `loss` is that of the row, with its options. Sequences 2i and 2i + 1 are a pair.
        """
        if self.single:
            labels = Labels.of_pack(b)
            return loss(logp, ref_logp, labels.desirable, baseline=labels.baseline)
        chosen, rejected = logp.view(-1, 2).T
        return loss(chosen, rejected, *ref_logp.view(-1, 2).T) if self.reference else loss(chosen, rejected)


PREFERENCES: dict[str, Preference] = {
    "dpo": Preference(dpo, "2305.18290"),
    "cdpo": Preference(dpo, "2305.18290"),
    "robust": Preference(robust_dpo, "2403.00409"),
    "rpo": Preference(dpo, "2404.19733", nll=1.0),
    "dpo_norm": Preference(dpo, "2411.15124", beta=5.0, mean=True),
    "ipo": Preference(ipo, "2310.12036"),
    "hinge": Preference(hinge, "2305.10425"),
    "exo": Preference(exo, "2402.00856"),
    "sppo": Preference(sppo, "2405.00675", beta=1e-3),
    "nca": Preference(nca, "2402.05369"),
    "bco_pair": Preference(bco_pair, "2404.04656"),
    "apo_zero": Preference(apo_zero, "2408.06266"),
    "apo_down": Preference(apo_down, "2408.06266"),
    "cpo": Preference(cpo, "2401.08417", nll=1.0, reference=False),
    "simpo": Preference(simpo, "2405.14734", beta=2.0, mean=True, reference=False),
    "orpo": Preference(orpo, "2403.07691", mean=True, reference=False),
    "kto": Preference(kto, "2402.01306", single=True),
    "bco": Preference(bco, "2404.04656", single=True),
}
