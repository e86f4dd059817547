"""Checks of estimators, by enumeration of a tiny vocabulary or by changes that must not matter."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rft_fn.reward_shaping import last_token
from rft_fn.testing.cases import LENGTH, ROWS, gap, normal, ragged, uniform

__all__ = [
    "check_deletion_invariance", "check_estimator_gradient", "check_exact_values", "check_group_estimator",
    "check_kl_gradient",
]  # fmt: skip


Estimator = Callable[[Tensor], Tensor]  # rewards [N, G] -> advantages [N, G]
Divergence = Callable[[Tensor, Tensor], Tensor]  # log-probs of policy and reference [*] -> KL [*]
# (reward, value, discount, *, mask) -> adv or (adv, ret), all [B, S]
TimeEstimator = Callable[..., Tensor | tuple[Tensor, Tensor]]


def check_kl_gradient(kl_fn: Divergence, *, vocab: int = 5, seed: int = 0, atol: float = 1e-12) -> None:
    """Check that the expected gradient of a KL estimator is that of KL(pi, ref).

    The gradient is E_pi[grad kl_fn(logp, ref_logp)], by enumeration of a small vocabulary: the effect of
    `kl_fn` as a loss term on samples of the policy. k1 gives 0, k3 the gradient of KL(ref, pi).
    """
    z = normal(seed, "policy", vocab).requires_grad_()
    logp = z.log_softmax(-1)
    ref = normal(seed, "reference", vocab).log_softmax(-1)
    p = logp.exp()
    (want,) = torch.autograd.grad((p * (logp - ref)).sum(), z, retain_graph=True)
    (got,) = torch.autograd.grad((p.detach() * kl_fn(logp, ref)).sum(), z, materialize_grads=True)
    if not (got - want).abs().max() <= atol:
        raise AssertionError(f"the expected gradient is not that of KL(pi, ref): {gap(got, want)}")


# ---------- estimators over time


def _assert_deleted(name: str, row: int, whole: Tensor, m: Tensor, short: Tensor, atol: float) -> None:
    if not (whole[~m] == 0).all():
        raise AssertionError(f"{name} of row {row}: expected 0 outside mask, got {whole[~m].tolist()}")
    error = (whole[m] - short).abs()
    if not (error <= atol).all():
        raise AssertionError(
            f"{name} of row {row} changed by {error.max():.2g} when its {int((~m).sum())} masked tokens were "
            f"deleted: {whole[m].tolist()} with them, {short.tolist()} without"
        )


def check_deletion_invariance(gae_fn: TimeEstimator, *, seed: int = 0, atol: float = 1e-12) -> None:
    """Check that an estimator skips tokens outside mask.

    Tool output and padding are such tokens. `gae_fn(reward, value, discount, mask=mask) -> (adv, ret)`, all
    [B, S]: deleting such tokens first gives the same numbers on the others, and they get 0. A function of
    fewer arguments or results fits in by a lambda, e.g. `lambda reward, value, discount, *, mask:
    reinforce_pp(reward, mask)`: one tensor [B, S] is read as adv. `discount` is 0 on the last token in mask
    of each row and 0.9 elsewhere; there are rewards outside mask too. An estimator that reads values must
    read those of the next token: see `check_exact_values`.
    """
    mask, _ = ragged(seed)
    reward = normal(seed, "reward", ROWS, LENGTH)
    value = normal(seed, "state value", ROWS, LENGTH)
    discount = torch.where(last_token(mask), 0.0, 0.9).double()

    def estimate(reward: Tensor, value: Tensor, discount: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        result = gae_fn(reward, value, discount, mask=mask)
        return (result,) if isinstance(result, Tensor) else result

    results = estimate(reward, value, discount, mask)
    for row, m in enumerate(mask):
        # only this row, as if its tokens outside mask had never been there
        short = estimate(*(x[row, m][None] for x in (reward, value, discount, mask)))
        for name, whole, part in zip(("adv", "ret"), results, short):
            _assert_deleted(name, row, whole[row], m, part[0], atol)
    check_exact_values(gae_fn, seed=seed, atol=atol)


def check_exact_values(gae_fn: TimeEstimator, *, seed: int = 0, atol: float = 1e-12) -> None:
    """Check that advantages are 0 and returns the values where the values are right.

    They are the discounted rewards that follow, V_t = r_t + discount_t V_next, so nothing is better than
    expected, for any lambda; an estimator without a lag, which takes the value of the token itself for that
    of the next one, has other advantages. One that reads no values has none to be right, and passes.
    """
    mask, _ = ragged(seed)
    reward = normal(seed, "reward", ROWS, LENGTH) * mask
    discount = torch.where(last_token(mask), 0.0, 0.9).double()
    value = torch.zeros_like(reward)
    for row, m in enumerate(mask):
        after = 0.0
        for t in m.nonzero().flatten().flip(0).tolist():
            after = value[row, t] = reward[row, t] + discount[row, t] * after

    def estimate(value: Tensor) -> tuple[Tensor, ...]:
        result = gae_fn(reward, value, discount, mask=mask)
        return (result,) if isinstance(result, Tensor) else result

    found = estimate(value)
    if all(torch.equal(x, y) for x, y in zip(found, estimate(value + mask.double()))):
        return
    for name, x, want in zip(("adv", "ret"), found, (torch.zeros_like(value), value)):
        error = ((x - want) * mask).abs()
        if not error.max() <= atol:
            row, t = divmod(int(error.argmax()), LENGTH)
            raise AssertionError(
                f"{name} of row {row}, token {t}: expected {want[row, t]:.4g} where every value is the "
                f"discounted sum of the rewards that follow, got {x[row, t]:.4g}: the value of another token "
                "than the next"
            )


# ---------- estimators over a group


def _advantages(estimator: Estimator, reward: Tensor) -> Tensor:
    adv = estimator(reward)
    if adv.shape != reward.shape:
        raise AssertionError(
            f"estimator: expected one advantage per reward, [N, G] = {list(reward.shape)}, got "
            f"{list(adv.shape)}"
        )
    return adv


def _rewards(seed: int, group: int) -> Tensor:
    """Draw rewards [6, G]: three groups of normal numbers, three of 0 and 1 with both in each."""
    binary = uniform(seed, f"binary rewards {group}", 0, 2, 3, group).double()
    binary[:, 0] = 1
    binary[:, -1] = 0
    return torch.cat([normal(seed, f"rewards {group}", 3, group), binary])


def _orders(group: int) -> list[Tensor]:
    """Return permutations that generate all others: the first two exchanged, and all shifted by one."""
    order = torch.arange(group)
    return [torch.cat([order[:2].flip(0), order[2:]]), order.roll(1)]


def _short(x: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in x.tolist()) + "]"


def _assert_rows(varied: Sequence[str], reward: Tensor, want: Tensor, got: Tensor, rtol: float) -> None:
    for name, r, x, y in zip(varied, reward, want, got):
        error = (x - y).abs().max()
        if not error <= rtol * max(1.0, float(x.abs().max())):
            raise AssertionError(
                f"{name}: with rewards {_short(r)} the advantages changed by {error:.2g}, from {_short(x)} "
                f"to {_short(y)}"
            )


def _assert_flat(estimator: Estimator, group: int) -> None:
    """Check that equal rewards give 0, to the rounding of their mean: that of three times 0.1 is not 0.1."""
    for dtype in (torch.float64, torch.float32):
        for value in (0.0, 1.0, 0.1, 1 / 3, -2.3):
            adv = _advantages(estimator, torch.full((2, group), value, dtype=dtype))
            if not (adv.abs() <= 4 * torch.finfo(dtype).eps * abs(value)).all():  # rounding of a mean
                raise AssertionError(
                    f"{group} equal rewards of {value:.4g} in {dtype}: expected advantages of exactly 0, "
                    f"got {_short(adv[0])}"
                )


def check_group_estimator(
    estimator: Estimator,
    *,
    groups: Sequence[int] = (2, 3, 8),
    shift: bool = True,
    flat: bool = True,
    seed: int = 0,
    rtol: float = 1e-9,
) -> None:
    """Check the invariances of a group estimator, and its sign.

    `estimator(reward [N, G]) -> [N, G]`. Groups do not see each other; permuting the responses of a group
    permutes its advantages; a constant added to all its rewards changes nothing; equal rewards give 0; better
    responses have larger advantages. The groups have each size in `groups`. `shift=False` leaves out the
    constant (for estimators of passed and failed, or without a baseline), `flat=False` the equal rewards.
    Bias is not checked: see `check_estimator_gradient`. Data of a response other than its reward (a length)
    is not permuted with it.
    """
    shifts = (10.0, -3.0) if shift else ()
    for group in groups:
        reward = _rewards(seed, group)
        want = _advantages(estimator, reward)
        rows = range(len(reward))

        # groups do not see each other
        single = torch.cat([_advantages(estimator, r[None]) for r in reward])
        names = [f"group {i} alone instead of among {len(reward)} groups" for i in rows]
        _assert_rows(names, reward, want, single, rtol)

        # advantages move with their responses
        for order in _orders(group):
            moved = torch.empty_like(want)
            moved[:, order] = _advantages(estimator, reward[:, order])
            names = [f"responses of group {i} in the order {order.tolist()}" for i in rows]
            _assert_rows(names, reward, want, moved, rtol)

        # better responses have larger advantages
        push = (want * (reward - reward.mean(-1, keepdim=True))).sum(-1)
        if (push < -rtol).any():
            i = int(push.argmin())
            raise AssertionError(
                f"with rewards {_short(reward[i])} the advantages are {_short(want[i])}: better responses "
                "have smaller ones, the sign is wrong"
            )

        # only differences between rewards count
        for constant in shifts:
            names = [f"{constant:+g} on all rewards of group {i}" for i in rows]
            _assert_rows(names, reward, want, _advantages(estimator, reward + constant), rtol)
        if flat:
            _assert_flat(estimator, group)


def check_estimator_gradient(
    estimator: Estimator,
    *,
    group: int = 3,
    vocab: int = 3,
    prompts: int = 2,
    factor: float = 1.0,
    seed: int = 0,
    atol: float = 1e-12,
) -> None:
    """Check that the expected policy gradient of an estimator is `factor` times that of E[R].

    `estimator(reward [1, G]) -> A [1, G]` gives E[mean over a group of A grad log pi], by enumeration of the
    vocab^G groups of one-token responses to each of `prompts` prompts, which differ in policy and
    rewards. A baseline that includes the sample's reward shrinks the gradient: the mean of the group (Dr.
    GRPO) by the factor (G - 1) / G, and a division by the group's deviation bends it. The message has the
    cosine, and the norm relative to that of the gradient times `factor`.
    """
    place = vocab ** torch.arange(group)
    action = torch.arange(vocab**group)[:, None] // place % vocab  # [vocab^G, G]
    got = []
    want = []
    for i in range(prompts):
        z = normal(seed, f"policy of prompt {i}", vocab).requires_grad_()
        logp = z.log_softmax(-1)
        reward = normal(seed, f"reward of prompt {i}", vocab)

        # each group counts with its probability
        adv = torch.cat([_advantages(estimator, r[None]) for r in reward[action]])
        chance = logp[action].sum(-1, keepdim=True).exp()
        surrogate = (chance * adv).detach() * logp[action] / group
        want += torch.autograd.grad((logp.exp() * reward).sum() * factor, z, retain_graph=True)
        got += torch.autograd.grad(surrogate.sum(), z)

    if not (torch.cat(got) - torch.cat(want)).abs().max() <= atol:
        raise AssertionError(
            f"the expected gradient over all {vocab**group} groups of {group} is not {factor:g} times that "
            f"of E[R]: {gap(torch.cat(got), torch.cat(want))}"
        )
