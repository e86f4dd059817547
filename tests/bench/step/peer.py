"""The same step by TRL's GRPOTrainer, with its own loop; the phases are the methods that it calls."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from case import Case, flat, lengths, reward, texts, warm_up
from clock import Clock
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Limits(LogitsProcessor):
    """Each row ends at its own length and not before: logits of the end are -inf, or all others are."""

    def __init__(self, ends: list[int], limits: list[int], most: int, width: int):
        self.ends = ends
        self.limits = torch.tensor(limits)
        self.most = most  # where generation ends anyway
        self.width = width  # of the prompts

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores [B, V] of the next token."""
        sampled = input_ids.shape[1] - self.width
        scores[:, self.ends] = -torch.inf
        last = (self.limits == sampled + 1) & (self.limits < self.most)
        rows = last.nonzero().squeeze(-1).to(scores.device)
        scores[rows] = -torch.inf
        scores[rows, self.ends[0]] = 0.0
        return scores


class Watched(TrainerCallback):
    """Takes a row of the clock at the end of each step."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.rows: list[dict] = []
        self.tokens: dict[str, int] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin a row; the optimizer exists from here on."""
        if not self.rows:
            self.clock.around(more["optimizer"], "step", "update")
        self.clock.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End a row."""
        self.rows.append(self.clock.row(**self.tokens))


def steps(case: Case, clock: Clock) -> list[dict]:
    """The row of each step, the first of which warms up."""
    work = [warm_up(case)] + [(texts(case, i), lengths(case)) for i in range(case.steps)]
    most = max(max(limits) for _, limits in work)
    watched = Watched(clock)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=case.model,
            reward_funcs=scorer(case),
            args=options(case, most, folder),
            train_dataset=Dataset.from_dict({"prompt": [p for prompts, _ in work for p in prompts]}),
            callbacks=[watched],
        )
        instrument(trainer, clock, watched)
        force(trainer.model, trainer.eos_token_ids, [limits for _, limits in work], most)
        trainer.train()
    return watched.rows


def scorer(case: Case) -> Callable[..., list[float]]:
    """A function of the reward of each response."""
    equal = flat(case)

    def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [reward(prompt, text, equal) for prompt, text in zip(prompts, completions)]

    return score


def options(case: Case, most: int, folder: str) -> GRPOConfig:
    """TRL's defaults, but for what makes the two steps one: precision, lengths, order, one update."""
    on_cpu = case.device == "cpu"
    dtype = {True: "float32", False: "bfloat16"}[on_cpu]
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=case.micro,
        gradient_accumulation_steps=case.prompts * case.group // case.micro,
        num_generations=case.group,
        max_completion_length=most,
        max_steps=case.steps + 1,
        temperature=1.0,
        shuffle_dataset=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=not on_cpu,
        use_cpu=on_cpu,
        gradient_checkpointing=False,
        use_liger_kernel=case.liger,
        model_init_kwargs={"dtype": dtype},
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def instrument(trainer: GRPOTrainer, clock: Clock, watched: Watched) -> None:
    """Count the trainer's methods by phase, and the tokens of each step."""
    generate = trainer._generate_single_turn

    def counted(prompt_ids: list[list[int]], *args: Any, **more: Any) -> Any:
        found = generate(prompt_ids, *args, **more)
        sizes = {"prompt": prompt_ids, "response": found[0]}
        watched.tokens = {name: sum(len(x) for x in rows) for name, rows in sizes.items()}
        return found

    trainer._generate_single_turn = counted
    clock.around(trainer, "_generate", "generate")
    clock.around(trainer, "_calculate_rewards", "judge")
    clock.around(trainer, "_prepare_inputs", "score")
    clock.around(trainer, "training_step", "gradients")
    clock.around(trainer.accelerator, "clip_grad_norm_", "update")


def force(model: Any, ends: list[int], limits: list[list[int]], most: int) -> None:
    """Give the rows of call i of model.generate the lengths limits[i]."""
    inner = model.generate
    left = iter(limits)

    def generate(**inputs: Any) -> Any:
        rows = Limits(list(ends), next(left), most, inputs["input_ids"].shape[1])
        return inner(**inputs, logits_processor=LogitsProcessorList([rows]))

    model.generate = generate
