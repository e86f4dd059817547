"""Adapters that come alone: what they are, what engines make of them, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from each_case import each
from fake_server import FakeServer, serving
from safetensors.torch import load_file

import rft_fn as rft
from rft_fn import collect, engine, model, rng, sync
from rft_fn.engine import adapters_alone, pool
from rft_fn.engine.adapters_alone import AdapterLoad
from rft_fn.engine.pool import ServersFailed
from rft_fn.engine.vllm.adapter_slots import AdapterSlots
from rft_fn.engine.weight_folder import manifest
from rft_fn.engine.worker import _room_for_adapters
from rft_fn.model import lora, lora_alone
from rft_fn.sync.canary import CanaryError

pytest.importorskip("peft")

PROMPTS = [[3, 4, 5, 6, 7], [8, 9]]
KEYS = [rng.fold_in(0, i) for i in range(2)]
SAMPLING = rft.Sampling(max_new=5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a small model."""
    folder = str(tmp_path_factory.mktemp("base") / "model")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def shaken(module, seed=0, size=0.05):
    """The module with adapters that do something."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if ".lora_" in name:
                p.add_(size * torch.randn(p.shape, generator=g))
    return module


def trainer(rank=4, seed=0, **options):
    """(strategy, state) of the small model with adapters."""
    module = shaken(model.apply_lora_configuration(tiny.llama(), rank, 16, **options), seed)
    st = rft.strategy.get_strategy()
    _, state = st.init(module, rft.optim.adamw(1e-2))
    return st, state


def alone(st, state):
    """The matrices of a state, by name."""
    return dict(lora_alone.AdaptersAlone(st.export(state)))


def patterns(**options):
    """A module by a config of peft's own."""
    from peft import LoraConfig

    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]} | options)
    return lora.wrapped(tiny.llama(), config, 0)


def twice():
    module = patterns()
    module.add_adapter("second", module.peft_config["default"].__class__(r=2, target_modules=["q_proj"]))
    module.base_model.set_adapter(["default", "second"])
    return module


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=48, n_positions=64)
    return model.apply_lora_configuration(GPT2LMHeadModel(config), 3, 5)


MADE = {
    "plain": lambda: patterns(),
    "rslora": lambda: patterns(use_rslora=True),
    "ranks": lambda: patterns(rank_pattern={"layers.1.*q_proj": 7, "down_proj": 1}),
    "alphas": lambda: patterns(alpha_pattern={"down_proj": 0.3, "layers.0.*q_proj": 11}),
    "several": twice,
    "transposed": gpt2,
    "towers": lambda: model.apply_lora_configuration(model.load("tiny-vl"), 2, 4, target_modules="towers"),
}


@each("name", list(MADE))
def test_the_matrices_of_every_adapter_add_up_to_the_merged_weights(name):
    module = shaken(MADE[name]())
    st = rft.strategy.get_strategy()
    _, state = st.init(module, rft.optim.adamw(1e-2))
    merged = dict(st.export(state))
    export = lora_alone.AdaptersAlone(st.export(state))
    own = {lora_alone.plain_name(module, key): x for key, x in module.named_parameters()}
    assert export.frozen == {key for key in own if ".lora_" not in key}
    tensors = dict(export)
    assert {key: x.shape for key, x in tensors.items()} == lora_alone.shapes(module)
    made = adapters_alone.pairs(tensors)
    assert {f"{path}.weight" for path in made} == merged.keys()
    for path, (a, b) in made.items():
        weight = own[f"{path}.weight"].detach()
        found = lora_alone.add_to(weight, a, b, transposed=name == "transposed")
        assert not torch.equal(found, weight)
        torch.testing.assert_close(found, merged[f"{path}.weight"], atol=1e-6, rtol=1e-5)


def test_a_folder_of_adapters_is_one_that_peft_and_we_read(base, tmp_path):
    st, state = trainer()
    tensors = alone(st, state)
    adapters_alone.write(tmp_path / "new", tensors)
    assert [x.name for x in tmp_path.iterdir()] == ["new"]
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4
    again = model.load(_on(tmp_path / "new", base))
    again_state = rft.strategy.get_strategy().init(again, rft.optim.adamw(1e-2))[1]
    found, want = (dict(st.export(x)) for x in (again_state, state))
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, atol=1e-6, rtol=1e-5)


def _on(folder, base):
    """The folder, with the name of its base model."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))
    return folder


def test_what_else_is_trained_sends_whole_weights_and_says_so(base):
    module = shaken(model.apply_lora_configuration(tiny.llama(), 4, 16))
    module.base_model.model.model.norm.weight.requires_grad_()
    st = rft.strategy.get_strategy()
    _, state = st.init(module, rft.optim.adamw(1e-2))
    eng = made(base)
    with pytest.warns(UserWarning, match=r"got model\.norm\.weight, which is trained beside the adapters"):
        delivered = sync.push(st, state, eng, version=1)
    assert delivered.tensors == len(dict(st.export(state))) and not eng.status()["adapters"]
    assert samples(eng, st, state)


def made(base, **options):
    """An engine of hf that takes adapters alone."""
    config = engine.EngineConfig(adapters="alone", lora_rank=4, **options)
    return engine.get_engine(config, base, tiny.tokenizer())


def samples(eng, st, state):
    """Whether an engine samples as one with the merged weights does."""
    want = engine.hf(tiny.llama(), tiny.tokenizer())
    want.load(st.export(state), version=1)
    want = want.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)
    got = eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)
    return torch.equal(got.tokens, want.tokens) and bool((got.logp - want.logp).abs().max() < 1e-5)


def test_hf_merges_them_into_the_weights_of_its_files_each_time(base):
    eng = made(base)
    sizes = set()
    for version in (1, 2, 3):
        st, state = trainer(seed=version)
        delivered = sync.push(st, state, eng, version=version)
        sizes.add(delivered[:2])
        assert samples(eng, st, state) and eng.status()["version"] == version
    tensors = alone(st, state)
    assert sizes == {(len(tensors), sum(x.nbytes for x in tensors.values()))}

    # whole weights may bring more than adapted layers, so none go on them
    eng.load(st.export(state), version=4)
    assert samples(eng, st, state) and not eng.status()["adapters"]
    with pytest.raises(ValueError, match=r"^weights: expected whole ones \(engine_adapters\), got adapters"):
        eng.load(lora_alone.AdaptersAlone(st.export(state)), version=5)


@each(
    ("options", "takes"),
    [
        ({"adapters": "alone"}, True),
        ({"adapters": "auto"}, False),  # in the trainer's process a push is the same merge, and a copy
        ({"adapters": "merged"}, False),
        ({"adapters": "alone", "lora_rank": 0}, False),
    ],
)
def test_hf_takes_them_where_it_is_told_to(options, takes, base):
    config = engine.EngineConfig(**{"lora_rank": 4} | options)
    assert engine.get_engine(config, base, tiny.tokenizer()).status()["adapters"] is takes


def test_adapters_alone_need_the_files_of_their_base_model():
    config = engine.EngineConfig(adapters="alone", lora_rank=4)
    with pytest.raises(ValueError, match=r"^engine_adapters alone: .* of a whole base model, got a module"):
        engine.get_engine(config, tiny.llama(), tiny.tokenizer())


@pytest.mark.slow
def test_hf_in_another_process_takes_them_by_itself_also_ahead(base):
    config = engine.EngineConfig(process=True, lora_rank=4, threads=1)
    eng = engine.get_engine(config, base, tiny.tokenizer())
    st, state = trainer()
    try:
        assert eng.status()["adapters"] and samples_after_push(eng, st, state)
        worker = collect.EngineWorker(lambda: eng)
        st, state = trainer(seed=7)
        assert sync.push(st, state, worker.engine(), version=2).tensors == len(alone(st, state))
        assert samples(worker.engine(), st, state)
        saved = type(worker.newest).restored(worker.newest.saved())  # as a checkpoint keeps them
        assert saved.adapters and saved.frozen == worker.newest.frozen
    finally:
        eng.close()


def samples_after_push(eng, st, state):
    sync.push(st, state, eng, version=1)
    return samples(eng, st, state)


# ------------------------------------------------------------------- the canary


def losing(eng, name):
    """An engine that gets zeros in place of a matrix."""

    def load(weights, *, version):
        class Without:
            adapters, frozen = weights.adapters, weights.frozen

            def __iter__(self):
                return ((key, x * 0 if key == name else x) for key, x in weights)

        return eng.load(Without(), version=version)

    return eng._replace(load=load)


@each("copied", [True, False])
def test_the_canary_passes_adapters_and_names_a_matrix_that_is_lost(base, copied, monkeypatch):
    """Also where the trainer makes the noise as it reads its weights, as on a GPU."""
    monkeypatch.setattr("rft_fn.sync.changed_weights.COPIED", {"cpu"} if copied else ())
    st, state = trainer()
    eng = made(base)
    apply, state = st.init(state.module, rft.optim.adamw(1e-2))
    probe = sync.canary(st, state, eng, base, PROMPTS, version=2)
    assert probe.noisy < 1e-5 and samples(eng, st, state) and eng.status()["adapters"]
    lost = "model.layers.1.mlp.up_proj.lora_B.weight"
    with pytest.raises(CanaryError, match=re.escape(lost)):
        sync.canary(st, state, losing(eng, lost), base, PROMPTS, version=3)
    assert apply is not None


def test_noise_on_a_second_matrix_is_as_on_ones_whatever_it_has_learned():
    x = torch.full((200, 200), 1e-6)
    assert (sync.with_noise("a.lora_B.weight", x, 1) - x).std() > 0.04
    assert (sync.with_noise("a.lora_A.weight", x, 1) - x).std() < 1e-6


# ------------------------------------------------------------------- what is refused


@each(
    ("change", "line"),
    [
        (lambda x: [*x, x[0]], "q_proj.lora_A.weight: expected each name once, got it twice"),
        (
            lambda x: [("model.norm.lora_A.weight", x[0][1])],
            "expected adapters of a layer of",
        ),
        (
            lambda x: [("model.layers.9.x.lora_A.weight", x[0][1])],
            "expected adapters of a layer of",
        ),
        (
            lambda x: [("model.norm.weight", torch.ones(32))],
            "expected adapters of a layer of",
        ),
        (
            lambda x: [(x[0][0], x[0][1][:, :5])],
            r"a matrix of \[32, 32\] and some rank, got \[4, 5\]",
        ),
        (lambda x: [x[0], (x[1][0], x[1][1][:, :3])], r"and the rank of the others, 4, got \[32, 3\]"),
        (
            lambda x: [x[0]],
            "q_proj.lora_B.weight: expected it among the adapters, got 1 matrices",
        ),
        (lambda x: [], "weights: adapters: expected it among the adapters, got 0 matrices"),
    ],
)
def test_matrices_that_do_not_fit_the_model_are_refused_by_name(change, line):
    st, state = trainer()
    load = AdapterLoad(manifest(tiny.llama()))
    with pytest.raises(ValueError, match=line):
        for name, x in change(list(alone(st, state).items())):
            load.take(name, x)
        load.finish(1)


@each(("size", "shows"), [(0.0, False), (1e-9, False), (1e-3, True)])
def test_only_adapters_that_change_something_must_show(size, shows):
    module = model.apply_lora_configuration(tiny.llama(), 4, 16)
    st = rft.strategy.get_strategy()
    _, state = st.init(module, rft.optim.adamw(1e-2))
    with torch.no_grad():
        for name, p in module.named_parameters():
            if ".lora_B" in name:
                p.fill_(size)
    assert adapters_alone.may_show(alone(st, state)) is shows


@each(
    ("workers", "refused"),
    [([[]], False), ([["a", "b"], ["b"]], True), ([["a"], ["b"]], False), ([], False)],
)
def test_a_layer_is_without_place_where_no_worker_has_it(workers, refused):
    if refused:
        with pytest.raises(ValueError, match=r"^weights: b: expected a place for its adapters in vLLM"):
            adapters_alone.check_places(workers)
    else:
        adapters_alone.check_places(workers)


# ------------------------------------------------------------------- servers


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(pool, "ROUNDS", 2)
    monkeypatch.setattr(pool.Pool.__init__, "__kwdefaults__", {"pause": 0.02})


ROOM = {"rank": 8, "slots": 2, "head": False}


def fake(**options):
    return FakeServer(tiny.llama(), tiny.tokenizer(), **({"room": ROOM, "loads_adapters": True} | options))


def served(*fakes, kind="openai", **options):
    urls = tuple(f.url for f in fakes)
    options = {"lora_rank": 4} | options
    config = engine.EngineConfig(type=kind, servers=urls, batch=4, timeout=60.0, **options)
    return engine.get_engine(config, tiny.llama(), tiny.tokenizer())


def bodies(server, path):
    return [body for at, body in server.calls if at == path]


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@each("route", [("generate", "dev"), ("dev",)])
def test_servers_get_a_new_folder_and_a_new_name_each_time_and_forget_the_last(route, tmp_path):
    with serving(fake(routes=route), fake(routes=route)) as fakes:
        eng = served(*fakes, weights=str(tmp_path))
        assert eng.status()["adapters"] and "load" in eng.status()["supported"]
        base = [{name: p.clone() for name, p in f.lm.named_parameters()} for f in fakes]
        for version in (1, 2, 2):  # the same version too, as a canary sends it
            st, state = trainer(seed=version)
            delivered = sync.push(st, state, eng, version=version)
            assert delivered[:2] == (28, sum(x.nbytes for x in alone(st, state).values()))
            assert samples(eng, st, state)
            rollout = eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
            assert set(rollout.version.tolist()) == {version}
            assert (eng.score(rollout) - rollout.logp).abs().max() < 1e-5
        for f, weights in zip(fakes, base, strict=True):
            loads, unloads = bodies(f, LOAD)[1:], bodies(f, UNLOAD)
            assert len({x["lora_name"] for x in loads}) == len({x["lora_path"] for x in loads}) == 3
            assert [x["lora_name"] for x in unloads] == [x["lora_name"] for x in loads[:-1]]
            assert len(f.adapters) == 1 and f.label == "default"
            assert all(torch.equal(weights[name], p) for name, p in f.lm.named_parameters())
        assert len(list(tmp_path.iterdir())) == 1  # the newest
        eng.close()
        assert not list(tmp_path.iterdir())


@each(
    ("options", "config", "takes"),
    [
        ({}, {}, True),
        ({}, {"adapters": "merged"}, False),
        ({}, {"lora_rank": 0}, False),
        ({"room": None}, {}, False),
        ({"loads_adapters": False}, {}, False),
        ({"extension": False, "transfer": "rft"}, {}, False),  # it does not tell its largest rank
        ({"extension": False, "transfer": "rft"}, {"adapters": "alone"}, True),
    ],
)
def test_auto_goes_by_what_every_server_tells(options, config, takes, capsys):
    with serving(fake(), fake(**options)) as fakes:
        assert served(*fakes, **config).status()["adapters"] is takes
    assert "warning" not in capsys.readouterr().err


@each(
    ("room", "label", "line"),
    [
        (ROOM | {"rank": 2}, "default", r"expected room for adapters of rank 4, got 2 \(--max-lora-rank\)"),
        (ROOM | {"slots": 1}, "default", r"expected room for 2 adapters, got 1 \(--max-loras\)"),
        (
            ROOM,
            "other:3",
            r"base model's own weights below the adapters, got 'other:3'",
        ),
        (None, "default", r"expected a server that takes adapters, started with VLLM_.*, got one without"),
        (ROOM | {"head": True}, "default", r"lora_target_modules: expected the names of layers, got none"),
    ],
)
def test_a_server_without_room_is_refused_at_the_start(room, label, line, capsys):
    server = fake(room=room)
    server.label = label
    with serving(server):
        with pytest.raises(ValueError, match=line):
            served(server, adapters="alone")
        if room is not None and not room["head"]:  # by itself it says so, and goes on with whole weights
            assert served(server).status()["adapters"] is False
            assert re.search(line, capsys.readouterr().err)


@each(
    ("base", "room", "line"),
    [
        ("int8", ROOM | {"base": "int8"}, ""),
        ("int8", ROOM, ""),  # an older extension, which does not tell: the canary does
        ("int8", ROOM | {"base": ""}, r"a base in int8 \(--quantization torchao, .*got full precision"),
        ("int8", ROOM | {"base": "fp8"}, r"a base in int8 \(--quantization torchao, .*got fp8"),
        ("int8", ROOM | {"base": "int8 in 2 parts"}, r"a base in int8 .*, got int8 in 2 parts"),
        ("", ROOM | {"base": "fp8"}, ""),  # as the whole model of such a server would be
    ],
)
def test_servers_tell_the_precision_of_their_base(base, room, line):
    with serving(fake(room=room)) as (server,):
        if line:
            with pytest.raises(ValueError, match=line):
                served(server, adapters="alone", base=base)
            return
        eng = served(server, adapters="alone", base=base)
        assert eng.status()["base"] == base
        if base:
            st, state = trainer()
            with pytest.raises(ValueError, match="an engine with a base in int8, got a base in full"):
                sync.push(st, state, eng, version=1)
            with pytest.raises(engine.BadRequest, match="adapters alone on a base in int8, got whole"):
                eng.load(tiny.llama().named_parameters(), version=1)


@each(("kind", "how"), [("hf", "alone"), ("ray", "alone"), ("openai", "auto"), ("vllm", "merged")])
def test_a_base_in_low_precision_is_for_engines_that_get_adapters_alone(kind, how):
    servers = ("http://localhost:1",) if kind == "openai" else ()
    config = engine.EngineConfig(type=kind, adapters=how, lora_rank=4, base="int8", servers=servers)
    with pytest.raises(ValueError, match=f"^engine: a base in int8: .* alone, got {kind} and {how}"):
        engine.check_config(config)


def test_a_base_in_int8_is_the_trainers_where_no_row_is_cut():
    """A worker that has a part of each row finds the scale of that part."""
    config = engine.EngineConfig(type="vllm", adapters="alone", lora_rank=4, base="int8", tp_size=2)
    with pytest.raises(ValueError, match=r"^engine_tp_size: expected 1 for a base in int8, got 2: each rank"):
        engine.check_config(config)
    lora = SimpleNamespace(max_lora_rank=8, max_cpu_loras=2)
    scheme = SimpleNamespace(torchao_config=type("Int8WeightOnlyConfig", (), {"group_size": None})())
    places = SimpleNamespace(_adapter_manager=SimpleNamespace(modules={"layers.0.qkv_proj": None}))
    for workers, base in ((1, "int8"), (2, "int8 in 2 parts (--tensor-parallel-size)")):
        parallel = SimpleNamespace(tensor_parallel_size=workers)
        held = SimpleNamespace(
            model_runner=SimpleNamespace(lora_manager=places),
            vllm_config=SimpleNamespace(quant_config=scheme, parallel_config=parallel),
        )
        assert _room_for_adapters(lora, held) == {"rank": 8, "slots": 2, "head": False, "base": base}


def test_servers_whose_requests_would_not_know_new_adapters_are_refused_at_the_start(tmp_path):
    from test_house import load_script

    grpo = load_script("grpo")
    servers = rft.strategy.StrategyConfig(
        engine_type="openai", engine_servers=("http://localhost:1",), engine_adapters="alone"
    )
    options = {"lora_rank": 4, "ahead": 1, "in_flight": True, "strategy": servers, "out": str(tmp_path / "r")}
    with pytest.raises(
        ValueError, match=r"^engine_adapters alone: expected servers that one process samples"
    ):
        grpo.main(grpo.Config(**options))


def test_towers_keep_a_base_in_full_precision():
    config = engine.EngineConfig(type="vllm", adapters="alone", lora_rank=4, base="int8")
    with pytest.raises(ValueError, match=r"^engine_adapters alone: .* model of text for a base in int8"):
        AdapterSlots(config, "tiny-vl").check_text()
    AdapterSlots(replace(config, base=""), "tiny-vl").check_text()


@pytest.mark.usefixtures("quick")
@each(
    ("options", "line"),
    [
        (
            {"ignores": ("adapter",)},
            r"version 3: expected adapters rft-\S+-3-1 to change log-probs",
        ),
        ({"load_problem": "rank 16 is greater than max_lora_rank 8"}, "status 500: .*rank 16 is greater"),
        ({"without_place": [["visual.x"]]}, r"weights: visual\.x: expected a place for its adapters in vLLM"),
    ],
)
def test_a_server_that_does_not_take_adapters_is_named_with_the_version(options, line, capsys):
    st, state = trainer()
    with serving(fake()) as (server,):
        eng = served(server)
        for name, value in options.items():
            setattr(server, name, value)
        with pytest.raises(ServersFailed, match=f"{re.escape(server.url)}: .*{line}") as found:
            sync.push(st, state, eng, version=3)
        assert "\n" not in str(found.value)
    assert ("to change log-probs" in capsys.readouterr().err) is ("ignores" in options)


def test_adapters_that_are_zero_need_not_show():
    module = model.apply_lora_configuration(tiny.llama(), 4, 16)
    st = rft.strategy.get_strategy()
    _, state = st.init(module, rft.optim.adamw(1e-2))
    with serving(fake()) as (server,):
        eng = served(server)
        sync.push(st, state, eng, version=0)
        assert samples(eng, st, state)


def test_one_of_two_that_ignores_adapters_is_left_out_and_the_run_goes_on(capsys):
    st, state = trainer()
    with serving(fake(), fake()) as (one, other):
        eng = served(one, other)
        other.ignores = ("adapter",)
        sync.push(st, state, eng, version=1)
        assert samples(eng, st, state)
        said = capsys.readouterr().err
        assert other.url in said and "they have not arrived" in said and said.count("\n") == 1


def test_a_server_that_was_started_again_gets_the_adapters_before_it_is_asked():
    st, state = trainer()
    with serving(fake()) as (server,):
        eng = served(server)
        sync.push(st, state, eng, version=1)
        server.end()
        server.adapters.clear()
        server.begin()
        assert samples(eng, st, state) and len(server.adapters) == 1


def test_whole_weights_end_what_adapters_were_for():
    st, state = trainer()
    with serving(fake(transfer="rft")) as (server,):
        eng = served(server)
        sync.push(st, state, eng, version=1)
        eng.load(st.export(state), version=2)
        assert samples(eng, st, state) and not eng.status()["adapters"]
        assert sync.push(st, state, eng, version=3).tensors == 14
        assert samples(eng, st, state)
        with pytest.raises(ValueError, match=r"^weights: expected whole ones \(engine_adapters\)"):
            eng.load(lora_alone.AdaptersAlone(st.export(state)), version=4)


def test_the_folder_of_servers_holds_what_the_adapters_are(tmp_path):
    st, state = trainer()
    with serving(fake()) as (server,):
        eng = served(server, weights=str(tmp_path))
        sync.push(st, state, eng, version=1)
        (body,) = bodies(server, LOAD)[1:]
        found = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        want = {f"base_model.model.{name}": x for name, x in alone(st, state).items()}
        assert found.keys() == want.keys() and all(torch.equal(found[k], x) for k, x in want.items())


def test_sglang_gets_them_by_its_own_routes(tmp_path):
    with serving(fake()) as (server,):
        assert not served(server, kind="sglang").status()["adapters"]  # only where it is asked for
        eng = served(server, kind="sglang", adapters="alone", weights=str(tmp_path))
        assert eng.status()["adapters"]
        for version in (1, 2):
            st, state = trainer(seed=version)
            sync.push(st, state, eng, version=version)
            assert samples(eng, st, state)
        assert len(server.adapters) == 1 and len(list(tmp_path.iterdir())) == 1
