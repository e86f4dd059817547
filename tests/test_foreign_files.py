"""Files of other libraries as they are read: shell scripts and Python; what is unknown in them is named."""

import json
import time

import pytest
from each_case import each

from rft_fn.migrate import accepted, shell, translation
from rft_fn.migrate.foreign_files import read
from rft_fn.migrate.libraries import LIBRARIES

# a script and the words of its last command
SHELL = {
    "plain variables": ("a=1\nB='x y'\nrun $a \"$B\" ${a}b", ["run", "1", "x y", "1b"]),
    "unquoted variables are split": ("O='--a 1 --b'\nrun $O", ["run", "--a", "1", "--b"]),
    "defaults": ("run ${X:-7} ${Y-'c'} ${Z:=q} $Z", ["run", "7", "c", "q", "q"]),
    "another text": ("A=1\nrun ${A:+--on} ${B:+--off} end", ["run", "--on", "end"]),
    "arithmetic": ("n=3\nrun $((n * 2 + 1)) $(((1024+512)/n))", ["run", "7", "512"]),
    "arrays": ("A=(--x 1\n  # no\n  '-y=a b')\nA+=(-z)\nr \"${A[@]}\"", ["r", "--x", "1", "-y=a b", "-z"]),
    "all arguments": ('run "$@" $* --a 1', ["run", "--a", "1"]),
    "continued lines": ("run --a 1 \\\n  # --b 2 \\\n  --c 3", ["run", "--a", "1", "--c", "3"]),
    "a pipe": ("run --a 1 2>&1 | tee log.txt", ["run", "--a", "1"]),
    "redirections": ("run --a 1 > out.txt 2> err.txt &", ["run", "--a", "1"]),
    "and": ("cd x && run --a 1", ["run", "--a", "1"]),
    "a document": ("read -r -d '' C <<EOF\n run \\\n  --a 1\nEOF\n$C --b", ["run", "--a", "1", "--b"]),
    "a text of commands": ('bash -c "cd x; run --a 1"', ["run", "--a", "1"]),
    "eval": ("C='run --a'\neval \"$C 1\"", ["run", "--a", "1"]),
    "a condition that holds": ("if [ 3 -gt 2 ]; then A=1; else A=2; fi\nrun $A", ["run", "1"]),
    "a condition that does not": (
        'M=b\nif [[ $M == "a" ]]; then A=1\nelif [ $M = b ]; then A=2; fi\nrun $A', ["run", "2"],
    ),
    "arguments of the script": ('if [ "$#" -lt 2 ]; then A=1; else A=2; fi\nrun $A', ["run", "2"]),
    "one side of or": ("[ -z \"$X\" ] && X=3\nrun $X", ["run", "3"]),
    "the first of a loop": ("for s in 4 5; do\n run $s\ndone", ["run", "4"]),
    "exports": ("export A=1\nreadonly B=$A\nrun $B", ["run", "1"]),
    "ends of a value": ("p=a/b.c\nr ${p##*/} ${p%.c} ${p/a/z} ${p^^}", ["r", "b.c", "a/b", "z/b.c", "A/B.C"]),
    "basename": ("p=a/b.c\nrun $(basename $p .c) `dirname a/b`", ["run", "b", "a"]),
    "escapes": (r"run $'a\nb' a\ b", ["run", "a\nb", "a b"]),
    "no value": ('run --m "$MODEL/x" $(date +%F\' \'%T)', ["run", "--m", "${MODEL}/x", "$(date +%F' '%T)"]),
}  # fmt: skip


@each("name", SHELL)
def test_a_shell_script_is_read_as_a_shell_does(name):
    text, words = SHELL[name]
    assert shell.commands(text)[-1].words == words


def test_what_has_no_value_is_named_with_its_line():
    command = shell.commands("A=1\nB=$NEW\nrun --a $A \\\n  --b $B --c $HOME --d $(nproc)")[-1]
    assert (command.line, command.unknown) == (3, {"${NEW}": 2, "$(nproc)": 4})


def test_a_script_that_doubles_a_text_ends():
    start = time.perf_counter()
    with pytest.raises(ValueError, match="grows to more than"):
        shell.commands("a=xx\n" + "a=$a$a\n" * 60)
    with pytest.raises(ValueError, match="without its"):
        shell.commands("run ${a")
    assert shell.commands("run $((9 ** 99999))")[0].words == ["run", "$((9 ** 99999))"]
    assert time.perf_counter() - start < 5


PYTHON = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
RATE, NAME = 1e-6, "x"
STEPS = 10
def own(completions, **columns):
    return [0.0 for _ in completions]
args = GRPOConfig(learning_rate=3e-6 * 2, max_steps=STEPS, run_name=f"r-{STEPS}", seed=pick())
trainer = GRPOTrainer(model="m", args=args, reward_funcs=[own, accuracy_reward])
"""


def test_a_python_script_is_read_without_running_it(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(PYTHON)
    [found] = read(str(path))
    assert found.options == {
        "learning_rate": 6e-6, "max_steps": 10, "run_name": "r-10", "model_name_or_path": "m",
        "reward_funcs": [f"{path}:own", "trl.rewards:accuracy_reward"],
    }  # fmt: skip
    assert found.programs == ["grpo"] and any("line 8: seed=pick(): not a constant" in x for x in found.notes)


READ = {
    "GRPOTrainer('m', args=GRPOConfig(**MORE, top_p=0.9))": {
        "seed": 3, "top_p": 0.9, "model_name_or_path": "m",
    },
    "SFTConfig(**{'seed': 4}, **unknown())": {"seed": 4},
    "d = load_dataset('json', data_files='a.jsonl', split='train')": {
        "dataset_name": "a.jsonl", "dataset_train_split": "train",
    },
    "d = load_dataset('csv', data_files={'test': 't.csv', 'train': ['a.csv']})": {"dataset_name": "a.csv"},
    "d = load_dataset('parquet', data_files=['a', 'b'])": {"dataset_name": ["a", "b"]},
}  # fmt: skip


@each("line", READ)
def test_options_in_other_forms_of_python(line, tmp_path):
    (tmp_path / "a.py").write_text(f"from trl import *\nMORE = dict(seed=3)\nc = GRPOConfig()\n{line}\n")
    [found] = read(str(tmp_path / "a.py"))
    assert found.options == READ[line]
    assert ("line 4: **unknown(): its options are not in the file" in found.notes) == ("unknown" in line)


def test_a_notebook_is_read_as_its_code(tmp_path, capsys):
    source = ["!pip install trl\n", "from trl import DPOConfig\n", "a = DPOConfig(loss_type='apo_zero')"]
    cells = [{"cell_type": "markdown", "source": "DPO"}, {"cell_type": "code", "source": source}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    [found] = read(str(tmp_path / "a.ipynb"))
    assert found.options == {"loss_type": "apo_zero"} and found.programs == ["dpo"]
    (tmp_path / "a.ipynb").write_text('{"cells": [1]}')
    assert translation.main([str(tmp_path / "a.ipynb")]) == 2
    assert "a.ipynb: expected a notebook, which cannot be read: " in capsys.readouterr().err


def test_a_command_in_a_loop_says_so(tmp_path):
    inner = "for x in 1; do\n trl sft --learning_rate $lr\n done"
    text = f"for lr in 1e-6 2e-6; do\n\n {inner}\ndone\ntrl sft --seed 1"
    (tmp_path / "a.sh").write_text(text)
    first, last = read(str(tmp_path / "a.sh"))
    assert first.notes == ["line 4: lr has more values in a loop; here its first"]
    assert first.options == {"learning_rate": "1e-6"} and last.notes == []


def test_flags_win_over_the_file_that_a_command_names(tmp_path):
    (tmp_path / "more.yaml").write_text("learning_rate: 1.0e-5\nseed: 4\n")
    (tmp_path / "run.sh").write_text("trl sft --config more.yaml --learning_rate 2e-5")
    [found] = read(str(tmp_path / "run.sh"))
    assert found.options == {"learning_rate": "2e-5", "seed": 4}
    (tmp_path / "run.sh").write_text("accelerate launch --num_processes 2 run_dpo.py more.yaml --seed=5")
    [found] = read(str(tmp_path / "run.sh"))
    assert found.options == {"learning_rate": 1e-5, "seed": "5"} and found.programs == ["run_dpo"]


def test_processes_of_the_launcher_count(tmp_path, capsys):
    """TRL's batch is of one process, so 4 of them have 4 times as many prompts."""
    command = (
        "accelerate launch --num_processes 4 -m trl.scripts.grpo --model_name_or_path m --num_generations 8"
    )
    (tmp_path / "a.sh").write_text(command)
    assert translation.main([str(tmp_path / "a.sh")]) == 0
    printed = capsys.readouterr().out
    assert "--prompts 4 " in printed and "of the 4 processes of theirs" in printed


def test_a_value_that_is_no_number_is_a_note(tmp_path, capsys):
    """And so is what a script refuses; neither ends the translation."""
    (tmp_path / "a.sh").write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=$BATCH "
        "actor_rollout_ref.rollout.n=1 actor_rollout_ref.rollout.temperature=-1"
    )
    assert translation.main([str(tmp_path / "a.sh")]) == 0
    printed = capsys.readouterr().out
    assert "# data.train_batch_size=${BATCH}: not a number that the file tells, so it is left out" in printed
    assert (
        "# left out: --group 1, of actor_rollout_ref.rollout.n=1: group: expected >= 2 responses" in printed
    )
    assert (
        "# left out: --temperature -1, of actor_rollout_ref.rollout.temperature=-1: temperature: ex"
        in printed
    )


def test_a_script_takes_what_is_kept():
    given = ["--lr 1e-3", "--wibble 3", "--kl x", "--steps 3", "--strategy.engine-tp-size 2"]
    kept, refused = accepted.accepted("grpo", given)
    assert kept == ["--lr 1e-3", "--steps 3", "--strategy.engine-tp-size 2"]
    assert refused["--kl x"] == "kl: expected a number, got 'x'" and "unrecognized" in refused["--wibble 3"]
    assert accepted.accepted("sft", ["--batch 4", "--strategy.engine-tp-size 2"])[0] == ["--batch 4"]


def test_an_unknown_library_is_one_line(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("wibble: 1")
    assert translation.main([str(tmp_path / "a.yaml")]) == 2
    assert capsys.readouterr().err == (
        "error: system: expected options of one of trl, verl, openrlhf, lightrft, prime-rl, got none that "
        "they have: wibble\n"
    )


def test_a_command_runs_nothing_that_a_value_holds(tmp_path, capsys):
    """Values are words of a shell; only variables and dates stay what they are."""
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: 'm; touch pwned'\nnum_generations: 4\nrun_name: '$(touch pwned) `x`'\n"
        "dataset_prompt_column: 'a b'\noutput_dir: $HOME/x\nreward_funcs: ['f.py:g; ls']\n"
    )
    assert translation.main([str(tmp_path / "a.yaml")]) == 0
    printed = capsys.readouterr().out
    for word in (
        "--model 'm; touch pwned'",
        "--template '{a b}'",
        '--out "$HOME/x"',
        "--reward 'f.py:g; ls'",
    ):
        assert f"{word}\n" in printed.replace(" \\\n", "\n"), printed
    assert "# run_name=$(touch pwned) `x`: what a command prints, so it is left out" in printed


def test_a_form_that_cannot_be_read_is_a_note():
    found = translation.translate(LIBRARIES["openrlhf"], {"actor.eps_clip_low_high": 0.2}, kind="rl")
    assert any(
        x.startswith("actor.eps_clip_low_high=0.2: not of a form that can be read") for x in found.notes
    )
    assert "--clip-high 0.2" in found.command
