"""Options of TRL 1.x: GRPOConfig, SFTConfig, DPOConfig and RewardConfig, with transformers' own."""

from rft_fn.migrate import rows as r
from rft_fn.migrate import shared_rows

__all__ = ["TABLE"]

_PACKED = "packs are always filled by tokens, without padding"
_CUT = r.Flag("top_p", "the only cut of the distribution")
_ONE_LIMIT = r.nothing("--max-length bounds a prompt with one response")
_MOVING = r.nothing("--ref-every 512 --ref-mix 0.6 are what it does by default")
_EXAMPLE = r.Row(
    "--budget {x} --max-prompt {x}",
    "longer examples are refused, not cut",
    hint=r.Flag("budget", "max tokens per pack; an example has to fit into one", needs="response"),
)

TABLE: r.Table = {
    "all": {
        "model_name_or_path": r.same("--model"),
        "dataset_name": r.same("--data", "a hub name or a path; :CONFIG and @SPLIT are part of it"),
        "dataset_config": r.nothing(
            "part of the source: --data NAME:CONFIG",
            r.Flag("data", "a config is named behind the source: NAME:CONFIG"),
        ),
        "dataset_train_split": r.nothing("part of the source: --data NAME@SPLIT", shared_rows.SPLIT),
        "output_dir": r.same("--out"),
        "seed": r.same("--seed"),
        "shuffle_dataset": shared_rows.ORDER,
        "trust_remote_code": shared_rows.UNTRUSTED,
        "model_init_kwargs torch_dtype dtype": r.nothing(
            "float32 on a CPU, bfloat16 on a GPU; see --strategy.bf16 and --quantize"
        ),
        "attn_implementation": shared_rows.CHOSEN_ATTENTION,
        "use_liger_kernel": r.nothing("the fused head is on by default", r.Flag("fused_linear_logprob")),
        "router_aux_loss_coef": r.same("--router-aux"),
        "gradient_checkpointing": r.switch("gradient-checkpointing"),
        "gradient_checkpointing_kwargs": r.nothing(
            "--gradient-checkpointing is always without use_reentrant"
        ),
        "bf16": r.switch("strategy.bf16", "computes in bfloat16, parameters and sums stay in float32"),
        "use_peft": r.Row(
            "--lora-rank 16 --lora-alpha 32",
            "TRL's rank and alpha, where lora_r is left out",
            remark="0 trains all weights",
        ),
        "lora_r": r.same("--lora-rank", remark="0 trains all weights"),
        "lora_alpha": r.same("--lora-alpha"),
        "lora_dropout": shared_rows.DROPOUT,
        "lora_target_modules": r.commas("--lora-targets", remark="names separated by commas"),
        "load_in_4bit": shared_rows.NF4,
        "load_in_8bit": r.choice(true="--quantize int8", false=""),
        "disable_dropout": r.nothing("dropout is always off"),
        "learning_rate": r.same("--lr"),
        "lr_scheduler_type": r.choice(
            "down to --lr-end, a share of --lr",
            linear="--schedule linear --lr-end 0",
            cosine="--schedule cosine --lr-end 0",
            constant="--schedule constant",
            constant_with_warmup="--schedule constant",
        ),
        "adam_beta1": r.same("--beta1"),
        "adam_beta2": r.same("--beta2"),
        "weight_decay": r.same("--weight-decay"),
        "max_grad_norm": r.same("--max-norm"),
        "save_total_limit": r.same("--keep"),
        "save_strategy": r.nothing("--save-every, which counts steps"),
        "eval_strategy": r.nothing("evaluations come by a number of steps, where the script has any"),
        "per_device_eval_batch_size": r.nothing(shared_rows.BUDGET),
        "logging_steps": shared_rows.LOGGED,
        "report_to": shared_rows.TRACKERS,
        "run_name": r.same("--run-name"),
        "wandb_project": r.same("--project"),
        "system_prompt": r.same("--system"),
        "optim": r.by_kind(
            all=r.choice(
                "the optimizer is AdamW",
                **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), ""),
            ),
            hint="the optimizer is AdamW",
        ),
        "resume_from_checkpoint": shared_rows.RESUMED,
        "preprocessing_num_workers dataset_num_proc": r.nothing(
            "rows are read as they are drawn; --media-workers is for media"
        ),
        "deepspeed": r.nothing(
            "--strategy.zero-stage 1, 2 or 3", r.Flag("zero_stage", "1, 2 or 3; there is no file of options")
        ),
        "fsdp": r.nothing("torchrun with several processes shards with FSDP2"),
        "remove_unused_columns": r.by_kind(
            rl=r.nothing("a reward gets every column"),
            examples=r.nothing("columns that no option names are not read"),
        ),
        "max_completion_length": r.by_kind(
            rl=r.same("--max-new"), dpo=_ONE_LIMIT, hint=r.Flag("max_new", "counted in tokens")
        ),
        "max_prompt_length": r.by_kind(
            rl=r.same("--max-prompt", "longer prompts are left out, not cut"),
            dpo=_ONE_LIMIT,
            hint=r.Flag("max_prompt", "counted in tokens"),
        ),
        "beta": r.by_kind(rl=r.same("--kl"), dpo=r.same("--beta"), hint=shared_rows.KL_IN_LOSS),
        "sync_ref_model": r.by_kind(
            rl=_MOVING,
            dpo=_MOVING,
            hint=r.Flag("ref_every", "a number of steps switches it on"),
        ),
        "ref_model_sync_steps": r.by_kind(
            rl=r.same("--ref-every", "counted in rollouts"),
            dpo=r.same("--ref-every"),
            hint=r.Flag("ref_every"),
        ),
        "ref_model_mixup_alpha": r.by_kind(
            rl=r.same("--ref-mix"), dpo=r.same("--ref-mix"), hint=r.Flag("ref_mix")
        ),
        "warmup_ratio": shared_rows.SHARE_OF_RUN,
        "num_train_epochs": r.by_kind(
            rl=r.same("--data-epochs"), examples=r.same("--epochs"), hint=shared_rows.DATA_EPOCHS
        ),
        "save_steps": r.by_kind(
            rl=r.same("--save-every", "counts rollouts"),
            examples=r.same("--save-every"),
            hint=r.Flag("save_every"),
        ),
        "eval_steps": r.by_kind(
            rl=r.same("--eval-every", "counts rollouts"),
            sft=shared_rows.UNEVALUATED,
            pairs=r.same("--eval-every"),
            hint=r.Flag("eval_every"),
        ),
    },
    "rl": {
        "chat_template_kwargs": r.same("--chat-template-kwargs", "NAME=VALUE for each entry"),
        "num_generations": r.same("--group"),
        "temperature": r.same("--temperature", "divides the logits in training too"),
        "top_p": r.same("--top-p", "cut in training too"),
        "top_k": r.choice(
            "Sampling(top_k=...) has it, in a copy of the script",
            **{"0": "", "-1": "", "none": ""},
            hint=_CUT,
        ),
        "min_p": r.choice(
            "sampling and training cut alike, and only by top_p and top_k", **{"0": "", "0.0": ""}, hint=_CUT
        ),
        "repetition_penalty": r.choice(
            "the penalised distribution is not the one that is trained", **{"1": "", "1.0": ""}
        ),
        "cache_implementation use_transformers_paged use_transformers_continuous_batching": r.nothing(
            "the engine chooses how it samples"
        ),
        "generation_kwargs": r.lacks("Sampling has temperature, top_p, top_k, max_new and stop"),
        "use_vllm": r.choice(true="--strategy.engine-type vllm", false="--strategy.engine-type hf"),
        "vllm_mode": r.choice(
            "of use_vllm",
            colocate="--strategy.engine-type vllm",
            server="--strategy.engine-type openai",
            hint=shared_rows.TOGETHER,
        ),
        "vllm_server_base_url": r.same(
            "--strategy.engine-servers",
            "of vLLM's own server: `trl vllm-serve` speaks another protocol, docs/engines.md starts one",
        ),
        "vllm_server_host vllm_server_port": r.nothing(
            "part of the address: --strategy.engine-servers http://HOST:PORT"
        ),
        "vllm_group_port": r.nothing("weights reach a server through the folder --strategy.engine-weights"),
        "vllm_gpu_memory_utilization": r.same("--strategy.engine-mem-util"),
        "vllm_tensor_parallel_size": r.same("--strategy.engine-tp-size"),
        "vllm_max_model_length": r.same("--strategy.engine-max-model-len"),
        "vllm_enable_sleep_mode": r.switch("strategy.enable-engine-sleep"),
        "vllm_server_timeout": r.same("--strategy.engine-timeout"),
        "max_tool_calling_iterations": r.nothing("multi_turn.py has environments with a limit of turns"),
        "num_iterations": r.same("--epochs", hint=shared_rows.ROLLOUT_EPOCHS),
        "epsilon": r.same(
            "--clip-low",
            "and --clip-high, unless epsilon_high is set",
            remark="one side of the clip; --clip-high is the other",
        ),
        "epsilon_high": r.same("--clip-high"),
        "delta": r.same("--dual", "bounds the ratio at negative advantages in both"),
        "sapo_temperature_neg sapo_temperature_pos": r.nothing(
            "loss.sapo takes the temperatures: write the loss into a copy of grpo.py"
        ),
        "mask_truncated_completions": r.flag("--mask-truncated"),
        "top_entropy_quantile": r.same(
            "--entropy-share", "rft_fn.weight.high_entropy of a whole rollout, before its updates"
        ),
        "entropy_coef": r.same("--entropy", "a mean over the same tokens as the loss, in the same way"),
        "use_adaptive_entropy": r.nothing(
            "--entropy-target 0.2 --entropy-delta 0.005 are what it does by default"
        ),
        "entropy_target": r.nothing(
            "--entropy-target, where use_adaptive_entropy is on", r.Flag("entropy_target")
        ),
        "entropy_coef_delta": r.nothing(
            "--entropy-delta, in a step, where use_adaptive_entropy is on", r.Flag("entropy_delta")
        ),
        "entropy_coef_min entropy_coef_max": r.lacks("the coefficient has no bounds but 0"),
        "cast_lm_head_to_fp32": r.nothing("log-probs are always computed in float32"),
        "vllm_importance_sampling_correction": r.choice(
            "theirs, by default, drops a response whose whole ratio is above 3 (sequence_mask): --mismatch "
            "mis_seq --cap 3; ours corrects rollouts of older weights alone by default, token by token",
            false="--mismatch none",
        ),
        "vllm_importance_sampling_mode": r.choice(
            token_truncate="--mismatch tis",
            token_mask="--mismatch mis",
            sequence_truncate="--mismatch tis_seq",
            sequence_mask="--mismatch mis_seq",
        ),
        "vllm_importance_sampling_clip_max": r.same("--cap"),
        "dataset_prompt_column": r.Row("--template '{{{x}}}'", "a column of texts", hint=shared_rows.COLUMN),
        "reward_funcs": r.same(
            "--reward",
            "FILE.py:FN, called as TRL calls it; a model as model:FOLDER",
            remark="given as FILE.py:FUNCTION",
        ),
        "reward_weights": r.nothing(
            "part of the reward: --reward FILE.py:FN=WEIGHT",
            r.Flag("reward", "a weight stands behind each: FILE.py:FUNCTION=0.5"),
        ),
        "multi_objective_aggregation": r.choice(
            sum_then_normalize="", normalize_then_sum="--reward-norm group"
        ),
        "log_completions": r.nothing(
            shared_rows.COMPLETIONS,
            "responses of each step are in trajectories.jsonl in the folder of the run",
        ),
        "num_completions_to_print": r.nothing(shared_rows.COMPLETIONS),
    },
    "examples": {
        "max_steps": r.same("--steps", "-1: --epochs"),
        "warmup_steps": r.same("--warmup", "ours begins at lr / warmup, theirs at 0"),
        "per_device_train_batch_size": r.same(
            "--batch",
            "times gradient_accumulation_steps, of one process",
            hint=(
                r.Flag("batch", "examples per update of all processes together"),
                r.Flag(
                    "prompts", "counted in prompts per step of all processes, with --group responses each"
                ),
            ),
        ),
        "gradient_accumulation_steps": r.nothing(
            "a factor of --batch; --budget bounds what is computed at a time",
            r.Flag("budget", "max tokens per pack; the cut changes no gradient"),
        ),
        "padding_free": r.choice(_PACKED, true="", false="", hint=r.Flag("packing_samples")),
        "pad_to_multiple_of": r.nothing(_PACKED),
        "pad_token eos_token": r.nothing("the model's own tokenizer and template"),
        "chat_template_path": r.lacks("the model's own template; a folder with another one has it"),
        "truncation_mode": r.nothing("nothing is cut"),
        "activation_offloading": r.nothing("--gradient-checkpointing saves that memory"),
        "max_length": r.by_kind(
            sft=_EXAMPLE,
            pairs=r.same("--max-length", "longer pairs are left out, not cut; --budget holds both sides"),
            hint=_EXAMPLE.hint,
        ),
        "loss_type": r.by_kind(
            sft=r.choice("a copy of sft.py has another loss", nll="", chunked_nll=""),
            dpo=r.choice(
                "others are no loss of ours, and a line in pair_loss of a copy of dpo.py",
                sigmoid="--loss dpo",
                sigmoid_norm="--loss dpo --average",
                ipo="--loss ipo --average",
                hinge="--loss hinge",
                robust="--loss robust",
                exo_pair="--loss exo",
                nca_pair="--loss nca",
                bco_pair="--loss bco_pair",
                sppo_hard="--loss sppo",
                apo_zero="--loss apo_zero",
                apo_down="--loss apo_down",
            ),
            hint=shared_rows.ALGORITHM,
        ),
    },
    "sft": {
        "max_seq_length": _EXAMPLE,
        "packing": r.choice(_PACKED, true="", false="", hint=r.Flag("packing_samples")),
        "packing_strategy eval_packing": r.nothing(_PACKED),
        "dataset_text_field": r.nothing(
            "a text without a prompt is not learned: --template and --response", shared_rows.COLUMN
        ),
        "dataset_kwargs": r.nothing("docs/data.md has the forms of rows"),
        "completion_only_loss assistant_only_loss": r.choice(
            "only answers are learned", true="", hint="the loss is on responses alone"
        ),
        "neftune_noise_alpha": r.lacks("embeddings get no noise"),
    },
    "dpo": {
        "label_smoothing": r.Row(
            "--loss cdpo --label-smoothing {x}", "of loss_type sigmoid", {"0": "", "0.0": ""}
        ),
        "rpo_alpha": r.same("--nll"),
        "loss_weights": r.nothing("one loss at a time; --nll adds the chosen side's likelihood"),
        "precompute_ref_log_probs precompute_ref_batch_size reference_free": shared_rows.REFERENCE,
        "ref_model_init_kwargs force_use_ref_model": shared_rows.REFERENCE,
        "model_adapter_name ref_adapter_name": r.nothing(
            "under adapters the reference is the policy without them"
        ),
        "f_divergence_type": r.choice("the reverse KL alone", reverse_kl=""),
        "f_alpha_divergence_coef": r.lacks("the reverse KL alone", "1", "1.0"),
        "ld_alpha": r.same("--ld-alpha"),
        "desirable_weight": r.same("--desirable-weight", "of KTOConfig"),
        "undesirable_weight": r.same("--undesirable-weight", "of KTOConfig"),
        "cpo_alpha": r.same("--nll", "of CPOConfig"),
        "simpo_gamma": r.same("--margin", "of CPOConfig"),
        "gamma_beta_ratio": r.nothing("--margin, beta times this, of SimPO's own script"),
        "sft_weight": r.same("--nll", "of SimPO's own script"),
        "use_weighting discopop_tau": r.lacks("write the factor into the loss of a copy of dpo.py"),
        "generate_during_eval": r.nothing("evaluate.py samples from the saved model"),
    },
    "rm": {
        "center_rewards_coefficient": r.same("--centering"),
    },
    "": {
        "dataset_test_split": r.only(r.Flag("eval_data", "a split is named behind the source: NAME@test")),
        "data_seed": r.only(r.Flag("seed")),
        "dataloader_num_workers": r.only("rows are read as they are drawn, there is no loader"),
        "generation_batch_size": r.only(r.Flag("prompts", "counted in prompts per step, not in responses")),
        "num_generations_eval": r.only("an evaluation has one greedy answer a question"),
        "reward_model_name_or_path": r.only(shared_rows.REWARD_MODEL),
        "scale_rewards": r.only(
            r.Flag("algorithm", "grpo divides by the deviation of a group, dr_grpo does not")
        ),
        "importance_sampling_level": r.only(
            r.Flag("algorithm", "grpo has ratios of tokens, gspo of sequences")
        ),
        "steps_per_generation": r.only(r.Flag("minibatches", "updates per pass over a rollout")),
    },
}
