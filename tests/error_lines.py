"""The error lines of the library, read from its source: what `docs/troubleshooting` has to explain.

A line is a template, in which each placeholder is `{}`. It is read wherever an exception with a message is
made, raised there or not, wherever one gets a note, and wherever a warning or an error is printed. A name or
a call of a helper as the message is followed to the texts that it may be. Messages without words of the
library's own (`raise`, `raise error`, `ValueError(str(error))`) are no lines: another wrote them.
"""

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("rft_fn", "kernels/rft_kernels", "train_scripts")

_PLACE = re.compile(r"(?:\{[^{}]*\})+")
_MOST = 12  # texts that one message may be, before it counts as text of its caller
_BUILTIN = {n for n, x in vars(builtins).items() if isinstance(x, type) and issubclass(x, BaseException)}
_NO_NAME = {"for", "in", "if", "else", "not", "x", "i", "str", "map", "repr"}
_WARN = {"warn", "warn_once"}
_PRINTED = ("warning: ", "error: ")
SILENT = {"StopIteration", "SystemExit", "KeyError", "NotImplementedError"}
SILENT |= {"TooLong"}  # parts of lines that others write


class Line(NamedTuple):
    """A line that the library may print."""

    place: str  # file:line of its source
    text: str  # with names in its placeholders


def normal(text: str) -> str:
    """The text with `{}` for each placeholder, and single spaces."""
    return _PLACE.sub("{}", " ".join(text.split())).strip()


def has_words(text: str) -> bool:
    """Whether a template has words beside its placeholders."""
    return re.search(r"[a-zA-Z]{2}", _PLACE.sub("", text)) is not None


class Module:
    """A file with its functions, classes and the functions around each of its nodes."""

    def __init__(self, path: Path):
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.around: dict[ast.AST, list[ast.AST]] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.imports: dict[str, Path] = {}  # names -> the files that they are imported from
        self._walk(self.tree, [])

    def _walk(self, node: ast.AST, above: list[ast.AST]) -> None:
        self.around[node] = above
        inner = above
        if isinstance(node, ast.ImportFrom) and node.module:
            path = ROOT / (node.module.replace(".", "/") + ".py")
            self.imports |= {a.asname or a.name: path for a in node.names}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.setdefault(node.name, node)
            inner = [node, *above]
        elif isinstance(node, ast.ClassDef):
            inner = [node, *above]
        for child in ast.iter_child_nodes(node):
            self._walk(child, inner)


@cache
def modules() -> tuple[Module, ...]:
    """All files of the library and the scripts."""
    return tuple(Module(p) for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py")))


@cache
def forms() -> dict[str, tuple[list[str], ast.expr | None]]:
    """The library's own exceptions: the arguments of each, and the text that it makes of them."""
    found: dict[str, tuple[list[str], ast.expr | None]] = {}
    classes = [n for m in modules() for n in m.tree.body if isinstance(n, ast.ClassDef)]
    known = set(_BUILTIN)
    for _ in range(3):  # classes of classes
        for node in classes:
            if any(last(base) in known for base in node.bases):
                known.add(node.name)
                found[node.name] = _form(node)
    return found


def _form(node: ast.ClassDef) -> tuple[list[str], ast.expr | None]:
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            names = [a.arg for a in inner.args.args[1:]]
            for call in ast.walk(inner):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and call.args:
                    return names, call.args[0]
    return ["message"], None


def last(node: ast.AST) -> str:
    """The last name of a dotted one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def _placeholder(node: ast.expr) -> str:
    """A name for what stands in a placeholder: its last plain word."""
    words = re.findall(r"(?<!['\"\w])[a-zA-Z_]\w*(?!['\"\w])(?!\()", ast.unparse(node))
    words = [w.lstrip("_").replace("name__", "type") for w in words if w not in _NO_NAME]
    return "{" + (words[-1] if words else "value").lower() + "}"


class Reader:
    """Reads the texts that an expression of a module may be."""

    def __init__(self, module: Module):
        self.module = module

    def texts(self, node: ast.expr, at: ast.AST, given: dict[str, list[str]], depth: int = 0) -> list[str]:
        """All texts of `node`, which stands where `at` does; `given` are those of parameters."""
        if depth > 6:
            return ["{text}"]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr):
            return _all([self._part(part, given) for part in node.values])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _all([self.texts(side, at, given, depth + 1) for side in (node.left, node.right)])
        if isinstance(node, ast.IfExp):
            return [t for side in (node.body, node.orelse) for t in self.texts(side, at, given, depth + 1)]
        if isinstance(node, ast.BoolOp):
            return [t for side in node.values for t in self.texts(side, at, given, depth + 1)]
        if isinstance(node, ast.Name):
            return given.get(node.id) or self._variable(node, at, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        return ["{text}"]

    def _part(self, part: ast.expr, given: dict[str, list[str]]) -> list[str]:
        if isinstance(part, ast.Constant):
            return [str(part.value)]
        assert isinstance(part, ast.FormattedValue)
        if isinstance(part.value, ast.Name) and part.value.id in given:
            return given[part.value.id]
        return [_placeholder(part.value)]

    def _variable(self, name: ast.Name, at: ast.AST, depth: int) -> list[str]:
        """The texts that are assigned to a name in the function around, each with all that may be added."""
        texts: list[str] = []
        around = [f for f in self.module.around[at] if not isinstance(f, ast.ClassDef)]
        scope = around[0] if around else self.module.tree
        kinds = ast.Assign | ast.AugAssign
        steps = [n for n in ast.walk(scope) if isinstance(n, kinds) and _row(n) < _row(at)]
        for node in sorted(steps, key=_row):
            if isinstance(node, ast.AugAssign) and last(node.target) == name.id:
                more = self.texts(node.value, at, {}, depth + 1)
                texts += [a + b for a in texts for b in more]
            elif isinstance(node, ast.Assign) and any(last(t) == name.id for t in node.targets):
                if node in getattr(scope, "body", []):
                    texts = []  # it is assigned whatever came before
                texts += self.texts(node.value, at, {}, depth + 1)
        return texts or ["{" + name.id + "}"]

    def _attribute(self, name: ast.Attribute, depth: int) -> list[str]:
        """The texts that are assigned to an attribute of this name anywhere in the module."""
        texts: list[str] = []
        for node in ast.walk(self.module.tree):
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Attribute) and t.attr == name.attr for t in node.targets
            ):
                texts += self.texts(node.value, node, {}, depth + 1)
        return [t for t in texts if has_words(t)] or ["{" + name.attr + "}"]

    def _call(self, call: ast.Call, depth: int) -> list[str]:
        """The texts that a helper returns; other calls are a placeholder."""
        name = last(call.func)
        if isinstance(call.func, ast.Attribute) and name in ("strip", "rstrip"):
            return self.texts(call.func.value, call, {}, depth + 1)
        made = _resolved(self.module, call.func)
        if made is None:
            return ["{" + (name or "text") + "}"]
        module, function = made
        names = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
        given: dict[str, list[str]] = {}
        for key, value in [*zip(names, call.args), *((k.arg or "", k.value) for k in call.keywords)]:
            texts = self.texts(value, call, {}, depth + 1)
            if any(has_words(t) for t in texts):
                given[key] = texts
        inner = Reader(module)
        texts = []
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                texts += inner.texts(node.value, node, given, depth + 1)
        return texts or ["{" + name + "}"]


def _row(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _all(parts: Sequence[list[str]]) -> list[str]:
    """Every way to put one of each together."""
    many = 1
    for part in parts:
        many *= len(part)
    if many > _MOST:
        parts = [part if len(part) == 1 else ["{text}"] for part in parts]
    return ["".join(found) for found in product(*parts)]


def _resolved(module: Module, func: ast.expr) -> tuple[Module, ast.FunctionDef] | None:
    """The function of the library that a call names, by its own module or by an import."""
    name = last(func)
    plain = isinstance(func, ast.Name) or ast.unparse(func) == f"self.{name}"
    if plain and name in module.functions:
        return module, module.functions[name]
    path = module.imports.get(name)
    if path is None or not isinstance(func, ast.Name):
        return None
    other = next((m for m in modules() if m.path == path), None)
    if other is None or name not in other.functions:
        return None
    return other, other.functions[name]


def is_error(node: ast.AST) -> bool:
    """Whether a node makes an exception."""
    return isinstance(node, ast.Call) and (last(node.func) in _BUILTIN or last(node.func) in forms())


def imported_makers(module: Module) -> set[str]:
    """The functions of other modules that a module imports, and that make exceptions."""
    found = set()
    for name in module.imports:
        made = _resolved(module, ast.Name(name))
        if made is not None and any(map(is_error, ast.walk(made[1]))):
            found.add(name)
    return found


def _messages(module: Module) -> Iterator[tuple[ast.Call, list[str]]]:
    """Every exception that is made with a message, every note, warning and printed error, with its texts."""
    reader = Reader(module)
    own = forms()
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[-1], ast.Starred):
            continue
        name = last(node.func)
        if name in SILENT:
            continue
        if name in own:
            names, form = own[name]
            values = {n: reader.texts(a, node, {}) for n, a in zip(names, node.args)}
            values |= {k.arg: reader.texts(k.value, node, {}) for k in node.keywords if k.arg}
            if form is not None:
                values = {n: ["{" + n + "}" if t == "" else t for t in found] for n, found in values.items()}
                for left_out in set(names) - set(values):
                    values[left_out] = [""]  # the default of a part that few have
                yield node, reader.texts(form, node, values)
            else:
                yield node, reader.texts(node.args[0], node, {})
        elif name == "OSError":
            yield node, reader.texts(node.args[-1], node, {})  # behind the number
        elif name in _BUILTIN or name in _WARN or name == "add_note":
            yield node, reader.texts(node.args[0], node, {})
        elif name == "print":
            said = reader.texts(node.args[0], node, {})
            yield node, [t.partition(": ")[2] for t in said if t.startswith(_PRINTED)]


@cache
def lines() -> tuple[Line, ...]:
    """Every line, as often as the source has it."""
    found = []
    for module in modules():
        place = module.path.relative_to(ROOT)
        for call, texts in _messages(module):
            for text in dict.fromkeys(texts):
                if has_words(text):
                    found.append(Line(f"{place}:{call.lineno}", " ".join(text.split())))
    return tuple(found)
