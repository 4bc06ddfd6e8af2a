"""What a server takes on at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edgelin.runtimes import checks


@dataclass(frozen=True)
class Limits:
    """Bounds; what goes beyond them is refused, never dropped in silence.

    Args:
        slots: Texts that are written at the same time.
        queue: Texts that may wait for a slot.
        sessions: Conversations whose states are kept; the one unused for longest makes room.
        prompt_tokens: Tokens of a prompt.
        max_tokens: Tokens that one text may ask for.
        grace: Seconds that running texts get when the server ends.
        stall: Seconds that a client may take to send its request, or to read what waits for it.
    """

    slots: int = 8
    queue: int = 64
    sessions: int = 32
    prompt_tokens: int = 16384
    max_tokens: int = 4096
    grace: int = 10
    stall: int = 30

    def __post_init__(self) -> None:
        """Check every bound."""
        for field in fields(self):
            least = 0 if field.name in ("queue", "sessions", "grace") else 1
            value = checks.integer(field.name, getattr(self, field.name), f"{least} or more")
            checks.require(value >= least, field.name, value, f"{least} or more")

    @property
    def texts(self) -> int:
        """Texts that are written or wait."""
        return self.slots + self.queue

    @property
    def body(self) -> int:
        """Bytes of a request: room for the longest prompt, written as clumsily as JSON allows."""
        return 65536 + 32 * self.prompt_tokens

    @property
    def unread(self) -> int:
        """Characters that may wait for a client; a text stops where they are exceeded."""
        return 65536
