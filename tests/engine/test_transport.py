"""Weights arrive at the other end of every channel bit by bit, and what goes wrong is known at both.

RFT_FN_TRANSPORT=cuda runs the channels between processes on GPUs: NCCL (two of them) and CUDA IPC.
"""

import json
import os

import pytest
import ranks
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import engine
from rft_fn.engine import transport
from rft_fn.engine.transport.send import Receipt
from rft_fn.types.engine import Delivered

DEVICE = os.environ.get("RFT_FN_TRANSPORT", "cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]


def weights(seed=0, count=9):
    """Tensors of several types and shapes, some empty, some not contiguous."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        shape = torch.randint(0, 6, (int(torch.randint(0, 4, (), generator=g)),), generator=g).tolist()
        x = torch.randn(shape, generator=g) * 3
        dtype = TYPES[int(torch.randint(len(TYPES), (), generator=g))]
        x = x.to(dtype)
        if x.dim() == 2 and i % 2:
            x = x.T
        found.append((f"layer.{i}", x))
    return found


def equal(got, want):
    got, want = dict(got), dict(want)
    assert list(got) == list(want)
    for name, x in want.items():
        assert got[name].dtype == x.dtype and torch.equal(got[name].cpu(), x), name


def size(pairs):
    return sum(x.numel() * x.element_size() for _, x in pairs)


@given(seed=st.integers(0, 10**6), most=st.integers(1, 400))
def test_buckets_hold_every_tensor_bit_by_bit(seed, most):
    found = list(transport.buckets(weights(seed), most))
    equal([pair for bucket in found for pair in transport.tensors(bucket)], weights(seed))
    assert all(bucket.flat.numel() <= most or len(bucket.entries) == 1 for bucket in found)


def test_a_bucket_is_filled_before_another_is_begun():
    pairs = [(f"x{i}", torch.zeros(4)) for i in range(10)]
    assert [len(b.entries) for b in transport.buckets(pairs, 64)] == [4, 4, 2]


# ---------- disk


def test_a_folder_is_whole_and_the_last_one_is_found(tmp_path):
    channel = transport.Folder(tmp_path)
    for version in (1, 2, 2, 3):
        delivered = transport.send(weights(version), channel, version=version, bucket_bytes=100)
        assert delivered[:2] == (9, size(weights(version))) and delivered.version == version
        equal(sorted(transport.read_folder(tmp_path / "latest")), weights(version))
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("version_")]) == 2  # the last two
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    names = json.loads((tmp_path / "latest" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(names) == dict(weights(3)).keys() and len(set(names.values())) > 1


def test_weights_that_break_off_leave_the_last_folder(tmp_path):
    channel = transport.Folder(tmp_path)
    transport.send(weights(1), channel, version=1)

    def dies():
        yield from weights(2)[:5]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        transport.send(dies(), channel, version=2, bucket_bytes=50)
    equal(transport.read_folder(tmp_path / "latest"), weights(1))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_server_that_took_less_is_refused(tmp_path):
    told = []

    def tell(path):
        told.append(path.name)
        return Receipt(8, size(weights()))

    with pytest.raises(transport.TransportError, match=r"to take 9 tensors .* got 8"):
        transport.send(weights(), transport.Folder(tmp_path, tell), version=4)
    assert told[0].startswith("version_00000004_")


def test_an_engine_loads_a_folder_of_a_model(tmp_path):
    transport.send(tiny.llama(5).named_parameters(), transport.Folder(tmp_path), version=1, bucket_bytes=5000)
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    delivered = eng.load(transport.read_folder(tmp_path / "latest"), version=1)
    assert delivered.tensors == len(list(tiny.llama().parameters()))


# ---------- between processes


class Taking:
    """The load of an engine that keeps copies, and fails at the tensor number `fails`."""

    def __init__(self, fails=-1):
        self.fails = fails
        self.found = []

    def __call__(self, arriving, *, version):
        self.found = []
        for i, (name, x) in enumerate(arriving):
            if i == self.fails:
                raise ValueError(f"weights: {name}: refused")
            self.found.append((name, x.detach().cpu().clone()))
        return Delivered(len(self.found), size(self.found), 0.0, version)


def dying(pairs):
    yield from pairs[:6]
    raise ConnectionError("gone")


def on_device(pairs):
    return [(name, x.to(DEVICE)) for name, x in pairs]


def try_sender(channel):
    """A shipment that arrives, one that its receiver refuses, one that breaks off, and one that arrives."""
    told = [transport.send(on_device(weights(1)), channel, version=1, bucket_bytes=100)[:2]]
    for source in (on_device(weights(2)), dying(on_device(weights(3)))):
        try:
            transport.send(source, channel, version=2, bucket_bytes=100)
        except (transport.TransportError, ConnectionError) as error:
            told.append(str(error))
    told.append(transport.send(on_device(weights(4)), channel, version=4, bucket_bytes=100)[:2])
    return told


def try_receiver(inbox):
    told = []
    for fails in (-1, 5, -1, -1):
        load = Taking(fails)
        try:
            version = transport.receive(inbox, load).version
            told.append((version, load.found))
        except (transport.TransportError, ValueError) as error:
            told.append(str(error))
    return told


def both(rank, _):
    from torch import distributed as dist

    device = torch.device(DEVICE)
    if DEVICE == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[DEVICE])
    channel = transport.Broadcast(device=device)
    if rank == 0:
        return try_sender(channel)
    return try_receiver(channel)


def check(sent, received):
    assert sent[0] == (9, size(weights(1))) and sent[3] == (9, size(weights(4)))
    assert sent[1:3] == [
        "weights: expected the receiver to take them, got ValueError: weights: layer.5: refused",
        "gone",
    ]
    assert received[0][0] == 1 and received[3][0] == 4
    equal(received[0][1], weights(1))
    equal(received[3][1], weights(4))
    assert received[1] == "weights: layer.5: refused"
    assert received[2] == "weights: the sender broke off: ConnectionError: gone"


def test_a_broadcast_reaches_every_rank():
    sent, *received = ranks.run(3, "test_transport:both", None)
    for each in received:
        check(sent, each)


def receiving(connection):
    connection.send(try_receiver(transport.Shared(connection)))
    connection.recv()  # until the parent has read the tensors


def test_another_process_reads_the_senders_memory():
    context = torch.multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=receiving, args=(theirs,), daemon=True)
    process.start()
    sent = try_sender(transport.Shared(mine))
    received = mine.recv()
    check(sent, received)
    mine.send("done")
    process.join(60)
    assert process.exitcode == 0
