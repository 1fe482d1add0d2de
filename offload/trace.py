"""Spans of time for a Chrome or Perfetto trace: what ran when, on which thread, on which tier, and how many bytes."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """`start` and `end`: seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float
    tier: str = ""
    bytes: int = 0
    layer: int = -1
    thread: str = ""


class Trace:
    """The newest `limit` spans of all threads."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self._spans: deque[Span] = deque(maxlen=limit)  # appends are atomic

    def add(self, name: str, start: float, end: float, tier: str = "", num_bytes: int = 0, layer: int = -1) -> None:
        self._spans.append(Span(name, start, end, tier, num_bytes, layer, threading.current_thread().name))

    def spans(self) -> list[Span]:
        return list(self._spans)

    def chrome(self) -> dict[str, Any]:
        """The trace in Chrome's JSON format (complete events, microseconds), for chrome://tracing or Perfetto."""
        spans = self.spans()
        threads = {name: i for i, name in enumerate(dict.fromkeys(span.thread for span in spans))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": thread}}
            for thread, i in threads.items()
        ]
        for span in spans:
            known = {"tier": span.tier or None, "bytes": span.bytes or None}
            known["layer"] = span.layer if span.layer >= 0 else None
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.tier or "compute",
                    "pid": 0,
                    "tid": threads[span.thread],
                    "ts": 1e6 * span.start,
                    "dur": 1e6 * (span.end - span.start),
                    "args": {key: value for key, value in known.items() if value is not None},
                }  # fmt: skip
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}
