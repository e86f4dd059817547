"""analysis.estimators, analysis.exact: statistics against definitions, gradients by brute force."""

import math

import numpy as np
import pytest
import torch
from tiny import llama

import rft_fn as rft
from rft_fn.analysis import estimators, loss_slopes, part_sums

SAMPLING = rft.Sampling(max_new=4)
ST = rft.strategy.get_strategy()


@pytest.fixture(scope="module")
def vectors():
    """P gradients of parts with a signal, and a reference, in numpy."""
    source = np.random.default_rng(0)
    each = source.normal(size=(8, 30)) + 0.7
    return each, source.normal(size=30) + 1.0


def parts_of(each, ref):
    return part_sums.Parts(*(torch.tensor(x) for x in ((each**2).sum(1), each @ each.sum(0), each @ ref)))


def definitions(each, ref, signal_of_ref):
    """(cosine, direction, noise) of a gradient that is the sum of `each`."""
    g = each.sum(0)
    n = len(each)
    noise = n / (n - 1) * ((each - g / n) ** 2).sum()
    cos = g @ ref / np.linalg.norm(g) / np.linalg.norm(ref)
    return cos, g @ ref / math.sqrt((g @ g - noise) * signal_of_ref), noise


def test_statistics_and_their_errors_are_those_of_leaving_out_parts(vectors):
    each, ref = vectors
    t = part_sums.totals(parts_of(each, ref))
    got = (
        part_sums.cosine(t, float(ref @ ref)),
        part_sums.direction(t, 0.8 * float(ref @ ref)),
        part_sums.noise(t),
    )
    subsets = [each, *(np.delete(each, i, 0) for i in range(len(each)))]
    want = np.array([definitions(x, ref, 0.8 * ref @ ref) for x in subsets]).T
    for x, y in zip(got, want):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-10)
        left_out = y[1:]
        error = math.sqrt((len(each) - 1) / len(each) * ((left_out - left_out.mean()) ** 2).sum())
        assert part_sums.standard_error(x) == pytest.approx(error, rel=1e-9)


def test_signal_and_noise_are_unbiased_and_the_error_is_the_spread_of_the_cosine():
    """Over many buffers of known mean and variance."""
    source = np.random.default_rng(1)
    mean = source.normal(size=20)
    signals, noises, cosines, errors = [], [], [], []
    for _ in range(3000):
        each = (mean + source.normal(size=(16, 20))) / 16
        t = part_sums.totals(parts_of(each, mean))
        signals.append(float(part_sums.signal(t)[0]))
        noises.append(float(part_sums.noise(t)[0]))
        cos = part_sums.cosine(t, float(mean @ mean))
        cosines.append(float(cos[0]))
        errors.append(part_sums.standard_error(cos))
    assert np.mean(signals) == pytest.approx(mean @ mean, rel=0.02)
    assert np.mean(noises) == pytest.approx(20 / 16, rel=0.02)
    assert 0.9 < np.mean(errors) / np.std(cosines) < 1.5  # a jackknife errs on the safe side


def test_direction_is_nan_without_a_signal():
    each = np.array([[1.0, 0.0], [-1.0, 0.0]])
    t = part_sums.totals(parts_of(each, np.array([1.0, 1.0])))
    assert math.isnan(float(part_sums.direction(t, 2.0)[0]))


def test_size_length_and_stopped_tokens():
    assert loss_slopes.effective_size(torch.tensor([1.0, -1.0, 1.0, 0.0])) == pytest.approx(3)
    assert loss_slopes.effective_size(torch.tensor([1.0, 0.0])) == 1
    length = torch.tensor([1, 2, 4, 8, 3])
    for power in (0, 1, 2):
        push = 3.0 * length.double() ** power
        push[-1] = 0  # one without a push does not count
        assert loss_slopes.length_slope(push, length) == pytest.approx(power)
    assert math.isnan(loss_slopes.length_slope(torch.ones(3), torch.full((3,), 5)))
    slope = torch.tensor([[0.0, 2.0, 0.0, 0.0]])
    adv = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert loss_slopes.stopped(slope, adv, mask) == 0.5


# ---------- on a model


@pytest.fixture(scope="module")
def buffer():
    """(apply, state, rollout, rewards [N, G], log-probs) in float64; the policy is not the sampler."""
    torch.manual_seed(0)
    module = llama(dtype=torch.float64)
    apply, state = ST.init(module, rft.optim.adamw(1e-3), sampling=SAMPLING)
    rows = []
    for i in range(16):
        rows.append(([3 + i % 4, 5], [6 + (i * j) % 7 for j in range(1 + i % 4)]))
    exp = rft.packing.supervised(rows)
    logp = ST.score(apply, state.params, exp, 64).logp
    gap = 0.3 * torch.randn(logp.shape, dtype=torch.float64) * exp.mask
    rollout = rft.Rollout(
        tokens=exp.tokens, mask=exp.mask, logp=logp + gap, length=exp.length,
        truncated=torch.zeros(16, dtype=torch.bool), group=torch.arange(16) // 4,
        version=torch.zeros(16, dtype=torch.long), sampling=SAMPLING,
    )  # fmt: skip
    return apply, state, rollout, torch.randn(4, 4, dtype=torch.float64), logp


def of_row(name, rollout, reward):
    algo = rft.algorithm.TABLE[name]
    w = algo.weight(rollout.mask).double()
    return algo, rft.experience(rollout, adv=algo.advantage(reward, rollout), w=w)


def flat(grads):
    return torch.cat([x.flatten() for x in rft.tree.leaves(grads)])


def gradient_of(buffer, exp, slope):
    apply, state, *_ = buffer
    packs = ST.shard(rft.tree.replace(exp, w=slope), 64)
    return ST.grad(state, apply, lambda out, b: out.logp, packs)[0]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "cpgd", "gmpo", "rloo", "dppo_tv"])
def test_slopes_give_the_gradient_of_the_loss(buffer, name):
    apply, state, rollout, reward, logp = buffer
    algo, exp = of_row(name, rollout, reward)
    slope = loss_slopes.slopes(algo.loss, exp, logp)
    assert bool((slope[~exp.mask] == 0).all())
    want, _ = ST.grad(state, apply, algo.loss, ST.shard(exp, 64))
    weighted = rft.tree.replace(exp, w=slope)
    got, _ = ST.grad(state, apply, lambda out, b: out.logp, ST.shard(weighted, 64))
    assert torch.allclose(flat(got), flat(want), rtol=1e-9, atol=1e-12)


def test_measures_are_those_of_the_gradients_of_parts_tokens_and_responses(buffer):
    apply, state, rollout, reward, logp = buffer
    algo, exp = of_row("grpo", rollout, reward)
    slope = loss_slopes.slopes(algo.loss, exp, logp)
    lists = estimators.split_prompts(rollout.group, 2)
    assert lists == [list(range(8)), list(range(8, 16))]
    ref = estimators.reference(ST, state, apply, exp, slope, lists, budget=64)
    got, whole = estimators.measure(
        ST, state, apply, exp, slope, lists, ref, budget=64, largest=3, probes=200, key=1
    )

    def gradient(c):
        weighted = rft.tree.replace(exp, w=c)
        return flat(ST.grad(state, apply, lambda out, b: out.logp, ST.shard(weighted, 64))[0])

    # one gradient for each token that has a slope
    places = slope.nonzero().tolist()
    each = torch.stack(
        [
            gradient(torch.zeros_like(slope).index_put_(tuple(torch.tensor([p]).T), slope[tuple(p)]))
            for p in places
        ]
    )
    rows = torch.tensor([row for row, _ in places])
    g = each.sum(0)
    parts = torch.stack([each[rows < 8].sum(0), each[rows >= 8].sum(0)])
    assert torch.allclose(got.parts.square, parts.square().sum(1), rtol=1e-6)
    assert torch.allclose(got.parts.onto, parts @ g, rtol=1e-6)
    assert torch.allclose(got.parts.along, parts @ g, rtol=1e-6)  # the reference is the same gradient
    assert got.tokens == pytest.approx(float(each.square().sum()), rel=0.15)
    top = slope.square().sum(-1).argsort(descending=True)[:3]
    share = each[torch.isin(rows, top)].sum(0) @ g / (g @ g)
    assert got.largest == pytest.approx(float(share), rel=1e-6)
    assert torch.allclose(torch.cat([x.flatten() for x, _ in whole.values()]), g, rtol=1e-5, atol=1e-7)
    noise = 2 * (parts - g / 2).square().sum()
    assert ref.square == pytest.approx(float(g @ g), rel=1e-6)
    assert ref.signal == pytest.approx(float(g @ g - noise), rel=1e-5)


def test_rows_of_one_direction_are_measured_once_and_compared_on_the_same_prompts(buffer, monkeypatch):
    apply, state, rollout, reward, logp = buffer
    on_policy = rft.tree.replace(rollout, logp=logp)
    buffers = {}
    for name in ("grpo", "gspo", "dr_grpo", "rloo"):
        algo, exp = of_row(name, on_policy, reward)
        buffers[name] = exp, loss_slopes.slopes(algo.loss, exp, logp)
    calls = []
    measure = estimators.measure
    monkeypatch.setattr(estimators, "measure", lambda *args, **kw: calls.append(1) or measure(*args, **kw))
    lists = estimators.split_prompts(rollout.group, 4)
    ref = estimators.reference(ST, state, apply, *buffers["rloo"], lists, budget=64)
    found = dict(estimators.compare(ST, state, apply, buffers, lists, ref, budget=64, prompts=4))
    assert len(calls) == 2  # at ratio 1 GSPO is GRPO, and Dr. GRPO is RLOO up to a factor
    assert found["grpo"]["minus_first"] == 0
    assert found["gspo"]["cosine"] == pytest.approx(found["grpo"]["cosine"], abs=1e-6)
    grads = {name: flat(gradient_of(buffer, *buffers[name])) for name in ("grpo", "rloo")}
    near = float(torch.cosine_similarity(grads["grpo"], grads["rloo"], dim=0))
    assert found["rloo"]["with_first"] == pytest.approx(near, abs=1e-6) and found["gspo"]["with_first"] == 1
    assert found["rloo"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert found["rloo"]["norm"] == pytest.approx(ref.square**0.5, rel=1e-6)
    assert found["dr_grpo"]["norm"] == pytest.approx(found["rloo"]["norm"] * 3 / 4 / 1024, rel=1e-5)
    assert found["rloo"]["length"] == pytest.approx(1) and found["grpo"]["length"] == pytest.approx(
        0, abs=1e-6
    )


def test_errors():
    group = torch.arange(6)
    for parts in (1, 4):
        with pytest.raises(ValueError, match=f"parts: expected at least 2 that divide the 6 .*, got {parts}"):
            estimators.split_prompts(group, parts)


# ---------- the exact gradient


def test_the_exact_gradient_is_that_of_the_expected_reward(buffer):
    apply, state, *_ = buffer
    sampling = rft.Sampling(max_new=2)
    prompts = [[3, 5], [4, 6, 7]]
    words, end = 9, 1
    apply, state = ST.init(
        llama(vocab_size=words, dtype=torch.float64), rft.optim.adamw(1e-3), sampling=sampling
    )
    every = rft.analysis.every_response(
        ST, apply, state.params, prompts, words=words, end=end, sampling=sampling, budget=256
    )
    assert len(every.mask) == 2 * (1 + (words - 1) * words)  # the end at once, or another word and any word
    assert rft.analysis.mass(every) == pytest.approx(1, abs=1e-5)
    assert bool(every.truncated.sum() == 2 * (words - 1) ** 2)
    own = ST.score(apply, state.params, every, 256).logp
    assert torch.allclose(own.float(), every.logp, atol=1e-5)

    # d/dtheta of sum_y p(y) r(y), by autograd through the probabilities
    reward = torch.randn(len(every.mask), dtype=torch.float64)
    exp = rft.experience(every, adv=torch.zeros_like(own), w=every.mask.double())
    slope = rft.analysis.exact_slopes(rft.tree.replace(every, logp=own), reward)
    got, _ = ST.grad(state, apply, lambda out, b: out.logp, ST.shard(rft.tree.replace(exp, w=slope), 256))
    b = rft.packing.pack(exp, range(len(every.mask)))
    logp = rft.segment.sum(apply(state.params, b).logp, b.mask, b.seq, b.num_seqs)
    value = -(logp.exp() * reward).sum() / len(prompts)
    want = torch.autograd.grad(value, list(state.params.values()))
    assert torch.allclose(flat(got), torch.cat([x.flatten() for x in want]), rtol=1e-5, atol=1e-7)

    # without what is rare there are fewer, of less mass
    likely = rft.analysis.every_response(
        ST, apply, state.params, prompts, words=words, end=end, sampling=sampling, least=0.013, budget=256
    )
    assert 0 < len(likely.mask) < len(every.mask) and rft.analysis.mass(likely) < 0.999
