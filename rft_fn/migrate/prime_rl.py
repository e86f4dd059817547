"""Options of prime-rl's rl and sft by their dotted names, as its TOML files have them."""

from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import rows as r
from rft_fn.migrate import shared_rows

__all__ = ["LIBRARY", "TABLE"]

_RENDERER = r.nothing("the model's own chat template is always applied")
_CUT = r.lacks("sampling and training cut alike: --temperature and --top-p", "-1", "0", "0.0")
_SCHEDULE = r.choice(
    constant="--schedule constant",
    linear="--schedule linear --lr-end 0",
    cosine="--schedule cosine --lr-end 0",
)

TABLE: r.Table = {
    "all": {
        "model.name": r.same("--model"),
        "max_steps": r.same("--steps"),
        "output_dir": r.same("--out"),
        "seed": r.same("--seed"),
        "ckpt.interval": r.same("--save-every"),
        "ckpt.keep_last": r.same("--keep"),
        "resume.step ckpt.resume_step": shared_rows.RESUMED,
        "monitors.wandb.project wandb.project": r.Row("--trackers wandb --project {x}"),
        "monitors.wandb.name wandb.name": r.same("--run-name"),
    },
    "rl": {
        "seq_len orchestrator.seq_len trainer.model.seq_len": r.nothing(
            "the sum of --max-prompt and --max-new, which --budget holds"
        ),
        "orchestrator.group_size": r.same("--group"),
        "orchestrator.max_off_policy_steps": r.nothing(
            "--ahead N samples N steps ahead, with an engine in a process of its own"
        ),
        "orchestrator.train.sampling.temperature": r.same(
            "--temperature", "divides the logits in training too"
        ),
        "orchestrator.train.sampling.top_p": r.same("--top-p", "cut in training too"),
        "orchestrator.train.sampling.top_k orchestrator.train.sampling.min_p": _CUT,
        "orchestrator.eval.interval": r.same("--eval-every"),
        "orchestrator.eval.num_examples": r.same("--eval-prompts"),
        "orchestrator.eval.sampling.max_completion_tokens": r.nothing("--max-new is of evaluations too"),
        "orchestrator.eval.source orchestrator.eval.env": r.nothing(
            "--eval-data; its rewards are those of the training"
        ),
        "orchestrator.renderer.name": _RENDERER,
        "trainer.optim.lr": r.same("--lr"),
        "trainer.optim.weight_decay": r.same("--weight-decay", "of matrices only"),
        "trainer.optim.max_norm": r.same("--max-norm"),
        "trainer.optim.betas1": r.same("--beta1"),
        "trainer.optim.betas2": r.same("--beta2"),
        "trainer.optim.type": r.choice("docs/examples/muon.py has that optimizer", adamw=""),
        "trainer.scheduler.type": _SCHEDULE,
        "trainer.scheduler.warmup_steps": r.same("--warmup"),
        "trainer.model.lora.rank": r.same("--lora-rank"),
        "trainer.model.lora.alpha": r.same("--lora-alpha"),
        "trainer.model.lora.target_modules": r.commas("--lora-targets"),
        "trainer.model.lora.dropout": shared_rows.DROPOUT,
        "trainer.model.cp": r.same("--strategy.sp-size", "by all-to-all of heads"),
        "trainer.model.attn trainer.model.impl": shared_rows.CHOSEN_ATTENTION,
        "trainer.model.optim_cpu_offload": r.flag("--strategy.adam-offload"),
        "trainer.model.full_offload": r.flag("--strategy.fsdp-cpu-offload"),
        "inference.vllm.gpu_memory_utilization": r.same("--strategy.engine-mem-util"),
        "inference.vllm.tensor_parallel_size inference.parallel.tp": r.same("--strategy.engine-tp-size"),
        "inference.vllm.max_model_len": r.same("--strategy.engine-max-model-len"),
    },
    "sft": {
        "data.name": r.same("--data"),
        "data.batch_size": r.same("--batch"),
        "data.seq_len": r.Row("--budget {x} --max-prompt {x}", "longer examples are refused, not cut"),
        "data.micro_batch_size": r.nothing(shared_rows.BUDGET),
        "data.type": r.nothing("docs/data.md has the forms of rows"),
        "model.seq_len": r.nothing("--budget bounds the tokens of a pack"),
        "model.impl model.attn": shared_rows.CHOSEN_ATTENTION,
        "model.lora.rank": r.same("--lora-rank"),
        "model.lora.alpha": r.same("--lora-alpha"),
        "model.lora.target_modules": r.commas("--lora-targets"),
        "model.lora.dropout": shared_rows.DROPOUT,
        "model.cp": r.same("--strategy.sp-size", "by all-to-all of heads"),
        "model.vlm.freeze_vision_encoder": r.choice(true="--freeze visual", false=""),
        "optim.lr": r.same("--lr"),
        "optim.weight_decay": r.same("--weight-decay", "of matrices only"),
        "optim.max_norm": r.same("--max-norm"),
        "optim.betas1": r.same("--beta1"),
        "optim.betas2": r.same("--beta2"),
        "optim.type": r.choice("docs/examples/muon.py has that optimizer", adamw=""),
        "scheduler.type": _SCHEDULE,
        "scheduler.warmup_steps": r.same("--warmup"),
        "renderer.name": _RENDERER,
    },
}


def _rollouts(options: Mapping[str, Any]) -> r.Combined:
    """Return the objective, the prompts of a batch that counts responses, and the lengths of a sequence."""
    used = {"orchestrator.batch_size", "orchestrator.train.sampling.max_completion_tokens"}
    used |= {"orchestrator.train.sampling.max_tokens", "orchestrator.train.source", "orchestrator.train.env"}
    used |= {name for name in options if name.startswith(("trainer.loss.", "orchestrator.algo."))}
    notes: list[str] = []

    # the batch counts responses; a sequence holds a prompt and its response
    group = r.integer(options, "orchestrator.group_size", default=1)
    size = r.integer(options, "orchestrator.batch_size")
    if not size:
        notes.append("--prompts: theirs is by a number of tokens, token_batch_size; ours counts prompts")
    arguments = [f"--prompts {max(size // group, 1)}"] if size else []
    length = r.integer(options, "orchestrator.seq_len", "trainer.model.seq_len", "seq_len", default=2048)
    names = [f"orchestrator.train.sampling.{name}" for name in ("max_completion_tokens", "max_tokens")]
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
    source = options.get("orchestrator.train.source") or options.get("orchestrator.train.env") or []
    named = [str(x.get("name") or x.get("id")) for x in source if isinstance(x, Mapping)]
    notes.append(
        f"--data, --reward: of the environment {', '.join(named) or 'of the file'}; its rubric is a reward "
        "as --reward verifiers:MODULE:FUNCTION, one of several turns is for multi_turn.py"
    )
    on = "trainer.scheduler.type" in options and options["trainer.scheduler.type"] != "constant"
    arguments.append("--strategy.engine-type vllm")
    arguments += [] if on or "trainer.scheduler.warmup_steps" in options else ["--warmup 0"]
    return r.Combined(arguments, used, notes)


def _examples(options: Mapping[str, Any]) -> r.Combined:
    """Return the columns of a row."""
    notes = ["--messages: theirs reads the columns messages, or prompt and completion; here messages"]
    arguments = ["--messages messages"]
    if "scheduler.type" not in options and "scheduler.warmup_steps" not in options:
        arguments.append("--warmup 0")
    return r.Combined(arguments, set(), notes)


LIBRARY = r.Library(
    "prime-rl",
    {
        "sft": r.Trainer(
            rows=r.rows_of(TABLE, "sft"),
            defaults={
                "data.batch_size": 128, "data.seq_len": 128, "optim.lr": 1e-6, "optim.weight_decay": 0.01,
                "scheduler.type": "constant",
            },
            combine=_examples,
            script=lambda options: "sft",
            programs=("sft",),
            tells=("data.", "optim."),
        ),
        "rl": r.Trainer(
            rows=r.rows_of(TABLE, "rl"),
            defaults={
                "orchestrator.group_size": 1, "trainer.optim.lr": 1e-6, "trainer.optim.weight_decay": 0.01,
                "trainer.scheduler.type": "constant",
            },
            combine=_rollouts,
            script=lambda options: "grpo",
            programs=("rl",),
            tells=("orchestrator.", "trainer.", "inference."),
        ),
    },
    packages=("prime_rl",),
)  # fmt: skip
