"""Counters of what KTX did in this process: plain integers for code and tests, mirrored to Prometheus.

The worker owns them. Through `vllm serve` they show up on `/metrics` when `PROMETHEUS_MULTIPROC_DIR` was set before the
start, since the API server and the worker are different processes. The prefix is not `vllm:`, which vLLM unregisters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_HELP = {
    "steps": "Scheduler steps planned",
    "attention_calls": "Attention calls (layers x steps)",
    "prefill_tokens": "Tokens attended in rows of more than one token",
    "decode_tokens": "Tokens attended in rows of one token",
    "context_tokens": "Cached tokens that rows had before them, summed over rows and steps",
    "appended_tokens": "Tokens written to open pages",
    "sealed": "Pages quantized",
    "sealed_fresh": "Pages quantized straight from a prefill chunk",
    "evicted_clean": "Open copies of sealed pages dropped for room",
    "evicted_partial": "Open pages quantized before they were full, for room",
    "reopened": "Sealed pages brought back to the model dtype to be appended to",
}


@dataclass
class KtxStats:
    """See `_HELP` for the meaning of each counter."""

    steps: int = 0
    attention_calls: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0
    appended_tokens: int = 0
    sealed: int = 0
    sealed_fresh: int = 0
    evicted_clean: int = 0
    evicted_partial: int = 0
    reopened: int = 0
    _prometheus: dict[str, Any] = field(default_factory=dict, repr=False)
    _published: dict[str, int] = field(default_factory=dict, repr=False)

    def record_step(self, cu_q: np.ndarray, context: np.ndarray, pages: Any) -> None:
        """Adds one step: `cu_q` `[rows + 1]`, `context` `[rows]`, and what the page map counted in it (`OpenPageStats`)."""
        count = np.diff(cu_q)
        decode = int((count == 1).sum())
        self.steps += 1
        self.decode_tokens += decode
        self.prefill_tokens += int(count.sum()) - decode
        self.context_tokens += int(context.sum())
        for f in dataclasses.fields(pages):
            setattr(self, f.name, getattr(self, f.name) + getattr(pages, f.name))
        self._export()

    def snapshot(self) -> dict[str, int]:
        """The counters by name."""
        return {name: getattr(self, name) for name in _HELP}

    def publish(self) -> None:
        """Creates the Prometheus counters (once); called when an engine selects KTX."""
        if self._prometheus:
            return
        try:
            from prometheus_client import Counter
        except ImportError:
            return
        self._prometheus = {name: Counter(f"vllm_ktx:{name}", text) for name, text in _HELP.items()}

    def _export(self) -> None:
        for name, counter in self._prometheus.items():
            now = getattr(self, name)
            if now > self._published.get(name, 0):
                counter.inc(now - self._published.get(name, 0))
                self._published[name] = now


STATS = KtxStats()


def snapshot(worker: Any = None) -> dict[str, int]:
    """This process's counters; also callable through `LLM.collective_rpc(snapshot)`."""
    return STATS.snapshot()
