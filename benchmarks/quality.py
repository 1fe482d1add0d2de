"""What a cache format does to a model's predictions, through real vLLM: stock CPU_ATTN against KTX, float32 both.

    python -m benchmarks.quality --model smollm2 --format k8v8,k8v4,k4v4

Both engines take the same texts alone and in chunks of one page (64 tokens), without prefix caching. A query's own
chunk is attended unquantized and a large chunk would flatter KTX; with chunks of one page a query reads codes exactly
where a decode step would: every older page, less the residual ones, and its own page in the model's dtype.

    agreement      share of positions where the likeliest next token is stock's, along texts stock generated greedily
    decode         the same by true decode: KTX generates, and is counted up to each prompt's first other token
    ppl_change     relative change of perplexity, with the standard error of the paired per-token differences
    kl_top20       divergence from stock's next-token distribution over the tokens that both rank in their first 20,
                   with all others as one class: a lower bound, in nats

On the constructed retrieval models the texts are recall tasks and perplexity is that of the answers. `--stock-rules`
adds vLLM's own `int4_per_token_head`, simulated (see `stock_rules`).

`--mode sparse` measures what sparse attention adds to a format's error: perplexity, needles, pages read (`sparsity`):

    python -m benchmarks.quality --model smollm2 --mode sparse --format k4v4 --tokens 24576 --text topics,emma --save

`--table` measures every way of keeping the cache, in bytes and in quality, as one table (`compression`):

    python -m benchmarks.quality --model smollm2 --table --save
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import compression, corpus, engine, harness, models, sparsity
from benchmarks.engine import Engine, Scores
from benchmarks.stock_rules import RULES, simulate
from benchmarks.workloads import Workload, folder_of, sparse_work, workload
from vllm_ktx.probe.divergence import kl_lower_bound

CHUNK = 64  # one page: see above
FORMATS = ("none", "k8v8", "k8v4", "k4v4")
MODES = ("dense", "sparse")
CONTEXT = {"dense": compression.CONTEXT, "sparse": 8192}


@dataclass(frozen=True)
class Measured:
    """One engine's answers. `generated`: by true decode (empty for a simulation); `forced`: scores of prompt +
    stock's continuation; `documents`: scores of the documents."""

    generated: list[list[int]]
    forced: list[Scores]
    documents: list[Scores]


def measure(llm: Any, work: Workload, continuations: list[list[int]] | None) -> Measured:
    """`continuations`: what stock generated; None where this engine is stock."""
    generated = engine.generate(llm, work.prompts, work.new_tokens, work.stop)
    texts = texts_of(work, generated if continuations is None else continuations)
    return Measured(
        generated, [engine.score(llm, ids) for ids in texts], [engine.score(llm, d) for d in work.documents]
    )


def texts_of(work: Workload, continuations: list[list[int]]) -> list[list[int]]:
    return [prompt + more for prompt, more in zip(work.prompts, continuations, strict=True)]


# --- figures ----------------------------------------------------------------------------------------------------------


def compare(work: Workload, stock: Measured, other: Measured) -> dict[str, Any]:
    """The figures of one row."""
    forced = [
        (a, b, slice(len(prompt) - 1, None))
        for prompt, a, b in zip(work.prompts, stock.forced, other.forced, strict=True)
    ]
    same = np.concatenate([a.best[rows] == b.best[rows] for a, b, rows in forced])
    return {
        **perplexity(work, stock.documents, other.documents),
        "agreement": float(same.mean()),
        "agreement_stderr": float(np.sqrt(same.mean() * (1 - same.mean()) / len(same))),
        "agreement_positions": len(same),
        "kl_top20": float(np.concatenate([kl_lower_bound(a, b)[rows] for a, b, rows in forced]).mean()),
        **(decode_agreement(stock.generated, other.generated) if other.generated else {}),
    }


def perplexity(work: Workload, stock: Sequence[Scores], other: Sequence[Scores]) -> dict[str, Any]:
    def scored(scores: Sequence[Scores], what: Callable[[Scores], np.ndarray]) -> np.ndarray:
        rows = [slice(None) if rows is None else rows for rows in work.scored]
        return np.concatenate([what(s)[r] for s, r in zip(scores, rows, strict=True)])

    base, nll = (scored(scores, lambda s: s.nll) for scores in (stock, other))
    change = float(np.exp((nll - base).mean()))
    stderr = (nll - base).std(ddof=1) / np.sqrt(len(nll))
    return {
        "ppl": float(np.exp(nll.mean())),
        "ppl_stock": float(np.exp(base.mean())),
        "ppl_change": change - 1,
        "ppl_change_stderr": float(change * stderr),
        "document_kl_top20": float(np.mean(scored_kl(work, stock, other))),
        "tokens": len(nll),
    }


def scored_kl(work: Workload, stock: Sequence[Scores], other: Sequence[Scores]) -> np.ndarray:
    pairs = zip(stock, other, work.scored, strict=True)
    return np.concatenate([kl_lower_bound(a, b)[slice(None) if rows is None else rows] for a, b, rows in pairs])


def decode_agreement(stock: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """By free-running decode: tokens equal before each first difference, over those tokens and the differences."""
    equal = differ = 0
    for a, b in zip(stock, other, strict=True):
        prefix = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        equal, differ = equal + prefix, differ + (prefix < len(a))
    return {
        "decode_agreement": equal / max(1, equal + differ),
        "decode_positions": equal + differ,
        "decode_diverged": differ,
        "decode_prefix_share": equal / max(1, sum(map(len, stock))),
    }


# --- command ----------------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """One model's workload and what stock vLLM made of it; rows are measured against that."""

    folder: Path
    work: Workload
    common: dict[str, Any]
    stock: Measured = field(init=False)
    continuations: list[list[int]] = field(init=False)

    def start(self) -> dict[str, Any]:
        """Runs stock vLLM; returns its own row, which says how far a greedy text repeats itself."""
        ran = engine.run(self._engine(None), measure, self.work, None)
        self.stock, self.continuations = ran.value, ran.value.generated
        return {"seconds": round(ran.seconds, 1), "self_agreement": self._self_agreement()}

    def ktx(self, fmt: str, settings: dict[str, Any]) -> dict[str, Any]:
        ran = engine.run(self._engine({"format": fmt, **settings}), measure, self.work, self.continuations)
        return {
            **self.common,
            "format": fmt,
            "kernels": ran.kernels,
            **compare(self.work, self.stock, ran.value),
            "counters": ran.counters,
            "seconds": round(ran.seconds, 1),
        }

    def simulated(self, rule: str) -> dict[str, Any]:
        texts = texts_of(self.work, self.continuations)
        scores = engine.in_fresh_process(simulate, str(self.folder), [*texts, *self.work.documents], rule)
        measured = Measured([], scores[: len(texts)], scores[len(texts) :])
        row = {**self.common, "format": f"{rule} (simulated)", "kernels": None}
        return {**row, **compare(self.work, self.stock, measured), "counters": {}}

    def _engine(self, ktx: dict[str, Any] | None) -> Engine:
        return Engine(str(self.folder), self.work.max_model_len, ktx, CHUNK)

    def _self_agreement(self) -> float:
        """Stock's own decode against its own prefill: float rounding alone."""
        pairs = zip(self.work.prompts, self.stock.forced, self.continuations, strict=True)
        return float(np.concatenate([scores.best[len(p) - 1 :] == np.array(more) for p, scores, more in pairs]).mean())


def parse(argv: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description="Agreement and perplexity of KTX formats against stock vLLM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ", ".join((*models.NAMES, "smollm2-s8", "smollm2-s32", "smollm2-s128"))
    options.add_argument("--model", default="smollm2", help=f"{names}, or a model directory")
    options.add_argument("--format", default="k8v4", help=f"one or several, with commas: {', '.join(FORMATS)}")
    options.add_argument("--mode", default="dense", choices=MODES, help="which pages a query reads")
    options.add_argument("--tokens", type=int, default=8192, help="tokens of text for perplexity")
    options.add_argument("--context", type=int, help="tokens a document; None: 4096, sparse 8192")
    options.add_argument(
        "--text", default="topics", help=f"where text comes from, with commas: {', '.join(corpus.NAMES)}"
    )
    options.add_argument("--prompts", type=int, default=20, help="prompts for agreement")
    options.add_argument("--new-tokens", type=int, default=128, help="tokens generated for each prompt, at most")
    options.add_argument(
        "--ktx", type=json.loads, default={}, help='further settings of KTX, e.g. {"kernels": "torch"}'
    )
    options.add_argument("--needles", type=int, help="haystacks a length, five needles each; None: 4, --table 1")
    options.add_argument(
        "--variant", type=json.loads, action="append", default=[], help="sparse: also with these settings (repeatable)"
    )
    options.add_argument("--table", action="store_true", help="the compression table: all formats, one document a row")
    options.add_argument("--stock-rules", action="store_true", help=f"also simulate {', '.join(RULES)}")
    options.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    options.add_argument("--save", action="store_true", help=f"also write {harness.RESULTS.name}/quality-MODEL.json")
    args = options.parse_args(argv)
    args.formats = args.format.split(",")
    args.context = args.context or CONTEXT["dense" if args.table else args.mode]
    args.needles = args.needles or (1 if args.table else 4)
    if args.mode == "sparse" and len(args.formats) > 1:
        options.error(f"--format {args.format}: --mode sparse takes one format")
    for fmt in args.formats:
        if fmt not in FORMATS:
            options.error(f"--format {fmt!r} is unknown: use one of {', '.join(FORMATS)}")
    for setting, least in (("tokens", 64), ("context", 64), ("prompts", 1), ("new_tokens", 1)):
        if getattr(args, setting) < least:
            options.error(f"--{setting.replace('_', '-')} {getattr(args, setting)}: must be at least {least}")
    return args


def report(name: str, rows: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    first = rows[0]
    print(f"{name}, {first['mode']}, float32, chunks of {CHUNK}; {first['hardware']}")
    print(f"perplexity on {first['tokens']} tokens, agreement on {first['agreement_positions']} positions;", end=" ")
    print(f"stock agrees with itself on {100 * reference['self_agreement']:.2f} %")
    print(f"{'format':<32} {'ppl':>9} {'change %':>17} {'agreement %':>16} {'decode %':>9} {'KL top 20':>10}")
    for row in rows:
        change = f"{100 * row['ppl_change']:+.3f} +- {100 * row['ppl_change_stderr']:.3f}"
        agreement = f"{100 * row['agreement']:.2f} +- {100 * row['agreement_stderr']:.2f}"
        decode = f"{100 * row['decode_agreement']:.2f}" if "decode_agreement" in row else "-"
        print(
            f"{row['format']:<32} {row['ppl']:>9.4f} {change:>17} {agreement:>16} {decode:>9} {row['kl_top20']:>10.2e}"
        )


def timed(what: str, call: Callable[[], Any]) -> Any:
    """Visible progress on stderr around `call`."""
    print(f"[quality] {what} ...", file=sys.stderr, flush=True)
    started = time.perf_counter()
    result = call()
    print(f"[quality] {what}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return result


def sparse(name: str, folder: Path, args: argparse.Namespace) -> None:
    work = sparse_work(folder, args)
    window = args.ktx.get("window", sparsity.DEFAULTS["window"])
    common = {"model": name, "mode": "sparse", "text": args.text, "context": args.context, "dtype": "float32"}
    bench = sparsity.Bench(folder, work, args.formats[0], args.context, window)
    document = sparsity.run(bench, args.ktx, args.variant, {**common, **harness.environment()})
    sparsity.report(document)
    if args.save:
        sparsity.save(name, document)
    if args.json:
        print(json.dumps(document))


def table(name: str, folder: Path, args: argparse.Namespace) -> None:
    """The compression table; one document and the longer haystacks, so that all rows take minutes."""
    work = sparse_work(folder, args)
    work = dataclasses.replace(work, haystacks=[hay for hay in work.haystacks if hay.length > args.context // 3])
    rows = compression.run(folder, work, args.context, lambda label, call: timed(f"{name}: {label}", call))
    common = {"model": name, "text": args.text, "context": args.context, "dtype": "float32", "chunk": CHUNK}
    document = {**common, **harness.environment(), "rows": rows}
    print(compression.markdown(document))
    if args.save:
        compression.save(document)
    if args.json:
        print(json.dumps(document))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    folder = folder_of(args.model)
    name = args.model if "/" not in args.model else folder.name
    if args.table or args.mode == "sparse":
        return (table if args.table else sparse)(name, folder, args)
    settings = {"text": args.text, "context": args.context, "chunk": CHUNK, "dtype": "float32", "ktx": args.ktx}
    common = {"model": name, "mode": args.mode, **settings, **harness.environment()}
    session = Session(folder, workload(folder, args), common)
    rows: list[dict[str, Any]] = []
    reference = timed(f"{name}: stock vLLM", session.start)
    for fmt in args.formats:
        rows.append(timed(f"{name}: KTX {fmt}", partial(session.ktx, fmt, args.ktx)))
    for rule in RULES if args.stock_rules else ():
        rows.append(timed(f"{name}: {rule}, simulated", partial(session.simulated, rule)))
    report(name, rows, reference)
    document = {**rows[0], "stock": reference, **({"rows": rows} if len(rows) > 1 else {})}
    if args.save:
        harness.RESULTS.mkdir(exist_ok=True)
        (harness.RESULTS / f"quality-{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    if args.json:
        print(json.dumps(document))


if __name__ == "__main__":
    main()
