"""Each script with a model that sees or hears: it learns, resumes, freezes, refuses and finds faults."""

import json

import headless
import pytest
import script_runs
import torch
from script_runs import rows
from test_house import load_script as script

import rft_fn as rft
from rft_fn.strategy import StrategyConfig, get_fake_strategy
from rft_fn.tools.page.build import write_page

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

CASES = [("tiny-vl", "count_squares"), ("tiny-audio", "tone")]
IDS = ["vl", "audio"]
KINDS = {"count_squares": "image", "tone": "audio"}
TOWERS = {"tiny-vl": "visual", "tiny-audio": "audio_tower"}
GRPO = {
    "steps": 2,
    "prompts": 4,
    "group": 4,
    "eval_prompts": 4,
    "eval_every": 2,
    "save_every": 2,
    "warmup": 0,
}


def run(name, folder, **options):
    """Run a script in this process; its rows of metrics."""
    module = script(name)
    module.main(module.Config(**options, out=str(folder)))
    return rows(folder)


def weights(model):
    """What a model trains, by the names that it has in memory; those of its file are older."""
    return trained(rft.model.load(model))


def trained(module):
    """The parameters that learn: the positions of a tower that hears do not."""
    return {name: x.detach() for name, x in module.named_parameters() if x.requires_grad}


def tower(model, found):
    """The parameters of what sees or hears, by their names below it."""
    part = TOWERS[model]
    return {name.split(part)[1]: x for name, x in found.items() if part in name}


def grpo(folder, model, task, steps):
    small = {"prompts": 4, "group": 4, "eval_every": 2, "eval_prompts": 64, "save_every": 2, "lr_end": 1.0}
    run("grpo", folder, model=model, data=(task,), steps=steps, **small)


@pytest.fixture(scope="module", params=CASES, ids=IDS)
def learned(request, tmp_path_factory):
    """(folder of a run of 4 steps, model, task)."""
    model, task = request.param
    folder = tmp_path_factory.mktemp("runs") / task
    grpo(folder, model, task, 4)
    return folder, model, task


def test_a_warmed_up_model_knows_more_than_chance_and_has_more_to_learn(learned):
    folder, _, task = learned
    metrics = rows(folder)
    assert 0.25 < metrics[0]["eval/mean"] < 0.95
    assert all(row["policy/logp_gap"] < 1e-5 for row in metrics)
    assert (folder / "samples.png").stat().st_size > 0
    names = [name for row in rows(folder, "trajectories.jsonl") for name in row["media"]]
    assert names and all(name.startswith(f"{task}-1-") for name in names)

    # what was seen or heard lies beside the tokens of the first response to each prompt
    recorded = rows(folder, "tokens.jsonl")
    assert [row["sample"] for row in recorded if "media" in row] == [0, 0]
    for row in recorded[::4]:
        ((kind, name, uri),) = row["media"]
        assert kind == KINDS[task] and name.startswith(f"{task}-1-") and uri.startswith(f"data:{kind}/")


@pytest.mark.skipif(headless.BROWSER is None, reason="needs chromium")
def test_the_page_of_a_run_shows_the_image_and_plays_the_sound(learned, tmp_path):
    folder, _, task = learned
    ((_, name, uri),) = rows(folder, "tokens.jsonl")[0]["media"]
    page = write_page([folder], tmp_path / "page.html")
    with headless.Browser(tmp_path / "browser") as browser:
        browser.open(page)
        figure = "document.querySelector('#responses .media figure')"
        assert browser.value(f"{figure}.textContent") == name
        assert browser.value(f"{figure}.firstChild.src") == uri
        read = {"image": "naturalWidth >= 8", "audio": "duration > 0.05"}[KINDS[task]]
        browser.until(f"{figure}.firstChild.{read}")
        assert not browser.errors


def test_a_run_that_sees_or_hears_resumes_to_the_bit(learned, tmp_path):
    folder, model, task = learned
    grpo(tmp_path / "again", model, task, 2)
    grpo(tmp_path / "again", model, task, 4)
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_evaluate_reads_the_processor_of_a_run(learned, tmp_path):
    folder, _, task = learned
    evaluate = script("evaluate")
    out = tmp_path / "eval.json"
    evaluate.main(evaluate.Config(model=str(folder), data=(task,), count=64, out=str(out)))
    assert json.loads(out.read_text())["result"]["pass@1"] > 0.25


@pytest.mark.parametrize(("model", "task"), [("tiny-vl", "count_squares:2"), ("tiny-audio", "tone:2")])
def test_sft_lowers_the_loss_of_the_second_level(model, task, tmp_path):
    found = run("sft", tmp_path / "sft", model=model, data=(task,), steps=8, batch=16, lr=3e-3, warmup=0)
    losses = [row["loss"] for row in found]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("model", "task"), CASES, ids=IDS)
def test_dpo_learns_which_answer_an_image_or_a_sound_has(model, task, tmp_path):
    how = {"steps": 8, "batch": 16, "eval_pairs": 32, "eval_every": 8, "warmup": 0, "lr": 3e-4}
    found = run("dpo", tmp_path / "dpo", model=model, data=(task,), **how, nll=0.2, lr_end=1.0)
    first, last = found[0], found[-1]
    assert first["eval/accuracy"] == first["policy/ref_gap"] == 0
    assert last["eval/accuracy"] > 0.75 and last["eval/loss"] < first["eval/loss"] - 0.01
    assert last["eval/margin"] > first["eval/margin"] == 0

    # the processor is saved, so that the model can be asked
    assert rft.model.load_processor(tmp_path / "dpo" / "model") is not None


@pytest.mark.parametrize(("model", "task"), CASES, ids=IDS)
def test_ppo_has_a_critic_that_sees_or_hears(model, task, tmp_path):
    """The critic's tower learns as well; its value of a prompt depends on what it sees."""
    how = {"steps": 3, "prompts": 8, "group": 2, "minibatches": 1, "eval_prompts": 4, "eval_every": 2}
    how |= {"seed": 1}  # with a reward that is not 0, where the critic's head begins, before the last step
    found = run("ppo", tmp_path / "ppo", model=model, data=(task,), **how, save_critic=True)
    assert len(found) == 3 and all(row["policy/logp_gap"] < 1e-5 for row in found)
    critic = rft.model.load_critic(tmp_path / "ppo" / "critic")
    after = tower(model, trained(critic))
    before = tower(model, weights(model))
    assert before and after.keys() == before.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before)

    # two prompts of other media have other values of their first token
    dataset = rft.data.load(task, rft.model.load_tokenizer(model), template="{short}", processing=of(model))
    prompts, _ = rft.data.take(dataset, 8, seed=0)
    same = [p for p in prompts if p.ids == prompts[0].ids][:2]
    exp = rft.packing.supervised([(p.ids, [5, 1]) for p in same])
    exp = rft.tree.replace(exp, media=rft.types.Media.of_prompts([p.media for p in same]))
    st = get_fake_strategy()
    apply, params = st.bind(critic)
    value = st.score(apply, params, exp, 512, fields=("value",)).value
    assert len(same) == 2 and value[0][exp.mask[0]][0] != value[1][exp.mask[1]][0]


def of(model):
    return rft.data.Processing(rft.model.load_processor(model))


@pytest.mark.parametrize(("model", "task"), CASES, ids=IDS)
def test_a_frozen_tower_stays_to_the_bit_and_all_others_move(model, task, tmp_path):
    run("grpo", tmp_path / "r", model=model, data=(task,), **GRPO, freeze=(TOWERS[model],))
    after, before = weights(tmp_path / "r" / "model"), weights(model)
    frozen = {name for name in before if TOWERS[model] in name}
    stayed = {name for name in after if torch.equal(after[name], before[name])}
    assert frozen and stayed == frozen


@pytest.mark.parametrize("engine", ["openai", "sglang"])
@pytest.mark.parametrize("name", ["grpo", "evaluate", "multi_turn"])
def test_servers_that_take_tokens_alone_are_refused_before_anything_is_loaded(
    name, engine, tmp_path, monkeypatch
):
    """No server is asked, and no folder opened."""
    module = script(name)
    strategy = StrategyConfig(engine_type=engine, engine_servers=("http://127.0.0.1:9",))
    monkeypatch.setattr(rft.model, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    monkeypatch.setattr(rft.engine, "get_engine", lambda *_, **__: pytest.fail("an engine is built"))
    cfg = {"model": "tiny-vl", "strategy": strategy}
    if name != "evaluate":
        cfg |= {"out": str(tmp_path / "r"), **GRPO}
    with pytest.raises(ValueError, match=f"prompts with media .tiny-vl .*got {engine}, whose servers"):
        module.main(module.Config(data=("count_squares",), **cfg))
    assert not (tmp_path / "r").exists()


def test_a_prompt_that_leaves_no_room_for_its_response_stops_before_a_model_is_loaded(tmp_path, monkeypatch):
    """tiny-vl reads 256 tokens, an image is 18 of them."""
    grpo = script("grpo")
    monkeypatch.setattr(rft.model, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    cfg = {"model": "tiny-vl", "out": str(tmp_path / "r"), **GRPO}
    with pytest.raises(ValueError, match=r"2\d \+ 240 tokens with max_new, .* window of 256"):
        grpo.main(grpo.Config(data=("count_squares",), max_new=240, template="1234{short}", **cfg))


@pytest.mark.parametrize(("model", "task"), CASES, ids=IDS)
def test_two_processes_of_fsdp2_learn_what_one_does(model, task, tmp_path):
    """The same losses, and weights that moved alike."""
    flags = ["--model", model, "--data", task, "--steps", 2, "--batch", 8, "--warmup", 0, "--lr-end", 1]
    script_runs.run("sft", *flags, "--out", tmp_path / "one", whole=True)
    script_runs.run("sft", *flags, "--fsdp", "--out", tmp_path / "two", world=2, whole=True)
    one, two = (rows(tmp_path / name) for name in ("one", "two"))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    start, a, b = (weights(name) for name in (model, *(tmp_path / run / "model" for run in ("one", "two"))))
    assert a.keys() == b.keys()
    for name, x in a.items():
        moved = (x - start[name]).norm()
        assert moved > 0 and (b[name] - x).norm() < 1e-2 * moved, name


@pytest.mark.parametrize(("model", "task"), CASES, ids=IDS)
def test_replay_shows_the_row_at_fault_with_its_media(model, task, tmp_path, capsys, monkeypatch):
    """A loss that is no number stops the run, which keeps the row, its media and the weights."""
    row = rft.algorithm.TABLE["grpo"]

    def broken(out, b):
        loss, metrics = row.loss(out, b)
        return loss / (b.target != 1), metrics  # 1 ends a response

    monkeypatch.setitem(rft.algorithm.TABLE, "grpo", row._replace(loss=broken))
    with pytest.raises(rft.strategy.NonFinite, match=r"look at it with replay\.py"):
        run("grpo", tmp_path / "r", model=model, data=(task,), **GRPO, strategy=StrategyConfig(max_skips=1))
    (fault,) = (tmp_path / "r").glob("fault_*")
    pack, _, _ = rft.strategy.load_fault(fault)
    assert pack.media is not None
    replay = script("replay")
    capsys.readouterr()
    replay.main(replay.Config(fault=str(fault)))
    out = capsys.readouterr().out
    assert "gradients: not finite in" in out and "<- not finite" in out
