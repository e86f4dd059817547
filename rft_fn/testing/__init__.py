"""Property checks of losses, weights and estimators, one call each.

    testing.check_all(my_loss)                   # my_loss(out: TokenOut, b: Packed) -> [T], or ([T], metrics)
    testing.check_all(my_loss, low=0.2, high=0.28)     # and where its limits are claimed to be
    testing.check_all(my_loss, kl=0.05, entropy=0.01)  # has a KL to the reference and an entropy bonus in it
    testing.check_all(my_pairs, weight=rft.weight.pair_mean, unit=2)  # of chosen and rejected
    testing.check_all(my_regression, on_policy=False)  # no policy loss
    testing.check_kl_gradient(my_kl)             # my_kl(logp [*], ref_logp [*]) -> [*]
    testing.check_group_estimator(my_adv)        # my_adv(reward [N, G]) -> [N, G]
    testing.check_estimator_gradient(my_adv)     # as above: is its expected gradient that of E[R]?
    testing.check_deletion_invariance(my_gae)    # my_gae(reward, value, discount, mask=mask) -> (adv, ret)
    testing.check_exact_values(my_gae)           # the same: advantages are 0 where the values are right
    testing.check_importance_bias(my_weight)     # my_weight(w, old_logp, logp, mask) -> w, all [B, S]

Each raises AssertionError with what was varied and by how much the result moved. Losses run on `case`, a
tabular model and a small ragged batch in float64; expectations are computed by enumeration. A right
function leaves rounding errors and nothing else.
"""

from rft_fn.testing.batch_losses import micro_batch_error, of_trl, of_verl, token_loss
from rft_fn.testing.cases import VOCAB, ExtraFn, Unit, case, log_probs, total_and_grad
from rft_fn.testing.causes import likeliest_cause
from rft_fn.testing.certificate import Certificate, certify
from rft_fn.testing.diagnosis import Verdict, table, verdicts
from rft_fn.testing.directions import check_pairs, check_terms
from rft_fn.testing.estimator import (
    check_deletion_invariance,
    check_estimator_gradient,
    check_exact_values,
    check_group_estimator,
    check_kl_gradient,
)
from rft_fn.testing.exact_bias import loss_bias
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
    "check_estimator_gradient", "check_exact_values", "check_finite", "check_group_estimator",
    "check_importance_bias", "check_kl_gradient", "check_masked", "check_on_policy_identity",
    "check_packing_invariance", "check_padding_invariance", "check_pairs", "check_partition_invariance",
    "check_permutation_invariance", "check_sides", "check_terms", "importance_bias", "likeliest_cause",
    "loss_bias", "micro_batch_error", "of_trl", "of_verl", "table", "token_loss", "verdicts",
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
    kl: float | None = None,
    entropy: float | None = None,
    chosen_falls: bool = False,
) -> None:
    """Certify a loss on one batch; AssertionError with every verdict in a table and the likeliest cause.

    The checks and the arguments are those of `certify`.
    """
    found = certify(
        loss_fn,
        weight=weight,
        extra=extra,
        unit=unit,
        on_policy=on_policy,
        low=low,
        high=high,
        kl=kl,
        entropy=entropy,
        chosen_falls=chosen_falls,
        seeds=(seed,),
        gaps=(),
    )
    if any(v.error for v in found.verdicts):
        raise AssertionError(table(list(found.verdicts), found.cause))
