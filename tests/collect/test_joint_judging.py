"""One reward of each source over two ranks: the same numbers, one question for each response, one error."""

import dataclasses

import chats
import fake_host
import judges
import pytest
import ranks
import tiny
import torch
from each_case import each
from test_judging import PROMPTS, rollout_of

from rft_fn import collect, dist, model, reward
from rft_fn.reward import forms
from rft_fn.reward.row_weights import RowWeights
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

FIRST, ROWS, OTHER, BROKEN = 9, 10, 11, 12  # lengths of a run, by which the host knows what is asked
NAMES = ("function", "remote", "model", "judge")
JUDGED_BY = chats.tokenizer(chats.CHATML, end="<|im_end|>")


def digits(completions):
    return [sum(map(ord, c)) / 3 for c in completions]


def verdict(question, key, j):
    """That any other key or question would change."""
    return f"<score>{(key + 7 * len(question)) % 11}</score>"


def total_of(body):
    return body.get("state", {}).get("max_steps")


def answer(connection, body, closing):
    """A number of each key; nothing about the last prompt, which is rank 1's, where the run is BROKEN."""
    if total_of(body) == BROKEN and PROMPTS[-1].text in body["prompts"]:
        return fake_host.status(400, '{"error": "remote is lost"}')(connection, body, closing)
    keys = iter(body["keys"])
    return fake_host.rewards(lambda _: next(keys) % 1000 / 7)(connection, body, closing)


class Sources:
    """A function, a judge, a remote and a model as rewards, which note what they were asked."""

    def __init__(self, st, url):
        self.fails = {}
        self.questions = []
        engine = judges.engine(self.verdict, JUDGED_BY)
        self.judge = reward.generative(engine, JUDGED_BY, form=forms.rating(reasoning=False))
        self.remote = reward.served_at(url, batch=4, tries=1)
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

        self.model = dataclasses.replace(self.model, prepare=prepared)

    def fail(self, name):
        if self.fails.get(name) == dist.rank():
            raise KeyError(f"{name} is lost")

    def scored(self, rows, budget):
        self.rows += len(rows.tokens)
        return self.st.score(self.apply, self.params, rows, budget, fields=("score",))

    def function(self, completions, row):
        self.fail("function")
        return [x + r for x, r in zip(digits(completions), row, strict=True)]

    def verdict(self, question, key, j):
        self.fail("judge")
        self.questions.append(question)
        return verdict(question, key, j)

    def score(self):
        parts = {"function": (self.function, 0.7), "remote": (self.remote, 0.1), "model": (self.model, 2.0)}
        parts["judge"] = (self.judge, 3.0)
        parts["odd"] = (self.model.head("score"), RowWeights("odd", {"1": -1.0}))
        return reward.Weighted(parts)


def odd(prompts=PROMPTS):
    return [dataclasses.replace(p, columns={**p.columns, "odd": p.index % 2}) for p in prompts]


def every_case(rank, url, world=1):
    st = get_fake_strategy()
    if world > 1:
        st = get_strategy(StrategyConfig())
    assert st.world == world
    sources = Sources(st, url)
    score = sources.score()
    tokenizer = tiny.tokenizer()
    how = {"timeout": 60.0, "state": reward.trainer_state(3, FIRST), "seed": 5}
    judged = collect.gather_and_judge(st, score, rollout_of(), odd(), tokenizer, **how)
    out = {"judged": judged._asdict(), "rows": sources.rows, "questions": sources.questions}

    order = torch.randperm(len(rollout_of().group), generator=torch.Generator().manual_seed(1))
    sources.questions = []
    how["state"] = reward.trainer_state(3, ROWS)
    mixed = rollout_of([out["judged"]["texts"][i] for i in order], rollout_of().group[order].tolist())
    out["mixed"] = collect.gather_and_judge_rows(st, score, mixed, odd(), tokenizer, **how)
    out["questions of rows"] = sources.questions
    sources.questions = []
    how["state"] = reward.trainer_state(3, OTHER)
    few = collect.gather_and_judge(st, score, rollout_of(judged.texts[:3]), odd()[:1], tokenizer, **how)
    out["few"] = few.reward

    checked = collect.check_reward(st, score, odd(), tokenizer=tokenizer)
    out["checked"] = {name: x.parts for name, x in checked.items()}

    # an error of one rank, in each of the sources, is one of all; and the next batch is as the first
    for name in NAMES:
        sources.fails = {name: world - 1}
        how["state"] = reward.trainer_state(3, {"remote": BROKEN}.get(name, OTHER))
        try:
            collect.gather_and_judge(st, score, rollout_of(), odd(), tokenizer, **how)
        except Exception as error:
            out[name] = type(error).__name__, str(error)
        sources.fails = {}
    how["state"] = reward.trainer_state(3, OTHER)
    out["again"] = collect.gather_and_judge(st, score, rollout_of(), odd(), tokenizer, **how).reward
    return out


def hosted(run):
    """(what run(url) returns, {length: the texts that the host was asked for})."""
    with fake_host.hosting([answer]) as [host]:
        found = run(host.url)
    asked = {}
    for _, _, body in host.seen:
        asked.setdefault(total_of(body), []).extend(body["completions"])
    return found, asked


@pytest.fixture(scope="module")
def pair():
    return hosted(lambda url: ranks.run(2, "test_joint_judging:every_case", url, 2))


@pytest.fixture(scope="module")
def both(pair):
    return pair[0]


@pytest.fixture(scope="module")
def single():
    return hosted(lambda url: every_case(0, url))


@pytest.fixture(scope="module")
def alone(single):
    return single[0]


def test_every_rank_has_the_numbers_of_one_process(both, alone):
    for found in both:
        for name in (*NAMES, "odd"):
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


def test_each_response_is_asked_for_once(pair, single):
    """Of the host and of the judge, of a batch and of rows in any order; the model scores its rows once."""
    both, alone = pair[0], single[0]
    texts = sorted(alone["judged"]["texts"])
    for _, asked in (pair, single):
        assert sorted(asked[FIRST]) == sorted(asked[ROWS]) == texts
    for name in ("questions", "questions of rows"):
        asked = [question for found in both for question in found[name]]
        assert sorted(asked) == sorted(alone[name]) and len(asked) == len(set(asked)) == len(texts)
        assert all(found[name] for found in both)
    assert all(found["rows"] == alone["rows"] for found in both)  # of which each rank scores a share


def test_a_head_is_asked_for_the_rows_of_its_label_alone(alone):
    parts = alone["judged"]["parts"]
    torch.testing.assert_close(parts["odd"][1::2], parts["model"][1::2])
    assert parts["odd"][::2].isnan().all()
    assert alone["again"].equal(alone["judged"]["reward"])


@each("name", NAMES)
def test_what_one_rank_raises_reaches_all(both, name):
    own = "KeyError", f"'{name} is lost'"
    if name == "remote":
        own = "ValueError", both[1][name][1]
    assert both[1][name] == own and f"{name} is lost" in own[1] and "rank" not in own[1]
    kind, line = both[0][name]
    assert kind == "ValueError" and line.startswith("rank 1: ") and f"{name} is lost" in line
    assert f"reward '{name}'" in line
    assert both[0]["again"].equal(both[0]["judged"]["reward"])
