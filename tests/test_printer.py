"""What a shell or a terminal reads: whatever a stranger wrote, bash runs none of it."""

import json
import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn.migrate.translation import main
from rft_fn.tools import commands, printer, scripts

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")

# parts that end a word, a comment or a quote, run something, or steer a terminal
PARTS = [
    "\n", "\r", "\r\n", "\x0b", "\x0c", "\x1b[2J", "\x9b1A", "\u2028", "\u202e", "\0", "\t", " ", "'", '"',
    "`", "\\", "#", ";", "&", "|", "!", "~", "*", "<", ">", "(", ")", "{", "}", "--", "x", "$HOME",
    "${X}", "$X", "$(touch PWNED)", "`touch PWNED`", "touch PWNED", ";touch PWNED;", "\ntouch PWNED\n",
    "--x;touch PWNED",
    "<(touch PWNED)", "$((1))", "$(date -f PWNED)", "$(date +%s)", "${X:=$(touch PWNED)}", "{touch,PWNED}",
    "é", ">PWNED", "${a[$(", "\ud800",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


def ran(text, folder):
    """The arguments of the last `python` that bash starts for a text, and the files that it makes."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "rft"):
        stub = folder / "bin" / name
        stub.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$STUB"\n')
        stub.chmod(0o755)
    inner = folder / "here"
    inner.mkdir()
    subprocess.run(
        [BASH],
        input=text.encode(errors="surrogateescape"),
        cwd=inner,
        env={
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "STUB": f"{folder / 'args'}",
            "HOME": "home",
            "X": "of x",
        },
        capture_output=True,
        timeout=60,
        check=False,
    )
    args = (folder / "args").read_bytes().decode().split("\0")[:-1] if (folder / "args").exists() else None
    return args, sorted(x.name for x in inner.iterdir())


@settings(max_examples=12, deadline=None, derandomize=True)
@given(texts=st.lists(TEXTS, min_size=1, max_size=40))
def test_a_word_is_one_word_and_a_comment_is_one_line(texts, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "printer"
    notes = "\n".join(map(printer.comment, texts))
    assert notes.count("\n") == len(texts) - 1 and not set(notes) & set("\x1b\x9b\r\0\u202e")
    args, made = ran(f"{notes}\n{printer.command(['python', *texts])}\n{notes}\n", folder)
    assert made == [] and args is not None and len(args) == len(texts)
    for text, arg in zip(texts, args, strict=True):
        if "$" not in text:
            assert arg == printer.printable(text)


NAMES = [
    "learning_rate",
    "model_name_or_path",
    "beta",
    "run_name",
    "dataset_name",
    "loss_type",
    "lr_scheduler_type",
]
NAMES += ["system_prompt", "reward_funcs", "reward_weights", "report_to", "max_steps", "wibble"]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    options=st.dictionaries(
        st.one_of(st.sampled_from(NAMES), TEXTS), st.one_of(TEXTS, st.lists(TEXTS, max_size=2)), max_size=6
    )
)
def test_no_value_and_no_name_of_a_config_runs(options, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "printed"
    folder.mkdir(exist_ok=True)
    file = folder / "a.json"
    file.write_text(json.dumps({"num_generations": 8, "per_device_train_batch_size": 8, **options}))
    printed = said(["--system", "trl", "--trainer", "rl", str(file)])
    assert not set(printed) & set("\x1b\x9b\r\0\u202e")
    args, made = ran(printed, tmp_path_factory.getbasetemp() / "printer")
    assert made == [] and (args is None or args[0] == "train_scripts/grpo.py")


def said(arguments):
    """What `rft migrate` prints, both of its outputs."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(arguments)
    text = out.getvalue()
    return "" if text.startswith("error: ") and text.count("\n") == 1 else text


def test_a_value_with_lines_ends_no_comment(tmp_path):
    (tmp_path / "a.yaml").write_text(
        'model_name_or_path: m\ndataset_name: d\nnum_generations: 8\nlearning_rate: "x\\ntouch PWNED\\n#"\n'
    )
    printed = said([str(tmp_path / "a.yaml")])
    assert r"learning_rate=x\ntouch PWNED\n#" in printed
    args, made = ran(printed, tmp_path / "bash")
    assert made == [] and args[:3] == ["train_scripts/grpo.py", "--model", "m"]


def test_the_command_of_a_copy_runs_the_copy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands.main(["new", "sft", "a b;touch PWNED.py"])
    first, then = capsys.readouterr().out.splitlines()
    assert first.endswith("a copy of sft")
    args, made = ran(then.removeprefix("run it:"), tmp_path / "bash")
    assert (args, made) == (["run", "a b;touch PWNED.py"], [])


def test_the_completion_defines_and_runs_nothing(tmp_path):
    words = {"new": commands.New, "migrate": commands.Migrate}
    args, made = ran(scripts.completion("bash", words), tmp_path / "bash")
    assert (args, made) == (None, [])
    assert shlex.split(printer.word("--x;touch PWNED")) == ["--x;touch PWNED"]
