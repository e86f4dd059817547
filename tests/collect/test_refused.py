"""Several processes refuse a bad prompt together, before anything is sampled, and ask for a reward once."""

import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import collect, data, engine, reward
from rft_fn.engine.lifetime import Rebuilds, Supervised
from rft_fn.rollout import take

SAMPLING = rft.Sampling(max_new=9)
BAD = {"empty": [[3], [4], [5], []], "long": [[3], [4], [5], [6] * 120], "text": ["1+", "2+", "3+", ""]}


def refusals(st):
    """What each bad batch raises here, and how many prompts were sampled until then."""
    eng, sampled = engine.hf(tiny.llama(), tiny.tokenizer()), []

    def generate(prompts, keys, **options):
        rollout = eng.generate(prompts, keys, **options)
        sampled.append(len(prompts))
        return rollout

    # as the engine of a run, which agrees on what has failed
    agreed = Rebuilds(0, lambda: None, lambda x: bool(st.gather(torch.tensor([float(x)])).max()), print)
    own = Supervised(
        lambda: engine.dead_after_failure(eng._replace(generate=generate)), rebuilds=agreed
    ).engine()
    calls = collect.EngineWorker(lambda: own)
    samples = collect.AsyncSampler(calls.engine(), st, calls=calls)
    found = {}
    for name, prompts in BAD.items():
        for way in (collect.gather_and_generate, None):
            try:
                if way:
                    way(own, st, prompts, range(4), n=1, sampling=SAMPLING)
                elif name != "text":
                    samples.begin(prompts, range(4), n=1, sampling=SAMPLING)
            except engine.BadRequest as error:
                found[name, bool(way)] = str(error), len(sampled)
    collect.gather_and_generate(own, st, BAD["text"][:3], range(3), n=1, sampling=SAMPLING)  # it is alive
    return found


def rows_of():
    """A rollout of four prompts in groups of 1 to 4 rows, out of order."""
    tokenizer = tiny.tokenizer()
    table = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]
    prompts, keys = data.take(data.from_rows(table, tokenizer, template="{question}", name="sums"), 4, seed=0)
    eng = engine.hf(tiny.llama(), tokenizer)
    whole = eng.generate(prompts, keys, n=4, sampling=SAMPLING)
    return take(whole, [9, 0, 15, 4, 5, 14, 13, 12, 8, 3]), prompts, tokenizer


def judged(st):
    """(the rewards of rows, how many responses this process was asked for)."""
    asked = []

    def length(completions, answer):
        asked.extend(completions)
        return [len(text) + float(a) / 8 for text, a in zip(completions, answer)]

    rollout, prompts, tokenizer = rows_of()
    score = reward.weighted(mine=(length, 1.0))
    found = collect.gather_and_judge_rows(st, score, rollout, prompts, tokenizer)
    count = len(asked)
    strange = rft.tree.replace(rollout, group=rollout.group + 1)
    try:
        collect.gather_and_judge_rows(st, score, strange, prompts, tokenizer)
    except ValueError as error:
        alone = reward.judge_rows(score, rollout, prompts, tokenizer)
        return found, count, str(error), len(asked) - count - len(alone), alone


def on_ranks(rank, _):
    st = rft.strategy.get_strategy()
    found = refusals(st), judged(st)
    st.close()
    return found


def test_ranks_refuse_the_same_prompt_and_share_the_rewards_of_rows():
    every = ranks.run(2, "test_refused:on_ranks", None)
    for rank, (refused, _) in enumerate(every):
        errors = {name: error for name, (error, _) in refused.items()}
        assert errors == {name: error for name, (error, _) in every[0][0].items()} and len(errors) == 5
        assert all(" in prompt 3" in error for error in errors.values())
        counts = [count for _, count in refused.values()]
        assert counts == [0, 0, 0, 0, 1 - rank]  # a text is refused by the engine of the rank that has it

    (first, n, line, again, alone), (second, m, *_) = (x for _, x in every)
    assert torch.equal(first, second) and torch.equal(first, alone) and n + m == len(first) and n and m
    assert "expected numbers of 4 prompts, got 4" in line and again == 0
