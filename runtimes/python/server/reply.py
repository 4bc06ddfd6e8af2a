"""Sends what is written for a request, and stops the writing when nobody takes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from edgelin.runtimes.server.answers import Answer, event
from edgelin.runtimes.server.engine import Engine, Job
from edgelin.runtimes.server.guard import refuse
from edgelin.runtimes.server.mailbox import Mailbox

_log = logging.getLogger("edgelin")


class Reply(Response):
    """An answer under way.

    Args:
        engine: Told when nobody waits for the texts any more.
        stall: Seconds that a client may take to read what waits for it.
        answer: What is told.
        jobs: All texts of the request.
        mailbox: Where they arrive.
    """

    def __init__(
        self, engine: Engine, stall: float, answer: Answer, jobs: Sequence[Job], mailbox: Mailbox
    ) -> None:
        super().__init__()
        self._engine, self._stall = engine, stall
        self._answer, self._jobs, self._mailbox = answer, jobs, mailbox

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        work = asyncio.ensure_future(self._stream(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._engine.cancel(self._jobs)
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], TimeoutError):  # the server closes the connection then
            _log.warning("a client did not read its answer for %s seconds", self._stall)
        elif isinstance(results[0], Exception):
            raise results[0]

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come, or all at the end."""
        answer, streams = self._answer, self._answer.call.stream
        begun = False
        while self._mailbox.open and answer.failed is None:
            news = await self._mailbox.take()
            for each in news:
                answer.add(each)
            if not streams or (answer.failed is not None and not begun):
                continue
            chunks = [chunk for each in news for chunk in answer.chunks(each)]
            if not begun:
                await send(_EVENT_STREAM)
                chunks[:0] = answer.opening(len(self._jobs))
                begun = True
            if chunks:
                await self._send(send, chunks)
        if not begun:
            failed = answer.failed
            response = JSONResponse(answer.whole()) if failed is None else refuse(failed)
            await response(scope, receive, send)
            return
        failed = answer.failed
        last = answer.closing() if failed is None else [event(failed.as_dict())]
        await self._send(send, last, more=False)

    async def _send(self, send: Send, chunks: Sequence[str], *, more: bool = True) -> None:
        """Send events to a client that reads them."""
        body = "".join(chunks).encode()
        async with asyncio.timeout(self._stall):
            await send({"type": "http.response.body", "body": body, "more_body": more})


_EVENT_STREAM: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy must not collect the events
    ],
}


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
