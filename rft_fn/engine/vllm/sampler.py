"""Requests to vLLM, one for each row, and the loop that answers them within a time limit."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.engine.prompt_media import Shown
from rft_fn.engine.requests import BadRequest, Response, Stop
from rft_fn.engine.vllm.surroundings import kept_random, part
from rft_fn.model.media_inputs import placeholders
from rft_fn.model.parts import expected_counts
from rft_fn.types import Sampling

__all__ = ["Asked", "Fields", "Sampler", "check_family", "fields_of", "request"]


# ---------- requests to vLLM, one for each row, and the loop that answers them within a time limit


class Asked(NamedTuple):
    """One row to be sampled."""

    prompt: list[int]
    key: int  # seeds vLLM's generator, which keeps 32 bits of it on a CPU
    max_new: int
    shown: Shown | None = None  # its media


class Sampler:
    """Gives requests to an engine of vLLM and steps it until all are answered."""

    def __init__(
        self, engine: Any, device: torch.device, timeout: float, request: Callable[[Asked], dict[str, Any]]
    ):
        self.engine = engine
        self.request = request  # makes vLLM's input of a row
        self.device = device
        self.timeout = timeout
        self.asked = 0  # requests so far, by which each has a name of its own
        self.cached = 0  # tokens of the prompts of the last call that were found in the cache

    def responses(self, rows: Sequence[Asked], sampling: Sampling, stop: Stop) -> list[Response]:
        """The response to each row.

        One request per row, so that each has its own seed; the prompt that rows share is read once, as far as
        it fills whole blocks of the cache.
        """
        options = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sorted(stop.ids),
            "ignore_eos": True,  # the ends are among the tokens above
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            "output_kind": _kind(every_step=bool(stop.texts)),
        }
        make = part().SamplingParams
        params = [make(seed=row.key, max_tokens=row.max_new, **options) for row in rows]
        cut: dict[int, Response] = {}

        def ended(i: int, out: Any) -> bool:
            """Whether the last token of row i completes a text: vLLM's own search decodes in another way."""
            found = out.outputs[0]
            if not stop.texts or not stop.ends(found.token_ids):
                return False
            cut[i] = _response(found)._replace(ended=True)
            return True

        answers = self._answers(rows, params, ended)
        found = [cut.get(i) or _response(answers[i].outputs[0]) for i in range(len(rows))]
        self.cached = sum(answers[i].num_cached_tokens or 0 for i in range(len(rows)))
        return found

    def scores(self, rows: Sequence[Asked]) -> list[list[float]]:
        """The log-prob of each token of each row under the model's softmax; 0 for the first."""
        how = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        params = [part().SamplingParams(**how) for _ in rows]
        answers = self._answers(rows, params, lambda i, out: False)
        scored = []
        for i, row in enumerate(rows):
            # beside the token itself vLLM lists none, or the likeliest
            after = zip(row.prompt[1:], answers[i].prompt_logprobs[1:], strict=True)
            scored.append([0.0, *[entry[token].logprob for token, entry in after]])
        return scored

    def _answers(
        self, rows: Sequence[Asked], params: Sequence[Any], ended: Callable[[int, Any], bool]
    ) -> Mapping[int, Any]:
        """vLLM's output for each request. TimeoutError when the time limit has passed between two steps."""
        limit = time.monotonic() + self.timeout
        numbers: dict[str, int] = {}
        answers: dict[int, Any] = {}
        with self._stepping():
            for i, (row, how) in enumerate(zip(rows, params, strict=True)):
                name = f"{self.asked + i}"
                numbers[name] = i
                self.engine.add_request(name, self.request(row), how)
            self.asked += len(rows)

            # after an error of its own vLLM steps for ever without an answer
            while len(answers) < len(rows):
                if time.monotonic() > limit:
                    raise TimeoutError(
                        f"engine vllm: expected {len(rows)} responses within {self.timeout:g} s, got "
                        f"{len(answers)}; raise engine_timeout, or build another engine"
                    )
                for out in self.engine.step():
                    i = numbers[out.request_id]
                    if i in answers:
                        continue
                    if ended(i, out):
                        answers[i] = out
                        if not out.finished:
                            self.engine.abort_request([out.request_id])
                    elif out.finished:
                        answers[i] = out
        return answers

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Keep the trainer's generators; on a CPU compile nothing, which takes a C++ compiler."""
        stance = "default"
        if self.device.type == "cpu":
            stance = "force_eager"
        with kept_random(), torch.compiler.set_stance(stance):
            yield


def _kind(*, every_step: bool) -> Any:
    """When vLLM reports a request: at its end, or at every step with all of its tokens."""
    kinds = part("sampling_params").RequestOutputKind
    if every_step:
        return kinds.CUMULATIVE
    return kinds.FINAL_ONLY


def _response(found: Any) -> Response:
    """The tokens of one finished request. RuntimeError where vLLM has given it up."""
    if found.finish_reason not in ("stop", "length", None):
        raise RuntimeError(f"engine vllm: expected a response, got one that ended by {found.finish_reason}")
    tokens = list(found.token_ids)
    logp = [entry[token].logprob for token, entry in zip(tokens, found.logprobs, strict=True)]
    return Response(tokens, logp, found.finish_reason == "stop")


# ---------- prompts with media as vLLM takes them after its own processor


# where transformers 5 puts what stood beside the head before
NEW_NAMES = ("model.language_model.", "model.visual.", "model.audio_tower.", "model.vision_tower.")

Fields = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]
"""How the tensors of some media are cut into items: vLLM's field of each name."""


def check_family(model: nn.Module) -> None:
    """Raise a ValueError for a model with media that vLLM cannot load.

    It lacks the model, cannot import it, or knows its weights by other names. `model` may be without weights.
    """
    name = type(model).__name__
    line = f"engine vllm: expected a model with media that vLLM can sample from, got {name}"
    found = part("model_executor.models").ModelRegistry.models.get(name)
    if found is None:
        raise ValueError(f"{line}, which it does not have; sample with --engine-type hf")
    try:
        own = found.load_model_cls()
    except ImportError as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{line}, whose module cannot be imported: {said}; sample with --engine-type hf"
        ) from None

    # vLLM reads the files, whose names are older, and later the trainer's names
    names = [own_name for own_name, _ in model.named_parameters()]
    renamed = next((x for x in names if x.startswith(NEW_NAMES)), None)
    if renamed and getattr(own, "hf_to_vllm_mapper", None) is None:
        raise ValueError(
            f"{line}, which has no place for {renamed}: it has no mapper for names of transformers 5; "
            "sample with --engine-type hf"
        )


def fields_of(config: Any) -> Fields:
    """The fields of the model of vLLM's config. ImportError where vLLM's own processor cannot be made."""
    processor = part("multimodal").MULTIMODAL_REGISTRY.create_processor(config)
    return lambda tensors: processor._get_mm_fields_config(tensors, {})


def request(
    model: Any, fields: Fields, ids: Sequence[int], shown: Shown | None, dtype: torch.dtype
) -> dict[str, Any]:
    """vLLM's input of one prompt; its tokens alone where it has no media.

    `model` may be without weights. BadRequest for tensors that vLLM's model does not take.
    """
    if shown is None or shown.tensors is None:
        return {"prompt_token_ids": list(ids)}
    tensors = {name: _typed(x, dtype) for name, x in shown.tensors.items()}
    taken = fields(tensors)
    lost = tensors.keys() - taken.keys()
    if lost:
        raise BadRequest(
            f"media: expected tensors that vLLM's {type(model).__name__} takes ({', '.join(sorted(taken))}), "
            f"got {', '.join(sorted(lost))}; sample with the hf engine"
        )
    items = part("multimodal.inputs").MultiModalKwargsItems.from_hf_inputs(tensors, taken)

    # one hash for each item: vLLM keeps what a tower has made of it, and the cache of a prefix, by them
    whole = _digest(tensors)
    hashes = {kind: [f"{whole}-{kind}-{i}" for i in range(len(own))] for kind, own in items.items()}
    ranges = {kind: _ranges(model, kind, len(own), ids, shown) for kind, own in items.items()}
    return part("inputs.engine").mm_input(list(ids), items, hashes, ranges)


def _typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_floating_point():
        return x.to(dtype)
    return x


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and numbers."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        found.update(x.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _ranges(model: Any, kind: str, items: int, ids: Sequence[int], shown: Shown) -> list[Any]:
    """The places of each of the items of a kind: from its first placeholder to its last."""
    tokens = {token for token, each in placeholders(model.config).items() if each == kind}
    at = [t for t, token in enumerate(ids) if token in tokens and not shown.sampled[t]]
    tensors = shown.tensors or {}
    counts = {name: [1] * items for name in tensors}
    sizes, _ = expected_counts(model, kind, tensors, counts, [len(at) // items] * items)
    if sum(sizes) != len(at):
        raise BadRequest(f"media: expected {sum(sizes)} {kind} placeholders for {items} items, got {len(at)}")
    return [_range(own) for own in _split(at, sizes)]


def _split(at: Sequence[int], sizes: Collection[int]) -> list[list[int]]:
    """The places of each item."""
    found, first = [], 0
    for size in sizes:
        found.append(list(at[first : first + size]))
        first += size
    return found


def _range(at: Sequence[int]) -> Any:
    """The range of one item; what stands between its placeholders (ends of rows, say) is no place."""
    make = part("multimodal.inputs").PlaceholderRange
    length = at[-1] + 1 - at[0]
    if length == len(at):
        return make(offset=at[0], length=length)
    places = torch.zeros(length, dtype=torch.bool)
    places[torch.tensor(at) - at[0]] = True
    return make(offset=at[0], length=length, is_embed=places)
