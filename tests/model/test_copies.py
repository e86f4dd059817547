"""Copies between the host and a device, with copies that a test can watch: there is no GPU here."""

import contextlib

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import packing
from rft_fn.model import copies
from rft_fn.types.media import Media


def test_a_pack_goes_to_a_device_in_one_copy():
    """Every field has its numbers, type and shape, at a place that a kernel can read in vectors."""
    exp = tiny.experience()
    media = Media.of_prompts([{"pixels": torch.randn(5, 3)}, None])
    pack = rft.tree.replace(packing.pack(exp, [0, 1]), media=media)
    sent = []

    def copy(buffer):
        sent.append(buffer.clone())
        return sent[-1]

    moved = copies.in_one_copy(pack, copy)
    assert len(sent) == 1 and type(moved) is type(pack) and moved.num_seqs == pack.num_seqs
    assert len(rft.tree.leaves(moved)) == len(rft.tree.leaves(pack)) > 8
    for want, got in zip(rft.tree.leaves(pack), rft.tree.leaves(moved)):
        assert torch.equal(want, got) and got.dtype == want.dtype and got.shape == want.shape
        assert got.untyped_storage().data_ptr() == sent[0].data_ptr() and got.data_ptr() % 16 == 0


def test_what_is_on_the_device_stays_the_same_tensor():
    there = torch.empty(3, device="meta")
    moved = copies.in_one_copy({"a": torch.arange(3), "b": there, "c": torch.tensor(2.5)}, torch.clone)
    assert moved["b"] is there and moved["a"].tolist() == [0, 1, 2] and moved["c"].item() == 2.5
    assert copies.in_one_copy({"b": there}, None)["b"] is there
    assert copies.to_device({"a": torch.empty(0)}, torch.device("cpu"))["a"].shape == (0,)


# ---------- copies on a stream of their own, with streams that do nothing before somebody waits for them


class Stream:
    """A stream of a device that is this CPU: copies are made when the host, or another stream, waits."""

    def __init__(self, name, log):
        self.name, self.log, self.copies = name, log, []

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")
        other.run()

    def synchronize(self):
        self.log.append(f"the host waits for {self.name}")
        self.run()

    def run(self):
        for out, x in self.copies:
            out.detach().copy_(x)
        self.copies.clear()


class Device:
    def __init__(self, monkeypatch):
        self.log = []
        self.compute, self.side = Stream("compute", self.log), Stream("side", self.log)
        self.active = None
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.compute)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        plain = torch.Tensor.copy_

        def copy_(out, x, non_blocking=False):
            if not non_blocking:
                return plain(out, x)
            self.active.copies.append((out, x.detach()))
            return out

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: self.log.append(f"kept for {s.name}"))
        self.copies = copies.LockedCopies(torch.device("cpu"), self.side)
        self.mover = copies.Mover(self.copies.to_host, self.copies.to_device, self.copies.finish)

    @contextlib.contextmanager
    def on(self, stream):
        self.active = stream
        yield
        self.active = None


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_what_goes_to_the_host_is_there_when_the_move_is_finished(device):
    """Each copy begins after what made its source, whose memory is kept for it; the host waits once."""
    xs = [torch.randn(3, 5), torch.arange(7), torch.tensor(2.5), torch.randn(4, dtype=torch.bfloat16)]
    there = [device.copies.to_host(x) for x in xs]
    assert device.log == ["side waits for compute", "kept for side"] * len(xs)
    assert not any(torch.equal(a, b) for a, b in zip(there[:2], xs[:2]))
    device.log.clear()
    device.copies.finish()
    assert device.log == ["compute waits for side", "the host waits for side"]
    for a, b in zip(there, xs):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape and a.data_ptr() % 16 == 0


def test_the_host_does_not_wait_for_what_comes_to_the_device(device):
    x = torch.randn(5)
    got = device.copies.to_device(x)
    device.copies.finish()
    assert torch.equal(got, x) and "the host waits for side" not in device.log
    assert device.log[-1] == "compute waits for side"


def test_host_memory_is_of_one_move_and_of_no_other(device, monkeypatch):
    """Pieces of powers of two, each twice as large; one that is larger than the last has its own."""
    made = []
    locked = copies.locked
    monkeypatch.setattr(copies, "locked", lambda size: made.append(size) or locked(size))
    monkeypatch.setattr(copies, "_FIRST", 64)
    monkeypatch.setattr(copies, "_LAST", 256)
    device.copies.finish()
    xs = [torch.full((n,), n % 100, dtype=torch.uint8) for n in (10, 60, 100, 200, 300, 5, 70)]
    first = [device.copies.to_host(x) for x in xs]
    device.copies.finish()
    assert made == [64, 128, 256, 256, 300, 256]
    second = [device.copies.to_host(x + 1) for x in xs]
    device.copies.finish()
    assert all(torch.equal(a, x) and torch.equal(b, x + 1) for a, b, x in zip(first, second, xs))
    pointers = [x.data_ptr() for x in first + second]
    assert len(set(pointers)) == len(pointers)


def test_a_model_and_its_optimizer_leave_and_come_back_on_a_stream(device):
    """Tensors that are no plain memory go in the usual way; a move that fails leaves no copy under way."""
    st = rft.strategy.get_fake_strategy()
    apply, state = st.init(tiny.llama(), rft.optim.adamw(1e-2))
    before = [x.clone() for x in rft.tree.leaves(state.params)]
    residence = state.residence
    residence.mover = device.mover
    residence.opt = [x for x in rft.tree.leaves(state.opt) if isinstance(x, torch.Tensor)]
    for where in ("host", "device"):
        residence.move(where)
        residence.move_opt(where)
        assert not device.side.copies
        assert all(torch.equal(a, b) for a, b in zip(before, rft.tree.leaves(state.params)))
    left = [3]

    def full(x):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("full")
        return device.copies.to_host(x)

    residence.mover = device.mover._replace(to_host=full)
    with pytest.raises(MemoryError):
        residence.move("host")
    assert not device.side.copies
    odd = torch.randn(4, 6).t()
    assert torch.equal(device.copies.to_host(odd), odd) and not device.side.copies
    assert apply is not None
