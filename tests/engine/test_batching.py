"""How the engine of transformers batches a family: its states are repeated and selected whole, padding that
gets into them is found, and what cannot be batched is sampled all the same."""

import copy
import warnings

import pytest
import tiny
import torch
from families import small

import rft_fn as rft
from rft_fn import engine, model, packing, rng, weight
from rft_fn.engine.hf import cache, probe
from rft_fn.engine.hf.batch import Batching, start
from rft_fn.model import attention

PADDED = (
    "Llama",
    "Gemma2",
    "GptOss",
    "Bloom",
    "Qwen3Next",
    "Mamba",
    "Mamba2",
    "FalconH1",
    "Lfm2",
    "MiniMax",
    "Zamba",
)
ROWS = {"xLSTM": "by length", "Rwkv": "by row", "RecurrentGemma": "no cache"}
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17], [18, 19]]
KEYS = [rng.fold_in(0, i) for i in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def _said():
    """Each test hears each message anew."""
    attention.warn_once.cache_clear()


def batching_of(lm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return probe.find_batching(lm, 0)


def word(way):
    """The words of the table of models."""
    if way.padded:
        return ""
    if way.rows is None:
        return "no cache"
    return "by row" if way.single else "by length"


@pytest.mark.parametrize("kind", [*PADDED, *ROWS])
def test_the_fastest_way_that_is_right_is_found(kind):
    """With large weights, and with those that transformers starts from; in 16 bits too."""
    for dtype, std in ((torch.float32, 0.3), (torch.float32, 0), (torch.bfloat16, 0.3)):
        assert word(batching_of(small(kind, dtype, std=std))) == ROWS.get(kind, "")


@pytest.mark.parametrize("kind", ["Zamba2", "NemotronH"])
def test_a_state_that_is_not_the_trainers_is_found(kind):
    """These bound time steps below where they read many tokens, and not where they read one."""
    assert word(batching_of(small(kind, torch.float32))) == "no cache"


@pytest.mark.parametrize("kind", [*PADDED, *ROWS, "Zamba2", "NemotronH"])
def test_samples_are_those_of_each_prompt_alone_and_of_the_trainer(kind):
    """Prompts of many lengths, two in a batch where they may."""
    lm = small(kind, torch.float32)
    sampling = rft.Sampling(temperature=0.9, max_new=7)
    eng = engine.hf(copy.deepcopy(lm), tiny.tokenizer(), batch=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = eng.generate(PROMPTS, KEYS, n=2, sampling=sampling)
        st = rft.strategy.get_fake_strategy()
        apply, params = st.bind(lm, sampling=sampling)
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    packs = st.shard(exp, 64)
    scored = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    assert (scored - r.logp).abs().max() < 1e-4
    assert (eng.score(r, sampling=sampling) - r.logp).abs().max() < 1e-4
    assert r.logp[r.mask].min() < -0.1  # there is something to agree about
    for i, prompt in enumerate(PROMPTS):
        alone = eng.generate([prompt], KEYS[i : i + 1], n=2, sampling=sampling)
        for j in range(2):
            row = r.tokens[2 * i + j]
            assert row[: r.length[2 * i + j]].tolist() == alone.tokens[j, : alone.length[j]].tolist()


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Next", "FalconH1", "MiniMax", "xLSTM", "Zamba"])
def test_every_tensor_of_a_state_with_rows_is_selected(kind):
    """Keys, values, convolutions, recurrent states, in whatever they are kept: rows [1, 1, 0] of two."""
    lm = small(kind, torch.float32)
    with torch.no_grad():
        one = start(lm, Batching(rows={}), [[3, 4, 5]], 1, 0).cache
        two = start(lm, Batching(rows={}), [[3, 4, 5], [6, 7, 8]], 1, 0).cache
    rows = cache.compare(one, two)
    before = {path: x.clone() for path, x in cache.tensors(two).items()}
    after = cache.tensors(cache.select(two, rows, torch.tensor([1, 1, 0])))
    assert after.keys() == before.keys()
    held = [path for path, x in before.items() if x.numel() > 1]
    assert set(held) == set(rows)
    for path in held:
        assert torch.equal(after[path], before[path].index_select(rows[path], torch.tensor([1, 1, 0])))


class Kept:
    """A state in containers of every kind, with one tensor in two places and a way back to itself."""

    def __init__(self, rows):
        x = torch.arange(rows * 3.0).view(rows, 3)
        self.list, self.dict, self.pair = [x, 7, None], {"deep": {"x": x + 1}}, (x + 2, (x.T + 3,))
        self.again, self.me, self.count = x, self, torch.tensor(5)


def test_a_state_in_containers_of_every_kind():
    one, two = Kept(1), Kept(2)
    rows = cache.compare(one, two)
    assert rows[("pair", 1, 0)] == 1
    assert sorted(map(len, rows)) == [2, 2, 3, 3]
    got = cache.select(two, rows, torch.tensor([1]))
    want = torch.tensor([[3.0, 4, 5]])
    assert got is two and two.me is two
    assert torch.equal(two.list[0], want)
    assert two.again is two.list[0]
    assert torch.equal(two.dict["deep"]["x"], want + 1)
    assert torch.equal(two.pair[0], want + 2)
    assert torch.equal(two.pair[1][0], want.T + 3)
    assert two.count == 5 and two.list[1:] == [7, None]


def test_states_of_other_tensors_are_refused():
    with pytest.raises(ValueError, match="cache: expected the same tensors for one row and two, got 1, 2"):
        cache.compare([torch.zeros(1)], [torch.zeros(2), torch.zeros(2)])


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("xLSTM", "xLSTMForCausalLM gets prompts of one length at a time"),
        ("Rwkv", "RwkvForCausalLM gets one row at a time"),
        ("RecurrentGemma", "RecurrentGemmaForCausalLM reads all tokens anew for each new one"),
    ],
)
def test_a_slower_way_is_said_once(kind, what):
    lm = small(kind, torch.float32)
    with pytest.warns(UserWarning, match=f"sampling: {what}"):
        probe.find_batching(lm, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe.find_batching(lm, 0)


def test_what_padding_adds_to_a_state_is_found_in_16_bits():
    """A bias of a thousandth, far below the rounding of logits, that padding adds to a convolution."""
    lm = small("Mamba2", torch.bfloat16)
    mixer = lm.backbone.layers[0].mixer
    mixer.in_proj.bias = torch.nn.Parameter(torch.full((mixer.in_proj.out_features,), 1e-3).bfloat16())
    assert word(batching_of(lm)) == "by length"


def test_a_model_without_finite_weights_is_not_slowed_down():
    lm = small("Llama", torch.float32)
    lm.model.norm.weight.data[0] = torch.nan
    assert batching_of(lm).padded


def test_no_memory_is_no_answer(monkeypatch):
    """A device that is full says nothing of the model."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    lm = small("Llama", torch.float32)
    monkeypatch.setattr(probe, "start", full)
    with pytest.raises(torch.OutOfMemoryError):
        probe.find_batching(lm, 0)
