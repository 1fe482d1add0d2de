"""Orthonormal Walsh-Hadamard rotation along the head dimension.

Spreads a value vector's outliers over all channels, so that one scale a token fits them (QuaRot, arXiv:2404.00456).
Where `head_dim` is not a power of two the rotation is block diagonal over its largest power-of-two divisor.
"""

from __future__ import annotations

import torch


def block_size(head_dim: int) -> int:
    """Largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotates the last dimension of `x` (float32 or float64, any shape). Applying it twice gives `x` back."""
    dim = x.shape[-1]
    size = block_size(dim)
    y = x.reshape(-1, dim // size, size)
    half = 1
    while half < size:
        pairs = y.reshape(-1, dim // size, size // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2)
        half *= 2
    return (y.reshape(x.shape) * size**-0.5).to(x.dtype)
