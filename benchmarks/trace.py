"""Writes a Chrome / Perfetto trace of what computes, fetches and writes back when, and says how much of it overlaps.

    python -m benchmarks.trace [--out FILE] [--disk DIR] [--model smollm2] [--tokens 4000] [--decode 16] [--json]

A real engine whose device holds a quarter of the context's pages, `ktx.trace` on. Open the file in https://ui.perfetto.dev
or chrome://tracing: one row a thread, the model's with its attention layers and stalls, the fetch and the write-back
thread with theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import engine, harness, models, small_device, tiers

DEVICE_SHARE = 4  # pages for each that the device holds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="the file to write (default: trace.json)")
    parser.add_argument("--model", default="smollm2", help="smollm2 or retrieval (default: smollm2)")
    parser.add_argument("--tokens", type=int, default=4000, help="context (default: 4000)")
    parser.add_argument("--decode", type=int, default=16, help="tokens to decode (default: 16)")
    parser.add_argument("--disk", metavar="DIR", help="pages beside the device on DIR's disk, not in host memory")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object, as the last line")
    args = parser.parse_args(argv)
    layout, layers = small_device.layout_of(args.model, "k4v4")
    blocks = -(-(args.tokens + args.decode) // layout.page_size) + 2
    device = layers * blocks * layout.tiered_page_bytes(DEVICE_SHARE)
    ktx = {"format": "k4v4", "window": 512, "trace": True, "overcommit": DEVICE_SHARE}
    ktx |= small_device.settings(args.model, args.tokens, "k4v4", args.disk)
    options = {"dtype": "bfloat16"}
    setup = engine.Engine(str(models.path(args.model)), args.tokens + args.decode + 8, ktx, 1024, 2, device, options)
    trace = engine.run(setup, record, args.tokens, args.decode).value
    args.out.write_text(json.dumps(trace))
    found = {**harness.environment(), "events": len(trace["traceEvents"]), **overlap(trace["traceEvents"])}
    print(f"{args.out}: {json.dumps(found)}" if not args.json else json.dumps(found))
    return 0


def record(llm: Any, tokens: int, decode: int) -> dict[str, Any]:
    """Reads a text and goes on with it; the trace of all that."""
    import random

    from vllm_ktx.metrics import chrome_trace

    vocab = llm.llm_engine.model_config.get_vocab_size()
    ids = random.Random(0).choices(range(min(vocab, 512)), k=tokens)
    tiers.stream(llm, ids, decode, lambda: None)
    return chrome_trace()


def overlap(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of attention, of fetches and write-backs on their own threads, and how much of those two ran while the
    model's thread wasn't waiting for them."""
    threads = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans: dict[str, list[tuple[float, float]]] = {"attention": [], "fetch": [], "write back": [], "stall": []}
    for e in events:
        if e["ph"] != "X":
            continue
        kind = "stall" if e["cat"] == "stall" else e["name"]
        behind = threads[e["tid"]].startswith("ktx-")
        if kind in ("attention", "stall") or (behind and kind in spans):
            spans[kind].append((e["ts"], e["ts"] + e["dur"]))
    behind = spans["fetch"] + spans["write back"]
    moving, stalled = union(behind), union(spans["stall"])
    hidden = length(moving) - length(intersection(moving, stalled))
    found = {name.replace(" ", "_") + "_s": length(union(some)) / 1e6 for name, some in spans.items()}
    found["background_hidden_share"] = hidden / length(moving) if moving else 0.0
    return {name: round(value, 4) for name, value in found.items()}


Spans = list[tuple[float, float]]


def union(spans: Spans) -> Spans:
    """The same time without overlaps, in order."""
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def intersection(some: Spans, others: Spans) -> Spans:
    """Of two unions."""
    out, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            out.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return out


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


if __name__ == "__main__":
    sys.exit(main())
