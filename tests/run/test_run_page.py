"""The page of runs: what it computes, what it holds, and what a real browser makes of it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import headless
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from rft_fn.data.medium import Medium
from rft_fn.run.data_uris import data_uri
from rft_fn.run.symptoms import Warnings
from rft_fn.tools import commands
from rft_fn.tools.page import build, recorded
from rft_fn.tools.page.build import write_page
from rft_fn.tools.page.recorded import FIELDS
from rft_fn.tools.watch import HUES

ROOT = Path(__file__).resolve().parents[2]
NONE = "rgba(0, 0, 0, 0)"  # a browser's word for no colour


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def token_row(step, group, sample, **more):
    """A response of three tokens of which two are sampled."""
    sign = (-1) ** sample
    row = {"step": step, "group": group, "sample": sample, "prompt": f"2+{step}=", "reward": 0.5 + sign / 2}
    row |= {"pieces": ["5", " ok", "<end>"], "mask": [1, 0, 1], "adv": [sign, None, sign]}
    row |= {"w": [0.25, None, 0.5], "push": [0.25 * sign, None, 0.5 * sign], "clipped": [0, None, 1]}
    row |= {"ratio": [1.25, None, 0.8], "entropy": [0.7, None, 0.1], "mismatch": [0, None, 1e-6]}
    row |= {"change": [0.02, None, -0.01], "logp": [-2, None, -0.5], "ref_gap": [-0.3, None, 0.1]}
    return row | more


# (colour, share of its full strength) of both sampled tokens of a `token_row` with sample 1, by the number
COLORED = {
    "push": [("bad", 0.5), ("bad", 1)],
    "adv": [("bad", 1), ("bad", 1)],
    "ratio": [("good", 1), ("bad", 1)],
    "clipped": [("", 0), ("bad", 1)],
    "entropy": [("much", 1), ("much", 1 / 7)],
    "mismatch": [("", 0), ("good", 1)],
    "w": [("much", 0.5), ("much", 1)],
    "change": [("good", 1), ("bad", 0.5)],
    "logp": [("much", 1), ("much", 0.25)],
    "ref_gap": [("bad", 1), ("good", 1 / 3)],
}


def noted(rows):
    """Rows as a run writes them: with the warnings of each step."""
    warnings = Warnings()
    return [row | warnings.note(row)[1] for row in rows]


def write_run(folder, *, steps=12, seed=0, lr=1e-3, offset=0.0, idle=()):
    """A run in its folder: the reward (step % 10) / 10 + offset, a learning rate of 0 in `idle` steps."""
    folder.mkdir(parents=True)
    config = {"seed": seed, "lr": lr, "out": str(folder), "strategy": {"fsdp": False, "seed": seed}}
    (folder / "config.json").write_text(json.dumps(config))
    metrics = [
        {"step": i, "reward/mean": i % 10 / 10 + offset, "loss": -i, "grad/norm": None} for i in range(steps)
    ]
    if idle:
        metrics = noted([row | {"lr": lr * (row["step"] not in idle)} for row in metrics])
    write_rows(folder / "metrics.jsonl", metrics)
    phases = {"phase/generate": 1.0, "phase/train": 0.5}
    write_rows(folder / "timing.jsonl", [{"step": i, "seconds": 2.0, **phases} for i in range(steps)])
    spread = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    rows = [{"step": i, "length": spread, "reward": spread} for i in range(steps)]
    write_rows(folder / "distributions.jsonl", rows)
    tokens = [token_row(i, g, s) for i in range(0, steps, 5) for g in range(2) for s in range(3)]
    write_rows(folder / "tokens.jsonl", tokens)
    rows = [
        {"step": i, "prompt": f"2+{i}=", "response": "</script><b>5", "reward": 1.0} for i in range(steps)
    ]
    write_rows(folder / "trajectories.jsonl", rows)
    return folder


def blocks(page):
    """{id: data} of the JSON inside a page."""
    found = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', page.read_text(), re.S)
    return {name: json.loads(text) for name, text in found}


@given(some.lists(some.integers(-50, 50), min_size=1, max_size=300), some.integers(2, 40))
def test_thinning_keeps_the_extremes_the_order_and_the_limit(y, most):
    kept = build.thinned(y, most)
    assert len(kept) <= max(most, 1) and kept == sorted(set(kept))
    assert min(y[i] for i in kept) == min(y) and max(y[i] for i in kept) == max(y)
    if len(y) <= most:
        assert kept == list(range(len(y)))


def test_a_spike_of_one_step_among_ten_thousand_is_on_the_curve():
    rows = [{"step": i, "x": float(i == 7777)} for i in range(10_000)]
    found = build.curve([rows], "x")
    assert len(found["x"]) <= build.MOST and found["y"][found["x"].index(7778)] == 1.0


def test_seeds_are_a_mean_and_a_band_at_each_step():
    runs = [[{"step": i, "x": float(i * k)} for i in range(k)] for k in (1, 2, 3)]
    found = build.curve(runs, "x")
    assert found == {"x": [1, 2, 3], "y": [0, 2.5, 6], "lo": [0, 2, 6], "hi": [0, 3, 6]}
    assert "lo" not in build.curve(runs[:1], "x") and build.curve(runs, "y") is None


def test_the_band_of_a_thinned_curve_holds_every_value():
    runs = [[{"step": i, "x": (i * 37 % 101) * k} for i in range(10_000)] for k in (-1, 2)]
    found = build.curve(runs, "x")
    assert min(found["lo"]) == -100 and max(found["hi"]) == 200


def test_what_matters_most_is_on_top():
    """Of several names for a quantity the one that changes; losses only where there is no reward."""
    row = {"reward/mean": 0.5, "loss": 0.1, "grad/norm": 1.0, "policy/entropy": 2.0, "kl/ref": 0.0}
    rows = [row | {"step": i, "policy/kl_old": i, "rollout/length_mean": None} for i in range(2)]
    assert build.top_metrics([rows]) == ["reward/mean", "policy/kl_old", "policy/entropy"]
    assert build.metric_names([rows])[3:] == ["grad/norm", "kl/ref", "loss", "rollout/length_mean"]
    rows = [
        {"step": i, "loss": i, "pairs/accuracy": i, "eval/accuracy": 0.5, "eval/loss": 1} for i in range(2)
    ]
    assert build.top_metrics([rows]) == ["loss", "eval/loss", "pairs/accuracy"]


def test_a_divergence_of_rounding_is_not_on_top():
    """The KL to the policy before the updates of an on-policy run is 1e-13, and says nothing."""
    rows = [{"step": i, "reward/mean": 0.5, "policy/kl_old": i * 1e-13} for i in range(9)]
    assert build.top_metrics([rows]) == ["reward/mean"]
    assert build.metric_names([rows]) == ["reward/mean", "policy/kl_old"]
    moved = [*rows, {"step": 9, "policy/kl_old": 2e-6}]
    assert build.top_metrics([moved]) == ["reward/mean", "policy/kl_old"]
    assert build.top_metrics([rows, moved]) == ["reward/mean", "policy/kl_old"]


def test_a_phase_has_its_color_whatever_other_phases_a_run_has():
    few = build.phases([{"step": 0, "seconds": 3.0, "phase/train": 1.0, "phase/mine": 1.0}])
    more = ("mine", "record", "train", "generate", "judge", "sync")
    many = build.phases([{"step": 0, "seconds": 9.0, **{f"phase/{name}": 1.0 for name in more}}])
    colors = [dict(zip(found["names"], found["fills"], strict=True)) for found in (few, many)]
    assert all(colors[1][name] == color for name, color in colors[0].items())
    assert many["names"] == ["generate", "judge", "train", "sync", "record", "mine", "other"]
    assert len(set(colors[1].values())) == 7


def test_phases_are_means_of_bars_with_the_rest():
    rows = [{"step": i, "seconds": 3.0, "phase/a": float(i % 2), "phase/b": 1.0} for i in range(120)]
    found = build.phases(rows)
    assert found["names"] == ["a", "b", "other"] and found["size"] == 2 and len(found["x"]) == 60
    assert found["seconds"][0] == [0.5, 1.0, 1.5]


def test_fans_keep_the_extremes_of_what_they_join():
    rows = [{"step": i, "length": [-float(i), 1.0, float(i)]} for i in range(600)]
    found = build.fan(rows, "length")
    assert found["x"][:2] == [1, 3] and found["q"][0][1] == -3 and found["q"][2][1] == 3
    assert build.fan(rows, "reward") is None


def test_symptoms_of_a_run_are_those_that_it_noted():
    """A stretch of 17 steps in 10,000 is found, with its first and its last step."""
    rows = noted([{"step": i, "lr": float(not 5003 <= i < 5020)} for i in range(10_000)])
    (found,) = build.found_symptoms(rows)
    assert (found["name"], found["first"], found["last"]) == ("learning_rate", 5008, 5020)
    assert found["sentence"] == "the learning rate of the last 5 steps is 0, so nothing is learned"
    assert "--lr" in found["remedy"]


def test_a_symptom_of_an_older_rule_is_said_by_its_condition():
    (found,) = build.found_symptoms([{"step": 3, "warning/truncated": 1.0, "warning/gone": 1.0}])
    assert (found["first"], found["last"]) == (4, 4) and "are truncated, over 20" in found["sentence"]


def test_runs_that_differ_only_in_seed_are_a_group(tmp_path):
    folders = [write_run(tmp_path / f"s{k}", seed=k) for k in range(2)]
    folders.append(write_run(tmp_path / "other", lr=2e-3))
    runs = recorded.read_all(folders)
    assert recorded.grouped(runs) == [[0, 1], [2]]
    differing = dict(recorded.config_differences(runs))
    assert differing["lr"] == ["0.001", "0.001", "0.002"] and "strategy.fsdp" not in differing


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / k / "run") for k in ("a", "b")]
    assert [run.name for run in recorded.read_all(folders)] == ["a/run", "b/run"]
    with pytest.raises(ValueError, match="run: expected different folders"):
        recorded.read_all([folders[0], folders[0]])


def test_a_run_that_is_being_written_is_read_to_its_last_whole_row(tmp_path):
    folder = write_run(tmp_path / "r", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert len(recorded.read(folder).metrics) == 3


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path):
    plain = write_run(tmp_path / "plain")
    (plain / "tokens.jsonl").unlink()
    page = write_page([write_run(tmp_path / "r"), plain], tmp_path / "deep" / "p.html")
    text = page.read_text()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|@import|\bfetch\(|XMLHttpRequest|<script src|<!--[A-Z]+-->", text)
    policy, script = (
        re.search(x, text, re.S)[1] for x in (r'Policy" content="([^"]*)"', r"<script>(.*?)</script>")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none';" in policy
    found = blocks(page)
    assert found["samples-0-12"][0]["response"] == "</script><b>5"
    assert [row["sample"] for row in found["tokens-0-11"]] == [0, 1, 2, 0, 1, 2]
    assert found["data"]["runs"][0]["tokens"] == [1, 6, 11] and found["data"]["runs"][1]["tokens"] == []


def test_half_of_a_surrogate_pair_in_a_run_is_replaced_on_its_page(tmp_path):
    """JSON of a run may hold one, from a reward or a file of others; a page cannot."""
    write_run(tmp_path / "run", steps=3)
    rows = [{"step": 1, "prompt": "2+\ud83d=", "response": "\ud83d", "reward": 1.0}]
    write_rows(tmp_path / "run" / "trajectories.jsonl", rows)
    write_rows(tmp_path / "run" / "tokens.jsonl", [token_row(0, 0, 0, prompt="\ud83d")])
    text = write_page([tmp_path / "run"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "2+\ufffd=" in text


def test_a_page_stays_below_its_size(tmp_path):
    folder = write_run(tmp_path / "r", steps=400)
    rows = [token_row(i, 0, 0, prompt="é" * 3000) for i in range(0, 400, 2)]
    write_rows(folder / "tokens.jsonl", rows)
    page = write_page([folder], tmp_path / "p.html", most_bytes=600_000)
    assert 300_000 < page.stat().st_size <= 600_000
    steps = blocks(page)["data"]["runs"][0]["tokens"]
    assert steps[0] == 1 and steps[-1] == 399 and 20 < len(steps) < 200


def test_a_picture_that_is_a_link_is_not_followed(tmp_path):
    """A folder of strangers must not put files of this machine into a page that goes to others."""
    write_run(tmp_path / "run")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "run" / "samples.png").symlink_to(tmp_path / "secret")
    (tmp_path / "run" / "reliability.png").write_bytes(b"picture")
    assert recorded.read(tmp_path / "run").pictures == [tmp_path / "run" / "reliability.png"]
    (tmp_path / "linked").symlink_to(tmp_path / "run")  # the folder itself is what the user named
    assert recorded.read(tmp_path / "linked").pictures == [tmp_path / "linked" / "reliability.png"]


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run = write_run(tmp_path / "r")
    cases = [
        (["report"], "runs: expected the folder of at least one run"),
        (["report", str(tmp_path / "no")], "run: expected the folder of a run"),
        (["report", str(run), "--out", str(tmp_path / "file" / "p.html")], "cannot be written"),
        (["report", str(run), "--ot", "x"], "did you mean --out?"),
        (["watch", str(run), "--every", "0"], "every: expected above 0"),
        (["rport", str(run)], "got 'rport'; did you mean rft report?"),
    ]
    for args, line in cases:
        with pytest.raises(SystemExit, match="2"):
            commands.main(args)
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1, error


def test_the_command_writes_the_page_and_the_usage_names_all(tmp_path, capsys):
    run = write_run(tmp_path / "r")
    commands.main(["report", str(run), "--out", str(tmp_path / "p.html")])
    assert f"report: {tmp_path / 'p.html'}" in capsys.readouterr().out
    commands.main([])
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in commands.COMMANDS)
    assert 'rft = "rft_fn.tools.commands:main"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_scripts_of_the_page_are_whole():
    for path in sorted((ROOT / "rft_fn" / "tools" / "page").glob("*.js")):
        subprocess.run(["node", "--check", str(path)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if headless.BROWSER is None:
        pytest.skip("needs chromium")
    found = headless.Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two seeds of 10,000 steps, another run, and one with a conversation and media."""
    folder = tmp_path_factory.mktemp("runs")
    how = {"steps": 10_000, "idle": range(5003, 5020)}
    runs = [write_run(folder / f"seed{k}", seed=k, offset=k / 10, **how) for k in range(2)]
    runs.append(write_run(folder / "other", lr=2e-3))
    talk = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "5"}]
    picture = np.zeros((2, 2, 3), np.uint8)
    found = [Medium("image", picture), Medium("audio", {"array": np.zeros(80), "sampling_rate": 16_000})]
    media = [[medium.kind, medium.kind, data_uri(medium)] for medium in found]
    sides = [{"name": name, "conversation": talk, "media": media} for name in ("chosen", "rejected")]
    write_rows(runs[2] / "tokens.jsonl", [token_row(0, 0, s, **side) for s, side in enumerate(sides)])
    (runs[1] / "tokens.jsonl").unlink()
    return write_page(runs, folder / "page.html")


@pytest.mark.slow
def test_a_mean_lags_behind_nothing_and_axes_have_numbers(browser, page):
    browser.open(page)
    line = "Array.from({length: 200}, (_, i) => 3 * i)"
    assert browser.value(
        f"smoothed({line}, 20).slice(10, 190).every((v, i) => Math.abs(v - 3 * (i + 10)) < 1e-9)"
    )
    assert browser.value("smoothed([1, 2, 4], 2)") == [1.5, 7 / 3, 3]
    assert browser.value("ticks(0.1, 0.72, 8)") == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert browser.value("logarithmicTicks(0.03, 4, 8)") == [0.05, 0.1, 0.2, 0.5, 1, 2]
    assert browser.value("logarithmicTicks(1e-13, 1, 8)") == [1e-13, 1e-11, 1e-9, 1e-7, 1e-5, 1e-3, 1e-1]
    for low, high in ((0, 1), (1, 1700), (-3, 0.2), (0.5, 0.5001), (30, 82)):
        assert 4 <= len(browser.value(f"ticks({low}, {high}, 8)")) <= 9, (low, high)


@pytest.mark.slow
def test_a_browser_shows_curves_with_bands_and_numbers(browser, page):
    assert page.stat().st_size < 10_000_000
    browser.open(page)
    browser.until("document.querySelectorAll('#curves path.line').length >= 2")
    assert browser.value("document.querySelectorAll('#curves .chart h4')[0].textContent") == "reward/mean"
    assert browser.value("document.querySelectorAll('#curves .chart:nth-child(1) path.band').length") >= 1
    points = browser.value(
        "Math.max(...[...document.querySelectorAll('path.line')]"
        ".map((p) => p.getAttribute('d').split(/[ML]/).length - 1))"
    )
    assert 1000 < points <= 2000

    # the numbers of both groups are at the pointer: the mean of the seeds with its band, and the other run
    browser.point("#curves .chart svg", 0.5)
    tip = browser.value("document.getElementById('tip').textContent")
    step, first, second = tip.splitlines()
    assert browser.value("document.getElementById('tip').style.display") == "block"
    assert re.fullmatch(r"step \d+", step) and 3000 < int(step.split()[1]) < 7000
    number = r"[\d.e-]+"
    assert re.fullmatch(rf"{number}  \[{number}, {number}\]  seed0 \(2 seeds\)", first), first
    assert second.startswith("0.1  other (step 12)")
    labels = "[...document.querySelectorAll('#curves .chart:nth-child(1) text')].map((x) => x.textContent)"
    assert browser.value(labels)[-6:] == ["step", "2000", "4000", "6000", "8000", "10000"]

    # over the thin lines of 10,000 steps there is their mean over 5 % of them, and a line of 12 is as it was
    strokes = (
        "[...document.querySelectorAll('#curves .chart:nth-child(1) path.line')].map((x) => +x.getAttribute('"
    )
    assert browser.value(strokes + "stroke-width'))") == [0.7, 1.8, 1.5]
    assert browser.value("document.getElementById('smooth').value") == "0.05"

    # a group can be hidden, and metrics filtered
    browser.value("document.querySelector('#legend input').click()")
    browser.until("document.querySelectorAll('#curves path.band').length === 0")
    browser.value("document.querySelector('#legend input').click()")
    browser.value("document.getElementById('filter').value = 'loss'")
    browser.value("document.getElementById('filter').dispatchEvent(new Event('input'))")
    browser.until("document.querySelectorAll('#curves .chart h4').length === 1")
    assert browser.value("document.querySelector('#curves h4').textContent") == "loss"
    assert not browser.errors


def choose(browser, label, option):
    """Choose an option of a menu of the responses, by the texts that a reader sees."""
    find = "const all = (x, s) => [...x.querySelectorAll(s)];"
    find += f"const menu = all(document, '#responses label').find((x) => x.textContent.startsWith('{label}'))"
    find += ".querySelector('select');"
    find += f"const index = all(menu, 'option').findIndex((x) => x.textContent === '{option}');"
    change = "menu.selectedIndex = index; menu.dispatchEvent(new Event('change')); return index;"
    assert browser.value(f"(() => {{ {find} {change} }})()") >= 0


@pytest.mark.slow
def test_a_browser_shows_each_token_with_its_numbers(browser, page):
    browser.open(page)
    assert browser.value("document.querySelectorAll('#responses .card').length") == 3
    assert browser.value("document.querySelector('#responses .prompt').textContent") == "2+9995="
    rewards = browser.value("[...document.querySelectorAll('#responses .reward')].map((x) => x.textContent)")
    assert rewards == ["reward 1", "reward 0", "reward 1"]

    # all numbers of the last token of the second response on hover
    browser.point("#responses .card:nth-child(2) .tok:nth-child(3)")
    tip = browser.value("document.getElementById('tip').textContent").splitlines()
    shown = ["push      -0.5", "ratio     0.8", "adv       -1", "w         0.5", "change    -0.01"]
    shown += ["logp      -0.5", "clipped   1", "entropy   0.1", "mismatch  1.00e-6", "ref_gap   0.1"]
    assert tip[0] == '"<end>"' and set(shown) == set(tip[1:])
    browser.point("#responses .card .tok.unlearned")
    assert "not in the mask" in browser.value("document.getElementById('tip').textContent")

    # coloured by each of the numbers
    assert list(COLORED) == list(FIELDS)
    for name, field in FIELDS.items():
        choose(browser, "Colour by", field.label)
        key = browser.value("document.querySelector('#responses .scale').textContent")
        assert key.startswith(f"{field.label}: {field.meaning}. ")
        first, read, last = browser.value(
            "[...document.querySelectorAll('#responses .card:nth-child(2) .tok')]"
            ".map((t) => getComputedStyle(t).backgroundColor)"
        )
        assert read == NONE
        for found, (hue, share) in zip((first, last), COLORED[name]):
            *rgb, alpha = (float(x) for x in re.findall(r"[\d.]+", found))
            assert alpha == pytest.approx(0.7 * share, abs=5e-3), name
            assert found == NONE if not hue else tuple(rgb) == HUES[hue], (name, found)

    # another step, and the run with a conversation and media
    choose(browser, "Step", "step 1")
    assert browser.value("document.querySelector('#responses .prompt').textContent") == "2+0="
    heads = "[...document.querySelectorAll('#responses .head > span:first-child')].map((x) => x.textContent)"
    assert browser.value(heads) == ["response 0", "response 1", "response 2"]
    choose(browser, "Run", "other")
    assert browser.value(heads) == ["chosen", "rejected"]
    assert browser.value("document.querySelector('#responses .role').textContent") == "user"
    assert browser.value("document.querySelectorAll('#responses .media img').length") == 2
    assert browser.value("document.querySelectorAll('#responses .media audio').length") == 2
    assert not browser.errors


@pytest.mark.slow
def test_the_page_of_one_run_has_its_name_once_and_folds_what_matters_less(browser, tmp_path):
    row = {"reward/mean": 0.5, "policy/kl_ref": 0.0, "rollout/length_mean": 9.0, "policy/entropy": 2.0}
    row |= {"eval/mean": 0.7, "grad/norm": 1.0, "grad/skipped": 0.0, "adv/std": 1.0}
    rows = [
        {"step": i} | {name: x + i / 9 * (name != "grad/skipped") for name, x in row.items()}
        for i in range(5)
    ]
    run = write_run(tmp_path / "r", steps=5)
    write_rows(run / "metrics.jsonl", rows)
    browser.open(write_page([run], tmp_path / "page.html"))
    top = "[...document.querySelectorAll('#curves .body > .grid h4')].map((x) => x.textContent)"
    wanted = ["reward/mean", "eval/mean", "policy/kl_ref", "rollout/length_mean", "policy/entropy"]
    browser.until(f"{top}.length === 5")
    assert browser.value(top) == wanted
    units = "[...document.querySelectorAll('#curves .grid small')].map((x) => x.textContent)"
    assert browser.value(units) == ["", "", "nats per token", "tokens", "nats per token"]
    shown = browser.value("document.querySelector('body').innerText")
    assert [line for line in shown.splitlines() if line.strip() == "r"] == ["r"] and "Run" not in shown

    # the others are drawn when they are opened or looked for; what never changed is a table
    folds = "[...document.querySelectorAll('#curves summary')].map((x) => x.textContent)"
    assert browser.value(folds) == ["others (2): adv, grad", "with a single value (1)"]
    cells = "[...document.querySelectorAll('#curves td')].map((x) => x.textContent)"
    assert browser.value(cells) == ["grad/skipped", "0"]
    others = "[...document.querySelectorAll('#curves details h4')].map((x) => x.textContent).join()"
    assert browser.value(others) == ""
    browser.value("document.querySelector('#curves summary').click()")
    browser.until(f"{others} === 'adv/std,grad/norm'")
    browser.value("document.getElementById('filter').value = 'grad/'")
    browser.value("document.getElementById('filter').dispatchEvent(new Event('input'))")
    browser.until(
        f"{others} === 'grad/norm' && document.querySelectorAll('#curves details[open]').length === 2"
    )
    assert not browser.errors


@pytest.mark.slow
def test_a_browser_shows_the_rest(browser, page):
    browser.open(page)
    symptoms = browser.value("[...document.querySelectorAll('#symptoms .symptom')].map((x) => x.textContent)")
    said = "learning rate, steps 5008 to 5020. The learning rate of the last 5 steps is 0, so nothing is "
    said += "learned. What to do: raise --lr or"
    assert [line.startswith(f"seed{k}, {said}") for k, line in enumerate(symptoms)] == [True, True]
    for selector in ("#spread .chart path.band", "#phases .chart rect.bar"):
        section = selector.split()[0]
        browser.value(f"document.querySelector('{section}').scrollIntoView()")
        browser.until(f"document.querySelectorAll('{selector}').length > 0")
    browser.point("#phases .chart svg")
    tip = browser.value("document.getElementById('tip').textContent")
    assert "1 s  generate" in tip and "0.5 s  train" in tip and "0.5 s  other" in tip
    browser.point("#spread .chart svg")
    assert "50%  4" in browser.value("document.getElementById('tip').textContent")
    cells = browser.value(
        "[...document.querySelectorAll('#options > .body > .wide td')].map((x) => x.textContent)"
    )
    assert cells[cells.index("lr") : cells.index("lr") + 4] == ["lr", "0.001", "0.001", "0.002"]
    why = browser.value("document.querySelector('#responses .without').textContent")
    assert why.startswith("seed1: single tokens were not recorded") and "--tokens-every" in why
    texts = browser.value("[...document.querySelectorAll('#samples .text')].map((x) => x.textContent)")
    assert texts == ["</script><b>5"]
    assert not browser.errors


@pytest.mark.slow
def test_what_decides_the_speed_of_a_page_is_bounded(browser, page):
    """Runs of 10,000 steps: the points of each chart, the elements of each and of the page, and its bytes."""
    browser.open(page)
    browser.value("document.querySelectorAll('#curves summary').forEach((x) => x.click())")
    for section in ("curves", "spread", "phases"):
        for i in range(browser.value(f"document.querySelectorAll('#{section} .chart').length")):
            browser.value(f"document.querySelectorAll('#{section} .chart')[{i}].scrollIntoView()")
            browser.until(f"!document.querySelectorAll('#{section} .chart')[{i}].matches('.waiting')")
    charts = browser.value(
        "[...document.querySelectorAll('.chart')].map((chart) => [chart.querySelectorAll('*').length,"
        " ...[...chart.querySelectorAll('path')].map((p) => p.getAttribute('d').split(/[ML]/).length - 1)])"
    )
    elements, points = zip(*((n, sum(paths)) for n, *paths in charts))
    most = 2 * 2 * build.MOST + 100  # two curves, each with its running mean, and the axes
    assert len(charts) == 13 and max(elements) < 250 and max(points) < most
    steps = blocks(page)["data"]["runs"][0]["samples"]
    assert (len(steps), steps[0], steps[-1]) == (1000, 1, 10_000)
    assert browser.value("document.querySelectorAll('*').length") < 6_000
    assert page.stat().st_size < 2_500_000


def test_no_page_is_written_over_that_of_other_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b", "x/a")]
    for args in ([runs[0]], [runs[1]], runs[:2], runs[1:], [runs[0], runs[2]]):
        commands.main(["report", *args])
    pages = re.findall(r"report: (\S+) ", capsys.readouterr().out)
    x = tmp_path.name
    assert pages == [
        f"{runs[0]}/report.html",
        f"{runs[1]}/report.html",
        "a_b.html",
        "b_a.html",
        f"{x}-a_x-a.html",
    ]
    assert all((tmp_path / page).is_file() for page in pages)
