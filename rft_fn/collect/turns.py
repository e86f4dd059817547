"""Sample conversations of a policy with environments, on all ranks.

In every round all conversations that wait for the policy get one turn, in one call of the engine; finished
ones leave. An environment runs on the rank that owns its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rft_fn import rng
from rft_fn.collect.environment_calls import Act, read_reset, read_step, step_environments
from rft_fn.collect.episodes import Conversation, Played, assembled
from rft_fn.engine.global_batch import gather_and_generate, has_media, shard_prompts, with_media
from rft_fn.environment import Environment, Renderer
from rft_fn.rollout import Prefix
from rft_fn.types import Engine, Sampling, Strategy

__all__ = ["play"]


@dataclass
class _Episode:
    """One sample of one prompt: a conversation for each seat."""

    rows: list[Conversation]
    mine: bool  # whether the environment runs on this rank
    state: Any = None  # of the environment, on the rank that it runs on
    seat: int = 0  # that speaks next
    done: bool = False
    cut: str = ""  # what ended it: the limit of "turns" or of "tokens", or a "placeholder" of media

    @property
    def speaker(self) -> Conversation:
        """Return the conversation that the policy continues."""
        return self.rows[self.seat]


class _Limits(NamedTuple):
    """What ends a conversation before its environment does."""

    turns: int
    tokens: int
    placeholders: frozenset[int]  # of media, which mean something only in a prompt


def play(
    engine: Engine,
    strategy: Strategy,
    env: Environment,
    prompts: Sequence[Any],
    keys: Sequence[int],
    renderer: Renderer,
    *,
    n: int,
    sampling: Sampling,
    max_turns: int,
    max_tokens: int,
    timeout: float = 60.0,
    sleep_engine: bool = True,
) -> Played:
    """Sample n conversations for each prompt of the global batch; each ends when its environment is done.

    `prompts` have `.columns`, the row for `reset`, and `.ids`, the first tokens where `reset` observes
    nothing. A conversation also ends, truncated, after `max_turns` turns of the policy, where `max_tokens`
    leave no room for another token, and before a turn that would read a placeholder of media which the policy
    or the environment has written; a response has at most sampling.max_new tokens. Media of a prompt stay
    with its conversation.

    Tokens stay as they were sampled; `renderer` appends what the environment says, outside of the mask. A
    response is drawn by fold_in(key of the prompt, sample, seat, turn), and `reset` gets the key of the
    prompt, so that the result does not depend on how conversations are batched, shared out or ordered. It is
    the same on every rank.

    ValueError names the environment, the row and the turn of a call that raises or gives a wrong result, and
    TimeoutError the first that has not ended after `timeout` [s] for all calls of a round and rank. Either
    comes before anything was changed but the environment's own; remaining states are closed.
    """
    episodes = _episodes(env, strategy, prompts, keys, n)
    try:
        _reset(strategy, env, prompts, episodes, renderer, timeout)
        _check_openings(env, prompts, episodes, max_tokens)
        places = engine.status().get("placeholders", frozenset())
        limits = _Limits(max_turns, max_tokens, places)
        while waiting := [e for e in episodes if _may_speak(e, renderer, limits)]:
            _speak(engine, strategy, prompts, waiting, sampling, max_tokens)
            _step(strategy, env, prompts, waiting, renderer, timeout)
    finally:
        for episode in episodes:
            if episode.mine and episode.state is not None:
                env.close(episode.state)
    if sleep_engine:
        engine.sleep()

    rows = [row for episode in episodes for row in episode.rows]
    cuts = [episode.cut for episode in episodes for _ in episode.rows]
    texts = ["\n".join(m["content"] for m in row.messages if m["role"] == "assistant") for row in rows]
    pad = renderer.tokenizer.pad_token_id
    played = assembled(rows, prompts, cuts, texts, seats=env.seats, pad=pad, sampling=sampling)
    return played._replace(rollout=with_media(strategy, played.rollout, played.prompts))


def _episodes(
    env: Environment, strategy: Strategy, prompts: Sequence[Any], keys: Sequence[int], n: int
) -> list[_Episode]:
    """Make the episodes of all ranks, before they begin."""
    if not prompts or len(prompts) != len(keys) or n < 1:
        raise ValueError(
            f"prompts: expected one or more, a key for each, n >= 1; got {len(prompts)}, {len(keys)}, {n}"
        )
    part = shard_prompts(strategy, len(prompts))
    episodes = []
    for i, key in enumerate(keys):
        for j in range(n):
            rows = [Conversation(i, j, seat, key) for seat in range(env.seats)]
            episodes.append(_Episode(rows, mine=part.start <= i < part.stop))
    return episodes


# ---------- the environment's side


def _name(env: Environment, prompts: Sequence[Any], episode: _Episode) -> str:
    """Name an episode's place, for errors."""
    first = episode.rows[0]
    row = getattr(prompts[first.prompt], "index", first.prompt)
    turn = sum(conversation.turns for conversation in episode.rows)
    return f"environment {env.name!r}: row {row}, sample {first.sample}, turn {turn}"


def _reset(
    strategy: Strategy,
    env: Environment,
    prompts: Sequence[Any],
    episodes: Sequence[_Episode],
    renderer: Renderer,
    timeout: float,
) -> None:
    """Begin all episodes, and append their first tokens."""
    acts = []
    for episode in episodes:
        if episode.mine:
            first = episode.rows[0]
            call = partial(env.reset, prompts[first.prompt].columns, first.key)
            acts.append(Act(_name(env, prompts, episode), call, partial(read_reset, env)))
    _take(strategy, env, acts, episodes, timeout)
    for episode in episodes:
        for row in episode.rows:
            _open(row, prompts[row.prompt], env, renderer)


def _open(row: Conversation, prompt: Any, env: Environment, renderer: Renderer) -> None:
    """Append the first tokens: what reset has observed, else the prompt of the data set."""
    asked = list(row.unread)
    row.unread.clear()
    retold = asked or (env.tools and renderer.tokenizer.chat_template)
    if retold and has_media(prompt):
        row_number = getattr(prompt, "index", row.prompt)
        raise ValueError(
            f"environment {env.name!r}: row {row_number}: expected a prompt without media, since its first "
            "tokens are written anew (by reset, or to tell of tools), got one with media"
        )
    if asked:
        row.read(renderer.opening(asked, env.tools))
    elif retold:
        # the tools are told in the prompt, which the data set has rendered without them
        asked = list(prompt.messages or [{"role": "user", "content": prompt.text}])
        row.read(renderer.opening(asked, env.tools))
    else:
        row.read(prompt.ids)
    if not row.messages:
        row.messages += list(prompt.messages or [{"role": "user", "content": prompt.text}])


def _check_openings(
    env: Environment, prompts: Sequence[Any], episodes: Sequence[_Episode], max_tokens: int
) -> None:
    """Raise ValueError for a first prompt that is empty or leaves no room for a response."""
    for episode in episodes:
        for row in episode.rows:
            if not 1 <= len(row.tokens) < max_tokens:
                raise ValueError(
                    f"{_name(env, prompts, episode)}: expected a prompt of 1 to {max_tokens - 1} tokens, "
                    f"below max_tokens, got {len(row.tokens)}"
                )


def _step(
    strategy: Strategy,
    env: Environment,
    prompts: Sequence[Any],
    spoken: Sequence[_Episode],
    renderer: Renderer,
    timeout: float,
) -> None:
    """Give every environment the response that its policy has just sampled."""
    acts = []
    for episode in spoken:
        text = renderer.said(episode.speaker.tokens[episode.speaker.spoke_at :])
        episode.speaker.messages.append({"role": "assistant", "content": text})
        if episode.mine:
            call = partial(env.step, episode.state, text)
            acts.append(Act(_name(env, prompts, episode), call, partial(read_step, env)))
    _take(strategy, env, acts, spoken, timeout)
    for episode in spoken:
        if not (episode.done or episode.speaker.unread):
            raise ValueError(
                f"{_name(env, prompts, episode)}: expected an observation for the next turn, since the "
                "environment is not done, got none"
            )


def _take(
    strategy: Strategy,
    env: Environment,
    acts: Sequence[Act],
    episodes: Sequence[_Episode],
    timeout: float,
) -> None:
    """Run the acts of this rank, and apply the results of all ranks to the episodes."""
    states, results = step_environments(strategy, env, acts, timeout=timeout)
    mine = [episode for episode in episodes if episode.mine]
    for episode, state in zip(mine, states, strict=True):
        episode.state = state
    for episode, result in zip(episodes, results, strict=True):
        episode.done = result.done
        episode.seat = result.seat
        for row, messages, reward in zip(episode.rows, result.observations, result.rewards, strict=True):
            row.earn(reward)
            row.observe(messages)


# ---------- the policy's side


def _may_speak(episode: _Episode, renderer: Renderer, limits: _Limits) -> bool:
    """Append pending messages; True if the policy may generate."""
    if episode.done or episode.cut:
        return False
    row = episode.speaker
    if row.turns == limits.turns:
        episode.cut = "turns"
        return False
    ids = renderer.reply(row.tokens, row.unread) if row.unread else []
    if len(row.tokens) + len(ids) >= limits.tokens:
        episode.cut = "tokens"
        return False
    if row.turns and limits.placeholders.intersection(row.tokens[-1:] + ids):
        episode.cut = "placeholder"
        return False
    row.unread.clear()
    row.read(ids)
    return True


def _speak(
    engine: Engine,
    strategy: Strategy,
    prompts: Sequence[Any],
    waiting: Sequence[_Episode],
    sampling: Sampling,
    max_tokens: int,
) -> None:
    """Sample one response for each episode."""
    rows = [episode.speaker for episode in waiting]
    rollout = gather_and_generate(
        engine,
        strategy,
        [_so_far(row, prompts[row.prompt]) for row in rows],
        [rng.fold_in(row.key, row.sample, row.seat, row.turns) for row in rows],
        n=1,
        sampling=sampling,
        max_new=[min(sampling.max_new, max_tokens - len(row.tokens)) for row in rows],
        sleep_engine=False,
    )
    for b, row in enumerate(rows):
        new = slice(len(row.tokens), int(rollout.length[b]))
        row.say(
            rollout.tokens[b, new].tolist(),
            rollout.logp[b, new].tolist(),
            version=int(rollout.version[b]),
            cut=bool(rollout.truncated[b]),
            routing=None if rollout.routing is None else rollout.routing[b, : new.stop],
            kept=None if rollout.kept is None else rollout.kept[b, new],
        )


def _so_far(row: Conversation, prompt: Any) -> list[int]:
    """Return the tokens of a conversation, with the media of its prompt."""
    return Prefix(row.tokens, row.mask, prompt) if has_media(prompt) else row.tokens
