"""Losses that are wrong on purpose are caught, with their cause; right ones pass, and nothing raises."""

import sys
from pathlib import Path

import pytest

from rft_fn import algorithm, loss, testing, weight
from rft_fn.testing.causes import CAUSES

sys.path.insert(0, str(Path(__file__).resolve().parent))
import losses

# what a group claims of all its losses
CLAIMED = {"low and high exchanged": {"low": 0.2, "high": 0.28}}


def certified(entry, claims=None):
    """The certificate on one batch, without the bias."""
    f, options = entry if isinstance(entry, tuple) else (entry, claims or {})
    return testing.certify(f, seeds=(0,), gaps=(), **options)


@pytest.mark.parametrize("part", losses.WRONG)
def test_every_wrong_loss_is_caught_and_its_cause_is_named(part):
    wrong = {}
    for name, entry in losses.WRONG[part].items():
        found = certified(entry, CLAIMED.get(part))
        failed = [v.check for v in found.verdicts if v.error]
        if not failed or part not in found.cause:
            wrong[name] = (failed, found.cause)
    assert not wrong


def test_the_corpus_is_large_and_has_every_cause():
    assert sum(map(len, losses.WRONG.values())) >= 100 and len(losses.RIGHT) >= 30
    assert all(sum(part in cause for part in losses.WRONG) == 1 for cause in CAUSES if "padding" not in cause)


@pytest.mark.parametrize("name", losses.RIGHT)
def test_a_right_loss_passes(name):
    found = certified(losses.RIGHT[name])
    assert {v.check: v.error for v in found.verdicts if v.error} == {} and found.cause == ""


def test_check_all_says_what_the_certificate_says():
    f, options = losses.WRONG["the sign of the KL"]["subtracted, and declared"]
    found = testing.certify(f, seeds=(3,), gaps=(), **options)
    with pytest.raises(AssertionError) as error:
        testing.check_all(f, seed=3, **options)
    assert str(error.value) == testing.table(list(found.verdicts), found.cause)
    assert "terms: expected a KL of 0.05 and an entropy of 0, got -0.05 and 0" in str(error.value)


def test_a_certificate_of_a_loss_that_is_cut_has_a_bias():
    found = testing.certify(losses.WRONG["gradient is cut"]["ratio detached"], seeds=(0,), gaps=(0.1,))
    assert found.bias[0].bias == 1.0 and "gradient is cut" in found.cause


def test_a_weight_that_counts_the_padding():
    with pytest.raises(AssertionError, match="the padding: its tokens or its width"):
        testing.check_all(losses.clip, weight=lambda mask: mask / mask.shape[1])


@pytest.mark.parametrize("name", list(algorithm.TABLE))
def test_no_row_of_the_table_is_a_false_alarm(name):
    row = algorithm.TABLE[name]
    regression = name == "a_star_po"  # its gradient is not the policy gradient's
    unit = 4 if getattr(row, "together", False) else 1
    testing.check_all(row.loss, weight=row.weight, unit=unit, on_policy=not regression)


@pytest.mark.parametrize("name", [name for name, row in loss.PREFERENCES.items() if not row.single])
def test_no_loss_of_pairs_is_a_false_alarm(name):
    row = loss.PREFERENCES[name]

    def pairs(out, b):
        of = losses.sides(out, b)
        if row.mean:
            of = [x / n for x, n in zip(of, losses.sizes(b) * 2)]
        options = {"label_smoothing": 0.1} if name in ("cdpo", "robust") else {}
        x = row.loss(*(of if row.reference else of[:2]), beta=row.beta, **options)
        return losses.spread(x - row.nll * of[0] / losses.sizes(b)[0], b)

    down = name == "apo_down"
    testing.check_all(pairs, weight=weight.pair_mean, unit=2, chosen_falls=down)
    if down:
        with pytest.raises(AssertionError, match="chosen response becomes less probable too: declare it"):
            testing.check_all(pairs, weight=weight.pair_mean, unit=2)
