"""transformers' from_pretrained with one-line errors and a check for whole weights."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import modality
from rft_fn.model.convert import Group, converted, groups
from rft_fn.model.layers import require_finite
from rft_fn.model.save import quiet

__all__ = [
    "Kind", "Stored", "aliases", "files", "folder_of", "from_pretrained", "incomplete", "kind_of",
    "loaded", "require_held", "skeleton", "slices", "stored", "unreadable",
]  # fmt: skip


# ---------- transformers' from_pretrained with one-line errors and a check for whole weights


_SLACK = 2**24  # numbers that a config may ask for beyond those of its files


class Kind(NamedTuple):
    """The kind of a model: its config, and the auto class of transformers that makes it."""

    config: Any  # of the part that reads and writes text, where the model also speaks
    factory: Any
    is_part: bool  # whether there are more parts, which are left out


def kind_of(name: str, trust_remote_code: bool = False) -> Kind:
    """The kind of the language model of a folder or hub name."""
    import transformers

    whole = _config(name, trust_remote_code)
    config = modality.thinker(whole)
    config.name_or_path = whole.name_or_path
    factory = getattr(transformers, modality.auto_class(config))
    return Kind(config, factory, config is not whole)


def _config(name: str, trust_remote_code: bool) -> Any:
    """The config of a folder or hub name. ValueError for what no model can be made of, or not of it alone."""
    from transformers import AutoConfig

    config = from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(x, str) for x in names):
        raise ValueError(f"model: {name}: architectures: expected a list of names, got {names!r}")

    # transformers would fetch the repository, and run what is in it
    for code in _repositories(config):
        raise ValueError(
            f"model: {name}: expected a config.json without code of other repositories, got {code!r} as "
            "_attn_implementation or _experts_implementation; remove it there"
        )
    return config


def _repositories(config: Any) -> list[str]:
    """The repositories that a config or one of its parts takes attention or experts from."""
    found = []
    for key in ("_attn_implementation", "_experts_implementation"):
        name = getattr(config, key, None)
        if isinstance(name, str) and "/" in name:
            found.append(name)
    for key in getattr(config, "sub_configs", {}):
        found += _repositories(getattr(config, key, None))
    return found


def from_pretrained(factory: Any, name: str, *, what: str = "model", **kwargs: Any) -> Any:
    """factory.from_pretrained(name, ...) without progress bars and remote code.

    `trust_remote_code` allows the code of the model's folder. ValueError in one line for whatever it refuses,
    with `what` in front of it.
    """
    from safetensors import SafetensorError

    # transformers raises whatever its readers do; a user needs the first line of it.
    kwargs = {"trust_remote_code": False} | kwargs
    try:
        with quiet():
            return factory.from_pretrained(name, **kwargs)
    except SafetensorError as error:
        raise unreadable(Path(name), error) from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model: {name} runs Python code from its folder; if you trust it, load it with "
                "trust_remote_code=True"
            ) from error
        raise ValueError(f"{what}: could not load {name!r}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line of an error, with the next one where it is only the head of it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0]


def skeleton(config: Any, factory: Any, **options: Any) -> Any:
    """The model that an auto class makes of a config, without memory.

    ValueError in one line for a config that no model can be made of.
    """
    try:
        with torch.device("meta"):
            made = factory.from_config(config, **options)
    except Exception as error:
        raise ValueError(
            f"model: {config.name_or_path}: expected a config.json that a model can be made of, got "
            f"{type(error).__name__}: {_reason(error)}"
        ) from error
    return made.to("meta")  # tensors that a family makes of random numbers have memory even there


def require_held(name: str, config: Any, factory: Any, **options: Any) -> Any:
    """The skeleton of a folder's model. ValueError for one that is far larger than the folder's files.

    A number in config.json would take all memory before the tensors are found to be of another shape.
    """
    from safetensors import SafetensorError, safe_open

    sizes = []
    for path in Path(name).glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                sizes += [math.prod(file.get_slice(key).get_shape()) for key in file.keys()]  # noqa: SIM118
        except SafetensorError as error:
            raise unreadable(Path(name), error) from error

    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if sizes and isinstance(layers, int) and layers > len(sizes):
        raise ValueError(
            f"model: {name}: num_hidden_layers: expected no more than the {len(sizes)} tensors of its files, "
            f"got {layers}"
        )
    made = skeleton(config, factory, **options)
    wanted = sum(p.numel() for p in made.parameters())
    packed = getattr(config, "quantization_config", None) is not None  # several in each number of the files
    if sizes and not packed and wanted > 4 * sum(sizes) + _SLACK:
        raise ValueError(
            f"model: {name}: expected a config.json of about the {sum(sizes)} numbers in its files, got one "
            f"of {wanted}"
        )
    return made


def unreadable(folder: Path, error: Exception) -> ValueError:
    """The error for a folder with unreadable weights; names the bad file."""
    from safetensors import SafetensorError, safe_open

    bad = folder
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            bad = file
            break
    return ValueError(f"model: {bad}: expected a whole safetensors file, got {error}")


def loaded(factory: Any, name: str, **kwargs: Any) -> nn.Module:
    """The model `name`, with all of its weights.

    ValueError for tensors that are missing, unexpected or of another shape, unless the model's own code
    explains them (a tied head, `_keys_to_ignore_*`), and for NaN or inf. Weights that the model's class does
    not train, such as sinusoids of positions, have no gradient.
    """
    trust = kwargs.get("trust_remote_code", False)
    config = kwargs.get("config") or _config(name, trust)
    asked = {key: kwargs[key] for key in ("dtype", "attn_implementation") if key in kwargs}
    made = require_held(name, config, factory, trust_remote_code=trust, **asked)
    module, info = from_pretrained(
        factory, name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
    )
    shapes = [f"{key} {list(file)} instead of {list(own)}" for key, file, own in info["mismatched_keys"]]
    incomplete(name, info["missing_keys"], info["unexpected_keys"], shapes)
    for key, p in module.named_parameters():
        require_finite(f"model: {name}", key, p)
    _keep_frozen(module, made)
    return module


def _keep_frozen(module: nn.Module, made: nn.Module) -> None:
    """Freeze the parameters of a module that are frozen in its skeleton, where its class froze them.

    from_pretrained replaces parameters, and forgets which of them were frozen.
    """
    fixed = {name for name, p in made.named_parameters() if not p.requires_grad}
    for name, p in module.named_parameters():
        if name in fixed:
            p.requires_grad_(False)


def incomplete(name: Any, missing: Any, unexpected: Any, shapes: Sequence[str]) -> None:
    """ValueError for tensors that differ between a model and its files."""
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape than config.json's": shapes}
    parts = []
    for what, names in kinds.items():
        if names:
            part = f"{what}: {', '.join(sorted(names)[:4])}"
            if len(names) > 4:
                part += f" and {len(names) - 4} more"
            parts.append(part)
    if parts:
        raise ValueError(
            f"model: {name}: expected the tensors of a causal language model, {'; '.join(parts)}; "
            "if that is right, load it with transformers and save_pretrained it, to a folder that has these"
        )


# ---------- the files of a model, and the tensors in them


class Stored(NamedTuple):
    """The files of a model, and the groups of tensors that become the model's."""

    where: dict[str, Path]  # the file of each tensor, by its name there
    groups: dict[tuple[str, ...], Group]  # by the names of the tensors that each becomes
    skeleton: Any  # the model on the meta device, as transformers makes it


def folder_of(name: str) -> Path:
    """The folder of a model; a hub name is fetched into its cache first."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


def files(folder: Path) -> list[Path]:
    """The files with a model's weights.

    Where some have transformers' names, these alone. ValueError for none.
    """
    named = sorted([*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")])
    found = named or sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(
            f"model: expected *.safetensors in {folder}, got none, and several processes read no other "
            "format; load it with transformers and save_pretrained it to a folder, which will have them"
        )
    return found


def stored(skeleton: nn.Module, paths: list[Path]) -> Stored:
    """The tensors that files hold for a model on the meta device.

    `skeleton` is as transformers makes it. ValueError for a file that is cut off, and for tensors that are
    missing, unexpected or of another shape.
    """
    shapes, where = _headers(paths)
    found, unexpected = groups(skeleton, shapes)

    # Make every tensor without memory, to see its name and shape.
    made: dict[str, Tensor] = {}
    by_names: dict[tuple[str, ...], Group] = {}
    for group in found:
        tensors = _shaped(group, shapes, skeleton, paths[0].parent)
        made |= tensors
        by_names[tuple(tensors)] = group

    out = Stored(where, by_names, skeleton)
    _check_names(out, made, unexpected)
    _untie(out)
    return out


def _headers(paths: list[Path]) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """(a tensor without memory for each one in the files, the file of each)."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, Tensor] = {}
    where: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as f:
                for key in f.keys():  # noqa: SIM118
                    shapes[key] = torch.empty(f.get_slice(key).get_shape(), device="meta")
                    where[key] = path
        except SafetensorError as error:
            raise unreadable(path.parent, error) from error
    return shapes, where


def _shaped(
    group: Group, shapes: Mapping[str, Tensor], skeleton: nn.Module, folder: Path
) -> dict[str, Tensor]:
    """The tensors that a group becomes, without memory.

    ValueError where its rule does not fit.
    """
    try:
        return converted(group, shapes.__getitem__, skeleton)
    except (ValueError, RuntimeError, AttributeError) as error:
        what = f"{len(group.sources)} like {group.sources[0][1]}"
        raise ValueError(
            f"model: {folder}: expected tensors that {group.name} can be made of, got {what}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _check_names(out: Stored, made: Mapping[str, Tensor], unexpected: list[str]) -> None:
    """ValueError for tensors that are missing, unexpected or of another shape."""
    own = out.skeleton.state_dict(keep_vars=True)
    shapes = []
    for name, x in made.items():
        if name in own and x.shape != own[name].shape:
            shapes.append(f"{name} {list(x.shape)} instead of {list(own[name].shape)}")
    missing = {names[0] for names in aliases(out.skeleton).values() if not made.keys() & set(names)}

    # The model's own code explains some. A parameter has to be read all the same, for nobody else fills it.
    told = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unexpected))
    out.skeleton._adjust_missing_and_unexpected_keys(told)
    parameters = {name for name in missing if isinstance(own[name], nn.Parameter)}
    incomplete(_folder(out), told.missing_keys | parameters, told.unexpected_keys, shapes)


def _untie(out: Stored) -> None:
    """Separate tied tensors of the skeleton that differ in the files.

    transformers does so too, whatever the config ties.
    """
    plain = {group.name: group for group in out.groups.values() if group.rule is None}
    for names in aliases(out.skeleton).values():
        held = [plain[name] for name in names if name in plain]
        for other in held[1:]:
            with slices(out, held[0], other) as read:
                one = read(held[0].sources[0][1])[...]
                two = read(other.sources[0][1])[...]
                if not torch.equal(one, two):
                    _separate(out.skeleton, other.name)


def _separate(module: Any, name: str) -> None:
    """Give a tied tensor its own parameter."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    p = owner.get_parameter(last)
    setattr(owner, last, nn.Parameter(p.detach().clone(), p.requires_grad))
    module.all_tied_weights_keys.pop(name, None)


def _folder(out: Stored) -> Path:
    return next(iter(out.where.values())).parent


def aliases(skeleton: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor in a model's state, by the first of them."""
    same: dict[int, list[str]] = {}
    for name, x in skeleton.state_dict(keep_vars=True).items():
        same.setdefault(id(x), []).append(name)
    return {names[0]: names for names in same.values()}


@contextmanager
def slices(out: Stored, *some: Group) -> Iterator[Callable[[str], Any]]:
    """A function from a tensor's name in the files to its slice.

    Only the files of these groups are open, and only meanwhile: the part of a file that was read stays in
    memory until it is closed.
    """
    from safetensors import safe_open

    paths = {out.where[key] for group in some for _, key in group.sources}
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for path in paths:
            opened[path] = stack.enter_context(safe_open(path, "pt"))
        yield lambda key: opened[out.where[key]].get_slice(key)
