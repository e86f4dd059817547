"""Evaluation: pass@k and avg@k of a model on a data set, greedy or sampled, alike at any world size.

    python train_scripts/evaluate.py --model runs/grpo
    python train_scripts/evaluate.py --model smollm2-135m --data gsm8k/test.jsonl --template '{question}' \\
        --reward numeric --count 200 --max-new 256
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch

import rft_fn as rft
from rft_fn.limits import AtLeast0, Count, Filled, Finite, PositiveShare, Seed
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(
    options.Sampling, options.Reward, options.Prompts, options.Model, first=("count", "group", "k", "out")
):
    """The options of an evaluation."""

    # what is counted
    correct: Finite = 1.0  # a response is correct when the first reward is at least this
    count: Count = 256  # questions; all of a file that has fewer
    group: Count = 1  # responses per question
    k: tuple[Count, ...] = (1,)  # report pass@k for each of these, at most `group`
    seed: Seed = 1  # of a task's questions (training uses 0, its evaluation 1) and of sampling
    out: str = ""  # a .json file for the numbers, with every response in a .jsonl beside it; empty is neither
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    # other defaults than those of the subjects
    model: Filled = "tiny"  # as in grpo.py, or the folder of a run
    reward: tuple[str, ...] = ()  # as in grpo.py; the first decides what is correct
    temperature: AtLeast0 = 0.0  # 0 is greedy
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this mass


UNREAD = (  # nothing is trained here, so nothing is sharded either: every process has an engine
    "fsdp", "zero_stage", "sp_size", "shard_size", "fsdp_cpu_offload", "adam_offload", "use_mp_opt", "bf16",
    "max_norm", "train_batch_size", "micro_train_batch_size", "packing_samples",
    "fused_linear_logprob", "chunk_size", "compile_blocks", "log_dir", "plot_every", "max_skips",
)  # fmt: skip


def check(cfg: Config) -> None:
    """Raise ValueError for options that do not go together, and a place that cannot be written to."""
    rft.run.without(cfg.strategy, *UNREAD)
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    if cfg.messages:
        rft.run.without(cfg, "template", prefix="", instead="--messages takes its place")
    alike = cfg.temperature == 0 and cfg.group > 1  # greedy answers to one question are all the same
    if max(cfg.k) > cfg.group or alike:
        raise ValueError(
            f"k, group: expected k <= group, and temperature > 0 for a group above 1, got {cfg.k}, "
            f"{cfg.group} and {cfg.temperature}"
        )
    if cfg.out:
        rft.run.check_results(cfg.out)


def main(cfg: Config) -> None:
    # ---- the model, the questions and the rewards
    check(cfg)
    model = rft.run.last_model(cfg.model)
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
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
    prompts, keys = rft.data.take(dataset, cfg.count, cfg.seed)
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

    # ---- what they are worth
    judged = rft.reward.concat(judgements)
    first = next(iter(score.components))
    correct = judged.parts[first] >= cfg.correct  # [N, G]; where it does not apply a response is not correct
    share = correct.double().mean(-1)
    result = {f"avg@{cfg.group}": share.mean().item(), "questions": len(prompts)}
    result |= {f"pass@{k}": rft.metric.pass_at_k(correct, k).mean().item() for k in cfg.k}
    result["standard_error"] = (share.std() / len(prompts) ** 0.5).item()
    means = rft.reward.means(judged, "reward")
    result |= {name: x for name, x in means.items() if name != "reward/mean"}
    result["truncated"] = torch.cat([r.truncated for r in rollouts]).double().mean().item()
    rft.run.table(result, title=f"{cfg.model} on {dataset.name}", rank=st.rank)
    if cfg.out and st.rank == 0:
        texts = enumerate(judged.texts)
        rows = [rft.run.response_row(prompts[i // cfg.group], t) for i, t in texts]
        rft.run.write_results(cfg.out, {"config": cfg, "result": result}, rows)
    score.close()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
