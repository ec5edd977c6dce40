"""What ``/metrics`` shows, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The numbers of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tpkernels_requests",
            "Requests by HTTP status; 499: the client hung up",
            ["status"],
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "tpkernels_prompt_tokens", "Tokens of prompts", registry=self._registry
        )
        self.generated_tokens = Counter(
            "tpkernels_generated_tokens", "Tokens generated", registry=self._registry
        )
        self.first_token_seconds = Histogram(
            "tpkernels_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.token_seconds = Histogram(
            "tpkernels_time_per_output_token_seconds",
            "Between two tokens of a request",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Has requests counted whenever the metrics are read."""
        for name, meaning, count in (
            ("running", "Requests of which tokens have been generated", running),
            ("waiting", "Requests without a token so far", waiting),
        ):
            gauge = Gauge(f"tpkernels_requests_{name}", meaning, registry=self._registry)
            gauge.set_function(count)

    def text(self) -> bytes:
        """All of them, as `CONTENT_TYPE`."""
        return generate_latest(self._registry)
