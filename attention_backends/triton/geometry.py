"""`Geometry`: one page layout and one model's heads as the compile-time constant that every Triton kernel takes.

All numbers come from `PageLayout`, the format description that C++ and torch use too; no kernel knows an offset of its
own. Frozen and hashable, so that Triton caches one compiled kernel for each. Imports no triton.

Channels have two orders inside the kernels, both padded to powers of two:

    key order     [4][quarter]: channel k * head_dim / 4 + c, as the bit planes hold them (`kv_quant/layout.py`)
    value order   [2 * half]: INT4 the low, then the high nibbles of a row's bytes; otherwise as they come (natural)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ktx.kv_quant import SCALE_METHODS, KVFormat, PageLayout

from ..cpu.abi import BY_CHANNEL, BY_TOKEN, METHODS, group_of

MIN_ROWS = 16  # of a tensor core's tile
MIN_WIDTH = 16  # of a step's block table, pages
_SECTIONS = (
    "k_base", "k_scale", "k_min", "k_plane0", "k_plane1", "k_low", "v_base", "v_scale", "v_min", "v_codes"
)  # fmt: skip


def unserved(fmt: KVFormat) -> str | None:
    """What of a page format the Triton kernels don't know, in words; None if they serve it."""
    names = sorted({fmt.k_method, fmt.v_method})
    return ", ".join(f"scales {name}" for name in names if name not in METHODS or not _powers_of_two(name)) or None


def _powers_of_two(name: str) -> bool:
    """Whether a method's groups are what a block of values can be reshaped to."""
    method = SCALE_METHODS[name]
    return all(size is None or size & (size - 1) == 0 for size in (method.tokens, method.channels))


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def table_width(pages: int, most: int) -> int:
    """Columns, of `most`, of the block table of a step whose longest row has `pages`. Kernels' grids and workspaces
    follow from it: a power of two makes few of them."""
    return min(max(MIN_WIDTH, power_of_two(pages)), most)


@dataclass(frozen=True)
class Geometry:
    """Sizes in elements, offsets and strides in bytes.

    `quarter`, `half`: a quarter and half of the channels, padded. `tile`: tokens read at once, a power of two that
    divides the page and groups of tokens. `at_*`, `head_*`: offset of a payload section, and its bytes for one kv head.
    `*_method`: by channel, by token or by head, as in `METHODS`. `*_group`: tokens (by channel) or channels that share
    a scale, padded. `exact`: multiply in float32 (the model's dtype is float32).
    """

    page: int
    heads: int
    group: int
    dim: int
    quarter: int
    half: int
    tile: int
    k_bits: int
    v_bits: int
    k_method: int
    v_method: int
    k_group: int
    v_group: int
    scale_bits: int
    rotate: bool
    exact: bool
    header_head: int
    at_k_base: int
    at_k_scale: int
    head_k_scale: int
    at_k_min: int
    at_k_plane0: int
    head_k_plane: int
    at_k_plane1: int
    at_k_low: int
    head_k_low: int
    at_v_base: int
    at_v_scale: int
    head_v_scale: int
    at_v_min: int
    at_v_codes: int
    head_v_codes: int

    @classmethod
    def of(cls, layout: PageLayout, q_heads: int, dtype: torch.dtype) -> Geometry:
        """Of `layout`'s pages read by `q_heads` query heads of a model in `dtype`. Raises ValueError if they don't
        fit."""
        if q_heads % layout.num_kv_heads:
            raise ValueError(f"query heads: found {q_heads}, needed a multiple of {layout.num_kv_heads} kv heads")
        fmt, dim, size = layout.fmt, layout.head_dim, layout.page_size
        at = {name: section.offset for name, section in layout.sections.items()}
        length = {name: section.head_bytes for name, section in layout.sections.items()}
        methods = [SCALE_METHODS[name] for name in (fmt.k_method, fmt.v_method)]
        shared = [size for method in methods for size in (method.tokens, method.channels) if size and size > 1]
        return cls(
            page=size,
            heads=layout.num_kv_heads,
            group=q_heads // layout.num_kv_heads,
            dim=dim,
            quarter=power_of_two(dim // 4),
            half=power_of_two(dim // 2),
            tile=min(64, size & -size, *shared),
            k_bits=fmt.k_bits,
            v_bits=fmt.v_bits,
            k_method=METHODS[fmt.k_method],
            v_method=METHODS[fmt.v_method],
            k_group=power_of_two(group_of(layout, fmt.k_method)),
            v_group=power_of_two(group_of(layout, fmt.v_method)),
            scale_bits=fmt.scale_bits,
            rotate=fmt.quantized and fmt.v_rotate,
            exact=dtype == torch.float32,
            header_head=layout.header_head_bytes,
            **{f"at_{name}": at.get(name, 0) for name in _SECTIONS},
            head_k_scale=length.get("k_scale", 0),
            head_k_plane=length.get("k_plane0", 0),
            head_k_low=length.get("k_low", 0),
            head_v_scale=length.get("v_scale", 0),
            head_v_codes=length.get("v_codes", 0),
        )

    @property
    def padded(self) -> bool:
        """Whether channels are padded; else all of their masks are true, and say so to the compiler."""
        return self.dim & (self.dim - 1) != 0

    @property
    def channel_groups(self) -> bool:
        """Whether scales belong to groups of channels of a token: then every number of a tile has its own."""
        return any(method == BY_TOKEN and group < self.dim for method, group in self._sides)

    def registers(self, warps: int) -> int | None:
        """Bound that ptxas is given where scales belong to groups: without one it spills to fit more blocks."""
        by_tokens = any(method == BY_CHANNEL and group < self.page for method, group in self._sides)
        return min(255, 2048 // warps) if by_tokens or self.channel_groups else None

    @property
    def _sides(self) -> tuple[tuple[int, int], ...]:
        return (self.k_method, self.k_group), (self.v_method, self.v_group)

    @property
    def rows(self) -> int:
        """Query heads of a group, padded."""
        return power_of_two(self.group)
