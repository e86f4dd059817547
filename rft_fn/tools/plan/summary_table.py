"""What a simulation says, as text: seconds by phase, idle shares, lag, bytes between roles."""

from collections.abc import Mapping

import numpy as np

from rft_fn.memory.estimate_table import size
from rft_fn.tools.plan.simulation import PHASES, Setting, Timeline

__all__ = ["bytes_between", "idle_shares", "lines"]

_REPLY = 28  # bytes of a token and its log-prob as JSON
_ROLLOUT = 13  # bytes of a place of the padded batch, docs/scaling.md


def idle_shares(x: Setting, t: Timeline) -> dict[str, float]:
    """Return the share of the time in which roles wait: for rollouts, rewards, weights or each other.

    Where engines and trainer are the same processes, which take turns, both are one role.
    """
    waits = {name: (t.end - t.begin)[:, PHASES.index(name)].sum() for name in ("generate", "judge")}
    trainer = float(waits["generate"] + waits["judge"]) / t.wall
    engines = float(t.engine_busy.mean()) / t.wall
    if x.servers or x.ahead:
        return {"trainer": trainer, "engines": 1 - engines}
    return {"ranks": trainer - engines}


def bytes_between(x: Setting, t: Timeline, *, parameters: int, itemsize: int) -> dict[str, float]:
    """Return the bytes of a step between roles, all links together."""
    tokens, rows = float(t.tokens.mean()), float(t.rows.mean())
    weights = parameters * itemsize
    read = tokens + x.prompt_tokens * (rows / x.group if x.share_prompts else rows)
    packs = x.updates * -(-read * x.learned * x.passes / x.updates // (x.budget * x.ranks))
    others = x.ranks - 1
    found = {
        "weights, trainer to engines": weights * (x.engines if x.servers or x.ahead else 0),
        "responses, engines to trainer": _REPLY * tokens if x.servers else 0,
        "rollouts, among ranks": _ROLLOUT * (tokens + x.prompt_tokens * rows) * others,
        "weights and gradients, among ranks": parameters * (2 * itemsize + 4) * packs * others,
    }
    return {name: n for name, n in found.items() if n}


def lines(
    x: Setting,
    t: Timeline,
    *,
    steps: int,
    gpus: int,
    bytes_of: Mapping[str, float],
    memory: Mapping[str, tuple[int, str]],
    card: int,
) -> list[str]:
    """Return the table of a plan, of a run of `steps` steps on so many GPUs of `card` bytes; 0: no GPUs."""
    seconds = t.step_seconds
    mean = t.wall / len(seconds)
    low, high = np.quantile(seconds, (0.05, 0.95))
    out = [f"{'a step':<36}{mean:>10.3g} s  {low:.3g} to {high:.3g} in nine of ten steps"]
    for name, part in t.phase_seconds().items():
        if part >= 5e-4 * mean:
            out.append(f"  {name:<34}{part:>10.3g} s  {part / mean:.0%}")
    hours = steps * mean / 3600
    bill = f", {hours * gpus:,.3g} GPU hours" if gpus else ""
    out.append(f"{f'{steps} steps':<36}{hours:>10.3g} h{bill}")
    tokens = float(t.tokens.mean())
    each = f", {tokens / mean / gpus:,.0f} a GPU" if gpus else ""
    out.append(f"{'responses':<36}{tokens:>10,.0f} tokens a step, {tokens / mean:,.0f} a second{each}")
    out.append(f"{'off-policy lag':<36}{t.lag.mean():>10.3g} versions, {t.lag.max():.3g} at most")
    out += [f"{f'idle, {name}':<36}{share:>10.0%}" for name, share in idle_shares(x, t).items()]
    for name, (n, what) in memory.items():
        verdict = f" of {size(card)}: {'fits' if n <= card else 'does not fit'}" if card else ""
        out.append(f"{f'memory, {name}':<36}{size(n):>14}{verdict}, {what}")
    out += [f"{name:<36}{size(n):>14} a step" for name, n in bytes_of.items()]
    return out
