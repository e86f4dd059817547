"""Models, tokenizers and processors loaded by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_fn import border, confined, modality
from rft_fn.foreign_json import parse_json
from rft_fn.modality import ActorModality
from rft_fn.model import classifier
from rft_fn.model import quantize as low
from rft_fn.model.checkpointing import Checkpointing, checkpoint
from rft_fn.model.fresh import changes_of, fresh
from rft_fn.model.frozen import freeze as frozen
from rft_fn.model.lora import require_plain_adapters
from rft_fn.model.lora_folders import CONFIG, read_adapter_config, with_adapter
from rft_fn.model.materialize import on_meta
from rft_fn.model.model_names import resolve
from rft_fn.model.parts import find, inside_adapters, path_of
from rft_fn.model.pretrained import from_pretrained, kind_of, loaded, skeleton
from rft_fn.model.processors import MARK, ChunkProcessor, PatchProcessor
from rft_fn.model.save import quiet

__all__ = [
    "ActorAL", "ActorLanguage", "ActorOmni", "ActorVL", "base_folder", "load", "load_processor",
    "load_tokenizer", "read_config", "read_vocabulary", "read_window", "usual_device", "usual_dtype",
]  # fmt: skip


_TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


def usual_device(device: str | torch.device | None) -> torch.device:
    """Return the given device, else the GPU if there is one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def usual_dtype(device: torch.device) -> torch.dtype:
    """Return float32 on the CPU, where bf16 is unusably slow, else bf16."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load(
    path_or_module: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    gradient_checkpointing: Checkpointing = False,
    meta: bool = False,
    quantize: str = "",
    freeze: Sequence[str] = (),
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Load a language model by name, or prepare a module.

    `path_or_module` is a folder, a hub name, "tiny", "smollm2-135m", or a module that exists. A config
    with towers gives a model that sees or hears, any other a causal language model. From a model that also
    speaks, only the part that reads and writes text is loaded. dtype defaults to float32 on the CPU (where
    bf16 is unusably slow) and to bf16 on a GPU; a module keeps its own. A folder of adapters gives its
    base model with them, to be trained further. With `meta` the module comes without memory, and binding
    it reads its weights: a sharded strategy reads each process's shards only. `gradient_checkpointing` is
    what a block keeps for its backward, see `checkpointing.Checkpointing`.

    `quantize` holds the linear layers in low precision, to be frozen under adapters: "int8" by torchao,
    "nf4" by bitsandbytes; "none" is in full, even if they were saved in low; else as they were saved.
    Parts that see or hear stay in full. `freeze` names parts that are not trained, see `layers.freeze`.
    `trust_remote_code` runs Python files of the model's folder. Keywords that are fields of the config, such
    as num_hidden_layers=1, change it: the model has that shape and fresh weights, drawn by torch's generator.
    Others go to transformers' `from_pretrained`.

    ValueError for a keyword that is neither, a name that is none of these, for tensors that are missing,
    unexpected or of another shape than the config's, for weights with NaN or inf, and for a pattern to freeze
    that matches nothing.
    """
    device = usual_device(device)
    if isinstance(path_or_module, nn.Module):
        module = path_or_module
        require_plain_adapters(module)
        if not any(p.is_meta for p in module.parameters()):  # one without memory gets it later
            module = module.to(device=device, dtype=dtype)
    else:
        name, dtype = resolve(str(path_or_module)), dtype or usual_dtype(device)
        changes = changes_of(base_folder(name), kwargs, trust_remote_code=trust_remote_code)
        if changes:
            if meta or quantize or name != base_folder(name):
                other = "meta" if meta else "quantize" if quantize else "adapters"
                raise ValueError(f"{next(iter(changes))}: expected no change of the config with {other}")
            _require_language(name, trust_remote_code)
            module = fresh(name, changes, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        else:
            options = {"dtype": dtype, "trust_remote_code": trust_remote_code} | kwargs
            module = _named(name, device, meta, quantize, options)
    checkpoint(module, gradient_checkpointing)
    return frozen(module, freeze)


def _named(
    name: str, device: torch.device, meta: bool, quantize: str, options: Mapping[str, Any]
) -> nn.Module:
    """Load the model of a folder or hub name; of a folder of adapters the base model with these."""
    if Path(name, CONFIG).is_file():
        base = _base_of(name)
        if read_adapter_config(name).get("task_type") == "SEQ_CLS":
            raise _not_language(name, "adapters of a reward model")
        return with_adapter(_named(resolve(base), device, meta, quantize, options), name)
    _require_language(name, options["trust_remote_code"])
    if not meta:
        return _with_memory(name, device, quantize, options)

    if quantize not in ("", "none"):
        raise ValueError(f"quantize: expected none without memory, got {quantize}, which every process holds")
    return on_meta(name, device=device, **options)


def _require_language(name: str, trust_remote_code: bool) -> None:
    """Raise ValueError for a reward model, which transformers would give a new head."""
    found = classifier.class_name(kind_of(name, trust_remote_code).config)
    if Path(name, classifier.HEADS).is_file():
        found = "a decoder with heads of scores"
    if found is not None:
        raise _not_language(name, found)


def _not_language(name: str, found: str) -> ValueError:
    return ValueError(
        f"model: {name}: expected a language model, got {found}; model.load_reward loads it as a reward model"
    )


def _with_memory(name: str, device: torch.device, quantize: str, options: Mapping[str, Any]) -> nn.Module:
    """Load a model with memory; in low precision its parts that see or hear stay in full."""
    dtype, trust = options["dtype"], options["trust_remote_code"]
    made = kind_of(name, trust)
    if made.is_part:
        options = {"config": made.config, **options}
    kind = quantize.removeprefix("none")
    if kind:
        model = skeleton(made.config, made.factory, dtype=dtype, trust_remote_code=trust)
        towers = [path_of(tower, model) for tower in find(model).towers]
        options = {**options, **low.options(kind, dtype=dtype, device=device, whole=towers)}
    module: Any = loaded(made.factory, name, **options).to(device)
    low.prepare(name, module)
    if kind and module.hf_quantizer.pre_quantized:
        raise ValueError(f"quantize: expected none for {name}, which is quantised already, got {kind}")
    if quantize == "none":
        low.dequantize(module)
    return module


def base_folder(folder: str) -> str:
    """Return the folder or hub name of the base model, for a folder of adapters; else `folder` itself."""
    return resolve(_base_of(folder)) if Path(folder, CONFIG).is_file() else folder


def read_config(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the config of a model, by the names that `load` takes; for adapters their base's."""
    return kind_of(base_folder(resolve(str(name))), trust_remote_code).config


def read_window(name: str | Path) -> int | None:
    """Return the most tokens that a model reads, by its config; None without a limit, or a config."""
    folder = base_folder(resolve(str(name)))
    if Path(folder).is_dir() and not Path(folder, "config.json").is_file():
        return None
    return getattr(read_config(name).get_text_config(), "max_position_embeddings", None)


def read_vocabulary(name: str | Path) -> int | None:
    """Return the number of words that a model's head has, by its config; None without one."""
    folder = base_folder(resolve(str(name)))
    if Path(folder).is_dir() and not Path(folder, "config.json").is_file():
        return None
    return getattr(read_config(name).get_text_config(), "vocab_size", None)


def _base_of(folder: str) -> str:
    """Return the model that a folder of adapters is for."""
    config = read_adapter_config(folder)
    path = Path(folder, CONFIG)
    base = config.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ValueError(f"model: {path}: expected base_model_name_or_path, got none")
    if not Path(base).exists() and Path(base).is_absolute():
        raise ValueError(f"model: {folder}: its base model {base} is not there")
    revision = config.get("revision")
    if revision not in (None, "", "main") and not Path(base).exists():
        raise ValueError(
            f"model: {path}: expected a base model without a revision, got {base} of revision {revision}; "
            "fetch it, and name its folder as base_model_name_or_path"
        )
    return base


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model, with a padding token.

    Names are those that `load` takes. A folder of adapters without a tokenizer has its base model's.
    ValueError if there is none, for one without a token that ends a response, and for a chat template that
    does not parse. A tokenizer.json and a template that take more than seconds, or all memory, or end the
    library that reads them, are refused too: both are tried in a child first (`confined`).
    """
    from transformers import AutoTokenizer

    # A folder of adapters has mostly no tokenizer.
    folder = resolve(str(name))
    is_folder = Path(folder).is_dir()  # else a hub name
    if is_folder and not any(next(Path(folder).glob(pattern), None) for pattern in _TOKENIZERS):
        if not Path(folder, CONFIG).is_file():
            raise ValueError(f"tokenizer: expected one in {folder}, got no tokenizer.json or the like")
        folder = resolve(_base_of(folder))

    # Without an end token no response ends, and batches of prompts are padded.
    _try_tokenizer(folder)
    tokenizer = from_pretrained(AutoTokenizer, folder, what="tokenizer", trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer: {folder}: expected an eos_token, which ends a response, got none; "
            "name it in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is not None:
        confined.call(f"tokenizer: {folder}: chat template", _try_template, folder, tokenizer)
    return tokenizer


_tried: set[tuple[Any, ...]] = set()  # files that a child has read


def _try_tokenizer(folder: str) -> None:
    """Let a child read a tokenizer.json, where its library can end the process: a file once."""
    from transformers.utils import cached_file

    found = Path(folder, _TOKENIZER)
    if not Path(folder).is_dir():
        stored = cached_file(
            folder,
            _TOKENIZER,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        found = Path(stored or folder)
    if not found.is_file():
        return
    about = found.stat()
    known = (found.absolute(), about.st_size, about.st_mtime_ns, about.st_ino)
    if known in _tried:
        return
    try:
        confined.call(f"tokenizer: {found}", _read_tokenizer, str(found))
    except confined.Raised as error:
        if "PanicException" in str(error):
            raise ValueError(f"tokenizer: {found}: expected a tokenizer, got {error}") from None
        return  # transformers will say it, or mend it
    _tried.add(known)


_TOKENIZER = "tokenizer.json"
_SAMPLE = "Hello, World! 3.14 + 1,000 = x_1\n\n\tdef f(n):  # äöü 你好 🙂 " + "a" * 40


def _read_tokenizer(path: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.decode(tokenizer.encode(_SAMPLE).ids)


_USER, _ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}
_SYSTEM = {"role": "system", "content": "hello"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
_LONG = [_SYSTEM, *[_USER, _ASSISTANT] * 3]
_TALKS = ([_USER], [_SYSTEM, _USER], [_USER, _ASSISTANT, _USER], _LONG, [_PARTS])
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {}}}
_LONGEST = 10**6  # characters that a template may make of a few words


def _try_template(folder: str, tokenizer: Any) -> None:
    """Render short talks in all usual ways; a template may refuse any of them, and the data will show it."""
    from jinja2 import TemplateSyntaxError

    for talk in _TALKS:
        for more in ({}, {"add_generation_prompt": True}, {"tools": [_TOOL]}):
            try:
                text = tokenizer.apply_chat_template(talk, tokenize=False, **more)
            except TemplateSyntaxError as error:
                raise ValueError(
                    f"tokenizer: {folder}: expected a chat template that parses, got {error.message} "
                    f"in its line {error.lineno}"
                ) from error
            except MemoryError:
                raise
            except Exception:
                continue
            if len(text) > _LONGEST:
                raise ValueError(
                    f"tokenizer: {folder}: expected a chat template, got one that makes {len(text)} "
                    "characters of a few words"
                )


# ---------- actors by what they read: text, and images, audio or both; `options` are those of `load`


Actor = tuple[nn.Module, ActorModality]

_NAMES = {
    ActorModality.LANGUAGE_ONLY: "ActorLanguage",
    ActorModality.VISION_LANGUAGE: "ActorVL",
    ActorModality.AUDIO_LANGUAGE: "ActorAL",
    ActorModality.OMNI: "ActorOmni",
}


def ActorLanguage(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """Return (module, modality) of a model that reads text; ValueError for another."""
    return _actor(path_or_module, ActorModality.LANGUAGE_ONLY, options)


def ActorVL(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """Return (module, modality) of a model that reads text, images and videos; ValueError for another."""
    return _actor(path_or_module, ActorModality.VISION_LANGUAGE, options)


def ActorAL(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """Return (module, modality) of a model that reads text and audio; ValueError for another."""
    return _actor(path_or_module, ActorModality.AUDIO_LANGUAGE, options)


def ActorOmni(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """Return (module, modality) of a model that reads text, images, videos, audio; ValueError for another."""
    return _actor(path_or_module, ActorModality.OMNI, options)


def _actor(source: str | Path | nn.Module, expected: ActorModality, options: dict[str, Any]) -> Actor:
    # The config is read first: a model of another kind is not loaded.
    if isinstance(source, nn.Module):
        config: Any = getattr(inside_adapters(source), "config", None)
        name = type(source).__name__
    else:
        config = read_config(source, trust_remote_code=options.get("trust_remote_code", False))
        name = str(source)
    found = ActorModality.LANGUAGE_ONLY if config is None else modality.of_config(config)
    if found is not expected:
        raise ValueError(
            f"model: expected {expected.value} for {_NAMES[expected]}, got {name}, which is {found.value}; "
            f"{_NAMES[found]} takes it"
        )
    return load(source, **options), found


# ---------- the processors of models that see or hear


_TOWERS = ("vision_config", "audio_config", "thinker_config")


def load_processor(name: str | Path) -> Any:
    """Load the processor of a model that sees or hears; None for a model of text.

    Names are those that `load` takes. Models of Qwen's VL families have one without torchvision, and
    without video files; SmolVLM has one of images only without torchvision and num2words. ValueError if
    the model has towers and its folder no processor that can be loaded.
    """
    from transformers import AutoProcessor
    from transformers.utils import cached_file

    folder = base_folder(resolve(str(name)))
    _try_tokenizer(folder)
    if Path(folder, MARK).is_file():
        return PatchProcessor.from_pretrained(folder)
    stored = cached_file(folder, "config.json", _raise_exceptions_for_missing_entries=False)
    try:
        read = "{}" if stored is None else Path(stored).read_text()
        config = border.object_of("config", parse_json(read))
    except ValueError as error:
        raise ValueError(f"model: {stored}: expected JSON, got {error}") from error
    towers = [tower for tower in _TOWERS if tower in config]
    if not towers:
        return None
    try:
        with quiet():
            found = AutoProcessor.from_pretrained(folder)
    except Exception as error:  # a missing package, a missing file, or a broken one
        found = None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = lines[0]
    else:
        why = f"AutoProcessor gives {type(found).__name__} alone"
    if type(found).__name__ == "VoxtralProcessor":
        return ChunkProcessor(found)
    if hasattr(found, "image_processor") or hasattr(found, "feature_extractor"):
        return found
    without_torchvision = _WITHOUT_TORCHVISION.get(config.get("model_type", ""))
    about = [Path(folder, name) for name in ("preprocessor_config.json", "processor_config.json")]
    if without_torchvision is not None and any(path.is_file() for path in about):
        return without_torchvision(folder)
    raise ValueError(
        f"model: {folder} has {', '.join(towers)}, but no processor for what it sees or hears: {why}; "
        "its preprocessor_config.json may be missing, or pip install torchvision helps"
    )


def _smolvlm(folder: str) -> Any:
    """Make SmolVLM's processor of images only: they are in the text as in Idefics3's."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer = from_pretrained(AutoTokenizer, folder, what="tokenizer")
    images = SmolVLMImageProcessorPil.from_pretrained(folder)
    about = Path(folder, "processor_config.json")
    stored = border.object_of(str(about), parse_json(about.read_text()) if about.is_file() else {})
    return Idefics3Processor(
        images,
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_len=stored.get("image_seq_len", 169),  # transformers' own default
    )


_WITHOUT_TORCHVISION = {"smolvlm": _smolvlm} | dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), PatchProcessor.from_pretrained
)
"""model_type -> what makes a processor of a folder where the one of transformers needs torchvision."""
