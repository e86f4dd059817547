"""Gather the rollout of the global batch, and its rewards: each rank samples and scores its part."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from rft_fn import dist, sync, tree
from rft_fn.check import error_text
from rft_fn.engine import config_of, get_engine, requests
from rft_fn.engine.lifetime import time_limit
from rft_fn.reward import Judged, Score, Scored, TrainerState, check, concat, judge, judge_rows
from rft_fn.reward.combine import joint_names
from rft_fn.reward.preflight import made_up
from rft_fn.reward.scoring import Joint
from rft_fn.rollout import Owner, Prefix, take
from rft_fn.types import Engine, Media, Rollout, Sampling, Strategy, TrainState
from rft_fn.types.engine import Delivered

__all__ = [
    "check_prompts", "check_reward", "gather_and_generate", "gather_and_judge", "gather_and_judge_rows",
    "has_media", "inference_engine_status", "own_part", "setup_inference_engine", "shard_prompts",
    "sleep_inference_engine", "update_engine_weights", "wakeup_inference_engine", "with_media",
    "without_media",
]  # fmt: skip


Result = TypeVar("Result")


# ---------- the part of the prompts that a rank samples and judges


def shard_prompts(strategy: Strategy, count: int) -> slice:
    """Return this rank's shard of the prompts: contiguous; the last ranks may have fewer."""
    size = -(-count // strategy.world)  # rounded up
    first = min(strategy.rank * size, count)
    return slice(first, min(first + size, count))


# ---------- the engine of a run, on explicit state


def setup_inference_engine(
    strategy: Strategy,
    model: str | nn.Module,
    tokenizer: Any = None,
    *,
    state: TrainState | None = None,
    version: int = 0,
) -> Engine:
    """Return the engine of the strategy's config with the weights of `state`, asleep if it can be.

    Every rank calls it. Without `state` it keeps the weights of `model`. ValueError as of `get_engine` and
    `sync.push`; an engine that did not get its weights is closed.
    """
    engine = get_engine(config_of(strategy.config), model, tokenizer)
    if state is not None:
        try:
            sync.push(strategy, state, engine, version=version)
        except BaseException:
            engine.close()
            raise
    engine.sleep()
    return engine


def update_engine_weights(
    strategy: Strategy, state: TrainState, engine: Engine, *, version: int
) -> Delivered:
    """Send the trained weights to the engine; it is asleep afterwards if it was before."""
    return sync.push(strategy, state, engine, version=version)


def wakeup_inference_engine(engine: Engine) -> None:
    """Bring the engine's weights back to the device."""
    engine.wake()


def sleep_inference_engine(engine: Engine) -> bool:
    """Send the engine to sleep where it can, and return whether it is asleep."""
    engine.sleep()
    return engine.status()["asleep"]


def inference_engine_status(engine: Engine) -> Literal["dead", "asleep", "awake"]:
    """Return the state of the engine in one word; `Engine.status` has the rest."""
    status = engine.status()
    if not status["alive"]:
        return "dead"
    return "asleep" if status["asleep"] else "awake"


# ---------- the media of prompts and rollouts


def own_part(strategy: Strategy, prompts: Sequence[Any]) -> list[Any]:
    """Return this rank's prompts, with the media of those that continue a row. All ranks call it.

    After a gather the rows of a prompt's media are on the rank that sampled it, which is not always the one
    that continues it.
    """
    mine = shard_prompts(strategy, len(prompts))
    part = list(prompts[mine])
    if strategy.world == 1:
        return part
    gathered = [p.prompt.batch for p in prompts if isinstance(p, Prefix) and isinstance(p.prompt, Owner)]
    for batch in {id(batch): batch for batch in gathered}.values():
        rows = [i for i, p in enumerate(part) if getattr(getattr(p, "prompt", None), "batch", None) is batch]
        of = [int(batch.of[part[i].prompt.row]) for i in rows]
        fetched = dist.fetch_media(batch, of)
        assert fetched is not None
        owners = {owner: Owner(fetched, part[i].prompt.row) for i, owner in zip(rows, of)}
        for i, owner in zip(rows, of):
            part[i] = Prefix(part[i], part[i].sampled, owners[owner])
    return part


def has_media(prompt: Any) -> bool:
    """Return whether a prompt has media, without reading them where it has their names."""
    names = getattr(prompt, "media_names", None)
    return bool(getattr(prompt, "media", None) if names is None else names)


def without_media(rollout: Rollout) -> Rollout:
    """Return the rollout without media, as checkpoints have it, the same on all ranks."""
    return tree.replace(rollout, media=None)


def with_media(strategy: Strategy, rollout: Rollout, prompts: Sequence[Any]) -> Rollout:
    """Return the rollout of the global batch with the media of its N prompts. All ranks call it.

    It has B = N G rows, grouped by prompt. Each rank reads the media of its part of the prompts, as in
    `gather_and_generate`.
    """
    if not any(has_media(prompt) for prompt in prompts):
        return rollout
    mine = shard_prompts(strategy, len(prompts))
    n = len(rollout.tokens) // len(prompts)
    own = take(without_media(rollout), range(mine.start * n, mine.stop * n))
    media = [getattr(prompt, "media", None) for prompt in prompts[mine]]
    return strategy.gather(tree.replace(own, media=Media.of_prompts(media, n)))


# ---------- sample


def gather_and_generate(
    engine: Engine,
    strategy: Strategy,
    prompts: Sequence[Any],
    keys: Sequence[Any],
    *,
    n: int,
    sampling: Sampling,
    max_new: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
    temperature: Sequence[float] | None = None,
    sleep_engine: bool = True,
) -> Rollout:
    """Sample the rollout of the global batch; each rank samples its part of the prompts, in order.

    The arguments are as of `Generate`, for the rows of the global batch. The result is the same on every
    rank. Keys belong to prompts, so the samples do not depend on how the prompts were shared out. The engine
    is woken before, and sent to sleep after unless `sleep_engine` is False.

    BadRequest as of `Generate`, on every rank the same: for token ids before anything is sampled, for texts,
    which only an engine can encode, when each rank has done its part.
    """
    check_prompts(
        engine, prompts, keys, n=n, sampling=sampling, max_new=max_new, start=start, temperature=temperature
    )
    mine = shard_prompts(strategy, len(prompts))
    rows = slice(mine.start * n, mine.stop * n)
    of_rows = {name: x[rows] for name, x in requests.given(max_new, start, temperature).items()}

    prompts = own_part(strategy, prompts)
    strategy.make_room()
    engine.wake()
    refused: requests.BadRequest | None = None
    rollout = requests.empty()
    with strategy.session.phase("generate"):
        try:
            # also on a rank without prompts: ranks may share an engine, or agree on whether it lives
            rollout = engine.generate(prompts, keys[mine], n=n, sampling=sampling, **of_rows)
        except requests.BadPrompt as error:
            refused = error.moved(mine.start)  # numbered in the global batch
        except requests.BadRequest as error:
            refused = error

    # every rank raises the refusal of the first rank that has one
    everyone = [refused]
    if strategy.world > 1:
        with strategy.session.phase("gather"):
            everyone = dist.all_gather_object(refused)
    for error in everyone:
        if error is not None:
            raise error
    if sleep_engine:
        engine.sleep()

    # groups are numbered over the global batch; an engine of a user's need not know of the field
    rollout = requests.drawn_with(rollout, sampling, of_rows.get("temperature"))
    rollout = tree.replace(rollout, group=rollout.group + mine.start)
    with strategy.session.phase("gather"):
        return strategy.gather(rollout)


def check_prompts(
    engine: Engine,
    prompts: Sequence[Any],
    keys: Sequence[Any],
    *,
    n: int,
    sampling: Sampling,
    max_new: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
    temperature: Sequence[float] | None = None,
) -> None:
    """Raise BadRequest for a prompt of the global batch that is empty or too long.

    Every rank has all of the prompts, so all ranks refuse the same one. Texts are left to the engine.
    """
    if any(isinstance(prompt, str) for prompt in prompts):
        requests.check_rows(
            len(prompts), keys, n, sampling, max_new=max_new, start=start, temperature=temperature
        )
        return
    requests.check(
        requests.token_ids(prompts),
        keys,
        n,
        sampling,
        engine.status().get("window"),
        max_new=max_new,
        start=start,
        temperature=temperature,
    )


# ---------- judge


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

    def work() -> Judged | None:
        mine = shard_prompts(strategy, len(prompts))
        if prompts and mine.start == mine.stop:  # more ranks than prompts
            return None
        return judge(score, rollout, prompts, tokenizer, part=mine, state=state, seed=seed, joint=joint)

    everyone = _together(strategy, score, work, timeout, digest=_digest(prompts), joint=joint)
    return concat([judged for judged in everyone if judged is not None])


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

    def work() -> Tensor:
        mine = parts[strategy.rank] if known else None  # None raises, and asks for nothing
        return judge_rows(score, rollout, prompts, tokenizer, rows=mine, state=state, seed=seed, joint=joint)

    everyone = _together(strategy, score, work, timeout, digest=_digest(prompts), joint=joint)
    rewards = torch.zeros(len(owners))
    for part, reward in zip(parts, everyone, strict=True):
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
    """Check a reward on rank 0 as `reward.check` does, for all ranks: a remote judge is asked once.

    All ranks compute joint rewards, for which `rows` are prompts and `tokenizer` is theirs. Limit and errors
    as of `gather_and_judge`. ValueError also for a reward with a deadline beyond `timeout`: it would be
    interrupted in the middle of its tries.
    """
    for name, (fn, _) in getattr(score, "components", {}).items():
        deadline = getattr(fn, "deadline", 0.0)
        if deadline >= timeout:
            raise ValueError(
                f"reward {name!r}: expected a deadline below reward_timeout = {timeout:g} s, got {deadline:g}"
            )
    joints = made_up(score, rows, tokenizer) if joint_names(score) else None

    def work() -> dict[str, Scored] | None:
        for joint in (joints or {}).values():
            joint.values()
        return None if strategy.rank else check(score, rows, joints=joints, tokenizer=tokenizer)

    return _together(strategy, score, work, timeout)[0] or {}


def _together(
    strategy: Strategy,
    score: Score,
    work: Callable[[], Result],
    timeout: float,
    *,
    digest: str = "",
    joint: Joint | None = None,
) -> list[Result | None]:
    """Return the result of work() on each rank, within the limit; raise one rank's error on all.

    Every rank computes the joint rewards, even if its work has failed: the others wait for it there.
    """
    if not timeout > 0:
        raise ValueError(f"timeout: expected > 0 seconds, got {timeout}")
    if joint is not None and joint_names(score) and strategy.world > 1:
        # the same batch on every rank, and nothing that only one of them fails in
        _together(strategy, score, joint.prepare, timeout, digest=digest)
    result = None
    failed: Exception | None = None
    line = ""
    names = ", ".join(getattr(score, "components", {})) or "score"
    try:
        with strategy.session.phase(f"reward {names}"), time_limit(timeout, lambda: _name(score)):
            try:
                result = work()
            except BaseException:
                with suppress(Exception):  # what has failed before it counts
                    _compute(joint)
                raise
            _compute(joint)
    except Exception as error:  # raised below, once the others know
        failed = error
        line = _describe(score, error)

    # of each rank: the result, what went wrong in a line or "", the digest of the prompts that it has
    everyone = [(result, line, digest)]
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
    return [answer[0] for answer in everyone]


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
