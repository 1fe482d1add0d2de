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

from .kv_quant import PRESETS, SCALE_METHODS, KVFormat, parse_format

# What vLLM's own names of a per-token quantized cache stand for when KTX serves them.
FORMAT_OF_CACHE_DTYPE = {"int8_per_token_head": "k8v8", "int4_per_token_head": "k4v4"}
DEFAULT_FORMAT = "k8v4"
DEFAULT_PAGE_SIZE = 64


@dataclass(frozen=True)
class KtxConfig:
    """Settings under `additional_config["ktx"]`.

    format: page format, one of `none`, `k8v8`, `k8v4`, `k4v4`; unset: `k8v4`, or what `--kv-cache-dtype` asks for.
    key_scale, value_scale: `per_channel`, `per_token` or `per_head`; unset: the format's own.
    rotate_values: Hadamard rotation of values before quantization; unset: the format's own.
    residual_pages: newest sealed pages of a running sequence also kept in the model's dtype; unset: the format's own.
    kernels: `auto` (native where it was built), `native` (or fail), `torch` (slow; for comparison).
    """

    format: str | None = None
    key_scale: str | None = None
    value_scale: str | None = None
    rotate_values: bool | None = None
    residual_pages: int | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        _choice("format", self.format, (*PRESETS, None))
        _choice("key_scale", self.key_scale, (*SCALE_METHODS, None))
        _choice("value_scale", self.value_scale, (*SCALE_METHODS, None))
        _choice("kernels", self.kernels, ("auto", "native", "torch"))
        if self.rotate_values not in (None, True, False):
            raise ValueError(f"ktx.rotate_values={self.rotate_values!r}: use true or false")
        pages = self.residual_pages
        if pages is not None and (isinstance(pages, bool) or not isinstance(pages, int) or not 0 <= pages <= 16):
            raise ValueError(f"ktx.residual_pages={pages!r}: use a whole number from 0 to 16")

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
                raise ValueError(f"ktx.{key} is not a setting of KTX{_did_you_mean(key, known)} (known: {', '.join(known)})")
        return cls(**settings)

    def kv_format(self, cache_dtype: str = "auto") -> KVFormat:
        """The page format, `cache_dtype` being vLLM's `kv_cache_dtype`. Raises ValueError if the two contradict."""
        asked = FORMAT_OF_CACHE_DTYPE.get(cache_dtype)
        if asked and self.format and self.format != asked:
            raise ValueError(
                f"ktx.format={self.format!r} contradicts --kv-cache-dtype {cache_dtype} (which is {asked}): set only one"
            )
        return parse_format(
            self.format or asked or DEFAULT_FORMAT,
            k_method=self.key_scale,  # type: ignore[arg-type]
            v_method=self.value_scale,  # type: ignore[arg-type]
            v_rotate=self.rotate_values,
            residual_pages=self.residual_pages,
        )


def _choice(name: str, value: Any, choices: tuple) -> None:
    if value not in choices or isinstance(value, bool):
        names = [c for c in choices if c is not None]
        raise ValueError(f"ktx.{name}={value!r}: use one of {', '.join(names)}{_did_you_mean(str(value), names)}")


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
