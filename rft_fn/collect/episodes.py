"""Conversations with an environment, and the rollout that they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import tree
from rft_fn.data.messages import Turn, text_of
from rft_fn.reward import Judged
from rft_fn.rollout import known_routing, take
from rft_fn.types import Rollout, Sampling

__all__ = ["Conversation", "Played", "assembled", "of_episodes"]


@dataclass
class Conversation:
    """The tokens that one seat has read and sampled: B conversations make a rollout."""

    prompt: int  # its number among the prompts
    sample: int
    seat: int
    key: int  # of the prompt
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True where the policy sampled
    logp: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)  # (place of a token, what it earned)
    total: float = 0.0
    turns: int = 0  # that the policy took
    spoke_at: int = 0  # the place of the first token of the last turn
    last_token: int = -1  # the place of its last token; -1 before the first turn
    unfinished: int = 0  # turns that the limit of a response cut off
    version: int = 0  # the oldest of the weights that it was sampled with
    messages: list[Turn] = field(default_factory=list)  # to be read
    unread: list[Turn] = field(default_factory=list)  # observations that are not tokens yet
    routing: Tensor | None = None  # [S, M, k] of the tokens, as of a rollout
    kept: list[tuple[int, Tensor]] = field(default_factory=list)  # (place of a turn, [n, W] of it)

    def read(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample."""
        self.tokens += ids
        self.mask += [False] * len(ids)
        self.logp += [0.0] * len(ids)

    def say(
        self,
        ids: Sequence[int],
        logp: Sequence[float],
        *,
        version: int,
        cut: bool,
        routing: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """Add the tokens of one turn of the policy.

        `routing` [S, M, k] is of all tokens up to its end, `kept` [n, W] of its own.
        """
        if routing is not None:
            before = self.routing
            if before is not None:
                before = F.pad(before, (0, 0, 0, 0, 0, len(routing) - len(before)))
            self.routing = known_routing(before, routing)
        if kept is not None:
            self.kept.append((len(self.tokens), kept))
        if not self.turns:
            self.version = version
        self.version = min(self.version, version)
        self.spoke_at = len(self.tokens)
        self.tokens += ids
        self.mask += [True] * len(ids)
        self.logp += logp
        self.last_token = len(self.tokens) - 1
        self.turns += 1
        self.unfinished += cut

    def earn(self, reward: float) -> None:
        """Add a reward to the last sampled token."""
        self.total += reward
        if self.turns:
            self.rewards.append((self.last_token, reward))

    def observe(self, messages: Sequence[Turn]) -> None:
        """Add messages, which become tokens before the policy's next turn."""
        self.messages += messages
        self.unread += messages


class Played(NamedTuple):
    """Whole conversations: B = N G rows, grouped by prompt and seat.

    N counts prompts times seats: prompt 0 as seat 0, prompt 0 as seat 1, prompt 1 as seat 0 ...
    """

    rollout: Rollout  # mask: what the policy sampled; truncated: ended by a limit
    reward: Tensor  # [N, G] of the whole conversation
    token_reward: Tensor  # [B, S] of each turn, on its last sampled token; 0 elsewhere
    prompts: list[Any]  # N
    talks: list[list[Turn]]  # B, to be read
    texts: list[str]  # B, what the policy said
    numbers: dict[str, Tensor]  # name -> [B] float32: turns, cut_by_turns, cut_by_tokens, unfinished
    episode: Tensor | None = None  # [B] of each row, where episodes have several: 0 to N G - 1 come first

    @property
    def first(self) -> Rollout:
        """Return the rollout with one row for each episode."""
        return self.rollout if self.episode is None else take(self.rollout, range(self.reward.numel()))

    def of_rows(self, adv: Tensor) -> Tensor:
        """Return the advantages of episodes, [N G, 1], as those of rows, [B, 1].

        ValueError for advantages of tokens where episodes have several rows.
        """
        if self.episode is None:
            return adv
        if adv.shape[1] != 1:
            raise ValueError(
                "algorithm: expected one advantage an episode, which its rows share, got one a token"
            )
        return adv[self.episode]

    def judged(self) -> Judged:
        """Return the rewards as `Judged`, with the conversations to be read."""
        shape = self.reward.shape
        metrics = {name: x.view(shape) for name, x in self.numbers.items()}
        return Judged(self.reward, {}, self.texts, metrics, {"conversation": self.talks})


def assembled(
    rows: Sequence[Conversation],
    prompts: Sequence[Any],
    cuts: Sequence[str],
    texts: Sequence[str],
    *,
    seats: int,
    pad: int,
    sampling: Sampling,
) -> Played:
    """Assemble the rollout, ordered by (prompt, seat, sample); cuts [B] name the limits met."""
    order = sorted(range(len(rows)), key=lambda b: (rows[b].prompt, rows[b].seat, rows[b].sample))
    rows = [rows[b] for b in order]
    cuts = [cuts[b] for b in order]
    groups = len(prompts) * seats
    rollout, token_reward = _rollout(rows, cuts, pad=pad, sampling=sampling)
    rollout = tree.replace(rollout, group=torch.tensor([row.prompt * seats + row.seat for row in rows]))
    numbers = {
        "turns": [row.turns for row in rows],
        "cut_by_turns": [cut == "turns" for cut in cuts],
        "cut_by_tokens": [cut == "tokens" for cut in cuts],
        "unfinished": [row.unfinished for row in rows],
    }
    return Played(
        rollout=rollout,
        reward=torch.tensor([row.total for row in rows]).view(groups, -1),
        token_reward=token_reward,
        prompts=[prompt for prompt in prompts for _ in range(seats)],
        talks=[row.messages for row in rows],
        texts=[texts[b] for b in order],
        numbers={name: torch.tensor(x, dtype=torch.float32) for name, x in numbers.items()},
    )


def of_episodes(
    episodes: Sequence[Sequence[Conversation]],
    rewards: Sequence[float],
    cuts: Sequence[str],
    prompts: Sequence[Any],
    *,
    pad: int,
    sampling: Sampling,
    numbers: Mapping[str, Sequence[float]],
) -> Played:
    """Assemble episodes of several rows, G for each of N prompts in their order.

    The first N G rows of the rollout are the last row of each episode; those before it follow. An episode
    without any has a row of one token, of which nothing is learned.
    """
    last = [
        rows[-1] if rows else Conversation(i * len(prompts) // len(episodes), 0, 0, 0, [pad], [False], [0.0])
        for i, rows in enumerate(episodes)
    ]
    earlier = [(i, row) for i, rows in enumerate(episodes) for row in rows[:-1]]
    rows = [*last, *(row for _, row in earlier)]
    of = torch.tensor([*range(len(last)), *(i for i, _ in earlier)])
    rollout, token_reward = _rollout(rows, [*cuts, *("" for _ in earlier)], pad=pad, sampling=sampling)
    n = len(episodes) // len(prompts)
    counted = {
        "rows": [len(x) for x in episodes],
        "turns": [sum(row.turns for row in x) for x in episodes],
        "cut_by_turns": [cut == "turns" for cut in cuts],
        "cut_by_tokens": [cut == "tokens" for cut in cuts],
        "unfinished": [sum(row.unfinished for row in x) for x in episodes],
        **numbers,
    }
    return Played(
        rollout=tree.replace(rollout, group=of // n),
        reward=torch.tensor(rewards, dtype=torch.float32).view(len(prompts), n),
        token_reward=token_reward,
        prompts=list(prompts),
        talks=[row.messages for row in last],
        texts=[_said(row.messages) for row in last],
        numbers={name: torch.tensor(x, dtype=torch.float32) for name, x in counted.items()},
        episode=of,
    )


def _said(messages: Sequence[Turn]) -> str:
    """Return what the policy said in a conversation."""
    return "\n".join(text_of(m) for m in messages if m["role"] == "assistant")


def _rollout(
    rows: Sequence[Conversation], cuts: Sequence[str], *, pad: int, sampling: Sampling
) -> tuple[Rollout, Tensor]:
    """Return conversations as (a rollout, the rewards of tokens), right-padded."""
    size = max(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), size), pad)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    logp = torch.zeros(tokens.shape)
    token_reward = torch.zeros(tokens.shape)
    routed = next((row.routing for row in rows if row.routing is not None), None)
    routing = None if routed is None else routed.new_zeros(*tokens.shape, *routed.shape[1:])
    known = [kept for row in rows for _, kept in row.kept]
    width = max((x.shape[-1] for x in known), default=0)
    kept = torch.zeros(*tokens.shape, width, dtype=torch.int32) if known else None
    for b, row in enumerate(rows):
        length = len(row.tokens)
        for place, words in row.kept:
            if kept is not None:
                kept[b, place : place + len(words), : words.shape[-1]] = words
        if routing is not None and row.routing is not None:
            routing[b, : len(row.routing)] = row.routing
        tokens[b, :length] = torch.tensor(row.tokens)
        mask[b, :length] = torch.tensor(row.mask)
        logp[b, :length] = torch.tensor(row.logp)
        for place, reward in row.rewards:
            token_reward[b, place] += reward
    rollout = Rollout(
        tokens=tokens,
        mask=mask,
        logp=logp,
        length=torch.tensor([len(row.tokens) for row in rows]),
        truncated=torch.tensor([bool(cut) for cut in cuts]),
        group=torch.tensor([row.prompt for row in rows]),
        version=torch.tensor([row.version for row in rows]),
        routing=routing,
        kept=kept,
        sampling=sampling,
    )
    return rollout, token_reward
