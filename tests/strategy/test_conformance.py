"""One suite over all backends: the same batches give the same weights, metrics and scores as one process."""

from functools import cache

import conformance
import pytest
import ranks
import torch
from each_case import each

pytestmark = pytest.mark.slow


@cache
def expected(case, dtype):
    return conformance.local(case, dtype)


@cache
def found(world, kind):
    """What all backends of one world size and kind do, from one group of processes."""
    alike = lambda name: conformance.BACKENDS[name][0] == world and name[:4] == kind  # noqa: E731
    names = [name for name in conformance.BACKENDS if alike(name)]
    return ranks.run(world, "conformance:on_ranks", names, list(conformance.CASES))


@pytest.mark.parametrize("backend", conformance.BACKENDS)
@each("case", conformance.CASES)
def test_same_as_one_process(backend, case):
    world, _, dtype = conformance.BACKENDS[backend]
    want = expected(case, dtype)
    assert "error" not in want, want["error"]
    got, *others = [out[backend, case] for out in found(world, backend[:4])]
    for other in (got, *others):
        assert "error" not in other, other["error"]
    assert list(got) == list(want)
    got, want = ({n: torch.as_tensor(x) for n, x in found.items()} for found in (got, want))
    if dtype == torch.float64:
        elements(got, want)
    else:
        together(got, want)


def elements(got, want):
    """Every number, to 1e-11."""
    for name, x in want.items():
        close = torch.isclose(got[name], x, rtol=1e-11, atol=1e-11)
        assert bool(close.all()), f"{name}: {got[name]} is not {x}"


def together(got, want):
    """Weights to 1e-5 of their norm, metrics to 1e-4: where a gradient is next to 0 Adam divides its rounding
    by itself, so single weights may differ by more."""
    weights = [n for n, x in want.items() if x.dim()]
    if weights:
        far = torch.cat([(got[n] - want[n]).double().flatten() for n in weights]).norm()
        assert float(far) <= 1e-5 * float(torch.cat([want[n].double().flatten() for n in weights]).norm())
    for name in want.keys() - set(weights):
        assert torch.isclose(got[name].double(), want[name].double(), rtol=1e-4, atol=1e-5), name
