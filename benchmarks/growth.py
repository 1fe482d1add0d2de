"""Growth: what a decoded token costs from 8K to 1M tokens of context, by part, and a prefilled token from 32K to 128K.

python -m benchmarks.growth [--contexts 8192,131072,1048576] [--shape llama-3.1-8b] [--json] [--save growth]

One attention layer, one sequence, one thread, CPU time: the lower quartile, since other processes only ever add. The
parts of a sparse decode step are differences between calls that run in turns, each behind a pass over other memory, so
that no cache keeps what a step of a model would read again:

    scan    a step that selects one page by `header` scoring, less a dense step over as many pages as it reads (which
            are sinks and window): reading all headers, ranking, choosing
    probes  what a step that selects one page costs more with `cascade` scoring: two-bit codes, ranking again
    pages   the rest of a `cascade` step: attention over the pages that were read, and the join

`scan_gb_s` is the headers' bytes over all of `scan`, so less than what the scan alone reaches; `memory_gb_s` is what
one thread reads from memory at best (`harness.read_bandwidth`), measured at the same context. vLLM's op is measured up
to --stock-up-to tokens: at 1M its cache alone takes 4.3 GB. Prefill is one chunk with `header` scoring.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_ktx.attention_backends.selection import SparseSettings

from . import baseline, harness
from .problem import SHAPES, Problem, make_problem

CONTEXTS = "8192,16384,32768,65536,131072,262144,524288,1048576"
PREFILL = "32768,65536,131072"
FLUSH = 24 << 20  # float32: three times the largest last-level cache that is common
PARTS = ("pages", "scan", "probes")


def in_turns(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """CPU ms of each call, the lower quartile."""
    flush, times = torch.ones(FLUSH), {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            flush.sum()
            start = time.process_time()
            call()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: sorted(values[1:])[(len(values) - 1) // 4] for name, values in times.items()}


def step(problem: Problem, kernels: Any, settings: SparseSettings | None, pages: int = 0) -> Callable[[], None]:
    """One call of the kernels: sparse, or dense, over the first `pages` of the block table if given."""
    out, inputs = torch.empty_like(problem.q), problem.kernel_inputs()
    if pages:
        tokens = min(problem.context, pages * problem.layout.page_size)
        inputs |= {"context": torch.tensor([tokens], dtype=torch.int32)}
    if settings is not None:
        inputs |= {"sparse": settings, "headers": problem.headers, **harness.counters(problem)}
    return lambda: kernels.attention(problem.layout, out=out, num_threads=1, **inputs)


def read_by(problem: Problem, kernels: Any, settings: SparseSettings) -> tuple[float, float]:
    """Pages that a kv head reads, and the estimated dropped mass, means over heads."""
    counters, out = harness.counters(problem), torch.empty_like(problem.q)
    more = {"sparse": settings, "headers": problem.headers, **counters}
    kernels.attention(problem.layout, out=out, **more, **problem.kernel_inputs())
    return float(counters["pages_read"].float().mean()), float(counters["dropped"].mean())


def decode(problem: Problem, kernels: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Costs of one decoded token, by part."""
    settings = {scoring: SparseSettings(scoring=scoring) for scoring in ("header", "cascade")}
    read = {name: read_by(problem, kernels, own) for name, own in settings.items()}
    for scoring in ("header", "cascade"):
        settings[f"{scoring} one"] = SparseSettings(scoring=scoring, select="top_k", top_k=1)
    calls = {name: step(problem, kernels, own) for name, own in settings.items()}
    always = round(read_by(problem, kernels, settings["header one"])[0])
    calls["always"] = step(problem, kernels, None, always)
    if problem.context <= args.stock_up_to:
        calls |= {"dense": step(problem, kernels, None), "stock": baseline.VllmAttention(problem)}
    cost = in_turns(calls, args.rounds)
    scan = max(0.0, cost["header one"] - cost["always"])
    probes = max(0.0, cost["cascade one"] - cost["header one"])
    header_bytes = problem.layout.header_bytes * (problem.context // problem.layout.page_size)
    return {
        "context": problem.context,
        "header_ms": cost["header"],
        "cascade_ms": cost["cascade"],
        "dense_ms": cost.get("dense"),
        "stock_ms": cost.get("stock"),
        "scan_ms": scan,
        "probes_ms": probes,
        "pages_ms": max(0.0, cost["cascade"] - scan - probes),
        "pages_read": {name: pages for name, (pages, _) in read.items()} | {"always": always},
        "dropped": {name: dropped for name, (_, dropped) in read.items()},
        "scan_gb_s": header_bytes / scan / 1e6 if scan else None,
        "memory_gb_s": harness.read_bandwidth(),
    }


def prefill(problem: Problem, kernels: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Cost of one token of a prefill chunk."""
    cost = in_turns({"header": step(problem, kernels, SparseSettings(scoring="header"))}, max(2, args.rounds // 6))
    per_token = cost["header"] / problem.query_len
    return {"context": problem.context, "chunk": problem.query_len, "ms_per_token": per_token}


def plot(document: dict[str, Any], path: str) -> None:
    """Decode by part as stacked areas, whole steps as lines, both axes logarithmic but for the stack."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document["decode"]
    contexts = [row["context"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name in ("stock", "dense", "cascade", "header"):
        points = [(row["context"], row[f"{name}_ms"]) for row in rows if row[f"{name}_ms"] is not None]
        label = {"stock": "vLLM's CPU op", "dense": "KTX dense"}.get(name, f"KTX sparse, {name}")
        left.loglog(*zip(*points, strict=True), marker="o", label=label)
    left.set(title="one decoded token, one layer", xlabel="context", ylabel="CPU ms")
    labels = ("pages: attention", "headers: scan and choice", "two-bit codes: probes")
    right.stackplot(contexts, *([row[f"{part}_ms"] for row in rows] for part in PARTS), labels=labels)
    right.set(title="KTX sparse (cascade), by part", xlabel="context", ylabel="CPU ms", xscale="log")
    for axis in (left, right):
        axis.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


def parse(argv: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--contexts", default=CONTEXTS, help="tokens behind a decoded token")
    options.add_argument("--prefill-contexts", default=PREFILL, help="tokens behind a prefill chunk; empty: no prefill")
    options.add_argument("--chunk", type=int, default=2048, help="fresh tokens of a prefill chunk")
    options.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES, help="attention shape")
    options.add_argument("--format", default="k4v4", help="page format")
    options.add_argument("--order", default="shuffled", choices=("shuffled", "sequential"), help="of the pages' blocks")
    options.add_argument("--stock-up-to", type=int, default=131072, help="largest context of vLLM's op and KTX dense")
    options.add_argument("--rounds", type=int, default=24, help="measured rounds")
    options.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    options.add_argument("--save", nargs="?", const="growth", metavar="NAME", help="write NAME.json and NAME.png")
    args = options.parse_args(argv)
    try:
        args.contexts, args.prefill_contexts = (
            [int(part) for part in text.split(",") if part] for text in (args.contexts, args.prefill_contexts)
        )
    except ValueError:
        options.error("--contexts and --prefill-contexts take numbers of tokens with commas between")
    if not args.contexts:
        options.error("--contexts is empty: name at least one number of tokens")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    kernels, shape = harness.make_kernels("auto"), SHAPES[args.shape]
    document: dict[str, Any] = {"shape": shape.name, "format": args.format, "order": args.order, "threads": 1}
    document |= {"decode": [], "prefill": []}
    print("decode, CPU ms a token and layer")
    head = ("context", "vllm", "dense", "header", "cascade", "scan", "probes", "pages", "GB/s", "memory")
    print(" ".join(f"{name:>9}" for name in head))
    for context in args.contexts:
        row = decode(make_problem(shape, args.format, context, 1, order=args.order), kernels, args)
        document["decode"].append(row)
        names = [f"{name}_ms" for name in ("stock", "dense", "header", "cascade", "scan", "probes", "pages")]
        values = [row[name] for name in (*names, "scan_gb_s", "memory_gb_s")]
        print(f"{context:>9}", " ".join(f"{'-' if x is None else f'{x:.3f}':>9}" for x in values), flush=True)
    for context in args.prefill_contexts:
        problem = make_problem(shape, args.format, context, args.chunk, order=args.order)
        document["prefill"].append(prefill(problem, kernels, args))
        print(f"prefill behind {context}: {document['prefill'][-1]['ms_per_token']:.3f} ms a token", flush=True)
    document |= harness.environment()
    if args.save:
        harness.RESULTS.mkdir(exist_ok=True)
        plot(document, str(harness.RESULTS / f"{args.save}.png"))
    harness.save(document, args)


if __name__ == "__main__":
    main()
