"""Model cards: what a folder's README.md says of the run that made it, and whose README.md stays."""

import json
from dataclasses import dataclass

import huggingface_hub
import pytest

import rft_fn as rft
from rft_fn.run import card

OPTIONS = {
    "model": "tiny",
    "data": ["sums.jsonl", "owner/questions:main@train=0.5", "addition:2"],
    "algorithm": "dapo",
    "kl": 0.01,
    "reward": ["http://someone:hidden@host/score", "model:/home/me/rm"],
    "out": "runs/x",
    "strategy": {"log_dir": "/home/me/logs", "bf16": True},
    "date": "2026-01-02",
    "digests": {
        "data": [
            {"name": "/home/me/sums.jsonl", "rows": 30, "digest": "d1ge57"},
            {"name": "addition:2", "rows": None, "digest": ""},
        ],
        "files": {"/home/me/mine.py": "c0de"},
    },
    "made_by": {"script": "grpo.py", "rft_fn": "1.2.3"},
}


def run_folder(tmp_path, **options):
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(OPTIONS | options))
    rows = [{"step": i, "reward/mean": i / 10, "loss": 1.0, "grad/norm": 2.0} for i in range(20)]
    rows[9]["eval/mean"] = 0.75
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def made(run, **how):
    """(the metadata, the text) of the card of the run's model."""
    path = rft.run.save_card(run / "model", run, **how)
    assert path == run / "model" / "README.md"
    return huggingface_hub.metadata_load(path), path.read_text()


def test_a_card_says_what_the_run_knows(tmp_path):
    about, text = made(run_folder(tmp_path))
    assert about == {
        "license": "unknown",
        "library_name": "transformers",
        "tags": ["rft_fn", "dapo"],
        "datasets": ["owner/questions"],  # files and tasks are no names
    }
    for line in (
        "* Algorithm: dapo, 20 steps.",
        "* Made by: `grpo.py`, rft_fn 1.2.3, 2026-01-02.",
        "| data | sums.jsonl | 30 | d1ge57 |",
        "| data | addition:2 | generated |  |",
        "| code | mine.py | | c0de |",
        "| eval/mean | 0.75 | 10 |",
        "| reward/mean | 1.9 | 20 |",
        "| reward/mean, mean of the last 10 steps | 1.45 | 20 |",
        ' "kl": 0.01,',
    ):
        assert line in text.splitlines(), line
    # neither secrets nor places of the machine
    assert (
        "hidden" not in text and "/home/me" not in text and "runs/x" not in text and "grad/norm" not in text
    )


def test_options_of_another_meaning_do_not_stop_a_run(tmp_path):
    about, text = made(run_folder(tmp_path, data="x=-1", model=3, reward=None, algorithm=None, digests={}))
    assert "datasets" not in about and "| data | x=-1 | generated |  |" in text
    about, _ = made(run_folder(tmp_path, data=[1, "a/b=0.5"]))
    assert about["datasets"] == ["a/b"]


def test_the_card_of_a_checkpoint_knows_no_later_step(tmp_path):
    run = run_folder(tmp_path)
    change = {"step": 7, "name": "kl", "old": 0.0, "new": 0.01}
    (run / "overrides.jsonl").write_text(json.dumps(change) + "\n")
    _, text = made(run, step=5)
    assert "| reward/mean | 0.4 | 5 |" in text and "eval/mean" not in text and "From step" not in text
    _, text = made(run, step=10)
    assert "| eval/mean | 0.75 | 10 |" in text and "* From step 8 on `kl` was 0.01, and 0.0 before." in text


@pytest.mark.parametrize(
    ("file", "library", "what"),
    [
        ("adapter_config.json", "peft", "Low-rank adapters"),
        ("value_head.safetensors", "rft_fn", "A critic"),
        ("reward_head.safetensors", "rft_fn", "A reward model"),
    ],
)
def test_a_card_says_what_loads_the_folder(file, library, what, tmp_path):
    run = run_folder(tmp_path)
    (run / "model" / file).touch()
    about, text = made(run)
    assert about["library_name"] == library and f"\n{what}, fine-tuned with rft_fn; " in text


def test_the_base_and_its_licence(tmp_path, monkeypatch):
    monkeypatch.setattr(rft.hub, "unreachable", lambda: "offline")
    base = tmp_path / "base"
    base.mkdir()

    def of(model):
        about, _ = made(run_folder(tmp_path, model=str(model)))
        return about.get("base_model"), about["license"]

    assert of("smollm2-135m") == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert of("owner/name") == ("owner/name", "unknown")  # the hub is not reached, and its cache has none
    assert of(base) == (None, "unknown")
    (base / "LICENSE").write_text("  Some Community License\n")
    assert of(base) == (None, "other")
    (base / "LICENSE").write_text("                  Apache License\n  Version 2.0\n")
    assert of(base) == (None, "apache-2.0")
    (base / "README.md").write_text("---\nlicense: mit\nbase_model:\n- owner/first\n---\n# x\n")
    assert of(base) == ("owner/first", "mit")
    (base / "README.md").write_text(
        "---\nlicense: other\nlicense_name: terms\nlicense_link: https://x/y\n---\n"
    )
    about, text = made(run_folder(tmp_path, model=str(base)))
    assert (about["license"], about["license_name"], about["license_link"]) == (
        "other",
        "terms",
        "https://x/y",
    )
    assert "* Base model: `base`; its licence: terms." in text
    (base / "README.md").write_text("---\nlicense: [\n---\n")
    assert of(base) == (None, "apache-2.0")

    fetched = tmp_path / "fetched.md"
    fetched.write_text("---\nlicense: llama3.2\n---\n")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **options: str(fetched))
    assert of("owner/name") == ("owner/name", "llama3.2")


def test_what_somebody_has_written_stays(tmp_path):
    run = run_folder(tmp_path)
    path = run / "model" / "README.md"
    made(run, step=5)
    first = path.read_text()
    # as peft leaves it, when it saves adapters once more
    path.write_text(
        first.replace("library_name: transformers", "library_name: peft") + card._PEFT + "\n- PEFT 1\n"
    )
    made(run, step=6)
    assert "6 steps" in path.read_text()
    for text in (path.read_text().replace("6 steps", "six steps"), "# My model\n"):
        path.write_text(text)
        assert rft.run.save_card(run / "model", run) is None and path.read_text() == text
    path.write_text("---\nlibrary_name: peft\n---\n# Model Card\n[More Information Needed]\n")
    made(run)


@dataclass(frozen=True)
class Config:
    model: str = "tiny"


def test_a_run_writes_the_cards_of_its_models(tmp_path):
    """And notes the file of its options, which is the script."""
    run = rft.run.Run(tmp_path / "r", Config(), total=1)
    (run.folder / "model").mkdir()
    run.resume(0)
    run.write(0, {"loss": 0.5})
    run.finish()
    text = (run.folder / "model" / "README.md").read_text()
    assert "| loss | 0.5 | 1 |" in text and f"* Made by: `test_card.py`, rft_fn {rft.__version__}." in text
    assert not (run.folder / "critic").exists()
    with pytest.raises(ValueError, match=r"run: expected the folder of a run, got .*model"):
        rft.run.save_card(run.folder / "model", run.folder / "model")
