"""The settings of KTX: one validated dataclass, filled from `--additional-config '{"ktx": {...}}'`.

Everything has a default. An unknown key or an impossible value raises ValueError before the model loads, naming the
setting, the value found and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .attention_backends.selection import SparseSettings
from .kv_quant import PRESETS, SCALE_METHODS, KVFormat, parse_format
from .kv_quant.scale_methods import SCALE_BITS
from .offload import POLICIES

logger = logging.getLogger("vllm.ktx")

# What vLLM's own names of a per-token quantized cache stand for when KTX serves them.
FORMAT_OF_CACHE_DTYPE = {"int8_per_token_head": "k8v8", "int4_per_token_head": "k4v4"}
SAFE_FORMAT = "k8v4"  # what `auto` means for a model that was not probed
DEFAULT_PAGE_SIZE = 64
MAX_PAGE_SIZE = 256  # what the kernels' buffers hold
# Settings that change a format beyond its name.
OF_FORMAT = ("key_scale", "value_scale", "rotate_keys", "rotate_values", "scale_bits")


@dataclass(frozen=True)
class LayerFormats:
    """Format names by layer: `ranges` of (first, last) layers, both included, and the `default` of all others."""

    default: str
    ranges: tuple[tuple[int, int, str], ...] = ()

    def of(self, layer: int | None) -> str | None:
        """The name that a layer has of its own."""
        return next((name for first, last, name in self.ranges if layer is not None and first <= layer <= last), None)

    @property
    def last(self) -> int:
        """The highest layer named; -1: none."""
        return max((last for _, last, _ in self.ranges), default=-1)


def _layers_of(value: Any) -> LayerFormats:
    """From a format's name or the mapping by layer. Raises ValueError, naming the entry and what to write."""
    names = (*PRESETS, "auto")
    if not isinstance(value, Mapping):
        _choice("format", value, names)
        return LayerFormats(value)
    example = '{"default": "k4v4", "layers": {"0-1": "k8v4"}}'
    if set(value) != {"default", "layers"} or not isinstance(value["layers"], Mapping):
        raise ValueError(f"ktx.format={dict(value)!r}: use a name, or by layer {example}")
    _choice("format.default", value["default"], names)
    ranges: list[tuple[int, int, str]] = []
    for key, name in value["layers"].items():
        first, _, last = str(key).partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first)):
            raise ValueError(f"ktx.format.layers has the key {key!r}: use a layer or a range of them, as in {example}")
        _choice(f"format.layers[{key!r}]", name, tuple(PRESETS))
        for other in ranges:
            if int(first) <= other[1] and other[0] <= int(last or first):
                raise ValueError(
                    f"ktx.format.layers names layer {max(int(first), other[0])} twice: use one range for it"
                )
        ranges.append((int(first), int(last or first), name))
    return LayerFormats(value["default"], tuple(ranges))


@dataclass(frozen=True)
class KtxConfig:
    """Settings under `additional_config["ktx"]`.

    format: page format, one of `none`, `k8v8`, `k8v4`, `k4v4`, or `auto`: what `--kv-cache-dtype` asks for, else what
        `vllm-ktx probe` chose for this model, else `k8v4`. By layer: `{"default": "k4v4", "layers": {"0-1": "k8v4"}}`.
    key_scale, value_scale: a scale method, see `kv_quant.SCALE_METHODS`; unset: the format's own.
    rotate_keys, rotate_values: Hadamard rotation before quantization; unset: the format's own.
    scale_bits: 16, or 8 to store scales and minima in a byte each; unset: 16.
    residual_pages: newest sealed pages of a running sequence also kept in the model's dtype; unset: the format's own.
    kernels: `auto` (on CUDA `triton`, else native where it was built), `native` (or fail), `torch` (slow; for
        comparison), `triton` (CUDA, or Triton's interpreter).
    prefill_kernel: what attends a chunk's blocks of 64 queries on CUDA: `triton`, `xformers` (or fail), or `auto`.
    cudagraph: what CUDA graphs of decode steps hold: `piecewise`, all but attention, or `full`, attention too (CUDA).
    attention: `sparse` or `dense`; unset: sparse, except for format `none`, whose pages have no headers to rank.
    window, sinks, scoring, select, coverage, top_k, global_ratio, min_pages, max_pages, share: which pages a query
        reads, see `SparseSettings`; unset: its defaults, scoring by headers where keys have no scales per channel.
    dense_layers: the first layers that read all pages whatever the context.
    audit_rate: share of steps that recompute every fourth layer densely, to measure what sparsity dropped; 0: none.
    overcommit: pages for each one that the device's memory holds, at least 1; `auto`: as many as host memory and disk
    hold.
    host_gib, disk_gib: memory and disk space for pages that the device doesn't hold, in GiB, of all ranks together.
    disk_dir: folder of the disk's file, on a local disk.
    eviction: which pages leave the device first: `lru`, `clock` or `attention`.
    prefetch_layers: how many layers ahead pages are fetched.
    self_check: whether a small step is compared with the reference at start-up, with these settings, and ends it if the
        kernels are wrong on this machine; unset: on CUDA.
    trace: record what computes, fetches and writes when (`vllm_ktx.metrics.chrome_trace`).
    scheduler: `length_grouped` (see `vllm_ktx.scheduler`) or `stock`; has no say where `--scheduler-cls` is given.
    prefill_share: part of a step's tokens that a long prefill gets while other requests want to run, above 0, to 1.
    weights: `resident`, or `prefetch`: layers' weights stay in host memory and are copied ahead of use (CUDA).
    """

    format: str | Mapping[str, Any] = "auto"
    key_scale: str | None = None
    value_scale: str | None = None
    rotate_keys: bool | None = None
    rotate_values: bool | None = None
    scale_bits: int | None = None
    residual_pages: int | None = None
    kernels: str = "auto"
    prefill_kernel: str = "auto"
    cudagraph: str = "piecewise"
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
    overcommit: float | str = "auto"
    host_gib: float = 0.0
    disk_gib: float = 0.0
    disk_dir: str | None = None
    eviction: str = "lru"
    prefetch_layers: int = 2
    trace: bool = False
    self_check: bool | None = None
    scheduler: str = "length_grouped"
    prefill_share: float = 0.25
    weights: str = "resident"

    def __post_init__(self) -> None:
        _layers_of(self.format)
        _choice("key_scale", self.key_scale, (*SCALE_METHODS, None))
        _choice("value_scale", self.value_scale, (*SCALE_METHODS, None))
        _choice("kernels", self.kernels, ("auto", "native", "torch", "triton"))
        _choice("prefill_kernel", self.prefill_kernel, ("auto", "triton", "xformers"))
        _choice("cudagraph", self.cudagraph, ("piecewise", "full"))
        for name in ("rotate_keys", "rotate_values", "self_check"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"ktx.{name}={getattr(self, name)!r}: use true or false")
        _choice("scale_bits", self.scale_bits, (*SCALE_BITS, None))
        pages = self.residual_pages
        if pages is not None and (isinstance(pages, bool) or not isinstance(pages, int) or not 0 <= pages <= 16):
            raise ValueError(f"ktx.residual_pages={pages!r}: use a whole number from 0 to 16")
        _choice("attention", self.attention, ("sparse", "dense", None))
        if isinstance(self.dense_layers, bool) or not isinstance(self.dense_layers, int) or self.dense_layers < 0:
            raise ValueError(f"ktx.dense_layers={self.dense_layers!r}: use a whole number, 0 or more")
        rate = self.audit_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
            raise ValueError(f"ktx.audit_rate={rate!r}: use a number from 0 to 1")
        if rate and self.cudagraph == "full":
            raise ValueError(
                f"ktx.audit_rate={rate!r}: a step in a CUDA graph can't be computed densely as well: set it to 0, or "
                "ktx.cudagraph to 'piecewise'"
            )
        self._check_tiers()

    def _check_tiers(self) -> None:
        if self.overcommit != "auto" and not (_is_number(self.overcommit) and 1 <= self.overcommit < math.inf):  # type: ignore[operator]
            raise ValueError(f"ktx.overcommit={self.overcommit!r}: use 'auto' or a number from 1 up")
        for name in ("host_gib", "disk_gib"):
            size = getattr(self, name)
            if not _is_number(size) or not 0 <= size < 2**20:
                raise ValueError(f"ktx.{name}={size!r}: use a number of GiB, 0 or more")
        if self.disk_gib and not (isinstance(self.disk_dir, str) and self.disk_dir):
            raise ValueError(f"ktx.disk_gib={self.disk_gib:g} needs ktx.disk_dir: name a folder on a local disk")
        if self.disk_dir is not None and not self.disk_gib:
            raise ValueError(f"ktx.disk_dir={self.disk_dir!r} needs ktx.disk_gib: say how much may be used there")
        if self.overcommit not in ("auto", 1) and not self.host_gib + self.disk_gib:
            raise ValueError(
                f"ktx.overcommit={self.overcommit:g} keeps pages off the device: set ktx.host_gib, or ktx.disk_gib and "
                "ktx.disk_dir, for where they go"
            )
        _choice("eviction", self.eviction, tuple(POLICIES))
        ahead = self.prefetch_layers
        if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= 16:
            raise ValueError(f"ktx.prefetch_layers={ahead!r}: use a whole number from 0 to 16")
        if not isinstance(self.trace, bool):
            raise ValueError(f"ktx.trace={self.trace!r}: use true or false")
        _choice("scheduler", self.scheduler, ("length_grouped", "stock"))
        _choice("weights", self.weights, ("resident", "prefetch"))
        part = self.prefill_share
        if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
            raise ValueError(f"ktx.prefill_share={part!r}: use a number above 0 and up to 1")

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

    def kv_format(self, cache_dtype: str = "auto", layer: int | None = None) -> KVFormat:
        """The page format of a layer (None: the default one), `cache_dtype` being vLLM's `kv_cache_dtype`.

        Raises ValueError if the two contradict.
        """
        names = _layers_of(self.format)
        asked, default = FORMAT_OF_CACHE_DTYPE.get(cache_dtype), names.default
        if asked and default not in ("auto", asked):
            raise ValueError(
                f"ktx.format={default!r} contradicts --kv-cache-dtype {cache_dtype} (which is {asked}): set only one"
            )
        if default == "auto":
            default = asked or SAFE_FORMAT
        if default == "none":
            for name in (*OF_FORMAT, "residual_pages"):
                if getattr(self, name) is not None:
                    raise ValueError(f"ktx.{name} has no meaning for ktx.format='none': leave it out")
        return parse_format(
            names.of(layer) or default,
            k_method=self.key_scale,
            v_method=self.value_scale,
            k_rotate=self.rotate_keys,
            v_rotate=self.rotate_values,
            scale_bits=self.scale_bits,
            residual_pages=self.residual_pages,
        )

    def is_auto(self, cache_dtype: str = "auto") -> bool:
        """Whether the format is still to be chosen."""
        return _layers_of(self.format).default == "auto" and cache_dtype not in FORMAT_OF_CACHE_DTYPE

    def with_default_format(self, name: str) -> KtxConfig:
        """These settings with `name` for every layer that has no format of its own."""
        named = isinstance(self.format, str)
        return dataclasses.replace(self, format=name if named else {**self.format, "default": name})

    def layer_formats(self) -> LayerFormats:
        return _layers_of(self.format)

    def sparse_settings(self, fmt: KVFormat, page_size: int, layer: int | None = None) -> SparseSettings | None:
        """Which pages a query reads; None: all. Raises ValueError, naming the fix, for what can't go together.

        layer: a layer that stores format `none` by the mapping of `format` is dense beside sparse ones.
        """
        if not fmt.quantized and layer is not None and self.layer_formats().of(layer):
            return None
        given = {name: getattr(self, name) for name in _SPARSE_FIELDS if getattr(self, name) is not None}
        if self.attention == "dense" or (self.attention is None and not fmt.quantized):
            self._check_needs(None)
            return None
        if not fmt.quantized:
            raise ValueError("ktx.attention='sparse' needs page headers: choose a quantized ktx.format, not 'none'")
        if not fmt.keys_by_channel:
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
        self._check_needs(settings)
        return settings

    def _check_needs(self, sparse: SparseSettings | None) -> None:
        """Refuses settings, other than their defaults, that would be ignored beside the others; or warns once, where
        scripts switch the other."""
        for names, need, met, refused in _NEEDS:
            for name in (n for n in names if getattr(self, n) != _DEFAULTS[n]):
                if not met(self, sparse):
                    text = f"ktx.{name}={getattr(self, name)!r} does nothing without {need}"
                    if refused:
                        raise ValueError(f"{text}: add that, or leave ktx.{name} out")
                    _warn(text)


_SPARSE_FIELDS = tuple(f.name for f in dataclasses.fields(SparseSettings))
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(KtxConfig)}
# Settings, what they need to have an effect, whether it is there, and whether its lack is refused.
_NEEDS: tuple[tuple[tuple[str, ...], str, Callable[[KtxConfig, Any], bool], bool], ...] = (
    (
        (*_SPARSE_FIELDS, "dense_layers", "audit_rate"),
        "sparse attention (a quantized ktx.format, and ktx.attention not 'dense')",
        lambda ktx, sparse: sparse is not None,
        True,
    ),
    (("coverage", "max_pages"), "ktx.select='coverage'", lambda ktx, sparse: sparse.select == "coverage", True),
    (("max_pages",), "ktx.coverage below 1", lambda ktx, sparse: sparse.coverage < 1, True),
    (("share",), "ktx.scoring='cascade'", lambda ktx, sparse: sparse.scoring == "cascade", True),
    (
        ("eviction", "prefetch_layers", "trace"),
        "pages off the device (ktx.host_gib or ktx.disk_gib)",
        lambda ktx, sparse: ktx.host_gib + ktx.disk_gib > 0,
        True,
    ),
    (("host_gib", "disk_gib"), "ktx.overcommit above 1 or 'auto'", lambda ktx, sparse: ktx.overcommit != 1, False),
    (("prefill_share",), "ktx.scheduler='length_grouped'", lambda ktx, sparse: ktx.scheduler != "stock", False),
)


@functools.cache
def _warn(line: str) -> None:
    """Once: every layer reads its settings."""
    logger.warning("KTX: %s", line)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _choice(name: str, value: Any, choices: tuple) -> None:
    if value not in choices or isinstance(value, bool):
        names = [str(c) for c in choices if c is not None]
        raise ValueError(f"ktx.{name}={value!r}: use one of {', '.join(names)}{_did_you_mean(str(value), names)}")


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
