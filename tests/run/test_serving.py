"""The server of rewards: what it answers, what it refuses, and what it scores together."""

import asyncio
import concurrent.futures
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import httpx2
import judges
import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn.reward.reward_record import as_reward
from rft_fn.reward.wire import Batch

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install rft-fn[serve]")

from rft_fn.tools.serving import app, http, http_texts, jobs
from rft_fn.tools.serving.jobs import Partial, work


class Served:
    """A server in two threads of this process."""

    def __init__(self, rows=256, wait=0.0, queue=4096, max_bytes=1 << 20, token="", arrival=30.0, **parts):
        self.score = Partial(parts)
        self.jobs = jobs.Jobs(queue)
        self.metrics = app.Metrics(self.jobs)
        rules = http.Rules(max_bytes, arrival, token)
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        columns = rft.reward.columns(self.score)
        made = app.application(list(parts), self.jobs, rules, self.metrics, columns)
        self.server = http.Server(made, rules)
        limits = {"rows": rows, "wait": wait, "timeout": 30.0, "observe": self.metrics.observe}
        self.work = lambda: work(self.jobs, self.score, alive=lambda: True, **limits)

    @contextmanager
    def running(self):
        threads = [
            threading.Thread(target=self.server.run, args=([self.sock],)),
            threading.Thread(target=self.work),
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.jobs.closed = True
            self.server.should_exit = True
            for thread in threads:
                thread.join()

    def post(self, body, path="/score", **how):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(self.url + path, content=data, trust_env=False, timeout=20, **how)

    def ask(self, *completions, **more):
        return self.post({"prompts": ["p"] * len(completions), "completions": completions, **more})


def serving(**how):
    return Served(**how).running()


def length(completions, **columns):
    return [float(len(c)) for c in completions]


def answer_is(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


# ------------------------------------------------------------------------------------------------ answers


def test_rewards_parts_metrics_and_texts():
    def judged(completions, log_metric, truncated):
        log_metric("n", 2.0)
        return [
            {"score": None if c == "" else 1.0, "why": c, "cut": t} for c, t in zip(completions, truncated)
        ]

    with serving(len=(length, 0.5), judged=(judged, 2.0)) as served:
        found = served.ask("a", "", truncated=[True, False]).json()
    assert found["rewards"] == [2.5, 0.0]
    assert found["parts"] == {"len": [1.0, 0.0], "judged": [1.0, None]}
    assert found["metrics"] == {"judged/cut": [1.0, 0.0], "judged/n": [2.0, 2.0]}
    assert found["extra"] == {"judged/why": ["a", ""]}


@pytest.mark.parametrize("form", ["rft", "openrlhf"])
def test_what_the_only_reward_logs_has_the_clients_name_alone_in_front(form):
    """With the server's name too it would be polite/judged/n, and here judged/judged/n."""

    def judged(completions, log_metric, log_extra):
        log_metric("n", 2.0)
        log_extra("why", ["x"] * len(completions))
        return [1.0 for _ in completions]

    paths = {"rft": "score", "openrlhf": "get_reward"}
    with serving(judged=(judged, 2.0)) as served:
        address = f"{served.url}/{paths[form]}"
        for name in ("judged", "polite"):
            spec = f"{address}(form={form!r}, name={name!r})"
            found = rft.reward.parse([spec])(["p"] * 2, ["a", "b"], {})
            assert found.metrics[f"{name}/n"].tolist() == [2.0, 2.0]
            assert found.metrics[f"{name}/judged"].tolist() == [1.0, 1.0]  # before its weight
            assert set(found.metrics) <= {f"{name}/{x}" for x in ("n", "judged", "scores")}
            assert found.extra == {"rft": {f"{name}/why": ["x", "x"]}}.get(form, {})


def test_a_row_to_which_nothing_applies_is_null():
    """Not 0, and no error: the trainer may have another reward for it."""
    with serving(some=(lambda completions: [None if c == "a" else 2.0 for c in completions], 3.0)) as served:
        assert served.ask("a", "b").json()["rewards"] == [None, 6.0]


def test_openrlhfs_clients_are_answered():
    with serving(answer=(lambda completions, label: answer_is(completions, label), 2.0)) as served:
        found = served.post(
            {"query": ["p: 1", "p: 2"], "prompts": ["p: ", "p: "], "labels": ["1", "1"]}, "/get_reward"
        )
    assert found.json() == {"rewards": [2.0, 0.0], "scores": [2.0, 0.0], "extra_logs": {"answer": [1.0, 0.0]}}


def test_the_same_rewards_as_in_the_trainers_process():
    state = rft.reward.trainer_state(2, 9)

    def curriculum(completions, answer, trainer_state, keys):
        right = answer_is(completions, answer)
        return [trainer_state.global_step * x + k % 7 / 3 for x, k in zip(right, keys)]

    texts = ["1", "2", "1"]
    given = {"answer": ["1", "1", "3"]}, {"trainer_state": state, "keys": [5, 2**62 + 1, 3]}
    local = rft.reward.weighted(r=(curriculum, 0.3))(["p"] * 3, texts, given[0], **given[1])
    with serving(r=(curriculum, 0.3)) as served:
        remote = rft.reward.weighted(r=(rft.reward.served_at(f"{served.url}/score"), 1.0))
        assert torch.equal(remote(["p"] * 3, texts, given[0], **given[1]).total, local.total)


# ----------------------------------------------------------------------------------------------- refusals


BAD = [
    ({"prompts": ["p"]}, 400, "completions: expected a list, got NoneType"),
    (b"<html>", 400, "expected JSON, got '<html>'"),
    (b"[" * 100_000, 400, "brackets nest deeper than 100"),
    (
        {"prompts": ["p"], "completions": ["a"]},
        400,
        "the reward reads 'answer', which is not among those sent: none",
    ),
    (
        {"prompts": ["p"], "completions": ["a"], "columns": {"answer": [None]}},
        400,
        "the reward reads 'answer'",
    ),
    ({"prompts": ["p"], "completions": ["x" * (1 << 20)]}, 413, "expected at most 1048576 bytes"),
]


@pytest.fixture(scope="module")
def strict():
    with serving(answer=(answer_is, 1.0), token="t0ken") as served:
        yield served


@pytest.mark.parametrize(("body", "status", "line"), BAD)
def test_bad_requests_are_refused_in_one_line(strict, body, status, line):
    found = strict.post(body, headers={"Authorization": "Bearer t0ken"})
    assert found.status_code == status and line in found.json()["error"] and "\n" not in found.json()["error"]


def test_half_of_a_surrogate_pair_is_refused_and_never_sent():
    """A request that holds one is bad, and an error that names one is an answer."""

    def names(completions, **columns):
        raise KeyError("\ud83d")

    with serving(names=(names, 1.0)) as server:
        bad = server.post(rb'{"prompts": ["p"], "completions": ["\ud83d"]}')
        failed = server.ask("a")
    assert bad.status_code == 400
    assert "expected Unicode text, got half of a surrogate pair at ['completions'][0]" in bad.json()["error"]
    assert failed.status_code == 422 and "KeyError" in failed.json()["error"]


def test_a_body_without_a_length_is_cut_at_the_limit(strict):
    sent = []

    def parts():
        for _ in range(1000):
            sent.append(1)
            yield b"x" * (1 << 16)

    with pytest.raises((httpx2.TransportError, AssertionError)):
        found = httpx2.post(
            f"{strict.url}/score", content=parts(), headers={"Authorization": "Bearer t0ken"}, trust_env=False
        )
        assert found.status_code != 413
    assert len(sent) < 1000


@pytest.mark.parametrize("given", ["", "Bearer other", "Bearer t0ke", "Bearer t0ken1", "t0ken", "Bearer ü"])
def test_the_token_is_asked_of_every_request_for_rewards(strict, given):
    body = {"prompts": ["p"], "completions": ["1"], "columns": {"answer": ["1"]}}
    assert strict.post(body, headers={"Authorization": given.encode()}).status_code == 401
    assert strict.post(body, headers={"Authorization": "Bearer t0ken"}).json() == {"rewards": [1.0]}
    for path in ("/health", "/metrics"):
        assert httpx2.get(strict.url + path, trust_env=False).status_code == 200


def test_other_paths_methods_and_zipped_bodies(strict):
    good = {"Authorization": "Bearer t0ken"}
    assert strict.post({}, "/other").status_code == 404
    assert httpx2.get(f"{strict.url}/score", trust_env=False).status_code == 405
    assert strict.post(b"x", headers=good | {"Content-Encoding": "gzip"}).status_code == 415


# ----------------------------------------------------------------------------- clients that hold connections


def connected(served, data=b"", receive=None):
    """A client that has sent this."""
    client = socket.socket()
    if receive is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    client.settimeout(10)
    client.connect(served.sock.getsockname())
    client.sendall(data)
    return client


def ended(client):
    """Whether the server has closed the connection, all of what it sent being read."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\n"
ASKED = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def test_idle_connections_make_room_for_others(monkeypatch, capfd):
    """The one that has waited longest is closed, before one whose body is on its way; none being answered."""
    monkeypatch.setattr(http, "_most_connections", lambda: 6)
    held = threading.Event()

    def slow(completions):
        held.wait(20)
        return length(completions)

    with serving(len=(slow, 1.0)) as served, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        asked = pool.submit(served.ask, "abc")
        while served.server.server_state.total_requests + len(served.server.server_state.tasks) < 1:
            time.sleep(0.01)
        begun = [b"P", b"", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", ASKED[:9]]
        clients = [stack.enter_context(connected(served, begun[i % 5])) for i in range(40)]
        for _ in range(5):
            found = httpx2.get(f"{served.url}/health", trust_env=False, timeout=10)
            assert found.json()["rewards"] == ["len"]
        assert len(served.server.server_state.connections) <= 6
        assert all(ended(client) for i, client in enumerate(clients[:30]) if i % 5 != 3)
        held.set()
        assert asked.result().json()["rewards"] == [3.0]
    assert not capfd.readouterr().err


def test_a_server_whose_connections_all_wait_for_rewards_refuses_one_more(monkeypatch):
    monkeypatch.setattr(http, "_most_connections", lambda: 2)
    held = threading.Event()

    def slow(completions):
        held.wait(20)
        return length(completions)

    body = json.dumps({"prompts": ["p"], "completions": ["abc"]}).encode()
    whole = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with serving(len=(slow, 1.0), rows=1) as served, ExitStack() as stack:
        clients = [stack.enter_context(connected(served, whole)) for _ in range(2)]
        while served.jobs.rows() < 1:  # and one that is computed
            time.sleep(0.01)
        with connected(served, whole) as late:
            assert late.recv(100).startswith(b"HTTP/1.1 503 ") and ended(late)
        held.set()
        for client in clients:
            assert b"".join(iter(lambda: client.recv(1000), b"")).endswith(b'{"rewards":[3.0]}')  # noqa: B023


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"P",
        HEAD,
        ASKED + b"\r\n" + HEAD,  # after another request
        ASKED + b"Content-Length: 99\r\n\r\n{",  # of which nobody reads the body
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 99\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_arrive_is_cut_off_however_it_drips(begun):
    with serving(len=(length, 1.0), arrival=0.6) as served, connected(served, begun) as client:
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - began < 8:
                client.sendall(b"x" if begun else b"")
                time.sleep(0.1)
                if not served.server.server_state.connections:
                    break
        assert 0.5 < time.monotonic() - began < 6
        assert ended(client)
        assert served.ask("abc").json()["rewards"] == [3.0]


def test_an_answer_that_nobody_reads_is_cut_off_and_one_that_is_read_slowly_is_not():
    with serving(len=(length, 1.0), arrival=0.6) as served:
        asked = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        with connected(served, receive=4096) as client:
            client.settimeout(0.3)
            began = time.monotonic()
            with pytest.raises(ConnectionError):
                while time.monotonic() - began < 15:
                    with suppress(TimeoutError):
                        client.sendall(asked * 50)
            assert time.monotonic() - began < 15
        body = json.dumps({"prompts": ["p"] * 1000, "completions": ["a"] * 1000}).encode()

        def loud(completions, log_extra):
            log_extra("why", ["x" * 4000] * len(completions))
            return length(completions)

    with serving(len=(loud, 1.0), arrival=0.6) as served:
        whole = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with connected(served, whole, receive=1 << 17) as client:
            size, began = 0, time.monotonic()
            while part := client.recv(1 << 17):
                size += len(part)
                time.sleep(0.05)
        assert size > 4_000_000 and time.monotonic() - began > 1.2


def test_what_is_no_http_is_refused_without_a_word(strict, capfd):
    for data in (b"\x16\x03\x01\x02", b"hello\r\n\r\n", HEAD + b"Content-Length: x\r\n\r\n", b"P" * 100_000):
        with connected(strict, data + b"\r\n\r\n") as client:
            assert b"400" in client.recv(100)
    assert not capfd.readouterr().err


def test_what_a_reward_raises_is_told_with_its_name_and_the_server_lives():
    def broken(completions):
        if "bad" in completions:
            raise KeyError("x")
        return length(completions)

    def away(completions):
        raise ConnectionError("no database")

    with serving(len=(broken, 1.0)) as served:
        found = served.ask("bad")
        assert found.status_code == 422
        assert found.json()["error"] == "KeyError: 'x' (raised by the reward 'len')"
        assert served.ask("a").json()["rewards"] == [1.0]
    with serving(away=(away, 1.0)) as served:
        found = served.ask("a")
        assert found.status_code == 502 and "no database" in found.json()["error"]


# ------------------------------------------------------------------------------- many clients, one reward


def test_requests_that_wait_are_scored_together_and_each_gets_its_own():
    calls = []

    def slow(completions):
        calls.append(len(completions))
        time.sleep(0.2)
        return length(completions)

    with serving(len=(slow, 1.0)) as served, ThreadPoolExecutor(16) as pool:
        asked = [["x" * i, "y" * (2 * i)] for i in range(16)]
        found = list(pool.map(lambda c: served.ask(*c).json()["rewards"], asked))
        text = httpx2.get(f"{served.url}/metrics", trust_env=False).text
    assert found == [[float(i), 2.0 * i] for i in range(16)]
    assert sum(calls) == 32 and len(calls) <= 8
    assert 'rft_reward_requests_total{path="/score",status="200"} 16.0' in text
    assert "rft_reward_completions_total 32.0" in text
    assert f"rft_reward_call_completions_count {len(calls)}.0" in text


def test_a_request_that_fails_fails_alone():
    def picky(completions):
        time.sleep(0.1)
        if "bad" in completions:
            raise ValueError("bad")
        return length(completions)

    with serving(len=(picky, 1.0), wait=0.3) as served, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda c: served.ask(c).status_code, ["a", "bad", "c", "bad", "e"]))
    assert found == [200, 422, 200, 422, 200]


def test_requests_of_other_columns_forms_and_steps_are_not_joined():
    one = Batch(["p"], ["c"], {"a": [1]}, {"keys": [1]}, rft.reward.trainer_state(1, 2))
    others = [
        one._replace(columns={"b": [1]}), one._replace(given={}),
        one._replace(state=rft.reward.trainer_state(2, 2)),
        one._replace(prompts=[[{"role": "user", "content": "p"}]]),
    ]  # fmt: skip
    queue = jobs.Jobs(100)
    for batch in [one, others[0], one, others[1], one, others[2], others[3]]:
        assert queue.put(jobs.Job(batch))
    assert [len(queue.take(2, 0)) for _ in range(6)] == [2, 1, 1, 1, 1, 1]
    assert queue.take(2, 0) == [] and queue.rows() == 0


def test_steps_are_joined_for_rewards_that_do_not_read_them():
    batches = [Batch(["p"], ["c"], {}, {}, rft.reward.trainer_state(step, 9)) for step in (1, 2, 2)]
    queue = jobs.Jobs(100, by_state=False)
    assert all(queue.put(jobs.Job(batch)) for batch in batches)
    assert len(queue.take(9, 0)) == 3


def test_which_rewards_may_read_the_step_of_a_run():
    def named(completions, trainer_state): ...

    def anything(completions, **columns): ...

    def neither(completions, answer): ...

    parts = rft.reward.parse(["numeric", "boxed", "format", "tags", "exact", "task:sort_digits"]).components
    judge = rft.reward.generative_by_name(judges.engine(str, tiny.tokenizer()), tiny.tokenizer(), "terse")
    assert [as_reward(fn).state for fn in (named, anything, neither, judge)] == [True, True, False, False]
    assert not any(fn.state for fn, _ in parts.values())
    assert rft.reward.served_at("http://h:1/score").state  # it passes the step on


def test_joined_rows_stand_in_order():
    parts = [
        Batch(["p"] * n, [f"{n}{i}" for i in range(n)], {"a": list(range(n))}, {"keys": [n] * n})
        for n in (1, 3)
    ]
    found = jobs.join(parts)
    assert found == Batch(["p"] * 4, ["10", "30", "31", "32"], {"a": [0, 0, 1, 2]}, {"keys": [1, 3, 3, 3]})


def test_prompts_of_two_requests_are_two_groups_whatever_their_numbers():
    parts = [Batch(["p"] * 3, ["a", "b", "c"], {}, {"groups": groups}) for groups in ([4, 4, 7], [7, 4, 7])]
    assert jobs.join(parts).given["groups"] == [0, 0, 1, 2, 3, 2]


def test_a_full_queue_answers_429_and_the_client_comes_again():
    def slow(completions):
        time.sleep(0.1)
        return length(completions)

    with serving(len=(slow, 1.0), queue=3, rows=1) as served, ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda c: served.ask(c), ["x"] * 12))
        refused = [x for x in found if x.status_code == 429]
        assert refused and {x.status_code for x in found} == {200, 429}
        assert all(1 <= int(x.headers["Retry-After"]) <= 30 for x in refused)
        assert "at most 3 completions to wait" in refused[0].json()["error"]

        # the library's own client loses nothing, with a single try
        how = {"batch": 1, "connections": 12, "tries": 1}
        remote = rft.reward.weighted(r=(rft.reward.served_at(f"{served.url}/score", **how), 1.0))
        texts = ["x" * i for i in range(12)]
        assert remote(list("abcdefghijkl"), texts, {}).total.tolist() == [float(i) for i in range(12)]


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits():
    with serving(len=(length, 1.0), queue=3) as served:
        assert served.ask(*["x"] * 10).status_code == 200


def test_a_client_that_leaves_is_forgotten():
    scored = []
    held = threading.Event()

    def slow(completions):
        scored.extend(completions)
        held.wait(10)
        return length(completions)

    with serving(len=(slow, 1.0), rows=1) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.ask, "first")
        while not scored:
            time.sleep(0.01)
        with pytest.raises(httpx2.TimeoutException):
            body = json.dumps({"prompts": ["p"], "completions": ["left"]}).encode()
            httpx2.post(f"{served.url}/score", content=body, timeout=0.3, trust_env=False)
        end = time.monotonic() + 10
        while served.jobs.rows() and time.monotonic() < end:
            time.sleep(0.01)
        held.set()
        assert first.result().status_code == 200
        served.ask("last")
    assert scored == ["first", "last"]


def test_a_server_that_stops_answers_what_it_has_and_refuses_the_rest():
    begun, held = threading.Event(), threading.Event()

    def slow(completions):
        begun.set()
        held.wait(10)
        return length(completions)

    with serving(len=(slow, 1.0), rows=1) as served, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(served.ask, "x" * i) for i in range(3)]
        begun.wait(10)  # one is being scored; then two wait
        while served.jobs.rows() < 2:
            time.sleep(0.01)
        served.jobs.closed = True
        late = served.ask("late")
        assert late.status_code == 503 and late.headers["Retry-After"] == "1"
        health = httpx2.get(f"{served.url}/health", trust_env=False)
        assert health.status_code == 503 and health.json()["status"] == "stopping"
        held.set()
        assert [x.result().json()["rewards"] for x in asked] == [[0.0], [1.0], [2.0]]


# --------------------------------------------------------------------------------------------- models


def test_a_scalar_model_scores_texts_as_it_scores_a_rollout(tmp_path):
    """Of prompts and responses that its own tokenizer makes the same ids of, to the bit."""
    module = rft.model.load_reward(tiny.llama(), heads=("good", "short"), new=True)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    rft.model.save_reward(tmp_path, module)
    tiny.tokenizer().save_pretrained(tmp_path)
    st = rft.strategy.get_strategy()
    specs = [f"model:{tmp_path}:good", f"model:{tmp_path}:short=0.5"]
    score = rft.run.load_rewards(specs, rft.run.options.Data(), st)

    asked = ["31=", "2="]
    batch = Batch(asked, ["13", "2"], {}, {"truncated": [False, True]})
    found = http_texts.joint_values(score, batch)
    rollout, prompts, texts = http_texts.as_rollout(batch)
    assert texts.decode(rollout.tokens[1]) == "2" and [p.text for p in prompts] == asked

    tokenizer = tiny.tokenizer()
    rows = [
        tokenizer.encode("31=") + tokenizer.encode("13") + [1],
        tokenizer.encode("2=") + tokenizer.encode("2"),
    ]
    apply, params = st.bind(module)
    scored = rft.packing.scored(rows)
    expected = st.score(apply, params, scored, 64, fields=("score",)).score
    last = scored.mask.int().argmax(-1)
    for head, name in enumerate(("good", "short")):
        assert torch.equal(found[name], expected[torch.arange(2), last, head].float())


# --------------------------------------------------------------- what foreign code raises, and two lengths


class Panic(BaseException):
    """As pyo3_runtime.PanicException: no Exception."""


class Speechless(Exception):
    def __str__(self):
        raise Panic("no text")


class Unwritable:
    """A value whose text is foreign code, too."""

    def __str__(self):
        raise Panic("no text")


RAISED = {
    "panic": (Panic("in Rust"), "RuntimeError: Panic: in Rust"),
    "cancelled": (asyncio.CancelledError(), "expected a list of numbers, got a cancelled task"),
    "a future of theirs": (concurrent.futures.CancelledError(), "CancelledError"),
    "Ctrl-C": (KeyboardInterrupt(), "RuntimeError: KeyboardInterrupt"),
    "exit": (SystemExit(3), "got sys.exit(3)"),
    "stop": (StopIteration("done"), "StopIteration: done"),
    "generator": (GeneratorExit(), "RuntimeError: GeneratorExit"),
    "no text": (Speechless(), "Speechless"),
}


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_that_a_reward_raises_ends_the_server(waits):
    """Also of a reward that waits, and of a value whose own code raises while it is written."""

    def plain(completions):
        if completions[0] in RAISED:
            raise RAISED[completions[0]][0]
        if completions[0] == "unwritable":
            return [{"score": 1.0, "why": Unwritable()} for _ in completions]
        return [1.0 for _ in completions]

    async def waiting(completions):
        return plain(completions)

    with serving(it=(waiting if waits else plain, 1.0)) as served:
        for name, (_, line) in RAISED.items():
            found = served.ask(name)
            assert found.status_code == 422 and "\n" not in found.text, name
            assert line in found.json()["error"] or (waits and name == "stop"), (name, found.text)
        found = served.ask("unwritable").json()
        assert found == {"rewards": [1.0], "extra": {"why": ["a value of type Unwritable"]}}
        assert served.ask("well").json()["rewards"] == [1.0]


@pytest.mark.parametrize("head", ["POST /score", "GET /health"])
def test_a_request_with_two_lengths_is_refused_whatever_it_asks_for(head):
    with serving(len=(length, 1.0)) as served, socket.create_connection(served.sock.getsockname()) as sock:
        two = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
        sock.sendall(f"{head} HTTP/1.1\r\nHost: x\r\n{two}".encode())
        sock.settimeout(20)
        found = b""
        while part := sock.recv(4096):  # it is closed: what follows is not read as another request
            found += part
    assert found.startswith(b"HTTP/1.1 400 ") and found.count(b"HTTP/1.1") == 1
    assert b"expected Content-Length or Transfer-Encoding, got both" in found
