"""Options by subject: a script's Config inherits them, and stays one flat record with flat flags."""

import dataclasses
import inspect
import math
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from each_case import each
from test_house import load_script

from rft_fn import limits, parsing, reward
from rft_fn.engine.vllm.surroundings import import_vllm
from rft_fn.limits import Count, Free, Positive
from rft_fn.run import files, options
from rft_fn.run.cli import guard
from rft_fn.run.model_options import exclusions

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "train_scripts").glob("*.py"))
CONFIGS = {name: load_script(name).Config for name in SCRIPTS}


@dataclass(frozen=True)
class Config(options.Run, options.Optimizer, options.Policy, options.Data, options.Model):
    """A script of a user."""

    beta: Positive = 0.1  # hold on the reference
    lr: Positive = 3e-4  # learning rate of the policy
    save_every: Free[Count] = 7  # steps between checkpoints


def parsed(*args):
    return parsing.parse(Config, parsing.qualify(args, Config))


def test_a_composed_config_is_flat():
    """One name on the command line, in Python and in config.json."""
    cfg = parsed("--lr", "0.5", "--beta", "2", "--sp-size", "2", "--strategy.bf16", "--data", "a", "b")
    assert (cfg.lr, cfg.beta, cfg.data, cfg.seed) == (0.5, 2.0, ("a", "b"), 0)
    assert cfg.strategy.sp_size == 2 and cfg.strategy.bf16
    assert cfg == Config(lr=0.5, beta=2.0, data=("a", "b"), strategy=cfg.strategy)
    written = files.jsonable(cfg)
    assert set(written) == {f.name for f in dataclasses.fields(Config)} and written["lr"] == 0.5


def test_a_switch_may_have_a_word():
    """True without one, as before; the same in the file of a run."""
    of = {(): False, ("",): True, ("=True",): True, (" slices",): "slices", ("=host",): "host"}
    for words, want in of.items():
        args = [part for word in words for part in f"--gradient-checkpointing{word}".split()]
        assert parsed(*args, "--lr", "0.5").gradient_checkpointing == want
        assert parsed("--lr", "0.5", *args).gradient_checkpointing == want
    assert parsed("--gradient_checkpointing", "--no-gradient-checkpointing").gradient_checkpointing is False
    for word in ("fast", "1"):
        with pytest.raises(ValueError, match=f"^gradient_checkpointing: expected one of .*got '{word}'"):
            parsed("--gradient-checkpointing", word)
    with pytest.raises(ValueError, match=r"^gradient_checkpointing: expected one of False, .*'fast'$"):
        Config(gradient_checkpointing="fast")


def test_a_default_is_changed_for_one_script_alone():
    assert Config().lr == 3e-4 and options.Optimizer().lr == 1e-3
    assert Config().save_every == 7 and options.Run().save_every == 25


def test_what_may_change_on_resume_is_inherited():
    """Also for an option whose line was written again, and for those of the strategy."""
    free = limits.free(Config)
    assert {"budget", "save_every", "out", "strategy.fsdp"} <= free
    assert free.isdisjoint({"lr", "beta", "model", "seed", "strategy.bf16"})


def numbers(config):
    """Every number among the options, also those that may be None."""
    for f in dataclasses.fields(config):
        kinds = re.findall(r"float|Positive|PositiveShare|AtLeast0|Share|Decay|Above1|Finite", str(f.type))
        if kinds or "float" in repr(f.type):
            yield f.name


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_takes_a_number_that_is_none(name):
    """NaN and inf are outside of every limit, and the error names the option."""
    required = {f.name: "x" for f in dataclasses.fields(CONFIGS[name]) if is_required(f)}
    tried = 0
    for option in numbers(CONFIGS[name]):
        for x in (math.nan, math.inf, -math.inf):
            with pytest.raises(ValueError, match=rf"^{option}: expected an? (number|integer) in .*got {x}"):
                CONFIGS[name](**required, **{option: x})
            tried += 1
    assert tried or name in ("export", "replay")


def is_required(field):
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


BAD = [
    ({"lr": 0.0}, "lr: expected a number in (0, inf), got 0.0"),
    ({"beta": -1.0}, "beta: expected a number in (0, inf), got -1.0"),
    ({"budget": 0}, "budget: expected an integer in [1, inf), got 0"),
    ({"lr_end": 1.1}, "lr_end: expected a number in [0, 1], got 1.1"),
    ({"beta1": 1.0}, "beta1: expected a number in [0, 1), got 1.0"),
    ({"steps": 0}, "steps: expected an integer in [1, inf), or None, got 0"),
    ({"schedule": "x"}, "schedule: expected one of linear, cosine, constant, got 'x'"),
    ({"data": ("a", 1)}, "data[1]: expected a text, got 1"),
]


@each("name", ["grpo", "ppo", "distill", "multi_turn"])
def test_what_learns_from_samples_draws_them(name):
    """At a temperature of 0 there is no distribution to learn; an evaluation may be greedy."""
    for x in (0, 0.0):
        with pytest.raises(ValueError, match=r"^temperature: expected > 0 to learn from samples, got 0$"):
            CONFIGS[name](temperature=x, **{"teacher": ("ema",)} if name == "distill" else {})
    assert CONFIGS["evaluate"](model="tiny", temperature=0).temperature == 0


@each(("given", "line"), BAD)
def test_limits_are_those_of_the_subject(given, line):
    """In Python and on the command line alike."""
    with pytest.raises(ValueError) as error:
        Config(**given)
    assert str(error.value) == line


source = cache(inspect.getsource)


def comment(config, name):
    """The comment behind an option, in the class that declares it last."""
    for base in config.__mro__:
        found = re.search(rf"^    {name}: .*?  # (.*)", source(base), re.M)
        if found:
            return found[1]
    raise AssertionError(f"{name} has no help")


def shown(config, columns, monkeypatch, capsys, prog="mine.py", words=("--help", "all")):
    """The lines of --help all, or of other words, in a terminal of some width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as end:
        parsing.parse(config, ["--steps", "3", *words], prog=prog)
    assert end.value.code is None
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("columns", [80, 120])
def test_help_has_a_line_for_every_option(name, columns, capsys, monkeypatch):
    """Inherited ones too, in the terminal's width, without an empty default."""
    lines = shown(CONFIGS[name], columns, monkeypatch, capsys)
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    for f in dataclasses.fields(CONFIGS[name]):
        if f.name != "strategy" and f.default_factory is not options.Limits:
            assert " ".join(comment(CONFIGS[name], f.name).split()) in text
    assert not re.search(r"default: (\)|'')", text) and str(Path.cwd()) not in text


@dataclass(frozen=True)
class Shared(options.Options):
    """A record that the scripts of a user share."""

    turns: Count = 2  # turns of a game


@dataclass(frozen=True)
class Game(Shared, Config):
    """A script that inherits from another one."""

    rules: tuple[str, ...] = ("a", "b")  # of the game
    strict: bool = True  # as they say
    lr: Positive = 1e-2  # another help and default


def test_help_is_grouped_by_subject(capsys, monkeypatch):
    """A script's own options come first; one that it repeats stays in its subject, with the new help."""
    lines = shown(Game, 80, monkeypatch, capsys)
    heads = [line for line in lines if line and line[0].isalpha()][2:]  # behind the usage and the summary
    assert heads[:-2] == ["mine", "Model", "Data", "Optimizer", "Updates", "Run", "Config", "Shared"]
    assert heads[-2] == "Strategy (strategy. may be left out of a name that no other option has)"
    assert heads[-1] == "Exclusions (options that do not go together)"
    place = {head: lines.index(head) for head in heads}
    assert lines[:4] == ["usage: mine.py [OPTIONS]", "", "A script that inherits from another one.", ""]
    assert lines[place["mine"] + 1 : place["Model"] - 1] == [
        "  --rules STR ...         of the game (default: a b)",
        "  --[no-]strict           as they say (default: True)",
        "  -h, --help              show this help and exit",
    ]
    assert (
        lines[place["Optimizer"] + 1] == "  --lr FLOAT              another help and default (default: 0.01)"
    )
    assert lines[place["Config"] + 1] == "  --beta FLOAT            hold on the reference (default: 0.1)"
    assert lines[place["Shared"] + 1] == "  --turns INT             turns of a game (default: 2)"
    assert "  --save-every INT        steps between checkpoints (default: 7)" in lines
    assert "  --quantize {int8,nf4}   precision of the frozen base under adapters; empty: as" in lines


def test_the_first_words_of_help_are_what_one_types(capsys, monkeypatch):
    """Arguments without a name come before the options, and an installed script is no long path."""
    (usage, *_) = shown(CONFIGS["export"], 80, monkeypatch, capsys, prog="rft export")
    assert usage == "usage: rft export RUN [OPTIONS]"
    monkeypatch.setattr("sys.argv", ["/usr/lib/site-packages/rft_scripts/export.py", "--help", "all"])
    (usage, *_) = shown(CONFIGS["export"], 80, monkeypatch, capsys, prog=None)
    assert usage == "usage: export.py RUN [OPTIONS]"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_help_is_one_screen(name, capsys, monkeypatch):
    """What the script does, a command that it takes, what most runs set, and where the rest is."""
    config = CONFIGS[name]
    start = {"prog": f"train_scripts/{name}.py", "words": ["--help"]}
    lines = shown(config, 100, monkeypatch, capsys, **start)
    text = "\n".join(lines)
    assert 10 <= len(lines) <= 45 and max(map(len, lines)) <= 100
    assert lines[0] == inspect.getdoc(sys.modules[config.__module__]).partition("\n")[0] and lines[1] == ""

    # the command is one that the script takes
    command = text.split("\n\n")[1].replace("\\\n", " ")
    assert command.startswith(f"  python train_scripts/{name}.py ")
    parsing.parse(config, parsing.qualify(shlex.split(command)[2:], config))

    # its options are among all of them, by names that the command line takes
    flags = re.findall(r"^  --(?:\[no-\])?([\w.-]+)", text.split("\n\n", 2)[2], re.M)
    assert len(flags) <= 25 and {flag.replace("-", "_") for flag in flags} - {"config"} <= parsing.names(
        config
    )
    whole = " ".join(shown(config, 100, monkeypatch, capsys, **start | {"words": ["--help", "all"]}))
    assert all(re.search(rf"[].-]{flag} ", whole) for flag in flags)

    # in a narrow terminal the same lines, broken
    narrow = shown(config, 80, monkeypatch, capsys, **start)
    assert max(map(len, narrow)) <= 80 and sum(line.startswith("  --") for line in narrow) == len(flags)


def test_the_first_help_has_the_defaults_of_the_script(capsys, monkeypatch):
    """The model and its data first, then what the script itself is about."""
    lines = shown(CONFIGS["grpo"], 100, monkeypatch, capsys, words=["--help"])
    order = [line.split()[0] for line in lines if line.startswith("  --")]
    assert order[:8] == [
        "--model", "--data", "--template", "--lora-rank", "--budget", "--reward", "--algorithm", "--kl",
    ]  # fmt: skip
    assert {"--prompts", "--group", "--max-new", "--steps", "--lr", "--engine-type", "--out"} <= set(order)
    assert "  --group INT          responses per prompt (default: 16)" in lines
    assert lines[-2].startswith("--help all shows all ") and lines[-1].endswith("loss, strategy, exclusions")


@pytest.mark.parametrize(
    ("words", "first"), [(["--help", "optimizer"], "Optimizer"), (["--help=loss"], "Loss (loss. may be left")]
)
def test_help_of_a_subject_is_its_part_of_the_whole(words, first, capsys, monkeypatch):
    whole = "\n".join(shown(CONFIGS["grpo"], 80, monkeypatch, capsys))
    lines = shown(CONFIGS["grpo"], 80, monkeypatch, capsys, words=words)
    assert lines[0].startswith(first) and len(lines) > 5 and "\n".join(lines) in whole


def test_every_subject_of_help_has_a_word(capsys, monkeypatch):
    """The words that the first screen lists are all headings of the whole."""
    for name in SCRIPTS:
        whole = shown(CONFIGS[name], 100, monkeypatch, capsys, prog=f"{name}.py")
        heads = [
            whole[i + 1] for i, line in enumerate(whole[3:-1], 3) if not line and whole[i + 2][:2] == "  "
        ]
        screen = " ".join(shown(CONFIGS[name], 100, monkeypatch, capsys, prog=f"{name}.py", words=["-h"]))
        listed = screen.partition("those of a subject: ")[2].split(", ")
        assert [head.split()[0].lower() for head in heads] == listed or (listed == [""] and len(heads) == 1)


ON = {
    "freeze": ("visual",), "lora_rank": 4, "partial": 2, "ahead": 1, "rounds": 2, "curriculum": 3,
    "ptx_response": "{a}", "ptx_messages": ("m",), "keep_heads": True, "quantize": "int8", "messages": ("m",),
    "hint": "{q}", "on_policy": 0.5, "rl": 0.1, "ref_every": 5, "rollouts": "a", "sampler": "b",
    "reference": "exact",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SCRIPTS if exclusions(CONFIGS[name])])
def test_a_pair_that_excludes_each_other_is_refused_and_shown(name, capsys, monkeypatch):
    """Either alone is taken as far as the pair goes; the reason is in the error and in the help."""
    config = CONFIGS[name]
    shown_pairs = " ".join(
        " ".join(shown(config, 100, monkeypatch, capsys, words=["--help", "exclusions"])).split()
    )
    more = {"teacher": ("a",)} if name == "distill" else {}
    for (one, other), why in exclusions(config).items():
        reason, _, remedy = why.partition("; ")
        with pytest.raises(
            ValueError, match=rf"^{one}: expected .* with {other} .*, {reason}, got .*{remedy}$"
        ):
            config(**more | {one: ON[one], other: ON[other]})
        options = [f"--{x.replace('_', '-')}" for x in (one, other)]
        assert f"{options[0]} not with {options[1]}, {why}" in shown_pairs
    for alone in {x for pair in exclusions(config) for x in pair} - {"ptx_messages"}:
        config(**more | {alone: ON[alone]})


def test_no_pair_names_an_option_that_is_nowhere():
    kinds = {
        kind for config in CONFIGS.values() for kind in config.__mro__ if issubclass(kind, options.Options)
    }
    said = {pair for kind in kinds for pair in kind.__excludes__}
    assert said == {pair for config in CONFIGS.values() for pair in exclusions(config)} and len(said) > 8


def test_a_word_that_is_no_subject(capsys):
    with pytest.raises(ValueError, match=r"^help: expected all, or one of grpo, .* 'optimiser'; did you"):
        parsing.parse(CONFIGS["grpo"], ["--help", "optimiser"], prog="grpo.py")


def test_an_installed_script_shows_the_command_that_starts_it(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/lib/site-packages/rft_scripts/export.py"])
    assert "  rft run export runs/grpo" in shown(CONFIGS["export"], 80, monkeypatch, capsys, None, ["--help"])


def test_a_script_that_says_nothing_shows_what_it_adds(capsys, monkeypatch):
    lines = shown(Game, 80, monkeypatch, capsys, words=["--help"])
    assert "--rules STR ... of the game (default: a b)" in [" ".join(line.split()) for line in lines]
    assert not any("--turns" in line for line in lines) and any("--model" in line for line in lines)


@pytest.mark.parametrize(("package", "act"), [("math_verify", reward.math), ("vllm", import_vllm)])
def test_a_missing_package_ends_a_script_with_one_line(package, act, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        guard(lambda _: act(), None)
    printed = capsys.readouterr().err
    assert end.value.code == 2 and "install" in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    ("every", "want"),
    [
        (None, [None, False, False, None]),  # where the usual packs are halves already
        (5, [True, False, True, True]),
        (0, [False, False, False, False]),
    ],
)
def test_the_noise_is_of_the_first_update_of_some_steps(every, want):
    cfg = Config(noise_every=every)
    assert [cfg.halves(step) for step in (0, 4, 5, 10)] == want
    assert [cfg.halves(step, 1) for step in (0, 5, 10)] == [False] * 3
