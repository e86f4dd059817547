"""Options of verl 0.7 by their dotted names: ppo_trainer, sft_trainer and the older fsdp_sft_trainer."""

from rft_fn.migrate import rows as r
from rft_fn.migrate import shared_rows

__all__ = ["ACTOR", "MODEL", "ROLLOUT", "TABLE"]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_UNPADDED = r.nothing("packs are always without padding")
_MICRO = r.nothing(shared_rows.BUDGET)
_UNNEEDED = r.nothing("rows are read as they are drawn, there is no loader")
_FIELD = r.nothing("part of --template or --response, as '{COLUMN[KEY]}'")


TABLE: r.Table = {
    "all": {
        "data.train_files": r.same("--data"),
        "data.val_files": r.by_kind(rl=r.same("--eval-data"), sft=shared_rows.UNEVALUATED),
        "data.train_batch_size": r.by_kind(
            rl=r.same("--prompts", remark="prompts per step"), sft=r.same("--batch")
        ),
        "data.prompt_key": r.by_kind(
            rl=r.same("--messages", "a column of messages; of text: --template '{prompt}'"),
            sft=r.Row("--template '{{{x}}}'", "a column of text; of messages: --messages"),
            hint=shared_rows.COLUMN,
        ),
        "data.shuffle": shared_rows.ORDER,
        "data.truncation": r.by_kind(
            rl=r.nothing("prompts are never cut"),
            sft=r.nothing("nothing is cut: longer examples are refused"),
            hint=r.Flag("max_prompt", "longer prompts are left out, none is cut"),
        ),
        "trainer.total_epochs": r.by_kind(
            rl=r.same("--data-epochs"), sft=r.same("--epochs"), hint=shared_rows.DATA_EPOCHS
        ),
        "trainer.total_training_steps": r.same("--steps"),
        "trainer.save_freq": shared_rows.SAVE_EVERY,
        "trainer.test_freq": r.by_kind(rl=shared_rows.EVAL_EVERY, sft=shared_rows.UNEVALUATED),
        "trainer.project_name": r.same("--project"),
        "trainer.experiment_name": r.same("--run-name"),
        "trainer.default_local_dir": r.same("--out"),
        "trainer.logger": shared_rows.TRACKERS,
        "trainer.n_gpus_per_node": r.nothing("torchrun --nproc-per-node", shared_rows.PROCESSES),
        "trainer.nnodes": r.nothing("torchrun --nnodes", shared_rows.PROCESSES),
        "trainer.resume_mode trainer.resume_from_path": shared_rows.RESUMED,
        "trainer.device": r.nothing("a GPU where there is one"),
        "data.val_batch_size": r.nothing(shared_rows.BUDGET),
        "data.train_max_samples": r.lacks("a file of these rows; all of --data are drawn", "-1"),
        "data.val_max_samples": r.nothing("an evaluation has a number of rows of its own"),
        "data.trust_remote_code": shared_rows.UNTRUSTED,
        "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt": _UNNEEDED,
        "data.return_multi_modal_inputs data.filter_overlong_prompts_workers": _UNNEEDED,
        "data.dataloader_num_workers data.use_shm": _UNNEEDED,
        "data.apply_chat_template_kwargs": r.lacks("--chat-template-kwargs NAME=VALUE"),
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
        "data.reward_fn_key": r.nothing(
            "rewards get every column; reward.by_column routes by one", shared_rows.ANSWER
        ),
        "data.image_key": r.nothing("columns with images are detected: docs/data.md"),
        "critic.optim.lr": r.same("--critic-lr", "of ppo.py"),
        "critic.model.path": r.same("--critic", "of ppo.py"),
        "critic.cliprange_value": r.same("--value-clip", "of ppo.py"),
        "algorithm.gamma": r.same("--gamma", "of ppo.py"),
        "algorithm.lam": r.same("--gae-lambda", "of ppo.py"),
        "algorithm.use_kl_in_reward": r.nothing("--kl-in-reward greater than 0", shared_rows.KL_IN_REWARD),
        "algorithm.kl_ctrl.target_kl": r.same("--kl-target", "of ppo.py"),
        "algorithm.kl_ctrl.horizon": r.same("--kl-horizon", "of ppo.py"),
        "algorithm.filter_groups.enable": r.choice(true="--rounds 4", false=""),
        "algorithm.filter_groups.max_num_gen_batches": r.same("--rounds"),
        "custom_reward_function.path": r.Row(
            "--reward verl:{x}:compute_score",
            "with the name and the reward_kwargs",
            hint=shared_rows.REWARD_FILE,
        ),
        "custom_reward_function.name": r.nothing(
            "part of --reward verl:FILE.py:NAME", shared_rows.REWARD_FILE
        ),
        "reward_model.enable": r.nothing("--reward model:FOLDER"),
        "reward_model.model.path": r.Row(
            "--reward model:{x}",
            "a folder with a head, where reward_model.enable is on",
            hint=shared_rows.REWARD_MODEL,
        ),
        "reward_model.overlong_buffer.len": r.same("--overlong", "where it is enabled"),
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": r.same("--overlong", "where it is enabled"),
        "reward_model.reward_manager reward.reward_manager.name reward_manager.name": r.choice(
            "another manager computes another reward: write it as --reward",
            **dict.fromkeys(("naive", "batch", "dapo", "prime"), ""),
        ),
        "trainer.val_only": r.choice("evaluate.py answers and scores prompts of a data set", false=""),
        "trainer.max_actor_ckpt_to_keep": r.same("--keep"),
        "trainer.max_critic_ckpt_to_keep": r.nothing("--keep is of both models"),
        "trainer.log_val_generations trainer.validation_data_dir": r.nothing(shared_rows.COMPLETIONS),
        "trainer.rollout_data_dir": r.Row("--rollouts-every 1", "in rollouts/ of the run's folder"),
        "data.gen_batch_size": r.nothing("--rounds samples --prompts at a time"),
        "trainer.val_before_train": r.nothing(
            "the first evaluation is always before the first step", "step 0 always has an evaluation"
        ),
        "trainer.critic_warmup": r.same("--freeze-actor-steps", "of ppo.py; 0 is none"),
        "algorithm.rollout_correction.rollout_is": r.choice(
            "by tokens or by responses", token="--mismatch tis", sequence="--mismatch tis_seq"
        ),
        "algorithm.rollout_correction.rollout_is_threshold": r.same("--cap"),
        "algorithm.rollout_correction.rollout_rs": r.nothing(
            "seq_mean_k1 is --geo-low and --geo-high; others: rft_fn.weight.within, in a copy of grpo.py",
            r.Flag("geo_low", "of seq_mean_k1; --geo-high is the upper bound"),
        ),
    },
    f"rl {MODEL}": {
        "path": r.same("--model"),
        "enable_gradient_checkpointing": r.switch("gradient-checkpointing"),
        "lora_rank": r.same("--lora-rank", remark="0 trains all weights"),
        "lora_alpha": r.same("--lora-alpha"),
        "target_modules": r.commas("--lora-targets"),
        "use_remove_padding": r.nothing("packs are always without padding", r.Flag("packing_samples")),
        "use_fused_kernels": r.nothing("the fused head is on by default", r.Flag("fused_linear_logprob")),
        "use_liger": shared_rows.FUSED,
        "trust_remote_code": shared_rows.UNTRUSTED,
        "lora.rank": r.same("--lora-rank"),
        "lora.alpha": r.same("--lora-alpha"),
        "enable_activation_offload": r.nothing("--gradient-checkpointing saves that memory"),
        "lora_adapter_path": r.lacks("--model FOLDER, of the adapters: they are trained further"),
        "custom_chat_template": r.lacks("the model's own template; a folder with another one has it"),
    },
    f"rl {ROLLOUT}": {
        "name": r.choice(
            vllm="--strategy.engine-type vllm",
            hf="--strategy.engine-type hf",
            sglang="--strategy.engine-type sglang",
        ),
        "n": r.same("--group"),
        "n_agent": r.same("--group", "of Search-R1"),
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
        "free_cache_engine": r.switch("strategy.enable-engine-sleep"),
        "response_length": r.same("--max-new", remark="counted in tokens"),
        "prompt_length": r.same("--max-prompt", remark="counted in tokens"),
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size": _MICRO,
        "log_prob_max_token_len_per_gpu": _MICRO,
        "log_prob_use_dynamic_bsz": _UNPADDED,
        "calculate_log_probs": r.nothing("the sampler's log-probs are always compared with the trainer's"),
        "multi_turn.enable": r.choice("multi_turn.py", false=""),
        "dtype": r.choice(
            bfloat16="--strategy.engine-dtype bfloat16", float16="--strategy.engine-dtype float16"
        ),
        "mode": r.nothing("rollouts of a step are collected within it; --ahead samples before it"),
    },
    f"rl {ACTOR}": {
        "strategy": r.choice(
            "megatron's sizes have no counterpart: torchrun with several processes shards with FSDP2",
            fsdp="--strategy.fsdp",
            fsdp2="--strategy.fsdp",
            **dict.fromkeys(("megatron", "veomni", "torchtitan"), "--strategy.fsdp"),
            remark="on by itself with several processes",
        ),
        "optim.lr": r.same("--lr"),
        "optim.lr_warmup_steps": r.Row("--warmup {x}", "counts rollouts", {"-1": ""}),
        "optim.lr_warmup_steps_ratio": shared_rows.SHARE_OF_RUN,
        "optim.weight_decay": r.same("--weight-decay", "of matrices only"),
        "optim.clip_grad": r.same("--max-norm"),
        "optim.min_lr_ratio": r.same("--lr-end"),
        "optim.lr_scheduler_type": r.choice(constant="--schedule constant", cosine="--schedule cosine"),
        "optim.warmup_style": r.choice(constant="--schedule constant", cosine="--schedule cosine"),
        "ppo_epochs": r.same("--epochs", hint=shared_rows.ROLLOUT_EPOCHS),
        "ppo_max_token_len_per_gpu": r.same("--budget"),
        "ppo_micro_batch_size_per_gpu": r.nothing(
            shared_rows.BUDGET, r.Flag("micro_train_batch_size", "max sequences per pack")
        ),
        "ppo_micro_batch_size": _MICRO,
        "use_dynamic_bsz": r.nothing(
            "packs are always without padding", r.Flag("budget", "packs are always filled by tokens")
        ),
        "clip_ratio": r.same(
            "--clip-low", "and --clip-high, unless clip_ratio_high is set", hint=shared_rows.CLIP
        ),
        "clip_ratio_low": r.same("--clip-low"),
        "clip_ratio_high": r.same("--clip-high"),
        "clip_ratio_c": r.same("--dual"),
        "grad_clip": r.same("--max-norm"),
        "entropy_coeff": r.same("--entropy"),
        "use_kl_loss": r.nothing("--kl greater than 0", shared_rows.KL_IN_LOSS),
        "kl_loss_type": r.choice(
            "the value of k3 with the gradient of the reverse KL; rft_fn.loss has k1, k2 and k3",
            low_var_kl="",
        ),
        "ulysses_sequence_parallel_size": r.same("--strategy.sp-size"),
        "fsdp_config.param_offload": r.flag("--strategy.fsdp-cpu-offload"),
        "fsdp_config.optimizer_offload": r.flag("--strategy.adam-offload"),
        "fsdp_config.fsdp_size": r.Row("--strategy.shard-size {x}", values={"-1": ""}),
        "kl_loss_coef": r.same("--kl", "where use_kl_loss is on", hint=shared_rows.KL_IN_LOSS),
        "use_torch_compile": r.nothing("no counterpart in verl's sense: the fused head compiles by itself"),
        "freeze_vision_tower": r.choice(true="--freeze visual", false=""),
        "optim.betas": r.Row("--beta1 {x} --beta2 {x}", "one number each"),
        "optim.lr_decay_style": r.choice(constant="--schedule constant", cosine="--schedule cosine"),
        "shuffle": shared_rows.ORDER,
        "calculate_entropy": shared_rows.LOGGED,
        "use_fused_kernels": shared_rows.FUSED,
        "ppo_infer_max_token_len_per_gpu": _MICRO,
    },
    "sft": {
        "model.partial_pretrain model.path": r.same("--model"),
        "model.enable_gradient_checkpointing": r.switch("gradient-checkpointing"),
        "model.lora_rank": r.same("--lora-rank"),
        "model.lora_alpha": r.same("--lora-alpha"),
        "model.target_modules": r.commas("--lora-targets"),
        "model.use_liger": shared_rows.FUSED,
        "model.use_remove_padding use_remove_padding data.pad_mode": _UNPADDED,
        "model.trust_remote_code": shared_rows.UNTRUSTED,
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
        "optim.warmup_steps_ratio optim.lr_warmup_steps_ratio": shared_rows.SHARE_OF_RUN,
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
        "algorithm.kl_ctrl.kl_coef": r.only(shared_rows.KL_IN_REWARD),
    },
    f" {ACTOR}": {
        "optim.total_training_steps": r.only(r.Flag("steps")),
        "ppo_mini_batch_size": r.only(
            r.Flag("train_batch_size", "counted in responses: prompts times --group", needs="group")
        ),
        "loss_agg_mode policy_loss.loss_mode": r.only(shared_rows.ALGORITHM),
    },
}
