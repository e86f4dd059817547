"""A module as `(apply, params)`: a function of parameters and a pack."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rft_fn import logprob, tree
from rft_fn.loss.evaluate import REMEDY
from rft_fn.model import attention, quantize, router, routing, teacher
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.copies import to_device
from rft_fn.model.dropout import checkpointed, disable_dropout
from rft_fn.model.forward import POSITIONS, run
from rft_fn.model.lora import require_plain_adapters
from rft_fn.model.lora_experts import compute_in_groups
from rft_fn.model.materialize import materialize
from rft_fn.model.packing_probe import Found, Question
from rft_fn.model.parts import find
from rft_fn.model.reader import Reader, detect_packing
from rft_fn.model.residence import Residence
from rft_fn.types import Apply, Packed, Sampling, TokenOut

__all__ = [
    "Scorer", "applied", "attach_teacher", "bind", "own_parameters", "read_field", "require_fields",
    "require_own", "revealed", "score", "scorer_of", "to_params_device", "wrap_for_training",
]  # fmt: skip


# ---------- a causal language model whose forward takes tokens and targets and gives log-probs


class Scorer(Reader):
    """A causal language model that gives the log-probs of a pack's targets.

    If a pack has `words` [T, K], the output also has the log-probs of K more words per target. The head
    runs inside this forward, so that a sharded model has its weight gathered there. The `fused` head never
    holds logits [T, V]. Whole logits are for top_p and top_k (log-probs are of the cut distribution, which
    was sampled from), and for models that scale or cap their logits, which a probe finds. With `aux` the
    output has the balance of experts; ValueError for a model without any. A pack with a `routing` goes to
    the experts that it names.
    """

    def __init__(
        self,
        lm: nn.Module,
        sampling: Sampling,
        *,
        entropy: bool = False,
        squares: bool = False,
        aux: bool = False,
        fused: bool = True,
        chunk_size: int = 0,
    ):
        super().__init__()
        if not sampling.temperature > 0:
            raise ValueError(f"temperature: expected > 0 for training log-probs, got {sampling.temperature}")
        self.lm = lm
        self.parts = find(lm)
        self.sampling = sampling
        self.entropy = entropy
        self.squares = squares
        self.chunk_size = chunk_size
        self.fused = fused and not sampling.truncates and self.parts.has_linear_head
        self.balance = router.Balance(self.parts.model) if aux else None
        self.following: int | None = None  # routers that take the routing of packs, once one had some
        self.asked: teacher.Revealed | None = None  # of a teacher, within `revealed`
        self.teachers: tuple[teacher.Teacher, ...] = ()  # of a student, from `attach_teacher`
        attention.turn_on(lm)

    def answer(self, asked: Question) -> Found:
        if self.balance is None:
            return super().answer(asked)
        with self.balance.listen() as heard:
            found = super().answer(asked)
        self.balance.settle(heard)
        return found

    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        if pack.routing is not None:
            if self.following is None:
                self.following = routing.follow(self.parts.model)
            routing.check_shape(pack.routing, self.following, self.parts.model)
        if self.balance is None:
            return self._scored(pack, bounds)
        with self.balance.listen() as heard:
            out = self._scored(pack, bounds)
        aux, share = (torch.where(pack.mask, x, 0) for x in self.balance(heard, pack, bounds))
        return tree.replace(out, aux=aux, expert_share=share)

    def _scored(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        out = self._fused(pack, bounds) if self.fused else self._whole(pack, bounds)
        return tree.replace(out, logp=torch.where(pack.mask, out.logp, 0))

    def _fused(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        mode = self.mode or POSITIONS
        hidden = run(self.parts.decoder, pack, bounds, mode=mode, share=self.shared).last_hidden_state[0]
        floats = max(len(hidden), 1) * self.chunk_size
        own = _temperature(pack)
        head = self.parts.head
        temperature = self.sampling.temperature if own is None else own
        workspace_mb = floats * 4 / 2**20 if floats else None
        out = logprob.linear_logprob(
            hidden,
            head.weight,
            torch.where(pack.mask, pack.target, -100),  # the head does no work for prompts
            temperature=temperature,
            bias=head.bias,
            entropy=self.entropy,
            squares=self.squares,
            words=pack.words,
            workspace_mb=workspace_mb,
        )

        def over(fn: Callable[..., Tensor], rows: Tensor, *data: Tensor) -> Tensor:
            own = temperature
            return logprob.linear_rows(
                fn,
                hidden[rows],
                head.weight,
                *data,
                temperature=own[rows] if isinstance(own, Tensor) and own.dim() else own,
                bias=head.bias,
                workspace_mb=workspace_mb,
            )

        return self._with_teacher(out, pack, hidden, over)

    def _with_teacher(
        self, out: TokenOut, pack: Packed, hidden: Tensor | None, over: teacher.Over
    ) -> TokenOut:
        """Add what a teacher is asked for, or a student's comparison with its teachers."""
        if self.asked is not None:
            return tree.replace(out, **teacher.reveal(self.asked, hidden, self.parts.head, pack, over))
        if self.teachers:
            return tree.replace(out, **teacher.compare(self.teachers, pack, over))
        return out

    def _whole(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        logits = run(self.lm, pack, bounds, mode=self.mode or POSITIONS).logits[0]
        z = logprob.process_logits(
            logits,
            self.sampling,
            keep=pack.target,
            temperature=_temperature(pack),
            kept=pack.kept,
        )
        # in place, without a copy: a where on only the results leaves 0 * inf in the gradient
        z = z.masked_fill_(~pack.mask[:, None], 0)

        entropy = words_logp = None
        if self.entropy:
            logp, entropy = logprob.log_probs_and_entropy(z, pack.target)
            entropy = torch.where(pack.mask, entropy, 0)
        else:
            logp = logprob.log_probs_from_logits(z, pack.target)
        p2 = torch.where(pack.mask, z.detach().softmax(-1).square().sum(-1), 0) if self.squares else None
        if pack.words is not None:
            words_logp = torch.where(pack.mask[:, None], z.log_softmax(-1).gather(-1, pack.words), 0)
        out = TokenOut(logp=logp, entropy=entropy, sum_p2=p2, words_logp=words_logp)

        def over(fn: Callable[..., Tensor], rows: Tensor, *data: Tensor) -> Tensor:
            return fn(z[rows].log_softmax(-1), *data)

        return self._with_teacher(out, pack, None, over)


def scorer_of(apply: Apply) -> Scorer:
    """Return the `Scorer` that a bound language model is; ValueError for an apply of another model."""
    residence = getattr(inspect.unwrap(apply), "residence", None)
    for part in () if residence is None else residence.root.modules():
        if isinstance(part, Scorer):
            return part
    raise ValueError(f"apply: expected that of a bound language model, got {type(apply).__name__}")


@contextmanager
def revealed(apply: Apply, *, top_k: int = 0) -> Iterator[teacher.Revealed]:
    """Have a bound language model give its distributions in the block, as the teacher of another.

    Its outputs have `hidden` [T, D], and the value of the block the `head` that reads them; with `top_k` they
    have `top_words` [T, K] and `words_logp` [T, K] instead, in descending order. `st.score` gives them as
    [B, S, ...] by `fields`. ValueError for another model.
    """
    scorer = scorer_of(apply)
    scorer.asked = asked = teacher.Revealed(top_k)
    try:
        yield asked
    finally:
        scorer.asked = None


def attach_teacher(apply: Apply, *teachers: teacher.Teacher) -> None:
    """Have a bound language model compare itself with teachers: `out.divergence` and `out.agreement` [T].

    For packs with a teacher's hidden states as `extra["teacher_hidden"]`, or its likeliest words [T, K] as
    `extra["teacher_words"]` with `extra["teacher_logp"]`. With several teachers `extra["teacher_number"]` [T]
    has the number of each token's. Without any the model is alone again. ValueError for another model.
    """
    scorer_of(apply).teachers = teachers


def _temperature(pack: Packed) -> Tensor | None:
    """Return the temperature of each target [T], 1 outside mask; None where it is the bound one."""
    return None if pack.temperature is None else torch.where(pack.mask, pack.temperature, 1)


def wrap_for_training(
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    squares: bool = False,
    aux: bool = False,
    fused: bool = True,
    chunk_size: int = 0,
    fast_linear: bool = True,
    share_prefixes: bool = True,
) -> nn.Module:
    """Return the module as one that maps a Packed to a TokenOut.

    A causal language model of transformers, with or without peft adapters, inside a `Scorer`, its dropout
    off; any other module itself. With `fast_linear` its linear layers are `quantize.FastLinear`;
    with `share_prefixes` tokens that begin alike in a pack are computed once, if `reader.detect_packing`
    finds that this changes nothing. ValueError for `aux` of a module without routers of experts, and for
    adapters that are more than LoRA.
    """
    quantize.set_fast(module, fast_linear)
    router.without_groups(module)
    compute_in_groups(module)
    if not hasattr(module, "get_output_embeddings"):
        if aux:
            raise ValueError(f"aux: expected False for {type(module).__name__}, whose TokenOut is its own")
        if isinstance(module, Reader):
            module.shared = share_prefixes
        return module
    require_plain_adapters(module)
    disable_dropout(module)
    scorer = Scorer(
        module,
        sampling or Sampling(),
        entropy=entropy,
        squares=squares,
        aux=aux,
        fused=fused,
        chunk_size=chunk_size,
    )
    # the balance of experts counts every token of every sequence
    scorer.shared = share_prefixes and scorer.fused and not aux
    return scorer


# ---------- a module as `(apply, params)`: a function of parameters and a pack


FIELDS = tuple(f.name for f in fields(TokenOut))  # type: ignore[arg-type]


def own_parameters(module: nn.Module) -> tree.Named:
    """Return the trainable parameters of a module, by its own names."""
    return tree.Named((name, p) for name, p in module.named_parameters() if p.requires_grad)


def require_own(own: Mapping[str, Tensor], params: Mapping[str, Tensor], why: str) -> None:
    """Raise ValueError, with a remedy `why`, for `params` that are not a module's own parameters."""
    if any(params[name] is not p for name, p in own.items()):
        raise ValueError(f"params: expected this module's own, got others: {why}")


@dataclass(frozen=True, eq=False)
class ModuleApply:
    """The apply of a plain module, by torch.func.functional_call."""

    root: nn.Module  # maps a Packed to a TokenOut
    prefix: str  # of the parameters' names inside of root
    own: tree.Named
    device: torch.device | None  # where packs of a frozen model belong
    checkpointed: bool  # then a second forward reads the module's own parameters
    residence: Residence

    def __call__(self, params: tree.Named, pack: Packed) -> TokenOut:
        self.residence.require_device("apply")
        for name, p in params.items():
            if hasattr(p, "device_mesh") and not hasattr(self.own.get(name), "device_mesh"):
                raise ValueError(
                    f"params: expected plain tensors, got {name} in the shards of FSDP2; score them with the "
                    "apply of their own st.init, or model.assign(params, st.export(state)) here"
                )
        if self.checkpointed:
            require_own(
                self.own,
                params,
                "with gradient checkpointing it takes no others; load it with gradient_checkpointing=False "
                "to call it with others",
            )
        return functional_call(self.root, {self.prefix + name: p for name, p in params.items()}, (pack,))


def bind(
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    squares: bool = False,
    aux: bool = False,
    fused: bool = True,
    chunk_size: int = 0,
    fast_linear: bool = True,
    share_prefixes: bool = True,
) -> tuple[Apply, tree.Named]:
    """Return (apply, params) of a module: `apply(params, packed) -> TokenOut`, params the trainable ones.

    A causal language model of transformers (with or without peft adapters) is wrapped in a `Scorer`; any
    other module must itself map a Packed to a TokenOut. `params` have the module's own names. `apply` is
    torch.func.functional_call: it works with any parameters, under torch.func.grad and vmap. With gradient
    checkpointing it refuses all but the module's own, because the second forward would read those.

    Log-probs are at `sampling`'s temperature (or at the pack's, of rows with their own), cut like its top_p /
    top_k, and 0 outside mask. `squares` asks for `TokenOut.sum_p2`, `aux` for how evenly experts are used,
    see `model.router`; ValueError for a model without any. `fused` runs
    the head without logits [T, V], over `chunk_size` columns of the vocabulary at a time (0: chosen per
    device). `fast_linear`: large linear layers of float32 are oneDNN's, on a CPU where MKL would be slow.
    `share_prefixes`: tokens of a pack that begin alike, as the responses to one prompt do, are computed
    once.
    """
    root = wrap_for_training(
        materialize(module),
        sampling=sampling,
        entropy=entropy,
        squares=squares,
        aux=aux,
        fused=fused,
        chunk_size=chunk_size,
        fast_linear=fast_linear,
        share_prefixes=share_prefixes,
    )
    detect_packing(root)
    return applied(root, module)


def applied(root: nn.Module, module: nn.Module) -> tuple[ModuleApply, tree.Named]:
    """Return (apply, params) of a module and the root that `wrap_for_training` made of it."""
    first = next(module.parameters(), None)
    own = own_parameters(module)
    apply = ModuleApply(
        root=root,
        prefix="" if root is module else "lm.",
        own=tree.Named(own),  # a copy: the caller may change the other one
        device=None if first is None else first.device,
        checkpointed=bool(checkpointed(module)),
        residence=Residence(root, module),
    )
    return apply, own


@torch.no_grad()
def score(apply: Apply, params: tree.Named, packs: Sequence[Packed], *, field: str = "logp") -> list[Tensor]:
    """Return the log-probs [T] of each pack, without gradient: old and reference log-probs.

    `field` names another output of the model: entropy, value, words_logp [T, K] ... `packing.unpack` makes
    them [B, S]; `Strategy.score` does both, over all ranks, for several fields in one pass. ValueError for
    a field that TokenOut or the model does not have.
    """
    require_fields([field])
    out = []
    for pack, moved in zip(packs, to_params_device(apply, params, packs)):
        out.append(read_field(apply(params, moved), field).to(pack.tokens.device))
    return out


def require_fields(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is no field of TokenOut."""
    for name in names:
        if name not in FIELDS:
            raise ValueError(f"field: expected one of {', '.join(FIELDS)}, got {name!r}")


def read_field(out: TokenOut, name: str) -> Tensor:
    """Return one output of a model. ValueError if it is absent, with what makes the model give it."""
    found = getattr(out, name)
    if found is None:
        raise ValueError(f"TokenOut.{name}: expected a value, got None; {REMEDY[name]}")
    return found


def to_params_device(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Packed]:
    """Return the packs on the device of the parameters, or of a frozen model's `apply`."""
    first = next(iter(params.values()), None)
    device = getattr(apply, "device", None) if first is None else first.device
    if device is None:
        return list(packs)
    return [to_device(pack, device) for pack in packs]
