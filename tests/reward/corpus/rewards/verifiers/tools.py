"""A rubric whose functions take no **kwargs, one of them async and one that reads `info` and `state`."""

import asyncio
import json

from .rubric import Rubric, XMLParser

parser = XMLParser(["think", "tool"], answer_field="tool")


def check_tools_reward_func(completion, answer) -> float:
    """1 for the calls that were wanted, in any order."""
    try:
        called, wanted = json.loads(parser.parse_answer(completion) or "[]"), json.loads(answer)
    except json.JSONDecodeError:
        return 0
    return float(all(c in wanted for c in called) and all(w in called for w in wanted))


async def brief_reward_func(completion, info, state) -> float:
    """1 below the length that the row allows."""
    await asyncio.sleep(0.01)
    state.setdefault("seen", 0)
    return float(len(completion[-1]["content"]) <= info["max_characters"])


rubric = Rubric(funcs=[check_tools_reward_func, brief_reward_func], weights=[1.0, 0.5], parser=parser)
