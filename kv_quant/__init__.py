"""Page formats of the KV cache: INT8 / INT4 codecs, scale methods, rotation. Imports torch only, never vLLM."""

from .codec import KVCacheQuantizer
from .formats import PRESETS, SCALE_METHODS, KVFormat, parse_format
from .layout import PageLayout

__all__ = ["PRESETS", "SCALE_METHODS", "KVCacheQuantizer", "KVFormat", "PageLayout", "parse_format"]
