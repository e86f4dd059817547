"""Evaluation, whole: pass@k and avg@k of a model on a data set, greedy or sampled, alike at any world size.

    python train_scripts/evaluate.py --model runs/grpo
    python train_scripts/evaluate.py --model smollm2-135m --data gsm8k/test.jsonl --template '{question}' \\
        --reward numeric --count 200 --max-new 256
"""

from dataclasses import dataclass, field, replace

import torch

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Finite, Positive, PositiveShare, Seed


@dataclass(frozen=True)
class Config:
    model: str = "tiny"  # tiny, tiny:TASK:LEVEL, smollm2-135m, a folder of a model or a run, or a hub name
    data: tuple[str, ...] = ("sort_digits:1",)  # tasks as TASK:LEVEL, files, folders, hub names; =SHARE
    template: str = "{short}"  # the question; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages that are the prompt, in place of the template
    chat_template_kwargs: tuple[str, ...] = ()  # what the chat template is given, as enable_thinking=False
    system: str | None = None  # the system prompt; an empty one removes that of the chat template
    reward: tuple[str, ...] = ("task:sort_digits",)  # as in grpo.py; the first decides what is correct
    reward_timeout: Positive = 300.0  # seconds that the rewards of a batch may take
    correct: Finite = 1.0  # a response is correct when the first reward is at least this
    count: Count = 256  # questions; all of a file that has fewer
    group: Count = 1  # responses per question
    k: tuple[Count, ...] = (1,)  # report pass@k for each of these, at most `group`
    temperature: AtLeast0 = 0.0  # 0 is greedy
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this mass
    max_new: Count = 6  # most tokens in a response
    max_prompt: Count = 512  # most tokens in a prompt; longer prompts of a file are left out
    seed: Seed = 1  # of a task's questions (training uses 0, its evaluation 1) and of sampling
    out: str = ""  # a .json file for the numbers, with every response in a .jsonl beside it; empty is neither
    strategy: rft.strategy.StrategyConfig = field(default_factory=rft.strategy.StrategyConfig)

    __post_init__ = rft.check.fields


UNREAD = (  # nothing is trained here, so nothing is sharded either: every process has an engine
    "fsdp", "zero_stage", "sp_size", "shard_size", "fsdp_cpu_offload", "adam_offload", "use_mp_opt", "bf16",
    "max_norm", "train_batch_size", "micro_train_batch_size", "packing_samples", "mixed_mm_data",
    "fused_linear_logprob", "chunk_size", "log_dir", "plot_every", "max_skips",
)  # fmt: skip


def check(cfg: Config) -> None:
    """ValueError for options that do not go together, and for a place that results cannot be written to."""
    rft.run.without(cfg.strategy, *UNREAD)
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    if cfg.messages:
        rft.run.without(cfg, "template", prefix="", instead="--messages takes its place")
    if max(cfg.k) > cfg.group or cfg.temperature == 0 < cfg.group - 1:
        raise ValueError(
            f"k {cfg.k}, group {cfg.group}: expected k <= group, and temperature > 0 for a group above 1"
        )
    if cfg.out:
        rft.run.check_results(cfg.out)


def main(cfg: Config) -> None:
    # ---- the model, the questions and the rewards
    check(cfg)
    model = rft.run.last_model(cfg.model)
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    score = rft.reward.parse(cfg.reward)
    tokenizer = rft.model.load_tokenizer(model)
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    given = rft.data.literals(cfg.chat_template_kwargs)
    options |= {"messages": cfg.messages, "chat_template_kwargs": given}
    options["columns"] = rft.reward.columns(score)
    dataset = rft.data.load(cfg.data, tokenizer, seed=cfg.seed, split="test", **options)
    prompts, keys = rft.data.take(dataset, cfg.count, cfg.seed)
    rft.collect.check_reward(st, score, prompts[:2], timeout=cfg.reward_timeout)
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    eng = rft.engine.get_engine(rft.engine.config_of(cfg.strategy), model, tokenizer)

    # ---- answers, as many at a time as the engine takes
    step = max(cfg.strategy.engine_batch // cfg.group, 1) * st.world
    stands = rft.reward.trainer_state(1, 1)  # rewards see the end of a run
    rollouts = []
    for at in rft.run.track(range(0, len(prompts), step), "evaluating", rank=st.rank):
        part = slice(at, at + step)
        rollout = rft.collect.gather_and_generate(
            eng, st, prompts[part], keys[part], n=cfg.group, sampling=sampling
        )
        judged = rft.collect.gather_and_judge(
            st, score, rollout, prompts[part], tokenizer, timeout=cfg.reward_timeout, state=stands
        )
        rollouts.append((rollout, judged))

    # ---- what they are worth
    judged = rft.reward.concat([x for _, x in rollouts])
    first = next(iter(score.components))
    correct = judged.parts[first] >= cfg.correct  # [N, G]; where it does not apply a response is not correct
    share = correct.double().mean(-1)
    result = {f"avg@{cfg.group}": share.mean().item(), "questions": len(prompts)}
    result |= {f"pass@{k}": rft.metric.pass_at_k(correct, k).mean().item() for k in cfg.k}
    result["standard_error"] = (share.std() / len(prompts) ** 0.5).item()
    means = rft.reward.means(judged, "reward")
    result |= {name: x for name, x in means.items() if name != "reward/mean"}
    result["truncated"] = torch.cat([r.truncated for r, _ in rollouts]).double().mean().item()
    rft.run.table(result, title=f"{cfg.model} on {dataset.name}", rank=st.rank)
    if cfg.out and st.rank == 0:
        texts = enumerate(judged.texts)
        rows = [{"prompt": prompts[i // cfg.group].text, "response": t} for i, t in texts]
        rft.run.write_results(cfg.out, {"config": cfg, "result": result}, rows)
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
