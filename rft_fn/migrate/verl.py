"""Options of verl that only count together."""

from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import corrections, objectives, rewards, tables
from rft_fn.migrate import rows as r

__all__ = ["ACTOR", "MODEL", "ROLLOUT", "examples", "rollouts", "script"]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."


# One function, since its parts share what is used, and follow each other as they do in a command.
def rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective, sizes, the length of a run, rewards, and what has a switch."""
    objective, corrected = objectives.verl(options), corrections.verl(options)
    critic, taught = script(options) == "ppo", script(options) == "distill"
    arguments, notes = [*objective.arguments, *corrected.arguments], [*objective.notes, *corrected.notes]
    used = {*objective.used, *corrected.used, ACTOR + "ppo_mini_batch_size", "data.train_batch_size"}

    # an update is over prompts there, over responses here
    prompts = r.integer(options, "data.train_batch_size")
    update = r.integer(options, ACTOR + "ppo_mini_batch_size")
    if not prompts:
        batches = r.integer(options, "async_training.require_batches", default=1)
        prompts = update * batches
        notes.append("--prompts: theirs samples all the time; a step here has the prompts of its updates")
    arguments.append(f"--prompts {prompts}")
    group = r.integer(options, ROLLOUT + "n", default=1)
    if update < prompts:
        arguments.append(f"--strategy.train-batch-size {update * group}")
    elif critic:
        arguments.append("--minibatches 1")

    # a pack must hold a prompt and its response
    limits = [r.integer(options, f"data.max_{x}_length", default=512) for x in ("prompt", "response")]
    share = r.integer(options, ACTOR + "ulysses_sequence_parallel_size", default=1)
    tokens = r.integer(options, ACTOR + "ppo_max_token_len_per_gpu") * share
    arguments.append(f"--budget {max(sum(limits), tokens)}")
    used |= {ACTOR + "ppo_max_token_len_per_gpu"}

    # a number of steps counts more than one of passes; their schedule counts steps too
    steps = r.integer(options, "trainer.total_training_steps")
    used |= {"trainer.total_epochs"} if steps else set()
    warmup = r.integer(options, ACTOR + "optim.lr_warmup_steps", default=-1)
    share_of_run = r.number(options, ACTOR + "optim.lr_warmup_steps_ratio")
    used |= {ACTOR + "optim.lr_warmup_steps", ACTOR + "optim.lr_warmup_steps_ratio"}
    each = r.integer(options, "epochs", default=1) if not critic else max(-(-prompts // max(update, 1)), 1)
    share = share_of_run if not steps else int(share_of_run * steps) * each
    arguments.append(f"--warmup {warmup * each if warmup >= 0 else share:.10g}")

    # the KL: in the loss, or in the reward, of each token with a critic
    kinds = (
        (ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", "" if critic else "--kl"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "--kl" if critic else "--kl-in-reward"),
    )
    for on, coefficient, ours in kinds:
        used |= {coefficient, on}
        if str(options.get(on, False)).lower() == "true" and ours:
            arguments.append(f"{ours} {options.get(coefficient, 0.001)}")
        elif str(options.get(on, False)).lower() == "true":
            notes.append(f"{on}: ppo.py has the KL in the reward of each token, --kl, not in the loss")
    adaptive = critic and str(options.get("algorithm.kl_ctrl.type")) == "adaptive"
    used |= {f"algorithm.kl_ctrl.{x}" for x in (("type",) if adaptive else ("type", "target_kl", "horizon"))}
    in_reward = str(options.get("algorithm.use_kl_in_reward")).lower() == "true"
    if in_reward and not critic and str(options.get("algorithm.kl_ctrl.type")) == "adaptive":
        notes.append("--kl-in-reward: its coefficient is fixed; theirs is steered (kl_ctrl.type=adaptive)")
    penalty = str(options.get("algorithm.kl_penalty") or "kl")
    used |= {"algorithm.kl_penalty"}
    if penalty not in ("kl", "k1") and in_reward:
        notes.append(f"--kl-in-reward: it is k1, the log-ratio itself; theirs is {penalty}")

    # without a critic nothing of one is read
    if not critic:
        used |= {name for name in options if name.startswith("critic.")}
        used |= {"algorithm.gamma", "algorithm.lam", "trainer.critic_warmup"}
        gamma = r.number(options, "algorithm.gamma", default=1.0)
        if gamma != 1 and "reinforce_plus_plus" in str(options["algorithm.adv_estimator"]):
            notes.append(f"algorithm.gamma={gamma:g}: advantage.reinforce_pp takes it, in a copy of grpo.py")
    if not r.integer(options, MODEL + "lora_rank", MODEL + "lora.rank"):
        used |= {
            MODEL + name for name in ("lora_rank", "lora.rank", "lora_alpha", "lora.alpha", "target_modules")
        } | {MODEL + "exclude_modules"}
    if str(options.get(ACTOR + "optim.lr_scheduler_type")) != "constant":
        arguments.append(f"--lr-end {options.get(ACTOR + 'optim.min_lr_ratio', 0.0)}")
    used |= {ACTOR + "optim.min_lr_ratio", ACTOR + "optim.betas"}
    betas = _items(options.get(ACTOR + "optim.betas"))
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), betas)]

    # tools are for conversations
    searched = any(name.startswith("retriever.") for name in options)
    if searched or any(x.startswith(ROLLOUT + "multi_turn.") and "path" in x for x in options):
        notes.append(
            "multi_turn: theirs are conversations with tools, here each prompt has one answer; multi_turn.py "
            "--environment FILE.py:NAME is that, see docs/environments.md"
        )
    used |= {x for x in options if x.startswith(ROLLOUT + "multi_turn.")} - {ROLLOUT + "multi_turn.enable"}
    more = rewards.verl(options)

    # what the chat template gets, by one mapping or by dotted names
    head = "data.apply_chat_template_kwargs"
    given = {x.removeprefix(f"{head}."): options[x] for x in options if x.startswith(f"{head}.")}
    if isinstance(mapping := options.get(head), Mapping):
        given |= mapping
    if given:
        used |= {x for x in options if x.startswith(head)}
        arguments.append(f"--chat-template-kwargs {' '.join(r.word(f'{k}={x}') for k, x in given.items())}")

    # EasyR1's prompts are texts
    if "easyr1.prompt_key" in options:
        used |= {"data.prompt_key", "easyr1.prompt_key", "easyr1.answer_key"}
        column = f"{{{options['easyr1.prompt_key']}}}"
        arguments.append(f"--template {r.word(column)}")
    if taught:
        teaching = _distillation(options)
        judged = [] if "--rl" not in " ".join(teaching.arguments) else more.arguments
        kept = [x for x in arguments if not x.startswith(("--loss.", "--kl "))]
        kept += ["--advantage reinforce"] if judged and group == 1 else []  # what theirs is of one response
        return r.Combined(
            [*kept, *judged, *teaching.arguments], used | more.used | teaching.used, [*teaching.notes, *notes]
        )
    return r.Combined([*arguments, *more.arguments], used | more.used, [*notes, *more.notes])


def script(options: Mapping[str, Any]) -> str:
    """Return distill with a teacher, ppo with a critic, else grpo."""
    if objectives.is_true(options.get("distillation.enabled")):
        return "distill"
    return "ppo" if str(options["algorithm.adv_estimator"]).lower() == "gae" else "grpo"


# by sampled tokens of the student; the gradient of k3 is in expectation that of the forward KL
_TAUGHT = tables.table("verl")["maps"]["distillation"]
_LOSS, _TEACHERS = "distillation.distillation_loss.", "distillation.teacher_models."


def _distillation(options: Mapping[str, Any]) -> r.Combined:
    """Return the teachers and the loss of verl's distillation."""
    used = {x for x in options if x.startswith("distillation.")}
    paths = {
        x.split(".")[2]: path
        for x, path in options.items()
        if x.startswith(_TEACHERS) and x.endswith(".model_path")
    }
    if len(paths) > 1:
        paths.pop("teacher_model", None)
    arguments, notes = [], []
    if len(paths) == 1:
        arguments.append(f"--teacher {r.word(str(*paths.values()))}")
    else:
        named = [f"{options.get(f'{_TEACHERS}{name}.key') or name}={path}" for name, path in paths.items()]
        arguments += [f"--teacher {' '.join(map(r.word, named or ['TEACHER']))}"]
        arguments += (
            [f"--teacher-column {r.word(str(options.get('distillation.teacher_key') or 'data_source'))}"]
            if named
            else []
        )

    # the divergence: a gradient of its own, or a part of the advantages
    mode, sampled = (
        str(options.get(_LOSS + "loss_mode") or "k3"),
        objectives.is_true(options.get(_LOSS + "use_policy_gradient")),
    )
    loss = "sampled" if sampled else _TAUGHT.get(mode, "forward_kl")
    arguments.append(f"--loss {loss}")
    if mode == "forward_kl_topk":
        arguments.append(f"--top-k {options.get(_LOSS + 'topk', 32)}")
        notes.append("objective: --top-k takes all other words as one; theirs leaves them out")
    elif mode not in _TAUGHT:
        notes.append(f"objective: distillation loss_mode={mode} is no loss of ours; {loss} stands in")
    elif not sampled and loss == "sampled":
        notes.append(
            f"objective: {mode} without use_policy_gradient has a gradient of expectation 0; ours has not"
        )
    elif loss != "sampled":
        notes.append(f"objective: theirs is {mode} of the sampled token, ours its expectation over all words")
    elif mode not in ("k1", "kl"):
        notes.append(
            f"objective: theirs is {mode} in the reward of a token, ours the log-ratio to the teacher"
        )
    limits = [
        x
        for x in (_LOSS + "loss_max_clamp", _LOSS + "log_prob_min_clamp")
        if options.get(x) not in (None, "null")
    ]
    if limits:
        notes.append(f"objective: theirs is bounded by {', '.join(limits)}, ours is not")
    if str(options.get(_LOSS + "use_task_rewards", True)).lower() == "true":
        share = r.number(options, _LOSS + "distillation_loss_coef", default=1.0)
        arguments.append(f"--rl {1 / share if share else 1:g}")
        notes += (
            ["--rl: theirs weighs the divergence, ours the rewards, in the same proportion"]
            if share != 1
            else []
        )
    return r.Combined(arguments, used, notes)


def examples(options: Mapping[str, Any]) -> r.Combined:
    """Return the columns of an example, its limit, and pairs of numbers."""
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
            keys = [f"[{key}]" for key in _items(options.get(f"data.{side}_dict_keys"))]
            arguments.append(f"{ours} '{{{column}{''.join(keys)}}}'")

    # a pack must hold an example
    length = r.integer(options, "data.max_length", default=1024)
    budget = max(length, r.integer(options, "data.max_token_len_per_gpu"))
    arguments += [f"--max-prompt {length}", f"--budget {budget}"]
    used |= {"data.max_token_len_per_gpu"}
    arguments += [f"{name} {x}" for name, x in zip(("--beta1", "--beta2"), _items(options["optim.betas"]))]

    # a number of steps counts more than one of passes
    if options.get("trainer.total_training_steps"):
        used |= {"trainer.total_epochs"}
    if not messages and "data.prompt_key" not in options:
        arguments += ["--template '{question}'"]
    if not messages and "data.response_key" not in options:
        arguments += ["--response '{answer}'"]

    # a share of the run
    steps = r.integer(options, "trainer.total_training_steps")
    names = ("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")
    ratio = r.number(options, *names, default=0.1)
    used |= {*names}
    if "optim.lr_warmup_steps" not in options:
        arguments.append(f"--warmup {int(ratio * steps) if steps else ratio:.10g}")
    if not r.integer(options, "model.lora_rank"):
        used |= {"model.lora_rank", "model.lora_alpha", "model.target_modules"}
    return r.Combined(arguments, used, notes)


def _items(value: Any) -> list[str]:
    """Return the items of a list, or of one written as a text: "['a', 'b']"."""
    if value is None:
        return []
    if isinstance(value, str):
        value = value.strip("[]() ").replace(",", " ").split()
    return [str(x).strip("'\"") for x in value]
