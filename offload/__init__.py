"""Where pages live: open slots, the hot pool on the device, host memory, disk. Imports numpy and torch, never vLLM."""

from .capacity import GIB, Machine, Verdict, check_capacity
from .disk import DiskTier
from .errors import (
    CapacityError,
    PageCorrupt,
    PageFault,
    PageIOError,
    PageMissing,
    PageTimeout,
    PoolFull,
    TierFault,
)
from .eviction import POLICIES
from .hot_pool import MIN_SLOTS, WHOLE, HotPool
from .open_pages import OpenPages, PageLost, StepPlan
from .prefetch import LayerPipeline
from .store import TieredStore
from .tiers import REST, SCORING, HostTier, PageSpec, Tier
from .trace import Trace
from .transfers import PoolStats

__all__ = [
    "GIB",
    "MIN_SLOTS",
    "POLICIES",
    "REST",
    "SCORING",
    "WHOLE",
    "CapacityError",
    "DiskTier",
    "HostTier",
    "HotPool",
    "LayerPipeline",
    "Machine",
    "OpenPages",
    "PageCorrupt",
    "PageFault",
    "PageIOError",
    "PageLost",
    "PageMissing",
    "PageSpec",
    "PageTimeout",
    "PoolFull",
    "PoolStats",
    "StepPlan",
    "Tier",
    "TierFault",
    "TieredStore",
    "Trace",
    "Verdict",
    "check_capacity",
]
