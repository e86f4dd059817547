"""docs/results: tables are what their scripts make of the files, and intervals are their definition."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
from pages import as_module

import rft_fn as rft
from bench import record

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "results"
BENCH = ROOT / "tests" / "bench"


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def script(name):
    return as_module(BENCH / f"{name}.py")


def curriculum():
    return as_module(FOLDER / "curriculum" / "table.py")


RECIPES = sorted(x.stem for x in (FOLDER / "recipes").glob("*.json"))


def gpu():
    page = script("gpu/page")
    return page.section(page.read())


def growth(mark):
    return script("growth/show").tables(read("growth/growth"))[mark]


def memory(mark):
    return script("memory").TABLES[mark][1](read("memory")[mark])


def of_ahead():
    found = read("ahead")
    return script("ahead").table(found["runs"], found["shipped"])


# {page: {mark: what the table between its marks is made by}}
TABLES = {
    "algorithms": {
        "rows": lambda: script("rows").table(read("rows")["rows"]),
        "micro-batches": lambda: script("certificates").table(read("certificates")["entries"]),
        "certificates": lambda: script("certificates").verdicts(read("certificates")["entries"]),
        "rows-certified": lambda: script("certificates").of_rows(read("certificates")["rows"]),
    },
    "distillation": {
        "curves": lambda: script("distillation").curves(read("distillation")),
        "memory": lambda: script("distillation").memory(read("distillation")),
        "smollm2": lambda: script("distillation").answers(read("smollm2/distillation")),
    },
    "engines": {"ahead": of_ahead, "engines": lambda: script("engines_table").tables(read("engines"))},
    "environments": {"kuhn": lambda: script("self_play").table(read("kuhn_poker"))},
    "estimators": {"rows": lambda: script("estimators").table(read("estimators"))},
    "performance": {
        "step": lambda: script("step/report").text(read("step/step")),
        "gradients": lambda: script("gradients").table(read("gradients")["turns"]),
        "gpu": gpu,
    },
    "results/recipes": {"recipes": lambda: script("recipes").table(RECIPES)},
    "reward_models": {
        "judge": lambda: script("judge").tables(read("judge")),
        "rubrics": lambda: script("rubrics").table(read("rubrics")),
    },
    "rewards": {
        "hacks": lambda: script("hacks").table(read("hacks")),
        "load": lambda: script("remote_rewards").tables(read("remote")),
    },
    "scaling": {mark: partial(growth, mark) for mark in script("growth/show").tables(read("growth/growth"))}
    | {mark: partial(memory, mark) for mark in script("memory").TABLES}
    | {
        "plan": lambda: script("plan").table(read("plan")),
        "plan-scale": lambda: script("plan").scale_table(read("plan")["scale"]),
        "plan-changes": lambda: script("plan").change_table(read("plan")["scale"]),
    },
    "trust": {"gap_by_type": lambda: script("gap_by_type").table(read("gap_by_type"))},
} | {f"recipes/{x}": {"here": partial(lambda name: script("recipes").table([name]), x)} for x in RECIPES}


@pytest.mark.parametrize(("page", "mark"), [(page, mark) for page, marks in TABLES.items() for mark in marks])
def test_a_table_is_what_its_script_makes_of_the_file(page, mark):
    assert record.between(f"docs/{page}.md", mark) == TABLES[page][mark]()


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_shows_was_made_by_the_commands_of_its_page(name):
    """Which test_recipes.py runs dry."""
    words = [shlex.join(x) for x in script("recipes").commands(name)]
    assert words == read(f"recipes/{name}")["commands"]


def test_every_row_learned_what_the_page_says():
    found = read("rows")["rows"]
    assert set(found) == set(rft.algorithm.TABLE)
    for name, x in found.items():
        assert x["last"] == pytest.approx(sum(x["reward"][-10:]) / 10, abs=1e-4), name
        # the best of 16 is what this one learns, not their mean
        least = 0.5 if name == "best_minus_second" else 0.9
        assert x["last"] >= least and x["gap"] < 1e-5, name


def test_costs_of_the_host_grow_within_the_limit_that_the_bench_holds():
    show, host = script("growth/show"), script("growth/host")
    found = read("growth/growth")
    held = show.held(found)
    assert set(held) == {*host.CASES, "load, first start", "load, second start"}
    assert all(exponent <= host.MOST for _, exponent in held.values())
    found["host"]["found"]["plan"][-1]["seconds"] *= 2
    assert show.held(found)["plan"][1] == pytest.approx(held["plan"][1] + 0.5)  # sizes are four times apart


def test_bytes_of_growth_are_of_the_network_that_was_assumed():
    comm, found = script("growth/comm"), read("growth/growth")["comm"]["found"]
    assert found["tables"]["as assumed"] == comm.table(comm.Network(**found["assumed"]))


def test_the_bytes_that_were_counted_are_what_the_model_of_growth_assumes():
    """Blocks are gathered twice a pack and the rest once, gradients scattered once, HSDP sums its half."""
    counted = read("growth/growth")["comm"]["found"]["counted"]
    for name, x in counted.items():
        packs = x["packs"] * x["sp"]
        weights = 4 * (2 * x["parameters"] - x["embedding"] - 128)  # and the last norm
        between = 0
        if x["sp"] > 1:
            between = (4 + 56) * x["tokens"]  # log-probs, and the packs themselves, pickled
            a_layer = (8 + 4 + 4 + 8) * 16 * 4 * x["tokens"] / x["sp"]  # queries, keys, values and results
            assert x["all-to-all"][1] / packs == 2 * 4 * a_layer  # forward and backward
        assert x["all-gather"][1] / packs == pytest.approx(weights + between, rel=0.001), name
        assert x["reduce-scatter"][1] / packs == pytest.approx(4 * x["parameters"], rel=0.001), name
    x = counted["HSDP"]
    assert x["all-reduce"][1] / x["packs"] == pytest.approx(4 * x["parameters"] / 2, rel=0.001)


@pytest.mark.parametrize(("right", "count"), [(0, 256), (1, 200), (128, 256), (200, 200), (3, 7)])
def test_an_interval_ends_where_the_share_is_z_standard_errors_away(right, count):
    module = curriculum()
    for p in module.wilson(right, count):
        far = (right / count - p) ** 2 - module.Z**2 * p * (1 - p) / count
        assert abs(far) < 1e-12
    low, high = module.wilson(right, count)
    assert low - 1e-12 <= right / count <= high + 1e-12 and high - low > 0.01


def test_the_table_of_the_curriculum_is_what_its_files_say():
    assert curriculum().table() in (FOLDER / "README.md").read_text()


def test_what_grpo_changed_at_each_level_is_what_the_page_says():
    module, page = curriculum(), " ".join((FOLDER / "README.md").read_text().split())
    for level, (won, lost, p) in {
        1: (85, 4, "< 1e-15"),
        2: (46, 25, "= 0.017"),
        3: (29, 19, "= 0.19"),
    }.items():
        assert f"greedy {won} won and {lost} lost" in module.changes(level)
        assert f"{module.LEVELS[level]}, {won} won and {lost} lost (p {p}" in page
        assert f"{module.mcnemar(won, lost):.2g}" == p.split()[1] or module.mcnemar(won, lost) < 1e-15
    assert [module.changes(level).split("p = ")[-1] for level in (2, 3)] == ["1.9e-06)", "2.3e-05)"]
    assert "test: p < 1e-15, 2e-6 and 2e-5" in page


def test_exact_tests_of_two_shares_are_those_of_small_tables():
    module = curriculum()
    assert module.mcnemar(3, 0) == 2 / 8 and module.mcnemar(2, 2) == 1
    # 3 of 3 against 0 of 3: two of the 20 ways to choose three of six
    assert module.fisher(3, 0, 3) == pytest.approx(2 / 20)
    assert module.fisher(2, 2, 4) == pytest.approx(1)


def rows(name):
    return record.rows_of(FOLDER / "rm" / name)


@pytest.mark.parametrize(
    ("seed", "model", "policy"),
    [(0, "run.json", "policy/run.json")]
    + [(seed, f"seed_{seed}/model.json", f"seed_{seed}/policy.json") for seed in (1, 2)],
)
def test_the_table_of_a_policy_on_a_reward_model_is_what_its_files_say(seed, model, policy):
    """Of the page of reward models: the model's last evaluation, and the policy's first and last steps."""
    held_out = [row for row in rows(model) if "eval/accuracy" in row][-1]
    steps, true = rows(policy), "task:sort_digits"

    def learned(name):
        return steps[0][name], sum(row[name] for row in steps[-10:]) / 10

    greedy = [row[f"eval/{true}"] for row in steps if f"eval/{true}" in row]
    cells = [seed, len(steps), f"{held_out['eval/accuracy']:.3f}, {held_out['eval/top']:.3f}"]
    cells += ["{:.3f} -> {:.3f}".format(*learned(f"reward/{true}"))]
    cells += [f"{greedy[0]:.3f} -> {greedy[-1]:.3f}"]
    cells += ["{:.2f} -> {:.2f}".format(*learned("reward/model"))]
    line = f"| {' | '.join(map(str, cells))} |"
    assert line in (ROOT / "docs" / "reward_models.md").read_text().splitlines()
    assert greedy[-1] > greedy[0] + 0.1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_table_of_a_reward_model_that_sees_is_what_its_files_say(seed):
    """Means of the first and the last ten steps; greedy before the first update and after the last."""
    true = "task:count_squares"
    model, policy = rows(f"../vl_rm/seed_{seed}/model.json"), rows(f"../vl_rm/seed_{seed}/policy.json")
    accuracy = [row["eval/accuracy"] for row in model if "eval/accuracy" in row][-1]
    first, last = (sum(row[f"reward/{true}"] for row in ten) / 10 for ten in (policy[:10], policy[-10:]))
    greedy = [row[f"eval/{true}"] for row in policy if f"eval/{true}" in row]
    cells = [seed, len(policy), f"{accuracy:.3f}", f"{first:.3f} -> {last:.3f}"]
    cells += [f"{greedy[0]:.3f} -> {greedy[-1]:.3f}"]
    line = f"| {' | '.join(map(str, cells))} |"
    assert line in (ROOT / "docs" / "multimodal.md").read_text().splitlines()


def test_the_picture_of_the_readme_has_the_intervals_of_its_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    front, short = as_module(BENCH / "rise.py"), as_module(BENCH / "gsm8k_rise.py")
    sums = front.sums()
    shares = [*sums.held_out.values(), *(x for pair in sums.stages.values() for x in pair)]
    assert len(shares) == 7 and list(sums.held_out) == [0, 15, 30]
    for x in shares:
        assert x.interval() == pytest.approx(curriculum().wilson(x.right, x.total))
    front.draw(sums, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 10_000

    # what was measured, and what the page says of it
    measured = json.loads(short.FOUND.read_text())
    page = (ROOT / "docs" / "results" / "README.md").read_text()
    assert short.table(measured) in page and f"{measured['kept']} of {len(measured['solved'])}" in page
    assert short.paired(measured, 0, "sampled") == "6.8 % ± 3.1" and "6.8 % ± 3.1" in page
    assert short.paired(measured, 0, "greedy") == "-5.2 % ± 4.2" and "5.2 % ± 4.2 less" in page
    assert set(short.rise(measured).held_out) == {0, 10, 20, 30, 40, 50, 60}
