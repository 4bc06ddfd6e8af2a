"""What the worker thread has written for a request and its client has not yet taken.

Pieces of text that wait are joined: a client that reads slowly gets fewer and longer ones, holds
nobody up, and no more than a bound waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

from edgelin.runtimes.server.errors import ApiError


@dataclass(frozen=True)
class End:
    """How a text ended.

    Args:
        reason: ``"stop"`` or ``"length"``; None where it failed.
        tokens: Tokens that were written.
        position: Tokens that the stream has read.
        error: Why it failed.
    """

    reason: str | None
    tokens: int = 0
    position: int = 0
    error: ApiError | None = None


@dataclass(frozen=True)
class Event:
    """News of one text of a request."""

    index: int
    text: str
    end: End | None


class Mailbox:
    """Filled by the worker thread, emptied in the event loop that made it.

    Args:
        texts: Texts of the request.
        limit: Characters that may wait.
    """

    def __init__(self, texts: int, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._pieces: dict[int, list[str]] = {}
        self._ends: dict[int, End] = {}
        self._size, self._limit = 0, limit
        self.open = texts  # texts whose end has not been taken

    def put(self, index: int, text: str) -> bool:
        """Add to a text; False where too much waits already, and the text should stop."""
        if not text:
            return True
        with self._lock:
            self._size += len(text)
            if self._size > self._limit:
                return False
            self._pieces.setdefault(index, []).append(text)
        self._wake()
        return True

    def end(self, index: int, end: End) -> None:
        """Tell that a text has ended."""
        with self._lock:
            self._ends[index] = end
        self._wake()

    async def take(self) -> list[Event]:
        """All that is new, by text; waits until there is something."""
        await self._ready.wait()
        with self._lock:
            self._ready.clear()
            pieces, ends = self._pieces, self._ends
            self._pieces, self._ends, self._size = {}, {}, 0
        self.open -= len(ends)
        return [
            Event(index, "".join(pieces.get(index, ())), ends.get(index))
            for index in sorted(pieces.keys() | ends.keys())
        ]

    def _wake(self) -> None:
        """Wake who waits; after the loop has ended, nobody does."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ready.set)
