"""Configs and Python names of other libraries, and the pages: every name on our side exists."""

import dataclasses
import inspect
import re
import shlex
from pathlib import Path

import pytest
from test_house import load_script

import rft_fn as rft
from rft_fn import parsing
from rft_fn.migrate import names
from rft_fn.migrate.libraries import LIBRARIES
from rft_fn.migrate.translation import main, read, table, translate
from rft_fn.run.options import Limits

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))

ROOMS = [name for name in rft.__all__ if inspect.ismodule(getattr(rft, name))]
NAME = re.compile(r"\b(?:rft_fn(?!\.migrate)|Strategy|StrategyConfig)(?:\.\w+)+")
SHORT = re.compile(rf"(?<![\w./*-])(?:{'|'.join(ROOMS)})\.(?!py\b|md\b)[a-z]\w*(?:\.\w+)*")
PATH = re.compile(r"(?<![\w.-])(?:[\w.]+/)*\w+\.(?:py|md|jsonl|json)\b")
OPTION = re.compile(r"--([a-z][a-z0-9.\-]+)")
THEIR_FILES = {"my.py", "FILE.py", "a.jsonl", "b.jsonl", "trajectories.jsonl", "timing.jsonl", "config.json"}
SCRIPTS = {"sft": ["sft"], "dpo": ["dpo"], "rm": ["train_rm"], "rl": ["grpo", "ppo"]}
OWN = {
    kind: {option for script in scripts for option in parsing.names(load_script(script).Config)}
    for kind, scripts in SCRIPTS.items()
}
EVERY = set().union(*OWN.values())


def exists(name):
    """Whether a dotted name, of the library or of a strategy, leads to something."""
    first, *rest = name.split(".")
    here = {"rft_fn": rft, "Strategy": rft.Strategy, "StrategyConfig": rft.strategy.StrategyConfig}[first]
    for part in rest:
        known = getattr(here, "__dataclass_fields__", {})
        if part not in known and not hasattr(here, part):
            return False
        here = getattr(here, part, None)
    return True


def unknown_options(text, own):
    """The options in a text that neither the scripts nor torchrun have."""
    found = {re.sub(r"(^|\.)no_", r"\1", option.replace("-", "_")) for option in OPTION.findall(text)}
    return found - own - {"nproc_per_node", "nnodes"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_option_on_our_side_exists(library):
    for kind, trainer in LIBRARIES[library].trainers.items():
        for theirs, row in trainer.rows.items():
            text = " ".join([row.ours, row.note, *(row.values or {}).values()])
            assert not unknown_options(text, OWN[kind]), (kind, theirs)
            assert row.ours or row.note, (kind, theirs)


def tables(page):
    """(theirs, ours, kind of trainer) of each row of a page's tables, without those of options."""
    text, _, options = page.read_text().partition("## Option by option")
    for row in re.findall(r"^\| .*", text, re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        yield cells[-2], cells[-1], ""
    kind = ""
    for row in re.findall(r"^\| .*", options, re.M):
        theirs, ours, note = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        if ours == "rft_fn":
            kind = theirs.split(", ")[1]
        yield "", f"{ours} {note}", kind


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_name_on_a_page_exists(page):
    """Names of the library, of its rooms, paths and options, anywhere on our side."""
    found = set(NAME.findall(page.read_text()))
    assert found
    for _, ours, kind in tables(page):
        found |= {f"rft_fn.{name}" for name in SHORT.findall(ours)}
        assert not unknown_options(ours, OWN.get(kind, EVERY)), ours
        for path in PATH.findall(ours):
            places = (ROOT, ROOT / "train_scripts", page.parent, ROOT / "docs")
            assert any((place / path).exists() for place in places) or path in THEIR_FILES, path
    assert [name for name in sorted(found) if not exists(name)] == []


def test_the_page_of_lightrft_has_all_that_it_promises():
    text = (ROOT / "docs" / "coming_from" / "lightrft.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.M) == [str(i) for i in range(1, 115)]


def test_the_pages_have_the_tables_of_the_code():
    """As `python -m rft_fn.migrate NAME --table` prints them; LightRFT's page names the command."""
    for name in set(LIBRARIES) - {"lightrft"}:
        library, page = LIBRARIES[name], (ROOT / "docs" / "coming_from" / f"{name}.md").read_text()
        for kind, trainer in library.trainers.items():
            assert table(f"{library.title}, {kind}", trainer) in page, (name, kind)


# ------------------------------------------------------------------------------ translations


TRL = """
model_name_or_path: my/model
learning_rate: 2.0e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 8
num_generations: 4
max_steps: 200
loss_type: dr_grpo
scale_rewards: none
use_vllm: true
min_p: 0.1
reward_funcs: [my.py:first, "my.py:second(a b)"]
wibble: 3
"""
VERL = r"""
# a comment
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/train.parquet \
    data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.rollout.n=5 \
    trainer.total_epochs=15
"""
OPENRLHF = """
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --ds.packing_samples \
   --actor.eps_clip_low_high 0.2 0.28 --algo.advantage.estimator group_norm --algo.kl.use_loss \
   --algo.kl.init_coef=1e-3 --rollout.n_samples_per_prompt 8 --reward.clip_range -5 5
"""
LIGHTRFT = """
torchrun train_colocate.py --pretrain m --advantage_estimator gae --rollout_batch_size 64 \
  --n_samples_per_prompt 2   --adam_betas 0.9 0.95 --bf16 --use_fire --eps_clip 0.1
"""
TRL_SFT = """
model_name_or_path: my/model
dataset_name: my/data
dataset_config: main
dataset_train_split: train
packing: true
learning_rate: 2.0e-4
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_train_epochs: 2
max_length: 2048
use_peft: true
lora_target_modules: [q_proj, v_proj]
seed: 3
output_dir: runs/mine
"""
TRL_DPO = """
loss_type: sigmoid
beta: 0.2
label_smoothing: 0.1
max_length: 2048
max_steps: 200
num_train_epochs: 3
warmup_ratio: 0.1
rpo_alpha: 1.0
precompute_ref_log_probs: true
"""
TRL_RM = """
trl reward --model_name_or_path my/model --dataset_name my/pairs --learning_rate 1e-5 --output_dir runs/mine
"""
OPENRLHF_SFT = r"""
deepspeed --module openrlhf.cli.train_sft --max_len 2048 --dataset my/data --input_key question \
   --output_key response --train_batch_size 256 --pretrain m --learning_rate 2e-6 --packing_samples --bf16
"""
OPENRLHF_DPO = r"""
deepspeed --module openrlhf.cli.train_dpo --model.model_name_or_path m --data.dataset my/pairs \
   --data.apply_chat_template --model.beta 0.3 --model.ipo_enable --ds.lora.rank 8 --data.max_len 1024
"""
OPENRLHF_RM = """
deepspeed --module openrlhf.cli.train_rm --pretrain m --dataset my/pairs --prompt_key ask --max_epochs 2
"""
VERL_SFT = r"""
torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=train.parquet \
   data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] \
   +data.response_dict_keys=['answer'] model.partial_pretrain=m optim.lr=3e-5 trainer.total_epochs=2
"""
TRL_SERVER = """
num_generations: 4
use_vllm: true
vllm_mode: server
vllm_server_base_url: http://10.0.0.3:8001
vllm_tensor_parallel_size: 2
"""
CASES = {
    "trl": ("a.yaml", TRL, "grpo", {
        "model": "my/model", "lr": 2e-6, "prompts": 16, "group": 4, "steps": 100, "algorithm": "dr_grpo",
        "weight": "constant:512",
        "reward": ("my.py:first", "my.py:second(a b)"), "loss": Limits(low=0.2, high=0.2), "max_new": 512,
    }),
    "verl": ("a.sh", VERL, "grpo", {
        "data": ("${HOME}/train.parquet",), "prompts": 1024, "group": 5, "kl": 0.002, "algorithm": "grpo",
        "lr": 1e-6, "data_epochs": 15.0, "loss": Limits(low=0.2, high=0.2, dual=3.0), "schedule": "constant",
    }),
    "openrlhf": ("a.sh", OPENRLHF, "grpo", {
        "model": "m", "loss": Limits(low=0.2, high=0.28), "kl": 1e-3, "kl_in_reward": 0.0, "group": 8,
        "reward_clip": 5.0, "prompts": 1024, "lr": 1e-6, "schedule": "cosine",
    }),
    "lightrft": ("a.sh", LIGHTRFT, "ppo", {
        "model": "m", "prompts": 64, "group": 2, "beta1": 0.9, "beta2": 0.95,
        "loss": Limits(low=0.1, high=0.1), "kl": 0.01,
    }),
    "trl sft": ("a.yaml", TRL_SFT, "sft", {
        "model": "my/model", "data": ("my/data:main@train",), "lr": 2e-4, "batch": 32, "epochs": 2.0,
        "budget": 2048, "max_prompt": 2048, "lora_rank": 16, "lora_alpha": 32.0, "seed": 3, "warmup": 0,
        "lora_targets": "q_proj,v_proj", "out": "runs/mine", "steps": None, "lr_end": 0.0,
    }),
    "trl dpo": ("a.yaml", TRL_DPO, "dpo", {
        "loss": "dpo", "label_smoothing": 0.0, "beta": 0.2, "max_length": 2048, "budget": 4096, "lr": 1e-6,
        "steps": 200, "epochs": None, "warmup": 20, "nll": 1.0, "batch": 8,
    }),
    "trl rm": ("a.sh", TRL_RM, "train_rm", {
        "model": "my/model", "data": ("my/pairs",), "lr": 1e-5, "out": "runs/mine", "epochs": 3.0,
    }),
    "openrlhf sft": ("a.sh", OPENRLHF_SFT, "sft", {
        "model": "m", "data": ("my/data",), "template": "{question}", "response": "{response}", "batch": 256,
        "lr": 2e-6, "epochs": 2.0, "budget": 2048, "beta2": 0.95, "schedule": "cosine", "lr_end": 0.1,
    }),
    "openrlhf dpo": ("a.sh", OPENRLHF_DPO, "dpo", {
        "model": "m", "messages": ("chosen", "rejected"), "beta": 0.3, "loss": "ipo", "lora_rank": 8,
        "lora_alpha": 16.0, "lora_targets": "all-linear", "max_length": 1024, "budget": 2048, "lr": 1e-5,
    }),
    "openrlhf rm": ("a.sh", OPENRLHF_RM, "train_rm", {
        "model": "m", "template": "{ask}", "chosen": "{chosen}", "epochs": 2.0, "lr": 9e-6, "batch": 128,
    }),
    "verl sft": ("a.sh", VERL_SFT, "sft", {
        "model": "m", "data": ("train.parquet",), "template": "{extra_info[question]}", "lr": 3e-5,
        "response": "{extra_info[answer]}", "epochs": 2.0, "batch": 256, "schedule": "cosine",
    }),
    "trl server": ("a.yaml", TRL_SERVER, "grpo", {"group": 4, "lr": 1e-6}),
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_config_becomes_a_command_that_the_script_takes(library, tmp_path, capsys):
    for name in (name for name in CASES if name.split()[0] == library):
        file, text, script, wanted = CASES[name]
        (tmp_path / file).write_text(text)
        assert main([library, str(tmp_path / file)]) == 0, name
        printed = capsys.readouterr().out
        words = shlex.split(printed.replace("\\\n", " "), comments=True)
        assert words[:2] == ["python", f"train_scripts/{script}.py"], name
        config = load_script(script).Config
        found = parsing.parse(config, parsing.qualify(words[2:], config))
        assert {field: getattr(found, field) for field in wanted} == wanted, name


def test_a_server_of_vllm_stays_a_server(tmp_path, capsys):
    """TRL's own server is to be replaced, and its options are the server's."""
    (tmp_path / "a.yaml").write_text(TRL_SERVER)
    main(["trl", str(tmp_path / "a.yaml")])
    printed = capsys.readouterr().out
    words = shlex.split(printed.replace("\\\n", " "), comments=True)
    config = load_script("grpo").Config
    found = parsing.parse(config, parsing.qualify(words[2:], config)).strategy
    assert (found.engine_type, found.engine_servers) == ("openai", ("http://10.0.0.3:8001",))
    assert "start `vllm serve`" in printed and "vllm_tensor_parallel_size: " in printed
    assert "may change" not in printed

    # by host and port, and in the process
    options = {"num_generations": 4, "use_vllm": True, "vllm_server_host": "10.0.0.4"}
    server = translate(LIBRARIES["trl"], options).command
    assert "--strategy.engine-servers http://10.0.0.4:8000" in server
    options = {"num_generations": 4, "use_vllm": True, "vllm_mode": "colocate"}
    assert "--strategy.engine-type vllm" in translate(LIBRARIES["trl"], options).command


UNTOLD = [
    ("trl", "a.yaml", "learning_rate: 1.0e-5", "one of sft, dpo, rm, rl, or --trainer to name it"),
    ("trl", "a.yaml", "packing: true\nrpo_alpha: 1.0", "got those of sft, dpo"),
    ("trl", "a.sh", "trl tpo --learning_rate 1e-5", "got tpo; dpo.py learns from pairs, not from triples"),
    ("openrlhf", "a.sh", "python -m openrlhf.cli.train_kd --pretrain m", "got train_kd; rft_fn.loss"),
    ("verl", "a.yaml", "data: {train_files: a}", "one of sft, rl, or --trainer"),
]


def test_a_trainer_that_cannot_be_told_is_one_line(tmp_path, capsys):
    for system, file, text, message in UNTOLD:
        (tmp_path / file).write_text(text)
        assert main([system, str(tmp_path / file)]) == 2, text
        error = capsys.readouterr().err
        assert error.startswith("error: trainer: expected ") and message in error and error.count("\n") == 1


def test_a_trainer_can_be_named(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("learning_rate: 1.0e-5")
    for kind, script in (("sft", "sft"), ("dpo", "dpo"), ("rm", "train_rm"), ("rl", "grpo")):
        assert main(["trl", str(tmp_path / "a.yaml"), "--trainer", kind]) == 0
        assert f"train_scripts/{script}.py" in capsys.readouterr().out
    assert main(["verl", str(tmp_path / "a.yaml"), "--trainer", "dpo"]) == 2
    assert "trainer: expected one of sft, rl for verl, got dpo" in capsys.readouterr().err


def test_a_key_of_wandb_is_not_printed(tmp_path, capsys):
    (tmp_path / "a.sh").write_text("python train_ppo_ray.py --pretrain m --use_wandb SECRET")
    assert main(["openrlhf", str(tmp_path / "a.sh")]) == 0
    printed = capsys.readouterr().out
    assert "--trackers wandb" in printed and "SECRET" not in printed


def test_what_cannot_be_said_is_listed(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(TRL)
    main(["trl", str(tmp_path / "a.yaml")])
    printed = capsys.readouterr().out
    assert printed.index("min_p=0.1: ") < printed.index("python train_scripts/grpo.py")
    assert "# may change the objective, and is not translated: wibble=3\n" in printed
    (tmp_path / "a.sh").write_text(VERL)
    main(["verl", str(tmp_path / "a.sh")])
    assert "# --reward: theirs is a rule that the column data_source names" in capsys.readouterr().out


def test_sizes_of_updates_are_in_responses():
    """A rollout of 1,024 x 5 in updates of 256 prompts; of 8 x 8 responses in updates of 8 x 4."""
    options = {"data.train_batch_size": "1024", "actor_rollout_ref.rollout.n": "5"}
    found = translate(LIBRARIES["verl"], options)
    assert "--strategy.train-batch-size 1280" in found.command
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 8}
    found = translate(LIBRARIES["trl"], options)
    assert "--strategy.train-batch-size 32" in found.command
    assert "--strategy.train-batch-size" not in " ".join(
        translate(LIBRARIES["trl"], {"num_generations": 8}).command
    )


def bomb(line):
    """A text of 40 lines, each of which has the one before twice: 2^40 times the first."""
    lines = [line.format(k, k - 1, k - 1).replace(": ", f": &a{k} ", 1) for k in range(1, 41)]
    return "\n".join(["a0: &a0 {x: 1}", *lines])


def test_aliases_of_yaml_are_read(tmp_path):
    """As people write them: the defaults of a run, merged into its parts."""
    path = tmp_path / "a.yaml"
    path.write_text(
        "base: &b {lr: 1, seed: 2}\nactor: {<<: *b, lr: 3}\ncritic: *b\n" + f"note: {'x' * 2 * 10**6}"
    )
    found = read(str(path))[0].options
    assert [found[x] for x in ("actor.lr", "actor.seed", "critic.lr", "critic.seed")] == [3, 2, 1, 2]


UNREADABLE = [
    ("a.yaml", None, "a.yaml: expected a file, and there is none"),
    ("a.yaml", "a: [1", "a.yaml: expected yaml, which cannot be read"),
    ("a.json", "{", "a.json: expected json, which cannot be read"),
    ("a.yaml", "- 1", "a.yaml: expected a mapping of options, got list"),
    ("a.sh", "echo 'x", "a.sh: expected a shell script, which cannot be read"),
    ("a.sh", "echo hello", "a.sh: expected options, and there are none"),
    ("a.yaml", bomb("a{}: {{x: *a{}, y: *a{}}}"), "cannot be read: its aliases stand for"),
    ("a.yaml", bomb("a{}: [*a{}, *a{}]"), "cannot be read: its aliases stand for"),
    ("a.yaml", bomb("a{}: {{<<: [*a{}, *a{}]}}"), "cannot be read: its aliases stand for"),
    ("a.yaml", "a: &a {b: *a}", "cannot be read: an alias stands inside of what it names"),
    ("a.yaml", "a: &a [*a]", "cannot be read: an alias stands inside of what it names"),
    ("a.yaml", "[" * 5000, "a.yaml: expected yaml, which cannot be read"),
    ("a.json", "[" * 100_000, "a.json: expected json, which cannot be read"),
    ("a.yaml", "a: " + "9" * 5000, "a.yaml: expected yaml, which cannot be read"),
    ("a.yaml", "a: !!python/name:os.system", "a.yaml: expected yaml, which cannot be read"),
    ("a.yaml", "a: \udcff", "a.yaml: expected a text, which cannot be read"),
]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, capsys):
    for k, (name, text, message) in enumerate(UNREADABLE):
        path = tmp_path / str(k) / name
        path.parent.mkdir()
        if text is not None:
            path.write_bytes(text.encode(errors="surrogateescape"))
        assert main(["trl", str(path)]) == 2, message
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


# ------------------------------------------------------------------------------ Python's names


def test_names_of_other_libraries_are_answered():
    """On a strategy, its config, and the root; what has no hint is an AttributeError as any other."""
    fake, config = rft.strategy.get_fake_strategy(), rft.strategy.StrategyConfig()
    owners = [
        (fake, "Strategy", names.STRATEGY),
        (config, "StrategyConfig", names.CONFIG),
        (rft, "rft_fn", {**names.STRATEGY, **names.ROOT}),
    ]
    assert not set(names.STRATEGY) & set(rft.Strategy._fields)
    for owner, title, hints in owners:
        for name in hints.keys() - set(dir(owner)):
            with pytest.raises(AttributeError) as caught:
                getattr(owner, name)
            assert str(caught.value) == f"{title} has no attribute {name!r}; {hints[name]}"
        with pytest.raises(AttributeError, match=rf"^{title} has no attribute 'wibble'$") as caught:
            getattr(owner, "wib" + "ble")
        assert (caught.value.name, caught.value.obj) == ("wibble", owner)  # by which Python suggests others
    with pytest.raises(ImportError):
        exec("from rft_fn import wibble")


def test_hints_name_what_exists():
    for hint in [*names.STRATEGY.values(), *names.CONFIG.values(), *names.ROOT.values()]:
        for name in NAME.findall(hint):
            assert exists(name), name
        assert not unknown_options(hint, EVERY), hint


def test_hints_and_translations_lead_to_the_same_option():
    rows = LIBRARIES["lightrft"].trainers["rl"].rows
    for name in set(names.CONFIG) & set(rows):
        theirs = set(OPTION.findall(rows[name].ours)) - {"trackers", "algorithm", "strategy.log-dir"}
        if "an option of the scripts" in names.CONFIG[name]:
            assert theirs <= set(OPTION.findall(names.CONFIG[name])), name


# names in the left columns that are options of their commands, data, or parts of a sentence
NOT_ATTRIBUTES = {
    "all_images", "device_map", "forward", "sleep_engine", "train", "reward_func", "train_ppo_ray",
    "train_sft", "train_dpo", "train_rm", "serve_rm", "main_ppo", "fsdp_sft_trainer", "sft_trainer",
    "per_device_train_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "orchestrator", "uv",
}  # fmt: skip


def test_each_name_on_a_page_is_answered():
    """What a page says that they have exists under that name, or has a hint."""
    ours = set(rft.Strategy._fields) | {f.name for f in dataclasses.fields(rft.strategy.StrategyConfig)}
    ours |= set(vars(rft.strategy.StrategyConfig)) | set(rft.Engine._fields) | set(dir(rft))
    for room in ROOMS:
        ours |= set(vars(getattr(rft, room)))
    ours |= set(names.STRATEGY) | set(names.CONFIG) | set(names.ROOT) | NOT_ATTRIBUTES
    for page in (page for page in PAGES if page.stem != "objectives"):  # it has configs, no names
        theirs = set()
        for cell, _, _ in tables(page):
            for code in re.findall(r"`([A-Za-z_][^`]*)`", cell):
                theirs |= set(re.split(r"[(=> ]", code.removeprefix("strategy."))[0].split(".")[:1])
        assert theirs and not theirs - ours, (page.stem, theirs - ours)
