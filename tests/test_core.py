"""docs/core.md: the files to read exist, import nothing else, and are short; the page is made from them."""

import ast
import math
import sys

import pytest

from bench import core, record

ALLOWED = {"torch", "optree"} | set(sys.stdlib_module_names)


def imported(name):
    """What a file of the lists imports: names of the lists, and roots of other packages."""
    for node in ast.walk(ast.parse(core.path_of(name).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module.replace(".", "/").removeprefix("rft_fn").removeprefix("/")
            if not node.module.startswith("rft_fn"):
                yield node.module.partition(".")[0]
            elif module and core.path_of(module).exists():
                yield module
            else:
                yield from (f"{module}/{alias.name}".removeprefix("/") for alias in node.names)


def test_the_core_imports_torch_optree_and_itself():
    every = {*core.READ, *core.GROUND}
    assert all(core.path_of(name).is_file() for name in every) and len(every) == 25
    outside = {(name, x) for name in every for x in imported(name) if x not in every | ALLOWED}
    assert not outside, sorted(outside)


def test_the_core_is_read_in_one_sitting():
    assert sum(core.lines().values()) <= core.LIMIT == 1600
    assert len(core.READ) <= 15 and sum(core.lines()[name] for name in core.READ) <= 1000


def test_the_page_and_its_picture_are_what_the_script_makes():
    tables = {"files": core.files(), "token": core.token()}
    assert tables == {mark: record.between("docs/core.md", mark) for mark in tables}
    assert core.PICTURE.read_text() == core.drawing()


def test_the_numbers_of_the_token_by_hand():
    """From the formulas of GRPO, PPO's clip, the softmax and AdamW's first step."""
    x = core.way()
    assert x["adv"] == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1e-6))
    assert x["w"] == 1 / (4 * 2)
    assert x["ratio"] == pytest.approx(math.exp(x["logp"] - x["sampler"])) and 0.8 < x["ratio"] < 1.2
    assert x["loss"] == pytest.approx(-x["ratio"] * x["adv"])
    assert x["share"] == x["w"] * x["loss"]
    assert x["cut"] == pytest.approx(x["grad"], rel=1e-12)
    assert x["update"] == pytest.approx(core.LR, rel=1e-6)  # against the sign of the gradient
    assert x["grad"] < 0 < x["after"] - x["logp"]

    # tokens 7, 8, 7 and 9 follow token 6: each pulls the logit of 7 by its p, and those that are 7 by 1
    p = math.exp(x["logp"])
    rows = [(1 / 8, 1, "7"), (1 / 8, -1, "8"), (1 / 12, 1, "7"), (1 / 8, -1, "9")]
    total = 0.0
    for w, sign, word in rows:
        ratio = x["ratios"][word]
        if (sign > 0 and ratio > 1.2) or (sign < 0 and ratio < 0.8):
            continue
        total -= w * ratio * sign * abs(x["adv"]) * ((word == "7") - p)
    assert x["grad"] == pytest.approx(total)
