"""Several rewards at once: weights by a column, vetoes, normalised parts, those that wait for a network."""

import asyncio
import math
import time

import numpy as np
import pytest
import ref
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import collect, data, reward
from rft_fn.reward import foreign
from rft_fn.reward.row_weights import RowWeights
from rft_fn.reward.scales import standardized
from rft_fn.reward.veto import read_veto, vetoed
from rft_fn.strategy import get_fake_strategy

PROMPTS = [data.Prompt([3, 4], f"{i}=", {"label": "ab"[i % 2], "row": i}, i) for i in range(4)]


def rollout_of(texts, group):
    return tiny.said(texts, group, torch.arange(len(texts)) % 3 == 0)


def length(completions):
    return [float(len(c)) for c in completions]


def number(completions):
    return [float(c) for c in completions]


def joint(values, name="joint"):
    """A joint reward of fixed values by the first digit of a response, which counts its calls."""

    def fn(rollout, prompts, tokenizer):
        fn.calls.append([int(i) for i in rollout.group])
        texts = reward.responses(rollout, tokenizer)
        return torch.tensor([values[t[0]] for t in texts])

    fn.together = True
    fn.calls = []
    fn.__name__ = name
    return fn


def test_each_label_has_its_rewards_and_weights_and_a_shared_one_is_called_once():
    seen = []

    def spy(completions, label):
        seen.append(list(zip(completions, label, strict=True)))
        return number(completions)

    a = reward.weighted(spy=(spy, 2.0))
    b = reward.weighted(spy=(spy, 3.0), length=(length, 10.0))
    score = reward.by_column("label", {"a": a, "b": b, "c": reward.weighted(length=(length, 0.5))})
    found = score(["p"] * 4, ["1", "22", "3", "444"], {"label": ["a", "b", "a", "c"]})
    assert found.total.tolist() == [2.0, 3 * 22 + 20, 6.0, 1.5]
    assert seen == [[("1", "a"), ("22", "b"), ("3", "a")]]
    assert found.parts["spy"][:3].tolist() == [1, 22, 3] and found.parts["spy"][3].isnan()
    assert found.parts["length"].isnan().tolist() == [True, False, True, False]
    assert reward.columns(score) == ("label",)


def test_recipes_of_specs_are_the_same_as_on_the_command_line():
    one = reward.by_column("level", {"1": {"exact": 0.9, "format": 0.1}, "2": {"exact": 2}})
    two = reward.parse(["[level=1]exact=0.9", "[level=1]format=0.1", "[level=2]exact=2"])
    columns = {"level": [1, 2, 1], "answer": ["7", "7", "7"]}
    said = ["7", "7", r"\boxed{7}"]
    assert one(["p"] * 3, said, columns).total.tolist() == two(["p"] * 3, said, columns).total.tolist()
    assert two(["p"] * 3, said, columns).total.tolist() == pytest.approx([0.9, 2.0, 0.1])
    assert one.components["exact"][1] == RowWeights("level", {"1": 0.9, "2": 2})
    assert reward.columns(one) == reward.columns(two) == ("level", "answer")


def test_labels_without_a_recipe_are_found_when_the_rows_are_read():
    """Only where no reward applies to all rows; a row says where it stands."""
    score = reward.parse(["[label=a]exact=0.9", "[label=1]format=0.1"])
    assert reward.label_values(score) == {"label": ["a", "1"]}
    assert reward.label_values(reward.parse(["[label=a]exact", "format"])) == {}
    assert reward.label_values(reward.parse(["[label=a]exact", "[level=1]format"])) == {}
    rows = [{"question": "q", "label": x} for x in ("a", 1, "b", "a", "c")]
    how = {"values": reward.label_values(score), "name": "rows.jsonl"}
    assert data.from_rows(rows[:2], tiny.tokenizer(), **how).size == 2
    line = r"column 'label': expected one of 'a', '1', got 'b'; .*2 of 5 rows cannot be used"
    with pytest.raises(ValueError, match=line):
        data.from_rows(rows, tiny.tokenizer(), **how)


def test_a_remote_keeps_its_deadline_behind_labels_recipes_and_forms():
    spec = "https://host/score(deadline=400)"
    remote = reward.served_at("https://host/score", deadline=400)
    scores = [
        reward.parse([f"[label=a]{spec}"]),
        reward.by_column("label", {"a": {spec: 1.0}}),
        reward.by_column("label", {"a": reward.weighted(remote=(remote, 1.0))}),
        reward.weighted(remote=(foreign.messages(foreign.texts(remote)), 1.0)),
    ]
    for score in scores:
        with pytest.raises(ValueError, match="expected a deadline below reward_timeout = 300 s, got 400"):
            collect.check_reward(get_fake_strategy(), score, [{"label": "a"}])


def test_a_form_closes_what_it_wraps():
    closed = []
    length.__dict__["close"] = lambda: closed.append(1)
    try:
        reward.weighted(length=(foreign.messages(length), 1.0)).close()
    finally:
        del length.__dict__["close"]
    assert closed == [1]


def test_what_a_reward_logs_for_some_rows_is_nothing_for_the_others():
    def told(completions, log_extra, log_metric):
        log_extra("said", completions)
        log_metric("count", len(completions))
        return [{"score": 1.0, "half": 0.5} for _ in completions]

    score = reward.weighted(told=(told, RowWeights("k", {"x": 1.0})), length=(length, 1.0))
    found = score(["p"] * 3, ["1", "22", "3"], {"k": ["y", "x", "x"]})
    assert found.extra == {"told/said": [None, "22", "3"]}
    assert found.metrics["told/count"].nan_to_num(-1).tolist() == [-1, 2, 2]
    assert found.metrics["told/half"].nan_to_num(-1).tolist() == [-1, 0.5, 0.5]


def test_a_row_without_a_recipe_and_recipes_that_cannot_be_are_errors():
    score = reward.by_column("label", {"a": reward.weighted(length=(length, 1.0))})
    with pytest.raises(ValueError, match=r"expected a number from one of length .* completion 1, of"):
        score(["p", "q"], ["1", "2"], {"label": ["a", "z"]})
    with pytest.raises(ValueError, match="reward 'length': column 'label' is not in the dataset"):
        score(["p"], ["1"], {})
    with pytest.raises(ValueError, match="two that are called 'length'"):
        reward.by_column(
            "label", {"a": reward.weighted(length=(length, 1.0)), "b": reward.weighted(length=(number, 1.0))}
        )
    with pytest.raises(ValueError, match="at least one recipe"):
        reward.by_column("label", {})
    with pytest.raises(ValueError, match="expected vetoes of the whole"):
        reward.by_column(
            "k", {"a": reward.weighted(length=(length, 1.0)).with_vetoes(reward.Veto("length", 1.0))}
        )


@pytest.mark.parametrize(
    ("specs", "line"),
    [
        (["[k=a]exact", "exact"], "expected it once, got it twice"),
        (["[k=a]exact", "[k=a]exact=2"], "expected one weight where k is 'a', got two"),
        (["[k=a]exact", "[j=a]exact"], "expected one column for its weights, got 'k' and 'j'"),
        (["[k]exact"], r"expected \[COLUMN=VALUE\]NAME"),
    ],
)
def test_specs_for_some_rows_that_cannot_be(specs, line):
    with pytest.raises(ValueError, match=line):
        reward.parse(specs)


def test_joint_rewards_are_asked_once_for_their_rows_and_weighted_with_the_others():
    model = joint({"1": 0.5, "2": 2.0, "3": math.nan})
    rollout = rollout_of(["1", "2", "3", "1", "2", "2", "3", "1"], [0, 0, 1, 1, 2, 2, 3, 3])
    score = reward.weighted(model=(model, 2.0), length=(length, 0.0))
    judged = reward.judge(score, rollout, PROMPTS, tiny.tokenizer())
    assert judged.reward.tolist() == [[1.0, 4.0], [0.0, 1.0], [4.0, 4.0], [0.0, 1.0]]
    assert model.calls == [[0, 0, 1, 1, 2, 2, 3, 3]] and judged.parts["length"].eq(1).all()
    assert judged.parts["model"][1, 0].isnan()
    means = reward.means(judged, "reward")
    assert means["reward/model/skipped"] == 0.25 and means["reward/length"] == 1.0

    # by a column: only the rows of its label, and the same rows for two heads are the same object
    routed = reward.weighted(model=(model, RowWeights("label", {"b": 1.0})), length=(length, 1.0))
    judged = reward.judge(routed, rollout, PROMPTS, tiny.tokenizer())
    assert model.calls[1:] == [[1, 1, 3, 3]]
    assert judged.parts["model"].isnan().tolist() == [[True] * 2, [True, False], [True] * 2, [True, False]]

    # rows in any order, and some of them
    rows = reward.judge_rows(score, rollout, PROMPTS, tiny.tokenizer(), rows=[5, 0])
    assert rows.tolist() == [4.0, 1.0]


def test_a_joint_reward_without_its_values_or_with_too_few_is_an_error():
    score = reward.weighted(model=(joint({"1": 1.0}), 1.0))
    with pytest.raises(ValueError, match="reward 'model': expected `known`"):
        score(["p"], ["1"], {})

    def few(rollout, prompts, tokenizer):
        return torch.zeros(1)

    few.together = True
    with pytest.raises(ValueError, match=r"reward 'few': expected \[B\] = \[2\], got \[1\]"):
        reward.judge(
            reward.weighted(few=(few, 1.0)), rollout_of(["1", "2"], [0, 0]), PROMPTS[:1], tiny.tokenizer()
        )


def test_an_infinite_score_of_a_model_is_refused():
    score = reward.weighted(model=(joint({"1": math.inf}), 1.0))
    with pytest.raises(ValueError, match="reward 'model': value 0 is inf, not a finite number"):
        reward.judge(score, rollout_of(["1"], [0]), PROMPTS[:1], tiny.tokenizer())


def test_rewards_may_ask_for_prompt_ids_truncation_keys_and_media():
    seen = {}

    def spy(completions, prompt_ids, truncated, keys, media):
        seen.update(ids=prompt_ids, truncated=truncated, keys=keys, media=media)
        return [0.0] * len(completions)

    pictures = (
        data.medium.Medium("image", "data:image/png;base64,iVBORw=="),
        data.medium.Medium("audio", b"RIFF0000WAVE"),
    )
    prompts = [data.Prompt([3, 4], "p", {}, 7, sources=pictures), data.Prompt([5], "q", {}, 8)]
    rollout = rollout_of(["1", "2", "3", "1"], [0, 0, 1, 1])
    state = reward.trainer_state(5, 9)

    def judge(**how):
        return reward.judge(reward.weighted(spy=(spy, 1.0)), rollout, prompts, tiny.tokenizer(), **how)

    judge(state=state)
    assert seen["ids"] == [[3, 4], [3, 4], [5], [5]] and seen["truncated"] == [True, False, False, True]
    assert [x["kind"] for x in seen["media"][1]] == ["image", "audio"] and seen["media"][2:] == [[], []]
    assert [x["mime"] for x in seen["media"][0]] == ["image/png", "audio/wav"]
    assert seen["media"][0][0]["bytes"].startswith(b"\x89PNG")

    # keys name what is judged: the response, the step and the seed, and no rank
    keys = seen["keys"]
    assert len(set(keys)) == 4
    judge(state=state, part=slice(1, 2))
    assert seen["keys"] == keys[2:]
    judge(state=reward.trainer_state(6, 9))
    assert not set(seen["keys"]) & set(keys)
    judge(state=state, seed=1)
    assert not set(seen["keys"]) & set(keys)


def test_files_are_not_read_for_rewards_that_do_not_name_media():
    seen = {}

    def all_of_it(completions, **given):
        seen.update(given)
        return [0.0] * len(completions)

    missing = data.Prompt([3], "p", {}, 0, sources=(data.medium.Medium("image", "/nowhere/at/all.png"),))
    reward.judge(reward.weighted(it=(all_of_it, 1.0)), rollout_of(["1"], [0]), [missing], tiny.tokenizer())
    assert "media" not in seen and {"prompt_ids", "truncated", "keys"} <= set(seen)


def test_a_slow_remote_overlaps_joint_and_plain_rewards_whatever_their_order():
    order = []

    async def remote(completions):
        order.append("remote begins")
        await asyncio.sleep(0.4)
        order.append("remote ends")
        return [1.0] * len(completions)

    def local(completions):
        time.sleep(0.1)
        order.append("plain")
        return length(completions)

    def model(rollout, prompts, tokenizer):
        time.sleep(0.1)
        order.append("model")
        return torch.ones(len(rollout.group))

    model.together = True
    score = reward.weighted(local=(local, 1.0), model=(model, 1.0), remote=(remote, 1.0))
    reward.judge(score, rollout_of(["1"], [0]), PROMPTS[:1], tiny.tokenizer())
    assert order == ["remote begins", "model", "plain", "remote ends"]


def test_a_model_that_raises_ends_what_waits_for_a_network():
    ended = []

    async def patient(completions):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    def model(rollout, prompts, tokenizer):
        time.sleep(0.05)
        raise KeyError("out of memory")

    model.together = True
    score = reward.weighted(patient=(patient, 1.0), model=(model, 1.0))
    began = time.monotonic()
    with pytest.raises(KeyError) as error:
        reward.judge(score, rollout_of(["1"], [0]), PROMPTS[:1], tiny.tokenizer())
    assert error.value.__notes__ == ["raised by the reward 'model'"] and score.running == "model"
    assert ended == [True] and time.monotonic() - began < 10


def test_closing_a_score_closes_its_parts():
    closed = []

    class Held:
        def __call__(self, completions):
            return length(completions)

        def close(self):
            closed.append("held")

    score = reward.weighted(held=(Held(), 1.0), length=(length, 1.0))
    assert score(["p"], ["12"], {}).total.tolist() == [4.0]
    score.close()
    assert closed == ["held"]


def test_a_part_below_its_limit_makes_the_reward_a_constant():
    score = reward.weighted(number=(number, 1.0), length=(length, 0.1))
    score = score.with_vetoes(reward.Veto("number", 5.0, -1.0), reward.Veto("length", 2.0, -2.0))
    found = score(["p"] * 4, ["4", "5", "12", "44"], {})
    assert found.total.tolist() == pytest.approx([-1.0, -2.0, 12.2, 44.2])
    assert found.metrics["number/vetoed"].tolist() == [1, 0, 0, 0]
    assert found.metrics["length/vetoed"].tolist() == [0, 1, 0, 0]
    assert found.parts["number"].tolist() == [4, 5, 12, 44]


@pytest.mark.parametrize("first", [0.0, -1.0, 2.0])
@pytest.mark.parametrize("second", [0.0, -1.0, 2.0])
def test_the_first_veto_that_holds_decides_whatever_its_total_is(first, second):
    """0 is a total as any other: the next veto does not take it for none."""
    parts = {"a": torch.tensor([0.0, 0.0, 9.0, 9.0]), "b": torch.tensor([0.0, 9.0, 0.0, 9.0])}
    vetoes = [reward.Veto("a", 1.0, first), reward.Veto("b", 1.0, second)]
    total, by = vetoed(torch.tensor([0.0, 5.0, 0.0, 5.0]), parts, vetoes)
    assert total.tolist() == [first, first, second, 5.0]
    assert by["a"].tolist() == [1, 1, 0, 0] and by["b"].tolist() == [0, 0, 1, 0]
    # two of one part: the first of them that holds, and both are counted
    total, by = vetoed(parts["b"], parts, [reward.Veto("a", 1.0, first), reward.Veto("a", 10.0, second)])
    assert total.tolist() == [first, first, second, second] and by["a"].tolist() == [1, 1, 1, 1]


def test_a_veto_of_what_does_not_apply_is_none():
    x = torch.tensor([1.0, 2.0, 3.0])
    total, by = vetoed(x, {"a": torch.tensor([math.nan, 0.0, 1.0])}, [reward.Veto("a", 1.0, 9.0)])
    assert total.tolist() == [1.0, 9.0, 3.0] and by["a"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("format<1=-1", ("format", 1, -1)), ("task:x<0.5", ("task:x", 0.5, 0)), ("a<-1=2.5", ("a", -1, 2.5))],
)
def test_vetoes_on_the_command_line(text, expected):
    veto = read_veto(text)
    assert (veto.part, veto.limit, veto.total) == expected


@pytest.mark.parametrize("text", ["format", "<1", "a<b", "a<1=b", "a<nan", "a<1=inf", "a<"])
def test_vetoes_that_are_none(text):
    with pytest.raises(ValueError, match="expected PART<LIMIT=TOTAL"):
        read_veto(text)


def test_a_veto_of_an_unknown_part_is_an_error():
    with pytest.raises(ValueError, match="veto: expected one of number, got 'numbre'"):
        reward.weighted(number=(number, 1.0)).with_vetoes(reward.Veto("numbre", 1.0))


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.one_of(st.just(math.nan), st.integers(-5, 5).map(float)), min_size=3, max_size=3),
            min_size=n, max_size=n,
        )
    ),
    st.sampled_from(["batch", "group"]),
)  # fmt: skip
def test_standardized_is_its_definition(rows, over):
    found = standardized(torch.tensor(rows), over=over).double().numpy()
    np.testing.assert_allclose(found, ref.standardized(np.array(rows), over), atol=1e-5)


@pytest.mark.parametrize("over", ["batch", "group"])
def test_normalised_parts_are_weighted_as_the_definition_and_vetoes_stay(over):
    rollout = rollout_of(["1", "22", "3", "14", "5", "62", "7", "111"], [0, 0, 1, 1, 2, 2, 3, 3])
    weight = RowWeights("label", {"a": 2.0, "b": -1.0})
    score = reward.weighted(number=(number, 0.5), length=(length, weight), off=(length, 0.0))
    score = score.with_vetoes(reward.Veto("number", 2.0, -7.0))
    judged = reward.judge(score, rollout, PROMPTS, tiny.tokenizer())
    found = reward.normalized(score, judged, PROMPTS, over=over)
    by_label = np.array([2.0, -1.0, 2.0, -1.0])[:, None]
    expected = 0.5 * ref.standardized(judged.parts["number"].numpy(), over)
    expected = expected + by_label * ref.standardized(judged.parts["length"].numpy(), over)
    expected[0, 0] = -7.0
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
    assert judged.reward[1, 0] == 0.5 * 3 - 1  # the reward that is logged stays as it is


some_vetoes = st.lists(
    st.builds(
        reward.Veto,
        part=st.sampled_from(["number", "length"]),
        limit=st.sampled_from([0.5, 1.5, 3.0, 20.0, 100.0]),
        total=st.floats(-9, 9).map(lambda x: round(x, 2)),
    ),
    max_size=4,
)
some_texts = st.lists(st.integers(0, 120).map(str), min_size=6, max_size=6)


@given(texts=some_texts, vetoes=some_vetoes, over=st.sampled_from(["batch", "group"]))
def test_the_first_veto_that_holds_decides_each_response(texts, vetoes, over):
    """However many there are, of one part or several, and whether parts are normalised or not."""
    prompts = PROMPTS[:3]
    rollout = rollout_of(texts, [0, 0, 1, 1, 2, 2])
    free = reward.weighted(number=(number, 0.5), length=(length, 2.0))
    score = free.with_vetoes(*vetoes)
    judged = reward.judge(score, rollout, prompts, tiny.tokenizer())
    usual = reward.judge(free, rollout, prompts, tiny.tokenizer())
    by_rule = {
        "as they are": (judged.reward, usual.reward),
        "normalised": (
            reward.normalized(score, judged, prompts, over=over),
            reward.normalized(free, usual, prompts, over=over),
        ),
    }
    for found, without in by_rule.values():
        want = without.clone().flatten()
        for b in range(6):
            parts = {"number": float(texts[b]), "length": float(len(texts[b]))}
            held = [v.total for v in vetoes if parts[v.part] < v.limit]
            if held:
                want[b] = held[0]
        assert torch.equal(found.flatten(), want)


@given(
    rows=st.lists(st.lists(st.integers(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    unit=st.sampled_from([2.0**-14, 2.0**-4, 2.0**10]), level=st.sampled_from([0.0, 1.0, -64.0]),
    over=st.sampled_from(["batch", "group"]),
)  # fmt: skip
def test_standardized_has_no_scale_but_eps(rows, unit, level, over):
    """A part that varies by 1e-4 beside a mean of 64 counts as much as any other."""
    x = torch.tensor(rows).float()
    got = standardized(level + unit * x, over=over, eps=unit * 1e-6)
    torch.testing.assert_close(got, standardized(x, over=over, eps=1e-6), rtol=1e-5, atol=1e-6)


def test_the_scale_of_a_part_does_not_matter_once_it_is_normalised():
    rollout = rollout_of(["1", "22", "3", "14"], [0, 0, 1, 1])

    def loud(completions):
        return [1000.0 * x for x in number(completions)]

    quiet, noisy = (reward.weighted(x=(fn, 1.0), length=(length, 1.0)) for fn in (number, loud))
    results = []
    for score in (quiet, noisy):
        judged = reward.judge(score, rollout, PROMPTS[:2], tiny.tokenizer())
        results.append(reward.normalized(score, judged, PROMPTS[:2], over="group"))
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)
