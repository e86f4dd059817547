"""Options of prime-rl that only count together."""

from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import rows as r

__all__ = ["examples", "rollouts"]


def rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective, the prompts of a batch that counts responses, and the lengths of a sequence."""
    used = {"orchestrator.batch_size", "orchestrator.train.sampling.max_completion_tokens"}
    used |= {"orchestrator.train.sampling.max_tokens", "orchestrator.train.source", "orchestrator.train.env"}
    used |= {"orchestrator.sampling.max_tokens", "orchestrator.env", "orchestrator.algo.type"}
    used |= {f"trainer.loss.{x}" for x in ("type", "kl_tau", "dppo_mask_low", "dppo_mask_high")}
    notes: list[str] = []
    if older := [x for x in ("orchestrator.rollouts_per_example", "orchestrator.env") if x in options]:
        used |= {"orchestrator.group_size"}  # its default
        notes.append(
            f"objective: {older[0]} is of an older release, whose default loss is another; dppo_tv stands in"
        )

    # the batch counts responses; a sequence holds a prompt and its response
    group = r.integer(options, "orchestrator.rollouts_per_example", "orchestrator.group_size", default=1)
    size = r.integer(options, "orchestrator.batch_size")
    if not size:
        notes.append("--prompts: theirs is by a number of tokens, token_batch_size; ours counts prompts")
    arguments = [f"--prompts {max(size // group, 1)}"] if size else []
    length = r.integer(options, "orchestrator.seq_len", "trainer.model.seq_len", "seq_len", default=2048)
    names = [f"orchestrator.train.sampling.{name}" for name in ("max_completion_tokens", "max_tokens")]
    names.append("orchestrator.sampling.max_tokens")
    new = r.integer(options, *names) or length // 2
    if not any(name in options for name in names):
        notes.append(f"--max-new: theirs is what the prompt leaves of {length} tokens; here half of them")
    arguments += [
        f"--max-new {new}",
        f"--max-prompt {max(length - new, 1)}",
        f"--budget {max(length, new + 1)}",
    ]

    # DPPO with binary TV, on rewards less their group's mean, a mean over tokens
    limits = [r.number(options, f"trainer.loss.dppo_mask_{x}", default=0.2) for x in ("low", "high")]
    kind, algo = (
        str(options.get(x) or y)
        for x, y in (("trainer.loss.type", "default"), ("orchestrator.algo.type", "grpo"))
    )
    arguments += ["--algorithm dppo_tv", "--advantage dr_grpo", f"--loss.limit {limits[0]:g}"]
    if limits[0] != limits[1]:
        notes.append(f"--loss.limit: theirs is {limits[0]:g} downwards and {limits[1]:g} upwards")
    tau = r.number(options, "trainer.loss.kl_tau", default=1e-3)
    notes.append(
        f"objective: theirs adds {tau:g} times the squared log-ratio to the sampler, and caps no ratio"
    )
    if kind != "default":
        notes.append(f"objective: trainer.loss.type={kind} is no loss of ours; dppo_tv stands in")
    if algo != "grpo":
        notes.append(f"objective: orchestrator.algo.type={algo} is another advantage; that of grpo stands in")

    # environments are packages of verifiers
    places = ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env")
    source = next((options[x] for x in places if options.get(x)), [])
    named = [str(x.get("name") or x.get("id")) for x in source if isinstance(x, Mapping)]
    notes.append(
        f"--data, --reward: of the environment {', '.join(named) or 'of the file'}; its rubric is a reward "
        "as --reward verifiers:MODULE:FUNCTION, one of several turns is for multi_turn.py"
    )
    on = "trainer.scheduler.type" in options and options["trainer.scheduler.type"] != "constant"
    arguments.append("--strategy.engine-type vllm")
    arguments += [] if on or "trainer.scheduler.warmup_steps" in options else ["--warmup 0"]
    return r.Combined(arguments, used, notes)


def examples(options: Mapping[str, Any]) -> r.Combined:
    """Return the columns of a row."""
    notes = ["--messages: theirs reads the columns messages, or prompt and completion; here messages"]
    arguments = ["--messages messages"]
    if "scheduler.type" not in options and "scheduler.warmup_steps" not in options:
        arguments.append("--warmup 0")
    return r.Combined(arguments, set(), notes)
