"""The setting of a plan, by the command of a trainer or by the file of roles that has it."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_fn import parsing
from rft_fn.run import config_file, options
from rft_fn.tools import scripts
from rft_fn.tools.launch import roles
from rft_fn.tools.plan.simulation import Setting

__all__ = ["USUAL", "Planned", "read", "scores", "setting"]

_ON_GPU = {"budget": 16384, "engine_batch": 256}  # in place of `auto`
USUAL = 100  # steps of a run whose script decides
_PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|nnodes)(?:=|$)")
_TENSOR_PARALLEL = re.compile(r"--(?:tensor-parallel-size|tp-size|tp)[= ](\d+)")


@dataclass(frozen=True)
class Planned:
    """A trainer's command, and the programs beside it."""

    script: Path
    arguments: Sequence[str]  # of the script
    config: Any  # its options
    ranks: int
    others: Sequence[str] = ()  # roles that neither train nor sample
    gpus_of_engine: int = 1

    @property
    def servers(self) -> int:
        """Return how many servers sample; 0 where each rank does."""
        return len(self.config.strategy.engine_servers)


def read(text: str, *, on_gpu: bool) -> Planned:
    """Return what the file of roles `text`, or the command of a trainer, says.

    ValueError for a role or a command that is no script of ours, or one that samples nothing.
    """
    if not text.endswith(".toml"):
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"command: expected words as of a shell, got {text!r}: {error}") from None
        return _of_words("command", words, on_gpu)
    found = roles.read(Path(text))
    ports = {name: [*range(1, 1 + count)] for name, count in roles.needed_ports(found).items()}
    words = next(x.words for x in roles.resolve(found, ports) if x.role == found.main)
    engines, others = {}, {}
    for name, role in found.roles.items():
        if name != found.main:
            samples = f"{{{name}.url" in found.roles[found.main].command.partition("--engine-servers")[2]
            (engines if samples else others)[name] = role
    sizes = [int(tp[1]) for role in engines.values() if (tp := _TENSOR_PARALLEL.search(role.command))]
    made = _of_words(f"roles.{found.main}.command", words, on_gpu)
    return Planned(made.script, made.arguments, made.config, made.ranks, [*others], max(sizes, default=1))


def _of_words(place: str, words: Sequence[str], on_gpu: bool) -> Planned:
    """Return the script, the options and the processes of a command."""
    runs = [i for i, word in enumerate(words[:-1]) if word == "run" and _is_rft(words[i - 1])]
    files = [i for i, word in enumerate(words) if word.endswith(".py")]
    if not runs and not files:
        raise ValueError(
            f"{place}: expected a .toml file of roles, rft run SCRIPT or a .py file, got {' '.join(words)!r}"
        )
    at = runs[0] + 1 if runs else files[0]
    script, arguments = scripts.find(words[at]), words[at + 1 :]
    kind = scripts.config(script)
    if not issubclass(kind, options.ReinforcementRun):
        raise ValueError(f"{place}: expected a script that samples, as grpo or ppo, got {script.stem}")
    sizes = [word for name, x in _ON_GPU.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    first = parsing.qualify(sizes, kind) if on_gpu else []
    cfg = config_file.parse(kind, parsing.qualify(arguments, kind), first=first)
    return Planned(script, arguments, cfg, _ranks(place, words[:at]))


def _is_rft(word: str) -> bool:
    return Path(word).name in ("rft", "rft_fn")


def _ranks(place: str, words: Sequence[str]) -> int:
    """Return the processes that torchrun starts; 1 without it."""
    ranks = 1
    for i, word in enumerate(words):
        if found := _PROCESSES.match(word):
            number = word.partition("=")[2] or words[i + 1]
            if not number.isdecimal() or not int(number):
                raise ValueError(f"{place}: expected a number of --{found[1]}, got {number!r}")
            ranks *= int(number)
    return ranks


def setting(x: Planned, *, steps: int, prompt_tokens: float, learned: float = 1.0) -> Setting:
    """Return the setting of the first `steps` steps."""
    cfg = x.config
    given = cfg.steps or USUAL
    size = cfg.strategy.train_batch_size
    updates = cfg.epochs * (-(-cfg.prompts * cfg.group // size) if size else cfg.minibatches)
    partial = getattr(cfg, "partial", 0)
    return Setting(
        steps=min(steps, given),
        prompts=cfg.prompts,
        group=cfg.group,
        max_new=cfg.max_new,
        prompt_tokens=prompt_tokens,
        ahead=cfg.ahead,
        partial=partial if partial < cfg.max_new else 0,
        ranks=x.ranks,
        engines=x.servers or x.ranks,
        servers=bool(x.servers),
        rows=cfg.strategy.engine_batch * (x.ranks if x.servers else 1),
        budget=cfg.budget,
        passes=cfg.epochs,
        updates=updates,
        scores=scores(vars(cfg)),
        share_prompts=cfg.strategy.share_prefixes,
        learned=learned,
        save_every=cfg.save_every,
    )


def scores(options: Mapping[str, Any]) -> int:
    """Return how often a step scores its rollout: for a reference, for corrections, around its updates."""
    anchor = any(options.get(name) for name in ("kl", "kl_in_reward"))
    stale = options.get("ahead") or options.get("partial")
    corrects = options.get("mismatch") or ("tis" if stale else "none")
    more = ("geo_low", "geo_high", "update_kl", "entropy_target")
    own = corrects != "none" or any(options.get(name) for name in more) or options.get("entropy_share", 1) < 1
    return anchor + own + bool(options.get("update_kl"))
