"""Numerical probes of a model's packing behaviour, with a few random tokens.

They show how packs run and whether the head can be fused, so no list of families is kept.

Layers may change after some number of tokens (a window, a chunk, other rotary factors). A config names these
numbers, and they are mostly larger than a question: `lowered` makes them small while one is asked.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rft_fn.model.forward import POSITIONS, ROWS, rope_grows, rope_kinds, run, text_inputs
from rft_fn.model.head_probe import plain_head, same_value
from rft_fn.model.parts import Parts, inside_adapters
from rft_fn.model.placeholders import placeholder_ids
from rft_fn.types import Packed

__all__ = [
    "Found",
    "Question",
    "lowered",
    "measure",
    "question",
    "rounding",
    "rounds",
    "thresholds",
    "usual_tokens",
]


# Sizes of the sequences of a question, in tokens: each one of AFTER follows one of FRONT.
FRONT = (6, 5, 4)  # sequences with tokens that change
AFTER = (5, 4, 6)  # sequences with hidden states that must not
NEAR = 5  # thresholds of length that some of them cross, and the first of AFTER does not

# what configs and layers call the number of tokens after which they change
_THRESHOLD = (
    "window(_size|_len)?$|attention_chunk_size$|floor(_scale)?$|local_attention$|index_topk$"
    "|index_block_size$|original_max_position_embeddings$"
)


@dataclass(frozen=True)
class Question:
    """Packs of random tokens for the forward of a `Reader`, which measures them instead of scoring them."""

    pack: Packed  # sequences of FRONT and AFTER in turn
    other: Packed  # the same sequences of AFTER, other tokens in those of FRONT
    single: Packed  # the first sequence of AFTER
    twins: Packed  # sequences that begin alike
    mode: str
    blind: bool = False  # whether placeholders are among the tokens, without their media
    near: bool = False  # whether the sequences lie on both sides of every threshold of length


@dataclass(frozen=True)
class Found:
    """The answer to a `Question`, in float32 numbers []: tensors, because DeepSpeed looks into outputs."""

    leak: Tensor  # largest change of a hidden state after other sequences, relative to it
    shift: Tensor  # mean difference of the hidden states in a pack and by themselves, relative to them
    most_leak: Tensor  # the largest leak that is rounding
    most_shift: Tensor
    twins: Tensor  # largest difference of a hidden state that is computed once for several tokens, relative
    plain: Tensor  # 1 where logits are head(hidden), else 0

    def fits(self) -> bool:
        """Return whether sequences score the same in a pack and by themselves."""
        return bool(self.leak <= self.most_leak) and bool(self.shift <= self.most_shift)

    def shares(self) -> bool:
        """Return whether a prefix that sequences share may be computed once."""
        return bool(self.twins <= self.most_shift)


def usual_tokens(config: Any) -> Tensor:
    """Return the ids of a model's vocabulary without a special meaning."""
    text = config.get_text_config()
    special = set(placeholder_ids(config))
    for name, value in [*vars(config).items(), *vars(text).items()]:
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            special.add(value)
    usual = [i for i in range(min(text.vocab_size, 4096)) if i not in special]
    return torch.tensor(usual or [0])


def question(
    config: Any, device: torch.device, mode: str, *, place: int | None = None, near: bool = False
) -> Question:
    """Return a question to a model with this config.

    The tokens are the same on every process. A placeholder `place` is at both ends of each sequence: the
    media are not there, but the model treats their places as it would (masks, types of tokens, axes). With
    `near` the thresholds of length that the config names are among the tokens.
    """
    usual = usual_tokens(config)
    generator = torch.Generator().manual_seed(0)

    def draw(sizes: tuple[int, ...]) -> list[Tensor]:
        at = torch.randint(len(usual), (sum(sizes),), generator=generator)
        rows = list(usual[at].split(list(sizes)))
        if place is not None:
            for x in rows:
                x[[0, 1, -1]] = place
        return rows

    def packed(front: list[Tensor]) -> Packed:
        rows = [x for pair in zip(front, after) for x in pair]
        return _pack(torch.cat(rows).to(device), [len(x) for x in rows])

    # Both packs have the same sequences of AFTER.
    after = draw(AFTER)
    first = draw(FRONT)
    second = draw(FRONT)
    single = _pack(after[0].to(device), [AFTER[0]])

    # three responses to one prompt
    prompt, *responses = torch.cat([*after, *first]).split([9, 5, 7, 9])
    rows = [torch.cat([prompt, x]) for x in responses]
    twins = _pack(torch.cat(rows).to(device), [len(x) for x in rows])
    return Question(packed(first), packed(second), single, twins, mode, place is not None, near)


def thresholds(lm: nn.Module) -> dict[str, int]:
    """Return {name in config or layers: number of tokens} after which layers of a model change."""
    return {name: value for _, name, value in _thresholds(lm)}


def _thresholds(lm: nn.Module) -> list[tuple[dict[str, Any], str, int]]:
    """Return (what holds it, its name, its value) of each threshold of length."""
    config = inside_adapters(lm).config.get_text_config()
    growing = "|max_position_embeddings$|max_seq_len$" if rope_grows(config) else ""
    names = re.compile(_THRESHOLD + growing)
    holders: dict[int, dict[str, Any]] = {id(kind): kind for kind in rope_kinds(config)}
    for x in [config, *lm.modules()]:
        for held in (x, getattr(x, "config", None)):
            if hasattr(held, "__dict__"):
                holders[id(held)] = vars(held)
    return [
        (held, name, value)
        for held in holders.values()
        for name, value in held.items()
        if isinstance(value, int) and not isinstance(value, bool) and names.search(name)
    ]


@contextmanager
def lowered(lm: nn.Module, to: int = NEAR) -> Iterator[bool]:
    """Lower a model's thresholds of length to `to` tokens; yield whether some were above that."""
    before = [found for found in _thresholds(lm) if found[2] > to]
    try:
        for held, name, _ in before:
            held[name] = to
        yield bool(before)
    finally:
        for held, name, value in before:
            held[name] = value


def _pack(tokens: Tensor, sizes: list[int]) -> Packed:
    device = tokens.device
    number = torch.zeros(len(tokens), device=device)
    return Packed(
        tokens=tokens,
        target=tokens,
        pos=torch.cat([torch.arange(n) for n in sizes]).to(device),
        seq=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device),
        mask=torch.ones(len(tokens), dtype=torch.bool, device=device),
        old_logp=number,
        adv=number,
        w=number,
        num_seqs=len(sizes),
    )


@torch.no_grad()
def measure(root: nn.Module, parts: Parts, asked: Question, *, head: bool, share: bool = False) -> Found:
    """Answer a question.

    With `head` also whether the head is plain, and with `share` whether tokens that begin alike may be
    computed once. `root` holds the model. It is called inside the forward of `root`, where a sharded model
    has its weights.
    """
    # A sequence by itself is what it should be; two packs differ only in the tokens of FRONT.
    with ExitStack() as stack:
        stack.enter_context(_untouched(root))
        if asked.near:
            stack.enter_context(lowered(parts.decoder))
        plain = False
        if head and not asked.blind:
            inputs = text_inputs(parts.model, asked.single)
            single, plain = plain_head(parts, inputs, same_value)
        else:
            single = _hidden(parts.decoder, asked.single, POSITIONS, asked.blind)
        try:
            pack = _after(_hidden(parts.decoder, asked.pack, asked.mode, asked.blind))
            other = _after(_hidden(parts.decoder, asked.other, asked.mode, asked.blind))
        except (TypeError, ValueError, RuntimeError, AssertionError):
            # It takes no packs, or not the keywords: as far off as can be.
            pack = [torch.zeros_like(single)]
            other = [torch.full_like(single, torch.inf)]
        twins = single.new_zeros(1)
        if share and asked.mode in (POSITIONS, ROWS) and not asked.blind:
            twins = _of_twins(parts.decoder, asked)
            if head and not plain:  # its logits are computed whole, for all tokens
                twins = torch.full_like(twins, torch.inf)

    # Relative to the hidden states: their scale differs between families.
    leak = torch.stack([_relative(a, b).max() for a, b in zip(other, pack)]).max()
    shift = _relative(pack[0], single).mean()
    if not single.isfinite().all():  # weights that are not finite tell nothing
        leak = shift = torch.zeros_like(shift)
        twins = torch.zeros_like(twins)
    most_leak, most_shift = rounding(single.dtype, single.device)
    return Found(
        leak=leak,
        shift=shift,
        most_leak=leak.new_tensor(most_leak),
        most_shift=leak.new_tensor(most_shift),
        twins=twins.max().to(leak.dtype),
        plain=leak.new_tensor(float(plain)),
    )


def _hidden(decoder: nn.Module, pack: Packed, mode: str, blind: bool, *, share: bool = False) -> Tensor:
    """Return the hidden states [T, D] of a pack; the logits of a model without a decoder."""
    out = run(decoder, pack, mode=mode, blind=blind, share=share)
    hidden = getattr(out, "last_hidden_state", None)
    return out.logits[0] if hidden is None else hidden[0]


class _Rounding(TorchDispatchMode):
    """Watch whether values of `tokens` tokens in float64 are rounded to a narrower type."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            self.seen |= out.dtype.itemsize < 8 and out.is_floating_point() and self.tokens in out.shape
        return out


def rounds(decoder: nn.Module, asked: Question) -> bool:
    """Return whether a model in float64 has layers that compute in a narrower type, as most norms do.

    The gradient of a token that is computed once is a sum over its sequences, which such a layer rounds: it
    would depend on the cut of the batch by 1e-7, where float64 is there to show that it does not.
    """
    if next(decoder.parameters()).dtype != torch.float64:
        return False
    with _Rounding(len(asked.twins.tokens)) as watched:
        _hidden(decoder, asked.twins, asked.mode, asked.blind)
    return watched.seen


def _of_twins(decoder: nn.Module, asked: Question) -> Tensor:
    """Return relative differences [T] of hidden states if tokens that begin alike are computed once."""
    far = torch.full((1,), torch.inf, device=asked.twins.tokens.device)
    try:
        if rounds(decoder, asked):
            return far
        each = _hidden(decoder, asked.twins, asked.mode, asked.blind)
        shared = _hidden(decoder, asked.twins, asked.mode, asked.blind, share=True)
    except (TypeError, ValueError, RuntimeError, AssertionError):  # it takes no packs, or needs all tokens
        return far
    return _relative(shared, each)


def _after(x: Tensor) -> Sequence[Tensor]:
    """Return the rows of the sequences of AFTER, for a pack of both."""
    sizes = [n for pair in zip(FRONT, AFTER) for n in pair]
    return x.split(sizes)[1::2]


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| / |b| of each token [T]."""
    return (a - b).float().norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-30)


def rounding(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return (the largest leak, the largest shift) that rounding makes.

    The leak compares two packs of the same shape, whose rows are equal to the bit unless a layer sorts
    tokens by their values (experts). The shift compares two shapes: products of other sizes add up in
    another order, on a GPU with 10 bits if TF32 is allowed.
    """
    if dtype in (torch.float16, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        return eps / 8, 32 * eps
    if device.type == "cuda":
        return 1e-5, 2e-2
    return 1e-5, 1e-4


@contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    """Turn dropout off; restore modes, buffers and random numbers afterwards."""
    # Forwards may count tokens or make tables, which are buffers.
    modes = [(m, m.training) for m in root.modules()]
    buffers = []
    for m in root.modules():
        buffers += [(m, name, x, x.clone()) for name, x in m._buffers.items() if x is not None]

    # Layers may draw random numbers also in evaluation mode.
    cuda = [x.device for x in root.parameters() if x.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=cuda):
        for m, _ in modes:
            m.training = False
        try:
            yield
        finally:
            for m, mode in modes:
                m.training = mode
            for m, name, x, value in buffers:
                m._buffers[name] = x
                if not torch.equal(x, value):
                    x.copy_(value)
