"""Length-grouped continuous batching: `LengthGroupedBatcher` decides, two vLLM schedulers carry it out.

Importing this package doesn't import vLLM; naming `LengthGroupedScheduler` or `AsyncLengthGroupedScheduler` does.
"""

from __future__ import annotations

from typing import Any

from .batcher import LENGTH_BUCKETS, LengthGroupedBatcher, Row, bucket_of

__all__ = [
    "LENGTH_BUCKETS",
    "AsyncLengthGroupedScheduler",
    "LengthGroupedBatcher",
    "LengthGroupedScheduler",
    "Row",
    "bucket_of",
]


def __getattr__(name: str) -> Any:
    if name.removeprefix("Async") in ("LengthGroupedScheduler", "StockScheduler"):
        from . import schedulers

        return getattr(schedulers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
