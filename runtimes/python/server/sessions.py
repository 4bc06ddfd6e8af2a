"""Conversations between calls: the state behind the last token, kept in memory under an id.

States rest in the dtype that the server was told, and step in float32.

A call holds its session until it has ended; a second one meanwhile is refused. A call that fails or
is cut leaves the session as it was before it. When there are too many, the one unused for longest
is dropped; its id is remembered, so that a client which goes on is told instead of getting an
answer that knows nothing of what was said.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from edgelin.runtimes import state_codec
from edgelin.runtimes.server.errors import ApiError
from edgelin.runtimes.state_file import Resting, SavedStream

_REMEMBERED = 10_000  # ids of dropped sessions


class Lease:
    """A session in the hands of one call.

    Attributes:
        name: Its id.
        saved: How it stands; None for a new one.
    """

    def __init__(self, sessions: Sessions, name: str, saved: SavedStream | None) -> None:
        self._sessions = sessions
        self.name, self.saved = name, saved

    def commit(self, saved: SavedStream) -> None:
        """Keep how the call left it."""
        self._sessions._end(self, saved)

    def release(self) -> None:
        """Leave it as it was; does nothing after :meth:`commit`."""
        self._sessions._end(self, None)


class Sessions:
    """At most ``limit`` sessions, besides those that are in use; any thread may call.

    Args:
        limit: How many are kept.
        dtype: How their states are stored, as of :meth:`Stream.save`.

    Raises:
        EdgelinError: There is no such dtype.
    """

    def __init__(self, limit: int, dtype: str = "float32") -> None:
        self._limit, self._dtype = limit, state_codec.check(dtype)
        self._kept: OrderedDict[str, Resting] = OrderedDict()  # unused for longest first
        self._used: dict[str, Lease] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the states that are kept."""
        with self._lock:
            return sum(resting.nbytes for resting in self._kept.values())

    def begin(self, name: str, position: int | None) -> Lease:
        """Take a session, or begin a new one.

        Args:
            name: Its id.
            position: Where the client believes it to stand, 0 to begin it; None: anywhere.

        Raises:
            ApiError: It is in use, was dropped, or stands elsewhere.
        """
        if not self._limit:
            raise ApiError(400, "this server keeps no sessions; leave it out", param="session_id")
        with self._lock:
            if name in self._used:
                raise ApiError(
                    409, f"session {name!r} is in use by another call; wait for its end",
                    param="session_id", code="session_busy",
                )  # fmt: skip
            resting = self._kept.get(name)
            if resting is None and name in self._dropped and position != 0:
                raise ApiError(
                    404,
                    f"session {name!r} was dropped to make room for others; begin it again with "
                    "session_position 0 and all that was said",
                    param="session_id", code="session_dropped",
                )  # fmt: skip
            stands = 0 if resting is None else resting.position
            if position is not None and position != stands:
                raise ApiError(
                    409, f"session {name!r} stands at position {stands}, not {position}",
                    param="session_position", code="session_position",
                )  # fmt: skip
            saved = None if resting is None else resting.wake()
            self._used[name] = lease = Lease(self, name, saved)
            return lease

    def forget(self, name: str) -> bool:
        """Drop a session at its client's wish; False where there is none.

        Raises:
            ApiError: It is in use.
        """
        with self._lock:
            if name in self._used:
                raise ApiError(
                    409, f"session {name!r} is in use by a call; wait for its end",
                    param="session_id", code="session_busy",
                )  # fmt: skip
            known = name in self._dropped
            self._dropped.pop(name, None)
            return self._kept.pop(name, None) is not None or known

    def _end(self, lease: Lease, saved: SavedStream | None) -> None:
        """A call has ended."""
        resting = None if saved is None else Resting.of(saved, self._dtype)
        with self._lock:
            if self._used.get(lease.name) is not lease:
                return
            del self._used[lease.name]
            if resting is None:
                return
            self._dropped.pop(lease.name, None)
            self._kept[lease.name] = resting
            self._kept.move_to_end(lease.name)
            while len(self._kept) > self._limit:
                oldest = next((n for n in self._kept if n not in self._used), None)
                if oldest is None:
                    return
                del self._kept[oldest]
                self._dropped[oldest] = None
            while len(self._dropped) > _REMEMBERED:
                self._dropped.popitem(last=False)
