"""On-policy distillation end to end: log-probs of K words from the fused head, and a student that moves."""

import pytest
import tiny
import torch

from rft_fn import logprob, loss, model, optim, packing, strategy, tree
from rft_fn.types import Sampling


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
