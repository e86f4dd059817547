"""Generative reward models: judges, which write their verdict on a response.

    judge = rft.engine.get_engine(config, "path/to/judge")
    score = rft.reward.weighted(quality=(rft.reward.generative(judge, tokenizer, votes=5), 1.0))

`forms` has the questions, `verdicts` reads the answers, `quoting` and `asking` keep what is judged apart from
what judges, `voting` takes several answers together. A judge has an engine of its own, on each rank for this
rank's share. Rewards are in [0, 1].
"""

import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rft_fn.data import Processing
from rft_fn.data.medium import Medium
from rft_fn.data.prompts import Prompt
from rft_fn.data.text_template import fill
from rft_fn.reward import forms
from rft_fn.reward import verdicts as voting
from rft_fn.reward.calling import in_thread
from rft_fn.reward.forms import (
    Answers,
    Asker,
    Batch,
    Form,
    first_said,
    key_of,
    make_batch,
    read_flags,
    row_of,
)
from rft_fn.reward.scoring import responses
from rft_fn.reward.signature import Messages, RewardFn
from rft_fn.reward.verdicts import behind_thoughts
from rft_fn.types import Engine, Sampling

__all__ = ["generative", "generative_by_name"]


# ---------- answers of a judge that have no verdict: examples of them, and when to stop


_SHOWN = 3  # examples
_WIDTH = 200  # characters of each
_REMEDY = "take a form that this judge can follow, or raise max_new"
_TOO_LONG = "take shorter criteria or a judge with a larger window, or lower max_new"


class Watch:
    """Shows the first answers without a verdict, and stops a run that gets little else.

    `limit` is the share of answers without a verdict, and `patience` how many calls in a row may reach it.
    ValueError for a share outside of (0, 1] and for no patience.
    """

    def __init__(self, form: Form, limit: float, patience: int):
        if not isinstance(limit, (int, float)) or not 0 < limit <= 1:
            raise ValueError(f"limit: expected a share of answers in (0, 1], got {limit!r}")
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience: expected at least 1 call, got {patience!r}")
        self.form = form
        self.limit = limit
        self.patience = patience
        self.bad = 0  # calls in a row
        self.shown = False

    def see(self, said: Sequence[str], read: Sequence[bool], *, too_long: int = 0) -> None:
        """Count one call: the answers, which of them have a verdict, the questions that were not asked.

        ValueError, with three examples, where it was one too many.
        """
        unread = [answer for answer, good in zip(said, read, strict=True) if not good]
        total = len(said) + too_long
        bad = len(unread) + too_long
        if not bad:
            self.bad = 0
            return

        # few enough are left, or this call is one of several
        self.bad += 1
        if bad < self.limit * total:
            self.bad = 0
        got = f"none in {bad} of {total} answers"
        remedy = _REMEDY
        if not unread:
            remedy = _TOO_LONG
        if too_long:
            got += f" ({too_long} questions do not fit into its window)"
        if self.bad >= self.patience:
            raise error(self.form, f"{got}, the last of {self.bad} calls in a row", unread, remedy)
        if not self.shown:
            self.shown = True
            warnings.warn(str(error(self.form, got, unread, remedy)), stacklevel=2)


def error(form: Form, got: str, said: Sequence[str], remedy: str = _REMEDY) -> ValueError:
    """The error of answers without a verdict, with the first three that differ."""
    examples = ", ".join(f"{answer!r:.{_WIDTH}}" for answer in list(dict.fromkeys(said))[:_SHOWN])
    return ValueError(
        f"judge: expected answers with a verdict such as {form.parse.write(1)!r}, got {got}; it said "
        f"{examples or 'nothing'}; {remedy}"
    )


# ---------- judges


class Log(Protocol):
    """Logs a value under a name: `log_metric` and `log_extra` of the convention."""

    def __call__(self, name: str, value: Any, /) -> None: ...


def generative(
    engine: Engine,
    tokenizer: Any,
    *,
    form: forms.Form | None = None,
    sampling: Sampling | None = None,
    votes: int = 1,
    vote: voting.Vote = voting.mean,
    against: str = "",
    both_orders: bool = True,
    unparsable: float | str | None = 0.0,
    limit: float = 0.9,
    patience: int = 3,
    processing: Processing | None = None,
    served: bool = False,
) -> RewardFn:
    """A reward function that asks a judge, in [0, 1].

    `engine` samples the judge's answers, with `tokenizer`. `form` is the question and the parser, by default
    `forms.rating()`. Each question is answered `votes` times, and `vote` makes one verdict of them. Without
    `sampling` one answer is greedy, and several are sampled at temperature 1.

    A form for pairs compares a response with the text in the column `against`, or, without one, with all
    others to its prompt; the reward is the share that it wins. With `both_orders` each pair is asked about
    twice, with the sides swapped, so that a judge that prefers a place is worth 0.5. For G responses to a
    prompt that is 2 G questions with a reference, and G (G - 1) within the group; half without.

    Keys of the samples are derived from `keys` of the convention; without them from the texts. Only tokens
    that the judge sampled are read. An answer that was cut off has no verdict, nor has a question that does
    not fit into the judge's window. `unparsable` is the reward of a response without any verdict: a number,
    None where the judge then does not apply, or "error". A judge of whose answers at least the share `limit`
    has no verdict in `patience` calls in a row raises ValueError with three of them.

    Metrics: `unparsable`, the share of answers without a verdict; `cut_off`, those of them that met max_new;
    `too_long`, the share of questions that were not asked; `spread`, the standard deviation of the samples
    of a question, and `consistent`, the share of pairs with the same winner in both orders, where there are
    any. The first answer about each response goes to the trajectories as `said`.

    With `processing`, for a judge that sees or hears, a question has the media of the prompt in front.

    With `served`, for an engine on servers, the function returns an awaitable: other rewards compute, and
    other judges are asked, while it waits for the answers.

    ValueError for options that do not go together.
    """
    form = form or forms.rating()
    if sampling is None:
        sampling = Sampling(temperature=voting.temperature_for(votes), max_new=form.max_new)
    _check(form, sampling, votes, against, unparsable)
    options = _Options(form, sampling, votes, vote, against, both_orders, unparsable, served)
    made = _Judge
    if processing is not None:
        made = _SeeingJudge
    return made(engine, tokenizer, options, Watch(form, limit, patience), processing)


def generative_by_name(
    engine: Engine,
    tokenizer: Any,
    form: str = "score",
    *,
    votes: int = 1,
    vote: str = "mean",
    temperature: float | None = None,
    top_p: float = 1.0,
    max_new: int | None = None,
    against: str = "",
    both_orders: bool = True,
    unparsable: float | str | None = 0.0,
    limit: float = 0.9,
    patience: int = 3,
    processing: Processing | None = None,
    served: bool = False,
    **options: Any,
) -> RewardFn:
    """`generative` with literal arguments, as a command line has them.

    `form` is a name of `forms.FORMS`, and `options` are its own; `vote` is mean, majority or median.
    ValueError for names and options that do not exist.
    """
    made = forms.named(form, **options)
    if temperature is None:
        temperature = voting.temperature_for(votes)
    return generative(
        engine,
        tokenizer,
        form=made,
        sampling=Sampling(temperature=temperature, top_p=top_p, max_new=max_new or made.max_new),
        votes=votes,
        vote=voting.named(vote),
        against=against,
        both_orders=both_orders,
        unparsable=unparsable,
        limit=limit,
        patience=patience,
        processing=processing,
        served=served,
    )


def _check(
    form: forms.Form, sampling: Sampling, votes: int, against: str, unparsable: float | str | None
) -> None:
    """ValueError for options that do not go together."""
    voting.check_count(votes)
    if votes > 1 and sampling.temperature == 0:
        raise ValueError(f"votes: expected a temperature above 0 for {votes} votes, got 0: all are alike")
    if against and not form.is_pair:
        raise ValueError(f"against: expected a form for pairs, which has {{a}} and {{b}}, got {against!r}")
    if isinstance(unparsable, str) and unparsable != "error":
        raise ValueError(f"unparsable: expected a number, None or 'error', got {unparsable!r}")


class _Options(NamedTuple):
    """The options of a judge; see `generative`."""

    form: forms.Form
    sampling: Sampling
    votes: int
    vote: voting.Vote
    against: str
    both_orders: bool
    unparsable: float | str | None
    served: bool


class _Judge:
    """A judge, as a reward function. It counts the calls in which hardly anything could be read."""

    stateless = True  # it takes any column, but does not read trainer_state

    def __init__(
        self, engine: Engine, tokenizer: Any, options: _Options, watch: Watch, processing: Processing | None
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.options = options
        self.watch = watch
        self.asker = Asker(options.form, tokenizer, processing)
        self.columns = options.form.columns
        if options.against:
            self.columns += (forms.column_of(options.against),)
        self.waits = options.served
        self.__name__ = "judge"

    def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        *,
        groups: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
        log_metric: Log | None = None,
        log_extra: Log | None = None,
        **columns: Any,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """The verdicts on a batch, in TRL's convention."""
        none: list[list[Medium]] = [[] for _ in completions]
        batch = make_batch(prompts, completions, groups, keys, columns, none)
        return self.judge(batch, log_metric or _drop, log_extra or _drop)

    def close(self) -> None:
        """End the judge's engine."""
        self.engine.close()

    def judge(
        self, batch: Batch, log_metric: Log, log_extra: Log
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """The verdicts on a batch: asked, read, voted on, and added up by response."""
        matches = self._matches(batch)
        asked = [self._prompt(match, batch) for match in matches]
        ask = partial(self._answers, asked, [key_of(match, batch.keys) for match in matches])
        decide = partial(self._decide, matches, len(batch.completions), log_metric, log_extra)
        if not self.options.served:
            return decide(ask())
        self.engine.wake()  # here, where it may be built: models are loaded by one thread alone
        return self._decide_later(ask, decide)

    async def _decide_later(
        self, ask: Callable[[], Answers], decide: Callable[[Answers], list[float | None]]
    ) -> list[float | None]:
        """The verdicts, once the servers have answered; an engine whose answers nobody awaits is closed."""
        return decide(await in_thread(ask, self.engine.close))

    def _decide(
        self,
        matches: Sequence[voting.Match],
        count: int,
        log_metric: Log,
        log_extra: Log,
        answers: Answers,
    ) -> list[float | None]:
        """The verdicts on `count` responses by the answers to all questions."""
        said = [answer for texts in answers.said for answer in texts]
        self.watch.see(said, read_flags(answers), too_long=answers.too_long)

        # one verdict for each question, then for each response
        verdict = self.options.vote(answers.verdicts)
        share = voting.shares(verdict, matches, count)
        for name, value in self._metrics(answers, matches, verdict).items():
            log_metric(name, value)
        examples = first_said(answers, matches, count)
        log_extra("said", examples)
        return self._values(share, matches, examples)

    def _matches(self, batch: Batch) -> list[voting.Match]:
        """The questions of a batch."""
        count = len(batch.completions)
        if not self.options.form.is_pair:
            return voting.alone(count)
        if self.options.against:
            return voting.versus(count, both_orders=self.options.both_orders)
        return voting.round_robin(batch.groups, both_orders=self.options.both_orders)

    def _prompt(self, match: voting.Match, batch: Batch) -> Prompt:
        """The prompt of one question."""
        row = row_of(match)
        values = {name: batch.columns[name][row] for name in self.columns if name in batch.columns}
        own: dict[str, Any] = {"prompt": batch.prompts[row]}
        if self.options.form.is_pair:
            own["a"] = self._side(match.a, values, batch, row)
            own["b"] = self._side(match.b, values, batch, row)
        else:
            own["response"] = batch.completions[row]
        return self.asker.prompt(values | own, row, batch.media[row])

    def _side(self, side: int | None, values: dict[str, Any], batch: Batch, row: int) -> str:
        """The text on one side of a pair: a completion, or the reference of a row."""
        if side is None:
            return fill("{" + self.options.against + "}", values, f"completion {row}")
        return batch.completions[side]

    def _answers(self, asked: Sequence[Prompt], keys: Sequence[int]) -> Answers:
        """The judge's answers; questions that are too long for its window are not asked."""
        # the questions that fit
        k = self.options.votes
        said: list[list[str]] = [[] for _ in asked]
        verdicts = torch.full((len(asked), k), torch.nan, dtype=torch.float64)
        with self._awake():
            window = self.engine.status().get("window") or float("inf")
            most = window - self.options.sampling.max_new
            fits = [i for i, prompt in enumerate(asked) if len(prompt.ids) <= most]
            prompts = [asked[i] for i in fits]
            own = [keys[i] for i in fits]
            rollout = self.engine.generate(prompts, own, n=k, sampling=self.options.sampling)

        # only what the judge itself has sampled is read
        truncated = rollout.truncated.tolist()
        for row, answer in enumerate(responses(rollout, self.tokenizer)):
            i = fits[row // k]
            said[i].append(answer)
            verdict = self._verdict(answer, cut=truncated[row])
            if verdict is not None:
                verdicts[i, row % k] = verdict
        return Answers(verdicts, said, sum(truncated), len(asked) - len(fits))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The judge's weights are on the device within the block alone, where its engine can sleep."""
        self.engine.wake()
        try:
            yield
        finally:
            if self.engine.status()["alive"]:
                self.engine.sleep()

    def _verdict(self, said: str, *, cut: bool) -> float | None:
        """The verdict in one answer; the last number of one that was cut off may lack its end."""
        if cut:
            return None
        answer = behind_thoughts(said)
        if answer is None:
            return None
        return self.options.form.parse(answer)

    def _metrics(
        self, answers: Answers, matches: Sequence[voting.Match], verdict: Tensor
    ) -> dict[str, float]:
        """The numbers to log about a batch."""
        found: dict[str, float] = {}
        if not matches:
            return found
        read = read_flags(answers)
        found["too_long"] = answers.too_long / len(matches)
        if read:
            found["unparsable"] = 1 - sum(read) / len(read)
            found["cut_off"] = answers.cut_off / len(read)
        if self.options.votes > 1 and any(read):
            found["spread"] = voting.spread(answers.verdicts)
        same = voting.consistent(verdict, matches)
        if same is not None:
            found["consistent"] = same
        return found

    def _values(
        self, share: Tensor, matches: Sequence[voting.Match], said: Sequence[str]
    ) -> list[float | None]:
        """The rewards [B]: shares, with `unparsable` where there is no verdict.

        A response that is alone in its group wins half. ValueError where "error" was asked for.
        """
        instead = self.options.unparsable
        judged = {side for match in matches for side in match}
        values: list[float | None] = []
        for i, x in enumerate(share.tolist()):
            if i not in judged:
                values.append(0.5)
            elif x == x:
                values.append(x)
            elif isinstance(instead, str):
                raise error(self.options.form, f"none about completion {i}", [said[i]])
            else:
                values.append(instead)
        return values


class _SeeingJudge(_Judge):
    """A judge that gets the media of the prompts."""

    def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        *,
        groups: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
        media: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        log_metric: Log | None = None,
        log_extra: Log | None = None,
        **columns: Any,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """The verdicts on a batch; `media` are records as rewards get them: kind, and bytes or url."""
        shown: list[list[Medium]] = [[] for _ in completions]
        for own, records in zip(shown, media or ()):
            own += [Medium(x["kind"], x.get("bytes") or x["url"]) for x in records]
        batch = make_batch(prompts, completions, groups, keys, columns, shown)
        return self.judge(batch, log_metric or _drop, log_extra or _drop)


def _drop(name: str, value: Any, /) -> None:
    """Log nothing."""
