"""The compression table: what each way of keeping the KV cache costs in bytes and in quality (`quality --table`).

Each row is one engine of real vLLM that takes the same documents and haystacks (`needles`), float32, in chunks of one
page, so that queries read codes where decoding would (see `quality`). Dense attention but for the rows that say sparse.

    bytes a token        in all: a page's header and payload in every tier, by token and layer, as laid out
    on the device        what vLLM's own cache tensors take: with a hot pool, headers and the pool's slots
    ratio                the model in bf16, over that
    perplexity           relative change against stock vLLM, paired by token, with its standard error
    agreement            share of positions where the likeliest next token is stock's
    needles              answers given by greedy decoding, of five a haystack
    tokens/s             decoding one sequence at the documents' context, by CPU time of one thread

`auto`: the smallest preset whose divergence is within the probe's bound. A row that misses its target says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import engine, harness, needles, sparsity
from benchmarks.sparsity import Work
from vllm_ktx.config import KtxConfig
from vllm_ktx.kv_quant import PRESETS, PageLayout
from vllm_ktx.probe.divergence import kl_lower_bound
from vllm_ktx.probe.store import DEFAULT_BOUND

DECODED = 32
CONTEXT = 4096  # what a table is of unless asked otherwise
SPARSE = {"window": 1024}
PAGED = {"overcommit": 8, "host_gib": 1.0}  # one page in eight has a slot on the device


@dataclass(frozen=True)
class Row:
    """`ktx`: settings, None for stock vLLM. `quality`: greatest relative change of perplexity; `ratio`: least ratio."""

    label: str
    ktx: dict[str, Any] | None
    quality: float | None = None
    ratio: float | None = None


def _int4(method: str, **more: Any) -> Row:
    return Row(f"INT4, keys {method}", {"format": "k4v4", "attention": "dense", "key_scale": method, **more})


ROWS = (
    Row("bf16 (stock vLLM)", None),
    Row("INT8 (k8v8)", {"format": "k8v8", "attention": "dense"}, 0.001, 1.8),
    Row("INT8 keys, INT4 values (k8v4)", {"format": "k8v4", "attention": "dense"}, 0.005, 2.4),
    Row("INT4, keys per_channel (k4v4)", {"format": "k4v4", "attention": "dense"}, 0.012, 3.4),
    _int4("per_channel_32", value_scale="per_token_32"),
    _int4("per_token"),
    _int4("per_head"),
    Row("INT4 + sparse", {"format": "k4v4", **SPARSE}, 0.021),
    Row("INT8 + paging with hot pool", {"format": "k8v8", "attention": "dense", **PAGED}, 0.001),
    Row("INT4 + paging + sparse", {"format": "k4v4", **SPARSE, **PAGED}, 0.021, 16),
)


def served() -> list[Row]:
    """The rows that this version of KTX has settings for."""
    known = KtxConfig.__dataclass_fields__
    return [row for row in ROWS if not row.ktx or row.ktx.keys() <= known.keys()]


@dataclass(frozen=True)
class Measured:
    scores: list[engine.Scores]
    answers: list[needles.Answers]
    tokens_per_second: float
    device_bytes: float  # a token, all layers, as the engine's dtype has it
    layers: list[tuple[int, int, int]]  # kv heads, head size, page size


def measure(llm: Any, work: Work) -> Measured:
    """Runs inside the engine's process."""
    scores = [engine.score(llm, ids) for ids in work.documents]
    answers = needles.answer(llm, work.haystacks)
    prompt = work.documents[0][: -DECODED - 1]
    spent = [
        _cpu_seconds(lambda n=n: engine.generate(llm, [prompt], n)) for n in (1, 1, DECODED + 1)
    ]  # the first fills
    config = llm.llm_engine.vllm_config
    size = config.cache_config.block_size
    layers = [x for x in config.compilation_config.static_forward_context.values() if hasattr(x, "kv_cache")]
    device = sum(x.kv_cache[0].numel() * x.kv_cache.element_size() for x in layers) / size
    shapes = [(x.num_kv_heads, x.head_size, size) for x in layers]
    return Measured(scores, answers, DECODED / (spent[2] - spent[1]), device, shapes)


def _cpu_seconds(call: Callable[[], Any]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def run(folder: Path, work: Work, max_model_len: int, say: Callable[[str, Callable[[], Any]], Any]) -> list[dict]:
    """All rows, `say(label, call)` around each."""
    stock: Measured | None = None
    rows = []
    for row in served():
        options = {"enable_prefix_caching": True}
        cache = _cache_bytes(row, folder, max_model_len)
        setup = engine.Engine(str(folder), max_model_len, row.ktx, cache_bytes=cache, options=options)
        ran = say(row.label, lambda setup=setup: engine.run(setup, measure, work))
        stock = stock or ran.value
        rows.append(figures(row, ran, stock, work))
    within = [r for r in rows if (r["ktx"] or {}).keys() == {"format", "attention"} and r["kl"] <= DEFAULT_BOUND]
    for r in rows:
        r["auto"] = bool(within) and r is min(within, key=lambda r: r["device_bytes"])
    return rows


def _cache_bytes(row: Row, folder: Path, max_model_len: int) -> int:
    """The device's memory: plenty, or, with paging, blocks for four contexts, and so a pool of half a context."""
    if not row.ktx or "overcommit" not in row.ktx:
        return 1 << 30
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    layout = PageLayout(KtxConfig.parse(row.ktx).kv_format(), 64, config.get("num_key_value_heads", heads), dim)
    pages = 4 * -(-max_model_len // layout.page_size)
    return int(pages * config["num_hidden_layers"] * (layout.header_bytes + layout.payload_bytes / PAGED["overcommit"]))


def figures(row: Row, ran: engine.Ran, stock: Measured, work: Work) -> dict[str, Any]:
    found: Measured = ran.value
    change = sparsity.change([s.nll for s in found.scores], [s.nll for s in stock.scores])
    pairs = list(zip(stock.scores, found.scores, strict=True))
    same = np.concatenate([a.best == b.best for a, b in pairs])
    plain = sum(2 * 2 * heads * dim for heads, dim, _ in found.layers)
    total = plain if row.ktx is None else _stored_bytes(row.ktx, found)
    device = plain if row.ktx is None else found.device_bytes
    met = {
        "perplexity": row.quality is None or change["change"] <= row.quality,
        "ratio": row.ratio is None or plain / device >= row.ratio,
    }
    return {
        "label": row.label,
        "ktx": row.ktx,
        "kernels": ran.kernels,
        "bytes": total,
        "device_bytes": device,
        "ratio": plain / device,
        "perplexity": change,
        "kl": float(np.concatenate([kl_lower_bound(a, b) for a, b in pairs]).mean()),
        "agreement": float(same.mean()),
        "needles": needles.figures(work.haystacks, found.answers)["mean_accuracy"],
        "tokens_per_second": found.tokens_per_second,
        "target": {"perplexity": row.quality, "ratio": row.ratio},
        "missed": [name for name, good in met.items() if not good],
        "seconds": round(ran.seconds, 1),
    }


def _stored_bytes(ktx: dict[str, Any], found: Measured) -> float:
    """Bytes a token of whole pages, whatever tier they lie in."""
    fmt = KtxConfig.parse(ktx).kv_format()
    assert fmt.name in PRESETS
    return sum(PageLayout(fmt, size, heads, dim).bytes_per_token for heads, dim, size in found.layers)


def markdown(document: dict[str, Any]) -> str:
    head = [
        "",
        "bytes a token",
        "on the device",
        "ratio",
        "perplexity",
        "KL",
        "agreement",
        "needles",
        "tokens/s",
        "note",
    ]
    lines = [head, ["---"] * len(head)]
    for row in document["rows"]:
        change = row["perplexity"]
        ppl = (
            f"{100 * change['change']:+.2f} % ± {100 * change['stderr']:.2f}" if row["ktx"] else f"{change['ppl']:.3f}"
        )
        target = row["target"]["perplexity"]
        notes = [f"target {100 * target:g} %" if target else "", *(f"**misses {what}**" for what in row["missed"])]
        notes += ["torch kernels"] if row["kernels"] == "torch" else []
        notes += ["chosen by `auto`"] if row["auto"] else []
        lines.append(
            [row["label"], f"{row['bytes']:,.0f}", f"{row['device_bytes']:,.0f}", f"{row['ratio']:.2f}x", ppl,
             f"{row['kl']:.1e}", f"{100 * row['agreement']:.1f} %", f"{100 * row['needles']:.0f} %",
             f"{row['tokens_per_second']:.1f}", ", ".join(filter(None, notes))]
        )  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(document: dict[str, Any], file: Path) -> None:
    """PNG: loss of perplexity against device bytes; a line through the rows that none beats in both (Pareto front)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [
        (row["device_bytes"], max(100 * row["perplexity"]["change"], 1e-3), row["label"]) for row in document["rows"]
    ]
    front = sorted(p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points))
    figure, axis = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    axis.plot([p[0] for p in front], [p[1] for p in front], color="tab:blue", linewidth=1, drawstyle="steps-post")
    axis.scatter(
        [p[0] for p in points], [p[1] for p in points], color=["tab:blue" if p in front else "tab:gray" for p in points]
    )
    for x, y, label in points:
        axis.annotate(label, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("bytes a token on the device")
    axis.set_ylabel("perplexity, % above bf16 (floor 0.001)")
    axis.set_title(f"{document['model']}, {document['context']:,} tokens: the line is the Pareto front", fontsize=10)
    axis.margins(x=0.25)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def save(document: dict[str, Any]) -> None:
    harness.RESULTS.mkdir(exist_ok=True)
    length = "" if document["context"] == CONTEXT else f"-{document['context']}"
    name = harness.RESULTS / f"quality-table-{document['model']}{length}"
    name.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    plot(document, name.with_suffix(".png"))
