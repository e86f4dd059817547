"""Critics and scalar reward models in folders: ours, and classes of transformers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import border
from rft_fn.model import classifier
from rft_fn.model.checkpointing import Checkpointing
from rft_fn.model.classifier import HEADS
from rft_fn.model.critic import Critic
from rft_fn.model.frozen import freeze as frozen
from rft_fn.model.head_scale import Head
from rft_fn.model.heads import Headed
from rft_fn.model.load import base_folder, load, read_config, usual_device, usual_dtype
from rft_fn.model.lora import BELOW
from rft_fn.model.lora_folders import CONFIG, read_adapter_config, read_adapters, with_adapter
from rft_fn.model.materialize import on_meta
from rft_fn.model.model_names import resolve
from rft_fn.model.parts import inside_adapters
from rft_fn.model.pretrained import loaded
from rft_fn.model.reward_heads import RewardModel, named_heads
from rft_fn.model.save import save
from rft_fn.model.weight_files import files, folder_of

__all__ = ["load_critic", "load_reward", "save_critic", "save_reward"]


def saved_heads(folder: Any, file: str) -> dict[str, Tensor] | None:
    """Return the tensors of a file of heads; None for a module, and for a folder without the file."""
    from safetensors.torch import load_file

    if isinstance(folder, nn.Module) or not Path(folder, file).is_file():
        return None
    return load_file(Path(folder, file))


def headless(
    factory: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    meta: bool,
    **kwargs: Any,
) -> nn.Module:
    """Load the model that an auto class of transformers reads from a folder without a vocabulary head.

    `model.load`, which would miss that head, takes the module: with its weights, or with none yet.
    """
    device = usual_device(device)
    dtype = dtype or usual_dtype(device)
    if meta:
        return on_meta(str(folder), dtype=dtype, device=device, factory=factory, **kwargs)
    return loaded(factory, str(folder), dtype=dtype, **kwargs)


@torch.no_grad()
def save_headed(folder: str | Path, module: Headed, weights: Iterable[tuple[str, Tensor]]) -> Path:
    """Write a module in its own format, with `weights` in place of its own. ValueError for unknown ones."""
    new = dict(weights)
    unknown = sorted(set(new) - set(module.state_dict()))
    if unknown:
        raise ValueError(
            f"weights: expected names of the parameters of {type(module).__name__}, got {unknown[:3]}"
        )
    return save(folder, module, None, new.items())


def load_critic(
    path_or_module: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    gradient_checkpointing: Checkpointing = False,
    meta: bool = False,
    freeze: Sequence[str] = (),
    **kwargs: Any,
) -> Critic:
    """Load a `Critic` from whatever `model.load` takes, or from a folder that `save_critic` wrote.

    Its head is zeros, or as it was saved. A module is taken over, not copied: an actor's own would be
    trained by both. `freeze` names parts of the decoder that are not trained; the other arguments are
    those of `model.load`. ValueError for a name or a module that is no language model.
    """
    from transformers import AutoModel

    # A folder with a trained head holds only a decoder.
    trained = saved_heads(path_or_module, Critic.file)
    lm: Any = path_or_module
    if trained is not None:
        lm = headless(AutoModel, str(lm), dtype=dtype, device=device, meta=meta, **kwargs)
    lm = load(
        lm,
        dtype=dtype,
        device=device,
        gradient_checkpointing=gradient_checkpointing,
        meta=meta,
        quantize="none",
        **kwargs,  # of no use for a module that is loaded already
    )
    critic = Critic(lm)
    if trained is not None:
        critic.head.load_state_dict(trained)
    frozen(critic, freeze)
    return critic


def save_critic(folder: str | Path, critic: Critic, weights: Iterable[tuple[str, Tensor]] = ()) -> Path:
    """Write `critic`, with `weights` substituted for its parameters, as a folder for `load_critic`.

    `weights` are as `Strategy.export` gives them. ValueError for one that the critic does not have.
    """
    return save_headed(folder, critic, weights)


_SCORE = "score.weight"  # the name of the heads' matrix, in transformers' classes and in ours


class _Source(NamedTuple):
    """A model as it was saved: without heads, or with their tensors and descriptions."""

    lm: Any  # what `load` takes
    tensors: Mapping[str, Tensor] | None = None
    heads: tuple[Head, ...] = ()
    pool: str = "last"
    why: str = ""  # there are no heads


def load_reward(
    path_or_module: str | Path | nn.Module,
    *,
    heads: Sequence[str | Head] = (),
    pool: str = "",
    new: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    gradient_checkpointing: Checkpointing = False,
    meta: bool = False,
    freeze: Sequence[str] = (),
    **kwargs: Any,
) -> RewardModel:
    """Load a `RewardModel` from a folder that `save_reward` or transformers wrote, or make a new one.

    Folders and modules of transformers' class for sequence classification have heads by the labels of
    their config; labels without a name are named by `heads`. A folder of peft's LoRA adapters for such a
    model (task_type SEQ_CLS) gives its base model with them, to be trained further. With `new` the heads
    are new ones of 0, named `heads` ("score" unless given) over whatever `model.load` takes, and `pool` is
    how they pool ("last" unless given). Warns of a class with padding that also ends texts, which
    transformers scores one token earlier. A module is taken over, not copied. `freeze` names parts that
    are not trained; the other arguments are those of `model.load`.

    ValueError for a folder without heads unless they are to be new, for `heads` and a `pool` that are not
    those of the folder, and for adapters without their base model.
    """
    source = _source(path_or_module, meta, {"dtype": dtype, "device": device, **kwargs})
    if source.tensors is None and not new:
        raise ValueError(
            f"reward model: {_name(path_or_module)}: expected a model with heads, "
            f"got one without{source.why}; "
            "new=True (train_rm.py without --keep-heads) puts new ones on it"
        )
    lm = load(
        source.lm,
        dtype=dtype,
        device=device,
        gradient_checkpointing=gradient_checkpointing,
        meta=meta,
        quantize="none",
        **kwargs,  # of no use for a module that is loaded already
    )
    if new:
        model = RewardModel(lm, heads=heads or ("score",), pool=pool or "last")
    else:
        if pool not in ("", source.pool):
            name = _name(path_or_module)
            raise ValueError(
                f"pool: expected {source.pool!r}, by which the heads of {name} were trained, got {pool!r}"
            )
        model = RewardModel(lm, heads=_renamed(path_or_module, source.heads, heads), pool=source.pool)
        assert source.tensors is not None
        model.load_state_dict(source.tensors, strict=False)
    frozen(model, freeze)
    return model


def _source(given: Any, meta: bool, options: dict[str, Any]) -> _Source:
    """Return what there is of a reward model in a module or a folder."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    if isinstance(given, nn.Module):
        head = classifier.head_of(inside_adapters(given))
        if head is None:
            return _Source(given)
        config = inside_adapters(given).config
        classifier.warn_of_padding(_name(given), config)
        return _Source(given, {_SCORE: head.weight.detach()}, _labels(config))

    # A decoder with our heads in a file.
    folder = resolve(str(given))
    tensors = saved_heads(folder, RewardModel.file)
    if tensors is not None:
        heads, pool = _described(folder)
        return _Source(headless(AutoModel, folder, meta=meta, **options), tensors, heads, pool)

    # Adapters and a head; their base model is elsewhere.
    if Path(folder, CONFIG).is_file():
        return _adapted(folder, meta, options)

    # A model for sequence classification, ours or of others.
    if classifier.class_name(read_config(folder)) is None:
        return _Source(given)
    lm: Any = headless(AutoModelForSequenceClassification, folder, meta=meta, **options)
    head = classifier.head_of(lm)
    assert head is not None
    classifier.warn_of_padding(folder, lm.config)
    heads, pool = _labels(lm.config), "last"
    if Path(folder, HEADS).is_file():
        heads, pool = _described(folder)
        if len(heads) != head.out_features:
            names = [each.name for each in heads]
            raise ValueError(
                f"reward model: {Path(folder, HEADS)}: expected {head.out_features} heads, got {names}"
            )
    return _Source(lm, {_SCORE: _in_files(folder, head.weight.detach())}, heads, pool)


def _adapted(folder: str, meta: bool, options: dict[str, Any]) -> _Source:
    """Return the adapters and the head that peft saved of a reward model; other task types have no head."""
    from transformers import AutoModelForSequenceClassification

    base = base_folder(folder)
    kind = read_adapter_config(folder).get("task_type")
    if kind != "SEQ_CLS":
        return _Source(folder, why=f" (adapters with task_type {kind}, not SEQ_CLS)")
    name = f"{BELOW}{_SCORE}"
    head = read_adapters(folder).get(name)
    if head is None:
        raise ValueError(f"reward model: {folder}: expected a head {name} beside its adapters, got none")

    # The base may have a head as well; that of the adapters takes its place.
    if classifier.class_name(read_config(base)) is None:
        lm = load(base, meta=meta, quantize="none", **options)
    else:
        lm = headless(AutoModelForSequenceClassification, base, meta=meta, **options)
    names = classifier.usual_labels(len(head))
    classifier.warn_of_padding(folder, inside_adapters(lm).config)
    return _Source(with_adapter(lm, folder, without="score"), {_SCORE: head}, named_heads(names))


def _labels(config: Any) -> tuple[Head, ...]:
    return named_heads(classifier.labels(config))


def _in_files(folder: str, read: Tensor) -> Tensor:
    """Return the head in the precision of a folder's files; `read` if these are no safetensors."""
    from safetensors import safe_open

    if not read.is_meta and not any(Path(folder).glob("*.safetensors")):
        return read
    for path in files(folder_of(folder)):
        with safe_open(path, "pt") as file:
            if _SCORE in file.keys():  # noqa: SIM118
                return file.get_tensor(_SCORE)
    return read


def _described(folder: str) -> tuple[tuple[Head, ...], str]:
    """Return (heads, pool) as our file in a folder has them."""
    path = Path(folder, HEADS)
    try:
        saved = border.object_of("the file", border.read_json(path.read_text()))
        heads = [Head(**head) for head in border.entries("heads", saved["heads"], None)]
        return named_heads(heads), border.text("pool", saved["pool"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"reward model: {path}: expected heads and their pool: {error}") from error


def _renamed(given: Any, saved: tuple[Head, ...], heads: Sequence[str | Head]) -> tuple[Head, ...]:
    """Return the heads of a folder, renamed as asked if their names are transformers' numbers."""
    if not heads:
        return saved
    asked = named_heads(heads)
    own = [head.name for head in saved]
    names = [head.name for head in asked]
    numbered = all(name in ("score", f"LABEL_{i}") for i, name in enumerate(own))
    if len(own) == len(names) and (numbered or own == names):
        return asked
    raise ValueError(
        f"heads: expected {own} of {_name(given)}, got {names}; "
        "new=True (train_rm.py without --keep-heads) puts new ones on it"
    )


def _name(given: Any) -> str:
    return type(given).__name__ if isinstance(given, nn.Module) else str(given)


def save_reward(
    folder: str | Path, reward_model: RewardModel, weights: Iterable[tuple[str, Tensor]] = ()
) -> Path:
    """Write a reward model, with `weights` substituted for its parameters, as a folder for `load_reward`.

    `weights` are as `Strategy.export` gives them. Pooled by the last token, it is a folder of
    transformers' AutoModelForSequenceClassification if that has a class for the decoder; a warning says if
    not. That class looks for the last token that is no padding: padding that also ends texts is replaced
    by another. ValueError for a weight that the model does not have.
    """
    return save_headed(folder, reward_model, weights)
