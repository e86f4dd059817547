"""Rewards over HTTP, against servers that fail in every way: what is tried again, and what never is."""

import asyncio
import itertools
import random
import socket
import threading
import time
import zlib

import pytest
import torch
from fake_host import (
    drip,
    endless,
    forever,
    head,
    hosting,
    nothing,
    rewards,
    rst,
    status,
    text,
    within,
    zipped,
)

import rft_fn as rft
from rft_fn import patience
from rft_fn.reward import connection as connection_lib
from rft_fn.reward import remote

TOKEN = "s3cret-t0ken"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits between tries are short, and nothing in the environment leads elsewhere."""
    monkeypatch.setitem(connection_lib.Host.failed.__kwdefaults__, "first", 0.02)
    monkeypatch.delenv("RFT_REWARD_TOKEN", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def score(where, completions=("a", "bb", "ccc"), prompts=None, columns=None, **how):
    """The rewards of the servers, through the same door as in a run."""
    how = {"deadline": 20, "attempt": 5, "tries": 3} | how
    fn = rft.reward.served_at(where, **how)
    prompts = prompts or ["p"] * len(completions)
    return rft.reward.weighted(r=(fn, 1.0))(prompts, list(completions), columns or {})


def refused(where, **how):
    """The line of the error."""
    with pytest.raises((ValueError, OSError)) as caught:
        score(where, **how)
    return type(caught.value), str(caught.value)


def dead():
    """An address that refuses connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/score"


# ---------------------------------------------------------------------------------------------- good answers


def test_the_request_has_everything_and_the_answer_is_the_reward():
    extra = {"parts": lambda c: {"short": [0.5] * len(c)}, "extra": lambda c: {"why": ["x"] * len(c)}}
    with hosting([rewards(lambda c: None if c == "bb" else len(c), **extra)]) as [host]:
        fn = rft.reward.served_at(host.url, deadline=9)
        whole = rft.reward.weighted(r=(fn, 1.0), other=(lambda completions: [1.0] * len(completions), 2.0))
        state = rft.reward.trainer_state(3, 10)
        ids = {"completion_ids": [[1], [2, 3]], "prompt_texts": ["<s>p", "<s>q"], "trainer_state": state}
        found = whole(["p", "q"], ["a", "bb"], {"answer": ["1", None], "n": [float("nan"), 2.5]}, **ids)
    path, headers, body = host.seen[0]
    assert found.total.tolist() == [3.0, 2.0] and found.parts["r"].isnan().tolist() == [False, True]
    assert found.metrics["r/short"].tolist() == [0.5, 0.5] and found.extra["r/why"] == ["x", "x"]
    assert path == "/score" and "authorization" not in headers
    assert body["columns"] == {"answer": ["1", None], "n": [None, 2.5]}
    assert body["prompts"] == ["p", "q"] and body["completions"] == ["a", "bb"]
    assert body["completion_ids"] == [[1], [2, 3]] and body["prompt_texts"] == ["<s>p", "<s>q"]
    assert body["state"]["global_step"] == 3 and body["state"]["max_steps"] == 10


def test_many_completions_are_asked_for_in_parts_that_keep_groups_whole():
    prompts = [f"p{i // 3}" for i in range(30)]
    completions = ["x" * i for i in range(30)]
    with hosting([rewards()]) as [host]:
        found = score(host.url, completions, prompts, batch=7, connections=4)
    assert found.total.tolist() == list(range(30))
    asked = [body["prompts"] for _, _, body in host.seen]
    assert sorted(map(len, asked)) == [6] * 5
    assert all(part.count(p) == 3 for part in asked for p in part)
    assert host.connections <= 4


def test_columns_can_be_chosen_and_are_then_needed():
    with hosting([rewards()]) as [host]:
        columns = {"answer": ["1"], "secret": ["2"]}
        fn = rft.reward.served_at(host.url, columns=["answer"])
        made = rft.reward.weighted(r=(fn, 1.0))
        made(["p"], ["a"], columns)
    assert host.seen[0][2]["columns"] == {"answer": ["1"]} and rft.reward.columns(made) == ("answer",)


def test_openrlhfs_form():
    extra = {"scores": lambda c: [[2.0]] * len(c), "extra_logs": lambda c: {"n": [1.0] * len(c), "m": 4}}
    with hosting([rewards(lambda c: [0.5], **extra)]) as [host]:
        fn = rft.reward.served_at(host.url, form="openrlhf", label="gold")
        made = rft.reward.weighted(r=(fn, 1.0))
        found = made(["p", "q"], ["a", "b"], {"gold": ["1", "2"]}, prompt_texts=["<s>p", "<s>q"])
    sent = {"query": ["<s>pa", "<s>qb"], "prompts": ["<s>p", "<s>q"], "labels": ["1", "2"]}
    assert host.seen[0][2] == sent and rft.reward.columns(made) == ("gold",)
    assert found.total.tolist() == [0.5, 0.5] and found.metrics["r/scores"].tolist() == [2.0, 2.0]
    assert found.metrics["r/n"].tolist() == [1.0, 1.0] and found.metrics["r/m"].tolist() == [4.0, 4.0]


def test_connections_are_kept_from_call_to_call_and_closed_with_the_loop():
    with hosting([rewards()]) as [host]:
        fn = rft.reward.served_at(host.url)
        made = rft.reward.weighted(r=(fn, 1.0))
        for _ in range(5):
            made(["p"], ["a"], {})
        assert host.connections == 1
        loop = fn.fn.__closure__  # the client is inside
        one = next(c.cell_contents for c in loop if isinstance(c.cell_contents, remote.Client))
        kept = one.connections._client
        assert not kept.is_closed
        made.close()  # and its event loop
        assert kept.is_closed

        # and a reward may be used from another loop
        assert asyncio.run(fn(prompts=["p"], completions=["aa"]))["rewards"] == [2]


def test_a_zipped_answer_is_read_and_its_size_counts_unzipped():
    with hosting([zipped(1 << 20)]) as [host]:
        assert score(host.url, ["a"]).total.tolist() == [1.5]
        kind, line = refused(host.url, completions=["a"], max_bytes=1 << 19)
    assert kind is ValueError and "at most 524288 bytes, got more" in line


# ------------------------------------------------------------------------------- answers that are none


_zip = zlib.compressobj(wbits=31)
EMPTY = (
    _zip.compress(b"{") + _zip.flush(zlib.Z_FULL_FLUSH),
    b"\0\0\0\xff\xff" * 20,
)  # stored blocks of 0 bytes
ENDED = zlib.compress(b"{", wbits=31)

BAD = {
    "too few": (text('{"rewards": [1, 2]}'), "rewards: expected 3 entries, got 2"),
    "too many": (text('{"rewards": [1, 2, 3, 4]}'), "rewards: expected 3 entries"),
    "html": (text("<html><body>Welcome</body></html>", kind="text/html"), "expected JSON, got '<html><body>"),
    "empty": (text(""), "expected JSON, got ''"),
    "a list": (text("[1, 2, 3]"), "expected an object with 'rewards', got '[1,2,3]'"),
    "an error": (text('{"error": "no"}'), "expected an object with 'rewards', got"),
    "NaN": (text('{"rewards": [1, NaN, 2]}'), "expected finite numbers, got NaN"),
    "infinity": (text('{"rewards": [1, -Infinity, 2]}'), "expected finite numbers, got -Infinity"),
    "beyond float32": (text('{"rewards": [1, 1e39, 2]}'), "finite numbers or null, got 1e+39 at 1"),
    "beyond float64": (text('{"rewards": [1, 1e999, 2]}'), "expected finite numbers, got 1e999"),
    "a huge integer": (text('{"rewards": [1, 1%s, 2]}' % ("0" * 5000)), "4300 digits"),
    "text": (text('{"rewards": [1, "2", 3]}'), "finite numbers or null, got '2' at 1"),
    "truth": (text('{"rewards": [1, true, 3]}'), "finite numbers or null, got True at 1"),
    "no list": (text('{"rewards": 3}'), "rewards: expected a list of 3 entries, got int"),
    "few parts": (text('{"rewards": [1, 2, 3], "parts": {"x": [1]}}'), "parts.x: expected 3 entries"),
    "deep": (text("[" * 100_000), "brackets nest deeper than 100"),
    "not utf-8": (head(2, b"\xff\xfe"), "expected JSON"),
    "10 GB": (head(10**10), "expected an answer of at most 16777216 bytes, got one of 10000000000"),
    "without end": (endless, "expected an answer of at most 16777216 bytes, got more"),
    "a bomb": (zipped(1 << 28), "expected an answer of at most 16777216 bytes, got more"),
    "zipped blocks of nothing": (nothing("gzip", EMPTY), "at most 16777216 bytes, got more"),
    "bytes after the zipped": (nothing("gzip", (ENDED, bytes(100))), "at most 16777216 bytes, got more"),
    "brotli": (text("x", Content_Encoding="br"), "plain or gzip, got 'br'"),
    "no gzip": (text("xxxx", Content_Encoding="gzip"), "expected a gzip answer, got"),
    "forbidden": (status(403, "go away"), "status 403: go away; its token belongs into"),
    "missing": (status(404), "expected an answer, got status 404"),
    "unprocessable": (status(422, "column 'x'\n  is missing"), "status 422: column 'x' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_no_try_would_mend_ends_the_call_at_once_in_one_line(what):
    reply, line = BAD[what]
    with hosting([reply]) as [host], within(10):
        kind, found = refused(host.url)
    assert kind is ValueError and line in found and found.startswith(host.url) and "\n" not in found
    assert len(host.seen) == 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_the_other_address_never_asked(code):
    with hosting([rewards()]) as [other], hosting([status(code, Location=other.url)]) as [host]:
        kind, line = refused(host.url)
        assert other.seen == []
    assert kind is ValueError and f"status {code}" in line and "redirects are not followed" in line


# --------------------------------------------------------------------------------- what is tried again


AGAIN = {
    "500": status(500, "oops"), "502": status(502), "503": status(503), "408": status(408),
    "425": status(425), "429": status(429), "reset": rst, "cut off": zipped(1 << 20, cut=-20),
    "half": lambda c, *_: (head(99, b"{")(c), c.shutdown(socket.SHUT_RDWR)),
    "no http": lambda c, *_: (c.sendall(b"hello there\r\n\r\n"), c.shutdown(socket.SHUT_RDWR)),
}  # fmt: skip


@pytest.mark.parametrize("what", AGAIN)
def test_what_may_pass_is_tried_again(what, capfd):
    with hosting([AGAIN[what], AGAIN[what], rewards()]) as [host]:
        assert score(host.url).total.tolist() == [1.0, 2.0, 3.0]
    assert len(host.seen) == 3
    said = capfd.readouterr().err
    assert said.count("trying again") == 1 and said.count("answers again") == 1


def test_a_connection_that_is_reset_between_calls_costs_a_try_and_no_reward():
    with hosting([rewards(), rst, rewards()]) as [host]:
        made = rft.reward.weighted(r=(rft.reward.served_at(host.url), 1.0))
        assert made(["p"], ["a"], {}).total.tolist() == made(["p"], ["b"], {}).total.tolist() == [1.0]
    assert len(host.seen) == 3


def test_the_tries_are_counted_and_the_last_problem_is_told():
    with hosting([status(500, "out of memory")]) as [host]:
        kind, line = refused(host.url, tries=4)
    assert kind is ConnectionError and len(host.seen) == 4
    assert line == f"expected an answer within 4 tries, got none ({host.url}: status 500: out of memory)"


def test_waits_double_and_have_a_random_part(monkeypatch):
    """The times of the requests, and the draws that the function gets which they should follow."""
    times = []
    given = []

    def pause(failures, draw, asked, *, first):
        assert asked is None
        given.append((failures, draw))
        return patience.pause(failures, draw, first=first)

    monkeypatch.setattr(connection_lib, "pause", pause)

    def reply(connection, *_):
        times.append(time.monotonic())
        status(500)(connection, *_)

    with hosting([reply]) as [host]:
        refused(host.url, tries=5)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    for i, gap in enumerate(gaps):
        assert gap >= patience.pause(*given[i], first=0.02) >= 0.5 * 0.02 * 2**i
    assert [failures for failures, _ in given] == [1, 2, 3, 4, 5]
    draws = [draw for _, draw in given]
    assert len(set(draws)) == 5 and all(0 <= draw < 1 for draw in draws)


@pytest.mark.parametrize("reply", [forever, drip], ids=["hangs", "drips"])
def test_an_attempt_is_limited_from_its_first_byte_to_its_last(reply):
    with hosting([reply, rewards()]) as [host], within(4):
        assert score(host.url, attempt=0.4).total.tolist() == [1.0, 2.0, 3.0]
    assert len(host.seen) == 2


@pytest.mark.parametrize("reply", [forever, drip], ids=["hangs", "drips"])
def test_the_deadline_is_that_of_the_whole_call(reply):
    with hosting([reply]) as [host], within(4):
        kind, line = refused(host.url, deadline=0.8, attempt=30)
    assert kind is TimeoutError
    assert line == f"{host.url}: expected answers within deadline = 0.8 s, got none"


def test_the_deadline_ends_tries_and_says_the_last_problem():
    with hosting([status(503, "busy")]) as [host], within(6):
        kind, line = refused(host.url, deadline=1.0, tries=10_000)
    assert kind is TimeoutError and "status 503: busy" in line


def test_retry_after_is_kept_and_uses_up_no_try():
    times = []

    def busy(connection, *_):
        times.append(time.monotonic())
        status(429, Retry_After=1)(connection, *_)

    with hosting([busy, busy, rewards()]) as [host]:
        assert score(host.url, ["a"], tries=1).total.tolist() == [1.0]
    assert times[1] - times[0] >= 1.0 and len(host.seen) == 3


YEAR = "9" * 23


@pytest.mark.parametrize(
    "text",
    [
        f"Wed, 21 Oct {YEAR} 07:28:00 GMT",
        f"Wed, 21 Oct 2015 07:28:00 +{YEAR}",
        f"Wed, {YEAR} Oct 2015 07:28:00 GMT",
        "Wed, 21 Oct 10000 07:28:00 GMT",
        "9" * 5000 + " Oct 2015",
        "soon",
        "-1",
        "1e400",
        "\u00b2",
        "(" * 50_000,
        "",
    ],
)
def test_a_time_to_come_again_that_is_none_is_not_waited_for(text):
    assert patience.retry_after(text) is None


def test_a_server_that_names_no_time_is_tried_again_as_any_other():
    times = [f"Wed, 21 Oct {YEAR} 07:28:00 GMT", f"Wed, 21 Oct 2015 07:28:00 +{YEAR}"]
    with hosting([*(status(503, Retry_After=x) for x in times), rewards()]) as [host], within(10):
        assert score(host.url).total.tolist() == [1.0, 2.0, 3.0]
    assert len(host.seen) == 3


def test_far_times_are_bounded_by_the_deadline():
    assert patience.retry_after(YEAR) == 999_999_999
    assert patience.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert 2e11 < patience.retry_after("Fri, 31 Dec 9999 23:59:59 -2359") < 3e11


def test_a_wait_beyond_the_deadline_ends_the_call_at_once():
    with hosting([status(429, "later", Retry_After=3600)]) as [host], within(4):
        kind, line = refused(host.url, deadline=100)
    assert kind is TimeoutError and "status 429: later" in line and len(host.seen) == 1


def test_other_hosts_answer_for_one_that_is_gone_or_wants_to_wait():
    gone = dead()
    later = status(429, Retry_After=3600)
    with hosting([rewards()], [later]) as [well, busy], within(10):
        where = ",".join([gone, busy.url, well.url])
        completions = ["x" * (i % 5) for i in range(200)]
        prompts = [str(i) for i in range(200)]
        found = score(where, completions, prompts, batch=5)
    assert found.total.tolist() == [float(len(c)) for c in completions]
    assert len(busy.seen) <= 8 and len(well.seen) == 40


def test_the_load_is_shared():
    """In turn by calls of one request, and the least busy one where they are many."""
    with hosting([rewards()], [rewards()]) as pair:
        made = rft.reward.weighted(r=(rft.reward.served_at([h.url for h in pair]), 1.0))
        for _ in range(6):
            made(["p"], ["a"], {})
        assert [len(h.seen) for h in pair] == [3, 3]

    started = threading.Event()

    def slow(*args):
        started.wait(10)
        rewards()(*args)

    def quick(*args):
        rewards()(*args)
        if len(pair[1].seen) == 15:
            started.set()

    with hosting([slow], [quick]) as pair:
        where = ",".join(h.url for h in pair)
        score(where, ["x"] * 16, [str(i) for i in range(16)], batch=1, connections=2)
        assert [len(h.seen) for h in pair] == [1, 15]


def test_rewards_do_not_depend_on_the_waits_nor_move_the_runs_own_draws():
    random.seed(7), torch.manual_seed(7)
    before = random.getstate(), torch.get_rng_state()
    with hosting([status(500), status(500), rewards()]) as [host]:
        score(host.url)
    assert before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())


# ---------------------------------------------------------------------------------------------- the token


def test_the_token_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", f"{TOKEN}\n")  # as `export MY_TOKEN=$(cat file)` has it in some shells
    with hosting([rewards(), status(403, f"bad token {TOKEN}")]) as [host]:
        score(host.url, token_env="MY_TOKEN")
        _, line = refused(host.url, token_env="MY_TOKEN")
    assert host.seen[0][1]["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in line and "bad token ***" in line


@pytest.mark.parametrize(
    "reply",
    [
        status(403, "x" * 290 + TOKEN),  # cut in the middle of it
        status(403, " " * 4090 + TOKEN),
        status(500, TOKEN),
        text(f"<html>{TOKEN}"),
        text("x" * 50 + TOKEN),
        text(f'{{"{TOKEN}": 1}}'),
        text(f'{{"rewards": ["{TOKEN}"]}}'),
        text("x", Content_Encoding=TOKEN),
    ],
)
def test_a_server_that_repeats_the_token_is_quoted_without_it(reply, monkeypatch, capfd):
    monkeypatch.setenv("RFT_REWARD_TOKEN", TOKEN)
    with hosting([reply]) as [host]:
        _, line = refused(host.url, completions=["a"], tries=2)
    assert TOKEN[:8] not in line + capfd.readouterr().err and host.url in line


def test_a_token_that_no_header_can_hold_is_refused_without_showing_it(monkeypatch):
    monkeypatch.setenv("RFT_REWARD_TOKEN", f"{TOKEN}\r\nX-Other: 1")
    with hosting([rewards()]) as [host]:
        _, line = refused(host.url)
    assert line == "RFT_REWARD_TOKEN: expected a token of printable ASCII characters" and host.seen == []


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("https://me:hunter2@host/score", "without a name and a password, got one at host"),
        ("ftp://host/score", "expected addresses like https://HOST:PORT/score, got 'ftp://host/score'"),
        ("http://host:99999/score", "expected addresses like"),
        ("http://:80/score", "expected addresses like"),
        ("http://a/x,http://a/x", "expected each address once"),
        ("http://a/x#y", "expected addresses like"),
        ([], "expected at least one address"),
    ],
)
def test_addresses(where, line):
    with pytest.raises(ValueError, match="hosts: ") as caught:
        rft.reward.served_at(where)
    assert line in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_query_is_sent_and_not_shown():
    with hosting([status(404)]) as [host]:
        _, line = refused(f"{host.url}?key={TOKEN}")
    assert host.seen[0][0] == f"/score?key={TOKEN}" and TOKEN not in line


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"deadline": 0}, "deadline: expected a number above 0, got 0"),
        ({"deadline": float("inf")}, "deadline: expected a number above 0, got inf"),
        ({"tries": 1.5}, "tries: expected a whole number, got 1.5"),
        ({"batch": True}, "batch: expected a number above 0, got True"),
        ({"form": "soap"}, "form: expected 'rft' or 'openrlhf', got 'soap'"),
        ({"label": "x"}, "label: expected it with form='openrlhf' alone, got it with form='rft'"),
    ],
)
def test_limits(how, line):
    with pytest.raises(ValueError) as caught:
        rft.reward.served_at("http://a/score", **how)
    assert line in str(caught.value)


def test_a_column_that_json_cannot_hold_is_named_with_the_remedy():
    with hosting([rewards()]) as [host], pytest.raises(TypeError) as caught:
        score(host.url, ["a"], columns={"x": [object()]})
    assert "column 'x': expected a value that JSON can hold, got object; name the columns" in str(
        caught.value
    )


def test_a_deadline_beyond_the_time_of_rewards_is_refused_before_anything_is_asked():
    with hosting([rewards()]) as [host]:
        made = rft.reward.parse([f"{host.url}(deadline=60,name='far')=0.5"])
        st, rows = rft.strategy.get_strategy(), [{"prompt": "p", "answer": "1"}]
        with pytest.raises(ValueError, match="'far': expected a deadline below reward_timeout = 60 s"):
            rft.collect.check_reward(st, made, rows, timeout=60)
        assert host.seen == []
        rft.collect.check_reward(st, made, rows, timeout=61)
        assert host.seen and made.components["far"][1] == 0.5


@pytest.mark.parametrize(
    ("spec", "name", "weight"),
    [
        ("http://a:8000/score", "a:8000", 1.0),
        ("https://a/score=0.7", "a", 0.7),
        ("https://a/score,https://b/score?x=1,2=0.5", "a", 0.5),
        ("https://a/score(tries=2)=0.25", "a", 0.25),
        ("https://a/score(name='helpful', deadline=9)", "helpful", 1.0),
        ("http://a/get_reward(form='openrlhf', label='gold')=2", "a", 2.0),
    ],
)
def test_addresses_on_the_command_line(spec, name, weight):
    made = rft.reward.parse([spec])
    assert [(n, w) for n, (_, w) in made.components.items()] == [(name, weight)]


def test_two_rewards_of_one_host_have_names_of_their_own():
    made = rft.reward.parse(["http://a/x", "http://a/y", "http://b/x"])
    assert list(made.components) == ["http://a/x", "http://a/y", "b"]


def test_a_password_in_an_address_is_not_shown():
    with pytest.raises(ValueError, match="got a name and a password in front of") as caught:
        rft.reward.parse(["https://me:hunter2@host/score=0.5"])
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="unexpected keyword argument 'x'"):
        rft.reward.parse(["https://host/score(x=1)"])
