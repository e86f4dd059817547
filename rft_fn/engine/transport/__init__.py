"""How weights travel to an engine that is elsewhere: in buckets, over a channel, by one function.

    send(weights, Folder("runs/weights"), version=7)    # a folder that a server loads by its path
    send(weights, Shared(connection), version=7)        # shared memory; CUDA IPC for tensors on a GPU
    send(weights, Broadcast(group), version=7)          # broadcast to all ranks of a group: NCCL, gloo

An engine in this process needs none of them: its `load` reads the tensors themselves. The other end of the
last two is `receive(channel, load)`, with the `load` of an engine there; of a folder, `read_folder`.
"""

from rft_fn.engine.transport.broadcast import Broadcast
from rft_fn.engine.transport.bucket import Bucket, Entry, buckets, tensors
from rft_fn.engine.transport.disk import Folder, read_folder
from rft_fn.engine.transport.send import Channel, Inbox, TransportError, receive, send
from rft_fn.engine.transport.shared import Shared

__all__ = [
    "Broadcast", "Bucket", "Channel", "Entry", "Folder", "Inbox", "Shared", "TransportError", "buckets",
    "read_folder", "receive", "send", "tensors",
]  # fmt: skip
