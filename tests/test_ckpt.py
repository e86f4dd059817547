"""Checkpoints: whole or absent, exact, and clear about what is wrong with one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

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


def test_restored_weights_are_the_modules(tmp_path):
    st, _, state = start(seed=4)
    st.save(tmp_path / "step_1", state)
    want = {n: p.clone() for n, p in state.params.items()}
    lm = tiny.llama(5)
    _, like = st.init(lm, state.tx)
    st.restore(tmp_path / "step_1", like)
    assert all(torch.equal(p, want[n]) for n, p in lm.named_parameters())


def damage(path, kind):
    file = path / "tensors.safetensors"
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


@pytest.mark.parametrize("kind", ["flipped bit", "cut short", "no tensors", "bad json"])
def test_a_damaged_checkpoint_is_named_with_the_remedy(tmp_path, kind):
    st, _, state = start()
    for step in (1, 2):
        st.save(tmp_path / f"step_{step:08d}", state)
    damage(tmp_path / "step_00000002", kind)
    with pytest.raises(
        ValueError, match=r"step_00000002 is damaged .* delete it to go on from step_00000001"
    ):
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


def test_extra_that_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path):
    st, _, state = start()
    with pytest.raises(ValueError, match="extra: expected tensors, numbers and strings"):
        st.save(tmp_path / "step_1", state, {"f": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    st, _, state = start()
    st.save(tmp_path / "step_1", state)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ckpt, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        st.save(tmp_path / "step_2", state)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_a_save_cut_between_its_two_renames_is_healed(tmp_path):
    st, _, state = start()
    st.save(tmp_path / "step_00000001", state)
    os.rename(tmp_path / "step_00000001", tmp_path / ".step_00000001.old")
    assert ckpt.latest(tmp_path).name == "step_00000001"
    assert ckpt.latest(tmp_path / "nothing") is None


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
        st.save(f"{sys.argv[1]}/step_{step:08d}", state)
        ckpt.rotate(sys.argv[1], keep=2)
"""


def test_kill_9_during_writes_loses_nothing_that_was_saved(tmp_path):
    """A process that does nothing but save is killed at three moments; what it leaves is always whole."""
    here = os.path.dirname(__file__)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.path.dirname(here), os.path.join(os.path.dirname(here), "kernels")])
    }
    for i, wait in enumerate((0.2, 0.53, 0.91)):
        folder = tmp_path / str(i)
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), here]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
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
