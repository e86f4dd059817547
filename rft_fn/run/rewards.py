"""The rewards of a command line, those of models among them, which a run loads once and closes at its end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft_fn import data, model, reward
from rft_fn.run import options
from rft_fn.run.resume import last_model
from rft_fn.run.setup import load_processing
from rft_fn.types import Experience, Strategy, TokenOut

__all__ = ["load_rewards"]

_BUDGET = 4096  # tokens that go through a reward model at once, where no option says


def load_rewards(specs: Sequence[str], cfg: options.Data, st: Strategy) -> reward.Weighted:
    """The rewards of a command line: what `reward.parse` knows, and models.

    model:FOLDER[:HEAD](budget=N)   one head of a scalar reward model, whose ranks share the rows out. It
                                    reads prompts with the system prompt and the chat template's arguments of
                                    `cfg`; see `reward.Reading`.

    FOLDER may be that of a run. The weights of a folder are loaded once for all its heads, when the rewards
    are called first; what is wrong with a folder is found here. `Weighted.close` ends it all. ValueError as
    `reward.parse` raises it.
    """
    sources = _Sources(cfg, st)
    return reward.parse(specs, {"model": sources.model})


class _Sources:
    """Makes rewards of models for one run."""

    def __init__(self, cfg: options.Data, st: Strategy):
        self.cfg = cfg
        self.st = st
        self.scalars: dict[str, _Scalar] = {}

    def model(self, target: str, /, *, budget: int | None = None) -> reward.ScalarReward:
        """A head of the scalar reward model in a folder."""
        folder, head = _folder_and_head(target)
        if folder not in self.scalars:
            self.scalars[folder] = _Scalar(folder, self.cfg, self.st)
        return self.scalars[folder].head(head, budget or getattr(self.cfg, "budget", _BUDGET))


class _Scalar:
    """A scalar reward model in a folder, loaded when it is called first."""

    def __init__(self, folder: str, cfg: options.Data, st: Strategy):
        self.folder = folder
        self.st = st
        self.heads = model.load_reward(folder, meta=True).heads  # without weights, which may be large
        self.reading = _reading(folder, cfg)
        self.first: reward.ScalarReward | None = None
        self.bound: tuple[Any, Any] | None = None

    def head(self, name: str, budget: int) -> reward.ScalarReward:
        """The reward of one head; all heads share a forward pass, with the budget of the first."""
        names = [head.name for head in self.heads]
        if not name and len(names) > 1:
            raise ValueError(f"expected model:FOLDER:HEAD, with one of its heads {', '.join(names)}")
        if self.first is None:
            how = {"reading": self.reading, "budget": budget}
            self.first = reward.scalar(self.score, self.heads, head=names[0], **how)
        return self.first.head(name or names[0])

    def score(self, rows: Experience, budget: int, /) -> TokenOut:
        """The scores of rows, by all ranks together."""
        if self.bound is None:
            self.bound = self.st.bind(model.load_reward(self.folder, meta=self.st.world > 1))
        return self.st.score(*self.bound, rows, budget, fields=("score",))


def _folder_and_head(target: str) -> tuple[str, str]:
    """(folder, head) of FOLDER[:HEAD]; a folder may have a colon in its name."""
    folder, colon, head = target.rpartition(":")
    if not colon or Path(target).is_dir():
        folder = target
        head = ""
    return last_model(folder), head


def _reading(folder: str, cfg: options.Data) -> reward.Reading:
    """How the model of a folder reads prompts and responses."""
    return reward.Reading(
        tokenizer=model.load_tokenizer(folder),
        system=cfg.system,
        chat_template_kwargs=data.literals(cfg.chat_template_kwargs),
        processing=load_processing(cfg, folder),
        window=model.read_window(folder),
    )
