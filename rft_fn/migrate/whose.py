"""Whose config a file is, of which kind of trainer, and whether its program is one that is read."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rft_fn.migrate import LIBRARIES
from rft_fn.migrate.foreign_files import Config
from rft_fn.migrate.rows import Library

__all__ = ["check_program", "kind_of", "program_of_path", "system"]

# systems that are not read -> names of which a config has two
FOREIGN = {
    "Axolotl": "base_model sequence_len sample_packing micro_batch_size val_set_size datasets",
    "LLaMA-Factory": "stage finetuning_type template cutoff_len dataset_dir pref_loss pref_beta lora_target",
    "ms-swift": "rlhf_type train_type tuner_type loss_scale external_plugins split_dataset_ratio",
    "torchtune": "tokenizer._component_ model._component_ dataset._component_ optimizer._component_",
    "NeMo-RL": "policy.model_name grpo.num_prompts_per_step grpo.num_generations_per_prompt cluster",
    "SkyRL": "generator.n_samples_per_prompt trainer.policy.model.path generator.backend trainer.placement",
    "slime": "hf_checkpoint ref_load rm_type num_rollout rollout_function_path",
    "AReaL": "actor.path allocation_mode gconfig.n_samples gconfig.max_new_tokens",
    "ROLL": "actor_train.model_args actor_infer.generating_args actor_train.training_args",
    "TRLX": "method.name train.seq_length model.model_path",
    "DeepSpeed-Chat": "actor_model_name_or_path critic_model_name_or_path num_padding_at_beginning",
    "diffusers": "pretrained_model_name_or_path sample_num_steps train_text_encoder instance_prompt",
}


def system(config: Config) -> str:
    """Return the library of a config: by the package of its program, else by names of its options.

    ValueError for a config that tells none.
    """
    package = config.started.partition(".")[0]
    for name, library in LIBRARIES.items():
        if package in library.packages:
            return name

    for name, told in FOREIGN.items():
        if (
            len(
                found := [
                    x for x in told.split() if any(o == x or o.startswith(f"{x}.") for o in config.options)
                ]
            )
            > 1
        ):
            raise ValueError(
                f"system: expected a config of one of {', '.join(LIBRARIES)}, got one of {name} "
                f"({', '.join(found[:4])})"
            )

    # a program of one library only, and the options that most are known of
    known = {}
    for name, library in LIBRARIES.items():
        rows = {option for trainer in library.trainers.values() for option in trainer.rows}
        tells = tuple(x for trainer in library.trainers.values() for x in trainer.tells)
        count = sum(option in rows or option.startswith(tells or ("\0",)) for option in config.options)
        programs = {x for trainer in library.trainers.values() for x in trainer.programs}
        known[name] = count + 3 * len(programs & set(config.programs))
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        raise ValueError(
            f"system: expected options of one of {', '.join(LIBRARIES)}, got none that they have: "
            f"{', '.join(list(config.options)[:4])}"
        )
    return best


def check_program(library: Library, config: Config) -> None:
    """Raise ValueError for a program of the library's packages that is not one of those that are read."""
    parts = re.sub(r"\.py$", "", config.started).replace("/", ".").split(".")
    at = max((k for k, x in enumerate(parts) if x in library.packages), default=None)
    module = ".".join(parts[at:]) if at is not None else parts[-1]
    programs = {x for trainer in library.trainers.values() for x in trainer.programs} | set(library.others)
    if at is not None and at + 1 < len(parts):
        known = (
            any(fnmatchcase(module, x) for x in library.modules) if library.modules else parts[-1] in programs
        )
        understood = known or parts[-1] in library.others
    else:
        named = any("." in x for x in config.options) and library.modules  # by hydra: a program of their form
        understood = parts[-1] in programs or parts[-1] in ("", *library.packages) or not named
    if not understood:
        own = ", ".join(
            dict.fromkeys(x.rpartition(".")[2].lstrip("*") for x in library.modules)
        ) or ", ".join(sorted(programs))
        raise ValueError(
            f"program: expected one of {own} of {library.title}, got {config.started}; --trainer "
            f"{'|'.join(library.trainers)} reads it as one"
        )


def kind_of(library: Library, options: Mapping[str, Any], programs: Sequence[str], named: str | None) -> str:
    """Return the kind of a config's trainer: as named, by its programs, or by options that no other has.

    Raises ValueError if the library has no such trainer, or if neither programs nor options tell one.
    """
    kinds = ", ".join(library.trainers)
    if named is not None:
        if named not in library.trainers:
            raise ValueError(f"trainer: expected one of {kinds} for {library.title}, got {named}")
        return named
    for name in programs:
        if name in library.others:
            raise ValueError(f"trainer: expected one of {kinds}, got {name}; {library.others[name]}")
    found = [kind for kind, x in library.trainers.items() if set(programs) & set(x.programs)]
    if len(library.trainers) == 1:
        return kinds
    if not found:
        found = _told(library, options)
    if len(found) != 1:
        raise ValueError(
            f"trainer: expected options of one of {kinds}, or --trainer to name it, got those of "
            f"{', '.join(found) or 'none'}"
        )
    return found[0]


def _told(library: Library, options: Mapping[str, Any]) -> list[str]:
    """Return the kinds of trainer that the options tell, the fewest; [] for none."""
    found = [kind for kind in library.trainers if _is_told(library, kind, options)]
    return found if len(found) == 1 else _most(library, found or list(library.trainers), options)


def _most(library: Library, kinds: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the kinds of trainer that know most of the telling options; [] for none."""
    rows = {kind: set(library.trainers[kind].rows) for kind in kinds}
    telling = set(options) - set.intersection(*rows.values())
    known = {kind: len(telling & rows[kind]) for kind in kinds}
    most = max(known.values())
    return [kind for kind in kinds if known[kind] == most] if most else []


def _is_told(library: Library, kind: str, options: Mapping[str, Any]) -> bool:
    """Return whether there is an option that only this trainer has."""
    others = {name for other, x in library.trainers.items() if other != kind for name in x.rows}
    trainer = library.trainers[kind]
    if set(options) & (set(trainer.rows) - others):
        return True
    return any(f"{name}={value}".startswith(trainer.tells) for name, value in options.items())


def program_of_path(library: Library, config: Config) -> Sequence[str]:
    """Return the program that the path of a file names, where its content tells no other kind of trainer."""
    kinds = {x: kind for kind, trainer in library.trainers.items() for x in trainer.programs}
    named = {x for x in config.path if x in kinds or x in library.others}
    if len(named) != 1:
        return []
    program = named.pop()
    told = _told(library, config.options)
    other = len(told) == 1 and told[0] != kinds.get(program)
    return [] if other or ("loss_type" in config.options and len(told) == 1) else [program]
