"""Functions that people write after TRL's guide, in its two data formats: text, and conversations."""

import asyncio
import re


def token_length_reward(completion_ids, **kwargs):
    """One for each token."""
    return [float(len(ids)) for ids in completion_ids]


def character_length_reward(completions, **kwargs):
    """One for each character; of text data."""
    return [float(len(text)) for text in completions]


def format_reward_func(completions, **kwargs):
    """1 for reasoning and answer in tags on one line; of conversations."""
    form = re.compile(r"^<think>.*?</think><answer>.*?</answer>$")
    replies = [completion[0]["content"] for completion in completions]
    return [1.0 if form.match(reply) else 0.0 for reply in replies]


def sorted_digits_reward(prompts, completions, solution, **kwargs):
    """The share of the solution that stands where it should; of conversations."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    replies = [completion[0]["content"] for completion in completions]
    return [sum(map(str.__eq__, reply, truth)) / len(truth) for reply, truth in zip(replies, solution)]


def boxed_reward_func(completions, ground_truth, **kwargs):
    r"""1 for the ground truth in \boxed{}; of text data."""
    found = [re.search(r"\\boxed\{([^}]*)\}", text) for text in completions]
    return [float(m is not None and m[1] == truth) for m, truth in zip(found, ground_truth)]


def math_reward_func(prompts, completions, task, **kwargs):
    """+-1 for sums, None for the rows of other tasks."""
    rewards = []
    for prompt, completion, kind in zip(prompts, completions, task):
        if kind != "math":
            rewards.append(None)
            continue
        a, b = map(int, re.findall(r"\d+", prompt))
        rewards.append(1.0 if completion.strip().endswith(str(a + b)) else -1.0)
    return rewards


def coding_reward_func(prompts, completions, task, **kwargs):
    """+-1 for code that compiles, None for the rows of other tasks."""
    rewards = []
    for completion, kind in zip(completions, task):
        if kind != "code":
            rewards.append(None)
            continue
        try:
            compile(completion, "completion", "exec")
            rewards.append(1.0)
        except SyntaxError:
            rewards.append(-1.0)
    return rewards


async def async_reward_func(prompts, completions, **kwargs):
    """1 for anything at all, after a wait."""
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


async def _asked(text, truth):
    await asyncio.sleep(0.02)
    return float(truth in text)


async def async_judge_reward(completions, ground_truth, **kwargs):
    """1 where a judge, asked of all at once, finds the ground truth in the text."""
    return await asyncio.gather(*(_asked(text, truth) for text, truth in zip(completions, ground_truth)))


def sync_judge_reward(completions, ground_truth, **kwargs):
    """The same from a plain function, which takes the loop that it finds, or a new one, and closes it."""
    loop = asyncio.new_event_loop()
    try:
        found = asyncio.get_event_loop()
        if not found.is_closed():
            loop = found
    except RuntimeError:
        asyncio.set_event_loop(loop)
    try:
        return [loop.run_until_complete(_asked(*pair)) for pair in zip(completions, ground_truth)]
    finally:
        loop.close()
        asyncio.set_event_loop(None)


def logging_reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    """Equality, with a column for the table of completions and a number for the plots."""
    rewards = [float(text.strip() == truth) for text, truth in zip(completions, ground_truth)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def curriculum_reward(completions, ground_truth, **kwargs):
    """Right answers count for more as the training proceeds: 1 in the first half, then 2."""
    state = kwargs["trainer_state"]
    late = state.global_step >= state.max_steps / 2
    worth = 2.0 if late else 1.0
    return [worth * (text.strip() == truth) for text, truth in zip(completions, ground_truth)]
