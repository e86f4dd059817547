"""Options of LightRFT that only count together; OpenRLHF's rollouts are the same."""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from rft_fn.migrate import objectives, rewards
from rft_fn.migrate import rows as r

__all__ = ["capacity", "combine", "examples", "pair", "script", "sources"]


# One function, since its parts share what is used, and follow each other as they do in a command.
def combine(
    options: Mapping[str, Any], objective: Callable[[Mapping[str, Any]], r.Combined] = objectives.lightrft
) -> r.Combined:
    """Return the objective, where the KL belongs, columns, sizes and pairs of numbers, by the older names."""
    found, critic = objective(options), script(options) == "ppo"
    used = found.used | {"init_kl_coef", "use_kl_loss", "kl_estimator", "adam_betas", "reward_clip_range"}
    arguments, notes = [*found.arguments], [*found.notes]

    # one coefficient there, in the loss or in the reward; ppo.py has it in the reward
    in_loss = critic or objectives.is_true(options.get("use_kl_loss"))
    arguments.append(f"{'--kl' if in_loss else '--kl-in-reward'} {options['init_kl_coef']}")
    if critic and objectives.is_true(options.get("use_kl_loss")):
        notes.append("use_kl_loss: ppo.py has the KL in the reward of each token, not in the loss")

    # FSDP wins over a stage of ZeRO
    if objectives.is_true(options.get("fsdp")):
        used |= {"zero_stage", "fsdp"}
        arguments.append("--strategy.fsdp")

    # the prompt: messages where a chat template is applied, else a text
    key = options.get("input_key") or "input"
    used |= {"input_key", "apply_chat_template", "input_template"}
    template = options.get("input_template")
    if template:
        text = str(template).replace("{}", f"{{{key}}}")
        arguments.append(f"--template {shlex.quote(text)}")
    elif objectives.is_true(options.get("apply_chat_template")):
        arguments.append(f"--messages {key}")
        notes.append(f"--messages: where the column {key} holds texts, --template '{{{key}}}' in its place")
    else:
        arguments.append(f"--template '{{{key}}}'")
        notes.append("--template: theirs is the whole prompt; here the model's chat template goes around it")

    arguments += sources(options, used)

    # a pack must hold a prompt and its response
    longest = r.integer(options, "max_len", "data.max_len")
    new = r.integer(options, "generate_max_len", "rollout.max_new_tokens", "max_new_tokens")
    if longest and "prompt_max_len" not in options:
        used |= {"data.max_len", "max_len"}
        if not new:
            notes.append(
                f"--max-new: theirs is what the prompt leaves of {longest} tokens; here half of them"
            )
        new = new if 0 < new < longest else max(longest // 2, 1)
    new = new or 1024
    prompt = r.integer(options, "prompt_max_len", default=longest - new if longest else 1024)
    budget = max(prompt + new, r.integer(options, "train.max_tokens_per_gpu", "train_max_tokens_per_gpu"))
    arguments += [f"--max-prompt {prompt}", f"--max-new {new}", f"--budget {budget}"]
    used |= {"prompt_max_len", "generate_max_len", "rollout.max_new_tokens", "max_new_tokens"}
    used |= {"train.max_tokens_per_gpu", "train_max_tokens_per_gpu"}

    # a text model has nothing with the prefix
    used |= {"freeze_prefix"}
    if objectives.is_true(options.get("freeze_prefix")):
        media = any(x in options for x in ("images_key", "mixed_mm_data", "limit_mm_image_per_prompt"))
        if media and not objectives.is_true(options.get("text_only")):
            arguments.append("--freeze visual")
        else:
            notes.append(
                "freeze_prefix: --freeze visual, for a model that sees; a text model has no such part"
            )

    # a share of the run
    names = ("lr_warmup_ratio", "actor.lr_warmup_ratio")
    used |= {*names}
    arguments += [f"--warmup {r.number(options, *names, default=0.03):g}", *capacity(options, used)]

    # without a critic nothing of one is read
    if not critic:
        used |= {x for x in options if x.startswith(("critic", "lambd", "kl_target"))} | _OF_A_CRITIC
        if r.number(options, "gamma", "algo.advantage.gamma", default=1.0) != 1:
            notes.append(
                "gamma: advantage.reinforce_pp takes it, in a copy of grpo.py; others do not read it"
            )
    if not r.integer(options, "lora_rank", "ds.lora.rank"):
        used |= {f"{head}{x}" for head in ("lora_", "ds.lora.") for x in ("rank", "alpha", "dropout")}
        used |= {"target_modules", "ds.lora.target_modules"}

    # pairs of numbers, and the penalty of DAPO where it is on
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), pair(options.get("adam_betas")))]
    bounds = pair(options.get("reward_clip_range"))
    if len(bounds) == 2 and float(bounds[0]) == -float(bounds[1]):
        arguments.append(f"--reward-clip {bounds[1]}")
    elif bounds:
        notes.append(f"reward_clip_range={bounds}: --reward-clip is the same on both sides")
    if "overlong_buffer" in options or "overlong_buffer_len" in options:
        used |= {"overlong_buffer", "overlong_buffer_len"}
        if objectives.is_true(options.get("overlong_buffer", True)):
            arguments.append(f"--overlong {options.get('overlong_buffer_len', 1024)}")
    judged = rewards.openrlhf(options)
    return r.Combined([*arguments, *judged.arguments], used | judged.used, [*notes, *judged.notes])


_OF_A_CRITIC = {
    "algo.advantage.lambd", "algo.advantage.gamma", "gamma", "algo.kl.target", "algo.kl.horizon",
    "value_clip", "freezing_actor_steps", "save_value_network", "advantages_norm",
}  # fmt: skip


def examples(kind: str, options: Mapping[str, Any]) -> r.Combined:
    """Return the columns, the sizes and the loss of a reward model, scalar or generative."""
    length = r.integer(options, "prompt_max_len", default=1024)
    length += r.integer(options, "generate_max_len") if kind == "sft" else 0
    used = {"prompt_max_len", "generate_max_len", "adam_betas", "lr_warmup_ratio", "task_instruction", "fsdp"}
    arguments = [f"--budget {2 * length if kind == 'rm' else length}"]
    arguments += [
        f"--warmup {r.number(options, 'lr_warmup_ratio', default=0.03):g}",
        *capacity(options, used),
    ]
    arguments.append(f"--max-length {length}" if kind == "rm" else f"--max-prompt {length}")
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), pair(options.get("adam_betas")))]
    notes = []
    if objectives.is_true(options.get("fsdp")):
        used |= {"zero_stage"}
        arguments.append("--strategy.fsdp")
    if not r.integer(options, "lora_rank"):
        used |= {"lora_rank", "lora_alpha", "lora_dropout", "target_modules"}
    columns = "messages" if kind == "sft" else "prompt chosen rejected"
    arguments.append(f"--messages {columns}")
    notes.append(
        f"--data, --messages: theirs are files of a data handler; here rows with the columns {columns}"
    )
    if options.get("task_instruction"):
        notes.append("task_instruction: a part of each prompt of the rows")
    if kind == "sft":
        return r.Combined(arguments, used, notes)

    # the loss of a pair
    used |= {"loss_type", "margin", "heads_types", "scale_for_train", "pooling_method"}
    loss = str(options.get("loss_type") or "hps")
    if loss != "sigmoid":
        notes.append(f"objective: theirs is {loss}; train_rm.py has Bradley-Terry, a copy of it another one")
    heads = pair(options.get("heads_types"))
    if heads and heads != ["preference"]:
        arguments.append(f"--heads {' '.join(map(str, heads))}")
    arguments.append(f"--pool {'last' if options.get('pooling_method') == 'last' else 'attention'}")
    if objectives.is_true(options.get("scale_for_train")):
        notes.append("scale_for_train: scores are calibrated after the run, not scaled in it")
    return r.Combined(arguments, used, notes)


_SOURCES = (
    ("data.prompt_dataset", "data.prompt_probs"), ("prompt_data", "prompt_data_probs"),
    ("data.dataset", "data.dataset_probs"), ("dataset", "dataset_probs"),
)  # fmt: skip


def sources(options: Mapping[str, Any], used: set[str]) -> list[str]:
    """Return --data of several sources, with commas between them there, and their shares; add to `used`."""
    for name, probs in _SOURCES:
        found = str(options.get(name) or "").split(",")
        if len(found) > 1:
            used |= {name, probs}
            shares = str(options.get(probs) or "").split(",")
            shares = [f"={x}" for x in shares] if len(shares) == len(found) else [""] * len(found)
            each = [r.word(x.strip() + share) for x, share in zip(found, shares, strict=True)]
            return [f"--data {' '.join(each)}"]
    return []


def capacity(options: Mapping[str, Any], used: set[str]) -> list[str]:
    """Return the bound of all checkpoints in bytes, of theirs in GB; add to `used`."""
    names = ("max_ckpt_mem", "ckpt.max_mem")
    used |= {*names}
    found = r.number(options, *names, default=1e8)
    return [f"--max-bytes {int(found * 1024**3)}"] if 0 < found < 1e8 else []  # 1e8 is none


def pair(value: Any) -> list[Any]:
    """Return the two numbers of a list, or of a text; none of None."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return list(value)


def script(options: Mapping[str, Any]) -> str:
    """Return ppo where there is a critic, else grpo."""
    return "ppo" if str(options["advantage_estimator"]).lower() == "gae" else "grpo"
