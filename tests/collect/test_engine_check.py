"""Trainer and engine by depth: planted faults are named by the depth at which they begin."""

import copy

import numpy as np
import pytest
import tiny
import torch
from test_house import load_script

import rft_fn as rft
from rft_fn.strategy import get_fake_strategy

LIMIT = 1e-3
WORDS = range(3, 20)
WIDE = {"max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def mistral(window=None):
    """A model with a window of so many tokens; the weights are the same with another one."""
    from transformers import MistralConfig, MistralForCausalLM

    lm = tiny.llama(**WIDE)
    sizes = {key: getattr(lm.config, key) for key in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(
        **sizes, **WIDE, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, sliding_window=window
    )
    other = MistralForCausalLM(config)
    other.load_state_dict(lm.state_dict())
    return other


def shifted(lm, since):
    """The model with positions that are one too many from `since` on."""
    rotary = lm.model.rotary_emb
    plain = rotary.forward

    def forward(x, position_ids, *args, **more):
        return plain(x, position_ids + (position_ids >= since), *args, **more)

    rotary.forward = forward
    return lm


def leaking(engine, lm):
    """The engine of a recurrent model that does not reset its state: rows go on from a few other tokens."""
    other = torch.tensor([[3, 9, 4, 12, 7]])

    def score(rollout, *, sampling=None):
        rows = torch.cat([other.expand(len(rollout.tokens), -1), rollout.tokens], 1)
        with torch.no_grad():
            logp = lm(input_ids=rows).logits.log_softmax(-1)[:, other.shape[1] - 1 : -1]
        return logp.gather(-1, rollout.tokens[..., None])[..., 0] * rollout.mask

    def generate(*args, **more):
        found = engine.generate(*args, **more)
        return rft.tree.replace(found, logp=score(found))

    return engine._replace(generate=generate, score=score)


# name -> (the trainer's model, the engine's, the first position of the depth at which they begin to differ)
FAULTS = {
    "none": (lambda: tiny.llama(**WIDE), lambda: tiny.llama(**WIDE), None),
    "the base of RoPE": (lambda: tiny.llama(**WIDE), lambda: tiny.llama(**WIDE, rope_theta=500.0), 0),
    "a window": (mistral, lambda: mistral(128), 128),
    "a factor of YaRN": (
        lambda: tiny.llama(**WIDE, rope_parameters=YARN),
        lambda: tiny.llama(**WIDE, rope_parameters=YARN | {"factor": 2.0}),
        0,
    ),
    "a position that is shifted from 200 on": (
        lambda: tiny.llama(**WIDE),
        lambda: shifted(tiny.llama(**WIDE), 200),
        128,
    ),
    "a state that is not reset": (lambda: tiny.llama(**WIDE), lambda: tiny.llama(**WIDE), 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_by_its_depth(fault):
    trainer, sampler, begins = FAULTS[fault]
    st = get_fake_strategy()
    apply, params = st.bind(trainer(), sampling=rft.Sampling())
    module = sampler()
    engine = rft.engine.hf(module, tiny.tokenizer())
    if fault == "a state that is not reset":
        engine = leaking(engine, copy.deepcopy(module))
    both = [], []
    for i, size in enumerate((64, 128, 256, 512)):
        prompts = rft.collect.random_prompts(WORDS, [size - 32] * 4, i)
        found = rft.collect.gaps_of(engine, st, apply, params, prompts, new=32, seed=i)
        for parts, part in zip(both, found):
            parts.append(part)
    for parts in both:
        found = rft.collect.depths(*parts)
        bad = [x.first for x in found if x.mean > LIMIT]
        assert bad[:1] == ([] if begins is None else [begins]), [x._asdict() for x in found]


def test_depths_are_their_definition():
    g = np.random.default_rng(0)
    gap, mask = g.exponential(size=(5, 300)), g.random((5, 300)) < 0.4
    mask[:, 64:128] = False
    found = rft.collect.depths((torch.from_numpy(gap), torch.from_numpy(mask)))
    assert [(x.first, x.last) for x in found] == [(0, 63), (128, 255), (256, 511)]
    for x in found:
        want = np.sort(gap[:, x.first : x.last + 1][mask[:, x.first : x.last + 1]])
        assert x.tokens == len(want) and x.max == want[-1]
        assert x.mean == pytest.approx(want.mean())
        assert x.p99 == want[max(round(0.99 * len(want)), 1) - 1]


def test_the_command_tells_and_exits_by_the_limit(capsys):
    check_engine = load_script("check_engine")
    check_engine.main(check_engine.Config(model="tiny", rows=2, new=8))
    said = capsys.readouterr().out
    assert "engine and trainer agree at every depth: the mean gap is at most 0.01 nats per token" in said
    with pytest.raises(SystemExit) as end:
        check_engine.main(check_engine.Config(model="tiny", rows=2, new=8, max_gap=1e-12))
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "engine and trainer differ first at positions 0 to 63: by " in said and "above 1e-12" in said


@pytest.mark.parametrize(
    ("longest", "window", "line"),
    [
        (None, None, "longest: expected a number of tokens, as m names no window, got None"),
        (200, 128, "longest: expected at most the model's window, 128, got 200"),
        (4, None, "longest: expected at least 8 tokens, got 4"),
    ],
)
def test_rows_have_lengths_that_the_model_reads(longest, window, line):
    check_engine = load_script("check_engine")
    with pytest.raises(ValueError, match=f"^{line}$"):
        check_engine.lengths(check_engine.Config(model="m", longest=longest), window)
    assert check_engine.lengths(check_engine.Config(model="m", longest=100), 128) == [64, 100]
    assert check_engine.lengths(check_engine.Config(model="m"), 256) == [64, 128, 256]
