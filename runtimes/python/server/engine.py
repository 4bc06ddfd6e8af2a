"""Continuous batching: one thread that owns a pool and writes all texts of a server.

A turn of its loop is one call of the pool. Every text that is being written reads its last token;
beside them, prompts that wait are read by turns, at most one chunk of tokens in all, so that a long
prompt holds nobody up for longer than a chunk takes. Texts join and leave between two turns. Each
one draws with its own sampler, seed and stop strings, and gets what a stream alone would have got.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes import capsules
from edgelin.runtimes.pool import LostError
from edgelin.runtimes.sampler import Sampler, Sampling
from edgelin.runtimes.server.errors import ApiError
from edgelin.runtimes.server.limits import Limits
from edgelin.runtimes.server.mailbox import End, Mailbox
from edgelin.runtimes.server.metrics import Metrics
from edgelin.runtimes.server.sessions import Lease
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.state_file import SavedStream
from edgelin.runtimes.text import TextDecoder, TextTail, flush

_log = logging.getLogger("edgelin")


@dataclass(eq=False)
class Job:
    """One text to write.

    Args:
        ids: Tokens to read first; none to go on from ``start``.
        sampling: How to write.
        mailbox: Where the text goes.
        index: Which text of its request it is.
        start: Where the stream begins; None: where streams of the bundle begin.
        lease: The session in which the stream is kept afterwards.
        forks: Further texts of the same prompt, which is read once.
    """

    ids: Sequence[int]
    sampling: Sampling
    mailbox: Mailbox
    index: int = 0
    start: SavedStream | None = None
    lease: Lease | None = None
    forks: list[Job] = field(default_factory=list)
    cancelled: bool = False


class _Row:
    """A job in a slot of the pool."""

    def __init__(self, job: Job, slot: int, bundle: Bundle) -> None:
        self.job, self.slot = job, slot
        self.next = list(job.ids)  # what the stream still has to read
        self.tail = TextTail()
        self.decoder = TextDecoder(bundle.text, self.tail, tuple(job.sampling.stop))
        self.sampler = Sampler(job.sampling)
        self.reading = True  # until the prompt has been read
        self.written = 0
        self.reason: str | None = None  # how it ends, once the last token has been read


class Engine:
    """The pool of a bundle and the thread that runs it.

    Args:
        bundle: A model of text.
        limits: Slots and queue.
        metrics: Told of every turn.

    Raises:
        EdgelinError: The model reads features, or has a state that grows.
    """

    def __init__(self, bundle: Bundle, limits: Limits, metrics: Metrics) -> None:
        _ = bundle.text
        tokenizer = bundle.manifest.tokenizer
        self._end_tokens = frozenset() if tokenizer is None else tokenizer.ends
        self._bundle, self._limits, self._metrics = bundle, limits, metrics
        self._pool = bundle.pool(limits.slots)
        self.start = capsules.find(bundle, None)
        self._rows: deque[_Row] = deque()  # the worker's own; those before others read first
        self._waiting: deque[Job] = deque()
        self._unfinished = 0
        self._deadline: float | None = None  # when running texts are cut
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="edgelin-engine", daemon=True)
        self._thread.start()
        metrics.watch("active_streams", "Texts being written.", lambda: len(self._rows))
        metrics.watch("queue", "Texts that wait for a slot.", lambda: self.queued)
        metrics.watch("slots", "Texts that can be written at once.", lambda: limits.slots)
        metrics.watch("slots_free", "Slots without a text.", lambda: self._pool.free)

    @property
    def queued(self) -> int:
        """Texts that wait for a slot."""
        return max(0, self._unfinished - len(self._rows))

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken on."""
        return self._deadline is not None or self._closed

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take on the texts of a request, all or none.

        Raises:
            ApiError: They are too many for now (429), or the server is ending (503).
        """
        count = sum(1 + len(job.forks) for job in jobs)
        with self._changed:
            if self.draining:
                raise ApiError(503, "the server is shutting down; try another one", code="shutdown")
            if self._unfinished + count > self._limits.texts:
                raise ApiError(
                    429, f"{self._unfinished} texts are being written or wait; try again later",
                    code="queue_full",
                )  # fmt: skip
            self._unfinished += count
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Stop texts that nobody waits for; what has ended stays as it is."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def drain(self, grace: float) -> None:
        """Take on nothing new; what runs is cut after the seconds of grace."""
        with self._changed:
            self._deadline = time.monotonic() + grace
            self._changed.notify()

    def close(self) -> None:
        """Cut what runs and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """The loop of the worker thread."""
        while True:
            with self._changed:
                while not (self._waiting or self._rows or self._closed):
                    self._changed.wait()
            try:
                if self._closed or (self._deadline or math.inf) < time.monotonic():
                    self._cut_all(ApiError(503, "the server is shutting down", code="shutdown"))
                if self._closed:
                    return
                self._turn()
            except Exception:  # a bug: tell all who wait, and go on for others
                _log.exception("the server failed in a turn")
                self._cut_all(ApiError(500, "the server failed; see its log"))

    def _turn(self) -> None:
        """One call of the pool, and what follows from its answers."""
        self._drop_cancelled()
        self._admit()
        steps = self._steps()
        if not steps:
            return
        begin = time.perf_counter()
        try:
            outputs = self._pool.feed(steps)
        except LostError as error:
            outputs = error.outputs
            for row in [row for row in self._rows if row.slot in error.slots]:
                self._leave(row, End(None, error=ApiError(500, str(error))))
        self._metrics.steps.observe(time.perf_counter() - begin)
        for row in list(self._rows):
            if row.slot in outputs:
                if row.reading:
                    self._metrics.read.inc(len(steps[row.slot]))
                del row.next[: len(steps[row.slot])]
                self._advance(row, outputs[row.slot])

    def _steps(self) -> dict[int, list[int]]:
        """What every stream reads in this turn; those whose prompts go on stand last then."""
        steps, budget, more = {}, self._bundle.manifest.chunk, []
        for row in self._rows:
            if not row.reading:
                steps[row.slot] = row.next
            elif budget:
                steps[row.slot] = part = row.next[:budget]
                budget -= len(part)
                more.append(row)
        for row in more:
            self._rows.remove(row)
            self._rows.append(row)
        return steps

    def _admit(self) -> None:
        """Give free slots to those that wait."""
        while self._pool.free:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            slot = self._pool.add(capsule=capsules.NONE)
            row = _Row(job, slot, self._bundle)
            self._rows.append(row)
            start = job.start or self.start
            if start is not None:
                self._pool.restore(slot, start)
            outputs = self._pool.outputs(slot)
            if not row.next and outputs is not None:
                self._advance(row, outputs)

    def _advance(self, row: _Row, logits: NDArray[np.float32]) -> None:
        """Go on with a stream after its last step [vocab]."""
        if row.next:
            return
        if row.reading:
            row.reading = False
            self._fork(row)
        if row.reason is None:
            self._write(row, logits)
        if row.reason is not None and not row.next:
            end = End(row.reason, row.written, self._pool.position(row.slot))
            if row.job.lease is not None:
                try:
                    row.job.lease.commit(self._pool.snapshot(row.slot))
                except EdgelinError as error:  # a state that is not finite: this text's, no other's
                    end = End(None, error=ApiError(500, str(error)))
            self._leave(row, end)

    def _fork(self, row: _Row) -> None:
        """Have the other texts of a prompt begin where it ends."""
        forks, row.job.forks = row.job.forks, []
        if not forks:
            return
        here = self._pool.snapshot(row.slot)
        for job in forks:
            job.ids, job.start = (), here
        with self._changed:
            self._waiting.extendleft(reversed(forks))

    def _write(self, row: _Row, logits: NDArray[np.float32]) -> None:
        """Draw a token; it is still to be read then, unless nobody needs the state behind it."""
        job, pool = row.job, self._pool
        if row.written == job.sampling.max_tokens:  # 0 was asked for
            row.reason = "length"
            return
        token = row.sampler.choose(logits, pool.recent(row.slot), pool.position(row.slot))
        if token in self._end_tokens:
            row.reason, text = "stop", flush(row.tail)
        else:
            row.written += 1
            self._metrics.written.inc()
            text = row.decoder.push(token)
            if row.decoder.stopped:
                row.reason = "stop"
            elif row.written == job.sampling.max_tokens:
                row.reason = "length"
                text += flush(row.tail)
            if row.reason is None or job.lease is not None:
                row.next = [token]
        if not job.mailbox.put(job.index, text):
            job.cancelled = True

    def _drop_cancelled(self) -> None:
        """Free what nobody waits for."""
        with self._changed:
            jobs = [job for job in self._waiting if job.cancelled]
            for job in jobs:
                self._waiting.remove(job)
        gone = End(None, error=ApiError(499, "the client does not read what is written for it"))
        for job in jobs:
            self._end(job, gone)
        for row in [row for row in self._rows if row.job.cancelled]:
            self._leave(row, gone)

    def _cut_all(self, error: ApiError) -> None:
        """End everything with an error."""
        with self._changed:
            jobs = list(self._waiting)
            self._waiting.clear()
        jobs += [row.job for row in self._rows]
        self._rows.clear()
        for slot in self._pool.slots:
            self._pool.remove(slot)
        for job in jobs:
            self._end(job, End(None, error=error))

    def _leave(self, row: _Row, end: End) -> None:
        """Free the slot of a text that has ended."""
        self._rows.remove(row)
        self._pool.remove(row.slot)
        self._end(row.job, end)

    def _end(self, job: Job, end: End) -> None:
        """Tell the end of a text, and of those that were to begin where its prompt ends."""
        for each in (job, *job.forks):
            if each.lease is not None:
                each.lease.release()
            with self._changed:
                self._unfinished -= 1
            each.mailbox.end(each.index, end)
