"""Options of verl 0.7 by their dotted names: ppo_trainer, sft_trainer and the older fsdp_sft_trainer."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries import objectives
from rft_fn.tools.other_libraries import rows as r

__all__ = ["LIBRARY", "TABLE"]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_UNPADDED = r.nothing("packs are always without padding")
_MICRO = r.nothing(r.BUDGET)
_SHARE = r.nothing("--warmup counts steps")
_UNNEEDED = r.nothing("rows are read as they are drawn, there is no loader")
_FIELD = r.nothing("part of --template or --response, as '{COLUMN[KEY]}'")

_MEGATRON = "torchrun with several processes shards with FSDP2, by --strategy.fsdp and shard-size"
_PROFILED = "timing.jsonl has the seconds of each phase"
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
        "trainer.logger": r.TRACKERS,
        "trainer.n_gpus_per_node": r.nothing("torchrun --nproc-per-node", r.PROCESSES),
        "trainer.nnodes": r.nothing("torchrun --nnodes", r.PROCESSES),
        "trainer.resume_mode trainer.resume_from_path": r.RESUMED,
        "trainer.device": r.nothing("a GPU where there is one"),
        "data.val_batch_size": r.nothing(r.BUDGET),
        "data.train_max_samples data.val_max_samples": r.nothing("--steps bounds what is drawn"),
        "data.trust_remote_code": r.UNTRUSTED,
        "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt": _UNNEEDED,
        "data.return_multi_modal_inputs data.filter_overlong_prompts_workers": _UNNEEDED,
        "data.dataloader_num_workers data.use_shm": _UNNEEDED,
        "data.apply_chat_template_kwargs": r.nothing("--chat-template-kwargs NAME=VALUE"),
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
        "custom_reward_function.path": r.Row(
            "--reward verl:{x}:compute_score", "with the name and the reward_kwargs", hint=r.REWARD_FILE
        ),
        "custom_reward_function.name": r.nothing("part of --reward verl:FILE.py:NAME", r.REWARD_FILE),
        "reward_model.enable": r.nothing("--reward model:FOLDER"),
        "reward_model.model.path": r.Row(
            "--reward model:{x}", "a folder with a head, where reward_model.enable is on", hint=r.REWARD_MODEL
        ),
        "reward_model.overlong_buffer.len": r.same("--overlong", "where it is enabled"),
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": r.same("--overlong", "where it is enabled"),
        "reward_model.reward_manager": r.nothing(
            "they differ in how rows are judged together; the reward is the same"
        ),
        "trainer.max_actor_ckpt_to_keep": r.same("--keep"),
        "trainer.max_critic_ckpt_to_keep": r.nothing("--keep is of both models"),
        "trainer.log_val_generations trainer.validation_data_dir": r.nothing(r.COMPLETIONS),
        "trainer.rollout_data_dir": r.nothing(r.COMPLETIONS),
        "data.gen_batch_size": r.nothing("--rounds samples --prompts at a time"),
        "trainer.val_before_train": r.nothing(
            "the first evaluation is always before the first step", "step 0 always has an evaluation"
        ),
        "trainer.critic_warmup": r.same("--freeze-actor-steps", "of ppo.py; 0 is none"),
        "algorithm.rollout_correction.rollout_is": r.choice(
            "by token; functions of sequences are in rft_fn.weight, for a copy of the script",
            token="--mismatch tis",
        ),
        "algorithm.rollout_correction.rollout_is_threshold": r.same("--cap"),
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
        "lora.rank": r.same("--lora-rank"),
        "lora.alpha": r.same("--lora-alpha"),
        "enable_activation_offload": r.nothing("--gradient-checkpointing saves that memory"),
        "lora_adapter_path": r.nothing("--model FOLDER, of the adapters: they are trained further"),
        "custom_chat_template": r.nothing("the model's own template; a folder with another one has it"),
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
        "fsdp_config.param_offload": r.flag("--strategy.fsdp-cpu-offload"),
        "fsdp_config.optimizer_offload": r.flag("--strategy.adam-offload"),
        "fsdp_config.fsdp_size": r.Row("--strategy.shard-size {x}", values={"-1": ""}),
        "use_torch_compile": r.nothing("no counterpart in verl's sense: the fused head compiles by itself"),
        "freeze_vision_tower": r.choice(true="--freeze visual", false=""),
        "optim.betas": r.Row("--beta1 {x} --beta2 {x}", "one number each"),
        "optim.lr_decay_style": r.choice(constant="--schedule constant", cosine="--schedule cosine"),
        "shuffle": r.ORDER,
        "calculate_entropy": r.LOGGED,
        "use_fused_kernels": r.FUSED,
        "ppo_infer_max_token_len_per_gpu": _MICRO,
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
    """Return the objective, sizes of updates and packs, the length of a run, rewards, and what has a switch."""
    objective = objectives.verl(options)
    critic = str(options["algorithm.adv_estimator"]).lower() == "gae"
    arguments, notes = [*objective.arguments], [*objective.notes]
    used = {*objective.used, ACTOR + "ppo_mini_batch_size", "data.train_batch_size"}

    # an update is over prompts there, over responses here
    prompts = r.integer(options, "data.train_batch_size")
    update = r.integer(options, ACTOR + "ppo_mini_batch_size")
    if not prompts:
        batches = r.integer(options, "async_training.require_batches", default=1)
        prompts = update * batches
        notes.append("--prompts: theirs samples all the time; a step here has the prompts of its updates")
    arguments.append(f"--prompts {prompts}")
    group = r.integer(options, ROLLOUT + "n", default=1)
    if update < prompts:
        arguments.append(f"--strategy.train-batch-size {update * group}")
    elif critic:
        arguments.append("--minibatches 1")

    # a pack must hold a prompt and its response
    limits = [r.integer(options, f"data.max_{x}_length", default=512) for x in ("prompt", "response")]
    share = r.integer(options, ACTOR + "ulysses_sequence_parallel_size", default=1)
    tokens = r.integer(options, ACTOR + "ppo_max_token_len_per_gpu") * share
    arguments.append(f"--budget {max(sum(limits), tokens)}")
    used |= {ACTOR + "ppo_max_token_len_per_gpu"}

    # a number of steps counts more than one of passes; their schedule counts steps too
    steps = r.integer(options, "trainer.total_training_steps")
    used |= {"trainer.total_epochs"} if steps else set()
    warmup = r.integer(options, ACTOR + "optim.lr_warmup_steps", default=-1)
    share_of_run = r.number(options, ACTOR + "optim.lr_warmup_steps_ratio")
    used |= {ACTOR + "optim.lr_warmup_steps", ACTOR + "optim.lr_warmup_steps_ratio"}
    if warmup < 0 and share_of_run and not steps:
        notes.append(f"--warmup: theirs is {share_of_run:g} of the run; --warmup counts rollouts")
    each = r.integer(options, "epochs", default=1) if not critic else max(-(-prompts // max(update, 1)), 1)
    arguments.append(f"--warmup {(warmup if warmup >= 0 else int(share_of_run * steps)) * each}")

    # the KL: in the loss, or in the reward, of each token with a critic
    kinds = (
        (ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", "" if critic else "--kl"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "--kl" if critic else "--kl-in-reward"),
    )
    for on, coefficient, ours in kinds:
        used |= {coefficient, on}
        if str(options.get(on, False)).lower() == "true" and ours:
            arguments.append(f"{ours} {options.get(coefficient, 0.001)}")
        elif str(options.get(on, False)).lower() == "true":
            notes.append(f"{on}: ppo.py has the KL in the reward of each token, --kl, not in the loss")
    adaptive = critic and str(options.get("algorithm.kl_ctrl.type")) == "adaptive"
    used |= set() if adaptive else {f"algorithm.kl_ctrl.{x}" for x in ("type", "target_kl", "horizon")}
    penalty = str(options.get("algorithm.kl_penalty") or "kl")
    used |= {"algorithm.kl_penalty"}
    if penalty not in ("kl", "k1") and str(options.get("algorithm.use_kl_in_reward")).lower() == "true":
        notes.append(f"--kl-in-reward: it is k1, the log-ratio itself; theirs is {penalty}")

    # without a critic nothing of one is read
    if not critic:
        used |= {name for name in options if name.startswith("critic.")}
        used |= {"algorithm.gamma", "algorithm.lam", "trainer.critic_warmup"}
        gamma = r.number(options, "algorithm.gamma", default=1.0)
        if gamma != 1 and "reinforce_plus_plus" in str(options["algorithm.adv_estimator"]):
            notes.append(f"algorithm.gamma={gamma:g}: advantage.reinforce_pp takes it, in a copy of grpo.py")
    if not r.integer(options, MODEL + "lora_rank", MODEL + "lora.rank"):
        used |= {
            MODEL + name for name in ("lora_rank", "lora.rank", "lora_alpha", "lora.alpha", "target_modules")
        }
    if str(options.get(ACTOR + "optim.lr_scheduler_type")) != "constant":
        arguments.append(f"--lr-end {options.get(ACTOR + 'optim.min_lr_ratio', 0.0)}")
    used |= {ACTOR + "optim.min_lr_ratio"}

    # tools are for conversations
    if any(name.startswith(ROLLOUT + "multi_turn.") and "path" in name for name in options):
        notes.append(
            "multi_turn: theirs are conversations with tools, here each prompt has one answer; multi_turn.py "
            "--environment FILE.py:NAME is that, see docs/environments.md"
        )
    more = _rewards(options)
    return r.Combined([*arguments, *more.arguments], used | more.used, [*notes, *more.notes])


_RULES = "verl.utils.reward_score:default_compute_score"


def _rewards(options: Mapping[str, Any]) -> r.Combined:
    """Return the reward: a function, a model, or the rule that verl chooses by the column data_source."""
    arguments, notes = [], []
    used = {f"custom_reward_function.{name}" for name in ("path", "name")} | {"reward_model.model.path"}
    used |= {name for name in options if name.startswith("custom_reward_function.reward_kwargs")}
    path = options.get("custom_reward_function.path")
    on = str(options.get("reward_model.enable", False)).lower() == "true"
    if on and options.get("reward_model.model.path"):
        arguments.append(f"--reward {_word('model:' + str(options['reward_model.model.path']))}")
        used |= {"reward_model.enable"}
    if path:
        head = "custom_reward_function.reward_kwargs."
        given = {name.removeprefix(head): x for name, x in options.items() if name.startswith(head)}
        call = f"({', '.join(f'{k}={_literal(x)}' for k, x in given.items())})" if given else ""
        spec = f"verl:{path}:{options.get('custom_reward_function.name') or 'compute_score'}{call}"
        arguments = [f"--reward {' '.join([*(x.partition(' ')[2] for x in arguments), _word(spec)])}"]
    if not arguments:
        arguments.append("--reward math:reward_model.ground_truth")
        notes.append(
            "--reward: theirs is chosen by the column data_source, as gsm8k's rule; math compares the answers. "
            f"Where verl is installed, --reward verl:{_RULES} is theirs"
        )

    # the penalty of DAPO
    for head in ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg."):
        used |= {head + name for name in ("enable", "len", "log", "penalty_factor")}
        if str(options.get(head + "enable")).lower() == "true":
            arguments.append(f"--overlong {options.get(head + 'len')}")
            if r.number(options, head + "penalty_factor", default=1.0) != 1:
                notes.append("--overlong: its penalty rises to 1")
    used |= {"reward_model.reward_kwargs.max_resp_len"}
    return r.Combined(arguments, used, notes)


def _word(text: str) -> str:
    """Return a word of the shell in which variables stay variables."""
    return f'"{text}"' if "$" in text else shlex.quote(text)


def _literal(x: Any) -> str:
    """Return a value as Python writes it."""
    return str(x) if r.number({"x": x}, "x", default=math.nan) == r.number({"x": x}, "x") else repr(str(x))


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
    length = r.integer(options, "data.max_length", default=1024)
    budget = max(length, r.integer(options, "data.max_token_len_per_gpu"))
    arguments += [f"--max-prompt {length}", f"--budget {budget}"]
    used |= {"data.max_token_len_per_gpu"}
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), _items(options["optim.betas"]))]

    # a number of steps counts more than one of passes
    if options.get("trainer.total_training_steps"):
        used |= {"trainer.total_epochs"}
    if not messages and "data.prompt_key" not in options:
        arguments += ["--template '{question}'"]
    if not messages and "data.response_key" not in options:
        arguments += ["--response '{answer}'"]

    # a share of the run
    steps = r.integer(options, "trainer.total_training_steps")
    names = ("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")
    ratio = r.number(options, *names, default=0.1)
    used |= {*names}
    if "optim.lr_warmup_steps" not in options:
        arguments.append(f"--warmup {int(ratio * steps)}")
        if ratio and not steps:
            notes.append(f"--warmup: theirs is {ratio:g} of the run; --warmup counts steps")
    if not r.integer(options, "model.lora_rank"):
        used |= {"model.lora_rank", "model.lora_alpha", "model.target_modules"}
    return r.Combined(arguments, used, notes)


def _items(value: Any) -> list[str]:
    """Return the items of a list, or of one written as a text: "['a', 'b']"."""
    if value is None:
        return []
    if isinstance(value, str):
        value = value.strip("[]() ").replace(",", " ").split()
    return [str(x).strip("'\"") for x in value]


_NUMBERS = (
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", ROLLOUT + "n",
    ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_max_token_len_per_gpu", ACTOR + "optim.lr",
    ACTOR + "ulysses_sequence_parallel_size", "trainer.total_training_steps", "trainer.total_epochs",
    ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high", ACTOR + "clip_ratio_c", ACTOR + "clip_ratio",
    ACTOR + "kl_loss_coef", "algorithm.kl_ctrl.kl_coef", "algorithm.gamma", "algorithm.lam",
    ACTOR + "entropy_coeff", ACTOR + "loss_scale_factor", ACTOR + "tau_pos", ACTOR + "tau_neg",
    ROLLOUT + "temperature", ROLLOUT + "top_p", "critic.optim.lr", "trainer.critic_warmup",
    "reward_model.overlong_buffer.len", "reward_model.reward_kwargs.overlong_buffer_cfg.len",
)  # fmt: skip

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
                "model.lora_alpha": 16,
                "model.target_modules": "all-linear",
            },
            combine=_examples,
            script=lambda options: "sft",
            sections={
                "checkpoint.": "a checkpoint always has everything that a run needs",
                "trainer.": "the folder of a run has its files and checkpoints",
                "engine.": "torchrun with several processes shards with FSDP2",
                "model.": "the scripts choose how a model computes",
                "data.": "docs/data.md has the forms of rows",
                "profiler.": "timing.jsonl has the seconds of each phase",
            },
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
                "data.max_prompt_length": 512,
                "data.max_response_length": 512,
                "data.prompt_key": "prompt",
                ROLLOUT + "n": 1,
                ROLLOUT + "name": "vllm",
                MODEL + "lora_alpha": 16,
                MODEL + "target_modules": "all-linear",
                "algorithm.adv_estimator": "gae",
                "algorithm.lam": 1.0,
                "critic.optim.lr": 1e-5,
                "critic.cliprange_value": 0.5,
                "trainer.total_epochs": 30,
            },
            combine=_rollouts,
            script=lambda o: "ppo" if str(o["algorithm.adv_estimator"]).lower() == "gae" else "grpo",
            sections={
                "actor_rollout_ref.ref.": _REFERENCE,
                "ray_kwargs.": "there is no Ray: torchrun starts the processes",
                "ray_init.": "there is no Ray: torchrun starts the processes",
                "actor_rollout_ref.rollout.agent.": "multi_turn.py and rft_fn.environment",
                "actor_rollout_ref.rollout.multi_turn.": "multi_turn.py and rft_fn.environment",
                "actor_rollout_ref.rollout.val_kwargs.": "an evaluation has one greedy answer a question",
                "actor_rollout_ref.rollout.": "vLLM is started with its own defaults",
                "actor_rollout_ref.actor.megatron.": _MEGATRON,
                "critic.megatron.": _MEGATRON,
                "actor_rollout_ref.actor.profiler.": _PROFILED,
                "global_profiler.": _PROFILED,
                "actor_rollout_ref.actor.checkpoint.": "a checkpoint always has everything that a run needs",
                "actor_rollout_ref.actor.": "the scripts choose how the actor computes",
                "actor_rollout_ref.model.": "the scripts choose how a model computes",
                "actor_rollout_ref.": "trainer and engine share their processes",
                "critic.": "the critic is trained as the actor is: its packs, precision and schedule",
                "reward_model.": "a reward model runs in the trainer's processes, or behind a URL: docs/rewards.md",
                "async_training.": "--ahead samples steps ahead, with an engine in a process of its own",
                "rollout.": "--ahead samples steps ahead, with an engine in a process of its own",
                "trainer.": "the folder of a run has its files and checkpoints",
                "algorithm.": "write it into a copy of the script, docs/algorithms.md",
                "data.": "docs/data.md has the forms of rows",
                "hydra.": "its parts are found by hydra",
                "defaults": "its parts are found by hydra",
                "transfer_queue.": "there is no Ray: torchrun starts the processes",
            },
            programs=("main_ppo", "main_dapo", "fully_async_main", "main_ppo_split"),
            tells=("actor_rollout_ref.", "algorithm.", "critic.", "reward_model.", "custom_reward_function."),
            numbers=_NUMBERS,
        ),
    },
    {
        "main_generation": "evaluate.py answers and scores prompts of a data set",
        "main_eval": "evaluate.py answers and scores prompts of a data set",
        "model_merger": "a run's folder `model` is one that transformers loads",
    },
    packages=("verl", "recipe"),
    implied={
        "sft_trainer": {"data.messages_key": "messages"},
        "main_dapo": {"reward_model.reward_manager": "dapo"},
    },
)
