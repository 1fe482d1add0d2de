"""Needles in a long context, end to end through `vllm.LLM`: accuracy, time to first token, decode speed, bytes.

    python -m benchmarks.retrieval --context 131072 --needles 50 --format k4v4 [--stock] [--json] [--save]
    python -m benchmarks.retrieval --device-fraction 0.0625 [--disk DIR] ...

The constructed retrieval model (benchmarks.models.retrieval) holds a key and value every four tokens, so its keys are
as good as random: the hardest case for page headers. Each needle is one request: the whole context and a key from some
depth of it; the next token must be the key's value. The first request pays for reading the context (time to first
token), the others hit the prefix cache. `--stock` runs stock vLLM on the same requests in the same run.

`--device-fraction F`: the device has F of the context's keys and values in bf16, the rest lives in host memory, or on
the disk of `--disk`; the same run then compares every token with an engine that has everything on the device, and shows
what stock vLLM says to so little memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from benchmarks import engine, harness, models, small_device, tasks

CHUNK = 2048
DECODE_TOKENS = 64


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    preset = models.PRESETS["retrieval"]
    recall = tasks.dense_recall(args.context, preset.vocab, args.needles)
    say(f"{args.context:,} tokens, {args.needles} needles, format {args.format}")
    ktx = {"format": args.format, **args.ktx}
    tiers = tier_settings(args)
    ours = measure(args, recall, {**ktx, **tiers})
    document = {**harness.environment(), "context": args.context, "needles": args.needles, "format": args.format}
    document |= {"ktx": {**ktx, **tiers}, "threads": args.threads, **ours}
    if tiers:
        document |= compare_with_resident(args, recall, ktx, ours)
    if args.stock:
        stock = measure(args, recall, None)
        document["stock"] = stock
        document["ratio_ttft"] = round(stock["ttft_s"] / ours["ttft_s"], 2)
        document["ratio_decode"] = round(ours["decode_tok_s"] / stock["decode_tok_s"], 2)
    report(document)
    if args.save:
        harness.RESULTS.mkdir(exist_ok=True)
        kind = f"-{'disk' if args.disk else 'host'}-{args.device_fraction:g}" if tiers else ""
        (harness.RESULTS / f"retrieval-{args.context}{kind}.json").write_text(json.dumps(document, indent=2) + "\n")
    if args.json:
        print(json.dumps(document))
    return 0 if ours["accuracy"] == 1.0 and document.get("same_tokens", True) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.retrieval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=131072, help="tokens of the context (default: 131072)")
    parser.add_argument("--needles", type=int, default=50, help="questions (default: 50)")
    parser.add_argument("--format", default="k4v4", help="page format (default: k4v4)")
    parser.add_argument("--ktx", type=json.loads, default={}, help="further KTX settings, as JSON")
    parser.add_argument("--stock", action="store_true", help="stock vLLM too; it needs minutes at 131072 tokens")
    parser.add_argument(
        "--device-fraction",
        type=float,
        metavar="F",
        help="device memory, as a share of the bf16 context",
    )
    parser.add_argument("--disk", metavar="DIR", help="with --device-fraction: pages beside the device on DIR's disk")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of both (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/retrieval-CONTEXT.json")
    args = parser.parse_args(argv)
    if not 256 <= args.context <= models.PRESETS["retrieval"].max_positions:
        most = models.PRESETS["retrieval"].max_positions
        parser.error(f"--context {args.context}: the retrieval model takes 256 to {most} tokens")
    return args


def tier_settings(args: argparse.Namespace) -> dict[str, Any]:
    if args.device_fraction is None:
        return {}
    return small_device.settings("retrieval", args.context, args.format, args.disk)


def device_bytes(args: argparse.Namespace) -> int:
    return small_device.device_bytes("retrieval", args.context, args.device_fraction)


def compare_with_resident(
    args: argparse.Namespace, recall: tasks.Recall, ktx: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Any]:
    """The same requests with everything on the device, and stock vLLM with as little memory as we had."""
    small, args = device_bytes(args), argparse.Namespace(**{**vars(args), "device_fraction": None})
    resident = measure(args, recall, ktx)
    say("stock vLLM with the same memory: starting")
    refusal = small_device.refusal(setup(args, None, small))
    return {
        "same_tokens": resident["tokens"] == ours["tokens"],
        "resident": resident,
        "ratio_ttft_resident": round(ours["ttft_s"] / resident["ttft_s"], 3),
        "ratio_decode_resident": round(resident["decode_tok_s"] / ours["decode_tok_s"], 3),
        "stock_with_this_memory": refusal,
    }


def setup(args: argparse.Namespace, ktx: dict[str, Any] | None, cache_bytes: int) -> engine.Engine:
    return engine.Engine(
        str(models.path("retrieval")),
        max_model_len=args.context + 8,  # the model's last positions
        ktx=ktx,
        chunk=CHUNK,
        rows=4,
        cache_bytes=cache_bytes,
        options={"dtype": "bfloat16", "enable_prefix_caching": True},
    )


def measure(args: argparse.Namespace, recall: tasks.Recall, ktx: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of one engine, in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    name = "stock vLLM" if ktx is None else "KTX"
    say(f"{name}: starting")
    room = 1 << 30 if args.device_fraction is None else device_bytes(args)
    ran = engine.run(setup(args, ktx, room), ask, recall)
    return {**ran.value, "kernels": ran.kernels, "counters": ran.counters}


def ask(llm: Any, recall: tasks.Recall) -> dict[str, Any]:
    """Runs inside the engine's process: the first needle cold, the others on the prefix cache, then a longer answer."""
    base = recall.ids[: recall.positions[0] - 1]
    questions = [[*base, *recall.ids[p - 1 : p + 1]] for p in recall.positions]
    started = time.perf_counter()
    first = step_through(llm, questions[0][:-2], 1, "reading")
    ttft = first[1]
    say(f"first token after {ttft:.1f} s")
    answers = engine.generate(llm, questions, 1)
    right = [got[0] == want for got, want in zip(answers, recall.answers, strict=True)]
    room = llm.llm_engine.model_config.max_model_len - len(base)
    tokens, _, rate, counted = step_through(llm, base, min(DECODE_TOKENS, room), "answering")
    return {
        "tokens": [*(token for answer in answers for token in answer), *tokens],
        "accuracy": sum(right) / len(right),
        "ttft_s": round(ttft, 3),
        "decode_tok_s": round(rate, 3),
        "seconds": round(time.perf_counter() - started, 1),
        **cache_bytes(llm, len(base)),
        **step_bytes(llm, counted, len(base)),
    }


Stepped = tuple[list[int], float, float, dict[str, Any]]


def step_through(llm: Any, prompt: list[int], tokens: int, what: str) -> Stepped:
    """Generates greedily; returns the tokens, seconds to the first, tokens a second after it, and what KTX's counters
    gained after it: by decode steps alone. Prints progress."""
    from vllm import SamplingParams

    from vllm_ktx import metrics

    core = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    core.add_request(what, {"prompt_token_ids": prompt}, params)
    begun = shown = time.perf_counter()
    first, out, before = 0.0, [], metrics.snapshot()
    while core.has_unfinished_requests():
        for done in core.step():
            out = list(done.outputs[0].token_ids)
            if out and not first:
                first, before = time.perf_counter() - begun, metrics.snapshot()
        if time.perf_counter() - shown > 10:
            shown = time.perf_counter()
            say(f"{what}: {shown - begun:.0f} s")
    spent = time.perf_counter() - begun - first
    counted = {name: value - before[name] for name, value in metrics.snapshot().items()}
    return out, first, (len(out) - 1) / spent if len(out) > 1 else 0.0, counted


def cache_bytes(llm: Any, tokens: int) -> dict[str, int]:
    """Bytes that the context's keys and values take in the cache, and would take in bf16; all layers."""
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
    total = sum(layer.kv_cache.numel() * layer.kv_cache.element_size() for layer in layers)
    dense = sum(2 * layer.impl.num_kv_heads * layer.impl.head_size * 2 for layer in layers)
    tiered = any(getattr(layer.impl, "pages", None) is not None for layer in layers)
    used = total if tiered else total // blocks * -(-tokens // size)
    return {"device_bytes": used, "kv_bytes_bf16": dense * tokens}


def step_bytes(llm: Any, counted: dict[str, Any], context: int) -> dict[str, Any]:
    """Bytes of keys, values and headers that a decode step reads, from what KTX counted, and those of bf16 dense; all
    layers. Empty unless every layer and step was sparse.

    Headers of all pages; plane 0 of the share of the candidates that was looked into; pages read, of which the one
    being filled and the residual ones are in the model's dtype. A page probed and then read counts for both.
    """
    from vllm_ktx.attention_backends.selection import SparseSettings
    from vllm_ktx.plugin import ktx_config

    config = llm.llm_engine.vllm_config
    impls = [layer.impl for layer in config.compilation_config.static_forward_context.values()]
    rows, steps = counted["sparse_rows"], counted["steps"]
    if not steps or rows != steps * sum(impl.num_kv_heads for impl in impls):
        return {}
    layout, heads = impls[0].layout, impls[0].num_kv_heads
    settings = ktx_config(config).sparse_settings(layout.fmt, layout.page_size)
    assert isinstance(settings, SparseSettings)
    first, last = settings.candidates(context + steps, context + steps, layout.page_size)
    in_full = rows * (1 + layout.fmt.residual_pages)
    parts = {
        "headers": counted["sparse_pages_context"] * layout.header_bytes,
        "plane0": counted["probed_share"] * (last - first) * layout.scoring_bytes,
        "pages": (counted["sparse_pages_read"] - in_full) * layout.payload_bytes + in_full * layout.dense_bytes,
    }
    parts = {name: value / heads / steps for name, value in parts.items()}
    total, dense = sum(parts.values()), counted["context_tokens"] / steps * len(impls) * layout.dense_bytes
    dense /= layout.page_size
    return {
        "bytes_per_step": {name: round(value) for name, value in {**parts, "all": total, "bf16_dense": dense}.items()},
        "bytes_ratio": round(dense / total, 2),
        "pages_per_row": round(counted["sparse_pages_read"] / rows, 1),
        "probed_share": round(counted["probed_share"] / rows, 3),
    }


def report(document: dict[str, Any]) -> None:
    other = next((name for name in ("stock", "resident") if name in document), "")
    rows = [("", "KTX", {"stock": "stock vLLM", "resident": "all on device"}.get(other, ""))]
    for key in ("accuracy", "ttft_s", "decode_tok_s", "device_bytes", "kv_bytes_bf16", "bytes_ratio"):
        rows.append((key, document.get(key, ""), document.get(other, {}).get(key, "")))
    for name, ours, stock in rows:
        print(f"{name:<16}{ours!s:>14}{stock!s:>14}", file=sys.stderr)
    if "same_tokens" in document:
        say(f"the same tokens as with everything on the device: {'yes' if document['same_tokens'] else 'NO'}")
        say(f"stock vLLM with this memory: {document['stock_with_this_memory'] or 'ran'}")


def say(line: str) -> None:
    print(f"[retrieval] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
