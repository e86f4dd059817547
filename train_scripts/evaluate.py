"""Evaluation: avg@k, pass@k and maj@k of a model with intervals, on data or on tasks of lm-eval.

    python train_scripts/evaluate.py --model runs/grpo
    python train_scripts/evaluate.py --model smollm2-135m --data gsm8k/test.jsonl --template '{question}' \\
        --reward numeric --count 200 --max-new 256
    python train_scripts/evaluate.py --model runs/grpo --beside smollm2-135m --tasks lm_eval:gsm8k \\
        --repeats 8 --temperature 1 --k 1 8
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch

import rft_fn as rft
from rft_fn.limits import AtLeast0, Count, Filled, Finite, PositiveShare, Seed, Whole
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(
    options.Sampling,
    options.Reward,
    options.Prompts,
    options.Model,
    first=("beside", "tasks", "count", "group", "k", "out"),
    aliases={"repeats": "group"},
):
    """The options of an evaluation."""

    # what is counted
    beside: str = ""  # another model, as the one that was trained: the same problems, keys and intervals
    tasks: tuple[str, ...] = ()  # lm_eval:TASK or lm_eval:FILE.yaml, in place of --data and --reward
    fewshot: Whole | None = None  # examples in the prompts of tasks; None: as many as the task says
    chat: bool = False  # prompts of tasks are chats by the model's template; if not, plain text
    correct: Finite = 1.0  # a response is correct when the first reward is at least this
    count: Count | None = None  # questions; None: 256 of --data, all of a task
    group: Count = 1  # responses per question
    k: tuple[Count, ...] = (1,)  # report pass@k and maj@k for each of these, at most `group`
    seed: Seed = 1  # of a task's questions (training uses 0, its evaluation 1), of sampling and of intervals
    out: str = ""  # a .json file for the numbers, with every response in a .jsonl beside it; empty is neither
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    # other defaults than those of the subjects
    model: Filled = "tiny"  # as in grpo.py, or the folder of a run
    reward: tuple[str, ...] = ()  # as in grpo.py; the first decides what is correct
    temperature: AtLeast0 | None = None  # 0 is greedy; None: greedy, of a task its own
    top_p: PositiveShare | None = None  # sample from the smallest set of tokens with this mass; None: 1
    max_new: Count | None = None  # most new tokens per response; None: 6, of a task its own


UNREAD = (  # nothing is trained here, so nothing is sharded either: every process has an engine
    "fsdp", "zero_stage", "sp_size", "shard_size", "fsdp_cpu_offload", "adam_offload", "use_mp_opt", "bf16",
    "max_norm", "train_batch_size", "micro_train_batch_size", "packing_samples",
    "fused_linear_logprob", "chunk_size", "compile_blocks", "log_dir", "plot_every", "max_skips",
)  # fmt: skip
OF_ROWS = (  # which a task has by itself
    "data", "template", "messages", "reward", "reward_veto", "correct", "max_prompt", "media_folder",
    "media_urls", "media_cache", "media_workers",
)  # fmt: skip


def check(cfg: Config) -> None:
    """Raise ValueError for options that do not go together, and a place that cannot be written to."""
    rft.run.without(cfg.strategy, *UNREAD)
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    if cfg.messages:
        rft.run.without(cfg, "template", prefix="", instead="--messages takes its place")
    if cfg.tasks:
        rft.run.without(cfg, *OF_ROWS, prefix="", instead="--tasks takes its place")
        rft.run.check_tasks(cfg.tasks)
    else:
        rft.run.without(cfg, "fewshot", "chat", prefix="", instead="it is for --tasks")
    alike = not cfg.temperature and cfg.group > 1  # greedy answers to one question are all the same
    if max(cfg.k) > cfg.group or alike:
        raise ValueError(
            f"k, group: expected k <= group, and temperature > 0 for a group above 1, got {cfg.k}, "
            f"{cfg.group} and {cfg.temperature or 0.0}"
        )
    if cfg.out:
        rft.run.check_results(cfg.out)


def of_tasks(cfg: Config, st: rft.Strategy, model: str) -> list[rft.run.Measured]:
    """Return what a model's answers to tasks of lm-eval are worth."""
    tokenizer = rft.model.load_tokenizer(model)
    eng = rft.engine.get_engine(rft.engine.config_of(cfg.strategy), model, tokenizer)
    answerer = rft.run.harness_model(
        eng,
        st,
        tokenizer,
        seed=cfg.seed,
        window=rft.model.read_window(model),
        batch=cfg.strategy.engine_batch * st.world,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_new=cfg.max_new,
        chat_template_kwargs=rft.data.literals(cfg.chat_template_kwargs),
    )
    measured = rft.run.harness_tasks(
        answerer,
        cfg.tasks,
        repeats=cfg.group,
        count=cfg.count,
        fewshot=cfg.fewshot,
        chat=cfg.chat,
        system=cfg.system,
    )
    eng.close()
    return measured


def of_rows(cfg: Config, st: rft.Strategy, model: str) -> list[rft.run.Measured]:
    """Return what a model's answers to the questions of a data set are worth."""
    # ---- the questions and the rewards
    cfg = replace(cfg, temperature=cfg.temperature or 0.0, top_p=cfg.top_p or 1.0, max_new=cfg.max_new or 6)
    score = rft.run.load_rewards(rft.run.rewards_of(cfg, cfg.data), cfg, st)
    tokenizer = rft.model.load_tokenizer(model)
    dataset = rft.data.load(
        cfg.data,
        tokenizer,
        seed=cfg.seed,
        split="test",
        columns=rft.reward.columns(score),
        values=rft.reward.label_values(score),
        max_prompt=cfg.max_prompt,
        window=rft.model.read_window(model),
        max_new=cfg.max_new,
        **rft.run.data_options(cfg, rft.run.load_processing(cfg, model)),
    )
    rft.run.check_engine_media(st, model, dataset)
    prompts, keys = rft.data.take(dataset, cfg.count or 256, cfg.seed)
    rft.collect.check_reward(st, score, prompts[:2], tokenizer=tokenizer, timeout=cfg.reward_timeout)
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    eng = rft.engine.get_engine(rft.engine.config_of(cfg.strategy), model, tokenizer)

    # ---- answers, as many at a time as the engine takes
    step = max(cfg.strategy.engine_batch // cfg.group, 1) * st.world
    generate = partial(rft.collect.gather_and_generate, eng, st, n=cfg.group, sampling=sampling)
    judge = partial(
        rft.collect.gather_and_judge,
        st,
        score,
        timeout=cfg.reward_timeout,
        state=rft.reward.trainer_state(1, 1),
        seed=cfg.seed,
    )
    rollouts = []
    judgements = []
    for at in rft.run.track(range(0, len(prompts), step), "evaluating", rank=st.rank):
        part = prompts[at : at + step]
        rollout = generate(part, keys[at : at + step])
        rollouts.append(rollout)
        judgements.append(judge(rollout, part, tokenizer))
    eng.close()

    measured = worth(cfg, score, dataset, prompts, tokenizer.decode(prompts[0].ids), rollouts, judgements)
    score.close()
    return [measured]


def worth(cfg: Config, score, dataset, prompts, first: str, rollouts, judgements) -> rft.run.Measured:
    """Return what answers are worth, and what that depends on; `first` is the first prompt."""
    judged = rft.reward.concat(judgements)
    name, (reward, _) = next(iter(score.components.items()))
    correct = judged.parts[name] >= cfg.correct  # [N, G]; where it does not apply a response is not correct
    share = correct.double().mean(-1)
    means = rft.reward.means(judged, "reward")
    further = {"standard_error": (share.std() / len(prompts) ** 0.5).item()}
    further |= {name: x for name, x in means.items() if name != "reward/mean"}
    further["truncated"] = torch.cat([r.truncated for r in rollouts]).double().mean().item()
    protocol = {
        "data": dataset.name,
        "template": list(cfg.messages) or cfg.template,
        "system": cfg.system,
        "first prompt": first,
        "extraction": f"reward {score.specs.get(name, name)} >= {cfg.correct:g}",
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_new": cfg.max_new,
    }
    return rft.run.Measured(
        name=dataset.name,
        value=correct.double(),
        answer=rft.run.answers_of(reward, judged.texts, cfg.group),
        further=further,
        protocol=protocol,
        rows=[rft.run.response_row(prompts[i // cfg.group], text) for i, text in enumerate(judged.texts)],
    )


def main(cfg: Config) -> None:
    check(cfg)
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    models = [rft.run.last_model(name) for name in (cfg.model, cfg.beside) if name]
    of = of_tasks if cfg.tasks else of_rows
    measured = [of(cfg, st, model) for model in models]

    # each number with its interval and the protocol, and the other model on the same draws
    reports = {}
    for entries in zip(*measured, strict=True):
        own = [rft.run.summary(x, cfg.k, cfg.seed, model=m) for x, m in zip(entries, models, strict=True)]
        reports[entries[0].name] = report = own[0]
        if cfg.beside:
            report["beside"] = own[1]
            report["difference"] = rft.run.compared(*entries, cfg.k, cfg.seed)
        if st.rank == 0:
            rft.run.show(f"{cfg.model} on {entries[0].name}", report)
    if cfg.out and st.rank == 0:
        one = {"tasks": reports} if cfg.tasks else next(iter(reports.values()))
        rows = [
            {"model": name, **row} if cfg.beside else row
            for name, entries in zip((cfg.model, cfg.beside), measured)
            for entry in entries
            for row in entry.rows
        ]
        rft.run.write_results(cfg.out, {"config": cfg, **one}, rows)
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
