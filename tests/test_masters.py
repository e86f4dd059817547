"""16-bit weights train: float32 masters unasked, on every backend, and none that lose their updates."""

import importlib.util
import tempfile

import conformance
import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import ckpt, optim
from rft_fn.strategy import StrategyConfig, get_strategy

pytestmark = pytest.mark.slow

STEPS, LR = 20, 1e-6
BACKENDS = {"fsdp2": {"fsdp": True}}
if importlib.util.find_spec("deepspeed"):
    small = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    BACKENDS |= {f"zero {stage}": {"zero_stage": stage, "extra": small} for stage in (1, 2, 3)}


def rounded():
    """Weights that bfloat16 has, in float32."""
    return tiny.llama(dtype=torch.bfloat16).float()


def trained(module, folder, **options):
    """The checkpoint after STEPS updates with a rate that is too small for bfloat16."""
    st = get_strategy(StrategyConfig(**options))
    before = {n: p.detach().float().clone() for n, p in module.named_parameters()}
    apply, state = st.init(module, optim.adamw(LR))
    packs = st.shard(tiny.experience(), 40)
    for _ in range(STEPS):
        grads, _ = st.grad(state, apply, lambda out, b: -out.logp, packs)
        state, _ = st.update(state, grads)
    types = {x.dtype for _, x in st.export(state)}
    path = f"{folder}/step_00000020"
    st.save(path, state)
    return before, types, path


def masters(folder, **options):
    """(by how much the masters have moved, the types of the weights), of weights in bfloat16."""
    before, types, path = trained(tiny.llama(dtype=torch.bfloat16), folder, **options)
    kept = ckpt.weights(path, master=True)
    assert {x.dtype for x in kept.values()} == {torch.float32}
    return {n: x - before[n] for n, x in kept.items()}, types


def on_ranks(rank, folder):
    return {name: masters(f"{folder}/{name}", **options) for name, options in BACKENDS.items()}


@pytest.fixture(scope="module")
def two():
    with tempfile.TemporaryDirectory() as folder:
        return ranks.run(2, "test_masters:on_ranks", folder)[0]


@pytest.fixture(scope="module")
def exact():
    """By how much float32 weights move, computed with in float32 and in bfloat16."""
    out = []
    for options in ({}, {"bf16": True}):
        with tempfile.TemporaryDirectory() as folder:
            before, _, path = trained(rounded(), folder, **options)
            out.append(flat({n: x - before[n] for n, x in ckpt.weights(path).items()}))
    return out


def flat(named):
    return torch.cat([named[n].flatten() for n in sorted(named)])


@pytest.mark.parametrize("backend", ["local", *BACKENDS])
def test_masters_move_as_float32_weights_do(backend, exact, request, tmp_path):
    """To the rounding of sums over ranks, where the arithmetic of the forward is the same."""
    moved, types = masters(tmp_path) if backend == "local" else request.getfixturevalue("two")[backend]
    got, (full, same) = flat(moved), exact
    assert types == {torch.bfloat16}
    assert float(full.abs().max()) > STEPS * LR / 2
    # float32 itself is 0.2 away: rounding turns the sign of a few gradients, and Adam steps by signs
    assert float((got - same).norm() / same.norm()) < 0.1
    assert float(got.norm() / full.norm()) == pytest.approx(1, abs=0.01)


def test_the_embedded_default_in_bfloat16_trains():
    st = rft.strategy.get_strategy()
    apply, state = st.init(rft.model.load("tiny", dtype=torch.bfloat16), optim.adamw(1e-3))
    packs, nll = st.shard(tiny.experience(), 64), []
    for _ in range(5):
        grads, metrics = st.grad(state, apply, lambda out, b: -out.logp, packs)
        nll.append(rft.metric.results(metrics)["loss"])
        state, _ = st.update(state, grads)
    assert nll[-1] < nll[0]


def test_16_bits_without_masters_are_refused_in_one_line():
    st = get_strategy(StrategyConfig(use_mp_opt=False))
    with pytest.raises(ValueError, match=r"^use_mp_opt, bf16: expected one .* in torch.bfloat16") as error:
        st.init(tiny.llama(dtype=torch.bfloat16), optim.adamw(1e-3))
    assert "\n" not in str(error.value)
    adapted = rft.model.apply_lora_configuration(tiny.llama(dtype=torch.bfloat16), 2, 4.0)
    _, state = st.init(adapted, optim.adamw(1e-3))
    assert {p.dtype for p in state.params.values()} == {torch.float32}  # adapters are wide, their base is not
    assert isinstance(state.opt, optim.AdamState)


@pytest.mark.parametrize(
    "options, dtype, kept, wide",
    [
        ({}, torch.float32, torch.float32, False),
        ({}, torch.bfloat16, torch.bfloat16, True),
        ({}, torch.float16, torch.float16, True),
        ({"bf16": True}, torch.bfloat16, torch.float32, False),
        ({"bf16": True, "use_mp_opt": False}, torch.bfloat16, torch.float32, False),
        ({"use_mp_opt": True}, torch.float32, torch.bfloat16, True),
        ({"use_mp_opt": False}, torch.float32, torch.float32, False),
    ],
)
def test_what_is_kept(options, dtype, kept, wide):
    """(the type of the parameters, whether there are masters) by the option and the type that was loaded."""
    _, state = get_strategy(StrategyConfig(**options)).init(tiny.llama(dtype=dtype), optim.adamw(1e-3))
    assert {p.dtype for p in state.params.values()} == {kept}
    assert isinstance(state.opt, optim.MasterState) == wide


def test_weights_are_cast_once_for_all_packs():
    """Packs read the same bfloat16 weights; gradients are, to the bit, the sum of each pack's own."""
    st = get_strategy(StrategyConfig(bf16=True))
    lm = tiny.llama(dtype=torch.float32)
    apply, state = st.init(lm, optim.adamw(1e-3))
    read = []
    lm.register_forward_pre_hook(lambda m, *_: read.append(m.lm_head.weight))
    lm.get_decoder().register_forward_pre_hook(lambda m, *_: read.append(m.embed_tokens.weight))
    exp = conformance.experience(0, dtype=torch.float32)
    packs = st.shard(exp, 40)
    assert len(packs) > 1
    apart = [st.grad(state, apply, conformance.loss_fn, [pack])[0] for pack in packs]
    del read[:]
    grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
    assert len(read) == len(packs) and {x.data_ptr() for x in read} == {read[0].data_ptr()}
    assert read[0].dtype == torch.bfloat16
    for name, g in grads.items():
        want = sum(x[name] for x in apart)
        assert g.dtype == torch.float32 and torch.equal(g, want), name

    # what only scores too, and an apply of the caller's own gets float32
    del read[:]
    st.score(apply, state.params, exp, 40)
    assert len(read) > 1 and {x.data_ptr() for x in read} == {read[0].data_ptr()}
    types = set()

    def own(params, pack):
        types.update(p.dtype for p in params.values())
        return apply(params, pack)

    own.residence = apply.residence
    st.grad(state, own, conformance.loss_fn, packs)
    assert types == {torch.float32}
