"""The public side: takes HTTP requests, tries replicas until one answers, streams the answer, merges their metrics.

It knows replicas through a `Backend` only. A request is retried on another replica as long as no byte of its answer is
out; a stream that breaks later ends with an error event, never as if it were complete.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from . import exposition
from .affinity import read_ask
from .options import ServeOptions
from .wire import DONE, ENDS_WITH_DONE, HOP_BY_HOP, Forward, Head, ReplicaLost, error_body, error_event

logger = logging.getLogger("vllm.ktx.serving")
REPLICA_HEADER = "x-ktx-replica"


class Backend(Protocol):
    """Where requests go. `forward` raises ReplicaLost when the chosen replica can't answer."""

    def forward(self, request: Forward) -> AsyncIterator[Head | bytes]: ...

    async def healthy(self) -> list[str]:
        """Names of the replicas whose servers say that they are healthy."""
        ...

    async def metrics(self) -> dict[str, str]:
        """Each living replica's Prometheus text, by its name."""
        ...


class Ingress:
    """Counts what it does in `counters`, which /metrics shows as `vllm_ktx:ingress_*`."""

    def __init__(self, backend: Backend, options: ServeOptions) -> None:
        self.backend, self.options = backend, options
        self.counters = {"requests": 0, "retries": 0, "failed": 0, "streams_broken": 0, "too_large": 0}

    async def handle(self, request: Request) -> Response:
        """Any request, to whatever path."""
        path = request.url.path
        if request.method == "GET" and path == "/health":
            return await self._health()
        if request.method == "GET" and path == "/metrics":
            return await self._metrics()
        body = await self._body(request)
        if body is None:
            self.counters["too_large"] += 1
            limit = self.options.max_body_mib
            message = f"the request is larger than {limit} MiB (vllm-ktx serve --max-body-mib)"
            return _json(413, error_body(413, "request_too_large", message))
        self.counters["requests"] += 1
        headers = {key.lower(): value for key, value in request.headers.items() if key.lower() not in HOP_BY_HOP}
        ask = read_ask(path, headers, body, self.options.session_header, self.options.head_chars)
        target = path + (f"?{request.url.query}" if request.url.query else "")
        return await self._try(Forward(request.method, target, headers, body, ask))

    async def _try(self, request: Forward) -> Response:
        failed: tuple[str, ...] = ()
        for attempt in range(self.options.attempts):
            parts = self.backend.forward(Forward(**vars(request) | {"failed": failed}))
            try:
                head = await anext(parts)
                assert isinstance(head, Head)
                first = await anext(parts, b"")
                assert isinstance(first, bytes)
            except ReplicaLost as lost:
                logger.warning("KTX: attempt %d of %d: %s", attempt + 1, self.options.attempts, lost)
                failed = (*failed, *([lost.replica] if lost.replica else []))
                self.counters["retries"] += attempt + 1 < self.options.attempts
                continue
            headers = head.headers | {REPLICA_HEADER: head.replica}
            if head.streams:
                return StreamingResponse(self._relay(request, first, parts), head.status, headers)
            async for part in parts:  # nothing, for a body that comes whole
                first += part  # type: ignore[operator]
            return Response(first, head.status, headers)
        self.counters["failed"] += 1
        message = f"{self.options.attempts} replicas were lost while this request waited for its first byte; try again"
        return _json(503, error_body(503, "no_replica", message))

    async def _relay(self, request: Forward, first: bytes, parts: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
        """A stream's bytes; an error event at its end if it was cut."""
        tail, reason = b"", "the stream ended without its last event"
        async with aclosing(parts):  # type: ignore[type-var]
            try:
                yield first
                tail = first[-64:]
                async for part in parts:
                    assert isinstance(part, bytes)
                    yield part
                    tail = (tail + part)[-64:]
            except ReplicaLost as lost:
                reason, tail = str(lost), b""
            else:
                if not request.path.endswith(ENDS_WITH_DONE) or DONE in tail:
                    return
        self.counters["streams_broken"] += 1
        yield error_event(502, "replica_lost", f"{reason}; the answer above is incomplete")

    async def _body(self, request: Request) -> bytes | None:
        """None if it is larger than the limit, which is known before it is all read."""
        limit = self.options.max_body_mib << 20
        if int(request.headers.get("content-length") or 0) > limit:
            return None
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                return None
            parts.append(part)
        return b"".join(parts)

    async def _health(self) -> Response:
        names = await self.backend.healthy()
        if not names:
            return _json(503, error_body(503, "no_replica", "no replica is ready"))
        return _json(200, json.dumps({"replicas": sorted(names)}).encode())

    async def _metrics(self) -> Response:
        text = exposition.merge(await self.backend.metrics())
        for name, value in self.counters.items():
            text += f"# TYPE vllm_ktx:ingress_{name}_total counter\nvllm_ktx:ingress_{name}_total {value}\n"
        return Response(text, media_type="text/plain; version=0.0.4")


def _json(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")
