"""Outlier figures of each layer's keys, collected while vLLM runs: what decides which scale methods a model bears.

    s_tok       standard deviation of a logit, in nats, if keys were INT4 with a scale per token: their step is a
                token's range / 15, its error uniform. Above 1.5 in any layer such keys fail; healthy models stay
                below 1.1.
    s_channel   the same with a scale per channel and page: what `k4v4` does.
    amplitude   largest root mean square of a channel over the median channel's: what makes s_tok large.

Each is the worst kv head's. Ranges of channels say nothing: a Qwen key bias is an offset, not a range.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

LEVELS = 15


@dataclass
class _Layer:
    """Sums over pages, by kv head `[H]` and channel `[H, D]`; float64."""

    pages: int = 0
    scale: float = 0.0
    token_range: Any = 0.0
    channel_range: Any = 0.0
    query: Any = 0.0
    key: Any = 0.0

    def add(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        """`query` `[P, Hq, D]`, `key` `[P, H, D]` of one page of tokens."""
        key, query = key.double(), query.double()
        heads, dim = key.shape[1:]
        self.pages, self.scale = self.pages + 1, scale
        self.token_range += (key.amax(-1) - key.amin(-1)).square().mean(0)
        self.channel_range += (key.amax(0) - key.amin(0)).square()
        self.query += query.reshape(len(query), heads, -1, dim).square().mean((0, 2))
        self.key += key.square().mean(0)

    def figures(self) -> dict[str, float]:
        query, noise = self.query / self.pages, self.scale**2 / (LEVELS**2 * 12)
        per_token = (self.token_range / self.pages * query.sum(-1) * noise).sqrt()
        per_channel = ((self.channel_range / self.pages * query).sum(-1) * noise).sqrt()
        rms = (self.key / self.pages).sqrt()
        amplitude = rms.amax(-1) / rms.median(-1).values.clamp(min=1e-12)
        return {
            "s_tok": float(per_token.max()),
            "s_channel": float(per_channel.max()),
            "amplitude": float(amplitude.max()),
        }


@dataclass
class Outliers:
    """Figures by layer, from the forward passes seen inside `watching()`."""

    page_size: int
    layers: dict[int, _Layer] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Adds every step of exactly one page of tokens that a KTX engine of this process runs meanwhile."""
        from ..attention_backends.ktx import KTXImpl
        from ..attention_backends.metadata import layer_index

        forward = KTXImpl.forward

        def watched(
            impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, meta: Any, *a: Any, **k: Any
        ) -> Any:
            if meta is not None and meta.num_tokens == self.page_size:
                seen = self.layers.setdefault(layer_index(layer.layer_name), _Layer())
                seen.add(query[: self.page_size], key[: self.page_size], impl.scale)
            return forward(impl, layer, query, key, value, cache, meta, *a, **k)

        KTXImpl.forward = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            KTXImpl.forward = forward  # type: ignore[method-assign]

    def figures(self) -> list[dict[str, float]]:
        return [{"layer": index, **layer.figures()} for index, layer in sorted(self.layers.items())]
