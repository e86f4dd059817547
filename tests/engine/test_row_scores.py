"""Scores of the engine of transformers: the model's own logits, made of a few tokens at a time."""

import warnings

import pytest
import tiny
import torch
import transformers
from families import FAMILIES, small

import rft_fn as rft
from rft_fn.engine.hf.row_scores import score_rows
from rft_fn.logprob import log_probs_from_logits, process_logits

USUAL = ("Cohere", "FalconH1", "GPTJ", "Gemma2", "Granite", "Llama", "OPT", "Qwen3Next", "Rwkv")
KINDS = [
    pytest.param(kind, marks=() if kind in USUAL else pytest.mark.slow)
    for kind in sorted(FAMILIES)
    if hasattr(transformers, f"{kind}Config")
]
SAMPLINGS = [rft.Sampling(), rft.Sampling(temperature=0.7, top_p=0.8), rft.Sampling(top_k=5)]


def rows():
    """Nine rows of 4 to 22 tokens, the prompt of each a third of them."""
    exp = tiny.experience(seed=3, rows=9, longest=12)
    return tiny.rollout(exp)


def whole(lm, r, sampling):
    """[B, S]: by whole logits of all rows, as the definition is."""
    read = torch.arange(r.tokens.shape[1]) < (r.length - 1)[:, None]
    inputs = {"input_ids": torch.where(read, r.tokens, 0), "attention_mask": read.long(), "use_cache": False}
    position = torch.arange(r.tokens.shape[1]).expand(r.tokens.shape)
    try:
        logits = lm(**inputs, position_ids=position).logits
    except TypeError:  # a model without positions
        logits = lm(**inputs).logits
    target = r.tokens[:, 1:]
    z = process_logits(logits[:, :-1], sampling, keep=target)
    logp = torch.nn.functional.pad(log_probs_from_logits(z, target), (1, 0))
    return torch.where(r.mask, logp, 0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_slices_of_the_head_give_what_whole_logits_give(kind):
    """Of every family, whatever comes after its decoder: a bias, a cap, a scale."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lm = small(kind, torch.float32).eval()
        r = rows()
        head, most = lm.get_output_embeddings(), []
        handle = head.register_forward_hook(lambda _, __, out: most.append(out[..., 0].numel()))
        for sampling in SAMPLINGS:
            want = whole(lm, r, sampling)
            most.clear()
            got = score_rows(lm, r, sampling, pad=0, workspace_mb=1e-6)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
            assert max(most) <= 16, "whole logits"
            assert len(most) == 1 + -(-int(r.mask.sum()) // 16)
        handle.remove()
    assert want[r.mask].std() > 0.1
    assert not {"forward"} & set(vars(lm)) and not any("forward" in vars(m) for m in lm.modules())
