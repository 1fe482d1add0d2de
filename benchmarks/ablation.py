"""What each part of a page format is worth: scale method x rotation x residual pages x page size, one row a change.

    python -m benchmarks.ablation --model smollm2 --save
    python -m benchmarks.ablation --model smollm2-s32 --rows keys --save

Every row is `k4v4` (INT4 keys per channel, INT4 values per token + Hadamard, one residual page, pages of 64 tokens)
with one thing changed, served by real vLLM in float32 on the same text, in chunks of 64 tokens; the divergence is that
of `quality`, from stock vLLM. Rows that native kernels don't know are served by torch: the same numbers, slower.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import corpus, engine, harness, sparsity
from benchmarks.quality import CHUNK, timed
from benchmarks.workloads import folder_of, passage
from vllm_ktx.config import KtxConfig
from vllm_ktx.kv_quant import PageLayout
from vllm_ktx.probe.divergence import kl_lower_bound


@dataclass(frozen=True)
class Row:
    """`change`: settings beside `format: k4v4`; `question`: what the row answers."""

    group: str
    label: str
    change: dict[str, Any] = field(default_factory=dict)
    page_size: int = 64


def _keys(method: str, rotate: bool = False) -> Row:
    more = {"rotate_keys": True} if rotate else {}
    return Row("keys", f"keys {method}{' + Hadamard' if rotate else ''}", {"key_scale": method, **more})


def _values(method: str, rotate: bool = True) -> Row:
    change = {"value_scale": method, "rotate_values": rotate}
    return Row("values", f"values {method}{' + Hadamard' if rotate else ''}", change)


DEFAULT = Row("keys", "k4v4: keys per_channel, values per_token + Hadamard")
ROWS = (
    DEFAULT,
    _keys("per_channel", rotate=True),
    _keys("per_channel_32"),
    _keys("per_token"),
    _keys("per_token", rotate=True),
    _keys("per_head"),
    _values("per_token", rotate=False),
    _values("per_token_32"),
    _values("per_channel", rotate=False),
    _values("per_head"),
    Row("keys", "8-bit scales and minima", {"scale_bits": 8}),
    Row("keys", "keys INT8 (k8v4)", {"format": "k8v4"}),
    Row("residual", "no residual page", {"residual_pages": 0}),
    Row("residual", "2 residual pages", {"residual_pages": 2}),
    Row("pages", "pages of 32, 2 residual", {"residual_pages": 2}, 32),
    Row("pages", "pages of 32", {}, 32),
    Row("pages", "pages of 128", {}, 128),
    Row("layers", "first two layers k8v4", {"format": {"default": "k4v4", "layers": {"0-1": "k8v4"}}}),
)
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))


def measure(llm: Any, documents: list[list[int]]) -> list[engine.Scores]:
    return [engine.score(llm, ids) for ids in documents]


def settings(row: Row) -> dict[str, Any]:
    return {"format": "k4v4", "attention": "dense", **row.change}


def bytes_per_token(row: Row, folder: Any) -> float:
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    formats, kv_heads = KtxConfig.parse(settings(row)), config.get("num_key_value_heads", heads)
    layouts = (
        PageLayout(formats.kv_format(layer=layer), row.page_size, kv_heads, dim)
        for layer in range(config["num_hidden_layers"])
    )
    return sum(layout.bytes_per_token for layout in layouts)


def conclusion(row: dict[str, Any], base: dict[str, Any]) -> str:
    """One sentence from the numbers, against the default's row."""
    kl, size = row["kl"] / base["kl"], row["bytes"] / base["bytes"]
    if row is base:
        return "the default"
    cost = "same bytes" if abs(size - 1) < 0.005 else f"{100 * (size - 1):+.0f} % bytes"
    if kl > 20:
        return f"a trap: {kl:.0f} times the divergence, {cost}"
    if 0.93 <= kl <= 1.07:
        return f"no difference within noise, {cost}"
    return f"{kl:.2f} times the divergence, {cost}"


def run(name: str, groups: list[str], context: int) -> Iterator[list[dict[str, Any]]]:
    """All rows so far, after each row."""
    from transformers import AutoTokenizer

    folder = folder_of(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [passage(tokenizer, corpus.text("topics"), where, context) for where in (0.2, 0.6)]

    def scores(row: Row | None) -> engine.Ran:
        options = {} if row is None else {"block_size": row.page_size}
        ktx = None if row is None else settings(row)
        setup = engine.Engine(str(folder), context + 1, ktx, CHUNK, options=options)
        return timed("stock vLLM" if row is None else row.label, lambda: engine.run(setup, measure, documents))

    stock, found = scores(None).value, []
    for row in (row for row in ROWS if row is DEFAULT or row.group in groups):
        ran = scores(row)
        pairs = list(zip(stock, ran.value, strict=True))
        found.append(
            {
                "group": row.group,
                "label": row.label,
                "ktx": settings(row),
                "page_size": row.page_size,
                "kernels": ran.kernels,
                "bytes": bytes_per_token(row, folder),
                "kl": float(np.concatenate([kl_lower_bound(a, b)[CHUNK:] for a, b in pairs]).mean()),
                "agreement": float(np.concatenate([(a.best == b.best)[CHUNK:] for a, b in pairs]).mean()),
                "perplexity": sparsity.change([s.nll for s in ran.value], [s.nll for s in stock]),
            }
        )
        found[-1]["conclusion"] = conclusion(found[-1], found[0])
        yield found


def markdown(rows: list[dict[str, Any]]) -> str:
    head = ["change", "bytes a token", "KL", "perplexity", "agreement", "conclusion"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        change = row["perplexity"]
        lines.append(
            [row["label"], f"{row['bytes']:,.0f}", f"{row['kl']:.2e}",
             f"{100 * change['change']:+.2f} % ± {100 * change['stderr']:.2f}", f"{100 * row['agreement']:.1f} %",
             row["conclusion"]]
        )  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="What each part of the INT4 page format is worth.")
    options.add_argument("--model", default="smollm2", help="a model with a tokenizer: a name or a folder")
    options.add_argument("--rows", default=",".join(GROUPS), help=f"groups of rows: {', '.join(GROUPS)}")
    options.add_argument("--context", type=int, default=2048, help="tokens of each of two documents")
    options.add_argument("--save", action="store_true", help="also write ablation-MODEL.json")
    args = options.parse_args(argv)
    groups = args.rows.split(",")
    if unknown := sorted(set(groups) - set(GROUPS)):
        options.error(f"--rows {unknown[0]!r} is unknown: use some of {', '.join(GROUPS)}")
    harness.RESULTS.mkdir(exist_ok=True)
    for rows in run(args.model, groups, args.context):
        if args.save:
            document = {"model": args.model, "context": args.context, "dtype": "float32", "chunk": CHUNK}
            document |= {**harness.environment(), "rows": rows}
            (harness.RESULTS / f"ablation-{args.model}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
