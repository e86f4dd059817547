"""Speculative decoding by vLLM: the same greedy tokens, the model's log-probs and law, and its counters.

The last file by its name: once an engine with drafts has loaded numba, vLLM for CPUs builds no other in the
process (0.32.0: its search for kernels fails).
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from inprocess import NAME, build, gap, needs_vllm, prompts_of, tokenizer

import rft_fn as rft
from rft_fn import engine, model
from rft_fn.engine import speculative, worker

pytestmark = needs_vllm
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
REPEATS = [ids * 3 for ids in prompts_of(1)] * 4  # so that something is found in them


def written(output, values, counts, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """vLLM's stand-in for the kernel that spreads numbers of rows over drafted tokens, with its result."""
    each = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    output.copy_(each.repeat_interleave(counts.diff(prepend=counts.new_zeros(1)).long()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM has Triton there")
def test_a_vllm_that_loses_temperatures_is_refused():
    """It comes first: the tests after it mend what vLLM puts in the place of a kernel."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(**DRAFTS), device_config=SimpleNamespace(device_type="cpu")
    )
    found = worker.drafts_of(config)
    assert found == {
        "method": "ngram",
        "rejection_sample_method": None,
        "enable_adaptive_verification": None,
        "by_temperature": False,
    }
    with pytest.raises(ValueError, match=r"^engine_speculative: expected a vLLM that keeps the temperatures"):
        speculative.check_exact(speculative.OPTION, found)


@pytest.fixture(scope="module")
def mended():
    """vLLM's stand-ins on a CPU, with the one mended that writes to a copy (0.32.0)."""
    from vllm.utils import cpu_triton_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_triton_utils, "_expand_kernel_impl", written)
        yield


@pytest.fixture(scope="module")
def drafting(mended):
    """The engine, with the weights of the embedded default."""
    eng = build(speculative=json.dumps(DRAFTS))
    yield eng
    eng.close()


@pytest.mark.parametrize("stop", [(), ("12", "3")])
def test_greedy_answers_are_those_of_hf_and_drafts_are_counted(drafting, stop):
    sampling = rft.Sampling(temperature=0, max_new=24, stop=stop)
    hf = engine.get_engine(engine.EngineConfig(), NAME, tokenizer())
    before = drafting.status()["drafts"]
    got = drafting.generate(REPEATS, range(4), sampling=sampling)
    want = hf.generate(REPEATS, range(4), sampling=sampling)
    for name in ("tokens", "mask", "length", "truncated"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    drafts = drafting.status()["drafts"]
    assert drafts.steps > before.steps and drafts.tokens > before.tokens


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 12}])
def test_samples_and_log_probs_are_of_the_model(drafting, cut):
    """The mean of -log p on samples is the mean of entropies, if the samples are of p."""
    sampling = rft.Sampling(max_new=12, **cut)
    before = drafting.status()["drafts"]
    rollout = drafting.generate(REPEATS[:1], [7], n=320, sampling=sampling)
    drafted, accepted = (b - a for a, b in zip(before[1:], drafting.status()["drafts"][1:], strict=True))
    assert 10 < accepted < drafted / 2
    lm = model.load(NAME)
    assert gap(lm, rollout, sampling) < 1e-5
    with torch.no_grad():
        z = lm(input_ids=rollout.tokens).logits[:, :-1]
    p = rft.logprob.process_logits(z, sampling).softmax(-1).double()
    surprise = -p.log().nan_to_num(neginf=0.0)
    entropy = (p * surprise).sum(-1)
    spread = (p * surprise.square()).sum(-1) - entropy.square()
    mask = rollout.mask[:, 1:]
    off = (-rollout.logp[:, 1:].double() - entropy)[mask].sum() / math.sqrt(spread[mask].sum())
    assert abs(off) < 4
