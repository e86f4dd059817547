"""Builds the record that the loop of a training script works with, in the order in which it happens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from rft_fn import check, model
from rft_fn.model.router import experts_product
from rft_fn.model.routing import require_routers
from rft_fn.optim import Schedule
from rft_fn.run import opening, options, sizes
from rft_fn.run.reward_task import Task, check_rewards, judges_here, load_task, reward_modules
from rft_fn.run.rollout_engine import start_sampler
from rft_fn.run.setup import Model, Reference, Setup
from rft_fn.types import Sampling, Strategy, Transform

__all__ = ["setup"]


def usual_optimizer(cfg: options.Script) -> tuple[Transform, Schedule]:
    """Return the optimizer of the options, and its learning rate: for all updates of a run."""
    each = opening.updates_per_step(cfg) if isinstance(cfg, options.ReinforcementRun) else 1
    assert cfg.steps is not None
    updates, how = cfg.steps * each, options.of(options.Updates, cfg)
    warmup = opening.warmup_updates(cfg.warmup, updates, each)
    return opening.optimizer(cfg, cfg.lr, updates=updates, warmup=warmup, ema=how.ema)


def _check_greedy(cfg: options.Shaping, algorithm: str) -> None:
    """Raise ValueError for rewards that are normalised, where the baseline is a raw one."""
    for name, off in (("reward_norm", "none"), ("normalize_reward", "off")):
        if getattr(cfg, name):
            raise ValueError(f"{name}: expected {off} with {algorithm}: its baseline is a raw reward")


# The opening of every script is one function, read in the order in which it happens.
def setup(
    cfg: options.Script,
    *,
    usual: int,
    load: Callable[[Any, Strategy], Task] = load_task,
    batch: int | None = None,
    what: str = "prompts",
    load_module: Callable[[Any, Strategy], nn.Module] = opening.load_policy,
    optimizer: Callable[[Any], tuple[Transform, Schedule]] = usual_optimizer,
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
    optimizer   (cfg) -> (transform, schedule), by default AdamW for all updates of the run
    critic      loads a second model that is trained, with its optimizer
    scorers     loads further models that only score, without weights: for the forecast of memory
    anchor      whether the initial model is needed, for a KL to it
    greedy      whether the baseline is the reward of a greedy answer to each prompt
    sampled     whether there is an engine
    length      tokens of the longest sequence, for the forecast of memory; with a critic by the options
    """
    passes = "data_epochs" if hasattr(cfg, "data_epochs") else "epochs"
    check.at_most_one(steps=cfg.steps, **{passes: getattr(cfg, passes)})
    how = options.of(options.Rollouts, cfg)
    if greedy:
        _check_greedy(options.of(options.Shaping, cfg), getattr(cfg, "algorithm", ""))
    st = opening.start(sizes.provisional(cfg), unread=() if sampled else options.ENGINE)
    cfg = opening.decide_start(cfg, st)
    every = options.of(options.Reference, cfg).ref_every
    opening.check_reference(every, anchor=anchor, zero_stage=cfg.strategy.zero_stage)
    opening.check_adapters(cfg, cfg.strategy, shared=how.in_flight or (how.ahead > 0 and st.world > 1))
    model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)

    # how much goes through a model at a time, before the rows, which have to fit
    rows = batch or how.prompts
    longest = length or (options.of(options.Prompts, cfg).max_prompt + how.max_new if sampled else 0)

    def models() -> list[tuple[nn.Module, Transform | None]]:
        """Return the models of the run without weights."""
        dry = replace(cfg, dry_run=True, quantize="", steps=cfg.steps or 1)
        first = load_module(dry, st)
        found: list[tuple[nn.Module, Transform | None]] = [(first, optimizer(dry)[0])]
        found += [critic(dry, st)[:2]] if critic is not None else []
        found += [(x, None) for x in (scorers(dry, st) if scorers is not None else ())]
        return found + ([(first, None)] if anchor and not cfg.lora_rank else [])

    responses = rows * (how.group if sampled and not batch else 1)
    cfg, st = sizes.decided(cfg, st, models, sampled=sampled, length=longest, rows=responses)

    # data and rewards, and the folder of the run
    task = load(cfg, st)
    cfg = opening.plan_steps(
        cfg,
        st,
        task.dataset,
        task.unseen,
        batch=rows,
        usual=usual,
        passes=passes,
        what=what,
    )
    if task.score is not None:
        check_rewards(options.of(options.Reward, cfg), st, task)
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
    if cfg.strategy.replay_routing:
        require_routers(module)
    tx, schedule = optimizer(cfg)
    second = None if critic is None else critic(cfg, st)
    if second is not None:
        length = length or options.of(options.Prompts, cfg).max_prompt + how.max_new
    opening.print_preflight(
        cfg,
        st,
        (module, tx),
        *([second[:2]] if second is not None else []),
        *((each, None) for each in (scorers(cfg, st) if scorers is not None else ())),
        initial=anchor,
        engine=sampled,
        length=length,
        lend=sampled and not how.ahead,
        dataset=task.dataset,
        prompts=rows,
        rewards=reward_modules(task.score) if task.score is not None else (),
        judges=judges_here(task.score) if task.score is not None else (),
        longest_row=cfg.dry_run,
    )
    if cfg.dry_run:
        opening.end_dry(st, task.score)
    sampling = None
    aux = cfg.router_aux > 0
    if sampled:
        sampling = Sampling(temperature=how.temperature, top_p=how.top_p, max_new=how.max_new)
        apply, state = st.init(module, tx, sampling=sampling, entropy=True, aux=aux)
    else:
        apply, state = st.init(module, tx, aux=aux)
    if said := experts_product(module):
        st.print(f"experts: {said}")
    valuer = None
    if second is not None:
        valuer = Model(second[0], *st.init(second[0], second[1]), second[2])
    reference = None
    if anchor:
        reference = Reference(*opening.initial_model(cfg, st, module, apply, sampling=sampling))

    samples = send = None
    if sampled:
        samples, send = start_sampler(how, st, task, cfg.model)
    policy = Model(module, apply, state, schedule)
    return Setup(cfg, st, run, task, policy, valuer, reference, sampling, samples, send, greedy)
