"""Trainers of verl: options that only count together, defaults, and what tells them apart."""

from collections.abc import Mapping
from typing import Any

from rft_fn.tools.other_libraries import corrections, objectives, rewards
from rft_fn.tools.other_libraries import rows as r
from rft_fn.tools.other_libraries.verl import ACTOR, MODEL, ROLLOUT, TABLE

__all__ = ["LIBRARY"]

_REFERENCE = "the reference is the initial model, scored with the packs of the policy"
_PROFILED = "timing.jsonl has the seconds of each phase"
_MEGATRON = "torchrun with several processes shards with FSDP2, by --strategy.fsdp and shard-size"
# ------------------------------------------------------------------------------ options that count together


# One function, since its parts share what is used, and follow each other as they do in a command.
def _rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective, sizes, the length of a run, rewards, and what has a switch."""
    objective, corrected = objectives.verl(options), corrections.verl(options)
    critic = str(options["algorithm.adv_estimator"]).lower() == "gae"
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
    if warmup < 0 and share_of_run and not steps:
        notes.append(f"--warmup: theirs is {share_of_run:g} of the run; --warmup counts rollouts")
    each = r.integer(options, "epochs", default=1) if not critic else max(-(-prompts // max(update, 1)), 1)
    arguments.append(f"--warmup {(warmup if warmup >= 0 else int(share_of_run * steps)) * each}")

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
    used |= set() if adaptive else {f"algorithm.kl_ctrl.{x}" for x in ("type", "target_kl", "horizon")}
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
        }
    if str(options.get(ACTOR + "optim.lr_scheduler_type")) != "constant":
        arguments.append(f"--lr-end {options.get(ACTOR + 'optim.min_lr_ratio', 0.0)}")
    used |= {ACTOR + "optim.min_lr_ratio"}

    # tools are for conversations
    searched = any(name.startswith("retriever.") for name in options)
    if searched or any(x.startswith(ROLLOUT + "multi_turn.") and "path" in x for x in options):
        notes.append(
            "multi_turn: theirs are conversations with tools, here each prompt has one answer; multi_turn.py "
            "--environment FILE.py:NAME is that, see docs/environments.md"
        )
    more = rewards.verl(options)
    return r.Combined([*arguments, *more.arguments], used | more.used, [*notes, *more.notes])


def _examples(options: Mapping[str, Any]) -> r.Combined:
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
        arguments.append(f"--warmup {int(ratio * steps)}")
        if ratio and not steps:
            notes.append(f"--warmup: theirs is {ratio:g} of the run; --warmup counts steps")
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


_NUMBERS = (
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", ROLLOUT + "n",
    ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_max_token_len_per_gpu", ACTOR + "optim.lr",
    ACTOR + "ulysses_sequence_parallel_size", "trainer.total_training_steps", "trainer.total_epochs",
    ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high", ACTOR + "clip_ratio_c", ACTOR + "clip_ratio",
    ACTOR + "kl_loss_coef", "algorithm.kl_ctrl.kl_coef", "algorithm.gamma", "algorithm.lam",
    ACTOR + "entropy_coeff", ACTOR + "loss_scale_factor", ACTOR + "tau_pos", ACTOR + "tau_neg",
    ROLLOUT + "temperature", ROLLOUT + "top_p", "critic.optim.lr", "trainer.critic_warmup",
    "reward_model.overlong_buffer.len", "reward_model.reward_kwargs.overlong_buffer_cfg.len",
)  # fmt: skip

LIBRARY = r.Library(
    "verl",
    {
        "sft": r.Trainer(
            rows=r.rows_of(TABLE, "sft"),
            defaults={
                "data.train_batch_size": 256,
                "data.max_length": 1024,
                "optim.lr": 1e-5,
                "optim.betas": [0.9, 0.95],
                "optim.weight_decay": 0.01,
                "optim.lr_scheduler": "cosine",
                "optim.min_lr_ratio": 0.0,
                "trainer.total_epochs": 4,
                "model.lora_alpha": 16,
                "model.target_modules": "all-linear",
            },
            combine=_examples,
            script=lambda options: "sft",
            sections={
                "checkpoint.": "a checkpoint always has everything that a run needs",
                "trainer.": "the folder of a run has its files and checkpoints",
                "engine": "torchrun with several processes shards with FSDP2",
                "optim": "the optimizer is AdamW",
                "model.": "the scripts choose how a model computes",
                "data.": "docs/data.md has the forms of rows",
                "profiler.": "timing.jsonl has the seconds of each phase",
            },
            programs=("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray"),
            tells=("model.", "optim.", "engine."),
        ),
        "rl": r.Trainer(
            rows=r.rows_of(TABLE, "rl"),
            defaults={
                ACTOR + "optim.lr": 1e-6,
                ACTOR + "optim.lr_scheduler_type": "constant",
                ACTOR + "optim.weight_decay": 0.01,
                ACTOR + "ppo_mini_batch_size": 256,
                "data.train_batch_size": 1024,
                "data.max_prompt_length": 512,
                "data.max_response_length": 512,
                "data.prompt_key": "prompt",
                ROLLOUT + "n": 1,
                ROLLOUT + "name": "vllm",
                MODEL + "lora_alpha": 16,
                MODEL + "target_modules": "all-linear",
                "algorithm.adv_estimator": "gae",
                "algorithm.lam": 1.0,
                "critic.optim.lr": 1e-5,
                "critic.cliprange_value": 0.5,
                "trainer.total_epochs": 30,
            },
            combine=_rollouts,
            script=lambda o: "ppo" if str(o["algorithm.adv_estimator"]).lower() == "gae" else "grpo",
            sections={
                "actor_rollout_ref.ref.": _REFERENCE,
                "ray_kwargs.": "there is no Ray: torchrun starts the processes",
                "ray_init.": "there is no Ray: torchrun starts the processes",
                "actor_rollout_ref.rollout.agent.": "multi_turn.py and rft_fn.environment",
                "actor_rollout_ref.rollout.multi_turn.": "multi_turn.py and rft_fn.environment",
                "actor_rollout_ref.rollout.val_kwargs": "an evaluation has one greedy answer a question",
                "actor_rollout_ref.rollout.": "vLLM is started with its own defaults",
                "actor_rollout_ref.actor.megatron.": _MEGATRON,
                "critic.megatron.": _MEGATRON,
                "actor_rollout_ref.actor.profiler.": _PROFILED,
                "global_profiler.": _PROFILED,
                "actor_rollout_ref.actor.checkpoint.": "a checkpoint always has everything that a run needs",
                "actor_rollout_ref.actor.": "the scripts choose how the actor computes",
                "actor_rollout_ref.model.": "the scripts choose how a model computes",
                "actor_rollout_ref.": "trainer and engine share their processes",
                "critic.": "the critic is trained as the actor is: its packs, precision and schedule",
                "reward_model.": "a reward model runs in these processes, or behind a URL: docs/rewards.md",
                "reward.": "a reward model runs in these processes, or behind a URL: docs/rewards.md",
                "async_training.": "--ahead samples steps ahead, with an engine in a process of its own",
                "rollout.": "--ahead samples steps ahead, with an engine in a process of its own",
                "trainer.": "the folder of a run has its files and checkpoints",
                "algorithm.": "write it into a copy of the script, docs/algorithms.md",
                "data.": "docs/data.md has the forms of rows",
                "retriever.": "multi_turn.py and rft_fn.environment",
                "max_turns": "multi_turn.py --max-turns",
                "env.": "multi_turn.py and rft_fn.environment",
                "hydra.": "its parts are found by hydra",
                "defaults": "its parts are found by hydra",
                "transfer_queue.": "there is no Ray: torchrun starts the processes",
            },
            programs=("main_ppo", "main_dapo", "fully_async_main", "main_ppo_split"),
            tells=("actor_rollout_ref.", "algorithm.", "critic.", "reward_model.", "custom_reward_function."),
            numbers=_NUMBERS,
        ),
    },
    {
        "main_generation": "evaluate.py answers and scores prompts of a data set",
        "main_eval": "evaluate.py answers and scores prompts of a data set",
        "model_merger": "a run's folder `model` is one that transformers loads",
    },
    packages=("verl", "recipe"),
    implied={
        "sft_trainer": {"data.messages_key": "messages"},
        "main_dapo": {"reward_model.reward_manager": "dapo"},
    },
)
