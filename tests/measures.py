"""How dense the code is, by folder: `python tests/measures.py [FOLDER ...]`.

A body is a function from its first statement to its end, without its docstring. Lines of code are those that
are neither empty, nor comments, nor docstrings.
"""

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rft_fn", "kernels/rft_kernels", "kernels/bench", "train_scripts")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_SUMMARY = 100  # characters


class Measures(NamedTuple):
    """What one folder is like."""

    lines: int  # of code
    bodies: list[int]  # lines of each function
    conditionals: int
    in_arguments: list[str]  # places where a conditional expression is inside of a call's arguments
    nested: list[str]  # places of conditional expressions inside of others
    lambdas: list[str]  # places of lambdas with a name
    comprehensions: int
    names: int
    comments: int  # lines that are nothing else
    characters: float  # a line of code
    summaries: list[int]  # words of those of one line
    bad_summaries: list[str]  # places where the summary is no single line of at most MOST_SUMMARY characters


def docstring(node: ast.AST) -> ast.Expr | None:
    """The docstring of a module, class or function, as it stands in the tree."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
        return None
    value = body[0].value
    return body[0] if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def body_lines(node: ast.FunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    statements = node.body[1:] if docstring(node) else node.body
    if not statements:
        return 0
    return node.end_lineno - statements[0].lineno + 1


def code_lines(text: str, tree: ast.Module) -> tuple[list[str], int]:
    """(the lines of code, how many lines are only a comment)."""
    doc = set()
    for node in ast.walk(tree):
        found = docstring(node)
        if found is not None:
            doc |= set(range(found.lineno, found.end_lineno + 1))
    only_comment = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            only_comment.add(token.start[0])
    lines = list(enumerate(text.splitlines(), 1))
    code = [line for i, line in lines if line.strip() and i not in doc and i not in only_comment]
    return code, len(only_comment)


def conditionals_in_arguments(tree: ast.Module) -> list[ast.IfExp]:
    """Conditional expressions that are an argument of a call, or a part of one."""
    found = []
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        for argument in [*call.args, *(k.value for k in call.keywords)]:
            # a comprehension or a lambda among the arguments has statements of its own
            if not isinstance(argument, (*COMPREHENSIONS, ast.Lambda, ast.Call)):
                found += [n for n in ast.walk(argument) if isinstance(n, ast.IfExp)]
    return found


def measure(paths: list[Path]) -> Measures:
    """The measures of these files together."""
    out = Measures(0, [], 0, [], [], [], 0, 0, 0, 0.0, [], [])
    lines, comments, characters, conditionals, comprehensions, names = 0, 0, 0, 0, 0, 0
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        where = str(path.relative_to(ROOT))
        code, notes = code_lines(text, tree)
        lines += len(code)
        comments += notes
        characters += sum(len(line.strip()) for line in code)
        seen = {id(n): n for n in conditionals_in_arguments(tree)}
        out.in_arguments.extend(f"{where}:{n.lineno}" for n in seen.values())
        for node in ast.walk(tree):
            conditionals += isinstance(node, ast.IfExp)
            comprehensions += isinstance(node, COMPREHENSIONS)
            names += isinstance(node, ast.Name)
            if isinstance(node, ast.IfExp):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.IfExp) and n is not node]
                out.nested.extend(f"{where}:{n.lineno}" for n in inner)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                out.lambdas.append(f"{where}:{node.lineno}")
            if isinstance(node, FUNCTIONS):
                out.bodies.append(body_lines(node))
            found = docstring(node)
            if found is not None:
                summary = found.value.value.strip().split("\n\n")[0]
                if "\n" in summary or len(summary) > MOST_SUMMARY:
                    out.bad_summaries.append(f"{where}:{found.lineno}")
                else:
                    out.summaries.append(len(summary.split()))
    return out._replace(
        lines=lines,
        conditionals=conditionals,
        comprehensions=comprehensions,
        names=names,
        comments=comments,
        characters=characters / max(lines, 1),
    )


def files(folder: str | Path) -> list[Path]:
    """The Python files below a folder (or the file itself)."""
    path = ROOT / folder
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def row(name: str, m: Measures) -> str:
    """A line of the table."""
    bodies = sorted(m.bodies) or [0]
    spread = f"{statistics.median(bodies):g} / {bodies[int(0.9 * (len(bodies) - 1))]} / {bodies[-1]}"
    documented = len(m.summaries) + len(m.bad_summaries)
    cells = [
        name,
        str(m.lines),
        spread,
        f"{100 * m.conditionals / max(m.lines, 1):.1f}",
        str(len(m.in_arguments)),
        str(len(m.nested)),
        str(len(m.lambdas)),
        f"{100 * m.comprehensions / max(m.lines, 1):.1f}",
        f"{m.names / max(m.lines, 1):.1f}",
        f"{1000 * m.comments / max(m.lines, 1):.0f}",
        f"{m.characters:.0f}",
        f"{100 * len(m.summaries) / max(documented, 1):.0f} %",
        f"{statistics.mean(m.summaries or [0]):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = """\
| folder | lines | body median / p90 / max | conditional expr. per 100 lines | in arguments | nested \
| named lambdas | comprehensions | names a line | comment lines per 1,000 | characters a line \
| summary on one line | its words |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def main(folders: list[str]) -> None:
    """Print the table, and the places to look at where folders were named."""
    print(HEAD)
    for folder in folders or FOLDERS:
        print(row(folder, measure(files(folder))))
        rooms = sorted(p for p in (ROOT / folder).glob("*/") if any(p.rglob("*.py")))
        for room in rooms if not folders else []:
            print(row(str(room.relative_to(ROOT)), measure(files(room))))
    for folder in folders:
        found = measure(files(folder))
        for title in ("in_arguments", "nested", "lambdas", "bad_summaries"):
            for place in getattr(found, title):
                print(f"{title}: {place}")


if __name__ == "__main__":
    main(sys.argv[1:])
