"""Configs in the forms of the public ones: each gives a command that its script takes, or a named reason.

The texts of `corpus` were written for these tests. Each command is parsed; in the slow tier it is also run
dry, with a small model and a few rows of the columns that the config names.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import tiny
from each_case import each
from test_house import load_script

from rft_fn import parsing
from rft_fn.migrate.foreign_files import read
from rft_fn.migrate.libraries import LIBRARIES
from rft_fn.migrate.translation import main, system

FOLDER = Path(__file__).parent / "corpus"
CONFIGS = {
    f"{path.stem}/{name.strip()}": text
    for path in sorted(FOLDER.glob("*.txt"))
    for name, text in re.findall(r"^==== (.*)\n((?:(?!==== ).*\n?)*)", path.read_text(), re.M)
}
# the reasons of configs that no script of ours can do
REASONS = {
    "verl/generation.sh": "evaluate.py answers and scores prompts",
    "openrlhf/kd.sh": "losses of distillation",
}
# what is not translated, and printed first
CHANGES = {
    "verl/tools.sh": "actor_rollout_ref.rollout.multi_turn.enable=True",
    "lightrft/remote.sh": "high_entropy_token_ratio=0.2",
}
# what a reader must be told, as another run would come out without it
TOLD = {
    "verl/gsm8k.sh": ["a rule that the column data_source names"],
    "verl/tools.sh": ["multi_turn: theirs are conversations with tools"],
    "verl/lora_sglang.sh": ["engine: sglang samples on servers here"],
    "verl/sft.sh": ["trainer.default_local_dir=$2: an argument of the script"],
    "openrlhf/dapo.sh": ["--rounds: it keeps groups whose rewards differ; theirs is a mean within"],
    "openrlhf/reinforce_baseline.sh": ["--messages: where the column"],
    "lightrft/grpo.sh": [
        "the rule that the column label names",
        "freeze_prefix: --freeze visual, for a model",
    ],
    "lightrft/cpgd.sh": ["--template: theirs is the whole prompt"],
    "trl/grpo_r1.yaml": ["one update ahead"],
    "trl/grpo_config.py": ["line 18: the script makes other rows"],
    "trl/sft.yaml": ["--batch: it counts examples; theirs, with packing, counts packs"],
    "trl/simpo.py": ["--nll: a mean over the tokens of each response"],
    "verl/passk_corrected.sh": ["theirs takes dropped responses out of the mean"],
    "trl/sft_config.sh": ["sft_more.yaml, line 3: it has more options, and is not here"],
    "prime_rl/rl_limits.toml": ["--loss.limit: theirs is 0.1 downwards and 0.15 upwards"],
    "prime_rl/rl_lora.toml": ["orchestrator.algo.type=max_rl is another advantage"],
}
# options of the command, where two readings were possible
WANTED = {
    "verl/gsm8k.sh": {"data": ("data/train.parquet",) * 2, "trackers": ("wandb",), "budget": 256},
    "verl/dapo.sh": {"overlong": 64, "prompts": 16, "budget": 1536, "model": "models/mine", "warmup": 8},
    "verl/gspo_array.sh": {"steps": 40, "data_epochs": None, "warmup": 4, "save_every": 1000000, "group": 8},
    "verl/ppo.sh": {"freeze_actor_steps": 3, "kl": 0.002, "gae_lambda": 0.95, "value_clip": 0.4},
    "verl/ppo_adaptive.yaml": {"kl_target": 0.08, "kl_horizon": 5000.0, "minibatches": 1},
    "verl/rloo.sh": {"kl_in_reward": 0.0015, "group": 5},
    "verl/reward_function.sh": {"reward": ("verl:rewards/verl_style.py:grade(bonus=0.25)",)},
    "verl/lora_sglang.sh": {"lora_rank": 16, "lora_alpha": 32.0, "lora_targets": "q_proj,v_proj"},
    "openrlhf/ppo.sh": {"reward": ("openrlhf:rewards/openrlhf_style.py:reward_func",), "max_new": 200},
    "openrlhf/icepop.sh": {"mismatch": "icepop", "cap": 4.0},
    "openrlhf/sft.sh": {"response": "{answer}", "batch": 32},
    "openrlhf/dpo_smooth.sh": {"loss": "cdpo", "label_smoothing": 0.05, "messages": ("chosen", "rejected")},
    "lightrft/grpo.sh": {"kl": 0.02, "kl_in_reward": 0.0, "group": 5, "freeze": ()},
    "lightrft/ppo.sh": {"reward": ("model:models/rm",), "freeze_actor_steps": 4, "gae_lambda": 0.98},
    "lightrft/srm.sh": {"pool": "attention", "batch": 16},
    "trl/grpo_r1.yaml": {
        "reward": (
            "open_r1.rewards:accuracy_reward=1.0", "open_r1.rewards:format_reward=0.5",
            "open_r1.rewards:get_cosine_scaled_reward(min_value_wrong=0.0, max_value_wrong=-0.5, "
            "min_value_correct=0.5, max_value_correct=1.0, max_len=200)=0.25",
        ),
        "prompts": 8, "save_every": 10, "lr_end": 0.15, "warmup": 4, "mismatch": "mis_seq", "cap": 3.0,
    },
    "trl/grpo_loss.yaml": {"mismatch": "tis", "cap": 2.5, "trackers": ("tensorboard",), "prompts": 8},
    "trl/gspo.py": {"prompts": 8, "reward": ("trl/gspo.py:correct",), "lora_targets": "q_proj,v_proj"},
    "trl/grpo_config.py": {"prompts": 4, "group": 4, "max_new": 128, "lora_rank": 8, "lora_alpha": 16.0},
    "trl/grpo_cli.sh": {
        "prompts": 2, "reward": ("trl.rewards:accuracy_reward", "trl.rewards:think_format_reward"),
    },
    "trl/rloo.py": {"algorithm": "rloo", "kl_in_reward": 0.03, "reward": ("rewards.trl_style:correct",)},
    "trl/sft_config.sh": {"steps": 30, "epochs": None, "lr": 1e-5, "out": "runs/more"},
    "trl/kto.sh": {"unpaired": True, "loss": "kto", "undesirable_weight": 1.25, "beta": 0.2, "steps": 12},
    "trl/simpo.py": {"loss": "simpo", "margin": 0.7, "beta": 1.5, "nll": 0.1, "lr": 9e-7},
    "trl/orpo.yaml": {"loss": "orpo", "beta": 0.08},
    "trl/dpo_exo.sh": {"loss": "exo", "label_smoothing": 0.002, "batch": 8},
    "trl/vespo.yaml": {"algorithm": "vespo", "weight": "token_mean", "mismatch": "tis_seq", "cap": 4.0},
    "verl/passk_corrected.sh": {
        "advantage": "best_minus_second", "reward_norm": "group", "mismatch": "tis_seq",
        "geo_low": 0.9708737864,
    },
    "openrlhf/seq_mask.sh": {
        "mismatch": "tis", "geo_low": 0.6, "geo_high": 1.8, "max_new": 300, "max_prompt": 100,
        "normalize_reward": True,
    },
    "trl/dpo.yaml": {"eval_every": 25, "warmup": 5, "loss": "dpo", "label_smoothing": 0.0},
    "prime_rl/launch.sh": {"lr": 7e-6, "steps": 5, "prompts": 8},
}  # fmt: skip


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory):
    """A folder with all files of the corpus, a small model, rows and rewards."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in CONFIGS.items():
        (folder / name.partition("/")[0]).mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def translated(place, name, capsys, monkeypatch):
    """(exit status, what is printed, the script, its config) of a file of the corpus."""
    monkeypatch.chdir(place)
    capsys.readouterr()
    status = main([name])
    printed, error = capsys.readouterr()
    if status:
        return status, error, "", None
    words = shlex.split(printed.replace("\\\n", " "), comments=True)
    script = Path(words[1]).stem
    config = load_script(script).Config
    return status, printed, script, parsing.parse(config, parsing.qualify(words[2:], config))


def test_there_are_sixty_and_each_library_has_some():
    assert len(CONFIGS) >= 60
    assert {name.partition("/")[0].replace("_", "-") for name in CONFIGS} == set(LIBRARIES)
    assert REASONS.keys() | TOLD.keys() | WANTED.keys() <= CONFIGS.keys()


@each("name", CONFIGS)
def test_the_library_is_told_by_the_content(name, place):
    assert {system(config) for config in read(str(place / name)) if len(config.options) > 1} == {
        name.partition("/")[0].replace("_", "-")
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_a_command_that_its_script_takes(name, place, capsys, monkeypatch):
    """And nothing that the script refuses, no option that is not known, and the notes that matter."""
    status, printed, _, cfg = translated(place, name, capsys, monkeypatch)
    if name in REASONS:
        assert (status, printed.count("\n")) == (2, 1) and REASONS[name] in printed
        return
    assert status == 0, printed
    assert "refuses it" not in printed, printed
    first = re.findall(r"# may change the objective, and is not translated: (.*)", printed)
    assert all(told.startswith(CHANGES[name]) for told in first) if name in CHANGES else not first, printed
    for note in TOLD.get(name, ()):
        assert note in printed, printed
    wanted = WANTED.get(name, {})
    assert {option: getattr(cfg, option) for option in wanted} == wanted


# ------------------------------------------------------------------------------ dry runs


QUESTION = [{"role": "user", "content": "2 1 3"}]
ANSWER = {"role": "assistant", "content": "1 2 3"}
WORSE = {"role": "assistant", "content": "3 2 1"}
ROWS = {
    "prompts.jsonl": {
        "messages": QUESTION, "prompt": QUESTION, "question": "2 1 3", "label": "123", "reference": "-",
    },
    "chats.jsonl": {"messages": [*QUESTION, ANSWER]},
    "qa.jsonl": {"question": "2 1 3", "answer": "1 2 3"},
    "pairs.jsonl": {"prompt": "2 1 3", "chosen": "1 2 3", "rejected": "3 2 1"},
    "rated.jsonl": {"prompt": "2 1 3", "completion": "1 2 3", "label": True},
    "chat_pairs.jsonl": {"chosen": [*QUESTION, ANSWER], "rejected": [*QUESTION, WORSE]},
    "chat_pairs3.jsonl": {"prompt": QUESTION, "chosen": [ANSWER], "rejected": [WORSE]},
    "train.parquet": {
        "prompt": QUESTION, "data_source": "mine", "extra_info": {"index": 0},
        "reward_model": {"style": "rule", "ground_truth": "123"},
    },
    "nested.parquet": {"extra_info": {"question": "2 1 3", "answer": "1 2 3"}},
    "chats.parquet": {"messages": [*QUESTION, ANSWER]},
}  # fmt: skip
REWARDS = {
    "rewards/verl_style.py": "def grade(data_source, solution_str, ground_truth, extra_info, bonus=0.0):\n"
    "    return float(solution_str == ground_truth) + bonus\n",
    "rewards/openrlhf_style.py": "def reward_func(queries, prompts, labels):\n"
    "    return [0.0 for _ in queries]\n",
    "rewards/trl_style.py": "def correct(completions, **columns):\n    return [0.0 for _ in completions]\n",
    "reward_models_utils.py": "def reward_fn(model_reward_list, labels, queries, refs, label_map=None):\n"
    "    return [0.0 for _ in queries], {}\n",
}
UNINSTALLED = ("open_r1.", "trl.rewards", "trl/")  # rewards of packages, and of files that need them


@pytest.fixture(scope="module", name="stocked")
def fill_place(place):
    """The place with a model, a reward model, rows and rewards."""
    import pyarrow
    import pyarrow.parquet

    from rft_fn.model import load_reward, save

    model, tokenizer = tiny.llama(max_position_embeddings=1 << 16), tiny.tokenizer()
    model.save_pretrained(place / "models/mine")
    tokenizer.save_pretrained(place / "models/mine")
    judge = load_reward(tiny.llama(max_position_embeddings=1 << 16), new=True)
    save(place / "models/rm", judge, tokenizer, judge.state_dict().items())
    (place / "data").mkdir()
    (place / "rewards").mkdir()
    for name, row in {**ROWS, "test.parquet": ROWS["train.parquet"]}.items():
        if name.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 40), place / "data" / name)
        else:
            (place / "data" / name).write_text("\n".join([json.dumps(row)] * 40))
    for name, text in REWARDS.items():
        (place / name).write_text(text)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REASONS])
def test_the_command_runs_dry(name, stocked, capsys, monkeypatch):
    """Options, data, rewards, the model and its memory, in this process; nothing is trained."""
    from dataclasses import replace

    _, _, script, cfg = translated(stocked, name, capsys, monkeypatch)
    rewards = getattr(cfg, "reward", ())
    if "REWARD" in rewards or any(part in spec for spec in rewards for part in UNINSTALLED):
        cfg = replace(cfg, reward=("rewards/trl_style.py:correct",))
    if "DATA" in cfg.data:  # what the config leaves to its reader
        cfg = replace(cfg, data=("sort_digits:1",))
    with pytest.raises(SystemExit) as ended:
        load_script(script).main(replace(cfg, dry_run=True))
    assert ended.value.code == 0 and "nothing was trained" in capsys.readouterr().out
    assert not Path(cfg.out).exists()
