"""The options of verl's sft_trainer and of the older fsdp_sft_trainer, by their dotted names."""

from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries import verl
from rft_fn.tools.other_libraries.rows import (
    Combined,
    Row,
    Trainer,
    choice,
    commas,
    flag,
    nothing,
    same,
    switch,
)

__all__ = ["SFT"]

_BUDGET = "--budget bounds the tokens of a pack; the gradient does not depend on it"
_EVALUATION = "sft.py does not evaluate; evaluate.py scores answers"
_COLUMNS = "part of --template or --response, as '{COLUMN[KEY]}'"
_KEPT = (
    "data.train_files", "data.shuffle", "trainer.total_training_steps", "trainer.save_freq",
    "trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir", "trainer.logger",
    "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.resume_mode",
)  # fmt: skip

ROWS: dict[str, Row] = {
    # the model
    "model.partial_pretrain": same("--model"),
    "model.path": same("--model"),
    "model.enable_gradient_checkpointing": switch("gradient-checkpointing"),
    "model.lora_rank": same("--lora-rank"),
    "model.lora_alpha": same("--lora-alpha"),
    "model.target_modules": commas("--lora-targets"),
    "model.use_liger": nothing("the fused head is on by default"),
    "model.use_remove_padding": nothing("packs are always without padding"),
    "model.trust_remote_code": nothing("the scripts run no code of a model's folder"),
    "model.strategy": choice(fsdp="--strategy.fsdp", fsdp2="--strategy.fsdp"),
    "model.fsdp_config.cpu_offload": flag("--strategy.fsdp-cpu-offload"),
    "use_remove_padding": nothing("packs are always without padding"),
    "ulysses_sequence_parallel_size": same("--strategy.sp-size"),
    "engine.ulysses_sequence_parallel_size": same("--strategy.sp-size"),
    "engine.param_offload": flag("--strategy.fsdp-cpu-offload"),
    "engine.optimizer_offload": flag("--strategy.adam-offload"),
    # the data
    **{name: verl.ROWS[name] for name in _KEPT if name.startswith("data.")},
    "data.train_batch_size": same("--batch"),
    "data.val_files": nothing(_EVALUATION),
    "data.prompt_key": Row("--template '{{{x}}}'", "a column of text; of messages: --messages"),
    "data.response_key": Row("--response '{{{x}}}'", "a column of text; of messages: --messages"),
    "data.prompt_dict_keys": nothing(_COLUMNS),
    "data.response_dict_keys": nothing(_COLUMNS),
    "data.multiturn.enable": choice("--messages takes the columns of messages", true="", false=""),
    "data.multiturn.messages_key": same("--messages"),
    "data.messages_key": same("--messages"),
    "data.max_length": Row("--budget {x} --max-prompt {x}", "longer examples are refused, not cut"),
    "data.max_token_len_per_gpu": same("--budget", "an example has to fit"),
    "data.truncation": nothing("nothing is cut: longer examples are refused"),
    "data.micro_batch_size": nothing(_BUDGET),
    "data.micro_batch_size_per_gpu": nothing(_BUDGET),
    "data.use_dynamic_bsz": nothing("packs are always filled by tokens"),
    "data.balance_dp_token": nothing("packs are always shared out evenly"),
    "data.pad_mode": nothing("packs are always without padding"),
    # the optimizer and the course of the run
    "optim.lr": same("--lr"),
    "optim.betas": Row("--beta1 {x} --beta2 {x}", "one number each"),
    "optim.weight_decay": same("--weight-decay", "of matrices only"),
    "optim.clip_grad": same("--max-norm"),
    "optim.lr_warmup_steps": same("--warmup"),
    "optim.warmup_steps_ratio": nothing("--warmup counts steps"),
    "optim.lr_warmup_steps_ratio": nothing("--warmup counts steps"),
    "optim.min_lr_ratio": same("--lr-end"),
    "optim.lr_scheduler": choice(cosine="--schedule cosine", constant="--schedule constant"),
    "optim.lr_scheduler_type": choice(cosine="--schedule cosine", constant="--schedule constant"),
    "trainer.total_epochs": same("--epochs"),
    "trainer.seed": same("--seed"),
    "trainer.test_freq": nothing(_EVALUATION),
    "trainer.max_ckpt_to_keep": same("--keep"),
    **{name: verl.ROWS[name] for name in _KEPT if name.startswith("trainer.")},
}

DEFAULTS = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.lr_scheduler": "cosine",
    "optim.min_lr_ratio": 0.0,
    "trainer.total_epochs": 4,
}


def _combine(options: Mapping[str, Any]) -> Combined:
    """The columns of an example, its limit, and pairs of numbers."""
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
            keys = [f"[{key}]" for key in items(options.get(f"data.{side}_dict_keys"))]
            arguments.append(f"{ours} '{{{column}{''.join(keys)}}}'")

    # a pack has to hold an example
    length = int(options["data.max_length"])
    budget = max(length, int(options.get("data.max_token_len_per_gpu") or 0))
    arguments += [f"--max-prompt {length}", f"--budget {budget}"]
    used |= {"data.max_token_len_per_gpu"}
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), items(options["optim.betas"]))]

    # a number of steps counts more than one of passes
    if options.get("trainer.total_training_steps"):
        used |= {"trainer.total_epochs"}
    if not messages and "data.prompt_key" not in options:
        notes.append("--messages NAMES, or --template and --response: the columns of the data")
    return Combined(arguments, used, notes)


def items(value: Any) -> list[str]:
    """The items of a list, or of one written as a text: "['a', 'b']"."""
    if value is None:
        return []
    if isinstance(value, str):
        value = value.strip("[]() ").replace(",", " ").split()
    return [str(x).strip("'\"") for x in value]


def _script(options: Mapping[str, Any]) -> str:
    return "sft"


SFT = Trainer(
    ROWS,
    DEFAULTS,
    _combine,
    _script,
    {"checkpoint.": "a checkpoint always has everything that a run needs"},
    ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray"),
    ("model.", "optim.", "engine."),
)
