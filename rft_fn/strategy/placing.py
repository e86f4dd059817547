"""The weights of models on the device in some phases of a run, on the host in others."""

from rft_fn.model.placing import Residence, Where
from rft_fn.types import Apply, TrainState

__all__ = ["place", "require_device", "require_own_apply", "residence_of"]


def residence_of(apply: Apply) -> Residence:
    """Where the weights of a bound model are. ValueError for an apply that no strategy gave."""
    found = getattr(apply, "residence", None)
    if found is None:
        raise ValueError(f"apply: expected one that st.init or st.bind gave, got {type(apply).__name__}")
    return found


def require_own_apply(state: TrainState, apply: Apply) -> None:
    """ValueError for an apply that `init` did not give with this state, or with the state that it forks."""
    residence = getattr(apply, "residence", None)
    own = residence is not None and residence is state.residence
    if state.residence is None:  # a fork, or a state of ZeRO, which knows its own
        own = residence is not None and (state.module is None or residence.module is state.module)
    if not own:
        found = getattr(apply, "__name__", type(apply).__name__)
        if residence is not None:
            found = f"that of another {residence.name}"
        raise ValueError(
            f"apply: expected the one that init gave with this state, got {found}; a model that computes "
            "something else is a module of its own: apply, state = st.init(module, tx)"
        )


def place(apply: Apply, where: Where, /) -> None:
    """Move the weights of a bound model to the "device" or to the "host"; see `types.strategy.Place`."""
    residence_of(apply).move(where)


def require_device(state: TrainState) -> None:
    """ValueError for a state whose weights are on the host."""
    if state.residence is not None:
        state.residence.require_device("state")
