"""The endpoint of a policy: what it answers, what it refuses, and what becomes of clients that leave."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest
from endpoints import TOK, Says

from rft_fn.collect.calls import Calls, answer
from rft_fn.collect.recorder import Limits, Session
from rft_fn.engine.requests import BadPrompt
from rft_fn.environment import Renderer
from rft_fn.types import Sampling

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install rft-fn[serve]")

from rft_fn.tools.serving.model_server import ModelEndpoint

ASKED = [{"role": "user", "content": "first"}]


class Served:
    def __init__(self, engine, **options):
        options = {"window": 2000, "seconds": 20.0} | options
        self.engine = engine
        self.front = ModelEndpoint(Renderer(TOK), Sampling(max_new=8, temperature=0.7), **options)
        self.going = True
        self.thread = threading.Thread(target=self.work)

    def work(self):
        calls = []
        while self.going:
            calls = calls or self.front.calls.take(64, wait=0.02, more=0.005)
            if calls:
                calls = answer(self.engine, calls)

    def post(self, url, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = url if url.startswith("http") else self.front.url + url
        return httpx2.post(url, content=data, trust_env=False, timeout=20, headers=headers)

    def chat(self, **more):
        return self.post("/v1/chat/completions", {"model": "m", "messages": ASKED} | more)

    def session(self, *, rewarded=True, tokens=1000):
        session = Session(0, 0, 7, Limits(tokens, 8), Sampling(max_new=8))
        return session, self.front.open(session, rewarded=rewarded)


@contextmanager
def serving(engine=None, **options):
    made = Served(engine or Says(), **options)
    made.thread.start()
    try:
        yield made
    finally:
        made.front.close()
        made.going = False
        made.thread.join()


@pytest.fixture(scope="module")
def served():
    with serving() as made:
        yield made


# ------------------------------------------------------------------------------------------------ answers


def test_a_chat_has_the_text_the_ids_and_the_log_probs_of_the_policy(served):
    found = served.chat(logprobs=True, return_token_ids=True, n=2, max_tokens=6).json()
    assert [x["message"]["content"] for x in found["choices"]] == ["four", "four"]
    first = found["choices"][0]
    assert first["finish_reason"] == "stop" and first["token_ids"] == served.engine.said
    assert found["prompt_token_ids"] == Renderer(TOK).opening(ASKED)
    texts = [x["token"] for x in first["logprobs"]["content"]]
    assert texts == ["f", "o", "u", "r", "<|im_end|>"] and first["logprobs"]["content"][0]["logprob"] == -0.5
    size = len(found["prompt_token_ids"])
    assert found["usage"] == {"prompt_tokens": size, "completion_tokens": 10, "total_tokens": size + 10}
    assert served.chat(max_tokens=2).json()["choices"][0]["finish_reason"] == "length"


def test_a_stream_says_the_same(served):
    lines = served.chat(stream=True).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [x["choices"][0] for x in parts if x["choices"]]
    assert "".join(x["delta"].get("content", "") for x in deltas) == "four"
    assert deltas[-1]["finish_reason"] == "stop" and parts[-1]["usage"]["completion_tokens"] == 5


def test_a_completion_takes_texts_and_token_ids(served):
    body = {"prompt": ["ab", [20, 21]], "logprobs": 1, "return_token_ids": True, "temperature": 0, "seed": 3}
    found = served.post("/v1/completions", body).json()["choices"]
    assert [x["text"] for x in found] == ["four", "four"]
    assert [x["prompt_token_ids"] for x in found] == [TOK.encode("ab", add_special_tokens=False), [20, 21]]
    assert found[0]["logprobs"]["token_logprobs"] == [-0.5] * 5
    prompts, keys, sampling, _, _ = served.engine.asked[-1]
    assert sampling.temperature == 0 and len(prompts) == 2 and len(set(keys)) == 2
    assert served.post("/v1/completions", body).status_code == 200
    assert served.engine.asked[-1][1] == keys, "a seed names the draws"


class Picky(Says):
    """Refuses a prompt that has a word, as engines refuse what they find only when they read it."""

    def generate(self, prompts, keys, **given):
        for i, ids in enumerate(prompts):
            if 9 in ids:
                raise BadPrompt(i, "no token 9", "one")
        return super().generate(prompts, keys, **given)


def test_a_prompt_that_the_engine_refuses_is_its_clients_alone():
    """Those that were to be sampled with it have their answers, and the server goes on."""
    with serving(Picky()) as made:
        bodies = [{"prompt": [20, 9 if i in (1, 2) else 21], "max_tokens": 8} for i in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda body: made.post("/v1/completions", body), bodies))
        assert [x.status_code for x in found] == [200, 400, 400, 200]
        assert "expected no token 9, got one" in found[1].json()["error"]["message"]
        assert made.chat().status_code == 200


def test_a_token_id_beyond_the_vocabulary_is_refused(served):
    found = served.post("/v1/completions", {"prompt": [20, len(TOK)]})
    assert found.status_code == 400
    assert f"expected token ids below {len(TOK)}, got {len(TOK)}" in found.json()["error"]["message"]


def test_models_and_health_are_told(served):
    found = httpx2.get(served.front.url + "/v1/models", trust_env=False).json()["data"]
    assert [(x["id"], x["max_model_len"]) for x in found] == [("policy", 2000)]
    assert httpx2.get(served.front.url + "/health", trust_env=False).json() == {"status": "ok", "waiting": 0}


@pytest.mark.parametrize(
    ("more", "line"),
    [({"presence_penalty": 0.5}, "presence_penalty: only 0 is done here, got 0.5"),
     ({"temperature": -1}, "temperature: expected a finite number, got -1"),
     ({"temperature": True}, "temperature: expected a finite number, got True"),
     ({"n": 0}, "n: expected a whole number from 1 to 128, got 0"),
     ({"top_p": 0}, "top_p: expected"),
     ({"max_tokens": 0}, "max_tokens: expected a whole number of at least 1, got 0"),
     ({"stop": [""]}, "stop: expected"),
     ({"guided_json": {}}, "guided_json: it is not known here, got {}"),
     ({"messages": []}, "column 'messages' has no messages"),
     ({"messages": [{"role": "user"}]}, "user: expected content, got none"),
     ({"messages": [{"role": "user", "content": "x" * 3000}]}, "fewer than 2000 tokens, the window")],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(served, more, line):
    found = served.chat(**more)
    assert found.status_code == 400 and line in found.json()["error"]["message"], found.text
    assert "\n" not in found.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": NaN}', b"[" * 9000])
def test_a_body_that_is_no_request_is_refused(served, body):
    found = served.post("/v1/chat/completions", body)
    assert found.status_code == 400 and found.json()["error"]["message"]


def test_the_token_is_asked_of_every_client_but_of_sessions():
    with serving(token="hush") as made:
        assert made.chat().status_code == 401
        assert made.post("/v1/completions", {"prompt": "a"}, Authorization="Bearer hush").status_code == 200
        _, address = made.session()
        url = f"{address.url}/v1/chat/completions"
        assert made.post(url, {"messages": ASKED}).status_code == 200
        assert made.post(url.replace(address.name, "0" * 32), {"messages": ASKED}).status_code == 404


# ------------------------------------------------------------------------------------------------ sessions


def test_a_session_is_sampled_as_the_trainer_says(served):
    """Whatever the program asks for: temperature, top_p, penalties and limits are not its own."""
    session, address = served.session()
    body = {
        "messages": ASKED,
        "temperature": 0,
        "top_p": 0.1,
        "presence_penalty": 1,
        "max_tokens": 1,
        "seed": 4,
    }
    found = served.post(f"{address.url}/v1/chat/completions", body).json()
    assert found["choices"][0]["message"]["content"] == "four"
    sampling = served.engine.asked[-1][2]
    assert (sampling.temperature, sampling.top_p, sampling.max_new) == (1.0, 1.0, 8)
    (row,) = session.rows
    assert row.said.tokens[-5:] == served.engine.said and row.said.logp[-5:] == [-0.5] * 5
    assert row.said.version == 5
    more = {"messages": ASKED, "n": 2}
    assert "expected 1 in a session" in served.post(f"{address.url}/v1/chat/completions", more).text


def test_a_program_that_left_finds_its_own_answer_when_it_asks_again():
    """The answer that came too late is nobody's: no later request gets it, and no row has it."""
    with serving(Says(seconds=0.5)) as made:
        session, address = made.session()
        sock = socket.create_connection(("127.0.0.1", int(made.front.url.rpartition(":")[2])))
        data = json.dumps({"messages": ASKED}).encode()
        path = f"/sessions/{address.name}/v1/chat/completions"
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        time.sleep(0.2)
        sock.close()
        time.sleep(0.6)
        assert not session.rows and len(made.engine.asked) == 1
        other = [{"role": "user", "content": "second"}]
        found = made.post(f"{address.url}/v1/chat/completions", {"messages": other}).json()
        assert found["choices"][0]["message"]["content"] == "four"
        (row,) = session.rows
        assert row.said.messages[0] == other[0] and row.said.turns == 1


def test_a_session_that_has_ended_is_closed():
    with serving() as made:
        _, address = made.session()
        made.front.shut(address)
        found = made.post(f"{address.url}/v1/chat/completions", {"messages": ASKED})
        assert found.status_code == 404 and found.json()["error"]["code"] == "session_closed"


def test_a_reward_is_finite_comes_once_and_from_whoever_may_give_it(served):
    session, address = served.session()
    url, key = f"{address.url}/reward", {"Authorization": f"Bearer {address.secret}"}
    for bad in (b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": "1"}', b'{"reward": true}', b"{}"):
        assert served.post(url, bad, **key).status_code == 400 and session.reward is None
    assert served.post(url, {"reward": 1}).status_code == 401, "the agent's own key is not enough"
    assert served.post(url, {"reward": 0.5}, **key).json() == {"reward": 0.5} and session.reward == 0.5
    assert served.post(url, {"reward": 1}, **key).status_code == 409 and session.reward == 0.5


def test_a_program_gives_no_reward_where_the_run_does(served):
    session, address = served.session(rewarded=False)
    found = served.post(f"{address.url}/reward", {"reward": 1}, Authorization="Bearer x")
    assert found.status_code == 403 and session.reward is None and not address.secret


def test_half_open_connections_hold_no_slot():
    """Connections that send no request do not keep others from being answered."""
    with serving() as made:
        port = int(made.front.url.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for sock in idle[:25]:
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert made.chat().status_code == 200
        for sock in idle:
            sock.close()


def test_what_waits_has_a_limit_and_an_answer_a_deadline():
    renderer = Renderer(TOK)
    front = ModelEndpoint(renderer, Sampling(max_new=8), queue=1, seconds=0.3)
    try:
        post = {"content": json.dumps({"messages": ASKED}).encode(), "trust_env": False, "timeout": 20}
        url = f"{front.url}/v1/chat/completions"
        late = threading.Thread(target=lambda: codes.append(httpx2.post(url, **post).status_code))
        codes = []
        late.start()
        while not len(front.calls):
            time.sleep(0.01)
        full = httpx2.post(url, **post)
        assert full.status_code == 429 and full.headers["Retry-After"]
        late.join()
        assert codes == [504] and not front.calls.take(4, wait=0)
    finally:
        front.close()


def test_calls_that_differ_in_their_law_are_asked_apart():
    calls = Calls(8)
    for law in (Sampling(), Sampling(temperature=0.5), Sampling(top_p=0.5), Sampling(max_new=3)):
        calls.put([1], 0, law)
    first, second = calls.take(8, wait=0), calls.take(8, wait=0)
    assert [len(first), len(second)] == [3, 1] and second[0].sampling.top_p == 0.5
    engine = Says()
    answer(engine, first)
    _, _, law, limits, warmths = engine.asked[0]
    assert law.max_new == 256 and limits == [256, 256, 3] and warmths == [1.0, 0.5, 1.0]
