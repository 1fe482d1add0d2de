"""What page scorers read: the context pages of one sequence, each part fetched only when it is asked for.

Owns reading (headers, two-bit keys, whole pages) and the estimate that a page's mean and deviation allow. Never ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_ktx.kv_quant import SCALE_METHODS, KVCacheQuantizer, PageLayout, packing

from ..reference import gather_context

VARIANCE_FACTOR = 0.7  # keys of a page are less spread along a query than independent channels would be


@dataclass(frozen=True)
class ContextPages:
    """`context` tokens of one sequence in pages `blocks` (int64 `[num_pages]`).

    Other fields as in `reference.attention`. `headers`: uint8 `[num_blocks, header_bytes]` (None: moments are computed
    from the keys). Results are in `dtype`.
    """

    layout: PageLayout
    blocks: torch.Tensor
    context: int
    open_slot: torch.Tensor
    headers: torch.Tensor | None
    payload: torch.Tensor
    open_pages: torch.Tensor
    payload_slot: torch.Tensor | None = None
    softcap: float = 0.0
    dtype: torch.dtype = torch.float64

    @property
    def num_pages(self) -> int:
        return -(-self.context // self.layout.page_size)

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `pages` (int64, ascending) as attention reads them, float32 `[tokens, kv_heads, D]`."""
        size = self.layout.page_size
        length = len(pages) * size
        if len(pages) and int(pages[-1]) == self.num_pages - 1:
            length -= self.num_pages * size - self.context
        where = (self.open_slot, self.payload, self.open_pages, self.payload_slot)
        return gather_context(self.layout, self.blocks[pages], length, *where)

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole `pages`, as attention reads them: `[n, kv_heads, page_size, D]`."""
        keys = self.read(pages)[0]
        shape = (len(pages), self.layout.page_size, self.layout.num_kv_heads, self.layout.head_dim)
        return keys.reshape(shape).transpose(1, 2).to(self.dtype)

    def moments(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the keys of whole `pages`, from their headers: `[n, kv_heads, D]` each."""
        if self.headers is None or not self.layout.header_bytes or not len(pages):
            return moments(self.keys(pages))
        rows = self.headers[self.blocks[pages], : self.layout.header_bytes]
        mean, deviation = KVCacheQuantizer(self.layout).read_header(rows.contiguous())
        return mean.to(self.dtype), deviation.to(self.dtype)

    def two_bit_keys(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of whole sealed `pages` at the middle of their top two bits, and the width of one such step.

        `[n, kv_heads, page_size, D]`, and what broadcasts to it. An unquantized page is read as it is, with step 0.
        """
        fmt = self.layout.fmt
        if not fmt.quantized:
            return self.keys(pages), torch.zeros(1, 1, 1, 1, dtype=self.dtype)
        blocks = self.blocks[pages]
        slots = blocks if self.payload_slot is None else self.payload_slot[blocks].long()
        rows = self.payload[slots]
        shape, spread = (self.layout.page_size, self.layout.head_dim), SCALE_METHODS[fmt.k_method].spread
        params = KVCacheQuantizer(self.layout).params(rows, "k")
        scale, minimum = (spread(p, *shape).to(self.dtype) for p in params)
        planes = {"k_plane0": self._section(rows, "k_plane0")}
        planes["k_plane1"] = torch.zeros_like(planes["k_plane0"])
        planes["k_low"] = torch.zeros_like(planes["k_plane0"]).repeat(1, 1, 2)
        codes = packing.unpack_keys(planes, fmt.k_bits, self.layout.page_size, self.layout.head_dim)
        low = 1 << (fmt.k_bits - 2)  # codes within one step of the top two bits
        return minimum + scale * (codes.to(self.dtype) + (low - 1) / 2), scale * low

    def _section(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        section, heads = self.layout.sections[name], self.layout.num_kv_heads
        run = rows[:, section.offset : section.offset + section.head_bytes * heads]
        return run.reshape(len(rows), heads, section.head_bytes).contiguous()


def moments(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and population standard deviation `[..., D]` of `keys` `[..., tokens, D]`."""
    mean = keys.mean(-2)
    return mean, (keys - mean.unsqueeze(-2)).square().mean(-2).sqrt()


def soften(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


def mean_logits(q: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Scaled queries `[R, H, G, S, D]` times `[n, H, D]`: `[R, H, G, S, n]`."""
    return torch.einsum("rhgsd,nhd->rhgsn", q, mean)


def estimate_mass(
    q: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, tokens: int, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log of the softmax mass of pages of `tokens` keys known by mean and deviation `[n, H, D]`.

    `q`: scaled queries `[R, H, G, S, D]`. Returns log-mass, mean logit a and variance v of the logits in a page, each
    `[R, H, G, S, n]`. Were the logits Gaussian, the log-mass would be a + ln n + v/2; `tokens` samples never reach far
    into the tail, so beyond sd = sqrt(2 ln n) the term grows only linearly (as the free energy of the random energy
    model does; Derrida 1981, Phys. Rev. B 24, 2613).
    """
    a = soften(mean_logits(q, mean), softcap)
    v = VARIANCE_FACTOR * mean_logits(q.square(), deviation.square())
    log_n = math.log(tokens)
    edge = math.sqrt(2 * log_n)
    sd = v.sqrt()
    bonus = torch.where(sd < edge, v / 2, sd * edge - log_n)
    return a + log_n + bonus, a, v


def shares(log_mass: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of candidates' log-masses `[..., n]` beside the rest's `base` `[...]`: their shares, and the rest's.

    NaN (a query that isn't finite) counts as no share at all.
    """
    total = torch.logaddexp(torch.logsumexp(log_mass, -1), base)
    parts = torch.exp(log_mass - total.unsqueeze(-1)), torch.exp(base - total)
    return torch.nan_to_num(parts[0], nan=0.0), torch.nan_to_num(parts[1], nan=0.0)


def rank(share: torch.Tensor) -> torch.Tensor:
    """Order `[R, H, n]` of candidates by their shares `[R, H, G, S, n]`, summed over the group; ties: lower page first.

    The sum of softmax masses, never a pooled query or a maximum of logits: a page that one head needs must rank high.
    """
    return torch.sort(share.sum((2, 3)), dim=-1, descending=True, stable=True).indices
