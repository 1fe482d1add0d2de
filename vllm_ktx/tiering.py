"""Where an engine's pages may live beside the device, decided before vLLM lays its cache out.

vLLM divides the device's memory by the bytes of a page that `customize_spec` names, `header + payload / overcommit`,
and so decides the number of blocks; every block has a place in host memory or on disk. `auto` turns that round: as many
blocks as those two hold.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
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
    scores_codes: bool  # pages are scored by their codes, whose first plane is worth keeping in host memory

    def blocks_held(self, layout: PageLayout, num_layers: int) -> int:
        """Blocks that host memory and disk hold together, their scoring planes in host memory: if it holds those of
        most blocks on disk, as many as it does, if of fewer, none."""
        one = page_spec(layout, num_layers, 1)
        on_disk = self.disk_bytes // DiskTier.file_bytes(one)
        plane = num_layers * one.scoring_bytes
        left = self.host_bytes - on_disk * plane
        if self.scores_codes and left >= 0:
            return on_disk + left // (one.total_bytes + plane)
        if self.scores_codes and 2 * self.host_bytes >= on_disk * plane:
            return self.host_bytes // plane
        return on_disk + self.host_bytes // one.total_bytes

    def plane_bytes(self, spec: PageSpec) -> int:
        """Host memory that the scoring planes of `spec`'s pages take; 0 if they don't fit beside what must be there."""
        block = replace(spec, num_blocks=1)
        at_home = max(0, spec.num_blocks - self.disk_bytes // DiskTier.file_bytes(block))
        planes = spec.num_pages * spec.scoring_bytes
        return planes if self.scores_codes and planes + at_home * block.total_bytes <= self.host_bytes else 0


def page_spec(layout: PageLayout, num_layers: int, num_blocks: int) -> PageSpec:
    """The pages of a store below the device: payloads, whose keys can be scored without the rest of the page."""
    scoring = layout.scoring_bytes if layout.fmt.quantized else 0
    return PageSpec(num_blocks, num_layers, layout.payload_bytes, scoring)


def plan_tiers(
    config: KtxConfig,
    layout: PageLayout,
    num_layers: int,
    ranks: int,
    device_bytes: int | None,
    blocks: int | None = None,
    on_gpu: bool = False,
) -> TierPlan:
    """`ranks` share what `config` gives. `device_bytes`: memory of a rank's cache, all layers; None: not known yet.
    `blocks`: how many there will be (`--num-gpu-blocks-override`). `on_gpu`: codes are scored in the pages themselves,
    with no planes beside them. `overcommit` 1: the device holds all.

    Raises ValueError, naming setting, value and fix, for what can't work.
    """
    host, disk = (int(gib * GIB / ranks) for gib in (config.host_gib, config.disk_gib))
    folder = Path(config.disk_dir) if config.disk_dir else None
    sparse = config.sparse_settings(layout.fmt, layout.page_size)
    scores_codes = sparse is not None and sparse.scoring != "header"
    plan = TierPlan(1.0, host, disk, folder, config.eviction, config.prefetch_layers, scores_codes)
    if not host + disk or config.overcommit == 1:
        return plan
    if config.layer_formats().ranges:
        raise ValueError(
            "ktx.format by layer and pages off the device (ktx.host_gib, ktx.disk_gib) don't go together yet: use one "
            "format for all layers, or leave the others out"
        )
    overcommit = config.overcommit
    if not isinstance(overcommit, (int, float)):
        overcommit = _auto(
            replace(plan, scores_codes=scores_codes and not on_gpu), layout, num_layers, device_bytes, blocks
        )
    page = layout.tiered_page_bytes(overcommit)
    if overcommit > 1 and blocks is not None:
        enough = f"{int(MIN_SLOTS * overcommit) + 1} blocks or more"
        check_slots(layout.num_slots(blocks, blocks * page), overcommit, enough)
    elif overcommit > 1 and device_bytes is not None:
        layer_bytes = device_bytes // num_layers
        check_slots(
            layout.num_slots(layer_bytes // page, layer_bytes), overcommit, device_fix(overcommit, layout, num_layers)
        )
    return replace(plan, overcommit=float(overcommit))


def _auto(
    plan: TierPlan, layout: PageLayout, num_layers: int, device_bytes: int | None, blocks: int | None = None
) -> float:
    if device_bytes is None:
        raise ValueError(
            "ktx.overcommit='auto' needs the device's share to be known: set --kv-cache-memory-bytes, or give "
            "ktx.overcommit a number (pages for each one that the device holds)"
        )
    layer_bytes = device_bytes / num_layers
    if blocks is not None:
        return max(1.0, layout.payload_bytes / max(layer_bytes / blocks - layout.header_bytes, 1.0))
    blocks = plan.blocks_held(layout, num_layers)
    if blocks == 0:
        raise ValueError(
            f"ktx.host_gib and ktx.disk_gib hold not one block ({page_spec(layout, num_layers, 1).total_bytes} bytes): "
            "raise them"
        )
    fit = int(layer_bytes // layout.page_bytes)
    if blocks <= fit:
        _log(
            logging.INFO,
            f"KTX: the device holds {fit} pages a layer, host memory and disk {blocks}: all pages stay on the device. "
            "Raise ktx.host_gib or ktx.disk_gib for more than it holds.",
        )
        return 1.0
    if fit < MIN_SLOTS + 2:  # a pool, and more headers than it has pages
        raise ValueError(
            f"ktx.overcommit='auto': the device's {device_bytes / GIB:.4g} GiB hold {fit} pages a layer, at least "
            f"{MIN_SLOTS + 2} are needed to keep others below: give --kv-cache-memory-bytes "
            f"{num_layers * (MIN_SLOTS + 2) * layout.page_bytes} or more, or set ktx.overcommit to 1"
        )
    if layout.header_bytes:
        room = min(HEADER_SHARE * layer_bytes, layer_bytes - (MIN_SLOTS + 1) * layout.payload_bytes)
        most = int(room / layout.header_bytes)
        if blocks > most:
            _log(
                logging.WARNING,
                f"KTX: host memory and disk hold {blocks} blocks, but the device's {device_bytes / GIB:.2f} GiB have "
                f"no room for so many headers beside a pool: using {most}. Raise --kv-cache-memory-bytes to use all.",
            )
            blocks = most
    return max(1.0, layout.payload_bytes / (layer_bytes / blocks - layout.header_bytes))


@functools.cache
def _log(level: int, line: str) -> None:
    """Once: every layer plans for itself."""
    logger.log(level, line)


def check_slots(slots: int, overcommit: float, fix: str) -> None:
    """Raises ValueError, with `fix` in it, if so few slots a layer can't serve."""
    if slots < MIN_SLOTS:
        raise ValueError(
            f"ktx.overcommit={overcommit:.4g} leaves {max(slots, 0)} slots a layer on the device, at least {MIN_SLOTS} "
            f"are needed: lower ktx.overcommit, or give {fix}"
        )


def device_fix(overcommit: float, layout: PageLayout, num_layers: int) -> str:
    """The device memory that makes the least pool at `overcommit`; more memory also means more blocks."""
    enough = num_layers * layout.tiered_page_bytes(overcommit) * (int((MIN_SLOTS + 1) * overcommit) + 1)
    return f"--kv-cache-memory-bytes {enough} or more"


def engine_plan(vllm_config: Any, config: KtxConfig, layout: PageLayout) -> TierPlan:
    """The plan of one rank of `vllm_config`'s engine."""
    from vllm.platforms import current_platform

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    layers = vllm_config.model_config.get_num_layers(parallel)
    blocks = cache.num_gpu_blocks_override
    on_gpu = config.kernels == "triton" or not current_platform.is_cpu()
    return plan_tiers(config, layout, layers, parallel.world_size, cache.kv_cache_memory_bytes, blocks, on_gpu)
