"""Checkpoints of several processes: any number of them goes on from what any other number saved."""

import json
import math
import signal
import time
from pathlib import Path

import pytest
import ranks
import tiny
import torch
from each_case import each
from test_ckpt import full

import rft_fn as rft
from rft_fn import ckpt, data, dist, model, optim, packing, tree
from rft_fn.strategy import StrategyConfig, get_strategy

pytestmark = pytest.mark.slow

CASES = {  # name -> options of the strategy, given the number of processes
    "adamw": lambda world: {},
    "hsdp": lambda world: {"shard_size": world // 2},
    "lora, ema": lambda world: {},
    "master weights": lambda world: {"use_mp_opt": True},
    "adam offload": lambda world: {"adam_offload": True},
    "two": lambda world: {},
}
EXTRA = {"note": "x", "moments": {"mean": torch.tensor([0.1, 0.2]), "count": 7}}


def strategy(case, world):
    options = CASES[case](world) if world > 1 or case != "hsdp" else {}
    return get_strategy(StrategyConfig(**options))


def make(st, case, seed=0):
    """(applies by name, one TrainState or a dict of them) of tiny models."""
    dtype = torch.float32 if case == "master weights" else torch.float64
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    lm = tiny.llama(seed, dtype=dtype)
    if case == "two":
        actor, a = st.init(lm, tx)
        critic, c = st.init(model.Critic(tiny.llama(seed + 5, dtype=dtype)), optim.adamw(1e-2))
        return {"actor": actor, "critic": critic}, {"actor": a, "critic": c}
    if case == "lora, ema":  # the frozen model is not in the checkpoint
        torch.manual_seed(seed)
        lm = model.apply_lora_configuration(tiny.llama(dtype=dtype), rank=2, alpha=4).to(dtype)
        tx = optim.chain(tx, optim.ema(0.9))
    apply, state = st.init(lm, tx)
    return {"": apply}, state


def loss_fn(out, b):
    return (out.value - 1) ** 2 if out.value is not None else -out.logp


def go(st, applies, states, count=2):
    """(states after `count` updates, the norms of their gradients)."""
    named = {"": states} if isinstance(states, rft.TrainState) else dict(states)
    norms = []
    for _ in range(count):
        for name, apply in applies.items():
            exp = tiny.experience(named[name].step, 8)
            dtype = next(iter(named[name].params.values())).dtype
            exp = tree.replace(exp, w=exp.w.to(torch.float32 if dtype == torch.bfloat16 else dtype))
            grads, _ = st.grad(named[name], apply, loss_fn, st.shard(exp, 40))
            named[name], metrics = st.update(named[name], grads)
            norms.append(rft.metric.results(metrics)["grad/norm"])
    return (named[""] if isinstance(states, rft.TrainState) else named), norms


def whole(states):
    """Every leaf by its path; tensors put together, copied."""
    full = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x  # noqa: E731
    copy = lambda x: full(x.detach()).cpu().clone() if isinstance(x, torch.Tensor) else x  # noqa: E731
    return {name: copy(x) for name, x in tree.leaves_with_path(states)}


def round_trip(folder, case, world, sources):
    """Four updates with a save after two, then for each source its last two: {source: ...}."""
    st, out = strategy(case, world), {}
    applies, states = make(st, case)
    states, _ = go(st, applies, states)
    saved, path = whole(states), Path(folder) / case
    st.save(path / f"w{world}", states, EXTRA, score=1.5, wait=False)  # the updates below are not in it
    states, norms = go(st, applies, states)
    out["straight"] = {"saved": saved, "end": whole(states), "norms": norms}
    st.session.writer.finish()
    for source in (*sources, world):
        applies, like = make(st, case, seed=1)
        like, extra = st.restore(path / f"w{source}", like, EXTRA if source == world else None)
        found = {"saved": whole(like), "extra": extra}
        states, found["norms"] = go(st, applies, like)
        out[source] = found | {"end": whole(states)}
    return out


def round_trips(rank, folder, world, sources):
    out = {case: round_trip(folder, case, world, sources) for case in CASES}
    writer = ckpt.Writer()
    ckpt.write(Path(folder) / f"exit{world}", {"x": torch.arange(6.0)}, writer=writer)  # and then they exit
    return (
        (out, faults(rank, Path(folder) / "faults") if world == 2 else {}) if rank == 0 or world == 2 else 0
    )


@pytest.fixture(scope="module")
def trips(tmp_path_factory):
    """{(world, case): what `round_trip` found}, where each world also goes on from those before it."""
    folder, out = tmp_path_factory.mktemp("ckpt"), {}
    first = {case: round_trip(folder, case, 1, ()) for case in CASES}
    four, _ = ranks.run(4, "test_ckpt_ranks:round_trips", folder, 4, (1,))[0]
    two = ranks.run(2, "test_ckpt_ranks:round_trips", folder, 2, (1, 4))
    last = {case: round_trip(folder, case, 1, (4, 2)) for case in CASES}
    for world, found in {"first": first, 4: four, 2: two[0][0], 1: last}.items():
        out |= {(world, case): x for case, x in found.items()}
    return out | {"faults": [faults for _, faults in two], "folder": folder}


def same(a, b):
    return list(a) == list(b) and all(
        torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n] for n in a
    )


@each("case", CASES)
@each("world", [1, 2, 4])
def test_the_same_number_goes_on_to_the_bit(trips, world, case):
    found = trips[world, case]
    straight, again = found["straight"], found[world]
    assert same(again["saved"], straight["saved"]) and again["norms"] == straight["norms"]
    assert same(again["end"], straight["end"])
    assert again["extra"]["note"] == "x" and again["extra"]["moments"]["count"] == 7
    assert torch.equal(again["extra"]["moments"]["mean"], EXTRA["moments"]["mean"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("source", "world"), [(1, 4), (1, 2), (4, 2), (4, 1), (2, 1)])
def test_another_number_goes_on(trips, source, world, case):
    """The state is restored to the bit; what differs is the order in which gradients are added."""
    straight, found = trips[source, case]["straight"], trips[world, case][source]
    assert same(found["saved"], straight["saved"])
    assert torch.equal(found["extra"]["moments"]["mean"], EXTRA["moments"]["mean"])
    loose = case == "master weights"  # a forward in bfloat16 rounds by the cut of the packs
    assert found["norms"] == pytest.approx(straight["norms"], rel=2e-2 if loose else 1e-6)
    for name, x in straight["end"].items():
        if isinstance(x, torch.Tensor) and not loose:
            torch.testing.assert_close(found["end"][name], x, rtol=1e-6, atol=1e-9)


@each("case", CASES)
@each("world", [2, 4])
def test_every_part_is_written_once_and_by_all(trips, world, case):
    meta = json.loads((trips["folder"] / case / f"w{world}" / "meta.json").read_text())
    written = dict.fromkeys(range(world), 0)
    for name, entry in meta["tensors"].items():
        numbers = [math.prod(size) for _, _, size in entry["chunks"]]
        assert sum(numbers) == math.prod(entry["shape"]), name
        for (rank, _, _), n in zip(entry["chunks"], numbers):
            written[rank] += n
    if case == "lora, ema":  # two rows of an adapter do not fill four ranks
        assert all(written.values()) and all("lora" in n for n in meta["tensors"] if "moments" not in n)
    else:
        assert max(written.values()) < 1.3 * min(written.values())


@pytest.mark.parametrize("world", [2, 4])
def test_the_exit_of_several_waits_for_the_write(trips, world):
    found = ckpt.read(trips["folder"] / f"exit{world}", {"x": torch.zeros(6)})
    assert torch.equal(found["x"], torch.arange(6.0))


def message(f, *args, **options):
    try:
        f(*args, **options)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__} {getattr(error, 'errno', None)}: {error}"
    return "nothing was raised"


def faults(rank, folder):
    """{what happens: the message of each, and what is left}."""
    st, out = get_strategy(StrategyConfig()), {}
    _, state = make(st, "adamw")
    left = lambda: sorted(p.name for p in folder.iterdir())  # noqa: E731
    st.save(folder / "step_00000001", state)
    for name, at, who in (("part", "write_shard", 1), ("commit", "flush", 0)):
        kept = getattr(ckpt.writing, at)
        if rank == who:
            setattr(ckpt.writing, at, full)
        out[f"full {name}"] = message(st.save, folder / "step_00000002", state)
        st.save(folder / "step_00000002", state, wait=False)
        out[f"full {name} later"] = message(st.session.writer.finish)
        st.save(folder / "step_00000002", state, wait=False)
        st.session.writer.pending.written.wait()
        while rank == who and st.session.writer.pending.error is None:
            time.sleep(0.01)
        dist.barrier()
        out[f"full {name} polled"] = message(st.session.writer.poll)
        out[f"full {name} once"] = message(st.session.writer.poll)
        setattr(ckpt.writing, at, kept)
        dist.barrier()
        out[f"full {name} left"] = left()
    bad = tree.map(lambda p: p.detach().clone(), state.params)
    if rank == 1:
        bad["model.norm.weight"].to_local()[-1] = float("nan")
    out["not finite"] = message(st.save, folder / "step_00000002", tree.replace(state, params=bad))
    out["odd number"] = message(st.save, folder / "step_00000002", state, {"rank": rank})
    out["odd tensor"] = message(st.save, folder / "step_00000002", state, {"seen": torch.tensor(rank)})
    out["odd object"] = message(st.save, folder / "step_00000002", state, {"f": object() if rank else 1})
    st.save(folder / "step_00000002", state)
    other = make(st, "lora, ema")[1]
    before = whole(other)
    out["another model"] = message(st.restore, folder / "step_00000002", other)
    out["another model changed"] = not same(before, whole(other))
    out.update(alone(rank, folder))
    if rank == 0:
        data = bytearray((folder / "step_00000002" / "rank_00001.safetensors").read_bytes())
        data[-5] ^= 1
        (folder / "step_00000002" / "rank_00001.safetensors").write_bytes(data)
    dist.barrier()
    like = make(st, "adamw", seed=1)[1]
    before = whole(like)
    out["damaged"] = message(st.restore, folder / "step_00000002", like)
    out["damaged changed"] = not same(before, whole(like))
    return out


def alone(rank, folder):
    """Rank 0 looks and deletes, the other one gets its answer."""
    if rank == 1:
        ckpt.folder._newest = ckpt.delete = full
    out = {"latest": ckpt.latest(folder).name, "deleted": [p.name for p in ckpt.rotate(folder, keep=2)]}
    if rank == 0:
        ckpt.delete = full
    return out | {"rotate": message(ckpt.rotate, folder, keep=1)}


WANT = {
    "full part polled": r"OSError 28: [Errno 28] No space left on device (rank 1 of 2): checkpoint ",
    "full part once": "nothing was raised",
    "full commit polled": r"OSError 28: [Errno 28] No space left on device (rank 0 of 2): checkpoint ",
    "full commit once": "nothing was raised",
    "not finite": "ValueError None: checkpoint /",
    "full part": r"OSError 28: [Errno 28] No space left on device (rank 1 of 2): checkpoint ",
    "full part later": r"OSError 28: [Errno 28] No space left on device (rank 1 of 2): checkpoint ",
    "full commit": r"OSError 28: [Errno 28] No space left on device (rank 0 of 2): checkpoint ",
    "full commit later": r"OSError 28: [Errno 28] No space left on device (rank 0 of 2): checkpoint ",
    "odd number": "ValueError None: checkpoint: expected the same on all ranks: extra/rank: rank 0 has 0, "
    "rank 1 has 1",
    "odd tensor": "ValueError None: checkpoint: expected the same on all ranks: extra/seen: rank 0 has "
    "torch.int64 [] ",
    "odd object": "ValueError None: extra: expected tensors, numbers and strings: Object of type object is "
    "not JSON serializable (rank 1 of 2)",
    "rotate": r"OSError 28: [Errno 28] No space left on device (rank 0 of 2)",
}


@each("what", WANT)
def test_an_error_on_one_rank_is_raised_on_all(trips, what):
    one, other = (f[what] for f in trips["faults"])
    assert one == other and one.startswith(WANT[what]), one


def test_what_failed_leaves_nothing_and_changes_nothing(trips):
    for found in trips["faults"]:
        assert found["full part left"] == found["full commit left"] == ["step_00000001"]
        assert "state/params/model.norm.weight: expected finite" in found["not finite"]
        assert "it is of another model, optimizer or run" in found["another model"]
        assert "step_00000002 is damaged (rank_00001.safetensors: its digest" in found["damaged"]
        assert "delete it to resume from step_00000001 (rank 1 of 2)" in found["damaged"]
        assert not found["another model changed"] and not found["damaged changed"]
        assert found["latest"] == "step_00000002" and found["deleted"] == []


def forever(rank, folder):
    """Saves and nothing else, until it is killed."""
    st = get_strategy(StrategyConfig(timeout=20.0))
    _, state = st.init(tiny.llama(hidden_size=256, intermediate_size=1024), optim.adamw(1e-2))
    for step in range(1, 10_000):
        state = tree.replace(state, step=step)
        st.save(Path(folder) / f"step_{step:08d}", state, wait=step % 2 == 0)
        st.rotate(folder, keep=2)


def test_kill_9_during_the_write_of_two(tmp_path):
    """What processes that were killed, one a little before the other, leave is whole."""
    folder = tmp_path / "checkpoints"
    processes = ranks.start(2, "test_ckpt_ranks:forever", folder, folder=tmp_path)
    while len(ckpt.steps(folder)) < 2:
        assert not any(p.poll() for p in processes), (tmp_path / "log0").read_text()
        time.sleep(0.01)
    time.sleep(0.37)
    for p in reversed(processes):
        p.send_signal(signal.SIGKILL)
        p.wait()
        time.sleep(0.1)
    st = rft.strategy.get_fake_strategy()
    assert ckpt.steps(folder)
    for path in ckpt.steps(folder):
        _, like = st.init(tiny.llama(hidden_size=256, intermediate_size=1024), optim.adamw(1e-2))
        state, _ = st.restore(path, like)
        assert state.step == int(path.name.split("_")[1])
    newest = ckpt.latest(folder)
    ckpt.rotate(folder, keep=1)
    assert list(folder.iterdir()) == [newest]


ROWS = [{"prompt": f"{n}=", "completion": str(n)} for n in range(11)]


def course(st, folder, name, *, first=0, last=7, save=None):
    """[(rate, the rows of each minibatch)] of the steps first to last, two passes in two minibatches each.

    The gradients of step 1 are NaN: their update is skipped, so the rate is that of one update fewer.
    """
    rates = []
    schedule = optim.warmup_cosine(1e-2, 4, 2 * 2 * last)

    def rate(step):
        rates.append(schedule(step))
        return rates[-1]

    dataset = data.from_rows(ROWS, tiny.tokenizer(), template="{prompt}")
    apply, state = st.init(tiny.llama(dtype=torch.float64), optim.adamw(rate))
    if first:
        state, _ = st.restore(Path(folder) / name, state)
    out = []
    for step in range(first, last):
        if step == save:
            st.save(Path(folder) / name, state)
        prompts, _ = data.draw(dataset, 4, step, 3)  # 11 rows are read more than twice
        exp = packing.supervised([(prompt.ids, [5, 6]) for prompt in prompts])
        exp = tree.replace(exp, w=exp.mask.double() * (math.nan if step == 1 else 1.0))
        for epoch in range(2):
            for part in packing.minibatches(exp, 2, rft.rng.fold_in(3, "updates", step, epoch)):
                grads, _ = st.grad(state, apply, loss_fn, st.shard(part, 40))
                state, _ = st.update(state, grads)
                out.append((rates[-1] if rates else None, part.tokens.tolist()))
    return out, len(rates), optim.count(state.opt), state.step


def courses(rank, folder):
    st = get_strategy(StrategyConfig())
    whole = course(st, folder, "two", save=4)
    again = course(st, folder, "two", first=4)
    return whole, again, course(st, folder, "one", first=4)


def test_rates_and_rows_after_a_resume_are_those_of_a_run_that_went_on(tmp_path):
    """On as many processes, on more and on fewer; an update that was skipped is no step of the schedule."""
    st = get_strategy(StrategyConfig())
    alone = course(st, tmp_path, "one", save=4)
    out, asked, count, steps = alone
    assert len({rate for rate, _ in out}) > 15 and (asked, count, steps) == (24, 24, 28)
    assert len({str(rows) for _, rows in out}) > 20
    for whole, again, more in ranks.run(2, "test_ckpt_ranks:courses", tmp_path):
        assert whole == alone
        for found in (again, more, course(st, tmp_path, "two", first=4)):
            assert found == (out[16:], 12, 24, 28)
