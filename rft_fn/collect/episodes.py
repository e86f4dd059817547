"""Conversations with an environment, and the rollout that they make."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn.data.messages import Turn
from rft_fn.reward import Judged
from rft_fn.types import Rollout, Sampling

__all__ = ["Conversation", "Played", "assembled"]


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
        kept: Tensor | None = None,
    ) -> None:
        """Add the tokens of one turn of the policy, and the words [n, W] that were left at each."""
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
    size = max(len(row.tokens) for row in rows)

    # right-padded; all but the tokens is 0 outside mask
    tokens = torch.full((len(rows), size), pad)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    logp = torch.zeros(tokens.shape)
    token_reward = torch.zeros(tokens.shape)
    known = [kept for row in rows for _, kept in row.kept]
    width = max((x.shape[-1] for x in known), default=0)
    kept = torch.zeros(*tokens.shape, width, dtype=torch.int32) if known else None
    for b, row in enumerate(rows):
        length = len(row.tokens)
        tokens[b, :length] = torch.tensor(row.tokens)
        mask[b, :length] = torch.tensor(row.mask)
        logp[b, :length] = torch.tensor(row.logp)
        for place, reward in row.rewards:
            token_reward[b, place] += reward
        for place, words in row.kept:
            if kept is not None:
                kept[b, place : place + len(words), : words.shape[-1]] = words

    rollout = Rollout(
        tokens=tokens,
        mask=mask,
        logp=logp,
        length=torch.tensor([len(row.tokens) for row in rows]),
        truncated=torch.tensor([bool(cut) for cut in cuts]),
        group=torch.tensor([row.prompt * seats + row.seat for row in rows]),
        version=torch.tensor([row.version for row in rows]),
        kept=kept,
        sampling=sampling,
    )
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
