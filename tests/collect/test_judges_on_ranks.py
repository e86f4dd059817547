"""Judges over two ranks: the numbers of one process, one question a response, and one error for all."""

import dataclasses

import chats
import judges
import pytest
import ranks
import tiny
import torch
from fake_server import FakeServer, serving
from test_judging import PROMPTS, G, rollout_of

from rft_fn import collect, dist, model, reward
from rft_fn.reward import forms
from rft_fn.run import load_rewards, options
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

pytestmark = pytest.mark.slow

TWINS = [dataclasses.replace(p, text=f"{i % 3}=") for i, p in enumerate(PROMPTS)]  # 0 and 3, 1 and 4 alike
TOKENIZER = chats.tokenizer(chats.CHATML, end="<|im_end|>")
HOW = "form='terse',temperature=1.0,max_new=10,patience=99"


def by_key(question, key, j):
    """A verdict that any other key, question or sample would change."""
    return f"<score>{(key + 7 * len(question) + j) % 11}</score>"


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


def judged_by(st, fn, prompts=PROMPTS):
    score = reward.weighted(judge=(fn, 1.0))
    state = reward.trainer_state(3, 9)
    how = {"timeout": 60.0, "state": state, "seed": 5}
    return collect.gather_and_judge(st, score, rollout_of(), prompts, tiny.tokenizer(), **how)._asdict()


def every_case(rank, world=1):
    st = strategy_of(world)
    asked = []
    engine = judges.engine(by_key, TOKENIZER, asked=asked)
    alone = reward.generative(engine, TOKENIZER, form=forms.rating(reasoning=False), votes=3)
    out = {"alone": judged_by(st, alone), "asked": [TOKENIZER.decode(p.ids) for p, _ in asked]}
    pairs = reward.generative(judges.engine(longer, TOKENIZER), TOKENIZER, form=forms.pair(reasoning=False))
    out["pairs"] = judged_by(st, pairs, TWINS)

    def lost(*args, **how):
        if dist.rank() == world - 1:
            raise ConnectionError("the judge is lost")
        return engine.generate(*args, **how)

    try:
        judged_by(st, reward.generative(engine._replace(generate=lost), TOKENIZER))
    except Exception as error:
        out["lost"] = type(error).__name__, str(error)
    return out


@pytest.fixture(scope="module")
def both():
    return ranks.run(2, "test_judges_on_ranks:every_case", 2)


@pytest.fixture(scope="module")
def one():
    return every_case(0)


@pytest.mark.parametrize("kind", ["alone", "pairs"])
def test_two_ranks_have_the_numbers_of_one(both, one, kind):
    """Also of pairs within groups, where two prompts of different ranks have one text."""
    for found in both:
        assert torch.equal(found[kind]["reward"], one[kind]["reward"])
        assert found[kind]["extra"] == one[kind]["extra"]
    assert len(one[kind]["reward"].unique()) > 2


def test_each_response_is_asked_about_once(both, one):
    asked = [question for found in both for question in found["asked"]]
    assert asked == one["asked"] and len(asked) == len(PROMPTS) * G
    assert all(found["asked"] for found in both)


def test_pairs_are_within_a_group_and_not_within_a_text(one):
    """[N, G]: each is what the group gets alone."""
    form = forms.pair(reasoning=False)
    for i, got in enumerate(one["pairs"]["reward"]):
        fn = reward.generative(judges.engine(longer, TOKENIZER), TOKENIZER, form=form)
        texts = one["pairs"]["texts"][i * G : (i + 1) * G]
        assert fn([TWINS[i].text] * G, texts) == pytest.approx(got.tolist())


def test_what_a_judge_raises_on_one_rank_is_raised_on_all(both, one):
    assert one["lost"] == ("ConnectionError", "the judge is lost") == both[1]["lost"]
    name, line = both[0]["lost"]
    assert name == "ValueError" and line == "rank 1: reward 'judge': ConnectionError: the judge is lost"


# ---------------------------------------- folders and servers


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
