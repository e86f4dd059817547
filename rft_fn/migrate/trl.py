"""Options of TRL that only count together."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import corrections, objectives, rewards
from rft_fn.migrate import rows as r

__all__ = ["examples", "rollouts"]

_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
_OF_THE_SERVER = (
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length",
    "vllm_enable_sleep_mode",
)  # fmt: skip


def _shared(options: Mapping[str, Any]) -> r.Combined:
    """Return the data with its config and split, adapters of TRL's size, the schedule, and its length."""
    arguments: list[str] = []
    notes: list[str] = []
    used = {"dataset_name", "dataset_config", "dataset_train_split", "lr_scheduler_kwargs", "processes"}
    source, config = options.get("dataset_name"), options.get("dataset_config")
    split = options.get("dataset_train_split")
    if isinstance(source, list):
        arguments.append(f"--data {' '.join(shlex.quote(str(x)) for x in source)}")
    elif source:
        source = f"{source}:{config}" if config else str(source)
        whole = "." in source.rpartition("/")[2] and split == "train"  # a file has no splits
        source = f"{source}@{split}" if split and "[" not in str(split) and not whole else source
        arguments.append(f"--data {shlex.quote(source)}")
        if "[" in str(split):
            notes.append(f"--data: a part of a split, {split}, is a file of its own here; --steps bounds it")
    mixture = options.get("dataset_mixture.datasets")
    if isinstance(mixture, list):
        used |= {name for name in options if name.startswith("dataset_mixture.")}
        each = [x for x in mixture if isinstance(x, Mapping)]
        named = [f"{_source(x)}={x.get('weight', 1)}" for x in each]
        arguments.append(f"--data {' '.join(map(shlex.quote, named))}")
        notes.append("--data: theirs takes a share of each source, ours draws from each by its share")

    mixer = {x.partition(".")[2]: share for x, share in options.items() if x.startswith("dataset_mixer.")}
    if mixer:
        used |= {x for x in options if x.startswith("dataset_mixer.")} | {"dataset_splits"}
        splits = options.get("dataset_splits") or []
        train = next((x for x in splits if str(x).startswith("train")), "")
        named = [f"{x}@{train}={share}" if train else f"{x}={share}" for x, share in mixer.items()]
        arguments.append(f"--data {' '.join(map(shlex.quote, named))}")

    # adapters are on with use_peft; the rank is then TRL's own where none is given
    used |= {"use_peft"}
    on = str(options.get("use_peft", "lora_r" in options)).lower() == "true"
    if on:
        arguments += [f"--lora-rank {options.get('lora_r') or 16}"]
        arguments += [f"--lora-alpha {options.get('lora_alpha') or 32}"]
    else:
        used |= {"lora_r", "lora_alpha", "lora_target_modules"}

    # a schedule with a floor
    more = options.get("lr_scheduler_kwargs")
    if str(options.get("lr_scheduler_type")) == "cosine_with_min_lr" and isinstance(more, Mapping):
        used |= {"lr_scheduler_type"}
        floor = r.number(more, "min_lr_rate")
        if "min_lr" in more:
            floor = r.number(more, "min_lr") / r.number(options, "learning_rate", default=1.0)
        arguments.append(f"--schedule cosine --lr-end {floor:.6g}")

    saves = _saves(options)
    return r.Combined([*arguments, *saves.arguments], used | saves.used, [*notes, *saves.notes])


def _source(x: Mapping[str, Any]) -> str:
    """Return a data set of a mixture, by the names of TRL or of alignment-handbook, with config and split."""
    config, split = x.get("config") or x.get("name"), x.get("split")
    return f"{x.get('id') or x.get('path')}{f':{config}' if config else ''}{f'@{split}' if split else ''}"


def _saves(options: Mapping[str, Any]) -> r.Combined:
    """Return the steps between checkpoints and evaluations, which may be shares of the run."""
    arguments: list[str] = []
    notes: list[str] = []
    used: set[str] = set()
    # a number of steps counts more than one of passes; fractions are of the run
    steps = r.number(options, "max_steps", default=-1)
    used |= {"max_steps"} | ({"num_train_epochs"} if steps > 0 else set())
    for name, ours in (("save_steps", "--save-every"), ("eval_steps", "--eval-every")):
        every = r.number(options, name)
        if 0 < every < 1:
            used |= {name}
            if steps > 0:
                arguments.append(f"{ours} {max(int(every * steps), 1)}")
            else:
                notes.append(f"{ours}: theirs is {every:g} of the run; it counts steps")
    if options.get("save_strategy") in ("no", "epoch", "best"):
        used |= {"save_strategy", "save_steps"}
        if options["save_strategy"] == "no":
            arguments.append("--save-every 1000000")
        else:
            notes.append(f"--save-every: theirs saves by save_strategy={options['save_strategy']}")
    return r.Combined(arguments, used, notes)


def _warmup(options: Mapping[str, Any], steps: float, updates: int = 1) -> r.Combined:
    """Return the warm-up in steps of `updates` updates, which may be a share of the run."""
    ratio = r.number(options, "warmup_ratio", "warmup_steps")
    if ratio >= 1 or "warmup_ratio" not in options:
        ratio = r.number(options, "warmup_steps") or ratio
    notes, used = [], {"warmup_ratio", "warmup_steps"}
    if 0 < ratio < 1 and steps <= 0:
        notes.append("--warmup: theirs begins with a rate of 0, ours with lr / warmup: one update ahead")
        return r.Combined([f"--warmup {ratio:g}"], used, notes)
    count = math.ceil(ratio * steps) if 0 < ratio < 1 else int(ratio)
    if count:
        notes.append("--warmup: theirs begins with a rate of 0, ours with lr / warmup: one update ahead")
    return r.Combined([f"--warmup {-(-count // updates)}"], used, notes)


def _engine(options: Mapping[str, Any]) -> r.Combined:
    """Return the options of vLLM, in the process or on a server, and of the correction of its mismatch."""
    on = str(options.get("use_vllm", False)).lower() == "true"
    if not on:
        return r.Combined([], {x for x in options if x.startswith("vllm_")}, [])
    used = {"use_vllm", "vllm_mode", *_ADDRESS}
    corrected = corrections.trl(options)
    arguments, notes = [*corrected.arguments], [*corrected.notes]
    used |= corrected.used

    given = [options[name] for name in _ADDRESS if options.get(name)]
    mode = str(options.get("vllm_mode") or "")
    if not (mode == "server" or (given and not mode)):
        return r.Combined(["--strategy.engine-type vllm", *arguments], used, notes)

    # a server of a given address, else TRL's own default
    host = str(options.get("vllm_server_host") or "localhost").replace("0.0.0.0", "localhost")
    url = options.get("vllm_server_base_url") or f"http://{host}:{options.get('vllm_server_port') or 8000}"
    own = [name for name in _OF_THE_SERVER if options.get(name) not in (None, "")]
    notes += [
        "--strategy.engine-servers: `trl vllm-serve` speaks another protocol; start `vllm serve` in its "
        "place, with the options of docs/engines.md, Starting vLLM",
        "--strategy.engine-weights: add a folder that this machine and the server's share, if they are two",
    ]
    if own:
        notes.append(f"{', '.join(own)}: options of the server's own command line")
    arguments += ["--strategy.engine-type openai", f"--strategy.engine-servers {url}"]
    return r.Combined(arguments, used | {*_OF_THE_SERVER}, notes)


def rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective; prompts of a step and updates of a rollout, from batches that count responses."""
    algorithm, engine, more, judged = (
        _objective(options),
        _engine(options),
        _shared(options),
        rewards.trl(options),
    )
    used = algorithm.used | engine.used | more.used | judged.used
    used |= {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}
    used |= {"generation_batch_size", "max_completion_length", "max_prompt_length"}
    processes = r.integer(options, "processes", default=1)
    device = r.integer(options, "per_device_train_batch_size", default=8) * processes
    accumulated = r.integer(options, "gradient_accumulation_steps", default=1)
    group = max(r.integer(options, "num_generations", default=8), 1)
    update = max(device * accumulated, 1)
    rollout = r.integer(options, "steps_per_generation", default=accumulated) * device
    rollout = r.integer(options, "generation_batch_size", default=rollout)

    # theirs count responses, ours prompts
    arguments = [*judged.arguments, *more.arguments, *algorithm.arguments, *engine.arguments]
    arguments.append(f"--prompts {max(rollout // group, 1)}")
    of = "one process" if processes == 1 else f"the {processes} processes"
    notes = [*algorithm.notes, *judged.notes, *engine.notes, *more.notes]
    notes.append(f"--prompts: of {of} of theirs; ours are of all processes")
    if rollout > update:
        arguments.append(f"--strategy.train-batch-size {update}")

    # theirs count updates, ours rollouts
    updates = max(rollout // update, 1) * max(r.integer(options, "num_iterations", default=1), 1)
    steps = r.number(options, "max_steps", default=-1)
    warmup = _warmup(options, steps, updates)
    arguments += warmup.arguments
    if steps > 0:
        arguments.append(f"--steps {-(-int(steps) // updates)}")
    for name, ours in (("save_steps", "--save-every"), ("eval_steps", "--eval-every")):
        every = r.number(options, name) * (steps if 0 < r.number(options, name) < 1 else 1)
        if updates > 1 and every >= 1 and "save_strategy" not in used:
            used |= {name}
            arguments.append(f"{ours} {max(int(every) // updates, 1)}")
    if updates > 1:
        notes.append(
            f"--steps, --warmup, --save-every: theirs count updates, of which a rollout has {updates}"
        )

    # a pack must hold a prompt and its response
    new = r.integer(options, "max_completion_length", default=512)
    longest = r.integer(options, "max_prompt_length", default=512)
    arguments += [f"--max-prompt {longest}", f"--max-new {new}", f"--budget {max(longest + new, 1024)}"]
    if not options.get("dataset_prompt_column"):
        arguments.append("--messages prompt")
        notes.append("--messages: where the column prompt holds texts, --template '{prompt}' in its place")
    return r.Combined(arguments, used | warmup.used, [*notes, *warmup.notes])


def _objective(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective of GRPO, or of the RLOO trainer."""
    if options.get("loss_type") != "rloo":
        return objectives.trl(options)
    arguments = ["--algorithm rloo"]
    if r.number(options, "beta"):
        arguments.append(f"--kl-in-reward {options['beta']}")
    notes = []
    if r.number(options, "num_iterations", default=1) > 1 or r.number(options, "steps_per_generation") > 1:
        notes.append("objective: with several updates a rollout theirs clips the ratios of whole responses")
    if str(options.get("normalize_advantages")).lower() == "true":
        notes.append("objective: theirs divides the advantages by their deviation over the batch")
    bounds = options.get("reward_clip_range")
    if (
        isinstance(bounds, list)
        and len(bounds) == 2
        and r.number({"x": bounds[0]}, "x") == -r.number({"x": bounds[1]}, "x")
    ):
        arguments.append(f"--reward-clip {bounds[1]}")
    return r.Combined(
        arguments, {"loss_type", "beta", "epsilon", "normalize_advantages", "reward_clip_range"}, notes
    )


_COLUMNS = {
    "sft": "--messages: the columns of the data; of a question and an answer: --template and --response",
    "dpo": "--messages prompt chosen rejected: where these columns hold messages, not texts",
    "rm": "--messages prompt chosen rejected: where these columns hold messages, not texts",
    "kto": "--messages prompt completion: where these hold messages; for rows of pairs leave out --unpaired",
}
_DEFAULT_BUDGETS = {"dpo": 1024, "rm": 2048}


def examples(kind: str, options: Mapping[str, Any]) -> r.Combined:
    """Return the batch, limits of tokens, the length of the run, its warm-up, and the loss of pairs."""
    more = _shared(options)
    used = more.used | {"per_device_train_batch_size", "gradient_accumulation_steps"}
    used |= {"max_length", "max_seq_length"}
    processes = r.integer(options, "processes", default=1)
    batch = r.integer(options, "per_device_train_batch_size", default=8) * processes
    batch *= r.integer(options, "gradient_accumulation_steps", default=1)
    arguments = [*more.arguments, f"--batch {batch}"]
    of = "one process" if processes == 1 else f"the {processes} processes"
    notes = [f"--batch: of {of} of theirs; ours is of all processes", *more.notes]
    if str(options.get("packing", False)).lower() == "true":
        notes.append("--batch: it counts examples; theirs, with packing, counts packs")

    # a pack must hold an example, or both sides of a pair
    length = r.integer(options, "max_seq_length", "max_length")
    if length and kind == "sft":
        arguments += [f"--budget {length}", f"--max-prompt {length}"]
    elif length:
        arguments += [f"--max-length {length}", f"--budget {max(2 * length, _DEFAULT_BUDGETS[kind])}"]

    # their warm-up may be a share of the run
    steps = r.number(options, "max_steps", default=-1)
    if steps > 0:
        arguments.append(f"--steps {int(steps)}")
    warmup = _warmup(options, steps)
    arguments, notes, used = [*arguments, *warmup.arguments], [*notes, *warmup.notes], used | warmup.used
    if kind == "sft":
        arguments.append("--messages messages")
        used |= {"dataset_prompt_column"}
    if kind == "dpo":
        other = options.get("preferences")
        pair = objectives.trl_preferences(options) if other else objectives.trl_pairs(options)
        arguments, used, notes = [*arguments, *pair.arguments], used | pair.used, [*notes, *pair.notes]
    single = "--unpaired" in arguments
    return r.Combined(arguments, used, [*notes, _COLUMNS["kto" if single else kind]])
