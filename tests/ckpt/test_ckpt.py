"""Checkpoints: whole or absent, exact, and clear about what is wrong with one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import forks
import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import ckpt, optim, packing, strategy, tree


def start(seed=0, **changes):
    st = strategy.get_fake_strategy()
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2), optim.ema(0.9))
    return st, *st.init(tiny.llama(seed, **changes), tx)


def advance(st, apply, state, n):
    norms = []
    for _ in range(n):
        pack = packing.pack(tiny.experience(state.step), range(6))
        grads, _ = st.grad(state, apply, lambda out, b: -out.logp, [pack])
        state, metrics = st.update(state, grads)
        norms.append(rft.metric.results(metrics)["grad/norm"])
    return state, norms


def test_resume_is_exact(tmp_path):
    """Five steps, or two, a save, another process's state, a restore and three: the same to the last bit."""
    st, apply, state = start()
    state, straight = advance(st, apply, state, 5)
    st2, apply2, state2 = start()
    state2, first = advance(st2, apply2, state2, 2)
    extra = {"moments": rft.reward_shaping.moments(), "note": "x", "ratio": 0.1}
    st2.save(tmp_path / "step_00000002", state2, extra)
    st3, apply3, like = start(seed=1)
    state3, more = st3.restore(tmp_path / "step_00000002", like, extra)
    assert more["note"] == "x" and more["ratio"] == 0.1 and state3.step == 2
    state3, rest = advance(st3, apply3, state3, 3)
    assert first + rest == straight
    for a, b in zip(tree.leaves((state.params, state.opt)), tree.leaves((state3.params, state3.opt))):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    with pytest.raises(tree.UseAfterDonate):
        _ = like.params


def test_extra_comes_back_without_a_template(tmp_path):
    st, _, state = start()
    st.save(tmp_path / "a", state, {"seen": {"count": torch.tensor(3)}, "note": "x"})
    st.save(tmp_path / "b", start()[2])
    _, extra = st.restore(tmp_path / "a", start(1)[2])
    assert extra == {"seen": {"count": torch.tensor(3)}, "note": "x"}
    assert st.restore(tmp_path / "b", start(1)[2])[1] is None


def test_skips_in_a_row_are_counted_on(tmp_path):
    st, _, state = start()
    nan = tree.map(lambda p: torch.full_like(p, float("nan")), state.params)
    state, _ = st.update(state, nan)
    st.save(tmp_path / "step_1", state)
    found, _ = st.restore(tmp_path / "step_1", start(1)[2])
    assert (found.skipped, found.step, found.opt[1].count) == (1, 1, 0)


def test_restored_weights_are_the_modules(tmp_path):
    st, _, state = start(seed=4)
    st.save(tmp_path / "step_1", state)
    want = {n: p.clone() for n, p in state.params.items()}
    lm = tiny.llama(5)
    _, like = st.init(lm, state.tx)
    st.restore(tmp_path / "step_1", like)
    assert all(torch.equal(p, want[n]) for n, p in lm.named_parameters())


def damage(path, kind):
    file = path / "rank_00000.safetensors"
    if kind == "flipped bit":
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    elif kind == "cut short":
        os.truncate(file, file.stat().st_size // 2)
    elif kind == "no tensors":
        file.unlink()
    elif kind == "bad json":
        (path / "meta.json").write_text("{")
    elif kind == "another number":
        text = (path / "meta.json").read_text()
        (path / "meta.json").write_text(text.replace('"state/step": 0', '"state/step": 1'))
        assert text != (path / "meta.json").read_text()
    elif kind == "another format":
        (path / "meta.json").write_text('{"format": 1}')


DAMAGES = ["flipped bit", "cut short", "no tensors", "bad json", "another number", "another format"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_remedy(tmp_path, kind):
    st, _, state = start()
    for step in (1, 2):
        st.save(tmp_path / f"step_{step:08d}", state)
    damage(tmp_path / "step_00000002", kind)
    with pytest.raises(ValueError, match=r"step_00000002 is damaged .* resume from step_00000001"):
        st.restore(ckpt.latest(tmp_path), start(1)[2])
    st.restore(tmp_path / "step_00000001", start(1)[2])


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    st, _, state = start()
    st.save(tmp_path / "step_1", state)
    _, _, other = start(hidden_size=16)
    before = tree.map(torch.clone, other.params)
    with pytest.raises(ValueError, match="it is of another model or optimizer"):
        st.restore(tmp_path / "step_1", other)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(other.params)))
    plain = st.init(tiny.llama(), optim.adamw(1e-2))[1]
    with pytest.raises(ValueError, match="names differ"):
        st.restore(tmp_path / "step_1", plain)


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    _, _, state = start()
    for step, score in enumerate([0.1, 0.9, 0.3, 0.9, 0.2, 0.4], start=1):
        ckpt.save(tmp_path / f"step_{step:08d}", state, score=score)
        ckpt.rotate(tmp_path, keep=2, best=1)
    assert [p.name for p in ckpt.steps(tmp_path)] == ["step_00000004", "step_00000005", "step_00000006"]
    with pytest.raises(ValueError, match="keep: expected >= 1, got 0"):
        ckpt.rotate(tmp_path, keep=0)


def test_a_damaged_older_one_stays_and_the_new_one_is_saved(tmp_path, capsys):
    """It may be the best: nobody knows any more, so nothing of it is lost, and the line is about it."""
    st, _, state = start()
    for step, score in enumerate([0.9, 0.1, 0.2], start=1):
        ckpt.save(tmp_path / f"step_{step:08d}", state, score=score)
    (tmp_path / "step_00000001" / "meta.json").write_text("{")
    for wait in (True, False):
        st.save(tmp_path / "step_00000004", state, score=0.05, wait=wait)
        st.rotate(tmp_path, keep=1, best=1)
        st.session.writer.finish()
        assert [p.name[-1] for p in ckpt.steps(tmp_path)] == ["1", "3", "4"]
    line = capsys.readouterr().err
    assert line.count("step_00000001 is damaged (meta.json") == 1 and "so it stays" in line
    assert "not saved" not in line


def test_a_rotation_that_fails_does_not_deny_the_checkpoint(tmp_path, monkeypatch):
    st, _, state = start()
    ckpt.save(tmp_path / "step_00000001", state)
    go = slowly(monkeypatch)
    st.save(tmp_path / "step_00000002", state, wait=False)
    monkeypatch.setattr(ckpt, "delete", full)
    st.rotate(tmp_path, keep=1)
    go.set()
    with pytest.raises(OSError, match="step_00000002 is saved, but older ones could not be deleted"):
        st.close()
    assert [p.name[-1] for p in ckpt.steps(tmp_path)] == ["1", "2"]


def test_folders_have_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        ckpt.write(tmp_path / "step_1", {"x": torch.zeros(1)})
    finally:
        os.umask(before)
    assert oct((tmp_path / "step_1").stat().st_mode & 0o777) == "0o750"


@pytest.mark.parametrize("where", ["params", "opt"])
def test_what_is_not_finite_is_not_saved(tmp_path, where):
    st, _, state = start()
    name = "model.norm.weight"
    (state.params if where == "params" else optim.ema_params(state.opt))[name].data[3] = float("nan")
    with pytest.raises(ValueError, match=rf"state/{where}/.*{name}: expected finite .*, got NaN") as error:
        st.save(tmp_path / "step_1", state)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_extra_that_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path):
    st, _, state = start()
    with pytest.raises(ValueError, match="extra: expected tensors, numbers and strings"):
        st.save(tmp_path / "step_1", state, {"f": object()})
    assert list(tmp_path.iterdir()) == []


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("at", ["write_shard", "flush"])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, at):
    st, _, state = start()
    st.save(tmp_path / "step_1", state)
    monkeypatch.setattr(ckpt.writing, at, full)
    with pytest.raises(OSError, match=r"No space left on device: checkpoint .*step_2 was not saved") as error:
        st.save(tmp_path / "step_2", state)
    assert error.value.errno == 28
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def slowly(monkeypatch):
    """Files are written only when the event that comes back is set."""
    write, go = ckpt.writing.write_shard, threading.Event()
    monkeypatch.setattr(ckpt.writing, "write_shard", lambda *args: (go.wait(30), write(*args))[1])
    return go


def test_the_training_goes_on_while_files_are_written(tmp_path, monkeypatch):
    """What is saved is the state at the call; nothing of it is seen before it is whole."""
    st, apply, state = start()
    st.save(tmp_path / "step_00000001", state)
    want = tree.map(torch.clone, state.params)
    go = slowly(monkeypatch)
    st.save(tmp_path / "step_00000002", state, wait=False)
    state, _ = advance(st, apply, state, 2)
    assert st.rotate(tmp_path, keep=1) == []
    assert [p.name for p in ckpt.steps(tmp_path)] == ["step_00000001"]  # the only whole one
    go.set()
    st.session.writer.finish()
    assert [p.name for p in ckpt.steps(tmp_path)] == ["step_00000002"]  # rotated when that was whole
    found, _ = st.restore(tmp_path / "step_00000002", start(1)[2])
    assert all(torch.equal(a, b) for a, b in zip(want.values(), found.params.values()))
    name = next(iter(want))
    assert not torch.equal(state.params[name], found.params[name])


def test_a_rotation_without_the_writer_leaves_what_is_being_written(tmp_path, monkeypatch):
    """It knows nothing of the write, only that the temporary folder is of this process."""
    st, _, state = start()
    st.save(tmp_path / "step_00000001", state)
    (tmp_path / ".step_00000009.0123").mkdir()  # of a killed run
    go = slowly(monkeypatch)
    st.save(tmp_path / "step_00000002", state, wait=False)
    assert ckpt.rotate(tmp_path, keep=1) == []
    assert not (tmp_path / ".step_00000009.0123").exists()
    go.set()
    st.close()
    assert [p.name for p in ckpt.steps(tmp_path)] == ["step_00000001", "step_00000002"]


def test_a_write_that_fails_later_is_raised_by_close(tmp_path, monkeypatch):
    st, _, state = start()
    monkeypatch.setattr(ckpt.writing, "write_shard", full)
    st.save(tmp_path / "step_1", state, wait=False)
    with pytest.raises(OSError, match="step_1 was not saved"):
        st.close()
    st.close()
    assert st.session.writer.pending is None and list(tmp_path.iterdir()) == []


def test_a_write_that_fails_later_is_raised_by_the_next_call(tmp_path, monkeypatch):
    st, _, state = start()
    monkeypatch.setattr(ckpt.writing, "write_shard", full)
    st.save(tmp_path / "step_1", state, wait=False)
    with pytest.raises(OSError, match="step_1 was not saved"):
        st.save(tmp_path / "step_2", state, wait=False)
    st.session.writer.finish()  # raised once
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_later_is_raised_by_the_next_step(tmp_path, monkeypatch):
    """Not only when the next checkpoint is due. What has not failed yet does not hold a step up."""
    st, apply, state = start()
    go = slowly(monkeypatch)
    st.save(tmp_path / "step_1", state, wait=False)
    state, _ = advance(st, apply, state, 1)
    assert st.session.writer.pending is not None
    go.set()
    st.session.writer.finish()
    monkeypatch.setattr(ckpt.writing, "write_shard", full)
    st.save(tmp_path / "step_2", state, wait=False)
    st.session.writer.pending.written.wait()
    with pytest.raises(OSError, match="step_2 was not saved"):
        advance(st, apply, state, 1)
    advance(st, apply, state, 1)  # said once, and the state is whole
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.slow
def test_exit_waits_for_the_write(tmp_path):
    code = """
    import sys, time, torch
    from rft_fn import ckpt
    write = ckpt.writing.write_shard
    def slow(*args):
        time.sleep(0.5)
        if sys.argv[2] == "full":
            raise OSError(28, "No space left on device")
        return write(*args)
    ckpt.writing.write_shard = slow
    ckpt.write(sys.argv[1] + "/step_1", {"x": torch.arange(4)}, writer=ckpt.Writer())
    """
    for kind, names in {"whole": ["step_1"], "full": []}.items():
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / kind), kind]
        done = forks.run(command, env=environment(), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert [p.name for p in (tmp_path / kind).iterdir()] == names
        assert ("step_1 was not saved: No space left on device" in done.stderr) == (kind == "full")


def test_plain_dicts_of_every_type(tmp_path):
    """The writer without any TrainState; the files are safetensors that the library itself reads."""
    from safetensors.torch import load_file

    types = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
    named = {str(t): torch.arange(5).to(t) for t in types}
    named |= {"bool": torch.tensor([[True, False]]), "none": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    named |= {"strided": torch.arange(6.0).view(2, 3).t(), "count": 3, "note": "x", "nan": float("inf")}
    ckpt.write(tmp_path / "a", named, score=torch.tensor(0.5))
    found = ckpt.read(tmp_path / "a", named)
    assert list(found) == list(named) and (found["count"], found["note"]) == (3, "x")
    stored = load_file(tmp_path / "a" / "rank_00000.safetensors")
    for name, x in named.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(found[name], x) and found[name].dtype == x.dtype
            assert not x.numel() or torch.equal(stored[name], x)
    with pytest.raises(ValueError, match=r"complex: expected one of float64, .* got torch.complex64"):
        ckpt.write(tmp_path / "b", {"complex": torch.zeros(1, dtype=torch.complex64)})


def test_rotation_by_size(tmp_path):
    """The newest stays whatever its size, then the best, then the next newest ones while they fit."""
    for step, score in enumerate([0.9, 0.1, 0.3, 0.2], start=1):
        ckpt.write(tmp_path / f"step_{step:08d}", {"x": torch.zeros(100_000)}, step=step, score=score)
    left = lambda: [int(p.name[-2:]) for p in ckpt.steps(tmp_path)]  # noqa: E731
    assert ckpt.rotate(tmp_path, keep=9, best=1, max_bytes=1_700_000) == [] and left() == [1, 2, 3, 4]
    ckpt.rotate(tmp_path, keep=9, best=1, max_bytes=1_300_000)
    assert left() == [1, 3, 4]
    ckpt.rotate(tmp_path, keep=9, best=1, max_bytes=900_000)
    assert left() == [1, 4]
    ckpt.rotate(tmp_path, keep=9, best=1, max_bytes=1)
    assert left() == [4]


def test_a_save_cut_between_its_two_renames_is_healed(tmp_path):
    st, _, state = start()
    st.save(tmp_path / "step_00000001", state)
    os.rename(tmp_path / "step_00000001", tmp_path / ".step_00000001.old")
    assert ckpt.latest(tmp_path).name == "step_00000001"
    assert ckpt.latest(tmp_path / "nothing") is None


def environment():
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, os.path.join(root, "kernels")])}


WRITER = """
    import sys, torch
    sys.path.insert(0, sys.argv[2])
    import tiny
    from rft_fn import ckpt, optim, strategy, tree
    st = strategy.get_fake_strategy()
    _, state = st.init(tiny.llama(hidden_size=256, intermediate_size=1024), optim.adamw(1e-2))
    print("ready", flush=True)
    for step in range(1, 10_000):
        state = tree.replace(state, step=step)
        st.save(f"{sys.argv[1]}/step_{step:08d}", state, wait=step % 2 == 0)
        st.rotate(sys.argv[1], keep=2)
"""


@pytest.mark.slow
def test_kill_9_during_writes_loses_nothing_that_was_saved(tmp_path):
    """A process that does nothing but save is killed at three moments; what it leaves is always whole."""
    here, env = str(Path(tiny.__file__).parent), environment()
    for i, wait in enumerate((0.2, 0.53, 0.91)):
        folder = tmp_path / str(i)
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), here]
        process = forks.Popen(command, stdout=subprocess.PIPE, env=env)
        assert process.stdout.readline() == b"ready\n"
        while not ckpt.steps(folder):  # on a busy machine one takes longer than the first wait
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        st = strategy.get_fake_strategy()
        saved = ckpt.steps(folder)
        assert saved
        for path in saved:
            _, like = st.init(tiny.llama(hidden_size=256, intermediate_size=1024), optim.adamw(1e-2))
            state, _ = st.restore(path, like)
            assert (
                state.step
                == int(path.name.split("_")[1])
                == json.loads((path / "meta.json").read_text())["step"]
            )
