"""torch.func over losses, estimators and a small bound model: sweeps and per-sample gradients."""

import pytest
import tiny
import torch
from each_case import each
from torch.func import grad, vjp, vmap

from rft_fn import advantage, loss, model, packing, scan, testing, tree, weight

pytestmark = pytest.mark.usefixtures("float64")


def buffer(seed=0):
    """A frozen buffer as a sweep has it: (logp, old_logp, ref_logp, adv, mask, seq, w), [T]."""
    c = testing.case(seed)
    b = packing.pack(c.exp, range(8))
    return c.apply(c.params, b).logp, b


def total(logp, b, *, clip=0.2, beta=0.0):
    x = loss.ppo_clip(logp, b.old_logp, b.adv, low=clip, high=clip) + beta * loss.kl(logp, b.ref_logp)
    return (b.w * x).sum()


def test_a_sweep_of_clip_and_beta_is_what_a_loop_gets():
    """Values and gradients of a grid of 5 clips x 4 betas, in one call."""
    logp, b = buffer()
    clips, betas = torch.tensor([0.01, 0.1, 0.2, 0.5, 2.0]), torch.tensor([0.0, 0.01, 0.1, 1.0])
    point = lambda c, k: (total(logp, b, clip=c, beta=k), grad(total)(logp, b, clip=c, beta=k))  # noqa: E731
    values, grads = vmap(vmap(point, (None, 0)), (0, None))(clips, betas)
    assert grads.shape == (5, 4, len(logp))
    for i, c in enumerate(clips.tolist()):
        for j, k in enumerate(betas.tolist()):
            x = logp.clone().requires_grad_()
            want = total(x, b, clip=c, beta=k)
            torch.testing.assert_close(values[i, j], want.detach(), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(grads[i, j], torch.autograd.grad(want, x)[0], rtol=1e-12, atol=1e-14)
    assert values.unique().numel() == 20


def sequences(p, b):
    return p, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs


SWEEPS = {
    "gspo": lambda p, b, x: loss.gspo(*sequences(p, b), low=x, high=x),
    "gspo_token": lambda p, b, x: loss.gspo_token(*sequences(p, b), low=x, high=x),
    "gmpo": lambda p, b, x: loss.gmpo(*sequences(p, b), low=x, high=x),
    "cispo": lambda p, b, x: loss.cispo(p, b.old_logp, b.adv, high=x),
    "sapo": lambda p, b, x: loss.sapo(p, b.old_logp, b.adv, tau_pos=1 + x, tau_neg=2 + x),
    "cpgd": lambda p, b, x: loss.cpgd(p, b.old_logp, b.adv, drift=x),
    "dppo_tv": lambda p, b, x: loss.dppo_tv(p, b.old_logp, b.adv, limit=0.1 * x),
    "dppo_kl": lambda p, b, x: loss.dppo_kl(p, b.old_logp, b.adv, limit=0.1 * x),
    "kl_cov": lambda p, b, x: loss.kl_cov(p, b.old_logp, b.adv, b.mask.double(), coef=x),
    "value_clip": lambda p, b, x: loss.value_clip(p, b.old_value, b.ret, clip=x),
    "dpo": lambda p, b, x: loss.dpo(p, b.old_logp, b.ref_logp, b.adv, beta=x),
    "vespo": lambda p, b, x: loss.vespo(*sequences(p, b), k_pos=1 + x, lambda_neg=1 + x),
    "dro": lambda p, b, x: loss.dro(p, b.old_logp, b.adv, beta=x),
    "a_star": lambda p, b, x: loss.a_star(*sequences(p, b), beta=x),
    "nca": lambda p, b, x: loss.nca(p, b.old_logp, b.ref_logp, b.adv, beta=x),
    "sppo": lambda p, b, x: loss.sppo(p, b.old_logp, b.ref_logp, b.adv, beta=x),
    "simpo": lambda p, b, x: loss.simpo(p, b.old_logp, beta=x, margin=x),
    "kto": lambda p, b, x: loss.kto(p, b.old_logp, b.adv, beta=x, baseline=x),
    "ipo": lambda p, b, x: loss.ipo(p, b.old_logp, b.ref_logp, b.adv, beta=x),
    "bradley_terry": lambda p, b, x: loss.bradley_terry(p, b.adv, margin=x),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_every_loss_can_be_swept(name):
    logp, b = buffer(1)
    points = torch.tensor([0.05, 0.2, 0.6])
    f = lambda p, x: (b.w * SWEEPS[name](p, b, x)).sum()  # noqa: E731
    got = vmap(grad(f), in_dims=(None, 0))(logp, points)
    want = torch.stack([grad(f)(logp, x) for x in points])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert not torch.equal(got[0], got[2]) or name in ("dppo_tv", "dppo_kl")


@each(
    "estimator",
    [
        advantage.grpo,
        advantage.rloo,
        advantage.cpgd,
        advantage.reinforce_pp_baseline,
        lambda r: advantage.opo(r, torch.ones_like(r)),
        lambda r: advantage.remax(r, r[:, 0]),
        lambda r: advantage.gdpo(torch.stack([r, r**2]), torch.tensor([1.0, 0.5])),
        lambda r: advantage.pass_at_k(r > 0, k=2),
        lambda r: advantage.quantile(r, q=0.4),
        lambda r: advantage.whiten(r, r < 1),
        lambda r: advantage.gae(r, r**2, torch.full_like(r, 0.9), 0.9, mask=r < 1)[0],
        lambda r: scan.linear_scan(r, r + 1),
        lambda r: weight.high_entropy(r, r**2, r < 1, share=0.3),
        lambda r: weight.truncated_is(r, r, 2 * r),
        lambda r: weight.masked_is_seq(r, r, 2 * r, r < 1),
    ],
)
def test_estimators_and_weights_under_vmap_are_what_a_loop_gets(estimator):
    batch = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(vmap(estimator)(batch), torch.stack([estimator(r) for r in batch]))


def test_per_sample_gradients_of_a_bound_model_add_up_and_are_each_rows_own():
    """vmap(grad) over `packing.stack` on a real Llama, with the fused head and packed attention."""
    apply, params = model.bind(tiny.llama(dtype=torch.float64))
    params = tree.map(lambda p: p.detach(), params)
    exp = tiny.experience()
    exp = tree.replace(exp, adv=torch.randn(exp.mask.shape) * exp.mask, w=weight.seq_mean(exp.mask))

    def of(params, b):
        out = apply(params, b)
        return (b.w * loss.reinforce(out.logp, b.adv)).sum()

    each = vmap(grad(of), in_dims=(None, 0))(params, packing.stack(exp))
    packs = [packing.pack(exp, [i]) for i in range(len(exp.length))]
    for i, b in enumerate(packs):
        for name, g in grad(of)(params, b).items():
            torch.testing.assert_close(each[name][i], g, rtol=1e-9, atol=1e-12)
    whole = grad(of)(params, packing.pack(exp, range(len(packs))))
    for name, g in whole.items():
        torch.testing.assert_close(each[name].sum(0), g, rtol=1e-9, atol=1e-12)


def test_one_backward_a_point_and_no_forward_from_log_probs_to_parameters():
    """The two stages of a sweep: gradients to log-probs by vmap over the loss, to parameters by vmap over
    one vjp."""
    apply, params = model.bind(tiny.llama(dtype=torch.float64))
    params = tree.map(lambda p: p.detach(), params)
    exp = tiny.experience()
    b = packing.pack(exp, range(len(exp.length)))
    logp, back = vjp(lambda q: apply(q, b).logp, params)
    old_logp = logp - 0.2 * torch.sin(torch.arange(len(logp))) * b.mask
    b = tree.replace(b, old_logp=old_logp, adv=b.mask.double())
    clips = torch.tensor([0.05, 0.1, 0.4])
    f = lambda p, c: (b.w * loss.ppo_clip(p, b.old_logp, b.adv, low=c, high=c)).sum()  # noqa: E731
    (got,) = vmap(back)(vmap(grad(f), (None, 0))(logp, clips))
    for i, c in enumerate(clips):
        want = grad(lambda q: f(apply(q, b).logp, c))(params)  # noqa: B023
        for name, g in want.items():
            torch.testing.assert_close(got[name][i], g, rtol=1e-9, atol=1e-12)


def test_stacked_packs_say_what_they_cannot_hold():
    from rft_fn.types import Media

    exp = testing.case(0).exp
    media = Media.of_prompts([{"x": torch.zeros(1, 1)}] * 8)
    with pytest.raises(ValueError, match="media: expected None"):
        packing.stack(tree.replace(exp, media=media))
    b = packing.pack(exp, [3])
    with pytest.raises(ValueError, match=f"size: expected >= {len(b.tokens)}, the tokens of the pack, got 1"):
        packing.pad(b, 1)


def test_padding_a_pack_changes_neither_total_nor_gradient():
    c = testing.case(2)
    f = SWEEPS["gspo"]
    b = packing.pack(c.exp, range(8))
    fn = lambda o, p: f(o.logp, p, 0.2)  # noqa: E731
    want = testing.total_and_grad(fn, c.apply, c.params, [b])
    padded = packing.pad(b, len(b.tokens) + 5)
    torch.testing.assert_close(testing.total_and_grad(fn, c.apply, c.params, [padded]), want)
