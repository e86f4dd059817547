"""How evenly a mixture of experts uses its experts, one number per token.

apply, state = strategy.init(module, tx, aux=True)
loss = nll(out.logp) + 0.01 * out.aux
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.bounds import SequenceAxis, SequenceBounds
from rft_fn.precision import widen
from rft_fn.types import Packed

__all__ = [
    "Balance",
    "Heard",
    "balance",
    "experts_product",
    "heard_of",
    "routers",
    "weighs",
    "without_groups",
]

_PRODUCTS = {
    "grouped_mm": "torch's product of groups",
    "batched_mm": "products of all chosen experts at once",
    "eager": "one expert after the other",
}

MOST_ERROR = 0.02  # of weights that a way of scoring explains: twice the rounding of bfloat16


def without_groups(module: nn.Module) -> None:
    """Make experts in float64 compute one after the other: torch's grouped product has no such type."""
    part: Any
    for part in module.modules():
        grouped = getattr(getattr(part, "config", None), "_experts_implementation", None) == "grouped_mm"
        if grouped and hasattr(part, "set_experts_implementation") and part.dtype == torch.float64:
            part.set_experts_implementation("eager")


def experts_product(module: nn.Module) -> str:
    """Return in words how a model computes its experts; "" for one without fused ones."""
    parts: list[Any] = [m for m in module.modules() if hasattr(m, "_is_expert_parallel")]
    names = {getattr(part.config, "_experts_implementation", None) or "eager" for part in parts}
    return ", ".join(f"{_PRODUCTS.get(name, name)} ({name})" for name in sorted(names))


class Heard(NamedTuple):
    """The output of one router for the tokens of a pack."""

    logits: Tensor  # [T, E]
    weights: Tensor  # [T, k] of the chosen experts
    chosen: Tensor  # [T, k] i64


class Balance:
    """The routers of a model, and how each makes probabilities of its logits.

    Routers are the modules that transformers records outputs of as (logits, weights, chosen). ValueError
    for a model without any, or with others.
    """

    def __init__(self, lm: nn.Module):
        self.routers, why = routers(lm)
        if why:
            raise ValueError(f"aux: expected False for {type(lm).__name__}, {why}; leave router_aux at 0")
        self.ways = dict.fromkeys(self.routers, "softmax")
        self.model = type(lm).__name__

    @contextmanager
    def listen(self) -> Iterator[dict[str, Heard]]:
        """Record the output of each router in the last forward of the context; its hooks end with it."""
        heard: dict[str, Heard] = {}
        handles = [m.register_forward_hook(partial(_note, heard, name)) for name, m in self.routers.items()]
        try:
            yield heard
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def settle(self, heard: dict[str, Heard]) -> None:
        """Detect what the weights of each router are made of. ValueError for routers of another kind."""
        for name, x in heard.items():
            errors = {way: _error(way, x) for way in _WAYS}
            way = min(errors, key=lambda w: errors[w])
            total = widen(x.logits).sum(-1)
            if bool((x.logits >= 0).all()) and bool(((total - 1).abs() < MOST_ERROR).all()):
                way = "given"
            elif errors[way] > MOST_ERROR:
                raise ValueError(
                    f"aux: expected routers of softmax or sigmoid for a balance of experts, {name} of "
                    f"{self.model} is neither; leave router_aux at 0"
                )
            self.ways[name] = way

    def __call__(
        self, heard: dict[str, Heard], pack: Packed, bounds: SequenceBounds | None
    ) -> tuple[Tensor, Tensor]:
        """Return (aux [T], share [T]) of a pack.

        aux is the mean of `balance` over the routers, share the largest share that one expert of any
        router has of the choices in its sequence.
        """
        real = _real(pack, bounds)
        axis = None if bounds is None else bounds.sequence
        outs = []
        for name, x in heard.items():
            p = _WAYS[self.ways[name]](widen(x.logits))
            outs.append(balance(p, x.chosen, pack.seq, real, pack.num_seqs, sequence=axis))
        auxes, shares = zip(*outs)
        return torch.stack(auxes).mean(0), torch.stack(shares).amax(0)


def balance(
    p: Tensor,
    chosen: Tensor,
    seq: Tensor,
    real: Tensor,
    num_seqs: int,
    *,
    sequence: SequenceAxis | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (aux [T], share [T]) of one router.

    p [T, E] are its probabilities, chosen [T, k] its choices. aux[t] = sum over e of f[e] p[t, e], with
    f[e] = E / (k n) times the choices of e by the n `real` tokens of t's sequence, prompt and response:
    the balance loss of a sequence (DeepSeek-V3, arXiv 2412.19437), one token at a time. It is 1 if experts
    are used evenly and at most E / k; f has no gradient. share[t] is the largest f[e] k / E, over e. As no
    sequence reads another, a cut of the batch between sequences changes nothing; `sequence` adds up the
    choices of processes that share the tokens of a pack.

    This is not the `aux_loss` of transformers, which is k times one product of means over all tokens and
    layers of a forward, so it depends on which sequences are in it.
    """
    n_experts = p.shape[-1]
    picks = torch.zeros_like(p.detach()).scatter_(-1, chosen, 1.0) * real[:, None]
    count = p.new_zeros(num_seqs, n_experts).index_add_(0, seq, picks)  # [K, E]
    if sequence is not None:
        count = sequence.total(count)
    size = count.sum(-1, keepdim=True).clamp(min=1)  # k n
    share = count / size
    aux = n_experts * (share[seq] * p).sum(-1)
    return aux, share.amax(-1)[seq]


def routers(lm: nn.Module) -> tuple[dict[str, nn.Module], str]:
    """Return the routers of a model by name, in order, and why there are none, or "".

    They are the modules that transformers records `router_logits` of.
    """
    specs: list[Any] = []
    for m in lm.modules():
        recorded = (getattr(type(m), "_can_record_outputs", None) or {}).get("router_logits", [])
        specs += recorded if isinstance(recorded, list) else [recorded]

    # index 0: the router itself, with logits first in its output; others are blocks around one
    classes = tuple({spec.target_class for spec in specs if getattr(spec, "index", None) == 0})
    found = {name: m for name, m in lm.named_modules() if isinstance(m, classes)}
    if found:
        return found, ""
    return {}, "whose routers give no logits and choices" if specs else "which has no routers of experts"


def heard_of(router: nn.Module, out: Any, option: str, instead: str) -> Heard:
    """Return the output of a router; ValueError for one of another form, which the option cannot have."""
    is_known = isinstance(out, tuple) and len(out) == 3 and not out[2].is_floating_point()
    if not is_known or out[1].shape != out[2].shape:
        raise ValueError(
            f"{option}: expected routers whose output is (logits, weights, chosen), {type(router).__name__} "
            f"has another; {instead}"
        )
    logits, weights, chosen = (x.reshape(-1, x.shape[-1]) for x in out)
    return Heard(logits, weights, chosen)


def _note(heard: dict[str, Heard], name: str, router: nn.Module, _: Any, out: Any) -> None:
    heard[name] = heard_of(router, out, "aux", "leave router_aux at 0")


def _real(pack: Packed, bounds: SequenceBounds | None) -> Tensor:
    """Return whether each token [T] is no padding, which is at position 0 and begins no sequence."""
    begins = pack.seq.diff(prepend=pack.seq[:1] - 1) != 0
    if bounds is not None and bounds.sequence is not None:  # a part may begin within a sequence
        start = bounds.sequence.rank * pack.seq.shape[0]
        begins[0] = start in accumulate(bounds.sizes, initial=0)
    return begins | (pack.pos > 0)


def _sigmoid(logits: Tensor) -> Tensor:
    """Return a score for each expert by itself, as a distribution over the experts."""
    score = logits.sigmoid()
    return score / score.sum(-1, keepdim=True)


_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": _sigmoid,
    "given": lambda probabilities: probabilities,  # some routers give these in place of logits
}


def weighs(x: Heard) -> bool:
    """Return whether the weights of a router are, up to a factor, those of its logits in one of the ways."""
    return min(_error(way, x) for way in _WAYS) < MOST_ERROR


def _error(way: str, x: Heard) -> float:
    """Return the largest difference of a router's weights and probabilities as shares, if finite."""
    p = _WAYS[way](widen(x.logits)).gather(-1, x.chosen)
    weights = widen(x.weights)
    difference = weights / weights.sum(-1, keepdim=True) - p / p.sum(-1, keepdim=True)
    return float(difference.abs().nan_to_num(0.0).max())
