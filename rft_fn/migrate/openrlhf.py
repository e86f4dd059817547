"""Options of OpenRLHF that only count together, by dotted names and older ones."""

import shlex
from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import corrections, lightrft, objectives, tables
from rft_fn.migrate import rows as r

__all__ = ["examples", "rollouts", "script"]


# dotted names of options that only have a meaning together, and their older ones
_OLDER = tables.table("openrlhf")["maps"]["older"]
_OLDER_OF_EXAMPLES = tables.table("openrlhf")["maps"]["older_of_examples"]
_BUDGETS = {"dpo": 1024, "rm": 2048}


def _older(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with their older names."""
    return {_OLDER.get(name, name): value for name, value in options.items()}


def rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return what LightRFT's trainer does with the older names."""
    found = lightrft.combine(_older(options), objectives.openrlhf)
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
    agent = options.get("train.agent_func_path") or options.get("agent_func_path")
    if agent:
        notes.append(
            f"train.agent_func_path={agent}: conversations over several turns; "
            "multi_turn.py --environment FILE.py:NAME is that, see docs/environments.md"
        )
    on = any(objectives.is_true(options.get(x)) for x in ("train.async_enable", "async_train"))
    if on and not any(options.get(x) for x in ("train.async_queue_size", "async_queue_size")):
        arguments.append("--ahead 1")
    used |= {"train.async_enable", "async_train"}
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


def examples(kind: str, options: Mapping[str, Any]) -> r.Combined:
    """Return columns, limits of tokens, adapters of their size, and the loss of a pair."""
    used = {*_OLDER_OF_EXAMPLES, *_OLDER_OF_EXAMPLES.values()}
    given = {older: options.get(older, options.get(name)) for name, older in _OLDER_OF_EXAMPLES.items()}

    # a pack must hold an example, or both sides of a pair
    arguments = [*_columns(kind, given), *lightrft.sources(options, used)]
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
    betas = lightrft.pair(given["adam_betas"])
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), betas)]
    arguments.append(f"--warmup {r.number(options, 'lr_warmup_ratio', default=0.03):g}")
    arguments += lightrft.capacity(options, used)
    return r.Combined(arguments, used | {"lr_warmup_ratio"}, [])


def script(options: Mapping[str, Any]) -> str:
    """Return ppo where there is a critic, else grpo."""
    return lightrft.script(_older(options))
