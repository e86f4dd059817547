"""The notebook that wants answers in one language: a completion that is no message is worth -5."""

COMMON = {"id": {"adalah", "yang", "dan", "jawaban", "ini"}, "en": {"the", "is", "and", "answer", "this"}}


def get_lang(text: str) -> str:
    words = text.lower().split()
    counts = {name: sum(word in common for word in words) for name, common in COMMON.items()}
    best = max(counts, key=counts.get)
    return best if counts[best] else "und"


def format_and_language_reward_func(completions, **kwargs):
    """5 for Indonesian, -3 for English, -5 for the rest and for what is no message."""
    scores = []
    for completion in completions:
        if not completion or not isinstance(completion[0], dict) or "content" not in completion[0]:
            print(f"no message: {completion!r}")
            scores.append(-5.0)
            continue
        scores.append({"id": 5.0, "en": -3.0}.get(get_lang(completion[0]["content"]), -5.0))
    return scores
