"""What is asked of a model when it is bound, with a few random tokens, instead of being kept as a list.

Does a row of a pack depend on the rows before it, and are the logits head(hidden) and nothing more? The
answers decide how packs run (`Reader.way`) and whether the head can be fused.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import tree
from rft_fn.model import attention
from rft_fn.model.text import ALONE, BOUNDARIES, POSITIONS, decoder, inner, run, text_inputs
from rft_fn.types import Packed, TokenOut

__all__ = ["Found", "Question", "Reader", "assume", "rounding", "settle", "usual_tokens"]

FRONT = (6, 5, 4)  # tokens of the rows that change
BEHIND = (5, 4, 6)  # of those that must not: each stands right after one that does


@dataclass(frozen=True)
class Question:
    """Packs of random tokens that go through the forward of a `Reader`, which measures them."""

    pack: Packed  # rows of FRONT and BEHIND in turn
    other: Packed  # the same rows of BEHIND, other tokens in those of FRONT
    alone: Packed  # the first row of BEHIND
    way: str


@dataclass(frozen=True)
class Found:
    """What a `Question` measured, in float32 numbers []. As tensors, for DeepSpeed looks into outputs."""

    leak: Tensor  # largest change of a hidden state behind other rows, relative to it
    shift: Tensor  # mean difference of the hidden states in a pack and alone, relative to them
    most_leak: Tensor  # the largest leak that is rounding
    most_shift: Tensor
    plain: Tensor  # 1 where logits are head(hidden), else 0

    def fits(self) -> bool:
        """Whether sequences of a pack are what they are alone."""
        return bool(self.leak <= self.most_leak) and bool(self.shift <= self.most_shift)


class Reader(nn.Module):
    """A text model inside a forward that maps a Packed to a TokenOut. Subclasses have `read`, for a pack as
    their model takes it, and `body`, what gives hidden states.

    `way` is how a pack of several sequences is run, None until `settle` has asked. A model that mixes the
    sequences of a pack gets them one after the other where they belong together (`pack.unit`), for then every
    process has equally many; ValueError for any other pack of several.
    """

    sequence: Any = None  # the axis over which the tokens of a pack are split, if they are
    way: str | None = None
    fused: bool = False

    body: Callable[[], nn.Module]  # the module whose output has the hidden states
    # (pack, attention.SequenceBounds | None) -> values [T], 0 outside mask
    read: Callable[[Packed, Any], TokenOut]

    def forward(self, pack: Packed) -> TokenOut:
        if isinstance(pack, Question):
            return measure(self, pack)  # type: ignore[return-value]
        if self.way is None:
            settle(self, call=partial(measure, self))
        if self.way == ALONE and pack.num_seqs > 1:
            return self._in_turn(pack)
        if self.sequence is None:
            return self.read(pack, None)
        out = self.read(*self.sequence.split(pack))
        return self.sequence.join(out, pack.tokens.shape[0])

    def _in_turn(self, pack: Packed) -> TokenOut:
        """Each sequence of a unit by itself; an empty one as one token, so that every unit is equally many
        forwards on every process."""
        if pack.num_seqs != pack.unit:
            raise ValueError(
                f"pack: expected one sequence for {type(self.body()).__name__}, which mixes the sequences of "
                f"a pack, got {pack.num_seqs}; cut the batch by st.shard after st.init and st.bind, or by "
                "packing.shard(..., most=1)"
            )
        size = torch.bincount(pack.seq.cpu(), minlength=pack.num_seqs)
        ends = size.cumsum(0).tolist()
        outs = []
        for start, end in zip([0, *ends], ends):
            # an empty one at the end of the pack repeats its last token
            start = min(start, pack.tokens.shape[0] - 1)
            outs.append(self.read(_alone(pack, start, max(end, start + 1)), None))
        whole = tree.map(lambda *x: torch.cat(x), *outs)
        real = torch.repeat_interleave(size > 0, size.clamp(min=1)).to(pack.seq.device)
        return tree.map(lambda x: x[real], whole)


def _alone(pack: Packed, start: int, end: int) -> Packed:
    """The tokens of one sequence of a pack, as a pack."""
    part = tree.map(lambda x: x[start:end], tree.replace(pack, media=None))
    return tree.replace(part, seq=torch.zeros_like(part.seq), media=pack.media, num_seqs=1, rows=(), unit=1)


def settle(
    root: nn.Module,
    *,
    call: Callable[[Question], Found] | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> None:
    """Ask the model of a `Reader`, which has its weights, how it takes packs; nothing for any other module.

    Three short forwards, six for a model that mixes sequences. `call` is the module as it is run (under ZeRO
    by its engine), `agree(x)` whether x is true on every process. ValueError for a model that cannot share
    its tokens with other processes although it shall.
    """
    if not isinstance(root, Reader):
        return
    if any(p.is_meta for p in root.parameters()):
        assume(root)
        return
    call = call or root
    agree = agree or bool
    with warnings.catch_warnings(record=True) as heard:
        root.way = _way(root, call, agree)
    if root.way == ALONE:  # what was heard was of packs that it never gets
        attention.warn_once(
            f"packs: {type(root.body()).__name__} mixes the sequences of a pack, it gets one at a time"
        )
    else:
        for each in heard:
            warnings.warn(each.message, each.category, stacklevel=3)
    if root.sequence is not None and root.way != POSITIONS:
        raise ValueError(f"sp_size: expected 1 for {type(root.body()).__name__}: its layers mix all tokens")


def _way(root: Reader, call: Callable[[Question], Found], agree: Callable[[bool], bool]) -> str:
    """The first way in which packs are right; and on the way there whether the head is plain."""
    for way in (POSITIONS, BOUNDARIES):
        found = call(_question(root, way))
        if way == POSITIONS:
            root.fused = root.fused and agree(bool(found.plain))
        if agree(found.fits()):
            return way
    return ALONE


@torch.no_grad()
def assume(root: nn.Module) -> None:
    """What can be told of a `Reader` on the meta device, where nothing can be compared: packs as usual, and
    the head by whether the logits are the very tensor that it made."""
    if not isinstance(root, Reader):
        return
    root.way = POSITIONS
    if root.fused:
        lm = copy.deepcopy(root.lm).float()  # of 16 bits the logits are a copy in float32
        text = inner(lm).config.get_text_config()
        text._attn_implementation = "eager"  # its masks are made without values
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(lm.parameters()).device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        root.fused = _head(lm, inputs, _is)[1]


def _same(a: Tensor, b: Tensor, version: int) -> bool:
    """Whether a and b, in the type of a, are equal to the bit (NaN equals itself)."""
    return a.shape == b.shape and bool(((a == b.to(a.dtype)) | (a.isnan() & b.isnan())).all())


def _is(a: Tensor, b: Tensor, version: int) -> bool:
    """Whether a is b or a view of it, and not written to since b had this version."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and b._version == version


def _head(
    lm: Any, inputs: dict[str, Any], equal: Callable[[Tensor, Tensor, int], bool]
) -> tuple[Tensor, bool]:
    """(hidden states [T, D], whether logits are the head's output of these) for inputs of one sequence."""
    seen: dict[str, Any] = {}

    def noted(x: Tensor) -> tuple[Tensor, int]:
        if equal is _same:  # by value, so what is written to later must not change it
            x = x.clone()
        return x, x._version

    def decoded(_: Any, __: Any, out: Any) -> None:
        seen["hidden"] = noted(out.last_hidden_state)

    def headed(_: Any, inputs: tuple, out: Tensor) -> None:
        seen["input"], seen["output"] = noted(inputs[0]), noted(out)

    handles = [
        decoder(lm).register_forward_hook(decoded),
        lm.get_output_embeddings().register_forward_hook(headed),
    ]
    try:
        logits = lm(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    if "hidden" not in seen:  # a model that calls a part of its decoder
        seen["hidden"] = noted(decoder(lm)(**inputs).last_hidden_state)
        if equal is _is:  # which is another tensor by now
            seen["hidden"] = seen["input"]
    plain = "output" in seen and equal(seen["input"][0], *seen["hidden"]) and equal(logits, *seen["output"])
    return seen["hidden"][0][0], plain


@torch.no_grad()
def measure(root: Reader, question: Question) -> Found:
    """The answer to a question, inside the forward of `root`, where a sharded model has its weights."""
    with _untouched(root):
        one, plain = _one(root, question.alone)
        try:
            pack, other = (_behind(_hidden(root, x, question.way)) for x in (question.pack, question.other))
        except (TypeError, ValueError, RuntimeError, AssertionError):
            # it takes no packs, or not the keywords: as far off as can be
            pack = [torch.zeros_like(one)]
            other = [torch.full_like(one, torch.inf)]
    leak = torch.stack([_relative(a, b).max() for a, b in zip(other, pack)]).max()
    shift = _relative(pack[0], one).mean()
    if not one.isfinite().all():  # weights that are not finite tell nothing
        leak = shift = torch.zeros_like(shift)
    bounds = [leak.new_tensor(x) for x in rounding(one.dtype, one.device)]
    return Found(leak, shift, *bounds, plain=leak.new_tensor(float(plain)))


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| / |b| of each token [T]."""
    return (a - b).float().norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-30)


def rounding(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """The largest leak and shift that rounding makes.

    The leak compares two packs of the same shape, whose rows are equal to the bit but where a layer sorts
    tokens by their values (experts). The shift compares two shapes: products of other sizes add up in another
    order, on a GPU with 10 bits where TF32 is allowed.
    """
    if dtype in (torch.float16, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        return eps / 8, 32 * eps
    if device.type == "cuda":
        return 1e-5, 2e-2
    return 1e-5, 1e-4


def _one(root: Any, pack: Packed) -> tuple[Tensor, bool]:
    """(the hidden states [T, D] of a pack of one sequence, whether the head is plain); of a model without a
    decoder its logits."""
    if not root.fused:
        return _hidden(root, pack, POSITIONS), False
    return _head(root.lm, text_inputs(root.lm, pack), _same)


def _hidden(root: Reader, pack: Packed, way: str) -> Tensor:
    out = run(root.body(), pack, way=way)
    hidden = getattr(out, "last_hidden_state", None)
    return out.logits[0] if hidden is None else hidden[0]


def _behind(x: Tensor) -> list[Tensor]:
    """The rows of BEHIND in what a pack of both gave."""
    sizes = [n for pair in zip(FRONT, BEHIND) for n in pair]
    return list(x.split(sizes))[1::2]


def _pack(tokens: Tensor, sizes: list[int]) -> Packed:
    device = tokens.device
    seq = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    pos = torch.cat([torch.arange(n) for n in sizes]).to(device)
    number = torch.zeros(len(tokens), device=device)
    mask = torch.ones(len(tokens), dtype=torch.bool, device=device)
    same: dict[str, Any] = {"tokens": tokens, "target": tokens, "pos": pos, "seq": seq, "mask": mask}
    return Packed(**same, old_logp=number, adv=number, w=number, num_seqs=len(sizes))


def usual_tokens(config: Any) -> Tensor:
    """Ids of the vocabulary that mean nothing special, of the text config of a model."""
    special = {x for name, x in vars(config).items() if name.endswith("_token_id") and isinstance(x, int)}
    return torch.tensor([i for i in range(min(config.vocab_size, 4096)) if i not in special] or [0])


def _question(root: Reader, way: str) -> Question:
    """The same tokens on every process."""
    usual = usual_tokens(root.body().config.get_text_config())  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(0)
    device = next(root.parameters()).device

    def draw(sizes: tuple[int, ...]) -> list[Tensor]:
        at = torch.randint(len(usual), (sum(sizes),), generator=generator)
        return list(usual[at].split(list(sizes)))

    behind, first, second = draw(BEHIND), draw(FRONT), draw(FRONT)

    def packed(front: list[Tensor]) -> Packed:
        rows = [x for pair in zip(front, behind) for x in pair]
        return _pack(torch.cat(rows).to(device), [len(x) for x in rows])

    alone = _pack(behind[0].to(device), [BEHIND[0]])
    return Question(packed(first), packed(second), alone, way)


@contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    """The module without dropout; afterwards its modes, its buffers and the random numbers are what they
    were."""
    modes = [(m, m.training) for m in root.modules()]
    buffers = [
        (m, name, x, x.clone()) for m in root.modules() for name, x in m._buffers.items() if x is not None
    ]
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
