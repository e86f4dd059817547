"""Judges the rollout of the global batch: each rank scores its part of the groups, and all get all."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rft_fn import dist
from rft_fn.engine.global_batch import shard_prompts
from rft_fn.engine.time_limit import time_limit
from rft_fn.reward import Judged, Score, Scored, TrainerState, check, concat, judge, judge_rows
from rft_fn.reward.combine import components_of, joint_names
from rft_fn.reward.preflight import made_up
from rft_fn.reward.scoring import Joint
from rft_fn.text import error_text
from rft_fn.types import Rollout, Strategy

__all__ = ["check_reward", "gather_and_judge", "gather_and_judge_rows"]


def gather_and_judge(
    strategy: Strategy,
    score: Score,
    rollout: Rollout,
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    timeout: float = 300.0,
    state: TrainerState | None = None,
    seed: int = 0,
) -> Judged:
    """Judge the rollout of the global batch; each rank scores its part of the groups.

    The result is the same on every rank. Whole groups stay on one rank, in order, as in
    `gather_and_generate`, and rewards, parts and texts are shared: a reward that differs from rank to rank
    cannot make the ranks differ, and a remote judge is asked once for each response. Equal to `reward.judge`
    on one process, to the bit, for a reward that looks at one response, or one group, at a time. All ranks
    compute joint rewards (`JointReward`) together, while async ones wait for their answers. Called by all
    ranks alike.

    A reward that has not answered after `timeout` [s] is interrupted, and TimeoutError names it and the
    limit; one that cannot be interrupted ends the process with that line. Keep `timeout` below the
    strategy's, which bounds how long the others wait. Rewards run in the calling thread; outside of the main
    thread nothing can be interrupted: the line is printed, and the reward is waited for.

    What a reward raises on one rank is raised there unchanged, and on all others as ValueError with its text,
    the reward's name and the rank. ValueError for what `reward.judge` refuses, for ranks with different
    prompts, and for a timeout that is not above 0.
    """
    joint = Joint(score, rollout, prompts, tokenizer)
    with _shared(strategy, score, timeout, digest=_digest(prompts), joint=joint) as shared:
        mine = shard_prompts(strategy, len(prompts))
        if not prompts or mine.start < mine.stop:  # else there are more ranks than prompts
            shared.own = judge(
                score, rollout, prompts, tokenizer, part=mine, state=state, seed=seed, joint=joint
            )
    return concat([judged for judged in shared.everyone if judged is not None])


def gather_and_judge_rows(
    strategy: Strategy,
    score: Score,
    rollout: Rollout,
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    timeout: float = 300.0,
    state: TrainerState | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the reward of each row [B], in any order, with groups of any size.

    Each rank judges the rows of its part of the prompts once, and all get the same numbers. Equal to
    `reward.judge_rows` on one process for a reward that looks at one response at a time. Limit and errors as
    of `gather_and_judge`. Called by all ranks alike.
    """
    owners = rollout.group.tolist()
    parts: list[list[int]] = []
    for rank in range(strategy.world):
        own = shard_prompts(strategy._replace(rank=rank), len(prompts))
        parts.append([row for row, g in enumerate(owners) if own.start <= g < own.stop])
    known = sum(len(part) for part in parts) == len(owners)
    joint = Joint(score, rollout, prompts, tokenizer)
    with _shared(strategy, score, timeout, digest=_digest(prompts), joint=joint) as shared:
        mine = parts[strategy.rank] if known else None  # None raises, and asks for nothing
        shared.own = judge_rows(
            score, rollout, prompts, tokenizer, rows=mine, state=state, seed=seed, joint=joint
        )
    rewards = torch.zeros(len(owners))
    for part, reward in zip(parts, shared.everyone, strict=True):
        if reward is not None:
            rewards[part] = reward
    return rewards


def check_reward(
    strategy: Strategy,
    score: Score,
    rows: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    timeout: float = 300.0,
) -> dict[str, Scored]:
    """Run `reward.check` on rank 0 for all ranks, so that a remote judge is called once.

    All ranks compute joint rewards, for which `rows` are prompts and `tokenizer` is theirs. Limit and errors
    as of `gather_and_judge`. ValueError also for a reward with a deadline beyond `timeout`: it would be
    interrupted in the middle of its tries.
    """
    for name, (reward, _) in components_of(score).items():
        if reward.deadline >= timeout:
            raise ValueError(
                f"reward {name!r}: expected a deadline below reward_timeout = {timeout:g} s, got "
                f"{reward.deadline:g}"
            )
    joints = made_up(score, rows, tokenizer) if joint_names(score) else None
    with _shared(strategy, score, timeout) as shared:
        for joint in (joints or {}).values():
            joint.values()
        if strategy.rank == 0:
            shared.own = check(score, rows, joints=joints, tokenizer=tokenizer)
    return shared.everyone[0] or {}


class _Results:
    """What a block has found out on each rank."""

    def __init__(self) -> None:
        self.own: Any = None  # set in the block
        self.everyone: list[Any] = []  # of each rank, after it


@contextmanager
def _shared(
    strategy: Strategy, score: Score, timeout: float, *, digest: str = "", joint: Joint | None = None
) -> Iterator[_Results]:
    """Limit the time of a block, and share its result; raise one rank's error on all.

    Every rank computes the joint rewards, even if its block has failed: the others wait for it there.
    """
    if not timeout > 0:
        raise ValueError(f"timeout: expected > 0 seconds, got {timeout}")
    if joint is not None and joint_names(score) and strategy.world > 1:
        # the same batch on every rank, and nothing that only one of them fails in
        with _shared(strategy, score, timeout, digest=digest):
            joint.prepare()
    found = _Results()
    failed: Exception | None = None
    line = ""
    names = ", ".join(components_of(score)) or "score"
    try:
        with strategy.session.phase(f"reward {names}"), time_limit(timeout, lambda: _name(score)):
            try:
                yield found
            except BaseException:
                with suppress(Exception):  # what has failed before it counts
                    _compute(joint)
                raise
            _compute(joint)
    except Exception as error:  # raised below, once the others know
        failed = error
        line = _describe(score, error)

    # of each rank: the result, what went wrong in a line or "", the digest of the prompts that it has
    everyone = [(found.own, line, digest)]
    if strategy.world > 1:
        with strategy.session.phase("gather of rewards"):
            everyone = dist.all_gather_object(everyone[0])

    # this rank's own error first: the others have only its text
    if failed is not None:
        raise failed
    for rank, (_, error, other) in enumerate(everyone):
        if error:
            raise ValueError(f"rank {rank}: {error}")
        if other != digest:
            raise ValueError(
                f"prompts: expected the same on every rank, got others on rank {rank} than on rank "
                f"{strategy.rank}; give all ranks the same data file and options"
            )
    found.everyone = [answer[0] for answer in everyone]


def _compute(joint: Joint | None) -> None:
    """Compute the joint rewards, unless this rank has begun to."""
    if joint is not None and not joint.begun:
        joint.values()


def _digest(prompts: Sequence[Any]) -> str:
    """Hash the prompts: the same for the same rows, texts and order."""
    digest = hashlib.blake2b(digest_size=16)
    for p in prompts:
        digest.update(repr((getattr(p, "index", None), getattr(p, "text", None))).encode())
    return digest.hexdigest()


def _name(score: Score) -> str:
    """Return the reward that a score is computing, as the head of a line."""
    running = getattr(score, "running", "")
    return f"reward {running!r}" if running else "reward"


def _describe(score: Score, error: Exception) -> str:
    """Describe an error for the other ranks: the reward, and what it raised."""
    text = error_text(error)
    if not isinstance(error, (ValueError, TimeoutError)):
        text = f"{type(error).__name__}: {text}"
    head = f"{_name(score)}: "
    # no single reward failed, or the text names it
    return text if head == "reward: " or text.startswith(head) else head + text
