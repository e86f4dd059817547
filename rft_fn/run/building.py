"""Builds the record that the loop of a training script works with, in the order in which it happens."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rft_fn import check, model
from rft_fn.optim import Schedule
from rft_fn.run import opening, options
from rft_fn.run.reward_task import Task, check_rewards, judges_here, load_task, reward_modules
from rft_fn.run.rollout_engine import start_sampler
from rft_fn.run.setup import Model, Setup
from rft_fn.types import Sampling, Strategy, Transform

__all__ = ["setup"]


def one_update_a_step(cfg: Any) -> tuple[Transform, Schedule]:
    """Return the optimizer of the options, and its learning rate, for one update a step."""
    warmup = opening.warmup_updates(cfg.warmup, cfg.steps)
    return opening.optimizer(cfg, cfg.lr, updates=cfg.steps, warmup=warmup)


# The opening of every script is one function, read in the order in which it happens.
def setup(
    cfg: Any,
    *,
    usual: int,
    load: Callable[[Any, Strategy], Task] = load_task,
    batch: int | None = None,
    what: str = "prompts",
    load_module: Callable[[Any, Strategy], nn.Module] = opening.load_policy,
    optimizer: Callable[[Any], tuple[Transform, Schedule]] = one_update_a_step,
    critic: Callable[[Any, Strategy], tuple[nn.Module, Transform, Schedule]] | None = None,
    scorers: Callable[[Any, Strategy], Sequence[nn.Module]] | None = None,
    anchor: bool = False,
    greedy: bool = False,
    sampled: bool = True,
    length: int = 0,
) -> Setup:
    """Return all that the loop of a script works with, by its options.

    Mistakes in options, data, rewards and folder are raised before a model is loaded, as ValueError.

    usual       the number of steps, where the options give none
    load        loads the rows, and what judges responses to them
    batch       rows of a step, by default the option `prompts`; `what` a row makes, for the line about them
    optimizer   (cfg) -> (transform, schedule), by default for one update a step
    critic      loads a second model that is trained, with its optimizer
    scorers     loads further models that only score, without weights: for the forecast of memory
    anchor      whether the initial model is needed, for a KL to it
    greedy      whether the baseline is the reward of a greedy answer to each prompt
    sampled     whether there is an engine
    length      tokens of the longest sequence, for the forecast of memory; with a critic by the options
    """
    passes = "data_epochs" if hasattr(cfg, "data_epochs") else "epochs"
    check.at_most_one(steps=cfg.steps, **{passes: getattr(cfg, passes)})
    for name, off in (("reward_norm", "none"), ("normalize_reward", "off")):
        if greedy and getattr(cfg, name):
            raise ValueError(f"{name}: expected {off} with {cfg.algorithm}: its baseline is a raw reward")
    st = opening.start(cfg, unread=() if sampled else options.ENGINE)
    every = options.of(options.Reference, cfg).ref_every
    opening.check_reference(every, anchor=anchor, zero_stage=cfg.strategy.zero_stage)
    model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)

    # data and rewards, and the folder of the run
    task = load(cfg, st)
    cfg = opening.plan_steps(
        cfg,
        st,
        task.dataset,
        task.unseen,
        batch=batch or cfg.prompts,
        usual=usual,
        passes=passes,
        what=what,
    )
    if task.score is not None:
        check_rewards(cfg, st, task)
    run: Any = None  # a dry run has none
    if not cfg.dry_run:
        run = opening.open_folder(
            cfg,
            st,
            free=opening.free_options(cfg, "steps", passes),
            datasets=task.datasets,
            tokenizer=task.tokenizer,
        )

    # the models and their optimizers
    module = load_module(cfg, st)
    tx, schedule = optimizer(cfg)
    second = None if critic is None else critic(cfg, st)
    if second is not None:
        length = length or cfg.max_prompt + cfg.max_new
    opening.print_preflight(
        cfg,
        st,
        (module, tx),
        *([second[:2]] if second is not None else []),
        *((each, None) for each in (scorers(cfg, st) if scorers is not None else ())),
        initial=anchor,
        engine=sampled,
        length=length,
        dataset=task.dataset,
        prompts=batch or cfg.prompts,
        rewards=reward_modules(task.score) if task.score is not None else (),
        judges=judges_here(task.score) if task.score is not None else (),
    )
    if cfg.dry_run:
        opening.end_dry(st, task.score)
    sampling = None
    aux = cfg.router_aux > 0
    if sampled:
        sampling = Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
        apply, state = st.init(module, tx, sampling=sampling, entropy=True, aux=aux)
    else:
        apply, state = st.init(module, tx, aux=aux)
    valuer = None
    if second is not None:
        valuer = Model(second[0], *st.init(second[0], second[1]), second[2])
    initial = opening.initial_model(cfg, st, module, apply, sampling=sampling) if anchor else None

    samples = send = None
    if sampled:
        samples, send = start_sampler(cfg, st, task)
    policy = Model(module, apply, state, schedule)
    return Setup(cfg, st, run, task, policy, valuer, initial, sampling, samples, send, greedy)
