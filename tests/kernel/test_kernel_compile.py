"""torch.compile of callers of the fused log-probs: one graph, the values of eager mode."""

import pytest
import torch

from rft_kernels import engines, linear_logprob, logits_logprob

G = torch.Generator().manual_seed(0)
H, W, BIAS = (torch.randn(*s, generator=G) for s in ((9, 8), (70, 8), (70,)))
Y = torch.tensor([0, 69, -100, 3, 3, 70, 12, -100, 5])  # ignored ones, and one out of range
ROWS = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8])

CALLS = {
    "trained head": lambda h, w, b: linear_logprob(h, w, Y).logp,
    "entropy and lse": lambda h, w, b: sum(linear_logprob(h, w, Y, entropy=True, lse=True)),
    "entropy that nobody reads": lambda h, w, b: linear_logprob(h, w, Y, entropy=True).logp,
    "entropy alone": lambda h, w, b: linear_logprob(h, w, Y, entropy=True).entropy,
    "bias and softcap": lambda h, w, b: linear_logprob(h, w, Y, bias=b, softcap=2.0, lse=True).logp,
    "temperatures": lambda h, w, b: linear_logprob(h, w, Y, temperature=torch.linspace(0.5, 2, 9)).logp,
    "frozen head": lambda h, w, b: linear_logprob(h, w.detach(), Y).logp,
    "frozen head, entropy": lambda h, w, b: sum(linear_logprob(h, w.detach(), Y, entropy=True)[:2]),
    "head alone": lambda h, w, b: linear_logprob(h.detach(), w, Y).logp,
    "bfloat16": lambda h, w, b: linear_logprob(h.bfloat16(), w.bfloat16(), Y).logp,
    "given logits": lambda h, w, b: sum(logits_logprob(h @ w.T + b, Y, entropy=True)),
}


def run(f):
    """Values, and the gradients of the rows whose label is in range."""
    leaves = [x.clone().requires_grad_() for x in (H, W, BIAS)]
    out = f(*leaves)
    return out.detach(), torch.autograd.grad(out[ROWS].square().sum(), leaves, allow_unused=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_graph_with_the_values_of_eager_mode(call, dynamic):
    torch._dynamo.reset()
    got = run(torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager"))
    torch.testing.assert_close(got, run(call), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_another_number_of_live_rows_needs_no_other_graph():
    torch._dynamo.reset()
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    f = torch.compile(lambda h, y: linear_logprob(h, W, y).logp, fullgraph=True, backend=count)
    for ignored in range(9):
        y = torch.where(torch.arange(9) < ignored, -100, Y)
        torch.testing.assert_close(f(H, y), linear_logprob(H, W, y).logp, equal_nan=True)
    assert len(graphs) == 1


def test_no_grad_saves_no_unit_gradient():
    torch._dynamo.reset()
    h = H.clone().requires_grad_()
    f = torch.compile(lambda h: linear_logprob(h, W, Y).logp, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert not f(h).requires_grad
    assert f(h).requires_grad


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_operators_keep_what_they_promise_to_a_graph(unit, entropy):
    """torch's own examination: schema, shapes of the outputs, registration of the gradient, tracing."""
    y, scale = Y.clamp(max=69), torch.ones(9)
    args = (H.clone().requires_grad_(), W.clone().requires_grad_(not unit), None, y, scale)
    options = (None, -100, entropy, unit, 2**20, "streamed")
    linear_logprob(*args[:2], y)
    forward = torch.ops.rft_kernels.linear_logprob.default
    torch.library.opcheck(forward, (*args, *options))
    out = [x.detach() for x in forward(*args, *options)]
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    trained = [] if unit else [[True, True, False], [False, True, False]]
    for need in ([True, False, False], *trained):
        more = (*plain, *out, scale, scale if entropy else None, None, *options, need)
        torch.library.opcheck(torch.ops.rft_kernels.linear_logprob_backward.default, more)


def test_the_table_of_engines_is_read_while_compiling(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    f = torch.compile(lambda h: engines.automatic(0, h.shape[1]), fullgraph=True, backend="eager")
    assert f(H) == engines.choose(engines.table(), "sm_90", 8)
