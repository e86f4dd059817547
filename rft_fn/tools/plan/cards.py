"""Rates of a GPU from a table, and the bytes of a model on it."""

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from rft_fn import model, optim
from rft_fn.strategy.forecast import Forecast
from rft_fn.tools.plan.planned_command import Planned
from rft_fn.tools.plan.simulation import Rates, Setting

__all__ = ["Machine", "Shape", "machine", "rates", "rows_that_fit", "shape", "trainer_memory"]

_GPUS = 8  # of a node
_FILE = Path(__file__).with_name("cards.toml")


class Machine(NamedTuple):
    """Rented GPUs of one kind."""

    name: str
    gpus: int  # 0: as many as the roles take
    card: Mapping[str, float]
    reached: Mapping[str, float]


class Shape(NamedTuple):
    """A model, as far as its bytes and products matter."""

    parameters: int
    active: int  # of them for one token
    layers: int
    width: int  # of all heads of queries together
    cache: int  # numbers in the cache for a token


def machine(text: str) -> Machine:
    """Return what `64xH100` or `H100` means. ValueError for a card that the table does not have."""
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    reached = table.pop("reached")
    found = re.fullmatch(r"(?:([1-9][0-9]*)x)?(\w+)", text)
    if not found or found[2] not in table:
        raise ValueError(f"on: expected a card as 64xH100, of {', '.join(table)}, got {text!r}")
    return Machine(found[2], int(found[1] or 0), table[found[2]], reached)


def shape(lm: nn.Module) -> Shape:
    """Return the shape of a model of transformers, which may be on the meta device."""
    config: Any = lm.config.get_text_config()  # type: ignore[operator]
    total = sum(p.numel() for p in lm.parameters())
    experts = sum(p.numel() for name, p in lm.named_parameters() if ".experts." in name)
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    used = min(getattr(config, "num_experts_per_tok", None) or 1, count)
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    layers = config.num_hidden_layers
    idle = experts * (count - used) // count
    return Shape(total, total - idle, layers, heads * head, 2 * layers * keys * head)


def rates(x: Setting, of: Shape, on: Machine, *, length: float, checkpointing: bool, tp: int = 1) -> Rates:
    """Return the rates of a setting on GPUs: a cost model of products, bytes and links.

    `length` are the tokens of a row in the mean, `tp` the GPUs of an engine. Sharded by FSDP2: a pack gathers
    the weights twice in bfloat16 and scatters gradients in float32, along rings of all ranks.
    """
    card, reached = on.card, on.reached
    nodes = math.ceil(x.ranks / _GPUS)
    link = card["inside"] if nodes == 1 else min(card["inside"], _GPUS * card["outside"])
    weights = 2.0 * of.parameters
    forward = (2 * of.active + 2 * length * of.width * of.layers) / (reached["train"] * card["flops"])
    read, products = reached["sample"] * card["bandwidth"] * tp, reached["sample"] * card["flops"] * tp
    share = (x.ranks - 1) / x.ranks
    hops = 3 * of.layers * (reached["start"] + reached["hop"] * nodes) if x.ranks > 1 else 0.0
    launch = reached["launch_server" if x.servers else "launch_hf"]
    return Rates(
        step=launch * of.layers + weights / read,
        row=2 * of.active / products,
        cache=2 * of.cache / read,
        prefill=2 * of.active / (reached["train"] * card["flops"] * tp),
        token=forward * (4 if checkpointing else 3),
        score=forward,
        pack=reached["pack"],
        network=share * 8.0 * of.parameters / link + hops,
        update=28.0 * of.parameters / x.ranks / card["bandwidth"],
        push=2 * weights / card["bandwidth"] + share * weights / link,
        deliver=weights / card["outside"] if x.servers else 0.0,
        load=weights / reached["reload"] if x.servers else weights / card["bandwidth"],
        reply=reached["reply"],
        gather=reached["gather"] if x.ranks > 1 else 0.0,
        plan=reached["plan"],
        save=14.0 * of.parameters / reached["disk"],
        source=f"the table of cards, {on.name}",
    )


def rows_that_fit(of: Shape, on: Machine, *, length: float, tp: int) -> int:
    """Return the rows of a mean length whose cache a server has room for, beside the weights."""
    free = on.reached["held"] * on.card["memory"] * tp - 2 * of.parameters
    return max(0, int(free / (2 * of.cache * length)))


def trainer_memory(planned: Planned, lm: nn.Module, on: Machine, *, length: int) -> tuple[int, str]:
    """Return the bytes of a GPU of the trainer by forecast, with rows of up to `length` tokens; and when."""
    cfg = planned.config
    if cfg.lora_rank:
        lm = model.apply_lora_configuration(
            lm, cfg.lora_rank, cfg.lora_alpha, target_modules=cfg.lora_targets
        )
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-6))
    x = Forecast(
        config=cfg.strategy,
        models=((lm, tx),),
        budget=cfg.budget,
        world=planned.ranks,
        kind="cuda",
        available=int(on.card["memory"]),
        host=0,
        more={"engine": not planned.servers, "length": length},
    )
    if cfg.gradient_checkpointing:
        x = x.keeping(cfg.gradient_checkpointing)
    found = x.estimate()
    return found.total, f"in {found.largest.name}"
