"""The gradient of a loss at each token, against derivatives by hand and by differences."""

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as some

import rft_fn as rft
from rft_fn.types import Packed, TokenOut

pytestmark = pytest.mark.usefixtures("float64")

number = some.floats(-2, 2, allow_nan=False).filter(lambda x: abs(x) > 1e-3)


def packed(old_logp, adv, w, num_seqs=1):
    size = len(old_logp)
    index = torch.arange(size)
    seq = index * num_seqs // size
    fields = {"tokens": index, "target": index, "pos": index, "seq": seq, "num_seqs": num_seqs}
    mask = torch.ones(size, dtype=torch.bool)
    return Packed(**fields, mask=mask, old_logp=old_logp, adv=adv, w=w)


@given(
    some.lists(some.tuples(number, number, number, some.floats(0.1, 1)), min_size=1, max_size=8),
    some.sampled_from([None, 1.5]),
)
def test_of_ppo_clip_it_is_the_derivative_by_hand(rows, dual):
    logp, old, adv, w = torch.tensor(rows).T
    b = packed(old, adv, w)
    limits = {"low": 0.2, "high": 0.3, "dual": dual}

    def loss_fn(out, b):
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv, **limits)

    found = rft.loss.token_gradient(loss_fn, TokenOut(logp=logp), b)
    want = ref.ppo_clip_gradient(logp, old, adv, w, **limits)
    np.testing.assert_allclose(found, want, rtol=1e-12)

    # what has no gradient is what is clipped
    clipped = rft.loss.without_gradient(found, adv, w)
    assert clipped.tolist() == (want == 0).tolist()


def test_of_a_loss_over_sequences_it_has_what_a_token_does_to_the_others():
    torch.manual_seed(0)
    logp, old, adv = torch.randn(3, 6) * 0.01
    w = torch.rand(6)
    b = packed(old, adv, w, num_seqs=2)

    def loss_fn(out, b):
        return rft.loss.gspo(out.logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, low=1.0, high=1.0)

    found = rft.loss.token_gradient(loss_fn, TokenOut(logp=logp), b)
    for t in range(6):
        step = torch.zeros(6)
        step[t] = 1e-6
        up, down = ((w * loss_fn(TokenOut(logp=logp + s), b)).sum() for s in (step, -step))
        torch.testing.assert_close(found[t], (up - down) / 2e-6, rtol=1e-6, atol=1e-9)


def test_other_outputs_are_constants_and_a_loss_without_log_probs_has_none():
    ones = torch.ones(3)
    out = TokenOut(logp=-ones, entropy=ones.clone().requires_grad_(), value=ones)
    b = packed(ones, ones, 2 * ones)
    found = rft.loss.token_gradient(lambda out, b: (out.entropy - 3 * out.logp, {"x": 1}), out, b)
    assert found.tolist() == [-6.0] * 3
    assert rft.loss.token_gradient(lambda out, b: out.value, out, b).tolist() == [0.0] * 3
    with torch.no_grad():
        assert rft.loss.token_gradient(lambda out, b: -out.logp, out, b).tolist() == [-2.0] * 3


def test_it_leaves_the_output_as_it_was():
    """A leaf without a gradient does not begin to ask for one, and to one that has one nothing is added."""
    ones = torch.ones(3)
    plain, leaf = TokenOut(logp=-ones), TokenOut(logp=(-ones).requires_grad_())
    for out in (plain, leaf):
        rft.loss.token_gradient(lambda out, b: -out.logp, out, packed(ones, ones, ones))
    assert not plain.logp.requires_grad and leaf.logp.grad is None


def test_tokens_without_advantage_or_weight_are_not_clipped():
    gradient = torch.tensor([0.0, 0.0, 0.0, 1.0])
    adv = torch.tensor([1.0, 0.0, 1.0, 1.0])
    w = torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert rft.loss.without_gradient(gradient, adv, w).tolist() == [True, False, False, False]
