"""Models that map a Packed to a TokenOut, and how packs run in them."""

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rft_fn import tree
from rft_fn.model import attention, head_probe, packed_attention, packed_states, packing_probe
from rft_fn.model.bounds import SequenceAxis, SequenceBounds
from rft_fn.model.forward import (
    BOUNDARIES,
    MASKED_ROWS,
    ONE_SEQUENCE,
    POSITIONS,
    ROWS,
    forget_lengths,
    rope_grows,
    rope_switch,
)
from rft_fn.model.packing_probe import Found, Question
from rft_fn.model.parts import Parts, find, inside_adapters, text_config
from rft_fn.model.placeholders import placeholders, sees_or_hears
from rft_fn.model.router import Balance
from rft_fn.model.text_inputs import cut_before
from rft_fn.types import Packed, TokenOut

__all__ = ["Reader", "assume_packing", "detect_packing", "split_over"]


class Reader(nn.Module, ABC):
    """A text model inside a forward that maps a Packed to a TokenOut.

    Subclasses set `parts`, implement `read` for a pack as their model takes it, and `finish` for outputs
    that depend on whole sequences. `mode` is how a pack of several sequences runs, None until
    `detect_packing` ran. A model that mixes the sequences of a pack gets them one after the other if they
    belong together (`pack.unit`), because then every process has equally many; ValueError for any other
    pack of several.

    After `switch` tokens some models use other rotary factors for the whole sequence (LongRoPE). A row
    that was sampled (its `old_logp` is not 0) crossed the switch on the way: its tokens before it are
    scored as they were drawn, by the factors of short sequences, and those after it by the others. Rows
    that were not sampled are scored as transformers reads them, by the factors of their whole length. So
    are all rows of a model whose factors grow with the length, which is sampled only up to where they do.
    """

    parts: Parts
    mode: str | None = None
    fused: bool = False  # whether the head runs without logits
    shared: bool = False  # whether tokens of a pack that begin alike are computed once
    switch: int | None = None  # tokens after which a sequence has other rotary factors
    grows: bool = False  # whether the rotary factors of a long sequence depend on its very length
    balance: Balance | None = None  # how evenly its routers use the experts, where that is asked for

    @abstractmethod
    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        """Return values [T] of a pack, 0 outside mask; `bounds` are given for a part of a shared pack."""
        ...

    def finish(self, out: TokenOut, pack: Packed) -> TokenOut:
        """Return the outputs of a pack, given what `read` returned for its tokens."""
        return out

    def forward(self, pack: Packed | Question) -> TokenOut | Found:
        if isinstance(pack, Question):
            return self.answer(pack)
        if self.mode is None:
            detect_packing(self, call=self.answer)
        return self.finish(self._read_whole(pack), pack)

    def _read_whole(self, pack: Packed) -> TokenOut:
        by_length = self.grows or self.switch is not None
        if self.mode == ONE_SEQUENCE and (pack.num_seqs > 1 or by_length):
            return self._in_turn(pack)
        axis = self.parts.sequence
        if axis is None:
            return self.read(pack, None)
        part, bounds = axis.split(pack)
        return axis.join(self.read(part, bounds), pack.tokens.shape[0])

    def answer(self, asked: Question) -> Found:
        """Measure what a question asks for."""
        return packing_probe.measure(self, self.parts, asked, head=self.fused, share=self.shared)

    def _in_turn(self, pack: Packed) -> TokenOut:
        """Run each sequence of a unit by itself, an empty one as one token: equally many on each process."""
        name = type(self.parts.decoder).__name__
        # all of a pack of one list and placeholders, but of one that borrows media
        first = next(iter(pack.unit), 1)
        together = first if len(pack.rows) > first or _borrows(pack, first) else pack.num_seqs
        borrowed = pack.num_seqs - together
        if borrowed and pack.media is None:
            raise ValueError(
                f"pack: expected one sequence for {name}, which mixes the sequences of a pack, got "
                f"{pack.num_seqs}; cut the batch by st.shard after st.init and st.bind, or by "
                "packing.shard(..., most=1)"
            )
        # Empty sequences have no token, not even at the end of the pack.
        size = torch.bincount(pack.seq.cpu(), minlength=pack.num_seqs)
        ends = size.cumsum(0).tolist()
        if borrowed:
            # After the last sequence, which a causal model scores as if nothing followed.
            _check_borrowed(name, pack, size.tolist(), together)
            ends[together - 1 :] = ends[-1:]
        outs = []
        for k, (start, end) in enumerate(zip([0, *ends], ends)):
            owner = pack.num_seqs - 1 if borrowed and k == together - 1 else k
            # an empty one at the end of the pack repeats its last token
            start = min(start, pack.tokens.shape[0] - 1)
            outs.append(self._sequence(_alone(pack, owner, start, max(end, start + 1))))

        # The tokens that stood for empty sequences are no tokens of the pack.
        whole = tree.map(lambda *x: torch.cat(x), *outs)
        real = torch.repeat_interleave(size > 0, size.clamp(min=1)).to(pack.seq.device)
        return tree.map(lambda x: x[real], whole)

    def _sequence(self, pack: Packed) -> TokenOut:
        """Score a pack of one sequence; what was sampled before the switch without what comes after it."""
        size = len(pack.tokens)
        if self.grows:
            return tree.map(lambda x: x[:size], self.read(_with_last(pack), None))
        if self.switch is None:
            return self.read(pack, None)
        sampled = bool((pack.old_logp[: self.switch] != 0).any())
        early = self.switch if sampled and size > self.switch else 0
        # also where nothing is early: so every process has equally many forwards
        first = _alone(pack, 0, 0, max(early, 1))
        if not early:
            first = tree.replace(first, media=None)
        if not sampled and size == self.switch:  # the last target is a token of the row too
            pack = _with_last(pack)
        outs = self.read(first, None), self.read(pack, None)
        return tree.map(lambda a, b: torch.cat([a[:early], b[early:size]]), *outs)


def _with_last(pack: Packed) -> Packed:
    """Append the last target of a pack of one sequence as one more token, which is masked."""
    plain = tree.replace(pack, media=None)
    longer: Packed = tree.map(lambda x: torch.cat([x, x.new_zeros(1, *x.shape[1:])]), plain)
    tokens = torch.cat([pack.tokens, pack.target[-1:]])
    pos = torch.cat([pack.pos, pack.pos[-1:] + 1])
    return tree.replace(longer, tokens=tokens, pos=pos, media=pack.media)


def _borrows(pack: Packed, first: int) -> bool:
    """Return whether the first sequences of a pack lack a kind of media that later ones have."""
    media = pack.media
    owned = [] if media is None else [media.count(name) > 0 for name in media.tensors]
    return any(bool(x[first:].any()) and not bool(x[:first].any()) for x in owned)


def _check_borrowed(name: str, pack: Packed, size: list[int], together: int) -> None:
    """Raise ValueError for a borrowed row that cannot follow the last sequence of its pack."""
    assert pack.media is not None
    last = together - 1
    if len(pack.rows) > together or pack.num_seqs != together + 1:
        raise ValueError(
            f"pack: expected one sequence for {name}, which mixes the sequences of a pack, got "
            f"{pack.num_seqs}; cut the batch by st.shard after st.init and st.bind"
        )
    if int(pack.media.of[last]) >= 0 or not size[last]:
        raise ValueError(
            f"media: expected rows with media of each kind, or of none, for {name}, which mixes the "
            "sequences of a pack, got one that has some and borrowed a row for the others"
        )


def _alone(pack: Packed, k: int, start: int, end: int) -> Packed:
    """Return tokens of a pack as one sequence, with the media of sequence k."""
    part: Packed = tree.map(lambda x: x[start:end], tree.replace(pack, media=None))
    media = None if pack.media is None else pack.media.take([k])
    pos = torch.arange(end - start, device=part.pos.device)
    seq = torch.zeros_like(part.seq)
    return tree.replace(part, pos=pos, seq=seq, media=media, num_seqs=1, rows=(), unit=(1,))


def split_over(root: nn.Module, sequence: SequenceAxis) -> None:
    """Share the tokens of each pack of a bound model over a sequence axis.

    ValueError for a module with its own forward, and for one with attention that takes no boundaries.
    """
    if not isinstance(root, Reader):
        raise ValueError(
            f"sp_size: expected 1 for {type(root).__name__}: it is no language model of transformers"
        )
    model = root.parts.model
    why = attention.unfit_model(model)
    if why:
        raise ValueError(f"sp_size: expected 1 for {type(model).__name__}: {why}")
    root.parts = replace(root.parts, sequence=sequence)
    if root.parts.towers:
        cut_before(root.parts.text)


def detect_packing(
    root: nn.Module,
    *,
    call: Callable[[Question], Found] | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> None:
    """Ask the model of a `Reader` how it takes packs, and set its `mode`, `fused` and `shared`.

    The model must have its weights; a module that is no `Reader` is skipped. Takes five short forwards,
    up to eleven more for a model with states, and three for one whose layers change after some length. `call`
    is the module as it is run (under ZeRO by its engine), `agree(x)` whether x is true on every process.
    ValueError for a model that mixes sequences and was to share its tokens with other processes.
    """
    if not isinstance(root, Reader):
        return
    forget_lengths(root.parts.model)
    config = inside_adapters(root.parts.decoder).config
    root.switch = rope_switch(config)
    root.grows = rope_grows(config)
    # Without weights there is nothing to ask.
    if any(p.is_meta for p in root.parameters()):
        assume_packing(root)
        return

    whole = sees_or_hears(root.parts.decoder) or root.parts.sequence is not None
    if whole or attention.needs_all_tokens(root.parts.model):
        root.shared = False
    with warnings.catch_warnings(record=True) as heard:
        root.mode = _mode(root, call or root, agree or bool)

    # Warnings are about packs, so they matter only to a model that gets some.
    name = type(root.parts.decoder).__name__
    if root.mode == ONE_SEQUENCE:
        packed_attention.warn_once(f"packs: {name} mixes the sequences of a pack, it gets one at a time")
    elif root.mode != ROWS:  # which takes none of the masks that they tell of
        for each in heard:
            warnings.warn(each.message, each.category, stacklevel=3)
    if root.parts.sequence is not None and root.mode != POSITIONS:
        raise ValueError(f"sp_size: expected 1 for {name}: its layers mix all tokens")


def _mode(root: Reader, call: Callable[[Question], Found], agree: Callable[[bool], bool]) -> str:
    """Return the first mode in which packs are right.

    Also decides whether the head is fused, and whether tokens that begin alike are computed once. A model
    that sees or hears is asked once more, with placeholders; keywords for states are not for it, because
    its towers would get them too.
    """
    config = inside_adapters(root.parts.decoder).config
    device = next(root.parameters()).device
    with packing_probe.lowered(root.parts.decoder) as far:
        pass
    modes = [POSITIONS, BOUNDARIES]
    places = []
    if sees_or_hears(root.parts.decoder):
        # With token types an image is attended to in both directions. An attention that is not this library's
        # may then mix images of two sequences, and the question has no image that would show it.
        forward = type(inside_adapters(root.parts.model)).forward
        by_types = "token_type_ids" in inspect.signature(forward).parameters
        if by_types and attention.unfit_model(root.parts.model) is not None:
            return ONE_SEQUENCE
        modes = [POSITIONS]
        places = sorted(placeholders(config))[:1]
    if packed_states.separated(root.parts.text):
        modes += [ROWS, MASKED_ROWS]
    for mode in modes:
        attention.keep_apart(root.parts.model, mode == ROWS)
        found = call(packing_probe.question(config, device, mode))
        if mode == POSITIONS:
            fused = root.fused and agree(bool(found.plain))
            root.shared = root.shared and fused == root.fused  # else logits are of all tokens
            root.fused = fused
        shares = mode in (POSITIONS, ROWS) and agree(found.shares())
        fits = agree(found.fits())
        for place in places:
            fits = fits and agree(call(packing_probe.question(config, device, mode, place=place)).fits())
        if fits and far:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they would tell of thresholds that are not the model's
                found = call(packing_probe.question(config, device, mode, near=True))
                fits = agree(found.fits())
                shares = shares and agree(found.shares())
        if fits:
            break
    else:
        mode = ONE_SEQUENCE
        shares = False
    if mode not in (ROWS, MASKED_ROWS):
        packed_states.joined(root.parts.text)
    root.shared = root.shared and shares and packed_states.leaves_work(root.parts.text)
    return mode


@torch.no_grad()
def assume_packing(root: nn.Module) -> None:
    """Assume the usual packing mode without a probe, for a model on the meta device."""
    if not isinstance(root, Reader):
        return
    root.mode = POSITIONS
    if not root.fused:
        return
    # The head is plain if the logits are the very tensor that it made.
    # of 16 bits the logits are a copy in float32; transformers' own `float` refuses low-precision bases
    lm = nn.Module.float(copy.deepcopy(root.parts.model))
    text_config(lm)._attn_implementation = "eager"  # its masks are made without values
    ids: Tensor = torch.zeros(1, 2, dtype=torch.long, device=next(lm.parameters()).device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    root.fused = head_probe.plain_head(find(lm), inputs, head_probe.same_tensor)[1]
