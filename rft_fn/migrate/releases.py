"""What options had by default in older releases of other libraries, and which names tell a release.

A file of an old release means what its release did. `--from-version` names it; else names of options that
came or went tell the latest release that the file can be of.
"""

import re
from collections.abc import Mapping
from typing import Any

from rft_fn.migrate.objective_rows import is_true
from rft_fn.migrate.verl import ACTOR, ROLLOUT

__all__ = ["CHANGED", "FIRST", "GONE", "older"]

Version = tuple[int, ...]

# option -> (the first release without it, its default before), from the oldest on; of trainers that sample
CHANGED: dict[str, dict[str, tuple[tuple[str, Any], ...]]] = {
    "trl": {
        "beta": (("0.19", 0.04),),
        "temperature": (("0.18", 0.9),),
        "loss_type": (("0.16", "grpo"), ("0.22", "bnpo")),
        "max_completion_length": (("1.10", 256),),
        "vllm_importance_sampling_correction": (("0.23", "false"),),
        "vllm_importance_sampling_mode": (("0.26", "token_truncate"),),
        "vllm_importance_sampling_clip_max": (("0.26", 2.0),),
    },
    "verl": {
        ACTOR + "entropy_coeff": (("0.4", 0.001),),
        ACTOR + "clip_ratio_c": (("0.4", 0),),  # no dual clip
        "algorithm.use_kl_in_reward": (("0.4", "unless use_kl_loss"),),
    },
}

# name of an option -> the first release without it
GONE: dict[str, dict[str, str]] = {
    "trl": {
        "vllm_device": "0.18", "vllm_dtype": "0.18", "vllm_enable_prefix_caching": "0.18",
        "vllm_max_model_len": "0.18", "wandb_log_unique_prompts": "0.27", "max_prompt_length": "0.28",
        "use_liger_loss": "0.28", "vllm_guided_decoding_regex": "0.28",
    },
    "verl": {
        "trainer.remove_previous_ckpt_in_save": "0.3", "trainer.val_generations_to_log_to_wandb": "0.4",
        ACTOR + "fsdp_config.grad_offload": "0.3", "critic.model.fsdp_config.grad_offload": "0.3",
        ACTOR + "ppo_micro_batch_size": "0.4", ROLLOUT + "log_prob_micro_batch_size": "0.4",
        "critic.ppo_micro_batch_size": "0.4", "actor_rollout_ref.ref.log_prob_micro_batch_size": "0.4",
        "algorithm.kl_ctrl.kl_coef": "0.4",
    },
}  # fmt: skip

# the beginning of a name -> the first release with it
FIRST: dict[str, dict[str, str]] = {
    "trl": {
        "sync_ref_model": "0.15", "reward_weights": "0.15", "log_completions": "0.15", "epsilon": "0.16",
        "num_iterations": "0.16", "scale_rewards": "0.16", "min_p": "0.16", "top_k": "0.16", "top_p": "0.16",
        "repetition_penalty": "0.16", "vllm_server_host": "0.16", "loss_type": "0.17",
        "mask_truncated_completions": "0.17", "shuffle_dataset": "0.17", "delta": "0.18",
        "steps_per_generation": "0.18", "generation_batch_size": "0.18", "vllm_mode": "0.18",
        "vllm_server_base_url": "0.18", "vllm_tensor_parallel_size": "0.18", "generation_kwargs": "0.19",
        "importance_sampling_level": "0.20", "top_entropy_quantile": "0.20", "vllm_importance": "0.23",
        "vllm_enable_sleep_mode": "0.23", "chat_template_kwargs": "0.25", "cast_lm_head_to_fp32": "0.25",
        "vllm_importance_sampling_mode": "0.26", "vllm_max_model_length": "0.26", "sapo_": "0.26",
        "use_bias_correction_kl": "0.26", "multi_objective_aggregation": "0.27", "off_policy_mask": "0.27",
        "vespo_": "1.0", "use_adaptive_entropy": "1.9", "entropy_coef": "1.9",
    },
    "verl": {
        "algorithm.use_kl_in_reward": "0.4", "algorithm.norm_adv": "0.4", "algorithm.filter_groups": "0.4",
        "algorithm.rollout_correction": "0.7", ACTOR + "loss_agg_mode": "0.4", ACTOR + "clip_ratio_": "0.4",
        ACTOR + "policy_loss": "0.5", ACTOR + "loss_scale_factor": "0.6", ROLLOUT + "agent": "0.5",
        ROLLOUT + "multi_turn": "0.4", ROLLOUT + "mode": "0.4", "reward_model.reward_kwargs": "0.4",
        "reward_model.overlong_buffer": "0.4", "actor_rollout_ref.model.lora": "0.4", "reward.": "0.8",
        "trainer.log_val_generations": "0.4", "trainer.rollout_data_dir": "0.4", "distillation": "0.8",
        "actor_rollout_ref.model.use_shm": "0.4", ROLLOUT + "engine_kwargs": "0.4", "trainer.device": "0.4",
    },
}  # fmt: skip


def older(library: str, options: Mapping[str, Any], version: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return the defaults of the release that the options are of, where they differ from now, and notes.

    Raises ValueError for a `version` that is none.
    """
    options = {name: x for name, x in options.items() if x is not None}
    told, release = _told(library, options), _number(version)
    if version and not release:
        raise ValueError(f"from-version: expected a release such as 0.15, got {version!r}")
    if version and library not in CHANGED:
        return {}, [
            f"version: no defaults of older releases of {library} are known here; those of now are taken"
        ]
    if not version and told:
        release = _number(told[1])
    found, limit = {}, release if version else _before(release)
    for name, steps in CHANGED.get(library, {}).items():
        before = next((x for first, x in steps if limit and limit < _number(first)), None)
        if before is not None and name not in options:
            found[name] = before
    if found.get("algorithm.use_kl_in_reward") is not None:
        found["algorithm.use_kl_in_reward"] = not is_true(options.get(ACTOR + "use_kl_loss"))
    if library == "verl" and ACTOR + "clip_ratio_c" in found and ACTOR + "clip_ratio" in options:
        sides = (ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high")
        found |= {side: options[ACTOR + "clip_ratio"] for side in sides if side not in options}
    notes = [] if version else _untold(library, {**found, **options}, told)
    if not found:
        return {}, notes
    which = (
        f"release {version}" if version else f"a release before {told[1]}, as {told[0]} tells" if told else ""
    )
    shown = ", ".join(f"{name}={x}" for name, x in found.items())
    instead = "" if version else "; --from-version names another"
    return found, [f"version: of {which}, whose defaults are taken: {shown}{instead}", *notes]


def _untold(library: str, options: Mapping[str, Any], told: tuple[str, str] | None) -> list[str]:
    """Return a note of options that the file leaves out, whose default older releases had otherwise."""
    since = _since(library, options)
    changed = {
        name: [(x, first) for first, x in steps if _number(first) > since]
        for name, steps in CHANGED.get(library, {}).items()
        if name not in options and not name.startswith("vllm_")
    }
    shown = [
        f"{name} ({', '.join(f'{x} before {first}' for x, first in steps)})"
        for name, steps in changed.items()
        if steps
    ]
    if not shown or (library == "verl" and told is None and not since):
        return []
    return [
        f"version: not in the file, and with another default in older releases: {', '.join(shown)}; "
        "--from-version names the release"
    ]


def _since(library: str, options: Mapping[str, Any]) -> Version:
    """Return the release in which the newest option came."""
    came = [x for head, x in FIRST.get(library, {}).items() if any(name.startswith(head) for name in options)]
    return max(map(_number, came), default=())


def _told(library: str, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the option that went away first, with the release; None if a later one came than it went."""
    gone = [(name, x) for name, x in GONE.get(library, {}).items() if name in options]
    if not gone:
        return None
    name, end = min(gone, key=lambda item: _number(item[1]))
    since = _since(library, options)
    return None if since and since >= _number(end) else (name, end)


def _number(text: str) -> Version:
    """Return the numbers of a release: (0, 2, 0) of v0.2.0.post2; () of a text that is none."""
    match = re.match(r"v?(\d{1,6}(?:\.\d{1,6})*)", text)
    return tuple(map(int, match[1].split("."))) if match else ()


def _before(release: Version) -> Version:
    """Return a release just before another one."""
    return (*release[:-1], release[-1] - 1, 999_999) if release else ()
