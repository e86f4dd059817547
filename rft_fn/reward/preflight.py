"""Check rewards on made-up responses, before a model is loaded."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rft_fn import packing, rng
from rft_fn.data.row_paths import value_at
from rft_fn.reward.combine import Weighted, columns
from rft_fn.reward.foreign import messages, texts
from rft_fn.reward.joint import Joint
from rft_fn.reward.media_records import media_records
from rft_fn.reward.references import alternatives
from rft_fn.reward.reward_record import Reward
from rft_fn.reward.signature import Columns, Score, Scored, as_messages
from rft_fn.reward.signature import text as text_of
from rft_fn.text import error_text
from rft_fn.types import Rollout

__all__ = ["check", "made_up"]

_ANSWERS = ("answer", "solution", "ground_truth", "reward_model.ground_truth", "label", "reference", "target")


def check(
    score: Score,
    rows: Sequence[Any],
    *,
    answer: str = "",
    joints: Mapping[str, Joint] | None = None,
    tokenizer: Any = None,
) -> dict[str, Scored]:
    r"""Score made-up completions, so that a broken reward fails early.

    `rows` are prompts (`data.Prompt`) or rows of the data. Completions: "empty"; "garbage", letters and
    punctuation drawn by the index of the row; and, where the rows have an answer, "answer", the reference,
    "boxed", the reference in \boxed{}, and "tags", in <think> and <answer>. The answer is at the path
    `answer`; without one, at the first of a few usual names that the rows have. Returns the scores by these
    names. `joints` are the values of joint rewards, as `made_up` gives them.

    Raises what `score` raises, and ValueError for no rows. A reward that cannot read completions in the form
    of the data, but could in the other (text or messages), is a ValueError with that advice. Warns of a
    reward that gives everything the same score, and where no reference scores above the garbage (the reward
    cannot tell right from wrong, or wants another format: look at the returned parts). With the
    `tokenizer` of the prompts it also warns of a reward that looks for a tag, such as <think>, that the chat
    template has already opened at the end of the prompts.
    """
    if not rows:
        raise ValueError("rows: expected at least one row of the dataset, got none")

    # the columns that all rows have
    asked = [_question(row) for row in rows]
    shared = [name for name in asked[0].row if all(name in x.row for x in asked)]
    table = {name: [x.row[name] for x in asked] for name in shared}
    trials = _Trials(asked, table, _tries([x.row for x in asked], answer, columns(score)), joints)
    scored: dict[str, Scored] = {}
    try:
        for name in trials.made:
            scored[name] = trials.score(score, name)
    except Exception as error:
        _explain(error, score, trials)
        raise
    opened = _opened(asked, tokenizer)
    if opened and "tags" in scored and isinstance(score, Weighted):
        inside = [text.partition(opened)[2] for text in trials.made["tags"]]
        _warn_of_opened(score, opened, scored["tags"], trials.score(score, "tags", inside))
    constant = isinstance(score, Weighted) and _warn_of_constants(score, scored, trials)
    if "answer" in scored and not constant:
        known = torch.stack([scored[name].total for name in ("answer", "boxed", "tags")])
        best = known.max(0).values
        if not (best > scored["garbage"].total).any():
            warnings.warn(
                f"reward: the reference answers score no more than garbage does: {best.tolist()} "
                f"against {scored['garbage'].total.tolist()}",
                stacklevel=2,
            )
    return scored


def made_up(score: Score, prompts: Sequence[Any], tokenizer: Any, *, answer: str = "") -> dict[str, Joint]:
    """Return the joint rewards of the completions that `check` makes up, by name, not computed yet.

    ValueError for rows that are no prompts, and without a tokenizer.
    """
    if tokenizer is None or not all(hasattr(p, "ids") for p in prompts):
        raise ValueError("check: expected prompts (data.Prompt) and their tokenizer, which a model needs")
    tries = _tries([_question(p).row for p in prompts], answer, columns(score))
    return {
        name: Joint(score, _rollout(prompts, made, tokenizer), prompts, tokenizer)
        for name, made in tries.items()
    }


def _rollout(prompts: Sequence[Any], made: Sequence[str], tokenizer: Any) -> Rollout:
    """Make a rollout of one made-up response to each prompt, with its end token."""
    rows = []
    for p, text in zip(prompts, made, strict=True):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        mask = [False] * len(p.ids) + [True] * len(ids)
        rows.append(([*p.ids, *ids], mask, p.media))
    exp = packing.conversations(rows)
    none = torch.zeros(len(rows), dtype=torch.long)
    return Rollout(
        tokens=exp.tokens,
        mask=exp.mask,
        logp=exp.old_logp,
        length=exp.length,
        truncated=none.bool(),
        group=torch.arange(len(rows)),
        version=none,
        media=exp.media,
    )


class _Question(NamedTuple):
    """A row, and its prompt in the form of the data."""

    row: Mapping[str, Any]
    prompt: Any  # text or messages
    ids: Sequence[int] = ()
    media: Sequence[Mapping[str, Any]] = ()

    @property
    def in_messages(self) -> bool:
        return not isinstance(self.prompt, str)


def _question(row: Any) -> _Question:
    """Return the question of a prompt or a row; a row has it in its column "prompt" or "question"."""
    if hasattr(row, "columns") and hasattr(row, "text"):
        asked = row.text if row.messages is None else list(row.messages)
        media = media_records(getattr(row, "sources", ()))
        return _Question(row.columns, asked, getattr(row, "ids", ()), media)
    prompt = row.get("prompt", row.get("question", ""))
    if isinstance(prompt, (list, tuple)) and all(isinstance(turn, Mapping) for turn in prompt):
        return _Question(row, list(prompt))
    return _Question(row, str(prompt))


def _tries(rows: Sequence[Mapping[str, Any]], answer: str, read: Sequence[str]) -> dict[str, list[str]]:
    """Return the completions by name, one per row in each list; the score reads the columns `read`."""
    tries = {"empty": [""] * len(rows), "garbage": [_garbage(i) for i in range(len(rows))]}

    # the reference answers: the first path at which every row has one
    usual = ["answer", *(path for path in _ANSWERS if path in read)]
    for path in [answer] if answer else usual:
        references = [value_at(row, path, None) for row in rows]
        if None not in references:
            tries["answer"] = [_as_text(x) for x in references]
            tries["boxed"] = [rf"\boxed{{{x}}}" for x in tries["answer"]]
            tries["tags"] = [f"<think>\nso\n</think>\n<answer>\n{x}\n</answer>" for x in tries["answer"]]
            break
    return tries


def _as_text(reference: Any) -> str:
    """Return a reference as an answer; of several the first."""
    try:
        return alternatives(reference, "")[0].text
    except ValueError:  # of a reward that reads something else
        return str(reference)


def _garbage(index: int) -> str:
    """Return sixty characters that answer nothing: no digits, no braces, no backslash."""
    key = rng.fold_in(0, "garbage", index)
    return "".join(chr(ord("a") + rng.fold_in(key, i) % 26) if i % 7 else " ;" for i in range(60))


class _Trials(NamedTuple):
    """Made-up completions, and the rows that they answer."""

    asked: Sequence[_Question]
    table: Columns
    made: Mapping[str, Sequence[str]]  # name of the try -> a completion for each row
    joints: Mapping[str, Joint] | None

    def score(self, score: Score, name: str, texts: Sequence[str] | None = None) -> Scored:
        """Return the rewards of a try, in the form of the data; `texts` in place of its completions."""
        made = self.made[name] if texts is None else texts
        completions: list[Any] = []
        for question, text in zip(self.asked, made, strict=True):
            completions.append(as_messages(text, "assistant") if question.in_messages else text)
        prompts = [question.prompt for question in self.asked]
        if not isinstance(score, Weighted):
            return score(prompts, completions, self.table)
        return score(
            prompts,
            completions,
            self.table,
            completion_ids=[list(map(ord, text)) for text in made],  # there is no tokenizer yet
            prompt_texts=[text_of(x.prompt) for x in self.asked],
            prompt_ids=[x.ids for x in self.asked],
            truncated=[False] * len(made),
            groups=range(len(made)),
            keys=range(len(made)),
            media=[x.media for x in self.asked],
            known=None if self.joints is None else self.joints[name].of_rows(range(len(made))),
        )

    def tells_apart(self, fn: Reward) -> bool:
        """Return whether a reward runs and tells the tries apart."""
        try:
            score = Weighted({"it": (fn, 1.0)})
            return not _is_constant({name: self.score(score, name) for name in self.made}, "it")
        except Exception:
            return False


# ---------- a tag that the chat template opens


def _opened(asked: Sequence[_Question], tokenizer: Any) -> str:
    """Return the tag, such as <think>, that all prompts end with; "" for none."""
    if tokenizer is None:
        return ""
    ends = [re.search(r"<\w+>(?=\s*$)", tokenizer.decode(x.ids[-16:])) for x in asked]
    tags = {end[0] if end else "" for end in ends}
    return tags.pop() if len(tags) == 1 else ""


def _warn_of_opened(score: Weighted, tag: str, whole: Scored, inside: Scored) -> None:
    """Warn of parts that score a response less where its opening tag is at the end of the prompt."""
    for name in score.components:
        if not (whole.parts[name] > inside.parts[name]).any():
            continue
        warnings.warn(
            f"reward {name!r}: it looks for {tag} in the response, and the chat template writes {tag} at the "
            "end of the prompt, so no response has it; three lines in a file put it back: `from FILE import "
            f"NAME`, `def reward(completions, **columns):`, `    return NAME(completions=[{tag!r} + c for c "
            "in completions], **columns)`",
            stacklevel=3,
        )


# ---------- the other form


def _other(asked: Sequence[_Question]) -> tuple[str, str, Callable[[Reward], Reward]]:
    """Return (the form of the data, the other form, the adapter to the other)."""
    return ("messages", "text", texts) if asked[0].in_messages else ("text", "messages", messages)


def _explain(error: Exception, score: Score, trials: _Trials) -> None:
    """Raise ValueError for a reward that has raised an error, and would not in the other form."""
    if not isinstance(score, Weighted) or score.running not in score.components:
        return

    # the reward that raised, by itself in the other form
    name = score.running
    own, other, wrap = _other(trials.asked)
    if trials.tells_apart(wrap(score.components[name][0])):
        raise ValueError(
            f"reward {name!r}: it cannot read completions that are {_form(own)}, the form of the data "
            f"({type(error).__name__}: {error_text(error)}), and can read {_form(other)}: write "
            f"{_spec(score, name, other)}"
        ) from error


def _warn_of_constants(score: Weighted, scored: dict[str, Scored], trials: _Trials) -> bool:
    """Warn of rewards that give everything the same score, with a remedy; True if there are any."""
    warned = False
    for name, (fn, _) in score.components.items():
        if not _is_constant(scored, name):
            continue

        # one that is not constant in the other form does not see the text here
        own, other, wrap = _other(trials.asked)
        value = scored["empty"].parts[name][0].item()
        line = f"reward {name!r}: it scores {value:g} for nothing, for garbage and for every reference"
        reads_other = trials.tells_apart(wrap(fn))
        if reads_other:
            line += (
                f"; it tells them apart where they are {_form(other)}, and the data's are {_form(own)}: "
                f"write {_spec(score, name, other)}"
            )
        if reads_other or "answer" in scored:
            warnings.warn(line, stacklevel=3)
            warned = True
    return warned


def _is_constant(scored: Mapping[str, Scored], name: str) -> bool:
    """Return whether a part has one value for all tries of all rows."""
    values = torch.cat([x.parts[name] for x in scored.values()])
    return bool((values == values[0]).all())


def _form(name: str) -> str:
    return {"text": "texts", "messages": "lists of messages"}[name]


def _spec(score: Weighted, name: str, form: str) -> str:
    """Return the text that gives a reward a form on the command line."""
    return f"{form}:{score.specs.get(name, name)}"
