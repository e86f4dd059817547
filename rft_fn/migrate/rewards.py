"""Translates rewards of other libraries: functions, models, servers and rules, as --reward here."""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import rows as r
from rft_fn.migrate import tables

__all__ = ["openrlhf", "trl", "verl"]


# names of open-r1's registry and of `trl grpo` -> functions of these packages
_OPEN_R1 = tables.table("trl")["maps"]["rewards"]
_FACTORIES = tables.table("trl")["maps"]["reward_parameters"]
_OF_TRL = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
)


def trl(options: Mapping[str, Any]) -> r.Combined:
    """Return each reward as a function of its package, with its weight."""
    given = options.get("reward_funcs")
    given = [] if given is None else [str(x) for x in ([given] if isinstance(given, str) else given)]
    weights = options.get("reward_weights") or []
    weights = [str(x) for x in ([weights] if isinstance(weights, str | int | float) else weights)]
    used, notes, found = {"reward_funcs", "reward_weights", "reward_model_name_or_path"}, [], []
    used |= {theirs for parameters in _FACTORIES.values() for theirs, _ in parameters.values()}
    for k, name in enumerate(given):
        spec = name
        if name in _OPEN_R1:
            parameters = _FACTORIES.get(name, {})
            call = ", ".join(
                f"{x}={options.get(theirs, usual)!r}" for x, (theirs, usual) in parameters.items()
            )
            spec = f"open_r1.rewards:{_OPEN_R1[name]}" + (f"({call})" if call else "")
        elif name in _OF_TRL:
            call = "(max_completion_len=1280, soft_punish_cache=256)" if name.startswith("get_") else ""
            spec = f"trl.rewards:{name}{call}"
        elif "." in name and ":" not in name and "/" not in name:  # module.function
            spec = f"{name.rpartition('.')[0]}:{name.rpartition('.')[2]}"
        found.append(spec + (f"={weights[k]}" if k < len(weights) and len(weights) == len(given) else ""))
    if options.get("reward_model_name_or_path"):
        found.append(f"model:{options['reward_model_name_or_path']}")
    packages = sorted({x.partition(".")[0] for x in found if x.startswith(("open_r1.", "trl."))})
    if packages:
        notes.append(
            f"--reward: the functions are of {' and '.join(packages)}, which must be installed, or of a copy "
            "of the file with them: --reward FILE.py:FUNCTION"
        )
    arguments = [f"--reward {' '.join(map(shlex.quote, found))}"] if found else []
    return r.Combined(arguments, used, notes)


def openrlhf(options: Mapping[str, Any]) -> r.Combined:
    """Return the rewards of OpenRLHF and LightRFT: models by their folders, functions, and servers."""
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
    if not found and (folders == "{}" or options.get("reward_pretrain") == ""):
        found.append("lightrft:reward_models_utils.py:reward_fn")
        notes.append(
            "--reward: no model; theirs is the rule that the column label names, reward_fn of the file "
            "reward_models_utils.py beside train_colocate.py, here as --reward lightrft:FILE.py:reward_fn"
        )
    if not found and (options.get("train.agent_func_path") or options.get("agent_func_path")):
        notes.append("--reward: the agent gives it; the rewards of --environment are its own")
    arguments = [f"--reward {' '.join(map(shlex.quote, found))}"] if found else []
    return r.Combined(arguments, used, notes)


_RULES = "verl.utils.reward_score:default_compute_score"


# names of verl 0.8 and later -> those before
_OLDER = tables.table("verl")["maps"]["older"]


def _older(name: str) -> str:
    """Return the older name of an option of verl's rewards."""
    head = next((head for head in _OLDER if name.startswith(head)), "")
    return _OLDER[head] + name.removeprefix(head) if head else name


def verl(options: Mapping[str, Any]) -> r.Combined:
    """Return the reward: a function, a model, or the rule that verl chooses by the column data_source."""
    found = _verl({_older(name): x for name, x in options.items()})
    return found._replace(used=found.used | {name for name in options if _older(name) in found.used})


def _verl(options: Mapping[str, Any]) -> r.Combined:
    """Return the reward by verl's older names."""
    arguments, notes = [], []
    used = {f"custom_reward_function.{name}" for name in ("path", "name")} | {"reward_model.model.path"}
    used |= {name for name in options if name.startswith("custom_reward_function.reward_kwargs")}
    path = options.get("custom_reward_function.path")
    on = str(options.get("reward_model.enable", False)).lower() == "true"
    if on and options.get("reward_model.model.path"):
        arguments.append(f"--reward {r.word('model:' + str(options['reward_model.model.path']))}")
        used |= {"reward_model.enable"}
    if path:
        head = "custom_reward_function.reward_kwargs."
        given = dict(options.get(head[:-1]) or {})
        given |= {name.removeprefix(head): x for name, x in options.items() if name.startswith(head)}
        call = f"({', '.join(f'{k}={_literal(x)}' for k, x in given.items())})" if given else ""
        spec = f"verl:{path}:{options.get('custom_reward_function.name') or 'compute_score'}{call}"
        arguments = [f"--reward {' '.join([*(x.partition(' ')[2] for x in arguments), r.word(spec)])}"]
    if not arguments:
        answer = options.get("easyr1.answer_key") or "reward_model.ground_truth"
        arguments.append(f"--reward {r.word(f'math:{answer}')}")
        if "easyr1.answer_key" not in options:
            notes.append(
                "--reward: theirs is a rule that the column data_source names; math compares the answers. "
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


def _literal(x: Any) -> str:
    """Return a value as Python writes it."""
    plain = {"true": "True", "false": "False", "null": "None", "none": "None"}
    if str(x).lower() in plain:
        return plain[str(x).lower()]
    return str(x) if r.number({"x": x}, "x", default=math.nan) == r.number({"x": x}, "x") else repr(str(x))
