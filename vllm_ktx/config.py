"""The settings of KTX: one validated dataclass, filled from `--additional-config '{"ktx": {...}}'`.

Everything has a default. An unknown key or an impossible value raises ValueError before the model loads, naming the
setting, the value found and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .attention_backends.selection import SparseSettings
from .kv_quant import PRESETS, SCALE_METHODS, KVFormat, parse_format

# What vLLM's own names of a per-token quantized cache stand for when KTX serves them.
FORMAT_OF_CACHE_DTYPE = {"int8_per_token_head": "k8v8", "int4_per_token_head": "k4v4"}
DEFAULT_FORMAT = "k8v4"
DEFAULT_PAGE_SIZE = 64
MAX_PAGE_SIZE = 256  # what the kernels' buffers hold


@dataclass(frozen=True)
class KtxConfig:
    """Settings under `additional_config["ktx"]`.

    format: page format, one of `none`, `k8v8`, `k8v4`, `k4v4`; unset: `k8v4`, or what `--kv-cache-dtype` asks for.
    key_scale, value_scale: `per_channel`, `per_token` or `per_head`; unset: the format's own.
    rotate_values: Hadamard rotation of values before quantization; unset: the format's own.
    residual_pages: newest sealed pages of a running sequence also kept in the model's dtype; unset: the format's own.
    kernels: `auto` (on CUDA `triton`, else native where it was built), `native` (or fail), `torch` (slow; for
        comparison), `triton` (CUDA, or Triton's interpreter).
    attention: `sparse` or `dense`; unset: sparse, except for format `none`, whose pages have no headers to rank.
    window, sinks, scoring, select, coverage, top_k, global_ratio, min_pages, max_pages, share: which pages a query
        reads, see `SparseSettings`; unset: its defaults, scoring by headers where keys have no scales per channel.
    dense_layers: the first layers that read all pages whatever the context.
    audit_rate: share of steps that one layer recomputes densely, to measure what sparsity dropped; 0: none.
    """

    format: str | None = None
    key_scale: str | None = None
    value_scale: str | None = None
    rotate_values: bool | None = None
    residual_pages: int | None = None
    kernels: str = "auto"
    attention: str | None = None
    window: int | None = None
    sinks: int | None = None
    scoring: str | None = None
    select: str | None = None
    coverage: float | None = None
    top_k: int | None = None
    global_ratio: float | None = None
    min_pages: int | None = None
    max_pages: int | None = None
    share: float | None = None
    dense_layers: int = 0
    audit_rate: float = 0.0

    def __post_init__(self) -> None:
        _choice("format", self.format, (*PRESETS, None))
        _choice("key_scale", self.key_scale, (*SCALE_METHODS, None))
        _choice("value_scale", self.value_scale, (*SCALE_METHODS, None))
        _choice("kernels", self.kernels, ("auto", "native", "torch", "triton"))
        if self.rotate_values not in (None, True, False):
            raise ValueError(f"ktx.rotate_values={self.rotate_values!r}: use true or false")
        pages = self.residual_pages
        if pages is not None and (isinstance(pages, bool) or not isinstance(pages, int) or not 0 <= pages <= 16):
            raise ValueError(f"ktx.residual_pages={pages!r}: use a whole number from 0 to 16")
        _choice("attention", self.attention, ("sparse", "dense", None))
        if isinstance(self.dense_layers, bool) or not isinstance(self.dense_layers, int) or self.dense_layers < 0:
            raise ValueError(f"ktx.dense_layers={self.dense_layers!r}: use a whole number, 0 or more")
        rate = self.audit_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
            raise ValueError(f"ktx.audit_rate={rate!r}: use a number from 0 to 1")

    @classmethod
    def parse(cls, settings: Mapping[str, Any] | None) -> KtxConfig:
        """From the mapping under `ktx`; raises ValueError on anything it doesn't know."""
        if settings is None:
            return cls()
        if not isinstance(settings, Mapping):
            raise ValueError(f'ktx={settings!r}: must be a mapping of settings, e.g. {{"ktx": {{"format": "k4v4"}}}}')
        known = [f.name for f in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise ValueError(
                    f"ktx.{key} is not a setting of KTX{_did_you_mean(key, known)} (known: {', '.join(known)})"
                )
        return cls(**settings)

    def kv_format(self, cache_dtype: str = "auto") -> KVFormat:
        """The page format, `cache_dtype` being vLLM's `kv_cache_dtype`. Raises ValueError if the two contradict."""
        asked = FORMAT_OF_CACHE_DTYPE.get(cache_dtype)
        if asked and self.format and self.format != asked:
            raise ValueError(
                f"ktx.format={self.format!r} contradicts --kv-cache-dtype {cache_dtype} (which is {asked}): "
                "set only one"
            )
        if (self.format or asked) == "none":
            for name in ("key_scale", "value_scale", "rotate_values", "residual_pages"):
                if getattr(self, name) is not None:
                    raise ValueError(f"ktx.{name} has no meaning for ktx.format='none': leave it out")
        return parse_format(
            self.format or asked or DEFAULT_FORMAT,
            k_method=self.key_scale,  # type: ignore[arg-type]
            v_method=self.value_scale,  # type: ignore[arg-type]
            v_rotate=self.rotate_values,
            residual_pages=self.residual_pages,
        )

    def sparse_settings(self, fmt: KVFormat, page_size: int) -> SparseSettings | None:
        """Which pages a query reads; None: all. Raises ValueError, naming the fix, for what can't go together."""
        given = {name: getattr(self, name) for name in _SPARSE_FIELDS if getattr(self, name) is not None}
        if self.attention == "dense" or (self.attention is None and not fmt.quantized):
            if given:
                raise ValueError(
                    f"ktx.{next(iter(given))} is a setting of sparse attention, and attention is dense here "
                    f"(ktx.attention={self.attention!r}, ktx.format={fmt.name!r}): leave it out, or choose a quantized "
                    "format and ktx.attention='sparse'"
                )
            return None
        if not fmt.quantized:
            raise ValueError("ktx.attention='sparse' needs page headers: choose a quantized ktx.format, not 'none'")
        if fmt.k_method != "per_channel":
            if given.setdefault("scoring", "header") != "header":
                raise ValueError(
                    f"ktx.scoring={self.scoring!r} reads key codes by channel, and ktx.key_scale is {fmt.k_method!r}: "
                    "use ktx.scoring='header' or ktx.key_scale='per_channel'"
                )
        for name in ("top_k", "global_ratio"):
            if name in given:
                given.setdefault("select", name)
        settings = SparseSettings(**given)
        settings.check_page_size(page_size)
        return settings


_SPARSE_FIELDS = tuple(f.name for f in dataclasses.fields(SparseSettings))


def _choice(name: str, value: Any, choices: tuple) -> None:
    if value not in choices or isinstance(value, bool):
        names = [c for c in choices if c is not None]
        raise ValueError(f"ktx.{name}={value!r}: use one of {', '.join(names)}{_did_you_mean(str(value), names)}")


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
