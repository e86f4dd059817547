"""The options of LightRFT, most of which are OpenRLHF's older names."""

from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries.rows import (
    Combined,
    Row,
    Trainer,
    choice,
    commas,
    flag,
    nothing,
    same,
    switch,
)

__all__ = ["RL", "ROWS", "combine", "pair", "script"]

_FOLDER = "trajectories.jsonl in the folder of the run has prompts, responses and rewards"
_NO_READER = "no code of that library reads it"

ROWS: dict[str, Row] = {
    # models and data
    "pretrain": same("--model"),
    "critic_pretrain": same("--critic", "of ppo.py"),
    "reward_pretrain": Row("--reward model:{x}", "a folder with a head; several rewards, each =WEIGHT"),
    "remote_rm_url": Row("--reward {x}", "docs/remote_rewards.md; a FILE.py:FN stands there too"),
    "prompt_data": same("--data"),
    "prompt_data_probs": nothing("part of the source: --data a.jsonl=0.7 b.jsonl=0.3"),
    "eval_data": same("--eval-data"),
    "max_eval_samples": same("--eval-prompts"),
    "input_key": Row("--template '{{{x}}}'", "a column of text; of messages: --messages {x}"),
    "label_key": nothing("rewards get every column by its name"),
    "reference_key": nothing("rewards get every column by its name"),
    "images_key": nothing("columns with images are detected: docs/media_data.md"),
    "input_template": same("--template", "the name of the column in braces"),
    "apply_chat_template": nothing("on where the tokenizer has a template"),
    "system_prompt": same("--system"),
    "prompt_max_len": same("--max-prompt", "longer prompts are left out"),
    "generate_max_len": same("--max-new"),
    "max_samples": nothing("--steps or --data-epochs"),
    "pretrain_data": same("--ptx-data", "of ppo.py"),
    "ptx_coef": same("--ptx", "of ppo.py"),
    "mixed_mm_data": nothing("batches with and without media mix freely"),
    "text_only": nothing("a model without towers takes none"),
    # sampling
    "engine_type": choice(vllm="--strategy.engine-type vllm", sglang="--strategy.engine-type sglang"),
    "engine_tp_size": same("--strategy.engine-tp-size"),
    "engine_mem_util": same("--strategy.engine-mem-util"),
    "enable_engine_sleep": switch("strategy.enable-engine-sleep"),
    "disable_engine_sleep": choice(true="--strategy.no-enable-engine-sleep", false=""),
    "rollout_batch_size": same("--prompts"),
    "micro_rollout_batch_size": nothing("--strategy.engine-batch is what samples at a time"),
    "n_samples_per_prompt": same("--group"),
    "temperature": same("--temperature", "divides the logits in training too"),
    "top_p": same("--top-p", "cut in training too"),
    "dynamic_sampling": choice(true="--rounds 4", false=""),
    "use_fire": nothing("the loss would take the first token for one of the usual temperature"),
    "first_token_temperature": nothing(_NO_READER),
    # the loss and the advantages
    "max_epochs": same("--epochs"),
    "value_clip": same("--value-clip", "of ppo.py"),
    "lambd": same("--gae-lambda", "of ppo.py"),
    "gamma": same("--gamma", "of ppo.py"),
    "kl_target": same("--kl-target", "of ppo.py"),
    "kl_estimator": choice("one that has the right gradient; rft_fn.loss has them", k1="", k2="", k3=""),
    "use_gspo": choice(true="--algorithm gspo", false=""),
    "use_cpg_loss": choice(true="--algorithm cpgd", false=""),
    "loss_agg_mode": choice(**{"seq-mean-token-mean": "", "token-mean": "--algorithm dapo"}),
    "high_entropy_token_ratio": nothing("rft_fn.weight has the function, for a copy of the script"),
    "advantages_norm": flag("--whiten", "of ppo.py"),
    "advantage_clip": nothing("one line in a copy of the script: adv.clamp"),
    "normalize_advantages": nothing(_NO_READER),
    "use_sequence_rewards": nothing(_NO_READER),
    "freezing_actor_steps": Row("--freeze-actor-steps {x}", "of ppo.py", {"-1": ""}),
    "save_value_network": flag("--save-critic", "of ppo.py"),
    "freeze_prefix": same("--freeze"),
    "aux_loss_coef": same("--router-aux"),
    # rewards
    "reward_running_norm": flag("--normalize-reward"),
    "reward_running_norm_minus_mean": nothing("--normalize-reward subtracts the mean"),
    "reward_clip": same("--reward-clip"),
    "overlong_buffer": nothing("--overlong greater than 0"),
    "overlong_buffer_len": same("--overlong"),
    "overlong_buffer_penalty_factor": choice("the penalty rises to 1", **{"1": "", "1.0": ""}),
    # the optimizer and the batches
    "actor_learning_rate": same("--lr"),
    "critic_learning_rate": same("--critic-lr", "of ppo.py"),
    "lr_warmup_ratio": nothing("--warmup counts rollouts"),
    "l2": same("--weight-decay", "of matrices only"),
    "max_norm": same("--max-norm"),
    "train_batch_size": same("--strategy.train-batch-size", "responses, as there"),
    "micro_train_batch_size": nothing("--budget bounds the tokens of a pack"),
    "num_episodes": same("--data-epochs"),
    "seed": same("--seed"),
    # precision, memory and processes
    "bf16": flag("--strategy.bf16"),
    "use_mp_opt": choice(true="--strategy.use-mp-opt True", false=""),
    "fsdp": flag("--strategy.fsdp"),
    "fsdp_cpu_offload": flag("--strategy.fsdp-cpu-offload"),
    "zero_stage": same("--strategy.zero-stage"),
    "adam_offload": flag("--strategy.adam-offload"),
    "sp_size": same("--strategy.sp-size"),
    "packing_samples": flag("--strategy.packing-samples"),
    "gradient_checkpointing": flag("--gradient-checkpointing"),
    "fused_linear_logprob": flag("--strategy.fused-linear-logprob"),
    "chunk_size": same("--strategy.chunk-size"),
    "flash_attn": nothing("the fastest attention that packs allow is chosen automatically"),
    "load_in_4bit": choice(true="--quantize nf4", false=""),
    "lora_rank": same("--lora-rank"),
    "lora_alpha": same("--lora-alpha"),
    "lora_dropout": nothing("a policy with dropout is not the one that sampled"),
    "target_modules": commas("--lora-targets"),
    "no_shard_vit": nothing(_NO_READER),
    "meta_init": nothing("a sharded model is always made on the meta device"),
    "enable_ema": nothing("--ema, the decay, switches it on"),
    # checkpoints and logs
    "save_path": same("--out"),
    "ckpt_path": nothing("checkpoints are in the folder of the run"),
    "save_steps": Row("--save-every {x}", "", {"-1": "--save-every 1000000"}),
    "max_ckpt_num": same("--keep"),
    "max_ckpt_mem": Row("--max-bytes {x}", "bytes; there GB", {"1e8": ""}),
    "load_checkpoint": nothing("run the same command again to resume"),
    "eval_steps": Row("--eval-every {x}", "", {"-1": "--eval-every 1000000"}),
    "save_trajectories": nothing(_FOLDER),
    "num_trajectories_to_save": nothing(_FOLDER),
    "log_dir": same("--strategy.log-dir"),
    "plot_every": same("--strategy.plot-every"),
    "use_wandb": choice("the key comes from wandb's own login", **{"false": "", "*": "--trackers wandb"}),
    "wandb_project": same("--project"),
    "wandb_run_name": same("--run-name"),
    "use_tensorboard": Row("--trackers tensorboard --strategy.log-dir {x}", ""),
    "logging_steps": nothing("every step is logged"),
    "rm_use_engine": nothing("judge:FOLDER asks an engine, model:FOLDER does not need one"),
    "rm_engine_cudagraph": nothing(_NO_READER),
}

DEFAULTS = {
    "actor_learning_rate": 1e-6,
    "eps_clip": 0.2,
    "rollout_batch_size": 512,
    "train_batch_size": 128,
    "generate_max_len": 1024,
    "prompt_max_len": 1024,
    "n_samples_per_prompt": 1,
    "init_kl_coef": 0.01,
    "zero_stage": 2,
    "advantage_estimator": "gae",
}

ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce",
    "reinforce++": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "cpgd": "cpgd",
}


def combine(options: Mapping[str, Any]) -> Combined:
    """The algorithm, where the KL belongs, and pairs of numbers, by the older names."""
    used = {"advantage_estimator", "init_kl_coef", "use_kl_loss", "eps_clip", "eps_clip_low_high"}
    used |= {"policy_loss_type", "adam_betas", "reward_clip_range"}
    arguments, notes = [], []

    # the loss of GSPO has a row, every other one is decided by the estimator
    row = ESTIMATORS.get(str(options["advantage_estimator"]).lower())
    if str(options.get("policy_loss_type", "")).lower() == "gspo":
        row = "gspo"
    if row is None:
        notes.append(f"advantage_estimator={options['advantage_estimator']}: no row of the table")
    else:
        arguments.append(f"--algorithm {row}")

    # one coefficient there, in the loss or in the reward; ppo.py has it in the reward
    ours = "--kl-in-reward"
    if script(options) == "ppo" or str(options.get("use_kl_loss", False)).lower() == "true":
        ours = "--kl"
    arguments.append(f"{ours} {options['init_kl_coef']}")

    # pairs of numbers
    limits = pair(options.get("eps_clip_low_high"))
    if not limits and "eps_clip" in options:
        limits = [options["eps_clip"]] * 2
    arguments += [f"{name} {x}" for name, x in zip(("--clip-low", "--clip-high"), limits)]
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), pair(options.get("adam_betas")))]
    bounds = pair(options.get("reward_clip_range"))
    if bounds and float(bounds[0]) == -float(bounds[1]):
        arguments.append(f"--reward-clip {bounds[1]}")
    elif bounds:
        notes.append(f"reward_clip_range={bounds}: --reward-clip is the same on both sides")
    return Combined(arguments, used, notes)


def pair(value: Any) -> list[Any]:
    """The two numbers of a list, or of a text; none of None."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return list(value)


def script(options: Mapping[str, Any]) -> str:
    """ppo.py where there is a critic, else grpo.py."""
    if str(options["advantage_estimator"]).lower() == "gae":
        return "ppo"
    return "grpo"


RL = Trainer(ROWS, DEFAULTS, combine, script, {}, ("train_colocate",))
