"""Options of LightRFT; most are OpenRLHF's older names."""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rft_fn.tools.other_libraries import objectives
from rft_fn.tools.other_libraries import rows as r

__all__ = [
    "LIBRARY", "NUMBERS", "SHARED", "SHARES", "TABLE", "UNUSED", "combine", "is_true", "pair", "script",
]  # fmt: skip

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
            hint=r.COLUMN,
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
        "train.max_epochs max_epochs": r.same("--epochs", hint=(r.ROLLOUT_EPOCHS, r.Flag("epochs"))),
        "aux_loss_coef": r.same("--router-aux"),
        "lr_warmup_ratio": r.by_kind(
            rl=r.nothing("--warmup counts rollouts"),
            examples=r.nothing("--warmup counts steps"),
            hint=r.WARMUP,
        ),
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
        "flash_attn": r.CHOSEN_ATTENTION,
        "ds.load_in_4bit load_in_4bit": r.NF4,
        "ds.lora.rank lora_rank": r.same("--lora-rank", remark="0 trains all weights"),
        "ds.lora.alpha lora_alpha": r.same("--lora-alpha"),
        "lora_dropout": r.DROPOUT,
        "target_modules": _TARGETS,
        "ckpt.output_dir save_path": r.same("--out", remark="the model is its subfolder model"),
        "ckpt_path": _CHECKPOINTS,
        "ckpt.save_steps save_steps": r.SAVE_EVERY,
        "ckpt.max_num max_ckpt_num": r.same("--keep"),
        "max_ckpt_mem": r.Row("--max-bytes {x}", "bytes; there GB", {"1e8": ""}, remark="counted in bytes"),
        "ckpt.load_enable load_checkpoint": r.RESUMED,
        "eval.steps eval_steps": r.by_kind(rl=r.EVAL_EVERY, pairs=r.EVAL_EVERY, sft=r.UNEVALUATED),
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
        "logging_steps": r.LOGGED,
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
            "--reward model:{x}", "a folder with a head; {} is none", hint=r.REWARD_MODEL
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
        "data.label_key label_key": r.nothing("rewards get every column by its name", r.ANSWER),
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
        "train.num_episodes num_episodes": r.same("--data-epochs", hint=r.DATA_EPOCHS),
        "enable_ema": r.nothing("--ema, the decay, switches it on", r.Flag("ema", "its decay; 0 is off")),
        "actor.model_name_or_path": r.same("--model"),
        "reward.model_name_or_path": r.Row("--reward model:{x}", "a folder with a head", hint=r.REWARD_MODEL),
        "reward.remote_url": r.same(
            "--reward",
            "docs/rewards.md has the request in OpenRLHF's form",
            remark="given as FILE.py:FUNCTION",
        ),
    },
    "examples": {
        "ds.lora.dropout": r.DROPOUT,
        "ds.lora.target_modules": _TARGETS,
        "adam.betas adam_betas": r.Row(
            "--beta1 {x} --beta2 {x}", "one number each", remark="the second is --beta2"
        ),
        "data.max_samples": r.nothing("--steps or --epochs"),
        "ckpt.path": _CHECKPOINTS,
        "logger.logging_steps": r.LOGGED,
        "max_len": r.by_kind(sft=_EXAMPLE, pairs=_PAIR, hint=_EXAMPLE.hint),
    },
    "pairs": {
        "eval.split eval_split": _EVAL_SPLIT,
    },
    "": {
        "prompt_split": r.only(r.SPLIT),
        "algo.advantage.estimator advantage_estimator": r.only(
            r.Flag(
                "algorithm",
                "group_norm is grpo, reinforce_baseline is reinforce_pp_baseline; gae is in ppo.py",
            )
        ),
        "algo.kl.init_coef init_kl_coef": r.only(r.KL_IN_REWARD),
        "algo.kl.use_loss use_kl_loss": r.only(r.KL_IN_LOSS),
        "actor.eps_clip eps_clip": r.only(r.CLIP),
        "train.enable_ema": r.only(r.Flag("ema", "its decay; 0 is off")),
        "ckpt.max_mem": r.only(r.Flag("max_bytes", "counted in bytes")),
    },
}

# of LightRFT only
TABLE: r.Table = {
    "rl": {
        "max_eval_samples": r.same("--eval-prompts", hint=(r.Flag("eval_prompts"), r.Flag("count"))),
        "reference_key": r.nothing("rewards get every column by its name", r.ANSWER),
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
        "use_fire": r.nothing("the loss would take the first token for one of the usual temperature"),
        "first_token_temperature": _UNREAD,
        "use_gspo": r.choice(true="--algorithm gspo", false="", remark="gspo"),
        "use_cpg_loss": r.choice(true="--algorithm cpgd", false="", remark="cpgd"),
        "loss_agg_mode": r.choice(
            "by the algorithm; --weight has means", **{"seq-mean-token-mean": ""}, hint=r.ALGORITHM
        ),
        "limit_mm_image_per_prompt limit_mm_video_per_prompt": r.nothing(
            "a prompt may have any number of them"
        ),
        "mark_high_entropy_tokens": r.nothing("rft report shows the entropy of tokens"),
        "trajectory_analysis print_replay_buffer_stats": r.LOGGED,
        "disable_logprobs_flashattn": r.CHOSEN_ATTENTION,
        "initial_model_shard_size": r.nothing("the initial model is sharded as the policy"),
        "normalize_reward_for_critic": _UNREAD,
        "system_prompt_path": r.nothing("--system takes the text"),
        "max_pixels": r.same("--max-pixels", hint=""),
        "high_entropy_token_ratio": r.nothing("rft_fn.weight has the function, for a copy of the script"),
        "advantages_norm": r.flag("--whiten", "of ppo.py"),
        "advantage_clip": r.nothing("one line in a copy of the script: adv.clamp"),
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
        "save_trajectories num_trajectories_to_save": r.nothing(r.COMPLETIONS),
        "log_dir": r.same("--strategy.log-dir"),
        "plot_every": r.same("--strategy.plot-every"),
        "rm_use_engine": r.nothing("judge:FOLDER asks an engine, model:FOLDER does not need one"),
        "rm_engine_cudagraph": _UNREAD,
    },
}

# ------------------------------------------------------------------------------ options that count together


def combine(
    options: Mapping[str, Any], objective: Callable[[Mapping[str, Any]], r.Combined] = objectives.lightrft
) -> r.Combined:
    """Return the objective, where the KL belongs, columns, sizes and pairs of numbers, by the older names."""
    found, critic = objective(options), script(options) == "ppo"
    used = found.used | {"init_kl_coef", "use_kl_loss", "kl_estimator", "adam_betas", "reward_clip_range"}
    arguments, notes = [*found.arguments], [*found.notes]

    # one coefficient there, in the loss or in the reward; ppo.py has it in the reward
    in_loss = critic or is_true(options.get("use_kl_loss"))
    arguments.append(f"{'--kl' if in_loss else '--kl-in-reward'} {options['init_kl_coef']}")
    if critic and is_true(options.get("use_kl_loss")):
        notes.append("use_kl_loss: ppo.py has the KL in the reward of each token, not in the loss")

    # FSDP wins over a stage of ZeRO
    if is_true(options.get("fsdp")):
        used |= {"zero_stage", "fsdp"}
        arguments.append("--strategy.fsdp")

    # the prompt: messages where a chat template is applied, else a text
    key = options.get("input_key") or "input"
    used |= {"input_key", "apply_chat_template", "input_template"}
    template = options.get("input_template")
    if template:
        text = str(template).replace("{}", f"{{{key}}}")
        arguments.append(f"--template {shlex.quote(text)}")
    elif is_true(options.get("apply_chat_template")):
        arguments.append(f"--messages {key}")
        notes.append(f"--messages: where the column {key} holds texts, --template '{{{key}}}' in its place")
    else:
        arguments.append(f"--template '{{{key}}}'")
        notes.append("--template: theirs is the whole prompt; here the model's chat template goes around it")

    # a pack must hold a prompt and its response
    longest = r.integer(options, "max_len", "data.max_len")
    new = r.integer(options, "generate_max_len", "rollout.max_new_tokens", "max_new_tokens", default=1024)
    if longest and "prompt_max_len" not in options:
        used |= {"data.max_len", "max_len"}
        new = min(new, max(longest // 2, 1))
    prompt = r.integer(options, "prompt_max_len", default=longest - new if longest else 1024)
    budget = max(prompt + new, r.integer(options, "train.max_tokens_per_gpu"))
    arguments += [f"--max-prompt {prompt}", f"--max-new {new}", f"--budget {budget}"]
    used |= {"prompt_max_len", "generate_max_len", "rollout.max_new_tokens", "max_new_tokens"}
    used |= {"train.max_tokens_per_gpu"}

    # a share of a run whose length is not told
    names = ("lr_warmup_ratio", "actor.lr_warmup_ratio")
    ratio = r.number(options, *names, default=0.03)
    used |= {*names}
    arguments.append("--warmup 0")
    if ratio:
        counts = "updates" if critic else "rollouts"
        notes.append(f"--warmup: theirs is {ratio:g} of the run; it counts {counts}")

    # without a critic nothing of one is read
    if not critic:
        used |= {x for x in options if x.startswith(("critic", "lambd", "kl_target"))} | _OF_A_CRITIC
        if r.number(options, "gamma", "algo.advantage.gamma", default=1.0) != 1:
            notes.append(
                "gamma: advantage.reinforce_pp takes it, in a copy of grpo.py; others do not read it"
            )
    if not r.integer(options, "lora_rank", "ds.lora.rank"):
        used |= {f"{head}{x}" for head in ("lora_", "ds.lora.") for x in ("rank", "alpha", "dropout")}
        used |= {"target_modules", "ds.lora.target_modules"}

    # pairs of numbers, and the penalty of DAPO where it is on
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), pair(options.get("adam_betas")))]
    bounds = pair(options.get("reward_clip_range"))
    if len(bounds) == 2 and float(bounds[0]) == -float(bounds[1]):
        arguments.append(f"--reward-clip {bounds[1]}")
    elif bounds:
        notes.append(f"reward_clip_range={bounds}: --reward-clip is the same on both sides")
    if "overlong_buffer" in options or "overlong_buffer_len" in options:
        used |= {"overlong_buffer", "overlong_buffer_len"}
        if is_true(options.get("overlong_buffer", True)):
            arguments.append(f"--overlong {options.get('overlong_buffer_len', 1024)}")
    rewards = _rewards(options)
    return r.Combined([*arguments, *rewards.arguments], used | rewards.used, [*notes, *rewards.notes])


_OF_A_CRITIC = {
    "algo.advantage.lambd", "algo.advantage.gamma", "gamma", "algo.kl.target", "algo.kl.horizon", "value_clip",
    "freezing_actor_steps", "save_value_network", "advantages_norm",
}  # fmt: skip


def _rewards(options: Mapping[str, Any]) -> r.Combined:
    """Return the rewards: models of a folder or of several by their names, functions, and servers."""
    used = {"reward_pretrain", "remote_rm_url", "reward.model_name_or_path", "reward.remote_url"}
    found, notes = [], []
    folders = str(options.get("reward_pretrain") or options.get("reward.model_name_or_path") or "").strip()
    if folders.startswith("{"):
        found += [f"model:{x}" for x in re.findall(r":\s*['\"]([^'\"]+)['\"]", folders)]
    elif folders:
        found += [f"model:{x.strip()}" for x in folders.split(",")]
    places = options.get("remote_rm_url") or options.get("reward.remote_url") or []
    for place in [places] if isinstance(places, str) else places:
        for x in str(place).split(","):
            found.append(f"openrlhf:{x}:reward_func" if x.endswith(".py") else x)
    if not found and folders == "{}":
        found.append("lightrft:reward_models_utils.py:reward_fn")
        notes.append(
            "--reward: no model; theirs is the rule that the column label names, reward_fn of the file "
            "reward_models_utils.py beside train_colocate.py, here as --reward lightrft:FILE.py:reward_fn"
        )
    if not found and options.get("train.agent_func_path"):
        notes.append("--reward: the agent gives it; the rewards of --environment are its own")
    arguments = [f"--reward {' '.join(map(shlex.quote, found))}"] if found else []
    return r.Combined(arguments, used, notes)


def is_true(x: Any) -> bool:
    """Return whether a switch is on."""
    return str(x).lower() == "true"


def _examples(kind: str, options: Mapping[str, Any]) -> r.Combined:
    """Return the columns, the sizes and the loss of a reward model, scalar or generative."""
    length = r.integer(options, "prompt_max_len", default=1024)
    length += r.integer(options, "generate_max_len") if kind == "sft" else 0
    used = {"prompt_max_len", "generate_max_len", "adam_betas", "lr_warmup_ratio", "task_instruction", "fsdp"}
    arguments = [f"--budget {2 * length if kind == 'rm' else length}", "--warmup 0"]
    arguments.append(f"--max-length {length}" if kind == "rm" else f"--max-prompt {length}")
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), pair(options.get("adam_betas")))]
    ratio = r.number(options, "lr_warmup_ratio", default=0.03)
    notes = [f"--warmup: theirs is {ratio:g} of the run; it counts steps"] if ratio else []
    if is_true(options.get("fsdp")):
        used |= {"zero_stage"}
        arguments.append("--strategy.fsdp")
    if not r.integer(options, "lora_rank"):
        used |= {"lora_rank", "lora_alpha", "lora_dropout", "target_modules"}
    columns = "messages" if kind == "sft" else "prompt chosen rejected"
    arguments.append(f"--messages {columns}")
    notes.append(
        f"--data, --messages: theirs are files of a data handler; here rows with the columns {columns}"
    )
    if options.get("task_instruction"):
        notes.append("task_instruction: a part of each prompt of the rows")
    if kind == "sft":
        return r.Combined(arguments, used, notes)

    # the loss of a pair
    used |= {"loss_type", "margin", "heads_types", "scale_for_train", "pooling_method"}
    loss = str(options.get("loss_type") or "hps")
    if loss != "sigmoid":
        notes.append(f"objective: theirs is {loss}; train_rm.py has Bradley-Terry, a copy of it another one")
    heads = pair(options.get("heads_types"))
    if heads and heads != ["preference"]:
        arguments.append(f"--heads {' '.join(map(str, heads))}")
    arguments.append(f"--pool {'last' if options.get('pooling_method') == 'last' else 'attention'}")
    if is_true(options.get("scale_for_train")):
        notes.append("scale_for_train: scores are calibrated after the run, not scaled in it")
    return r.Combined(arguments, used, notes)


def pair(value: Any) -> list[Any]:
    """Return the two numbers of a list, or of a text; none of None."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return list(value)


def script(options: Mapping[str, Any]) -> str:
    """Return ppo where there is a critic, else grpo."""
    return "ppo" if str(options["advantage_estimator"]).lower() == "gae" else "grpo"


NUMBERS = (
    "rollout_batch_size", "train_batch_size", "n_samples_per_prompt", "prompt_max_len", "generate_max_len",
    "max_len", "init_kl_coef", "actor_learning_rate", "critic_learning_rate", "num_episodes", "max_epochs",
    "eps_clip", "eps_clip_low_high", "lr_warmup_ratio", "lora_rank", "lora_alpha", "overlong_buffer_len",
    "adam_betas", "train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt", "data.max_len",
    "rollout.max_new_tokens", "algo.kl.init_coef", "actor.adam.lr", "critic.adam.lr", "actor.eps_clip",
    "actor.eps_clip_low_high", "train.num_episodes", "train.max_epochs", "reward.clip_range", "ds.lora.rank",
    "learning_rate", "adam.lr", "actor.adam.betas", "adam.betas", "reward_clip_range",
)  # fmt: skip
UNUSED = {
    "grad_accum_dtype": "gradients are summed in float32", "overlap_comm": "of DeepSpeed's own settings",
    "zpg": "of DeepSpeed's own settings", "gradient_checkpointing_use": "without use_reentrant",
    "disable_": "of that library's own files", "local_rank": "torchrun sets it",
    "actor_init": "a sharded model is always made on the meta device",
    "save_hf": "a run's folder `model` is one that transformers loads",
    "use_ms": "sources are files, folders and names of the hub", "wandb_": "wandb's own variables have it",
    "value_head_prefix": "the head has one name", "pretrain_split": "part of the source: NAME@SPLIT",
    "eval_split": "part of the source: --eval-data NAME@SPLIT",
    "fps": "the frames of a video are chosen before", "probing_layer": "scores are of the last layer",
    "processes": "torchrun --nnodes and --nproc-per-node",
}  # fmt: skip
_EXAMPLES: r.Table = {
    "examples": {
        "train_data": r.same("--data"),
        "actor_learning_rate": r.same("--lr"),
        "max_pixels": r.same("--max-pixels"),
        "engine_type engine_tp_size engine_mem_util": r.nothing("nothing is sampled"),
    },
    "rm": {"eval_data": r.same("--eval-data")},
    "sft": {"eval_data": r.UNEVALUATED},
}


def _of_examples(kind: str, ours: str, program: str) -> r.Trainer:
    """Return the trainer of a kind of reward model."""
    rows = {name: row for name, row in r.rows_of(SHARED, kind).items() if "." not in name}
    return r.Trainer(
        rows={**rows, **r.rows_of(_EXAMPLES, kind)},
        defaults={
            "actor_learning_rate": 1e-6, "train_batch_size": 128, "max_epochs": 1, "adam_betas": (0.9, 0.95),
            "zero_stage": 2,
        },
        combine=partial(_examples, kind),
        script=lambda options: ours,
        sections=UNUSED,
        programs=tuple(f"{program}_{x}" for x in ("vl", "al", "text")),
        tells=("heads_types", "pooling_method") if kind == "rm" else (),
        numbers=NUMBERS,
    )  # fmt: skip


LIBRARY = r.Library(
    "LightRFT",
    {
        "rm": _of_examples("rm", "train_rm", "train_srm"),
        "sft": _of_examples("sft", "sft", "train_grm"),
        "rl": r.Trainer(
            rows={
                **{name: row for name, row in r.rows_of(SHARED, "rl").items() if "." not in name},
                **r.rows_of(TABLE, "rl"),
            },
            defaults={
                "actor_learning_rate": 1e-6,
                "critic_learning_rate": 9e-6,
                "eps_clip": 0.2,
                "value_clip": 0.2,
                "lambd": 0.95,
                "rollout_batch_size": 512,
                "train_batch_size": 128,
                "generate_max_len": 1024,
                "prompt_max_len": 1024,
                "n_samples_per_prompt": 1,
                "num_episodes": 1,
                "init_kl_coef": 0.01,
                "zero_stage": 2,
                "adam_betas": (0.9, 0.95),
                "engine_type": "vllm",
                "advantage_estimator": "gae",
            },
            combine=combine,
            script=script,
            sections=UNUSED,
            programs=("train_colocate",),
            tells=("advantage_estimator", "n_samples_per_prompt", "rollout_batch_size"),
            numbers=NUMBERS,
        ),
    },
    packages=("lightrft",),
)
