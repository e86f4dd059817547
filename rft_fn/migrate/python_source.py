"""The options in a Python script of TRL: the arguments of GRPOConfig and its relatives, by `ast` only.

Nothing is imported or run. Read are constants, lists, mappings, f-strings, arithmetic, and names that are
assigned such a value; defaults of dataclasses and of argparse; names of functions as rewards.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Module", "read"]

_CONFIGS = {
    "GRPOConfig": "grpo", "SFTConfig": "sft", "DPOConfig": "dpo", "RewardConfig": "reward",
    "RLOOConfig": "rloo", "KTOConfig": "kto", "PPOConfig": "ppo", "ORPOConfig": "orpo", "CPOConfig": "cpo",
    "OnlineDPOConfig": "online_dpo", "GKDConfig": "gkd", "PRMConfig": "prm", "BCOConfig": "bco",
    "AsyncGRPOConfig": "async_grpo", "SimPOConfig": "run_simpo",
}  # fmt: skip
_TRAINERS = {name.replace("Config", "Trainer"): kind for name, kind in _CONFIGS.items()}
_READERS = ("json", "csv", "parquet", "text", "arrow")
_OTHERS = ("ModelConfig", "ScriptArguments", "TrainingArguments")
_ADAPTERS = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
    "bias": "lora_bias", "use_dora": "use_dora", "use_rslora": "use_rslora",
}  # fmt: skip
_CODE = ("formatting_func", "data_collator", "rollout_func", "tools", "optimizers", "compute_loss_func")
_NAMING = (ast.Constant, ast.Attribute, ast.JoinedStr)  # expressions that a model's name may be


_COMMAND = re.compile(
    r"^[ \t]*(?:accelerate|python3?|torchrun|trl|deepspeed|uv run|\w+=\S+) (?:.*\\\n)*.*$", re.M
)


class Module(NamedTuple):
    """The calls and values in a Python file."""

    options: dict[str, Any]
    programs: list[str]  # the kind of its trainer
    notes: list[str]
    started: str
    commands: str  # a shell script of the commands in its texts
    parsed: dict[str, str]  # options that only a command line gives a value -> a note


class _Unknown(Exception):
    """A value that is no constant."""


def read(text: str, path: str) -> list[Module]:
    """Return the options of a script for each kind of trainer in it; SyntaxError for a text that is none."""
    tree = ast.parse(text)
    calls = sorted((x for x in ast.walk(tree) if isinstance(x, ast.Call)), key=lambda x: x.lineno)
    kinds = dict.fromkeys(kind for call in calls if (kind := _kind(call)))
    return [_of_kind(tree, path, kind) for kind in kinds or [""]]


def _kind(call: ast.Call) -> str:
    """Return the kind of trainer that a call of a config or of a trainer is of; empty for another call."""
    called = ast.unparse(call.func).rpartition(".")[2]
    return _CONFIGS.get(called) or _TRAINERS.get(called) or ""


def _of_kind(tree: ast.Module, path: str, kind: str) -> Module:
    """Return the options of one kind of trainer, of the first of each config."""
    names: dict[str, ast.expr] = {}
    several = set()  # names with more values than one: which counts, a run tells
    for name, value in _assigned(tree):
        if ast.dump(names.setdefault(name, value)) != ast.dump(value):
            several.add(name)
    names = {name: value for name, value in names.items() if name not in several}
    functions = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    imported = dict(_imported(tree))
    options: dict[str, Any] = {}
    notes: list[str] = []
    parsed: dict[str, str] = {}
    _take(options, notes, parsed, _set_later(tree, kind, notes), names)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func).rpartition(".")[2]
        if _kind(call) not in ("", kind):
            continue
        given = {}
        for x in call.keywords:
            given |= {x.arg: x.value} if x.arg else _splatted(x.value, names, notes)
        if called in ("BitsAndBytesConfig", "from_pretrained"):
            quantized = {x: node for x, node in given.items() if x in ("load_in_4bit", "load_in_8bit")}
            _take(options, notes, parsed, quantized, names)
        if called in _CONFIGS or called in _OTHERS:
            _take(options, notes, parsed, given, names)
        elif called == "LoraConfig" or (called == "get_peft_model" and "r" in given):
            chosen = {_ADAPTERS[name]: x for name, x in given.items() if name in _ADAPTERS}
            options.setdefault("use_peft", True)
            _take(options, notes, parsed, chosen, names)
        elif called in _TRAINERS:
            first = call.args[0] if call.args else None
            _of_trainer(options, notes, parsed, given, first, names, functions, imported, path)
        elif called == "load_dataset" and "dataset_name" not in options:
            _take(options, notes, parsed, _of_data(call, given), names)
        elif called == "from_pretrained" and "model_name_or_path" not in options:
            first = call.args[0] if call.args else given.get("model_name")
            owner = ast.unparse(call.func)
            if first is not None and "Model" in owner and "Reward" not in owner:
                _take(options, notes, parsed, {"model_name_or_path": first}, names)
    for node in (x for x in ast.walk(tree) if isinstance(x, ast.Call)):
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "map"
            and "data" in ast.unparse(node.func)
        ):
            notes.append(
                f"line {node.lineno}: the script makes other rows; --template and --messages read the "
                "columns that the source has, docs/data.md"
            )
            break
    started = "trl" if "trl" in {module.partition(".")[0] for module in imported.values()} else ""
    texts = [
        x.value.value for x in tree.body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
    ]
    commands = _COMMAND.findall("\n".join(x for x in texts if isinstance(x, str)))
    return Module(options, [kind] if kind else [], notes, started, "\n".join(commands), parsed)


def _set_later(tree: ast.AST, kind: str, notes: list[str]) -> dict[str, ast.expr]:
    """Return what is assigned to attributes of a config after its call; note what a condition decides."""
    configs, found = {"training_args"}, {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and _kind(node.value) == kind != ""
        ):
            configs |= {x.id for x in node.targets if isinstance(x, ast.Name)}
    forks = (x for x in ast.walk(tree) if isinstance(x, ast.If | ast.For | ast.While | ast.Try))
    forks = (x for x in forks if not (isinstance(x, ast.If) and "__name__" in ast.unparse(x.test)))
    conditional = {x for fork in forks for x in ast.walk(fork)}
    for node in (x for x in ast.walk(tree) if isinstance(x, ast.Assign)):
        target = node.targets[0]
        if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) in configs):
            continue
        if node in conditional:
            said = f"line {node.lineno}: {ast.unparse(node)[:60]}"
            notes.append(f"{said}: under a condition, so it is left out")
        else:
            found[target.attr] = node.value
    return found


def _splatted(node: ast.expr, names: Mapping[str, ast.expr], notes: list[str]) -> dict[str, ast.expr]:
    """Return what **NAME gives a call: the entries of a dict that the file writes out; else note it."""
    found = names.get(node.id) if isinstance(node, ast.Name) else node
    if isinstance(found, ast.Call) and ast.unparse(found.func) == "dict" and not found.args:
        return {x.arg: x.value for x in found.keywords if x.arg}
    if isinstance(found, ast.Dict) and all(isinstance(key, ast.Constant) for key in found.keys):
        return {
            str(key.value): x for key, x in zip(found.keys, found.values) if isinstance(key, ast.Constant)
        }
    notes.append(f"line {node.lineno}: **{ast.unparse(node)[:60]}: its options are not in the file")
    return {}


def _take(
    options: dict[str, Any],
    notes: list[str],
    parsed: dict[str, str],
    given: Mapping[str, ast.expr],
    names: Mapping[str, ast.expr],
) -> None:
    """Add the options with constant values; note the others, in `parsed` what its own parser reads."""
    for name, node in given.items():
        try:
            value = _constant(node, names)
        except _Unknown:
            text = " ".join(ast.unparse(node).split())
            said = f"line {node.lineno}: {name}={text[:60]}"
            if text.startswith(("script_args.", "training_args.", "model_args.", "args.", "cfg.")):
                parsed.setdefault(name, f"{said}: of its command line, so it is left out")
            else:
                notes.append(f"{said}: not a constant, so it is left out")
            continue
        options.setdefault(name, value)


def _of_trainer(
    options: dict[str, Any],
    notes: list[str],
    parsed: dict[str, str],
    given: Mapping[str, ast.expr],
    positional: ast.expr | None,
    names: Mapping[str, ast.expr],
    functions: set[str],
    imported: Mapping[str, str],
    path: str,
) -> None:
    """Add the model and the rewards of a trainer: functions of this file, or of the module they are from."""
    model = given.get("model", positional)
    named = names.get(model.id) if isinstance(model, ast.Name) else model
    if model is not None and isinstance(named, _NAMING):
        _take(options, notes, parsed, {"model_name_or_path": model}, names)
    notes += [
        f"line {node.lineno}: {name}={ast.unparse(node)[:60]}: code, which is not read"
        for name, node in given.items()
        if name in _CODE
    ]
    if "reward_funcs" not in given or "reward_funcs" in options:
        return
    node = given["reward_funcs"]
    if isinstance(node, ast.Name) and isinstance(names.get(node.id), ast.List | ast.Tuple):
        node = names[node.id]
    rewards = []
    for item in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        text = " ".join(ast.unparse(item).split())
        name = text.partition("(")[0]
        if isinstance(item, ast.Constant):
            rewards.append(f"model:{item.value}")
        elif name in functions or (isinstance(names.get(name), ast.Lambda)):
            rewards.append(f"{path}:{text}")
        elif name in imported:
            rewards.append(f"{imported[name]}:{text}")
        else:
            notes.append(
                f"line {item.lineno}: reward {text[:60]}: expected a function of this file, or imported"
            )
    if any(x.startswith(f"{path}:") for x in rewards):
        notes.append(
            f"line {node.lineno}: the rewards are functions of this file, which is imported with all that it "
            "imports; in a file of their own they need none of it"
        )
    if rewards:
        options["reward_funcs"] = rewards


def _of_data(call: ast.Call, given: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """Return the name, the config and the split of load_dataset's arguments."""
    found: dict[str, ast.expr] = dict(zip(("dataset_name", "dataset_config"), call.args))
    for theirs, ours in (
        ("path", "dataset_name"),
        ("name", "dataset_config"),
        ("split", "dataset_train_split"),
    ):
        if theirs in given:
            found[ours] = given[theirs]

    # a reader of files by its name: the files are the source
    reader, files = found.get("dataset_name"), given.get("data_files")
    if isinstance(reader, ast.Constant) and reader.value in _READERS and files is not None:
        if isinstance(files, ast.Dict) and files.values:
            splits = [getattr(key, "value", None) for key in files.keys]
            files = files.values[splits.index("train") if "train" in splits else 0]
        if isinstance(files, ast.List) and len(files.elts) == 1:
            files = files.elts[0]
        found["dataset_name"] = files
    return found


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with the expressions that they are assigned, and ATTRIBUTE of dataclasses and argparse."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif (
            isinstance(node, ast.Assign)
            and isinstance(names := node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            pairs = zip(names.elts, node.value.elts)
            yield from ((x.id, value) for x, value in pairs if isinstance(x, ast.Name))
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and field.value is not None:
                    yield f".{ast.unparse(field.target)}", _default(field.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument") and node.args:
            given = {x.arg: x.value for x in node.keywords}
            # as argparse names it: by dest, else by the first long option
            flags = [x.value for x in (given.get("dest"), *node.args) if isinstance(x, ast.Constant)]
            flag = next((str(x) for x in flags if "dest" in given or str(x)[:2] == "--"), str(flags[:1]))
            action = ast.unparse(given["action"]).strip("'") if "action" in given else ""
            switched = ast.Constant(action == "store_false") if action.startswith("store_") else None
            default = given.get("default", switched)
            if default is not None:
                yield f".{flag.lstrip('-').replace('-', '_')}", default


def _default(node: ast.expr) -> ast.expr:
    """Return the default in a call of `field`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("field"):
        given = {x.arg: x.value for x in node.keywords}
        made = given.get("default_factory")
        return made.body if isinstance(made, ast.Lambda) else given.get("default", node)
    return node


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield names with the modules that they are imported from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for x in node.names:
                yield x.asname or x.name, node.module
        elif isinstance(node, ast.Import):
            for x in node.names:
                yield x.asname or x.name, x.name


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _constant(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Return the value of an expression if the text decides it, else _Unknown."""
    if depth > 30:
        raise _Unknown
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(x, names, depth + 1) for x in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {key.value: _constant(x, names, depth + 1) for key, x in zip(node.keys, node.values)}  # type: ignore[union-attr]
    if isinstance(node, ast.Name) and node.id in names:
        return _constant(names[node.id], names, depth + 1)
    if isinstance(node, ast.Attribute):
        if f".{node.attr}" in names:
            return _constant(names[f".{node.attr}"], names, depth + 1)
        if ast.unparse(node).startswith("torch."):
            return node.attr
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(_constant(node.operand, names, depth + 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_constant(x, names, depth + 1) for x in (node.left, node.right))
        if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
            return left + right
        try:
            return _OPERATORS[type(node.op)](_number(left), _number(right))
        except (ZeroDivisionError, OverflowError):
            raise _Unknown from None
    if isinstance(node, ast.JoinedStr):
        parts = [x.value if isinstance(x, ast.FormattedValue) else x for x in node.values]
        return "".join(str(_constant(x, names, depth + 1)) for x in parts)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("os.environ.get", "os.getenv") and len(node.args) == 2:
            return _constant(node.args[1], names, depth + 1)
        if called in ("int", "float", "str") and len(node.args) == 1:
            value = _constant(node.args[0], names, depth + 1)
            if called == "str":
                return str(value)
            return int(float(_number(value))) if called == "int" else float(_number(value))
        if called == "dict" and not node.args:
            return {x.arg: _constant(x.value, names, depth + 1) for x in node.keywords if x.arg}
    raise _Unknown


def _number(x: Any) -> Any:
    """Return a number, also of a text; _Unknown for any other value."""
    if isinstance(x, int | float):
        return x
    try:
        return float(x)
    except (TypeError, ValueError):
        raise _Unknown from None
