"""What sparse attention costs in quality: the part of `benchmarks.quality` behind `--mode sparse`.

Stock vLLM, KTX dense and KTX sparse at the same page format take the same documents and haystacks (`needles`), float32,
alone in the batch. With chunks of one page every row of a prompt selects its own pages, as a decode step does, so the
likelihoods are those of decoding; with big chunks blocks of 64 rows share a selection, as in a long prefill. Changes
are paired token by token. `far`: the last quarter of each document alone, where selection has the most to leave out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import engine, harness, needles
from benchmarks.needles import Answers, Haystack

CHUNKS = (64, 2048)  # row by row; blocks of 64 rows
DEFAULTS = {"window": 1024}
AUDIT_ROWS = 0.02  # share of rows to audit, whatever the chunk
LENGTHS = 4


@dataclass(frozen=True)
class Work:
    """What every engine gets. `scored[i]`: rows of document i's scores that count (None: all)."""

    documents: list[list[int]]
    scored: list[list[int] | None]
    haystacks: list[Haystack]


@dataclass(frozen=True)
class Measured:
    """`nll`: of each document, by scored token; `counters`: KTX's, of the documents alone; `dropped`: mass by layer."""

    nll: list[np.ndarray]
    answers: list[Answers]
    counters: dict[str, float]
    dropped: list[float]


def measure(llm: Any, work: Work) -> Measured:
    """Runs inside the engine's process."""
    from vllm_ktx import metrics

    scores = [engine.score(llm, ids).nll for ids in work.documents]
    counters = metrics.snapshot()
    dropped = [lost / rows for _, (rows, lost, *_) in sorted(metrics.STATS.by_layer.items())]
    nll = [s if rows is None else s[rows] for s, rows in zip(scores, work.scored, strict=True)]
    return Measured(nll, needles.answer(llm, work.haystacks), counters, dropped)


@dataclass
class Bench:
    """One model's work, with stock vLLM's and KTX's dense results to compare sparse ones with."""

    folder: Path
    work: Work
    fmt: str
    max_model_len: int
    window: int
    stock: Measured = field(init=False)

    def run(self, ktx: dict[str, Any] | None, chunk: int) -> Measured:
        name = "stock vLLM" if ktx is None else f"KTX {json.dumps(ktx)}"
        print(f"[quality] {name}, chunks of {chunk} ...", file=sys.stderr, flush=True)
        setup = engine.Engine(str(self.folder), self.max_model_len, ktx, chunk, options={"enable_prefix_caching": True})
        ran = engine.run(setup, measure, self.work)
        print(f"[quality] {name}, chunks of {chunk}: {ran.seconds:.0f} s", file=sys.stderr, flush=True)
        return ran.value

    def dense(self, chunk: int) -> Measured:
        return self.run({"format": self.fmt, "attention": "dense"}, chunk)

    def sparse(self, settings: dict[str, Any], chunk: int, dense: Measured) -> dict[str, Any]:
        """One row of the report."""
        rate = min(1.0, AUDIT_ROWS * chunk / 64)
        ktx = {"format": self.fmt, **DEFAULTS, "audit_rate": rate, **settings}
        found = self.run(ktx, chunk)
        return {
            "ktx": ktx,
            "chunk": chunk,
            "vs_dense": self.against(found, dense),
            "vs_stock": self.against(found, self.stock),
            "needles": needles.figures(self.work.haystacks, found.answers),
            "pages": pages_of(found),
            "audit": audit_of(found.counters),
            "dropped_mass_by_layer": [round(x, 5) for x in found.dropped],
        }

    def against(self, found: Measured, base: Measured) -> dict[str, Any]:
        far = [[x[-(len(x) // 4) :] for x in nll] for nll in (found.nll, base.nll)]
        changes = {
            "all": change(found.nll, base.nll),
            "far": change(*far),
            "far_by_document": [change([ours], [theirs])["change"] for ours, theirs in zip(*far, strict=True)],
        }
        lost = needles.difference(self.work.haystacks, found.answers, base.answers, self.window, self.stock.answers)
        return {"perplexity": changes, "needles": lost}


def change(nll: Sequence[np.ndarray], base: Sequence[np.ndarray]) -> dict[str, Any]:
    """Relative change of perplexity and its standard error, from the paired differences of tokens."""
    ours, theirs = np.concatenate(nll), np.concatenate(base)
    ratio = float(np.exp((ours - theirs).mean()))
    return {
        "ppl": float(np.exp(ours.mean())),
        "ppl_base": float(np.exp(theirs.mean())),
        "change": ratio - 1,
        "stderr": float(ratio * (ours - theirs).std(ddof=1) / np.sqrt(len(ours))),
        "tokens": len(ours),
    }


def pages_of(found: Measured) -> dict[str, float]:
    """Averages over the rows (token, layer, kv head) of the documents that left pages out."""
    counters, rows = found.counters, max(1, found.counters["sparse_rows"])
    return {
        "rows": counters["sparse_rows"],
        "read": counters["sparse_pages_read"] / rows,
        "context": counters["sparse_pages_context"] / rows,
        "share_read": counters["sparse_pages_read"] / max(1, counters["sparse_pages_context"]),
        "dropped_mass": counters["dropped_mass"] / rows,
    }


def audit_of(counters: dict[str, float]) -> dict[str, float]:
    """Averages over the rows (token, layer, query head) that were recomputed densely."""
    rows = counters["audited_rows"]
    if not rows:
        return {}
    return {
        "rows": rows,
        "recall": counters["audited_recall"] / rows,
        "claim": counters["audited_claim"] / rows,
        "output_error": counters["audited_error"] / rows,
    }


def lengths(context: int) -> list[int]:
    """Prompt lengths of the heat map: halvings of the context."""
    return [context >> i for i in reversed(range(LENGTHS))]


def run(bench: Bench, settings: dict[str, Any], variants: Sequence[dict[str, Any]], common: dict) -> dict[str, Any]:
    """The whole document: the first row is the default settings at one page a chunk, then big chunks, then variants."""
    bench.stock = stock = bench.run(None, CHUNKS[0])
    dense = {chunk: bench.dense(chunk) for chunk in CHUNKS}
    rows = [bench.sparse(settings, chunk, dense[chunk]) for chunk in CHUNKS]
    rows += [bench.sparse({**settings, **variant}, chunk, dense[chunk]) for variant in variants for chunk in CHUNKS]
    haystacks = bench.work.haystacks
    return {
        **common,
        "format": bench.fmt,
        "documents": len(bench.work.documents),
        "stock": {"needles": needles.figures(haystacks, stock.answers)},
        "dense": [
            {
                "chunk": chunk,
                "vs_stock": bench.against(found, stock),
                "needles": needles.figures(haystacks, found.answers),
            }
            for chunk, found in dense.items()
        ],
        "rows": rows,
    }


def report(document: dict[str, Any]) -> None:
    print(f"{document['model']}, sparse, {document['format']}, context {document['context']}; {document['hardware']}")
    columns = f"{'ppl %, all':>16} {'far':>16} {'needle nats':>16} {'pages':>12} {'dropped':>8} {'audited':>10}"
    print(" " * 28, columns)
    for row in document["dense"]:
        line(f"dense, chunk {row['chunk']}, vs stock", row["vs_stock"])
    for row in document["rows"]:
        kept = ", ".join(f"{k}={v}" for k, v in row["ktx"].items() if k not in ("format", "audit_rate"))
        print(f"sparse: {kept}, chunks of {row['chunk']}")
        pages, audit = row["pages"], row["audit"]
        more = f"{pages['read']:.1f}/{pages['context']:.1f} {pages['dropped_mass']:>8.4f}"
        if audit:
            more += f" {audit['recall']:.4f} claimed {audit['claim']:.4f}, output error {audit['output_error']:.4f}"
        line("  vs dense", row["vs_dense"], more)
        line("  vs stock", row["vs_stock"])


def line(name: str, against: dict[str, Any], more: str = "") -> None:
    def percent(x: dict[str, Any]) -> str:
        return f"{100 * x['change']:+.3f} +- {100 * x['stderr']:.3f}"

    lost = against["needles"]
    found = lost.get("answerable")
    nats = f"{found['nats']:+.3f} +- {found['nats_stderr']:.3f}" if found else "-"
    perplexity = against["perplexity"]
    print(f"{name:<28} {percent(perplexity['all']):>16} {percent(perplexity['far']):>16} {nats:>16} {more}")


def save(name: str, document: dict[str, Any]) -> None:
    """`quality-NAME-sparse.json` and `.png`."""
    harness.RESULTS.mkdir(exist_ok=True)
    file = harness.RESULTS / f"quality-{name}-sparse.json"
    file.write_text(json.dumps(document, indent=2) + "\n")
    first = document["rows"][0]
    panels = {
        "stock vLLM": document["stock"]["needles"],
        f"KTX {document['format']}, dense": document["dense"][0]["needles"],
    }
    panels[f"KTX {document['format']}, sparse, window {first['ktx']['window']}"] = first["needles"]
    needles.heat_map(panels, file.with_suffix(".png"))
