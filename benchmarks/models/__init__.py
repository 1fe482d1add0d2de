"""Models for tests, benchmarks and the demo: one real, some constructed, all prepared once and cached.

    from benchmarks import models
    folder = models.path("smollm2")        # or "retrieval", "retrieval-small", ..., or any model directory

On the command line: `python -m benchmarks.models`.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import cache
from benchmarks.models import retrieval, smollm2
from benchmarks.models.outliers import fold_key_outliers
from benchmarks.models.retrieval import PRESETS, Retrieval

NAMES = ("smollm2", *PRESETS)

__all__ = ["NAMES", "PRESETS", "Retrieval", "constructed", "fold_key_outliers", "path"]


def path(name: str | Path, verify: bool = False) -> Path:
    """The folder of a model, prepared if need be: a name of NAMES, or a directory with a config.json, as it is.

    verify: compare the cached files with their checksums first, not with their sizes alone.
    """
    if name == "smollm2":
        return cache.prepared("smollm2", smollm2.RECIPE, smollm2.build, verify)
    if name in PRESETS:
        return _retrieval(str(name), PRESETS[str(name)], verify)
    folder = Path(name).expanduser()
    if (folder / "config.json").exists():
        return folder
    raise SystemExit(f"model '{name}' is neither one of {', '.join(NAMES)} nor a directory with a config.json")


def constructed(variant: Retrieval) -> Path:
    """The folder of a retrieval model with options of your own, such as lower margins; cached by its options."""
    base = Retrieval()
    changed = "-".join(f"{key}={value}" for key, value in asdict(variant).items() if value != getattr(base, key))
    return _retrieval(f"retrieval-{changed}" if changed else "retrieval", variant, verify=False)


def _retrieval(name: str, variant: Retrieval, verify: bool) -> Path:
    recipe = {**asdict(variant), "builder": retrieval.BUILDER}
    return cache.prepared(name, recipe, partial(retrieval.build, variant), verify)
