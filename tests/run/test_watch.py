"""A run watched in the terminal."""

import re
import shutil
import threading
from typing import get_args

import pytest
from each_case import each
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console
from test_run_page import COLORED, token_row, write_rows, write_run

from rft_fn.run import claim
from rft_fn.tools import commands
from rft_fn.tools.page.recorded import FIELDS, Name, read
from rft_fn.tools.watch import HUES, follow, frame, sparkline


def printed(run, color="push", **how):
    console = Console(record=True, width=120, **how)
    with console.capture() as found:
        console.print(frame(run, color))
    return found.get()


@given(some.lists(some.floats(-10, 10), max_size=200), some.integers(1, 60))
def test_a_sparkline_is_as_long_as_its_numbers_or_the_width(y, width):
    assert len(sparkline(y, width)) == min(len(y), width)


def test_a_sparkline_goes_from_the_least_to_the_largest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█" and sparkline([3.0, 3.0]) == "▁▁"


def test_a_frame_has_metrics_phases_and_tokens(tmp_path):
    folder = write_run(tmp_path / "r")
    text = printed(read(folder))
    assert "r  step 12" in text and "reward/mean" in text and "generate" in text and "2+10=" in text
    assert "0.1 " in text and "▁▂▃▄▅▅▆▇██" not in text


@each("name", FIELDS)
def test_tokens_are_coloured_by_any_of_their_numbers_as_on_the_page(name, tmp_path):
    run = read(write_run(tmp_path / "r"))
    text = printed(run, name, force_terminal=True, color_system="truecolor")
    (line,) = (line for line in text.splitlines() if line.startswith("       0  "))
    wanted = [
        tuple(round((0.25 + 0.75 * share) * c) for c in HUES[hue]) for hue, share in COLORED[name] if hue
    ]
    found = [tuple(map(int, rgb)) for rgb in re.findall(r"48;2;(\d+);(\d+);(\d+)m", line)]
    assert found == wanted and f"coloured by {name}, {FIELDS[name].label}: " in text


def test_a_number_that_is_not_recorded_is_said(tmp_path):
    folder = write_run(tmp_path / "r")
    rows = [{k: x for k, x in token_row(10, 0, s).items() if k != "ref_gap"} for s in range(2)]
    write_rows(folder / "tokens.jsonl", rows)
    assert "ref_gap, distance from the reference: not recorded in this run" in printed(
        read(folder), "ref_gap"
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_frame_fits_its_terminal_and_shows_the_newest_step(width, tmp_path):
    """The last block of a line is the largest value, which only the last step has."""
    folder = write_run(tmp_path / "r")
    names = (
        "reward/mean",
        "rollout/length_mean",
        "policy/a_name_of_many_parts/and_of_fifty_characters_at_least",
    )
    rows = [{"step": i, "still": 1.0} | {name: -1.23456e-12 * (i < 99) for name in names} for i in range(100)]
    write_rows(folder / "metrics.jsonl", rows)
    console = Console(record=True, width=width)
    with console.capture() as found:
        console.print(frame(read(folder), width=width))
    lines = found.get().splitlines()
    assert max(map(len, lines)) <= width
    curves = [line for line in lines if "▁" in line]
    assert len(curves) == 3 and all("▁█" in line for line in curves)
    bars = [line for line in lines if "█" in line and line not in curves]
    assert len(bars) == 3 and not any("…" in line for line in bars)
    assert "with a single value: still 1" in lines


def test_a_frame_has_the_quantiles_of_the_last_step(tmp_path):
    folder = write_run(tmp_path / "r")
    rows = [
        {"step": i, "length": [i + k for k in range(7)], "reward": [k / 8 for k in range(7)]} for i in (0, 9)
    ]
    write_rows(folder / "distributions.jsonl", rows)
    cells = [line.split() for line in printed(read(folder)).splitlines()]
    assert ["step", "10", "min", "10%", "25%", "50%", "75%", "90%", "max"] in cells
    assert ["lengths", "[tokens]", *(str(9 + k) for k in range(7))] in cells
    assert ["rewards", "0", "0.125", "0.25", "0.375", "0.5", "0.625", "0.75"] in cells


def test_conversations_have_their_roles_and_media_their_names(tmp_path):
    folder = write_run(tmp_path / "r")
    said = [("user", "guess"), ("assistant", "5\n"), ("user", [{"type": "text", "text": "higher"}])]
    talk = [{"role": role, "content": content} for role, content in said]
    media = [["image", "squares-1", "data:image/png;base64,"], ["audio", "tone-2", ""]]
    write_rows(
        folder / "tokens.jsonl", [token_row(10, 0, 0, conversation=talk, media=media, prompt="how many?")]
    )
    text = printed(read(folder))
    assert "step 11  [image squares-1] [audio tone-2] how many?\n" in text
    assert '\n          user: guess  assistant: 5↵  user: [{"type": "text", "text": "higher"}]' in text


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
    write_rows(folder / "metrics.jsonl", [{"step": i, "lr": 0.0, "reward/a[b]": 1.0} for i in range(6)])
    text = printed(read(folder))
    assert "warning: learning_rate" in text and "reward/a[b]" in text


def test_a_response_steers_no_terminal(tmp_path):
    folder = write_run(tmp_path / "r\x1b[1m")
    foreign = "\x1b]0;title\x07\x1b[2J\r"
    talk = [{"role": foreign, "content": foreign}]
    row = token_row(10, 0, 0, prompt=foreign, name=foreign, conversation=talk)
    row["pieces"] = [foreign, *row["pieces"][1:]]
    write_rows(folder / "tokens.jsonl", [row])
    write_rows(folder / "metrics.jsonl", [{"step": 0, foreign: 1.0}])
    write_rows(folder / "timing.jsonl", [{"step": 0, "seconds": 1.0, f"phase/{foreign}": 1.0}])
    text = printed(read(folder), force_terminal=False)
    assert text.count(r"\x1b]0;title\x07\x1b[2J\r") >= 6
    assert not set("\x1b\x07\r") & set(text)


def test_a_finished_run_is_shown_once(tmp_path, capsys):
    folder = write_run(tmp_path / "r")
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    (folder / "config.json").write_text(f'{{"steps": {steps}}}')
    commands.main(["watch", str(folder)])
    assert capsys.readouterr().out.count(f"step {steps} of {steps}") == 1


def test_the_colour_is_an_option_of_the_command(tmp_path, capsys):
    assert get_args(Name) == tuple(FIELDS)
    commands.main(["watch", str(write_run(tmp_path / "r")), "--color", "entropy"])
    assert "coloured by entropy, entropy: of the distribution" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        commands.main(["watch", str(tmp_path / "r"), "--color", "reward"])
    assert "reward" in capsys.readouterr().err


def test_watching_ends_with_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "r", steps=3)
    claim.acquire(folder)
    try:
        watching = threading.Thread(target=follow, args=[folder], kwargs={"every": 0.05})
        watching.start()
        watching.join(0.5)
        assert watching.is_alive()
        later = write_run(tmp_path / "later", steps=9)
        shutil.copy(later / "metrics.jsonl", folder / "metrics.jsonl")
    finally:
        claim.release(folder)
    watching.join(20)
    assert not watching.is_alive()
    assert "step 9" in capsys.readouterr().out


def test_a_lock_is_seen_and_not_taken(tmp_path):
    assert not claim.held(tmp_path)
    claim.acquire(tmp_path)
    assert claim.held(tmp_path) and claim.held(tmp_path)
    claim.release(tmp_path)
    assert not claim.held(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run: expected the folder of a run"):
        follow(tmp_path)
