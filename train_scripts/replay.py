"""Look at the sequence that stopped a run: token by token, and at the parts of the model that are not finite.

`python train_scripts/replay.py --fault runs/grpo/fault_00000012` with the folder that the error named. Model,
sampling and algorithm are those of the run (config.json beside it); the weights are those of that step.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import rft_fn as rft
from rft_fn.check import Count


@dataclass(frozen=True)
class Config:
    fault: str  # the folder fault_STEP that the run left
    model: str = ""  # what the run started from; if empty, as in the run's config.json
    algorithm: str = ""  # the algorithm whose loss is computed; if empty, as in config.json
    critic: bool = False  # the weights are a critic's
    rows: Count = 24  # tokens shown, around the first that is not finite

    __post_init__ = rft.check.fields


def settings(cfg: Config) -> dict:
    """The run's config, with what the command line says instead."""
    path = Path(cfg.fault).parent / "config.json"
    run = json.loads(path.read_text()) if path.is_file() else {}
    model = cfg.model or run.get("model", "")
    if not model:
        raise ValueError(f"model: expected one, there is no {path} that names it")
    algorithm = cfg.algorithm or run.get("algorithm", "grpo")
    return {"temperature": 1.0, "top_p": 1.0, "max_new": 1} | run | {"model": model, "algorithm": algorithm}


def watched(module: torch.nn.Module) -> dict[str, int]:
    """A dict that fills, in the forward, with the parts whose output is not finite: name -> bad numbers."""
    bad: dict[str, int] = {}

    def look(name):
        def hook(part, inputs, output):
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                count = int((~torch.isfinite(first)).sum())
                bad.update({name: count} if count else {})

        return hook

    for name, part in module.named_modules():
        part.register_forward_hook(look(name or "model"))
    return bad


def describe(name: str, bad: dict[str, int]) -> None:
    """The first few names with numbers that are not finite."""
    first = ", ".join(f"{n} ({c})" for n, c in list(bad.items())[:4])
    print(f"{name}: {f'not finite in {len(bad)}: {first}' if bad else 'all finite'}")


def main(cfg: Config) -> None:
    pack, weights, about = rft.strategy.load_fault(cfg.fault)
    run = settings(cfg)
    tokenizer = rft.model.load_tokenizer(run["model"])
    sampling = rft.Sampling(temperature=run["temperature"], top_p=run["top_p"], max_new=run["max_new"])
    module = (rft.model.load_critic if cfg.critic else rft.model.load)(run["model"])
    own = dict(module.named_parameters())
    if odd := sorted(set(weights) - set(own)):
        raise ValueError(
            f"fault: expected weights of {run['model']}, got {odd[:3]}; is it a critic's (--critic)?"
        )
    for name, x in weights.items():
        own[name].data.copy_(x)
    st = rft.strategy.get_fake_strategy()
    tx = rft.optim.adamw(0.0)
    apply, state = st.init(module, tx, sampling=sampling, entropy=True)
    row = rft.algorithm.TABLE[run["algorithm"]]
    loss_fn, seen, bad = row.value_loss if cfg.critic else row.loss, {}, watched(module)

    def spied(out, b):
        loss = loss_fn(out, b)
        seen["out"], seen["loss"] = out, loss[0] if isinstance(loss, tuple) else loss
        return loss

    grads, _ = st.grad(state, apply, spied, [pack])
    print(f"step {about['step']}, rank {about['rank']}, row {about['row']}: {pack.tokens.numel()} tokens")
    describe(
        "weights", {n: int((~torch.isfinite(x)).sum()) for n, x in weights.items() if not x.isfinite().all()}
    )
    describe("outputs of the model's parts", bad)
    describe(
        "gradients", {n: int((~torch.isfinite(g)).sum()) for n, g in grads.items() if not g.isfinite().all()}
    )
    table(cfg, pack, seen, tokenizer)


def table(cfg, pack, seen, tokenizer) -> None:
    """What the loss met at each token, around the first number that is not finite."""
    value = seen["out"].value if cfg.critic else seen["out"].logp
    columns = {"new": value, "old": pack.old_value if cfg.critic else pack.old_logp}
    columns |= {"adv": pack.ret if cfg.critic else pack.adv, "w": pack.w, "loss": seen["loss"]}
    columns = {name: x.detach() for name, x in columns.items() if x is not None}
    odd = torch.stack([~torch.isfinite(x) for x in columns.values()]).any(0)
    middle = int(odd.nonzero()[0]) if odd.any() else int(pack.mask.nonzero()[0]) if pack.mask.any() else 0
    first = max(middle - cfg.rows // 3, 0)
    print(f"{'pos':>5} {'target':<16}" + "".join(f"{name:>13}" for name in columns))
    for t in range(first, min(first + cfg.rows, pack.tokens.numel())):
        text = repr(tokenizer.decode([int(pack.target[t])]))[:16]
        numbers = "".join(f"{float(x[t]):>13.5g}" for x in columns.values())
        marks = f"{'  <- not finite' if odd[t] else ''}{'' if pack.mask[t] else '  (no weight)'}"
        print(f"{int(pack.pos[t]):>5} {text:<16}{numbers}{marks}")


if __name__ == "__main__":
    rft.run.cli(main, Config)
