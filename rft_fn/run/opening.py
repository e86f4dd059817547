"""The opening of a training script: processes, data, the run's folder, the model and its optimizer.

Plain functions, which a script calls in the order that it chooses. None of them holds a loop over steps, a
loss or an advantage.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import nn

from rft_fn import data, dist, engine, model, opened, optim, strategy
from rft_fn.data.template_variables import fix_day
from rft_fn.memory import Sampler
from rft_fn.memory.media_example import largest
from rft_fn.model.placeholders import sees_or_hears
from rft_fn.run import earlier_run, mirror, options
from rft_fn.run.claim import Inputs, lock_folder
from rft_fn.run.cli import without
from rft_fn.run.run_folder import Run
from rft_fn.types import Apply, Sampling, Strategy, Transform

__all__ = [
    "check_reference", "data_options", "decide_start", "end_dry", "free_options", "initial_model",
    "load_critic", "load_data", "load_policy", "load_processing", "open_folder", "optimizer",
    "plan_steps", "print_preflight", "start", "updates_per_pass", "updates_per_step",
    "warmup_updates", "with_processor",
]  # fmt: skip


L = TypeVar("L", bound=options.Length)
S = TypeVar("S", bound=options.Script)
_LOOKED_AT = 16  # prompts, for the largest images and sounds


def start(cfg: options.Run, *, unread: Iterable[str] = ()) -> Strategy:
    """Start the strategy of a run, on every process.

    Chat templates that ask for the date get the date of the first start of the run in the folder. `unread`
    names the options of `cfg.strategy` that the script does not read. ValueError for one of them that is
    given, and for options that the machine or the engine cannot honour.
    """
    opened.begin()
    without(cfg.strategy, *unread)
    without(cfg.strategy, "max_norm", instead="use --max-norm")
    without(cfg.strategy, "seed", instead="use --seed")
    if cfg.dry_run:
        if cfg.mirror:
            mirror.check(cfg.mirror)
        return _start_dry(cfg)
    st = strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    fix_day(_first_day(cfg, st))
    _check_engine(cfg, cfg.strategy)
    return st


def _check_engine(cfg: options.Run, config: strategy.StrategyConfig) -> None:
    """Raise ValueError for options that the engine cannot honour."""
    in_flight = options.of(options.Rollouts, cfg).in_flight
    engine.check_config(replace(engine.config_of(config), in_flight=in_flight))


# what takes several processes, a GPU, or a library of theirs
_ELSEWHERE = (
    "fsdp", "zero_stage", "sp_size", "shard_size", "fsdp_cpu_offload", "compile_blocks", "deterministic",
    "engine_tp_size",
)  # fmt: skip


def _start_dry(cfg: options.Run) -> Strategy:
    """Start one process that has all options and uses the ones that this machine can honour.

    The forecast of memory is by all of them.
    """
    config, usual = replace(cfg.strategy, seed=cfg.seed), strategy.StrategyConfig()
    skipped = [name for name in _ELSEWHERE if getattr(config, name) != getattr(usual, name)]
    _check_engine(cfg, replace(config, engine_tp_size=1))
    st = strategy.get_strategy(replace(config, **{name: getattr(usual, name) for name in _ELSEWHERE}))
    if skipped:
        st.print(f"dry run: on one process, without trying {', '.join(skipped)}")
    if config.engine_type in ("vllm", "sglang", "ray") and find_spec(config.engine_type) is None:
        st.print(f"dry run: {config.engine_type} is not installed here; the run needs it")
        config = replace(config, engine_type="hf", engine_actors=1, engine_actor_type="hf")
    return st._replace(config=config)


def end_dry(st: Strategy, score: Any) -> NoReturn:
    """End a dry run: close its rewards and processes, and exit with 0."""
    if score is not None:
        score.close()
    st.print("dry run: options, data, rewards and model are fine, memory is as above; nothing was trained")
    st.close()
    raise SystemExit(0)


def _first_day(cfg: options.Run, st: Strategy) -> date:
    """Return the day on which the run in the folder began, the same on every rank.

    A folder that is there is locked from here on: before the first slow import, and before data is read for
    nothing. One that is not gets what its mirror has.
    """
    day = None
    line = ""
    if st.rank == 0:
        try:
            if Path(cfg.out).is_dir() or cfg.mirror:
                lock_folder(Path(cfg.out))
            if cfg.mirror:
                mirror.fetch(Path(cfg.out), cfg.mirror)
            day = earlier_run.first_day(cfg.out)
        except (ValueError, OSError) as error:
            line = str(error)
    with st.session.watch():
        day, line = dist.all_gather_object((day, line))[0]
    if day is None:
        raise ValueError(line)
    return day


def load_processing(cfg: options.Data, name: str) -> data.Processing | None:
    """Load the processor of a model that sees or hears, with the limits of the options.

    None for a model that only reads text.
    """
    processor = model.load_processor(name)
    if processor is None:
        return None
    cache = cfg.media_cache
    if cfg.media_workers and not cache:  # where the workers leave what they made
        cache = str(model.cache_dir() / "media")
    return data.Processing(
        processor,
        data.MediaLimits(
            cache=cache, max_pixels=cfg.max_pixels, folder=cfg.media_folder, urls=cfg.media_urls
        ),
    )


def with_processor(tokenizer: Any, processing: data.Processing | None) -> Any:
    """Return the processor, which has the tokenizer, or else the tokenizer.

    That is what a model's folder holds in addition to weights.
    """
    if processing is None:
        return tokenizer
    return processing.processor


def data_options(cfg: options.Data, processing: data.Processing | None = None) -> dict[str, Any]:
    """Return the keyword arguments of `data.load` for making a prompt of a row."""
    return {
        "processing": processing,
        "workers": cfg.media_workers,
        "template": cfg.template,
        "messages": cfg.messages,
        "system": cfg.system,
        "chat_template_kwargs": data.literals(cfg.chat_template_kwargs),
    }


def load_data(
    cfg: options.HeldOut,
    st: Strategy,
    tokenizer: Any,
    processing: data.Processing | None = None,
    **more: Any,
) -> tuple[data.Dataset, data.Dataset]:
    """Load (the rows to train on, the unseen rows to evaluate on), the same on every rank.

    `more` are further arguments of `data.load`. ValueError for rows that cannot be used.
    """
    dataset, unseen = data.load_for_training(
        cfg.data,
        tokenizer,
        seed=st.config.seed,
        eval_data=cfg.eval_data,
        eval_share=cfg.eval_share,
        **(data_options(cfg, processing) | more),
    )
    strategy.check_data(st, dataset, unseen)
    return dataset, unseen


def plan_steps(
    cfg: L,
    st: Strategy,
    dataset: data.Dataset,
    unseen: data.Dataset | None = None,
    *,
    batch: int,
    usual: int,
    passes: str = "epochs",
    what: str = "prompts",
) -> L:
    """Decide the number of steps of a run: as given, from passes over the data, or `usual`.

    Returns the config with that number. A step draws `batch` rows; `passes` is the name of the option for
    passes over the data. Prints in one line how much of the data is drawn, with `what` a row makes.
    """
    steps = data.decide_steps(
        dataset, batch, usual=usual, steps=cfg.steps, epochs=getattr(cfg, passes), option=passes
    )
    st.print(data.plan(dataset, steps, batch, unseen, what=what))
    return replace(cfg, steps=steps)


def free_options(cfg: options.Optimizer, *names: str) -> tuple[str, ...]:
    """Return `names` if the learning rate does not depend on the number of steps, else nothing.

    A resumed run may then change them.
    """
    if cfg.lr_end == 1 or cfg.schedule == "constant":
        return names
    return ()


def open_folder(
    cfg: options.Run,
    st: Strategy,
    *,
    free: Sequence[str] = (),
    datasets: Mapping[str, data.Dataset] | None = None,
    tokenizer: Any = None,
) -> Run:
    """Open the folder of a run, once its number of steps is decided.

    `free` are options that may differ from the ones of the steps that the folder holds, in addition to
    `limits.Free` ones. The rows of `datasets`, by the options that name them, must be the rows of these
    steps; changes of the tokenizer and of its chat template are announced. ValueError as `Run` raises it.
    """
    if cfg.steps is None:
        raise ValueError("steps: expected a number, got None; plan_steps decides it")
    return Run(
        cfg.out,
        cfg,
        total=cfg.steps,
        rank=st.rank,
        session=st.session,
        trackers=cfg.trackers,
        project=cfg.project,
        name=cfg.run_name,
        free=free,
        override=cfg.override,
        mirror=cfg.mirror,
        inputs=Inputs(datasets or {}, tokenizer),
        **st.config.pictures(),
    )


def load_policy(cfg: options.Policy, st: Strategy) -> nn.Module:
    """Load the module to train, with its adapters; without weights for a dry run."""
    run = options.of(options.Run, cfg)
    module = model.load(
        cfg.model,
        meta=(st.world > 1 or run.dry_run) and not cfg.quantize,
        gradient_checkpointing=cfg.gradient_checkpointing,
        quantize=cfg.quantize,
        freeze=cfg.freeze,
    )
    if not cfg.lora_rank:
        return module
    return model.apply_lora_configuration(
        module, cfg.lora_rank, cfg.lora_alpha, target_modules=cfg.lora_targets, seed=st.config.seed
    )


def load_critic(cfg: options.ActorCriticRun, st: Strategy) -> nn.Module:
    """Load the critic of the options, by default from the policy's model."""
    return model.load_critic(
        cfg.critic or cfg.model,
        freeze=cfg.freeze,
        gradient_checkpointing=cfg.gradient_checkpointing,
        meta=st.world > 1 or cfg.dry_run,
    )


def warmup_updates(warmup: float, updates: int, each: int = 1) -> int:
    """Return the updates of a warm-up: of steps with `each` updates, or below 1 a share of all `updates`."""
    return math.ceil(warmup * updates) if 0 < warmup < 1 else int(warmup) * each


def decide_start(cfg: S, st: Strategy) -> S:
    """Return the config with the checkpoint that a run begins with, and the updates of its optimizer.

    A run that has begun keeps its own, whatever the other run has by now. ValueError on every rank where
    there is none.
    """
    if not cfg.from_checkpoint:
        if cfg.from_updates is not None:
            raise ValueError(f"from_updates: expected none without from_checkpoint, got {cfg.from_updates}")
        return cfg
    found: Any = None
    if st.rank == 0:
        try:
            found = earlier_run.first_checkpoint(cfg.out, cfg.from_checkpoint)
        except ValueError as error:
            found = str(error)
    with st.session.watch():
        found = dist.all_gather_object(found)[0]
    if isinstance(found, str):
        raise ValueError(found)
    path, updates = found
    updates = updates if cfg.from_updates is None else cfg.from_updates
    return replace(cfg, from_checkpoint=path, from_updates=updates)


def optimizer(
    cfg: options.Optimizer, lr: float, *, updates: int, warmup: int, ema: float = 0.0
) -> tuple[Transform, optim.Schedule]:
    """Return (AdamW after gradient clipping, its learning rate as a function of the updates done).

    `updates` is the number of updates of the run, `warmup` the number until the rate has risen to `lr`. With
    `ema` the optimizer also keeps an average of the weights.
    """
    # from lr / warmup up to lr, then down to lr_end * lr at the last update
    decay = optim.warmup_cosine if cfg.schedule == "cosine" else optim.warmup_linear
    floor = 1.0 if cfg.schedule == "constant" else cfg.lr_end
    planned = decay(lr, warmup, max(updates, warmup), floor=floor)
    before = cfg.from_updates or 0

    def schedule(count: int, /) -> float:
        return planned(count - before)

    adamw = optim.adamw(schedule, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay)
    parts = [optim.clip_by_global_norm(cfg.max_norm), adamw]
    if ema:
        parts.append(optim.ema(ema))
    return optim.chain(*parts), schedule


def print_preflight(
    cfg: options.Policy,
    st: Strategy,
    *models: tuple[nn.Module, Transform | None],
    initial: bool = False,
    engine: bool = True,
    length: int = 0,
    lend: bool = False,
    dataset: Any = None,
    prompts: int = 0,
    rewards: Sequence[nn.Module] = (),
    judges: Sequence[tuple[nn.Module, Sampler]] = (),
    longest_row: bool = False,
) -> None:
    """Print how much memory the models will take, before they are laid out.

    `initial` adds the initial model: a copy of the first model, or nothing with adapters, because then it is
    the policy with its adapters off. With `lend` pushes lend the engine the trained weights. Images and
    sounds count as the largest of the first prompts of `dataset`; a step has `prompts` prompts. `rewards` are
    scalar reward models; `judges` are generative ones, with the engine that they answer by.
    """
    held = list(models)
    if initial and not cfg.lora_rank:
        held.append((models[0][0], None))
    example = None
    if dataset is not None and sees_or_hears(models[0][0]) and st.rank == 0:
        example = largest(data.take(dataset, _LOOKED_AT, seed=0)[0], -(-prompts // st.world))
    st.print(
        strategy.preflight(
            st,
            *held,
            budget=cfg.budget,
            engine=engine,
            length=length,
            lend=lend,
            example=example,
            rewards=rewards,
            judges=judges,
            longest_row=longest_row,
        )
    )


def initial_model(
    cfg: options.Policy,
    st: Strategy,
    module: nn.Module,
    apply: Apply,
    *,
    sampling: Sampling | None = None,
) -> tuple[Apply, Any]:
    """Return (apply, params) of the initial model, to be scored by `st.score`.

    With adapters it is the policy with its adapters off: its params are the policy's, and None is returned
    for them. Otherwise it is a second model in memory.
    """
    if cfg.lora_rank:
        return model.without_adapters(module, apply), None
    return st.bind(model.load(cfg.model, meta=st.world > 1), sampling=sampling)


def check_adapters(cfg: options.Policy, config: strategy.StrategyConfig, *, shared: bool) -> None:
    """Raise ValueError for an engine that is to get adapters alone, where there are none that it can get.

    `shared`: other ranks, or requests under way, would not know the names of the newest ones.
    """
    if config.engine_adapters != "alone":
        return
    if not cfg.lora_rank:
        raise ValueError("engine_adapters alone: expected trained adapters (lora_rank), got lora_rank 0")
    if shared and config.engine_servers:
        raise ValueError(
            "engine_adapters alone: expected servers that one process samples from, without in_flight, got "
            "several that sample ahead, or in_flight; leave it out"
        )
    if cfg.quantize and (cfg.quantize != "int8" or config.engine_type not in ("vllm", "openai")):
        raise ValueError(
            "engine_adapters alone: expected a base in full precision, or in int8 with engine_type vllm or "
            f"openai, got quantize {cfg.quantize} with {config.engine_type}"
        )


def check_reference(every: int, *, anchor: bool, zero_stage: int) -> None:
    """Raise ValueError for a reference that is to follow the policy `every` so many steps, and cannot."""
    if every and not anchor:
        raise ValueError(f"ref_every: expected 0 without a KL to a reference, got {every}; give --kl too")
    if every and zero_stage == 3:
        raise ValueError(
            f"ref_every: expected 0 with zero_stage 3, whose checkpoints hold no second model, got {every}"
        )


def updates_per_pass(cfg: options.ReinforcementRun) -> int:
    """Return the minibatches of a rollout, by the strategy's train_batch_size where it has one."""
    if cfg.strategy.train_batch_size:
        return cfg.strategy.updates(cfg.prompts * cfg.group)
    return cfg.minibatches


def updates_per_step(cfg: options.ReinforcementRun) -> int:
    """Return the updates that a rollout gives, in all of its passes."""
    return cfg.epochs * updates_per_pass(cfg)
