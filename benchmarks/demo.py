"""`make demo`: one long question answered by a real model through vLLM and KTX, with what it cost.

The text is real English (Python's own language reference) with a fact hidden in the middle of it; the model must find
the fact. Everything printed is measured in this run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from benchmarks import models, tasks
from vllm_ktx.kv_quant import PRESETS

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # counters and model in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> int:
    args = parse()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder = models.path(args.model)
    say(f"starting vLLM with --attention-backend ktx on {folder.name} (about ten seconds)")
    started = time.perf_counter()
    llm = start(folder, args)
    say(f"ready after {time.perf_counter() - started:.1f} s")
    prompt, question, expected = build_prompt(llm.get_tokenizer(), args.context)
    say(f"reading {len(prompt):,} tokens, then answering: {question}")
    text, ttft, rate = answer(llm, prompt, args.answer_tokens)
    report(llm, args, folder.name, len(prompt), text, expected, ttft, rate)
    found = expected in text
    print("found." if found else f"not found: the fact was {expected}.")
    return 0 if found else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, or the folder of a chat model (default: smollm2)")
    parser.add_argument("--context", type=int, default=4000, help="tokens of the prompt, about (default: 4000)")
    parser.add_argument("--format", default="k4v4", choices=sorted(PRESETS), help="page format (default: k4v4)")
    parser.add_argument("--answer-tokens", type=int, default=24, help="most tokens to generate (default: 24)")
    args = parser.parse_args()
    if not 200 <= args.context <= 130000:
        parser.error(f"--context {args.context}: use a number from 200 to 130000 that the model's context holds")
    return args


def start(folder, args):
    from vllm import LLM

    return LLM(
        str(folder),
        attention_backend="KTX",
        additional_config={"ktx": {"format": args.format}},
        max_model_len=args.context + args.answer_tokens + 256,
        kv_cache_memory_bytes=256 << 20,
        max_num_seqs=4,
        enforce_eager=True,  # compiling would take longer than the demo
    )


def build_prompt(tokenizer, context: int) -> tuple[list[int], str, str]:
    """Token ids of a chat turn of about `context` tokens, the question in it, and the answer to look for."""
    import pydoc_data.topics

    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    budget = context - 120
    chars = len(tokenizer.decode(tokenizer(text[: 8 * context])["input_ids"][:budget]))
    needles = tasks.text_needles(text, chars, needles=1, seed=3)
    question = needles.questions[0]
    turn = [{"role": "user", "content": f"{needles.context}\n\n{question}"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    return list(getattr(ids, "input_ids", ids)), question, needles.answers[0]


def answer(llm, prompt: list[int], limit: int) -> tuple[str, float, float]:
    """The greedy answer, the time to its first token in seconds, and tokens a second after that."""
    from vllm import SamplingParams

    engine, begun, first, text, count = llm.llm_engine, time.perf_counter(), 0.0, "", 0
    engine.add_request("demo", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=limit))
    while engine.has_unfinished_requests():
        for out in engine.step():
            first = first or time.perf_counter()
            text, count = out.outputs[0].text, len(out.outputs[0].token_ids)
    spent = time.perf_counter() - first
    return text.strip(), first - begun, (count - 1) / spent if count > 1 else 0.0


def report(llm, args, model: str, tokens: int, text: str, expected: str, ttft: float, rate: float) -> None:
    from vllm_ktx.metrics import snapshot

    config = llm.llm_engine.vllm_config
    counters = snapshot()
    spec = next(iter(config.compilation_config.static_forward_context.values()))
    pages = config.cache_config.num_gpu_blocks
    cache = spec.kv_cache.numel() / pages / config.cache_config.block_size
    dense = 2 * spec.impl.num_kv_heads * spec.impl.head_size * 2
    rows = [
        ("model", model),
        ("context", f"{tokens:,} tokens"),
        ("format", args.format),
        ("kernels", spec.impl.kernels.name),
        ("KV bytes a token and layer", f"{cache:,.0f}, against {dense:,} in bf16 ({dense / cache:.2f}x fewer)"),
        ("pages sealed", f"{counters['sealed']:,} in {counters['attention_calls']:,} attention calls"),
        ("time to first token", f"{ttft:.2f} s ({tokens / ttft:,.0f} tokens/s)"),
        ("decode", f"{rate:.1f} tokens/s"),
        ("answer", text),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows) + "\n")


def say(line: str) -> None:
    print(f"[demo] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
