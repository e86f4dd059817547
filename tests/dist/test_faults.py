"""Faults: a process that is killed or stopped, ranks that disagree, gradients that are not finite."""

import dataclasses
import json
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import conformance
import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import dist, packing, testing, tree
from rft_fn.strategy import NonFinite, StrategyConfig, diagnose, get_strategy, load_fault
from rft_fn.types import TokenOut

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def forever(rank, folder, timeout):
    """Steps without end, with a mark after each."""

    def main(config):
        st = get_strategy(config)
        apply, state = st.init(tiny.llama(), conformance.adamw())
        while True:
            packs = st.shard(conformance.experience(state.step, dtype=torch.float32), 40)
            grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
            state, _ = st.update(state, grads)
            Path(folder, f"mark{rank}").write_text(str(state.step))

    rft.run.guard(main, StrategyConfig(timeout=timeout))


@pytest.mark.parametrize("how, timeout", [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 8.0)])
def test_a_lost_process_is_named_and_nobody_hangs(tmp_path, how, timeout):
    world = 3 if how == signal.SIGKILL else 2
    processes = ranks.start(world, "test_faults:forever", str(tmp_path), timeout, folder=tmp_path)
    try:
        end = time.monotonic() + 600
        while not all((tmp_path / f"mark{r}").exists() for r in range(world)):
            assert time.monotonic() < end, (tmp_path / "log0").read_text()
            time.sleep(0.1)
        time.sleep(4)  # the watch has heard of everyone
        processes[1].send_signal(how)
        began = time.monotonic()
        codes = [processes[r].wait(timeout=40) for r in range(world) if r != 1]
        assert time.monotonic() - began < 30
    finally:
        for p in processes:
            p.kill()
    assert codes == [dist.LOST] * (world - 1)
    for r in (r for r in range(world) if r != 1):
        line = (tmp_path / f"log{r}").read_text().strip().splitlines()[-1]
        want = rf"error: lost rank 1 on {re.escape(socket.gethostname())} "
        want += r"\(last in (the script after )?\w+ of step \d+, \d+ s ago\); "
        want += rf"rank {r} was in .*; run the same command"
        if how == signal.SIGKILL:
            want += r".*; \w+: .+"  # what torch said
            want = want.replace(".*; run the same", rf".*; rank {2 - r} in .*; run the same")
        assert re.match(want, line), line


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    "lost, error",
    [
        (True, RuntimeError(f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:36712")),
        (True, RuntimeError(f"{GLOO}unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation")),
        (True, torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0")),
        (True, torch.distributed.DistNetworkError("failed to recv, got 0 bytes")),
        (True, torch.distributed.DistStoreError("wait timeout after 300000ms")),
        (False, RuntimeError("judge server: connection timed out")),
        (False, RuntimeError("socket: broken pipe of the gloo judge")),
        (False, TimeoutError("timed out")),
        (False, ConnectionError("Connection closed by peer")),
    ],
)
def test_a_time_limit_of_the_user_s_is_no_lost_process(monkeypatch, lost, error):
    monkeypatch.setattr(dist.lost, "world", lambda: 2)
    assert dist.is_lost(error) == lost
    monkeypatch.setattr(dist.lost, "world", lambda: 1)
    assert not dist.is_lost(error)


def heard(phases, *, timeout=60.0, ages=None):
    """The processes of a run whose rank 0 has heard of the others in `phases`."""
    now, ages = time.monotonic(), ages or {}
    beats = dist.Heartbeat(None, lambda: "", timeout=timeout, alarm=lambda: None)
    beats.heard = {r: (now - ages.get(r, 0), phase, "") for r, phase in phases.items()}
    return dist.Processes(heartbeat=beats, patience=0.0)


def test_the_description_has_every_phase_and_the_error():
    """Rank 1 is silent; ranks 2 and 3 wait for rank 4, whose reward hangs: all of them are in the line."""
    phases = {1: "update of step 2", 2: "metrics of step 3", 3: "metrics of step 3", 4: "reward 'judge'"}
    found = heard(phases, ages={1: 9})
    error = RuntimeError("[x/gloo/y.cc:1] Connection\nclosed by peer")
    line = found.describe(error)
    assert line.startswith("lost rank 1 (last in update of step 2, 9 s ago); rank 0 was in ")
    assert "; rank 2, 3 in metrics of step 3; rank 4 in reward 'judge'; run the same command" in line
    assert line.endswith("; RuntimeError: [x/gloo/y.cc:1] Connection closed by peer")
    assert "RuntimeError" not in found.describe()


def test_whoever_missed_one_beat_is_not_named():
    """Beats are half a second apart, so whoever is alive may be unheard for a little longer than that."""
    phases, ages = {1: "generate", 2: "train"}, {1: 61, 2: 0.9}
    line = heard(phases, ages=ages).describe()
    assert line.startswith("lost rank 1 (last in generate, 61 s ago); rank 0 was in ")
    line = heard(phases, ages=ages, timeout=0.5).describe()  # a shorter limit of the run counts
    assert line.startswith("lost rank 1 (last in generate, 61 s ago), rank 2 (")


def test_whoever_has_left_is_not_named():
    line = heard({1: dist.Heartbeat.BYE, 2: "train"}, ages={1: 61, 2: 5}).describe()
    assert line.startswith("lost rank 2 (last in train, 5 s ago); rank 0 was in ")


def test_a_phase_describes_the_loss_once(monkeypatch):
    """The innermost block names the phase; what is no loss passes as it is."""
    monkeypatch.setattr(dist.lost, "world", lambda: 2)
    found = heard({1: "generate"}, ages={1: 9})
    with pytest.raises(dist.LostProcess) as lost, found.phase("checkpoint"), found.phase("write"):
        raise RuntimeError("[x/gloo/y.cc:1] Connection closed by peer")
    line = str(lost.value)
    assert line.startswith("lost rank 1 (last in generate, 9 s ago); rank 0 was in write; run the same")
    assert line.count("lost rank") == 1 and isinstance(lost.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match=r"^judge: timed out$"), found.phase("reward"):
        raise RuntimeError("judge: timed out")


def test_the_script_between_two_phases_is_named_by_the_one_before():
    found = dist.Processes()
    with found.phase("generate"):
        with found.phase("gather"):
            assert found.current_phase == "gather"
        assert found.current_phase == "generate"
    assert found.current_phase == "the script after generate"
    with found.phase("update of step 1"):
        assert found.current_phase == "update of step 1"
    assert found.current_phase == "the script after update of step 1"
    with suppress(ValueError), found.phase("checkpoint"):
        raise ValueError
    assert found.current_phase == "checkpoint"
    with found.phase("restore"):
        pass
    assert found.current_phase == "the script after restore"


def disagree(rank, what):
    if what == "options":
        return message(lambda: get_strategy(StrategyConfig(max_skips=5 + rank)))
    if what == "command":
        kept, sys.argv = sys.argv, ["train.py", f"--lr={rank}"]
        found = message(lambda: get_strategy(StrategyConfig()))
        sys.argv = kept
        return found
    get_strategy(StrategyConfig())
    return message(lambda: rft.run.Run("unused", {"lr": rank}, total=1, rank=rank))


def message(f):
    try:
        f()
    except ValueError as error:
        return str(error)


def disagreements(rank):
    return [disagree(rank, what) for what in ("options", "command", "config")]


def test_ranks_that_disagree_are_refused():
    for options, command, config in ranks.run(2, "test_faults:disagreements"):
        assert "strategy: rank 0 has StrategyConfig" in options and "rank 1 has" in options
        assert command.endswith(
            "1 differences: command: rank 0 has train.py --lr=0, rank 1 has train.py --lr=1"
        )
        assert 'config: rank 0 has {"lr": 0}, rank 1 has {"lr": 1}' in config
    assert not Path("unused").exists()


def spoilt(step, row):
    exp = conformance.experience(step, dtype=torch.float32)
    exp.adv[row] = exp.adv[row] * (torch.nan if step >= 2 else 1)
    return exp


def not_finite(rank, folder, world_options):
    """Three updates without finite gradients in a row; the message, the step and the weights at the end."""
    st = get_strategy(StrategyConfig(max_skips=3, **world_options))
    st.session.set_dump_dir(folder)
    apply, state = st.init(tiny.llama(), conformance.adamw())
    weights = None
    for i in range(9):
        packs = st.shard(spoilt(i, row=5), 40)
        grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
        if i == 2:
            weights = {n: x.clone() for n, x in st.export(state)}
        try:
            state, metrics = st.update(state, grads)
        except NonFinite as error:
            return str(error), i, weights
        assert float(metrics["grad/skipped"].value()) == (i >= 2)


@pytest.mark.parametrize("world, options", [(1, {}), (2, {}), (2, {"sp_size": 2})])
def test_the_first_offending_sequence_is_kept(tmp_path, world, options):
    run = (
        (lambda *a: [not_finite(0, *a)])
        if world == 1
        else (lambda *a: ranks.run(2, "test_faults:not_finite", *a))
    )
    results = run(str(tmp_path), options)
    for text, step, _ in results:
        assert step == 4 and "nan in 3 updates in a row (step 5); the first sequence" in text
    weights = results[0][2]
    pack, kept, about = load_fault(tmp_path / "fault_00000005")
    assert about["step"] == 5 and about["row"] == 5
    want = packing.pack(spoilt(4, 5), [5])
    assert torch.equal(pack.tokens, want.tokens) and torch.equal(pack.target, want.target)
    assert torch.equal(pack.adv, want.adv) or bool(pack.adv.isnan().any())
    assert kept.keys() == weights.keys() and all(torch.equal(kept[n], weights[n]) for n in kept)


def test_the_smallest_prefix():
    for count in (1, 2, 7, 64):
        for at in range(1, count + 1):
            assert diagnose._smallest(count, lambda n: n >= at) == at  # noqa: B023
        assert diagnose._smallest(count, lambda n: False) is None


def test_a_pack_splits_into_its_sequences():
    exp = conformance.experience(0)
    for one, row in zip(diagnose._units([packing.pack(exp, [2, 4]), packing.pack(exp, [1])]), (2, 4, 1)):
        want = packing.pack(exp, [row])
        assert one.rows == (row,) and one.num_seqs == 1
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(want)))


def preference(out, b):
    """Bradley-Terry of the sums of log-probs with a margin, on each token of the chosen response."""
    score = rft.segment.sum(out.logp, b.mask, b.seq, b.num_seqs)
    margin = rft.segment.sum(b.old_logp, b.mask, b.seq, b.num_seqs)
    pair = rft.loss.bradley_terry(score[0::2], score[1::2], margin=margin[0::2])
    return torch.where(b.mask & (b.seq % 2 == 0), pair[b.seq // 2], 0)


def test_a_loss_of_pairs_leaves_its_pair(tmp_path):
    """The post-mortem tries pairs, and keeps both sides of the one at fault."""
    st = get_strategy(StrategyConfig(max_skips=1))
    st.session.set_dump_dir(tmp_path)
    apply, state = st.init(tiny.llama(), conformance.adamw())
    exp = conformance.experience(0, dtype=torch.float32)
    exp = packing.take(exp, torch.arange(len(exp.tokens) // 2 * 2))
    bad = next(i for i in range(2, len(exp.tokens), 2) if exp.mask[i].any())
    exp.old_logp[bad] = torch.nan
    packs = st.shard(exp, 60, unit=2)
    assert len(packs) > 1
    grads, _ = st.grad(state, apply, preference, packs)
    with pytest.raises(NonFinite, match="the first sequence with such a gradient"):
        st.update(state, grads)
    pack, _, about = load_fault(tmp_path / "fault_00000001")
    assert about["row"] == bad and (pack.num_seqs, pack.unit) == (2, (2,))
    want = packing.pack(exp, [bad, bad + 1], unit=2)
    assert torch.equal(pack.tokens, want.tokens) and torch.equal(pack.seq, want.seq)


def test_replay_shows_what_is_not_finite(tmp_path, capsys):
    from test_house import load_script

    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    not_finite(0, str(tmp_path), {})
    replay = load_script("replay")
    fault = str(tmp_path / "fault_00000005")
    replay.main(replay.Config(fault=fault, model=str(tmp_path / "model")))
    out = capsys.readouterr().out
    assert "step 5, rank 0, row 5:" in out and "weights: all finite" in out
    assert "gradients: not finite in" in out and "<- not finite" in out
    with pytest.raises(ValueError, match=r"model: expected one, got none: there is no .*config.json"):
        replay.main(replay.Config(fault=fault))
    with pytest.raises(ValueError, match=r"expected weights of .*, got .*is it a critic's"):
        replay.main(replay.Config(fault=fault, model="tiny", critic=True, algorithm="ppo"))
    with pytest.raises(ValueError, match=r"fault: expected a folder .* sequence.safetensors, got"):
        replay.main(replay.Config(fault=str(tmp_path), model="tiny"))
    with pytest.raises(ValueError, match=r"^algorithm: expected one of grpo, .*, ppo, vapo, got 'no'$"):
        replay.main(replay.Config(fault=fault, model="tiny", algorithm="no"))
    with pytest.raises(ValueError, match=r"^algorithm: expected one of ppo, vapo, got 'grpo', which has no"):
        replay.main(replay.Config(fault=fault, model="tiny", critic=True))
    for name in ("weights.safetensors", "sequence.safetensors", "fault.json"):
        file = tmp_path / "fault_00000005" / name
        whole = file.read_bytes()
        for cut in (whole[:20], b"{}"):
            file.write_bytes(cut)
            with pytest.raises(ValueError, match=r"^fault: .*fault_00000005 are damaged: ") as error:
                replay.main(replay.Config(fault=fault, model="tiny"))
            assert "\n" not in str(error.value)
        file.write_bytes(whole)


REPLAYED = [
    ("grpo", {"algorithm": "gspo", "weight": "token_mean", "advantage": "rloo", "loss": {"low": 1e-3}}, {}),
    ("grpo", {"algorithm": "cispo", "loss": {"high": 0.01}, "kl": 0.1, "mismatch": "icepop"}, {}),
    ("grpo", {"algorithm": "sapo", "loss": {"tau_pos": 3.0}, "entropy": 0.1}, {"loss": {"tau_neg": 9.0}}),
    ("grpo", {"loss": {"low": 0.02, "dual": 1.1}}, {"loss": {"low": 0.3}, "kl": 0.5}),
    ("ppo", {"loss": {"high": 0.01}, "gae_lambda": 0.9, "weight": "seq_mean"}, {"loss": {"dual": 1.05}}),
    ("ppo", {"value_clip": 0.01}, {"critic": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "given"), REPLAYED)
def test_replay_has_the_objective_of_the_run(name, options, given, tmp_path):
    """With what the command line gives in its place; adv and w of the sequence are the run's own."""
    from test_house import load_script

    script, replay, limits = load_script(name), load_script("replay"), rft.run.options.Limits

    def made(options):
        return {k: limits(**x) if k == "loss" else x for k, x in options.items()}

    run = {**dataclasses.asdict(script.Config(**made(options))), "made_by": {"script": f"{name}.py"}}
    (tmp_path / "config.json").write_text(json.dumps(run))
    cfg = replay.Config(fault=str(tmp_path / "fault_1"), **made(given))
    found = replay.objective(cfg, replay.settings(cfg))

    # the script's own loss with all of these options
    both = options | {k: x for k, x in given.items() if k != "critic"}
    both |= {"loss": {**options.get("loss", {}), **given.get("loss", {})}}
    own = script.Config(**made(both))
    exp = testing.case(3).exp
    extra = {"correction": torch.full_like(exp.w, 0.7), "positive": torch.zeros_like(exp.w)}
    extra |= {"entropy": torch.full_like(exp.w, own.entropy)} if own.entropy else {}
    exp = tree.replace(exp, extra=extra)
    exp = tree.replace(exp, ref_logp=exp.old_logp - 0.3, old_value=exp.adv, ret=exp.adv + 1)
    b = packing.pack(exp, range(len(exp.mask)))
    drawn = torch.randn(3, len(b.tokens), generator=torch.Generator().manual_seed(0))
    out = TokenOut(logp=b.old_logp + drawn[0], entropy=drawn[1].abs(), value=drawn[2], aux=None)
    if given.get("critic"):
        want = rft.run.actor_critic(own).value_loss(out, b)[0]
        torch.testing.assert_close(found(out, b)[0], want)
    elif name == "ppo":
        want = script.actor_loss(own, rft.run.actor_critic(own), out, b)[0]
        torch.testing.assert_close(found(out, b), want)
    else:
        want = script.policy_loss(
            own, rft.run.objective(own.algorithm, own, advantage=own.advantage), out, b
        )[0]
        torch.testing.assert_close(found(out, b), want)


def test_replay_of_another_algorithm_has_its_own_limits(tmp_path):
    from test_house import load_script

    replay = load_script("replay")
    (tmp_path / "config.json").write_text('{"algorithm": "sapo", "model": "tiny", "loss": {"tau_pos": 3.0}}')
    cfg = replay.Config(fault=str(tmp_path / "fault_1"), algorithm="grpo")
    b = packing.pack(testing.case(3).exp, range(4))
    out = TokenOut(logp=b.old_logp + 0.5, entropy=None, value=None, aux=None)
    want = rft.algorithm.TABLE["grpo"].loss(out, b)[0]
    torch.testing.assert_close(replay.objective(cfg, replay.settings(cfg))(out, b), want)
