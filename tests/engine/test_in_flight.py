"""Weights that change under running requests: the version of each token, and its log-prob by that version."""

import threading
import time
from functools import partial
from itertools import chain

import pytest
import tiny
import torch
from fake_server import FakeServer, serving

import rft_fn as rft
from rft_fn import collect, engine, rng, tree
from rft_fn.engine import EngineConfig
from rft_fn.engine.pool import ServersFailed
from rft_fn.engine.requests import Request

PROMPTS, KEYS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]], [rng.fold_in(0, i) for i in range(3)]
SAMPLING = rft.Sampling(max_new=12, top_p=0.9)
LIMITS = [3, 12, 9]  # of rows


def made(seed, **options):
    return engine.get_engine(EngineConfig(**options), tiny.llama(seed), tiny.tokenizer())


def weights(seed):
    return tiny.llama(seed).named_parameters(remove_duplicate=False)


def sampled(eng, load, *, process=False, max_new=LIMITS):
    """A rollout that gets new weights when its first row has ended."""
    threads = []

    def on_row(b, tokens, ended):
        if not threads:
            threads.append(threading.Thread(target=load))
            threads[0].start()
            if not process:  # the load must be there before the next token
                assert eng.generate.__self__.core.arriving.wait(20)

    rollout = eng.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=max_new, on_row=on_row)
    threads[0].join()
    return rollout


def of_rows(rollout):
    """The versions of the tokens that were sampled, of each row."""
    return [x[m].tolist() for x, m in zip(rollout.versions, rollout.mask)]


def without_versions(rollout):
    return tree.replace(rollout, version=rollout.version * 0, versions=None)


@pytest.mark.parametrize("batch", [64, 1])
def test_each_token_has_the_version_and_the_log_prob_of_its_weights(batch):
    plain, eng = made(1, batch=batch), made(1, batch=batch, in_flight=True)
    eng.load(weights(1), version=4)
    one = plain.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=LIMITS)
    straight = eng.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=LIMITS)
    assert of_rows(straight) == [[4] * len(x) for x in of_rows(straight)] and one.versions is None

    # by equal weights the tokens are equal to the byte
    same = sampled(eng, lambda: eng.load(weights(1), version=5))
    for name, x in tree.leaves_with_path(without_versions(same)):
        assert torch.equal(x, dict(tree.leaves_with_path(without_versions(one)))[name]), name

    # by others, up to the first token that they have read all before
    found = sampled(eng, lambda: eng.load(weights(2), version=6))
    versions = of_rows(found)
    if batch > 1:  # what was drawn next had been computed
        first = min(map(len, versions))
        assert versions == [([5] * (first + 1) + [6] * 12)[: len(x)] for x in versions]
        assert 6 in versions[1] and found.version.tolist() == [5] * 3
    else:
        assert [set(x) for x in versions] == [{6}, {5}, {6}] and found.version.tolist() == [6, 5, 6]
    for seed, version in ((1, 5), (2, 6)):
        # nothing before it was read by older weights
        exact = found.mask & (found.versions == version) & (found.version == version).unsqueeze(-1)
        logp = made(seed).score(found, sampling=SAMPLING)
        assert torch.where(exact, (logp - found.logp).abs(), 0).max() < 1e-5
        assert exact.any() == (version in found.version)


def test_a_load_that_fails_in_flight_ends_the_rollout():
    eng = made(1, in_flight=True)

    def load():
        with pytest.raises(ValueError, match="nobody"):
            eng.load([("nobody", torch.zeros(1))], version=1)

    with pytest.raises(
        RuntimeError, match=r"^weights: expected a whole load in flight, got one that failed$"
    ):
        sampled(eng, load)
    assert not eng.status()["alive"]


def test_engines_without_it_refuse_in_a_line():
    for kind in ("vllm", "sglang", "ray"):
        with pytest.raises(
            ValueError, match=f"^in_flight: expected engine_type hf or openai, .* got {kind}$"
        ):
            made(0, type=kind, in_flight=True)


def loading_at(t, fake, load):
    """Run `load` in another thread when a sample has t tokens, before it gets one more; its threads."""
    threads = []

    def before(n):
        if n == t and not threads:
            threads.append(threading.Thread(target=load))
            threads[0].start()
            while not fake.paused and threads[0].is_alive():
                time.sleep(0.001)

    fake.before_token = before
    return threads


@pytest.mark.parametrize("transfer", ["folder", "rft"])
def test_servers_hold_their_requests_and_go_on_with_new_weights(transfer):
    """They read all of a request again, so that each token is of the weights of its version alone."""
    with serving(FakeServer(tiny.llama(0), tiny.tokenizer(), transfer="rft")) as [fake]:
        eng = made(1, type="openai", servers=(fake.url,), in_flight=True, transfer=transfer, timeout=60)
        eng.load(weights(1), version=4)
        one = made(1).generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=LIMITS)
        for seed, version in ((1, 5), (2, 6)):
            threads = loading_at(2, fake, partial(eng.load, weights(seed), version=version))
            found = eng.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=LIMITS)
            threads[0].join()
            assert {version - 1, version} == {*chain(*of_rows(found))} and not fake.paused
            assert all(x == sorted(x) for x in of_rows(found))
            if seed == 1:
                assert torch.equal(found.tokens, one.tokens)
            older = made(1).score(found, sampling=SAMPLING)
            logp = torch.where(found.versions == version, made(seed).score(found, sampling=SAMPLING), older)
            assert (logp - found.logp).abs().max() < 1e-5
        after = eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
        assert {*chain(*of_rows(after))} == {6}


def test_a_server_that_does_not_take_weights_in_flight_breaks_its_requests_off():
    """What it had begun is sampled by the other one."""
    fakes = [FakeServer(tiny.llama(0), tiny.tokenizer()) for _ in range(2)]
    with serving(*fakes) as (well, bad):
        urls = (well.url, bad.url)
        eng = made(1, type="openai", servers=urls, batch=2, in_flight=True, timeout=60)
        eng.load(weights(1), version=1)
        bad.load_problem = {"error": "no"}
        threads = loading_at(2, bad, lambda: eng.load(weights(2), version=2))
        found = eng.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
        threads[0].join()
        assert not well.paused and not bad.paused and "/pause?mode=abort" in [path for path, _ in bad.calls]
        older, newer = (made(seed).score(found, sampling=SAMPLING) for seed in (1, 2))
        assert (torch.where(found.versions == 2, newer, older) - found.logp).abs().max() < 1e-5

        bad.load_problem = None  # it is taken back with the newest
        again = eng.generate(PROMPTS, KEYS, n=4, sampling=SAMPLING)
        assert {*chain(*of_rows(again))} == {2}


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_engine_that_follows_takes_what_the_other_has_loaded(in_flight):
    """It gives a server nothing and resumes none; in flight its tokens are of newer weights at once."""
    with serving(FakeServer(tiny.llama(0), tiny.tokenizer())) as [fake]:
        both = partial(
            made, 1, type="openai", servers=(fake.url,), timeout=60, run="both", in_flight=in_flight
        )
        first, second = both(), both(follows=True)
        line = "expected weights 'both:4' of the engine that loads them, got 'default'"
        with pytest.raises(ServersFailed, match=line):
            second.generate.__self__.core.load(weights(1), version=4)
        given, seen = (x.load(weights(1), version=4) for x in (first, second))
        assert given._replace(seconds=0) == seen._replace(seconds=0)
        one, two = (x.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=LIMITS) for x in (first, second))
        assert torch.equal(one.tokens, two.tokens) and two.version.tolist() == [4] * 3

        threads = loading_at(2, fake, partial(first.load, weights(2), version=5))
        if not in_flight:
            first.load(weights(2), version=5)
            core = second.generate.__self__.core
            core.pool.pause = 1e-3
            with pytest.raises(ServersFailed, match="expected weights 'both:4'"):
                core.sample(Request(PROMPTS, KEYS, 1, SAMPLING))
            return
        found = second.generate(PROMPTS, KEYS, sampling=SAMPLING, max_new=LIMITS)
        threads[0].join()
        assert {4, 5} == {*chain(*of_rows(found))}
        for number in (6, 7):
            first.load(weights(2), version=number)
        second.load(weights(2), version=6)  # the other one waits for nobody
        calls = [path for path, _ in fake.calls]
        assert calls.count("/pause?mode=keep") == calls.count("/resume") == 4


def test_a_server_without_versions_of_tokens_is_refused():
    line = r"in_flight: expected the versions of tokens .*, got none"
    fake = FakeServer(tiny.llama(0), tiny.tokenizer(), routes=("dev",))
    with serving(fake), pytest.raises(ValueError, match=line):
        made(1, type="openai", servers=(fake.url,), in_flight=True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_a_worker_gives_weights_to_the_rollout_under_way():
    """In a process of its own, by the thread of the trainer; what begins later has them from the start."""

    def build():
        return made(1, process=True, in_flight=True, batch=1)

    worker = collect.EngineWorker(build, in_flight=True)
    eng = worker.engine()
    eng.load(weights(1), version=1)
    begun = threading.Event()

    request = rft.engine.requests.Request(PROMPTS, KEYS, 8, SAMPLING, on_row=lambda *row: begun.set())
    worker.begin(request)
    assert begun.wait(60)
    eng.load(weights(2), version=2)
    found = eng.generate(PROMPTS, KEYS, n=8, sampling=SAMPLING)
    after = eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    eng.close()
    assert of_rows(found)[8][0] == 1 and of_rows(found)[0][-1] == 2  # the shortest prompts are read first
    assert {*chain(*of_rows(after))} == {2}
    assert collect.staleness(found, 2)["rollout/staleness_max"] == 1
    assert 0 < collect.staleness(found, 2)["rollout/staleness"] < 1
