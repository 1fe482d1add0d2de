"""Checks at start-up that host memory and disk hold all blocks, and that the machine has what the settings promise.

Says which setting to change and to what. Looks at the memory limit of the control group (v1 and v2), free RAM, free
disk, /dev/shm and the limit of locked memory; changes nothing.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from .disk import DiskTier
from .tiers import PageSpec

GIB = 2**30
SPARE_RAM = GIB  # left to the process for everything else
UNLIMITED = 1 << 60
MIN_SHM = 64 << 20  # what vLLM's own queues between processes need


@dataclass(frozen=True)
class Machine:
    """What is free, in bytes (None: unknown). `ram`: the least of free RAM and what the control group still allows."""

    ram: int | None
    ram_limited_by: str
    disk: int | None
    shm: int | None
    locked: int | None


@dataclass(frozen=True)
class Verdict:
    """`errors`: the store can't be built so. `warnings`: it can, at a price. `blocks`: how many blocks it can hold.

    `host_blocks`, `disk_blocks`: what the settings provide for, before the machine's limits.
    """

    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    blocks: int
    host_blocks: int
    disk_blocks: int

    @property
    def ok(self) -> bool:
        return not self.errors


def check_capacity(
    spec: PageSpec,
    host_gib: float,
    disk_gib: float,
    disk_dir: Path | None = None,
    machine: Machine | None = None,
    pinned: bool = False,
) -> Verdict:
    """Whether `host_gib` of memory and `disk_gib` of file in `disk_dir` hold the pages of `spec`.

    `machine`: what is free; None: look. `pinned`: host memory will be locked, as for a CUDA device.
    """
    machine = look(disk_dir) if machine is None else machine
    host_bytes, disk_bytes = int(host_gib * GIB), int(disk_gib * GIB)
    host_block = spec.num_layers * spec.page_bytes
    disk_block = DiskTier.file_bytes(spec) // spec.num_blocks
    errors, warnings = [], []
    if disk_bytes and disk_dir is None:
        errors.append(f"ktx.disk_gib={disk_gib:g} needs ktx.disk_dir: name a folder on a local disk")
    if machine.ram is not None and host_bytes > (room := max(machine.ram - SPARE_RAM, 0)):
        errors.append(
            f"ktx.host_gib={host_gib:g} is more than the {_gib(room)} GiB that {machine.ram_limited_by} leaves: lower "
            f"ktx.host_gib to {_floor(room)}"
        )
        host_bytes = room
    if machine.disk is not None and disk_bytes > machine.disk:
        errors.append(
            f"ktx.disk_gib={disk_gib:g} is more than the {_gib(machine.disk)} GiB free in ktx.disk_dir={disk_dir}: "
            f"free space, name another ktx.disk_dir, or lower ktx.disk_gib to {_floor(machine.disk)}"
        )
        disk_bytes = machine.disk
    if pinned and machine.locked is not None and host_bytes > machine.locked:
        warnings.append(
            f"ktx.host_gib={host_gib:g} is more than this process may lock ({_gib(machine.locked)} GiB): it will not "
            f"be pinned and transfers are slower; raise `ulimit -l` to {-(-host_bytes // 1024)}"
        )
    if machine.shm is not None and machine.shm < MIN_SHM:
        warnings.append(
            f"/dev/shm has {machine.shm >> 20} MiB free, and vLLM's processes share memory there: start the container "
            "with --shm-size=1g or --ipc=host"
        )
    host_blocks, disk_blocks = host_bytes // host_block, disk_bytes // disk_block
    held = min(spec.num_blocks, host_blocks + disk_blocks)
    if held < spec.num_blocks:
        errors.append(_too_small(spec, held, host_blocks, disk_blocks, host_gib, disk_gib, host_block, disk_block))
    return Verdict(
        tuple(errors), tuple(warnings), held, int(host_gib * GIB) // host_block, int(disk_gib * GIB) // disk_block
    )


def _too_small(
    spec: PageSpec,
    held: int,
    host_blocks: int,
    disk_blocks: int,
    host_gib: float,
    disk_gib: float,
    host_block: int,
    disk_block: int,
) -> str:
    disk_need = _ceil((spec.num_blocks - host_blocks) * disk_block)
    host_need = _ceil((spec.num_blocks - disk_blocks) * host_block)
    return (
        f"host memory and disk hold {held} of {spec.num_blocks} blocks (ktx.host_gib={host_gib:.4g}, ktx.disk_gib="
        f"{disk_gib:.4g}): raise ktx.disk_gib to {disk_need} or ktx.host_gib to {host_need}, or lower ktx.overcommit "
        f"to {held / spec.num_blocks:.2f} of what it is"
    )


def look(disk_dir: Path | None = None, root: Path = Path("/")) -> Machine:
    """What is free on this machine. `root`: where /proc, /sys and /dev are (for tests)."""
    free = _meminfo(root / "proc/meminfo")
    group = _cgroup_room(root)
    limited = "free RAM" if group is None or (free is not None and free <= group) else "the container's memory limit"
    rooms = [room for room in (free, group) if room is not None]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Machine(
        ram=min(rooms) if rooms else None,
        ram_limited_by=limited,
        disk=None if disk_dir is None else _free_disk(disk_dir),
        shm=_free_disk(root / "dev/shm"),
        locked=None if locked == resource.RLIM_INFINITY else locked,
    )


def _meminfo(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _cgroup_room(root: Path) -> int | None:
    """What the control groups of this process still allow, the tightest of it and its parents; None: no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be the host's, which isn't there: then the mount itself is the group.
        for group in (folder, *folder.parents):
            if group == base or base in group.parents:
                rooms.append(_group_room(group, *names))
    return min((room for room in rooms if room is not None), default=None)


def _group_room(group: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= UNLIMITED:
        return None
    try:  # the page cache makes room
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(stat.get(cache, 0))
    except (OSError, ValueError):
        pass
    return max(int(most) - used, 0)


def _free_disk(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _floor(size: int) -> str:
    return f"{size * 100 // GIB / 100:g}"


def _ceil(size: int) -> str:
    return f"{-(-size * 100 // GIB) / 100:g}"
