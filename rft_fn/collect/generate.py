"""The rollout of the global batch, sampled by all ranks."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from rft_fn import dist, sync, tree
from rft_fn.engine import config_of, get_engine, requests
from rft_fn.rollout import Owner, Prefix, take
from rft_fn.types import Engine, Media, Rollout, Sampling, Strategy, TrainState
from rft_fn.types.engine import Delivered

__all__ = [
    "check_prompts", "gather_and_generate", "has_media", "inference_engine_status", "own_part",
    "part_of_rank", "setup_inference_engine", "sleep_inference_engine", "update_engine_weights",
    "wakeup_inference_engine", "with_media", "without_media",
]  # fmt: skip


# ---------- the part of the prompts that a rank samples and judges


def part_of_rank(strategy: Strategy, count: int) -> slice:
    """The prompts of this rank, in order: equally many on each, fewer or none on the last ones."""
    size = -(-count // strategy.world)  # rounded up
    first = min(strategy.rank * size, count)
    return slice(first, min(first + size, count))


# ---------- the engine of a run, on explicit state: built with the trained weights, updated, asleep, awake


def setup_inference_engine(
    strategy: Strategy,
    model: str | nn.Module,
    tokenizer: Any = None,
    *,
    state: TrainState | None = None,
    version: int = 0,
) -> Engine:
    """The engine of the strategy's config, with the trained weights of `state`, asleep where it can be.

    Every rank has to call it. Without `state` it keeps the weights of `model`. ValueError as of `get_engine`
    and `sync.push`; an engine that did not get its weights is closed.
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
    """Give the engine the trained weights; it is asleep afterwards if it was before."""
    return sync.push(strategy, state, engine, version=version)


def wakeup_inference_engine(engine: Engine) -> None:
    """Bring the engine's weights back to the device."""
    engine.wake()


def sleep_inference_engine(engine: Engine) -> bool:
    """Send the engine to sleep where it can. Returns whether it is asleep."""
    engine.sleep()
    return engine.status()["asleep"]


def inference_engine_status(engine: Engine) -> Literal["dead", "asleep", "awake"]:
    """The state of the engine in one word; `Engine.status` has the rest."""
    status = engine.status()
    if not status["alive"]:
        return "dead"
    if status["asleep"]:
        return "asleep"
    return "awake"


# ---------- the media of rollouts that were kept without them


def own_part(strategy: Strategy, prompts: Sequence[Any]) -> list[Any]:
    """The prompts of this rank, in order, with the media of those that continue a row. All ranks call it.

    After a gather the rows of a prompt's media are on the rank that sampled it, which is not always the one
    that continues it.
    """
    mine = part_of_rank(strategy, len(prompts))
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
    """Whether a prompt has media, which are not read for it where it can say so by their names."""
    names = getattr(prompt, "media_names", None)
    if names is None:
        return bool(getattr(prompt, "media", None))
    return bool(names)


def without_media(rollout: Rollout) -> Rollout:
    """The rollout without media, as a checkpoint has it, which is the same on all ranks."""
    return tree.replace(rollout, media=None)


def with_media(strategy: Strategy, rollout: Rollout, prompts: Sequence[Any]) -> Rollout:
    """The rollout of the global batch with the media of its N prompts.

    It has B = N G rows, those of a prompt side by side. Each rank reads the media of its part of the prompts,
    as in `gather_and_generate`. All ranks call it.
    """
    if not any(has_media(prompt) for prompt in prompts):
        return rollout
    mine = part_of_rank(strategy, len(prompts))
    n = len(rollout.tokens) // len(prompts)
    own = take(without_media(rollout), range(mine.start * n, mine.stop * n))
    media = [getattr(prompt, "media", None) for prompt in prompts[mine]]
    return strategy.gather(tree.replace(own, media=Media.of_prompts(media, n)))


# ---------- the rollout of the global batch, sampled by all ranks


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
    sleep_engine: bool = True,
) -> Rollout:
    """Sample the rollout of the global batch; each rank samples its part of the prompts, in order.

    The arguments are those of `Generate`, for the rows of the global batch. The result is the same on every
    rank. Keys belong to prompts, so the samples do not depend on how the prompts were shared out. The engine
    is woken before, and sent to sleep after unless `sleep_engine` is False.

    BadRequest as of `Generate`, on every rank the same: for token ids before anything is sampled, for texts,
    which only an engine can encode, when each rank has done its part.
    """
    check_prompts(engine, prompts, keys, n=n, sampling=sampling, max_new=max_new, start=start)
    mine = part_of_rank(strategy, len(prompts))
    rows = slice(mine.start * n, mine.stop * n)
    of_rows = {name: x[rows] for name, x in requests.given(max_new, start).items()}

    prompts = own_part(strategy, prompts)
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
    _raise_refused(strategy, refused)
    if sleep_engine:
        engine.sleep()

    # groups are numbered over the global batch; an engine of a user's need not know of the field
    rollout = tree.replace(rollout, group=rollout.group + mine.start, sampling=sampling)
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
) -> None:
    """BadRequest for a prompt of the global batch that is empty or too long, before anything is sampled.

    Every rank has all of the prompts, so all ranks refuse the same one. Texts are left to the engine.
    """
    if any(isinstance(prompt, str) for prompt in prompts):
        requests.check_rows(len(prompts), keys, n, sampling, max_new=max_new, start=start)
        return
    window = engine.status().get("window")
    requests.check(requests.token_ids(prompts), keys, n, sampling, window, max_new=max_new, start=start)


def _raise_refused(strategy: Strategy, refused: requests.BadRequest | None) -> None:
    """Raise the refusal of the first rank that has one, on every rank."""
    everyone = [refused]
    if strategy.world > 1:
        with strategy.session.phase("gather"):
            everyone = dist.all_gather_object(refused)
    for error in everyone:
        if error is not None:
            raise error
