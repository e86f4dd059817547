"""Generative reward models: judges, which write their verdict on a response.

    judge = rft.engine.get_engine(config, "path/to/judge")
    score = rft.reward.weighted(quality=(rft.reward.generative(judge, tokenizer, votes=5), 1.0))

`forms` has the questions, `asker` keeps what is judged apart from them, `verdicts` reads the answers, and
takes several together. A judge has an engine of its own, on each rank for this rank's share. Rewards are in
[0, 1].
"""

import inspect
import warnings
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import rng
from rft_fn.data import Processing
from rft_fn.data.medium import Medium
from rft_fn.data.prompts import Prompt
from rft_fn.data.templates import fill
from rft_fn.reward import forms, verdicts
from rft_fn.reward.asker import Asker
from rft_fn.reward.event_loop import in_thread
from rft_fn.reward.reward_record import Reward
from rft_fn.reward.rubric_judge import CRITERION, by_criterion
from rft_fn.reward.scoring import responses
from rft_fn.reward.signature import Messages, text
from rft_fn.types import Engine, Sampling

__all__ = ["generative", "generative_by_name"]

Log = Callable[[str, Any], None]
"""Logs a value under a name: `log_metric` and `log_extra` of the convention."""


def generative(
    engine: Engine,
    tokenizer: Any,
    *,
    form: forms.Form | None = None,
    sampling: Sampling | None = None,
    votes: int = 1,
    vote: verdicts.Vote = verdicts.mean,
    against: str = "",
    both_orders: bool = True,
    unparsable: float | str | None = 0.0,
    limit: float = 0.9,
    patience: int = 3,
    processing: Processing | None = None,
    served: bool = False,
) -> Reward:
    """Return a reward that asks a judge, in [0, 1].

    `engine` samples the judge's answers, with `tokenizer`. `form` is the question and the parser, by default
    `forms.rating()`. Each question is answered `votes` times, and `vote` makes one verdict of them. Without
    `sampling` one answer is greedy, and several are sampled at temperature 1.

    A form for pairs compares a response with the text in the column `against`, or, without one, with all
    others to its prompt; the reward is the share that it wins. With `both_orders` each pair is asked about
    twice, with the sides swapped, so that a judge that prefers a place is worth 0.5. For G responses to a
    prompt there are 2 G questions with a reference, and G (G - 1) within the group; half without.

    Keys of the samples are derived from `keys` of the convention; without them from the texts. Only tokens
    that the judge sampled are read. An answer that was cut off has no verdict, nor has a question that does
    not fit into the judge's window. `unparsable` is the reward of a response without any verdict: a number,
    None where the judge then does not apply, or "error". ValueError, with three answers, once at least the
    share `limit` of them has no verdict in `patience` calls in a row.

    Metrics: `unparsable`, the share of answers without a verdict; `cut_off`, the share that met max_new;
    `too_long`, the share of questions that were not asked; `spread`, the standard deviation of the samples
    of a question, and `consistent`, the share of pairs with the same winner in both orders, where there are
    any. The first answer about each response goes to the trajectories as `said`, and with several votes on
    one response as `agreement` the share of them that are the most frequent one.

    With `processing`, for a judge that sees or hears, the media of the prompt come before a question. With
    `served`, for an engine on servers, the reward returns an awaitable: other rewards compute, and other
    judges are asked, while it waits for the answers. ValueError for options that do not go together.
    """
    form = form or forms.rating()
    if sampling is None:
        sampling = Sampling(temperature=verdicts.temperature_for(votes), max_new=form.max_new)
    verdicts.check_count(votes)
    if votes > 1 and sampling.temperature == 0:
        raise ValueError(f"votes: expected a temperature above 0 for {votes} votes, got 0: all are alike")
    if against and not form.is_pair:
        raise ValueError(f"against: expected a form for pairs, which has {{a}} and {{b}}, got {against!r}")
    if isinstance(unparsable, str) and unparsable != "error":
        raise ValueError(f"unparsable: expected a number, None or 'error', got {unparsable!r}")
    judge = _Judge(
        engine=engine,
        tokenizer=tokenizer,
        form=form,
        sampling=sampling,
        votes=votes,
        vote=vote,
        against=against,
        both_orders=both_orders,
        unparsable=unparsable,
        waits=served,
        monitor=_ParseMonitor(form, limit, patience),
        asker=Asker(form, tokenizer, processing),
    )
    return Reward(
        fn=judge.judged,
        name="judge",
        columns=judge.columns,
        media=processing is not None,
        asynchronous=served,
        close=engine.close,
        engine=engine,
    )


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
    by: str = "",
    **options: Any,
) -> Reward:
    """Return `generative` of literal arguments, as a command line has them.

    `form` is a name of `forms.FORMS`; `vote` is mean, majority or median. `options` are further ones of
    `generative`, and of the form. With `by` the judge is asked by the rubric in that column, as
    `by_criterion` says; a form of scores then asks for 0, 1 or 2. ValueError for names and options that do
    not exist.
    """
    unparsable = options.get("unparsable", 0.0)
    if by:
        options = {"criteria": CRITERION, "high": 2} | options | {"unparsable": None}
    known = inspect.signature(generative).parameters.keys() - {"engine", "tokenizer", "form", "sampling"}
    question = forms.named(form, **{name: x for name, x in options.items() if name not in known})
    if temperature is None:
        temperature = verdicts.temperature_for(votes)
    judge = generative(
        engine,
        tokenizer,
        form=question,
        sampling=Sampling(temperature=temperature, top_p=top_p, max_new=max_new or question.max_new),
        votes=votes,
        vote=verdicts.named(vote),
        **{name: x for name, x in options.items() if name in known},
    )
    return by_criterion(judge, by, unparsable=unparsable) if by else judge


# ---------- a judge


class _Batch(NamedTuple):
    """What is judged; every sequence has B entries."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    groups: Sequence[Hashable]  # equal for completions of one prompt
    keys: Sequence[int]
    media: Sequence[Sequence[Medium]]


class _Answers(NamedTuple):
    """The answers of a judge to Q questions, K to each."""

    verdicts: Tensor  # [Q, K] float64; NaN where there is none
    texts: list[list[str]]  # Q lists of K texts; none for a question that was not asked
    cut_off: int
    too_long: int

    @property
    def parsed(self) -> list[bool]:
        """Return whether each answer has a verdict, in the order of `texts`."""
        rows = zip(self.verdicts.tolist(), self.texts, strict=True)
        return [x == x for row, texts in rows for x in row[: len(texts)]]


@dataclass(eq=False)
class _Judge:
    """A judge; see `generative` for its options."""

    engine: Engine
    tokenizer: Any
    form: forms.Form
    sampling: Sampling
    votes: int
    vote: verdicts.Vote
    against: str
    both_orders: bool
    unparsable: float | str | None
    waits: bool  # the function returns an awaitable
    monitor: "_ParseMonitor"
    asker: Asker

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the data that its questions show."""
        return self.form.columns + ((forms.column_of(self.against),) if self.against else ())

    def judged(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        *,
        groups: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
        log_metric: Log | None = None,
        log_extra: Log | None = None,
        media: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        **columns: Any,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Return the verdicts on a batch, in TRL's convention: asked, read, voted on, summed by response."""
        # without keys they are made of the texts, without groups equal prompts are one
        asked = [_transcript(prompt) for prompt in prompts]
        answered = [text(completion) for completion in completions]
        if keys is None:
            keys = [rng.fold_in(0, *both) for both in zip(asked, answered, strict=True)]
        media = media or [[] for _ in completions]
        shown = [[Medium(x["kind"], x.get("bytes") or x["url"]) for x in records] for records in media]
        batch = _Batch(asked, answered, columns, groups or asked, keys, shown)

        matches = self._matches(batch)
        questions = [self._prompt(match, batch) for match in matches]
        ask = partial(self._answers, questions, [_key_of(match, keys) for match in matches])
        decide = partial(self._decide, matches, len(answered), log_metric or _drop, log_extra or _drop)
        if not self.waits:
            return decide(ask())
        self.engine.wake()  # here, where it may be built: only one thread loads models
        return self._decide_later(ask, decide)

    async def _decide_later(
        self, ask: Callable[[], _Answers], decide: Callable[[_Answers], list[float | None]]
    ) -> list[float | None]:
        """Decide once the servers have answered; an engine is closed if nobody awaits its answers."""
        return decide(await in_thread(ask, self.engine.close))

    def _matches(self, batch: _Batch) -> list[verdicts.Match]:
        """Return the questions of a batch."""
        count = len(batch.completions)
        if not self.form.is_pair:
            return verdicts.single(count)
        if self.against:
            return verdicts.versus(count, both_orders=self.both_orders)
        return verdicts.round_robin(batch.groups, both_orders=self.both_orders)

    def _prompt(self, match: verdicts.Match, batch: _Batch) -> Prompt:
        """Return the prompt of one question, with the prompt and the columns of its first completion."""
        row = next(side for side in match if side is not None)
        values = {name: batch.columns[name][row] for name in self.columns if name in batch.columns}

        def side(i: int | None) -> str:
            if i is None:  # the reference of the row
                return fill("{" + self.against + "}", values, f"completion {row}")
            return batch.completions[i]

        own: dict[str, Any] = {"prompt": batch.prompts[row]}
        own |= {"a": side(match.a), "b": side(match.b)} if self.form.is_pair else {"response": side(row)}
        return self.asker.prompt(values | own, row, batch.media[row])

    def _answers(self, questions: Sequence[Prompt], keys: Sequence[int]) -> _Answers:
        """Ask the judge; questions that are too long for its window are left out."""
        # the questions that fit
        k = self.votes
        texts: list[list[str]] = [[] for _ in questions]
        read = torch.full((len(questions), k), torch.nan, dtype=torch.float64)
        with self._awake():
            window = self.engine.status().get("window") or float("inf")
            most = window - self.sampling.max_new
            fits = [i for i, prompt in enumerate(questions) if len(prompt.ids) <= most]
            prompts = [questions[i] for i in fits]
            rollout = self.engine.generate(prompts, [keys[i] for i in fits], n=k, sampling=self.sampling)

        # only what the judge itself has sampled is read; the last number of a cut answer may lack its end
        truncated = rollout.truncated.tolist()
        for row, answer in enumerate(responses(rollout, self.tokenizer)):
            i = fits[row // k]
            texts[i].append(answer)
            final = None if truncated[row] else verdicts.after_thoughts(answer)
            verdict = None if final is None else self.form.parse(final)
            if verdict is not None:
                read[i, row % k] = verdict
        return _Answers(read, texts, sum(truncated), len(questions) - len(fits))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Keep the judge's weights on the device within the block only, where its engine can sleep."""
        self.engine.wake()
        try:
            yield
        finally:
            if self.engine.status()["alive"]:
                self.engine.sleep()

    def _decide(
        self,
        matches: Sequence[verdicts.Match],
        count: int,
        log_metric: Log,
        log_extra: Log,
        answers: _Answers,
    ) -> list[float | None]:
        """Return the verdicts on `count` responses by the answers to all questions.

        A response that is the only one in its group wins half. ValueError where "error" was asked for.
        """
        self.monitor.see(answers)

        # one verdict for each question, then for each response
        verdict = self.vote(answers.verdicts)
        share = verdicts.shares(verdict, matches, count)
        for name, value in self._metrics(answers, matches, verdict).items():
            log_metric(name, value)
        first = [""] * count  # the first answer about each response
        for match, texts in zip(matches, answers.texts, strict=True):
            for side in match:
                if side is not None and texts and not first[side]:
                    first[side] = texts[0][:_KEPT]
        log_extra("said", first)
        if self.votes > 1 and not self.form.is_pair:
            log_extra(
                "agreement", [None if x != x else x for x in verdicts.agreement(answers.verdicts).tolist()]
            )

        judged = {side for match in matches for side in match}
        values: list[float | None] = []
        for i, x in enumerate(share.tolist()):
            if i not in judged:
                values.append(0.5)
            elif x == x:
                values.append(x)
            elif isinstance(self.unparsable, str):
                raise _no_verdict(self.form, f"none about completion {i}", [first[i]])
            else:
                values.append(self.unparsable)
        return values

    def _metrics(
        self, answers: _Answers, matches: Sequence[verdicts.Match], verdict: Tensor
    ) -> dict[str, float]:
        """Return the numbers to log about a batch."""
        metrics: dict[str, float] = {}
        if not matches:
            return metrics
        parsed = answers.parsed
        metrics["too_long"] = answers.too_long / len(matches)
        if parsed:
            metrics["unparsable"] = 1 - sum(parsed) / len(parsed)
            metrics["cut_off"] = answers.cut_off / len(parsed)
        if self.votes > 1 and any(parsed):
            metrics["spread"] = verdicts.spread(answers.verdicts)
        same = verdicts.consistent(verdict, matches)
        if same is not None:
            metrics["consistent"] = same
        return metrics


_KEPT = 2000  # characters of an answer that are kept for trajectories.jsonl


def _transcript(prompt: str | Messages) -> str:
    """Return a prompt as text; a conversation of several turns has the role before each."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return text(prompt)
    return "\n\n".join(f"{turn.get('role', '')}: {text([turn])}" for turn in prompt)


def _key_of(match: verdicts.Match, keys: Sequence[int]) -> int:
    """Return the key of a question: of the responses in it, and of their places."""
    return rng.fold_in(0, "judge", *("none" if side is None else keys[side] for side in match))


def _drop(name: str, value: Any, /) -> None:
    """Log nothing."""


# ---------- answers of a judge that have no verdict: examples of them, and when to stop


_EXAMPLES = 3
_WIDTH = 200  # characters of each
_REMEDY = "take a form that this judge can follow, or raise max_new"
_TOO_LONG = "take shorter criteria or a judge with a larger window, or lower max_new"


class _ParseMonitor:
    """Shows the first answers without a verdict, and stops a run that gets little else.

    `limit` is the share of answers without a verdict, and `patience` how many calls in a row may reach it.
    ValueError for a share outside of (0, 1] and for no patience.
    """

    def __init__(self, form: forms.Form, limit: float, patience: int):
        if not isinstance(limit, (int, float)) or not 0 < limit <= 1:
            raise ValueError(f"limit: expected a share of answers in (0, 1], got {limit!r}")
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience: expected at least 1 call, got {patience!r}")
        self.form = form
        self.limit = limit
        self.patience = patience
        self.bad = 0  # calls in a row
        self.shown = False

    def see(self, answers: _Answers) -> None:
        """Count one call. ValueError, with three examples, where it was one too many."""
        said = [answer for texts in answers.texts for answer in texts]
        unread = [answer for answer, good in zip(said, answers.parsed, strict=True) if not good]
        total = len(said) + answers.too_long
        bad = len(unread) + answers.too_long
        if not bad:
            self.bad = 0
            return

        # few enough are left, or this call is one of several
        self.bad = 0 if bad < self.limit * total else self.bad + 1
        got = f"none in {bad} of {total} answers"
        remedy = _REMEDY if unread else _TOO_LONG
        if answers.too_long:
            got += f" ({answers.too_long} questions do not fit into its window)"
        if self.bad >= self.patience:
            got += f", the last of {self.bad} calls in a row"
            raise _no_verdict(self.form, got, unread, remedy)
        if not self.shown:
            self.shown = True
            warnings.warn(str(_no_verdict(self.form, got, unread, remedy)), stacklevel=2)


def _no_verdict(form: forms.Form, got: str, said: Sequence[str], remedy: str = _REMEDY) -> ValueError:
    """Return the error of answers without a verdict, with the first three that differ."""
    examples = ", ".join(f"{answer!r:.{_WIDTH}}" for answer in list(dict.fromkeys(said))[:_EXAMPLES])
    return ValueError(
        f"judge: expected answers with a verdict such as {form.parse.write(1)!r}, got {got}; it said "
        f"{examples or 'nothing'}; {remedy}"
    )
