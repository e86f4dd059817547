"""Samples by servers of SGLang.

Start each with

    python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference

where the folder of weights can be read, and with `--enable-memory-saver` to give memory back. Its plain
log-probs are of the model before top_p and top_k, so a cut distribution is reported by its sampling mask.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rft_fn import border
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.engine_groups import ARRIVING, TorchGroups
from rft_fn.engine.lifetime import EngineCore
from rft_fn.engine.requests import BadRequest
from rft_fn.engine.server_protocol import (
    Ask,
    Client,
    Described,
    Fault,
    Refused,
    Reply,
    Room,
    Sends,
    expected,
    limit,
    ranked,
)
from rft_fn.engine.servers import serve
from rft_fn.types import Sampling

__all__ = ["build", "protocol"]

QUICK = 60.0  # seconds for anything but samples and weights
TAGS = ["kv_cache", "weights"]
ACCEPTED = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""Options of a server under which drafts are accepted although the model would not draw them, below 1."""


def build(config: EngineConfig, model: str | nn.Module, tokenizer: Any) -> EngineCore:
    """Build the engine on `config.servers`."""
    client = Client(config.key_env)
    return serve(config, _SGLang(client, config.timeout), client, model, tokenizer)


def protocol(client: Client, seconds: float) -> "_SGLang":
    """Return the protocol, for requests of at most so many seconds."""
    return _SGLang(client, seconds)


class _SGLang:
    """The protocol of SGLang's server."""

    name = "sglang"
    hint = "--enable-deterministic-inference"
    adapters_ran = False
    hottest = math.inf
    adapters_hint = "--enable-lora, --max-lora-rank and --lora-target-modules"
    hold = None  # an answer tells one version
    force = None

    def __init__(self, client: Client, seconds: float):
        """`seconds` is the limit of one request."""
        self.client = client
        self.seconds = seconds
        self.groups = TorchGroups(client, seconds)
        self.senders: Mapping[str, Sends] = {"nccl": self.groups}

    def describe(self, server: str) -> Described:
        """Return the model that is served, and what the server's own options allow."""
        quick = min(QUICK, self.seconds)
        model = self.client.call(server, "/model_info", seconds=quick)
        options = self.client.call(server, "/server_info", seconds=quick)
        with expected("the options of a server", options):
            drafts = options.get("speculative_algorithm")
            loose = {name: x for name in ACCEPTED if (x := options.get(name)) not in (None, 1)}
        if drafts and loose:
            name, x = next(iter(loose.items()))
            raise Refused(
                f"{name}: expected 1, which keeps the model's distribution, got {border.quoted(x)}: it "
                "accepts more drafts than the model would draw"
            )
        with expected("the model and the options of a server", [model, options]):
            window = options.get("max_context_length") or options.get("context_length")
            window = limit("max_context_length", window)
            supported = {"load", "score"}
            if options.get("enable_memory_saver") is True:
                supported.add("sleep")
            name = border.text("served_model_name", model["served_model_name"])
            label = str(model["weight_version"])
            room = None
            if options.get("enable_lora") is True:
                told = (options.get("max_lora_rank"), options.get("max_loaded_loras"))
                rank, slots = (border.integer("room for adapters", x or 0, low=0) for x in told)
                room = Room(rank, slots)
        if label.endswith(ARRIVING):  # a trainer that is gone has left it in the middle
            self.client.tell(server, self.groups.hold[1], {}, seconds=quick)
        ways = ("folder", "nccl") if self.groups.has(server) else ("folder",)
        return Described("/generate", name, window, label, frozenset(supported), ways, room)

    def check(self, sampling: Sampling) -> None:
        """Raise BadRequest for both cuts together: the server takes the mass of top_p before top_k."""
        if sampling.top_p < 1 and sampling.top_k:
            raise BadRequest(
                "top_p, top_k: expected one of them for sglang, whose top_p counts what top_k left out, "
                f"got {sampling.top_p:g} and {sampling.top_k}"
            )

    def sample(self, server: str, known: Described, ask: Ask) -> Reply:
        """Return one sample; under a cut with the log-probs of the sampling mask."""
        body = request(ask, known.adapter)
        answer = self.client.call(server, "/generate", body, seconds=self.seconds, tokens=ask.size)
        with expected("output_ids and meta_info with log-probs", answer):
            about = answer["meta_info"]
            if about["finish_reason"]["type"] == "abort":
                raise Fault(f"expected a sample, got one that was broken off: {about['finish_reason']}")
            tokens = border.integers("output_ids", answer["output_ids"])
            entries = about["output_token_logprobs"]
            if [x[1] for x in entries] != tokens:
                raise ValueError("log-probs of other tokens")
            logp = [x[0] for x in entries]
            if ask.sampling.truncates:
                logp = about["output_token_sampling_logprobs"]
            return Reply(tokens, border.numbers("log-probs", logp), str(about["weight_version"]))

    def score(self, server: str, known: Described, tokens: Sequence[int]) -> list[float]:
        """Return the log-probs of a prompt; one token is sampled with them."""
        entries = self.about(server, known, tokens, {})["input_token_logprobs"]
        with expected("input_token_logprobs", entries):
            return border.numbers("input_token_logprobs", [x[0] for x in entries[1:]])

    def likeliest(
        self, server: str, known: Described, tokens: Sequence[int], top_k: int
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Return the log-probs of a prompt, and the likeliest words at each of its places."""
        about = self.about(server, known, tokens, {"top_logprobs_num": top_k}, len(tokens) * top_k)
        with expected("input_top_logprobs", about):
            logp = border.numbers("input_token_logprobs", [x[0] for x in about["input_token_logprobs"][1:]])
            rows = about["input_top_logprobs"][1:]
            if len(rows) != len(logp):
                raise ValueError("words of other tokens")
            best = [ranked([(x[1], x[0]) for x in row], top_k) for row in rows]
            return logp, [ids for ids, _ in best], [numbers for _, numbers in best]

    def texts(self, server: str, known: Described, tokens: Sequence[int]) -> list[str]:
        """Return the texts of a prompt's tokens."""
        more = {"return_text_in_logprobs": True}
        entries = self.about(server, known, tokens, more)["input_token_logprobs"]
        with expected("input_token_logprobs with texts", entries):
            return [border.text("text", x[2]) for x in entries[1:]]

    def about(
        self, server: str, known: Described, tokens: Sequence[int], more: dict[str, Any], size: int = 0
    ) -> dict[str, Any]:
        """Return the server's record of a prompt, with its log-probs; `more` joins the request."""
        ask = Ask(tokens, 0, Sampling(), 1, ())
        body = request(ask, known.adapter) | {"logprob_start_len": 0} | more
        answer = self.client.call(server, "/generate", body, seconds=self.seconds, tokens=ask.size + size)
        with expected("input_token_logprobs", answer):
            about = answer["meta_info"]
            if [x[1] for x in about["input_token_logprobs"]] != list(tokens):
                raise ValueError("log-probs of other tokens")
            return about

    def load(self, server: str, folder: str, label: str, names: int) -> None:
        """Load from disk, which empties the cache; the server reports a version, no count of tensors."""
        body = {"model_path": folder, "load_format": "auto", "weight_version": label, "flush_cache": True}
        answer = self.client.call(server, "/update_weights_from_disk", body, seconds=self.seconds)
        with expected("success", answer):
            if answer["success"] is not True:
                raise Fault(f"weights: {answer['message']}")
        self.confirm(server, label)

    def settle(self, server: str, label: str) -> None:
        """Set the version, and let the server confirm it; its cache is empty since the last bucket."""
        self.groups.set_version(server, label, time.monotonic() + self.seconds)
        self.confirm(server, label)

    def confirm(self, server: str, label: str) -> None:
        """Raise Fault unless the server says that it has these weights."""
        got = self.describe(server).label
        if got != label:
            raise Fault(f"expected weights {label!r} after the load, got {got!r}")

    def load_adapter(self, server: str, folder: str, name: str) -> None:
        """Load adapters from a folder; the server reports whether it has."""
        self._adapter(server, "/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, server: str, name: str) -> None:
        """Forget adapters by their name."""
        self._adapter(server, "/unload_lora_adapter", {"lora_name": name})

    def _adapter(self, server: str, path: str, body: dict[str, Any]) -> None:
        answer = self.client.call(server, path, body, seconds=self.seconds)
        with expected("success", answer):
            if answer["success"] is not True:
                raise Fault(f"weights: {answer['error_message']}")

    def sleep(self, server: str) -> None:
        """Give back the memory of the cache and the weights."""
        self.client.call(server, "/release_memory_occupation", {"tags": TAGS}, seconds=self.seconds)

    def wake(self, server: str) -> None:
        """Take the memory again."""
        self.client.call(server, "/resume_memory_occupation", {"tags": TAGS}, seconds=self.seconds)


def request(ask: Ask, adapter: str = "") -> dict[str, Any]:
    """Return the body of one sample, by adapters of a name. A server has defaults for what is not named."""
    sampling: dict[str, Any] = {
        "n": 1,
        "max_new_tokens": ask.max_new,
        "temperature": ask.sampling.temperature,
        "top_p": ask.sampling.top_p,
        "top_k": ask.sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "sampling_seed": ask.seed,
        "ignore_eos": True,
        "stop_token_ids": list(ask.ends),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    texts = [x for x in ask.sampling.stop if isinstance(x, str)]
    if texts:
        sampling["stop"] = texts
    body = {
        "input_ids": list(ask.prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if ask.sampling.truncates:
        body["return_sampling_mask"] = True
    if adapter:
        body["lora_path"] = adapter
    return body
