"""The collector: each way is the function of that way, and its state is all that the next step needs."""

from fractions import Fraction

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import collect, data, engine, tree
from rft_fn.data import curriculum

SAMPLING = rft.Sampling(max_new=5, temperature=3.0)  # so that some responses end early
STRATEGY = rft.strategy.get_strategy()
N, G, STEPS = 4, 3, 5


def rows(count, tag):
    return [{"question": f"{tag}{i}+1=", "answer": str(i)} for i in range(count)]


def prompts_of(*counts):
    parts = [
        data.from_rows(rows(n, tag), tiny.tokenizer(), name=f"part {tag}") for tag, n in enumerate(counts)
    ]
    return parts[0] if len(parts) == 1 else data.mix(parts, [Fraction(1)] * len(parts))


def judge(rollout, prompts, step):
    """A reward by the tokens: whether their sum is even."""
    total = (rollout.tokens * rollout.mask).sum(-1).view(len(prompts), -1)
    return rft.reward.Judged(reward=(total % 2).float(), parts={}, texts=[""] * total.numel())


def source(dataset, samples=None):
    samples = samples or collect.AsyncSampler(engine.hf(tiny.llama(), tiny.tokenizer()), STRATEGY)
    return collect.Source(STRATEGY, samples, dataset, judge, SAMPLING, seed=3, steps=STEPS)


def played(collector, state, steps):
    """(the batches of these steps, the state after each)."""
    batches, states = [], [state]
    for step in steps:
        batch, state = collector.next(state, step)
        batches.append(batch)
        states.append(state)
    return batches, states


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def alike(a, b):
    assert [p.text for p in a.prompts] == [p.text for p in b.prompts]
    assert same(a.rollout, b.rollout) and torch.equal(a.judged.reward, b.judged.reward)
    assert dict(a.metrics) == dict(b.metrics)


WAYS = {
    "plain": {},
    "rounds": {"rounds": 3},
    "partial": {"partial_budget": 1, "group": 1},
    "curriculum": {"curriculum": 8},
    "curriculum in rounds": {"curriculum": 8, "rounds": 2},
    "greedy": {"greedy": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_a_function_of_the_state_and_the_step(way):
    """A state is not changed, and a collector of another process goes on from it."""
    dataset = prompts_of(9, 7)
    first = collect.collector(source(dataset), prompts=N, **{"group": G} | WAYS[way])
    batches, states = played(first, first.init(), range(STEPS))
    again = collect.collector(source(dataset), prompts=N, **{"group": G} | WAYS[way])
    late, _ = played(again, first.save(states[2]), range(2, STEPS))
    for batch, want in zip(late, batches[2:], strict=True):
        alike(batch, want)
    assert same(states[0], first.init())


def test_each_way_is_its_function():
    dataset = prompts_of(9, 7)
    plain = source(dataset)
    draw = lambda step, i=0: data.draw(dataset, N, step, 3, round=i)  # noqa: E731

    def answer(asked, keys):
        rollout = plain.samples.generate(asked, keys, n=G, sampling=SAMPLING)
        return rollout, judge(rollout, asked, 1)

    # groups with rewards that differ
    collector = collect.collector(plain, prompts=N, group=G, rounds=3)
    got, _ = collector.next(collector.init(), 1)
    want = collect.sample_varied_groups(answer, lambda i: draw(1, i), N, rounds=3)
    alike(got, collect.Batch(want.prompts, want.rollout, want.judged, None, want.metrics()))

    # responses that grow
    collector = collect.collector(plain, prompts=N, group=1, partial_budget=1)
    (_, got), (_, state, _) = played(collector, collector.init(), [0, 1])

    def generate(asked, keys, **how):
        return collect.gather_and_generate(plain.samples.engine, STRATEGY, asked, keys, **how)

    want = collect.sample_partial(
        generate, draw, 1, n=1, sampling=SAMPLING, budget=1, waiting=state["waiting"]
    )
    assert same(got.rollout, want.rollout) and state["waiting"] is not None

    # sources that are drawn by their shares
    collector = collect.collector(plain, prompts=N, group=G, curriculum=8, floor=0.1)
    got, state = collector.next(collector.init(), 0)
    asked, keys, levels = curriculum.draw(curriculum.init(dataset), dataset, N, 0, 3, floor=0.1)
    rollout, judged = answer(asked, keys)
    levels = curriculum.observe(levels, dataset, asked, judged.reward, window=8)
    assert same(got.rollout, rollout) and same(state["curriculum"], levels)
    assert got.metrics["share/part 0"] == curriculum.metrics(levels, dataset, floor=0.1)["share/part 0"]


def test_a_greedy_answer_to_each_prompt():
    collector = collect.collector(source(prompts_of(9)), prompts=N, group=G, greedy=True)
    batch, _ = collector.next(collector.init(), 0)
    answers, graded = batch.greedy
    assert answers.sampling.temperature == 0 and graded.reward.shape == (N, 1)
    assert same(batch.rollout, collect.collector(source(prompts_of(9)), prompts=N, group=G).next(
        collector.init(), 0)[0].rollout)  # fmt: skip


def test_rollouts_that_are_ahead_are_in_the_state_that_is_saved():
    """Their versions are of the schedule, also when a run goes on from a checkpoint."""

    def sampler():
        calls = collect.EngineWorker(lambda: engine.hf(tiny.llama(), tiny.tokenizer()))
        return collect.AsyncSampler(calls.engine(), STRATEGY, calls=calls)

    dataset = prompts_of(9)
    samples = sampler()
    collector = collect.collector(source(dataset, samples), prompts=N, group=G, ahead=2)
    batches, states = played(collector, collector.init(), range(2))
    saved = collector.save(states[-1])
    samples.close()
    assert not states[-1]["ahead"] and len(saved["ahead"]) == 2  # of steps 2 and 3

    again = sampler()
    collector = collect.collector(source(dataset, again), prompts=N, group=G, ahead=2)
    names = {entry["name"] for entry in saved["ahead"]}
    late, states = played(collector, saved, range(2, STEPS))
    again.close()
    plain = collect.collector(source(dataset), prompts=N, group=G)
    for batch, want in zip([*batches, *late], played(plain, plain.init(), range(STEPS))[0], strict=True):
        alike(batch, want)
    assert len(names) == 2 and not states[-1]["ahead"]


def test_the_state_alone_says_what_was_sampled_before():
    """A collector that has seen no step takes the rollouts of a checkpoint from its argument, each once."""

    def one():
        calls = collect.EngineWorker(lambda: engine.hf(tiny.llama(), tiny.tokenizer()))
        samples = collect.AsyncSampler(calls.engine(), STRATEGY, calls=calls)
        return collect.collector(source(prompts_of(9), samples), prompts=N, group=G, ahead=2), calls

    first, calls = one()
    _, state = first.next(first.init(), 0)
    saved = first.save(state)
    calls.close()
    again, calls = one()
    batch, after = again.next(saved, 1)
    alike(again.next(saved, 1)[0], batch)  # the step may be taken again
    assert len(saved["ahead"]) == 2 and len(after["ahead"]) == 1 and after["ahead"][0] in saved["ahead"]
    whole = again.save(after)["ahead"]  # of step 2 from the state, and of step 3, which this process began
    calls.close()
    assert len(whole) == 2 and after["ahead"][0] in whole


@pytest.mark.parametrize(
    ("ways", "line"),
    [
        (
            {"partial_budget": 2, "ahead": 1},
            "partial: expected 0 with ahead 1, which samples whole responses, got 2",
        ),
        ({"partial_budget": 2, "rounds": 2}, "partial: .*rounds 2"),
        ({"curriculum": 4, "ahead": 1}, "curriculum: expected 0 with ahead 1, which draws .*, got 4"),
    ],
)
def test_ways_that_exclude_each_other(ways, line):
    with pytest.raises(ValueError, match=line):
        collect.collector(source(prompts_of(9)), prompts=N, group=G, **ways)


def test_a_single_source_has_no_shares(capsys):
    collector = collect.collector(source(prompts_of(9)), prompts=N, group=G, curriculum=8)
    assert "curriculum: off, for there is one source of data" in capsys.readouterr().out
    assert collector.init()["curriculum"] is None
