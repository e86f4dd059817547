"""Stages about state: update, push, offload, save, restore, forecast; FSDP2; a model that sees."""

import os
import socket
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import models
import torch
from checks import metrics
from harness import Cases, Row, Setting, forget, forked, now, peak_gib, reset_peak, run_script

import rft_fn as rft
from rft_fn import sync
from rft_fn.engine import EngineConfig, get_engine
from rft_fn.environment import tiny_models
from rft_fn.strategy import StrategyConfig, get_strategy


def bytes_of(x: Any) -> int:
    """Return the bytes of all tensors of a tree."""
    return sum(t.numel() * t.element_size() for t in rft.tree.leaves(x) if isinstance(t, torch.Tensor))


def optimizer() -> Any:
    return rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-6))


class Trained:
    """A model in training, which the cases of a stage hand on."""

    def __init__(self, setting: Setting, name: str):
        self.setting = setting
        self.name = name
        reset_peak(setting)
        self.lm = models.module_of(setting, name, checkpointing=True)
        self.st = get_strategy(StrategyConfig())
        self.apply, self.state = self.st.init(self.lm, optimizer())
        self.pack = models.pack_of(setting, models.shape_of(setting, name)["vocab_size"])

    def timed(self, call: Any) -> tuple[Any, float]:
        """Return (the result of a call, its seconds)."""
        began = now(self.setting)
        found = call()
        return found, now(self.setting) - began

    def updates(self) -> Row:
        """Measure the update, and the peak of whole steps."""
        seconds = []
        for _ in range(1 + self.setting.rounds):
            grads, _ = self.st.grad(self.state, self.apply, models.loss_fn, [self.pack])
            (self.state, _), spent = self.timed(partial(self.st.update, self.state, grads))
            seconds.append(spent)
            del grads
        parameters = sum(p.numel() for p in self.lm.parameters())
        row: Row = {"first_seconds": seconds[0], "seconds": statistics.median(seconds[1:])}
        row |= {"parameters": parameters, "ns_a_parameter": row["seconds"] / parameters * 1e9}
        # rounds are over: what the device held at most is what the forecast says
        return row | {"peak_gib": peak_gib(self.setting)}

    def pushed(self) -> Row:
        """Measure a push of all weights into an engine of this process."""
        lm = models.module_of(self.setting, self.name)
        engine = get_engine(EngineConfig(batch=2), lm, tiny_models.new_tokenizer())
        seconds = []
        for version in (1, 2):
            found, spent = self.timed(partial(sync.push, self.st, self.state, engine, version=version))
            seconds.append(spent)
        engine.close()
        return {"first_seconds": seconds[0], "seconds": seconds[1], "gb_s": found.bytes / seconds[1] / 1e9}

    def offloaded(self) -> Row:
        """Measure the way of the optimizer's state to the host and back, the second time."""
        size = bytes_of(self.state.opt)
        row: Row = {"gb": size / 1e9}
        for _ in range(2):
            self.state, down = self.timed(partial(self.st.offload, self.state))
            self.state, up = self.timed(partial(self.st.reload, self.state))
        row |= {"down_seconds": down, "up_seconds": up}
        return row | {"down_gb_s": size / down / 1e9, "up_gb_s": size / up / 1e9}

    def placed(self) -> Row:
        """Measure the way of the weights to the host and back, the second time."""
        size = bytes_of(self.state.params)
        for _ in range(2):
            _, down = self.timed(partial(self.st.place, self.apply, "host"))
            _, up = self.timed(partial(self.st.place, self.apply, "device"))
        return {"gb": size / 1e9, "down_gb_s": size / down / 1e9, "up_gb_s": size / up / 1e9}

    def saved(self, folder: Path) -> Row:
        """Measure a checkpoint and its way back."""
        path, save = self.timed(partial(self.st.save, folder / "step_1", self.state))
        size = sum(x.stat().st_size for x in Path(path).rglob("*") if x.is_file())
        (self.state, _), restore = self.timed(partial(self.st.restore, path, self.state))
        row: Row = {"gb": size / 1e9, "save_seconds": save, "restore_seconds": restore}
        return row | {"save_gb_s": size / save / 1e9, "restore_gb_s": size / restore / 1e9}

    def canary(self, folder: Path) -> Row:
        """Measure the canary, which every run begins with."""
        tokenizer = tiny_models.new_tokenizer()
        self.st.save_pretrained(folder / "model", self.lm, tokenizer, self.st.export(self.state))
        lm = models.module_of(self.setting, self.name)
        engine = get_engine(EngineConfig(batch=4), lm, tokenizer)
        prompts = [[5, 6, 7, 8], [9, 10, 11]]
        name = str(folder / "model")
        probe = sync.canary(self.st, self.state, engine, name, prompts, version=3, max_gap=1.0)
        engine.close()
        return {"seconds": probe.seconds, "noisy": probe.noisy, "floor": probe.floor}


def state(setting: Setting) -> Cases:
    """1.5B with AdamW and master weights through a step; 0.5B to a disk and back, and its canary."""
    held: list[Trained] = []

    def trained(name: str) -> Trained:
        if not held or held[0].name != name:
            held.clear()
            forget()
            held.append(Trained(setting, name))
        return held[0]

    for what in ("updates", "pushed", "offloaded", "placed"):
        yield {"size": "1.5B", "what": what}, lambda w=what: getattr(trained("1.5B"), w)()
    with tempfile.TemporaryDirectory() as folder:
        for what in ("saved", "canary"):
            yield {"size": "0.5B", "what": what}, lambda w=what: getattr(trained("0.5B"), w)(Path(folder))


def forecast(setting: Setting) -> Cases:
    """What a run is told before it starts about the memory of the stage `state`; it needs no device."""

    def estimated() -> Row:
        meta = models.dataclasses.replace(setting, device=torch.device("meta"))
        lm = models.module_of(meta, "1.5B", checkpointing=True)
        x = rft.strategy.estimate(
            StrategyConfig(), (lm, optimizer()), budget=setting.tokens, kind=setting.device.type, engine=False
        )
        row: Row = {"total_gib": x.total / 2**30, "training_gib": x.training / 2**30}
        return row | {"updating_gib": x.updating / 2**30, "unknown": list(x.unknown)}

    yield {"size": "1.5B", "way": "checkpointing"}, estimated


# ---------- FSDP2 over the device's collectives


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def one_rank() -> None:
    """Say to torch what torchrun says to the only process of a run."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def fsdp2(setting: Setting) -> Cases:
    """The gradient's norm of one process by FSDP2 and without, and its rate."""

    def norm(config: StrategyConfig) -> float:
        lm = models.module_of(setting, "0.5B", checkpointing=True)
        st = get_strategy(config)
        apply, state = st.init(lm, optimizer())
        b = models.pack_of(setting, models.shape_of(setting, "0.5B")["vocab_size"])
        grads, _ = st.grad(state, apply, models.loss_fn, [b])
        state, more = st.update(state, grads)
        found = rft.metric.results(more)["grad/norm"]
        st.close()
        return found

    def same() -> Row:
        alone = norm(StrategyConfig())
        forget()
        one_rank()
        sharded = norm(StrategyConfig(fsdp=True))
        return {"norm": alone, "fsdp2_norm": sharded, "relative": abs(sharded - alone) / alone}

    def rate() -> Row:
        one_rank()
        return models.gradient_of(setting, "1.5B", StrategyConfig(fsdp=True))

    yield {"size": "0.5B", "what": "norm"}, lambda: forked(same)[0]
    yield {"size": "1.5B", "what": "rate"}, lambda: forked(rate)[0]


# ---------- a model that sees


def vision(setting: Setting) -> Cases:
    """Two steps of grpo.py on the tiny model that sees."""
    folder = Path(tempfile.mkdtemp())

    def steps() -> Row:
        given = ["--model", "tiny-vl", "--data", "count_squares", "--steps", "2", "--prompts", "4"]
        given += ["--group", "4", "--max-gap", "1", "--eval-every", "1000", "--out", str(folder / "vl")]
        row = run_script("grpo", given, folder / "vl.log")
        rows = metrics(folder / "vl")
        row |= {"steps": len(rows), "gap": max((r["policy/logp_gap"] for r in rows), default=None)}
        return row | {"reward": rows[-1]["reward/mean"] if rows else None}

    yield {"model": "tiny-vl"}, lambda: forked(steps)[0]
