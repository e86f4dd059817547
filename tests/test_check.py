"""Contracts on shapes and options: one line, with the name of the argument first, then expected and got."""

import json
import time
from dataclasses import dataclass, field
from math import inf, nan
from typing import Annotated, Literal

import pytest
import torch
from each_case import each

from rft_fn import advantage, algorithm, check, loss, metric, optim, packing, reward_shaping, segment, weight
from rft_fn.logprob import log_probs_from_logits
from rft_fn.types import Rollout, Sampling, experience

Z = torch.zeros
B = lambda *s: torch.ones(s, dtype=torch.bool)  # noqa: E731


def shapes(**args):
    return lambda: check.shapes(**args)


@each(
    ("call", "message"),
    [
        (shapes(old_logp=(Z(7), "T"), adv=(Z(6), "T")), "adv: expected [T] = [7], got [6]"),
        (shapes(reward=(Z(4), "N G")), "reward: expected [N, G] = [N, G], got [4]"),
        (shapes(r=(Z(2, 3), "N G"), x=(Z(3, 2), "N G")), "x: expected [N, G] = [2, 3], got [3, 2]"),
        (shapes(x=(Z(2, 3), "N N")), "x: expected [N, N] = [N, N], got [2, 3]"),
        (shapes(x=(Z(2, 4), "N 3")), "x: expected [N, 3] = [N, 3], got [2, 4]"),
        (
            shapes(a=(Z(2, 3, 5), "... S"), b=(Z(4, 5), "... S")),
            "b: expected [..., S] = [2, 3, 5], got [4, 5]",
        ),
        (shapes(a=(Z(5), "... S"), b=(Z(4), "... S")), "b: expected [..., S] = [5], got [4]"),
        (shapes(a=(Z(()), "... S")), "a: expected [..., S] = [..., S], got []"),
    ],
)
def test_message(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_sizes_come_back_and_none_is_passed_over():
    sizes = check.shapes(a=(Z(2, 3, 4), "... S"), gone=(None, "N G"), b=(Z(4), "S"), c=(Z(()), ""))
    assert sizes == {"...": (2, 3), "S": 4}


ROLLOUT = Rollout(
    tokens=Z(2, 5).long(),
    mask=B(2, 5),
    logp=Z(2, 5),
    length=Z(2).long(),
    truncated=B(2),
    group=Z(2),
    version=Z(2),
)


@each(
    ("call", "message"),
    [
        (lambda: segment.sum(Z(3), B(3), Z(4).long(), 1), "seq: expected [T] = [3], got [4]"),
        (lambda: segment.max(Z(3), B(2), Z(3).long(), 1), "mask: expected [T] = [3], got [2]"),
        (lambda: advantage.grpo(Z(4)), "reward: expected [N, G] = [N, G], got [4]"),
        (lambda: advantage.gae(Z(2, 3), Z(2, 4), Z(2, 3)), "value: expected [..., S] = [2, 3], got [2, 4]"),
        (lambda: advantage.whiten(Z(3), B(4)), "mask: expected [...] = [3], got [4]"),
        (lambda: weight.token_mean(B(3)), "mask: expected [B, S] = [B, S], got [3]"),
        (lambda: weight.truncated_is(Z(2), Z(3), Z(2)), "old_logp: expected [...] = [2], got [3]"),
        (lambda: weight.constant(B(1, 2), 0), "length: expected > 0 tokens, got 0"),
        (lambda: loss.ppo_clip(Z(3), Z(3), Z(1)), "adv: expected [...] = [3], got [1]"),
        (lambda: loss.value_clip(Z(3), Z(2), Z(3)), "old_value: expected [...] = [3], got [2]"),
        (lambda: loss.kl(Z(3), Z(2, 3)), "ref_logp: expected [...] = [3], got [2, 3]"),
        (lambda: log_probs_from_logits(Z(3, 9), Z(4).long()), "logits: expected [...] = [4], got [3]"),
        (
            lambda: reward_shaping.kl_in_reward(Z(3), Z(2, 5), Z(2, 5), B(2, 5), coef=0.1),
            "logp: expected [B, S] = [3, S], got [2, 5]",
        ),
        (lambda: reward_shaping.clip(Z(3), 0.0), "limit: expected > 0, got 0.0"),
        (
            lambda: reward_shaping.overlong_penalty(Z(1), max_new=4, buffer=5),
            "buffer: expected 0 < buffer <=",
        ),
        (lambda: optim.clip_by_global_norm(0.0), "max_norm: expected > 0, got 0.0"),
        (lambda: optim.ema(1.0), "decay: expected 0 <= decay < 1, got 1.0"),
        (lambda: optim.warmup_linear(1.0, 5, 4), "warmup: expected 0 <= warmup <= total = 4 steps, got 5"),
        (lambda: optim.ema_params(()), "opt: expected a state with optim.ema in its chain, found none"),
        (lambda: packing.assign([3, 9], 8), "budget: expected at least 9 tokens, the size of row 1, got 8"),
        (lambda: packing.unpack([Z(1)], [], Z(1, 2)), "x: expected 0 tensors, one for each pack, got 1"),
        (lambda: algorithm.get_algorithm("grpoo"), "algorithm: expected one of grpo, "),
        (lambda: experience(ROLLOUT, adv=Z(3, 1), w=Z(2, 5)), "adv: expected [B, S] = [2, 5], got [3, 5]"),
        (lambda: experience(ROLLOUT, adv=Z(2, 4), w=Z(2, 5)), "adv: expected [B, S] = [2, 5], got [2, 4]"),
        (
            lambda: experience(ROLLOUT, adv=Z(2), w=Z(2, 5), ret=Z(2)),
            "ret: expected [B, S] = [2, 5], got [2]",
        ),
        (lambda: Sampling(temperature=-1.0), "temperature: expected a number in [0, inf), got -1.0"),
        (lambda: Sampling(temperature=float("nan")), "temperature: expected a number in [0, inf), got nan"),
        (lambda: Sampling(top_p=0.0), "top_p: expected a number in (0, 1], got 0.0"),
        (lambda: Sampling(top_k=-1), "top_k: expected an integer in [0, inf), got -1"),
        (lambda: Sampling(max_new=0), "max_new: expected an integer in [1, inf), got 0"),
        (
            lambda: metric.merge({"a": metric.sum(Z(1))}, {"a": metric.max(Z(1), B(1))}),
            "metric 'a': expected Sum, got Max",
        ),
    ],
)
def test_public_functions_name_the_field_what_they_expected_and_what_they_got(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)


def test_what_is_missing_is_named():
    check.given(adv=1, w=0.0)
    with pytest.raises(ValueError, match=r"^ret: expected a tensor, got None; give it to rft_fn.experience"):
        check.given(adv=1, ret=None, value=None)


@dataclass(frozen=True)
class Part:
    size: check.Free[check.Count] = 1


@dataclass(frozen=True)
class Options:
    lr: check.Positive = 1e-3
    end: check.Share = 0.1
    decay: check.Decay = 0.0
    steps: check.Count = 1
    warmup: check.Whole = 0
    shift: check.Finite = 0.0
    angle: Annotated[float, check.Range(-1, 1, open_low=True)] = 0.0
    high: check.Positive | None = None
    shape: Literal["line", "cosine"] = "line"
    names: tuple[str, ...] = ()
    k: tuple[check.Count, ...] = (1,)
    out: check.Free[check.Filled] = "runs/x"
    on: bool = False
    seed: check.Seed = 0  # an integer of any size is compared, also one beyond all floats
    part: Part = field(default_factory=Part)

    __post_init__ = check.fields


@each(
    ("options", "message"),
    [
        ({"lr": nan}, "lr: expected a number in (0, inf), got nan"),
        ({"lr": inf}, "lr: expected a number in (0, inf), got inf"),
        ({"lr": 0.0}, "lr: expected a number in (0, inf), got 0.0"),
        ({"lr": "1"}, "lr: expected a number in (0, inf), got '1'"),
        ({"end": 1.1}, "end: expected a number in [0, 1], got 1.1"),
        ({"decay": 1.0}, "decay: expected a number in [0, 1), got 1.0"),
        ({"steps": 0}, "steps: expected an integer in [1, inf), got 0"),
        ({"steps": 2.0}, "steps: expected an integer in [1, inf), got 2.0"),
        ({"steps": True}, "steps: expected an integer in [1, inf), got True"),
        ({"warmup": -1}, "warmup: expected an integer in [0, inf), got -1"),
        ({"shift": -inf}, "shift: expected a number in (-inf, inf), got -inf"),
        ({"angle": -1.0}, "angle: expected a number in (-1, 1], got -1.0"),
        ({"high": 0.0}, "high: expected a number in (0, inf), or None, got 0.0"),
        ({"shape": "curve"}, "shape: expected one of line, cosine, got 'curve'"),
        ({"names": "abc"}, "names: expected a tuple, got 'abc'"),
        ({"names": ("a", 1)}, "names[1]: expected a text, got 1"),
        ({"k": (1, 0)}, "k[1]: expected an integer in [1, inf), got 0"),
        ({"out": None}, "out: expected a text, got None"),
        ({"out": ""}, "out: expected a text that is not empty, got ''"),
        ({"out": " \t"}, r"out: expected a text that is not empty, got ' \t'"),
        ({"steps": 10**20}, f"steps: expected an integer of at most 64 bits, got {10**20}"),
        ({"lr": 1e308}, "lr: expected a number in [-3.4e+38, 3.4e+38], got 1e+308"),
        ({"shift": -(10**39)}, f"shift: expected a number in [-3.4e+38, 3.4e+38], got {-(10**39)}"),
        ({"k": (1, 2**63)}, f"k[1]: expected an integer of at most 64 bits, got {2**63}"),
        ({"on": "yes"}, "on: expected True or False, got 'yes'"),
        ({"part": Part(0)}, "part.size: expected an integer in [1, inf), got 0"),
        ({"seed": 10**400}, f"seed: expected an integer in [{-(2**63)}, {2**63 - 1}], got {10**400}"),
    ],
)
def test_an_option_outside_of_its_limits_is_named(options, message):
    with pytest.raises(ValueError) as error:
        Options(**options)
    assert str(error.value) == message


def test_limits_hold_what_is_inside_and_free_options_are_known():
    Options(lr=1, end=1.0, decay=0.99, warmup=0, angle=1.0, high=None, shape="cosine", k=(1, 8))
    Options(high=0.5, shift=-3.0, part=Part(7), steps=2**63 - 1, out="a b")
    assert check.free(Options) == {"out", "part.size"}


def nested(levels, inner="1"):
    return "[" * levels + inner + "]" * levels


def test_json_is_read_as_python_reads_it_up_to_the_limit_of_depth():
    for text in ('{"a": [1, 2.5, null, "[[[{\\"["]}', "3", ' "x" ', nested(100), '[{"a": {}}, []]', "[NaN]"):
        assert repr(check.parse_json(text)) == repr(json.loads(text)), text
        assert repr(check.parse_json(text.encode())) == repr(json.loads(text)), text
    assert check.parse_json(nested(3), depth=3) == [[[1]]]
    assert check.parse_json("[" + "[]," * 500 + "[]]", depth=2) == [[]] * 501  # many, and none is deep
    assert check.parse_json(json.dumps("{[" * 5000)) == "{[" * 5000  # brackets in a text are none
    for encoding in ("utf-8-sig", "utf-16"):
        assert check.parse_json('{"a": "ä"}'.encode(encoding)) == {"a": "ä"}


@each("levels", [101, 1_200, 100_000])
@each("opening", ["[", '{"a":', '["\\"]",{"a":'])
@each("around", [0, 700])
def test_brackets_beyond_the_limit_are_an_error_wherever_the_caller_stands(levels, opening, around):
    def call():
        with pytest.raises(ValueError, match="brackets nest deeper than 100"):
            check.parse_json(opening * levels)
        with pytest.raises(ValueError, match="brackets nest deeper than 100"):
            check.json_at("call " + opening * levels, 5)

    def stand(depth):
        return call() if depth == 0 else stand(depth - 1)

    stand(around)


def test_a_value_at_a_place_ends_there_whatever_stands_behind():
    text = 'x{"a": [1]} ' + "[" * 5000
    assert check.json_at(text, 1) == ({"a": [1]}, 11)
    assert check.json_at("3 " + "[" * 5000) == (3, 1)
    for broken in ("", "{", '{"a', "nul", '"' + "\\" * 4001):
        with pytest.raises(ValueError):
            check.json_at(broken)
        with pytest.raises(ValueError):
            check.parse_json(broken)


@pytest.mark.parametrize("text", ['"' + '\\"' * 300_000, '{"a' * 300_000, '"' * 300_001, "\\" * 300_000])
def test_the_time_for_broken_json_grows_with_its_length(text):
    start = time.process_time()
    with pytest.raises(ValueError):
        check.parse_json(text)
    assert time.process_time() - start < 2  # an hour, were it the square


def test_what_is_printed_steers_no_terminal():
    """Colours, titles, links, a rewritten line, 8-bit controls, reversed text and lone surrogates."""
    assert check.printable("a\x1b[2J\x1b]0;t\x07\rb\x9b1m\x7f") == r"a\x1b[2J\x1b]0;t\x07\rb\x9b1m\x7f"
    assert check.printable("\u202eb\u2066\ud800") == r"\u202eb\u2066\ud800"
    assert check.printable(ValueError("\0")) == r"\x00"
    plain = "\ta\n\\x1b é 你好 🙂 עברית"
    assert check.printable(plain) == plain
    for code in [*range(32), *range(127, 160)]:
        assert (check.printable(chr(code)) == chr(code)) == (chr(code) in "\t\n")
