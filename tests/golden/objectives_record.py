"""Gradients that the own code of other libraries makes of the configs of objectives.py, into objectives.json.

    python -m golden.objectives_record trl        # trl 1.16.0
    python -m golden.objectives_record verl       # verl 0.9.1
    python -m golden.objectives_record openrlhf   # openrlhf 0.11.2
    python -m golden.objectives_record lightrft   # a checkout at 49e62cb

From the rewards of `batch.scaled` to the gradient of the log-probs. Numbers only, 10 digits.
"""

import datetime
import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from golden import batch, verl_losses
from golden.objectives import CONFIGS, FILE, Config, data
from golden.scales import digest
from golden.verl_losses import result, stub, tensor

A, S = "actor_rollout_ref.actor.", "algo.advantage."


def mask():
    return tensor("mask").double()


def rewards():
    return torch.tensor(verl_losses.DATA["reward"][0]).double()


# ---------- TRL


sys.modules["vllm"] = None  # a folder of these tests, which TRL takes for the package


def trl_config(config: Config):
    import trl
    from golden import trl_drive, trl_losses

    if config.kind == "dpo":
        options = {k: v for k, v in config.options.items() if k != "loss_type"}
        return trl_losses.preference(config.options["loss_type"], **options)
    options = {k: v for k, v in config.options.items() if k != "num_iterations"}
    return trl_drive.policy(trl.GRPOTrainer, trl.GRPOConfig, end_to_end=True, **options)


# ---------- verl


def verl_config(config: Config):
    core = verl_losses.core()
    o = config.options
    logp = tensor("logp").requires_grad_()
    estimator, mean = o["algorithm.adv_estimator"], o.get(A + "loss_agg_mode", "token-mean")

    # the advantage
    scaled = o.get("algorithm.norm_adv_by_std_in_grpo", True)
    token_reward = verl_losses.token_reward()
    names = {"token_level_rewards": token_reward, "response_mask": mask()}
    if estimator == "gae":
        names |= {"values": tensor("old_value"), "gamma": 1.0, "lam": 1.0}
    elif estimator == "remax":
        names |= {"reward_baselines": torch.tensor(verl_losses.DATA["reward"][1][:4]).repeat_interleave(4)}
    elif estimator == "reinforce_plus_plus":
        names |= {"config": SimpleNamespace(gamma=1.0)}
    else:
        names |= {"index": np.arange(batch.B) // batch.G}
    if estimator == "grpo":
        names |= {"norm_adv_by_std_in_grpo": scaled}
    if estimator == "grpo_passk":
        names |= {"config": {"norm_adv_by_std_in_grpo": scaled}}
    adv, _ = core.get_adv_estimator_fn(estimator)(**names)

    # the loss
    limits = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
    given = {name: o[A + name] for name in limits if A + name in o}
    actor = verl_losses.actor(**given)
    if A + "loss_scale_factor" in o:
        actor.global_batch_info = {"loss_scale_factor": o[A + "loss_scale_factor"]}
    torch.manual_seed(0)
    f = core.POLICY_LOSS_REGISTRY[o.get(A + "policy_loss.loss_mode", "vanilla")]
    total, _ = f(tensor("old_logp"), logp, adv, mask(), mean, actor)
    if o.get(A + "use_kl_loss"):
        kl = core.kl_penalty(logp, tensor("ref_logp"), o.get(A + "kl_loss_type", "low_var_kl"))
        total = total + o[A + "kl_loss_coef"] * core.agg_loss(kl, mask(), mean)
    return result(total, logp, "logp")


# ---------- OpenRLHF


def openrlhf_config(config: Config):
    from golden.other_losses import opened

    opened("openrlhf", "models", "trainer", "trainer.ppo_utils", "trainer.ray", "utils")
    for name, names in (
        ("ray", {}),
        ("openrlhf.trainer.ray.launcher", {"RayActorGroup": object}),
        ("openrlhf.utils.logging_utils", {"init_logger": lambda _: SimpleNamespace(warning=print)}),
        ("openrlhf.trainer.ppo_utils.experience", {"Experience": object}),
        ("openrlhf.utils.seqlen_balancing", {
            "get_minimum_num_micro_batch_size": None, "get_seqlen_balanced_partitions": None,
        }),
    ):  # fmt: skip
        if name not in sys.modules:
            stub(name, **names)
    losses = importlib.import_module("openrlhf.models.loss")
    utils = importlib.import_module("openrlhf.models.utils")
    maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    maker.apply_length_penalties = lambda *_: None
    o = config.options
    estimator = o[S + "estimator"]

    # the advantage
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=4),
        reward=SimpleNamespace(clip_range=(-10, 10)),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator=estimator, gamma=1.0, lambd=o.get(S + "lambd", 1.0), no_std_norm=False
            )
        ),
    )
    made = object.__new__(maker.RemoteExperienceMaker)
    made.strategy, made.args = SimpleNamespace(args=args), args
    made.advantage_estimator, made.kl_ctl = estimator, SimpleNamespace(value=0.0)
    experience = SimpleNamespace(
        rewards=rewards(), index=list(range(batch.B)), kl=torch.zeros(batch.B, batch.S), info={},
        action_mask=tensor("mask"), values=tensor("old_value"),
    )  # fmt: skip
    [experience] = made.compute_advantages_and_returns([experience])

    # the loss
    low, high = o.get("actor.eps_clip_low_high") or [o.get("actor.eps_clip", 0.2)] * 2
    threshold = o.get(S + "is_correction_threshold", [0.5, 5.0])
    logp = tensor("logp").requires_grad_()
    per_token = o.get("actor.loss_agg_mode", "token-mean") == "token-mean"
    module = losses.PolicyLoss(
        clip_eps_low=low, clip_eps_high=high, dual_clip=o.get("actor.dual_clip"), token_level_loss=per_token,
        policy_loss_type=o.get("actor.policy_loss_type", "ppo"),
        is_correction_level=o.get(S + "is_correction_level", "off"),
        is_correction_mode=o.get(S + "is_correction_mode", "mask"),
        is_correction_threshold=[0.0, *threshold] if len(threshold) == 1 else threshold,
    )  # fmt: skip
    total = module(
        logp, tensor("old_logp"), experience.advantages, mask(), rollout_log_probs=tensor("sampler_logp")
    )[0]
    if o.get("algo.kl.use_loss"):
        kl = utils.compute_approx_kl(
            logp, tensor("ref_logp"), kl_estimator=o.get("algo.kl.estimator", "k1")
        ).double()
        total = total + o["algo.kl.init_coef"] * losses.aggregate_loss(kl, mask(), token_level_loss=per_token)
    return result(total, logp, "logp")


# ---------- LightRFT


def lightrft_config(config: Config):
    import types

    root = next(p for p in sys.path if p.endswith("lightrft"))
    for name in ("lightrft", "lightrft.models", "lightrft.trainer"):
        stub(name).__path__ = [f"{root}/{name.replace('.', '/')}"]
    stub("lightrft.models.utils", masked_mean=None)
    source = Path(f"{root}/lightrft/models/utils.py").read_text()
    start = source.index("def masked_mean")
    scope = {"torch": torch, "Optional": object, "Union": types.SimpleNamespace}
    exec("from typing import *\n" + source[start : source.index("\ndef ", start + 1)], scope)
    sys.modules["lightrft.models.utils"].masked_mean = scope["masked_mean"]
    stub("lightrft.trainer.utils", RunningMoments=object, compute_clip_fraction=None)
    losses = importlib.import_module("lightrft.models.loss")
    advantages = importlib.import_module("lightrft.trainer.advantage_calculator")
    o = config.options
    estimator = o["advantage_estimator"]

    # the advantage, without a device
    plain = torch.Tensor.to
    torch.Tensor.to = lambda x, *a, **k: x if a and a[0] in ("cuda", "cpu") else plain(x, *a, **k)
    args = SimpleNamespace(
        n_samples_per_prompt=4, dynamic_sampling=False, advantages_norm=False, advantage_clip=0.0,
        micro_train_batch_size=16,
    )  # fmt: skip
    made = advantages.get_advantage_calculator(estimator, args)
    at = SimpleNamespace(action_mask=tensor("mask"), values=tensor("old_value"), info={"reward": rewards()})
    [at], [shaped] = made.preprocess_rewards(rewards(), [at], 12)
    last = batch.S - 1 - tensor("mask").long().fliplr().argmax(1, keepdim=True)
    final = torch.zeros(batch.B, batch.S).scatter_(1, last, shaped.double().unsqueeze(1))
    at.advantages, _, _ = made.compute(at, final, 1.0, {"gamma": 1.0, "lambd": 0.95})
    [at] = advantages.normalize_advantages_cross_batch([at], estimator, SimpleNamespace())
    torch.Tensor.to = plain

    # the loss
    logp = tensor("logp").requires_grad_()
    module = losses.PolicyLoss(o.get("eps_clip", 0.2), use_cpg_loss=o.get("use_cpg_loss", False))
    total = module(logp, tensor("old_logp"), at.advantages, mask())
    return result(total, logp, "logp")


# ---------- the file


DRIVERS = {
    "trl": trl_config, "verl": verl_config, "openrlhf": openrlhf_config, "lightrft": lightrft_config,
}  # fmt: skip


def use(library: str, inputs: dict) -> None:
    """Drive the library's code on a batch."""
    verl_losses.use(inputs)
    if library == "trl":
        from golden import trl_drive, trl_losses

        trl_drive.use(inputs)
        trl_losses.MASK = trl_drive.MASK


def main(library: str, version: str) -> None:
    """Write the entries of a library anew."""
    old = json.loads(FILE.read_text()) if FILE.exists() else {"made": {}, "entries": {}}
    entries = {k: v for k, v in old["entries"].items() if k in CONFIGS and CONFIGS[k].library != library}
    configs = {k: config for k, config in CONFIGS.items() if config.library == library}
    for key, config in configs.items():
        entries[key] = {"grad": {}}
        for scale in batch.SCALES:
            use(library, data(library, scale))
            grad = partial(DRIVERS[library], config)()["grad"]["logp"]
            entries[key]["grad"][str(scale)] = [float(f"{x:.10g}") for x in grad]
    made = old["made"] | {library: {"version": version, "torch": torch.__version__, "date": today()}}
    inputs = {str(scale): digest(batch.scaled(scale)) for scale in batch.SCALES}
    head = f' "made": {json.dumps(made)},\n "inputs": {json.dumps(inputs)},\n'
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(entries.items()))
    FILE.write_text("{\n" + head + ' "entries": {\n' + rows + "\n }\n}\n")
    print(f"{FILE.name}: {len(configs)} entries of {library} {version}")


def today() -> str:
    return datetime.date.today().isoformat()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    main(*sys.argv[1:])
