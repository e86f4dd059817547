"""The certificate of a loss: its verdicts, bias and dependence on the micro-batch."""

from collections.abc import Sequence
from typing import NamedTuple

from rft_fn.testing.cases import ExtraFn, Unit
from rft_fn.testing.causes import likeliest_cause
from rft_fn.testing.diagnosis import Verdict, verdicts
from rft_fn.testing.exact_bias import LossBias, loss_bias
from rft_fn.types import LossFn, WeightFn
from rft_fn.weight import token_mean

__all__ = ["Certificate", "certify"]


class Certificate(NamedTuple):
    """What was checked of a loss, and the result."""

    verdicts: tuple[Verdict, ...]  # of all seeds, a failure if one of them fails
    cause: str  # "" if nothing failed
    bias: tuple[LossBias, ...]  # none of losses that are no policy losses
    seeds: tuple[int, ...]


def certify(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    unit: Unit = 1,
    on_policy: bool = True,
    low: float | None = None,
    high: float | None = None,
    kl: float | None = None,
    entropy: float | None = None,
    chosen_falls: bool = False,
    seeds: Sequence[int] = (0, 1, 2),
    gaps: Sequence[float] = (0.0, 0.1, 0.5),
) -> Certificate:
    """Run all checks of a loss with several seeds, and compute its bias for samples off by each of `gaps`.

    Finite values come first, then partition, padding, packing, permutation and deleted masked tokens. Policy
    losses also have the on-policy identity, the sides of a clip and a bound. `kl` and `entropy` declare that
    the loss has +kl KL(pi, ref) and -entropy H in it: their signs and sizes are checked, and what is left is
    the policy loss. `on_policy=False` leaves the three checks of policy losses out, for a loss that learns no
    policy or has other terms; a KL or an entropy of the wrong sign is found there too, and a value that is
    pushed away from its return, or stopped off it. `low` and `high` are
    claims about the limits (see `check_sides`).

    `weight(mask [B, S]) -> w [B, S]` is the normaliser that the loss is used with. `extra(exp) -> {name:
    [B, S, ...]}` makes the data that it reads from `b.extra` (see `case`). `unit` consecutive rows belong
    together: 2 for losses of pairs, where rows 2i and 2i + 1 are sequences 2i and 2i + 1 of a pack; of
    listwise losses it is the number of rows of each list, such as (3, 1, 2, 2). Other units than 1 are no
    policy losses; pairs that read no advantage are chosen and rejected (see `check_pairs`), and
    `chosen_falls` declares that both may become less probable.

    A loss that raises fails, and the cause says where. ValueError for arguments that make no sense.
    """
    every: dict[str, Verdict] = {}
    cause = ""
    for seed in seeds:
        found = verdicts(
            loss_fn,
            weight=weight,
            extra=extra,
            seed=seed,
            unit=unit,
            on_policy=on_policy,
            low=low,
            high=high,
            kl=kl,
            entropy=entropy,
            chosen_falls=chosen_falls,
        )
        for v in found:
            if v.check not in every or (v.error and not every[v.check].error):
                every[v.check] = v
        cause = cause or likeliest_cause(loss_fn, found, weight=weight, extra=extra, seed=seed, unit=unit)
    bias = []
    unfit = {"raises", "scalar", "shape"} & {v.code for v in every.values()}
    if on_policy and unit == 1 and extra is None and not unfit:
        bias = [loss_bias(loss_fn, gap=gap) for gap in gaps]
    return Certificate(tuple(every.values()), cause, tuple(bias), tuple(seeds))
