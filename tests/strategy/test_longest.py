"""The longest row that fits, and the option that would have saved a run from running out of memory."""

from dataclasses import replace

import pytest
import tiny
import torch
from each_case import each

import rft_fn as rft
from rft_fn import model, optim
from rft_fn.memory import trace
from rft_fn.run.cli import guard
from rft_fn.strategy import StrategyConfig, forecast
from rft_fn.strategy.forecast import Forecast, longest, saving

GIB = 2**30
KINDS = [False, "products", True, "slices", "host"]


def of(kind=False, *, available=GIB, device="cuda", window=2**20, layers=1, config=None, words=48, **more):
    lm = tiny.llama(max_position_embeddings=window, num_hidden_layers=layers, vocab_size=words)
    lm = model.load(lm, gradient_checkpointing=kind)
    models = ((trace.on_meta(lm), optim.adamw(1e-3)),)
    config = config or StrategyConfig()
    return Forecast(config, models, 4096, 1, device, available, 64 * GIB, {"engine": False} | more)


def peak(x, tokens):
    return replace(x, budget=tokens).estimate().total


@each("kind", [False, "host"])
def test_the_longest_row_fits_and_a_longer_one_does_not(kind):
    """To a hundredth, also beyond the tokens that are estimated."""
    x = of(kind, available=60 * 2**20, layers=2)
    row = longest(x)
    assert peak(x, int(row * 0.99)) <= x.available < peak(x, int(row * 1.01)), row


def test_a_row_takes_less_along_the_ladder():
    peaks = [peak(of(kind, layers=4), 16384) for kind in KINDS]
    assert peaks == sorted(peaks, reverse=True) and len({*peaks}) == 5


def test_a_row_ends_at_the_window_and_where_the_host_is_full():
    assert longest(of(window=3000)) == 3000 and longest(of(available=1000)) == 0
    x = of("host", window=20_000)
    assert longest(replace(x, host=2**20)) < longest(x) == 20_000


def test_a_model_that_reads_values_has_no_longest_row():
    class Reads(torch.nn.Linear):
        def forward(self, pack):
            return float(self.weight.sum())

    x = replace(of(), models=((trace.on_meta(Reads(2, 2)), optim.adamw(1e-3)),))
    assert longest(x) is None


def test_the_option_that_would_have_saved_a_run():
    """The first whose forecast is a tenth below; each is what the forecast says with it."""
    now = of().estimate().total
    line = saving(of(available=now))
    assert line.startswith("the forecast was ") and "; with --gradient-checkpointing it is " in line
    less = of(True).estimate().total
    assert "; with --gradient-checkpointing slices it is " in saving(of(available=less - 1))
    whole = StrategyConfig(fused_linear_logprob=False)
    line = saving(of(True, available=2**30, config=whole, words=4000))
    assert "with --strategy.fused-linear-logprob it is" in line
    assert "with --budget 2048 it is" in saving(of(available=now, length=100))
    assert "with --budget" not in saving(of(available=now, length=4096))
    assert "no one option is enough, --gradient-checkpointing slices saves most" in saving(of(available=1000))
    assert "no option saves more" in saving(of("slices", device="cpu"))
    assert "with --strategy.engine-batch 16 it is" in saving(of("host", engine=True, length=200_000))


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_without_memory_ends_with_the_option(error, monkeypatch):
    monkeypatch.setattr(forecast, "_LAST", [])

    def run(config):
        st = rft.strategy.get_fake_strategy()
        rft.strategy.preflight(st, (tiny.llama(), optim.adamw(1e-3)), budget=4096, engine=False)
        raise error

    with pytest.raises(type(error)) as caught:
        guard(run, None)
    [note] = caught.value.__notes__
    assert (
        note.startswith("out of memory: the forecast was") and "with --gradient-checkpointing it is" in note
    )

    def other(config):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError) as caught:
        guard(other, None)
    assert not hasattr(caught.value, "__notes__")
