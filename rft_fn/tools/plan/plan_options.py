"""The options of `rft plan`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from rft_fn import limits
from rft_fn.limits import AtLeast0, Count, Filled, Range, Seed

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Predict the seconds, memory and bytes of a run's steps by a simulation, before anything is rented."""

    what: tyro.conf.Positional[Filled]  # a .toml file of roles, or the command of a trainer in quotes
    on: tuple[
        str, ...
    ] = ()  # GPUs by a table of cards, as 64xH100; several are compared; if empty, this machine
    measured: tuple[str, ...] = ()  # folders of runs here, for the rates; if empty, two short ones are made
    lengths: str = ""  # lognormal:MEDIAN:SIGMA, constant:TOKENS or a rollout file; if empty, as measured
    prompt: Annotated[float, Range(0)] = 200.0  # tokens of a prompt, with --on
    judge: Annotated[float, Range(-1)] = -1.0  # seconds of the rewards of a step; -1: as measured, else 0
    simulate: Count = 12  # steps that are simulated, at most
    failures: AtLeast0 = 0.0  # hours between failures of one GPU, in the mean; 0: none
    restart: AtLeast0 = 300.0  # seconds from a failure until the run goes on
    price: AtLeast0 = 0.0  # of a GPU hour, in any currency
    picture: str = ""  # a .png: a Gantt chart of three steps, above those of a measured run of the same size
    seed: Seed = 0  # of the lengths that are drawn

    def __post_init__(self) -> None:
        limits.fields(self)
        if self.on and self.measured:
            raise ValueError(f"measured: expected none with --on, got {' '.join(self.measured)}")
        if not self.on and (self.failures or self.price):
            raise ValueError("on: expected GPUs, as failures and price are of them, got none")
        if self.picture and not self.picture.endswith(".png"):
            raise ValueError(f"picture: expected a .png, got {self.picture}")
        if self.picture and len(self.on) > 1:
            raise ValueError(f"picture: expected one kind of GPUs for it, got {' '.join(self.on)}")
