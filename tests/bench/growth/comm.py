"""Bytes between processes: counted in a real step over gloo, and a model of them for many GPUs.

The counts say how often parameters, gradients and activations travel; the model multiplies that by the sizes
of a large model and divides by bandwidths. Nothing in it was measured on a network.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# which argument holds what is sent (or, of a gather, what arrives), for each operation of torch.distributed
KINDS = {
    "c10d::_allgather_base_": ("all-gather", "out"),
    "c10d::allgather_": ("all-gather", "out"),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", "result"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "in"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", "in"),
    "c10d::allreduce_": ("all-reduce", "in"),
    "_c10d_functional::all_reduce": ("all-reduce", "in"),
    "c10d::alltoall_base_": ("all-to-all", "in"),
    "_c10d_functional::all_to_all_single": ("all-to-all", "in"),
}
WHERE = {"c10d::_allgather_base_": 0, "c10d::allgather_": 0, "c10d::_reduce_scatter_base_": 1}
WHERE |= {"c10d::alltoall_base_": 1}


class Counted(TorchDispatchMode):
    """Counts the calls and bytes of each collective in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own operations come by once it has run them on its parts
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in KINDS:
            kind, side = KINDS[name]
            held = args[WHERE.get(name, 0)]
            if side == "result":
                held = out
            self.calls[kind] += 1
            self.bytes[kind] += sum(x.numel() * x.element_size() for x in tensors(held))
        return out


def tensors(x: Any) -> list[torch.Tensor]:
    """All tensors in nested lists."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for part in x for t in tensors(part)]
    return []


SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 256}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
CASES = {"FSDP2": {"fsdp": True}, "HSDP": {"shard_size": 2}, "sequence parallelism": {"sp_size": 2}}


def count(rank: int, tokens: int = 256, packs: int = 2) -> dict[str, Any]:
    """{case: {collective: (calls, bytes)}} of one process in a gradient of `packs` packs, and the sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import rft_fn as rft
    from rft_fn.packing import supervised
    from rft_fn.strategy import StrategyConfig, get_strategy

    found: dict[str, Any] = {}
    for name, options in CASES.items():
        st = get_strategy(StrategyConfig(**options))
        torch.manual_seed(0)
        more = {"tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0}
        lm = LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **more))
        parameters = sum(p.numel() for p in lm.parameters())
        embedding = lm.get_input_embeddings().weight.numel()
        apply, state = st.init(lm, rft.optim.adamw(1e-3))
        rows = [([3], [3 + i % 200 for i in range(tokens - 1)])] * (packs * st.world)
        mine = st.shard(supervised(rows), tokens)

        def loss_fn(out: rft.TokenOut, b: rft.Packed) -> torch.Tensor:
            return rft.loss.nll(out.logp)

        with Counted() as seen:
            grads, _ = st.grad(state, apply, loss_fn, mine)
        st.update(state, grads)
        found[name] = {kind: (seen.calls[kind], seen.bytes[kind]) for kind in sorted(seen.calls)}
        found[name] |= {"packs": len(mine), "tokens": tokens, "world": st.world}
        found[name] |= {"parameters": parameters, "embedding": embedding, "sp": options.get("sp_size", 1)}
    return found


@dataclass(frozen=True)
class Network:
    """What the model assumes of a cluster; each can be given on the command line."""

    gpus: int = 8  # of a node
    inside: float = 450e9  # bytes/s of a GPU to the others of its node, one way
    outside: float = 50e9  # bytes/s of a GPU to other nodes
    hop: float = 5e-6  # seconds of a collective for each node on its ring
    start: float = 20e-6  # seconds of a collective
    flops: float = 400e12  # of a GPU in the products of a step, as it really has them


@dataclass(frozen=True)
class Shape:
    """A model, as far as its bytes matter."""

    parameters: float
    layers: int
    width: int
    heads: int
    kv: int
    head: int  # width of a head


SHAPES = {
    "0.5B": Shape(0.494e9, 24, 896, 14, 2, 64),
    "7B": Shape(7.6e9, 28, 3584, 28, 4, 128),
    "70B": Shape(70.6e9, 80, 8192, 64, 8, 128),
}


def ring(size: float, world: int, net: Network) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in all, over `world` GPUs.

    Rings cross a node's border once for each of its GPUs, so a node receives at gpus x outside.
    """
    nodes = math.ceil(world / net.gpus)
    rate = net.inside
    if nodes > 1:
        rate = min(net.inside, net.gpus * net.outside)
    return size * (world - 1) / world / rate + net.start + net.hop * nodes


def all_reduce(size: float, world: int, net: Network) -> float:
    """Seconds of an all-reduce of `size` bytes over one GPU of each of `world` nodes."""
    return 2 * size * (world - 1) / world / net.outside + net.start + net.hop * world


def exchange(size: float, world: int, net: Network) -> float:
    """Seconds of an all-to-all of `size` bytes of each of `world` GPUs of a node."""
    rate = net.inside
    if world > net.gpus:
        rate = net.outside
    return size * (world - 1) / world / rate + net.start


def step(
    shape: Shape, world: int, scheme: str, net: Network, *, tokens: int, sp: int = 1
) -> dict[str, float]:
    """One pack of `tokens` on each group of `sp` GPUs, with gradient checkpointing, by the counts of `count`.

    FSDP2 gathers each block in bfloat16 before its forward and before its backward while the block before it
    is computed, and scatters its gradients in float32 while the next one is. HSDP does that within a node,
    and sums what is left over the nodes. Exchanges of sequence parallelism wait, and are made a second time
    by the recomputation.
    """
    block = shape.parameters / shape.layers
    own = tokens / sp
    attention = 4 * tokens * own * shape.heads * shape.head / 2  # causal: half of q kᵀ and of p v
    forward = (2 * block * own + attention) / net.flops
    backward = 3 * forward  # with the forward again

    group = world
    if scheme == "HSDP":
        group = min(world, net.gpus)
    gather = ring(2 * block, group, net)
    scatter = ring(4 * block, group, net)
    summed = 0.0
    if group < world:
        summed = all_reduce(4 * block / group, world // group, net)

    # 16-bit q, k and v travel together, the result by itself; keys are repeated if there are too few
    exchanged = sent = 0.0
    if sp > 1:
        kv = shape.kv * sp // math.gcd(shape.kv, sp)
        parts = [own * heads * shape.head * 2 for heads in (shape.heads + 2 * kv, shape.heads)]
        exchanged = 3 * sum(exchange(x, sp, net) for x in parts)  # forward, forward again, backward
        sent = 3 * sum(parts) * (sp - 1) / sp

    behind = max(0.0, gather - forward) + max(0.0, gather + scatter + summed - backward)
    exposed = shape.layers * (behind + exchanged) + gather + scatter
    compute = shape.layers * (forward + backward)
    communication = shape.layers * (2 * gather + scatter + summed + exchanged)
    per_token = 2 * block / net.flops  # seconds of a block's products in the forward
    hidden = max(gather / per_token, (gather + scatter + summed) / (3 * per_token))
    share = (group - 1) / group
    of_weights = share * 8 * block + 2 * 4 * block / group * (1 - group / world)
    return {
        "bytes": shape.layers * (of_weights + sent),
        "compute": compute,
        "communication": communication,
        "exposed": exposed,
        "hidden_from": hidden,
        "efficiency": compute / (compute + exposed),
    }


WORLDS = (8, 64, 256, 1024)


def table(net: Network, tokens: int = 16384) -> list[dict[str, Any]]:
    """Rows of models, schemes and numbers of GPUs."""
    rows = []
    for name, shape in SHAPES.items():
        for scheme, sp in (("FSDP2", 1), ("HSDP", 1), ("FSDP2, sp_size 2", 2)):
            for world in WORLDS:
                if scheme == "HSDP" and world <= net.gpus:
                    continue
                found = step(shape, world, scheme, net, tokens=tokens, sp=sp)
                rows.append({"model": name, "scheme": scheme, "gpus": world} | found)
    return rows


def slower(net: Network) -> dict[str, Network]:
    """The networks that the tables are made for."""
    half = replace(net, inside=net.inside / 2, outside=net.outside / 4)
    return {"as assumed": net, "half inside a node, a quarter between nodes": half}


def assumptions(net: Network) -> dict[str, float]:
    """The parameters, for the data."""
    return asdict(net)
