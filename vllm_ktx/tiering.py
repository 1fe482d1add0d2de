"""Where an engine's pages may live beside the device, decided before vLLM lays its cache out.

vLLM divides the device's memory by the bytes of a page that `customize_spec` names, `header + payload / overcommit`, and
so decides the number of blocks; every block has a place in host memory or on disk. `auto` turns that round: as many
blocks as those two hold.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .attention_backends.kernels import MIN_WAVE as MIN_SLOTS
from .config import KtxConfig
from .kv_quant import PageLayout
from .offload import GIB, DiskTier, PageSpec

logger = logging.getLogger("vllm.ktx")

HEADER_SHARE = 0.5  # most of the device's memory that `auto` gives to headers


@dataclass(frozen=True)
class TierPlan:
    """What one rank of an engine has below the device. Bytes; `overcommit` is above 1."""

    overcommit: float
    host_bytes: int
    disk_bytes: int
    disk_dir: Path | None
    eviction: str
    prefetch_layers: int

    def blocks_held(self, layout: PageLayout, num_layers: int) -> int:
        """Blocks that host memory and disk hold together."""
        one = page_spec(layout, num_layers, 1)
        return self.host_bytes // one.total_bytes + self.disk_bytes // DiskTier.file_bytes(one)


def page_spec(layout: PageLayout, num_layers: int, num_blocks: int) -> PageSpec:
    """The pages of a store below the device: payloads, whose keys can be scored without the rest of the page."""
    scoring = layout.scoring_bytes if layout.fmt.quantized else 0
    return PageSpec(num_blocks, num_layers, layout.payload_bytes, scoring)


def plan_tiers(config: KtxConfig, layout: PageLayout, num_layers: int, ranks: int, device_bytes: int | None) -> TierPlan:
    """`device_bytes`: memory of a rank's cache, all layers; None: not known yet. `overcommit` 1: the device holds all.

    Raises ValueError, naming setting, value and fix, for what can't work.
    """
    host, disk = (int(gib * GIB / ranks) for gib in (config.host_gib, config.disk_gib))
    folder = Path(config.disk_dir) if config.disk_dir else None
    plan = TierPlan(1.0, host, disk, folder, config.eviction, config.prefetch_layers)
    if not host + disk or config.overcommit == 1:
        return plan
    overcommit = config.overcommit
    if not isinstance(overcommit, (int, float)):
        overcommit = _auto(plan, layout, num_layers, device_bytes)
    if device_bytes is not None and overcommit > 1:
        _check_slots(overcommit, layout, num_layers, device_bytes)
    return TierPlan(float(overcommit), host, disk, folder, config.eviction, config.prefetch_layers)


def _auto(plan: TierPlan, layout: PageLayout, num_layers: int, device_bytes: int | None) -> float:
    if device_bytes is None:
        raise ValueError(
            "ktx.overcommit='auto' needs the device's share to be known: set --kv-cache-memory-bytes, or give "
            "ktx.overcommit a number (pages for each one that the device holds)"
        )
    layer_bytes, blocks = device_bytes / num_layers, plan.blocks_held(layout, num_layers)
    if blocks == 0:
        raise ValueError(
            f"ktx.host_gib and ktx.disk_gib hold not one block ({page_spec(layout, num_layers, 1).total_bytes} bytes): "
            "raise them"
        )
    if layout.header_bytes:
        most = int(HEADER_SHARE * layer_bytes / layout.header_bytes)
        if blocks > most:
            logger.warning(
                "KTX: host memory and disk hold %d blocks, but their headers would take more than half of the device's "
                "%.2f GiB: using %d blocks. Raise --kv-cache-memory-bytes to use all.",
                blocks, device_bytes / GIB, most,
            )  # fmt: skip
            blocks = most
    return max(1.0, layout.payload_bytes / (layer_bytes / blocks - layout.header_bytes))


def _check_slots(overcommit: float, layout: PageLayout, num_layers: int, device_bytes: int) -> None:
    layer_bytes = device_bytes // num_layers
    blocks = layer_bytes // layout.tiered_page_bytes(overcommit)
    slots = layout.num_slots(blocks, layer_bytes)
    if slots < MIN_SLOTS:
        need = num_layers * (MIN_SLOTS * layout.payload_bytes + blocks * layout.header_bytes)
        raise ValueError(
            f"ktx.overcommit={overcommit:.4g} leaves {max(slots, 0)} slots a layer on the device, at least {MIN_SLOTS} are "
            f"needed: lower ktx.overcommit, or raise --kv-cache-memory-bytes to {need} or more"
        )


def engine_plan(vllm_config: Any, config: KtxConfig, layout: PageLayout) -> TierPlan:
    """The plan of one rank of `vllm_config`'s engine."""
    parallel = vllm_config.parallel_config
    layers = vllm_config.model_config.get_num_layers(parallel)
    return plan_tiers(config, layout, layers, parallel.world_size, vllm_config.cache_config.kv_cache_memory_bytes)
