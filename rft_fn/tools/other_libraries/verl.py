"""The options of verl's ppo_trainer, by their dotted names."""

from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries.rows import Combined, Row, Trainer, choice, commas, nothing, same, switch

__all__ = ["RL", "ROWS"]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_BUDGET = "--budget bounds the tokens of a pack; the gradient does not depend on it"
_PACKED = "packs are always without padding"
_FUSED = "the fused head is on by default"

ROWS: dict[str, Row] = {
    # the model
    MODEL + "path": same("--model"),
    MODEL + "enable_gradient_checkpointing": switch("gradient-checkpointing"),
    MODEL + "lora_rank": same("--lora-rank"),
    MODEL + "lora_alpha": same("--lora-alpha"),
    MODEL + "target_modules": commas("--lora-targets"),
    MODEL + "use_remove_padding": nothing(_PACKED),
    MODEL + "use_fused_kernels": nothing(_FUSED),
    MODEL + "use_liger": nothing(_FUSED),
    MODEL + "trust_remote_code": nothing("the scripts run no code of a model's folder"),
    # the data
    "data.train_files": same("--data"),
    "data.val_files": same("--eval-data"),
    "data.train_batch_size": same("--prompts"),
    "data.max_prompt_length": same("--max-prompt", "longer prompts are left out"),
    "data.max_response_length": same("--max-new"),
    "data.prompt_key": same("--messages", "a column of messages; of text: --template '{prompt}'"),
    "data.seed": same("--seed"),
    "data.shuffle": nothing("rows are always drawn in an order that the seed and the step decide"),
    "data.filter_overlong_prompts": nothing("prompts over --max-prompt are always left out"),
    "data.truncation": nothing("prompts are never cut"),
    "data.reward_fn_key": nothing("rewards get every column; reward.by_column routes by one"),
    "data.image_key": nothing("columns with images are detected: docs/media_data.md"),
    # sampling
    ROLLOUT + "name": choice(
        vllm="--strategy.engine-type vllm",
        hf="--strategy.engine-type hf",
        sglang="--strategy.engine-type sglang",
    ),
    ROLLOUT + "n": same("--group"),
    ROLLOUT + "temperature": same("--temperature", "divides the logits in training too"),
    ROLLOUT + "top_p": same("--top-p", "cut in training too"),
    ROLLOUT + "top_k": choice("Sampling(top_k=...) has it, in a copy of the script", **{"-1": "", "0": ""}),
    ROLLOUT + "tensor_model_parallel_size": same("--strategy.engine-tp-size"),
    ROLLOUT + "gpu_memory_utilization": same("--strategy.engine-mem-util"),
    ROLLOUT + "max_model_len": same("--strategy.engine-max-model-len"),
    ROLLOUT + "max_num_seqs": same("--strategy.engine-batch"),
    ROLLOUT + "dtype": same("--strategy.engine-dtype"),
    ROLLOUT + "free_cache_engine": switch("strategy.enable-engine-sleep"),
    ROLLOUT + "response_length": same("--max-new"),
    ROLLOUT + "prompt_length": same("--max-prompt"),
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": nothing(_BUDGET),
    ROLLOUT + "log_prob_micro_batch_size": nothing(_BUDGET),
    ROLLOUT + "log_prob_max_token_len_per_gpu": nothing(_BUDGET),
    ROLLOUT + "log_prob_use_dynamic_bsz": nothing(_PACKED),
    ROLLOUT + "calculate_log_probs": nothing(
        "the sampler's log-probs are always compared with the trainer's"
    ),
    ROLLOUT + "multi_turn.enable": nothing("multi_turn.py"),
    # the actor
    ACTOR + "strategy": choice(fsdp="--strategy.fsdp", fsdp2="--strategy.fsdp"),
    ACTOR + "optim.lr": same("--lr"),
    ACTOR + "optim.lr_warmup_steps": Row("--warmup {x}", "counts rollouts", {"-1": ""}),
    ACTOR + "optim.lr_warmup_steps_ratio": nothing("--warmup counts rollouts"),
    ACTOR + "optim.weight_decay": same("--weight-decay", "of matrices only"),
    ACTOR + "optim.clip_grad": same("--max-norm"),
    ACTOR + "optim.min_lr_ratio": same("--lr-end"),
    ACTOR + "optim.lr_scheduler_type": choice(constant="--schedule constant", cosine="--schedule cosine"),
    ACTOR + "optim.warmup_style": choice(constant="--schedule constant", cosine="--schedule cosine"),
    ACTOR + "ppo_epochs": same("--epochs"),
    ACTOR + "ppo_max_token_len_per_gpu": same("--budget"),
    ACTOR + "ppo_micro_batch_size_per_gpu": nothing(_BUDGET),
    ACTOR + "ppo_micro_batch_size": nothing(_BUDGET),
    ACTOR + "use_dynamic_bsz": nothing(_PACKED),
    ACTOR + "clip_ratio": same("--clip-low", "and --clip-high, unless clip_ratio_high is set"),
    ACTOR + "clip_ratio_low": same("--clip-low"),
    ACTOR + "clip_ratio_high": same("--clip-high"),
    ACTOR + "clip_ratio_c": same("--dual"),
    ACTOR + "grad_clip": same("--max-norm"),
    ACTOR + "entropy_coeff": Row(
        "--entropy {x}", "of ppo.py; in grpo.py add it to the loss", {"0": "", "0.0": ""}
    ),
    ACTOR + "use_kl_loss": nothing("--kl greater than 0"),
    ACTOR + "kl_loss_type": choice(
        "the value of k3 with the gradient of the reverse KL; rft_fn.loss has k1, k2 and k3", low_var_kl=""
    ),
    ACTOR + "ulysses_sequence_parallel_size": same("--strategy.sp-size"),
    ACTOR + "fsdp_config.param_offload": switch("strategy.fsdp-cpu-offload"),
    ACTOR + "fsdp_config.optimizer_offload": switch("strategy.adam-offload"),
    ACTOR + "fsdp_config.fsdp_size": Row("--strategy.shard-size {x}", "", {"-1": ""}),
    ACTOR + "use_torch_compile": nothing("no counterpart in verl's sense: the fused head compiles by itself"),
    "critic.optim.lr": same("--critic-lr", "of ppo.py"),
    "critic.model.path": same("--critic", "of ppo.py"),
    "critic.cliprange_value": same("--value-clip", "of ppo.py"),
    # the algorithm
    "algorithm.gamma": same("--gamma", "of ppo.py"),
    "algorithm.lam": same("--gae-lambda", "of ppo.py"),
    "algorithm.use_kl_in_reward": nothing("--kl-in-reward greater than 0"),
    "algorithm.kl_ctrl.target_kl": same("--kl-target", "of ppo.py"),
    "algorithm.kl_ctrl.horizon": same("--kl-horizon", "of ppo.py"),
    "algorithm.filter_groups.enable": choice(true="--rounds 4", false=""),
    "algorithm.filter_groups.max_num_gen_batches": same("--rounds"),
    # rewards
    "custom_reward_function.path": nothing("--reward FILE.py:FN; the function takes lists, as TRL's do"),
    "custom_reward_function.name": nothing("--reward FILE.py:FN"),
    "reward_model.enable": nothing("--reward model:FOLDER"),
    "reward_model.model.path": Row("--reward model:{x}", "a folder with a head"),
    "reward_model.overlong_buffer.len": same("--overlong"),
    # the course of the run
    "trainer.total_epochs": same("--data-epochs"),
    "trainer.total_training_steps": same("--steps"),
    "trainer.save_freq": Row("--save-every {x}", "", {"-1": "--save-every 1000000"}),
    "trainer.test_freq": Row("--eval-every {x}", "", {"-1": "--eval-every 1000000"}),
    "trainer.project_name": same("--project"),
    "trainer.experiment_name": same("--run-name"),
    "trainer.default_local_dir": same("--out"),
    "trainer.max_actor_ckpt_to_keep": same("--keep"),
    "trainer.logger": nothing("--trackers wandb, tensorboard or trackio; files are always written"),
    "trainer.n_gpus_per_node": nothing("torchrun --nproc-per-node"),
    "trainer.nnodes": nothing("torchrun --nnodes"),
    "trainer.val_before_train": nothing("the first evaluation is always before the first step"),
    "trainer.critic_warmup": same("--freeze-actor-steps", "of ppo.py"),
    "trainer.resume_mode": nothing("run the same command again to resume"),
}

DEFAULTS = {
    ACTOR + "optim.lr": 1e-6,
    ACTOR + "optim.lr_scheduler_type": "constant",
    ACTOR + "optim.weight_decay": 0.01,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "clip_ratio": 0.2,
    ACTOR + "clip_ratio_c": 3.0,
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    ROLLOUT + "n": 1,
    "algorithm.adv_estimator": "gae",
}

ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "opo": "opo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
MEANS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
LOSSES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo"}


def _algorithm(options: Mapping[str, Any]) -> Combined:
    """The row of the table, out of an estimator, a loss and an aggregation."""
    estimator = str(options["algorithm.adv_estimator"]).lower()
    loss = str(options.get(ACTOR + "policy_loss.loss_mode", "vanilla"))
    mean = str(options.get(ACTOR + "loss_agg_mode", "token-mean"))
    used = {"algorithm.adv_estimator", ACTOR + "policy_loss.loss_mode", ACTOR + "loss_agg_mode"}
    used |= {"algorithm.norm_adv_by_std_in_grpo"}
    arguments, notes = [], []

    # of GRPO we have a row for each way to average, others have one way
    row = LOSSES.get(loss, ESTIMATORS.get(estimator))
    if row == "grpo":
        row = MEANS.get(mean)
    if row is None:
        notes.append(
            f"{estimator} with {mean}: no row of the table; rft_fn.advantage and weight have the parts"
        )
    else:
        arguments.append(f"--algorithm {row}")
    if loss not in {"vanilla", *LOSSES}:
        notes.append(f"loss_mode={loss}: no row of the table; rft_fn.weight and rft_fn.loss have the parts")

    # Dr. GRPO leaves out both deviations: of rewards, and of lengths
    scaled = str(options.get("algorithm.norm_adv_by_std_in_grpo", True)).lower() == "true"
    if estimator == "grpo" and scaled == (row == "dr_grpo"):
        notes.append(
            f"norm_adv_by_std_in_grpo={scaled}: advantage.grpo(reward, scale=...) in a copy of grpo.py"
        )
    return Combined(arguments, used, notes)


def _combine(options: Mapping[str, Any]) -> Combined:
    """The algorithm, the size of an update, and coefficients that have a switch."""
    arguments, used, notes = _algorithm(options)

    # an update is over prompts there, over responses here
    name, group = ACTOR + "ppo_mini_batch_size", int(options[ROLLOUT + "n"])
    used |= {name}
    if int(options[name]) < int(options["data.train_batch_size"]):
        arguments.append(f"--strategy.train-batch-size {int(options[name]) * group}")

    # a coefficient counts only where its switch is on
    switches = (
        (ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", "--kl", 0.001),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "--kl-in-reward", 0.001),
    )
    for on, coefficient, ours, usual in switches:
        used |= {coefficient}
        if str(options.get(on, False)).lower() == "true":
            used |= {on}
            arguments.append(f"{ours} {options.get(coefficient, usual)}")

    # one limit of theirs is both of ours
    if ACTOR + "clip_ratio" in options and ACTOR + "clip_ratio_high" not in options:
        arguments.append(f"--clip-high {options[ACTOR + 'clip_ratio']}")
    return Combined(arguments, used, notes)


def _script(options: Mapping[str, Any]) -> str:
    if str(options["algorithm.adv_estimator"]).lower() == "gae":
        return "ppo"
    return "grpo"


SECTIONS = {
    "actor_rollout_ref.ref.": "the reference is the initial model, scored with the packs of the policy",
    "ray_kwargs.": "there is no Ray: torchrun starts the processes",
    "actor_rollout_ref.rollout.agent.": "multi_turn.py and rft_fn.environment",
    "global_profiler.": "timing.jsonl has the seconds of each phase",
}

RL = Trainer(
    ROWS,
    DEFAULTS,
    _combine,
    _script,
    SECTIONS,
    ("main_ppo", "main_dapo"),
    ("actor_rollout_ref.", "algorithm.", "critic.", "reward_model.", "custom_reward_function."),
)
