"""One reward of each source over two ranks: the same numbers, one question for each response, one error."""

import asyncio
import dataclasses

import pytest
import ranks
import tiny
import torch
from test_judging import PROMPTS, rollout_of

from rft_fn import collect, dist, model, reward
from rft_fn.reward.row_weights import RowWeights
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy


def digits(completions):
    return [sum(map(ord, c)) / 3 for c in completions]


class Sources:
    """A function, a judge, a remote and a model as rewards, which note what they were asked."""

    def __init__(self, st):
        self.asked = []
        self.fails = {}
        made = model.load_reward("tiny", new=True)
        torch.manual_seed(0)
        torch.nn.init.normal_(made.score.weight)
        self.apply, self.params = st.bind(made)
        self.st = st
        self.rows = 0
        tokenizer = model.load_tokenizer("tiny")
        self.model = reward.scalar(self.scored, made.heads, reading=reward.Reading(tokenizer))
        prepare = self.model.prepare

        def prepared(*batch):
            self.fail("model")
            prepare(*batch)

        self.model.prepare = prepared

    def fail(self, name):
        if self.fails.get(name) == dist.rank():
            raise KeyError(f"{name} is lost")

    def scored(self, rows, budget):
        self.rows += len(rows.tokens)
        return self.st.score(self.apply, self.params, rows, budget, fields=("score",))

    def function(self, completions, row):
        self.fail("function")
        return [x + r for x, r in zip(digits(completions), row, strict=True)]

    async def remote(self, completions, keys):
        self.fail("remote")
        await asyncio.sleep(0.01)
        self.asked += completions
        return [key % 1000 / 7 for key in keys]

    def score(self):
        parts = {"function": (self.function, 0.7), "remote": (self.remote, 0.1), "model": (self.model, 2.0)}
        parts["odd"] = (self.model.head("score"), RowWeights("odd", {"1": -1.0}))
        return reward.Weighted(parts)


def odd(prompts=PROMPTS):
    return [dataclasses.replace(p, columns={**p.columns, "odd": p.index % 2}) for p in prompts]


def every_case(rank):
    st = get_strategy(StrategyConfig()) if dist.world() > 1 else get_fake_strategy()
    sources = Sources(st)
    score = sources.score()
    tokenizer = tiny.tokenizer()
    how = {"timeout": 60.0, "state": reward.trainer_state(3, 9), "seed": 5}
    judged = collect.gather_and_judge(st, score, rollout_of(), odd(), tokenizer, **how)
    out = {"judged": judged._asdict(), "asked": sources.asked, "rows": sources.rows}

    order = torch.randperm(len(rollout_of().group), generator=torch.Generator().manual_seed(1))
    sources.asked = []
    mixed = rollout_of([out["judged"]["texts"][i] for i in order], rollout_of().group[order].tolist())
    out["mixed"] = collect.gather_and_judge_rows(st, score, mixed, odd(), tokenizer, **how)
    out["asked of rows"] = len(sources.asked)
    few = collect.gather_and_judge(st, score, rollout_of(judged.texts[:3]), odd()[:1], tokenizer, **how)
    out["few"] = few.reward

    checked = collect.check_reward(st, score, odd(), tokenizer=tokenizer)
    out["checked"] = {name: x.parts for name, x in checked.items()}

    # an error of one rank, in each of the sources, is one of all; and the next batch is as the first
    for name in ("function", "remote", "model"):
        sources.fails = {name: dist.world() - 1}
        try:
            collect.gather_and_judge(st, score, rollout_of(), odd(), tokenizer, **how)
        except Exception as error:
            out[name] = type(error).__name__, str(error)
        sources.fails = {}
    out["again"] = collect.gather_and_judge(st, score, rollout_of(), odd(), tokenizer, **how).reward
    return out


@pytest.fixture(scope="module")
def both():
    return ranks.run(2, "test_joint_judging:every_case")


@pytest.fixture(scope="module")
def alone():
    return every_case(0)


def test_every_rank_has_the_numbers_of_one_process(both, alone):
    for found in both:
        for name in ("function", "remote", "model", "odd"):
            torch.testing.assert_close(
                found["judged"]["parts"][name], alone["judged"]["parts"][name], equal_nan=True
            )
        torch.testing.assert_close(found["mixed"], alone["mixed"])
        torch.testing.assert_close(found["few"], alone["few"])
    assert both[0]["judged"]["reward"].equal(both[1]["judged"]["reward"])
    assert both[0]["mixed"].equal(both[1]["mixed"])
    for name, parts in both[0]["checked"].items():
        for part, x in parts.items():
            assert x.nan_to_num(-9).equal(both[1]["checked"][name][part].nan_to_num(-9))


def test_each_response_is_asked_for_once(both, alone):
    asked = sorted(both[0]["asked"] + both[1]["asked"])
    assert asked == sorted(alone["asked"]) == sorted(alone["judged"]["texts"])
    assert sum(x["asked of rows"] for x in both) == len(asked)
    assert all(
        x["rows"] == alone["rows"] for x in both
    )  # the model's rows, of which each rank scores a share


def test_a_head_is_asked_for_the_rows_of_its_label_alone(alone):
    parts = alone["judged"]["parts"]
    assert parts["odd"][1::2].equal(parts["model"][1::2]) and parts["odd"][::2].isnan().all()
    assert alone["again"].equal(alone["judged"]["reward"])


@pytest.mark.parametrize("name", ["function", "remote", "model"])
def test_what_one_rank_raises_reaches_all(both, name):
    assert both[1][name] == ("KeyError", f"'{name} is lost'")
    kind, line = both[0][name]
    assert kind == "ValueError" and line.startswith("rank 1: ") and f"{name} is lost" in line
    assert f"reward '{name}'" in line
    assert both[0]["again"].equal(both[0]["judged"]["reward"])
