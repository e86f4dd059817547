"""Options of verl 0.7 by their dotted names: ppo_trainer, sft_trainer and the older fsdp_sft_trainer."""

from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries import objectives
from rft_fn.tools.other_libraries import rows as r

__all__ = ["LIBRARY", "TABLE"]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_UNPADDED = r.nothing("packs are always without padding")
_MICRO = r.nothing(r.BUDGET)
_SHARE = r.nothing("--warmup counts steps")
_FIELD = r.nothing("part of --template or --response, as '{COLUMN[KEY]}'")

_REFERENCE = "the reference is the initial model, scored with the packs of the policy"

TABLE: r.Table = {
    "all": {
        "data.train_files": r.same("--data"),
        "data.val_files": r.by_kind(rl=r.same("--eval-data"), sft=r.UNEVALUATED),
        "data.train_batch_size": r.by_kind(
            rl=r.same("--prompts", remark="prompts per step"), sft=r.same("--batch")
        ),
        "data.prompt_key": r.by_kind(
            rl=r.same("--messages", "a column of messages; of text: --template '{prompt}'"),
            sft=r.Row("--template '{{{x}}}'", "a column of text; of messages: --messages"),
            hint=r.COLUMN,
        ),
        "data.shuffle": r.ORDER,
        "data.truncation": r.by_kind(
            rl=r.nothing("prompts are never cut"),
            sft=r.nothing("nothing is cut: longer examples are refused"),
            hint=r.Flag("max_prompt", "longer prompts are left out, none is cut"),
        ),
        "trainer.total_epochs": r.by_kind(
            rl=r.same("--data-epochs"), sft=r.same("--epochs"), hint=r.DATA_EPOCHS
        ),
        "trainer.total_training_steps": r.same("--steps"),
        "trainer.save_freq": r.SAVE_EVERY,
        "trainer.test_freq": r.by_kind(rl=r.EVAL_EVERY, sft=r.UNEVALUATED),
        "trainer.project_name": r.same("--project"),
        "trainer.experiment_name": r.same("--run-name"),
        "trainer.default_local_dir": r.same("--out"),
        "trainer.logger": r.nothing(
            "--trackers wandb, tensorboard or trackio; files are always written", r.Flag("trackers")
        ),
        "trainer.n_gpus_per_node": r.nothing("torchrun --nproc-per-node", r.PROCESSES),
        "trainer.nnodes": r.nothing("torchrun --nnodes", r.PROCESSES),
        "trainer.resume_mode": r.RESUMED,
    },
    "rl": {
        "data.max_prompt_length": r.same(
            "--max-prompt", "longer prompts are left out", remark="counted in tokens"
        ),
        "data.max_response_length": r.same("--max-new", remark="counted in tokens"),
        "data.seed": r.same("--seed"),
        "data.filter_overlong_prompts": r.nothing(
            "prompts over --max-prompt are always left out",
            r.Flag("max_prompt", "longer prompts are always left out"),
        ),
        "data.reward_fn_key": r.nothing("rewards get every column; reward.by_column routes by one", r.ANSWER),
        "data.image_key": r.nothing("columns with images are detected: docs/data.md"),
        "critic.optim.lr": r.same("--critic-lr", "of ppo.py"),
        "critic.model.path": r.same("--critic", "of ppo.py"),
        "critic.cliprange_value": r.same("--value-clip", "of ppo.py"),
        "algorithm.gamma": r.same("--gamma", "of ppo.py"),
        "algorithm.lam": r.same("--gae-lambda", "of ppo.py"),
        "algorithm.use_kl_in_reward": r.nothing("--kl-in-reward greater than 0", r.KL_IN_REWARD),
        "algorithm.kl_ctrl.target_kl": r.same("--kl-target", "of ppo.py"),
        "algorithm.kl_ctrl.horizon": r.same("--kl-horizon", "of ppo.py"),
        "algorithm.filter_groups.enable": r.choice(true="--rounds 4", false=""),
        "algorithm.filter_groups.max_num_gen_batches": r.same("--rounds"),
        "custom_reward_function.path": r.nothing(
            "--reward FILE.py:FN; the function takes lists, as TRL's do", r.REWARD_FILE
        ),
        "custom_reward_function.name": r.nothing("--reward FILE.py:FN", r.REWARD_FILE),
        "reward_model.enable": r.nothing("--reward model:FOLDER"),
        "reward_model.model.path": r.Row("--reward model:{x}", "a folder with a head", hint=r.REWARD_MODEL),
        "reward_model.overlong_buffer.len": r.same("--overlong"),
        "trainer.max_actor_ckpt_to_keep": r.same("--keep"),
        "trainer.val_before_train": r.nothing(
            "the first evaluation is always before the first step", "step 0 always has an evaluation"
        ),
        "trainer.critic_warmup": r.same("--freeze-actor-steps", "of ppo.py"),
    },
    f"rl {MODEL}": {
        "path": r.same("--model"),
        "enable_gradient_checkpointing": r.switch("gradient-checkpointing"),
        "lora_rank": r.same("--lora-rank", remark="0 trains all weights"),
        "lora_alpha": r.same("--lora-alpha"),
        "target_modules": r.commas("--lora-targets"),
        "use_remove_padding": r.nothing("packs are always without padding", r.Flag("packing_samples")),
        "use_fused_kernels": r.nothing("the fused head is on by default", r.Flag("fused_linear_logprob")),
        "use_liger": r.FUSED,
        "trust_remote_code": r.UNTRUSTED,
    },
    f"rl {ROLLOUT}": {
        "name": r.choice(
            vllm="--strategy.engine-type vllm",
            hf="--strategy.engine-type hf",
            sglang="--strategy.engine-type sglang",
        ),
        "n": r.same("--group"),
        "temperature": r.same("--temperature", "divides the logits in training too"),
        "top_p": r.same("--top-p", "cut in training too"),
        "top_k": r.choice(
            "Sampling(top_k=...) has it, in a copy of the script",
            **{"-1": "", "0": ""},
            hint=r.Flag("top_p", "the only cut of the distribution"),
        ),
        "tensor_model_parallel_size": r.same("--strategy.engine-tp-size"),
        "gpu_memory_utilization": r.same("--strategy.engine-mem-util"),
        "max_model_len": r.same("--strategy.engine-max-model-len"),
        "max_num_seqs": r.same("--strategy.engine-batch"),
        "dtype": r.same("--strategy.engine-dtype"),
        "free_cache_engine": r.switch("strategy.enable-engine-sleep"),
        "response_length": r.same("--max-new", remark="counted in tokens"),
        "prompt_length": r.same("--max-prompt", remark="counted in tokens"),
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size": _MICRO,
        "log_prob_max_token_len_per_gpu": _MICRO,
        "log_prob_use_dynamic_bsz": _UNPADDED,
        "calculate_log_probs": r.nothing("the sampler's log-probs are always compared with the trainer's"),
        "multi_turn.enable": r.nothing("multi_turn.py"),
    },
    f"rl {ACTOR}": {
        "strategy": r.choice(
            fsdp="--strategy.fsdp", fsdp2="--strategy.fsdp", remark="on by itself with several processes"
        ),
        "optim.lr": r.same("--lr"),
        "optim.lr_warmup_steps": r.Row("--warmup {x}", "counts rollouts", {"-1": ""}),
        "optim.lr_warmup_steps_ratio": r.nothing("--warmup counts rollouts", r.WARMUP),
        "optim.weight_decay": r.same("--weight-decay", "of matrices only"),
        "optim.clip_grad": r.same("--max-norm"),
        "optim.min_lr_ratio": r.same("--lr-end"),
        "optim.lr_scheduler_type": r.choice(constant="--schedule constant", cosine="--schedule cosine"),
        "optim.warmup_style": r.choice(constant="--schedule constant", cosine="--schedule cosine"),
        "ppo_epochs": r.same("--epochs", hint=r.ROLLOUT_EPOCHS),
        "ppo_max_token_len_per_gpu": r.same("--budget"),
        "ppo_micro_batch_size_per_gpu": r.nothing(
            r.BUDGET, r.Flag("micro_train_batch_size", "max sequences per pack")
        ),
        "ppo_micro_batch_size": _MICRO,
        "use_dynamic_bsz": r.nothing(
            "packs are always without padding", r.Flag("budget", "packs are always filled by tokens")
        ),
        "clip_ratio": r.same("--clip-low", "and --clip-high, unless clip_ratio_high is set", hint=r.CLIP),
        "clip_ratio_low": r.same("--clip-low"),
        "clip_ratio_high": r.same("--clip-high"),
        "clip_ratio_c": r.same("--dual"),
        "grad_clip": r.same("--max-norm"),
        "entropy_coeff": r.Row(
            "--entropy {x}", "of ppo.py; in grpo.py add it to the loss", {"0": "", "0.0": ""}
        ),
        "use_kl_loss": r.nothing("--kl greater than 0", r.KL_IN_LOSS),
        "kl_loss_type": r.choice(
            "the value of k3 with the gradient of the reverse KL; rft_fn.loss has k1, k2 and k3",
            low_var_kl="",
        ),
        "ulysses_sequence_parallel_size": r.same("--strategy.sp-size"),
        "fsdp_config.param_offload": r.switch("strategy.fsdp-cpu-offload"),
        "fsdp_config.optimizer_offload": r.switch("strategy.adam-offload"),
        "fsdp_config.fsdp_size": r.Row("--strategy.shard-size {x}", values={"-1": ""}),
        "use_torch_compile": r.nothing("no counterpart in verl's sense: the fused head compiles by itself"),
    },
    "sft": {
        "model.partial_pretrain model.path": r.same("--model"),
        "model.enable_gradient_checkpointing": r.switch("gradient-checkpointing"),
        "model.lora_rank": r.same("--lora-rank"),
        "model.lora_alpha": r.same("--lora-alpha"),
        "model.target_modules": r.commas("--lora-targets"),
        "model.use_liger": r.FUSED,
        "model.use_remove_padding use_remove_padding data.pad_mode": _UNPADDED,
        "model.trust_remote_code": r.UNTRUSTED,
        "model.strategy": r.choice(fsdp="--strategy.fsdp", fsdp2="--strategy.fsdp"),
        "model.fsdp_config.cpu_offload": r.flag("--strategy.fsdp-cpu-offload"),
        "ulysses_sequence_parallel_size": r.same("--strategy.sp-size"),
        "engine.ulysses_sequence_parallel_size": r.same("--strategy.sp-size"),
        "engine.param_offload": r.flag("--strategy.fsdp-cpu-offload"),
        "engine.optimizer_offload": r.flag("--strategy.adam-offload"),
        "data.response_key": r.Row("--response '{{{x}}}'", "a column of text; of messages: --messages"),
        "data.prompt_dict_keys data.response_dict_keys": _FIELD,
        "data.multiturn.enable": r.choice("--messages takes the columns of messages", true="", false=""),
        "data.multiturn.messages_key data.messages_key": r.same("--messages"),
        "data.max_length": r.Row(
            "--budget {x} --max-prompt {x}",
            "longer examples are refused, not cut",
            hint=r.Flag("budget", needs="response"),
        ),
        "data.max_token_len_per_gpu": r.same("--budget", "an example has to fit"),
        "data.micro_batch_size data.micro_batch_size_per_gpu": _MICRO,
        "data.use_dynamic_bsz": r.nothing("packs are always filled by tokens"),
        "data.balance_dp_token": r.nothing("packs are always shared out evenly"),
        "optim.lr": r.same("--lr"),
        "optim.betas": r.Row("--beta1 {x} --beta2 {x}", "one number each"),
        "optim.weight_decay": r.same("--weight-decay", "of matrices only"),
        "optim.clip_grad": r.same("--max-norm"),
        "optim.lr_warmup_steps": r.same("--warmup"),
        "optim.warmup_steps_ratio optim.lr_warmup_steps_ratio": _SHARE,
        "optim.min_lr_ratio": r.same("--lr-end"),
        "optim.lr_scheduler": r.choice(cosine="--schedule cosine", constant="--schedule constant"),
        "optim.lr_scheduler_type": r.choice(cosine="--schedule cosine", constant="--schedule constant"),
        "trainer.seed": r.same("--seed"),
        "trainer.max_ckpt_to_keep": r.same("--keep"),
    },
    "": {
        "algorithm.adv_estimator": r.only(
            r.Flag("algorithm", "a row of rft_fn.algorithm.TABLE; gae is in ppo.py")
        ),
        "algorithm.norm_adv_by_std_in_grpo": r.only(
            r.Flag("algorithm", "grpo divides by the deviation, dr_grpo does not")
        ),
        "algorithm.kl_ctrl.kl_coef": r.only(r.KL_IN_REWARD),
    },
    f" {ACTOR}": {
        "optim.total_training_steps": r.only(r.Flag("steps")),
        "ppo_mini_batch_size": r.only(
            r.Flag("train_batch_size", "counted in responses: prompts times --group", needs="group")
        ),
        "kl_loss_coef": r.only(r.KL_IN_LOSS),
        "loss_agg_mode policy_loss.loss_mode": r.only(r.ALGORITHM),
    },
}

# ------------------------------------------------------------------------------ options that count together


def _rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return the algorithm, the size of an update, and coefficients that have a switch."""
    objective = objectives.verl(options)
    arguments, notes = [*objective.arguments], [*objective.notes]
    used = objective.used | {ACTOR + "ppo_mini_batch_size"}

    # an update is over prompts there, over responses here
    update, group = int(options[ACTOR + "ppo_mini_batch_size"]), int(options[ROLLOUT + "n"])
    if update < int(options["data.train_batch_size"]):
        arguments.append(f"--strategy.train-batch-size {update * group}")

    # a coefficient counts only where its switch is on
    switches = (
        (ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", "--kl"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "--kl-in-reward"),
    )
    for on, coefficient, ours in switches:
        used |= {coefficient}
        if str(options.get(on, False)).lower() == "true":
            used |= {on}
            arguments.append(f"{ours} {options.get(coefficient, 0.001)}")
    return r.Combined(arguments, used, notes)


def _examples(options: Mapping[str, Any]) -> r.Combined:
    """Return the columns of an example, its limit, and pairs of numbers."""
    arguments, notes = [], []
    used = {"data.multiturn.messages_key", "data.messages_key", "data.prompt_key", "data.response_key"}
    used |= {"data.prompt_dict_keys", "data.response_dict_keys", "data.max_length", "optim.betas"}

    # messages, or a prompt and a response that may lie in a field of an object
    messages = options.get("data.messages_key")
    if str(options.get("data.multiturn.enable", False)).lower() == "true":
        messages = options.get("data.multiturn.messages_key", "messages")
    if messages:
        arguments.append(f"--messages {messages}")
    for ours, side in (("--template", "prompt"), ("--response", "response")):
        column = options.get(f"data.{side}_key")
        if column and not messages:
            keys = [f"[{key}]" for key in _items(options.get(f"data.{side}_dict_keys"))]
            arguments.append(f"{ours} '{{{column}{''.join(keys)}}}'")

    # a pack must hold an example
    length = int(options["data.max_length"])
    budget = max(length, int(options.get("data.max_token_len_per_gpu") or 0))
    arguments += [f"--max-prompt {length}", f"--budget {budget}"]
    used |= {"data.max_token_len_per_gpu"}
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), _items(options["optim.betas"]))]

    # a number of steps counts more than one of passes
    if options.get("trainer.total_training_steps"):
        used |= {"trainer.total_epochs"}
    if not messages and "data.prompt_key" not in options:
        notes.append("--messages NAMES, or --template and --response: the columns of the data")
    return r.Combined(arguments, used, notes)


def _items(value: Any) -> list[str]:
    """Return the items of a list, or of one written as a text: "['a', 'b']"."""
    if value is None:
        return []
    if isinstance(value, str):
        value = value.strip("[]() ").replace(",", " ").split()
    return [str(x).strip("'\"") for x in value]


LIBRARY = r.Library(
    "verl",
    {
        "sft": r.Trainer(
            rows=r.rows_of(TABLE, "sft"),
            defaults={
                "data.train_batch_size": 256,
                "data.max_length": 1024,
                "optim.lr": 1e-5,
                "optim.betas": [0.9, 0.95],
                "optim.weight_decay": 0.01,
                "optim.lr_scheduler": "cosine",
                "optim.min_lr_ratio": 0.0,
                "trainer.total_epochs": 4,
            },
            combine=_examples,
            script=lambda options: "sft",
            sections={"checkpoint.": "a checkpoint always has everything that a run needs"},
            programs=("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray"),
            tells=("model.", "optim.", "engine."),
        ),
        "rl": r.Trainer(
            rows=r.rows_of(TABLE, "rl"),
            defaults={
                ACTOR + "optim.lr": 1e-6,
                ACTOR + "optim.lr_scheduler_type": "constant",
                ACTOR + "optim.weight_decay": 0.01,
                ACTOR + "ppo_mini_batch_size": 256,
                "data.train_batch_size": 1024,
                "data.max_response_length": 512,
                ROLLOUT + "n": 1,
                "algorithm.adv_estimator": "gae",
            },
            combine=_rollouts,
            script=lambda o: "ppo" if str(o["algorithm.adv_estimator"]).lower() == "gae" else "grpo",
            sections={
                "actor_rollout_ref.ref.": _REFERENCE,
                "ray_kwargs.": "there is no Ray: torchrun starts the processes",
                "actor_rollout_ref.rollout.agent.": "multi_turn.py and rft_fn.environment",
                "global_profiler.": "timing.jsonl has the seconds of each phase",
            },
            programs=("main_ppo", "main_dapo"),
            tells=("actor_rollout_ref.", "algorithm.", "critic.", "reward_model.", "custom_reward_function."),
        ),
    },
)
