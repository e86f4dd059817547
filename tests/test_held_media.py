"""Media held once per prompt, against lists of what each sequence reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import experience, tree
from rft_fn.types import Media, Rollout

NAMES = ("pixels", "sound")


def build(owners, of):
    """Media of owners [(pixels, sounds)], read by sequences `of`; every row has a number of its own."""
    start = torch.arange(100.0).split(1)
    parts, k = [], 0
    for counts in owners:
        part = {}
        for name, n in zip(NAMES, counts):
            part[name] = torch.cat([torch.zeros(0), *start[k : k + n]])[:, None]
            k += n
        parts.append(part)
    whole = Media.of_prompts(parts)
    return tree.replace(whole, of=torch.tensor(of, dtype=torch.long))


def listed(media):
    """What each sequence reads, by name: the meaning of a Media."""
    found = media.sequences()
    return [
        {n: part.flatten().tolist() for n, part in zip(found, parts)}
        for parts in zip(*(x.split(media.count(n).tolist()) for n, x in found.items()))
    ]


@st.composite
def batches(draw):
    owners = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=4))
    of = draw(st.lists(st.integers(-1, len(owners) - 1), min_size=1, max_size=7))
    return owners, of


@given(batches(), st.data())
def test_take_reads_what_the_sequences_read_and_keeps_no_other_owner(batch, data):
    media = build(*batch)
    index = data.draw(st.lists(st.integers(0, len(batch[1]) - 1), max_size=7))
    got, whole = media.take(index), listed(media)
    assert listed(got) == [whole[i] for i in index]
    read = {batch[1][i] for i in index} - {-1}
    assert len(got.held) == len(read)
    for k, name in enumerate(NAMES):
        assert len(got.tensors[name]) == sum(batch[0][m][k] for m in read)


@given(batches(), batches())
def test_concat_reads_what_its_parts_read(one, other):
    parts = [build(*one), None, build(*other)]
    counts = [len(one[1]), 2, len(other[1])]
    nothing = [{name: [] for name in NAMES}] * 2
    assert listed(Media.concat(parts, counts)) == [*listed(parts[0]), *nothing, *listed(parts[2])]


def test_samples_of_one_prompt_share_its_rows():
    """Repeated rows would be as many copies of every image as there are samples."""
    media = Media.of_prompts([{"pixels": torch.ones(2, 3)}, None, {"pixels": torch.zeros(1, 3)}], n=2)
    assert media.of.tolist() == [0, 0, -1, -1, 1, 1] and len(media.tensors["pixels"]) == 3
    assert media.count("pixels").tolist() == [2, 2, 0, 0, 1, 1] and len(media.sequences()["pixels"]) == 6
    assert media.take(range(6)).tensors["pixels"] is media.tensors["pixels"]
    assert Media.of_prompts([None, {}], n=3) is None


def test_sounds_of_other_lengths_are_padded_with_0():
    parts = [{"sound": torch.ones(1, 2, 3)}, {"sound": torch.full((2, 1, 5), 2.0)}]
    got = Media.of_prompts(parts).tensors["sound"]
    want = torch.zeros(3, 2, 5)
    want[0, :2, :3], want[1:, :1, :5] = 1, 2
    assert torch.equal(got, want)


def test_media_of_several_batches_join_and_come_apart_again():
    """A batch without media, or without one kind of it, shifts no rows of the others."""

    def media(**kinds):
        tensors = {k: torch.arange(float(start), start + sum(rows)) for k, (start, rows) in kinds.items()}
        own = zip(*(tensors[k].split(rows) for k, (_, rows) in kinds.items()))
        return Media.of_prompts([dict(zip(kinds, parts)) for parts in own])

    parts = [
        media(pixels=(0, [2, 1])),
        None,
        media(audio=(10, [1, 0, 2])),
        media(pixels=(20, [0]), audio=(30, [1])),
    ]
    whole = Media.concat(parts, [2, 2, 3, 1])
    assert whole.count("pixels").tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
    assert whole.count("audio").tolist() == [0, 0, 0, 0, 1, 0, 2, 1]
    got = whole.take([6, 0, 7, 2])
    assert got.sequences()["pixels"].tolist() == [0, 1] and got.count("pixels").tolist() == [0, 2, 0, 0]
    assert got.sequences()["audio"].tolist() == [11, 12, 30] and got.count("audio").tolist() == [2, 0, 1, 0]
    assert Media.concat([None, None], [2, 3]) is None
    with pytest.raises(ValueError):
        Media.concat(parts, [2, 2, 3])


def test_a_row_that_is_not_held_cannot_be_read():
    media = build([(1, 0), (2, 1)], [1, 0])
    here = tree.replace(
        media,
        held=torch.tensor([True, False]),
        tensors={n: x[: (n == "pixels")] for n, x in media.tensors.items()},
    )
    assert here.count("pixels").tolist() == [2, 1] and listed(here.take([1])) == [
        {"pixels": [0.0], "sound": []}
    ]
    with pytest.raises(ValueError, match=r"media: expected the rows of all 2 owners .* none of \[1\]"):
        here.sequences()
    with pytest.raises(ValueError, match=r"none of \[0\]"):
        here.take([0]).sequences()


ROLLOUT = Rollout(
    tokens=torch.ones(2, 3, dtype=torch.long),
    mask=torch.ones(2, 3, dtype=torch.bool),
    logp=torch.zeros(2, 3),
    length=torch.full((2,), 3),
    truncated=torch.zeros(2, dtype=torch.bool),
    group=torch.zeros(2, dtype=torch.long),
    version=torch.zeros(2, dtype=torch.long),
    media=build([(1, 0)], [0, 0, 0]),
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Media.of_prompts([None], n=0), "n: expected >= 1 sequences per prompt, got 0"),
        (
            lambda: Media.of_prompts([{"x": torch.ones(1)}, {"x": torch.ones(1, 1)}]),
            r"media: expected one number of dims of x, got \[1, 2\]",
        ),
        (lambda: Media.concat([ROLLOUT.media], [2]), "counts: expected 3, the sequences of the media, got 2"),
        (lambda: experience(ROLLOUT, adv=torch.zeros(2), w=torch.zeros(2, 3)), "media.of: expected"),
    ],
)
def test_bad_calls_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
