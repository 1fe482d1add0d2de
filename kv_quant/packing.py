"""Codes <-> bytes: the bit planes of keys and the packed codes of values, as `layout.py` describes them.

Plain torch, any leading dimensions; the oracle for the kernels' packing.
"""

from __future__ import annotations

import torch


def _pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`[..., P, D]` codes of `bits` bits -> bytes `[..., D*bits/32, P, 4]` flattened to `[..., P*D*bits/8]`."""
    *lead, tokens, dim = codes.shape
    per_byte = 8 // bits
    # channel = k*(D/per_byte) + 4*d4 + i
    split = codes.reshape(*lead, tokens, per_byte, dim // per_byte // 4, 4).to(torch.int32)
    shifts = (torch.arange(per_byte, dtype=torch.int32, device=codes.device) * bits).reshape(per_byte, 1, 1)
    packed = (split << shifts).sum(dim=-3).to(torch.uint8)  # [..., P, D4, 4]
    return packed.transpose(-3, -2).reshape(*lead, -1)


def _unpack_words(packed: torch.Tensor, bits: int, tokens: int, dim: int) -> torch.Tensor:
    lead = packed.shape[:-1]
    per_byte = 8 // bits
    words = packed.reshape(*lead, dim // per_byte // 4, tokens, 4).transpose(-3, -2).to(torch.int32)
    shifts = (torch.arange(per_byte, dtype=torch.int32, device=packed.device) * bits).reshape(per_byte, 1, 1)
    codes = (words.unsqueeze(-4).transpose(-4, -3) >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*lead, tokens, dim).to(torch.uint8)


def pack_keys(codes: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Key codes `[..., P, D]` uint8 -> the planes by section name, each `[..., bytes]` uint8."""
    high = codes >> (bits - 4)
    planes = {"k_plane0": _pack_words(high >> 2, 2), "k_plane1": _pack_words(high & 3, 2)}
    if bits == 8:
        planes["k_low"] = _pack_words(codes & 15, 4)
    return planes


def unpack_keys(planes: dict[str, torch.Tensor], bits: int, tokens: int, dim: int) -> torch.Tensor:
    """Inverse of `pack_keys`: codes `[..., P, D]` uint8."""
    codes = (_unpack_words(planes["k_plane0"], 2, tokens, dim) << 2) | _unpack_words(planes["k_plane1"], 2, tokens, dim)
    if bits == 8:
        codes = (codes << 4) | _unpack_words(planes["k_low"], 4, tokens, dim)
    return codes


def pack_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Value codes `[..., P, D]` uint8 -> `[..., P*D*bits/8]` uint8."""
    *lead, tokens, dim = codes.shape
    if bits == 8:
        return codes.reshape(*lead, -1)
    groups = codes.reshape(*lead, tokens, dim // 16, 2, 8)
    return (groups[..., 0, :] | (groups[..., 1, :] << 4)).reshape(*lead, -1)


def unpack_values(packed: torch.Tensor, bits: int, tokens: int, dim: int) -> torch.Tensor:
    """Inverse of `pack_values`: codes `[..., P, D]` uint8."""
    lead = packed.shape[:-1]
    if bits == 8:
        return packed.reshape(*lead, tokens, dim)
    groups = packed.reshape(*lead, tokens, dim // 16, 1, 8)
    return torch.cat((groups & 15, groups >> 4), dim=-2).reshape(*lead, tokens, dim)
