"""The estimate of a run by its config: layouts of the backends, the remedy, the text of a script."""

import dataclasses

import pytest
import tiny
import torch
from each_case import each

import rft_fn as rft
from rft_fn import memory, optim
from rft_fn.environment import tiny_models
from rft_fn.strategy import StrategyConfig, estimate
from rft_fn.strategy.forecast import layout, remedy


def of(**options):
    """An estimate for a GPU, of the default model with a critic-like second one."""
    how = {"budget": 256, "world": options.pop("world", 1), "length": options.pop("length", 0)}
    a, b = tiny_models.new_model(48, 0), tiny.llama()
    return estimate(StrategyConfig(**options), (a, optim.adamw(1e-3)), (b, None), **how)


def test_what_is_moved_to_the_host_is_counted_there():
    plain, adam, all_ = of(), of(adam_offload=True), of(fsdp=True, fsdp_cpu_offload=True)
    assert (adam.optimizer, adam.host) == (
        0,
        plain.engine + plain.optimizer + plain.update + plain.parameters + plain.gradients,
    )
    assert all_.parameters == all_.gradients == all_.optimizer == all_.update == 0
    assert all_.host == plain.engine + plain.parameters + plain.gradients + plain.optimizer + plain.update
    assert plain.host == plain.engine and plain.sampling == plain.parameters + plain.optimizer + plain.engine
    elsewhere = [of(engine_type=kind, length=64) for kind in ("openai", "sglang", "ray")]
    assert {(x.engine, x.host) for x in elsewhere} == {(0, 0)}
    awake = of(enable_engine_sleep=False)
    assert awake.host == 0 and awake.training == plain.training + plain.engine


def test_stages_of_zero():
    """1 shards the optimizer, 2 the gradients too, 3 the parameters too; DeepSpeed keeps float32 weights
    beside the moments."""
    whole = of()
    for stage in (1, 2, 3):
        x = of(world=4, zero_stage=stage)
        assert x.gradients == pytest.approx(whole.gradients / (4 if stage > 1 else 1), rel=0.01)
        assert x.parameters == pytest.approx(whole.parameters / (4 if stage > 2 else 1), rel=0.01)
        assert x.optimizer == pytest.approx(whole.optimizer * 1.5 / 4, rel=0.01)


MOSTLY_ACTIVATIONS = memory.Estimate(
    parameters=2, gradients=2, optimizer=4, activations=90, head=5, backward=3, gathered=0, update=4,
    engine=2, host=0, awake=False,
)  # fmt: skip


@each(
    "changes, options, kept, change",
    [
        ({}, {}, False, "set gradient_checkpointing"),
        ({}, {}, True, "set gradient_checkpointing slices"),
        ({}, {}, "products", "set gradient_checkpointing"),
        ({}, {}, "host", "lower budget, or raise sp_size"),
        ({}, {"compile_blocks": True}, True, "lower budget, or raise sp_size"),
        ({"awake": True}, {"enable_engine_sleep": False}, False, "set enable_engine_sleep"),
        ({"engine": 500}, {}, False, "lower engine_batch"),
        ({"head": 95}, {"fused_linear_logprob": False}, False, "set fused_linear_logprob"),
        ({"head": 95}, {}, False, "lower chunk_size"),
        ({"optimizer": 400}, {}, False, "take more processes, or set adam_offload"),
        ({"optimizer": 400}, {"shard_size": 2}, False, "raise shard_size, or set it to 0"),
        ({"optimizer": 400}, {"zero_stage": 2}, False, "set zero_stage 3"),
        ({"parameters": 400}, {"adam_offload": True}, False, "take more processes, or set fsdp_cpu_offload"),
    ],
)
def test_what_to_change_first(changes, options, kept, change):
    x = dataclasses.replace(MOSTLY_ACTIVATIONS, **changes)
    assert remedy(StrategyConfig(**options), x, world=8, kept=kept) == change


@pytest.mark.parametrize("longest_row", [False, True])
def test_what_a_script_prints(longest_row):
    """In a dry run with the longest row, for which a run does not wait."""
    st = rft.strategy.get_fake_strategy()
    made = tiny_models.new_model(48, 0), optim.adamw(1e-3)
    text = rft.strategy.preflight(st, made, budget=1024, length=64, longest_row=longest_row)
    assert text.startswith("memory of a process (1 of 1, packs of 1024 tokens), estimated\n")
    assert text.endswith(": fits") and "parameters" in text and len(text.splitlines()) == 10 + longest_row
    assert ("longest row" in text) == longest_row
    assert rft.strategy.preflight(st._replace(rank=1), (tiny_models.new_model(48, 0), None), budget=1) == ""


@pytest.mark.parametrize("models, budget", [((), 8), ((None,), 0)])
def test_nothing_to_estimate(models, budget):
    with pytest.raises(ValueError, match="models, budget: expected at least one of each"):
        estimate(StrategyConfig(), *models, budget=budget)


NARROW, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "options, world, sizes, types",
    [
        ({}, 1, (1, 1, 1, 1), (None, None, None, None)),
        ({"bf16": True}, 1, (1, 1, 1, 1), (WIDE, NARROW, WIDE, NARROW)),
        ({"use_mp_opt": True}, 1, (1, 1, 1, 1), (NARROW, NARROW, NARROW, NARROW)),
        ({}, 8, (8, 8, 8, 1), (None, None, None, None)),
        ({"shard_size": 4, "sp_size": 2, "bf16": True}, 8, (4, 4, 4, 2), (WIDE, WIDE, WIDE, NARROW)),
        ({"zero_stage": 1}, 8, (1, 1, 8, 1), (None, None, WIDE, None)),
        ({"zero_stage": 2, "bf16": True}, 8, (1, 8, 8, 1), (NARROW, NARROW, WIDE, NARROW)),
        ({"zero_stage": 3, "use_mp_opt": True}, 8, (8, 8, 8, 1), (NARROW, NARROW, WIDE, NARROW)),
    ],
)
def test_each_backend_has_its_layout(options, world, sizes, types):
    x = layout(StrategyConfig(**options), world)
    assert (x.parameters, x.gradients, x.optimizer, x.sequence) == sizes
    assert (x.kept, x.frozen, x.stepped, x.computed) == types
    assert x.sum_dtype(NARROW) == WIDE and x.sum_dtype(torch.float64) == torch.float64
    assert x.flat_copy == (x.stepped is WIDE and "zero_stage" in options)


@pytest.mark.parametrize(
    "options, host, copied",
    [
        ({}, set(), False),
        ({"adam_offload": True}, {"optimizer", "update"}, True),
        ({"zero_stage": 2, "adam_offload": True}, {"optimizer", "update"}, False),
        ({"fsdp": True, "fsdp_cpu_offload": True}, {"parameters", "gradients", "optimizer", "update"}, False),
    ],
)
def test_each_backend_has_its_part_on_the_host(options, host, copied):
    """DeepSpeed copies its own parts; the other backends take gradients and parameters to the host."""
    x = layout(StrategyConfig(**options), 2)
    assert x.on_host == host and x.copied_for_update == copied
