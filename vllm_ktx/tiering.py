"""Where an engine's pages may live beside the device, decided before vLLM lays its cache out.

vLLM divides the device's memory by the bytes of a page that `customize_spec` names, `header + payload / overcommit` (on
a GPU `+ scoring planes`, where they fit), and so decides the number of blocks; every block has a place in host memory
or on disk. `auto` turns that round: as many blocks as those two hold.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .attention_backends.kernels import MIN_WAVE as MIN_SLOTS
from .attention_backends.selection import SparseSettings
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
    scores_codes: bool  # pages are scored by their codes, whose first plane is worth keeping near
    on_gpu: bool = False  # kernels read host memory themselves, and never wait for a disk
    planes: bool = False  # the device keeps that of all pages (on a GPU; elsewhere it is in host memory)

    def blocks_held(self, layout: PageLayout, num_layers: int) -> int:
        """Blocks that host memory and disk hold together, their scoring planes in host memory: if it holds those of
        most blocks on disk, as many as it does, if of fewer, none. On a GPU the larger of the two."""
        if self.on_gpu:
            on_disk = self.disk_bytes // DiskTier.file_bytes(block_spec(layout, num_layers, 1))
            return max(on_disk, self.places(layout, num_layers))
        one = page_spec(layout, num_layers, 1)
        on_disk = self.disk_bytes // DiskTier.file_bytes(one)
        plane = num_layers * one.scoring_bytes
        left = self.host_bytes - on_disk * plane
        if self.scores_codes and left >= 0:
            return on_disk + left // (one.total_bytes + plane)
        if self.scores_codes and 2 * self.host_bytes >= on_disk * plane:
            return self.host_bytes // plane
        return on_disk + self.host_bytes // one.total_bytes

    def places(self, layout: PageLayout, num_layers: int) -> int:
        """Blocks that a GPU's host memory holds."""
        return self.host_bytes // block_spec(layout, num_layers, 1).total_bytes

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


def block_spec(layout: PageLayout, num_layers: int, num_blocks: int) -> PageSpec:
    """The same for a GPU, where a block's payloads of all layers move as one."""
    return PageSpec(num_blocks, 1, num_layers * layout.payload_bytes)


def plan_tiers(
    config: KtxConfig,
    layout: PageLayout,
    num_layers: int,
    ranks: int,
    device_bytes: int | None,
    blocks: int | None = None,
    on_gpu: bool = False,
    max_model_len: int = 0,
) -> TierPlan:
    """`ranks` share what `config` gives. `device_bytes`: memory of a rank's cache, all layers; None: not known yet.
    `blocks`: how many there will be (`--num-gpu-blocks-override`). `overcommit` 1: the device holds all.

    `on_gpu`: scoring planes are on the device or nowhere. They go there if beside those of all pages the pool still has
    a slot for each page that a query may read: then a plane saves more bytes over the bus than another slot would.

    Raises ValueError, naming setting, value and fix, for what can't work.
    """
    host, disk = (int(gib * GIB / ranks) for gib in (config.host_gib, config.disk_gib))
    folder = Path(config.disk_dir) if config.disk_dir else None
    sparse = config.sparse_settings(layout.fmt, layout.page_size)
    scores_codes = sparse is not None and sparse.scoring != "header"
    plan = TierPlan(1.0, host, disk, folder, config.eviction, config.prefetch_layers, scores_codes, on_gpu)
    if not host + disk or config.overcommit == 1:
        return plan
    if on_gpu and disk:
        _check_longest(plan, layout, num_layers, max_model_len, ranks)
    if config.layer_formats().ranges:
        raise ValueError(
            "ktx.format by layer and pages off the device (ktx.host_gib, ktx.disk_gib) don't go together yet: use one "
            "format for all layers, or leave the others out"
        )
    overcommit, planes = config.overcommit, False
    layer_bytes = 0 if device_bytes is None else device_bytes // num_layers
    on_device = sparse if on_gpu and scores_codes else None
    if not isinstance(overcommit, (int, float)):
        cached = _auto_blocks(plan, layout, num_layers, device_bytes, blocks)
        if cached is None:
            return plan
        planes = on_device is not None and _planes_fit(layout, on_device, cached, layer_bytes, num_layers)
        share = layer_bytes / cached - layout.kept_bytes(planes)
        overcommit = max(1.0, layout.payload_bytes / max(share, 1.0))
    elif on_device is not None:
        fit = layer_bytes // layout.tiered_page_bytes(overcommit, planes=True)
        cached = blocks or max(fit, -(-max_model_len // layout.page_size) + 1)
        planes = _planes_fit(layout, on_device, cached, layer_bytes, num_layers, overcommit)
    page = layout.tiered_page_bytes(overcommit, planes)
    if overcommit > 1 and blocks is not None:
        enough = f"{int(MIN_SLOTS * overcommit) + 1} blocks or more"
        check_slots(layout.num_slots(blocks, blocks * page, planes), overcommit, enough)
    elif overcommit > 1 and device_bytes is not None:
        slots = layout.num_slots(layer_bytes // page, layer_bytes, planes)
        check_slots(slots, overcommit, device_fix(overcommit, layout, num_layers))
    return replace(plan, overcommit=float(overcommit), planes=planes and overcommit > 1)


def _check_longest(plan: TierPlan, layout: PageLayout, num_layers: int, max_model_len: int, ranks: int) -> None:
    """Raises ValueError if host memory can't hold one request: on a GPU none of its pages may be on disk."""
    block, places = block_spec(layout, num_layers, 1).total_bytes, plan.places(layout, num_layers)
    needed = max(-(-max_model_len // layout.page_size) + 2, MIN_SLOTS)  # one to write to, one that is vLLM's
    if places < needed:
        raise ValueError(
            f"ktx.host_gib={plan.host_bytes * ranks / GIB:.4g} holds {places} pages, and on a GPU all pages of a "
            f"running request are in host memory, {needed} by --max-model-len {max_model_len}: raise ktx.host_gib to "
            f"{math.ceil(needed * block * ranks / GIB * 100) / 100:g}, or lower --max-model-len"
        )


def _planes_fit(
    layout: PageLayout, sparse: SparseSettings, blocks: int, layer_bytes: int, num_layers: int, overcommit: float = 0
) -> bool:
    """Whether a layer's memory holds the scoring planes of all blocks and slots for what a query may read; logs what
    it would take. overcommit: 0 if it follows from the rest."""
    wanted = sparse.most_read(blocks, layout.page_size)
    enough = blocks * layout.kept_bytes(planes=True) + wanted * layout.payload_bytes
    if overcommit:
        enough = max(blocks, math.ceil(wanted * overcommit)) * layout.tiered_page_bytes(overcommit, planes=True)
    if enough <= layer_bytes:
        return True
    _log(
        logging.WARNING,
        f"KTX: pages off the device are scored by codes in host memory, over the bus: up to {layout.scoring_bytes:,} "
        "bytes a page and layer, each step. The device keeps these bytes of all pages with --kv-cache-memory-bytes "
        f"{num_layers * enough} or more; ktx.scoring='header' reads none.",
    )
    return False


def _auto_blocks(
    plan: TierPlan, layout: PageLayout, num_layers: int, device_bytes: int | None, blocks: int | None = None
) -> int | None:
    """How many blocks `overcommit: auto` makes; None: those that the device holds."""
    if device_bytes is None:
        raise ValueError(
            "ktx.overcommit='auto' needs the device's share to be known: set --kv-cache-memory-bytes, or give "
            "ktx.overcommit a number (pages for each one that the device holds)"
        )
    layer_bytes = device_bytes / num_layers
    if blocks is not None:
        return blocks
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
        return None
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
    return blocks


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
    device, longest = cache.kv_cache_memory_bytes, vllm_config.model_config.max_model_len
    return plan_tiers(config, layout, layers, parallel.world_size, device, blocks, on_gpu, longest)
