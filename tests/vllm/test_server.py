"""Real vLLM servers on the CPU: two of the small model, started once for this file.

They need an environment with vLLM; the trainer's side runs in the same one here.
"""

import itertools
import threading
import time
from functools import partial

import pytest
import torch
from inprocess import needs_vllm
from script_runs import rows, start
from serving import Server

import rft_fn as rft
from rft_fn import engine, model, rng
from rft_fn.engine import openai as dialect
from rft_fn.engine import weight_folder
from rft_fn.engine.pool import ServersFailed
from rft_fn.engine.server_protocol import Client, Described, Fault
from rft_fn.engine.weight_channel import Channel, Parcel
from rft_fn.engine.weight_sender import UPDATE, Senders

pytestmark = needs_vllm

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17]]
KEYS = [rng.fold_in(0, i) for i in range(4)]
SAMPLING = rft.Sampling(max_new=12)
NOISE = 1e-5  # of log-probs in float32, ten times what was measured


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    found = [Server(folder / f"{i}.log") for i in range(2)]
    try:
        for server in found:
            server.wait()
        yield found
    finally:
        for server in found:
            server.kill()


def made(*servers, **options):
    urls = tuple(s.url for s in servers)
    config = engine.EngineConfig(type="openai", servers=urls, timeout=60.0, **options)
    return engine.get_engine(config, "tiny", model.load_tokenizer("tiny"))


@pytest.fixture(scope="module")
def eng(servers):
    found = made(*servers, batch=16)
    yield found
    found.close()


def hf(lm=None):
    return engine.hf(lm or model.load("tiny"), model.load_tokenizer("tiny"))


def gap(rollout, sampling, lm=None):
    return (hf(lm).score(rollout, sampling=sampling) - rollout.logp).abs().max()


@pytest.fixture(params=["/inference/v1/generate", "/v1/completions"])
def route(request, monkeypatch):
    """Engines that are made ask by this route."""
    describe = dialect._VLLM.describe
    monkeypatch.setattr(
        dialect._VLLM, "describe", lambda *args: describe(*args)._replace(route=request.param)
    )


def test_greedy_tokens_are_those_of_hf(servers, route):
    eng = made(servers[0])
    greedy = rft.Sampling(temperature=0, max_new=12, stop=("1", 20))
    got = eng.generate(PROMPTS, KEYS, sampling=greedy)
    want = hf().generate(PROMPTS, KEYS, sampling=greedy)
    for name in ("tokens", "mask", "length", "truncated", "group"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert (got.logp - want.logp).abs().max() < NOISE


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 1.6, "stop": ("1",)}]
)
def test_log_probs_are_of_the_distribution_that_was_sampled_from(servers, route, options):
    sampling = rft.Sampling(max_new=12, **options)
    eng = made(*servers)
    got = eng.generate(PROMPTS, KEYS, n=4, sampling=sampling)
    assert gap(got, sampling) < NOISE and got.logp[got.mask].min() < -0.05
    again = made(servers[1]).generate(PROMPTS, KEYS, n=4, sampling=sampling)
    assert torch.equal(got.tokens, again.tokens)  # keys name the draw, whoever draws
    assert (eng.score(got) - hf().score(got)).abs().max() < NOISE


@pytest.mark.parametrize("way", ["folder", "rft"])
def test_only_the_embedding_changes_and_arrives(servers, way):
    """It is the head too, of which vLLM keeps a packed copy on the CPU."""
    eng = made(*servers, batch=16, transfer=way)
    lm = model.load("tiny")
    eng.load(lm.named_parameters(), version=0)
    with torch.no_grad():
        weight = lm.get_input_embeddings().weight
        weight.add_(0.05 * torch.randn(weight.shape, generator=rng.generator(0)))
    eng.generate(PROMPTS, KEYS, sampling=SAMPLING)  # fills the prefix cache
    delivered = eng.load(lm.named_parameters(), version=1)
    assert delivered.tensors == len(list(lm.parameters())) and delivered.version == 1
    for _ in range(2):  # each server
        rollout = eng.generate(PROMPTS, KEYS, n=8, sampling=SAMPLING)
        assert gap(rollout, SAMPLING, lm) < 1e-4 < gap(rollout, SAMPLING)
        assert set(rollout.version.tolist()) == {1}
    eng.close()


@pytest.mark.parametrize("way", ["folder", "rft"])
def test_requests_under_way_go_on_with_new_weights(servers, way):
    """They are held, read again, and say which weights their tokens are of, in the middle of a row or not."""
    eng = made(servers[0], batch=8, transfer=way, in_flight=True)
    old, new = model.load("tiny"), model.load("tiny")
    with torch.no_grad():
        for lm in (old, new):  # else a row ends after three tokens, before a load can meet it
            lm.get_input_embeddings().weight[model.load_tokenizer("tiny").eos_token_id] = 0
        for i, p in enumerate(new.parameters()):
            p.add_(0.02 * torch.randn(p.shape, generator=rng.generator(i)))
    eng.load(old.named_parameters(), version=1)
    long = rft.Sampling(max_new=110, temperature=1.5)
    limits = [2, *[110] * 47]
    met = []
    for version, before, after in zip(range(2, 12), itertools.cycle((old, new)), itertools.cycle((new, old))):
        load = threading.Thread(target=partial(eng.load, after.named_parameters(), version=version))

        def on_row(b, tokens, ended, load=load):
            if b == 0:
                load.start()

        found = eng.generate(PROMPTS, KEYS, n=12, sampling=long, max_new=limits, on_row=on_row)
        load.join()
        older, newer = (hf(lm).score(found, sampling=long) for lm in (before, after))
        assert {*found.versions[found.mask].tolist()} <= {version - 1, version}
        assert (torch.where(found.versions == version, newer, older) - found.logp).abs().max() < 1e-4
        assert (older - newer).abs().max() > 1e-2
        met = [versions[own].unique().tolist() for versions, own in zip(found.versions, found.mask)]
        if [version - 1, version] in met:  # small models take so little time that a pause may come late
            break
    assert [version - 1, version] in met
    eng.close()


def test_a_forced_response_is_a_request_of_vllms_own_types(monkeypatch):
    """Only its model runner V2 can be made to give tokens, which no CPU runs."""
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    asked = []

    def post(server, path, body, tokens):
        asked.append(GenerateRequest.model_validate(body).sampling_params)
        raise Fault("asked")

    protocol = dialect.protocol(Client(), 1.0)
    monkeypatch.setattr(protocol, "post", post)
    known = Described("/inference/v1/generate", "tiny", 128, "", frozenset())
    with pytest.raises(Fault, match="asked"):
        protocol.force("", known, [1, 2], [3, 4, 5], rft.Sampling(temperature=0.7, top_p=0.9, top_k=4))
    (params,) = asked
    assert params.trace_decode_token_ids == [3, 4, 5] and params.max_tokens == 3 and params.logprobs == 0
    assert (params.temperature, params.top_p, params.top_k, params.n) == (0.7, 0.9, 4, 1)
    assert not params.stop_token_ids and params.prompt_logprobs is None


def test_a_dropped_tensor_is_counted(eng, servers, tmp_path):
    """q of a fused qkv, and a norm: by the count of the server itself."""
    lm = model.load("tiny")
    eng.load(lm.named_parameters(), version=2)
    client = Client()
    for dropped, module in (("layers.1.self_attn.q_proj", "qkv_proj"), ("layers.0.input_layernorm", "")):
        writer = weight_folder.Writer(tmp_path / "weights")
        for name, x in lm.named_parameters():
            if dropped not in name:
                writer.add(name, x)
        writer.finish({"lm_head.weight": "model.embed_tokens.weight"})
        body = {"method": "rft_load", "args": [str(tmp_path / "weights")]}
        (worker,) = client.call(servers[0].url, "/collective_rpc", body, seconds=60)["results"]
        (short,) = worker["short"]
        assert module in short and dropped.split(".self_attn")[0] in short
        body["args"] = ["/no"]
        (worker,) = client.call(servers[0].url, "/collective_rpc", body, seconds=60)["results"]
        assert "FileNotFoundError" in worker["error"]
    eng.load(lm.named_parameters(), version=3)
    assert gap(eng.generate(PROMPTS, KEYS, n=8, sampling=SAMPLING), SAMPLING, lm) < NOISE


def parcel(lm, without=""):
    """The weights of a model, as the first rank has collected them."""
    found = Parcel()
    for name, x in lm.named_parameters():
        if name != without:
            found.add(name, x)
    found.finish({"lm_head.weight": "model.embed_tokens.weight"})
    return found


def shaken(seed):
    lm = model.load("tiny")
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=rng.generator(seed)))
    return lm


def test_weights_that_do_not_arrive_whole_leave_the_old_ones(eng, servers, monkeypatch):
    """A tensor too few for the manifest, or for a layer; a trainer that never sends; one that is gone."""
    old, new, url = shaken(1), shaken(2), servers[0].url
    name = "model.layers.1.self_attn.q_proj.weight"
    eng.load(old.named_parameters(), version=1)
    senders = Senders(Client(), 5.0)

    def refused(sent, line, seconds):
        began = time.monotonic()
        with pytest.raises(Fault, match=line) as found:
            senders.send(url, sent, "other:1")
        assert time.monotonic() - began < seconds and "\n" not in str(found.value)
        assert gap(eng.generate(PROMPTS, KEYS, n=8, sampling=SAMPLING), SAMPLING, old) < NOISE

    with monkeypatch.context() as patch:
        whole = parcel(new).manifest()
        patch.setattr(Parcel, "manifest", lambda _: whole)
        refused(parcel(new, without=name), rf"status 500: .*{name}: expected float32 .*, got none", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "broadcast", lambda *_: None)
        refused(parcel(new), f"^{UPDATE}: ", 8)
    dead = Senders(Client(), 30.0)
    dead._start(url, time.monotonic() + 30)
    del dead

    # the next trainer, who also finds a layer that got too little: by vLLM's own count
    eng.load(new.named_parameters(), version=2)
    assert gap(eng.generate(PROMPTS, KEYS, n=8, sampling=SAMPLING), SAMPLING, new) < NOISE
    with pytest.raises(Fault, match=r"status 500: .*layers\.1\.self_attn\.qkv_proj: expected \d+ elements"):
        senders.send(url, parcel(old, without=name), "other:2")
    assert dialect.protocol(Client(), 60).label(url) == "other:2 failed"
    eng.load(old.named_parameters(), version=3)
    assert gap(eng.generate(PROMPTS, KEYS, n=8, sampling=SAMPLING), SAMPLING, old) < NOISE


def test_a_cpu_gives_no_memory_back(eng):
    assert eng.status()["supported"] == {"load", "rows", "score"}
    eng.sleep()
    assert not eng.status()["asleep"]


def test_a_script_trains_on_two_servers(servers, tmp_path):
    options = "--prompts 4 --group 4 --steps 4 --eval-every 100 --eval-prompts 4 --save-every 100"
    words = [*options.split(), "--engine-type", "openai", "--engine-servers", *(s.url for s in servers)]
    process = start("grpo", *words, "--out", tmp_path / "run")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    found = rows(tmp_path / "run")
    assert len(found) == 4 and all(row["policy/logp_gap"] < NOISE for row in found)


def trained(eng):
    """The rollouts of four steps, each with new weights."""
    found = []
    for step in range(4):
        lm = model.load("tiny")
        with torch.no_grad():
            for p in lm.parameters():
                p.mul_(1 + 0.02 * step)
        eng.load(lm.named_parameters(), version=step)
        keys = [rng.fold_in(step, i) for i in range(4)]
        found.append(eng.generate(PROMPTS, keys, n=16, sampling=SAMPLING))
        assert gap(found[-1], SAMPLING, lm) < NOISE
    return found


def test_one_of_two_is_killed_in_mid_run(servers, monkeypatch):
    """Its workers die in the middle of the second rollout; the run goes on with the same tokens."""
    bad, well = servers
    want = trained(made(well, transfer="folder"))
    eng = made(bad, well, batch=8)
    call, asked = Client.call, itertools.count(1)

    def counted(self, server, path, *args, **options):
        if server == bad.url and path == dialect.GENERATE and next(asked) == 50:
            threading.Thread(target=bad.kill).start()
        return call(self, server, path, *args, **options)

    monkeypatch.setattr(Client, "call", counted)
    got = trained(eng)
    assert bad.process.poll() is not None and eng.status()["alive"]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.version, other.version)


def test_the_last_one_is_killed_while_weights_arrive(servers, monkeypatch):
    _, last = servers
    eng = made(last, transfer="rft")
    lm = model.load("tiny")
    eng.load(lm.named_parameters(), version=1)
    monkeypatch.setattr(Channel, "broadcast", lambda *_: last.kill())
    began = time.monotonic()
    with pytest.raises(ServersFailed, match=f"^engine openai: {last.url}: {UPDATE}: ") as found:
        eng.load(lm.named_parameters(), version=2)
    assert time.monotonic() - began < 10 and "\n" not in str(found.value)
