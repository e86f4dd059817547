"""What the functions of rft_fn.analysis hold at their peak, in gradients: the table of docs/estimators.md."""

import gc
import re
from pathlib import Path

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import analysis, testing, tree
from rft_fn.analysis import estimators
from rft_fn.memory.trace import Live
from rft_fn.strategy import get_strategy

PAGE = Path(__file__).parents[2] / "docs" / "estimators.md"
PARTS, CHUNK, BUDGET = 8, 4, 20


def stated(name):
    """The last column of the row of the page that begins with `name`."""
    text = PAGE.read_text().split("## Memory")[1]
    (found,) = re.findall(rf"^\| {re.escape(name)} \|.* ([\d.]+) \|$", text, re.M)
    return float(found)


@pytest.fixture(scope="module")
def given():
    """A model whose gradient is far larger than the activations of a pack of few tokens."""
    st = get_strategy()
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4}
    apply, state = st.init(tiny.llama(**sizes), rft.optim.adamw(1e-3))
    exp = tiny.experience(rows=16, longest=4)
    adv = torch.randn(16, 1, generator=torch.Generator().manual_seed(0)) * exp.mask
    w = rft.weight.seq_mean(exp.mask)
    return st, state, apply, tree.replace(exp, adv=adv, w=w, group=torch.arange(16) // 4)


def peak(state, call):
    """The most bytes of tensors that are alive in a call, in gradients."""
    params = list(state.params.values())
    gc.collect()
    with Live(params) as live:
        call()
    return live.peak / sum(p.numel() * p.element_size() for p in params)


def reinforce(out, b):
    return rft.loss.reinforce(out.logp, b.adv)


def test_peaks_are_those_of_the_page(given):
    st, state, apply, exp = given
    packs, halves = st.shard(exp, BUDGET), st.shard(exp, BUDGET, halves=True)
    losses = {name: reinforce for name in "abcd"}
    parts = [list(range(i, 16, PARTS)) for i in range(PARTS)]
    slopes = exp.adv * exp.w
    rows = {name: (exp, slopes**k) for k, name in enumerate("abc", 1)}
    ref = estimators.reference(st, state, apply, exp, slopes, parts, budget=BUDGET)

    def each(**options):
        return analysis.per_sequence(st, state, apply, reinforce, exp, budget=BUDGET, **options)

    calls = {
        "`st.grad`": lambda: st.grad(state, apply, reinforce, packs),
        "a step that measures `grad/noise_scale`": lambda: st.grad(state, apply, reinforce, halves),
        "`gradients`, one forward": lambda: analysis.gradients(st, state, apply, losses, packs),
        "`gradients`, in turn": lambda: analysis.gradients(
            st, state, apply, losses, packs, one_forward=False
        ),
        "`per_sequence`": lambda: each(chunk=CHUNK),
        "`per_sequence`, with a held-out loss": lambda: each(chunk=CHUNK, held_out=(reinforce, packs)),
        "`per_sequence`, in a loop": lambda: each(loop=True),
        "`estimators.reference`": lambda: estimators.reference(
            st, state, apply, exp, slopes, parts, budget=BUDGET
        ),
        "`estimators.measure`": lambda: estimators.measure(
            st, state, apply, exp, slopes, parts, ref, budget=BUDGET
        ),
        "`estimators.compare`": lambda: list(
            estimators.compare(st, state, apply, rows, parts, ref, budget=BUDGET, prompts=4)
        ),
        "`update_kl`": lambda: analysis.update_kl(exp.old_logp, exp.old_logp + 0.1, exp.mask),
    }
    found = {name: peak(state, call) for name, call in calls.items()}
    want = {name: stated(name) for name in calls}
    assert found == pytest.approx(want, abs=0.15), found


def test_a_certificate_takes_less_than_a_mebibyte_of_tensors(given):
    _, state, *_ = given
    size = sum(p.numel() * p.element_size() for p in state.params.values())
    assert 0 < peak(state, lambda: testing.certify(reinforce)) * size < 2**20
