"""Runs whose models share the device: each is there only in its phases, and the run is the same."""

import json

import pytest
import torch
from places import Host
from test_house import load_script as script
from test_kept_engine import Fragile

import rft_fn as rft
from rft_fn import engine
from rft_fn.engine.hf.engine import _InProcess
from rft_fn.model import residence
from rft_fn.run.reward_task import judges_here
from rft_fn.strategy import StrategyConfig, common
from rft_kernels import products

pytestmark = pytest.mark.usefixtures("plain_runs")

SMALL = {"prompts": 2, "group": 4, "steps": 2, "eval_prompts": 4, "eval_every": 2, "save_every": 1, "kl": 0.1}
PLACED = StrategyConfig(engine_batch=512, offload_models=True)


@pytest.fixture
def host(monkeypatch):
    """A host apart from the device, for every model that is bound."""
    host = Host()
    monkeypatch.setattr(residence, "mover_of", lambda device: host.mover)

    # weights in a file are aligned in another way than those of the allocator, and products round differently
    bound, built = residence.Residence.__init__, _InProcess.__init__

    def aligned(self, root, module):
        bound(self, root, module)
        root._apply(torch.clone)

    def aligned_engine(self, *args, **given):
        built(self, *args, **given)
        self.lm._apply(torch.clone)

    monkeypatch.setattr(residence.Residence, "__init__", aligned)
    monkeypatch.setattr(_InProcess, "__init__", aligned_engine)
    return host


def run(name, folder, **options):
    module = script(name)
    module.main(module.Config(**SMALL | options, out=str(folder)))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_run_is_the_same_with_models_that_leave_the_device(name, tmp_path, host):
    """Any use of a model outside of its phases would raise."""
    want = run(name, tmp_path / "together")
    assert not host.bytes
    got = run(name, tmp_path / "apart", strategy=PLACED)
    assert got == want
    # actor and reference leave several times in each step, and the critic of ppo too
    weights = sum(p.numel() * 4 for p in rft.model.load("tiny").parameters())
    assert host.bytes > 5 * weights


def test_an_engine_that_dies_gets_weights_that_are_away(tmp_path, host, monkeypatch):
    """It is built again while the policy is on the host, and the run is the one that it would have been."""
    want = run("grpo", tmp_path / "run")
    monkeypatch.setattr(engine, "get_engine", Fragile("generate", {4}))
    assert run("grpo", tmp_path / "again", strategy=PLACED) == want


def test_a_run_goes_on_from_a_checkpoint_of_models_on_the_host(tmp_path, host):
    """The files hold what they hold without placement."""
    folder = tmp_path / "run"
    run("grpo", folder, strategy=PLACED, lr_end=1.0)
    got = run("grpo", folder, strategy=PLACED, lr_end=1.0, steps=3)
    assert got == run("grpo", tmp_path / "straight", lr_end=1.0, steps=3)


def saved_reward_model(folder, seed=0):
    model = rft.model.load_reward("tiny", new=True)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(seed))
    rft.model.save_reward(folder, model)
    rft.model.load_tokenizer("tiny").save_pretrained(folder)
    return f"model:{folder}"


def test_actor_critic_reference_and_two_reward_models_take_turns(tmp_path, host, monkeypatch):
    """Each reward model is on the device alone, and the run is the one that has all of them there."""
    rewards = [saved_reward_model(tmp_path / name, seed) for seed, name in enumerate(("rm", "other"))]
    options = {"reward": (rewards[0], f"{rewards[1]}=0.5", "judge:tiny(patience=99,max_new=2)=0")}
    with pytest.warns(UserWarning, match="expected answers with a verdict"):
        want = run("ppo", tmp_path / "together", **options)
    move = residence.Residence.move
    moving = {}  # every model that leaves the device, by the order in which they first do
    together = []  # those that are there, after each move

    def moved(self, where):
        move(self, where)
        moving[id(self)] = self
        together.append([x.name.split()[0] for x in moving.values() if not x.on_host])

    monkeypatch.setattr(residence.Residence, "move", moved)
    with pytest.warns(UserWarning, match="expected answers with a verdict"):
        got = run("ppo", tmp_path / "apart", **options, strategy=PLACED)
    assert got == want and len(moving) == 5
    judging = [names for names in together if "RewardModel" in names]
    assert judging and all(names == ["RewardModel"] for names in judging)
    assert max(map(len, together)) == 2  # actor and critic; the reference scores before they are there


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_reward_models_and_judges_are_in_the_forecast_and_judges_sleep_while_others_work(
    name, tmp_path, monkeypatch, capsys
):
    """Also without enable_engine_sleep: offload_models has a judge on the device while it judges alone."""
    monkeypatch.setattr(products, "_vectors", lambda: "")  # engines have no packs, on any processor
    built, asleep = [], []
    get_engine, grad = engine.get_engine, common.Backend.grad

    def noted_engine(*given, **how):
        built.append(get_engine(*given, **how))
        return built[-1]

    def noted_phase(*given):
        asleep.append([one.status()["asleep"] for one in built])
        return grad(*given)

    monkeypatch.setattr(engine, "get_engine", noted_engine)
    monkeypatch.setattr(common.Backend, "grad", noted_phase)
    rewards = (saved_reward_model(tmp_path / "rm"), "judge:tiny(patience=99,max_new=2)", "task:sort_digits")
    strategy = StrategyConfig(engine_batch=512, offload_models=True, enable_engine_sleep=False)
    with pytest.warns(UserWarning, match="expected answers with a verdict"):
        run(name, tmp_path / "run", reward=rewards, strategy=strategy, steps=1)

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: line for line in lines if len(line) > 3}
    weights = sum(p.numel() * 4 for p in rft.model.load("tiny").parameters()) / 2**20
    assert table["rewards"][3:] == ["weights", "of", "reward", "models"]
    assert table["judges"] == ["judges", f"{weights:.1f}", "MiB", "engines", "of", "judges"]
    # the judge is built first, and the policy's own engine does not sleep without the option
    assert asleep and all(found == [True, False] for found in asleep)


def test_judges_on_servers_take_no_memory_here():
    st = rft.strategy.get_strategy(
        StrategyConfig(engine_type="vllm", engine_batch=7, engine_max_model_len=64)
    )
    specs = ["judge:tiny(batch=3)", "judge:tiny(form='terse',engine_type='openai',servers=('http://h:1',))"]
    score = rft.run.load_rewards(specs, rft.run.options.Data(), st)
    ((module, sampler),) = judges_here(score)  # the other type's options are not the judge's
    assert sampler == rft.memory.Sampler(3, 0, sleeps=StrategyConfig.enable_engine_sleep, packs=True)
    assert all(p.is_meta for p in module.parameters())
