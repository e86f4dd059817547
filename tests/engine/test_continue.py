"""Generation from where a row is: limits by row, streams from an offset, and the law that ties them together.

A sample that is cut anywhere and continued equals the uncut one.
"""

import math
import warnings

import pytest
import ref
import tiny
import torch
from each_case import each
from families import small
from hypothesis import given, settings
from hypothesis import strategies as st

import rft_fn as rft
from rft_fn import data, engine, rng
from rft_fn.engine import requests
from rft_fn.engine.requests import Stop
from rft_fn.environment.tiny_models import new_tokenizer
from rft_fn.rollout import concat, extend, prefixes, take

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17], [18, 19]]
KEYS = [rng.fold_in(0, i) for i in range(len(PROMPTS))]
KINDS = (
    "Llama",
    "Mamba",
    "Qwen3Next",
    "xLSTM",
    "Rwkv",
    "RecurrentGemma",
)  # padded; by length; by row; no cache


@pytest.fixture(scope="module")
def llama():
    return engine.hf(tiny.llama(), tiny.tokenizer(), batch=5)


def in_pieces(eng, prompts, keys, n, sampling, piece):
    """The rollout whose row b is sampled `piece[b]` tokens at a time; and in how many rounds."""
    whole = eng.generate(prompts, keys, n=n, sampling=sampling, max_new=piece)
    rounds = 1
    while True:
        # the rows that were cut, each with what its own prompt and stream have left
        drawn = whole.mask.sum(-1).tolist()
        cut = [b for b, x in enumerate(whole.truncated.tolist()) if x and drawn[b] < sampling.max_new]
        if not cut:
            return whole, rounds
        more = eng.generate(
            prefixes(take(whole, cut)),
            [(keys[b // n], b % n) for b in cut],
            sampling=sampling,
            max_new=[min(piece[b], sampling.max_new - drawn[b]) for b in cut],
            start=[drawn[b] for b in cut],
        )

        # back into their places
        longer = extend(take(whole, cut), more)
        size = len(drawn)
        place = [size + cut.index(b) if b in cut else b for b in range(size)]
        whole = take(concat([whole, longer], prompts=[len(prompts)] * 2), place)
        whole = rft.tree.replace(whole, group=torch.arange(size) // n)
        rounds += 1


def same(got, want, tolerance=1e-4):
    """Each row of both, without padding: tokens exactly, log-probs up to rounding."""
    assert got.length.tolist() == want.length.tolist()
    for name in ("truncated", "group", "version"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for b, size in enumerate(want.length.tolist()):
        assert got.tokens[b, :size].tolist() == want.tokens[b, :size].tolist()
        assert got.mask[b, :size].tolist() == want.mask[b, :size].tolist()
        torch.testing.assert_close(got.logp[b, :size], want.logp[b, :size], rtol=0, atol=tolerance)


SAMPLINGS = st.builds(
    rft.Sampling,
    temperature=st.sampled_from([1.0, 0.7, 1.5, 0.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    max_new=st.integers(2, 14),
    stop=st.sampled_from([(), (20, 21), ("1",), ("12", "3+"), (" ", 25), ("+1=", "00")]),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_sample_cut_anywhere_and_continued_equals_the_uncut_one(llama, found):
    """Any cuts of every row, prompts of any length, several samples of a prompt, with and without stops."""
    n = found.draw(st.integers(1, 3))
    prompts = found.draw(
        st.lists(st.lists(st.integers(3, 40), min_size=1, max_size=9), min_size=1, max_size=4)
    )
    keys = found.draw(st.lists(st.integers(0, 2**62), min_size=len(prompts), max_size=len(prompts)))
    sampling = found.draw(SAMPLINGS)
    size = len(prompts) * n
    piece = found.draw(st.lists(st.integers(1, sampling.max_new), min_size=size, max_size=size))
    whole = llama.generate(prompts, keys, n=n, sampling=sampling)
    same(in_pieces(llama, prompts, keys, n, sampling, piece)[0], whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_holds_however_rows_are_batched(kind):
    """Also where the model's cache allows no padding, several rows, or no cache at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eng = engine.hf(small(kind, torch.float32), tiny.tokenizer(), batch=4)
        sampling = rft.Sampling(temperature=0.9, max_new=9)
        whole = eng.generate(PROMPTS, KEYS, n=2, sampling=sampling)
        got, rounds = in_pieces(eng, PROMPTS, KEYS, 2, sampling, [1, 2, 3, 4, 5, 6, 7, 8, 9, 2])
    assert rounds > 3 and whole.logp[whole.mask].min() < -0.1
    same(got, whole)


def test_one_key_continues_all_samples_of_a_prompt(llama):
    """Sample 0 from its own tokens, the others as branches: sample j draws from stream j from there on."""
    sampling = rft.Sampling(max_new=12)
    whole = llama.generate(PROMPTS, KEYS, n=1, sampling=sampling)
    rows = [b for b, size in enumerate(whole.mask.sum(-1).tolist()) if size > 4]
    ids = prefixes(take(whole, rows), [len(PROMPTS[b]) + 4 for b in rows])
    more = llama.generate(ids, [KEYS[b] for b in rows], n=3, sampling=sampling, start=[4] * (3 * len(rows)))
    assert len(rows) > 2
    for i, b in enumerate(rows):
        first = more.tokens[3 * i, : more.length[3 * i]].tolist()
        uncut = whole.tokens[b, : whole.length[b]].tolist()
        assert first[: len(uncut)] == uncut  # its limit is its own again, so that it may be longer
        alone = llama.generate([ids[i]], [(KEYS[b], 2)], sampling=sampling, start=[4])
        assert torch.equal(alone.tokens[0], more.tokens[3 * i + 2, : alone.length[0]])


def test_a_pair_in_place_of_a_key_numbers_the_samples(llama):
    """More samples of the same prompts are those that a larger n would have had."""
    sampling = rft.Sampling(max_new=6)
    five = llama.generate(PROMPTS, KEYS, n=5, sampling=sampling)
    last = llama.generate(PROMPTS, [(key, 3) for key in KEYS], n=2, sampling=sampling)
    rows = [5 * i + j for i in range(len(PROMPTS)) for j in (3, 4)]
    same(last, take(five, rows))


def drawn_by(lm, prompt, stream, at):
    """The definition: the token that the numbers of one draw choose, from `at` draws into the stream."""
    with torch.no_grad():
        p = lm(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    depth = math.ceil(math.log2(len(p)))
    u = torch.rand((at + 1) * depth, generator=stream, dtype=torch.float64)[-depth:]
    return ref.drawn(p.numpy(), u.numpy())[0]


def test_a_row_draws_from_its_start_in_its_stream(llama):
    start = [0, 3, 50, 1, 1000, 7]
    sampling = rft.Sampling(max_new=1)
    r = llama.generate(PROMPTS[:3], KEYS[:3], n=2, sampling=sampling, start=start)
    for b, at in enumerate(start):
        stream = rng.generator(rng.fold_in(KEYS[b // 2], b % 2))
        assert r.tokens[b, r.length[b] - 1] == drawn_by(tiny.llama(), PROMPTS[b // 2], stream, at)


def test_a_row_ends_at_its_own_limit(llama):
    """It is the beginning of the row with the common limit, and `truncated` where that goes on."""
    sampling, limits = rft.Sampling(max_new=12), [1, 12, 3, 7, 5, 2, 12, 9, 4, 1]
    whole = llama.generate(PROMPTS, KEYS, n=2, sampling=sampling)
    short = llama.generate(PROMPTS, KEYS, n=2, sampling=sampling, max_new=torch.tensor(limits))
    for b, most in enumerate(limits):
        free, cut = (r.tokens[b][r.mask[b]].tolist() for r in (whole, short))
        assert cut == free[:most]
        assert bool(short.truncated[b]) == (len(free) > most or bool(whole.truncated[b]))
    assert short.truncated.any()


def test_a_stop_text_may_begin_before_the_cut(llama):
    """It ends the response at the token that completes it, as it does in the uncut one."""
    tokenizer, free = tiny.tokenizer(), llama.generate(PROMPTS, KEYS, n=4, sampling=rft.Sampling(max_new=12))
    tried = 0
    for b in range(len(free.tokens)):
        response = free.tokens[b][free.mask[b]].tolist()
        pair = tokenizer.decode(response[3:5])
        if len(response) < 7 or len(pair) < 2 or pair in tokenizer.decode(response[:4]):
            continue
        tried += 1
        sampling, key = rft.Sampling(max_new=12, stop=(pair,)), (KEYS[b // 4], b % 4)
        uncut = llama.generate([PROMPTS[b // 4]], [key], sampling=sampling)
        assert uncut.mask.sum() == 5 and not uncut.truncated[0]
        ids = prefixes(uncut, [int(uncut.length[0]) - 1])
        more = llama.generate(ids, [key], sampling=sampling, start=[4])
        assert more.tokens.tolist() == uncut.tokens.tolist() and not more.truncated[0]

        # where the stream begins, so does the response: no text begins in what a prompt is
        other = llama.generate(ids, [key], sampling=rft.Sampling(max_new=1, stop=(pair,)))
        assert bool(other.truncated[0]) == (int(other.tokens[0, -1]) != tokenizer.eos_token_id)
    assert tried > 3


class Letters:
    """Token i is the letter i."""

    def decode(self, tokens, **_):
        return "".join("abcdefgh"[t] for t in tokens)


@each(
    ("before", "kept"),
    [
        ([0, 2, 0], [0, 2, 0]),  # "aca" has none of the texts
        ([0, 1, 2, 3, 0], [1, 2, 3, 0]),  # "abc" does not end a response twice
        ([0, 1, 2, 0, 1, 2], [1, 2]),
        ([3, 3, 0, 1], [3, 0, 1]),
        ([], []),
    ],
)
def test_a_text_that_stands_before_a_response_does_not_end_it(before, kept):
    stop = Stop(Letters(), frozenset(), ("abc", "dd"))
    assert stop.unfinished(before) == kept
    assert not stop.ends([*kept, 4])
    assert stop.ends([*stop.unfinished([*before, 0, 1]), 2])
    assert Stop(Letters(), frozenset(), (5,)).unfinished(before) == []


def plain(rollout):
    """All fields of a rollout without media, by name."""
    return {name: x for name, x in vars(rollout).items() if x is not None and name != "sampling"}


def test_no_prompts_give_a_rollout_without_rows(llama):
    """Its fields have the types of one with rows, and the operations on rollouts take it."""
    sampling = rft.Sampling(max_new=4)
    some = llama.generate(PROMPTS, KEYS, n=2, sampling=sampling)
    none = llama.generate([], [], n=2, sampling=sampling, max_new=[], start=[])
    assert none.tokens.shape == none.mask.shape == none.logp.shape == (0, 0)
    assert {name: (x.dtype, len(x)) for name, x in plain(none).items()} == {
        name: (x.dtype, 0) for name, x in plain(some).items()
    }
    assert prefixes(none) == [] and len(take(none, []).tokens) == 0
    both = concat([some, none, some], prompts=[5, 0, 5])
    assert both.group.tolist() == [i // 2 for i in range(20)]
    same(take(both, range(10)), some)
    same(extend(some, none), none)
    assert llama.score(none).shape == (0, 0) and rft.reward.responses(none, tiny.tokenizer()) == []


def test_prompts_are_ids_or_prompts_or_text():
    """A text is encoded as `data` encodes a question: as a chat where the tokenizer has a template."""
    bare, chat = new_tokenizer(), new_tokenizer()
    chat.chat_template = (
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    for tokenizer in (bare, chat):
        eng = engine.hf(tiny.llama(), tokenizer)
        dataset = data.from_rows([{"q": "1+2"}], tokenizer, template="{q}", name="one")
        prompt = data.take(dataset, 1, seed=0)[0][0]
        r = eng.generate([prompt, prompt.ids, "1+2"], [7, 7, 7], n=2, sampling=rft.Sampling(max_new=4))
        assert r.tokens[0, : len(prompt.ids)].tolist() == prompt.ids
        for b in range(2, 6):
            assert torch.equal(r.tokens[b], r.tokens[b % 2])
    assert requests.token_ids(["1+2"], bare) != requests.token_ids(["1+2"], chat)


REFUSED = [
    ({"prompts": [[3], []]}, "prompts: expected at least one token, got none in prompt 1"),
    ({"prompts": [[3], ""]}, "prompts: expected at least one character, got an empty text in prompt 1"),
    ({"prompts": [[3], ["4"]]}, "prompts: expected token ids, got text in prompt 1"),
    ({"prompts": [[3], [4] * 120], "max_new": [9, 9, 8, 9]},
     "prompts: expected prompt + max_new <= the model's window of 128 tokens, got 120 + 9 in prompt 1"),
    ({"keys": [1]}, "prompts: expected a key for each and n >= 1, got 2 prompts, 1 keys, n = 2"),
    ({"prompts": [], "keys": [1]}, "prompts: expected a key for each and n >= 1, got 0 prompts, 1 keys"),
    ({"n": 0}, "prompts: expected a key for each and n >= 1, got 2 prompts, 2 keys, n = 0"),
    ({"keys": [1, 2.0]},
     "keys: expected an int, or a pair (int, number of the first sample), got 2.0 for prompt 1"),
    ({"keys": [(1, -1), 2]}, "got (1, -1) for prompt 0"),
    ({"keys": [(1, 2, 3), 2]}, "got (1, 2, 3) for prompt 0"),
    ({"max_new": [9, 9, 9]}, "max_new: expected one for each row, B = 4, got B = 3"),
    ({"max_new": [9, 0, 9, 9]}, "max_new[1]: expected an integer from 1 to sampling.max_new = 10, got 0"),
    ({"max_new": [9, 9, 11, 9]}, "max_new[2]: expected an integer from 1 to sampling.max_new = 10, got 11"),
    ({"max_new": [9, 9, 9, 1.5]}, "max_new[3]: expected an integer from 1 to sampling.max_new = 10, got 1.5"),
    ({"start": [0]}, "start: expected one for each row, B = 4, got B = 1"),
    ({"start": [0, 3, -1, 2]}, "start[2]: expected an integer >= 0, got -1"),
    ({"start": [0, None, 1, 2]}, "start[1]: expected an integer >= 0, got None"),
]  # fmt: skip


@each(("changed", "message"), REFUSED)
def test_a_bad_request_names_what_is_wrong_and_loses_nothing(llama, changed, message):
    """The same line from the engine and from `gather_and_generate`."""
    asked = {"prompts": [[3], [4, 5]], "keys": [1, 2], "n": 2, "sampling": rft.Sampling(max_new=10)} | changed
    strategy = rft.strategy.get_fake_strategy()
    for call in (llama.generate, lambda **x: rft.collect.gather_and_generate(llama, strategy, **x)):
        with pytest.raises(engine.BadRequest) as caught:
            call(**asked)
        assert message in str(caught.value)
    assert llama.status()["alive"]


def test_the_row_with_the_smaller_limit_fits(llama):
    """The window is checked with each row's own limit."""
    r = llama.generate([[4] * 120], [1], sampling=rft.Sampling(max_new=100), max_new=[8])
    assert r.length[0] <= 128
    with pytest.raises(engine.BadRequest, match=r"got 120 \+ 100 in prompt 0"):
        llama.generate([[4] * 120], [1], sampling=rft.Sampling(max_new=100))


def test_text_needs_a_tokenizer():
    with pytest.raises(engine.BadRequest, match=r"expected token ids, got text .* in prompt 1$"):
        requests.token_ids([[3], "1+2"])


def test_a_template_that_fails_is_named_with_its_prompt():
    tokenizer = new_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such turn') }}"
    eng = engine.hf(tiny.llama(), tokenizer)
    with pytest.raises(engine.BadRequest, match=r"expected text that can be encoded, got .*in prompt 1$"):
        eng.generate([[3], "1+2"], [1, 2], sampling=rft.Sampling(max_new=3))
    assert eng.status()["alive"]
