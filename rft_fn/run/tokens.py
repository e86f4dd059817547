"""Single tokens of some responses, and what the loss did to them: the rows of tokens.jsonl."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import loss, packing, tree
from rft_fn.reward import Judged
from rft_fn.run.data_uris import shown
from rft_fn.run.run_folder import Run
from rft_fn.run.setup import Setup
from rft_fn.run.token_texts import pieces
from rft_fn.types import Apply, Experience, LossFn, Rollout, Strategy, TokenOut

__all__ = ["TokenLog", "effects", "token_log"]


GROUPS = 2  # at least that are recorded; more where they are small
SAMPLES = 8  # most responses of each
ROWS = 8  # responses in all, where groups are small
TOKENS = 2048  # most tokens of a response
CONTEXT = 64  # most tokens before the first that is learned, where there is no prompt as a text


def token_log(
    env: Setup, loss_fn: LossFn, *, group: int = 1, unit: int = 1, names: Sequence[str] = ()
) -> "TokenLog":
    """Return what records single tokens of a run, every --tokens-every steps."""
    return TokenLog(
        env.st,
        env.run,
        env.policy.apply,
        loss_fn,
        env.task.tokenizer,
        every=env.cfg.tokens_every,
        budget=env.cfg.budget,
        group=group,
        unit=unit,
        names=names,
    )


class TokenLog:
    """Records single tokens of a few responses every so many steps.

    Every rank calls `before` ahead of a step's updates and `after` when they are done. Both are a forward
    pass without gradient over the recorded responses, in the steps that are recorded.
    """

    def __init__(
        self,
        st: Strategy,
        run: Run,
        apply: Apply,
        loss_fn: LossFn,
        tokenizer: Any,
        *,
        every: int,
        budget: int,
        group: int = 1,
        unit: int = 1,
        names: Sequence[str] = (),
    ):
        """Record every `every` steps, 0 for never, with at most `budget` tokens in a pack.

        `group` rows in a row belong together, and `unit` of them in the loss, as in `packing.pack`. `names`
        are the names of the rows of a group, where they are more than samples.
        """
        self.every = every
        self.st = st
        self.run = run
        self.apply = apply
        self.loss_fn = loss_fn
        self.tokenizer = tokenizer
        self.group = group
        self.unit = unit
        self.names = names
        self.budget = budget
        self._first: TokenOut | None = None  # of the recorded rows, before the updates

    def before(self, step: int, params: Any, batch: Rollout | Experience) -> None:
        """Score the responses by the parameters that a step begins with.

        A batch without a whole group, as partial rollouts may leave one, is not recorded.
        """
        self._first = None
        if self.every and step % self.every == 0 and len(batch.tokens) >= self.group:
            with self.run.phase("record"):
                self._first = self._score(params, batch)

    def after(
        self,
        step: int,
        params: Any,
        exp: Experience,
        prompts: Sequence[Any] = (),
        judged: Judged | None = None,
        rollout: Rollout | None = None,
    ) -> None:
        """Score them again by the parameters after the updates, and write what happened to every token.

        `exp` is the batch with the weights that the loss had. `prompts` and `judged` give the texts and the
        rewards, `rollout` the sampler's log-probs.
        """
        if self._first is None:
            return
        with self.run.phase("record"):
            first = self._first
            self._first = None
            last = self._score(params, exp, entropy=False)
            if not self.run.main:
                return
            index = self._rows(exp)
            few = tree.replace(packing.take(tree.replace(exp, media=None), index), media=None)
            fields = self._fields(few, first, last)
            if rollout is not None:
                fields["mismatch"] = torch.where(few.mask, first.logp - rollout.logp[index], 0)
            self.run.tokens(self._written(step, few, index.tolist(), fields, prompts, judged))

    def _rows(self, batch: Rollout | Experience) -> Tensor:
        """Return the rows that are recorded: the first samples of the first groups."""
        groups = min(max(GROUPS, ROWS // self.group), len(batch.tokens) // self.group)
        samples = min(self.group, SAMPLES)
        return torch.tensor([g * self.group + s for g in range(groups) for s in range(samples)])

    def _score(self, params: Any, batch: Any, *, entropy: bool = True) -> TokenOut:
        """Score the recorded rows of a rollout or an experience."""
        few = packing.take(batch, self._rows(batch))
        fields = ["logp", "entropy"] if entropy and isinstance(batch, Rollout) else ["logp"]
        return self.st.score(self.apply, params, few, budget=self.budget, fields=fields)

    def _fields(self, few: Experience, first: TokenOut, last: TokenOut) -> dict[str, Tensor]:
        """Return numbers of every token, [B, S] by name."""
        found = {"w": few.w, "logp": first.logp, "change": last.logp - first.logp}
        if first.entropy is not None:
            found |= {"entropy": first.entropy, "adv": few.adv, "old_logp": few.old_logp}
            found["ratio"] = torch.exp(last.logp - few.old_logp)
            after = effects(self.loss_fn, few, last.logp, first.entropy, unit=self.unit)
            found["clipped"] = loss.without_gradient(after, few.adv, few.w)
        if few.ref_logp is not None:
            found["ref_gap"] = first.logp - few.ref_logp
        found["push"] = -effects(self.loss_fn, few, first.logp, first.entropy, unit=self.unit)
        return found

    def _written(
        self,
        step: int,
        few: Experience,
        rows: Sequence[int],
        fields: dict[str, Tensor],
        prompts: Sequence[Any],
        judged: Judged | None,
    ) -> list[dict[str, Any]]:
        """Return the rows of tokens.jsonl."""
        found = []
        for i, b in enumerate(rows):
            group, sample = divmod(b, self.group)
            row: dict[str, Any] = {"step": step, "group": group, "sample": sample}
            if self.names:
                row["name"] = self.names[sample]
            if prompts:
                row["prompt"] = prompts[group].text
                if sample == 0:
                    row |= shown(prompts[group])
            if judged is not None:
                row["reward"] = float(judged.reward[group, sample])
                row |= {name: values[b] for name, values in judged.extra.items() if name == "conversation"}
            row |= self._tokens(few, i, fields, alone=not prompts)
            found.append(row)
        return found

    def _tokens(self, few: Experience, i: int, fields: dict[str, Tensor], *, alone: bool) -> dict[str, Any]:
        """Return the tokens of a row from its first learned one, with some before it if `alone`."""
        learned = few.mask[i].nonzero().flatten().tolist()
        if not learned:
            return {"pieces": [], "mask": []}
        start = learned[0]
        if alone:
            start = max(start - CONTEXT, 0)
        end = min(int(few.length[i]), start + TOKENS)
        mask = few.mask[i, start:end].tolist()
        row: dict[str, Any] = {
            "pieces": pieces(few.tokens[i, start:end].tolist(), self.tokenizer),
            "mask": [int(m) for m in mask],
        }
        for name, x in fields.items():
            values = x[i, start:end].tolist()
            row[name] = [_short(value, m) for value, m in zip(values, mask)]
        return row


def effects(
    loss_fn: LossFn, exp: Experience, logp: Tensor, entropy: Tensor | None = None, *, unit: int = 1
) -> Tensor:
    """Return `loss.token_gradient` of the rows of a batch where the model gives `logp` [B, S].

    It is [B, S] on their tokens. Terms of a loss that read other outputs than log-probs and entropy have no
    gradient here.
    """
    if entropy is None:
        entropy = torch.zeros_like(logp)

    # the outputs move to the labels as all data of a loss does
    extra = dict(exp.extra or {})
    moved = tree.replace(exp, extra=extra | {"logp of out": logp, "entropy of out": entropy}, media=None)
    b = packing.pack(moved, range(len(exp.tokens)), unit=unit)
    assert b.extra is not None
    logp = b.extra["logp of out"]
    entropy = b.extra["entropy of out"]
    kept = {name: b.extra[name] for name in extra} or None
    b = tree.replace(b, extra=kept)
    zeros = torch.zeros_like(logp)
    out = TokenOut(logp=logp, entropy=entropy, value=zeros, aux=zeros, expert_share=zeros)
    return packing.unpack([loss.token_gradient(loss_fn, out, b)], [b], exp.tokens)


def _short(x: float | bool, learned: bool) -> float | int | None:
    """Return a number with four digits, or None if it is not finite or nothing is learned there."""
    if isinstance(x, bool):
        x = int(x)
    if not learned or not math.isfinite(x):
        return None
    if x == int(x):
        return int(x)
    return float(f"{x:.4g}")
