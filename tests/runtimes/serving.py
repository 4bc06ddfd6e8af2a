"""A server in a thread, for the tests of it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai

from edgelin.runtimes.server.app import Api
from edgelin.runtimes.server.engine import Engine
from edgelin.runtimes.server.limits import Limits
from edgelin.runtimes.server.process import Server, serve
from edgelin.runtimes.session import Bundle

WORDS = "The quiet river runs past the old mill. Grüße aus Köln, naïve café! 日本語 🙂🙃"


@dataclass
class Serving:
    """A running server."""

    address: str
    server: Server
    thread: threading.Thread

    @property
    def api(self) -> Api:
        return self.server._api

    @property
    def engine(self) -> Engine:
        return self.api.engine

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=60)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, no turn of the engine comes to an end."""
        with self.engine._pool._lock:
            yield

    @contextlib.contextmanager
    def asking(self, **fields: Any) -> Iterator[socket.socket]:
        """A streaming request under way, whose client reads nothing and leaves at the end."""
        host, _, port = self.address.removeprefix("http://").partition(":")
        body = json.dumps({"stream": True, **fields})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            raw.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            yield raw

    def idle(self) -> bool:
        """Whether nothing is left of any request."""
        engine = self.engine
        return (
            engine._pool.free == self.api.limits.slots
            and not (engine._rows or engine._waiting or engine._unfinished)
            and not self.api.sessions._used
        )

    def stop(self) -> None:
        self.server.stop(0)
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(
    bundle: Bundle,
    *,
    key: str | None = None,
    endless: bool = False,
    state_dtype: str = "float32",
    **limits: Any,
) -> Iterator[Serving]:
    """Serve a bundle at a free port; in the end, nothing may be left of any request.

    Texts that are ``endless`` know no end token.
    """
    ready = threading.Event()
    found: list[Any] = []

    def tell(address: str, server: Server) -> None:
        found.extend((address, server))
        ready.set()

    def run() -> None:
        bounds = Limits(**limits)
        try:
            serve(
                bundle, bounds, host="127.0.0.1", port=0, api_key=key, state_dtype=state_dtype,
                ready=tell,
            )  # fmt: skip
        except BaseException as error:
            found.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    if isinstance(found[0], BaseException):
        raise found[0]
    running = Serving(*found, thread)
    if endless:
        running.engine._end_tokens = frozenset()
    try:
        yield running
        until(lambda: running.idle())
    finally:
        running.stop()


def until(true: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def alone(bundle: Bundle, prompt: Any, **sampling: Any) -> str:
    """What a stream alone writes."""
    stream = bundle.stream()
    return "".join(stream.generate(prompt, **sampling)) + stream.flush()
