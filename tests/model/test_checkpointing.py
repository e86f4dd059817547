"""What checkpointed blocks keep: the same gradients from less and less memory."""

import copy
import weakref
from typing import ClassVar

import families
import pytest
import tiny
import torch
from each_case import each
from torch.utils._python_dispatch import TorchDispatchMode

from rft_fn import model, packing
from rft_fn.model import blocks, checkpointing, mlp_slices
from rft_fn.model.bind import to_params_device
from rft_fn.model.checkpointing import LADDER, kind_of, on_host
from rft_fn.model.inputs_on_host import Moved

TOKENS = (9, 4, 12, 7)


def pack(lengths=TOKENS):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 48, (n + 1,), generator=g).tolist() for n in lengths]
    return packing.pack(packing.supervised([(row[:1], row[1:]) for row in rows]), range(len(rows)))


def gradients(lm, b, **how):
    """(log-probs, the gradient of a sum of them that tells tokens apart)."""
    apply, params = model.bind(lm, **how)
    logp = apply(params, b).logp
    return logp.detach(), dict(
        zip(params, torch.autograd.grad((logp * b.pos.cos()).sum(), [*params.values()]))
    )


def lora(lm):
    lm = model.apply_lora_configuration(lm, 2, 4).to(torch.float64)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.linspace(-0.2, 0.2, p.numel()).view_as(p))
    return lm


MODELS = {
    "llama": lambda: tiny.llama(dtype=torch.float64),
    "adapters": lambda: lora(tiny.llama(dtype=torch.float64)),
    "frozen below": lambda: model.load(tiny.llama(dtype=torch.float64), freeze=["embed_tokens", "layers.0"]),
    "experts": lambda: families.small("Qwen3Moe"),
    "experts and a shared one": lambda: families.small("Qwen2Moe"),
    "norm behind the MLP": lambda: families.small("Gemma2"),
    "states": lambda: families.small("Qwen3Next"),
}


@each("name", MODELS)
def test_slices_are_exact(name, monkeypatch):
    """Log-probs equal to rounding, gradients in float64 to 1e-10; the last slice is shorter."""
    monkeypatch.setattr(mlp_slices, "SLICE", 10)
    b = pack()
    logp, want = gradients(MODELS[name](), b)
    lm = model.load(MODELS[name](), gradient_checkpointing="slices")
    got, found = gradients(lm, b)
    sliced = [m for m in lm.modules() if getattr(m, "rft_tokenwise", False)]
    assert len(sliced) == lm.config.get_text_config().num_hidden_layers and kind_of(lm) == "slices"
    torch.testing.assert_close(got, logp, rtol=0, atol=1e-12)
    assert found.keys() == want.keys()
    for key, g in want.items():
        assert (found[key] - g).abs().max() <= 1e-10 * max(1.0, float(g.abs().max())), key


class Counted(torch.nn.SiLU):
    """An activation that counts the tokens that it sees."""

    seen: ClassVar[list] = []

    def forward(self, x):
        self.seen.append(x.shape[-2])
        return super().forward(x)


def test_slices_compute_an_mlp_no_more_often_than_checkpointing_does(monkeypatch):
    """Once in the forward, once in the backward: a block that is computed anew stops before its MLP."""
    monkeypatch.setattr(mlp_slices, "SLICE", 10)
    seen = {}
    for kind in (True, "slices"):
        lm = model.load(tiny.llama(), gradient_checkpointing=kind)
        apply, params = model.bind(lm)
        Counted.seen = []
        for layer in lm.model.layers:
            layer.mlp.act_fn = Counted()
        gradients(lm, pack())  # the first call also asks whether an MLP may be sliced
        Counted.seen = []
        apply(params, pack()).logp.sum().backward()
        seen[kind] = Counted.seen
    assert sum(seen[True]) == sum(seen["slices"]) == 4 * sum(TOKENS)
    assert max(seen["slices"]) == 10


class ShiftMLP(torch.nn.Module):
    """An MLP that reads the token before each token."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + torch.nn.functional.pad(x, (0, 0, 1, -1)))


def test_an_mlp_that_mixes_tokens_is_left_whole(monkeypatch):

    def shifted():
        lm = tiny.llama(dtype=torch.float64)
        for layer in lm.model.layers:
            layer.mlp = ShiftMLP(layer.mlp)
        return lm

    logp, want = gradients(model.load(shifted(), gradient_checkpointing=True), pack([33]))
    apply, params = model.bind(model.load(shifted(), gradient_checkpointing="slices"))
    monkeypatch.setattr(mlp_slices, "SLICE", 10)
    with pytest.warns(UserWarning, match="ShiftMLP takes all tokens at once"):
        got = apply(params, pack([33])).logp
    found = torch.autograd.grad((got * pack([33]).pos.cos()).sum(), [*params.values()])
    assert torch.equal(got, logp) and all(map(torch.equal, found, want.values()))


def test_routers_that_are_listened_to_see_all_tokens(monkeypatch):
    """The balance of experts reads what each router says of the whole pack."""
    monkeypatch.setattr(mlp_slices, "SLICE", 10)
    b = pack()
    of = lambda kind: model.load(families.small("Qwen3Moe"), gradient_checkpointing=kind)  # noqa: E731
    aux = []
    for kind in (True, "slices"):
        apply, params = model.bind(of(kind), aux=True)
        aux.append(apply(params, b).aux)
    assert torch.equal(*aux)


class InNumpy(Moved):
    """Moves to memory of numpy, which torch's allocator does not know."""

    count = 0
    origins: ClassVar[list] = []

    def send(self, x):
        InNumpy.count += 1
        InNumpy.origins.append(weakref.ref(x.untyped_storage()))
        self.host = x.detach().numpy().copy()

    def fetch(self):
        return torch.from_numpy(self.host).clone()

    def wait(self, x):
        pass


@each("name", ["llama", "adapters", "experts", "states"])
def test_inputs_of_blocks_wait_on_the_host(name):
    """Bit for bit the gradient of checkpointing; each input leaves once, and comes back."""
    b = pack()
    logp, want = gradients(model.load(MODELS[name](), gradient_checkpointing=True), b)
    lm = model.load(MODELS[name](), gradient_checkpointing="host")
    [function] = on_host(lm)
    function.moved = InNumpy
    got, found = gradients(lm, b)
    assert torch.equal(got, logp) and all(torch.equal(found[key], g) for key, g in want.items())

    apply, params = model.bind(lm)
    InNumpy.count, InNumpy.origins = 0, []
    out = apply(params, b)
    assert InNumpy.count == lm.config.get_text_config().num_hidden_layers
    held = sum(origin() is not None for origin in InNumpy.origins)
    assert held == (name == "adapters")  # there the first input is a leaf, which the graph holds
    del out


def test_on_a_cpu_inputs_stay_where_they_are():
    logp, want = gradients(model.load(tiny.llama(), gradient_checkpointing=True), pack())
    got, found = gradients(model.load(tiny.llama(), gradient_checkpointing="host"), pack())
    assert torch.equal(got, logp) and all(torch.equal(found[key], g) for key, g in want.items())


class Products(TorchDispatchMode):
    """Counts products and attentions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += checkpointing._is_long(func)
        return func(*args, **(kwargs or {}))


@each("name", ["llama", "adapters", "experts"])
def test_products_are_kept_and_not_computed_again(name):
    """Bit for bit the gradient of checkpointing, from as many products as without."""
    b = pack()
    found, counts = [], []
    for kind in (False, True, "products"):
        apply, params = model.bind(model.load(MODELS[name](), gradient_checkpointing=kind))
        with Products() as products:
            logp = apply(params, b).logp
            grads = torch.autograd.grad((logp * b.pos.cos()).sum(), [*params.values()])
        counts.append(products.count)
        found.append([logp, *grads])
    assert all(torch.equal(x, y) for x, y in zip(found[1], found[2]))
    assert counts[0] == counts[2] < counts[1]


def test_each_kind_is_known_again_and_survives_a_copy():
    for kind in LADDER:
        lm = model.load(tiny.llama(), gradient_checkpointing=kind)
        model.bind(lm)
        assert kind_of(lm) == kind_of(copy.deepcopy(lm)) == kind
        want = [name for name, _ in tiny.llama().named_parameters()]
        assert [name for name, _ in lm.named_parameters()] == want


def test_what_no_model_keeps():
    with pytest.raises(ValueError, match=r"gradient_checkpointing: expected one of False, .* got 'fast'"):
        model.load(tiny.llama(), gradient_checkpointing="fast")
    apply, _ = model.bind(model.load(tiny.llama(), gradient_checkpointing="slices"))
    with pytest.raises(
        ValueError, match="gradient_checkpointing: expected False or True with compile_blocks"
    ):
        blocks.compile_blocks(apply.root)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_inputs_are_in_pinned_memory():
    """Bit for bit the gradient, with the inputs of 12 blocks off the device when the forward is done."""
    b = packing.pack(packing.supervised([([3], [5] * 8000)]), [0])
    held, found = {}, {}
    for kind in ("slices", "host"):
        lm = tiny.llama(num_hidden_layers=12, hidden_size=256, max_position_embeddings=8192).cuda().bfloat16()
        apply, params = model.bind(model.load(lm, gradient_checkpointing=kind))
        [there] = to_params_device(apply, params, [b])
        for _ in range(2):  # the first call asks and warms up
            before = torch.cuda.memory_allocated()
            logp = apply(params, there).logp
            torch.cuda.synchronize()
            held[kind] = torch.cuda.memory_allocated() - before
            found[kind] = torch.autograd.grad(logp.sum(), [*params.values()])
    assert all(map(torch.equal, found["slices"], found["host"]))
    assert held["slices"] - held["host"] >= 11 * 8000 * 256 * 2
