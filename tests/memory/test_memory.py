"""The estimate of memory against what the allocator hands out."""

import dataclasses
import importlib.util
import json
from functools import partial
from pathlib import Path

import families
import pytest
import ranks
import test_probe
import tiny
import torch
from torch.profiler import profile

import rft_fn as rft
from rft_fn import memory, optim, packing, tree
from rft_fn.memory.trace import nbytes
from rft_fn.model import apply_lora_configuration
from rft_fn.model import tiny as embedded
from rft_fn.strategy import StrategyConfig, estimate, get_strategy
from rft_fn.strategy.preflight import remedy

ROOT = Path(__file__).resolve().parents[2]


def allocated(f):
    """(what f returned, the peak of its allocations, what of them is left), by torch's own allocator on the
    CPU."""
    with profile(profile_memory=True) as prof:
        out = f()
    now = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return out, peak, now


def qwen2(**changes):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 500, "tie_word_embeddings": False, "pad_token_id": 0}
    return Qwen2ForCausalLM(Qwen2Config(**sizes | {"eos_token_id": 1} | changes))


def module(name, *, checkpointing=False, dtype=torch.float32):
    made = {
        "default": lambda: embedded.new_model(48, 0),
        "llama": lambda: tiny.llama(vocab_size=2000),
        "qwen2": qwen2,
        "lora": lambda: apply_lora_configuration(qwen2(), 4, 8),
    }[name]().to(dtype)
    if checkpointing:
        made.activation_checkpointing_enable({"use_reentrant": False})
    return made


def packs(tokens, count=2):
    """`count` packs of four sequences of different lengths, all tokens of them responses."""
    g = torch.Generator().manual_seed(0)
    sizes = [tokens // 4 + d for d in (-2, -1, 1, 2)] * count
    rows = [torch.randint(3, 48, (n + 1,), generator=g).tolist() for n in sizes]
    exp = packing.supervised([(row[:1], row[1:]) for row in rows])
    return [packing.pack(exp, range(i, i + 4)) for i in range(0, 4 * count, 4)]


def loss_fn(out, b):
    return rft.loss.nll(out.logp) - 0.01 * out.entropy


def local(x):
    """The bytes of a tree that this process holds."""
    tensors = [leaf for leaf in tree.leaves(x) if isinstance(leaf, torch.Tensor)]
    return nbytes(*(getattr(leaf, "_local_tensor", leaf) for leaf in tensors))


def step_of(name, options, tokens, **how):
    """What a rank holds in a step: (estimated, allocated), by phase."""
    st = get_strategy(StrategyConfig(**options))
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3), optim.ema(0.9))
    model = module(name, **how)
    x = estimate(st.config, (model, tx), budget=tokens, world=st.world, kind="cpu", engine=False)
    guess = {
        name: getattr(x, name) for name in ("parameters", "gradients", "optimizer", "update", "activations")
    }
    guess["training"] = x.gradients + x.activations + x.head + x.backward + x.gathered

    apply, state = st.init(model, tx, entropy=True)
    data = packs(tokens, 2 * st.world)[st.rank :: st.world]
    st.grad(state, apply, loss_fn, data)  # the first makes what is kept for good
    out, _, forward = allocated(partial(getattr(apply, "together", apply), state.params, data[0]))
    del out
    # what a collective of gloo still holds when the next one starts differs from time to time
    (grads, _), peak, _ = min(
        (allocated(partial(st.grad, state, apply, loss_fn, data)) for _ in range(2)), key=second
    )
    held = {
        "gradients": local(grads),
        "optimizer": local(state.opt),
        "parameters": local(dict(model.named_parameters())),
    }
    _, update, _ = allocated(partial(st.update, state, grads))
    return guess, held | {"training": peak, "update": update, "activations": forward}


def second(x):
    return x[1]


def close(guess, held, *names):
    for name in names:
        assert guess[name] == pytest.approx(held[name], rel=0.2), (name, guess, held)


def exact(guess, held):
    for name in ("parameters", "gradients", "optimizer"):
        assert guess[name] == held[name], (name, guess, held)


@pytest.mark.parametrize("name", ["default", "llama", "qwen2", "lora"])
@pytest.mark.parametrize(
    "options, how",
    [
        ({}, {}),
        ({"fused_linear_logprob": False}, {}),
        ({}, {"checkpointing": True}),
        ({"bf16": True}, {}),
        ({"use_mp_opt": True}, {"checkpointing": True}),
        ({}, {"dtype": torch.bfloat16}),  # masters that nobody asked for
    ],
    ids=lambda x: "-".join(x),
)
def test_one_process(name, options, how):
    guess, held = step_of(name, options, 512, **how)
    exact(guess, held)
    close(guess, held, "training", "update")
    if not options:
        close(guess, held, "activations")


FAMILIES = (
    "Llama", "Mixtral", "Qwen3Next", "Qwen3_5Text", "Mamba2", "FalconH1", "Lfm2", "Bamba", "NemotronH",
    "GptOss", "Qwen3Moe", "DeepseekV3", "JetMoe", "Jamba",
)  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_with_states_and_experts_are_counted(kind):
    """A sequence of 96 tokens through small models: 0.8 to 1.4 of what it allocates."""
    model, tx, st = families.small(kind, torch.float32), optim.adamw(1e-3), get_strategy(StrategyConfig())
    x = estimate(st.config, (model, tx), budget=96, kind="cpu", engine=False)
    assert x.unknown == ()
    apply, state = test_probe.quiet(st.init, model, tx, entropy=True)
    row = torch.randint(3, 48, (97,), generator=torch.Generator().manual_seed(0)).tolist()
    data = [packing.pack(packing.supervised([(row[:1], row[1:])]), [0])] * 2
    _, peak, _ = allocated(partial(st.grad, state, apply, loss_fn, data))
    ratio = (x.gradients + x.activations + x.head + x.backward + x.gathered) / peak
    print(f"{kind}: estimated {ratio:.2f} of the peak")
    assert 0.8 < ratio < 1.4


@pytest.mark.parametrize("tokens", [64, 1024])
def test_activations_grow_with_the_tokens_and_not_with_their_square(tokens):
    guess, held = step_of("default", {}, tokens)
    close(guess, held, "training", "activations")
    assert 16 * tokens * 1024 < held["activations"] < 32 * tokens * 1024


CASES = {
    "sharded": ("qwen2", {}, {}),
    "checkpointed": ("qwen2", {}, {"checkpointing": True}),
    "whole logits": ("llama", {"fused_linear_logprob": False}, {}),
    "narrow": ("default", {"bf16": True}, {}),
    "lora": ("lora", {}, {}),
    "sequence": ("qwen2", {"sp_size": 2}, {}),
    "sequence, heads of its own": ("default", {"sp_size": 2}, {}),
    "default": ("default", {}, {}),
}


def cases(rank):
    return {case: step_of(name, options, 512, **how) for case, (name, options, how) in CASES.items()}


@pytest.fixture(scope="module")
def sharded():
    return ranks.run(2, "test_memory:cases")


@pytest.mark.parametrize("case", CASES)
def test_two_processes(sharded, case):
    guess, held = sharded[0][case]
    exact(guess, held)
    close(guess, held, "training", "update")


def test_a_share_of_the_tokens_takes_that_share_of_the_activations(sharded):
    for whole, part in (("sharded", "sequence"), ("default", "sequence, heads of its own")):
        (want, one), (guess, half) = sharded[0][whole], sharded[0][part]
        assert guess["activations"] == pytest.approx(want["activations"] / 2, rel=0.02)
        assert half["activations"] < 0.6 * one["activations"], (half, one)


def test_a_module_is_left_alone():
    model = module("lora")
    before = {n: (p.clone(), p.requires_grad, p.grad) for n, p in model.named_parameters()}
    config = dict(vars(model.config))
    estimate(StrategyConfig(), (model, optim.adamw(1e-3)), budget=64, kind="cpu")
    assert dict(vars(model.config)) == config and not any(m.training is False for m in [model])
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0]) and p.requires_grad == before[name][1] and p.grad is None


def test_no_memory_is_taken_on_the_way():
    """A model of 8 billion parameters on the meta device."""
    with torch.device("meta"):
        model = qwen2(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, vocab_size=128000)
    tx = optim.adamw(1e-3)
    x, peak, _ = allocated(lambda: estimate(StrategyConfig(), (model, tx), budget=4096))
    assert peak < 2**20 and x.parameters == nbytes(*model.parameters()) > 2**33


def of(**options):
    """An estimate for a GPU, of the default model with a critic-like second one."""
    how = {"budget": 256, "world": options.pop("world", 1), "length": options.pop("length", 0)}
    a, b = module("default"), module("qwen2")
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


def test_a_model_that_reads_values_is_said_to_be_unknown():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.ones(3))

        def forward(self, pack):
            return float(self.a.detach().sum())

    adamw = optim.adamw(1e-3)
    reads = adamw._replace(
        update=lambda grads, opt, params: adamw.update(grads, opt, float(grads["a"].sum()))
    )
    x = estimate(StrategyConfig(), (Reads(), reads), budget=8, engine=False)
    update, work = x.unknown
    assert update.startswith("update: ") and work.startswith("activations of Reads: ")
    assert x.parameters == x.gradients == 12 and x.optimizer == 24 and x.activations == x.update == 0
    assert f"  not known, and not counted: {work}" in memory.table(x, available=1, host=1, remedy="")


BASE = memory.Estimate(
    parameters=2, gradients=2, optimizer=4, activations=90, head=5, backward=3, gathered=0, update=4,
    engine=2, host=0, awake=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes, options, checkpointed, change",
    [
        ({}, {}, False, "set gradient_checkpointing"),
        ({}, {}, True, "lower budget, or raise sp_size"),
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
def test_what_to_change_first(changes, options, checkpointed, change):
    x = dataclasses.replace(BASE, **changes)
    assert remedy(StrategyConfig(**options), x, world=8, checkpointed=checkpointed) == change


def test_the_peak_is_that_of_the_largest_phase():
    assert (BASE.training, BASE.updating, BASE.sampling, BASE.total) == (106, 12, 8, 106)
    x = dataclasses.replace(BASE, update=300)
    assert x.total == x.updating == 308
    awake = dataclasses.replace(BASE, awake=True)
    assert (awake.training, awake.sampling) == (108, 8)


def test_the_table():
    gib = dataclasses.replace(BASE, **{n: x * 2**30 for n, x in vars(BASE).items() if type(x) is int})
    text = memory.table(gib, available=200 * 2**30, host=1, remedy="pray")
    lines = text.splitlines()
    rows = "parameters gradients optimizer activations head backward update engine peak"
    assert [line.split()[0] for line in lines] == rows.split()
    assert lines[3].split()[1:3] == ["90.00", "GiB"]
    assert lines[-1].split() == ["peak", "106.00", "GiB", "in", "training,", "of", "200.00", "GiB:", "fits"]
    assert memory.table(gib, available=2**30, host=1, remedy="pray").endswith("does not fit: pray")
    much = dataclasses.replace(gib, host=2)
    assert memory.table(much, available=2**40, host=1, remedy="pray").endswith("does not fit the host")


def test_what_a_script_prints():
    st = rft.strategy.get_fake_strategy()
    text = rft.strategy.preflight(st, (module("default"), optim.adamw(1e-3)), budget=1024, length=64)
    assert text.startswith("memory of a process (1 of 1, packs of 1024 tokens), estimated\n")
    assert text.endswith(": fits") and "parameters" in text and len(text.splitlines()) == 10
    assert rft.strategy.preflight(st._replace(rank=1), (module("default"), None), budget=1) == ""


@pytest.mark.parametrize("models, budget", [((), 8), ((None,), 0)])
def test_nothing_to_estimate(models, budget):
    with pytest.raises(ValueError, match="models, budget: expected at least one of each"):
        estimate(StrategyConfig(), *models, budget=budget)


def test_an_engine_without_keys_and_values_is_estimated_too():
    """A recurrent model has no heads of attention to count a cache by; an estimate never stops a run."""
    from transformers import MambaConfig, MambaForCausalLM

    lm = MambaForCausalLM(MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=4))
    x = estimate(StrategyConfig(), (lm, optim.adamw(1e-3)), budget=64, kind="cpu", length=32)
    assert x.engine == x.parameters and x.activations > 0
    assert [line.partition(":")[0] for line in x.unknown] == ["cache of the engine"]


def test_the_cache_of_the_engine_is_bounded_by_the_window():
    """48 tokens a sequence or 1000: keys and values of 2 layers, 4 heads of 32, 64 sequences, a window of
    128."""
    model = module("default")
    size = lambda n: estimate(StrategyConfig(), (model, None), budget=8, kind="cpu", length=n).engine  # noqa: E731
    assert size(48) - size(0) == 2 * 2 * 128 * 4 * 48 * 64
    assert size(1000) - size(0) == 2 * 2 * 128 * 4 * 128 * 64
    assert size(0) == nbytes(*model.parameters())


def test_report(capsys):
    """What is resident grows by what is allocated and touched, and the peak stays."""
    before = memory.report("before")
    block = torch.ones(2**26)
    with_block = memory.report("with 256 MiB")
    del block
    after = memory.report()
    assert with_block["resident"] - before["resident"] == pytest.approx(2**28, rel=0.1)
    assert (
        after["resident"] < with_block["resident"] - 2**27 and after["peak"] > 0.99 * with_block["resident"]
    )
    lines = capsys.readouterr().out.splitlines()
    gib = {name: f"{n / 2**30:.2f} GiB" for name, n in with_block.items()}
    assert lines[1] == f"with 256 MiB: resident {gib['resident']}, peak {gib['peak']}"
    assert lines[2].startswith("resident ")


@pytest.fixture(scope="module")
def bench():
    """tests/bench/memory.py, the data that it made, and the page that it wrote them into."""
    spec = importlib.util.spec_from_file_location("bench_memory", ROOT / "tests" / "bench" / "memory.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made, json.loads(made.RESULTS.read_text()), made.DOCS.read_text()


@pytest.mark.parametrize("name", ["scale", "knobs", "split"])
def test_the_tables_in_the_docs_are_those_of_the_data(bench, name):
    made, found, text = bench
    assert made.section(text, name, made.TABLES[name](found[name])) == text


def test_the_data_is_what_the_estimate_says_now(bench):
    made, found, _ = bench
    assert set(found["knobs"]) == set(made.KNOBS) and len(found["scale"]) == 3 * len(made.SHAPES)
    for x, now in (
        (found["scale"]["0.5B on 64"], made.row("0.5B", 64)),
        (found["knobs"]["`sp_size 4`"], made.row("7B", 8, sp_size=4)),
    ):
        assert x.pop("phase") == now.pop("phase")
        assert now == pytest.approx(x, rel=0.02)


def test_the_measured_activations_fall_with_sequence_parallelism(bench):
    _, found, _ = bench
    for sp, x in found["split"].items():
        assert x["forward"] == pytest.approx(x["estimated"], rel=0.2)
        assert x["forward"] < 1.2 * found["split"]["1"]["forward"] / int(sp)


def test_every_knob_of_memory_is_in_the_docs(bench):
    _, _, text = bench
    knobs = "fsdp shard_size sp_size zero_stage fsdp_cpu_offload adam_offload bf16 use_mp_opt chunk_size"
    for name in (*knobs.split(), "fused_linear_logprob", "packing_samples", "enable_engine_sleep"):
        assert hasattr(StrategyConfig(), name) and f"`{name}`" in text, name
