"""`vllm-ktx probe MODEL`: its options, its table, and where the decision goes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import Any

from . import store


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("model", help="folder of a model, or the hub name of one that is downloaded")
    bound = "greatest mean KL divergence of the next token, in nats, on each kind of text"
    options.add_argument(
        "--bound", type=float, default=store.DEFAULT_BOUND, help=f"{bound} (default {store.DEFAULT_BOUND:g})"
    )
    options.add_argument("--tokens", type=int, default=2048, help="tokens of text (default 2048)")
    options.add_argument("--page-size", type=int, default=64, help="tokens a page, vLLM's --block-size (default 64)")
    dtype = "vLLM's --dtype (default float32: bf16's own rounding adds 1e-3 nats to every row)"
    options.add_argument("--dtype", default="float32", help=dtype)
    options.add_argument("--cache-gib", type=float, default=1.0, help="memory for the KV cache (default 1)")
    options.add_argument("--no-store", action="store_true", help="print the table and store nothing")
    options.add_argument("--json", action="store_true", help="the decision as one JSON object on stdout's last line")


def main(args: argparse.Namespace) -> int:
    """Measures, prints, stores; returns 1 with one line that says why if it can't."""
    from ..config import MAX_PAGE_SIZE
    from .measure import Settings, run

    for setting, least in (("tokens", 256), ("page_size", 32)):
        if getattr(args, setting) < least:
            return _fail(f"--{setting.replace('_', '-')} {getattr(args, setting)}: must be at least {least}")
    if args.page_size % 32 or args.page_size > MAX_PAGE_SIZE:
        return _fail(f"--page-size {args.page_size}: must be a multiple of 32, up to {MAX_PAGE_SIZE}")
    for setting in ("bound", "cache_gib"):
        if not 0 < getattr(args, setting) < math.inf:
            return _fail(f"--{setting.replace('_', '-')} {getattr(args, setting)}: must be above 0")
    settings = Settings(args.model, args.bound, args.tokens, args.page_size, args.dtype, args.cache_gib)
    try:
        decision = run(settings, say)
        print(table(decision))
        if not args.no_store:
            print(f"stored in {store.save(decision)}: ktx.format='auto' now serves {decision.format}")
    except (ValueError, RuntimeError, OSError) as error:
        return _fail(str(error))
    if args.json:
        print(json.dumps(asdict(decision)))
    return 0


def say(text: str) -> None:
    print(f"[probe] {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> int:
    print(f"vllm-ktx probe: {text}", file=sys.stderr)
    return 1


def table(decision: store.Decision) -> str:
    """Formats and layers, as the terminal shows them."""
    plain, details = decision.details["bytes_per_token_none"], decision.details
    head = f"{decision.model}: {details['tokens']:,} tokens ({details['texts']}), pages of {decision.page_size}"
    lines = [head, f"{'format':<8} {'bytes a token':>14} {'ratio':>6} {'KL text':>9} {'KL chat':>9} {'99 %':>9} "
             f"{'same token':>11}  within {decision.bound:g}"]  # fmt: skip
    lines.append(f"{'bf16':<8} {plain:>14,.0f} {1:>6.2f}")
    for row in decision.rows:
        kl = {name: f"{value:.1e}" for name, value in row["kl"].items()}
        lines.append(
            f"{row['format']:<8} {row['bytes_per_token']:>14,.0f} {plain / row['bytes_per_token']:>6.2f} "
            f"{kl.get('text', '-'):>9} {kl.get('chat', '-'):>9} {row['kl_99']:>9.1e} {100 * row['agreement']:>10.1f}%  "
            f"{'yes' if row['safe'] else 'NO'}{' <- chosen' if row['format'] == decision.format else ''}"
        )
    lines += ["", f"{'layer':<8} {'s_tok':>7} {'s_channel':>10} {'amplitude':>10}   (INT4 logit noise; outliers)"]
    lines += [_layer(layer) for layer in decision.layers]
    verdict = "bears" if decision.s_tok <= store.S_TOK_BOUND else "does NOT bear"
    lines += ["", f"This model {verdict} INT4 keys with scales across channels (s_tok {decision.s_tok:.2f}, bound "
              f"{store.S_TOK_BOUND})."]  # fmt: skip
    return "\n".join(lines)


def _layer(layer: dict[str, Any]) -> str:
    mark = "  !" if layer["s_tok"] > store.S_TOK_BOUND else ""
    return f"{layer['layer']:<8} {layer['s_tok']:>7.2f} {layer['s_channel']:>10.3f} {layer['amplitude']:>10.1f}{mark}"
