"""Contracts on shapes and arguments: one line, with the name of the argument first, then expected and got."""

import pytest
import torch
from each_case import each

from rft_fn import advantage, algorithm, check, loss, metric, optim, packing, reward_shaping, segment, weight
from rft_fn.logprob import log_probs_from_logits
from rft_fn.types import Rollout, Sampling, experience

Z = torch.zeros
B = lambda *s: torch.ones(s, dtype=torch.bool)  # noqa: E731


def shapes(**args):
    return lambda: check.shapes(**args)


@each(
    ("call", "message"),
    [
        (shapes(old_logp=(Z(7), "T"), adv=(Z(6), "T")), "adv: expected [T] = [7], got [6]"),
        (shapes(reward=(Z(4), "N G")), "reward: expected [N, G] = [N, G], got [4]"),
        (shapes(r=(Z(2, 3), "N G"), x=(Z(3, 2), "N G")), "x: expected [N, G] = [2, 3], got [3, 2]"),
        (shapes(x=(Z(2, 3), "N N")), "x: expected [N, N] = [N, N], got [2, 3]"),
        (shapes(x=(Z(2, 4), "N 3")), "x: expected [N, 3] = [N, 3], got [2, 4]"),
        (
            shapes(a=(Z(2, 3, 5), "... S"), b=(Z(4, 5), "... S")),
            "b: expected [..., S] = [2, 3, 5], got [4, 5]",
        ),
        (shapes(a=(Z(5), "... S"), b=(Z(4), "... S")), "b: expected [..., S] = [5], got [4]"),
        (shapes(a=(Z(()), "... S")), "a: expected [..., S] = [..., S], got []"),
    ],
)
def test_message(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_sizes_come_back_and_none_is_passed_over():
    sizes = check.shapes(a=(Z(2, 3, 4), "... S"), gone=(None, "N G"), b=(Z(4), "S"), c=(Z(()), ""))
    assert sizes == {"...": (2, 3), "S": 4}


ROLLOUT = Rollout(
    tokens=Z(2, 5).long(),
    mask=B(2, 5),
    logp=Z(2, 5),
    length=Z(2).long(),
    truncated=B(2),
    group=Z(2),
    version=Z(2),
)


@each(
    ("call", "message"),
    [
        (lambda: segment.sum(Z(3), B(3), Z(4).long(), 1), "seq: expected [T] = [3], got [4]"),
        (lambda: segment.max(Z(3), B(2), Z(3).long(), 1), "mask: expected [T] = [3], got [2]"),
        (lambda: advantage.grpo(Z(4)), "reward: expected [N, G] = [N, G], got [4]"),
        (lambda: advantage.gae(Z(2, 3), Z(2, 4), Z(2, 3)), "value: expected [..., S] = [2, 3], got [2, 4]"),
        (lambda: advantage.whiten(Z(3), B(4)), "mask: expected [...] = [3], got [4]"),
        (lambda: weight.token_mean(B(3)), "mask: expected [B, S] = [B, S], got [3]"),
        (lambda: weight.truncated_is(Z(2), Z(3), Z(2)), "old_logp: expected [...] = [2], got [3]"),
        (lambda: weight.constant(B(1, 2), 0), "length: expected > 0 tokens, got 0"),
        (lambda: loss.ppo_clip(Z(3), Z(3), Z(1)), "adv: expected [...] = [3], got [1]"),
        (lambda: loss.value_clip(Z(3), Z(2), Z(3)), "old_value: expected [...] = [3], got [2]"),
        (lambda: loss.kl(Z(3), Z(2, 3)), "ref_logp: expected [...] = [3], got [2, 3]"),
        (lambda: log_probs_from_logits(Z(3, 9), Z(4).long()), "logits: expected [...] = [4], got [3]"),
        (
            lambda: reward_shaping.kl_in_reward(Z(3), Z(2, 5), Z(2, 5), B(2, 5), coef=0.1),
            "logp: expected [B, S] = [3, S], got [2, 5]",
        ),
        (lambda: reward_shaping.clip(Z(3), 0.0), "limit: expected > 0, got 0.0"),
        (
            lambda: reward_shaping.overlong_penalty(Z(1), max_new=4, buffer=5),
            "buffer: expected 0 < buffer <=",
        ),
        (lambda: optim.clip_by_global_norm(0.0), "max_norm: expected > 0, got 0.0"),
        (lambda: optim.ema(1.0), "decay: expected 0 <= decay < 1, got 1.0"),
        (lambda: optim.warmup_linear(1.0, 5, 4), "warmup: expected 0 <= warmup <= total = 4 steps, got 5"),
        (lambda: optim.ema_params(()), "opt: expected a state with optim.ema in its chain, found none"),
        (lambda: packing.assign([3, 9], 8), "budget: expected at least 9 tokens, the size of row 1, got 8"),
        (lambda: packing.unpack([Z(1)], [], Z(1, 2)), "x: expected 0 tensors, one for each pack, got 1"),
        (lambda: algorithm.get_algorithm("grpoo"), "algorithm: expected one of grpo, "),
        (lambda: experience(ROLLOUT, adv=Z(3, 1), w=Z(2, 5)), "adv: expected [B, S] = [2, 5], got [3, 5]"),
        (lambda: experience(ROLLOUT, adv=Z(2, 4), w=Z(2, 5)), "adv: expected [B, S] = [2, 5], got [2, 4]"),
        (
            lambda: experience(ROLLOUT, adv=Z(2), w=Z(2, 5), ret=Z(2)),
            "ret: expected [B, S] = [2, 5], got [2]",
        ),
        (lambda: Sampling(temperature=-1.0), "temperature: expected a number in [0, inf), got -1.0"),
        (lambda: Sampling(temperature=float("nan")), "temperature: expected a number in [0, inf), got nan"),
        (lambda: Sampling(top_p=0.0), "top_p: expected a number in (0, 1], got 0.0"),
        (lambda: Sampling(top_k=-1), "top_k: expected an integer in [0, inf), got -1"),
        (lambda: Sampling(max_new=0), "max_new: expected an integer in [1, inf), got 0"),
        (
            lambda: metric.merge({"a": metric.sum(Z(1))}, {"a": metric.max(Z(1), B(1))}),
            "metric 'a': expected Sum, got Max",
        ),
    ],
)
def test_public_functions_name_the_field_what_they_expected_and_what_they_got(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)


def test_what_is_missing_is_named():
    check.given(adv=1, w=0.0)
    with pytest.raises(ValueError, match=r"^ret: expected a tensor, got None; give it to rft_fn.experience"):
        check.given(adv=1, ret=None, value=None)
