"""What the tests of tiers share: page specs, stores of every kind, and bytes that tell which page they belong to."""

from pathlib import Path

import numpy as np

from vllm_ktx.offload import DiskTier, HostTier, PageSpec, Tier, TieredStore
from vllm_ktx.offload.io import make_engine

SPLIT = PageSpec(num_blocks=40, num_layers=3, page_bytes=9000, scoring_bytes=2500)
WHOLE_PAGES = PageSpec(num_blocks=40, num_layers=3, page_bytes=5000)


def content(spec: PageSpec, pages: np.ndarray, version: int = 0) -> np.ndarray:
    """uint8 `[n, page_bytes]`, another for every page and version."""
    first = (np.asarray(pages, np.uint64) + np.uint64(version << 20)) * np.uint64(0x9E3779B97F4A7C15)
    words = np.arange(-(-spec.page_bytes // 8), dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    return (first[:, None] ^ words[None]).view(np.uint8)[:, : spec.page_bytes].copy()


def make_store(kind: str, spec: PageSpec, folder: Path) -> Tier:
    """`host`, `disk`, `disk-threads`, `buffered`, or a TieredStore: `homes` (half the blocks), `cache` (17 frames)."""
    half = PageSpec(spec.num_blocks // 2, spec.num_layers, spec.page_bytes, spec.scoring_bytes)
    if kind == "host":
        return HostTier(spec)
    if kind == "disk":
        return DiskTier(spec, folder)
    if kind == "disk-threads":
        return DiskTier(spec, folder, make_engine("threads"))
    if kind == "buffered":
        return DiskTier(spec, folder, direct=False)
    if kind == "homes":
        return TieredStore(spec, half.total_bytes, DiskTier(half, folder))
    if kind == "cache":
        return TieredStore(spec, 17 * spec.page_bytes, DiskTier(spec, folder))
    raise ValueError(kind)


KINDS = ("host", "disk", "disk-threads", "buffered", "homes", "cache")
