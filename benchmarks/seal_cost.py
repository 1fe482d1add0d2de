"""What quantizing costs: the share of a prefill chunk's CPU time that goes into sealing pages, by format and method.

    python -m benchmarks.seal_cost --model smollm2 --save

Real vLLM prefills a long prompt in chunks on one thread; `Kernels.seal` is timed inside the engine as it runs. Every
full page of a chunk is sealed in the step that fills it, so the share is that of steady prefill.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from benchmarks import engine, harness
from benchmarks.quality import timed
from benchmarks.workloads import folder_of

TARGET = 0.03
ROWS: tuple[dict[str, Any], ...] = (
    {"format": "k8v8"},
    {"format": "k8v4"},
    {"format": "k4v4"},
    {"format": "k4v4", "rotate_values": False},
    {"format": "k4v4", "key_scale": "per_token"},
    {"format": "k4v4", "key_scale": "per_head", "value_scale": "per_head"},
    {"format": "k4v4", "key_scale": "per_channel_32", "value_scale": "per_token_32"},
    {"format": "k4v4", "scale_bits": 8},
)


def measure(llm: Any, ids: list[int], rounds: int) -> dict[str, float]:
    """Runs inside the engine's process: CPU seconds of prefill and, of those, of sealing; pages sealed by layer."""
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    kernels = next(layer.impl.kernels for layer in context.values() if hasattr(getattr(layer, "impl", None), "kernels"))
    seal, spent = kernels.seal, {"seal": 0.0, "pages": 0.0}

    def timed_seal(layout: Any, k: Any, v: Any, src: Any, *rest: Any) -> None:
        before = time.process_time()
        seal(layout, k, v, src, *rest)
        spent["seal"] += time.process_time() - before
        spent["pages"] += len(src)

    engine.generate(llm, [ids], 1)  # warms up
    kernels.seal = timed_seal
    before = time.process_time()
    for _ in range(rounds):
        engine.generate(llm, [ids], 1)
    return {**spent, "total": time.process_time() - before}


def run(name: str, tokens: int, chunk: int, rounds: int) -> list[dict[str, Any]]:
    folder, rows = folder_of(name), []
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = [(i * 7919) % vocab for i in range(tokens)]
    for ktx in ROWS:
        setup = engine.Engine(str(folder), tokens + 2, ktx, chunk)
        label = ", ".join(map(str, ktx.values()))
        ran = timed(label, lambda setup=setup: engine.run(setup, measure, ids, rounds))
        spent = ran.value
        rows.append(
            {
                "ktx": ktx,
                "kernels": ran.kernels,
                "share": spent["seal"] / spent["total"],
                "us_per_page": 1e6 * spent["seal"] / spent["pages"],
                "met": spent["seal"] / spent["total"] < TARGET,
                **spent,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| settings | kernels | share of prefill | µs a page and layer |", "| --- | --- | --- | --- |"]
    for row in rows:
        what = ", ".join(f"{key}={value}" for key, value in row["ktx"].items())
        note = "" if row["met"] else f" (**over {100 * TARGET:g} %**)"
        lines.append(f"| {what} | {row['kernels']} | {100 * row['share']:.2f} %{note} | {row['us_per_page']:.1f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="Share of prefill that sealing pages takes.")
    options.add_argument("--model", default="smollm2", help="a name or a folder")
    options.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt")
    options.add_argument("--chunk", type=int, default=512, help="tokens a step")
    options.add_argument("--rounds", type=int, default=3, help="prompts measured")
    options.add_argument("--save", action="store_true", help="also write seal-cost-MODEL.json")
    args = options.parse_args(argv)
    rows = run(args.model, args.tokens, args.chunk, args.rounds)
    print(markdown(rows))
    if args.save:
        document = {"model": args.model, "tokens": args.tokens, "chunk": args.chunk, "threads": 1, "target": TARGET}
        document |= {**harness.environment(), "rows": rows}
        harness.RESULTS.mkdir(exist_ok=True)
        (harness.RESULTS / f"seal-cost-{args.model}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
