"""Property checks of losses, weights and estimators, one call each.

    testing.check_all(my_loss)                   # my_loss(out: TokenOut, b: Packed) -> [T], or ([T], metrics)
    testing.check_on_policy_identity(my_loss)    # a policy loss is REINFORCE at logp == old_logp
    testing.check_kl_gradient(my_kl)             # my_kl(logp [*], ref_logp [*]) -> [*]
    testing.check_group_estimator(my_adv)        # my_adv(reward [N, G]) -> [N, G]
    testing.check_estimator_gradient(my_adv)     # as above: is its expected gradient that of E[R]?
    testing.check_deletion_invariance(my_gae)    # my_gae(reward, value, discount, mask=mask) -> (adv, ret)
    testing.check_importance_bias(my_weight)     # my_weight(w, old_logp, logp, mask) -> w, all [B, S]

Each raises AssertionError with what was varied and by how much the result moved. Losses run on `case`, a
tabular model and a small ragged batch in float64; expectations are computed by enumeration. A right
function leaves rounding errors and nothing else.
"""

from collections.abc import Callable

from rft_fn.testing.cases import VOCAB, ExtraFn, Unit, case, log_probs, total_and_grad
from rft_fn.testing.estimator import (
    check_deletion_invariance,
    check_estimator_gradient,
    check_group_estimator,
    check_kl_gradient,
)
from rft_fn.testing.invariance import (
    check_packing_invariance,
    check_padding_invariance,
    check_partition_invariance,
    check_permutation_invariance,
)
from rft_fn.testing.policy_losses import (
    check_finite,
    check_importance_bias,
    check_on_policy_identity,
    importance_bias,
)
from rft_fn.types import LossFn, WeightFn
from rft_fn.weight import token_mean

__all__ = [
    "case", "check_all", "check_deletion_invariance", "check_estimator_gradient", "check_finite",
    "check_group_estimator", "check_importance_bias", "check_kl_gradient", "check_on_policy_identity",
    "check_packing_invariance", "check_padding_invariance", "check_partition_invariance",
    "check_permutation_invariance", "importance_bias",
]  # fmt: skip


def check_all(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    on_policy: bool = False,
) -> None:
    """Run all checks of a loss: partition, padding, packing, permutation and finite values.

    `on_policy` adds the identity of policy losses. `weight(mask [B, S]) -> w [B, S]` is the normaliser that
    the loss is used with. `extra(exp) -> {name: [B, S, ...]}` makes the data that it reads from `b.extra`
    (see `case`). `unit` consecutive rows belong together: 2 for losses of pairs, where rows 2i and 2i + 1
    are sequences 2i and 2i + 1 of a pack; of listwise losses it is the number of rows of each list, such
    as (3, 1, 2, 2).
    """
    checks: list[Callable[..., None]] = [
        check_partition_invariance,
        check_padding_invariance,
        check_packing_invariance,
        check_permutation_invariance,
        check_finite,
    ]
    for check in checks:
        check(loss_fn, weight=weight, extra=extra, seed=seed, unit=unit)
    if on_policy:
        check_on_policy_identity(loss_fn, weight=weight, extra=extra, seed=seed)
