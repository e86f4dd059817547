"""Every row of the table against its paper (ref_rows.py), from rewards to the gradient of the logits."""

import inspect
import math
import zlib

import pytest
import ref_rows
import torch
from each_case import each

from rft_fn import algorithm, loss, packing
from rft_fn.types import Rollout, TokenOut, experience

pytestmark = pytest.mark.usefixtures("float64")
N, G, S, V = 4, 4, 44, 5  # responses of up to 40 tokens: under 20 VAPO's lambda is 0
B = N * G
SILENT, EMPTY = 2, 13  # rows without a token in mask: all of it a tool's, and a response of no tokens
SCALES = (0.05, 0.3, 1.5)
each_name = each("name", algorithm.TABLE)
at_each_scale = each("scale", SCALES)


def drawn(seed, name):
    """A generator of torch's alone: a change of the library's keys does not change the batch."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def normal(seed, name, *shape):
    return torch.randn(shape, generator=drawn(seed, name), dtype=torch.float64)


def masks(seed):
    """(mask [B, S], prompt [B], length [B]): prompts of 1 to 4 tokens, holes where a tool spoke."""
    generator = drawn(seed, "lengths")
    prompt = torch.randint(1, 5, (B,), generator=generator)
    length = prompt + torch.randint(1, 41, (B,), generator=generator)
    length[5] = prompt[5] + 40
    length[6] = prompt[6] + 1
    length[EMPTY] = prompt[EMPTY]
    at = torch.arange(S)
    response = (at >= prompt[:, None]) & (at < length[:, None])
    tool = normal(seed, "tool", B, S) > 1.0
    tool[5, 10:14] = True  # a turn of a tool in the middle
    tool[6] = False
    mask = response & ~tool
    mask[SILENT] = False
    return mask, length


def rewards(seed):
    """[N, G]: any numbers; a group where all are 0.1; right and wrong; numbers of another size."""
    reward = normal(seed, "reward", N, G)
    reward[1] = 0.1
    reward[2] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    reward[3] *= 10
    return reward


def data(scale, seed=1):
    """One batch as plain tensors, and the leaves (logits [B, S, V], value [B, S]) of the policy."""
    mask, length = masks(seed)
    logits = normal(seed, "logits", B, S, V)
    tokens = torch.randint(0, V, (B, S), generator=drawn(seed, "tokens"))
    logp = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # the old policy is another distribution: its log-probs are below 0 too
    old_logp = (logp + scale * normal(seed, "old_logp", B, S)).clamp(max=-1e-3)
    old_value = normal(seed, "old_value", B, S)
    found = {"tokens": tokens, "mask": mask, "length": length, "reward": rewards(seed)}
    found["old_logp"] = torch.where(mask, old_logp, 0)
    ref_logp = (logp + scale * normal(seed, "ref_logp", B, S)).clamp(max=-1e-3)
    found["ref_logp"] = torch.where(mask, ref_logp, 0)
    found["greedy"] = normal(seed, "greedy", N)
    found["old_value"] = torch.where(mask, old_value, 7.0)  # nobody may read a value where a tool spoke
    found["token_reward"] = torch.where(mask, 0.3 * normal(seed, "token_reward", B, S), 0)
    return found, logits.requires_grad_(), (old_value + scale * normal(seed, "value", B, S)).requires_grad_()


def rollout_of(x):
    zero = torch.zeros(B, dtype=torch.long)
    return Rollout(
        tokens=x["tokens"], mask=x["mask"], logp=x["old_logp"], length=x["length"], truncated=zero.bool(),
        group=torch.arange(B) // G, version=zero,
    )  # fmt: skip


def table_policy(logits, value):
    """A model whose logits and values of every position are free numbers."""

    def apply(b):
        row = torch.tensor(b.rows or (0,))[b.seq]
        logp = logits[row, b.pos + 1].log_softmax(-1).gather(-1, b.target.unsqueeze(-1)).squeeze(-1)
        return TokenOut(logp=logp * b.mask, value=value[row, b.pos + 1] * b.mask)

    return apply


def batch_of(name, x):
    """The Experience that a train step makes of the row."""
    row, rollout = algorithm.TABLE[name], rollout_of(x)
    w = row.weight(rollout.mask)
    if isinstance(row, algorithm.ActorCritic):
        adv, ret = row.advantage(x["token_reward"], x["old_value"], rollout.mask)
        return experience(rollout, adv=adv, w=w, ret=ret, old_value=x["old_value"])
    more = {"greedy_reward": x["greedy"]} if row.greedy else {}
    adv = row.advantage(x["reward"], rollout, **more)
    return experience(rollout, adv=adv, w=w, ref_logp=x["ref_logp"] if row.reference else None)


def total(loss_fn, apply, packs):
    return sum((b.w * loss_fn(apply(b), b)[0]).sum() for b in packs)


def assert_equal(got, want):
    """To 1e-10 of the largest number."""
    error = (got - want).abs().max() / want.abs().max()
    assert want.abs().max() > 1e-6 and error <= 1e-10, f"relative error {error:.2g}"


def compare(name, x, logits, value):
    """The row's loss and gradient on several packs, to the paper's on the whole batch."""
    unit = G if getattr(algorithm.TABLE[name], "together", False) else 1
    packs = [b for rank in packing.shard(batch_of(name, x), 100 * unit, 2, unit=unit) for b in rank]
    assert len(packs) >= 4 / unit
    got = total(algorithm.TABLE[name].loss, table_policy(logits, value), packs)
    want = ref_rows.LOSS[name](ref_rows.responses(x, logits, value))
    assert_equal(got, want)
    assert_equal(ref_rows.gradient(got, logits), ref_rows.gradient(want, logits))


def prefers(x):
    """[B, S] bool: whether the response is better than its group's mean."""
    better = x["reward"] > x["reward"].mean(-1, keepdim=True)
    return better.view(B, 1).expand(B, S)


def test_the_batch_reaches_every_branch():
    """Both signs, inside and beyond every limit, holes, rows without tokens, a group without a preference."""
    x, logits, _ = data(1.5)
    mask = x["mask"]
    logp = logits.log_softmax(-1).gather(-1, x["tokens"].unsqueeze(-1)).squeeze(-1)
    rho, up = (logp - x["old_logp"]).exp()[mask], prefers(x)[mask]
    for sign in (up, ~up):
        for low, high in ((0, 0.8), (0.8, 1.2), (1.2, 1.28), (1.28, 5), (5, 20), (20, math.inf)):
            assert (sign & (rho > low) & (rho < high)).any(), (low, high)
    tokens = mask.sum(-1)
    assert tokens[SILENT] == tokens[EMPTY] == 0 and tokens.max() > 25 and tokens[6] == 1
    later = mask.flip(-1).cumsum(-1).flip(-1) > 0
    holes = ~mask & later & (mask.cumsum(-1) > 0)
    assert holes.sum() > 20 and holes.any(-1).sum() > 8
    assert [n for n in range(N) if x["reward"][n].unique().numel() == 1] == [1]


def test_the_table_and_the_definitions_have_the_same_rows():
    assert set(ref_rows.LOSS) == set(algorithm.TABLE)


@each_name
@at_each_scale
def test_the_gradient_of_the_logits_is_the_papers(name, scale):
    compare(name, *data(scale))


@each("name", ["ppo", "vapo"])
@at_each_scale
def test_the_critics_gradient_is_the_papers(name, scale):
    x, logits, value = data(scale)
    packs = [b for rank in packing.shard(batch_of(name, x), 100, 2) for b in rank]
    got = total(algorithm.TABLE[name].value_loss, table_policy(logits, value), packs)
    want = ref_rows.value_loss(name, ref_rows.responses(x, logits, value))
    assert_equal(got, want)
    assert_equal(ref_rows.gradient(got, value), ref_rows.gradient(want, value))


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_advantages_and_returns_are_the_papers(name):
    """Token by token, the holes left out: no value is read and no lambda is lost where a tool spoke."""
    x, logits, value = data(0.3)
    exp = batch_of(name, x)
    adv, ret = ref_rows.ADVANTAGE[name](ref_rows.responses(x, logits, value))
    for got, want in ((exp.adv, adv), (exp.ret, ret)):
        flat = torch.tensor([a for own in want for a in own])
        assert_equal(got[x["mask"]], flat)
        assert (got[~x["mask"]] == 0).all()


def below(divergence, limit, p, up):
    """The old probability q, below p where p went `up`, with divergence(p, q) = limit: by bisection."""
    near, far = p, 1e-12 if up else 1 - 1e-12
    for _ in range(200):
        middle = (near + far) / 2
        if divergence(p, middle) > limit:
            far = middle
        else:
            near = middle
    return near


@pytest.mark.parametrize("share", [0.999, 1.001])
@pytest.mark.parametrize("name, limit", [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_trust_regions_end_at_the_papers_limit(name, limit, share):
    """Every token a thousandth inside the limit, or a thousandth beyond it."""
    x, logits, value = data(0.3)
    divergence = {"dppo_tv": ref_rows.binary_tv, "dppo_kl": ref_rows.binary_kl}[name]
    up = prefers(x).tolist()
    p = logits.detach().softmax(-1).gather(-1, x["tokens"].unsqueeze(-1)).squeeze(-1).tolist()
    for b, t in x["mask"].nonzero().tolist():
        q = below(divergence, share * limit, p[b][t], up[b][t])
        x["old_logp"][b, t] = math.log(q)
    exp = batch_of(name, x)
    b = packing.pack(exp, range(B))
    each_token, _ = algorithm.TABLE[name].loss(table_policy(logits, value)(b), b)
    p = torch.tensor(p)[x["mask"]]
    possible = (p > limit + 0.01) & (p < 0.99 - limit)  # elsewhere no old probability is that far
    stopped = packing.unpack([each_token.detach()], [b], exp.w)[x["mask"]] == 0
    taught = exp.adv[x["mask"]] != 0
    assert (possible & taught).sum() > 30
    assert (stopped[possible & taught] == (share > 1)).all()


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize("share", [0.999, 1.001])
def test_gspo_stops_a_sequence_at_the_papers_limits(name, share):
    """Every response a thousandth inside its limit, or a thousandth beyond: 1 - 3e-4 and 1 + 4e-4."""
    x, logits, value = data(0.3)
    up = prefers(x)[:, :1]
    s = torch.where(up, 1 + 4e-4 * share, 1 - 3e-4 * share)
    logp = logits.detach().log_softmax(-1).gather(-1, x["tokens"].unsqueeze(-1)).squeeze(-1)
    x["old_logp"] = torch.where(x["mask"], logp - s.log(), 0)
    b = packing.pack(batch_of(name, x), range(B))
    got = (b.w * algorithm.TABLE[name].loss(table_policy(logits, value)(b), b)[0]).sum()
    norm = ref_rows.gradient(got, logits).norm()
    assert norm == 0 if share > 1 else norm > 1e-3


OPTIONS = {
    "ppo_clip": {"low": 0.1, "high": 0.3, "dual": 1.5},
    "gspo": {"low": 0.1, "high": 0.2},
    "gspo_token": {"low": 0.1, "high": 0.2},
    "gmpo": {"low": 0.2, "high": 0.3},
    "cispo": {"low": 0.5, "high": 1.0},
    "sapo": {"tau_pos": 2.0, "tau_neg": 3.0},
    "cpgd": {"low": 0.1, "high": 0.3, "drift": 0.5, "cap": 0.5},
    "dppo_tv": {"limit": 0.02, "cap": 0.5},
    "dppo_kl": {"limit": 0.005, "cap": 0.5},
}
ROW = {name: name for name in OPTIONS} | {"ppo_clip": "grpo"}


@each("name", OPTIONS)
def test_the_loss_of_a_row_has_all_options_of_the_loss_with_its_defaults(name):
    """Scripts look up by the signature which limits an algorithm has."""

    def options(f):
        found = inspect.signature(f).parameters.values()
        return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}

    assert options(algorithm.TABLE[ROW[name]].loss) == options(getattr(loss, name))
    assert set(options(getattr(loss, name))) == set(OPTIONS[name])


def test_an_option_that_a_loss_does_not_have_is_named():
    x, logits, value = data(0.3)
    b = packing.pack(batch_of("grpo", x), range(B))
    with pytest.raises(TypeError, match="'hgih'"):
        algorithm.TABLE["grpo"].loss(table_policy(logits, value)(b), b, hgih=0.3)


@each("name, option", [(name, option) for name in OPTIONS for option in OPTIONS[name]])
def test_an_option_of_a_row_reaches_its_loss(name, option):
    """`partial(TABLE["cpgd"].loss, drift=0.5)` has that drift, not the default, in value or in gradient."""
    x, logits, value = data(1.5)
    b = packing.pack(batch_of("grpo", x), range(B))
    out, changed = table_policy(logits, value)(b), {option: OPTIONS[name][option]}
    where = (b.mask, b.seq, b.num_seqs) if name in ("gspo", "gspo_token", "gmpo") else ()
    want = getattr(loss, name)(out.logp, b.old_logp, b.adv, *where, **changed)
    fn = algorithm.TABLE[ROW[name]].loss
    got, _ = fn(out, b, **changed)
    usual, _ = fn(out, b)
    gradients = [torch.autograd.grad(y.sum(), out.logp, retain_graph=True)[0] for y in (got, want, usual)]
    assert torch.equal(got, want) and torch.equal(gradients[0], gradients[1])
    assert not (torch.equal(got, usual) and torch.equal(gradients[0], gradients[2]))


def test_an_option_of_the_critic_and_of_an_advantage_reaches_it():
    x, logits, value = data(0.3)
    b = packing.pack(batch_of("ppo", x), range(B))
    out = table_policy(logits, value)(b)
    assert torch.equal(
        algorithm.TABLE["ppo"].value_loss(out, b, clip=0.05)[0],
        loss.value_clip(out.value, b.old_value, b.ret, clip=0.05),
    )
    sampled, rows = x["mask"], ref_rows.responses(x, logits, value)
    pairs = list(zip(rows.token_reward, rows.old_value))
    given = (x["token_reward"], x["old_value"], sampled)
    adv, _ = algorithm.TABLE["ppo"].advantage(*given, gamma=0.9, lambda_=0.5)
    assert_equal(adv[sampled], torch.tensor([a for own in pairs for a in ref_rows.gae(*own, 0.9, 0.5)]))
    adv, _ = algorithm.TABLE["vapo"].advantage(*given, gamma=0.9, alpha=0.2)
    lambdas = [max(0.0, 1 - 1 / (0.2 * max(len(r), 1))) for r, _ in pairs]
    want = [a for own, each in zip(pairs, lambdas) for a in ref_rows.gae(*own, 0.9, each)]
    assert_equal(adv[sampled], torch.tensor(want))


def test_rows_that_compare_responses_ask_for_two():
    alone = {"remax", "reinforce", "reinforce_pp"}
    free = {k: row for k, row in algorithm.TABLE.items() if isinstance(row, algorithm.Algorithm)}
    assert {k: row.group for k, row in free.items()} == {k: 1 if k in alone else 2 for k in free}
    assert [k for k, row in free.items() if row.greedy] == ["remax"]
