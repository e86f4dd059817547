"""The rewards of a command line: functions, models, judges and servers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from rft_fn import data, engine, model, reward
from rft_fn.data.steps import NEW_LINE
from rft_fn.engine.lifetime import deferred
from rft_fn.memory import Sampler
from rft_fn.reward.scalar_model import check_budget
from rft_fn.reward.veto import read_veto
from rft_fn.run import options
from rft_fn.run.placing import placed
from rft_fn.run.resume import last_model
from rft_fn.run.setup import load_processing
from rft_fn.strategy import StrategyConfig
from rft_fn.types import Engine, Experience, Strategy, TokenOut

__all__ = ["judges_here", "load_rewards", "reward_modules"]

R = TypeVar("R", bound=Any)

_BUDGET = 4096  # tokens that go through a reward model at once, where no option says


def load_rewards(specs: Sequence[str], cfg: options.Data, st: Strategy) -> reward.Weighted:
    """The rewards of a command line: what `reward.parse` knows, and models.

    model:FOLDER[:HEAD](budget=N)   one head of a scalar reward model, whose ranks share the rows out. It
                                    reads prompts with the system prompt and the chat template's arguments of
                                    `cfg`; see `reward.Reading`. Of a process reward model, `steps` is "last",
                                    "min" or "product", and `separator` what separates steps, a new line if it
                                    is not given.

    judge:FOLDER(...)               a generative one, in an engine on each rank. The arguments are those of
                                    `reward.generative_by_name`, and engine_type, servers, key_env and batch
                                    of its engine; see `engine.EngineConfig`. Judges on servers are asked at
                                    the same time.

    Both take `name`, by default that of the head and "judge".
    http://..., https://...         a server: `reward.served_at`.

    FOLDER may be that of a run. The weights of a folder are loaded once for all its heads, when the rewards
    are called first; what is wrong with a folder is found here. Vetoes are those of `cfg`, if it has any.
    `Weighted.close` ends it all. ValueError as `reward.parse` raises it.
    """
    sources = _Sources(cfg, st)
    score = reward.parse(specs, {"model": sources.model, "judge": sources.judge})
    if isinstance(cfg, options.Reward):
        score = score.with_vetoes(*(read_veto(text) for text in cfg.reward_veto))
    return score


def reward_modules(score: reward.Weighted) -> list[nn.Module]:
    """The scalar reward models among the parts of a score, each once and without weights: for forecasts."""
    modules = [getattr(fn, "module", None) for fn, _ in score.components.values()]
    return list({id(module): module for module in modules if module is not None}.values())


def judges_here(score: reward.Weighted) -> list[tuple[nn.Module, Sampler]]:
    """The judges of this process among the parts of a score, without weights: for forecasts.

    Each has an engine, and so a copy of its weights; those of one folder and equal engines share it. Judges
    on servers are left out.
    """
    judges: list[Any] = [fn for fn, _ in score.components.values() if hasattr(fn, "sampled_here")]
    places = {id(fn.engine): fn.sampled_here for fn in judges}
    return [(model.load(folder, meta=True), sampler) for folder, sampler in places.values()]


class _Sources:
    """Makes rewards of models for one run."""

    def __init__(self, cfg: options.Data, st: Strategy):
        self.cfg = cfg
        self.st = st
        self.scalars: dict[str, _Scalar] = {}
        self.engines: dict[tuple[str, engine.EngineConfig], Engine] = {}  # of judges in this process

    def model(
        self,
        target: str,
        /,
        *,
        budget: int | None = None,
        steps: str = "",
        separator: str | None = None,
        name: str = "",
    ) -> reward.ScalarReward:
        """A head of the scalar reward model in a folder."""
        if steps and separator is None:
            separator = NEW_LINE
        if not steps and separator is not None:
            raise ValueError(f"separator: expected steps beside it, as steps='min', got {separator!r} alone")
        folder, head = _folder_and_head(target)
        if folder not in self.scalars:
            self.scalars[folder] = _Scalar(folder, self.cfg, self.st)
        made = self.scalars[folder].head(head, budget, steps or "last", separator)
        return _called(name, made)

    def judge(
        self,
        target: str,
        /,
        *,
        engine_type: str = "hf",
        servers: Sequence[str] = (),
        key_env: str = engine.EngineConfig.key_env,
        batch: int | None = None,
        name: str = "",
        **options: Any,
    ) -> reward.RewardFn:
        """A generative reward model in a folder, or on servers that have it.

        It sleeps while it is not asked, with enable_engine_sleep or offload_models.
        """
        folder = last_model(target)
        if not servers:
            model.load(folder, meta=True)  # without weights: what is no language model is found here
        config = replace(_engine_config(self.st.config, engine_type, servers, batch), key_env=key_env)
        engine.check_config(config)
        tokenizer = model.load_tokenizer(folder)
        judge_engine = deferred(partial(engine.get_engine, config, folder, tokenizer))
        if not config.servers:  # judges on servers are asked at the same time, each by requests of its own
            judge_engine = self.engines.setdefault((folder, config), judge_engine)
        processing = load_processing(self.cfg, folder)
        how: dict[str, Any] = {"processing": processing, "served": bool(config.servers)}
        made = reward.generative_by_name(judge_engine, tokenizer, **how, **options)
        if not config.servers:
            packs = config.fast_linear and config.type == "hf"
            sampler = Sampler(config.batch, config.max_model_len, config.sleep, packs)
            made.__dict__["sampled_here"] = folder, sampler
        return _called(name, made)


def _called(name: str, made: R) -> R:
    """A reward by the name that it was given, if any."""
    if name:
        made.__name__ = name
    return made


class _Scalar:
    """A scalar reward model in a folder, loaded when it is called first."""

    def __init__(self, folder: str, cfg: options.Data, st: Strategy):
        self.folder = folder
        self.st = st
        self.module = model.load_reward(folder, meta=True)  # without weights, which may be large
        self.heads = self.module.heads
        self.reading = _reading(folder, cfg)
        self.made: dict[tuple[str, str | None], reward.ScalarReward] = {}  # by how steps are read
        self.usual: int = getattr(cfg, "budget", _BUDGET)  # tokens that go through it at once
        self.budget: int | None = None  # in place of it, where a head was given one
        self.bound: tuple[Any, Any] | None = None

    def head(self, name: str, budget: int | None, steps: str, separator: str | None) -> reward.ScalarReward:
        """The reward of one head; all that read steps alike share a forward pass, and all its budget."""
        names = [head.name for head in self.heads]
        if not name and len(names) > 1:
            raise ValueError(
                f"expected model:FOLDER:HEAD, with one of its heads {', '.join(names)}, got none"
            )
        if budget is not None:
            check_budget(budget)
            if self.budget not in (None, budget):
                raise ValueError(
                    f"budget: expected one for all heads of {self.folder}, got {self.budget} and {budget}"
                )
            self.budget = budget
        how = steps, separator
        if how not in self.made:
            reading = replace(self.reading, separator=separator)
            options: dict[str, Any] = {"head": names[0], "reading": reading, "steps": steps}
            self.made[how] = reward.scalar(self.score, self.heads, **options)
        made = self.made[how].head(name or names[0])
        made.module = self.module
        return made

    def score(self, rows: Experience, _: int, /) -> TokenOut:
        """The scores of rows, by all ranks together, in packs of this model's budget."""
        if self.bound is None:
            self.bound = self.st.bind(model.load_reward(self.folder, meta=self.st.world > 1))
        apply, params = self.bound
        with placed(self.st, apply):
            return self.st.score(apply, params, rows, self.budget or self.usual, fields=("score",))


def _engine_config(
    config: StrategyConfig, engine_type: str, servers: Sequence[str], batch: int | None
) -> engine.EngineConfig:
    """The engine of a judge, which each rank asks alone.

    It has the policy's options of engines where it is of the same type, otherwise those of any type.
    """
    own = engine.config_of(config)
    if own.type != engine_type:
        own = engine.EngineConfig(batch=own.batch, timeout=own.timeout, fast_linear=own.fast_linear)
    sleep = config.enable_engine_sleep or config.offload_models
    own = replace(own, type=engine_type, servers=tuple(servers), sleep=sleep, alone=True)
    return replace(own, batch=batch or own.batch, process=False, tp_size=1)


def _folder_and_head(target: str) -> tuple[str, str]:
    """(folder, head) of FOLDER[:HEAD]; a folder may have a colon in its name."""
    folder, colon, head = target.rpartition(":")
    if not colon or Path(target).is_dir():
        folder = target
        head = ""
    return last_model(folder), head


def _reading(folder: str, cfg: options.Data) -> reward.Reading:
    """How the model of a folder reads prompts and responses."""
    return reward.Reading(
        tokenizer=model.load_tokenizer(folder),
        system=cfg.system,
        chat_template_kwargs=data.literals(cfg.chat_template_kwargs),
        processing=load_processing(cfg, folder),
        window=model.read_window(folder),
    )
