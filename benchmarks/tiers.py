"""What it costs that the device doesn't hold all pages, through `vllm.LLM`, beside an engine whose device does.

    python -m benchmarks.tiers steady [--disk DIR]    # hits, stalls and time of decoding, by size of the hot pool
    python -m benchmarks.tiers concurrent             # eight contexts on a device that holds one, and stock vLLM there
    python -m benchmarks.tiers million --disk DIR     # 1,000,000 tokens: admitted, read and answered
    ... [--json] [--save]

`steady`: SmolLM2 reads English and goes on; the engines take turns, times are CPU and wall time a token. A step's
budget is the number of distinct pages that a layer reads in it; a pool of 3 has three times as many slots. `million`: a
synthetic model with random weights (it says nothing of quality) whose positions are raised, pages ranked by their
headers, since random keys make `cascade` look into all pages.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import engine, harness, models, small_device, tasks

POOLS = (1.0, 2.0, 3.0)  # slots a layer, in budgets of a step
CHUNK = 2048
GIB = 2**30
# Narrow enough for two cores to read a million tokens in minutes; head_dim and grouping as in large models.
MILLION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 1_048_576,
    "rope_theta": 5e7,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("steady", "concurrent", "million"))
    parser.add_argument("--tokens", type=int, help="context (default: 7800, 32768, 1000000)")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode (default: 64)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each engine in `steady` (default: 2)")
    parser.add_argument("--requests", type=int, default=8, help="of `concurrent` (default: 8)")
    parser.add_argument("--disk", metavar="DIR", help="pages beside the device on DIR's disk, not in host memory")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tiers-WHAT.json")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or {"steady": 7800, "concurrent": 32768, "million": 1_000_000}[args.what]
    found = {"steady": steady, "concurrent": concurrent, "million": million}[args.what](args)
    document = {**harness.environment(), "what": args.what, "tokens": args.tokens, **found}
    if args.save:
        harness.RESULTS.mkdir(exist_ok=True)
        name = f"tiers-{args.what}{'-disk' if args.disk and args.what == 'steady' else ''}.json"
        (harness.RESULTS / name).write_text(json.dumps(document, indent=2) + "\n")
    if args.json:
        print(json.dumps(document))
    return 0


# --- steady decoding --------------------------------------------------------------------------------------------------


def steady(args: argparse.Namespace) -> dict[str, Any]:
    ktx = {"format": "k4v4", "window": 512, "select": "top_k", "top_k": 4}
    layout, layers = small_device.layout_of("smollm2", "k4v4")
    roomy = {"host_gib": 2 * small_device.settings("smollm2", args.tokens, "k4v4")["host_gib"]}
    if args.disk:
        roomy |= {"disk_gib": 4 * roomy["host_gib"], "disk_dir": args.disk, "host_gib": 0.6 * roomy["host_gib"]}
    blocks = -(-(args.tokens + args.decode) // layout.page_size) + 2

    def measure(slots: int | None) -> dict[str, Any]:
        device = blocks * layers * layout.page_bytes
        if slots is not None:
            device = layers * (slots * layout.payload_bytes + blocks * layout.header_bytes + 64 * blocks)
        over = {} if slots is None else {**roomy, "overcommit": round(blocks / slots, 3)}
        setup = engine.Engine(
            str(models.path("smollm2")),
            args.tokens + args.decode + 8,
            {**ktx, **over},
            CHUNK,
            2,
            device,
            {"dtype": "bfloat16", "enable_prefix_caching": True},
        )
        return engine.run(setup, decode_text, args.tokens, args.decode).value

    say("everything on the device, and how many pages a step reads")
    budget = measure(blocks - 1)["asked"] / layers
    sizes = {f"{pool:g}x": max(16, round(pool * budget)) for pool in POOLS}
    say(f"a step reads {budget:.1f} of {blocks} pages a layer; pools of {', '.join(map(str, sizes.values()))} slots")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("resident", *sizes)}
    for turn in range(args.rounds):
        for name in runs:
            say(f"turn {turn + 1}: {name}")
            runs[name].append(measure(sizes.get(name)))
    resident = {key: median(run[key] for run in runs["resident"]) for key in ("cpu_ms", "wall_ms")}
    rows = {}
    for name, found in runs.items():
        own = {key: median(run[key] for run in found) for key in ("cpu_ms", "wall_ms", "hit_rate", "stall_share")}
        own |= {f"{key}_ratio": round(own[key] / resident[key], 3) for key in ("cpu_ms", "wall_ms")}
        rows[name] = {"slots": sizes.get(name), **{key: round(value, 3) for key, value in own.items()}}
        rows[name]["same_tokens"] = all(run["tokens"] == runs["resident"][0]["tokens"] for run in found)
        print(f"{name:<10}{rows[name]}", file=sys.stderr)
    return {"ktx": ktx, "tiers": roomy, "blocks": blocks, "budget_pages": round(budget, 1), "pools": rows}


def decode_text(llm: Any, tokens: int, decode: int) -> dict[str, Any]:
    """Reads English, goes on with it; CPU and wall time a token of the second half of what it says."""
    from transformers import AutoTokenizer

    from benchmarks import corpus
    from vllm_ktx.metrics import STATS

    folder = str(models.path("smollm2"))
    ids = AutoTokenizer.from_pretrained(folder)(corpus.text("topics")[: 8 * tokens])["input_ids"][:tokens]
    marks: list[tuple[float, float, dict[str, Any]]] = []
    out = stream(llm, ids, decode, lambda: marks.append((time.process_time(), time.perf_counter(), STATS.snapshot())))
    first, last, steps = marks[len(marks) // 2], marks[-1], len(marks) - 1 - len(marks) // 2
    gained = {name: last[2][name] - first[2][name] for name in first[2] if name.startswith("tier_")}
    asked = gained["tier_hits"] + gained["tier_late"] + gained["tier_misses"]
    wall = last[1] - first[1]
    return {
        "tokens": out,
        "cpu_ms": 1000 * (last[0] - first[0]) / steps,
        "wall_ms": 1000 * wall / steps,
        "asked": asked / steps,
        "hit_rate": gained["tier_hits"] / asked if asked else 1.0,
        "stall_share": gained["tier_stall_seconds"] / wall,
    }


# --- eight contexts on a device that holds one ------------------------------------------------------------------------


def concurrent(args: argparse.Namespace) -> dict[str, Any]:
    device = int(1.05 * small_device.device_bytes("retrieval", args.tokens, 1.0))
    tiers = small_device.settings("retrieval", args.requests * args.tokens, "k4v4")
    recalls = [tasks.dense_recall(args.tokens - args.decode, 512, 1, seed=i) for i in range(args.requests)]
    prompts, answers = [r.prompt(0) for r in recalls], [r.answers[0] for r in recalls]
    found: dict[str, Any] = {"device_bytes": device, "requests": args.requests, "tiers": tiers}
    for name, ktx in (("ktx", {"format": "k4v4", **tiers}), ("stock", None)):
        say(f"{name}: {args.requests} requests of {args.tokens:,} tokens on {device / 2**20:.0f} MiB")
        options = {"dtype": "bfloat16", "disable_log_stats": False}
        setup = engine.Engine(
            str(models.path("retrieval")), args.tokens + 8, ktx, CHUNK, args.requests, device, options
        )
        ran = engine.run(setup, serve_all, prompts, args.decode)
        right = sum(out[0] == answer for out, answer in zip(ran.value.pop("out"), answers, strict=True))
        found[name] = {"right": right, **ran.value}
        if ktx:
            found["counters"] = {key: value for key, value in ran.counters.items() if key.startswith("tier_")}
        print(f"{name:<8}{found[name]}", file=sys.stderr)
    found["ratio_seconds"] = round(found["stock"]["seconds"] / found["ktx"]["seconds"], 2)
    return found


def serve_all(llm: Any, prompts: list[list[int]], decode: int) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    out = engine.generate(llm, prompts, decode)
    spent, cpu = time.perf_counter() - start, time.process_time() - cpu
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    tokens = sum(map(len, prompts)) + sum(map(len, out))
    return {
        "out": out,
        "seconds": round(spent, 1),
        "cpu_seconds": round(cpu, 1),
        "tokens_s": round(tokens / spent),
        "preemptions": preempted,
    }


# --- a million tokens -------------------------------------------------------------------------------------------------


def million(args: argparse.Namespace) -> dict[str, Any]:
    if not args.disk:
        raise SystemExit("million: name a folder on a local disk with --disk DIR")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MILLION))
        layers, heads, dim = (MILLION[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        dense = 4 * layers * heads * dim * args.tokens  # type: ignore[operator]
        device = dense // 16
        ktx = {"format": "k4v4", "window": 1024, "max_pages": 32, "scoring": "header"}
        ktx |= {"host_gib": dense / 16 / GIB, "disk_gib": dense / 2 / GIB, "disk_dir": args.disk}
        options = {"dtype": "bfloat16", "load_format": "dummy", "enable_prefix_caching": True}
        setup = engine.Engine(folder, args.tokens + args.decode + 8, ktx, 4096, 1, device, options)
        ran = engine.run(setup, read_and_go_on, args.tokens, args.decode)
    counters = {key: value for key, value in ran.counters.items() if key.startswith("tier_")}
    found = {"ktx": ktx, "model": MILLION, "kv_bytes_bf16": dense, "device_bytes": device, **ran.value}
    print(found, file=sys.stderr)
    return {**found, "counters": counters}


def read_and_go_on(llm: Any, tokens: int, decode: int) -> dict[str, Any]:
    """Reads all tokens and decodes; then comes back to the first half, as an earlier turn of a chat would."""
    import random

    from vllm import SamplingParams

    from vllm_ktx.metrics import STATS

    ids = random.Random(0).choices(range(512), k=tokens)
    marks: list[float] = []
    start = time.perf_counter()
    out = stream(llm, ids, decode, lambda: marks.append(time.perf_counter()))
    read = time.perf_counter()
    early = tokens // 2 // 64 * 64 + 1  # its window has long left the device
    fetched = STATS.tier_fetched_bytes
    again = llm.generate(
        {"prompt_token_ids": ids[:early]}, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False
    )
    return {
        "early_turn": {
            "tokens": early,
            "from_the_cache": again[0].num_cached_tokens,
            "seconds": round(time.perf_counter() - read, 2),
            "fetched_bytes": STATS.tier_fetched_bytes - fetched,
        },
        "decoded": len(out),
        "ttft_s": round(marks[0] - start, 1),
        "decode_tok_s": round((len(marks) - 1) / (marks[-1] - marks[0]), 2),
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def stream(llm: Any, prompt: list[int], tokens: int, on_token: Any) -> list[int]:
    """Greedy tokens; `on_token()` after each. Says how far it is."""
    from vllm import SamplingParams

    core, out, start, shown = llm.llm_engine, [], time.perf_counter(), time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    core.add_request("stream", {"prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        before = len(out)
        for done in core.step():
            out = list(done.outputs[0].token_ids)
        if len(out) > before:
            on_token()
        if time.perf_counter() - shown > 15:
            shown = time.perf_counter()
            say(f"... {shown - start:.0f} s")
    return out


def say(line: str) -> None:
    print(f"[tiers] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
