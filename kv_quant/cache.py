"""A quantized cache for who wants one without vLLM: one sequence of one layer, in plain torch.

The bytes are those of the serving path: `KVCacheQuantizer` seals whole pages, each once; the newest stay open in the
model's dtype. It never evicts, pages out or shares.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .codec import KVCacheQuantizer
from .layout import PageLayout


class QuantizedKVCache:
    """Keys and values of a growing sequence, in pages of `layout`. Open pages are of `dtype`.

    >>> cache = QuantizedKVCache(PageLayout(parse_format("k8v4"), page_size=64, num_kv_heads=2, head_dim=64))
    >>> cache.append(k, v)            # [num_kv_heads, tokens, head_dim], any float dtype
    >>> k_hat, v_hat = cache.read()   # float32 [num_kv_heads, len(cache), head_dim]
    >>> cache.memory_size             # bytes
    """

    def __init__(
        self, layout: PageLayout, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
    ) -> None:
        if dtype.itemsize != layout.dtype_bytes:
            raise ValueError(f"{dtype} has {dtype.itemsize} bytes, the layout's dtype_bytes is {layout.dtype_bytes}")
        self.layout, self._codec, self._tokens = layout, KVCacheQuantizer(layout), 0
        # As the kernels lay them out: uint8 `[num_pages, header_bytes]`, `[num_pages, payload_bytes]`, and open pages
        # `[num_open, 2, num_kv_heads, page_size, head_dim]`.
        self.headers, self.payload = (
            torch.empty(0, size, dtype=torch.uint8, device=device)
            for size in (layout.header_bytes, layout.payload_bytes)
        )
        page = (2, layout.num_kv_heads, layout.page_size, layout.head_dim)
        self.open_pages = torch.empty(0, *page, dtype=dtype, device=device)

    def __len__(self) -> int:
        """Tokens."""
        return self._tokens

    @property
    def memory_size(self) -> int:
        """Bytes of headers, payloads and open pages, the empty part of the last one included."""
        return sum(part.nbytes for part in (self.headers, self.payload, self.open_pages))

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """`k`, `v` `[num_kv_heads, tokens, head_dim]`: keys after RoPE, rotated if the format has `k_rotate` (they come
        back so). Seals what is full, but for the format's `residual_pages` newest. Raises ValueError for other shapes.
        """
        heads, size, dim = self.layout.num_kv_heads, self.layout.page_size, self.layout.head_dim
        if k.shape != v.shape or k.dim() != 3 or (k.shape[0], k.shape[2]) != (heads, dim):
            raise ValueError(f"keys {tuple(k.shape)}, values {tuple(v.shape)}: both must be [{heads}, tokens, {dim}]")
        rows = torch.cat((self._open_rows(), torch.stack((k, v)).to(self.open_pages)), dim=2)
        rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % size))
        self.open_pages = rows.unflatten(2, (rows.shape[2] // size, size)).movedim(2, 0).contiguous()
        self._tokens += k.shape[1]
        self.seal(self.layout.fmt.residual_pages)

    def seal(self, keep: int = 0) -> None:
        """Seals the full open pages but for the newest `keep`."""
        if (count := self._tokens // self.layout.page_size - len(self.payload) - keep) > 0:
            header, payload = self._codec.seal(self.open_pages[:count, 0], self.open_pages[:count, 1])
            self.headers, self.payload = torch.cat((self.headers, header)), torch.cat((self.payload, payload))
            self.open_pages = self.open_pages[count:].clone()

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, dequantized: float32 `[num_kv_heads, len(self), head_dim]`."""
        sealed = self._codec.unseal(self.payload, self.open_pages.dtype)
        pairs = zip(sealed, self._open_rows().float(), strict=True)
        keys, values = (torch.cat((old.movedim(0, 1).flatten(1, 2), new), dim=1) for old, new in pairs)
        return keys, values

    def _open_rows(self) -> torch.Tensor:
        """`[2, num_kv_heads, tokens, head_dim]`: what isn't sealed."""
        rows = self.open_pages.movedim(0, 2).flatten(2, 3)
        return rows[:, :, : self._tokens - len(self.payload) * self.layout.page_size]
