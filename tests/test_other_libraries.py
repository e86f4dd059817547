"""Options by the names of other libraries: the tables lead to flags that are there, in one line."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from each_case import each
from test_house import load_script

from rft_fn import parsing
from rft_fn.migrate import answer, tables
from rft_fn.migrate.libraries import LIBRARIES
from rft_fn.migrate.rows import hinted
from rft_fn.migrate.translation import translate

SCRIPTS = [path.stem for path in sorted((Path(__file__).parents[1] / "train_scripts").glob("*.py"))]
OWN = {name: parsing.names(load_script(name).Config) for name in SCRIPTS}
HINTS = [
    (title, name, hint)
    for title, rows in tables.options().items()
    for name, row in rows.items()
    if (hint := hinted(name, row)) is not None
]


def test_each_name_has_one_row_a_library():
    """Also where a library has the rows of a second table; and there are as many as the libraries have."""
    both = set(tables.rows_of("openrlhf_and_lightrft", "rl"))
    for name in ("openrlhf", "lightrft"):
        assert not both & set(tables.rows_of(name, "rl"))
    assert all(len(rows) >= 50 for rows in tables.options().values())
    assert len({name for _, name, _ in HINTS}) >= 200


# what is wrong in a table -> what is said of it
WRONG = {
    '[rows.rl]\nlr = { to = "--lr", noet = "x" }': "t, lr: expected keys among to, write, on, ",
    "[rows.rl]\nlr = 3": "t, lr: expected an option of ours or a row, got 3",
    '[rows.rl]\nlr = { to = "--lr", none = "x" }': "t, lr: expected one of to, write, on, switch, words and",
    '[rows.rl]\nlr = { note = "x" }': "t, lr: expected one of to, write, on, switch, words, values, none and",
    '[rows.rl]\nlr = { like = "odrer" }': "t, lr: expected `like` alone, of ",
    '[rows.rl]\nlr = { to = "lr" }': "t, lr: expected options as --NAME, got 'lr'",
    '[rows.rl]\nlr = { rl = "--lr", sfx = "--lr" }': "t, lr: expected kinds of trainer and a hint, got 'sfx'",
    '[rows.rl]\nlr = { to = "--lr", hint = { flag = "lr" } }': "t, lr, hint: expected an option as --NAME",
    '[rows.rl]\nlr = { to = "--lr", hint = { like = "x" } }': "t, lr, hint: expected `like` alone, of ",
    '[rows.rl]\nlr = "--lr"\n"a lr" = "--lr"': "t, lr: expected one row, got 'two of rl'",
    '[rows.all]\nlr = "--lr"\n[rows.rl]\nlr = "--lr"': "t, lr: expected one row, got 'two of rl'",
    '[rows.r1]\nlr = "--lr"': "t, rows: expected sections among rl, sft, dpo, rm, ",
    "rowz = {}": "t: expected keys among title, ",
    "[trainers.rl]\nscript = 3": "t, trainers.rl.script: expected str, got 3",
    "[releases.gon]": "t, releases: expected keys among changed, gone, first, got 'gon'",
}


@each("text", WRONG)
def test_a_table_of_another_form_is_refused_with_its_place(text):
    with pytest.raises(ValueError, match=re.escape(WRONG[text])):
        tables.read(text, "t")


def test_a_new_option_is_one_line():
    """In words of its own, and read as the head of trl.toml says."""
    found = tables.read('[rows.rl]\nn_new = "--group"\nold = { on = "--rounds 4", note = "x" }', "t")
    rows = {name: row for name, _, row in tables.rows_with_kinds(found, "t")}
    assert rows["n_new"].ours == "--group {x}"
    assert (rows["old"].values, rows["old"].note) == ({"true": "--rounds 4", "false": ""}, "x")


def test_every_option_that_a_table_names_is_some_scripts():
    for title, name, hint in HINTS:
        for option, _, needs in hint if isinstance(hint, tuple) else ():
            having = [script for script, own in OWN.items() if option in own]
            assert having, f"{title}, {name}: no script has --{option}"
            needed = [script for script in having if not needs or needs in OWN[script]]
            assert needed, f"{title}, {name}: no script has --{option} and --{needs}"


def test_no_answer_leads_to_a_flag_that_is_not_there():
    """All flags of an answer are the script's, beside the one that was asked for."""
    for script in SCRIPTS:
        for _, name, _ in HINTS:
            said = answer("FLAG", name, OWN[script])
            flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]*)", said)}
            assert flags <= OWN[script], (script, name, said)
            assert "\n" not in said


def test_names_of_ours_are_not_asked_for_elsewhere():
    """An option that the scripts have under the same name has no hint."""
    both = set.intersection(*(OWN[name] for name in ("sft", "grpo", "ppo")))
    assert not both & {name for _, name, _ in HINTS}


ANSWERS = [
    ("grpo", "--num-generations 8", "--num-generations of TRL is --group here"),
    ("grpo", "--num_generations=8", "--num_generations of TRL is --group here"),
    ("grpo", "--learning-rate 1e-6", "--learning-rate of TRL, OpenRLHF is --lr here"),
    (
        "grpo",
        "--max-completion-length 9",
        "--max-completion-length of TRL is --max-new here (counted in tokens)",
    ),
    (
        "grpo",
        "--num-train-epochs 2",
        "--num-train-epochs of TRL is --data-epochs here (passes over the data)",
    ),
    ("sft", "--num-train-epochs 2", "--num-train-epochs of TRL is --epochs here"),
    ("sft", "--num-iterations 2", "--num-iterations of TRL has no counterpart in this script"),
    ("sft", "--num-generations 2", "--num-generations of TRL has no counterpart in this script"),
    ("grpo", "--beta 0.1", "--beta of TRL is --kl here (its coefficient; 0 is off)"),
    ("ppo", "--beta 0.1", "--beta of TRL is --kl here (in the reward of each token, not in the loss)"),
    ("ppo", "--init_kl_coef 0.1", "--init_kl_coef of OpenRLHF and LightRFT is --kl here"),
    (
        "grpo",
        "--per-device-train-batch-size 8",
        "--per-device-train-batch-size of TRL is --prompts here "
        "(counted in prompts per step of all processes, with --group responses each)",
    ),
    ("grpo", "data.train_batch_size=8", "data.train_batch_size of verl is --prompts here (prompts per step)"),
    ("sft", "+data.train_batch_size=8", "+data.train_batch_size of verl is --batch here"),
    ("grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n of verl is --group here"),
    (
        "grpo",
        "--rollout.n_samples_per_prompt 8",
        "--rollout.n_samples_per_prompt of OpenRLHF is --group here",
    ),
    ("grpo", "--use_gspo", "--use_gspo of LightRFT is --algorithm here (gspo)"),
    ("grpo", "--no-packing", "--no-packing of TRL is --packing-samples here"),
    (
        "grpo",
        "--no_advantage_std_norm",
        "--no_advantage_std_norm of OpenRLHF is --algorithm here (dr_grpo is grpo without the deviation)",
    ),
    (
        "grpo",
        "--lr 1 --epsilon 0.2 --steps 3 --logging-steps 1",
        "--epsilon of TRL is --clip-low here (one side of the clip; --clip-high is the other); "
        "--logging-steps of TRL, OpenRLHF and LightRFT: every step is a row of metrics.jsonl in the folder "
        "of the run",
    ),
]


def test_an_option_of_another_library_is_answered_in_one_line():
    for script, args, line in ANSWERS:
        config = load_script(script).Config
        with pytest.raises(ValueError) as error:
            parsing.parse(config, parsing.qualify(args.split(), config))
        assert str(error.value) == f"{line}; --help lists the options"


def test_what_is_ours_is_not_asked_for():
    config = load_script("grpo").Config
    for args in (
        ["--temperature", "0.5", "--zero-stage", "2", "--no-fused-linear-logprob", "--strategy.sp-size", "2"],
        ["--template", "a.b=c {question}", "--data", "data.x=1", "data/a.jsonl=0.5", "--system", "beta"],
        ["--train_batch_size", "4", "--disable_engine_sleep", "--seed=3"],
    ):
        assert dataclasses.is_dataclass(parsing.parse(config, parsing.qualify(args, config))), args


def test_the_answer_comes_before_anything_is_loaded(tmp_path):
    """Exit code 2, one line, no folder; and transformers is not imported for it."""
    code = """
import sys
import test_house
grpo = test_house.load_script("grpo")
sys.argv = ["grpo.py", "--num-generations", "8", "--out", "r"]
try:
    grpo.rft.run.cli(grpo.main, grpo.Config)
finally:
    print(sorted({"transformers", "datasets", "tyro"} & set(sys.modules)))
"""
    tests = str(Path(__file__).parent)
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{code}"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (2, "[]\n")
    assert found.stderr == "error: --num-generations of TRL is --group here; --help lists the options\n"
    assert not list(tmp_path.iterdir())


TOGETHER = [
    ("openrlhf", "rm", {"dataset": "a,b", "dataset_probs": "0.2,0.8"}, "--data a=0.2 b=0.8", ""),
    ("openrlhf", "rl", {"prompt_data": "a,b", "advantage_estimator": "rloo"}, "--data a b", ""),
    (
        "openrlhf", "rl", {"data.max_len": 900, "rollout.max_new_tokens": 700},
        "--max-prompt 200 --max-new 700", "",
    ),
    ("openrlhf", "rl", {"enable_ema": True, "ema_beta": 0.98, "kl_target": 6}, "--ema 0.98", ""),
    (
        "trl", "sft",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.3}},
        "--schedule cosine --lr-end 0.3", "",
    ),
    ("openrlhf", "rl", {"data.max_len": 900}, "--max-new 450", "what the prompt leaves of 900 tokens"),
    (
        "verl", "rl",
        {
            "algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.type": "adaptive",
        },
        "--kl-in-reward 0.001", "--kl-in-reward: its coefficient is fixed",
    ),
    (
        "lightrft", "rl",
        {
            "advantage_estimator": "group_norm", "use_kl_loss": "true", "kl_estimator": "k3",
            "reward_pretrain": "",
        },
        "--reward lightrft:reward_models_utils.py:reward_fn", "theirs that of k3",
    ),
    (
        "verl", "rl",
        {
            "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4,
            "reward.custom_reward_function.path": "r.py", "reward.custom_reward_function.name": "f",
            "reward.custom_reward_function.reward_kwargs.bonus": 0.5, "reward.reward_manager.name": "dapo",
            "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
            "reward.reward_kwargs.overlong_buffer_cfg.len": 64,
        },
        "--overlong 64", "",
    ),
    ("verl", "rl", {"reward.custom_reward_function.path": "r.py"}, "--reward verl:r.py:compute_score", ""),
    (
        "trl", "rl", {"num_iterations": 2, "max_steps": 500, "save_steps": 0.1, "eval_steps": 20},
        "--eval-every 10", "--save-every: theirs count updates, of which a rollout has 2",
    ),
    ("trl", "sft", {"dataset_name": ["a.csv", "b.csv"]}, "--data a.csv b.csv", ""),
    (
        "trl", "dpo", {"preferences": "cpo", "loss_type": "simpo", "simpo_gamma": 0.6},
        "--loss simpo --margin 0.6 --nll 1.0", "--nll: a mean over the tokens of each response",
    ),
    ("trl", "dpo", {"preferences": "cpo", "loss_type": "ipo"}, "--loss cpo --nll 1.0", "no loss of ours"),
    ("trl", "dpo", {"preferences": "orpo"}, "--loss orpo", "its likelihood is a mean of each response"),
    ("trl", "dpo", {"preferences": "bco"}, "--unpaired --loss bco", "a classifier of prompts"),
]  # fmt: skip


def test_options_that_count_together():
    for library, kind, options, wanted, note in TOGETHER:
        found = translate(LIBRARIES[library], options, (), kind)
        assert wanted in " ".join(found.command), (options, found.command)
        assert note in " ".join(found.notes), (options, found.notes)
