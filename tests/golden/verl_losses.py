"""How verl's own functions are driven: `verl/trainer/ppo/core_algos.py` of the installed package, without the
packages that only its types need.

For `golden.scales`, in an environment that has verl on its path (`pip install --no-deps verl==0.9.1`).
omegaconf, tensordict and verl's configuration classes are stubs that hold values; every number is made by
verl's functions.
"""

import importlib
import importlib.metadata
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from golden import batch
from golden.scales import HOLES

DATA = {}


def use(data: dict) -> None:
    global DATA
    DATA = data


def versions() -> dict[str, str]:
    return {"verl": importlib.metadata.version("verl")}


def tensor(name: str) -> torch.Tensor:
    x = torch.tensor(DATA[name])
    return x.double() if x.is_floating_point() else x


class Config(SimpleNamespace):
    """An ActorConfig, as far as the losses read it."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def stub(name, **names):
    module = ModuleType(name)
    module.__dict__.update(names)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def core():
    """verl.trainer.ppo.core_algos, its packages opened without their `__init__`."""
    if "verl.trainer.ppo.core_algos" in sys.modules:
        return sys.modules["verl.trainer.ppo.core_algos"]
    root = str(importlib.metadata.distribution("verl").locate_file("verl"))
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        stub(name).__path__ = [root + name.removeprefix("verl").replace(".", "/")]
    stub("omegaconf", DictConfig=dict)
    stub("tensordict", TensorDict=dict)
    stub("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch)
    stub("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    stub("verl.workers.config", ActorConfig=Config)
    try:
        groups = importlib.import_module("verl.utils.groupwise")
        sys.modules["verl.utils"].__dict__.update(
            as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std
        )
    except ModuleNotFoundError:
        pass  # older versions have none
    return importlib.import_module("verl.trainer.ppo.core_algos")


def actor(**options):
    """The defaults of verl's ActorConfig."""
    cov = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    cov |= {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1}
    base = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    base |= {"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}}
    cov |= {"dro_beta": 0.1}
    inner = {k: options.pop(k, v) for k, v in cov.items()}
    return Config(**(base | options), policy_loss=SimpleNamespace(**inner))


def mask():
    return tensor("mask").double()


def loss(name, mode="token-mean", old="old_logp", **options):
    """The gradient of a policy loss with respect to the log-probs."""
    logp = tensor("logp").requires_grad_()
    adv = tensor("adv").unsqueeze(-1) * mask()
    f = core().POLICY_LOSS_REGISTRY[name]
    total, _ = f(tensor(old), logp, adv, mask(), mode, actor(**options))
    return result(total, logp, "logp")


def result(total, leaf, name):
    grad = torch.autograd.grad(total, leaf)[0]
    assert not grad[mask() == 0].any()
    return {"grad": {name: grad[mask() > 0].tolist()}}


def token_reward():
    """[B, S]: the first reward of each response, on its last token."""
    last = torch.arange(batch.S) == tensor("length").unsqueeze(-1) - 1
    return torch.tensor(DATA["reward"][0]).double().unsqueeze(-1) * last


def advantage(name, **options):
    """An estimator's numbers, as the gradient of the score-function loss that they make."""
    logp = tensor("logp").requires_grad_()
    names = {"token_level_rewards": token_reward(), "response_mask": mask()} | options
    adv, _ = core().get_adv_estimator_fn(name)(**names)
    return result(-(adv * logp * mask()).sum(), logp, "logp")


def grouped(name):
    return advantage(name, index=np.arange(batch.B) // batch.G)


def passk(scaled):
    index = np.arange(batch.B) // batch.G
    return advantage("grpo_passk", index=index, config={"norm_adv_by_std_in_grpo": scaled})


def squares():
    """[B, S]: a sum of squared probabilities, where the rest of the mass lies on the other words alike."""
    p = tensor("old_logp").exp()
    return p**2 + (1 - p) ** 2 / (batch.V - 1)


def optimal_baseline(name):
    index = np.arange(batch.B) // batch.G
    return advantage(name, index=index, old_log_probs=tensor("old_logp"), sum_pi_squared=squares())


def corrections():
    """verl.trainer.ppo.rollout_corr_helper, with stubs for what its configuration needs."""
    core()
    stub("verl.protocol", DataProto=object)
    stub("verl.trainer.config.algorithm", RolloutCorrectionConfig=object)
    stub("verl.workers.config.actor", PolicyLossConfig=object)
    return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


def score_of(weights):
    """The gradient of the score-function loss with these weights of tokens."""
    logp = tensor("logp").requires_grad_()
    return result(-(weights * tensor("adv").unsqueeze(-1) * logp).sum(), logp, "logp")


def rejected(options, limits):
    gap = tensor("old_logp") - tensor("sampler_logp")
    kept, _ = corrections().compute_rollout_rejection_mask(gap, mask(), options, limits)
    return score_of(kept)


def normalised():
    gap = tensor("old_logp") - tensor("sampler_logp")
    found = corrections().compute_rollout_correction_weights(
        gap, mask(), "token", 2.0, rollout_is_batch_normalize=True
    )
    return score_of(found[0])


def gae():
    return advantage("gae", values=tensor("old_value"), gamma=1.0, lam=0.95)


def value():
    leaf = tensor("value").requires_grad_()
    _, ret = core().get_adv_estimator_fn("gae")(
        token_reward(), tensor("old_value"), mask(), torch.tensor(1.0), torch.tensor(0.95)
    )
    total, _ = core().compute_value_loss(leaf, ret, tensor("old_value"), mask(), 0.2)
    return result(total, leaf, "value")


def reinforce_pp():
    return advantage("reinforce_plus_plus", config=SimpleNamespace(gamma=1.0))


def entries() -> dict:
    """key -> (variant, call)."""
    wide = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}
    gspo = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.12}
    means = {"seq": "seq-mean-token-mean", "sum": "seq-mean-token-sum", "norm": "seq-mean-token-sum-norm"}
    calls = {
        "vanilla": partial(loss, "vanilla"),
        "vanilla higher": partial(loss, "vanilla", clip_ratio_high=0.28),
        "vanilla seq": partial(loss, "vanilla", means["seq"]),
        "vanilla sum": partial(loss, "vanilla", means["sum"]),
        "vanilla norm": partial(loss, "vanilla", means["norm"]),
        "gspo": partial(loss, "gspo", means["seq"], **gspo),
        "gspo token": partial(loss, "gspo", "token-mean", **gspo),
        "sapo": partial(loss, "sapo", means["seq"]),
        "cispo": partial(loss, "cispo"),
        "cispo wide": partial(loss, "cispo", **wide),
        "geo_mean": partial(loss, "geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
        "dppo_tv": partial(loss, "dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.15),
        "dppo_tv 20": partial(loss, "dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20.0),
        "dppo_kl": partial(loss, "dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05),
        "dppo_kl 20": partial(loss, "dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0),
        "gpg": partial(loss, "gpg"),
        "clip_cov": partial(loss, "clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.2),
        "kl_cov": partial(loss, "kl_cov", kl_cov_ratio=0.05, ppo_kl_coef=1.0),
        "grpo": partial(grouped, "grpo"),
        "rloo": partial(grouped, "rloo"),
        "opo": partial(grouped, "opo"),
        "reinforce_pp_baseline": partial(grouped, "reinforce_plus_plus_baseline"),
        "reinforce_pp": reinforce_pp,
        "gae": gae,
        "gpg advantage": partial(grouped, "gpg"),
        "dro": partial(loss, "dro"),
        "grpo_passk": partial(passk, False),
        "grpo_passk scaled": partial(passk, True),
        "otb": partial(optimal_baseline, "tir_optimal_token_baseline"),
        "geometric": partial(rejected, "seq_mean_k1", "0.7_1.4"),
        "rejected by the largest": partial(rejected, "seq_max_k2", "1.0"),
        "rejected twice": partial(rejected, "token_k2,seq_mean_k3", "0.5,0.6"),
        "rejected by the sum": partial(rejected, "seq_sum_k1", "0.3_3.0"),
        "normalised": normalised,
        "value": value,
    }
    if versions()["verl"].startswith("0.7"):  # of the older one only what has changed since
        return {"verl/reinforce_pp 0.7": (HOLES, reinforce_pp)}
    return {f"verl/{k}": (HOLES, call) for k, call in calls.items()}
