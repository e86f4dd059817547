"""Operations on rollouts, against lists of rows, and the laws that tie them to packs and to each other."""

import pytest
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import advantage, experience, packing, reward, segment, tree
from rft_fn.data import Prompt
from rft_fn.rollout import concat, extend, prefixes, split, take, with_prompts
from rft_fn.run.rollout_files import read_rollout, write_rollout
from rft_fn.types import Media, Rollout, Sampling


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
    images = [
        {"pixels": torch.full((n, 1), float(tokens[0]))} for (tokens, *_), n in zip(rows, owned.tolist())
    ]
    return Rollout(
        **found,
        length=torch.tensor([len(tokens) for tokens, *_ in rows], dtype=torch.long),
        truncated=torch.tensor([len(tokens) % 2 == 0 for tokens, *_ in rows], dtype=torch.bool),
        group=torch.tensor([group for *_, group, _ in rows], dtype=torch.long),
        version=torch.tensor([version for *_, version in rows], dtype=torch.long),
        media=Media.of_prompts(images) if media else None,
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
        images = rollout.media.sequences()["pixels"].split(rollout.media.count("pixels").tolist())
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


def test_rollouts_say_what_they_were_drawn_with():
    """One that is not known is no other; limits and greedy tokens leave log-probs as they are."""
    warm = Sampling(temperature=0.5, top_p=0.9, max_new=4)
    rows = [([1, 2, 3], 1, 0, 0), ([1, 4], 1, 1, 0)]
    unknown = build(rows)
    known = tree.replace(unknown, sampling=warm)
    longer = tree.replace(unknown, sampling=tree.replace(warm, max_new=9))
    assert unknown.sampling is None
    for found in (take(known, [1]), concat([known, longer]), concat([unknown, known])):
        assert found.sampling == warm
    assert split(known, [0, 1])[1].sampling == warm and extend(known, known).sampling == warm
    other = tree.replace(unknown, sampling=Sampling(temperature=1.0))
    message = "got temperature 0.5, top_p 0.9, top_k 0 and temperature 1, top_p 1, top_k 0"
    for join in (lambda: concat([known, unknown, other]), lambda: extend(known, other)):
        with pytest.raises(ValueError, match=f"^sampling: expected rollouts of one distribution, {message}"):
            join()
    greedy = tree.replace(unknown, sampling=Sampling(temperature=0))
    assert concat([greedy, other]).sampling == greedy.sampling


def test_temperatures_stay_with_their_rows():
    """A row without one of its own has that of the call that drew it."""
    rows = [([1, 2, 3], 1, 0, 0), ([1, 4], 1, 1, 0)]
    call = Sampling(temperature=0.5)
    plain = tree.replace(build(rows), sampling=call)
    own = tree.replace(plain, temperature=torch.tensor([2.0, 0.25]))
    assert take(own, [1, 1]).temperature.tolist() == [0.25, 0.25]
    assert split(own, [0, 1])[1].temperature.tolist() == [0.25]
    assert concat([plain, own]).temperature.tolist() == [0.5, 0.5, 2.0, 0.25]
    assert concat([plain, plain]).temperature is None
    assert with_prompts(own, [[7], [8]]).temperature is own.temperature
    assert extend(own, own).temperature.tolist() == [2.0, 0.25]

    unknown = tree.replace(plain, sampling=None)
    with pytest.raises(ValueError, match=r"^sampling: expected that of the rows without temperatures"):
        concat([unknown, tree.replace(own, sampling=None)])
    with pytest.raises(ValueError, match=r"^after: expected row 0 at temperature 2, as it began, got 0.5$"):
        extend(own, plain)

    exp = experience(own, adv=torch.zeros(2), w=own.mask.float())
    pack = packing.pack(exp, [1, 0])
    assert pack.temperature.tolist() == [0.25, 0.0, 2.0] and pack.mask.tolist() == [True, False, True]
    assert packing.take(exp, torch.tensor([1])).temperature.tolist() == [0.25]


def test_routing_stays_with_its_tokens():
    """A token has the experts of its first forward; what was never read has none."""
    rows = [([1, 2, 3], 1, 0, 0), ([1, 4], 1, 1, 0)]
    plain = build(rows)
    read = torch.tensor([[1, 1, 0], [1, 0, 0]])
    number = torch.arange(1, 13).view(2, 3, 2, 1) * read[..., None, None]
    own = tree.replace(plain, routing=number.to(torch.uint8))
    assert torch.equal(take(own, [1, 0]).routing, own.routing.flip(0))
    assert torch.equal(split(own, [0, 1])[1].routing, own.routing[1:])
    short = tree.replace(build([([5, 6], 1, 0, 0)]), routing=torch.full((1, 2, 2, 1), 9, dtype=torch.uint8))
    both = concat([plain, own, short]).routing
    assert both.shape == (5, 3, 2, 1) and not both[:2].any() and not both[4, 2].any()
    assert torch.equal(both[2:4], own.routing) and (both[4, :2] == 9).all()
    assert concat([plain, plain]).routing is None
    assert with_prompts(own, [[7], [8]]).routing is None

    # one row is continued: by other experts, which count only where it had none
    longer = build([([1, 2, 3, 8], 1, 0, 0)])
    again = tree.replace(
        longer, routing=torch.tensor([7, 7, 7, 0]).view(1, 4, 1, 1).expand(1, 4, 2, 1).byte()
    )
    found = extend(own, again).routing
    assert found[0, :, :, 0].tolist() == [[1, 2], [3, 4], [7, 7], [0, 0]]
    assert extend(own, longer).routing[0, :, :, 0].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
    assert torch.equal(extend(plain, again).routing, again.routing)

    # a pack has it by its inputs, not by their targets
    exp = experience(own, adv=torch.zeros(2), w=own.mask.float())
    pack = packing.pack(exp, [1, 0])
    assert pack.routing[..., 0].tolist() == [[7, 8], [1, 2], [3, 4]]
    assert packing.take(exp, torch.tensor([1])).routing.shape == (1, 3, 2, 1)
    assert not packing.pad(packing.packs.pack(exp, [0]), 4).routing[2:].any()
    with pytest.raises(ValueError, match=r"^routing: expected \[B, S, M, k\]"):
        experience(tree.replace(own, routing=own.routing[:, :2]), adv=torch.zeros(2), w=own.mask.float())


def test_versions_stay_with_their_tokens(tmp_path):
    before = build([([3, 4, 5, 6], 2, 0, 1), ([7, 8, 9], 1, 1, 3)])
    assert extend(before, sampled_after(prefixes(before), [5], version=1)).versions.tolist() == [
        [0, 0, 1, 1, 1], [0, 0, 3, 1, 0]
    ]  # fmt: skip
    row = take(before, [0])
    assert extend(row, sampled_after(prefixes(row), [5], version=1)).versions is None  # all of one
    longer = extend(row, sampled_after(prefixes(row), [5], version=2))
    both = concat([build([([1, 2], 1, 0, 9)]), longer])
    assert both.versions.tolist() == [[0, 9, 0, 0, 0], [0, 0, 1, 1, 2]] and both.version.tolist() == [9, 1]
    moved = with_prompts(both, [[1, 1, 1], [2]])
    assert moved.versions.tolist() == [[0, 0, 0, 9], [0, 1, 1, 2]]

    write_rollout(tmp_path / "file", moved, torch.zeros(2, 1))
    found, _ = read_rollout(tmp_path / "file")
    assert torch.equal(found.versions, moved.versions)
    for wrong, message in ((moved.versions + 1, "0 outside mask"), (moved.versions - 1, "none below")):
        write_rollout(tmp_path / "lie", tree.replace(moved, versions=wrong), torch.zeros(2, 1))
        with pytest.raises(ValueError, match=f"versions: expected {message}"):
            read_rollout(tmp_path / "lie")


def test_groups_point_into_the_prompts_one_after_the_other():
    parts = [build([([1, 2], 1, g, 0) for g in groups]) for groups in ([0, 0, 1, 1], [1, 0])]
    assert concat(parts).group.tolist() == [0, 0, 1, 1, 3, 2]
    assert concat(parts, prompts=[5, 2]).group.tolist() == [0, 0, 1, 1, 6, 5]


def test_a_part_without_media_has_none_of_them():
    pictures, plain = build([([4, 2], 1, 0, 0)] * 3, media=True), build([([5, 5, 5], 1, 0, 0)] * 2)
    both = concat([plain, pictures])
    assert both.media.count("pixels").tolist() == [0, 0, 0, 1, 2]
    assert both.media.sequences()["pixels"].tolist() == [[4.0]] * 3


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


def responses(found):
    """The rows from the first sampled token on."""
    return [tokens[len(tokens) - sampled :] for tokens, sampled, *_ in found]


PROMPTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=3, max_size=5)


@given(rows(), PROMPTS, st.data(), st.booleans())
def test_responses_move_to_other_prompts_as_they_are(found, prompts, data, media):
    r = build(found, media)
    group = None
    if data.draw(st.booleans()):
        group = [data.draw(st.integers(0, len(prompts) - 1)) for _ in found]
    images = [{"pixels": torch.full((i, 1), 7.0 + i)} for i in range(len(prompts))]
    shown = [Prompt(ids, "", {}, i, media=images[i]) for i, ids in enumerate(prompts)]
    got = with_prompts(r, shown if media else prompts, group=group)
    at = r.group.tolist() if group is None else group
    want = []
    for b, (row, response) in enumerate(zip(listed(r), responses(found))):
        ids, n = prompts[at[b]], len(response)
        logp = row[2][len(row[2]) - n :]
        new = [[*ids, *response], [False] * len(ids) + [True] * n, [0.0] * len(ids) + logp]
        new += [row[3], at[b], row[5]]
        want.append([*new, [[7.0 + at[b]]] * at[b]] if media else new)
    assert listed(got) == want

    # twice is the last time, and the own prompts change nothing
    same(with_prompts(with_prompts(r, [[5]] * 5), prompts, group=at), with_prompts(r, prompts, group=at))
    own = [tokens[: len(tokens) - sampled] for tokens, sampled, *_ in found]
    plain = build(found)
    same(tree.replace(with_prompts(plain, own, group=range(len(own))), group=r.group), plain)

    # numbers of the new rows go to the old ones
    back = torch.zeros_like(r.logp).masked_scatter(r.mask, got.logp[got.mask])
    assert torch.equal(back, r.logp)


def test_an_environments_answer_is_part_of_the_response():
    r = build([([1, 2, 3], 1, 0, 0)])
    turns = extend(r, sampled_after([[1, 2, 3, 7, 7]], [5]))
    got = listed(with_prompts(turns, [[9]]))[0]
    assert got[:2] == [[9, 3, 7, 7, 5], [False, True, False, False, True]]
    none = take(r, [])
    assert with_prompts(none, []).tokens.shape == (0, 0)


@given(rows(shortest=2), st.data())
def test_take_commutes_with_packs(found, data):
    """Rows of a rollout that become a pack are the rows of the rollout's experience."""
    r = build(found, media=True)
    index = data.draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=4))

    def learned(rollout):
        return experience(rollout, adv=rollout.tokens[:, :1].float(), w=rollout.mask.float())

    mine = packing.pack(learned(take(r, index)), range(len(index)))
    whole = packing.pack(learned(r), index)  # which may have borrowed another row
    same(
        tree.replace(packing.drop_borrowed(mine), rows=()),
        tree.replace(packing.drop_borrowed(whole), rows=()),
    )


@given(st.lists(rows(shortest=2), min_size=2, max_size=2))
def test_concat_commutes_with_packs(parts):
    a, b = (build(found) for found in parts)

    def learned(rollout):
        return experience(rollout, adv=rollout.tokens[:, :1].float(), w=rollout.mask.float())

    whole = packing.pack(learned(concat([a, b])), range(len(a.tokens) + len(b.tokens)))
    halves = [packing.pack(learned(x), range(len(x.tokens))) for x in (a, b)]
    for name in ("tokens", "target", "pos", "mask", "adv", "w", "old_logp"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(h, name) for h in halves])), name


# ---------- laws: rows that are chosen or put together are judged, compared and learned from as before


class Numbers:
    """A tokenizer that writes ids as they are."""

    def decode(self, ids):
        return " ".join(map(str, ids))

    def batch_decode(self, rows, skip_special_tokens):
        return [self.decode(ids) for ids in rows]


def points(prompts, completions, completion_ids, prompt_texts, scale, bonus):
    """A reward that reads everything it can get of a row; `bonus` is a column that not every prompt has."""
    rows = zip(prompts, completions, completion_ids, prompt_texts, scale, bonus, strict=True)
    return [s * sum(ids) + len(a) / 7 + len(b) / 3 + len(c) + (x or 0) for a, b, ids, c, s, x in rows]


SCORE = reward.weighted(points=(points, 1.0))


def asked(count, start=0):
    """Prompts that differ in all that a reward reads."""
    out = []
    for i in range(start, start + count):
        columns = {"scale": i + 1}
        if i % 2:
            columns["bonus"] = 100 * i
        out.append(Prompt(ids=[4] * (i + 1), text="a" * i, columns=columns, index=i))
    return out


def rewards(rollout, prompts):
    return reward.judge_rows(SCORE, rollout, prompts, Numbers())


@given(rows(), st.data())
def test_take_commutes_with_judging(found, data):
    r, prompts = build(found, media=True), asked(3)
    index = data.draw(st.lists(st.integers(0, len(found) - 1), max_size=6))
    assert torch.equal(rewards(take(r, index), prompts), rewards(r, prompts)[index])


@given(rows(), rows())
def test_concat_commutes_with_judging(one, other):
    a, b = build(one), build(other)
    both = rewards(concat([a, b], prompts=[3, 2 + 3]), asked(3) + asked(5, start=3))
    assert torch.equal(both, torch.cat([rewards(a, asked(3)), rewards(b, asked(5, start=3))]))


def test_rows_are_judged_by_the_prompts_that_are_there():
    r = build([([1, 2, 3], 1, 2, 0)])
    for prompts, count in ((asked(2), 2), ([], 0)):
        message = f"rollout.group: expected numbers of {count} prompts, got 2 in row 0"
        with pytest.raises(ValueError, match=message):
            rewards(r, prompts)
    none = tree.replace(r, group=torch.tensor([-1]))
    with pytest.raises(ValueError, match="got -1 in row 0"):
        rewards(none, asked(3))
    assert rewards(take(r, []), []).tolist() == []


ESTIMATORS = {
    "grpo": lambda r, rollout: advantage.grpo_by(r, rollout.group),
    "rloo": lambda r, rollout: advantage.rloo_by(r, rollout.group),
    "opo": lambda r, rollout: advantage.opo_by(r, rollout.group, rollout.mask.sum(-1)),
    "pass_at_2": lambda r, rollout: advantage.pass_at_k_by(r > 12, rollout.group, k=2),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(found=rows(), data=st.data())
def test_take_of_whole_groups_commutes_with_advantages(name, found, data):
    """In any order of the rows: a group keeps its rows, and no other group matters."""
    r = build(found)
    kept = data.draw(st.sets(st.integers(0, 2)))
    index = data.draw(st.permutations([b for b, row in enumerate(found) if row[2] in kept]))
    numbers = rewards(r, asked(3))
    whole = ESTIMATORS[name](numbers, r)
    part = ESTIMATORS[name](numbers[list(index)], take(r, index))
    torch.testing.assert_close(part, whole[list(index)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(one=rows(), other=rows())
def test_concat_commutes_with_advantages(name, one, other):
    """Groups of two rollouts stay apart, although both count theirs from 0."""
    parts = [build(one), build(other)]
    each = [rewards(part, asked(3)) for part in parts]
    both = ESTIMATORS[name](torch.cat(each), concat(parts, prompts=[3, 3]))
    want = torch.cat([ESTIMATORS[name](x, part) for x, part in zip(each, parts)])
    torch.testing.assert_close(both, want, rtol=1e-5, atol=1e-5)


def data_of(rollout):
    """An experience with numbers of its own on every row."""
    own = rollout.tokens.double().cumsum(-1) / 10
    return experience(
        rollout,
        adv=own.sin(),
        w=rollout.mask * (1 + own[:, :1]),
        old_logp=-own,
        extra={"row": rollout.length.double()},
    )


def model_of_pictures(params, b):
    """Log-probs [T] that depend on token, target, position and the pictures of the sequence."""
    seen = torch.zeros(b.num_seqs, dtype=torch.float64)
    if b.media is not None:
        owned = torch.repeat_interleave(torch.arange(b.num_seqs), b.media.count("pixels"))
        seen = seen.index_add(0, owned, b.media.sequences()["pixels"][:, 0].double())
    z = params["word"][b.tokens] * params["target"][b.target] + params["pos"][b.pos]
    return -torch.nn.functional.softplus(z + params["picture"] * segment.spread(seen, b.seq))


def learned_from(rollout, budget):
    """(log-probs [B, S], gradients) of a rollout that is cut into packs of at most `budget` tokens."""
    sizes = {"word": 10, "target": 10, "pos": 6, "picture": 1}
    params = {name: torch.linspace(-1, 1.3, n, dtype=torch.float64) for name, n in sizes.items()}
    params = {name: x.requires_grad_() for name, x in params.items()}
    exp = data_of(rollout)
    packs = [b for rank in packing.shard(exp, budget, 2) for b in rank]
    logp = [torch.where(b.mask, model_of_pictures(params, b), 0) for b in packs]
    loss = sum(
        (b.w * (b.extra["row"] - torch.exp(x - b.old_logp) * b.adv * x)).sum() for x, b in zip(logp, packs)
    )
    grads = torch.autograd.grad(loss, list(params.values()))
    return packing.unpack([x.detach() for x in logp], packs, exp.w), grads


BUDGETS = st.integers(5, 20)


@given(rows(shortest=2), st.data(), BUDGETS)
def test_take_commutes_with_packs_and_what_is_learned_from_them(found, data, budget):
    """Log-probs are those of the rows; gradients add up over rows, however often one is taken."""
    r = build(found, media=True)
    index = data.draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=6))
    logp, grads = learned_from(take(r, index), budget)
    whole, _ = learned_from(r, budget)
    torch.testing.assert_close(logp, whole[index], rtol=1e-12, atol=1e-12)
    alone = [learned_from(take(r, [i]), budget)[1] for i in index]
    for mine, *others in zip(grads, *alone):
        torch.testing.assert_close(mine, sum(others), rtol=1e-10, atol=1e-10)


@given(rows(shortest=2), rows(shortest=2), st.booleans(), BUDGETS)
def test_concat_commutes_with_packs_and_what_is_learned_from_them(one, other, media, budget):
    """Also of a part with media and one without."""
    parts = [build(one, media=True), build(other, media)]
    logp, grads = learned_from(concat(parts), budget)
    each = [learned_from(part, budget) for part in parts]
    rows_of = [row for x, _ in each for row in x]
    for mine, want in zip(logp, rows_of, strict=True):
        torch.testing.assert_close(mine[: len(want)], want, rtol=1e-12, atol=1e-12)
        assert not mine[len(want) :].any()
    for mine, a, b in zip(grads, each[0][1], each[1][1]):
        torch.testing.assert_close(mine, a + b, rtol=1e-10, atol=1e-10)


R = build([([1, 2, 3], 1, 0, 0), ([4, 5], 1, 1, 0)])


@each(
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
        (lambda: with_prompts(R, [[1]]), "group: expected numbers of 1 prompts, from 0, got 1"),
        (
            lambda: with_prompts(R, [[1]], group=[0, -1]),
            "group: expected numbers of 1 prompts, from 0, got -1",
        ),
        (lambda: with_prompts(R, [[1]], group=[0]), r"group: expected \[B\] = \[2\], got \[1\]"),
        (lambda: with_prompts(R, [[1], "2+3="]), r"prompts\[1\]: expected token ids, got text"),
        (lambda: with_prompts(R, [[1], []]), r"prompts\[1\]: expected at least one token, got none"),
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
