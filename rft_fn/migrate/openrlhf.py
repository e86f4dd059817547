"""Options of OpenRLHF's train_ppo_ray, train_sft, train_dpo and train_rm: dotted and older names."""

import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from rft_fn.migrate import corrections, lightrft, lightrft_trainers, objectives, shared_rows
from rft_fn.migrate import rows as r

__all__ = ["LIBRARY", "TABLE"]

_COLOCATED = "models always share the devices of the processes; --strategy.offload-models moves them by phase"
_SCHEDULE = r.choice(
    cosine_with_min_lr="--schedule cosine", linear="--schedule linear", constant="--schedule constant"
)

# in addition to the names that LightRFT has too
TABLE: r.Table = {
    "all": {
        "eval.dataset": r.by_kind(
            rl=r.same("--eval-data"), pairs=r.same("--eval-data"), sft=shared_rows.UNEVALUATED
        ),
        "ds.param_dtype": r.choice(bf16="--strategy.bf16", fp16=""),
        "ds.ring_attn_size": r.same("--strategy.sp-size", "by all-to-all of heads, not by a ring"),
        "ds.use_liger_kernel": shared_rows.FUSED,
    },
    "rl": {
        "data.image_key": r.nothing("columns with images are detected: docs/data.md"),
        "rollout.max_new_tokens": r.same("--max-new"),
        "rollout.temperature": r.same("--temperature", "divides the logits in training too"),
        "rollout.top_p": r.same("--top-p", "cut in training too"),
        "train.max_tokens_per_gpu": r.same("--budget"),
        "train.ema_beta ema_beta": r.nothing("--ema, which also switches it on", r.Flag("ema")),
        "train.async_enable": r.choice("needs an engine in a process of its own", true="--ahead 1", false=""),
        "train.async_queue_size": r.same("--ahead"),
        "train.partial_rollout_enable": r.nothing(
            "--partial, the tokens by which a response grows in a step"
        ),
        "train.dynamic_batch_enable": r.nothing("packs are always filled by tokens"),
        "train.colocate_all train.colocate_actor_ref": r.nothing(_COLOCATED),
        "train.agent_func_path": r.nothing(
            "rft_fn.environment: reset and step as functions, in multi_turn.py"
        ),
        "actor.adam.weight_decay": r.same("--weight-decay"),
        "actor.lr_scheduler": _SCHEDULE,
        "actor.min_lr_ratio": r.same("--lr-end"),
        "actor.lr_warmup_ratio": shared_rows.SHARE_OF_RUN,
        "actor.max_norm": r.same("--max-norm"),
        "actor.dual_clip": r.same("--dual"),
        "actor.entropy_coef": r.same("--entropy"),
        "actor.aux_loss_coef": r.same("--router-aux"),
        "actor.gradient_checkpointing_enable": r.flag("--gradient-checkpointing"),
        "actor.freeze_visual_encoder": r.choice(true="--freeze visual", false=""),
        "algo.advantage.no_std_norm": r.nothing(
            "advantage.grpo(reward, scale=False) in a copy of grpo.py",
            r.Flag("algorithm", "dr_grpo is grpo without the deviation"),
        ),
        "algo.kl.horizon kl_horizon": r.same("--kl-horizon", "of ppo.py"),
        "algo.dynamic_filtering_enable": r.choice(true="--rounds 4", false="", remark="above 1"),
        "reward.normalize_enable normalize_reward": r.flag("--normalize-reward"),
        "vllm.num_engines": r.nothing(
            "--strategy.engine-type vllm; each process, or group of tp processes, has one",
            shared_rows.TOGETHER,
        ),
        "vllm.tensor_parallel_size": r.same("--strategy.engine-tp-size"),
        "vllm.gpu_memory_utilization": r.same("--strategy.engine-mem-util"),
        "vllm.enable_sleep": r.switch("strategy.enable-engine-sleep"),
        "vllm.sync_backend": r.nothing("an engine in the process gets the tensors directly"),
        "eval.temperature eval.n_samples_per_prompt": r.nothing(
            "an evaluation has one greedy answer a question"
        ),
        "reward.overlong_penalty_factor": r.choice("the penalty rises to 1", **{"1": "", "1.0": ""}),
        "ds.tensor_parallel_size": r.nothing("--strategy.sp-size shares the tokens of a pack"),
        "dynamic_filtering": r.choice(true="--rounds 4", false="", hint=r.Flag("rounds", "above 1")),
        "vllm_num_engines colocate_all_models": r.nothing(shared_rows.TOGETHER, shared_rows.TOGETHER),
        "vllm_tensor_parallel_size": r.same("--strategy.engine-tp-size"),
        "vllm_gpu_memory_utilization": r.same("--strategy.engine-mem-util"),
        "vllm_enable_sleep": r.switch("strategy.enable-engine-sleep"),
        "max_new_tokens": r.same("--max-new"),
        "entropy_loss_coef": r.same("--entropy", "of ppo.py; in grpo.py add it to the loss"),
        "ring_attn_size": r.same("--strategy.sp-size", "by all-to-all of heads, not by a ring"),
        "dual_clip": r.same("--dual"),
    },
    "examples": {
        "model.model_name_or_path": r.same("--model"),
        "model.gradient_checkpointing_enable": r.flag("--gradient-checkpointing"),
        "model.aux_loss_coef": r.same("--router-aux"),
        "ds.attn_implementation attn_implementation": shared_rows.CHOSEN_ATTENTION,
        "data.dataset dataset": r.same("--data"),
        "data.dataset_probs dataset_probs": r.nothing(
            "part of the source: --data a.jsonl=0.7", hint=lightrft.SHARES
        ),
        "data.dataset_split train_split": r.nothing("part of the source: --data NAME@SPLIT"),
        "dataset_split": r.nothing("part of the source: --data NAME@SPLIT", shared_rows.SPLIT),
        "adam.lr learning_rate": r.same("--lr"),
        "adam.weight_decay": r.same("--weight-decay"),
        "lr_scheduler": _SCHEDULE,
        "min_lr_ratio": r.same("--lr-end"),
        "eval_dataset": r.by_kind(sft=shared_rows.UNEVALUATED, pairs=r.same("--eval-data")),
    },
    "sft": {
        "data.output_key output_key": r.Row(
            "--response '{{{x}}}'", "a column of text", remark="a template: {answer} is the column answer"
        ),
        "data.multiturn multiturn": r.choice("with --messages all answers are learned", true=""),
        "model.pretrain_mode_enable pretrain_mode": r.lacks("only answers are learned", "false"),
    },
    "pairs": {
        "data.prompt_key prompt_key": r.Row("--template '{{{x}}}'", "of messages: first of --messages"),
        "data.chosen_key chosen_key": r.Row("--chosen '{{{x}}}'", "of messages: in --messages"),
        "data.rejected_key rejected_key": r.Row("--rejected '{{{x}}}'", "of messages: in --messages"),
    },
    "dpo": {
        "model.beta beta": r.same("--beta"),
        "model.ipo_enable ipo": r.choice(true="--loss ipo", false="--loss dpo"),
        "model.label_smoothing label_smoothing": r.Row("--loss cdpo --label-smoothing {x}", "above 0"),
        "model.nll_loss_coef nll_loss_coef": r.same("--nll"),
        "ref.model_name_or_path ref_pretrain": shared_rows.REFERENCE,
        "ref.offload ref_offload": r.nothing("--strategy.offload-models moves the reference by phase"),
    },
    "rm": {
        "model.loss_type loss": r.choice("rft_fn.loss.log_exp, in a copy of train_rm.py", sigmoid=""),
        "model.margin_loss_enable margin_loss": r.choice("a column `margin` is read", true="", false=""),
        "model.compute_fp32_loss_enable compute_fp32_loss": r.nothing("losses are always in float32"),
        "ds.value_head_prefix value_head_prefix": r.nothing("--heads names the heads"),
    },
    "": {
        "actor.eps_clip_low_high eps_clip_low_high": r.only(
            r.Flag("clip_low", "the upper limit is --clip-high")
        ),
        "actor.policy_loss_type policy_loss_type": r.only(shared_rows.ALGORITHM),
        "no_advantage_std_norm": r.only(r.Flag("algorithm", "dr_grpo is grpo without the deviation")),
        "reward.clip_range reward_clip_range": r.only(
            r.Flag("reward_clip", "one number: rewards are clipped to both sides of 0")
        ),
        "actor_num_gpus_per_node": r.only(shared_rows.PROCESSES),
    },
}

# ------------------------------------------------------------------------------ options that count together

# dotted names of options that only have a meaning together, and their older ones
_OLDER = {
    "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.use_loss": "use_kl_loss",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.policy_loss_type": "policy_loss_type",
    "actor.loss_agg_mode": "loss_agg_mode",
    "data.input_key": "input_key",
    "data.apply_chat_template": "apply_chat_template",
    "data.input_template": "input_template",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "actor.dual_clip": "dual_clip",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.gamma": "gamma",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.unbiased_gradient": "kl_unbiased_gradient",
    "actor.adam.betas": "adam_betas",
    "reward.clip_range": "reward_clip_range",
}
_OLDER_OF_EXAMPLES = {
    "data.input_key": "input_key",
    "data.input_template": "input_template",
    "data.output_key": "output_key",
    "data.prompt_key": "prompt_key",
    "data.chosen_key": "chosen_key",
    "data.rejected_key": "rejected_key",
    "data.apply_chat_template": "apply_chat_template",
    "data.max_len": "max_len",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.target_modules": "target_modules",
    "adam.betas": "adam_betas",
    "model.ipo_enable": "ipo",
    "model.label_smoothing": "label_smoothing",
}
_BUDGETS = {"dpo": 1024, "rm": 2048}


def _older(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with their older names."""
    return {_OLDER.get(name, name): value for name, value in options.items()}


def _rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return what LightRFT's trainer does with the older names."""
    found = lightrft_trainers.combine(_older(options), objectives.openrlhf)
    more = corrections.openrlhf(options)
    dotted = {name for name, older in _OLDER.items() if older in found.used}
    used = found.used | dotted | more.used
    arguments, notes = [*found.arguments, *more.arguments], [*found.notes, *more.notes]

    # groups whose mean reward is within a range, which is that they differ for rewards of 0 and 1
    if objectives.is_true(options.get("algo.dynamic_filtering_enable", options.get("dynamic_filtering"))):
        bounds = options.get("algo.dynamic_filtering_range") or options.get("dynamic_filtering_reward_range")
        notes.append(
            f"--rounds: it keeps groups whose rewards differ; theirs is a mean within {bounds or [0, 1]}"
        )
    used |= {"algo.dynamic_filtering_range", "dynamic_filtering_reward_range"}
    if any(objectives.is_true(options.get(name)) for name in ("train.enable_ema", "enable_ema")):
        used |= {"train.enable_ema", "enable_ema", "train.ema_beta", "ema_beta"}
        arguments.append(f"--ema {options.get('train.ema_beta', options.get('ema_beta', 0.992))}")
    if options.get("train.agent_func_path"):
        notes.append(
            f"train.agent_func_path={options['train.agent_func_path']}: conversations over several turns; "
            "multi_turn.py --environment FILE.py:NAME is that, see docs/environments.md"
        )
    if objectives.is_true(options.get("train.async_enable")) and not options.get("train.async_queue_size"):
        arguments.append("--ahead 1")
    used |= {"train.async_enable"}
    return r.Combined(["--strategy.engine-type vllm", *arguments], used, notes)


def _columns(kind: str, given: Mapping[str, Any]) -> list[str]:
    """Return columns of messages where a chat template is applied to them, else of texts."""
    chat = str(given.get("apply_chat_template")).lower() == "true"
    inner = given.get("input_template")
    if kind == "sft" and inner:
        text = str(inner).replace("{}", f"{{{given.get('input_key') or 'input'}}}")
        return [f"--template {shlex.quote(text)}", f"--response '{{{given.get('output_key') or 'output'}}}'"]
    if kind == "sft" and chat and not given.get("output_key"):
        return [f"--messages {given.get('input_key') or 'input'}"]
    if kind == "sft":
        sides = [("--template", given.get("input_key") or "input"), ("--response", given.get("output_key"))]
        return [f"{ours} '{{{column}}}'" for ours, column in sides if column]
    prompt = given.get("prompt_key")
    chosen, rejected = given.get("chosen_key") or "chosen", given.get("rejected_key") or "rejected"
    if chat:
        return [f"--messages {' '.join(name for name in (prompt, chosen, rejected) if name)}"]
    template = f"'{{{prompt}}}'" if prompt else "''"
    return [f"--template {template}", f"--chosen '{{{chosen}}}'", f"--rejected '{{{rejected}}}'"]


def _examples(kind: str, options: Mapping[str, Any]) -> r.Combined:
    """Return columns, limits of tokens, adapters of their size, and the loss of a pair."""
    used = {*_OLDER_OF_EXAMPLES, *_OLDER_OF_EXAMPLES.values()}
    given = {older: options.get(older, options.get(name)) for name, older in _OLDER_OF_EXAMPLES.items()}

    # a pack must hold an example, or both sides of a pair
    arguments = [*_columns(kind, given), *lightrft_trainers.sources(options, used)]
    if kind == "sft":
        length = r.integer(given, "max_len", default=2048)
        arguments += [f"--max-prompt {length}", f"--budget {length}"]
    else:
        length = r.integer(given, "max_len", default=512)
        arguments += [f"--max-length {length}", f"--budget {max(2 * length, _BUDGETS[kind])}"]

    # adapters
    if r.integer(given, "lora_rank"):
        targets = given["target_modules"] or "all-linear"
        if not isinstance(targets, str):
            targets = ",".join(targets)
        arguments += [f"--lora-rank {given['lora_rank']}", f"--lora-alpha {given['lora_alpha'] or 16}"]
        arguments.append(f"--lora-targets {targets}")

    # one loss of a pair
    smoothing = r.number(given, "label_smoothing")
    if kind == "dpo" and str(given["ipo"]).lower() == "true":
        arguments.append("--loss ipo")
    elif kind == "dpo" and smoothing:
        arguments.append(f"--loss cdpo --label-smoothing {smoothing}")
    betas = lightrft_trainers.pair(given["adam_betas"])
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), betas)]
    arguments.append(f"--warmup {r.number(options, 'lr_warmup_ratio', default=0.03):g}")
    arguments += lightrft_trainers.capacity(options, used)
    return r.Combined(arguments, used | {"lr_warmup_ratio"}, [])


def _of_examples(kind: str, ours: str, lr: float, epochs: int) -> r.Trainer:
    """Return the trainer of a kind, with its defaults."""
    return r.Trainer(
        rows={**r.rows_of(lightrft.SHARED, kind), **r.rows_of(TABLE, kind)},
        defaults={
            "train.batch_size": 128,
            "adam.betas": [0.9, 0.95],
            "lr_scheduler": "cosine_with_min_lr",
            "min_lr_ratio": 0.1,
            "ds.zero_stage": 2,
            "adam.lr": lr,
            "train.max_epochs": epochs,
        },
        combine=partial(_examples, kind),
        script=lambda options: ours,
        programs=(f"train_{kind}",),
        numbers=lightrft_trainers.NUMBERS,
    )


LIBRARY = r.Library(
    "OpenRLHF",
    {
        "sft": _of_examples("sft", "sft", lr=5e-6, epochs=2),
        "dpo": _of_examples("dpo", "dpo", lr=1e-5, epochs=1),
        "rm": _of_examples("rm", "train_rm", lr=9e-6, epochs=1),
        "rl": r.Trainer(
            rows={
                **r.rows_of(lightrft.SHARED, "rl"),
                **r.rows_of(lightrft.TABLE, "rl"),
                **r.rows_of(TABLE, "rl"),
            },
            defaults={
                "actor.adam.lr": 1e-6,
                "critic.adam.lr": 9e-6,
                "critic.value_clip": 0.5,
                "algo.advantage.lambd": 1.0,
                "actor.adam.betas": (0.9, 0.95),
                "actor.eps_clip": 0.2,
                "reward.clip_range": (-10, 10),
                "train.num_episodes": 1,
                "actor.lr_scheduler": "cosine_with_min_lr",
                "rollout.batch_size": 1024,
                "rollout.n_samples_per_prompt": 1,
                "train.batch_size": 128,
                "ds.zero_stage": 2,
                "algo.kl.init_coef": 0.01,
                "algo.advantage.estimator": "gae",
            },
            combine=_rollouts,
            script=lambda options: lightrft_trainers.script(_older(options)),
            programs=("train_ppo_ray", "train_ppo"),
            numbers=lightrft_trainers.NUMBERS,
            tells=(
                *("actor.", "algo.", "critic.", "rollout.", "reward.", "vllm."),
                *(f"{name}=" for name in _OLDER.values()),
            ),
        ),
    },
    {
        "train_kd": "rft_fn.loss.reverse_kl and reverse_kl_top_k are losses of distillation",
        "train_kto": "python train_scripts/dpo.py --unpaired --loss kto is that algorithm",
        "train_prm": "train_rm.py --kind steps learns process rewards",
        "serve_rm": "serve_reward.py serves rewards",
        "batch_inference": "evaluate.py answers and scores prompts of a data set",
        "interactive_chat": "transformers' own chat answers with the folder `model` of a run",
        "lora_combiner": "a run saves its adapters merged",
    },
    packages=("openrlhf",),
)
