"""Models that are on the device only in the phases that use them, with offload_models."""

from collections.abc import Iterator
from contextlib import contextmanager

from rft_fn import tree
from rft_fn.types import Apply, Strategy, TrainState

__all__ = ["placed", "to_device", "to_host", "with_weights"]


@contextmanager
def placed(st: Strategy, *applies: Apply) -> Iterator[None]:
    """Have models that are not trained on the device inside the block, and on the host outside of it.

    Without offload_models they stay where they are.
    """
    if not st.config.offload_models:
        yield
        return
    try:
        for apply in applies:
            st.place(apply, "device")
        yield
    finally:
        for apply in applies:
            st.place(apply, "host")


def to_host(st: Strategy, apply: Apply, state: TrainState) -> TrainState:
    """The state with the weights and the optimizer of its model on the host. Donates `state`.

    Until `to_device` it is neither used nor updated; the `Push` of a run exports it all the same. Without
    offload_models it is returned as it is.
    """
    if not st.config.offload_models:
        return state
    st.place(apply, "host")
    return st.offload(state)


def to_device(st: Strategy, apply: Apply, state: TrainState) -> TrainState:
    """The state with the weights and the optimizer of its model where they work.

    With adam_offload or fsdp_cpu_offload the optimizer works on the host. `state` is not donated: until the
    next update it can still be saved.
    """
    if not st.config.offload_models:
        return state
    st.place(apply, "device")
    if st.config.adam_offload or st.config.fsdp_cpu_offload:
        return state
    return st.reload(tree.map(lambda x: x, state))


@contextmanager
def with_weights(state: TrainState) -> Iterator[None]:
    """Have the weights of a state on the device inside the block, and afterwards where they were before."""
    residence = state.residence
    if residence is None or not residence.on_host:
        yield
        return
    residence.move("device")
    try:
        yield
    finally:
        residence.move("host")
