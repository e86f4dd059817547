"""A custom engine in one file: it answers from a file of recorded responses, and everything takes it."""

import json

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import collect, data, engine, reward, sync
from rft_fn.engine import requests
from rft_fn.types import Engine
from rft_fn.types.engine import Delivered


class Recorded:
    """Answers each prompt with the responses that a JSON file has for its ids; it knows no model."""

    def __init__(self, path, tokenizer):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.answers = {tuple(row["prompt"]): row["responses"] for row in rows}
        self.tokenizer = tokenizer
        self.version = 0

    def generate(self, prompts, keys, *, n=1, sampling):
        ids = requests.token_ids(prompts)
        requests.Request(prompts, keys, n, sampling).check(ids, window=None)
        responses = []
        for prompt in ids:
            for text in self.answers[tuple(prompt)][:n]:
                tokens = self.tokenizer.encode(text)
                responses.append(requests.Response(tokens, [-0.5] * len(tokens), ended=True))
        return requests.assemble(ids, responses, pad=self.tokenizer.pad_token_id, version=self.version)

    def score(self, rollout, *, sampling=None):
        raise ValueError("engine recorded: it has no model that could score")

    def load(self, weights, *, version):
        sizes = [x.numel() * x.element_size() for _, x in weights]
        self.version = version
        return Delivered(len(sizes), sum(sizes), 0.0, version)

    def rest(self):
        pass

    def status(self):
        return {
            "engine": "recorded", "alive": True, "version": self.version, "asleep": False,
            "supported": frozenset({"load"}),
        }  # fmt: skip


def recorded(path, tokenizer):
    """The Engine of a file, as a user would write it: no class to inherit from, nothing to register."""
    own = Recorded(path, tokenizer)
    return Engine(own.generate, own.score, own.load, own.rest, own.rest, own.status)


PROMPTS = [
    data.Prompt([3, 4], "1+1=", {"answer": "2"}, 0),
    data.Prompt([5], "2+2=", {"answer": "4"}, 1),
    data.Prompt([6, 7, 8], "3+3=", {"answer": "6"}, 2),
]
TEXTS = [["2", "3"], ["4", "44"], ["5", "6"]]


@pytest.fixture
def eng(tmp_path):
    rows = [{"prompt": p.ids, "responses": texts} for p, texts in zip(PROMPTS, TEXTS)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recorded(tmp_path / "answers.jsonl", tiny.tokenizer())


def gathered(eng, **strategy):
    st = rft.strategy.get_fake_strategy()._replace(**strategy)
    return collect.gather_and_generate(eng, st, PROMPTS, range(3), n=2, sampling=rft.Sampling(max_new=4))


def right(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


def test_a_rollout_is_what_the_file_says(eng):
    rollout = gathered(eng)
    assert reward.responses(rollout, tiny.tokenizer()) == [text for texts in TEXTS for text in texts]
    assert rollout.group.tolist() == [0, 0, 1, 1, 2, 2] and not rollout.truncated.any()
    assert torch.equal(rollout.logp, -0.5 * rollout.mask)
    for row, g in enumerate(rollout.group.tolist()):
        size = len(PROMPTS[g].ids)
        assert rollout.tokens[row, :size].tolist() == PROMPTS[g].ids and not rollout.mask[row, :size].any()
    score = reward.weighted(right=(right, 1.0))
    judged = reward.judge(score, rollout, PROMPTS, tiny.tokenizer())
    assert judged.reward.tolist() == [[1, 0], [1, 0], [0, 1]]


def test_a_rank_asks_for_its_part_and_an_idle_one_has_no_rows(eng):
    parts = [gathered(eng, rank=r, world=4) for r in range(4)]
    assert [p.group.tolist() for p in parts] == [[0, 0], [1, 1], [2, 2], []]
    assert [len(x.tokens) for x in parts] == [2, 2, 2, 0]


def test_it_is_told_the_version_and_refuses_bad_requests(eng):
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(tiny.llama(), rft.optim.adamw(0.1))
    assert sync.push(st, state, eng, version=4).tensors == len(state.params)
    assert set(gathered(eng).version.tolist()) == {4}
    with pytest.raises(engine.BadRequest, match="a key for each"):
        eng.generate(PROMPTS, [1], sampling=rft.Sampling())
    eng.close()


def test_a_failure_is_final_where_it_asks_for_that(eng):
    final = engine.dead_after_failure(eng)
    with pytest.raises(KeyError):
        final.generate([[9, 9]], [1], sampling=rft.Sampling())
    with pytest.raises(engine.EngineDead, match="engine recorded: expected one that is alive"):
        gathered(final)


def test_a_mismatch_is_explained_without_scores(eng):
    rollout = gathered(eng)
    trainer = rollout.logp - rollout.mask * 1.0
    text = collect.explain_mismatch(rollout, trainer, rft.Sampling(), limit=0.1)
    assert text.startswith("policy/logp_gap is 1 nats per token, above the limit of 0.1. ")
    assert "Look at the weights (the rollout is of version [0]" in text


def test_a_row_of_the_table_makes_it_an_option(eng, monkeypatch):
    """Its options are checked before it is built."""

    def build(config, model, tokenizer):
        assert (config.batch, model) == (7, "tiny")
        return eng

    def check_config(config):
        if config.tp_size != 1:
            raise ValueError("engine_tp_size: expected 1 for file")

    monkeypatch.setitem(engine.ENGINES, "file", engine.EngineType(build, check_config))
    found = engine.get_engine(engine.EngineConfig(type="file", batch=7), "tiny", tiny.tokenizer())
    assert found is eng
    with pytest.raises(ValueError, match="engine_tp_size: expected 1 for file"):
        engine.check_config(engine.EngineConfig(type="file", tp_size=2))
    with pytest.raises(ValueError, match="expected hf, openai, ray, sglang, vllm, file, got 'x'"):
        engine.check_config(engine.EngineConfig(type="x"))
