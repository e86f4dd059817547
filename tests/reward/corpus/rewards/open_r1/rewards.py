"""Rewards as open-r1 has them: chat completions, a column `solution`, factories with a schedule."""

import asyncio
import json
import math
import re
import sys
from typing import Optional

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from .utils import get_provider


def _text(completion):
    return completion[0]["content"]


def _gold(solution):
    return parse(solution, extraction_mode="first_match")


def _is_right(content, gold):
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    answer = parse(content, extraction_config=[config], extraction_mode="first_match")
    return verify(gold, answer)


def accuracy_reward(
    completions: list[list[dict[str, str]]], solution: list[str], **kwargs
) -> list[Optional[float]]:  # noqa: UP045
    """1 for an answer that equals the solution, None where the solution is no formula."""
    rewards = []
    for completion, reference in zip(completions, solution):
        gold = _gold(reference)
        if not gold:
            print("no formula in this solution:", reference)
            rewards.append(None)
            continue
        try:
            rewards.append(float(_is_right(_text(completion), gold)))
        except Exception as error:
            print(f"could not compare: {error}")
            rewards.append(None)
    return rewards


def format_reward(completions, **kwargs):
    """1 for reasoning in <think>, then the answer in <answer>, each tag on a line of its own."""
    form = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)
    return [float(form.match(_text(c)) is not None) for c in completions]


def tag_count_reward(completions, **kwargs) -> list[float]:
    """A quarter for each of the four tags that is there once."""
    tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")

    def share(text):
        return sum(text.count(tag) == 1 for tag in tags) / len(tags)

    return [share(_text(c)) for c in completions]


def reasoning_steps_reward(completions, **kwargs):
    r"""A third for each sign of a step ("Step 2:", "1.", a bullet, "Finally,"), at most 1."""
    sign = r"Step \d+:|^\d+\.|\n[-*]|First,|Second,|Next,|Finally,"
    return [min(1.0, len(re.findall(sign, _text(c))) / 3) for c in completions]


def len_reward(completions: list[dict[str, str]], solution: list[str], **kwargs) -> float:
    """From 1/2 for the shortest of the batch to -1/2 for the longest; a wrong answer never gains."""
    texts = [_text(c) for c in completions]
    right = []
    for text, reference in zip(texts, solution):
        gold = _gold(reference)
        right.append(not gold or _is_right(text, gold))
    shortest = min(map(len, texts))
    spread = max(map(len, texts)) - shortest
    if not spread:
        return [0.0] * len(texts)
    gains = [0.5 - (len(text) - shortest) / spread for text in texts]
    return [gain if ok else min(0.0, gain) for gain, ok in zip(gains, right)]


def get_cosine_scaled_reward(
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    max_len: int = 1000,
):
    def cosine_scaled_reward(completions, solution, **kwargs):
        """Right answers are worth most when they are short, wrong ones cost most when they are short."""
        rewards = []
        for completion, reference in zip(completions, solution):
            text, gold = _text(completion), _gold(reference)
            if not gold:
                rewards.append(1.0)
                continue
            start, end = min_value_wrong, max_value_wrong
            if _is_right(text, gold):
                start, end = max_value_correct, min_value_correct
            nearness = (1 + math.cos(math.pi * len(text) / max_len)) / 2
            rewards.append(end + (start - end) * nearness)
        return rewards

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int, max_penalty: float, language: str = "en"):
    if max_penalty > 0:
        raise ValueError(f"max_penalty: expected at most 0, got {max_penalty}")
    if language != "en":
        raise ValueError(f"language: {language} needs a tokenizer of words of its own")

    def repetition_penalty_reward(completions, **kwargs) -> float:
        """max_penalty times the share of n-grams of words that came before."""
        rewards = []
        for completion in completions:
            words = _text(completion).lower().split()
            grams = [tuple(words[i : i + ngram_size]) for i in range(len(words) - ngram_size + 1)]
            repeated = len(grams) - len(set(grams))
            rewards.append(max_penalty * repeated / len(grams) if grams else 0.0)
        return rewards

    return repetition_penalty_reward


def get_code_format_reward(language: str = "python"):
    def code_format_reward(completions, **kwargs):
        """1 for the two tags with a block of code in the answer; a column `language` wins."""
        languages = kwargs["language"] if "language" in kwargs else [language] * len(completions)
        rewards = []
        for completion, name in zip(completions, languages):
            block = rf"```{re.escape(name)}\n.*?```"
            form = rf"<think>\n.*?\n</think>\n<answer>\n.*?{block}.*?\n</answer>"
            rewards.append(float(re.fullmatch(form, _text(completion), re.DOTALL) is not None))
        return rewards

    return code_format_reward


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    def soft_overlong_punishment_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
        """0 up to a soft limit of tokens, then down to -1 at the hard one."""
        free = max_completion_len - soft_punish_cache
        return [-min(1.0, max(0, len(ids) - free) / soft_punish_cache) for ids in completion_ids]

    return soft_overlong_punishment_reward


def extract_code(text, language="python"):
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else ""


def code_reward(completions, num_parallel: int = 2, provider_type: str = "e2b", **kwargs) -> list[float]:
    """The share of a problem's test cases that the last block of code passes, in a provider's sandbox."""
    scripts = []
    for completion, info in zip(completions, kwargs["verification_info"]):
        code = extract_code(completion[-1]["content"])
        scripts.append(f"run({json.dumps(code)}, {json.dumps(info['test_cases'])})")
    provider = get_provider(provider_type=provider_type, num_parallel=num_parallel)
    return provider.execute_scripts(scripts, ["python"] * len(scripts))


def binary_code_reward(completions, num_parallel: int = 2, provider_type: str = "e2b", **kwargs):
    """1 where the code passes every test case."""
    shares = code_reward(completions, num_parallel=num_parallel, provider_type=provider_type, **kwargs)
    return [float(share > 0.99) for share in shares]


def _event_loop():
    try:
        return asyncio.get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


async def _passes(code, test):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await process.communicate(test["input"].encode())
    return out.decode().split() == test["output"].split()


def local_code_reward(
    completions, test_batch_size: int = 1, scoring_mode: str = "weighted_sum", **kwargs
) -> list[float]:
    """The share of official tests that pass; a function like any other, with an event loop inside."""
    loop = _event_loop()

    async def score(completion, tests):
        code = extract_code(completion[-1]["content"])
        if not code:
            return 0.0
        passed = await asyncio.gather(*(_passes(code, test) for test in tests))
        return sum(passed) / len(passed) if scoring_mode == "weighted_sum" else float(all(passed))

    async def everything():
        return await asyncio.gather(*map(score, completions, kwargs["official_tests"]))

    return loop.run_until_complete(everything())
