"""An environment, made by a call, that has its rubric: a score by likeness, and a fifth for the form."""

from difflib import SequenceMatcher

from .rubric import Rubric, XMLParser


class SingleTurnEnv:
    def __init__(self, dataset, parser, rubric):
        self.dataset = dataset
        self.parser = parser
        self.rubric = rubric


def load_environment(format_weight=0.2, **kwargs):
    parser = XMLParser(["think", "answer"])

    def lcs_reward_func(completion, answer, **kwargs) -> float:
        """How like the answer the response is."""
        return SequenceMatcher(None, parser.parse_answer(completion) or "", answer).ratio()

    rubric = Rubric([lcs_reward_func, parser.get_format_reward_func()], [1.0, format_weight], parser)
    return SingleTurnEnv(dataset=[], parser=parser, rubric=rubric)
