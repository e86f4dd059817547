"""Numbers of an evaluation: majorities by their definition, and intervals that hold the truth."""

import numpy as np
import pytest
import ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import metric, rng

SAMPLES = st.lists(st.tuples(st.booleans(), st.integers(-1, 3)), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(row=SAMPLES, k=st.integers(1, 9))
def test_maj_at_k_is_its_definition(row, k):
    correct, answer = np.array([x for x, _ in row])[None], np.array([a for _, a in row])[None]
    if k > len(row):
        with pytest.raises(ValueError, match=f"k: expected between 1 and the {len(row)} samples"):
            metric.maj_at_k(torch.from_numpy(correct), torch.from_numpy(answer), k)
        return
    found = metric.maj_at_k(torch.from_numpy(correct), torch.from_numpy(answer), k)
    assert found.numpy() == pytest.approx(ref.maj_at_k(correct, answer, k), abs=1e-12)


def test_a_majority_may_be_right_where_most_are_wrong_and_the_other_way_round():
    correct = torch.tensor([[True, True, False, False, False], [True, True, False, False, False]])
    answer = torch.tensor([[7, 7, 1, 2, 3], [7, 7, 1, 1, 1]])
    assert metric.maj_at_k(correct, answer, 5).tolist() == [1, 0]
    assert metric.maj_at_k(correct, answer, 1).tolist() == [0.4, 0.4]
    assert metric.maj_at_k(torch.ones(1, 3, dtype=torch.bool), torch.full((1, 3), -1), 3).tolist() == [0]


@pytest.mark.parametrize("value", [[0, 0.25, 1, 1, 0.5], [1, 0, 0, 0, 0, 0], [0.1, 0.2]])
def test_the_bootstrap_draws_from_all_resamples(value):
    found = metric.bootstrap(torch.tensor(value, dtype=torch.float64), seed=3, draws=40_000)
    assert found == pytest.approx(ref.bootstrap(value), abs=0.011)


def test_equal_values_leave_an_interval():
    """Nothing of 60 right: a rate of 0.06 would give that with a probability of 0.025."""
    low, high = metric.bootstrap(torch.zeros(60), seed=0)
    assert low == 0 and (1 - high) ** 60 == pytest.approx(0.025)
    low, high = metric.bootstrap(torch.zeros(60), seed=0, bounds=(-1, 1))
    assert low == -high and (1 - high) ** 60 == pytest.approx(0.025)
    assert metric.bootstrap(torch.ones(60), seed=0)[1] == 1


@pytest.mark.parametrize("value", [[], [0.5, 1.5], [float("nan")]])
def test_values_that_are_no_shares_are_refused(value):
    with pytest.raises(ValueError, match=r"value: expected numbers in \[0, 1\], got"):
        metric.bootstrap(torch.tensor(value), seed=0)


def _evaluations(count, problems, samples, ability):
    """Simulated evaluations: problems of random difficulty, each answered by `samples` draws [E, N, G]."""
    drawn = rng.generator(rng.fold_in(5, problems))
    difficulty = torch.rand(count, problems, 1, generator=drawn, dtype=torch.float64) ** (1 / ability)
    return torch.rand(count, problems, samples, generator=drawn, dtype=torch.float64) < difficulty


@pytest.mark.parametrize(
    "name, problems, value, truth, bounds",
    [
        # p is the ability-th root of a uniform number: E p = a / (a + 1), E p^2 = a / (a + 2)
        ("avg@4", 100, lambda x, y: x.double().mean(-1), 2 / 3, (0, 1)),
        ("pass@2", 60, lambda x, y: metric.pass_at_k(x, 2), 2 * 2 / 3 - 2 / 4, (0, 1)),
        ("paired", 100, lambda x, y: (x.double() - y.double()).mean(-1), 2 / 3 - 1 / 2, (-1, 1)),
    ],
)
def test_intervals_hold_the_truth_in_95_of_100_evaluations(name, problems, value, truth, bounds):
    count = 600
    better, worse = _evaluations(count, problems, 4, 2), _evaluations(count, problems, 4, 1)
    held = 0
    for i in range(count):
        found = metric.bootstrap(value(better[i], worse[i]), seed=i, draws=600, bounds=bounds)
        held += found[0] <= truth <= found[1]
    assert 0.925 <= held / count <= 0.975, held / count
