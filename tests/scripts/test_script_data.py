"""The data of the training scripts: several sources, passes in place of steps, rows that are held out."""

import json
from functools import partial

import pytest
from test_house import load_script

import rft_fn as rft

pytestmark = pytest.mark.usefixtures("plain_runs")

load = {name: load_script(name) for name in ("sft", "grpo", "ppo")}
TINY = {"prompts": 4, "group": 2, "eval_prompts": 8, "template": "{question}", "lr_end": 1.0, "max_new": 3}


def write(path, count, start=10):
    rows = [{"question": str(start + i), "answer": str(start + i)[::-1]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Two files, 8 rows and 6, in the working folder; no pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rft.run.plot, "curve", lambda *_, **__: None)
    monkeypatch.setattr(rft.run.plot, "phases", lambda *_, **__: None)
    write(tmp_path / "a.jsonl", 8)
    write(tmp_path / "b.jsonl", 6, start=50)
    (tmp_path / "mine.py").write_text(
        "def size(prompts, completions, **_):\n    return list(map(len, completions))\n"
    )
    return tmp_path


def run(name, **options):
    """Metrics of a run in this process."""
    shared = {"sft": {"template": "{question}", "batch": 4, "warmup": 1}}.get(name, TINY)
    if name != "sft":
        # a canary takes rows for its prompts, which are not drawn for training or evaluation
        shared = {**shared, "reward": ("mine.py:size",), "warmup": 1, "canary": False}
    if name == "ppo":
        shared = {**shared, "minibatches": 1}
    cfg = load[name].Config(**{**shared, **options})
    load[name].main(cfg)
    with open(f"{cfg.out}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def drawn(monkeypatch, dataset_index=0):
    """The questions of every later draw of training, and of every evaluation."""
    seen = {"draw": [], "take": []}

    def spy(name, real, dataset, *args, **options):
        prompts, keys = real(dataset, *args, **options)
        seen[name] += [p.text for p in prompts]
        return prompts, keys

    for name in seen:
        monkeypatch.setattr(rft.data, name, partial(spy, name, getattr(rft.data, name)))
    return seen


def test_epochs_of_sft_are_so_many_steps(capsys):
    """ceil(3 * 14 / 4) = 11; each row of a is drawn in the passes that are printed."""
    metrics = run("sft", data=("a.jsonl=4", "b.jsonl=3"), epochs=3.0, out="r")
    assert len(metrics) == 11
    text = capsys.readouterr().out
    assert "data: 11 steps of 4 prompts, 25 of a.jsonl (8 rows, 3.125 passes), 19 of b.jsonl (6 rows" in text
    assert rft.run.settings("r")["steps"] == 11 and rft.run.settings("r")["epochs"] == 3.0


def test_more_epochs_continue_a_run(capsys):
    """1 pass and then 2 are 2 at once, to the bit, where the schedule does not depend on the end."""
    options = {"data": ("a.jsonl",), "save_every": 1}
    run("sft", **options, epochs=1.0, out="r")
    again = run("sft", **options, epochs=2.0, out="r")
    assert "continuing after step 2" in capsys.readouterr().out
    assert (
        again == run("sft", **options, epochs=2.0, out="straight") == run("sft", **options, steps=4, out="s")
    )


@pytest.mark.parametrize("change", [{"epochs": 2.0}, {"steps": 4}])
def test_where_the_schedule_has_an_end_epochs_are_part_of_the_run(change):
    options = {"data": ("a.jsonl",), "lr_end": 0.5, "out": "r"}
    run("sft", **options, epochs=1.0)
    with pytest.raises(ValueError, match=r"other arguments: epochs was 1.0 and is .*; steps was 2"):
        run("sft", **options, **change)


def test_a_file_that_has_grown_is_another_run_of_epochs(here):
    """The same command would have other steps, and so another schedule."""
    options = {"data": ("a.jsonl",), "lr_end": 0.5, "out": "r", "epochs": 1.0}
    run("sft", **options)
    write(here / "a.jsonl", 12)
    with pytest.raises(ValueError, match=r"other arguments: steps was 2 and is 3; give --override"):
        run("sft", **options)


@pytest.mark.parametrize(("name", "want"), [("grpo", 3), ("ppo", 3)])
def test_passes_over_the_data_decide_the_rollouts(name, want, capsys, monkeypatch):
    """1.5 passes over the 7 rows that are not held out, in steps of 4; epochs are passes over a rollout."""
    seen = drawn(monkeypatch)
    assert len(run(name, data=("a.jsonl",), data_epochs=1.5, epochs=2, out="r")) == want
    line = (
        f"data: {want} steps of 4 prompts, 12 of a.jsonl (7 rows, 1.714 passes); evaluation: 1 of the 8 rows"
    )
    assert line in capsys.readouterr().out
    assert set(seen["draw"][:7]) == set(seen["draw"]) and len(set(seen["draw"])) == 7


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_no_row_is_trained_and_evaluated_on(name, monkeypatch, capsys):
    """Unless that is asked for, and then it is printed."""
    seen = drawn(monkeypatch)
    run(name, data=("a.jsonl",), eval_share=0.25, steps=4, out="r")
    asked = set(seen["take"][2:])  # the first two are for the check of the reward
    assert len(set(seen["draw"])) == 6 and len(asked) == 2 and not asked & set(seen["draw"])
    assert "2 of the 8 rows of a.jsonl, which are not trained on (eval_share 0.25)" in capsys.readouterr().out
    run(name, data=("a.jsonl",), eval_data=("a.jsonl",), steps=1, out="s")
    assert "evaluation: a.jsonl, which is trained on too\n" in capsys.readouterr().out


def test_a_run_of_several_sources_resumes_to_the_bit(monkeypatch):
    seen = drawn(monkeypatch)
    options = {"data": ("a.jsonl=3", "reverse:1"), "save_every": 2, "template": "{question}"}
    straight = run("grpo", **options, steps=4, out="a")
    names = [text[:1].isdigit() for text in seen["draw"]]
    assert sum(names) == 12 and len(names) == 16
    assert [sum(names[i : i + 4]) for i in range(0, 16, 4)] == [3, 3, 3, 3]
    run("grpo", **options, steps=2, out="b")
    again = run("grpo", **options, steps=4, out="b")
    for row in [*straight, *again]:  # the last step of a run has an evaluation
        for name in [name for name in row if name.startswith("eval/")]:
            row.pop(name)
    assert again == straight and len({row["reward/mean"] for row in again}) > 1


@pytest.mark.parametrize("name", ["sft", "grpo", "ppo"])  # each in a folder of its own
def test_a_run_goes_on_with_its_own_rows(name, here):
    options = {"data": ("a.jsonl",), "eval_data": ("b.jsonl",)} if name != "sft" else {"data": ("a.jsonl",)}
    options |= {"lr_end": 1.0, "save_every": 1, "out": "r"}
    run(name, **options, steps=1)
    write(here / "a.jsonl", 8, start=11)
    with pytest.raises(ValueError, match=r"other data: data: a.jsonl, line 1 is another row than it was"):
        run(name, **options, steps=2)
    assert len(run(name, **options, steps=2, override=True)) == 2
    if name != "sft":
        write(here / "b.jsonl", 7, start=50)
        with pytest.raises(ValueError, match=r"other data: eval_data: b.jsonl had 6 rows and has 7"):
            run(name, **options, steps=3)


# ------------------------------------------------------------------------------ dry runs


DRY = {"grpo": {}, "ppo": {"prompts": 8}, "sft": {}, "dpo": {}, "train_rm": {}, "multi_turn": {}}


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_checks_all_and_leaves_nothing(name, here, capsys, whole_run):
    script = load_script(name)
    strategy = rft.strategy.StrategyConfig(zero_stage=3, sp_size=2)
    with pytest.raises(SystemExit) as ended:
        script.main(script.Config(**DRY[name], dry_run=True, strategy=strategy, out=str(here / name)))
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "nothing was trained" in printed and "optimizer" in printed
    assert "without trying zero_stage, sp_size" in printed and not (here / name).exists()


def test_a_dry_run_refuses_what_a_run_would(here):
    """A column that the rows do not have, a reward that is no function, and a limit that the loss has not."""
    grpo = load_script("grpo")
    for options, line in (
        ({"data": ("a.jsonl",), "template": "{ask}", "reward": ("mine.py:size",)}, "no column 'ask'"),
        ({"data": ("a.jsonl",), "template": "{question}", "reward": ("mine.py:none",)}, "none"),
        ({"algorithm": "rloo", "loss": rft.run.options.Limits(low=0.1)}, "rloo has no limits"),
    ):
        with pytest.raises(ValueError, match=line):
            grpo.main(grpo.Config(**options, dry_run=True))


def test_a_dry_run_says_what_the_references_read_as(here, capsys):
    grpo = load_script("grpo")
    rows = [{"question": "a", "answer": "7 apples."}, {"question": "b", "answer": "\\frac{1}{"}]
    (here / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"data": ("mixed.jsonl",), "template": "{question}", "eval_share": 0, "prompts": 2}
    with pytest.raises(SystemExit):
        grpo.main(grpo.Config(**options, reward=("math",), dry_run=True, out=str(here / "r")))
    printed = capsys.readouterr().out
    assert "reward 'math': 2 references of 'answer': 50 % a number in words or marks, 50 % nothing" in printed
    assert "warning: reward 'math': 1 of 2 references read as nothing" in printed and "line 2" in printed
    with pytest.raises(ValueError, match=r"reward 'numeric': 1 of 1 references cannot be used: .*line 1"):
        (here / "mixed.jsonl").write_text(json.dumps({"question": "a", "answer": "four"}) + "\n")
        grpo.main(grpo.Config(**options, reward=("numeric",), dry_run=True, out=str(here / "r")))
