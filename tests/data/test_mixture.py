"""Shares of sources: the order of places, each source in its own passes; steps from epochs."""

import itertools
from fractions import Fraction

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import data, rng
from rft_fn.data.mixture import Mixture

shares = st.lists(st.integers(1, 40), min_size=2, max_size=6)


def rows(count, tag):
    return [{"question": f"{tag}{i}+1=", "answer": str(i), "tag": str(tag)} for i in range(count)]


def part(count, tag, **options):
    return data.from_rows(rows(count, tag), tiny.tokenizer(), name=f"part {tag}", **options)


def mixed(counts=(6, 10), weights=(7, 3)):
    parts = [part(count, tag) for tag, count in enumerate(counts)]
    return data.mix(parts, [Fraction(w) for w in weights])


def at(mixture, places):
    return [mixture.source(place)[0] for place in places]


@given(shares)
@settings(max_examples=60)
def test_the_share_of_every_source_holds_at_every_place(weights):
    """|count - n share| < 1 for each n, so the count of any window is within 2 of its share."""
    mixture, total = Mixture([Fraction(w) for w in weights]), sum(weights)
    counts = [0] * len(weights)
    for n, k in enumerate(at(mixture, range(3 * total)), 1):
        counts[k] += 1
        assert all(abs(total * c - n * w) < total for c, w in zip(counts, weights))
        assert counts == mixture.counts(n)
    assert counts == [3 * w for w in weights]  # exact over whole periods


@given(shares, st.integers(0, 10**12))
@settings(max_examples=60)
def test_places_and_rows_name_each_other(weights, start):
    """Without history: each source counts its own rows without a gap, also far out."""
    mixture = Mixture([Fraction(w) for w in weights])
    found = [mixture.source(place) for place in range(start, start + 3 * sum(weights))]
    assert [mixture.place(k, j) for k, j in found] == list(range(start, start + len(found)))
    for k in range(len(weights)):
        mine = [j for source, j in found if source == k]
        assert mine == list(range(mine[0], mine[0] + len(mine)))
        assert mine[0] == mixture.counts(start)[k]


def test_shares_are_relative_and_exact():
    a, b = Mixture([Fraction("0.7"), Fraction("0.3")]), Mixture([Fraction(70), Fraction(30)])
    assert a.weights == b.weights == (7, 3) and Mixture([Fraction(1, 3), Fraction(2, 3)]).weights == (1, 2)
    assert at(a, range(10)) == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (["0", "1"], "shares: expected each above 0, got 0, 1"),
        (["0.3333333", "1"], r"add up to at most 100000, got 3333333:10000000; round them"),
    ],
)
def test_shares_that_cannot_be_kept_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture([Fraction(w) for w in weights])


def test_each_source_is_passed_over_in_an_order_of_its_own():
    ds = mixed()
    drawn = [p for step in range(25) for p in data.draw(ds, 4, step, seed=3)[0]]
    for tag, (size, count) in enumerate([(6, 70), (10, 30)]):
        mine = [p.columns["answer"] for p in drawn if p.columns["tag"] == str(tag)]
        assert len(mine) == count
        passes = [mine[i : i + size] for i in range(0, len(mine) - size + 1, size)]
        assert all(sorted(x) == sorted(map(str, range(size))) for x in passes)
        assert passes[0] != passes[1]


def test_two_sources_of_one_size_have_different_orders():
    drawn = data.draw(mixed((40, 40), (1, 1)), 80, 0, seed=0)[0]
    first, second = ([p.columns["answer"] for p in drawn if p.columns["tag"] == tag] for tag in "01")
    assert sorted(first) == sorted(second) and first != second


def test_a_step_of_a_mixture_needs_no_history():
    ds = mixed()
    steps = [data.draw(ds, 7, step, seed=1) for step in range(9)]
    again = mixed()
    for step in reversed(range(9)):
        prompts, keys = data.draw(again, 7, step, seed=1)
        assert (prompts, keys) == steps[step]
        assert prompts == data.draw(again, 7, step, seed=1, start=7 * step)[0]
    keys = [key for _, found in steps for key in found]
    assert len(set(keys)) == len(keys)
    assert keys[0] == rng.fold_in(1, 0, steps[0][0][0].index)
    assert steps != [data.draw(ds, 7, step, seed=2) for step in range(9)]


def test_rounds_of_a_mixture_have_other_rows_and_the_same_shares():
    ds = mixed((50, 50), (4, 1))
    drawn = [data.draw(ds, 20, 2, 0, round=r)[0] for r in range(3)]
    assert [sum(p.columns["tag"] == "1" for p in prompts) for prompts in drawn] == [4, 4, 4]
    assert len({tuple(p.index for p in prompts) for prompts in drawn}) == 3


def test_a_task_and_rows_are_mixed():
    """A generator goes on for ever; no row of it comes twice in any round."""
    task = data.from_task("addition", tiny.tokenizer(), level=3, template="{short}")
    ds = data.mix([task, part(3, "x")], [Fraction(3), Fraction(1)])
    assert ds.size is None
    drawn = [p for step in range(10) for r in range(2) for p in data.draw(ds, 8, step, 0, round=r)[0]]
    mine = [p.index for p in drawn if "tag" not in p.columns]
    assert len(mine) == len(set(mine)) == 120
    assert [p for p in drawn if p.text == task.prompt(0).text]  # from its first row on


def test_rows_keep_the_name_of_their_source():
    ds = mixed()
    assert {(p.columns["tag"], p.columns["source"]) for p in data.take(ds, 16, 0)[0]} == {
        ("0", "part 0"), ("1", "part 1"),
    }  # fmt: skip
    own = data.from_rows([{"question": "1", "source": "mine"}], tiny.tokenizer(), name="part 2")
    both = data.mix([own, part(1, 3)], [Fraction(1), Fraction(1)])
    assert [p.columns["source"] for p in data.take(both, 2, 0)[0]] == ["mine", "part 3"]


def test_an_evaluation_takes_every_row_of_a_mixture_once():
    ds = mixed((6, 10), (7, 3))
    prompts, keys = data.take(ds, 100, 0)
    assert ds.size == len(prompts) == len(set(keys)) == 16
    assert {(p.columns["tag"], p.columns["answer"]) for p in prompts} == {
        (str(tag), str(i)) for tag, size in enumerate((6, 10)) for i in range(size)
    }
    assert [p.index for p in data.take(ds, 5, 0)[0]] == [p.index for p in prompts[:5]]
    assert sum(p.columns["tag"] == "1" for p in data.take(ds, 7, 0)[0]) == 2


def test_a_mixture_of_one_is_that_one():
    ds = part(4, 0)
    assert data.mix([ds], [Fraction(3)]) is ds


def test_what_a_mixture_is_depends_on_rows_and_shares():
    digests = {mixed(*x).digest for x in itertools.product([(6, 10), (6, 9)], [(7, 3), (1, 1)])}
    assert len(digests) == 4 and mixed().digest == mixed().digest


@pytest.mark.parametrize(
    ("counts", "epochs", "batch", "want"),
    [((10,), 3.0, 5, 6), ((10,), 3.0, 4, 8), ((10,), 0.3, 1, 3), ((6, 10), 2.0, 5, 7), ((10,), None, 5, 99)],
)
def test_steps_of_epochs(counts, epochs, batch, want):
    """ceil(epochs rows / batch): the least number of steps in which that many rows are drawn."""
    ds = mixed(counts, [1] * len(counts))
    how = {"steps": None, "usual": 99}
    assert data.decide_steps(ds, batch, epochs=epochs, **how) == want
    assert data.decide_steps(ds, batch, epochs=epochs, steps=4, usual=99) == (want if epochs else 4)


def test_epochs_of_a_task_are_refused():
    task = data.from_task("addition", tiny.tokenizer(), template="{short}")
    ds = data.mix([task, part(3, 0)], [Fraction(1), Fraction(1)])
    with pytest.raises(ValueError, match=r"^data_epochs: expected rows that end, got 2.0 of addition:1, "):
        data.decide_steps(ds, 4, steps=None, epochs=2.0, usual=9, option="data_epochs")


def test_epochs_beyond_all_steps_are_refused():
    line = r"^epochs: expected steps that 64 bits can count, got 1e\+308 passes over 3 rows$"
    with pytest.raises(ValueError, match=line):
        data.decide_steps(part(3, 0), 4, steps=None, epochs=1e308, usual=9)


def test_the_plan_is_what_is_drawn():
    ds = mixed((6, 10), (7, 3))
    drawn = [p.columns["tag"] for step in range(9) for p in data.draw(ds, 5, step, 0)[0]]
    assert data.plan(ds, 9, 5, part(2, 0)) == (
        f"data: 9 steps of 5 prompts, {drawn.count('0')} of part 0 (6 rows, 5.333 passes), "
        f"{drawn.count('1')} of part 1 (10 rows, 1.3 passes); evaluation: "
    )
    task = data.load("addition:2", tiny.tokenizer(), template="{short}")
    assert data.plan(task, 2, 3) == "data: 2 steps of 3 prompts, 6 of addition:2 (no end)"
