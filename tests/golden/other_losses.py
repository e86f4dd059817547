"""How the losses of OpenRLHF and AReaL are driven, for `golden.scales`: their own functions, without the
packages that only other functions of the same files need."""

import ast
import importlib
import importlib.metadata
from functools import partial
from pathlib import Path

import torch
from golden import verl_losses
from golden.scales import HOLES
from golden.verl_losses import result, stub, tensor

use = verl_losses.use


def versions(package: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package)}


def opened(package: str, *folders: str) -> None:
    """Packages whose modules can be imported without their `__init__`."""
    root = str(importlib.metadata.distribution(package).locate_file(package))
    for name in (package, *(f"{package}.{folder}" for folder in folders)):
        stub(name).__path__ = [root + name.removeprefix(package).replace(".", "/")]


def inputs():
    """(logp, a leaf; old_logp, adv [B, S])."""
    logp = tensor("logp").requires_grad_()
    return logp, tensor("old_logp"), tensor("adv").unsqueeze(-1) * tensor("mask")


def openrlhf(**options):
    opened("openrlhf", "models")
    logp, old_logp, adv = inputs()
    module = importlib.import_module("openrlhf.models.loss").PolicyLoss(**options)
    total = module(logp, old_logp, adv, tensor("mask").double())[0]
    return result(total, logp, "logp")


def areal(**options):
    opened("areal", "utils", "utils.functional", "api")
    stub("areal.api.cli_args", RejectionSamplingConfig=object)
    stub("areal.utils.data", KLEstimator=object)
    logp, old_logp, adv = inputs()
    f = importlib.import_module("areal.utils.functional.functional").ppo_actor_loss_fn
    options = {"eps_clip": 0.2} | options
    total, _ = f(logp, old_logp, old_logp, adv, loss_mask=torch.tensor(verl_losses.DATA["mask"]), **options)
    return result(total, logp, "logp")


def areal_m2po(limit=0.04):
    """The gradient of the score-function loss on the tokens that AReaL's mask leaves. The two functions are
    taken out of `areal/trainer/ppo/actor.py`, which imports much else."""
    file = importlib.metadata.distribution("areal").locate_file("areal/trainer/ppo/actor.py")
    tree = ast.parse(Path(str(file)).read_text())
    names = ("_apply_m2po_masking", "_get_m2po_loss_mask")
    found = {"torch": torch}
    body = [node for node in tree.body if getattr(node, "name", "") in names]
    exec(compile(ast.Module(body, []), "actor.py", "exec"), found)
    logp, old_logp, adv = inputs()
    kept = found[names[0]](tensor("sampler_logp"), old_logp, torch.tensor(verl_losses.DATA["mask"]), limit)
    return result(-(kept * adv * logp).sum(), logp, "logp")


def entries(package: str) -> dict:
    """key -> (variant, call)."""
    gspo = {"clip_eps_low": 0.1, "clip_eps_high": 0.12, "policy_loss_type": "gspo"}
    level = {"importance_sampling_level": "sequence", "eps_clip": 0.1, "eps_clip_higher": 0.12}
    calls = {
        "openrlhf/ppo": openrlhf,
        "openrlhf/ppo seq": partial(openrlhf, token_level_loss=False),
        "openrlhf/dual": partial(openrlhf, dual_clip=3.0),
        "openrlhf/gspo": partial(openrlhf, **gspo),
        "areal/ppo": areal,
        "areal/dual": partial(areal, c_clip=3.0),
        "areal/sequence": partial(areal, **level),
        "areal/m2po": areal_m2po,
    }
    return {k: (HOLES, call) for k, call in calls.items() if k.startswith(f"{package}/")}
