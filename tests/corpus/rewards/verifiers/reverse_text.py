"""A rubric that is made by a call: a partial score by likeness, and a fifth for the form."""

from difflib import SequenceMatcher

from .rubric import Rubric, XMLParser


def load_rubric(format_weight=0.2):
    parser = XMLParser(["think", "answer"])

    def lcs_reward_func(completion, answer, **kwargs) -> float:
        """How like the answer the response is."""
        return SequenceMatcher(None, parser.parse_answer(completion) or "", answer).ratio()

    return Rubric([lcs_reward_func, parser.get_format_reward_func()], [1.0, format_weight], parser)
