"""A weight sync: the engine samples from the trained weights, and whatever got lost on the way is seen."""

import copy
import re
import traceback
from functools import partial
from importlib import import_module

import pytest
import ranks
import tiny
import torch
from each_case import each

import rft_fn as rft
from rft_fn import collect, engine, optim, sync, tree
from rft_fn.engine.hf import engine as hf_engine
from rft_fn.model import finite, lora, lora_merged
from rft_fn.run import options
from rft_fn.run.rollout_engine import start_engine
from rft_fn.sync.changed_weights import weights_read_as
from rft_fn.sync.push import check_tensor, manifest_of
from rft_fn.sync.wrong_tensor import uniform
from rft_fn.types.engine import Delivered


def trained(seed=5):
    """(strategy, the state of a model that is not the engine's)."""
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(tiny.llama(seed), optim.adamw(0.1))
    return st, state


def test_an_engine_samples_from_what_was_pushed():
    st, state = trained()
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    delivered = sync.push(st, state, eng, version=9)
    params = dict(tiny.llama(5).named_parameters())
    assert delivered[:2] == (len(params), 4 * sum(p.numel() for p in params.values()))
    assert delivered.version == eng.status()["version"] == 9
    sampling = rft.Sampling(max_new=6)
    got = eng.generate([[3, 4]], [7], n=4, sampling=sampling)
    want = engine.hf(tiny.llama(5), tiny.tokenizer()).generate([[3, 4]], [7], n=4, sampling=sampling)
    assert torch.equal(got.tokens, want.tokens) and set(got.version.tolist()) == {9}


LENT = {"n": 2, "sampling": rft.Sampling(max_new=6)}


def stepped(st, state, size=1.0):
    """Return the state after an update by gradients of this size."""
    state, _ = st.update(state, tree.map(lambda p: torch.full_like(p, size), state.params))
    return state


def core_of(eng):
    return eng.generate.__self__.core


def test_an_engine_on_the_cpu_samples_from_the_trained_tensors_where_they_are_lent():
    """No memory of its own, and to the bit what an engine with copies samples."""
    st, state = trained()
    lent, own = (engine.hf(tiny.llama(), tiny.tokenizer()) for _ in range(2))
    for version in range(1, 4):
        assert (
            sync.push(st, state, lent, version=version, lend=True)[:2]
            == sync.push(st, state, own, version=version)[:2]
        )
        mine = {p.data_ptr() for p in state.params.values()}
        assert {p.data_ptr() for p in core_of(lent).lm.parameters()} == mine
        assert not {p.data_ptr() for p in core_of(own).lm.parameters()} & mine
        got, want = (eng.generate(PROMPTS, [1, 2, 3], **LENT) for eng in (lent, own))
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.logp, want.logp)
        assert torch.equal(lent.score(want), own.score(want))
        state = stepped(st, state)


def test_weights_that_were_lent_are_pushed_again_before_anything_is_sampled():
    st, state = trained()
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    sync.push(st, state, eng, version=3, lend=True)
    rollout = eng.generate(PROMPTS, [1, 2, 3], **LENT)
    state = stepped(st, state)
    for call in (lambda: eng.generate(PROMPTS, [1, 2, 3], **LENT), lambda: eng.score(rollout)):
        with pytest.raises(engine.BadRequest, match="lent as of version 3, got updated ones"):
            call()
    sync.push(st, state, eng, version=4, lend=True)
    assert set(eng.generate(PROMPTS, [1, 2, 3], **LENT).version.tolist()) == {4}


@pytest.mark.parametrize("way", ["load", "push"])
def test_weights_that_a_loop_loads_by_itself_are_copies(way):
    """It may sample between an update and the next load, as a population does that takes over weights."""
    st, state = trained()
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    if way == "load":
        eng.load(st.export(state), version=1)
    else:
        sync.push(st, state, eng, version=1)
    before = eng.generate(PROMPTS, [1, 2, 3], **LENT)
    stepped(st, state)
    after = eng.generate(PROMPTS, [1, 2, 3], **LENT)
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.logp, after.logp)


@pytest.mark.parametrize("load", ["another", "noise"])
def test_weights_that_were_lent_are_not_written_to(load, plain):
    """By a load of others: under another name of a tied tensor too, and by a canary."""
    st, state, eng = started()
    before = {name: p.detach().clone() for name, p in state.params.items()}
    sync.push(st, state, eng, version=1, lend=True)
    if load == "another":
        others = dict(tiny.llama(7).named_parameters())
        others["lm_head.weight"] = others.pop(EMBED)
        eng.load(others.items(), version=2)
    else:
        sync.canary(st, state, eng, plain, PROMPTS, version=2)
    assert all(torch.equal(before[name], p) for name, p in state.params.items())
    mine = {p.data_ptr() for p in state.params.values()}
    assert not {p.data_ptr() for p in core_of(eng).lm.parameters()} & mine
    sync.canary(st, state, eng, plain, PROMPTS, version=3, lend=True)
    assert {p.data_ptr() for p in core_of(eng).lm.parameters()} == mine


@pytest.mark.parametrize("case", ["types", "adapters", "frozen"])
def test_an_engine_keeps_what_it_cannot_be_lent(case):
    """Weights of another type, with merged adapters, and those that nothing trains."""
    st = rft.strategy.get_fake_strategy()
    lm, own = tiny.llama(5), tiny.llama(5)
    if case == "types":
        own = own.bfloat16()
    if case == "adapters":
        lm = rft.model.apply_lora_configuration(lm, rank=2, alpha=4)
    if case == "frozen":
        for name, p in lm.named_parameters():
            p.requires_grad_("mlp" in name)
    _, state = st.init(lm, optim.adamw(0.1))
    state = stepped(st, state)
    lent, want = (engine.hf(copy.deepcopy(own), tiny.tokenizer()) for _ in range(2))
    sync.push(st, state, lent, version=1, lend=True)
    sync.push(st, state, want, version=1)
    got = lent.generate(PROMPTS, [1, 2, 3], **LENT)
    assert torch.equal(got.logp, want.generate(PROMPTS, [1, 2, 3], **LENT).logp)
    mine = {p.data_ptr() for p in state.params.values()}
    found = [name for name, p in core_of(lent).lm.named_parameters() if p.data_ptr() in mine]
    assert found == [name for name in state.params if case == "frozen"]


class Taking:
    """The load of an engine that reports what it is told to report."""

    def __init__(self, change):
        self.change = change

    def status(self):
        return {"version": 0}

    def load(self, weights, *, version):
        found = list(weights)
        size = sum(x.numel() * x.element_size() for _, x in found)
        return self.change(Delivered(len(found), size, 0.1, version))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d._replace(tensors=d.tensors - 1),
            r"sync: expected the engine to take \d+ tensors .* got \d+",
        ),
        (
            lambda d: d._replace(bytes=d.bytes // 2),
            r"sync: expected the engine to take \d+ tensors .* got \d+",
        ),
        (lambda d: d._replace(version=2), "sync: expected the engine to be at version 3, got 2"),
    ],
)
def test_an_engine_that_took_less_than_was_sent_is_refused(change, message):
    st, state = trained()
    with pytest.raises(ValueError, match=message):
        sync.push(st, state, Taking(change), version=3)


def test_a_weight_is_sent_once():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="weights: a: expected each name once, got it twice"):
        list(sync.CheckedWeights([("a", x), ("a", x)]))


def test_what_is_frozen_is_known_to_the_engine():
    """The count does not hide which weights the trainer leaves out."""
    lm = tiny.llama()
    for name, p in lm.named_parameters():
        p.requires_grad_("mlp" in name)
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(lm, optim.adamw(0.1))
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    assert sync.push(st, state, eng, version=1).tensors == len(state.params) < len(list(lm.parameters()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_are_checked_a_bucket_at_a_time_and_the_first_bad_one_is_named(bad, monkeypatch):
    """As on a GPU, which a check of each would wait for; the same tensors in the same order."""
    st, state, _ = started()
    one_by_one = list(st.export(state))
    checks = []
    whole = finite.require_all_finite
    monkeypatch.setattr(
        lora_merged, "require_all_finite", lambda what, pairs: checks.append(whole(what, pairs))
    )
    monkeypatch.setitem(lora.BUCKET, "cpu", 20_000)
    together = list(st.export(state))
    assert [name for name, _ in together] == [name for name, _ in one_by_one]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one_by_one, together))
    assert 1 < len(checks) < len(together) / 2
    state.params[NORM].data[3] = bad
    state.params[LAST].data[3] = torch.nan
    with pytest.raises(ValueError, match=f"^weights: {NORM}: expected finite numbers, got NaN or inf"):
        list(st.export(state))


def started(relative=1e-4):
    """(strategy, the state of an engine's model after an update of this relative size, that engine)."""
    lm = tiny.llama()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for p in lm.parameters():
            p.data += relative * p.data.square().mean().sqrt() * torch.randn(p.shape)
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(lm, optim.adamw(0.1))
    return st, state, engine.hf(tiny.llama(), tiny.tokenizer())


EMBED, LAST = "model.embed_tokens.weight", "model.norm.weight"
NORM, Q, DOWN = (
    "model.layers.1.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
)


def without(name):
    return lambda pairs: [(n, x) for n, x in pairs if n != name]


def changed(name, change):
    return lambda pairs: [(n, change(x)) if n == name else (n, x) for n, x in pairs]


def with_nan(x):
    return torch.where(torch.arange(x.numel()).view_as(x) == 3, torch.nan, x)


def dies(pairs):
    yield from list(pairs)[:4]
    raise ConnectionError("the other process is gone")


def swapped_layers(pairs):
    other = {"0": "1", "1": "0"}
    for name, x in pairs:
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = other[parts[2]]
        yield ".".join(parts), x


def faulty(st, fault):
    return st._replace(export=lambda state: iter(fault(list(st.export(state)))))


FAULTS = [
    (without(NORM), NORM, "expected it among the weights that are sent"),
    (without(Q), Q, "expected it among the weights that are sent"),
    (changed(DOWN, lambda x: x.bfloat16()), DOWN, "expected torch.float32 or wider, got torch.bfloat16"),
    (changed(DOWN, lambda x: x.to(torch.int8)), DOWN, "expected torch.float32 or wider, got torch.int8"),
    (lambda pairs: [*pairs, pairs[2]], "", "expected each name once, got it twice"),
    (changed(NORM, with_nan), NORM, "expected finite numbers, got NaN or inf"),
    (changed(Q, lambda x: x[:-1]), Q, r"expected \[32, 32\], got \[31, 32\]"),
    (
        lambda pairs: [*pairs, ("model.extra", pairs[0][1])],
        "model.extra",
        "expected a parameter of the model",
    ),
]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mT if x.dim() > 1 else x,
        torch.flatten,
        lambda x: x[None],
        lambda x: x.unflatten(-1, (2, -1)),
    ],
)
def test_the_manifest_compares_every_dimension(change):
    """As many elements are not the same weight: one that is transposed is another."""
    _, state = trained()
    manifest = manifest_of(state)
    for name, x in state.params.items():
        check_tensor(manifest, name, x.detach())
        other = change(x.detach())
        if other.shape == x.shape:  # a vector, or a square
            continue
        want, got = re.escape(str(list(x.shape))), re.escape(str(list(other.shape)))
        with pytest.raises(sync.ManifestError, match=f"^weights: {name}: expected {want}, got {got}$"):
            check_tensor(manifest, name, other)
    assert any(x.dim() == 2 and x.shape[0] != x.shape[1] for x in state.params.values())


@each(("fault", "name", "message"), FAULTS)
def test_the_manifest_names_what_is_wrong_with_a_tensor(fault, name, message):
    """And nothing is ever sampled from an engine that got some of the weights."""
    st, state, eng = started()
    with pytest.raises(sync.ManifestError, match=rf"^weights: {name}.*{message}"):
        sync.push(faulty(st, fault), state, eng, version=1)
    assert not eng.status()["alive"] and eng.status()["version"] == 0
    sync.push(st, state, engine.hf(tiny.llama(), tiny.tokenizer()), version=1)


@pytest.mark.parametrize(("fault", "name", "message"), [FAULTS[0], FAULTS[1], FAULTS[4], FAULTS[6]])
def test_the_engine_alone_counts_what_arrives(fault, name, message):
    """A source without a manifest meets the second guard."""
    st, state, eng = started()
    with pytest.raises(ValueError, match=f"^weights: {name}"):
        eng.load(fault(list(st.export(state))), version=1)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_alone_has_changed_arrives(tied):
    """Also as the head that is tied to it: trainer and engine agree to 1e-4 where they did not before."""
    lm = tiny.llama()
    if tied:
        lm.lm_head.weight = lm.model.embed_tokens.weight
    own = copy.deepcopy(lm)
    st = rft.strategy.get_fake_strategy()
    apply, state = st.init(lm, optim.adamw(0.1))
    eng = engine.hf(own, tiny.tokenizer())
    with torch.no_grad():
        embed = state.params[EMBED]
        embed += 0.3 * embed.square().mean().sqrt() * torch.randn(embed.shape)
    rollout = eng.generate(PROMPTS, [1, 2, 3], n=4, sampling=rft.Sampling(max_new=6))
    trainer = st.score(apply, state.params, rollout, 4096).logp
    assert (trainer - rollout.logp).abs().max() > 1e-2
    sync.push(st, state, eng, version=1)
    assert (trainer - eng.score(rollout)).abs().max() < 1e-4


def test_an_iterator_that_dies_once_is_followed_by_a_new_engine():
    """The run goes on with the weights of the same push."""
    st, state, _ = started()
    deaths = [dies, list]

    def export(state):
        return iter(deaths.pop(0)(list(st.export(state))))

    made = []

    def build():
        made.append(engine.hf(tiny.llama(), tiny.tokenizer()))
        return made[-1]

    cfg = options.Reinforcement(model="tiny", canary=False)
    eng, push = start_engine(cfg, st._replace(export=export), None, "tiny", build=build)
    push(state, version=7)
    assert len(made) == 2 and eng.status()["alive"] and eng.status()["version"] == 7
    want = engine.hf(tiny.llama(), tiny.tokenizer())
    sync.push(st, state, want, version=7)
    how = {"n": 2, "sampling": rft.Sampling(max_new=6)}
    assert torch.equal(
        eng.generate(PROMPTS, [1, 2, 3], **how).logp, want.generate(PROMPTS, [1, 2, 3], **how).logp
    )


def test_one_supervision_is_between_a_run_and_its_engine(monkeypatch):
    """Every file that a call passes through is one that has to be read to follow it."""
    found = {}
    for name in ("sample", "load"):
        real = getattr(hf_engine._InProcess, name)

        def noted(self, *args, name=name, real=real, **options):
            files = [frame.filename for frame in traceback.extract_stack()[:-1]]
            ours = [file.split("rft_fn/")[-1] for file in files if "rft_fn/" in file]
            found[name] = [file for file in ours if not file.startswith("strategy")]
            return real(self, *args, **options)

        monkeypatch.setattr(hf_engine._InProcess, name, noted)
    st, state, eng = started()
    own, push = start_engine(
        options.Reinforcement(model="tiny", canary=False, rebuilds=3), st, None, "tiny", build=lambda: eng
    )
    push(state, version=1)
    collect.gather_and_generate(own, st, PROMPTS, [1, 2, 3], n=1, sampling=rft.Sampling(max_new=2))
    assert found["load"] == ["run/rollout_engine.py", "sync/push.py", "engine/lifetime.py"]
    assert found["sample"] == ["engine/global_batch.py", "engine/lifetime.py"]


def test_an_iterator_that_dies_leaves_a_dead_engine():
    st, state, eng = started()
    with pytest.raises(ConnectionError):
        sync.push(faulty(st, dies), state, eng, version=1)
    with pytest.raises(engine.EngineDead, match="failed in load"):
        eng.generate([[3, 4]], [7], sampling=rft.Sampling(max_new=2))


PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


@pytest.fixture
def plain(monkeypatch):
    """`model.load` gives the engine's model, as a plain copy."""
    monkeypatch.setattr(rft.model, "load", lambda name, **how: tiny.llama())


class Forgetful:
    """An engine that takes all weights but does not use one of them, and says nothing."""

    def __init__(self, eng, change):
        self.inner = eng
        self.change = change
        self.status, self.wake, self.generate = eng.status, eng.wake, eng.generate

    def load(self, weights, *, version):
        found = list(weights)
        size = sum(x.numel() * x.element_size() for _, x in found)
        kept = self.change(found)
        self.inner.load(kept, version=version)
        return Delivered(len(found), size, 0.1, version)


def kept_at(name):
    """The engine's own old tensor in place of the one that was sent."""
    old = dict(tiny.llama().named_parameters())[name].detach()
    return changed(name, lambda x: old)


def kept_once(name):
    """Every load but the first leaves the tensor of that first load."""
    first = {}

    def change(pairs):
        kept = first.setdefault(name, dict(pairs)[name].clone())
        return [(n, kept if n == name else x) for n, x in pairs]

    return change


def as_bfloat16(pairs):
    return [(n, x.bfloat16().float() if n == Q else x) for n, x in pairs]


KEPT = {name: kept_at(name) for name in (EMBED, NORM, Q, DOWN, LAST)}
STAY = [*((fault, name, 1e-4) for name, fault in KEPT.items()), (kept_once(NORM), NORM, 1e-4)]
STAY += [(kept_at(Q), Q, 0.5), (kept_at(LAST), LAST, 0.5)]


@pytest.mark.parametrize(("fault", "name", "update"), STAY)
def test_the_canary_names_a_tensor_that_an_engine_did_not_take(plain, fault, name, update):
    """At an update of 1e-4, whose effect is noise, and at a large one, as when a long run is continued."""
    st, state, eng = started(update)
    with pytest.raises(sync.CanaryError, match=rf"^canary: {name}: expected .*: it did not arrive, or"):
        sync.canary(st, state, Forgetful(eng, fault), "tiny", PROMPTS, version=1)


def test_the_canary_names_a_layer_that_is_in_the_place_of_another(plain):
    st, state, eng = started()
    with pytest.raises(sync.CanaryError, match=r"^canary: model\.layers\.[01]\.") as caught:
        sync.canary(st, state, Forgetful(eng, swapped_layers), "tiny", PROMPTS, version=1)
    assert "is in a wrong place" in str(caught.value)


def test_the_canary_names_a_tensor_that_an_engine_rounds(plain):
    """Where that is all that engine and trainer differ by, and more is not allowed."""
    st, state, eng = started()
    with pytest.raises(sync.CanaryError, match=rf"^canary: {Q}: "):
        sync.canary(st, state, Forgetful(eng, as_bfloat16), "tiny", PROMPTS, version=1, max_gap=2e-6)


def test_a_fault_that_no_weights_are_free_of_has_no_name(plain):
    st, state, eng = started()

    class Shifted(Forgetful):
        def __init__(self, eng):
            super().__init__(eng, list)
            self.generate = lambda *args, **how: moved(eng.generate(*args, **how))

    def moved(rollout):
        return rft.tree.replace(rollout, logp=rollout.logp - 0.1 * rollout.mask)

    with pytest.raises(sync.CanaryError, match=r"^canary: expected .*: some weight did not arrive"):
        sync.canary(st, state, Shifted(eng), "tiny", PROMPTS, version=1)


@each(
    ("gaps", "passes"),
    [
        ([0.09, 0.03, 0.05, 0.03], True),
        ([0.09, 0.03, 0.09, 0.03], False),
        ([0.17, 0.03], False),  # more than chance
        ([0.05, 0.09], False),  # no noise, no chance
    ],
)
def test_a_gap_under_noise_that_may_be_chance_is_drawn_again(plain, monkeypatch, gaps, passes):
    """Twice the limit at most, and only once. The key is of the noise that decided."""
    canary = import_module("rft_fn.sync.canary")
    asked = iter(gaps)
    monkeypatch.setattr(canary.Sides, "gap", lambda self, change: next(asked))
    monkeypatch.setattr(canary, "locate", lambda *args, **options: "")
    st, state, eng = started()
    call = partial(sync.canary, st, state, eng, "tiny", PROMPTS, version=1, max_gap=0.08, key=5)
    if passes:
        probe = call()
        assert (probe.noisy, probe.floor) == (0.05, 0.03) and probe.key == rft.rng.fold_in(5, "again")
    else:
        with pytest.raises(sync.CanaryError):
            call()
    assert next(asked, None) is None


def test_a_canary_with_nan_fails(plain):
    """In either of its two loads."""
    st, state, eng = started()

    class Blind(Forgetful):
        calls = 0

        def load(self, weights, *, version):
            self.calls += 1
            self.generate = eng.generate
            if self.calls == self.bad:
                self.generate = lambda *args, **how: nowhere(eng.generate(*args, **how))
            return super().load(weights, version=version)

    def nowhere(rollout):
        return rft.tree.replace(rollout, logp=rollout.logp * torch.nan)

    for bad in (1, 2):
        blind = Blind(eng, list)
        blind.bad = bad
        with pytest.raises(sync.CanaryError, match=r"by nan nats per token|, nan without"):
            sync.canary(st, state, blind, "tiny", PROMPTS, version=1)


def test_a_canary_that_passes_loads_twice(plain):
    st, state, eng = started()
    loads = []

    class Counted(Forgetful):
        def load(self, weights, *, version):
            loads.append(version)
            return super().load(weights, version=version)

    sync.canary(st, state, Counted(eng, list), "tiny", PROMPTS, version=1)
    assert len(loads) == 2


BOUND = {
    "tied": (lambda: tiny.llama(tie_word_embeddings=True), {}),
    "untied": (lambda: tiny.llama(tie_word_embeddings=False), {}),
    "checkpointed": (lambda: rft.model.load(tiny.llama(), gradient_checkpointing=True), {}),
    "adapters": (lambda: with_adapters(), {}),
    "logits": (tiny.llama, {"fused_linear_logprob": False}),
}


def with_adapters():
    """Adapters that change their layers."""
    lm = lora.apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if ".lora_B." in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return lm


@pytest.mark.parametrize("name", BOUND)
def test_a_trainer_that_reads_changed_weights_is_a_copy_that_has_them(name):
    """As on a GPU, which holds no second model; its own weights and their classes are as before."""
    make, options = BOUND[name]
    lm = make()
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(**options))
    warm = rft.Sampling(temperature=2.0)
    apply, state = st.init(lm, optim.adamw(0.1), sampling=warm)
    before = [type(x) for x in lm.modules()], [p.clone() for p in lm.parameters()]
    change = partial(sync.with_noise, key=3)
    sent = {n: change(n, x) for n, x in st.export(state)}
    plain = tiny.llama(tie_word_embeddings=lm.config.tie_word_embeddings)
    plain.load_state_dict(dict(plain.state_dict()) | sent)
    exp = tiny.experience()
    params = rft.model.bind(plain)
    want = rft.strategy.get_fake_strategy().score(*params, exp, 4096).logp
    with weights_read_as(state.residence.root, state.residence.module, change, set(sent)):
        got = st.score(apply, state.params, exp, 4096).logp
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    after = [type(x) for x in lm.modules()], [p.clone() for p in lm.parameters()]
    assert after[0] == before[0] and all(torch.equal(a, b) for a, b in zip(after[1], before[1]))
    assert (st.score(apply, state.params, exp, 4096).logp - want).abs().max() > 0.01


def test_a_canary_on_a_gpu_loads_no_model(plain, monkeypatch):
    """It has the numbers of a canary with a copy, and names a tensor that was not taken."""
    lm = tiny.llama()
    st = rft.strategy.get_fake_strategy()
    apply, state = st.init(lm, optim.adamw(0.1), sampling=rft.Sampling(temperature=2.0))
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    with_copy = sync.canary(st, state, eng, "tiny", PROMPTS, version=1, key=5)
    monkeypatch.setattr(import_module("rft_fn.sync.changed_weights"), "COPIED", ())
    with pytest.raises(sync.CanaryError, match=f"^canary: {Q}: "):
        sync.canary(st, state, Forgetful(eng, kept_once(Q)), "tiny", PROMPTS, version=1)
    monkeypatch.setattr(rft.model, "load", None)
    probe = sync.canary(st, state, eng, "tiny", PROMPTS, version=1, key=5)
    assert probe.noisy == pytest.approx(with_copy.noisy, rel=0.5) and probe.noisy < 1e-5
    assert probe.floor == pytest.approx(with_copy.floor, rel=0.5) and apply is not None


@pytest.mark.parametrize(("dtype", "bf16", "limit"), [("bfloat16", False, 0.08), ("float32", True, 0.08),
                                                        ("float32", False, 0.01)])  # fmt: skip
def test_the_types_of_a_trainer_that_makes_the_noise_limit_the_gap(dtype, bf16, limit, monkeypatch):
    """Of an engine that does not tell what it computes in."""
    module = import_module("rft_fn.sync.changed_weights")
    monkeypatch.setattr(module, "COPIED", ())
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(bf16=bf16))
    apply, state = st.init(tiny.llama(dtype=getattr(torch, dtype)), optim.adamw(0.1))
    silent = Forgetful(engine.hf(tiny.llama(), tiny.tokenizer()), list)
    silent.status = dict
    sides = module.Sides(st, state, silent, "tiny", PROMPTS, version=1, max_new=1)
    assert sides.trainer is apply and import_module("rft_fn.sync.canary")._by_rounding(sides) == limit


def test_uniform_weights_are_the_same_by_shape_and_survive_rounding():
    x = torch.randn(6, 16)
    found = uniform("a", x)
    assert torch.equal(found, uniform("b", -x)) and set(found.unique().tolist()) == {-0.25, 0.25}
    assert torch.equal(found, found.bfloat16().float())
    assert torch.equal(uniform("a", x[0]), torch.ones(16))


def test_the_canary_passes_a_good_engine_and_leaves_it_with_the_true_weights(plain):
    st, state, eng = started()
    before = [x.clone() for _, x in st.export(state)]
    probe = sync.canary(st, state, eng, "tiny", PROMPTS, version=3)
    assert probe.noisy < 1e-5 and probe.floor < 1e-5 and probe.seconds > 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, st.export(state)))
    sampling = rft.Sampling(max_new=6)
    want = engine.hf(tiny.llama(), tiny.tokenizer())
    sync.push(st, state, want, version=3)
    got = eng.generate(PROMPTS, [1, 2, 3], n=2, sampling=sampling)
    assert torch.equal(got.logp, want.generate(PROMPTS, [1, 2, 3], n=2, sampling=sampling).logp)
    assert set(got.version.tolist()) == {3}


def test_noise_is_new_in_every_canary_unless_a_key_is_given(plain):
    st, state, eng = started()
    keys = {sync.canary(st, state, eng, "tiny", PROMPTS[:1], version=1, max_new=1).key for _ in range(3)}
    assert len(keys) == 3
    assert sync.canary(st, state, eng, "tiny", PROMPTS[:1], version=1, max_new=1, key=5).key == 5


def test_noise_is_5_percent_of_a_tensor_and_a_tensor_of_zeros_gets_some():
    x = 3 * torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    noise = sync.with_noise("a", x, 1) - x
    assert noise.std() == pytest.approx(0.15, rel=0.02) and abs(noise.mean()) < 0.01
    assert torch.equal(sync.with_noise("a", x, 1), x + noise)
    assert not torch.equal(sync.with_noise("b", x, 1), x + noise)
    assert sync.with_noise("a", torch.zeros(1000), 1).std() == pytest.approx(0.05, rel=0.1)


def test_the_engine_of_this_process_gets_its_own_type():
    st, state = trained()
    narrow = engine.hf(tiny.llama(dtype=torch.bfloat16), tiny.tokenizer())
    assert sync.push(st, state, narrow, version=1).bytes == 2 * sum(
        p.numel() for p in tiny.llama().parameters()
    )
    mixed = tiny.llama(dtype=torch.bfloat16)
    mixed.model.norm.float()
    whole = engine.hf(mixed, tiny.tokenizer())
    assert sync.push(st, state, whole, version=1).bytes == 4 * sum(p.numel() for p in mixed.parameters())


def test_an_engine_gets_its_type_and_all_names_of_a_tied_weight():
    st, state, eng = started()
    seen = {}

    def load(weights, *, version):
        seen.update(weights)
        return Delivered(len(seen), sum(x.numel() * x.element_size() for x in seen.values()), 0.1, version)

    def status():
        return {**eng.status(), "dtype": torch.bfloat16, "tied": True}

    delivered = sync.push(st, state, eng._replace(load=load, status=status), version=1)
    assert torch.equal(seen["lm_head.weight"], seen["model.embed_tokens.weight"])
    assert set(seen) == {*state.params, "lm_head.weight"}
    assert all(x.dtype == torch.bfloat16 for x in seen.values())
    assert delivered.bytes == 2 * sum(x.numel() for x in seen.values())


# ---------- several processes


def on_two_ranks(rank, _):
    """Under FSDP2: a canary that passes, one that a bad engine fails, and an engine that breaks off."""
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(fsdp=True))
    _, state = st.init(rft.model.load("tiny"), optim.adamw(0.1))
    eng = engine.get_engine(None, "tiny")
    passed = sync.canary(st, state, eng, "tiny", PROMPTS, version=1)
    told = [max(passed.noisy, passed.floor), passed.key]

    # the sharded trainer itself makes the noise, as on GPUs
    module = import_module("rft_fn.sync.changed_weights")
    module.COPIED = ()
    passed = sync.canary(st, state, eng, "tiny", PROMPTS, version=1)
    told[0] = max(told[0], passed.noisy, passed.floor)
    module.COPIED = ("cpu",)

    # one weight of one rank's engine stays behind
    engine_of_rank = eng
    if rank == 1:
        engine_of_rank = Forgetful(eng, kept_back("model.layers.1.input_layernorm.weight", eng))
    try:
        sync.canary(st, state, engine_of_rank, "tiny", PROMPTS, version=2)
    except sync.CanaryError as error:
        told.append(str(error))

    # one rank's engine fails in mid-load: the other rank's gets all of its weights
    class Breaks(Forgetful):
        def load(self, weights, *, version):
            next(weights)
            raise ConnectionError("gone")

    try:
        taken = sync.push(st, state, Breaks(eng, None) if rank == 1 else eng, version=3)
        told.append(taken.version)
    except ConnectionError as error:
        told.append(str(error))
    st.close()
    return told


def kept_back(name, eng):
    """The tensor that the engine was built with, in place of the one that is sent."""
    old = dict(rft.model.load("tiny").named_parameters())[name].detach().clone()
    return changed(name, lambda x: old)


def test_the_guards_hold_under_fsdp2():
    first, second = ranks.run(2, "test_sync:on_two_ranks", None)
    for told in (first, second):
        assert told[0] < 1e-5 and told[1] == first[1]
        assert told[2].startswith("canary: model.layers.1.input_layernorm.weight: expected the engine to")
    assert first[3] == 3 and second[3] == "gone"
