"""What takes time about a response starts as it ends, while others are sampled, and changes no reward."""

import threading

import pytest
import tiny
import torch
from test_references import formulas

import rft_fn as rft
from rft_fn import collect, engine, reward
from rft_fn.engine import EngineConfig, process
from rft_fn.engine.hf import build
from rft_fn.reward import early, mathematics

TOKENIZER = tiny.tokenizer()
DATA = rft.data.from_rows(
    [{"sum": f"{i}+{i}", "answer": rf"x^{i}+1"} for i in range(2, 8)],
    TOKENIZER,
    template="{sum}=",
    name="sums",
)
SAMPLING = rft.Sampling(max_new=12, temperature=1.3)
G = 3


def drawn(step=0):
    return rft.data.draw(DATA, 5, step, seed=0)


class Heard:
    """A reward that notes what it is told of, and when it judges."""

    __name__ = "heard"

    def __init__(self):
        self.begun, self.judged, self.fails = [], [], False

    def begin(self, prompts, completions, answer):
        self.begun.append((prompts[0], completions[0], answer[0]))
        assert not self.judged
        if self.fails:
            raise RuntimeError("of a row")

    def __call__(self, prompts, completions, answer):
        self.judged += zip(prompts, completions, answer, strict=True)
        return [float(len(text)) for text in completions]


def source(heard, eng, calls=None):
    st = rft.strategy.get_fake_strategy()
    score = reward.weighted(heard=(heard, 1.0))
    judge = lambda r, prompts, step: collect.gather_and_judge(st, score, r, prompts, TOKENIZER)  # noqa: E731
    return collect.Source(
        strategy=st,
        samples=collect.AsyncSampler(eng, st, calls=calls),
        dataset=DATA,
        judge=judge,
        sampling=SAMPLING,
        seed=0,
        steps=3,
        begin=lambda prompt, tokens: early.begin(score, TOKENIZER, prompt, tokens),
    )


def hf(batch=4):
    return engine.hf(tiny.llama(), TOKENIZER, batch=batch)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", [{}, {"partial_budget": 5}])
def test_rewards_are_told_of_every_whole_response_before_the_rollout_is_judged(way, fails):
    """The same texts as are judged, each once, whatever a row's start raises; cut or not."""
    heard, silent = Heard(), Heard()
    heard.fails = fails
    found = []
    for of, given in ((heard, True), (silent, False)):
        made = source(of, hf())
        made = made if given else made._replace(begin=None)
        each = collect.collector(made, prompts=5, group=G, **way)
        state = each.init()
        for step in range(3):
            of.judged.clear()
            batch, state = each.next(state, step)
            found.append((batch.judged.reward, batch.judged.texts))
            if given:
                told = sorted(heard.begun)
                assert set(heard.judged) <= set(told)
                assert way or told == sorted(heard.judged)
                heard.begun = [x for x in told if x not in heard.judged]  # groups that wait
    for (one, texts), (two, others) in zip(found[:3], found[3:], strict=True):
        assert torch.equal(one, two) and texts == others
    assert silent.begun == []


def test_rows_are_told_of_while_others_are_sampled():
    """A row that ends early is known before the last one has all of its tokens."""
    prompts, keys = drawn()
    at, lm = [], tiny.llama()
    forwards = []
    lm.register_forward_hook(lambda *_: forwards.append(1))
    eng = engine.hf(lm, TOKENIZER, batch=64)
    eng.generate(prompts, keys, n=G, sampling=SAMPLING)
    forwards.clear()

    def told(b, tokens, ended):
        at.append((b, len(forwards)))
        rows[b] = (tokens, ended)

    rows = {}
    r = eng.generate(prompts, keys, n=G, sampling=SAMPLING, on_row=told)
    assert sorted(b for b, _ in at) == list(range(5 * G))
    assert min(x for _, x in at) < max(x for _, x in at) == len(forwards)
    for b, (tokens, ended) in rows.items():
        assert r.tokens[b][r.mask[b]].tolist() == tokens and bool(r.truncated[b]) != ended


@pytest.mark.slow
def test_an_engine_in_its_own_process_tells_of_rows():
    config = EngineConfig(batch=4)
    eng = process.own_process(build, config, tiny.llama(), TOKENIZER)
    prompts, keys = drawn()
    rows = {}
    r = eng.generate(
        prompts, keys, n=G, sampling=SAMPLING, on_row=lambda b, tokens, ended: rows.update({b: tokens})
    )
    plain = eng.generate(prompts, keys, n=G, sampling=SAMPLING)
    eng.close()
    assert rows == {b: r.tokens[b][r.mask[b]].tolist() for b in range(5 * G)}
    assert torch.equal(plain.tokens, r.tokens) and torch.equal(plain.logp, r.logp)


def test_rollouts_that_are_sampled_ahead_tell_of_their_rows_as_they_end():
    """Also of steps to come: by the time that one is judged all of its rows are known."""
    heard = Heard()
    calls = collect.EngineWorker(hf)
    made = source(heard, calls.engine(), calls)
    each = collect.collector(made, prompts=5, group=G, ahead=1)
    state = each.init()
    for step in range(3):
        heard.judged.clear()
        batch, state = each.next(state, step)
        prompts, _ = drawn(step)
        assert len(heard.judged) == 5 * G and batch.prompts == prompts
        assert set(heard.judged) <= set(heard.begun)
    calls.close()


def test_answers_that_were_begun_have_the_verdicts_of_a_call(monkeypatch):
    """Each is asked once, of a child, in whatever order; those that were not begun as ever."""
    questions = formulas(12)
    alone = mathematics.equal_all(questions, seconds=60)
    assert 0 < sum(alone) < 12
    asked = []
    answer = mathematics._children._answer
    monkeypatch.setattr(mathematics._children, "_answer", lambda *x: asked.append(x[0]) or answer(*x))
    mathematics.begin_all(questions[3:9], seconds=60)
    mathematics.begin_all([*questions[3:9], mathematics.Question("7", "7", True)], seconds=60)
    assert mathematics.equal_all(questions, seconds=60) == alone
    assert set(asked) <= set(questions[3:9]) and len(asked) <= 6
    assert not mathematics._children._begun
    assert mathematics.equal_all(questions[::-1], seconds=60) == alone[::-1]


def test_the_reward_of_mathematics_starts_with_the_row():
    fn = reward.math()
    completions = [rf"so \boxed{{{x.answer}}}" for x in formulas(4)]
    references = [["0", x.reference] for x in formulas(4)]
    plain = fn(prompts=completions, completions=completions, answer=references)
    for text, cell in zip(completions, references):
        fn.begin(completions=[text], answer=[cell])
    assert mathematics._children._begun
    assert fn(prompts=completions, completions=completions, answer=references) == plain
    assert early.starts_early(reward.weighted(math=(fn, 1.0)))
    assert not early.starts_early(reward.weighted(exact=(reward.exact(), 1.0)))


def test_answers_that_were_begun_have_the_limit_of_the_call(monkeypatch):
    """What a child is still on when the time is up scores 0, with the warning."""
    gate = threading.Event()
    monkeypatch.setattr(mathematics._children, "_answer", lambda *_: gate.wait(60))
    monkeypatch.setattr(mathematics, "_MINUTE", 0.5)
    monkeypatch.setattr(mathematics, "_A_QUESTION", 0.0)
    mathematics.begin_all(formulas(1), seconds=7)
    while not mathematics._children._waiting.empty():
        threading.Event().wait(0.01)
    with pytest.warns(UserWarning, match="1 of 1 different answers were not compared"):
        assert mathematics.equal_all(formulas(1), seconds=7) == [False]
    gate.set()
