"""Judges: what they are asked, by which keys, how their answers become rewards, and when they stop a run."""

import io
import itertools
import re
import threading
import warnings

import chats
import judges
import numpy as np
import pytest
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import rft_fn as rft
from rft_fn import reward, rng
from rft_fn.data.chat import Chat
from rft_fn.data.medium import Medium
from rft_fn.engine.time_limit import time_limit
from rft_fn.reward import forms, verdicts
from rft_fn.types import Sampling

TOKENIZER = chats.tokenizer(chats.CHATML, end="<|im_end|>")
NAN = float("nan")


def judge(answer, *, asked=None, window=None, **options):
    """A judge that says answer(question, key, j), and what it logs."""
    options.setdefault("form", forms.rating(reasoning=False))
    engine = judges.engine(answer, TOKENIZER, asked=asked, window=window)
    fn = reward.generative(engine, TOKENIZER, **options)
    logged = {}

    def ask(prompts, completions, **columns):
        logged.clear()
        return fn(
            prompts, completions, log_metric=logged.__setitem__, log_extra=logged.__setitem__, **columns
        )

    return ask, logged


def length_of(question, *_):
    """A verdict: the characters of the response."""
    response = re.search("<response>\n(.*)\n</response>", question, re.S)[1]
    return f"I count. <score>{len(response)}</score>"


# ---------------------------------------- verdicts


def test_each_response_is_asked_about_and_scored_alone():
    asked = []
    ask, logged = judge(length_of, asked=asked)
    assert ask(["1+1", "2+2"], ["two", "abcdefghij"]) == pytest.approx([0.3, 1.0])
    said = ["I count. <score>3</score>", "I count. <score>10</score>"]
    assert logged == {"too_long": 0, "unparsable": 0, "cut_off": 0, "said": said}
    text = TOKENIZER.decode(asked[0][0].ids)
    want = TOKENIZER.apply_chat_template(
        [
            {
                "role": "user",
                "content": forms.rating(reasoning=False).question({"prompt": "1+1", "response": "two"}),
            }
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == want and asked[0][0].ids == TOKENIZER.encode(want)


def test_conversations_are_shown_with_their_roles_and_media_parts_as_text():
    asked = []
    ask, _ = judge(length_of, asked=asked)
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    ask([talk, talk[1:]], [[{"role": "assistant", "content": "Ho"}]] * 2)
    first, second = (TOKENIZER.decode(prompt.ids) for prompt, _ in asked)
    assert "<question>\nsystem: Be brief.\n\nuser: Hi\n</question>" in first and "<response>\nHo\n" in first
    assert "<question>\nHi\n</question>" in second


def test_columns_reach_the_question_and_are_asked_of_the_data():
    form = forms.rating(criteria="{rule}", reference="answer", reasoning=False)
    fn = reward.generative(judges.engine(length_of, TOKENIZER), TOKENIZER, form=form)
    score = reward.weighted(good=(fn, 2.0))
    assert set(reward.columns(score)) == {"rule", "answer"}
    found = score(["q"], ["abc"], {"rule": ["Short."], "answer": ["x"], "other": [1]})
    assert found.total.tolist() == pytest.approx([0.6])
    assert found.metrics["good/unparsable"].tolist() == [0]
    with pytest.raises(ValueError, match="no column 'rule'"):
        score(["q"], ["abc"], {"answer": ["x"]})


def test_a_tokenizer_without_a_template_gets_the_bare_question():
    asked = []
    tokenizer = rft.model.load_tokenizer("tiny")
    engine = judges.engine(lambda *_: "score=1", tokenizer, asked=asked)
    fn = reward.generative(engine, tokenizer, form=forms.terse())
    assert fn(["sort:31="], ["1<end>3"]) == [1.0]
    unknown = tokenizer.unk_token_id
    want = [*tokenizer.encode("sort,31=:1"), unknown, *tokenizer.encode("end"), unknown]
    want += tokenizer.encode("3:")
    assert asked[0][0].ids == want


def test_a_chat_template_that_drops_the_question_is_refused():
    with pytest.raises(ValueError, match=r"chat template: expected .* question once, with 2 places"):
        reward.generative(
            judges.engine(length_of, TOKENIZER), chats.tokenizer("<|im_start|>"), form=forms.rating()
        )


# ---------------------------------------- keys and votes


def drawn(question, key, j):
    """A verdict that the key draws."""
    return f"<score>{rng.fold_in(key, j, len(question)) % 11}</score>"


def test_keys_name_the_response_so_that_any_share_of_a_batch_is_judged_alike():
    ask, _ = judge(drawn, votes=3)
    prompts, completions, keys = ["q"] * 6, list("abcabc"), [5, 6, 7, 8, 9, 10]
    whole = ask(prompts, completions, keys=keys)
    parts = [ask(prompts[i:j], completions[i:j], keys=keys[i:j]) for i, j in ((0, 1), (1, 4), (4, 6))]
    assert [x for part in parts for x in part] == whole
    assert len(set(whole)) > 3  # equal texts with other keys draw other answers
    assert ask(prompts, completions) == ask(prompts, completions)
    assert (
        ask(prompts[:3], completions[:3]) == ask(prompts, completions)[3:]
    )  # without keys the texts name them


def test_one_answer_is_greedy_and_several_are_sampled():
    seen = []
    engine = judges.engine(length_of, TOKENIZER)

    def generate(*given, sampling, n, **more):
        seen.append((sampling, n))
        return engine.generate(*given, sampling=sampling, n=n, **more)

    watched = engine._replace(generate=generate)
    form = forms.rating(reasoning=False)
    for votes in (1, 5):
        reward.generative(watched, TOKENIZER, form=form, votes=votes)(["q"], ["a"])
        reward.generative_by_name(watched, TOKENIZER, "score", reasoning=False, votes=votes)(["q"], ["a"])
    assert seen == [(Sampling(temperature=t, max_new=32), n) for t, n in ((0, 1), (0, 1), (1, 5), (1, 5))]
    reward.generative_by_name(watched, TOKENIZER, temperature=0.5, top_p=0.9, max_new=7)(["q"], ["a"])
    assert seen[-1] == (Sampling(temperature=0.5, top_p=0.9, max_new=7), 1)


samples = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, NAN]), min_size=4, max_size=4), min_size=1, max_size=5
)


@given(samples)
def test_votes_are_their_definitions(rows):
    for row, mean, median, majority in zip(
        rows,
        *(verdicts.VOTES[name](torch.tensor(rows).double()) for name in ("mean", "median", "majority")),
        strict=True,
    ):
        known = np.array([x for x in row if x == x])
        if not len(known):
            assert all(torch.isnan(x) for x in (mean, median, majority))
            continue
        assert mean == pytest.approx(known.mean()) and median == pytest.approx(np.median(known))
        values, counts = np.unique(known, return_counts=True)
        assert majority == pytest.approx(values[counts == counts.max()].mean())


def test_votes_change_the_reward_and_their_spread_is_logged():
    ask, logged = judge(lambda q, k, j: f"<score>{[0, 10, 10, 4, 'x'][j]}</score>", votes=5)
    assert ask(["q"], ["a"]) == pytest.approx([0.6])
    assert logged["spread"] == pytest.approx(np.std([0, 1, 1, 0.4])) and logged[
        "unparsable"
    ] == pytest.approx(0.2)
    for vote, value in ((verdicts.majority, 1.0), (verdicts.median, 0.7)):
        assert judge(lambda q, k, j: f"<score>{[0, 10, 10, 4, 'x'][j]}</score>", votes=5, vote=vote)[0](
            ["q"], ["a"]
        ) == pytest.approx([value])
    by_name = reward.generative_by_name(
        judges.engine(lambda q, k, j: f"score={[0, 1, 1][j]}", TOKENIZER),
        TOKENIZER,
        "terse",
        votes=3,
        vote="majority",
    )
    assert by_name(["q"], ["a"]) == [1.0]


# ---------------------------------------- pairs


def sides(question):
    """The two responses of a question."""
    return re.search(
        "<response_a>\n(.*)\n</response_a>\n\n<response_b>\n(.*)\n</response_b>", question, re.S
    ).groups()


def longer(question, *_):
    """A verdict for the longer side."""
    a, b = map(len, sides(question))
    return f"<better>{'A' if a > b else 'B' if b > a else 'tie'}</better>"


PAIR = forms.pair(reasoning=False)


@pytest.mark.parametrize("both_orders", [True, False])
def test_the_reward_within_a_group_is_the_share_of_the_others_that_it_beats(both_orders):
    asked = []
    ask, logged = judge(longer, form=PAIR, both_orders=both_orders, asked=asked)
    prompts, completions = ["q"] * 4 + ["r"] * 3 + ["s"], ["aa", "a", "aaa", "aa", "b", "b", "bb", "c"]
    found = ask(prompts, completions)

    # the definition
    want = []
    for i, (p, x) in enumerate(zip(prompts, completions, strict=True)):
        others = [y for j, (o, y) in enumerate(zip(prompts, completions, strict=True)) if o == p and j != i]
        wins = [1.0 if len(x) > len(y) else 0.5 if len(x) == len(y) else 0.0 for y in others]
        want.append(np.mean(wins) if wins else 0.5)
    assert found == pytest.approx(want)
    questions = 4 * 3 + 3 * 2
    assert len(asked) == (questions if both_orders else questions // 2)
    assert logged.get("consistent") == (1 if both_orders else None)


@given(st.lists(st.sampled_from("pq"), min_size=1, max_size=9), st.booleans())
def test_a_round_robin_has_each_pair_once_or_in_both_orders(groups, both_orders):
    found = verdicts.round_robin(groups, both_orders=both_orders)
    pairs = [(i, j) for i, j in itertools.permutations(range(len(groups)), 2) if groups[i] == groups[j]]
    if both_orders:
        assert sorted(found) == sorted(pairs)
        return
    assert sorted({tuple(sorted(x)) for x in found}) == sorted({tuple(sorted(x)) for x in pairs})
    assert len(found) * 2 == len(pairs)
    for i in range(len(groups)):
        assert abs(sum(m.a == i for m in found) - sum(m.b == i for m in found)) <= 1


def test_a_judge_that_prefers_a_place_is_worth_half_in_both_orders():
    ask, logged = judge(lambda *_: "<better>A</better>", form=PAIR, against="answer")
    assert ask(["q", "q"], ["a", "b"], answer=["x", "y"]) == [0.5, 0.5] and logged["consistent"] == 0
    ask, _ = judge(lambda *_: "<better>A</better>", form=PAIR, against="answer", both_orders=False)
    assert ask(["q", "q"], ["a", "b"], answer=["x", "y"]) == [1.0, 1.0]
    assert judge(lambda *_: "<better>A</better>", form=PAIR)[0](["q"] * 3, list("abc")) == [0.5] * 3


def test_a_pair_against_a_reference_is_asked_in_both_orders_with_keys_of_their_own():
    asked = []
    ask, logged = judge(longer, form=PAIR, against="info[gold]", asked=asked)
    found = ask(["q"] * 3, ["a", "aaa", "aa"], info=[{"gold": "xx"}] * 3, keys=[1, 2, 3])
    assert found == [0.0, 1.0, 0.5] and logged["consistent"] == 1
    assert [sides(TOKENIZER.decode(p.ids)) for p, _ in asked][:4] == [
        ("a", "xx"),
        ("aaa", "xx"),
        ("aa", "xx"),
        ("xx", "a"),
    ]
    assert len({key for _, key in asked}) == 6
    engine = judges.engine(longer, TOKENIZER)
    assert reward.generative(engine, TOKENIZER, form=PAIR, against="info[gold]").columns == ("info",)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3) | st.none(), st.sampled_from([0.0, 0.5, 1.0, NAN])),
        max_size=9,
    )
)
def test_shares_are_the_mean_of_what_each_one_won(played):
    matches = [verdicts.Match(a, b) for a, b, _ in played]
    found = verdicts.shares(torch.tensor([v for *_, v in played], dtype=torch.float64), matches, 4)
    for i in range(4):
        won = [v for a, _, v in played if a == i] + [1 - v for _, b, v in played if b == i]
        won = [x for x in won if x == x]
        assert found[i].isnan() if not won else found[i] == pytest.approx(np.mean(won))


def test_consistency_is_the_share_of_pairs_with_one_winner_in_both_orders():
    both = [verdicts.Match(0, 1), verdicts.Match(1, 0), verdicts.Match(0, 2), verdicts.Match(2, 0)]
    for played, share in (
        ([1, 0, 1, 0], 1),
        ([1, 1, 1, 0], 0.5),
        ([0.5, 0.5, 1, 1], 0.5),
        ([0.5, 1, 0, 0], 0),
        ([1, NAN, 1, 0], 1),
        ([1, NAN, NAN, 0], None),
    ):
        assert verdicts.consistent(torch.tensor(played).double(), both) == share


# ---------------------------------------- answers without a verdict


def sometimes(question, *_):
    """A verdict about long responses alone."""
    return length_of(question) if "long" in question.split("<response>\n")[1] else "I would rather not."


def test_the_reward_of_an_answer_without_a_verdict_is_an_option():
    for unparsable, value in ((0.0, 0.0), (-1.0, -1.0), (None, None)):
        ask, logged = judge(sometimes, unparsable=unparsable)
        with pytest.warns(UserWarning, match="none in 1 of 2 answers; it said 'I would rather not.'"):
            assert ask(["q", "q"], ["longlong", "a"]) == [0.8, value]
        assert logged["unparsable"] == 0.5 and logged["said"][1] == "I would rather not."
    ask, _ = judge(sometimes, unparsable="error")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="about completion 1; it said 'I would"):
        ask(["q", "q"], ["longlong", "a"])


def test_an_answer_that_was_cut_off_has_no_verdict():
    ask, logged = judge(lambda *_: ("<score>7</score> <score>1", "cut"))
    with pytest.warns(UserWarning, match="raise max_new"):
        assert ask(["q"], ["a"]) == [0.0]
    assert logged["cut_off"] == 1 and logged["unparsable"] == 1
    ask, _ = judge(
        lambda *_: ("<score>7</score>", "cut"), unparsable=None
    )  # whole, but it might have said more
    with pytest.warns(UserWarning):
        assert ask(["q"], ["a"]) == [None]


def test_a_question_that_does_not_fit_is_not_asked():
    asked = []
    ask, logged = judge(length_of, asked=asked, window=600, unparsable=-1.0)
    with pytest.warns(UserWarning, match="none in 1 of 2 answers .1 questions do not fit into its window"):
        assert ask(["q", "q"], ["abc", "x" * 600]) == [0.3, -1.0]
    assert len(asked) == 1 and logged["too_long"] == 0.5 and logged["unparsable"] == 0
    size = len(asked[0][0].ids) + 32
    assert judge(length_of, window=size)[0](["q"], ["abc"]) == [0.3]
    with pytest.warns(UserWarning):
        assert judge(length_of, window=size - 1, unparsable=None)[0](["q"], ["abc"]) == [None]


def test_a_judge_that_never_parses_stops_the_run_with_three_examples():
    def silent(question, key, j):
        return f"No {question.split('<response>')[1][1:3]}"

    ask, _ = judge(silent)
    with pytest.warns(UserWarning, match="'No aa', 'No bb', 'No cc'; take a form") as shown:
        for _ in range(2):
            ask(["q"] * 4, ["aa", "bb", "cc", "dd"])
    assert len(shown) == 1  # they are shown once
    with pytest.raises(ValueError) as stopped:
        ask(["q"] * 4, ["aa", "aa", "cc", "dd"])
    assert str(stopped.value) == (
        "judge: expected answers with a verdict such as '<score>10</score>', got none in 4 of 4 answers, the "
        "last of 3 calls in a row; it said 'No aa', 'No cc', 'No dd'; take a form that this judge can "
        "follow, or raise max_new"
    )


def test_the_limit_is_a_share_and_calls_in_a_row():
    ask, _ = judge(sometimes, limit=0.5, patience=2)
    mixed, good = (["q"] * 2, ["longlong", "a"]), (["q"] * 2, ["long", "long"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in (mixed, good, mixed):
            ask(*batch)
        with pytest.raises(ValueError, match="the last of 2 calls in a row"):
            ask(*mixed)
        patient, _ = judge(sometimes, limit=0.51, patience=1)
        patient(*mixed)
        long, _ = judge(length_of, window=10, patience=1)
        with pytest.raises(ValueError, match="it said nothing; take shorter criteria or a judge with"):
            long(["q"], ["a"])


BAD = [
    ({"votes": 0}, "votes: expected a whole number, at least 1, got 0"),
    ({"votes": 2, "sampling": Sampling(temperature=0)}, "votes: expected a temperature above 0 for 2 votes"),
    ({"against": "answer"}, "against: expected a form for pairs"),
    ({"unparsable": "skip"}, "unparsable: expected a number, None or 'error', got 'skip'"),
    ({"votes": 2.5}, "votes: expected a whole number, at least 1, got 2.5"),
    ({"votes": "3"}, "votes: expected a whole number, at least 1, got '3'"),
    ({"limit": 0}, "limit: expected a share"),
    ({"limit": "a"}, r"limit: expected a share of answers in \(0, 1\], got 'a'"),
    ({"patience": 0}, "patience: expected at least 1"),
    ({"patience": 1.5}, "patience: expected at least 1 call, got 1.5"),
]


@each(("options", "message"), BAD)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        judge(length_of, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"vote": "max"}, "vote: expected one of mean"), ({"form": "x"}, "form: expected one of"),
     ({"stars": 5}, "form 'score': .*stars")],
)  # fmt: skip
def test_bad_names_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        reward.generative_by_name(judges.engine(length_of, TOKENIZER), TOKENIZER, **options)


def picture(colour):
    """A small PNG of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(file, "PNG")
    return file.getvalue()


def test_a_judge_that_sees_gets_every_image_and_no_place_of_one_by_text():
    processing = rft.data.Processing(rft.model.load_processor("tiny-vl"), rft.data.MediaLimits())
    tokenizer, form, asked = processing.tokenizer, forms.terse(), []
    engine = judges.engine(lambda *_: "score=1", tokenizer, asked=asked)
    fn = reward.generative(engine, tokenizer, form=form, processing=processing)
    media = [{"kind": "image", "mime": "image/png", "bytes": picture(c)} for c in ("red", "blue")]
    mark = processing.mark("image")
    found = fn(["3", "3", "3"], ["5", f"5{mark}", "5"], media=[media, media, []])
    assert found == [1.0] * 3

    # the same as a question with two images that has no quoted text
    own = [{"type": "image", "image": Medium("image", x["bytes"])} for x in media]
    text = {"type": "text", "text": form.question({"prompt": "3", "response": "5"})}
    want = Chat(tokenizer, {}, processing).encoded([{"role": "user", "content": [*own, text]}], ask=True)
    whole, attacked, blind = (prompt for prompt, _ in asked)
    assert whole.ids == want.ids
    assert all(torch.equal(whole.media[name], x) for name, x in want.media.items())
    place = tokenizer.convert_tokens_to_ids(mark)
    assert attacked.ids.count(place) == whole.ids.count(place) > 0
    assert blind.media is None and place not in blind.ids


# ---------------------------------------- engines


def test_the_judge_sleeps_between_calls_and_after_an_error():
    engine = judges.engine(length_of, TOKENIZER)
    awake = []

    def generate(*given, **more):
        awake.append(engine.status()["asleep"])
        if len(awake) == 2:
            raise RuntimeError("lost")
        return engine.generate(*given, **more)

    fn = reward.generative(engine._replace(generate=generate), TOKENIZER, form=forms.rating(reasoning=False))
    fn(["q"], ["a"])
    assert engine.status()["asleep"]
    with pytest.raises(RuntimeError, match="lost"):
        fn(["q"], ["a"])
    assert engine.status()["asleep"] and awake == [False, False]


def served(engine, **options):
    """A judge whose engine is on servers."""
    return reward.generative(engine, TOKENIZER, form=forms.rating(reasoning=False), served=True, **options)


def test_judges_on_servers_are_asked_at_the_same_time_and_while_others_compute():
    """Each of the three waits until the others have begun."""
    together = threading.Barrier(3, timeout=20)
    main = threading.current_thread()

    def answered(question, *_):
        assert threading.current_thread() is not main
        together.wait()
        return length_of(question)

    def computes(completions):
        together.wait()
        return [0.25] * len(completions)

    parts = {name: (served(judges.engine(answered, TOKENIZER)), 1.0) for name in ("first", "second")}
    score = reward.weighted(computed=(computes, 1.0), **parts)
    found = score(["q"], ["abc"], {})
    assert {name: x.tolist() for name, x in found.parts.items()} == {
        "first": [pytest.approx(0.3)], "second": [pytest.approx(0.3)], "computed": [0.25]
    }  # fmt: skip
    assert found.metrics["first/unparsable"].tolist() == [0] and "second/said" in found.extra
    score.close()


def test_a_judge_on_servers_says_what_one_here_says_and_is_made_by_the_calling_thread():
    """Also pairs and votes; `wake` is where an engine is built that a run has not used yet."""
    made_by = []
    engine = judges.engine(lambda _, key, j: f"<score>{(key + j) % 11}</score>", TOKENIZER)
    wake = lambda: made_by.append(threading.current_thread())  # noqa: E731
    options = {"votes": 3, "unparsable": None}
    rows = (["q", "q", "r"], ["abc", "de", "f"], {})
    here = reward.generative(engine, TOKENIZER, form=forms.rating(reasoning=False), **options)
    there = served(engine._replace(wake=wake), **options)
    want, found = (reward.weighted(judge=(fn, 2.0))(*rows) for fn in (here, there))
    assert torch.equal(found.total, want.total) and found.extra == want.extra
    assert made_by[0] is threading.current_thread()


@pytest.mark.parametrize("limit", [False, True], ids=["another part raises", "the time is over"])
def test_a_judge_on_servers_that_nobody_waits_for_is_closed(limit):
    """What interrupts the score ends the request that is under way, and with it the thread."""
    asked, closed = threading.Event(), threading.Event()
    threads = []

    def generate(*given, **more):
        threads.append(threading.current_thread())
        asked.set()
        assert closed.wait(20)
        raise ConnectionError("broken off")

    def raises(completions):
        assert asked.wait(20)
        if limit:
            threading.Event().wait(20)
        raise ValueError("no such file")

    engine = judges.engine(length_of, TOKENIZER)._replace(generate=generate, close=closed.set)
    score = reward.weighted(judge=(served(engine), 1.0), other=(raises, 1.0))
    message = "expected a result within 0.5 s" if limit else "no such file"
    with pytest.raises((TimeoutError, ValueError), match=message), time_limit(0.5 if limit else 60, str):
        score(["q"], ["a"], {})
    assert asked.wait(20)  # at the latest when the loop is closed
    threads[0].join(20)
    assert closed.is_set() and not threads[0].is_alive()


def test_an_error_of_a_judge_on_servers_has_its_name():
    def lost(*given, **more):
        raise ConnectionError("no server answers")

    engine = judges.engine(length_of, TOKENIZER)._replace(generate=lost)
    with pytest.raises(ConnectionError, match="no server answers") as caught:
        reward.weighted(careful=(served(engine), 1.0))(["q"], ["a"], {})
    assert caught.value.__notes__ == ["raised by the reward 'careful'"]


def test_a_judge_in_an_engine_of_transformers_judges_a_rollout():
    """The untrained tiny model never says a verdict; what it says is reproducible and is shown."""
    tokenizer = rft.model.load_tokenizer("tiny")
    engine = rft.engine.get_engine(None, "tiny", tokenizer)
    st_ = rft.strategy.get_strategy()
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    prompts, keys = rft.data.draw(dataset, 2, step=0, seed=0)
    rollout = rft.collect.gather_and_generate(engine, st_, prompts, keys, n=3, sampling=Sampling(max_new=6))
    fn = reward.generative_by_name(engine, tokenizer, "terse", votes=2, unparsable=-1.0)
    score = reward.weighted(judge=(fn, 1.0))
    with pytest.warns(UserWarning, match="expected answers with a verdict such as 'score=1'"):
        found = rft.collect.gather_and_judge(st_, score, rollout, prompts, tokenizer)
    again = rft.collect.gather_and_judge(st_, score, rollout, prompts, tokenizer)
    assert (
        found.reward.tolist() == [[-1.0] * 3] * 2
        and found.metrics["judge/unparsable"].tolist() == [[1.0] * 3] * 2
    )
    assert found.extra == again.extra and len(set(found.extra["judge/said"])) > 1
