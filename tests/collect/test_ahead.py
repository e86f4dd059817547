"""Rollouts sampled ahead, by engines of plain Python: versions, order, checkpoints, engines that die."""

import threading
import time
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import rft_fn as rft
from rft_fn import engine, rng, tree
from rft_fn.collect import asynchronous, due, version_of
from rft_fn.collect.engine_worker import Turns
from rft_fn.engine import EngineConfig
from rft_fn.engine.requests import Request, Response, assemble
from rft_fn.types.engine import Delivered

SAMPLING, GREEDY = rft.Sampling(max_new=3), rft.Sampling(max_new=2, temperature=0)
STRATEGY = rft.strategy.get_strategy()


class Lost(RuntimeError):
    """What an engine dies of."""


class Plain:
    """An engine whose samples are a function of its weights and the keys; it dies at the calls `dies`.

    From the second call on it waits in each for the learner, if there is a barrier where they meet.
    """

    def __init__(self, dies=(), calls=None, meets=None):
        self.weights, self.version, self.alive = 0.0, 0, True
        self.dies, self.meets = set(dies), meets
        self.calls = [] if calls is None else calls  # of all engines of a test

    def step(self, name):
        assert threading.current_thread() is not threading.main_thread() or not self.meets
        if self.meets and self.calls:
            self.meets.wait(30)
        self.calls.append((name, self.version))
        if len(self.calls) - 1 in self.dies:
            self.alive = False
            raise Lost("gone")

    def generate(self, prompts, keys, *, n=1, sampling, max_new=None, start=None):
        self.step("generate")
        drawn = [
            [3 + rng.fold_in(row.key, row.start + t, str(self.weights)) % 40 for t in range(row.max_new)]
            for row in Request(prompts, keys, n, sampling, max_new, start).rows()
        ]
        responses = [
            Response(tokens, [self.weights - t for t in range(len(tokens))], True) for tokens in drawn
        ]
        return assemble([list(p) for p in prompts], responses, pad=0, version=self.version)

    def load(self, weights, *, version):
        self.step("load")
        pairs = list(weights)
        self.weights, self.version = float(pairs[0][1]), version
        return Delivered(len(pairs), sum(x.numel() * x.element_size() for _, x in pairs), 1.0, version)

    def score(self, rollout, *, sampling=None):
        self.step("score")
        return rollout.logp + self.weights

    def status(self):
        return {
            "engine": "plain",
            "alive": self.alive,
            "version": self.version,
            "asleep": False,
            "supported": frozenset(),
        }

    def close(self):
        self.alive = False

    def record(self):
        nothing = lambda: None  # noqa: E731
        return rft.Engine(self.generate, self.score, self.load, nothing, nothing, self.status, self.close)


def draw(step):
    """The prompts of a step, and their keys."""
    return [[3, 4 + step % 5], [5]], [rng.fold_in(0, step, i) for i in range(2)]


def weights_of(version):
    return [("w", torch.tensor(version * 0.5))]


def expected(step, version, sampling=SAMPLING, n=2):
    """The rollout of a step by an engine that does nothing else."""
    own = Plain()
    own.load(weights_of(version), version=version)
    prompts, keys = draw(step)
    return own.generate(prompts, keys, n=n, sampling=sampling)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def sampler(build, *, ahead, rebuilds=0, strategy=STRATEGY):
    """What `run.start_sampler` makes of an engine of plain Python."""
    if not ahead:
        return rft.collect.AsyncSampler(build(), strategy)
    calls = rft.collect.EngineWorker(build, rebuilds=rebuilds)
    return rft.collect.AsyncSampler(calls.engine(), strategy, calls=calls)


def train(samples, first, total, ahead, *, saved=(), evaluate=(), stop=None):
    """(the rollouts of the steps from `first` on, what a checkpoint has kept after step `stop`)."""
    found = []
    samples.engine.load(iter(weights_of(first)), version=first)
    for step in range(first, total):
        kept = []
        for later in due(step, ahead, total):
            own = samples.begin(*draw(later), n=2, sampling=SAMPLING, saved=saved)
            kept += own if later > step else ()
        found.append(samples.generate(*draw(step), n=2, sampling=SAMPLING, saved=saved))
        saved = kept
        live = torch.tensor((step + 1) * 0.5)  # a trainer changes its weights in place, after the load too
        samples.engine.load(iter([("w", live)]), version=step + 1)
        live.fill_(torch.nan)
        if step in evaluate:
            mine = samples.generate(*draw(step), n=1, sampling=GREEDY)
            assert same(mine, expected(step, step + 1, GREEDY, 1))
        if step == stop:
            return found, samples.save(saved)
    return found, samples.save(saved)


@given(some.integers(0, 4), some.integers(1, 9), some.sets(some.integers(0, 8)), some.integers(0, 8))
def test_each_rollout_is_of_the_version_that_the_schedule_says(ahead, total, evaluate, stop):
    """And with the tokens of that version, also when the run goes on from a checkpoint of any step."""
    samples = sampler(lambda: Plain().record(), ahead=ahead)
    found, kept = train(samples, 0, total, ahead, evaluate=evaluate, stop=stop)
    samples.close()
    assert len(kept) == max(0, min(ahead, total - 1 - stop))
    if stop < total - 1:
        again = sampler(lambda: Plain().record(), ahead=ahead)
        more, kept = train(again, stop + 1, total, ahead, saved=kept, evaluate=evaluate)
        again.close()
        found += more
    assert not kept and len(found) == total
    for step, rollout in enumerate(found):
        version = max(0, step - ahead)
        assert version_of(step, ahead) == version and rollout.version.tolist() == [version] * 4
        assert same(rollout, expected(step, version))


@given(some.integers(0, 4), some.integers(1, 6))
def test_a_script_samples_ahead_in_a_loop(ahead, total):
    """Weights, evaluations and rollouts by one thread; a step's rollout is of `ahead` versions before."""
    samples = rft.collect.sample_ahead(
        Plain().record(), STRATEGY, draw, total=total, n=2, sampling=SAMPLING, ahead=ahead
    )
    samples.engine.load(iter(weights_of(0)), version=0)
    for step, (prompts, rollout) in enumerate(samples):
        assert prompts == draw(step)[0] and same(rollout, expected(step, version_of(step, ahead)))
        samples.engine.load(iter(weights_of(step + 1)), version=step + 1)
        mine = samples.engine.generate(*draw(step), n=1, sampling=GREEDY)
        assert same(mine, expected(step, step + 1, GREEDY, 1))
    assert step == total - 1
    samples.engine.close()


def test_a_script_begins_what_is_due_before_it_learns():
    both = threading.Barrier(2)
    samples = rft.collect.sample_ahead(
        Plain(meets=both).record(), STRATEGY, draw, total=6, n=2, sampling=SAMPLING
    )
    for step, _ in enumerate(samples):
        if step < 5:
            both.wait(30)  # the next step is being sampled
    with pytest.raises(ValueError, match=r"^ahead: expected >= 0 steps, got -1$"):
        rft.collect.sample_ahead(samples.engine, STRATEGY, draw, total=1, n=1, sampling=SAMPLING, ahead=-1)
    samples.engine.close()


@given(some.integers(0, 5), some.integers(1, 12))
def test_a_rollout_is_due_when_the_weights_of_its_version_are_there(ahead, total):
    begun = {}
    for step in range(total):
        for later in due(step, ahead, total):
            begun.setdefault(later, step)
    assert begun == {step: version_of(step, ahead) for step in range(total)}


def test_sampling_and_learning_overlap():
    """With one step ahead the next rollout goes on while the learner is at work, and its time counts."""
    both = threading.Barrier(2)
    samples = sampler(lambda: Plain(meets=both).record(), ahead=1)
    samples.begin(*draw(0), n=2, sampling=SAMPLING)
    samples.generate(*draw(0), n=2, sampling=SAMPLING)
    for step in range(5):
        samples.begin(*draw(step + 1), n=2, sampling=SAMPLING)
        time.sleep(0.1)
        both.wait(30)
        samples.generate(*draw(step + 1), n=2, sampling=SAMPLING)
    assert samples.busy() > 0.1 and samples.busy() == 0
    samples.close()


@pytest.mark.parametrize("dies", [{1}, {2, 3}, {4}, {6, 7, 8}, {1, 5, 9}])
def test_an_engine_that_dies_is_built_again_with_the_weights_it_had(dies, capsys):
    """In a rollout, in a load, and again while it is brought back: the rollouts are the same."""
    calls = []
    samples = sampler(lambda: Plain(dies, calls).record(), ahead=2, rebuilds=3)
    found, _ = train(samples, 0, 6, 2, evaluate={1})
    samples.close()
    assert all(same(x, expected(step, version_of(step, 2))) for step, x in enumerate(found))
    assert capsys.readouterr().err.count("gone; building it again") == len(dies)


GOOD = range(2, 99)  # from the second load on


@pytest.mark.parametrize(
    ("dies", "arrive"),
    [
        (((), ()), (3, 3)),
        (({2}, ()), (3, 3)),
        (({2, 3}, {1, 4}), (3, 3)),
        ((GOOD, ()), (1, 1)),
        (((), GOOD), (3, 1)),
    ],
)
def test_ranks_take_turns_with_a_server_of_all(dies, arrive):
    """The first loads it when no rank samples; a death is waited for, and one for good holds nobody up."""
    server = [0]  # its version

    class Loads(Plain):
        def load(self, weights, *, version):
            delivered = super().load(weights, version=version)
            server[0] = version
            return delivered

    class Follows(Plain):
        def load(self, weights, *, version):
            delivered = super().load(weights, version=version)
            if server[0] != version:
                self.alive = False
                raise Lost("other weights")
            return delivered

        def generate(self, *args, **options):
            before = server[0]
            time.sleep(0.05)
            rollout = super().generate(*args, **options)
            assert server[0] == before == self.version
            return rollout

    store, workers = torch.distributed.HashStore(), []
    for rank, kind in enumerate((Loads, Follows)):
        build = partial(lambda kind, *given: kind(*given).record(), kind, dies[rank], [])
        workers.append(rft.collect.EngineWorker(build, rebuilds=2, turns=Turns(store, rank, 2)))
    found = [[], []]
    for version in range(1, 4):
        for worker, rollouts in zip(workers, found):
            worker.load(weights_of(version), version=version)
            ask = Request(*draw(version), 2, SAMPLING).ask
            rollouts.append(worker.submit(ask))
    for rollouts, count in zip(found, arrive):
        for version, future in enumerate(rollouts, 1):
            if version <= count:
                assert same(future.result(timeout=30), expected(version, version))
            else:
                assert isinstance(future.exception(timeout=30), (Lost, engine.EngineDead))
    assert server[0] == arrive[0]


def checking(loads):
    """A check by the values that the engine samples: two loads, the weights it should have at the end."""

    def check(eng, weights):
        for scale in (3.0, 1.0):
            (name, x), *_ = weights
            eng.load([(name, x * scale)], version=weights.version)
            rollout = eng.generate([[3]], [1], n=1, sampling=GREEDY)
            loads.append(float(x * scale))
            if float(rollout.logp[rollout.mask][0]) != float(x * scale):
                raise rft.sync.CanaryError(f"canary: {name}: expected {float(x * scale)}")

    return check


@pytest.mark.parametrize("dies", [{1}, {2, 3}, {4}, {6, 7, 8}, {3, 5, 9}])
def test_an_engine_that_was_built_again_is_checked_before_its_rollouts_are_used(dies):
    """And it goes on with the weights that it should have, also where it dies within the check."""
    loads, calls = [], []
    order = rft.collect.EngineWorker(lambda: Plain(dies, calls).record(), rebuilds=9, check=checking(loads))
    samples = rft.collect.AsyncSampler(order.engine(), STRATEGY, calls=order)
    found, _ = train(samples, 0, 6, 2, evaluate={1})
    samples.close()
    assert all(same(x, expected(step, version_of(step, 2))) for step, x in enumerate(found))
    assert len(loads) >= 2 and loads[1::2] == [x / 3 for x in loads[::2]]


def test_an_engine_that_fails_its_check_is_not_sampled_from():
    class Stuck(Plain):
        """Takes no weights once it was built again."""

        def load(self, weights, *, version):
            kept = self.weights
            delivered = super().load(weights, version=version)
            if len(made) > 1:
                self.weights = kept
            return delivered

    made, calls = [], []

    def build():
        made.append(Stuck({3}, calls))
        return made[-1].record()

    order = rft.collect.EngineWorker(build, rebuilds=5, check=checking([]))
    samples = rft.collect.AsyncSampler(order.engine(), STRATEGY, calls=order)
    with pytest.raises(engine.EngineDead, match="canary: w: expected"):
        train(samples, 0, 6, 1)
    assert len(made) == 2 and not samples.engine.status()["alive"]
    samples.close()


@given(some.integers(1, 3), some.integers(2, 8), some.integers(1, 30), some.booleans())
def test_what_is_lost_with_an_engine_is_drawn_again_with_the_weights_it_had(ahead, total, death, rounds):
    """A run that goes on from what is saved then has the rollouts of one that nothing interrupts."""
    calls = []
    order = rft.collect.EngineWorker(lambda: Plain(range(death, 9999), calls).record())

    def generate(*args, **options):  # as the engine of a run says it, on every rank
        try:
            return order.generate(*args, **options)
        except Lost as error:
            raise engine.EngineDead("lost") from error

    samples = rft.collect.AsyncSampler(order.engine()._replace(generate=generate), STRATEGY, calls=order)
    found, done = [], 0
    try:
        samples.engine.load(iter(weights_of(0)), version=0)
        for step in range(total):
            for later in due(step, ahead, total):
                samples.begin(*draw(later), n=2, sampling=SAMPLING)
            part = samples.generate(*draw(step), n=2, sampling=SAMPLING)
            if rounds:  # a second one, with the newest weights
                samples.generate([[7]], [step], n=1, sampling=SAMPLING)
            samples.engine.load(iter(weights_of(step + 1)), version=step + 1)
            found.append(part)
            done = step + 1
    except engine.EngineDead:
        pass
    kept = samples.save()
    samples.close()
    if done < total:
        again = sampler(lambda: Plain().record(), ahead=ahead)
        more, kept = train(again, done, total, ahead, saved=kept)
        again.close()
        found += more
    for step, rollout in enumerate(found):
        assert same(rollout, expected(step, version_of(step, ahead)))


def test_too_many_deaths_are_the_end(capsys):
    samples = sampler(lambda: Plain(range(1, 99), []).record(), ahead=1, rebuilds=2)
    with pytest.raises((Lost, engine.EngineDead), match="gone"):
        train(samples, 0, 4, 1)
    assert capsys.readouterr().err.count("building it again") <= 2
    samples.begin(*draw(9), n=2, sampling=SAMPLING)
    assert samples.save() == [] and not samples.engine.status()["alive"]
    with pytest.raises(engine.EngineDead, match="gone"):
        samples.generate(*draw(9), n=2, sampling=SAMPLING)
    samples.close()


def test_an_engine_that_takes_too_little_is_not_sampled_from():
    """Nobody waits for a load, so the next rollout has to say it."""

    class Forgetful(Plain):
        def load(self, weights, *, version):
            return super().load(weights, version=version)._replace(tensors=0)

    samples = sampler(lambda: Forgetful().record(), ahead=1)
    samples.engine.load(weights_of(1), version=1)
    with pytest.raises(engine.EngineDead, match=r"sync: expected the engine to take Delivered\(tensors=1"):
        samples.generate(*draw(0), n=2, sampling=SAMPLING)
    samples.close()


def test_an_engine_of_its_own_process_never_sleeps_and_has_half_of_the_threads():
    config, left = asynchronous.split_threads(EngineConfig(batch=7), 5)
    assert (config.process, config.sleep, config.threads, config.batch, left) == (True, False, 2, 7, 3)
    config, left = asynchronous.split_threads(EngineConfig(threads=4), 5)
    assert (config.threads, left) == (4, 1)
    config, left = asynchronous.split_threads(EngineConfig(), 1)
    assert config.threads == left == 1
    with pytest.raises(ValueError, match="ahead, engine_tp_size: expected one process"):
        asynchronous.split_threads(EngineConfig(tp_size=2), 4)


def test_what_a_run_no_longer_asks_for_leaves_its_checkpoints():
    """Another seed gives other keys."""
    old = [{"name": "0" * 16, "rollout": expected(3, 2)}]
    samples = sampler(lambda: Plain().record(), ahead=1)
    _, kept = train(samples, 0, 3, 1, saved=old, stop=1)
    samples.close()
    assert len(kept) == 1 and kept[0]["name"] != old[0]["name"]


def test_the_threads_of_a_rollout_never_gather():
    """Ranks meet in the thread that trains alone: two threads would meet them in different orders."""
    gathered = []

    def gather(x):
        gathered.append(threading.current_thread())
        return x

    samples = sampler(lambda: Plain().record(), ahead=2, strategy=STRATEGY._replace(gather=gather))
    train(samples, 0, 4, 2, evaluate={0})
    samples.close()
    assert len(gathered) == 5 and set(gathered) == {threading.main_thread()}
