"""How evenly a mixture of experts uses its experts: one number a token, from what its routers choose.

apply, state = strategy.init(module, tx, aux=True)
loss = nll(out.logp) + 0.01 * out.aux
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model import attention
from rft_fn.types import Packed

__all__ = ["Balance", "Heard", "balance"]

MOST_ERROR = 0.02  # of weights that a way of scoring explains: twice the rounding of bfloat16


class Heard(NamedTuple):
    """What one router said of the tokens of a pack."""

    logits: Tensor  # [T, E]
    weights: Tensor  # [T, k] of the chosen experts
    chosen: Tensor  # [T, k] i64


class Balance:
    """The routers of a model, and how each of them makes probabilities of its logits.

    Routers are found by what transformers records of a model: modules whose output is (logits, weights,
    chosen). ValueError for a model without any, or with others.
    """

    def __init__(self, lm: nn.Module):
        self.routers = _routers(lm)
        self.ways = dict.fromkeys(self.routers, "softmax")
        self.model = type(lm).__name__

    @contextmanager
    def listen(self) -> Iterator[dict[str, Heard]]:
        """What each router says in the last forward inside. Not hooks for good: a copy of the model has none
        of them, and the second forward of checkpointing is not heard."""
        heard: dict[str, Heard] = {}
        handles = [m.register_forward_hook(partial(_note, heard, name)) for name, m in self.routers.items()]
        try:
            yield heard
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def settle(self, heard: dict[str, Heard]) -> None:
        """Find for each router which probabilities its weights are made of. ValueError if none of ours."""
        for name, x in heard.items():
            errors = {way: _error(way, x) for way in _WAYS}
            way = min(errors, key=lambda w: errors[w])
            if _is_distribution(x.logits):
                way = "given"
            elif errors[way] > MOST_ERROR:
                raise ValueError(
                    f"aux: expected routers of softmax or sigmoid for a balance of experts, {name} of "
                    f"{self.model} is neither; leave router_aux at 0"
                )
            self.ways[name] = way

    def __call__(
        self, heard: dict[str, Heard], pack: Packed, packs: attention.SequenceBounds | None
    ) -> tuple[Tensor, Tensor]:
        """(aux [T], share [T]) of a pack: the mean of `balance` over the routers, and the largest share that
        one expert of any router has of the choices of its sequence."""
        real = _real(pack, packs)
        sequence = None if packs is None else packs.sequence
        auxes, shares = [], []
        for name, x in heard.items():
            aux, share = balance(
                _WAYS[self.ways[name]](_wide(x.logits)),
                x.chosen,
                pack.seq,
                real,
                pack.num_seqs,
                sequence=sequence,
            )
            auxes.append(aux)
            shares.append(share)
        return torch.stack(auxes).mean(0), torch.stack(shares).amax(0)


def balance(
    p: Tensor, chosen: Tensor, seq: Tensor, real: Tensor, num_seqs: int, *, sequence: Any = None
) -> tuple[Tensor, Tensor]:
    """(aux [T], share [T]) of one router with probabilities p [T, E] that chose k experts a token [T, k].

    aux[t] = sum over e of f[e] p[t, e], with f[e] = E / (k n) times the choices of e by the n `real` tokens
    of t's sequence, prompt and response: the balance loss of a sequence (DeepSeek-V3, arXiv 2412.19437), a
    token at a time. It is 1 where experts are used evenly and at most E / k; f has no gradient. share[t] is
    the largest f[e] k / E, over e. As no sequence reads another, a cut of the batch between sequences
    changes nothing; `sequence` adds up the choices of processes that share the tokens of a pack.

    Not what transformers calls `aux_loss`: that is k times one product of means over all tokens and layers
    of a forward, so it depends on which sequences are in it.
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


def _routers(lm: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model by name, by the classes that transformers records `router_logits` of."""
    specs = []
    for m in lm.modules():
        recorded = (getattr(type(m), "_can_record_outputs", None) or {}).get("router_logits", [])
        specs += recorded if isinstance(recorded, list) else [recorded]
    # index 0: the router itself, whose output begins with logits; others are blocks around one
    classes = tuple({spec.target_class for spec in specs if getattr(spec, "index", None) == 0})
    found = {name: m for name, m in lm.named_modules() if isinstance(m, classes)}
    if not found:
        why = "whose routers say no logits and choices" if specs else "which has no routers of experts"
        raise ValueError(f"aux: expected False for {type(lm).__name__}, {why}; leave router_aux at 0")
    return found


def _note(heard: dict[str, Heard], name: str, router: nn.Module, _: Any, out: Any) -> None:
    """Keep what a router says; ValueError for an output of another form."""
    is_known = isinstance(out, tuple) and len(out) == 3 and not out[2].is_floating_point()
    if not is_known or out[1].shape != out[2].shape:
        raise ValueError(
            f"aux: expected routers whose output is (logits, weights, chosen), {type(router).__name__} has "
            "another; leave router_aux at 0"
        )
    logits, weights, chosen = (x.reshape(-1, x.shape[-1]) for x in out)
    heard[name] = Heard(logits, weights, chosen)


def _real(pack: Packed, packs: attention.SequenceBounds | None) -> Tensor:
    """Which tokens [T] are a sequence's own: padding is at position 0 and begins no sequence."""
    begins = pack.seq.diff(prepend=pack.seq[:1] - 1) != 0
    if packs is not None and packs.sequence is not None:  # a part may begin within a sequence
        start = packs.sequence.rank * pack.seq.shape[0]
        begins[0] = start in accumulate(packs.sizes, initial=0)
    return begins | (pack.pos > 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sigmoid(logits: Tensor) -> Tensor:
    """Scores of their own for each expert, as a distribution."""
    score = logits.sigmoid()
    return score / score.sum(-1, keepdim=True)


def _given(probabilities: Tensor) -> Tensor:
    """Of routers that say probabilities in the place of logits."""
    return probabilities


_WAYS = {"softmax": _softmax, "sigmoid": _sigmoid, "given": _given}


def _is_distribution(x: Tensor) -> bool:
    total = _wide(x).sum(-1)
    return bool((x >= 0).all()) and bool(((total - 1).abs() < MOST_ERROR).all())


def _error(way: str, x: Heard) -> float:
    """How far the weights of a router are from the probabilities of what it chose, both as shares. What is
    not finite tells nothing."""
    p = _WAYS[way](_wide(x.logits)).gather(-1, x.chosen)
    got = _wide(x.weights)
    gap = got / got.sum(-1, keepdim=True) - p / p.sum(-1, keepdim=True)
    return float(gap.abs().nan_to_num(0.0).max())
