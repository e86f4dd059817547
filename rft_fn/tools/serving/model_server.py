"""The endpoint of a policy: `ModelEndpoint` in a thread of a run, `serve_model` for a command."""

import os
import sys
import threading
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from rft_fn.collect.agents import Address
from rft_fn.collect.calls import Calls, answer
from rft_fn.collect.recorder import Session
from rft_fn.environment import Renderer
from rft_fn.environment.tool_calls import call_parser
from rft_fn.tools.serving import LOCAL, MISSING, listen, stopping
from rft_fn.types import Engine, Sampling

__all__ = ["ModelEndpoint", "serve_model"]


_ARRIVAL = 30.0  # s that a request may take to arrive
_MORE = 0.01  # s that further requests have to come after the first


class ModelEndpoint:
    """An endpoint of a policy, in a thread; what it is asked waits in `calls` until somebody answers."""

    def __init__(
        self,
        renderer: Renderer,
        sampling: Sampling,
        *,
        name: str = "policy",
        window: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        queue: int = 1024,
        max_bytes: int = 1 << 26,
        seconds: float = 600.0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        """Start it.

        `token` is asked of every client, but of sessions, whose address is a secret. At most `queue` calls
        wait, a request has at most `max_bytes`, and an answer may take `seconds`. OSError for an address that
        cannot be had, ModuleNotFoundError without the packages of the extra `serve`.
        """
        try:
            from rft_fn.tools.serving import http, model_app
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: {MISSING}", name=error.name) from error

        self.calls = Calls(queue)
        self.sampling = sampling
        self._sessions: dict[str, model_app.Recorded] = {}
        self._recorded = model_app.Recorded
        # found where a request has tools: of a template without them there is a warning
        parser = cache(partial(call_parser, renderer.tokenizer, chat_template_kwargs))
        policy = model_app.Policy(name, renderer, parser, sampling, window, self.calls, seconds)
        rules = http.Rules(max_bytes, _ARRIVAL, token)
        listening = listen(host, port)
        self.url = f"http://{host}:{listening.getsockname()[1]}"
        self.server = http.Server(model_app.application(policy, self._sessions, rules), rules)
        self._thread = threading.Thread(
            target=self.server.run, args=([listening],), daemon=True, name="rft_fn endpoint"
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether it still takes requests."""
        return self._thread.is_alive()

    def open(self, session: Session, *, rewarded: bool) -> Address:
        """Give a session an address; a client may give its reward where it is `rewarded`."""
        name, secret = os.urandom(16).hex(), os.urandom(16).hex() if rewarded else ""
        self._sessions[name] = self._recorded(session, secret)
        return Address(name, f"{self.url}/sessions/{name}", secret)

    def shut(self, address: Address) -> None:
        """Take no further request of a session."""
        found = self._sessions.pop(address.name, None)
        if found is not None:
            found.session.closed = True

    def close(self) -> None:
        """Answer no further request, and end the thread."""
        self.calls.closed = True
        self.server.should_exit = True
        self._thread.join()


def serve_model(
    engine: Engine,
    renderer: Renderer,
    *,
    name: str,
    sampling: Sampling,
    rows: int,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str = "",
    **options: Any,
) -> None:
    """Serve an engine at http://HOST:PORT/v1 until SIGTERM or SIGINT, as OpenAI's endpoints.

    Requests that wait are sampled together, at most `rows` of them. Each must have the token in the
    environment variable `token_env`, if there is one. `options` are those of `ModelEndpoint`. A signal
    ends the process once all that was accepted is answered, a second one at once.
    """
    token = os.environ.get(token_env, "").strip()
    if not token and host not in LOCAL:
        print(f"warning: anybody who reaches {host} may ask: {token_env} is not set", file=sys.stderr)
    window = engine.status().get("window")
    front = ModelEndpoint(
        renderer, sampling, name=name, window=window, host=host, port=port, token=token, **options
    )
    with stopping(front.calls):
        print(f"serving {name} at {front.url}/v1", flush=True)
        while front.alive and not (front.calls.closed and not len(front.calls)):
            calls = front.calls.take(rows, wait=0.1, more=_MORE)
            while calls:
                calls = answer(engine, calls)
        front.close()
    print(f"{front.url}: stopped, everything answered", flush=True)
