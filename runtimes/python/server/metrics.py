"""What ``/metrics`` tells, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counters of one server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "edgelin_requests", "Answered requests.", ["path", "status"], registry=registry
        )
        self.tokens = Counter("edgelin_tokens", "Tokens.", ["kind"], registry=registry)
        self.steps = Histogram(
            "edgelin_step_seconds", "Time of a turn of the model over all streams.",
            buckets=_STEP_SECONDS, registry=registry,
        )  # fmt: skip
        self.read, self.written = (self.tokens.labels(kind) for kind in ("prompt", "generated"))

    def watch(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Show a number as it is whenever someone asks."""
        Gauge(f"edgelin_{name}", what, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)
