"""Engines on servers give what the hf engine gives, and give it through every fault of a server."""

import gc
import threading
import time
from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import pytest
import tiny
import torch
from each_case import each
from fake_server import FAULTS, FakeServer, serving

import rft_fn as rft
from rft_fn import engine, rng, tree
from rft_fn.engine import pool
from rft_fn.engine.requests import Stop

pytestmark = pytest.mark.slow

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17]]
KEYS = [rng.fold_in(0, i) for i in range(4)]
SAMPLING = rft.Sampling(max_new=9)
KINDS = {
    "generate": ("openai", {}),
    "completions": ("openai", {"routes": ("dev",)}),
    "sglang": ("sglang", {}),
}


def fake(seed=0, **options):
    return FakeServer(tiny.llama(seed), tiny.tokenizer(), **options)


def made(kind, *fakes, timeout=20.0, batch=4, **options):
    config = engine.EngineConfig(
        type=KINDS[kind][0], servers=tuple(f.url for f in fakes), batch=batch, timeout=timeout, **options
    )
    return engine.get_engine(config, tiny.llama(), tiny.tokenizer())


def hf(seed=0):
    return engine.hf(tiny.llama(seed), tiny.tokenizer())


@cache
def expected(seed=0, *, n=1, sampling=SAMPLING):
    """What the hf engine answers to all prompts."""
    return hf(seed).generate(PROMPTS, KEYS, n=n, sampling=sampling)


def same(got, want):
    """Equal in all but the rounding of log-probs."""
    for name in ("tokens", "mask", "length", "truncated", "group"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert (got.logp - want.logp).abs().max() < 1e-5


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def quick(monkeypatch):
    """Pauses that a test can wait for."""
    monkeypatch.setattr(pool, "ROUNDS", 3)
    monkeypatch.setattr(pool.Pool.__init__, "__kwdefaults__", {"pause": 0.02})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 5, "temperature": 1.6},
        {"stop": (20, 21, 22, 23)},
        {"stop": ("1", "3=", 30)},
    ],
)
def test_rollouts_are_those_of_the_hf_engine(kind, options):
    sampling = rft.Sampling(max_new=9, **options)
    with serving(fake(**KINDS[kind][1]), fake(**KINDS[kind][1])) as fakes:
        got = made(kind, *fakes).generate(PROMPTS, KEYS, n=3, sampling=sampling)
        assert all(f.samples > 14 for f in fakes)  # those of the probe, and a part of the 12
    want = expected(n=3, sampling=sampling)
    same(got, want)
    if "stop" in options:
        assert not want.truncated.all()


def test_limits_of_rows_and_texts_and_no_prompts(kind):
    with serving(fake(**KINDS[kind][1])) as fakes:
        eng = made(kind, *fakes)
        limits = [1, 2, 9, 4]
        got = eng.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=limits)
        same(got, hf().generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=limits))
        same(eng.generate(["12="], [5], sampling=SAMPLING), hf().generate(["12="], [5], sampling=SAMPLING))
        warm = [0.5, 0, 1.5, 1]
        got = eng.generate(PROMPTS, KEYS, sampling=SAMPLING, temperature=warm)
        same(got, hf().generate(PROMPTS, KEYS, sampling=SAMPLING, temperature=warm))
        with pytest.raises(engine.BadRequest, match=r"^sampling: expected None to score .* temperatures"):
            eng.score(got, sampling=SAMPLING)
        assert eng.generate([], [], sampling=SAMPLING).tokens.shape == (0, 0)
        with pytest.raises(engine.BadRequest, match=r"^start: expected zeros for .*, got \[0, 3\]$"):
            eng.generate(PROMPTS[:2], KEYS[:2], sampling=SAMPLING, start=[0, 3])
        assert "start" not in eng.status()["supported"]
        with pytest.raises(engine.BadRequest, match=r"window of 128 tokens, got 5 \+ 124 in prompt 0"):
            eng.generate(PROMPTS, KEYS, sampling=rft.Sampling(max_new=124))
        assert eng.status()["alive"]


def test_the_window_is_the_smallest_of_the_servers():
    with serving(fake(), fake(window=16)) as fakes, pytest.raises(engine.BadRequest, match="window of 16 "):
        made("generate", *fakes).generate([[3] * 8], [1], sampling=SAMPLING)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("generate", fault) for fault in FAULTS]
    + [
        (kind, fault)
        for kind in ("completions", "sglang")
        for fault in ("die", "few", "count", "empty", "hostile")
    ],
)
def test_a_fault_in_mid_rollout_changes_no_token(kind, fault, quick):
    """One of two servers fails after some samples, for good."""
    with serving(fake(**KINDS[kind][1]), fake(**KINDS[kind][1])) as (well, bad):
        eng = made(kind, well, bad, timeout=2.0 if fault in ("hang", "trickle") else 20.0)
        bad.after = bad.samples + 2
        bad.fault = fault
        got = eng.generate(PROMPTS, KEYS, n=6, sampling=SAMPLING)
        same(got, expected(n=6))
        assert bad.samples > bad.after
        assert eng.status()["alive"]


def test_weights_of_another_version_are_not_sampled_from(quick):
    """Another trainer has loaded its own into one of the servers: they are loaded again before it is used."""
    with serving(fake(), fake()) as (well, other):
        eng = made("generate", well, other)
        eng.load(tiny.llama(5).named_parameters(), version=1)
        other.lm = tiny.llama(6)
        other.label = "someone:1"
        for _ in range(30):  # what is under way for it ends with each rollout
            got = eng.generate(PROMPTS, KEYS, n=6, sampling=SAMPLING)
            time.sleep(0.05)
            same(got, expected(5, n=6))
            if other.label == well.label:
                break
        assert other.label == well.label
        before = other.samples
        eng.generate(PROMPTS, KEYS, n=6, sampling=SAMPLING)
        assert other.samples > before


@pytest.mark.parametrize("fault", FAULTS)
def test_when_every_server_fails_the_engine_says_so_in_a_line_and_is_dead(fault, quick):
    with serving(fake(), fake()) as fakes:
        eng = made("generate", *fakes, timeout=1.0)
        for f in fakes:
            f.fault = fault
        began = time.monotonic()
        with pytest.raises(pool.ServersFailed, match=r"^engine openai: expected .* got none") as found:
            eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)
        assert "\n" not in str(found.value) and "http://127.0.0.1:" in str(found.value)
        assert time.monotonic() - began < 40
        with pytest.raises(engine.EngineDead, match=r"failed in generate .ServersFailed: engine openai"):
            eng.generate(PROMPTS, KEYS, sampling=SAMPLING)


def test_a_server_that_comes_back_empty_is_given_the_weights(kind, quick, monkeypatch):
    """The only server restarts between two rollouts, with the weights of its checkpoint."""
    monkeypatch.setattr(pool, "ROUNDS", 10)  # 20 s
    with serving(fake(**KINDS[kind][1])) as (server,):
        eng = made(kind, server)
        eng.load(tiny.llama(5).named_parameters(), version=4)
        server.end()
        server.lm = tiny.llama()
        server.label = "default"
        threading.Timer(0.1, server.begin).start()
        got = eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING)
        same(got, expected(5, n=3))
        assert set(got.version.tolist()) == {4} and server.label.endswith(":4")


def test_a_key_that_a_server_repeats_is_in_no_error(kind, monkeypatch, capfd):
    """Neither where it is refused, nor in names and weights of servers that differ."""
    monkeypatch.setenv("RFT_SERVER_KEY", "sk-4711-of-many-characters\n")
    loud = fake(key="another", **KINDS[kind][1])
    loud.refusal = '{"error": "no such key: sk-4711-of-many-characters"}'
    with (
        serving(loud),
        pytest.raises(ValueError, match=rf"^engine_servers: {loud.url}: /.*: status 401: ") as e,
    ):
        made(kind, loud)
    assert "4711" not in str(e.value) and "into the environment variable RFT_SERVER_KEY" in str(e.value)

    well, other = (fake(seed, key="sk-4711-of-many-characters", **KINDS[kind][1]) for seed in (0, 5))
    other.label = "of sk-4711-of-many-characters"
    with serving(well, other):
        if kind == "completions":  # which says no version of weights
            other.routes = ()
        with suppress(ValueError):
            made(kind, well, other)
    assert "4711" not in capfd.readouterr().err


def test_ctrl_c_does_not_wait_for_a_server_that_hangs(monkeypatch):
    with serving(fake()) as (server,):
        eng = made("generate", server, timeout=60)
        server.fault, server.after = "hang", 0
        monkeypatch.setattr(pool, "wait", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
        while any(t.name.startswith("servers") for t in threading.enumerate()):
            assert time.monotonic() - began < 5
            time.sleep(0.02)


# ------------------------------------------------------------------------------- weights


def test_weights_arrive_by_path_and_rollouts_carry_their_version(kind, tmp_path):
    with serving(fake(**KINDS[kind][1]), fake(**KINDS[kind][1])) as fakes:
        eng = made(kind, *fakes, weights=str(tmp_path))
        for version in (1, 2):
            lm = tiny.llama(version)
            delivered = eng.load(lm.named_parameters(), version=version)
            parameters = list(lm.parameters())
            assert delivered.tensors == len(parameters) and delivered.version == version
            assert delivered.bytes == sum(4 * p.numel() for p in parameters)
            got = eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING)
            want = expected(version, n=3)
            same(got, want)
            assert set(got.version.tolist()) == {version} == {eng.status()["version"]}
            # one folder, whole, and the old one gone
            (folder,) = tmp_path.iterdir()
            assert folder.name.endswith(f"-{version}")
            assert (eng.score(got) - hf(version).score(got)).abs().max() < 1e-5
        eng.close()
        assert not list(tmp_path.iterdir())
        forgotten = made(kind, *fakes, weights=str(tmp_path))
        forgotten.load(tiny.llama().named_parameters(), version=1)
        assert len(list(tmp_path.iterdir())) == 1
        del forgotten
        gc.collect()
        assert not list(tmp_path.iterdir())


def test_a_load_that_is_refused_leaves_nothing_behind(tmp_path):
    with serving(fake()) as fakes:
        for weights, line in (
            ([("model.norm.bias", torch.zeros(2))], "model.norm.bias: expected a parameter of the model"),
            (list(tiny.llama().named_parameters())[:3], "18 missing in all|17 missing in all"),
        ):
            eng = made("generate", *fakes, weights=str(tmp_path))
            with pytest.raises(ValueError, match=line):
                eng.load(weights, version=1)
            assert not list(tmp_path.iterdir()) and not eng.status()["alive"]
        assert not any(path == "/collective_rpc" and "rft_load" in str(body) for path, body in fakes[0].calls)


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        ({"error": "KeyError: 'x'"}, "weights: KeyError: 'x'"),
        ({"names": 20, "short": []}, "weights: expected 21 tensors, got 20"),
        ({"names": 21, "short": ["qkv_proj 8/12"]}, "weights: expected whole tensors, got qkv_proj 8/12"),
        ({"names": None}, "expected"),
        ("nonsense", "expected the count of tensors, got 'nonsense'"),
    ],
)
def test_a_server_that_did_not_take_all_is_not_used(problem, line, quick, tmp_path):
    """By the other it is known what the rollout has to be; alone it ends the run."""
    with serving(fake(), fake()) as (well, bad):
        eng = made("generate", well, bad, weights=str(tmp_path))
        bad.load_problem = problem
        eng.load(tiny.llama(5).named_parameters(), version=1)
        before = well.samples
        same(eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING), expected(5, n=3))
        assert well.samples - before >= 3 * len(PROMPTS)  # the bad one has no more than requests of one token
        well.load_problem = problem
        with pytest.raises(pool.ServersFailed, match=line):
            eng.load(tiny.llama(6).named_parameters(), version=2)
        assert [x.name[-2:] for x in tmp_path.iterdir()] == ["-1"]
        assert not eng.status()["alive"]


def test_a_cache_that_is_not_emptied_fails_the_load():
    with serving(fake(ignores=("cache",))) as fakes:
        eng = made("generate", *fakes)
        with pytest.raises(pool.ServersFailed, match="expected an empty cache after the load, got"):
            eng.load(tiny.llama(5).named_parameters(), version=1)


def test_a_tied_weight_is_sent_by_all_its_names():
    with serving(fake()) as (server,):
        server.lm = tiny.llama(tie_word_embeddings=False)
        eng = made("generate", server)
        eng.load(tiny.llama(5).named_parameters(), version=1)
        want = expected(5, n=3)
        same(eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING), want)


def test_a_full_disk_is_said_when_all_weights_were_read(monkeypatch, tmp_path):
    from rft_fn.engine import weight_folder

    read = []

    def weights():
        for name, x in tiny.llama().named_parameters():
            read.append(name)
            yield name, x

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_folder, "BUCKET", 1)
    monkeypatch.setattr(weight_folder.Writer, "_flush", full)
    with serving(fake()) as fakes:
        eng = made("generate", *fakes, weights=str(tmp_path))
        with pytest.raises(OSError, match="No space left on device"):
            eng.load(weights(), version=1)
    assert not list(tmp_path.iterdir())
    assert len(read) == len(list(tiny.llama().parameters()))


def test_scores_are_of_the_plain_softmax_alone(kind):
    with serving(fake(**KINDS[kind][1])) as fakes:
        eng = made(kind, *fakes)
        rollout = eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
        assert (eng.score(rollout) - rollout.logp).abs().max() < 1e-5
        with pytest.raises(engine.BadRequest, match=r"^sampling: expected temperature 1, top_p 1 "):
            eng.score(rollout, sampling=rft.Sampling(top_p=0.5))
        assert eng.score(tree.map(lambda x: x[:0], rollout)).shape[0] == 0


def test_a_temperature_that_servers_refuse_is_refused_before_they_are_asked(kind):
    with serving(fake(**KINDS[kind][1])) as fakes:
        eng = made(kind, *fakes)
        hot = rft.Sampling(temperature=5.0, max_new=2)
        if eng.status()["engine"] == "sglang":
            assert eng.generate(PROMPTS, KEYS, sampling=hot).mask.any()
            return
        with pytest.raises(engine.BadRequest, match=r"^temperature: expected at most 2 for openai, got 5$"):
            eng.generate(PROMPTS, KEYS, sampling=hot)
        assert eng.status()["alive"]


# --------------------------------------------------------------------------- what a server is


IGNORED = {
    "seed": "seed: expected the same tokens twice",
    "processed": "log-probs: expected those of the distribution",
    "temperature": "log-probs: expected two that differ by",
    "top_k": "top_k 1: expected the same token of every seed",
    "top_p": "top_p 1e-6: expected the same token of every seed",
    "stop": "stop tokens: expected",
    "return_token_ids": "expected choices with token_ids",
    "mask": "expected output_ids and meta_info",
}


@pytest.mark.parametrize("ignored", IGNORED)
def test_an_option_that_is_ignored_is_found_at_the_start(kind, ignored):
    """Ids are an option of /v1/completions; of SGLang the mask is tried, as its log-probs know no cut."""
    if {"return_token_ids": "completions", "mask": "sglang"}.get(ignored, kind) != kind:
        return
    if (kind, ignored) == ("sglang", "processed"):
        return
    with serving(fake(ignores=(ignored,), **KINDS[kind][1])) as fakes:
        with pytest.raises((ValueError, pool.ServersFailed), match=IGNORED[ignored]) as found:
            made(kind, *fakes)
        assert fakes[0].url in str(found.value)


def test_a_server_that_is_down_at_the_start_joins_later(quick):
    with serving(fake(), fake()) as (well, late):
        late.end()
        eng = made("generate", well, late)
        eng.load(tiny.llama(5).named_parameters(), version=1)
        late.begin()
        end = time.monotonic() + 60
        while late.samples <= 20 and time.monotonic() < end:
            same(eng.generate(PROMPTS, KEYS, n=6, sampling=SAMPLING), expected(5, n=6))
            time.sleep(0.05)
        assert late.label == well.label and late.samples > 20


def test_no_server_at_the_start(quick):
    server = fake()
    with serving(server):
        pass
    with pytest.raises(pool.ServersFailed, match=f"^engine openai: {server.url}: /v1/models: ConnectError"):
        made("generate", server)


def test_a_server_without_the_development_mode_only_samples(quick):
    with serving(fake(routes=("generate",))) as fakes:
        eng = made("generate", *fakes)
        assert eng.status()["supported"] == {"rows", "score"}
        want = expected()
        same(eng.generate(PROMPTS, KEYS, sampling=SAMPLING), want)
        with pytest.raises(pool.ServersFailed, match=r"/collective_rpc: status 404"):
            eng.load(tiny.llama(5).named_parameters(), version=1)


def test_the_key_is_sent(monkeypatch):
    with serving(fake(key="secret")) as fakes:
        with pytest.raises(ValueError, match=r"status 401: .*variable RFT_SERVER_KEY"):
            made("generate", *fakes)
        monkeypatch.setenv("RFT_SERVER_KEY", "secret")
        made("generate", *fakes).generate(PROMPTS, KEYS, sampling=SAMPLING)


def test_other_servers_may_have_a_key_of_their_own(monkeypatch):
    monkeypatch.setenv("RFT_SERVER_KEY", "of the policy's servers")
    with serving(fake(key="secret")) as fakes:
        with pytest.raises(ValueError, match=r"status 401: .*variable JUDGE_KEY"):
            made("generate", *fakes, key_env="JUDGE_KEY")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        made("generate", *fakes, key_env="JUDGE_KEY").generate(PROMPTS, KEYS, sampling=SAMPLING)


def test_sleep_is_not_supported_on_a_cpu_and_confirmed_elsewhere(kind):
    with serving(fake(**KINDS[kind][1])) as (server,):
        eng = made(kind, server)
        eng.sleep()
        assert "sleep" not in eng.status()["supported"] and not eng.status()["asleep"] and not server.asleep
    with serving(fake(device="cuda", **KINDS[kind][1])) as (server,):
        eng = made(kind, server)
        assert "sleep" in eng.status()["supported"]
        eng.sleep()
        assert eng.status()["asleep"] and server.asleep
        eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
        assert not server.asleep and not eng.status()["asleep"]
        stays = made(kind, server, sleep=False)
        stays.sleep()
        assert not server.asleep and "sleep" not in stays.status()["supported"]


def test_a_server_that_does_not_sleep_is_found_out():
    """vLLM answers 200 in any case."""
    with serving(fake(device="cuda", ignores=("sleep",))) as fakes:
        eng = made("generate", *fakes)
        with pytest.raises(pool.ServersFailed, match="expected is_sleeping True, got"):
            eng.sleep()


@each(
    ("options", "line"),
    [
        ({"type": "openai"}, r"^engine_servers: expected at least one address .* for openai, got none$"),
        ({"type": "sglang", "servers": ("a:1",)}, "^engine_servers: expected addresses like .*got 'a:1'"),
        ({"type": "openai", "servers": ("http://a:1",) * 2}, "^engine_servers: expected each address once"),
        ({"type": "openai", "servers": ("http://a:1",), "tp_size": 2}, "^engine_tp_size, engine_mem_util"),
        (
            {"type": "hf", "servers": ("http://a:1",)},
            "^engine_servers: expected none for hf, got http://a:1;",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_asked(options, line):
    with pytest.raises(ValueError, match=line):
        engine.check_config(engine.EngineConfig(**options))


@each("kind", ["openai", "sglang", "hf", "vllm"])
@each("server", ["http://me:S1@h:1", "http://S1@h:1", "http://h:1/?api_key=S1"])
def test_an_address_has_no_secret_which_a_run_would_write_down(kind, server):
    """Of engines that have no servers too: the options are written all the same."""
    config = engine.EngineConfig(type=kind, servers=("http://h:2", server), key_env="MINE")
    with pytest.raises(ValueError, match=r"^engine_servers: expected an address without a secret") as error:
        engine.check_config(config)
    assert str(error.value).endswith("a server's key belongs into the environment variable MINE")
    assert "S1" not in str(error.value)


def test_options_come_from_the_command_line():
    import argparse

    from rft_fn import strategy
    from rft_fn.strategy.config import add_arguments

    words = (
        "--engine_type openai --engine_servers http://a:1 http://b:2 --engine_timeout 7 --engine_weights w"
    )
    args = add_arguments(argparse.ArgumentParser()).parse_args(words.split())
    config = engine.config_of(strategy.StrategyConfig.from_args(args))
    assert config.servers == ("http://a:1", "http://b:2") and config.timeout == 7 and config.weights == "w"


def test_sglang_takes_one_cut_at_a_time():
    with serving(fake()) as fakes:
        eng = made("sglang", *fakes)
        with pytest.raises(engine.BadRequest, match=r"^top_p, top_k: expected one of them for sglang"):
            eng.generate(PROMPTS, KEYS, sampling=rft.Sampling(top_p=0.9, top_k=4, max_new=3))
        assert eng.status()["alive"]


def test_the_first_end_is_that_of_asking_token_by_token():
    g = torch.Generator().manual_seed(0)
    stop = Stop(tiny.tokenizer(), frozenset({1, 7}), ("12", "3=", 9))
    ended = 0
    for _ in range(200):
        tokens = torch.randint(2, 24, (12,), generator=g).tolist()
        want = next((t for t in range(1, 13) if stop.ends(tokens[:t])), None)
        assert stop.first_end(tokens) == want
        ended += want is not None
    assert 20 < ended < 180


def test_media_are_refused_before_anything_is_asked(quick):
    """Servers get tokens alone; the engine lives on."""
    with serving(fake()) as (one,):
        eng = made("generate", one)
        seen = SimpleNamespace(ids=PROMPTS[0], media={"pixel_values": torch.zeros(2, 3)})
        before = one.samples
        message = r"got media \(pixel_values\) in prompt 1; openai servers get tokens alone"
        with pytest.raises(engine.BadRequest, match=message):
            eng.generate([PROMPTS[1], seen], KEYS[:2], sampling=SAMPLING)
        assert one.samples == before
        same(eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING), expected(n=2))


def test_servers_announce_ids_without_text(kind):
    wide = tiny.llama(vocab_size=2 * len(tiny.tokenizer()))
    with serving(FakeServer(wide, tiny.tokenizer(), **KINDS[kind][1])) as fakes:
        config = engine.EngineConfig(type=KINDS[kind][0], servers=tuple(f.url for f in fakes))
        eng = engine.get_engine(config, wide, tiny.tokenizer())
        with pytest.warns(UserWarning, match="engine: about .* are ids that the tokenizer has no text for"):
            eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING)
