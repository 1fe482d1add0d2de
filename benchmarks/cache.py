"""The cache of prepared material (models, texts): one folder each, made once, whole or not at all.

Owns the location, the manifest with sizes and SHA-256 sums, the lock between processes and the atomic rename. Knows
nothing of what a folder holds. The location is $VLLM_KTX_CACHE, by default ~/.cache/vllm-ktx.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "ktx-manifest.json"


def cache_dir() -> Path:
    """The cache's folder; not necessarily there yet."""
    return Path(os.environ.get("VLLM_KTX_CACHE") or Path.home() / ".cache" / "vllm-ktx").expanduser()


def say(text: str) -> None:
    """One line of visible progress."""
    print(f"[prepare] {text}", flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepared(name: str, recipe: dict, build: Callable[[Path], None], verify: bool = False) -> Path:
    """The cached folder `name`, made by `build(empty_folder)` if it is absent, damaged, or of another recipe.

    recipe: what determines the content (versions, options, sums), comparable as JSON. Sizes are checked at every call,
    sums only with verify=True (about half a second for half a gigabyte).
    """
    folder = cache_dir() / name
    with _locked(folder):
        reason = _fault(folder, recipe, verify)
        if reason:
            say(f"{name}: {reason}; making it in {folder}")
            started = time.monotonic()
            _make(folder, recipe, build)
            megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            say(f"{name}: ready after {time.monotonic() - started:.0f} s, {megabytes:.1f} MB")
    return folder


def _fault(folder: Path, recipe: dict, verify: bool) -> str:
    """Why the folder can't be used as it is; empty if it can."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return "not in the cache"
    except ValueError:
        return "its manifest can't be read"
    if manifest.get("recipe") != json.loads(json.dumps(recipe)):
        return "made by another recipe"
    for name, (size, digest) in manifest["files"].items():
        file = folder / name
        if not file.exists() or file.stat().st_size != size:
            return f"{name} is missing or cut short"
        if verify and sha256(file) != digest:
            return f"{name} doesn't match its checksum"
    return ""


def _make(folder: Path, recipe: dict, build: Callable[[Path], None]) -> None:
    fresh = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        build(fresh)
        files = {path.name: (path.stat().st_size, sha256(path)) for path in sorted(fresh.iterdir())}
        (fresh / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": files}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps two processes from making one folder at the same time; the second waits and then finds it made."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as error:
        raise SystemExit(
            f"the cache {folder.parent} can't be written ({error.strerror}); set VLLM_KTX_CACHE to a folder that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
