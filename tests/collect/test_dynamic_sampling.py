"""Dynamic sampling: which groups fill a batch, that all of a row stays with it, and that it is a function."""

import pytest
import tiny
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

import rft_fn as rft
from rft_fn import collect, data, engine, model, packing, reward, tree, weight
from rft_fn.reward_shaping import varied
from rft_fn.types import Media, Rollout

SIZE = 3  # responses per prompt
FLAT, SPREAD = [1.0, 1.0, 1.0], [0.0, 1.0, 0.5]


def number(name):
    """A token that names a row: "1.2.0" is 120."""
    return int(name.replace(".", ""))


def media_of(names):
    """Row i of a round owns i % 3 images, each of which holds the row's number."""
    return Media.of_prompts([{"pixels": torch.full((i % 3, 1), number(x))} for i, x in enumerate(names)])


class Source:
    """Rounds of groups with given rewards. Each row names its origin; each round has its width."""

    def __init__(self, rewards, widths=(4, 6, 5, 7), media=()):
        self.rewards, self.widths, self.media, self.asked = rewards, widths, media, []

    def draw(self, i):
        self.asked.append(i)
        count = len(self.rewards[i])
        return [f"{i}.{g}" for g in range(count)], [100 * i + g for g in range(count)]

    def collect(self, prompts, keys):
        """The round is read from the keys, as the samples of an engine are."""
        i = keys[0] // 100
        names = [f"{p}.{j}" for p in prompts for j in range(SIZE)]
        width, rows = self.widths[i], len(names)
        mask = torch.zeros(rows, width, dtype=torch.bool)
        mask[:, 1:] = True
        tokens = torch.tensor([number(x) for x in names])[:, None].expand(-1, width).contiguous()
        rollout = Rollout(
            tokens=tokens, mask=mask, logp=-tokens.float() / 1000 * mask, length=torch.full((rows,), width),
            truncated=tokens[:, 0] % 2 == 0, group=torch.arange(rows) // SIZE, version=torch.full((rows,), 7),
            media=media_of(names) if i in self.media else None,
        )  # fmt: skip
        r = torch.tensor(self.rewards[i])
        parts = {"double": 2 * r, "name": tokens[:, 0].view(-1, SIZE).float()}
        return rollout, reward.Judged(reward=r, parts=parts, texts=names)


def fill(source, n, rounds):
    return collect.sample_varied_groups(source.collect, source.draw, n, rounds=rounds)


def aligned(found, source):
    """Everything of every row is of the group that the prompt names. Gives the names of the groups."""
    r, judged = found.rollout, found.judged
    names = [f"{p}.{j}" for p in found.prompts for j in range(SIZE)]
    assert judged.texts == names
    want = torch.tensor([number(x) for x in names])
    widths = torch.tensor([source.widths[int(x[0])] for x in names])
    inside = torch.arange(r.tokens.shape[1]) < widths[:, None]
    assert torch.equal(r.tokens, torch.where(inside, want[:, None], 0))
    assert torch.equal(r.mask, inside & (torch.arange(r.tokens.shape[1]) > 0))
    assert torch.equal(r.logp, -want[:, None].float() / 1000 * r.mask)
    assert torch.equal(r.length, widths) and torch.equal(r.truncated, want % 2 == 0)
    assert r.group.tolist() == [g for g in range(len(found.prompts)) for _ in range(SIZE)]
    assert set(r.version.tolist()) == {7}
    rewards = [source.rewards[int(p[0])][int(p[2:])] for p in found.prompts]
    assert torch.equal(judged.reward, torch.tensor(rewards))
    assert torch.equal(judged.parts["double"], 2 * judged.reward)
    assert judged.parts["name"].flatten().tolist() == want.tolist()
    return found.prompts


def same(a, b):
    """To the bit, shapes and media too."""
    assert a.prompts == b.prompts and a.judged.texts == b.judged.texts
    for x, y in zip(tree.leaves((a.rollout, a.judged[:2])), tree.leaves((b.rollout, b.judged[:2]))):
        assert x.dtype == y.dtype and torch.equal(x, y)
    assert a[3:] == b[3:]


def test_it_stops_as_soon_as_enough_groups_vary():
    source = Source([[SPREAD, FLAT, FLAT], [FLAT, SPREAD, SPREAD], [SPREAD] * 3])
    found = fill(source, 3, 3)
    assert source.asked == [0, 1] and found[3:] == (2, 6, 3)
    assert aligned(found, source) == ["0.0", "1.1", "1.2"]
    assert found.metrics() == {"sampling/rounds": 2.0, "sampling/varied": 0.5}


def test_groups_are_taken_in_the_order_in_which_they_were_drawn():
    """More vary than are needed: the last ones are left out, not the first."""
    source = Source([[FLAT, SPREAD], [SPREAD, SPREAD]])
    assert aligned(fill(source, 2, 5), source) == ["0.1", "1.0"]


def test_at_the_bound_the_first_of_the_flat_groups_fill_the_batch():
    source = Source([[FLAT, FLAT, FLAT, FLAT], [FLAT, FLAT, SPREAD, FLAT], [SPREAD, FLAT, FLAT, FLAT]])
    found = fill(source, 4, 3)
    assert source.asked == [0, 1, 2] and found[3:] == (3, 12, 2)
    assert aligned(found, source) == ["1.2", "2.0", "0.0", "0.1"]


def test_one_round_is_one_plain_collect():
    """Values, order, width and numbering of what was collected, whatever varies."""
    source = Source([[FLAT, SPREAD, FLAT]], media=(0,))
    found = fill(source, 3, 1)
    prompts, keys = source.draw(0)
    rollout, judged = source.collect(prompts, keys)
    same(found, collect.VariedGroups(prompts, rollout, judged, 1, 3, 1))
    assert aligned(found, source) == ["0.0", "0.1", "0.2"]


def test_a_first_round_in_which_all_vary_is_one_plain_collect():
    source = Source([[SPREAD, SPREAD], [SPREAD, SPREAD]])
    same(fill(source, 2, 2), fill(Source([[SPREAD, SPREAD]]), 2, 1))
    assert source.asked == [0]


def test_rounds_may_draw_more_or_fewer_than_the_batch():
    wide = Source([[FLAT, SPREAD, FLAT, SPREAD, SPREAD]])
    assert aligned(fill(wide, 2, 1), wide) == ["0.1", "0.3"]
    narrow = Source([[SPREAD], [FLAT, FLAT, FLAT], [SPREAD]])
    assert aligned(fill(narrow, 2, 3), narrow) == ["0.0", "2.0"]


@given(flat=st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=4),
       n=st.integers(1, 4))  # fmt: skip
def test_what_fills_a_batch_against_the_definition(flat, n):
    source = Source([[FLAT if x else SPREAD for x in row] for row in flat])
    rounds = len(flat)
    used = next((i for i in range(1, rounds + 1) if sum(not x for row in flat[:i] for x in row) >= n), rounds)
    drawn = [(f"{i}.{g}", x) for i, row in enumerate(flat[:used]) for g, x in enumerate(row)]
    if len(drawn) < n:
        return
    plain = used == 1 and len(drawn) == n  # nothing to choose from: left as it was drawn
    found = fill(source, n, rounds)
    want = [name for name, _ in sorted(drawn, key=lambda d: 0 if plain else d[1])]
    assert aligned(found, source) == want[:n]
    assert found[3:] == (used, len(drawn), sum(not x for _, x in drawn)) and source.asked == list(range(used))


def test_it_is_a_function_of_its_draws():
    rewards = [[SPREAD, FLAT, FLAT], [FLAT, SPREAD, FLAT], [FLAT, FLAT, SPREAD]]
    same(fill(Source(rewards), 3, 3), fill(Source(rewards), 3, 3))


@each(
    ("n", "rounds", "message"),
    [
        (2, 0, "^rounds: expected >= 1, got 0"),
        (2, -1, "^rounds: expected >= 1, got -1"),
        (5, 2, "^draw: expected 5 prompts or more in 2 rounds, got 4"),
    ],
)
def test_bad_input(n, rounds, message):
    with pytest.raises(ValueError, match=message):
        fill(Source([[SPREAD, FLAT], [FLAT, FLAT]]), n, rounds)


def images(found):
    """[(how many, of whom)] of each row."""
    media = found.rollout.media
    parts = media.sequences()["pixels"].split(media.count("pixels").tolist())
    return [(len(x), sorted(set(x.flatten().tolist()))) for x in parts]


def owned(name):
    """The media that `media_of` gave to the row of that name: three rows of a group own 0, 1, 2 images."""
    count = int(name[-1])
    return count, [number(name)] if count else []


@pytest.mark.parametrize(
    ("rewards", "want"),
    [
        ([[FLAT, SPREAD], [SPREAD, FLAT]], ["0.1", "1.0"]),
        ([[FLAT, FLAT], [SPREAD, FLAT]], ["1.0", "0.0"]),  # an earlier group fills up after a later one
    ],
)
def test_media_go_with_their_rows(rewards, want):
    source = Source(rewards, media=(0, 1))
    found = fill(source, 2, 2)
    assert aligned(found, source) == want
    assert images(found) == [owned(x) for x in found.judged.texts]


@pytest.mark.parametrize("media", [(0,), (1,)])
def test_a_round_without_media_does_not_shift_those_of_the_others(media):
    """A known fault of other libraries: a batch of text between batches of images moves every image."""
    source = Source([[FLAT, SPREAD], [SPREAD, FLAT]], media=media)
    found = fill(source, 2, 2)
    none = (0, [])
    want = [owned(x) if int(x[0]) in media else none for x in found.judged.texts]
    assert images(found) == want and any(x != none for x in want)


def test_no_media_stay_none():
    assert fill(Source([[FLAT, SPREAD], [SPREAD, FLAT]]), 2, 2).rollout.media is None


def digit_first(*, completions):
    """1 for a response that begins with a digit: about half of the groups of three vary."""
    return [float(text[:1].isdigit()) for text in completions]


SCORE, SAMPLING = reward.weighted(digit=(digit_first, 1.0)), rft.Sampling(max_new=5)


def sampled(n, rounds):
    """(VariedGroups, index of a prompt -> its rows as they were collected): as a training script calls it."""
    tokenizer, collected = tiny.tokenizer(), {}
    eng = engine.hf(tiny.llama(), tokenizer)
    dataset = data.from_task("addition", tokenizer, level=2, template="{short}")

    def gathered(prompts, keys):
        rollout = eng.generate(prompts, keys, n=3, sampling=SAMPLING)
        for i, p in enumerate(prompts):
            collected[p.index] = tree.map(lambda x: x[3 * i : 3 * i + 3], rollout)  # noqa: B023
        return rollout, reward.judge(SCORE, rollout, prompts, tokenizer)

    draw = lambda i: data.draw(dataset, n, 3, 0, round=i)  # noqa: E731
    return collect.sample_varied_groups(gathered, draw, n, rounds=rounds), collected


def test_a_batch_of_a_model_is_full_of_groups_with_variance():
    plain, _ = sampled(8, 1)
    assert 0 < varied(plain.judged.reward).sum() < 8  # there is something to draw again for
    found, collected = sampled(8, 6)
    assert varied(found.judged.reward).all() and found.judged.reward.shape == (8, 3)
    assert 1 < found.rounds < 6 and found.drawn == 8 * found.rounds == len(collected)
    first = [p.index for p, x in zip(plain.prompts, varied(plain.judged.reward)) if x]
    assert [p.index for p in found.prompts][: len(first)] == first
    again, _ = sampled(8, 6)
    same(found, again)


def test_rows_of_a_model_are_those_that_were_collected():
    """Tokens, masks and log-probs of each group to the bit; its texts and rewards are those of its tokens."""
    found, collected = sampled(8, 6)
    for g, p in enumerate(found.prompts):
        mine = tree.map(lambda x: x[3 * g : 3 * g + 3], found.rollout)  # noqa: B023
        for row, size in enumerate(collected[p.index].length.tolist()):
            for name in ("tokens", "mask", "logp"):
                x, y = (getattr(r, name)[row] for r in (mine, collected[p.index]))
                assert torch.equal(x[:size], y[:size]) and not x[size:].any()
            assert mine.tokens[row, : len(p.ids)].tolist() == p.ids
        assert torch.equal(mine.length, collected[p.index].length)
    assert reward.responses(found.rollout, tiny.tokenizer()) == found.judged.texts
    judged = reward.judge(SCORE, found.rollout, found.prompts, tiny.tokenizer())
    assert torch.equal(judged.reward, found.judged.reward)
    assert torch.equal(judged.parts["digit"], found.judged.parts["digit"])


def test_the_trainer_agrees_with_the_sampler_on_selected_rows():
    found, _ = sampled(8, 6)
    r = found.rollout
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    apply, params = model.bind(tiny.llama(), sampling=SAMPLING)
    packs = packing.shard(exp, 64)[0]
    logp = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    assert (logp - r.logp).abs().max() < 1e-5 and r.logp[r.mask].min() < -0.05
