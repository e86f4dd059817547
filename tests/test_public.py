"""The public names: what `rft.<tab>` and `rft.ROOM.<tab>` show, and that all of it is for somebody."""

import ast
import dataclasses
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

from each_case import each
from torch import Tensor

import rft_fn as rft
from rft_fn.collect.engine_worker import EngineWorker
from rft_fn.engine.lifetime import deferred
from rft_fn.strategy.common import Backend
from rft_fn.strategy.fsdp2 import FSDP2Backend
from rft_fn.strategy.local import LocalBackend
from rft_fn.strategy.zero.backend import ZeroBackend

ROOT = Path(__file__).resolve().parent.parent
ROOMS = [name for name in rft.__all__ if inspect.ismodule(getattr(rft, name))]

# other programs are written against these
CONTRACT = re.findall(
    r"\S+",
    """
tree.struct tree.replace tree.map tree.donate rng.fold_in rng.generator segment.sum segment.mean segment.max
scan.linear_scan advantage.grpo advantage.rloo advantage.remax advantage.opo advantage.cpgd
advantage.reinforce_pp advantage.reinforce_pp_baseline advantage.gae advantage.discounted_return
advantage.whiten weight.token_mean weight.seq_mean weight.seq_sum weight.constant weight.truncated_is
weight.masked_is loss.ppo_clip loss.gspo loss.gspo_token loss.cispo loss.sapo loss.gmpo loss.cpgd
loss.reinforce loss.kl_k1 loss.kl_k2 loss.kl_k3 loss.kl loss.value_clip loss.nll loss.bradley_terry loss.dpo
logprob.log_probs_from_logits logprob.linear_logprob packing.pack packing.unpack packing.shard
packing.minibatches packing.reset_position_ids metric.mean metric.max metric.merge metric.results optim.adamw
optim.chain optim.clip_by_global_norm optim.apply_updates model.bind model.score model.load
model.apply_lora_configuration modality.get_supported_parameters modality.ActorModality
modality.MODALITY_PARAMETERS strategy.get_strategy strategy.get_fake_strategy strategy.StrategyConfig
engine.get_engine collect.gather_and_generate ckpt.save ckpt.restore ckpt.latest
testing.check_partition_invariance testing.check_padding_invariance testing.check_packing_invariance
testing.check_on_policy_identity testing.check_kl_gradient Rollout Experience Packed Media TokenOut
TrainState Sampling Transform Strategy Engine experience types.LossFn types.Sampling
types.TrainState
""",
)


def named_in(code):
    """The names of this library that Python source uses: "room.name", and "name" of the root."""
    try:
        parsed = ast.parse(code)
    except SyntaxError:  # a block that shows a part of something
        return set()

    # what the imports call them
    found, alias = set(), {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            alias |= {a.asname or a.name: "" for a in node.names if a.name == "rft_fn"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rft_fn":
            for a in node.names:
                full = f"{node.module}.{a.name}".removeprefix("rft_fn.")
                alias[a.asname or a.name] = full
                found.add(full)

    for node in ast.walk(parsed):
        head, _, rest = ast.unparse(node).partition(".")
        if isinstance(node, ast.Attribute) and head in alias:
            found.add(f"{alias[head]}.{rest}".removeprefix("."))
    return found


def shown():
    """The names that scripts, examples and pages of the docs use, and the text of the pages."""
    sources = [p.read_text() for d in ("train_scripts", "docs") for p in (ROOT / d).rglob("*.py")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(p.read_text() for p in pages)
    names = set()
    for code in [*sources, *re.findall(r"```python\n(.*?)```", text, re.S)]:
        names |= named_in(code)
    return names, text


NAMES, TEXT = shown()


def is_shown(room, name):
    """Whether a page, an example or a script uses `room.name`, or a page has it in code by its own name."""
    full = f"{room}.{name}".removeprefix(".")
    if full in NAMES or full in CONTRACT or any(x.startswith(full + ".") for x in NAMES):
        return True
    return bool(re.search(rf"(?<![\w.])(rft\.)?{re.escape(full)}\b|`{name}[`(:]", TEXT))


def test_every_public_name_is_for_somebody():
    listed = [("", name) for name in rft.__all__]
    listed += [(room, name) for room in ROOMS for name in getattr(rft, room).__all__]
    lost = [f"rft.{room}.{name}" for room, name in listed if not is_shown(room, name)]
    assert not lost, (
        f"{lost}: in no script, example, page or contract: show them in docs/scripts.md, or take them off "
        "__all__; they can be imported all the same"
    )


def test_every_public_name_exists_and_says_what_it_is():
    """Rooms, functions and classes have a docstring; a constant cannot, and a page names it."""
    offenders = []
    for room in ROOMS:
        module = getattr(rft, room)
        assert inspect.getdoc(module) and len(set(module.__all__)) == len(module.__all__), room
        for name in module.__all__:
            x = getattr(module, name)
            if inspect.isclass(x) or inspect.isfunction(x):
                made_of_fields = f"{x.__name__}("  # a record's, where nobody wrote one
                if not x.__doc__ or x.__doc__.startswith(made_of_fields):
                    offenders.append(f"{room}.{name}")
    assert not offenders, offenders


def test_what_is_promised_can_be_found_by_completion():
    found = {f"{room}.{name}" for room in ROOMS for name in getattr(rft, room).__all__} | set(dir(rft))
    assert not (lost := set(CONTRACT) - found), lost


def test_completion_shows_what_is_listed_and_nothing_else():
    """In a process of its own, where no test has imported a module into a room."""
    code = "import rft_fn as rft; print(dir(rft)); [getattr(rft, x) for x in dir(rft)]; print(dir(rft))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [ast.literal_eval(line) for line in done.stdout.splitlines()] == [sorted(rft.__all__)] * 2


def shown_by_help(x):
    return pydoc.render_doc(x, renderer=pydoc.plaintext)


def signatures(kind):
    """{field of a record of functions: the protocol's method}"""
    calls = {name: vars(x).get("__call__") for name, x in kind.__annotations__.items() if isinstance(x, type)}
    return {name: call for name, call in calls.items() if inspect.isfunction(call)}


def assert_helpful(functions):
    """`help` of each function has the contract's docstring and arguments, and of the others has a text."""
    for name, call in signatures(type(functions)).items():
        text, about = shown_by_help(getattr(functions, name)), inspect.cleandoc(call.__doc__)
        assert all(line.strip() in text for line in about.splitlines()), name
        assert all(argument in text for argument in list(inspect.signature(call).parameters)[1:]), name
    assert all(inspect.getdoc(x) for x in functions if inspect.isroutine(x))


def test_help_of_a_strategy_is_the_contract():
    """Each function has its text once, in `Backend`, on every backend."""
    st = rft.strategy.get_strategy()
    assert "loss [T]" in shown_by_help(st.grad) and "sampling" in shown_by_help(st.init)
    for name in rft.Strategy._fields:
        if not inspect.isroutine(value := getattr(st, name)):
            continue
        about = inspect.getdoc(getattr(Backend, name))
        assert about and all(line.strip() in shown_by_help(value) for line in about.splitlines()), name
        for backend in (LocalBackend, FSDP2Backend, ZeroBackend):
            assert inspect.getdoc(getattr(backend, name)) == about, (backend, name)
            own, of_all = (inspect.signature(getattr(x, name)) for x in (backend, Backend))
            assert list(own.parameters) == list(of_all.parameters), (backend, name)


def test_help_of_an_engine_is_the_contract():
    engine = rft.engine.get_engine(None, "tiny")
    worker = EngineWorker(lambda: engine)
    for functions in (engine, deferred(lambda: engine), worker.engine()):
        assert_helpful(functions)
    assert "[B, S]" in shown_by_help(engine.score)
    worker.close()


@each(
    "kind", [rft.Rollout, rft.Experience, rft.Packed, rft.TokenOut, rft.TrainState, rft.Media, rft.Sampling]
)
def test_help_of_a_record_has_its_fields_and_the_shapes_of_tensors(kind):
    text = shown_by_help(kind)
    for field in dataclasses.fields(kind):
        line = next(x for x in text.splitlines() if f"     {field.name}: " in x)
        assert "# [" in line or field.type not in (Tensor, Tensor | None), line


def test_help_of_records_says_what_the_source_says():
    assert "tokens: Tensor  # [B, S] i64\n" in shown_by_help(rft.Rollout)
    assert "# sequences that belong together" in shown_by_help(rft.Packed)
    text = shown_by_help(rft.Engine)
    for call in signatures(rft.Engine).values():
        assert inspect.cleandoc(call.__doc__).splitlines()[0] in text
    assert "# computes gradients; the only place that calls backward" in shown_by_help(rft.Strategy)
    assert "sleep: MoveWeights  # to the host" in shown_by_help(rft.Engine)

    # a struct of a prompt has no source
    made = {"rft": rft}
    exec("class Typed:\n    x: int\n    y: int = 0\nTyped = rft.tree.struct(Typed)", made)
    assert [x.strip() for x in made["Typed"].__doc__.splitlines()[-2:]] == ["x", "y"]


def test_machinery_can_still_be_used():
    for name in (
        "packing.assign", "metric.Mean", "model.without_adapters", "dist.rank", "hub.did_you_mean",
        "tree.leaves_with_path", "check.shapes", "ckpt.write", "engine.gather_and_generate",
    ):  # fmt: skip
        room, _, name = name.partition(".")
        assert hasattr(getattr(rft, room), name)
        assert room not in dir(rft) or name not in getattr(rft, room).__all__
