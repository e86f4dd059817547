"""All checks of a loss, and their verdicts in one table."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rft_fn import tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.testing.cases import ExtraFn, Failure, Unit, case, flat, log_probs, run, whole
from rft_fn.testing.directions import (
    Terms,
    check_pairs,
    check_terms,
    reads_advantage,
    terms_of,
    without_terms,
)
from rft_fn.testing.invariance import (
    check_packing_invariance,
    check_padding_invariance,
    check_partition_invariance,
    check_permutation_invariance,
)
from rft_fn.testing.policy_losses import check_finite, check_on_policy_identity
from rft_fn.testing.sides import check_bounded, check_masked, check_sides, check_values, learns_value
from rft_fn.types import LossFn, WeightFn
from rft_fn.weight import token_mean

__all__ = ["Verdict", "attempt", "known_terms", "raised", "table", "verdicts"]

_PACKAGE = Path(__file__).parents[1]


class Verdict(NamedTuple):
    """The result of one check."""

    check: str
    error: str  # "" if it passed
    code: str = ""  # how it failed, where that is known: "cut", "raises", "dead", "exchanged" ...


def verdicts(
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
) -> list[Verdict]:
    """Run every check of a loss, whatever fails, finite values first; arguments as of `certify`.

    What the loss raises is a failure of the check. ValueError for arguments that are none, such as `extra`
    of another shape.
    """
    with suppress(AssertionError):  # a wrong weight, which every check names
        case(seed, weight=weight, extra=extra)
    checks: dict[str, Callable[..., None]] = {
        "finite": check_finite,
        "partition": check_partition_invariance,
        "padding": check_padding_invariance,
        "packing": check_packing_invariance,
        "permutation": check_permutation_invariance,
        "masked": check_masked,
    }
    calls = {
        name: partial(check, loss_fn, weight=weight, extra=extra, seed=seed, unit=unit)
        for name, check in checks.items()
    }
    declared = kl is not None or entropy is not None
    reads = (on_policy and unit == 1) or _reads(loss_fn, weight, extra, seed, unit)
    other = unit == 1 and (declared or not on_policy)  # a loss that may have terms without the advantage
    terms = known_terms(loss_fn, weight, extra, seed) if other else None
    if unit == 1 and (declared or (reads and terms is not None and any(terms))):
        calls["terms"] = partial(
            check_terms, loss_fn, weight=weight, extra=extra, seed=seed, kl=kl, entropy=entropy
        )
    if on_policy and unit == 1:
        rest = without_terms(loss_fn, terms) if declared and terms is not None else loss_fn
        calls["on-policy"] = partial(_identity, rest, weight=weight, extra=extra, seed=seed)
        calls["sides"] = partial(check_sides, rest, weight=weight, extra=extra, seed=seed, low=low, high=high)
        calls["bound"] = partial(check_bounded, rest, weight=weight, extra=extra, seed=seed)
    if unit == 1 and not on_policy and _learns_value(loss_fn, weight, extra, seed):
        calls["values"] = partial(check_values, loss_fn, weight=weight, extra=extra, seed=seed)
    if unit == 2 and not reads:
        calls["pairs"] = partial(
            check_pairs, loss_fn, weight=weight, extra=extra, seed=seed, chosen_falls=chosen_falls
        )
    return [attempt(name, call) for name, call in calls.items()]


def attempt(name: str, call: Callable[[], None]) -> Verdict:
    """Run a check; whatever it raises is a verdict."""
    try:
        call()
    except Failure as error:
        return Verdict(name, str(error), error.code)
    except AssertionError as error:
        return Verdict(name, str(error) or "failed")
    except Exception as error:  # whatever a loss raises is a result
        return Verdict(name, f"raised {raised(error)}", "raises")
    return Verdict(name, "")


def raised(error: Exception) -> str:
    """Say where a loss raised, and what."""
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    places = traceback.extract_tb(error.__traceback__)
    own = [i + 1 for i, x in enumerate(places[:-1]) if x.name == "evaluate"]
    if not own:
        return said
    file = places[own[0]].filename
    at = [x for x in places[own[0] :] if x.filename == file][-1]
    return (
        said if Path(file).is_relative_to(_PACKAGE) else f"{Path(file).name}:{at.lineno}, {at.line}: {said}"
    )


def known_terms(loss_fn: LossFn, weight: WeightFn, extra: ExtraFn | None, seed: int) -> Terms | None:
    """Return the terms of a loss without the advantage, None where they are others or it does not run."""
    try:
        return terms_of(loss_fn, weight=weight, extra=extra, seed=seed)
    except Exception:
        return None


def _reads(loss_fn: LossFn, weight: WeightFn, extra: ExtraFn | None, seed: int, unit: Unit) -> bool:
    """Return whether a loss reads the advantages; False where it does not run."""
    try:
        return reads_advantage(loss_fn, weight=weight, extra=extra, seed=seed, unit=unit)
    except Exception:
        return False


def _learns_value(loss_fn: LossFn, weight: WeightFn, extra: ExtraFn | None, seed: int) -> bool:
    """Return whether a loss teaches a value; False where it does not run."""
    try:
        return learns_value(loss_fn, weight=weight, extra=extra, seed=seed)
    except Exception:
        return False


def _identity(loss_fn: LossFn, *, weight: WeightFn, extra: ExtraFn | None, seed: int) -> None:
    """Check the on-policy identity with an advantage a token, or a row where a ratio is of a sequence.

    A smooth corner is near 1 too: a factor of 0.999 to 1.001 that all tokens share is none.
    """
    apply, params, exp = case(seed, weight=weight, extra=extra)
    packs = whole(tree.replace(exp, old_logp=log_probs(apply, params, exp)))
    got = flat(run(loss_fn, apply, params, packs).grads)
    want = flat(run(lambda out, b: -b.adv * out.logp, apply, params, packs).grads)
    factor = got @ want / (want @ want)
    scaled = abs(float(factor) - 1) <= 1e-3
    evened = (lambda out, b: evaluate(loss_fn, out, b)[0] / factor) if scaled else loss_fn
    check = partial(check_on_policy_identity, evened, weight=weight, extra=extra, seed=seed)
    try:
        check()
    except AssertionError as error:
        try:
            check(per_sequence=True)
        except AssertionError:
            raise error from None


def table(found: list[Verdict], cause: str = "") -> str:
    """Return the verdicts as text, a line each, and the cause."""
    failed = sum(bool(v.error) for v in found)
    lines = [f"{failed} of {len(found)} checks failed"]
    lines[0] += f"; the likeliest cause: {cause}" if cause else ""
    lines += [f"  {v.check:<12}{'FAILS  ' + v.error if v.error else 'passes'}" for v in found]
    return "\n".join(lines)
