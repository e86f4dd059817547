"""Partial rollouts: responses that are cut by a budget and continued in later steps."""

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from test_ahead import Plain

import rft_fn as rft
from rft_fn import collect, rng
from rft_fn.collect import sample_partial

N, PROMPTS = 3, 2
SAMPLING = rft.Sampling(max_new=7, temperature=1.5)


def draw(step):
    """Prompts of different lengths, and their keys."""
    prompts = [[3 + (step + i) % 9] * (1 + (step + i) % 3) for i in range(PROMPTS)]
    return prompts, [rng.fold_in(1, step, i) for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def llama():
    """Its responses end early now and then."""
    lm = tiny.llama(4)
    return rft.engine.hf(lm, tiny.tokenizer(), batch=8)


def whole(eng, born):
    """The group of a prompt, sampled at once."""
    step, place = born
    prompts, keys = draw(step)
    return eng.generate(prompts[place : place + 1], keys[place : place + 1], n=N, sampling=SAMPLING)


def rows(rollout):
    """Tokens and mask of each row without its padding."""
    fields = zip(rollout.tokens, rollout.mask, rollout.length.tolist())
    return [(tokens[:size].tolist(), mask[:size].tolist()) for tokens, mask, size in fields]


@settings(max_examples=15)
@given(some.integers(1, 9), some.integers(1, 4))
def test_with_one_version_cut_and_continued_equals_uncut(llama, budget, steps):
    """Every group comes once, in the order in which they are finished, with the tokens of one long sample."""
    waiting, found = None, []
    for step in range(steps):
        done = sample_partial(
            llama.generate, draw, step, n=N, sampling=SAMPLING, budget=budget, waiting=waiting
        )
        waiting = done.waiting
        assert done.prompts and done.rollout.group.tolist() == [i // N for i in range(len(done.prompts) * N)]
        found += [
            (p, rft.rollout.take(done.rollout, range(i * N, i * N + N))) for i, p in enumerate(done.prompts)
        ]
    left = [] if waiting is None else waiting.born.tolist()
    everything = [[step, i] for step in range(steps) for i in range(PROMPTS)]
    assert len(found) + len(left) == len(everything)

    # the prompt of a group does not name it, its tokens do
    expected = [whole(llama, born) for born in everything if born not in left]
    assert sorted(map(rows, [r for _, r in found])) == sorted(map(rows, expected))
    by_rows = {str(rows(r)): r for r in expected}
    for prompt, got in found:
        want = by_rows[str(rows(got))]
        assert (
            got.truncated.tolist() == want.truncated.tolist()
            and got.tokens[0, : len(prompt)].tolist() == prompt
        )
        size = want.tokens.shape[1]
        torch.testing.assert_close(got.logp[:, :size], want.logp, rtol=0, atol=1e-4)
    if budget >= SAMPLING.max_new:
        assert waiting is None


class Uneven(Plain):
    """Its log-probs are its weights less the position; a response to the token 4 ends at max_new alone."""

    def generate(self, prompts, *args, **options):
        rollout = super().generate(prompts, *args, **options)
        long = torch.tensor([prompts[i][0] == 4 for i in rollout.group.tolist()])
        return rft.tree.replace(rollout, truncated=long)


def test_a_response_over_several_versions_keeps_each_tokens_own_log_prob():
    eng, waiting, versions, logp = Uneven(), None, [], []

    def short_and_long(step):
        return [[3], [4]], [rng.fold_in(2, step, i) for i in range(2)]

    for step in range(3):
        eng.load([("w", torch.tensor(step * 10.0))], version=step)
        how = {"n": 1, "sampling": SAMPLING, "budget": 4, "waiting": waiting}
        done = sample_partial(eng.generate, short_and_long, step, **how)
        waiting = done.waiting
        versions.append(done.rollout.version.tolist())
        logp.append([x[m].tolist() for x, m in zip(done.rollout.logp, done.rollout.mask)])
    first = [0.0, -1.0, -2.0, -3.0]
    assert versions == [[0], [0, 1], [1, 2]]
    row = done.rollout.versions[0][done.rollout.mask[0]]
    assert row.tolist() == [1] * 4 + [2] * 3  # and the second row, of one version, has that one
    assert done.rollout.versions[1].tolist() == (2 * done.rollout.mask[1]).tolist()
    assert collect.staleness(done.rollout, 2) == {
        "rollout/staleness": (4 / 7 + 0) / 2,
        "rollout/staleness_max": 1.0,
    }
    assert logp[0] == [first] and logp[1] == [[*first, 10, 9, 8], [x + 10 for x in first]]
    assert logp[2][0] == [*(x + 10 for x in first), 20, 19, 18] and waiting.born.tolist() == [[2, 1]]


def test_a_step_has_something_to_learn_from():
    """Where no group is finished all grow again, until one is."""
    eng = Uneven()

    def long(step):
        return [[4], [4]], [rng.fold_in(2, step, i) for i in range(2)]

    done = sample_partial(eng.generate, long, 0, n=2, sampling=SAMPLING, budget=3)
    assert len(done.prompts) == 2 and done.waiting is None
    assert [call[0] for call in eng.calls] == ["generate"] * 3
    assert done.rollout.mask.sum(-1).tolist() == [7] * 4 and done.rollout.truncated.all()


def test_a_budget_of_nothing_is_refused(llama):
    with pytest.raises(ValueError, match="partial: expected a budget >= 1, got 0"):
        sample_partial(llama.generate, draw, 0, n=N, sampling=SAMPLING, budget=0)
