"""The options of OpenRLHF's train_ppo_ray: with dots, and the older names with underscores."""

from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries import lightrft
from rft_fn.tools.other_libraries.rows import Combined, Row, Trainer, choice, flag, nothing, same, switch

__all__ = ["OTHERS", "RL", "ROWS"]

_COLOCATED = "models always share the devices of the processes; --strategy.offload-models moves them by phase"

ROWS: dict[str, Row] = {
    "actor.model_name_or_path": same("--model"),
    "critic.model_name_or_path": same("--critic", "of ppo.py"),
    "reward.model_name_or_path": Row("--reward model:{x}", "a folder with a head"),
    "reward.remote_url": Row("--reward {x}", "docs/remote_rewards.md has the request in OpenRLHF's form"),
    "data.prompt_dataset": same("--data"),
    "data.prompt_probs": nothing("part of the source: --data a.jsonl=0.7 b.jsonl=0.3"),
    "data.input_key": Row("--template '{{{x}}}'", "a column of text; of messages: --messages {x}"),
    "data.label_key": nothing("rewards get every column by its name"),
    "data.input_template": same("--template", "the name of the column in braces"),
    "data.apply_chat_template": nothing("on where the tokenizer has a template"),
    "data.max_len": nothing("--max-prompt and --max-new bound the two parts"),
    "data.image_key": nothing("columns with images are detected: docs/media_data.md"),
    "eval.dataset": same("--eval-data"),
    "eval.steps": Row("--eval-every {x}", "", {"-1": "--eval-every 1000000"}),
    "rollout.batch_size": same("--prompts"),
    "rollout.n_samples_per_prompt": same("--group"),
    "rollout.max_new_tokens": same("--max-new"),
    "rollout.temperature": same("--temperature", "divides the logits in training too"),
    "rollout.top_p": same("--top-p", "cut in training too"),
    "rollout.micro_batch_size": nothing("--strategy.engine-batch is what samples at a time"),
    "train.batch_size": same("--strategy.train-batch-size"),
    "train.micro_batch_size": nothing("--budget bounds the tokens of a pack"),
    "train.max_tokens_per_gpu": same("--budget"),
    "train.max_epochs": same("--epochs"),
    "train.num_episodes": same("--data-epochs"),
    "train.seed": same("--seed"),
    "train.ema_beta": nothing("--ema, which also switches it on"),
    "train.async_enable": choice("needs an engine in a process of its own", true="--ahead 1", false=""),
    "train.async_queue_size": same("--ahead"),
    "train.partial_rollout_enable": nothing("--partial, the tokens by which a response grows in a step"),
    "train.dynamic_batch_enable": nothing("packs are always filled by tokens"),
    "train.colocate_all": nothing(_COLOCATED),
    "train.colocate_actor_ref": nothing(_COLOCATED),
    "train.agent_func_path": nothing("rft_fn.environment: reset and step as functions, in multi_turn.py"),
    "actor.adam.lr": same("--lr"),
    "actor.adam.weight_decay": same("--weight-decay"),
    "actor.lr_scheduler": choice(
        cosine_with_min_lr="--schedule cosine", linear="--schedule linear", constant="--schedule constant"
    ),
    "actor.min_lr_ratio": same("--lr-end"),
    "actor.lr_warmup_ratio": nothing("--warmup counts rollouts"),
    "actor.max_norm": same("--max-norm"),
    "actor.dual_clip": same("--dual"),
    "actor.entropy_coef": same("--entropy", "of ppo.py; in grpo.py add it to the loss"),
    "actor.aux_loss_coef": same("--router-aux"),
    "actor.gradient_checkpointing_enable": flag("--gradient-checkpointing"),
    "actor.freeze_visual_encoder": choice(true="--freeze visual", false=""),
    "critic.adam.lr": same("--critic-lr", "of ppo.py"),
    "critic.value_clip": same("--value-clip", "of ppo.py"),
    "critic.freezing_steps": Row("--freeze-actor-steps {x}", "of ppo.py", {"-1": ""}),
    "critic.save_value_network": flag("--save-critic", "of ppo.py"),
    "algo.advantage.lambd": same("--gae-lambda", "of ppo.py"),
    "algo.advantage.gamma": same("--gamma", "of ppo.py"),
    "algo.advantage.no_std_norm": nothing("advantage.grpo(reward, scale=False) in a copy of grpo.py"),
    "algo.advantage.is_correction_enable": choice(true="--mismatch tis", false=""),
    "algo.advantage.is_correction_type": choice(tis="--mismatch tis", icepop="--mismatch icepop"),
    "algo.kl.target": same("--kl-target", "of ppo.py"),
    "algo.kl.horizon": same("--kl-horizon", "of ppo.py"),
    "algo.kl.estimator": choice("one that has the right gradient; rft_fn.loss has them", k1="", k2="", k3=""),
    "algo.dynamic_filtering_enable": choice(true="--rounds 4", false=""),
    "reward.normalize_enable": flag("--normalize-reward"),
    "reward.overlong_buffer_len": same("--overlong"),
    "ds.zero_stage": same("--strategy.zero-stage"),
    "ds.adam_offload": flag("--strategy.adam-offload"),
    "ds.param_dtype": choice(bf16="--strategy.bf16", fp16=""),
    "ds.packing_samples": flag("--strategy.packing-samples"),
    "ds.lora.rank": same("--lora-rank"),
    "ds.lora.alpha": same("--lora-alpha"),
    "ds.load_in_4bit": choice(true="--quantize nf4", false=""),
    "ds.ring_attn_size": same("--strategy.sp-size", "by all-to-all of heads, not by a ring"),
    "ds.use_liger_kernel": nothing("the fused head is on by default"),
    "vllm.num_engines": nothing(
        "--strategy.engine-type vllm; each process, or group of tp processes, has one"
    ),
    "vllm.tensor_parallel_size": same("--strategy.engine-tp-size"),
    "vllm.gpu_memory_utilization": same("--strategy.engine-mem-util"),
    "vllm.enable_sleep": switch("strategy.enable-engine-sleep"),
    "vllm.sync_backend": nothing("an engine in the process gets the tensors directly"),
    "ckpt.output_dir": same("--out"),
    "ckpt.save_steps": Row("--save-every {x}", "", {"-1": "--save-every 1000000"}),
    "ckpt.max_num": same("--keep"),
    "ckpt.load_enable": nothing("run the same command again to resume"),
    "logger.wandb.key": choice(
        "the key comes from wandb's own login", **{"false": "", "*": "--trackers wandb"}
    ),
    "logger.wandb.project": same("--project"),
    "logger.wandb.run_name": same("--run-name"),
    "logger.tensorboard_dir": Row("--trackers tensorboard --strategy.log-dir {x}", ""),
}

# names with dots of options that only have a meaning together, as the older ones are called
OLDER = {
    "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.use_loss": "use_kl_loss",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.policy_loss_type": "policy_loss_type",
    "actor.adam.betas": "adam_betas",
    "reward.clip_range": "reward_clip_range",
}

DEFAULTS = {
    "actor.adam.lr": 1e-6,
    "actor.eps_clip": 0.2,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "ds.zero_stage": 2,
    "algo.kl.init_coef": 0.01,
    "algo.advantage.estimator": "gae",
}


def _older(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the older names of those in OLDER."""
    return {OLDER.get(name, name): value for name, value in options.items()}


def _combine(options: Mapping[str, Any]) -> Combined:
    found = lightrft.combine(_older(options))
    names = {name for name, older in OLDER.items() if older in found.used}
    return Combined(found.arguments, found.used | names, found.notes)


def _script(options: Mapping[str, Any]) -> str:
    return lightrft.script(_older(options))


SECTIONS = {
    "ref.": _COLOCATED,
    "actor.num_": "torchrun --nnodes and --nproc-per-node",
    "critic.num_": "torchrun --nnodes and --nproc-per-node",
    "reward.num_": "torchrun --nnodes and --nproc-per-node",
}

OTHERS = {
    "train_kd": "rft_fn.loss.reverse_kl and reverse_kl_top_k are losses of distillation",
    "train_kto": "dpo.py learns from pairs",
    "train_prm": "train_rm.py --kind steps learns process rewards",
}

RL = Trainer(
    {**lightrft.ROWS, **ROWS},
    DEFAULTS,
    _combine,
    _script,
    SECTIONS,
    ("train_ppo_ray", "train_ppo"),
    ("actor.", "algo.", "critic.", "rollout.", "reward.", "vllm.", *(f"{name}=" for name in OLDER.values())),
)
