"""Prometheus text of several replicas as one: every sample gets a `replica` label."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?(\s.+)")


def merge(texts: Mapping[str, str]) -> str:
    """`texts`: a replica's name to what its /metrics says. Each family keeps one HELP and TYPE and all its samples
    together, as the format demands."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        label = f'replica="{_escape(replica)}"'
        family, first_seen = "", False
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                if name != family:
                    family, first_seen = name, name not in heads
                if first_seen:
                    heads.setdefault(family, []).append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                owner = family if family and name.startswith(family) else name
                inner = f"{label},{labels}" if labels else label
                samples.setdefault(owner, []).append(f"{name}{{{inner}}}{value}")
    lines: list[str] = []
    for owner in [*heads, *(name for name in samples if name not in heads)]:
        lines += heads.get(owner, []) + samples.get(owner, [])
    return "\n".join(lines) + "\n"


def values(text: str, name: str) -> Iterator[tuple[str, float]]:
    """The samples of one name: (labels as written, value)."""
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line) if line.startswith(name) else None
        if found and found[1] == name:
            yield found[2] or "", float(found[3].split()[0])


def free_tokens(text: str) -> int | None:
    """Room in a vLLM server's KV cache, in tokens, by its own gauges; None if it doesn't publish them."""
    usage = [value for _, value in values(text, "vllm:kv_cache_usage_perc")]
    sizes = []
    for labels, _ in values(text, "vllm:cache_config_info"):
        found = [re.search(rf'\b{name}="(\d+)"', labels) for name in ("num_gpu_blocks", "block_size")]
        if all(found):
            sizes.append(math.prod(int(match[1]) for match in found if match))
    if not usage or not sizes:
        return None
    return int(sum(sizes) * (1 - sum(usage) / len(usage)))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
