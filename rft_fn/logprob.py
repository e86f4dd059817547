"""Log-probs of the targets, from logits or straight from hidden states."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.precision import wide, widen
from rft_fn.scan import linear_scan
from rft_fn.types import Sampling, TokenOut

__all__ = [
    "entropy_from_logits", "linear_logprob", "linear_rows", "log_probs_from_logits", "process_logits",
    "sum_p2",
]  # fmt: skip

_FIRST = 64  # ranks that are looked at before more, for top_p


def log_ratio(logp: Tensor, old_logp: Tensor, *, limit: float = math.inf) -> Tensor:
    """Return log(pi / pi_old) = logp - old_logp, [*] nats, clamped to +-limit.

    A token that both exclude (-inf, e.g. by top_k) has a ratio of 1: 0 here, without a gradient.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."))
    excluded = (logp == -torch.inf) & (old_logp == -torch.inf)
    ratio = torch.where(excluded, 0, logp) - torch.where(excluded, 0, old_logp)
    return ratio.clamp(-limit, limit)


def log_probs_from_logits(logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Return log softmax(logits / temperature)[target], [..., V], [...] -> [...] nats.

    In float32 at least. One pass over the logits: no copy is made or kept, and the backward makes one more
    pass. A tensor as temperature may have any shape that `logits / temperature` takes. ValueError when
    the shapes disagree. A target outside [0, V) is torch's RuntimeError on a CPU, and an assertion on a
    GPU.
    """
    return _from_logits(logits, target, temperature, entropy=False)[0]


def entropy_from_logits(logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Return the entropy of softmax(logits / temperature), [..., V] -> [...] nats.

    In float32 at least. Logits of -inf add 0.
    """
    target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _from_logits(logits, target, temperature, entropy=True)[1]


def sum_p2(logp: Tensor, half_logp: Tensor) -> Tensor:
    """Return the sum of the squared probabilities of all words, [*], without gradient.

        p(y)^2 / p'(y) = exp(2 logp - half_logp),    p' the same distribution at half the temperature

    of any word y: p' is in proportion to p^2, and its normaliser is the sum. So two log-probs of one target
    tell it, whatever computed them: scores of `tree.replace(rollout, temperature=temperature / 2)` on any
    backend, or `linear_logprob(squares=True)`. `advantage.optimal_token_baseline` reads it.
    """
    check.shapes(logp=(logp, "..."), half_logp=(half_logp, "..."))
    return (2 * logp.detach() - half_logp.detach()).exp()


def log_probs_and_entropy(
    logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return both of the above in one pass, [..., V], [...] -> [...] and [...] nats."""
    return _from_logits(logits, target, temperature, entropy=True)


def _from_logits(
    logits: Tensor, target: Tensor, temperature: float | Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return (logp, entropy), in one fused pass over the rows.

    The entropy is logp again where it was not asked for.
    """
    from rft_kernels import logits_logprob

    check.shapes(target=(target, "..."), logits=(logits[..., 0], "..."))
    # A tensor broadcasts against the logits, and may be differentiated: the kernel takes numbers.
    if isinstance(temperature, Tensor):
        logits = widen(logits) / temperature
        temperature = 1.0

    # Raises for a target outside [0, V), which the kernel would make NaN.
    logits.detach().gather(-1, target.unsqueeze(-1))
    rows = logits.reshape(-1, logits.shape[-1])
    labels = target.reshape(-1)
    logp, ent = logits_logprob(rows, labels, temperature=temperature, ignore_index=-1, entropy=entropy)
    return logp.view(target.shape), (logp if ent is None else ent).view(target.shape)


def process_logits(
    logits: Tensor, sampling: Sampling, *, keep: Tensor | None = None, temperature: Tensor | None = None
) -> Tensor:
    """Return logits / temperature, -inf where top_k or top_p exclude a token, [..., V] -> [..., V].

    Only the top_k largest stay, and of them the smallest set with a mass of top_p. This is the one definition
    of the distribution that is sampled from, for the engine and for the trainer. `keep` [...] is a token that
    stays whatever its rank: the trainer's target, which the policy of the rollout did draw, so that its
    log-prob stays finite after an update. The exclusion carries no gradient. `temperature` [...] > 0 is one
    for each distribution, in place of that of `sampling`.
    """
    z = widen(logits)
    if temperature is not None:
        z = z / temperature.unsqueeze(-1)
    elif sampling.temperature not in (0, 1):
        z = z / sampling.temperature
    if not sampling.truncates:
        return z
    rows = z.detach().reshape(-1, z.shape[-1])
    drop = _excluded(rows, sampling).view(z.shape)
    if keep is not None:
        drop = drop.scatter(-1, keep.unsqueeze(-1), False)
    return z.masked_fill(drop, -torch.inf)


def _excluded(z: Tensor, sampling: Sampling) -> Tensor:
    """Return what top_k and top_p exclude, [R, V] bool; equal logits go by place in the vocabulary."""
    can_branch = _can_branch(z)
    most = min(sampling.top_k or z.shape[-1], z.shape[-1])
    if sampling.top_p == 1:
        least = z.topk(most).values[:, -1]
        count = torch.full_like(least, most, dtype=torch.long)
    elif sampling.top_k or not can_branch:
        ranked = z.topk(most).values
        least, count = _nucleus(ranked, ranked.logsumexp(-1, keepdim=True), sampling.top_p)
    else:
        least, count = _growing_nucleus(z, z.logsumexp(-1, keepdim=True), sampling.top_p, _FIRST)

    # without equals of the last one that stays, a comparison decides
    drop = z < least.unsqueeze(-1)
    if can_branch and bool((drop.sum(-1) + count == z.shape[-1]).all()):
        return drop
    return _beyond(z, least, count)


def truncated_on_device(z: Tensor, sampling: Sampling, ranks: int) -> tuple[Tensor, Tensor]:
    """Return (logits as `process_logits` does, [R] bool, not sure), without a read by the host.

    Of logits z [R, V] that the temperature has divided. For top_p only the first `ranks` are looked at; a row
    is not sure where its set may go on after them.
    """
    every = z.shape[-1]
    most = min(sampling.top_k or (every if sampling.top_p == 1 else ranks), every)
    ranked = z.topk(most).values
    norm = (ranked if sampling.top_k else z).logsumexp(-1, keepdim=True)
    least, count = ranked[:, -1], torch.full_like(ranked[:, 0], most, dtype=torch.long)
    if sampling.top_p < 1:
        least, count = _nucleus(ranked, norm, sampling.top_p)
    unsure = (count == most) & (not sampling.top_k and most < every)
    return z.masked_fill(_beyond(z, least, count), -torch.inf), unsure


def _beyond(z: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """Return what is not among the first `count` [R] of z [R, V], of which `least` [R] is the last."""
    least = least.unsqueeze(-1)
    drop, equal = z < least, z == least
    room = count - (z > least).sum(-1)
    return drop | (equal & (equal.cumsum(-1) > room.unsqueeze(-1)))


def _growing_nucleus(z: Tensor, norm: Tensor, top_p: float, size: int) -> tuple[Tensor, Tensor]:
    """Return `_nucleus` of the first `size` ranks of z [R, V], and of more in rows that need them."""
    size = min(size, z.shape[-1])
    least, count = _nucleus(z.topk(size).values, norm, top_p)
    wider = count == size
    if size < z.shape[-1] and bool(wider.any()):
        least[wider], count[wider] = _growing_nucleus(z[wider], norm[wider], top_p, 16 * size)
    return least, count


def _nucleus(ranked: Tensor, norm: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return ([R] the last logit that stays, [R] how many do).

    Of ranked logits [R, K] with normaliser [R, 1].
    """
    p = (ranked - norm).exp()
    # a running sum of floats has no deterministic form on CUDA
    exact = torch.are_deterministic_algorithms_enabled()
    mass = linear_scan(torch.ones_like(p), p, reverse=False) if exact else p.cumsum(-1)
    count = (mass - p < top_p).sum(-1).clamp(min=1)  # the token that crosses top_p is kept
    return ranked.gather(-1, count.unsqueeze(-1) - 1).squeeze(-1), count


def _can_branch(z: Tensor) -> bool:
    """Return whether values of z can be read, which they cannot under vmap and on the meta device."""
    try:
        return bool(z[:0].sum() == 0)
    except RuntimeError:
        return False


def default_workspace_mb(device_type: str) -> float:
    """Return the MiB of logits that `linear_logprob` holds at a time by default, on "cpu" or "cuda"."""
    from rft_kernels import default_workspace_mb as of_device

    return of_device(device_type)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    squares: bool = False,
    words: Tensor | None = None,
    workspace_mb: float | None = None,
    engine: str = "auto",
) -> TokenOut:
    """Return log softmax(hidden weight^T / temperature)[target], [T, D], [V, D], [T] -> TokenOut.

    Never holds logits [T, V]. Targets of -100 give 0 and no gradient, even where hidden is NaN. `words`
    [T, K] asks for the log-probs of K more words of each token, as `words_logp` [T, K] (0 with target -100):
    K dot products each, for the normaliser is there already. `squares` asks for `sum_p2` [T], without
    gradient, at the price of one more forward of the head. `workspace_mb` bounds the logits that exist at a
    time (None: chosen per device). The work is done by `rft_kernels.linear_logprob`, by one of its engines:
    they can be differentiated once. "reference" holds whole logits and has derivatives of any order, in the
    temperature too. ValueError when shapes disagree.
    """
    from rft_kernels import linear_logprob as fused

    logp, ent, lse = fused(
        hidden,
        weight,
        target,
        temperature=temperature,
        bias=bias,
        softcap=softcap,
        entropy=entropy,
        lse=words is not None,
        workspace_mb=workspace_mb,
        engine=engine,
    )
    p2 = None
    if squares:
        with torch.no_grad():
            half = fused(
                hidden,
                weight,
                target,
                temperature=temperature / 2,
                bias=bias,
                softcap=softcap,
                workspace_mb=workspace_mb,
                engine=engine,
            )[0]
        p2 = torch.where(target != -100, sum_p2(logp, half), 0)
    if words is None or lse is None:
        return TokenOut(logp=logp, entropy=ent, sum_p2=p2)

    # The logits of the words; a where only on the result would leave 0 * NaN in the gradient of the weight.
    check.shapes(target=(target, "T"), words=(words, "T K"))
    live = (target != -100).unsqueeze(-1)
    hidden = torch.where(live, hidden, 0)
    z = torch.einsum("td,tkd->tk", hidden.to(logp.dtype), weight[words].to(logp.dtype))
    if bias is not None:
        z = z + bias[words]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)

    # The softmax of all words is in lse.
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature.unsqueeze(-1)  # one per token
    words_logp = torch.where(live, z / temperature - lse.unsqueeze(-1), 0)
    return TokenOut(logp=logp, entropy=ent, sum_p2=p2, words_logp=words_logp)


# ---------- any function of whole distributions, some tokens at a time


_COPIES = 8  # tensors [C, V] that a function of C tokens and its gradient hold at a time
_LEAST = 16  # tokens at a time, whatever the workspace
_COLUMNS = 8192  # of a narrow weight that are converted at a time


def linear_rows(
    fn: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    *data: Tensor,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    workspace_mb: float | None = None,
) -> Tensor:
    """Return fn(log softmax(hidden weight^T / temperature), *data), [T, D], [V, D] -> [T, ...].

    Never holds [T, V]: `fn` gets log-probs [C, V] of C tokens at a time and the same tokens of `data`
    [T, ...], and returns [C, ...]. It must treat each token by itself. The log-probs are made again in the
    backward pass. Differentiable once, in hidden, weight and bias; `data` carries no gradient. `workspace_mb`
    bounds what `fn` and its gradient hold (None: chosen per device), but C is 16 at least. `temperature` may
    be one for each token [T].
    """
    check.shapes(hidden=(hidden, "T D"), weight=(weight, "V D"), bias=(bias, "V"))
    for i, x in enumerate(data):
        if len(x) != len(hidden):
            raise ValueError(f"data[{i}]: expected [T, ...] with T = {len(hidden)}, got {list(x.shape)}")
    mb = default_workspace_mb(hidden.device.type) if workspace_mb is None else workspace_mb
    rows = max(_LEAST, int(mb * 2**20 / (4 * _COPIES * weight.shape[0])))
    scale = torch.as_tensor(temperature, dtype=wide(hidden.dtype), device=hidden.device).expand(len(hidden))
    return _Rows.apply(hidden, weight, bias, fn, rows, scale, *data)  # type: ignore[return-value]


class _Rows(torch.autograd.Function):
    """`linear_rows`; the backward pass makes the logits of each chunk again."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, fn: Any, rows: int, scale: Tensor, *data: Tensor
    ) -> Tensor:
        found = []
        for at in _chunks(len(hidden), rows):
            z = logits(hidden[at], weight, bias)
            found.append(fn(_log_softmax(z, scale[at]), *(x[at] for x in data)))
        return torch.cat(found) if found else fn(hidden.new_zeros(0, len(weight)), *data)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        hidden, weight, bias, ctx.fn, ctx.rows, scale, *data = inputs
        if not output.is_floating_point():
            ctx.mark_non_differentiable(output)
        ctx.save_for_backward(hidden, weight, bias, scale, *data)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, scale, *data = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        dh = torch.zeros_like(hidden) if of_hidden else None
        dw = torch.zeros_like(weight, dtype=wide(weight.dtype)) if of_weight else None
        db = torch.zeros_like(bias) if of_bias else None
        for at in _chunks(len(hidden), ctx.rows):
            z = logits(hidden[at], weight, bias).requires_grad_()
            with torch.enable_grad():
                out = ctx.fn(_log_softmax(z, scale[at]), *(x[at] for x in data))
            (dz,) = torch.autograd.grad(out, z, grads[0][at])
            if dh is not None:
                for cols in _chunks(len(weight), _columns(weight, dz)):
                    dh[at] += (dz[:, cols] @ weight[cols].to(dz.dtype)).to(dh.dtype)
            if dw is not None:
                dw.addmm_(dz.T, hidden[at].to(dz.dtype))
            if db is not None:
                db += dz.sum(0).to(db.dtype)
        dw = None if dw is None else dw.to(weight.dtype)
        return dh, dw, db, *[None] * (3 + len(data))


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden weight^T + bias in float32 at least, [C, D], [V, D] -> [C, V]."""
    h = widen(hidden)
    z = torch.cat([h @ weight[cols].to(h.dtype).T for cols in _chunks(len(weight), _columns(weight, h))], -1)
    return z if bias is None else z + bias


def _log_softmax(z: Tensor, scale: Tensor) -> Tensor:
    return (z / scale.unsqueeze(-1)).log_softmax(-1)


def _columns(weight: Tensor, wide: Tensor) -> int:
    """Return how many rows of a weight are converted at a time: all if it has the type already."""
    return len(weight) if weight.dtype == wide.dtype else _COLUMNS


def _chunks(size: int, each: int) -> Iterator[slice]:
    return (slice(at, min(at + each, size)) for at in range(0, size, max(each, 1)))
