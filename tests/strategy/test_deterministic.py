"""The option `deterministic`: torch's settings while a strategy lives, and the operations of a step."""

import os
import re
from pathlib import Path

import conformance
import pytest
import tiny
import torch
from each_case import each
from torch.utils._python_dispatch import TorchDispatchMode

import rft_fn as rft
from rft_fn import engine
from rft_fn.strategy import StrategyConfig, get_strategy

ROOT = Path(__file__).resolve().parents[2]
NAME = "CUBLAS_WORKSPACE_CONFIG"


def settings():
    """What the option changes."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    return torch.get_deterministic_debug_mode(), fills, os.environ.get(NAME)


def test_torch_is_deterministic_while_the_strategy_lives(monkeypatch):
    """Strictly, so that an operation without a deterministic form raises; then all is as it was."""
    monkeypatch.delenv(NAME, raising=False)
    before = settings()
    plain = get_strategy()
    assert settings() == before == (0, True, None)
    st = get_strategy(StrategyConfig(deterministic=True))
    assert settings() == (2, False, ":4096:8")
    st.close()
    st.close()
    assert settings() == before
    plain.close()

    # what was set before stays, and a start that fails leaves nothing
    monkeypatch.setenv(NAME, ":16:8")
    st = get_strategy(StrategyConfig(deterministic=True, fsdp=True))
    assert settings() == (2, False, ":16:8")
    st.close()
    with pytest.raises(ValueError, match="sp_size"):
        get_strategy(StrategyConfig(deterministic=True, fsdp=True, sp_size=3))
    assert settings() == (0, True, ":16:8")


def test_it_changes_no_bit_on_a_cpu():
    found = []
    for deterministic in (False, True):
        st = get_strategy(StrategyConfig(deterministic=deterministic))
        found.append(conformance.train(st, tiny.llama(), dtype=torch.float32)[0])
        st.close()
    off, on = found
    assert off.keys() == on.keys() and len(off) > 20
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(on[name])) for name, x in off.items())


# ---------- the operations of a step


# what raises on CUDA, by the documentation of torch.use_deterministic_algorithms
RAISE = re.compile(
    r"(avg_pool3d|adaptive_avg_pool[23]d|adaptive_max_pool2d|fractional_max_pool2d|reflection_pad[123]d|ctc_loss"
    r"|upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)(_aa)?|embedding_bag\w*|grid_sampler_[23]d)_backward"
    r"|(fractional_max_pool3d|max_pool3d)\w*_backward|max_unpool[23]d|nll_loss2d\w*|put_?|histc|(nan)?median"
)


class Recorder(TorchDispatchMode):
    """Notes the operations of what runs within: all, and those without a deterministic form on CUDA."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.raising = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removeprefix("_")
        self.names.add(name)
        inexact = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
        sums = name in ("cumsum", "cumsum_") and inexact
        weighted = name == "bincount" and len(args) > 1 and args[1] is not None
        product = name.startswith("scatter_reduce") and "prod" in args
        if RAISE.fullmatch(name) or sums or weighted or product:
            self.raising.add(name)
        return func(*args, **(kwargs or {}))


CASES = ("ppo", "pairs", "lora", "deepstack", "audio", "rewards_of_images")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_operation_of_a_step_has_a_deterministic_form(case):
    """Of forward, backward, update and export, by their names on a CPU: attention and the head are below."""
    st = get_strategy(StrategyConfig(deterministic=True))
    with Recorder() as seen:
        getattr(conformance, case)(st, torch.float32)
    st.close()
    assert not seen.raising
    assert any(name.endswith("_backward") for name in seen.names)


def test_a_loss_that_raises_on_cuda_is_seen():
    """The recorder sees a backward too."""

    def loss(out, b):
        image = out.logp[None, None, None, :].expand(1, 1, 2, -1)
        small = torch.nn.functional.interpolate(image, size=(2, 3), mode="bilinear")
        return out.logp.cumsum(0) + small.sum(), {}

    st = get_strategy()
    with Recorder() as seen:
        conformance.train(st, tiny.llama(), 1, loss=loss, dtype=torch.float32)
    assert seen.raising == {"cumsum", "upsample_bilinear2d_backward"}


@each("sampling", [rft.Sampling(max_new=5), rft.Sampling(max_new=5, top_p=0.8, temperature=0.7)])
def test_sampling_has_deterministic_forms(sampling):
    """Of an engine in the process of the strategy, which draws the same tokens."""
    rollouts, raising = [], []
    for deterministic in (False, True):
        st = get_strategy(StrategyConfig(deterministic=deterministic))
        eng = engine.hf(tiny.llama(), tiny.tokenizer())
        with Recorder() as seen:
            rollouts.append(eng.generate([[3, 4, 5], [6, 7]], [1, 2], n=3, sampling=sampling))
            eng.score(rollouts[-1], sampling=sampling)
        raising.append(seen.raising)
        st.close()
    off, on = rollouts
    assert torch.equal(off.tokens, on.tokens)
    torch.testing.assert_close(off.logp, on.logp, rtol=0, atol=1e-6)
    assert raising == [{"cumsum"} if sampling.truncates else set(), set()]


def test_no_kernel_of_the_head_is_atomic():
    sources = [path.read_text() for path in (ROOT / "kernels" / "rft_kernels").glob("*.py")]
    assert any("tl.load" in source for source in sources)
    assert not any("tl.atomic" in source for source in sources)
