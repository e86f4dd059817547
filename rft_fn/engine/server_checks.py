"""Checks of the addresses of servers, and of whether all of them hold one model."""

import sys
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from rft_fn import check
from rft_fn.engine.config import EngineConfig
from rft_fn.engine.dialect import Described

__all__ = ["COMPARED", "check_servers", "check_url", "compare_servers", "refuse_media"]

COMPARED = range(3, 19)  # tokens whose log-probs servers of one model agree on
DIFFERENT = 0.1  # nats per token: more than rounding makes of one model, also in 16 bits


def check_url(server: str) -> None:
    """ValueError unless `server` is an address of the form http://HOST:PORT."""
    try:
        where = urlsplit(server)
        right = where.scheme in ("http", "https") and where.hostname and where.port != 0
    except ValueError:  # a port that is no number
        right = False
    if not right:
        raise ValueError(f"engine_servers: expected addresses like http://HOST:8000, got {server!r}")


def check_servers(config: EngineConfig) -> None:
    """ValueError for options that an engine on servers cannot honour."""
    if not config.servers:
        raise ValueError(
            f"engine_servers: expected at least one address like http://HOST:8000 for {config.type}, got none"
        )
    for server in config.servers:
        check_url(server)
    if len(set(config.servers)) < len(config.servers):
        raise ValueError(f"engine_servers: expected each address once, got {', '.join(config.servers)}")
    if config.tp_size != 1 or config.mem_util:
        raise ValueError(
            f"engine_tp_size, engine_mem_util: expected 1 and 0 for {config.type}, whose servers have such "
            f"options, got {config.tp_size} and {config.mem_util}"
        )


def refuse_media(config: EngineConfig, model: str) -> None:
    """ValueError: servers get tokens alone."""
    raise ValueError(
        f"engine_type: expected one that takes prompts with media ({model} reads them, and the data has "
        f"them), got {config.type}, whose servers get tokens alone; sample with hf or vllm"
    )


def compare_servers(known: Mapping[str, Described], logp: Mapping[str, Sequence[float]]) -> None:
    """ValueError for a server of another model than the first, by the log-probs `logp` of the same tokens.

    Where the labels of the weights differ a line says that the log-probs do: such servers get the trainer's
    weights first. A line also says where log-probs agree and names or windows differ.
    """
    asked = [server for server in known if server in logp]
    for i, server in enumerate(asked[1:], 1):
        same = [x for x in asked[:i] if known[x].label == known[server].label]
        first = (same or asked)[0]
        one, other = known[first], known[server]
        gaps = [abs(a - b) for a, b in zip(logp[first], logp[server], strict=True)]
        gap = sum(gaps) / len(gaps)
        models = (
            f"{first} serves {one.model!r} with a window of {one.window} tokens, {server} {other.model!r} "
            f"with {other.window}"
        )
        if not gap <= DIFFERENT and one.label != other.label:
            line = (
                f"warning: engine_servers: {first} has weights {one.label!r} and {server} {other.label!r}; "
                f"log-probs differ by {gap:.3g} nats per token; they are compared again after the first load"
            )
            print(check.printable(line), file=sys.stderr, flush=True)
            continue
        if not gap <= DIFFERENT:
            raise ValueError(
                f"engine_servers: expected servers of one model, got {server}, whose log-probs of the same "
                f"tokens differ from those of {first} by {gap:.3g} nats per token: {models}"
            )
        if (one.model, one.window) != (other.model, other.window):
            line = f"warning: engine_servers: {models}; their log-probs agree"
            print(check.printable(line), file=sys.stderr, flush=True)
