"""Log-probs and the distribution that is sampled from: one definition for the engine and the trainer."""

import numpy as np
import pytest
import ref
import tiny
import torch
from each_case import each
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rft_fn import model, packing
from rft_fn.logprob import (
    entropy_from_logits,
    linear_logprob,
    log_probs_and_entropy,
    log_probs_from_logits,
    log_ratio,
    process_logits,
    sum_p2,
)
from rft_fn.types import Sampling

seeds = st.integers(0, 2**32)


def logits_and_target(seed, rows=4, vocab=9, spread=3.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, vocab)) * spread, rng.integers(0, vocab, rows)


@given(seed=seeds, temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]))
def test_log_probs_and_entropy_against_the_definition(seed, temperature):
    z, y = logits_and_target(seed)
    got = log_probs_from_logits(torch.from_numpy(z), torch.from_numpy(y), temperature=temperature)
    want = ref.log_softmax(z, temperature)[np.arange(4), y]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    entropy = entropy_from_logits(torch.from_numpy(z), temperature=temperature)
    np.testing.assert_allclose(entropy, [ref.entropy(row, temperature) for row in z], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_have_log_probs_in_float32(dtype):
    """A softmax in bf16, which others compute under a bf16 trainer, is off by up to 0.05 nats."""
    g = torch.Generator().manual_seed(0)
    z = (3 * torch.randn(64, 4096, generator=g)).to(dtype)
    y = torch.randint(0, 4096, (64,), generator=g)
    got = log_probs_from_logits(z, y)
    want = z.double().log_softmax(-1).gather(-1, y[:, None])[:, 0]
    assert got.dtype == torch.float32 and (got - want).abs().max() <= 1e-5
    naive = z.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    assert (naive.double() - want).abs().max() > 1e-3  # the bound means something here
    entropy = -(z.double().softmax(-1) * z.double().log_softmax(-1)).sum(-1)
    assert (entropy_from_logits(z) - entropy).abs().max() <= 1e-4


def test_the_temperature_divides_the_training_logits_too():
    """Scored at 1 after sampling at 0.6, log-probs are of a distribution that nobody drew from."""
    z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    assert log_probs_from_logits(z, y, temperature=0.5).item() == pytest.approx(
        -np.log1p(np.exp(-4)), abs=1e-6
    )


def test_log_probs_survive_large_and_impossible_logits():
    z = torch.tensor([[1e4, 0.0, -torch.inf], [-1e4, -1e4, -torch.inf]], requires_grad=True)
    logp = log_probs_from_logits(z, torch.tensor([0, 1]))
    assert logp.tolist() == pytest.approx([0.0, -np.log(2)], abs=1e4 * 2**-23)  # the spacing of such logits
    entropy = entropy_from_logits(z)
    (g,) = torch.autograd.grad(logp.sum() + entropy.sum(), z)
    assert entropy.tolist() == pytest.approx([0.0, np.log(2)], abs=1e-6) and g.isfinite().all()


@pytest.mark.parametrize("bad", [-100, -1, 5])
def test_a_target_that_is_no_token_is_refused_by_torch(bad):
    with pytest.raises(RuntimeError, match=f"index {bad} is out of bounds"):
        log_probs_from_logits(torch.zeros(2, 3, 5), torch.tensor([[0, 1, 2], [4, bad, 0]]))


def test_a_log_ratio_by_hand():
    """0 without a gradient where both exclude the token; bounded where one does, or they are far apart."""
    inf = torch.inf
    logp = torch.tensor([-1.0, -inf, -inf, -2.0, -9.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5, -inf, -2.0, -inf, -1.0, -9.0], dtype=torch.float64)
    assert log_ratio(logp, old).tolist() == [0.5, 0.0, -inf, inf, -8.0, 8.0]
    got = log_ratio(logp, old, limit=3.0)
    assert got.tolist() == [0.5, 0.0, -3.0, 3.0, -3.0, 3.0]
    assert torch.autograd.grad(got.sum(), logp)[0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert log_ratio(logp, old, limit=8.0)[4:].tolist() == [-8.0, 8.0]


def plain(z, y, temperature=1.0):
    logp = (z / temperature).log_softmax(-1)
    return logp.gather(-1, y.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def drawn(*shape):
    g = torch.Generator().manual_seed(0)
    return 2 * torch.randn(*shape, generator=g, dtype=torch.float64), torch.randint(
        shape[-1], shape[:-1], generator=g
    )


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0, 7), (2, 0, 7), (1, 1)])
def test_leading_dimensions_and_both_at_once(shape):
    z, y = drawn(*shape)
    z.requires_grad_()
    got, want = log_probs_and_entropy(z, y, temperature=0.7), plain(z, y, 0.7)
    assert got[0].shape == got[1].shape == y.shape
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    alone = log_probs_from_logits(z, y, temperature=0.7), entropy_from_logits(z, temperature=0.7)
    torch.testing.assert_close(alone, got, rtol=1e-12, atol=1e-12)
    pair = [torch.autograd.grad((x[0] * 3 - x[1].square()).sum(), z)[0] for x in (got, want)]
    torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


def test_sliced_and_transposed_logits():
    z, y = drawn(2, 6, 7)
    for view, at in ((z[:, :-1], y[:, 1:]), (z.transpose(0, 1), y.T), (z[..., ::2], y % 4)):
        torch.testing.assert_close(log_probs_and_entropy(view, at), plain(view, at), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 1, 1), (2, 3, 7)])
def test_a_temperature_is_whatever_divides_the_logits_and_may_be_learned(shape):
    z, y = drawn(2, 3, 7)
    t = torch.linspace(0.5, 2, max(1, int(np.prod(shape)))).double().reshape(shape).requires_grad_()
    pair = [
        torch.autograd.grad(sum(x.square().sum() for x in f(z, y, temperature=t)), t)[0]
        for f in (log_probs_and_entropy, plain)
    ]
    torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-11)


TRANSFORMS = {
    "grad": torch.func.grad,
    "vmap": lambda f: torch.vmap(f),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f)),
    "vmap over another axis": lambda f: lambda z: torch.vmap(torch.func.grad(f), in_dims=2)(z.movedim(0, 2)),
    "jacrev": torch.func.jacrev,
    "two differentiations": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "three": lambda f: torch.func.grad(
        lambda z: torch.func.grad(lambda z: torch.func.grad(f)(z).pow(3).sum())(z).sin().sum()
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func(transform):
    z, y = drawn(3, 4, 7)

    def loss(f):
        def call(z):
            logp, entropy = f(z, y[0].expand(z.shape[:-1]))
            return (logp.exp() * entropy.square()).sum()

        return call

    got, want = (transform(loss(f))(z) for f in (log_probs_and_entropy, plain))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operation made; a view of the logits is none."""

    def __init__(self, known):
        super().__init__()
        self.known, self.bytes = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_logits_are_never_copied_and_the_gradient_is_the_only_thing_of_their_size(dtype):
    z = torch.randn(600, 4096, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = torch.arange(600)
    with Largest(z) as seen:
        out = log_probs_and_entropy(z, y)
    assert seen.bytes <= 4 << 20
    with Largest(z) as seen:
        (dz,) = torch.autograd.grad(out[0].sum() + out[1].sum(), z)
    assert seen.bytes == z.nbytes > 4 << 20 and dz.dtype == dtype


@given(
    seed=seeds,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.3, 0.8, 0.99, 1.0]),
)
def test_truncated_distribution_against_the_definition(seed, temperature, top_k, top_p):
    z, _ = logits_and_target(seed)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    got = process_logits(torch.from_numpy(z), sampling).softmax(-1)
    want = [ref.truncated(row, temperature, top_k, top_p) for row in z]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def by_sorting(z, sampling):
    """Which of the logits [R, V] stay, by one stable sort of all of them."""
    ranked, index = z.sort(dim=-1, descending=True, stable=True)
    stays = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k:
        stays[:, sampling.top_k :] = False
    p = ranked.double().masked_fill(~stays, -torch.inf).softmax(-1)
    before = p.cumsum(-1) - p
    if sampling.top_p < 1:
        assume((before - sampling.top_p).abs().min() > 1e-5)  # not a matter of rounding
        stays &= before < sampling.top_p
    return torch.zeros_like(stays).scatter(-1, index, stays)


@given(
    seed=seeds,
    vocab=st.sampled_from([7, 70, 1500]),
    levels=st.sampled_from([2, 10, 1000]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 6, 64, 900]),
    top_p=st.sampled_from([0.05, 0.31, 0.9, 0.999, 1.0]),
)
def test_what_stays_is_what_a_sort_leaves(seed, vocab, levels, spread, top_k, top_p):
    """Also among many equal logits, where the first of them in the vocabulary stay."""
    generator = torch.Generator().manual_seed(seed)
    z = spread * torch.randn(5, vocab, generator=generator)
    z = (z * levels / spread).round() / levels * spread
    sampling = Sampling(top_k=top_k, top_p=top_p)
    want = by_sorting(z, sampling)
    assert torch.equal(process_logits(z, sampling).isfinite(), want)
    mapped = torch.func.vmap(lambda row: process_logits(row, sampling))(z)
    assert torch.equal(mapped.isfinite(), want)


def test_logits_without_values_are_cut_too():
    z = torch.empty(3, 100, device="meta")
    assert process_logits(z, Sampling(top_p=0.9)).shape == z.shape


def test_the_token_that_crosses_top_p_stays():
    z = torch.tensor([0.5, 0.3, 0.2]).log()

    def kept(p):
        return process_logits(z, Sampling(top_p=p)).isfinite().tolist()

    assert kept(0.4) == [True, False, False]
    assert kept(0.6) == [True, True, False]
    assert kept(0.9) == [True, True, True]
    assert kept(1e-9) == [True, False, False]  # never nothing


def test_nothing_is_cut_at_the_defaults_and_greedy_leaves_the_logits():
    z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(process_logits(z, Sampling()), z)
    assert torch.equal(process_logits(z, Sampling(temperature=0.0)), z)


@given(seed=seeds, top_k=st.integers(1, 4), top_p=st.sampled_from([0.3, 0.9]))
def test_keep_makes_the_log_prob_of_the_target_finite_and_nothing_else(seed, top_k, top_p):
    """A drawn token may leave the top k after an update: its log-prob has to stay a number."""
    z, y = (torch.from_numpy(x) for x in logits_and_target(seed))
    sampling = Sampling(top_k=top_k, top_p=top_p)
    plain, kept = process_logits(z, sampling), process_logits(z, sampling, keep=y)
    hit = torch.nn.functional.one_hot(y, z.shape[-1]).bool()
    assert torch.equal(kept[hit], z[hit]) and torch.equal(kept[~hit], plain[~hit])
    assert log_probs_from_logits(kept, y).isfinite().all()


def test_the_cut_carries_no_gradient_and_leaves_none_outside():
    z = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    logp = log_probs_from_logits(process_logits(z, Sampling(top_k=2)), torch.tensor([0]))
    (g,) = torch.autograd.grad(logp.sum(), z)
    p = torch.tensor([2.0, 1.0]).softmax(-1)
    torch.testing.assert_close(g, torch.tensor([[1 - p[0], -p[1], 0.0, 0.0]]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_linear_logprob_is_the_log_prob_of_the_logits_with_its_gradient(temperature):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(5, 4, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(11, 4, generator=g, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([3, 10, 0, 7, 7])

    def naive():
        z = h @ w.T
        return log_probs_from_logits(z, y, temperature=temperature), entropy_from_logits(
            z, temperature=temperature
        )

    out = linear_logprob(h, w, y, temperature=temperature, entropy=True)
    for got, want in zip((out.logp, out.entropy), naive()):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        pair = [
            torch.autograd.grad((x * torch.arange(5.0)).sum(), (h, w), retain_graph=True) for x in (got, want)
        ]
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)


def test_linear_logprob_ignores_labels_of_minus_100():
    h, w = torch.randn(2, 4, requires_grad=True), torch.randn(11, 4)
    out = linear_logprob(h, w, torch.tensor([-100, 3]))
    (g,) = torch.autograd.grad(out.logp.sum(), h)
    assert out.logp[0] == 0 and (g[0] == 0).all() and out.logp[1] < 0 and g[1].abs().max() > 0


def test_the_heads_way_out_of_one_differentiation_has_the_second_derivatives():
    """What the fused head's error names, against autograd of the formula on whole logits in float64."""
    g = torch.Generator().manual_seed(3)
    h, w, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((5, 4), (9, 4), (9,)))
    y, up = torch.randint(0, 9, (5,), generator=g), torch.randn(5, generator=g, dtype=torch.float64)
    y[1] = -100

    def fused(h, w, bias, engine):
        out = linear_logprob(h, w, y, temperature=0.7, bias=bias, entropy=True, engine=engine)
        return (up * (out.logp + 0.3 * out.entropy)).sum()

    def formula(h, w, bias):
        logp = ((h @ w.T + bias) / 0.7).log_softmax(-1)
        chosen = logp.gather(-1, y.clamp(min=0)[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return (up * (chosen + 0.3 * entropy) * (y != -100)).sum()

    def hessian_product(f):
        leaves = [x.clone().requires_grad_() for x in (h, w, bias)]
        first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    want = hessian_product(formula)
    with pytest.raises(RuntimeError, match="pass engine='reference'"):
        hessian_product(lambda *x: fused(*x, "auto"))
    got = hessian_product(lambda *x: fused(*x, "reference"))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_bound_model_follows_the_same_advice():
    """fused=False, as the error says; attention that has a second derivative (eager) is the model's own."""
    lm, exp = tiny.llama(1, dtype=torch.float64), tiny.experience(rows=1)
    lm.set_attn_implementation("eager")
    b = packing.pack(exp, [0])

    def penalty(logp, leaves):
        grads = torch.autograd.grad(logp[b.mask].sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    apply, params = model.bind(lm)
    with pytest.raises(RuntimeError, match="for a bound model fused=False"):
        penalty(apply(params, b).logp, list(params.values()))
    apply, params = model.bind(lm, fused=False)
    got = penalty(apply(params, b).logp, list(params.values()))
    logits = lm(b.tokens[None], use_cache=False).logits[0]
    logp = logits.log_softmax(-1).gather(-1, b.target[:, None])[:, 0]
    torch.testing.assert_close(got, penalty(logp, list(params.values())), rtol=1e-8, atol=1e-6)


@each("temperature", [1.0, 0.7, torch.tensor(0.7), torch.linspace(0.5, 2, 6).double()])
@each("softcap", [None, 2.0])
@each("biased", [False, True])
def test_words_have_the_log_probs_of_the_whole_distribution(temperature, softcap, biased):
    """Whatever bends the logits; 0 where there is no target. Value and gradients, of the bias too."""
    g = torch.Generator().manual_seed(1)
    h, w, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((6, 4), (9, 4), (9,)))
    y, words = torch.randint(0, 9, (6,), generator=g), torch.randint(0, 9, (6, 3), generator=g)
    y[2] = -100
    found = []
    for whole in (False, True):
        leaves = [x.clone().requires_grad_() for x in ((h, w, bias) if biased else (h, w))]
        if whole:
            z = leaves[0] @ leaves[1].T + (leaves[2] if biased else 0)
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            t = temperature[:, None] if torch.is_tensor(temperature) and temperature.dim() else temperature
            got = (z / t).log_softmax(-1).gather(-1, words) * (y != -100)[:, None]
        else:
            how = {"temperature": temperature, "softcap": softcap, "bias": leaves[2] if biased else None}
            out = linear_logprob(leaves[0], leaves[1], y, words=words, **how)
            got = out.words_logp
            assert out.entropy is None and (out.logp[2], got[2].any()) == (0, False)
        up = torch.linspace(1, 2, 18).double().view(6, 3)
        found.append((got.detach(), *torch.autograd.grad((up * got).sum(), leaves)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_words_of_a_masked_token_whose_hidden_state_is_nan_leave_gradients_alone():
    """A where on the result alone hides the NaN in the value and keeps 0 * NaN in the gradient."""
    g = torch.Generator().manual_seed(1)
    h, w = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((6, 4), (9, 4)))
    y, words = torch.randint(0, 9, (6,), generator=g), torch.randint(0, 9, (6, 3), generator=g)
    y[2] = -100
    broken = h.clone()
    broken[2] = torch.nan
    found = []
    for hidden in (h, broken):
        leaves = [hidden.clone().requires_grad_(), w.clone().requires_grad_()]
        out = linear_logprob(*leaves, y, words=words, softcap=3.0)
        found.append((out.words_logp.detach(), *torch.autograd.grad(out.words_logp.sum(), leaves)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert (found[0][1][2] == 0).all()


@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_sum_of_squared_probabilities(temperature, softcap):
    """Of all words, without logits; the rest of the output has the bits that it has without it."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((9, 5), (300, 5)))
    target = torch.randint(0, 300, (9,), generator=g)
    target[3] = -100
    hidden = hidden.requires_grad_()
    options = {"temperature": temperature, "softcap": softcap, "entropy": True}
    plain = linear_logprob(hidden, weight, target, **options)
    out = linear_logprob(hidden, weight, target, **options, squares=True)
    assert torch.equal(out.logp, plain.logp) and torch.equal(out.entropy, plain.entropy)
    assert plain.sum_p2 is None and not out.sum_p2.requires_grad
    z = hidden @ weight.T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    want = (z / temperature).softmax(-1).square().sum(-1).detach()
    want[3] = 0
    torch.testing.assert_close(out.sum_p2, want, rtol=1e-10, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_a_bound_model_gives_the_sum_of_squares_and_two_temperatures_tell_it_too(fused):
    """What a sharded backend does not give by itself: scores of the same rows at half the temperature."""
    exp = packing.supervised([([5, 6, 7], [8, 9]), ([4], [3, 10, 11])])
    pack = packing.pack(exp, [0, 1])
    at = lambda t, **more: model.bind(  # noqa: E731
        model.load("tiny"), sampling=Sampling(temperature=t), fused=fused, **more
    )
    apply, params = at(0.8, squares=True)
    (found,) = model.score(apply, params, [pack], field="sum_p2")
    logp, half = (model.score(*at(t), [pack])[0] for t in (0.8, 0.4))
    torch.testing.assert_close(found[pack.mask], sum_p2(logp, half)[pack.mask], rtol=1e-4, atol=1e-6)
    assert (found[~pack.mask] == 0).all() and (found[pack.mask] > 1 / 50).all()
    with pytest.raises(ValueError, match="sum_p2: expected a value, got None; bind the model with squares"):
        model.score(*at(0.8), [pack], field="sum_p2")
