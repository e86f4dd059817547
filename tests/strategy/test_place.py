"""Weights that leave the device between the phases of a run, and come back to the bit."""

import gc
from functools import cache

import pytest
import ranks
import tiny
import torch
from places import Host, Storages, allocated
from torch import nn

import rft_fn as rft
from rft_fn import dist, engine, model, optim, packing, strategy, sync, tree
from rft_fn.model import apply_lora_configuration, residence
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.strategy.placing import residence_of

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


# ---------- with offload_models: each call brings what it needs


PLACED = StrategyConfig(offload_models=True)


@pytest.fixture
def host(monkeypatch):
    """A host apart from the device, for every model."""
    host = Host()
    monkeypatch.setattr("rft_fn.model.residence.mover_of", lambda device: host.mover)
    return host


@pytest.fixture
def moves(monkeypatch):
    """(part, place) of each move, in order; the names of the parts are those that a test gives."""
    moves = Moves()
    for method, name in (("move", "{}"), ("move_opt", "{} opt")):
        monkeypatch.setattr(
            residence.Residence, method, moves.noting(getattr(residence.Residence, method), name)
        )
    return moves


class Moves(list):
    def __init__(self):
        super().__init__()
        self.names = {}

    def call(self, name, apply):
        self.names[residence_of(apply)] = name
        return apply

    def noting(self, method, name):
        def noted(residence, where):
            before = residence.on_host, residence.opt_on_host
            method(residence, where)
            if (residence.on_host, residence.opt_on_host) != before and residence in self.names:
                self.append((name.format(self.names[residence]), where))

        return noted

    def take(self):
        """The moves since the last call, and none from now on."""
        taken = list(self)
        self.clear()
        return taken


def value_loss(out, b):
    return rft.loss.value_clip(out.value, torch.zeros_like(out.value), b.adv)


def fresh():
    """The tiny model, in memory of the allocator as everything that comes back to the device."""
    return model.load("tiny")._apply(torch.clone)


def two_models(config, moves=None):
    """What a small script of PPO has after two steps, and the moves of each phase of the second."""
    st = get_strategy(config)
    called = Moves() if moves is None else moves
    apply, actor = st.init(fresh(), optim.adamw(1e-2))
    called.call("actor", apply)
    value_of, critic = st.init(model.Critic(fresh()), optim.adamw(1e-2))
    called.call("critic", value_of)
    frozen, initial = st.bind(fresh())
    called.call("initial", frozen)
    eng = engine.get_engine(engine.config_of(st.config), "tiny")
    sampling = rft.Sampling(max_new=4)
    sync.push(st, actor, eng, version=0)
    phases = {}
    for step in range(2):
        called.take()
        prompts = [[5, 6, 7], [8, 9]]
        rollout = rft.collect.gather_and_generate(eng, st, prompts, [step, 7], n=2, sampling=sampling)
        phases["generate"] = called.take()
        ref_logp = st.score(frozen, initial, rollout, 64).logp
        logp = st.score(apply, actor.params, rollout, 64).logp
        value = st.score(value_of, critic.params, rollout, 64, fields=("value",)).value
        phases["score"] = called.take()
        adv = (logp - ref_logp + 0.1 * torch.arange(4.0)[:, None] - value) * rollout.mask
        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        packs = st.shard(exp, 64)
        grads, _ = st.grad(critic, value_of, value_loss, packs)
        critic, _ = st.update(critic, grads)
        phases["critic"] = called.take()
        grads, _ = st.grad(actor, apply, loss_fn, packs)
        phases["grad"] = called.take()
        actor, _ = st.update(actor, grads)
        phases["update"] = called.take()
        sync.push(st, actor, eng, version=step + 1)
        phases["sync"] = called.take()
    found = {"logp": logp, "ref_logp": ref_logp, "value": value, "actor": tree.leaves(actor.opt)}
    return found | {"critic": tree.leaves(critic.opt), "weights": dict(st.export(actor))}, phases


def test_two_models_that_learn_are_on_the_device_only_in_their_phases(host, moves):
    """No call of the script moves anything, and its numbers are those without the option."""
    want, still = two_models(StrategyConfig())
    assert not any(still.values()) and not host.bytes
    got, phases = two_models(PLACED, moves)
    assert all(same(want[name], got[name]) for name in want)
    assert phases == {
        "generate": [],  # all are on the host since the push
        "score": [("initial", "device"), ("initial", "host"), ("actor", "device"), ("critic", "device")],
        "critic": [("critic opt", "device")],
        "grad": [],
        "update": [("actor opt", "device")],
        "sync": [
            ("actor opt", "host"),
            ("actor", "host"),
            ("critic opt", "host"),
            ("critic", "host"),
            ("actor", "device"),  # to be sent
            ("actor", "host"),
        ],
    }


def same(a, b):
    """Whether two trees have the same numbers."""
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )


def untied(seed=0):
    """A model with each weight once, so that bytes can be counted."""
    return tiny.llama(seed, tie_word_embeddings=False)


def test_an_engine_gets_all_memory_of_models_and_optimizers(host):
    """Also from one that is out of its phases by accident: no state is told to go."""
    st = get_strategy(PLACED)
    apply, state = st.init(untied(), optim.chain(optim.adamw(1e-2), optim.ema(0.9)))
    packs = st.shard(tiny.experience(), 100)
    state, _ = st.update(state, st.grad(state, apply, loss_fn, packs)[0])
    held, moments = Storages(residence_of(apply).root), Storages(Leaves(state.opt))
    assert moments.bytes > 2.9 * held.bytes  # m, v and the average
    st.make_room()
    assert held.freed() == held.bytes and moments.freed() == moments.bytes
    assert host.bytes == held.bytes + moments.bytes
    grads, _, back = allocated(lambda: st.grad(state, apply, loss_fn, packs)[0])
    assert held.bytes <= back < 2.5 * held.bytes  # the weights and their gradients, without an optimizer
    st.update(state, grads)
    st.make_room()
    assert host.bytes == 2 * (held.bytes + moments.bytes)


class Leaves:
    """The tensors of a tree, as a module has them."""

    def __init__(self, x):
        self.found = [x for x in tree.leaves(x) if isinstance(x, torch.Tensor)]

    def parameters(self):
        return self.found

    def buffers(self):
        return []


def test_an_optimizer_that_works_on_the_host_stays_there(host, moves):
    st = get_strategy(StrategyConfig(offload_models=True, adam_offload=True))
    apply, state = st.init(untied(), optim.adamw(1e-2))
    where = [x.data_ptr() for x in Leaves(state.opt).found]
    st.make_room()
    assert [x.data_ptr() for x in Leaves(state.opt).found] == where
    assert not residence_of(apply).opt_on_host  # so a fork leaves it there too
    assert host.bytes == Storages(residence_of(apply).root).bytes
    st.update(state, st.grad(state, apply, loss_fn, st.shard(tiny.experience(), 100))[0])


def test_a_model_that_only_scores_rests_on_the_host(host):
    """Also where a score fails; where a script has put it on the device it stays there."""
    st = get_strategy(PLACED)
    apply, params = st.bind(tiny.llama())
    assert residence_of(apply).on_host
    logp = st.score(apply, params, tiny.experience(), 100).logp
    assert residence_of(apply).on_host and logp.any()
    with pytest.raises(ValueError, match=r"TokenOut\.value"):
        st.score(apply, params, tiny.experience(), 100, fields=("value",))
    assert residence_of(apply).on_host
    packs = st.shard(tiny.experience(), 100)
    with pytest.raises(ValueError, match="got them on the host"):
        model.score(apply, params, packs)  # knows no strategy
    st.place(apply, "device")
    assert torch.equal(st.score(apply, params, tiny.experience(), 100).logp, logp)
    assert not residence_of(apply).on_host and model.score(apply, params, packs)


def test_a_state_on_the_host_is_exported_saved_and_copied(host, tmp_path):
    st = get_strategy(PLACED)
    apply, state = st.init(tiny.llama(), optim.adamw(1e-2))
    packs = st.shard(tiny.experience(), 100)
    state, _ = st.update(state, st.grad(state, apply, loss_fn, packs)[0])
    want = tree.map(torch.clone, state.params)
    st.make_room()
    st.save(tmp_path / "0", state)
    assert residence_of(apply).on_host  # files are written from either side

    back = []
    residence_of(apply).mover = host.mover._replace(to_device=lambda x: back.append(x) or x.clone())
    other = strategy.fork(state)
    assert len(back) == len(Leaves([state.params, state.opt]).found)  # a copy is on the device
    assert residence_of(apply).on_host
    a, _ = st.grad(other, apply, loss_fn, packs)
    b, _ = st.grad(state, apply, loss_fn, packs)
    assert same(a, b)
    st.make_room()
    assert same(tree.Named(st.export(state)), want) and not residence_of(apply).on_host
    st.make_room()
    restored, _ = st.restore(tmp_path / "0", state)
    assert same(restored.params, want)
    st.update(restored, st.grad(restored, apply, loss_fn, packs)[0])


def test_models_that_nobody_has_any_more_are_forgotten(host):
    st = get_strategy(PLACED)
    kept, _ = st.init(untied(), optim.adamw(1e-2))
    st.init(untied(1), optim.adamw(1e-2))
    gc.collect()
    st.make_room()
    assert host.bytes < 3.1 * Storages(residence_of(kept).root).bytes  # of one: the weights and two moments


# ---------- models in parts


def initial_and_values(st):
    """Whether `st.score` gives what `model.score` and a gather of its rows give: (before LoRA, a critic)."""
    exp = tiny.experience()
    rollout = tiny.rollout(tree.replace(exp, old_logp=torch.zeros(exp.mask.shape)))
    packs = st.shard(rft.experience(rollout, adv=rollout.logp, w=rft.weight.seq_mean(rollout.mask)), 60)

    def together(found):
        return st.gather(packing.unpack(found, packs, rollout.logp)[None]).sum(0)

    lm = apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    apply, state = st.init(lm, optim.adamw(1e-2))
    initial = model.without_adapters(lm, apply)
    want = together(model.score(initial, state.params, packs))
    st.make_room()
    logp = st.score(initial, state.params, rollout, 60).logp
    changed = not torch.equal(logp, st.score(apply, state.params, rollout, 60).logp)
    critic = model.Critic(tiny.llama(2))
    nn.init.normal_(critic.head.weight)
    value_of, critic = st.init(critic, optim.adamw(1e-2))
    value = together(model.values(value_of, critic.params, packs))
    st.make_room()
    got = st.score(value_of, critic.params, rollout, 60, fields=("value",)).value
    return changed and torch.equal(logp, want), bool(value.any()) and torch.equal(got, value)


@pytest.mark.parametrize("config", [StrategyConfig(), PLACED, StrategyConfig(bf16=True)])
def test_scores_of_the_initial_model_and_of_a_critic_are_those_of_their_packs(config, host):
    assert initial_and_values(get_strategy(config)) == (True, True)


def test_a_function_without_adapters_gives_no_gradient():
    st = strategy.get_fake_strategy()
    lm = apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    apply, state = st.init(lm, optim.adamw(1e-2), sampling=rft.Sampling(temperature=0.5))
    initial = model.without_adapters(lm, apply)
    with pytest.raises(ValueError, match=r"^apply: expected the one that init gave .*, got plain"):
        st.grad(state, initial, loss_fn, st.shard(tiny.experience(), 100))
    drawn = tree.replace(tiny.experience(), sampling=rft.Sampling(temperature=0.7))
    with pytest.raises(ValueError, match="sampling: expected a model bound with that of the rollout"):
        st.score(initial, state.params, drawn, 100)


def loss_fn(out, b):
    return rft.loss.nll(out.logp)


def steps_of_their_own(options):
    """(the weights after three updates with an engine between any two, bytes that went to the host)."""
    host = Host()
    residence.mover_of = lambda device: host.mover
    st = get_strategy(StrategyConfig(**options, offload_models=True))
    apply, state = st.init(tiny.llama(), optim.adamw(1e-2))
    for i in range(3):
        grads, _ = st.grad(state, apply, loss_fn, st.shard(tiny.experience(i), 60))
        state, _ = st.update(state, grads)
        st.make_room()
    return {n: x.clone() for n, x in st.export(state)}, host.bytes


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
    out["equal"] = initial_and_values(st)
    if "zero_stage" not in options:
        out["alone"], out["moved"] = steps_of_their_own(options)
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
        assert all(torch.equal(x, out["alone"][n]) for n, x in out[False].items())
        assert out["moved"] > 8 * out["size"]  # three times the weights and the two moments


@pytest.mark.parametrize("name", SHARDED)
def test_scores_of_processes_are_those_of_their_packs(name):
    for out in [x[name] for x in found_by(name.startswith("zero"))]:
        assert out["equal"] == (True, True)
