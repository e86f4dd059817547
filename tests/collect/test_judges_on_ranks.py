"""Judges over two ranks: pairs within groups, and judges on servers. For the rest see test_joint_judging."""

import dataclasses

import chats
import judges
import pytest
import ranks
import tiny
import torch
from fake_server import FakeServer, serving
from test_judging import PROMPTS, G, rollout_of

from rft_fn import collect, model, reward
from rft_fn.reward import forms
from rft_fn.run import load_rewards, options
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

pytestmark = pytest.mark.slow

TWINS = [dataclasses.replace(p, text=f"{i % 3}=") for i, p in enumerate(PROMPTS)]  # 0 and 3, 1 and 4 alike
TOKENIZER = chats.tokenizer(chats.CHATML, end="<|im_end|>")
HOW = "form='terse',temperature=1.0,max_new=10,patience=99"


def longer(question, key, j):
    """The longer of the two responses is better."""
    a, b = (question.rpartition(f"<response_{x}>")[2].partition(f"</response_{x}>")[0] for x in "ab")
    if len(a) == len(b):
        return "<better>tie</better>"
    return f"<better>{'AB'[len(a) < len(b)]}</better>"


def strategy_of(world):
    if world > 1:
        return get_strategy(StrategyConfig())
    return get_fake_strategy()


def judged_in_pairs(rank, world=1):
    """Verdicts on pairs within groups, where two prompts of different ranks have one text."""
    pairs = reward.generative(judges.engine(longer, TOKENIZER), TOKENIZER, form=forms.pair(reasoning=False))
    how = {"timeout": 60.0, "state": reward.trainer_state(3, 9), "seed": 5}
    score = reward.weighted(judge=(pairs, 1.0))
    return collect.gather_and_judge(
        strategy_of(world), score, rollout_of(), TWINS, tiny.tokenizer(), **how
    )._asdict()


def test_pairs_are_within_a_group_and_not_within_a_text_on_any_rank():
    """[N, G]: each is what the group gets alone."""
    one = judged_in_pairs(0)
    for found in ranks.run(2, "test_judges_on_ranks:judged_in_pairs", 2):
        assert torch.equal(found["reward"], one["reward"]) and found["extra"] == one["extra"]
    assert len(one["reward"].unique()) > 2
    form = forms.pair(reasoning=False)
    for i, got in enumerate(one["reward"]):
        fn = reward.generative(judges.engine(longer, TOKENIZER), TOKENIZER, form=form)
        texts = one["texts"][i * G : (i + 1) * G]
        assert fn([TWINS[i].text] * G, texts) == pytest.approx(got.tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return judges.coin(tmp_path_factory.mktemp("judge") / "coin")


def by_name(rank, spec, world):
    """As a run has it: the check on one rank, then a batch, then one with fewer prompts than ranks."""
    st = strategy_of(world)
    score = load_rewards([spec], options.Data(), st)
    tokenizer = tiny.tokenizer()
    how = {"timeout": 60.0, "state": reward.trainer_state(3, 9), "seed": 5}
    collect.check_reward(st, score, PROMPTS[:2], tokenizer=tokenizer)
    few = collect.gather_and_judge(st, score, rollout_of(rollout_texts()[:G]), PROMPTS[:1], tokenizer, **how)
    found = collect.gather_and_judge(st, score, rollout_of(), PROMPTS, tokenizer, **how)
    score.close()
    return {"few": few.reward, "reward": found.reward, "said": found.extra["judge/said"]}


def rollout_texts():
    return reward.responses(rollout_of(), tiny.tokenizer())


@pytest.mark.parametrize("world", [1, 2])
def test_a_judge_on_servers_says_what_one_in_this_process_says(folder, world):
    """On two ranks each asks by itself: one that has nothing to ask keeps nobody waiting."""
    want = by_name(0, f"judge:{folder}({HOW})", 1)
    assert set(want["reward"].flatten().tolist()) == {0.0, 1.0}
    server = FakeServer(model.load(folder), model.load_tokenizer(folder))
    with serving(server):
        spec = f"judge:{folder}({HOW},engine_type='openai',servers=('{server.url}',))"
        found = [by_name(0, spec, 1)]
        if world > 1:
            found = ranks.run(world, "test_judges_on_ranks:by_name", spec, world)
    assert not [path for path, _ in server.calls if "sleep" in path and path != "/is_sleeping"]
    for one in found:
        assert one["said"] == want["said"]
        assert torch.equal(one["reward"], want["reward"]) and torch.equal(one["few"], want["few"])
