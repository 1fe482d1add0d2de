"""Bytes that a decode step of a real model over English text reads, from the engine's counters.

    python -m benchmarks.step_bytes --context 8000 --ktx '{"window": 1024}'

One request through `vllm.LLM`, greedy; `benchmarks.retrieval` has the same figures of its model at 131072 tokens.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks import corpus, engine, harness, models, retrieval


def decode(llm: Any, ids: list[int], tokens: int) -> dict[str, Any]:
    """Runs inside the engine's process."""
    counted = retrieval.step_through(llm, ids, tokens, "answering")[3]
    return retrieval.step_bytes(llm, counted, len(ids))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_bytes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="name or folder (default: smollm2)")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the prompt (default: 8000)")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps (default: 64)")
    parser.add_argument("--text", default="topics", help=f"one of {', '.join(corpus.NAMES)} (default: topics)")
    parser.add_argument("--format", default="k4v4", help="page format (default: k4v4)")
    parser.add_argument("--ktx", type=json.loads, default={}, help="further KTX settings, as JSON")
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer

    folder = str(models.path(args.model))
    ids = AutoTokenizer.from_pretrained(folder)(corpus.text(args.text), add_special_tokens=False)["input_ids"]
    ktx = {"format": args.format, **args.ktx}
    options = {"dtype": "bfloat16"}
    setup = engine.Engine(folder, args.context + args.tokens, ktx, retrieval.CHUNK, 1, options=options)
    found = engine.run(setup, decode, ids[: args.context], args.tokens).value
    print(json.dumps({**harness.environment(), **vars(args), "ktx": ktx, **found}))
    return 0 if found else 1


if __name__ == "__main__":
    raise SystemExit(main())
