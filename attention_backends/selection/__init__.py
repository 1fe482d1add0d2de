"""Page selection: registries of scorers (which pages matter) and selectors (how many are read). Imports no vLLM.

One method is one small file; `docs/adding-a-scorer.md` is the recipe for another.
"""

from __future__ import annotations

from collections.abc import Callable

from .cascade import CascadeScorer
from .codes import CodesScorer
from .coverage import CoverageSelector
from .global_ratio import GlobalRatioSelector
from .mean import MeanScorer
from .oracle import OracleScorer
from .pages import ContextPages
from .quest import QuestScorer
from .scorer import Scorer
from .selector import Selector
from .settings import SparseSettings
from .top_k import TopKSelector
from .variance import VarianceScorer

SCORERS: dict[str, Callable[[], Scorer]] = {
    "variance": VarianceScorer,
    "mean": MeanScorer,
    "quest": QuestScorer,
    "codes": CodesScorer,
    "cascade": CascadeScorer,
    "oracle": OracleScorer,
}
SELECTORS: dict[str, Callable[[], Selector]] = {
    "coverage": CoverageSelector,
    "top_k": TopKSelector,
    "global_ratio": GlobalRatioSelector,
}

__all__ = [
    "SCORERS",
    "SELECTORS",
    "CascadeScorer",
    "ContextPages",
    "Scorer",
    "Selector",
    "SparseSettings",
    "make_scorer",
]


def make_scorer(settings: SparseSettings) -> Scorer:
    """The scorer that `settings.scoring` names."""
    if settings.scoring == "cascade":
        return CascadeScorer(settings.share)
    return SCORERS["variance" if settings.scoring == "header" else settings.scoring]()
