"""A run watched in the terminal."""

import re
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console
from test_run_page import TINY, token_row, write_rows, write_run

from rft_fn.run import commands, lock
from rft_fn.run.page.recorded import read
from rft_fn.run.watch import follow, frame, sparkline


def printed(run, **how):
    console = Console(record=True, width=120, **how)
    with console.capture() as found:
        console.print(frame(run))
    return found.get()


@given(some.lists(some.floats(-10, 10), max_size=200), some.integers(1, 60))
def test_a_sparkline_is_as_long_as_its_numbers_or_the_width(y, width):
    assert len(sparkline(y, width)) == min(len(y), width)


def test_a_sparkline_goes_from_the_least_to_the_largest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█" and sparkline([3.0, 3.0]) == "▁▁"


def test_a_frame_has_metrics_phases_and_tokens_in_the_colours_of_their_push(tmp_path):
    folder = write_run(tmp_path / "r")
    text = printed(read(folder))
    assert "r  step 12" in text and "reward/mean" in text and "generate" in text and "2+10=" in text
    assert "0.1 " in text and "▁▂▃▄▅▅▆▇██" not in text
    colored = printed(read(folder), force_terminal=True, color_system="truecolor")
    assert "48;2;31;111;178" in colored and "48;2;214;90;20" in colored  # the largest pushes of both signs
    assert "rgb" not in colored


def test_the_group_whose_rewards_differ_is_shown(tmp_path):
    folder = write_run(tmp_path / "r")
    rows = [token_row(10, g, s, prompt=f"group {g}") for g in range(2) for s in range(2)]
    rows[2]["reward"] = rows[3]["reward"] = 1.0
    write_rows(folder / "tokens.jsonl", rows)
    text = printed(read(folder))
    assert "group 0" in text and "group 1" not in text


def test_both_sides_of_a_pair_have_their_names(tmp_path):
    folder = write_run(tmp_path / "r")
    rows = [token_row(10, 0, s, name=name) for s, name in enumerate(("chosen", "rejected"))]
    write_rows(folder / "tokens.jsonl", rows)
    assert re.search(r"  chosen +1  5 ok.*\n *│? *rejected +0  5 ok", printed(read(folder)))


def test_symptoms_are_shown(tmp_path):
    folder = write_run(tmp_path / "r")
    write_rows(folder / "metrics.jsonl", [{"step": i, "lr": 0.0} for i in range(6)])
    assert "warning: learning_rate" in printed(read(folder))


def test_a_finished_run_is_shown_once(capsys):
    commands.main(["watch", str(TINY)])
    assert "step 140 of 140" in capsys.readouterr().out


def test_watching_ends_with_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "r", steps=3)
    lock.acquire(folder)
    try:
        watching = threading.Thread(target=follow, args=[folder], kwargs={"every": 0.05})
        watching.start()
        watching.join(0.5)
        assert watching.is_alive()
        later = write_run(tmp_path / "later", steps=9)
        shutil.copy(later / "metrics.jsonl", folder / "metrics.jsonl")
    finally:
        lock.release(folder)
    watching.join(20)
    assert not watching.is_alive()
    assert "step 9" in capsys.readouterr().out


def test_a_lock_is_seen_and_not_taken(tmp_path):
    assert not lock.held(tmp_path)
    lock.acquire(tmp_path)
    assert lock.held(tmp_path) and lock.held(tmp_path)
    lock.release(tmp_path)
    assert not lock.held(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run: expected the folder of a run"):
        follow(tmp_path)
