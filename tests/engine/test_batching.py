"""How the engine of transformers batches a family: its states are repeated and selected whole, padding that
gets into them is found, and what cannot be batched is sampled all the same."""

import copy
import warnings

import floor
import pytest
import tiny
import torch
import transformers
from families import AT, FAR, far, small
from family_checks import word
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rft_fn as rft
from rft_fn import engine, model, packing, rng, weight
from rft_fn.engine import prompt_media, requests
from rft_fn.engine.hf import cache_rows, fixed_steps, probe
from rft_fn.engine.hf import engine as hf_engine
from rft_fn.engine.hf.fixed_steps import FixedSteps
from rft_fn.engine.hf.row_batch import Batch, CacheSupport, prefill
from rft_fn.engine.hf.sampler import Sampler, filled
from rft_fn.engine.hf.step_memory import StepMemory
from rft_fn.engine.requests import Stop
from rft_fn.model import packed_attention
from rft_fn.rollout import take
from rft_fn.strategy import get_fake_strategy

join, decode_step = Batch.join, Batch.decode_step
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
    packed_attention.warn_once.cache_clear()


def batching_of(lm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return probe.find_cache_support(lm, 0)


@pytest.mark.parametrize("kind", [*PADDED, *ROWS])
def test_the_fastest_way_that_is_right_is_found(kind):
    """With large weights, and with those that transformers starts from; in 16 bits too."""
    for dtype, std in ((torch.float32, 0.3), (torch.float32, 0), (torch.bfloat16, 0.3)):
        assert word(batching_of(small(kind, dtype, std=std))) == ROWS.get(kind, "")


@pytest.mark.parametrize("kind", ["Zamba2", "NemotronH"])
def test_a_state_that_is_not_the_trainers_is_found(kind):
    """These bound time steps below where they read many tokens, and not where they read one."""
    assert word(batching_of(small(kind, torch.float32))) == "no cache"


# log-probs of this one differ from float64's by 1.2e-4 to 1.4e-4 [nats], whichever library makes the products
FLOAT32 = {"Zamba": 3e-4}


@pytest.mark.parametrize("kind", [*PADDED, *ROWS, "Zamba2", "NemotronH"])
def test_samples_are_those_of_each_prompt_alone_and_of_the_trainer(kind):
    """Prompts of many lengths, two in a batch where they may."""
    lm = small(kind, torch.float32)
    sampling = rft.Sampling(temperature=0.9, max_new=7)
    eng = engine.hf(copy.deepcopy(lm), tiny.tokenizer(), batch=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = eng.generate(PROMPTS, KEYS, n=2, sampling=sampling)
        strategy = rft.strategy.get_fake_strategy()
        apply, params = strategy.bind(lm, sampling=sampling)
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    packs = strategy.shard(exp, 64)
    scored = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    assert (scored - r.logp).abs().max() < FLOAT32.get(kind, 1e-4)
    assert (eng.score(r, sampling=sampling) - r.logp).abs().max() < FLOAT32.get(kind, 1e-4)
    assert r.logp[r.mask].min() < -0.1  # there is something to agree about
    for i, prompt in enumerate(PROMPTS):
        alone = eng.generate([prompt], KEYS[i : i + 1], n=2, sampling=sampling)
        for j in range(2):
            row = r.tokens[2 * i + j]
            assert row[: r.length[2 * i + j]].tolist() == alone.tokens[j, : alone.length[j]].tolist()


@pytest.mark.parametrize("kind", ["Llama", "Bloom", "Qwen3Next", "Lfm2", "DeepseekV3", "Gemma3Text"])
def test_buffers_give_what_transformers_own_layers_give(kind):
    """The same tokens and log-probs, bit for bit, while rows end at different times."""
    lm = small(kind, torch.float32)
    # joins drop columns of padding, which moves the rounding
    way = batching_of(lm)._replace(joins=False, shares=False)
    assert way.room
    sampling = rft.Sampling(temperature=0.9, max_new=90)
    ids, shown = [list(p) for p in PROMPTS], prompt_media.text(PROMPTS)
    limits = [90, 3, 7, 90, 12, 1, 80, 5, 5, 90]
    asked = requests.Request(PROMPTS, KEYS, 2, sampling, limits).rows()
    found = []
    for batching in (way, way._replace(room=False)):
        sampler = Sampler(lm, batching, sampling, Stop(None, frozenset(), ()), 0, 10)
        with torch.no_grad():
            found.append(sampler.responses(ids, shown, asked))
    assert max(len(x.tokens) for x in found[0]) > 64 + 16
    assert found[0] == found[1]


LIMITS = [3, 40, 7, 1, 5, 30, 9, 2, 6, 12]  # one row goes on long after the others


def sampled(
    lm,
    batching,
    batch,
    prompts=PROMPTS,
    keys=KEYS,
    limits=LIMITS,
    *,
    ends=(),
    every=1,
    warm=None,
    steps=None,
    **chosen,
):
    sampling = rft.Sampling(max_new=max(limits), **{"temperature": 0.9} | chosen)
    sampler = Sampler(lm, batching, sampling, Stop(None, frozenset(ends), ()), 0, batch, every, steps)
    with torch.no_grad():
        asked = requests.Request(prompts, keys, 2, sampling, limits, temperature=warm).rows()
        return sampler.responses(prompts, prompt_media.text(prompts), asked)


def same(got, want, lm):
    """The same tokens and ends; log-probs but for the rounding of products of other sizes."""
    assert [x.tokens for x in got] == [x.tokens for x in want]
    assert [x.ended for x in got] == [x.ended for x in want]
    bound = tiny.logp_rounding(lm)
    for x, y in zip(got, want):
        torch.testing.assert_close(torch.tensor(x.logp), torch.tensor(y.logp), rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "Qwen3Next", "Mamba", "RecurrentGemma"])
def test_rows_are_the_same_however_seldom_the_host_looks(kind, monkeypatch):
    """Rows that end early, by tokens and by limits, join and leave at every seventh token only."""
    lm = small(kind, torch.float32)
    way = batching_of(lm)
    ends = range(0, lm.config.vocab_size, 16)
    want = sampled(lm, way, 4, ends=ends)
    looked = []
    step = Sampler._step
    monkeypatch.setattr(Sampler, "_step", lambda own, rows: looked.append(1) or step(own, rows))
    sampled(lm, way, 4, ends=ends)
    often = len(looked)
    looked.clear()
    same(sampled(lm, way, 4, ends=ends, every=7), want, lm)
    assert len(looked) < 0.7 * often
    assert {x.ended for x in want} == {True, False}


DRAWS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "a temperature for each row": {"warm": [0, 0.5, 1, 1.5, 0.9] * 2},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "both": {"top_k": 9, "top_p": 0.7},
}


@pytest.mark.parametrize(("kind", "name"), [("GPT2", "plain"), *(("Llama", name) for name in DRAWS)])
def test_steps_of_fixed_shapes_give_the_same_rows(kind, name, monkeypatch):
    """Rows that end early, join and leave; in buffers that grow and are moved to the front."""
    lm = small(kind, torch.float32)
    way, fixed = batching_of(lm), probe.find_cache_support(lm, 0, fixed=True)
    assert fixed.fixed and fixed.shares and not way.fixed
    ran = []
    run = FixedSteps.run
    monkeypatch.setattr(FixedSteps, "run", lambda own, *args: run(own, *args) + (ran.append(own.shape) or ()))
    cases = [(LIMITS, range(0, 64, 16))]
    if name == "plain":
        cases.append(([100, 5, 5, 5, 90, 5, 3, 5, 5, 90], ()))
    for limits, ends in cases:
        want = sampled(lm, way, 4, limits=limits, ends=ends, **DRAWS[name])
        for steps in (fixed, fixed._replace(shares=False)):
            same(sampled(lm, steps, 4, limits=limits, ends=ends, every=7, **DRAWS[name]), want, lm)
    assert {shape[0] for shape in ran} >= {2, 4}
    assert {shape[1] for shape in ran} >= ({64, 128} if name == "plain" else {64})


@pytest.mark.parametrize("kind", ["Bloom", "Gemma3Text", "Mamba"])
def test_steps_of_fixed_shapes_need_attention_of_ours(kind):
    """Biases by position, windows and states are left to the model."""
    assert not probe.find_cache_support(small(kind, torch.float32), 0, fixed=True).fixed


def test_a_row_waits_where_top_p_may_go_further(monkeypatch):
    """Steps that look at 3 ranks leave its next token to a draw from all, and then look at more."""
    lm = small("Llama", torch.float32)
    fixed = probe.find_cache_support(lm, 0, fixed=True)
    monkeypatch.setattr(fixed_steps, "_RANKS", 3)
    waited = []
    count = FixedSteps.count_unsure
    monkeypatch.setattr(
        FixedSteps, "count_unsure", lambda own, rows: waited.append((rows, own.ranks)) or count(own, rows)
    )
    want = sampled(lm, batching_of(lm), 4, ends=range(0, 64, 16), top_p=0.8)
    same(sampled(lm, fixed, 4, ends=range(0, 64, 16), every=7, top_p=0.8), want, lm)
    assert waited[0][0] > 0 and {ranks for _, ranks in waited} == {3, 48}


def test_a_graph_that_cannot_be_captured_is_tried_once(monkeypatch):
    """Steps then run one by one, here for want of a driver; the next call does not try again."""
    lm = small("Llama", torch.float32)
    fixed = probe.find_cache_support(lm, 0, fixed=True)
    want = sampled(lm, fixed, 4, every=7)
    start, capture, tried = FixedSteps.__init__, FixedSteps._capture, []

    def captures(own, *args, **kwargs):
        start(own, *args, **kwargs)
        own.captures = lm not in fixed_steps._UNCAPTURED

    monkeypatch.setattr(FixedSteps, "__init__", captures)
    monkeypatch.setattr(FixedSteps, "_capture", lambda own: tried.append(own) or capture(own))
    with pytest.warns(UserWarning, match="sampling: LlamaForCausalLM runs without a CUDA graph: ") as said:
        assert sampled(lm, fixed, 4, every=7) == want
    assert sampled(lm, fixed, 4, every=7) == want
    assert len(said) == len(tried) == 1


def test_a_failed_capture_gives_the_stream_back(monkeypatch):
    """torch.cuda.graph leaves its own stream current where the end of a capture raises (torch 2.11)."""
    current, entered = ["the user's"], []

    class Stream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            entered.append(self.stream)

        def __exit__(self, *error):
            current[0] = self.stream

    class Graph:
        def __init__(self, graph, pool, capture_error_mode):
            pass

        def __enter__(self):
            current[0] = "the capture's"

        def __exit__(self, *error):
            raise RuntimeError("operation failed due to a previous error during capture")

    lm = small("Llama", torch.float32)
    fixed = probe.find_cache_support(lm, 0, fixed=True)
    start = FixedSteps.__init__

    def captures(own, *args, **kwargs):
        start(own, *args, **kwargs)
        own.captures = lm not in fixed_steps._UNCAPTURED

    monkeypatch.setattr(FixedSteps, "__init__", captures)
    monkeypatch.setattr(fixed_steps, "_current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    with pytest.warns(UserWarning, match="previous error during capture"):
        sampled(lm, fixed, 4, every=7)
    assert entered == current == ["the user's"]


class Recorded:
    """A CUDA graph on the CPU: its operations run again on the tensors that they had, wherever those are."""

    def __init__(self):
        self.calls = []

    def pool(self):
        return "the pool"

    def replay(self):
        for func, args, kwargs, outs in self.calls:
            for out, new in zip(outs, tree_leaves(func(*args, **kwargs))):
                out.copy_(new)


class Recording(TorchDispatchMode):
    """A capture: nothing has happened after it."""

    def __init__(self, graph, pool, capture_error_mode):
        super().__init__()
        assert pool in (None, "the pool")
        self.graph, self.before = graph, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        infos = [x.alias_info for x in func._schema.arguments]
        for x, info in zip(args, infos):
            if info is not None and info.is_write:
                self.before.append((x, x.clone()))
        found = func(*args, **kwargs)
        own = all(x.alias_info is None for x in func._schema.returns)  # neither a view nor an argument
        self.graph.calls.append((func, args, kwargs, tree_leaves(found) if own else []))
        return found

    def __exit__(self, *error):
        super().__exit__(*error)
        for x, before in reversed(self.before):
            x.copy_(before)


@pytest.fixture
def graphs(monkeypatch):
    """Capture as on a GPU; return the list that graphs are noted in."""
    made = []

    class Noted(Recorded):
        def __init__(self):
            super().__init__()
            made.append(self)

    start = FixedSteps.__init__

    def captures(own, *args, **kwargs):
        start(own, *args, **kwargs)
        own.captures = True

    monkeypatch.setattr(FixedSteps, "__init__", captures)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Noted)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    return made


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", ["plain", "a temperature for each row", "top-p"])
def test_graphs_are_captured_once_and_kept_from_call_to_call(name, shares, graphs):
    """One for each shape, and one memory for all: calls of other prompts, limits and ends give their rows."""
    lm = small("Llama", torch.float32)
    fixed = probe.find_cache_support(lm, 0, fixed=True)._replace(shares=shares)
    way = batching_of(lm)._replace(shares=shares)
    steps = StepMemory()
    long = [100, 5, 5, 5, 90, 5, 3, 5, 5, 90]
    calls = [
        {"limits": LIMITS, "ends": range(0, 64, 16)},
        {"limits": long},
        {"limits": LIMITS[::-1], "prompts": PROMPTS[::-1], "ends": range(5, 64, 16)},
    ]
    made = []
    for call in [*calls, *calls, *calls]:
        graphs.clear()
        want = sampled(lm, way, 4, **call, **DRAWS[name])
        same(sampled(lm, fixed, 4, every=7, steps=steps, **call, **DRAWS[name]), want, lm)
        made.append(len(graphs))
    assert made[0] > 1 and made[1] > 1 and made[-3:] == [0, 0, 0]  # tensors grew in the second call
    places = {x.data_ptr() for x in steps._places.values()}
    want = sampled(lm, way, 4, top_k=7)
    same(sampled(lm, fixed, 4, every=7, steps=steps, top_k=7), want, lm)  # another distribution, other graphs
    assert graphs and places == {x.data_ptr() for x in steps._places.values()}


@pytest.mark.parametrize("sleep", [True, False])
def test_graphs_are_forgotten_where_weights_leave_their_place(sleep, graphs, monkeypatch):
    """An engine that sleeps captures again; one that does not takes new weights in the old place."""
    lm = small("Llama", torch.float32)
    fixed = probe.find_cache_support(lm, 0, fixed=True)
    monkeypatch.setattr(hf_engine, "find_cache_support", lambda lm, pad, **options: fixed)
    monkeypatch.setattr(
        hf_engine, "Sampler", lambda *args, **more: Sampler(*args, **more)._replace(check_every=4)
    )
    eng = engine.hf(copy.deepcopy(lm), tiny.tokenizer(), batch=4, sleep=sleep)
    made, how = [], {"n": 2, "sampling": rft.Sampling(max_new=12)}
    for seed in (0, 1, 0, 1, 0, 1):
        other = small("Llama", torch.float32)
        for p in other.parameters():
            p.data += 0.1 * p.data.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        eng.load(other.named_parameters(), version=seed)
        eng.sleep()
        graphs.clear()
        got = eng.generate(PROMPTS, KEYS, **how)
        made.append(len(graphs))
        with monkeypatch.context() as patch:
            patch.setattr(hf_engine, "find_cache_support", lambda lm, pad, **options: batching_of(lm))
            want = engine.hf(other, tiny.tokenizer(), batch=4).generate(PROMPTS, KEYS, **how)
        assert torch.equal(got.tokens, want.tokens)
    assert made[0] and [bool(x) for x in made[-2:]] == [sleep, sleep]


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("Llama", True),
        ("Llama", False),
        ("Bloom", False),
        ("GPT2", True),
        ("GPT2", False),
        ("DeepseekV3", False),
    ],
)
def test_samples_are_the_same_whenever_a_prompt_joins(kind, shares, monkeypatch):
    """Beside shorter rows and longer ones, as soon as there is room, and in any order; with and without
    prompts that are held once, of whose rows a cache has only their own tokens."""
    lm = small(kind, torch.float32)
    way = batching_of(lm)
    assert way.joins and (way.shares or not shares)
    way = way._replace(shares=shares)
    joined = []
    monkeypatch.setattr(Batch, "join", lambda own, new: joined.append(own.seen.shape) or join(own, new))
    want = sampled(lm, way._replace(joins=False, shares=False), 10)
    assert not joined
    for batch in (2, 3, 5):
        same(sampled(lm, way, batch), want, lm)
    assert len(joined) >= 4
    back = sampled(
        lm, way, 4, PROMPTS[::-1], KEYS[::-1], [x for i in range(8, -1, -2) for x in LIMITS[i : i + 2]]
    )
    assert [x.tokens for x in back] == [want[i + j].tokens for i in range(8, -1, -2) for j in (0, 1)]


def test_a_long_row_does_not_run_alone(monkeypatch):
    """40 tokens of one row, and 75 of the others beside it: far fewer steps than one after another."""
    lm = small("Llama", torch.float32)
    widths = []
    monkeypatch.setattr(
        Batch, "decode_step", lambda own, lm, token: widths.append(len(token)) or decode_step(own, lm, token)
    )
    way = batching_of(lm)
    widths.clear()
    sampled(lm, way, 4)
    steps = len(widths)
    widths.clear()
    sampled(lm, way._replace(joins=False, shares=False), 4)
    assert steps < 0.8 * len(widths)


@pytest.mark.parametrize("kind", ["Mamba", "Qwen3Next", "Gemma3Text", "xLSTM", "FalconH1"])
def test_rows_of_states_and_windows_are_not_joined(kind):
    """Only layers of keys and values alone get room: one that holds a state beside them stays as it is."""
    way = batching_of(small(kind, torch.float32))
    assert not way.joins
    assert way.room == (kind in ("Qwen3Next", "Gemma3Text"))


@given(st.sets(st.integers(0, 30)))
def test_rows_that_stay_keep_their_places(keep):
    """The first places hold all of them, and only those from behind the end move."""
    keep = sorted(keep)
    found = filled(keep)
    assert sorted(found) == keep
    assert all(k == place for place, k in enumerate(found) if k < len(keep))


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Next", "FalconH1", "MiniMax", "xLSTM", "Zamba"])
def test_every_tensor_of_a_state_with_rows_is_selected(kind):
    """Keys, values, convolutions, recurrent states, in whatever they are kept: rows [1, 1, 0] of two."""
    lm = small(kind, torch.float32)
    with torch.no_grad():
        one = prefill(lm, CacheSupport(rows={}), [[3, 4, 5]], [1], 0).cache
        two = prefill(lm, CacheSupport(rows={}), [[3, 4, 5], [6, 7, 8]], [1, 1], 0).cache
    rows = cache_rows.compare(one, two)
    before = {path: x.clone() for path, x in cache_rows.tensors(two).items()}
    after = cache_rows.tensors(cache_rows.select(two, rows, torch.tensor([1, 1, 0]), [0, 2]))
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
    rows = cache_rows.compare(one, two)
    assert rows[("pair", 1, 0)] == 1
    assert sorted(map(len, rows)) == [2, 2, 3, 3]
    got = cache_rows.select(two, rows, torch.tensor([1]), [0])
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
        cache_rows.compare([torch.zeros(1)], [torch.zeros(2), torch.zeros(2)])


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
        probe.find_cache_support(lm, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe.find_cache_support(lm, 0)


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
    monkeypatch.setattr(probe, "prefill", full)
    with pytest.raises(torch.OutOfMemoryError):
        probe.find_cache_support(lm, 0)


AROUND = [
    [3, 4, 5, 6, 7],
    [8, 9],
    list(range(10, 10 + AT - 1)),
    list(range(20, 20 + AT)),
    list(range(30, 51)),
]


def drawn_from(lm, r):
    """Log-probs [B, S] by transformers' forward of what stood before each token."""
    out = torch.zeros(r.tokens.shape)
    for i, t in r.mask.nonzero().tolist():
        z = lm(input_ids=r.tokens[i : i + 1, :t], use_cache=False).logits[0, -1]
        out[i, t] = z.log_softmax(-1)[r.tokens[i, t]]
    return out


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in sorted(FAR)
        if n not in ("Llama dynamic", "Doge") and hasattr(transformers, f"{n.split()[0]}Config")
    ],
)
def test_rows_that_cross_a_threshold_are_sampled_as_they_are_scored(name):
    """Prompts on both sides of it, in one batch: by the trainer, and by the engine's own score."""
    if name in ("Llama dynamic", "Doge"):
        return  # Doge chooses keys by scores, equal for equal tokens: rows with repeats are not defined
    eng = engine.hf(far(name), tiny.tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = eng.generate(AROUND, [1, 2, 3, 4, 5], n=2, sampling=rft.Sampling(max_new=13))
        st = get_fake_strategy()
        apply, params = st.bind(far(name))
        trainer = st.score(apply, params, r, 100).logp
    bound = FLOAT32.get(name, 1e-4)
    torch.testing.assert_close(r.logp, trainer, rtol=0, atol=bound)
    assert int(r.length.max()) > AT + 4 and r.logp.min() < -1
    floor.require(f"{name} padding")
    torch.testing.assert_close(r.logp, eng.score(r), rtol=0, atol=bound)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Phi3 longrope", "Llama longrope", "Phimoe longrope"])
def test_rotary_factors_switch_where_transformers_switches_them(name):
    """Each token is drawn from transformers' forward of those before it; with a cache on both sides."""
    eng = engine.hf(far(name), tiny.tokenizer())
    sampling = rft.Sampling(max_new=13)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = eng.generate(AROUND, [1, 2, 3, 4, 5], n=2, sampling=sampling)
    torch.testing.assert_close(r.logp, drawn_from(far(name), r), rtol=0, atol=1e-4)
    way = batching_of(far(name))
    assert (word(way), way.switch) == ("by length", AT)


def test_greedy_tokens_across_the_switch_are_those_of_transformers():
    """Its own `generate` drops the cache there too."""
    floor.require("longrope generate")
    lm = far("Phi3 longrope")
    lm.generation_config.eos_token_id = None
    eng = engine.hf(far("Phi3 longrope"), tiny.tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = eng.generate(AROUND[:2], [1, 2], n=1, sampling=rft.Sampling(temperature=0, max_new=20))
        for i, prompt in enumerate(AROUND[:2]):
            want = lm.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)
            n = int(r.length[i])
            assert r.tokens[i, :n].tolist() == want[0, :n].tolist()
    assert int(r.length.max()) > AT + 4


def test_a_score_does_not_depend_on_the_rows_beside_it():
    """Short rows beside rows that have passed the switch, whose factors are not theirs."""
    eng = engine.hf(far("Phi3 longrope"), tiny.tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = eng.generate([AROUND[1], AROUND[4]], [1, 2], n=2, sampling=rft.Sampling(max_new=6))
        assert r.length[:2].max() <= AT < r.length[2:].min()
        order = torch.tensor([0, 2, 1, 3])
        torch.testing.assert_close(eng.score(take(r, order)), r.logp[order], rtol=0, atol=1e-4)


def test_a_row_that_is_continued_across_the_switch_is_the_whole_row():
    """Its second piece begins with what the first one drew."""
    eng = engine.hf(far("Phi3 longrope"), tiny.tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        many = eng.generate([AROUND[0]] * 8, range(8), n=1, sampling=rft.Sampling(max_new=20))
        key = int(many.length.argmax())
        n = int(many.length[key])
        assert n > 22
        for k in (4, 11, 12, 15):  # before, at and behind the switch
            begun = many.tokens[key, : 5 + k].tolist()
            sampling = rft.Sampling(max_new=20)
            rest = eng.generate([begun], [key], n=1, sampling=sampling, max_new=[20 - k], start=[k])
            assert rest.tokens[0].tolist() == many.tokens[key, :n].tolist()
            torch.testing.assert_close(rest.logp[0, 5 + k :], many.logp[key, 5 + k : n], rtol=0, atol=1e-4)
