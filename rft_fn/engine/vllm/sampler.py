"""Gives vLLM a request for each row, media included, and steps it until all are answered."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.engine.prompt_media import PromptMedia
from rft_fn.engine.requests import BadRequest, Response, Stop
from rft_fn.engine.vllm.surroundings import import_vllm, restore_random_state
from rft_fn.model.media_counts import expected_counts
from rft_fn.model.placeholders import placeholders
from rft_fn.types import Sampling

__all__ = ["Asked", "Fields", "Sampler", "check_family", "fields_of", "request"]


class Asked(NamedTuple):
    """A row to be sampled."""

    prompt: list[int]
    key: int  # seeds vLLM's generator, which keeps 32 bits of it on a CPU
    max_new: int
    media: PromptMedia | None = None
    temperature: float = 1.0


class Sampler:
    """Gives requests to an engine of vLLM and steps it until all are answered."""

    def __init__(
        self, engine: Any, device: torch.device, timeout: float, request: Callable[[Asked], dict[str, Any]]
    ):
        self.engine = engine
        self.request = request  # makes vLLM's input of a row
        self.device = device
        self.timeout = timeout
        self.adapter: Any = None  # vLLM's request of the adapters that answer, if some do
        self.asked = 0  # requests so far, which name the next one
        self.cached = 0  # tokens of the prompts of the last call that the cache had

    def responses(self, rows: Sequence[Asked], sampling: Sampling, stop: Stop) -> list[Response]:
        """Sample the response to each row.

        One request per row, so that each has its own seed; the prompt that rows share is read once, as far as
        it fills whole blocks of the cache.
        """
        kinds = import_vllm("sampling_params").RequestOutputKind
        params = [
            import_vllm().SamplingParams(
                seed=row.key,
                max_tokens=row.max_new,
                temperature=row.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=sorted(stop.ids),
                ignore_eos=True,  # the ends are among the tokens above
                logprobs=0,  # of the sampled token only
                detokenize=False,
                # at every step with all tokens, where a text may end a row
                output_kind=kinds.CUMULATIVE if stop.texts else kinds.FINAL_ONLY,
            )
            for row in rows
        ]
        cut: dict[int, Response] = {}
        looked = [0] * len(rows)  # at so many tokens

        def ended(i: int, out: Any) -> bool:
            """Note a text that a new token of row i completes: vLLM's search decodes in another way."""
            output = out.outputs[0]
            before, looked[i] = looked[i], len(output.token_ids)
            if not stop.texts:
                return False
            for size in range(before + 1, looked[i] + 1):  # drafts that were accepted come together
                if stop.ends(output.token_ids[:size]):
                    found = _response(output)
                    cut[i] = Response(found.tokens[:size], found.logp[:size], True)
                    return True
            return False

        answers = self._answers(rows, params, self.adapter, ended)
        responses = [cut.get(i) or _response(answers[i].outputs[0]) for i in range(len(rows))]
        self.cached = sum(answers[i].num_cached_tokens or 0 for i in range(len(rows)))
        return responses

    def scores(self, rows: Sequence[Asked], adapter: Any) -> list[list[float]]:
        """Return the log-prob of each token of each row under the model's softmax; 0 for the first.

        It is with these adapters, or for None without any.
        """
        make = import_vllm().SamplingParams
        params = [make(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False) for _ in rows]
        answers = self._answers(rows, params, adapter, lambda i, out: False)
        scored = []
        for i, row in enumerate(rows):
            # next to the token itself vLLM lists none, or the likeliest
            after = zip(row.prompt[1:], answers[i].prompt_logprobs[1:], strict=True)
            scored.append([0.0, *[entry[token].logprob for token, entry in after]])
        return scored

    def _answers(
        self, rows: Sequence[Asked], params: Sequence[Any], adapter: Any, ended: Callable[[int, Any], bool]
    ) -> Mapping[int, Any]:
        """Return vLLM's output for each request. TimeoutError when the time limit passes between steps."""
        limit = time.monotonic() + self.timeout
        numbers: dict[str, int] = {}
        answers: dict[int, Any] = {}
        with self._stepping():
            for i, row in enumerate(rows):
                name = f"{self.asked + i}"
                numbers[name] = i
                self.engine.add_request(name, self.request(row), params[i], lora_request=adapter)
            self.asked += len(rows)

            # after an internal error vLLM steps for ever without an answer
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
        stance = "force_eager" if self.device.type == "cpu" else "default"
        with restore_random_state(), torch.compiler.set_stance(stance):
            yield


def _response(output: Any) -> Response:
    """Return the tokens of a finished request. RuntimeError where vLLM has given it up."""
    if output.finish_reason not in ("stop", "length", None):
        raise RuntimeError(f"engine vllm: expected a response, got one that ended by {output.finish_reason}")
    tokens = list(output.token_ids)
    logp = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
    return Response(tokens, logp, output.finish_reason == "stop")


# ---------- prompts with media as vLLM takes them after its own processor


# where transformers 5 puts what was next to the head before
NEW_NAMES = ("model.language_model.", "model.visual.", "model.audio_tower.", "model.vision_tower.")

Fields = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]
"""Returns vLLM's field of each tensor of some media, which cuts it into items."""


def check_family(model: nn.Module) -> None:
    """Raise a ValueError for a model with media that vLLM cannot load.

    It lacks the model, cannot import it, or knows its weights by other names. `model` may be without weights.
    """
    name = type(model).__name__
    line = f"engine vllm: expected a model with media that vLLM can sample from, got {name}"
    entry = import_vllm("model_executor.models").ModelRegistry.models.get(name)
    if entry is None:
        raise ValueError(f"{line}, which it does not have; sample with --engine-type hf")
    try:
        family = entry.load_model_cls()
    except ImportError as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{line}, whose module cannot be imported: {said}; sample with --engine-type hf"
        ) from None

    # vLLM reads the files, with older names, and later the trainer's names
    renamed = next((name for name, _ in model.named_parameters() if name.startswith(NEW_NAMES)), None)
    if renamed and getattr(family, "hf_to_vllm_mapper", None) is None:
        raise ValueError(
            f"{line}, which has no place for {renamed}: it has no mapper for names of transformers 5; "
            "sample with --engine-type hf"
        )


def fields_of(config: Any) -> Fields:
    """Return the fields of vLLM's model. ImportError where vLLM's own processor cannot be made."""
    processor = import_vllm("multimodal").MULTIMODAL_REGISTRY.create_processor(config)
    return lambda tensors: processor._get_mm_fields_config(tensors, {})


def request(
    model: Any, fields: Fields, ids: Sequence[int], media: PromptMedia | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Return vLLM's input of one prompt; only its tokens where it has no media.

    `model` may be without weights. BadRequest for tensors that vLLM's model does not take.
    """
    if media is None or media.tensors is None:
        return {"prompt_token_ids": list(ids)}
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in media.tensors.items()}
    taken = fields(tensors)
    lost = tensors.keys() - taken.keys()
    if lost:
        raise BadRequest(
            f"media: expected tensors that vLLM's {type(model).__name__} takes ({', '.join(sorted(taken))}), "
            f"got {', '.join(sorted(lost))}; sample with the hf engine"
        )
    items = import_vllm("multimodal.inputs").MultiModalKwargsItems.from_hf_inputs(tensors, taken)

    # one hash for each item: vLLM caches what a tower has made of it, and the keys of a prefix, by them
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        whole.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        whole.update(x.flatten().view(torch.uint8).numpy().tobytes())
    hashes = {
        kind: [f"{whole.hexdigest()}-{kind}-{i}" for i in range(len(group))] for kind, group in items.items()
    }
    ranges = {kind: _ranges(model, kind, len(group), ids, media) for kind, group in items.items()}
    return import_vllm("inputs.engine").mm_input(list(ids), items, hashes, ranges)


def _ranges(model: Any, kind: str, items: int, ids: Sequence[int], media: PromptMedia) -> list[Any]:
    """Return the range of each item of a kind: from its first placeholder to its last."""
    tokens = {token for token, each in placeholders(model.config).items() if each == kind}
    at = [t for t, token in enumerate(ids) if token in tokens and not media.sampled[t]]
    tensors = media.tensors or {}
    counts = {name: [1] * items for name in tensors}
    sizes, _ = expected_counts(model, kind, tensors, counts, [len(at) // items] * items)
    if sum(sizes) != len(at):
        raise BadRequest(f"media: expected {sum(sizes)} {kind} placeholders for {items} items, got {len(at)}")
    ends = list(accumulate(sizes))
    return [_range(at[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _range(at: Sequence[int]) -> Any:
    """Return the range of one item; tokens between its placeholders (ends of rows, say) do not count."""
    make = import_vllm("multimodal.inputs").PlaceholderRange
    length = at[-1] + 1 - at[0]
    if length == len(at):
        return make(offset=at[0], length=length)
    places = torch.zeros(length, dtype=torch.bool)
    places[torch.tensor(at) - at[0]] = True
    return make(offset=at[0], length=length, is_embed=places)
