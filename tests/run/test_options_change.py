"""Every option that claims to change the objective does, in the direction that it states.

The main of each script runs on one small batch with an option and without (`one_step`): what is compared are
the slopes of its loss, and the advantages and weights in it. An option is in one of two tables.
"""

import dataclasses
import inspect
import math

import pytest
import torch
from one_step import AWAY, NOW, PARTS, REFERENCE, SAMPLED, SCRIPTS, TEACHER, c, logps, steps_of

import rft_fn as rft
from rft_fn.run import options
from rft_fn.testing import cases

MASK = c.exp.mask
SIZE = MASK.sum(-1)
CUT = (torch.arange(len(MASK)) % 3 == 0)[:, None] & MASK
REWARD = sum(PARTS.values())
MEAN = (AWAY.sum(-1) / SIZE.clamp(min=1))[:, None].expand(MASK.shape)  # log-ratio of a row's tokens
RL = ("grpo", "ppo", "distill")


# ---------- what is stated of a run with an option (b) and without (a)


def of(run, name="d_logp", step=0):
    return getattr(run.steps[step], name).double()


def less(x, y):
    return y.abs() < x.abs()


def more(x, y):
    return y.abs() > x.abs()


def gone(x, y):
    return (y == 0) & (x != 0)


def lower(x, y):
    return y < x


def higher(x, y):
    return y > x


def moves(where, how, name="d_logp"):
    """Where `where(step)` holds a number moves in this way, and nowhere else."""

    def claim(a, b):
        x, y = of(a, name), of(b, name)
        at = where(a.steps[0]) & MASK & ((x != 0) | (how in (lower, higher)))
        assert at.any(), "no token is concerned"
        assert how(x[at], y[at]).all(), (x[at], y[at])
        assert torch.allclose(x[~at], y[~at], rtol=1e-9, atol=1e-12), "other tokens moved"

    return claim


def stops(side, alone=True):
    """Some tokens stop, of this side alone; the others of it may move where a sequence has one ratio."""

    def claim(a, b):
        x, y, at = of(a), of(b), side(a.steps[0])
        stopped = gone(x, y)
        assert stopped.any() and at[stopped].all()
        assert torch.equal(x[~at], y[~at])
        assert not alone or torch.equal(x[~stopped], y[~stopped])

    return claim


def up(s):
    return s.adv > 0


def down(s):
    return s.adv < 0


def outward(s):
    return s.d * s.adv > 0


def rows(x):
    return x[:, None].expand(MASK.shape) & MASK


def beyond(ratio):
    return lambda s: math.log(ratio) < AWAY


def below(ratio):
    return lambda s: math.log(ratio) > AWAY


def pulls(gap):
    """Each token is pulled against `gap(step)`: down where it is above, up where it is below."""

    def claim(a, b):
        found, at = of(b) - of(a), gap(a.steps[0])
        assert (found * at)[MASK].gt(0).all() and not found[~MASK].any()

    return claim


def rewards(want):
    """The advantages move by what the rewards [N, G] do, and these are `want()`."""

    def claim(a, b):
        new = b.rows[0]["reward"].double()
        assert torch.allclose(new, want().double(), atol=1e-5) and not torch.allclose(new, REWARD.double())
        by = (new - REWARD.double()).flatten()[:, None] * MASK
        assert torch.allclose(of(b, "adv") - of(a, "adv"), by, atol=1e-5)
        assert ((of(b) - of(a)) * by <= 1e-12).all()  # what is better paid becomes more probable

    return claim


def standard(over):
    def want():
        each = [x.double() if over == "group" else x.double().flatten()[None] for x in PARTS.values()]
        z = [(x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6) for x in each]
        return sum(z).view(REWARD.shape)

    return want


def corrected(factor):
    """Tokens count by this function of the ratios of trainer to sampler, from the trainer's own policy."""

    def claim(a, b):
        want = -of(a, "w") * factor(AWAY.exp(), AWAY.sum(-1, keepdim=True).exp()) * of(b, "adv")
        assert torch.allclose(of(b), torch.where(MASK, want, 0), atol=1e-6)
        assert not torch.allclose(of(a), of(b), atol=1e-4)

    return claim


def weighs(total):
    """The weights of each row add up to `total()`, evenly over its tokens, and slopes follow them."""

    def claim(a, b):
        w = of(b, "w")
        assert torch.allclose(w, MASK * (total() / SIZE.clamp(min=1))[:, None].to(w), rtol=1e-5)
        assert torch.allclose(of(b) * of(a, "w"), of(a) * w, rtol=1e-5) and not torch.allclose(of(a), of(b))

    return claim


FULL = SIZE > 0


def row_shares():
    return FULL / FULL.sum()


def token_shares():
    return SIZE / SIZE.sum()


def ascends(a, b):
    """Another gradient, which makes what is better than the rest more probable."""
    assert (of(b) * of(b, "adv")).sum() < 0 and (of(b) * of(b, "adv") <= 1e-9).double().mean() > 0.9
    assert not torch.allclose(of(a), of(b), rtol=1e-3)


def truncated_stop(a, b):
    """Responses that are cut off teach nothing, but count in the advantages of their group."""
    assert of(a)[CUT].any() and not of(b)[CUT].any() and (of(b) != 0).any()
    assert torch.equal(of(a, "adv")[~CUT], of(b, "adv")[~CUT])


def without_scale(a, b):
    """Advantages are no longer divided by the deviation of their group."""
    scale = (REWARD.std(1) + 1e-6).repeat_interleave(4)[:, None]
    assert torch.allclose(of(b, "adv"), of(a, "adv") * scale, rtol=1e-5)
    assert torch.allclose(of(b), of(a) * scale, rtol=1e-4)


def bonus(a, b):
    """Entropy is learned, at each token by its weight."""
    assert torch.allclose(of(b, "d_entropy"), -0.05 * of(b, "w"), rtol=1e-5) and not of(a, "d_entropy").any()


def no_bonus(a, b):
    """Above the target the bonus does not count."""
    assert of(a, "d_entropy").any() and not of(b, "d_entropy").any()


def bonus_grows(a, b):
    """Below the target the bonus is larger in the next step."""
    for run, by in ((a, 0.0), (b, 0.005)):
        first, second = of(run, "d_entropy")[MASK], of(run, "d_entropy", 1)[MASK]
        assert torch.allclose(second * 0.05, first * (0.05 + by), rtol=1e-5)


def bonus_grows_faster(a, b):
    assert torch.equal(of(a, "d_entropy"), of(b, "d_entropy"))
    assert lower(of(a, "d_entropy", 1), of(b, "d_entropy", 1))[MASK].all()


def uncertain_alone(a, b):
    """Tokens stop but for the half with the highest entropy."""
    h, kept = of(a, "entropy"), of(b) != 0
    stopped = gone(of(a), of(b))
    assert stopped.any() and kept.any() and h[stopped].max() < h[kept].min()
    assert torch.allclose(of(a)[kept], of(b)[kept], rtol=1e-5)
    assert (h[MASK] >= h[kept].min()).sum() == math.ceil(0.5 * MASK.sum())


def away_from_reference():
    return (SAMPLED - cases.log_probs(c.apply, REFERENCE, c.exp)) * MASK


def pays_for_kl(a, b):
    """A response loses what its log-probs are above the reference's, at its first token all of it."""
    first = MASK & (MASK.cumsum(-1) == 1)
    by = (of(b, "adv") - of(a, "adv"))[first]
    assert torch.allclose(by, -0.1 * away_from_reference().sum(-1)[FULL], rtol=1e-4) and by.any()
    assert ((of(b) - of(a))[first] * by <= 1e-12).all()


def steers(a, b):
    """The coefficient of the next step grows above the target, and falls below; so do the advantages."""
    kl, (first, second) = b.rows[0]["kl/ref"], (row["kl/coef"] for row in b.rows)
    assert (second - first) * (kl - 1e-3) > 0 and a.rows[1]["kl/coef"] == first
    assert not torch.equal(of(a, "adv", 1), of(b, "adv", 1))


def steers_further(a, b):
    assert abs(b.rows[1]["kl/coef"] - 0.1) > abs(a.rows[1]["kl/coef"] - 0.1)


def follows(share):
    """In the second step the reference has gone this part of the way to the policy."""

    def claim(a, b):
        far, near = (of(x, "logp", 1) - of(x, "ref_logp", 1) for x in (a, b))
        assert far.any() and near.abs().sum() <= (1.1 - share) * far.abs().sum()
        assert share < 1 or torch.allclose(near, torch.zeros_like(near), atol=1e-9)

    return claim


def kl_to_policy(a, b):
    """PPO's KL of the second step is to the policy that the first one made."""
    want = (SAMPLED - of(b, "logp", 1))[MASK].mean()
    assert b.rows[1]["kl/ref"] == pytest.approx(float(want), abs=1e-6)
    assert a.rows[1]["kl/ref"] != pytest.approx(float(want), abs=1e-3)


def kl_nearer(a, b):
    """PPO's KL of the second step is on its way to that to the policy."""
    want = float((SAMPLED - of(b, "logp", 1))[MASK].mean())
    assert 0 < abs(b.rows[1]["kl/ref"] - want) < 0.7 * abs(a.rows[1]["kl/ref"] - want)


def balances(a, b):
    """The uneven use of experts is learned away, at each token by its weight."""
    assert torch.allclose(of(b, "d_aux"), 0.1 * of(b, "w"), rtol=1e-5) and not of(a, "d_aux").any()


# ---------- with a critic, from examples, from a teacher


def discounts(a, b):
    """The return of a token halves with each token between it and the reward."""
    to_go = (SIZE[:, None] - MASK.cumsum(-1)).double()
    assert torch.allclose(of(b, "ret"), of(a, "ret") * 0.5**to_go, rtol=1e-4) and (to_go * MASK > 0).any()


def one_step_error(a, b):
    """Before the last token an advantage is the next value less the own one: no reward is in it."""
    seen = 0
    for mask, value, adv in zip(MASK, of(a, "old_value"), of(b, "adv")):
        v = value[mask]
        assert torch.allclose(adv[mask][:-1], v[1:] - v[:-1], rtol=1e-5)
        seen += len(v[1:])
    last = MASK & (MASK.cumsum(-1) == SIZE[:, None])
    assert seen and torch.allclose(of(a, "adv")[last], of(b, "adv")[last])


def reaches_back(a, b):
    """The advantage is nearer to the whole return less the value."""
    far, near = ((of(x, "adv") - (of(x, "ret") - of(x, "old_value")))[MASK].abs().sum() for x in (a, b))
    assert near < 0.9 * far


def whitens(a, b):
    x, y = of(a, "adv")[MASK], of(b, "adv")[MASK]
    assert abs(y.mean()) < 1e-6 and y.std() == pytest.approx(1, rel=1e-4)
    assert torch.equal(x.argsort(), y.argsort())


def holds_values(a, b):
    """In the second pass values that have moved towards their returns stop."""
    x, y = a.critic[1].d_value, b.critic[1].d_value
    moved = x != y
    assert moved.any() and not y[moved].any()


def learns_good(a, b):
    """Good responses become more probable, by 0.5 over their tokens; others are left alone."""
    at = rows(REWARD.flatten() >= 1)
    want = torch.where(at, -0.5 / at.sum(), 0.0).double()
    assert torch.allclose(of(b) - of(a), want, atol=1e-6)


def more_are_good(a, b):
    """Responses from the lower border on are good too, and all share the coefficient."""
    new = rows((REWARD.flatten() < 1) & (REWARD.flatten() >= 0.3))
    old = rows(REWARD.flatten() >= 1)
    by = of(b) - of(a)
    assert (by[new] < 0).all() and (by[old] > 0).all() and new.any()
    assert not by[~(new | old)].any()


def learns_examples(a, b):
    assert a.steps[0].examples == 0 and b.steps[0].examples == pytest.approx(-0.5, rel=1e-5)
    assert torch.equal(of(a), of(b))


def rewards_too(a, b):
    """What is above its group's mean reward becomes more probable, what is below less."""
    by = of(b, "adv") - of(a, "adv")
    good = (REWARD - REWARD.mean(1, keepdim=True)).flatten()[:, None]
    assert (by * good)[MASK].gt(0).all()


def compared(name):
    """What is learned is a divergence of this name, at each token by its weight."""

    def claim(a, b):
        assert torch.allclose(of(b, "d_divergence"), of(b, "w")) and not of(b).any()
        assert torch.allclose(of(b, "divergence"), teacher_divergence(name), rtol=1e-6)

    return claim


def teacher_divergence(name, temperature=1.0, **numbers):
    b = cases.whole(c.exp)[0]
    theirs = (logps(TEACHER, b) / temperature).log_softmax(-1)
    found = rft.loss.divergence(name, **numbers)(logps(c.params, b), theirs) * b.mask
    return rft.packing.unpack([found], [b], c.exp.tokens)


def compared_flat(a, b):
    """A hot teacher knows nothing: the divergence is what the entropy is below the largest."""
    want = (math.log(cases.VOCAB) - of(b, "entropy")) * MASK
    assert torch.allclose(of(b, "divergence"), want, atol=1e-4)
    assert not torch.allclose(of(a, "divergence"), want, atol=1e-2)


def teacher_says(to_go):
    """Advantages are the teacher's log-probs less the sampler's, of a token or of all that follow."""

    def claim(a, b):
        gain = (cases.log_probs(c.apply, TEACHER, c.exp) - SAMPLED) * MASK
        total = gain.flip(-1).cumsum(-1).flip(-1) / MASK.flip(-1).cumsum(-1).flip(-1).clamp(min=1)
        want = total * MASK if to_go else gain
        assert torch.allclose(of(b, "adv"), want, rtol=1e-4, atol=1e-6)
        assert (of(b) * want <= 1e-12).all() and of(b).any()

    return claim


def follows_less(a, b):
    """At a discount near 0 an advantage is that of its own token."""
    gain = (cases.log_probs(c.apply, TEACHER, c.exp) - SAMPLED) * MASK
    assert torch.allclose(of(b, "adv"), gain, atol=1e-4) and not torch.allclose(of(a, "adv"), gain, atol=1e-2)


# ---------- pairs, rows 2i and 2i + 1; those of the first pair are empty


BETTER = (torch.arange(len(MASK)) % 2 == 0)[:, None] & MASK
WORSE = ~BETTER & MASK
GAP = ((NOW - cases.log_probs(c.apply, REFERENCE, c.exp)) * MASK).sum(-1).view(-1, 2)
MARGIN = (GAP[:, 0] - GAP[:, 1]).repeat_interleave(2)[:, None]
SHORTER = SIZE.view(-1, 2).amin(-1).repeat_interleave(2)[:, None]


def prefers(a, b):
    """The chosen responses become more probable, or the rejected ones less, by other slopes."""
    x = of(b)
    assert (x[BETTER] <= 0).all() and (x[WORSE] >= 0).all() and x.any()
    assert not torch.allclose(x, of(a), rtol=1e-4)


def loses_together(a, b):
    """The rejected response becomes less probable, and so does the pair taken together."""
    chosen, rejected = of(b).amax(-1) + of(b).amin(-1), of(b)[WORSE]
    assert (rejected > 0).all() and (chosen.view(-1, 2).sum(-1)[1:] > 0).all()


def towards_wrong(x, y):
    """A part of the labels is wrong, so the chosen side gains less, and may lose."""
    return torch.where(x < 0, y > x, y < x)


def holds(a, b):
    """By its coefficient, a pair that is right teaches less the further it is from the reference."""
    x, y = of(a) / 0.1, of(b) / 0.4
    right = (MARGIN > 0).expand(MASK.shape)
    assert less(x, y)[MASK & right].all() and more(x, y)[MASK & ~right].all()


# ---------- the two tables


L = options.Limits
WIDE = {"low": 0.5, "high": 0.5}


def limits(**given):
    return {"loss": L(**given)}


def soft(sign, side):
    """Weights of whole responses move with the sign of their log-ratio, or against it, on one side."""

    def claim(a, b):
        at, total = side(a.steps[0]), a.steps[0].d.sum(-1, keepdim=True).expand(MASK.shape)
        live = at & (of(a) != 0)
        assert live.any() and torch.equal(of(a)[~at], of(b)[~at])
        grew = of(b).abs() - of(a).abs()
        assert (grew * total * sign)[live].gt(0).all()

    return claim


def holds_to_reference(a, b):
    """By its coefficient, a response is pulled to the reference by its log-ratio."""
    total = (of(a, "logp") - of(a, "ref_logp")).sum(-1, keepdim=True)
    by = (of(b) / 0.5 - of(a) / 0.1) * total
    assert by[MASK].gt(0).all()


def not_down(s):
    return s.adv >= 0


# (loss, limit): the row of the table, the limits before, those after, what is stated
LIMITS = {
    ("ppo_clip", "low"): ("grpo", {}, {"low": 0.01}, stops(down)),
    ("ppo_clip", "high"): ("grpo", {}, {"high": 0.01}, stops(up)),
    ("ppo_clip", "dual"): ("grpo", {}, {"dual": 1.05}, stops(down)),
    ("gspo", "low"): ("gspo", WIDE, {"low": 0.01}, stops(down)),
    ("gspo", "high"): ("gspo", WIDE, {"high": 0.01}, stops(up)),
    ("gspo_token", "low"): ("gspo_token", WIDE, {"low": 0.01}, stops(down)),
    ("gspo_token", "high"): ("gspo_token", WIDE, {"high": 0.01}, stops(up)),
    ("gmpo", "low"): ("gmpo", {}, {"low": 0.01}, stops(down, alone=False)),
    ("gmpo", "high"): ("gmpo", {}, {"high": 0.01}, stops(up, alone=False)),
    ("cispo", "low"): ("cispo", {}, {"low": 0.1}, moves(below(0.9), more)),
    ("cispo", "high"): ("cispo", {}, {"high": 0.1}, moves(beyond(1.1), less)),
    ("sapo", "tau_pos"): ("sapo", {}, {"tau_pos": 3.0}, moves(up, less)),
    ("sapo", "tau_neg"): ("sapo", {}, {"tau_neg": 3.0}, moves(down, less)),
    ("cpgd", "low"): ("cpgd", {"drift": 0.0}, {"low": 0.01}, stops(down)),
    ("cpgd", "high"): ("cpgd", {"drift": 0.0}, {"high": 0.01}, stops(up)),
    ("cpgd", "drift"): ("cpgd", {}, {"drift": 0.5}, pulls(lambda s: s.d)),
    ("cpgd", "cap"): ("cpgd", {}, {"cap": 0.1}, moves(beyond(1.1), lower)),
    ("dppo_tv", "limit"): ("dppo_tv", {}, {"limit": 0.01}, stops(outward)),
    ("dppo_tv", "cap"): ("dppo_tv", {"limit": 9.0}, {"cap": 1.1}, moves(beyond(1.1), less)),
    ("dppo_kl", "limit"): ("dppo_kl", {}, {"limit": 1e-4}, stops(outward)),
    ("dppo_kl", "cap"): ("dppo_kl", {"limit": 9.0}, {"cap": 1.1}, moves(beyond(1.1), less)),
    ("vespo", "k_pos"): ("vespo", {}, {"k_pos": 3.0}, soft(1, not_down)),
    ("vespo", "k_neg"): ("vespo", {}, {"k_neg": 4.0}, soft(1, down)),
    ("vespo", "lambda_pos"): ("vespo", {}, {"lambda_pos": 4.0}, soft(-1, not_down)),
    ("vespo", "lambda_neg"): ("vespo", {}, {"lambda_neg": 3.0}, soft(-1, down)),
    ("dro", "beta"): ("dro", {}, {"beta": 0.5}, pulls(lambda s: s.d)),
    ("a_star", "beta"): ("a_star_po", {"beta": 0.1}, {"beta": 0.5}, holds_to_reference),
    ("online_dpo", "beta"): ("online_dpo", {}, {"beta": 0.2}, moves(lambda s: s.adv != 0, more)),
}  # fmt: skip

RAW = {"algorithm": "reinforce"}
TIS = {"mismatch": "tis"}
BONUS = {"entropy": 0.05}
KL = {"kl": 0.1}
TARGET = BONUS | {"steps": 2, "entropy_target": 9.0}
STEER = KL | {"steps": 2, "kl_horizon": 100.0}
GOOD = {"positive_nll": 0.5}
ONLY = {"rl": 0.0}
SMOOTH = {"label_smoothing": 0.2}
SINGLE = {"unpaired": True, "loss": "kto"}
BOTH, NOT_PPO = ("grpo", "ppo"), ("grpo", "distill")

# option: scripts, options before and after, what is stated; several where a value is a choice
CHANGES = {
    "kl": [
        ("grpo", {}, KL, lambda a, b: pulls(lambda s: b.steps[0].logp - b.steps[0].ref_logp)(a, b)),
        ("ppo", {}, KL, pays_for_kl),
    ],
    "kl_in_reward": [
        ("grpo", RAW, {"kl_in_reward": 0.1},
         rewards(lambda: REWARD - 0.1 * away_from_reference().sum(-1).view(REWARD.shape))),
    ],
    "kl_target": [("ppo", STEER, {"kl_target": 1e-3}, steers)],
    "kl_horizon": [("ppo", STEER | {"kl_target": 1e-3}, {"kl_horizon": 20.0}, steers_further)],
    "ref_every": [
        ("grpo", KL | {"steps": 2}, {"ref_every": 1}, follows(1.0)),
        ("ppo", KL | {"steps": 2}, {"ref_every": 1}, kl_to_policy),
        ("dpo", {"steps": 2}, {"ref_every": 1}, follows(1.0)),
    ],
    "ref_mix": [
        ("dpo", {"steps": 2}, {"ref_every": 1, "ref_mix": 0.5}, follows(0.5)),
        ("ppo", KL | {"steps": 2}, {"ref_every": 1, "ref_mix": 0.5}, kl_nearer),
        ("grpo", KL | {"steps": 2}, {"ref_every": 1, "ref_mix": 0.5}, follows(0.5)),
    ],
    "entropy": [(BOTH, {}, BONUS, bonus)],
    "entropy_target": [
        (BOTH, BONUS, {"entropy_target": 0.01}, no_bonus),
        (BOTH, BONUS | {"steps": 2}, {"entropy_target": 9.0}, bonus_grows),
    ],
    "entropy_delta": [(BOTH, TARGET, {"entropy_delta": 0.05}, bonus_grows_faster)],
    "entropy_share": [(BOTH, {"weight": "token_mean", "loss": L(low=9.0, high=9.0)},
                       {"entropy_share": 0.5}, uncertain_alone)],
    "mismatch": [
        (RL, {}, {"mismatch": "tis"}, corrected(lambda r, whole: r.clamp(max=2))),
        (RL, {}, {"mismatch": "mis"}, corrected(lambda r, whole: r * (r <= 2))),
        (RL, {}, {"mismatch": "icepop"}, corrected(lambda r, whole: r * (r <= 2) * (r >= 0.5))),
        (RL, {}, {"mismatch": "tis_seq"}, corrected(lambda r, whole: whole.clamp(max=2))),
        (RL, {}, {"mismatch": "mis_seq"}, corrected(lambda r, whole: whole * (whole <= 2))),
    ],
    "cap": [(RL, TIS, {"cap": 1.2}, moves(beyond(1.2), less))],
    "floor": [
        (RL, TIS, {"floor": 0.9}, moves(below(0.9), more)),
        (RL, {"mismatch": "icepop"}, {"floor": 0.9}, moves(below(0.9), gone)),
    ],
    "geo_low": [(RL, TIS, {"geo_low": 0.9}, moves(lambda s: math.log(0.9) > MEAN, gone))],
    "geo_high": [(RL, TIS, {"geo_high": 1.1}, moves(lambda s: math.log(1.1) < MEAN, gone))],
    "mask_truncated": [(NOT_PPO, {"weight": "seq_sum"}, {"mask_truncated": True}, truncated_stop)],
    "reward_clip": [(RL, RAW, {"reward_clip": 1.0}, rewards(lambda: REWARD.clamp(-1, 1)))],
    "normalize_reward": [
        (RL, RAW, {"normalize_reward": True}, rewards(lambda: (REWARD - REWARD.mean()) / REWARD.std())),
    ],
    "reward_norm": [(RL, RAW, {"reward_norm": over}, rewards(standard(over))) for over in ("group", "batch")],
    "reward_veto": [
        (RL, RAW, {"reward_veto": ("form<0.05=-3",)},
         rewards(lambda: torch.where(PARTS["form"] < 0.05, -3.0, REWARD))),
    ],
    "overlong": [
        (RL, RAW, {"overlong": 11}, rewards(lambda: REWARD - ((SIZE.view(2, 4) - 1) / 11).clamp(0, 1))),
    ],
    "weight": [
        (RL, {"weight": "seq_mean"}, {"weight": "token_mean"}, weighs(token_shares)),
        (RL, {"weight": "token_mean"}, {"weight": "seq_mean"}, weighs(row_shares)),
        (RL, {"weight": "seq_mean"}, {"weight": "seq_sum"}, weighs(lambda: SIZE / FULL.sum())),
        (RL, {"weight": "seq_mean"}, {"weight": "constant:10"}, weighs(lambda: SIZE / 10 / FULL.sum())),
    ],
    "algorithm": [
        ("grpo", {}, {"algorithm": name}, ascends)
        for name, row in rft.algorithm.TABLE.items()
        if isinstance(row, rft.algorithm.Algorithm) and name != "grpo"
    ] + [("ppo", {"gae_lambda": None}, {"algorithm": "vapo"}, ascends),
         ("distill", {}, {"algorithm": "reinforce"}, ascends)],
    "advantage": [("grpo", {}, {"advantage": "dr_grpo"}, without_scale)],
    "clip_low": [("distill", {}, {"clip_low": 0.01}, stops(down))],
    "clip_high": [("distill", {}, {"clip_high": 0.01}, stops(up))],
    "dual": [("distill", {}, {"dual": 1.05}, stops(down))],
    "router_aux": [((*RL, "dpo"), {}, {"router_aux": 0.1}, balances)],
    "gamma": [
        ("ppo", {}, {"gamma": 0.5}, discounts),
        ("distill", ONLY | {"loss": "to_go"}, {"gamma": 1e-6}, follows_less),
    ],
    "gae_lambda": [("ppo", {}, {"gae_lambda": 0.0}, one_step_error)],
    "gae_alpha": [("ppo", {"algorithm": "vapo", "gae_lambda": None}, {"gae_alpha": 2.0}, reaches_back)],
    "whiten": [("ppo", {}, {"whiten": True}, whitens)],
    "value_clip": [("ppo", {"epochs": 2, "value_clip": 9.0}, {"value_clip": 1e-6}, holds_values)],
    "positive_nll": [("ppo", {}, GOOD, learns_good)],
    "positive_at": [("ppo", GOOD, {"positive_at": 0.3}, more_are_good)],
    "ptx": [("ppo", {"ptx_data": "rows"}, {"ptx": 0.5}, learns_examples)],
    "rl": [("distill", ONLY, {"rl": 1.0}, rewards_too)],
    "loss": [
        *[("distill", ONLY, {"loss": name}, compared(name)) for name in rft.loss.DIVERGENCES],
        ("distill", ONLY | {"loss": "reverse_kl"}, {"loss": "sampled"}, teacher_says(to_go=False)),
        ("distill", ONLY | {"loss": "reverse_kl"}, {"loss": "to_go"}, teacher_says(to_go=True)),
        *[("dpo", {}, {"loss": name} | (SMOOTH if name in ("cdpo", "robust") else {}), prefers)
          for name, row in rft.loss.PREFERENCES.items()
          if name not in ("dpo", "apo_down") and not row.single],
        ("dpo", {}, {"loss": "apo_down"}, loses_together),
        ("dpo", SINGLE, {"loss": "bco"}, prefers),
        ("dpo", {"unpaired": True, "loss": "bco"}, {"loss": "kto"}, prefers),
    ],
    "jsd_beta": [
        ("distill", ONLY | {"loss": "jsd"}, {"jsd_beta": 1.0}, compared("reverse_kl")),
        ("distill", ONLY | {"loss": "jsd"}, {"jsd_beta": 0.0}, compared("forward_kl")),
        ("distill", ONLY | {"loss": "jsd"}, {"jsd_beta": 0.05}, moves(lambda s: MASK, less, "divergence")),
    ],
    "skew": [
        ("distill", ONLY | {"loss": name}, {"skew": 0.5}, moves(lambda s: MASK, less, "divergence"))
        for name in ("skew_reverse_kl", "skew_forward_kl")
    ],
    "teacher_temperature": [
        ("distill", ONLY | {"loss": "reverse_kl"}, {"teacher_temperature": 1e6}, compared_flat),
    ],
    "beta": [("dpo", {}, {"beta": 0.4}, holds)],
    "label_smoothing": [
        ("dpo", {}, SMOOTH | {"loss": "cdpo"}, moves(lambda s: MASK, towards_wrong)),
        ("dpo", {}, SMOOTH | {"loss": "robust"}, moves(lambda s: MASK, more)),
        ("dpo", {"loss": "exo"}, SMOOTH, moves(lambda s: MASK, less)),
        ("dpo", {"loss": "cpo", "nll": 0.0}, SMOOTH, moves(lambda s: MASK, towards_wrong)),
        ("dpo", {"loss": "simpo"}, SMOOTH, moves(lambda s: MASK, towards_wrong)),
    ],
    "average": [("dpo", {"beta": 1e-6}, {"average": True}, moves(lambda s: rows(SIZE > 1), less))],
    "nll": [("dpo", {}, {"nll": 1.0}, moves(lambda s: BETTER, lower))],
    "ld_alpha": [("dpo", {"beta": 1e-6}, {"ld_alpha": 0.3},
                  moves(lambda s: MASK.cumsum(-1) > SHORTER, less))],
    "margin": [("dpo", {"loss": "simpo"}, {"margin": 2.0}, moves(lambda s: MASK, more))],
    "desirable_weight": [("dpo", SINGLE, {"desirable_weight": 2.0}, moves(lambda s: BETTER, more))],
    "undesirable_weight": [("dpo", SINGLE, {"undesirable_weight": 2.0}, moves(lambda s: WORSE, more))],
}  # fmt: skip

# the others, by what they are of
OTHER = {
    "data": "data template messages chat_template_kwargs max_pixels media_folder media_urls media_cache "
    "media_workers system max_prompt max_length chosen rejected unpaired completion label response ptx_data "
    "ptx_response ptx_messages ptx_batch hint success_at on_policy off_policy",
    "model": "model lora_rank lora_alpha lora_targets lora_merge freeze quantize critic teacher "
    "teacher_column",
    "judge": "reward reward_timeout",
    "sampling": "temperature top_p max_new prompts group ahead in_flight partial rounds curriculum "
    "curriculum_by curriculum_floor teacher_top_p",
    "age": "max_lag",  # of tokens: tests/collect/test_mismatch.py
    "vocabulary": "top_k",  # words that are compared: tests/scripts/test_distill_script.py
    "alarm": "max_gap gap_factor canary rebuilds",
    "memory": "budget gradient_checkpointing",
    "rows": "keep_flat",  # which are computed: tests/scripts/test_flat_rows_of_runs.py
    "schedule": "steps data_epochs epochs minibatches batch freeze_actor_steps lr schedule lr_end warmup "
    "critic_lr from_updates",
    "optimizer": "ema beta1 beta2 weight_decay max_norm from_checkpoint",  # tests/run/test_warm_start.py
    "evaluation": "eval_data eval_share eval_every eval_prompts eval_tasks eval_pairs",
    "report": "update_kl rollouts_every noise_every trackers project run_name tokens_every dry_run",
    "folder": "out override save_every keep max_bytes mirror best save_critic",
    "seed": "seed",
    "devices": "strategy",
}  # fmt: skip


def fields(script):
    """Names of the options of a script; those of its record `loss` are LIMITS."""
    config = SCRIPTS[script].Config
    return {f.name for f in dataclasses.fields(config)} - ({"loss"} if script in ("grpo", "ppo") else set())


def test_every_option_is_in_one_of_the_two_tables():
    other = [name for names in OTHER.values() for name in names.split()]
    assert len(other) == len({*other}) and not CHANGES.keys() & {*other}
    known = {script: {*other} for script in SCRIPTS}
    for option, entries in CHANGES.items():
        for scripts, *_ in entries:
            for script in (scripts,) if isinstance(scripts, str) else scripts:
                known[script].add(option)
    missing = {script: fields(script) - known[script] for script in SCRIPTS}
    assert not any(missing.values()), f"options without a line in CHANGES or OTHER: {missing}"
    assert {*other} | CHANGES.keys() == set().union(*map(fields, SCRIPTS)), "a line without an option"


def test_every_limit_of_every_loss_has_a_line():
    want = {
        (fn.__name__, p.name)
        for fn in (*options.LOSSES, rft.loss.online_dpo)
        for p in inspect.signature(fn).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    assert LIMITS.keys() == want
    assert {limit for _, limit in LIMITS} == {f.name for f in dataclasses.fields(L)}


def compare(script, before, after, claim):
    given = {name: x for name, x in before.items() if name in fields(script) | {"loss"}}
    claim(steps_of(script, **given), steps_of(script, **given | after))


CASES = [
    (option, script, before, after, claim)
    for option, entries in CHANGES.items()
    for scripts, before, after, claim in entries
    for script in ((scripts,) if isinstance(scripts, str) else scripts)
]


@pytest.mark.parametrize(
    "option, script, before, after, claim", CASES, ids=[f"{x[1]} {x[2]} -> {x[3]}" for x in CASES]
)
def test_an_option_changes_the_gradient_as_it_states(option, script, before, after, claim):
    compare(script, before if script != "ppo" else without_rows(before), after, claim)


def without_rows(before):
    """What a run with a critic has of options: it has no row `reinforce`, whose rewards are raw."""
    return {name: x for name, x in before.items() if x != "reinforce"}


@pytest.mark.parametrize("loss, limit", LIMITS, ids=[str(x) for x in LIMITS])
def test_a_limit_changes_the_gradient_as_it_states(loss, limit):
    row, before, after, claim = LIMITS[loss, limit]
    base = {"algorithm": row, "weight": "token_mean"}
    claim(steps_of("grpo", **base, **limits(**before)), steps_of("grpo", **base, **limits(**before | after)))
