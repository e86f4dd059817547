"""The rules of the house: layers, lightness, the wheel, names, and options that are read."""

import ast
import dataclasses
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    0: "tree rng check limits precision types",
    1: "segment scan advantage weight loss reward_shaping logprob sampling metric rollout packing optim "
    "algorithm testing analysis",
    2: "text foreign_json cores cache_folder file_digest border confined model modality reward data "
    "sandbox environment hub opened option_help parsing patience user_files",
    3: "dist ckpt memory strategy engine sync collect run tools migrate",
}
LAYER = {name: level for level, names in LAYERS.items() for name in names.split()}
ABOVE = [ROOT / "rft_fn" / name for name in ("__init__.py", "__main__.py")]  # all rooms
FILES = sorted(p for p in (ROOT / "rft_fn").rglob("*.py") if p not in ABOVE)


def module_of(path):
    return path.relative_to(ROOT / "rft_fn").with_suffix("").parts[0]


# each room may use those before it
FLOOR_3 = ["dist", "ckpt", "memory", "strategy", "engine", "sync", "collect", "run", "tools", "migrate"]
# arrows to the right or up, inside of functions: the answer to a name or an option that is not there, the
# command `rft migrate`, and `run.serve`, which is a tool; nothing else imports `migrate`
LAZY = {
    ("types/strategy.py", "migrate"),
    ("strategy/config.py", "migrate"),
    ("parsing.py", "migrate"),
    ("tools/commands.py", "migrate"),
    ("run/__init__.py", "tools"),
}
PACKAGES = {"rft_fn": ROOT / "rft_fn", "rft_kernels": ROOT / "kernels" / "rft_kernels"}


def imported(node):
    """The names that a statement imports, with `import_module("a.b")` and its kind as well."""
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{a.name}" for a in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    ):
        first = node.args[0] if node.args else None
        return [first.value] if isinstance(first, ast.Constant) else [ast.unparse(node)]
    return []


def arrows(path):
    """(what a file imports, line) of every import, also inside functions, but for those in LAZY."""
    tree = ast.parse(path.read_text())
    begin = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for name in imported(node):
            inside = (
                path.relative_to(ROOT / "rft_fn").as_posix() if path.is_relative_to(ROOT / "rft_fn") else ""
            )
            lazy = (inside, name.split(".")[1] if "." in name else "") in LAZY and id(node) not in begin
            if not lazy:
                yield name, node.lineno


def imports(path):
    """(room of this project, line) for every import in a file, also those inside functions."""
    for name, line in arrows(path):
        if name.startswith("rft_fn."):
            yield name.split(".")[1], line


def test_no_arrow_points_up():
    """A file imports from its own floor and from those below; on L3 from its own room and those before it."""
    offenders = []
    for path in FILES:
        room, where = module_of(path), path.relative_to(ROOT)
        for name, line in imports(path):
            if name not in LAYER:
                offenders.append(f"{where}:{line} imports {name} from the package root, not from its module")
            elif LAYER[name] > LAYER[room]:
                offenders.append(f"{where}:{line} (L{LAYER[room]}) imports {name} (L{LAYER[name]})")
            elif LAYER[name] == LAYER[room] == 3 and FLOOR_3.index(name) > FLOOR_3.index(room):
                offenders.append(f"{where}:{line} ({room}) imports {name}, to its right")
    assert not offenders, "\n".join(offenders)


def modules():
    """{the name of every module: its file}."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def test_no_import_cycle():
    """Of files, with imports inside functions and by `import_module`.

    The root, which gathers all rooms, does not count, nor does the way from a module to its own package.
    """
    every = modules()

    def module(name):
        while name and name not in every:
            name = name.rpartition(".")[0]
        return name

    to = {}
    for here, path in every.items():
        to[here] = {module(name) for name, _ in arrows(path)} - {"", here, *PACKAGES}
    done = set()

    def visit(name, trail):
        assert name not in trail, f"cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for other in sorted(to[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in to:
        if name not in PACKAGES:
            visit(name, [])


def test_the_root_lists_the_rooms_of_each_floor():
    import rft_fn

    text = (ROOT / "rft_fn" / "__init__.py").read_text()
    rooms = {module_of(p) for p in FILES}
    assert rooms == set(LAYER)
    for room in rooms:
        assert hasattr(rft_fn, room) and re.search(rf"\b{room}\b", text), room


def test_l0_and_l1_are_torch_and_optree_only():
    allowed = {"torch", "optree", "einops", "rft_fn", "rft_kernels"} | set(sys.stdlib_module_names)
    for path in (p for p in FILES if LAYER[module_of(p)] <= 1):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                roots = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                assert {r.split(".")[0] for r in roots} <= allowed, f"{path.name}:{node.lineno}"
                assert not any("torch.distributed" in r for r in roots)


def run(code, **env):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = os.environ | {"PYTHONPATH": path} | env
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout


EVERY_ROOM = "[getattr(rft_fn, name) for name in rft_fn.__all__]"


def test_import_is_light():
    """All rooms together load neither transformers nor an engine; `import rft_fn` not even torch."""
    heavy = [
        "transformers",
        "vllm",
        "sglang",
        "ray",
        "deepspeed",
        "triton",
        "peft",
        "datasets",
        "matplotlib",
        "tokenizers",
        "rich",
        "tyro",
        "sympy",
    ]
    code = "import sys, rft_fn; print('torch' in sys.modules); import torch; old = set(sys.modules); "
    code += f"{EVERY_ROOM}; print(sorted(set({heavy}) & (set(sys.modules) - old)))"
    assert run(code).split("\n")[:2] == ["False", "[]"]


def test_an_engine_of_transformers_imports_no_other():
    """`vllm` has a row of the table of engines, and costs nothing until it is chosen."""
    code = "import sys, rft_fn as rft; rft.engine.get_engine(rft.engine.EngineConfig(), 'tiny'); "
    code += "print(sorted({'vllm', 'sglang', 'ray'} & set(sys.modules)))"
    assert run(code).strip().splitlines()[-1] == "[]"


def test_import_takes_under_a_second_beyond_torch():
    """Of the processor's time: others may be busy beside it."""
    code = f"import torch, optree, time; t = time.process_time(); import rft_fn; {EVERY_ROOM}; "
    code += "print(time.process_time() - t)"
    assert any(float(run(code)) < 1.0 for _ in range(3))  # the second and third only where one was late


def test_the_wheel_holds_everything(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    kinds = ("*.py", "*.js", "*.css", "*.html", "*.toml")  # parts of a report, and tables of other libraries
    want = {str(p.relative_to(ROOT)) for kind in kinds for p in (ROOT / "rft_fn").rglob(kind)}
    want |= {str(p.relative_to(ROOT / "kernels")) for p in (ROOT / "kernels" / "rft_kernels").rglob("*.py")}
    want |= {"rft_fn/py.typed", "rft_kernels/py.typed"}  # type checkers read the annotations of a user's copy
    assert want <= names
    assert not any(n.startswith(("kernels/", "tests/", "train_scripts/")) for n in names)


def test_kernels_is_never_importable_as_a_package():
    """A root package `kernels` would shadow the library of that name which transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert 'name = "rft-fn"' in (ROOT / "pyproject.toml").read_text()


def test_scripts_are_not_named_like_libraries():
    for path in (ROOT / "train_scripts").glob("*.py"):
        found = importlib.util.find_spec(path.stem)
        assert found is None or str(ROOT) in str(found.origin), f"{path.name} hides {found.origin}"


def test_folders_of_tests_are_not_named_like_our_packages():
    """With tests/ on the path such a folder hides an editable installation: it is a package without files."""
    hidden = PACKAGES.keys() & {p.name for p in (ROOT / "tests").rglob("*") if p.is_dir()}
    assert not hidden, f"tests/{', '.join(hidden)} would be imported in place of the package"


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OURS = [*FILES, *sorted((ROOT / "kernels" / "rft_kernels").rglob("*.py"))]
OURS += sorted((ROOT / "train_scripts").glob("*.py"))


# of hf and vllm, of `python -m`, and of batches and packs
SHARED_NAMES = {"engine.py", "sampler.py", "__main__.py", "media.py"}


def test_the_name_of_a_file_tells_it_apart():
    names = [p.name for p in FILES if p.name != "__init__.py"]
    twice = {name for name in names if names.count(name) > 1}
    assert not (twice - SHARED_NAMES), twice - SHARED_NAMES


# calls of functions of others, with keywords that depend on their version
FOREIGN_CALLS = {
    "engine/hf/engine.py", "engine/hf/fixed_steps.py", "engine/hf/probe.py", "engine/hf/row_batch.py",
    "memory/without_values.py",
    "model/forward.py", "model/load.py", "model/packed_attention.py", "model/pretrained.py",
}  # fmt: skip


def test_calls_are_written_out():
    """No local dictionary is collected and splatted: it hides names from types, search and debuggers."""
    offenders = []
    for path in FILES:
        where = str(path.relative_to(ROOT / "rft_fn"))
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, FUNCTIONS)]
        for nodes in (list(ast.walk(f)) for f in functions if where not in FOREIGN_CALLS):
            assigned = [n for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign))]
            dicts = {
                ast.unparse(n).split(":")[0].split(" =")[0] for n in assigned if isinstance(n.value, ast.Dict)
            }
            splats = {
                ast.unparse(k.value)
                for n in nodes
                if isinstance(n, ast.Call)
                for k in n.keywords
                if not k.arg
            }
            offenders += [f"{where}:{nodes[0].lineno} **{name}" for name in sorted(dicts & splats)]
    assert not offenders, offenders


# lines of a training script, None where it is not limited, and of its main
PAGES = {
    "grpo": (130, 57),
    "ppo": (185, 75),
    "distill": (150, 60),
    "dpo": (200, 60),
    "sft": (None, 60),
    "train_rm": (None, 60),
    "multi_turn": (None, 60),
    "compare": (185, 60),
}


def test_the_algorithm_of_a_training_script_is_on_one_page():
    offenders = []
    for name, (whole, body) in PAGES.items():
        text = (ROOT / "train_scripts" / f"{name}.py").read_text()
        main = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "main")
        lines = text.count("\n"), main.end_lineno - main.lineno + 1
        if lines[0] > (whole or 450) or lines[1] > body:
            offenders.append((name, lines))
    assert not offenders, offenders


def test_a_body_over_60_lines_says_why():
    """By a comment above it; the docstring does not count."""
    offenders = []
    for path in OURS:
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, FUNCTIONS):
                continue
            begin = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if node.end_lineno - begin >= 60 and not lines[first - 2].strip().startswith("#"):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not offenders, offenders


def test_a_summary_is_one_line_of_at_most_100_characters():
    offenders = []
    for path in OURS:
        tree = ast.parse(path.read_text())
        for node in (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, *FUNCTIONS))):
            summary = (ast.get_docstring(node) or "").split("\n\n")[0]
            if "\n" in summary or len(summary) > 100:
                offenders.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert not offenders, offenders


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "train_scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def readers_of(script):
    """The source of a script, and of what it uses of rft_fn.run, directly or not."""
    import rft_fn.run  # noqa: F401

    source = (ROOT / "train_scripts" / f"{script}.py").read_text()
    rooms = [module for name, module in list(sys.modules.items()) if name.startswith("rft_fn.run")]
    found, waiting = {}, re.findall(r"rft\.run\.(\w+)", source)
    loads = "load=rft" in source or "load_task" in source or "load=" not in source
    skipped = set() if loads else {"load_task"}  # the default of `setup`
    while waiting:
        name = waiting.pop()
        function = next((getattr(room, name) for room in rooms if hasattr(room, name)), None)
        ours = inspect.isfunction(function) or inspect.isclass(function)
        ours = ours and function.__module__.startswith("rft_fn.run")
        if name not in found and ours and name not in skipped:
            found[name] = inspect.getsource(function)
            waiting += re.findall(r"\b(\w+)[(,.]", found[name])
    return source + "".join(found.values())


@pytest.mark.parametrize(
    "name",
    [
        "sft",
        "distill",
        "dpo",
        "grpo",
        "ppo",
        "multi_turn",
        "evaluate",
        "export",
        "check_engine",
        "compare",
        "sweep",
        "replay",
        "serve_reward",
        "serve_model",
    ],
)
def test_every_option_has_a_reader_and_a_line_of_help(name):
    """The reader is the script, its Config, or what it calls of rft_fn.run; the help is behind the option."""
    config, source = load_script(name).Config, readers_of(name)
    public = [x.fget if isinstance(x, property) else x for _, x in inspect.getmembers(config)]
    own = [x for x in public if inspect.isfunction(x) and not x.__name__.startswith("_")]
    source += "".join(inspect.getsource(x).replace("self.", "cfg.") for x in own)
    records = [inspect.getsource(base) for base in config.__mro__ if dataclasses.is_dataclass(base)]
    for field in dataclasses.fields(config):
        reader = rf'\b(?:cfg|how)\.{field.name}\b|cfg, "{field.name}"'  # how: options.of(SUBJECT, cfg)
        assert re.search(reader, source), f"{name}.py: nobody reads {field.name}"
        lines = (re.search(rf"^    {field.name}: .*", record, re.M) for record in records)
        line = next(filter(None, lines)).group()
        assert re.search(r"  # \w|default_factory", line), f"{name}.py: {field.name} has no help"


@pytest.mark.parametrize("record", ["EngineConfig", "StrategyConfig"])
def test_every_field_of_a_config_has_a_reader(record):
    import rft_fn

    paths = [*FILES, *(ROOT / "train_scripts").glob("*.py")]
    sources = "".join(re.sub(r"__post_init__.*?\n\n", "", p.read_text(), flags=re.S) for p in paths)
    config = getattr(rft_fn.engine if record == "EngineConfig" else rft_fn.strategy, record)
    for field in dataclasses.fields(config):
        # a default of EngineConfig is what `config_of` reads
        readers = re.findall(rf"(?:config|self|strategy|StrategyConfig)\.{field.name}\b", sources)
        assert readers, f"nobody reads {record}.{field.name}"


def test_public_functions_say_what_they_are():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path.name} has no docstring"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}:{node.lineno} {node.name} has no docstring"


def test_nothing_is_left_for_later():
    for path in [*FILES, *(ROOT / "train_scripts").glob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text()), path


def test_no_deadline_reads_the_time_of_day():
    """A clock that is set, or jumps, ends nothing early or late: waits are of the monotonic clock."""
    known = {
        "data/row_cache.py": "days since a file of a cache was read",
        "patience.py": "a server's Retry-After that is a date",
        "tools/serving/model_wire.py": "when an answer was made",
    }
    clock = re.compile(
        r"\btime\.time\(|datetime\.now\(|\.utcnow\(|\$\{?SECONDS|\(\(SECONDS"
    )  # bash's own too
    found = {str(x.relative_to(ROOT / "rft_fn")) for x in FILES if clock.search(x.read_text())}
    assert found == known.keys()


def test_every_row_and_every_piece_is_in_the_docs():
    """docs/algorithms.md has a row for each algorithm, with its paper, and names every loss and weight."""
    import rft_fn

    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name, row in rft_fn.algorithm.TABLE.items():
        line = next((x for x in text.splitlines() if x.startswith(f"| `{name}` |")), None)
        assert line and row.paper in line, f"{name}: no row with {row.paper}"
    pieces = [f"weight.{n}" for n in rft_fn.weight.__all__] + [f"loss.{n}" for n in rft_fn.loss.__all__]
    missing = [p for p in pieces if p not in text and f"`{p.split('.')[1]}`" not in text]
    assert not missing, missing
