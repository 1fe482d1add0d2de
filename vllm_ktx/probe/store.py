"""Decisions of `vllm-ktx probe`, one JSON file a model, found again by what the model's files hold.

The key is a hash of config.json and of samples of every weight tensor (`model_hash`), so a fine-tune of the same size
and names is another model, and a copy in another folder the same one. Files lie in `store_dir()`. Imports neither torch
nor vLLM: every engine start looks here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.ktx")

VERSION = 1  # of the file's fields and of the hash
DEFAULT_BOUND = 2e-3
S_TOK_BOUND = 1.5  # above it in any layer INT4 keys with scales across channels fail (measured; docs/quantization.md)
_SAMPLE, _PLACES = 4096, 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True)
class Decision:
    """What the probe found. `rows`: a candidate format each, by size; `layers`: outlier figures by layer.

    `bound`: greatest mean KL divergence, in nats, that a format may have on each text. `format`: the smallest within.
    """

    model: str
    hash: str
    format: str
    bound: float
    page_size: int
    rows: list[dict[str, Any]]
    layers: list[dict[str, float]]
    details: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def row(self, fmt: str) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["format"] == fmt), None)

    @property
    def s_tok(self) -> float:
        """Of the worst layer: noise that INT4 keys per token would put on logits."""
        return max((layer["s_tok"] for layer in self.layers), default=0.0)


def store_dir() -> Path:
    """Where decisions lie: $VLLM_KTX_PROBES, or `probes` in the cache folder ($VLLM_KTX_CACHE, ~/.cache/vllm-ktx)."""
    if given := os.environ.get("VLLM_KTX_PROBES"):
        return Path(given).expanduser()
    return Path(os.environ.get("VLLM_KTX_CACHE") or Path.home() / ".cache" / "vllm-ktx").expanduser() / "probes"


def save(decision: Decision) -> Path:
    """Writes the decision whole or not at all."""
    file = _file(decision.hash)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(asdict(decision), indent=1) + "\n")
    fresh.replace(file)
    return file


def load(digest: str) -> Decision | None:
    """The stored decision; None where there is none of this version. A damaged file is said and not used."""
    file = _file(digest)
    try:
        found = json.loads(file.read_text())
        return Decision(**found) if found["version"] == VERSION else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("KTX: the stored probe %s can't be read and is not used: %s", file, error)
        return None


def find(model: str, revision: str | None = None, cache_dir: str | None = None) -> tuple[Decision | None, str]:
    """The decision stored for a model directory, file or hub name; or None and why there is none, in words."""
    folder = local_path(model, revision, cache_dir)
    try:
        digest = model_hash(folder) if folder else None
    except (OSError, ValueError) as error:  # loading the model will say more
        return None, f"the model's files can't be read ({error})"
    if digest is None:
        return None, "the model's weights are not on this disk yet"
    found = load(digest)
    return found, "" if found else "`vllm-ktx probe` has not measured this model"


def local_path(model: str, revision: str | None = None, cache_dir: str | None = None) -> Path | None:
    """Where the model's files lie on this machine; None if they don't. Never downloads."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir, revision=revision)
    except (ImportError, ValueError):  # huggingface_hub's own errors for impossible names are ValueErrors
        return None
    return Path(found).parent if isinstance(found, str) else None


def model_hash(path: Path) -> str | None:
    """32 hex digits for the model in a folder (or one weight file); None where there are no weights.

    Covers config.json, each weight file's name and size, and of each tensor (of a safetensors file; else of the whole
    file) up to 16 pieces of 4 KiB: milliseconds, where hashing all bytes would take a large model's loading time.
    """
    files = [path] if path.is_file() else next((f for p in _WEIGHTS if (f := sorted(path.glob(p)))), [])
    if not files:
        return None
    digest = hashlib.blake2b(f"ktx-probe {VERSION}".encode(), digest_size=16)
    config = path / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    for file in files:
        with file.open("rb") as data:
            size = os.fstat(data.fileno()).st_size
            digest.update(f"{file.name} {size}".encode())
            for begin, end in _spans(data.fileno(), size, file.suffix):
                for offset in _places(begin, end):
                    digest.update(os.pread(data.fileno(), min(_SAMPLE, end - offset), offset))
    return digest.hexdigest()


def _spans(descriptor: int, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """The file's header and tensors as byte ranges; the whole file where they aren't known."""
    if suffix != ".safetensors" or size < 8:
        yield 0, size
        return
    start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if start > size:
        yield 0, size
        return
    yield 0, min(start, _SAMPLE)
    header = json.loads(os.pread(descriptor, start - 8, 8))
    for name in sorted(header.keys() - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        yield start + begin, start + end


def _places(begin: int, end: int) -> Iterator[int]:
    count = min(_PLACES, -(-(end - begin) // _SAMPLE))
    last = max(begin, end - _SAMPLE)
    for i in range(count):
        yield begin + (last - begin) * i // max(1, count - 1)


def _file(digest: str) -> Path:
    return store_dir() / f"{digest}.json"
