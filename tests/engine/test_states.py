"""Sampling of families whose layers carry states: padding does not enter one, and a prompt's is copied."""

import copy
import re
import warnings

import pytest
import test_continue
import tiny
import torch
import transformers
from families import small

import rft_fn as rft
from rft_fn import engine, model, optim, packing, rng, sync, weight
from rft_fn.strategy import get_fake_strategy

pytestmark = pytest.mark.slow

KINDS = (
    "BailingHybrid", "Bamba", "FalconH1", "FalconMamba", "GraniteMoeHybrid", "InklingText", "Jamba",
    "KimiLinear", "LaraMini", "Lfm2", "Lfm2Moe", "Lfm3", "Mamba", "Mamba2", "MiniMax", "NemotronH",
    "OlmoHybrid", "Qwen3Next", "Qwen3_5MoeText", "Qwen3_5Text", "Qwen4ExpText", "RecurrentGemma", "Rwkv",
    "Zamba", "Zamba2",
)  # fmt: skip
NOISY = {"Zamba": 3e-4}  # its log-probs in float32 differ from those in float64 by as much


def prompts():
    """Of many lengths: within a chunk, longer than one, a single token, two of one length."""
    g = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (n,), generator=g).tolist() for n in (5, 70, 1, 20, 20, 9)]


PROMPTS = prompts()
KEYS = [rng.fold_in(0, i) for i in range(len(PROMPTS))]
SAMPLING = rft.Sampling(temperature=0.9, max_new=7)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module", params=KINDS)
def lm(request):
    """A small model, which the trainer has bound: its layers can read packs as rows."""
    if not hasattr(transformers, f"{request.param}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    lm = small(request.param, torch.float32)
    lm.tolerance = NOISY.get(request.param, 1e-4)
    get_fake_strategy().bind(lm)
    return lm


def test_samples_of_a_batch_are_those_of_each_prompt_and_of_the_trainer(lm):
    """Three samples of each prompt, which is read once: its state is copied."""
    eng = engine.hf(lm, tiny.tokenizer(), batch=4)
    r = eng.generate(PROMPTS, KEYS, n=3, sampling=SAMPLING)
    for i, prompt in enumerate(PROMPTS):
        alone = eng.generate([prompt], KEYS[i : i + 1], n=3, sampling=SAMPLING)
        for j in range(3):
            b = 3 * i + j
            size = int(r.length[b])
            assert r.tokens[b, :size].tolist() == alone.tokens[j, : alone.length[j]].tolist()
            torch.testing.assert_close(r.logp[b, :size], alone.logp[j, :size], rtol=0, atol=lm.tolerance)

    st = get_fake_strategy()
    apply, params = st.bind(copy.deepcopy(lm), sampling=SAMPLING)
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    packs = st.shard(exp, 400)
    assert len(packs) < len(r.tokens) / 2
    scored = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    torch.testing.assert_close(scored, r.logp, rtol=0, atol=lm.tolerance)
    torch.testing.assert_close(eng.score(r, sampling=SAMPLING), r.logp, rtol=0, atol=lm.tolerance)
    assert r.logp[r.mask].min() < -0.1  # there is something to agree about


def test_a_response_in_pieces_is_the_whole_one(lm):
    """What was sampled before is read at once, where it was read token by token."""
    eng = engine.hf(lm, tiny.tokenizer(), batch=4)
    whole = eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)
    piece = [1 + b % 6 for b in range(2 * len(PROMPTS))]
    got, rounds = test_continue.in_pieces(eng, PROMPTS, KEYS, 2, SAMPLING, piece)
    assert rounds > 3
    test_continue.same(got, whole, lm.tolerance)


def test_the_canary_knows_weights_that_arrived_and_one_that_did_not(lm, tmp_path):
    model.save(tmp_path, lm, None)
    st = get_fake_strategy()
    _, state = st.init(copy.deepcopy(lm), optim.adamw(1e-3))
    eng = engine.hf(copy.deepcopy(lm), tiny.tokenizer(), batch=4)
    probe = sync.canary(st, state, eng, str(tmp_path), PROMPTS[:4], version=1, key=3)
    assert max(probe.noisy, probe.floor) < lm.tolerance

    # a projection of the first layer with a state keeps its value
    layer = re.compile("linear_attn|mamba|mixer|conv|temporal_block|attention|self_attn")
    name = next(n for n, x in state.params.items() if (layer.search(n) and "proj" in n) or ".key." in n)
    old = state.params[name].detach().clone()

    def load(weights, *, version):
        return eng.load(((n, old if n == name else x) for n, x in weights), version=version)

    with pytest.raises(sync.CanaryError, match=name):
        sync.canary(st, state, eng._replace(load=load), str(tmp_path), PROMPTS[:4], version=2, key=3)
