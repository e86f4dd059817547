"""Servers at the start and with weights that are not sent: one model on all of them, and whole layers."""

import pytest
import tiny
import torch
from fake_server import FakeServer, serving

import rft_fn as rft
from rft_fn import engine, optim, sync
from rft_fn.engine import weight_folder
from rft_fn.engine.server_protocol import RemoteModel

PROMPTS, KEYS, SAMPLING = [[3, 4, 5], [6, 7]], [1, 2], rft.Sampling(max_new=6)


def made(*fakes, **options):
    config = engine.EngineConfig(type="openai", servers=tuple(f.url for f in fakes), timeout=60.0, **options)
    return engine.get_engine(config, tiny.llama(), tiny.tokenizer())


def fake(seed=0, cls=FakeServer, **options):
    return cls(tiny.llama(seed), tiny.tokenizer(), **options)


def test_servers_of_two_models_are_refused_in_a_line():
    with serving(*(fakes := [fake(), fake(), fake(seed=5)])):
        with pytest.raises(ValueError, match=rf"^engine_servers: expected .* got {fakes[2].url}") as e:
            made(*fakes)
        assert f"from those of {fakes[0].url} by " in str(e.value) and "window of 128 tokens" in str(e.value)


def test_another_window_is_told_and_served(capsys):
    with serving(*(fakes := [fake(), fake(window=64)])):
        eng = made(*fakes)
        assert eng.status()["window"] == 64
        err = capsys.readouterr().err
        assert err.count("warning: engine_servers") == 1 and "; their log-probs agree" in err
        assert f"{fakes[1].url} 'tiny' with 64" in err
    with serving(*(fakes := [fake(), fake()])):
        made(*fakes)
    assert not capsys.readouterr().err


def test_a_server_with_weights_of_another_run_is_told_and_gets_ours_before_it_samples(capsys):
    old = fake(seed=5)
    old.label = "other:7"
    with serving(*(fakes := [fake(), old])):
        eng = made(*fakes)
        (line,) = [x for x in capsys.readouterr().err.splitlines() if "engine_servers" in x]
        assert f"{old.url} 'other:7'; log-probs differ by" in line and "after the first load" in line
        eng.load(tiny.llama(3).named_parameters(), version=1)
        got = eng.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
    want = engine.hf(tiny.llama(3), tiny.tokenizer()).generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
    assert torch.equal(got.tokens, want.tokens)


class Spoilt(FakeServer):
    """Weights are others once they have arrived, as in a server that quantises them badly."""

    def load(self, folder):
        names = super().load(folder)
        with torch.no_grad():
            self.lm.load_state_dict(tiny.llama(5).state_dict())
        return names


def test_servers_with_weights_of_other_runs_are_compared_after_the_first_load():
    other = fake(cls=Spoilt)
    other.label = "other:7"
    with serving(*(fakes := [fake(), other])):
        eng = made(*fakes)  # they are equal until then
        with pytest.raises(ValueError, match=rf"^engine_servers: .* got {other.url}, whose log-probs"):
            eng.load(tiny.llama(3).named_parameters(), version=1)


class Layered(FakeServer):
    """What a load does not bring is lost, as a layer that vLLM gets in parts is."""

    def load(self, folder):
        for p in self.lm.parameters():
            p.data.zero_()
        return super().load(folder)


def adapted():
    return rft.model.apply_lora_configuration(tiny.llama(), 2, 4, target_modules=["q_proj", "v_proj"])


def frozen_but(name):
    lm = tiny.llama()
    for own, p in lm.named_parameters():
        p.requires_grad_(name in own)
    return lm


@pytest.mark.parametrize("build", [adapted, lambda: frozen_but("mlp"), lambda: frozen_but("layers.1")])
@pytest.mark.parametrize("named", [True, False])
def test_what_is_frozen_reaches_the_servers_too(build, named, tmp_path):
    """A q that is trained and a k that is not are one tensor there."""
    st = rft.strategy.get_fake_strategy()
    module = build()
    _, state = st.init(module, optim.adamw(0.1))
    with torch.no_grad():
        for x in state.params.values():
            x += 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    model = tiny.llama()
    if named:
        rft.model.save(tmp_path / "model", model)
        model = str(tmp_path / "model")
    with serving(server := fake(cls=Layered)):
        config = engine.EngineConfig(type="openai", servers=(server.url,), timeout=60.0)
        eng = engine.get_engine(config, model, tiny.tokenizer())
        delivered = sync.push(st, state, eng, version=1)
        got = eng.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
    plain = engine.hf(tiny.llama(), tiny.tokenizer())
    assert sync.push(st, state, plain, version=1)[:2] == delivered[:2]  # those that were sent are counted
    want = plain.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
    assert torch.equal(got.tokens, want.tokens) and (got.logp - want.logp).abs().max() < 1e-5


def inodes(folder):
    """The files of the weights in the folder, by their names on the disk."""
    return {path.name: path.stat().st_ino for path in folder.glob("*/*.safetensors")}


@pytest.mark.parametrize("links", [True, False])
def test_what_is_frozen_is_written_once(links, tmp_path, monkeypatch):
    """Later loads have the same files of it, and read none of the model's; a new engine writes them anew."""
    if not links:
        monkeypatch.setattr(weight_folder.os, "link", refuse)
    read = []
    monkeypatch.setattr(RemoteModel, "tensors", watched(RemoteModel.tensors, read))
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(adapted(), optim.adamw(0.1))
    with serving(server := fake(cls=Layered)):
        for built in (1, 2):
            eng = made(server, weights=str(tmp_path))
            found = []
            for version in (1, 2, 3):
                with torch.no_grad():
                    for x in state.params.values():
                        x += 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(version))
                sync.push(st, state, eng, version=version)
                found.append(inodes(tmp_path))
                got = eng.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
                plain = engine.hf(tiny.llama(), tiny.tokenizer())
                sync.push(st, state, plain, version=version)
                assert torch.equal(got.tokens, plain.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING).tokens)
            eng.close()
            kept = [{name: x for name, x in each.items() if name.startswith("kept")} for each in found]
            assert kept[0]
            if links:
                assert kept[0] == kept[1] == kept[2] and len(read) == built
            else:
                assert len(read) == 3 * built


def refuse(*args):
    raise OSError("no links here")


def watched(f, calls):
    def call(self, names):
        calls.append(names)
        return f(self, names)

    return call
