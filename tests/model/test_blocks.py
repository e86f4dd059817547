"""torch.compile of decoder blocks: the values of eager mode, and no graph for each length of a pack."""

import copy
import shutil
from functools import partial

import conformance
import pytest
import tiny
import torch
from torch._dynamo.utils import counters

import rft_fn as rft
from rft_fn import model, packing
from rft_fn.model import attention, blocks
from rft_fn.strategy import StrategyConfig, get_strategy, prepare

pytestmark = pytest.mark.slow

LENGTHS = ([5, 1, 9, 3], [4, 7, 4, 4, 7, 1, 1, 4, 2], [8, 2, 2], [6, 6, 21, 3])


@pytest.fixture(autouse=True)
def _fresh():
    """Graphs of another test are not found."""
    torch._dynamo.reset()
    blocks._compiled_class.cache_clear()
    counters.clear()


def pack(lengths):
    g = torch.Generator().manual_seed(len(lengths))

    def draw(n):
        return torch.randint(3, len(tiny.tokenizer()), (n,), generator=g).tolist()

    return packing.pack(packing.supervised([(draw(1), draw(n)) for n in lengths]), range(len(lengths)))


def gradients(apply, params, b):
    logp = apply(params, b).logp
    return logp.detach(), *torch.autograd.grad((logp * b.pos.cos()).sum(), list(params.values()))


def graphs():
    return counters["stats"]["unique_graphs"]


def plain(lm):
    return lm


def lora(lm):
    return model.apply_lora_configuration(lm, 2, 4)


def checkpointed(lm):
    return model.load(lm, gradient_checkpointing=True)


@pytest.mark.parametrize("change", [plain, lora, checkpointed])
def test_gradients_are_those_of_eager_mode(change):
    """Also after a copy, whose blocks read the parameters of the copy."""
    lm = change(tiny.llama())
    apply, params = model.bind(lm)
    packs = [pack(lengths) for lengths in LENGTHS[:2]]
    want = [gradients(apply, params, b) for b in packs]
    assert blocks.compile_blocks(apply.root, backend="aot_eager") == 2
    names = list(lm.state_dict())
    for b, expected in zip(packs, want):
        for got, w in zip(gradients(apply, params, b), expected):
            torch.testing.assert_close(got, w, rtol=0, atol=1e-5)
    assert graphs() > 0
    assert names == list(lm.state_dict())

    other = copy.deepcopy(lm)
    with torch.compiler.set_stance("force_eager"):  # the probe needs no graphs of its own
        call, own = model.bind(other)
    with torch.no_grad():
        for p in own.values():
            p.add_(0.1 * torch.ones_like(p).cumsum(-1).cos())  # adapters begin at 0
    torch.testing.assert_close(gradients(apply, params, packs[0])[0], want[0][0], rtol=0, atol=1e-5)
    assert not torch.allclose(gradients(call, own, packs[0])[0], want[0][0], atol=1e-3)


def test_a_third_length_compiles_nothing():
    """One graph for all blocks of a class, and at most one more of each for a second length."""
    apply, params = model.bind(tiny.llama(num_hidden_layers=4))
    blocks.compile_blocks(apply.root, backend="aot_eager")
    made = []
    for lengths in LENGTHS:
        gradients(apply, params, pack(lengths))
        made.append(graphs())
    assert 0 < made[0] <= 4  # before and after attention, in the block and in its attention
    assert made[0] <= made[1] <= 2 * made[0]
    assert made[1] == made[2] == made[3]
    with torch._dynamo.config.patch(error_on_recompile=True):
        gradients(apply, params, pack([7, 3, 3, 3, 1]))


def trained(config):
    st = get_strategy(config)
    apply, state = st.init(tiny.llama(num_hidden_layers=2), conformance.adamw())
    for n in range(2):
        exp = conformance.experience(n, dtype=torch.float32)
        grads, _ = st.grad(state, apply, conformance.loss_fn, st.shard(exp, 40))
        state, _ = st.update(state, grads)
    weights = {name: x.clone() for name, x in st.export(state)}
    st.close()
    return weights


@pytest.mark.parametrize("options", [{}, {"fsdp": True}])
def test_a_strategy_trains_to_the_same_weights(options, monkeypatch):
    want = trained(StrategyConfig(**options))
    assert graphs() == 0
    monkeypatch.setattr(blocks, "compile_blocks", partial(blocks.compile_blocks, backend="aot_eager"))
    got = trained(StrategyConfig(compile_blocks=True, **options))
    assert graphs() > 0
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=1e-5)


def test_a_bound_model_keeps_its_attention_between_graphs():
    """Binding it once more does not put the boundaries back into graphs."""
    lm = tiny.llama()
    apply, _ = model.bind(lm)
    blocks.compile_blocks(apply.root, backend="aot_eager")
    model.bind(lm)
    assert lm.config._attn_implementation == attention.APART[attention.SDPA]


def test_what_cannot_be_compiled_is_refused_before_training(monkeypatch):
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="expected a language model of transformers, got Linear"):
        blocks.compile_blocks(linear)
    with pytest.raises(ValueError, match="compile_blocks: expected False with zero_stage, got True"):
        get_strategy(StrategyConfig(zero_stage=1, compile_blocks=True))
    root = prepare.wrap_for_training(StrategyConfig(), tiny.llama(num_hidden_layers=1))
    with pytest.raises(ValueError, match="expected a list of decoder blocks in Scorer, got none"):
        blocks.compile_blocks(root)
    root.balance = object()
    with pytest.raises(ValueError, match="aux: expected False with compile_blocks"):
        blocks.compile_blocks(root)

    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"expected a C\+\+ compiler .* got none"):
        blocks.require_compiler(torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"expected a C\+\+ compiler"):
            get_strategy(StrategyConfig(compile_blocks=True))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="expected triton, got none"):
        rft.model.blocks.require_compiler(torch.device("cuda"))
