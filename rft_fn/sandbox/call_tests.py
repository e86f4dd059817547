"""Test a Python function that another process computes: only values pass between the two.

A script that runs within `run`. It forks the process of the candidate before it has read the tests; names
that the tests use, and that are neither theirs nor Python's, are the candidate's. What it calls goes over as
literals, and the result comes back as one: the comparison, and the verdict, are out of the candidate's reach.
"""

import ast
import builtins
import ctypes
import os
import sys
from typing import Any

_MOST = 1 << 26  # bytes of a message
_DUMPABLE = 4  # of prctl: whether processes of the same user may look into this one

PASSED = b"passed"
"""What is written to standard output where the tests pass."""


def main() -> None:
    """Run the tests of standard input on the code of standard input, and write the verdict."""
    code = _received(0).decode()
    there, here = os.pipe(), os.pipe()
    _dumpable(0)  # before there is a process that could look
    if not os.fork():
        _dumpable(1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.close(there[1])
        os.close(here[0])
        _candidate(code, there[0], here[1])
        os._exit(0)
    os.close(there[0])
    os.close(here[1])
    tests = _received(0).decode()
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    asker = _Asker(there[1], here[0])
    tree = ast.parse(tests)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    modules = used & sys.stdlib_module_names - {x.id for x in calls if isinstance(x, ast.Name)}
    names: dict[str, Any] = {name: _Remote(asker, name) for name in used - set(dir(builtins))}
    names |= {name: __import__(name) for name in modules}
    exec(compile(tree, "tests", "exec"), {**names, "__name__": "tests"})
    os.write(out, PASSED)
    os._exit(0)


def _dumpable(value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DUMPABLE, ctypes.c_ulong(value), 0, 0, 0)


# ---------- messages


def _sent(fd: int, content: bytes) -> None:
    content = len(content).to_bytes(8, "big") + content
    while content:
        content = content[os.write(fd, content) :]


def _received(fd: int) -> bytes:
    size = int.from_bytes(_exactly(fd, 8), "big")
    if size > _MOST:
        raise ValueError("message: too long")
    return _exactly(fd, size)


def _exactly(fd: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = os.read(fd, size - len(content))
        if not part:
            raise EOFError("the code ended")
        content += part
    return content


def _literal(x: Any) -> str:
    """Return a value of plain types as Python writes it. TypeError for any other."""
    if x is None or isinstance(x, (bool, bytes)):
        return repr(x)
    if isinstance(x, str):
        return str.__repr__(x)
    if isinstance(x, int):
        return int.__repr__(x)
    if isinstance(x, float):
        text = float.__repr__(x)
        return text.replace("inf", "1e999") if text != "nan" else _refuse(x)
    if isinstance(x, complex):
        return complex.__repr__(x)
    if isinstance(x, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (set, frozenset)):
        return "{" + ", ".join(map(_literal, x)) + "}" if x else "set()"
    if isinstance(x, tuple):
        return "(" + "".join(f"{_literal(y)}, " for y in x) + ")"
    if isinstance(x, list):
        return "[" + ", ".join(map(_literal, x)) + "]"
    if type(x).__module__ == "numpy" and hasattr(x, "tolist"):
        return _literal(x.tolist())
    return _refuse(x)


def _refuse(x: Any) -> str:
    raise TypeError(f"expected a value of plain types, got {type(x).__name__}")


# ---------- the side of the tests


class _Asker:
    """The way to the process of the candidate."""

    def __init__(self, to: int, back: int):
        self.to = to
        self.back = back

    def ask(self, of: Any, path: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        """Return what a call gives there, or the attribute where `args` is None."""
        passed = None
        if args is not None:
            passed = ([_passed(x) for x in args], {name: _passed(x) for name, x in kwargs.items()})
        _sent(self.to, _literal((of, path, passed)).encode())
        kind, value, after = ast.literal_eval(_received(self.back).decode())
        if kind == "error":
            error = getattr(builtins, str(value), None)
            if isinstance(error, type) and issubclass(error, Exception):
                raise error("of the code")
            raise RuntimeError("of the code")
        for mine, theirs in zip(args or (), after):  # what a call changes in place
            if isinstance(mine, list) and isinstance(theirs, list):
                mine[:] = theirs
            elif isinstance(mine, (dict, set)) and type(mine) is type(theirs):
                mine.clear()
                mine.update(theirs)
        return _Remote(self, int(value)) if kind == "object" else value


def _passed(x: Any) -> tuple[str, Any]:
    if isinstance(x, _Remote):
        return "object", (x._of, x._path)
    return "value", x


class _Remote:
    """A function or an object of the candidate: it can be called, and has attributes to call."""

    def __init__(self, asker: _Asker, of: Any, path: tuple[str, ...] = ()):
        self._asker = asker
        self._of = of
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._asker.ask(self._of, self._path, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._asker.ask(self._of, (*self._path, name), None, {})
        return _Remote(self._asker, self._of, (*self._path, name)) if isinstance(found, _Remote) else found

    def __bool__(self) -> bool:
        raise TypeError("an object of the code is neither true nor false")


# ---------- the side of the candidate


def _candidate(code: str, asked: int, answered: int) -> None:
    """Run the code, and answer calls of what it defines."""
    names: dict[str, Any] = {"__name__": "candidate"}
    objects: list[Any] = []
    exec(compile(code, "main.py", "exec"), names)

    def at(of: Any, path: tuple[str, ...]) -> Any:
        found: Any
        if isinstance(of, int):
            found = objects[of]
        else:  # a function, or a method of the class that LeetCode has
            found = names[of] if of in names else getattr(names["Solution"](), of)
        for name in path:
            found = getattr(found, name)
        return found

    while True:
        of, path, passed = ast.literal_eval(_received(asked).decode())
        args: list[Any] = []
        try:
            found = at(of, path)
            if passed is not None:
                args = [at(*x) if kind == "object" else x for kind, x in passed[0]]
                named = {name: at(*x) if kind == "object" else x for name, (kind, x) in passed[1].items()}
                found = found(*args, **named)
            after = "(" + "".join(f"{_or_none(x)}, " for x in args) + ")"
            try:
                answer = f"('value', {_literal(found)}, {after})"
            except TypeError:
                objects.append(found)
                answer = f"('object', {len(objects) - 1}, {after})"
        except Exception as error:
            answer = f"('error', {type(error).__name__!r}, ())"
        _sent(answered, answer.encode(errors="surrogatepass"))


def _or_none(x: Any) -> str:
    try:
        return _literal(x)
    except TypeError:
        return "None"


if __name__ == "__main__":
    main()
