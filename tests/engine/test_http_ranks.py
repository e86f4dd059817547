"""Two ranks on two servers: the first rank alone gives weights and orders, both sample."""

import pytest
import ranks
import tiny
import torch
from fake_server import FakeServer, serving

import rft_fn as rft
from rft_fn import collect, engine, optim, rng, strategy, sync
from rft_fn.engine import weight_folder

pytestmark = pytest.mark.slow

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17]]
KEYS = [rng.fold_in(0, i) for i in range(4)]
SAMPLING = rft.Sampling(max_new=9)


def on_two(rank, urls, folder):
    st = strategy.get_strategy()
    _, state = st.init(tiny.llama(5), optim.adamw(1e-3))
    config = engine.EngineConfig(type="openai", servers=urls, batch=4, timeout=20.0, weights=folder)
    eng = engine.get_engine(config, tiny.llama(), tiny.tokenizer())
    delivered = sync.push(st, state, eng, version=3)
    options = {"n": 3, "sampling": SAMPLING}
    rollout = collect.gather_and_generate(eng, st, PROMPTS, KEYS, **options)
    status = eng.status()
    again = collect.gather_and_generate(eng, st, PROMPTS, KEYS, sleep_engine=False, **options)

    def full(self):
        raise OSError(28, "No space left on device")

    weight_folder.Writer._flush = full
    with pytest.raises(OSError, match="No space left on device"):
        sync.push(st, state, eng, version=4)
    found = rollout.tokens, again.tokens, rollout.version, rollout.logp
    alive = eng.status()["alive"]
    eng.close()
    return found, delivered[:2], status, alive


def test_two_ranks_share_the_servers(tmp_path):
    servers = [FakeServer(tiny.llama(), tiny.tokenizer(), device="cuda") for _ in range(2)]
    with serving(*servers):
        urls = tuple(s.url for s in servers)
        found = ranks.run(2, "test_http_ranks:on_two", urls, str(tmp_path))
    eng = engine.hf(tiny.llama(5), tiny.tokenizer())
    want = eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING)
    parameters = list(tiny.llama().parameters())
    for (tokens, again, version, logp), delivered, status, alive in found:
        assert torch.equal(tokens, want.tokens) and torch.equal(again, want.tokens)
        assert set(version.tolist()) == {3} and (logp - want.logp).abs().max() < 1e-5
        assert delivered == (len(parameters), sum(4 * p.numel() for p in parameters))
        assert status["asleep"] and not alive
    for server in servers:
        loads = [b for p, b in server.calls if p == "/collective_rpc" and b["method"] == "rft_load"]
        assert len(loads) == 1
        assert [p for p, _ in server.calls].count("/sleep?level=1") == 1 and not server.asleep
    assert not list(tmp_path.iterdir())
