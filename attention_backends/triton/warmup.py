"""The launches of serving, walked through on tensors without contents: to compile them before the first request
(`warm_up`), or for cards that aren't there (`aot.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from vllm_ktx.kv_quant import PageLayout

from ..selection import SparseSettings
from .device_pages import DevicePages
from .geometry import MIN_WIDTH, table_width
from .launch import BLOCK_QUERIES, FRESH_SPLIT, TritonKernels, compile_only
from .xformers_prefill import Functions, XformersPrefill


def empty(*size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(size, dtype=kind, device="meta")


def step_inputs(
    layout: PageLayout, q_heads: int, dtype: torch.dtype, sparse: SparseSettings | None, tokens: int, rows: int,
    max_pages: int,
) -> dict[str, Any]:  # fmt: skip
    """What `TritonKernels.attention` takes for a step of `rows` rows and `tokens` tokens, without memory."""
    heads, dim, blocks = layout.num_kv_heads, layout.head_dim, 2 * max_pages
    qkv = empty(tokens, q_heads + 2 * heads, dim, kind=dtype)
    q, k, v = qkv.split((q_heads, heads, heads), 1)
    account: dict[str, Any] = {}
    if sparse is not None:
        dropped, depth = (empty(tokens, heads, kind=torch.float32) for _ in range(2))
        account = {"sparse": sparse, "dropped": dropped, "depth": depth, "pages_read": empty(tokens, heads)}
        account["headers"] = empty(blocks, layout.header_bytes, kind=torch.uint8)
    return {
        "q": q, "k": k, "v": v, "out": empty(tokens, q_heads, dim, kind=dtype), "cu_q": empty(rows + 1),
        "context": empty(rows), "block_table": empty(rows, max_pages), "open_slot": empty(blocks),
        "payload": empty(blocks, layout.payload_bytes, kind=torch.uint8),
        "open_pages": empty(64, 2, heads, layout.page_size, dim, kind=dtype), "scale": dim**-0.5, **account,
    }  # fmt: skip


def write(kernels: TritonKernels, layout: PageLayout, step: dict[str, Any], pages: DevicePages | None) -> None:
    """Appends, and seals pages of fresh and of open tokens."""
    k, v, some, source = step["k"], step["v"], empty(8), empty(8, kind=torch.int64)
    headers = empty(len(step["payload"]), layout.header_bytes, kind=torch.uint8)
    kernels.append(layout, k, v, some, some, some, step["open_pages"])
    own = step["open_pages"][:, 0], step["open_pages"][:, 1]
    size, dim = layout.page_size, layout.head_dim
    for keys, values, *strides in ((k, v, k.stride(0), k.stride(1)), (*own, dim, size * dim)):
        if pages is None:
            kernels.seal(layout, keys, values, source, some, headers, step["payload"], None, *strides)
        else:
            pages.seal(kernels, layout, keys, values, source, some, headers, *strides)
    if pages is not None:
        pages.read(kernels, source)


def shapes_only() -> Functions:
    """xformers' functions as far as shapes go."""

    def attended(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[0], *q.shape[2:4], q.shape[1], dtype=torch.float32)

    return Functions(attended, attended, lambda outs, lses: (outs[0].float(), lses[0]))


def shapes(width: int, most_tokens: int) -> Iterator[tuple[int, int]]:
    """Tokens of a row and columns of its block table: one of each kind that a step can be of, with tables up to `width`
    wide and chunks of up to `most_tokens`."""
    widths = sorted({table_width(1 << i, width) for i in range((width - 1).bit_length() + 1)})
    chunks = {1, 2, BLOCK_QUERIES + 1, *range(FRESH_SPLIT, most_tokens + FRESH_SPLIT, FRESH_SPLIT)}
    for pages in widths:
        for tokens in sorted({min(tokens, most_tokens) for tokens in chunks}):
            yield tokens, pages


def warm_up(
    kernels: TritonKernels,
    layout: PageLayout,
    q_heads: int,
    dtype: torch.dtype,
    width: int,
    most_tokens: int,
    sparse: SparseSettings | None = None,
    softcap: float = 0.0,
    audited: bool = False,
    pages: DevicePages | None = None,
) -> int:
    """Compiles all that steps over `layout`'s pages can launch with these settings, on as many threads as the machine
    has processors (up to 16), and returns how many kernels that are.

    q_heads, dtype, softcap: of the layers. width: of the whole block table. most_tokens: of a step. sparse: None if all
    layers read all pages. audited: some steps are computed densely as well. pages: where not all have a slot. Raises
    what Triton raises for a kernel that doesn't compile.
    """
    compiled: dict[int, Any] = {}

    def keep(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found = compile_only(kernel, grid, *args, **options)
        compiled[id(found)] = found

    prefill = None if kernels.prefill is None else XformersPrefill(shapes_only())
    ours, without = TritonKernels(kernels.blocking, keep, prefill), None
    if pages is not None:
        own = (pages.slots, pages.host, pages.planes, None, pages.home)
        like = [None if x is None else torch.empty_like(x, device="meta") for x in own]
        without = DevicePages(layout, *like)  # type: ignore[arg-type]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool, triton.AsyncCompileMode(pool):
        write(ours, layout, step_inputs(layout, q_heads, dtype, None, 1, 1, MIN_WIDTH), without)
        for tokens, columns in shapes(width, most_tokens):
            for settings in dict.fromkeys((None, sparse)):
                step = step_inputs(layout, q_heads, dtype, settings, tokens, 1, columns)
                lse = empty(tokens, q_heads, kind=torch.float32)
                for audit in (None, lse)[: 1 + audited]:
                    ours.attention(layout, softcap=softcap, lse=audit, residency=without, **step)
    return len(compiled)
