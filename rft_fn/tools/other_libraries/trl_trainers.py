"""Trainers of TRL: options that only count together, defaults, and what tells them apart."""

import math
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from rft_fn.tools.other_libraries import objectives
from rft_fn.tools.other_libraries import rows as r
from rft_fn.tools.other_libraries.trl import TABLE

__all__ = ["LIBRARY"]

_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "exo", "nca", "robust", "bco", "apo")
_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
_OF_THE_SERVER = (
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length",
    "vllm_enable_sleep_mode",
)  # fmt: skip


def _shared(options: Mapping[str, Any]) -> r.Combined:
    """Return the data with its config and split, adapters of TRL's size, and steps in place of passes."""
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
    return r.Combined(arguments, used, [])


def _engine(options: Mapping[str, Any]) -> r.Combined:
    """Return the options of vLLM, in the process or on a server."""
    given = [options[name] for name in _ADDRESS if options.get(name)]
    mode = str(options.get("vllm_mode") or "")
    on = str(options.get("use_vllm", False)).lower() == "true"
    if not on or not (mode == "server" or (given and not mode)):
        return r.Combined([], {"vllm_mode", *_ADDRESS}, [])

    # a server of a given address, else TRL's own default
    host = str(options.get("vllm_server_host") or "localhost").replace("0.0.0.0", "localhost")
    url = options.get("vllm_server_base_url") or f"http://{host}:{options.get('vllm_server_port') or 8000}"
    own = [name for name in _OF_THE_SERVER if options.get(name) not in (None, "")]
    notes = [
        "--strategy.engine-servers: `trl vllm-serve` speaks another protocol; start `vllm serve` in its "
        "place, with the options of docs/engines.md, Starting vLLM",
        "--strategy.engine-weights: add a folder that this machine and the server's share, if they are two",
    ]
    if own:
        notes.append(f"{', '.join(own)}: options of the server's own command line")
    arguments = ["--strategy.engine-type openai", f"--strategy.engine-servers {url}"]
    return r.Combined(arguments, {"use_vllm", "vllm_mode", *_ADDRESS, *_OF_THE_SERVER}, notes)


def _rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return the algorithm; prompts of a step and updates of a rollout, from batches that count responses."""
    algorithm, engine, more = objectives.trl(options), _engine(options), _shared(options)
    used = algorithm.used | engine.used | more.used
    used |= {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}
    used |= {"generation_batch_size", "max_steps", "warmup_steps"}
    update = int(options["per_device_train_batch_size"]) * int(options["gradient_accumulation_steps"])
    group = int(options["num_generations"])
    accumulated = options.get("steps_per_generation") or options["gradient_accumulation_steps"]
    rollout = int(accumulated) * int(options["per_device_train_batch_size"])
    rollout = int(options.get("generation_batch_size") or rollout)

    # theirs count responses, ours prompts
    arguments = [*more.arguments, *algorithm.arguments, *engine.arguments]
    arguments.append(f"--prompts {max(rollout // group, 1)}")
    notes = [*algorithm.notes, *engine.notes]
    notes.append("--prompts: of one process of theirs; ours are of all processes")
    if rollout > update:
        arguments.append(f"--strategy.train-batch-size {update}")

    # theirs count updates, ours rollouts
    updates = max(rollout // update, 1) * int(options.get("num_iterations") or 1)
    for name, ours in (("max_steps", "--steps"), ("warmup_steps", "--warmup")):
        if name in options and float(options[name]) >= 0:
            arguments.append(f"{ours} {-(-int(options[name]) // updates)}")
    if updates > 1:
        notes.append(f"--steps, --warmup: they count updates, of which a rollout has {updates}")
    return r.Combined(arguments, used, notes)


_COLUMNS = {
    "sft": "--messages NAMES, or --template and --response: the columns of the data, see docs/data.md",
    "dpo": "--messages prompt chosen rejected: where these columns hold messages, not texts",
    "rm": "--messages prompt chosen rejected: where these columns hold messages, not texts",
}
_DEFAULT_BUDGETS = {"dpo": 1024, "rm": 2048}


def _examples(kind: str, options: Mapping[str, Any]) -> r.Combined:
    """Return the batch, limits of tokens, the length of the run, its warm-up, and the loss of pairs."""
    more = _shared(options)
    used = more.used | {"per_device_train_batch_size", "gradient_accumulation_steps"}
    used |= {"max_length", "max_seq_length", "warmup_steps"}
    batch = int(options["per_device_train_batch_size"]) * int(options["gradient_accumulation_steps"])
    arguments = [*more.arguments, f"--batch {batch}"]
    notes = ["--batch: of one process of theirs; ours is of all processes"]
    if str(options.get("packing", False)).lower() == "true":
        notes.append("--batch: it counts examples; theirs, with packing, counts packs")

    # a pack must hold an example, or both sides of a pair
    length = int(options.get("max_seq_length") or options.get("max_length") or 0)
    if length and kind == "sft":
        arguments += [f"--budget {length}", f"--max-prompt {length}"]
    elif length:
        arguments += [f"--max-length {length}", f"--budget {max(2 * length, _DEFAULT_BUDGETS[kind])}"]

    # their warm-up may be a share of the run
    steps = int(float(options.get("max_steps") or -1))
    if float(options.get("max_steps") or -1) <= 0:
        used |= {"max_steps"}
    warmup = float(options.get("warmup_ratio") or options.get("warmup_steps") or 0)
    if 0 < warmup < 1 and steps < 0:
        notes.append("--warmup: it counts steps, and how many the run has is known when it starts")
    else:
        used |= {"warmup_ratio"}
        arguments.append(f"--warmup {math.ceil(warmup * steps) if 0 < warmup < 1 else int(warmup)}")

    if kind == "dpo":
        pair = objectives.trl_pairs(options)
        arguments, used, notes = [*arguments, *pair.arguments], used | pair.used, [*notes, *pair.notes]
    return r.Combined(arguments, used, [*notes, _COLUMNS[kind]])


# ------------------------------------------------------------------------------ trainers

_SECTIONS = {
    "push_to_hub": "upload the folder `model` of the run",
    "hub_": "upload the folder `model` of the run",
}
_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "max_length": 1024,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
}

LIBRARY = r.Library(
    "TRL",
    {
        "sft": r.Trainer(
            rows=r.rows_of(TABLE, "sft"),
            defaults={**_DEFAULTS, "learning_rate": 2e-5},
            combine=partial(_examples, "sft"),
            script=lambda options: "sft",
            sections=_SECTIONS,
            programs=("sft", "sft_trainer"),
            tells=("loss_type=nll", "loss_type=chunked_nll", "loss_type=dft"),
        ),
        "dpo": r.Trainer(
            rows=r.rows_of(TABLE, "dpo"),
            defaults={**_DEFAULTS, "learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid"},
            combine=partial(_examples, "dpo"),
            script=lambda options: "dpo",
            sections=_SECTIONS,
            programs=("dpo", "dpo_trainer"),
            tells=tuple(f"loss_type={x}" for x in _PAIR_LOSSES),
        ),
        "rm": r.Trainer(
            rows=r.rows_of(TABLE, "rm"),
            defaults={**_DEFAULTS, "learning_rate": 1e-4},
            combine=partial(_examples, "rm"),
            script=lambda options: "train_rm",
            sections=_SECTIONS,
            programs=("reward", "reward_modeling", "reward_trainer"),
        ),
        "rl": r.Trainer(
            rows=r.rows_of(TABLE, "rl"),
            defaults={
                "epsilon": 0.2,
                "learning_rate": 1e-6,
                "num_generations": 8,
                "max_completion_length": 512,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 1,
                "loss_type": "dapo",
                "lr_scheduler_type": "linear",
                "warmup_steps": 0,
            },
            combine=_rollouts,
            script=lambda options: "grpo",
            sections=_SECTIONS,
            programs=("grpo",),
            tells=(
                *(f"loss_type={loss}" for loss in _LOSSES),
                "importance_sampling_level",
                "scale_rewards",
                "steps_per_generation",
                "generation_batch_size",
            ),
        ),
    },
    {
        "kto": "python train_scripts/dpo.py --unpaired --loss kto is that algorithm",
        "rloo": "python train_scripts/grpo.py --algorithm rloo is that algorithm",
        "ppo": "python train_scripts/ppo.py has a critic",
    },
)
