"""Parts of gpu_step.py that run a whole model: gradients, memory, numerics, sampling, sync."""

import copy
import dataclasses
import gc
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import rft_fn as rft
from rft_fn import packing, sync
from rft_fn.data.prompts import Prompt
from rft_fn.engine import EngineConfig, get_engine
from rft_fn.environment import tiny_models
from rft_fn.model import packed_attention
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.types import Experience, Packed, TokenOut, TrainState

# Qwen2.5's published shapes; weights are random.
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5B": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
SMALL = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
WAYS: dict[str, dict[str, Any]] = {  # name -> options of a strategy, and whether layers are checkpointed
    "eager": {},
    "checkpointing": {"checkpointing": True},
    "compiled": {"compile_blocks": True},
    "compiled, checkpointing": {"compile_blocks": True, "checkpointing": True},
    "logits": {"fused_linear_logprob": False},
    "logits, checkpointing": {"fused_linear_logprob": False, "checkpointing": True},
}
PACK = 16384  # tokens of a pack at full size
FORMULA = "6 T (matrices of the layers) + 6 (targets) D V + 6 layers heads head_dim sum of squared lengths"


@dataclass(frozen=True)
class Setting:
    """What the parts measure, and on what."""

    device: torch.device
    dtype: torch.dtype
    tokens: int  # of a pack
    lengths: tuple[int, int]  # of its sequences, from and to
    sizes: dict[str, dict[str, Any]]
    small: dict[str, Any]  # the model of the numerics
    ways: dict[str, dict[str, Any]]
    batches: tuple[int, ...]  # sequences sampled at a time
    prompt: int  # tokens of a prompt that is sampled from
    max_new: int
    rounds: int
    peak: float  # FLOP/s of the device, dense
    dry: bool


def now(setting: Setting) -> float:
    """Seconds, when all that was started on the device is done."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(setting: Setting, call: Callable[[], object]) -> list[float]:
    """The seconds of each round, after one that compiles and warms up."""
    call()
    found = []
    for _ in range(setting.rounds):
        began = now(setting)
        call()
        found.append(now(setting) - began)
    return found


def forget() -> None:
    """Give back what the last case held on the device, compiled graphs too."""
    if torch.cuda.is_available():
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def module_of(setting: Setting, shape: dict[str, Any], *, checkpointing: bool = False) -> nn.Module:
    """A Qwen2 of a shape with random weights on the device."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(**shape, max_position_embeddings=32768, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    with torch.device(setting.device):
        lm = AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    return rft.model.load(lm, device=setting.device, gradient_checkpointing=checkpointing)


def lengths_of(setting: Setting, seed: int, lengths: tuple[int, int] | None = None) -> list[int]:
    """Lengths of sequences that fill a pack to the last token, drawn between two lengths."""
    g = torch.Generator().manual_seed(seed)
    low, high = lengths or setting.lengths
    found: list[int] = []
    while (left := setting.tokens - sum(found)) > 0:
        drawn = min(left, int(torch.randint(low, high + 1, (), generator=g)))
        if left - drawn < 2:
            drawn = left
        found.append(drawn)
    return found


def pack_of(setting: Setting, words: int, *, seed: int = 0) -> Packed:
    """A full pack; an eighth of each sequence is its prompt."""
    g = torch.Generator().manual_seed(seed)
    sizes = [n + 1 for n in lengths_of(setting, seed)]  # the last token is only a target
    shape = (len(sizes), max(sizes))
    place = torch.arange(shape[1])
    length = torch.tensor(sizes)[:, None]
    mask = (place >= length // 8 + 1) & (place < length)
    exp = Experience(
        tokens=torch.randint(2, words, shape, generator=g) * (place < length),
        mask=mask,
        length=length[:, 0],
        old_logp=torch.where(mask, -3.0, 0.0),
        adv=torch.randn(shape[0], 1, generator=g) * mask,
        w=rft.weight.token_mean(mask),
    )
    return packing.pack(exp, range(shape[0]))


def loss_fn(out: TokenOut, b: Packed) -> torch.Tensor:
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)


def flops(lm: nn.Module, b: Packed) -> float:
    """FLOP of a forward and backward of a pack, none of them counted twice: `FORMULA`."""
    config: Any = lm.config
    layers: Any = lm.get_submodule("model.layers")
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    sizes = torch.bincount(b.seq, minlength=b.num_seqs)
    head = config.hidden_size * config.vocab_size * int(b.mask.sum())
    scores = config.num_hidden_layers * config.hidden_size * int(sizes.square().sum())
    return 6.0 * (matrices * len(b.tokens) + head + scores)


def strategy_of(options: dict[str, Any]) -> Any:
    """The strategy of a way in `WAYS`."""
    return get_strategy(StrategyConfig(**{k: v for k, v in options.items() if k != "checkpointing"}))


def gradient_of(setting: Setting, shape: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """One size by one way: seconds, tokens/s and MFU of the gradient of a pack, without an optimizer."""
    lm = module_of(setting, shape, checkpointing=options.get("checkpointing", False))
    st = strategy_of(options)
    apply, params = st.bind(lm)
    tx = rft.optim.adamw(1e-6)
    state = TrainState(params=params, opt=(), step=0, tx=tx, module=lm)
    packs = [pack_of(setting, shape["vocab_size"], seed=seed) for seed in range(2)]
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    # Two packs of other lengths, so that a graph for each length would show.
    began = now(setting)
    for b in packs:
        st.grad(state, apply, loss_fn, [b])
    first = now(setting) - began
    found = seconds_of(setting, lambda: st.grad(state, apply, loss_fn, packs))
    middle = statistics.median(found)
    work = sum(flops(lm, b) for b in packs)
    row = {"seconds": found, "first_seconds": first, "tokens_s": 2 * setting.tokens / middle}
    row |= {"tflops": work / middle / 1e12, "mfu": work / middle / setting.peak, "peak_gib": None}
    if setting.device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def gradients(setting: Setting) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Each size by each way."""
    for name, shape in setting.sizes.items():
        for way, options in setting.ways.items():
            yield {"size": name, "way": way}, lambda s=shape, o=options: gradient_of(setting, s, o)


def forecast(setting: Setting, shape: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The estimate of a step's memory, the peak that torch's allocator had, and the update's seconds."""
    lm = module_of(setting, shape, checkpointing=options.get("checkpointing", False))
    st = strategy_of(options)
    tx = rft.optim.adamw(1e-6)
    x = rft.strategy.estimate(
        st.config, (lm, tx), budget=setting.tokens, kind=setting.device.type, engine=False
    )
    row = {"forecast_gib": x.total / 2**30, "train_gib": x.training / 2**30, "update_gib": x.updating / 2**30}
    row |= {"measured_gib": None, "ratio": None}
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    apply, state = st.init(lm, tx)
    b = pack_of(setting, shape["vocab_size"])
    grads, _ = st.grad(state, apply, loss_fn, [b])
    began = now(setting)
    state, _ = st.update(state, grads)
    row["update_seconds"] = now(setting) - began
    if setting.device.type == "cuda":
        row["measured_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["ratio"] = row["forecast_gib"] / row["measured_gib"]
    return row


def traced(setting: Setting, shape: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """A step at full size without memory: a shape that does not go through it is an error, here as there."""
    full = dataclasses.replace(setting, device=torch.device("meta"), dtype=torch.bfloat16)
    lm = module_of(full, shape, checkpointing=options.get("checkpointing", False))
    config = strategy_of(options).config
    tx = rft.optim.adamw(1e-6)
    x = rft.strategy.estimate(config, (lm, tx), budget=PACK, kind="cuda", engine=False)
    if x.unknown:
        raise RuntimeError("; ".join(x.unknown))
    gib = {"step_gib": x.total / 2**30, "gradient_gib": (x.training - x.optimizer) / 2**30}
    if setting.device.type == "cuda":
        gib["device_gib"] = torch.cuda.get_device_properties(setting.device).total_memory / 2**30
    return gib


def shapes(
    setting: Setting, names: list[str]
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """The full sizes on the meta device, in a dry run too: what a step needs, and a gradient alone."""
    for name in names:
        for way in ("eager", "checkpointing"):
            yield {"size": name, "way": way}, lambda s=SHAPES[name], w=way: traced(setting, s, WAYS[w])


def memory(setting: Setting) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Each size with and without checkpointing."""
    for name, shape in setting.sizes.items():
        for way in ("checkpointing", "eager"):
            yield {"size": name, "way": way}, lambda s=shape, w=way: forecast(setting, s, WAYS[w])


def differences(setting: Setting, options: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients of a small model beside those of the same weights in float64."""
    lm = module_of(setting, setting.small, checkpointing=options.get("checkpointing", False))
    exact = copy.deepcopy(lm).double()
    b = pack_of(setting, setting.small["vocab_size"])
    found = []
    for module, ways in ((lm, options), (exact, {})):
        st = strategy_of(ways)
        apply, params = st.bind(module)
        on_device = rft.tree.map(lambda x: x.to(setting.device), b)
        logp = apply(params, on_device).logp
        grads = torch.autograd.grad((on_device.adv * on_device.w * logp).sum(), list(params.values()))
        found.append((logp.detach().double(), [g.double() for g in grads]))
    (got, gs), (want, ws) = found
    error = (got - want).abs()[b.mask.to(setting.device)]
    apart = sum(float((g - w).square().sum()) for g, w in zip(gs, ws, strict=True)) ** 0.5
    norm = sum(float(w.square().sum()) for w in ws) ** 0.5
    row = {"logp_max": float(error.max()), "logp_mean": float(error.mean()), "gradient": apart / norm}
    q = torch.empty(0, dtype=setting.dtype, device=setting.device)
    head = setting.small["hidden_size"] // setting.small["num_attention_heads"]
    return row | {"attention": packed_attention.choose(packed_attention._device(q.device), q.dtype, head)[0]}


def numerics(setting: Setting) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Each way, on one model."""
    for way, options in setting.ways.items():
        yield {"way": way}, lambda o=options: differences(setting, o)


def sampled(setting: Setting, shape: dict[str, Any], kind: str, batch: int) -> dict[str, Any]:
    """Tokens/s of an engine, and the seconds of a sync of all weights into it."""
    spec = importlib.util.find_spec(kind)
    if kind != "hf" and (spec is None or spec.origin is None):  # a folder of that name is no package
        return {"left_out": f"{kind} is not installed"}
    lm = module_of(setting, shape)
    st = get_strategy()
    _, state = st.init(lm, rft.optim.adamw(1e-6))
    tokenizer = tiny_models.new_tokenizer()
    config = EngineConfig(type=kind, batch=batch)
    with tempfile.TemporaryDirectory() as folder:
        source: Any = copy.deepcopy(lm)
        if kind != "hf":
            rft.model.save(folder, lm, tokenizer, st.export(state))
            source = folder
        engine = get_engine(config, source, tokenizer)
        began = now(setting)
        delivered = sync.push(st, state, engine, version=1)
        synced = now(setting) - began

        # The first tokens of a prompt differ, so no cache of prefixes has them.
        prompts = [Prompt([2 + i % 40] * setting.prompt, "", {}, i) for i in range(batch)]
        options = {"n": 1, "sampling": rft.Sampling(max_new=setting.max_new)}
        engine.generate(prompts, range(batch), n=1, sampling=rft.Sampling(max_new=2))
        began = now(setting)
        rollout = engine.generate(prompts, range(batch), **options)
        spent = now(setting) - began
        engine.close()
    row = {"tokens_s": int(rollout.mask.sum()) / spent, "seconds": spent}
    return row | {"sync_seconds": synced, "sync_gb": delivered.bytes / 1e9}


def sampling(setting: Setting) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Each size by each engine and batch."""
    for name, shape in setting.sizes.items():
        for kind in ("hf", "vllm"):
            for batch in setting.batches:
                about = {"size": name, "engine": kind, "batch": batch}
                yield about, lambda s=shape, k=kind, n=batch: sampled(setting, s, k, n)
