"""Optimizers of one's own, and `optim.partition`, on sharded parameters: the steps of one process."""

import tempfile
from pathlib import Path

import conformance
import pytest
import ranks
import tiny
import torch
from pages import as_module
from torch.distributed.tensor import DTensor

from rft_fn import optim, tree
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.strategy.zero.stages import lower

FILE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "optimizers.py"
F64 = torch.float64
NAMES = ["lion", "muon", "partition", "sgd", "library lion"]


def examples():
    """The module of docs/examples with Lion and Muon."""
    return as_module(FILE)


def label(name, p):
    """Three kinds of parameters; some of each are sharded into unequal parts."""
    if p.dim() == 1 or "mlp.up" in name:
        return "lion"
    if "embed" in name or "self_attn.v" in name:
        return "adamw"
    return "muon"


def transforms():
    own = examples()
    clipped = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2, weight_decay=0.1))
    parts = {"muon": own.muon(1e-2), "lion": own.lion(1e-3, weight_decay=0.1), "adamw": clipped}
    return {
        "lion": optim.chain(optim.clip_by_global_norm(0.5), own.lion(1e-3, weight_decay=0.1)),
        "muon": optim.partition(lambda name, p: "muon" if p.dim() == 2 else "rest",
                                muon=own.muon(1e-2), rest=optim.adamw(1e-2)),
        "sgd": optim.chain(optim.clip_by_global_norm(0.5),
                           optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
        "library lion": optim.chain(optim.clip_by_global_norm(0.5), optim.lion(1e-3, weight_decay=0.1)),
        "partition": optim.chain(optim.partition(label, **parts), optim.ema(0.5)),
    }  # fmt: skip


def small():
    return tiny.llama(dtype=F64, intermediate_size=45)  # 45 rows on two processes are 23 and 22


def step(st, state, apply, i):
    grads, _ = st.grad(state, apply, conformance.loss_fn, st.shard(conformance.experience(i), 40))
    return st.update(state, grads)[0]


def trained(folder):
    """{name of the transform: weights after three steps}, the average, and what is sharded after two."""
    out = {}
    st = get_strategy(StrategyConfig())
    for name, tx in transforms().items():
        apply, state = st.init(small(), tx)
        for i in range(3):
            if i == 2:
                st.save(f"{folder}/{name}", state)
            state = step(st, state, apply, i)
        out[name] = {n: x.clone() for n, x in st.export(state)}
        leaves = [x for x in tree.leaves(state.opt) if isinstance(x, torch.Tensor)]
        out[f"{name} sharded"] = [isinstance(x, DTensor) for x in leaves]
    average = tree.replace(state, params=optim.ema_params(state.opt))
    out["average"] = {n: x.clone() for n, x in st.export(average)}
    return out


def on_two(rank, folder):
    return trained(folder)


@pytest.fixture(scope="module")
def runs():
    """(the folder of two processes, what came out on them, what came out on one)."""
    with tempfile.TemporaryDirectory() as folder:
        two = ranks.run(2, "test_optimizers:on_two", folder)
        yield folder, two, trained(f"{folder}/one")


def close(got, want):
    assert list(got) == list(want)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_take_the_steps_of_one(name, runs):
    _, two, one = runs
    start = dict(small().named_parameters())
    for rank in two:
        close(rank[name], one[name])
        assert rank[f"{name} sharded"] and all(rank[f"{name} sharded"])
    assert not any(one[f"{name} sharded"])
    assert all((one[name][n] - p).abs().max() > 1e-4 for n, p in start.items())


def test_the_average_behind_a_partition_is_that_of_one_process(runs):
    _, two, one = runs
    for rank in two:
        close(rank["average"], one["average"])
    assert not torch.equal(one["average"]["model.norm.weight"], one["partition"]["model.norm.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_two_processes_is_taken_up_by_one(name, runs):
    """The states of all parts are saved, and find their place again."""
    folder, _, one = runs
    st = get_strategy(StrategyConfig())
    apply, state = st.init(small(), transforms()[name])
    state, _ = st.restore(f"{folder}/{name}", state)
    close({n: x.clone() for n, x in st.export(step(st, state, apply, 2))}, one[name])


@pytest.mark.parametrize(
    ("name", "got"),
    [("lion", "lion last"), ("muon", "partition last"), ("partition", "partition last"), ("sgd", "sgd last")],
)
def test_zero_refuses_them_in_one_line(name, got):
    message = "tx: expected clip_by_global_norm, one adamw and ema in this order with zero_stage, got "
    with pytest.raises(ValueError) as error:
        lower(transforms()[name].spec)
    assert str(error.value) == f"{message}{got}; FSDP2 takes any transform"
