"""Requests to vLLM, one for each row, and the loop that answers them within a time limit."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rft_fn.engine.prompt_media import Shown
from rft_fn.engine.requests import Response
from rft_fn.engine.stop import Stop
from rft_fn.engine.vllm.surroundings import kept_random, part
from rft_fn.types import Sampling

__all__ = ["Asked", "Sampler"]


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
