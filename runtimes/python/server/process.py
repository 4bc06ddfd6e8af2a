"""The process of ``edgelin serve``: socket, signals, and an end without loss."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from edgelin.errors import EdgelinError
from edgelin.runtimes import checks
from edgelin.runtimes.server.app import Api
from edgelin.runtimes.server.guard import is_local
from edgelin.runtimes.server.limits import Limits
from edgelin.runtimes.session import Bundle


class Server(uvicorn.Server):
    """uvicorn that lets the engine end first."""

    def __init__(self, api: Api) -> None:
        super().__init__(
            uvicorn.Config(
                api.app(),
                http="h11",
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=api.limits.stall,
                # The engine has cut everything by then.
                timeout_graceful_shutdown=api.limits.grace + 5,
            )
        )
        self._api = api
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C: end when what runs has ended; a second one cuts it, a third all else.

        uvicorn's own would raise the signal again at the end, which then looks like a failure.
        """
        self._signals += 1
        self.stop(self._api.limits.grace if self._signals == 1 else 0)
        self.force_exit = self._signals > 2

    def stop(self, grace: float) -> None:
        """Take on nothing new, and end after so many seconds at the latest."""
        self._api.engine.drain(grace)
        self.should_exit = True


def serve(
    bundle: Bundle,
    limits: Limits,
    *,
    host: str,
    port: int,
    api_key: str | None,
    state_dtype: str = "float32",
    ready: Callable[[str, Server], None],
) -> None:
    """Serve a bundle until a signal comes.

    Args:
        bundle: A model of text.
        limits: Bounds.
        host: Address to listen at.
        port: Port; 0 takes a free one.
        api_key: What clients must show.
        state_dtype: How the states of sessions are stored between calls.
        ready: Told the address, and the server, when it listens.

    Raises:
        EdgelinError: The address cannot be used, the bundle cannot be served, or no client could
            show the key.
    """
    # Not served without a key where one was wanted, as from a variable that is not set.
    if api_key is not None and (not api_key or api_key != api_key.strip()):
        raise EdgelinError(
            "the API key is empty or has blanks around it, which no client can send; give another, "
            "or none"
        )
    with _listen(host, port, limits.stall) as listening:
        api = Api(bundle, limits, api_key, local=is_local(host), state_dtype=state_dtype)
        try:
            server = Server(api)
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{listening.getsockname()[1]}", server)
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            api.close()


def _listen(host: str, port: int, stall: int) -> socket.socket:
    """A listening socket."""
    checks.require(0 <= port <= 65535, "port", port, "0 (any free one) .. 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, address = found[0]
        listening = socket.socket(family, kind, number)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it: the system ends those whose client does not read.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * stall)
            listening.bind(address)
            listening.listen(1024)
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EdgelinError(
            f"cannot listen at {host} port {port}: {reason}; choose others with --host and --port"
        ) from error
    listening.setblocking(False)
    return listening
