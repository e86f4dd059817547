"""The gradient of each response, against `st.grad` of its row and against brute force."""

import warnings

import families
import pytest
import ranks
import tiny
import torch
from test_noise import BACKENDS, batch, flat, of_prompts, reinforce
from torch import nn

import rft_fn as rft
from rft_fn import analysis, packing
from rft_fn.strategy import StrategyConfig, get_strategy


def trained(st, dtype=torch.float64):
    return st.init(families.small("GPTNeoX", dtype, attention_bias=False), rft.optim.adamw(1e-3))


def nll(out, b):
    return rft.loss.nll(out.logp)


def measured(st, apply, state, exp, **options):
    held_out = (nll, st.shard(batch(3, dtype=exp.w.dtype), 100))
    return analysis.per_sequence(st, state, apply, reinforce, exp, budget=100, held_out=held_out, **options)


def same(got, want, tolerance):
    for name in ("norm", "with_batch", "with_held_out", "batch_norm", "held_out_norm"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loop", [None, True])
def test_each_response_is_its_row(loop):
    """One backward for each row, and sums that are `st.grad` of the batch."""
    st, exp = get_strategy(), batch(5)
    apply, state = trained(st)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = measured(st, apply, state, exp, loop=loop, chunk=3)
    each = torch.stack(
        [flat(st.grad(state, apply, reinforce, [packing.pack(exp, [row])])[0]) for row in range(20)]
    )
    whole = flat(st.grad(state, apply, reinforce, st.shard(exp, 100))[0])
    other = flat(st.grad(state, apply, nll, st.shard(batch(3), 100))[0])
    assert torch.allclose(got.norm, each.norm(dim=1), rtol=1e-10)
    assert torch.allclose(got.with_batch, each @ whole, rtol=1e-10, atol=1e-10)
    assert torch.allclose(got.with_held_out, each @ other, rtol=1e-10, atol=1e-10)
    assert float(got.with_batch.sum()) == pytest.approx(float(whole.square().sum()), rel=1e-10)
    assert (float(got.batch_norm), float(got.held_out_norm)) == pytest.approx(
        (float(whole.norm()), float(other.norm()))
    )


def test_parts_are_prompts():
    """What a jackknife over prompts needs: the gradient without one of them follows from its products."""
    st, exp = get_strategy(), batch(5)
    apply, state = trained(st)
    rows = [(exp.group == n).nonzero()[:, 0].tolist() for n in range(5)]
    got = measured(st, apply, state, exp, parts=rows)
    each = of_prompts(st, state, apply, exp)
    assert torch.allclose(got.norm, each.norm(dim=1), rtol=1e-10)
    without = (each.sum(0) - each[2]).square().sum()
    assert float(got.batch_norm**2 - 2 * got.with_batch[2] + got.norm[2] ** 2) == pytest.approx(
        float(without)
    )


class Reading(nn.Module):
    """A layer that reads a value, which torch.func cannot."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **options):
        out = self.inner(*args, **options)
        return out * (2.0 if float(out.sum()) > 1e9 else 1.0)


def test_a_layer_that_torch_func_cannot_trace_is_named():
    st, exp = get_strategy(), batch(3)
    lm = tiny.llama(dtype=torch.float64)
    lm.model.layers[1].mlp = Reading(lm.model.layers[1].mlp)
    apply, state = st.init(lm, rft.optim.adamw(1e-3))
    with pytest.warns(UserWarning, match=r"model\.layers\.1\.mlp \(Reading\) fails: .*; loop=True"):
        got = measured(st, apply, state, exp)
    same(got, measured(st, apply, state, exp, loop=True), 0)
    with pytest.raises(ValueError, match=r"apply: expected a model that torch.func can trace, got"):
        measured(st, apply, state, exp, loop=False)

    def branches(out, b):
        return out.logp if float(out.logp.sum()) < 0 else -out.logp

    apply, state = trained(st)
    with pytest.raises(ValueError, match="where the loss or the backward fails"):
        analysis.per_sequence(st, state, apply, branches, exp, budget=100, loop=False)


def test_what_is_computed_in_a_loop_says_why():
    st, exp = get_strategy(), batch(3)
    apply, state = trained(st)
    with pytest.raises(ValueError, match="loop: expected True for parts of several rows, got False"):
        analysis.per_sequence(st, state, apply, reinforce, exp, budget=100, parts=[[0, 1]], loop=False)


def on_ranks(rank):
    processes = rft.dist.begin(600.0)
    out = {}
    for name, (options, dtype) in BACKENDS.items():
        st = get_strategy(StrategyConfig(**options))
        apply, state = trained(st, dtype)
        out[name] = measured(st, apply, state, batch(3, dtype=dtype))
        st.close()
    processes.close()
    return out


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    found = ranks.run(2, "test_sequences:on_ranks")
    for name, (_, dtype) in BACKENDS.items():
        st = get_strategy()
        apply, state = trained(st, dtype)
        want = measured(st, apply, state, batch(3, dtype=dtype))
        for mine in found:
            same(mine[name], want, 1e-10 if dtype == torch.float64 else 1e-6)
