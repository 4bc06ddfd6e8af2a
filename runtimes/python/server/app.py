"""The API: OpenAI's completions and chat completions over an :class:`~.engine.Engine`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgelin.errors import EdgelinError
from edgelin.runtimes import chat
from edgelin.runtimes.sampler import Sampling
from edgelin.runtimes.server.answers import Answer
from edgelin.runtimes.server.engine import Engine, Job
from edgelin.runtimes.server.errors import ApiError
from edgelin.runtimes.server.guard import Guard, refusal
from edgelin.runtimes.server.limits import Limits
from edgelin.runtimes.server.mailbox import Mailbox
from edgelin.runtimes.server.metrics import Metrics
from edgelin.runtimes.server.reply import Reply
from edgelin.runtimes.server.requests import Call, parse
from edgelin.runtimes.server.sessions import Lease, Sessions
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.signature import Tokens

SESSION_HEADER = "x-session-id"


class Api:
    """What the routes need, and the routes.

    Args:
        bundle: The model.
        limits: Bounds.
        api_key: What clients must show; None: nothing.
        local: Whether only this machine is served.
        state_dtype: How the states of sessions are stored between calls.

    Raises:
        EdgelinError: The bundle cannot be served, or there is no such dtype.
    """

    def __init__(
        self,
        bundle: Bundle,
        limits: Limits,
        api_key: str | None = None,
        *,
        local: bool = True,
        state_dtype: str = "float32",
    ) -> None:
        self.bundle, self.limits = bundle, limits
        self.model = Path(bundle.path).resolve().name
        self.metrics = Metrics()
        self.sessions = Sessions(limits.sessions, state_dtype)
        self.engine = Engine(bundle, limits, self.metrics)
        self.metrics.watch("sessions", "Sessions that are kept.", lambda: len(self.sessions))
        self.metrics.watch("session_bytes", "Their states.", lambda: self.sessions.nbytes)
        # A request that says nothing must not be refused for it.
        most = min(Sampling.max_tokens, limits.max_tokens)
        self._defaults = {**chat.defaults(bundle), "max_tokens": most}
        self._key, self._local = api_key, local
        self._arriving = 0
        # One thread: the tokenizer has a switch that a second one would find turned.
        self._encoder = ThreadPoolExecutor(1, "edgelin-encoder")

    def app(self) -> ASGIApp:
        """The ASGI application."""
        handlers: dict[Any, Any] = {
            ApiError: refusal, EdgelinError: refusal, HTTPException: refusal,
            Exception: refusal,
        }  # fmt: skip
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.one_model),
            Route("/v1/sessions/{session:path}", self.forget, methods=["DELETE"]),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
        ]
        app = Starlette(routes=routes, exception_handlers=handlers)
        return Guard(app, self._key, self._local, self.metrics)

    def close(self) -> None:
        """Cut what runs and end the threads."""
        self.engine.close()
        self._encoder.shutdown()

    async def completions(self, request: Request) -> Response:
        """Write on from prompts."""
        return await self._begin(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """Write a reply to a dialogue."""
        return await self._begin(request, chat=True)

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """The same by its name."""
        name = request.path_params["model"]
        if name != self.model:
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.model!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        return JSONResponse(self._card())

    async def forget(self, request: Request) -> Response:
        """Drop a session."""
        name = request.path_params["session"]
        if not self.sessions.forget(name):
            raise ApiError(404, f"there is no session {name!r}", code="session_unknown")
        return JSONResponse({"id": name, "object": "session", "deleted": True})

    async def health(self, request: Request) -> Response:
        """Whether new requests are taken."""
        if self.engine.draining:
            raise ApiError(503, "the server is shutting down", code="shutdown")
        return JSONResponse({"status": "ok", "model": self.model})

    async def show_metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def _card(self) -> dict[str, Any]:
        """The model as ``/v1/models`` tells of it."""
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "edgelin"}

    async def _begin(self, request: Request, *, chat: bool) -> Response:
        """Check a request, queue its texts, and answer with what comes."""
        body = await self._arrived(request)
        call = parse(
            body, chat=chat, model=self.model, defaults=self._defaults,
            header=request.headers.get(SESSION_HEADER),
        )  # fmt: skip
        texts = len(call.prompts) * call.n
        if texts > self.limits.texts:  # before anything is done for each of them
            raise ApiError(
                400, f"the request asks for {texts} texts; at most {self.limits.texts} are allowed",
                param="n",
            )  # fmt: skip
        if call.sampling.max_tokens > self.limits.max_tokens:
            raise ApiError(
                400, f"max_tokens is {call.sampling.max_tokens}; this server allows "
                f"{self.limits.max_tokens}", param="max_tokens",
            )  # fmt: skip
        lease = None
        if call.session is not None:
            lease = self.sessions.begin(call.session, call.position)
        try:
            return await self._queued(call, lease)
        except BaseException:
            if lease is not None:
                lease.release()
            raise

    async def _queued(self, call: Call, lease: Lease | None) -> Response:
        """Queue the texts of a request."""
        start = self.engine.start if lease is None or lease.saved is None else lease.saved
        position = 0 if start is None else start.position
        loop = asyncio.get_running_loop()
        going_on = lease is not None and lease.saved is not None
        try:
            prompts = await loop.run_in_executor(
                self._encoder, self._encode, call, position, going_on
            )
        except EdgelinError as error:
            field = "prompt" if call.messages is None else "messages"
            raise ApiError(400, str(error), param=field) from None
        mailbox = Mailbox(len(prompts) * call.n, self.limits.unread)
        jobs = []
        for number, ids in enumerate(prompts):
            first, *others = (
                Job(
                    ids if i == 0 else (), call.choice(i), mailbox, number * call.n + i,
                    start, lease,
                )
                for i in range(call.n)
            )  # fmt: skip
            first.forks = others
            jobs.append(first)
        answer = Answer(
            call, self.model, self.bundle.manifest.model_hash[:12],
            sum(position + len(ids) for ids in prompts), position * len(prompts),
        )  # fmt: skip
        every = [each for job in jobs for each in (job, *job.forks)]
        reply = Reply(self.engine, self.limits.stall, answer, every, mailbox)
        self.engine.submit(jobs)
        return reply

    def _encode(self, call: Call, position: int, going_on: bool) -> list[list[int]]:
        """Token ids of every prompt."""
        if call.messages is not None:
            prompts = [self._dialogue(call.messages, position, going_on)]
        else:
            text = self.bundle.text
            prompts = [
                text.encode(p, start=position == 0) if isinstance(p, str) else p
                for p in call.prompts
            ]
        source = self.bundle.manifest.input
        assert isinstance(source, Tokens)
        for ids in prompts:
            if len(ids) > self.limits.prompt_tokens:
                raise ApiError(
                    400, f"the prompt has {len(ids)} tokens; this server reads at most "
                    f"{self.limits.prompt_tokens} at once",
                    param="prompt", code="context_length_exceeded",
                )  # fmt: skip
            if ids:
                source.check(ids, 1)
            elif position == 0:
                raise ApiError(
                    400, "the prompt is empty; give at least one token to go on from",
                    param="prompt",
                )  # fmt: skip
        return prompts

    def _dialogue(self, messages: list[dict[str, str]], position: int, going_on: bool) -> list[int]:
        """Token ids of messages, of which a session has read what came before."""
        roles = {message["role"] for message in messages}
        if going_on and "assistant" in roles:
            raise ApiError(
                400, "the session knows what was said; send only the new messages",
                param="messages",
            )  # fmt: skip
        if position and "system" in roles:
            raise ApiError(
                400, "the dialogue has begun already; a system message comes before it",
                param="messages",
            )  # fmt: skip
        return chat.dialogue(self.bundle, messages, first=position == 0)

    async def _arrived(self, request: Request) -> bytes:
        """The body of a request, of which not too many arrive at the same time."""
        if self._arriving >= self.limits.texts:
            raise ApiError(429, "too many requests are arriving; try again later")
        self._arriving += 1
        try:
            return await self._body(request)
        finally:
            self._arriving -= 1

    async def _body(self, request: Request) -> bytes:
        """The body of a request that is not too large and does not take for ever."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another site cannot send unasked
            raise ApiError(415, f"content-type is {kind!r}; send application/json")
        too_large = ApiError(
            413, f"the request is larger than {self.limits.body} bytes; send less, or allow "
            "longer prompts", code="request_too_large",
        )  # fmt: skip
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.stall):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self.limits.body:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive; send it again") from None
        except ClientDisconnect:
            raise ApiError(499, "the client has gone") from None
        return bytes(body)
