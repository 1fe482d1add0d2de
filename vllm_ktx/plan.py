"""The memory plan: what an engine's KV cache costs and holds, logged once at start-up as a table."""

from __future__ import annotations

import logging
from typing import Any

from .attention_backends.selection import SparseSettings
from .kv_quant import PageLayout
from .tiering import TierPlan

logger = logging.getLogger("vllm.ktx")


def gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def memory_plan(
    layout: PageLayout,
    num_layers: int,
    num_blocks: int | None,
    open_capacity: int,
    max_model_len: int,
    sparse: SparseSettings | None = None,
    tiers: TierPlan | None = None,
    lazy: bool = True,
) -> list[tuple[str, str]]:
    """Rows (what, value) of the plan. `num_blocks`: None while vLLM has not decided it. `lazy`: memory is taken
    when it is touched, as a host's."""
    fmt = layout.fmt
    tiered = tiers is not None and tiers.overcommit > 1
    token, dense = layout.bytes_per_token * num_layers, layout.dense_bytes / layout.page_size * num_layers
    open_page = layout.dense_bytes * num_layers
    rows = [
        ("format", f"{fmt.name} ({fmt.scales if fmt.quantized else 'model dtype'}), {num_layers} layers"),
        ("page", f"{layout.page_size} tokens, {layout.page_bytes:,} B a layer (header {layout.header_bytes:,} B)"),
        ("bytes a token", f"{token:,.0f} of {dense:,.0f} in the model dtype ({dense / token:.2f}x)"),
        ("one sequence of max_model_len", f"{max_model_len:,} tokens, {gib(token * max_model_len)}"),
        (
            "open pages",
            f"up to {open_capacity:,} x {open_page:,} B = {gib(open_capacity * open_page)}, "
            + ("touched as used" if lazy else "taken at the start (by --max-num-seqs)"),
        ),
    ]
    if sparse is None:
        rows.append(("attention", "dense: every page is read"))
    else:
        limit = {"coverage": f"coverage {sparse.coverage}, {sparse.min_pages} to {sparse.max_pages} pages"}
        chosen = limit.get(sparse.select) or f"{sparse.top_k or sparse.global_ratio} ({sparse.select})"
        rows.append(
            ("attention", f"sparse: sinks {sparse.sinks}, window {sparse.window}, then by {sparse.scoring}: {chosen}")
        )
    if num_blocks and not tiered:
        cached = f"{num_blocks:,} pages, {num_blocks * layout.page_size:,} tokens"
        rows.insert(3, ("device", f"{cached}, {gib(num_blocks * layout.page_bytes * num_layers)}"))
    if tiers is not None and tiered:
        rows[3:3] = _tier_rows(layout, num_layers, num_blocks, tiers)
    elif tiers is not None and tiers.host_bytes + tiers.disk_bytes:
        rows.insert(3, ("below the device", "nothing: overcommit is 1, the device holds every page"))
    return rows


def _tier_rows(layout: PageLayout, num_layers: int, num_blocks: int | None, tiers: TierPlan) -> list[tuple[str, str]]:
    held = tiers.blocks_held(layout, num_layers)
    below = [f"{gib(tiers.host_bytes)} host memory"] if tiers.host_bytes else []
    below += [f"{gib(tiers.disk_bytes)} disk in {tiers.disk_dir}"] if tiers.disk_bytes else []
    rows = [
        ("overcommit", f"{tiers.overcommit:.2f} pages for each that the device holds"),
        ("below the device", f"{' + '.join(below)}: {held:,} pages, {held * layout.page_size:,} tokens"),
    ]
    if num_blocks:
        device = num_blocks * layout.tiered_page_bytes(tiers.overcommit, tiers.planes)
        slots = layout.num_slots(num_blocks, device, tiers.planes)
        kept = f"headers {gib(num_blocks * layout.header_bytes * num_layers)}"
        if tiers.planes:
            kept += f", scoring planes {gib(num_blocks * layout.scoring_bytes * num_layers)}"
        rows += [
            ("pages", f"{num_blocks:,}, {num_blocks * layout.page_size:,} tokens"),
            ("device", f"{gib(device * num_layers)}: {kept}, hot pool of {slots:,} pages a layer"),
        ]
    return rows


def log_memory_plan(
    vllm_config: Any,
    layout: PageLayout,
    num_layers: int,
    open_capacity: int,
    sparse: SparseSettings | None,
    tiers: TierPlan | None = None,
) -> None:
    """Logs the effective settings and the plan, one aligned row each."""
    rows = memory_plan(
        layout,
        num_layers,
        vllm_config.cache_config.num_gpu_blocks,
        open_capacity,
        vllm_config.model_config.max_model_len,
        sparse,
        tiers,
        vllm_config.device_config.device_type == "cpu",
    )
    width = max(len(name) for name, _ in rows)
    logger.info("KTX memory plan:\n%s", "\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
