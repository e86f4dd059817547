"""Memory for people: the phases and the table of an estimate, and the line of a process."""

import contextlib
import dataclasses
import io

import pytest
import ranks
import torch

from rft_fn import memory

BASE = memory.Estimate(
    parameters=2, gradients=2, optimizer=4, activations=90, head=5, backward=3, gathered=0, update=4,
    engine=2, host=0, awake=False,
)  # fmt: skip


def test_the_peak_is_that_of_the_largest_phase():
    assert (BASE.training, BASE.updating, BASE.sampling, BASE.total) == (106, 12, 8, 106)
    x = dataclasses.replace(BASE, update=300)
    assert x.total == x.updating == 308
    awake = dataclasses.replace(BASE, awake=True)
    assert (awake.training, awake.sampling) == (108, 8)


def test_the_table():
    gib = dataclasses.replace(BASE, **{n: x * 2**30 for n, x in vars(BASE).items() if type(x) is int})
    text = memory.table(gib, available=200 * 2**30, host=1, remedy="pray")
    lines = text.splitlines()
    rows = "parameters gradients optimizer activations head backward update engine peak"
    assert [line.split()[0] for line in lines] == rows.split()
    assert lines[3].split()[1:3] == ["90.00", "GiB"]
    assert lines[-1].split() == ["peak", "106.00", "GiB", "in", "training,", "of", "200.00", "GiB:", "fits"]
    assert memory.table(gib, available=2**30, host=1, remedy="pray").endswith("does not fit: pray")
    much = dataclasses.replace(gib, host=2)
    assert memory.table(much, available=2**40, host=1, remedy="pray").endswith("does not fit the host")


def written(rank):
    """What `report` returns and prints before, beside and after 256 MiB."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        before = memory.report("before")
        block = torch.ones(2**26)
        with_block = memory.report("with 256 MiB")
        del block
        after = memory.report()
    return before, with_block, after, printed.getvalue().splitlines()


def test_report():
    """Resident memory grows by the size of a tensor that is written, and the peak stays.

    In a process of its own: this one may hold what earlier tests have freed.
    """
    [(before, with_block, after, lines)] = ranks.run(1, "test_report:written")
    assert with_block["resident"] - before["resident"] == pytest.approx(2**28, rel=0.1)
    assert (
        after["resident"] < with_block["resident"] - 2**27 and after["peak"] > 0.99 * with_block["resident"]
    )
    gib = {name: f"{n / 2**30:.2f} GiB" for name, n in with_block.items()}
    assert lines[1] == f"with 256 MiB: resident {gib['resident']}, peak {gib['peak']}"
    assert lines[2].startswith("resident ")
