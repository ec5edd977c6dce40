"""Streams and events of a device that is a CPU: tests decide when the work queued there has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tpkernels.symm import streams


class Event:
    """``passed`` is asked at each query."""

    def __init__(self, passed: Callable[[], bool]) -> None:
        self.query, self.records = passed, 0


class Stream:
    def record_event(self, event: Event) -> None:
        event.records += 1

    def wait_event(self, event: Event) -> None:
        pass


def use_events(patch: pytest.MonkeyPatch, passed: Callable[[], bool]) -> None:
    """From here on, workspaces on CPUs take their calls to be queued."""
    stream: Any = Stream()
    patch.setattr(streams, "order_of", lambda _: streams.DeviceOrder())
    patch.setattr(streams, "current_stream", lambda _: stream)
    patch.setattr(streams, "new_event", lambda _: Event(passed))
