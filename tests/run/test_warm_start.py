"""A run that begins with the weights and the optimizer state of another: --from-checkpoint."""

import shutil

import pytest
import torch
from script_runs import rows
from test_house import load_script as script

import rft_fn as rft

pytestmark = pytest.mark.usefixtures("plain_runs")
SFT = {"batch": 8, "lr": 1e-3, "warmup": 0, "save_every": 2, "keep": 9, "tokens_every": 0, "noise_every": 0}


def config(out, **options):
    return script("sft").Config(out=str(out), **{"schedule": "constant", **SFT, **options})


def run(out, **options):
    script("sft").main(config(out, **options))
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RFT_FN_LIVE", "0")
        return run(tmp_path_factory.mktemp("runs") / "source", steps=3, save_every=3)


def opened(out, **options):
    """The environment of a run, and its state at its first step."""
    cfg = config(out, **options)
    sft = script("sft")
    env = rft.run.setup(cfg, usual=30, load=sft.load, batch=cfg.batch, sampled=False)
    state, loop = env.restore(env.policy.state, sft.Loop())
    return env, state, loop


def test_its_first_update_is_that_of_the_other_run_going_on(source, tmp_path):
    """To the bit, where the learning rate is the same; its own schedule begins at its own first step."""
    shutil.copytree(source, tmp_path / "on")
    batch = rft.packing.supervised([([5, 6], [7, 8, 1]), ([9], [10, 1])])
    found = {}
    for name, options in {
        "on": {"steps": 9},
        "warm": {"steps": 9, "from_checkpoint": str(source)},
        "risen": {"steps": 9, "warmup": 4, "lr": 4e-3, "from_checkpoint": str(source)},
    }.items():
        env, state, loop = opened(tmp_path / name, **options)
        assert state.step == loop.step == (3 if name == "on" else 0) and rft.optim.count(state.opt) == 3
        rate = env.policy.schedule(rft.optim.count(state.opt))
        packs = env.st.shard(batch, 512)
        grads, _ = env.st.grad(state, env.policy.apply, lambda out, b: rft.loss.nll(out.logp), packs)
        state, _ = env.st.update(state, grads)
        found[name] = rate, {x: p.detach().clone() for x, p in state.params.items()}
        env.run.finish()
    assert [rate for rate, _ in found.values()] == pytest.approx([1e-3] * 3)
    for name in ("warm", "risen"):
        assert all(torch.equal(x, found[name][1][at]) for at, x in found["on"][1].items())


def test_it_resumes_to_the_byte_without_the_other_run(source, tmp_path):
    """Until its first checkpoint it needs the one that it began with."""
    other = tmp_path / "other"
    shutil.copytree(source, other)
    options = {"steps": 4, "schedule": "linear", "lr_end": 0.1, "warmup": 2, "from_checkpoint": str(other)}
    out = run(tmp_path / "warm", **options)
    whole = (out / "metrics.jsonl").read_bytes()
    assert [r["lr"] for r in rows(out)] == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4])
    weights = (out / "model/model.safetensors").read_bytes()

    (other / "checkpoints/step_00000003").rename(other / "checkpoints/step_00000005")
    shutil.rmtree(out / "checkpoints/step_00000004")
    run(out, **options)
    assert (out / "metrics.jsonl").read_bytes() == whole
    assert (out / "model/model.safetensors").read_bytes() == weights
    shutil.rmtree(out / "checkpoints")
    (out / ".saved").unlink()
    with pytest.raises(
        ValueError, match=r"from_checkpoint: expected .* got .*other/checkpoints/step_00000003"
    ):
        run(out, **options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lora_rank": 4}, r"of another model, optimizer or run: .* names differ"),
        ({"model": "narrow"}, r"expected \[.*\] float32, got \[.*\] float32: it is of another model"),
        ({"from_checkpoint": "nowhere"}, "from_checkpoint: expected a run with a checkpoint, .* got nowhere"),
        ({"from_checkpoint": "", "from_updates": 3}, "from_updates: expected none without from_checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused(source, tmp_path, options, line):
    if "model" in options:
        narrow = rft.model.load("tiny", intermediate_size=32)
        narrow.save_pretrained(tmp_path / "narrow")
        rft.model.load_tokenizer("tiny").save_pretrained(tmp_path / "narrow")
        options = {"model": str(tmp_path / "narrow")}
    with pytest.raises(ValueError, match=line):
        opened(tmp_path / "warm", **{"steps": 4, "from_checkpoint": str(source), **options})
    assert not (tmp_path / "warm/metrics.jsonl").exists()
