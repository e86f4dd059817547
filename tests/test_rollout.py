"""Operations on rollouts, against lists of rows, and the laws that tie them to packs and to each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import experience, packing, tree
from rft_fn.rollout import concat, extend, prefixes, split, take
from rft_fn.types import Media, Rollout


def build(rows, media=False):
    """A rollout of rows (tokens, how many were sampled, group, version); row b owns b % 3 images."""
    size = max((len(tokens) for tokens, *_ in rows), default=1)
    count = len(rows)
    found = {
        "tokens": torch.zeros(count, size, dtype=torch.long),
        "mask": torch.zeros(count, size, dtype=torch.bool),
        "logp": torch.zeros(count, size),
    }
    for b, (tokens, sampled, *_) in enumerate(rows):
        found["tokens"][b, : len(tokens)] = torch.tensor(tokens)
        found["mask"][b, len(tokens) - sampled : len(tokens)] = True
        found["logp"][b] = -found["tokens"][b] / 7 * found["mask"][b]
    owned = torch.arange(count) % 3
    pixels = torch.tensor([[float(tokens[0])] for tokens, *_ in rows]).reshape(count, 1)
    return Rollout(
        **found,
        length=torch.tensor([len(tokens) for tokens, *_ in rows], dtype=torch.long),
        truncated=torch.tensor([len(tokens) % 2 == 0 for tokens, *_ in rows], dtype=torch.bool),
        group=torch.tensor([group for *_, group, _ in rows], dtype=torch.long),
        version=torch.tensor([version for *_, version in rows], dtype=torch.long),
        media=Media(tensors={"pixels": pixels.repeat_interleave(owned, 0)}, rows={"pixels": owned})
        if media
        else None,
    )


@st.composite
def rows(draw, shortest=1):
    """Rows of random lengths, of up to three groups in any order."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.integers(1, 9), min_size=shortest, max_size=6))
        sampled = draw(st.integers(0, len(tokens) - 1))
        found.append((tokens, sampled, draw(st.integers(0, 2)), draw(st.integers(0, 3))))
    return found


def listed(rollout):
    """A rollout as a list of rows, without padding: what it means."""
    out = []
    images = None
    if rollout.media is not None:
        images = rollout.media.tensors["pixels"].split(rollout.media.rows["pixels"].tolist())
    for b, n in enumerate(rollout.length.tolist()):
        assert (
            not rollout.mask[b, n:].any()
            and not rollout.logp[b, n:].any()
            and not rollout.tokens[b, n:].any()
        )
        row = [rollout.tokens[b, :n].tolist(), rollout.mask[b, :n].tolist(), rollout.logp[b, :n].tolist()]
        row += [bool(rollout.truncated[b]), int(rollout.group[b]), int(rollout.version[b])]
        if images is not None:
            row.append(images[b].tolist())
        out.append(row)
    return out


def same(a, b):
    """Equal leaf for leaf, padding included."""
    for (name, x), (_, y) in zip(tree.leaves_with_path(a), tree.leaves_with_path(b), strict=True):
        assert torch.equal(x, y), name


@given(rows(), st.data(), st.booleans())
def test_take_is_those_rows(found, data, media):
    r = build(found, media)
    index = data.draw(st.lists(st.integers(0, len(found) - 1), max_size=6))
    assert listed(take(r, index)) == [listed(r)[i] for i in index]
    same(take(r, torch.tensor(index, dtype=torch.long)), take(r, index))
    # twice is once
    again = data.draw(st.lists(st.integers(0, max(len(index) - 1, 0)), max_size=4 if index else 0))
    same(take(take(r, index), again), take(r, [index[i] for i in again]))
    mask = torch.tensor([i in index for i in range(len(found))])
    same(take(r, mask), take(r, sorted(set(index))))


@given(st.lists(rows(), min_size=1, max_size=3), st.booleans())
def test_concat_is_all_rows_with_groups_counted_on(parts, media):
    rollouts = [build(found, media) for found in parts]
    want, start = [], 0
    for r in rollouts:
        for row in listed(r):
            row[4] += start
            want.append(row)
        start += 3
    counts = [3] * len(parts)
    assert listed(concat(rollouts, prompts=counts)) == want
    assert listed(concat(rollouts[:1])) == listed(rollouts[0])
    # in any grouping
    if len(parts) == 3:
        left = concat([concat(rollouts[:2], prompts=[3, 3]), rollouts[2]], prompts=[6, 3])
        same(left, concat(rollouts, prompts=counts))


def test_groups_point_into_the_prompts_one_after_the_other():
    parts = [build([([1, 2], 1, g, 0) for g in groups]) for groups in ([0, 0, 1, 1], [1, 0])]
    assert concat(parts).group.tolist() == [0, 0, 1, 1, 3, 2]
    assert concat(parts, prompts=[5, 2]).group.tolist() == [0, 0, 1, 1, 6, 5]


def test_a_part_without_media_has_none_of_them():
    pictures, plain = build([([4, 2], 1, 0, 0)] * 3, media=True), build([([5, 5, 5], 1, 0, 0)] * 2)
    both = concat([plain, pictures])
    assert both.media.rows["pixels"].tolist() == [0, 0, 0, 1, 2]
    assert both.media.tensors["pixels"].tolist() == [[4.0]] * 3


@given(rows(), st.data())
def test_split_tells_rows_apart_and_loses_none(found, data):
    r = build(found, media=True)
    labels = data.draw(st.lists(st.sampled_from("ab"), min_size=len(found), max_size=len(found)))
    parts = split(r, labels)
    assert list(parts) == list(dict.fromkeys(labels))
    for label, part in parts.items():
        same(part, take(r, [b for b, x in enumerate(labels) if x == label]))
    numbers = split(r, r.group)
    assert {g: len(p.tokens) for g, p in numbers.items()} == {
        int(g): int((r.group == g).sum()) for g in r.group.unique()
    }


def sampled_after(prompts, new, n=1, version=9):
    """What an engine returns that answers each prompt with the tokens `new`, n times."""
    made = [([*ids, *new], len(new), i, version) for i, ids in enumerate(prompts) for _ in range(n)]
    return build(made)


@given(rows(), st.booleans())
def test_extending_by_nothing_is_the_identity(found, media):
    r = build(found, media)
    after = sampled_after(prefixes(r), [])
    after = tree.replace(after, truncated=r.truncated)
    same(extend(r, after), r)


@given(rows(), st.data(), st.integers(1, 2))
def test_a_branch_keeps_what_was_sampled_before_it(found, data, n):
    """From any token on, several times: the definition with lists."""
    r = build(found, media=True)
    at = [data.draw(st.integers(1, len(tokens))) for tokens, *_ in found]
    after = sampled_after(prefixes(r, at), [8, 9], n)
    got = listed(extend(r, after))
    before, new = listed(r), listed(after)
    for b, row in enumerate(got):
        source, cut = b // n, at[b // n]
        assert row[0] == [*before[source][0][:cut], 8, 9]
        assert row[1] == [*before[source][1][:cut], True, True]
        assert row[2] == before[source][2][:cut] + new[b][2][cut:]
        assert row[3] == new[b][3] and row[4] == before[source][4]
        assert row[5] == min(before[source][5], 9) and row[6] == before[source][6]


@given(rows())
def test_an_environments_tokens_are_no_samples(found):
    """Prompts may put tokens behind the rows that they continue; two turns are one after the other."""
    r = build(found)
    first = extend(r, sampled_after([[*ids, 7, 7] for ids in prefixes(r)], [5]))
    assert [row[1] for row in listed(first)] == [row[1] + [False, False, True] for row in listed(r)]
    second = extend(first, sampled_after([[*ids, 6] for ids in prefixes(first)], [4]))
    assert [row[1] for row in listed(second)] == [row[1] + [False, True] for row in listed(first)]
    assert torch.equal(second.logp[second.mask] != 0, torch.ones(int(second.mask.sum()), dtype=torch.bool))


@given(rows(shortest=2), st.data())
def test_take_commutes_with_packs(found, data):
    """Rows of a rollout that become a pack are the rows of the rollout's experience."""
    r = build(found, media=True)
    index = data.draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=4))

    def learned(rollout):
        return experience(rollout, adv=rollout.tokens[:, :1].float(), w=rollout.mask.float())

    mine = packing.pack(learned(take(r, index)), range(len(index)))
    same(tree.replace(mine, rows=()), tree.replace(packing.pack(learned(r), index), rows=()))


@given(st.lists(rows(shortest=2), min_size=2, max_size=2))
def test_concat_commutes_with_packs(parts):
    a, b = (build(found) for found in parts)

    def learned(rollout):
        return experience(rollout, adv=rollout.tokens[:, :1].float(), w=rollout.mask.float())

    whole = packing.pack(learned(concat([a, b])), range(len(a.tokens) + len(b.tokens)))
    halves = [packing.pack(learned(x), range(len(x.tokens))) for x in (a, b)]
    for name in ("tokens", "target", "pos", "mask", "adv", "w", "old_logp"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(h, name) for h in halves])), name


R = build([([1, 2, 3], 1, 0, 0), ([4, 5], 1, 1, 0)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: take(R, [0, 2]), r"index: expected rows in \[0, 2\), got 2"),
        (lambda: take(R, [-1]), "got -1"),
        (lambda: take(R, torch.tensor([True])), "index: expected"),
        (lambda: concat([]), "parts: expected one rollout or more, got none"),
        (lambda: concat([R, R], prompts=[2]), "prompts: expected 2 counts, one for each part, got 1"),
        (lambda: concat([R, R], prompts=[2, 1]), r"prompts\[1\]: expected at least 2, .* got 1"),
        (lambda: prefixes(R, [1]), "at: expected 2 numbers, one for each row, got 1"),
        (lambda: prefixes(R, [1, 3]), r"at\[1\]: expected 1 to 2, the length of the row, got 3"),
        (lambda: prefixes(R, [0, 1]), r"at\[0\]: expected 1 to 3"),
        (lambda: split(R, [1]), "by: expected 2 labels, one for each row, got 1"),
        (
            lambda: extend(R, build([([1, 2, 3, 9], 1, 2, 0)])),
            r"after.group\[0\]: expected a row .* below 2, got 2",
        ),
        (
            lambda: extend(R, build([([1, 9, 3, 9], 1, 0, 0)])),
            "after: expected row 0 to begin with the first 3 tokens of row 0 of before, got other tokens",
        ),
    ],
)
def test_bad_calls_name_what_is_wrong(call, message):
    with pytest.raises((ValueError, IndexError), match=message):
        call()
