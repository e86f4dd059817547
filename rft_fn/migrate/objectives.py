"""Translate objectives of other libraries, advantage to limits, into options of our scripts.

What is here was compared with gradients of their own code (tests/golden/objectives.py): a command without
a note from here has their gradient, to 1e-3. A note has the relative error |theirs - ours| / |theirs|, with
log-ratios of the scales 0.05, 0.3 and 1.5.
"""

from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import rows as r
from rft_fn.migrate import tables
from rft_fn.migrate.objective_rows import (
    Objective,
    arguments,
    constant,
    differs,
    is_true,
    number,
)

__all__ = ["lightrft", "openrlhf", "trl", "trl_pairs", "trl_preferences", "verl"]

_WHITE = "--advantage: their deviation is over n tokens, ours over n - 1: ours is 1 / (2 n) smaller"
_KL = "--kl has the gradient of KL(policy, initial), theirs {}; measured with a coefficient of 0.05"


def _lambda(advantage: str, x: Any) -> list[str]:
    """Return the lambda of GAE; nothing for an advantage that has none."""
    return [f"--gae-lambda {x}"] if advantage == "gae" else []


_TRL_WEIGHTS = tables.table("trl")["maps"]["weights"]
_COUNTS = "--weight: responses without any token of the policy count in their mean, not in ours"


# One function: each part of an objective is read off the options once, in the order of the config.
def trl(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective of TRL's GRPOConfig."""
    kind = str(options.get("loss_type") or "dapo").lower()
    level = str(options.get("importance_sampling_level") or "token").lower()
    low = options.get("epsilon", 0.2)
    high = low if options.get("epsilon_high") is None else options["epsilon_high"]
    delta = options.get("delta")
    notes = []

    # the mean; Dr. GRPO divides by the longest response
    weight = _TRL_WEIGHTS.get(kind, "token_mean")
    if kind == "dr_grpo":
        weight = constant(options.get("max_completion_length") or 512)
    if kind in ("grpo", "dr_grpo", "sapo", "luspo"):
        notes.append(_COUNTS)

    # the loss and its limits; epsilon_high is itself the cap of CISPO, delta below it clips good tokens
    loss, limits = "ppo_clip", {"low": low, "high": high, "dual": delta}
    if kind == "cispo":
        cap = number(high)
        loss, limits = "cispo", {"low": 1, "high": 4 if cap is None else f"{cap - 1:.10g}"}
        if cap is None:
            notes.append(f"--loss.high: epsilon_high={high} is the cap itself; take it less 1")
    elif kind == "sapo":
        tau = options.get("sapo_temperature_pos"), options.get("sapo_temperature_neg")
        loss, limits = "sapo", {"tau_pos": tau[0], "tau_neg": tau[1]}
    elif kind == "vespo":
        names = "k_pos", "lambda_pos", "k_neg", "lambda_neg"
        loss, limits = "vespo", {name: options.get(f"vespo_{name}") for name in names}
    elif level != "token":
        loss = "gspo_token" if level == "sequence_token" else "gspo"
        limits = {"low": low, "high": high}
    if kind not in (*_TRL_WEIGHTS, "dr_grpo"):
        notes.append(f"objective: loss_type={kind}: no loss of ours; write it into a copy of grpo.py")
    if level != "token" and kind in ("cispo", "sapo"):
        notes.append(
            differs(f"{kind} with ratios of whole sequences is no loss of ours", f"trl/{kind}, sequence")
        )
    if delta is not None and loss in ("gspo", "gspo_token"):
        notes.append(differs("delta bounds ratios of sequences too", "trl/sequence, delta"))
    least = (number(high) or 0) + 1
    if loss == "ppo_clip" and delta is not None and (number(delta) or least) < least:
        limits |= {"high": f"{(number(delta) or least) - 1:.10g}", "dual": f"{least:.10g}"}

    # the scale of the advantages
    scale = str(options.get("scale_rewards", "group")).lower()
    advantage = "grpo" if scale in ("group", "true") else "dr_grpo"
    more = ["--reward-norm batch"] if scale == "batch" else []
    several = options.get("reward_funcs")
    if scale == "batch" and isinstance(several, list | tuple) and len(several) > 1:
        notes.append("--reward-norm: it divides each reward by its deviation; theirs divides their sum")
    used = {"loss_type", "importance_sampling_level", "scale_rewards", "epsilon", "epsilon_high", "delta"}
    used |= {"sapo_temperature_pos", "sapo_temperature_neg"}
    used |= {"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"}
    if options.get("multi_objective_aggregation") == "normalize_then_sum":
        used |= {"multi_objective_aggregation"}
        advantage, more = "dr_grpo", ["--reward-norm group"]
        notes.append("--reward-norm: theirs divides the sum by its deviation over the batch once more")

    # the KL in the loss
    if (number(options.get("beta")) or 0) > 0:
        used |= {"use_bias_correction_kl"}
        if str(options.get("use_bias_correction_kl", True)).lower() == "false":
            notes.append(differs(_KL.format("that of k3"), "trl/kl, uncorrected"))
        elif (
            (number(options.get("num_iterations")) or 1) > 1
            or options.get("generation_batch_size") is not None
            or (number(options.get("steps_per_generation")) or 0)
            > (number(options.get("gradient_accumulation_steps")) or 1)
        ):
            notes.append(differs(_KL.format("has the ratio in front after the first update"), "trl/kl"))
    return r.Combined([*arguments(Objective(advantage, loss, weight, limits)), *more], used, notes)


# the losses of pairs of TRL's DPOConfig that are one of ours
_PAIRS = tables.table("trl")["maps"]["pairs"]
_NO_PAIRS = tables.table("trl")["maps"]["no_pairs"]


_BATCH = "--nll: a mean over the tokens of each response; theirs is over those of the batch"


def trl_preferences(options: Mapping[str, Any]) -> r.Combined:
    """Return the loss of TRL's trainers of preferences that are not DPO: KTO, BCO, CPO and ORPO."""
    trainer, kind = options["preferences"], str(options.get("loss_type") or "")
    used = {"preferences", "loss_type", "label_smoothing", "cpo_alpha", "simpo_gamma"}
    used |= {"gamma_beta_ratio", "sft_weight"}
    notes = []
    if trainer in ("kto", "bco"):
        if kind == "apo_zero_unpaired":
            notes.append("objective: apo_zero_unpaired is kto with a baseline of 0, in a copy of dpo.py")
        elif trainer == "bco":
            notes.append("--loss bco: theirs also weighs by a classifier of prompts, where it is asked to")
        return r.Combined(["--unpaired", f"--loss {trainer}"], used, notes)
    if trainer == "orpo":
        notes.append("--loss orpo: its likelihood is a mean of each response, theirs over all prompts too")
        return r.Combined(["--loss orpo"], used, notes)

    # of SimPO's own script: its margin is a share of beta
    if trainer == "simpo":
        margin = (number(options.get("beta")) or 0) * (number(options.get("gamma_beta_ratio")) or 0)
        found, weight = ["--loss simpo", f"--margin {margin:g}"], options.get("sft_weight")
        if number(weight):
            found, notes = [*found, f"--nll {weight}"], [_BATCH]
        if kind not in ("", "sigmoid"):
            notes.append(f"objective: SimPO with loss_type={kind}: no loss of ours")
        if number(options.get("label_smoothing")):
            found.append(f"--label-smoothing {options['label_smoothing']}")
        return r.Combined(found, used, notes)

    # CPO adds the likelihood to each of its losses; SimPO is one of them
    alpha = options.get("cpo_alpha", 1.0)
    found = ["--loss cpo", f"--nll {alpha}"]
    notes = [_BATCH] if number(alpha) else []
    if kind == "simpo":
        found = ["--loss simpo", f"--margin {options.get('simpo_gamma', 0.5)}", f"--nll {alpha}"]
    elif kind not in ("", "sigmoid"):
        notes.append(f"objective: CPO with loss_type={kind}: no loss of ours; write it into a copy of dpo.py")
    if number(options.get("label_smoothing")):
        found.append(f"--label-smoothing {options['label_smoothing']}")
    return r.Combined(found, used, notes)


def trl_pairs(options: Mapping[str, Any]) -> r.Combined:
    """Return the loss of a pair of TRL's DPOConfig."""
    kinds = options.get("loss_type", "sigmoid")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    kind, notes, used = kinds[0], [], {"loss_type", "label_smoothing", "loss_weights"}
    found = _PAIRS.get(kind, ["--loss dpo"])
    if kind in _NO_PAIRS:
        notes.append(differs(_NO_PAIRS[kind], f"trl dpo/{kind}"))
    elif kind not in _PAIRS:
        notes.append(f"objective: loss_type={kind}: no loss of ours; write it into a copy of dpo.py")
    smoothing = number(options.get("label_smoothing"))
    if smoothing and kind in ("robust", "exo_pair"):
        found = [*found, f"--label-smoothing {options['label_smoothing']}"]
    elif kind == "robust":
        found = ["--loss dpo"]  # all labels are right
    elif smoothing and kind in _PAIRS:
        notes.append(f"label_smoothing: {kind} does not read it; --loss cdpo --label-smoothing does")
    weights = options.get("loss_weights") or [1.0] * len(kinds)
    if kinds[1:] == ["sft"] and number(weights[0]) == 1:
        found = [*found, f"--nll {weights[1]}"]
        notes.append(_BATCH)
    elif len(kinds) > 1:
        notes.append(f"objective: theirs is the sum of {', '.join(kinds)} with the weights {weights}")
    return r.Combined([*found], used, notes)


_ACTOR = "actor_rollout_ref.actor."
_VERL_ADVANTAGES = tables.table("verl")["maps"]["advantages"]
_VERL_WEIGHTS = tables.table("verl")["maps"]["weights"]
_VERL_LOSSES = tables.table("verl")["maps"]["losses"]


# One function: each part of an objective is read off the options once, in the order of the config.
def verl(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective of verl's ppo_trainer: an estimator, a mode of loss and a mode of means."""
    estimator = str(options.get("algorithm.adv_estimator") or "gae").lower()
    kind = str(options.get(_ACTOR + "policy_loss.loss_mode") or "vanilla").lower()
    mean = str(options.get(_ACTOR + "loss_agg_mode") or "token-mean").lower()
    low, high = (options.get(f"{_ACTOR}clip_ratio_{side}", 0.2) for side in ("low", "high"))
    used = {"algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"}
    of_actor = ("policy_loss.loss_mode", "loss_agg_mode", "loss_scale_factor", "tau_pos", "tau_neg")
    used |= {
        _ACTOR + name
        for name in (*of_actor, "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    }
    notes = []

    # the advantage
    advantage, more = _VERL_ADVANTAGES.get(estimator, "grpo"), []
    if advantage == "grpo" and not is_true(options.get("algorithm.norm_adv_by_std_in_grpo", True)):
        advantage = "dr_grpo"
    if estimator not in _VERL_ADVANTAGES:
        notes.append(f"objective: adv_estimator={estimator}: no row has it; --algorithm grpo stands in")
    elif estimator == "gpg":
        notes.append(
            "objective: gpg multiplies by responses / responses with a reward other than 0, ours does not"
        )
    elif estimator == "grpo_passk" and is_true(options.get("algorithm.norm_adv_by_std_in_grpo", True)):
        more = ["--reward-norm group"]  # a lead in deviations of the group

    # the mean
    weight = _VERL_WEIGHTS.get(mean, "token_mean")
    if mean == "seq-mean-token-sum-norm":
        length = options.get(_ACTOR + "loss_scale_factor") or options.get("data.max_response_length") or 512
        weight = constant(length)
    elif mean not in _VERL_WEIGHTS:
        notes.append(f"--weight: loss_agg_mode={mean} is no mean of ours; token_mean stands in")

    # the loss, and the limits that it reads
    loss = _VERL_LOSSES.get(kind, "ppo_clip")
    limits: dict[str, Any] = {"low": low, "high": high}
    cap = options.get(_ACTOR + "clip_ratio_c", 3.0)
    cap = cap if number(cap) != 0 else None
    if kind not in ("clip_cov", "kl_cov"):  # nothing else reads them
        used |= {x for x in options if x.startswith(_ACTOR + "policy_loss.")}
    if kind in ("sapo", "geo_mean"):
        weight = "seq_mean"  # whatever loss_agg_mode says
    if kind == "sapo":
        limits = {"tau_pos": options.get(_ACTOR + "tau_pos"), "tau_neg": options.get(_ACTOR + "tau_neg")}
    elif kind in ("dppo_tv", "dppo_kl"):
        limits = {"limit": low, "cap": cap}
        if str(low) != str(high):
            notes.append(f"--loss.limit: theirs is {low} downwards and {high} upwards")
    elif kind == "gpg":
        limits = {}
    elif loss == "ppo_clip" and kind not in ("clip_cov", "kl_cov"):
        limits["dual"] = cap
    if kind == "geo_mean":
        notes.append(_COUNTS)
    elif kind == "clip_cov":
        notes.append(
            "objective: Clip-Cov's drops are weight.clip_cov in a copy of the script; 0.0002 of the tokens"
        )
    elif kind == "kl_cov":
        limits = {"low": 1, "high": 1000000}  # it has no clip
        notes.append(differs("KL-Cov's penalty is loss.kl_cov in a copy of the script", "verl/kl_cov"))
    elif kind not in _VERL_LOSSES:
        notes.append(f"objective: loss_mode={kind}: no loss of ours; vanilla stands in")
    if advantage == "gae" and loss != "ppo_clip":
        loss, limits = "ppo_clip", {"low": low, "high": high, "dual": cap}
        what = f"ppo.py has the clipped loss, not {kind}"
        notes.append(differs(what, "verl/gae, gspo") if kind == "gspo" else f"objective: {what}")
    given = options.get(_ACTOR + "clip_ratio")
    if (number(given) or 0.2) != 0.2 and not {_ACTOR + "clip_ratio_low", _ACTOR + "clip_ratio_high"} & set(
        options
    ):
        notes.append(
            f"clip_ratio={given}: verl reads clip_ratio_low and clip_ratio_high, which are 0.2 by default"
        )

    # the KL in the loss
    if is_true(options.get(_ACTOR + "use_kl_loss")):
        estimate = str(options.get(_ACTOR + "kl_loss_type") or "low_var_kl")
        if estimate in ("low_var_kl", "k3"):
            used |= {_ACTOR + "kl_loss_type"}
            notes.append(differs(_KL.format("that of k3"), "verl/grpo, kl"))
    used |= {"algorithm.lam"}
    found = [*arguments(Objective(advantage, loss, weight, limits)), *more]
    return r.Combined([*found, *_lambda(advantage, options.get("algorithm.lam", 1.0))], used, notes)


_OPENRLHF_ADVANTAGES = tables.table("openrlhf_and_lightrft")["maps"]["advantages"]


_ESTIMATES = {"k1": "one of expectation 0", "k3": "that of k3"}
_WHITENED = ("gae", "reinforce", "reinforce++", "reinforce_baseline")  # over the tokens of the batch


def _clips(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return low and high of OpenRLHF's limits."""
    pair = options.get("eps_clip_low_high") or [options.get("eps_clip", 0.2)] * 2
    low, high = pair.replace(",", " ").split() if isinstance(pair, str) else pair
    return {"low": low, "high": high}


def openrlhf(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective of OpenRLHF's train_ppo_ray."""
    estimator = str(options.get("advantage_estimator") or "gae").lower()
    used = {"advantage_estimator", "policy_loss_type", "eps_clip", "eps_clip_low_high", "dual_clip"}
    used |= {"loss_agg_mode", "no_advantage_std_norm", "kl_unbiased_gradient", "lambd"}
    notes = []

    # the advantage
    advantage, more = _OPENRLHF_ADVANTAGES.get(estimator, "grpo"), []
    if estimator == "flash_reinforce":
        advantage, more = "reinforce", ["--reward-norm batch"]
        what = "--reward-norm batch divides by the deviation too, only the norm differs"
        notes.append(differs(what, "openrlhf/flash_reinforce"))
    elif estimator not in _OPENRLHF_ADVANTAGES:
        notes.append(f"objective: advantage_estimator={estimator}: no row has it; grpo stands in")
    if estimator in _WHITENED and is_true(options.get("no_advantage_std_norm")):
        notes.append("objective: their advantage is not divided by the deviation over the batch, ours is")
    elif estimator in _WHITENED:
        notes.append(_WHITE)
    if estimator == "gae" and number(options.get("lambd")) not in (None, 1.0):
        notes.append(
            differs("theirs decays over the tokens of tools, ours skips them", "openrlhf/gae, lambda 0.95")
        )
    if estimator == "reinforce" and number(options.get("gamma")) not in (None, 1.0):
        notes.append("objective: advantage.reinforce_pp takes gamma in a copy of grpo.py; here it is 1")

    # GSPO is always a mean over responses
    limits = _clips(options)
    weight = "seq_mean" if options.get("loss_agg_mode") == "seq-mean-token-mean" else "token_mean"
    loss = "ppo_clip"
    if str(options.get("policy_loss_type") or "ppo").lower() == "gspo":
        weight, loss = "seq_mean", "gspo"
        if options.get("dual_clip") is not None:
            notes.append("--dual: gspo has none")
    else:
        limits["dual"] = options.get("dual_clip")
    if advantage == "gae" and loss != "ppo_clip":
        loss = "ppo_clip"
        notes.append(differs("ppo.py has the clipped loss, not gspo", "openrlhf/gae, gspo"))

    # the KL in the loss
    if is_true(options.get("use_kl_loss")) and number(options.get("init_kl_coef")) != 0:
        estimate = str(options.get("kl_estimator") or "k1")
        used |= {"kl_estimator"}
        if estimate in ("k1", "k3") and not is_true(options.get("kl_unbiased_gradient")):
            notes.append(differs(_KL.format(_ESTIMATES[estimate]), f"openrlhf/group_norm, kl {estimate}"))
    found = [*arguments(Objective(advantage, loss, weight, limits)), *more]
    return r.Combined([*found, *_lambda(advantage, options.get("lambd", 1.0))], used, notes)


def lightrft(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective of LightRFT, which is always a mean over responses of one of two losses."""
    estimator = str(options.get("advantage_estimator") or "gae").lower()
    estimator = {"grpo": "group_norm"}.get(estimator, estimator)
    notes = []
    advantage = _OPENRLHF_ADVANTAGES.get(estimator, "grpo")
    if estimator == "cpgd":
        notes.append("objective: its advantages of cpgd are all 0, and so is its gradient; ours are not")
        advantage = "cpgd"
    elif estimator not in _OPENRLHF_ADVANTAGES:
        notes.append(f"objective: advantage_estimator={estimator}: no row has it; grpo stands in")
    elif estimator in _WHITENED:
        notes.append(_WHITE)
    limits = _clips(options)
    loss = "ppo_clip"
    if is_true(options.get("use_cpg_loss")) and advantage != "gae":
        loss, limits = "cpgd", {**limits, "drift": 0}
    elif is_true(options.get("use_cpg_loss")):
        notes.append("objective: ppo.py has the clipped loss, not that of cpgd")
    estimate = str(options.get("kl_estimator") or "k1")
    in_loss = is_true(options.get("use_kl_loss")) and advantage != "gae"
    if in_loss and number(options.get("init_kl_coef")) and estimate in _ESTIMATES:
        notes.append(
            f"objective: --kl has the gradient of KL(policy, initial), theirs {_ESTIMATES[estimate]}"
        )
    if is_true(options.get("use_gspo")):
        notes.append("use_gspo: no code of LightRFT reads it; --algorithm gspo is that algorithm")
    if options.get("loss_agg_mode") not in (None, "seq-mean-token-mean"):
        notes.append(
            f"loss_agg_mode={options['loss_agg_mode']}: no code of LightRFT reads it; --weight has means"
        )
    used = {
        "advantage_estimator",
        "eps_clip",
        "eps_clip_low_high",
        "policy_loss_type",
        "use_cpg_loss",
        "use_gspo",
    }
    return r.Combined(
        arguments(Objective(advantage, loss, "seq_mean", limits)), used | {"loss_agg_mode"}, notes
    )
