"""Weights by a channel: what arrives, and that whatever fails leaves old weights that sample."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import tiny
import torch
import transfer_ends
from each_case import each
from fake_server import FakeServer, serving
from transfer_ends import holds, left_out, load, samples

from rft_fn import engine
from rft_fn.engine import pool, weight_channel, weight_delivery, weight_delta
from rft_fn.engine.server_protocol import Client, Fault
from rft_fn.engine.weight_channel import Parcel, entries_of
from rft_fn.engine.weight_delta import Kept
from rft_fn.engine.weight_sender import FINISH, INIT, START, UPDATE, Senders

PHASES = (INIT, START, UPDATE, FINISH)
RESET = "/reset_prefix_cache?reset_running_requests=true"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several buckets, and pauses that a test can wait for."""
    monkeypatch.setattr(weight_channel, "BUCKET", 4096)
    monkeypatch.setattr(pool, "ROUNDS", 3)
    monkeypatch.setattr(pool.Pool.__init__, "__kwdefaults__", {"pause": 0.02})


def fake(**options):
    return FakeServer(tiny.llama(), tiny.tokenizer(), **({"transfer": "rft"} | options))


def made(*urls, timeout=60.0, **options):
    config = engine.EngineConfig(type="openai", servers=urls, batch=4, timeout=timeout, **options)
    return engine.get_engine(config, tiny.llama(), tiny.tokenizer())


def target(link):
    """What a descriptor is of, or None for one that is closed by now."""
    try:
        return link.readlink()
    except OSError:
        return None


def denied(*_):
    raise PermissionError


def paths(server):
    return [path for path, _ in server.calls]


def test_tensors_of_all_types_and_sizes_come_out_of_buckets_as_they_went_in():
    sent = {
        "a": torch.randn(7, 3).to(torch.bfloat16),
        "b": torch.randn(5000),  # more than a bucket
        "c": torch.tensor(3),
        "d": torch.randn(4, 5)[:, 1:3],
        "e": torch.arange(3, dtype=torch.uint8),
        "f": torch.empty(0, 4),
        "g": torch.randn(900).double(),
    }
    parcel = Parcel()
    for name, x in sent.items():
        parcel.add(name, x)
    parcel.finish({})
    assert len(parcel.buckets) > 2
    got = dict(parcel.tensors())
    assert list(got) == list(sent)
    for name, x in sent.items():
        assert got[name].dtype == x.dtype and torch.equal(got[name], x), name
    for bucket in parcel.buckets:
        assert entries_of(bucket.described()) == bucket.entries
        assert len(bucket.data) == weight_channel.total_bytes(bucket.entries)
    for wrong in (
        ["x", "float33", [1]],
        ["x", "Tensor", [1]],
        ["x", "float32", [-1]],
        ["x", "float32", ["1"]],
    ):
        with pytest.raises(ValueError, match=r"^weights: x: expected a type and a shape, got "):
            entries_of([wrong])


def test_parts_have_whole_layers_and_share_the_memory():
    whole = transfer_ends.parcel(5)
    whole.tied = {"lm_head.weight": "model.embed_tokens.weight"}
    sent = dict(whole.tensors())
    for count in (1, 2, 3, 8, 100):
        parts = whole.parts(count)
        assert len(parts) <= count and (len(parts) > 1) == (count > 1)
        got = [dict(part.tensors()) for part in parts]
        assert sum(map(len, got)) == len(sent) and sum(part.total for part in parts) <= whole.total
        for part, found in zip(parts, got, strict=True):
            assert part.manifest() == {name: whole.manifest()[name] for name in found}
            assert part.tied == (whole.tied if "model.embed_tokens.weight" in found else {})
            assert all(x.data_ptr() == sent[name].data_ptr() for name, x in found.items())
            assert all(torch.equal(x, sent[name]) for name, x in found.items())
        for layer in ("model.layers.0.", "model.layers.1.", "model.embed_tokens."):
            assert sum(any(name.startswith(layer) for name in found) for found in got) == 1
    assert max(part.total for part in whole.parts(2)) < 0.8 * whole.total
    assert [part.total for part in whole.parts(100)] == [part.total for part in whole.parts(200)]


def test_workers_of_a_machine_stage_one_copy():
    """Three workers load the same memory, which is gone afterwards."""
    with serving(fake(world=3)) as (server,):
        eng = made(server.url, transfer="rft")
        for version in (1, 2):
            load(eng, version, version)
            assert holds(server, version) and samples(eng, version)
            assert len(server.seen) == 3 and server.seen[0] == server.seen[1] == server.seen[2]
            assert all(place is not None for place, x in server.seen[0].values() if x)
            assert "memfd:rft" not in Path("/proc/self/maps").read_text()
            assert not [x for x in Path("/proc/self/fd").iterdir() if "memfd:rft" in str(target(x))]
        eng.close()


def test_workers_that_see_nothing_of_each_other_stage_their_own(monkeypatch):
    from rft_fn.engine import weight_stage

    # on two machines; and where the descriptors of the first one cannot be opened
    for name, value in (("_machine", lambda: f"{threading.get_ident()}"), ("open", denied)):
        monkeypatch.setattr(weight_stage, name, value, raising=False)
        with serving(fake(world=2)) as (server,):
            eng = made(server.url, transfer="rft")
            load(eng, 5)
            places = [{place for place, _ in worker.values()} for worker in server.seen]
            assert holds(server, 5) and samples(eng, 5) and {None} in places
            assert [x for _, x in server.seen[0].values()] == [x for _, x in server.seen[1].values()]
            eng.close()
        monkeypatch.undo()


@each("transfer", ["auto", "rft"])
def test_weights_arrive_by_channels_and_no_folder_is_written(transfer, tmp_path):
    with serving(fake(), fake(extension=False)) as fakes:
        eng = made(*(f.url for f in fakes), transfer=transfer, weights=str(tmp_path))
        assert "load" in eng.status()["supported"]
        for version in (1, 2):
            delivered = load(eng, version, version)
            assert delivered.tensors == len(list(tiny.llama().parameters()))
            assert all(holds(f, version) and f.label.endswith(f":{version}") for f in fakes)
            assert samples(eng, version)
        assert not list(tmp_path.iterdir())
        for f in fakes:
            # the channel is kept from load to load; the cache is emptied before the version is true
            assert [x for x in paths(f) if x == INIT].__len__() <= 2 and paths(f).count(UPDATE) > 4
            of_load = [x for x in paths(f) if x in (FINISH, RESET, "/update_weight_version")]
            assert of_load == [FINISH, RESET, "/update_weight_version"] * 2
        eng.close()


def test_each_server_is_asked_what_it_has_and_gets_weights_that_way(tmp_path):
    """An older vLLM has the folder alone, one with another backend too."""
    with serving(fake(), fake(transfer=""), fake(transfer="nccl")) as fakes:
        eng = made(*(f.url for f in fakes), weights=str(tmp_path))
        load(eng, 5)
        assert all(holds(f, 5) for f in fakes) and samples(eng, 5)
        assert [UPDATE in paths(f) for f in fakes] == [True, False, False]
        assert len(list(tmp_path.iterdir())) == 1
        eng.close()


@each(
    ("transfer", "options", "ways"),
    [("rft", {"transfer": ""}, "folder"), ("folder", {"extension": False}, "rft")],
)
def test_a_way_that_a_server_lacks_is_refused_at_the_start(transfer, options, ways):
    line = rf"engine_transfer: expected a server that takes weights by {transfer}, got one that .* by {ways};"
    with serving(fake(**options)) as fakes, pytest.raises(ValueError, match=line):
        made(fakes[0].url, transfer=transfer)


def test_a_tied_weight_is_sent_by_all_its_names():
    with serving(fake()) as (server,):
        server.lm = tiny.llama(tie_word_embeddings=False)
        eng = made(server.url, transfer="rft")
        load(eng, 5)
        assert samples(eng, 5)
        eng.close()


def test_a_server_that_comes_back_empty_is_sent_the_weights():
    with serving(fake()) as (server,):
        eng = made(server.url, transfer="rft")
        load(eng, 5)
        server.end()
        server.lm, server.label, server.receivers, server.updating = tiny.llama(), "default", [], False
        server.begin()
        assert samples(eng, 5) and holds(server, 5)
        eng.close()


def test_requests_of_others_wait_while_the_model_is_reloaded():
    """They are held back around the last phase alone; a trainer that is gone leaves no server paused."""
    with serving(fake()) as (server,):
        eng = made(server.url, transfer="rft")
        found, other = [], Client()

        def ask():
            body = {"token_ids": [3], "model": "tiny", "sampling_params": {"max_tokens": 1}}
            answer = other.call(server.url, "/inference/v1/generate", body, seconds=30)
            found.append(answer["choices"][0]["weight_versions"][0]["version"])

        asking = threading.Thread(target=ask)
        server.phase = FINISH, lambda: asking.start() or time.sleep(0.1) or found.append("waits")
        load(eng, 5)
        asking.join()
        assert found[0] == "waits" and len(found) == 2 and found[1] != "default"
        calls = paths(server)
        assert [calls[calls.index(FINISH) + i] for i in (-1, 0)] == ["/pause?mode=wait", FINISH]
        assert calls.count("/pause?mode=wait") == calls.count("/resume") == 1
        server.paused = "wait"
        made(server.url, transfer="rft").close()
        assert not server.paused
        eng.close()


# ------------------------------------------------------------------- faults: old weights, and usable


def wrong(parcel, fault):
    """Send otherwise than the manifest says."""
    if fault == "missing":
        parcel.buckets[1].entries.pop()
        bucket = parcel.buckets[1]
        parcel.buckets[1] = bucket._replace(data=bucket.data[: weight_channel.total_bytes(bucket.entries)])
    if fault == "twice":
        parcel.buckets.insert(1, parcel.buckets[0])


@each(
    ("fault", "line"),
    [
        (
            "missing",
            r"status 500: .*weights: model\.\S+: expected float32 \[.*\], got none \(1 of 20 tensors",
        ),
        ("unknown", r"status 500: .*weights: model\.\S+: expected none, got float32 .*\(1 of 19 tensors"),
        ("twice", r"status 500: .*weights: model\.\S+: expected it once, got it twice"),
        ("type", r"status 500: .*weights: model\.\S+: expected bfloat16 \[.*\], got float32 "),
    ],
)
def test_what_differs_from_the_manifest_is_refused_by_name(fault, line, monkeypatch):
    parcel = transfer_ends.parcel(6)
    manifest = parcel.manifest()
    name = sorted(manifest)[3]
    if fault == "unknown":
        manifest.pop(name)
    if fault == "type":
        manifest[name] = ["bfloat16", manifest[name][1]]
    wrong(parcel, fault)
    with serving(fake()) as (server,):
        senders = Senders(Client(), 60.0)
        with monkeypatch.context() as patch, pytest.raises(Fault, match=line) as found:
            patch.setattr(Parcel, "manifest", lambda self: manifest)
            senders.send(server.url, parcel, "run:1")
        assert "\n" not in str(found.value)
        assert holds(server, 0) and server.label == "default" and not server.updating
        senders.send(server.url, transfer_ends.parcel(5), "run:2")
        assert holds(server, 5)


@pytest.mark.slow
@each("path", PHASES)
def test_a_phase_that_never_answers_ends_at_the_deadline(path):
    hanging = threading.Event()
    with serving(fake()) as (server,):
        server.phase = path, lambda: hanging.wait(20)
        senders = Senders(Client(), 3.0)
        began = time.monotonic()
        with pytest.raises(Fault, match=f"^{path}: no answer within") as found:
            senders.send(server.url, transfer_ends.parcel(6), "run:1")
        assert 2 < time.monotonic() - began < 5 and "\n" not in str(found.value)
        assert holds(server, 0)
        server.phase = None
        hanging.set()
        time.sleep(0.2)  # the fake has threads; vLLM has one, which is through with one phase before the next
        senders.seconds = 60.0
        senders.send(server.url, transfer_ends.parcel(5), "run:2")
        assert holds(server, 5)


def test_a_stage_that_does_not_fit_is_refused_and_the_folder_taken(monkeypatch, capsys, tmp_path):
    from rft_fn.engine import weight_receiver

    monkeypatch.setattr(weight_receiver, "host_free", lambda: 1 << 20 >> 10)
    line = r"expected 0.00 GiB of free host memory for the stage, got 0.00"
    with serving(fake()) as (server,):
        eng = made(server.url, weights=str(tmp_path))
        for version in (1, 2):
            load(eng, 4 + version, version)
            assert holds(server, 4 + version) and samples(eng, 4 + version)
            assert [x.name[-2:] for x in tmp_path.iterdir()] == [f"-{version}"]
        err = capsys.readouterr().err
        assert err.count("it gets weights by a folder from now on") == 1 and "free host memory" in err
        eng.close()
        eng = made(server.url, transfer="rft")
        with pytest.raises(pool.ServersFailed, match=line):
            load(eng, 7)
        assert holds(server, 6)


def test_weights_come_in_parts_where_all_of_them_do_not_fit(monkeypatch, capsys):
    """Nobody samples between the parts, and the next load begins with as many."""
    from rft_fn.engine import weight_receiver

    parts = transfer_ends.parcel(5).parts(2)
    monkeypatch.setattr(weight_receiver, "host_free", lambda: max(part.total for part in parts))
    with serving(fake(world=2)) as (server,):
        eng = made(server.url, transfer="rft")
        seen = []
        server.phase = FINISH, lambda: seen.append((server.paused, server.label))
        for version in (1, 2):
            load(eng, 4 + version, version)
            assert holds(server, 4 + version) and samples(eng, 4 + version) and not server.paused
            (paused, old), (still, between) = seen
            assert paused == still == "wait" and "arriving" not in old
            assert between.endswith(f":{version} arriving")
            seen.clear()
        assert paths(server).count("/pause?mode=wait") == paths(server).count("/resume") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"note: {server.url}: expected 0.00 GiB of free host memory for the stage, ")
        assert line.endswith("; weights come to it in 2 parts")
        eng.close()


@each("path", [START, UPDATE, FINISH])
def test_after_a_part_that_does_not_arrive_nobody_samples(path):
    with serving(fake()) as (server,):
        senders = Senders(Client(), 60.0)
        senders.parts[server.url] = 2

        def strikes():
            assert paths(server).count(FINISH) < (2 if path == FINISH else 1), "in the second part"

        server.phase = path, strikes
        with pytest.raises(Fault, match=f"^{path}: "):
            senders.send(server.url, transfer_ends.parcel(6), "run:1")
        assert server.label == "run:1 failed" and not server.paused and not holds(server, 6)
        server.phase = None
        senders.send(server.url, transfer_ends.parcel(5), "run:2")
        assert holds(server, 5) and server.label == "run:2 arrived"


@pytest.mark.slow
@each("path", [START, UPDATE, FINISH])
def test_a_trainer_that_is_killed_between_parts_leaves_a_paused_server(path):
    with serving(fake()) as (server,), transfer_ends.processes() as begin:
        (pid,) = begin("send", server.url, 60, "rft", 2)

        def kills():
            if paths(server).count(FINISH) >= (2 if path == FINISH else 1):
                server.phase = None
                os.kill(int(pid), signal.SIGKILL)

        server.phase = path, kills
        transfer_ends.gone(pid)
        time.sleep(0.5)  # for what is under way
        assert server.paused and server.label == f"other:1 {'arrived' if path == FINISH else 'arriving'}"
        eng = made(server.url, transfer="rft")
        assert not server.paused
        load(eng, 5)
        assert holds(server, 5) and samples(eng, 5)
        eng.close()


def test_a_second_trainer_is_refused_while_the_first_one_sends():
    with serving(fake()) as (server,):
        first, second = Senders(Client(), 60.0), Senders(Client(), 60.0)
        found = []

        def meanwhile():
            server.phase = None
            with pytest.raises(
                Fault, match=f"one trainer at a time, got {second.run} while {first.run}"
            ) as e:
                second.send(server.url, transfer_ends.parcel(6), "second:1")
            found.append(str(e.value))

        server.phase = FINISH, meanwhile
        first.send(server.url, transfer_ends.parcel(5), "first:1")
        assert found and holds(server, 5)
        second.send(server.url, transfer_ends.parcel(6), "second:2")  # between two loads it may
        assert holds(server, 6)
        found = []

        def later():
            server.phase = None
            with pytest.raises(
                Fault, match=f"one trainer at a time, got {first.run} while {second.run}"
            ) as e:
                first.send(server.url, transfer_ends.parcel(5), "first:2")  # by a channel that was its own
            found.append(str(e.value))

        server.phase = FINISH, later
        second.send(server.url, transfer_ends.parcel(7), "second:3")
        assert found and holds(server, 7)
        first.send(server.url, transfer_ends.parcel(5), "first:3")
        with pytest.raises(Fault, match=f"expected weights of {first.run}, got those of {second.run}"):
            second.send(server.url, transfer_ends.parcel(6), "second:4")
        second.send(server.url, transfer_ends.parcel(6), "second:5")  # by a new channel
        assert holds(server, 6)


def test_no_key_is_told_to_a_worker(monkeypatch):
    monkeypatch.setenv("RFT_SERVER_KEY", "sk-4711-of-many-characters")
    with serving(fake(key="sk-4711-of-many-characters")) as (server,):
        eng = made(server.url, transfer="rft")
        load(eng, 5)
        assert INIT in paths(server) and not any("4711" in str(body) for _, body in server.calls)
        eng.close()


# ------------------------------------------------------------------- differences of folders


def stepped(model, g, share=0.02):
    """Weights of 16 bits after a step that moves some of them by one unit in the last place."""
    with torch.no_grad():
        for p in model.parameters():
            moved = torch.rand(p.shape, generator=g) < share
            up = torch.rand(p.shape, generator=g) < 0.5
            bits = p.view(torch.int16)
            bits += moved * (2 * up.short() - 1)


def test_a_difference_gives_the_same_bits_and_is_small():
    g = torch.Generator().manual_seed(0)
    old = torch.randn(400, 500, generator=g).bfloat16()
    lm = torch.nn.ParameterList([old.clone()])
    stepped(lm, g)
    (new,) = lm
    part = weight_delta.difference(new.data, old)
    assert part.nbytes < 0.05 * old.nbytes
    weight_delta.renew(old, part)
    assert torch.equal(old.view(torch.int16), new.view(torch.int16))
    for x, y in (
        (torch.tensor(1.0).half(), torch.tensor(-0.0).half()),
        (torch.empty(0, 3).half(), torch.empty(0, 3).half()),
        (torch.full((9,), torch.nan).bfloat16(), torch.full((9,), torch.nan).bfloat16()),
        (
            torch.arange(300).to(torch.uint8),
            torch.arange(300).to(torch.uint8).index_fill(0, torch.tensor([299]), 9),
        ),
    ):
        part = weight_delta.difference(y, x)
        if part is None:  # every element of one is more than a quarter
            assert x.numel() == 1
            continue
        weight_delta.renew(x, part)
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert weight_delta.difference(torch.randn(64), torch.randn(64)) is None


def test_folders_are_differences_until_one_is_whole_again(tmp_path, monkeypatch):
    """A server that has missed one, or lost it, gets a whole one; an older worker always does."""
    monkeypatch.setattr(weight_delivery, "WHOLE", 3)
    lm, g = tiny.llama(5).bfloat16(), torch.Generator().manual_seed(0)
    with serving(fake(transfer="", kept=Kept()), fake(transfer="", kept=Kept()), fake(transfer="")) as fakes:
        _, second, _ = fakes
        eng = made(*(f.url for f in fakes), weights=str(tmp_path))
        for version in range(6):
            if version == 2:
                second.kept.version = "another"
            eng.load(lm.named_parameters(), version=version)
            for f in fakes:
                own = dict(f.lm.named_parameters())
                assert all(torch.equal(own[name], x.float()) for name, x in lm.named_parameters())
                assert f.label.endswith(f":{version}")
            stepped(lm, g)
        kinds = [["difference" in x.name for x in f.folders] for f in fakes]
        assert kinds[0] == [False, True, True, False, True, True]
        assert kinds[1] == [
            False,
            True,
            True,
            False,
            False,
            True,
            True,
        ]  # the third was refused, and given again
        assert kinds[2] == [False] * 6
        eng.close()
        assert not list(tmp_path.iterdir())


def test_a_difference_that_gives_other_weights_is_refused_before_the_model_is_touched(tmp_path):
    lm, g = tiny.llama(5).bfloat16(), torch.Generator().manual_seed(0)
    with serving(fake(transfer="", kept=Kept())) as (server,):
        eng = made(server.url, weights=str(tmp_path))
        eng.load(lm.named_parameters(), version=0)
        next(iter(server.kept.tensors.values())).view(torch.int16)[0] += 1  # a bit has changed in its memory
        stepped(lm, g)
        taken = []
        take = server.take
        server.take = lambda weights: taken.append(0) or take(weights)
        eng.load(lm.named_parameters(), version=1)
        assert ["difference" in x.name for x in server.folders] == [False, True, False] and len(taken) == 1
        own = dict(server.lm.named_parameters())
        assert all(torch.equal(own[name], x.float()) for name, x in lm.named_parameters())
        eng.close()


def test_weights_are_kept_where_those_of_all_workers_have_room(tmp_path, monkeypatch):
    lm, g = tiny.llama(5).bfloat16(), torch.Generator().manual_seed(0)
    size = sum(p.nbytes for p in lm.parameters())
    monkeypatch.setattr(weight_delta, "host_free", lambda: 3 * size)
    with serving(fake(transfer="", kept=Kept(2)), fake(transfer="", kept=Kept(4))) as fakes:
        eng = made(*(f.url for f in fakes), weights=str(tmp_path))
        for version in range(2):
            eng.load(lm.named_parameters(), version=version)
            stepped(lm, g)
        assert [[x.name[-1] for x in f.folders] for f in fakes] == [["0", "e"], ["0", "e", "1"]]
        assert fakes[0].kept.tensors and not fakes[1].kept.tensors
        eng.close()


# ------------------------------------------------------------------- kill -9


@pytest.fixture(scope="module")
def processes():
    with transfer_ends.processes() as begin:
        yield begin


@pytest.mark.slow
@each("path", PHASES)
def test_a_server_that_is_killed_in_a_phase_is_left_out(path, processes):
    pid, bad = processes("serve", path)
    with serving(fake()) as (well,):
        eng = made(well.url, bad, transfer="rft")
        assert left_out(eng, pid, well)
        eng.close()


@pytest.mark.slow
@each("path", PHASES)
def test_a_trainer_that_is_killed_in_a_phase_leaves_a_server_that_serves(path, processes):
    with serving(fake()) as (server,):
        over = threading.Event()

        def kill():
            server.phase = None
            os.kill(pid, signal.SIGKILL)
            transfer_ends.gone(pid)
            over.set()

        begun = threading.Event()
        server.phase = path, lambda: begun.wait(10) and kill()
        pid = int(processes("send", server.url, 5.0)[0])
        begun.set()
        assert over.wait(20)
        end = time.monotonic() + 5
        while server.answering:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert holds(server, 6 if path == FINISH else 0)  # all had arrived before the last phase
        assert server.label == ("other:1 arrived" if path == FINISH else "default")
        eng = made(server.url, transfer="rft")
        load(eng, 5)
        assert samples(eng, 5)
        eng.close()
