"""SFTConfig, DPOConfig and RewardConfig of TRL 1.x."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rft_fn.tools.other_libraries.rows import Combined, Row, Trainer, choice, nothing, same
from rft_fn.tools.other_libraries.trl import COMMON, SECTIONS, shared

__all__ = ["TRAINERS"]

_CUT = "nothing is cut"
_KEEP = "the model's own tokenizer and template"
_PACKED = "packs are always filled by tokens, without padding"
_REFERENCE = "the reference is the initial model, which scores the pairs of each step"
_ONE_LIMIT = "--max-length bounds a prompt with one response"
_FACTOR = "write the factor into the loss of a copy of dpo.py"
_ANSWERS = "only answers are learned"

SHARED: dict[str, Row] = {
    **COMMON,
    "num_train_epochs": same("--epochs"),
    "max_steps": same("--steps", "-1: --epochs"),
    "warmup_steps": same("--warmup", "ours begins at lr / warmup, theirs at 0"),
    "warmup_ratio": nothing("--warmup counts steps; a share of max_steps is translated"),
    "per_device_train_batch_size": Row("--batch {x}", "times gradient_accumulation_steps, of one process"),
    "gradient_accumulation_steps": nothing("a factor of --batch; --budget bounds what is computed at a time"),
    "save_steps": same("--save-every"),
    "remove_unused_columns": nothing("columns that no option names are not read"),
    "padding_free": choice(_PACKED, true="", false=""),
    "pad_to_multiple_of": nothing(_PACKED),
    "pad_token": nothing(_KEEP),
    "eos_token": nothing(_KEEP),
    "chat_template_path": nothing(_KEEP),
    "truncation_mode": nothing(_CUT),
    "activation_offloading": nothing("--gradient-checkpointing saves that memory"),
}

SFT_ROWS: dict[str, Row] = {
    **SHARED,
    "max_length": Row("--budget {x} --max-prompt {x}", "longer examples are refused, not cut"),
    "max_seq_length": Row("--budget {x} --max-prompt {x}", "longer examples are refused, not cut"),
    "packing": choice(_PACKED, true="", false=""),
    "packing_strategy": nothing(_PACKED),
    "eval_packing": nothing(_PACKED),
    "dataset_text_field": nothing("a text without a prompt is not learned: --template and --response"),
    "dataset_kwargs": nothing("docs/data.md has the forms of rows"),
    "completion_only_loss": choice(_ANSWERS, true=""),
    "assistant_only_loss": choice(_ANSWERS, true=""),
    "loss_type": choice("a copy of sft.py has another loss", nll="", chunked_nll=""),
    "neftune_noise_alpha": nothing("embeddings get no noise"),
    "eval_steps": nothing("sft.py does not evaluate; evaluate.py scores answers"),
}

PAIR_ROWS: dict[str, Row] = {
    **SHARED,
    "max_length": same("--max-length", "longer pairs are left out, not cut; --budget holds both sides"),
    "eval_steps": same("--eval-every"),
}

DPO_ROWS: dict[str, Row] = {
    **PAIR_ROWS,
    "beta": same("--beta"),
    "loss_type": choice(
        "others: a row of `table` in a copy of dpo.py", sigmoid="--loss dpo", ipo="--loss ipo"
    ),
    "label_smoothing": Row("--loss cdpo --label-smoothing {x}", "of loss_type sigmoid", {"0": "", "0.0": ""}),
    "rpo_alpha": same("--nll"),
    "loss_weights": nothing("one loss at a time; --nll adds the chosen side's likelihood"),
    "max_prompt_length": nothing(_ONE_LIMIT),
    "max_completion_length": nothing(_ONE_LIMIT),
    "precompute_ref_log_probs": nothing(_REFERENCE),
    "precompute_ref_batch_size": nothing(_REFERENCE),
    "reference_free": nothing(_REFERENCE),
    "ref_model_init_kwargs": nothing(_REFERENCE),
    "force_use_ref_model": nothing(_REFERENCE),
    "model_adapter_name": nothing("under adapters the reference is the policy without them"),
    "ref_adapter_name": nothing("under adapters the reference is the policy without them"),
    "sync_ref_model": nothing("docs/examples/ema_teacher.py moves a reference"),
    "ref_model_mixup_alpha": nothing("docs/examples/ema_teacher.py moves a reference"),
    "ref_model_sync_steps": nothing("docs/examples/ema_teacher.py moves a reference"),
    "f_divergence_type": choice("the reverse KL alone", reverse_kl=""),
    "f_alpha_divergence_coef": nothing("the reverse KL alone"),
    "use_weighting": nothing(_FACTOR),
    "ld_alpha": nothing(_FACTOR),
    "discopop_tau": nothing(_FACTOR),
    "generate_during_eval": nothing("evaluate.py samples from the saved model"),
}

RM_ROWS: dict[str, Row] = {
    **PAIR_ROWS,
    "center_rewards_coefficient": same("--centering"),
}

COLUMNS = {
    "sft": "--messages NAMES, or --template and --response: the columns of the data, see docs/data.md",
    "dpo": "--messages prompt chosen rejected: where these columns hold messages, not texts",
    "rm": "--messages prompt chosen rejected: where these columns hold messages, not texts",
}
DEFAULT_BUDGETS = {"dpo": 1024, "rm": 2048}


def _length(kind: str, options: Mapping[str, Any]) -> list[str]:
    """Limits of tokens; a pack has to hold an example, or both sides of a pair."""
    length = int(options.get("max_seq_length") or options.get("max_length") or 0)
    if not length:
        return []
    if kind == "sft":
        return [f"--budget {length}", f"--max-prompt {length}"]
    return [f"--max-length {length}", f"--budget {max(2 * length, DEFAULT_BUDGETS[kind])}"]


def _warmup(options: Mapping[str, Any]) -> list[str]:
    """The steps of the warm-up; of a share below 1 only where the number of steps is known."""
    steps = int(float(options.get("max_steps") or -1))
    warmup = float(options.get("warmup_ratio") or options.get("warmup_steps") or 0)
    if 0 < warmup < 1 and steps < 0:
        return []
    if 0 < warmup < 1:
        warmup = math.ceil(warmup * steps)
    return [f"--warmup {int(warmup)}"]


def _combine(kind: str, options: Mapping[str, Any]) -> Combined:
    """The batch, the length of the run, its warm-up, and the loss of pairs."""
    more = shared(options)
    used = more.used | {"per_device_train_batch_size", "gradient_accumulation_steps"}
    used |= {"max_length", "max_seq_length", "warmup_steps"}
    batch = int(options["per_device_train_batch_size"]) * int(options["gradient_accumulation_steps"])
    arguments = [*more.arguments, f"--batch {batch}", *_length(kind, options)]
    notes = ["--batch: of one process of theirs; ours is of all processes"]
    if str(options.get("packing", False)).lower() == "true":
        notes.append("--batch: it counts examples; theirs, with packing, counts packs")
    if float(options.get("max_steps") or -1) <= 0:
        used |= {"max_steps"}

    # theirs may be a share of the run
    warmup = _warmup(options)
    if warmup:
        used |= {"warmup_ratio"}
        arguments += warmup
    else:
        notes.append("--warmup: it counts steps, and how many the run has is known when it starts")

    # smoothed labels are a loss of their own
    smoothing = float(options.get("label_smoothing") or 0)
    if kind == "dpo" and smoothing and options.get("loss_type") != "sigmoid":
        used |= {"label_smoothing"}
        notes.append("label_smoothing: only loss_type sigmoid has it")
    if kind == "dpo" and smoothing and options.get("loss_type") == "sigmoid":
        used |= {"loss_type"}
    return Combined(arguments, used, [*notes, COLUMNS[kind]])


def _name(name: str) -> Callable[[Mapping[str, Any]], str]:
    def script(options: Mapping[str, Any]) -> str:
        return name

    return script


DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "max_length": 1024,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
}

TRAINERS = {
    "sft": Trainer(
        SFT_ROWS,
        {**DEFAULTS, "learning_rate": 2e-5},
        partial(_combine, "sft"),
        _name("sft"),
        SECTIONS,
        ("sft", "sft_trainer"),
        ("loss_type=nll", "loss_type=chunked_nll", "loss_type=dft"),
    ),
    "dpo": Trainer(
        DPO_ROWS,
        {**DEFAULTS, "learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid"},
        partial(_combine, "dpo"),
        _name("dpo"),
        SECTIONS,
        ("dpo", "dpo_trainer"),
        tuple(f"loss_type={x}" for x in ("sigmoid", "hinge", "ipo", "exo", "nca", "robust", "bco", "apo")),
    ),
    "rm": Trainer(
        RM_ROWS,
        {**DEFAULTS, "learning_rate": 1e-4},
        partial(_combine, "rm"),
        _name("train_rm"),
        SECTIONS,
        ("reward", "reward_modeling", "reward_trainer"),
    ),
}
