"""Mismatch of trainer and sampler: measured as defined, limited by its noise, corrected, and explained."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import ref
import tiny
import torch
from families import AT, far
from hypothesis import example, given
from hypothesis import strategies as st
from test_house import load_script as script

import rft_fn as rft
from rft_fn import collect, engine, model, packing, tree, weight
from rft_fn.run import options
from rft_fn.run.off_policy import limited_gap, trainer_logp
from rft_fn.types.engine import Delivered

PROMPTS, KEYS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [12]], [1, 2, 3, 4]


def rollout(sampling, *, n=3, lm=None):
    return engine.hf(lm or tiny.llama(), tiny.tokenizer()).generate(PROMPTS, KEYS, n=n, sampling=sampling)


def packs_of(r):
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    return packing.shard(exp, 64)[0]


def random_rollout(seed, spread=1.0):
    """(a rollout, the trainer's log-probs), which differ by `spread` nats."""
    g = torch.Generator().manual_seed(seed)
    exp = tiny.experience(seed)
    logp = torch.where(exp.mask, -torch.rand(exp.tokens.shape, generator=g), 0)
    trainer = torch.where(exp.mask, logp + spread * torch.randn(logp.shape, generator=g), 0)
    rows = len(exp.length)
    r = rft.Rollout(
        tokens=exp.tokens,
        mask=exp.mask,
        logp=logp,
        length=exp.length,
        truncated=torch.zeros(rows, dtype=torch.bool),
        group=torch.arange(rows),
        version=torch.arange(rows) % 3,
    )
    return r, trainer


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 5))
@example(seed=2237, spread=5.0)  # a token is more than 20 nats away
def test_the_mismatch_is_its_definition(seed, spread):
    r, trainer = random_rollout(seed, spread)
    found = collect.mismatch_metrics(trainer, r)
    assert tuple(found)[: len(collect.MISMATCH)] == collect.MISMATCH
    want = ref.mismatch(trainer.double(), r.logp.double(), r.mask)
    np.testing.assert_allclose([found[name] for name in collect.MISMATCH], want, rtol=1e-4, atol=1e-6)
    by_depth = {name: x for name, x in found.items() if name not in collect.MISMATCH}
    assert by_depth == pytest.approx(ref.gap_by_depth(trainer - r.logp, r.mask), rel=1e-4, abs=1e-6)


def test_the_kl_is_that_of_sampler_and_trainer():
    """Over all tokens, weighted by the sampler's probability, it is KL(sampler, trainer)."""
    g = torch.Generator().manual_seed(0)
    sampler, trainer = torch.randn(2, 50, generator=g, dtype=torch.float64).log_softmax(-1)
    p = sampler.exp()
    each = [
        rft.metric.results(rft.metric.mismatch(t[None], s[None], torch.ones(1, dtype=torch.bool)))
        for t, s in zip(trainer, sampler)
    ]
    got = sum(float(x) * row["policy/kl_sampler"] for x, row in zip(p, each))
    assert got == pytest.approx(float((p * (sampler - trainer)).sum()), rel=1e-9)


def test_staleness_counts_versions():
    r, _ = random_rollout(0)
    assert r.version.tolist() == [0, 1, 2, 0, 1, 2]
    assert collect.staleness(r, 5) == {"rollout/staleness": 4.0, "rollout/staleness_max": 5.0}


@given(seed=st.integers(0, 10**6), cap=st.floats(1.01, 5))
def test_a_correction_is_a_factor_of_any_weight(seed, cap):
    """What the definition makes of w is w times the factor, and the metrics count what was cut."""
    r, trainer = random_rollout(seed)
    w = weight.seq_mean(r.mask)
    definitions = {
        "tis": lambda *row: ref.truncated_is(*row, cap=cap),
        "mis": lambda *row: ref.masked_is(*row, cap=cap),
        "icepop": lambda *row: ref.icepop(*row, low=1 / cap, high=cap),
    }
    whole = ref.seq_importance(trainer.double(), r.logp.double(), r.mask)[:, None]
    by_response = {"tis_seq": np.minimum(whole, cap), "mis_seq": np.where(whole <= cap, whole, 0)}
    assert definitions.keys() | by_response.keys() == set(collect.CORRECTIONS)
    for name, want in by_response.items():
        factor, metrics = collect.correction(name, trainer, r, cap=cap)
        np.testing.assert_allclose(factor, want * r.mask.numpy(), rtol=1e-4, atol=1e-7)
        cut = torch.tensor(whole > cap).expand_as(r.mask)[r.mask]
        assert metrics["mismatch/cut"] == pytest.approx(float(cut.double().mean()), abs=1e-6)
    for name, define in definitions.items():
        factor, metrics = collect.correction(name, trainer, r, cap=cap)
        want = np.stack([define(*row) for row in zip(w.numpy(), trainer.numpy(), r.logp.numpy())])
        np.testing.assert_allclose(w * factor, want, rtol=1e-4, atol=1e-7)
        assert not factor[~r.mask].any()
        ratio = (trainer - r.logp).exp()[r.mask]
        cut = (ratio > cap) | ((name == "icepop") & (ratio < 1 / cap))
        assert metrics["mismatch/cut"] == pytest.approx(float(cut.double().mean()), abs=1e-6)
        assert metrics["mismatch/weight"] == pytest.approx(float(factor[r.mask].mean()), rel=1e-5)


@given(seed=st.integers(0, 10**6), low=st.floats(0, 1), high=st.floats(1.01, 3))
def test_a_band_drops_responses_by_the_geometric_mean_of_their_ratios(seed, low, high):
    """On top of any correction, and by itself."""
    r, trainer = random_rollout(seed)
    ratio = np.exp((trainer - r.logp).double().numpy())
    tokens = r.mask.sum(-1).tolist()
    means = [float(np.prod(x[m]) ** (1 / max(n, 1))) for x, m, n in zip(ratio, r.mask.numpy(), tokens)]
    outside = [not low <= x <= high for x in means]
    kept = ~torch.tensor(outside)[:, None] & r.mask
    for name in ("none", *collect.CORRECTIONS):
        factor, metrics = collect.correction(name, trainer, r, geo_low=low, geo_high=high)
        plain = r.mask.float() if name == "none" else collect.correction(name, trainer, r)[0]
        torch.testing.assert_close(factor, torch.where(kept, plain, 0))
        drawn = [x for x, n in zip(outside, tokens) if n]
        assert metrics["mismatch/outside_band"] == pytest.approx(sum(drawn) / len(drawn))


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 2))
def test_the_ratios_of_whole_responses_have_an_effective_share(seed, spread):
    r, trainer = random_rollout(seed, spread)
    ratios = ref.seq_importance(trainer.double(), r.logp.double(), r.mask)[r.mask.any(-1)]
    _, metrics = collect.correction("tis", trainer, r)
    assert metrics["mismatch/ess_seq"] == pytest.approx(ref.effective_share(ratios), rel=1e-4)
    assert metrics["mismatch/chi2_seq"] == pytest.approx(np.mean(ratios**2) - 1, rel=1e-4, abs=1e-5)


def test_an_unknown_correction_is_refused():
    r, trainer = random_rollout(0)
    with pytest.raises(ValueError, match=r"mismatch: expected one of tis, .*, mis_seq, got 'is'"):
        collect.correction("is", trainer, r)
    with pytest.raises(ValueError, match=r"^floor: expected None, mis has none, got 0.5"):
        collect.correction("mis", trainer, r, floor=0.5)
    with pytest.raises(ValueError, match=r"^floor: expected None without --mismatch tis or icepop, got 0.5"):
        options.Rollouts(floor=0.5)


def test_tis_and_icepop_take_a_least_ratio():
    r, trainer = random_rollout(0)
    low, high = ((trainer - r.logp)[r.mask].exp().quantile(q).item() for q in (0.2, 0.9))
    found = collect.correction("icepop", trainer, r, cap=high, floor=low)[0]
    w = r.mask.to(trainer.dtype)
    torch.testing.assert_close(found, weight.icepop(w, trainer, r.logp, low=low, high=high))
    assert not torch.equal(found, collect.correction("icepop", trainer, r, cap=high)[0])
    raised = collect.correction("tis", trainer, r, cap=high, floor=low)[0]
    torch.testing.assert_close(raised, (trainer - r.logp).exp().clamp(low, high) * w)


@dataclass(frozen=True)
class Seen(options.Rollouts, options.Entropy):
    """The options of a run by which its trainer sees a rollout."""

    budget: int = 64


def seen(cfg, strategy, apply, params, r, step=0, **more):
    """A rollout as the trainer of a run sees it."""
    env = SimpleNamespace(
        cfg=cfg, st=strategy, policy=SimpleNamespace(apply=apply), phase=lambda name: nullcontext()
    )
    return trainer_logp(env, SimpleNamespace(params=params), r, step, **more)


def test_a_corrected_loss_starts_from_the_trainers_policy():
    """old_logp is what the trainer scores, without a correction what the sampler says."""
    sampling = rft.Sampling(max_new=6)
    r = rollout(sampling, lm=tiny.llama(3))
    strategy = rft.strategy.get_fake_strategy()
    apply, params = strategy.bind(tiny.llama())
    plain = seen(Seen(), strategy, apply, params, r, 2)
    assert plain.old_logp is r.logp and plain.extra == {}
    assert plain.metrics == {"rollout/staleness": 2.0, "rollout/staleness_max": 2.0}
    cfg = Seen(mismatch="tis", cap=1.5)
    found = seen(cfg, strategy, apply, params, r, 2)
    want = strategy.score(apply, params, r, 64).logp
    assert torch.equal(found.old_logp, want) and (want - r.logp).abs().max() > 0.1
    factor = (want - r.logp).exp().clamp(max=1.5) * r.mask
    torch.testing.assert_close(found.extra["correction"], factor)
    assert found.metrics["policy/logp_gap"] == pytest.approx(collect.logp_mismatch(want, r.logp, r.mask))


def test_tokens_of_weights_that_are_too_old_are_masked():
    r = rollout(rft.Sampling(max_new=6), lm=tiny.llama(3))
    strategy = rft.strategy.get_fake_strategy()
    apply, params = strategy.bind(tiny.llama())
    versions = (torch.arange(r.mask.shape[1]) * r.mask).clamp(max=6)
    r = rft.tree.replace(r, versions=versions)
    fresh = (r.mask & (versions >= 5)).float()
    assert 0 < fresh.sum() < r.mask.sum()
    plain = seen(Seen(max_lag=2), strategy, apply, params, r, 7)
    assert torch.equal(plain.extra["correction"], fresh) and plain.old_logp is r.logp
    assert plain.metrics["mismatch/too_old"] == pytest.approx(1 - float(fresh.sum() / r.mask.sum()))
    both = seen(Seen(max_lag=2, mismatch="tis"), strategy, apply, params, r, 7)
    tis = seen(Seen(mismatch="tis"), strategy, apply, params, r, 7)
    assert torch.equal(both.extra["correction"], fresh * tis.extra["correction"])
    whole = rft.tree.replace(r, versions=None, version=torch.tensor([4, 5] * (len(r.version) // 2)))
    rows = seen(Seen(max_lag=2), strategy, apply, params, whole, 7).extra["correction"]
    assert not rows[::2].any() and torch.equal(rows[1::2], r.mask[1::2].float())


def test_tokens_are_chosen_by_the_entropy_of_the_policy():
    """Of the whole rollout, with the sampler's log-probs unless they are corrected, and on top of that."""
    r = rollout(rft.Sampling(max_new=6), lm=tiny.llama(3))
    strategy = rft.strategy.get_fake_strategy()
    apply, params = strategy.bind(tiny.llama(), entropy=True)
    scored = strategy.score(apply, params, r, 64, fields=("entropy",))
    found = seen(Seen(entropy_share=0.3), strategy, apply, params, r)
    every = sorted(scored.entropy[r.mask].tolist(), reverse=True)
    least = every[int(np.ceil(0.3 * len(every))) - 1]
    # with all that have the same entropy: the first tokens of the responses to a prompt
    wanted = (r.mask & (scored.entropy > least - 1e-4)).float()
    assert bool((weight.high_entropy(wanted, scored.entropy, r.mask, share=0.3) <= wanted).all())
    assert torch.equal(found.extra["correction"], wanted) and found.old_logp is r.logp
    assert found.metrics["entropy/threshold"] == pytest.approx(least)
    both = Seen(entropy_share=0.3, mismatch="tis")
    found = seen(both, strategy, apply, params, r)
    factor, _ = collect.correction("tis", scored.logp, r)
    assert torch.equal(found.extra["correction"], wanted * factor)
    assert torch.equal(found.old_logp, scored.logp)


def test_the_bonus_follows_the_entropy_of_the_policy():
    r = rollout(rft.Sampling(max_new=6), lm=tiny.llama(3))
    strategy = rft.strategy.get_fake_strategy()
    apply, params = strategy.bind(tiny.llama(), entropy=True)
    own = strategy.score(apply, params, r, 64, fields=("entropy",)).entropy
    mean = float(own[r.mask].double().mean())
    for target, applied, later in ((mean + 0.01, 0.02, 0.025), (mean - 0.01, 0.0, 0.015)):
        cfg = Seen(entropy=0.5, entropy_target=target)
        found = seen(cfg, strategy, apply, params, r, entropy=0.02)
        assert found.entropy == pytest.approx(later) and found.metrics["entropy/coef"] == applied
        assert found.extra["entropy"].tolist() == pytest.approx([applied] * len(r.tokens))
    fixed = seen(Seen(entropy=0.5), strategy, apply, params, r, entropy=0.02)
    assert fixed.entropy == 0.5 and set(fixed.extra["entropy"].tolist()) == {0.5}
    assert not any(name.startswith("entropy/") for name in fixed.metrics)


SMALL = {"prompts": 4, "group": 4, "steps": 3, "warmup": 0, "eval_prompts": 4, "canary": False}
SMALL |= {"max_gap": 100.0, "gap_factor": 1e9, "minibatches": 2}


def stale(build):
    """Engines that take no weights after the first."""

    def built(*args):
        inner = build(*args)

        def load(weights, *, version):
            if not version:  # copies, for lent ones would change with the trainer's
                return inner.load([(name, x.clone()) for name, x in weights], version=version)
            sizes = [x.numel() * x.element_size() for _, x in weights]
            return Delivered(len(sizes), sum(sizes), 0.0, version)

        return inner._replace(load=load)

    return built


@pytest.mark.usefixtures("plain_runs")
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_each_correction_trains_otherwise_on_stale_samples(monkeypatch, tmp_path, name):
    monkeypatch.setattr(engine, "get_engine", stale(engine.get_engine))
    module = script(name)
    losses = {}
    kinds = [("none", 2.0), ("tis", 1.02), ("tis", 1.1), ("mis", 1.02), ("icepop", 1.02)]
    # smaller steps, after which some response is still likelier than before
    kinds += [("none", 1.5), ("tis_seq", 1.02), ("mis_seq", 1.02), ("band", 1.02)]
    for kind, cap in kinds:
        folder = tmp_path / f"{kind}{cap}"
        how = {"mismatch": "none", "geo_low": 0.8, "geo_high": cap} if kind == "band" else {"mismatch": kind}
        lr = 1e-3 if kind in ("tis_seq", "mis_seq", "band") or cap == 1.5 else 1e-2
        module.main(module.Config(**SMALL | how, lr=lr, cap=cap, out=str(folder)))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [r["rollout/staleness"] for r in rows] == [0, 1, 2]
        assert rows[0]["policy/logp_gap"] < 1e-5 and rows[2]["policy/logp_gap"] > 1e-3
        assert rows[2]["policy/kl_sampler"] > 0
        assert rows[0]["policy/ess_sampler"] > 0.999 > rows[2]["policy/ess_sampler"] > 0
        assert abs(rows[0]["policy/chi2_sampler"]) < 1e-5 < rows[2]["policy/chi2_sampler"]
        if kind != "none":
            assert rows[0]["mismatch/cut"] == 0 and rows[2]["mismatch/cut"] > 0
        losses[kind, cap] = rows[2]["policy/loss"]
    assert len(set(losses.values())) == len(losses), losses


def test_the_limit_is_a_multiple_of_the_noise_floor():
    assert collect.gap_limit(0.01, 30.0, 0.0) == 0.01
    assert collect.gap_limit(0.01, 30.0, 1e-5) == pytest.approx(3e-4)
    assert collect.gap_limit(0.01, 30.0, 1e-3) == 0.01
    plain, cut = rft.Sampling(), rft.Sampling(top_p=0.9)
    assert collect.noise_floor(1e-9, plain) == 1e-6 and collect.noise_floor(5e-6, plain) == 5e-6
    assert collect.noise_floor(1e-9, cut) == 1e-4 and collect.noise_floor(5e-3, cut) == 5e-3


def test_the_first_gap_of_a_run_limits_the_later_ones():
    """Weights that are 1e-3 off pass a limit of 0.01, and not one that knows the noise of this run."""
    sampling = rft.Sampling(max_new=6)
    apply, params = model.bind(tiny.llama(), sampling=sampling)
    off = tiny.llama()
    for p in off.parameters():
        p.data *= 1.001
    fresh, late = rollout(sampling), rollout(sampling, lm=off)

    def values(r, staleness=0.0):
        scored = packing.unpack(model.score(apply, params, packs_of(r)), packs_of(r), r.logp)
        return collect.mismatch_metrics(scored, r) | {"rollout/staleness_max": staleness, "loss": 1.0}

    def check(cfg, floor, r, **how):
        return limited_gap(cfg, floor, values(r, **how), r, sampling, apply, params, packs_of(r))

    assert 1e-4 < values(late)["policy/logp_gap"] < 0.01
    cfg = options.Rollouts()
    found, floor = check(cfg, 0.0, fresh)
    names = (*collect.MISMATCH, "mismatch/gap@1k", "mismatch/gap@turn1")
    assert found == {name: values(fresh)[name] for name in names} and floor == 1e-6
    with pytest.raises(ValueError, match=r"above the limit of 3e-05. It is in .*Look at the weights"):
        check(cfg, floor, late)
    check(cfg, 0.0, late)  # a run that knows no floor yet
    assert check(options.Rollouts(gap_factor=1e4), floor, late)[1] == floor

    # where no token is learned from nothing is measured, and that is no floor
    nothing = {"rollout/staleness_max": 0.0}
    assert limited_gap(cfg, 0.0, nothing, fresh, sampling, apply, params, packs_of(fresh))[1] == 0.0
    with pytest.raises(ValueError, match=r"above the limit of 0.0001"):
        check(options.Rollouts(gap_factor=1e4, max_gap=1e-4), floor, late)

    # corrected stale rows differ by design; rows that are not stale do not
    corrected = options.Rollouts(mismatch="tis")
    check(corrected, floor, late, staleness=1.0)
    with pytest.raises(ValueError, match="above the limit"):
        check(corrected, floor, late)
    with pytest.raises(ValueError, match="above the limit"):
        check(cfg, floor, late, staleness=1.0)


CUT = {"temperature": 0.6, "top_p": 0.7}


@pytest.mark.parametrize(
    ("sampler", "trainer", "told", "line"),
    [
        ({"temperature": 0.6}, {}, {"temperature": 0.6}, "temperature: the trainer scores without it"),
        ({}, {"temperature": 0.6}, {"temperature": 0.6}, "temperature: the engine samples without it"),
        (CUT, {"temperature": 0.6}, CUT, "top_p / top_k: the trainer scores without it"),
        ({"temperature": 0.6}, CUT, CUT, "top_p / top_k: the engine samples without it"),
        (CUT, {}, CUT, "temperature and top_p / top_k: the trainer scores without it"),
    ],
)
def test_an_option_that_one_side_does_not_know_is_named(sampler, trainer, told, line):
    """The trainer scores the same tokens without it; an engine is asked for nothing."""
    r = rollout(rft.Sampling(max_new=9, **sampler))
    apply, params = model.bind(tiny.llama(), sampling=rft.Sampling(**trainer))
    packs = packs_of(r)
    before = model.score(apply, params, packs)
    with pytest.raises(ValueError, match=f"Look at {line}"):
        collect.check_mismatch(
            {"policy/logp_gap": 1.0}, 0.01, r, rft.Sampling(max_new=9, **told), apply, params, packs
        )
    for a, b in zip(before, model.score(apply, params, packs), strict=True):
        assert torch.equal(a, b)  # the trainer's own sampling is as it was


def check(r, sampling, trainer, gap=1.0):
    """check_mismatch with a trainer that is any function to log-probs [B, S]."""

    def apply(params, pack):
        rows = torch.tensor(pack.rows)[pack.seq]
        return rft.TokenOut(logp=trainer()[rows, pack.pos + 1])

    collect.check_mismatch({"policy/logp_gap": gap}, 0.01, r, sampling, apply, {}, packs_of(r))


def test_dropout_positions_and_weights_are_told_apart():
    sampling = rft.Sampling(max_new=12)
    r = rollout(sampling)
    with pytest.raises(ValueError, match="Look at dropout"):
        check(r, sampling, lambda: r.logp + torch.randn(r.logp.shape))
    with pytest.raises(ValueError, match="Look at positions"):
        check(r, sampling, lambda: r.logp + r.mask.cumsum(-1) ** 3 / 100.0)
    with pytest.raises(ValueError, match="Look at the weights"):
        check(r, sampling, lambda: r.logp - 1.0, float("nan"))
    check(r, sampling, lambda: 1 / 0, 0.009)  # within the limit nothing is scored


def test_wrong_weights_are_told_from_options():
    sampling = rft.Sampling(max_new=9, temperature=0.6, top_p=0.7)
    r = tree.replace(rollout(sampling, lm=tiny.llama(9)), version=torch.full((12,), 4))
    apply, params = model.bind(tiny.llama(), sampling=sampling)
    with pytest.raises(ValueError, match=r"Look at the weights \(the rollout is of version \[4\]"):
        collect.check_mismatch({"policy/logp_gap": 1.0}, 0.01, r, sampling, apply, params, packs_of(r))


def test_it_is_told_where_the_mismatch_is():
    r, _ = random_rollout(0)
    trainer = r.logp.clone()
    row, place = (int(x) for x in r.mask.nonzero()[-1])
    trainer[row, place] += 5.0
    text = collect.explain_mismatch(r, trainer, rft.Sampling(), limit=0.01)
    places = r.mask.nonzero()[:, 1]
    token = int(r.tokens[row, place])
    among = f"(of {int(places.min())} to {int(places.max())})"
    assert f"It is in 1 of {len(places)} tokens: at positions {place} to {place} {among}" in text
    assert f"in 1 of {int(r.mask.any(-1).sum())} rows (most in row {row})" in text
    assert f"of 1 token ids (100 % of it at token id {token})" in text

    # what is not a number is a mismatch too
    broken = torch.where(r.tokens == token, torch.nan, r.logp)
    count = int(((r.tokens == token) & r.mask).sum())
    text = collect.explain_mismatch(r, broken, rft.Sampling(), limit=0.01)
    assert f"It is in {count} of" in text and f"(100 % of it at token id {token})" in text


def test_the_trainer_is_asked_for_rows_alone():
    """A trainer that adds 1 nat where another row stands in front."""
    r = rollout(rft.Sampling(max_new=5))
    packs = packs_of(r)
    assert min(p.num_seqs for p in packs) > 1

    def apply(params, pack):
        logp = r.logp[torch.tensor(pack.rows)[pack.seq], pack.pos + 1]
        return rft.TokenOut(logp=logp + pack.mask * (pack.seq > 0))

    with pytest.raises(ValueError, match=r"Look at packs: .* 1 nats .* where it is 0 from"):
        collect.check_mismatch({"policy/logp_gap": 1.0}, 0.01, r, rft.Sampling(), apply, {}, packs)


def asked(score):
    """An engine that only scores."""
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    return eng._replace(score=lambda rollout, *, sampling=None: score())


def failing():
    raise RuntimeError("no memory")


def test_the_sampler_is_asked_to_score_what_it_drew():
    sampling = rft.Sampling(max_new=5)
    r = rollout(sampling)

    def apply(params, pack):
        return rft.TokenOut(logp=r.logp[torch.tensor(pack.rows)[pack.seq], pack.pos + 1] - 1.0 * pack.mask)

    def explained(score):
        with pytest.raises(ValueError, match="policy/logp_gap is 1 nats") as found:
            collect.check_mismatch(
                {"policy/logp_gap": 1.0}, 0.01, r, sampling, apply, {}, packs_of(r), engine=asked(score)
            )
        return str(found.value)

    assert "Look at the sampler: asked to score the same tokens now, it agrees with" in explained(
        lambda: r.logp - 1.0 * r.mask
    )
    assert "the sampler agrees with itself. Neither" in explained(lambda: r.logp)
    assert "neither with the trainer nor with itself" in explained(lambda: r.logp + 1.0 * r.mask)
    assert "Asked to score" not in explained(failing) and "Look at the weights" in explained(failing)


def test_a_length_behind_which_the_model_changes_is_named():
    """A trainer that has one kind of rotary factors for a row, where the sampler had two."""
    sampling = rft.Sampling(max_new=AT)
    r = engine.hf(far("Phi3 longrope"), tiny.tokenizer()).generate(
        [[3, 4, 5], [6, 7, 8, 9, 10, 11]], [1, 2], n=4, sampling=sampling
    )
    assert int(r.length.min()) <= AT < int(r.length.max()) - 1
    apply, params = model.bind(far("Phi3 longrope"), sampling=sampling)
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    packs = [packing.pack(exp, [i]) for i in range(len(r.tokens))]
    scored = packing.unpack(model.score(apply, params, packs), packs, r.logp)
    torch.testing.assert_close(scored, r.logp, rtol=0, atol=1e-4)
    apply.root.switch = None
    line = f"Look at original_max_position_embeddings = {AT} of the model's config: .* rows of more tokens"
    with pytest.raises(ValueError, match=line):
        collect.check_mismatch({"policy/logp_gap": 1.0}, 0.01, r, sampling, apply, params, packs)
