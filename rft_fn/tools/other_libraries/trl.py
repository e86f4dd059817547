"""GRPOConfig of TRL 1.x, and the options that its trainers share."""

import shlex
from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries.rows import Combined, Row, Trainer, choice, commas, nothing, same, switch

__all__ = ["COMMON", "OTHERS", "RL", "SECTIONS", "shared"]

_ENTROPY = "add a term to the loss in a copy of the script: out.entropy, see docs/algorithms.md"
_SAPO = "loss.sapo takes the temperatures: write the loss into a copy of grpo.py"
_BUDGET = "--budget bounds the tokens of a pack; the gradient does not depend on it"
_SERVED = "of vLLM's own server: `trl vllm-serve` speaks another protocol, docs/engines.md starts one"
_PRINTED = "trajectories.jsonl in the folder of the run has prompts, responses and rewards"

# of transformers' TrainingArguments and TRL's ModelConfig and ScriptArguments, which all trainers have
COMMON: dict[str, Row] = {
    # the model and its data
    "model_name_or_path": same("--model"),
    "dataset_name": same("--data", "a hub name or a path; :CONFIG and @SPLIT are part of it"),
    "dataset_config": nothing("part of the source: --data NAME:CONFIG"),
    "dataset_train_split": nothing("part of the source: --data NAME@SPLIT"),
    "output_dir": same("--out"),
    "seed": same("--seed"),
    "shuffle_dataset": nothing("rows are always drawn in an order that the seed and the step decide"),
    "trust_remote_code": nothing("the scripts run no code of a model's folder"),
    "model_init_kwargs": nothing("float32 on a CPU, bfloat16 on a GPU; see --strategy.bf16 and --quantize"),
    "torch_dtype": nothing("float32 on a CPU, bfloat16 on a GPU; see --strategy.bf16 and --quantize"),
    "dtype": nothing("float32 on a CPU, bfloat16 on a GPU; see --strategy.bf16 and --quantize"),
    "attn_implementation": nothing("the fastest attention that packs allow is chosen automatically"),
    "use_liger_kernel": nothing("the fused head is on by default"),
    "router_aux_loss_coef": same("--router-aux"),
    "gradient_checkpointing": switch("gradient-checkpointing"),
    "gradient_checkpointing_kwargs": nothing("--gradient-checkpointing is always without use_reentrant"),
    "bf16": switch("strategy.bf16", "computes in bfloat16, parameters and sums stay in float32"),
    "use_peft": Row("--lora-rank 16 --lora-alpha 32", "TRL's rank and alpha, where lora_r is left out"),
    "lora_r": same("--lora-rank"),
    "lora_alpha": same("--lora-alpha"),
    "lora_dropout": nothing("a policy with dropout is not the one that sampled"),
    "lora_target_modules": commas("--lora-targets"),
    "load_in_4bit": choice(true="--quantize nf4", false=""),
    "load_in_8bit": choice(true="--quantize int8", false=""),
    "disable_dropout": nothing("dropout is always off"),
    # the optimizer and the course of the run
    "learning_rate": same("--lr"),
    "lr_scheduler_type": choice(
        "down to --lr-end, a share of --lr",
        linear="--schedule linear --lr-end 0",
        cosine="--schedule cosine --lr-end 0",
        constant="--schedule constant",
        constant_with_warmup="--schedule constant",
    ),
    "adam_beta1": same("--beta1"),
    "adam_beta2": same("--beta2"),
    "weight_decay": same("--weight-decay"),
    "max_grad_norm": same("--max-norm"),
    "save_total_limit": same("--keep"),
    "save_strategy": nothing("--save-every, which counts steps"),
    "eval_strategy": nothing("evaluations come by a number of steps, where the script has any"),
    "per_device_eval_batch_size": nothing(_BUDGET),
    "logging_steps": nothing("every step is logged"),
    "report_to": choice(
        none="",
        wandb="--trackers wandb",
        tensorboard="--trackers tensorboard",
        trackio="--trackers trackio",
    ),
    "run_name": same("--run-name"),
    "resume_from_checkpoint": nothing("run the same command again to resume"),
    "dataset_num_proc": nothing("rows are read as they are drawn; --media-workers is for media"),
    "deepspeed": nothing("--strategy.zero-stage 1, 2 or 3"),
    "fsdp": nothing("torchrun with several processes shards with FSDP2"),
}

ROWS: dict[str, Row] = {
    **COMMON,
    "chat_template_kwargs": same("--chat-template-kwargs", "NAME=VALUE for each entry"),
    "remove_unused_columns": nothing("a reward gets every column"),
    # sampling
    "num_generations": same("--group"),
    "max_completion_length": same("--max-new"),
    "max_prompt_length": same("--max-prompt", "longer prompts are left out, not cut"),
    "temperature": same("--temperature", "divides the logits in training too"),
    "top_p": same("--top-p", "cut in training too"),
    "top_k": nothing("Sampling(top_k=...) has it, in a copy of the script"),
    "min_p": nothing("sampling and training cut alike, and only by top_p and top_k"),
    "repetition_penalty": nothing("the penalised distribution is not the one that is trained"),
    "generation_kwargs": nothing("Sampling has temperature, top_p, top_k, max_new and stop"),
    "use_vllm": choice(true="--strategy.engine-type vllm", false="--strategy.engine-type hf"),
    "vllm_mode": choice(
        "of use_vllm", colocate="--strategy.engine-type vllm", server="--strategy.engine-type openai"
    ),
    "vllm_server_base_url": same("--strategy.engine-servers", _SERVED),
    "vllm_server_host": nothing("part of the address: --strategy.engine-servers http://HOST:PORT"),
    "vllm_server_port": nothing("part of the address: --strategy.engine-servers http://HOST:PORT"),
    "vllm_group_port": nothing("weights reach a server through the folder --strategy.engine-weights"),
    "vllm_gpu_memory_utilization": same("--strategy.engine-mem-util"),
    "vllm_tensor_parallel_size": same("--strategy.engine-tp-size"),
    "vllm_max_model_length": same("--strategy.engine-max-model-len"),
    "vllm_enable_sleep_mode": switch("strategy.enable-engine-sleep"),
    "vllm_server_timeout": same("--strategy.engine-timeout"),
    "max_tool_calling_iterations": nothing("multi_turn.py has environments with a limit of turns"),
    # the loss
    "beta": same("--kl"),
    "num_iterations": same("--epochs"),
    "epsilon": same("--clip-low", "and --clip-high, unless epsilon_high is set"),
    "epsilon_high": same("--clip-high"),
    "delta": same("--dual", "bounds the ratio at negative advantages in both"),
    "sapo_temperature_neg": nothing(_SAPO),
    "sapo_temperature_pos": nothing(_SAPO),
    "mask_truncated_completions": nothing("weight the rollout's mask by ~truncated in a copy of the script"),
    "top_entropy_quantile": nothing("rft_fn.weight.high_entropy, in a copy of the script"),
    "entropy_coef": nothing(_ENTROPY),
    "use_adaptive_entropy": nothing(_ENTROPY),
    "sync_ref_model": nothing("the reference is the initial model; docs/examples/ema_teacher.py moves it"),
    "cast_lm_head_to_fp32": nothing("log-probs are always computed in float32"),
    # the sampler's log-probs
    "vllm_importance_sampling_correction": Row(
        "false: --mismatch none",
        "theirs, by default, drops a response whose whole ratio is above 3 (sequence_mask): "
        "rft_fn.weight.masked_is_seq(..., cap=3.0) in a copy of the script; ours corrects rollouts of older "
        "weights alone, token by token",
        {"false": "--mismatch none"},
    ),
    "vllm_importance_sampling_mode": choice(
        "by token; the functions by sequence are in rft_fn.weight",
        token_truncate="--mismatch tis",
        token_mask="--mismatch mis",
    ),
    "vllm_importance_sampling_clip_max": same("--cap"),
    # rewards
    "reward_funcs": Row("--reward {x}", "FILE.py:FN, called as TRL calls it; a model as model:FOLDER"),
    "reward_weights": nothing("part of the reward: --reward FILE.py:FN=WEIGHT"),
    "multi_objective_aggregation": choice(sum_then_normalize="", normalize_then_sum="--reward-norm group"),
    # the course of the run
    "warmup_ratio": nothing("--warmup counts rollouts"),
    "num_train_epochs": same("--data-epochs"),
    "save_steps": same("--save-every", "counts rollouts"),
    "eval_steps": same("--eval-every", "counts rollouts"),
    "log_completions": nothing(_PRINTED),
    "num_completions_to_print": nothing(_PRINTED),
}

DEFAULTS = {
    "epsilon": 0.2,
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "loss_type": "dapo",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
}


ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
OF_THE_SERVER = (
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_max_model_length",
    "vllm_enable_sleep_mode",
)
SECTIONS = {
    "push_to_hub": "upload the folder `model` of the run",
    "hub_": "upload the folder `model` of the run",
}
OTHERS = {
    "kto": "dpo.py learns from pairs",
    "rloo": "python train_scripts/grpo.py --algorithm rloo is that algorithm",
    "ppo": "python train_scripts/ppo.py has a critic",
}
LOSSES = {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "dapo": "dapo",
    "bnpo": "dapo",
    "cispo": "cispo",
    "sapo": "sapo",
}


def _algorithm(options: Mapping[str, Any]) -> Combined:
    """The row of the table, out of a loss, the level of its ratios and the scale of advantages."""
    loss = str(options["loss_type"])
    row = LOSSES.get(loss)
    if options.get("importance_sampling_level") in ("sequence", "sequence_token"):
        row = "gspo"
    arguments, notes = [], []
    if row is None:
        notes.append(f"loss_type={loss}: no row of the table; write the loss into a copy of grpo.py")
    else:
        arguments.append(f"--algorithm {row}")

    # Dr. GRPO leaves out both deviations: of rewards, and of lengths
    scale = str(options.get("scale_rewards", "group")).lower()
    if (scale in ("none", "false")) != (row == "dr_grpo"):
        notes.append(
            f"scale_rewards={scale} with {loss}: advantage.grpo(reward, scale=...) in a copy of grpo.py"
        )
    if scale == "batch":
        arguments.append("--reward-norm batch")
    return Combined(arguments, {"loss_type", "importance_sampling_level", "scale_rewards"}, notes)


def shared(options: Mapping[str, Any]) -> Combined:
    """The data with its config and split, adapters of TRL's size, and steps in place of passes."""
    arguments: list[str] = []
    used: set[str] = set()
    source, config = options.get("dataset_name"), options.get("dataset_config")
    split = options.get("dataset_train_split")
    if source and (config or split):
        used = {"dataset_name", "dataset_config", "dataset_train_split"}
        if config:
            source = f"{source}:{config}"
        if split:
            source = f"{source}@{split}"
        arguments.append(f"--data {shlex.quote(source)}")

    # adapters are on with use_peft; the rank is then TRL's own where none is given
    if "use_peft" in options:
        used |= {"use_peft"}
        if str(options["use_peft"]).lower() == "true" and not options.get("lora_r"):
            arguments += ["--lora-rank 16", f"--lora-alpha {options.get('lora_alpha') or 32}"]

    # a number of steps counts more than one of passes
    if float(options.get("max_steps") or -1) > 0:
        used |= {"num_train_epochs"}
    return Combined(arguments, used, [])


def _engine(options: Mapping[str, Any]) -> Combined:
    """vLLM in the process or on a server."""
    given = [options[name] for name in ADDRESS if options.get(name)]
    mode = str(options.get("vllm_mode") or "")
    on = str(options.get("use_vllm", False)).lower() == "true"
    if not on or not (mode == "server" or (given and not mode)):
        return Combined([], {"vllm_mode", *ADDRESS}, [])

    # a server of a given address, else TRL's own default
    host = str(options.get("vllm_server_host") or "localhost").replace("0.0.0.0", "localhost")
    url = options.get("vllm_server_base_url") or f"http://{host}:{options.get('vllm_server_port') or 8000}"
    own = [name for name in OF_THE_SERVER if options.get(name) not in (None, "")]
    notes = [
        "--strategy.engine-servers: `trl vllm-serve` speaks another protocol; start `vllm serve` in its "
        "place, with the options of docs/engines.md, Starting vLLM",
        "--strategy.engine-weights: add a folder that this machine and the server's share, if they are two",
    ]
    if own:
        notes.append(f"{', '.join(own)}: options of the server's own command line")
    arguments = ["--strategy.engine-type openai", f"--strategy.engine-servers {url}"]
    return Combined(arguments, {"use_vllm", "vllm_mode", *ADDRESS, *OF_THE_SERVER}, notes)


def _combine(options: Mapping[str, Any]) -> Combined:
    """The algorithm; prompts of a step and updates of a rollout, out of batches that count responses."""
    algorithm, engine, more = _algorithm(options), _engine(options), shared(options)
    names = algorithm.used | engine.used | more.used
    names |= {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
    }
    names |= {"generation_batch_size", "max_steps", "warmup_steps"}
    update = int(options["per_device_train_batch_size"]) * int(options["gradient_accumulation_steps"])
    group = int(options["num_generations"])
    accumulated = options.get("steps_per_generation") or options["gradient_accumulation_steps"]
    rollout = int(accumulated) * int(options["per_device_train_batch_size"])
    rollout = int(options.get("generation_batch_size") or rollout)

    # theirs count responses, ours prompts
    arguments = [*more.arguments, *algorithm.arguments, *engine.arguments]
    arguments.append(f"--prompts {max(rollout // group, 1)}")
    notes = [
        *algorithm.notes,
        *engine.notes,
        "--prompts: of one process of theirs; ours are of all processes",
    ]
    if rollout > update:
        arguments.append(f"--strategy.train-batch-size {update}")

    # theirs count updates, ours rollouts
    updates = max(rollout // update, 1) * int(options.get("num_iterations") or 1)
    for name, ours in (("max_steps", "--steps"), ("warmup_steps", "--warmup")):
        if name in options and float(options[name]) >= 0:
            arguments.append(f"{ours} {-(-int(options[name]) // updates)}")
    if updates > 1:
        notes.append(f"--steps, --warmup: they count updates, of which a rollout has {updates}")

    # one limit of theirs is both of ours
    if "epsilon" in options and not options.get("epsilon_high"):
        arguments.append(f"--clip-high {options['epsilon']}")
    return Combined(arguments, names, notes)


def _script(options: Mapping[str, Any]) -> str:
    return "grpo"


RL = Trainer(
    ROWS,
    DEFAULTS,
    _combine,
    _script,
    SECTIONS,
    ("grpo",),
    (
        *(f"loss_type={loss}" for loss in LOSSES),
        "importance_sampling_level",
        "scale_rewards",
        "steps_per_generation",
        "generation_batch_size",
    ),
)
