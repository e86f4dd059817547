"""Samples by servers of vLLM, or by others that speak the OpenAI protocol with token ids.

Start each with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --enable-scale-out \\
        --worker-extension-cls rft_fn.engine.worker.WeightsFromFolder \\
        --weight-transfer-config '{"backend": "rft"}'

where this package is installed. The first of the last two options is for weights by a folder that it can
read, the second for weights by a channel. Without `--enable-scale-out` it is asked by `/v1/completions`, and
its answers do not tell the version of the weights. Without the development mode, or without both of the last
options, it samples, and cannot be given weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from rft_fn import border
from rft_fn.engine import adapters_alone, speculative
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.engine_groups import NcclGroups
from rft_fn.engine.lifetime import EngineCore
from rft_fn.engine.server_protocol import (
    HOT,
    Ask,
    Client,
    Described,
    Fault,
    Refused,
    Reply,
    Room,
    Sends,
    checked,
    expected,
    limit,
    ranked,
)
from rft_fn.engine.servers import serve
from rft_fn.engine.weight_sender import HOLD, Senders
from rft_fn.types import Sampling

__all__ = ["build", "protocol"]

GENERATE = "/inference/v1/generate"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
COMPLETIONS = "/v1/completions"
FLOOR = -9999.0  # the log-prob of what has none
FORCED = (3, 4, 3, 5)  # tokens that no server gives by itself
QUICK = 60.0  # seconds for anything but samples and weights


def build(config: EngineConfig, model: str | nn.Module, tokenizer: Any) -> EngineCore:
    """Build the engine on `config.servers`."""
    if config.transfer == "nccl" and not torch.cuda.is_available():
        raise ValueError(
            "engine_transfer nccl: expected a GPU in the trainer, which is rank 0 of vLLM's group, got none"
        )
    client = Client(config.key_env)
    loads = _VLLM(Client(config.key_env), config.timeout, holds=False) if config.in_flight else None
    asks = protocol(client, config.timeout, resumes=not config.follows)
    return serve(config, asks, client, model, tokenizer, loads=loads)


def protocol(client: Client, seconds: float, *, resumes: bool = True) -> "_VLLM":
    """Return the protocol, for requests of at most so many seconds.

    A server that a trainer which is gone has left paused is resumed, where it `resumes` any.
    """
    return _VLLM(client, seconds, resumes=resumes)


class _VLLM:
    """The protocol of vLLM's server."""

    name = "openai"
    hint = (
        "VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs, --enable-scale-out, "
        "--worker-extension-cls rft_fn.engine.worker.WeightsFromFolder and "
        """--weight-transfer-config '{"backend": "rft"}'"""
    )

    adapters_ran = True
    hottest = HOT
    adapters_hint = (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank, --max-loras 2 and "
        "--lora-target-modules"
    )

    def __init__(self, client: Client, seconds: float, *, holds: bool = True, resumes: bool = True):
        """`seconds` is the limit of one request; without `holds` the caller holds back others in a load.

        With `resumes` a server that is paused when it is described is resumed.
        """
        self.client = client
        self.resumes = resumes
        self.seconds = seconds
        self.rft = Senders(client, seconds, holds=holds)
        self.nccl = NcclGroups(client, seconds, holds=holds)
        self.senders: Mapping[str, Sends] = {"rft": self.rft, "nccl": self.nccl}

    def get(self, server: str, path: str) -> Any:
        """Return the answer to a GET."""
        return self.client.call(server, path, seconds=min(QUICK, self.seconds))

    def describe(self, server: str) -> Described:
        """Return the served model, the better of two routes, and what the server supports."""
        with suppress(Fault, Refused):  # a trainer that is gone may have left it so
            if self.resumes and self.get(server, "/is_paused") == {"is_paused": True}:
                self.post(server, HOLD[1], {})
        answer = self.get(server, "/v1/models")
        with expected("a list of models", answer):
            name = border.text("id", answer["data"][0]["id"])
            window = limit("max_model_len", answer["data"][0].get("max_model_len"))

        # what a server lacks it answers with 404
        route = GENERATE
        try:
            self.post(server, GENERATE, {"token_ids": [0], "model": name, "sampling_params": _plain(1)})
        except Refused as error:
            if "status 404" not in str(error):
                raise
            route = COMPLETIONS
        forces = False
        if route == GENERATE:
            plain = Described(route, name, window, "", frozenset())
            with suppress(Fault, Refused):  # it has no such option, or was not started with it
                forces = len(self.force(server, plain, [0], FORCED, Sampling())) > 0
        supported = {"score"}
        label, drafts = "", None
        told: Any = {}  # of adapters
        ways: list[str] = []
        with suppress(Fault, Refused):  # else there is no development mode: it samples and scores
            label = self.label(server)
            backend = None
            with suppress(Fault, Refused):  # else there is no extension
                worker = self.worker(server, "rft_describe", [])[0]
                with expected("a worker that can load", worker):
                    supported |= {"sleep"} if worker["sleep"] is True else set()
                    backend = worker.get("transfer")
                    drafts = worker.get("speculative")  # older versions of the extension do not tell
                    told = worker.get("adapters", told)
                    told = told and told | {"device": worker["device"]}
                ways += ["difference", "folder"] if worker.get("differences") is True else ["folder"]
            if backend == "rft" or (backend is None and self.rft.has(server)):
                ways.insert(0, "rft")
            elif backend in (None, "nccl") and self.nccl.has(server):
                ways.append("nccl")  # a server that loses it in the middle is lost
        if drafts is not None:
            _check_drafts(drafts)
        room = _room(told) if self.loads_adapters(server) else None
        supported |= {"load"} if ways else set()
        return Described(route, name, window, label, frozenset(supported), tuple(ways), room, forces=forces)

    def loads_adapters(self, server: str) -> bool:
        """Return whether there is the route that loads adapters, by a request that it must refuse."""
        body = {"lora_name": "", "lora_path": ""}
        try:
            self.client.tell(server, LOAD_ADAPTER, body, seconds=min(QUICK, self.seconds))
        except (Fault, Refused) as error:
            return "status 400" in str(error)
        return False

    def check(self, sampling: Any) -> None:
        """Accept every distribution: all are sampled from, and reported."""

    def sample(self, server: str, known: Described, ask: Ask) -> Reply:
        """Return one sample, by the route that the server has."""
        if known.route == COMPLETIONS:
            return self.by_completions(server, known, ask)
        body = {
            "token_ids": list(ask.prompt),
            "model": known.adapter or known.model,
            "sampling_params": _fields(ask) | {"logprobs": 0, "detokenize": bool(_texts(ask))},
        }
        answer = self.post(server, GENERATE, body, ask.size)
        with expected("choices with token_ids and logprobs", answer):
            choice, tokens, logp = _drawn(answer)
            spans = choice.get("weight_versions") if known.label else None
            label = None if spans is None else ", ".join(str(x["version"]) for x in spans)
            places = [border.integers("span", [x["start"], x["end"]]) for x in spans or ()]
            of = [(str(x["version"]), first, end) for x, (first, end) in zip(spans or (), places)]
            return Reply(tokens, logp, label, of)

    def force(
        self, server: str, known: Described, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
    ) -> list[float]:
        """Return the log-probs of a response that the server is made to give, -inf where it could not."""
        ask = Ask(prompt, 0, sampling, len(tokens), ())
        forced = {"trace_decode_token_ids": list(tokens), "logprobs": 0, "detokenize": False}
        body = {"token_ids": list(prompt), "model": known.adapter or known.model}
        answer = self.post(server, GENERATE, body | {"sampling_params": _fields(ask) | forced}, ask.size)
        with expected("the forced tokens with logprobs", answer):
            _, given, logp = _drawn(answer)
            if given != list(tokens):
                raise ValueError("other tokens")
            border.log_probs("logprob", logp)
            return [x if x > FLOOR else -math.inf for x in logp]

    def by_completions(self, server: str, known: Described, ask: Ask) -> Reply:
        """Return one sample by the OpenAI protocol, with vLLM's fields for token ids."""
        model = known.adapter or known.model
        body = {"model": model, "prompt": list(ask.prompt), "logprobs": 0, "return_token_ids": True}
        answer = self.post(server, COMPLETIONS, body | _fields(ask), ask.size)
        with expected("choices with token_ids and logprobs", answer):
            (choice,) = answer["choices"]
            tokens = border.integers("token_ids", choice["token_ids"])
            return Reply(tokens, border.numbers("logprobs", choice["logprobs"]["token_logprobs"]), None)

    def score(self, server: str, known: Described, tokens: Sequence[int]) -> list[float]:
        """Return the log-probs of a prompt; one token is sampled with them."""
        rows = self.prompt_rows(server, known, tokens, 0)
        with expected("prompt_logprobs", rows):
            return _own(rows, tokens)

    def likeliest(
        self, server: str, known: Described, tokens: Sequence[int], top_k: int
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Return the log-probs of a prompt, and the likeliest words at each of its places."""
        rows = self.prompt_rows(server, known, tokens, top_k)
        with expected("prompt_logprobs", rows):
            logp = _own(rows, tokens)
            best = [ranked([(_id(t), x["logprob"]) for t, x in row.items()], top_k) for row in rows]
            return logp, [ids for ids, _ in best], [numbers for _, numbers in best]

    def texts(self, server: str, known: Described, tokens: Sequence[int]) -> list[str]:
        """Return the texts of a prompt's tokens."""
        rows = self.prompt_rows(server, known, tokens, 0)
        with expected("prompt_logprobs with decoded_token", rows):
            pairs = zip(rows, tokens[1:], strict=True)
            return [border.text("decoded_token", row[str(token)]["decoded_token"]) for row, token in pairs]

    def prompt_rows(self, server: str, known: Described, tokens: Sequence[int], top_k: int) -> list[Any]:
        """Return {token: its log-prob and text} of each place of a prompt but the first."""
        size = len(tokens) * (top_k + 1)
        model = known.adapter or known.model
        if known.route == GENERATE:
            body = {"token_ids": tokens, "sampling_params": _plain(1) | {"prompt_logprobs": top_k}}
            answer = self.post(server, GENERATE, body | {"model": model}, size)
            choice = answer
        else:
            body = {"prompt": tokens, "model": model, "prompt_logprobs": top_k} | _plain(1)
            answer = self.post(server, COMPLETIONS, body, size)
            with expected("choices", answer):
                choice = answer["choices"][0]
        with expected("prompt_logprobs", answer):
            return list(choice["prompt_logprobs"][1:])

    def load(self, server: str, folder: str, label: str, names: int) -> None:
        """Load by the worker extension, in every worker; then empty the cache and set the version."""
        for worker in self.worker(server, "rft_load", [folder]):
            with expected("the count of tensors", worker):
                problem = worker.get("error")
                if not problem and worker["names"] != names:
                    problem = f"expected {names} tensors, got {worker['names']}"
                if not problem and worker["short"]:
                    problem = f"expected whole tensors, got {', '.join(worker['short'][:3])}"
            if problem:
                raise Fault(f"weights: {problem}")

        self.settle(server, label)

    def settle(self, server: str, label: str) -> None:
        """Empty the cache and set the version, in this order."""
        # what was read with the old weights must not serve the new ones: a request that is held is read again
        answer = self.post(server, "/reset_prefix_cache?reset_running_requests=true", {})
        if answer != {"success": True}:
            raise Fault(f"expected an empty cache after the load, got {answer}")
        self.post(server, "/update_weight_version", {"new_version": label})
        if self.label(server) != label:
            raise Fault(f"expected weights {label!r} after the load, got {self.label(server)!r}")

    @contextmanager
    def hold(self, server: str) -> Iterator[None]:
        """Keep the server's requests where they are within the block; break them off if it fails."""
        self.post(server, "/pause?mode=keep", {})
        try:
            yield
        except BaseException:
            with suppress(Fault, Refused):
                self.post(server, "/pause?mode=abort", {})
            raise
        finally:
            self.post(server, "/resume", {})

    def load_adapter(self, server: str, folder: str, name: str) -> None:
        """Load adapters from a folder. Where there is the extension, each layer must have got its place."""
        body = {"lora_name": name, "lora_path": folder}
        self.client.tell(server, LOAD_ADAPTER, body, seconds=self.seconds)
        without: list[Any] = []
        with suppress(Fault, Refused):  # without the extension log-probs alone tell
            without = self.worker(server, "rft_without_place", [])
        with checked():
            adapters_alone.check_places(without)

    def unload_adapter(self, server: str, name: str) -> None:
        """Forget adapters by their name."""
        seconds = min(QUICK, self.seconds)
        self.client.tell(server, UNLOAD_ADAPTER, {"lora_name": name}, seconds=seconds)

    def label(self, server: str) -> str:
        """Return the version of the server's weights."""
        answer = self.get(server, "/weight_info")
        with expected("weight_version", answer):
            return str(answer["weight_version"])

    def worker(self, server: str, method: str, args: list[str]) -> list[Any]:
        """Return the answers of the extension in every worker."""
        answer = self.post(server, "/collective_rpc", {"method": method, "args": args})
        with expected("results of the workers", answer):
            if not answer["results"]:
                raise ValueError("none")
            return list(answer["results"])

    def sleep(self, server: str) -> None:
        """Move the weights to the host, and drop the cache."""
        self.post(server, "/sleep?level=1", {})
        self.confirm(server, asleep=True)

    def wake(self, server: str) -> None:
        """Move the weights back to the device."""
        self.post(server, "/wake_up", {})
        self.confirm(server, asleep=False)

    def confirm(self, server: str, *, asleep: bool) -> None:
        """Raise Fault unless the server confirms it: the calls succeed in any case."""
        answer = self.get(server, "/is_sleeping")
        if answer != {"is_sleeping": asleep}:
            raise Fault(f"expected is_sleeping {asleep}, got {answer}")

    def post(self, server: str, path: str, body: Mapping[str, Any], tokens: int = 0) -> Any:
        """Return the answer to a POST about so many tokens."""
        return self.client.call(server, path, body, seconds=self.seconds, tokens=tokens)


def _drawn(answer: Any) -> tuple[Any, list[int], list[float]]:
    """Return (the only choice of an answer, its tokens, their log-probs). ValueError for other tokens."""
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    tokens = border.integers("token_ids", choice["token_ids"])
    if [x["token_id"] for x in content] != tokens:
        raise ValueError("log-probs of other tokens")
    return choice, tokens, border.numbers("logprob", [x["logprob"] for x in content])


def _room(told: Any) -> Room | None:
    """Return the room for adapters that a worker tells of, None for none; {} where there is no extension.

    Refused for one with adapters on the head on a CPU, where vLLM would end at the first log-probs of a
    prompt.
    """
    if told is None:
        return None
    with expected("the room for adapters", told):
        if not told:
            return Room()
        head = told["head"] is True and told["device"] == "cpu"
        rank, slots = (border.integer(name, told[name], low=1) for name in ("rank", "slots"))
        base = told.get("base")  # older versions of the extension do not tell
        room = Room(rank, slots, None if base is None else border.text("base", base))
    if head:
        raise Refused(
            "lora_target_modules: expected the names of layers, got none: vLLM puts adapters on the head "
            "too, and on a CPU it ends when it scores a prompt"
        )
    return room


def _check_drafts(drafts: Any) -> None:
    """Raise Refused for speculative decoding that does not draw from the model's distribution."""
    try:
        speculative.check_exact("speculative_config", border.object_of("speculative_config", drafts))
    except ValueError as error:
        raise Refused(str(error)) from None


def _own(rows: Sequence[Any], tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of the tokens after the first, one row of words for each."""
    found = [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]
    return border.numbers("logprob", found)


def _id(key: str) -> int:
    """Return the token id that a key of JSON is. ValueError for what `int` would read too: "+7", "7_0"."""
    if not (key.isascii() and key.isdigit()):
        raise ValueError(f"expected a token id, got {border.quoted(key)}")
    return int(key)


def _texts(ask: Ask) -> list[str]:
    """Return the texts that end a sample."""
    return [x for x in ask.sampling.stop if isinstance(x, str)]


def _plain(max_new: int) -> dict[str, Any]:
    """Return options of the model's distribution. A server has other defaults for what is not named."""
    return {
        "n": 1,
        "max_tokens": max_new,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
    }


def _fields(ask: Ask) -> dict[str, Any]:
    """Return the options of one sample; ends are all named, so the server's own are ignored."""
    fields = _plain(ask.max_new) | {
        "temperature": ask.sampling.temperature,
        "top_p": ask.sampling.top_p,
        "top_k": ask.sampling.top_k,
        "seed": ask.seed,
        "stop_token_ids": list(ask.ends),
        "skip_special_tokens": False,
    }
    if _texts(ask):
        fields |= {"stop": _texts(ask), "include_stop_str_in_output": True}
    return fields
