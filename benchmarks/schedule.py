"""Length-grouped batching against vLLM's first come first served: time to first token, inter-token latency, throughput.

    python -m benchmarks.schedule --save                    simulation, then 60 requests through two real engines
    python -m benchmarks.schedule --simulate                simulation only

Real part: two engines with KTX, one with the stock scheduler, serve the same traces at the same time, each in a process
of its own; they take turns every few steps, so both see the same machine. An engine's clock is its own CPU time (one
thread): requests arrive by it, and all latencies are in its seconds, so other work on the machine counts for neither.
Each request is a needle; its first tokens must be the needle's.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from . import batching, engine, harness, models, tasks
from .batching import Ask, Costs, Done, LengthGrouped, Stock

ANSWER = 5  # tokens of a needle's value
SHORT = 2048  # prompts up to this many tokens count as short
TURN = 0.5  # seconds of CPU time that an engine runs before the other one does
SIMULATED = {"gpu": Costs(), "cpu": Costs(step=0.04, token=1 / 1500, read=0.2 / 131072)}
POLICIES = ("stock", "length_grouped")


def simulated(name: str, load: float, seeds: Sequence[int], step: int = 2048) -> dict[str, Any]:
    """Both policies on traces of 60 requests of 256 to 128K tokens; geometric means over traces, worst trace.

    load: the trace's prefills, one after another, in the time over which it arrives.
    """
    costs, rows = SIMULATED[name], []
    for seed in seeds:
        alone = sum(batching.simulate([a], Stock(step), costs)[0].ttft for a in batching.mixed_trace(60, 0, seed=seed))
        trace = batching.mixed_trace(60, alone / load, seed=seed)
        stock, ours = (
            batching.summary(batching.simulate(trace, policy, costs), step)
            for policy in (Stock(step), LengthGrouped(step))
        )
        rows.append(gains(stock, ours))
    means = {key: round(_geometric([row[key] for row in rows]), 3) for key in rows[0]}
    return {"costs": name, "load": load, "traces": len(rows), **means, "worst": _worst(rows)}


def gains(stock: dict[str, float], ours: dict[str, float]) -> dict[str, float]:
    """How many times shorter TTFT and inter-token latency got, and the ratio of throughputs; above 1 is better."""
    return {
        "ttft_short_p95_gain": stock["ttft_short_p95"] / ours["ttft_short_p95"],
        "itl_p99_gain": stock["itl_p99"] / ours["itl_p99"],
        "itl_p50_gain": stock["itl_p50"] / ours["itl_p50"],
        "ttft_long_p50_gain": stock["ttft_long_p50"] / ours["ttft_long_p50"],
        "ttft_long_max_gain": stock["ttft_long_max"] / ours["ttft_long_max"],
        "throughput_ratio": ours["tokens_per_s"] / stock["tokens_per_s"],
    }


def _geometric(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return product ** (1 / len(values))


def _worst(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(min(row[key] for row in rows), 3) for key in rows[0]}


def serve(name: str, traces: list[list[Ask]], options: dict[str, Any], mine: Any, other: Any) -> list[dict[str, Any]]:
    """Runs in an engine's process: serves the traces, waiting for `mine` and releasing `other` after every turn."""
    import os

    os.environ |= engine.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    try:
        llm = engine.Engine(ktx={"scheduler": name}, **options).start()
        chosen = type(llm.llm_engine.engine_core.engine_core.scheduler).__name__  # type: ignore[attr-defined]
        if (chosen == "LengthGroupedScheduler") != (name == "length_grouped"):
            raise RuntimeError(f"{name} was asked for and {chosen} serves")
        return [_serve_trace(llm, trace, mine, other) for trace in traces]
    finally:
        for _ in range(1 << 14):  # the other one goes on alone
            other.release()


def _serve_trace(llm: Any, trace: list[Ask], mine: Any, other: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    core, vocab = llm.llm_engine, models.PRESETS["retrieval"].vocab
    done = [Done(ask) for ask in trace]
    found = [tasks.needle(ask.prompt, vocab, (i % 10) / 9, seed=i, size=ANSWER) for i, ask in enumerate(trace)]
    coming = deque(range(len(trace)))
    right = 0
    mine.acquire()
    origin = turn = time.process_time()
    skipped = 0.0  # idle time, jumped over
    while coming or core.has_unfinished_requests():
        now = time.process_time() - origin + skipped
        if coming and not core.has_unfinished_requests():
            skipped += max(0.0, trace[coming[0]].at - now)
            now = max(now, trace[coming[0]].at)
        while coming and trace[coming[0]].at <= now:
            i = coming.popleft()
            params = SamplingParams(temperature=0, max_tokens=trace[i].output, ignore_eos=True, detokenize=False)
            core.add_request(str(i), {"prompt_token_ids": found[i].prompt(0)}, params)
        outputs = core.step()
        now = time.process_time() - origin + skipped
        for out in outputs:
            i, tokens = int(out.request_id), list(out.outputs[0].token_ids)
            done[i].tokens += [now] * (len(tokens) - len(done[i].tokens))
            if out.finished:
                right += tokens[:ANSWER] == found[i].answers
        if time.process_time() - turn > TURN:
            other.release()
            mine.acquire()
            turn = time.process_time()
    other.release()
    return {**_rounded(batching.summary(done, SHORT)), "right": right, "cpu_s": round(time.process_time() - origin, 1)}


def real(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of both engines for each trace, and the gains."""
    import multiprocessing

    traces = [
        batching.mixed_trace(args.requests, args.seconds, args.short, args.longest, seed=seed)
        for seed in range(args.traces)
    ]
    options = {
        "model": str(models.path("retrieval")),
        "max_model_len": args.longest + 160,
        "chunk": args.step,
        "rows": args.rows,
        "cache_bytes": args.cache_mib << 20,
    }
    context = multiprocessing.get_context("spawn")
    turns = [context.Semaphore(1), context.Semaphore(0)]
    results: dict[str, Any] = {}

    def run(i: int) -> None:
        try:
            results[POLICIES[i]] = engine.in_fresh_process(serve, POLICIES[i], traces, options, turns[i], turns[1 - i])
        except RuntimeError as error:
            results[POLICIES[i]] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in results.values():
        if isinstance(value, Exception):
            raise value
    rows = [
        {"seed": seed, "stock": stock, "length_grouped": ours, "gains": _rounded(gains(stock, ours))}
        for seed, (stock, ours) in enumerate(zip(results["stock"], results["length_grouped"], strict=True))
    ]
    every = [row["gains"] for row in rows]
    return {
        "requests": args.requests,
        "arrive_over_s": args.seconds,
        "prompt_tokens": [sum(ask.prompt for ask in trace) for trace in traces],
        "prompts": [min(a.prompt for t in traces for a in t), max(a.prompt for t in traces for a in t)],
        "step_tokens": args.step,
        "rows": args.rows,
        "traces": rows,
        "mean": {key: round(_geometric([row[key] for row in every]), 3) for key in every[0]},
        "worst": _worst(every),
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in figures.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulate", action="store_true", help="leave out the real engines")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--traces", type=int, default=3, help="real traces, each of --requests")
    parser.add_argument("--seconds", type=float, default=45, help="CPU seconds over which a trace arrives")
    parser.add_argument("--short", type=int, default=1024, help="three of four prompts have a quarter to twice of it")
    parser.add_argument("--longest", type=int, default=65536, help="the others have four times --short to this")
    parser.add_argument("--step", type=int, default=2048, help="tokens a step (max_num_batched_tokens)")
    parser.add_argument("--rows", type=int, default=32, help="most requests running (max_num_seqs)")
    parser.add_argument("--cache-mib", type=int, default=1024)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/schedule.json")
    args = parser.parse_args(argv)
    document: dict[str, Any] = {
        "simulation": [simulated(name, load, range(10)) for name in SIMULATED for load in (0.5, 1.0)]
    }
    if not args.simulate:
        document["real"] = real(args)
    document |= harness.environment()
    print(json.dumps(document, indent=1))
    if args.save:
        (harness.RESULTS / "schedule.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
