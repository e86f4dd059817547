"""The bench of how cost grows: its model of communication, its counts, and its tables in docs/scaling.md."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rft_fn.model.bounds import find_prefixes
from rft_fn.strategy import get_strategy

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench" / "growth"
DATA = ROOT / "docs" / "results" / "growth" / "growth.json"


@pytest.fixture(scope="module")
def bench():
    """The modules `comm` and `show`, which the script finds in its own folder."""
    sys.path.insert(0, str(BENCH))
    import comm
    import show

    yield comm, show
    sys.path.remove(str(BENCH))


def test_bytes_are_those_of_the_collectives(bench):
    """FSDP2 on n GPUs: two gathers of 2 bytes and one scatter of 4, of which a GPU's own n-th stays."""
    comm, _ = bench
    shape, net = comm.SHAPES["7B"], comm.Network()
    for world in (8, 64):
        found = comm.step(shape, world, "FSDP2", net, tokens=4096)
        assert found["bytes"] == pytest.approx(8 * shape.parameters * (world - 1) / world)

    # HSDP over two nodes: the same in a node, and each GPU's eighth of the gradients to the other node
    found = comm.step(shape, 16, "HSDP", net, tokens=4096)
    own = 4 * shape.parameters / 8
    assert found["bytes"] == pytest.approx(8 * shape.parameters * 7 / 8 + 2 * own / 2)


def test_sequence_parallelism_sends_heads_three_times(bench):
    comm, _ = bench
    shape, net = comm.SHAPES["7B"], comm.Network()
    one, two = (comm.step(shape, 8, "FSDP2", net, tokens=4096, sp=sp) for sp in (1, 2))
    a_token = (28 + 4 + 4 + 28) * 128 * 2
    assert two["bytes"] - one["bytes"] == pytest.approx(28 * 3 * 2048 * a_token / 2)
    assert two["compute"] == pytest.approx(one["compute"] / 2)
    assert two["exposed"] > one["exposed"]


def test_a_pack_of_that_size_hides_what_travels(bench):
    """At `hidden_from` tokens the products alone take as long as the slower of gather and scatter."""
    comm, _ = bench
    shape = comm.SHAPES["70B"]
    net = comm.Network(outside=5e9, hop=0.0, start=0.0)
    tokens = comm.step(shape, 64, "FSDP2", net, tokens=1)["hidden_from"]
    block = shape.parameters / shape.layers
    assert tokens == pytest.approx(2 * block * 63 / 64 / 40e9 * net.flops / (2 * block), rel=1e-3)
    longer = comm.step(shape, 64, "FSDP2", net, tokens=int(1.01 * tokens))
    shorter = comm.step(shape, 64, "FSDP2", net, tokens=int(0.5 * tokens))
    ends = comm.ring(2 * block, 64, net) + comm.ring(4 * block, 64, net)
    assert longer["exposed"] == pytest.approx(ends)
    assert shorter["exposed"] > 10 * ends


@pytest.mark.parametrize("scheme", ["FSDP2", "HSDP"])
def test_a_slower_network_hides_less(bench, scheme):
    comm, _ = bench
    fast = comm.Network()
    for change in ({"inside": 45e9, "outside": 5e9}, {"hop": 5e-4}, {"start": 2e-2}):
        quick, slow = (
            comm.step(comm.SHAPES["0.5B"], 1024, scheme, net, tokens=2048)
            for net in (fast, replace(fast, **change))
        )
        assert slow["efficiency"] < quick["efficiency"], change
        assert slow["bytes"] == quick["bytes"]


def test_what_was_counted_is_what_the_model_assumes():
    """Blocks are gathered twice a pack and the rest once, gradients scattered once, HSDP sums its half."""
    counted = json.loads(DATA.read_text())["comm"]["found"]["counted"]
    for name, x in counted.items():
        packs = x["packs"] * x["sp"]
        rest = x["embedding"] + 128  # and the last norm
        weights = 4 * (2 * x["parameters"] - rest)
        between = 0
        if x["sp"] > 1:
            between = (4 + 56) * x["tokens"]  # log-probs, and the packs themselves, pickled
            a_layer = (8 + 4 + 4 + 8) * 16 * 4 * x["tokens"] / x["sp"]  # queries, keys, values and results
            assert x["all-to-all"][1] / packs == 2 * 4 * a_layer  # forward and backward
        assert x["all-gather"][1] / packs == pytest.approx(weights + between, rel=0.001), name
        assert x["reduce-scatter"][1] / packs == pytest.approx(4 * x["parameters"], rel=0.001), name
    x = counted["HSDP"]
    assert x["all-reduce"][1] / x["packs"] == pytest.approx(4 * x["parameters"] / 2, rel=0.001)


def test_every_token_of_a_pack_is_computed(bench):
    """Of rows that begin alike a pack computes one beginning, and cost would not grow with tokens."""
    import axes

    for pack in get_strategy().shard(axes.batch(128, 128), 1024):
        sizes = torch.unique_consecutive(pack.seq, return_counts=True)[1].tolist()
        assert len(sizes) >= 8
        assert find_prefixes(pack.tokens, pack.pos, sizes) is None


def test_the_tables_of_the_page_are_those_of_the_data(bench):
    comm, show = bench
    found = json.loads(DATA.read_text())
    page = (ROOT / "docs" / "scaling.md").read_text()
    for mark, made in show.tables(found).items():
        assert f"<!-- {mark}:begin -->\n\n{made}\n\n<!-- {mark}:end -->" in page, mark
    net = comm.Network(**found["comm"]["found"]["assumed"])
    assert found["comm"]["found"]["tables"]["as assumed"] == comm.table(net)


def test_the_exponent_is_that_of_a_power(bench):
    _, show = bench
    points = [{"x": x, "seconds": 3.0 * x**1.5} for x in (2, 4, 8)]
    assert show.power(points, "seconds") == pytest.approx(1.5)
