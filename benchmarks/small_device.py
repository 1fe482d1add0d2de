"""What an engine needs that serves a context from a device smaller than its keys and values."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import engine, models
from vllm_ktx.config import DEFAULT_PAGE_SIZE
from vllm_ktx.kv_quant import PageLayout, parse_format

SPARE = 1.1  # pages beside the device, over those of the context


def layout_of(model: str, fmt: str) -> tuple[PageLayout, int]:
    """A page of a model in bf16, and how many layers have one."""
    config = json.loads((models.path(model) / "config.json").read_text())
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    layout = PageLayout(parse_format(fmt), DEFAULT_PAGE_SIZE, config.get("num_key_value_heads", heads), dim)
    return layout, config["num_hidden_layers"]


def device_bytes(model: str, tokens: int, fraction: float) -> int:
    """`fraction` of the bytes that keys and values of `tokens` take in bf16."""
    layout, layers = layout_of(model, "k4v4")
    return int(fraction * layout.dense_bytes // layout.page_size * layers * tokens)


def settings(model: str, tokens: int, fmt: str, disk: str | None = None) -> dict[str, Any]:
    """KTX settings with room for `tokens` in host memory, or on the disk of the folder `disk` beside scoring planes in
    host memory."""
    layout, layers = layout_of(model, fmt)
    blocks = SPARE * tokens / layout.page_size + 16
    planes, pages = (blocks * layers * size / 2**30 for size in (layout.scoring_bytes, layout.payload_bytes))
    if disk:
        return {"host_gib": round(1.05 * planes, 4), "disk_gib": round(1.2 * pages, 4), "disk_dir": disk}
    return {"host_gib": round(planes + pages, 4)}


def refusal(setup: engine.Engine) -> str | None:
    """What stock vLLM says when it is started so; None if it starts."""
    try:
        engine.in_fresh_process(_start, setup)
    except RuntimeError as error:
        lines = [line.split(": ", 1)[-1] for line in str(error).splitlines() if "KV cache" in line]
        return lines[-1] if lines else str(error).splitlines()[-1]
    return None


def _start(setup: engine.Engine) -> None:
    engine.prepare_environment()
    setup.start()
