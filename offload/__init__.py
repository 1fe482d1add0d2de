"""Where pages live: open slots, and (later) device, host and disk tiers. Imports numpy and torch only, never vLLM."""

from .open_pages import OpenPages, PageLost, StepPlan

__all__ = ["OpenPages", "PageLost", "StepPlan"]
