"""What can be differentiated twice and forwards: docs/scripts.md has the table, which is computed here."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from each_case import each
from test_noise import batch, reinforce
from torch.func import grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import rft_fn as rft
from rft_fn import packing, tree

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scripts.md").read_text()
DERIVATIVES = ("grad", "vmap(grad)", "vjp(grad)", "jvp", "jvp(grad)")


def works(function, x, v, rows=None):
    """Whether each of DERIVATIVES works, and the errors of the others."""
    calls = {
        "grad": lambda: grad(function)(x),
        "vmap(grad)": lambda: vmap(grad(function), in_dims=(0,))(tree.map(lambda a: torch.stack([a, a]), x)),
        "vjp(grad)": lambda: vjp(grad(function), x)[1](v),
        "jvp": lambda: jvp(function, (x,), (v,)),
        "jvp(grad)": lambda: jvp(grad(function), (x,), (v,)),
    }
    found, errors = [], {}
    for name in DERIVATIVES:
        try:
            calls[name]()
        except (RuntimeError, NotImplementedError) as error:
            errors[name] = str(error)
        found.append("no" if name in errors else "yes")
    return found, errors


def head(engine):
    h = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    w = torch.randn(11, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(6)

    def function(x):
        return rft.logprob.linear_logprob(x["h"], x["w"], y, engine=engine).logp.sin().sum()

    return function, {"h": h, "w": w}


def bound(attention, *, fused, dtype=None):
    apply, params = rft.model.bind(rft.model.load("tiny", attn_implementation=attention), fused=fused)
    b = packing.pack(batch(3, dtype=torch.float32), list(range(6)))

    def function(x):
        return (b.w * reinforce(apply(x, b), b)).sum()

    return function, dict(params.items())


def table():
    """{row of the page: its cells}, and the errors of each row."""
    cases = {
        f'`linear_logprob`, `engine="{name}"`': (head(name), False)
        for name in ("auto", "streamed", "reference")
    }
    for attention, math in (("eager", False), ("sdpa", False), ("sdpa", True)):
        for fused in (True, False):
            where = "`sdpa` in `sdpa_kernel(SDPBackend.MATH)`" if math else f"`{attention}`"
            cases[f"a model, attention {where}, `fused={fused}`"] = (bound(attention, fused=fused), math)
    rows, errors = {}, {}
    for name, ((function, x), math) in cases.items():
        x = {n: p.detach() for n, p in x.items()}
        v = {n: torch.randn_like(p) for n, p in x.items()}
        with sdpa_kernel(SDPBackend.MATH) if math else nullcontext():
            rows[name], errors[name] = works(function, x, v)
    return rows, errors


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_table_of_the_page_is_what_works():
    rows, errors = table()
    for name, cells in rows.items():
        line = f"| {name} | {' | '.join(cells)} |"
        assert line in PAGE, line
    # one clear line of our own where the head is what does not work
    for name in ('`linear_logprob`, `engine="auto"`', "a model, attention `eager`, `fused=True`"):
        assert re.match(
            "linear_logprob: expected one differentiation, got two; pass engine='ref",
            errors[name]["vjp(grad)"],
        )
        for derivative in ("jvp", "jvp(grad)"):
            assert re.match("linear_logprob: expected reverse mode, got forward", errors[name][derivative])


@pytest.mark.parametrize("entropy", [False, True])
def test_forward_mode_of_logits_is_its_definition(entropy):
    """Against differences in float64, the first derivative and that of the gradient."""
    g = torch.Generator().manual_seed(0)
    z, v = (torch.randn(5, 7, generator=g, dtype=torch.float64) for _ in range(2))
    y = torch.arange(5)

    def function(z):
        out = rft.logprob.log_probs_and_entropy(z, y, temperature=0.7) if entropy else None
        logp = out[0] if entropy else rft.logprob.log_probs_from_logits(z, y, temperature=0.7)
        return (logp.sin() + (out[1].cos() if entropy else 0)).sum()

    eps = 1e-5
    for f in (function, grad(function)):
        want = (f(z + eps * v) - f(z - eps * v)) / (2 * eps)
        assert torch.allclose(jvp(f, (z,), (v,))[1], want, rtol=1e-7, atol=1e-8)
    assert torch.allclose(jvp(grad(function), (z,), (v,))[1], vjp(grad(function), z)[1](v)[0], rtol=1e-10)


TXS = {
    "sgd": rft.optim.sgd(0.1),
    "momentum": rft.optim.sgd(lambda n: 0.1 / (n + 1), momentum=0.8, weight_decay=0.1),
    "nesterov": rft.optim.sgd(0.1, momentum=0.8, nesterov=True),
    "adamw": rft.optim.adamw(lambda n: 0.01 * (n + 1), weight_decay=0.1, eps=1e-3),
    "clipped": rft.optim.chain(rft.optim.clip_by_global_norm(0.5), rft.optim.chain(rft.optim.adamw(0.01))),
    "not clipped": rft.optim.chain(rft.optim.clip_by_global_norm(500.0), rft.optim.sgd(0.01)),
}


def some(seed):
    g = torch.Generator().manual_seed(seed)
    return tree.Named(a=torch.randn(3, 2, generator=g).double(), b=torch.randn(4, generator=g).double())


@each("name", list(TXS))
def test_a_pure_update_is_the_one_that_donates_and_changes_nothing(name):
    tx, pure = TXS[name], rft.optim.pure(TXS[name])
    params, mine = some(0), some(0)
    state, own = tx.init(params), pure.init(mine)
    for step in range(3):
        grads = some(step + 1)
        before = tree.copy((grads, own, mine))
        updates, new = pure.update(grads, own, mine)
        assert all(
            torch.equal(x, y)
            for x, y in zip(tree.leaves(before), tree.leaves((grads, own, mine)))
            if isinstance(x, torch.Tensor)
        )
        mine, own = tree.map(torch.add, mine, updates), new
        updates, state = tx.update(grads, state, params)
        rft.optim.apply_updates(params, updates)
        assert all(torch.allclose(params[n], mine[n], rtol=1e-12) for n in params)
    assert rft.optim.count(own) == rft.optim.count(state) == 3


@pytest.mark.parametrize("name", list(TXS))
def test_gradients_go_through_an_update(name):
    """Of the loss after two steps, in the scale of the inner loss, against differences."""
    tx = rft.optim.pure(TXS[name])
    params = dict(some(0))
    params["b"] = params["b"] * torch.tensor([1.0, 0.0, 1.0, 1.0])  # one weight has no gradient at first

    def after(scale):
        p, state = params, tx.init(params)
        for _ in range(2):
            grads = grad(lambda p: scale * sum((x**4).sum() for x in p.values()))(p)
            updates, state = tx.update(grads, state, p)
            p = {n: x + updates[n] for n, x in p.items()}
        return sum((x**2).sum() for x in p.values())

    at, eps = torch.tensor(0.3, dtype=torch.float64), 1e-6
    want = (after(at + eps) - after(at - eps)) / (2 * eps)
    assert float(grad(after)(at)) == pytest.approx(float(want), rel=1e-5)


def test_what_has_no_pure_update():
    for tx, name in (
        (rft.optim.lion(0.1), "lion"),
        (rft.optim.chain(rft.optim.sgd(1.0), rft.optim.ema(0.9)), "ema"),
    ):
        with pytest.raises(ValueError, match=f"tx: expected a chain of adamw, sgd, .*, got {name}"):
            rft.optim.pure(tx)
