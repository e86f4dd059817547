"""Speculative decoding: configs under which samples are not of the model, and what a run tells of drafts."""

import json
from types import SimpleNamespace

import pytest
import tiny
from each_case import each
from fake_server import FakeServer, serving

from rft_fn import collect, engine, strategy
from rft_fn.engine import speculative
from rft_fn.types.engine import Drafts

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
SYNTHETIC = {"method": "eagle3", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}


def option(**fields):
    return json.dumps({**NGRAM, **fields})


@each(
    ("text", "message"),
    [
        ("nowhere.json", "expected JSON or a file of it, got 'nowhere.json'"),
        ("{method", "expected JSON, got '{method'"),
        ("{}", "expected a method, or the model that drafts, got none"),
        (option(num_speculative_tokens=0), r"num_speculative_tokens: expected .*, got 0"),
        (option(num_speculative_tokens="4"), r"num_speculative_tokens: expected .*, got '4'"),
        (
            option(method="extract_hidden_states"),
            "method: expected one whose drafts are verified .*, got 'ext",
        ),
        (
            option(method="custom_class"),
            "method: expected one whose drafts are verified .*, got 'custom_class'",
        ),
        (option(method=["ngram"]), "method: expected one whose drafts are verified"),
        (json.dumps(SYNTHETIC), "rejection_sample_method: expected standard or block, .*, got 'synthetic'"),
        (option(rejection_sample_method="typical"), "rejection_sample_method: .*, got 'typical'"),
        (option(enable_adaptive_verification=True), "enable_adaptive_verification: expected False, got True"),
    ],
)
def test_drafts_that_change_the_law_are_refused_before_any_model(text, message):
    config = engine.EngineConfig(type="vllm", speculative=text)
    with pytest.raises(ValueError, match=rf"^engine_speculative: {message}") as e:
        engine.get_engine(config, "./nowhere")
    assert "\n" not in str(e.value)


@each(
    "fields",
    [
        {},
        {"method": "suffix"},
        {"method": "qwen3_next_mtp"},
        {"method": "mtp", "rejection_sample_method": "block"},
        {"method": None, "model": "a/draft"},
    ],
)
def test_a_config_reaches_the_engine_as_it_is(fields, tmp_path):
    text = option(**fields)
    (tmp_path / "drafts.json").write_text(text)
    assert speculative.of_option(text) == NGRAM | fields
    assert speculative.of_option(f"{tmp_path}/drafts.json") == NGRAM | fields
    given = strategy.StrategyConfig(engine_type="vllm", engine_speculative=text)
    assert engine.config_of(given).speculative == text
    engine.check_config(engine.config_of(given))


@each("kind", ["openai", "sglang"])
def test_servers_are_started_with_it(kind):
    config = engine.EngineConfig(type=kind, servers=("http://127.0.0.1:1",), speculative=option())
    with pytest.raises(ValueError, match=f"engine_speculative: expected none for {kind}, whose servers are"):
        engine.check_config(config)


@each(
    ("kind", "drafts", "message"),
    [
        ("openai", NGRAM, None),
        ("openai", SYNTHETIC, "speculative_config: rejection_sample_method: expected standard or block"),
        ("openai", NGRAM | {"by_temperature": True}, None),
        (
            "openai",
            NGRAM | {"by_temperature": False},
            "speculative_config: expected a vLLM that keeps the",
        ),
        ("openai", ["ngram"], "speculative_config: expected an object, got list"),
        ("sglang", {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 1.0}, None),
        ("sglang", {"speculative_algorithm": None, "speculative_accept_threshold_acc": 0.5}, None),
        (
            "sglang",
            {"speculative_algorithm": "EAGLE", "speculative_accept_threshold_single": 0.9},
            "speculative_accept_threshold_single: expected 1, which keeps .*, got 0.9",
        ),
    ],
)
def test_a_server_whose_drafts_change_the_law_is_refused_at_the_start(kind, drafts, message):
    fake = FakeServer(tiny.llama(), tiny.tokenizer(), drafts=drafts)
    with serving(fake):
        config = engine.EngineConfig(type=kind, servers=(fake.url,), timeout=60.0)
        if message is None:
            assert engine.get_engine(config, tiny.llama(), tiny.tokenizer()).status()["alive"]
            return
        with pytest.raises(ValueError, match=f"^engine_servers: {fake.url}: {message}"):
            engine.get_engine(config, tiny.llama(), tiny.tokenizer())


def test_a_run_tells_of_the_drafts_of_each_step():
    status = {"alive": True}
    samples = collect.AsyncSampler(SimpleNamespace(status=lambda: status), strategy.get_fake_strategy())
    assert samples.accepted() == {}
    status["drafts"] = Drafts(steps=10, tokens=40, accepted=30)
    assert samples.accepted() == {"rollout/accepted": 0.75, "rollout/tokens_per_step": 4.0}
    assert samples.accepted() == {}
    status["drafts"] = Drafts(steps=12, tokens=48, accepted=30)
    assert samples.accepted() == {"rollout/accepted": 0.0, "rollout/tokens_per_step": 1.0}
    status["drafts"] = Drafts(steps=1, tokens=4, accepted=1)  # built again
    assert samples.accepted() == {"rollout/accepted": 0.25, "rollout/tokens_per_step": 2.0}
