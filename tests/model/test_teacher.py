"""A student's comparison with its teacher inside the forward: exact, in chunks, by words, with several."""

import pytest
import tiny
import torch

from rft_fn import logprob, loss, model, optim, packing, strategy, tree
from rft_fn.model.teacher import as_bits
from rft_fn.types import Sampling

EXP = tiny.experience()
ROWS = range(len(EXP.length))


def whole(lm, temperature=1.0):
    """[T, V]: log-probs of all words at each target of the pack, by the model's own logits."""
    rows = [lm(row[None, :n]).logits[0, :-1] for n, row in zip(EXP.length.tolist(), EXP.tokens)]
    return (torch.cat(rows) / temperature).log_softmax(-1)


def ask(lm, top_k=0):
    """What a teacher reveals of the pack, and its head."""
    apply, params = model.bind(lm)
    with torch.no_grad(), model.revealed(apply, top_k=top_k) as asked:
        out = apply(params, packing.pack(EXP, ROWS))
    assert apply(params, packing.pack(EXP, ROWS)).hidden is None
    return out, asked


@pytest.mark.parametrize("name", loss.DIVERGENCES)
@pytest.mark.parametrize("chunk_size", [0, 1])
def test_the_divergence_is_that_of_whole_logits_with_both_temperatures(name, chunk_size):
    """Value and gradient, of teachers that are wider, and in chunks of 16 tokens."""
    student = tiny.llama(seed=1, dtype=torch.float64)
    teacher = tiny.llama(seed=2, dtype=torch.float64, hidden_size=48)
    out, asked = ask(teacher)
    apply, params = model.bind(student, sampling=Sampling(temperature=0.7), chunk_size=chunk_size)
    f = loss.divergence(name)
    model.attach_teacher(apply, model.Teacher(f, asked.head, temperature=1.3))
    b = tree.replace(packing.pack(EXP, ROWS), extra={"teacher_hidden": out.hidden})
    assert len(b.mask) > 32
    got = apply(params, b)
    ours, theirs = whole(student, 0.7), whole(teacher, 1.3).detach()
    want = torch.where(b.mask, f(ours, theirs), 0)
    torch.testing.assert_close(got.divergence, want, rtol=1e-9, atol=1e-12)
    agree = torch.where(b.mask, ours.argmax(-1) == theirs.argmax(-1), False)
    assert torch.equal(got.agreement.bool(), agree)
    w = torch.rand(len(b.mask), dtype=torch.float64)
    leaves = list(params.values())
    for x, y in zip(
        torch.autograd.grad((w * got.divergence).sum(), leaves), torch.autograd.grad((w * want).sum(), leaves)
    ):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_p=0.9)])
def test_words_of_a_teacher_are_its_likeliest_and_the_rest_is_one_word(sampling):
    student, teacher = (tiny.llama(seed=i, dtype=torch.float64) for i in (1, 2))
    out, _ = ask(teacher, top_k=5)
    b = packing.pack(EXP, ROWS)
    top = whole(teacher).topk(5, -1)
    m = b.mask
    torch.testing.assert_close(out.words_logp[m], top.values[m])
    assert torch.equal(out.top_words[m], top.indices[m]) and (out.top_words[~m] == 0).all()
    apply, params = model.bind(student, sampling=sampling)
    model.attach_teacher(apply, model.Teacher(loss.reverse_kl))
    b = tree.replace(b, extra={"teacher_words": out.top_words, "teacher_logp": out.words_logp})
    got = apply(params, b)
    z = torch.cat([student(r[None, :n]).logits[0, :-1] for n, r in zip(EXP.length.tolist(), EXP.tokens)])
    ours = logprob.process_logits(z, sampling, keep=b.target).log_softmax(-1)
    want = loss.reverse_kl_top_k(ours.gather(-1, top.indices), top.values.detach())
    torch.testing.assert_close(got.divergence[m], want[m], rtol=1e-9, atol=1e-11)
    assert torch.equal(got.agreement[m].bool(), (ours.argmax(-1) == top.indices[:, 0])[m])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_of_a_teacher_travel_as_their_bits(dtype):
    """A pack's numbers would be rounded to the type of a sharded forward."""
    out, asked = ask(tiny.llama(seed=2))
    apply, params = model.bind(tiny.llama(seed=1))
    model.attach_teacher(apply, model.Teacher(loss.reverse_kl, asked.head))
    hidden = out.hidden.to(dtype)
    b = packing.pack(EXP, ROWS)
    plain, bits = (
        apply(params, tree.replace(b, extra={"teacher_hidden": x})).divergence
        for x in (hidden, as_bits(hidden))
    )
    assert torch.equal(plain, bits) and not as_bits(hidden).is_floating_point()
    assert as_bits(hidden.half()).dtype == torch.int32


def test_each_token_has_the_teacher_of_its_number():
    student, *teachers = (tiny.llama(seed=i, dtype=torch.float64) for i in range(3))
    asked = [ask(lm) for lm in teachers]
    b = packing.pack(EXP, ROWS)
    number = (b.seq % 2).long()
    hidden = torch.where(number[:, None] == 0, asked[0][0].hidden, asked[1][0].hidden)
    apply, params = model.bind(student)
    f = loss.forward_kl
    model.attach_teacher(apply, *(model.Teacher(f, x.head) for _, x in asked))
    extra = {"teacher_hidden": hidden, "teacher_number": number}
    got = apply(params, tree.replace(b, extra=extra)).divergence
    want = torch.stack([f(whole(student), whole(lm)) for lm in teachers])
    want = torch.where(b.mask, want.gather(0, number[None])[0], 0)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    model.attach_teacher(apply)
    assert apply(params, tree.replace(b, extra=extra)).divergence is None


def test_heads_of_one_tokenizer_may_be_padded_to_different_sizes():
    """The words that only one has are left out."""
    size = len(tiny.tokenizer())
    student = tiny.llama(seed=1, dtype=torch.float64)
    teacher = tiny.llama(seed=2, dtype=torch.float64, vocab_size=size + 8)
    out, asked = ask(teacher)
    apply, params = model.bind(student)
    model.attach_teacher(apply, model.Teacher(loss.reverse_kl, asked.head))
    b = tree.replace(packing.pack(EXP, ROWS), extra={"teacher_hidden": out.hidden})
    want = loss.reverse_kl(whole(student), whole(teacher)[:, :size].log_softmax(-1))
    torch.testing.assert_close(apply(params, b).divergence[b.mask], want[b.mask], rtol=1e-9, atol=1e-11)


def test_what_cannot_be_revealed_is_named():
    apply, params = model.bind(tiny.llama(), sampling=Sampling(top_p=0.9))
    line = "top_k: expected words of this teacher: with top_p"
    with pytest.raises(ValueError, match=line), model.revealed(apply):
        apply(params, packing.pack(EXP, ROWS))
    with pytest.raises(ValueError, match="apply: expected that of a bound language model, got function"):
        model.attach_teacher(lambda params, pack: None)
    st = strategy.get_fake_strategy()
    apply, state = st.init(tiny.llama(), optim.adamw(1e-3))
    with pytest.raises(ValueError, match=r"TokenOut\.divergence: expected a value, got None; give the model"):
        st.grad(state, apply, lambda out, b: out.divergence * b.w, st.shard(EXP, 99))
    with pytest.raises(ValueError, match=r"data\[0\]: expected \[T, \.\.\.\] with T = 3, got \[2\]"):
        logprob.linear_rows(lambda logp, x: logp[:, 0], torch.ones(3, 4), torch.ones(5, 4), torch.ones(2))


@pytest.mark.parametrize("bias", [False, True])
def test_a_function_of_rows_has_the_gradient_of_plain_operations(bias):
    g = torch.Generator().manual_seed(0)
    h, w, c = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((40, 4), (11, 4), (11,)))
    leaves = [x.requires_grad_() for x in ((h, w, c) if bias else (h, w))]
    data, t = torch.rand(40, 11, generator=g, dtype=torch.float64), torch.rand(40, generator=g) + 0.5
    fn = lambda logp, x: (logp.exp() * x).cumsum(-1)  # noqa: E731
    b = c if bias else None
    got = logprob.linear_rows(fn, h, w, data, temperature=t, bias=b, workspace_mb=1e-6)
    want = fn(((h @ w.T + (c if bias else 0)) / t.double()[:, None]).log_softmax(-1), data)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    up = torch.randn(40, 11, generator=g, dtype=torch.float64)
    pairs = (torch.autograd.grad((up * x).sum(), leaves) for x in (got, want))
    for x, y in zip(*pairs):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def test_narrow_weights_are_computed_in_float32():
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(*s, generator=g).bfloat16().requires_grad_() for s in ((20, 8), (9000, 8)))
    fn = lambda logp: logp[:, :3]  # noqa: E731
    got = logprob.linear_rows(fn, h, w)
    want = fn((h.float() @ w.float().T).log_softmax(-1))
    torch.testing.assert_close(got, want)
    for x, y in zip(torch.autograd.grad(got.sum(), (h, w)), torch.autograd.grad(want.sum(), (h, w))):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
