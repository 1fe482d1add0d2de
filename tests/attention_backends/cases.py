"""Batches for the kernel tests: a paged cache of sealed and open pages in scattered blocks, and fresh rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ktx.attention_backends import reference
from vllm_ktx.kv_quant import KVCacheQuantizer, KVFormat, PageLayout, parse_format

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


# Beside the presets: scales of groups of 32, by channel and by token on either side, in two bytes and in one.
GROUPS = [
    parse_format("k4v4", k_method="per_channel_32", v_method="per_token_32", scale_bits=8),
    parse_format("k8v4", k_method="per_token_32", v_method="per_channel_32", v_rotate=False),
    parse_format("k8v8", k_method="per_channel_32", v_method="per_channel_32", scale_bits=8),
    parse_format("k4v4", k_method="per_token_32", v_method="per_token_32"),
]


def make_format(
    k_bits=4, v_bits=4, k_method="per_channel", v_method="per_token", v_rotate=True, scale_bits=16
) -> KVFormat:
    return KVFormat("test", k_bits, v_bits, k_method, v_method, v_rotate and k_bits < 16, scale_bits=scale_bits)


@dataclass
class Batch:
    layout: PageLayout
    inputs: dict
    headers: torch.Tensor  # for sparse attention

    def run(self, kernels, num_threads=0, **changes):
        """The kernels' output and log-sum-exp."""
        inputs = {**self.inputs, **changes}
        out = torch.full_like(inputs["q"], float("nan"))
        lse = torch.full(out.shape[:2], float("nan"))
        kernels.attention(self.layout, out=out, lse=lse, num_threads=num_threads, **inputs)
        return out, lse

    def expected(self, **changes):
        return reference.attention(self.layout, **{**self.inputs, **changes})

    def check(self, kernels, isas=None, tolerance=None, **changes):
        """Compares with the float64 oracle, for each of `isas` (None: as the kernels are set)."""
        want, want_lse = self.expected(**changes)
        for isa in isas or [None]:
            if isa:
                kernels.set_isa(isa)
            out, lse = self.run(kernels, **changes)
            compare(out, lse, want, want_lse, tolerance or TOLERANCE[out.dtype], str(isa or kernels))


def compare(out, lse, want, want_lse, limit, what):
    """The error of `out` is relative to the root mean square of `want`; `lse` must be infinite at the same places."""
    scale = want.square().mean().sqrt()
    error = (out.double() - want) / scale
    assert float(error.square().mean().sqrt()) < limit, what
    assert float(error.abs().max()) < 12 * limit, what
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite), what
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=limit, atol=4 * limit)


def make_batch(
    rows,
    fmt=None,
    page_size=64,
    q_heads=8,
    kv_heads=2,
    dim=64,
    dtype=torch.bfloat16,
    softcap=0.0,
    scattered_slots=True,
    extra_open=1,
    seal_tail=False,
    offset=2.0,
    page_spread=0.0,
    uneven=1.0,
    seed=0,
) -> Batch:
    """`rows`: (fresh tokens, context) of each sequence.

    Of every row the partial page and `extra_open` full ones before it are open (`seal_tail`: none is); garbage (NaN)
    lies behind the context's end in open pages. `page_spread`: how far the mean keys of pages lie apart. `uneven`: how
    much larger every 16th channel of the keys, and smaller of the queries, and every 16th token's values are.
    """
    gen = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=gen)

    layout = PageLayout(fmt or make_format(), page_size, kv_heads, dim, torch.empty(0, dtype=dtype).element_size())
    tokens = sum(fresh for fresh, _ in rows)
    counts = [-(-context // page_size) for _, context in rows]
    num_blocks = sum(counts) + 3
    blocks = torch.randperm(num_blocks, generator=gen)[: sum(counts)]
    table = torch.full((len(rows), max(counts, default=0) + 2), -1, dtype=torch.int32)
    open_slot = torch.full((num_blocks,), -1, dtype=torch.int32)
    shift = offset * normal(kv_heads, 1, dim)
    keys = (normal(num_blocks, kv_heads, page_size, dim) + shift).to(dtype)
    if page_spread:
        keys = (keys.float() + page_spread * normal(num_blocks, kv_heads, 1, dim)).to(dtype)
    values = normal(num_blocks, kv_heads, page_size, dim).to(dtype)
    keys[..., ::16] *= uneven
    values[:, :, ::16] *= uneven
    opened = []
    for row, (_, context) in enumerate(rows):
        own = blocks[sum(counts[:row]) : sum(counts[: row + 1])]
        table[row, : len(own)] = own.int()
        if not seal_tail:
            last = context // page_size
            opened += own[max(0, last - extra_open) :].tolist()
    open_pages = torch.full((len(opened) + 1, 2, kv_heads, page_size, dim), float("nan"), dtype=dtype)
    order = torch.randperm(len(opened) + 1, generator=gen)[: len(opened)]
    open_slot[opened] = order.int()
    open_pages[order] = torch.stack((keys[opened], values[opened]), 1)
    for row, (_, context) in enumerate(rows):
        if context % page_size and not seal_tail:
            slot = open_slot[table[row, context // page_size].long()].long()
            open_pages[slot, :, :, context % page_size :] = float("nan")
    slots = torch.randperm(num_blocks + 2, generator=gen)[:num_blocks] if scattered_slots else torch.arange(num_blocks)
    payload = torch.zeros(num_blocks + 2, layout.payload_bytes + 64, dtype=torch.uint8)[:, : layout.payload_bytes]
    headers, payload[slots] = KVCacheQuantizer(layout).seal(keys, values)
    wide = normal(tokens, q_heads + 1, dim).to(dtype)  # rows with a gap between
    fresh_keys = (normal(tokens, kv_heads, dim) + shift.transpose(0, 1)).to(dtype)
    fresh_keys[..., ::16] *= uneven
    wide[..., ::16] /= uneven
    inputs = {
        "q": wide[:, :q_heads],
        "k": fresh_keys,
        "v": normal(tokens, kv_heads, dim).to(dtype),
        "cu_q": torch.tensor([0, *(fresh for fresh, _ in rows)]).cumsum(0).int(),
        "context": torch.tensor([context for _, context in rows], dtype=torch.int32),
        "block_table": table,
        "open_slot": open_slot,
        "payload": payload,
        "open_pages": open_pages,
        "payload_slot": slots.int() if scattered_slots else None,
        "scale": dim**-0.5,
        "softcap": softcap,
    }
    return Batch(layout, inputs, headers)
