"""What comes back from a checkpoint: extras as they were, states in lists, the weights alone."""

from collections import deque
from typing import NamedTuple

import pytest
import tiny
import torch

from rft_fn import ckpt, optim, reward_shaping, strategy, tree, types
from rft_fn.ckpt import folder


@tree.struct
class Buffer:
    rows: list
    last: torch.Tensor | None
    size: int = tree.static()


class Pair(NamedTuple):
    a: int
    b: torch.Tensor


def start(seed=0, tx=None, config=None, dtype=torch.float32):
    st = strategy.get_strategy(config or strategy.StrategyConfig())
    return st, *st.init(tiny.llama(seed, dtype=dtype), tx or optim.adamw(1e-2))


def plain(named):
    return {n: x.detach() for n, x in named.items()}


def same(a, b):
    """Whether two trees have the same types, structure and values."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        return all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        assert len(a) == len(b)
        return all(same(x, y) for x, y in zip(a, b))
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, k), getattr(b, k)) for k in a.__dataclass_fields__)
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


EXTRAS = {
    "a struct": {"step": 3, "moments": reward_shaping.moments()},
    "a replay buffer": {"buffer": [torch.arange(n) for n in (3, 1, 4)], "seen": deque([1, 2], maxlen=5)},
    "one of structs": Buffer(rows=[torch.ones(2), torch.zeros(0)], last=None, size=7),
    "a rollout": types.Rollout(
        tokens=torch.ones(2, 3, dtype=torch.long),
        mask=torch.ones(2, 3, dtype=torch.bool),
        logp=torch.zeros(2, 3),
        length=torch.tensor([3, 3]),
        truncated=torch.zeros(2, dtype=torch.bool),
        group=torch.arange(2),
        version=torch.zeros(2, dtype=torch.long),
        sampling=types.Sampling(temperature=0.5, stop=(7, "end")),
    ),
    "tuples": (1, (2.5, "x"), Pair(a=1, b=torch.ones(2)), []),
    "names": tree.Named({"b": torch.ones(1), "a": torch.zeros(1)}),
    "keys": {"z": {3: torch.ones(2, dtype=torch.bool), 1: None}, "a/b": 1, "empty": {}},
    "a number": 3,
}


@pytest.mark.parametrize("what", EXTRAS)
def test_an_extra_comes_back_as_it_was(tmp_path, what):
    st, _, state = start()
    st.save(tmp_path / "step_1", state, EXTRAS[what])
    state, extra = st.restore(tmp_path / "step_1", state)
    assert same(extra, EXTRAS[what])
    assert same(st.restore(tmp_path / "step_1", state, EXTRAS[what])[1], EXTRAS[what])


def test_a_field_that_a_later_version_brought_has_its_default():
    """A rollout that was saved before it said how it was drawn is one still."""
    rollout = tree.replace(EXTRAS["a rollout"], sampling=None)
    saved = folder.outline(rollout)
    del saved["static"]
    leaves = {f"extra/{name}": x for name, x in tree.leaves_with_path(rollout)}
    assert same(folder.build(saved, lambda path, like: leaves[path]), rollout)


def test_the_lengths_are_those_saved_and_the_fields_the_template_s(tmp_path):
    st, _, state = start()
    rows = [torch.ones(n) for n in (2, 3)]
    st.save(tmp_path / "step_1", state, {"buffer": rows, "last": torch.ones(1), "moments": None, "n": 2})
    shorter = {"n": 0, "buffer": [torch.zeros(5)], "last": None, "moments": None}
    state, extra = st.restore(tmp_path / "step_1", state, shorter)
    assert list(extra) == list(shorter) and same(extra["buffer"], rows) and extra["last"] == 1
    state, extra = st.restore(tmp_path / "step_1", state, shorter | {"buffer": rows * 2})
    assert same(extra["buffer"], rows)
    for odd, line in {
        "fields": (shorter | {"more": 1}, r"\['extra/more'\] \(1 names differ\)"),
        "types": (shorter | {"buffer": [torch.zeros(5).long()] * 2}, "extra/buffer/0: expected .*int64, got"),
        "kinds": (shorter | {"n": torch.zeros(())}, r"extra/n: expected \[\] float32, got no tensor"),
    }.values():
        with pytest.raises(ValueError, match=line):
            st.restore(tmp_path / "step_1", state, odd)


def test_what_cannot_come_back_is_not_saved(tmp_path):
    st, _, state = start()
    for extra, line in [
        ({(1, 2): 3}, "extra: expected keys"),
        ({"a/b": 1, "a": {"b": 2}}, "got extra/a/b twice"),
    ]:
        with pytest.raises(ValueError, match=line):
            st.save(tmp_path / "step_1", state, extra)
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_states_comes_back(tmp_path):
    st, _, first = start(0)
    _, _, second = start(1)
    want = [tree.map(torch.clone, plain(s.params)) for s in (first, second)]
    st.save(tmp_path / "step_1", [first, second])
    (first, second), _ = st.restore(tmp_path / "step_1", [start(2)[2], start(3)[2]])
    assert same([plain(s.params) for s in (first, second)], want)
    assert same(ckpt.weights(tmp_path / "step_1", name="1"), want[1])


def test_the_weights_alone(tmp_path):
    """By the model's names, without its optimizer: the parameters, their masters, their average."""
    config = strategy.StrategyConfig(use_mp_opt=True)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2), optim.ema(0.5))
    st, apply, state = start(tx=tx, config=config)
    pack = st.shard(tiny.experience(), 1000)
    for _ in range(2):
        state, _ = st.update(state, st.grad(state, apply, lambda out, b: -out.logp, pack)[0])
    critic = start(1)[2]
    st.save(tmp_path / "one", state, {"params": torch.ones(1)})
    st.save(tmp_path / "two", {"actor": state, "critic": critic})
    assert same(ckpt.weights(tmp_path / "one"), plain(state.params))
    assert same(ckpt.weights(tmp_path / "two", name="critic"), plain(critic.params))
    assert same(ckpt.weights(tmp_path / "two", name="actor", master=True), plain(state.opt.master))
    average = plain(optim.ema_params(state.opt))
    assert same(ckpt.weights(tmp_path / "one", ema=True), average)
    assert not same(average, plain(state.opt.master))


def test_weights_that_are_not_there_are_named(tmp_path):
    st, _, state = start()
    st.save(tmp_path / "one", state)
    st.save(tmp_path / "two", {"actor": state, "critic": state})
    for args, line in [
        (("two",), r"name: expected one of actor, critic in checkpoint .*two, got None"),
        (("two", "judge"), "name: expected one of actor, critic .* got judge"),
        (("one", "actor"), "name: expected None for the only state .* got actor"),
    ]:
        with pytest.raises(ValueError, match=line):
            ckpt.weights(tmp_path / args[0], name=(*args, None)[1])
    with pytest.raises(ValueError, match="expected an optimizer with average weights, got none"):
        ckpt.weights(tmp_path / "one", ema=True)
    with pytest.raises(ValueError, match="ema, master: expected one of them"):
        ckpt.weights(tmp_path / "one", ema=True, master=True)
    file = tmp_path / "one" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.raises(ValueError, match=r"one is damaged .*digest does not match"):
        ckpt.weights(tmp_path / "one")


def test_states_in_an_extra_train_on(tmp_path):
    """A population beside the state: with a template its parameters can be trained."""
    st, apply, state = start()
    st.save(tmp_path / "step_1", state, {"others": [state]})
    _, apply, like = start(2)
    _, extra = st.restore(tmp_path / "step_1", start(1)[2], {"others": [like]})
    other = extra["others"][0]
    assert isinstance(other, types.TrainState) and same(plain(other.params), plain(state.params))
    assert all(p.requires_grad for p in other.params.values())
    grads, _ = st.grad(other, apply, lambda out, b: -out.logp, st.shard(tiny.experience(), 1000))
    assert optim.global_norm(grads) > 0
