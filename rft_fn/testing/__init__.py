"""Property checks of losses, weights and estimators, one call each.

    testing.check_all(my_loss)                   # my_loss(out: TokenOut, b: Packed) -> [T], or ([T], metrics)
    testing.check_all(my_loss, low=0.2, high=0.28)     # and where its limits are claimed to be
    testing.check_all(my_regression, on_policy=False)  # no policy loss
    testing.check_kl_gradient(my_kl)             # my_kl(logp [*], ref_logp [*]) -> [*]
    testing.check_group_estimator(my_adv)        # my_adv(reward [N, G]) -> [N, G]
    testing.check_estimator_gradient(my_adv)     # as above: is its expected gradient that of E[R]?
    testing.check_deletion_invariance(my_gae)    # my_gae(reward, value, discount, mask=mask) -> (adv, ret)
    testing.check_importance_bias(my_weight)     # my_weight(w, old_logp, logp, mask) -> w, all [B, S]

Each raises AssertionError with what was varied and by how much the result moved. Losses run on `case`, a
tabular model and a small ragged batch in float64; expectations are computed by enumeration. A right
function leaves rounding errors and nothing else.
"""

from rft_fn.testing.cases import VOCAB, ExtraFn, Unit, case, log_probs, total_and_grad
from rft_fn.testing.certificate import (
    Certificate,
    certify,
    loss_bias,
    micro_batch_error,
    of_trl,
    of_verl,
    token_loss,
)
from rft_fn.testing.diagnosis import Verdict, likeliest_cause, table, verdicts
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
from rft_fn.testing.sides import check_bounded, check_masked, check_sides
from rft_fn.types import LossFn, WeightFn
from rft_fn.weight import token_mean

__all__ = [
    "Certificate", "Verdict", "case", "certify", "check_all", "check_bounded", "check_deletion_invariance",
    "check_estimator_gradient", "check_finite", "check_group_estimator", "check_importance_bias",
    "check_kl_gradient", "check_masked", "check_on_policy_identity", "check_packing_invariance",
    "check_padding_invariance", "check_partition_invariance", "check_permutation_invariance",
    "check_sides", "importance_bias", "likeliest_cause", "loss_bias", "micro_batch_error", "of_trl",
    "of_verl", "table", "token_loss", "verdicts",
]  # fmt: skip


def check_all(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    on_policy: bool = True,
    low: float | None = None,
    high: float | None = None,
) -> None:
    """Run all checks of a loss; AssertionError with every verdict in a table and the likeliest cause.

    Finite values come first, then partition, padding, packing, permutation and deleted masked tokens. Policy
    losses also have the on-policy identity, the sides of a clip and a bound; `on_policy=False` leaves these
    out, for a loss that has a KL or an entropy in it, or learns no policy. `low` and `high` are claims about
    its limits (see `check_sides`).

    `weight(mask [B, S]) -> w [B, S]` is the normaliser that the loss is used with. `extra(exp) -> {name:
    [B, S, ...]}` makes the data that it reads from `b.extra` (see `case`). `unit` consecutive rows belong
    together: 2 for losses of pairs, where rows 2i and 2i + 1 are sequences 2i and 2i + 1 of a pack; of
    listwise losses it is the number of rows of each list, such as (3, 1, 2, 2). Other units than 1 are no
    policy losses.
    """
    found = verdicts(
        loss_fn,
        weight=weight,
        extra=extra,
        seed=seed,
        unit=unit,
        on_policy=on_policy,
        low=low,
        high=high,
    )
    if any(v.error for v in found):
        cause = likeliest_cause(loss_fn, found, weight=weight, extra=extra, seed=seed, unit=unit)
        raise AssertionError(table(found, cause))
