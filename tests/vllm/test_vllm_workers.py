"""A real vLLM server of two workers, each with a half of every layer (`--tensor-parallel-size 2`)."""

import os
from pathlib import Path

import pytest
import torch
from inprocess import needs_vllm
from serving import Server
from test_server import NOISE, gap, made, parcel, shaken
from test_vllm_adapters import follows

import rft_fn as rft
from rft_fn import engine, model, rng
from rft_fn.engine import weight_channel
from rft_fn.engine.weight_sender import FINISH, Senders

pytestmark = needs_vllm
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], list(range(3, 43))]
KEYS = [rng.fold_in(0, i) for i in range(3)]
SAMPLING = rft.Sampling(max_new=8)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("server") / "log", rank=8, more=["--tensor-parallel-size", "2"])
    try:
        found.wait()
        yield found
    finally:
        found.kill()


def staged(server):
    """The memory without a name that each process of the server has mapped: {process: its files}."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if os.getpgid(int(folder.name)) == server.process.pid:
                lines = [x.split() for x in (folder / "maps").read_text().splitlines() if "memfd:rft" in x]
                found |= {int(folder.name): {words[4] for words in lines}} if lines else {}
        except (ValueError, OSError):  # no process, or one that has ended
            continue
    return found


def test_adapters_alone_reach_both_workers(server):
    """Before the others, since they want the base's own weights below them."""
    config = engine.EngineConfig(
        type="openai", servers=(server.url,), timeout=60.0, batch=16, adapters="alone", lora_rank=4
    )
    eng = engine.get_engine(config, "tiny", model.load_tokenizer("tiny"))
    follows(eng)
    eng.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_both_workers_load_what_is_staged_once(server, parts, monkeypatch):
    monkeypatch.setattr(weight_channel, "BUCKET", 1 << 19)
    seen = []
    init, post = Senders.__init__, Senders._post

    def cut(senders, *args, **options):
        init(senders, *args, **options)
        senders.parts[server.url] = parts

    def watched(senders, server_url, path, *args):
        if path == FINISH:
            seen.append(staged(server))
        return post(senders, server_url, path, *args)

    monkeypatch.setattr(Senders, "__init__", cut)
    monkeypatch.setattr(Senders, "_post", watched)
    eng = made(server, transfer="rft", batch=16)
    for version in range(2):
        lm = shaken(10 * parts + version)
        eng.load(lm.named_parameters(), version=version)
        rollout = eng.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
        assert gap(rollout, SAMPLING, lm) < NOISE and set(rollout.version.tolist()) == {version}
        assert len(seen) == parts and not staged(server)
        for files, part in zip(seen, parcel(lm).parts(parts), strict=True):
            first, second = files.values()
            assert first == second and len(first) == len(part.buckets)
        seen.clear()
    eng.close()


def test_both_workers_read_a_folder_and_what_has_changed_since(server, tmp_path):
    """bfloat16 travels as a difference, by the second load."""
    eng = made(server, transfer="folder", weights=str(tmp_path), batch=16)
    lm = shaken(5)
    with torch.no_grad():
        for p in lm.parameters():
            p.copy_(p.bfloat16())
    for version in range(2):
        eng.load(((name, p.bfloat16()) for name, p in lm.named_parameters()), version=version)
        rollout = eng.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
        assert gap(rollout, SAMPLING, lm) < NOISE
        assert [x.suffix for x in tmp_path.iterdir()] == ["", ".difference"][version : version + 1]
        with torch.no_grad():
            lm.lm_head.weight[:2] *= 2
    eng.close()
