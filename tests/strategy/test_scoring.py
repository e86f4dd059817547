"""`Strategy.score`: whole rows, as each row alone has them."""

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import strategy, tree


def bound(**options):
    st = strategy.get_fake_strategy()
    lm = tiny.llama()
    return st, lm, *st.bind(lm, **options)


@pytest.mark.parametrize("budget", [20, 1000])
def test_rows_are_scored_as_each_alone(budget):
    st, lm, apply, params = bound(entropy=True)
    exp = tiny.experience()
    out = st.score(apply, params, exp, budget, fields=("entropy",))
    want = tiny.definition(lm, exp).detach()
    torch.testing.assert_close(out.logp, want, rtol=0, atol=1e-5)
    assert not out.logp.requires_grad and not out.logp[~exp.mask].any()
    # the entropy of the distribution that each token was drawn from
    for b, n in enumerate(exp.length.tolist()):
        p = lm(input_ids=exp.tokens[b : b + 1, :n]).logits[0].softmax(-1).detach()
        entropy = torch.cat([torch.zeros(1), -(p * p.log()).sum(-1)[:-1]])
        torch.testing.assert_close(out.entropy[b, :n], entropy * exp.mask[b, :n], rtol=0, atol=1e-4)


def test_rows_without_a_weight_are_scored_too():
    st, _, apply, params = bound()
    exp = tiny.experience()
    none = tree.replace(exp, w=torch.zeros_like(exp.w))
    assert torch.equal(st.score(apply, params, none, 100).logp, st.score(apply, params, exp, 100).logp)


def test_a_rollout_needs_no_advantages_to_be_scored():
    st, _, apply, params = bound()
    eng = rft.engine.hf(tiny.llama(), tiny.tokenizer())
    rollout = eng.generate([[3, 4, 5], [6]], [1, 2], n=2, sampling=rft.Sampling(max_new=5))
    out = st.score(apply, params, rollout, 100)
    torch.testing.assert_close(out.logp, rollout.logp, rtol=0, atol=1e-4)
    # what the sampler said may be wrong: that is found out by scoring
    broken = tree.replace(rollout, logp=rollout.logp * torch.nan)
    assert torch.equal(st.score(apply, params, broken, 100).logp, out.logp)


def test_a_model_that_scores_another_distribution_is_refused():
    """Drawn at 0.5 and trained at 1.0 is another policy: `score` and `grad` name both."""
    half = rft.Sampling(temperature=0.5, max_new=5)
    eng = rft.engine.hf(tiny.llama(), tiny.tokenizer())
    st = strategy.get_fake_strategy()
    prompts, keys = [[3, 4, 5], [6]], [1, 2]
    message = (
        r"^sampling: expected a model bound with that of the rollout, temperature 0.5, top_p 1, top_k 0, got "
        r"temperature 1, top_p 1, top_k 0; give st.init and st.bind sampling=rollout.sampling, or "
    )
    for rollout in (
        eng.generate(prompts, keys, n=2, sampling=half),
        rft.collect.gather_and_generate(eng, st, prompts, keys, n=2, sampling=half, sleep_engine=False),
    ):
        assert rollout.sampling == half
        exp = rft.experience(rollout, adv=torch.ones(4), w=rft.weight.token_mean(rollout.mask))
        apply, state = st.init(tiny.llama(), rft.optim.adamw(1e-3))
        with pytest.raises(ValueError, match=message):
            st.score(apply, state.params, rollout, 100)
        with pytest.raises(ValueError, match=message):
            st.grad(state, apply, lambda out, b: -out.logp, st.shard(exp, 100))
        meant = tree.replace(exp, sampling=None)
        st.grad(state, apply, lambda out, b: -out.logp, st.shard(meant, 100))

        # the right one, and a model without log-probs of its own
        apply, state = st.init(tiny.llama(), rft.optim.adamw(1e-3), sampling=rollout.sampling)
        found = st.score(apply, state.params, rollout, 100).logp
        torch.testing.assert_close(found, rollout.logp, rtol=0, atol=1e-4)
        st.grad(state, apply, lambda out, b: -out.logp, st.shard(exp, 100))
    critic, params = st.bind(rft.model.Critic(tiny.llama()))
    st.score(critic, params, rollout, 100, fields=("value",))


def test_words_have_a_number_each():
    st, _, apply, params = bound()
    exp = tiny.experience()
    words = torch.stack([exp.tokens, (exp.tokens + 1) % len(tiny.tokenizer())], -1)
    out = st.score(apply, params, tree.replace(exp, words=words), 50, fields=("words_logp",))
    assert out.words_logp.shape == words.shape
    torch.testing.assert_close(out.words_logp[..., 0], out.logp, rtol=0, atol=1e-5)


def test_fields_that_are_not_there_are_refused():
    st, _, apply, params = bound()
    with pytest.raises(ValueError, match=r"field: expected one of logp, .* got 'entropi'"):
        st.score(apply, params, tiny.experience(), 100, fields=("entropi",))
    message = "TokenOut.entropy: expected a value, got None; bind or init the model with entropy=True"
    with pytest.raises(ValueError, match=message):
        st.score(apply, params, tiny.experience(), 100, fields=("entropy",))
    with pytest.raises(ValueError, match=r"TokenOut.words_logp: .* rft_fn.experience\(..., words=ids"):
        st.score(apply, params, tiny.experience(), 100, fields=("words_logp",))
    packs = st.shard(tiny.experience(), 100)
    with pytest.raises(ValueError, match=message):
        rft.model.score(apply, params, packs, field="entropy")
    with pytest.raises(ValueError, match=r"field: expected one of logp, .* got 'entropi'"):
        rft.model.score(apply, params, packs, field="entropi")


def test_every_output_of_packs_is_that_of_whole_rows():
    """`model.score` and `packing.unpack` give what `Strategy.score` gives in one call."""
    st, _, apply, params = bound(entropy=True)
    exp = tiny.experience()
    exp = tree.replace(exp, words=exp.tokens[..., None] % 5 + torch.arange(3))
    fields = ("logp", "entropy", "words_logp")
    whole = st.score(apply, params, exp, 50, fields=fields)
    packs = st.shard(tree.replace(exp, w=exp.mask.float()), 50)
    for name in fields:
        x = rft.model.score(apply, params, packs, field=name)
        assert torch.equal(rft.packing.unpack(x, packs, exp.tokens), getattr(whole, name)), name
    assert (whole.words_logp[exp.mask] < 0).all()
