"""What ingress and replicas hand each other, and the server-sent events that both read and write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from .affinity import Ask

DONE = b"data: [DONE]"
# Paths whose event streams end with DONE: without it they were cut.
ENDS_WITH_DONE = ("/v1/completions", "/v1/chat/completions")
# Of one connection, not of the request (RFC 9110, 7.6.1), or set anew by whoever sends the bytes on.
HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    "content-length date server".split()
)


@dataclass(frozen=True)
class Forward:
    """A request on its way to a replica. `failed`: replicas that were tried before."""

    method: str
    target: str  # path and query
    headers: dict[str, str]
    body: bytes
    ask: Ask
    failed: tuple[str, ...] = field(default=())

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(frozen=True)
class Head:
    """The first thing a replica answers; bytes of the body follow."""

    status: int
    headers: dict[str, str]
    replica: str

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class ReplicaLost(RuntimeError):
    """The replica, or its engine, can't answer: another one may. `replica`: its name, where it is known."""

    def __init__(self, reason: str, replica: str = "") -> None:
        super().__init__(reason, replica)
        self.reason, self.replica = reason, replica

    def __str__(self) -> str:
        return f"replica {self.replica or 'unknown'} was lost: {self.reason}"


def error_body(status: int, kind: str, message: str) -> bytes:
    """An error in the form of vLLM's and OpenAI's servers."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def error_event(status: int, kind: str, message: str) -> bytes:
    """The same as an event, for a stream whose status is out already. A blank line first ends an event that was cut."""
    return b"\n\ndata: " + error_body(status, kind, message) + b"\n\n"
