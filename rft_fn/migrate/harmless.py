"""Options of other libraries that change no objective: why -> patterns of NAME or of NAME=VALUE.

A name that is in no table and not here is printed first, as one that may change the objective. A pattern with
a value is of an option that is off with this value. What is doubtful does not belong here.
"""

from fnmatch import fnmatchcase
from typing import Any

__all__ = ["HARMLESS", "reason"]

_SPEED = "how and where it computes; no gradient depends on it"
_ENGINE = "how the engine computes; what is sampled does not depend on it"
_SAVED = "what is written, and when"
_LOGGED = "what is shown and logged"
_EVALUATED = "of evaluations, which have one greedy answer a question here"
_LOADED = "rows are read as they are drawn, there is no loader"
_STARTED = "torchrun starts the processes; there is no Ray"
_OFF = "off, as here"
_HUB = "upload the folder `model` of the run"

HARMLESS: dict[str, dict[str, str]] = {
    "trl": {
        _HUB: "push_to_hub* hub_* overwrite_hub*",
        _LOGGED: (
            "logging_* log_* trackio_* wandb_* disable_tqdm project include_* skip_memory_metrics debug "
            "report_to_* log_completions* num_completions_to_print callbacks verbose"
        ),
        _LOADED: "dataloader_* dataset_streaming ignore_data_skip length_column_name",
        _EVALUATED: (
            "eval_* do_* evaluation_strategy metric_for* greater_is* load_best* benchmarks "
            "prediction_loss_only per_device_eval* batch_eval_metrics num_generations_eval "
            "bf16_full_eval fp16_full_eval dataset_test_split system_prompt_eval"
        ),
        _SAVED: "save_* overwrite_output_dir restore_callback* enable_jit_checkpoint",
        _SPEED: (
            "fsdp* ddp_* torch_compile* bnb_* fp16 tf32 use_cpu no_cuda local_rank accelerator_config "
            "auto_find_batch_size full_determinism use_cache torch_empty_cache_steps parallelism_config "
            "activation_checkpointing* ds3_gather* liger_kernel_config use_liger_loss "
            "use_bnb_nested_quant jit_mode_eval use_liger gradient_checkpointing* preprocessing_* "
            "dataset_num* group_by_length"
        ),
        _ENGINE: (
            "vllm_model_impl vllm_dtype vllm_device vllm_enable_prefix_caching vllm_max_model_len "
            "vllm_server_timeout vllm_group_port"
        ),
        "of the services that a reward asks": "e2b_* morph_* parallel_code_exec_per_proc ioi_provider",
        _OFF: (
            "model_revision=main use_dora=false use_rslora=false lora_bias=none lora_task_type "
            "adam_epsilon=1e-08 adam_epsilon=1e-8 label_smoothing_factor=0 label_smoothing_factor=0.0 "
            "average_tokens_across_devices=true average_tokens_across_devices=false optim_args=none "
            "use_adaptive_entropy=false repetition_penalty=1 repetition_penalty=1.0 min_p=0 min_p=0.0 "
            "top_k=0 top_k=-1 use_weighting=false reference_free=false use_bias_correction_kl=false "
            "beta=0 beta=0.0"
        ),
    },
    "verl": {
        _SPEED: (
            "*._target_ *.fsdp_config.* *.fsdp.* *.param_offload *.optimizer_offload model_engine* "
            "optim model data *.megatron.* *.veomni.* *.torchtitan.* *.profiler.* *.hybrid_engine "
            "*.optimizer_offload_fraction *.overlap_cpu_optimizer_d2h_h2d "
            "*.use_precision_aware_optimizer *.optimizer_cpu_offload *.nccl_timeout "
            "*.log_prob_micro_batch_size* *.log_prob_use_dynamic_bsz *.log_prob_max_token_len_per_gpu "
            "*.ref.strategy *.use_torch_compile *ulysses_sequence_parallel_size "
            "*.entropy_from_logits_with_chunking *.entropy_checkpointing *.use_remove_padding *.use_shm "
            "*.use_fused_kernels *.fused_kernel_options.* *.tiled_mlp.* *.enable_activation_offload "
            "*.trust_remote_code *.data_loader_seed *.use_liger *.ppo_micro_batch_size* "
            "*.forward_micro_batch_size* *.forward_max_token_len_per_gpu *.use_dynamic_bsz "
            "critic.ppo_max_token_len_per_gpu critic.strategy critic.shuffle "
            "*.enable_gradient_checkpointing global_profiler.* engine engine.* model.external_lib "
            "model.tokenizer_path *.router_replay.mode=disabled actor_rollout_ref.actor.fsdp_config "
            "trainer.balance_batch trainer.use_legacy_worker_impl *.padding_free "
            "actor_rollout_ref.model.exclude_modules *.rollout_n *.grad_offload"
        ),
        _ENGINE: (
            "*.rollout.enforce_eager *.cudagraph_mode *.compilation_config.* *.moe_tensor_parallel_size "
            "*.cudagraph_capture_sizes *.rollout.data_parallel_size *.expert_parallel_size "
            "*.pipeline_model_parallel_size *.max_num_batched_tokens *.enable_chunked_prefill "
            "*.enable_prefix_caching *.load_format *.disable_log_stats *.multi_stage_wake_up "
            "*.update_weights_bucket_megabytes *.skip_tokenizer_init *.prometheus.* *.rollout.trace.* "
            "*.layered_summon *.agent.num_workers *.checkpoint_engine.* *.swap_space "
            "*.disable_mm_preprocessor_cache *.attention_backend *.rollout.micro_batch_size "
            "*.rollout.limit_images *.rollout.disable_tqdm *.rollout.load_format "
            "*.engine_kwargs.*.tool_call_parser"
        ),
        _SAVED: (
            "*.checkpoint.* checkpoint.* trainer.default_hdfs_dir trainer.del_local_ckpt_after_load "
            "trainer.remove_previous_ckpt_in_save trainer.max_ckpt_to_keep trainer.save_model_only "
            "trainer.esi_redundant_time trainer.default_local_dir trainer.checkpoint*"
        ),
        _LOGGED: (
            "trainer.val_generations_to_log_to_wandb trainer.log_* trainer.validation_data_dir "
            "trainer.ray_timeline trainer.verbose profiler.*"
        ),
        _EVALUATED: (
            "*.val_kwargs* rollout.test_freq data.val_* data.validation_shuffle trainer.val_* "
            "*.val_override_config*"
        ),
        _LOADED: (
            "data.return_* data.filter_overlong_prompts_workers data.dataloader_* data.use_shm "
            "data.num_workers data.video_key data.image_patch_size data.tokenizer "
            "data.ignore_input_ids_mismatch data.image_dir"
        ),
        _STARTED: (
            "ray_kwargs.* ray_init.* transfer_queue.* trainer.ray_wait_* trainer.nnodes* "
            "trainer.n_gpus* rollout.nnodes rollout.n_gpus_per_node trainer.node* trainer.device "
            "hydra.* defaults"
        ),
        "of a reward model's own engine": (
            "reward_model.micro_batch* reward_model.strategy reward_model.n_gpus* reward_model.nnodes "
            "reward_model.enable_resource_pool reward_model.num_workers "
            "reward_model.launch_reward_fn_async reward_model.use_reward_loop reward_model.rollout.* "
            "reward_model.model.input_tokenizer reward_model.model.external_lib reward.num_workers "
            "reward_model.sandbox_fusion.max_concurrent reward_model.sandbox_fusion.memory_limit_mb"
        ),
        _OFF: (
            "*.ignore_eos=false *_pdrop=0* *.attention_dropout=0* *.do_sample=true "
            "*.use_fire_sampling=false *.skip_rollout=false *.skip_dump_dir *.over_sample_rate=0 "
            "*.enable_rollout_routing_replay=false *.external_lib=null algorithm.use_pf_ppo=false "
            "critic.optim.weight_decay=0.01 critic.grad_clip=1.0 critic.optim.clip_grad=1.0 "
            "*.optimizer=adamw *.optimizer_impl=torch.optim critic.optim.lr_warmup_steps_ratio=0* "
            "critic.optim.lr_warmup_steps=-1 critic.optim.warmup_style=constant "
            "critic.optim.lr_scheduler_type=constant *.num_cycles=0.5 critic.ppo_epochs=1 "
            "critic.loss_agg_mode=token-mean *.default_agent_loop=single_turn_agent "
            "actor_rollout_ref.rollout.multi_turn.enable=false algorithm.filter_groups.metric "
            "*.total_training_steps=-1 reward_model.enable=false distillation.enabled=false "
            "critic.enable"
        ),
    },
    "openrlhf": {
        _SPEED: (
            "*.num_nodes *.num_gpus_per_node *_num_nodes *_num_gpus_per_node ds.* deepspeed_* "
            "ref.offload ref_reward_offload grad_accum_dtype overlap_comm zpg "
            "gradient_checkpointing_use* *.gradient_checkpointing* local_rank use_ds_universal_ckpt "
            "*.colocate* colocate_* full_determinism train.deterministic* disable_ds_ckpt "
            "use_liger_kernel disable_fast_tokenizer data.disable_fast_tokenizer "
            "train.full_determinism* dataloader_num_workers data.dataloader_*"
        ),
        _ENGINE: (
            "vllm.enforce_eager vllm.enable_prefix* vllm.sync_* vllm.num_* vllm_sync_* vllm_num_* "
            "enforce_eager enable_prefix_caching"
        ),
        _SAVED: "ckpt.* save_hf_ckpt ckpt_path max_ckpt_mem disable_ckpt",
        _LOGGED: "logger.* wandb_* use_wandb_*",
        _EVALUATED: "eval.* eval_split eval_temperature eval_n_samples_per_prompt",
        "sources are files, folders and names of the hub": "use_ms data.use_ms",
    },
    "lightrft": {
        _SPEED: (
            "grad_accum_dtype overlap_comm zpg gradient_checkpointing_use* local_rank actor_init* "
            "disable_fast_tokenizer disable_ds_ckpt vllm_* enforce_eager use_ms fps"
        ),
        _SAVED: "save_hf*",
        _LOGGED: "wandb_*",
        _EVALUATED: "eval_split pretrain_split",
    },
    "prime-rl": {
        _LOGGED: (
            "log.* *.log.* monitors.* wandb.* *.monitors.* *.wandb.* *.metrics_server.* *.heartbeat.* bench"
        ),
        _STARTED: ("slurm.* deployment.* env_vars.* *.env_vars.* clean_output_dir output_dir *.port *.host"),
        _SAVED: "ckpt.* *.ckpt.* weight_broadcast.* *.weight_broadcast.*",
        _ENGINE: (
            "inference inference.* orchestrator.client.* orchestrator.max_concurrent* "
            "orchestrator.tasks_per_minute"
        ),
        _EVALUATED: "eval.* val.* orchestrator.eval.* orchestrator.val.*",
        _SPEED: (
            "trainer.model.* trainer.dist_timeout* trainer.gc* trainer.max_concurrent* model.ac* "
            "model.compile* model.fsdp* model.reshard* model.ep model.optimization_dtype "
            "model.reduce_dtype trainer.memory_profiler* trainer.profile* trainer.enable_* "
            "dist_timeout_seconds"
        ),
    },
}


def reason(library: str, name: str, value: Any = None) -> str | None:
    """Return why an option of a library changes no objective; None where that is not known."""
    told = f"{name}={str(value).lower()}"
    for why, patterns in HARMLESS.get(library, {}).items():
        if any(fnmatchcase(told if "=" in x else name, x) for x in patterns.split()):
            return why
    return None
