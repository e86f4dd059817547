"""Completion, asked of a real bash as the Tab key asks it; the other shells where they are installed."""

import shutil
import subprocess
from typing import get_args, get_type_hints

import pytest
from tyro.conf import Positional

from rft_fn import parsing
from rft_fn.tools import commands, scripts

pytestmark = pytest.mark.slow

# the words that bash offers behind a line: its function for rft, or files where that has none
ASK = """
source rft.bash
IFS=$'\\n'
while read -r line; do
  IFS=' ' read -ra COMP_WORDS <<< "rft $line"
  [[ "$line" == *' ' || -z "$line" ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  COMPREPLY=()
  _rft rft "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  IFS=' '
  echo "${COMPREPLY[*]}"
  IFS=$'\\n'
done
complete -p rft
"""


@pytest.fixture(scope="module")
def printed():
    words = commands.words()
    return {shell: scripts.completion(shell, words) for shell in scripts.SHELLS}


@pytest.fixture(scope="module")
def offers(printed, tmp_path_factory):
    """The words that bash offers behind each of some lines."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "rft.bash").write_text(printed["bash"])

    def ask(*lines):
        asked = "".join(f"{line}\n" for line in lines)
        found = subprocess.run(
            ["bash", "--norc", "-c", ASK], input=asked, cwd=folder, capture_output=True, text=True, check=True
        )
        assert not found.stderr
        *answers, registered = found.stdout.splitlines()
        assert registered == "complete -o default -F _rft rft"  # files where nothing of ours fits
        assert len(answers) == len(lines)
        return [set(answer.split()) - {"-h", "--help"} for answer in answers]

    return ask


def test_commands_and_scripts_are_offered(offers):
    names = set(scripts.named())
    every, report, run, new, where, shells, g = offers(
        "", "rep", "run ", "new ", "where ", "completion ", "run g"
    )
    assert every == set(commands.COMMANDS) and report == {"report"}
    assert run == new == where == names and g == {"grpo"}
    assert shells == set(scripts.SHELLS)


@pytest.mark.parametrize("name", sorted(p.stem for p in scripts.folder().glob("*.py")))
def test_every_option_of_a_script_is_offered(name, offers):
    """Also those of its parts, by both of their names, and beside others that stand there."""
    config = scripts.config(scripts.find(name))
    owners = parsing.owners(config)
    parts = {part for part, inner in parsing._parts(config) if inner}
    marked = get_type_hints(config, include_extras=True)
    places = {
        name for name, hint in marked.items() if Positional in get_args(hint)[1:]
    }  # the model of a check
    want = {"--config"}
    for option, found in owners.items():
        if option in parts or option == "extra" or option in places:  # not flags of a command line
            continue
        if len(found) == 1 or "" in found:
            want.add(f"--{option}")
        want |= {f"--{part}{option}" for part in found if part}
    want = {flag.replace("_", "-") for flag in want}
    (offered,) = offers(f"run {name} --")
    assert len(want) >= 4 and want <= offered, want - offered


def test_values_are_offered_and_files_are_left_to_the_shell(offers):
    loss, schedule, out, report, new = offers(
        "run distill --off-policy ",
        "run grpo --steps 3 --schedule ",
        "run grpo --out r",
        "report r",
        "new grpo m",
    )
    assert {"teacher", "given"} <= loss and schedule == {"linear", "cosine", "constant"}
    assert out <= {"rft.bash"} and not report and not new


def test_options_of_commands_are_offered(offers):
    report, doctor, export, evaluate = offers("report --", "doctor --", "export --", "evaluate --cou")
    assert "--out" in report and {"--json", "--imports"} <= doctor
    assert {"--step", "--best", "--no-merge"} <= export and evaluate == {"--count"}


def test_the_command_prints_what_the_shell_reads(printed, capsys):
    commands.main(["completion", "bash"])
    assert capsys.readouterr().out.strip() == printed["bash"].strip()


# a shell on a terminal of its own, where two tabs are typed
IN_ZSH = """
zmodload zsh/zpty
zpty -b z zsh -f -i
zpty -w z "fpath=($PWD \\$fpath); autoload -U compinit; compinit -u -D; print re''ady"
found=
until [[ $found == *ready* ]]; do sleep 0.1; zpty -r -t z part && found+=$part; done
zpty -w -n z $'rft run grpo --kl\\t\\t'
found=
until [[ $found == *in-reward* ]]; do sleep 0.1; zpty -r -t z part && found+=$part; done
print -r -- $found
zpty -d z
"""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell, printed, tmp_path):
    text = printed[shell]
    assert "grpo" in text and "kl-in-reward" in text and "completion" in text
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "_rft").write_text(text)
    subprocess.run([shell, "-n", "_rft"], cwd=tmp_path, check=True)
    script = IN_ZSH
    if shell == "fish":
        script = "source _rft; complete -C 'rft run grpo --kl'"
    done = subprocess.run([shell, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "--kl-in-reward" in done.stdout and not done.stderr


def test_fish_sends_the_words_as_input(printed):
    """They are longer than an argument of a process may be, 128 KiB on Linux."""
    assert max(map(len, printed["fish"].splitlines())) > 2**17
    assert printed["fish"].count("| $python_cmd - $words") == 1 and '-c "$pycode"' not in printed["fish"]
