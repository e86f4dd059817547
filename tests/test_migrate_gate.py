"""The gate before a translated command: a known program, a known release, unknown names first."""

import re
import shlex

import pytest
from each_case import each
from test_house import load_script

from rft_fn import parsing
from rft_fn.migrate.translation import main
from rft_fn.run.building import usual_optimizer
from rft_fn.run.opening import warmup_updates

ROLLOUTS = (
    "algorithm.adv_estimator=grpo data.train_files=t.parquet data.train_batch_size=64 "
    "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=4 "
)
TRL = "model_name_or_path: m\ndataset_name: d.jsonl\nnum_generations: 8\nreward_funcs: r.py:f\n"


@pytest.fixture(name="said")
def make_said(tmp_path, capsys, monkeypatch):
    """A function of a file's name and text: (exit status, what is printed)."""
    monkeypatch.chdir(tmp_path)

    def said(name, text, *arguments):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        status = main([*arguments, name])
        printed = capsys.readouterr()
        return status, printed.out if status == 0 else printed.err

    return said


def options(printed):
    """The script of a printed command, and its options by their names."""
    words = shlex.split(printed.replace("\\\n", " "), comments=True)
    script = words[1].partition("/")[2].removesuffix(".py")
    config = load_script(script).Config
    return script, parsing.parse(config, parsing.qualify(words[2:], config))


# ------------------------------------------------------------------------------ programs

REFUSED = {
    "verl.trainer.main_generation_server": "evaluate.py",
    "recipe.gkd.main_gkd": "distill.py",
    "recipe.spin.main_spin": "pairs",
    "recipe.sppo.main_sppo": "--loss sppo",
    "recipe.prime.main_prime": "reward model learns in the run",
    "recipe.vla.main_ppo": "got recipe.vla.main_ppo",
    "verl.trainer.main_diffusion": "got verl.trainer.main_diffusion",
    "recipe.mine.reward_server": "got recipe.mine.reward_server",
    "mine.verl.main_agent": "got mine.verl.main_agent",
    "mine.train_it": "got mine.train_it",
}


@each("module", REFUSED)
def test_a_program_that_is_not_understood_is_refused_by_name(module, said):
    for started in (f"-m {module}", f"/root/{module.replace('.', '/')}.py"):
        status, line = said("a.sh", f"python3 {started} {ROLLOUTS}")
        assert status == 2 and line.count("\n") == 1 and module.rpartition(".")[2] in line, line
    status, line = said("a.sh", f"python3 -m {module} {ROLLOUTS}")
    assert REFUSED[module] in line


def test_programs_that_are_understood(said):
    for started in (
        "-m verl.trainer.main_ppo", "/opt/verl/verl/trainer/main_ppo.py", "-m recipe.dapo.main_dapo",
        "-m recipe.dapo.src.main_dapo", "main_ppo.py", "-m verl.experimental.one_step_off_policy.main_ppo",
    ):  # fmt: skip
        status, printed = said("a.sh", f"python3 {started} {ROLLOUTS}")
        assert status == 0 and options(printed)[0] == "grpo", started
    assert said("a.sh", f"python3 -m recipe.mine.main_mine {ROLLOUTS}", "--trainer", "rl")[0] == 0
    status, line = said("a.sh", "python -m openrlhf.cli.train_it --pretrain m --prompt_data d")
    assert status == 2 and line.startswith("error: program: expected one of ")


# ------------------------------------------------------------------------------ releases


def test_an_old_release_of_verl_has_its_kl_in_the_reward(said):
    old = ROLLOUTS + "actor_rollout_ref.actor.ppo_micro_batch_size=8 algorithm.kl_ctrl.kl_coef=0.02"
    status, printed = said(
        "a.sh", f"python3 -m verl.trainer.main_ppo {old} actor_rollout_ref.actor.clip_ratio=0.3"
    )
    script, cfg = options(printed)
    assert (script, cfg.kl_in_reward, cfg.entropy, cfg.loss.dual) == ("grpo", 0.02, 0.001, None)
    assert (cfg.loss.low, cfg.loss.high) == (0.3, 0.3)
    assert "# version: of a release before 0.4, as " in printed
    # with a loss of its own there is none in the reward
    text = f"python3 -m verl.trainer.main_ppo {old} actor_rollout_ref.actor.use_kl_loss=True"
    assert options(said("a.sh", text)[1])[1].kl_in_reward == 0

    # named, and told by newer names
    new = f"python3 -m verl.trainer.main_ppo {ROLLOUTS}"
    assert options(said("a.sh", new, "--from-version", "0.2.0.post2")[1])[1].kl_in_reward == 0.001
    assert (
        options(said("a.sh", f"python3 -m verl.trainer.main_ppo {old}", "--from-version", "v0.7")[1])[
            1
        ].entropy
        == 0
    )
    later = f"{new} {old} actor_rollout_ref.actor.loss_agg_mode=token-mean"
    assert options(said("a.sh", later)[1])[1].kl_in_reward == 0
    status, line = said("a.sh", new, "--from-version", "old")
    assert (status, line) == (2, "error: from-version: expected a release such as 0.15, got 'old'\n")


def test_releases_of_trl_differ_in_their_defaults(said):
    def of(version):
        cfg = options(said("a.yaml", TRL, "--from-version", version)[1])[1]
        return cfg.kl, cfg.temperature, cfg.algorithm, cfg.max_new

    assert of("0.14") == (0.04, 0.9, "grpo", 256)
    assert of("0.17.0") == (0.04, 0.9, "dapo", 256)
    assert of("0.18") == (0.04, 1.0, "dapo", 256)
    assert of("1.0") == (0.0, 1.0, "dapo", 256)
    assert of("1.10") == (0.0, 1.0, "dapo", 512)

    # told by a name that went away, and said where the file tells none
    printed = said("a.yaml", f"{TRL}vllm_device: auto\n")[1]
    assert options(printed)[1].kl == 0.04 and "as vllm_device tells" in printed
    assert "beta (0.04 before 0.19)" in said("a.yaml", TRL)[1]
    assert "beta (0.04" not in said("a.yaml", f"{TRL}beta: 0.1\n")[1]


# ------------------------------------------------------------------------------ names that are not known

UNKNOWN = [
    "trainer.rejection_sample=True", "actor_rollout_ref.actor.adaptive_entropy.enabled=True",
    "actor_rollout_ref.rollout.ignore_eos=True", "reward_model.reward_manager=yr",
    "algorithm.use_pf_ppo=True",
    "data.custom_cls.path=my.py", "algorithm.weird=1", "actor_rollout_ref.model.twist=1",
    "reward_model.shape=2",
    "actor_rollout_ref.rollout.repetition_penalty=1.2", "actor_rollout_ref.rollout.top_k=50", "mine.coef=0.3",
    "actor_rollout_ref.ref.update_every=10", "actor_rollout_ref.actor.kl_loss_type=mse",
]  # fmt: skip


@each("option", UNKNOWN)
def test_what_may_change_the_objective_is_printed_first(option, said):
    status, printed = said("a.sh", f"python3 -m verl.trainer.main_ppo {ROLLOUTS} {option}")
    first, _, rest = printed.partition("python train_scripts/")
    assert status == 0 and first.startswith("# may change the objective") and option in first
    assert option not in rest


HARMLESS = [
    "trainer.balance_batch=True", "actor_rollout_ref.rollout.enforce_eager=False",
    "ray_kwargs.ray_init.num_cpus=8",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True", "trainer.val_before_train=False",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "algorithm.use_pf_ppo=False",
    "actor_rollout_ref.rollout.ignore_eos=False", "critic.optim.lr=1e-5", "trainer.max_actor_ckpt_to_keep=2",
]  # fmt: skip


@each("option", HARMLESS)
def test_what_changes_none_is_not(option, said):
    status, printed = said("a.sh", f"python3 -m verl.trainer.main_ppo {ROLLOUTS} {option}")
    assert status == 0 and printed.startswith("python train_scripts/grpo.py"), printed


FOREIGN = {
    "Axolotl": "base_model: m\nsequence_len: 512\nmicro_batch_size: 2\nlearning_rate: 1e-5\nlora_r: 8\n",
    "LLaMA-Factory": "stage: dpo\nfinetuning_type: lora\nmodel_name_or_path: m\nlearning_rate: 1e-5\n",
    "NeMo-RL": "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}\npolicy: {model_name: m}\n",
}


@each("name", FOREIGN)
def test_a_system_that_is_not_read_is_named(name, said):
    status, line = said("a.yaml", FOREIGN[name])
    assert status == 2 and f"got one of {name} (" in line and line.count("\n") == 1


def test_a_file_that_is_mostly_unknown_is_refused(said):
    names = "".join(f"mine_{k}: {k}\n" for k in range(6))
    status, line = said("a.yaml", TRL + names, "--system", "trl")
    assert status == 2 and "of 10 6 are not known: mine_0" in line and line.count("\n") == 1
    assert said("a.yaml", TRL + names.partition("mine_3")[0], "--system", "trl")[0] == 0


# ------------------------------------------------------------------------------ read in full


def test_easyr1_is_read(said):
    text = (
        "python3 -m verl.trainer.main config=examples/config.yaml data.train_files=rows@train "
        "data.rollout_batch_size=128 worker.actor.model.model_path=m worker.actor.global_batch_size=32 "
        "worker.actor.optim.lr=3e-6 worker.rollout.n=6 worker.rollout.temperature=0.7 algorithm.kl_coef=0.03 "
        "algorithm.use_kl_loss=true"
    )
    printed = said("a.sh", text)[1]
    script, cfg = options(printed)
    assert (script, cfg.model, cfg.prompts, cfg.group, cfg.kl) == ("grpo", "m", 128, 6, 0.03)
    assert (cfg.lr, cfg.temperature, cfg.loss.high, cfg.max_new) == (3e-6, 0.7, 0.3, 2048)
    assert (cfg.strategy.train_batch_size, cfg.template, cfg.data_epochs) == (192, "{problem}", 15)
    assert "may change" not in printed and "the values that EasyR1 has in it are taken" in printed

    # without that file its classes' own defaults count; a KL that is off is none
    own = text.replace("config=examples/config.yaml ", "")
    assert options(said("a.sh", own)[1])[1].max_new == 512
    off = options(said("a.sh", own + " algorithm.disable_kl=true")[1])[1]
    assert (off.kl, off.kl_in_reward) == (0, 0)
    inside = options(said("a.sh", own.replace("use_kl_loss=true", "use_kl_loss=false"))[1])[1]
    assert (inside.kl, inside.kl_in_reward) == (0, 0.03)


def test_distillation_of_verl_is_distillation(said):
    text = f"python3 -m verl.trainer.main_ppo {ROLLOUTS} distillation.enabled=True "
    text += "distillation.teacher_models.teacher_model.model_path=t distillation.distillation_loss."
    script, cfg = options(said("a.sh", f"{text}loss_mode=forward_kl_topk")[1])
    assert (script, cfg.teacher, cfg.loss, cfg.top_k, cfg.rl) == ("distill", ("t",), "forward_kl", 32, 1)
    pure = f"{text}use_task_rewards=False distillation.distillation_loss."
    script, cfg = options(
        said("a.sh", f"{pure}loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True")[1]
    )
    assert (script, cfg.loss, cfg.rl) == ("distill", "sampled", 0)
    assert options(said("a.sh", f"{pure}loss_mode=k3")[1])[1].loss == "forward_kl"
    assert options(said("a.sh", text.replace("enabled=True", "enabled=False") + "topk=8")[1])[0] == "grpo"

    several = text.replace("teacher_models.teacher_model.model_path=t", "teacher_key=kind")
    for name in "ab":
        several += f"topk=1 +distillation.teacher_models.{name}.key=of{name} "
        several += f"+distillation.teacher_models.{name}.model_path=m{name} distillation.distillation_loss."
    cfg = options(said("a.sh", f"{several}topk=1")[1])[1]
    assert (cfg.teacher, cfg.teacher_column) == (("ofa=ma", "ofb=mb"), "kind")


SIMPO = """
model_name_or_path: m
dataset_mixer: {pairs: 1.0}
beta: 2.5
gamma_beta_ratio: 0.55
learning_rate: 1.0e-6
max_length: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 16
hub_model_id: x
"""


def test_simpo_is_not_dpo(said):
    script, cfg = options(said("a.yaml", SIMPO)[1])
    assert (script, cfg.loss, cfg.beta, cfg.margin, cfg.batch) == ("dpo", "simpo", 2.5, 1.375, 32)
    less = re.sub(r"(beta|learning_rate): .*\n", "", SIMPO)
    cfg = options(said("a.yaml", less + "sft_weight: 0.3\n")[1])[1]
    assert (cfg.beta, cfg.margin, cfg.lr, cfg.nll) == (2.0, 1.1, 5e-5, 0.3)


# ------------------------------------------------------------------------------ what every run names


def test_what_a_file_does_not_name_has_a_place(said):
    text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    printed = said("a.sh", f'{text} actor_rollout_ref.model.path=""')[1]
    assert "--model MODEL \\\n  --data DATA \\\n" in printed
    assert "# --model: the file has none; MODEL is" in printed and "# --data: the file has none" in printed
    assert "--reward REWARD" in said("a.yaml", TRL.replace("reward_funcs: r.py:f\n", ""))[1]


def test_a_word_in_the_path_does_not_beat_the_content(said):
    toml = "max_steps = 20\n[model]\nname = 'm'\n[orchestrator]\nbatch_size = 128\ngroup_size = 4\n"
    assert options(said("sft_distilled.toml", toml)[1])[0] == "grpo"
    assert options(said("sft/grpo/a.yaml", TRL)[1])[0] == "grpo"
    assert options(said("dpo/a.yaml", TRL)[1])[0] == "grpo"
    plain = "model_name_or_path: m\nlearning_rate: 1.0e-5\ndataset_name: d\n"
    assert options(said("sft/a.yaml", plain)[1])[0] == "sft"  # where the content tells nothing
    assert (
        options(said("orpo/a.yaml", f"{plain}beta: 0.1\nmax_prompt_length: 9\nrpo_alpha: 0\n")[1])[1].loss
        == "orpo"
    )


def test_gigabytes_are_not_bytes(said):
    text = "torchrun train_colocate.py --pretrain m --prompt_data a --advantage_estimator rloo "
    text += "--n_samples_per_prompt 4"
    for given, bytes_ in (("100", 100 * 1024**3), ("1e8", 0)):
        assert options(said("a.sh", f"{text} --max_ckpt_mem {given}")[1])[1].max_bytes == bytes_


def test_a_script_may_end_in_a_backslash(said):
    for end in ("\\", "\\\n", " \\\n\n"):
        status, printed = said("a.sh", f"python3 -m verl.trainer.main_ppo {ROLLOUTS}{end}")
        assert status == 0 and options(printed)[1].group == 4


# ------------------------------------------------------------------------------ a share of the run


def test_a_warm_up_may_be_a_share_of_the_run(said):
    assert [warmup_updates(0.1, 95), warmup_updates(7, 95, 3), warmup_updates(0.5, 10, 2)] == [10, 21, 5]
    for script in ("sft", "grpo", "ppo", "distill"):
        config = load_script(script).Config
        more = ["--teacher", "t"] if script == "distill" else []
        assert parsing.parse(config, ["--warmup", "0.25", *more]).warmup == 0.25
        assert parsing.parse(config, ["--warmup", "25", *more]).warmup == 25
        for wrong in ("-1", "1.5", "nan"):
            with pytest.raises(ValueError, match="warmup"):
                parsing.parse(config, ["--warmup", wrong, *more])
    grpo = load_script("grpo")
    cfg = grpo.Config(steps=10, warmup=0.5, lr=1.0, epochs=2)
    _, rate = usual_optimizer(cfg)
    assert [rate(0), rate(9)] == [0.1, 1.0] and rate(10) <= 1.0
    assert options(said("a.yaml", f"{TRL}warmup_ratio: 0.1\n")[1])[1].warmup == 0.1


def test_an_estimator_without_a_row_is_said(said):
    text = f"python3 -m verl.trainer.main_ppo {ROLLOUTS}".replace("estimator=grpo", "estimator=gvpo")
    first = said("a.sh", text)[1].partition("python train_scripts/")[0]
    assert "adv_estimator=gvpo" in first


# ------------------------------------------------------------------------------ scripts as they stand


def test_recomputed_activations_are_translated(said):
    """The option takes a kind too, so that the parser writes --NAME as --NAME=True."""
    for kind in ("True", "False"):
        text = f"{ROLLOUTS} actor_rollout_ref.model.enable_gradient_checkpointing={kind}"
        status, printed = said("a.sh", f"python3 -m verl.trainer.main_ppo {text}")
        assert status == 0 and options(printed)[1].gradient_checkpointing is (kind == "True")
        assert f"--{'no-' * (kind == 'False')}gradient-checkpointing" in printed and "left out" not in printed


PYTHON = """
import argparse
from dataclasses import dataclass, field
from trl import GRPOConfig, GRPOTrainer
from my_rewards import f

parser = argparse.ArgumentParser()
parser.add_argument("--lr", "--learning_rate", default=3e-6)
parser.add_argument("--beta", required=True)
parser.add_argument("-g", "--num-generations", dest="group", default=16)
parser.add_argument("--no-vllm", dest="use_vllm", action="store_false")
parser.add_argument("--mask", action="store_true")
parser.add_argument("--model", default="m")
args = parser.parse_args()
steps = 500
if args.debug:
    steps = 5

@dataclass
class Adapters:
    targets: list = field(default_factory=lambda: ["q_proj"])

if __name__ == "__main__":
    quantized = BitsAndBytesConfig(load_in_4bit=True)
    lora = LoraConfig(r=8, target_modules=Adapters().targets, use_dora=True)
    config = GRPOConfig(
        learning_rate=args.lr, beta=args.beta, num_generations=args.group, use_vllm=args.use_vllm,
        mask_truncated_completions=args.mask, per_device_train_batch_size=args.group * 2, max_steps=steps,
    )
    config.epsilon_high = 0.28
    if args.short:
        config.max_completion_length = 9
    GRPOTrainer(args.model, reward_funcs=[f], args=config, train_dataset=load_dataset("d"), peft_config=lora)
"""


def test_a_config_is_read_from_its_parser_and_later_assignments(said):
    """What only a command line, a condition or the second of two values decides is told, and is no value."""
    status, printed = said("a.py", PYTHON)
    cfg = options(printed)[1]
    assert status == 0 and (cfg.lr, cfg.group, cfg.prompts, cfg.mask_truncated) == (3e-6, 16, 2, False)
    assert (cfg.model, cfg.loss.high, cfg.max_new, cfg.lora_targets) == ("m", 0.28, 512, "q_proj")
    assert (cfg.strategy.engine_type, cfg.quantize) == ("vllm", "nf4")
    assert "beta=args.beta: of its command line, so it is left out" in printed
    assert "max_steps=steps: not a constant" in printed and cfg.steps is None
    assert "config.max_completion_length = 9: under a condition, so it is left out" in printed
    assert "use_dora=True" in printed.partition("python train_scripts/")[0]

    # the command in its docstring has the value
    status, printed = said("a.py", f'"""\npython a.py --beta 0.04\n"""\n{PYTHON}')
    assert options(printed)[1].kl == 0.04 and "beta=args.beta" not in printed


def test_only_nothing_is_off(said):
    """A pattern for 0 is none for 0.1."""
    for value, off in (("0.", True), ("0.0", True), ("0", True), ("0.1", False), ("0.05", False)):
        more = f"actor_rollout_ref.model.override_config.attention_dropout={value}"
        printed = said("a.sh", f"python3 -m verl.trainer.main_ppo {ROLLOUTS} {more}")[1]
        assert (more in printed.partition("python train_scripts/")[0]) is not off, value


def test_a_mapping_in_an_override_is_its_entries(said):
    """As hydra writes it, and as YAML has what the reward and the chat template get."""
    text = f"python3 -m verl.trainer.main_ppo {ROLLOUTS} '+actor_rollout_ref.actor.optim={{lr:2e-6}}' "
    given = "'custom_reward_function={path: r.py, name: f, reward_kwargs: {a: 0.5, b: false}}'"
    reward = ("verl:r.py:f(a=0.5, b=False)",)
    cfg = options(said("a.sh", f"{text}{given} +data.apply_chat_template_kwargs.enable_thinking=False")[1])[1]
    assert (cfg.lr, cfg.reward, cfg.chat_template_kwargs) == (2e-6, reward, ("enable_thinking=False",))
    kwargs = "custom_reward_function.path=r.py custom_reward_function.name=f "
    kwargs += (
        "'+custom_reward_function.reward_kwargs={a:0.5,b:False}' 'data.apply_chat_template_kwargs={x:1}'"
    )
    cfg = options(said("a.sh", text + kwargs)[1])[1]
    assert (cfg.reward, cfg.chat_template_kwargs) == (reward, ("x=1",))
    yaml = "algorithm: {adv_estimator: grpo}\ndata: {train_files: a}\nactor_rollout_ref: {rollout: {n: 4}}\n"
    yaml += "custom_reward_function: {path: r.py, name: f, reward_kwargs: {a: 0.5, b: false}}\n"
    assert options(said("a.yaml", yaml)[1])[1].reward == reward
    trl = "trl grpo --model_name_or_path m --dataset_name d --num_generations 4 --chat_template_kwargs "
    assert options(said("b.sh", f"""{trl}'{{"x": 1}}'""")[1])[1].chat_template_kwargs == ("x=1",)


def test_older_names_of_openrlhf_are_those_with_dots(said):
    text = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --advantage_estimator rloo "
    text += "--n_samples_per_prompt 4 --lr_scheduler constant --use_dynamic_batch --train_max_tokens_per_gpu "
    text += "9000 --rollout_max_tokens_per_gpu 9 --param_dtype bf16 --eval_dataset e --async_queue_size 2 "
    text += "--attn_implementation x --overlong_penalty_factor 1.0 --prompt_split train --actor_init_on_gpu"
    status, printed = said("a.sh", text)
    cfg = options(printed)[1]
    assert status == 0 and "may change" not in printed
    assert (cfg.schedule, cfg.budget, cfg.eval_data, cfg.ahead) == ("constant", 9000, ("e",), 2)
    assert options(said("a.sh", text.replace("queue_size 2", "train"))[1])[1].ahead == 1


def test_a_source_of_a_mixture_has_its_config_and_split(said):
    each = "{id: a/b, config: c, split: train_prefs, weight: 0.5}, {path: d, name: e, split: train}"
    text = f"model_name_or_path: m\nbeta: 0.1\nrpo_alpha: 1.0\ndataset_mixture: {{datasets: [{each}]}}\n"
    cfg = options(said("dpo/a.yaml", text, "--trainer", "dpo")[1])[1]
    assert cfg.data == ("a/b:c@train_prefs=0.5", "d:e@train=1")


def test_a_value_may_refer_to_another_as_in_hydra(said):
    text = (
        "data: {train_files: '${oc.env:HOME}/a', train_batch_size: 64, max_prompt_length: '${oc.env:P,99}'}\n"
    )
    text += "algorithm: {adv_estimator: grpo}\nactor_rollout_ref:\n  actor: {ppo_mini_batch_size: 16}\n"
    text += (
        "  rollout: {n: '${data.other}', prompt_length: '${data.max_prompt_length}'}\n  model: {path: m}\n"
    )
    text += "critic: {ppo_mini_batch_size: '${actor_rollout_ref.actor.ppo_mini_batch_size}'}\n"
    text += "trainer: {total_epochs: '${oc.select:data.nothing,3}', save_freq: '${data.train_batch_size}'}\n"
    printed = said("a.yaml", text)[1]
    cfg = options(printed)[1]
    assert (cfg.data, cfg.max_prompt, cfg.data_epochs, cfg.save_every) == (("${HOME}/a",), 99, 3, 64)
    assert "rollout.n=${data.other}: of another place of the config, so it is left out" in printed


def test_older_names_of_prime_rl_have_their_meaning(said, tmp_path):
    """Three files, each of a part; what no function reads of the loss is told."""
    (tmp_path / "orch.toml").write_text(
        "batch_size = 64\nrollouts_per_example = 8\n[sampling]\nmax_tokens = 99\ntemperature = 0.7\n"
        "[[env]]\nid = 'reverse'\n"
    )
    (tmp_path / "train.toml").write_text("[optim]\nlr = 3e-6\n[loss]\nratio_type = 'sequence'\n")
    printed = said("a.sh", "uv run rl --trainer @ train.toml --orchestrator @ orch.toml --max-steps 9")[1]
    cfg = options(printed)[1]
    assert (cfg.prompts, cfg.group, cfg.max_new, cfg.temperature, cfg.lr) == (8, 8, 99, 0.7, 3e-6)
    first = printed.partition("python train_scripts/")[0]
    assert "trainer.loss.ratio_type=sequence" in first and "of an older release" in first
    assert "of the environment reverse;" in printed and "'@'" not in printed


def test_each_trainer_of_a_script_has_its_own_options(said):
    """A warm-up by SFT before GRPO: two commands, and none has a number of the other."""
    text = "from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer\n"
    text += "args = SFTConfig(learning_rate=2e-4, num_train_epochs=2, seed=7)\nargs.max_length = 99\n"
    text += "SFTTrainer(model='m', args=args, train_dataset=load_dataset('d')).train()\n"
    text += "GRPOTrainer(model='m', args=GRPOConfig(max_steps=100, num_generations=4), reward_funcs=[f])\n"
    printed = said("a.py", text)[1]
    first, second = printed.split("python train_scripts/")[1:]
    (name, sft), (other, grpo) = (options(f"python train_scripts/{x}") for x in (first, second))
    assert (name, sft.lr, sft.epochs, sft.steps, sft.seed, sft.budget) == ("sft", 2e-4, 2, None, 7, 99)
    assert (other, grpo.lr, grpo.steps, grpo.group, grpo.seed) == ("grpo", 1e-6, 100, 4, 0)


def test_further_options_in_a_variable_are_no_value_of_the_last(said):
    text = "trl sft --model_name_or_path m --dataset_name d --max_length 4096 $MORE --learning_rate $RATE"
    printed = said("a.sh", text)[1]
    assert options(printed)[1].budget == 4096 and "learning_rate=${RATE}" in printed
    assert "line 1: ${MORE} has no value in the file; it may be further options" in printed


def test_a_config_by_an_absolute_path_is_read(said, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "x.yaml").write_text("data: {train_batch_size: 48}\n")
    text = f"python3 -m verl.trainer.main_ppo --config-path={tmp_path / 'conf'} --config-name=x "
    text += "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 algorithm.filter_groups.metric=acc"
    printed = said("elsewhere/a.sh", text)[1]
    assert (
        options(printed)[1].prompts == 48 and "is not here" not in printed and "off, as here" not in printed
    )


def test_what_a_command_of_easyr1_sets_to_null_is_not_that_of_its_example(said):
    text = (
        "python3 -m verl.trainer.main config=examples/config.yaml worker.rollout.n=4 trainer.max_steps=null "
    )
    for more in ("", "data.format_prompt=null worker.reward.reward_function=null"):
        printed = said("a.sh", text + more)[1]
        assert options(printed)[1].group == 4 and "null" not in printed
        assert ("theirs is the file" in printed, "compute_score" in printed) == (not more, not more)


def test_options_of_adapters_and_the_optimizer_are_not_how_it_computes(said):
    toml = "max_steps = 5\n[model]\nname = 'm'\n[orchestrator]\nbatch_size = 32\ngroup_size = 4\n"
    toml += (
        "[trainer.model]\nattn = 'x'\nfreeze_router = true\n[trainer.model.experimental.lora]\nrank = 16\n"
    )
    printed = said("a.toml", toml)[1]
    assert options(printed)[1].lora_rank == 16
    assert "trainer.model.freeze_router=True" in printed.partition("python train_scripts/")[0]

    more = "actor_rollout_ref.actor.optim.betas='[0.8,0.95]' actor_rollout_ref.model.exclude_modules=x "
    text = f"python3 -m verl.trainer.main_ppo {ROLLOUTS} {more}"
    printed = said("a.sh", text)[1]
    cfg = options(printed)[1]
    assert (cfg.beta1, cfg.beta2) == (
        0.8,
        0.95,
    ) and "exclude_modules" not in printed  # nothing to exclude from
    first = said("a.sh", f"{text} actor_rollout_ref.model.lora_rank=8")[1].partition("python train_scripts/")[
        0
    ]
    assert "exclude_modules=x" in first


def test_what_only_a_call_decides_is_told_first(said):
    """Not so what a run is called, or where it is."""
    text = "A=$1\nO=$2\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=$A data.train_files=t "
    printed = said("a.sh", f"{text} actor_rollout_ref.rollout.n=4 trainer.default_local_dir=$O")[1]
    first, _, rest = printed.partition("python train_scripts/")
    assert first.startswith("# may change the objective") and "adv_estimator=$1" in first
    assert "default_local_dir=$2: an argument of the script" in rest

    text = "from trl import SFTConfig, SFTTrainer\nlr, epochs = 2e-4, 3\n"
    text += "args = SFTConfig(learning_rate=lr, num_train_epochs=epochs)\n"
    text += "SFTTrainer('m', args=args, train_dataset=load_dataset('d'), formatting_func=make)\n"
    printed = said("a.py", text)[1]
    assert (options(printed)[1].lr, options(printed)[1].epochs) == (2e-4, 3)
    assert "line 4: formatting_func=make: code, which is not read" in printed


def test_a_mark_of_the_order_of_bytes_is_no_part_of_a_file(said):
    for name, text in (
        ("a.py", "from trl import GRPOConfig\nargs = GRPOConfig(num_generations=4)\n"),
        ("a.sh", f"python3 -m verl.trainer.main_ppo {ROLLOUTS}"),
        ("a.toml", "max_steps = 5\n[model]\nname = 'm'\n[orchestrator]\nbatch_size = 32\ngroup_size = 4\n"),
    ):
        assert options(said(name, f"\ufeff{text}")[1])[1].group == 4, name
