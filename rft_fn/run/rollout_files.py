"""The responses of a step, as a file."""

import json
from pathlib import Path

from torch import Tensor

from rft_fn import border, tree
from rft_fn.run.files import jsonable, write_whole
from rft_fn.types import Rollout, Sampling

__all__ = ["read_rollout", "write_rollout"]


def write_rollout(path: Path, rollout: Rollout, reward: Tensor) -> None:
    """Write a rollout and its rewards [N, G] into one file of safetensors, without images and audio."""
    from safetensors.torch import save

    tensors = {name: x for name, x in vars(rollout).items() if isinstance(x, Tensor)} | {"reward": reward}
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    about = {"sampling": json.dumps(jsonable(rollout.sampling)), "media": str(rollout.media is not None)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _ordered(save(tensors, metadata=about)))


def _ordered(content: bytes) -> bytes:
    """Return a file of safetensors with its header in order: the library writes metadata in any."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[end:]


def read_rollout(path: str | Path, *, vocabulary: int | None = None) -> tuple[Rollout, Tensor]:
    """Return the rollout and the rewards [N, G] of a file that a run wrote with `rollouts_every`.

    ValueError for another file, for numbers that no run writes (see `border.rollout_of`), tokens beyond
    `vocabulary` among them, and for responses about images or audio, which the file does not have.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("media") != "False":
                raise ValueError("they are about images or audio, which it does not have")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        sampling = border.read_json(about.get("sampling", ""))
        if sampling is not None:
            given = border.object_of("sampling", sampling)
            given["stop"] = tuple(border.entries("stop", given.get("stop"), None))
            sampling = Sampling(**given)
        rollout, reward = border.rollout_of(tensors, vocabulary=vocabulary)
        return tree.replace(rollout, sampling=sampling), reward
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"rollouts: expected a file that --rollouts-every wrote, got {path}: {why}"
        ) from error
