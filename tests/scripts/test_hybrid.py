"""A run of a small hybrid (gated delta net and attention) through grpo.py, sampled one step ahead."""

import signal

import pytest
import torch
from families import config
from script_runs import rows, run

from rft_fn import model

pytestmark = pytest.mark.slow

STEPS = 16
REWARD = '''def sevens(completions, **columns):
    """Return the share of each text that is 7."""
    return [text.count("7") / max(len(text), 1) for text in completions]
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A folder of random weights, and what trains it."""
    import transformers

    folder = tmp_path_factory.mktemp("hybrid")
    tokenizer = model.load_tokenizer("tiny")
    small = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokenizer)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config("Qwen3_5Text", **small, **ends))
    model.save(folder / "model", lm, tokenizer)
    (folder / "reward.py").write_text(REWARD)
    args = ["--model", folder / "model", "--reward", f"{folder / 'reward.py'}:sevens", "--ahead", 1]
    args += ["--data", "addition:1", "--template", "{short}", "--prompts", 4, "--group", 8, "--max-new", 6]
    return [*args, "--lr", 1e-2, "--steps", STEPS, "--save-every", 4, "--eval-every", 100, "--out"]


@pytest.fixture(scope="module")
def straight(command, tmp_path_factory):
    """The folder of a run with its canary, which nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run("grpo", *command, folder, whole=True)
    return folder


def test_it_learns(straight):
    """Engine and trainer agree on the samples of the first step, before any weight is stale."""
    found = rows(straight)
    reward = [r["reward/mean"] for r in found]
    assert sum(reward[-4:]) / 4 > 5 * sum(reward[:4]) / 4 and sum(reward[-4:]) / 4 > 0.3
    assert [r["rollout/staleness_max"] for r in found] == [0] + [1] * (STEPS - 1)
    assert found[0]["policy/logp_gap"] < 1e-5


def test_it_resumes_to_the_bit(straight, command, tmp_path):
    """Killed between checkpoints, with a rollout in flight."""
    run("grpo", *command, tmp_path / "run", whole=True, interrupted=(signal.SIGKILL, 6, 0.0), code=-9)
    assert 4 <= len(rows(tmp_path / "run")) < STEPS
    run("grpo", *command, tmp_path / "run", whole=True)
    for name in ("metrics.jsonl", "trajectories.jsonl", "model/model.safetensors"):
        assert (straight / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
