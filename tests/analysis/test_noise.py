"""The noise of gradients, from halves of the packs: against sums of single prompts, and the exact value."""

import subprocess
import sys

import families
import pytest
import ranks
import ref
import torch

import rft_fn as rft
from rft_fn import analysis, packing, tree
from rft_fn.analysis import noise
from rft_fn.strategy import StrategyConfig, get_strategy


def reinforce(out, b):
    return rft.loss.reinforce(out.logp, b.adv)


def batch(prompts=8, group=4, dtype=torch.float64):
    """Responses of prompts, each prompt's rows alike at the beginning; every prompt has the same weight."""
    g = torch.Generator().manual_seed(prompts)
    rows = []
    for n in range(prompts):
        prompt = torch.randint(3, 14, (3 + n % 4,), generator=g).tolist()
        for i in range(group):
            rows.append((prompt, torch.randint(3, 14, (2 + (n + i) % 5,), generator=g).tolist()))
    exp = packing.supervised(rows)
    adv = rft.advantage.grpo(torch.rand(prompts, group, generator=g, dtype=torch.float64)).view(-1, 1)
    w = rft.weight.seq_mean(exp.mask)
    group_of = torch.arange(prompts).repeat_interleave(group)
    return tree.replace(
        exp, adv=(adv * exp.mask).to(dtype), w=w.to(dtype), old_logp=exp.old_logp.to(dtype), group=group_of
    )


def flat(grads):
    return torch.cat([x.flatten() for x in grads.values()])


def trained(st, dtype=torch.float64):
    """A model whose norms are in float64 too: prompts that are computed once are summed there."""
    return st.init(families.small("GPTNeoX", dtype, attention_bias=False), rft.optim.adamw(1e-3))


def of_prompts(st, state, apply, exp):
    """[N, P]: the gradient of each prompt's rows."""
    rows = [(exp.group == n).nonzero()[:, 0].tolist() for n in exp.group.unique().tolist()]
    return torch.stack([flat(st.grad(state, apply, reinforce, [packing.pack(exp, r)])[0]) for r in rows])


def test_the_estimators_are_unbiased_for_any_halves():
    """Over all draws of 4 vectors out of 3 with replacement, in halves of 1 and 3."""
    x = torch.tensor([[1.0, 0.5], [-0.3, 2.0], [0.7, -1.0]], dtype=torch.float64)
    found = []
    for draw in torch.cartesian_prod(*[torch.arange(3)] * 4):
        parts = x[draw] / 4
        first, second = parts[:1].sum(0), parts[1:].sum(0)
        squares = (float(v.square().sum()) for v in (first, second, first + second))
        found.append(analysis.noise_scale(*squares, prompts=(1, 3)))
    variance = float((x - x.mean(0)).square().sum(-1).mean())
    assert sum(n.signal for n in found) / len(found) == pytest.approx(float(x.mean(0).square().sum()))
    assert sum(n.noise for n in found) / len(found) == pytest.approx(variance / 4)
    one = analysis.Noise(signal=2.0, noise=0.5, prompts=10)
    assert (one.snr, one.scale) == (4.0, 2.5)
    assert analysis.Noise(signal=-1.0, noise=0.5, prompts=10).scale == float("inf")


@pytest.mark.parametrize("budget", [30, 70, 120, 1000])
def test_halves_of_packs_are_halves_of_prompts(budget):
    """Their norms are those of the sums over prompts, the gradient that of the usual packs."""
    st, exp = get_strategy(), batch()
    apply, state = trained(st)
    usual = st.shard(exp, budget)
    want = st.grad(state, apply, reinforce, usual)[0]
    packs = st.shard(exp, budget, halves=True)
    of = lambda k: [exp.group[list(b.rows)].tolist() for b in packs if b.half[0] == k]  # noqa: E731
    halves = [set().union(*of(k)) for k in (0, 1)]
    assert not halves[0] & halves[1] and halves[0] | halves[1] == set(range(8))
    assert {b.half[1:] for b in packs} == {(len(halves[0]), len(halves[1]))}
    assert all(len(b.tokens) <= budget for b in packs)

    grads, metrics = st.grad(state, apply, reinforce, packs)
    assert torch.allclose(flat(grads), flat(want), rtol=1e-12, atol=1e-12)
    each_prompt = of_prompts(st, state, apply, exp)
    first = each_prompt[sorted(halves[0])].sum(0)
    second = each_prompt[sorted(halves[1])].sum(0)
    squares = (float(v.square().sum()) for v in (first, second, first + second))
    want = analysis.noise_scale(*squares, prompts=packs[0].half[1:])
    found = rft.metric.results(metrics)
    assert found["grad/snr"] == pytest.approx(want.snr, rel=1e-10)
    assert found["grad/noise_scale"] == pytest.approx(want.scale, rel=1e-10)


def test_usual_packs_stay_where_they_hold_whole_prompts():
    st, exp = get_strategy(), batch()
    apply, state = trained(st)
    rows = lambda packs: [b.rows for b in packs]  # noqa: E731
    usual = st.shard(exp, 70)
    free = st.shard(exp, 70, halves=None)
    assert rows(free) == rows(usual) == rows(st.shard(exp, 70, halves=True)) and free[0].half[0] == 0
    assert torch.equal(*(flat(st.grad(state, apply, reinforce, p)[0]) for p in (usual, free)))

    # one pack has both halves, so they are cut anew where it is asked for, and left where it is not
    assert rows(st.shard(exp, 1000, halves=None)) == rows(st.shard(exp, 1000))
    assert st.shard(exp, 1000, halves=None)[0].half is None
    assert len(st.shard(exp, 1000, halves=True)) == 2

    # rows without groups are prompts, units too
    alone = tree.replace(exp, group=None)
    assert st.shard(alone, 1000, halves=True)[0].half == (0, 16, 16)
    assert st.shard(alone, 1000, halves=True, unit=2)[0].half == (0, 8, 8)


def test_packs_after_the_halves_count_only_for_the_gradient():
    st, exp = get_strategy(), batch()
    apply, state = trained(st)
    packs, more = st.shard(exp, 70, halves=True), st.shard(batch(3), 1000)
    grads, metrics = st.grad(state, apply, reinforce, packs + more)
    _, without = st.grad(state, apply, reinforce, packs)
    assert rft.metric.results(metrics)["grad/snr"] == rft.metric.results(without)["grad/snr"]
    whole = flat(st.grad(state, apply, reinforce, st.shard(exp, 70) + more)[0])
    assert torch.allclose(flat(grads), whole)


def test_the_mean_over_batches_is_the_exact_value_within_its_error():
    """Prompts drawn from a population of 12: signal and noise are those of its mean and covariance."""
    st, population = get_strategy(), batch(12)
    apply, state = trained(st)
    each_prompt = 12 * of_prompts(st, state, apply, population)
    signal = float(each_prompt.mean(0).square().sum())
    variance = float((each_prompt - each_prompt.mean(0)).square().sum(-1).mean())
    g, found = torch.Generator().manual_seed(1), []
    for _ in range(80):
        drawn = torch.randint(0, 12, (6,), generator=g)
        rows = torch.cat([(population.group == n).nonzero()[:, 0] for n in drawn])
        exp = packing.take(population, rows)
        exp = tree.replace(exp, w=exp.w * 2, group=torch.arange(6).repeat_interleave(4))
        half = [packing.pack(exp, range(0, 12)), packing.pack(exp, range(12, 24))]
        squares = [float(st_square(st, state, apply, packs)) for packs in (half[:1], half[1:], half)]
        direct = analysis.noise_scale(*squares, prompts=(3, 3))
        metrics = st.grad(state, apply, reinforce, st.shard(exp, 1000, halves=True))[1]
        if direct.noise > 1e-9:  # not the same prompts in both halves
            assert rft.metric.results(metrics)["grad/snr"] == pytest.approx(direct.snr, rel=1e-6)
        found.append((direct.signal, 6 * direct.noise))
    means = torch.tensor(found, dtype=torch.float64)
    error = means.std(0) / len(found) ** 0.5
    off = (means.mean(0) - torch.tensor([signal, variance])) / error
    assert float(off.abs().max()) < 3, off
    assert 0.5 < float(means[:, 1].mean() / means[:, 0].mean()) / (variance / signal) < 2


def st_square(st, state, apply, packs):
    return flat(st.grad(state, apply, reinforce, packs)[0]).square().sum()


def test_the_kl_of_an_update_and_its_prediction():
    """On tokens in the proportions of the policy before it k3 sums to the KL; near where steps are small."""
    old = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    tokens = torch.tensor([0, 0, 1, 2, 0])
    mask = torch.tensor([True] * 4 + [False])
    for step in (0.01, 1.0):
        new = (old.log() + step * torch.tensor([0.5, -1.0, 0.3])).log_softmax(0)
        found = analysis.update_kl(old.log()[tokens], new[tokens], mask)
        d = new - old.log()
        assert found.kl == pytest.approx(float((old * -d).sum()), rel=1e-9)
        assert found.quadratic == pytest.approx(float((old * d.square()).sum() / 2), rel=1e-9)
        assert found.ratio == found.kl / found.quadratic
        assert abs(found.ratio - 1) < step
    assert abs(found.ratio - 1) > 0.03
    with pytest.raises(ValueError, match="after"):
        analysis.update_kl(old, old[:2], mask[:3])


def test_the_half_that_is_kept_is_one_copy_and_gone_after_it():
    """The memory of a measured step: a copy of the sums, while the second half runs."""
    st, exp = get_strategy(), batch()
    apply, state = trained(st)
    kept = []

    class Watched(noise.Meter):
        def note(self, i, sums):
            super().note(i, sums)
            kept.append((self.halves[i][0], sum(x.numel() for x in self.kept.values())))

    packs = st.shard(exp, 40, halves=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "Meter", Watched)
        st.grad(state, apply, reinforce, packs)
    size = sum(p.numel() for p in state.params.values())
    last = max(i for i, (half, _) in enumerate(kept) if half == 0)
    assert [n for _, n in kept] == [0] * last + [size] * (len(kept) - 1 - last) + [0]
    assert len(kept) > 3


def test_a_step_that_does_not_ask_imports_nothing_of_it():
    code = (
        "import sys; sys.path[:0] = ['tests']; import conformance, tiny, torch, rft_fn as rft;"
        "st = rft.strategy.get_strategy(); apply, state = st.init(tiny.llama(), rft.optim.adamw(1e-3));"
        "packs = st.shard(conformance.experience(0, dtype=torch.float32), 40);"
        "state, _ = st.update(state, st.grad(state, apply, conformance.loss_fn, packs)[0]);"
        "print([m for m in sys.modules if m.startswith('rft_fn.analysis')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


# ---------- several processes

SHARDED = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
BACKENDS = {
    "fsdp2": ({}, torch.float64),
    "fsdp2 sp": ({"sp_size": 2}, torch.float64),
    "hsdp": ({"shard_size": 1}, torch.float64),
    "zero1": ({"zero_stage": 1}, torch.float32),
    "zero2": ({"zero_stage": 2}, torch.float32),
    "zero3": ({"zero_stage": 3, "extra": SHARDED}, torch.float32),
    "zero2 offload": ({"zero_stage": 2, "adam_offload": True}, torch.float32),
    "zero3 offload": ({"zero_stage": 3, "adam_offload": True, "extra": SHARDED}, torch.float32),
}


def measured(st, dtype):
    """The metrics of a batch in several packs a half, with one more pack after them, and the norm of all."""
    exp = batch(dtype=dtype)
    out = {}
    for halves in (True, None):
        apply, state = trained(st, dtype)
        packs = st.shard(exp, 40 if halves else 70, halves=halves) + st.shard(batch(3, dtype=dtype), 100)
        grads, metrics = st.grad(state, apply, reinforce, packs)
        state, more = st.update(state, grads)
        out |= {f"{halves} {n}": x for n, x in rft.metric.results(metrics | more).items()}
    return out


def on_ranks(rank):
    processes = rft.dist.begin(600.0)
    out = {}
    for name, (options, dtype) in BACKENDS.items():
        st = get_strategy(StrategyConfig(**options))
        out[name] = measured(st, dtype)
        st.close()
    processes.close()
    return out


def amplified(of, found):
    """How far the signal of a noisy gradient moves with one rounding to float32 of each of its norms.

    It is four times the product of the halves, (|g|^2 - |h1|^2 - |h2|^2) / 2, and |g|^2 is about the signal
    and the noise together: a relative error e of the three norms is one of 8 e (1 + noise / signal).
    Processors add up in other orders: an Intel with AMX moves it by 3.2e-5, at a ratio of 0.014.
    """
    way, _, name = of.partition(" ")
    if name not in ("grad/snr", "grad/noise_scale"):
        return 0.0
    return 8 * ref.UNIT * (1 + 1 / found[f"{way} grad/snr"])


@pytest.mark.slow
def test_two_processes_measure_what_one_does():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    found = ranks.run(2, "test_noise:on_ranks")
    for name, (_, dtype) in BACKENDS.items():
        want = measured(get_strategy(), dtype)
        assert {"True grad/snr", "None grad/noise_scale"} <= want.keys()
        if "sp" in name.split():  # it computes no prompt once, so its usual packs are not by prompts
            want = {n: x for n, x in want.items() if n in found[0][name]}
            assert "True grad/snr" in want and "None grad/snr" not in want
        if "offload" in name:  # DeepSpeed notes the norms itself
            want = {n: x for n, x in want.items() if "snr" not in n and "scale" not in n}
        for got in (mine[name] for mine in found):
            assert got.keys() == want.keys(), name
            for of, x in want.items():
                rel = 1e-10 if dtype == torch.float64 else max(2e-5, amplified(of, want))
                assert got[of] == pytest.approx(x, rel=rel), (name, of)
