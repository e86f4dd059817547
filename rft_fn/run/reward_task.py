"""A task that a policy learns from rewards: its prompts, and the judging of responses to them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from rft_fn import collect, data, engine, model, packing, reward, tree
from rft_fn.data import reasoning_gym
from rft_fn.data.curriculum import check_rows
from rft_fn.data.reasoning_steps import NEW_LINE
from rft_fn.engine import EngineDead
from rft_fn.engine.lifetime import deferred
from rft_fn.memory import Sampler
from rft_fn.reward.references import Survey
from rft_fn.reward.scalar_model import check_budget
from rft_fn.reward.veto import read_veto
from rft_fn.run import options
from rft_fn.run.cli import without
from rft_fn.run.earlier_run import last_model
from rft_fn.run.lm_eval_tasks import PREFIX, check_tasks, harness_model, harness_tasks
from rft_fn.run.opening import (
    data_options,
    load_data,
    load_processing,
    updates_per_step,
    with_processor,
)
from rft_fn.run.run_folder import Run
from rft_fn.strategy import StrategyConfig, check_data
from rft_fn.types import Engine, Experience, Rollout, Sampling, Strategy, TokenOut

__all__ = [
    "Task", "check_engine_media", "check_rewards", "draw_examples", "evaluate", "judge", "judges_here",
    "load_rewards", "load_task", "normalized_reward", "reward_modules", "rewards_of",
]  # fmt: skip


# ---------- the rewards of a command line: functions, models, judges and servers


_BUDGET = 4096  # tokens that go through a reward model at once, where no option says


def load_rewards(specs: Sequence[str], cfg: options.Data, st: Strategy) -> reward.Weighted:
    """Return the rewards of a command line: what `reward.parse` knows, and models.

    model:FOLDER[:HEAD](budget=N)   one head of a scalar reward model; its ranks share the rows out. It
                                    reads prompts with the system prompt and the chat template's arguments of
                                    `cfg`; see `reward.Reading`. Of a process reward model, `steps` is "last",
                                    "min" or "product", and `separator` what separates steps, a new line if it
                                    is not given.

    judge:FOLDER(...)               a generative one, in an engine on each rank. It takes the arguments of
                                    `reward.generative_by_name`, and engine_type, servers, key_env and batch
                                    of its engine; see `engine.EngineConfig`. Judges on servers are asked at
                                    the same time.

    Both take `name`, by default the name of the head and "judge".
    http://..., https://...         a server: `reward.served_at`.

    FOLDER may be the folder of a run. The weights of a folder are loaded once for all its heads, when the
    rewards are called first; what is wrong with a folder is found here. Vetoes come from `cfg`, if it has
    any. `Weighted.close` ends it all. ValueError as `reward.parse` raises it.
    """
    sources = _Sources(cfg, st)
    score = reward.parse(specs, {"model": sources.model, "judge": sources.judge})
    if isinstance(cfg, options.Reward):
        score = score.with_vetoes(*(read_veto(text) for text in cfg.reward_veto))
    return score


def reward_modules(score: reward.Weighted) -> list[nn.Module]:
    """Return the scalar reward models among the parts of a score, once and without weights.

    For forecasts.
    """
    modules = [part.module for part, _ in score.components.values()]
    return list({id(module): module for module in modules if module is not None}.values())


def judges_here(score: reward.Weighted) -> list[tuple[nn.Module, Sampler]]:
    """Return the judges of this process among the parts of a score, without weights.

    For forecasts. A judge has an engine, and so a copy of its weights; judges with the same folder and equal
    engines share it. Judges on servers are left out.
    """
    parts = [part for part, _ in score.components.values()]
    here = {id(part.engine): part.sampled_here for part in parts if part.sampled_here is not None}
    return [(model.load(folder, meta=True), sampler) for folder, sampler in here.values()]


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
        """Return a head of the scalar reward model in a folder."""
        if steps and separator is None:
            separator = NEW_LINE
        if not steps and separator is not None:
            raise ValueError(f"separator: expected steps beside it, as steps='min', got {separator!r} alone")
        folder, head = _folder_and_head(target)
        if folder not in self.scalars:
            self.scalars[folder] = _Scalar(folder, self.cfg, self.st)
        made = self.scalars[folder].head(head, budget, steps or "last", separator)
        return replace(made, name=name or made.name)

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
    ) -> reward.Reward:
        """Return a generative reward model in a folder, or on servers that have it.

        It sleeps while it is not asked, with enable_engine_sleep or offload_models.
        """
        folder = last_model(target)
        if not servers:
            model.load(folder, meta=True)  # without weights: what is no language model is found here
        config = replace(_engine_config(self.st.config, engine_type, servers, batch), key_env=key_env)
        engine.check_config(config)
        tokenizer = model.load_tokenizer(folder)
        judge_engine = deferred(partial(engine.get_engine, config, folder, tokenizer))
        if not config.servers:  # judges on servers are asked at the same time, by separate requests
            judge_engine = self.engines.setdefault((folder, config), judge_engine)
        processing = load_processing(self.cfg, folder)
        made = reward.generative_by_name(
            judge_engine, tokenizer, processing=processing, served=bool(config.servers), **options
        )
        if not config.servers:
            packs = config.fast_linear and config.type == "hf"
            sampler = Sampler(config.batch, config.max_model_len, config.sleep, packs)
            made = replace(made, sampled_here=(folder, sampler))
        return replace(made, name=name or made.name)


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
        """Return the reward of one head.

        All that read steps alike share a forward pass, and all share its budget.
        """
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
            self.made[how] = reward.scalar(
                self.score, self.heads, head=names[0], reading=reading, steps=steps
            )
        return replace(self.made[how].head(name or names[0]), module=self.module)

    def score(self, rows: Experience, _: int, /) -> TokenOut:
        """Return the scores of rows, by all ranks together, in packs of this model's budget."""
        if self.bound is None:
            self.bound = self.st.bind(model.load_reward(self.folder, meta=self.st.world > 1))
        apply, params = self.bound
        return self.st.score(apply, params, rows, self.budget or self.usual, fields=("score",))


def _engine_config(
    config: StrategyConfig, engine_type: str, servers: Sequence[str], batch: int | None
) -> engine.EngineConfig:
    """Return the config of a judge's engine, which every rank asks independently.

    It has the policy's options of engines if it is of the same type, else the options that any type has. Its
    tokens are not drafted: what drafts for the policy is of another model.
    """
    own = replace(engine.config_of(config), routing=False)
    if own.type != engine_type:
        own = engine.EngineConfig(batch=own.batch, timeout=own.timeout, fast_linear=own.fast_linear)
    sleep = config.enable_engine_sleep or config.offload_models
    own = replace(own, type=engine_type, servers=tuple(servers), sleep=sleep, alone=True)
    return replace(own, batch=batch or own.batch, process=False, tp_size=1, speculative="", kept=False)


def _folder_and_head(target: str) -> tuple[str, str]:
    """Return (folder, head) of FOLDER[:HEAD]; a folder may have a colon in its name."""
    folder, colon, head = target.rpartition(":")
    if not colon or Path(target).is_dir():
        folder = target
        head = ""
    return last_model(folder), head


def _reading(folder: str, cfg: options.Data) -> reward.Reading:
    """Return how the model of a folder reads prompts and responses."""
    return reward.Reading(
        tokenizer=model.load_tokenizer(folder),
        system=cfg.system,
        chat_template_kwargs=data.literals(cfg.chat_template_kwargs),
        processing=load_processing(cfg, folder),
        window=model.read_window(folder),
    )


# ---------- a task that a policy learns from rewards: its prompts, and the judging of responses to them


_LOOKED_AT = 16  # prompts, for whether the data has media


class Task(NamedTuple):
    """Prompts, and how responses to them are rewarded."""

    tokenizer: Any
    dataset: data.Dataset  # the prompts to train on
    unseen: Any  # a Dataset: the prompts to evaluate on; None without
    score: Any  # a reward.Weighted: what judges responses; None without
    processing: data.Processing | None = None  # of media, where the model takes any
    others: Mapping[str, data.Dataset] = MappingProxyType({})  # further rows, by the options that name them

    @property
    def datasets(self) -> dict[str, data.Dataset]:
        """Return all rows, by the options that name them."""
        unseen = {} if self.unseen is None else {"eval_data": self.unseen}
        return {"data": self.dataset, **unseen, **self.others}

    @property
    def saved(self) -> Any:
        """Return what the model's folder holds apart from its weights."""
        return with_processor(self.tokenizer, self.processing)


def rewards_of(cfg: options.Reward, sources: Sequence[str]) -> tuple[str, ...]:
    """Return the rewards of the options.

    By default the reward of the only task among the sources, that of reasoning-gym, or of sort_digits.
    ValueError where the sources are several tasks.
    """
    if cfg.reward:
        return cfg.reward
    names = {source.partition(":")[0].partition("=")[0] for source in sources}
    known = names & set(data.TASKS)
    if len(known) > 1:
        raise ValueError(f"reward: expected one for the tasks {', '.join(sorted(known))}, got none")
    if known:
        return (f"task:{known.pop()}",)
    if not known and reasoning_gym.SOURCE in names:
        return (reasoning_gym.SOURCE,)
    return ("task:sort_digits",)


def load_task(cfg: options.Reinforcement, st: Strategy, **more: Any) -> Task:
    """Load the task that the options name, the same on every rank. ValueError for an invalid one.

    With `options.Ptx` it has the examples that the policy also learns from. `more` are further arguments of
    `data.load`.
    """
    with_examples = isinstance(cfg, options.Ptx) and cfg.ptx > 0
    if cfg.messages and not with_examples:  # these have questions by the template
        without(cfg, "template", prefix="", instead="--messages takes its place")
    if cfg.eval_tasks:
        check_tasks(cfg.eval_tasks)
    tokenizer = model.load_tokenizer(cfg.model)
    processing = load_processing(cfg, cfg.model)
    score = load_rewards(rewards_of(cfg, cfg.data), cfg, st)
    survey = Survey(score)
    dataset, unseen = load_data(
        cfg,
        st,
        tokenizer,
        processing,
        columns=reward.columns(score),
        values=reward.label_values(score),
        max_prompt=cfg.max_prompt,
        window=model.read_window(cfg.model),
        max_new=cfg.max_new,
        survey=survey,
        **more,
    )
    _tell_references(cfg, st, survey)
    if options.of(options.Collect, cfg).curriculum_by == "prompt":
        check_rows(dataset, cfg.prompts)
    if processing is not None:
        check_engine_media(st, cfg.model, dataset)
    task = Task(tokenizer, dataset, unseen, score, processing)
    if not with_examples:
        return task
    return task._replace(others={"ptx_data": _load_examples(cfg, st, task)})


def _tell_references(cfg: options.Reinforcement, st: Strategy, survey: Survey) -> None:
    """Tell what the references of the data read as, in a dry run all of it. ValueError for unusable ones."""
    if line := survey.refused():
        raise ValueError(f"{line}; mend or drop these rows")
    for line in survey.unreadable():
        st.print(f"warning: {line}")
    if getattr(cfg, "dry_run", False):
        for line in survey.shares():
            st.print(line)


def _load_examples(cfg: options.Reinforcement, st: Strategy, task: Task) -> data.Dataset:
    """Load the examples that a policy also learns from."""
    how = options.of(options.Ptx, cfg)
    examples = data.load(
        how.ptx_data,
        task.tokenizer,
        seed=st.config.seed + 2,
        max_prompt=cfg.max_prompt,
        loss_on="all",
        window=model.read_window(cfg.model),
        response=how.ptx_response,
        **(data_options(cfg, task.processing) | dict[str, Any](messages=how.ptx_messages)),
    )
    examples = replace(examples, seed=st.config.seed)  # drawn with the run's seed
    check_data(st, examples)
    return examples


def draw_examples(cfg: options.ReinforcementRun, task: Task, step: int, i: int) -> Experience:
    """Return the examples of update i of a step; w adds up to their coefficient."""
    how = options.of(options.Ptx, cfg)
    update = step * updates_per_step(cfg) + i
    prompts, _ = data.draw(task.others["ptx_data"], how.ptx_batch, update, cfg.seed)
    lessons = [
        lesson
        for prompt in prompts
        for lesson in data.lessons(
            prompt,
            task.tokenizer,
            response=how.ptx_response,
            messages=how.ptx_messages,
            chat_template_kwargs=data.literals(cfg.chat_template_kwargs),
        )
    ]
    exp = packing.conversations(lessons)
    return tree.replace(exp, w=how.ptx * exp.w, extra={"ptx": exp.mask.float()})


def check_engine_media(st: Strategy, model_name: str, dataset: data.Dataset) -> None:
    """Raise ValueError if the first prompts have media and the engine cannot take them.

    Loads no weights.
    """
    prompts: list[Any]
    prompts, _ = data.take(dataset, _LOOKED_AT, st.config.seed)
    if any(prompt.media_names for prompt in prompts):
        engine.check_media(engine.config_of(st.config), model_name)


def check_rewards(cfg: options.Reward, st: Strategy, task: Task) -> None:
    """Try the rewards on two prompts. ValueError for rewards that cannot judge them."""
    prompts: list[Any]
    prompts, _ = data.take(task.dataset, 2, st.config.seed)
    collect.check_reward(st, task.score, prompts, tokenizer=task.tokenizer, timeout=cfg.reward_timeout)


def judge(
    cfg: options.Reinforcement,
    st: Strategy,
    task: Task,
    rollout: Rollout,
    prompts: list[data.Prompt],
    *,
    step: int,
) -> reward.Judged:
    """Return the rewards of responses, the same on every rank.

    A reward function is told that `step` of the config's steps are done.
    """
    now = reward.trainer_state(step, cfg.steps or 0, prompts=cfg.prompts, size=task.dataset.size)
    return collect.gather_and_judge(
        st,
        task.score,
        rollout,
        prompts,
        task.tokenizer,
        timeout=cfg.reward_timeout,
        state=now,
        seed=st.config.seed,
    )


def normalized_reward(
    cfg: options.Shaping, task: Task, judged: reward.Judged, prompts: Sequence[data.Prompt]
) -> Tensor:
    """Return the rewards [N, G] to learn from, with normalised parts where the options ask for it."""
    if not cfg.reward_norm:
        return judged.reward
    return reward.normalized(task.score, judged, prompts, over=cfg.reward_norm)


def evaluate(
    cfg: options.Reinforcement, st: Strategy, run: Run, task: Task, engine: Engine, *, step: int
) -> dict[str, float]:
    """Return the mean rewards of greedy answers to unseen prompts, and of tasks, after `step` steps.

    Nothing from a dead engine: the step is written, and the next rollout ends the run.
    """
    greedy = Sampling(temperature=0, max_new=cfg.max_new)
    with run.phase("evaluate"):
        prompts, keys = data.take(task.unseen, cfg.eval_prompts, st.config.seed)
        try:
            rollout = collect.gather_and_generate(engine, st, prompts, keys, n=1, sampling=greedy)
            of_tasks = _of_tasks(cfg, st, task, engine) if cfg.eval_tasks else {}
        except EngineDead:
            return {}
        judged = judge(cfg, st, task, rollout, prompts, step=step)
    return reward.means(judged, "eval") | of_tasks


def _of_tasks(cfg: options.Reinforcement, st: Strategy, task: Task, engine: Engine) -> dict[str, float]:
    """Return the means of tasks of lm-eval as metrics, {"eval/lm_eval:TASK/FILTER/METRIC": mean}."""
    answerer = harness_model(
        engine,
        st,
        task.tokenizer,
        seed=st.config.seed,
        window=model.read_window(cfg.model),
        batch=st.config.engine_batch * st.world,
    )
    measured = harness_tasks(answerer, cfg.eval_tasks, count=cfg.eval_prompts)
    return {f"eval/{PREFIX}{x.name}": x.value.mean().item() for x in measured}
