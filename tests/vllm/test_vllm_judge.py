"""A judge in an engine of vLLM: what one of transformers says, as a command line names it."""

import judges
import pytest
from inprocess import needs_vllm

import rft_fn as rft
from rft_fn.run import load_rewards, options
from rft_fn.run.reward_task import judges_here

pytestmark = needs_vllm
PROMPTS = [f"{i}=" for i in range(8)]
RESPONSES = [f"{i * i}" for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A judge that says score=0 or score=1 about anything, as its key has it."""
    return judges.coin(tmp_path_factory.mktemp("judge") / "coin")


def verdicts(folder, engine_type, temperature, *keys):
    """(the rewards, what was said) for each of several keys, by one engine, which is built at the first."""
    how = f"form='terse',temperature={temperature},max_new=10,patience=99,engine_type='{engine_type}'"
    score = load_rewards([f"judge:{folder}({how})"], options.Data(), rft.strategy.get_strategy())
    ((module, _),) = judges_here(score)
    assert all(p.is_meta for p in module.parameters())  # a forecast loads no weights
    found = [score(PROMPTS, RESPONSES, {}, keys=range(key, key + 8)) for key in keys]
    fn = score.components["judge"][0]
    assert fn.engine.status()["engine"] == engine_type
    score.close()
    assert not fn.engine.status()["alive"]
    return [(x.parts["judge"].tolist(), x.extra["judge/said"]) for x in found]


def test_a_judge_in_vllm_says_what_one_in_transformers_says(folder):
    got, want = (verdicts(folder, name, 0.0, 0) for name in ("vllm", "hf"))
    assert got == want and set(got[0][0]) <= {0.0, 1.0}


def test_the_keys_draw_the_answers_of_a_judge_in_vllm(folder):
    first, other, again = verdicts(folder, "vllm", 1.0, 0, 100, 0)
    assert first == again != other
    assert set(first[0]) | set(other[0]) == {0.0, 1.0}
