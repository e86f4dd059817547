"""One suite over all backends: the same batches give the same weights, metrics and scores as one process."""

from functools import cache

import conformance
import pytest
import ranks
import torch

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


@cache
def expected(case, dtype):
    return conformance.local(case, dtype)


@cache
def found(world):
    """What all backends of one world size do, from one group of processes."""
    names = [name for name, (size, *_) in conformance.BACKENDS.items() if size == world]
    return ranks.run(world, "conformance:on_ranks", names, list(conformance.CASES))


@pytest.mark.parametrize("case", conformance.CASES)
@pytest.mark.parametrize("backend", conformance.BACKENDS)
def test_same_as_one_process(backend, case):
    world, _, dtype = conformance.BACKENDS[backend]
    want = expected(case, dtype)
    assert "error" not in want, want["error"]
    got, *others = [out[backend, case] for out in found(world)]
    for other in (got, *others):
        assert "error" not in other, other["error"]
    assert list(got) == list(want)
    for name, x in want.items():
        close = torch.isclose(
            torch.as_tensor(got[name]), torch.as_tensor(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        assert bool(close.all()), f"{name}: {got[name]} is not {x}"
