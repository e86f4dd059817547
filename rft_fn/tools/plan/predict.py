"""`rft plan`: the steps of a run before it is rented, by rates of this machine or of a table of cards."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from rft_fn.model import pretrained, resolve
from rft_fn.tools.page.recorded import read_all
from rft_fn.tools.plan import cards, gantt, lengths, measured, planned_command, summary_table
from rft_fn.tools.plan.lengths import Lengths
from rft_fn.tools.plan.plan_options import Plan
from rft_fn.tools.plan.planned_command import Planned
from rft_fn.tools.plan.simulation import Rates, Setting, Timeline, simulate, with_failures

__all__ = ["plan"]


def plan(options: Plan) -> str:
    """Return the plan of a file of roles or a command, and draw its picture.

    Rates are those of the table of cards for each kind of GPUs, or fits of runs on this machine; with
    neither, two short runs are made for it.
    """
    planned = planned_command.read(options.what, on_gpu=bool(options.on))
    law = lengths.read(options.lengths) if options.lengths else None
    if options.on:
        machines = [cards.machine(text) for text in options.on]
        law = law or lengths.lognormal(planned.config.max_new / 4, 0.8)
        return "\n\n".join(_on_gpus(options, planned, machine, law) for machine in machines)
    if options.measured:
        return _here(options, planned, options.measured, law)
    with tempfile.TemporaryDirectory() as folder:
        made = measured.measure(planned, Path(folder))
        return _here(options, planned, [str(path) for path in made], law)


def _here(options: Plan, planned: Planned, folders: Sequence[str], law: Lengths | None) -> str:
    """Return the plan by the rates of runs on this machine."""
    runs = read_all(folders)
    found = measured.rates(folders)
    law = law or lengths.of_runs(runs)
    x = planned_command.setting(
        planned, steps=options.simulate, prompt_tokens=found.prompt_tokens, learned=found.learned
    )
    rates = _with_rewards(found.rates, options)
    t = simulate(x, rates, law, seed=options.seed)
    if options.picture:
        same = [run for run in runs if (run.config["prompts"], run.config["group"]) == (x.prompts, x.group)]
        gantt.draw(t, Path(options.picture), measured=measured.phase_table(same[0]) if same else None)
    lm = _skeleton(planned, torch.float32)
    parameters = sum(p.numel() for p in lm.parameters())
    peak = max(float(row.get("peak_gib") or 0.0) for run in runs for row in run.timing)
    memory = {"trainer": (int(peak * 2**30), "the peak of the measured runs")}
    text = summary_table.lines(
        x,
        t,
        steps=_steps(planned),
        gpus=0,
        bytes_of=summary_table.bytes_between(x, t, parameters=parameters, itemsize=4),
        memory=memory,
        card=0,
    )
    return "\n".join([*_head(x, planned, rates, law.source), *text])


def _on_gpus(options: Plan, planned: Planned, on: cards.Machine, law: Lengths) -> str:
    """Return the plan by the table of cards."""
    cfg = planned.config
    x = planned_command.setting(planned, steps=options.simulate, prompt_tokens=options.prompt)
    used = x.ranks + planned.servers * planned.gpus_of_engine
    gpus = on.gpus or used
    if used > gpus:
        raise ValueError(
            f"on: expected {used} GPUs or more, for {x.ranks} ranks and {planned.servers} servers, got {gpus}"
        )
    lm = _skeleton(planned, torch.bfloat16)
    shape = cards.shape(lm)
    length = x.prompt_tokens + lengths.mean(law, most=x.max_new)
    longest = int(options.prompt) + x.max_new
    memory = {"trainer": cards.trainer_memory(planned, lm, on, length=longest)}
    if x.servers:
        most = cards.rows_that_fit(shape, on, length=length, tp=planned.gpus_of_engine)
        x = replace(x, rows=max(1, min(x.rows, most)))
        cache = int(2 * shape.cache * length * x.rows)
        each = (2 * shape.parameters + cache) // planned.gpus_of_engine
        memory["engines"] = each, f"weights and a cache of {x.rows} rows of mean length"
    rates = cards.rates(
        x,
        shape,
        on,
        length=length,
        checkpointing=bool(cfg.gradient_checkpointing),
        tp=planned.gpus_of_engine,
    )
    rates = _with_rewards(rates, options)
    t = simulate(x, rates, law, seed=options.seed)
    if options.picture:
        gantt.draw(t, Path(options.picture))
    text = summary_table.lines(
        x,
        t,
        steps=_steps(planned),
        gpus=gpus,
        bytes_of=summary_table.bytes_between(x, t, parameters=shape.parameters, itemsize=2),
        memory=memory,
        card=int(on.card["memory"]),
    )
    if gpus > used:
        text.append(f"{'GPUs without a role':<36}{gpus - used:>10}")
    text += _bill(options, planned, x, t, gpus)
    if x.ahead and not x.servers:
        text.append(
            "not counted: an engine ahead in the ranks shares its GPU with the trainer; give it servers"
        )
    if options.judge < 0:
        text.append("not counted: rewards, of which --judge gives the seconds; evaluations")
    if planned.script.stem != "grpo":
        text.append("not counted: models beside the policy and a reference, as a critic or a teacher")
    if planned.others:
        text.append(f"not counted: the memory of {', '.join(planned.others)}")
    return "\n".join([*_head(x, planned, rates, law.source), *text])


def _skeleton(planned: Planned, dtype: torch.dtype) -> nn.Module:
    """Return the model of a plan without memory, by its config.json alone."""
    kind = pretrained.kind_of(resolve(planned.config.model))
    return pretrained.skeleton(kind.config, kind.factory, dtype=dtype)


def _bill(options: Plan, planned: Planned, x: Setting, t: Timeline, gpus: int) -> list[str]:
    """Return the lines about failures and the price."""
    steps = _steps(planned)
    seconds = steps * t.wall / x.steps
    found = []
    if options.failures:
        seconds = with_failures(
            t.wall / x.steps,
            steps=steps,
            between=3600 * options.failures / gpus,
            restart=options.restart,
            save_every=x.save_every,
        )
        found.append(
            f"{'with failures':<36}{seconds / 3600:>10.3g} h, one in {options.failures / gpus:.3g} h"
        )
    if options.price:
        found.append(f"{'price':<36}{options.price * gpus * seconds / 3600:>10,.0f}")
    return found


def _with_rewards(rates: Rates, options: Plan) -> Rates:
    return rates if options.judge < 0 else replace(rates, judge=options.judge, judge_row=0.0)


def _steps(planned: Planned) -> int:
    return planned.config.steps or planned_command.USUAL


def _head(x: Setting, planned: Planned, rates: Rates, law: str) -> list[str]:
    """Return what was simulated, by which rates."""
    ranks, engines = _many(x.ranks, "rank"), _many(x.engines, "server" if x.servers else "engine")
    way = f", {x.ahead} ahead" if x.ahead else f", partial {x.partial}" if x.partial else ""
    return [
        f"plan of {planned.script.stem}: {x.prompts} x {x.group} responses{way}, {ranks}, {engines}",
        f"{_many(x.steps, 'step')} simulated; rates: {rates.source}; lengths: {law}, at most {x.max_new}",
    ]


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
