"""Quantizes whole pages and reads them back, in plain torch: the oracle for every kernel, and the fallback without one.

Asymmetric uniform quantization: `x ~ minimum + scale * code`, codes 0 .. 2^bits - 1, scale and minimum in fp16. The
minimum is rounded down and the scale up in fp16, so that the stored range always covers the data and the error of a
finite input is at most half a stored scale, also for channels with a large offset (a Qwen key bias of 300 has an fp16
spacing of 0.25: a minimum rounded to nearest would clip).

Defined for every input: NaN counts as 0, values are clamped to +-65504 (the fp16 range); a constant channel has scale 0
or one tiny step and reads back its minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import hadamard, packing
from .layout import PageLayout

FP16_MAX = 65504.0

# Which dimension of [..., tokens, channels] one scale is shared over.
_REDUCE: dict[str, tuple[int, ...]] = {"per_channel": (-2,), "per_token": (-1,), "per_head": (-2, -1)}


def sanitize(x: torch.Tensor) -> torch.Tensor:
    """float32 copy of `x` with NaN as 0 and infinities at the fp16 range's ends."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp(-FP16_MAX, FP16_MAX)


def half_toward(x: torch.Tensor, up: bool) -> torch.Tensor:
    """float32 `x` (finite, within the fp16 range) rounded to fp16 toward +inf (`up`) or -inf."""
    nearest = x.half()
    wrong = nearest.float() < x if up else nearest.float() > x
    return torch.where(wrong, _next_half(nearest, up), nearest)


def _next_half(x: torch.Tensor, up: bool) -> torch.Tensor:
    """The fp16 number next to `x` in the given direction, by its bit pattern."""
    bits = x.view(torch.int16).int()
    away_from_zero = (bits >= 0) == up
    moved = bits + torch.where(away_from_zero, 1, -1)
    smallest = 1 if up else -0x7FFF  # +-2^-24, as int16 bit patterns
    moved = torch.where((bits & 0x7FFF) == 0, smallest, moved)
    return moved.to(torch.int16).view(torch.float16)


def quantize(x: torch.Tensor, bits: int, method: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes `x` `[..., P, D]` float32 (finite).

    Returns codes uint8 `[..., P, D]`, scale fp16 and minimum fp16 with the reduced dimensions kept as 1.
    """
    dims, levels = _REDUCE[method], (1 << bits) - 1
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    minimum = half_toward(low, up=False)
    scale = half_toward((high - minimum.float()) / levels, up=True)
    step = scale.float()
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    codes = ((x - minimum.float()) * inverse).round().clamp(0, levels)
    return codes.to(torch.uint8), scale, minimum


def dequantize(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """float32 `minimum + scale * codes`, broadcasting."""
    return minimum.float() + scale.float() * codes.float()


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
        codes, scale, minimum = quantize(keys, fmt.k_bits, fmt.k_method)
        self._put(payload, "k_scale", scale)
        self._put(payload, "k_min", minimum)
        for name, plane in packing.pack_keys(codes, fmt.k_bits).items():
            self._put(payload, name, plane)
        values = hadamard.rotate(values).clamp(-FP16_MAX, FP16_MAX) if fmt.v_rotate else values
        codes, scale, minimum = quantize(values, fmt.v_bits, fmt.v_method)
        self._put(payload, "v_scale", scale)
        self._put(payload, "v_min", minimum)
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
        keys = dequantize(codes, *self._params(payload, "k", fmt.k_method))
        codes = packing.unpack_values(self._get(payload, "v_codes"), fmt.v_bits, lay.page_size, lay.head_dim)
        values = dequantize(codes, *self._params(payload, "v", fmt.v_method))
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
            step = scale.float()
            inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
            parts.append(((stat * inverse).round().clamp(-127, 127).to(torch.int8), scale))
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

    def _params(self, payload: torch.Tensor, side: str, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        shape: Callable[[torch.Tensor], torch.Tensor] = {
            "per_channel": lambda x: x.unsqueeze(-2),
            "per_token": lambda x: x.unsqueeze(-1),
            "per_head": lambda x: x.unsqueeze(-1),
        }[method]
        scale, minimum = (self._get(payload, f"{side}_{what}").view(torch.float16) for what in ("scale", "min"))
        return shape(scale), shape(minimum)
