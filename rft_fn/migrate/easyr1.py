"""Options of EasyR1, a relative of verl, by verl's names."""

from collections.abc import Mapping
from typing import Any

from rft_fn.migrate.objective_rows import is_true
from rft_fn.migrate.verl import ACTOR, MODEL, ROLLOUT

__all__ = ["as_verl", "is_easyr1"]

# the beginning of its names -> of verl's; the longest counts
_NAMES = {
    "data.rollout_batch_size": "data.train_batch_size",
    "data.mini_rollout_batch_size": "data.gen_batch_size",
    "algorithm.kl_type": "algorithm.kl_ctrl.type",
    "algorithm.kl_horizon": "algorithm.kl_ctrl.horizon",
    "algorithm.kl_target": "algorithm.kl_ctrl.target_kl",
    "algorithm.online_filtering": "algorithm.filter_groups.enable",
    "algorithm.filter_key": "algorithm.filter_groups.metric",
    "worker.actor.": ACTOR,
    "worker.actor.global_batch_size": ACTOR + "ppo_mini_batch_size",
    "worker.actor.micro_batch_size_per_device_for_update": ACTOR + "ppo_micro_batch_size_per_gpu",
    "worker.actor.micro_batch_size_per_device_for_experience": ROLLOUT + "log_prob_micro_batch_size_per_gpu",
    "worker.actor.max_grad_norm": ACTOR + "grad_clip",
    "worker.actor.clip_ratio_dual": ACTOR + "clip_ratio_c",
    "worker.actor.loss_avg_mode": ACTOR + "loss_agg_mode",
    "worker.actor.loss_type": ACTOR + "policy_loss.loss_mode",
    "worker.actor.tau_positive": ACTOR + "tau_pos",
    "worker.actor.tau_negative": ACTOR + "tau_neg",
    "worker.actor.dynamic_batching": ACTOR + "use_dynamic_bsz",
    "worker.actor.ulysses_size": ACTOR + "ulysses_sequence_parallel_size",
    "worker.actor.optim.strategy": ACTOR + "optim.optimizer",
    "worker.actor.optim.lr_warmup_ratio": ACTOR + "optim.lr_warmup_steps_ratio",
    "worker.actor.fsdp.": ACTOR + "fsdp_config.",
    "worker.actor.offload.offload_params": ACTOR + "fsdp_config.param_offload",
    "worker.actor.offload.offload_optimizer": ACTOR + "fsdp_config.optimizer_offload",
    "worker.actor.model.": MODEL,
    "worker.actor.model.model_path": MODEL + "path",
    "worker.actor.model.freeze_vision_tower": ACTOR + "freeze_vision_tower",
    "worker.actor.model.lora.target_modules": MODEL + "target_modules",
    "worker.critic.": "critic.",
    "worker.critic.model.model_path": "critic.model.path",
    "worker.ref.": "actor_rollout_ref.ref.",
    "worker.ref.fsdp.": "actor_rollout_ref.ref.fsdp_config.",
    "worker.ref.offload.": "actor_rollout_ref.ref.fsdp_config.",
    "worker.rollout.": ROLLOUT,
    "worker.rollout.tensor_parallel_size": ROLLOUT + "tensor_model_parallel_size",
    "trainer.max_steps": "trainer.total_training_steps",
    "trainer.val_freq": "trainer.test_freq",
    "trainer.save_limit": "trainer.max_actor_ckpt_to_keep",
    "trainer.save_checkpoint_path": "trainer.default_local_dir",
    "trainer.load_checkpoint_path": "trainer.resume_from_path",
    "trainer.find_last_checkpoint": "trainer.resume_mode",
    "trainer.max_try_make_batch": "algorithm.filter_groups.max_num_gen_batches",
}
_VALUES = {
    ACTOR + "loss_agg_mode": {"token": "token-mean", "seq": "seq-mean-token-mean"},
    ACTOR + "policy_loss.loss_mode": {"default": "vanilla"},
    "trainer.max_actor_ckpt_to_keep": {"-1": None},
    "algorithm.filter_groups.max_num_gen_batches": {"-1": None},
}
_OFF = {"filter_low": (0.01,), "filter_high": (0.99,), "disable_kl": (False,)}

# its options by default, then those of its examples/config.yaml, which its scripts start from
_DEFAULTS = {
    "data.rollout_batch_size": 512, "data.max_prompt_length": 512, "data.max_response_length": 512,
    "data.prompt_key": "prompt", "data.answer_key": "answer", "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_loss": False, "algorithm.kl_penalty": "kl", "algorithm.kl_coef": 1e-3,
    "worker.actor.global_batch_size": 256, "worker.actor.clip_ratio_low": 0.2,
    "worker.actor.clip_ratio_high": 0.3, "worker.actor.clip_ratio_dual": 3.0,
    "worker.actor.optim.weight_decay": 1e-2, "worker.rollout.n": 1, "trainer.total_epochs": 15,
}  # fmt: skip
_EXAMPLE = {
    "data.prompt_key": "problem", "data.max_prompt_length": 2048, "data.max_response_length": 2048,
    "data.format_prompt": "./examples/format_prompt/math.jinja",
    "algorithm.use_kl_loss": True, "algorithm.kl_penalty": "low_var_kl", "algorithm.kl_coef": 1e-2,
    "worker.actor.global_batch_size": 128, "worker.actor.model.model_path": "Qwen/Qwen2.5-7B-Instruct",
    "worker.rollout.n": 5, "trainer.val_freq": 5, "trainer.save_freq": 5, "trainer.save_limit": 3,
    "worker.reward.reward_function": "./examples/reward_function/math.py:compute_score",
}  # fmt: skip


def is_easyr1(options: Mapping[str, Any]) -> bool:
    """Return whether options are EasyR1's, by names that verl has not."""
    return any(x.startswith(("worker.actor.", "worker.rollout.", "data.rollout_batch_size")) for x in options)


def as_verl(options: Mapping[str, Any], missing: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return the options by verl's names, and notes. `missing` is the file of options that is not here."""
    example = _EXAMPLE if missing.endswith("examples/config.yaml") else {}
    whole = {**_DEFAULTS, **example, **{name: x for name, x in options.items() if x is not None}}
    notes = []
    if example:
        notes.append(f"{missing}: it is not here; the values that EasyR1 has in it are taken")

    # the KL: in the loss, or in the reward, or none
    found: dict[str, Any] = {}
    in_loss, off = is_true(whole.pop("algorithm.use_kl_loss")), is_true(whole.get("algorithm.disable_kl"))
    coefficient, penalty = whole.pop("algorithm.kl_coef"), whole.pop("algorithm.kl_penalty")
    whole.pop("algorithm.disable_kl", None)
    found[ACTOR + "use_kl_loss"], found["algorithm.use_kl_in_reward"] = (
        in_loss and not off,
        not in_loss and not off,
    )
    if in_loss and not off:
        found |= {ACTOR + "kl_loss_coef": coefficient, ACTOR + "kl_loss_type": penalty}
    elif not off:
        found |= {"algorithm.kl_ctrl.kl_coef": coefficient, "algorithm.kl_penalty": penalty}

    # prompts are texts; a reward gets dicts
    found["easyr1.prompt_key"], found["easyr1.answer_key"] = (
        whole.pop("data.prompt_key"),
        whole.pop("data.answer_key"),
    )
    if whole.get("data.format_prompt"):
        notes.append(
            f"--template: theirs is the file {whole.pop('data.format_prompt')} around the column; write its "
            f"words around {{{found['easyr1.prompt_key']}}}"
        )
    if reward := whole.pop("worker.reward.reward_function", None):
        notes.append(
            f"--reward: theirs, {reward}, takes a list of dicts, which no reward here does: math compares "
            "the answers; write a function of the columns in its place"
        )
    for name, x in whole.items():
        if x in _OFF.get(name.rpartition(".")[2], ()):
            continue
        head = max((head for head in _NAMES if name.startswith(head)), key=len, default="")
        theirs = _NAMES[head] + name.removeprefix(head) if head else name
        x = _VALUES.get(theirs, {}).get(str(x), x)
        if x is not None:
            found[theirs] = x
    return found, notes
