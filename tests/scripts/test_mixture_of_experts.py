"""A run of a small mixture of experts through grpo.py, sampled one step ahead, by the sampler's experts."""

import signal

import pytest
import torch
from families import config
from script_runs import rows, run
from test_hybrid import REWARD

from rft_fn import model
from rft_fn.run import rollout_files

pytestmark = pytest.mark.slow

STEPS = 16


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A folder of random weights whose experts differ and matter, and what trains it."""
    import transformers

    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = model.load_tokenizer("tiny")
    small = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": len(tokenizer), "num_experts": 8}
    small |= {"norm_topk_prob": True}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config("Qwen3Moe", **small, **ends))
        for layer in lm.model.layers:
            layer.mlp.gate.weight.data.normal_(0, 0.1)
            for p in layer.mlp.experts.parameters():
                p.data.normal_(0, 0.15)
    model.save(folder / "model", lm, tokenizer)
    (folder / "reward.py").write_text(REWARD)
    args = ["--model", folder / "model", "--reward", f"{folder / 'reward.py'}:sevens", "--ahead", 1]
    args += ["--data", "addition:1", "--template", "{short}", "--prompts", 4, "--group", 8, "--max-new", 6]
    args += ["--lr", 1e-2, "--save-every", 4, "--eval-every", 100, "--rollouts-every", 8]
    return args


@pytest.fixture(scope="module")
def straight(command, tmp_path_factory):
    """The folder of a run with its canary, which nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run("grpo", *command, "--steps", STEPS, "--replay-routing", "--out", folder, whole=True)
    return folder


def test_it_learns_by_the_samplers_experts(straight, command, tmp_path):
    """One step stale, the trainer is nearer to the sampler than by the experts that it would choose now."""
    found = rows(straight)
    reward = [r["reward/mean"] for r in found]
    assert sum(reward[-4:]) > 5 * sum(reward[:4]) and reward[-1] > 0.3
    assert [r["rollout/staleness_max"] for r in found] == [0] + [1] * (STEPS - 1)
    assert found[0]["policy/logp_gap"] < 1e-5
    rollout, _ = rollout_files.read_rollout(straight / "rollouts" / "step_00000008.safetensors")
    assert rollout.routing.shape == (*rollout.tokens.shape, 2, 2) and rollout.routing.max() <= 8
    run("grpo", *command, "--steps", 5, "--out", tmp_path / "run")  # the rate still rises
    free = [r["policy/logp_gap"] for r in rows(tmp_path / "run")]
    assert free[0] < 1e-5 and sum(free[1:]) > 1.2 * sum(r["policy/logp_gap"] for r in found[1:5])


def test_it_resumes_to_the_bit(straight, command, tmp_path):
    """Killed between checkpoints, with a rollout in flight."""
    args = ("grpo", *command, "--steps", STEPS, "--replay-routing", "--out", tmp_path / "run")
    run(*args, whole=True, interrupted=(signal.SIGKILL, 6, 0.0), code=-9)
    assert 4 <= len(rows(tmp_path / "run")) < STEPS
    run(*args, whole=True)
    for name in ("metrics.jsonl", "trajectories.jsonl", "model/model.safetensors"):
        assert (straight / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name


def test_adapters_of_its_experts_learn_and_resume_to_the_bit(command, tmp_path):
    """Only these are trained; the sampler, one step ahead, has them in whole weights."""
    lm = model.load(command[1])
    lm.lm_head.weight.data *= 10  # it is frozen, and at first too small for any hidden state to be a choice
    model.save(tmp_path / "model", lm, model.load_tokenizer(command[1]))
    steps = 8
    args = ["grpo", *command, "--model", tmp_path / "model", "--lora-rank", 4, "--lora-targets", "experts"]
    args += ["--lora-alpha", 16, "--lr", 3e-2, "--warmup", 0, "--replay-routing", "--steps", steps]
    run(*args, "--out", tmp_path / "straight")
    found = rows(tmp_path / "straight")
    reward = [r["reward/mean"] for r in found]
    assert sum(reward[-3:]) > 3 * sum(reward[:3])
    assert [r["rollout/staleness_max"] for r in found] == [0] + [1] * (steps - 1)
    assert found[0]["policy/logp_gap"] < 1e-5
    run(*args, "--out", tmp_path / "run", interrupted=(signal.SIGKILL, 6, 0.0), code=-9)
    assert 4 <= len(rows(tmp_path / "run")) < steps
    run(*args, "--out", tmp_path / "run")
    for name in ("metrics.jsonl", "trajectories.jsonl", "model/model.safetensors"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
