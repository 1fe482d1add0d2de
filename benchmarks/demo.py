"""`make demo`: two long questions answered through vLLM and KTX, with what they cost.

First a real model (SmolLM2-135M) reads 4K tokens of English, Python's own language reference with a fact hidden in
it, and must find the fact. Then a constructed model (benchmarks.models.retrieval) reads 131072 tokens of keys and
values and must give the value of one key. Everything printed is measured in this run.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks import engine, models, tasks
from vllm_ktx.kv_quant import PRESETS

CHUNK = 2048
ANSWER_TOKENS = 24


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
    """One value out of a context full of keys and values. Returns whether it was right."""
    folder = models.path("retrieval")
    say(f"{folder.name}: {args.long_context:,} tokens (about a minute)")
    setup = engine.Engine(
        str(folder),
        max_model_len=args.long_context + 8,
        ktx=ktx,
        chunk=CHUNK,
        rows=4,
        cache_bytes=1 << 30,
        options={"dtype": "bfloat16"},
    )
    task = tasks.dense_recall(args.long_context, models.PRESETS["retrieval"].vocab, 1)
    ran = engine.run(setup, answer_recall, task.prompt(0), task.answers[0])
    report(args, folder.name, ran)
    return verdict(ran.value["expected"] == ran.value["answer"], ran.value["expected"])


def answer_chat(llm: Any, context: int) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    prompt, question, expected = build_prompt(tokenizer, context)
    say(f"reading {len(prompt):,} tokens, then answering: {question}")
    tokens, result = answer(llm, prompt, ANSWER_TOKENS, stop=tokenizer.eos_token_id)
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return {**result, "answer": text, "expected": expected}


def answer_recall(llm: Any, prompt: list[int], expected: int) -> dict[str, Any]:
    tokens, result = answer(llm, prompt, 5)
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
        "bytes": layers[0].kv_cache.numel() / cache.num_gpu_blocks / cache.block_size,
        "dense": 4 * layers[0].impl.num_kv_heads * layers[0].impl.head_size,
    }


def report(args: argparse.Namespace, model: str, ran: engine.Ran) -> None:
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
        ("time to first token", f"{v['ttft']:.2f} s ({v['tokens'] / v['ttft']:,.0f} tokens/s)"),
        ("decode", f"{v['rate']:.1f} tokens/s"),
        ("answer", v["answer"]),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows))


def verdict(found: bool, expected: str) -> bool:
    print("  found.\n" if found else f"  not found: it was {expected}.\n", flush=True)
    return found


def say(line: str) -> None:
    print(f"[demo] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
