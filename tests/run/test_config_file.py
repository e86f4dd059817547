"""--config FILE means what its options mean as flags; a mistake in it is one line with file and key."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import forks
import pytest
from test_house import load_script

import rft_fn as rft
from rft_fn import parsing
from rft_fn.run import config_file, earlier_run, files

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "train_scripts").glob("*.py"))
CONFIGS = {name: load_script(name).Config for name in SCRIPTS}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parsed(*args, script="grpo"):
    return config_file.parse(CONFIGS[script], parsing.qualify(args, CONFIGS[script]))


def given(text, *args, script="grpo", name="run.yaml"):
    """The config of a command line with a file of this text."""
    Path(name).write_text(text)
    return parsed("--config", name, *args, script=script)


TAUGHT = ["--teacher", "somewhere"]
ALIKE = {
    "numbers, also as texts": (
        "lr: 1e-3\nsteps: '5'\nkl: 1\nseed: -1",
        "--lr 1e-3 --steps 5 --kl 1 --seed=-1",
    ),
    "dashes": ("lr-end: 0.5\nmax-norm: 2", "--lr-end .5 --max-norm 2"),
    "None": ("steps: null\nmismatch: ~\nsystem: null\nema: 0.5", "--ema .5"),
    "None as a text is None": ("system: None\ndual: None", ""),
    "a list": ("data: [sort_digits:1, sort_digits:2]\nfreeze: []", "--data sort_digits:1 sort_digits:2"),
    "one of a list": ("data: reverse:1", "--data reverse:1"),
    "a choice": ("mismatch: none\nschedule: cosine", "--mismatch none --schedule cosine"),
    "switches": ("lora_merge: false\noverride: yes", "--no-lora-merge --override"),
    "texts": ("template: '--a {short}'\nsystem: ''", "--template=--a\\ {short} --system="),
    "a part": ("strategy:\n  fsdp: true\n  keep-memory: false\n  extra: {}", "--fsdp --no-keep-memory"),
    "a part with a dot": (
        "strategy.max_norm: 2\nstrategy.max-skips: 3",
        "--strategy.max-norm 2 --max-skips 3",
    ),
    "a part without its name": ("sp_size: 2\nfsdp: true", "--strategy.sp-size 2 --strategy.fsdp"),
    "an alias": ("clip_low: 0.1\nclip-high: 0.3\ndual: 3", "--loss.low .1 --loss.high .3 --loss.dual 3"),
    "nothing": ("# nothing", ""),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_file_is_its_flags(case):
    text, line = ALIKE[case]
    flags = [word.replace("\0", " ") for word in line.replace("\\ ", "\0").split()]
    assert given(text) == parsed(*flags)


def test_an_alias_is_the_option():
    """On a command line, in a file and in the folder of a run that was begun when it was an option."""
    wanted = parsed("--loss.low", "0.1", "--loss.dual=3")
    assert parsed("--clip-low", "0.1", "--dual=3") == wanted and wanted.loss.given == {
        "low": 0.1,
        "dual": 3.0,
    }
    assert given("clip_low: 0.2", "--loss.low", "0.1", "--dual", "3") == wanted  # flags win
    assert parsed("--clip-low", "0.1", *TAUGHT, script="distill").clip_low == 0.1  # its `loss` is a text
    with pytest.raises(ValueError, match=r"^loss.low: expected it once, got it as clip_low too$"):
        parsed("--clip-low", "0.1", "--loss.low", "0.2")
    with pytest.raises(ValueError, match=r"^config run.yaml: loss.low: expected it once, got 0.1 and 0.2$"):
        given("clip_low: 0.1\nloss: {low: 0.2}")


def test_a_run_that_was_begun_with_an_alias_as_an_option_goes_on(monkeypatch):
    """Its config.json has clip_low, clip_high and dual beside `loss`."""
    cfg = parsed("--clip-low", "0.1", "--dual", "3", "--out", "r", "--steps", "2")
    Path("r").mkdir()
    rft.run.Run("r", cfg, total=2).write(0, {"loss": 1.0})
    path = Path("r/config.json")
    stored = json.loads(path.read_text())
    assert "clip_low" not in stored
    none = dict.fromkeys(stored["loss"])
    old = {"clip_low": 0.1, "clip_high": None, "dual": 3.0, "loss": none}
    path.write_text(json.dumps(stored | old))
    rft.run.Run("r", cfg, total=2)
    with pytest.raises(ValueError, match=r"other arguments: loss.low was 0.1 and is 0.2;"):
        rft.run.Run("r", parsed("--clip-low", "0.2", "--dual", "3", "--out", "r", "--steps", "2"), total=2)
    assert config_file.parse(CONFIGS["grpo"], ["--config", "r", "--out", "r"]).loss == cfg.loss
    path.write_text(json.dumps({name: x for name, x in (stored | old).items() if name != "loss"}))  # of 0.1
    rft.run.Run("r", cfg, total=2)


def test_flags_win():
    Path("run.yaml").write_text(
        "lr: 0.5\ndata: [a, b]\nstrategy: {fsdp: true, sp_size: 2}\nlora_merge: false"
    )
    flags = ["--lr", "0.25", "--data", "c", "--no-fsdp", "--lora-merge"]
    want = parsed("--sp-size", "2", *flags)
    assert parsed("--config", "run.yaml", *flags) == parsed(*flags, "--config=run.yaml") == want
    assert want.lr == 0.25 and want.data == ("c",) and want.strategy.sp_size == 2


def test_json_is_read_too_and_a_first_argument_stays_one():
    assert given('{"lr": 0.01, "strategy": {"bf16": true}}', name="a.json") == parsed("--lr", ".01", "--bf16")
    assert given("best: true", "runs/a", script="export") == parsed("runs/a", "--best", script="export")
    with pytest.raises(ValueError, match=r"^config run.yaml: unrecognized options: run; "):
        given("run: runs/b", "runs/a", script="export")
    with pytest.raises(ValueError, match=r"^config run.yaml: unrecognized options: strategy.extra"):
        given("strategy: {extra: 1}")  # a mapping that only Python gives


WRONG = {
    "an unknown key": ("lrr: 1", "unrecognized options: lrr; did you mean lr?"),
    "a key in capitals": ("LR: 1", "unrecognized options: LR; did you mean lr?"),
    "a key twice": ("lr: 1\nmodel: tiny\nlr: 2", "lr: expected it once, got it in line 1 and in line 3"),
    "unknown keys": ("qqq: 1\nzzz: 2", "unrecognized options: qqq, zzz; --help lists the options"),
    "an unknown key of a part": (
        "strategy: {fsdpp: 1}",
        "unrecognized options: strategy.fsdpp; did you mean strategy.fsdp?",
    ),
    "a key of TRL": ("num_generations: 8", "num_generations of TRL is --group here"),
    "nested keys of verl": (
        "data:\n  train_batch_size: 8",
        "data.train_batch_size of verl is --prompts here (prompts per step)",
    ),
    "a text for a number": ("lr: abc", "lr: expected a number, got 'abc'"),
    "a number out of its limits": (
        "strategy: {sp_size: 0}",
        "sp_size: expected an integer in [1, inf), got 0",
    ),
    "a fraction for a count": ("steps: 2.5", "steps: expected an integer, or None, got '2.5'"),
    "no number": ("lr: .nan", "lr: expected a number in (0, inf), got nan"),
    "a list for one value": ("lr: [1, 2]", "lr: expected one value, got [1, 2]"),
    "a mapping in a list": ("data:\n - a: 1", "data: expected one value, got {'a': 1}"),
    "a text for a switch": ("bf16: 'on'", "strategy.bf16: expected True or False, got 'on'"),
    "nothing for a text": ("template:", "template: expected a text, got None; quotes make it one"),
    "a switch for a text": ("system: no", "system: expected a text, got False; quotes make it one"),
    "another choice": ("schedule: foo", "schedule: expected one of linear, cosine, constant, got 'foo'"),
    "a part that is none": ("strategy: 3", "strategy: expected options by their names, got 3"),
    "an option by two names": (
        "strategy: {fsdp: true}\nfsdp: false",
        "strategy.fsdp: expected it once, got True and False",
    ),
    "options that exclude each other": (
        "fsdp: true\nzero_stage: 2",
        "fsdp, zero_stage: expected one of them, got True and 2",
    ),
    "a list of options": ("- lr", "expected options by their names, got ['lr']"),
    "bad YAML": ("lr: 1\nsteps: [1", "expected YAML: expected ',' or ']', but got '<stream end>' in line 2"),
    "YAML that is nested for ever": (
        "a: &x {b: *x}",
        "a.b.b.b.b.b.b.b: expected options, got parts within parts",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_file_is_one_line(case):
    text, line = WRONG[case]
    with pytest.raises(ValueError) as error:
        given(text)
    assert str(error.value) == f"config run.yaml: {line}"


def test_mistakes_of_the_command_line_are_told_apart():
    """They do not name the file, and a file that cannot be read is named."""
    cases = [
        (["--config", "run.yaml", "--lr", "x"], "lr: expected a number, got 'x'"),
        (["--config"], "config: expected a value, got none"),
        (["--config", "--lr", "1"], "config: expected a value, got none"),
        (["--config", "run.yaml", "--config=b"], "config: expected one file, got 2: run.yaml, b"),
        (["--config", "no"], "config no: expected a file, or the folder of a run: it is not there"),
        (["--config", "."], "config .: expected a file, or the folder of a run: it has no config.json"),
        (["--config", "a.json"], "config a.json: expected JSON: Expecting value: line 1 column 8 (char 7)"),
        (["--config", "b.yaml"], "config b.yaml: expected a text in UTF-8"),
    ]
    Path("run.yaml").write_text("lr: 0.5")
    Path("a.json").write_text('{"lr": }')
    Path("b.yaml").write_bytes(b"\xff\xfe\x00")
    for args, line in cases:
        with pytest.raises(ValueError) as error:
            parsed(*args)
        assert str(error.value) == line


def saved(script, folder, **changes):
    """The folder of a run with these options, as far as `--config` reads it."""
    cfg = dataclasses.replace(CONFIGS[script](), **changes)
    Path(folder).mkdir(exist_ok=True)
    facts = dict(zip(earlier_run.FACTS, ("2026-01-02", {"data": []})))
    (Path(folder) / "config.json").write_text(json.dumps(files.jsonable(cfg) | facts))
    return cfg


@pytest.mark.parametrize("name", ["dpo", "grpo", "multi_turn", "ppo", "sft", "train_rm"])
def test_a_run_gives_its_options_to_another(name):
    """All but where it is, whether it was overridden, and the steps that follow from passes over the data."""
    strategy = rft.strategy.StrategyConfig(bf16=True, engine_servers=("http://a:1",))
    cfg = saved(name, "a", lr=0.123, data=("x", "y"), override=True, steps=7, strategy=strategy)
    want = dataclasses.replace(cfg, out="b", override=False)
    assert parsed("--config", "a", "--out", "b", script=name) == want
    assert parsed("--config=a/config.json", "--out=b", script=name) == want

    passes = "data_epochs" if hasattr(cfg, "data_epochs") else "epochs"
    want = dataclasses.replace(saved(name, "c", steps=7, out="c", **{passes: 2.0}), steps=None)
    assert parsed("--config", "c", "--out", "c", script=name) == want


def test_the_folder_of_another_run_is_not_taken_by_accident():
    saved("grpo", "a", out="a")
    with pytest.raises(ValueError) as error:
        parsed("--config", "a")
    assert str(error.value) == (
        "config a: out: expected --out beside the options of a run, got none; --out a continues that run, "
        "another folder begins a new one"
    )
    with pytest.raises(ValueError, match=r"^config a: .*unrecognized options: .* more; "):
        parsed("--config", "a", "--out", "b", script="sft")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_it_and_no_config_has_it(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parsed("--help", "all", script=name)
    assert (
        "  --config FILE           options from a .yaml or .json file or the folder of a"
        in capsys.readouterr().out
    )
    assert "config" not in parsing.names(CONFIGS[name])


@dataclasses.dataclass(frozen=True)
class Own:
    """A script with another meaning of the word."""

    config: str = "a"


def test_a_script_may_have_an_option_of_the_name():
    assert config_file.parse(Own, ["--config", "b"]) == Own("b")


@pytest.mark.slow
def test_runs_by_file_by_flags_and_by_folder_are_the_same():
    """To the byte, but for their folders."""
    flags = "--steps 2 --batch 4 --warmup 1 --lr 0.002 --data sort_digits:1 sort_digits:2 --no-keep-memory"
    Path("run.yaml").write_text(
        "steps: 2\nbatch: 4\nwarmup: 1\nlr: 2e-3\ndata: [sort_digits:1, sort_digits:2]\n"
        "strategy: {keep_memory: false}\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    for out, args in {"a": flags.split(), "b": ["--config", "run.yaml"], "c": ["--config", "a"]}.items():
        command = [sys.executable, str(ROOT / "train_scripts" / "sft.py"), *args, "--out", out]
        done = forks.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    for name in ("config.json", "metrics.jsonl"):
        texts = {(Path(out) / name).read_text().replace(f'"out": "{out}"', "") for out in "abc"}
        assert len(texts) == 1
