"""Divergences from a teacher by their definitions, log-probs of words from the fused head, and a student."""

import itertools
import math

import numpy as np
import pytest
import ref
import tiny
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as some

from rft_fn import logprob, loss, model, optim, packing, strategy, tree
from rft_fn.types import Sampling


def distributions(seed, *shape, scale=2.0):
    """Log-probs of a student and of a teacher in float64."""
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(2, *shape, generator=g, dtype=torch.float64)).log_softmax(-1)


@pytest.mark.parametrize("name", loss.DIVERGENCES)
@given(seed=some.integers(0, 2**32), share=some.floats(0.01, 0.99))
def test_each_divergence_is_its_sum_over_words(name, seed, share):
    logp, teacher = distributions(seed, 3, 7)
    got = loss.divergence(name, beta=share, alpha=share)(logp, teacher)
    want = [
        ref.distilled(name, p, t, share, share) for p, t in zip(logp.exp().numpy(), teacher.exp().numpy())
    ]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-12)
    assert (got >= -1e-12).all() and loss.divergence(name)(logp, logp).abs().max() < 1e-12


@pytest.mark.parametrize("name", loss.DIVERGENCES)
def test_the_gradient_of_each_divergence_is_right(name):
    logits, teacher = distributions(0, 4, 5)
    f = loss.divergence(name)
    assert torch.autograd.gradcheck(lambda z: f(z.log_softmax(-1), teacher), logits.requires_grad_())


def test_the_ends_of_the_families_are_both_kls():
    """At beta 0 and 1 as TRL has it, which are the limits of jsd / beta and jsd / (1 - beta)."""
    p, t = distributions(1, 6, 9)
    reverse, forward = loss.reverse_kl(p, t), loss.forward_kl(p, t)
    for got, want in (
        (loss.jsd(p, t, beta=0.0), forward),
        (loss.jsd(p, t, beta=1.0), reverse),
        (loss.skew_forward_kl(p, t, alpha=0.0), forward),
        (loss.skew_reverse_kl(p, t, alpha=0.0), reverse),
        (loss.reverse_kl(t, p), forward),
    ):
        assert torch.equal(got, want)
    torch.testing.assert_close(loss.jsd(p, t, beta=1e-7) / 1e-7, forward, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss.jsd(p, t, beta=1 - 1e-7) / 1e-7, reverse, rtol=1e-4, atol=1e-6)
    assert (loss.jsd(p, t) <= math.log(2)).all()
    assert torch.equal(loss.jsd(p, t), loss.jsd(p, t, beta=0.5))
    assert torch.equal(loss.skew_reverse_kl(p, t), loss.skew_reverse_kl(p, t, alpha=0.1))
    assert torch.equal(loss.skew_forward_kl(p, t), loss.skew_forward_kl(p, t, alpha=0.1))


@pytest.mark.parametrize("name", loss.DIVERGENCES)
def test_words_without_mass_on_either_side_leave_value_and_gradient_finite(name):
    """The first word is the student's only, the second the teacher's, the third nobody's."""
    z = torch.tensor([[0.3, -torch.inf, -torch.inf, 0.1, 0.2]], dtype=torch.float64).requires_grad_()
    t = torch.tensor([[-torch.inf, 0.5, -torch.inf, 0.2, -0.4]], dtype=torch.float64).log_softmax(-1)
    got = loss.divergence(name)(z.log_softmax(-1), t)
    (g,) = torch.autograd.grad(got.sum(), z)
    assert got.isfinite().all() and g.isfinite().all() and (g[0, 1:3] == 0).all()
    p, q = z.detach().softmax(-1)[0].numpy(), t.exp()[0].numpy()
    if name == "reverse_kl":  # a word that only the right side excludes counts 60
        want = 60 * p[0] + ref.distilled(name, np.where(q > 0, p, 0), q)
    elif name == "forward_kl":
        want = 60 * q[1] + ref.distilled(name, p, np.where(p > 0, q, 0))
    else:
        want = ref.distilled(name, p, q)
    assert got.item() == pytest.approx(want, rel=1e-12)


@given(seed=some.integers(0, 2**32), k=some.integers(1, 11), share=some.floats(0.05, 0.95))
def test_the_error_of_k_words_is_within_its_bound(seed, k, share):
    """Below the exact one, by no more than the mass of the tails allows."""
    p, t = distributions(seed, 8, 12)
    words = t.topk(k, -1).indices
    few = [loss.with_tail(x.gather(-1, words)) for x in (p, t)]
    s, q = (x[..., -1].exp() for x in few)
    others = torch.ones_like(p, dtype=torch.bool).scatter(-1, words, False)
    r = torch.where(others, (p - t).abs(), 0).amax(-1)
    m, forward, backward = (a * q + (1 - a) * s for a in (share, share, 1 - share))
    bounds = {
        "reverse_kl": 2 * r * s,
        "forward_kl": 2 * r * q,
        "jsd": m * math.log(2),
        "skew_forward_kl": q * (forward / (share * q)).log(),
        "skew_reverse_kl": s * (backward / (share * s)).log(),
    }
    assert set(bounds) == set(loss.DIVERGENCES)
    for name, bound in bounds.items():
        f = loss.divergence(name, beta=share, alpha=share)
        error = f(p, t) - f(*few)
        assert (error >= -1e-9).all() and (error <= bound + 1e-9).all(), name
    torch.testing.assert_close(loss.reverse_kl(*few), loss.reverse_kl_top_k(few[0][:, :-1], few[1][:, :-1]))


def test_all_words_and_a_tail_are_all_words():
    p, t = distributions(3, 5, 6)
    for name in loss.DIVERGENCES:
        f = loss.divergence(name)
        torch.testing.assert_close(f(loss.with_tail(p), loss.with_tail(t)), f(p, t), rtol=1e-6, atol=1e-7)


@given(seed=some.integers(0, 2**32), gamma=some.sampled_from([0.0, 0.5, 0.9, 1.0]), mean=some.booleans())
def test_the_advantage_by_a_teacher_is_its_double_sum(seed, gamma, mean):
    g = torch.Generator().manual_seed(seed)
    logp, teacher = -3 * torch.rand(2, 4, 9, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=g) < 0.6
    mask[0] = False
    got = loss.teacher_advantage(logp, teacher, mask, gamma=gamma, normalize=mean)
    want = ref.teacher_advantage(logp.tolist(), teacher.tolist(), mask.tolist(), gamma, mean)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-12)
    assert (got[~mask] == 0).all()


def test_the_reverse_kl_to_go_has_the_gradient_of_the_kl_of_whole_texts():
    """All texts of three words by a chain of four: the expected gradient, by enumeration of both."""
    g = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 4, 4, generator=g, dtype=torch.float64)
    _, want = ref.enumerated_reverse_kl(student.numpy(), teacher.numpy(), 3)
    texts = torch.tensor(list(itertools.product(range(4), repeat=3)))
    before = torch.cat([torch.zeros_like(texts[:, :1]), texts[:, :-1]], 1)
    student.requires_grad_()
    logp, of_teacher = student.log_softmax(-1)[before, texts], teacher.log_softmax(-1)[before, texts]
    adv = loss.teacher_advantage(logp, of_teacher, torch.ones_like(texts, dtype=torch.bool), gamma=1.0)
    chance = logp.detach().sum(-1, keepdim=True).exp()
    total = (chance * loss.reinforce(logp, adv)).sum()
    (got,) = torch.autograd.grad(total, student)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-12)


def test_agreement_is_of_the_likeliest_word():
    logp = torch.tensor([[0.6, 0.4], [0.3, 0.7]]).log()
    assert loss.top_1_agreement(logp, torch.tensor([[0.9, 0.1], [0.8, 0.2]]).log()).tolist() == [1, 0]


X = torch.zeros(2, 3)
BAD = [
    (lambda: loss.forward_kl(X, X[:, :2]), "teacher_logp: expected [... V] = [... 3], got [2, 2]"),
    (lambda: loss.jsd(X, None), "teacher_logp: expected a tensor, got None"),
    (lambda: loss.divergence("kl"), "divergence: expected one of reverse_kl, forward_kl, jsd"),
    (lambda: loss.divergence("jsd", beta=1.5), "beta: expected 0 to 1, got 1.5"),
    (lambda: loss.divergence("skew_reverse_kl", alpha=1.0), "alpha: expected 0 to 0.999, got 1.0"),
    (lambda: loss.teacher_advantage(X, X, X[:, :2]), "mask: expected [B S] = [2, 3], got [2, 2]"),
]


@each(("call", "message"), BAD)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value) and message.split(" [")[0] in str(error.value)


def words_of(lm, exp, k, temperature=1.0):
    """(ids, log-probs), [B, S, K] and token-aligned: the likeliest words of `lm` at each token's place."""
    ids, logps = (torch.zeros(*exp.tokens.shape, k, dtype=t) for t in (torch.long, torch.float32))
    for i, n in enumerate(exp.length.tolist()):
        with torch.no_grad():
            logp = (lm(exp.tokens[i : i + 1, :n]).logits[0, :-1] / temperature).log_softmax(-1)
        logps[i, 1:n], ids[i, 1:n] = logp.topk(k, -1)
    return ids, logps


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=40)])
def test_the_log_probs_of_words_are_those_of_whole_logits(sampling):
    """Fused (two temperatures) and over whole logits (top_k 40 of 48 words, the 5 likeliest are inside)."""
    lm, exp = tiny.llama(), tiny.experience()
    ids, _ = words_of(lm, exp, 5, sampling.temperature)
    apply, params = model.bind(lm, sampling=sampling)
    b = packing.pack(tree.replace(exp, words=ids), range(len(exp.length)))
    got = apply(params, b)
    at = 0
    for n, row in zip(exp.length.tolist(), exp.tokens):
        z = logprob.process_logits(lm(row[None, :n]).logits[0, :-1], sampling, keep=row[1:n])
        want = z.log_softmax(-1).gather(-1, b.words[at : at + n - 1])
        m = b.mask[at : at + n - 1]
        torch.testing.assert_close(got.words_logp[at : at + n - 1][m], want[m], rtol=1e-5, atol=1e-5)
        at += n - 1
    assert (got.words_logp[~b.mask] == 0).all()
    assert model.bind(lm)[0](params, tree.replace(b, words=None)).words_logp is None


def test_their_gradient_is_that_of_whole_logits_with_bias_and_softcap():
    g = torch.Generator().manual_seed(0)
    h, w, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((7, 4), (11, 4), (11,)))
    y, words = torch.randint(0, 11, (7,), generator=g), torch.randint(0, 11, (7, 3), generator=g)
    y[2], leaves = -100, [x.requires_grad_() for x in (h, w, bias)]
    temperature = torch.rand(7, generator=g, dtype=torch.float64) + 0.5
    up = torch.randn(7, 3, generator=g, dtype=torch.float64)
    out = logprob.linear_logprob(h, w, y, temperature=temperature, bias=bias, softcap=2.0, words=words)
    z = 2 * torch.tanh((h @ w.T + bias) / 2) / temperature[:, None]
    want = torch.where(y[:, None] != -100, z.log_softmax(-1).gather(-1, words), 0)
    torch.testing.assert_close(out.words_logp, want, rtol=1e-10, atol=1e-10)
    got = torch.autograd.grad((up * out.words_logp).sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad((up * want).sum(), leaves), rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match=r"words: expected \[T, K\] = \[7, K\], got \[6, 3\]"):
        logprob.linear_logprob(h, w, y, words=words[:6])


def test_a_student_whose_words_are_cut_has_finite_gradients():
    """top_k 2 and top_p 0.5 leave some of the 5 words at log-prob -inf, in the teacher's list too."""
    lm, exp, sampling = tiny.llama(dtype=torch.float64), tiny.experience(), Sampling(top_k=2, top_p=0.5)
    ids, teacher = words_of(tiny.llama(seed=1), exp, 5)
    teacher[..., 3:] = -torch.inf
    exp = tree.replace(exp, words=ids, extra={"teacher": teacher.double()})
    apply, params = model.bind(lm, sampling=sampling)
    b = packing.pack(exp, range(len(exp.length)))
    out = apply(params, b)
    assert (out.words_logp[b.mask] == -torch.inf).any()
    x = loss.reverse_kl_top_k(out.words_logp, b.extra["teacher"])[b.mask]
    grads = torch.autograd.grad(x.sum(), list(params.values()), allow_unused=True)
    assert x.isfinite().all() and all(g.isfinite().all() for g in grads if g is not None)


def test_a_student_comes_closer_to_its_teacher():
    """The reverse KL over 8 words falls, through Strategy.grad and update, and the sampled one with it."""
    teacher, student, exp = tiny.llama(seed=1), tiny.llama(seed=2), tiny.experience()
    ids, teacher_logp = words_of(teacher, exp, 8)
    exp = tree.replace(exp, words=ids, extra={"teacher": teacher_logp})
    packs = packing.shard(exp, 64)[0]
    ref = model.score(*model.bind(teacher), packs)
    packs = [tree.replace(p, ref_logp=x) for p, x in zip(packs, ref)]
    st = strategy.get_fake_strategy()
    apply, state = st.init(student, optim.adamw(3e-3))

    def loss_fn(out, b):
        return loss.reverse_kl_top_k(out.words_logp, b.extra["teacher"])

    def gap():
        x = [(p.w * loss_fn(apply(state.params, p), p)).sum() for p in packs]
        y = [(p.w * (apply(state.params, p).logp - p.ref_logp).abs()).sum() for p in packs]
        return torch.stack(x).sum().item(), torch.stack(y).sum().item()

    with torch.no_grad():
        before = gap()
    for _ in range(20):
        grads, _ = st.grad(state, apply, loss_fn, packs)
        state, _ = st.update(state, grads)
    with torch.no_grad():
        after = gap()
    assert after[0] < 0.5 * before[0] and after[1] < before[1]
