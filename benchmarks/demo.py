"""`make demo`: two long questions answered through vLLM and KTX, with what they cost.

First a real model (SmolLM2-135M) reads 4K tokens of English, Python's own language reference with a fact hidden in
it, and must find the fact. Then a constructed model (benchmarks.models.retrieval) reads 131072 tokens of keys and
values on a device that holds a sixteenth of them, and must give the value of one key: stock vLLM with that memory
refuses to start, and with all the memory it wants it is timed on a context that it reads in seconds. Everything printed
is measured in this run.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks import engine, models, small_device, tasks
from vllm_ktx.kv_quant import PRESETS

CHUNK = 2048
ANSWER_TOKENS = 24
DEVICE_FRACTION = 1 / 16  # of the long context's keys and values in bf16
STOCK_TOKENS = 16384  # what stock vLLM reads in seconds


def main() -> int:
    args = parse()
    ktx = {"format": args.format}
    good = chat(args, ktx)
    if args.long_context:
        good &= recall(args, ktx)
    return 0 if good else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, or the folder of a chat model (default: smollm2)")
    parser.add_argument("--context", type=int, default=4000, help="tokens of the chat prompt, about (default: 4000)")
    parser.add_argument(
        "--long-context",
        type=int,
        default=131072,
        help="tokens of the second prompt; 0 leaves it out (default: 131072)",
    )
    parser.add_argument("--format", default="k4v4", choices=sorted(PRESETS), help="page format (default: k4v4)")
    args = parser.parse_args()
    most = models.PRESETS["retrieval"].max_positions
    if not 200 <= args.context <= most or not (args.long_context == 0 or 256 <= args.long_context <= most):
        parser.error(f"--context {args.context}, --long-context {args.long_context}: use 256 to {most} tokens")
    return args


def chat(args: argparse.Namespace, ktx: dict[str, Any]) -> bool:
    """A fact in English text. Returns whether it was found."""
    folder = models.path(args.model)
    say(f"{folder.name}: starting vLLM with --attention-backend ktx (about ten seconds)")
    setup = engine.Engine(
        str(folder),
        max_model_len=args.context + 256,
        ktx=ktx,
        chunk=CHUNK,
        rows=4,
        cache_bytes=256 << 20,
        options={"dtype": "bfloat16", "skip_tokenizer_init": False},
    )
    ran = engine.run(setup, answer_chat, args.context)
    report(args, folder.name, ran)
    return verdict(ran.value["expected"] in ran.value["answer"], ran.value["expected"])


def recall(args: argparse.Namespace, ktx: dict[str, Any]) -> bool:
    """One value out of a context full of keys and values, on a small device. Returns whether it was right."""
    device = small_device.device_bytes("retrieval", args.long_context, DEVICE_FRACTION)
    dense = device / DEVICE_FRACTION
    say(f"{args.long_context:,} tokens of keys and values take {dense / 2**20:.0f} MiB in bf16")
    say(f"the device gets {device / 2**20:.1f} MiB for them")
    refused = small_device.refusal(retrieval_engine(None, args.long_context, device))
    print(f"\n  stock vLLM with that memory: {refused or 'starts'}\n", flush=True)
    short = min(STOCK_TOKENS, args.long_context)
    ratio = against_stock(args, ktx, short) if short > 1024 else ""
    say(f"KTX: {args.long_context:,} tokens (about a minute)")
    tiers = small_device.settings("retrieval", args.long_context, args.format)
    task = tasks.dense_recall(args.long_context, models.PRESETS["retrieval"].vocab, 1)
    setup = retrieval_engine({**ktx, **tiers}, args.long_context, device)
    ran = engine.run(setup, answer_recall, task.prompt(0), task.answers[0])
    report(args, "retrieval (constructed)", ran, ratio)
    return verdict(ran.value["expected"] == ran.value["answer"], ran.value["expected"])


def retrieval_engine(ktx: dict[str, Any] | None, context: int, cache_bytes: int) -> engine.Engine:
    folder = str(models.path("retrieval"))
    positions = min(context + ANSWER_TOKENS, models.PRESETS["retrieval"].max_positions + 8)
    return engine.Engine(folder, positions, ktx, CHUNK, 4, cache_bytes, {"dtype": "bfloat16"})


def against_stock(args: argparse.Namespace, ktx: dict[str, Any], context: int) -> str:
    """Times of both on one context: stock with everything on the device, KTX with a sixteenth of it there."""
    say(f"stock vLLM and KTX on {context:,} tokens")
    task = tasks.dense_recall(context, models.PRESETS["retrieval"].vocab, 1)
    tiers = small_device.settings("retrieval", context, args.format)
    device = small_device.device_bytes("retrieval", context, DEVICE_FRACTION)
    setups = retrieval_engine(None, context, 1 << 30), retrieval_engine({**ktx, **tiers}, context, device)
    stock, ours = (engine.run(setup, answer_recall, task.prompt(0), task.answers[0]).value for setup in setups)
    first, rate = stock["ttft"] / ours["ttft"], ours["rate"] / stock["rate"]
    return f"{context:,} tokens: first token {first:.1f}x as soon, decode {rate:.1f}x as fast, in 1/16 of its memory"


def answer_chat(llm: Any, context: int) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    prompt, question, expected = build_prompt(tokenizer, context)
    say(f"reading {len(prompt):,} tokens, then answering: {question}")
    tokens, result = answer(llm, prompt, ANSWER_TOKENS, stop=tokenizer.eos_token_id)
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return {**result, "answer": text, "expected": expected}


def answer_recall(llm: Any, prompt: list[int], expected: int) -> dict[str, Any]:
    room = llm.llm_engine.model_config.max_model_len - len(prompt)
    tokens, result = answer(llm, prompt, min(ANSWER_TOKENS, room))
    return {**result, "answer": f"value {tokens[0]}", "expected": f"value {expected}"}


def build_prompt(tokenizer: Any, context: int) -> tuple[list[int], str, str]:
    """Token ids of a chat turn of about `context` tokens, the question in it, and the answer to look for."""
    import pydoc_data.topics

    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    chars = len(tokenizer.decode(tokenizer(text[: 8 * context])["input_ids"][: context - 120]))
    needles = tasks.text_needles(text, chars, needles=1, seed=3)
    turn = [{"role": "user", "content": f"{needles.context}\n\n{needles.questions[0]}"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    return list(getattr(ids, "input_ids", ids)), needles.questions[0], needles.answers[0]


def answer(llm: Any, prompt: list[int], limit: int, stop: int | None = None) -> tuple[list[int], dict[str, Any]]:
    """The greedy answer's tokens, and what was measured on the way."""
    from vllm import SamplingParams

    core, begun, first, out = llm.llm_engine, time.perf_counter(), 0.0, []
    shown = begun
    params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=[] if stop is None else [stop])
    core.add_request("demo", {"prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        for done in core.step():
            out = list(done.outputs[0].token_ids)
            first = first or time.perf_counter()
        if time.perf_counter() - shown > 5:
            shown = time.perf_counter()
            say(f"... {shown - begun:.0f} s")
    spent = time.perf_counter() - first
    layers = list(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())
    cache = llm.llm_engine.vllm_config.cache_config
    return out, {
        "tokens": len(prompt),
        "ttft": first - begun,
        "rate": (len(out) - 1) / spent if len(out) > 1 else 0.0,
        "bytes": page_bytes(layers[0].impl, layers[0].kv_cache) / cache.num_gpu_blocks / cache.block_size,
        "device": sum(layer.kv_cache.numel() * layer.kv_cache.element_size() for layer in layers),
        "layers": len(layers),
        "dense": 4 * layers[0].impl.num_kv_heads * layers[0].impl.head_size,
    }


def page_bytes(impl: Any, kv_cache: Any) -> float:
    """Bytes of all pages of a layer, wherever they are."""
    pages = getattr(impl, "pages", None)
    if pages is None:
        return kv_cache.numel() * kv_cache.element_size()
    return len(pages.slot_table) * (impl.layout.header_bytes + impl.layout.payload_bytes)


def report(args: argparse.Namespace, model: str, ran: engine.Ran, ratio: str = "") -> None:
    v, counters = ran.value, ran.counters
    read, had = counters["sparse_pages_read"], counters["sparse_pages_context"]
    rows = [
        ("model", model),
        ("context", f"{v['tokens']:,} tokens"),
        ("format", f"{args.format}, {ran.kernels} kernels"),
        (
            "KV bytes a token and layer",
            f"{v['bytes']:,.0f}, against {v['dense']:,} in bf16 ({v['dense'] / v['bytes']:.2f}x fewer)",
        ),
        ("pages sealed", f"{counters['sealed']:,}, in {counters['attention_calls']:,} attention calls"),
        (
            "pages read",
            f"{read / had:.1%} of what rows behind long contexts had" if had else "all: the context is short",
        ),
        *tier_rows(v, counters),
        ("time to first token", f"{v['ttft']:.2f} s ({v['tokens'] / v['ttft']:,.0f} tokens/s)"),
        ("decode", f"{v['rate']:.1f} tokens/s"),
        *([("against stock vLLM", ratio)] if ratio else []),
        ("answer", v["answer"]),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows))


def tier_rows(v: dict[str, Any], counters: dict[str, Any]) -> list[tuple[str, str]]:
    asked = counters["tier_hits"] + counters["tier_late"] + counters["tier_misses"]
    if not asked:
        return []
    fetched, written = (counters[f"tier_{name}_bytes"] / 2**20 for name in ("fetched", "written"))
    dense = v["dense"] * v["layers"] * v["tokens"]
    return [
        ("device", f"{v['device'] / 2**20:.1f} MiB, {v['device'] / dense:.1%} of the bf16 keys and values"),
        ("tiers", f"{written:,.0f} MiB written to host memory, {fetched:,.0f} MiB fetched from it"),
        ("hot pool", f"{counters['tier_hits'] / asked:.1%} of {asked:,} pages were there when they were read"),
    ]


def verdict(found: bool, expected: str) -> bool:
    print("  found.\n" if found else f"  not found: it was {expected}.\n", flush=True)
    return found


def say(line: str) -> None:
    print(f"[demo] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
