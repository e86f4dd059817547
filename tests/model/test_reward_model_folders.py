"""Folders of reward models: transformers' classes, ours, and those that are none."""

import contextlib
import copy
import json
import warnings

import pytest
import ranks
import tiny
import torch
from families import small

import rft_fn as rft
from rft_fn import model, packing
from rft_fn.model import Head
from rft_fn.strategy import StrategyConfig, get_strategy

ROWS = [[5, 8, 3, 9, 4], [7, 3, 3, 12, 6, 20, 11, 9, 4], [17], [4] * 9 + [8, 21, 13, 25] + [3, 7] * 9]


def classifier(kind, labels=2, dtype=torch.float64, seed=0):
    """transformers' model for sequence classification of a family, its head without any of our code."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(small(kind, dtype).config)
    config.num_labels = labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = AutoModelForSequenceClassification.from_config(config).to(dtype).eval()
        for p in lm.parameters():
            if p.dim() == 2:
                p.data.normal_(0, 0.3)
    return lm


def theirs(lm, rows=ROWS):
    """[B, H]: each row alone, without padding, by transformers' own forward."""
    with torch.no_grad():
        return torch.cat([lm(input_ids=torch.tensor([row])).logits for row in rows])


def ours(rm, rows=ROWS, budget=1000):
    st = get_strategy()
    apply, params = st.bind(rm)
    exp = packing.scored(rows)
    return model.final_scores(st.score(apply, params, exp, budget, fields=("score",)).score, exp.mask)


def reread(folder, dtype=torch.float64):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()


ENDED = [[5, 8, 3, 1], [7, 3, 3, 12, 6, 1], [17, 1], [4, 9, 20]]  # the end token of `tiny` is 1


@pytest.mark.parametrize("ends", [1, [30, 1]], ids=["one", "several"])
@pytest.mark.parametrize("first", [None, 2, 1])
def test_a_class_whose_padding_ends_texts_is_told_of_and_not_written(first, ends, tmp_path):
    """A fault that was found: 6.88 here and 0.69 in transformers' class, which scores the token before."""
    lm = classifier("Llama", labels=1)
    lm.config.update({"pad_token_id": 1, "eos_token_id": ends, "bos_token_id": first})
    lm.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match=r"theirs: expected a pad_token_id that ends no text, got 1, which"):
        rm = model.load_reward(tmp_path / "theirs", dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"LlamaForSequenceClassification: expected a pad_token_id"):
        model.load_reward(copy.deepcopy(lm))
    want = ours(rm, ENDED)
    assert (theirs(reread(tmp_path / "theirs"), ENDED) - want).abs()[:3].min() > 0.1
    without_end = [row[:-1] for row in ENDED[:3]]
    torch.testing.assert_close(theirs(lm, ENDED[:3]), ours(rm, without_end), rtol=0, atol=1e-10)

    model.save_reward(tmp_path / "ours", rm)
    again = reread(tmp_path / "ours")
    torch.testing.assert_close(theirs(again, ENDED), want, rtol=0, atol=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ours(model.load_reward(tmp_path / "ours", dtype=torch.float64), ENDED), want)


def padded(folder, side):
    """[B, H]: the rows of ENDED in one batch, padded by the tokenizer of the folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    batch = tokenizer.pad({"input_ids": ENDED}, return_tensors="pt")
    with torch.no_grad():
        return reread(folder)(**batch).logits


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [None, 0, 1])
@pytest.mark.parametrize("more", [0, 9], ids=["as wide as the tokenizer", "wider"])
def test_tokenizer_and_config_of_a_written_class_pad_alike(more, pad, side, tmp_path):
    """Tokenizers without padding are given their end token, by this library too.

    On the left padding moves a row's positions, whose angles transformers takes in float32.
    """
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.pad_token = "<end>"
    rm = model.load_reward(
        tiny.llama(vocab_size=len(tokenizer) + more, pad_token_id=pad, dtype=torch.float64), new=True
    )
    rm.score.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    model.save(tmp_path / "rm", rm, tokenizer)
    torch.testing.assert_close(padded(tmp_path / "rm", side), ours(rm, ENDED), rtol=0, atol=5e-6)
    assert tokenizer.pad_token == "<end>"  # the caller's is as it was


@contextlib.contextmanager
def wide_softmax():
    """Gemma 2 takes the softmax of attention in float32 whatever its type; here in the type."""
    plain = torch.nn.functional.softmax

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return plain(x, dim=dim)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain


FAMILIES = (
    "Llama", "Qwen2", "Qwen3", "Mistral", "GPT2", "Gemma2", "Gemma3Text", "Phi3", "GPTNeoX", "OPT",
    "Falcon", "Bloom", "Glm", "StableLm", "Olmo", "SmolLM3", "Zamba2",
)  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.filterwarnings("ignore:packs", "ignore:attention")
def test_folders_of_transformers_load_and_score_the_same_and_back(kind, tmp_path):
    """A folder of theirs in packs is each row alone in their class; ours is read by it with the same scores.

    Gemma 2's softmax in float32 alone makes 3e-7: it adds up in another order in rows of another length. All
    others are as transformers has them.
    """
    classifier(kind).save_pretrained(tmp_path / "theirs")
    softmax = {"Gemma2": wide_softmax}.get(kind, contextlib.nullcontext)
    with softmax():
        want = theirs(reread(tmp_path / "theirs"))
        rm = model.load_reward(tmp_path / "theirs", dtype=torch.float64)
        for budget in (48, 1000):
            torch.testing.assert_close(ours(rm, budget=budget), want, rtol=0, atol=1e-10)
        assert want.std() > 0.3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.save_reward(tmp_path / "ours", rm)
        assert torch.equal(theirs(reread(tmp_path / "ours")), want)


def test_names_come_from_labels(tmp_path):
    lm = classifier("Llama", labels=1)
    assert model.load_reward(copy.deepcopy(lm)).heads == (Head("score"),)
    lm.save_pretrained(tmp_path / "one")
    assert model.load_reward(tmp_path / "one").heads == (Head("score"),)
    two = classifier("Llama")
    assert [h.name for h in model.load_reward(copy.deepcopy(two)).heads] == ["LABEL_0", "LABEL_1"]
    named = model.load_reward(copy.deepcopy(two), heads=("helpful", "safe"))
    assert named.heads == (Head("helpful"), Head("safe"))
    two.config.id2label = {0: "toxic", 1: "fine"}
    assert [h.name for h in model.load_reward(copy.deepcopy(two)).heads] == ["toxic", "fine"]
    with pytest.raises(ValueError, match=r"heads: expected \['toxic', 'fine'\] .*got \['a', 'b'\]; "):
        model.load_reward(copy.deepcopy(two), heads=("a", "b"))
    again = model.save_reward(tmp_path / "two", named)
    assert reread(again).config.id2label == {0: "helpful", 1: "safe"}


def trained_like(pool, dtype=torch.float32):
    """A reward model with calibrated heads that are not 0."""
    heads = (Head("helpful", 0.5, 2.0), Head("format", -1.0, 0.25))
    rm = model.load_reward(tiny.llama(dtype=dtype), new=True, heads=heads, pool=pool)
    g = torch.Generator().manual_seed(0)
    for name, p in rm.named_parameters():
        if not name.startswith("decoder."):
            p.data.copy_(torch.randn(p.shape, generator=g))
    return rm


def saved(folder, rm, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.save_reward(folder, rm, *args)


@pytest.mark.parametrize("pool", ["last", "mean", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_model_is_the_same(pool, dtype, tmp_path):
    """Heads keep their float32 beside weights of 16 bits."""
    rm = trained_like(pool, dtype)
    again = model.load_reward(saved(tmp_path / "rm", rm), dtype=dtype)
    assert (again.heads, again.pool) == (rm.heads, pool)
    assert (
        torch.equal(again.score.weight, rm.score.weight) and again.score.weight.dtype == rm.score.weight.dtype
    )
    assert torch.equal(ours(again), ours(rm)) and ours(rm).std() > 0.3
    twice = model.load_reward(saved(tmp_path / "twice", again), dtype=dtype)
    assert torch.equal(ours(twice), ours(rm))


def test_what_transformers_cannot_hold_is_said(tmp_path):
    for pool in ("mean", "attention"):
        with pytest.warns(UserWarning, match=f"for model.load_reward alone: .* pooling by {pool}"):
            model.save_reward(tmp_path / pool, trained_like(pool))
        assert (tmp_path / pool / "reward_head.safetensors").is_file()
        with pytest.raises(ValueError, match="expected a language model, got a decoder with heads"):
            model.load(tmp_path / pool)
    with pytest.warns(UserWarning, match="no class with heads on MambaModel"):
        model.save_reward(tmp_path / "mamba", model.load_reward(small("Mamba"), new=True))
    assert model.load_reward(tmp_path / "mamba").heads == (Head("score"),)


def test_the_same_folder_may_be_written_again_with_another_pooling(tmp_path):
    """No file of the earlier model may be read with the later one."""
    saved(tmp_path / "rm", trained_like("attention"))
    rm = trained_like("last")
    saved(tmp_path / "rm", rm)
    again = model.load_reward(tmp_path / "rm")
    assert again.pool == "last" and torch.equal(ours(again), ours(rm))


def test_weights_of_a_state_go_into_the_saved_model(tmp_path):
    rm = trained_like("last")
    st = get_strategy()
    _, state = st.init(rm, rft.optim.adamw(1e-2))
    changed = {name: x + 1 for name, x in st.export(state)}
    again = model.load_reward(saved(tmp_path / "rm", rm, changed.items()))
    assert torch.equal(again.score.weight, rm.score.weight + 1)
    st.save_pretrained(tmp_path / "by_strategy", rm, tiny.tokenizer(), changed.items())
    other = model.load_reward(tmp_path / "by_strategy")
    assert torch.equal(ours(other), ours(again)) and other.heads == rm.heads
    with pytest.raises(ValueError, match=r"names of the parameters of RewardModel, got \['lm_head"):
        saved(tmp_path / "c", rm, [("lm_head.weight", torch.zeros(2))])


@pytest.mark.parametrize("pool", ["last", "attention"])
def test_a_saved_model_with_adapters_is_a_plain_one(pool, tmp_path):
    torch.manual_seed(0)
    lm = model.apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1)
    rm = model.load_reward(lm, new=True, pool=pool)
    rm.score.weight.data.normal_()
    again = model.load_reward(saved(tmp_path / "rm", rm))
    assert not any("lora" in n or "base_layer" in n for n, _ in again.named_parameters())
    torch.testing.assert_close(ours(again), ours(rm), rtol=1e-5, atol=1e-5)  # merged weights are rounded
    assert (pool == "last") == (tmp_path / "rm/model.safetensors").read_bytes().__contains__(b"score.weight")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    classifier("Llama", dtype=torch.float32).save_pretrained(folder / "theirs", max_shard_size="20KB")
    for pool in ("last", "attention"):
        saved(folder / pool, trained_like(pool))
    return folder


@pytest.mark.parametrize("kind", ["theirs", "last", "attention"])
def test_a_model_without_memory_gets_its_weights_when_it_is_bound(folders, kind):
    plain, late = (model.load_reward(folders / kind, meta=meta) for meta in (False, True))
    assert all(p.is_meta for p in late.decoder.parameters()) and not late.score.weight.is_meta
    want = ours(plain)
    assert torch.equal(ours(late), want) and want.abs().max() > 0.1
    assert late.heads == plain.heads


def sharded(rank, folder):
    """Scores of two processes, each of which read its own part of the files; and what they save."""
    found = {}
    for kind, options in {"fsdp2": {}, "zero3": {"zero_stage": 3}}.items():
        st = get_strategy(StrategyConfig(**options))
        rm = model.load_reward(folder, meta=True)
        apply, state = st.init(rm, rft.optim.adamw(1e-3))
        exp = packing.scored(ROWS)
        score = st.score(apply, state.params, exp, 1000, fields=("score",)).score
        found[kind] = model.final_scores(score, exp.mask)
        st.save_pretrained(f"{folder}-{kind}", rm, None, st.export(state))
        rft.dist.barrier()
    return found


def test_two_processes_read_and_write_their_parts(folders):
    want = ours(model.load_reward(folders / "attention"))
    for found in ranks.run(2, "test_reward_model_folders:sharded", str(folders / "attention")):
        for got in found.values():
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    for kind in ("fsdp2", "zero3"):
        again = model.load_reward(f"{folders / 'attention'}-{kind}")
        torch.testing.assert_close(ours(again), want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_folders_that_do_not_fit(folders, tmp_path):
    model.save(tmp_path / "lm", tiny.llama(), tiny.tokenizer())
    with pytest.raises(ValueError, match=r"lm: expected a model with heads, got one without; new=True"):
        model.load_reward(tmp_path / "lm")
    assert model.load_reward(tmp_path / "lm", new=True).heads == (Head("score"),)
    for name in ("theirs", "last"):
        with pytest.raises(ValueError, match=r"language model, got .*; model.load_reward"):
            model.load(folders / name)
    with pytest.raises(ValueError, match=r"model: expected a folder, a hub name .* got './nowhere'"):
        model.load_reward("./nowhere")
    with pytest.raises(ValueError, match=r"pool: expected 'last', by which .* got 'mean'"):
        model.load_reward(folders / "theirs", pool="mean")
    with pytest.raises(ValueError, match=r"heads: expected \['helpful', 'format'\] of .*, got \['helpful'\]"):
        model.load_reward(folders / "last", heads=("helpful",))
    new = model.load_reward(folders / "last", heads=("one",), pool="mean", new=True)
    assert new.heads == (Head("one"),) and (new.score.weight == 0).all()


def test_models_whose_head_is_another():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with pytest.raises(ValueError, match=r"head `score` of one matrix, got BertForSequenceClassification"):
        model.load_reward(BertForSequenceClassification(BertConfig(vocab_size=9, **sizes)))


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "expected heads and their pool"),
        ('{"heads": []}', "expected heads and their pool"),
        ('{"pool": "last", "heads": [{"name": "a", "scale": 0}]}', "a: expected a positive scale, got 0"),
        ('{"pool": "last", "heads": [{"name": "a", "scale": NaN}]}', "expected finite numbers, got NaN"),
        ('{"pool": "last", "heads": [{"name": "a", "colour": 1}]}', "colour"),
        ('{"pool": "last", "heads": [{"name": "a"}]}', r"reward_heads.json: expected 2 heads, got \['a'\]"),
        ('{"pool": "mode", "heads": [{"name": "a"}, {"name": "b"}]}', "pool: expected one of last"),
    ],
)
def test_a_description_that_does_not_fit(text, said, tmp_path):
    folder = saved(tmp_path / "rm", trained_like("last"))
    (folder / "reward_heads.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        model.load_reward(folder)


def test_the_description_is_plain(tmp_path):
    folder = saved(tmp_path / "rm", trained_like("last"))
    assert json.loads((folder / "reward_heads.json").read_text()) == {
        "pool": "last",
        "heads": [
            {"name": "helpful", "shift": 0.5, "scale": 2.0},
            {"name": "format", "shift": -1.0, "scale": 0.25},
        ],
    }
