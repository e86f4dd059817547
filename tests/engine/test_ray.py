"""The engine in actors of Ray: the tokens of one in this process, weights that arrive, actors that die."""

import pytest
import torch

import rft_fn as rft
from rft_fn.engine import EngineConfig, EngineDead, get_engine
from rft_fn.engine.pool import ServersFailed

PROMPTS = [[3, 4, 5, 6], [7, 8, 9], [5, 5, 5], [4, 6, 8], [9, 3]]
KEYS = [11, 12, 13, 14, 15]
SAMPLING = rft.Sampling(max_new=6)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"actors": 2},
            "engine_actors, engine_actor_type: expected 1 and hf for hf, which has no actors, got 2",
        ),
        (
            {"type": "vllm", "actor_type": "vllm"},
            "expected 1 and hf for vllm, which has no actors, got 1 and vllm",
        ),
        ({"type": "ray", "actors": 0}, r"actors: expected an integer in \[1, inf\), got 0"),
        ({"type": "ray", "servers": ("http://a:1",)}, "engine_servers: expected none for hf, got http://a:1"),
        ({"type": "ray", "max_model_len": 64}, "engine_max_model_len: expected 0 for hf, got 64"),
    ],
)
def test_options_that_no_actor_can_honour_are_refused(options, line):
    with pytest.raises(ValueError, match=line):
        get_engine(EngineConfig(**options), "tiny")


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_actors_sample_what_one_engine_samples_and_go_on_without_one_that_dies(cluster, capsys):
    local = get_engine(None, "tiny")
    engine = get_engine(EngineConfig(type="ray", actors=2, batch=4, timeout=120), "tiny")

    def compare(**options):
        mine = local.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING, **options)
        theirs = engine.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING, **options)
        for name in ("tokens", "mask", "length", "truncated", "group", "version"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        torch.testing.assert_close(mine.logp, theirs.logp, atol=1e-5, rtol=1e-5)
        return theirs

    first = compare(max_new=[1, 2, 3, 4, 5, 6, 5, 4, 3, 2])
    status = engine.status()
    assert status["engine"] == "ray" and status["alive"] and "rows" not in status["supported"]
    assert len(engine.generate([], [], sampling=SAMPLING).tokens) == 0
    torch.testing.assert_close(engine.score(first), local.score(first), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="expected at least one token, got none in prompt 4"):
        engine.generate([*PROMPTS[:4], []], KEYS, sampling=SAMPLING)

    torch.manual_seed(0)
    weights = {name: x + 0.1 * torch.randn_like(x) for name, x in rft.model.load("tiny").named_parameters()}
    for each in (local, engine):
        delivered = each.load(iter(weights.items()), version=3)
        assert (delivered.tensors, delivered.version) == (len(weights), 3)
    moved = compare()
    assert moved.version.tolist() == [3] * 10 and not torch.equal(first.tokens, moved.tokens)

    core = engine.generate.__self__.core
    cluster.kill(core.actors["actor-1"])
    compare()
    assert "warning: engine ray: actor-1 has died: The actor" in (out := capsys.readouterr().out)
    assert "; 1 of 2 are left" in out and out.count("\n") == 1
    cluster.kill(core.actors["actor-0"])
    with pytest.raises(
        ServersFailed, match=r"engine ray: .*actor-0: has died: .*actor-1: has died: "
    ) as error:
        engine.generate(PROMPTS, KEYS, sampling=SAMPLING)
    assert "\n" not in str(error.value)
    with pytest.raises(EngineDead, match=r"engine ray: expected one that is alive"):
        engine.generate(PROMPTS, KEYS, sampling=SAMPLING)
    engine.close()

    with pytest.raises((OSError, ValueError), match="no-such-model"):
        get_engine(
            EngineConfig(type="ray", actors=2, timeout=120), "no-such-model", rft.model.load_tokenizer("tiny")
        )

    # their places are free again; for more than the cluster has there is a deadline
    with pytest.raises(
        TimeoutError, match=r"engine_actors: expected room for 3 with 1 CPU each within 1 s .* got 2 CPU"
    ):
        get_engine(EngineConfig(type="ray", actors=3, timeout=1), "tiny")
