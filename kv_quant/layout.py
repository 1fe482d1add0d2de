"""The one page format description: where each byte of a page lies. C++, Triton and torch all read it from here.

A page is what vLLM calls a block: `page_size` tokens of one layer, all kv heads of this rank. It has two parts:

header   `[num_kv_heads][mean int8[D] | deviation int8[D] | mean scale fp16 | deviation scale fp16]`; always on the
         device, enough for the first step of page scoring.
payload  sections one after the other, each `[num_kv_heads][...]`, in the order in which a scoring cascade wants them:

    k_base           8-bit scales only: three fp16 numbers (see scale_methods.py)
    k_scale, k_min   fp16 or uint8, n entries (per_channel: D, per_token: page_size, per_head: 1, ...)
    k_plane0         top two bits of each key code
    k_plane1         next two bits
    k_low            INT8 only: the low nibble
    v_base, v_scale, v_min   alike
    v_codes          INT4 or INT8

so that `[k_base .. k_plane0]` is one run: enough to rank a page at 2 bits without its other bytes.

Order inside the key planes (token-minor words, so that SIMD lanes are tokens, and one shift and mask yields four
consecutive channels of a token as bytes, the operand shape of u8 x s8 dot products):
    plane 0 / 1: byte [d4][t][i], bits 2k..2k+1  ->  channel 4*d4 + i + k*D/4       (d4 < D/16, i < 4, k < 4)
    low nibble:  byte [d4][t][i], bits 4k..4k+3  ->  channel 4*d4 + i + k*D/2       (d4 < D/8,  i < 4, k < 2)
Value codes (lanes are channels): INT8 byte [t][d]; INT4 byte [t][g][j], low nibble channel 16g + j, high 16g + 8 + j.

An unquantized page (`none`, and the open pages of every format) is `K[num_kv_heads][page_size][D]` then V alike, in
the model's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from .formats import KVFormat
from .scale_methods import SCALE_METHODS

ALIGN = 64  # sections start at cache lines; wide loads of a head's run never straddle more than they must


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Section:
    """One section of the payload: `offset` from the payload's start, `head_bytes` per kv head; bytes."""

    offset: int
    head_bytes: int


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of one layer's page. `dtype_bytes` is the size of the model's dtype (for unquantized pages)."""

    fmt: KVFormat
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        if self.page_size % 32 or self.page_size <= 0:
            raise ValueError(f"page size (vLLM block_size) {self.page_size}: must be a multiple of 32")
        if self.head_dim % 16 or not 16 <= self.head_dim <= 512:
            raise ValueError(f"head_dim {self.head_dim}: must be a multiple of 16 between 16 and 512")
        if self.num_kv_heads < 1:
            raise ValueError(f"num_kv_heads {self.num_kv_heads}: must be at least 1")
        for side, method in (("key", self.fmt.k_method), ("value", self.fmt.v_method)):
            if problem := SCALE_METHODS[method].problem(self.page_size, self.head_dim):
                raise ValueError(f"{side}_scale={method!r}: {problem}; use {method.removesuffix('_32')!r}")

    def _param_sections(self, side: str, method: str) -> dict[str, int]:
        """Bytes of a side's parameters, per kv head."""
        entries, unit = SCALE_METHODS[method].entries(self.page_size, self.head_dim), self.fmt.scale_bits // 8
        base = {f"{side}_base": 6} if unit == 1 else {}
        return {**base, f"{side}_scale": unit * entries, f"{side}_min": unit * entries}

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Sections of the payload by name, in storage order (empty for an unquantized format)."""
        if not self.fmt.quantized:
            return {}
        values = self.page_size * self.head_dim
        sizes = self._param_sections("k", self.fmt.k_method)
        sizes |= {"k_plane0": values // 4, "k_plane1": values // 4}
        if self.fmt.k_bits == 8:
            sizes["k_low"] = values // 2
        sizes |= self._param_sections("v", self.fmt.v_method)
        sizes["v_codes"] = values * self.fmt.v_bits // 8
        sections, offset = {}, 0
        for name, head_bytes in sizes.items():
            sections[name] = Section(offset, head_bytes)
            offset = _round_up(offset + head_bytes * self.num_kv_heads, ALIGN)
        return sections

    @property
    def dense_bytes(self) -> int:
        """Bytes of the page in the model's dtype."""
        return 2 * self.page_size * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the payload, a multiple of `ALIGN`."""
        if not self.fmt.quantized:
            return _round_up(self.dense_bytes, ALIGN)
        last = self.sections["v_codes"]
        return _round_up(last.offset + last.head_bytes * self.num_kv_heads, ALIGN)

    @property
    def scoring_bytes(self) -> int:
        """Length of the payload's prefix that 2-bit page scoring reads: scales, minima, plane 0."""
        return self.sections["k_plane1"].offset if self.fmt.quantized else self.dense_bytes // 2

    @property
    def header_head_bytes(self) -> int:
        return 2 * self.head_dim + 4

    @property
    def header_bytes(self) -> int:
        """Bytes of the header (0 for an unquantized format, whose keys are scored as they are)."""
        return self.num_kv_heads * self.header_head_bytes if self.fmt.quantized else 0

    @property
    def page_bytes(self) -> int:
        """Device bytes of a fully resident page, rounded so that vLLM can state them per token."""
        return _round_up(self.header_bytes + self.payload_bytes, self.page_size)

    def kept_bytes(self, planes: bool) -> int:
        """Device bytes that every page has there, slot or not: its header and, with `planes`, its scoring planes."""
        return self.header_bytes + planes * self.scoring_bytes

    def tiered_page_bytes(self, overcommit: float, planes: bool = False) -> int:
        """Device bytes a page where only one payload in `overcommit` has a slot there; rounded as `page_bytes`."""
        return _round_up(self.kept_bytes(planes) + math.ceil(self.payload_bytes / overcommit), self.page_size)

    def num_slots(self, num_blocks: int, device_bytes: int, planes: bool = False) -> int:
        """Payload slots in a layer's `device_bytes`, beside what all blocks keep there."""
        return min(num_blocks, (device_bytes - num_blocks * self.kept_bytes(planes)) // self.payload_bytes)

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.page_size
