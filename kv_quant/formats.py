"""Names and choices of a page format: bits, scale method and rotation of keys and of values.

Owns what a user may ask for (`KVFormat`, the presets, `parse_format`). Never touches a tensor; how many bytes a choice
takes and where they lie is `layout.py`.

The presets follow KIVI (Liu et al. 2024, arXiv:2402.02750: keys per channel, values per token) with the Hadamard
rotation of values from QuaRot (Ashkboos et al. 2024, arXiv:2404.00456).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from .scale_methods import SCALE_BITS, SCALE_METHODS


@dataclass(frozen=True)
class KVFormat:
    """How one page's keys and values are stored.

    `k_bits` / `v_bits`: 4, 8, or 16 (model dtype; then both must be 16). `k_method` / `v_method`: over what one scale
    and minimum are shared within a page and kv head. `k_rotate`: pages hold Hadamard-rotated keys, and queries are
    rotated alike (scores are the same); who seals pages hands them in rotated. `v_rotate`: values are rotated when a
    page is sealed. `scale_bits`: 16, or 8 for scales and minima in a byte each. `residual_pages`: sealed pages of a
    running sequence that also stay readable in the model's dtype.
    """

    name: str
    k_bits: int
    v_bits: int
    k_method: str = "per_channel"
    v_method: str = "per_token"
    v_rotate: bool = True
    residual_pages: int = 0
    k_rotate: bool = False
    scale_bits: int = 16

    def __post_init__(self) -> None:
        for side, bits in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if bits not in (4, 8, 16):
                raise ValueError(f"{side}={bits}: use 4, 8 or 16 (16 stands for the model's dtype)")
        if (self.k_bits == 16) != (self.v_bits == 16):
            raise ValueError(f"k_bits={self.k_bits}, v_bits={self.v_bits}: 16 must be used for both or for neither")
        for side, method in (("k_method", self.k_method), ("v_method", self.v_method)):
            if method not in SCALE_METHODS:
                raise ValueError(f"{side}={method!r}: use one of {', '.join(SCALE_METHODS)}")
        if self.scale_bits not in SCALE_BITS:
            raise ValueError(f"scale_bits={self.scale_bits}: use 16 or 8")
        if self.residual_pages < 0:
            raise ValueError(f"residual_pages={self.residual_pages}: must be 0 or more")

    @property
    def quantized(self) -> bool:
        return self.k_bits < 16

    @property
    def keys_by_channel(self) -> bool:
        """Whether scales of keys belong to one channel: then two-bit codes can rank pages."""
        return SCALE_METHODS[self.k_method].channels == 1

    @property
    def scales(self) -> str:
        """Scale methods and rotations in words, for logs and tables."""
        sides = [
            f"{what} {method}{' + Hadamard' if rotate else ''}"
            for what, method, rotate in (
                ("keys", self.k_method, self.k_rotate),
                ("values", self.v_method, self.v_rotate),
            )
        ]
        return ", ".join([*sides, *(["8-bit scales"] if self.scale_bits == 8 else [])])


PRESETS: dict[str, KVFormat] = {
    "none": KVFormat("none", 16, 16, v_rotate=False),
    "k8v8": KVFormat("k8v8", 8, 8),
    "k8v4": KVFormat("k8v4", 8, 4),
    "k4v4": KVFormat("k4v4", 4, 4, residual_pages=1),
}


def parse_format(
    name: str,
    *,
    k_method: str | None = None,
    v_method: str | None = None,
    v_rotate: bool | None = None,
    residual_pages: int | None = None,
    k_rotate: bool | None = None,
    scale_bits: int | None = None,
) -> KVFormat:
    """The preset `name` with the given fields replaced. Raises ValueError, naming the closest preset, if unknown."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"format={name!r} is unknown: use one of {', '.join(PRESETS)}{hint}")
    given = {"k_method": k_method, "v_method": v_method, "v_rotate": v_rotate, "residual_pages": residual_pages}
    given |= {"k_rotate": k_rotate, "scale_bits": scale_bits}
    changes = {key: value for key, value in given.items() if value is not None}
    if not PRESETS[name].quantized:
        changes = {}
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
