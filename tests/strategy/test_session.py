"""What a strategy owns and gives back: one after another in a process, failed starts, shared groups."""

import gc
import os
import pickle
import sys
import threading
import weakref
from pathlib import Path

import conformance
import forks
import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import dist, tree
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

ROOT = Path(__file__).resolve().parents[2]


def trained(st, steps=2):
    """The weights of a small model after some steps, by name."""
    apply, state = st.init(tiny.llama(), conformance.adamw())
    for i in range(steps):
        packs = st.shard(conformance.experience(i, dtype=torch.float32), 40)
        grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
        state, _ = st.update(state, grads)
    return {n: x.clone() for n, x in st.export(state)}


def checkpointed(st):
    return st.init(tiny.llama(), conformance.adamw())[1], {"note": "x"}


def left():
    """What a closed strategy must not leave: a process group, a thread that beats or writes."""
    names = [t.name for t in threading.enumerate()]
    threads = [n for n in names if n.startswith(("rft_fn heartbeat", "write"))]
    return torch.distributed.is_initialized(), threads


def lives(rank, folder, configs, bad):
    """The weights that each strategy trains, one after the other, each after a start that failed.

    Each closes while a checkpoint is being written.
    """
    out = []
    for i, options in enumerate(configs):
        with pytest.raises(ValueError, match="expected") as error:
            get_strategy(StrategyConfig(**bad))
        assert left() == (False, []), str(error.value)
        st = get_strategy(StrategyConfig(**options))
        assert torch.distributed.is_initialized()
        out.append(trained(st))
        st.save(f"{folder}/step_{i:08d}", *checkpointed(st), wait=False)
        st.close()
        assert rft.ckpt.folder.read_meta(Path(folder) / f"step_{i:08d}")["step"] == 0
        st.close()
        assert left() == (False, []) and dist.world() == 1
    return out


def same(found):
    """To 1e-5 of the norm: where a gradient is next to 0 Adam divides its rounding by itself."""
    want = trained(get_fake_strategy())
    for weights in found:
        off = torch.cat([(weights[n] - x).flatten() for n, x in want.items()]).norm()
        assert float(off) < 1e-5 * float(torch.cat([x.flatten() for x in want.values()]).norm())


def test_one_after_the_other_on_one_process(tmp_path):
    """Each has its own group, of one process, and the last finds none."""
    same(lives(0, tmp_path, [{"fsdp": True}, {"fsdp": True}], bad={"fsdp": True, "sp_size": 3}))


def test_one_after_the_other_on_two_processes(tmp_path):
    """Rank 0 holds the store itself, which goes with each group and comes with the next."""
    configs = [{}, {"sp_size": 2}, {"zero_stage": 1}, {"zero_stage": 3}, {"shard_size": 1}]
    for found in ranks.run(2, "test_session:lives", str(tmp_path), configs, {"sp_size": 3}):
        same(found)


def under_torchrun(folder):
    """As a script: a start that one rank refuses, two strategies, and a third that nobody closes."""
    rank = int(os.environ["RANK"])
    for _ in range(2):
        with pytest.raises(ValueError, match="ranks: expected the same options"):
            get_strategy(StrategyConfig(max_skips=5 + rank))
    found = []
    for close in (True, True, False):
        st = get_strategy(StrategyConfig())
        found.append(trained(st))
        st.save(f"{folder}/step_{len(found):08d}", *checkpointed(st), wait=close)
        if close:
            st.close()
            assert left() == (False, [])
    torch.save(found, f"{folder}/out{rank}.pt")
    sys.modules["__main__"].strategy = st  # it lives until the interpreter goes


def test_one_after_the_other_under_torchrun_and_a_clean_exit_without_close(tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *ranks.FOLDERS])
    script = tmp_path / "script.py"
    script.write_text(f"import test_session\ntest_session.under_torchrun({str(tmp_path)!r})\n")
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(ranks.free_port()), str(script)]
    done = forks.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        same(torch.load(tmp_path / f"out{rank}.pt"))
    assert [p.name for p in rft.ckpt.steps(tmp_path)] == [f"step_{i:08d}" for i in (1, 2, 3)]


def test_a_group_is_left_to_whoever_began_it():
    processes = dist.begin(60.0)
    try:
        first, second = (get_strategy(StrategyConfig(fsdp=True)) for _ in range(2))
        one = trained(first)
        first.close()
        assert torch.distributed.is_initialized()
        same([one, trained(second)])
        second.close()
        assert torch.distributed.is_initialized()
    finally:
        processes.close()
    assert left() == (False, [])


def many(rank):
    """The number of process groups after each of several strategies, of which every second is closed."""
    processes = dist.begin(60.0)
    counts = []
    for i in range(4):
        st = get_strategy(StrategyConfig(fsdp=True, sp_size=2))
        trained(st, steps=1)
        if i % 2:
            st.close()
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    processes.close()
    return counts


def test_many_strategies_share_their_process_groups():
    """Groups have threads and connections, and torch keeps those that any tensor knows."""
    for counts in ranks.run(2, "test_session:many"):
        assert counts[0] > 1 and set(counts) == {counts[0]}


@pytest.mark.parametrize("options", [{}, {"fsdp": True}, {"zero_stage": 2}])
def test_no_pack_outlives_the_update(options):
    sharded = bool(options)  # DTensors and engines do not pickle
    st = get_strategy(StrategyConfig(**options))
    apply, state = st.init(tiny.llama(), conformance.adamw())
    packs = st.shard(conformance.experience(0, dtype=torch.float32), 40)
    kept = weakref.ref(packs[0].tokens)
    grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
    if not sharded:
        copied = pickle.loads(pickle.dumps(grads))
        assert copied.keys() == grads.keys() and copied.source is None
    del packs
    gc.collect()
    assert kept() is not None  # if the update fails, the sequence at fault is found in them
    state, _ = st.update(state, grads)
    gc.collect()
    assert kept() is None
    with pytest.raises(tree.UseAfterDonate):
        _ = grads.turn if options.get("zero_stage") else grads.keys()
    st.close()


def test_gradients_of_a_script_fail_without_a_diagnosis(tmp_path):
    """Whoever changes gradients has others than those of the packs."""
    st = get_strategy(StrategyConfig(max_skips=1))
    st.session.set_dump_dir(tmp_path)
    apply, state = st.init(tiny.llama(), conformance.adamw())
    packs = st.shard(conformance.experience(0, dtype=torch.float32), 40)
    grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
    with pytest.raises(rft.strategy.NonFinite, match=r"in a row \(step 1\)$"):
        st.update(state, tree.map(lambda g: g * torch.nan, grads))
    assert list(tmp_path.iterdir()) == []
