"""What the loops of preferences add to their losses: rows, and the baselines of KTO and BCO."""

from types import SimpleNamespace

import pytest
import torch

from rft_fn import loss
from rft_fn.data.chat import Lesson
from rft_fn.data.pairs import Pair
from rft_fn.data.points import Point
from rft_fn.run import preferences

PROMPTS = [[1, 2], [3, 4, 5], [6]]
REPLIES = [[10, 11], [12], [13, 14, 15]]
WORSE = [[20], [21, 22], [23]]


def lesson(prompt, reply):
    return Lesson(ids=[*prompt, *reply], mask=[False] * len(prompt) + [True] * len(reply))


def points(labels=(1.0, 0.0, 1.0)):
    rows = zip(PROMPTS, REPLIES, labels)
    return [Point(lesson(p, r), (label,), {}, i) for i, (p, r, label) in enumerate(rows)]


def pairs():
    rows = zip(PROMPTS, REPLIES, WORSE)
    return [Pair(lesson(p, a), lesson(p, b), {}, i) for i, (p, a, b) in enumerate(rows)]


def config(name, *, unpaired):
    row = loss.PREFERENCES[name]
    return SimpleNamespace(loss=name, row=row, unpaired=unpaired, unit=1 if unpaired else 2, budget=64)


def read(exp):
    """(tokens, those in mask) of each row."""
    rows = zip(exp.tokens, exp.mask, exp.length.tolist())
    return [(tokens[:n].tolist(), tokens[mask].tolist()) for tokens, mask, n in rows]


def test_a_mismatched_row_has_the_response_to_the_next_prompt():
    found = read(preferences.mismatched(config("kto", unpaired=True), points()))
    others = [REPLIES[1], REPLIES[2], REPLIES[0]]
    assert found == [(prompt + other, other) for prompt, other in zip(PROMPTS, others)]


def test_both_sides_of_a_pair_are_mismatched_by_those_of_the_next_one():
    found = read(preferences.mismatched(config("kto", unpaired=False), pairs()))
    want = []
    for i, prompt in enumerate(PROMPTS):
        want += [(prompt + side[(i + 1) % 3], side[(i + 1) % 3]) for side in (REPLIES, WORSE)]
    assert found == want


@pytest.mark.parametrize("unpaired", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_baseline_of_kto_is_the_mean_log_ratio_of_mismatched_rows_and_at_least_0(unpaired, sign):
    """Log-probs here are sums of what each token has, so that matched rows have another mean."""
    cfg = config("kto", unpaired=unpaired)
    items = points() if unpaired else pairs()

    def policy(exp):
        return sign * exp.tokens.float() ** 2 / 100 * exp.mask

    def place(exp):
        return torch.arange(exp.tokens.shape[1]).float()

    def ref_logp(state, exp, *, unit):
        assert unit == cfg.unit
        return sign * place(exp) / 4 * exp.mask

    def score(by, state, exp, *, unit):
        assert unit == cfg.unit
        return SimpleNamespace(logp=ref_logp(state, exp, unit=unit) if by == "reference" else policy(exp))

    env = SimpleNamespace(reference="reference", policy="policy", score=score)
    found = preferences.with_reference(cfg, env, SimpleNamespace(params=None), items, shift=7.0)
    sums = []
    for whole, reply in read(preferences.mismatched(cfg, items)):
        first = len(whole) - len(reply)
        sums.append(sum(x**2 / 100 - (first + k) / 4 for k, x in enumerate(reply)))
    matched = preferences.experience(cfg, items)
    kl = max(0.0, sign * sum(sums) / len(sums))
    assert (kl > 0) == (sign > 0)
    torch.testing.assert_close(found.extra["baseline"], kl * matched.mask.float())
    torch.testing.assert_close(found.ref_logp, ref_logp(None, matched, unit=cfg.unit))
    assert found.extra["desirable"].equal(matched.extra["desirable"])
    assert read(found) == read(matched)


def test_other_losses_keep_their_baseline_or_have_none():
    def score(by, state, exp, *, unit):
        return SimpleNamespace(logp=-1.0 * exp.mask)

    env = SimpleNamespace(reference="reference", score=score)
    bco = preferences.with_reference(config("bco", unpaired=True), env, None, points(), shift=0.25)
    torch.testing.assert_close(bco.extra["baseline"], 0.25 * bco.mask.float())
    dpo = preferences.with_reference(config("dpo", unpaired=False), env, None, pairs(), shift=0.25)
    assert dpo.extra is None and dpo.ref_logp.equal(-1.0 * dpo.mask)


def test_labels_and_weights_of_rows():
    single = preferences.experience(config("kto", unpaired=True), points((1.0, 0.0, 0.25)))
    torch.testing.assert_close(single.extra["desirable"], torch.tensor([[1.0], [0.0], [0.25]]) * single.mask)
    torch.testing.assert_close(single.w.sum(-1), torch.full((3,), 1 / 3))
    sides = preferences.experience(config("bco", unpaired=False), pairs())
    assert sides.extra["desirable"].amax(-1).tolist() == [1, 0] * 3
    both = preferences.experience(config("dpo", unpaired=False), pairs())
    assert both.extra is None
    want = [[n] for p, a, b in zip(PROMPTS, REPLIES, WORSE) for n in (p + a, p + b)]
    assert [[row] for row, _ in read(both)] == want


@pytest.mark.parametrize("unpaired", [True, False])
def test_the_baseline_of_bco_is_the_mean_over_the_steps_of_the_middle_of_both_kinds(unpaired):
    cfg, name = config("bco", unpaired=unpaired), "responses" if unpaired else "pairs"
    seen = [(3.0, 1.0), (-1.0, -4.0), (0.5, 0.25), (8.0, 2.0)]
    shift = 0.0
    for step, (chosen, rejected) in enumerate(seen):
        values = {f"{name}/reward_chosen": chosen, f"{name}/reward_rejected": rejected}
        shift = preferences.rewards_mean(cfg, shift, values, step)
        assert shift == pytest.approx(sum(sum(x) / 2 for x in seen[: step + 1]) / (step + 1))
    assert preferences.rewards_mean(config("kto", unpaired=True), 0.75, {}, 3) == 0.75


def test_a_batch_of_one_kind_does_not_weigh_in_the_baseline_of_bco():
    """The mean is over the batches that have a middle, whichever of them comes first."""
    cfg = config("bco", unpaired=True)
    seen = [(None, -2.0), (3.0, 1.0), (5.0, None), (None, -9.0), (-1.0, -4.0), (0.5, 0.25)]
    shift, middles = 0.0, []
    for sides in seen:
        names = ("responses/reward_chosen", "responses/reward_rejected")
        values = {name: x for name, x in zip(names, sides) if x is not None}
        shift = preferences.rewards_mean(cfg, shift, values, len(middles))
        if None not in sides:
            middles.append(sum(sides) / 2)
        assert shift == pytest.approx(sum(middles) / max(len(middles), 1))
