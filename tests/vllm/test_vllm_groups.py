"""Requests of weights by vLLM's own backend `nccl`, held against its records; NCCL itself needs a GPU."""

import base64

import torch
from inprocess import needs_vllm

from rft_fn.engine import engine_groups
from rft_fn.engine.engine_groups import NcclGroups
from rft_fn.engine.server_protocol import Client
from rft_fn.engine.weight_channel import Parcel

pytestmark = needs_vllm


def test_the_records_of_vllm_take_what_is_sent(monkeypatch):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Backend

    sent, broadcasts = [], []

    def call(self, server, path, body=None, **options):
        sent.append((path, body))
        return {"world_size": 2} if path == "/get_world_size" else {}

    unique = bytes(range(128))
    monkeypatch.setattr(Client, "call", call)
    monkeypatch.setattr(engine_groups, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(engine_groups.nccl, "unique_id", lambda: unique)
    monkeypatch.setattr(engine_groups.nccl, "init_rank", lambda *args: broadcasts.append(args) or "comm")
    monkeypatch.setattr(engine_groups.nccl, "all_reduce", lambda x, comms: broadcasts.append(x[0].shape))
    monkeypatch.setattr(engine_groups.nccl, "broadcast", lambda x, comms: broadcasts.append(x[0].shape))
    parcel = Parcel()
    parcel.add("model.norm.weight", torch.ones(8, dtype=torch.bfloat16))
    parcel.add("lm_head.weight", torch.ones(5, 8))
    parcel.finish({})
    NcclGroups(Client(), 5.0).send("http://server", parcel, "run:1")
    bodies = dict(sent)
    info = Backend.init_info_cls(**bodies["/init_weight_transfer_engine"]["init_info"])
    assert info.nccl_unique_id_bytes == unique and (info.rank_offset, info.world_size) == (1, 3)
    assert not info.packed  # a broadcast for each tensor, as they are sent here
    assert base64.b64encode(unique).decode() not in repr(info)
    updates = [Backend.update_info_cls(**x["update_info"]) for path, x in sent if path == "/update_weights"]
    names = [name for x in updates for name in x.names]
    assert names == [name for name, _ in parcel.tensors()]
    shapes = [torch.Size(shape) for x in updates for shape in x.shapes]
    assert broadcasts == [(3, unique, 0), torch.Size([1]), *shapes]
    kinds = [getattr(torch, kind) for x in updates for kind in x.dtype_names]
    assert kinds == [x.dtype for _, x in parcel.tensors()]
