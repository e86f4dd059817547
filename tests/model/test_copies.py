"""Copies between the host and a device, with copies that a test can watch: there is no GPU here."""

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
