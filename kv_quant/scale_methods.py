"""Scale methods: over what part of a page one scale and one minimum are shared. The registry, and how they are stored.

A method is the shape of a group of values within one page and kv head, so a new one is one line of `SCALE_METHODS`:
quantizer, page layout, settings and the test matrix read everything from here (docs/adding-a-scale-method.md).

Stored parameters (`fp16_params`, `u8_params`) always cover the data: minimum <= value <= minimum + levels * scale, up
to float32 rounding. The error of a value is then at most half a stored step, and the step is at most `step_bound`,
which tests check for every method.

Sources: per channel and per token, KIVI (arXiv:2402.02750) and KVQuant (arXiv:2401.18079); groups, as in
GPTQ-style weight formats; the second quantization of scales, QLoRA (arXiv:2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALE_BITS = (16, 8)
_UNIT_LEVELS = 255


@dataclass(frozen=True)
class ScaleMethod:
    """One scale and minimum for each group of `tokens` x `channels` values (None: all of the page, all of the head)."""

    name: str
    tokens: int | None
    channels: int | None

    def problem(self, page_size: int, head_dim: int) -> str | None:
        """Why the method doesn't fit a page of that shape; None if it does."""
        for what, size, group in (("head_dim", head_dim, self.channels), ("page size", page_size, self.tokens)):
            if group and size % group:
                return f"{self.name} shares scales over {group}, and {what} {size} is no multiple of it"
        return None

    def _split(self, page_size: int, head_dim: int) -> tuple[int, int, int, int]:
        tokens, channels = self.tokens or page_size, self.channels or head_dim
        return page_size // tokens, tokens, head_dim // channels, channels

    def entries(self, page_size: int, head_dim: int) -> int:
        """Scales (and minima) of one page and kv head."""
        rows, _, columns, _ = self._split(page_size, head_dim)
        return rows * columns

    def ranges(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest value of each group of `x` `[..., page_size, head_dim]`: `[..., entries]` each."""
        groups = x.reshape(*x.shape[:-2], *self._split(*x.shape[-2:]))
        return groups.amin((-3, -1)).flatten(-2), groups.amax((-3, -1)).flatten(-2)

    def spread(self, params: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
        """`params` `[..., entries]` as something that broadcasts to `[..., page_size, head_dim]`."""
        rows, tokens, columns, channels = self._split(page_size, head_dim)
        grid = params.reshape(*params.shape[:-1], rows, columns)
        if rows > 1:
            grid = grid.repeat_interleave(tokens, -2)
        return grid.repeat_interleave(channels, -1) if columns > 1 else grid


SCALE_METHODS: dict[str, ScaleMethod] = {
    method.name: method
    for method in (
        ScaleMethod("per_channel", None, 1),
        ScaleMethod("per_token", 1, None),
        ScaleMethod("per_head", None, None),
        ScaleMethod("per_channel_32", 32, 1),
        ScaleMethod("per_token_32", 1, 32),
    )
}


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


def inverse_or_zero(step: torch.Tensor) -> torch.Tensor:
    return torch.where(step > 0, 1.0 / step, torch.zeros_like(step))


@dataclass(frozen=True)
class Params:
    """Parameters of groups: `stored` as bytes hold them (by name), `scale` and `minimum` float32 `[..., entries]` as
    they read back."""

    stored: dict[str, torch.Tensor]
    scale: torch.Tensor
    minimum: torch.Tensor


def make_params(low: torch.Tensor, high: torch.Tensor, levels: int, scale_bits: int) -> Params:
    """Parameters that cover `low` .. `high` (float32 `[..., entries]`, one page and kv head in the last dimension)."""
    return (fp16_params if scale_bits == 16 else u8_params)(low, high, levels)


def fp16_params(low: torch.Tensor, high: torch.Tensor, levels: int) -> Params:
    """An fp16 scale and an fp16 minimum for each group: `scale`, `min` fp16 `[..., entries]`.

    The minimum is rounded down and the scale up: a Qwen key bias of 300 has an fp16 spacing of 0.25, and a minimum
    rounded to nearest would clip.
    """
    minimum = half_toward(low, up=False)
    scale = half_toward((high - minimum.float()) / levels, up=True)
    return Params({"scale": scale, "min": minimum}, scale.float(), minimum.float())


def u8_params(low: torch.Tensor, high: torch.Tensor, levels: int) -> Params:
    """Eight bits each, linear against three fp16 numbers of the page and kv head.

    `scale`, `min` uint8 `[..., entries]`; `base` fp16 `[..., 3]`: unit of scales, least minimum, unit of minima. The
    minima of one head share a grid: where a few channels lie far out, it is coarse for all of them.
    """
    least = half_toward(low.amin(-1, keepdim=True), up=False)
    unit = half_toward((low.amax(-1, keepdim=True) - least.float()) / _UNIT_LEVELS, up=True)
    steps = ((low - least.float()) * inverse_or_zero(unit.float())).floor().clamp(0, _UNIT_LEVELS)
    steps = (steps - (least.float() + unit.float() * steps > low).float()).clamp(min=0)  # where the difference rounded
    minimum = least.float() + unit.float() * steps
    need = ((high - minimum) / levels).clamp(min=0)
    scale_unit = half_toward(need.amax(-1, keepdim=True) / _UNIT_LEVELS, up=True)
    codes = (need * inverse_or_zero(scale_unit.float())).ceil().clamp(0, _UNIT_LEVELS)
    base = torch.cat((scale_unit, least, unit), -1)
    stored = {"base": base, "scale": codes.to(torch.uint8), "min": steps.to(torch.uint8)}
    return Params(stored, scale_unit.float() * codes, minimum)


def read_params(stored: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scale and minimum `[..., entries]` of what `make_params` stored."""
    scale, minimum = stored["scale"].float(), stored["min"].float()
    if "base" not in stored:
        return scale, minimum
    scale_unit, least, unit = stored["base"].float().split(1, -1)
    return scale_unit * scale, least + unit * minimum


def step_bound(low: torch.Tensor, high: torch.Tensor, levels: int, scale_bits: int) -> torch.Tensor:
    """The greatest step that `make_params` may store for groups of that range (float32 `[..., entries]`).

    fp16: (range + fp16 spacing of the minimum) / levels, 2^-10 more for the scale's own rounding. u8: the minimum may
    lie one unit lower (the spread of the head's minima / 255), and the scale one unit higher (the head's greatest /
    255).
    """
    rounding, tiny = 1 + 2**-10, 2**-24
    slack = low.abs() * 2**-10 + tiny
    if scale_bits == 16:
        return ((high - low + slack) / levels) * rounding + tiny
    top = low.abs().amax(-1, keepdim=True) * 2**-10 + tiny  # of the least minimum, which all others start from
    unit = (low.amax(-1, keepdim=True) - low.amin(-1, keepdim=True) + top) / _UNIT_LEVELS * rounding + tiny
    need = (high - low + unit + top) / levels
    return need + need.amax(-1, keepdim=True) / _UNIT_LEVELS * rounding + tiny
