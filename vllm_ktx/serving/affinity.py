"""Which replica a request goes to: by its prompt's head, its length, and the replicas' load and room. Pure functions of
what they are given; imports neither Ray nor vLLM.

- A conversation's requests share their beginning, and so does its prefix cache: the head of the prompt, or a session
  header, is hashed against every replica (rendezvous hashing, Thaler & Ravishankar 1998), so a replica that leaves or
  joins moves only its own share of the heads.
- A replica that carries more than its fair share hands new requests to the next in a head's order (consistent hashing
  with bounded loads, Mirrokni, Thorup & Zadimoghaddam 2018): load <= max(slack, balance * mean load).
- Long requests prefer, among the others, replicas whose cache has room for them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHARS_PER_TOKEN = 4  # of English, about
LOAD_TOKENS = 8192  # a request counts as one more for each of so many tokens
PROMPTED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/tokenize")


@dataclass(frozen=True)
class Ask:
    """What routing needs to know of a request. key: what its replica is chosen by; tokens: about how many it has."""

    key: bytes
    tokens: int = 0

    @property
    def load(self) -> float:
        """What it adds to a replica's load."""
        return 1 + self.tokens / LOAD_TOKENS


@dataclass(frozen=True)
class Candidate:
    """A replica as routing sees it. load: of requests under way, in units of short ones; free_tokens: room in its KV
    cache, None where it didn't say."""

    name: str
    load: float = 0.0
    free_tokens: int | None = None


@dataclass(frozen=True)
class Policy:
    """long_tokens: from so many on, a request looks for room. balance, slack: bound on a replica's load, see above."""

    long_tokens: int = 32768
    balance: float = 1.25
    slack: float = 8.0

    def __post_init__(self) -> None:
        if self.long_tokens < 1 or self.balance < 1 or self.slack < 1:
            raise ValueError(
                f"long_tokens={self.long_tokens}, balance={self.balance}, slack={self.slack}: each must be 1 or more"
            )

    def rank(self, ask: Ask, candidates: Sequence[Candidate], failed: Collection[str] = ()) -> list[str]:
        """Names of the candidates, the one to use first in front; those in `failed` come last."""
        if not candidates:
            return []
        bound = max(self.slack, self.balance * sum(c.load for c in candidates) / len(candidates))

        def order(candidate: Candidate) -> tuple:
            full = (
                ask.tokens >= self.long_tokens
                and candidate.free_tokens is not None
                and candidate.free_tokens < ask.tokens
            )
            return candidate.name in failed, full, candidate.load > bound, _weight(candidate.name, ask.key)

        return [candidate.name for candidate in sorted(candidates, key=order)]

    def home(self, ask: Ask, names: Sequence[str]) -> str:
        """Where the request goes when nobody is busy."""
        return min(names, key=lambda name: _weight(name, ask.key))


def _weight(name: str, key: bytes) -> bytes:
    """A replica's place in a key's order: the same in every process, independent between keys."""
    return hashlib.blake2b(name.encode() + b"\0" + key, digest_size=8).digest()


class Load:
    """What is under way, by request. One that was chosen a replica but not dispatched within `patience` seconds (its
    client left) no longer counts."""

    def __init__(self, patience: float = 30.0) -> None:
        self._patience = patience
        self._requests: dict[str, tuple[str, float, float | None]] = {}  # replica, load, expiry

    def begin(self, request: str, replica: str, load: float, dispatched: bool = False) -> None:
        """A replica was chosen for the request, or (`dispatched`) has got it."""
        self._requests[request] = replica, load, None if dispatched else time.monotonic() + self._patience

    def end(self, request: str) -> None:
        self._requests.pop(request, None)

    def by_replica(self) -> dict[str, float]:
        now, loads = time.monotonic(), {}
        for request, (replica, load, expiry) in list(self._requests.items()):
            if expiry is not None and expiry < now:
                self.end(request)
            else:
                loads[replica] = loads.get(replica, 0.0) + load
        return loads


def read_ask(path: str, headers: Mapping[str, str], body: bytes, session_header: str, head_chars: int) -> Ask:
    """The routing view of an HTTP request; header names in lower case. A body that can't be read gets an empty key."""
    session = headers.get(session_header.lower())
    text, tokens = "", 0
    if body and path.startswith(PROMPTED):
        try:
            document = json.loads(body)
            text, tokens = _prompt(document, head_chars)
            text = f"{document.get('model', '')}\n{text}"  # adapters of one model have caches of their own
        except (ValueError, AttributeError, TypeError, RecursionError):
            text, tokens = "", len(body) // CHARS_PER_TOKEN
    key = f"session\n{session}" if session else text
    return Ask(key.encode("utf-8", "replace"), tokens)


def _prompt(document: Mapping[str, Any], head_chars: int) -> tuple[str, int]:
    """The head of what the model will read, as text, and about how many tokens all of it has."""
    prompt = next((document[name] for name in ("messages", "prompt", "input") if document.get(name)), "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]  # several prompts: the first speaks for all
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return " ".join(map(str, prompt[: head_chars // CHARS_PER_TOKEN])), len(prompt)
    parts, chars = [], 0
    for part in _texts({"system": document.get("system"), "prompt": prompt}):
        if chars < head_chars:
            parts.append(part[: head_chars - chars])
        chars += len(part)
    return "\n".join(parts), chars // CHARS_PER_TOKEN


def _texts(value: Any) -> list[str]:
    """Every string in it, in order, however messages nest their content."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else []
