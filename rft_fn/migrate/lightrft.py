"""Options of LightRFT; most are OpenRLHF's older names."""

from rft_fn.migrate import rows as r
from rft_fn.migrate import shared_rows

__all__ = ["SHARED", "SHARES", "TABLE"]

SHARES = r.Flag("data", "a share stands behind each source: a.jsonl=0.7 b.jsonl=0.3")
_EXAMPLE = r.Row(
    "--budget {x} --max-prompt {x}",
    "longer examples are refused",
    hint=r.Flag("budget", "max tokens per pack; a sequence has to fit into one"),
)
_PAIR = r.same("--max-length", "longer pairs are left out; --budget holds both")
_TARGETS = r.commas("--lora-targets", "names separated by commas")
_CHECKPOINTS = r.nothing(
    "checkpoints are in the folder of the run", r.Flag("out", "checkpoints are its subfolder checkpoints")
)
_EVAL_SPLIT = r.nothing(
    "part of the source: --eval-data NAME@SPLIT",
    r.Flag("eval_data", "a split is named behind the source: NAME@test"),
)
_UNREAD = r.nothing("no code of that library reads it")

# of both libraries, and OpenRLHF's names with dots for them, which it has had since April 2026
SHARED: r.Table = {
    "all": {
        "pretrain": r.same("--model"),
        "data.input_key input_key": r.by_kind(
            rl=r.Row("--template '{{{x}}}'", "a column of text; of messages: --messages {x}"),
            sft=r.Row("--template '{{{x}}}'", "of messages: --messages {x}"),
            hint=shared_rows.COLUMN,
        ),
        "data.input_template input_template": r.same(
            "--template", "the name of the column in braces", remark="columns stand in braces: {question}"
        ),
        "data.apply_chat_template apply_chat_template": r.nothing(
            "on where the tokenizer has a template", "the model's own chat template is always applied"
        ),
        "max_samples": r.by_kind(
            rl=r.nothing("--steps or --data-epochs"), examples=r.nothing("--steps or --epochs")
        ),
        "train.max_epochs max_epochs": r.same(
            "--epochs", hint=(shared_rows.ROLLOUT_EPOCHS, r.Flag("epochs"))
        ),
        "aux_loss_coef": r.same("--router-aux"),
        "lr_warmup_ratio": shared_rows.SHARE_OF_RUN,
        "l2": r.same("--weight-decay", "of matrices only"),
        "max_norm": r.same("--max-norm"),
        "train_batch_size": r.by_kind(
            rl=r.same("--strategy.train-batch-size", "responses, as there"), examples=r.same("--batch")
        ),
        "micro_train_batch_size": r.nothing("--budget bounds the tokens of a pack"),
        "train.seed seed": r.same("--seed"),
        "bf16": r.flag("--strategy.bf16"),
        "ds.zero_stage zero_stage": r.same("--strategy.zero-stage"),
        "ds.adam_offload adam_offload": r.flag("--strategy.adam-offload"),
        "ds.packing_samples packing_samples": r.flag("--strategy.packing-samples"),
        "gradient_checkpointing": r.flag("--gradient-checkpointing"),
        "flash_attn": shared_rows.CHOSEN_ATTENTION,
        "ds.load_in_4bit load_in_4bit": shared_rows.NF4,
        "ds.lora.rank lora_rank": r.same("--lora-rank", remark="0 trains all weights"),
        "ds.lora.alpha lora_alpha": r.same("--lora-alpha"),
        "lora_dropout": shared_rows.DROPOUT,
        "target_modules": _TARGETS,
        "ckpt.output_dir save_path": r.same("--out", remark="the model is its subfolder model"),
        "ckpt_path": _CHECKPOINTS,
        "ckpt.save_steps save_steps": shared_rows.SAVE_EVERY,
        "ckpt.max_num max_ckpt_num": r.same("--keep"),
        "max_ckpt_mem": r.Row("--max-bytes {x}", "bytes; there GB", remark="counted in bytes"),
        "ckpt.load_enable load_checkpoint": shared_rows.RESUMED,
        "eval.steps eval_steps": r.by_kind(
            rl=shared_rows.EVAL_EVERY, pairs=shared_rows.EVAL_EVERY, sft=shared_rows.UNEVALUATED
        ),
        "logger.wandb.key use_wandb": r.choice(
            "the key comes from wandb's own login",
            **{"false": "", "*": "--trackers wandb"},
            remark="wandb is one",
        ),
        "logger.wandb.project wandb_project": r.same("--project"),
        "logger.wandb.run_name wandb_run_name": r.same("--run-name"),
        "logger.tensorboard_dir use_tensorboard": r.Row(
            "--trackers tensorboard --strategy.log-dir {x}", remark="tensorboard is one"
        ),
        "logging_steps": shared_rows.LOGGED,
        "data.max_len": r.by_kind(
            rl=r.nothing("--max-prompt and --max-new bound the two parts"),
            sft=_EXAMPLE,
            pairs=_PAIR,
            hint=_EXAMPLE.hint,
        ),
        "train.batch_size": r.by_kind(
            rl=r.same("--strategy.train-batch-size"),
            examples=r.same("--batch"),
            hint=r.Flag("train_batch_size", "counted in responses"),
        ),
        "train.micro_batch_size": r.nothing(
            "--budget bounds the tokens of a pack", r.Flag("micro_train_batch_size", "max sequences per pack")
        ),
    },
    "rl": {
        "critic.model_name_or_path critic_pretrain": r.same("--critic", "of ppo.py"),
        "reward_pretrain": r.Row(
            "--reward model:{x}", "a folder with a head; {} is none", hint=shared_rows.REWARD_MODEL
        ),
        "remote_rm_url": r.same(
            "--reward",
            "docs/rewards.md; a FILE.py:FN stands there too",
            remark="given as FILE.py:FUNCTION",
        ),
        "data.prompt_dataset prompt_data": r.same("--data"),
        "data.prompt_probs prompt_data_probs": r.nothing(
            "part of the source: --data a.jsonl=0.7 b.jsonl=0.3", SHARES
        ),
        "eval_data": r.same("--eval-data"),
        "data.label_key label_key": r.nothing("rewards get every column by its name", shared_rows.ANSWER),
        "prompt_max_len": r.same("--max-prompt", "longer prompts are left out", remark="counted in tokens"),
        "generate_max_len": r.same("--max-new", remark="counted in tokens"),
        "pretrain_data": r.same("--ptx-data", "of ppo.py"),
        "ptx_coef": r.same("--ptx", "of ppo.py"),
        "rollout.batch_size rollout_batch_size": r.same("--prompts", remark="prompts per step"),
        "rollout.micro_batch_size micro_rollout_batch_size": r.nothing(
            "--strategy.engine-batch is what samples at a time",
            r.Flag("engine_batch", "responses sampled at a time", needs="group"),
        ),
        "rollout.n_samples_per_prompt n_samples_per_prompt": r.same("--group"),
        "temperature": r.same("--temperature", "divides the logits in training too"),
        "top_p": r.same("--top-p", "cut in training too"),
        "critic.value_clip value_clip": r.same("--value-clip", "of ppo.py"),
        "algo.advantage.lambd lambd": r.same("--gae-lambda", "of ppo.py"),
        "algo.advantage.gamma gamma": r.same("--gamma", "of ppo.py"),
        "algo.kl.target kl_target": r.same("--kl-target", "of ppo.py"),
        "algo.kl.estimator kl_estimator": r.choice(
            "one that has the right gradient; rft_fn.loss has them", k1="", k2="", k3=""
        ),
        "critic.freezing_steps freezing_actor_steps": r.Row(
            "--freeze-actor-steps {x}", "of ppo.py", {"-1": ""}
        ),
        "critic.save_value_network save_value_network": r.flag("--save-critic", "of ppo.py"),
        "reward.overlong_buffer_len overlong_buffer_len": r.same("--overlong", remark="counted in tokens"),
        "actor.adam.lr actor_learning_rate": r.same("--lr"),
        "critic.adam.lr critic_learning_rate": r.same("--critic-lr", "of ppo.py"),
        "train.num_episodes num_episodes": r.same("--data-epochs", hint=shared_rows.DATA_EPOCHS),
        "enable_ema": r.nothing("--ema, the decay, switches it on", r.Flag("ema", "its decay; 0 is off")),
        "actor.model_name_or_path": r.same("--model"),
        "reward.model_name_or_path": r.Row(
            "--reward model:{x}", "a folder with a head", hint=shared_rows.REWARD_MODEL
        ),
        "reward.remote_url": r.same(
            "--reward",
            "docs/rewards.md has the request in OpenRLHF's form",
            remark="given as FILE.py:FUNCTION",
        ),
    },
    "examples": {
        "ds.lora.dropout": shared_rows.DROPOUT,
        "ds.lora.target_modules": _TARGETS,
        "adam.betas adam_betas": r.Row(
            "--beta1 {x} --beta2 {x}", "one number each", remark="the second is --beta2"
        ),
        "data.max_samples": r.nothing("--steps or --epochs"),
        "ckpt.path": _CHECKPOINTS,
        "logger.logging_steps": shared_rows.LOGGED,
        "max_len": r.by_kind(sft=_EXAMPLE, pairs=_PAIR, hint=_EXAMPLE.hint),
    },
    "pairs": {
        "eval.split eval_split": _EVAL_SPLIT,
    },
    "": {
        "prompt_split": r.only(shared_rows.SPLIT),
        "algo.advantage.estimator advantage_estimator": r.only(
            r.Flag(
                "algorithm",
                "group_norm is grpo, reinforce_baseline is reinforce_pp_baseline; gae is in ppo.py",
            )
        ),
        "algo.kl.init_coef init_kl_coef": r.only(shared_rows.KL_IN_REWARD),
        "algo.kl.use_loss use_kl_loss": r.only(shared_rows.KL_IN_LOSS),
        "actor.eps_clip eps_clip": r.only(shared_rows.CLIP),
        "train.enable_ema": r.only(r.Flag("ema", "its decay; 0 is off")),
        "ckpt.max_mem": r.only(r.Flag("max_bytes", "counted in bytes")),
    },
}

# of LightRFT only
TABLE: r.Table = {
    "rl": {
        "max_eval_samples": r.same("--eval-prompts", hint=(r.Flag("eval_prompts"), r.Flag("count"))),
        "reference_key": r.nothing("rewards get every column by its name", shared_rows.ANSWER),
        "images_key": r.nothing("columns with images are detected: docs/data.md"),
        "system_prompt": r.same("--system"),
        "mixed_mm_data": r.nothing("batches with and without media mix freely"),
        "text_only": r.nothing("a model without towers takes none"),
        "engine_type": r.choice(vllm="--strategy.engine-type vllm", sglang="--strategy.engine-type sglang"),
        "engine_tp_size": r.same("--strategy.engine-tp-size"),
        "engine_mem_util": r.same("--strategy.engine-mem-util"),
        "enable_engine_sleep": r.switch("strategy.enable-engine-sleep"),
        "disable_engine_sleep": r.choice(true="--strategy.no-enable-engine-sleep", false="", hint=""),
        "dynamic_sampling": r.choice(true="--rounds 4", false="", remark="above 1"),
        "use_fire": r.lacks("the loss would take the first token for one of the usual temperature", "false"),
        "first_token_temperature": _UNREAD,
        "use_gspo": r.choice(true="--algorithm gspo", false="", remark="gspo"),
        "use_cpg_loss": r.choice(true="--algorithm cpgd", false="", remark="cpgd"),
        "loss_agg_mode": r.choice(
            "by the algorithm; --weight has means", **{"seq-mean-token-mean": ""}, hint=shared_rows.ALGORITHM
        ),
        "limit_mm_image_per_prompt limit_mm_video_per_prompt": r.nothing(
            "a prompt may have any number of them"
        ),
        "mark_high_entropy_tokens": r.nothing("rft report shows the entropy of tokens"),
        "trajectory_analysis print_replay_buffer_stats": shared_rows.LOGGED,
        "disable_logprobs_flashattn": shared_rows.CHOSEN_ATTENTION,
        "initial_model_shard_size": r.nothing("the initial model is sharded as the policy"),
        "normalize_reward_for_critic": _UNREAD,
        "system_prompt_path": r.nothing("--system takes the text"),
        "max_pixels": r.same("--max-pixels", hint=""),
        "high_entropy_token_ratio": r.lacks("--entropy-share is its part, by rollouts", "0", "0.0"),
        "advantages_norm": r.flag("--whiten", "of ppo.py"),
        "advantage_clip": r.lacks("one line in a copy of the script: adv.clamp", "0", "0.0"),
        "normalize_advantages use_sequence_rewards": _UNREAD,
        "freeze_prefix": r.choice(
            "the towers of the model; a text model has none", true="--freeze visual", false=""
        ),
        "reward_running_norm": r.flag("--normalize-reward"),
        "reward_running_norm_minus_mean": r.nothing("--normalize-reward subtracts the mean"),
        "reward_clip": r.same("--reward-clip"),
        "overlong_buffer": r.nothing(
            "--overlong greater than 0", r.Flag("overlong", "counted in tokens; 0 is off")
        ),
        "overlong_buffer_penalty_factor": r.choice("the penalty rises to 1", **{"1": "", "1.0": ""}),
        "use_mp_opt": r.choice(true="--strategy.use-mp-opt True", false=""),
        "fsdp": r.flag("--strategy.fsdp"),
        "fsdp_cpu_offload": r.flag("--strategy.fsdp-cpu-offload"),
        "sp_size": r.same("--strategy.sp-size"),
        "fused_linear_logprob": r.flag("--strategy.fused-linear-logprob"),
        "chunk_size": r.same("--strategy.chunk-size"),
        "no_shard_vit": _UNREAD,
        "meta_init": r.nothing("a sharded model is always made on the meta device"),
        "save_trajectories num_trajectories_to_save": r.nothing(shared_rows.COMPLETIONS),
        "log_dir": r.same("--strategy.log-dir"),
        "plot_every": r.same("--strategy.plot-every"),
        "rm_use_engine": r.nothing("judge:FOLDER asks an engine, model:FOLDER does not need one"),
        "rm_engine_cudagraph": _UNREAD,
    },
}
