"""The vision notebook's two: prompts are rendered before training, so prompts and completions are text."""

REASONING_START, REASONING_END = "<REASONING>", "</REASONING>"
SOLUTION_START, SOLUTION_END = "<SOLUTION>", "</SOLUTION>"


def formatting_reward_func(completions, **kwargs):
    """1 for one piece of reasoning, 1 for one solution."""
    import re

    scores = []
    for completion in completions:
        score = 0
        for start, end in ((REASONING_START, REASONING_END), (SOLUTION_START, SOLUTION_END)):
            score += len(re.findall(f"{start}(.*?){end}", completion, re.DOTALL)) == 1
        scores.append(score)
    return scores


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    """2 for the answer, line breaks aside, in the only solution."""
    import re

    print("-" * 20, prompts[0], answer[0], completions[0], sep="\n")
    rewards = []
    for completion, truth in zip(completions, answer):
        found = re.findall(f"{SOLUTION_START}(.*?){SOLUTION_END}", completion, re.DOTALL)
        right = len(found) == 1 and found[0].replace("\n", "") == truth
        rewards.append(2.0 if right else 0.0)
    return rewards
