"""Damaged or incomplete model folders: an error of one line, before anything is trained."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import tiny
import torch
from ranks import free_port, run
from safetensors.torch import load_file, save_file

from rft_fn import model, packing
from rft_fn.model import model_names


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a model with an untied head and two files of weights."""
    folder = tmp_path_factory.mktemp("model") / "whole"
    model.save(folder, tiny.llama(tie_word_embeddings=False), tiny.tokenizer())
    return folder


def copied(whole, tmp_path, tensors=None, config=None):
    """A copy with other tensors (a function of the dict of them) and other entries in config.json."""
    folder = shutil.copytree(whole, tmp_path / "copy")
    if tensors:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def drop(held):
    del held["model.layers.1.mlp.up_proj.weight"]


def add(held):
    held["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)


def narrow(held):
    held["model.norm.weight"] = torch.ones(8)


def poison(held):
    held["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")


def infinite(held):
    held["lm_head.weight"][0, 0] = float("-inf")


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (drop, {}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (add, {}, r"unexpected: model\.layers\.7\.mlp\.up_proj\.weight"),
        (narrow, {}, r"config\.json's: model\.norm\.weight \[8\] instead of \[32\]"),
        (None, {"vocab_size": 50}, r"embed_tokens\.weight \[48, 32\] instead of \[50, 32\]"),
        (None, {"num_hidden_layers": 3}, r"missing: model\.layers\.2\..* and 5 more"),
        (None, {"tie_word_embeddings": True}, None),
        (poison, {}, r"model\.layers\.1\.mlp\.up_proj\.weight: expected finite numbers, got NaN or inf"),
        (infinite, {}, r"lm_head\.weight: expected finite numbers"),
    ],
)
def test_every_tensor_of_a_model_has_to_be_there(whole, tmp_path, tensors, config, message, meta):
    """With and without memory first. A head that the config ties may be there or not."""
    folder = copied(whole, tmp_path, tensors, config)
    if message is None:
        model.materialize(model.load(folder, meta=meta))
        return
    with pytest.raises(ValueError, match=message) as error:
        model.materialize(model.load(folder, meta=meta))
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


MADE = "expected a config.json that a model can be made of, got"


@pytest.mark.parametrize("load", [model.load, model.load_critic, model.load_reward], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": 0}, "could not load .* modulo by zero"),
        ({"num_key_value_heads": 0}, f"{MADE} ZeroDivisionError"),
        ({"architectures": [5]}, r"architectures.*( expected a list of names, got| with value) \[5\]"),
        ({"architectures": "Llama"}, "architectures.*( expected a list of names, got| with value) 'Llama'"),
        ({"hidden_size": -4}, f"{MADE} RuntimeError: .*negative dimension -4"),
        ({"hidden_size": "32"}, "could not load .*'hidden_size': .* expected int, got str"),
        ({"vocab_size": 0}, f"{MADE} IndexError"),
        ({"vocab_size": -1}, f"{MADE} RuntimeError: .*negative dimension -1"),
        ({"vocab_size": 10**9}, r"of about the \d+ numbers in its files, got one of \d{11}"),
        ({"vocab_size": 10**20}, f"{MADE} TypeError"),
        ({"intermediate_size": 10**12}, r"of about the \d+ numbers in its files, got one of \d{15}"),
        (
            {"num_hidden_layers": 10**7},
            r"num_hidden_layers: expected no more than the 21 tensors .* 10000000",
        ),
        ({"head_dim": 0}, f"{MADE} ZeroDivisionError"),
        ({"head_dim": 7}, "(could not load .* RoPE requires an even|.* of another shape than config.json's)"),
        ({"hidden_act": "nothing"}, f"{MADE} KeyError: 'nothing'"),
        ({"pad_token_id": 10**6}, f"{MADE} AssertionError: Padding_idx"),
        ({"layer_types": ["nothing"]}, "could not load .* `layer_types` entries must be in"),
        ({"rope_parameters": {"rope_type": "nothing"}}, f"{MADE} KeyError: 'nothing'"),
        ({"model_type": []}, "could not load .* unhashable"),
    ],
)
def test_a_config_with_wrong_numbers_is_one_line(whole, tmp_path, config, message, load):
    """And no memory is taken for a model of another size than that of the files."""
    folder = copied(whole, tmp_path, config=config)
    for meta in (False, True):
        with pytest.raises(ValueError, match=f"^model: .*{message}") as error:
            load(folder, meta=meta, **({"new": True} if load is model.load_reward else {}))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"_attn_implementation": "kernels-community/flash-attn2"},
        {"attn_implementation": "someone/attention:forward"},
        {"_attn_implementation": {"": "paged|someone/attention@v1"}},
        {"_experts_implementation": "someone/experts"},
    ],
)
def test_code_of_a_repository_in_a_config_is_refused(whole, tmp_path, monkeypatch, config, meta):
    """With the package `kernels` transformers would fetch the repository and run it, without being asked."""
    from transformers.integrations import hub_kernels

    asked = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **options: asked.append(args))
    folder = copied(whole, tmp_path, config=config)
    for load in (model.load, model.load_critic, model.read_window):
        with pytest.raises(ValueError, match=r"config\.json without code of other repositories, got '.*/"):
            load(folder, **({} if load is model.read_window else {"meta": meta}))
    assert not asked


@pytest.mark.parametrize("meta", [False, True])
def test_a_tied_head_is_not_missing(tmp_path, meta):
    model.save(tmp_path / "m", tiny.llama(), tiny.tokenizer())
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    model.materialize(model.load(tmp_path / "m", meta=meta))


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_classifier_is_no_language_model(tmp_path, tied, meta):
    from transformers import LlamaForSequenceClassification

    config = tiny.llama(tie_word_embeddings=tied).config
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="expected a language model, got LlamaForSequenceClassification"):
        model.load(tmp_path / "m", meta=meta)


def test_a_critic_has_no_head_and_needs_its_decoder_whole(whole, tmp_path):
    model.save_critic(tmp_path / "c", model.load_critic(whole))
    model.load_critic(tmp_path / "c")
    held = load_file(tmp_path / "c" / "model.safetensors")
    name = next(n for n in held if "up_proj" in n)
    del held[name]
    save_file(held, tmp_path / "c" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing: {name}"):
        model.load_critic(tmp_path / "c")


@pytest.mark.parametrize("meta", [False, True])
def test_a_file_that_was_cut_off_is_named(whole, tmp_path, meta):
    folder = copied(whole, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model: .*/model\.safetensors: expected a whole safetensors file"):
        model.load(folder, meta=meta)


def edit_tokenizer(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_tokenizers_that_cannot_be_used(whole, tmp_path):
    folder = copied(whole, tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content' }}{% endfor %}")
    with pytest.raises(ValueError, match=r"copy: expected a chat template that parses, got .* in its line 1"):
        model.load_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    model.load_tokenizer(folder)  # a template may refuse what it is shown here
    edit_tokenizer(folder, eos_token=None, pad_token=None)
    with pytest.raises(ValueError, match=r"copy: expected an eos_token, .* got none"):
        model.load_tokenizer(folder)
    for path in folder.glob("token*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"tokenizer: expected one in .*copy, got no tokenizer\.json"):
        model.load_tokenizer(folder)


def test_code_of_a_folder_runs_only_if_asked_by_name(whole, tmp_path):
    """Also with the environment's own default."""
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    folder = copied(whole, tmp_path, config={"model_type": "own", "auto_map": auto})
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "class Config(LlamaConfig):\n    model_type = 'own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    for meta in (False, True):
        with pytest.raises(ValueError, match=r"runs Python code from its folder; .* trust_remote_code=True"):
            model.load(folder, meta=meta)
    assert not (tmp_path / "ran").exists()
    model.load(folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["file", "below a file", "read-only"])
def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, kind):
    (tmp_path / "file").write_text("")
    paths = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "read-only": "/proc/x"}
    monkeypatch.setenv("RFT_FN_CACHE", str(paths[kind]))
    with pytest.raises(ValueError, match=r"^RFT_FN_CACHE: expected a folder that can be written, got /"):
        model.load("tiny")


def test_a_build_that_fails_without_a_number_says_what_failed(tmp_path, monkeypatch):
    """transformers raises an OSError of text alone, which has no strerror."""
    monkeypatch.setenv("RFT_FN_CACHE", str(tmp_path))

    def build(out):
        raise OSError("some/one has no file named tokenizer.json")

    with pytest.raises(ValueError, match=r"got /.*: some/one has no file named tokenizer.json$"):
        model_names._built("m", build)
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]


def test_a_hub_name_without_a_hub_is_one_line_in_seconds(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    start = time.monotonic()
    for load in (model.load, model.load_tokenizer):
        with pytest.raises(ValueError, match=r"nobody/nothing is neither a folder .* cannot be reached: "):
            load("nobody/nothing")
    assert time.monotonic() - start < 12
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="and HF_HUB_OFFLINE is set"):
        model.load("nobody/nothing")


def test_a_hub_model_that_was_fetched_needs_no_hub(whole, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache, commit = tmp_path / "hub" / "models--some--one", "0" * 40
    shutil.copytree(whole, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert model_names.resolve("some/one") == str(cache / "snapshots" / commit)
    model.load("some/one")


BUILD = """
import os, sys, time
from pathlib import Path
from rft_fn.model import model_names

def build(out):
    with open(sys.argv[1], "a") as f:
        f.write("x")
    out.mkdir()
    (out / "half").touch()
    time.sleep(float(sys.argv[2]))
    (out / "whole").touch()

assert (model_names._built("m", build) / "whole").exists()
"""


def builder(tmp_path, seconds):
    env = os.environ | {"RFT_FN_CACHE": str(tmp_path / "cache")}
    return subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path / "log"), str(seconds)], env=env)


def test_one_process_builds_and_the_others_wait(tmp_path):
    """Three at once: one build. One that is killed while it builds leaves the lock to the next."""
    first = builder(tmp_path, 600)
    end = time.monotonic() + 60
    while not (tmp_path / "log").exists():
        assert time.monotonic() < end and first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    assert not (tmp_path / "cache" / "m").exists()
    assert [p.wait() for p in [builder(tmp_path, 1) for _ in range(3)]] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "xx"


def saved_on_each(rank, folder):
    """Every process of a group saves a model that is its own: transformers would write on rank 0 alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model.save(f"{folder}/{rank}", tiny.llama(), tiny.tokenizer())
    dist.destroy_process_group()


def test_whoever_saves_a_module_of_its_own_writes_it(tmp_path):
    run(2, "test_load:saved_on_each", str(tmp_path))
    for rank in range(2):
        assert sum(p.numel() for p in model.load(tmp_path / str(rank)).parameters()) > 0


def test_assign_puts_weights_in_place():
    """From another model's params, a dict and an export; the model then computes with them."""
    lm, other, pack = tiny.llama(0), tiny.llama(1), packing.pack(tiny.experience(), range(6))
    apply, params = model.bind(lm)
    there, want = model.bind(other)
    kept = {name: p.data_ptr() for name, p in params.items()}
    model.assign(params, want)
    assert torch.equal(apply(params, pack).logp, there(want, pack).logp)
    assert {name: p.data_ptr() for name, p in params.items()} == kept
    assert all(p.requires_grad for p in params.values())
    one = {"model.norm.weight": torch.full((32,), 2.0)}
    model.assign(params, iter(one.items()))
    assert torch.equal(params["model.norm.weight"], one["model.norm.weight"])
    assert not torch.equal(want["model.norm.weight"], one["model.norm.weight"])

    # a share of the way, in the type of the parameters
    before = params["model.embed_tokens.weight"].detach().clone()
    model.assign(params, {"model.embed_tokens.weight": torch.zeros_like(before).double()}, share=0.25)
    torch.testing.assert_close(params["model.embed_tokens.weight"].detach(), 0.75 * before)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"share: expected 0 < share <= 1, got {share}"):
            model.assign(params, one, share=share)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"nope": torch.zeros(1)}, "source: expected names among .*, got nope"),
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight: expected \[32\], got \[3\]"),
        ({}, "source: expected a tensor or more, got none"),
    ],
)
def test_assign_checks_names_and_shapes(source, message):
    _, params = model.bind(tiny.llama())
    before = params["model.embed_tokens.weight"].detach().clone()
    good = {"model.embed_tokens.weight": torch.zeros_like(before)} if source else {}
    with pytest.raises(ValueError, match=message):
        model.assign(params, good | source)
    assert torch.equal(params["model.embed_tokens.weight"], before)


def assigned(rank, kind):
    """The scores of a sharded model before and after it was given the weights of two others."""
    import rft_fn as rft
    from rft_fn.strategy import StrategyConfig

    options = {"fsdp2": {"fsdp": True}, "zero3": {"zero_stage": 3}}
    st = rft.strategy.get_strategy(StrategyConfig(**options[kind]))
    apply, params = st.bind(tiny.llama(0))
    _, state = st.init(tiny.llama(2), rft.optim.adamw(1e-3))
    packs = [packing.pack(tiny.experience(), range(6))]
    out = []
    for source in (None, dict(tiny.llama(1).named_parameters()), st.export(state)):
        if source is not None:
            model.assign(params, source)
        out.append(model.score(apply, params, packs)[0])
    if kind == "zero3":
        with pytest.raises(ValueError, match=r"under ZeRO.*st\.restore"):
            model.assign(state.params, dict(tiny.llama(1).named_parameters()))
    else:
        model.assign(params, state.params)  # shards to shards
        assert torch.equal(model.score(apply, params, packs)[0], out[-1])
        model.assign(params, dict(tiny.llama(1).named_parameters()), share=0.5)
        half = {
            n: (p + dict(tiny.llama(2).named_parameters())[n]) / 2
            for n, p in tiny.llama(1).named_parameters()
        }
        for name, p in params.items():
            torch.testing.assert_close(p.full_tensor(), half[name].detach())
    return out


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_assign_puts_whole_tensors_into_shards(kind):
    results = run(2, "test_load:assigned", kind)
    packs = [packing.pack(tiny.experience(), range(6))]
    for seed in range(3):
        want = model.score(*model.bind(tiny.llama(seed)), packs)[0]
        for r in results:
            torch.testing.assert_close(r[seed], want, rtol=0, atol=1e-5)


def test_packs_go_to_the_device_of_a_frozen_model():
    """It has no trainable parameter that could say where it is."""
    from rft_fn.model.bind import to_params_device

    packs = [packing.pack(tiny.experience(), range(6))]
    apply, params = model.bind(tiny.llama().requires_grad_(False).to("meta"))
    assert not params and to_params_device(apply, params, packs)[0].tokens.device.type == "meta"
    apply, params = model.bind(tiny.llama().requires_grad_(False))
    assert to_params_device(apply, params, packs)[0].tokens.device.type == "cpu"
