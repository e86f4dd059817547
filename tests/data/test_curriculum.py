"""The curriculum: its rule against its definition, its draws, its state, and the runs that follow it."""

import json
from fractions import Fraction

import pytest
import ranks
import ref
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_house import load_script

import rft_fn as rft
from rft_fn import data, tree
from rft_fn.data import curriculum

pytestmark = pytest.mark.usefixtures("plain_runs")

grpo = load_script("grpo")
LEVELS = ("sort_digits:1", "sort_digits:2", "sort_digits:3")
SMALL = {"prompts": 6, "group": 4, "eval_prompts": 4, "steps": 4, "lr_end": 1.0, "canary": False}


def rows(count, tag):
    return [{"question": f"{tag}{i}+1=", "answer": str(i), "tag": str(tag)} for i in range(count)]


def mixed(counts=(6, 10, 4), weights=(1, 1, 1)):
    parts = [
        data.from_rows(rows(n, tag), tiny.tokenizer(), name=f"part {tag}") for tag, n in enumerate(counts)
    ]
    return data.mix(parts, [Fraction(w) for w in weights])


def source_of(dataset, prompts):
    return [dataset.mixture.source(p.index)[0] for p in prompts]


def played(dataset, steps, *, n=5, floor=0.02, window=8, seed=0, means=(0.9, 0.5, 0.1), state=None, first=0):
    """(the sources of each step, its prompts, the state after them) with constant rewards in each source."""
    state = state or curriculum.init(dataset)
    sources, drawn = [], []
    for step in range(first, first + steps):
        prompts, keys, state = curriculum.draw(state, dataset, n, step, seed, floor=floor)
        sources.append(source_of(dataset, prompts))
        drawn += [(p.text, key) for p, key in zip(prompts, keys)]
        reward = torch.tensor([[means[k]] * 4 for k in sources[-1]])
        state = curriculum.observe(state, dataset, prompts, reward, window=window)
    return sources, drawn, state


def test_a_level_of_a_task_is_drawn_by_the_seed():
    """From its first row on for the seed that it was loaded with, and elsewhere for another one."""
    levels = data.load(list(LEVELS[:2]), tiny.tokenizer(), seed=3, template="{short}")
    state = curriculum.init(levels)
    index = {}
    for seed in (3, 4):
        prompts, _, _ = curriculum.draw(state, levels, 6, 0, seed, floor=0.02)
        index[seed] = [levels.mixture.source(p.index) for p in prompts]
    assert index[3] == [(k, j) for k in (0, 1) for j in range(3)]
    assert not set(index[3]) & set(index[4])


one_prompt = st.tuples(st.integers(0, 2), st.lists(st.floats(-1, 2), min_size=3, max_size=3))


@settings(max_examples=40)
@given(st.lists(one_prompt, min_size=1, max_size=9), st.integers(1, 50), st.floats(1e-3, 0.25))
def test_shares_are_the_rule_of_one_prompt_after_the_other(prompts, window, floor):
    """Updates by single prompts are an exponential mean of their rewards, clipped to [0, 1]."""
    dataset = mixed(weights=(1, 2, 3))
    ours = curriculum.init(dataset)
    first = {k: next(i for i in range(60) if dataset.mixture.source(i)[0] == k) for k in range(3)}
    for k, reward in prompts:
        row = [dataset.prompt(first[k])]
        ours = curriculum.observe(ours, dataset, row, torch.tensor([reward]), window=window)
    want, shares = ref.curriculum(prompts, (1, 2, 3), window=window, floor=floor)
    torch.testing.assert_close(ours.success, torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=0)
    found = curriculum.shares(ours, dataset, floor=floor)
    torch.testing.assert_close(found, torch.tensor(shares, dtype=torch.float64), atol=1e-5, rtol=1e-5)


@settings(max_examples=30)
@given(st.integers(1, 6), st.floats(0, 1), st.integers(1, 40))
def test_a_step_with_equal_means_is_as_many_single_updates(count, mean, window):
    dataset = mixed()
    prompts = [dataset.prompt(dataset.mixture.place(1, j)) for j in range(count)]
    reward = torch.full((count, 2), mean, dtype=torch.float64)
    once = curriculum.observe(curriculum.init(dataset), dataset, prompts, reward, window=window)
    each = curriculum.init(dataset)
    for prompt, row in zip(prompts, reward):
        each = curriculum.observe(each, dataset, [prompt], row[None], window=window)
    torch.testing.assert_close(once.success, each.success, atol=1e-12, rtol=0)
    assert once.success[0] == once.success[2] == 0.5


def test_each_source_has_its_share_of_any_number_of_prompts():
    """With shares that stay, every source has them up to less than one prompt, whatever the step."""
    dataset = mixed(weights=(5, 3, 2))
    shares = curriculum.shares(curriculum.init(dataset), dataset, floor=0.02)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    state = curriculum.init(dataset)
    for step in range(20):
        _, _, state = curriculum.draw(state, dataset, 3, step, 0, floor=0.02)
        missing = 3 * (step + 1) * shares - state.drawn
        assert missing.abs().max() < 1
        torch.testing.assert_close(missing, state.owed)


def test_what_is_learned_changes_the_draw_and_the_floor_keeps_all():
    sources, _, state = played(mixed(), 30, means=(1.0, 0.5, 0.0))
    count = [sum(step.count(k) for step in sources[-10:]) for k in range(3)]
    assert count[1] > 40 and count[0] >= 3 and count[2] >= 3
    shares = curriculum.shares(state, mixed(), floor=0.02)
    p = state.success
    assert p[0] > 0.97 and p[2] < 0.03 and abs(p[1] - 0.5) < 1e-6
    torch.testing.assert_close(shares, torch.tensor([0.02, 0.25, 0.02], dtype=torch.float64) / 0.29)


def test_a_source_hands_out_its_rows_in_passes_and_samples_each_anew():
    """No row comes twice before all of its source have come, and no key comes twice."""
    dataset = mixed()
    _, drawn, state = played(dataset, 12)
    sizes = [part.size for part in dataset.parts]
    for k, size in enumerate(sizes):
        mine = [text for text, _ in drawn if text.startswith(str(k))]
        assert len(mine) == state.drawn[k]
        for begin in range(0, len(mine) - size, size):
            assert len(set(mine[begin : begin + size])) == size
    assert len({key for _, key in drawn}) == len(drawn)
    assert {p.columns["source"] for p in curriculum.draw(state, dataset, 9, 0, 0, floor=0.2)[0]} == {
        "part 0", "part 1", "part 2",
    }  # fmt: skip


def test_a_state_that_was_saved_goes_on_to_the_same_prompts(tmp_path):
    dataset = mixed()
    whole = played(dataset, 9)
    _, before, half = played(dataset, 4)
    trained = rft.TrainState(params={"w": torch.zeros(1)}, opt={}, step=4, tx=rft.optim.adamw(1e-3))
    rft.ckpt.save(tmp_path / "c", trained, {"curriculum": half})
    _, extra = rft.ckpt.restore(tmp_path / "c", trained, {"curriculum": curriculum.init(dataset)})
    sources, after, state = played(dataset, 5, state=extra["curriculum"], first=4)
    assert before + after == whole[1] and sources == whole[0][4:]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(whole[2])))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-1, 2)), max_size=20), st.integers(1, 9))
def test_the_shares_of_prompts_are_the_rule_of_one_after_the_other(visits, window):
    """Of ten rows, the first three of a source with twice the share of the other, seven of that one."""
    dataset = mixed(counts=(3, 7), weights=(2, 1))
    rule = curriculum.by_prompt(dataset, seed=0, window=window, floor=0.02)
    state = rule.init()
    index = [dataset.mixture.place(0, j) for j in range(3)] + [dataset.mixture.place(1, j) for j in range(7)]
    for row, reward in visits:
        state = rule.observe(state, [dataset.prompt(index[row])], torch.tensor([[reward] * 2]))
    weights = [2 / 3] * 3 + [1 / 7] * 7
    want, shares = ref.curriculum([(row, [x] * 2) for row, x in visits], weights, window=window, floor=0.02)
    torch.testing.assert_close(state.success, torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=0)
    effective = 1 / sum(x * x for x in shares) / len(shares)
    assert rule.metrics(state)["curriculum/effective"] == pytest.approx(effective, rel=1e-4)


def test_prompts_are_drawn_one_after_the_other_by_their_shares():
    """The ordered pairs of a draw of two have the probabilities w_i w_j / (1 - w_i)."""
    dataset = data.from_rows(rows(3, "a"), tiny.tokenizer(), name="three")
    w = [0.5, 0.3, 0.2]
    # p (1 - p) is 0.25, 0.15 and 0.1
    success = torch.tensor([0.5, (1 - 0.4**0.5) / 2, (1 - 0.6**0.5) / 2], dtype=torch.float64)
    count, draws = {}, 6000
    for seed in range(draws):
        rule = curriculum.by_prompt(dataset, seed=seed, window=1, floor=0.02)
        state = tree.replace(rule.init(), success=success)
        prompts, _, after = rule.draw(state, 2, 0)
        pair = tuple(p.index for p in prompts)
        count[pair] = count.get(pair, 0) + 1
        assert after.drawn.sum() == 2 and pair[0] != pair[1]
    for (i, j), n in count.items():
        want = w[i] * w[j] / (1 - w[i])
        assert abs(n / draws - want) < 4 * (want * (1 - want) / draws) ** 0.5, (i, j)
    assert len(count) == 6


def test_prompts_that_teach_come_more_often_and_all_come():
    """Of twelve, two are solved half of the time, the others always or never; keys are never drawn twice."""
    dataset = data.from_rows(rows(12, "a"), tiny.tokenizer(), name="twelve")
    rule = curriculum.by_prompt(dataset, seed=1, window=1, floor=0.02)
    state, keys = rule.init(), []
    for step in range(60):
        prompts, drawn, state = rule.draw(state, 4, step)
        keys += drawn
        rewards = [[float(p.index % 2)] * 2 if p.index > 1 else [0.0, 1.0] for p in prompts]
        state = rule.observe(state, prompts, torch.tensor(rewards))
    assert state.drawn[:2].min() > 2 * state.drawn[2:].max() and state.drawn.min() > 2
    assert len(set(keys)) == len(keys) == 240
    found = rule.metrics(state)
    assert found["curriculum/seen"] == 1 and found["curriculum/effective"] < 0.5
    assert state.success.tolist() == [0.5, 0.5] + [float(i % 2) for i in range(2, 12)]


def test_errors_name_what_is_wrong():
    dataset = mixed()
    state = curriculum.init(dataset)
    prompts = [dataset.prompt(0)]
    with pytest.raises(ValueError, match=r"curriculum: expected two sources or more, got one, part 0"):
        curriculum.init(dataset.parts[0])
    with pytest.raises(ValueError, match=r"floor: expected above 0 and at most 0\.25, .* got 0\.3"):
        curriculum.shares(state, dataset, floor=0.3)
    with pytest.raises(ValueError, match=r"prompts: expected to take at least 1, got 0"):
        curriculum.draw(state, dataset, 0, 0, 0, floor=0.1)
    with pytest.raises(ValueError, match=r"window: expected at least 1 prompt, got 0"):
        curriculum.observe(state, dataset, prompts, torch.ones(1, 2), window=0)
    with pytest.raises(ValueError, match=r"reward: expected \[N, G\] with N = 1, got \[2, 2\]"):
        curriculum.observe(state, dataset, prompts, torch.ones(2, 2), window=4)


def test_rows_that_never_come_again_have_no_shares():
    levels = data.load(list(LEVELS[:2]), tiny.tokenizer(), template="{short}")
    with pytest.raises(ValueError, match=r"curriculum_by: expected source with rows that never come"):
        curriculum.by_prompt(levels, seed=0, window=1, floor=0.02)
    rule = curriculum.by_prompt(mixed(), seed=0, window=1, floor=0.02)
    with pytest.raises(ValueError, match=r"prompts: expected at most the 20 rows of .*, got 21"):
        rule.draw(rule.init(), 21, 0)
    other = curriculum.by_prompt(mixed(counts=(3, 3, 3)), seed=0, window=1, floor=0.02)
    with pytest.raises(ValueError, match=r"data: expected the 20 rows so far, got 9"):
        other.draw(rule.init(), 2, 0)


def run(out, **options):
    """The metrics of a short run of grpo.py in this process."""
    cfg = grpo.Config(**(SMALL | {"data": LEVELS, "curriculum": 8, "out": str(out)} | options))
    grpo.main(cfg)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def no_evaluation(row):
    """The metrics of a step without those of an evaluation, which a run also makes where it ends early."""
    return {name: x for name, x in row.items() if not name.startswith("eval/")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curriculum") / "straight"
    return folder, run(folder)


def test_a_run_writes_shares_and_success_of_each_source(straight, tmp_path):
    _, metrics = straight
    for row in metrics:
        share = [row[f"share/{name}"] for name in LEVELS]
        p = [row[f"success/{name}"] for name in LEVELS]
        assert abs(sum(share) - 1) < 1e-9 and len(set(p)) > 1
        rule = [max(x * (1 - x), 0.02) for x in p]
        assert share == pytest.approx([x / sum(rule) for x in rule])
    plain = run(tmp_path / "plain", curriculum=0)
    assert [row["reward/mean"] for row in plain] != [row["reward/mean"] for row in metrics]
    assert not any(name.startswith(("share/", "success/")) for name in plain[-1])


def test_a_run_that_stopped_goes_on_to_the_bit(straight, tmp_path):
    folder, metrics = straight
    run(tmp_path / "r", steps=2)
    again = run(tmp_path / "r", steps=4)
    assert [no_evaluation(row) for row in again] == [no_evaluation(row) for row in metrics]
    assert (tmp_path / "r/model/model.safetensors").read_bytes() == (
        folder / "model/model.safetensors"
    ).read_bytes()


def questions(folder):
    """The options of a run on a file of 24 rows, with a share of each."""
    file = folder / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"{i}{3 * i}=", "answer": str(i)}) + "\n" for i in range(24))
    )
    how = {"data": (str(file),), "template": "{question}", "reward": ("task:sort_digits",), "eval_share": 0.0}
    return how | {"curriculum": 2, "curriculum_by": "prompt", "reward": (f"{folder}/reward.py:score",)}


REWARD = """
def score(completions, answer, **_):
    return [(int(a) + len(c)) % 3 / 2 for c, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def by_prompt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "reward.py").write_text(REWARD)
    how = questions(folder)
    return folder, how, run(folder / "straight", **how)


def test_a_run_with_shares_of_prompts_goes_on_to_the_bit(by_prompt, tmp_path):
    folder, how, metrics = by_prompt
    assert metrics[0]["curriculum/seen"] == 6 / 24 < metrics[-1]["curriculum/seen"]
    run(tmp_path / "r", **how, steps=2)
    again = run(tmp_path / "r", **how, steps=4)
    assert [no_evaluation(row) for row in again] == [no_evaluation(row) for row in metrics]
    same = (folder / "straight/model/model.safetensors").read_bytes()
    assert (tmp_path / "r/model/model.safetensors").read_bytes() == same
    plain = run(tmp_path / "plain", **how | {"curriculum": 0, "curriculum_by": "source"})
    assert [row["reward/mean"] for row in plain] != [row["reward/mean"] for row in metrics]


def on_ranks(rank, folder, **more):
    torch.set_num_threads(1)
    cfg = grpo.Config(**(SMALL | {"data": LEVELS, "curriculum": 8, "out": folder} | more))
    grpo.main(cfg)


def test_two_ranks_draw_the_prompts_that_one_draws(by_prompt, tmp_path):
    _, how, metrics = by_prompt
    ranks.run(2, "test_curriculum:by_prompt_on_ranks", str(tmp_path / "two"), how)
    two = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    for a, b in zip(metrics, two, strict=True):
        for name in a:
            if name.startswith(("curriculum/", "reward/")):
                assert b[name] == pytest.approx(a[name], abs=1e-6)


def by_prompt_on_ranks(rank, folder, how):
    on_ranks(rank, folder, **how)


def test_two_ranks_draw_what_one_draws(straight, tmp_path):
    _, metrics = straight
    ranks.run(2, "test_curriculum:on_ranks", str(tmp_path / "two"))
    two = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    for a, b in zip(metrics, two, strict=True):
        for name in a:
            if name.startswith(("share/", "success/", "reward/")):
                assert b[name] == pytest.approx(a[name], abs=1e-6)


def test_more_rounds_learn_from_all_groups_that_were_drawn(tmp_path):
    metrics = run(
        tmp_path / "r", rounds=3, data=("addition:1", "addition:2"), model="tiny:addition:1", steps=2
    )
    assert metrics[0]["sampling/rounds"] == 3
    # 18 groups were drawn, 9 of each source, nearly all without a right answer
    assert metrics[0]["success/addition:2"] == pytest.approx(0.5 * (7 / 8) ** 9, abs=0.05)


def test_one_source_is_a_run_without_a_curriculum(tmp_path, capsys):
    one = run(tmp_path / "one", data=LEVELS[:1], steps=1)
    assert "curriculum: off, for there is one source of data, sort_digits:1" in capsys.readouterr().out
    plain = run(tmp_path / "plain", data=LEVELS[:1], steps=1, curriculum=0)
    assert one == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ahead": 1}, "curriculum: expected 0 with ahead 1, .* got "),
        ({"partial": 3}, "curriculum: expected 0 with partial 3, .* got "),
        ({"curriculum_floor": 0.5}, r"curriculum_floor: expected at most 0\.25.* got 0\.5"),
        (
            {"curriculum_by": "prompt"},
            r"curriculum_by: expected source with rows that never come again, sort",
        ),
        (
            {"curriculum_by": "prompt", "curriculum": 0},
            r"curriculum: expected above 0, as curriculum_by is pr",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_at_once(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()
