"""The model as a function: packed log-probs are the padded model's, and params are an argument."""

import numpy as np
import pytest
import ref
import tiny
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rft_fn as rft
from rft_fn import model, packing, tree


def padded_logp(lm, exp, temperature=1.0):
    """The definition: whole padded rows, position ids given, log_softmax in float64, shifted by hand."""
    position = torch.arange(exp.tokens.shape[1]).expand(exp.tokens.shape)
    seen = (position < exp.length.unsqueeze(-1)).long()
    logits = (
        lm(input_ids=exp.tokens, attention_mask=seen, position_ids=position).logits.double() / temperature
    )
    out = torch.zeros(exp.tokens.shape, dtype=torch.float64)
    out[:, 1:] = logits.log_softmax(-1)[:, :-1].gather(-1, exp.tokens[:, 1:, None])[..., 0]
    return torch.where(exp.mask, out, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [30, 64, 1000])
def test_packed_scores_are_the_padded_models(budget, temperature):
    """Scores of packs are those of padded rows.

    A forgotten shift, positions that do not restart, attention across sequences or a lost temperature fail
    here.
    """
    lm, exp = tiny.llama(dtype=torch.float64), tiny.experience()
    apply, params = model.bind(lm, sampling=rft.Sampling(temperature=temperature))
    packs = packing.shard(exp, budget)[0]
    scored = packing.unpack(model.score(apply, params, packs), packs, exp.tokens)
    torch.testing.assert_close(scored, padded_logp(lm, exp, temperature), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
@settings(max_examples=15)
@given(
    warmth=st.lists(st.floats(0.2, 3), min_size=6, max_size=6),
    budget=st.integers(24, 90),
    seed=st.integers(0, 9),
)
def test_rows_with_temperatures_of_their_own_are_scored_at_them(fused, warmth, budget, seed):
    """Log-probs, entropies and log-probs of other words, in any packs: log softmax(z / t) of each row."""
    lm, exp = tiny.llama(dtype=torch.float64), tiny.experience(seed)
    words = torch.arange(4).expand(*exp.tokens.shape, -1)
    exp = tree.replace(exp, temperature=torch.tensor(warmth, dtype=torch.float64), words=words)
    apply, params = model.bind(lm, sampling=rft.Sampling(temperature=0.8), entropy=True, fused=fused)
    packs = packing.shard(exp, budget)[0]
    outs = [apply(params, packing.pad(pack, len(pack.tokens) + 3)) for pack in packs]
    outs = [tree.map(lambda x: x[:-3], out) for out in outs]
    got = [
        packing.unpack([getattr(out, name) for out in outs], packs, exp.tokens)
        for name in ("logp", "entropy", "words_logp")
    ]

    want = [torch.zeros_like(x) for x in got]
    for b, n in enumerate(exp.length.tolist()):
        logits = lm(input_ids=exp.tokens[b : b + 1, :n], use_cache=False).logits[0].detach().numpy()
        for s in exp.mask[b].nonzero().flatten().tolist():
            logp = ref.log_softmax(logits[s - 1], warmth[b])
            want[0][b, s] = logp[int(exp.tokens[b, s])]
            want[1][b, s] = ref.entropy(logits[s - 1], warmth[b])
            want[2][b, s] = torch.from_numpy(np.asarray(logp[:4]))
    for x, y in zip(got, want):
        torch.testing.assert_close(x.detach(), y, rtol=0, atol=1e-10)


def test_the_gradient_of_a_row_is_at_its_temperature():
    """That of each row bound with its temperature, added up; padding and prompts add no NaN."""
    lm, exp = tiny.llama(dtype=torch.float64), tiny.experience()
    warmth = [0.3, 1.0, 2.0, 0.7, 1.5, 0.9]
    own = tree.replace(exp, temperature=torch.tensor(warmth, dtype=torch.float64))
    apply, params = model.bind(lm)
    pack = packing.pad(packing.pack(own, range(6)), 120)
    got = torch.func.grad(lambda p: apply(p, pack).logp.sum())(params)
    want = tree.map(torch.zeros_like, params)
    for b, t in enumerate(warmth):
        at, _ = model.bind(lm, sampling=rft.Sampling(temperature=t))
        row = packing.pack(exp, [b])
        part = torch.func.grad(lambda p: at(p, row).logp.sum())(params)  # noqa: B023
        want = tree.map(lambda x, y: x + y, want, part)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11)


def test_a_sequence_does_not_see_its_neighbours():
    lm, exp = tiny.llama(), tiny.experience()
    apply, params = model.bind(lm)
    before = apply(params, packing.pack(exp, range(6)))
    other = exp.tokens.clone()
    other[2] = (other[2] + 5) % 30 + 3
    after = apply(params, packing.pack(tree.replace(exp, tokens=other), range(6)))
    own = packing.pack(exp, range(6)).seq == 2
    assert (before.logp - after.logp)[~own].abs().max() < 1e-6
    assert (before.logp - after.logp)[own].abs().max() > 1e-2


def test_apply_is_a_function_of_params():
    lm, pack = tiny.llama(0), packing.pack(tiny.experience(), range(6))
    apply, params = model.bind(lm)
    other = model.bind(tiny.llama(1))
    there = other[0](other[1], pack).logp
    assert torch.equal(apply(other[1], pack).logp, there)
    assert not torch.allclose(apply(params, pack).logp, there)


def test_func_grad_is_backward():
    lm, pack = tiny.llama(dtype=torch.float64), packing.pack(tiny.experience(), range(6))
    apply, params = model.bind(lm)

    def loss(p):
        return -apply(p, pack).logp.sum()

    functional = torch.func.grad(loss)(params)
    loss(params).backward()
    for name, p in params.items():
        torch.testing.assert_close(functional[name], p.grad, rtol=1e-9, atol=1e-12)


def test_whole_logits_and_fused_head_agree():
    lm, pack = tiny.llama(dtype=torch.float64), packing.pack(tiny.experience(), range(6))
    fused = model.Scorer(lm, rft.Sampling(temperature=0.8), entropy=True)
    whole = model.Scorer(lm, rft.Sampling(temperature=0.8), entropy=True)
    whole.fused = False
    assert fused.fused
    a, b = fused(pack), whole(pack)
    torch.testing.assert_close(a.logp, b.logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(a.entropy, b.entropy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}])
def test_logits_that_overflow_outside_the_mask_reach_no_gradient(options):
    """Whole logits, with every number that is made of them: a where on the results alone leaves 0 * inf."""
    lm, pack = tiny.llama(), packing.pack(tiny.experience(), range(2))
    pack = tree.replace(pack, words=torch.zeros(len(pack.tokens), 2, dtype=torch.long))
    apply, params = model.bind(lm, sampling=rft.Sampling(**options), entropy=True, fused=False)
    over = torch.where(pack.mask, 0.0, torch.inf)[:, None]
    lm.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits + over)
    out = apply(params, pack)
    (out.logp + out.entropy + out.words_logp.sum(-1)).sum().backward()
    assert not pack.mask.all() and all(p.grad.isfinite().all() for p in params.values())


def test_gemma_with_capped_logits_scores_as_itself():
    """A fused head on a model with a soft cap would give other log-probs than the model samples from."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=60, final_logit_softcapping=2.0,
        pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    lm, exp = Gemma2ForCausalLM(config).double().eval(), tiny.experience()
    exp = tree.replace(exp, tokens=exp.tokens % 60)
    apply, params = model.bind(lm)
    packs = [packing.pack(exp, [i]) for i in range(6)]
    scored = packing.unpack(model.score(apply, params, packs), packs, exp.tokens)
    torch.testing.assert_close(scored, padded_logp(lm, exp), rtol=0, atol=1e-6)  # its rotary table is float32


def test_dropout_is_off_and_checkpointing_changes_nothing():
    lm = tiny.llama(dtype=torch.float64, attention_dropout=0.5)
    pack = packing.pack(tiny.experience(), range(6))
    apply, params = model.bind(lm.train())
    assert torch.equal(apply(params, pack).logp, apply(params, pack).logp)
    plain = torch.autograd.grad(apply(params, pack).logp.sum(), list(params.values()))
    lm = model.load(lm, gradient_checkpointing=True)
    apply, params = model.bind(lm)
    again = torch.autograd.grad(apply(params, pack).logp.sum(), list(params.values()))
    for a, b in zip(plain, again):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_checkpointing_saves_activations_and_refuses_other_params():
    lm, pack = (
        model.load(tiny.llama(), gradient_checkpointing=True),
        packing.pack(tiny.experience(), range(6)),
    )
    calls = []
    lm.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    apply, params = model.bind(lm)
    calls.clear()
    apply(params, pack).logp.sum().backward()
    assert len(calls) == 2  # the second one is the recomputation
    with pytest.raises(ValueError, match="this module's own, got others: with gradient checkpointing"):
        apply(tree.map(lambda p: p.detach().clone(), params), pack)


def test_any_module_of_packs_can_be_bound():
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(60, 60))

        def forward(self, pack):
            return rft.TokenOut(
                logp=self.table[pack.tokens].log_softmax(-1).gather(-1, pack.target[:, None])[:, 0]
            )

    apply, params = model.bind(Bigram())
    pack = packing.pack(tiny.experience(), [0, 1])
    assert apply(params, pack).logp.shape == pack.target.shape
    assert list(params) == ["table"]


def test_lora_trains_adapters_only_and_starts_as_the_base():
    base, pack = tiny.llama(), packing.pack(tiny.experience(), range(6))
    apply, params = model.bind(base)
    want = apply(params, pack).logp
    lora = model.apply_lora_configuration(base, rank=2, alpha=4)
    apply, params = model.bind(lora)
    assert all("lora_" in name for name in params)
    torch.testing.assert_close(apply(params, pack).logp, want, rtol=0, atol=1e-6)
    assert any(n.endswith("lora_A.default.weight") and "down_proj" in n for n in params)


@each(
    ("call", "message"),
    [
        (lambda: model.load("./nowhere"), "model: expected a folder, a hub name .* got './nowhere'"),
        (lambda: model.load("tiny:nothing:1"), "nothing"),
        (lambda: model.load("tiny:addition:x"), "expected tiny, tiny:TASK or tiny:TASK:LEVEL"),
        (lambda: model.bind(tiny.llama(), sampling=rft.Sampling(temperature=0)), "temperature: expected > 0"),
        (lambda: model.apply_lora_configuration(tiny.llama(), 0, 1), "rank: expected >= 1, got 0"),
        (lambda: model.apply_lora_configuration(tiny.llama(), 1, 1, 0.1), "dropout: expected 0, got 0.1"),
        (
            lambda: model.apply_lora_configuration(tiny.llama(), 1, 1, target_modules=["nope"]),
            "got \\['nope'\\]",
        ),
        (lambda: rft.Sampling(top_p=0), r"top_p: expected a number in \(0, 1\], got 0"),
        (lambda: rft.Sampling(temperature=-1), r"temperature: expected a number in \[0, inf\), got -1"),
        (lambda: rft.Sampling(max_new=0), r"max_new: expected an integer in \[1, inf\), got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_saved_model_is_the_same_model(tmp_path):
    lm, pack = tiny.llama(3), packing.pack(tiny.experience(), range(6))
    apply, params = model.bind(lm)
    changed = {n: p.detach() + 0.01 for n, p in params.items()}
    model.save(
        tmp_path / "m", lm, tiny.tokenizer(), changed.items()
    )  # the head is tied: it has to follow the embedding
    again = model.bind(model.load(tmp_path / "m"))
    assert torch.equal(again[0](again[1], pack).logp, apply(tree.Named(changed), pack).logp)
    assert model.load_tokenizer(tmp_path / "m").encode("12+3=") == tiny.tokenizer().encode("12+3=")
