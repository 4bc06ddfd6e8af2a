"""Lets requests in, refuses them in OpenAI's form, and counts both."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgelin.errors import EdgelinError
from edgelin.runtimes.server.errors import ApiError
from edgelin.runtimes.server.metrics import Metrics


class Guard:
    """Lets in who may come, and counts what is answered.

    Args:
        app: What is behind it.
        key: What clients must show; None: nothing.
        local: Whether only this machine is served. Without a key, a browser is then refused that
            was led here by the name of another site (DNS rebinding).
        metrics: Where answers are counted.
    """

    def __init__(self, app: ASGIApp, key: str | None, local: bool, metrics: Metrics) -> None:
        self._app, self._local, self._metrics = app, local, metrics
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in _COUNTED else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        problem = self._problem(scope["path"], dict(scope["headers"]))
        app = self._app if problem is None else refuse(problem)
        await app(scope, receive, counted)

    def _problem(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        """Why a request is not let in."""
        if self._key is None:
            if self._local and not _names_this_machine(headers.get(b"host", b"").decode("latin-1")):
                return ApiError(403, "the Host header names another machine; use 127.0.0.1")
        elif path != "/health":
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not (scheme.lower() == b"bearer" and hmac.compare_digest(given, self._key)):
                return ApiError(
                    401, "the API key is missing or wrong; send Authorization: Bearer KEY",
                    code="invalid_api_key",
                )  # fmt: skip
        return None


_COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/models")


def refuse(error: ApiError) -> Response:
    """A refusal as a response."""
    headers = {"retry-after": "1"} if error.status == 429 else None
    body = json.dumps(error.as_dict())  # ASCII: a message may quote what has no UTF-8 form
    return Response(body, error.status, headers, "application/json")


async def refusal(request: Request, error: Exception) -> Response:
    """Any exception as a response."""
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path}"
        error = ApiError(error.status_code, f"{where}: {error.detail}; see /v1/models, /health")
    elif isinstance(error, EdgelinError):
        error = ApiError(400, str(error))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; see its log")
    return refuse(error)


def is_local(host: str) -> bool:
    """Whether a name or address is that of the machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names_this_machine(header: str) -> bool:
    """Whether a Host header has an address or ``localhost``, no name of a site."""
    host = header.rpartition(":")[0] if re.search(r":\d+$", header) else header
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "")  # HTTP/1.0 may have none
    return True
