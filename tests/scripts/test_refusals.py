"""Every command line that a script refuses: one line with the option and its value, before any training.

A line of a table is (script, its arguments, the error). " ... " in the error stands for words in between, and
the error may go on. A new refusal is one more line.
"""

import io
import re
import shlex

import pytest
from test_house import load_script

import rft_fn as rft
from rft_fn import parsing

pytestmark = pytest.mark.slow

FILES = {
    "a.jsonl": "".join(f'{{"question": "{10 + i}", "answer": "{i}"}}\n' for i in range(8)),
    "b.jsonl": "".join(f'{{"question": "{50 + i}", "answer": "{i}"}}\n' for i in range(6)),
    "empty.jsonl": "",
    "mine.py": "def one(completions, **_):\n    return [0.0]\n\n\n"
    "def nan(completions, **_):\n    return [float('nan')] * len(completions)\n",
}

# what is typed wrong, by the whole line
TYPED = [
    ("grpo", "--lr abc", "lr: expected a number, got 'abc'"),
    ("grpo", "--lr", "lr: expected a value, got none"),
    ("grpo", "--steps=2.5", "steps: expected an integer, or None, got '2.5'"),
    ("grpo", "--clip-low x", "loss.low: expected a number, or None, got 'x'"),
    ("grpo", "--clip-low -0.1", "loss.low: expected a number in [0, inf), or None, got -0.1"),
    ("grpo", "--schedule foo", "schedule: expected one of linear, cosine, constant, got 'foo'"),
    ("grpo", "--fsdp false", "unrecognized options: false; --help lists the options"),
    ("grpo", "--kll 1", "unrecognized options: --kll, 1; did you mean --kl?"),
    ("grpo", "--keep-flatt", "unrecognized options: --keep-flatt; did you mean --keep-flat?"),
    ("grpo", "--learning-speed 1", "unrecognized options: --learning-speed, 1; --help lists the options"),
    ("grpo", "--num-generations 4", "--num-generations of TRL is --group here; --help lists the options"),
    ("grpo", "--zero-stage x", "strategy.zero_stage: expected an integer, got 'x'"),
    ("grpo", f"--lora-rank {10**20}", f"lora_rank: expected an integer in [0, 65536], got {10**20}"),
    ("grpo", f"--group {10**20}", f"group: expected an integer of at most 64 bits, got {10**20}"),
    ("grpo", "--out ''", "out: expected a text that is not empty, got ''"),
    ("grpo", "--model=", "model: expected a text that is not empty, got ''"),
    ("grpo", f"--seed {2**63}", f"seed: expected an integer in [{-(2**63)}, {2**63 - 1}], got {2**63}"),
]

NOT_READ = "... as this script does not read it, got ... leave it out"
LIMITS = [
    ("grpo", "--lr nan", "lr: expected a number in (0, inf), got nan"),
    ("grpo", "--lr inf", "lr: expected a number in (0, inf), got inf"),
    ("grpo", "--lr -0.001", "lr: expected a number in (0, inf), got -0.001"),
    ("grpo", "--lr-end nan", "lr_end: expected a number in [0, 1], got nan"),
    ("grpo", "--lr-end 2", "lr_end: expected a number in [0, 1], got 2.0"),
    ("grpo", "--kl nan", "kl: expected a number in [0, inf), got nan"),
    ("grpo", "--kl -1", "kl: expected a number in [0, inf), got -1.0"),
    ("grpo", "--timeout nan", "timeout: expected a number in [1, inf), got nan"),
    ("grpo", "--steps -3", "steps: expected an integer in [1, inf), or None, got -3"),
    ("grpo", "--max-gap nan", "max_gap: expected a number in (0, inf), or None, got nan"),
    ("grpo", "--eval-prompts 0", "eval_prompts: expected an integer in [1, inf), got 0"),
    ("grpo", "--rounds 0", "rounds: expected an integer in [1, inf), got 0"),
    ("grpo", "--overlong 9", "overlong: expected at most max_new = 6, got 9"),
    ("grpo", "--temperature 0", "temperature: expected > 0"),
    ("grpo", "--budget 5", "budget: expected at least"),
    ("sft", "--save-every 0", "save_every: expected an integer in [1, inf), got 0"),
    ("sft", "--save-every -1", "save_every: expected an integer in [1, inf), got -1"),
    ("sft", "--batch 0", "batch: expected an integer in [1, inf), got 0"),
    ("evaluate", "--temperature inf", "temperature: expected a number in [0, inf), or None, got inf"),
    ("ppo", "--critic-lr nan", "critic_lr: expected a number in (0, inf), got nan"),
    ("ppo", "--eval-every 0", "eval_every: expected an integer in [1, inf), got 0"),
    ("ppo", "--epochs 0", "epochs: expected an integer in [1, inf), got 0"),
    ("ppo", "--minibatches 1000", "minibatches: expected at most 512, got 1000"),
    ("ppo", "--prompts 4 --group 4 --minibatches 17", "minibatches: expected at most 16, got 17"),
    ("ppo", "--gae-lambda 1.1", "gae_lambda: expected a number in [0, 1], or None, got 1.1"),
    ("ppo", "--gamma -0.1", "gamma: expected a number in [0, 1], got -0.1"),
    ("ppo", "--gamma nan", "gamma: expected a number in [0, 1], got nan"),
    ("ppo", "--freeze-actor-steps -1", "freeze_actor_steps: expected an integer in [0, inf), got -1"),
    ("ppo", "--dual 0.5", "loss.dual: expected a number in (1, inf), or None, got 0.5"),
    ("ppo", "--dual 1.0", "loss.dual: expected a number in (1, inf), or None, got 1.0"),
    ("ppo", "--algorithm vapo --gae-alpha 0", "gae_alpha: expected a number in (0, inf), or None, got 0.0"),
    ("ppo", "--overlong 7", "overlong: expected at most max_new = 6, got 7"),
    ("ppo", "--ema 1", "ema: expected a number in [0, 1), got 1.0"),
    ("sweep", "--points 1", "points: expected an integer in [2, inf), got 1"),
    ("sweep", "--group 1", "group: expected an integer in [2, inf), got 1"),
    ("sweep", "--low 0", "low: expected a number in (0, inf), got 0.0"),
    ("sweep", "--low 2", "low, high: expected 0 < low < high, got 2.0 and 1.0"),
    ("train_rm", "--label-smoothing 0.5", "label_smoothing: expected a number in [0, 0.5), got 0.5"),
    ("dpo", "--label-smoothing 0.5", "label_smoothing: expected a number in [0, 0.5), got 0.5"),
    ("dpo", "--beta 0", "beta: expected a number in (0, inf), or None, got 0.0"),
    ("dpo", "--max-norm 0", "max_norm: expected a number in (0, inf), got 0.0"),
    ("dpo", "--loss kto --batch 1", "batch: expected at least 2 with kto"),
]
UNREAD = [
    ("grpo", "--strategy.max-norm 1", "strategy.max_norm: ... script does not read it, got ... --max-norm"),
    ("sft", "--strategy.max-norm 1", "strategy.max_norm: ... script does not read it, got ... --max-norm"),
    ("grpo", "--strategy.seed 1", "strategy.seed: ... as this script does not read it, got ... --seed"),
    ("sft", "--strategy.seed 1", "strategy.seed: ... as this script does not read it, got ... --seed"),
    ("evaluate", "--strategy.seed 1", "strategy.seed: ... as this script does not read it, got ... --seed"),
    ("ppo", "--strategy.seed 1", "strategy.seed: ... as this script does not read it, got ... --seed"),
    ("sft", "--engine-batch 7", f"strategy.engine_batch: {NOT_READ}"),
    ("sft", "--engine-mem-util 0.5", f"strategy.engine_mem_util: {NOT_READ}"),
    ("sft", "--engine-tp-size 2", f"strategy.engine_tp_size: {NOT_READ}"),
    ("sft", "--engine-type vllm", f"strategy.engine_type: {NOT_READ}"),
    ("sft", "--replay-routing", f"strategy.replay_routing: {NOT_READ}"),
    ("sft", "--disable_engine_sleep", f"strategy.enable_engine_sleep: {NOT_READ}"),
    ("sft", "--plot-every 2", f"strategy.plot_every: {NOT_READ}"),
    ("evaluate", "--plot-every 2", f"strategy.plot_every: {NOT_READ}"),
    ("evaluate", "--zero-stage 2", f"strategy.zero_stage: {NOT_READ}"),
    ("evaluate", "--log-dir logs", f"strategy.log_dir: {NOT_READ}"),
    ("evaluate", "--bf16", f"strategy.bf16: {NOT_READ}"),
    ("evaluate", "--tasks lm_eval:gsm8k --reward math", "reward: expected (), ... --tasks takes its place"),
    ("evaluate", "--chat", "chat: expected False, ... got True; it is for --tasks"),
    ("evaluate", "--tasks gsm8k", "tasks: expected lm_eval:TASK or lm_eval:FILE.yaml, got 'gsm8k'; other"),
    ("evaluate", "--repeats 4", "k, group: expected k <= group, and temperature > 0 for a group above 1"),
    ("train_rm", "--kind lists --chosen {x}", "chosen: expected '{chosen}', as this script does not read it"),
    ("train_rm", "--kind lists --centering 0.1", "centering: expected 0.0, as this script does not read it"),
    ("train_rm", "--kind points --label-smoothing 0.1", "label_smoothing: expected 0.0"),
    ("train_rm", "--loss mse", "loss: expected 'bce', ... does not read it, got 'mse'; --kind pairs has"),
    ("train_rm", "--train-batch-size 8", "strategy.train_batch_size: expected 0, as this script"),
    ("train_rm", "--router-aux 0.1", "router_aux: expected 0.0, as this script does not read it"),
    ("train_rm", "--no-lora-merge --lora-rank 2", "lora_merge: expected True"),
    ("train_rm", "--data x.jsonl --negatives noise", "negatives: expected ('guess=2', "),
    ("train_rm", "--messages a b c --chosen {x}", "chosen: expected '{chosen}', as this script"),
    ("dpo", "--train-batch-size 8", "strategy.train_batch_size: expected 0, as this script"),
    ("dpo", "--engine-batch 7", "strategy.engine_batch: expected "),
    ("dpo", "--messages a b c --chosen {x}", "chosen: expected '{chosen}', as this script"),
    ("dpo", "--margin 2", "margin: expected 1.0, as this script"),
    ("dpo", "--loss bco --desirable-weight 2", "desirable_weight: expected 1.0, as this script"),
    ("dpo", "--label good", "label: expected 'label', as this script"),
]
TOGETHER = [
    ("grpo", "--group 1", "group: expected >= 2 responses per prompt for grpo"),
    ("grpo", "--advantage rloo --group 1", "group: expected >= 2 responses per prompt for rloo, "),
    ("grpo", "--algorithm remax --normalize-reward", "normalize_reward: expected off with remax"),
    ("grpo", "--algorithm remax --reward-norm group", "reward_norm: expected none with remax"),
    ("grpo", "--algorithm rloo --clip-low 0.1", "loss.low: expected None, rloo has no limits, got 0.1"),
    ("grpo", "--algorithm rloo --loss.cap 2", "loss.cap: expected None, rloo has no limits, got 2.0"),
    ("grpo", "--algorithm sapo --loss.low 0.1", "loss.low: expected None, sapo has tau_pos, ... got 0.1"),
    ("grpo", "--clip-low 0.1 --loss.low 0.2", "loss.low: expected it once, got it as clip_low too"),
    ("grpo", "--replay-routing --engine-type vllm", "replay_routing: expected engine_type hf, ... got vllm"),
    ("grpo", "--max-new 200", "... the model's window of 128; lower max_new"),
    ("grpo", "--steps 3 --data-epochs 2", "steps, data_epochs: expected one of them, got 3 and 2.0"),
    ("ppo", "--steps 3 --data-epochs 2", "steps, data_epochs: expected one of them, got 3 and 2.0"),
    ("sft", "--steps 3 --epochs 2", "steps, epochs: expected one of them, got 3 and 2.0"),
    ("sft", "--epochs 2 --data reverse", "epochs: expected rows that end, got 2.0 of reverse:1"),
    ("grpo", "--data-epochs 2 --data reverse", "data_epochs: expected rows that end, got 2.0 of"),
    ("ppo", "--ptx 0.1", "ptx_data: expected one, as ptx is 0.1, got none"),
    ("ppo", "--algorithm vapo --gae-lambda 1", "gae_lambda: expected None for vapo"),
    ("ppo", "--gae-alpha 1", "gae_alpha: expected None for ppo, got 1.0"),
    ("grpo", "--in-flight", "ahead: expected above 0 with in_flight, which samples while it learns, got 0"),
    ("grpo", "--ahead 1 --in-flight --engine-type ray", "in_flight: expected engine_type hf or openai, "),
    ("ppo", "--kl-target 0.1", "kl: expected one, as kl_target is 0.1, got none"),
    ("multi_turn", "--gamma 0.9", "gamma: expected 1 without --credit turn"),
    ("multi_turn", "--algorithm remax", "algorithm: expected one without a greedy baseline"),
    ("multi_turn", "--eval-share 0.5", "eval_share: expected 0.1"),
    ("multi_turn", "--steps 2 --data-epochs 1", "steps, data_epochs: expected one of them"),
    ("train_rm", "--kind steps --heads a b", "heads: expected one with --kind steps, got a, b"),
    ("train_rm", "--kind lists --micro-train-batch-size 8", "micro_train_batch_size: expected 0, a list"),
    ("train_rm", "--micro-train-batch-size 1", "micro_train_batch_size: expected 0 or at least 2, a pair"),
    ("train_rm", "--keep-heads --lora-rank 2", "keep_heads: expected False with lora_rank 2, whose adapters"),
    ("train_rm", "--template '' --kind points", "template: expected a text; an empty one is for pairs"),
    ("train_rm", "--kind steps --messages a", "messages: expected none for steps"),
    ("train_rm", "--budget 20", "data: sort_digits, pair 0: the pair has "),
    ("dpo", "--loss cdpo", "label_smoothing: expected above 0 with --loss cdpo, and 0 with others, got 0.0"),
    ("dpo", "--label-smoothing 0.1", "label_smoothing: expected above 0 with --loss cdpo, and 0 with others"),
    ("dpo", "--loss robust", "label_smoothing: expected above 0 with --loss robust, and 0 with others"),
    ("dpo", "--micro-train-batch-size 1", "micro_train_batch_size: expected 0 or at least 2, a pair shares"),
    ("dpo", "--template '' --system x", "system: expected none with an empty template"),
    ("dpo", "--budget 20", "data: sort_digits, pair 0: the pair has 24 tokens, above 20: a pack holds both"),
    ("dpo", "--unpaired", "loss: expected kto or bco with --unpaired, which compares nothing, got dpo"),
    ("dpo", "--loss kto --nll 1", "nll: expected 0 with kto, a loss of single responses, got 1.0"),
    ("dpo", "--loss simpo --ld-alpha 0.5", "ld_alpha: expected 1 with simpo, not of sums of pairs"),
    ("distill", "--teacher a b", "teacher_column: expected one, as there are 2 teachers"),
    ("distill", "--teacher a --teacher-column c", "teacher: expected NAME=TEACHER ... got 'a'"),
    ("distill", "--teacher self", "hint: expected one with the teacher self"),
    ("distill", "--teacher a --hint {x} --messages m", "messages: expected none with hint {x}, which"),
    ("distill", "--teacher a --loss to_go --gamma 0", "gamma: expected above 0 for to_go"),
    ("distill", "--teacher a --loss sampled --on-policy 0.5", "on_policy: expected 1 with --loss sampled"),
    ("distill", "--teacher a --rl 1 --on-policy 0.5", "on_policy: expected 1 with rl 1, which learns"),
    ("distill", "--teacher a --ahead 1 --on-policy 0.5", "ahead: expected 0 with on_policy 0.5, where"),
    ("distill", "--teacher a --loss nll", "on_policy: expected below 1 with --loss nll"),
    ("distill", "--loss nll --on-policy 0", "teacher: expected one for --off-policy teacher, got none"),
    ("distill", "--teacher ema", "ema: expected the decay of an average for the teacher ema, got 0"),
    ("distill", "--teacher self --hint {short} --top-p 0.9", "top_k: expected words of the teacher self"),
]
NAMES = [
    ("grpo", "--algorithm ppo2", "algorithm: expected one of grpo"),
    ("grpo", "--algorithm ppo", "... has a critic: see train_scripts/ppo"),
    ("grpo", "--weight constant", "weight: expected one of token_mean, ... constant:LENGTH, got 'constant'"),
    ("grpo", "--advantage ppo", "advantage: expected one of grpo, dr_grpo, "),
    ("grpo", "--reward best", "reward 'best': expected one of math"),
    ("grpo", "--model ./nowhere", "... expected a folder, a hub name"),
    ("grpo", "--model a.jsonl", "model: expected a folder of a model, got the file 'a.jsonl'"),
    ("grpo", "--template {query}", "... has no column 'query'"),
    ("ppo", "--algorithm ppo2", "algorithm: expected one of ppo, vapo, got 'ppo2'"),
    ("ppo", "--algorithm grpo", "... got 'grpo', which has no critic: see train_scripts/grpo"),
    ("ppo", "--critic ./nowhere", "... expected a folder, a hub name"),
    ("ppo", "--template {query}", "... has no column 'query'"),
    ("ppo", "--ptx 0.1 --ptx-data sort_digits --ptx-response {solution}", "... has no column 'solution'"),
    ("multi_turn", "--environment chess", "environment: expected one of guess_number"),
    ("train_rm", "--negatives gess", "negatives: expected names of guess, mistake, ordered, length, noise"),
    ("train_rm", "--kind points --heads score style", "... the row has no column 'style'; it has"),
    ("train_rm", "--heads a a", "heads: expected names that differ, got 'a' twice"),
    ("train_rm", "--pool max", "pool: expected one of '', last, mean, attention, got 'max'"),
    ("dpo", "--messages chosen", "messages: expected the columns of prompt, chosen and rejected"),
    ("dpo", "--loss kto --unpaired --label good", "... 'good'"),
    ("dpo", "--loss nothing", "loss: expected one of dpo, cdpo, robust, rpo, dpo_norm, ipo, hinge, exo"),
    ("distill", "", "teacher: expected a model, ... or a server, got none; ... run grpo.py"),
    ("distill", "--teacher /nowhere", "teacher: expected a folder, a hub name"),
    ("distill", f"--teacher self --hint {'{short}' * 99}", "hint: expected at most "),
    ("distill", "--teacher self --hint {nothing}", "hint: expected a column of the rows"),
    ("distill", "--teacher 1=self --teacher-column kind --hint {short}", "teacher_column: expected a column"),
    *(
        ("sweep", f"--train --configs {x}", f"configs: expected ROW,low=X,high=X,dual=X,lr=X ... got '{x}'")
        for x in ("grpo,high", "grpo,limit=1", "grpo,lr=fast")
    ),
]
PLACES = [
    ("grpo", "--data nowhere.jsonl", "... could not read 'nowhere.jsonl': no such file"),
    ("train_rm", "--data nowhere.jsonl", "... could not read 'nowhere.jsonl': no such file"),
    ("dpo", "--data nowhere.jsonl", "... could not read 'nowhere.jsonl': no such file"),
    ("grpo", "--data empty.jsonl", "... expected at least one row"),
    ("grpo", "--data", "data: expected at least one source, got none"),
    ("grpo", "--data a.jsonl=0", "data: expected a share above 0"),
    (
        "grpo",
        "--template {question} --data a.jsonl=0.1 b.jsonl=0.33333333",
        "shares: expected the proportions of whole",
    ),
    ("grpo", "--out empty.jsonl/r", "run folder empty.jsonl/r cannot be written"),
    ("sweep", "--model none --out empty.jsonl/x", "out: ... empty.jsonl/x cannot be made: Not a directory; "),
    ("grpo", "--reward mine.py:one", "... expected 2 values, got 1"),
    ("grpo", "--reward mine.py:nan", "... not a finite number"),
]
CASES = [*LIMITS, *UNREAD, *TOGETHER, *NAMES, *PLACES]
# found by a model, or by sampling from it
LOADED = (
    "--max-new 200",
    "./nowhere",
    "/nowhere",
    "--reward mine.py",
    "--ptx-response",
    "--hint",
    "--budget 5",
)


def refusal(name, words):
    """The error of a script, which is built and run as `rft run` does."""
    script = load_script(name)
    with pytest.raises(ValueError) as error:
        script.main(parsing.parse(script.Config, parsing.qualify(words, script.Config)))
    return str(error.value)


@pytest.mark.parametrize(("name", "args", "line"), CASES, ids=lambda x: x[:60])
def test_a_mistake_is_one_line_before_anything_is_made(name, args, line, tmp_path, monkeypatch):
    """No model is loaded to find most of them, and no step is in the folder of the run."""
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    loaded = any(word in args for word in LOADED)
    if not loaded:
        monkeypatch.setattr(rft.model, "load", None)
    words = shlex.split(args)
    if name != "evaluate" and "--out" not in words:
        words += ["--out", "r"]
    error = refusal(name, words)
    assert re.match(".*".join(map(re.escape, line.split("... "))), error) and "\n" not in error
    made = {path.name for path in tmp_path.iterdir()} - {*FILES, "__pycache__"}
    assert not made or (made == {"r"} and (loaded or name == "sweep"))
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(("name", "args", "line"), TYPED, ids=lambda x: x[:60])
def test_what_is_typed_wrong_is_one_line(name, args, line, encoding, monkeypatch):
    """Whatever the terminal can show, and however narrow it is."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    monkeypatch.setenv("COLUMNS", "60")
    assert refusal(name, shlex.split(args)) == line


def test_an_option_that_must_be_given_is_named():
    with pytest.raises(ValueError, match=r"^missing: STR the folder of the run; --help lists the options$"):
        parsing.parse(load_script("export").Config, [])


def test_the_command_line_ends_with_code_2_and_the_line(tmp_path, monkeypatch, capsys):
    script = load_script("grpo")
    monkeypatch.setattr("sys.argv", ["grpo.py", "--lr", "nan", "--out", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as end:
        rft.run.cli(script.main, script.Config)
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: lr: expected a number in (0, inf), got nan\n"
