"""The scripts with models that see or hear: they learn, evaluate and resume to the bit."""

import json

import headless
import pytest
from script_runs import rows
from test_house import load_script as script

from rft_fn.tools.page.build import write_page

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

CASES = [("tiny-vl", "count_squares"), ("tiny-audio", "tone")]
KINDS = {"count_squares": "image", "tone": "audio"}


def grpo(folder, model, task, steps):
    grpo = script("grpo")
    small = {"prompts": 4, "group": 4, "eval_every": 2, "eval_prompts": 64, "save_every": 2, "lr_end": 1.0}
    grpo.main(grpo.Config(model=model, data=(task,), steps=steps, out=str(folder), **small))


@pytest.fixture(scope="module", params=CASES, ids=["vl", "audio"])
def trained(request, tmp_path_factory):
    """(folder of a run of 4 steps, model, task)."""
    model, task = request.param
    folder = tmp_path_factory.mktemp("runs") / task
    grpo(folder, model, task, 4)
    return folder, model, task


def test_a_warmed_up_model_knows_more_than_chance_and_has_more_to_learn(trained):
    folder, _, task = trained
    metrics = rows(folder)
    assert 0.25 < metrics[0]["eval/mean"] < 0.95
    assert all(row["policy/logp_gap"] < 1e-5 for row in metrics)
    assert (folder / "samples.png").stat().st_size > 0
    names = [name for row in rows(folder, "trajectories.jsonl") for name in row["media"]]
    assert names and all(name.startswith(f"{task}-1-") for name in names)

    # what was seen or heard lies beside the tokens of the first response to each prompt
    recorded = rows(folder, "tokens.jsonl")
    assert [row["sample"] for row in recorded if "media" in row] == [0, 0]
    for row in recorded[::4]:
        ((kind, name, uri),) = row["media"]
        assert kind == KINDS[task] and name.startswith(f"{task}-1-") and uri.startswith(f"data:{kind}/")


@pytest.mark.skipif(headless.BROWSER is None, reason="needs chromium")
def test_the_page_of_a_run_shows_the_image_and_plays_the_sound(trained, tmp_path):
    folder, _, task = trained
    ((_, name, uri),) = rows(folder, "tokens.jsonl")[0]["media"]
    page = write_page([folder], tmp_path / "page.html")
    with headless.Browser(tmp_path / "browser") as browser:
        browser.open(page)
        figure = "document.querySelector('#responses .media figure')"
        assert browser.value(f"{figure}.textContent") == name
        assert browser.value(f"{figure}.firstChild.src") == uri
        read = {"image": "naturalWidth >= 8", "audio": "duration > 0.05"}[KINDS[task]]
        browser.until(f"{figure}.firstChild.{read}")
        assert not browser.errors


def test_a_run_that_sees_or_hears_resumes_to_the_bit(trained, tmp_path):
    folder, model, task = trained
    grpo(tmp_path / "again", model, task, 2)
    grpo(tmp_path / "again", model, task, 4)
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_evaluate_reads_the_processor_of_a_run(trained, tmp_path):
    folder, _, task = trained
    evaluate = script("evaluate")
    out = tmp_path / "eval.json"
    evaluate.main(evaluate.Config(model=str(folder), data=(task,), count=64, out=str(out)))
    assert json.loads(out.read_text())["result"]["pass@1"] > 0.25


@pytest.mark.parametrize(("model", "task"), [("tiny-vl", "count_squares:2"), ("tiny-audio", "tone:2")])
def test_sft_lowers_the_loss_of_the_second_level(model, task, tmp_path):
    sft = script("sft")
    sft.main(
        sft.Config(model=model, data=(task,), steps=8, batch=16, lr=3e-3, warmup=0, out=str(tmp_path / "sft"))
    )
    losses = [row["loss"] for row in rows(tmp_path / "sft")]
    assert losses[-1] < 0.7 * losses[0]
