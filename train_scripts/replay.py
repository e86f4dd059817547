"""Look at the sequence that stopped a run: its tokens, and the parts of the model that are not finite.

    python train_scripts/replay.py --fault runs/grpo/fault_00000012      # the folder that the error named

Model, sampling and objective are those of the run (config.json beside it): the algorithm with its limits, KL
and entropy. The weights of the model, and adv and w of each token, are those of that step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.limits import AtLeast0, Count, Filled
from rft_fn.run.options import Limits, Options
from rft_fn.types import LossFn


@dataclass(frozen=True)
class Config(Options, aliases={"clip_low": "loss.low", "clip_high": "loss.high", "dual": "loss.dual"}):
    """The options of a replay."""

    fault: Filled  # the folder fault_STEP that the run left
    model: str = ""  # what the run started from; if empty, as in the run's config.json
    algorithm: str = ""  # another algorithm, with its own limits; if empty, as in config.json
    loss: Limits = field(default_factory=Limits)
    kl: AtLeast0 | None = None  # coefficient of the KL in the loss; None: as in config.json
    critic: bool = False  # the weights are a critic's
    rows: Count = 24  # tokens shown, around the first that is not finite


def settings(cfg: Config) -> dict[str, Any]:
    """The options of the run, with those of the command line in their place."""
    path = Path(cfg.fault).parent / "config.json"
    run = rft.run.settings(path.parent) if path.is_file() else {}
    model = cfg.model or run.get("model", "")
    if not model:
        raise ValueError(f"model: expected one, got none: there is no {path} that names it")
    algorithm = cfg.algorithm or run.get("algorithm", "" if run else "grpo")
    return {"temperature": 1.0, "top_p": 1.0, "max_new": 1} | run | {"model": model, "algorithm": algorithm}


def objective(cfg: Config, run: Mapping[str, Any]) -> LossFn:
    """The loss that the run had, with what the command line gives in its place."""
    name = run["algorithm"]
    if name not in rft.algorithm.TABLE:
        raise ValueError(f"algorithm: expected one of {', '.join(rft.algorithm.TABLE)}, got {name!r}")

    # another algorithm has its own limits, and none of the run's
    own = {} if cfg.algorithm else run
    limits = {
        "low": own.get("clip_low"),
        "high": own.get("clip_high"),
        "dual": own.get("dual"),
    }  # of distill.py
    if isinstance(own.get("loss"), Mapping):
        limits = own["loss"]
    limits = {**limits, **cfg.loss.given}
    with_critic = isinstance(rft.algorithm.TABLE[name], rft.algorithm.ActorCritic)
    if with_critic or cfg.critic:
        row = rft.algorithm.configured_actor_critic(
            name, gamma=own.get("gamma"), lambda_=own.get("gae_lambda"), alpha=own.get("gae_alpha"),
            value_clip=own.get("value_clip"), weight=own.get("weight"), limits=limits,
        )  # fmt: skip
    else:
        row = rft.algorithm.configured(
            name,
            group=own.get("group"),
            advantage=own.get("advantage"),
            weight=own.get("weight"),
            limits=limits,
        )
    if cfg.critic:
        return row.value_loss
    of_run = 0.0 if with_critic else run.get("kl", 0.0)  # with a critic the KL is in the reward
    kl = of_run if cfg.kl is None else cfg.kl
    return partial(policy_loss, row.loss, kl, run.get("router_aux", 0.0), with_critic)


def policy_loss(
    of_row: LossFn, kl: float, router_aux: float, corrected: bool, out: rft.TokenOut, b: rft.Packed
) -> Tensor:
    """The loss [T] of an algorithm, and what a run adds to it."""
    loss, extra = of_row(out, b), b.extra or {}
    loss = loss[0] if isinstance(loss, tuple) else loss
    if corrected and "correction" in extra:  # without a critic it is in w
        loss = loss * extra["correction"]
    if kl and b.ref_logp is not None:
        loss = loss + kl * rft.loss.kl(out.logp, b.ref_logp)
    if "entropy" in extra and out.entropy is not None:
        loss = loss + extra["entropy"] * rft.loss.entropy_bonus(out.entropy)
    return loss + router_aux * out.aux if router_aux and out.aux is not None else loss


def likelihood(out: rft.TokenOut, b: rft.Packed) -> Tensor:
    """The negative log-likelihood [T], for runs that have no algorithm."""
    return rft.loss.nll(out.logp)


def first_tensor(output: Any) -> Tensor | None:
    """The numbers that a part of a model puts out; None where the first of its outputs is no tensor."""
    if isinstance(output, tuple):
        output = output[0]
    if isinstance(output, Tensor) and output.is_floating_point():
        return output
    return None


def bad_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """name -> how many numbers are not finite, where there are any."""
    counts = {name: int((~torch.isfinite(x)).sum()) for name, x in tensors.items()}
    return {name: count for name, count in counts.items() if count}


def watched(module: torch.nn.Module) -> dict[str, int]:
    """A dict that the forward fills with the parts whose output is not finite: name -> bad numbers."""
    bad: dict[str, int] = {}

    def look(name: str):
        def hook(part, inputs, output):
            found = first_tensor(output)
            if found is not None:
                bad.update(bad_numbers({name: found}))

        return hook

    for name, part in module.named_modules():
        part.register_forward_hook(look(name or "model"))
    return bad


def describe(name: str, bad: Mapping[str, int]) -> None:
    """Print the first few names with numbers that are not finite."""
    if not bad:
        print(f"{name}: all finite")
        return
    first = ", ".join(f"{n} ({c})" for n, c in list(bad.items())[:4])
    print(f"{name}: not finite in {len(bad)}: {first}")


def load_module(cfg: Config, name: str, weights: Mapping[str, Tensor]) -> torch.nn.Module:
    """The model of the run with the weights of the fault."""
    load = rft.model.load_critic if cfg.critic else rft.model.load
    module = load(name)
    own = dict(module.named_parameters())
    if odd := sorted(set(weights) - set(own)):
        raise ValueError(
            f"fault: expected weights of {name}, got {odd[:3]}; is it a critic's (--critic), or a policy's?"
        )
    for part, x in weights.items():
        own[part].data.copy_(x)
    return module


def main(cfg: Config) -> None:
    # the model as it was, with its loss
    pack, weights, about = rft.strategy.load_fault(cfg.fault)
    run = settings(cfg)
    loss_fn = objective(cfg, run) if run["algorithm"] else likelihood
    if not run["algorithm"]:
        script = run.get("made_by", {}).get("script") or "the run"
        print(f"loss: the negative log-likelihood, in place of that of {script}; --algorithm names another")
    tokenizer = rft.model.load_tokenizer(run["model"])
    sampling = rft.Sampling(temperature=run["temperature"], top_p=run["top_p"], max_new=run["max_new"])
    module = load_module(cfg, run["model"], weights)
    st = rft.strategy.get_fake_strategy()
    apply, state = st.init(module, rft.optim.adamw(0.0), sampling=sampling, entropy=True)

    # one forward and one backward, with an eye on each part
    bad = watched(module)
    seen = {}

    def spied(out, b):
        found = loss_fn(out, b)
        seen["out"] = out
        seen["loss"] = found
        if isinstance(found, tuple):
            seen["loss"] = found[0]
        return found

    grads, _ = st.grad(state, apply, spied, [pack])

    # what is not finite, and where
    print(f"step {about['step']}, rank {about['rank']}, row {about['row']}: {pack.tokens.numel()} tokens")
    describe("weights", bad_numbers(weights))
    describe("outputs of the model's parts", bad)
    describe("gradients", bad_numbers(grads))
    table(cfg, pack, columns(cfg, pack, seen), tokenizer)


def columns(cfg: Config, pack: rft.Packed, seen: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers [T] that the loss met, by the head of their column."""
    if cfg.critic:
        found = {"new": seen["out"].value, "old": pack.old_value, "adv": pack.ret}
    else:
        found = {"new": seen["out"].logp, "old": pack.old_logp, "adv": pack.adv}
    found |= {"w": pack.w, "loss": seen["loss"]}
    return {name: x.detach() for name, x in found.items() if x is not None}


def first_place(odd: Tensor, mask: Tensor) -> int:
    """The first token that is not finite; if there is none, the first that has a weight."""
    for where in (odd, mask):
        if where.any():
            return int(where.nonzero()[0])
    return 0


def table(cfg: Config, pack: rft.Packed, found: Mapping[str, Tensor], tokenizer: Any) -> None:
    """Print the numbers of each token, around the first one that is not finite."""
    odd = torch.stack([~torch.isfinite(x) for x in found.values()]).any(0)
    first = max(first_place(odd, pack.mask) - cfg.rows // 3, 0)
    print(f"{'pos':>5} {'target':<16}" + "".join(f"{name:>13}" for name in found))
    for t in range(first, min(first + cfg.rows, pack.tokens.numel())):
        text = repr(tokenizer.decode([int(pack.target[t])]))[:16]
        numbers = "".join(f"{float(x[t]):>13.5g}" for x in found.values())
        marks = ""
        if odd[t]:
            marks += "  <- not finite"
        if not pack.mask[t]:
            marks += "  (no weight)"
        print(f"{int(pack.pos[t]):>5} {text:<16}{numbers}{marks}")


if __name__ == "__main__":
    rft.run.cli(main, Config)
