"""The weights of models on the device in some phases of a run, on the host in others."""

from rft_fn.model.placing import Residence, Where
from rft_fn.types import Apply, TrainState

__all__ = ["place", "require_device", "residence_of"]


def residence_of(apply: Apply) -> Residence:
    """Where the weights of a bound model are. ValueError for an apply that no strategy gave."""
    found = getattr(apply, "residence", None)
    if found is None:
        raise ValueError(f"apply: expected one that st.init or st.bind gave, got {type(apply).__name__}")
    return found


def place(apply: Apply, where: Where, /) -> None:
    """Move the weights of a bound model to the "device" or to the "host"; see `types.strategy.Place`."""
    residence_of(apply).move(where)


def require_device(state: TrainState) -> None:
    """ValueError for a state whose weights are on the host."""
    if state.residence is not None:
        state.residence.require_device("state")
