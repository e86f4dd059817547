"""No module of rft_kernels imports itself by way of others; only three of them import triton."""

import ast
from pathlib import Path

import rft_kernels

FOLDER = Path(rft_kernels.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in FOLDER.glob("*.py")}


def imported(tree):
    """The modules of rft_kernels that one imports, in its functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rft_kernels":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("rft_kernels."):
            found.add(node.module.split(".")[1])
    return found


def test_every_import_is_a_statement_that_names_a_module():
    for name, tree in MODULES.items():
        calls = {
            getattr(node.func, "id", getattr(node.func, "attr", ""))
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
        assert not calls & {"import_module", "__import__"}, name
        assert imported(tree) <= set(MODULES), name


def test_there_is_no_cycle_not_even_by_imports_inside_functions():
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in sorted(imported(MODULES[name])):
                visit(other, [*trail, name])
            done.add(name)

    for name in MODULES:
        visit(name, [])


def test_what_needs_triton_is_imported_inside_functions_alone():
    def at_import(name):
        """The modules that are loaded with one."""
        top = ast.Module([node for node in MODULES[name].body if not isinstance(node, ast.FunctionDef)], [])
        return imported(top)

    loaded = set()
    waiting = ["__init__", "linear"]  # what others import
    while waiting:
        name = waiting.pop()
        if name not in loaded:
            loaded.add(name)
            waiting += at_import(name)
    assert loaded == set(MODULES) - {"gemm", "triton", "row_kernels", "tile_kernels", "decode"}
