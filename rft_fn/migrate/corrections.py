"""Translate weights against the mismatch of trainer and sampler of other libraries into --mismatch.

Ours are rows of rft_fn.collect.CORRECTIONS and a band of the geometric mean of a response's ratios.
"""

from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import rows as r
from rft_fn.migrate import tables
from rft_fn.migrate.objective_rows import is_true, number

__all__ = ["openrlhf", "trl", "verl"]

_UNCAPPED = ["--mismatch tis", "--cap 1000000"]  # importance weights of tokens as they are


def _band(low: float, high: float) -> list[str]:
    """Return a band of the geometric mean of ratios, low <= 1 < high; 0 and infinity are no bounds."""
    found = [f"--geo-low {low:.10g}"] if low > 0 else []
    return [*found, f"--geo-high {high:.10g}"] if high < float("inf") else found


_TRL = "vllm_importance_sampling_"
_TRL_MODES = tables.table("trl")["maps"]["mismatch"]


def trl(options: Mapping[str, Any]) -> r.Combined:
    """Return the correction of TRL's vLLM, which is on unless switched off."""
    used = {_TRL + x for x in ("correction", "mode", "cap", "clip_max", "clip_min")}
    if str(options.get(_TRL + "correction", True)).lower() == "false":
        return r.Combined(["--mismatch none"], used, [])
    mode = str(options.get(_TRL + "mode") or "sequence_mask")
    kind = _TRL_MODES.get(mode)
    if kind is None:
        what = f"--mismatch: {mode} is none of ours; rft_fn.weight has functions for a copy of grpo.py"
        return r.Combined([], used, [what])
    cap = r.number(options, _TRL + "clip_max", _TRL + "cap", default=3.0)
    floor, notes = r.number(options, _TRL + "clip_min"), []
    found = [f"--mismatch {'icepop' if floor and kind == 'mis' else kind}", f"--cap {cap:g}"]
    if floor and kind in ("tis", "mis"):
        found.append(f"--floor {floor:g}")
    elif floor:
        notes.append(f"--floor: {kind} has none; theirs also bounds whole responses at {floor:g} from below")
    if options.get("loss_type") == "vespo":
        notes.append("--mismatch: theirs is inside the weights of VESPO, ours multiplies the loss")
    return r.Combined(found, used, notes)


_VERL = "algorithm.rollout_correction."
_VERL_NAMES = (
    "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold",
    "rollout_rs_threshold_lower", "rollout_token_veto_threshold", "bypass_mode", "loss_type",
    "use_policy_gradient", "bypass_old_logprob_for_rollout",
)  # fmt: skip
_SAMPLER = ("bypass_mode", "bypass_old_logprob_for_rollout")  # old log-probs are the sampler's


def verl(options: Mapping[str, Any]) -> r.Combined:
    """Return verl's rollout correction: importance weights, and the responses that are dropped."""
    used = {_VERL + name for name in _VERL_NAMES} | {"actor_rollout_ref.actor.tis_imp_ratio_cap"}
    given = {name: options.get(_VERL + name) for name in _VERL_NAMES}
    older = number(options.get("actor_rollout_ref.actor.tis_imp_ratio_cap")) or 0
    notes: list[str] = []
    if any(is_true(given[name]) for name in _SAMPLER):
        if str(given["loss_type"]) == "reinforce" or is_true(given["use_policy_gradient"]):
            notes.append("objective: with bypass_mode theirs is REINFORCE with the ratio to the sampler")
        return r.Combined(["--mismatch none"], used, notes)

    # importance weights
    level = "" if given["rollout_is"] is None else str(given["rollout_is"]).lower()
    limits = [number(x) or 2.0 for x in str(given["rollout_is_threshold"]).split("_")]
    cap, band = limits[-1], len(limits) > 1  # LOWER_UPPER drops what is outside
    kind = {"token": "icepop" if band else "tis", "sequence": "mis_seq" if band else "tis_seq"}.get(level)
    if older > 0 and kind is None:
        kind, cap = "tis", older
    found = [] if kind is None else [f"--mismatch {kind}", f"--cap {cap:g}"]
    if kind == "icepop":
        found.append(f"--floor {limits[0]:g}")
    elif kind == "mis_seq":
        notes.append(f"--mismatch: theirs drops responses with a whole ratio below {limits[0]:g} too")
    if kind is not None and is_true(given["rollout_is_batch_normalize"]):
        notes.append("--mismatch: theirs divides the weights by their mean: rft_fn.weight.self_normalized")
    elif level and kind is None:
        notes.append(f"--mismatch: rollout_is={level} is none of ours: rft_fn.weight, in a copy of grpo.py")

    # rejection: their k1 is of the sampler to the trainer, so that its bounds are the other way round
    rejects = "" if given["rollout_rs"] is None else str(given["rollout_rs"])
    bounds = str(given["rollout_rs_threshold"]).replace("_", " ").split()
    if rejects in ("seq_mean_k1", "geometric") and all(number(x) for x in bounds):
        low, high = (float(bounds[0]), float(bounds[-1])) if len(bounds) > 1 else (0.0, float(bounds[0]))
        if rejects == "geometric":
            low = number(given["rollout_rs_threshold_lower"]) or low
        found += _band(1 / high, 1 / low if low else high)
        notes.append("--geo-low: theirs takes dropped responses out of the mean too, so the rest counts more")
    elif rejects:
        notes.append(
            f"--geo-low: rollout_rs={rejects} with {given['rollout_rs_threshold']} is rft_fn.weight.within, "
            "in a copy of grpo.py"
        )
    if given["rollout_token_veto_threshold"] is not None:
        notes.append("rollout_token_veto_threshold: rft_fn.weight.within of row_max, in a copy of grpo.py")
    return r.Combined(found, used, notes)


_OPENRLHF = tables.table("openrlhf")["maps"]["correction"]


def openrlhf(options: Mapping[str, Any]) -> r.Combined:
    """Return OpenRLHF's correction: a level, a mode and a band, or before them a switch and a name."""
    used = {name for names in _OPENRLHF.values() for name in names}
    given = {
        part: next((options[name] for name in names if options.get(name) is not None), None)
        for part, names in _OPENRLHF.items()
    }
    level, gating = str(given["level"] or "off").lower(), str(given["gating"] or "ratio")
    kind = str(given["kind"] or "tis")
    if level != "off":
        kind = {"seq": "seq-mask-tis"}.get(level, "tis" if given["mode"] == "clip" else "icepop")
    elif not is_true(given["on"]):
        return r.Combined([], used, [])
    losses = options.get("actor.policy_loss_type"), options.get("policy_loss_type")
    if "gspo" in losses:  # its ratio is then to the sampler, without a weight
        return r.Combined(["--mismatch none"], used, [])

    # a band, or the upper bound of one
    bounds = given["threshold"] if isinstance(given["threshold"], list | tuple) else [given["threshold"]]
    words = " ".join("0.5 5" if x is None else str(x) for x in bounds).replace(",", " ").split()
    low, high = ("0", words[0]) if len(words) == 1 else words[:2]
    if level != "off" and gating != "ratio":
        where = "responses by the mean" if level == "seq" else "tokens by the size"
        what = f"objective: theirs weighs by the ratio and drops {where} of a divergence ({gating}, {high})"
        return r.Combined(_UNCAPPED, used, [f"{what}: rft_fn.weight.within, in a copy of the script"])
    if kind == "seq-mask-tis":
        return r.Combined([*_UNCAPPED, *_band(number(low) or 0, number(high) or float("inf"))], used, [])
    if number(low) == 0:
        return r.Combined([f"--mismatch {'mis' if kind == 'icepop' else 'tis'}", f"--cap {high}"], used, [])
    return r.Combined([f"--mismatch {kind}", f"--floor {low}", f"--cap {high}"], used, [])
