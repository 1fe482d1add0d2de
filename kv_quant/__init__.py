"""Page formats of the KV cache: INT8 / INT4 codecs, scale methods, rotation. Imports torch only, never vLLM."""

from .cache import QuantizedKVCache
from .codec import KVCacheQuantizer
from .formats import PRESETS, KVFormat, parse_format
from .layout import PageLayout
from .scale_methods import SCALE_METHODS, ScaleMethod

__all__ = [
    "PRESETS",
    "SCALE_METHODS",
    "KVCacheQuantizer",
    "KVFormat",
    "PageLayout",
    "QuantizedKVCache",
    "ScaleMethod",
    "parse_format",
]
