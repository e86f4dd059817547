"""The script that learns in environments: it resumes to the bit and shows whole conversations."""

import json
import signal
from itertools import groupby
from operator import itemgetter

import headless
import pytest
import script_runs
from script_runs import rows
from test_symptoms import check_written

from rft_fn.tools.page.build import write_page

pytestmark = pytest.mark.slow

SMALL = ["--prompts", "3", "--group", "4", "--max-new", "3", "--max-turns", "3", "--max-tokens", "40"]
REWARDED = ["--seed", "3"]  # somebody guesses right in the first step
SMALL += ["--eval-prompts", "3", "--eval-every", "2", "--save-every", "2"]


def run(out, *options, **more):
    """The script, to its end: what it wrote to stderr, where it fails."""
    return script_runs.run("multi_turn", "--out", out, *SMALL, *options, env={"CI": "true"}, **more)


def test_a_run_resumes_to_the_bit_and_shows_whole_conversations(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    how = ["--schedule", "constant"]
    run(whole, "--steps", "4", *how)
    run(cut, "--steps", "2", *how)
    run(cut, "--steps", "4", *how)
    straight = rows(whole)
    assert len(straight) == 4 and straight[3]["reward/turns"] > 1
    for a, b in zip(straight, rows(cut)):
        same = {k for k in a if not k.startswith("eval/")}
        assert {k: a[k] for k in same} == {k: b[k] for k in same}

    # whole conversations, of training and of evaluations
    talks = rows(whole, "trajectories.jsonl")
    for split in (None, "eval"):
        talk = next(r for r in talks if r.get("split") == split)
        said = [m["content"] for m in talk["conversation"] if m["role"] == "assistant"]
        assert "\n".join(said) == talk["response"] and len(said) == talk["turns"]
        assert talk["conversation"][0] == {"role": "user", "content": "guess:9="}
        assert talk["conversation"][2]["content"] in ("higher=", "lower=", "invalid=", "right")
    assert "eval/mean" in straight[0] and "eval/turns" in straight[3]
    check_written(straight)

    # single tokens: a stretch of the mask is a turn of the policy, what lies between one of the environment
    recorded = rows(whole, "tokens.jsonl")
    assert len(recorded) == 8
    for row in recorded:
        stretches = [list(part) for _, part in groupby(zip(row["mask"], row["pieces"]), itemgetter(0))]
        turns = row["conversation"][1 : 1 + len(stretches)]
        for part, turn in zip(stretches, turns, strict=True):
            assert turn["role"] == ("assistant" if part[0][0] else "user")
            assert "".join(piece for _, piece in part).removesuffix("<end>") == turn["content"]
    if headless.BROWSER:
        check_page(write_page([whole], tmp_path / "page.html"), recorded, tmp_path)


def test_a_killed_run_ends_as_the_one_that_nobody_killed(tmp_path):
    """Killed between checkpoints, by the signal that nothing can catch: its rows are the same to the byte."""
    how = ["--steps", "4", *REWARDED]
    run(tmp_path / "whole", *how)
    run(tmp_path / "cut", *how, code=-signal.SIGKILL, interrupted=(signal.SIGKILL, 2, 0))
    run(tmp_path / "cut", *how)
    assert any(row["reward/mean"] > 0 for row in rows(tmp_path / "whole"))
    for name in ("metrics", "trajectories", "distributions", "tokens"):
        whole, cut = ((tmp_path / x / f"{name}.jsonl").read_bytes() for x in ("whole", "cut"))
        assert whole == cut, name


def check_page(page, recorded, folder):
    """The conversation of each response of the first group is on the page, what the policy read in grey."""
    group = [row for row in recorded if row["group"] == 0]
    with headless.Browser(folder / "browser") as browser:
        browser.open(page)
        for i, row in enumerate(group, 1):
            texts = f"((s) => [...document.querySelectorAll('#responses .card:nth-child({i}) ' + s)]"
            texts += ".map((x) => x.textContent))"
            assert browser.value(f"{texts}('.role')") == [turn["role"] for turn in row["conversation"]]
            assert browser.value(f"{texts}('.turn')") == [
                turn["role"] + turn["content"] for turn in row["conversation"]
            ]
            read = [piece for m, piece in zip(row["mask"], row["pieces"]) if not m]
            assert browser.value(f"{texts}('.tok.unlearned')") == read
        assert not browser.errors


def test_two_processes_play_and_learn_as_one(tmp_path):
    """The environments of three prompts are shared out unevenly, and nothing changes but rounding."""
    run(tmp_path / "one", "--steps", "3", *REWARDED)
    run(tmp_path / "two", "--steps", "3", *REWARDED, world=2)
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert len(one) == len(two) == 3 and any(row["reward/mean"] > 0 for row in one)
    for a, b in zip(one, two):
        for name in ("reward/mean", "reward/turns", "rollout/length_mean"):
            assert a[name] == b[name], name
        assert a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-4)
    for name in ("response", "conversation", "reward"):
        said = [[row[name] for row in rows(tmp_path / x, "trajectories.jsonl")] for x in ("one", "two")]
        assert said[0] == said[1]


BAD = """
from rft_fn.environment import Environment

def step(state, response):
    if state == 1:
        raise RuntimeError("the world ended")
    return state + 1, "more=", 0.0, False

def rows(seed, index):
    return {"question": "Go on.", "short": "go=", "index": str(index)}

environment = Environment("world", lambda row, key: (0, None), step, rows=rows)
"""


def test_an_environment_that_breaks_in_a_run_is_one_line(tmp_path):
    path = tmp_path / "world.py"
    path.write_text(BAD)
    error = run(tmp_path / "r", "--environment", str(path), "--steps", "2", code=2)
    assert "environment 'world': row 0, sample 0, turn 2: RuntimeError: the world ended" in error
    assert "Traceback" not in error


def test_the_credit_of_turns_and_a_distance_to_the_initial_model_change_the_run(tmp_path):
    run(tmp_path / "a", "--steps", "2", *REWARDED)
    run(tmp_path / "b", "--steps", "2", *REWARDED, "--credit", "turn", "--gamma", "0.9")
    run(tmp_path / "c", "--steps", "2", *REWARDED, "--kl", "0.5")
    a, b, c = (rows(tmp_path / name) for name in "abc")
    assert a[0]["reward/mean"] == b[0]["reward/mean"] == c[0]["reward/mean"]
    assert a[0]["grad/norm"] != b[0]["grad/norm"]
    assert "policy/kl_ref" in c[1] and c[1]["policy/kl_ref"] > 0 and "policy/kl_ref" not in a[1]


def test_rows_of_a_file_are_what_an_environment_gets(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"short": f"guess:{i}=", "answer": str(i)}) for i in range(1, 9)))
    run(tmp_path / "r", "--steps", "1", "--data", str(path), "--eval-share", "0")
    talks = rows(tmp_path / "r", "trajectories.jsonl")
    assert {t["prompt"] for t in talks} <= {f"guess:{i}=" for i in range(1, 9)} and len(talks) > 3
