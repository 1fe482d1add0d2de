"""Quantizes whole pages and reads them back, in plain torch: the oracle for every kernel, and the fallback without one.

Asymmetric uniform quantization: `x ~ minimum + scale * code`, codes 0 .. 2^bits - 1, with scale and minimum as
`scale_methods.py` stores them: the stored range always covers the data, and the error of a finite input is at most half
a stored scale.

Defined for every input: NaN counts as 0, values are clamped to +-65504 (the fp16 range); a constant channel has scale 0
or one tiny step and reads back its minimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import hadamard, packing
from .layout import PageLayout
from .scale_methods import SCALE_METHODS, Params, half_toward, inverse_or_zero, make_params, read_params

FP16_MAX = 65504.0


def sanitize(x: torch.Tensor) -> torch.Tensor:
    """float32 copy of `x` with NaN as 0 and infinities at the fp16 range's ends."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp(-FP16_MAX, FP16_MAX)


def quantize(x: torch.Tensor, bits: int, method: str, scale_bits: int = 16) -> tuple[torch.Tensor, Params]:
    """Quantizes `x` `[..., P, D]` float32 (finite): codes uint8 `[..., P, D]`, and the groups' parameters."""
    levels, groups = (1 << bits) - 1, SCALE_METHODS[method]
    params = make_params(*groups.ranges(x), levels, scale_bits)
    scale, minimum = (groups.spread(p, *x.shape[-2:]) for p in (params.scale, params.minimum))
    codes = ((x - minimum) * inverse_or_zero(scale)).round().clamp(0, levels)
    return codes.to(torch.uint8), params


def dequantize(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, method: str) -> torch.Tensor:
    """float32 `minimum + scale * codes`, of codes `[..., P, D]` and float32 parameters `[..., entries]`."""
    scale, minimum = (SCALE_METHODS[method].spread(p, *codes.shape[-2:]) for p in (scale, minimum))
    return minimum + scale * codes.float()


@dataclass(frozen=True)
class KVCacheQuantizer:
    """Seals pages into bytes and reads them back, by one `PageLayout`.

    >>> layout = PageLayout(parse_format("k8v4"), page_size=64, num_kv_heads=2, head_dim=64)
    >>> header, payload = KVCacheQuantizer(layout).seal(k, v)      # k, v: [num_pages, num_kv_heads, 64, 64]
    >>> k_hat, v_hat = KVCacheQuantizer(layout).unseal(payload)    # float32, the same shapes
    """

    layout: PageLayout

    def seal(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`k`, `v`: `[num_pages, num_kv_heads, page_size, head_dim]`, any float dtype.

        Returns the headers `[num_pages, header_bytes]` and the payloads `[num_pages, payload_bytes]`, uint8. For an
        unquantized format the payload is the input itself.
        """
        self._check(k, v)
        pages = k.shape[0]
        payload = torch.zeros(pages, self.layout.payload_bytes, dtype=torch.uint8, device=k.device)
        if not self.layout.fmt.quantized:
            both = torch.cat((k.reshape(pages, -1), v.reshape(pages, -1)), dim=1).contiguous()
            payload[:, : self.layout.dense_bytes] = both.view(torch.uint8)
            return payload[:, :0], payload
        fmt = self.layout.fmt
        keys, values = sanitize(k), sanitize(v)
        header = self.make_header(keys)
        codes = self._quantize_into(payload, "k", keys)
        for name, plane in packing.pack_keys(codes, fmt.k_bits).items():
            self._put(payload, name, plane)
        values = hadamard.rotate(values).clamp(-FP16_MAX, FP16_MAX) if fmt.v_rotate else values
        codes = self._quantize_into(payload, "v", values)
        self._put(payload, "v_codes", packing.pack_values(codes, fmt.v_bits))
        return header, payload

    def unseal(self, payload: torch.Tensor, model_dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        """Payloads `[num_pages, payload_bytes]` uint8 -> keys and values, float32, shapes as given to `seal`."""
        lay, fmt = self.layout, self.layout.fmt
        shape = (payload.shape[0], lay.num_kv_heads, lay.page_size, lay.head_dim)
        if not fmt.quantized:
            raw = payload[:, : lay.dense_bytes].contiguous().view(model_dtype).float()
            half = raw.shape[1] // 2
            return raw[:, :half].reshape(shape), raw[:, half:].reshape(shape)
        planes = {name: self._get(payload, name) for name in lay.sections if name.startswith(("k_plane", "k_low"))}
        codes = packing.unpack_keys(planes, fmt.k_bits, lay.page_size, lay.head_dim)
        keys = dequantize(codes, *self.params(payload, "k"), fmt.k_method)
        codes = packing.unpack_values(self._get(payload, "v_codes"), fmt.v_bits, lay.page_size, lay.head_dim)
        values = dequantize(codes, *self.params(payload, "v"), fmt.v_method)
        return keys, hadamard.rotate(values) if fmt.v_rotate else values

    def make_header(self, keys: torch.Tensor) -> torch.Tensor:
        """Headers `[num_pages, header_bytes]` uint8 of sanitized float32 keys `[num_pages, heads, page_size, D]`.

        Per kv head: int8 mean, int8 standard deviation (population) per channel, and their fp16 scales.
        """
        mean = keys.mean(-2)
        deviation = (keys - mean.unsqueeze(-2)).square().mean(-2).sqrt()
        parts = []
        for stat in (mean, deviation):
            scale = half_toward(stat.abs().amax(-1, keepdim=True) / 127, up=True)
            parts.append(((stat * inverse_or_zero(scale.float())).round().clamp(-127, 127).to(torch.int8), scale))
        pieces = [parts[0][0], parts[1][0], parts[0][1].view(torch.int8), parts[1][1].view(torch.int8)]
        return torch.cat(pieces, dim=-1).reshape(keys.shape[0], -1).view(torch.uint8)

    def read_header(self, header: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation, float32 `[num_pages, num_kv_heads, D]`, of headers `[num_pages, header_bytes]`."""
        dim = self.layout.head_dim
        rows = header.reshape(header.shape[0], self.layout.num_kv_heads, -1).view(torch.int8)
        scales = rows[..., 2 * dim :].contiguous().view(torch.float16).float()
        return rows[..., :dim].float() * scales[..., :1], rows[..., dim : 2 * dim].float() * scales[..., 1:]

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        want = (self.layout.num_kv_heads, self.layout.page_size, self.layout.head_dim)
        if k.shape != v.shape or k.dim() != 4 or tuple(k.shape[1:]) != want:
            raise ValueError(f"keys {tuple(k.shape)}, values {tuple(v.shape)}: both must be [num_pages, {want}]")

    def _put(self, payload: torch.Tensor, name: str, data: torch.Tensor) -> None:
        section = self.layout.sections[name]
        size = section.head_bytes * self.layout.num_kv_heads
        payload[:, section.offset : section.offset + size] = (
            data.reshape(len(payload), -1).contiguous().view(torch.uint8)
        )

    def _get(self, payload: torch.Tensor, name: str) -> torch.Tensor:
        section = self.layout.sections[name]
        size = section.head_bytes * self.layout.num_kv_heads
        run = payload[:, section.offset : section.offset + size]
        return run.reshape(len(payload), self.layout.num_kv_heads, section.head_bytes).contiguous()

    def params(self, payload: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 scale and minimum `[num_pages, num_kv_heads, entries]` of `side` (`k` or `v`) of payloads."""
        types = {"scale": torch.float16, "min": torch.float16}
        if self.layout.fmt.scale_bits == 8:
            types = {"base": torch.float16, "scale": torch.uint8, "min": torch.uint8}
        return read_params({name: self._get(payload, f"{side}_{name}").view(dtype) for name, dtype in types.items()})

    def _quantize_into(self, payload: torch.Tensor, side: str, x: torch.Tensor) -> torch.Tensor:
        """Codes of `x`; its parameters go into `payload`."""
        fmt = self.layout.fmt
        bits, method = (fmt.k_bits, fmt.k_method) if side == "k" else (fmt.v_bits, fmt.v_method)
        codes, params = quantize(x, bits, method, fmt.scale_bits)
        for name, stored in params.stored.items():
            self._put(payload, f"{side}_{name}", stored)
        return codes
