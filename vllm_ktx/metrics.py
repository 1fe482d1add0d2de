"""Counters of what KTX did in this process: plain integers for code and tests, mirrored to Prometheus.

The worker owns them. Through `vllm serve` they show up on `/metrics` when `PROMETHEUS_MULTIPROC_DIR` was set before the
start, since the API server and the worker are different processes. The prefix is not `vllm:`, which vLLM unregisters.
"""

from __future__ import annotations

import dataclasses
import weakref
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
    "sparse_rows": "Rows (token, layer, kv head) that read a selection of their pages",
    "sparse_pages_read": "Pages that those rows read",
    "sparse_pages_context": "Pages that those rows could have read",
    "dropped_mass": "Estimated share of softmax mass that those rows left unread, summed",
    "probed_share": "Share of their candidate pages whose two-bit codes those rows looked into, summed",
    "audited_rows": "Rows (token, layer, query head) recomputed densely",
    "audited_recall": "True share of softmax mass that those rows had read, summed",
    "audited_claim": "The share that the estimate had claimed for them, summed",
    "audited_error": "Relative error of those rows' outputs, summed",
    "tier_hits": "Pages asked for that had a slot on the device",
    "tier_late": "Pages asked for that were on their way there",
    "tier_misses": "Pages asked for that had to be fetched",
    "tier_evictions": "Pages that left the device for others",
    "tier_prefetched": "Pages fetched ahead",
    "tier_prefetch_dropped": "Pages that were to be fetched ahead and found no room",
    "tier_fetched_bytes": "Bytes moved to the device",
    "tier_written_bytes": "Bytes moved from the device to host memory and disk",
    "tier_stall_seconds": "Seconds that the model waited for pages and slots",
    "tier_corrupt": "Pages whose checksum was wrong",
    "tier_io_errors": "Page transfers that failed",
    "tier_lost": "Pages given up because they couldn't be written",
    "tier_faults": "Blocks handed back to the scheduler to be computed again",
}
_BY_LAYER = ("sparse_rows", "dropped_mass", "probed_share")
# What is counted layer by layer, on the device where there is one.
SPARSE = ("sparse_rows", "sparse_pages_read", "sparse_pages_context", "dropped_mass", "probed_share")
AUDITED = ("audited_rows", "audited_recall", "audited_claim", "audited_error")


def audit_sums(out: Any, lse: Any, dense: Any, dense_lse: Any, dropped: Any) -> tuple[Any, ...]:
    """Of a recomputed layer what `AUDITED` names: outputs `[tokens, heads, D]`, log-sum-exps `[tokens, heads]`,
    `dropped` by kv head. The first is an int, the others are tensors."""
    difference = (out.float() - dense.float()).norm(dim=-1) / dense.float().norm(dim=-1).clamp(min=1e-20)
    recall, claim = (lse - dense_lse).clamp(max=0).exp().sum(), (1 - dropped).sum()
    return lse.numel(), recall, claim * (lse.shape[1] // dropped.shape[1]), difference.sum()


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
    sparse_rows: int = 0
    sparse_pages_read: int = 0
    sparse_pages_context: int = 0
    dropped_mass: float = 0.0
    probed_share: float = 0.0
    audited_rows: int = 0
    audited_recall: float = 0.0
    audited_claim: float = 0.0
    audited_error: float = 0.0
    tier_hits: int = 0
    tier_late: int = 0
    tier_misses: int = 0
    tier_evictions: int = 0
    tier_prefetched: int = 0
    tier_prefetch_dropped: int = 0
    tier_fetched_bytes: int = 0
    tier_written_bytes: int = 0
    tier_stall_seconds: float = 0.0
    tier_corrupt: int = 0
    tier_io_errors: int = 0
    tier_lost: int = 0
    tier_faults: int = 0
    by_layer: dict[int, list[float]] = field(default_factory=dict, repr=False)  # as _BY_LAYER
    _prometheus: dict[str, Any] = field(default_factory=dict, repr=False)
    _published: dict[str, float] = field(default_factory=dict, repr=False)

    def record_step(self, cu_q: np.ndarray, context: np.ndarray, pages: Any) -> None:
        """Adds one step: `cu_q` `[rows + 1]`, `context` `[rows]`, and the page map's counts (`OpenPageStats`)."""
        count = np.diff(cu_q)
        decode = int((count == 1).sum())
        self.steps += 1
        self.decode_tokens += decode
        self.prefill_tokens += int(count.sum()) - decode
        self.context_tokens += int(context.sum())
        for f in dataclasses.fields(pages):
            setattr(self, f.name, getattr(self, f.name) + getattr(pages, f.name))
        self._export()

    def record_sparse(self, layer: int, dropped: Any, pages_read: Any, context_pages: Any, depth: Any) -> None:
        """One layer of a step, tensors: `context_pages` `[tokens]`, the others `[tokens, kv_heads]`."""
        read, had = pages_read.numpy(), context_pages.numpy()[:, None]  # small arrays: numpy's calls cost less
        chosen = read < had
        rows = int(chosen.sum())
        if not rows:
            return
        lost, probed = (float(x.numpy()[chosen].sum()) for x in (dropped, depth))
        self.add_sparse(layer, rows, int(read[chosen].sum()), int((had * chosen).sum()), lost, probed)

    def add_sparse(self, layer: int, rows: float, read: float, had: float, lost: float, probed: float) -> None:
        """What a layer gained of each of `SPARSE`."""
        self.sparse_rows += int(rows)
        self.sparse_pages_read += int(read)
        self.sparse_pages_context += int(had)
        self.dropped_mass += lost
        self.probed_share += probed
        of_layer = self.by_layer.setdefault(layer, [0.0] * len(_BY_LAYER))
        for i, gained in enumerate((rows, lost, probed)):
            of_layer[i] += gained

    def add_audit(self, rows: float, recall: float, claim: float, error: float) -> None:
        """What was gained of each of `AUDITED`."""
        self.audited_rows += int(rows)
        self.audited_recall += recall
        self.audited_claim += claim
        self.audited_error += error

    def record_tiers(self, pool: Any) -> None:
        """What a hot pool counted since the last time (`PoolStats`)."""
        for f in dataclasses.fields(pool):
            name = f"tier_{f.name}"
            if name in _HELP:
                setattr(self, name, getattr(self, name) + getattr(pool, f.name))

    def record_audit(self, *outputs: Any) -> None:
        """A recomputed layer; arguments as of `audit_sums`."""
        self.add_audit(*map(float, audit_sums(*outputs)))

    def snapshot(self) -> dict[str, Any]:
        """The counters by name."""
        return {name: getattr(self, name) for name in _HELP}

    def publish(self, registry: Any = None) -> None:
        """Creates the Prometheus counters (once), in the process's registry if none is given; called when an engine
        selects KTX."""
        if self._prometheus:
            return
        try:
            from prometheus_client import REGISTRY, Counter
        except ImportError:
            return
        for name, text in _HELP.items():
            labels = ["layer"] if name in _BY_LAYER else []
            self._prometheus[name] = Counter(f"vllm_ktx:{name}", text, labels, registry=registry or REGISTRY)

    def _export(self) -> None:
        for name, counter in self._prometheus.items():
            if name in _BY_LAYER:
                for layer, values in self.by_layer.items():
                    self._raise(f"{name}/{layer}", counter.labels(layer), values[_BY_LAYER.index(name)])
            else:
                self._raise(name, counter, getattr(self, name))

    def _raise(self, key: str, counter: Any, now: float) -> None:
        before = self._published.get(key, 0)
        if now > before:
            counter.inc(now - before)
            self._published[key] = now


STATS = KtxStats()
TRACES: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process's engines that were asked for one
ON_DEVICE: weakref.WeakSet[Any] = weakref.WeakSet()  # counters that the devices of this process's engines keep


def snapshot(worker: Any = None) -> dict[str, Any]:
    """This process's counters; also callable through `LLM.collective_rpc(snapshot)`. Waits for devices that count."""
    for counters in ON_DEVICE:
        counters.flush()
    return STATS.snapshot()


def chrome_trace(worker: Any = None) -> dict[str, Any]:
    """What this process computed, fetched and wrote when, in Chrome's format; needs `ktx.trace`. Also callable through
    `LLM.collective_rpc(chrome_trace)`. Raises RuntimeError if there is none."""
    for trace in TRACES:
        return trace.chrome()
    raise RuntimeError("there is no trace: set ktx.trace to true, and ktx.host_gib or ktx.disk_gib so that pages move")
