"""Weights by groups of the engines' own: SGLang's over gloo, and vLLM's with gloo in the place of NCCL."""

import os
import signal
import threading
import time

import pytest
import tiny
import torch
import transfer_ends
from each_case import each
from fake_server import FakeServer, serving
from torch import distributed as c10d
from transfer_ends import holds, left_out, load, samples

from rft_fn import engine
from rft_fn.engine import engine_groups, pool, weight_channel
from rft_fn.engine.engine_groups import NcclGroups, TorchGroups
from rft_fn.engine.server_protocol import Client, Fault, Refused
from rft_fn.engine.weight_sender import FINISH, START, UPDATE

MEETING, OPENING = "/init_weights_update_group", "/begin_weight_update"
SENDING, CLOSING = "/update_weights_from_distributed", "/end_weight_update"
PHASES = (MEETING, OPENING, SENDING, CLOSING)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several buckets, and pauses that a test can wait for."""
    monkeypatch.setattr(weight_channel, "BUCKET", 1 << 15)
    monkeypatch.setattr(pool, "ROUNDS", 3)
    monkeypatch.setattr(pool.Pool.__init__, "__kwdefaults__", {"pause": 0.02})


@pytest.fixture(scope="module")
def processes():
    with transfer_ends.processes() as begin:
        yield begin


def fake(**options):
    return FakeServer(tiny.llama(), tiny.tokenizer(), **({"transfer": "torch"} | options))


def made(*urls, kind="sglang", timeout=60.0, **options):
    options = {"transfer": "nccl"} | options
    config = engine.EngineConfig(type=kind, servers=urls, batch=4, timeout=timeout, **options)
    return engine.get_engine(config, tiny.llama(), tiny.tokenizer())


def phases(server, *wanted):
    return [path for path, _ in server.calls if path in wanted]


@each("sessions", [True, False])
def test_weights_arrive_by_sglangs_group(sessions, tmp_path):
    """Also where it knows no sessions. Nothing is sampled in between, and the group is left in the end."""
    with serving(fake(sessions=sessions)) as (server,):
        eng = made(server.url, weights=str(tmp_path))
        for version in (1, 2):
            load(eng, 4 + version, version)
            assert holds(server, 4 + version) and server.label.endswith(f":{version}")
            assert samples(eng, 4 + version)
        assert not list(tmp_path.iterdir())
        held = ["/pause_generation", OPENING, CLOSING, "/continue_generation"]
        assert phases(server, *held, MEETING) == [MEETING, *held * 2]
        bodies = [body for path, body in server.calls if path == SENDING]
        assert len(bodies) > 4 and [x["flush_cache"] for x in bodies].count(True) == 2
        versions = [body["new_version"] for path, body in server.calls if path == "/update_weight_version"]
        assert [x.endswith(" arriving") for x in versions] == [True, False] * 2
        eng.close()
        assert not server.groups and not server.session


def test_a_group_is_used_where_it_is_asked_for_alone(tmp_path):
    """It was not run on SGLang itself."""
    with serving(fake(), fake(transfer="")) as fakes:
        eng = made(*(f.url for f in fakes), transfer="auto", weights=str(tmp_path))
        load(eng, 5)
        assert all(holds(f, 5) and not phases(f, SENDING) for f in fakes)
        eng.close()
        with pytest.raises(ValueError, match=r"takes weights by nccl, got one that takes them by folder;"):
            made(fakes[1].url)


@each("path", PHASES)
def test_a_server_that_refuses_a_phase_is_left_out_until_it_has_whole_weights(path):
    with serving(fake(), fake()) as (well, bad):
        eng = made(well.url, bad.url)
        load(eng, 5, 1)
        if path == MEETING:
            eng.close()
            eng = made(well.url, bad.url)
        count = []

        def refuse():
            count.append(0)
            if path != SENDING or len(count) > 1:  # in the middle
                raise RuntimeError("no")

        bad.phase = path, refuse
        began = time.monotonic()
        load(eng, 6, 2)
        assert time.monotonic() - began < 10 and count
        assert holds(well, 6) and holds(bad, 6) == (path == CLOSING)
        assert bad.label.endswith(":1" if path == MEETING else " arriving")
        assert not bad.paused and samples(eng, 6)
        before = bad.samples
        assert samples(eng, 6) and bad.samples == before
        bad.phase = None
        load(eng, 7, 3)
        assert holds(well, 7) and holds(bad, 7) and samples(eng, 7) and not bad.session
        eng.close()


def test_a_phase_that_never_answers_ends_at_the_deadline():
    hanging = threading.Event()
    with serving(fake()) as (server,):
        groups = TorchGroups(Client(), 1.5)
        server.phase = SENDING, lambda: hanging.wait(20)
        began = time.monotonic()
        with pytest.raises((Fault, Refused), match=f"^{SENDING}: ") as found:
            groups.send(server.url, transfer_ends.parcel(6), "run:1")
        assert 1 < time.monotonic() - began < 6 and "\n" not in str(found.value)
        assert server.label == "run:1 arriving"
        server.phase = None
        hanging.set()
        groups.seconds = 60.0
        time.sleep(0.2)
        groups.send(server.url, transfer_ends.parcel(5), "run:2")
        assert holds(server, 5)
        groups.close()


def test_a_server_of_several_stages_is_refused(monkeypatch):
    with serving(fake()) as (server,), monkeypatch.context() as patch:
        call = Client.call

        def staged(self, url, path, *args, **options):
            answer = call(self, url, path, *args, **options)
            return answer | {"pp_size": 2} if path == "/server_info" else answer

        patch.setattr(Client, "call", staged)
        with pytest.raises(Fault, match=r"^pp_size: expected 1 for weights by a group, got 2$"):
            TorchGroups(Client(), 5.0).send(server.url, transfer_ends.parcel(6), "run:1")


@pytest.mark.slow
@each("path", PHASES)
def test_a_server_that_is_killed_in_a_phase_is_left_out(path, processes):
    pid, bad = processes("serve", path, "torch")
    with serving(fake()) as (well,):
        eng = made(well.url, bad)
        assert left_out(eng, pid, well)
        eng.close()


@pytest.mark.slow
@each("path", PHASES)
def test_a_trainer_that_is_killed_in_a_phase_leaves_a_server_that_the_next_one_mends(path, processes):
    """Nobody samples in between: it is paused, and its version is one that nobody takes."""
    with serving(fake()) as (server,):
        over, begun = threading.Event(), threading.Event()

        def kill():
            server.phase = None
            os.kill(pid, signal.SIGKILL)
            transfer_ends.gone(pid)
            over.set()

        server.phase = path, lambda: begun.wait(10) and kill()
        pid = int(processes("send", server.url, 5.0, "torch")[0])
        begun.set()
        assert over.wait(20)
        time.sleep(0.5)
        assert server.label == ("default" if path == MEETING else "other:1 arriving")
        assert bool(server.paused) == (path != MEETING)
        eng = made(server.url)
        load(eng, 5)
        assert holds(server, 5) and samples(eng, 5)
        eng.close()


# ------------------------------------------------------------------- vLLM's backend nccl


@pytest.fixture
def gloo(monkeypatch):
    """Functions of torch.cuda.nccl that do the same over gloo: a unique id is the address of a store."""
    stores, calls = [], []

    def unique_id():
        stores.append(c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return f"127.0.0.1:{stores[-1].port}".encode().ljust(128, b"\0")

    def init_rank(world, unique, rank):
        calls.append("init")
        return c10d.ProcessGroupGloo(stores[-1], rank, world, c10d.constants.default_pg_timeout)

    def all_reduce(inputs, comms):
        calls.append("all_reduce")
        comms[0].allreduce(inputs).wait()

    def broadcast(inputs, comms):
        calls.append("broadcast")
        comms[0].broadcast(inputs, c10d.BroadcastOptions()).wait()

    for f in (unique_id, init_rank, all_reduce, broadcast):
        monkeypatch.setattr(engine_groups.nccl, f.__name__, f)
    monkeypatch.setattr(engine_groups, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return calls


def test_weights_arrive_by_vllms_own_backend(gloo, tmp_path):
    """To a server without this package; after a failure in the middle by a new group."""
    with serving(fake(transfer="nccl", extension=False)) as (server,):
        eng = made(server.url, kind="openai")
        load(eng, 5, 1)
        assert holds(server, 5) and samples(eng, 5)
        assert gloo[:3] == ["init", "all_reduce", "broadcast"]  # its workers wait for the sum first
        load(eng, 6, 2)
        assert holds(server, 6) and samples(eng, 6) and gloo.count("init") == 1
        wanted = ("/pause?mode=wait", "/resume", START, FINISH)
        assert phases(server, *wanted) == ["/pause?mode=wait", START, FINISH, "/resume"] * 2
        count = []
        server.phase = UPDATE, lambda: count.append(0) or (len(count) == 2 and 1 / 0)
        with pytest.raises(pool.ServersFailed, match=f"{UPDATE}: "):
            load(eng, 7, 3)
        assert server.label.endswith(":3 arriving")
        server.phase = None
        eng = made(server.url, kind="openai")
        load(eng, 7, 4)
        assert holds(server, 7) and samples(eng, 7) and gloo.count("init") == 2
        eng.close()


def test_the_backend_needs_a_gpu_in_the_trainer(monkeypatch):
    with serving(fake(transfer="nccl")) as (server,):
        with pytest.raises(ValueError, match=r"^engine_transfer nccl: expected a GPU in the trainer"):
            made(server.url, kind="openai")
        assert not NcclGroups(Client(), 5.0).has(server.url)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torch_makes_a_communicator_by_a_unique_id_on_cuda():
    """With one rank: each further one needs a GPU of its own."""
    group = engine_groups._communicator(1, engine_groups.nccl.unique_id())
    tensors = [torch.arange(5, dtype=torch.bfloat16), torch.randn(3, 4)]
    NcclGroups(Client(), 5.0).move(group, tensors, time.monotonic() + 5)
