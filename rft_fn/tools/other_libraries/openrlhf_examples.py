"""The options of OpenRLHF's train_sft, train_dpo and train_rm: with dots, and the older names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rft_fn.tools.other_libraries import lightrft, openrlhf
from rft_fn.tools.other_libraries.rows import Combined, Row, Trainer, choice, flag, nothing, same

__all__ = ["TRAINERS"]

_SPLIT = "part of the source: --data NAME@SPLIT"
_REFERENCE = "the reference is the initial model, which scores the pairs of each step"

# options of train_ppo_ray that the others have under the same names
_DOTTED = (
    "train.micro_batch_size", "train.seed", "data.input_template", "data.apply_chat_template",
    "ds.zero_stage", "ds.adam_offload", "ds.param_dtype", "ds.packing_samples", "ds.lora.rank",
    "ds.lora.alpha", "ds.load_in_4bit", "ds.ring_attn_size", "ds.use_liger_kernel", "ckpt.output_dir",
    "ckpt.save_steps", "ckpt.max_num", "ckpt.load_enable", "logger.wandb.key", "logger.wandb.project",
    "logger.wandb.run_name", "logger.tensorboard_dir",
)  # fmt: skip
_OLDER = (
    "pretrain", "input_template", "apply_chat_template", "aux_loss_coef", "l2", "max_norm",
    "micro_train_batch_size", "seed", "bf16", "zero_stage", "adam_offload", "packing_samples",
    "gradient_checkpointing", "flash_attn", "load_in_4bit", "lora_rank", "lora_alpha", "lora_dropout",
    "save_path", "ckpt_path", "save_steps", "max_ckpt_num", "max_ckpt_mem", "load_checkpoint", "use_wandb",
    "wandb_project", "wandb_run_name", "use_tensorboard", "logging_steps",
)  # fmt: skip

# the dotted name of each option that is combined below, and its older one
OLDER = {
    "data.input_key": "input_key",
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


def _both(dotted: str, older: str, row: Row) -> dict[str, Row]:
    """A row under both names of an option."""
    return {dotted: row, older: row}


SHARED: dict[str, Row] = {
    **{name: openrlhf.ROWS[name] for name in _DOTTED},
    **{name: lightrft.ROWS[name] for name in _OLDER},
    "model.model_name_or_path": same("--model"),
    "model.gradient_checkpointing_enable": flag("--gradient-checkpointing"),
    "model.aux_loss_coef": same("--router-aux"),
    "ds.attn_implementation": nothing("the fastest attention that packs allow is chosen automatically"),
    "ds.lora.dropout": nothing("a policy with dropout is not the one that sampled"),
    **_both("ds.lora.target_modules", "target_modules", Row("--lora-targets {x}", "", None, ",")),
    **_both("data.dataset", "dataset", same("--data")),
    **_both("data.dataset_probs", "dataset_probs", nothing("part of the source: --data a.jsonl=0.7")),
    **_both("data.dataset_split", "train_split", nothing(_SPLIT)),
    "dataset_split": nothing(_SPLIT),
    **_both("train.batch_size", "train_batch_size", same("--batch")),
    **_both("train.max_epochs", "max_epochs", same("--epochs")),
    **_both("adam.lr", "learning_rate", same("--lr")),
    **_both("adam.betas", "adam_betas", Row("--beta1 {x} --beta2 {x}", "one number each")),
    "adam.weight_decay": same("--weight-decay"),
    "max_norm": same("--max-norm"),
    "lr_scheduler": openrlhf.ROWS["actor.lr_scheduler"],
    "min_lr_ratio": same("--lr-end"),
    "lr_warmup_ratio": nothing("--warmup counts steps"),
    **_both("data.max_samples", "max_samples", nothing("--steps or --epochs")),
    "ckpt.path": nothing("checkpoints are in the folder of the run"),
    "logger.logging_steps": nothing("every step is logged"),
}

SFT_ROWS: dict[str, Row] = {
    **SHARED,
    **_both("data.input_key", "input_key", Row("--template '{{{x}}}'", "of messages: --messages {x}")),
    **_both("data.output_key", "output_key", Row("--response '{{{x}}}'", "a column of text")),
    **_both("data.multiturn", "multiturn", choice("with --messages all answers are learned", true="")),
    **_both("data.max_len", "max_len", Row("--budget {x} --max-prompt {x}", "longer examples are refused")),
    **_both("model.pretrain_mode_enable", "pretrain_mode", nothing("only answers are learned")),
    **_both("eval.dataset", "eval_dataset", nothing("sft.py does not evaluate; evaluate.py scores answers")),
    **_both("eval.steps", "eval_steps", nothing("sft.py does not evaluate; evaluate.py scores answers")),
}

PAIR_ROWS: dict[str, Row] = {
    **SHARED,
    **_both("data.prompt_key", "prompt_key", Row("--template '{{{x}}}'", "of messages: first of --messages")),
    **_both("data.chosen_key", "chosen_key", Row("--chosen '{{{x}}}'", "of messages: in --messages")),
    **_both("data.rejected_key", "rejected_key", Row("--rejected '{{{x}}}'", "of messages: in --messages")),
    **_both(
        "data.max_len", "max_len", same("--max-length", "longer pairs are left out; --budget holds both")
    ),
    **_both("eval.dataset", "eval_dataset", same("--eval-data")),
    **_both("eval.steps", "eval_steps", openrlhf.ROWS["eval.steps"]),
    **_both("eval.split", "eval_split", nothing("part of the source: --eval-data NAME@SPLIT")),
}

DPO_ROWS: dict[str, Row] = {
    **PAIR_ROWS,
    **_both("model.beta", "beta", same("--beta")),
    **_both("model.ipo_enable", "ipo", choice(true="--loss ipo", false="--loss dpo")),
    **_both("model.label_smoothing", "label_smoothing", Row("--loss cdpo --label-smoothing {x}", "above 0")),
    **_both("model.nll_loss_coef", "nll_loss_coef", same("--nll")),
    **_both("ref.model_name_or_path", "ref_pretrain", nothing(_REFERENCE)),
    **_both("ref.offload", "ref_offload", nothing("--strategy.offload-models moves the reference by phase")),
}

RM_ROWS: dict[str, Row] = {
    **PAIR_ROWS,
    **_both("model.loss_type", "loss", choice("rft_fn.loss.log_exp, in a copy of train_rm.py", sigmoid="")),
    **_both(
        "model.margin_loss_enable", "margin_loss", choice("a column `margin` is read", true="", false="")
    ),
    **_both("model.compute_fp32_loss_enable", "compute_fp32_loss", nothing("losses are always in float32")),
    **_both("ds.value_head_prefix", "value_head_prefix", nothing("--heads names the heads")),
}

DEFAULTS = {
    "train.batch_size": 128,
    "adam.betas": [0.9, 0.95],
    "lr_scheduler": "cosine_with_min_lr",
    "min_lr_ratio": 0.1,
    "ds.zero_stage": 2,
}
BUDGETS = {"dpo": 1024, "rm": 2048}


def _columns(kind: str, get: Callable[[str], Any]) -> list[str]:
    """Columns of messages where a chat template is applied to them, else of texts."""
    chat = str(get("apply_chat_template")).lower() == "true"
    if kind == "sft" and chat and not get("output_key"):
        return [f"--messages {get('input_key') or 'input'}"]
    if kind == "sft":
        sides = [("--template", get("input_key") or "input"), ("--response", get("output_key"))]
        return [f"{ours} '{{{column}}}'" for ours, column in sides if column]
    pair = [get("prompt_key"), get("chosen_key") or "chosen", get("rejected_key") or "rejected"]
    if chat:
        return [f"--messages {' '.join(name for name in pair if name)}"]
    template = "''"
    if pair[0]:
        template = f"'{{{pair[0]}}}'"
    return [f"--template {template}", f"--chosen '{{{pair[1]}}}'", f"--rejected '{{{pair[2]}}}'"]


def _combine(kind: str, options: Mapping[str, Any]) -> Combined:
    """Columns, limits of tokens, adapters of their size, and the loss of a pair."""
    names = {older: dotted for dotted, older in OLDER.items()}
    used = set(OLDER) | set(names)

    def get(older: str) -> Any:
        return options.get(older, options.get(names[older]))

    # a pack has to hold an example, or both sides of a pair
    arguments = _columns(kind, get)
    if kind == "sft":
        length = int(get("max_len") or 2048)
        arguments += [f"--max-prompt {length}", f"--budget {length}"]
    else:
        length = int(get("max_len") or 512)
        arguments += [f"--max-length {length}", f"--budget {max(2 * length, BUDGETS[kind])}"]

    # adapters
    if int(get("lora_rank") or 0):
        targets = get("target_modules") or "all-linear"
        if not isinstance(targets, str):
            targets = ",".join(targets)
        arguments += [f"--lora-rank {get('lora_rank')}", f"--lora-alpha {get('lora_alpha') or 16}"]
        arguments.append(f"--lora-targets {targets}")

    # one loss of a pair
    smoothing = float(get("label_smoothing") or 0)
    if kind == "dpo" and str(get("ipo")).lower() == "true":
        arguments.append("--loss ipo")
    elif kind == "dpo" and smoothing:
        arguments.append(f"--loss cdpo --label-smoothing {smoothing}")
    betas = lightrft.pair(get("adam_betas"))
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), betas)]
    return Combined(arguments, used, [f"--warmup: theirs is a share of the run, {_warmup(options)}"])


def _warmup(options: Mapping[str, Any]) -> str:
    """The share that the learning rate rises in."""
    return str(options.get("lr_warmup_ratio", 0.03))


def _name(name: str) -> Callable[[Mapping[str, Any]], str]:
    def script(options: Mapping[str, Any]) -> str:
        return name

    return script


SECTIONS = {
    "muon.": "docs/examples/muon.py has that optimizer",
    "ds.": "--strategy.zero-stage, --strategy.adam-offload and --strategy.bf16 are what DeepSpeed is told",
    "ckpt.": "--save-every, --keep and --max-bytes",
}


def _trainer(kind: str, script: str, rows: Mapping[str, Row], defaults: Mapping[str, Any]) -> Trainer:
    """The trainer of one kind."""
    combine = partial(_combine, kind)
    return Trainer(rows, {**DEFAULTS, **defaults}, combine, _name(script), SECTIONS, (f"train_{kind}",))


TRAINERS = {
    "sft": _trainer("sft", "sft", SFT_ROWS, {"adam.lr": 5e-6, "train.max_epochs": 2}),
    "dpo": _trainer("dpo", "dpo", DPO_ROWS, {"adam.lr": 1e-5, "train.max_epochs": 1}),
    "rm": _trainer("rm", "train_rm", RM_ROWS, {"adam.lr": 9e-6, "train.max_epochs": 1}),
}
