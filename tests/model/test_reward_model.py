"""Scalar reward models: what they score, how heads pool, what trains."""

import copy

import numpy as np
import pytest
import ref
import sees_and_hears
import tiny
import torch
from families import small
from hypothesis import given
from hypothesis import strategies as some

import rft_fn as rft
from rft_fn import model, packing, tree
from rft_fn.model.reward_heads import POOLS, running_mean, softmax_share

SIZES = (5, 9, 1, 13, 2, 7)
ENDS = ([4], [1, 2, 8], [0], [0, 5, 6, 7, 12], [0, 1], [3])


def rows(sizes=SIZES, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 30, (n,), generator=g).tolist() for n in sizes]


def reward_of(lm, heads=("helpful", "format"), pool="last", seed=0):
    """A new reward model whose heads and query are not 0."""
    rm = model.load_reward(lm, new=True, heads=heads, pool=pool)
    g = torch.Generator().manual_seed(seed)
    for name, p in rm.named_parameters():
        if not name.startswith("decoder."):
            p.data.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
    if rm.query is not None:
        rm.query.weight.data *= 0.1  # so that no token has all the weight
    return rm


def scores_of(rm, exp, budget=1000):
    """[B, S, H] by way of packs."""
    st = rft.strategy.get_strategy()
    apply, params = st.bind(rm)
    return st.score(apply, params, exp, budget, fields=("score",)).score


@given(
    sizes=some.lists(some.integers(1, 9), min_size=1, max_size=5),
    spread=some.sampled_from([0.0, 1.0, 30.0, 2000.0]),
    seed=some.integers(0, 99),
)
def test_running_means_are_the_definition(sizes, spread, seed):
    """Also where the logits of a sequence lie so far apart that their exponentials overflow or vanish."""
    g = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    value = torch.randn(total, 2, generator=g, dtype=torch.float64)
    logit = spread * torch.randn(total, generator=g, dtype=torch.float64)
    seq = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    pos = torch.cat([torch.arange(n) for n in sizes])

    got = running_mean(value, softmax_share(logit, seq))
    np.testing.assert_allclose(got, ref.pooled(value, seq, "attention", logit), atol=1e-12)
    got = running_mean(value, 1 / (pos + 1).double())
    np.testing.assert_allclose(got, ref.pooled(value, seq, "mean"), atol=1e-12)


def test_a_mean_over_a_long_sequence_in_float32():
    logit = torch.zeros(20_000)
    share = softmax_share(logit, torch.zeros(20_000, dtype=torch.long))
    torch.testing.assert_close(share, 1 / torch.arange(1, 20_001).double(), rtol=1e-12, atol=0)
    value = torch.linspace(-1, 3, 20_000)[:, None]
    want = value.double().cumsum(0) / torch.arange(1, 20_001)[:, None]
    mean = running_mean(value, share)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), want, rtol=0, atol=2e-7)


def test_gradients_of_pooling_are_those_of_finite_differences():
    g = torch.Generator().manual_seed(0)
    seq = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    value = torch.randn(8, 2, generator=g, dtype=torch.float64, requires_grad=True)
    logit = torch.randn(8, generator=g, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, x: running_mean(v, softmax_share(x, seq)), (value, logit))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("budget", [14, 1000])
def test_scores_are_those_of_each_row_alone(pool, budget):
    """Steps that end one after the other, at the first token and at the last: an end too early fails here."""
    lm = tiny.llama(dtype=torch.float64)
    rm = reward_of(copy.deepcopy(lm), pool=pool)
    exp = packing.scored(rows(), ends=ENDS)
    query = None
    if rm.query is not None:
        query = rm.query.weight[0].detach().numpy()
    want = ref.scores(lm.eval(), rm.score.weight.detach().numpy(), rows(), ENDS, pool, query)
    got = scores_of(rm, exp, budget)
    np.testing.assert_allclose(got[exp.mask], np.concatenate(want), rtol=0, atol=1e-12)
    assert (got[~exp.mask] == 0).all() and np.concatenate(want).std() > 1

    last = np.stack([x[-1] for x in want])
    np.testing.assert_allclose(model.final_scores(got, exp.mask), last, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", POOLS)
def test_neighbours_padding_and_the_appended_token_change_nothing(pool):
    rm = reward_of(tiny.llama(dtype=torch.float64), pool=pool)
    exp = packing.scored(rows())
    want = model.final_scores(scores_of(rm, exp), exp.mask)
    order = [4, 2, 0, 5, 1, 3]
    turned = packing.scored([rows()[i] for i in order])
    got = model.final_scores(scores_of(rm, turned), turned.mask)
    torch.testing.assert_close(got, want[order], rtol=0, atol=1e-12)

    apply, params = model.bind(rm)
    pack = packing.pack(exp, range(6))
    torch.testing.assert_close(apply(params, pack).score[pack.mask], want, rtol=0, atol=1e-12)
    padded = packing.pad(pack, 64)
    torch.testing.assert_close(apply(params, padded).score[padded.mask], want, rtol=0, atol=1e-12)
    end = exp.length - 1
    tokens = exp.tokens.scatter(1, end[:, None], 3)
    got = model.final_scores(scores_of(rm, tree.replace(exp, tokens=tokens)), exp.mask)
    assert torch.equal(got, want)


@pytest.mark.parametrize("pool", POOLS)
def test_the_last_token_counts(pool):
    """A pack of today's rows ends one token too early: their last token is never an input."""
    rm = reward_of(tiny.llama(dtype=torch.float64), pool=pool)
    other = [[*row[:-1], row[-1] % 27 + 3] for row in rows()]
    a, b = packing.scored(rows()), packing.scored(other)
    apart = model.final_scores(scores_of(rm, a), a.mask) - model.final_scores(scores_of(rm, b), b.mask)
    assert (apart.abs() > 1e-3).all()


@pytest.mark.parametrize("pool", POOLS)
def test_a_model_that_mixes_sequences_gets_one_at_a_time(pool):
    rm = reward_of(small("Mpt"), pool=pool)
    exp = packing.scored(rows()[:3])
    whole = scores_of(rm, exp, 1000)
    assert rm.mode == "one_sequence"
    pack = packing.pack(exp, range(3))
    alone = torch.cat([rm(packing.pack(exp, [i])).score for i in range(3)])
    torch.testing.assert_close(whole[exp.mask], alone[pack.mask].detach(), rtol=0, atol=1e-12)
    unit = packing.pack(exp, range(2), unit=2)
    torch.testing.assert_close(rm(unit).score, alone[: len(unit.mask)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2Audio"])
def test_models_that_see_or_hear_are_backbones_too(kind, pool):
    """The scores of a pack of rows with and without media are those of each row by transformers alone."""
    family = sees_and_hears.FAMILIES[kind]
    lm = family.build()
    exp = sees_and_hears.batch(family, [family.kinds[:1], [], family.kinds[:1] * 2], seed=3)
    rm = reward_of(copy.deepcopy(lm), pool=pool)
    apply, params = model.bind(rm)
    pack = packing.pack(exp, range(3))
    got = apply(params, pack).score

    hidden, query = [], None
    decoder = model.reader.find(lm).decoder
    decoder.register_forward_hook(lambda _, __, out: hidden.append(out.last_hidden_state[0, :-1].double()))
    for row in range(3):
        sees_and_hears.alone(family, lm, exp, row)
    flat = torch.cat(hidden).detach()
    if rm.query is not None:
        query = flat @ rm.query.weight[0].detach().double()
    want = ref.pooled(flat @ rm.score.weight.T.detach().double(), pack.seq, pool, query)
    want = want * pack.mask[:, None].numpy()
    np.testing.assert_allclose(got.detach(), want, rtol=0, atol=1e-10)
    assert want.std() > 0.3


# ------------------------------------------------------------------------------------------- training


def bradley_terry(out, b):
    chosen, rejected = packing.sides(out.score[:, 0], b)
    return torch.nn.functional.softplus(rejected - chosen)[b.seq // 2]


def trained(rm, steps=3, seed=0, budget=200):
    st = rft.strategy.get_strategy()
    apply, state = st.init(rm, rft.optim.adamw(1e-2))
    exp = packing.scored(rows(seed=seed))
    exp = tree.replace(exp, w=rft.weight.pair_mean(exp.mask).to(exp.w.dtype))
    for _ in range(steps):
        grads, _ = st.grad(state, apply, bradley_terry, st.shard(exp, budget, unit=2))
        state, _ = st.update(state, grads)
    score = st.score(apply, state.params, exp, budget, fields=("score",)).score
    return model.final_scores(score, exp.mask)[:, 0], state.params


@pytest.mark.parametrize("pool", POOLS)
def test_pairs_train_a_new_model(pool):
    rm = model.load_reward(tiny.llama(), new=True, pool=pool)
    first, _ = trained(rm, steps=0)
    assert (first == 0).all()
    score, weights = trained(rm, steps=20)
    assert (score[::2] > score[1::2] + 0.5).all()
    names = {name for name in weights if not name.startswith("decoder.")}
    assert names == {
        name for name in ("score.weight", "query.weight") if "score" in name or pool == "attention"
    }
    assert all(weights[name].abs().max() > 0 for name in names)


def test_gradient_goes_into_adapters_and_heads_alone():
    torch.manual_seed(0)
    lm = model.apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    rm = model.load_reward(lm, new=True, pool="attention")
    before = copy.deepcopy(rm.state_dict())
    _, weights = trained(rm)
    assert {"score.weight", "query.weight"} < set(weights) and any("lora_A" in name for name in weights)
    for name, x in rm.state_dict().items():
        assert torch.equal(x, before[name]) == (name not in weights), name


def test_frozen_parts_and_gradient_checkpointing():
    plain, _ = trained(model.load_reward(tiny.llama(), new=True))
    again, _ = trained(model.load_reward(tiny.llama(), new=True, gradient_checkpointing=True))
    assert torch.equal(plain, again)
    rm = model.load_reward(tiny.llama(), new=True, freeze=["decoder.layers.0", "embed_tokens"])
    before = copy.deepcopy(rm.state_dict())
    trained(rm)
    same = {name for name, x in rm.state_dict().items() if torch.equal(x, before[name])}
    assert same == {n for n in before if "layers.0." in n or "embed_tokens" in n}


def test_heads_are_in_float32_at_least():
    rm = reward_of(tiny.llama(dtype=torch.bfloat16), pool="attention")
    assert {p.dtype for p in (*rm.score.parameters(), *rm.query.parameters())} == {torch.float32}
    exp = packing.scored(rows())
    score = scores_of(rm, exp)
    assert score.dtype == torch.float32
    exact = scores_of(reward_of(tiny.llama(), pool="attention"), exp)
    assert (score - exact).abs().max() < 0.1 * exact.abs().max()


def test_dropout_stays_off():
    rm = reward_of(tiny.llama(attention_dropout=0.5)).train()
    exp = packing.scored(rows())
    assert torch.equal(scores_of(rm, exp), scores_of(rm, exp)) and not rm.decoder.training


def test_parameters_of_others_go_in_too():
    """The apply is a function: of two sets of heads it gives two scores, also under vmap."""
    rm = reward_of(tiny.llama(dtype=torch.float64), pool="attention")
    apply, params = model.bind(rm)
    pack = packing.pack(packing.scored(rows()), [1])
    heads = torch.stack([params["score.weight"], 2 * params["score.weight"]]).detach()
    both = torch.func.vmap(lambda x: apply(tree.Named({**params, "score.weight": x}), pack).score)(heads)
    torch.testing.assert_close(both[1], 2 * both[0])
    torch.testing.assert_close(both[0], apply(params, pack).score)


def test_bad_input():
    lm = tiny.llama()
    for options, said in (
        ({"pool": "median"}, r"pool: expected one of last, mean, attention, got 'median'"),
        ({"heads": ("a", "b", "a")}, r"heads: expected names that differ, got 'a' twice"),
        ({"heads": "score"}, r"heads: expected a sequence of names, got the one string 'score'"),
        ({"heads": ("",)}, r"head: expected a name, got ''"),
    ):
        with pytest.raises(ValueError, match=said):
            model.load_reward(lm, new=True, **options)
    with pytest.raises(ValueError, match=r"heads: expected one or more, got none"):
        model.RewardModel(lm, heads=())
    with pytest.raises(ValueError, match=r"lm: expected a causal language model .* got Linear"):
        model.RewardModel(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: expected a model with heads, got one wi"):
        model.load_reward(lm)
    exp = packing.scored(rows())
    apply, params = model.bind(tiny.llama())
    with pytest.raises(ValueError, match=r"TokenOut.score: expected a value, .*model.RewardModel"):
        model.score(apply, params, packing.shard(exp, 100)[0], field="score")
    mask = exp.mask.clone()
    mask[[2, 4]] = False
    with pytest.raises(ValueError, match=r"mask: expected a token of each row, got none in rows \[2, 4\]"):
        model.final_scores(torch.zeros(*mask.shape, 1), mask)
    with pytest.raises(ValueError, match="score: expected"):
        model.final_scores(torch.zeros(mask.shape), mask)
