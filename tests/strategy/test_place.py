"""Weights that leave the device between the phases of a run, and come back to the bit."""

from functools import cache

import pytest
import ranks
import tiny
import torch
from places import Host, Storages, allocated
from torch import nn

import rft_fn as rft
from rft_fn import dist, model, optim, strategy
from rft_fn.model import apply_lora_configuration
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.strategy.common import residence_of

SHARDED = {
    "fsdp2": {},
    "sequence": {"sp_size": 2},
    "hsdp": {"shard_size": 1},
    "narrow": {"bf16": True},
    "zero1": {"zero_stage": 1},
    "zero3": {"zero_stage": 3},
}


class WithBuffer(nn.Module):
    """A critic with a buffer that its values are multiplied by."""

    def __init__(self):
        super().__init__()
        self.critic = model.Critic(tiny.llama(3))
        self.register_buffer("scale", torch.linspace(1, 2, 1000))

    def forward(self, pack):
        out = self.critic(pack)
        return rft.tree.replace(out, value=out.value * self.scale.sum())


MODULES = {
    "tied": tiny.llama,
    "critic": lambda: model.Critic(tiny.llama(5)),
    "buffer": WithBuffer,
    "adapters": lambda: apply_lora_configuration(tiny.llama(), rank=2, alpha=4),
    "frozen": lambda: tiny.llama().requires_grad_(False),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_byte_of_a_model_leaves_the_device_and_comes_back(name):
    """The allocator gets back all memory of parameters and buffers, trained or not."""
    st, host = strategy.get_fake_strategy(), Host()
    apply, params = st.bind(MODULES[name]())
    host.serve(apply)
    root = residence_of(apply).root
    fields = ("value",) if name in ("critic", "buffer") else ("logp",)
    before = st.score(apply, params, tiny.experience(), 100, fields=fields)
    held = Storages(root)
    _, peak, _ = allocated(lambda: st.place(apply, "host"))
    assert held.freed() == held.bytes and peak == 0 and host.bytes >= held.bytes
    _, _, back = allocated(lambda: st.place(apply, "device"))
    assert back == held.bytes
    after = st.score(apply, params, tiny.experience(), 100, fields=fields)
    assert torch.equal(getattr(after, fields[0]), getattr(before, fields[0]))


def test_a_model_on_the_host_refuses_and_says_what_to_call():
    st = strategy.get_fake_strategy()
    lm = tiny.llama()
    apply, state = st.init(lm, optim.adamw(1e-2))
    packs = st.shard(tiny.experience(), 100)
    grads, _ = st.grad(state, apply, loss_fn, packs)
    st.place(apply, "host")
    st.place(apply, "host")  # twice is once
    message = (
        "apply: expected the weights of LlamaForCausalLM on the device, got them on the host; "
        r'call st.place\(apply, "device"\) first'
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        apply(state.params, packs[0])
    with pytest.raises(ValueError, match=message):
        st.score(apply, state.params, tiny.experience(), 100)
    with pytest.raises(ValueError, match=message.replace("LlamaFor", "PeftModelFor")):
        model.score(model.without_adapters(*adapted(st)), {}, packs)
    with pytest.raises(ValueError, match="^state" + message.removeprefix("apply")):
        st.update(state, grads)
    with pytest.raises(ValueError, match=r"^state: expected the weights of Llama"):
        st.export(state)
    st.place(apply, "device")
    state, _ = st.update(state, grads)  # the refusal donated nothing
    assert len(dict(st.export(state))) == len(dict(lm.named_parameters()))


def adapted(st):
    """A module with adapters and its apply, on the host."""
    module = apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    apply, _ = st.bind(module)
    st.place(apply, "host")
    return module, apply


def test_bad_places_are_refused():
    st = strategy.get_fake_strategy()
    apply, _ = st.bind(tiny.llama())
    with pytest.raises(ValueError, match="where: expected 'device' or 'host', got 'cpu'"):
        st.place(apply, "cpu")
    with pytest.raises(ValueError, match=r"apply: expected one that st\.init or st\.bind gave, got function"):
        st.place(lambda params, pack: None, "host")


def test_on_a_cpu_nothing_is_copied():
    """Both sides are one memory there."""
    st = strategy.get_fake_strategy()
    lm = tiny.llama()
    apply, _ = st.bind(lm)
    where = [p.data_ptr() for p in lm.parameters()]
    _, peak, left = allocated(lambda: (st.place(apply, "host"), st.place(apply, "device")))
    assert peak == left == 0 and [p.data_ptr() for p in lm.parameters()] == where


def test_a_copy_of_a_state_does_not_wait_for_the_first():
    st = strategy.get_fake_strategy()
    apply, state = st.init(tiny.llama(), optim.adamw(1e-2))
    other = strategy.fork(state)
    st.place(apply, "host")
    assert len(dict(st.export(other))) > 0


def test_a_move_that_fails_is_completed_by_the_next():
    """A model half of which is back counts as on the host."""
    st, host = strategy.get_fake_strategy(), Host()
    apply, params = st.bind(tiny.llama())
    before = st.score(apply, params, tiny.experience(), 100).logp
    residence = residence_of(host.serve(apply))
    left = [3]

    def full(x):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("full")
        return x.clone()

    st.place(apply, "host")
    residence.mover = host.mover._replace(to_device=full)
    with pytest.raises(MemoryError):
        st.place(apply, "device")
    with pytest.raises(ValueError, match="got them on the host"):
        st.score(apply, params, tiny.experience(), 100)
    residence.mover = host.mover
    st.place(apply, "device")
    assert torch.equal(st.score(apply, params, tiny.experience(), 100).logp, before)


def loss_fn(out, b):
    return rft.loss.nll(out.logp)


def steps(st, apply, state, host, *, away):
    """The weights after three updates; with `away` they are on the host between any two of them."""
    for i in range(3):
        grads, _ = st.grad(state, apply, loss_fn, st.shard(tiny.experience(i), 60))
        state, _ = st.update(state, grads)
        if away:
            state = st.offload(state)
            st.place(host.serve(apply), "host")
            st.place(apply, "device")
            state = st.reload(state)
    return {n: x.clone() for n, x in st.export(state)}


def scored(st, host):
    """What a bound model scores before and after it was away, and the bytes of it."""
    apply, params = st.bind(tiny.llama(2).requires_grad_(False))
    batch = tiny.experience()
    before = st.score(apply, params, batch, 60).logp
    held = Storages(residence_of(apply).root)
    st.place(host.serve(apply), "host")
    freed = held.freed()
    refused = ""
    try:
        st.score(apply, params, batch, 60)
    except ValueError as error:
        refused = str(error)
    _, _, back = allocated(lambda: st.place(apply, "device"))
    after = st.score(apply, params, batch, 60).logp
    found = {"size": held.bytes, "freed": freed, "back": back, "refused": refused}
    return found | {"before": before, "after": after}


def on_ranks(rank, names):
    """What each backend does, from one group of processes."""
    processes = dist.begin(600.0)  # one group for all strategies, which come and go
    out = {name: on_backend(SHARDED[name]) for name in names}
    processes.close()
    return out


def on_backend(options):
    st = get_strategy(StrategyConfig(**options))
    out = scored(st, Host())
    tx = optim.adamw(1e-2)
    try:
        for away in (False, True):
            out[away] = steps(st, *st.init(tiny.llama(), tx), Host(), away=away)
    except ValueError as error:
        out["error"] = str(error)
    st.close()
    return out


@cache
def found_by(zero):
    """What the backends with or without DeepSpeed do."""
    return ranks.run(2, "test_place:on_ranks", [name for name in SHARDED if name.startswith("zero") == zero])


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_model_leaves_and_comes_back_to_the_bit(name):
    whole = Storages(tiny.llama(2)).bytes
    for out in [x[name] for x in found_by(name.startswith("zero"))]:
        assert out["refused"].startswith("apply: expected the weights of LlamaForCausalLM on the device")
        assert torch.equal(out["before"], out["after"]) and out["before"].any()
        assert out["freed"] == out["size"] and out["back"] >= out["size"], out
        share = out["size"] / whole
        assert share == pytest.approx(1 if name in ("hsdp", "zero1") else 0.5, rel=0.1)


@pytest.mark.parametrize("name", SHARDED)
def test_a_model_in_training_is_the_same_with_and_without_its_travels(name):
    for out in [x[name] for x in found_by(name.startswith("zero"))]:
        if name.startswith("zero"):
            assert out["error"].startswith(
                "apply: expected one of st.bind with zero_stage, got that of Llama"
            )
            continue
        assert "error" not in out
        assert all(torch.equal(x, out[True][n]) for n, x in out[False].items())
